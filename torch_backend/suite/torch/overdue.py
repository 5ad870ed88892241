"""Layers that run in other steps than those that take statistics: heads in turn, networks of a GAN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_NEVER = -1  # had statistics
_UNSEEN = -2  # they were wanted in a step in which it had a gradient, and its hooks saw nothing


class Overdue:
    """How often each layer has had a gradient since it had statistics.

    Where that is a whole period, or it never had any, the coming steps want statistics for it: as many
    as a period has, and twice as many each time that it did not run in these.
    """

    def __init__(self, layers: int) -> None:
        self.waits = [_NEVER] * layers
        self._asked: dict[int, int] = {}  # layer -> steps for which they are still wanted
        self._tries = [0] * layers
        self.last: tuple[Any, ...] = ()  # what `note` was called with, but for the period

    @property
    def layers(self) -> set[int]:
        """Those that statistics are wanted for."""
        return set(self._asked)

    def note(self, present: Sequence[int], seen: Sequence[bool], wanted: bool, period: int) -> None:
        """A step was taken.

        Args:
            present: layers with a gradient.
            seen: by layer, whether it had statistics.
            wanted: whether the step was to take any.
            period: steps from one that does to the next.
        """
        self.last = present, seen, wanted
        for i, left in list(self._asked.items()):
            if left > 1:
                self._asked[i] = left - 1
            else:
                del self._asked[i]
        for i in present:
            if wanted:
                self.waits[i] = 0 if seen[i] else _UNSEEN
                self._tries[i] = 0
                self._asked.pop(i, None)
                continue
            new = self.waits[i] == _NEVER
            if self.waits[i] >= 0:
                self.waits[i] += 1
            if (new or self.waits[i] >= period) and i not in self._asked:
                self._asked[i] = period * 2 ** self._tries[i]
                self._tries[i] += 1

    def state(self) -> dict[str, list[int]]:
        """What a resumed run needs, in entries that are there only where layers run in turn."""
        if len({*self.waits} - {_UNSEEN}) <= 1 and not any(self._tries):
            return {}
        asked = [self._asked.get(i, 0) for i in range(len(self.waits))]
        return {"waits": [*self.waits, *asked, *self._tries]}

    def load(self, state: Sequence[int] | None, steps: int) -> None:
        """Take over `state()['waits']`; None: after so many steps all layers are alike."""
        n = len(self.waits)
        state = [0 if steps else _NEVER] * n + [0] * (2 * n) if state is None else list(state)
        self.waits, asked, self._tries = state[:n], state[n : 2 * n], state[2 * n :]
        self._asked = {i: left for i, left in enumerate(asked) if left}
