"""Directions from rows equal those from gradients, and are used only where rows make the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from suite.torch import KFAC
from suite.torch.factors import LayerFactors
from suite.torch.thin import _some_of

ROWS = 6


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr("suite.torch.thin.SMALLEST", 0)


class Model(nn.Module):
    """Wide layers, one of them used twice, one without bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = nn.Linear(24, 32), nn.Linear(32, 32)
        self.bare, self.head = nn.Linear(32, 28, bias=False), nn.Linear(28, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.again(torch.tanh(self.again(torch.tanh(self.first(x))))))
        return self.head(torch.relu_(self.bare(h)))


class Elsewhere(Model):
    """Uses a weight outside of its layer, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(F.linear(torch.tanh(self.first(x)), self.again.weight))
        return self.head(torch.relu(self.bare(torch.tanh(self.again(h)))))


def nothing(model: nn.Module) -> None:
    pass


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def decay(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=1e-9)  # far too small to be seen in a sum


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad * 1.0


def clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def clip_one_by_one(model: nn.Module) -> None:
    for p in model.parameters():
        nn.utils.clip_grad_norm_([p], 1e-2)


def hardly_clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e3)


def of_one_bias(model: nn.Module) -> None:
    for p in model.parameters():
        if p.ndim == 1:
            p.grad[-1] *= 1 + 1e-12


def scale_twice(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.mul_(1024.0)
    for p in model.parameters():
        p.grad.div_(1000.0)


class Run:
    def __init__(self, monkeypatch: Any, thin: bool, make: Callable[[], nn.Module] = Model) -> None:
        self.uses = 0
        torch.manual_seed(0)
        self.model = make()
        self.inputs = torch.Generator().manual_seed(1)
        original = LayerFactors.direction_of_rows

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.uses += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(LayerFactors, "direction_of_rows", counted)
        if not thin:
            monkeypatch.setattr("suite.torch.thin.HOST_DEVICES", ())

    def train(
        self,
        settings: dict[str, Any],
        change: Callable[[nn.Module], None] = nothing,
        micro: int = 1,
        steps: int = 6,
        forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda m, x: m(x),
    ) -> list[torch.Tensor]:
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        settings = {"compute_method": "inverse", "damping": 0.1, **settings}
        kfac = KFAC(self.model, sgd, **settings)
        for _ in range(steps):
            for _ in range(micro):
                x = torch.randn(ROWS, 24, generator=self.inputs, dtype=torch.float64)
                F.mse_loss(forward(self.model, x), x[:, :3].sin()).backward()
            change(self.model)
            kfac.step()
            kfac.zero_grad()
        return [p.detach().clone() for p in self.model.parameters()]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"kl_clip": None},
    "kl_clip": {"kl_clip": 1e-4},
    "newton_schulz": {"compute_method": "newton_schulz"},
    "eigen": {"compute_method": "eigen"},
    "eigen, outer product": {"compute_method": "eigen", "compute_eigenvalue_outer_product": True},
    "spread": {"spread_inverses": True, "inv_update_steps": 3},
    "seldom": {"factor_update_steps": 3, "inv_update_steps": 3},
    "type-2": {"fisher": "type-2", "likelihood": "gaussian"},
}


@pytest.mark.filterwarnings("ignore:statistics miss some uses:RuntimeWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_the_trajectory_is_the_same(monkeypatch, name):
    thin = Run(monkeypatch, True)
    found = thin.train(SETTINGS[name])
    assert thin.uses == 6 * 3  # the head has fewer outputs than there are rows
    dense = Run(monkeypatch, False)
    expected = dense.train(SETTINGS[name])
    assert dense.uses == 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Experts(Model):
    """Each example goes to one of two, of which one now and then gets none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        chosen = x[:, 0] > 1
        parts = self.again(h[chosen]), torch.tanh(h[~chosen])
        return self.head(torch.relu_(self.bare(torch.cat(parts)[(~chosen).argsort().argsort()])))


@pytest.mark.parametrize("method", ["inverse", "eigen", "newton_schulz"])
def test_an_expert_that_gets_no_rows_after_others_is_left_where_it_is(monkeypatch, method):
    settings = {"compute_method": method, "kl_clip": None}
    thin = Run(monkeypatch, True, Experts)
    found = thin.train(settings, steps=12)
    assert thin.uses > 2 * 12
    expected = Run(monkeypatch, False, Experts).train(settings, steps=12)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:statistics miss some uses:RuntimeWarning")
def test_second_moments_of_an_eigenbasis_are_those_of_directions_from_rows(monkeypatch):
    """For one refresh: where eigenvalues are equal, the next one's basis depends on rounding."""
    ends = []
    for thin in (True, False):
        run = Run(monkeypatch, thin)
        ends.append(run.train({"compute_method": "ekfac", "inv_update_steps": 5}, steps=5))
        assert run.uses == (5 * 3 if thin else 0)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_directions_from_rows_and_from_the_gradient_agree_to_bfloat16s_precision(monkeypatch):
    monkeypatch.setattr("suite.core._torch._CPU_MULTIPLIES_BFLOAT16", True)
    ends = []
    for thin in (True, False):
        run = Run(monkeypatch, thin)
        ends.append(run.train({"inv_dtype": torch.bfloat16, "kl_clip": None}))
        assert run.uses == (18 if thin else 0)
    moved = [p.detach() for p in Run(monkeypatch, True).model.parameters()]
    for a, b, start in zip(*ends, moved, strict=True):
        assert (a - b).norm() < 0.03 * (b - start).norm()


@pytest.mark.parametrize("change", [clip, hardly_clip, scale_twice])
@pytest.mark.parametrize(("micro", "uses"), [(1, 18), (2, 12)])
def test_a_multiple_of_the_gradient_is_one_of_its_rows(monkeypatch, change, micro, uses):
    thin = Run(monkeypatch, True)
    found = thin.train({}, change, micro)
    assert thin.uses == uses
    expected = Run(monkeypatch, False).train({}, change, micro)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("change", [decay, replace, clip_values])
def test_a_gradient_that_was_changed_is_used_itself(monkeypatch, change):
    thin = Run(monkeypatch, True)
    found = thin.train({}, change)
    assert thin.uses == 0
    expected = Run(monkeypatch, False).train({}, change)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("change", [clip_one_by_one, of_one_bias])
def test_rows_do_not_make_a_weight_and_a_bias_that_were_changed_each_for_itself(monkeypatch, change):
    thin = Run(monkeypatch, True)
    found = thin.train({}, change)
    assert thin.uses == 6  # of the layer without a bias
    expected = Run(monkeypatch, False).train({}, change)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def penalty(weight: float) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """A forward pass whose output contains a multiple of Σ W², as a loss with that term has it."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        squares = sum(p.square().sum() for p in model.parameters())
        y = model(x)
        return y + weight * (squares - squares.detach())

    return forward


@pytest.mark.parametrize("method", ["inverse", "eigen"])
@pytest.mark.parametrize("weight", [1.0, 1e-3, 1e-5])
def test_a_penalty_in_the_loss_is_not_lost(monkeypatch, weight, method):
    """It may be tiny in the gradient and, where A or G are small, all of the direction."""
    settings = {"damping": 1e-4, "compute_method": method}
    ends = []
    for thin in (True, False):
        run = Run(monkeypatch, thin)
        ends.append(run.train(settings, forward=penalty(weight)))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["inverse", "eigen"])
@pytest.mark.parametrize("size", [1e-3, 1e-6])
@pytest.mark.parametrize("how", ["leftover", "data", "hook"])
def test_what_else_is_in_the_gradient_is_not_lost(monkeypatch, how, size, method):
    directions = []
    for thin in (True, False):
        run = Run(monkeypatch, thin, lambda: nn.Linear(24, 32).double())
        weight = run.model.weight
        extra = size * torch.randn(32, 24, generator=torch.Generator().manual_seed(3)).double()
        if how == "hook":
            weight.register_hook(lambda g, extra=extra: g + extra)
        kfac = KFAC(run.model, compute_method=method, damping=1e-3)
        for seed in range(3):
            x = torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(seed)).double()
            weight.grad = extra.clone() if how == "leftover" else None
            run.model(x).square().mean().backward()
            if how == "data":
                weight.grad.data.add_(extra)
            kfac.step()
            kfac.reset_batch()
        directions.append(weight.grad.clone())
    torch.testing.assert_close(*directions, rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")  # torch 2.15's
def test_batched_and_forward_derivatives_pass_through(monkeypatch):
    run = Run(monkeypatch, True, lambda: nn.Linear(24, 32).double())
    kfac = KFAC(run.model, compute_method="inverse", factor_update_steps=3)
    for _ in range(2):  # with statistics and without
        x = torch.randn(ROWS, 24, dtype=torch.float64, requires_grad=True)
        y = run.model(x)
        (g,) = torch.autograd.grad(
            y,
            x,
            torch.eye(32).double()[:, None].expand(32, ROWS, 32),
            is_grads_batched=True,
            retain_graph=True,
        )
        torch.testing.assert_close(g[:, 0], run.model.weight.detach())
        y.square().mean().backward()
        kfac.step()
        kfac.zero_grad()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(run.model(dual)).tangent
    torch.testing.assert_close(tangent[0], run.model.weight.detach().sum(1))


def test_a_gradient_that_an_earlier_hook_uses_up_is_none(monkeypatch):
    run = Run(monkeypatch, True, lambda: nn.Linear(24, 32).double())

    def use_up(p: torch.Tensor) -> None:
        p.grad = None

    run.model.weight.register_post_accumulate_grad_hook(use_up)
    kfac = KFAC(run.model, compute_method="inverse")
    run.model(torch.randn(ROWS, 24, dtype=torch.float64)).square().mean().backward()
    assert run.model.weight.grad is None
    kfac.zero_grad()


@pytest.mark.parametrize(("micro", "uses"), [(2, 12), (8, 0)])  # of a layer that runs twice, of all
def test_accumulated_gradients_are_those_of_all_rows(monkeypatch, micro, uses):
    thin = Run(monkeypatch, True)
    found = thin.train({}, micro=micro)
    assert thin.uses == uses
    expected = Run(monkeypatch, False).train({}, micro=micro)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [12, 100])  # too many in two calls, and in each
def test_rows_of_a_pass_after_one_without_are_not_taken_for_all(rows):
    model = Model()
    kfac = KFAC(model, compute_method="inverse")
    for _ in range(3):
        kfac.zero_grad()
        for n in (rows, 2):
            model(torch.randn(n, 24, dtype=torch.float64)).square().mean().backward()
        kfac.step()
    assert [k.refusals for k in kfac._engine.capture.kept.values()] == [0] * 4


def thrown_away(to_none: bool) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """A forward pass after a whole backward pass whose gradients are not kept."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model(x + 1).square().mean().backward()
        model.zero_grad(set_to_none=to_none)
        return model(x)

    return forward


def attacked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A forward pass on inputs that a backward pass, of the inputs alone, has made worse."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).square().mean(), x)
    return model(x.detach() + 0.1 * g.sign())


@pytest.mark.parametrize("forward", [thrown_away(True), thrown_away(False), attacked])
def test_rows_of_passes_that_are_not_in_the_gradient_are_not_used(monkeypatch, forward):
    settings = {"fisher": "type-2", "likelihood": "gaussian"}  # whose statistics know them from others
    thin = Run(monkeypatch, True)
    found = thin.train(settings, forward=forward)
    assert thin.uses == 6 * 3
    expected = Run(monkeypatch, False).train(settings, forward=forward)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 63, 64, 65, 1000])
def test_numbers_are_looked_at_all_over_a_gradient(n):
    assert len(_some_of(torch.arange(n))) == n
    seen = _some_of(torch.arange(n * 9).reshape(n, 9))
    assert min(n, 5) <= len(seen) <= 8
    assert seen.shape[1] == 5


@pytest.mark.filterwarnings("ignore:statistics miss some uses:RuntimeWarning")
def test_a_weight_with_uses_that_hooks_do_not_see_is_not_taken_for_its_rows(monkeypatch):
    thin = Run(monkeypatch, True, Elsewhere)
    found = thin.train({})
    assert thin.uses == 6 * 2  # not `again`
    expected = Run(monkeypatch, False, Elsewhere).train({})
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_checkpointing_keeps_its_rows_to_itself_until_the_backward_pass(monkeypatch):
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=False)

    thin = Run(monkeypatch, True)
    found = thin.train({}, forward=forward)
    assert thin.uses == 6 * 3
    expected = Run(monkeypatch, False).train({})
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_an_input_that_was_changed_after_the_pass_is_not_used(monkeypatch):
    thin = Run(monkeypatch, True, lambda: nn.Linear(24, 32).double())
    kfac = KFAC(thin.model, compute_method="inverse", damping=0.1)
    buffer = torch.zeros(ROWS, 24, dtype=torch.float64)
    for seed in range(3):
        buffer.copy_(torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(seed)))
        thin.model(buffer).square().mean().backward()
        buffer.zero_()
        gradient = thin.model.weight.grad.clone()
        kfac.step()
        assert thin.uses == 0
        assert not torch.equal(gradient, thin.model.weight.grad)
        kfac.zero_grad()


def test_rows_of_passes_that_no_step_uses_do_not_pile_up(monkeypatch):
    model = Model()
    kfac = KFAC(model, compute_method="inverse")
    for _ in range(20):
        model(torch.randn(ROWS, 24, dtype=torch.float64)).square().mean().backward()
        kept = kfac._engine.capture.kept.values()
        assert all(sum(len(p.x) for p in k.pairs or ()) < 28 for k in kept)
    kfac.zero_grad()
    assert all(not k.pairs and not k.made for k in kfac._engine.capture.kept.values())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_looked_at_only_where_rows_are_kept(monkeypatch, compiled):
    torch._dynamo.reset()
    looked = list[torch.Tensor]()
    monkeypatch.setattr("suite.torch.thin._some_of", lambda x: looked.append(x) or _some_of(x))
    model = nn.Linear(24, 32).double()
    kfac = KFAC(model, compute_method="inverse")
    if compiled:
        model.compile(backend="aot_eager")
    model(torch.randn(ROWS if compiled else 100, 24, dtype=torch.float64)).square().mean().backward()
    assert kfac._engine.capture.kept
    assert not looked


def test_rows_are_kept_only_where_layers_are_large(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("suite.torch.thin.SMALLEST", 32 * 32 * 64)
        kept = KFAC(Model(), compute_method="inverse")._engine.capture.kept.values()
        assert [k.layer.name for k in kept] == ["again"]
    kfac = KFAC(Model(), compute_method="inverse")
    assert len(kfac._engine.capture.kept) == 4
    model = kfac._engine.model
    kfac.detach()
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
