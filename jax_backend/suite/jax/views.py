"""Views: an array as a re-indexing of another, as the program wrote it.

A step is (kind, arguments): transpose, reshape, rev, slice and broadcast, for numpy and jax arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Step = tuple[str, tuple[Any, ...]]
Shape = tuple[int, ...]
# Axes merged where memory allows, as (size, stride) in elements.
Strides = tuple[tuple[int, int], ...]


class View(NamedTuple):
    """A leaf as a stack of matrices: `steps`, then axes grouped as (groups, d_out, d_in)."""

    steps: tuple[Step, ...]
    axes: tuple[Shape, Shape, Shape]


def apply_steps(x: Any, steps: Sequence[Step]) -> Any:
    """Re-index a jax or numpy array."""
    for kind, arguments in steps:
        if kind == "transpose":
            x = x.transpose(arguments[0])
        elif kind == "reshape":
            x = x.reshape(arguments[1])
        elif kind == "rev":
            x = x[_reversed(x.ndim, arguments[0])]
        elif kind == "slice":
            x = x[_slices(*arguments)]
        else:
            shape, axes = arguments
            expanded = [1] * len(shape)
            for size, axis in zip(x.shape, axes, strict=True):
                expanded[axis] = size
            xp = np if isinstance(x, np.ndarray) else jax.numpy
            x = xp.broadcast_to(x.reshape(expanded), shape)
    return x


def write(x: jax.Array, steps: Sequence[Step], new: jax.Array) -> jax.Array:
    """`x` with what `steps` make of it replaced by `new`; for steps without broadcasts."""
    if not steps:
        return new.astype(x.dtype)
    kind, arguments = steps[0]
    inner = new if len(steps) == 1 else write(apply_steps(x, steps[:1]), steps[1:], new)
    if kind == "transpose":
        return inner.transpose(inverse(arguments[0])).astype(x.dtype)
    if kind == "reshape":
        return inner.reshape(arguments[0]).astype(x.dtype)
    if kind == "rev":
        return inner[_reversed(x.ndim, arguments[0])].astype(x.dtype)
    assert kind == "slice", kind
    return x.at[_slices(*arguments)].set(inner.astype(x.dtype))


def lift(step: Step, stack: Shape) -> Step:
    """The step that does to each array of a stack what `step` does to one."""
    kind, arguments = step
    k = len(stack)
    front = tuple(range(k))
    if kind == "transpose":
        return kind, ((*front, *(axis + k for axis in arguments[0])),)
    if kind == "reshape":
        return kind, ((*stack, *arguments[0]), (*stack, *arguments[1]))
    if kind == "rev":
        return kind, (tuple(axis + k for axis in arguments[0]),)
    if kind == "slice":
        starts, limits, strides = arguments
        return kind, ((*(0 for _ in stack), *starts), (*stack, *limits), (*(1 for _ in stack), *strides))
    shape, axes = arguments
    return kind, ((*stack, *shape), (*front, *(axis + k for axis in axes)))


def entries(shape: Shape, outer: Sequence[Step], stack: Shape, inner: Sequence[Step]) -> np.ndarray:
    """Where in a leaf each entry comes from, of what steps make of it: a stack, and each array of it."""
    stacked = apply_steps(np.arange(math.prod(shape)).reshape(shape), outer)
    return apply_steps(stacked, tuple(lift(step, stack) for step in inner))


def in_order(shape: Shape, steps: Sequence[Step]) -> bool:
    """Whether these steps leave the entries of a leaf one behind the other."""
    count = math.prod(shape)
    return np.array_equal(entries(shape, steps, (), ()).ravel(), np.arange(count))


def same_entries(one: np.ndarray, other: np.ndarray, axes: Sequence[int | None], stack: int) -> bool:
    """Whether two of `entries` are equal, the first one's axes behind the stack moved to `axes`.

    Args:
        axes: where each axis was, None for a new one of size 1; those that are not there are of size 1.
    """
    kept = [axis for axis in axes if axis is not None]
    gone = [axis for axis in range(one.ndim - stack) if axis not in kept]
    one = one.transpose([*range(stack), *(axis + stack for axis in (*kept, *gone))])
    new = [None if axis is None else slice(None) for axis in axes]
    one = one[(*[slice(None)] * stack, *new, *[0] * len(gone))]
    if one.shape != other.shape:
        return False
    constant = [
        [n == 1 or stride == 0 for n, stride in zip(x.shape, x.strides, strict=True)]
        for x in (one, other)
    ]
    first = tuple(0 if all(pair) else slice(None) for pair in zip(*constant, strict=True))
    return constant[0] == constant[1] and np.array_equal(one[first], other[first])


def matrices(x: Any, view: View) -> Any:
    """(groups, d_out, d_in)."""
    return grouped(apply_steps(x, view.steps), view.axes)


def write_matrices(x: jax.Array, view: View, new: jax.Array) -> jax.Array:
    """`x` with `matrices(x, view)` replaced."""
    shape = jax.eval_shape(lambda x: apply_steps(x, view.steps), x).shape
    order = tuple(axis for group in view.axes for axis in group)
    new = new.reshape([shape[axis] for axis in order]).transpose(inverse(order))
    return write(x, view.steps, new)


def grouped(x: Any, axes: Sequence[Shape]) -> Any:
    """Transpose to the order of groups of axes and flatten each group."""
    sides = [math.prod(x.shape[a] for a in group) for group in axes]
    return x.transpose([a for group in axes for a in group]).reshape(sides)


def inverse(order: Shape) -> Shape:
    return tuple(int(axis) for axis in np.argsort(order))


class Signature(NamedTuple):
    """Which entries of a leaf a view has where: equal for equal views however they were written."""

    offset: int
    groups: Strides
    out: Strides
    into: Strides

    def transposed(self) -> Signature:
        return Signature(self.offset, self.groups, self.into, self.out)


def signature(shape: Shape, view: View) -> Signature | None:
    """None where the view cannot be had without a copy."""
    base = np.empty(math.prod(shape), np.int8).reshape(shape)
    x = apply_steps(base, view.steps)
    if base.size == 0 or not np.may_share_memory(base, x):
        return None
    start = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return Signature(start, *(_merged(x, axes) for axes in view.axes))


def overlap(shape: Shape, views: Sequence[View]) -> bool:
    """Whether two of several views have an entry of the leaf in common."""
    base = np.empty(math.prod(shape), np.int8).reshape(shape)  # not touched: a leaf may be of any size
    parts = [apply_steps(base, view.steps) for view in views]
    if not all(np.may_share_memory(base, part) for part in parts):
        return True
    return any(np.shares_memory(one, other) for one, other in itertools.combinations(parts, 2))


def _merged(x: np.ndarray, axes: Shape) -> Strides:
    merged: list[tuple[int, int]] = []
    for axis in axes:
        size, stride = x.shape[axis], x.strides[axis]
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def _reversed(ndim: int, axes: Shape) -> tuple[slice, ...]:
    return tuple(slice(None, None, -1 if axis in axes else None) for axis in range(ndim))


def _slices(starts: Shape, limits: Shape, strides: Shape) -> tuple[slice, ...]:
    return tuple(slice(*one) for one in zip(starts, limits, strides, strict=True))
