"""Tables that are looked up once for all examples: G is of every example's own gradient.

The oracle: the gradient by the table of each example alone, whose rows are the positions'.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from suite.torch import KFAC
from torch_backend.rows_by_loops import held

VOCABULARY, LENGTH, WIDTH, EXAMPLES = 11, 5, 6, 12


class Looks(nn.Module):
    """The usual wrapper: whoever calls it adds what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x):
        return self.table(torch.arange(x.shape[1]))


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.looks = Looks()

    def forward(self, x):
        return self.looks(x) * 2


class ByFunction(Looks):
    def forward(self, x):
        return F.embedding(torch.arange(x.shape[1]), self.table.weight)


def in_place(h, found):
    h.add_(found)
    return h


def in_place_on_a_view(h, found):
    changed = h.clone()
    flat = changed.flatten(1).unflatten(1, (LENGTH, WIDTH))
    flat += found
    return flat


def attending(h, bias):
    """What one query of each feature attends to."""
    keys = h.mT[..., None]
    return h + F.scaled_dot_product_attention(keys.mean(2, True), keys, keys, attn_mask=bias)[..., 0].mT


FIRST = torch.arange(LENGTH) < LENGTH - 1
FOLLOWED = {
    "sum": lambda h, found: h + found,
    "in place": lambda h, found: in_place(h.clone(), found),
    "in place, on a view": in_place_on_a_view,
    "alpha": lambda h, found: torch.add(h, found, alpha=1),
    "by keyword": lambda h, found: torch.add(input=h, other=found),
    "repeat": lambda h, found: h + found.repeat(len(h), 1, 1),
    "repeat, in a list": lambda h, found: h + found[None].repeat([len(h), 1, 1]),
    "expand": lambda h, found: h + found[None].expand(len(h), -1, -1).expand_as(h) / 2,
    "and a number": lambda h, found: h - (1 + found),
    "and numbers, with an axis more": lambda h, found: h + (2 * (found[None] - 1) + 1),
    "copies": lambda h, found: h + found.clone().contiguous(),
    "cast": lambda h, found: h + found.float().double(),
    "masked first": lambda h, found: h + (found[None] + torch.ones(1, LENGTH, 1).double().tril()),
    "viewed": lambda h, found: h + found.contiguous().view(1, LENGTH, WIDTH).view(h.shape[1:]),
    "in places": lambda h, found: h + torch.where(FIRST[:, None], found.mT.mT, 0.5).mT.mT / 2,
    "as data say": lambda h, found: h.relu() + 3 * (found / 2).masked_fill(h < 0, 0.0),
    "attention": lambda h, found: attending(h, found.mT[None, :, None]),
    "attention, of each": lambda h, found: attending(
        h, found.mT[None, :, None].expand(len(h), -1, -1, -1)
    ),
    "masked attention": lambda h, found: attending(
        h, torch.where(FIRST, found.mT[None, :, None], -1e9).contiguous()
    ),
    "attention, masked as data say": lambda h, found: attending(
        h, torch.where(h.mT < 1, found.mT, -1e9)[:, :, None]
    ),
    "attention, some of nothing": lambda h, found: attending(
        h, torch.where(h.mean((1, 2), True) < 0, found.mT, -1e9)[:, :, None]
    ),
}
MISSED = {
    "gate": lambda h, found: h * found.sigmoid() + h * found,
    "where": lambda h, found: torch.where(h > 0, h, found),
    "addcmul": lambda h, found: torch.addcmul(h, found, torch.ones(()).double()),
    "alpha": lambda h, found: torch.add(h, found, alpha=3),
    "in place, a view by a statement": lambda h, found: in_place_of_a_view(h.clone(), found),
    "in place, features first": lambda h, found: in_place(h.mT.contiguous(), found.mT).mT,
    "checkpoint": lambda h, found: checkpoint(torch.add, h, found, use_reentrant=False),
    "a view of positions and features": lambda h, found: (h.flatten(1) + found.view(1, -1)).view(
        h.shape
    ),
    "changed through a view": lambda h, found: h + changed_through_a_view(found.clone()),
}


def changed_through_a_view(x):
    x.view(-1).mul_(2)
    return x


def in_place_of_a_view(h, found):
    h[:, :].add_(found)
    return h


class Model(nn.Module):
    def __init__(self, looks, join) -> None:
        super().__init__()
        self.tokens, self.looks, self.join = nn.Embedding(VOCABULARY, WIDTH), looks, join
        self.norm, self.hidden = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x):
        h = self.join(self.tokens(x), self.looks(x))
        return self.head(torch.tanh(self.hidden(self.norm(h))))


class Outer(nn.Module):
    """What is called may be inside of what K-FAC is given."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model


def loss_of(model, x):
    return F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())


def of_each_example(model, table, batches):
    G = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for x in batches:
        for one in x:
            # As a loss of all examples has it: a mean of so many terms more.
            loss = loss_of(model, one[None]) / len(x)
            (gradient,) = torch.autograd.grad(loss, table.weight)
            G += len(x) * LENGTH * gradient.T @ gradient / len(batches)
    return G


@pytest.mark.parametrize("looks", [Looks, Inside, ByFunction])
@pytest.mark.parametrize("how", FOLLOWED)
def test_gradients_are_of_every_example_wherever_positions_are_added(how, looks):
    torch.manual_seed(0)
    model = Model(looks(), FOLLOWED[how]).double()
    table = next(m for m in model.looks.modules() if isinstance(m, nn.Embedding))
    batches = torch.randint(VOCABULARY, (3, EXAMPLES, LENGTH))
    expected = of_each_example(model, table, batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac = KFAC(Outer(model), factor_decay=lambda step: step / (step + 1))
        for x in batches:
            model.zero_grad()
            loss_of(model, x).backward()
            kfac.step()
    name = next(name for name, m in Outer(model).named_modules() if m is table)
    rtol = 1e-5 if how == "cast" else 1e-9
    torch.testing.assert_close(held(kfac)[name][1][0], expected, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("how", MISSED)
def test_uses_for_all_examples_that_are_not_followed_are_named(how):
    torch.manual_seed(0)
    model = Model(Looks(), MISSED[how]).double()
    kfac = KFAC(model)
    loss_of(model, torch.randint(VOCABULARY, (EXAMPLES, LENGTH))).backward()
    with pytest.warns(RuntimeWarning, match="(ran once for all|miss some uses).*'looks.table'"):
        kfac.step()


class OnceForAll(nn.Module):
    """Has something that is computed once for all examples, or for each."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(WIDTH, WIDTH)
        self.table, self.norm = nn.Embedding(LENGTH, WIDTH), nn.LayerNorm(WIDTH)
        self.small, self.wide = nn.Linear(2, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.distances, self.given = nn.Embedding(5, WIDTH), nn.Parameter(torch.randn(3, 2 * WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        h, grid = self.inner(x), x.new_ones(1, LENGTH, 2)
        return self.head(torch.tanh(ONCE_FOR_ALL[self.how][1](self, h, grid, torch.arange(LENGTH))))


ONCE_FOR_ALL = {  # the layers that are named, and what is computed
    "a layer": (["small"], lambda m, h, grid, i: h + m.small(grid)),
    "of one row": ([], lambda m, h, grid, i: h * m.small(grid[:, 0])[:, None]),
    "normalized": (["table"], lambda m, h, grid, i: h + m.norm(m.table(i))),
    "normalized, with an axis": (["table", "norm"], lambda m, h, grid, i: h + m.norm(m.table(i[None]))),
    "concatenated": (["table"], lambda m, h, grid, i: m.wide(beside(h, m.table(i)))),
    "cut": (["table"], lambda m, h, grid, i: h + torch.cat(m.table(i).chunk(2, -1)[::-1], -1)),
    "one for all": (["table"], lambda m, h, grid, i: film(h, m.table(i[2:3]))),
    "one number": (["table"], lambda m, h, grid, i: film(h, m.table(i[2]))),
    "added": ([], lambda m, h, grid, i: h + m.table(i)),
    "of each": ([], lambda m, h, grid, i: h + m.small(grid.expand(len(h), -1, -1))),
    "looked up by each": ([], lambda m, h, grid, i: m.wide(beside(h, m.table(i.expand(len(h), -1))))),
    "by nodes": ([], lambda m, h, grid, i: h + m.table(torch.arange(len(h)) % LENGTH)[:, None]),
    "of one time": ([], lambda m, h, grid, i: h + m.small(h[None, :, 0, :2])[0][:, None]),
    "of two kinds of rows": (
        ["norm", "small"],
        lambda m, h, grid, i: (
            m.norm(h + m.small(h[..., :2])) + m.norm(m.small(m.given[None, :, :2]))[:, :1]
        ),
    ),
    "of a parameter": (["wide"], lambda m, h, grid, i: h + m.wide(m.given)[0]),
    "distances": (
        ["distances"],
        lambda m, h, grid, i: torch.einsum("bqd,qkd->bqk", h, m.distances(between(i))) @ h,
    ),
    "distances, masked": (
        ["distances"],
        lambda m, h, grid, i: h * m.distances(between(i).clamp(0, 2)).masked_fill(mask(i), 0.0).sum(1),
    ),
    "a rest of the batch": (
        [],
        lambda m, h, grid, i: torch.cat([m.norm(m.small(x[..., :2])) for x in h.split(11)]),
    ),
    "of two rows of tokens": (
        [],
        lambda m, h, grid, i: h + m.table(torch.tensor([[1, 2], [3, 1]])).sum() * h,
    ),
    "distances of each": (
        [],
        lambda m, h, grid, i: (
            torch.einsum("bqd,bqkd->bqk", h, m.distances(between(i).expand(len(h), -1, -1))) @ h
        ),
    ),
    "a constant index of each": (
        [],
        lambda m, h, grid, i: h * m.table(torch.full(h.shape[:2], 2)),
    ),
    "in turn": (
        [],
        lambda m, h, grid, i: torch.cat([m.wide(beside(x, x)) for x in h[:, None]]).view_as(h),
    ),
}


def between(i):
    """Distances of positions, as far as there are rows for them."""
    return (i[:, None] - i).clamp(-2, 2) + 2


def mask(i):
    return (i[:, None] < i)[..., None]


def film(h, found):
    gain, shift = found.chunk(2, -1)
    return h * torch.cat([gain, gain], -1) + torch.cat([shift, shift], -1)


def beside(h, found):
    return torch.cat([h, found.expand_as(h)], -1)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("examples", [1, EXAMPLES])
@pytest.mark.parametrize("how", ONCE_FOR_ALL)
def test_layers_that_run_once_for_all_examples_are_named(how, examples, fisher):
    torch.manual_seed(0)
    model = OnceForAll(how)
    kfac = KFAC(model, fisher=fisher, likelihood=None if fisher == "empirical" else "gaussian")
    model(torch.randn(examples, LENGTH, WIDTH)).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kfac.step()
    names = ONCE_FOR_ALL[how][0] if examples > 1 and fisher == "empirical" else []
    said = [str(one.message) for one in caught if "once for all examples" in str(one.message)]
    assert [one.rpartition(": ")[2] for one in said] == ([", ".join(map(repr, names))] if names else [])


@pytest.mark.parametrize(
    "how", ["added", "normalized", "concatenated", "one for all", "looked up by each"]
)
def test_a_forward_pass_that_no_loss_is_made_of_changes_nothing_that_is_named(how):
    torch.manual_seed(0)
    model = OnceForAll(how)
    kfac, x = KFAC(model), torch.randn(EXAMPLES, LENGTH, WIDTH)
    model(x).square().mean().backward()
    logged = model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kfac.step()
    assert logged.requires_grad
    names = [str(one.message).rpartition(": ")[2] for one in caught]
    assert names == [", ".join(map(repr, own)) for own in ONCE_FOR_ALL[how][:1] if own]


class Prompted(nn.Module):
    """A prompt that is made once, in front of every example, for a model that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.made = nn.Embedding(2, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.body = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)

    def forward(self, x):
        prompt = self.made(self.prompt(torch.arange(2)[None])).repeat(len(x), 1, 1)
        h = torch.cat([prompt, self.tokens(x)], 1)
        return self.body(torch.tanh(h + h.mean(1, keepdim=True)))


@pytest.mark.parametrize("examples", [1, EXAMPLES])
def test_prompts_for_a_model_that_is_not_trained_are_named(examples):
    torch.manual_seed(0)
    model = Prompted()
    kfac = KFAC(model)
    model(torch.randint(VOCABULARY, (examples, LENGTH))).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kfac.step()
    said = [str(one.message) for one in caught if "once for all examples" in str(one.message)]
    assert len(said) == (examples > 1)
    assert all("'prompt', 'made'" in one for one in said)


class Biased(nn.Module):
    """A bias of distances that two layers share, as T5's do."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.layers = nn.Embedding(5, 2), nn.ModuleList(nn.Linear(6, 6) for _ in "ab")

    def forward(self, x):
        bias = self.bias(between(torch.arange(x.shape[1]))).permute(2, 0, 1)[None]
        for layer in self.layers:
            h = layer(x).unflatten(-1, (2, 3)).transpose(1, 2)
            x = x + ((h @ h.mT + bias).softmax(-1) @ h).transpose(1, 2).flatten(2)
        return x


def test_what_two_layers_share_is_the_same_in_any_micro_batches():
    x, found = torch.randn(4, LENGTH, 6, dtype=torch.float64), []
    for parts in ([4], [2, 2], [1, 3], [1, 1, 1, 1]):
        torch.manual_seed(0)
        model = Biased().double()
        kfac = KFAC(model)
        for part in x.split(parts):
            (model(part).square().mean() * len(part) / 4).backward()
        kfac.step()
        found.append(held(kfac)["bias"][1])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-14)


class Conditioned(nn.Module):
    """A lookup for each example, for all of its positions."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how, self.table = how, nn.Embedding(4, WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x):
        of_each = self.table(torch.arange(len(x)) % 4)
        if self.how == "last":
            h = x * of_each[:, None] + of_each.unsqueeze(1)
        else:
            h = (x.mT * of_each[:, :, None]).mT
        return self.head(torch.tanh(self.hidden(h)))


@pytest.mark.parametrize("how", ["last", "first"])
def test_a_lookup_of_each_example_is_no_missed_use(how):
    torch.manual_seed(0)
    model = Conditioned(how).double()
    kfac = KFAC(model)
    model(torch.randn(EXAMPLES, LENGTH, WIDTH).double()).square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac.step()


class CallsItself(nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.model, self.last = model, nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, x, depth=0):
        return self.model(x) if depth else self.last(torch.tanh(self(x, 1)))


def test_sums_are_seen_once_where_a_module_calls_itself():
    torch.manual_seed(0)
    model = CallsItself(Model(Looks(), FOLLOWED["sum"])).double()
    table, x = model.model.looks.table, torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    expected = of_each_example(model, table, [x])
    kfac = KFAC(Outer(model), factor_decay=lambda step: step / (step + 1))
    loss_of(model, x).backward()
    kfac.step()
    found = held(kfac)["model.model.looks.table"][1][0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("first", ["one example", "around it"])
def test_sums_are_seen_later_too(first):
    """Whatever the first step was of: one example, which tells nothing, or more modules."""
    torch.manual_seed(0)
    model = Model(Looks(), FOLLOWED["sum"]).double()
    around = CallsItself(model).double()
    kfac = KFAC(around, factor_decay=lambda step: step / (step + 1))
    x = torch.randint(VOCABULARY, (EXAMPLES, LENGTH))
    expected = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for called, batch in ((model, x[:1]) if first == "one example" else (around, x), (model, x)):
        expected += of_each_example(called, model.looks.table, [batch]) / 2
        around.zero_grad()
        loss_of(called, batch).backward()
        kfac.step()
    found = held(kfac)["model.looks.table"][1][0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
