"""`suite.torch.Kron` in a training loop."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from conftest import same
from suite.core import kron as core_kron
from suite.torch import LRA, DenseNewton, Kron, precond_lr_schedule

GEOMETRIES = ["Q0.5EQ1.5", "QEQ", "QUAD", "EQ"]
SKIPPED = r"a step was skipped: a gradient was not finite, or too large \(1 skipped so far\)"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def backward(model: nn.Module, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (16,), generator=generator)
    dtype = next(model.parameters()).dtype
    loss = scale * nn.functional.cross_entropy(model(x.to(dtype)).double(), y)
    loss.backward()
    return loss


def run(model: nn.Module, kron: Kron, seeds: range, scale: float = 1.0) -> None:
    for seed in seeds:
        kron.zero_grad()
        backward(model, seed, scale)
        kron.step()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_it_learns(geometry):
    model = network()
    x = torch.randn(64, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    kron = Kron(model.parameters(), lr=0.01, geometry=geometry)
    losses = []
    for _ in range(150):
        kron.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        kron.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_scaling_the_loss_leaves_the_trajectory_unchanged():
    models = []
    for scale in (1.0, 64.0):
        model = network()
        # P goes with 1 / gradient, and Q with the root of P
        settings = {"damping": 0.0, "preconditioner_lr": 0.1}  # longer steps would amplify rounding
        kron = Kron(model.parameters(), 0.01, preconditioner_init_scale=scale**-0.5, **settings)
        run(model, kron, range(30), scale)
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("update_first", [True, False])
def test_the_scale_of_the_first_gradients_can_set_the_factors(update_first):
    """Then the loss's scale does not matter at all, and whitening holds from the first step on."""
    settings = {"damping": 0.0, "preconditioner_init_scale": None, "update_first": update_first}
    models = []
    for scale in (1e-6, 1.0, 1e6):
        model = network()
        kron = Kron(model.parameters(), lr=0.01, **settings)
        run(model, kron, range(10), scale)
        models.append(model)
    for model in models[1:]:
        for a, b in zip(models[0].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    moved = [
        (a - b).abs().mean() for a, b in zip(model.parameters(), network().parameters(), strict=True)
    ]
    assert min(moved) > 0.01  # ten steps of 0.01 and root mean square near 1


def test_blocks_of_a_parameter_do_not_depend_on_their_neighbours():
    """Where factors are not shared a block is the same as a parameter of its own."""
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split(3)]
    settings = {"lr": 0.1, "block_size": 3, "damping": 0.0, "shared_factors": False}
    together, apart = Kron([whole], **settings), Kron(parts, **settings)
    for seed in range(5):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        whole.grad = gradient
        for part, piece in zip(parts, gradient.split(3), strict=True):
            part.grad = piece.clone()
        together.step()
        apart.step()
    # 4 columns are cut into 3 + 1 in both
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-12, atol=1e-14)


def test_rows_that_wake_up_do_not_stop_the_others():
    """Half of a matrix has no gradient for a thousand steps, as an expert without tokens."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 16))
    kron = Kron([weight], lr=1.0, block_size=32, preconditioner_update_probability=1.0)
    sizes = []
    for step in range(1100):
        weight.grad = torch.randn(64, 16)
        weight.grad[32:] *= step >= 1000
        before = weight.detach().clone()
        kron.step()
        moved = (weight.detach() - before).square()
        sizes.append(moved[:32].mean().sqrt().item())
    assert min(sizes[950:]) > 0.3


@pytest.mark.parametrize("name", ["mu_dtype", "precond_dtype"])
def test_types_that_overflow_early_are_an_error(name):
    with pytest.raises(ValueError, match=f"{name} must reach as far as float32"):
        Kron([nn.Parameter(torch.zeros(3, 3))], **{name: torch.float16})


@pytest.mark.parametrize("numbers", [1, 60, 200])
def test_blocks_handled_in_rounds_that_a_cache_holds_take_the_same_steps(monkeypatch, numbers):
    def trajectory() -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6, bias=i % 2 == 0) for i in range(6))).double()
        kron = Kron(model.parameters(), lr=0.01, preconditioner_update_probability=0.5)
        run(model, kron, range(6))
        return [p.detach() for p in model.parameters()], sum(len(e.rounds) for e in kron._engines)

    whole, few = trajectory()
    monkeypatch.setattr("suite.torch.kron_rounds._CACHED", numbers)
    cut, many = trajectory()
    assert many > few
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("missing", [None, 0, 1])
def test_whole_parameters_and_blocks_of_one_size_take_their_own_steps_together(missing):
    """4 x 4 parameters in one bucket with the two blocks of an 8 x 4 one, or by themselves."""
    shapes = [(4, 4), (8, 4), (4, 4), (4,), (4,)]

    def trajectory(groups: list[list[int]]) -> list[torch.Tensor]:
        draws = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
        kron = Kron(
            [{"params": [parameters[i] for i in own]} for own in groups],
            lr=0.01,
            block_size=4,
            shared_factors=False,
            weight_decay=0.1,
        )
        for _ in range(5):
            for i, p in enumerate(parameters):
                gradient = torch.randn(p.shape, generator=draws, dtype=torch.float64)
                p.grad = None if i == missing else gradient
            kron.step()
        return [p.detach() for p in parameters]

    together, apart = trajectory([[0, 1, 2, 3, 4]]), trajectory([[0], [1], [2], [3], [4]])
    for i, (a, b) in enumerate(zip(together, apart, strict=True)):
        assert a.abs().min() > 0 or i == missing
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_closure_runs_once_first_and_under_grad():
    model = network()
    kron = Kron(model.parameters())
    calls = []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        calls.append(1)
        kron.zero_grad()
        return backward(model)

    with torch.no_grad():
        assert kron.step(closure).item() > 0
    assert len(calls) == 1


def test_parameters_of_every_kind():
    torch.manual_seed(0)
    parameters = {
        "scalar": torch.randn(()),
        "vector": torch.randn(5),
        "row": torch.randn(1, 7),
        "matrix": torch.randn(4, 3),
        "kernel": torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 5).t(),
        "empty": torch.randn(0, 3),
        "five axes": torch.randn(2, 3, 2, 2, 2),
        "no gradient": torch.randn(3, 3),
    }
    named = [(name, nn.Parameter(tensor)) for name, tensor in parameters.items()]
    before = {name: p.detach().clone() for name, p in named}
    kron = Kron(named, lr=0.1, block_size=2)
    for _ in range(3):
        for name, parameter in named:
            parameter.grad = None if name == "no gradient" else torch.randn_like(parameter)
        kron.step()
    for name, parameter in named:
        assert bool(parameter.isfinite().all()), name
        moved = not torch.equal(parameter, before[name])
        assert moved == (name not in ("empty", "no gradient")), name
    routing = kron.routing()
    assert [route.parameter for route in routing] == list(parameters)
    assert routing["row"].factors == "diag 7"
    assert routing["matrix"].factors == "2 x 2x2, 2x2 + 1x1"
    assert routing["kernel"].factors == "4 x 2x2, 4 x 2x2 + 1x1"
    assert routing["empty"].treatment == "plain"


def test_a_parameter_without_gradient_keeps_its_state_while_its_bucket_moves_on():
    torch.manual_seed(0)
    a, b = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))
    kron = Kron([a, b], lr=0.1)
    for gradient_of_b in (True, False):
        a.grad, b.grad = torch.randn(3, 3), torch.randn(3, 3) if gradient_of_b else None
        before = copy.deepcopy(kron.state_dict()["state"][1]), b.detach().clone()
        kron.step()
    after = kron.state_dict()["state"][1]
    assert same(before[0], after)
    assert torch.equal(before[1], b)


def in_turn(optimizers, parameters, present, steps=range(240)):
    """Steps with gradients of those that are `present(step)`, by number; None for the others."""
    for step in steps:
        for i, p in enumerate(parameters):
            p.grad = None
            if i in present(step):
                random = torch.Generator().manual_seed(1000 * i + step)
                p.grad = torch.randn(p.shape, generator=random, dtype=p.dtype) @ torch.diag(
                    torch.arange(1.0, 1 + p.shape[-1], dtype=p.dtype)
                )
        for optimizer in optimizers:
            optimizer.step()


TURNS = {
    "late": lambda step: {0} if step < 120 else {0, 1, 2},
    "in turn": lambda step: {0, 1 + step % 2},
    "seldom": lambda step: {0, 1} if step % 7 else {2},
}


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("settings", [{}, {"preconditioner_update_probability": 0.5}])
def test_schedules_count_the_steps_in_which_a_parameter_has_a_gradient(turns, settings):
    """So that each, stacked with others of its shape or not, is fitted as by an optimizer of its own."""
    shapes = [(6, 5), (6, 5), (4, 3)]
    together, alone = ([torch.nn.Parameter(torch.zeros(s).double()) for s in shapes] for _ in range(2))
    settings = {"lr": 0.01, "preconditioner_lr": precond_lr_schedule(decay_updates=5), **settings}
    in_turn([Kron(together, **settings)], together, TURNS[turns])
    in_turn([Kron([p], **settings) for p in alone], alone, TURNS[turns])
    for found, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # each draws its own noise


@pytest.mark.parametrize("turns", TURNS)
def test_a_run_with_parameters_in_turn_is_resumed_as_it_was(turns, tmp_path):
    ends = []
    for stop in (None, 131):
        parameters = [torch.nn.Parameter(torch.zeros(6, 5)) for _ in range(3)]
        optimizer = Kron(parameters, preconditioner_update_probability=0.3)
        in_turn([optimizer], parameters, TURNS[turns], range(stop or 200))
        if stop is not None:
            torch.save(optimizer.state_dict(), tmp_path / "state")
            optimizer = Kron(parameters)
            optimizer.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
            optimizer.param_groups[0]["preconditioner_lr"] = precond_lr_schedule()
            in_turn([optimizer], parameters, TURNS[turns], range(stop, 200))
        ends.append(parameters)
    assert all(map(torch.equal, *ends))


def test_a_state_without_counts_of_parameters_has_those_of_its_group():
    p = torch.nn.Parameter(torch.zeros(3, 3))
    optimizer = Kron([p])
    in_turn([optimizer], [p], lambda step: {0}, range(5))
    state = optimizer.state_dict()
    state["param_groups"][0]["behind"] = [[0, 4, 3, 0.5]]  # as it was saved once
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["behind"] == [(0, 4, 3, 0.5)]
    del state["param_groups"][0]["behind"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["behind"] == []
    assert optimizer.param_groups[0]["steps"] == 5


def test_an_object_without_counts_of_parameters_has_those_of_its_group():
    p = torch.nn.Parameter(torch.zeros(3, 3))
    optimizer = Kron([p])
    in_turn([optimizer], [p], lambda step: {0}, range(3))
    state = copy.deepcopy(optimizer.__getstate__())
    for group in state["param_groups"]:
        del group["behind"]
    again = Kron.__new__(Kron)
    again.__setstate__(state)
    in_turn([again], again.param_groups[0]["params"], lambda step: {0}, range(3, 6))
    assert (again.param_groups[0]["steps"], again.param_groups[0]["behind"]) == (6, [])


def test_groups_have_settings_of_their_own_and_can_join_later():
    model = network()
    kron = Kron(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], lr=0.1
    )
    first, middle, last = (model[i].weight.detach().clone() for i in (0, 2, 4))
    run(model, kron, range(2))
    assert torch.equal(model[0].weight, first)
    assert not torch.equal(model[2].weight, middle)
    assert torch.equal(model[4].weight, last)
    kron.add_param_group({"params": model[4].parameters(), "memory_save_mode": "all_diag"})
    run(model, kron, range(2))
    assert not torch.equal(model[4].weight, last)
    assert kron.routing()["2.0"].factors == "diag 3, diag 4"
    theirs = {"name": "last", "initial_lr": 0.1, "lr_mult": 2.0, "layer_name": "head", "use_muon": False}
    other = Kron([{"params": [nn.Parameter(torch.ones(2))], **theirs}])
    assert other.param_groups[0].items() >= theirs.items()
    for name in ("momentum", "betas", "blocksize", "weight_decays", "hvp"):  # would be ignored
        with pytest.raises(TypeError, match=name):
            kron.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: 0.9})
    with pytest.raises(ValueError, match="b1 must be"):
        kron.add_param_group({"params": [nn.Parameter(torch.ones(2))], "b1": 2.0})
    assert len(kron.param_groups) == 3


def test_a_group_with_settings_copied_from_another_begins_anew():
    model = network()
    kron = Kron(model[:3].parameters(), lr=0.1)
    for seed in range(8):
        backward(model, seed)
        model[2].bias.grad = None if seed % 2 else model[2].bias.grad
        kron.step()
        kron.zero_grad()
    other, fresh = copy.deepcopy((model, kron))
    copied = {name: value for name, value in kron.param_groups[0].items() if name != "params"}
    kron.add_param_group({**copied, "params": model[4].parameters()})
    fresh.add_param_group({"params": other[4].parameters()})
    assert [group["steps"] for group in kron.param_groups] == [8, 0]
    run(model, kron, range(3))
    run(other, fresh, range(3))
    assert same(model.state_dict(), other.state_dict())
    assert same(kron.state_dict()["state"], fresh.state_dict()["state"])


def groups_of(parameters: list[nn.Parameter], **settings: list[object]) -> list[dict[str, object]]:
    """A group for each, with one of each setting's values in turn."""
    return [
        {"params": [p], **{name: values[i % len(values)] for name, values in settings.items()}}
        for i, p in enumerate(parameters)
    ]


def test_groups_that_fit_alike_are_fitted_together_and_as_one_group_would_be(monkeypatch):
    calls = []
    fit = core_kron.Kron.fit

    def spied(self, states, *args, **kwargs):
        calls.append(len(states))
        return fit(self, states, *args, **kwargs)

    monkeypatch.setattr(core_kron.Kron, "fit", spied)
    alike, apart = network(), network()
    decays = {"weight_decay": [0.0, 0.1], "lr": [0.01, 0.02, 0.05]}
    run(alike, Kron(groups_of(list(alike.parameters()), **decays)), range(1))
    assert sum(calls) == 6  # matrices and biases
    assert len(calls) == 1
    calls.clear()
    run(apart, Kron(groups_of(list(apart.parameters()), betaL=[0.9, 0.5])), range(1))
    assert calls == [3, 3]
    same_settings, whole = network(), network()
    run(same_settings, Kron(groups_of(list(same_settings.parameters())), lr=0.01), range(30))
    run(whole, Kron(whole.parameters(), lr=0.01), range(30))
    for a, b in zip(same_settings.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_bad_gradient_in_one_of_several_groups_stops_all_of_them():
    model = network()
    kron = Kron(groups_of(list(model.parameters()), lr=[0.01, 0.02]))
    run(model, kron, range(2))
    before = copy.deepcopy((model.state_dict(), kron.state_dict()))
    backward(model)
    model[2].weight.grad[0, 0] = float("nan")
    with pytest.warns(RuntimeWarning, match="was skipped"):
        kron.step()
    saved = kron.state_dict()
    for record in saved["state"].values():
        record["skipped_steps"] = record["skipped_steps"] - 1
    assert same(before, (model.state_dict(), saved))


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_run_of_several_groups_in_turn_is_resumed_to_the_last_bit(stop):
    """Whatever was fitted together before: sides of 25 lie at odd places in what is joined."""
    settings = {"lr": [0.01, 0.02], "geometry": ["QEQ", "QEQ", "QUAD"]}

    def steps(parameters: list[nn.Parameter], kron: Kron, numbers: range) -> None:
        for t in numbers:
            generator = torch.Generator().manual_seed(t)
            for i, p in enumerate(parameters):
                gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype)
                p.grad = None if (i + t) % 4 == 3 else gradient
            kron.step()

    def fresh() -> tuple[list[nn.Parameter], Kron]:
        parameters = [nn.Parameter(torch.ones(25, 25 + i % 2).double()) for i in range(6)]
        return parameters, Kron(groups_of(parameters, **settings))

    whole, parts, resumed = fresh(), fresh(), fresh()
    steps(*whole, range(6))
    steps(*parts, range(stop))
    for p, q in zip(resumed[0], parts[0], strict=True):
        p.data.copy_(q.data)
    resumed[1].load_state_dict(parts[1].state_dict())
    steps(*resumed, range(stop, 6))
    assert all(map(torch.equal, whole[0], resumed[0]))
    assert same(whole[1].state_dict(), resumed[1].state_dict())


def test_groups_may_be_named_generators_or_single_tensors():
    one, other = network(), network()
    run(one, lists := Kron([{"params": list(one.parameters())}], lr=0.1), range(2))
    named = {"params": (pair for pair in other.named_parameters())}
    run(other, generators := Kron([named], lr=0.1), range(2))
    assert same(one.state_dict(), other.state_dict())
    assert same(lists.state_dict()["state"], generators.state_dict()["state"])
    alone = nn.Parameter(torch.ones(3, 3))
    kron = Kron([{"params": alone}], lr=0.1)
    alone.grad = torch.ones(3, 3)
    kron.step()
    assert not torch.equal(alone, torch.ones(3, 3))


def test_tensor_learning_rates_schedulers_and_maximize():
    model, twin = network(), network()
    kron = Kron(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64))
    mirrored = Kron(twin.parameters(), lr=0.01, maximize=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(kron, 0.5)
    backward(model)
    backward(twin, scale=-1.0)
    kron.step()
    mirrored.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    scheduler.step()
    assert float(kron.param_groups[0]["lr"]) == pytest.approx(0.005)


def test_weight_decay_is_decoupled():
    plain, decayed = network(), network()
    run(plain, Kron(plain.parameters(), lr=0.1), range(1))
    start = network()
    run(decayed, Kron(decayed.parameters(), lr=0.1, weight_decay=0.5), range(1))
    for a, b, c in zip(plain.parameters(), decayed.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(b, a - 0.1 * 0.5 * c)


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", ["Q0.5EQ1.5", "EQ"])
@pytest.mark.parametrize("clip", [1.1, None, (1.1, 2.0)])
def test_a_host_that_does_not_look_at_what_is_finite_takes_the_same_steps(monkeypatch, geometry, clip):
    ends = []
    for devices in (("cpu",), ()):  # with the second it goes as on an accelerator
        monkeypatch.setattr("suite.torch.kron.HOST_DEVICES", devices)
        model = network()
        kron = Kron(model.parameters(), lr=0.05, geometry=geometry, clip=clip, weight_decay=0.1)
        run(model, kron, range(5))
        backward(model, 5)
        for p in model.parameters():  # in every bucket
            p.grad.view(-1)[0] = float("nan")
        before = copy.deepcopy([kron.state_dict()["state"], model.state_dict()])
        with pytest.warns(RuntimeWarning, match=SKIPPED) if devices else contextlib.nullcontext():
            kron.step()
        before[0][0]["skipped_steps"] += 1  # one tensor for all
        assert same(before, [kron.state_dict()["state"], model.state_dict()])
        model[0].weight.requires_grad_(False)  # from here on a bucket has blocks without gradients
        kron.zero_grad()
        for group in kron.param_groups:
            group["steps"], group["updates"], group["update_clock"] = 5, 5, 0.0
        run(model, kron, range(6, 9))
        ends.append(model.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"geometry": "EQ"}])
def test_a_step_that_is_not_finite_changes_nothing(poison, settings):
    model = network()
    kron = Kron(model.parameters(), lr=0.01, **settings)
    run(model, kron, range(2))
    before = copy.deepcopy((model.state_dict(), kron.state_dict()["state"]))
    kron.zero_grad()
    backward(model)
    model[2].weight.grad[0, 0] = poison
    with pytest.warns(RuntimeWarning, match=SKIPPED):
        kron.step()
    assert kron.skipped_steps == 1
    assert same(before[0], model.state_dict())
    for index, state in kron.state_dict()["state"].items():
        old = before[1][index]
        assert all(same(old[key], state[key]) for key in old if key != "skipped_steps")
    run(model, kron, range(1))
    assert kron.skipped_steps == 1
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_first_step_with_zero_gradients_and_zero_learning_rate_changes_nothing():
    model = network()
    kron = Kron(model.parameters(), lr=0.0)
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    kron.step()
    assert same(before, model.state_dict())
    for state in kron.state_dict()["state"].values():
        assert all(bool(t.isfinite().all()) for t in state.values())


def test_a_loss_spike_does_not_stop_training():
    model = network()
    kron = Kron(model.parameters(), lr=0.01)
    run(model, kron, range(20))
    run(model, kron, range(1), scale=1e6)
    losses = []
    for _ in range(400):  # the momentum has to forget 1e6 first
        kron.zero_grad()
        losses.append(backward(model, 3).item())
        kron.step()
    assert losses[-1] < 0.5 * losses[0]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("packed", [True, False])
def test_what_others_keep_in_its_state_is_saved_and_loaded(packed):
    """As timm's Lookahead does."""
    parameter, empty = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(0))
    kron = Kron([parameter, empty], packed_factors=packed)
    parameter.grad = torch.randn(3, 2)
    kron.step()
    kron.state[parameter]["slow"] = torch.full((3, 2), 2.0)
    kron.state[empty]["slow"] = torch.ones(0)
    fresh = Kron([parameter, empty], packed_factors=packed)
    fresh.state[parameter]["fast"] = torch.ones(2)
    for other in (fresh, copy.deepcopy(kron), pickle.loads(pickle.dumps(kron))):
        other.load_state_dict(copy.deepcopy(kron.state_dict()))
        assert [state["slow"].shape for state in other.state.values()] == [(3, 2), (0,)]
        assert same(other.state_dict(), kron.state_dict())
    state = copy.deepcopy(kron.state_dict())
    state["state"][0]["tile7.factor0"] = torch.ones(2)
    with pytest.raises(ValueError, match="state of parameter 0 must have"):
        kron.load_state_dict(state)


def test_complex_parameters_are_those_of_their_parts():
    """Spectral convolutions: the same trajectory, resumed in the middle, as with real parameters."""
    torch.manual_seed(0)
    parts = [torch.randn(4, 3, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)]
    x = torch.randn(8, 3, dtype=torch.complex128)
    settings = {"lr": 0.05, "weight_decay": 0.1, "block_size": 3}

    def loss_of(weight, bias):
        return (torch.tanh((x @ weight.T + bias).abs()) - 0.3).square().mean()

    def run(parameters, used, steps, state=None):
        kron = Kron(parameters, **settings)
        if state is not None:
            kron.load_state_dict(state)
        for _ in range(steps):
            kron.zero_grad()
            loss_of(*map(used, parameters)).backward()
            kron.step()
        return copy.deepcopy(kron.state_dict())

    real = [nn.Parameter(part.clone()) for part in parts]
    run(real, torch.view_as_complex, 12)
    own = [nn.Parameter(torch.view_as_complex(part.clone())) for part in parts]
    state = run(own, lambda p: p, 5)
    run(own, lambda p: p, 7, state)
    for a, b, start in zip(own, real, parts, strict=True):
        torch.testing.assert_close(torch.view_as_real(a.detach()), b.detach(), rtol=1e-12, atol=1e-14)
        assert (b - start).abs().max() > 0.01
    assert Kron(own).routing()["0.0"].shape == (4, 3)
    kron, before = Kron(own), [p.detach().clone() for p in own]
    own[0].grad = torch.full_like(own[0], complex(0.0, float("nan")))
    with pytest.warns(RuntimeWarning, match=SKIPPED):
        kron.step()
    assert kron.skipped_steps == 1
    assert all(map(torch.equal, own, before))


def test_refusals():
    with pytest.raises(ValueError, match="real with hvp='exact', got complex ones"):
        Kron([nn.Parameter(torch.ones(2, dtype=torch.complex64))], hvp="exact")
    with pytest.raises(ValueError, match="must not be conjugates"):
        Kron([nn.Parameter(torch.ones(2, dtype=torch.complex64).conj())])
    with pytest.raises(ValueError, match="floating or complex dtype"):
        Kron([torch.ones(2, dtype=torch.int32)])
    embedding = nn.Embedding(4, 2, sparse=True)
    kron = Kron(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients"):
        kron.step()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be >= 0"),
        ({"lr": torch.tensor(-1.0)}, ValueError, "lr must be >= 0"),
        ({"lr": torch.ones(2)}, TypeError, "lr must be a number or a 0-d tensor"),
        ({"b1": 1.0}, ValueError, "b1 must be >= 0 and < 1"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay"),
        ({"preconditioner_update_probability": 0.0}, ValueError, "preconditioner_update_probability"),
        ({"preconditioner_lr": 1.0}, ValueError, "preconditioner_lr must be > 0 and < 1"),
        ({"preconditioner_init_scale": 0.0}, ValueError, "preconditioner_init_scale"),
        ({"memory_save_mode": "one_diagonal"}, ValueError, "memory_save_mode must be one of None"),
        ({"max_size_triangular": -1}, ValueError, "max_size_triangular"),
        ({"block_size": 0}, ValueError, "block_size must be >= 1"),
        ({"block_size": 2.5}, TypeError, "block_size must be an integer"),
        ({"merge_small_dims": 1}, TypeError, "merge_small_dims must be True or False"),
        ({"geometry": "QQ"}, ValueError, "geometry must be one of"),
        ({"betaL": 1.0}, ValueError, "betaL"),
        ({"damping": -1e-9}, ValueError, "damping"),
        ({"mu_dtype": torch.int8}, TypeError, "mu_dtype"),
        ({"maximize": "yes"}, TypeError, "maximize"),
        ({"seed": -1}, ValueError, "seed must be >= 0"),
        ({"betas": (0.9, 0.99)}, TypeError, "betas"),
        ({"lr": lambda step: 0.1}, TypeError, "lr must be a number"),
        ({"weight_decay": lambda step: 0.1}, TypeError, "weight_decay must be a number"),
        ({"maximize": lambda: True}, TypeError, "maximize must be True or False"),
        ({"mu_dtype": float}, TypeError, "mu_dtype must be a floating"),
        ({"seed": lambda: 0}, TypeError, "seed must be an integer"),
        ({"damping": torch.tensor(-1.0)}, TypeError, "damping must be a number, got a tensor"),
        ({"clip": torch.tensor(-1.0)}, TypeError, "clip must be a number, got a tensor"),
        ({"clip": (1.0, torch.tensor(0.0))}, TypeError, "clip must be a number, got a tensor"),
    ],
)
def test_bad_settings_are_errors(settings, error, message):
    with pytest.raises(error, match=message):
        Kron([nn.Parameter(torch.ones(2, 2))], **settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("preconditioner_lr", lambda updates: 2.0),
        ("preconditioner_update_probability", lambda step: -0.1),
        ("b1", 1.0),
        ("lr", -0.1),
        ("lr", torch.tensor(float("nan"))),
        ("weight_decay", -5.0),
        ("geometry", "QQ"),
        ("block_size", 3),  # too late
        ("packed_factors", True),
        ("mu_dtype", torch.bfloat16),
        ("seed", 5),
    ],
)
def test_a_setting_that_went_bad_is_an_error_before_anything_changes(name, value):
    model = network()
    kron = Kron([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    run(model, kron, range(1))
    good = kron.param_groups[1][name]
    kron.param_groups[1][name] = value
    before = copy.deepcopy((model.state_dict(), kron.state_dict()))
    backward(model)
    with pytest.raises(ValueError, match=name):
        kron.step()
    kron.param_groups[1][name], before[1]["param_groups"][1][name] = good, good
    after = kron.state_dict()
    after["param_groups"][1][name] = good
    assert same(before, (model.state_dict(), after))


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"packed_factors": True}, {"geometry": "QUAD4P"}])
def test_what_follows_from_loaded_state_is_to_the_last_bit_what_a_step_had_computed(settings):
    """Products of matrices of side 9 round by their place in a stack: it has to be that of a step."""

    def kron() -> tuple[nn.Module, Kron]:
        torch.manual_seed(0)
        sides = [(9, 9), (9, 16), (16, 9), (9, 8), (8, 9), (9, 27), (27, 9)]
        model = nn.Sequential(*(nn.Linear(m, n) for m, n in sides))
        return model, Kron(model.parameters(), lr=1e-3, **settings)

    (model, first), (_, second) = kron(), kron()
    for _ in range(2):
        model(torch.randn(8, 9)).square().mean().backward()
        first.step()
    second.load_state_dict(first.state_dict())
    for a, b in zip(first._engines[0].packs, second._engines[0].packs, strict=True):
        for p, q in zip(a.kron.preconditioners, b.kron.preconditioners, strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("geometry", ["Q0.5EQ1.5", "EQ"])
@pytest.mark.parametrize("stop", range(5))
def test_a_resumed_run_is_the_uninterrupted_run(geometry, stop):
    settings = {"lr": 0.01, "geometry": geometry, "preconditioner_update_probability": 0.4}
    model = network()
    kron = Kron(model.parameters(), **settings)
    run(model, kron, range(stop))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "kron": kron.state_dict()}, file)
    run(model, kron, range(stop, 8))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = network()
    resumed.load_state_dict(saved["model"])
    again = Kron(resumed.parameters(), **settings)
    again.load_state_dict(state_dict=saved["kron"])
    run(resumed, again, range(stop, 8))
    assert same(model.state_dict(), resumed.state_dict())
    assert same(kron.state_dict(), again.state_dict())


def test_schedules_stay_out_of_the_state_and_survive_loading_it():
    model = network()
    kron = Kron(model.parameters(), preconditioner_lr=lambda step: 0.5 / (1 + step))
    run(model, kron, range(2))
    saved = kron.state_dict()
    assert not any(callable(value) for group in saved["param_groups"] for value in group.values())
    kron.load_state_dict(saved)
    run(model, kron, range(1))
    fixed = Kron(model.parameters(), preconditioner_lr=0.25)
    fixed.load_state_dict(saved)
    assert fixed.param_groups[0]["preconditioner_lr"] == 0.25


@pytest.mark.parametrize("how", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}])
def test_a_state_is_resumed_in_torch_s_ways(how):
    """Also where a parameter's counts lag behind its group's, and none do where it is loaded."""
    options = StateDictOptions(**how)
    model, other = network(), network()
    kron, again = (Kron(m.parameters(), lr=0.01, block_size=4) for m in (model, other))
    late = next(model.parameters())
    late.requires_grad_(False)
    run(model, kron, range(3))
    late.requires_grad_(True)
    run(model, kron, range(3, 5))
    state = get_optimizer_state_dict(model, kron, options=options)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, again, state, options=options)
    assert again.param_groups[0]["behind"] == kron.param_groups[0]["behind"] != []
    run(model, kron, range(5, 8))
    run(other, again, range(5, 8))
    assert same(model.state_dict(), other.state_dict())


def test_bfloat16_parameters_keep_float32_factors_through_a_checkpoint():
    model = network().bfloat16()
    kron = Kron(model.parameters(), lr=0.01)
    run(model, kron, range(2))
    kron.load_state_dict(copy.deepcopy(kron.state_dict()))
    state = kron.state_dict()["state"][0]
    assert state["tile0.factor0"].dtype == torch.float32
    assert state["tile0.momentum"].dtype == torch.bfloat16
    run(model, kron, range(1))
    assert all(p.dtype == torch.bfloat16 and bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("quiet", [1e-5, 1e-4])
def test_float16_parameters_take_a_bounded_step_where_gradients_jump(quiet, rounding):
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.ones(16, 8, dtype=torch.float16))
    kron = Kron([p], lr=0.01, stochastic_rounding=rounding)
    for i in range(60):
        before = p.detach().clone()
        p.grad = (torch.randn(16, 8, generator=generator) * (10.0 if i == 50 else quiet)).half()
        kron.step()
        step = (p.detach() - before).float()
        assert step.square().mean().sqrt() < 1.3 * 0.01  # `clip` is 1.1, and numbers are to 0.1 % of 1
        assert i < 50 or step.any()
    assert kron.skipped_steps == 0


@pytest.mark.filterwarnings("ignore:a step was skipped:RuntimeWarning")
def test_a_jump_by_all_that_a_float_holds_is_a_bounded_step_or_none():
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.ones(16, 8))
    kron = Kron([p], lr=0.01)
    for i, size in enumerate([1e-9] * 300 + [1e24, 1e30, 1e38]):
        before = p.detach().clone()
        p.grad = torch.randn(16, 8, generator=generator).clamp(-2, 2) * size
        kron.step()
        step = p.detach() - before
        assert i < 300 or step.any() == (size < 1e25), i
        assert step.square().mean().sqrt() < 1.2 * 0.01
    assert kron.skipped_steps == 2


@pytest.mark.filterwarnings("ignore:a step was skipped:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(
    "settings",
    [{"mu_dtype": torch.float32}, {"precond_dtype": torch.float32}, {"mu_dtype": torch.bfloat16}, {}],
)
def test_a_gradient_of_double_precision_is_skipped_where_state_in_single_does_not_hold_it(
    settings, dtype
):
    p = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    kron = Kron([p], lr=0.01, **settings)
    for i in range(4):
        before = p.detach().clone()
        p.grad = torch.randn(4, 3, dtype=dtype) * (1e60 if i == 2 else 1.0)
        kron.step()
        assert torch.equal(p, before) == bool(i == 2 and settings), i
    assert p.isfinite().all()
    assert kron.skipped_steps == len(settings)


@pytest.mark.filterwarnings("ignore:a step was skipped:RuntimeWarning")
def test_a_model_that_is_made_double_has_state_in_single_that_bounds_its_gradients():
    model = network().float()
    kron = Kron(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    kron.step()
    before = [p.detach().clone() for p in model.double().parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e60)
    kron.step()
    assert same(before, list(model.parameters()))
    assert kron.skipped_steps == 1


@pytest.mark.parametrize("name", ["preconditioner_lr", "preconditioner_update_probability"])
@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, 1.5, "0.5"])
def test_a_number_of_the_fit_that_went_bad_is_an_error_before_anything_changes(name, value):
    model = network()
    kron = Kron(model.parameters(), lr=0.01)
    run(model, kron, range(2))
    before, kron.param_groups[0][name] = [p.detach().clone() for p in model.parameters()], value
    backward(model)
    with pytest.raises((ValueError, TypeError), match=f"{name} must be"):
        kron.step()
    assert same(before, list(model.parameters()))
    assert kron.param_groups[0]["steps"] == 2


def test_a_geometry_for_factors_of_another_form_is_an_error_in_the_middle():
    model = network()
    kron = Kron(model.parameters(), geometry="QEQ")
    kron.param_groups[0]["geometry"] = "EQ"  # nothing is fitted yet
    run(model, kron, range(2))
    kron.param_groups[0]["geometry"] = "QEQ"  # takes triangular factors, too
    run(model, kron, range(2))
    before = [p.detach().clone() for p in model.parameters()]
    kron.param_groups[0]["geometry"] = "EQ"
    backward(model)
    with pytest.raises(ValueError, match=r"geometry must be .* while there are 'QEQ''s, got 'EQ'"):
        kron.step()
    assert same(before, list(model.parameters()))


def test_loading_keeps_the_dtypes_and_blocks_that_the_optimizer_was_made_with():
    parameter = nn.Parameter(torch.ones(4, 4))
    saved = Kron([parameter], lr=0.5).state_dict()
    half = Kron([parameter], mu_dtype=torch.bfloat16, max_size_triangular=100)
    half.load_state_dict(saved)
    group = half.param_groups[0]
    assert (group["lr"], group["mu_dtype"], group["max_size_triangular"]) == (0.5, torch.bfloat16, 100)
    assert half.state[parameter]["tile0.momentum"].dtype == torch.bfloat16


def test_loaded_state_is_copied_and_state_that_does_not_fit_is_an_error():
    model = network()
    kron = Kron(model.parameters(), lr=0.01)
    run(model, kron, range(2))
    saved = copy.deepcopy(kron.state_dict())
    kron.load_state_dict(saved)
    run(model, kron, range(1))
    assert not same(saved["state"], kron.state_dict()["state"])
    before = copy.deepcopy(kron.state_dict())
    broken = copy.deepcopy(before)
    broken["state"][2]["tile0.factor0"] = torch.zeros(1, 2, 2)
    with pytest.raises(ValueError, match="state of parameter 2"):
        kron.load_state_dict(broken)
    with pytest.raises(ValueError, match="must have 6 parameters"):
        kron.load_state_dict(Kron([nn.Parameter(torch.ones(2))]).state_dict())
    assert same(before, kron.state_dict())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("steps", None, "steps must be an integer, got None"),
        ("updates", -3, "updates must be >= 0, got -3"),
        ("update_clock", None, "update_clock must be a number, got None"),
        ("update_clock", math.nan, "update_clock must be >= -1 and <= 2, got nan"),
        ("behind", "[[0, 1, -1, 1.0]]", "updates must be >= 0, got -1"),
    ],
)
def test_a_state_that_does_not_say_how_far_it_has_come_is_an_error(name, value, said):
    optimizers = [Kron(network().parameters())]
    if name != "behind":  # which others do not have
        optimizers += [LRA(network().parameters()), DenseNewton(network().parameters(), hvp=None)]
    for optimizer in optimizers:
        before = copy.deepcopy(optimizer.state_dict())
        broken = copy.deepcopy(before)
        broken["param_groups"][0][name] = value
        with pytest.raises((ValueError, TypeError), match=said):
            optimizer.load_state_dict(broken)
        assert same(before, optimizer.state_dict())


@pytest.mark.parametrize("through", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_and_pickles_go_on_alike(through):
    model = network()
    kron = Kron(model.parameters(), lr=0.01)
    run(model, kron, range(2))
    twin, twins = through((model, kron))
    for one, optimizer in ((model, kron), (twin, twins)):
        run(one, optimizer, range(2, 4))
    assert same(model.state_dict(), twin.state_dict())
    assert same(kron.state_dict(), twins.state_dict())


@pytest.mark.parametrize("geometries", [("Q0.5EQ1.5", "EQ"), ("QEQ", "QUAD4P"), ("PRO4P", "QEQ")])
def test_loaded_and_edited_settings_take_effect(geometries):
    """Of factors of P, which two geometries have, P is not the square."""
    model, other = network(), network()
    kept = {"lr": 0.01, "cache_preconditioner": True}
    kron = Kron(model.parameters(), **kept, geometry=geometries[0])
    saved = Kron(other.parameters(), **kept, geometry=geometries[1], betaL=0.5)
    run(other, saved, range(4))
    model.load_state_dict(other.state_dict())
    saved.param_groups[0]["preconditioner_update_probability"] = 1e-6  # no new factors from here on
    kron.load_state_dict(saved.state_dict())
    run(model, kron, range(3))
    run(other, saved, range(3))
    assert same(model.state_dict(), other.state_dict())
    with pytest.raises(ValueError, match="seed must be 0"):
        Kron(network().parameters(), seed=1).load_state_dict(saved.state_dict())


def test_what_was_due_in_a_skipped_step_is_due_in_the_next():
    model = network()
    kron = Kron(model.parameters(), preconditioner_update_probability=0.1)
    start = kron.state_dict()["state"][0]["tile0.factor0"].clone()
    backward(model)
    model[0].weight.grad[0] = float("nan")
    with pytest.warns(RuntimeWarning, match=SKIPPED):
        kron.step()
    assert kron.param_groups[0]["steps"] == 0
    run(model, kron, range(1))
    assert not torch.equal(start, kron.state_dict()["state"][0]["tile0.factor0"])


def test_the_update_schedule_is_spread_evenly():
    parameter = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    kron = Kron([parameter], preconditioner_update_probability=0.25)
    updates = []
    for seed in range(12):
        old = kron.state_dict()["state"][0]["tile0.factor0"].clone()
        parameter.grad = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).double()
        kron.step()
        updates.append(not torch.equal(old, kron.state_dict()["state"][0]["tile0.factor0"]))
    assert updates == [True, False, False, False] * 3


def test_reports():
    model = network()
    kron = Kron(model.named_parameters())
    assert {route.parameter for route in kron.routing()} == dict(model.named_parameters()).keys()
    elements = sum(p.numel() for p in model.parameters())
    assert kron.memory_usage()["momentum"] == 8 * elements
    factors = sum(n * n + m * m for m, n in ((6, 9), (9, 4), (4, 3))) + 9 + 4 + 3
    assert kron.memory_usage()["factors"] == 8 * factors
    np.testing.assert_equal(kron.skipped_steps, 0)


def test_parameters_exchanged_before_a_checkpoint_are_followed():
    """Who shards a model puts the shards into the groups, and loads then."""
    model, other = network(), network()
    kron = Kron(model.parameters())
    saved = kron.state_dict()
    kron.param_groups[0]["params"] = list(other.parameters())
    assert set(kron.state_dict()["state"]) == set(range(6))
    kron = Kron(model.parameters())
    kron.param_groups[0]["params"] = list(other.parameters())
    kron.load_state_dict(saved)
    assert set(kron.state) == set(other.parameters())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("precond_lr", "preconditioner_lr"),
        ("merge_dims", "merge_small_dims"),
        ("q_dtype", "precond_dtype"),
    ],
)
def test_settings_of_other_krons_in_groups_are_errors_that_say_what_they_are_here(theirs, ours):
    with pytest.raises(TypeError, match=f"unknown settings.*'{theirs}'.*; {theirs} is {ours} here"):
        Kron([{"params": [nn.Parameter(torch.ones(2))], theirs: 0.1}])


def test_another_krons_state_is_an_error_that_says_what_fits():
    parameter = nn.Parameter(torch.ones(2, 2))
    saved = Kron([parameter]).state_dict()
    saved["state"][0] = {"step": 3, "momentum_buffer": torch.ones(2, 2), "Q": [torch.ones(2)]}
    with pytest.raises(ValueError, match="state of parameter 0 must be Kron's, got another optimizer's"):
        Kron([parameter]).load_state_dict(saved)
