"""What every optimizer of PSGD owes torch: one table, and the tests that all rows pass."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from conftest import same
from suite.torch import LRA, DenseNewton, Kron

OPTIMIZERS = {
    "Kron": lambda params, lr=0.01, **kw: Kron(params, lr, **kw),
    "Kron gradient": lambda params, lr=0.01, **kw: Kron(
        params, lr, whiten="gradient", clip=(1.1, 10.0), **kw
    ),
    "Kron bfloat16": lambda params, lr=0.01, **kw: Kron(
        params, lr, mu_dtype=torch.bfloat16, precond_dtype=torch.bfloat16, stochastic_rounding=True, **kw
    ),
    "LRA": lambda params, lr=0.01, **kw: LRA(params, lr, rank=2, **kw),
    "LRA bounded": lambda params, lr=0.01, **kw: LRA(params, lr, clip=(1.1, 2.0), **kw),
    "dense": lambda params, lr=0.01, **kw: DenseNewton(params, lr, hvp=None, clip=1.1, **kw),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def problem():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    x, y = torch.randn(32, 4), torch.randn(32, 2)
    return model, lambda model=model: torch.nn.functional.mse_loss(model(x), y)


def run(model, optimizer, loss_fn, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@every_optimizer
def test_the_default_device_is_not_where_state_comes_to_be(make):
    ends = []
    for default in ("cpu", "meta"):
        model, loss_fn = problem()
        with torch.device(default):
            ends.append(run(model, make(model.parameters()), lambda _, f=loss_fn: f()))
    assert same(*ends)


@every_optimizer
def test_a_closure_runs_once_first_and_under_grad(make):
    model, loss_fn = problem()
    optimizer, calls = make(model.parameters()), []
    before = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def step():
        def closure():
            calls.append(torch.is_grad_enabled() and same(before, list(model.parameters())))
            optimizer.zero_grad()
            loss = loss_fn()
            loss.backward()
            return loss

        return optimizer.step(closure)

    assert step().item() > 0
    assert calls == [True]
    assert not same(before, [p.detach() for p in model.parameters()])


@every_optimizer
def test_a_tensor_rate_and_a_scheduler_are_the_same_numbers(make):
    results = []
    for rate in (0.01, torch.tensor(0.01)):
        model, loss_fn = problem()
        optimizer = make(model.parameters(), rate)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run(model, optimizer, loss_fn, 2)
        schedule.step()
        results.append(run(model, optimizer, loss_fn, 2))
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.005)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@every_optimizer
def test_to_maximize_is_to_minimize_the_negative(make):
    model, loss_fn = problem()
    up, up_loss = problem()
    down = run(model, make(model.parameters()), lambda m: -loss_fn(m))
    assert same(down, run(up, make(up.parameters(), maximize=True), up_loss))


@every_optimizer
def test_weight_decay_is_decoupled_and_a_rate_of_zero_is_honoured(make):
    model, loss_fn = problem()
    before = [p.detach().clone() for p in model.parameters()]
    assert same(before, run(model, make(model.parameters(), 0.0, weight_decay=0.5), loss_fn))
    plain, other = (run(*self_made(make, decay), steps=1) for decay in (0.0, 0.5))
    for old, a, b in zip(before, plain, other, strict=True):
        torch.testing.assert_close(a - b, 0.01 * 0.5 * old, rtol=1e-3, atol=1e-6)


def self_made(make, decay):
    model, loss_fn = problem()
    return model, make(model.parameters(), weight_decay=decay), loss_fn


@every_optimizer
@pytest.mark.parametrize("through", ["deepcopy", "pickle", "state_dict"])
def test_copies_go_on_alike(make, through, tmp_path):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    run(model, optimizer, loss_fn)
    if through == "state_dict":
        other, _ = problem()
        other.load_state_dict(model.state_dict())
        twin = make(other.parameters())
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        twin.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    else:
        through = copy.deepcopy if through == "deepcopy" else lambda x: pickle.loads(pickle.dumps(x))
        other, twin = through((model, optimizer))
    assert same(run(model, optimizer, loss_fn), run(other, twin, loss_fn))


@every_optimizer
def test_parameters_without_gradient_stay(make):
    model, loss_fn = problem()
    idle = torch.nn.Parameter(torch.ones(3))
    optimizer = make([*model.parameters(), idle])
    optimizer.step()  # none has one yet
    run(model, optimizer, loss_fn)
    assert torch.equal(idle, torch.ones(3))


@pytest.mark.parametrize("make", [Kron, LRA, DenseNewton])
def test_a_parameter_that_is_frozen_between_steps_of_newton_stays(make):
    model, loss_fn = problem()
    optimizer = make(model.parameters(), lr=0.1, hvp="exact")
    for _ in range(2):
        optimizer.step(loss_fn)
    frozen = model[0].weight.requires_grad_(False).clone()
    for _ in range(2):
        optimizer.step(loss_fn)
    assert torch.equal(model[0].weight, frozen)
    assert model[0].weight.grad is None
    model[0].weight.requires_grad_(True)
    optimizer.step(loss_fn)
    assert not torch.equal(model[0].weight, frozen)


@every_optimizer
def test_a_first_step_with_zero_gradients_changes_nothing(make):
    model, _ = problem()
    optimizer = make(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert same(before, [p.detach() for p in model.parameters()])
    tensors = [x for state in optimizer.state.values() for x in state.values()]
    assert all(torch.isfinite(x).all() for x in tensors)


@every_optimizer
def test_a_compiled_model_is_the_same_model(make):
    model, loss_fn = problem()
    plain = run(model, make(model.parameters()), loss_fn)
    other, _ = problem()
    compiled = torch.compile(other, backend="aot_eager")
    optimizer = make(compiled.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss_fn(compiled).backward()
        optimizer.step()
    for a, b in zip(plain, other.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-3, atol=1e-5)


@every_optimizer
def test_a_grad_scaler_changes_no_number_and_its_overflow_changes_nothing(make):
    model, loss_fn = problem()
    plain = run(model, make(model.parameters()), loss_fn)
    other, _ = problem()
    optimizer, scaler = make(other.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_fn(other)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert same(plain, [p.detach() for p in other.parameters()])
    before = copy.deepcopy((other.state_dict(), optimizer.state_dict()))
    scaler.scale(loss_fn(other)).backward()
    other[0].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert same(before, (other.state_dict(), optimizer.state_dict()))


@pytest.mark.slow
@every_optimizer
def test_a_thousand_zero_gradients_do_not_stop_what_comes_after(make):
    model, loss_fn = problem()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make(model.parameters())
    for _ in range(1000):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert same(before, [p.detach() for p in model.parameters()])
    start = loss_fn().item()
    after = run(model, optimizer, loss_fn, steps=100)
    assert all(bool(p.isfinite().all()) for p in after)
    assert loss_fn().item() < 0.9 * start


@every_optimizer
def test_parameters_may_be_exchanged_before_the_first_step(make):
    """As who shards a model does it."""
    ends = []
    for exchange in (False, True):
        model, loss_fn = problem()
        optimizer = make(copy.deepcopy(model).parameters() if exchange else model.parameters())
        if exchange:
            optimizer.param_groups[0]["params"][:] = model.parameters()
        ends.append(run(model, optimizer, lambda model, loss_fn=loss_fn: loss_fn(model)))
    assert same(*ends)


@every_optimizer
def test_parameters_that_are_exchanged_later_are_an_error(make):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    run(model, optimizer, loss_fn)
    before = copy.deepcopy(optimizer.state_dict())
    old = model[0].weight
    model[0].weight = torch.nn.Parameter(torch.zeros_like(old))
    group = optimizer.param_groups[0]
    known = group["params"]
    group["params"] = [model[0].weight if p is old else p for p in known]
    with pytest.raises(RuntimeError, match="param_groups must hold the parameters"):
        run(model, optimizer, loss_fn, steps=1)
    group["params"] = known
    assert same(before, optimizer.state_dict())


def moved_away_and_back(optimizer):
    for record in optimizer.state.values():
        for name, x in record.items():
            record[name] = x.clone()


@every_optimizer
@pytest.mark.parametrize("when", ["before a step", "before it is saved"])
def test_state_whose_tensors_were_replaced_goes_on(make, when):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    run(model, optimizer, loss_fn)
    other = copy.deepcopy((model, optimizer))
    moved_away_and_back(optimizer)
    if when == "before a step":
        run(model, optimizer, loss_fn, steps=1)
        run(*other, loss_fn, steps=1)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = copy.deepcopy(model)
    loaded = make(resumed.parameters())
    loaded.load_state_dict(saved)
    expected = run(*other, loss_fn)
    assert same(run(model, optimizer, loss_fn), expected)
    assert same(run(resumed, loaded, loss_fn), expected)


@every_optimizer
@pytest.mark.parametrize("how", ["clear", "replace", "delete"])
def test_state_that_was_deleted_begins_anew(make, how):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    run(model, optimizer, loss_fn)
    if how == "clear":
        optimizer.state.clear()
    elif how == "replace":
        optimizer.state = type(optimizer.state)(dict)
    else:
        for p in list(optimizer.state):
            del optimizer.state[p]
    new = copy.deepcopy(model)
    expected = run(new, make(new.parameters()), loss_fn)
    assert same(run(model, optimizer, loss_fn), expected)
    loaded = make(model.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    assert same(run(model, loaded, loss_fn), run(new, optimizer_of(make, optimizer, new), loss_fn))


def optimizer_of(make, optimizer, model):
    """Another with the same state, of another model's parameters."""
    other = make(model.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


@pytest.mark.parametrize("settings", [{}, {"packed_factors": True}, {"geometry": "QUAD4P"}])
def test_of_kron_one_parameter_can_begin_anew(settings):
    models = [problem()[0] for _ in range(2)]
    loss_fn = problem()[1]
    optimizers = [Kron(model.parameters(), 0.01, **settings) for model in models]
    run(models[0], optimizers[0], loss_fn)
    weight = models[0][0].weight
    before = {name: x.clone() for name, x in optimizers[0].state[weight].items()}
    others = copy.deepcopy([r for p, r in optimizers[0].state.items() if p is not weight])
    del optimizers[0].state[weight]
    saved = optimizers[0].state_dict()["state"][0]
    fresh = optimizers[1].state_dict()["state"][0]
    assert saved.keys() == fresh.keys()
    assert all(torch.equal(saved[name], fresh[name]) for name in fresh)
    assert any(not torch.equal(before[name], x) for name, x in optimizers[0].state[weight].items())
    kept = [r for p, r in optimizers[0].state.items() if p is not weight]
    assert all(torch.equal(a[n], b[n]) for a, b in zip(kept, others, strict=True) for n in b)
    assert all(torch.isfinite(p).all() for p in run(models[0], optimizers[0], loss_fn))


@every_optimizer
def test_state_that_is_there_in_part_is_an_error(make):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    before = run(model, optimizer, loss_fn)
    record = optimizer.state[model[0].weight]
    for name in list(record):
        tensor = record.pop(name)
        for wrong in (None, tensor[None]):
            if wrong is not None:
                record[name] = wrong
            with pytest.raises(RuntimeError, match=rf"got others or none for \['{name}'\]"):
                run(model, optimizer, loss_fn, steps=1)
            assert same(before, [p.detach() for p in model.parameters()])
        record[name] = tensor
    run(model, optimizer, loss_fn)


@every_optimizer
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_what_was_done_to_the_state(make, how):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    run(model, optimizer, loss_fn)
    for record in optimizer.state.values():
        for name, x in record.items():
            record[name] = torch.zeros_like(x) if "momentum" in name else x
    copied = how((model, optimizer))
    optimizer.state.clear()
    begun = how((model, optimizer))
    expected = run(*how((model, optimizer)), loss_fn)
    assert same(run(*begun, loss_fn), expected)
    assert same(run(model, optimizer, loss_fn), expected)
    assert not same(run(*copied, loss_fn), expected)


@pytest.mark.parametrize("cached", [None, False, True])
@pytest.mark.parametrize("one", [False, True])
def test_of_kron_what_begins_anew_does_by_the_settings_of_its_group(one, cached):
    model, loss_fn = problem()
    changed = {"preconditioner_init_scale": 4.0, "geometry": "QEQ" if one else "QUAD4P"}
    optimizer = Kron(model.parameters(), 0.01, cache_preconditioner=cached)
    run(model, optimizer, loss_fn)
    weight = model[0].weight
    optimizer.param_groups[0] |= changed
    if one:
        del optimizer.state[weight]
    else:
        optimizer.state.clear()
    fresh = Kron(model.parameters(), 0.01, cache_preconditioner=cached, **changed)
    expected, found = fresh.state_dict()["state"], optimizer.state_dict()["state"]
    for index in [0] if one else expected:
        for name, tensor in expected[index].items():
            assert torch.equal(found[index][name], tensor)
    optimizer.state.clear()
    new = copy.deepcopy(model)
    expected = run(new, Kron(new.parameters(), 0.01, cache_preconditioner=cached, **changed), loss_fn)
    assert same(run(model, optimizer, loss_fn), expected)


@pytest.mark.parametrize("pair", [("Q0.5EQ1.5", "QUAD4P"), ("PRO4P", "QEQ")])
def test_of_kron_factors_of_one_kind_are_not_taken_for_the_other(pair):
    """Before the first step the group's settings are those that count."""
    model, loss_fn = problem()
    optimizer = Kron(model.parameters(), 0.01, geometry=pair[0])
    optimizer.param_groups[0] |= {"geometry": pair[1], "preconditioner_init_scale": 2.0}
    new = copy.deepcopy(model)
    other = Kron(new.parameters(), 0.01, geometry=pair[1], preconditioner_init_scale=2.0)
    before = run(model, optimizer, loss_fn)
    assert same(before, run(new, other, loss_fn))
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[0]["geometry"] = pair[0]
    with pytest.raises(ValueError, match=f"geometry must be one whose factors .* got '{pair[0]}'"):
        run(model, optimizer, loss_fn, steps=1)
    del optimizer.state[model[0].weight]
    with pytest.raises(ValueError, match="geometry must be"):
        run(model, optimizer, loss_fn, steps=1)
    assert same(before, [p.detach() for p in model.parameters()])
    optimizer.param_groups[0]["geometry"] = pair[1]
    found = optimizer.state_dict()["state"]
    assert all(torch.equal(found[1][name], x) for name, x in saved[1].items())
    run(model, optimizer, loss_fn)


def test_of_kron_a_wrong_setting_of_what_begins_anew_changes_nothing():
    model, loss_fn = problem()
    optimizer = Kron(model.parameters(), 0.01)
    before = run(model, optimizer, loss_fn)
    kept = copy.deepcopy(optimizer.state[model[0].bias])
    del optimizer.state[model[0].weight]
    optimizer.param_groups[0]["geometry"] = "QEF"
    with pytest.raises(ValueError, match="geometry"):
        run(model, optimizer, loss_fn, steps=1)
    assert same(before, [p.detach() for p in model.parameters()])
    assert all(torch.equal(optimizer.state[model[0].bias][name], x) for name, x in kept.items())
    assert model[0].weight not in optimizer.state


def test_of_kron_a_group_can_begin_anew():
    model, loss_fn = problem()
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    optimizer = Kron(groups, 0.01)
    run(model, optimizer, loss_fn)
    for p in model[2].parameters():
        del optimizer.state[p]
    run(model, optimizer, loss_fn, steps=1)
    assert [group["steps"] for group in optimizer.param_groups] == [5, 1]


@every_optimizer
@pytest.mark.parametrize("how", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}])
def test_a_state_is_resumed_by_torch(make, how):
    options = StateDictOptions(strict=False, **how)  # of one vector only the first parameter has state
    (model, loss_fn), (other, _) = problem(), problem()
    optimizer, resumed = make(model.parameters()), make(other.parameters())
    run(model, optimizer, loss_fn)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved, options=options)
    assert same(run(model, optimizer, loss_fn), run(other, resumed, loss_fn))


PACKED = {"Kron packed": lambda params: Kron(params, geometry="EQ", packed_factors=True)}


@pytest.mark.parametrize("make", (OPTIMIZERS | PACKED).values(), ids=OPTIMIZERS | PACKED)
def test_hooks_on_a_state_get_it_as_it_is_returned(make):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    run(model, optimizer, loss_fn, steps=2)
    plain, seen = optimizer.state_dict(), []

    def doubled(_, state):
        seen.append(state)
        own = {i: {n: 2 * x for n, x in record.items()} for i, record in state["state"].items()}
        return {**state, "state": own}

    optimizer.register_state_dict_post_hook(doubled)
    found = optimizer.state_dict()
    assert same(seen, [plain])
    assert same(found, doubled(None, plain))


@every_optimizer
def test_numpy_numbers_are_saved_as_pythons(make, tmp_path):
    model, loss_fn = problem()
    optimizer = make(model.parameters(), lr=np.float64(0.01), weight_decay=np.float32(0.5))
    run(model, optimizer, loss_fn)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    assert type(loaded["param_groups"][0]["lr"]) is float
    assert loaded["param_groups"][0]["weight_decay"] == 0.5


@every_optimizer
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.array])
def test_numpy_numbers_are_taken_as_pythons_are(make, kind):
    numbers = {"lr": 2**-7, "b1": 0.5, "weight_decay": 0.5}
    numbers |= {"betaL": 0.5, "damping": 0.25, "preconditioner_init_scale": 2.0}
    ends = []
    for given in (numbers, {name: kind(number) for name, number in numbers.items()}):
        model, loss_fn = problem()
        ends.append(run(model, make(model.parameters(), **given), loss_fn))
    assert same(*ends)
