"""A Kronecker product acts on a tensor one axis at a time; the product itself is never formed.

A tensor x has its own `ndim` trailing axes and any leading batch axes. A factor for axis i is dense,
(..., n_i, n_i), diagonal, (..., n_i), or block-diagonal with c equal blocks, (..., c, n_i / c, n_i / c),
over the same batch axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from suite.core import linalg
from suite.core._namespace import Array, array_namespace


def is_diagonal(factor: Array, x: Array, ndim: int) -> bool:
    """Whether `factor` is a diagonal for a tensor like `x` with `ndim` axes of its own."""
    return factor.ndim == x.ndim - ndim + 1


def diagonal_blocks(factor: Array, x: Array, ndim: int) -> int | None:
    """How many blocks a block-diagonal `factor` has; None: it is dense or diagonal."""
    batch = x.ndim - ndim
    blocks: int | None = factor.shape[batch] if factor.ndim == batch + 3 else None
    return blocks


def unfold(x: Array, axis: int, ndim: int, blocks: int | None = None) -> Array:
    """The matrix (..., n_axis, product of the other sides) of a tensor.

    With `blocks` its rows in so many groups: (..., blocks, n_axis / blocks, product of the other sides).
    """
    xp = array_namespace(x)
    batch = x.ndim - ndim
    if axis:
        x = xp.moveaxis(x, batch + axis, batch)
    if blocks is not None:
        return xp.reshape(x, (*x.shape[:batch], blocks, x.shape[batch] // blocks, -1))
    return xp.reshape(x, (*x.shape[: batch + 1], -1)) if ndim != 2 else x


def fold(matrix: Array, axis: int, shape: tuple[int, ...], ndim: int) -> Array:
    """Undo `unfold`, with `blocks` or without, for a tensor of `shape`, batch axes included."""
    xp = array_namespace(matrix)
    batch = len(shape) - ndim
    sides = list(shape[batch:])
    side = sides.pop(axis)
    x = xp.reshape(matrix, (*shape[:batch], side, *sides))
    return xp.moveaxis(x, batch, batch + axis) if axis else x


def apply_factor(factor: Array, x: Array, axis: int, ndim: int, *, symmetric: bool = False) -> Array:
    """F x along one axis: y[.., j, ..] = Σ_k F[j, k] x[.., k, ..].

    Args:
        factor: (..., m, n), or the diagonal or blocks of one that is square.
        symmetric: F is, up to rounding, and may be used as its transpose.
    """
    xp = array_namespace(factor, x)
    batch = x.ndim - ndim
    if is_diagonal(factor, x, ndim):
        ones_before, ones_after = (1,) * axis, (1,) * (ndim - axis - 1)
        return xp.reshape(factor, (*factor.shape[:batch], *ones_before, -1, *ones_after)) * x
    blocks = diagonal_blocks(factor, x, ndim)
    if axis and axis == ndim - 1:  # the last axis needs no transposed copy: X Fᵀ
        rows = xp.reshape(x, (*x.shape[:batch], -1, x.shape[-1]))
        right = factor if symmetric else xp.matrix_transpose(factor)
        if blocks is not None:
            return xp.reshape(linalg.times_block_diagonal(rows, right), x.shape)
        return xp.reshape(xp.matmul(rows, right), (*x.shape[:-1], right.shape[-1]))
    rows = xp.matmul(factor, unfold(x, axis, ndim, blocks))
    side = x.shape[batch + axis] if blocks is not None else rows.shape[batch]
    return fold(rows, axis, (*x.shape[: batch + axis], side, *x.shape[batch + axis + 1 :]), ndim)


def apply(factors: Sequence[Array], x: Array, *, symmetric: bool = False) -> Array:
    """(F_1 ⊗ F_2 ⊗ ...) vec x, as a tensor: every factor along its own axis."""
    for axis, factor in enumerate(factors):
        x = apply_factor(factor, x, axis, len(factors), symmetric=symmetric)
    return x


def gram(x: Array, axis: int, ndim: int, *, diagonal: bool, blocks: int | None = None) -> Array:
    """Σ over all other axes of x xᵀ: (..., n, n), or its diagonal (..., n).

    With `blocks` those on its diagonal, so many: (..., blocks, n / blocks, n / blocks).
    """
    xp = array_namespace(x)
    rows = unfold(x, axis, ndim, blocks)
    if diagonal:
        return xp.sum(rows * rows, axis=-1)
    return linalg.gram(xp.matrix_transpose(rows))


def factor_shape(side: int, diagonal: bool, blocks: int) -> tuple[int, ...]:
    """What a factor of an axis of `side` is kept as: its diagonal, `blocks` on that, or all of it."""
    if diagonal:
        return (side,)
    return (side, side) if blocks == 1 else (blocks, side // blocks, side // blocks)


def squares_are_cheap(sides: Sequence[int], matrices: Sequence[int]) -> tuple[bool, ...]:
    """For each axis, whether FᵀF takes at most a quarter of the multiplications of F x.

    Args:
        sides: n_i of the tensor x.
        matrices: those of the matrices that F_i consists of: n_i, that of its blocks, or 1.
    """
    numel = math.prod(sides)
    return tuple(4 * m * n <= numel for m, n in zip(matrices, sides, strict=True))


def balancing(*sizes: Array) -> tuple[Array, ...]:
    """What to multiply a block's factors with so that they have one size; 1 where one of them is 0.

    Args:
        sizes: (...), the largest entry of every factor.
    """
    xp = array_namespace(sizes[0])
    usable = sizes[0] > 0  # a factor that is zero cannot be balanced against the others
    for size in sizes[1:]:
        usable = usable & (size > 0)
    logs = [xp.log(xp.where(usable, size, 1.0)) for size in sizes]
    mean = logs[0]
    for log in logs[1:]:
        mean = mean + log
    mean = mean / len(sizes)
    return tuple(xp.exp(mean - log) for log in logs)


def scaled(factors: tuple[Array, ...], gain: Array) -> tuple[Array, ...]:
    """Every factor of a block times the block's number in `gain` (...)."""
    xp = array_namespace(gain)
    return tuple(q * xp.reshape(gain, (*gain.shape, *(1,) * (q.ndim - gain.ndim))) for q in factors)
