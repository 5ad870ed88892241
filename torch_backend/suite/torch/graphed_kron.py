"""Kron in recorded steps: what they depend on, and what the host does beside them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from suite.torch.graph_kinds import rates_on_device, set_rates
from suite.torch.kron import Kron
from suite.torch.kron_engine import StepSettings
from suite.torch.kron_settings import COUNTS, SCHEDULES, classes, planned, require_same, turns

_Numbers = tuple[torch.Tensor | None, torch.Tensor | None]  # a step's, and its rate for factors


class _Record(NamedTuple):
    """Where a recorded step reads numbers of the host."""

    rates: list[torch.Tensor | None]
    groups: list[tuple[int, list[bool], list[_Numbers]]]  # number, which have a gradient, by part


class RecordableKron:
    """See `suite.torch.graph_kinds.Recordable`.

    Raises:
        ValueError: a setting that needs the host in each step.
    """

    def __init__(self, kron: Kron) -> None:
        if kron.hvp is not None:
            raise ValueError(f"hvp must be None in recorded steps, got {kron.hvp!r}")
        if not kron._ranks.alone:
            raise ValueError("optimizer must be of one process: ranks agree on the host in each step")
        devices = {p.device for group in kron.param_groups for p in group["params"] if p.numel()}
        if len(devices) != 1:
            raise ValueError(f"optimizer must have all parameters on one device, got {len(devices)}")
        self.optimizer = kron
        (self.device,) = devices
        self._plans: list[Any] = []  # by group, the coming step's

    def memory(self) -> list[torch.Tensor]:
        self.optimizer._require_parameters()  # it follows changes of `state`
        assert self.optimizer._skipped is not None
        found = [self.optimizer._skipped]
        for pack in (pack for engine in self.optimizer._engines for pack in engine.packs):
            found += [pack.momentum, pack.weight, pack.streams]
            found += [x for own in pack.kron for x in own]
        return found

    def forget(self) -> None:
        pass

    def not_yet(self) -> str:
        kron = self.optimizer
        for group, fixed in zip(kron.param_groups, kron._made_for, strict=True):
            require_same(group, fixed)
        self._plans = [planned(group) for group in kron.param_groups]
        return ""

    def why_not(self) -> str:
        return ""

    def kind(self) -> dict[str, Any]:
        plans = zip(self.optimizer.param_groups, self._plans, strict=True)
        return {"new_factors": tuple(classes(group, settings) for group, (_, settings, _) in plans)}

    def aside(self) -> tuple[str, ...]:
        return (*COUNTS, *SCHEDULES, "behind")

    def begin_pass(self) -> None:
        pass

    def slots(self) -> list[torch.Tensor]:
        return []

    def reset(self) -> None:
        pass

    @contextmanager
    def recording(self) -> Iterator[_Recording]:
        kron, groups = self.optimizer, self.optimizer.param_groups
        before = [{name: group[name] for name in (*COUNTS, "behind")} for group in groups]
        like = [[p.dtype for p in engine.like] for engine in kron._engines]
        dtypes = [functools.reduce(torch.promote_types, own, torch.float32) for own in like]
        try:
            with rates_on_device(groups, self.device, dtypes) as rates:
                kron._recording = recording = _Recording(self.device, rates)
                yield recording
        finally:
            kron._recording = None
            for group, counts in zip(groups, before, strict=True):
                group.update(counts)

    def begin_replay(self, record: _Record) -> None:
        kron = self.optimizer
        set_rates(record.rates, kron.param_groups)
        for number, present, numbers in record.groups:
            group, engine = kron.param_groups[number], kron._engines[number]
            engine.rule, settings, counts = self._plans[number]
            parts = turns(group, settings, counts, present)
            for (own, _), (step, rate) in zip(parts, numbers, strict=True):
                if step is not None:
                    step.fill_(own.step)
                if rate is not None:
                    rate.fill_(own.preconditioner_lr)
            group.update(counts)

    def end_replay(self, record: _Record) -> None:
        pass


class _Recording:
    """What a step that is recorded reads: numbers of the device in place of the host's."""

    def __init__(self, device: torch.device, rates: list[torch.Tensor | None]) -> None:
        self._device = device
        self._record = _Record(rates, [])

    def lifted(
        self, group: int, present: list[bool], parts: list[tuple[StepSettings, Any]]
    ) -> list[tuple[StepSettings, Any]]:
        """The parts of a group's step, from `turns`."""
        found, numbers = [], list[_Numbers]()
        for settings, members in parts:
            step = rate = None
            if settings.update or settings.stochastic_rounding:  # which take noise
                step = torch.full((), settings.step, dtype=torch.int32, device=self._device)
                settings = settings._replace(step=step)
            if settings.update:
                rate = torch.full(
                    (), settings.preconditioner_lr, dtype=torch.float64, device=self._device
                )
                settings = settings._replace(preconditioner_lr=rate)
            numbers.append((step, rate))
            found.append((settings, members))
        self._record.groups.append((group, present, numbers))
        return found

    def record(self) -> _Record:
        return self._record
