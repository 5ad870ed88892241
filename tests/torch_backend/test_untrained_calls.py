"""Calls that train nothing of a layer, and backward passes that are thrown away, leave no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from suite.torch import KFAC


class Own(nn.Module):
    """A free parameter, a stack of matrices, and a weight that a function gets."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(5))
        self.experts = nn.Parameter(torch.randn(2, 5, 5))
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        x = F.linear(x + self.shift, self.weight)
        return sum(F.linear(x, self.experts[i]) for i in range(2))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x):
        return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]


MODELS = {
    "attention": lambda: nn.Sequential(Attending(), nn.Linear(5, 1)),
    "linear": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)),
    "without bias": lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 1)),
    "norm": lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)),
    "norm last": lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)),
    "own": lambda: nn.Sequential(Own(), nn.Tanh(), nn.Linear(5, 1)),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 1)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 1)
    ),
}
every_model = pytest.mark.parametrize("kind", list(MODELS))


def made(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    return model, torch.randn(12, 5).double(), torch.randn(7, 5).double()


def trained(model, passes, steps=2, **settings):
    """(directions, terms) of steps, each after `passes(model)`."""
    kfac, found = KFAC(model, damping=0.03, kl_clip=None, factor_decay=0.5, **settings), []
    for _ in range(steps):
        passes(model)
        kfac.step()
        found.append(([p.grad.clone() for p in model.parameters()], kfac.counted_terms))
        model.zero_grad()
    return found


def assert_alike(some, others):
    for (directions, terms), (expected, expected_terms) in zip(some, others, strict=True):
        assert terms == expected_terms
        for x, y in zip(directions, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def own_pass(model, x):
    model(x).square().mean().backward()


@every_model
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fisher", ["empirical", "mc", "type-2"])
def test_a_pass_through_a_frozen_model_has_no_part_in_its_statistics(kind, before, fisher):
    model, x, z = made(kind)
    settings = {} if fisher == "empirical" else {"fisher": fisher, "likelihood": "gaussian"}

    def frozen(model):
        model.requires_grad_(False)
        (3 * model(z.clone().requires_grad_()) - 1).square().mean().backward()
        model.requires_grad_(True)

    def both(model):
        for one in (frozen, lambda m: own_pass(m, x)) if before else (lambda m: own_pass(m, x), frozen):
            one(model)

    found = trained(copy.deepcopy(model), both, **settings)
    assert_alike(found, trained(model, lambda m: own_pass(m, x), **settings))


@every_model
@pytest.mark.parametrize("which", ["leaves", "constants"])
def test_calls_with_other_weights_have_no_part(kind, which):
    model, x, z = made(kind)

    def both(model):
        other = {n: 3 * p.detach() for n, p in model.named_parameters()}
        other = {n: p.requires_grad_(which == "leaves") for n, p in other.items()}
        loss = functional_call(model, other, (z.clone().requires_grad_(),)).square().mean()
        (loss + model(x).square().mean()).backward()

    assert_alike(trained(copy.deepcopy(model), both), trained(model, lambda m: own_pass(m, x)))


def test_calls_with_its_own_parameters_by_name_or_weights_made_of_them_have_one():
    model, x, _ = made("linear")

    def by_name(model):
        functional_call(model, dict(model.named_parameters()), (x,)).square().mean().backward()

    def fast(model):
        made_of = {n: p - 0.0 for n, p in model.named_parameters()}
        functional_call(model, made_of, (x,)).square().mean().backward()

    for passes in (by_name, fast):
        assert_alike(
            trained(copy.deepcopy(model), passes),
            trained(copy.deepcopy(model), lambda m: own_pass(m, x)),
        )


def test_a_frozen_head_says_how_many_terms_there_are():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)).mean(1))

    torch.manual_seed(0)
    model, x = Pooled().double(), torch.randn(6, 3, 5).double()
    kfac = KFAC(model, damping=0.1)
    model.head.requires_grad_(False)
    for _ in range(2):
        own_pass(model, x)
        kfac.step()
        model.zero_grad()
        assert kfac.counted_terms == 6


@every_model
def test_a_backward_pass_whose_gradients_are_set_to_none_leaves_no_trace(kind):
    model, x, z = made(kind)

    def with_discarded(model):
        out = model(x)
        other = model(z)  # before any backward pass: no forward pass comes between the two
        (2 * out - 1).square().mean().backward(retain_graph=True)
        model.zero_grad()
        other.exp().mean().backward()
        model.zero_grad()
        out.square().mean().backward()

    assert_alike(trained(copy.deepcopy(model), with_discarded), trained(model, lambda m: own_pass(m, x)))


def test_gradients_that_are_zeroed_in_place_keep_the_statistics_of_their_pass():
    """As where tasks go backward one by one, and what is made of their gradients is put together."""
    model, x, z = made("linear")

    def by_task(model):
        parts = [model(y).square().sum() / 19 for y in (x, z)]
        kept = []
        for part in parts:
            model.zero_grad(set_to_none=False)
            part.backward()
            kept.append([p.grad.clone() for p in model.parameters()])
        for p, *each in zip(model.parameters(), *kept, strict=True):
            p.grad = sum(each)

    def at_once(model):
        model(torch.cat([x, z])).square().mean().backward()

    assert_alike(trained(copy.deepcopy(model), by_task), trained(model, at_once))


@pytest.mark.filterwarnings("ignore:these parameters were not covered:RuntimeWarning")  # the new one
def test_a_weight_that_another_module_had_too_and_has_no_more_is_still_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False)).double()
    model[2].weight = model[0].weight
    x = torch.randn(12, 5).double()
    kfac = KFAC(model, damping=0.03, factor_decay=0.0)
    model[2].weight = nn.Parameter(torch.eye(5).double())
    for scale in (1.0, 2.0):
        own_pass(model, scale * x)
        kfac.step()
        model.zero_grad()
        A = kfac.state_dict()["kfac"]["layers"]["0"]["A"][0]
        torch.testing.assert_close(A, scale**2 * x.T @ x / 12)


@pytest.mark.parametrize("place", ["_parameters", "__dict__"])
def test_a_call_with_detached_weights_in_their_place_leaves_no_trace(place):
    """As a critic's in the loss of an actor, however they get there."""
    model, x, _ = made("linear")
    before = torch.nn.Parameter(torch.randn(12, 5).double())

    def both(model, frozen):
        critic = model(x).square().mean()
        held = {(m, name): p for m in model.modules() for name, p in m._parameters.items()}
        for (m, name), p in held.items() if frozen else ():
            del m._parameters[name]
            getattr(m, place)[name] = p.detach()
        actor = model(before).mean() if frozen else 0.0
        for (m, name), p in held.items():
            vars(m).pop(name, None)
            m._parameters[name] = p
        (critic + actor).backward()

    ends = [trained(copy.deepcopy(model), lambda m, f=f: both(m, f)) for f in (False, True)]
    assert_alike(*ends)
    assert before.grad.abs().max() > 0


@pytest.mark.filterwarnings("ignore:these parameters were not covered:RuntimeWarning")  # the new one
@pytest.mark.parametrize("how", ["exchanged", "by functional_call"])
def test_a_layer_with_another_bias_is_still_trained(how):
    model, x, _ = made("linear")
    kfac = KFAC(model, damping=0.03, factor_decay=0.0)
    if how == "exchanged":
        model[0].bias = nn.Parameter(torch.ones(4).double())
    for scale in (1.0, 2.0):
        if how == "exchanged":
            own_pass(model, scale * x)
        else:
            functional_call(
                model, {"0.bias": torch.ones(4).double()}, (scale * x,)
            ).square().mean().backward()
        kfac.step()
        model.zero_grad()
        A = kfac.state_dict()["kfac"]["layers"]["0"]["A"][0]
        torch.testing.assert_close(A[:5, :5], scale**2 * x.T @ x / 12)


def test_a_backward_pass_that_raised_does_not_keep_what_is_thrown_away_later():
    model, x, z = made("linear")

    def interrupted(model):
        out = model(x)
        out.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        model.zero_grad()
        one, other = model(x), model(z)
        other.sum().backward()
        model.zero_grad()
        one.square().mean().backward()

    assert_alike(trained(copy.deepcopy(model), interrupted), trained(model, lambda m: own_pass(m, x)))


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.hidden = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, tokens):
        return F.linear(torch.tanh(self.hidden(self.table(tokens))), self.table.weight)


@pytest.mark.parametrize("when", ["before", "after", "another batch"])
def test_gradients_that_are_looked_at_take_no_terms_from_a_tied_head(when):
    """G of the layer below is N Σ g gᵀ by hand, N = 20 tokens."""
    torch.manual_seed(0)
    model = TiedHead().double()
    tokens, targets = torch.randint(0, 9, (4, 5)), torch.randint(0, 9, (20,))
    s = model.hidden(model.table(tokens)).detach().requires_grad_()
    logits = torch.tanh(s) @ model.table.weight.detach().T
    (g,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), targets), s)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets)
    looked = loss if when != "another batch" else model(tokens[:2]).square().mean()

    def look():
        torch.autograd.grad(looked, list(model.parameters()), retain_graph=True)

    if when != "after":
        look()
    loss.backward(retain_graph=True)
    if when == "after":
        look()
    kfac.step()
    record = kfac.state_dict()["kfac"]["layers"]["hidden"]
    rows = g.flatten(0, 1)
    torch.testing.assert_close(
        record["G"][0] / record["G_weight"], 20 * rows.T @ rows, rtol=1e-9, atol=0
    )
    assert kfac.counted_terms == 20


def test_gradients_that_are_looked_at_take_no_terms_from_derivatives():
    """A PINN's losses are balanced by the norms of their gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0), terms=None)
    inside, edge = torch.rand(20, 2).double().requires_grad_(), torch.rand(8, 2).double()

    def losses():
        (slope,) = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
        return slope.square().sum(1).mean(), model(edge).square().mean()

    counts = []
    for looks in (False, True):
        both = losses()
        for loss in both if looks else ():
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        sum(both).backward()
        kfac.step()
        kfac.zero_grad()
        counts.append(kfac.counted_terms)
    assert counts[0] == counts[1] > 8


@pytest.mark.parametrize("looks", ["grad by inputs", "backward by inputs", "grad by parameters"])
def test_passes_that_train_nothing_draw_no_samples(looks):
    """Adversarial inputs in three micro-batches: A and the exact Fisher of what is trained, by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3)).double()
    kfac = KFAC(
        model, torch.optim.SGD(model.parameters(), lr=0.1), fisher="type-2", likelihood="categorical"
    )
    rows, fishers = [], 0.0
    for _ in range(3):
        x, y = torch.randn(8, 6).double().requires_grad_(), torch.randint(0, 3, (8,))
        loss = F.cross_entropy(model(x), y)
        if looks == "backward by inputs":
            loss.backward(inputs=[x])
        else:
            torch.autograd.grad(loss, x if looks == "grad by inputs" else list(model.parameters()))
        x = (x + 0.1).detach()
        (F.cross_entropy(model(x), y) / 3).backward()
        p = model(x).detach().softmax(1)
        fishers = fishers + torch.diag(p.sum(0)) - p.T @ p
        rows.append(torch.cat([x, torch.ones(8, 1).double()], 1))
    kfac.step()
    record = kfac.state_dict()["kfac"]["layers"]["0"]
    every = torch.cat(rows)
    torch.testing.assert_close(record["A"][0] / record["A_weight"], every.T @ every / 24)
    torch.testing.assert_close(record["G"][0] / record["G_weight"], fishers / 24)
    assert kfac.counted_terms == 24


@pytest.mark.parametrize("order", [1, 2])
def test_a_pass_through_a_frozen_model_takes_no_terms(order):
    """A discriminator is frozen while the generator's penalty goes through it, before both step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.01))
    (model(torch.randn(5, 6)) - 1).square().mean().backward()
    model.requires_grad_(False)
    x = torch.randn(4, 6, requires_grad=True)
    loss = model(x).sum()
    if order == 2:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
    loss.backward()
    model.requires_grad_(True)
    kfac.step()
    assert kfac.counted_terms == 5


class Pooled(nn.Module):
    """A convolution, the mean over its positions, and what the loss is made of."""

    def __init__(self, last) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 4, 3), last

    def forward(self, x):
        h = torch.relu(self.conv(x)).mean((2, 3))
        if isinstance(self.last, nn.Bilinear):
            return self.last(h, h)
        if isinstance(self.last, nn.RNNBase):
            return self.last(h[:, None])[0][:, 0]
        y = self.last(h)
        return y[0] if isinstance(y, tuple) else y


LAST = {
    "linear": lambda: nn.Linear(4, 4),
    "bilinear": lambda: nn.Bilinear(4, 4, 4),
    "gru cell": lambda: nn.GRUCell(4, 4),
    "lstm cell": lambda: nn.LSTMCell(4, 4),
    "lstm": lambda: nn.LSTM(4, 4, batch_first=True, bidirectional=True),
}


@pytest.mark.parametrize(
    ("last", "compiled"),
    # torch.compile leaves an LSTM where it is.
    [*((last, False) for last in LAST), *((last, True) for last in LAST if last != "lstm")],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
def test_the_loss_has_as_many_terms_as_what_comes_last_has_rows(last, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Pooled(LAST[last]())
    kfac = KFAC(model)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    run(torch.randn(6, 2, 8, 8)).square().mean().backward()
    kfac.step()
    assert kfac.counted_terms == 6
