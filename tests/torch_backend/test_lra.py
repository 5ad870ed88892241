"""`suite.torch.LRA` and `DenseNewton` as torch optimizers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from conftest import same
from suite.torch import LRA, DenseNewton

DOORS = {
    "LRA": lambda params, **kw: LRA(params, lr=0.01, rank=3, **kw),
    "diagonal": lambda params, **kw: LRA(params, lr=0.01, rank=0, **kw),
    "LRA newton": lambda params, **kw: LRA(params, lr=0.05, rank=3, hvp="exact", **kw),
    "dense": lambda params, **kw: DenseNewton(params, lr=0.02, hvp=None, clip=1.1, **kw),
    "dense newton": lambda params, **kw: DenseNewton(params, lr=0.1, **kw),
}
every_door = pytest.mark.parametrize("make", DOORS.values(), ids=DOORS)


def problem():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    x, y = torch.randn(32, 4).double(), torch.randn(32, 2).double()
    return model, lambda: torch.nn.functional.mse_loss(model(x), y)


def step(optimizer, loss_fn):
    if optimizer.param_groups[0]["hvp"] is not None:
        return optimizer.step(loss_fn)
    optimizer.zero_grad()
    loss = loss_fn()
    loss.backward()
    optimizer.step()
    return loss


@every_door
def test_it_learns(make):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    first = loss_fn().item()
    for _ in range(200):
        step(optimizer, loss_fn)
    assert loss_fn().item() < 0.75 * first  # least squares of noise: 0.6 is about the best


def run_on(model, optimizer, loss_fn, steps):
    for _ in range(steps):
        step(optimizer, loss_fn)
    return [p.detach().clone() for p in model.parameters()]


@every_door
def test_resume_from_a_state_dict_or_a_pickle_is_the_uninterrupted_run(make, tmp_path):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    run_on(model, optimizer, loss_fn, 5)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    torch.save(saved, tmp_path / "state.pt")
    pickled = pickle.dumps((model, optimizer))
    expected = run_on(model, optimizer, loss_fn, 5)

    other, other_loss = problem()
    fresh = make(other.parameters())
    other.load_state_dict(weights)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(expected, run_on(other, fresh, other_loss, 5))
    thawed, again = pickle.loads(pickled)
    torch.manual_seed(0)
    _, x_loss = problem()
    del x_loss
    assert again.param_groups[0]["steps"] == 5
    assert same(saved["state"], again.state_dict()["state"])
    assert thawed[0].weight is again.param_groups[0]["params"][0]


@every_door
def test_a_step_that_is_not_finite_changes_nothing(make):
    model, loss_fn = problem()
    optimizer = make(model.parameters(), weight_decay=0.1)
    run_on(model, optimizer, loss_fn, 3)
    weights, before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.warns(RuntimeWarning, match=r"a step was skipped.*\(1 skipped so far\)"):
        step(optimizer, lambda: loss_fn() * float("nan"))
    assert same(weights, model.state_dict())
    assert optimizer.skipped_steps == 1
    after = optimizer.state_dict()
    before["state"][0]["skipped_steps"] += 1
    assert same(before, after)


def test_newton_of_a_quadratic_reaches_the_minimum():
    """H has condition 1e4; gradient descent at its best rate needs 10,000 steps for a factor of e."""
    H = torch.diag(torch.logspace(2, -2, 8)).double()
    for make in (
        lambda p: DenseNewton(p, lr=0.5, preconditioner_lr=lambda t: 0.5 / (1 + t / 300)),
        lambda p: LRA(p, lr=0.5, rank=0, hvp="exact", b1=0.0, clip=None, preconditioner_lr=0.3),
    ):
        x = torch.ones(8, dtype=torch.float64, requires_grad=True)
        optimizer = make([x])
        for _ in range(1500):
            optimizer.step(lambda x=x: 0.5 * x @ H @ x)
        assert float(0.5 * x.detach() @ H @ x.detach()) < 1e-6  # from 78


def test_finite_differences_agree_with_the_second_derivative():
    results = []
    for hvp in ("exact", "finite_difference"):
        model, loss_fn = problem()
        optimizer = LRA(model.parameters(), lr=0.01, rank=2, hvp=hvp)

        def closure(optimizer=optimizer, loss_fn=loss_fn):
            optimizer.zero_grad()
            loss = loss_fn()
            loss.backward()
            return loss

        for _ in range(10):
            optimizer.step(loss_fn if hvp == "exact" else closure)
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)  # √eps is 1.5e-8


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rank": -1}, ValueError, "rank must be >= 0"),
        ({"lr": -1.0}, ValueError, "lr must be >= 0"),
        ({"hvp": "approximate"}, ValueError, "hvp must be one of"),
        ({"clip": 0.0}, ValueError, "clip must be > 0"),
        ({"clip": (1.0,)}, ValueError, "clip must be a number or"),
        ({"whiten": "g"}, ValueError, "whiten must be one of"),
        ({"preconditioner_lr": 1.0}, ValueError, "preconditioner_lr must be > 0"),
        ({"damping": torch.tensor(-1.0)}, TypeError, "damping must be a number, got a tensor"),
        ({"lr": lambda step: 0.1}, TypeError, "lr must be a number"),
    ],
)
def test_bad_settings_are_errors(settings, error, message):
    with pytest.raises(error, match=message):
        LRA(torch.nn.Linear(2, 2).parameters(), **settings)
    with pytest.raises(error, match=message):
        LRA([{"params": torch.nn.Linear(2, 2).parameters(), **settings}])


@every_door
@pytest.mark.parametrize("key", ["betas", "precond_lr", "preconditioner_init_scal"])
def test_a_group_with_settings_of_others_is_an_error(make, key):
    with pytest.raises(TypeError, match=f"unknown settings in a parameter group: .'{key}'"):
        make([{"params": torch.nn.Linear(2, 2).parameters(), key: 0.5}])


@every_door
@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1.0), ("b1", 1.0), ("damping", -1.0), ("maximize", 1), ("rank", 4), ("geometry", "EQ"),
     ("seed", 7)],
)  # fmt: skip
def test_a_setting_that_went_bad_is_an_error_before_anything_changes(make, name, value):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    if name not in optimizer.param_groups[0]:
        return
    step(optimizer, loss_fn)
    before = [p.detach().clone() for p in model.parameters()]
    steps, optimizer.param_groups[0][name] = optimizer.param_groups[0]["steps"], value
    with pytest.raises((ValueError, TypeError), match=name):
        step(optimizer, loss_fn)
    assert optimizer.param_groups[0]["steps"] == steps
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (LRA, {"betaL": 0.3, "damping": 1e-3, "preconditioner_init_scale": 2.0}),
        (DenseNewton, {"geometry": "EQ", "betaL": 0.3, "hvp": None}),
    ],
)
def test_a_checkpoint_brings_its_rule_along(kind, settings):
    models, losses = zip(*(problem() for _ in range(2)), strict=True)
    hvp = {name: settings[name] for name in ("hvp",) if name in settings}  # the training loop's
    one, other = kind(models[0].parameters(), **settings), kind(models[1].parameters(), **hvp)
    for _ in range(3):
        step(one, losses[0])
    models[1].load_state_dict(models[0].state_dict())
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        step(one, losses[0])
        step(other, losses[1])
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile breaks graphs at named tuples")
@pytest.mark.parametrize("kind", [LRA, DenseNewton])
def test_a_compiled_step_is_the_eager_step(kind):
    torch._dynamo.reset()
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        vector = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))
        optimizer = kind([vector], lr=0.02, preconditioner_lr=0.1, b1=0.5, hvp=None)
        take = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for _ in range(3):
            vector.grad = torch.randn(3, dtype=torch.float64)
            take()
        ends.append([vector.detach().clone(), *optimizer.state[vector].values()])
    for eager, other in zip(*ends, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(LRA, {"rank": 3, "seed": 7}), (DenseNewton, {"geometry": "QUAD4P", "seed": 7, "hvp": None})],
)
def test_before_the_first_step_the_settings_in_the_group_count(kind, settings):
    models, losses = zip(*(problem() for _ in range(2)), strict=True)
    changed, made = kind(models[0].parameters()), kind(models[1].parameters(), **settings)
    changed.param_groups[0] |= settings
    for optimizer, loss_fn in zip((changed, made), losses, strict=True):
        for _ in range(3):
            step(optimizer, loss_fn)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("kind", [LRA, DenseNewton])
def test_a_checkpoint_leaves_how_products_are_made(kind):
    models, losses = zip(*(problem() for _ in range(2)), strict=True)
    saved = kind(models[0].parameters(), hvp=None)
    step(saved, losses[0])
    newton = kind(models[1].parameters(), hvp="exact")
    newton.load_state_dict(saved.state_dict())
    before = losses[1]().item()
    assert newton.step(losses[1]).item() == before
    assert losses[1]().item() != before
    with pytest.raises(ValueError, match="seed must be 0, as saved, got 7"):
        kind(models[1].parameters(), seed=7).load_state_dict(saved.state_dict())


@every_door
def test_a_schedule_may_end_the_updates(make):
    model, loss_fn = problem()
    ends = {"preconditioner_update_probability": lambda step: 1.0 if step <= 3 else 0.0}
    optimizer = make(model.parameters(), **ends)
    before = loss_fn().item()
    counts = []
    for _ in range(10):
        step(optimizer, loss_fn)
        counts.append(optimizer.param_groups[0]["updates"])
    assert counts[:3] == [1, 2, 3]
    assert len(set(counts[4:])) == 1
    assert loss_fn().item() < before


def test_refusals():
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="one group"):
        LRA([{"params": [layer.weight]}, {"params": [layer.bias]}])
    with pytest.raises(ValueError, match="at least one number"):
        LRA([torch.nn.Parameter(torch.zeros(0, 3))])
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="gradients must be dense"):
        LRA(table.parameters()).step()
    with pytest.raises(ValueError, match="complex"):
        LRA([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])
    with pytest.raises(ValueError, match="one dtype"):
        LRA([layer.weight, torch.zeros(2, dtype=torch.float64, requires_grad=True)])
    with pytest.raises(RuntimeError, match="needs a closure"):
        DenseNewton(layer.parameters()).step()
    with pytest.raises(RuntimeError, match="must return the loss"):
        DenseNewton(layer.parameters()).step(lambda: 1.0)


@every_door
def test_loading_calls_hooks_and_copies_a_tensor_learning_rate(make):
    (_, _), (model, _) = problem(), problem()
    one, other = make(model.parameters()), make(model.parameters())
    one.param_groups[0]["lr"] = torch.tensor(0.1)
    seen = []
    other.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append("before"))
    other.register_load_state_dict_post_hook(lambda optimizer: seen.append("after"))
    other.load_state_dict(one.state_dict())
    one.param_groups[0]["lr"].fill_(0.5)
    assert seen == ["before", "after"]
    assert float(other.param_groups[0]["lr"]) == pytest.approx(0.1)


@every_door
def test_other_parameters_after_the_first_step_are_an_error(make):
    model, loss_fn = problem()
    optimizer = make(model.parameters())
    step(optimizer, loss_fn)
    group = optimizer.param_groups[0]
    first, second, *rest = group["params"]
    for others in ([first, torch.nn.Parameter(second.detach().clone()), *rest], [first, *rest, second]):
        group["params"] = others
        for act in (lambda: step(optimizer, loss_fn), optimizer.state_dict):
            with pytest.raises(RuntimeError, match="must hold the parameters that the state is of"):
                act()
