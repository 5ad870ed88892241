"""Parameters that are used by what is around their module: handed on, or taken from there.

The oracle: autograd's gradient by a parameter of its own for every row.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from conftest import assert_close
from suite.torch import KFAC
from torch_backend.rows_by_loops import double, held, loss_of, numbers, stepped

EXAMPLES, LENGTH, HEADS = 6, 4, 2
PLACES = torch.arange(LENGTH)


class Relative(nn.Module):
    """Relative positions' part of attention's scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(numbers(2 * LENGTH - 1, HEADS))
        self.register_buffer("index", PLACES[:, None] - PLACES + LENGTH - 1)

    def forward(self):
        found = self.table[self.index.view(-1)].view(LENGTH, LENGTH, HEADS)
        return found.permute(2, 0, 1).contiguous().unsqueeze(0)

    get_bias = forward


class HandsOn(nn.Module):
    """Returns what a child returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Relative()

    def forward(self):
        return {"bias": 2 * self.inner()}


class PassesOn(nn.Module):
    """Returns a parameter, or a view of one, as a child did."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self):
        return self.inner()


class Itself(Relative):
    def forward(self):
        return self.table


class AddsItself(Relative):
    def forward(self, scores):
        return scores + super().forward()


class Attention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.qkv, self.how = nn.Linear(8, 24), how
        kinds = {
            "of a child's child": HandsOn,
            "added there": AddsItself,
            "both": AddsItself,
            "passed on": lambda: PassesOn(PassesOn(Itself())),
            "taken further inside": lambda: PassesOn(Relative()),
        }
        self.relative = None if how == "given" else kinds.get(how, Relative)()

    def scores(self, q, k, given):
        scores = q @ k.mT / 2
        if self.how == "called":
            return scores + self.relative()
        if self.how == "by a method":
            return scores + 0.5 * self.relative.get_bias()
        if self.how == "taken":
            return scores + self.relative.table[self.relative.index].permute(2, 0, 1)
        if self.how == "passed on":
            return scores + self.relative()[self.relative.inner.inner.index].permute(2, 0, 1)
        if self.how == "taken further inside":
            inner = self.relative.inner
            return scores + inner.table[inner.index].permute(2, 0, 1)
        if self.how == "of a child's child":
            return scores + self.relative()["bias"]
        if self.how == "added there":
            return self.relative(scores)
        if self.how == "both":
            return self.relative(scores) + self.relative.table[0].exp()[:, None, None]
        return scores + given

    def forward(self, x, given=None):
        q, k, v = self.qkv(x).view(len(x), LENGTH, 3, HEADS, 4).permute(2, 0, 3, 1, 4)
        if self.how == "a mask":
            y = F.scaled_dot_product_attention(q, k, v, self.relative())
        else:
            y = self.scores(q, k, given).softmax(-1) @ v
        return x + y.transpose(1, 2).flatten(2)


class Encoder(nn.Module):
    """Blocks that may share one table."""

    def __init__(self, how: str, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(how) for _ in range(2))
        if how == "one child in both":
            for block in self.blocks:
                block.how = "called"
            self.blocks[1].relative = self.blocks[0].relative
        self.shared = Relative() if how == "given" else None
        self.recomputes, self.head = recomputes, nn.Linear(8, 3)

    def forward(self, x):
        given = None if self.shared is None else self.shared()
        for block in self.blocks:
            if self.recomputes:
                x = checkpoint(block, x, given, use_reentrant=False)
            else:
                x = block(x, given)
        return self.head(x.mean(1))


HOW = {
    "called": 1.0,
    "by a method": 0.5,
    "taken": 1.0,
    "of a child's child": 2.0,
    "a mask": 1.0,
    "passed on": 1.0,
    "taken further inside": 1.0,
    "one child in both": 1.0,
    "added there": 1.0,
    "both": 1.0,
    "given": 1.0,
}  # and how many times the table is added


def made(how, **settings):
    return double(lambda: Encoder(how, **settings))


def tables_of(model):
    return {name: p for name, p in model.named_parameters() if name.endswith("table")}


def expected_of(model, how, x):
    """Sums of squares, of every score that a table is a part of."""
    tables, leaves, shape = list(tables_of(model).values()), [], (len(x), HEADS, LENGTH, LENGTH)
    index = PLACES[:, None] - PLACES + LENGTH - 1

    def leaf(at, value, derivative):
        found = value.detach().expand(shape).clone().requires_grad_()
        leaves.append((at, found, derivative))
        return found

    h = x
    for n, block in enumerate(model.blocks):
        at = n if len(tables) > 1 else 0
        table, times = tables[at].detach(), HOW[how]
        q, k, v = block.qkv(h).view(len(h), LENGTH, 3, HEADS, 4).permute(2, 0, 3, 1, 4)
        every = torch.zeros(LENGTH, LENGTH, HEADS, *table.shape, dtype=torch.float64)
        for i in range(LENGTH):
            for j in range(LENGTH):
                for head in range(HEADS):
                    every[i, j, head, index[i, j], head] = times
        every = every.permute(2, 0, 1, 3, 4)
        scores = q @ k.mT / 2 + leaf(at, (every * table).sum((-1, -2)), every)
        if how == "both":
            first = torch.zeros_like(every)
            for head in range(HEADS):
                first[head, :, :, 0, head] = table[0, head].exp()
            scores = scores + leaf(at, table[0].exp()[:, None, None], first)
        h = h + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    loss_of(model.head(h.mean(1))).backward()
    sums = [torch.zeros_like(table) for table in tables]
    for at, found, derivative in leaves:
        sums[at] += torch.einsum("bhij,hijtk->tk", found.grad.square(), derivative.square())
    return dict(zip(tables_of(model), sums, strict=True))


def check(kfac, model, expected):
    factors = held(kfac)
    for name in tables_of(model):
        A, G = factors[name]
        assert_close(A * G[:, 0], EXAMPLES * expected[name].reshape(1, -1))


@pytest.mark.parametrize("how", HOW)
def test_tables_have_the_squares_of_each_rows_gradient(how):
    model, x = made(how), numbers(EXAMPLES, LENGTH, 8)
    expected = expected_of(copy.deepcopy(model), how, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac = stepped(model, x, steps=2)  # not needed in the first step, it would not be looked for
    check(kfac, model, expected)


@pytest.mark.parametrize("how", ["called", "taken"])
def test_blocks_that_are_computed_again_count_once(how):
    model, x = made(how, recomputes=True), numbers(EXAMPLES, LENGTH, 8)
    kfac = stepped(model, x, steps=2)
    check(kfac, model, expected_of(made(how), how, x))


def test_what_blocks_that_are_computed_again_are_given_is_named():
    with pytest.warns(RuntimeWarning, match="'shared.table'"):
        stepped(made("given", recomputes=True), numbers(EXAMPLES, LENGTH, 8))


def test_what_is_not_followed_around_is_named():
    class Sums(Attention):
        def scores(self, q, k, given):
            return super().scores(q, k, given) + torch.where(
                q[..., :1] > 0, self.relative.table[0, 0], 0.0
            )

    model = made("called")
    model.blocks[0] = Sums("called").double()
    kfac = KFAC(model)
    loss_of(model(numbers(EXAMPLES, LENGTH, 8))).backward()
    with pytest.warns(RuntimeWarning, match="statistics miss some uses.*'blocks.0.relative.table'"):
        kfac.step()


def test_modules_are_watched_only_as_long_as_something_may_be_used_there():
    for how, left in (("added there", 0), ("called", 1)):
        model = made(how)
        before = [len(part._forward_hooks) for part in model.blocks]
        kfac = stepped(model, numbers(EXAMPLES, LENGTH, 8))
        after = [len(part._forward_hooks) for part in model.blocks]
        assert after == [n + left for n in before]
        assert len(model._forward_hooks) == 0
        kfac.detach()
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
def test_a_compiled_model_is_whole_and_names_them():
    torch._dynamo.reset()
    model, x = made("called"), numbers(EXAMPLES, LENGTH, 8)
    kfac = KFAC(model)
    loss_of(torch.compile(model, backend="eager", fullgraph=True)(x)).backward()
    with pytest.warns(RuntimeWarning, match="'blocks.0.relative.table'"):
        kfac.step()
