"""Numbers that a loss makes of a weight to change that weight by: norms, deviations, means of rows.

A weight norm's v / ‖v‖, a spectral norm's w / σ(w) and a standardized weight (w - mean) / deviation are
matrices whose rows or columns are so many times longer, or shifted. Their products are those of a layer.
What the gradient has besides, as the number changes with the weight, is left out of its curvature.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

from suite.jax import jaxprs, operations

_CHANGES = (operations.Multiply, operations.Divide, operations.Add)


class OwnScales:
    """Which operations compute such numbers, and which apply them."""

    def __init__(
        self,
        program: jaxprs.Program,
        leaves: int,
        *,
        roots: Sequence[int],
        live: Set[int],
        differentiable: Set[int],
        is_constant: Callable[[int, Any], bool],
        is_data: Callable[[int], bool],
    ) -> None:
        """
        Args:
            leaves: how many of the program's inputs are parameters.
            roots: what gradients are of.
            live: values that the loss depends on.
            differentiable: values through which a gradient may flow to leaves.
            is_constant: whether a value is the same along some axis of a shape, or is one number.
            is_data: whether a value has an axis of examples.
        """
        self.program, self.live, self.differentiable = program, live, differentiable
        self.is_constant, self.is_data = is_constant, is_data
        self.makers = {out: i for i, node in enumerate(program.nodes) for out in node.outputs}
        self.places = {id(node): at for at, node in enumerate(program.nodes)}
        self.serving: dict[int, set[int]] = {}  # by place of an operation: of which leaves
        self.applied: dict[tuple[int, int], int] = {}  # of an operation and an operand: of which leaf
        self.ends = {*roots, *(out for _, out in program.back)}
        self.matrices: dict[int | None, int] = {}  # values that are a leaf, changed at most: which
        candidates = self._candidates(leaves)
        self.readers = self._read() if candidates else {}
        for leaf in sorted({leaf for leaf, _, _ in candidates}):
            self._settle(leaf, {(at, place) for own, at, place in candidates if own == leaf})

    def serves(self, node: jaxprs.Node) -> Set[int]:
        """The leaves of which an operation computes such numbers, and nothing else."""
        return self.serving.get(self.places[id(node)], set())

    def leaf_of(self, node: jaxprs.Node, place: int) -> int | None:
        """The leaf that an operation changes by such numbers, which are its operand at `place`."""
        return self.applied.get((self.places[id(node)], place))

    def held(self) -> dict[tuple[jaxprs.Path, int], int]:
        """By equation, and which operand of it is such numbers: the leaf that it changes."""
        return {(self.program.nodes[at].path, place): leaf for (at, place), leaf in self.applied.items()}

    def _candidates(self, leaves: int) -> list[tuple[int, int, int]]:
        """(leaf, operation, operand) where what is computed of a leaf may change it."""
        nodes, matrices = self.program.nodes, self.matrices
        for i, leaf in enumerate(self.program.inputs[:leaves]):
            if len(self.program.avals[leaf].shape) > 1:
                matrices[leaf] = i
        found = []
        for at, node in enumerate(nodes):
            op, out = node.operation, node.outputs[0]
            if out not in self.live or node.custom is not None or not node.inputs:
                continue
            first = node.inputs[0]
            if isinstance(op, (operations.Reindex, operations.LoopSlice, operations.Negate)):
                if first in matrices:
                    matrices[out] = matrices[first]
                continue
            if not isinstance(op, _CHANGES):
                continue
            for place, value in enumerate(node.inputs):
                if value not in matrices or (isinstance(op, operations.Divide) and place):
                    continue
                if isinstance(op, operations.Add) and op.signs[place] < 0:
                    continue
                other = node.inputs[1 - place]
                shape = self.program.avals[out].shape
                if value is None or self.program.avals[value].shape != shape:
                    continue
                if other is not None and not self.is_constant(other, shape):
                    continue
                matrices[out] = matrices[value]
                if other in self.differentiable:
                    found.append((matrices[value], at, 1 - place))
        return found

    def _read(self) -> dict[int, list[tuple[int, int]]]:
        """By value, the operations through which a gradient may come to it, and as which operand."""
        found: dict[int, list[tuple[int, int]]] = {}
        for at, node in enumerate(self.program.nodes):
            live = any(out in self.live for out in node.outputs)
            if not live or jaxprs.stops_gradients(self.program, node):
                continue
            for place, value in enumerate(node.inputs):
                if value is not None:
                    found.setdefault(value, []).append((at, place))
        return found

    def _settle(self, leaf: int, candidates: set[tuple[int, int]]) -> None:
        """Of one leaf: which operands are such numbers, whose computation leads to nothing else."""
        nodes = self.program.nodes
        cones = {each: self._nodes_before(nodes[each[0]].inputs[each[1]]) for each in candidates}
        before = sorted({at for own in cones.values() for at in own})
        made = {self.program.inputs[leaf]}
        for at in before:
            if any(v in made for v in nodes[at].inputs):
                made.update(out for out in nodes[at].outputs if out in self.differentiable)
        # What is still the weight is followed as such.
        numbers = made - self.matrices.keys()
        makers: dict[tuple[int, int], set[int]] = {
            each: {at for at in own if any(out in numbers for out in nodes[at].outputs)}
            for each, own in cones.items()
            if nodes[each[0]].inputs[each[1]] in numbers
        }
        serving, left = set[int](), -1
        while len(makers) != left:
            left = len(makers)
            serving = self._serving(before, made, makers)
            makers = {
                each: own
                for each, own in makers.items()
                if own and own <= serving and not any(map(self._has_data, own))
            }
        self.applied |= dict.fromkeys(makers, leaf)
        for at in serving if makers else ():
            self.serving.setdefault(at, set()).add(leaf)

    def _serving(
        self, before: Sequence[int], made: Set[int], operands: Collection[tuple[int, int]]
    ) -> set[int]:
        """Those of the operations `before` whose outputs that are `made` of a leaf all lead there."""
        found: set[int] = set()

        def leads_there(value: int) -> bool:
            if value in self.ends:
                return False
            readers = self.readers.get(value, ())
            return all(at in found or (at, place) in operands for at, place in readers)

        for at in reversed(before):
            outs = [out for out in self.program.nodes[at].outputs if out in made]
            if outs and all(map(leads_there, outs)):
                found.add(at)
        return found

    def _has_data(self, at: int) -> bool:
        """Whether something that examples have each of their own goes into an operation."""
        given = [v for v in self.program.nodes[at].inputs if v is not None]
        return any(self.is_data(v) for v in given)

    def _nodes_before(self, value: int | None) -> list[int]:
        """Places of the operations that make a value, and what it is made of, in order."""
        waiting, found = [value], set[int]()
        while waiting:
            at = self.makers.get(waiting.pop())  # type: ignore[arg-type]
            if at is None or at in found or jaxprs.stops_gradients(self.program, self.program.nodes[at]):
                continue
            found.add(at)
            given = self.program.nodes[at].inputs
            waiting += [v for v in given if v is not None and v in self.differentiable]
        return sorted(found)
