"""Layers that run in other steps than those that take statistics: heads in turn, networks of a GAN."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

_NEVER = -1  # had statistics; below that, in so many steps less one they are asked for again
_PAUSE = 8  # periods until then, after the first time, and twice as many each further time
_MOST_DOUBLED = 20  # times


class Overdue:
    """How often each layer has had a gradient since it had statistics.

    Where that is a whole period, or it never had any, the coming steps want statistics for it: as many
    as a period has, and twice as many each time that it did not run in these. Where it had gradients in
    such steps and was not seen, be they zero or of calls that no hook sees, it is let be for a while.
    """

    def __init__(self, layers: int) -> None:
        self.waits = [_NEVER] * layers
        self._asked: dict[int, int] = {}  # layer -> steps for which they are still wanted
        self._tries = [0] * layers
        self._lost: dict[int, int] = {}  # layer -> how often in a row it was not seen, since it was
        self.stale: list[int] = []  # layers that were not seen in this step for the second time
        self.last: tuple[Any, ...] = ()  # what `note` was called with, but for the period

    @property
    def layers(self) -> set[int]:
        """Those that statistics are wanted for."""
        return set(self._asked)

    def note(
        self,
        present: Sequence[int],
        seen: Sequence[bool],
        idle: Collection[int],
        wanted: bool,
        period: int,
    ) -> None:
        """A step was taken.

        Args:
            present: layers with a gradient.
            seen: by layer, whether it had statistics.
            idle: those of `present` that were not seen, with a gradient of zeros.
            wanted: whether the step was to take any.
            period: steps from one that does to the next.
        """
        self.last, self.stale = (present, seen, idle, wanted), []
        ending = {i for i, left in self._asked.items() if left == 1}
        self._asked = {i: left - 1 for i, left in self._asked.items() if left > 1}
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
            elif wanted and i in ending:
                self._pause(i, period)
            elif wanted and i in self._asked:  # its turn comes in a period's steps
                self._asked[i] = min(self._asked[i], period)
            else:
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

    def state(self) -> dict[str, list[int]]:
        """What a resumed run needs, in entries that are there only where layers run in turn."""
        if len({*self.waits}) <= 1 and not any(self._tries):
            return {}
        asked = [self._asked.get(i, 0) for i in range(len(self.waits))]
        return {"waits": [*self.waits, *asked, *self._tries]}

    def load(self, state: Sequence[int] | None, steps: int) -> None:
        """Take over `state()['waits']`; None: after so many steps all layers are alike."""
        n = len(self.waits)
        state = [0 if steps else _NEVER] * n + [0] * (2 * n) if state is None else list(state)
        self.waits, asked, self._tries = state[:n], state[n : 2 * n], state[2 * n :]
        self._asked = {i: left for i, left in enumerate(asked) if left}
        self._lost = {}
