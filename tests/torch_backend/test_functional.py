"""Weights that reach torch.nn.functional by another way than their module's own forward.

The oracle is the same mathematics in modules whose forward is torch's own, which hooks see.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from conftest import assert_close
from suite.torch import KFAC
from torch_backend.rows_by_loops import both_reductions, held, loss_of, with_one
from torch_backend.test_derivatives import Times, expected_factors

COMPILES = pytest.mark.skipif(
    torch.__version__ < (2, 8), reason="torch.compile breaks off at sets of functions"
)


class LinearWithCast(nn.Linear):
    def forward(self, input):
        return F.linear(input.to(self.weight.dtype), self.weight, bias=self.bias)


class ByProduct(nn.Linear):
    """Falcon's linear layers."""

    def forward(self, input):
        y = input @ self.weight.T
        return y if self.bias is None else y + self.bias


class ByCastProduct(nn.Linear):
    def forward(self, input):
        y = torch.matmul(input, self.weight.clone().transpose(-2, -1).contiguous())
        y += self.bias.to(y.dtype)
        return y


class ByParts(nn.Linear):
    def forward(self, input):
        return torch.add(self.bias, F.linear(input, self.weight))


class SameConv(nn.Conv2d):
    """Pads by itself, more at the end; strides as it was told."""

    def forward(self, input):
        x = F.pad(input, (0, 1, 1, 1))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class ByHalves(nn.Linear):
    """With half of its weight."""

    def forward(self, input):
        return F.linear(input, self.weight / 2, self.bias)


class ByHalfEinsum(nn.Linear):
    def forward(self, input):
        return torch.einsum("oi,...i->...o", self.weight / 2, input)


class ByHalfEinsumOfTheTranspose(nn.Linear):
    def forward(self, input):
        return torch.einsum("...i,io->...o", input, (0.5 * self.weight).t())


class HalfConv(nn.Conv2d):
    def forward(self, input):
        return self._conv_forward(input, (0.5 * self.weight.clone()).to(input.dtype), self.bias)


class Standardized(nn.Conv2d):
    """Weight standardization (Qiao et al. 2019), as timm's convolutions do it."""

    eps = 1e-2

    def forward(self, input):
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=self.eps)
        return self._conv_forward(input, weight.reshape_as(self.weight), self.bias)


class StandardizedByHand(Standardized):
    def forward(self, input):
        weight, axes = self.weight, (1, 2, 3)
        variance = weight.var(axes, unbiased=False, keepdim=True)
        weight = weight - weight.mean(axes, keepdim=True)
        return self._conv_forward(input, weight / torch.sqrt(variance + self.eps), self.bias)


class ScaledEmbedding(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * math.sqrt(self.embedding_dim)


class ByIndex(nn.Embedding):
    def forward(self, input):
        return self.weight[input]


class BySlice(nn.Embedding):
    """Whisper's positions, as many as there are tokens."""

    def forward(self, input):
        return self.weight[1 : 1 + input.shape[1]]


class FromOne(nn.Embedding):
    """The same, by torch's own forward."""

    def forward(self, input):
        return super().forward(torch.arange(1, 1 + input.shape[1]))


class WithPositions(nn.Module):
    def __init__(self, positions):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4), positions

    def forward(self, x):
        return self.tokens(x) + self.positions(x)


class ChannelNorm(nn.LayerNorm):
    """Over the channels of an image."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class NormAct(nn.BatchNorm2d):
    def forward(self, x):
        return torch.tanh(
            F.batch_norm(x, None, None, self.weight, self.bias, True, self.momentum, self.eps)
        )


class RootNorm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GroupAct(nn.GroupNorm):
    def forward(self, x):
        return torch.tanh(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


class Permuted(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ByFunction(Permuted):
    """Hands a norm's parameters to the function itself."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        norm = self.norm
        return F.layer_norm(x, (3,), norm.weight, norm.bias, norm.eps).permute(0, 3, 1, 2)


class Scaled(nn.Module):
    def __init__(self, layer, factor):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, x):
        return self.layer(x) * self.factor


class Multiplied(nn.Module):
    def __init__(self, layer, factor):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, x):
        return self.layer(x * self.factor)


class Padded(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(F.pad(x, (0, 1, 1, 1)))


class LeftProduct(nn.Linear):
    """Features before positions."""

    def forward(self, input):
        y = torch.matmul(self.weight, input.mT)
        return (y if self.bias is None else y + self.bias.unsqueeze(1)).mT


class TurnedProduct(nn.Linear):
    def forward(self, input):
        return torch.matmul(self.weight, input.mT).transpose(-1, -2) + self.bias


class ByEinsum(nn.Linear):
    def forward(self, input):
        y = torch.einsum("...i, oi -> ...o", input, self.weight)
        return y if self.bias is None else y + self.bias


class ByEinsumOfTheTranspose(nn.Linear):
    def forward(self, input):
        return torch.einsum("io,nti", self.weight.T, input).permute(0, 2, 1) + self.bias


class ByEinsumOfFeatures(nn.Linear):
    """Features before positions."""

    def forward(self, input):
        y = torch.einsum("oi,ni...->no...", [self.weight, input.transpose(1, 2)])
        return (y + self.bias[:, None]).transpose(1, 2)


class Mixer(nn.Module):
    """A causal convolution of each channel, and a product."""

    def __init__(self, bias=True):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=2, groups=4, bias=bias)
        self.steps = nn.Linear(4, 5, bias=bias)

    def forward(self, x):
        x = torch.tanh(self.conv(x.mT)[..., : x.shape[1]])
        return F.softplus(self.steps(x.mT))


class MixerOfFunctions(Mixer):
    """The same as transformers' Mamba has it."""

    def forward(self, x):
        weight = self.conv.weight.view(self.conv.weight.size(0), self.conv.weight.size(2))
        x = torch.tanh(self.convolved(x.mT, weight, self.conv.bias)[..., : x.shape[1]])
        y = self.steps.weight @ x
        bias = None if self.steps.bias is None else self.steps.bias.double()
        return F.softplus(y if bias is None else y + bias.to(y.dtype)[..., None]).mT

    def convolved(self, x, weight, bias):
        padding, groups = weight.shape[-1] - 1, len(weight)
        return F.conv1d(x, weight=weight.unsqueeze(1), bias=bias, padding=padding, groups=groups)


class Pooled(nn.Module):
    """(n, c, h, w) or (n, t, d) to (n, 2)."""

    def __init__(self, body, width):
        super().__init__()
        self.body, self.head, self.checkpointed = body, nn.Linear(width, 2), False

    def forward(self, x):
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return self.head(x.mean((2, 3)) if x.ndim == 4 else x.mean(1) if x.ndim == 3 else x)


def pictures(batch):
    return torch.randn(batch, 3, 6, 5)


def numbers(batch):
    return torch.randn(batch, 4)


def sequences(batch):
    return torch.randn(batch, 3, 4)


def words(batch):
    return torch.randint(0, 7, (batch, 5))


# what has a forward of its own, the same of torch's own layers, what is fed to it
CASES = {
    "linear": (lambda: LinearWithCast(4, 3), lambda: nn.Linear(4, 3), 3, numbers),
    "product": (lambda: ByProduct(4, 4, bias=False), lambda: nn.Linear(4, 4, bias=False), 4, numbers),
    "product and bias": (lambda: ByProduct(4, 3), lambda: nn.Linear(4, 3), 3, sequences),
    "product of casts": (lambda: ByCastProduct(4, 4), lambda: nn.Linear(4, 4), 4, sequences),
    "left product": (lambda: LeftProduct(4, 3), lambda: nn.Linear(4, 3), 3, sequences),
    "turned product": (lambda: TurnedProduct(4, 3), lambda: nn.Linear(4, 3), 3, sequences),
    "einsum": (lambda: ByEinsum(4, 3), lambda: nn.Linear(4, 3), 3, sequences),
    "einsum without bias": (
        lambda: ByEinsum(4, 3, bias=False),
        lambda: nn.Linear(4, 3, bias=False),
        3,
        numbers,
    ),
    "einsum of a transpose": (
        lambda: ByEinsumOfTheTranspose(4, 5),
        lambda: nn.Linear(4, 5),
        5,
        sequences,
    ),
    "einsum of features": (lambda: ByEinsumOfFeatures(4, 3), lambda: nn.Linear(4, 3), 3, sequences),
    "left product without bias": (
        lambda: LeftProduct(4, 3, bias=False),
        lambda: nn.Linear(4, 3, bias=False),
        3,
        sequences,
    ),
    "mixer": (MixerOfFunctions, Mixer, 5, sequences),
    "mixer without bias": (lambda: MixerOfFunctions(False), lambda: Mixer(False), 5, sequences),
    "by parts": (lambda: ByParts(4, 3), lambda: nn.Linear(4, 3), 3, numbers),
    "conv": (
        lambda: SameConv(3, 4, 3, 2, bias=False),
        lambda: Padded(nn.Conv2d(3, 4, 3, 2, bias=False)),
        4,
        pictures,
    ),
    "groups": (
        lambda: SameConv(3, 6, 3, dilation=2, groups=3),
        lambda: Padded(nn.Conv2d(3, 6, 3, dilation=2, groups=3)),
        6,
        pictures,
    ),
    "half": (lambda: ByHalves(4, 3), lambda: Multiplied(nn.Linear(4, 3), 0.5), 3, sequences),
    "half without bias": (
        lambda: ByHalves(4, 3, bias=False),
        lambda: Multiplied(nn.Linear(4, 3, bias=False), 0.5),
        3,
        numbers,
    ),
    "half by einsum": (
        lambda: ByHalfEinsum(4, 3, bias=False),
        lambda: Multiplied(nn.Linear(4, 3, bias=False), 0.5),
        3,
        sequences,
    ),
    "half by einsum of the transpose": (
        lambda: ByHalfEinsumOfTheTranspose(4, 3, bias=False),
        lambda: Multiplied(nn.Linear(4, 3, bias=False), 0.5),
        3,
        numbers,
    ),
    "half a convolution": (
        lambda: HalfConv(3, 6, 3, groups=3),
        lambda: Multiplied(nn.Conv2d(3, 6, 3, groups=3), 0.5),
        6,
        pictures,
    ),
    "embedding": (
        lambda: ScaledEmbedding(7, 4, padding_idx=1),
        lambda: Scaled(nn.Embedding(7, 4, padding_idx=1), 2.0),
        4,
        words,
    ),
    "rows of a table": (lambda: ByIndex(7, 4), lambda: nn.Embedding(7, 4), 4, words),
    "a part of a table": (
        lambda: WithPositions(BySlice(8, 4)),
        lambda: WithPositions(FromOne(8, 4)),
        4,
        words,
    ),
    "layer norm": (lambda: ChannelNorm(3), lambda: Permuted(nn.LayerNorm(3)), 3, pictures),
    "layer norm of a child": (
        lambda: ByFunction(nn.LayerNorm(3)),
        lambda: Permuted(nn.LayerNorm(3)),
        3,
        pictures,
    ),
    "batch norm": (
        lambda: NormAct(3),
        lambda: nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Tanh()),
        3,
        pictures,
    ),
    "rms norm": (lambda: RootNorm(4, 1e-3), lambda: nn.RMSNorm(4, 1e-3), 4, numbers),
    "group norm": (
        lambda: GroupAct(3, 6),
        lambda: nn.Sequential(nn.GroupNorm(3, 6), nn.Tanh()),
        6,
        lambda batch: torch.randn(batch, 6, 4, 3),
    ),
}


def built(make, width, seed=0):
    torch.manual_seed(seed)
    return Pooled(make(), width).double()


def trained(model, x, steps=3, **settings):
    """Gradients after each of some steps, by parameter in the model's order."""
    settings = {"kl_clip": None, "damping": 0.01} | settings
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    found = []
    for _ in range(steps):
        kfac.zero_grad()
        model(x).square().mean().backward()
        moved = [p for p in model.parameters() if p.grad is not None]
        before = [p.grad.clone() for p in moved]
        kfac.step()
        found.append([p.detach().clone() for p in model.parameters()])
        assert not any(torch.equal(p.grad, g) for p, g in zip(moved, before, strict=True))
    return found, kfac


def inputs(make):
    torch.manual_seed(1)
    x = make(9)
    return x.double() if x.is_floating_point() else x


def assert_same(found, expected):
    for own, others in zip(found, expected, strict=True):
        for a, b in zip(own, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("case", CASES)
def test_a_subclass_with_a_forward_of_its_own_is_the_layer_it_is(case, method):
    make, plain, width, feed = CASES[case]
    x = inputs(feed)
    found, kfac = trained(built(make, width), x, compute_method=method)
    expected, _ = trained(built(plain, width), x, compute_method=method)
    assert_same(found, expected)
    assert all(route.treatment == "kfac" for route in kfac.routing())


@pytest.mark.parametrize("more", [lambda w: w + 1, lambda w: 1.0 + w, lambda w: torch.add(w, 2) - 1])
def test_a_norms_weight_may_be_counted_from_one(more):
    """As in Nemotron's."""

    class FromOne(nn.LayerNorm):
        def reset_parameters(self):
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)

        def forward(self, x):
            return F.layer_norm(x, self.normalized_shape, more(self.weight), self.bias, self.eps)

    def body(norm):
        return lambda: nn.Sequential(nn.Linear(4, 5), norm(5))

    x = inputs(numbers)
    found, _ = trained(built(body(FromOne), 5), x)
    expected, _ = trained(built(body(nn.LayerNorm), 5), x)
    for own in found:
        own[2] += 1
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "aot_eager") for case in ("linear", "product and bias", "half", "layer norm")),
        *((case, "aot_eager") for case in ("embedding", "left product", "einsum", "einsum of features")),
        *(("linear", "eager"), ("embedding", "eager")),
        pytest.param(
            "mixer",
            "aot_eager",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.8",
                reason="torch mixes functions up that the same probe is behind",
            ),
        ),
    ],
)
def test_it_is_seen_under_checkpointing_and_compiled(case, backend):
    torch._dynamo.reset()
    make, _, width, feed = CASES[case]
    x = inputs(feed)
    expected, _ = trained(built(make, width), x)
    again = built(make, width)
    again.checkpointed = True
    assert_same(trained(again, x)[0], expected)
    compiled = built(make, width)
    optimizer = KFAC(
        compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), kl_clip=None, damping=0.01
    )
    run = torch.compile(compiled, backend=backend)
    for number in range(3):
        optimizer.zero_grad()
        run(x).square().mean().backward()
        optimizer.step()
        assert_same([[p.detach() for p in compiled.parameters()]], expected[number : number + 1])


class Residual(nn.Module):
    """Layers, a scale of its own, and a child's weight that a function gets."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = F.gelu(self.inner(self.norm(x)))
        return x + self.gain * F.linear(y, self.outer.weight, self.outer.bias)


class Residuals(nn.Module):
    """The same twice, and parameters of every kind around."""

    def __init__(self):
        super().__init__()
        self.positions, self.heads = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.randn(2, 4, 4))
        self.first, self.last = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x):
        x = torch.tanh(F.linear(x + self.positions, self.first))
        x = x + torch.einsum("btd,hde->bthe", x, self.heads).sum(2)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.last.weight, self.last.bias)


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch.compile misses modes of modules inside")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_blocks_that_are_compiled_by_themselves(wrapped, backend):
    torch._dynamo.reset()
    x = inputs(sequences)
    expected, _ = trained(built(Residuals, 4), x)
    model = built(Residuals, 4)
    for i, block in enumerate(model.body.blocks):
        if wrapped:
            model.body.blocks[i] = torch.compile(block, backend=backend)
        else:
            block.compile(backend=backend)
    found, kfac = trained(model, x)
    assert_same(found, expected)
    assert all(route.treatment == "kfac" for route in kfac.routing())
    counted = torch._dynamo.utils.counters["stats"]
    compiled = counted["unique_graphs"]
    for _ in range(2):
        kfac.zero_grad()
        model(x).square().mean().backward()
        kfac.step()
    assert 0 < compiled == counted["unique_graphs"]


@both_reductions
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_product_with_a_transpose_has_the_second_moments_of_its_rows(bias, parts, reduction):
    """a and g of every row by autograd; parts of a batch add up to all of it."""
    x = inputs(sequences)
    model = built(lambda: ByProduct(4, 3, bias=bias), 3)
    a = with_one(x) if bias else x
    s = (a @ torch.cat([p.reshape(3, -1) for p in model.body.parameters()], 1).T).detach()
    (g,) = torch.autograd.grad(loss_of(model.head(s.requires_grad_().mean(1)), reduction), s)
    kfac = KFAC(model, kl_clip=None, loss_reduction=reduction)
    for part in x.chunk(parts):
        share = len(part) / len(x) if reduction == "mean" else 1
        (share * loss_of(model(part), reduction)).backward()
    kfac.step()
    A, G = held(kfac)["body"]
    a, g = a.flatten(0, 1), g.flatten(0, 1)
    terms = len(x) if reduction == "mean" else 1
    torch.testing.assert_close(A[0], a.T @ a / len(a), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(G[0], terms * g.T @ g, rtol=1e-12, atol=1e-12)


def body_and_gradients(model, x, pool):
    """A and G of the body after a step without warnings, and dL/dy of what it gives, by autograd."""
    y = model.body(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(loss_of(model.head(pool(y)), "sum"), y)
    kfac = KFAC(model, kl_clip=None, loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model(x), "sum").backward()
        kfac.step()
    A, G = held(kfac)["body"]
    return A[0], G[0], g


def assert_exact(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Standardized, StandardizedByHand])
def test_rows_of_a_standardized_weight_count_as_often_as_they_are_long(kind):
    """By the chain rule, but for what standardization projects out, c = 1 / sqrt(variance + eps)."""
    x = inputs(pictures)
    model = built(lambda: kind(3, 4, 3, bias=False), 4)
    lengths = (model.body.weight.detach().flatten(1).var(1, unbiased=False) + kind.eps).rsqrt()
    A, G, g = body_and_gradients(model, x, lambda y: y.mean((2, 3)))
    rows = F.unfold(x, 3).movedim(1, 2).flatten(0, 1)
    g = (g * lengths[:, None, None]).movedim(1, 3).flatten(0, 2)
    assert_exact(A, rows.T @ rows / len(rows))
    assert_exact(G, g.T @ g)


class Gained(nn.Linear):
    """With rows that are `gain` times longer, changed in place or not."""

    def __init__(self, *sizes, gain, in_place=False, **settings):
        super().__init__(*sizes, **settings)
        self.gain, self.in_place = gain, in_place

    def forward(self, input):
        if not self.in_place:
            return F.linear(input, (self.weight - 1) * self.gain.to(self.weight.dtype), self.bias)
        weight = self.weight - 1
        weight *= self.gain
        return F.linear(input, weight, self.bias)


class LowRank(nn.Linear):
    """With parameters beside its weight."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.down = nn.Parameter(0.5 * torch.randn(2, sizes[0]))
        self.up = nn.Parameter(0.5 * torch.randn(sizes[1], 2))
        self.gain = nn.Parameter(torch.ones(sizes[1]))

    def forward(self, input):
        return super().forward(input) * self.gain + input @ self.down.T @ self.up.T


class Around(nn.Module):
    """The same, around a layer that torch runs."""

    def __init__(self, inner):
        super().__init__()
        self.down, self.up, self.gain = inner.down, inner.up, inner.gain
        self.linear = nn.Linear(inner.in_features, inner.out_features)
        self.linear.load_state_dict({"weight": inner.weight, "bias": inner.bias})

    def forward(self, input):
        return self.linear(input) * self.gain + input @ self.down.T @ self.up.T


def test_parameters_beside_a_layers_weight_have_blocks_of_their_own():
    x = inputs(sequences)
    order = ["body.down", "body.up", "body.gain"]
    model = built(lambda: LowRank(4, 3), 3)
    around = copy.deepcopy(model)
    around.body = Around(around.body).double()
    found, kfac = trained(model, x)
    expected, _ = trained(around, x)
    assert_same([[*own[2:5], *own[:2], *own[5:]] for own in found], expected)
    assert [kfac.routing()[name].treatment for name in order] == ["kfac"] * 3
    model = built(lambda: LowRank(4, 3), 3)
    model.body.weight.requires_grad_(False)
    model.body.bias.requires_grad_(False)
    routing = trained(model, x)[1].routing()
    assert [routing[name].treatment for name in order] == ["kfac"] * 3
    assert routing["body.weight"].treatment == "frozen"


class Perturbed(nn.Linear):
    """Of a weight with something added that has no gradient."""

    def __init__(self, *sizes, how, **settings):
        super().__init__(*sizes, **settings)
        self.how = how

    def forward(self, input):
        return F.linear(input, self.how(self.weight), self.bias)


def changed_in_place(weight):
    weight *= 0.5
    weight.sub_(2)
    return weight


def noise_like(weight):
    return torch.linspace(-1, 1, weight.numel()).to(weight).reshape(weight.shape)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "how",
    [
        lambda w: w + ((8 * w).round() / 8 - w).detach(),
        lambda w: (w.sign() - w).detach() + w,
        lambda w: w + (w.sign() - w).data,
        lambda w: 1.0 * w - noise_like(w),
        lambda w: w + noise_like(w[0]),
    ],
)
def test_what_is_added_to_a_weight_without_a_gradient_leaves_its_own(how, bias):
    x = inputs(numbers)
    model = built(lambda: Perturbed(4, 3, bias=bias, how=how), 3)
    A, G, g = body_and_gradients(model, x, lambda y: y)
    a = with_one(x) if bias else x
    assert_exact(A, a.T @ a / len(x))
    assert_exact(G, g.T @ g)


@pytest.mark.parametrize(
    ("factor", "how"),
    [
        (-1, lambda w: -w),
        (-1, lambda w: 1 - w),
        (-1, lambda w: noise_like(w) - w),
        (-1, lambda w: torch.sub(noise_like(w), w)),
        (-1, lambda w: torch.rsub(w, 1.0)),
        (1, lambda w: torch.rsub(torch.ones(4).to(w), w)),
        (-2, lambda w: -2 * w),
        (-0.25, lambda w: 1 - w / 4),
        (-3, lambda w: w.clone().mul_(-3)),
        (0.5, lambda w: changed_in_place(w.clone())),
    ],
)
def test_a_weight_with_another_sign_meets_its_bias_with_that_sign(factor, how):
    x = inputs(numbers)
    model = built(lambda: Perturbed(4, 3, how=how), 3)
    A, G, g = body_and_gradients(model, x, lambda y: y)
    a = with_one(factor * x)
    assert_exact(A, a.T @ a / len(x))
    assert_exact(G, g.T @ g)


@pytest.mark.parametrize(
    "how", [torch.Tensor.tanh, lambda w: w + w.tanh(), lambda w: w + w.detach() * w]
)
def test_what_is_added_to_a_weight_with_a_gradient_waits(how):
    model = built(lambda: Perturbed(4, 3, how=how), 3)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(inputs(numbers)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="'body'"):
        kfac.step()


@pytest.mark.parametrize("in_place", [True, False])
def test_rows_have_factors_of_their_own_where_no_bias_is_beside_them(in_place):
    """By the chain rule: dL/dw = c dL/dw'."""
    x, gain = inputs(numbers), torch.tensor([[0.5], [-2.0], [0.0]]).double()
    model = built(lambda: Gained(4, 3, bias=False, gain=gain, in_place=in_place), 3)
    A, G, g = body_and_gradients(model, x, lambda y: y)
    g = g * gain[:, 0]
    assert_exact(A, x.T @ x / len(x))
    assert_exact(G, g.T @ g)


def test_a_bias_beside_rows_with_factors_keeps_its_own_curvature():
    """Also where all rows are multiplied with zero, and whatever half precision can hold."""
    x, gain = inputs(numbers), torch.tensor([[0.0], [3.0], [0.0]]).double()
    for factors in (gain, 0 * gain, 1e6 * gain, gain - 1):
        model = built(lambda factors=factors: Gained(4, 3, gain=factors), 3)
        A, G, g = body_and_gradients(model, x, lambda y: y)
        rows = torch.stack([with_one(x * c) for c in factors.ravel()])  # each of the weight has its own
        assert_exact(A, (rows.mT @ rows / len(x)).mean(0))
        assert_exact(G, g.T @ g)


class OtherBias(nn.Linear):
    """With a copy of its bias that was changed in place."""

    def __init__(self, *sizes, change, cast=False):
        super().__init__(*sizes)
        self.change, self.cast = change, cast

    def forward(self, input):
        bias = self.bias.clone()
        if self.cast:
            bias = bias.float().double()
        self.change(bias)
        return F.linear(input, self.weight, bias)


def set_to_one(bias):
    bias[1:] = 1


ENTRIES_WRITTEN = {
    "zeros in a view": lambda bias: bias[1:2].zero_(),
    "a number": set_to_one,
    "a mask": lambda bias: bias.masked_fill_(torch.tensor([True, False, False]), 0.0),
    "all": lambda bias: bias.fill_(2.0),
}
CHANGED_OTHERWISE = {
    "times": lambda bias: bias[1:2].mul_(2),
    "plus": lambda bias: bias.add_(1),
    "another parameter's": lambda bias: bias[1:2].fill_(torch.ones((), requires_grad=True).double()),
}


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("change", ENTRIES_WRITTEN.values(), ids=ENTRIES_WRITTEN)
def test_a_bias_is_one_where_numbers_took_the_place_of_some_entries(change, cast):
    x = inputs(numbers)
    model = built(lambda: OtherBias(4, 3, change=change, cast=cast), 3)
    A, G, g = body_and_gradients(model, x, lambda y: y)
    assert_exact(A, with_one(x).T @ with_one(x) / len(x))
    assert_exact(G, g.T @ g)


@pytest.mark.parametrize("change", CHANGED_OTHERWISE.values(), ids=CHANGED_OTHERWISE)
def test_a_bias_that_was_changed_otherwise_is_another(change):
    model = built(lambda: OtherBias(4, 3, change=change), 3)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(inputs(numbers)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="another bias.*'body'"):
        kfac.step()


class OfAChangedCopy(nn.Linear):
    """With a copy of its weight that was changed in place."""

    def __init__(self, *sizes, change):
        super().__init__(*sizes)
        self.change = change

    def forward(self, input):
        weight = self.weight.clone()
        self.change(weight)
        return F.linear(input, weight, self.bias)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=COMPILES)], ids=["", "compiled"])
@pytest.mark.parametrize("kind", [OfAChangedCopy, OtherBias])
@pytest.mark.parametrize("change", [set_to_one, CHANGED_OTHERWISE["times"]], ids=["set", "times"])
def test_a_copy_that_was_changed_in_some_places_is_another(change, kind, compiled):
    torch._dynamo.reset()
    model = built(lambda: kind(4, 3, change=change), 3)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    run(inputs(numbers)).square().mean().backward()
    if kind is OtherBias and change is set_to_one:
        kfac.step()
        assert kfac.routing()["body.weight"].treatment == "kfac"
        return
    with pytest.warns(RuntimeWarning, match="'body'"):
        kfac.step()
    assert kfac.routing()["body.weight"].treatment == "waiting"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@COMPILES
def test_rows_of_a_copy_that_a_compiled_forward_lengthens_in_place_are_as_long():
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = built(lambda: OfAChangedCopy(4, 3, change=lambda weight: weight.mul_(2)), 3)
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(inputs(numbers)).square().mean().backward()
        kfac.step()
        found.append(held(kfac)["body"])
    assert_exact(*found)


def test_a_factor_of_the_input_is_not_applied_in_half_precision():
    torch.manual_seed(0)
    model = nn.Sequential(Gained(8, 8, gain=torch.full((8, 1), 4e3)), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.mul_(1e-4).add_(1)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            y = model(20 * torch.randn(32, 8))
        F.cross_entropy(y.float(), torch.arange(32) % 3).backward()
        kfac.step()
    assert kfac.skipped_steps == 0
    assert kfac.routing()["0.weight"].treatment == "kfac"


class Used(nn.Linear):
    """`use` of the input, the weight and the bias."""

    def __init__(self, use):
        super().__init__(4, 4)
        self.use = use

    def forward(self, x):
        return self.use(x, self.weight, self.bias)


def both(y, b):
    return (y + b) * y


def twice(x, view):
    return x @ view + torch.tanh(torch.einsum("ni,io->no", x, view))


def written_to(weight):
    weight[0] = 0
    return weight


# what misses a use, and what is no use of the layer at all
MISSED = {
    "a product also without its bias": lambda x, W, b: both(x @ W.T, b),
    "in a list": lambda x, W, b: torch.stack([y := x @ W.T, y + b]).sum(0),
    "one transpose, twice": lambda x, W, b: twice(x, W.T) + F.linear(x, W, b),
    "half, and a function of it": lambda x, W, b: F.linear(x, W / 2, b) + F.linear(x, W.abs()),
    "half, and a product": lambda x, W, b: F.linear(x, W / 2, b) + torch.einsum("bi,oi->bo", x, W),
    "rounded, straight through, and a function of it": lambda x, W, b: (
        F.linear(x, W + (W.sign() - W).detach(), b) + F.linear(x, W.abs())
    ),
    "a function of it, and rounded, straight through": lambda x, W, b: (
        F.linear(x, W.abs()) + F.linear(x, W + (W.sign() - W).detach(), b)
    ),
    "of what rounded it, both ends": lambda x, W, b: (
        F.linear(x, W + ((S := W.tanh()) - W).detach(), b) + F.linear(x, S)
    ),
    "rounded, straight through, twice": lambda x, W, b: (
        F.linear(x, Q := W + (W.sign() - W).detach(), b) + F.linear(torch.tanh(x), Q)
    ),
    "rounded, straight through, and a product": lambda x, W, b: (
        F.linear(x, W + (W.sign() - W).detach(), b) + torch.einsum("bi,oi->bo", x.tanh(), W)
    ),
    "half of it, and a product of that": lambda x, W, b: (
        F.linear(x, H := W / 2, b) + torch.einsum("bi,oi->bo", x.tanh(), H)
    ),
    "one cast, twice": lambda x, W, b: F.linear(x, C := W.clone(), b) + x @ C.square(),
}
OTHERS = {
    "x W": lambda x, W, b: x @ W + b,
    "F.linear of a transpose": lambda x, W, b: F.linear(x, W.T, b),
    "F.linear of half a transpose": lambda x, W, b: F.linear(x, 0.5 * W.T, b),
    "F.linear of rows in another order": lambda x, W, b: F.linear(x, W.flip(0) + 0, b),
    "a function of it, not detached": lambda x, W, b: F.linear(x, W + (W.tanh() - W), b),
    "columns": lambda x, W, b: F.linear(x, W * torch.arange(4.0), b),
    "a factor for each entry": lambda x, W, b: F.linear(x, torch.ones(4, 4).tril() * 2 * W, b),
    "its inverse": lambda x, W, b: F.linear(x, 1 / W, b),
    "half of the bias, too": lambda x, W, b: F.linear(x, W / 2, b / 2),
    "a multiple of the bias": lambda x, W, b: F.linear(x, W, 3 * b),
    "a multiple of the bias, by addmm": lambda x, W, b: torch.addmm(3 * b, x, W.T),
    "another bias": lambda x, W, b: F.linear(x, W / 2, torch.ones(4).double()) + 0 * b,
    "a copy that was clamped": lambda x, W, b: F.linear(x, W.clone().clamp_(-0.1, 0.1), b),
    "a copy that was written to": lambda x, W, b: F.linear(x, written_to(W.clone()), b),
    "reshaped rows": lambda x, W, b: F.linear(x, (W.reshape(2, 8) * 2).reshape(4, 4).T, b),
    "a bias after a function": lambda x, W, b: torch.tanh(x @ W.T) + b,
    "a bias of the transpose": lambda x, W, b: (x[:4] @ W.T).T + b,
    "no bias": lambda x, W, b: x @ W.T + b.detach() + 0 * b.sum(),
    "a difference": lambda x, W, b: x @ W.T - b,
    "a view that is no transpose": lambda x, W, b: x @ W.transpose(0, 0) + b,
}


@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
@pytest.mark.parametrize("how", MISSED)
def test_a_use_that_is_missed_is_reported(how):
    model = built(lambda: Used(MISSED[how]), 4)
    kfac = KFAC(model)
    model(inputs(numbers)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'body'"):
        kfac.step()


def test_a_weight_in_a_list_is_used_too():
    class Joined(nn.Module):
        """A tied head with columns of its own, as MobileBERT's."""

        def __init__(self):
            super().__init__()
            self.table, self.more = nn.Embedding(5, 4), torch.ones(4, 2)

        def forward(self, x):
            return self.table(x) @ torch.cat([self.table.weight.t(), self.more], 1)

    model = Joined()
    kfac = KFAC(model)
    model(torch.arange(5)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'table'"):
        kfac.step()


class Given:
    """An input that is no tensor."""

    def __init__(self, x):
        self.x = x


class OfObjects(nn.Linear):
    def forward(self, given):
        return torch.tanh(F.linear(given.x, 0.5 * self.weight, self.bias))


class Noting(nn.Linear):
    """Computes numbers of its weight that are not in the loss, and bounds it."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.4, 0.4)
        self.size = self.weight.norm().item()
        return F.linear(x, self.weight, self.bias) / self.weight.norm().detach()


class GivenGain(nn.Linear):
    """By a parameter of the module around it."""

    def forward(self, x, gain):
        return F.linear(x, self.weight * 0.5, self.bias) * gain


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_objects, self.noting, self.scaled = OfObjects(4, 4), Noting(4, 4), GivenGain(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        for _ in range(2):
            x = self.of_objects(Given(x))
        return self.scaled(self.noting(x), self.gain)


def test_what_misses_no_use_is_not_reported():
    torch.manual_seed(0)
    model = Several().double()
    kfac = KFAC(model)
    model(torch.randn(5, 4).double()).square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac.step()
    assert {route.treatment for route in kfac.routing()} == {"kfac"}


@pytest.mark.parametrize("quantized", [True, False])
def test_a_penalty_that_a_layer_keeps_is_reported(quantized):
    class Penalized(nn.Linear):
        def forward(self, x):
            rounded = self.weight.sign()
            self.penalty = (self.weight - rounded).square().mean()
            weight = self.weight + (rounded - self.weight).detach() if quantized else self.weight
            return F.linear(x, weight, self.bias)

    model = nn.Sequential(nn.Linear(4, 4), Penalized(4, 3)).double()
    kfac = KFAC(model)
    (model(torch.randn(5, 4).double()).square().mean() + model[1].penalty).backward()
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*: '1'. Call"):
        kfac.step()


@pytest.mark.filterwarnings("ignore:statistics miss some uses:RuntimeWarning")
@pytest.mark.parametrize("how", OTHERS)
def test_what_is_no_call_of_the_layer_waits(how):
    model = built(lambda: Used(OTHERS[how]), 4)
    kfac = KFAC(model)
    model(inputs(numbers)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="not seen running.*'body'"):
        kfac.step()
    for name in ("weight", "bias"):
        assert kfac.routing()[f"body.{name}"].treatment == "waiting"


class Taken(nn.Module):
    """Hands its children's weights to functions, or calls them."""

    def __init__(self, by_function):
        super().__init__()
        self.conv, self.qkv = nn.Conv1d(2, 4, 3), nn.Linear(4, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 6, bias=False), nn.Linear(6, 2)])
        self.table, self.by_function = nn.Embedding(5, 4), by_function

    def forward(self, x, ids):
        if not self.by_function:
            x = self.conv(x).mT + self.table(ids)
            return self.heads[1](torch.tanh(self.heads[0](torch.tanh(self.qkv(x)))))
        x = F.conv1d(x, self.conv.weight, bias=self.conv.bias).mT
        x = x + F.embedding(ids, weight=self.table.weight)
        x = torch.tanh(F.linear(input=x, weight=self.qkv.weight, bias=self.qkv.bias))
        x = torch.tanh(x.matmul(self.heads[0].weight.t()))
        return F.linear(x, self.heads[1].weight, self.heads[1].bias)


class Outer(nn.Module):
    def __init__(self, by_function, checkpointed=False):
        super().__init__()
        self.inner, self.checkpointed = Taken(by_function), checkpointed

    def forward(self, x):
        ids = torch.arange(2).repeat(len(x), 1)
        if self.checkpointed:
            return checkpoint(self.inner, x, ids, use_reentrant=False)
        return self.inner(x, ids)


def outer(*arguments):
    torch.manual_seed(0)
    return Outer(*arguments).double()


@pytest.mark.parametrize("settings", [{}, {"compute_method": "inverse"}, {"factor_update_steps": 2}])
def test_a_child_whose_weight_a_function_gets_is_as_if_it_were_called(settings):
    x = inputs(lambda batch: torch.randn(batch, 2, 4))
    expected, _ = trained(outer(False), x, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no use is missed
        for model in (outer(True), outer(True, True)):
            found, kfac = trained(model, x, **settings)
            assert_same(found, expected)
            assert all(route.treatment == "kfac" for route in kfac.routing())


def test_both_ways_in_one_pass_are_two_uses():
    class Both(nn.Module):
        def __init__(self, twice):
            super().__init__()
            self.layer, self.twice = nn.Linear(3, 3), twice

        def forward(self, x):
            x = torch.tanh(self.layer(x))
            return self.layer(x) if self.twice else F.linear(x, self.layer.weight, self.layer.bias)

    found = []
    for twice in (True, False):
        torch.manual_seed(0)
        model = Both(twice).double()
        found.append(trained(model, inputs(lambda batch: torch.randn(batch, 3)))[0])
    assert_same(*found)


def test_resuming_copying_and_detaching():
    x = inputs(lambda batch: torch.randn(batch, 2, 4))
    expected, _ = trained(outer(True), x, steps=4)
    model = outer(True)
    _, kfac = trained(model, x, steps=2)
    again = outer(True)
    again.load_state_dict(model.state_dict())
    fresh = KFAC(again, torch.optim.SGD(again.parameters(), lr=0.1), kl_clip=None, damping=0.01)
    fresh.load_state_dict(kfac.state_dict())
    copied = copy.deepcopy((model, kfac))
    for a, optimizer in ((again, fresh), copied):
        for _ in range(2):
            optimizer.zero_grad()
            a(x).square().mean().backward()
            optimizer.step()
        assert_same([[p.detach() for p in a.parameters()]], expected[-1:])
    kfac.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_after_a_step_only_those_that_found_a_function_go_on_watching():
    x = inputs(lambda batch: torch.randn(batch, 2, 4))
    model = outer(False)
    _, plain = trained(model, x, steps=1)
    assert not any(m._forward_pre_hooks for m in model.modules())
    model = outer(True)
    _, kfac = trained(model, x, steps=1)
    assert model.inner._forward_pre_hooks
    assert not model._forward_pre_hooks
    assert plain.routing()["inner.qkv.weight"] == kfac.routing()["inner.qkv.weight"]


def test_a_last_layer_with_a_forward_of_its_own_tells_the_number_of_terms():
    """Where its function is known, and where only its output is."""

    class BySum(nn.Linear):
        def forward(self, x):
            return torch.einsum("ni,oi->no", x, self.weight) + self.bias

    found = []
    for kind in (nn.Linear, LinearWithCast, ByProduct, BySum):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), kind(12, 2)).double()
        kfac = KFAC(model, kl_clip=None)
        x = inputs(lambda batch: torch.randn(batch, 3, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if kind is BySum else "error")
            model(x).square().mean().backward()
            kfac.step()
        found.append(kfac.state_dict()["kfac"]["layers"]["0"]["G"])
    for G in found[1:]:
        torch.testing.assert_close(G, found[0], rtol=1e-9, atol=1e-12)


class Conv1D(nn.Module):
    """x W + b with the weight as (in, out), as transformers has it in GPT-2."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 2), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.size()[:-1], self.nf)


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_a_linear_layer_by_another_name_is_one(method):
    torch.manual_seed(0)
    model, plain = Conv1D(3, 4).double(), nn.Linear(4, 3, bias=False).double()
    plain.weight.data = model.weight.data.T.clone()
    model.bias.requires_grad_(False)
    x = inputs(lambda batch: torch.randn(batch, 5, 4))
    found = [trained(one, x, compute_method=method)[0] for one in (model, plain)]
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own[0].T, other[0], rtol=1e-9, atol=1e-12)
    routing = KFAC(Conv1D(3, 4)).routing()
    assert (routing["weight"].factors, routing["bias"].factors) == ("4x4, 3x3", "3x3")


class OffsetEmbedding(nn.Embedding):
    """BART's positions."""

    def forward(self, input):
        return super().forward(input + 1)


# what is done to it before it is added
MOVED = {
    "an axis in front": lambda found, n: found[None],
    "expanded": lambda found, n: found.unsqueeze(0).expand(n, -1, -1),
    "reshaped": lambda found, n: found.reshape(1, *found.shape).expand(n, *found.shape),
    "channels in front": lambda found, n: found.t()[None],
}


class Positions(nn.Module):
    """Looked up once for all examples, or for each."""

    def __init__(self, how):
        super().__init__()
        self.tokens, self.body, self.how = nn.Embedding(7, 4), nn.Linear(4, 4), how
        table = OffsetEmbedding if "offset" in how else nn.Embedding
        self.parts = nn.ModuleDict({"positions": table(6, 4)})
        self.head = nn.Linear(4, 7)

    def forward(self, x):
        ids = torch.arange(x.shape[1])
        if self.how.startswith("each"):
            ids = ids.expand(x.shape)
        elif self.how == "one row":
            ids = ids[None]
        found = self.parts["positions"](ids)
        y = self.tokens(x)
        if self.how.endswith("scaled"):
            found = -3.0 * (found * 0.5)
        if self.how.endswith("scaled in place"):
            found *= 3.0
        found = MOVED.get(self.how, lambda found, n: found)(found, len(x))
        if self.how == "channels in front":
            y = (y.transpose(1, 2) + found).transpose(1, 2)
            return self.head(torch.tanh(self.body(y)))
        if self.how.endswith("twice"):
            again = self.parts["positions"](ids) if self.how == "each, twice" else found
            return self.head(torch.tanh(self.body(y + found)) + again)
        if self.how == "after a sum that is only looked at":
            self.norm = (y.detach() + found).norm()
        if self.how == "in place":
            y += found
        else:
            y = found + y if self.how == "first" else y + found
        return self.head(torch.tanh(self.body(y)))


@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
@pytest.mark.parametrize(
    "how",
    [
        "one row",
        "no batch",
        "first",
        "in place",
        "twice",
        "after a sum that is only looked at",
        "scaled",
        "scaled in place",
        *MOVED,
    ],
)
def test_positions_looked_up_once_are_as_if_looked_up_for_each_example(how, fisher):
    x, found = inputs(words), []
    settings = {"fisher": fisher, "likelihood": "categorical"} if fisher != "empirical" else {}
    each = f"each, {how}" if how.startswith(("twice", "offset", "scaled")) else "each"
    for kind, parts in ((each, 1), (how, 1), (how, 3)):
        torch.manual_seed(0)
        model = Positions(kind).double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), kl_clip=None, **settings)
        for _ in range(3):
            kfac.zero_grad()
            for part in x.chunk(parts):
                loss = F.cross_entropy(model(part).flatten(0, 1), part.flatten(), reduction="sum")
                (loss / x.numel()).backward()
            kfac.step()
        found.append([p.detach() for p in model.parameters()])
    assert_same(found[1:], [found[0]] * 2)


def test_a_class_looked_up_once_an_example_is_one_row_an_example():
    class Classes(nn.Module):
        def __init__(self, late):
            super().__init__()
            self.tokens, self.classes, self.late = nn.Embedding(7, 4), nn.Embedding(5, 4), late

        def forward(self, x):
            labels = x[:, 0] % 5
            found = self.classes(labels)[:, None] if self.late else self.classes(labels[:, None])
            return torch.tanh(self.tokens(x) + found)

    x, found = inputs(words), []
    for late in (True, False):
        torch.manual_seed(0)
        found.append(trained(Classes(late).double(), x)[0])
    assert_same(*found)


class Merged(nn.Module):
    """Two weights that make one, as of an adapter."""

    def __init__(self, turned):
        super().__init__()
        self.turned, self.up = turned, nn.Linear(2, 4, bias=False)
        self.down = nn.Linear(*((2, 4) if turned else (4, 2)), bias=False)

    def forward(self, x):
        down = self.down.weight.T if self.turned else self.down.weight
        return torch.tanh(x @ (self.up.weight @ down).T)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
def test_a_weight_is_no_row_of_another(turned):
    model, x = built(lambda: Merged(turned), 4), inputs(sequences)
    kfac = KFAC(model)
    model(x).square().mean().backward()
    kfac.step()
    treatments = [kfac.routing()[f"body.{name}.weight"].treatment for name in ("down", "up")]
    assert treatments == ["waiting", "waiting"]


class Inside(nn.Module):
    """Checkpoints a part of its own forward."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.q = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.ones(4))

    def body(self, x):
        x = self.tokens(x) + self.places(torch.arange(5)) + self.shift
        return torch.tanh(F.linear(x, self.q.weight, self.q.bias))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:statistics miss some uses of these weights:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:these layers ran once for all examples:RuntimeWarning")
def test_a_checkpoint_inside_of_the_forward_trains_and_waits():
    model, x = built(Inside, 4), inputs(words)
    kfac = KFAC(model)
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
        kfac.step()
    for name in ("q.weight", "shift"):
        assert kfac.routing()[f"body.{name}"].treatment == "waiting"
    assert kfac.routing()["head.weight"].treatment == "kfac"


def test_gradients_taken_before_the_backward_pass_cost_no_statistics():
    """As in gradient penalties and adaptive weights."""
    found = []
    for first in (False, True):
        model = built(*CASES["linear"][::2])
        kfac = KFAC(model, kl_clip=None, damping=0.01)
        x = inputs(numbers).requires_grad_()
        y = model(x)
        if first:
            torch.autograd.grad(y.sum(), x, create_graph=True)
            torch.autograd.grad(y.sum(), model.head.weight, retain_graph=True)
        y.square().mean().backward()
        kfac.step()
        found.append([p.grad.clone() for p in model.parameters()])
    assert_same([found[0]], [found[1]])


def test_biases_of_tied_layers_with_forwards_of_their_own_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 3 * F.linear(x, self.weight, self.bias)

    model = nn.Sequential(Scaled(4, 4), nn.Tanh(), Scaled(4, 4))
    model[2].weight = model[0].weight
    routing = KFAC(model).routing()
    assert [routing[f"{i}.bias"].treatment for i in (0, 2)] == ["plain", "plain"]
    assert "forward of its own" in routing["0.bias"].reason


class Dropped(nn.Module):
    """A layer that is left out at times, behind one that may be in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.skip = nn.Linear(4, 4), LinearWithCast(4, 4), False

    def forward(self, x):
        x = torch.tanh(F.linear(x, self.first.weight, self.first.bias))
        return x if self.skip else self.second(x)


@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
def test_a_layer_left_out_in_the_first_step_is_seen_later():
    model, x = built(Dropped, 4), inputs(numbers)
    kfac = KFAC(model)
    for model.body.skip in (True, False):
        model.zero_grad()
        model(x).square().mean().backward()
        kfac.step()
    assert kfac.metrics()["layers"]["body.second"]["ready"]


@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
def test_a_sibling_in_evaluation_mode_hides_nothing():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return F.linear(torch.tanh(self.first(x)), self.second.weight, self.second.bias)

    model = built(Beside, 4)
    model.body.first.eval()
    kfac = KFAC(model)
    model(inputs(numbers)).square().mean().backward()
    kfac.step()
    assert kfac.metrics()["layers"]["body.second"]["ready"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_cast_to_the_inputs_dtype(dtype):
    class Cast(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    torch.manual_seed(0)
    model = nn.Sequential(Cast(4, 4), nn.Tanh(), Cast(4, 2))
    kfac = KFAC(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(9, 4, dtype=dtype)).float().square().mean().backward()
        kfac.step()
    assert all(record["ready"] for record in kfac.metrics()["layers"].values())


@pytest.mark.parametrize("function", [torch.linalg.slogdet, torch.linalg.qr, torch.linalg.svdvals])
def test_a_weight_in_a_function_that_returns_several_tensors_is_a_missed_use(function):
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = function(self.mix.weight)
            last = found if isinstance(found, torch.Tensor) else found[1]
            first, *_ = self.head.weight.unbind(0)  # a view: no use by itself
            return self.head(torch.tanh(self.mix(x))) + last.sum() + 0 * first.detach().sum()

    kfac = KFAC(model := Flow())
    model(torch.randn(8, 3)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*: 'mix'. Call"):
        kfac.step()


class Tied(nn.Module):
    """An autoencoder whose decoder has the transpose of the encoder's weight."""

    def __init__(self, decode, bias):
        super().__init__()
        self.encoder, self.decode = nn.Linear(4, 3, bias=bias), decode
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.decode(torch.tanh(self.encoder(x)), self.encoder.weight) + self.shift


class TiedOfItsOwn(Tied):
    """The same with a matrix of its own."""

    def __init__(self, decode, bias):
        super().__init__(decode, bias)
        self.w = self.encoder.weight
        self.b = self.encoder.bias
        del self.encoder

    def forward(self, x):
        h = torch.tanh(F.linear(x, self.w, self.b))
        return F.linear(h, self.w.t()) + self.shift


DECODERS = {
    "linear": lambda h, w: F.linear(h, w.t()),
    "product": lambda h, w: h @ w,
    "left product": lambda h, w: (w.T @ h.T).T,
    "einsum": lambda h, w: torch.einsum("oi,...o->...i", w, h),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("decoder", [*DECODERS, "own"])
def test_a_decoder_with_the_encoders_transpose(decoder, bias, parts):
    kind = TiedOfItsOwn if decoder == "own" else Tied
    torch.manual_seed(0)
    model = kind(DECODERS.get(decoder), bias).double()
    weight = model.w if decoder == "own" else model.encoder.weight
    b = model.b if decoder == "own" else model.encoder.bias
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0), kl_clip=None)
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double()
    for part in x.chunk(parts):
        ((model(part) - part).square().sum(-1).mean() / parts).backward()
    kfac.step()
    assert kfac.counted_terms == 12
    uses = []
    h = Times.apply(x, weight, uses)
    h = torch.tanh(h if b is None else h + b)
    y = Times.apply(h, weight, uses, True, False) + model.shift
    (y - x).square().sum(-1).mean().backward()
    A, G = expected_factors(uses, 12, bias)
    found = held(kfac)["w" if decoder == "own" else "encoder"]
    torch.testing.assert_close(found[0][0], A, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1][0], G, rtol=1e-9, atol=1e-12)


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.long())


class TiedHead(nn.Module):
    """Logits by the rows of the table that words are looked up in."""

    def __init__(self, how):
        super().__init__()
        table, self.how = nn.Embedding(7, 4), how
        if how == "further inside":
            self.lookup = Wrapped(Wrapped(table))
        else:
            self.lookup = table
        self.body = nn.Linear(4, 4)
        if how in ("module", "a module's weight"):
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = table.weight

    def rows(self):
        inner = self.lookup.inner.inner if self.how == "further inside" else self.lookup
        return inner.weight

    def forward(self, ids):
        h = torch.tanh(self.body(self.lookup(ids)))
        if self.how == "module":
            return self.head(h)
        if self.how == "a module's weight":
            return F.linear(h, self.head.weight)
        if self.how in ("linear", "further inside"):
            return F.linear(h, self.rows())
        if self.how == "product":
            return h @ self.rows().T
        return torch.einsum("vd,ntd->ntv", self.rows(), h)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("how", ["linear", "product", "einsum", "a module's weight", "further inside"])
def test_a_head_with_a_tables_rows(how, parts):
    ids = torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(0))
    found = []
    for kind in ("module", how):
        torch.manual_seed(0)
        model = TiedHead(kind).double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0), kl_clip=None)
        for part in ids.chunk(parts):
            (model(part).logsumexp(-1).mean() / parts).backward()
        kfac.step()
        assert kfac.counted_terms == 30
        factors = held(kfac)
        A, G = next(factors[name] for name in factors if name.startswith("lookup"))
        sides = (A[0], G[0]) if A.ndim == 3 else (G[0], A[0])  # of features, of rows
        found.append((sides[0][..., None] * sides[1], model.rows().grad, model.body.weight.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


MIXTURES = {
    "product": lambda p, w: p @ w,
    "linear": lambda p, w: F.linear(p, w.t()),
    "addmm": lambda p, w: torch.addmm(p.new_zeros(4), p, w),
    "from the left": lambda p, w: (w.t() @ p.mT).mT,
    "einsum": lambda p, w: torch.einsum("nv,vd->nd", p, w),
    "features first": lambda p, w: torch.einsum("vn,vd->dn", p.mT, w).mT,
    "of sequences": lambda p, w: (p.unflatten(0, (-1, 2)) @ w).flatten(0, 1),
}


class Mixing(nn.Module):
    """Mixtures of a table's rows, as of a Gumbel softmax, and perhaps lookups beside them."""

    def __init__(self, how, looks_up=False):
        super().__init__()
        self.logits, self.table = nn.Linear(5, 7), nn.Embedding(7, 4)
        self.how, self.looks_up, self.head = how, looks_up, nn.Linear(4, 3)

    def mixed(self, p):
        return MIXTURES[self.how](p, self.table.weight)

    def looked_up(self, ids):
        return self.table(ids)

    def forward(self, x):
        p = self.logits(x).softmax(-1)
        h = self.mixed(p)
        if self.looks_up:
            h = h + self.looked_up(p.argmax(-1))
        return self.head(h.tanh())


class MixingByLayer(Mixing):
    """The same, a linear layer for the table."""

    def __init__(self, how, looks_up=False):
        super().__init__(how, looks_up)
        weight = self.table.weight.detach().t().clone()
        self.table = nn.Linear(7, 4, bias=False)
        self.table.weight = nn.Parameter(weight)

    def mixed(self, p):
        return self.table(p)

    def looked_up(self, ids):
        return self.table(F.one_hot(ids, 7).to(self.table.weight))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=COMPILES)], ids=["", "compiled"])
@pytest.mark.parametrize("looks_up", [False, True], ids=["", "looked up, too"])
@pytest.mark.parametrize("how", MIXTURES)
def test_mixtures_of_a_tables_rows(how, looks_up, compiled):
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).double()
    ends = []
    for kind in (MixingByLayer, Mixing):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = kind(how, looks_up).double()
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        # The table's side is diagonal anyway; here the layer's is, too.
        kfac = KFAC(model, base, damping=0.1, kl_clip=None, max_factor_size=6)
        runs = kind is Mixing and compiled
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if runs else model
        for _ in range(3):
            kfac.zero_grad()
            for part in x.split(6):
                (loss_of(run(part)) / 2).backward()
            kfac.step()
        A, G = held(kfac)["table"]
        assert A.ndim == 2
        weight = model.table.weight
        weights = [model.logits.weight, weight.t() if kind is MixingByLayer else weight]
        ends.append([A, G, *weights, model.head.weight])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


def test_mixtures_have_rows_of_their_own():
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).double()
    torch.manual_seed(0)
    model, kept = Mixing("product").double(), []
    mixed = model.mixed

    def keeping(p):
        kept[:] = p, mixed(p)
        kept[1].retain_grad()
        return kept[1]

    model.mixed = keeping
    kfac = KFAC(model, kl_clip=None)
    loss_of(model(x)).backward()
    p, h = kept
    kfac.step()
    A, G = held(kfac)["table"]
    assert_close(A, p.detach().square().mean(0, keepdim=True))
    assert_close(G, 12 * (h.grad.mT @ h.grad)[None])


HEADS = "head by linear", "head by product", "head by einsum"


class Logits(torch.autograd.Function):
    """h Wᵀ, as heads are written that compute their loss in chunks."""

    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, weight)
        return h @ weight.mT

    @staticmethod
    def backward(ctx, gradient):
        h, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).mT @ h.flatten(0, -2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class LikeTheWeight(Doubled):
    """Is given a weight, for its dtype."""

    @staticmethod
    def forward(ctx, x, weight):
        return 2 * x.to(weight.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient, None


class OtherHead(TiedHead):
    def forward(self, ids):
        if self.how == "none":
            return self.body(Doubled.apply(self.lookup(ids)))
        if self.how == "no gradient":
            return self.body(LikeTheWeight.apply(self.lookup(ids), self.rows()))
        h = torch.tanh(self.body(self.lookup(ids)))
        weight = self.rows() if self.how == "itself" else self.rows().float().T.double().T
        return Logits.apply(h, weight)


@pytest.mark.parametrize("how", ["itself", "a view of a cast", "none", "no gradient"])
def test_a_head_in_an_autograd_function_is_missed_aloud(how):
    model = OtherHead(how).double()
    kfac = KFAC(model)
    model(torch.arange(6).reshape(2, 3)).logsumexp(-1).mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kfac.step()
    assert len(caught) == (how in ("itself", "a view of a cast"))
    for warning in caught:
        assert "statistics miss some uses" in str(warning.message)
        assert "'lookup'" in str(warning.message)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@COMPILES
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        *((functools.partial(TiedHead, how), {}) for how in ("linear", "product", "einsum")),
        (functools.partial(TiedHead, "linear"), {"max_factor_size": 6}),
        *((functools.partial(Tied, decode, True), {}) for decode in DECODERS.values()),
        (functools.partial(Tied, DECODERS["product"], False), {}),
        (lambda: nn.Sequential(TiedOfItsOwn(None, True)), {}),
        (functools.partial(Tied, DECODERS["einsum"], True), {"max_rows": 6}),
        (functools.partial(Tied, DECODERS["einsum"], True), {"compute_method": "ekfac"}),
    ],
    ids=[*HEADS, "diagonal", *DECODERS, "no bias", "own", "subset", "ekfac"],
)
def test_a_compiled_model_has_transposes_in_its_statistics(make, settings):
    ends, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    generator = torch.Generator().manual_seed(0)
    is_head = isinstance(make(), TiedHead)
    if is_head:
        batches = [torch.randint(0, 7, (6, 5), generator=generator) for _ in range(4)]
    else:
        batches = [torch.randn(12, 4, generator=generator).double() for _ in range(4)]
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make().double()
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        periods = {"factor_update_steps": 2, "inv_update_steps": 3}
        kfac = KFAC(model, base, damping=0.1, kl_clip=None, **periods, **settings)
        run = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        for x in batches:
            kfac.zero_grad()
            for part in x.chunk(2):
                y = run(part)
                loss = y.logsumexp(-1).mean() if is_head else (y - part).square().mean()
                (loss / 2).backward()
            kfac.step()
        ends.append([kfac.counted_terms, *model.parameters()])
    # With statistics and without; in bases there are yet none, and then some, to measure in.
    assert len(graphs) == (3 if "compute_method" in settings else 2)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.filterwarnings("ignore:these layers got a gradient but:RuntimeWarning")
@COMPILES
def test_a_compiled_transpose_before_its_layer_is_missed_aloud():
    class Backwards(Tied):
        def forward(self, x):
            return self.encoder(torch.tanh(self.decode(x, self.encoder.weight))) + 0 * self.shift.sum()

    torch._dynamo.reset()
    model = Backwards(DECODERS["product"], True).double()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run = torch.compile(model, backend="eager", fullgraph=True)
    run(torch.randn(5, 3).double()).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'encoder'"):
        kfac.step()


class AlsoUsed(nn.Module):
    """Does more with the weight of a layer than to call it."""

    def __init__(self, use):
        super().__init__()
        self.body, self.head, self.use = nn.Linear(6, 6), nn.Linear(6, 3), use

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(self.use(h, self.body.weight, self.body.bias))


ALSO = {
    "nothing": (lambda h, w, b: h, False),
    "a cast": (lambda h, w, b: F.linear(h.float(), w.float(), b.float()).double(), False),
    "a copy": (lambda h, w, b: F.linear(h, w.clone(), b), False),
    "a view": (lambda h, w, b: F.linear(h, w.view(6, 6), b), False),
    "the transpose": (lambda h, w, b: h @ w, False),
    "its dtype": (lambda h, w, b: h.float().type_as(w) + h.float().to(w), False),
    "its shape, as such": (lambda h, w, b: h.repeat(2, 1)[:6].mT.reshape_as(w).view_as(w), False),
    "its shape": (lambda h, w, b: h.view(-1, w.shape[0]) + torch.zeros_like(w).sum(), False),
    "the bias": (lambda h, w, b: h + b.square(), True),
    "a function of it": (lambda h, w, b: F.linear(h, w.tanh(), b), True),
    "a row": (lambda h, w, b: h + w[0], True),
    "halves": (lambda h, w, b: torch.cat([h @ part for part in w.chunk(2, 1)], 1), True),
    "in a list": (lambda h, w, b: F.linear(h, torch.cat([w, w]))[:, :6], True),
    "a penalty": (lambda h, w, b: h + w.square().sum(), True),
    "a determinant": (lambda h, w, b: h + torch.linalg.slogdet(w)[1], True),
    "the largest of a row": (lambda h, w, b: h + w[:, :3].max(1)[0], True),
    "which are the largest": (lambda h, w, b: h.roll(1, 0)[:, w.detach().max(1)[1]], False),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@COMPILES
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("use", ALSO)
def test_what_else_a_model_does_with_a_weight_is_said_where_it_is_compiled_too(use, compiled):
    torch._dynamo.reset()
    function, missed = ALSO[use]
    model = AlsoUsed(function).double()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    run(torch.randn(5, 6).double()).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kfac.step()
    said = [str(one.message) for one in caught if "statistics miss some uses" in str(one.message)]
    assert [": 'body'. Call" in one for one in said] == [True] * missed


class Mixed(nn.Module):
    """Uses weights of its own, of a child, a multiple of that, or a free parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.scale, self.weight = nn.Parameter(torch.ones(6)), nn.Parameter(torch.randn(6, 6))
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        if self.kind == "own":
            return self.head(F.linear(x, self.weight).tanh())
        if self.kind == "free":
            return self.head(self.inner(x).tanh() * self.scale)
        factor = 1 if self.kind == "child" else 2
        return self.head(F.linear(x, factor * self.inner.weight, self.inner.bias).tanh())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:these layers got a gradient but:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:statistics miss some uses:RuntimeWarning")
@COMPILES
@pytest.mark.parametrize(
    ("kind", "every"), [("own", 1), ("own", 2), ("free", 2), ("child", 1), ("multiple", 2)]
)
def test_compiled_in_parts_functions_are_seen_in_every_step(kind, every):
    """The hooks of the model itself run outside of its graph: torch compiles each by itself."""
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = Mixed(kind).double()
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, base, damping=0.1, factor_update_steps=every)
        run = torch.compile(model, backend="eager") if compiled else model
        for step in range(6):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
            run(x).square().mean().backward()
            assert not torch.overrides._get_current_function_mode_stack()
            kfac.step()
            kfac.zero_grad()
        layers = kfac.state_dict()["kfac"]["layers"]
        ends.append([x for name in sorted(layers) for x in (layers[name]["A"], layers[name]["G"])])
    for found, expected in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Masked(nn.Linear):
    """Of a MADE: some of its connections are left out."""

    def __init__(self, how) -> None:
        super().__init__(6, 5)
        self.how = how
        self.register_buffer("mask", (torch.arange(30) % 3 > 0).view(5, 6).to(self.weight.dtype))

    def forward(self, x):
        return F.linear(x, MASKS[self.how](self.weight, self.mask), self.bias)


class MaskedConv(nn.Conv2d):
    """Of a PixelCNN."""

    def __init__(self, how) -> None:
        super().__init__(2, 3, 3)
        self.how = how
        self.register_buffer("mask", (torch.arange(54) % 3 > 0).view(3, 2, 3, 3).to(self.weight.dtype))

    def forward(self, x):
        return self._conv_forward(x, MASKS[self.how](self.weight, self.mask), self.bias)


MASKS = {
    "times numbers": lambda w, m: w * m,
    "times booleans": lambda w, m: m.bool() * w,
    "filled": lambda w, m: w.masked_fill(m == 0, 0),
    "chosen": lambda w, m: torch.where(m > 0, w, 0.0),
    "chosen by a method": lambda w, m: w.where(m > 0, torch.zeros_like(w)),
    "a triangle": lambda w, m: w.tril(),
    "the other one": lambda w, m: torch.triu(w, diagonal=1),
}


@pytest.mark.parametrize("how", MASKS)
@pytest.mark.parametrize("kind", [Masked, MaskedConv])
def test_a_masked_weight_has_the_second_moments_of_what_its_layer_sees(kind, how):
    torch.manual_seed(0)
    masked = kind(how).double()
    base = kind.__mro__[1]
    plain = base(6, 5).double() if kind is Masked else base(2, 3, 3).double()
    with torch.no_grad():
        plain.weight.copy_(MASKS[how](masked.weight, masked.mask))
        plain.bias.copy_(masked.bias)
    x = torch.randn(*((7, 6) if kind is Masked else (7, 2, 4, 5)), dtype=torch.float64)
    found = []
    for layer in (plain, masked):
        kfac = KFAC(layer)
        layer(x).square().mean().backward()
        kfac.step()
        (record,) = kfac.state_dict()["kfac"]["layers"].values()
        found.append(record)
    for side in "AG":
        assert_close(found[1][side], found[0][side], 1e-12)


def test_a_weight_whose_entries_are_multiplied_with_other_numbers_waits():
    torch.manual_seed(0)
    model = nn.Sequential(Masked("times numbers"), nn.Linear(5, 2)).double()
    model[0].mask.mul_(0.5)
    kfac = KFAC(model)
    model(torch.randn(7, 6, dtype=torch.float64)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="not seen running.*'0'"):
        kfac.step()
