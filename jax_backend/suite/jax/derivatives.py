"""Which products of a loss's program are a function's own, and which are those of its derivatives."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from typing import Any

from suite.jax import jaxprs
from suite.jax.alike import same_values
from suite.jax.layers import Lookup
from suite.jax.operations import (
    Add,
    Convolve,
    Divide,
    DotGeneral,
    Moved,
    Multiply,
    Negate,
    Reindex,
    Returned,
)
from suite.jax.uses import Site

# Primitives of one operand, besides re-indexings, that are linear in it.
_LINEAR = {"neg", "reduce_sum", "convert_element_type", "squeeze", "copy", "cumsum", "real"}


class Derivatives:
    """What tells a program's products with a leaf apart; worked out when first asked."""

    def __init__(self, program: jaxprs.Program, arguments: Sequence[int]) -> None:
        """`arguments`: the program's inputs that are no leaves."""
        self.program, self.arguments = program, arguments

    @functools.cached_property
    def _first(self) -> list[int]:
        return same_values(self.program)

    @functools.cached_property
    def _data(self) -> list[int]:
        return _sources(self.program, (*self.arguments, *sorted(self.program.constants)))

    @functools.cached_property
    def _linear(self) -> tuple[set[int], set[int]]:
        # Without arguments data is what is closed over, and a constant may be an example's.
        constants = () if self.arguments else self.program.constants
        return _linear_values(self.program, (*self.program.inputs, *constants))

    @functools.cached_property
    def _repeated(self) -> set[int]:
        """Values that are one number repeated, as the ones of a direction are; not points in a row."""
        found: set[int] = set()
        for node in self.program.nodes:
            if isinstance(node.operation, Reindex) and found.issuperset({*node.inputs} - {None}):
                found.update(node.outputs)
        return found

    def made_of(self, site: Site) -> Any:
        """A product's leaf and input: a program that takes derivatives has some products repeatedly."""
        return site.leaf, site.view, site.use.place if site.input is None else self._first[site.input]

    def is_linear(self, site: Site) -> bool:
        """Whether what goes into a product is linear in a direction, it seems, and no direction."""
        return site.input in self._linear[0] or site.input in self._repeated

    def is_derivative(
        self, site: Site, of: Sequence[Site], beside: Container[Any] = frozenset()
    ) -> bool:
        """Whether a product is, it seems, one in derivatives of some products with its leaf.

        What goes into it is a direction, or linear in one; or it is as one of them, and made of all that
        that is made of: along a direction that is an argument, or of a higher order.

        Args:
            beside: places of those of them that the loss has derivatives of alone, which may be along
                several directions at once.
        """
        if site.input is None:
            return False
        if self.is_linear(site) or site.input in self._linear[1]:
            return True
        rows = site.use.rows
        alike = [
            v
            for v in of
            if v.view == site.view
            and (v.use.rows == rows or (v.use.place in beside and rows % max(v.use.rows, 1) == 0))
        ]
        own = self._data[site.input]
        given = [self._data[value.input] for value in alike if value.input is not None]
        return any(its & own == its for its in given)

    def leave_out(
        self, products: Sequence[Site], values: Sequence[Site], beside: Sequence[Site]
    ) -> list[Site]:
        """Products but for those in derivatives of others, of which only these are terms.

        Without biases what is linear in a direction tells them apart.

        Args:
            values: those to which a bias is added, as it is to what a layer computes.
            beside: those of them that the loss does not depend on, but for derivatives.
        """
        unread = {site.use.place for site in beside}
        of_part: dict[Any, tuple[list[Site], list[Site]]] = {}
        for which, some in enumerate((values, products)):
            for site in some:
                if not isinstance(site.use.product, Lookup):
                    of_part.setdefault(_part(site), ([], []))[which].append(site)
        valued = {value.use.place for value in values}

        def is_left_out(site: Site) -> bool:
            if isinstance(site.use.product, Lookup) or site.use.place in valued:
                return False
            own, alike = of_part[_part(site)]
            if own:
                return self.is_derivative(site, own, unread)
            return len(alike) > 1 and self.is_linear(site) and not all(map(self.is_linear, alike))

        return [site for site in products if not is_left_out(site)]


def _part(site: Site) -> Any:
    """Which part of which leaf a product is with."""
    return site.leaf, tuple(step for step in site.view.steps if step[0] == "slice")


def _sources(program: jaxprs.Program, among: Iterable[int]) -> list[int]:
    """For each value which of some values it is computed from: a bit for each of these, in order."""
    found = [0] * len(program.avals)
    for place, value in enumerate(among):
        found[value] = 1 << place
    changed = True
    while changed:
        for node in program.nodes:
            bits = 0
            for v in node.inputs:
                bits |= 0 if v is None else found[v]
            for out in node.outputs:
                found[out] |= bits
        into = [(a, found[a] | found[b]) for a, b in program.back]
        changed = any(found[a] != bits for a, bits in into)
        for a, bits in into:
            found[a] = bits
    return found


def _linear_values(program: jaxprs.Program, data: Iterable[int]) -> tuple[set[int], set[int]]:
    """Values that are linear, it seems, in constants or in 1.0: derivatives along these, of any order.

    And constants themselves.

    Args:
        data: what is no constant.
    """
    made_of_data = jaxprs.dependent_values(program, data)
    constant = {v for v in range(len(program.avals)) if v not in made_of_data} | zero_values(program)
    others: set[int] = set()  # what loops carry that starts as such, and does not go on so
    while True:
        found = _linear_but(program, constant, others)
        stop = {a for a, b in program.back if a in found and b not in found and b not in constant}
        if not stop:
            return found, constant
        others |= stop


def _linear_but(program: jaxprs.Program, constant: set[int], others: set[int]) -> set[int]:
    """`_linear_values` that are no constants, where loops go on as they start, but for `others`."""
    found: set[int] = set()

    def is_linear(node: jaxprs.Node) -> bool:
        inputs = node.inputs
        own = [v in found for v in inputs]
        fine = [a or v is None or v in constant for a, v in zip(own, inputs, strict=True)]
        if node.name in ("mul", "dot_general", "conv_general_dilated"):
            one = node.name == "mul" and 1.0 in (program.number(node, i) for i in (0, 1))
            # Derivatives of higher order are products of several.
            return any(own) or one or (any(fine) and None not in inputs)
        if node.name == "div":
            return own == [True, False]
        if node.name in ("add", "sub", "add_any"):
            return any(own) and None not in inputs and all(fine)
        if node.name in ("select_n", "concatenate", "pad", "dynamic_update_slice", "stack"):
            skipped = node.name == "select_n"  # what chooses
            return any(own[skipped:]) and all(fine[skipped:])
        if isinstance(node.operation, Moved):
            return all(fine)
        alone = isinstance(node.operation, Reindex | Returned) or node.name in _LINEAR
        return alone and own[:1] == [True] and all(fine)

    for node in program.nodes:
        out = node.outputs[0]
        if out not in constant and out not in others and is_linear(node):
            found.update(node.outputs)
    return found


def zero_values(program: jaxprs.Program) -> set[int]:
    """Values that are 0 as the program is written, and what is made of them alone."""
    found: set[int] = set()

    def is_zero(node: jaxprs.Node, i: int) -> bool:
        value = node.inputs[i]
        return value in found if value is not None else program.number(node, i) == 0

    for node in program.nodes:
        op, zeros = node.operation, [is_zero(node, i) for i in range(len(node.inputs))]
        if isinstance(op, (Multiply, DotGeneral, Convolve)):
            is_all = any(zeros[:2])
        elif isinstance(op, (Reindex, Negate, Divide)):
            is_all = zeros[:1] == [True]
        else:
            is_all = isinstance(op, Add) and all(zeros)
        if is_all:
            found.update(node.outputs)
    return found
