"""What a loss makes of a weight before its product, and of which the product's statistics still tell.

Rows or columns that are multiplied, by whatever is no example's, are so many times longer, and a mask
may leave entries out. All else that a matrix is multiplied with entry by entry is neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from suite.jax import jaxprs, operations
from suite.jax.own_scales import OwnScales
from suite.jax.probes import Mask, RowScale
from suite.jax.uses import Made, Origin
from suite.jax.views import Shape, Step, View, entries, matrices

_PRODUCTS = (operations.DotGeneral, operations.Convolve, operations.ByHand)


class MadeWeights:
    """Asked of each operation with a view of a leaf."""

    def __init__(
        self,
        program: jaxprs.Program,
        *,
        leaves: int,
        roots: Sequence[int],
        live: Set[int],
        differentiable: Set[int],
        of_examples: Set[int],
        batch: int,
        one_example: bool,
        origins: Mapping[int, Origin],
        is_number: Callable[[int], bool],
    ) -> None:
        """
        Args:
            leaves: how many of the program's inputs are parameters.
            roots: what gradients are of.
            live: values that the loss depends on.
            differentiable: values through which a gradient may flow to leaves.
            of_examples: those that differ between examples.
            batch: how many examples there are.
            one_example: whether the loss's arguments are one example.
            origins: by value, as far as they are known.
            is_number: whether a value is one number, broadcast.
        """
        self.program, self.live, self.differentiable = program, live, differentiable
        self.of_examples, self.is_number = of_examples, is_number
        self.batch, self.one_example, self.origins = batch, one_example, origins
        self.makers = {out: node for node in program.nodes for out in node.outputs}
        self.readers: dict[int, list[jaxprs.Node]] = {}
        for node in program.nodes:
            for value in {v for v in node.inputs if v is not None}:
                self.readers.setdefault(value, []).append(node)
        self.own = OwnScales(
            program,
            leaves,
            roots=roots,
            live=live,
            differentiable=differentiable,
            is_constant=lambda value, shape: (
                self.shape(value) == () or bool(self._constant_axes(value, shape))
            ),
            is_data=lambda value: value in of_examples and batch in self.shape(value),
        )
        self._of_leaf: dict[int, set[int]] = {}
        self._leading: dict[int, bool] = {}

    def shape(self, value: int) -> Shape:
        return self.program.avals[value].shape

    def after(self, node: jaxprs.Node, known: Sequence[Origin | None]) -> Origin | None:
        """What an operation makes of a matrix whose products will still tell; None: it does not.

        Args:
            known: of each operand.
        """
        op = node.operation
        divides, chooses, adds = (
            isinstance(op, kind) for kind in (operations.Divide, operations.Select, operations.Add)
        )
        if not (divides or chooses or adds or isinstance(op, operations.Multiply)):
            return None
        if node.custom is not None:
            return None
        for place, origin in enumerate(known):
            others = [i for i in range(len(node.inputs)) if i != place]
            if origin is None or origin.slope or (divides and place) or (chooses and not place):
                continue
            # What is masked, shifted or times a number and then a leaf is rather an activation: codes.
            changed = origin.shifted or origin.multipliers or any(made.is_mask for made in origin.made)
            if changed and any(known[i] is not None for i in others):
                continue
            if not self._is_matrix(node, place, origin) or not self.leads_to_products(node.outputs[0]):
                continue
            if adds:
                if self.own.leaf_of(node, 1 - place) == origin.leaf:
                    return origin
                continue
            made = (
                self._chosen(node, place) if chooses else self._times(node, place, origin.leaf, divides)
            )
            if made is not None:
                return origin._replace(made=(*origin.made, made._replace(before=len(origin.inner))))
        return None

    def is_shift(self, node: jaxprs.Node, place: int) -> bool:
        """Whether what has no derivative is added, as in w + stop_gradient(round(w) - w)."""
        if not isinstance(node.operation, operations.Add) or node.custom is not None:
            return False
        operand, out = node.inputs[place], node.outputs[0]
        if operand is None or self.shape(operand) != self.shape(out):
            return False
        return node.inputs[1 - place] not in self.differentiable and all(
            jaxprs.dtype_is_float(self.program.avals[value]) for value in (operand, out)
        )

    def is_perturbed(self, node: jaxprs.Node, place: int, origin: Origin) -> bool:
        """Whether a leaf is moved by what has its shape before it is used, as by learned noise."""
        if not isinstance(node.operation, operations.Add) or node.custom is not None:
            return False
        (operand, other), out = (node.inputs[i] for i in (place, 1 - place)), node.outputs[0]
        if operand is None or other is None or self._may_have_its_gradient(other, origin.leaf):
            return False
        plain = not origin.widened and origin.slope is None and node.operation.signs[place] > 0
        shape, is_real = self.shape(operand), jaxprs.dtype_is_float(self.program.avals[out])
        if not plain or shape != self.shape(out) or not is_real:
            return False
        if len(shape) == 1:  # of a bias, if it is not one for each example
            return not self.one_example and shape != (self.batch,)
        return self.leads_to_products(out)

    def _may_have_its_gradient(self, value: int, leaf: int) -> bool:
        """Whether a function with a derivative of its own, which need not read it, is given a leaf."""
        waiting, seen = [value], {value}
        while waiting:
            node = self.makers.get(waiting.pop())
            if node is None:
                continue
            given = {v for v in jaxprs.given_to(node) if v is not None and v in self.differentiable}
            own = [self.origins[v].leaf for v in given if v in self.origins]
            if isinstance(node.operation, operations.Returned) and leaf in own:
                return True
            waiting += given - seen
            seen |= given
        return False

    def is_mask_of(self, node: jaxprs.Node, place: int) -> bool:
        """Whether a choice is between entries of the operand and what has no derivative."""
        which, *cases = node.inputs
        if which is None or self.shape(which) != self.shape(node.outputs[0]):
            return False
        others = [v for i, v in enumerate(cases, start=1) if i != place]
        return not any(
            v in self.differentiable or (v in self.of_examples and not self.is_number(v))
            for v in others
            if v is not None
        )

    def _is_matrix(self, node: jaxprs.Node, place: int, origin: Origin) -> bool:
        """Whether an operand is a matrix, or a stack, of a leaf's numbers, and the result is alike."""
        (operand, out), avals = (node.inputs[place], node.outputs[0]), self.program.avals
        assert operand is not None
        alike = len(avals[out].shape) > 1 and avals[operand].shape == avals[out].shape
        return alike and not origin.widened and jaxprs.dtype_is_float(avals[out])

    def leads_to_products(self, value: int) -> bool:
        """Whether products, and nothing else, read what is made of a value by such operations."""
        if value not in self._leading:
            self._leading[value] = self._is_leading(value)
        return self._leading[value]

    def _is_leading(self, value: int) -> bool:
        makes = (operations.Multiply, operations.Divide, operations.Select, operations.Negate)
        readers = [
            node
            for node in self.readers.get(value, ())
            if (value not in self.live or any(out in self.live for out in node.outputs))
            and not jaxprs.stops_gradients(self.program, node)
            and not self.own.serves(node)
        ]
        for node in readers:
            op, out = node.operation, node.outputs[0]
            shifts = isinstance(op, operations.Add) and (
                any(self.own.leaf_of(node, place) is not None for place in (0, 1))
                or self._is_shifted(node, value)
            )
            goes_on = isinstance(op, (operations.Reindex, operations.LoopSlice)) or (
                (isinstance(op, makes) or shifts) and self.shape(out) == self.shape(value)
            )
            if not isinstance(op, _PRODUCTS) and not (goes_on and self.leads_to_products(out)):
                return False
        return bool(readers)

    def _is_shifted(self, node: jaxprs.Node, value: int) -> bool:
        """Whether what is added to a value has no derivative, and is the same for all examples."""
        others = (v for v in node.inputs if v is not None and v != value)
        return self.is_shift(node, node.inputs.index(value)) and self.of_examples.isdisjoint(others)

    def _chosen(self, node: jaxprs.Node, place: int) -> Made | None:
        """`where(mask, w, numbers)`."""
        if not self.is_mask_of(node, place):
            return None
        return Made(node.path, 0, False, (), True, self.shape(node.outputs[0]), 0, place - 1)

    def _times(self, node: jaxprs.Node, place: int, leaf: int, divides: bool) -> Made | None:
        """`w * mask`, or times what is one number in each row or column."""
        other, shape = node.inputs[1 - place], self.shape(node.outputs[0])
        is_own = self.own.leaf_of(node, 1 - place) == leaf
        if other is None or (other in self.of_examples and not is_own):
            return None
        if other in self.differentiable and other in self._made_of(leaf) and not is_own:
            return None
        constant = self._constant_axes(other, shape)
        if is_own and self.shape(other) == ():
            constant = tuple(axis for axis, n in enumerate(shape) if n > 1)
        is_mask = not divides and self._is_mask(other)
        if not constant and not is_mask:
            return None
        return Made(node.path, 1 - place, divides, constant, is_mask, shape)

    def axes_of_scale(self, value: int, origin: Origin, shape: Shape) -> Shape | None:
        """Along which axes a value does not change that rows or columns of a leaf are multiplied with.

        None: it is an example's, or made of the leaf, or one for each entry.
        """
        if value in self.of_examples:
            return None
        if value in self.differentiable and value in self._made_of(origin.leaf):
            return None
        return self._constant_axes(value, shape) or None

    def _made_of(self, leaf: int) -> set[int]:
        if leaf not in self._of_leaf:
            self._of_leaf[leaf] = jaxprs.dependent_values(self.program, {self.program.inputs[leaf]})
        return self._of_leaf[leaf]

    def _constant_axes(self, value: int, shape: Shape) -> Shape:
        """Axes, longer than 1, along which a value does not change when it is broadcast to `shape`."""
        if len(self.shape(value)) != len(shape):
            return ()
        steps: list[Step] = []
        if self.shape(value) != shape:
            steps.append(("broadcast", (shape, tuple(range(len(shape))))))
        node = self.makers.get(value)
        while node is not None and isinstance(node.operation, operations.Reindex):
            if node.inputs[0] is None:
                return ()
            steps += [] if node.operation.step is None else [node.operation.step]
            value = node.inputs[0]
            node = self.makers.get(value)
        if not any(kind == "broadcast" for kind, _ in steps):
            return ()
        index = entries(self.shape(value), (), (), steps[::-1])
        sides = enumerate(zip(index.shape, index.strides, strict=True))
        return tuple(
            axis
            for axis, (n, stride) in sides
            if n > 1 and (stride == 0 or (index == index.take([0], axis)).all())
        )

    def _is_mask(self, value: int | None) -> bool:
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
            return self.program.number(node, 0) in (0, 1)
        if isinstance(op, operations.Add) and op.signs == (1, -1) and node.inputs[0] is None:
            return self.program.number(node, 0) == 1 and self._is_mask(node.inputs[1])
        kept = operations.Reindex, operations.Multiply, operations.LoopSlice
        if chosen or isinstance(op, kept):
            return all(map(self._is_mask, node.inputs[chosen:]))
        return False


def seen_through(
    origin: Origin, steps: Sequence[Step], axes: Any
) -> tuple[tuple[RowScale, ...], tuple[Mask, ...]] | None:
    """What was made of a leaf, for a product's matrices; None: what they are times is neither.

    Args:
        steps, axes: from what the leaf has become to matrices.
    """
    scales, masks = [], []
    for made in origin.made:
        whole: Step = ("broadcast", (made.shape, tuple(range(len(made.shape)))))
        view = View((whole, *origin.inner[made.before :], *steps), axes)
        of_outputs = _is_by_output(made, view) if made.constant else None
        if of_outputs is not None:
            scale = RowScale(made.path, made.operand, made.divides, view, of_outputs, made.scans)
            scales.append(scale)
        elif made.is_mask:
            masks.append(Mask(made.path, made.operand, made.chosen, view, made.scans))
        else:
            return None
    return tuple(scales), tuple(masks)


def _is_by_output(made: Made, view: View) -> bool | None:
    """Whether there is one number for each output, or for each input; None: for neither."""
    sides = [1 if axis in made.constant else n for axis, n in enumerate(made.shape)]
    index = matrices(np.arange(math.prod(sides), dtype=np.int32).reshape(sides), view)
    if (index == index[:, :, :1]).all():
        return True
    return False if (index == index[:, :1]).all() else None


def _is_zeros_and_ones(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return False
    numbers = np.asarray(x)
    return bool(((numbers == 0) | (numbers == 1)).all())
