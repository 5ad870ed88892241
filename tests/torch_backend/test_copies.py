"""Parameters that are copied for all examples at once, as along rows and columns, and then added.

The oracle: squares of every example's gradient at the sum with its tokens.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import KFAC
from torch_backend.adds_positions import (
    EXAMPLES,
    LENGTH,
    VOCABULARY,
    WIDTH,
    AddsPositions,
    gradient_at_sum,
    stepped,
)
from torch_backend.rows_by_loops import held

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning"),
]
HEIGHT = 3
ROW_OF, COLUMN_OF = torch.arange(LENGTH) // 2, torch.arange(LENGTH) % 2


def rows(m):
    return m.row[:HEIGHT].unsqueeze(1).repeat(1, 2, 1)


def columns(m):
    return m.column[:2].unsqueeze(0).repeat(HEIGHT, 1, 1)


def side_by_side(m):
    """As in the demonstration of DETR."""
    return torch.cat([columns(m), rows(m)], dim=-1).flatten(0, 1)


COPIES = {  # whether the two are halves of the features; the sum with (examples, LENGTH, WIDTH)
    "repeated": (False, lambda m, h: h + (rows(m) + columns(m)).flatten(0, 1)),
    "expanded": (
        False,
        lambda m, h: (
            h
            + (
                m.row[:HEIGHT, None].expand(-1, 2, -1) + m.column[None, :2].expand(HEIGHT, -1, -1)
            ).reshape(LENGTH, WIDTH)
        ),
    ),
    "with a shift": (False, lambda m, h: h + (rows(m) + columns(m) + m.shift).flatten(0, 1)),
    "shifted first": (
        False,
        lambda m, h: h + (m.shift.expand(HEIGHT, 2, WIDTH) + rows(m) + columns(m)).flatten(0, 1),
    ),
    "halves": (True, lambda m, h: h + side_by_side(m)),
    "halves, repeated": (True, lambda m, h: h - side_by_side(m)[None].repeat(len(h), 1, 1)),
    "halves, examples second": (
        True,
        lambda m, h: (h.transpose(0, 1) + side_by_side(m).unsqueeze(1)).transpose(0, 1),
    ),
    "times a number": (False, lambda m, h: h + 2 * (rows(m) / 2 + columns(m) * 0.5).flatten(0, 1)),
}


class Positions(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        halves, self.how = COPIES[how]
        width = WIDTH // (1 + halves)
        self.row, self.column = nn.Parameter(torch.randn(5, width)), nn.Parameter(torch.randn(4, width))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, h):
        return self.how(self, h)


def make(how):
    torch.manual_seed(0)
    return AddsPositions(Positions(how)).double()


@pytest.mark.parametrize("how", COPIES)
def test_copies_for_all_examples_have_the_gradients_of_every_example(how, recwarn):
    model = make(how)
    x = torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    squares = x.numel() * gradient_at_sum(model, x).square().sum(0)
    kfac = stepped(model, x)
    assert not [one for one in recwarn if one.category is RuntimeWarning]
    halves = squares.chunk(2, -1) if COPIES[how][0] else (squares, squares)
    for name, index, own in zip(("column", "row"), (COLUMN_OF, ROW_OF), halves, strict=True):
        parameter = getattr(model.positions, name)
        expected = torch.zeros_like(parameter).index_add(0, index, own).detach()
        found = held(kfac)[f"positions.{name}"][0].reshape(parameter.shape)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    if "shift" in how:
        found = held(kfac)["positions.shift"][0].flatten()
        torch.testing.assert_close(found, squares.sum(0), rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile does not trace modes")
@pytest.mark.parametrize("how", COPIES)
def test_in_a_compiled_model_they_are_named_in_a_warning(how):
    with pytest.warns(RuntimeWarning, match="miss some uses.*'positions.column', 'positions.row'"):
        stepped(make(how), torch.randint(VOCABULARY, (EXAMPLES, LENGTH)), compiled=True)


ALONE = {
    "expanded": lambda shift, h: h + shift.expand(LENGTH, -1),
    "with an axis of examples": lambda shift, h: h - shift.expand(1, LENGTH, -1),
    "repeated": lambda shift, h: h + shift.repeat(1, LENGTH, 1),
    "times a number": lambda shift, h: h + 2 * shift.expand(LENGTH, -1),
    "for examples later": lambda shift, h: h + shift.expand(LENGTH, -1).expand(len(h), -1, -1),
}


class Shift(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.shift = ALONE[how], nn.Parameter(torch.randn(WIDTH))

    def forward(self, h):
        return self.how(self.shift, h)


@pytest.mark.parametrize("how", ALONE)
def test_so_have_those_that_are_joined_with_no_other(how, recwarn):
    torch.manual_seed(0)
    model = AddsPositions(Shift(how)).double()
    x = torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    expected = x.numel() * gradient_at_sum(model, x).square().sum((0, 1))
    found = held(stepped(model, x))["positions.shift"][0].flatten()
    assert not [one for one in recwarn if one.category is RuntimeWarning]
    factor = 4 if how == "times a number" else 1
    torch.testing.assert_close(found, factor * expected.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile does not trace modes")
@pytest.mark.parametrize("how", ALONE)
def test_and_are_named_in_a_compiled_model_too(how):
    torch.manual_seed(0)
    model, x = AddsPositions(Shift(how)).double(), torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    with pytest.warns(RuntimeWarning, match="miss some uses.*'positions.shift'"):
        stepped(model, x, compiled=True)


class WithToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.tokens = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Embedding(VOCABULARY, WIDTH)
        self.mixed, self.head = nn.Linear((LENGTH + 1) * WIDTH, 8), nn.Linear(8, VOCABULARY)

    def forward(self, x):
        first = self.at_sum(self.token.expand(len(x), -1, -1))
        return self.head(torch.tanh(self.mixed(torch.cat([first, self.tokens(x)], 1).flatten(1))))

    def at_sum(self, h):
        return h


def test_a_copy_for_each_example_is_a_use_of_each():
    torch.manual_seed(0)
    model, found = WithToken().double(), []
    x = torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    model.at_sum = lambda h: found.append(h) or h
    loss = F.cross_entropy(model(x), x[:, 0])
    del model.at_sum
    (gradient,) = torch.autograd.grad(loss, found)
    kfac = KFAC(model)
    F.cross_entropy(model(x), x[:, 0]).backward()
    kfac.step()
    expected = EXAMPLES * gradient.square().sum(0)
    torch.testing.assert_close(held(kfac)["token"][0].view(1, -1), expected, rtol=1e-9, atol=1e-12)
