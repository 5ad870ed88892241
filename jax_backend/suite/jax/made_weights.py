"""What a loss makes of a weight before its product, and of which the product's statistics still tell.

Rows or columns that are multiplied, by whatever is no example's, are so many times longer, and a mask
may leave entries out. All else that a matrix is multiplied with entry by entry is neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import jax
import numpy as np

from suite.jax import jaxprs, operations
from suite.jax.probes import RowScale
from suite.jax.uses import Origin, Scaled
from suite.jax.views import Shape, Step, View, entries, matrices


class MadeWeights:
    """Asked of each operation with a view of a leaf."""

    def __init__(self, program: jaxprs.Program, differentiable: Set[int], of_examples: Set[int]) -> None:
        """
        Args:
            differentiable: values through which a gradient may flow to leaves.
            of_examples: those that differ between examples.
        """
        self.program, self.differentiable, self.of_examples = program, differentiable, of_examples
        self.makers = {out: node for node in program.nodes for out in node.outputs}
        self._of_leaf: dict[int, set[int]] = {}

    def shape(self, value: int) -> Shape:
        return self.program.avals[value].shape

    def by_row(self, node: jaxprs.Node, known: Sequence[Origin | None]) -> Origin | None:
        """A matrix that is multiplied, row by row or column by column, with what is no example's."""
        divides = isinstance(node.operation, operations.Divide)
        if not isinstance(node.operation, operations.Multiply) and not divides:
            return None
        for place, origin in enumerate(known[:1] if divides else known):
            other = node.inputs[1 - place]
            if origin is None or other is None or not self._is_matrix(node, place, origin):
                continue
            shape = self.shape(node.outputs[0])
            constant = self.constant_axes(other, shape)
            itself = other in self.made_of_leaf(origin.leaf) and other in self.differentiable
            if not constant or other in self.of_examples or itself:
                continue
            mask = not divides and self.is_mask(other)
            by = Scaled(node.path, 1 - place, divides, constant, mask, shape, len(origin.inner))
            return origin._replace(scaled=(*origin.scaled, by))
        return None

    def _is_matrix(self, node: jaxprs.Node, place: int, origin: Origin) -> bool:
        """Whether an operand is a matrix, or a stack, of a leaf's numbers, and the result is alike."""
        (operand, out), avals = (node.inputs[place], node.outputs[0]), self.program.avals
        assert operand is not None
        alike = len(avals[out].shape) > 1 and avals[operand].shape == avals[out].shape
        return alike and not origin.widened and node.custom is None and jaxprs.dtype_is_float(avals[out])

    def constant_axes(self, value: int, shape: Shape) -> Shape:
        """Axes, longer than 1, along which a value does not change when it is broadcast to `shape`."""
        if len(self.shape(value)) != len(shape):
            return ()
        steps: list[Step] = [("broadcast", (shape, tuple(range(len(shape)))))]
        node = self.makers.get(value)
        while node is not None and isinstance(node.operation, operations.Reindex):
            if node.inputs[0] is None:
                return ()
            steps += [] if node.operation.step is None else [node.operation.step]
            value = node.inputs[0]
            node = self.makers.get(value)
        index = entries(self.shape(value), (), (), steps[::-1])
        sides = enumerate(shape)
        return tuple(a for a, n in sides if n > 1 and (index == index.take([0], a)).all())

    def made_of_leaf(self, leaf: int) -> set[int]:
        if leaf not in self._of_leaf:
            self._of_leaf[leaf] = jaxprs.dependent_values(self.program, {self.program.inputs[leaf]})
        return self._of_leaf[leaf]

    def leaves_out(self, node: jaxprs.Node, place: int, origin: Origin) -> bool:
        """Whether some entries of a matrix become constants, as in w * mask and where(mask, w, 0)."""
        if not self._is_matrix(node, place, origin):
            return False
        op = node.operation
        beside = [v for i, v in enumerate(node.inputs) if i != place]
        if isinstance(op, operations.Multiply):
            return self.is_mask(beside[0])
        if not isinstance(op, operations.Select) or place == 0 or beside[0] is None:
            return False
        alike = self.shape(beside[0]) == self.shape(node.outputs[0])
        return alike and not any(v in self.differentiable for v in beside[1:])

    def is_mask(self, value: int | None) -> bool:
        """Whether all its numbers are known to be 0 or 1."""
        if value is None:
            return False
        if self.program.avals[value].dtype == np.bool_:
            return True
        if value in self.program.known:
            return _is_zeros_and_ones(self.program.known[value])
        node = self.makers.get(value)
        if node is None or node.custom is not None:
            return False
        op, chosen = node.operation, isinstance(node.operation, operations.Select)
        if isinstance(op, operations.Reindex) and node.inputs[0] is None:
            return self.program.numbers[node.path, 0] in (0, 1)
        if isinstance(op, operations.Add) and op.signs == (1, -1) and node.inputs[0] is None:
            return self.program.numbers[node.path, 0] == 1 and self.is_mask(node.inputs[1])
        if chosen or isinstance(op, (operations.Reindex, operations.Multiply)):
            return all(map(self.is_mask, node.inputs[chosen:]))
        return False


def row_scale(by: Scaled, origin: Origin, steps: Sequence[Step], axes: Any) -> RowScale | None:
    """What a product's matrices are multiplied with; None: it is neither by row nor by column.

    Args:
        steps, axes: from what the leaf has become to matrices.
    """
    whole: Step = ("broadcast", (by.shape, tuple(range(len(by.shape)))))
    view = View((whole, *origin.inner[by.before :], *steps), axes)
    sides = [1 if axis in by.constant else n for axis, n in enumerate(by.shape)]
    each = np.arange(math.prod(sides), dtype=np.int32).reshape(sides)
    index = matrices(each, view)
    of_outputs = bool((index == index[:, :, :1]).all())
    if not of_outputs and not (index == index[:, :1]).all():
        return None
    return RowScale(by.path, by.operand, by.divides, view, of_outputs)


def _is_zeros_and_ones(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return False
    numbers = np.asarray(x)
    return bool(((numbers == 0) | (numbers == 1)).all())
