"""K-FAC on whole models: it covers all of each, and trains it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import suite.torch
from suite.torch import KFAC
from torch_backend.models import MODELS, Case

CASES: dict[str, Callable[[int], Any]] = {
    **MODELS,
    "lstm_lm": partial(MODELS["lstm_lm"], rnn=suite.torch.LSTM),
}
# Parameters that may keep their plain gradient, by model. A new one needs a reason to be here.
PLAIN: dict[str, set[str]] = {}
FALL = 0.5  # what is left, at most, of the first five steps' mean loss in the last five of fifty
SETTINGS: dict[str, dict[str, float]] = {
    # The second derivatives in this loss pass by the statistics, which are too small then.
    "pinn": {"kl_clip": 1e-4},
}

cases = pytest.mark.parametrize("name", CASES)


def prepare(name: str, seed: int = 0, **settings: Any) -> tuple[KFAC, Case]:
    model, batch, loss_of = CASES[name](seed)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"factor_update_steps": 2, "inv_update_steps": 5, "damping": 0.01} | settings
    return KFAC(model, sgd, **settings, **SETTINGS.get(name, {})), (model, batch, loss_of)


def train(kfac: KFAC, case: Case, steps: int) -> list[float]:
    model, batch, loss_of = case
    losses = []
    for _ in range(steps):
        kfac.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        kfac.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    assert kfac.skipped_steps == 0
    assert kfac.steps == steps
    return losses


@cases
def test_every_parameter_is_listed_once_and_none_is_plain_in_silence(name):
    kfac, (model, _, _) = prepare(name)
    routes = list(kfac.routing())
    assert [route.parameter for route in routes] == [name for name, _ in model.named_parameters()]
    assert {route.treatment for route in routes} <= {"kfac", "plain"}
    plain = {route.parameter: route.reason for route in routes if route.treatment == "plain"}
    assert all(plain.values())
    assert set(plain) <= PLAIN.get(name, set()), plain


@cases
def test_the_first_step_goes_downhill_but_not_along_the_gradient_of_any_parameter(name):
    model, batch, loss_of = CASES[name](1)
    kfac = KFAC(model, kl_clip=None, damping=0.01)
    loss_of(model, batch).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    kfac.step()
    assert kfac.skipped_steps == 0
    slope = 0.0
    for parameter, gradient in before.items():
        direction = model.get_parameter(parameter).grad
        assert bool(direction.isfinite().all())
        assert bool(gradient.any()), parameter
        changed = not torch.allclose(direction, gradient, rtol=1e-3, atol=0.0)
        assert changed == kfac.routing()[parameter].preconditioned, parameter
        slope += float((direction * gradient).sum())
    assert slope > 0


@cases
def test_fifty_steps_lower_the_loss(name):
    losses = train(*prepare(name), 50)
    assert sum(losses[-5:]) < FALL * sum(losses[:5]), losses


def test_a_model_with_torchs_lstm_trains_and_says_that_it_is_not_covered():
    model, batch, loss_of = MODELS["lstm_lm"](0)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), damping=0.01)
    plain = {route.parameter for route in kfac.routing() if route.treatment == "plain"}
    assert plain == {f"rnn.{name}" for name, _ in nn.LSTM(16, 16, num_layers=2).named_parameters()}
    assert all("suite.torch.LSTM" in kfac.routing()[parameter].reason for parameter in plain)
    losses = train(kfac, (model, batch, loss_of), 50)
    assert sum(losses[-5:]) < FALL * sum(losses[:5]), losses
