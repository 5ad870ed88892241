"""K-FAC in training loops that do anything in any order, against its equations in NumPy.

The oracle runs a forward pass of its own, takes gradients by what its layers return, and keeps sums,
averages and inverses as Martens & Grosse 2015 (arXiv:1503.05671) have them, sections 3, 5 and 6.3.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from torch.utils.checkpoint import checkpoint

from suite.torch import KFAC

LAYERS = ("body", "twice", "gate", "expert", "first", "second")
DECAY, RATE = 0.7, 0.05


class Net(nn.Module):
    """A layer that runs twice, two that share an input and run in some passes, and two heads."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.shares = shares
        self.body, self.twice = nn.Linear(3, 4), nn.Linear(4, 4)
        self.gate, self.expert = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, path: Path) -> torch.Tensor:
        inner = self._inner if path.reentrant is None else self._checkpointed
        h = inner(torch.tanh(self.body(x)), path)
        if path.expert:
            h = h + torch.sigmoid(self.gate(h)) * self.expert(self.read(h)).tanh_()
        outputs = [getattr(self, head)(self.read(h)) for head in path.heads]
        return sum(y.square().sum() for y in outputs) / len(x)

    def read(self, h: torch.Tensor) -> torch.Tensor:
        """What a layer reads: the same tensor as another, or a copy."""
        return h if self.shares else h.clone()

    def _inner(self, h: torch.Tensor, path: Path) -> torch.Tensor:
        return torch.tanh(self.twice(torch.tanh(self.twice(h))))

    def _checkpointed(self, h: torch.Tensor, path: Path) -> torch.Tensor:
        return checkpoint(self._inner, h, path, use_reentrant=path.reentrant)


class Path:
    def __init__(self, heads: tuple[str, ...], expert: bool, reentrant: bool | None) -> None:
        self.heads, self.expert, self.reentrant = heads, expert, reentrant


paths = st.builds(
    Path,
    st.sampled_from([("first",), ("second",), ("first", "second"), ("second", "first")]),
    st.booleans(),
    st.sampled_from([None, None, True, False]),
)


class Reference:
    """What K-FAC should do, layer by layer, in NumPy."""

    def __init__(self, method: str, of_statistics: int, of_inverses: int) -> None:
        self.method, self.periods, self.steps = method, (of_statistics, of_inverses), 0
        self.average: dict[str, tuple[Any, Any, float]] = {}
        self.refreshed: dict[str, tuple[Any, Any, float]] = {}
        self.forget()

    def forget(self) -> None:
        self.gradients: dict[str, Any] = {}  # (out, in + 1), of layers without a bias (out, in)
        self.sums: dict[str, tuple[Any, Any, int]] = {}

    def backward(self, model: Net, x: torch.Tensor, path: Path, scale: float) -> None:
        calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []

        def run(name: str, x: torch.Tensor) -> torch.Tensor:
            layer = getattr(model, name)
            y = x @ layer.weight.detach().T
            if layer.bias is not None:
                y = y + layer.bias.detach()
            y.requires_grad_()
            calls.append((name, x, y))
            return y

        h = torch.tanh(run("twice", torch.tanh(run("twice", torch.tanh(run("body", x))))))
        if path.expert:
            h = h + torch.sigmoid(run("gate", h)) * torch.tanh(run("expert", h))
        loss = sum(run(head, h).square().sum() for head in path.heads) / len(x)
        gradients = torch.autograd.grad(scale * loss, [y for _, _, y in calls])
        for (name, a, _), g in zip(calls, gradients, strict=True):
            if not getattr(model, name).weight.requires_grad:
                continue
            a, g = a.detach().numpy(), g.numpy()
            if getattr(model, name).bias is not None:
                a = np.concatenate([a, np.ones((len(a), 1))], 1)
            if self.steps % self.periods[0] == 0:
                A, G, rows = self.sums.get(name, (0, 0, 0))
                self.sums[name] = A + a.T @ a, G + g.T @ g, rows + len(a)
            self.gradients[name] = self.gradients.get(name, 0) + g.T @ a

    def is_finite(self) -> bool:
        arrays = [x for A, G, _ in self.sums.values() for x in (A, G)]
        return all(np.isfinite(x).all() for x in (*arrays, *self.gradients.values()))

    def step(self, terms: int, damping: float, kl_clip: float | None, lr: float) -> dict[str, Any]:
        """Directions of all layers that have a gradient."""
        for name, (A, G, rows) in self.sums.items():
            old_A, old_G, weight = self.average.get(name, (0, 0, 0))
            self.average[name] = (
                DECAY * old_A + (1 - DECAY) * A / rows,
                DECAY * old_G + (1 - DECAY) * G * terms,
                DECAY * weight + (1 - DECAY),
            )
        if self.steps % self.periods[1] == 0:
            self.refreshed = {
                name: (A / weight, G / weight, damping) for name, (A, G, weight) in self.average.items()
            }
        self.steps += 1
        found = {name: self._direction(name, g, damping) for name, g in self.gradients.items()}
        change = lr**2 * sum((found[name] * g).sum() for name, g in self.gradients.items())
        if kl_clip is not None and change > 0:
            factor = min(1, (kl_clip / change) ** 0.5)
            found = {name: factor * d for name, d in found.items()}
        return found

    def _direction(self, name: str, gradient: Any, damping: float) -> Any:
        if name not in self.refreshed:
            return gradient
        A, G, damping_then = self.refreshed[name]
        if self.method == "eigen":
            dense = np.kron(G, A) + damping * np.eye(len(A) * len(G))
            return np.linalg.solve(dense, gradient.ravel()).reshape(gradient.shape)
        ratio = ((np.trace(A) / len(A)) / (np.trace(G) / len(G))) ** 0.5
        root = damping_then**0.5
        of_A, of_G = A + ratio * root * np.eye(len(A)), G + root / ratio * np.eye(len(G))
        return np.linalg.solve(of_G, gradient) @ np.linalg.inv(of_A)


class Loop(RuleBasedStateMachine):
    @initialize(
        method=st.sampled_from(["eigen", "inverse"]),
        periods=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        packed=st.booleans(),
        wraps=st.booleans(),
        shares=st.booleans(),
        seed=st.integers(0, 99),
    )
    def start(
        self, method: str, periods: tuple[int, int], packed: bool, wraps: bool, shares: bool, seed: int
    ) -> None:
        torch.manual_seed(seed)
        # With 'inverse' layers that share an A share the split of the damping, which is not the paper's.
        self.model = Net(shares and method == "eigen").double()
        self.generator = torch.Generator().manual_seed(seed)
        self.settings: dict[str, Any] = {"damping": 0.01, "kl_clip": 0.001, "lr": 0.1}
        self.options = {
            "compute_method": method,
            "factor_update_steps": periods[0],
            "inv_update_steps": periods[1],
            "packed_factors": packed,
            "factor_decay": DECAY,
        }
        self.rows, self.wraps = 0, wraps
        self.kfac = self.attached(self.model)
        self.reference = Reference(method, *periods)

    def attached(self, model: Net) -> KFAC:
        settings, base = dict(self.settings), None
        if self.wraps:
            base = torch.optim.SGD(model.parameters(), lr=settings.pop("lr"))
        return KFAC(model, base, terms=lambda: self.rows, **settings, **self.options)

    def allowed(self, path: Path) -> Path:
        """Without what has no equation: more statistics for heads whose turn it was not, and an A whose

        layers part in the middle of a step, which keep what they had.
        """
        if not self.in_each_step() or self.model.shares:
            both = *path.heads[:1], *({"first", "second"} - {path.heads[0]})
            path = Path(both, path.expert or not self.in_each_step(), path.reentrant)
        return path

    def in_each_step(self) -> bool:
        """Whether each step takes statistics."""
        return self.options["factor_update_steps"] == 1

    def batch(self, size: int) -> torch.Tensor:
        return torch.randn(size, 3, generator=self.generator, dtype=torch.float64)

    @rule(size=st.integers(1, 6), path=paths, scale=st.sampled_from([1.0, 0.5, -3.0]))
    def pass_both_ways(self, size: int, path: Path, scale: float) -> None:
        path = self.allowed(path)
        x = self.batch(size)
        (scale * self.model(x, path)).backward()
        self.reference.backward(self.model, x, path, scale)
        self.rows += size

    @rule(path=paths, how=st.sampled_from(["eval", "no_grad", "dropped", "by_hand"]))
    def pass_that_does_not_count(self, path: Path, how: str) -> None:
        if path.reentrant:  # which warns without gradients, and refuses `by_hand`
            path = Path(path.heads, path.expert, None)
        x = self.batch(2)
        self.model.train(how != "eval")
        with torch.set_grad_enabled(how not in ("eval", "no_grad")):
            loss = self.model(x, path)
        if how == "by_hand":
            torch.autograd.grad(loss, self.model.body.weight)
        self.model.train()

    @rule(how=st.sampled_from(["kfac", "model", "by_hand"]))
    def forget(self, how: str) -> None:
        if how == "kfac":
            self.kfac.zero_grad()
        elif how == "model":
            self.model.zero_grad()
        for p in self.model.parameters() if how == "by_hand" else ():
            p.grad = None
        self.reference.forget()
        self.rows = 0

    @precondition(lambda self: self.rows)
    @rule(factor=st.sampled_from([0.1, -2.0, float("nan")]))
    def change_gradients(self, factor: float) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)
        for name in self.reference.gradients:
            self.reference.gradients[name] = factor * self.reference.gradients[name]

    @rule(name=st.sampled_from(["damping", "kl_clip", "lr"]), value=st.sampled_from([1e-3, 0.1, 2.0]))
    def set(self, name: str, value: float) -> None:
        self.settings[name] = value
        if name == "lr" and self.wraps:
            self.kfac.param_groups[0]["lr"] = value
        else:
            setattr(self.kfac, name, value)

    @precondition(lambda self: not self.rows and self.in_each_step())
    @rule(name=st.sampled_from(["twice", "gate", "expert", "second"]))
    def freeze_or_thaw(self, name: str) -> None:
        layer = getattr(self.model, name)
        layer.requires_grad_(not layer.weight.requires_grad)

    @precondition(lambda self: not self.rows)
    @rule(how=st.sampled_from(["copy", "resume"]))
    def go_on_with_another(self, how: str) -> None:
        if how == "copy":
            self.model, self.kfac = copy.deepcopy((self.model, self.kfac))
            return
        state, model = copy.deepcopy(self.kfac.state_dict()), copy.deepcopy(self.model)
        self.kfac.detach()
        frozen = [p for p in model.parameters() if not p.requires_grad]
        self.model, self.kfac = model, self.attached(model.requires_grad_())  # as when it was made
        for p in frozen:
            p.requires_grad_(False)
        self.kfac.load_state_dict(state)

    @precondition(lambda self: self.rows)
    @rule()
    def step(self) -> None:
        skipped, finite = self.kfac.skipped_steps, self.reference.is_finite()
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with nullcontext() if finite else pytest.warns(RuntimeWarning, match="was skipped"):
            self.kfac.step()
        assert self.kfac.skipped_steps == skipped + (not finite)
        if finite:
            expected = self.reference.step(self.rows, **self.settings)
            for name in LAYERS:
                layer = getattr(self.model, name)
                if name not in expected:
                    assert layer.weight.grad is None
                    continue
                found = layer.weight.grad
                if layer.bias is not None:
                    found = torch.cat([found, layer.bias.grad[:, None]], 1)
                np.testing.assert_allclose(found.numpy(), expected[name], rtol=1e-7, atol=1e-12)
        for name, p in self.model.named_parameters():
            moved = before[name]
            if finite and p.grad is not None and self.wraps:
                moved = moved - self.settings["lr"] * p.grad
            torch.testing.assert_close(p, moved, rtol=1e-12, atol=1e-15)
        if finite and not self.wraps:
            torch.optim.SGD(self.model.parameters(), lr=RATE).step()
        self.forget("kfac")

    @invariant()
    def counts_steps(self) -> None:
        if hasattr(self, "reference"):
            assert self.kfac.steps == self.reference.steps


TestLoop = Loop.TestCase
TestLoop.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
