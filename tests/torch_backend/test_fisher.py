"""The kinds of Fisher matrix, against dense ones made of per-row gradients, and EKFAC in its basis."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.nn import functional as F

from conftest import assert_close
from suite.core.likelihoods import Bernoulli, Categorical, Gaussian
from suite.torch import KFAC
from torch_backend.rows_by_loops import (
    ROWS,
    Net,
    blocks_of,
    both_reductions,
    double,
    held,
    loss_of,
    matrices,
    numbers,
    stepped,
    tokens,
    watched,
    with_one,
)

# ---- one row: A ⊗ G is the outer product of the gradient ----------------------------------------


ONE_ROW = {
    "linear": (lambda: nn.Linear(4, 3), lambda: numbers(1, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), lambda: numbers(1, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 4), lambda: numbers(1, 2, 4)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (2, 3)), lambda: numbers(1, 2, 2, 3)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), lambda: numbers(1, 4, 2, 2)),
    "conv3d": (lambda: nn.Conv3d(2, 2, (1, 2, 2)), lambda: numbers(1, 2, 1, 2, 2)),
    "transposed1d": (lambda: nn.ConvTranspose1d(3, 2, 1), lambda: numbers(1, 3, 1)),
    "transposed2d": (lambda: nn.ConvTranspose2d(3, 2, 1), lambda: numbers(1, 3, 1, 1)),
    "transposed2d groups": (lambda: nn.ConvTranspose2d(4, 2, 1, groups=2), lambda: numbers(1, 4, 1, 1)),
    "embedding": (lambda: nn.Embedding(5, 3), lambda: torch.tensor([2])),
    "layer norm": (lambda: nn.LayerNorm(4), lambda: numbers(1, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), lambda: numbers(1, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), lambda: numbers(1, 4)),
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row_has_the_exact_fisher_and_natural_gradient(name):
    make, inputs = ONE_ROW[name]
    model, x = double(make), inputs()
    reference, _ = watched(model, x, reduction="sum")
    kfac = stepped(model, x, reduction="sum", damping=0.3)
    expected, after, factors = matrices("", reference), matrices("", model), held(kfac)
    assert expected.keys() == factors.keys()
    for layer, gradient in expected.items():
        for block, matrix, direction in zip(
            blocks_of(factors[layer]), gradient, after[layer], strict=True
        ):
            vector = matrix.reshape(-1)
            fisher = torch.outer(vector, vector)
            if factors[layer][0].ndim == 2 and isinstance(model, nn.RMSNorm):
                fisher = torch.diag(fisher.diagonal())  # all that a vector of scales keeps
            assert_close(block, fisher)
            damped = fisher + 0.3 * torch.eye(len(vector), dtype=torch.float64)
            assert_close(direction.reshape(-1), torch.linalg.solve(damped, vector))


# ---- the model's own distribution ---------------------------------------------------------------


def softplus(f):
    return F.softplus(f).sum()


# likelihood, -log p(y | f) of one term without what is linear in f: its Hessian is the likelihood's
LIKELIHOODS = {
    "categorical": (Categorical(), lambda f: f.logsumexp(-1)),
    "bernoulli": (Bernoulli(), softplus),
    "gaussian": (Gaussian(0.3), lambda f: f.square().sum() / 0.6),
}
every_likelihood = pytest.mark.parametrize("likelihood", LIKELIHOODS)
TYPE2 = {"fisher": "type-2"}
LATEST = {"factor_decay": 0.0, "inv_update_steps": 1000}  # averages of the last step alone


class MLP(nn.Module):
    def __init__(self, inner=torch.tanh):
        super().__init__()
        self.first, self.last, self.inner = nn.Linear(4, 3), nn.Linear(3, 3), inner

    def forward(self, x):
        return self.after(self.first(x))

    def after(self, s):
        return self.last(self.inner(s))


def term_hessian(likelihood, J, f):
    """Jᵀ H J of one term, for J (outputs, n) and its outputs f."""
    return J.T @ hessian(LIKELIHOODS[likelihood][1], f) @ J


@pytest.mark.parametrize("fisher", ["type-2", "mc"])
@pytest.mark.parametrize("likelihood", [Gaussian(1e-6), Gaussian(1.0), Categorical()])
def test_a_grad_scaler_does_not_push_sampled_gradients_out_of_half_precision(fisher, likelihood):
    """Its scale suits a loss that is a mean; these are of single terms."""
    runs = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=scaled)
        settings = {"grad_scaler": scaler} if scaled else {}
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        kfac = KFAC(model, sgd, fisher=fisher, likelihood=likelihood, **settings)
        for _ in range(3):
            kfac.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=scaled):
                loss = 1e-6 * model(torch.ones(8, 4)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(kfac)
            scaler.update()
        assert (kfac.steps, kfac.skipped_steps) == (3, 0)
        runs.append([G for _, G in held(kfac).values()])
    for found, expected in zip(*runs, strict=True):
        assert_close(found, expected, 2e-2)  # half precision


@both_reductions
@every_likelihood
def test_type2_factors_of_a_network_by_loops(likelihood, reduction):
    model, x = double(MLP), numbers(5, 4)
    reference = copy.deepcopy(model)
    kfac = stepped(model, x, reduction=reduction, likelihood=LIKELIHOODS[likelihood][0], **TYPE2)
    s = reference.first(x).detach()
    hidden = with_one(torch.tanh(s))
    G = {"first": 0, "last": 0}
    for row in s:
        f = reference.after(row).detach()
        G["first"] += term_hessian(likelihood, jacobian(reference.after, row), f)
        G["last"] += term_hessian(likelihood, torch.eye(3, dtype=x.dtype), f)
    for name, a in (("first", with_one(x)), ("last", hidden)):
        A, (got,) = held(kfac)[name]
        assert_close(A[0], a.T @ a / 5)
        assert_close(got, G[name] / (5 if reduction == "mean" else 1))


@every_likelihood
def test_type2_is_the_exact_ggn_of_one_layer_on_one_example(likelihood):
    model, x = double(lambda: nn.Linear(4, 3)), numbers(1, 4)
    matrix = torch.cat([model.weight, model.bias[:, None]], 1).detach()

    def outputs(matrix):
        return (with_one(x) @ matrix.T)[0]

    J = jacobian(outputs, matrix).reshape(3, -1)
    expected = term_hessian(likelihood, J, outputs(matrix))
    kfac = stepped(model, x, likelihood=LIKELIHOODS[likelihood][0], **TYPE2)
    (factors,) = held(kfac).values()
    assert_close(blocks_of(factors)[0], expected)


@pytest.mark.parametrize("name", ONE_ROW)
def test_type2_is_the_exact_ggn_of_every_block_on_one_row(name):
    make, inputs = ONE_ROW[name]
    layer, x = double(make), inputs()
    last = x.ndim < 3
    channels = layer(x).shape[-1 if last else 1]
    model = Net(layer, channels, last).double()
    f, J = model(x)[0], {}
    for c in range(3):
        model.zero_grad()
        f[c].backward(retain_graph=True)
        for key, matrix in matrices("layer", layer).items():
            J.setdefault(key, []).append(matrix.flatten(1))
    factors = held(stepped(model, x, likelihood="categorical", **TYPE2))
    for key, rows in J.items():
        for block, of_block in zip(blocks_of(factors[key]), torch.stack(rows, 1), strict=True):
            expected = term_hessian("categorical", of_block, f.detach())
            assert_close(block, torch.diag(expected.diagonal()) if "rms" in name else expected)


class DeepLinear(nn.Module):
    """Without a nonlinearity: K-FAC of a squared error is exact (Bernacchia et al. 2018)."""

    def __init__(self, bias, pooled):
        super().__init__()
        sizes = (4, 3, 3, 2)
        self.layers = nn.ModuleList(nn.Linear(m, n, bias=bias) for m, n in itertools.pairwise(sizes))
        self.pooled = pooled

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x.mean(1) if self.pooled and i == 2 else x)
        return x


@both_reductions
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_type2_is_the_exact_ggn_of_a_deep_linear_network(sharing, bias, reduction):
    pooled = sharing == "reduce"
    model = double(lambda: DeepLinear(bias, pooled))
    x = numbers(5, 6, 4) if pooled else numbers(5, 4)
    names = [name for name, _ in model.named_parameters()]

    def outputs(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    parameters = tuple(p.detach() for p in model.parameters())
    jacobians = dict(zip(names, jacobian(outputs, parameters), strict=True))
    kfac = stepped(
        model, x, reduction=reduction, likelihood=Gaussian(0.3), weight_sharing=sharing, **TYPE2
    )
    for i in range(3):
        J = jacobians[f"layers.{i}.weight"].flatten(0, 1)
        if bias:
            J = torch.cat([J, jacobians[f"layers.{i}.bias"].flatten(0, 1)[..., None]], -1)
        J = J.flatten(1)
        expected = J.T @ J / 0.3 / (5 if reduction == "mean" else 1)
        assert_close(blocks_of(held(kfac)[f"layers.{i}"])[0], expected)


def targets_and_probabilities(likelihood, f):
    """Every gradient of -log p(ŷ | f) there is, with its probability."""
    if likelihood == "categorical":
        p = f.softmax(-1)
        return [(p - F.one_hot(torch.tensor(c), 3), p[c]) for c in range(3)]
    p = f.sigmoid()
    every = itertools.product((0.0, 1.0), repeat=3)
    pairs = [(torch.tensor(y, dtype=f.dtype), y) for y in every]
    return [(p - y, torch.where(y > 0, p, 1 - p).prod()) for y, _ in pairs]


@pytest.mark.parametrize("samples", [1, 40])
@every_likelihood
def test_monte_carlo_is_type2_up_to_an_error_of_the_size_it_must_have(likelihood, samples):
    """Twenty independent steps: their mean squared error is Var[(Jᵀu)(Jᵀu)ᵀ] summed and divided."""
    model, x, steps = double(MLP), numbers(5, 4), 20
    s = model.first(x).detach()
    expected, variance = torch.zeros(3, 3, dtype=x.dtype), 0.0
    for row in s:
        f, J = model.after(row).detach(), jacobian(model.after, row)
        mean = term_hessian(likelihood, J, f)
        expected += mean / 5
        if likelihood == "gaussian":  # fourth moments of a normal vector, by Isserlis
            variance += mean.trace() ** 2 + (mean @ mean).trace()
        else:
            for u, p in targets_and_probabilities(likelihood, f):
                variance += p * (torch.outer(J.T @ u, J.T @ u) - mean).square().sum()
    error = 0.0
    kfac = KFAC(
        model, fisher="mc", likelihood=LIKELIHOODS[likelihood][0], fisher_samples=samples, **LATEST
    )
    for _ in range(steps):
        model.zero_grad()
        loss_of(model(x)).backward()
        kfac.step()
        error += float((held(kfac)["first"][1][0] - expected).square().sum()) / steps
    ratio = error / (float(variance) / 25 / samples)
    assert 1 / 3 < ratio < 3


class Attending(nn.Module):
    """Whose values reach all later positions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        scores = (x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -1e9)
        return self.last(x + scores.softmax(-1) @ self.first(x))


class Normalized(nn.Module):
    """Whose activations reach all examples."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


@pytest.mark.parametrize(("make", "shape"), [(Attending, (2, 12, 4)), (Normalized, (32, 4))])
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_type2_of_terms_that_one_value_reaches_is_the_sum_over_terms(make, shape, likelihood):
    """On average: products of two terms' columns have random signs. The oracle takes terms in turn."""
    model, x, steps = double(make), numbers(*shape), 40
    seen = {}
    handle = model.first.register_forward_hook(lambda module, args, y: seen.update(y=y))
    outputs = model(x)
    handle.remove()
    flat = outputs.reshape(-1, 3)
    expected = 0
    for n, f in enumerate(flat.detach()):
        root = torch.linalg.cholesky(hessian(LIKELIHOODS[likelihood][1], f) + 1e-12 * torch.eye(3))
        for column in root.T:
            (g,) = torch.autograd.grad(flat[n], seen["y"], column, retain_graph=True)
            expected += g.reshape(-1, g.shape[-1]).T @ g.reshape(-1, g.shape[-1]) / len(flat)
    settings = {"likelihood": LIKELIHOODS[likelihood][0], **TYPE2, **LATEST}
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0), **settings)
    total = 0
    for _ in range(steps):
        model.zero_grad()
        model(x).reshape(-1, 3).square().sum(1).mean().backward()
        kfac.step()
        total += held(kfac)["first"][1][0] / steps
    assert (total - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize("fisher", ["type-2", "mc"])
def test_an_output_that_is_changed_in_place_is_an_error(fisher):
    model = nn.Linear(4, 3)
    kfac = KFAC(model, fisher=fisher, likelihood="categorical")
    y = model(torch.randn(5, 4))
    with pytest.raises(RuntimeError, match="changed in place"):
        F.cross_entropy(y.mul_(2.0), torch.zeros(5, dtype=torch.int64)).backward()
    kfac.zero_grad()
    F.cross_entropy(model(torch.randn(5, 4)) * 2.0, torch.zeros(5, dtype=torch.int64)).backward()
    kfac.step()
    assert kfac.steps == 1


class Mixed(nn.Module):
    """A matrix, units, a free parameter and a table."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.linear = nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.linear(torch.tanh(self.norm(self.table(x)) * self.scale))


def test_samples_are_averaged_like_steps():
    """Four samples in one step, or one in each of four, draw the same numbers."""
    model, x = double(Mixed), tokens(5, below=6)
    found = []
    for samples, steps in ((4, 1), (1, 4)):
        sums = {}
        kfac = KFAC(model, fisher="mc", likelihood="categorical", fisher_samples=samples, **LATEST)
        for _ in range(steps):
            model.zero_grad()
            loss_of(model(x)).backward()
            kfac.step()
            for name, factors in held(kfac).items():
                sums[name] = sums.get(name, 0) + torch.stack(blocks_of(factors)) / steps
        kfac.detach()
        found.append(sums)
    assert found[0].keys() == {"table", "norm", "linear", "scale"}
    for name, blocks in found[0].items():
        assert_close(blocks, found[1][name])


@pytest.mark.parametrize("options", [{"fisher": "mc", "fisher_samples": 3}, {"fisher": "type-2"}])
def test_the_extra_passes_leave_the_users_gradients_and_reach_no_parameter(options):
    model, x = double(MLP), numbers(5, 4)
    reference, visits = copy.deepcopy(model), []
    kfac = KFAC(model, likelihood="categorical", **options)
    for p in model.parameters():
        p.register_hook(lambda gradient: visits.append(1))
    for one in (model, reference):
        loss_of(one(x)).backward()
    assert len(visits) == 4
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
    assert all(one is not None for one in kfac._engine.capture.take_statistics())


FISHERS = {"empirical": {}, "type-2": {"fisher": "type-2", "likelihood": "categorical"}}


@both_reductions
@pytest.mark.parametrize("fisher", FISHERS)
def test_micro_batches_are_one_batch(fisher, reduction):
    x, found = numbers(6, 4), []
    for parts in ([x], [x[:2], x[2:4], x[4:]]):
        model = double(MLP)
        kfac = KFAC(model, kl_clip=None, loss_reduction=reduction, **FISHERS[fisher])
        for part in parts:
            scale = 1 / len(parts) if reduction == "mean" else 1
            (scale * loss_of(model(part), reduction)).backward()
        kfac.step()
        found.append(held(kfac))
    for name, factors in found[0].items():
        assert_close(blocks_of(found[1][name])[0], blocks_of(factors)[0])


def test_discarded_passes_are_no_terms():
    x, found = numbers(6, 4), []
    for discard in (False, True):
        model = double(MLP)
        kfac = KFAC(model, kl_clip=None, likelihood="categorical", **TYPE2)
        if discard:
            loss_of(model(3 * x)).backward()
            model.zero_grad()
        loss_of(model(x)).backward()
        kfac.step()
        found.append(held(kfac))
    for name, factors in found[0].items():
        assert_close(blocks_of(found[1][name])[0], blocks_of(factors)[0])


@pytest.mark.parametrize("fisher", FISHERS)
def test_a_loss_scale_changes_nothing(fisher):
    x, found = numbers(6, 4), []
    for scale in (1.0, 2.0**12):
        model = double(Mixed) if fisher == "empirical" else double(MLP)
        kfac = KFAC(model, kl_clip=None, grad_scaler=lambda scale=scale: scale, **FISHERS[fisher])
        y = model(tokens(5, below=6) if fisher == "empirical" else x)
        (scale * loss_of(y)).backward()
        for p in model.parameters():
            p.grad /= scale
        kfac.step()
        found.append([p.grad for p in model.parameters()])
    for direction, expected in zip(*found, strict=True):
        assert_close(direction, expected)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return self.actor(h), self.critic(h)


@pytest.mark.parametrize("fisher", ["mc", "type-2"])
def test_a_head_that_the_likelihood_is_not_about_is_named_and_stays_plain(fisher):
    model, x = double(ActorCritic), numbers(6, 4)
    likelihood = {"fisher": fisher, "likelihood": "categorical", "output_of": lambda found: found[0]}
    kfac = KFAC(model, kl_clip=None, **likelihood)
    logits, value = model(x)
    (logits.logsumexp(1).mean() + value.square().mean()).backward()
    plain = model.critic.weight.grad.clone()
    said = "Not seen are layers that the tensor of output_of= is not made of, .*: 'critic'$"
    with pytest.warns(RuntimeWarning, match=said):
        kfac.step()
    assert torch.equal(model.critic.weight.grad, plain)


class Pooled(nn.Module):
    """No linear layer after the pooling: the last layer has more positions than the loss has terms."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2)

    def forward(self, x):
        return self.conv(x).mean(-1)


def test_the_likelihood_knows_how_many_terms_there_are():
    model, x = double(Pooled), numbers(4, 2, 6)
    f = model(x).detach()
    kfac = stepped(model, x, likelihood="categorical", **TYPE2)
    H = sum(term_hessian("categorical", torch.eye(3, dtype=x.dtype), row) for row in f) / 4
    # each of the 5 positions passes a fifth of the gradient on
    assert_close(held(kfac)["conv"][1][0], 5 * H / 25)


def test_output_of_may_move_the_axis_of_the_classes():
    class PerPixel(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 2)

        def forward(self, x):
            return self.conv(x)

    model, x = double(PerPixel), numbers(4, 2, 6)
    rows = model(x).detach().movedim(1, -1).reshape(-1, 3)
    kfac = KFAC(model, likelihood="categorical", output_of=lambda y: y.movedim(1, -1), **TYPE2)
    F.cross_entropy(model(x), tokens(4, 5, below=3)).backward()
    kfac.step()
    H = sum(term_hessian("categorical", torch.eye(3, dtype=x.dtype), row) for row in rows) / 20
    assert_close(held(kfac)["conv"][1][0], H)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Gaussian(0.5)])
def test_one_number_for_each_example_is_an_error_and_one_example_of_many_is_none(likelihood):
    """(n,) would be one term of n coordinates: G would be n times too large."""

    class Squeezed(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.linear = nn.Linear(4, outputs)

        def forward(self, x):
            return self.linear(x["x"] if isinstance(x, dict) else x).squeeze(-1)

    def of_rows(f):
        if isinstance(likelihood, Gaussian):
            return torch.full_like(f, 2.0).diag_embed()
        return (f.sigmoid() * (1 - f.sigmoid())).diag_embed()

    def measured(model, x, **options):
        kfac = KFAC(model, likelihood=likelihood, **options, **TYPE2)
        f = model(x)
        f.square().mean().backward()
        kfac.step()
        return f.detach(), held(kfac)["linear"][1][0]

    x = numbers(6, 4)
    for given in (x, {"x": x}):
        with pytest.raises(ValueError, match=r"must be \(..., C\), got \(6,\), as many as examples"):
            measured(double(lambda: Squeezed(1)), given)
    f, G = measured(double(lambda: Squeezed(1)), x, output_of=lambda y: y[..., None])
    assert_close(G, of_rows(f[:, None]).mean(0))
    f, G = measured(double(lambda: Squeezed(3)), x[0])
    assert_close(G, of_rows(f))


# ---- EKFAC --------------------------------------------------------------------------------------


@both_reductions
@pytest.mark.parametrize(
    "name", ["linear", "linear on sequences", "conv2d", "conv1d groups", "transposed2d"]
)
def test_ekfac_holds_the_diagonal_of_the_fisher_of_rows_in_the_eigenbasis(name, reduction):
    make, shape, rows_of = ROWS[name]
    layer, x = double(make), numbers(*shape)
    model = Net(layer, getattr(layer, "out_channels", 3), isinstance(layer, nn.Linear)).double()
    options = {"compute_method": "ekfac", "inv_update_steps": 9, "factor_decay": 0.75}
    kfac = stepped(model, x, reduction=reduction, **options)
    record = {k: v.clone() for k, v in kfac.state_dict()["kfac"]["layers"]["layer"].items()}
    outer = record["G_values"][:, :, None] * record["A_values"][:, None, :]
    assert_close(record["products"], outer)
    x = 2 * x + 0.3
    reference, calls = watched(model, x, reduction=reduction)
    model.zero_grad()
    loss_of(model(x), reduction).backward()
    kfac.step()
    a, g = rows_of(reference.layer, *calls["layer"][0])
    terms = len(x) if reduction == "mean" else 1
    now = kfac.state_dict()["kfac"]["layers"]["layer"]
    for block in range(len(a)):
        vectors = torch.einsum("ri,rj->rij", g[block], a[block]).flatten(1)
        basis = torch.kron(record["G_vectors"][block], record["A_vectors"][block])
        fisher = terms * vectors.T @ vectors
        exact = (basis.T @ fisher @ basis).diagonal().reshape(outer[block].shape)
        weight = now["products_weight"][block]
        assert_close(now["products"][block] / weight, 0.75 * outer[block] + 0.25 * exact)
    # the next refresh starts again from K-FAC's own eigenvalues
    kfac.set_hyperparameter("inv_update_steps", 2)
    loss_of(model(x), reduction).backward()
    kfac.step()
    now = kfac.state_dict()["kfac"]["layers"]["layer"]
    assert_close(now["products"], now["G_values"][:, :, None] * now["A_values"][:, None, :])


def test_ekfac_of_type2_is_the_diagonal_of_the_exact_ggn_in_the_eigenbasis():
    model, x = double(lambda: nn.Linear(4, 3)), numbers(5, 4)
    kfac = stepped(
        model, x, steps=2, compute_method="ekfac", inv_update_steps=9, factor_decay=0.0,
        likelihood="categorical", **TYPE2,
    )  # fmt: skip
    # The step changes gradients only: both steps see the same rows.
    record = kfac.state_dict()["kfac"]["layers"][""]
    ggn = sum(
        torch.kron(
            term_hessian("categorical", torch.eye(3, dtype=x.dtype), model(row).detach()),
            torch.outer(*2 * [with_one(row)]),
        )
        for row in x
    )
    basis = torch.kron(record["G_vectors"][0], record["A_vectors"][0])
    exact = (basis.T @ (ggn / 5) @ basis).diagonal().reshape(3, 5)
    assert_close(record["products"][0], exact)


def test_the_direction_of_ekfac_divides_by_its_own_eigenvalues():
    model, x = double(lambda: nn.Linear(4, 3)), numbers(5, 4)
    kfac = stepped(model, x, compute_method="ekfac", inv_update_steps=9, factor_decay=0.0, damping=0.1)
    model.zero_grad()
    loss_of(model(x[:2])).backward()
    gradient = matrices("", model)[""][0].clone()
    kfac.step()
    record = {k: v[0] for k, v in kfac.state_dict()["kfac"]["layers"][""].items()}
    basis = torch.kron(record["G_vectors"], record["A_vectors"])
    curvature = basis @ torch.diag(record["products"].flatten()) @ basis.T
    damped = curvature + 0.1 * torch.eye(15, dtype=x.dtype)
    expected = torch.linalg.solve(damped, gradient.flatten())
    assert_close(matrices("", model)[""][0].flatten(), expected)


class TiedByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.hidden = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, tokens):
        h = torch.tanh(self.hidden(self.table(tokens)))
        return F.linear(h, self.table.weight).flatten(0, -2)


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("by_inputs", [False, True])
@pytest.mark.parametrize("fisher", ["mc", "type-2"])
@pytest.mark.parametrize("kind", ["tied", "forces"])
def test_models_with_transposes_and_derivatives_have_a_sampled_fisher(kind, fisher, by_inputs):
    torch.manual_seed(0)
    if kind == "tied":
        model, x, likelihood, terms = TiedByFunction(), torch.randint(0, 9, (4, 5)), "categorical", 20
    else:
        model, x, likelihood, terms = Forces(), torch.randn(7, 3), "gaussian", 7
    kfac = KFAC(
        model, torch.optim.SGD(model.parameters(), lr=0.01), fisher=fisher, likelihood=likelihood
    )
    y = model(x)
    loss = F.cross_entropy(y, torch.arange(20) % 9) if kind == "tied" else y.square().mean()
    loss.backward(inputs=list(model.parameters()) if by_inputs else None)
    kfac.step()
    assert kfac.counted_terms == terms
    assert kfac.metrics()["layers"]["hidden" if kind == "tied" else "energy.0"]["ready"]


def test_forward_passes_that_train_nothing_are_let_go():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    kfac = KFAC(
        model, torch.optim.SGD(model.parameters(), lr=0.01), fisher="mc", likelihood="categorical"
    )
    outputs = []
    for _ in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        y = model(x)
        outputs.append(weakref.ref(y.grad_fn))
        torch.autograd.grad(F.cross_entropy(y, torch.arange(5) % 3), x)
    del y
    gc.collect()
    assert [reference() for reference in outputs] == [None] * 3
    assert not kfac._sampler._waiting
