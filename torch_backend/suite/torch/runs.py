"""Calls of layers, and which of them the loss is made of, as backward passes tell.

The number of its terms is read off the last one. That may be of a layer that is not covered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from suite.torch.derivatives import Noted, is_recorded
from suite.torch.hooks import in_backward, is_within_functions, uncompiled

if TYPE_CHECKING:
    from suite.torch.clock import CaptureClock


class Counting(Protocol):
    """What has counts of positions: a layer's capture, or an `Ending`."""

    began: int  # how often they began anew

    def is_awaited(self, transposed: bool) -> bool:
        """Whether the backward pass that runs wants them."""


class Run:
    """A call of a layer, of which backward passes through it tell that a loss is made of it."""

    __slots__ = ("clock", "counted", "layer", "looks_up", "number", "owner", "transposed")

    def __init__(
        self,
        clock: CaptureClock,
        number: int,
        owner: Counting | None,
        layer: str = "",
        *,
        transposed: bool = False,
        looks_up: bool = False,
    ) -> None:
        self.clock, self.number = clock, number  # in the order of forward passes
        self.owner, self.layer = owner, layer  # '': one that is not covered
        self.transposed, self.looks_up = transposed, looks_up
        self.counted = -1

    def is_awaited(self) -> bool:
        """Whether the backward pass that runs wants statistics of it; passes of our own do."""
        if self.clock.sampled or self.owner is None:
            return True
        return self.owner.is_awaited(self.transposed)

    def reached(self) -> bool:
        """A backward pass has come to it; whether its positions were not counted before.

        Parts of a loss that go backward one by one come to one call: they are of the same terms.
        """
        clock = self.clock
        clock.passes()
        if self.looks_up:
            if self.number > clock.looked_up.number:
                clock.looked_up = self
        elif self.number > clock.last.number:
            clock.last = self
        if clock.sampled or self.owner is None:
            return True
        before, self.counted = self.counted, self.owner.began
        return before != self.counted

    def counts_as(self, kind: Any) -> bool:
        """Whether the positions of this kind of uses count: that of the last, which is reached first.

        A parameter may be the weight of an encoder, and the transpose of that the decoder's.
        """
        owner: Any = self.owner
        if owner.counted_kind is None or owner.counted_kind[0] != owner.began:
            owner.counted_kind = owner.began, kind
        return bool(owner.counted_kind[1] == kind)


class Ending:
    """Counts the positions of a layer that is not covered, for it may be the model's last."""

    def __init__(self, clock: CaptureClock, device: torch.device | None) -> None:
        self.clock = clock
        # Its gradient is the count of calls in compiled graphs.
        self.slot = torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
        self.count = 0  # of other calls
        self.before: tuple[int, torch.Tensor | None] = 0, None  # both, when the last pass came to it
        self.came = -1  # which backward pass that was
        self.doubted: list[Callable[[], None]] = []  # counts of a pass that may be no training
        self.began = 0  # how often counts began anew
        own = weakref.ref(self)

        @uncompiled
        def arrived(gradient: torch.Tensor) -> None:
            ending = own()
            if ending is not None:
                ending._comes()

        self.slot.register_hook(arrived)

    def _comes(self) -> None:
        now = torch._C._current_graph_task_id()
        if now != self.came:
            counted = self.slot.grad
            self.came, self.before = now, (self.count, None if counted is None else counted.clone())

    def sees(self, output: torch.Tensor, positions: int) -> None:
        """A call that no graph was compiled of."""
        if not self.clock.sampled and not is_within_functions():
            self.watch(output, positions, None if in_backward() else self.clock.ends(self))

    def watch(self, output: torch.Tensor, positions: int, run: Run | None) -> None:
        """Have backward passes through an output count it, also those through its derivatives.

        Args:
            run: of a call that was not made before.
        """
        clock, known = self.clock, run or Run(self.clock, -1, self)

        def count() -> None:
            self._comes()
            if known.reached():
                self.count += positions

        def count_or_doubt() -> None:
            if self.is_awaited(False):
                count()
            else:
                self.doubted.append(count)

        def arrived(gradient: torch.Tensor) -> Any:
            self._comes()
            count_or_doubt()
            if clock.pausing or not is_recorded():
                return None
            return Noted.apply(gradient, self.slot, count_or_doubt)

        output.register_hook(arrived)

    def believe(self) -> None:
        """The pass that runs ends at statistics: of layers in reentrant checkpoints, as it turns out."""
        for count in self.doubted:
            count()
        self.doubted.clear()

    def is_awaited(self, transposed: bool) -> bool:
        """Whether the backward pass that runs ends at statistics, not only at what it is asked for."""
        return any(capture.is_awaited(False) for capture in self.clock.captures)

    def positions(self) -> Any:
        """A number or a tensor (); None: no backward pass came here."""
        if self.slot.grad is None:
            return self.count or None
        return self.slot.grad + self.count

    def begin(self, *, again: bool = False) -> None:
        """Count anew.

        Args:
            again: whether the backward pass that runs came here before, if it did at all.
        """
        now, (count, counted) = torch._C._current_graph_task_id(), self.before
        if now == -1:
            self.doubted.clear()
        if now != -1 and (again or now == self.came):  # what this pass counted stays
            self.count -= count
            if self.slot.grad is not None and counted is not None:
                self.slot.grad = self.slot.grad - counted
        else:
            self.count, self.slot.grad = 0, None
        self.before = 0, None
        self.began += 1
