"""Settings of `suite.torch.Kron` against something simpler."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from conftest import same
from suite.torch import Kron, precond_lr_schedule


def problem():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    x, y = torch.randn(64, 6).double(), torch.randn(64, 3).double()
    return model, lambda: torch.nn.functional.mse_loss(model(x), y)


def backward_closure(optimizer, loss_fn):
    def closure():
        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        return loss

    return closure


def single(gradient, **settings):
    """The direction of a first step."""
    p = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = Kron([p], lr=1.0, **settings)
    p.grad = gradient
    optimizer.step()
    return -p.detach()


def test_preconditioner_lr_is_a_function_of_the_count_of_updates():
    calls = []

    def schedule(updates):
        calls.append(updates)
        return 0.1

    p = torch.nn.Parameter(torch.ones(3, 3))
    settings = {"preconditioner_update_probability": 0.5, "preconditioner_lr": schedule}
    optimizer = Kron([p], **settings)
    for _ in range(6):
        p.grad = torch.ones(3, 3)
        optimizer.step()
    assert calls == [0, 1, 1, 2, 2, 3]  # due in steps 1, 3, 5
    assert optimizer.param_groups[0]["updates"] == 3
    p.grad = torch.full((3, 3), torch.nan)
    with pytest.warns(RuntimeWarning, match="a step was skipped"):
        optimizer.step()
    assert optimizer.param_groups[0]["updates"] == 3
    assert Kron([p]).param_groups[0]["preconditioner_lr"] == precond_lr_schedule()


def test_clip_bounds_mean_and_entries():
    g = 1e3 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    start = {"update_first": False}  # the start is the identity
    torch.testing.assert_close(single(g, clip=None, **start), g)
    assert single(g, clip=0.5, **start).square().mean().sqrt() <= 0.5 + 1e-6
    both = single(g, clip=(0.5, 0.7), **start)
    assert both.abs().max() <= 0.7
    assert single(g, clip=(None, 0.7), **start).abs().min() > 0.69


def test_normalized_gradients_know_no_scale():
    g = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = single(g, normalize_grads=True)
    torch.testing.assert_close(single(1e6 * g, normalize_grads=True), expected)
    plain = single(g / g.norm())
    torch.testing.assert_close(expected, plain)


def test_max_skew_makes_long_sides_diagonal():
    p = torch.nn.Parameter(torch.ones(100, 4))
    assert Kron([p], max_skew=1.0).routing()["0.0"].factors == "diag 100, 4x4"
    assert Kron([p], max_skew=30.0).routing()["0.0"].factors == "100x100, 4x4"


@pytest.mark.parametrize("geometry", ["Q0.5EQ1.5", "EQ", "QEP", "PRO4P"])
def test_newton_of_a_quadratic_knows_the_curvature(geometry):
    """Kronecker curvature of condition 100 x 100: descent would need thousands of steps."""
    A, B = torch.logspace(1, -1, 5).double(), torch.logspace(-1, 1, 4).double()
    p = torch.nn.Parameter(torch.ones(5, 4, dtype=torch.float64))
    optimizer = Kron(
        [p], lr=0.5, b1=0.0, hvp="exact", geometry=geometry, clip=None, preconditioner_init_scale=None
    )
    for _ in range(400):
        optimizer.step(lambda: 0.5 * torch.sum(A[:, None] * B * p**2))
    assert float(0.5 * torch.sum(A[:, None] * B * p.detach() ** 2)) < 1e-5  # from 130


def test_finite_differences_agree_with_the_second_derivative_and_restore_parameters():
    results = []
    for hvp in ("exact", "finite_difference"):
        model, loss_fn = problem()
        optimizer = Kron(model.parameters(), lr=0.01, hvp=hvp, preconditioner_lr=0.1)
        closure = loss_fn if hvp == "exact" else backward_closure(optimizer, loss_fn)
        for _ in range(10):
            optimizer.step(closure)
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        model, loss_fn = problem()
        still = Kron(model.parameters(), lr=0.0, hvp=hvp)
        before = copy.deepcopy(model.state_dict())
        still.step(loss_fn if hvp == "exact" else backward_closure(still, loss_fn))
        assert same(before, model.state_dict())
        assert all(p.grad is not None for p in model.parameters())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)  # √eps is 1.5e-8


def test_newton_calls_the_closure_once_and_twice():
    for hvp, due, plain in (("exact", 1, 1), ("finite_difference", 2, 1)):
        model, loss_fn = problem()
        calls = []

        def counted(loss_fn=loss_fn, calls=calls):
            calls.append(1)
            return loss_fn()

        optimizer = Kron(model.parameters(), hvp=hvp, preconditioner_update_probability=0.5)
        closure = counted if hvp == "exact" else backward_closure(optimizer, counted)
        for expected in (due, due + plain):
            loss = optimizer.step(closure)
            assert len(calls) == expected
        assert loss.item() > 0


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
def test_newton_with_a_loss_that_is_not_finite_changes_nothing(hvp):
    model, loss_fn = problem()
    optimizer = Kron(model.parameters(), lr=0.1, hvp=hvp)

    def broken():
        return loss_fn() * torch.nan

    before = copy.deepcopy(model.state_dict())
    with pytest.warns(RuntimeWarning, match="a step was skipped"):
        optimizer.step(broken if hvp == "exact" else backward_closure(optimizer, broken))
    assert same(before, model.state_dict())
    assert optimizer.skipped_steps == 1


def test_newton_leaves_unused_frozen_and_linear_parameters_in_peace():
    model, loss_fn = problem()
    unused, linear = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    optimizer = Kron([*model.parameters(), unused, linear, frozen], lr=0.1, hvp="exact")
    for _ in range(3):
        optimizer.step(lambda: loss_fn() + linear.sum())
    assert torch.equal(frozen, torch.ones(3, dtype=torch.float64))
    assert torch.equal(unused, torch.ones(2, dtype=torch.float64))
    assert torch.isfinite(linear).all()
    assert not torch.equal(linear, torch.ones(2, dtype=torch.float64))


def test_newton_survives_a_pickle():
    model, loss_fn = problem()
    optimizer = Kron(model.parameters(), hvp="exact")
    optimizer.step(loss_fn)
    assert pickle.loads(pickle.dumps(optimizer)).hvp == "exact"
    assert copy.deepcopy(optimizer).hvp == "exact"


def test_newton_needs_the_right_closure():
    model, loss_fn = problem()
    with pytest.raises(RuntimeError, match="step needs a closure with hvp='exact'"):
        Kron(model.parameters(), hvp="exact").step()
    with pytest.raises(RuntimeError, match="must return the loss"):
        Kron(model.parameters(), hvp="exact").step(lambda: loss_fn().item())
    with pytest.warns(RuntimeWarning, match="must call backward"):
        Kron(model.parameters(), hvp="finite_difference").step(loss_fn)


def test_stochastic_rounding_keeps_what_nearest_loses():
    """Steps of a fiftieth of a unit in the last place: lost by rounding to nearest, kept on average."""

    def average(**settings):
        p = torch.nn.Parameter(torch.zeros(64, 64))
        rare = {"preconditioner_update_probability": 1e-3, "b1": 0.98}
        optimizer = Kron([p], 0.0, mu_dtype=torch.bfloat16, **rare, **settings)
        state = optimizer.state[p]
        state["tile0.momentum"].fill_(1.0)
        for _ in range(30):
            p.grad = torch.full((64, 64), 1 + 2.0**-7)
            optimizer.step()
        return state["tile0.momentum"].double().mean().item()

    exact = 1 + 2**-7 * (1 - 0.98**30)
    assert abs(average(stochastic_rounding=True) - exact) < 2e-4
    assert abs(average() - exact) > 2e-3


@pytest.mark.parametrize("stochastic_rounding", [False, True])
def test_resume_in_half_precision_is_the_uninterrupted_run(stochastic_rounding):
    half = {"mu_dtype": torch.bfloat16, "precond_dtype": torch.bfloat16}
    settings = {"lr": 0.01, "stochastic_rounding": stochastic_rounding, **half}

    def steps(model, optimizer, loss_fn, count):
        for _ in range(count):
            optimizer.step(backward_closure(optimizer, loss_fn))
        return [p.detach().clone() for p in model.parameters()]

    model, loss_fn = problem()
    optimizer = Kron(model.parameters(), **settings)
    steps(model, optimizer, loss_fn, 3)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = steps(model, optimizer, loss_fn, 3)
    other, other_loss = problem()
    other.load_state_dict(weights)
    fresh = Kron(other.parameters(), **settings)
    fresh.load_state_dict(saved)
    assert same(expected, steps(other, fresh, other_loss, 3))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"whiten": "g"}, ValueError, "whiten must be one of"),
        ({"clip": -1.0}, ValueError, "clip must be > 0"),
        ({"clip": (1.0, 2.0, 3.0)}, ValueError, "clip must be a number or"),
        ({"update_first": 1}, TypeError, "update_first must be True or False"),
        ({"max_skew": 0.0}, ValueError, "max_skew must be > 0"),
        ({"max_skew": torch.tensor(-1.0)}, TypeError, "max_skew must be a number, got a tensor"),
        ({"hvp": "guess"}, ValueError, "hvp must be one of"),
        ({"normalize_grads": None}, TypeError, "normalize_grads must be True or False"),
    ],
)
def test_bad_settings_are_errors(settings, error, message):
    with pytest.raises(error, match=message):
        Kron([torch.nn.Parameter(torch.ones(2))], **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "storage", [{}, {"geometry": "EQ", "packed_factors": True, "cache_preconditioner": False}]
)
def test_a_compiled_step_is_the_eager_step_and_compiles_no_more_after_warm_up(storage):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model, loss_fn = problem()
        settings = {"lr": 0.01, "preconditioner_update_probability": 0.4, **storage}
        optimizer = Kron(model.parameters(), **settings)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        torch._dynamo.utils.counters.clear()
        graphs = []
        for number in range(16):
            optimizer.param_groups[0]["lr"] = 0.01 * 0.9**number
            optimizer.zero_grad()
            loss_fn().backward()
            step()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        results.append([p.detach().clone() for p in model.parameters()])
    assert graphs[-1] == graphs[8] > 0
    # With and without an update, and once more for numbers that turned out to change; the arithmetic of
    # a step is one graph: there is nothing to gain from many small ones.
    assert graphs[-1] <= 6
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated")  # inductor's own
def test_a_step_compiled_to_machine_code_draws_the_noise_of_an_eager_one():
    # Whose hash overflows, which in C++ lets a compiler take it for whatever it likes.
    torch._dynamo.reset()
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        vectors = [torch.nn.Parameter(torch.randn(8, dtype=torch.float64)) for _ in range(2)]
        optimizer = Kron(vectors, lr=0.02, geometry="EQ")  # in which noise is half of the evidence
        for vector in vectors:
            vector.grad = torch.randn(8, dtype=torch.float64)
        (torch.compile(optimizer.step) if compiled else optimizer.step)()
        ends.append([vector.detach().clone() for vector in vectors])
    for eager, other in zip(*ends, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-12, atol=0)


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile breaks graphs at named tuples")
def test_a_compiled_step_of_many_groups_is_one_graph_for_all_of_them():
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(4, 3 + i % 2, dtype=torch.float64)) for i in range(10)]
        optimizer = Kron([{"params": [w], "lr": 0.01 * (1 + i)} for i, w in enumerate(weights)])
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        torch._dynamo.utils.counters.clear()
        for number in range(6):
            for w in weights:
                w.grad = w.detach() * (1 + number % 2)
            step()
        results.append([w.detach().clone() for w in weights])
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", ["cleared", "replaced", "exchanged"])
def test_a_compiled_step_follows_what_is_done_to_state_and_groups(what):
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 5).double()  # compiled anew, it takes seconds a shape
        x = torch.randn(8, 4, dtype=torch.float64)
        first = torch.nn.Linear(3, 3) if what == "exchanged" else model
        optimizer = Kron(first.parameters(), lr=0.01)
        if what == "exchanged":
            optimizer.param_groups[0]["params"] = list(model.parameters())
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for number in range(6):
            if number == 3 and what == "cleared":
                optimizer.state.clear()
            if number == 3 and what == "replaced":
                for record in optimizer.state.values():
                    record |= {name: tensor.clone() for name, tensor in record.items()}
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
            assert optimizer.param_groups[0]["steps"] == (
                number - 2 if what == "cleared" and number > 2 else number + 1
            )
        ends.append([p.detach() for p in model.parameters()])
        assert optimizer.skipped_steps == 0
    for found, expected in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "other", [torch.optim.AdamW, lambda params: torch.optim.SGD(params, momentum=0.9)]
)
def test_another_optimizers_state_is_refused_as_that(other):
    def stepped(make):
        parameter = torch.nn.Parameter(torch.ones(3, 2))
        optimizer = make([parameter])
        parameter.grad = torch.ones(3, 2)
        optimizer.step()
        return optimizer

    kron, state = stepped(Kron), stepped(other).state_dict()
    before = copy.deepcopy(kron.state_dict())
    settings = kron.state_dict()["param_groups"]
    with pytest.raises(
        ValueError, match=r"state of parameter 0 must be Kron's, got another optimizer's: \["
    ):
        kron.load_state_dict({"state": state["state"], "param_groups": settings})
    for name, value in kron.state_dict()["state"][0].items():
        assert torch.equal(value, before["state"][0][name])


def test_a_closure_that_returns_more_than_the_loss_is_named():
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    kron = Kron([parameter], hvp="exact")
    with pytest.raises(RuntimeError, match=r"must return the loss, a tensor .* got list"):
        kron.step(lambda: [parameter.square().sum(), 1.0])
