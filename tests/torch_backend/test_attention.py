"""nn.MultiheadAttention with K-FAC attached: torch's numbers, and sums over the rows of its products."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from conftest import assert_close
from suite.torch import KFAC
from torch_backend.rows_by_loops import (
    assert_sums,
    double,
    held,
    loss_of,
    numbers,
    stepped,
    with_one,
)

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
    assert dict(json.loads(kfac.state_dict()["kfac"]["inputs"])["inputs"]) == shared


class GivesWeights(nn.Module):
    """Attention by its function, with weights of layers, as fairseq's and CLIP's pooling have it."""

    def __init__(self, options, packed):
        super().__init__()
        bias, self.packed = options.get("bias", True), packed
        if packed:
            self.in_proj = nn.Linear(E, 3 * E, bias=bias)
        else:
            widths = {"q_proj": E, "k_proj": options.get("kdim", E), "v_proj": options.get("vdim", E)}
            for key, width in widths.items():
                self.add_module(key, nn.Linear(width, E, bias=bias))
        self.out_proj = nn.Linear(E, E, bias=bias)
        self.bias_k = self.bias_v = None
        if options.get("add_bias_kv"):
            self.bias_k, self.bias_v = (nn.Parameter(torch.zeros(1, 1, E)) for _ in "kv")
        self.add_zero_attn = options.get("add_zero_attn", False)

    def forward(self, query, key, value, **call):
        average = call.pop("average_attn_weights", True)
        given = {"average_attn_weights": average, "training": self.training, **call}
        if self.packed:
            weight, bias = self.in_proj.weight, self.in_proj.bias
        else:
            weight, layers = torch.empty(0), (self.q_proj, self.k_proj, self.v_proj)
            biases = [layer.bias for layer in layers]
            bias = None if biases[0] is None else torch.cat(biases)
            given["use_separate_proj_weight"] = True
            for name, layer in zip("qkv", layers, strict=True):
                given[f"{name}_proj_weight"] = layer.weight
        return F.multi_head_attention_forward(
            query, key, value, E, H, weight, bias, self.bias_k, self.bias_v, self.add_zero_attn, 0.0,
            self.out_proj.weight, self.out_proj.bias, **given,
        )  # fmt: skip

    def load(self, module):
        """Those of an nn.MultiheadAttention."""
        weights = [getattr(module, f"{x}_proj_weight") for x in "qkv"]
        weights = weights if weights[0] is not None else module.in_proj_weight.chunk(3)
        bias = module.in_proj_bias
        layers = [self.in_proj] if self.packed else [self.q_proj, self.k_proj, self.v_proj]
        pairs = [
            (self.out_proj.weight, module.out_proj.weight),
            (self.out_proj.bias, module.out_proj.bias),
        ]
        pairs += [(self.bias_k, module.bias_k), (self.bias_v, module.bias_v)]
        if self.packed:
            pairs += [(self.in_proj.weight, torch.cat(list(weights))), (self.in_proj.bias, bias)]
        else:
            pairs += zip((layer.weight for layer in layers), weights, strict=True)
            if bias is not None:
                pairs += zip((layer.bias for layer in layers), bias.chunk(3), strict=True)
        with torch.no_grad():
            for own, other in pairs:
                if own is not None:
                    own.copy_(other)


@pytest.mark.parametrize(
    ("name", "packed"),
    [(name, False) for name in ATTENTION] + [(name, True) for name in ATTENTION if "self" in name],
)
def test_attention_by_its_function_with_weights_of_layers(name, packed):
    options, call = ATTENTION[name]
    by_hand = double(lambda: Attends(options, call, False))
    with torch.no_grad():
        for p in by_hand.parameters():
            p += 0.1 * numbers(*p.shape, seed=7)
    model = copy.deepcopy(by_hand)
    model.attention = GivesWeights(options, packed).double()
    model.attention.load(by_hand.attention)
    reference = copy.deepcopy(model)
    inputs = attention_inputs(name, options, False)
    kfac = KFAC(model, kl_clip=None)
    for one in (model, reference):
        loss_of(one(*inputs)).backward()
    torch.testing.assert_close(model.weights, reference.weights, rtol=1e-12, atol=1e-12)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-12)
    products = attention_products(by_hand, *inputs)
    kfac.step()
    rows = L if name == "unbatched" else L * N
    keys = ("q_proj", "k_proj", "v_proj", "out_proj")
    if packed:
        (x, q), (_, k), (_, v), out = products
        products = [(x, torch.cat([q.grad, k.grad, v.grad], -1)), (out[0], out[1].grad)]
        keys = ("in_proj", "out_proj")
    else:
        products = [(x, y.grad) for x, y in products]
    factors, bias = held(kfac), options.get("bias", True)
    for key, (x, g) in zip(keys, products, strict=True):
        a, g = x.reshape(1, -1, x.shape[-1]), g.reshape(1, -1, g.shape[-1])
        assert_sums(factors[f"attention.{key}"], with_one(a) if bias else a, g, rows)


REFUSED = {
    "mask of one row": {"attn_mask": torch.zeros(1, S, dtype=torch.float64)},
    "mask of one column": {"attn_mask": torch.zeros(L, 1, dtype=torch.float64)},
    "mask of four axes": {"attn_mask": torch.zeros(N, H, L, S, dtype=torch.float64)},
    "mask of integers": {"attn_mask": torch.zeros(L, S, dtype=torch.int64)},
    "padding of one example": {"key_padding_mask": LATE[:1]},
    "padding of one position": {"key_padding_mask": LATE[:, :1]},
    "values of another length": {},
}


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses_what_torch_refuses(name, by_function):
    model = double(lambda: Attends({}, {**REFUSED[name], "need_weights": False}, False))
    if by_function:
        model.attention = GivesWeights({}, False).double()
    query, key, value = attention_inputs("cross", {}, False)
    value = value[:-1] if name.startswith("values") else value
    KFAC(model)
    with pytest.raises((AssertionError, RuntimeError), match=r"mask|dims|shape"):
        model(query, key, value)


@pytest.mark.parametrize("how", ["doubled", "hstack", "named", "one of three"])
def test_biases_that_are_joined_are_their_layers_until_they_are_changed(how):
    def join(parts):
        if how == "hstack":
            return torch.hstack(parts)
        if how == "named":
            return torch.cat(tensors=parts)
        if how == "one of three":
            return torch.cat([parts[0], *(torch.zeros(E, dtype=torch.float64) for _ in "kv")])
        return torch.cat(parts).mul_(2.0)

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            for key in ("q", "k", "v", "o"):
                self.add_module(key, nn.Linear(E, E, bias=key not in "kv" or how != "one of three"))

        def forward(self, x):
            layers = [self.q, self.k, self.v]
            weights = {f"{key}_proj_weight": getattr(self, key).weight for key in "qkv"}
            out, _ = F.multi_head_attention_forward(
                x, x, x, E, H, None, join([m.bias for m in layers]), None, None, False, 0.0,
                self.o.weight, self.o.bias, use_separate_proj_weight=True, **weights,
            )  # fmt: skip
            return out

    model = double(Joined)
    reference, x = copy.deepcopy(model), numbers(L, N, E)
    kfac = KFAC(model, kl_clip=None)
    outputs = [one(x) for one in (model, reference)]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for y in outputs:
        loss_of(y).backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-12)
    if how == "doubled":
        with pytest.warns(RuntimeWarning, match="'q'.*'k'.*'v'"):
            kfac.step()
        return
    kfac.step()
    assert {held(kfac)[key][0].shape[-1] for key in "qo"} == {E + 1}


@pytest.mark.parametrize("place", ["around", "inside"])
def test_attention_by_its_function_under_a_checkpoint(place):
    """Inside of a forward a checkpoint's second run has to find what the first did: torch's function."""
    model = double(lambda: Attends({}, {}, False))
    model.attention = attention = GivesWeights({}, False).double()
    plain = copy.deepcopy(model)
    if place == "around":
        model.attention = Checkpointed(attention)
    else:
        forward = attention.forward
        attention.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)
    inputs = attention_inputs("self", {}, False)
    kfac = KFAC(model, kl_clip=None)
    expected = stepped(plain, *inputs)
    loss_of(model(*inputs)).backward()
    if place == "inside":
        with pytest.warns(RuntimeWarning, match=r"'attention.q_proj'.*'attention.out_proj'"):
            kfac.step()
        return
    kfac.step()
    factors = {name.replace("attention.inner.", "attention."): x for name, x in held(kfac).items()}
    torch.testing.assert_close(factors, held(expected), rtol=1e-12, atol=1e-12)


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return checkpoint(self.inner, *args, use_reentrant=False)


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
    assert kfac._engine.capture.take_statistics() == [None] * 5
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


def test_reduce_takes_the_examples_of_an_attention_whatever_its_axes():
    """Self-attention is the same function with batch_first and transposed inputs."""
    found = []
    for batch_first in (True, False):
        model = double(lambda batch_first=batch_first: Attends({}, {}, batch_first))
        x = attention_inputs("self", {}, True)[0]
        x = x if batch_first else x.transpose(0, 1).contiguous()
        kfac = stepped(model, x, x, x, weight_sharing={"MultiheadAttention": "reduce"})
        found.append(held(kfac))
    for name in ("attention.in_proj.q", "attention.in_proj.v", "attention.out_proj"):
        for factor, other in zip(*(one[name] for one in found), strict=True):
            assert_close(factor, other)
