"""Sums of products of one parameter, p a + (1 - p) b: one use, whose gradient is g (a - b)."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import assert_close
from suite.torch import KFAC
from torch_backend.rows_by_loops import double, held, loss_of, numbers, stepped


class Gate(nn.Module):
    """`how` says what becomes of the two products."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.mu = nn.Parameter(0.3 + 0.1 * numbers(4, seed=1))
        self.head = nn.Linear(4, 3)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.mu * x, (1 - self.mu) * x.cos()
        if self.how == "changed":
            first += x.exp()  # no product any more
        if self.how == "changed within":
            first[:2] = 3 * first[:2]
        if self.how == "added in place":
            first += second
            return first
        if self.how == "added by sum":
            return sum([first, second])
        if self.how == "apart":
            return first + torch.tanh(second)
        if self.how == "four in pairs":
            third, fourth = self.mu * x.exp(), self.mu * x.sin()
            pairs = first + second, third + fourth
            return first + second + (pairs[0] + pairs[1])
        if self.how == "added in a checkpoint":
            return checkpoint(torch.add, first, second, use_reentrant=False)
        total = first + second
        return total + first.sin() if self.how == "used again" else total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.gated(x)))


def squares(kfac: KFAC) -> torch.Tensor:
    A, G = held(kfac)["mu"]
    return A * G[:, 0]


@pytest.mark.parametrize(
    "how", ["plain", "changed", "changed within", "used again", "added in a checkpoint"]
)
def test_the_gradient_is_the_plain_models(how):
    x, model, plain = numbers(5, 2, 4), double(lambda: Gate(how)), double(lambda: Gate(how))
    plain.load_state_dict(model.state_dict())
    kfac = KFAC(model)
    for one in (model, plain):
        loss_of(one(x), "mean").backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    kfac.step()
    assert squares(kfac).min() > 0


def squares_of_rows(model, x, combine):
    """Σ over rows of squared gradients by copies of mu, one for each row; `combine` gets two of them."""
    uses = [model.mu.detach().expand(x.shape).clone().requires_grad_() for _ in range(2)]
    loss_of(model.head(torch.tanh(combine(x, *uses))), "sum").backward()
    model.zero_grad()
    return sum(u.grad.square().sum((0, 1)) for u in uses if u.grad is not None).reshape(1, -1)


def gate(x, p, q):
    return p * x + (1 - p) * x.cos()


@pytest.mark.parametrize(
    ("how", "combine"),
    [
        ("plain", gate),
        ("changed", lambda x, p, q: gate(x, p, q) + x.exp()),
        ("used again", lambda x, p, q: gate(x, p, q) + (p * x).sin()),
        ("added in a checkpoint", gate),
        ("added in place", gate),
        ("added by sum", gate),
        ("four in pairs", lambda x, p, q: 2 * gate(x, p, q) + p * x.exp() + p * x.sin()),
        ("apart", lambda x, p, q: p * x + torch.tanh((1 - q) * x.cos())),
    ],
)
def test_products_that_a_sum_joins_are_one_use(how, combine):
    x, model = numbers(5, 2, 4), double(lambda: Gate(how))
    torch.testing.assert_close(model.gated(x), combine(x, model.mu, model.mu))
    expected = squares_of_rows(model, x, combine)
    assert_close(squares(stepped(model, x, reduction="sum")), expected)


def test_a_pass_that_does_not_come_to_the_sum_has_uses_by_themselves():
    """Two losses, of which one knows of one product alone."""

    class Two(Gate):
        def forward(self, x):
            first, second = self.mu * x, (1 - self.mu) * x.cos()
            return self.head(torch.tanh(first + second)), self.head(torch.sin(first))

    x, model = numbers(5, 2, 4), double(Two)
    both = [squares_of_rows(model, x, f) for f in (gate, lambda x, p, q: torch.atanh(torch.sin(p * x)))]
    kfac = KFAC(model, kl_clip=None, loss_reduction="sum")
    for y, again in zip(model(x), (True, False), strict=True):
        loss_of(y, "sum").backward(retain_graph=again)
    kfac.step()
    assert_close(squares(kfac), sum(both))


@pytest.mark.parametrize("when", ["before the sum", "behind it"])
def test_hooks_and_gradients_of_products_are_the_plain_models(when):
    class Hooked(Gate):
        def gated(self, x):
            first, second = self.mu * x, (1 - self.mu) * x.cos()
            if when == "before the sum":
                first.register_hook(lambda g: g.clamp(-0.1, 0.1))
            total = first + second
            if when == "behind it":
                second.register_hook(lambda g: 2 * g)
            first.retain_grad()
            self.found = first, total
            return total

    x, model, plain = numbers(5, 2, 4), double(Hooked), double(Hooked)
    plain.load_state_dict(model.state_dict())
    kfac = KFAC(model)
    for one in (model, plain):
        loss = loss_of(one(x), "mean")
        one.of_first = torch.autograd.grad(loss, one.found[0], retain_graph=True)[0]
        loss.backward()
    assert torch.equal(model.mu.grad, plain.mu.grad)
    assert torch.equal(model.found[0].grad, plain.found[0].grad)
    assert torch.equal(model.of_first, plain.of_first)
    assert model.found[0].grad.any()
    kfac.step()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(1, 4, 4),
        lambda x: x.reshape(16)[:4],
        lambda x: x.transpose(0, 1),
        lambda x: x[1],
        lambda x: x.chunk(2)[1].mT,
        lambda x: x.unbind()[2],
        lambda x: x[..., 0, :],
        lambda x: x.T.contiguous().view(16)[4:8],
    ],
)
@pytest.mark.parametrize("other", ["number", "buffer", "column", "parameter", "norm", "function"])
def test_what_a_parameter_is_made_to_can_be_viewed(view, other):
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.gain = nn.Parameter(numbers(4, 4)), nn.Parameter(torch.tensor(2.0))
            self.register_buffer("row", numbers(4, seed=3))
            self.register_buffer("column", numbers(4, 1, seed=4))
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            p = self.p
            if other == "function":
                made = torch.exp(-p)
            elif other == "norm":
                made = p / p.detach().norm()
            elif other == "number":
                made = p * torch.tensor(2.0)
            else:
                made = p * {"buffer": self.row, "column": self.column, "parameter": self.gain}[other]
            made = view(made)
            made = made.reshape(-1, 4)[-1]
            return self.head(torch.tanh(x * made + (1 - made) * x.cos()))

    x, model = numbers(6, 4), double(Viewed)
    plain = double(Viewed)
    plain.load_state_dict(model.state_dict())
    kfac = KFAC(model, kl_clip=None, loss_reduction="sum")
    gradients = []
    for row in x.split(1):
        plain.zero_grad()
        loss_of(plain(row), "sum").backward()
        gradients.append(plain.p.grad.clone())
    loss_of(model(x), "sum").backward()
    torch.testing.assert_close(model.p.grad, sum(gradients))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the gain, which meets no rows by itself
        kfac.step()
    A, G = held(kfac)["p"]
    expected = torch.stack(gradients).square().sum(0).reshape(1, -1)
    if other != "parameter":  # products of two parameters with rows count by themselves
        assert_close(A * G[:, 0], expected)
    assert torch.equal(A > 0, expected > 0)


def test_checkpointed_parts_and_micro_batches_add_up():
    x, model = numbers(6, 2, 4), double(lambda: nn.Sequential(Gate()))
    expected = squares_of_rows(model[0], x, gate)
    kfac = KFAC(model, kl_clip=None, loss_reduction="sum")
    for part in x.split([1, 3, 2]):
        loss_of(checkpoint(model, part, use_reentrant=False), "sum").backward()
    kfac.step()
    A, G = held(kfac)["0.mu"]
    assert_close(A * G[:, 0], expected)


def test_in_derivatives_each_product_is_a_use_of_its_own():
    x, model = numbers(5, 2, 4).requires_grad_(), double(Gate)
    head = model.head.weight.detach()
    joint, by_x, by_cosine = (model.mu.detach().expand(x.shape).clone().requires_grad_() for _ in "abc")
    plain = x.detach()
    y = torch.tanh(joint * plain + (1 - joint) * plain.cos())
    slope = (1 - y * y) * head.sum(0)  # of the sum of outputs by the gate's
    derivative = slope * by_x - slope * (1 - by_cosine) * plain.sin()
    (derivative**2).sum().backward()
    expected = sum(u.grad.square().sum((0, 1)) for u in (joint, by_x, by_cosine)).reshape(1, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac = KFAC(model, kl_clip=None, loss_reduction="sum", terms=lambda: 1)
        (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (found**2).sum().backward()
        kfac.step()
    assert_close(squares(kfac), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
def test_in_a_compiled_model_each_product_counts_alone():
    torch._dynamo.reset()
    x, model = numbers(5, 2, 4), double(Gate)
    expected = squares_of_rows(model, x, lambda x, p, q: p * x + (1 - q) * x.cos())
    kfac = KFAC(model, kl_clip=None, loss_reduction="sum")
    loss_of(torch.compile(model, backend="aot_eager", fullgraph=True)(x), "sum").backward()
    kfac.step()
    assert_close(squares(kfac), expected)


def test_products_are_not_kept_alive():
    products, alive = [], []

    class Many(Gate):
        def gated(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                product = self.mu * x
                products.append(weakref.ref(product))
                x = product + 1
                del product
            alive.append(sum(product() is not None for product in products))
            return x

    model = double(Many)
    kfac = KFAC(model)
    y = model(numbers(3, 4))
    assert alive == [0]
    y.sum().backward()
    kfac.step()
    assert squares(kfac).min() > 0
