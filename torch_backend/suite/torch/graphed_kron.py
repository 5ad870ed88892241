"""Kron in recorded steps: what they depend on, and what the host does beside them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from suite.torch.graph_kinds import rates_on_device, set_rates
from suite.torch.kron import Kron
from suite.torch.kron_settings import COUNTS, SCHEDULES, classes, planned, require_same, turns
from suite.torch.kron_steps import StepSettings


class _Numbers(NamedTuple):
    """Of a group's step: where it reads numbers of the host."""

    step: torch.Tensor  # (), int32
    rates: list[torch.Tensor]  # () each: of factors, by class of parameters


class _Record(NamedTuple):
    rates: list[torch.Tensor | None]  # learning rates
    numbers: list[_Numbers]
    present: dict[int, list[bool]]  # which parameters have a gradient, by group that has some


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
        due, behind = [], []
        for found, others in self._classes():
            due.append(tuple(now for now, _ in found))
            behind.append(tuple(others.items()))
        return {"new_factors": tuple(due), "parameters_without_gradients_before": tuple(behind)}

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
        dtypes = [functools.reduce(torch.promote_types, own) if own else torch.float32 for own in like]
        numbers = [
            _Numbers(
                torch.full((), settings.step, dtype=torch.int32, device=self.device),
                [torch.full((), r, dtype=torch.float64, device=self.device) for _, r in found],
            )
            for (found, _), (_, settings, _) in zip(self._classes(), self._plans, strict=True)
        ]
        keys = [found for found, _ in self._classes()]
        try:
            with rates_on_device(groups, self.device, dtypes) as rates:
                kron._recording = recording = _Recording(_Record(rates, numbers, {}), keys)
                yield recording
        finally:
            kron._recording = None
            for group, counts in zip(groups, before, strict=True):
                group.update(counts)

    def begin_replay(self, record: _Record) -> None:
        kron = self.optimizer
        set_rates(record.rates, kron.param_groups)
        each = zip(self._classes(), self._plans, record.numbers, strict=True)
        for (found, _), (_, settings, _), numbers in each:
            if settings.stochastic_rounding or any(due for due, _ in found):  # which take noise
                numbers.step.fill_(settings.step)
            for rate, (due, value) in zip(numbers.rates, found, strict=True):
                if due:
                    rate.fill_(value)
        for number, present in record.present.items():
            group, (rule, settings, counts) = kron.param_groups[number], self._plans[number]
            kron._engines[number].rule = rule
            turns(group, settings, counts, present)
            group.update(counts)

    def end_replay(self, record: _Record) -> None:
        pass

    def _classes(self) -> list[tuple[list[tuple[bool, float]], dict[int, int]]]:
        """By group."""
        plans = zip(self.optimizer.param_groups, self._plans, strict=True)
        return [classes(group, settings) for group, (_, settings, _) in plans]


class _Recording:
    """What a step that is recorded reads: numbers of the device in place of the host's.

    Args:
        record: of which `present` is to be found.
        classes: by group, (whether factors are due, rate) of each.
    """

    def __init__(self, record: _Record, classes: list[list[tuple[bool, float]]]) -> None:
        self._record, self._classes = record, classes

    def lifted(
        self, number: int, present: list[bool], parts: list[tuple[StepSettings, Any]]
    ) -> list[tuple[StepSettings, Any]]:
        """The parts of a group's step, from `turns`."""
        self._record.present[number] = present
        step, rates = self._record.numbers[number]
        found = []
        for settings, members in parts:
            own = settings.update, settings.preconditioner_lr if settings.update else 0.0
            rate = rates[self._classes[number].index(own)]
            found.append((settings._replace(step=step, preconditioner_lr=rate), members))
        return found

    def record(self) -> _Record:
        return self._record
