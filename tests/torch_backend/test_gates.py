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
from suite.torch.gates import RECENT
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


def gradients_by_uses(model, x, combine):
    """Σ over rows of squared gradients by copies of mu, one for each row of each use."""
    uses = [model.mu.detach().expand(x.shape).clone().requires_grad_() for _ in range(3)]
    loss_of(model.head(torch.tanh(combine(x, *uses))), "sum").backward()
    return sum(u.grad.square().sum((0, 1)) for u in uses if u.grad is not None).reshape(1, -1)


@pytest.mark.parametrize(
    ("how", "combine"),
    [
        ("plain", lambda x, p, q, r: p * x + (1 - p) * x.cos()),
        ("used again", lambda x, p, q, r: p * x + (1 - p) * x.cos() + (q * x).sin()),
        ("added in a checkpoint", lambda x, p, q, r: p * x + (1 - q) * x.cos()),
        ("changed", lambda x, p, q, r: p * x + x.exp() + (1 - q) * x.cos()),
    ],
)
def test_a_sum_is_one_use_and_what_else_its_products_are_used_in_is_another(how, combine):
    x, model = numbers(5, 2, 4), double(lambda: Gate(how))
    expected = gradients_by_uses(model, x, combine)
    assert_close(squares(stepped(model, x, reduction="sum")), expected)


def test_checkpointed_parts_and_micro_batches_add_up():
    x, model = numbers(6, 2, 4), double(lambda: nn.Sequential(Gate()))
    expected = gradients_by_uses(model[0], x, lambda x, p, q, r: p * x + (1 - p) * x.cos())
    model.zero_grad()
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
    expected = gradients_by_uses(model, x, lambda x, p, q, r: p * x + (1 - q) * x.cos())
    model.zero_grad()
    kfac = KFAC(model, kl_clip=None, loss_reduction="sum")
    loss_of(torch.compile(model, backend="aot_eager", fullgraph=True)(x), "sum").backward()
    kfac.step()
    assert_close(squares(kfac), expected)


def test_only_the_latest_products_are_kept_alive():
    products, alive = [], []

    class Many(Gate):
        def gated(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3 * RECENT):
                product = self.mu * x
                products.append(weakref.ref(product))
                x = product + 1
                del product
            alive.append(sum(product() is not None for product in products))
            return x

    model = double(Many)
    kfac = KFAC(model)
    y = model(numbers(3, 4))
    assert alive == [RECENT]
    assert not any(product() is not None for product in products)
    y.sum().backward()
    kfac.step()
