"""What a forward makes of constants, once for all examples, is named."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import KFAC

EXAMPLES, WIDTH, OUTPUTS = 7, 6, 4


class Made(nn.Module):
    """Multiplies examples with a weight that it makes of parameters and constants, or with others."""

    def __init__(self, make) -> None:
        super().__init__()
        self.basis, self.order = nn.Buffer(torch.randn(3, OUTPUTS, WIDTH)), torch.randn(OUTPUTS, OUTPUTS)
        self.codes, self.made = nn.Buffer(torch.randn(OUTPUTS, 2)), nn.Linear(2, WIDTH)
        self.inner, self.coefficients = nn.Linear(2, WIDTH), nn.Parameter(torch.randn(3))
        self.lower = nn.Parameter(torch.randn(OUTPUTS, OUTPUTS))
        self.mixed = nn.Parameter(torch.randn(OUTPUTS, WIDTH))
        self.head, self.make = nn.Linear(OUTPUTS, 3), make

    def forward(self, x):
        return self.head(torch.tanh(self.make(self, x)))


def with_basis(m):
    return torch.einsum("k,koi->oi", m.coefficients, m.basis)


def of_grid(m):
    return m.inner(torch.linspace(-1, 1, 2 * OUTPUTS).view(OUTPUTS, 2)).sin()


def written(m, x):
    codes = m.codes.clone()
    codes[:] = x[0, :2]
    return codes


NAMED = {
    "coefficients in a basis": (["coefficients"], lambda m, x: F.linear(x, with_basis(m))),
    "of each": (["coefficients"], lambda m, x: x @ (m.coefficients @ m.basis.flatten(1)).view(-1, 4)),
    "a kernel": (
        ["coefficients"],
        lambda m, x: F.conv1d(x[:, :2, None], with_basis(m).view(4, 2, 3), padding=1).mean(2),
    ),
    "a function of them": (
        ["coefficients"],
        lambda m, x: F.linear(x, (m.coefficients.exp() @ m.basis.flatten(1)).view(-1, WIDTH)),
    ),
    "by a constant matrix": (["mixed"], lambda m, x: torch.einsum("bi,oi->bo", x, m.order @ m.mixed)),
    "of a triangle": (["lower"], lambda m, x: x[:, :4] @ (m.order @ m.lower.tril()).T),
    "by a layer": (["made"], lambda m, x: F.linear(x, m.made(m.codes).tanh())),
    "of coordinates": (["inner"], lambda m, x: F.linear(input=x, weight=of_grid(m))),
    "by a constant matrix, and then another": (
        ["lower", "mixed"],
        lambda m, x: F.linear(x, (m.order @ m.lower.tril()) @ m.mixed),
    ),
    "in front": (["mixed"], lambda m, x: ((m.order @ m.mixed) @ x.T).T),
    "added": (["inner"], lambda m, x: x[:, None, :4] + of_grid(m)[:, :4]),
    "shifted": (
        ["inner", "mixed"],
        lambda m, x: F.linear(x, (of_grid(m) * m.mixed).tanh()),
    ),
    "an outer product": (
        ["coefficients"],
        lambda m, x: x[:, None, :3] * torch.outer(torch.arange(4), m.coefficients) @ m.basis[0, :3, :4],
    ),
    "added to one": ([], lambda m, x: x[:1, None, :4] + of_grid(m)[:, :4]),
    "of a mask": ([], lambda m, x: F.linear(x, m.mixed * (m.basis[0] > 0))),
    "of examples": ([], lambda m, x: F.linear(x, m.made(x[:OUTPUTS, :2]))),
    "of a hypernetwork": (
        [],
        lambda m, x: torch.einsum("bi,boi->bo", x, m.made(m.codes + x[0, 0])[None]),
    ),
    "of each, repeated": (
        [],
        lambda m, x: torch.einsum("bi,boi->bo", x, m.made(m.codes.expand(len(x), -1, -1))),
    ),
    "of edges": ([], lambda m, x: (x @ x.T) @ m.made(m.codes[[0, 1, 2, 3, 0, 1, 2][: len(x)]])[:, :4]),
    "of what examples were written to": ([], lambda m, x: F.linear(x, m.made(written(m, x)))),
    "a product of constants": ([], lambda m, x: F.linear(x, m.order @ m.basis[0])),
}


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("examples", [1, EXAMPLES])
@pytest.mark.parametrize("how", NAMED)
def test_weights_that_are_made_of_constants_once_for_all_examples_are_named(how, examples, fisher):
    torch.manual_seed(0)
    names, make = NAMED[how]
    model, x = Made(make), torch.randn(max(examples, EXAMPLES if how == "of examples" else 1), WIDTH)
    kfac = KFAC(model, fisher=fisher, likelihood=None if fisher == "empirical" else "gaussian")
    model(x).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kfac.step()
    said = [str(one.message) for one in caught]
    assert all("once for all examples" in one for one in said)
    names = names if examples > 1 and fisher == "empirical" else []
    assert [one.rpartition(": ")[2] for one in said] == ([", ".join(map(repr, names))] if names else [])
