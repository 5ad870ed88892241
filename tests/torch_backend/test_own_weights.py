"""Linear layers and convolutions that are no subclass of torch's.

The oracles are torch's own layers with the same weights, and rows written out.
"""

from __future__ import annotations

import copy
import functools
import linecache
import math
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn import functional as functions

from conftest import assert_close
from suite.torch import KFAC, sources
from suite.torch.own_weights import OwnWeight, own_weights
from torch_backend.rows_by_loops import double, held, loss_of, numbers, stepped, with_one
from torch_backend.test_functional import Pooled


class Own(nn.Module):
    """With a weight, a bias and a gain."""

    def __init__(self, *shape, bias=True):
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(shape[0])) if bias else None
        self.scale, self.groups = 0.5, 2
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight, 0, 1 / math.sqrt(self.weight.shape[-1]))


class Linear(Own):
    """As torch_geometric's."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def linear(x, W, b=None):
    """As zuko's."""
    if W.dim() == 2:
        return F.linear(x, W, b)
    else:
        x = torch.einsum("...ij,...j->...i", W, x)
    return x if b is None else x + b


class ByFunction(Own):
    def forward(self, x):
        return linear(x, self.weight, b=self.bias)


class Keywords(Own):
    def forward(self, x):
        if x.shape[-1] != self.weight.size(1):
            raise ValueError(x.shape)
        return self._run(x.to(self.weight.dtype))

    def _run(self, x):
        bias = self.bias
        if bias is None:
            return functions.linear(x, weight=self.weight)
        return functions.linear(x, weight=self.weight, bias=bias)


class Derived(Linear):
    def forward(self, x):
        return super().forward(2 * x) / 2


class Equalized(Own):
    """Equalized learning rates (Karras et al. 2018), as StyleGAN's layers have them."""

    def forward(self, x):
        weight = self.weight.to(x.dtype) * self.scale
        return torch.addmm(self.bias.unsqueeze(0), x, weight.t())


class Convolution(Own):
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, stride=2, padding=1, groups=self.groups)


class Matrix(Own):
    """(in, out), as in graph networks."""

    def forward(self, x):
        return x.matmul(self.weight) if self.bias is None else x @ self.weight + self.bias


class HalfMatrix(Own):
    def forward(self, x):
        return torch.mm(x, self.weight * (1 / math.sqrt(4)))


class Added(Own):
    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class LastWithFirst(Own):
    def forward(self, x):
        return torch.tensordot(x, self.weight, dims=1)


class LastWithLast(Own):
    def forward(self, x):
        return torch.tensordot(x, self.weight.to(x.dtype), ([-1], [1]))


class WeightInFront(Own):
    def forward(self, x):
        return torch.tensordot(self.weight, x, dims=([0], [2])).movedim(0, -1)


class ByAxesThatAreComputed(Own):
    """The axes are not in the source: the weight is a free parameter, the bias's use is seen."""

    def forward(self, x):
        last = x.ndim - 1
        return torch.tensordot(x, self.weight, dims=([last], [0]))


def routes(kfac):
    return {route.parameter: (route.treatment, route.factors) for route in kfac.routing()}


def trained(model, x, **settings):
    kfac = KFAC(
        model, torch.optim.SGD(model.parameters(), lr=0.1), kl_clip=None, damping=0.01, **settings
    )
    for _ in range(3):
        kfac.zero_grad()
        model(x).square().mean().backward()
        kfac.step()
    return kfac


class LayerNorm(Own):
    """nanoGPT's, with a bias or without."""

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Norm32(Own):
    """In single precision or better."""

    def forward(self, x):
        bias = self.bias
        return F.layer_norm(x, x.shape[-1:], bias=bias, weight=self.weight.to(x.dtype)).type_as(x)


class RMSNorm(Own):
    def forward(self, x):
        return F.rms_norm(x, (x.size(-1),), self.weight, eps=1e-6)


class GroupNorm(Own):
    def forward(self, x):
        return F.group_norm(x, self.groups, self.weight, self.bias)


class WithoutCalling(nn.Module):
    """Runs a layer past its hooks."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.weight = layer.weight

    def forward(self, x):
        return self.layer.forward(x)


@pytest.mark.parametrize("kind", [LastWithFirst, LastWithLast, WeightInFront])
def test_a_product_along_one_axis_of_both_is_a_layer(kind):
    shape = (3, 4) if kind is LastWithLast else (4, 3)
    model = double(lambda: Pooled(kind(*shape, bias=False), 3))
    other = double(lambda: Pooled(nn.Linear(4, 3, bias=False), 3))
    weight = model.body.weight.detach()
    state = {**model.state_dict(), "body.weight": weight if kind is LastWithLast else weight.T}
    other.load_state_dict(state)
    kfac, expected = (stepped(one, numbers(6, 5, 4)) for one in (model, other))
    assert routes(kfac)["body.weight"] == ("kfac", "4x4, 3x3")
    for own, others in zip(held(kfac)["body"], held(expected)["body"], strict=True):
        assert_close(own, others)


def test_axes_that_are_computed_make_a_free_parameter():
    model = double(lambda: Pooled(ByAxesThatAreComputed(4, 3, bias=False), 3))
    assert routes(stepped(model, numbers(6, 5, 4)))["body.weight"] == ("kfac", "diag 12")


LAYERS = {
    "linear": (lambda: Linear(3, 4), lambda: nn.Linear(4, 3), (9, 4)),
    "linear without bias": (lambda: Linear(3, 4, bias=False), lambda: nn.Linear(4, 3, False), (9, 4)),
    "a function": (lambda: ByFunction(3, 4), lambda: nn.Linear(4, 3), (9, 4)),
    "methods": (lambda: Keywords(3, 4, bias=False), lambda: nn.Linear(4, 3, False), (9, 4)),
    "convolution": (
        lambda: Convolution(6, 2, 3, 3),
        lambda: nn.Conv2d(4, 6, 3, 2, 1, groups=2),
        (9, 4, 5, 6),
    ),
    "norm": (lambda: LayerNorm(4), lambda: nn.LayerNorm(4), (9, 5, 4)),
    "norm without bias": (
        lambda: LayerNorm(4, bias=False),
        lambda: nn.LayerNorm(4, bias=False),
        (9, 5, 4),
    ),
    "norm, by keywords": (lambda: Norm32(4), lambda: nn.LayerNorm(4), (9, 5, 4)),
    "rms": (lambda: RMSNorm(4, bias=False), lambda: nn.RMSNorm(4, eps=1e-6), (9, 5, 4)),
    "group": (lambda: GroupNorm(4), lambda: nn.GroupNorm(2, 4), (9, 4, 5, 6)),
    "forward": (
        lambda: WithoutCalling(Linear(3, 4)),
        lambda: WithoutCalling(nn.Linear(4, 3)),
        (9, 4),
    ),
}


def pair(case):
    """A model with the layer, one with torch's, and an input."""
    make, plain, shape = LAYERS[case]
    model = double(lambda: Pooled(make(), make().weight.shape[0]))
    other = double(lambda: Pooled(plain(), plain().weight.shape[0]))
    other.load_state_dict(model.state_dict())
    return model, other, numbers(*shape)


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_that_is_none_of_torchs_is_preconditioned_like_torchs(case, method):
    model, other, x = pair(case)
    kfac, expected = (trained(m, x, compute_method=method, inv_update_steps=2) for m in (model, other))
    assert routes(kfac) == routes(expected)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_norm_whose_shift_the_optimizer_does_not_move_is_a_scale_alone():
    model = nn.Sequential(nn.Linear(3, 4), LayerNorm(4), nn.Linear(4, 2)).double()
    moved = [p for name, p in model.named_parameters() if name != "1.bias"]
    kfac = KFAC(model, torch.optim.SGD(moved, lr=0.1))
    assert routes(kfac)["1.weight"] == ("kfac", "diag 4")
    assert routes(kfac)["1.bias"][0] == "plain"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("case", ["linear", "convolution", "norm"])
def test_it_is_seen_in_checkpoints_compiled_and_in_copies(case):
    torch._dynamo.reset()
    model, other, x = pair(case)
    trained(other, x)
    variants = [copy.deepcopy(model) for _ in range(3)]
    variants[0].checkpointed = True
    trained(variants[0], x)
    kfac = KFAC(
        variants[1], torch.optim.SGD(variants[1].parameters(), lr=0.1), kl_clip=None, damping=0.01
    )
    variants[2], last = copy.deepcopy((variants[1], kfac))
    runs = [(torch.compile(variants[1], backend="aot_eager"), kfac), (variants[2], last)]
    for run, optimizer in runs:
        for _ in range(3):
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()
    for variant in variants:
        for a, b in zip(variant.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda: Matrix(4, 3, bias=False), 1),
        (lambda: HalfMatrix(4, 3, bias=False), 0.5),
        (lambda: Equalized(3, 4), 0.5),
    ],
)
def test_statistics_of_a_matrix_are_those_of_its_rows(make, factor):
    """By the chain rule: dL/dW = x (factor g)ᵀ."""
    x = numbers(6, 4)
    model = double(lambda: Pooled(make(), 3))
    y = model.body(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(loss_of(model.head(y), "sum"), y)
    kfac = stepped(model, x, reduction="sum")
    A, G = held(kfac)["body"]
    assert_close(A[0], x.T @ x / len(x))
    assert_close(G[0], factor**2 * g.T @ g)


@pytest.mark.parametrize("make", [lambda: Matrix(3, 3), lambda: Added(3, 3)])
def test_a_bias_beside_a_matrix_is_a_block_of_its_own(make):
    x = numbers(6, 3)
    model = double(lambda: Pooled(make(), 3))
    y = model.body(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(loss_of(model.head(y), "sum"), y)
    factors = held(stepped(model, x, reduction="sum"))
    assert_close(factors["body"][0][0], x.T @ x / len(x))
    assert_close(factors["body"][1][0], g.T @ g)
    A, G = factors["body.bias"]
    assert_close(A * G[:, 0], g.square().sum(0)[None])


class Heads(nn.Module):
    """Attention without softmax, whose weights are (d, heads, k) and (heads, k, d)."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys = (nn.Parameter(0.3 * numbers(4, 2, 3, seed=i)) for i in (1, 2))
        self.out = nn.Parameter(0.3 * numbers(2, 3, 5, seed=3))
        self.value = nn.Parameter(0.3 * numbers(2, 3, 4, seed=4))

    def weights(self):
        """As matrices (in, out)."""
        flat = self.queries.flatten(1), self.keys.flatten(1), self.out.flatten(0, 1)
        return *flat, self.value.flatten(0, 1).T

    def forward(self, x):
        q, k = torch.einsum("btd,dhk->bthk", x, self.queries), self.projected(x)
        v = torch.einsum("...d,hkd->...hk", x, self.value)
        scores = torch.einsum("bthk,bshk->bhts", q, k)
        values = torch.tanh(torch.einsum("bhts,bshk->bthk", scores, v))
        return torch.tanh(torch.einsum("hko,bthk->bto", self.out, values))

    def projected(self, x):
        return torch.einsum("btd,dhk->bthk", x, self.keys)


class OfEinops(Heads):
    """einops' own function calls torch's, with a letter for each name."""

    def projected(self, x):
        return einsum(x, self.keys, "batch t d, d heads k -> batch t heads k")


def einsum(x, y, pattern):
    assert pattern == "batch t d, d heads k -> batch t heads k"
    return torch.einsum("abc,cde->abde", x, y)


einsum.__module__ = "einops.einops"


class Linears(nn.Module):
    def __init__(self, heads):
        super().__init__()
        sides = [(4, 6), (4, 6), (6, 5), (4, 6)]
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False).double() for i, o in sides)
        with torch.no_grad():
            for layer, weight in zip(self.layers, heads.weights(), strict=True):
                layer.weight.copy_(weight.T)

    def weights(self):
        return [layer.weight.T for layer in self.layers]

    def forward(self, x):
        q, k, v = (self.layers[i](x).unflatten(-1, (2, 3)) for i in (0, 1, 3))
        scores = torch.einsum("bthk,bshk->bhts", q, k)
        values = torch.tanh(torch.einsum("bhts,bshk->bthk", scores, v))
        return torch.tanh(self.layers[2](values.flatten(2)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "settings",
    [
        *({"compute_method": method, "inv_update_steps": 2} for method in ("eigen", "inverse", "ekfac")),
        {"weight_sharing": "reduce"},
        {"packed_factors": True, "compute_method": "inverse"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [Heads, OfEinops])
def test_weights_of_einsums_with_axes_for_heads_are_matrices(kind, settings):
    x, ends = numbers(24, 3, 4), []
    heads = double(kind)
    for body in (heads, Linears(heads)):
        model = double(lambda body=body: Pooled(body, 5))
        kfac = trained(model, x, **settings)
        assert {factors for _, factors in list(routes(kfac).values())[:2]} == {"4x4, 6x6"}
        assert all(route.treatment == "kfac" for route in kfac.routing())
        ends.append([*body.weights(), model.head.weight])
    for got, expected in zip(*ends, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


class Chebyshev(nn.Module):
    """A Kolmogorov-Arnold layer in Chebyshev polynomials, with weights (in, out, degree)."""

    def __init__(self, d_in, d_out, degree):
        super().__init__()
        self.coefficients = nn.Parameter(0.3 * numbers(d_in, d_out, degree + 1))
        self.register_buffer("degrees", torch.arange(degree + 1))

    def polynomials(self, x):
        return torch.cos(torch.acos(0.99 * torch.tanh(x))[..., None] * self.degrees)

    def forward(self, x):
        return torch.einsum("bid,iod->bo", self.polynomials(x), self.coefficients)


class ByLinear(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.of = [layer]  # no module of it
        d_in, d_out, degrees = layer.coefficients.shape
        self.linear = nn.Linear(d_in * degrees, d_out, bias=False).double()
        with torch.no_grad():
            self.linear.weight.copy_(layer.coefficients.permute(1, 0, 2).flatten(1))

    def forward(self, x):
        return self.linear(self.of[0].polynomials(x).flatten(1))


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_weights_of_einsums_with_outputs_between_inputs_are_matrices(method):
    x = numbers(24, 3)
    layers = nn.Sequential(Chebyshev(3, 4, 2), Chebyshev(4, 2, 3)).double()
    as_linear = nn.Sequential(*map(ByLinear, layers))
    kfacs = [
        trained(model, x, compute_method=method, inv_update_steps=2) for model in (layers, as_linear)
    ]
    assert {factors for _, factors in routes(kfacs[0]).values()} == {"9x9, 4x4", "16x16, 2x2"}
    for layer, like in zip(layers, as_linear, strict=True):
        own = layer.coefficients.permute(1, 0, 2).flatten(1)
        torch.testing.assert_close(own, like.linear.weight, rtol=1e-9, atol=1e-11)


class Others(nn.Module):
    """A weight in other einsums than products of rows with it."""

    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = nn.Parameter(numbers(4, 3)), kind
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        if self.kind == "broadcast":
            return torch.einsum("ni,io->no", x.mean(-1, keepdim=True), self.weight)
        if self.kind == "summed":
            return torch.einsum("nti,io->no", x.unflatten(0, (3, 2)), self.weight)
        if self.kind == "of itself":
            return torch.einsum("io,jo->ij", self.weight, self.weight)[:2] @ x.T
        return torch.einsum("ni,io,o->no", x, self.weight, x.new_ones(3))


@pytest.mark.parametrize("kind", ["broadcast", "summed", "of itself", "of three"])
def test_einsums_that_are_not_understood_are_reported(kind):
    model = Others(kind).double()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(numbers(6, 4)).square().mean().backward()
    with pytest.warns(RuntimeWarning) as warned:
        kfac.step()
    assert all("'weight'" in str(one.message) for one in warned)
    assert routes(kfac)["weight"][0] == "waiting"


class Alternating(nn.Module):
    """A weight by several ways that are one layer's."""

    def __init__(self):
        super().__init__()
        self.first, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
        self.second = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        h = torch.tanh(F.linear(x, self.first, self.b))
        w = self.second
        for _ in range(2):
            h = torch.tanh(h @ w)
        return h


def test_a_module_may_have_several_and_use_one_twice():
    x = numbers(6, 4)
    model = double(Alternating)
    found = held(stepped(model, x, reduction="sum"))
    assert found.keys() == {"first", "second"}
    h = torch.tanh(with_one(x) @ torch.cat([model.first, model.b[:, None]], 1).detach().T)
    outputs, inputs = [], []
    for _ in range(2):
        inputs.append(h)
        outputs.append((h @ model.second).detach().requires_grad_() if not outputs else h @ model.second)
        h = torch.tanh(outputs[-1])
    g = torch.autograd.grad(loss_of(h, "sum"), outputs)
    A = sum(a.detach().T @ a.detach() for a in inputs) / 12
    assert_close(found["second"][0][0], A)
    assert_close(found["second"][1][0], 2 * sum(one.T @ one for one in g) / 2)


class Cosines(Own):
    """Of the angle between an input and the weight of each class (ArcFace; Deng et al. 2019)."""

    def forward(self, x):
        return F.linear(F.normalize(x), F.normalize(self.weight))


class CosinesByTranspose(Own):
    def forward(self, x):
        weight = F.normalize(self.weight, p=2, dim=-1)
        return F.normalize(x) @ weight.t()


class CosinesOfColumns(Own):
    """As LDAM's (Cao et al. 2019)."""

    def forward(self, x):
        return F.normalize(x, dim=1).mm(F.normalize(self.weight, dim=0))


class CosinesOfColumnsHalved(Own):
    def forward(self, x):
        return F.normalize(x).mm(F.normalize(self.weight * 3, dim=0) / 2)


@pytest.mark.parametrize("kind", [Cosines, CosinesByTranspose, CosinesOfColumns, CosinesOfColumnsHalved])
def test_rows_of_a_normalized_weight_count_as_often_as_they_are_long(kind):
    """By the chain rule, but for what normalizing projects out."""
    turned = "Columns" in kind.__name__
    model = double(lambda: nn.Sequential(kind(*((4, 3) if turned else (3, 4)), bias=False)))
    x = numbers(9, 4)
    weight = model[0].weight.detach()
    rows = weight.T if turned else weight
    lengths = (0.5 if "Halved" in kind.__name__ else 1) / rows.norm(dim=1)
    a = x / x.norm(dim=1, keepdim=True)
    y = (a @ (rows * lengths[:, None]).T).requires_grad_()
    (g,) = torch.autograd.grad(loss_of(y, "sum"), y)
    kfac = KFAC(model, kl_clip=None, loss_reduction="sum")
    loss_of(model(x), "sum").backward()
    kfac.step()
    assert kfac.routing()["0.weight"].treatment == "kfac"
    ((A, G),) = held(kfac).values()
    assert_close(A[0], a.T @ a / 9)
    assert_close(G[0], (g * lengths).T @ (g * lengths))


def unit(x, eps=1e-4):
    """Rows of about length 1 an entry, as in EDM2's layers (Karras et al. 2024)."""
    lengths = torch.linalg.vector_norm(x, dim=list(range(1, x.ndim)), keepdim=True)
    return x / torch.add(eps, lengths, alpha=np.sqrt(lengths.numel() / x.numel()))


def unit_packed(x, eps=1e-4):
    """By what einops' `pack` and `unpack` do to one tensor."""
    flat = torch.cat([x.reshape(x.shape[0], -1)], dim=1)
    flat = F.normalize(flat, dim=-1, eps=eps) * flat.shape[1] ** 0.5
    return flat[:, 0 : flat.shape[1]].reshape(x.shape)


class PreservesMagnitudes(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(numbers(*shape))

    def forward(self, x, gain=2):
        w = self.weight.to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.weight.copy_(unit(w))
        w = unit(w)
        w = w * (gain / np.sqrt(w[0].numel()))
        w = w.to(x.dtype)
        return x @ w.t() if w.ndim == 2 else F.conv2d(x, w)


class PreservesPackedMagnitudes(PreservesMagnitudes):
    def forward(self, x):
        if self.training:
            with torch.no_grad():
                renewed = unit_packed(self.weight)
                self.weight.copy_(renewed)
        weight = unit_packed(self.weight, eps=1e-4) * 2 / math.sqrt(4)
        return F.linear(x, weight) if self.weight.ndim == 2 else F.conv2d(x, weight)


@pytest.mark.parametrize("kernel", [(), (1, 1)])
@pytest.mark.parametrize("kind", [PreservesMagnitudes, PreservesPackedMagnitudes])
def test_a_weight_whose_rows_a_function_scales_and_that_is_renewed_is_a_layers(kind, kernel):
    model = nn.Sequential(kind(3, 4, *kernel))
    x = numbers(9, 4)
    for _ in range(6):  # until the weight is renewed as it is
        model(x.reshape(9, 4, *kernel))
    weight = model[0].weight.detach().reshape(3, 4).clone()
    used = model(torch.eye(4, dtype=x.dtype).reshape(4, 4, *kernel)).detach().reshape(4, 3).T
    lengths = used[:, 0] / weight[:, 0]
    assert_close(used, weight * lengths[:, None])
    y = (x @ used.T).requires_grad_()
    (g,) = torch.autograd.grad(loss_of(y, "sum"), y)
    kfac = KFAC(model, kl_clip=None, loss_reduction="sum")
    loss_of(model(x.reshape(9, 4, *kernel)).reshape(9, 3), "sum").backward()
    kfac.step()
    assert kfac.routing()["0.weight"].treatment == "kfac"
    ((A, G),) = held(kfac).values()
    assert_close(A[0], x.T @ x / 9)
    assert_close(G[0], (g * lengths).T @ (g * lengths))


@pytest.mark.parametrize("dim", [0, (1,)])
def test_what_else_is_normalized_is_no_layer_and_its_bias_stays_one(dim):
    class Other(Own):
        def forward(self, x):
            return F.linear(x, F.normalize(self.weight, dim=dim), self.bias)

    model = double(lambda: nn.Sequential(Other(3, 4), nn.Linear(3, 2)))
    kfac = KFAC(model)
    model(numbers(9, 4)).square().mean().backward()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kfac.step()
    assert any("0.weight" in str(one.message) for one in told)
    routing = kfac.routing()
    assert [routing[f"0.{name}"].treatment for name in ("weight", "bias")] == ["waiting", "kfac"]


# ---- what the source says ----------------------------------------------------------------------------


class Variants(nn.Module):
    """A forward for each of the cases below."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
        self.other, self.gain = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(()))
        self.stack = nn.Parameter(torch.ones(2, 4, 4))
        self.register_buffer("mask", torch.ones(4, 4))
        self.scale, self.groups = 2.0, 0

    @property
    def doubled(self):
        return self.weight * 2

    @staticmethod
    def apply_to(x, weight):
        return x @ weight

    def multiply(self, x, weight, /, bias):
        return F.linear(x, weight) + bias * 0


def one(name="weight", bias="", axes=0, groups=1, turned=False):
    return [OwnWeight(name, bias, axes, groups, turned)]


def plain(self, x):
    return F.linear(x, self.weight, self.bias)


def bias_elsewhere(self, x):
    return F.linear(x, self.weight, self.bias) + self.bias


def bias_of_a_kind(self, x):
    return F.linear(x, self.weight, self.bias * self.scale)


def now_and_then(self, x):
    if self.training:
        return F.linear(x, self.weight, self.bias)
    return F.linear(x, self.weight)


def gained(self, x):
    return x @ (self.gain * self.weight).transpose(-1, -2)


def by_root(self, x):
    return x @ (self.weight / (self.groups * 0.5) ** 0.5)


def on_one_line(self, x):
    w = self.weight; return x @ w  # fmt: skip # noqa: E702


def of_a_basis(self, x):
    basis = self.other
    if x.ndim > 1:
        basis = (self.weight @ basis.view(3, -1)).view(4, -1)
    return x @ basis


def of_a_basis_by_einsum(self, x):
    return x @ torch.einsum("kb,bo->ko", self.weight, self.other * self.scale)


def of_what_is_filled_in(self, x):
    other = self.other.repeat(2, 1)
    other[:, :2] = x
    return other @ self.weight


def of_what_is_changed(self, x):
    other = self.other.repeat(2, 1)
    other.add_(x)
    return other @ self.weight


def of_noise(self, x):
    return (torch.randn(3, 4) * self.other) @ self.weight


def of_what_may_be_data(self, x):
    other = self.other
    other = other + x
    return self.weight @ other


def turned_and_scaled(self, x):
    return x @ (self.weight.t() * self.scale)


def normalized(self, x):
    return F.linear(x, F.normalize(self.weight), self.bias * 2)


def normalized_columns(self, x):
    return x @ F.normalize(self.weight, 2, -2)


def normalized_along_outputs(self, x):
    return F.linear(x, F.normalize(self.weight, dim=0), self.bias)


def normalized_along_some_axis(self, x):
    return F.linear(x, F.normalize(self.weight, dim=(0, 1)))


def normalized_as_told(self, x):
    told = (2, 0)
    return F.linear(x, F.normalize(self.weight, *told))


def turned_and_normalized(self, x):
    return x @ F.normalize(self.weight.t())


def normalized_stacks(self, x):
    return torch.bmm(x, F.normalize(self.stack))


def scaled_turned_and_cast(self, x):
    return F.linear(x, (self.weight * self.scale).t().contiguous())


def unit_columns(w):
    return w / w.norm(dim=0)


def by_a_function(self, x):
    return F.linear(x, unit(self.weight, 1e-3), self.bias * 2)


def by_a_function_of_columns(self, x):
    return F.linear(x, unit_columns(self.weight))


def by_a_function_of_data(self, x):
    return F.linear(x, unit(self.weight, x))


def by_a_function_of_a_transpose(self, x):
    return x @ unit(self.weight.t())


def renewed(self, x):
    with torch.no_grad():
        self.weight.mul_(0.5)
    return F.linear(x, self.weight)


def times_an_argument(self, x, gain=1.0):
    return F.linear(x, self.weight * (gain / np.sqrt(self.weight[0].numel())))


def times_what_is_given(self, x, gain=None):
    return F.linear(x, self.weight * gain)


def annotated(self, x):
    w: torch.Tensor = self.weight
    return F.linear(x, w)


def positional(self, /, x):
    return helper(self, x) + F.linear(x, self.weight)


def helper(module, x):
    return x * module.gain


def by_another_F(self, x, F=None):
    return F.linear(x, self.weight)


def imported_here(self, x):
    from math import nan as F

    return F.linear(x, self.weight)


def of_itself(self, x):
    global K
    K = (
        1 *
        K)  # fmt: skip
    return F.linear(x, self.weight * K)


K = 1.0


def grouped(self, x):
    return F.conv1d(x, self.weight, groups=self.groups)


def by_number(self, x):
    c = -self.scale / math.sqrt(x.shape[-1] if isinstance(x, int) else 4)
    return x @ (self.weight / self.scale * c).T.contiguous()


def turned_twice(self, x):
    return F.linear(x, self.weight.t().T)


def of_a_transpose(self, x):
    return F.linear(x, self.weight.mT)


def asked(self, x):
    if self.weight is None or not self.weight.requires_grad:
        return x
    return x.view(-1, self.weight.shape[1]).mm(self.weight).to(self.weight.device)


def asked_its_length(self, x):
    return x.reshape(-1, len(self.weight)) @ self.weight


def asked_by_another_len(self, x, len=torch.Tensor.sum):
    return x * len(self.weight) @ self.weight


def of_another(self, x):
    return F.linear(x, self.weight) @ self.other


def both_ways(self, x):
    return F.linear(x, self.weight) @ self.weight


def masked(self, x):
    return F.linear(x, self.weight * self.mask)


def shifted(self, x):
    return F.linear(x, self.weight + 1)


def product_of_two(self, x):
    return x @ (self.weight @ self.other)


def from_the_left(self, x):
    return self.weight @ x


def by_einsum(self, x):
    return torch.einsum("...i,oi->...o", x, self.weight) @ self.other


def by_einsums_both_ways(self, x):
    return torch.einsum("ni,oi->no", x, self.weight) + torch.einsum("ni,io->no", x, self.weight)


def both_ways_once_scaled(self, x):
    return F.linear(x, 2 * self.weight) @ self.weight


def by_einsum_of_sums(self, x):
    return torch.einsum("ni,oi->o", x, self.weight) + torch.einsum("ni,oo->no", x, self.other)


def by_einsum_of_a_multiple(self, x):
    return torch.einsum("ni,oi->no", x, 2 * self.weight)


def penalized(self, x):
    self.penalty = self.weight.square().sum()
    return F.linear(x, self.weight)


def set_twice(self, x):
    w = self.weight
    w = w.tanh()
    return x @ w


def kept(self, x):
    w = self.weight
    self.last = w
    return x @ w


def handed_on(self, x):
    return self.apply_to(x, self.weight)


def handed_to_a_function(self, x):
    return linear(x, self.weight, self.bias)


def handed_to_a_method(self, x):
    return self.multiply(x, self.weight, bias=self.gain)


def handed_on_and_on(self, x):
    return linear_of_pairs((x, self.gain), weight=self.weight)


def linear_of_pairs(pair, *, weight):
    return linear(pair[0], weight)


def handed_a_stack(self, x):
    return linear(x, self.weight, None) + linear(x, self.stack)


def handed_to_what_changes_it(self, x):
    return linear_of_twice(x, self.weight) + F.linear(x, self.weight)


def linear_of_twice(x, weight):
    weight = weight * 2
    return F.linear(x, weight)


def handed_to_what_uses_it_otherwise(self, x):
    return linear_and_more(x, self.weight)


def linear_and_more(x, weight):
    return F.linear(x, weight) + weight[0]


def handed_in_a_list(self, x):
    return linear(*(x, self.weight))


def handed_to_itself(self, x):
    return endless(x, self.weight)


def endless(x, weight):
    return F.linear(endless(x, weight), weight)


def handed_twice_as_large(self, x):
    return linear(x, 2 * self.weight)


def handed_to_torch(self, x):
    return torch.nn.functional.cosine_similarity(x, self.weight)


def gain_handed_to_a_lambda(self, x):
    return unreadable(F.linear(x, self.weight), self.gain)


unreadable = lambda x, gain: x * gain  # noqa: E731


def spread(self, x):
    return F.linear(*(x, self.weight))


def by_property(self, x):
    return x @ self.doubled


def by_index(self, x):
    return x @ self.weight + self.weight[0]


def of_an_inner_function(self, x):
    def inner(x):
        return F.linear(x, self.weight)

    return inner(x)


def kernels(self, x):
    return F.conv1d(x, self.weight[:, :, None])


def in_branches(self, x):
    if self.groups:
        w = self.weight / self.scale
        x = torch.tanh(x @ w)
    else:
        w = self.weight / (2 * self.scale) ** 0.5
        x = x @ w
    return x


def after_branches(self, x):
    if self.groups:
        w = self.weight * 0.5
    else:
        w = self.weight
    return F.linear(x, w, self.bias)


def step_by_step(self, x):
    w = self.weight
    w = w / self.scale
    w = w.float()
    return x @ w


def another_in_a_branch(self, x):
    w = self.weight
    if self.groups:
        w = self.other
    return x @ w


def masked_in_a_branch(self, x):
    w = self.weight
    if self.groups:
        w = w * self.mask
    return x @ w


def turned_in_a_branch(self, x):
    w = self.weight
    if self.groups:
        w = w.T
    return x @ w


def set_in_a_loop(self, x):
    w = self.weight
    for _ in range(2):
        w = w * 2
    return x @ w


def set_to_another_later(self, x):
    w = self.weight
    x = x @ w
    w = self.other
    return x * w.sum()


def set_and_grown(self, x):
    w = self.weight
    w = w * 2
    w += self.other
    return x @ w


SAID = [
    (in_branches, one(turned=True)),
    (after_branches, one(bias="bias")),
    (step_by_step, one(turned=True)),
    (another_in_a_branch, []),
    (masked_in_a_branch, []),
    (turned_in_a_branch, []),
    (set_in_a_loop, []),
    (set_to_another_later, one(turned=True)),
    (set_and_grown, []),
    (plain, one(bias="bias")),
    (bias_elsewhere, one()),
    (bias_of_a_kind, one()),
    (now_and_then, one()),
    (gained, one()),
    (turned_twice, []),
    (of_a_transpose, one(turned=True)),
    (asked, one(turned=True)),
    (asked_its_length, one(turned=True)),
    (asked_by_another_len, []),
    (of_another, [*one("other", turned=True), *one()]),
    (of_an_inner_function, one()),
    (both_ways, one()),
    (masked, []),
    (shifted, []),
    (product_of_two, []),
    (from_the_left, one()),
    (by_einsum, [*one("other", turned=True), *one()]),
    (by_einsums_both_ways, one()),
    (both_ways_once_scaled, []),
    (by_einsum_of_sums, []),
    (by_einsum_of_a_multiple, []),
    (penalized, []),
    (set_twice, []),
    (kept, []),
    (handed_on, []),
    (handed_to_a_function, one(bias="bias")),
    (handed_to_a_method, one()),
    (handed_on_and_on, one()),
    (handed_a_stack, one()),
    (handed_to_what_changes_it, []),
    (handed_to_what_uses_it_otherwise, []),
    (handed_in_a_list, []),
    (handed_to_itself, []),
    (handed_twice_as_large, []),
    (handed_to_torch, []),
    (gain_handed_to_a_lambda, one()),
    (spread, []),
    (by_property, []),
    (by_index, []),
    (kernels, []),
    (by_number, []),
    (by_root, one(turned=True)),
    (on_one_line, one(turned=True)),
    (of_a_basis, []),
    (of_a_basis_by_einsum, []),
    (of_what_may_be_data, one()),
    (of_what_is_filled_in, one(turned=True)),
    (of_what_is_changed, one(turned=True)),
    (of_noise, one(turned=True)),
    (turned_and_scaled, []),
    (normalized, one()),
    (normalized_columns, one(turned=True)),
    (normalized_along_outputs, []),
    (normalized_along_some_axis, []),
    (normalized_as_told, []),
    (turned_and_normalized, []),
    (normalized_stacks, []),
    (scaled_turned_and_cast, []),
    (by_a_function, one()),
    (by_a_function_of_columns, []),
    (by_a_function_of_data, []),
    (by_a_function_of_a_transpose, []),
    (renewed, one()),
    (times_an_argument, one()),
    (times_what_is_given, []),
    (annotated, one()),
    (positional, one()),
    (by_another_F, []),
    (imported_here, []),
    (of_itself, []),
    (grouped, []),
]


@pytest.mark.parametrize(("forward", "expected"), SAID, ids=lambda x: getattr(x, "__name__", ""))
def test_a_parameter_is_a_weight_if_it_is_nothing_else(forward, expected):
    kind = type("Kind", (Variants,), {"forward": forward})
    module = kind()
    names = dict(module.named_parameters())
    assert sorted(own_weights(module, names)) == sorted(expected)
    assert own_weights(module, []) == []


class Settings(dict):
    __getattr__ = dict.__getitem__


class Absent:
    """As packages stand in for what is not installed."""

    def __getattr__(self, name):
        raise ImportError("not installed")


absent = Absent()


class WithSettings(Variants):
    settings = Settings(scale=2.0)

    def forward(self, x):
        return F.linear(x, self.weight) * self.settings.scale


class WithAbsent(Variants):
    def forward(self, x):
        if self.scale == 0:
            return absent.linear(x, self.weight)
        return F.linear(x, self.weight)


class WithCachedProperty(Variants):
    @functools.cached_property
    def power(self):
        return self.weight.square()

    def forward(self, x):
        return F.linear(x, self.weight) + x @ self.power


class WithPartial(Variants):
    def _run(self, x, scale):
        return F.linear(x, self.weight) * scale

    forward = functools.partialmethod(_run, scale=2)


class WithAttributes(Variants):
    def __getattr__(self, name):
        return super().__getattr__("weight" if name == "same" else name)

    def forward(self, x):
        return F.linear(x, self.weight) + x @ self.same


class WithStatic(Variants):
    def forward(self, x):
        return self.apply_to(x, self.other.detach()) + F.linear(x, self.weight)


class First(Variants):
    forward = plain


class Masked(First):
    def forward(self, x):
        return masked(self, x) if x is None else F.linear(x, self.weight * self.mask)


class Second(First):
    pass


class Both(Second, Masked):
    def forward(self, x):
        return super().forward(x) + x


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (WithSettings, one()),
        (WithAbsent, []),
        (WithCachedProperty, []),
        (WithPartial, []),
        (WithAttributes, []),
        (WithStatic, one()),
        (Second, one(bias="bias")),
        (Both, []),
    ],
)
def test_what_a_class_holds_is_asked_for_nothing_else(kind, expected):
    module = kind()
    assert own_weights(module, ["weight", "bias"]) == expected


def test_long_chains_of_products_are_read_once():
    lines = [f"    x{i + 1} = x{i} * x{i}" for i in range(200)]
    source = "\n".join(["def forward(self, x0):", *lines, "    return F.linear(x0, self.weight) * x200"])
    space = {"F": F}
    exec(compile(source, "<chain>", "exec"), space)
    linecache.cache["<chain>"] = len(source), None, source.splitlines(True), "<chain>"
    module = type("Chain", (Variants,), {"forward": space["forward"]})()
    assert own_weights(module, ["weight"]) == one()


def test_source_that_is_not_what_was_imported_is_not_read(tmp_path, monkeypatch):
    text = "from suite_test_base import *\n\nclass Layer(Own):\n  def forward(self, x):\n    return {}\n"
    base = types.ModuleType("suite_test_base")
    base.Own, base.F = Own, F
    monkeypatch.setitem(sys.modules, "suite_test_base", base)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "suite_test_layer.py"
    path.write_text(text.format("F.linear(x, self.weight, self.bias)"))
    import suite_test_layer

    monkeypatch.setitem(sys.modules, "suite_test_layer", suite_test_layer)
    path.write_text(text.format("F.linear(x, self.bias * self.weight)"))
    linecache.checkcache()
    sources.tree_of.cache_clear()
    assert own_weights(suite_test_layer.Layer(3, 3), ["weight", "bias"]) == []


class Turned(Own):
    def forward(self, x):
        return F.linear(x, self.weight.t(), self.bias)


class TwoProducts(nn.Module):
    """With one bias."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.a, self.bias)), self.b, self.bias)


class TwoNames(Own):
    def __init__(self, *shape):
        super().__init__(*shape)
        self.same = self.weight

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + x @ self.same


class Cyclic(Own):
    def __init__(self, *shape):
        super().__init__(*shape)
        self.tree = {"children": []}
        self.tree["children"].append({"parent": self.tree})

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Turned(4, 4), {"weight": "4x4, 4x4", "bias": "diag 4"}),
        (TwoProducts, {"a": "4x4, 4x4", "b": "4x4, 4x4", "bias": "diag 4"}),
        (lambda: TwoNames(4, 4), {"weight": "diag 16", "bias": "diag 4"}),
        (lambda: Cyclic(4, 4), {"weight": "5x5, 4x4", "bias": "5x5, 4x4"}),
    ],
)
def test_a_bias_or_a_weight_with_other_uses_is_no_part_of_a_layer(make, expected):
    kfac = trained(Pooled(make(), 4), torch.randn(9, 4))
    found = {name: factors for name, (_, factors) in routes(kfac).items()}
    assert found == {f"body.{key}": value for key, value in expected.items()} | {
        "head.weight": "5x5, 2x2",
        "head.bias": "5x5, 2x2",
    }
    assert {treatment for treatment, _ in routes(kfac).values()} == {"kfac"}


def test_layers_with_one_bias_leave_it_to_itself():
    model = nn.Sequential(Linear(4, 4), nn.Tanh(), Linear(4, 4))
    model[2].bias = model[0].bias
    other = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    other[2].bias = other[0].bias
    assert routes(KFAC(model))["0.weight"] == routes(KFAC(other))["0.weight"] == ("kfac", "4x4, 4x4")


class Recursive(Own):
    def forward(self, x, depth=2):
        return F.linear(torch.tanh(self(x, depth - 1)) if depth else x, self.weight)


class Nested(nn.Module):
    """Uses its child's weight as its own."""

    def __init__(self, child):
        super().__init__()
        self.child, self.weight = child, child.weight

    def forward(self, x):
        h = torch.tanh(self.child(x))
        return F.linear(torch.tanh(F.linear(h, self.weight)), self.weight)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "make", [lambda: Recursive(4, 4, bias=False), lambda: Nested(Linear(4, 4, bias=False))]
)
def test_calls_within_calls_count(make):
    x = numbers(6, 4)
    model = double(lambda: Pooled(make(), 4))
    (weight,) = {p for p in model.body.parameters() if p.ndim == 2}
    inputs, outputs, h = [], [], x
    for number in range(3):
        inputs.append(h)
        outputs.append(h @ weight.T)
        h = torch.tanh(outputs[-1]) if number < 2 else outputs[-1]
    g = torch.autograd.grad(loss_of(model.head(h), "sum"), outputs)
    found = held(stepped(model, x, reduction="sum"))
    (name,) = (name for name in found if name != "head")
    assert_close(found[name][0][0], sum(a.T @ a for a in inputs).detach() / 18)
    assert_close(found[name][1][0], sum(one.T @ one for one in g))


def test_sparse_inputs_are_rows_like_others():
    x = numbers(6, 3)
    model = double(lambda: nn.Sequential(SparseMatrix(3, 4, bias=False), nn.Linear(4, 2)))
    found, expected = (held(stepped(model, given)) for given in (x.to_sparse(), x))
    for name in found:
        for a, b in zip(found[name], expected[name], strict=True):
            assert_close(a, b)


class SparseMatrix(Own):
    def forward(self, x):
        return torch.mm(x, self.weight)


def test_patterns_that_skip_what_is_frozen_match_it(recwarn):
    model = nn.Sequential(Linear(4, 4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    KFAC(model, skip_layers=["0.bias"])
    assert not recwarn.list


def test_without_its_source_a_matrix_is_a_free_parameter():
    space = {"nn": nn, "torch": torch, "F": F, "Own": Own}
    exec("class Hidden(Own):\n    def forward(self, x):\n        return x @ self.weight", space)
    hidden = space["Hidden"](4, 4, bias=False)
    assert own_weights(hidden, ["weight"]) == []
    kfac = trained(nn.Sequential(hidden, nn.Linear(4, 2)), torch.randn(6, 4))
    assert kfac.routing()["0.weight"].factors == "diag 16"


def test_a_forward_of_one_instance_is_not_what_its_class_says():
    model = Linear(4, 4)
    model.forward = types.MethodType(lambda self, x: x * self.weight[0], model)
    assert own_weights(model, ["weight", "bias"]) == []


def test_settings_reach_layers_that_are_none_of_torchs():
    model = nn.Sequential(Linear(3, 4), Linear(4, 3), nn.Linear(4, 2))
    kfac = KFAC(model, skip_layers=["^0$"], max_factor_size=3)
    found = routes(kfac)
    assert found["0.weight"][0] == "plain"
    assert found["1.weight"] == ("kfac", "diag 4, diag 4")
    model = nn.Sequential(Linear(3, 4), nn.Linear(3, 2))
    assert routes(KFAC(model, skip_layers=["0.bias"]))["0.weight"] == ("kfac", "4x4, 3x3")
    model = nn.Sequential(Linear(3, 4), nn.Linear(3, 2))
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    assert routes(KFAC(model, optimizer))["0.weight"] == ("kfac", "4x4, 3x3")


def test_a_tied_weight_is_one_block():
    model = nn.Sequential(Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    other = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    other[0].weight = other[2].weight = nn.Parameter(model[0].weight.detach().clone())
    x = torch.randn(6, 4)
    trained(model, x)
    trained(other, x)
    torch.testing.assert_close(model[0].weight, other[0].weight)


def test_a_layer_of_ones_own_without_a_shape_is_an_error():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.UninitializedParameter()

        def forward(self, x):
            return F.linear(x, self.weight)

    with pytest.raises(ValueError, match="layer '0' is lazy"):
        KFAC(nn.Sequential(Lazy(), nn.Linear(4, 2)))


class AlongBothAxes(nn.Module):
    """Two matrices that read one square input, along its rows and along its columns."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(numbers(4, 4, seed=i)) for i in (1, 2))

    def forward(self, x):
        return torch.tanh(self.a @ x) + torch.tanh(x @ self.b)


def test_inputs_along_other_axes_are_not_shared():
    x = numbers(6, 4, 4)
    found = held(stepped(double(lambda: Pooled(AlongBothAxes(), 4)), x, reduction="sum"))
    rows = {"body.a": x.mT.reshape(-1, 4), "body.b": x.reshape(-1, 4)}
    for name, a in rows.items():
        assert_close(found[name][0][0], a.T @ a / len(a))


class LeftFactor(AlongBothAxes):
    def forward(self, x):
        return torch.tanh(self.a @ x).mT


class RightFactor(AlongBothAxes):
    def forward(self, x):
        return torch.tanh(F.linear(x.mT, self.a))


def test_random_rows_of_a_product_whose_features_are_not_last():
    x, found = numbers(6, 4, 50), []
    for kind in (LeftFactor, RightFactor):
        model = double(lambda kind=kind: Pooled(kind(), 4))
        found.append(held(stepped(model, x, reduction="sum", max_rows=60))["body.a"])
    for left, right in zip(*found, strict=True):
        assert_close(left, right)


class ThroughAView(nn.Module):
    """A copy of a child's weight is changed through a view of it."""

    def __init__(self, how):
        super().__init__()
        self.how, self.layer, self.head = how, nn.Linear(6, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x):
        weight = self.layer.weight.clone()
        if self.how == "rows":
            weight[:3].mul_(0.1)
        elif self.how == "columns":
            weight[:, 3:].zero_()
        else:
            weight.view(-1)[:18].zero_()
        return self.head(torch.tanh(F.linear(x, weight)))


@pytest.mark.parametrize("how", ["rows", "columns", "flat"])
def test_a_copy_that_is_changed_through_a_view_is_the_weight_no_more(how):
    model = double(lambda: ThroughAView(how))
    kfac = KFAC(model, kl_clip=None)
    loss_of(model(numbers(5, 6))).backward()
    expected = model.layer.weight.grad.clone()
    with pytest.warns(RuntimeWarning, match="not seen running.*'layer'"):
        kfac.step()
    torch.testing.assert_close(model.layer.weight.grad, expected, rtol=0, atol=0)
