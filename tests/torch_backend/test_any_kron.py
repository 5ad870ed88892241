"""Kron in training loops that do anything in any order, against its equations in NumPy."""

from __future__ import annotations

import copy
import io
import pickle
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from suite.torch import Kron, precond_lr_schedule
from torch_backend.any_kron import Parameter

SHAPES = [(), (1,), (5,), (3, 4), (3, 4), (7, 1), (6, 5), (8, 3), (2, 3, 4), (3, 1, 2, 2)]
STRUCTURE = {
    "max_size_triangular": [8192, 8192, 5],
    "min_ndim_triangular": [2, 1, 3],
    "memory_save_mode": [None, None, "one_diag", "all_diag"],
    "target_merged_dim_size": [4096, 6, 1],
    "block_size": [128, 4, 3, 2],
    "shared_factors": [True, True, False],
    "seed": [0, 12345],
    "preconditioner_init_scale": [1.0, 3.0, None],
    "geometry": ["Q0.5EQ1.5", "QEQ", "QUAD", "EQ", "QEP", "PRO4P", "QUAD4P"],
    "packed_factors": [True, False],
}
FREE: dict[str, list[Any]] = {
    "lr": [0.01, 0.3],
    "b1": [0.9, 0.0],
    "weight_decay": [0.0, 0.1],
    "preconditioner_update_probability": [1.0, 0.5, 0.25],
    "preconditioner_lr": [precond_lr_schedule(0.3, 0.1, 2), precond_lr_schedule(0.8, 0.1)],
    "betaL": [0.9, 0.0],
    "damping": [1e-9, 0.1],
    "whiten": ["momentum", "gradient"],
    "update_first": [True, False],
    "clip": [(1.1, 1e9), (1e9, 0.5)],
    "normalize_grads": [False, True],
    "maximize": [False, True],
}
KINDS = ["full", "full", "full", "rows", "zero", "none"]


class Loop(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 10**6))
    def start(self, seed: int) -> None:
        """What groups are and meet is by dice: hypothesis would try few of the settings at once."""
        self.dice, self.random = random.Random(seed), np.random.default_rng(seed)
        self.size = self.dice.choice([1.0, 1e20, 1e-20])
        self.parameters: list[list[torch.nn.Parameter]] = []
        self.references: list[list[Parameter]] = []
        self.settings: list[dict[str, Any]] = []
        self.steps: list[int] = []
        self.kron = Kron([self.group(), self.group()])

    def group(self) -> dict[str, Any]:
        chosen = {name: self.dice.choice(values) for name, values in (STRUCTURE | FREE).items()}
        before = sum(map(len, self.parameters))
        shapes = self.dice.choices(SHAPES, k=self.dice.randint(1, 4))
        values = [np.asarray(self.random.standard_normal(shape)) for shape in shapes]
        self.parameters.append([torch.nn.Parameter(torch.tensor(x)) for x in values])
        self.references.append([Parameter(x, before + i, chosen) for i, x in enumerate(values)])
        self.settings.append(dict(chosen))
        self.steps.append(0)
        return {"params": self.parameters[-1], **chosen}

    @rule()
    def join(self) -> None:
        if len(self.parameters) < 3:
            self.kron.add_param_group(self.group())

    @rule(group=st.integers(0, 2), name=st.sampled_from([*FREE]), i=st.integers(0, 2))
    def set(self, group: int, name: str, i: int) -> None:
        group, value = group % len(self.settings), FREE[name][i % len(FREE[name])]
        self.settings[group][name] = self.kron.param_groups[group][name] = value

    @rule(group=st.integers(0, 2), i=st.integers(0, 3))
    def begin_anew(self, group: int, i: int) -> None:
        group %= len(self.parameters)
        own = self.parameters[group]
        del self.kron.state[own[i % len(own)]]
        self.references[group][i % len(own)].begin(self.settings[group])
        if len(own) == 1:  # then the group begins anew
            self.steps[group] = 0
        self.kron.state_dict()

    @rule(how=st.sampled_from(["copy", "pickle", "resume"]), kept=st.sampled_from([None, True, False]))
    def go_on_with_another(self, how: str, kept: bool | None) -> None:
        if how == "copy":
            self.parameters, self.kron = copy.deepcopy((self.parameters, self.kron))
        elif how == "pickle":
            self.parameters, self.kron = pickle.loads(pickle.dumps((self.parameters, self.kron)))
        else:
            torch.save(self.kron.state_dict(), file := io.BytesIO())
            file.seek(0)
            self.parameters = copy.deepcopy(self.parameters)
            groups = zip(self.parameters, self.settings, strict=True)
            self.kron = Kron([{"params": own, **s, "cache_preconditioner": kept} for own, s in groups])
            self.kron.load_state_dict(torch.load(file, weights_only=True))

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step(spoiled=self.dice.random() < 0.05)

    def one_step(self, spoiled: bool) -> None:
        parameters = [p for own in self.parameters for p in own]
        found = [self.gradient(p.shape, self.dice.choice(KINDS)) for p in parameters]
        given = [g for g in found if g is not None]
        spoiled &= bool(given)
        if spoiled:
            self.dice.choice(given).flat[0] = self.dice.choice([np.nan, np.inf])
        for p, g in zip(parameters, found, strict=True):
            p.grad = None if g is None else torch.tensor(g)
        skipped = self.kron.skipped_steps
        with pytest.warns(RuntimeWarning, match="was skipped") if spoiled else nullcontext():
            self.kron.step()
        assert self.kron.skipped_steps == skipped + spoiled
        self.compare([None] * len(found) if spoiled else found)

    def gradient(self, shape: tuple[int, ...], kind: str) -> Any:
        g = np.array(self.random.standard_normal(shape)) * self.dice.choice([1.0, 1e3, 1e-3])
        if kind == "rows" and g.ndim:
            g[: (len(g) + 1) // 2] = 0
        return None if kind == "none" else np.array(g * (0.0 if kind == "zero" else self.size))

    def compare(self, gradients: list[Any]) -> None:
        rest = iter(gradients)
        for k, (own, references) in enumerate(zip(self.parameters, self.references, strict=True)):
            found = [next(rest) for _ in references]
            self.steps[k] += any(g is not None for g in found)
            for p, reference, g in zip(own, references, found, strict=True):
                if g is not None:
                    reference.step(g, self.settings[k], self.steps[k])
                np.testing.assert_allclose(p.detach().numpy(), reference.value, rtol=1e-6, atol=1e-9)
            assert self.kron.param_groups[k]["steps"] == self.steps[k]


TestLoop = Loop.TestCase
TestLoop.settings = settings(max_examples=120, stateful_step_count=30, deadline=None, derandomize=True)
