"""Weights with several uses, and inputs with several readers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import assert_close
from torch_backend.rows_by_loops import (
    Net,
    assert_sums,
    blocks_of,
    double,
    held,
    loss_of,
    numbers,
    stepped,
    tokens,
    watched,
    with_one,
)


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


class Exposes(nn.Module):
    """A layer whose weights have a name here, too."""

    def __init__(self, make, how):
        super().__init__()
        inner = make()
        self.how = how
        if how != "apart":
            self.weight, self.bias = inner.weight, inner.bias
        self.inner = inner

    def forward(self, x):
        if self.how == "by its own name":
            return F.linear(x, self.weight, self.bias)
        return self.inner(x)


@pytest.mark.parametrize("how", ["exposed", "by its own name"])
@pytest.mark.parametrize("kind", ["linear", "convolution", "norm"])
def test_a_layer_whose_weights_a_module_around_it_exposes_is_that_layer(kind, how):
    makes = {
        "linear": lambda: nn.Linear(4, 3),
        "convolution": lambda: nn.Conv1d(2, 3, 2),
        "norm": lambda: nn.LayerNorm(4),
    }
    if how == "by its own name" and kind != "linear":
        how = "exposed"
    found, x = [], numbers(5, 2, 4)
    for case in ("apart", how):
        model = double(
            lambda case=case: Net(Exposes(makes[kind], case), OUT[kind], kind != "convolution")
        )
        kfac = stepped(model, x)
        assert {row.treatment for row in kfac.routing()} == {"kfac"}
        found.append([held(kfac)["layer.inner"], held(kfac)["head"]])
    for own, other in zip(*found, strict=True):
        assert all(map(torch.equal, own, other))


class WrapsOne(nn.Linear):
    """A layer by its class, whose weights are those of a layer inside."""

    def __init__(self):
        super().__init__(4, 3)
        self.inner = nn.Linear(4, 3)
        self.weight, self.bias = self.inner.weight, self.inner.bias

    def forward(self, x):
        return self.inner(x)


def test_a_layer_that_wraps_one_with_its_weights_keeps_them_preconditioned():
    model = double(lambda: Net(WrapsOne(), 3))
    kfac = stepped(model, numbers(5, 4))
    assert {row.parameter: row.treatment for row in kfac.routing()}["layer.weight"] == "kfac"


OUT = {"linear": 3, "convolution": 3, "norm": 4}


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
    """(A, G) of the weight (6, 4) in its lookups and in the head; their side of 6 is diagonal."""
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
