"""Layers that run in other steps than those that take statistics: heads in turn, networks of a GAN."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

_NEVER = -1  # without statistics so far; below, it is let be for so many of its steps less one
_PAUSE = 8  # periods until it is asked for again, after the first time, and then twice as many
_MOST_DOUBLED = 20  # times
_FOR_IDLE = 2  # steps in a period that take statistics for layers that are often idle


class Overdue:
    """How often each layer has had a gradient since it had statistics.

    Where that is a whole period, or it never had any, the coming steps want statistics for it: as many
    as a period has, and twice as many each time that it did not run in these. Where it had a gradient in
    such steps and was not seen, it is let be for a while. A layer that is idle with a gradient of zeros,
    an expert without rows, has a gradient in each step. For all of these together a period has few
    steps more.
    """

    def __init__(self, layers: int) -> None:
        self.waits = [_NEVER] * layers
        self._asked: dict[int, int] = {}  # layer -> steps for which they are still wanted
        self._tries = [0] * layers
        self._idles = [0] * layers  # whether it was idle
        self._left = _FOR_IDLE  # steps in this period
        self._lost: dict[int, int] = {}  # layer -> how often in a row it was not seen, since it was
        self.stale: list[int] = []  # layers that were not seen in this step for the second time
        self.last: tuple[Any, ...] = ()  # what `note` was called with, but for the period

    @property
    def layers(self) -> set[int]:
        """Those that the coming step is to take statistics for, if it would not anyway."""
        return {i for i in self._asked if self._left or not self._idles[i]}

    @property
    def doubted(self) -> set[int]:
        """Those of which `note` has to know whether they are idle."""
        return {i for i, n in enumerate(self.waits) if n >= _NEVER}

    def note(
        self,
        present: Sequence[int],
        seen: Sequence[bool],
        idle: Collection[int],
        wanted: bool,
        regular: bool,
        period: int,
    ) -> None:
        """A step was taken.

        Args:
            present: layers with a gradient.
            seen: by layer, whether it had statistics.
            idle: those of `doubted` and `present` that were not seen, with a gradient of zeros.
            wanted: whether the step was to take any.
            regular: whether it is one that does so anyway.
            period: steps from one that does to the next.
        """
        self.last, self.stale = (present, seen, idle, wanted), []
        asked = self.layers
        ending = {i for i in asked if self._asked[i] == 1}
        if regular:
            self._left = _FOR_IDLE
        elif asked and all(self._idles[i] for i in asked):
            self._left -= 1
        for i in asked:
            self._asked[i] -= 1
        for i in ending:
            del self._asked[i]
        if wanted and not any(seen) and all(i in idle for i in present):  # zeros alone are no step
            return
        for i in present:
            if wanted and seen[i]:
                self.waits[i] = self._tries[i] = 0
                self._asked.pop(i, None)
                self._lost.pop(i, None)
            elif wanted and i not in idle:
                self._lose(i)
                if self.waits[i] >= _NEVER:
                    self._pause(i, period)
                else:
                    self.waits[i] += 1
            else:
                self._wait(i, i in idle, i in ending, period, wanted)

    def _wait(self, i: int, idle: bool, ending: bool, period: int, wanted: bool) -> None:
        if idle:
            self._idles[i] = 1
            if ending:
                self._pause(i, period)
                return
            if i in self._asked:  # its turn comes in a period's steps
                self._asked[i] = min(self._asked[i], period)
                return
        new = self.waits[i] == _NEVER
        self.waits[i] += not new
        if not wanted and (new or self.waits[i] >= period) and i not in self._asked:
            self._asked[i] = period * 2 ** self._tries[i]
            self._tries[i] = min(self._tries[i] + 1, _MOST_DOUBLED)

    def _pause(self, i: int, period: int) -> None:
        self.waits[i] = _NEVER - _PAUSE * period * 2 ** self._tries[i]
        self._asked.pop(i, None)

    def _lose(self, i: int) -> None:
        if self.waits[i] >= 0 or i in self._lost:
            self._lost[i] = self._lost.get(i, 0) + 1
            if self._lost[i] == 2:
                self.stale.append(i)

    def state(self, steps: int, period: int, among: Sequence[int] | None = None) -> list[int]:
        """What a resumed run needs, of these layers; nothing where all are alike."""
        alike = self.waits == self._all_seen(steps, period)
        if alike and not any(self._tries) and not any(self._idles):
            return []
        asked = [self._asked.get(i, 0) for i in range(len(self.waits))]
        chosen = range(len(self.waits)) if among is None else among
        of_each = self.waits, asked, self._tries, self._idles
        return [*(numbers[i] for numbers in of_each for i in chosen), self._left]

    def _all_seen(self, steps: int, period: int) -> list[int]:
        """What `waits` is where all layers had statistics in each step that takes some."""
        return [(steps - 1) % period if steps else _NEVER] * len(self.waits)

    def load(self, state: Sequence[int], steps: int, period: int) -> None:
        """Take over `state()`; nothing: all layers had statistics in each step that takes some."""
        n = len(self.waits)
        state = list(state) or self._all_seen(steps, period)
        state += [0] * (4 * n - len(state))  # there was less to know
        self.waits, asked, self._tries, self._idles = (state[i * n : (i + 1) * n] for i in range(4))
        self._asked = {i: left for i, left in enumerate(asked) if left}
        self._left = state[4 * n] if len(state) > 4 * n else _FOR_IDLE
        self._lost = {}
