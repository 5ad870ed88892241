"""Tables whose rows may be looked up once for all examples, as positions are."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from suite.torch.clock import CaptureClock
from suite.torch.layers import Site


class UnlessBroadcast:
    """In place of a clock: a lookup takes statistics unless its output turns out to be broadcast."""

    def __init__(self, clock: CaptureClock | None) -> None:
        self.clock, self.was_broadcast = clock, False
        self.was_reached = False  # by a backward pass
        self.passed_by: Callable[[], None] | None = None  # to be called where a sum's probe was

    @property
    def sampling(self) -> bool:
        self.was_reached = True
        if self.passed_by is not None and not self.was_broadcast:
            self.passed_by()
        return not self.was_broadcast and (self.clock is None or self.clock.sampling)


class OfSum:
    """In place of a clock: a sum that takes statistics takes them from what comes after it.

    That is the lookup, and a sum of what was looked up with others of its kind, which this one has more
    rows than.
    """

    def __init__(self, clock: CaptureClock | None, before: Sequence[UnlessBroadcast]) -> None:
        self.before, self.unless = before, UnlessBroadcast(clock)

    @property
    def sampling(self) -> bool:
        for one in self.before:
            one.was_broadcast = True
        return self.unless.sampling


class LookedUp(NamedTuple):
    """What an embedding's call found, or that with its axes moved about, or a multiple of it.

    Or the sum of that and of other things that have no examples, perhaps.
    """

    output: weakref.ref[torch.Tensor]
    x: torch.Tensor
    unless: UnlessBroadcast
    site: Site
    version: int  # of the output, which may be changed in place unseen
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()  # from what was found
    factor: Any = 1.0  # or (), a tensor
    kept: torch.Tensor | None = None  # where a mask left it, of the output's shape; None: everywhere
    sums: tuple[UnlessBroadcast, ...] | None = None  # of a sum: those that have statistics of it
    size: int = 0  # of a sum: how many numbers it has
    capture: Any = None  # the table's

    def moved(self, output: torch.Tensor, step: Any, factor: Any = 1.0) -> LookedUp:
        """What a step, or a factor, makes of it."""
        steps = self.steps if step is None else (*self.steps, step)
        return self._replace(
            output=weakref.ref(output),
            version=output._version,
            steps=steps,
            factor=self.factor * factor,
            kept=self.kept if self.kept is None or step is None else step(self.kept),
        )

    def summed(self, total: torch.Tensor, *probes: UnlessBroadcast) -> LookedUp:
        """What it is a part of, and the probes there."""
        step = functools.partial(torch.broadcast_to, size=total.shape)
        sums = *(self.sums or ()), *probes
        return self.moved(total, step)._replace(sums=sums, size=total.numel())

    def masked(self, output: torch.Tensor, kept: torch.Tensor) -> LookedUp:
        """What is left of it where `kept`, of no more rows."""
        step = functools.partial(torch.broadcast_to, size=output.shape)
        moved = self.moved(output, step)
        before = True if moved.kept is None else moved.kept
        return moved._replace(kept=before & kept.expand(output.shape))

    def positions(self, width: int) -> tuple[torch.Tensor, int] | None:
        """The index that each position has now, and which axis, from the end, has the features.

        None: they are not on one axis any more.
        """
        with torch.no_grad(), torch._C.DisableTorchFunction():
            index = self.x[..., None].expand(*self.x.shape, width)
            marks = torch.arange(width, device=self.x.device).expand(index.shape)
            try:
                for step in self.steps:
                    index, marks = step(index), step(marks)
            except RuntimeError:  # of a view, where these lie otherwise in memory than what was found
                return None
        axis = axis_of_features(marks, width)
        return None if axis is None else (index.select(axis, 0), axis)


def axis_of_features(marks: torch.Tensor, width: int) -> int | None:
    """The axis, from the end, that has all features in their order; None: there is none.

    Args:
        marks: a view, of each number of what was looked up, of which feature it is.
    """
    axes = [axis for axis in range(-marks.ndim, 0) if marks.shape[axis] > 1 and marks.stride(axis)]
    if width == 1:
        axes = [axis for axis in range(-marks.ndim, 0) if marks.shape[axis] == 1][-1:]
    return axes[0] if len(axes) == 1 and marks.shape[axes[0]] == width else None


def spreads(operand: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether a sum has more rows than this operand, along an axis in front."""
    if total.numel() <= operand.numel():
        return False
    return operand.ndim < total.ndim or len(operand) < len(total)


def counts_in_sum(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether rows of a sum with a lookup for all examples are those that count.

    Args:
        x: what was looked up.
        index: what each row has of it.
        rows: (..., width), the sum.
    """
    positions = rows.numel() // max(rows.shape[-1], 1)
    if positions < x.numel() or (positions == x.numel() and len(rows) > 1):
        return False
    return not is_of_each(x, index, rows)


def is_of_each(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether each example has its own index, whose axes are the first of `rows`, (n, ..., width).

    Args:
        x: what was looked up, before its axes were moved: of one example an axis in front may be new.
    """
    once = index.ndim > 0 and (len(x) > 1 if len(index) == 1 else index.stride(0) == 0)
    return index.ndim == rows.ndim - 1 and index.ndim > 0 and len(index) == len(rows) and not once


def as_repeated(x: torch.Tensor, *counts: Any) -> torch.Tensor:
    """`x.repeat(*counts)`, without a copy where no axis but new ones, or of length 1, is repeated."""
    if len(counts) == 1 and not isinstance(counts[0], int):
        counts = tuple(counts[0])
    new = len(counts) - x.ndim
    sizes = [*counts[:new], *(k * n for k, n in zip(counts[new:], x.shape, strict=True))]
    if any(k != 1 and n != 1 for k, n in zip(counts[new:], x.shape, strict=True)):
        return x.repeat(*counts)
    return x.expand(sizes)
