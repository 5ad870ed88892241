"""Parameters that are put in places of a tensor, `x[mask] = p` or by `torch.where`: tokens, states.

The oracle: squares of every example's gradient at the tensor that goes on.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import KFAC
from suite.torch.recurrent import GRUCell
from torch_backend.adds_positions import (
    EXAMPLES,
    LENGTH,
    VOCABULARY,
    WIDTH,
    AddsPositions,
    gradient_at_sum,
    loss_of,
    stepped,
)
from torch_backend.rows_by_loops import held

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning"),
]
MASK = torch.arange(EXAMPLES * LENGTH).reshape(EXAMPLES, LENGTH) % 3 == 0
PLACES = MASK[:, :, None]


def written(m, h, places, value):
    h = h.clone()
    h[places] = value
    return h


def copied(m, h):
    h = h.clone()
    h[:, 0].copy_(m.token)
    return h


def added(m, h, places, value):
    """To zeros that are made of nothing."""
    zeros = torch.zeros(h.shape, dtype=h.dtype)
    zeros[places] = value
    return h + zeros


FIRST = (slice(None), 0)
WRITES = {  # what is made of tokens; the squares of the token's gradients, of those at the sum
    "by a mask": (lambda m, h: written(m, h, MASK, m.token), lambda m, g: g[MASK].sum(0)),
    "first": (lambda m, h: written(m, h, FIRST, m.token), lambda m, g: g[:, 0].sum(0)),
    "by a mask, with ones in front": (
        lambda m, h: written(m, h, MASK, m.token[None, None]),
        lambda m, g: g[MASK].sum(0),
    ),
    "first, with ones in front": (
        lambda m, h: written(m, h, FIRST, m.token.view(1, 1, -1)),
        lambda m, g: g[:, 0].sum(0),
    ),
    "once": (lambda m, h: written(m, h, (0, 0), m.token), lambda m, g: g[0, 0]),
    "copied": (copied, lambda m, g: g[:, 0].sum(0)),
    "times two": (lambda m, h: written(m, h, FIRST, 2 * m.token), lambda m, g: 4 * g[:, 0].sum(0)),
    "its exponential": (
        lambda m, h: written(m, h, FIRST, m.token.exp()),
        lambda m, g: g[:, 0].sum(0) * m.token.exp() ** 2,
    ),
    "two features": (
        lambda m, h: written(m, h, (..., slice(2)), m.token[:2]),
        lambda m, g: F.pad(g.flatten(0, 1)[:, :2].sum(0), (0, 2)),
    ),
    "added": (lambda m, h: added(m, h, FIRST, m.token), lambda m, g: g[:, 0].sum(0)),
    "chosen": (lambda m, h: torch.where(PLACES, m.token, h), lambda m, g: g[MASK].sum(0)),
    "left where not chosen": (lambda m, h: h.where(~PLACES, m.token), lambda m, g: g[MASK].sum(0)),
    "chosen times two": (
        lambda m, h: torch.where(PLACES, 2 * m.token, h),
        lambda m, g: 4 * g[MASK].sum(0),
    ),
    "chosen of copies": (
        lambda m, h: torch.where(PLACES, m.token.expand(LENGTH, -1), h),
        lambda m, g: g[MASK].sum(0),
    ),
}


class Token(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.how, self.token = how, nn.Parameter(torch.randn(WIDTH))

    def forward(self, h):
        return self.how(self, h)


def make(how):
    torch.manual_seed(0)
    return AddsPositions(Token(how)).double()


@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_has_the_gradients_of_every_row_it_is_written_to(how, recwarn):
    model = make(WRITES[how][0])
    x = torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    squares = x.numel() * gradient_at_sum(model, x).square()
    expected = WRITES[how][1](model.positions, squares).detach()
    kfac = stepped(model, x)
    assert not [one for one in recwarn if one.category is RuntimeWarning]
    found = held(kfac)["positions.token"][0].flatten()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile does not trace modes")
def test_what_is_chosen_in_a_compiled_model_has_the_gradients_of_its_rows(recwarn):
    how, of_squares = WRITES["chosen"]
    model, x = make(how), torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    expected = of_squares(model.positions, x.numel() * gradient_at_sum(model, x).square()).detach()
    found = held(stepped(model, x, compiled=True))["positions.token"][0].flatten()
    assert not [one for one in recwarn if one.category is RuntimeWarning]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("other", [lambda m: 0.0, lambda m: 2 * m.token], ids=["number", "parameter"])
def test_what_is_chosen_beside_what_has_no_rows_is_named(other):
    """What chooses may be the same for all examples."""
    chosen = torch.arange(LENGTH)[:, None] > 0
    model = make(lambda m, h: h * m.token + torch.where(chosen, m.token, other(m)))
    with pytest.warns(RuntimeWarning, match="miss some uses.*'positions.token'"):
        stepped(model, torch.randint(VOCABULARY, (EXAMPLES, LENGTH)))


def into_a_weight(m, h):
    weight = torch.zeros(WIDTH, WIDTH, dtype=h.dtype)
    weight[0] = m.token
    return h + h.detach() @ weight


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_written_where_there_are_no_rows_is_named(compiled):
    if compiled and not (2, 8) <= torch.__version__ < (2, 14):
        compiled = False  # later ones hide assignments in what they trace from all function modes
    how = WRITES["first"][0] if compiled else into_a_weight
    model = make(lambda m, h: how(m, h) + h * m.token)
    with pytest.warns(RuntimeWarning, match="miss some uses.*'positions.token'"):
        stepped(model, torch.randint(VOCABULARY, (EXAMPLES, LENGTH)), compiled=compiled)


@pytest.mark.parametrize("how", ["set", "copied"])
def test_a_row_of_a_table_that_is_written_is_a_use_of_the_table(how):
    model = make(lambda m, h: h)
    x = torch.randint(VOCABULARY, (EXAMPLES, LENGTH))

    def mask(m, h):
        row = model.tokens.weight[VOCABULARY - 1]
        if how == "set":
            return written(m, h, MASK, row)
        h = h.clone()
        h[:, 0].copy_(row)
        return h

    model.positions.how = mask
    with pytest.warns(RuntimeWarning, match="miss some uses.*'tokens'"):
        stepped(model, x)


class Policy(nn.Module):
    """A recurrent policy, whose state is a parameter where an episode begins."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how, self.start = how, nn.Parameter(torch.randn(7))
        self.cell, self.head = GRUCell(5, 7), nn.Linear(7, 3)

    def forward(self, x, begins):
        h, outputs = self.start.expand(x.shape[1], -1), []
        for now, new in zip(x, begins, strict=True):
            if self.how == "written":
                h = h.clone()
                h[new] = self.start
            else:
                h = h * ~new[:, None] + self.start * new[:, None]
            h = self.cell(now, h)
            outputs.append(self.head(h))
        return torch.stack(outputs)


def test_a_state_that_is_written_at_the_start_of_episodes_is_one_that_is_chosen():
    torch.manual_seed(0)
    x, begins = torch.randn(6, 4, 5).double(), torch.rand(6, 4) > 0.5
    labels, found = torch.randint(0, 3, (24,)), []
    for how in ("written", "chosen"):
        torch.manual_seed(1)
        model = Policy(how).double()
        kfac = KFAC(model)
        F.cross_entropy(model(x, begins).flatten(0, 1), labels).backward()
        kfac.step()
        found.append(held(kfac)["start"])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_gradients_are_as_without_it():
    model = make(WRITES["first"][0])
    x = torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    loss_of(model, x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    kfac = KFAC(model)
    loss_of(model, x).backward()
    for p, own in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, own, rtol=1e-12, atol=1e-14)
    kfac.detach()
