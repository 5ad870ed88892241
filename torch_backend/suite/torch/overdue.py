"""Layers that run in other steps than those that take statistics: heads in turn, networks of a GAN."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_NEVER = -1  # had statistics
_MISSED = -2  # they were wanted in a step in which it had a gradient, and its hooks saw nothing
_AT_ONCE = 2**31 - 1


class Overdue:
    """How often each layer has had a gradient since it had statistics.

    Where that is a whole period, or it never had any, the coming steps want statistics until it has run.
    """

    def __init__(self, layers: int) -> None:
        self.waits = [_NEVER] * layers
        self.are_some = False

    def note(self, present: Iterable[int], seen: Sequence[bool], wanted: bool, period: int) -> None:
        """A step was taken.

        Args:
            present: layers with a gradient.
            seen: by layer, whether it had statistics.
            wanted: whether the step took any.
            period: steps from one that does to the next.
        """
        waits = self.waits
        for i in present:
            if wanted:
                waits[i] = 0 if seen[i] else _MISSED
            elif waits[i] >= 0:
                waits[i] += 1
            elif waits[i] == _NEVER:
                waits[i] = _AT_ONCE
        self.are_some = max(waits) >= period

    def load(self, waits: Sequence[int] | None, period: int) -> None:
        """Take over `waits`; None: nothing is known."""
        self.waits = [0] * len(self.waits) if waits is None else list(waits)
        self.are_some = max(self.waits) >= period
