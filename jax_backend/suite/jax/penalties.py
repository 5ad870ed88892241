"""Terms of a loss that are made of parameters alone: Σ w², Σ |w|, priors, the entropy of a policy.

No example has a part in them, and it is over examples that statistics are summed: such a term is in the
gradient, and is no use of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from suite.jax import jaxprs, operations

Penalties = Mapping[tuple[jaxprs.Path, int], frozenset[int]]


def find_penalties(
    program: jaxprs.Program,
    leaves: Sequence[int],
    root: int | None,
    *,
    data: Set[int],
    differentiable: Set[int],
    live: Set[int],
) -> Penalties:
    """By equation, and which operand of it is such a term: the leaves that it is made of, by place.

    Args:
        leaves: values that are parameters.
        root: the loss; of outputs, as a sampled Fisher has them, there are none.
        data: values that differ between examples, or may.
        differentiable: values through which a gradient may flow to leaves.
        live: values through which one of the loss flows.
    """
    found: dict[tuple[jaxprs.Path, int], frozenset[int]] = {}
    if root is None or program.avals[root].shape != ():
        return found
    alone = _Alone(program, leaves, data, live)
    if root in alone.made_of:
        return found
    # Values that the loss is a sum of, and those of which it has anything else, besides or alone.
    terms, others = {root}, {out for _, out in program.back}
    for node in reversed(program.nodes):  # what reads a value comes before what makes it
        own = terms.intersection(node.outputs)
        is_sum = others.isdisjoint(node.outputs)
        if (is_sum and not own) or jaxprs.stops_gradients(program, node):
            continue
        places = {place for value in own if is_sum for place in _summed(node, value, differentiable)}
        for place, term in enumerate(jaxprs.given_to(node)):
            if term is None or term not in differentiable:
                continue
            if place not in places:
                others.add(term)
            elif term not in alone.made_of:
                terms.add(term)
            elif term in alone.views or term not in alone.numbers:
                continue
            elif not alone.is_by_example(node, place):
                found[node.path, place] = alone.made_of[term]
    return found


def _summed(node: jaxprs.Node, value: int, differentiable: Set[int]) -> Sequence[int]:
    """The operands that one of the outputs is a sum of, times what has no gradient."""
    op, given = node.operation, node.inputs
    if node.custom is not None:
        return ()
    if isinstance(op, (operations.Add, operations.Concatenate)):
        return range(len(given))
    if isinstance(op, (operations.Negate, operations.Reindex)) or node.name == "reduce_sum":
        return (0,)
    if node.name.startswith("psum"):  # over devices, of several values
        return (node.outputs.index(value),)
    if isinstance(op, (operations.Multiply, operations.DotGeneral)):
        return [place for place in (0, 1) if given[1 - place] not in differentiable]
    return (0,) if isinstance(op, operations.Divide) and given[1] not in differentiable else ()


class _Alone:
    """Values that are computed of parameters alone, and of numbers and what is there for each entry."""

    def __init__(
        self, program: jaxprs.Program, leaves: Sequence[int], data: Set[int], live: Set[int]
    ) -> None:
        self.made_of = {value: frozenset([i]) for i, value in enumerate(leaves)}
        self.views = set(leaves)  # one of them, re-indexed, times and plus numbers: a bias is that
        self.program, self.data, self.live = program, data, live
        self.given = {*program.inputs[len(leaves) :], *program.constants}
        self.sizes = [math.prod(aval.shape) for aval in program.avals]
        self.numbers = {value for value, size in enumerate(self.sizes) if size == 1}  # or was before
        self.as_leaves = set(leaves)  # functions of one, entry by entry
        self.wider = set[int]()  # of which an entry is there more than once: for rows, perhaps
        self.paired = set[int]()  # which have met other arrays: examples, perhaps, if products followed
        arithmetic = operations.Negate, operations.Add, operations.Multiply, operations.Divide
        of_leaves = jaxprs.dependent_values(program, leaves)
        written = set[int]()  # numbers in the program's text, whatever shape they have
        for node in program.nodes:
            op, out = node.operation, node.outputs[0]
            given = [v for v in node.inputs if v is not None]
            if isinstance(op, operations.Reindex) or node.name in operations.ENTRY_BY_ENTRY:
                for alike in (self.numbers, written):
                    if alike.issuperset(given):
                        alike.add(out)
            own = [v for v in given if v in of_leaves]
            arrays = [v for v in given if v not in written and (v in data or v not in self.numbers)]
            others = [v for v in arrays if v not in of_leaves]
            if not own or not self.made_of.keys() >= {*own} or not self.goes_on(node, own, others):
                continue
            of = frozenset[int]().union(*(self.made_of[v] for v in own))
            self.made_of.update(dict.fromkeys(node.outputs, of))
            if (
                isinstance(op, (operations.Reindex, *arithmetic))
                and len(own) == 1
                and own[0] in self.views
                and not others
            ):
                self.views.add(out)

    def is_by_example(self, node: jaxprs.Node, place: int) -> bool:
        """Whether an operand is multiplied with, or divided by, what each example has of its own."""
        if isinstance(node.operation, (operations.Add, operations.Concatenate)):
            return False
        others = (v for i, v in enumerate(node.inputs) if i != place)
        return any(v in self.data and self.program.avals[v].shape for v in others if v is not None)

    def goes_on(self, node: jaxprs.Node, own: Sequence[int], others: Sequence[int]) -> bool:
        """Whether what an operation makes is of parameters alone, if its operands `own` are."""
        op, out, avals = node.operation, node.outputs[0], self.program.avals
        by_entry = node.name in operations.ENTRY_BY_ENTRY | operations.WITHOUT_DERIVATIVE
        moves = isinstance(op, (operations.Reindex, operations.Returned))
        wider = not self.wider.isdisjoint(own)
        wider |= (moves or by_entry) and self.sizes[out] > max(self.sizes[v] for v in own)
        arrays = [v for v in others if jaxprs.dtype_is_float(avals[v]) or v in self.data]
        paired = bool(arrays) or not self.paired.isdisjoint(own)
        products = isinstance(op, (operations.DotGeneral, operations.Convolve))
        if products and len(own) < len(node.inputs) and out in self.live:
            return False  # with zeros or ones: a point that the loss makes
        chooses = node.name == "cond"
        if (isinstance(op, operations.Moved) and not chooses) or (others and wider):
            return False
        if arrays:  # targets and weights of their own entries
            alike = by_entry and all(avals[v].shape == avals[out].shape for v in (*arrays, *own))
            data = self.data & {*arrays}
            given = data <= self.given and self.as_leaves.issuperset(own)  # as they came, of its shape
            if not alike or (data and not given):
                return False
        elif paired and not by_entry:
            sums = chooses or moves or node.name.startswith("reduce_")
            sums |= isinstance(op, operations.Concatenate)
            squares = isinstance(op, operations.DotGeneral)
            if not sums and not (squares and len({self.made_of[v] for v in own}) == 1):
                return False
        if wider:
            self.wider.update(node.outputs)
        if paired:
            self.paired.update(node.outputs)
        if by_entry and self.as_leaves.issuperset(own):
            self.as_leaves.add(out)
        return True
