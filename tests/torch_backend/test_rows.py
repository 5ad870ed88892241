"""What each kind of layer leaves in its factors: sums over rows, against loops."""

from __future__ import annotations

import copy
import itertools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from conftest import assert_close
from suite.core import patches
from suite.core.correlations import second_moment_sum
from suite.torch import GRU, KFAC, LSTM, RNN
from suite.torch.rows import stratified
from torch_backend.rows_by_loops import (
    ROWS,
    Net,
    assert_sums,
    both_reductions,
    conv_rows,
    double,
    every_place,
    held,
    linear_rows,
    loss_of,
    matrices,
    numbers,
    stepped,
    watched,
    with_one,
)


@both_reductions
@pytest.mark.parametrize("name", ROWS)
def test_statistics_are_sums_over_rows(name, reduction):
    make, shape, rows_of = ROWS[name]
    layer, x = double(make), numbers(*shape)
    last = isinstance(layer, nn.Linear)
    model = Net(layer, getattr(layer, "out_channels", 3), last).double()
    reference, calls = watched(model, x, reduction=reduction)
    factors = held(stepped(model, x, reduction=reduction))
    terms = len(x) if reduction == "mean" else 1
    for name in ("layer", "head"):
        module = getattr(reference, name)
        a, g = (rows_of if name == "layer" else linear_rows)(module, *calls[name][0])
        assert_close(torch.einsum("bri,brj->bij", g, a), matrices("", module)[""])  # the loops are right
        assert_sums(factors[name], a, g, terms)
    if "layer.bias" in factors:
        y = calls["layer"][0][1]
        g = torch.stack([y.grad[(n, slice(None), *place)] for n, place in every_place(y)])
        assert_sums(factors["layer.bias"], torch.ones(1, 1, 1, dtype=x.dtype), g[None], terms)


UNBATCHED = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 2), (2, 4, 3)),
    "transposed1d": (lambda: nn.ConvTranspose1d(2, 3, 2), (2, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 4, 3)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Conv2d(2, 3, 2)), (2, 4, 3)),
}


@pytest.mark.parametrize("name", UNBATCHED)
def test_an_example_without_a_batch_axis_is_a_batch_of_one(name):
    make, shape = UNBATCHED[name]
    x = numbers(*shape)
    alone, batch = (held(stepped(double(make), y, reduction="sum")) for y in (x, x[None]))
    assert alone.keys() == batch.keys()
    for key, factors in alone.items():
        for factor, expected in zip(factors, batch[key], strict=True):
            assert_close(factor, expected)


BIASES = {
    "linear": (lambda: nn.Linear(4, 3), (3, 2, 4), True),
    "conv2d": (lambda: nn.Conv2d(2, 3, 2), (2, 2, 4, 3), False),
    "transposed2d": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 2, 4, 3), False),
    "layer norm": (lambda: nn.LayerNorm(3), (3, 2, 3), True),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 3), False),
}


@both_reductions
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_whose_weight_is_frozen_has_a_block_of_its_own(name, reduction):
    make, shape, last = BIASES[name]
    model, x = Net(double(make), 3, last).double(), numbers(*shape)
    model.layer.weight.requires_grad_(False)
    _, calls = watched(model, x, reduction=reduction)
    g = calls["layer"][0][1].grad
    g = (g if last else g.movedim(1, -1)).reshape(1, -1, 3)
    terms = len(x) if reduction == "mean" else 1
    factors = held(stepped(model, x, reduction=reduction))
    assert_sums(factors["layer.bias"], torch.ones(1, 1, 1, dtype=x.dtype), g, terms)
    assert "layer" not in factors


# ---- embeddings ---------------------------------------------------------------------------------


@both_reductions
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding_statistics_are_sums_over_looked_up_rows(padding_idx, reduction):
    table = double(lambda: nn.Embedding(6, 4, padding_idx=padding_idx))
    model, x = Net(table, 4).double(), torch.tensor([[2, 0, 5], [2, 2, 3]])
    _, calls = watched(model, x, reduction=reduction)
    g = calls["layer"][0][1].grad
    padding = None if padding_idx is None else padding_idx % 6
    rows = [(n, t) for n in range(2) for t in range(3) if int(x[n, t]) != padding]
    a = torch.stack([F.one_hot(x[at], 6).double() for at in rows])
    factors = held(stepped(model, x, reduction=reduction))
    assert factors["layer"][0].shape == (1, 6)
    terms = 2 if reduction == "mean" else 1
    assert_sums(factors["layer"], a[None], torch.stack([g[at] for at in rows])[None], terms)


@pytest.mark.parametrize("rows", [9, 5])
def test_a_table_has_the_rows_of_its_weight_whatever_its_number_says(rows):
    table, x = nn.Embedding(6, 4), torch.tensor([[2, 0, 4], [rows - 1, 2, 3]])
    table.weight = nn.Parameter(numbers(rows, 4))
    model = Net(table, 4).double()
    _, calls = watched(model, x)
    a, g = F.one_hot(x.flatten(), rows).double(), calls["layer"][0][1].grad.reshape(1, -1, 4)
    assert_sums(held(stepped(model, x))["layer"], a[None], g, 2)


INDICES = torch.tensor([1, 1, 4, 0, 2, 1, 5, 5, 5, 3])
OFFSETS = torch.tensor([0, 3, 3, 7])  # the second bag is empty
WEIGHTS = numbers(10, seed=3)
BAGS = {
    "sum": ({"mode": "sum"}, (INDICES, OFFSETS)),
    "mean": ({"mode": "mean"}, (INDICES, OFFSETS)),
    "weighted": ({"mode": "sum"}, (INDICES, OFFSETS, WEIGHTS)),
    "padding sum": ({"mode": "sum", "padding_idx": 1}, (INDICES, OFFSETS)),
    "padding mean": ({"mode": "mean", "padding_idx": 5}, (INDICES, OFFSETS)),
    "last offset": (
        {"mode": "mean", "include_last_offset": True},
        (INDICES, torch.tensor([0, 3, 3, 7, 10])),
    ),
    "matrix": ({"mode": "mean"}, (INDICES.reshape(5, 2),)),
    "weighted matrix": ({"mode": "sum"}, (INDICES.reshape(5, 2), None, WEIGHTS.reshape(5, 2))),
}


@pytest.mark.parametrize("name", BAGS)
def test_bag_statistics_are_sums_over_bags(name):
    options, inputs = BAGS[name]
    model = Net(double(lambda: nn.EmbeddingBag(6, 4, **options)), 4).double()
    reference, calls = watched(model, *inputs)
    weights = WEIGHTS if "weighted" in name else torch.ones(10, dtype=torch.float64)
    ends = [0, 3, 3, 7, 10] if "matrix" not in name else [0, 2, 4, 6, 8, 10]
    a = []
    for first, end in itertools.pairwise(ends):
        row, entries = torch.zeros(6, dtype=torch.float64), 0
        for i in range(first, end):
            if int(INDICES[i]) != options.get("padding_idx"):
                row[INDICES[i]] += weights[i]
                entries += 1
        a.append(row / max(entries, 1) if options["mode"] == "mean" else row)
    a, g = torch.stack(a)[None], calls["layer"][0][1].grad[None]
    assert_close(torch.einsum("bri,brj->ij", a, g), reference.layer.weight.grad)
    assert_sums(held(stepped(model, *inputs))["layer"], a, g, len(a[0]))


# ---- recurrent layers ---------------------------------------------------------------------------


def recurrent_products(kind, module, x, h):
    """{weight: [(input, product) of each step]} and all outputs of a layer, by torch.nn's equations."""
    ih, hh = [], []
    state, c, outputs = h, torch.zeros_like(h), []
    for step in x.unbind(0):
        ih.append((step, F.linear(step, module.weight_ih_l0, module.bias_ih_l0)))
        hh.append((state, F.linear(state, module.weight_hh_l0, module.bias_hh_l0)))
        s, r = ih[-1][1], hh[-1][1]
        s.retain_grad(), r.retain_grad()
        if kind is RNN:
            state = torch.tanh(s + r)
        elif kind is LSTM:
            i, f, g, o = (s + r).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            state = o.sigmoid() * c.tanh()
        else:
            (r1, z1, n1), (r2, z2, n2) = s.chunk(3, -1), r.chunk(3, -1)
            z = (z1 + z2).sigmoid()
            state = (1 - z) * (n1 + (r1 + r2).sigmoid() * n2).tanh() + z * state
        outputs.append(state)
    return {"weight_ih_l0": ih, "weight_hh_l0": hh}, torch.stack(outputs)


class Recurs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent, self.kind, self.head = kind(3, 4), kind, nn.Linear(4, 3)

    def forward(self, x, h):
        state = (h, torch.zeros_like(h)) if self.kind is LSTM else h
        return self.head(self.recurrent(x, state)[0][-1])


@pytest.mark.parametrize("kind", [RNN, LSTM, GRU])
def test_recurrent_statistics_are_sums_over_steps(kind):
    model = double(lambda: Recurs(kind))
    x, h = numbers(5, 2, 3), numbers(1, 2, 4)
    reference = copy.deepcopy(model)
    products, outputs = recurrent_products(kind, reference.recurrent, x, h[0])
    loss_of(reference.head(outputs[-1])).backward()
    factors = held(stepped(model, x, h))
    for name, calls in products.items():
        a = torch.cat([a for a, _ in calls]).detach()[None]
        g = torch.cat([y.grad for _, y in calls])[None]
        assert a.shape[1] == 10
        assert_sums(factors[f"recurrent.{name}"], with_one(a), g, 2)


# ---- units ----------------------------------------------------------------------------------------


def normalized(x, axes, eps, centre=True):
    x = x - x.mean(axes, keepdim=True) if centre else x
    return x / (x.square().mean(axes, keepdim=True) + eps).sqrt()


def by_groups(x):
    return normalized(x.unflatten(1, (2, 2)), tuple(range(2, x.ndim + 1)), 1e-5).flatten(1, 2)


def eps_of(x):
    return torch.finfo(x.dtype).eps


UNITS = {
    "layer norm": (lambda: nn.LayerNorm(4), (3, 2, 4), lambda x: normalized(x, -1, 1e-5)),
    "layer norm, two axes": (
        lambda: nn.LayerNorm((2, 4)),
        (3, 3, 2, 4),
        lambda x: normalized(x, (-2, -1), 1e-5),
    ),
    "layer norm without bias": (
        lambda: nn.LayerNorm(4, bias=False),
        (3, 2, 4),
        lambda x: normalized(x, -1, 1e-5),
    ),
    "rms norm": (lambda: nn.RMSNorm(4), (3, 2, 4), lambda x: normalized(x, -1, eps_of(x), False)),
    "rms norm with eps": (
        lambda: nn.RMSNorm(4, eps=0.1),
        (3, 4),
        lambda x: normalized(x, -1, 0.1, False),
    ),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 2, 2), by_groups),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), (5, 4), lambda x: normalized(x, 0, 1e-5)),
    "batch norm on positions": (
        lambda: nn.BatchNorm1d(4),
        (3, 4, 5),
        lambda x: normalized(x, (0, 2), 1e-5),
    ),
    "batch norm 2d": (
        lambda: nn.BatchNorm2d(4, eps=0.1),
        (3, 4, 2, 2),
        lambda x: normalized(x, (0, 2, 3), 0.1),
    ),
    "batch norm 3d": (
        lambda: nn.BatchNorm3d(4),
        (2, 4, 2, 2, 1),
        lambda x: normalized(x, (0, 2, 3, 4), 1e-5),
    ),
    "instance norm": (
        lambda: nn.InstanceNorm2d(4, affine=True),
        (3, 4, 2, 2),
        lambda x: normalized(x, (2, 3), 1e-5),
    ),
}


@both_reductions
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", UNITS)
def test_a_unit_has_the_sum_of_its_rows_gradients(name, sharing, reduction):
    """A scale and a shift of its own for every row: autograd gives each row's gradient."""
    make, shape, normalize = UNITS[name]
    layer, x, last = double(make), numbers(*shape), "layer" in name or "rms" in name
    model = Net(layer, 4, last).double()
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.3 * numbers(*p.shape, seed=8)
    spread = (-1, *(1,) * (x.ndim - 2)) if not last else layer.weight.shape
    per_row = [
        (0 * x if p is None else p.detach().reshape(spread).expand(shape)).clone().requires_grad_()
        for p in (layer.weight, getattr(layer, "bias", None))
    ]
    y = normalize(x) * per_row[0] + per_row[1]
    torch.testing.assert_close(y, layer(x))
    loss_of(model.after(y), reduction).backward()
    units = layer.weight.numel()
    grads = [p.grad if last else p.grad.movedim(1, -1) for p in per_row]
    z = torch.stack([g.reshape(shape[0], -1, units) for g in grads], -1)
    z = z.sum(1) if sharing == "reduce" else z.flatten(0, 1)
    terms = shape[0] if reduction == "mean" else 1
    factors = held(stepped(model, x, reduction=reduction, weight_sharing=sharing))["layer"]
    if getattr(layer, "bias", None) is None:
        assert_close(factors[0] * factors[1][:, 0], terms * z[None, :, :, 0].square().sum(1))
    else:
        blocks = sum(torch.einsum("ui,uj->uij", row, row) for row in z)
        assert_close(factors[0] * factors[1], terms * blocks)


# ---- shared rows: reduce, and random subsets ----------------------------------------------------


@both_reductions
@pytest.mark.parametrize(
    "name", ["linear on sequences", "conv1d", "conv2d", "conv2d depthwise", "transposed1d"]
)
def test_reduce_takes_mean_inputs_and_summed_gradients_of_every_example(name, reduction):
    make, shape, rows_of = ROWS[name]
    layer, x = double(make), numbers(*shape)
    model = Net(layer, getattr(layer, "out_channels", 3), isinstance(layer, nn.Linear)).double()
    reference, calls = watched(model, x, reduction=reduction)
    a, g = rows_of(reference.layer, *calls["layer"][0])
    per_example = [
        (a[:, rows].mean(1), g[:, rows].sum(1)) for rows in torch.arange(a.shape[1]).chunk(len(x))
    ]
    a, g = (torch.stack(parts, 1) for parts in zip(*per_example, strict=True))
    factors = held(stepped(model, x, reduction=reduction, weight_sharing="reduce"))
    assert_sums(factors["layer"], a, g, len(x) if reduction == "mean" else 1)


def test_reduce_may_be_chosen_by_class_name():
    make, shape, _ = ROWS["conv2d"]
    model, x = Net(double(make), 3, False).double(), numbers(*shape)
    expanded, reduced, mixed = (
        held(stepped(copy.deepcopy(model), x, weight_sharing=sharing))
        for sharing in ("expand", "reduce", {"Conv2d": "reduce"})
    )
    assert (expanded["layer"][0] - reduced["layer"][0]).abs().max() > 0.01
    assert_close(mixed["layer"][0], reduced["layer"][0])


@pytest.mark.parametrize(("count", "total"), [(1, 5), (3, 7), (4, 8), (7, 7)])
def test_every_row_is_as_likely_to_be_chosen(count, total):
    grid = 4 * 7  # fine enough for the fractions above
    times = torch.zeros(total)
    for k in range(grid):
        chosen = stratified(torch.full((count,), (k + 0.5) / grid), total)
        assert len(set(chosen.tolist())) == count or count > total / 2
        times += torch.bincount(chosen, minlength=total)
    assert times.min() > 0
    assert_close(times / grid, torch.full((total,), count / total), rtol=3 / grid)


SUBSETS = {
    "linear": (lambda: nn.Linear(4, 3), (3, 5, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1, dilation=2), (3, 2, 8)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 2, stride=2, padding=1, groups=2), (3, 2, 4, 5)),
    "conv2d circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        (3, 2, 4, 3),
    ),
    "transposed1d": (lambda: nn.ConvTranspose1d(3, 2, 3, stride=2), (3, 3, 6)),
}


@pytest.mark.parametrize("name", SUBSETS)
def test_a_random_subset_of_rows_is_unbiased(name):
    make, shape = SUBSETS[name]
    model, x, steps = double(make), numbers(*shape), 400
    statistics = []
    for max_rows in (None, 6):
        kfac = KFAC(model, max_rows=max_rows)
        for step in range(steps if max_rows else 1):
            kfac._engine.capture.clock.count.fill_(step)
            model.zero_grad()
            loss_of(model(x)).backward()
            sums = kfac._engine.capture.take_statistics()[0].main
            statistics.append(torch.cat([sums.A.flatten(), sums.G.flatten(), sums.rows[None]]))
        kfac.detach()
    full, samples = statistics[0], torch.stack(statistics[1:])
    error = samples.std(0) / steps**0.5
    assert (error[:-1] > 0).any()
    assert ((samples.mean(0) - full).abs() <= 5 * error + 1e-12).all()
    assert_close(samples[:, -1], full[-1].expand(steps))  # the count is that of all rows


EXAMPLES = {
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1), (6, 2, 4, 3)),
    "strided": (lambda: nn.Conv2d(4, 2, 3, stride=2, groups=2, bias=False), (6, 4, 5, 5)),
    "reduce": (lambda: nn.Conv1d(2, 3, 2), (6, 2, 5)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (6, 2, 4, 3)),
    "transposed1d": (lambda: nn.ConvTranspose1d(3, 2, 3, stride=2), (6, 3, 6)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (6, 3, 4, 2)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (6, 4, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (6, 3, 5)),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_random_subset_of_examples_is_unbiased(name):
    """Over the subsets that there are, one of every two examples, each as likely."""
    make, shape = EXAMPLES[name]
    model, x = double(make), numbers(*shape)
    found = {}
    settings = {"weight_sharing": "reduce" if name == "reduce" else "expand"}
    for noise in [None, *itertools.product((0.1, 0.6), repeat=3)]:
        kfac = KFAC(model, max_examples=None if noise is None else 3, **settings)
        if noise is not None:
            chosen = stratified(torch.tensor(noise), 6)
            kfac._engine.capture.clock.chosen = lambda *args, chosen=chosen: chosen
        model.zero_grad()
        loss_of(model(x)).backward()
        sums = kfac._engine.capture.take_statistics()[0].main
        found[noise] = torch.cat([sums.A.flatten(), sums.G.flatten(), sums.rows[None]])
        kfac.detach()
    expected, samples = found.pop(None), torch.stack(list(found.values()))
    assert (samples.std(0)[:-1] > 0).any()
    assert_close(samples.mean(0), expected)
    assert_close(samples[:, -1], expected[-1].expand(8))  # the count is that of all rows


def test_examples_are_drawn_anew_in_every_step():
    model, x = double(lambda: nn.Conv2d(2, 3, 3)), numbers(8, 2, 4, 4)
    kfac, found = KFAC(model, max_examples=4), []
    for step in range(6):
        kfac._engine.capture.clock.count.fill_(step)
        model.zero_grad()
        loss_of(model(x)).backward()
        found.append(kfac._engine.capture.take_statistics()[0].main.A)
    assert len({tuple(A.flatten().tolist()) for A in found}) > 2  # of sixteen that there are


def test_a_batch_of_no_more_examples_is_taken_whole():
    model, x = double(lambda: nn.Conv2d(2, 3, 3)), numbers(4, 2, 5, 5)
    found = [held(stepped(copy.deepcopy(model), x, max_examples=n))[""] for n in (None, 4, 99)]
    for other in found[1:]:
        for factor, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(factor, expected, rtol=0, atol=0)


def test_a_subset_that_is_not_smaller_is_everything():
    model, x = double(lambda: nn.Linear(4, 3)), numbers(3, 5, 4)
    found = [held(stepped(copy.deepcopy(model), x, max_rows=n))[""] for n in (None, 15, 99)]
    for other in found[1:]:
        for factor, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(factor, expected, rtol=0, atol=0)


# ---- weights that are computed ------------------------------------------------------------------


def old_weight_norm(module):
    with pytest.warns(FutureWarning, match="weight_norm"):
        module = nn.utils.weight_norm(module)
    module.weight = module.weight.detach()  # made anew by every call; as it is, it cannot be copied
    return module


def old_spectral_norm(module, **settings):
    module = nn.utils.spectral_norm(module, **settings)
    module.weight = module.weight.detach()  # as for the old weight_norm
    return module


NORMED = {
    "old spectral_norm": (old_spectral_norm, "weight_orig", None),
    "old weight_norm": (old_weight_norm, "weight_v", "weight_g"),
    "weight_norm": (
        parametrizations.weight_norm,
        "parametrizations.weight.original1",
        "parametrizations.weight.original0",
    ),
    "spectral_norm": (parametrizations.spectral_norm, "parametrizations.weight.original", None),
}
PLAIN = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4), linear_rows),
    "linear on sequences": (lambda: nn.Linear(4, 3, bias=False), (3, 2, 4), linear_rows),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), padding=1), (2, 2, 4, 5), conv_rows),
    "conv1d groups": (lambda: nn.Conv1d(4, 6, 2, groups=2), (3, 4, 5), conv_rows),
}


@pytest.mark.parametrize("dim", [None, 2])
def test_a_weight_norm_that_is_not_by_rows_scales_rows_as_they_are_longer(dim):
    """With one magnitude the scale is the weight's; with those of columns it is a mean of theirs."""
    torch.manual_seed(0)
    layer, x = (
        parametrizations.weight_norm(nn.Conv1d(4, 6, 3, groups=2).double(), dim=dim),
        numbers(3, 4, 5),
    )
    stack = layer.parametrizations.weight
    with torch.no_grad():
        stack.original0.mul_(
            torch.linspace(1.5, 2.5, stack.original0.numel()).reshape_as(stack.original0)
        )
    model = Net(layer, 6, False).double()
    reference, calls = watched(model, x)
    (args, y) = calls["layer"][0]
    v, W = (w.detach().flatten(1) for w in (stack.original1, layer.weight))
    scales = W.norm(dim=1) / v.norm(dim=1)
    if dim is None:
        assert_close(scales, scales[:1].expand(6))
    a, g = conv_rows(reference.layer, args, y)
    kfac = stepped(model, x)
    assert_sums(held(kfac)["layer"], a[..., :-1], g * scales.reshape(2, 1, 3), len(x))
    assert kfac.routing()["layer.parametrizations.weight.original1"].treatment == "kfac"
    assert kfac.routing()["layer.parametrizations.weight.original0"].treatment == "plain"


class Times(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "old spectral_norm"])
def test_a_normed_transposed_convolution_is_the_plain_one_of_inputs_that_are_scaled(kind, groups):
    """As in vocoders, whose weight_norm has a magnitude for each input channel."""
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(4, 6, 3, stride=2, groups=groups).double()
    if kind == "weight_norm":
        raw = parametrizations.weight_norm(layer).parametrizations.weight.original1
        with torch.no_grad():
            magnitudes = layer.parametrizations.weight.original0
            magnitudes *= torch.linspace(0.5, 2.0, 4)[:, None, None]
    elif kind == "spectral_norm":
        normed = parametrizations.spectral_norm(layer, n_power_iterations=200)
        raw = normed.parametrizations.weight.original
    else:
        layer = old_spectral_norm(layer, n_power_iterations=200)
        layer(numbers(3, 4, 5))
        layer.weight, raw = layer.weight.detach(), layer.weight_orig
    model, x = Net(layer, 6, False).double(), numbers(3, 4, 5)
    scale = (layer.weight.flatten(1).norm(dim=1) / raw.flatten(1).norm(dim=1)).detach()
    plain = nn.ConvTranspose1d(4, 6, 3, stride=2, groups=groups).double()
    plain.load_state_dict({"weight": raw.detach(), "bias": layer.bias.detach()})
    reference = Net(nn.Sequential(Times(scale[:, None]), plain), 6, False).double()
    reference.head.load_state_dict(model.head.state_dict())
    torch.testing.assert_close(reference(x), model(x))
    kfac = stepped(model, x)
    (A, G), (inputs, outputs) = held(kfac)["layer"], held(stepped(reference, x))["layer.1"]
    if kind != "weight_norm":  # whose scale is the gradient's
        inputs, outputs = inputs / scale[0] ** 2, outputs * scale[0] ** 2
    assert_close(A, inputs)
    assert_close(G, outputs)
    assert kfac.routing()["layer.bias"].treatment == "kfac"


@both_reductions
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", NORMED)
def test_a_normed_weight_has_scaled_gradients_and_its_magnitude_a_diagonal(name, kind, reduction):
    norm, direction, magnitude = NORMED[name]
    make, shape, rows_of = PLAIN[kind]
    layer, x = norm(double(make)), numbers(*shape)
    if magnitude is not None:
        with torch.no_grad():
            layer.get_parameter(magnitude).mul_(1.7).add_(0.1)
    last = isinstance(layer, nn.Linear)
    model = Net(layer, 3 if last else layer.out_channels, last).double()
    reference, calls = watched(model, x, reduction=reduction)
    (args, y) = calls["layer"][0]
    v = reference.layer.get_parameter(direction).detach()
    W = reference.eval().layer.weight.detach()  # in training, asking runs another power iteration
    scale = (W.flatten() @ v.flatten()) / (v.flatten() @ v.flatten())  # of spectral_norm: W = v / σ
    scales = scale.expand(len(v))
    if magnitude is not None:
        size = v.flatten(1).norm(dim=1)
        scales = reference.layer.get_parameter(magnitude).detach().flatten() / size
    assert_close(W.flatten(1), scales[:, None] * v.flatten(1))
    a, g = rows_of(reference.layer, args, y)
    terms = len(x) if reduction == "mean" else 1
    factors = held(stepped(model, x, reduction=reduction))
    blocks = len(a)
    scaled = g * scales.reshape(blocks, 1, -1)
    has_bias = reference.layer.bias is not None
    assert_sums(factors["layer"], a[..., :-1] if has_bias else a, scaled, terms)
    if has_bias:
        every = g.movedim(0, 1).flatten(1)[None]
        assert_sums(factors["layer.bias"], torch.ones(1, 1, 1, dtype=x.dtype), every, terms)
    if magnitude is not None:
        a = a[..., :-1] if has_bias else a
        unit = (v.flatten(1) / size[:, None]).reshape(blocks, -1, v.flatten(1).shape[1])
        per_row = g * torch.einsum("brj,boj->bro", a, unit)  # dL/dg_i of a row
        A, G = factors["layer.magnitude"]
        assert_close(per_row.sum(1).flatten(), reference.layer.get_parameter(magnitude).grad.flatten())
        assert_close(A * G[:, 0], terms * per_row.square().sum(1).reshape(1, -1))


class Made(nn.Module):
    """A parametrization that is a function of the weight."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, weight):
        return self.function(weight)


def row_lengths(w):
    return w.flatten(1).norm(dim=1).reshape(-1, *(1,) * (w.ndim - 1))


FUNCTIONS = {  # of a weight, and whether they scale columns
    "equal rates": (lambda w: w * (2 / w[0].numel()) ** 0.5, False),
    "unit rows": (lambda w: w / row_lengths(w), False),
    "unit weight": (lambda w: 3 * w / w.norm(), False),
    "unit columns": (lambda w: F.normalize(w, dim=0), True),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in FUNCTIONS for kind in PLAIN if "linear" in kind or name != "unit columns"],
)
def test_a_weight_that_a_function_scales_has_scaled_gradients_or_inputs(name, kind):
    make, shape, rows_of = PLAIN[kind]
    function, by_columns = FUNCTIONS[name]
    layer, x = double(make), numbers(*shape)
    nn.utils.parametrize.register_parametrization(layer, "weight", Made(function))
    last = isinstance(layer, nn.Linear)
    model = Net(layer, 3 if last else layer.out_channels, last).double()
    reference, calls = watched(model, x)
    (args, y) = calls["layer"][0]
    v, W = (w.detach() for w in (layer.parametrizations.weight.original, layer.weight))
    a, g = rows_of(reference.layer, args, y)
    a = a if layer.bias is None else a[..., :-1]
    if by_columns:
        a = a * (W / v)[0]
        torch.testing.assert_close(W, v * (W / v)[:1])
    else:
        scales = W.flatten(1)[:, 0] / v.flatten(1)[:, 0]
        torch.testing.assert_close(W.flatten(1), v.flatten(1) * scales[:, None])
        g = g * scales.reshape(len(a), 1, -1)
    kfac = stepped(model, x)
    assert_sums(held(kfac)["layer"], a, g, len(x))
    said = "scaled columns" if by_columns else "scaled rows"
    assert said in kfac.routing()["layer.parametrizations.weight.original"].reason


OTHERS = {
    "mask of its own": lambda w: w * (w > 0),
    "sine": torch.sin,
    "symmetric": lambda w: w.triu() + w.triu(1).mT,
    "negative": lambda w: -w.abs(),
    "of another shape": lambda w: w.repeat(2, 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_weight_that_a_function_changes_otherwise_is_plain(name):
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Made(OTHERS[name]), unsafe=True)
    kfac = KFAC(nn.Sequential(layer, nn.Linear(4, 4)))
    assert kfac.routing()["0.parametrizations.weight.original"].treatment == "plain"


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(4, 3), (5, 4)),
        (lambda: nn.Conv2d(2, 3, 3, bias=False), (2, 2, 4, 5)),
        (lambda: nn.ConvTranspose1d(4, 3, 2), (2, 4, 5)),
    ],
)
def test_a_pruned_layer_has_the_factors_of_one_whose_weight_has_the_zeros(make, shape):
    layer, x = double(make), numbers(*shape)
    prune.random_unstructured(layer, "weight", 0.3)
    plain = double(make)
    with torch.no_grad():
        plain.weight.copy_(layer.weight_orig * layer.weight_mask)
        if plain.bias is not None:
            plain.bias.copy_(layer.bias)
    layer.weight = layer.weight.detach()
    last = isinstance(layer, nn.Linear)
    model, reference = (Net(one, 3, last).double() for one in (layer, plain))
    reference.head.load_state_dict(model.head.state_dict())
    factors = (held(stepped(one, x))["layer"] for one in (model, reference))
    for own, other in zip(*factors, strict=True):
        assert_close(own, other[..., : own.shape[-1], : own.shape[-1]])  # without the bias's column


def test_a_magnitude_of_zero_has_its_curvature_all_the_same():
    layer = nn.utils.parametrizations.weight_norm(double(lambda: nn.Linear(3, 2)))
    with torch.no_grad():
        layer.parametrizations.weight.original0[0] = 0
    kfac = KFAC(layer, kl_clip=None, loss_reduction="sum")
    x = numbers(5, 3)
    layer(x).sum().backward()
    kfac.step()
    assert kfac.skipped_steps == 0
    state = kfac.state_dict()["kfac"]["layers"]["magnitude"]
    v = layer.parametrizations.weight.original1.detach()
    along = x @ (v / v.norm(dim=1, keepdim=True)).T  # what each row says of each magnitude
    found = state["A"] / state["A_weight"] * state["G"][:, 0] / state["G_weight"]
    assert_close(found, along.square().sum(0)[None])


@pytest.mark.parametrize(
    ("device", "examples", "made"), [("cpu", 2, 0), ("meta", 2, 1), ("meta", 4096, 0)]
)
def test_patches_are_made_where_launches_cost_more_than_products(device, examples, made):
    x = torch.zeros(examples, 16, 32, 32, device=device)
    with mock.patch.object(patches, "patches", wraps=patches.patches) as rows:
        second_moment_sum(x, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), bias=True)
    whole = [call for call in rows.call_args_list if call.args[0].shape == x.shape]
    assert len(whole) == made
