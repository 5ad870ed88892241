"""Positions that are sums of what was looked up: rows and columns, and of one table more than once.

The oracle: gradients of every example at the sum with its tokens, and how often a row was looked up.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from suite.torch import KFAC
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
TRACES = pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile does not trace modes")
COMPILED = [pytest.param(False, id="eager"), pytest.param(True, marks=TRACES, id="compiled")]
HEIGHT = 3
ROWS, COLUMNS = torch.arange(HEIGHT), torch.arange(LENGTH // HEIGHT)
ROW_OF, COLUMN_OF = torch.arange(LENGTH) // len(COLUMNS), torch.arange(LENGTH) % len(COLUMNS)


def grid(m):
    return m.row(ROWS)[:, None] + m.column(COLUMNS)[None]


def in_place(x, y):
    x += y
    return x


SUMS = {  # of tokens, (examples, LENGTH, WIDTH)
    "one by one": lambda m, h: h + m.row(ROW_OF) + m.column(COLUMN_OF),
    "positions first": lambda m, h: m.row(ROW_OF) + m.column(COLUMN_OF) + h,
    "an axis more": lambda m, h: h + (m.row(ROW_OF) + m.column(COLUMN_OF))[None],
    "times numbers": lambda m, h: h + (m.row(ROW_OF).neg() - m.column(COLUMN_OF)) * torch.ones(()),
    "in place": lambda m, h: h.clone().add_(in_place(m.row(ROW_OF), m.column(COLUMN_OF))),
    "a grid": lambda m, h: h + grid(m).flatten(0, 1),
    "a grid of images": lambda m, h: (h.view(len(h), *grid(m).shape) + grid(m)).flatten(1, 2),
    "features first": lambda m, h: (
        (h.view(len(h), HEIGHT, -1, WIDTH).permute(0, 3, 1, 2) + grid(m).permute(2, 0, 1)[None])
        .permute(0, 2, 3, 1)
        .flatten(1, 2)
    ),
    "repeated": lambda m, h: (
        h
        + (m.row(ROWS)[:, None].repeat(1, 2, 1) + m.column(COLUMNS)[None].repeat(3, 1, 1)).view(
            h.shape[1:]
        )
    ),
    "of tokens, too": lambda m, h: (h + m.row(ROW_OF.expand(len(h), LENGTH))) + m.column(COLUMN_OF),
}


# Of one example nothing has more rows than a grid, whose lookups are taken for those of examples.
SUMS_OF_ROWS = ["one by one", "an axis more", "times numbers", "in place", "of tokens, too"]


class Positions(nn.Module):
    """What is looked up, and the sum with the tokens, may be in modules of their own."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how = how
        self.row, self.column = nn.Embedding(HEIGHT, WIDTH), nn.Embedding(len(COLUMNS), WIDTH)

    def forward(self, h):
        return self.how(self, h)


def make(how):
    torch.manual_seed(0)
    return AddsPositions(Positions(how)).double()


def expected_G(model, x):
    rows = gradient_at_sum(model, x).flatten(0, 1)
    return len(rows) * rows.T @ rows


def frequencies(index, rows):
    return torch.bincount(index, minlength=rows).double() / len(index)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize(
    ("how", "examples"), [(how, EXAMPLES) for how in SUMS] + [(how, 1) for how in SUMS_OF_ROWS]
)
def test_parts_of_positions_have_the_gradients_of_every_example(how, examples, compiled, recwarn):
    model = make(SUMS[how])
    x = torch.randint(VOCABULARY, (examples, LENGTH))
    expected = expected_G(model, x)
    kfac = stepped(model, x, compiled)
    assert not [one for one in recwarn if one.category is RuntimeWarning]
    for name, index in (("row", ROW_OF), ("column", COLUMN_OF)):
        A, G = held(kfac)[f"positions.{name}"]
        torch.testing.assert_close(G[0], expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(A.flatten(), frequencies(index, A.numel()), rtol=1e-9, atol=1e-12)


class Shifted(AddsPositions):
    def __init__(self) -> None:
        super().__init__(None)
        self.row, self.shift = nn.Embedding(HEIGHT, WIDTH), nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x):
        h = self.at_sum(self.tokens(x) + (self.row(ROW_OF) + self.shift))
        return self.head(torch.tanh(self.hidden(h + torch.tanh(self.mixed(h)))))


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_part_may_be_a_parameter(compiled):
    torch.manual_seed(0)
    model = Shifted().double()
    x = torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    expected = expected_G(model, x)
    kfac = stepped(model, x, compiled)
    torch.testing.assert_close(held(kfac)["row"][1][0], expected, rtol=1e-9, atol=1e-12)


class Sampled(AddsPositions):
    """What is the sum with the tokens is used by itself, and with noise of several samples added."""

    def forward(self, x):
        h = self.at_sum(self.tokens(x) + self.positions.row(ROW_OF))
        noise = torch.linspace(-1, 1, 3, dtype=h.dtype)[:, None, None, None]
        return self.head(torch.tanh(self.hidden(torch.tanh(h + noise).mean(0) + h)))


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("examples", [1, EXAMPLES])
def test_a_sum_with_tokens_may_be_used_again(examples, compiled):
    torch.manual_seed(0)
    model = Sampled(Positions(None)).double()
    x = torch.randint(VOCABULARY, (examples, LENGTH))
    expected = expected_G(model, x)
    kfac = stepped(model, x, compiled)
    for name in ("tokens", "positions.row"):
        torch.testing.assert_close(held(kfac)[name][1][0], expected, rtol=1e-9, atol=1e-12)


TWICE = {
    "one sum": lambda m, h: h + (m.row(ROW_OF) + m.row(COLUMN_OF)),
    "looked up first": lambda m, h: (lambda a, b: h + a + b)(m.row(ROW_OF), m.row(COLUMN_OF)),
}


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("how", TWICE)
def test_two_lookups_in_one_table_are_two_uses(how, compiled, recwarn):
    model = make(TWICE[how])
    x = torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    expected = 2 * expected_G(model, x)
    kfac = stepped(model, x, compiled)
    assert not [one for one in recwarn if one.category is RuntimeWarning]
    A, G = held(kfac)["positions.row"]
    both = torch.cat([ROW_OF, COLUMN_OF])
    torch.testing.assert_close(G[0] / expected, torch.ones_like(G[0]), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(A.flatten(), frequencies(both, HEIGHT), rtol=1e-9, atol=1e-12)


def test_one_example_first_then_many():
    """Of one example nothing is added to more rows; those that are later are followed all the same."""
    model = make(SUMS["a grid"])
    kfac = KFAC(model, factor_decay=0.0)
    for examples in (1, 1, EXAMPLES):
        x = torch.randint(VOCABULARY, (examples, LENGTH))
        expected = expected_G(model, x)
        model.zero_grad()
        loss_of(model, x).backward()
        kfac.step()
    torch.testing.assert_close(held(kfac)["positions.row"][1][0], expected, rtol=1e-9, atol=1e-12)
