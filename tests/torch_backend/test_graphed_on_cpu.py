"""`GraphedStep` where there are no graphs, and what it does not take."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import KFAC, GraphedStep, Kron


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def made(model: nn.Module, fused: bool = True, **settings: Any) -> KFAC:
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    return KFAC(model, base, inv_update_steps=3, **settings)


def test_steps_are_as_ever():
    model, other = network(), network()
    step = GraphedStep(made(model), lambda x, y: (F.cross_entropy(model(x), y), model(x)))
    kfac = made(other)
    for number in range(8):
        torch.manual_seed(number)
        x, y = torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))
        loss, outputs = step(x, y)
        assert not loss.requires_grad
        assert not outputs.requires_grad
        kfac.zero_grad()
        expected = F.cross_entropy(other(x), y)
        expected.backward()
        kfac.step()
        assert torch.equal(loss, expected)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert repr(step) == "GraphedStep(0 steps replayed, 8 on a device without graphs (cpu))"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fused": False}, r"must have a fused one inside.*got SGD"),
        ({"spread_inverses": True}, "spread_inverses must be False"),
        ({"fisher": "mc", "likelihood": "categorical"}, "fisher must be 'empirical'"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, "grad_scaler must be None"),
        ({"terms": lambda: 4.0}, "terms must be a number.*got function"),
        ({"terms": torch.tensor(4.0)}, "terms must be a number.*got Tensor"),
    ],
)
def test_what_needs_the_host_in_each_step_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GraphedStep(made(network(), **settings), lambda x: x.sum())


def test_a_preconditioner_alone_and_other_optimizers_are_refused():
    with pytest.raises(ValueError, match=r"must have a fused one inside.*got NoneType"):
        GraphedStep(KFAC(network()), lambda x: x.sum())
    kron: Any = Kron(network().parameters(), lr=0.1)
    no_function: Any = 3
    with pytest.raises(TypeError, match=r"loss_of must be a function of the batch, got 3"):
        GraphedStep(kron, no_function)
    with pytest.raises(TypeError, match=r"model must be what loss_of runs, got None"):
        GraphedStep(kron, lambda x: x.sum())
    other: Any = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"must be a suite.torch.KFAC or Kron, got SGD.*torch.compile"):
        GraphedStep(other, lambda x: x.sum())


@pytest.mark.parametrize("found", [None, 1.0, (1.0,)])
def test_what_is_no_loss_is_an_error(found):
    step = GraphedStep(made(network()), lambda: found)
    with pytest.raises(TypeError, match="must return a loss"):
        step()


def test_it_cannot_be_copied():
    """The copy's K-FAC would be of another model than its loss."""
    step = GraphedStep(made(network()), lambda x: x.sum())
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(step)


def test_a_batch_is_data():
    model = network()
    step = GraphedStep(made(model), lambda x: model(x).sum())
    with pytest.raises(ValueError, match="batch must be of data"):
        step(nn.Linear(6, 6).double()(torch.zeros(4, 6, dtype=torch.float64)))


def test_gradients_go_to_the_models_parameters_alone():
    """As of a discriminator, whose own step would find them."""
    model, other = network(), nn.Linear(3, 1).double()
    step = GraphedStep(made(model), lambda x: other(model(x)).sum())
    x = torch.zeros(4, 6, dtype=torch.float64, requires_grad=True)
    before = copy.deepcopy(model.state_dict())
    step(x)
    assert x.grad is None
    assert all(p.grad is None for p in (*model.parameters(), *other.parameters()))
    assert not torch.equal(before["2.weight"], model[2].weight)


def test_a_loss_is_one_number():
    model = network()
    step = GraphedStep(made(model), lambda x: model(x))
    with pytest.raises(TypeError, match=r"must return a loss of shape \(\).*got \(4, 3\)"):
        step(torch.zeros(4, 6, dtype=torch.float64))
