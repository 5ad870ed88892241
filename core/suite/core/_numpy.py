"""Factorizations for numpy and for any other array library that follows the standard.

The reference, written to be obviously right: matrices one at a time through the standard's own
routines, an exception turned into NaN for that matrix alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from suite.core._namespace import Array, array_namespace, device_of, lift


def _each(function: Callable[..., tuple[np.ndarray, ...]], *arrays: Array) -> tuple[Array, ...]:
    xp = array_namespace(*arrays)
    batch = tuple(arrays[0].shape[:-2])
    count, matrices = math.prod(batch), [np.asarray(x) for x in arrays]
    if count == 0:  # one stands for their shapes and dtypes
        stacks = [np.eye(*x.shape[-2:], dtype=x.dtype)[None] for x in matrices]
    else:
        stacks = [x.reshape(-1, *x.shape[-2:]) for x in matrices]
    results = [function(*own) for own in zip(*stacks, strict=True)]
    return tuple(
        xp.asarray(np.stack(parts)[:count].reshape(batch + parts[0].shape))
        for parts in zip(*results, strict=True)
    )


def _cholesky_inverse(x: np.ndarray) -> tuple[np.ndarray]:
    try:
        half = np.linalg.inv(np.linalg.cholesky(x))
    except np.linalg.LinAlgError:
        return (np.full_like(x, np.nan),)
    inverse = half.T @ half
    if not np.isfinite(np.trace(x)) or not np.isfinite(np.trace(inverse)):
        return (np.full_like(x, np.nan),)
    return (0.5 * (inverse + inverse.T),)


def _eigh(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if np.all(np.isfinite(x)):
        try:
            values, vectors = np.linalg.eigh(0.5 * (x + x.T))
            return values, vectors
        except np.linalg.LinAlgError:
            pass
    return np.full_like(x[0], np.nan), np.full_like(x, np.nan)


def cholesky_inverse(x: Array) -> Array:
    """Inverses, symmetric; NaN throughout that of a matrix that is not finite and positive definite."""
    return _each(_cholesky_inverse, x)[0]


def eigh(x: Array) -> tuple[Array, Array]:
    """Eigenvalues and -vectors of (x + xᵀ) / 2; NaN where that is not finite or the solver gave up."""
    values, vectors = _each(_eigh, x)
    return values, vectors


def diagonal(x: Array) -> Array:
    """(..., n, n) -> (..., n)."""
    return array_namespace(x).linalg.diagonal(x)


def trace(x: Array) -> Array:
    """The sum of each diagonal."""
    return array_namespace(x).sum(diagonal(x), axis=-1)


def are_finite(x: Array) -> Array:
    """(..., n, n) -> (...): whether all entries are finite."""
    xp = array_namespace(x)
    return xp.all(xp.isfinite(x), axis=(-2, -1))


def largest_entry(x: Array, axis: tuple[int, ...], *, keepdims: bool) -> Array:
    """max |x| over axes."""
    xp = array_namespace(x)
    return xp.max(xp.abs(x), axis=axis, keepdims=keepdims)


def largest_row(x: Array, size: Array) -> Array:
    """The row of (..., n, n) whose `size`, (..., n), is largest, (..., 1, n)."""
    xp = array_namespace(x)
    row = xp.argmax(size, axis=-1)[..., None, None]
    return xp.take_along_axis(x, xp.broadcast_to(row, (*x.shape[:-2], 1, x.shape[-1])), axis=-2)


def root_mean_square(x: Array, axis: tuple[int, ...], other: Callable[[], Array]) -> Array:
    """√(mean of x²) over axes, as `other()` has it."""
    return other()


def repeated(function: Callable[..., Any], start: tuple[Array, ...], count: int) -> Any:
    """`function` of arrays, as many in as out, `count` times one after the other."""
    for _ in range(count):
        start = function(*start)
    return start


def inner_product(x: Array, y: Array) -> Array:
    """Σ x y over all entries."""
    return array_namespace(x).sum(x * y)


def wrapping_product(x: Array, factor: int) -> Array:
    """int32, which is used up, times a number modulo 2³²."""
    x *= factor
    return x


def add_diagonal(x: Array, value: Any) -> Array:
    """x + value I."""
    xp = array_namespace(x)
    return x + value * xp.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def pack(x: Array, *, symmetric: bool = False) -> Array:
    """See `suite.core.packing`; (..., n, n) -> (..., k, n or n + 1), k = ⌈n/2⌉."""
    xp = array_namespace(x)
    n = x.shape[-1]
    k = (n + 1) // 2
    turned = x if symmetric else xp.matrix_transpose(x)
    first, beside, second = x[..., :k, :k], turned[..., :k, k:], turned[..., k:, k:]
    column = xp.zeros_like(first[..., :1])
    if n % 2 == 0:
        first = xp.concat([first, column], axis=-1)
    else:
        second = xp.concat([second, xp.zeros_like(x[..., :1, k:])], axis=-2)
    second = xp.concat([column, second], axis=-1)
    corner = xp.where(_is_lower(first), first, second)
    return xp.concat([corner, beside], axis=-1)


def unpack(packed: Array, n: int) -> Array:
    """Undo `pack` of symmetric matrices."""
    xp = array_namespace(packed)
    k = (n + 1) // 2
    first, second = packed[..., :k], packed[..., : n - k, 1 : n - k + 1]
    beside = packed[..., n - k + 1 :]
    first = xp.where(_is_lower(first), first, xp.matrix_transpose(first))
    second = xp.where(_is_lower(second), xp.matrix_transpose(second), second)
    above = xp.concat([first, beside], axis=-1)
    below = xp.concat([xp.matrix_transpose(beside), second], axis=-1)
    return xp.concat([above, below], axis=-2)


def _is_lower(x: Array) -> Array:
    """(m, n): whether an entry of (..., m, n) is on or below the diagonal."""
    xp = array_namespace(x)
    rows, columns = (xp.arange(size, device=device_of(x)) for size in x.shape[-2:])
    return rows[:, None] >= columns[None, :]


def multiplies_as_it_is(x: Array) -> bool:
    """Whether products of this dtype are a device's fastest, short of single precision."""
    return False


def usually(condition: Array, x: Array, other: Callable[[], Array]) -> Array:
    """`x` where the condition holds, else `other()`."""
    return array_namespace(x).where(condition, x, other())


def transposed_times(x: Array, y: Array) -> Array:
    """xᵀ y."""
    xp = array_namespace(x)
    return xp.matmul(xp.matrix_transpose(x), y)


def times_transposed(x: Array, y: Array) -> Array:
    """x yᵀ."""
    xp = array_namespace(x)
    return xp.matmul(x, xp.matrix_transpose(y))


def times_block_diagonal(x: Array, blocks: Array) -> Array:
    """See `suite.core.linalg.times_block_diagonal`."""
    xp = array_namespace(x)
    columns = xp.moveaxis(xp.reshape(x, (*x.shape[:-1], *blocks.shape[-3:-1])), -2, -3)
    return xp.reshape(xp.moveaxis(xp.matmul(columns, blocks), -3, -2), x.shape)


def gram(x: Array) -> Array:
    """xᵀ x."""
    xp = array_namespace(x)
    return xp.matmul(xp.matrix_transpose(x), x)


def gram_in_single(x: Array) -> Array:
    """xᵀ x in at least single precision."""
    return gram(lift(x))


def sums_in_single(x: Array) -> bool:
    """Whether products of this half precision are summed in single without lifting it first."""
    del x
    return False


def full_precision(x: Array) -> contextlib.AbstractContextManager[None]:
    """Inside, products of single precision are of that, whatever is set for others (TF32)."""
    del x
    return contextlib.nullcontext()


def parts(x: Array, count: int) -> list[Array]:
    """`x` cut along its first axis into pieces of at most `count`, one at least."""
    n = x.shape[0]
    starts = range(0, max(n, 1), count)
    return [x[start : min(start + count, n), ...] for start in starts]


def work_of_a_launch(x: Array) -> int:
    """How many products of two numbers an operation costs beside its own."""
    del x
    return 0


def sum_of_squares(x: Array) -> Array:
    """Σ x² over the last axis."""
    return array_namespace(x).sum(x * x, axis=-1)


def summed_gram(x: Array) -> Array:
    """Σ x xᵀ over the first axis of (k, m, n)."""
    xp = array_namespace(x)
    return xp.sum(xp.matmul(x, xp.matrix_transpose(x)), axis=0)


def over_groups(
    function: Callable[..., Array], x: Array, y: Array, ends: Array, *matrices: Array
) -> Array:
    """`function(x, y, *matrices)`, a sum over rows, of each group's rows, as many groups as `ends` says.

    Rows are gathered into tiles of one group each, whose number does not depend on how rows are grouped:
    of r rows in e groups no more than e tiles of ⌈r / e⌉ are full, and no more than one a group is not.

    Args:
        function: of arrays (..., rows, m), (..., rows, n) and (..., p, q); rows of zeros add nothing.
        x, y: (rows, m) and (rows, n), in the order of their groups.
        ends: (groups,), integers: the row behind each group's last. Rows behind the last group's may be
            anything.
        matrices: (groups, p, q), what the function needs of each group.

    Returns:
        (groups, m', n'), m' and n' the function's own.
    """
    xp, device = array_namespace(x), device_of(x)
    groups, rows = ends.shape[0], x.shape[0]
    if not rows:
        nothing = [xp.zeros((groups, 1, z.shape[1]), dtype=z.dtype, device=device) for z in (x, y)]
        return function(*nothing, *matrices)
    size = -(-rows // groups)
    starts = xp.concat([xp.zeros_like(ends[:1]), ends])  # one more group, without rows: for spare tiles
    stops = xp.concat([ends, ends[-1:]])
    used = (stops - starts + (size - 1)) // size
    after = xp.cumulative_sum(used, axis=0)
    tile = xp.arange(2 * groups, device=device)
    group = xp.sum(xp.astype(tile[:, None] >= after[None, :-1], xp.int32), axis=1)
    first = xp.take(starts - (after - used) * size, group, axis=0) + tile * size
    row = first[:, None] + xp.arange(size, device=device)[None, :]
    inside = row < xp.take(stops, group, axis=0)[:, None]
    row = xp.reshape(xp.where(inside, row, xp.zeros_like(row)), (-1,))

    def tiles(z: Array) -> Array:
        gathered = xp.reshape(xp.take(z, row, axis=0), (2 * groups, size, z.shape[1]))
        return xp.where(inside[..., None], gathered, xp.zeros_like(gathered))

    products = function(tiles(x), tiles(y), *(_taken(z, group, groups) for z in matrices))
    members = xp.astype(xp.arange(groups, device=device)[:, None] == group[None, :], products.dtype)
    sums = xp.matmul(members, xp.reshape(products, (2 * groups, -1)))
    return xp.reshape(sums, (groups, *products.shape[1:]))


def _taken(matrices: Array, group: Array, groups: int) -> Array:
    """Each tile's; of the spare tiles, whose rows are zeros, the last group's."""
    xp = array_namespace(matrices)
    return xp.take(matrices, xp.where(group < groups, group, groups - 1), axis=0)


def correlations(x: Array, kernel: tuple[int, int], dilation: tuple[int, int], groups: int) -> Array:
    """Products of an image with itself, shifted by every difference of two places of a kernel.

    Args:
        x: (n, channels, height, width).
        kernel: (tall, wide), how many places.
        dilation: how far apart they are.

    Returns:
        (groups, tall, 2 wide - 1, c, c), c = channels / groups: at [:, i, j] the sum over x and its
        positions p of x[p] x[p + d]ᵀ, d = (i, j - wide + 1) * dilation, zeros around x.
    """
    xp = array_namespace(x)
    n, channels, height, width = x.shape
    x = xp.permute_dims(xp.reshape(x, (n, groups, -1, height, width)), (1, 0, 3, 4, 2))
    sums = []
    for i in range(kernel[0]):
        down = min(i * dilation[0], height)
        for j in range(1 - kernel[1], kernel[1]):
            right, left = (min(max(k * dilation[1], 0), width) for k in (j, -j))
            here = x[:, :, : height - down, left : width - right, :]
            there = x[:, :, down:, right : width - left, :]
            here, there = (xp.reshape(part, (groups, -1, channels // groups)) for part in (here, there))
            sums.append(xp.matmul(xp.matrix_transpose(here), there))
    stacked = xp.stack(sums, axis=1)
    return xp.reshape(stacked, (groups, kernel[0], 2 * kernel[1] - 1, *stacked.shape[2:]))


def qr(x: Array) -> Array:
    """The orthonormal factor of finite square matrices, by Householder reflections."""
    return _each(lambda m: (np.linalg.qr(m).Q,), x)[0]


def solve_triangular(x: Array, y: Array, *, upper: bool) -> Array:
    """The solution of x z = y for a stack of triangular matrices x."""
    del upper  # a general solve finds the same solution

    def solve(a: np.ndarray, b: np.ndarray) -> tuple[Any]:
        try:
            return (np.linalg.solve(a, b),)
        except np.linalg.LinAlgError:
            return (np.full_like(b, np.nan),)

    return _each(solve, x, y)[0]
