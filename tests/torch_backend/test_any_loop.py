"""K-FAC in training loops that do anything in any order, against its equations in NumPy."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from suite.torch import KFAC
from torch_backend.any_loop import DECAY, HEADS, Net, Path, Reference, compare, follow_with_ranks
from torch_backend.crew import Crew

RATE = 0.05
paths = st.builds(
    Path, st.sampled_from(HEADS), st.booleans(), st.sampled_from([None, None, True, False])
)


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
        self.wraps = wraps
        self.kfac = self.attached(self.model)
        self.reference = Reference(method, *periods)

    def attached(self, model: Net) -> KFAC:
        settings, base = dict(self.settings), None
        if self.wraps:
            base = torch.optim.SGD(model.parameters(), lr=settings.pop("lr"))
        return KFAC(model, base, terms=lambda: self.reference.terms[0], **settings, **self.options)

    def allowed(self, path: Path) -> Path:
        """Without what has no equation: more statistics for layers whose turn it was not in those that
        are due, and an A whose layers part in the middle of a step, which keep what they had.
        """
        return path.through_all() if self.model.shares or not self.in_each_step() else path

    def in_each_step(self) -> bool:
        """Whether each step takes statistics."""
        return self.options["factor_update_steps"] == 1

    def has_passes(self) -> bool:
        return sum(self.reference.terms) > 0

    def batch(self, size: int) -> torch.Tensor:
        return torch.randn(size, 3, generator=self.generator, dtype=torch.float64)

    @rule(size=st.integers(1, 6), path=paths, scale=st.sampled_from([1.0, 0.5, -3.0]))
    def pass_both_ways(self, size: int, path: Path, scale: float) -> None:
        path = self.allowed(path)
        x = self.batch(size)
        (scale * self.model(x, path)).backward()
        self.reference.backward(self.model, x, path, scale)

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

    @precondition(lambda self: self.has_passes())
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

    @precondition(lambda self: not self.has_passes() and self.in_each_step())
    @rule(name=st.sampled_from(["twice", "gate", "expert", "second"]))
    def freeze_or_thaw(self, name: str) -> None:
        layer = getattr(self.model, name)
        layer.requires_grad_(not layer.weight.requires_grad)

    @precondition(lambda self: not self.has_passes())
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

    @precondition(lambda self: self.has_passes())
    @rule()
    def step(self) -> None:
        skipped, finite = self.kfac.skipped_steps, self.reference.is_finite()
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with nullcontext() if finite else pytest.warns(RuntimeWarning, match="was skipped"):
            self.kfac.step()
        assert self.kfac.skipped_steps == skipped + (not finite)
        if finite:
            compare(self.model, self.reference.step(**self.settings))
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


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_run_different_passes_take_the_steps_of_the_equations(world):
    crew = Crew(world)
    crew.run(follow_with_ranks, world, [*range(12)])
    crew.close()


TestLoop = Loop.TestCase
TestLoop.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
