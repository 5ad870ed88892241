"""K-FAC in recorded steps: what they depend on, and what the host does beside them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from suite.torch.checks import is_at_hand
from suite.torch.factor_refresh import Attempt
from suite.torch.graph_kinds import rates_on_device, set_rates
from suite.torch.kfac import KFAC

_HYPERPARAMETERS = ("damping", "factor_decay", "kl_clip", "lr")


class _Record(NamedTuple):
    """What a recorded step left on the host, or reads."""

    rates: list[torch.Tensor | None]
    new_inverses: bool
    layers: Any  # what it tells of the layers that ran
    terms: torch.Tensor | None  # where it leaves how many terms the loss had, if it has statistics ...
    clipped: torch.Tensor | None  # ... and what kl_clip multiplied directions with
    attempts: list[Attempt]  # at new inverses: what the host is to look at
    held: Any  # what else it reads


class RecordableKFAC:
    """See `suite.torch.graph_kinds.Recordable`.

    Raises:
        ValueError: a setting that needs the host in each step.
    """

    def __init__(self, kfac: KFAC) -> None:
        _require_recordable(kfac)
        self.optimizer = kfac
        self.device = kfac._engine.layers[0].device
        self._derived: Any = None  # where recorded steps read inverses

    def memory(self) -> list[torch.Tensor]:
        kfac = self.optimizer
        found = [factor.average for factor in kfac._engine.factors.factors]
        found += [x for own in kfac.state.values() for x in own.values() if isinstance(x, torch.Tensor)]
        found.append(kfac._skipped.begin_on(self.device))
        return found

    def forget(self) -> None:
        self._derived = None

    def not_yet(self) -> str:
        engine = self.optimizer._engine
        if engine.capture.clock.discovering or not engine.factors.refreshed:
            return "before there are inverses"
        if self._derived is not None:  # others may have computed inverses, into other memory
            engine.return_to(self._derived)
        return ""

    def why_not(self) -> str:
        kfac, engine, groups = self.optimizer, self.optimizer._engine, self.optimizer.param_groups
        if self._is_due() and (engine.rule.keeps_eigenbases or any(engine.factors.readiness()[1])):
            return "with new inverses"
        if not engine.capture.attached:
            return "after detach()"
        if kfac._overdue.layers:
            return "with layers that run in turn"
        if all(is_at_hand(group["lr"]) and not float(group["lr"]) for group in groups):
            return "with a learning rate of 0"
        if any(isinstance(value, torch.Tensor) for value in self._hyperparameters()):
            return "with settings that are tensors"
        return ""

    def kind(self) -> dict[str, Any]:
        engine = self.optimizer._engine
        return {
            "new_inverses": self._is_due(),
            "statistics": engine.capture.clock.wanted,
            "layers_with_inverses": tuple(engine.factors.readiness()[1]),
            "hyperparameters": self._hyperparameters(),
        }

    def aside(self) -> tuple[str, ...]:
        return ()

    def begin_pass(self) -> None:
        self.optimizer._engine.capture.begin_apart()

    def slots(self) -> list[torch.Tensor]:
        return self.optimizer._engine.capture.slots()

    def reset(self) -> None:
        self.optimizer.reset_batch()

    @contextmanager
    def recording(self) -> Iterator[_Recording]:
        kfac, engine, groups = self.optimizer, self.optimizer._engine, self.optimizer.param_groups
        if self._derived is None:
            self._derived = engine.factors.derived()
        before = kfac.steps, copy.deepcopy(kfac._overdue), kfac._counted_terms, engine.clip_coefficient
        due, kfac._is_graphed = self._is_due(), True
        single = [torch.float32] * len(groups)  # which is what fused optimizers read
        try:
            with rates_on_device(groups, self.device, single) as rates:
                yield _Recording(kfac, rates, due, before[2])
        finally:
            kfac._is_graphed, engine.attempts = False, []
            kfac._steps, kfac._overdue, kfac._counted_terms, engine.clip_coefficient = before
            kfac._set_clock()

    def begin_replay(self, record: _Record) -> None:
        kfac = self.optimizer
        set_rates(record.rates, kfac.param_groups)
        if record.new_inverses:
            kfac._skipped.look_back(kfac.steps)

    def end_replay(self, record: _Record) -> None:
        kfac, engine = self.optimizer, self.optimizer._engine
        if record.new_inverses:
            engine.factors.settle(record.attempts)
            if kfac._skipped.was_skipped(kfac.steps):  # new inverses are due in the next
                return
            engine.refreshed_at = kfac.steps
        if record.terms is not None:
            kfac._counted_terms = record.terms.clone()
        if record.clipped is not None:
            engine.clip_coefficient = record.clipped.clone()
        present, seen, idle, wanted = record.layers
        period = kfac.factor_update_steps
        kfac._overdue.note(present, seen, idle, wanted, kfac.steps % period == 0, period)
        engine.reports.stale(kfac._overdue.stale)
        kfac._steps += 1
        kfac._set_clock()

    def _is_due(self) -> bool:
        """Whether the coming step has new inverses."""
        return bool(self.optimizer.steps % self.optimizer.inv_update_steps == 0)

    def _hyperparameters(self) -> tuple[Any, ...]:
        return tuple(getattr(self.optimizer, name) for name in _HYPERPARAMETERS)


class _Recording:
    def __init__(
        self, kfac: KFAC, rates: list[torch.Tensor | None], due: bool, terms: torch.Tensor | None
    ) -> None:
        self._kfac, self._rates, self._due, self._terms = kfac, rates, due, terms

    def record(self) -> _Record:
        kfac, engine = self._kfac, self._kfac._engine
        terms = None if kfac._counted_terms is self._terms else kfac._counted_terms
        left = kfac._overdue.last, terms, engine.clip_coefficient, engine.attempts
        return _Record(self._rates, self._due, *left, engine.factors.readiness()[0])


def _require_recordable(kfac: KFAC) -> None:
    """ValueError unless the host has nothing to do in a step but to start it."""
    base, engine = kfac.optimizer, kfac._engine
    fused = base is not None and all(group.get("fused") for group in base.param_groups)
    if not fused or not getattr(base, "_step_supports_amp_scaling", False):
        raise ValueError(
            "optimizer must have a fused one inside, as SGD(..., fused=True) is, which the device keeps "
            f"from steps that are not finite, got {type(base).__name__}"
        )
    if not engine.is_alone:
        raise ValueError("optimizer must be of one process: ranks agree on the host in each step")
    if len({layer.device for layer in engine.layers}) > 1:
        raise ValueError("optimizer must have all layers on one device")
    for name, allowed in (("fisher", "empirical"), ("grad_scaler", None), ("spread_inverses", False)):
        if kfac._settings[name] != allowed:
            raise ValueError(
                f"{name} must be {allowed!r} in recorded steps, got {kfac._settings[name]!r}"
            )
    terms = engine.agreements.terms
    if callable(terms) or (isinstance(terms, torch.Tensor) and is_at_hand(terms)):
        raise ValueError(f"terms must be a number in recorded steps, got {type(terms).__name__}")
