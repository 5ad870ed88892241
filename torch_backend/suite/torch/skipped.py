"""Steps that change nothing because something was not finite, as the host or the device sees to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from suite.torch.agreement import Agreement
from suite.torch.checks import warn_user
from suite.torch.inplace import HOST_DEVICES


class SkippedSteps:
    """Their number, and how a fused base optimizer is kept from one without the host having looked."""

    def __init__(self) -> None:
        self._seen = 0
        self.unread: torch.Tensor | None = None  # (): those that the host did not wait to see
        self._moved: set[int] = set()  # by id: what the base optimizer has moved, and has a state for

    def count(self) -> int:
        """Of all; waits for the device, if that was left to stop the optimizer."""
        return self._seen + (0 if self.unread is None else int(self.unread))

    def begin_on(self, device: torch.device) -> torch.Tensor:
        """What steps that the host did not wait to see are counted in, (), made if there is none."""
        if self.unread is None:
            self.unread = torch.zeros((), dtype=torch.float32, device=device)
        return self.unread

    def load(self, count: int) -> None:
        """Go on from a checkpoint's number."""
        self._seen, self.unread = count, None

    def can_be_left_to_device(self, base: Any, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the device can keep the base optimizer from a step, and the host need not wait.

        It takes the attributes by which GradScaler tells fused optimizers of an overflow. Before SGD's
        first step on a parameter it would leave its momentum uninitialized (torch 2.13).
        """
        if not getattr(base, "_step_supports_amp_scaling", False):
            return False
        if not all(group.get("fused") for group in base.param_groups):
            return False
        present = [p for p in parameters if p.grad is not None]
        devices = {p.device for p in present}
        return (
            len(devices) == 1
            and devices.pop().type not in HOST_DEVICES
            and self._moved.issuperset(map(id, present))
        )

    def step(self, base: Any, parameters: Sequence[torch.Tensor], finite: torch.Tensor | None) -> None:
        """A step of the base optimizer, if `finite` is not None only where that is true."""
        if finite is None:
            base.step()
        else:
            bad = (~finite).to(torch.float32)
            self.begin_on(bad.device).add_(bad)  # in place: a recorded step runs again
            base.grad_scale, base.found_inf = None, bad
            try:
                base.step()
            finally:
                del base.grad_scale, base.found_inf
        # Others may have their turn: heads, of which each batch has one.
        self._moved &= {id(p) for p in parameters}
        self._moved |= {id(p) for p in parameters if p.grad is not None}

    def look(self, agreed: Agreement, finite: torch.Tensor, step: int) -> Agreement:
        """`agreed` when the host has waited to see whether all is `finite`, and was before this step."""
        bad = (~finite).to(torch.float32)
        unread = torch.zeros_like(bad) if self.unread is None else self.unread.to(bad.device)
        now, before = torch.stack([bad, unread]).tolist()
        self._tell(int(before), step)
        return agreed._replace(finite=None, unusable=(0,) if now else ())

    def look_back(self, step: int) -> None:
        """Wait to see whether all was finite before this step."""
        if self.unread is not None:
            self._tell(int(self.unread), step)

    def was_skipped(self, step: int) -> bool:
        """Wait to see whether this step, the only one since `look_back`, was not finite."""
        skipped = self.unread is not None and bool(self.unread)
        if skipped:
            self.skip((), step, "")
            self.unread.zero_()  # type: ignore[union-attr]
        return skipped

    def _tell(self, unread: int, step: int) -> None:
        if self.unread is not None:
            self.unread.zero_()
        self._seen += unread
        if unread:
            warn_user(
                f"{unread} of the steps before step {step} were skipped: a gradient or a "
                f"statistic was not finite ({self._seen} skipped so far)"
            )

    def skip(self, parameters: Sequence[torch.Tensor], step: int, where: str) -> None:
        """This step changes nothing: gradients are dropped."""
        self._seen += 1
        for parameter in parameters:
            parameter.grad = None
        warn_user(
            f"step {step} was skipped: a gradient or a statistic was not finite{where} "
            f"({self._seen} skipped so far)"
        )
