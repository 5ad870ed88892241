"""What becomes of rows that a loss looks up in a table: each example's, or one for all of them.

A row that is looked up once for all examples, as positions are, has the examples' summed gradient. Where
it is added to what each example has, the sum has the gradients of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from suite.jax import jaxprs, operations
from suite.jax.activations import Activations, LookedUp
from suite.jax.layers import Lookup
from suite.jax.uses import Origin, Site, Uses
from suite.jax.views import Shape


class Lookups:
    """Told of each lookup, and of each operation with no leaf."""

    def __init__(
        self,
        program: jaxprs.Program,
        uses: Uses,
        activations: Activations,
        *,
        of_data: Set[int],
        of_arguments: Set[int],
        readers: Mapping[int, int],
    ) -> None:
        """
        Args:
            of_data: values that are computed from what is no parameter.
            of_arguments: those computed from arguments that may have an axis for examples.
            readers: how many read a value.
        """
        self.program, self.uses, self.activations = program, uses, activations
        self.of_data, self.of_arguments, self.readers = of_data, of_arguments, readers
        self.rows: dict[int, Origin] = {}  # what known indices look up, moved about

    def found(self, node: jaxprs.Node, site: Site, origin: Origin) -> None:
        """A lookup is a use of a table."""
        out, product = node.outputs[0], site.use.product
        assert isinstance(product, Lookup)
        if site.input not in self.of_arguments:
            self.rows[out] = origin
        if self._may_be_for_all(node, product, site.input):
            features = product.offset_axes[0] if product.offset_axes else None
            self.activations.looked_up[out] = (LookedUp(site, features),)

    def _may_be_for_all(self, node: jaxprs.Node, product: Lookup, index: int | None) -> bool:
        """Whether what a lookup finds may be for all examples, as positions are.

        What arguments look up is each example's, whatever it is broadcast along later, but where they
        have an axis of length 1 for the examples.
        """
        if len(product.offset_axes) > 1 or node.custom is not None or index is None:
            return False
        return index not in self.of_arguments or self._shape(index)[:1] == (1,)

    def weigh(self, node: jaxprs.Node) -> None:
        """Rule out tables of which a weight is made: of products with what each example has.

        Rows that are the same for all examples have the examples' summed gradient. They are followed
        through functions of them alone, and one at a time.
        """
        op = node.operation
        is_real = jaxprs.dtype_is_float(self.program.avals[node.outputs[0]])
        if not isinstance(op, operations.DotGeneral):
            found = [v for v in node.inputs if v in self.rows]
            others = [v for v in node.inputs if v in self.of_data and v not in self.rows]
            if len(found) == 1 and not others and len(node.outputs) == 1:
                self.rows[node.outputs[0]] = self.rows[found[0]]
            elif len(found) == 1 and isinstance(op, operations.Multiply) and not is_real:
                why = "a lookup of what then multiplies complex data"
                self.uses.rule_out(self.rows[found[0]], why)
            return
        for i, (value, other) in enumerate((node.inputs[:2], node.inputs[1::-1])):
            origin = None if value is None else self.rows.get(value)
            if origin is None or other not in self.of_data or other in self.rows:
                continue
            if op.batch[i] and other not in self.of_arguments:  # of examples that are closed over
                continue
            assert other is not None
            both = len(op.contracted[1 - i]) + len(op.batch[1 - i])
            if len(self._shape(other)) > both:  # of however many examples
                self.uses.rule_out(origin, "a lookup of what is then a product's weight")

    def add_up(self, node: jaxprs.Node) -> None:
        """See to it that a lookup once for all examples has the gradients of each."""
        out, carried = node.outputs[0], []
        if not isinstance(node.operation, operations.Add) or node.custom is not None:
            return
        # There the lookup is one for all devices, and what it is added to differs between them.
        if self.program.is_mapped(node):
            return
        for value in node.inputs:
            if value is None or self.readers[value] != 1:
                continue
            (own, *rest), (count, *others) = (self._shape(v) or (1,) for v in (value, out))
            copies = math.prod((count, *others)) // max(math.prod((own, *rest)), 1)
            for one in self.activations.looked_up.get(value, ()):
                if self.activations.is_for_all(out):
                    axis = one.features
                    whole = axis is None or self._shape(value)[axis] == self._shape(out)[axis]
                    if whole:
                        carried.append(
                            one._replace(copies=one.copies * copies * one.examples, examples=1)
                        )
                    continue
                if rest != others:
                    continue
                examples = max(one.examples, count if own == 1 else 1)
                if examples == 1:
                    carried.append(one)
                elif one.site.loops == node.loops:
                    self._take_apart(one._replace(examples=examples), node)
        if carried:
            self.activations.looked_up[out] = tuple(carried)

    def _take_apart(self, found: LookedUp, node: jaxprs.Node) -> None:
        """A lookup's inputs where they are, and its outputs where they meet what each example has."""
        site, out = found.site, node.outputs[0]
        place = next(i for i, other in enumerate(self.uses.sites) if other is site)
        inputs = site.use._replace(
            half="inputs", shared_by=found.examples * found.copies, rows=0, examples=0, once=False
        )
        rows = math.prod(self._shape(out)) // max(site.block[0], 1)
        outputs = site.use._replace(
            path=node.path,
            out=0,
            x_operand=None,
            half="outputs",
            once=False,
            features=found.features,
            rows=rows,
            examples=rows,
        )
        self.uses.sites[place] = site._replace(use=inputs)
        self.uses.sites.append(site._replace(use=outputs, input=None, value=out))

    def _shape(self, value: int) -> Shape:
        return self.program.avals[value].shape
