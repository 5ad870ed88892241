"""A convolution is a matrix product over patches: its inputs as rows, for any rank of convolution.

Patches are cut with strided slices, one for each offset in the kernel, and no gather.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from suite.core._namespace import Array, array_namespace, device_of


def output_size(size: int, kernel: int, stride: int, padding: tuple[int, int], dilation: int) -> int:
    """How many places a kernel visits along one axis."""
    return (size + padding[0] + padding[1] - dilation * (kernel - 1) - 1) // stride + 1


def patches(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int = 1,
) -> Array:
    """The rows that a convolution multiplies its kernel with.

    Source: Grosse & Martens 2016 (arXiv:1602.01407), section 3.1, the expansion operator ⟦·⟧.

    Args:
        x: (n, channels, *sizes).
        kernel, stride, dilation: one number per spatial axis.
        padding: zeros (before, after) per spatial axis.
        groups: how many groups the channels are split into.

    Returns:
        (groups, n * places, channels / groups * kernel places), features ordered as the trailing axes
        of a kernel (out, channels / groups, *kernel).
    """
    xp = array_namespace(x)
    n, channels = x.shape[:2]
    out = [
        output_size(*sides) for sides in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    x = _pad(x, padding)
    slices = [
        x[
            (
                slice(None),
                slice(None),
                *(
                    slice(start * d, start * d + s * (o - 1) + 1, s)
                    for start, s, d, o in zip(offset, stride, dilation, out, strict=True)
                ),
            )
        ]
        for offset in itertools.product(*(range(k) for k in kernel))
    ]
    # (n, channels, *out, kernel places) -> (groups, n, *out, channels / groups, kernel places)
    stacked = xp.stack(slices, axis=-1)
    width = channels // groups
    stacked = xp.reshape(stacked, (n, groups, width, math.prod(out), len(slices)))
    rows = xp.permute_dims(stacked, (1, 0, 3, 2, 4))
    return xp.reshape(rows, (groups, n * math.prod(out), width * len(slices)))


def patches_at(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    chosen: Array,
) -> Array:
    """The rows of `patches` with the indices `chosen`, without making the others.

    Args:
        chosen: (rows,), integers in [0, n * places).

    Returns:
        (groups, rows, channels / groups * kernel places).
    """
    xp = array_namespace(x)
    channels = x.shape[1]
    out = [
        output_size(*sides) for sides in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    x = _pad(x, padding)
    sizes = x.shape[2:]
    # The flat position of each row's first kernel place, and from there of all others.
    place, first, scale = chosen, chosen * 0, 1
    for size, visited, s in reversed(list(zip(sizes, out, stride, strict=True))):
        first = first + (place % visited) * (s * scale)
        place, scale = place // visited, scale * size
    volume = scale  # what is left of `place` is the example
    offsets = []
    for offset in itertools.product(*(range(k) for k in kernel)):
        flat = 0
        for start, d, size in zip(offset, dilation, sizes, strict=True):
            flat = flat * size + start * d
        offsets.append(flat)
    # (n * volume, channels): one row of memory per position, channels together.
    rows = xp.reshape(xp.moveaxis(x, 1, -1), (-1, channels))
    base = place * volume + first
    taken = [xp.take(rows, base + flat, axis=0) for flat in offsets]
    stacked = xp.reshape(xp.stack(taken, axis=-1), (chosen.shape[0], groups, -1))
    return xp.moveaxis(stacked, 1, 0)


def second_moment_sum(
    x: Array,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[tuple[int, int], tuple[int, int]],
    dilation: tuple[int, int],
    groups: int = 1,
    *,
    bias: bool = False,
) -> Array:
    """Σ p pᵀ over the rows p of `patches`, without making them, for stride 1 along the first axis.

    The product of two places of a kernel depends, away from the borders, on how far apart they are. So
    only the last axis is cut into patches; for each vertical distance between two places the rows that
    all pairs at that distance share are multiplied once, and each pair adds its border rows. For a
    3x3 kernel that is a third of the work.

    Args:
        x: (n, channels, height, width).
        kernel, stride, padding, dilation, groups: see `patches`; stride[0] must be 1.
        bias: append the coordinate 1 to every patch.

    Returns:
        (groups, d, d), d = channels / groups * kernel places + bias.
    """
    if stride[0] != 1:
        raise ValueError(f"stride[0] must be 1, got {stride[0]}")
    xp = array_namespace(x)
    n, channels = x.shape[:2]
    tall, wide = kernel
    step = dilation[0]
    height, width = (
        output_size(*sides) for sides in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    )
    # (rows, n, columns, channels): channels together, so that whole pieces of memory are copied.
    # Rows of zeros above and below add nothing to any sum: they are counted and not made.
    x = _pad(xp.permute_dims(x, (2, 0, 3, 1)), padding[1:], axes=(2,))
    slices = [
        x[:, :, i * dilation[1] : i * dilation[1] + stride[1] * (width - 1) + 1 : stride[1], :]
        for i in range(wide)
    ]
    rows, features = x.shape[0], channels // groups * wide
    # (rows, n, width, wide, channels) -> (groups, rows, n * width, features of a row)
    cut = xp.reshape(xp.stack(slices, axis=-2), (rows, n * width, wide, groups, channels // groups))
    cut = xp.reshape(xp.permute_dims(cut, (3, 0, 1, 2, 4)), (groups, rows, n * width, features))

    def product(start: int, stop: int, distance: int) -> Array:
        """Σ over rows y in [start, stop) of row y times row y + distance."""
        start, stop = within(start), within(stop + distance) - distance
        if start >= stop:
            return xp.zeros((groups, features, features), dtype=x.dtype, device=device_of(x))
        above = xp.reshape(cut[:, start:stop, ...], (groups, -1, features))
        below = xp.reshape(cut[:, start + distance : stop + distance, ...], (groups, -1, features))
        return xp.matmul(xp.matrix_transpose(above), below)

    def within(row: int) -> int:
        """A row, counted with those of zeros, as one of `cut`, or the nearest."""
        return min(max(row - padding[0][0], 0), rows)

    blocks: dict[tuple[int, int], Array] = {}
    for apart in range(tall):
        span = step * (tall - 1 - apart)  # pairs at this distance start in rows 0, step, ..., span
        shared = product(span, height, step * apart) if height > span else None
        for i in range(tall - apart):
            first, last = step * i, step * i + height
            if shared is None:
                total = product(first, last, step * apart)
            else:
                total = shared
                for start, stop in ((first, span), (height, last)):
                    if start < stop:
                        total = total + product(start, stop, step * apart)
            blocks[i, i + apart] = total
            blocks[i + apart, i] = xp.matrix_transpose(total)
    lines = [xp.concat([blocks[i, j] for j in range(tall)], axis=-1) for i in range(tall)]
    grid = xp.reshape(
        xp.concat(lines, axis=-2),
        (groups, tall, wide, channels // groups, tall, wide, channels // groups),
    )
    side = tall * features
    result = xp.reshape(xp.permute_dims(grid, (0, 3, 1, 2, 6, 4, 5)), (groups, side, side))
    if not bias:
        return result
    sums = xp.sum(cut, axis=2)
    vertical = [
        xp.sum(sums[:, within(step * i) : within(step * i + height), :], axis=1) for i in range(tall)
    ]
    vector = xp.reshape(xp.stack(vertical, axis=1), (groups, tall, wide, channels // groups))
    vector = xp.reshape(xp.permute_dims(vector, (0, 3, 1, 2)), (groups, side, 1))
    corner = xp.zeros((groups, 1, 1), dtype=x.dtype, device=device_of(x)) + float(n * height * width)
    lower = xp.concat([xp.matrix_transpose(vector), corner], axis=-1)
    return xp.concat([xp.concat([result, vector], axis=-1), lower], axis=-2)


def output_rows(y: Array, groups: int = 1) -> Array:
    """(n, channels, *sizes) -> (groups, n * places, channels / groups), rows as in `patches`."""
    xp = array_namespace(y)
    n, channels, *sizes = y.shape
    places = math.prod(sizes)
    y = xp.reshape(y, (n, groups, channels // groups, places))
    y = xp.permute_dims(y, (1, 0, 3, 2))
    return xp.reshape(y, (groups, n * places, channels // groups))


def _pad(x: Array, padding: Sequence[tuple[int, int]], axes: Sequence[int] | None = None) -> Array:
    """Zeros around the spatial axes, from the third on by default; the standard has no pad."""
    xp = array_namespace(x)
    for axis, (before, after) in zip(axes or range(2, x.ndim), padding, strict=True):
        if before or after:
            zeros = [
                xp.zeros(
                    (*x.shape[:axis], width, *x.shape[axis + 1 :]), dtype=x.dtype, device=device_of(x)
                )
                for width in (before, after)
            ]
            x = xp.concat([zeros[0], x, zeros[1]], axis=axis)
    return x
