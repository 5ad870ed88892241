"""Products of a leaf that the loss has derivatives of and does not depend on: y = x w + b beside dy/dx.

They tell which of the leaf's other products are terms of y's derivatives. Products with 0, with which
these start, are none.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from suite.jax import jaxprs, operations
from suite.jax.derivatives import zero_values
from suite.jax.layers import Convolution, Dense
from suite.jax.uses import Origin, Site, Uses


class Beside:
    """Told of each operation that the loss does not depend on."""

    def __init__(
        self, program: jaxprs.Program, uses: Uses, *, live: Set[int], of_data: Set[int]
    ) -> None:
        """
        Args:
            live: values that the loss depends on.
            of_data: values that are computed from what is no parameter.
        """
        self.uses, self.live, self.of_data = uses, live, of_data
        self.products: dict[int, Site] = {}
        self.passed_on: dict[int, Site] = {}  # and what they are moved to
        self.zeros = zero_values(program)  # seeds of derivatives of higher order, perhaps
        self.near: set[int] = set()  # made of what it depends on, and no other data: sin z, beside cos z

    def follow(self, node: jaxprs.Node, known: Sequence[Origin | None]) -> None:
        """Note what is made of values that the loss depends on, and of no other data."""
        first = next((v for v in node.inputs if v is not None), -1)
        site = self.products.get(first) or self.passed_on.get(first)
        to_number = isinstance(node.operation, operations.Add) and None in node.inputs
        if site is not None and (to_number or isinstance(node.operation, operations.Reindex)):
            self.passed_on[node.outputs[0]] = site
        pairs = zip(node.inputs, known, strict=True)
        given = [v for v, origin in pairs if v is not None and origin is None]
        far = [v for v in given if v not in self.live and v not in self.near]
        if len(far) < len(given) and not any(v in self.of_data for v in far):
            self.near.update(node.outputs)

    def found(self, site: Site) -> None:
        """A product with a leaf, on which the loss does not depend."""
        if site.value in self.near:
            self.products[site.value] = site

    def added(self, node: jaxprs.Node) -> None:
        """A bias is added to what may be one of these products."""
        products = self.products | self.passed_on
        self.uses.beside += [products[v] for v in node.inputs if v is not None and v in products]

    def settle(self) -> None:
        """Products that the loss depends on in no way, as of a head for another, are no terms of it.

        Of what it has derivatives of there are other products with the leaf, to which no bias is added,
        or if that is added to none, of a direction or of what is linear in one.
        """
        valued = self._valued()
        others = [site for site in self.uses.sites if site.use.place not in valued]
        derived = {site.leaf for site in others}
        self.uses.beside = [site for site in self.uses.beside if site.leaf in derived]
        biased = {*valued.values(), *(site.leaf for site in self.uses.beside)}
        alone = [site for site in self.products.values() if site.leaf in derived - biased]
        if alone:
            told = self.uses.derivatives
            along = {site.leaf for site in others if told.is_derivative(site, [])}
            alone = [site for site in alone if site.leaf in along]
            self.uses.beside += [site for site in alone if not told.is_linear(site)]

    def leave_out_zeros(self) -> None:
        """Products with 0 are no uses, in derivatives of a leaf's others, which have a bias, or for all.

        A cell that is unrolled begins with zeros, which have no axis for examples under `vmap`: what
        comes to that product is the examples' summed gradient, and its part of the weight's is 0.
        """
        valued = self._valued()
        leaves = {*valued.values(), *(site.leaf for site in self.uses.beside)}

        def is_seed(site: Site) -> bool:
            product = isinstance(site.use.product, (Dense, Convolution)) and site.input in self.zeros
            return product and site.use.place not in valued and (site.leaf in leaves or site.use.once)

        self.uses.sites = [site for site in self.uses.sites if not is_seed(site)]

    def _valued(self) -> dict[tuple[jaxprs.Path, int], int]:
        """Products that a bias is added to, by place: the leaf."""
        return {use.site.use.place: use.site.leaf for own in self.uses.biases.values() for use in own}
