"""Several parameter leaves concatenated to one value, and which parts of a product are each leaf's.

flax's `OptimizedLSTMCell` concatenates the kernels of its gates before the one product with each of its
inputs. The product is a use of every leaf: of a window of its output, or of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from suite.jax import operations
from suite.jax.layers import Convolution, Dense, Grouped, Lookup, Product
from suite.jax.views import Shape, Step


class Piece(NamedTuple):
    """A leaf's part of a concatenation."""

    origin: Any  # find_layers.Origin
    axis: int
    start: int
    stop: int

    def shape(self, whole: Shape) -> Shape:
        """Of this part, in an array of that shape."""
        return (*whole[: self.axis], self.stop - self.start, *whole[self.axis + 1 :])


def pieces(origins: Sequence[Any], axis: int, sizes: Sequence[int]) -> tuple[Piece, ...]:
    """Of those inputs of a concatenation that are views of leaves."""
    found, start = [], 0
    for origin, size in zip(origins, sizes, strict=True):
        if origin is not None:
            found.append(Piece(origin, axis, start, start + size))
        start += size
    return tuple(found)


def moved(joined: Sequence[Piece], step: Step | None) -> tuple[Piece, ...] | None:
    """The pieces of a re-indexed concatenation; None where they lie no more along one axis."""
    if step is None:
        return tuple(joined)
    kind, arguments = step
    (axis,) = {piece.axis for piece in joined}
    if kind == "transpose":
        new = arguments[0].index(axis)
        return tuple(p._replace(origin=p.origin.moved(step), axis=new) for p in joined)
    if kind == "broadcast":
        shape, axes = arguments
        new = axes[axis]
    elif kind == "reshape":
        old, shape = arguments
        kept = [i for i, n in enumerate(shape) if n != 1]
        before = [i for i, n in enumerate(old) if n != 1]
        if [old[i] for i in before] != [shape[i] for i in kept] or axis not in before:
            return None
        new = kept[before.index(axis)]
    else:
        return None
    result = []
    for piece in joined:
        part = piece._replace(axis=new)
        if kind == "broadcast":
            own: Step = (kind, (part.shape(shape), axes))
        else:
            own = (kind, (piece.shape(old), part.shape(shape)))
        result.append(part._replace(origin=piece.origin.moved(own)))
    return tuple(result)


def windows(
    operation: Any, product: Product, axes: tuple[Shape, Shape, Shape], piece: Piece
) -> tuple[int | None, int | None] | None:
    """The axes of a product's input and output that run along those of the weight's concatenation.

    Args:
        axes: of the weight: (blocks, features out, features in), of a dot_general or lookup.

    Returns:
        None for each that does not; None alone if the product is not one of the pieces apart.
    """
    axis = piece.axis
    if isinstance(product, Grouped):
        return None
    if isinstance(product, Convolution):
        if product.groups != 1 or axis not in operation.w_spec[:2]:
            return None
        if axis == operation.w_spec[0]:
            return None, product.out_spec[1]
        return product.x_spec[1], None
    if isinstance(product, Lookup):
        assert isinstance(operation, operations.Gather)
        if axis == operation.axis:
            return None
        return None, product.offset_axes[axes[1].index(axis)]
    assert isinstance(product, Dense)
    batch, free, contracted = axes
    if axis in contracted:
        return product.x_axes[2][contracted.index(axis)], None
    if axis in batch:
        return product.x_axes[0][batch.index(axis)], batch.index(axis)
    start = len(batch) + (len(product.x_axes[1]) if product.x_first else 0)
    return None, start + free.index(axis)


def window(shape: Shape, axis: int | None, piece: Piece) -> Step | None:
    """The step to a piece's part of an array of that shape."""
    if axis is None:
        return None
    begin, end = [0] * len(shape), list(shape)
    begin[axis], end[axis] = piece.start, piece.stop
    return "slice", (tuple(begin), tuple(end), (1,) * len(shape))
