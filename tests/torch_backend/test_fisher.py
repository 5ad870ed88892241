"""What K-FAC holds after a step, against dense Fisher matrices and sums over rows written out as loops."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from conftest import assert_close
from oracles import convolution_rows
from suite.core.likelihoods import Bernoulli, Categorical, Gaussian
from suite.torch import GRU, KFAC, LSTM, RNN
from suite.torch.rows import stratified

Tensor = torch.Tensor
REDUCTIONS = ("mean", "sum")
both_reductions = pytest.mark.parametrize("reduction", REDUCTIONS)


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tokens(*shape, below):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(0))


def double(make):
    torch.manual_seed(0)
    return make().double()


class Net(nn.Module):
    """A layer, tanh, the mean over positions and a linear head: the loss has a term an example."""

    def __init__(self, layer, channels, channels_last=True):
        super().__init__()
        self.layer, self.head, self.channels_last = layer, nn.Linear(channels, 3), channels_last

    def forward(self, *inputs):
        return self.after(self.layer(*inputs))

    def after(self, y):
        y = torch.tanh(y if self.channels_last else y.movedim(1, -1))
        return self.head(y.flatten(1, -2).mean(1) if y.ndim > 2 else y)


def loss_of(f, reduction="mean"):
    """One term for each row of f, none like another."""
    terms = (f.sin() * torch.linspace(1, 2, f.shape[-1], dtype=f.dtype)).sum(-1)
    return terms.mean() if reduction == "mean" else terms.sum()


def watched(model, *inputs, reduction="mean"):
    """The model without K-FAC after a backward pass, and the calls of its modules: {name: [(args, y)]}."""
    model, calls = copy.deepcopy(model), {}

    def watch(name):
        def hook(module, args, y):
            if isinstance(y, Tensor) and y.requires_grad:
                y.retain_grad()
                calls.setdefault(name, []).append((args, y))

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(watch(name))
    loss_of(model(*inputs), reduction).backward()
    return model, calls


def stepped(model, *inputs, reduction="mean", steps=1, **options):
    """K-FAC on the model after `steps` equal steps."""
    kfac = KFAC(model, kl_clip=None, loss_reduction=reduction, **options)
    for _ in range(steps):
        model.zero_grad()
        loss_of(model(*inputs), reduction).backward()
        kfac.step()
    return kfac


def held(kfac):
    """{layer: (A, G)}, the running averages; (blocks, n, n), or (blocks, n) of diagonal ones."""
    state = kfac.state_dict()["kfac"]
    found = {}
    for name, record in state["layers"].items():
        source = state["layers"][state["inputs"].get(name, name)]
        pairs = (source["A"], source["A_weight"]), (record["G"], record["G_weight"])
        found[name] = [x / w.reshape(-1, *(1,) * (x.ndim - 1)) for x, w in pairs]
    return found


def assert_sums(factors, a, g, terms):
    """A = Σ a aᵀ / R and G = terms Σ g gᵀ, for rows (blocks, R, d)."""
    for factor, rows, scale in ((factors[0], a, 1 / a.shape[1]), (factors[1], g, terms)):
        expected = scale * sum(torch.einsum("bi,bj->bij", row, row) for row in rows.unbind(1))
        if factor.ndim == 2:
            expected = expected.diagonal(dim1=-2, dim2=-1)
        assert_close(factor, expected)


def dense(factor):
    return torch.diag(factor) if factor.ndim == 1 else factor


def blocks_of(factors):
    """The dense Fisher blocks A ⊗ G over matrices (d_out, d_in) that are vectorised row by row."""
    return [torch.kron(dense(g), dense(a)) for a, g in zip(*factors, strict=True)]


def with_one(rows):
    return torch.cat([rows, torch.ones_like(rows[..., :1])], -1)


# ---- one row: A ⊗ G is the outer product of the gradient ----------------------------------------


def matrices(name, module):
    """Gradients by block: {layer: (blocks, d_out, d_in)}, as their products are written."""
    w = module.weight.grad
    b = module.bias.grad if getattr(module, "bias", None) is not None else None
    inner = f"{name}." if name else ""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        groups = module.groups
        return {name: w.reshape(groups, w.shape[0] // groups, -1).mT, f"{inner}bias": b[None, :, None]}
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        groups = getattr(module, "groups", 1)
        matrix = w.reshape(groups, w.shape[0] // groups, -1)
        column = [] if b is None else [b.reshape(groups, -1, 1)]
        return {name: torch.cat([matrix, *column], -1)}
    if isinstance(module, nn.Embedding):
        return {name: w.T[None]}
    if b is None:
        return {name: w.reshape(1, 1, -1)}
    return {name: torch.stack([w.flatten(), b.flatten()], -1)[:, None]}


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


# ---- many rows: sums by loops -------------------------------------------------------------------


def linear_rows(layer, args, y):
    a = args[0].reshape(1, -1, args[0].shape[-1])
    return with_one(a) if layer.bias is not None else a, y.grad.reshape(1, -1, y.shape[-1])


def padded(layer, x):
    """What the kernel runs over, as numpy array."""
    pads = [(p, p) for p in layer.padding] if layer.padding != "same" else None
    if pads is None:
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    mode = {"zeros": "constant", "replicate": "edge", "circular": "wrap"}
    return np.pad(x.numpy(), [(0, 0), (0, 0), *pads], mode=mode.get(layer.padding_mode, "reflect"))


def conv_rows(layer, args, y):
    none = [(0, 0)] * len(layer.kernel_size)
    x = padded(layer, args[0])
    rows = convolution_rows(x, layer.kernel_size, layer.stride, none, layer.dilation, layer.groups)
    a = torch.tensor(np.stack(rows))
    width = y.shape[1] // layer.groups
    g = [
        [y.grad[(n, slice(i * width, (i + 1) * width), *place)] for n, place in every_place(y)]
        for i in range(layer.groups)
    ]
    return with_one(a) if layer.bias is not None else a, torch.stack([torch.stack(r) for r in g])


def transposed_rows(layer, args, y):
    """The input's positions are the rows; g is what the kernel at that position can reach."""
    (x,), groups = args, layer.groups
    a, g = [], []
    wide, width = x.shape[1] // groups, y.shape[1] // groups
    for group in range(groups):
        for n, place in every_place(x):
            a.append(x[(n, slice(group * wide, (group + 1) * wide), *place)])
            row = []
            for channel in range(group * width, (group + 1) * width):
                for offset in itertools.product(*map(range, layer.kernel_size)):
                    geometry = zip(
                        place, offset, layer.stride, layer.padding, layer.dilation, strict=True
                    )
                    at = [p * s - pad + o * d for p, o, s, pad, d in geometry]
                    inside = all(0 <= i < size for i, size in zip(at, y.shape[2:], strict=True))
                    row.append(y.grad[(n, channel, *at)] if inside else y.new_zeros(()))
            g.append(torch.stack(row))
    return torch.stack(a).unflatten(0, (groups, -1)), torch.stack(g).unflatten(0, (groups, -1))


def every_place(y):
    return itertools.product(range(len(y)), itertools.product(*map(range, y.shape[2:])))


ROWS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4), linear_rows),
    "linear on sequences": (lambda: nn.Linear(4, 3, bias=False), (3, 2, 4), linear_rows),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), (3, 2, 8), conv_rows),
    "conv1d groups": (lambda: nn.Conv1d(4, 6, 2, groups=2, bias=False), (3, 4, 5), conv_rows),
    "conv2d": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1)),
        (2, 2, 4, 5),
        conv_rows,
    ),
    "conv2d same": (lambda: nn.Conv2d(2, 3, 3, padding="same", dilation=2), (2, 2, 4, 5), conv_rows),
    "conv2d reflect": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"),
        (2, 2, 4, 5),
        conv_rows,
    ),
    "conv2d replicate": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="replicate"),
        (2, 2, 4, 5),
        conv_rows,
    ),
    "conv2d circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"),
        (2, 2, 4, 5),
        conv_rows,
    ),
    "conv2d depthwise": (lambda: nn.Conv2d(3, 3, 2, groups=3), (2, 3, 4, 3), conv_rows),
    "conv3d": (
        lambda: nn.Conv3d(2, 2, 2, stride=(1, 2, 1), padding=(0, 1, 0), groups=2),
        (2, 2, 3, 3, 2),
        conv_rows,
    ),
    "transposed1d": (
        lambda: nn.ConvTranspose1d(3, 2, 3, stride=2, padding=1, output_padding=1, dilation=2),
        (2, 3, 4),
        transposed_rows,
    ),
    "transposed1d short": (lambda: nn.ConvTranspose1d(3, 2, 3, padding=3), (2, 3, 6), transposed_rows),
    "transposed2d": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(3, 2), output_padding=(2, 1), groups=2),
        (2, 4, 2, 3),
        transposed_rows,
    ),
    "transposed3d": (
        lambda: nn.ConvTranspose3d(2, 2, (2, 1, 2), stride=(1, 2, 1), padding=(1, 0, 0)),
        (2, 2, 2, 2, 2),
        transposed_rows,
    ),
}


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


# ---- attention ----------------------------------------------------------------------------------

E, H, L, S, N = 4, 2, 3, 5, 2
CAUSAL = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
LATE = torch.zeros(N, S, dtype=torch.bool)
LATE[1, -2:] = True
ATTENTION = {
    "self": ({}, {}),
    "self without bias": ({"bias": False}, {"need_weights": False}),
    "self causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "self causal with weights": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "self causal and padded": (
        {},
        {
            "attn_mask": CAUSAL,
            "is_causal": True,
            "key_padding_mask": torch.where(LATE[:, 2:], -math.inf, 0.0).double(),
            "need_weights": False,
        },
    ),
    "cross": ({}, {"need_weights": False}),
    "cross masked": ({}, {"attn_mask": numbers(L, S, seed=4) > 0.8}),
    "cross masked by head": ({}, {"attn_mask": numbers(N * H, L, S), "need_weights": False}),
    "cross padded": ({}, {"key_padding_mask": LATE, "average_attn_weights": False}),
    "cross padded and masked": (
        {},
        {"key_padding_mask": LATE, "attn_mask": numbers(L, S, seed=4) > 0.8, "need_weights": False},
    ),
    "kdim vdim": ({"kdim": 3, "vdim": 6}, {}),
    "kdim vdim without bias": ({"kdim": 3, "vdim": 6, "bias": False}, {"need_weights": False}),
    "bias_kv": ({"add_bias_kv": True}, {"key_padding_mask": LATE}),
    "zero": ({"add_zero_attn": True}, {"key_padding_mask": LATE, "need_weights": False}),
    "bias_kv and zero": (
        {"add_bias_kv": True, "add_zero_attn": True},
        {"attn_mask": numbers(L, S, seed=4) > 0.8, "key_padding_mask": LATE},
    ),
    "self causal bias_kv": (
        {"add_bias_kv": True},
        {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    ),
    "unbatched": ({}, {"attn_mask": numbers(H, L, S, seed=6) > 0.8, "key_padding_mask": LATE[1]}),
}


class Attends(nn.Module):
    """Attention, and a head on what it gives for each query; the loss has N L terms."""

    def __init__(self, options, call, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=batch_first, **options)
        self.head, self.call = nn.Linear(E, 3), call

    def forward(self, query, key, value):
        out, weights = self.attention(query, key, value, **self.call)
        self.weights = weights
        return self.head(torch.tanh(out))


def attention_inputs(name, options, batch_first):
    shapes = [(L, N, E), (S, N, options.get("kdim", E)), (S, N, options.get("vdim", E))]
    if name == "unbatched":
        shapes = [(shape[0], shape[2]) for shape in shapes]
    elif batch_first:
        shapes = [(n, length, d) for length, n, d in shapes]
    query, key, value = (numbers(*shape, seed=i) for i, shape in enumerate(shapes))
    return (query, query, query) if name.startswith("self") else (query, key, value)


def attention_products(model, query, key, value):
    """(input, product) of q, k, v and out, by torch's own attention on projections taken before."""
    module, call = model.attention, dict(model.call)
    separate = not module._qkv_same_embed_dim
    weights = (
        (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        if separate
        else module.in_proj_weight.chunk(3)
    )
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    inputs = [query, key, value]
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    swapped = module.batch_first and query.ndim == 3
    eye = torch.eye(E, dtype=torch.float64)
    call.pop("average_attn_weights", None)
    attended, _ = F.multi_head_attention_forward(
        *((x.transpose(0, 1) if swapped else x) for x in (q, k, v)),
        E, H, torch.cat([eye] * 3), None, module.bias_k, module.bias_v, module.add_zero_attn,
        0.0, eye, None, **call,
    )  # fmt: skip
    attended = attended.transpose(0, 1) if swapped else attended
    out = F.linear(attended, module.out_proj.weight, module.out_proj.bias)
    for y in (q, k, v, out):
        y.retain_grad()
    loss_of(model.head(torch.tanh(out))).backward()
    return list(zip((*inputs, attended.detach()), (q, k, v, out), strict=True))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_computes_what_it_did_and_its_products_are_sums_over_rows(name, batch_first):
    options, call = ATTENTION[name]
    model = double(lambda: Attends(options, call, batch_first))
    with torch.no_grad():
        for p in model.parameters():  # biases start at zero
            p += 0.1 * numbers(*p.shape, seed=7)
    inputs = [x.requires_grad_() for x in attention_inputs(name, options, batch_first)]
    reference, by_hand = copy.deepcopy(model), copy.deepcopy(model)

    def passes(model):
        f = model(*inputs)
        wanted = [*model.parameters(), *dict.fromkeys(inputs)]
        grads = torch.autograd.grad(loss_of(f), wanted, retain_graph=True)
        return f, model.weights, grads

    expected = passes(reference)
    kfac = KFAC(model, kl_clip=None)
    torch.testing.assert_close(passes(model), expected, rtol=1e-12, atol=1e-12)
    kfac.zero_grad()
    inputs = [x.detach() for x in inputs]
    inputs = [inputs[0]] * 3 if name.startswith("self") else inputs
    loss_of(model(*inputs)).backward()
    products = attention_products(by_hand, *inputs)
    kfac.step()
    factors, bias = held(kfac), model.attention.in_proj_bias is not None
    rows = L if name == "unbatched" else L * N
    for key, (x, y) in zip(("in_proj.q", "in_proj.k", "in_proj.v", "out_proj"), products, strict=True):
        a, g = x.reshape(1, -1, x.shape[-1]), y.grad.reshape(1, -1, E)
        assert_sums(factors[f"attention.{key}"], with_one(a) if bias else a, g, rows)
    names = {x: f"attention.in_proj.{x}" for x in "qkv"}
    shared = {names["k"]: names["q"], names["v"]: names["q"]} if name.startswith("self") else {}
    assert kfac.state_dict()["kfac"]["inputs"] == shared


def test_attention_biases_of_keys_and_values_are_diagonal_sums_over_examples():
    model = double(lambda: Attends({"add_bias_kv": True}, {}, True))
    inputs = attention_inputs("cross", {}, True)
    squares = {"bias_k": 0.0, "bias_v": 0.0}
    for n in range(N):
        alone = copy.deepcopy(model)
        loss_of(alone(*(x[n : n + 1] for x in inputs)), "sum").backward()
        for name in squares:
            squares[name] = squares[name] + getattr(alone.attention, name).grad.flatten().square()
    factors = held(stepped(model, *inputs))
    for name, expected in squares.items():
        A, G = factors[f"attention.{name}"]
        assert_close(A * G[:, 0], expected[None] / (N * L))


def test_attention_runs_as_torch_does_in_eval_and_after_detach():
    model = double(lambda: Attends({}, {}, True))
    inputs, reference = attention_inputs("self", {}, True), copy.deepcopy(model)
    kfac = KFAC(model)
    model.eval(), reference.eval()
    torch.testing.assert_close(model(*inputs), reference(*inputs), rtol=0, atol=0)
    assert kfac._engine.take_statistics() == [None] * 5
    kfac.detach()
    assert "forward" not in model.attention.__dict__


def test_attention_dropout_draws_the_same_mask():
    model = double(lambda: Attends({"dropout": 0.5}, {}, True))
    inputs, reference = attention_inputs("cross", {}, True), copy.deepcopy(model)
    KFAC(model)
    outputs = []
    for one in (model, reference):
        torch.manual_seed(5)
        outputs.append(one(*inputs))
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


# ---- recurrent layers ---------------------------------------------------------------------------


def recurrent_products(kind, module, x, h):
    """{weight: [(input, product) of each step]} of one layer, and all outputs, from torch.nn's equations."""
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


# ---- shared weights and inputs ------------------------------------------------------------------


class Tied(nn.Module):
    """One matrix in two linear layers, or one linear layer called twice."""

    def __init__(self, tied):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tied:
            self.second.weight = self.first.weight
        else:
            self.second = None
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh((self.second or self.first)(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "called twice"])
def test_uses_of_one_weight_add_up(tied):
    model, x = double(lambda: Tied(tied)), numbers(5, 4)
    reference, calls = watched(model, x)
    uses = calls["first"] + calls.get("second", [])
    assert len(uses) == 2
    a = torch.cat([args[0] for args, _ in uses]).detach()[None]
    g = torch.cat([y.grad for _, y in uses])[None]
    assert_close(torch.einsum("bri,brj->ij", g, a), reference.first.weight.grad)
    assert_sums(held(stepped(model, x))["first"], a, g, 5)


def test_a_bias_that_one_of_two_uses_has_counts_the_rows_of_that_use():
    class Net(Tied):
        def __init__(self):
            super().__init__(tied=True)
            self.first.bias = nn.Parameter(torch.ones(4))

    model, x = double(Net), numbers(5, 4)
    _, calls = watched(model, x)
    a = torch.cat([calls[name][0][0][0] for name in ("first", "second")]).detach()[None]
    g = torch.cat([calls[name][0][1].grad for name in ("first", "second")])[None]
    factors = held(stepped(model, x))
    assert_sums(factors["first"], a, g, 5)
    assert_sums(factors["first.bias"], torch.ones_like(a[:, :5, :1]), g[:, :5], 5)


class LanguageModel(nn.Module):
    """Tables that are looked up in, and a last layer, with one weight."""

    def __init__(self, tables=1, uses=("lookup", "head")):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(6, 4) for _ in range(tables))
        self.head = nn.Linear(4, 6, bias=False)
        for table in self.tables:
            table.weight = self.head.weight
        self.uses = uses

    def forward(self, x):
        y = torch.tanh(self.tables[0](x) + (self.tables[-1](x.flip(1)) if len(self.tables) > 1 else 0))
        y = y if "lookup" in self.uses else y.detach()
        return self.head(y) if "head" in self.uses else y.cumsum(-1)


def tied_uses(model, x, reduction):
    """(A, G) of the weight (6, 4) in its lookups and in the head, by rows; their side of 6 is diagonal."""
    reference, calls = watched(model, x, reduction=reduction)
    gradient, uses = 0, {}
    if "lookup" in model.uses:
        rows = torch.cat([F.one_hot(t, 6).reshape(-1, 6).double() for t in (x, x.flip(1))])
        found = [y.grad.reshape(-1, 4) for name in calls if "tables." in name for _, y in calls[name]]
        g = torch.cat(found)
        rows = rows[: len(g)]
        gradient = gradient + sum(torch.outer(i, j) for i, j in zip(rows, g, strict=True))
        uses["lookup"] = g.T @ g, rows.square().mean(0)
    if "head" in model.uses:
        ((z,), y) = calls["head"][0]
        a, g = z.detach().reshape(-1, 4), y.grad.reshape(-1, 6)
        gradient = gradient + sum(torch.outer(i, j) for i, j in zip(g, a, strict=True))
        uses["head"] = a.T @ a / len(a), g.square().sum(0)
    assert_close(gradient, reference.head.weight.grad)  # the rows are right
    return uses


@pytest.mark.parametrize("tables", [1, 2])
def test_a_tied_table_keeps_the_trace_of_both_uses_and_the_shape_of_each(tables):
    model, x = double(lambda: LanguageModel(tables)), tokens(3, 4, below=6)
    uses = tied_uses(model, x, "sum")
    kfac = stepped(model, x, reduction="sum")
    assert f"one block for {tables + 1} uses" in str(kfac.routing())
    (((A,), (G,)),) = held(kfac).values()
    traces = {use: a.trace() * g.sum() for use, (a, g) in uses.items()}
    total = sum(traces.values())
    assert_close(A.trace() * G.sum(), total)
    for factor, size, place in ((A, torch.trace, 0), (G, torch.sum, 1)):
        expected = sum(traces[u] / total * uses[u][place] / size(uses[u][place]) for u in uses)
        assert_close(factor / size(factor), expected)


@pytest.mark.parametrize("use", ["lookup", "head"])
def test_one_use_alone_of_a_tied_table_gives_that_use(use):
    model, x = double(lambda: LanguageModel(uses=(use,))), tokens(3, 4, below=6)
    (expected,) = tied_uses(model, x, "sum").values()
    (factors,) = held(stepped(model, x, reduction="sum")).values()
    (block,) = blocks_of(factors)
    assert_close(block, torch.kron(torch.diag(expected[1]), expected[0]))


def test_a_tied_table_that_ran_last_counts_its_lookups_as_terms():
    model, x = double(lambda: LanguageModel(uses=("lookup",))), tokens(3, 4, below=6)
    (expected,) = tied_uses(model, x, "mean").values()
    (factors,) = held(stepped(model, x)).values()
    assert_close(blocks_of(factors)[0], 12 * torch.kron(torch.diag(expected[1]), expected[0]))


class Branches(nn.Module):
    """Three layers that read one input."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, n) for n in (3, 3, 2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(x)
        same = [x, x, x] if self.training_shares else [x, x.clone(), x.clone()]
        y = [layer(z) for layer, z in zip((self.q, self.k, self.v), same, strict=True)]
        return self.head(torch.tanh(torch.cat(y, -1)))

    training_shares = True


@pytest.mark.parametrize("compute_method", ["eigen", "ekfac"])
def test_layers_that_read_one_input_share_its_factor_and_nothing_else_changes(compute_method):
    x, found = numbers(7, 4), {}
    for shares in (True, False):
        model = double(Branches)
        model.training_shares = shares
        kfac = stepped(model, x, steps=3, compute_method=compute_method, inv_update_steps=2)
        found[shares] = kfac, [p.grad.clone() for p in model.parameters()]
    (shared, directions), (apart, expected) = found[True], found[False]
    torch.testing.assert_close(directions, expected, rtol=1e-12, atol=1e-12)
    assert "shares A with q" in shared.routing()["k.weight"].reason
    assert "shares A with" not in str(apart.routing())
    assert apart.memory_usage()["factors"] - shared.memory_usage()["factors"] == 2 * 5 * 5 * 8


def test_a_layer_that_no_longer_reads_the_same_input_gets_its_own_factor():
    model, x = double(Branches), numbers(7, 4)
    kfac = stepped(model, x, steps=2, factor_decay=0.5)
    model.training_shares = False
    loss_of(model(x)).backward()
    kfac.step()
    assert "shares A with" not in str(kfac.routing())
    a = with_one(torch.tanh(x))
    for name in "qkv":
        assert_close(held(kfac)[name][0][0], a.T @ a / 7)


# ---- units and free parameters ------------------------------------------------------------------


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


class Free(nn.Module):
    """An operation between x and parameters of the module's own."""

    def __init__(self, operation, shapes, x):
        super().__init__()
        self.own = nn.ParameterList(
            nn.Parameter(0.5 * numbers(*shape, seed=10 + i)) for i, shape in enumerate(shapes)
        )
        self.operation, self.channels_last = operation, x.ndim < 4
        y = operation(x, *self.own)
        self.head = nn.Linear(y.shape[-1 if self.channels_last else 1], 3)

    def forward(self, x):
        return self.after(self.operation(x, *self.own))

    after = Net.after


# operation(x, *parameters), the same with parameters (*rows, *shape), shapes, and the axes of the rows
SEQUENCE, IMAGE = (3, 2, 4), (3, 4, 2, 2)
PLACES = torch.tensor([[2, 2], [0, 2], [1, 4]])
FREE = {
    "x + p": (lambda x, p: x + p, lambda x, p: x + p, [(4,)], SEQUENCE, (3, 2)),
    "p + x": (lambda x, p: torch.add(p, x), lambda x, p: x + p, [(4,)], SEQUENCE, (3, 2)),
    "x - p": (lambda x, p: x - p, lambda x, p: x - p, [(2, 4)], SEQUENCE, (3,)),
    "x * (1 + p)": (
        lambda x, p: x * (1 + p),
        lambda x, p: x * (1 + p),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x * (1 - 2 p)": (
        lambda x, p: x * (1 - 2 * p),
        lambda x, p: x * (1 - 2 * p),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "p - x": (
        lambda x, p: p - x,
        lambda x, p: p[:, :, 0, :, 0].mT - x,
        [(1, 2, 1)],
        SEQUENCE,
        (3, 4),
    ),
    "x * p": (lambda x, p: x * p, lambda x, p: x * p, [(4,)], SEQUENCE, (3, 2)),
    "x *= p": (lambda x, p: x.clone().mul_(p), lambda x, p: x * p, [(4,)], SEQUENCE, (3, 2)),
    "x += p": (lambda x, p: x.clone().add_(p), lambda x, p: x + p, [(4,)], SEQUENCE, (3, 2)),
    "scalar": (lambda x, p: p * x, lambda x, p: p * x, [()], SEQUENCE, (3, 2, 4)),
    "token": (
        lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1),
        lambda x, p: torch.cat([p[:, 0], x], 1),
        [(1, 1, 4)],
        SEQUENCE,
        (3,),
    ),
    "token, repeated": (
        lambda x, p: torch.cat([p.repeat(len(x), 1, 1), x], 1),
        lambda x, p: torch.cat([p[:, 0], x], 1),
        [(1, 1, 4)],
        SEQUENCE,
        (3,),
    ),
    "positions": (
        lambda x, p: x + p[:, : x.shape[1]],
        lambda x, p: x + p[:, 0, : x.shape[1]],
        [(1, 5, 4)],
        SEQUENCE,
        (3,),
    ),
    "looked-up positions": (
        lambda x, p: x + p[PLACES],
        lambda x, p: (
            x + torch.stack([torch.stack([p[n, t, PLACES[n, t]] for t in (0, 1)]) for n in range(3)])
        ),
        [(5, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "gamma": (
        lambda x, p: x * p[:, None, None],
        lambda x, p: x * p.movedim(-1, 1),
        [(4,)],
        IMAGE,
        (3, 2, 2),
    ),
    "gamma, viewed": (
        lambda x, p: x * p.view(1, -1, 1, 1),
        lambda x, p: x * p.movedim(-1, 1),
        [(4,)],
        IMAGE,
        (3, 2, 2),
    ),
    "x @ W": (
        lambda x, W: x @ W,
        lambda x, W: torch.einsum("nti,ntio->nto", x, W),
        [(4, 5)],
        SEQUENCE,
        (3, 2),
    ),
    "x @ W.T": (
        lambda x, W: torch.matmul(x, W.T),
        lambda x, W: torch.einsum("nti,ntoi->nto", x, W),
        [(5, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "x @ W by batch": (
        lambda x, W: torch.bmm(x, W),
        lambda x, W: torch.einsum("nti,tnio->nto", x, W),
        [(3, 4, 5)],
        SEQUENCE,
        (2,),
    ),
    "W @ x": (
        lambda x, W: W @ x,
        lambda x, W: torch.einsum("nqoi,niq->noq", W, x),
        [(3, 2)],
        SEQUENCE,
        (3, 4),
    ),
    "linear": (
        lambda x, W, b: F.linear(x, W, b),
        lambda x, W, b: torch.einsum("ntoi,nti->nto", W, x) + b,
        [(5, 4), (5,)],
        SEQUENCE,
        (3, 2),
    ),
    "two in one": (
        lambda x, p, q: x * p + q,
        lambda x, p, q: x * p + q,
        [(4,), (4,)],
        SEQUENCE,
        (3, 2),
    ),
}


@both_reductions
@pytest.mark.parametrize("name", FREE)
def test_a_free_parameter_has_the_diagonal_of_its_rows_gradients(name, reduction):
    """A parameter of its own for every row: autograd gives each row's gradient."""
    operation, by_row, shapes, shape, rows = FREE[name]
    x = numbers(*shape)
    model = double(lambda: Free(operation, shapes, x))
    per_row = [p.detach().expand(*rows, *p.shape).clone().requires_grad_() for p in model.own]
    y = by_row(x, *per_row)
    torch.testing.assert_close(y, operation(x, *model.own))
    loss_of(model.after(y), reduction).backward()
    factors = held(stepped(model, x, reduction=reduction))
    terms = len(x) if reduction == "mean" else 1
    for i, p in enumerate(per_row):
        A, G = factors[f"own.{i}"]
        expected = p.grad.square().sum(tuple(range(len(rows)))).reshape(1, -1)
        assert_close(A * G[:, 0], terms * expected)


def test_free_parameters_are_followed_in_the_module_that_owns_them_and_under_gradient_accumulation():
    x = numbers(*SEQUENCE)
    whole = double(lambda: Free(FREE["x * p"][0], [(4,)], x))
    parts = copy.deepcopy(whole)
    expected = held(stepped(whole, x, reduction="sum"))
    kfac = KFAC(parts, kl_clip=None, loss_reduction="sum")
    for n in range(3):
        loss_of(parts(x[n : n + 1]), "sum").backward()
    kfac.step()
    for name, (A, G) in held(kfac).items():
        assert_close(blocks_of((A, G))[0], blocks_of(expected[name])[0])


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
    kfac = KFAC(model, fisher="mc", likelihood=LIKELIHOODS[likelihood][0], fisher_samples=samples)
    for _ in range(steps):
        loss_of(model(x)).backward()
        G = kfac._engine._normalized(0, *normalizing(kfac))[1][0]
        error += float((G - expected).square().sum()) / steps
    ratio = error / (float(variance) / 25 / samples)
    assert 1 / 3 < ratio < 3


def normalizing(kfac):
    taken = kfac._engine.take_statistics()
    return taken[0], kfac._engine._terms(taken)


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
        kfac, sums = KFAC(model, fisher="mc", likelihood="categorical", fisher_samples=samples), {}
        for _ in range(steps):
            loss_of(model(x)).backward()
            taken = kfac._engine.take_statistics()
            for i, layer in enumerate(kfac._engine.layers):
                factors = kfac._engine._normalized(i, taken[i], kfac._engine._terms(taken))
                blocks = torch.stack(blocks_of(factors)) / steps
                sums[layer.name] = sums.get(layer.name, 0) + blocks
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
    assert all(one is not None for one in kfac._engine.take_statistics())


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
    make, shape, rows_of = ROWS["conv2d"]
    model, x = Net(double(make), 3, False).double(), numbers(*shape)
    expanded, reduced, mixed = (
        held(stepped(copy.deepcopy(model), x, weight_sharing=sharing))
        for sharing in ("expand", "reduce", {"Conv2d": "reduce"})
    )
    assert (expanded["layer"][0] - reduced["layer"][0]).abs().max() > 0.01
    assert_close(mixed["layer"][0], reduced["layer"][0])


def test_reduce_takes_the_examples_of_an_attention_whatever_its_axes():
    """Self-attention is the same function with batch_first and transposed inputs."""
    found = []
    for batch_first in (True, False):
        model = double(lambda: Attends({}, {}, batch_first))
        x = attention_inputs("self", {}, True)[0]
        x = x if batch_first else x.transpose(0, 1).contiguous()
        kfac = stepped(model, x, x, x, weight_sharing={"MultiheadAttention": "reduce"})
        found.append(held(kfac))
    for name in ("attention.in_proj.q", "attention.in_proj.v", "attention.out_proj"):
        for factor, other in zip(*(one[name] for one in found), strict=True):
            assert_close(factor, other)


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
            kfac._engine.clock.count.fill_(step)
            model.zero_grad()
            loss_of(model(x)).backward()
            sums = kfac._engine.take_statistics()[0].main
            statistics.append(torch.cat([sums.A.flatten(), sums.G.flatten(), sums.rows[None]]))
        kfac.detach()
    full, samples = statistics[0], torch.stack(statistics[1:])
    error = samples.std(0) / steps**0.5
    assert (error[:-1] > 0).any()
    assert ((samples.mean(0) - full).abs() <= 5 * error + 1e-12).all()
    assert_close(samples[:, -1], full[-1].expand(steps))  # the count is that of all rows


def test_a_subset_that_is_not_smaller_is_everything():
    model, x = double(lambda: nn.Linear(4, 3)), numbers(3, 5, 4)
    found = [held(stepped(copy.deepcopy(model), x, max_rows=n))[""] for n in (None, 15, 99)]
    for other in found[1:]:
        for factor, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(factor, expected, rtol=0, atol=0)


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
    kfac.set_hyperparameter("inv_update_steps", 1)
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


# ---- weights that are computed ------------------------------------------------------------------


def old_weight_norm(module):
    with pytest.warns(FutureWarning, match="weight_norm"):
        module = nn.utils.weight_norm(module)
    module.weight = module.weight.detach()  # made anew by every call; as it is, it cannot be copied
    return module


NORMED = {
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


@pytest.mark.parametrize("dim", [None, 1])
def test_a_weight_norm_that_is_not_by_rows_is_left_alone(dim):
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4), dim=dim), nn.Linear(4, 2))
    assert "does not know" in KFAC(model).routing()["0.parametrizations.weight.original1"].reason


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
