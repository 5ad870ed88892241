"""Weights in lists and dicts of parameters; the oracles are torch's own layers with the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import KFAC
from torch_backend.rows_by_loops import double, numbers
from torch_backend.test_own_weights import routes, trained

SIDES = ((3, 5), (5, 5), (5, 2))


class Listed(nn.Module):
    """Three layers and tanh in between; `run` says where their weights are taken from."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(numbers(o, i, seed=i + o) * 0.5 for i, o in SIDES)
        self.biases = nn.ParameterList(numbers(o, seed=o) for _, o in SIDES)

    def forward(self, x):
        return self.run(torch.tanh(x))


class BiasesFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.biases = nn.ParameterList(numbers(o, seed=o) for _, o in SIDES)
        self.weights = nn.ParameterList(numbers(o, i, seed=i + o) * 0.5 for i, o in SIDES)

    forward = Listed.forward


class ByNumber(Listed):
    def run(self, x):
        for i in range(len(self.weights)):
            x = F.linear(x, self.weights[i], self.biases[i])
            x = torch.tanh(x) if i < 2 else x
        return x


class ByConstants(BiasesFirst):
    def run(self, x):
        x = torch.tanh(F.linear(x, self.weights[0], self.biases[0]))
        x = torch.tanh(F.linear(x, weight=self.weights[1], bias=self.biases[1]))
        return F.linear(x, self.weights[2], self.biases[2])


class InPairs(BiasesFirst):
    def run(self, x):
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=False)):
            x = F.linear(torch.tanh(x) if i else x, weight, bias)
        return x


class InPairsOfTwo(Listed):
    def run(self, x):
        first = True
        for weight, bias in zip(self.weights, self.biases):  # noqa: B905
            x = F.linear(x if first else torch.tanh(x), weight, bias)
            first = False
        return x


class ByKey(nn.Module):
    def __init__(self):
        super().__init__()
        listed = Listed()
        self.all = nn.ParameterDict(
            {
                f"{kind}{i}": p
                for kind in ("weights", "biases")
                for i, p in enumerate(getattr(listed, kind))
            }
        )

    def forward(self, x):
        x = torch.tanh(F.linear(torch.tanh(x), self.all["weights0"], self.all["biases0"]))
        x = torch.tanh(F.linear(x, self.all.weights1, self.all.biases1))
        return F.linear(x, self.all["weights2"], self.all["biases2"])


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        listed = Listed()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in SIDES).double()
        with torch.no_grad():
            for layer, weight, bias in zip(self.layers, listed.weights, listed.biases, strict=True):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)

    def forward(self, x):
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return x


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("kind", [ByNumber, ByConstants, InPairs, InPairsOfTwo, ByKey])
def test_weights_and_biases_at_one_place_are_layers(kind, method):
    x = numbers(16, 3)
    model, layers = kind(), Layers()
    kfac = trained(model, x, compute_method=method)
    trained(layers, x, compute_method=method)
    factors = {"4x4, 5x5", "6x6, 5x5", "6x6, 2x2"}
    assert {found for _, found in routes(kfac).values()} == factors
    expected = {tuple(p.shape): p for p in layers.parameters()}
    for name, p in model.named_parameters():
        if p.shape != (5,):  # which two biases have
            torch.testing.assert_close(p, expected[tuple(p.shape)], rtol=1e-9, atol=1e-11, msg=name)


class Experts(nn.Module):
    """Matrices of a list that a comprehension has, and of one in a loop."""

    def __init__(self):
        super().__init__()
        self.first = nn.ParameterList(numbers(4, 4, seed=i) for i in range(2))
        self.second = nn.ParameterList(numbers(4, 4, seed=i) for i in range(2, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = sum(torch.tanh(x @ w) for w in self.first)
        for i, w in enumerate(self.second):
            x = torch.tanh(torch.einsum("ni,oi->no", x, w)) * (i + 1)
        return self.head(self.more(x))

    def more(self, x):
        return x


class Penalized(Experts):
    def more(self, x):
        self.penalty = self.second[0].square().sum()
        return x


class Sliced(Experts):
    def more(self, x):
        return x + sum(F.linear(x, w) for w in self.second[1:])


class Handed(Experts):
    def more(self, x):
        self.penalty = sum(p.square().sum() for p in self.second.parameters())
        return x


class Behind(Experts):
    def more(self, x):
        for w in self.second:
            x = F.linear(x, w)
        return x * w.sum()


class SetAgain(Experts):
    def more(self, x):
        for w in self.second:
            w = w * x.mean()
            x = F.linear(x, w)
        return x


def test_loops_over_lists():
    model = double(Experts)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(numbers(9, 4)).square().mean().backward()
    kfac.step()
    found = routes(kfac)
    for name in ("first.0", "first.1", "second.0", "second.1"):
        assert found[name] == ("kfac", "4x4, 4x4")
    again = copy.deepcopy(model)
    fresh = KFAC(again, torch.optim.SGD(again.parameters(), lr=0.1))
    fresh.load_state_dict(copy.deepcopy(kfac.state_dict()))
    for one, optimizer in ((model, kfac), (again, fresh)):
        optimizer.zero_grad()
        one(numbers(9, 4, seed=1)).square().mean().backward()
        optimizer.step()
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:statistics miss some uses:RuntimeWarning")
@pytest.mark.parametrize("kind", [Penalized, Sliced, Handed, Behind, SetAgain])
def test_a_list_with_other_uses_has_diagonals(kind):
    model = double(kind)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(numbers(9, 4)).square().mean().backward()
    kfac.step()
    found = routes(kfac)
    assert found["first.0"] == found["first.1"] == ("kfac", "4x4, 4x4")
    assert found["second.0"][1] == found["second.1"][1] == "diag 16"


def test_patterns_and_frozen_parameters_of_lists():
    model = double(Experts)
    model.first[0].requires_grad_(False)
    kfac = KFAC(model, skip_layers=[r"second\.1"])
    found = routes(kfac)
    treatments = [found[name][0] for name in ("first.0", "first.1", "second.0", "second.1")]
    assert treatments == ["frozen", "kfac", "kfac", "plain"]
    kfac.detach()
    kfac = KFAC(model, skip_layers=["ParameterList"])
    assert all(t == "plain" or t == "frozen" for n, (t, _) in routes(kfac).items() if "head" not in n)
