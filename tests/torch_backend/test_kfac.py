"""`suite.torch.KFAC` in a training loop."""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import same
from suite.torch import KFAC, ComputeMethod, KFACPreconditioner
from torch_backend.rows_by_loops import both_reductions


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def batch(seed: int, n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=generator)


def backward(model: nn.Module, seed: int = 0, n: int = 8) -> torch.Tensor:
    x, y = batch(seed, n)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# ---- what the direction is ----------------------------------------------------------------------


def test_one_layer_and_one_example_give_the_exact_damped_natural_gradient():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    x = torch.randn(1, 3, dtype=torch.float64)
    kfac = KFAC(layer, damping=0.3, kl_clip=None)
    (layer(x) * torch.tensor([0.7, -1.1], dtype=torch.float64)).sum().backward()
    gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1).numpy()
    # empirical Fisher of one example: the outer product of its gradient
    vector = gradient.reshape(-1)
    fisher = np.outer(vector, vector)
    expected = np.linalg.solve(fisher + 0.3 * np.eye(8), vector).reshape(2, 4)
    kfac.step()
    direction = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1).numpy()
    np.testing.assert_allclose(direction, expected, rtol=1e-9)


def test_the_direction_on_a_convolutional_network_is_not_the_gradient():
    model = network().float()
    kfac = KFAC(model)
    x, y = batch(0, 64)
    nn.functional.cross_entropy(model(x.float()), y).backward()
    for layer in kfac._engine.layers:
        assert layer.weight.grad() is not None
    before = [layer.weight.grad().clone() for layer in kfac._engine.layers]
    kfac.step()
    for layer, gradient in zip(kfac._engine.layers, before, strict=True):
        cosine = nn.functional.cosine_similarity(
            layer.weight.grad().flatten(), gradient.flatten(), dim=0
        )
        assert cosine < 0.99, layer.name


@pytest.mark.parametrize("compute_method", ["eigen", "inverse"])
def test_large_damping_gives_the_gradients_direction(compute_method):
    model = network()
    kfac = KFAC(model, damping=1e14, kl_clip=None, compute_method=compute_method)
    backward(model)
    before = [p.grad.clone() for p in model.parameters()]
    kfac.step()
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad * 1e14, gradient, rtol=1e-4, atol=1e-9)


def test_affine_reparametrisation_leaves_the_trajectory_unchanged():
    """Inputs and hidden units in other coordinates: the functions along the way are the same."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    M = torch.randn(3, 3, dtype=torch.float64) + 2 * torch.eye(3, dtype=torch.float64)
    shift = torch.randn(3, dtype=torch.float64)
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
    outputs = []
    for transformed in (False, True):
        model = nn.Sequential(copy.deepcopy(first), nn.Tanh(), copy.deepcopy(second))
        inputs = x
        if transformed:
            inputs = x @ M.T + shift  # W' (M x + c) + b' = W x + b
            with torch.no_grad():
                model[0].weight.copy_(first.weight @ torch.linalg.inv(M))
                model[0].bias.copy_(first.bias - model[0].weight @ shift)
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=0.0, kl_clip=None)
        for _ in range(20):
            kfac.zero_grad()
            nn.functional.mse_loss(model(inputs), y).backward()
            kfac.step()
        outputs.append(model(inputs).detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-8)
    assert not torch.allclose(outputs[0], second(torch.tanh(first(x))))


@pytest.mark.parametrize(
    "rates", [(0.5, 0.5, 0.5), (0.5, 0.1, 0.5), (torch.tensor(0.5), 0.1, torch.tensor(0.2))]
)
@pytest.mark.parametrize("skipped", [None, 1])
@pytest.mark.parametrize("of_biases", [None, 2.0])
def test_kl_clip_is_of_all_parameters_each_with_its_rate(rates, skipped, of_biases):
    """Σ lr² ⟨direction, gradient⟩, layer by layer in numpy, of layers that share a bucket or do not."""
    directions, kl_clip = {}, 1e-6
    for clip in (None, kl_clip):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)), nn.Linear(5, 2)).double()
        groups = []
        for layer, lr in zip(model, (*rates, 0.3), strict=True):
            groups.append({"params": [layer.weight], "lr": lr})
            groups.append({"params": [layer.bias], "lr": lr if of_biases is None else of_biases})
        kfac = KFAC(model, torch.optim.SGD(groups, lr=0.0), damping=0.1, kl_clip=clip)
        for _ in range(2):
            kfac.zero_grad()
            model(torch.randn(8, 5, dtype=torch.float64)).square().mean().backward()
            if skipped is not None:
                model[skipped].zero_grad()
            before = [0.0 if p.grad is None else p.grad.numpy().copy() for p in model.parameters()]
            saved = [p.detach().clone() for p in model.parameters()]
            kfac.step()
            for p, old in zip(model.parameters(), saved, strict=True):
                p.data.copy_(old)
        directions[clip] = [0.0 if p.grad is None else p.grad.numpy() for p in model.parameters()]
    lrs = [float(x) for lr in (*rates, 0.3) for x in (lr, lr if of_biases is None else of_biases)]
    plain = directions[None]
    change = sum(lr**2 * np.sum(d * g) for lr, d, g in zip(lrs, plain, before, strict=True))
    assert change > kl_clip
    for d, clipped in zip(plain, directions[kl_clip], strict=True):
        np.testing.assert_allclose(clipped, d * np.sqrt(kl_clip / change), rtol=1e-9)


def test_kl_clip_bounds_the_step():
    scales = {}
    for kl_clip in (None, 1e-4):
        model = network()
        kfac = KFAC(model, kl_clip=kl_clip, lr=0.5)
        backward(model)
        gradient = [p.grad.clone() for p in model.parameters()]
        kfac.step()
        direction = [p.grad for p in model.parameters()]
        size = sum((d * g).sum() for d, g in zip(direction, gradient, strict=True))
        scales[kl_clip] = float(size)
    unclipped = 0.5**2 * scales[None]
    assert unclipped > 1e-4
    np.testing.assert_allclose(scales[1e-4], scales[None] * np.sqrt(1e-4 / unclipped), rtol=1e-9)


def test_a_factor_decay_of_zero_keeps_only_the_latest_statistics():
    once, twice = network(), network()
    kfac_once, kfac_twice = KFAC(once, factor_decay=0.0), KFAC(twice, factor_decay=0.0)
    backward(twice, seed=1)
    kfac_twice.step()
    for model, kfac in ((once, kfac_once), (twice, kfac_twice)):
        model.zero_grad()
        backward(model, seed=2)
        kfac.step()
    a, b = (k.state_dict()["kfac"]["layers"] for k in (kfac_once, kfac_twice))
    for name in a:
        torch.testing.assert_close(a[name]["A"], b[name]["A"])
        torch.testing.assert_close(a[name]["G"], b[name]["G"])


# ---- the training loop --------------------------------------------------------------------------


def test_before_an_optimizer_and_around_it_are_the_same_run():
    separate, around = network(), network()
    optimizer = sgd(separate)
    preconditioner = KFACPreconditioner(separate, lr=lambda step: optimizer.param_groups[0]["lr"])
    combined = KFAC(around, sgd(around))
    assert isinstance(combined, torch.optim.Optimizer)
    for seed in range(6):
        optimizer.zero_grad()
        backward(separate, seed)
        preconditioner.step()
        optimizer.step()
        combined.zero_grad()
        backward(around, seed)
        combined.step()
    for a, b in zip(separate.parameters(), around.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_closure_runs_once_first_and_under_grad():
    model = network()
    kfac = KFAC(model, sgd(model))
    calls = []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        calls.append(1)
        kfac.zero_grad()
        return backward(model)

    before = [p.clone() for p in model.parameters()]
    with torch.no_grad():
        loss = kfac.step(closure)
    assert len(calls) == 1
    assert loss.item() > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_learning_rate_schedulers_drive_it():
    model = network()
    kfac = KFAC(model, sgd(model))
    scheduler = torch.optim.lr_scheduler.StepLR(kfac, step_size=1, gamma=0.5)
    for _ in range(2):
        kfac.zero_grad()
        backward(model)
        kfac.step()
        scheduler.step()
    assert kfac.param_groups[0]["lr"] == pytest.approx(0.0125)


def test_groups_of_the_optimizer_are_its_groups():
    model = network()
    base = torch.optim.SGD(model[0].parameters(), lr=0.05)
    kfac = KFAC(model, base)
    kfac.add_param_group({"params": model[3].parameters(), "lr": 0.01})
    assert len(base.param_groups) == 2
    assert kfac.param_groups is base.param_groups
    backward(model)
    kfac.step()


def test_tensor_learning_rates_and_maximize():
    ends = []
    for settings, sign in (
        ({"lr": 0.05}, 1),
        ({"lr": torch.tensor(0.05, dtype=torch.float64)}, 1),
        ({"lr": 0.05, "maximize": True}, -1),
    ):
        model = network()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), momentum=0.9, **settings))
        for seed in range(4):
            kfac.zero_grad()
            x, y = batch(seed)
            (sign * nn.functional.cross_entropy(model(x), y)).backward()
            kfac.step()
        ends.append(dict(model.state_dict()))
    for end in ends[1:]:
        for name, expected in ends[0].items():
            torch.testing.assert_close(end[name], expected, rtol=1e-12, atol=1e-12)


def test_hooks_of_steps_and_states_run():
    model, calls = network(), []
    kfac = KFAC(model, sgd(model))
    kfac.register_step_pre_hook(lambda *_: calls.append("before"))
    kfac.register_step_post_hook(lambda *_: calls.append("after"))
    kfac.register_state_dict_pre_hook(lambda _: calls.append("save"))
    kfac.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    kfac.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["note"]))
    kfac.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    backward(model)
    kfac.step()
    kfac.load_state_dict(kfac.state_dict())
    assert calls == ["before", "after", "save", 1, "loaded"]


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_a_state_dict_is_not_changed_by_later_steps(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    kfac = KFAC(model, compute_method=method, inv_update_steps=2)

    def step() -> None:
        kfac.zero_grad()
        model(torch.randn(20, 4, dtype=torch.float64)).square().sum().backward()
        kfac.step()

    for _ in range(3):
        step()
    state = kfac.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(3):
        step()
    assert same(kept["kfac"]["layers"], state["kfac"]["layers"])


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_factors_and_inverses_may_be_kept_in_half_precision(method):
    losses = []
    for dtype in (None, torch.bfloat16):
        model = network().float()
        kfac = KFAC(
            model, sgd(model), compute_method=method, damping=0.01, factor_dtype=dtype, inv_dtype=dtype
        )
        for _ in range(30):
            kfac.zero_grad()
            x, y = batch(0)
            loss = nn.functional.cross_entropy(model(x.float()), y)
            loss.backward()
            kfac.step()
        losses.append(loss.item())
    assert kfac.state_dict()["kfac"]["layers"]["0"]["A"].dtype == torch.bfloat16
    assert losses[1] < 2 * losses[0] + 0.05


def test_no_damping_and_no_decay_are_honoured():
    model = network()
    kfac = KFAC(model, damping=0.0, factor_decay=0.0, kl_clip=None, lr=0.0)
    backward(model, 0, 64)
    kfac.step()
    assert (kfac.damping, kfac.factor_decay, kfac.kl_clip, kfac.lr) == (0.0, 0.0, None, 0.0)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_schedules_are_functions_of_the_step():
    model = network()
    asked: list[int] = []

    def damping(step: int) -> float:
        asked.append(step)
        return 0.1 / (1 + step)

    kfac = KFAC(model, sgd(model), damping=damping, inv_update_steps=lambda step: 1 + step // 2)
    for _ in range(3):
        backward(model)
        kfac.step()
    assert asked == [0, 1, 2]
    assert kfac.hyperparameter("damping") == pytest.approx(0.1 / 4)


@pytest.mark.parametrize("value", [-1.0, torch.tensor(-1.0)])
def test_a_schedule_that_leaves_its_range_is_an_error_before_anything_changes(value):
    model = network()
    kfac = KFAC(model, sgd(model), damping=lambda step: value)
    backward(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"damping must be >= 0, got -1\.0"):
        kfac.step()
    assert same(before, model.state_dict())
    assert kfac.steps == 0


def test_a_ragged_last_batch_and_an_unused_layer():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
            return self.left(x) if left else self.right(x)

    model = Branches()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for n, left in ((8, True), (3, True), (1, False)):
        kfac.zero_grad()
        model(torch.randn(n, 3), left).square().mean().backward()
        kfac.step()
    weights = {name: float(s["G_weight"]) for name, s in kfac.state_dict()["kfac"]["layers"].items()}
    np.testing.assert_allclose(weights["left"], 1 - 0.95**2, rtol=1e-6)
    np.testing.assert_allclose(weights["right"], 1 - 0.95, rtol=1e-6)


def test_zero_gradients_and_zero_learning_rate_leave_parameters_alone():
    model = network()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no layer ran: that is reported
        kfac.step()
    assert same(before, model.state_dict())
    for layer in kfac.state_dict()["kfac"]["layers"].values():
        assert all(bool(tensor.isfinite().all()) for tensor in layer.values())


def test_bfloat16_parameters_keep_float32_factors():
    model = network().bfloat16()
    kfac = KFAC(model, sgd(model))
    x, y = batch(0)
    nn.functional.cross_entropy(model(x.bfloat16()), y).backward()
    kfac.step()
    kfac.load_state_dict(kfac.state_dict())
    for layer in kfac.state_dict()["kfac"]["layers"].values():
        assert layer["A"].dtype == layer["A_vectors"].dtype == torch.float32
    assert all(p.dtype == torch.bfloat16 and bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("around", [True, False])
def test_a_grad_scaler_changes_nothing_but_the_scale(around):
    runs = []
    for scaled in (False, True):
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
        optimizer = sgd(model)
        settings = {"lr": 0.05, "grad_scaler": scaler if scaled else None}
        kfac = KFAC(model, optimizer if around else None, **settings)
        for seed in range(5):
            kfac.zero_grad()
            optimizer.zero_grad()
            x, y = batch(seed)
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            if around:
                scaler.step(kfac)
            else:
                scaler.unscale_(optimizer)
                kfac.step()
                scaler.step(optimizer)
            scaler.update()
        runs.append(model.state_dict())
    assert same(*runs)  # powers of two: not even rounding differs


def test_statistics_of_a_step_that_a_grad_scaler_skipped_are_gone():
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    kfac = KFAC(model, sgd(model), grad_scaler=scaler)
    before = copy.deepcopy(kfac.state_dict()["kfac"]["layers"])
    for scale in (1e300, 1.0):
        kfac.zero_grad()
        x, y = batch(0)
        scaler.scale(scale * nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(kfac)
        scaler.update(1.0)
        if scale != 1.0:
            assert same(before, kfac.state_dict()["kfac"]["layers"])
    assert kfac.steps == 1
    assert kfac.skipped_steps == 0
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_checkpoint_without_outer_products_has_what_they_are_made_of():
    runs: list[nn.Module] = []
    saved: Any = None
    for outer in (False, True):
        model = network()
        settings = {"inv_update_steps": 10, "compute_eigenvalue_outer_product": outer}
        kfac = KFAC(model, sgd(model), **settings)
        if saved is not None:
            model.load_state_dict(saved[0])
            kfac.load_state_dict(saved[1])
        for step in range(2 if saved else 0, 4):
            if step == 2 and saved is None:
                saved = copy.deepcopy((model.state_dict(), kfac.state_dict()))
            kfac.zero_grad()
            backward(model, step)
            kfac.step()
        runs.append(model)
    for a, b in zip(*(m.parameters() for m in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return self.head(x.index_add(0, chosen, self.expert(x[chosen])))


def test_an_expert_without_tokens_has_seen_nothing():
    model = Expert().double()
    kfac = KFAC(model, sgd(model), factor_decay=0.5)
    x = torch.randn(6, 4, dtype=torch.float64)
    for count in (6, 0, 0, 3, 0):
        kfac.zero_grad()
        model(x, torch.arange(count)).square().mean().backward()
        kfac.step()
    kept = kfac.state_dict()["kfac"]["layers"]["expert"]
    assert float(kept["A_weight"]) == 0.75
    expected = 0.25 * x.T @ x / 6 + 0.5 * x[:3].T @ x[:3] / 3
    torch.testing.assert_close(kept["A"][0], expected, rtol=1e-12, atol=1e-12)


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["gradient of a layer", "plain gradient", "input"])
def test_a_step_that_is_not_finite_changes_nothing(poison, where):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    kfac = KFAC(model, sgd(model))
    x = torch.randn(5, 3, dtype=torch.float64)
    model(x).square().mean().backward()
    kfac.step()
    before = copy.deepcopy((model.state_dict(), kfac.state_dict()))
    kfac.zero_grad()
    bad = x.clone()
    if where == "input":
        bad[0, 0] = poison
    model(bad).square().mean().backward()
    if where == "gradient of a layer":
        model[0].weight.grad[0, 0] = poison
    if where == "plain gradient":
        model[1].weight.grad[0] = poison
    with pytest.warns(RuntimeWarning, match="step 1 was skipped"):
        kfac.step()
    after = (model.state_dict(), kfac.state_dict())
    assert kfac.skipped_steps == 1
    assert same(before[0], after[0])
    assert same(before[1]["state"], after[1]["state"])
    assert same(before[1]["kfac"]["layers"], after[1]["kfac"]["layers"])
    kfac.zero_grad()
    model(x).square().mean().backward()
    kfac.step()
    assert not same(before[0], model.state_dict())


FUSED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def fused_steps(make, count, poison=(), poison_input=False, **settings):
    """A model, its KFAC with statistics in every third step, and their state before each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    base = make(model.parameters())
    kfac = KFAC(model, base, **{"factor_update_steps": 3, "inv_update_steps": 3, **settings})
    states = []
    for step in range(count):
        x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if poison_input and step in poison:
            x[0, 0] = torch.inf
        kfac.zero_grad()
        model(x).square().mean().backward()
        if step in poison:
            model[0].weight.grad[0, 0] = torch.nan
        factors = kfac.state_dict()["kfac"]["layers"]
        states.append(copy.deepcopy((model.state_dict(), base.state_dict()["state"], factors)))
        kfac.step()
    return model, kfac, states


@pytest.fixture
def accelerator(monkeypatch):
    """The host may not look at numbers on a CPU, as if it were an accelerator."""
    monkeypatch.setattr("suite.torch.skipped.HOST_DEVICES", ())
    monkeypatch.setattr("suite.torch.thin.HOST_DEVICES", ())


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_fused_optimizer_is_stopped_by_the_device(make, accelerator, recwarn):
    model, kfac, states = fused_steps(make, 6, poison=(4,))
    assert same(states[4], states[5])
    assert not same(states[3][0], states[4][0])
    assert kfac.skipped_steps == 1
    assert kfac.state_dict()["kfac"]["skipped_steps"] == 1
    assert kfac.steps == 6
    assert not recwarn.list
    kfac.zero_grad()
    model(torch.ones(5, 3, dtype=torch.float64)).square().mean().backward()
    with pytest.warns(
        RuntimeWarning, match=r"1 of the steps before step 6 were skipped.*\(1 skipped so far"
    ):
        kfac.step()
    assert kfac.skipped_steps == 1
    assert not same(states[5][0], model.state_dict())


@pytest.mark.parametrize("poison_input", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_statistics_are_stopped_by_the_device_too(method, packed, poison_input, accelerator, recwarn):
    settings = {"compute_method": method, "packed_factors": packed, "poison_input": poison_input}
    settings |= {"factor_update_steps": 1, "inv_update_steps": 4}
    _, kfac, states = fused_steps(FUSED["AdamW"], 8, poison=(2, 6), **settings)
    for step in (2, 6):
        assert same(states[step], states[step + 1])
    for parts in zip(states[4], states[5], states[6], strict=True):
        assert not same(parts[0], parts[1])
        assert not same(parts[1], parts[2])
    assert kfac.skipped_steps == 2
    assert len(recwarn.list) == 1  # step 4 looked
    assert str(recwarn.list[0].message).startswith("1 of the steps before step 4 were skipped")


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_and_trains_as_where_the_host_looks(make, every, monkeypatch):
    expected, *_ = fused_steps(make, 8, factor_update_steps=every)
    monkeypatch.setattr("suite.torch.skipped.HOST_DEVICES", ())
    model, kfac, _ = fused_steps(make, 8, factor_update_steps=every)
    assert kfac._skipped.unread is not None
    assert same(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("poison", [0, 3])
def test_a_step_that_renews_inverses_is_looked_at(poison, accelerator):
    with pytest.warns(RuntimeWarning, match=f"step {poison} was skipped"):
        _, kfac, states = fused_steps(FUSED["SGD"], poison + 2, poison=(poison,))
    assert same(states[poison], states[poison + 1])
    assert kfac.steps == poison + 1


def test_a_step_with_a_new_parameter_is_looked_at(accelerator):
    model, kfac, _ = fused_steps(FUSED["SGD"], 2)
    new = nn.Parameter(torch.ones(2, dtype=torch.float64))
    kfac.add_param_group({"params": [new]})
    kfac.zero_grad()
    (model(torch.ones(5, 3, dtype=torch.float64)).sum() + new.sum()).backward()
    new.grad[0] = torch.nan  # a fused SGD would begin with momentum that nothing has written
    with pytest.warns(RuntimeWarning, match="step 2 was skipped"):
        kfac.step()


def test_a_step_of_an_optimizer_that_is_fused_in_part_is_looked_at(accelerator):
    def make(parameters):
        first, *rest = parameters
        groups = [{"params": [first]}, {"params": rest, "fused": False}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=True)

    with pytest.warns(RuntimeWarning, match="step 4 was skipped"):
        fused_steps(make, 6, poison=(4,))


def test_what_was_due_in_a_skipped_step_is_due_in_the_next():
    model = network()
    kfac = KFAC(model, sgd(model), factor_update_steps=5, inv_update_steps=10)
    backward(model)
    model[0].weight.grad[0] = float("nan")
    with pytest.warns(RuntimeWarning, match="skipped"):
        kfac.step()
    backward(model)
    kfac.step()
    assert all(bool(s["G_ready"].all()) for s in kfac.state_dict()["kfac"]["layers"].values())


def test_parameters_outside_the_model_and_late_ones_are_guarded_too():
    model = network()
    model[5].requires_grad_(False)
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    base = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    kfac = KFAC(model, base)
    model[5].requires_grad_(True)
    for poisoned in (temperature, model[5].bias):
        kfac.zero_grad()
        backward(model)
        poisoned.grad = torch.full_like(poisoned, float("nan"))
        with pytest.warns(RuntimeWarning, match="skipped"):
            kfac.step()
        assert bool(poisoned.isfinite().all())


def test_sparse_gradients_are_refused_and_those_of_other_layers_pass():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="layer '0' has sparse gradients"):
        KFAC(model)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), skip_layers=["Embedding"])
    model(torch.tensor([1, 2])).square().sum().backward()
    before = model[0].weight.detach().clone()
    kfac.step()
    assert not torch.equal(before, model[0].weight)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_a_copy_goes_on_with_the_copied_model(copied):
    model = network()
    kfac = KFAC(model, sgd(model), inv_update_steps=3)
    run(kfac, model, range(0, 4))
    other_model, other = copied((model, kfac))
    run(kfac, model, range(4, 8))
    assert not same(dict(model.state_dict()), dict(other_model.state_dict()))
    run(other, other_model, range(4, 8))
    assert same(dict(model.state_dict()), dict(other_model.state_dict()))
    assert same(kfac.state_dict(), other.state_dict())


@pytest.mark.filterwarnings("ignore:step . was skipped")  # which is asked for below
def test_gradients_of_any_size_stay_finite():
    for scale, skips in ((1e-30, 0), (1e15, 0), (1e30, 3)):  # squares end at 1.8e19
        model = network().float()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = batch(0)
        for _ in range(3):
            kfac.zero_grad()
            loss = nn.functional.cross_entropy(model(x.float()), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.grad *= scale
            kfac.step()
        assert all(bool(p.isfinite().all()) for p in model.parameters()), scale
        assert kfac.skipped_steps == skips


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"damping": -1.0}, ValueError, r"damping must be >= 0, got -1\.0"),
        ({"damping": float("nan")}, ValueError, "damping"),
        ({"damping": torch.tensor(float("nan"))}, ValueError, "damping must be >= 0, got nan"),
        ({"kl_clip": torch.tensor(-1.0)}, ValueError, "kl_clip must be > 0, got -1.0"),
        ({"factor_decay": torch.tensor(1.0)}, ValueError, "factor_decay must be >= 0 and < 1"),
        ({"lr": torch.ones(2)}, TypeError, "lr must be a number or a 0-d tensor"),
        ({"damping": "0.1"}, TypeError, "damping must be a number"),
        ({"factor_decay": 1.0}, ValueError, "factor_decay must be >= 0 and < 1"),
        ({"factor_update_steps": 0}, ValueError, "factor_update_steps must be >= 1, got 0"),
        ({"inv_update_steps": 1.5}, TypeError, "inv_update_steps must be an integer"),
        ({"kl_clip": 0.0}, ValueError, "kl_clip must be > 0"),
        ({"lr": -0.1}, ValueError, "lr must be >= 0"),
        ({"warm_start": 1}, TypeError, "warm_start must be True or False"),
        (
            {"warm_start": True, "compute_method": "inverse"},
            ValueError,
            "warm_start must be False without eigenbases",
        ),
        ({"compute_method": "egien"}, ValueError, "compute_method must be one of 'eigen'"),
        ({"skip_layers": "conv"}, TypeError, "skip_layers must be a list"),
        ({"skip_layers": 2}, TypeError, "skip_layers must be a list"),
        ({"skip_layers": torch.ones(2)}, TypeError, "skip_layers must be a list"),
        ({"max_rows": 4, "weight_sharing": "reduce"}, ValueError, "max_rows must be None"),
        (
            {"max_rows": 4, "weight_sharing": {"Linear": "reduce", "Conv2d": "reduce"}},
            ValueError,
            "max_rows must be None where weight_sharing is 'reduce' for all layers",
        ),
        ({"process_group": "data"}, TypeError, "process_group must be a torch.distributed.ProcessGroup"),
        ({"gradient_worker_fraction": torch.tensor(-1.0)}, TypeError, "gradient_worker_fraction must"),
        ({"damping": np.array(-1.0)}, ValueError, "damping must be >= 0"),
        ({"factor_dtype": torch.int32}, TypeError, "factor_dtype must be a floating"),
        ({"inv_dtype": "float32"}, TypeError, "inv_dtype must be a floating"),
        ({"factor_dtype": torch.float16}, ValueError, "factor_dtype must have the range"),
        ({"inv_dtype": torch.float16}, ValueError, "inv_dtype must have the range"),
        ({"max_factor_size": 0}, ValueError, "max_factor_size must be >= 1"),
        ({"terms": 0}, ValueError, "terms must be > 0"),
        ({"terms": torch.tensor(-3.0)}, ValueError, "terms must be > 0"),
        ({"terms": torch.tensor([3.0, 4.0])}, ValueError, "terms must be one number"),
        ({"terms": 4, "fisher": "mc"}, ValueError, "terms must be None with fisher='mc'"),
        ({"loss_reduction": "none"}, ValueError, "loss_reduction must be one of"),
        ({"optimizer": 3}, TypeError, "optimizer must be a torch.optim.Optimizer"),
        ({"dampnig": 0.1}, TypeError, "dampnig"),
    ],
)
def test_bad_settings_are_errors_and_leave_the_model_alone(settings, error, message):
    model = network()
    with pytest.raises(error, match=message):
        KFAC(model, **settings)
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("scale", "error"), [(0.0, ValueError), ("x", TypeError)])
def test_a_scale_that_is_none_is_an_error_and_changes_nothing(scale, error):
    model = network()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), grad_scaler=lambda: scale)
    backward(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match="what grad_scaler returns must be"):
        kfac.step()
    assert same(model.state_dict(), before)
    assert kfac.steps == 0


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["number", "function", "tensor"])
def test_labels_that_are_ignored_are_no_terms(kind, parts):
    """Twice the inputs, half of them without a label, are as many rows of the same moments."""
    x, y = batch(0)
    terms = {"number": len(x), "function": lambda: len(x), "tensor": torch.tensor(len(x))}[kind]
    ends = []
    for ignored in (False, True):
        model = network()
        kfac = KFAC(model, kl_clip=None, damping=0.01, terms=terms if ignored else None)
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            given = (torch.cat([a, a]), torch.cat([b, -100 + 0 * b])) if ignored else (a, b)
            (nn.functional.cross_entropy(model(given[0]), given[1]) / parts).backward()
        assert kfac.counted_terms is None
        kfac.step()
        assert kfac.counted_terms == len(x)
        ends.append([p.grad for p in model.parameters()])
    for got, expected in zip(*ends, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


class Repeated(nn.Module):
    """A layer that runs once for all examples and once for each half, within a checkpoint, or once."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.head = nn.Linear(4, 4), how, nn.Linear(4, 3)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        if self.how == "not at all":
            return self.head(self.step(x))
        if self.how == "in halves":
            return self.head(torch.cat([self.step(half) for half in self.step(x).chunk(2)]))
        x.requires_grad_()
        return self.head(checkpoint(self.step, x, use_reentrant=self.how == "reentrant"))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("how", ["in halves", "reentrant", "not reentrant"])
def test_the_terms_of_a_last_layer_that_is_not_covered(how, parts):
    model = Repeated(how)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), skip_layers=["head"])
    for seed in range(2):
        kfac.zero_grad()
        for x in torch.randn(12, 4, generator=torch.Generator().manual_seed(seed)).chunk(parts):
            (model(x).logsumexp(-1).mean() / parts).backward()
        kfac.step()
        assert kfac.counted_terms == 12


def target_pass(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model(torch.cat([x, x])).detach()
    return model(x)


def target_pass_after(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    model(torch.cat([x, x])).detach()
    return y


def head_for_another_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(model.inner(x))
    y = model.head(hidden)
    model.head(2 * hidden.detach()).detach()
    return y


def thrown_away(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if all(p.grad is None for p in model.parameters()):  # not between micro-batches
        model(torch.cat([x, x])).sum().backward()
        model.zero_grad()
    return model(x)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("forward", [target_pass, target_pass_after, head_for_another_loss, thrown_away])
def test_passes_that_no_gradient_comes_through_are_no_terms_of_an_uncovered_last_layer(forward, parts):
    model = Repeated("not at all")
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), skip_layers=["head"])
    for seed in range(2):
        kfac.zero_grad()
        for x in torch.randn(12, 4, generator=torch.Generator().manual_seed(seed)).chunk(parts):
            (forward(model, x).logsumexp(-1).mean() / parts).backward()
        kfac.step()
        assert kfac.counted_terms == 12


class Tasks(nn.Module):
    """Heads of pooled features, one of which may keep what it gave, or a view of more."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 5), nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        pooled = torch.tanh(self.body(x)).mean(1)
        return [head(pooled) for head in self.heads]


@pytest.mark.parametrize("skip", [[], ["heads"]])
def test_the_terms_are_those_of_the_heads_that_a_loss_is_made_of(skip):
    model = Tasks()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), skip_layers=skip)
    for used in ([0, 1], [2], [0], [1, 2], [1]):
        kfac.zero_grad()
        outputs = model(torch.randn(8, 7, 4))
        sum(outputs[i].logsumexp(1).mean() for i in used).backward()
        kfac.step()
        assert kfac.counted_terms == 8


@pytest.mark.parametrize("skip", [[], ["2"]])
def test_the_terms_of_points_that_only_derivatives_of_the_last_layer_see(skip):
    """Beside boundary points, of which the loss sees the output itself; and a gradient penalty."""
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), skip_layers=skip)
    for penalty in (False, True):
        kfac.zero_grad()
        x = torch.randn(20, 2, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        boundary = model(torch.randn(6, 2, dtype=torch.float64))
        part = (slope.norm(dim=1) - 1).square() if penalty else slope.sum(1).square()
        (part.mean() + boundary.square().mean()).backward()
        kfac.step()
        assert kfac.counted_terms == 26


class Keeping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = super().forward(x)
        return self.kept


def test_a_layer_that_is_left_out_returns_what_it_did():
    """The tensor itself, which may be kept elsewhere and changed in place."""
    x, gradients = torch.randn(5, 4), []
    model = nn.Sequential(nn.Linear(4, 4), Keeping(4, 4))
    for attached in (False, True):
        kfac = KFAC(model, skip_layers=["1"]) if attached else None
        model.zero_grad()
        y = model(x)
        assert y is model[1].kept
        y.mul_(2)
        model[1].kept.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert kfac is not None
    kfac.step()
    assert kfac.counted_terms == 5
    for plain, own in zip(*gradients, strict=True):
        assert torch.equal(plain, own)


@both_reductions
@pytest.mark.parametrize("skip", [[], ["2"]])
def test_parts_of_a_loss_that_go_backward_one_by_one_are_of_the_same_terms(skip, reduction):
    """G is the sum of theirs, by a loop over the parts: what they have in common is not in it."""
    x = torch.randn(8, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    kfac = KFAC(model, kl_clip=None, skip_layers=skip, loss_reduction=reduction)
    reduced = torch.mean if reduction == "mean" else torch.sum
    parts = (lambda y: reduced(y.square().sum(1)), lambda y: reduced(y.logsumexp(1)))
    h = model[0](x).detach().requires_grad_()
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for part in parts:
        (g,) = torch.autograd.grad(part(model[2](torch.tanh(h))), h)
        expected += g.T @ g * (len(x) if reduction == "mean" else 1)
    y = model(x)
    for part in parts:
        part(y).backward(retain_graph=True)
    kfac.step()
    layer = kfac.state_dict()["kfac"]["layers"]["0"]
    torch.testing.assert_close(layer["G"][0] / layer["G_weight"], expected, rtol=1e-12, atol=1e-14)
    assert kfac.counted_terms == len(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_terms_of_a_model_that_is_checkpointed_as_a_whole(reentrant):
    model = network()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        x, y = batch(seed)
        logits = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        nn.functional.cross_entropy(logits, y).backward()
        kfac.step()
        kfac.zero_grad()
        assert kfac.counted_terms == len(x)


class Tuned(nn.Module):
    """A scale of its own, or prompts, before layers that are frozen."""

    def __init__(self, prompts: bool) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(1, 2, 4) if prompts else torch.ones(4))
        self.prompts = prompts
        self.frozen = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.own.expand(len(x), -1, -1), x], 1) if self.prompts else x * self.own
        return self.frozen(x)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("prompts", [True, False])
def test_the_terms_where_only_parameters_of_no_layer_train(prompts, parts):
    model = Tuned(prompts)
    kfac = KFAC(model, torch.optim.SGD([model.own], lr=0.1))
    for _ in range(2):
        model(torch.randn(5, 7, 4)).sum().backward()  # thrown away
        kfac.zero_grad()
        for x in torch.randn(12, 7, 4).chunk(parts):
            (model(x).logsumexp(-1).mean() / parts).backward()
        kfac.step()
        assert kfac.counted_terms == 12 * (9 if prompts else 7)
        kfac.zero_grad()


class Prototypes(nn.Module):
    """Logits by rows of a table that are looked up for all examples."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh()) if layers else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) @ self.table(torch.arange(4)).T


@pytest.mark.filterwarnings("ignore:these layers ran once for all examples:RuntimeWarning")  # they did
@pytest.mark.parametrize("layers", [True, False])
def test_classes_that_are_looked_up_are_no_terms_where_there_are_products(layers):
    x = torch.randn(16, 3)
    kfac = KFAC(Prototypes(layers))
    kfac.model(x).logsumexp(-1).mean().backward()
    kfac.step()
    assert kfac.counted_terms == (16 if layers else 4)


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        (lambda: -5, ValueError, "terms must be >= 0, got -5"),
        (lambda: torch.tensor([3.0, 4.0]), ValueError, r"terms must be one number, got .* \(2,\)"),
        (lambda: None, TypeError, "terms must be a number, got None"),
    ],
)
def test_a_bad_number_of_terms_is_an_error_before_anything_changes(terms, error, message):
    model = network()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), terms=terms)
    before = copy.deepcopy((model.state_dict(), kfac.state_dict()))
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(error, match=message):
        kfac.step()
    assert same(before, (model.state_dict(), kfac.state_dict()))


def test_enums_and_strings_mean_the_same():
    assert KFAC(network(), compute_method=ComputeMethod.INVERSE)._engine.rule.compute_method == "inverse"
    assert KFAC(network(), compute_method="INVERSE")._engine.rule.compute_method == "inverse"


# ---- checkpoints --------------------------------------------------------------------------------


def run(kfac: KFAC, model: nn.Module, seeds: range) -> None:
    for seed in seeds:
        kfac.zero_grad()
        backward(model, seed)
        kfac.step()


SETTINGS = {
    "eigen": {},
    "inverse": {"compute_method": "inverse"},
    "newton_schulz": {"compute_method": "newton_schulz"},
    "ekfac": {"compute_method": "ekfac"},
    "outer product": {"compute_eigenvalue_outer_product": True},
    "warm start": {"warm_start": True},
    "spread": {"spread_inverses": True, "compute_method": "inverse"},
    "spread, ekfac": {"spread_inverses": True, "compute_method": "ekfac"},
    "mc": {"fisher": "mc", "likelihood": "categorical", "seed": 3},
    "max_rows": {"max_rows": 5},
    "max_examples": {"max_examples": 2},
    "reduce": {"weight_sharing": "reduce"},
    "kfac_pytorch": {"factor_scaling": "kfac_pytorch"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("stop", range(7))
def test_a_resumed_run_is_the_uninterrupted_run(settings, stop):
    settings = {"factor_update_steps": 2, "inv_update_steps": 3, **settings}
    model = network()
    kfac = KFAC(model, sgd(model), **settings)
    run(kfac, model, range(stop))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "kfac": kfac.state_dict()}, file)
    run(kfac, model, range(stop, 9))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = network()
    resumed.load_state_dict(saved["model"])
    again = KFAC(resumed, sgd(resumed), **settings)
    again.load_state_dict(state_dict=saved["kfac"])
    run(again, resumed, range(stop, 9))
    assert same(model.state_dict(), resumed.state_dict())
    assert same(kfac.state_dict(), again.state_dict())


def test_loading_its_own_fresh_state_is_the_identity():
    model = network()
    kfac = KFAC(model, sgd(model))
    before = copy.deepcopy(kfac.state_dict())
    kfac.load_state_dict(kfac.state_dict())
    assert same(before, kfac.state_dict())


def test_state_that_does_not_fit_names_the_layer_and_changes_nothing():
    model = network()
    kfac = KFAC(model, sgd(model))
    backward(model)
    kfac.step()
    before = copy.deepcopy(kfac.state_dict())
    renamed = copy.deepcopy(before)
    renamed["kfac"]["layers"]["head"] = renamed["kfac"]["layers"].pop("5")
    with pytest.raises(ValueError, match=r"missing \['5'\], layers unknown \['head'\]"):
        kfac.load_state_dict(renamed)
    reshaped = copy.deepcopy(before)
    reshaped["kfac"]["layers"]["3"]["A"] = torch.zeros(1, 2, 2)
    with pytest.raises(ValueError, match="state of layer '3'"):
        kfac.load_state_dict(reshaped)
    other = copy.deepcopy(before)
    other["kfac"]["compute_method"] = "inverse"
    with pytest.raises(ValueError, match="compute_method"):
        kfac.load_state_dict(other)
    wrong_base = copy.deepcopy(before)
    wrong_base["param_groups"] = []
    with pytest.raises(ValueError, match="param"):
        kfac.load_state_dict(wrong_base)
    assert same(before, kfac.state_dict())


def test_reports():
    model = network()
    kfac = KFAC(model, sgd(model))
    assert "KFAC(" in repr(kfac)
    assert "layers=3" in repr(kfac)
    assert sum(kfac.memory_usage().values()) == 0  # nothing is allocated before the first step
    plan = kfac.memory_plan()
    run(kfac, model, range(0, 1))
    assert kfac.memory_usage() == plan
    state = kfac.state_dict()["kfac"]["layers"]
    small = ("weight", "ready", "failures")
    held = [t for s in state.values() for name, t in s.items() if not name.endswith(small)]
    assert sum(plan.values()) == sum(t.nbytes for t in held)


class ActorCritic(nn.Module):
    """Two heads that read the same; the value is nearly learnt."""

    def __init__(self, value_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        heads = {"value": nn.Linear(4, 1, bias=False), "policy": nn.Linear(4, 3, bias=False)}
        for name in sorted(heads, reverse=value_first):
            setattr(self, name, heads[name].double())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {name: head(x) for name, head in self.named_children()}
        return given["value"], given["policy"]


@pytest.mark.parametrize("value_first", [False, True])
def test_a_head_of_one_output_is_damped_also_where_it_shares_its_input(value_first):
    model, x = ActorCritic(value_first), torch.randn(16, 4, dtype=torch.float64)
    kfac = KFAC(model, compute_method="inverse", damping=0.01, kl_clip=None)
    for _ in range(2):  # the first finds out which layers share
        kfac.zero_grad()
        value, policy = model(x)
        (policy.square().sum(1) + 1e-8 * value[:, 0] ** 2).mean().backward()
        gradient = model.value.weight.grad.clone()
        kfac.step()
    assert len(json.loads(kfac.state_dict()["kfac"]["inputs"])["inputs"]) == 1
    A = x.mT @ x / 16
    G = torch.stack([(2e-8 * value).square().mean(), (2 * policy).square().mean()]).detach()
    pi = (A.trace() / 4 / G.mean()).sqrt()
    damped = (A + 0.1 * pi * torch.eye(4, dtype=torch.float64)) * (G[0] + 0.1 / pi)
    expected = torch.linalg.solve(damped, gradient.mT).mT
    torch.testing.assert_close(model.value.weight.grad, expected, rtol=1e-9, atol=0)
