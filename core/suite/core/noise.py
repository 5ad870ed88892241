"""Reproducible noise from counters: the same numbers in every framework, on every rank.

A random generator would tie a trajectory to one framework and its state to a checkpoint. Hashing
(seed, stream, step, position) needs neither: integers in, the same floats out everywhere. The mixer is
MurmurHash3's 32-bit finalizer (Appleby, public domain constants), in wrapping int32 arithmetic because
that is what numpy, torch and JAX (without 64-bit mode) share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from suite.core._namespace import Array, Scalar, array_namespace, device_of, factorizations

_M1 = -2048144789  # 0x85EBCA6B
_M2 = -1028477387  # 0xC2B2AE35


def _mix(h: Array) -> Array:
    # int32 has an arithmetic shift; the masks make it a logical one. Fresh arrays are changed in place.
    times = factorizations(array_namespace(h)).wrapping_product
    shifted = h >> 16
    shifted &= 0xFFFF
    shifted ^= h
    h = times(shifted, _M1)
    for shift, mask, factor in ((13, 0x7FFFF, _M2), (16, 0xFFFF, 1)):
        shifted = h >> shift
        shifted &= mask
        h ^= shifted
        if factor != 1:
            h = times(h, factor)
    return h


def unit_noise(streams: Array, step: Scalar, shape: tuple[int, ...], dtype: Any) -> Array:
    """Noise with mean 0 and variance 1, uniform on ±√3, independent over streams, steps, positions.

    Args:
        streams: (n,), int32, one stream per block; fixed for a block's life.
        step: the step count, an integer or 0-d int32 array.
        shape: the shape of one block.
        dtype: floating dtype of the result.

    Returns:
        (n, *shape).
    """
    return unit_noises([streams], step, [shape], dtype)[0]


def unit_noises(
    streams: Sequence[Array], step: Scalar, shapes: Sequence[tuple[int, ...]], dtype: Any
) -> list[Array]:
    """`unit_noise` of several stacks, hashed together: the same numbers in fewer calls.

    Args:
        streams, shapes: one for each stack, of which there is at least one; streams on one device.
        step, dtype: of all of them.
    """
    xp = array_namespace(*streams)
    sizes, counts = [math.prod(shape) for shape in shapes], [own.shape[0] for own in streams]
    if not isinstance(step, int):
        step = xp.astype(step, xp.int32)
    # Each argument is hashed before it meets the next: sums of raw counters would collide.
    joined = _joined(streams)
    keys = _mix(_mix(joined + 1013904223) ^ (xp.zeros_like(joined) + step))
    position = _mix(xp.arange(max(sizes), dtype=xp.int32, device=device_of(joined)) + 374761393)
    starts = [0, *itertools.accumulate(counts)][:-1]

    def raw(start: int, count: int, size: int) -> Array:
        pairs = keys[start : start + count, None] ^ position[None, :size]
        return xp.reshape(pairs, (count * size,))

    # What is mixed gets no name: beside a large block there is room for little else.
    bits = _mix(_joined([raw(*part) for part in zip(starts, counts, sizes, strict=True)]))
    wide = dtype if xp.finfo(dtype).bits >= 32 else xp.float32  # half precision cannot hold an int32
    uniform = xp.astype(bits, wide)
    del bits
    uniform += 0.5
    uniform *= 2.0**-31 * 3.0**0.5
    uniform = xp.astype(uniform, dtype)
    found, start = [], 0
    for shape, size, count in zip(shapes, sizes, counts, strict=True):
        found.append(xp.reshape(uniform[start : start + count * size], (count, *shape)))
        start += count * size
    return found


def _joined(stacks: Sequence[Array]) -> Array:
    return stacks[0] if len(stacks) == 1 else array_namespace(*stacks).concat(stacks, axis=0)


# What a block draws noise for. Each use has its own: equal counters would give equal numbers.
FIT, PAIR, MOMENTUM, FACTOR = range(4)  # FACTOR + i for the factor of axis i
_STEPS_PER_USE = 2**26


def draw(streams: Array, step: Scalar, use: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """`unit_noise` of a use, independent of that of all others for the first 67 million steps."""
    return draws([streams], step, use, [shape], dtype)[0]


def draws(
    streams: Sequence[Array], step: Scalar, use: int, shapes: Sequence[tuple[int, ...]], dtype: Any
) -> list[Array]:
    """`draw` of several stacks, see `unit_noises`."""
    return unit_noises(streams, step + use * _STEPS_PER_USE, shapes, dtype)


def stream_numbers(parameter: int, blocks: int, seed: int = 0) -> list[int]:
    """The stream of every block of a parameter, as int32 values.

    Depends on the parameter's place in the model and the block's place in the parameter, not on how
    blocks are stacked, so that every framework and every rank numbers them alike.
    """
    numbers = (seed * 0x9E3779B1 + (parameter << 16) + block for block in range(blocks))
    return [(number + 2**31) % 2**32 - 2**31 for number in numbers]
