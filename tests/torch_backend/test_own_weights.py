"""Linear layers and convolutions that are no subclass of torch's.

The oracles are torch's own layers with the same weights, and rows written out.
"""

from __future__ import annotations

import copy
import math
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn import functional as functions
from torch.utils.checkpoint import checkpoint

from conftest import assert_close
from suite.torch import KFAC
from suite.torch.own_weights import OwnWeight, own_weights
from torch_backend.rows_by_loops import double, held, loss_of, numbers, stepped, with_one


class Own(nn.Module):
    """With a weight, a bias and a gain."""

    def __init__(self, *shape, bias=True):
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(shape[0])) if bias else None
        self.scale, self.groups = 0.5, 2
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight, 0, 1 / math.sqrt(self.weight.shape[1]))


class Linear(Own):
    """As torch_geometric's."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Keywords(Own):
    def forward(self, x):
        assert x.shape[-1] == self.weight.size(1)
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


class Pooled(nn.Module):
    def __init__(self, body, width):
        super().__init__()
        self.body, self.head, self.checkpointed = body, nn.Linear(width, 2), False

    def forward(self, x):
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return self.head(x.mean((2, 3)) if x.ndim == 4 else x)


class WithoutCalling(nn.Module):
    """Runs a layer past its hooks."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.weight = layer.weight

    def forward(self, x):
        return self.layer.forward(x)


LAYERS = {
    "linear": (lambda: Linear(3, 4), lambda: nn.Linear(4, 3), (9, 4)),
    "linear without bias": (lambda: Linear(3, 4, bias=False), lambda: nn.Linear(4, 3, False), (9, 4)),
    "methods": (lambda: Keywords(3, 4, bias=False), lambda: nn.Linear(4, 3, False), (9, 4)),
    "convolution": (
        lambda: Convolution(6, 2, 3, 3),
        lambda: nn.Conv2d(4, 6, 3, 2, 1, groups=2),
        (9, 4, 5, 6),
    ),
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


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("case", ["linear", "convolution"])
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


# ---- what the source says ----------------------------------------------------------------------------


class Variants(nn.Module):
    """A forward for each of the cases below."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
        self.other, self.gain = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.ones(4, 4))
        self.scale = 2.0

    @property
    def doubled(self):
        return self.weight * 2

    @staticmethod
    def apply_to(x, weight):
        return x @ weight


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


SAID = [
    (plain, one(bias="bias")),
    (bias_elsewhere, one()),
    (bias_of_a_kind, one()),
    (now_and_then, one()),
    (gained, one()),
    (turned_twice, one()),
    (of_a_transpose, one(turned=True)),
    (asked, one(turned=True)),
    (of_another, [*one("other", turned=True), *one()]),
    (of_an_inner_function, one()),
    (both_ways, []),
    (masked, []),
    (shifted, []),
    (product_of_two, []),
    (from_the_left, []),
    (penalized, []),
    (set_twice, []),
    (kept, []),
    (handed_on, []),
    (spread, []),
    (by_property, []),
    (by_index, []),
    (kernels, []),
    (by_number, []),
]


@pytest.mark.parametrize(("forward", "expected"), SAID, ids=lambda x: getattr(x, "__name__", ""))
def test_a_parameter_is_a_weight_if_it_is_nothing_else(forward, expected):
    kind = type("Kind", (Variants,), {"forward": forward})
    module = kind()
    names = dict(module.named_parameters())
    assert sorted(own_weights(module, names)) == sorted(expected)
    assert own_weights(module, []) == []


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
