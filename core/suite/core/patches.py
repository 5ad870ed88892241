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
    x = zero_padded(x, padding)
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
    x = zero_padded(x, padding)
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


def output_rows(y: Array, groups: int = 1) -> Array:
    """(n, channels, *sizes) -> (groups, n * places, channels / groups), rows as in `patches`."""
    xp = array_namespace(y)
    n, channels, *sizes = y.shape
    places = math.prod(sizes)
    y = xp.reshape(y, (n, groups, channels // groups, places))
    y = xp.permute_dims(y, (1, 0, 3, 2))
    return xp.reshape(y, (groups, n * places, channels // groups))


def zero_padded(x: Array, padding: Sequence[tuple[int, int]]) -> Array:
    """Zeros around the spatial axes; the standard has no pad."""
    xp = array_namespace(x)
    for axis, (before, after) in enumerate(padding, start=2):
        if before or after:
            zeros = [
                xp.zeros(
                    (*x.shape[:axis], width, *x.shape[axis + 1 :]), dtype=x.dtype, device=device_of(x)
                )
                for width in (before, after)
            ]
            x = xp.concat([zeros[0], x, zeros[1]], axis=axis)
    return x
