"""Losses of derivatives by a model's inputs: every product with a weight in them is a use of it."""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from conftest import assert_close
from suite.torch import KFAC, AdaptiveKFAC
from torch_backend.rows_by_loops import double, held, numbers, with_one

# ---- the same networks, of operations that note their rows --------------------------------------


class Use(NamedTuple):
    turned: bool  # with Wᵀ
    own: bool  # in the network itself, not in derivatives of it
    x: torch.Tensor
    g: torch.Tensor


class Times(torch.autograd.Function):
    """x Wᵀ, or x W if `turned`; or entry by entry. Notes the rows of passes that are not recorded."""

    @staticmethod
    def forward(ctx: Any, x, w, uses, turned=False, own=True, entrywise=False):
        ctx.save_for_backward(x, w)
        ctx.uses, ctx.turned, ctx.own, ctx.entrywise = uses, turned, own, entrywise
        return x * w if entrywise else x @ (w if turned else w.T)

    @staticmethod
    def backward(ctx: Any, g):
        x, w = ctx.saved_tensors
        if torch.is_grad_enabled():
            made = Times.apply(g, w, ctx.uses, not ctx.turned, False, ctx.entrywise)
            return made, *(None,) * 5
        ctx.uses.append(Use(ctx.turned, ctx.own, x.detach(), g))
        if ctx.entrywise:
            return g * w, (g * x).flatten(0, -w.ndim - 1).sum(0), *(None,) * 4
        left, right = (rows.reshape(-1, rows.shape[-1]) for rows in ((x, g) if ctx.turned else (g, x)))
        return g @ (w.T if ctx.turned else w), left.T @ right, *(None,) * 4


def rows(x):
    return x.reshape(-1, x.shape[-1])


def outer(x):
    return x.T @ x


def expected_factors(uses, terms, bias):
    """(A, G) from all rows; the bias has a coordinate in A, which is 1 in the network's own rows."""
    own, later, turned = (
        [u for u in uses if u.turned == t and u.own == o]
        for t, o in ((False, True), (False, False), (True, False))
    )
    a = [with_one(rows(u.x)) if bias else rows(u.x) for u in own]
    a += [F.pad(rows(u.x), (0, int(bias))) for u in later]
    g = [rows(u.g) for u in own + later]
    parts = []
    if a:
        a, g = torch.cat(a), torch.cat(g)
        parts.append((outer(a) / len(a), terms * outer(g)))
    if turned:
        x, v = (torch.cat([rows(y) for y in ys]) for ys in zip(*[u[2:] for u in turned], strict=True))
        v = F.pad(v, (0, int(bias)))
        parts.append((terms * outer(v), outer(x) / len(x)))
    # Sides of both, with the mean eigenvalue of the own A, by shares of the trace, which is kept.
    sizes = [tuple(m.trace() / len(m) for m in pair) for pair in parts]
    weights = [p * q for p, q in sizes]
    total = sum(weights)
    scale = sizes[0][0] if len(a) else 1
    A = sum(w / total * A / p for (A, _), (p, _), w in zip(parts, sizes, weights, strict=True))
    G = sum(w * G / q for (_, G), (_, q), w in zip(parts, sizes, weights, strict=True))
    return A * scale, G / scale


SIDES = (3, 5, 4, 1)


def network():
    sides = itertools.pairwise(SIDES)
    layers = [m for i, o in sides for m in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Reference:
    """`network()` of `Times`."""

    def __init__(self, model):
        self.layers = [m for m in model if isinstance(m, nn.Linear)]
        self.uses = [[] for _ in self.layers]

    def __call__(self, x):
        for layer, uses in zip(self.layers, self.uses, strict=True):
            x = Times.apply(torch.tanh(x) if uses is not self.uses[0] else x, layer.weight, uses)
            x = x if layer.bias is None else x + layer.bias
        return x


def slopes(f, x):
    return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


def laplacian(f, x):
    first = slopes(f, x)
    parts = [torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(3)]
    return sum(parts)


def gradient(p):
    return torch.zeros_like(p) if p.grad is None else p.grad


def inside():
    return numbers(6, 3, seed=1).requires_grad_()


def third(f):
    x = inside()
    return torch.autograd.grad(laplacian(f, x).sum(), x, create_graph=True)[0]


def values_and_slopes(f):
    x = inside()
    y = f(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return ((y.squeeze(1) - 1).square() + (slope - 0.5).square().sum(1)).mean()


def residual(f):
    return (laplacian(f, inside()) - 0.3).square().mean()


LOSSES = {  # and their terms
    "slopes alone": (lambda f: slopes(f, inside()).sin().square().sum(1).mean(), 6),
    "energy and forces": (values_and_slopes, 6),
    "residual alone": (residual, 6),
    "residual and boundary": (lambda f: residual(f) + f(numbers(4, 3, seed=2)).square().mean(), 10),
    "third derivatives": (lambda f: third(f).square().mean(), 6),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bias", [True, False])
def test_products_in_derivatives_are_uses(name, bias):
    loss, terms = LOSSES[name]
    model = double(network)
    if not bias:
        for layer in model[::2]:
            layer.bias = None
    kfac = KFAC(model, kl_clip=None)
    loss(model).backward()
    ours = [gradient(p).clone() for p in model.parameters()]
    kfac.step()
    model.zero_grad()
    reference = Reference(model)
    loss(reference).backward()
    assert any(use.turned for use in reference.uses[0])
    for p, known in zip(model.parameters(), ours, strict=True):
        assert_close(known, gradient(p))
    for layer, uses, factors in zip(model[::2], reference.uses, held(kfac).values(), strict=True):
        sides = [(rows(u.g), rows(u.x))[:: -1 if u.turned else 1] for u in uses]
        assert_close(
            sum(left.T @ right for left, right in sides), layer.weight.grad
        )  # all rows are there
        A, G = expected_factors(uses, terms, bias)
        assert_close(factors[0][0], A)
        assert_close(factors[1][0], G)


# ---- other layers -------------------------------------------------------------------------------


def penalty(f, x):
    """A critic's mean and its gradient penalty (Gulrajani et al. 2017, arXiv:1704.00028)."""
    x = x.clone().requires_grad_()
    y = f(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (slope.flatten(1).square().sum(1).sqrt() - 1).square().mean()


def test_convolutions():
    model = double(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh()),
            *(nn.Conv2d(3, 4, 2, groups=1), nn.Tanh(), nn.Flatten(), nn.Linear(16, 1)),
        )
    )
    x, uses = numbers(5, 2, 6, 6), [[] for _ in range(3)]
    kfac = KFAC(model, kl_clip=None)
    penalty(model, x).backward()
    kfac.step()
    model.zero_grad()

    def convolve(layer, x, uses):
        places = F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride).mT
        y = Times.apply(places, layer.weight.flatten(1), uses) + layer.bias
        side = round(y.shape[1] ** 0.5)
        return y.mT.unflatten(2, (side, side))

    def reference(x):
        x = torch.tanh(convolve(model[0], x, uses[0]))
        x = torch.tanh(convolve(model[2], x, uses[1])).flatten(1)
        return Times.apply(x, model[5].weight, uses[2]) + model[5].bias

    penalty(reference, x).backward()
    for own, factors in zip(uses, held(kfac).values(), strict=True):
        A, G = expected_factors(own, 5, True)
        assert_close(factors[0][0], A)
        assert_close(factors[1][0], G)


NORMS = {
    "layer": lambda: nn.LayerNorm(6),
    "rms": lambda: nn.RMSNorm(6),
    "group": lambda: nn.GroupNorm(2, 6),
    "batch": lambda: nn.BatchNorm1d(6),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    model = double(lambda: nn.Sequential(nn.Linear(3, 6), NORMS[name](), nn.Tanh(), nn.Linear(6, 1)))
    norm, x, uses = model[1], numbers(8, 3), []
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * numbers(6))
    kfac = KFAC(model, kl_clip=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        penalty(model, x).backward()
        kfac.step()
    model.zero_grad()

    def normalized(x):
        if name == "layer":
            return F.layer_norm(x, (6,), eps=norm.eps)
        if name == "rms":
            return F.rms_norm(x, (6,), eps=norm.eps)
        if name == "group":
            return F.group_norm(x, 2, eps=norm.eps)
        return F.batch_norm(x, None, None, training=True, eps=norm.eps)

    def reference(x):
        y = Times.apply(normalized(model[0](x)), norm.weight, uses, False, True, True)
        return model[3](torch.tanh(y + norm.bias if name != "rms" else y))

    penalty(reference, x).backward()
    scales = sum(u.x * u.g for u in uses)
    assert_close(scales.sum(0), norm.weight.grad)
    blocks = torch.zeros(6, 2, 2, dtype=x.dtype)
    for use in uses:
        z = torch.stack([use.x * use.g, use.g if use.own else torch.zeros_like(use.g)], -1)
        blocks += torch.einsum("rci,rcj->cij", z, z)
    A, G = held(kfac)["1"]
    expected = 8 * (blocks[:, 0, 0] if name == "rms" else blocks)
    assert_close((A * G).reshape(expected.shape), expected)


class Own(nn.Module):
    """With a scale, and a matrix that its own forward multiplies with."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(1 + 0.3 * numbers(4))
        self.matrix = nn.Parameter(numbers(4, 4, seed=3))

    def forward(self, x):
        x, matrix = torch.tanh(x) * self.scale, self.get_parameter("matrix")  # as no source tells
        return F.linear(x, matrix) if self.kind == "linear" else x @ matrix


class Moved(nn.Module):
    """A product whose features are not last."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.matrix = kind, nn.Parameter(numbers(4, 4, seed=3))

    def forward(self, x):
        x = torch.tanh(x)
        if self.kind == "left":
            return (self.matrix @ x.mT).mT
        return torch.einsum("oi,...ni->...on", self.matrix, x).mT


@pytest.mark.parametrize("kind", ["left", "einsum"])
@pytest.mark.parametrize("order", [1, 2])
def test_products_whose_features_are_not_last(kind, order):
    model = double(lambda: nn.Sequential(nn.Linear(3, 4), Moved(kind), nn.Tanh(), nn.Linear(4, 1)))
    uses = []

    def loss(f):
        if order == 1:
            return penalty(f, numbers(8, 3))
        return laplacian(f, inside()).square().mean()

    kfac = KFAC(model, kl_clip=None)
    loss(model).backward()
    kfac.step()
    assert kfac.routing()["1.matrix"].factors == "4x4, 4x4"
    model.zero_grad()

    def reference(x):
        return model[3](torch.tanh(Times.apply(torch.tanh(model[0](x)), model[1].matrix, uses)))

    loss(reference).backward()
    A, G = expected_factors(uses, 8 if order == 1 else 6, False)
    found = held(kfac)["1.matrix"]
    assert_close(found[0][0], A)
    assert_close(found[1][0], G)


@pytest.mark.parametrize("kind", ["linear", "matmul"])
@pytest.mark.parametrize("order", [1, 2])
def test_parameters_of_a_module_s_own(kind, order):
    model = double(lambda: nn.Sequential(nn.Linear(3, 4), Own(kind), nn.Tanh(), nn.Linear(4, 1)))
    own, uses = model[1], {"scale": [], "matrix": []}

    def loss(f):
        if order == 1:
            return penalty(f, numbers(8, 3))
        return laplacian(f, inside()).square().mean()

    terms = 8 if order == 1 else 6
    kfac = KFAC(model, kl_clip=None)
    loss(model).backward()
    kfac.step()
    model.zero_grad()

    def reference(x):
        x = Times.apply(torch.tanh(model[0](x)), own.scale, uses["scale"], False, True, True)
        w = own.matrix if kind == "linear" else own.matrix.T
        return model[3](torch.tanh(Times.apply(x, w, uses["matrix"])))

    loss(reference).backward()
    factors = held(kfac)
    scale = sum((u.x * u.g).square().sum(0) for u in uses["scale"])
    pairs = [(u.g, u.x) if u.turned else (u.x, u.g) for u in uses["matrix"]]  # (in, out)
    matrix = sum(g.square().T @ x.square() for x, g in pairs)
    for name, squares in (("1.scale", scale), ("1.matrix", matrix if kind == "linear" else matrix.T)):
        A, G = factors[name]
        assert_close((A * G).reshape(squares.shape), terms * squares)


@pytest.mark.parametrize("shape", ["one slope", "a slope for each channel", "channels before places"])
def test_slopes_of_a_prelu(shape):
    """∂u/∂x = p ∂u/∂y where x < 0: a product entry by entry, whose slope is a use of p."""
    places = shape == "channels before places"

    def make():
        act = nn.PReLU() if shape == "one slope" else nn.PReLU(4 if places else 8)
        return nn.Sequential(nn.Linear(3, 8), act, nn.Linear(8, 1))

    model, x, uses = double(make), numbers(6, 3), []

    def network(x, act):
        h = model[0](x)
        return model[2](act(h.unflatten(1, (4, 2))).flatten(1) if places else act(h))

    kfac = KFAC(model, kl_clip=None)
    penalty(lambda x: network(x, model[1]), x).backward()
    kfac.step()
    model.zero_grad()

    def act(h):
        p = model[1].weight[:, None].expand(4, 2) if places else model[1].weight.expand(8)
        return torch.where(
            h > 0, h, Times.apply(h.clamp(max=0), p.expand_as(h[0]), uses, False, True, True)
        )

    penalty(lambda x: network(x, act), x).backward()
    squares = sum((u.x * u.g).square().sum(0) for u in uses)
    squares = {"one slope": squares.sum()[None], "channels before places": squares.sum(-1)}.get(
        shape, squares
    )
    A, G = held(kfac)["1.weight"]
    assert_close((A * G.reshape(1, 1))[0], 6 * squares)


def test_second_derivatives_of_a_prelu_are_reported():
    model = double(lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Tanh(), nn.Linear(4, 1)))
    plain = copy.deepcopy(model)
    kfac = KFAC(model, kl_clip=None)
    for net in (model, plain):
        laplacian(net, inside()).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(gradient(p), gradient(q))
    with pytest.warns(RuntimeWarning, match="has no part in their statistics: '1.weight'$"):
        kfac.step()


def test_a_function_that_gets_the_weight_and_a_weight_norm():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 4)
            self.outer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))

        def forward(self, x):
            return self.outer(torch.tanh(F.linear(x, self.inner.weight, self.inner.bias)))

    model, uses = double(Functional), [[], []]
    kfac = KFAC(model, kl_clip=None)
    penalty(model, numbers(8, 3)).backward()
    with pytest.warns(RuntimeWarning, match="create_graph.*'outer.magnitude'"):
        kfac.step()
    model.zero_grad()
    magnitude = model.outer.parametrizations.weight.original0
    direction = model.outer.parametrizations.weight.original1
    length = magnitude.detach() / direction.detach().norm()

    def reference(x):
        x = torch.tanh(Times.apply(x, model.inner.weight, uses[0]) + model.inner.bias)
        return Times.apply(x, model.outer.weight, uses[1]) + model.outer.bias

    penalty(reference, numbers(8, 3)).backward()
    found = held(kfac)
    names = [n for n, (A, G) in found.items() if A.ndim == G.ndim == 3 and A.shape[-1] == 4]
    assert names[0] == "inner"
    A, G = expected_factors(uses[0], 8, True)
    assert_close(found["inner"][0][0], A)
    assert_close(found["inner"][1][0], G)
    scaled = [
        u._replace(**{"x" if u.turned else "g": (u.x if u.turned else u.g) * length}) for u in uses[1]
    ]
    A, G = expected_factors(scaled, 8, False)  # its bias is by itself
    name = next(n for n in found if "original1" in n or n == "outer")
    assert_close(found[name][0][0], A)
    assert_close(found[name][1][0], G)


# ---- the loop around it -------------------------------------------------------------------------


def trained(model, batches, loss, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = KFAC(model, optimizer, damping=0.03, **settings)
    for batch in batches:
        kfac.zero_grad()
        loss(model, batch).backward()
        kfac.step()
    return kfac


def test_points_that_stay_keep_no_hooks_and_no_graph():
    model, points = double(network), inside()
    alive = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            alive.append(weakref.ref(ctx))
            return y.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    def loss(model, batch):
        return slopes(model, points).square().mean() + Noted.apply(model(points)).square().mean()

    trained(model, range(4), loss)
    assert len(alive) == 4
    assert not any(reference() for reference in alive)
    assert not points._backward_hooks


def test_derivatives_that_come_later_are_seen_at_once():
    model = double(network)
    kfac = trained(model, range(2), lambda model, _: model(inside()).square().mean())
    kfac.zero_grad()
    slopes(model, inside()).square().mean().backward()
    first = kfac._engine.capture.take_statistics()[0]
    assert float(first.transposed.rows) == 6


def test_layers_that_shared_an_input_part_when_a_loss_of_derivatives_comes():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

        def forward(self, x):
            x = torch.tanh(self.first(x))
            return sum(torch.tanh(head(x)) for head in self.heads)

    model = double(Heads)
    kfac = trained(model, range(2), lambda model, _: model(inside()).square().mean())
    assert "shares A with" in str(kfac.routing())
    for _ in range(3):
        kfac.zero_grad()
        penalty(model, inside().detach()).backward()
        kfac.step()
    assert "shares A with" not in str(kfac.routing())
    fresh = double(Heads)
    fresh.load_state_dict(model.state_dict())
    kfac = trained(fresh, range(1), lambda model, _: penalty(model, inside().detach()))
    assert "shares A with" not in str(kfac.routing())


def test_micro_batches_and_a_pass_that_was_thrown_away():
    x = numbers(8, 3)
    states = []
    for parts in ([x], [x[:4], x[4:]]):
        model = double(network)
        kfac = KFAC(model, kl_clip=None)
        penalty(model, 2 * x).backward()
        model.zero_grad()
        for part in parts:
            (penalty(model, part) / len(parts)).backward()
        kfac.step()
        states.append(held(kfac))
    for name, factors in states[0].items():
        for a, b in zip(factors, states[1][name], strict=True):
            assert_close(a, b)


def test_second_moments_in_the_eigenbasis():
    model = double(network)

    def loss(model, batch):
        return laplacian(model, batch).square().mean() + model(batch).square().mean()

    kfac = trained(model, [inside()] * 2, loss, compute_method="ekfac", inv_update_steps=9)
    kfac.zero_grad()
    bases = [capture.bases for capture in kfac._engine.capture.by_layer]
    loss(model, inside()).backward()
    taken = kfac._engine.capture.take_statistics()
    model.zero_grad()
    reference = Reference(model)
    loss(reference, inside()).backward()
    for (q_a, q_g), uses, layer in zip(bases, reference.uses, taken, strict=True):
        expected = 0
        for u in uses:
            a = with_one(u.x) if u.own else F.pad(u.g if u.turned else u.x, (0, 1))
            g = u.x if u.turned else u.g
            expected = expected + (g @ q_g[0]).square().T @ (a @ q_a[0]).square()
        assert_close(layer.products[0], expected)


def test_norms_under_a_laplacian_are_reported():
    model = double(lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)))
    with pytest.warns(RuntimeWarning, match="create_graph=True.*'1'") as seen:
        trained(model, [inside()], lambda model, x: laplacian(model, x).square().mean())
    assert "'0'" not in str(seen[0].message)


def test_batched_derivatives_are_reported_and_are_what_they_are_without_kfac():
    def loss(model):
        x = inside()
        y = model(x)
        each = torch.eye(6, dtype=x.dtype)[..., None]
        (slope,) = torch.autograd.grad(y, x, each, create_graph=True, is_grads_batched=True)
        return slope.square().mean() + y.square().mean()

    model, plain = double(network), double(network)
    kfac = KFAC(model, kl_clip=None)
    loss(model).backward()
    loss(plain).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad)
    with pytest.warns(RuntimeWarning, match="create_graph=True.*'0', '2', '4'"):
        kfac.step()


def test_derivatives_that_are_looked_at_and_not_trained_on_change_nothing():
    runs = []
    for looks in (False, True):
        model = double(network)

        def loss(model, x, looks=looks):
            if looks:
                slopes(model, x).square().mean().item()
            return model(x).square().mean()

        trained(model, [inside()] * 3, loss)
        runs.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_adaptive_kfac_of_values_and_slopes():
    model, points = double(network), numbers(64, 3)
    optimizer = AdaptiveKFAC(KFAC(model, damping=0.1, compute_method="inverse"))

    def closure():
        x = points.clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        residuals = torch.cat(
            [y - points.prod(1, keepdim=True), slope[:, :1] - points[:, 1:].prod(1, keepdim=True)]
        )
        return residuals.square().mean(), residuals

    losses = [float(optimizer.step(closure)) for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    assert optimizer.skipped_steps == 0


def test_checkpointed_layers():
    states = []
    for checkpointed in (False, True):
        model = double(network)
        kfac = KFAC(model, kl_clip=None)
        x = inside()
        y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (slope.square().mean() + y.square().mean()).backward()
        kfac.step()
        states.append((held(kfac), [p.grad for p in model.parameters()]))
    for a, b in zip(states[0][1], states[1][1], strict=True):
        assert_close(a, b)
    for name, factors in states[0][0].items():
        for a, b in zip(factors, states[1][0][name], strict=True):
            assert_close(a, b)


def test_a_resumed_run_is_the_uninterrupted_one():
    def loss(model, x):
        return penalty(model, x.detach())

    model = double(network)
    kfac = trained(model, [inside()] * 3, loss)
    weights, state = copy.deepcopy((model.state_dict(), kfac.state_dict()))
    fresh = double(network)
    fresh.load_state_dict(weights)
    again = KFAC(fresh, torch.optim.SGD(fresh.parameters(), lr=0.05, momentum=0.9), damping=0.03)
    again.load_state_dict(state)
    for one, own in ((model, kfac), (fresh, again)):
        for _ in range(3):
            own.zero_grad()
            loss(one, inside()).backward()
            own.step()
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q)
