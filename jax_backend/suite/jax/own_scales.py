"""Numbers that a loss makes of a weight to change that weight by: norms, deviations, means of rows.

A weight norm's v / ‖v‖, a spectral norm's w / σ(w) and a standardized weight (w - mean) / deviation are
matrices whose rows or columns are so many times longer, or shifted. Their products are those of a layer.
What the gradient has besides, as the number changes with the weight, is left out of its curvature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
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
    ) -> None:
        """
        Args:
            leaves: how many of the program's inputs are parameters.
            roots: what gradients are of.
            live: values that the loss depends on.
            differentiable: values through which a gradient may flow to leaves.
            is_constant: whether a value is the same along some axis of a shape, or is one number.
        """
        self.program, self.live, self.differentiable = program, live, differentiable
        self.is_constant = is_constant
        self.makers = {out: i for i, node in enumerate(program.nodes) for out in node.outputs}
        self.places = {id(node): at for at, node in enumerate(program.nodes)}
        self.serving: dict[int, set[int]] = {}  # by place of an operation: of which leaves
        self.applied: dict[tuple[int, int], int] = {}  # of an operation and an operand: of which leaf
        self.ends = {*roots, *(out for _, out in program.back)}
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
        nodes, matrices = self.program.nodes, dict[int | None, int]()
        for i, leaf in enumerate(self.program.inputs[:leaves]):
            if len(self.program.avals[leaf].shape) > 1:
                matrices[leaf] = i
        found = []
        for at, node in enumerate(nodes):
            op, out = node.operation, node.outputs[0] if node.outputs else -1
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
        """Of one leaf: whether what leads to these operands leads to nothing else."""
        nodes, start = self.program.nodes, self.program.inputs[leaf]
        operands = [nodes[at].inputs[place] for at, place in candidates]
        before = self._nodes_before(v for v in operands if v is not None)
        made = {start}
        for at in before:
            if any(v in made for v in nodes[at].inputs):
                made.update(out for out in nodes[at].outputs if out in self.differentiable)
        serving: set[int] = set()

        def leads_there(value: int) -> bool:
            if value in self.ends:
                return False
            readers = self.readers.get(value, ())
            return all(at in serving or (at, place) in candidates for at, place in readers)

        for at in reversed(before):
            outs = [out for out in nodes[at].outputs if out in made]
            if outs and all(map(leads_there, outs)):
                serving.add(at)
        for at, place in candidates:
            value = nodes[at].inputs[place]
            if value in made and self.makers.get(value) in serving:
                self.applied[at, place] = leaf
        for at in serving:
            self.serving.setdefault(at, set()).add(leaf)

    def _nodes_before(self, values: Any) -> list[int]:
        """Places of the operations that make these values, and what they are made of, in order."""
        waiting, found = list(values), set[int]()
        while waiting:
            at = self.makers.get(waiting.pop())
            if at is None or at in found or jaxprs.stops_gradients(self.program, self.program.nodes[at]):
                continue
            found.add(at)
            given = self.program.nodes[at].inputs
            waiting += [v for v in given if v is not None and v in self.differentiable]
        return sorted(found)
