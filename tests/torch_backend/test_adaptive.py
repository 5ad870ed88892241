"""`AdaptiveKFAC`: the step against dense Gauss-Newton matrices, and its manners in a training loop."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import assert_close, same
from suite.core.likelihoods import Gaussian
from suite.torch import KFAC, AdaptiveKFAC


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(count=40, seed=1):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=draws).double()
    return x, (x[:, :3] + 0.5 * x[:, 3:]).argmax(1)


def closure_of(model, x, y):
    def closure():
        outputs = model(x)
        return F.cross_entropy(outputs, y), outputs

    return closure


def optimizer_of(model, **settings):
    return AdaptiveKFAC(KFAC(model, **{"damping": 0.1, "compute_method": "inverse", **settings}))


def flat(model):
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def dense_gauss_newton(model, x):
    """Of the mean cross-entropy, from explicit Jacobians and the Hessian diag(p) - p pᵀ."""
    parameters = dict(model.named_parameters())

    def outputs(values):
        return torch.func.functional_call(model, values, (x,))

    with torch.no_grad():
        logits = model(x).numpy()
    jacobians = torch.func.jacrev(outputs)({n: p.detach() for n, p in parameters.items()})
    J = np.concatenate([j.detach().numpy().reshape(*logits.shape, -1) for j in jacobians.values()], -1)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    H = np.einsum("nc,cd->ncd", p, np.eye(p.shape[1])) - np.einsum("nc,nd->ncd", p, p)
    return np.einsum("nci,ncd,ndj->ij", J, H, J) / len(p)


def gradient_and_direction(kfac, loss, damping):
    """Flat, by a K-FAC of its own."""
    loss.backward()
    gradient = np.concatenate([p.grad.numpy().ravel() for p in kfac.model.parameters()])
    kfac.set_hyperparameter("damping", damping)
    kfac.step()
    return gradient, np.concatenate([p.grad.numpy().ravel() for p in kfac.model.parameters()])


def change_of_damping(ratio):
    return 0.85 if ratio > 0.25 else 1 / 0.85 if ratio < 0 else 1


def test_every_step_is_the_minimum_of_the_dense_quadratic_model():
    """The direction by another KFAC; the rest by explicit matrices and the rule in words."""
    model, damping, delta, predicted, before = network(), 0.1, None, None, None
    optimizer = optimizer_of(model, inv_update_steps=3)
    other, plain = network(), network()
    kfac = KFAC(other, damping=0.1, compute_method="inverse", inv_update_steps=3)
    momenta = []
    for number in range(8):
        x, y = data(seed=number)
        start = flat(model)
        if delta is not None:
            with torch.no_grad():
                nn.utils.vector_to_parameters(torch.from_numpy(start - delta), plain.parameters())
                before = F.cross_entropy(plain(x), y).item()
        plain.load_state_dict(model.state_dict())
        other.load_state_dict(model.state_dict())
        kfac.zero_grad()
        loss = F.cross_entropy(other(x), y)
        if delta is not None:
            ratio = (loss.item() - before) / predicted
            damping *= change_of_damping(ratio)
        gradient, direction = gradient_and_direction(kfac, loss, damping)
        basis = direction[:, None] if delta is None else np.stack([direction, delta], 1)
        F_ = dense_gauss_newton(plain, x) + damping * np.eye(len(start))
        M, b = basis.T @ F_ @ basis, basis.T @ gradient
        c = -np.linalg.solve(M, b)
        returned = optimizer.step(closure_of(model, x, y))
        delta, predicted = basis @ c, b @ c / 2
        assert_close(returned.item(), loss.item())
        assert_close(flat(model) - start, delta, rtol=1e-6)
        assert_close(optimizer.damping, damping)
        momenta.append(optimizer.metrics()["momentum"])
    assert momenta[0] == 0
    assert all(m != 0 for m in momenta[1:])


@pytest.mark.parametrize("kl_clip", [1e-5, 1e-3, None])
def test_the_learning_rate_of_an_exact_newton_step_is_one_whatever_clips(kl_clip):
    torch.manual_seed(0)
    model, x, y = nn.Linear(7, 3).double(), torch.randn(50, 7).double(), torch.randn(50, 3).double()
    exact = {"fisher": "type-2", "likelihood": Gaussian(0.5), "kl_clip": kl_clip}
    optimizer = AdaptiveKFAC(KFAC(model, damping=1e-9, **exact))

    def closure():
        residuals = model(x) - y
        return residuals.square().sum(1).mean(), residuals

    optimizer.step(closure)
    assert_close(optimizer.metrics()["learning_rate"], 1.0, rtol=1e-6)


@pytest.mark.parametrize("kind", ["squares", "residuals in parts"])
def test_least_squares_is_solved_by_its_exact_curvature(kind):
    torch.manual_seed(0)
    model = nn.Linear(5, 2).double()
    x, y = torch.randn(30, 5).double() * torch.logspace(-1, 1, 5), torch.randn(30, 2).double()
    optimizer = AdaptiveKFAC(KFAC(model, damping=1e-4, inv_update_steps=5))

    def closure():
        residuals = model(x) - y
        if kind == "squares":
            return residuals.square().sum(1).mean() / 2, residuals
        a, b = residuals[:10], residuals[10:]
        return (a.square().sum() + b.square().sum()) / 60, (a, b)

    for _ in range(30):
        optimizer.step(closure)
    X = np.concatenate([x.numpy(), np.ones((30, 1))], 1)
    best = np.linalg.lstsq(X, y.numpy(), rcond=None)[1].sum() / 60
    assert closure()[0].item() < best * (1 + 1e-6)


@pytest.mark.filterwarnings("ignore:statistics miss some uses:RuntimeWarning")  # of w, by hand
def test_it_learns_a_poisson_problem_without_tuning():
    """-u'' = π² sin(πx) on [0, 1]: mean squared error of u below 1e-6 in 60 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = torch.linspace(0, 1, 41, dtype=torch.float64)[:, None]
    optimizer = optimizer_of(model, inv_update_steps=5)

    def closure():
        layer, head = model[0], model[2]
        a = torch.tanh(layer(torch.cat([x, x[:1], x[-1:]])))
        w = layer.weight[:, 0]
        u, second = head(a), ((-2 * a * (1 - a**2)) * w**2)[:41] @ head.weight[0]
        residuals = torch.cat([second / np.pi**2 + torch.sin(np.pi * x[:, 0]), u[41:, 0] * 41**0.5])
        return residuals.square().sum() / 41, residuals

    for _ in range(60):
        optimizer.step(closure)
    with torch.no_grad():
        assert (model(x) - torch.sin(np.pi * x)).square().mean() < 1e-6


def test_a_closure_may_take_derivatives_by_autograd():
    """Of a network by its inputs: steps are those of dense Jacobians, statistics of one pass alone."""

    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    model, other, damping, delta, predicted, before = made(), made(), 1.0, None, None, None
    points = torch.linspace(0, 1, 21, dtype=torch.float64)[:, None]
    target = torch.sin(np.pi * points[:, 0])

    def closure_of(model):
        def closure():
            x = points.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
            residuals = torch.cat([bend[:, 0] / np.pi**2 + target, model(points[[0, -1]])[:, 0]])
            return residuals.square().sum() / 21, residuals

        return closure

    def residuals(w, b, v, c):
        """The same by hand: u'' = Σ v w² tanh''(w x + b)."""
        a = torch.tanh(points @ w.T + b)
        inside = (-2 * a * (1 - a**2) * w[:, 0] ** 2) @ v[0] / np.pi**2 + target
        return torch.cat([inside, a[[0, -1]] @ v[0] + c])

    settings = {"compute_method": "inverse", "inv_update_steps": 2, "factor_update_steps": 2}
    optimizer, kfac = AdaptiveKFAC(KFAC(model, damping=1.0, **settings)), KFAC(other, **settings)
    for _ in range(7):
        start = flat(model)
        other.load_state_dict(model.state_dict())
        kfac.zero_grad()
        loss, _ = closure_of(other)()
        if delta is not None:
            ratio = (loss.item() - before) / predicted
            damping *= change_of_damping(ratio)
        gradient, direction = gradient_and_direction(kfac, loss, damping)
        basis = direction[:, None] if delta is None else np.stack([direction, delta], 1)
        values = [p.detach() for p in model.parameters()]
        J = torch.cat([j.flatten(1) for j in torch.func.jacrev(residuals, (0, 1, 2, 3))(*values)], 1)
        J = J.numpy()
        F_ = 2 * J.T @ J / 21 + damping * np.eye(len(start))
        c = -np.linalg.solve(basis.T @ F_ @ basis, basis.T @ gradient)
        returned = optimizer.step(closure_of(model))
        delta, predicted, before = basis @ c, basis.T @ gradient @ c / 2, loss.item()
        assert_close(returned.item(), loss.item())
        assert_close(flat(model) - start, delta, rtol=1e-6)
        assert_close(optimizer.damping, damping)
        assert same(optimizer.kfac.state_dict(), kfac.state_dict())
    assert optimizer.skipped_steps == optimizer.rejected_steps == 0


class Noisy(nn.Module):
    """Batch normalization and dropout, whose traces and random numbers are counted."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def test_a_step_leaves_one_forward_pass_s_traces_and_random_numbers():
    model, plain = Noisy(), Noisy()
    optimizer = optimizer_of(model)
    for number in range(3):
        x, y = data(seed=number)
        plain.load_state_dict(model.state_dict())
        torch.manual_seed(number)
        plain(x.float())
        expected = torch.rand(3)
        torch.manual_seed(number)
        optimizer.step(closure_of(model, x.float(), y))
        assert same(torch.rand(3), expected)
        assert same(list(model.buffers()), list(plain.buffers()))
    assert int(model.norm.num_batches_tracked) == 3


def test_a_step_beyond_what_the_loss_can_bear_is_taken_back():
    model = network()
    x, y = data()
    optimizer, start, bound = optimizer_of(model), flat(model), 0.5

    def closure():
        outputs = model(x)
        far = torch.stack(
            [p.sub(s).square().sum() for p, s in zip(model.parameters(), first, strict=True)]
        ).sum()
        return F.cross_entropy(outputs, y) * torch.where(far > bound**2, float("inf"), 1.0), outputs

    first = [p.detach().clone() for p in model.parameters()]
    optimizer.step(closure)
    assert np.linalg.norm(flat(model) - start) > bound
    optimizer.step(closure)
    assert np.array_equal(flat(model), start)
    assert optimizer.rejected_steps == 1
    assert_close(optimizer.damping, 0.4)
    for _ in range(15):
        optimizer.step(closure)
    assert closure()[0] < F.cross_entropy(network()(x), y)  # smaller steps, taken


def test_what_a_bad_step_did_to_running_statistics_is_taken_back_too():
    model, (x, y) = Noisy(), data()
    optimizer = optimizer_of(model)
    for _ in range(2):
        optimizer.step(closure_of(model, x.float(), y))
    kept = [(p, p.detach().clone()) for p in model.parameters()]
    step = optimizer.state_dict()["adaptive"]["last_step"]
    before = {name: kept["before"].clone() for name, kept in step.items()}
    with torch.no_grad():
        for p, _ in kept:
            p.add_(1e3)
    buffers = [b.clone() for b in model.buffers()]
    optimizer.step(closure_of(model, x.float(), y))
    assert optimizer.rejected_steps == 1
    assert same(dict(model.named_parameters()), before)
    assert same(list(model.buffers()), buffers)


def test_outputs_that_the_loss_is_not_convex_in_end_in_skipped_steps():
    model, (x, y) = network(), data()
    optimizer = optimizer_of(model, damping=1e-3)

    def closure():
        outputs = model(x)
        return torch.log1p((30 * outputs - 90 * y[:, None]).square()).mean(), outputs

    with pytest.warns(RuntimeWarning, match="not convex in the outputs"):
        optimizer.step(closure)
    assert optimizer.skipped_steps == 1
    assert optimizer.damping == 4e-3
    assert np.array_equal(flat(model), flat(network()))


def test_a_parameter_frozen_between_steps_stays():
    model, (x, y) = network(), data()
    optimizer = optimizer_of(model)
    for number in range(6):
        if number == 3:
            model[0].requires_grad_(False)
            kept = model[0].weight.clone()
        optimizer.step(closure_of(model, x, y))
    assert same(model[0].weight, kept)


def test_autocast_around_the_step_sees_parameters_as_they_are():
    model, (x, y) = network().float(), data()
    optimizer = optimizer_of(model, damping=10.0)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = optimizer.step(closure_of(model, x.float(), y))
        present = {name: p.detach().clone() for name, p in model.named_parameters()}
        last = optimizer.state_dict()["adaptive"]["last_step"]
        started = {name: last[name]["before"] for name in present}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model.load_state_dict(started)
            assert same(F.cross_entropy(model(x.float()), y), loss)
        model.load_state_dict(present)


def test_an_encoder_in_evaluation_mode_is_differentiated():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    model = nn.Sequential(nn.Linear(4, 8), encoder, nn.Flatten(), nn.Linear(24, 3))
    x, y = data()
    sentences = torch.stack([x, x.roll(1, 0), x.roll(2, 0)], 1).float()
    optimizer = optimizer_of(model)
    losses = [optimizer.step(closure_of(model, sentences, y)).item() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_an_operation_without_a_forward_derivative_is_an_error():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3))
    x, y = torch.randint(9, (40, 3)), data()[1]
    with pytest.raises(RuntimeError, match="forward-mode derivatives, which torch lacks"):
        optimizer_of(model).step(closure_of(model, x, y))


@pytest.mark.parametrize("held", [True, False])
def test_a_closure_with_gradients_by_parameters_is_an_error_that_says_what_works(held):
    """Weights of a loss's terms by the norms of their gradients."""
    model, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(9, 2)
    own = list(model.parameters())

    def closure():
        residuals = model(x) - 1
        parameters = own if held else list(model.parameters())
        gradients = torch.autograd.grad(residuals.square().mean(), parameters, retain_graph=True)
        return residuals.square().mean() / gradients[0].norm().detach(), residuals

    with pytest.raises(RuntimeError, match=r"gradients by the parameters.* before step\(\)"):
        optimizer_of(model).step(closure)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch.func's own
@pytest.mark.filterwarnings("ignore:these layers ran inside of torch.func:RuntimeWarning")
def test_a_closure_with_forward_mode_derivatives_is_an_error_that_says_what_works():
    model, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(9, 2)

    def closure():
        slopes = torch.vmap(torch.func.jacfwd(lambda x: model(x)[0]))(x)
        residuals = torch.cat([slopes.sum(1), model(x)[:, 0]])
        return residuals.square().mean(), residuals

    with pytest.raises(RuntimeError, match=r"forward mode itself .* torch\.autograd\.grad can be"):
        optimizer_of(model).step(closure)


@pytest.mark.filterwarnings("ignore:.*step.* skipped:RuntimeWarning")
def test_a_batch_that_is_not_finite_changes_nothing():
    model, (x, y) = network(), data()
    bad = x.clone()
    bad[3, 1] = float("nan")
    optimizer = optimizer_of(model)
    optimizer.step(closure_of(model, x, y))
    state, before = copy.deepcopy(optimizer.kfac.state_dict()), flat(model)
    optimizer.step(closure_of(model, bad, y))
    assert np.array_equal(flat(model), before)
    assert same(optimizer.kfac.state_dict(), state)
    assert optimizer.skipped_steps == 1
    first = optimizer.step(closure_of(model, x, y))
    assert optimizer.step(closure_of(model, x, y)) < first
    fresh = optimizer_of(network())
    fresh.step(closure_of(fresh.kfac.model, bad, y))
    assert np.array_equal(flat(fresh.kfac.model), flat(network()))
    assert fresh.skipped_steps == 1


@pytest.mark.filterwarnings("ignore:.*step.* skipped:RuntimeWarning")
def test_a_gradient_that_is_not_finite_where_the_loss_is_changes_nothing():
    """Momentum and damping included: the run goes on as if the step had not been."""
    runs = []
    for is_hit in (False, True):
        model, closures = network(), [data(seed=seed) for seed in range(6)]
        optimizer, losses = optimizer_of(model, inv_update_steps=3), []
        for number, batch in enumerate(closures):
            if number == 3 and is_hit:
                hook = model[0].weight.register_hook(lambda gradient: gradient * torch.nan)
                before = flat(model), optimizer.metrics()
                optimizer.step(closure_of(model, *data(seed=9)))
                hook.remove()
                assert np.array_equal(flat(model), before[0])
                after = optimizer.metrics()
                for name in ("steps", "damping", "learning_rate", "momentum", "reduction_ratio"):
                    assert after[name] == before[1][name]
            losses.append(float(optimizer.step(closure_of(model, *batch))))
        runs.append((losses, flat(model), optimizer.damping))
        assert optimizer.skipped_steps == is_hit
    assert runs[0][0] == runs[1][0]
    assert np.array_equal(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]


def test_a_loss_that_was_not_finite_before_the_last_step_says_nothing_of_it():
    model, (x, y) = network(), data()
    optimizer, first = optimizer_of(model), model[0].bias.detach().clone()
    wall = False

    def closure():
        """Infinite around the first parameters, once `wall` is up."""
        outputs = model(x)
        near = bool((model[0].bias - first).square().sum() < 1e-12)
        return F.cross_entropy(outputs, y) * (float("inf") if near and wall else 1.0), outputs

    optimizer.step(closure)
    wall, before = True, flat(model)
    optimizer.step(closure)
    assert np.linalg.norm(flat(model) - before) > 1e-3
    assert optimizer.skipped_steps == optimizer.rejected_steps == 0
    assert optimizer.damping == 0.1


def test_batches_that_say_nothing_of_each_other_are_warned_of():
    model = network()
    optimizer = optimizer_of(model, damping=5e3)
    labels = torch.Generator().manual_seed(0)

    def train():
        for number in range(40):
            x, _ = data(count=8, seed=number)
            optimizer.step(closure_of(model, x, torch.randint(3, (8,), generator=labels)))

    with pytest.warns(RuntimeWarning, match="damping has reached 10000") as caught:
        train()
    assert caught[0].filename == __file__
    assert optimizer.damping <= 1e4


def test_what_is_wrong_with_a_closure_is_said():
    model, (x, y) = network(), data()
    optimizer, before = optimizer_of(model), flat(model)

    def calls_backward():
        loss, outputs = closure_of(model, x, y)()
        if loss.requires_grad:
            loss.backward(retain_graph=True)
        return loss, outputs

    draws = torch.Generator().manual_seed(0)

    def new_batch():
        rows = torch.randint(40, (4,), generator=draws)
        return closure_of(model, x[rows], y[rows])()

    def fails_without_gradients():
        if not torch.is_grad_enabled():
            raise RuntimeError("out of paper")
        return closure_of(model, x, y)()

    def weighted():
        """By a derivative that is a constant to autograd."""
        inputs = x.clone().requires_grad_()
        loss, outputs = closure_of(model, inputs, y)()
        (slopes,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        return loss * (slopes.norm() * 1e3), outputs

    wrong = {
        "out of paper": fails_without_gradients,
        "derivatives taken without create_graph": weighted,
        "not yet backward": calls_backward,
        r"\(loss, outputs\), got Tensor": lambda: closure_of(model, x, y)()[0],
        "0-d tensor first": lambda: closure_of(model, x, y)()[::-1],
        "function of second, got list": lambda: (closure_of(model, x, y)()[0], []),
        "function of second, got NoneType": lambda: (closure_of(model, x, y)()[0], None),
        "function of second, got dict": lambda: (closure_of(model, x, y)()[0], {"logits": model(x)}),
        "graphs, got detached": lambda: [t.detach() for t in closure_of(model, x, y)()],
        "computed from, got others": lambda: (closure_of(model, x, y)()[0], model(x)),
        "real tensors, got complex": lambda: (closure_of(model, x, y)()[0], model(x) * 1j),
        "same loss each time": new_batch,
    }
    for message, closure in wrong.items():
        with pytest.raises((RuntimeError, TypeError), match=message):
            optimizer.step(closure)
        assert np.array_equal(flat(model), before)
        assert all(p.grad is None for p in model.parameters())
        assert optimizer.damping == 0.1


def test_a_parameter_that_a_module_hides_is_found_out():
    class Hiding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.hidden = [self.layer.weight]

        def forward(self, x):
            return F.linear(x, self.hidden[0], self.layer.bias)

    model, (x, y) = Hiding(), data()
    with pytest.raises(RuntimeError, match="derivative along the direction"):
        optimizer_of(model).step(closure_of(model, x.float(), y))


def test_bad_arguments_are_errors():
    model = network()
    with pytest.raises(TypeError, match="kfac must be a KFAC, got Linear"):
        AdaptiveKFAC(nn.Linear(2, 2))
    around = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="without an optimizer"):
        AdaptiveKFAC(around)
    around.detach()
    with pytest.raises(ValueError, match="damping must be > 0, got 0"):
        optimizer_of(network(), damping=0.0)
    with pytest.raises(ValueError, match="damping was given as a function"):
        optimizer_of(network(), damping=lambda step: 0.1)
    kfac = KFAC(network())
    with pytest.raises(TypeError, match=r"fallback must be a torch\.optim\.Optimizer or None"):
        AdaptiveKFAC(kfac, fallback=0.1)
    with pytest.raises(ValueError, match=r"parameters that K-FAC covers, got \['0.weight'\]"):
        AdaptiveKFAC(kfac, torch.optim.SGD([kfac.model[0].weight], lr=0.1))
    with pytest.raises(ValueError, match=r"of the model only, got some of shapes \[\(2,\)\]"):
        AdaptiveKFAC(kfac, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
    with pytest.raises(ValueError, match="fixed at construction"):
        AdaptiveKFAC(kfac).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_what_kfac_does_not_cover_needs_a_fallback():
    model, (x, y) = network(), data()
    kfac = KFAC(model, damping=0.1, skip_layers=["^2$"])
    with pytest.raises(ValueError, match=r"does not cover, got none for \['2.weight', '2.bias'\]"):
        AdaptiveKFAC(kfac)
    optimizer = AdaptiveKFAC(kfac, torch.optim.SGD(model[2].parameters(), lr=0.1))
    weight = model[2].weight.detach().clone()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), [model[2].weight])
    optimizer.step(closure_of(model, x, y))
    assert_close(model[2].weight.detach(), weight - 0.1 * gradient)


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_a_resumed_run_is_the_uninterrupted_run(way, tmp_path):
    model, batches = network(), [data(seed=number) for number in range(12)]
    optimizer = optimizer_of(model, inv_update_steps=3)
    for x, y in batches[:7]:
        optimizer.step(closure_of(model, x, y))
    if way == "state_dict":
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "run.pt")
        weights, state = torch.load(tmp_path / "run.pt", weights_only=True)
        other = network(1)
        other.load_state_dict(weights)
        resumed = optimizer_of(other, inv_update_steps=3)
        resumed.load_state_dict(state)
    elif way == "deepcopy":
        other, resumed = copy.deepcopy((model, optimizer))
    else:
        other, resumed = pickle.loads(pickle.dumps((model, optimizer)))
    for x, y in batches[7:]:
        optimizer.step(closure_of(model, x, y))
        resumed.step(closure_of(other, x, y))
    assert np.array_equal(flat(model), flat(other))
    assert same(optimizer.metrics(), resumed.metrics())


def test_hooks_on_a_state_are_called():
    model, (x, y) = network(), data()
    optimizer, called = optimizer_of(model), []
    optimizer.register_state_dict_pre_hook(lambda _: called.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "epoch": 3})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {key: value for key, value in state.items() if key != "epoch"}
    )
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    optimizer.step(closure_of(model, x, y))
    state = optimizer.state_dict()
    assert state["epoch"] == 3
    optimizer.load_state_dict(state)
    assert called == ["save", "loaded"]
    assert state["epoch"] == 3


class Around(nn.Module):
    """Names what it has as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("saved_inside", [True, False])
def test_a_run_is_resumed_inside_of_a_wrapper_and_outside(saved_inside):
    model, other, batches = network(), network(1), [data(seed=number) for number in range(6)]
    first, second = (Around(model), other) if saved_inside else (model, Around(other))
    optimizer, resumed = optimizer_of(first), optimizer_of(second)
    for x, y in batches[:3]:
        optimizer.step(closure_of(first, x, y))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for x, y in batches[3:]:
        optimizer.step(closure_of(first, x, y))
        resumed.step(closure_of(second, x, y))
    assert np.array_equal(flat(model), flat(other))


def test_a_state_that_does_not_fit_is_an_error():
    model, (x, y) = network(), data()
    optimizer = optimizer_of(model)
    optimizer.step(closure_of(model, x, y))
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"keys \['adaptive', 'kfac'\], got \['kfac'\]"):
        optimizer.load_state_dict({"kfac": state["kfac"]})
    bad = {**state, "adaptive": {"found": {}}}
    with pytest.raises(ValueError, match=r"must have \['rejected_steps', 'skipped_steps'\]"):
        optimizer.load_state_dict(bad)
    state["adaptive"]["last_step"]["0.weight"]["change"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"others: \['0.weight'\]"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("fisher", ["mc", "type-2"])
def test_statistics_may_be_of_the_model_s_predictions(fisher):
    model, (x, y) = network(), data()
    optimizer = optimizer_of(model, fisher=fisher, likelihood="categorical", inv_update_steps=2)
    losses = [optimizer.step(closure_of(model, x, y)).item() for _ in range(12)]
    assert losses[-1] < 0.6 * losses[0]
    assert optimizer.rejected_steps == optimizer.skipped_steps == 0


def test_attention_and_checkpoints_are_differentiated():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.read, self.qkv, self.last = nn.Linear(4, 8), nn.Linear(8, 24), nn.Linear(8, 3)

        def forward(self, x):
            h = torch.utils.checkpoint.checkpoint(self.read, x, use_reentrant=False)
            q, k, v = self.qkv(h).chunk(3, -1)
            return self.last(F.scaled_dot_product_attention(q, k, v))[:, 0]

    model, (x, y) = Block(), data()
    sentences = torch.stack([x, x.roll(1, 0), x.roll(2, 0)], 1).float()
    optimizer = optimizer_of(model)
    losses = [optimizer.step(closure_of(model, sentences, y)).item() for _ in range(10)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*jit.script.*deprecated")
@pytest.mark.filterwarnings("ignore:Skipping serialization")
def test_a_compiled_model_takes_the_same_steps():
    (x, y), models = data(), [network(), network()]
    optimizers = [optimizer_of(model) for model in models]
    compiled = torch.compile(models[1])
    for _ in range(4):
        optimizers[0].step(closure_of(models[0], x, y))
        optimizers[1].step(closure_of(compiled, x, y))
    assert_close(flat(models[1]), flat(models[0]), rtol=1e-9)


RETURNED = {  # of the residuals of both terms, and whether they make up the loss
    "both": (lambda first, second: (first, second), True),
    "one": (lambda first, second: first, False),
    "one and what it is made into": (lambda first, second: (first, second, 2 * first), True),
}


@pytest.mark.parametrize("penalty", [0.0, 1e-3])
@pytest.mark.parametrize("returned", RETURNED)
def test_outputs_that_do_not_make_up_the_loss_are_warned_of_once(returned, penalty, recwarn):
    """Nor does a penalty on weights, which is less, change that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, y = torch.randn(64, 3).double(), torch.randn(64, 2).double()
    optimizer = AdaptiveKFAC(KFAC(model, damping=0.1, compute_method="inverse"))

    def closure():
        first, second = model(x) - y, model(x + 1) + y
        loss = first.square().mean() + 3 * second.square().mean()
        loss = loss + penalty * sum(p.square().sum() for p in model.parameters())
        return loss, RETURNED[returned][0](first, second)

    for _ in range(40):
        optimizer.step(closure)
    said = [w for w in recwarn if "the outputs do not make up the loss" in str(w.message)]
    assert len(said) == (not RETURNED[returned][1])


def test_an_output_that_is_made_of_another_counts_twice_which_is_told(recwarn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, y = torch.randn(64, 3).double(), torch.randn(64, 2).double()
    optimizer = AdaptiveKFAC(KFAC(model, damping=0.1, compute_method="inverse"))

    def closure():
        outputs = model(x)
        residuals = outputs - y
        return residuals.square().mean(), (outputs, residuals)

    optimizer.step(closure)
    assert any("the outputs do not make up the loss" in str(w.message) for w in recwarn)
