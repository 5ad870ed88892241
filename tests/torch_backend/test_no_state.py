"""What is no state of an optimizer is an error that says why, and nothing has changed then."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from conftest import same
from suite.torch import KFAC, LRA, AdaptiveKFAC, DenseNewton, Kron

DOORS = {
    "KFAC": lambda model: KFAC(model),
    "KFAC around SGD": lambda model: KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    "AdaptiveKFAC": lambda model: AdaptiveKFAC(KFAC(model, damping=0.1)),
    "Kron": lambda model: Kron(model.parameters()),
    "LRA": lambda model: LRA(model.parameters()),
    "DenseNewton": lambda model: DenseNewton(model.parameters(), hvp=None),
}
X = torch.linspace(-1, 1, 12).view(4, 3)


def trained(make):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model)

    def closure():
        y = model(X)
        return y.square().mean(), y

    for _ in range(2):
        if isinstance(optimizer, AdaptiveKFAC):
            optimizer.step(closure)
        else:
            optimizer.zero_grad()
            closure()[0].backward()
            optimizer.step()
    return model, optimizer


def refuses(optimizer, state, error, message):
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(state)
    assert same(optimizer.state_dict(), before)


@pytest.mark.parametrize("make", DOORS.values(), ids=DOORS)
def test_what_is_no_state_dict_is_an_error(make):
    _, optimizer = trained(make)
    for wrong in (None, 3, "state", [1]):
        refuses(optimizer, wrong, TypeError, "state_dict must be a dict, got")
    refuses(optimizer, {}, ValueError, r"state_dict must have .*, got (keys )?\[\]")


@pytest.mark.parametrize("name", DOORS)
def test_the_state_of_another_optimizer_is_an_error(name):
    _, optimizer = trained(DOORS[name])
    others = {other: trained(make)[1].state_dict() for other, make in DOORS.items() if other != name}
    for other in others.values():
        refuses(optimizer, other, ValueError, "must")


def changed(state, *path, value=None):
    """A copy with another value there; None: with none."""
    state = copy.deepcopy(state)
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if value is None:
        del place[path[-1]]
    return state


@pytest.mark.parametrize("name", ["Kron", "LRA", "DenseNewton"])
def test_a_setting_of_psgd_that_is_not_valid_is_an_error_at_loading(name):
    _, optimizer = trained(DOORS[name])
    state = optimizer.state_dict()
    for setting, value in {"lr": -1.0, "b1": 2.0, "damping": "x", "whiten": "m"}.items():
        wrong = changed(state, "param_groups", 0, setting, value=value)
        refuses(optimizer, wrong, (ValueError, TypeError), f"{setting} must be")


@pytest.mark.parametrize("name", ["KFAC", "KFAC around SGD"])
def test_a_record_of_kfac_that_is_not_valid_is_an_error_at_loading(name):
    _, optimizer = trained(DOORS[name])
    state = optimizer.state_dict()
    for count in ("steps", "skipped_steps", "draws"):
        wrong = changed(state, "kfac", count, value="x")
        refuses(optimizer, wrong, ValueError, f"{count} of the state_dict must be an integer, got 'x'")
    layer = next(iter(state["kfac"]["layers"]))
    wrong = changed(state, "kfac", "layers", layer, "A", value=3)
    refuses(optimizer, wrong, ValueError, "must have shape .* for A, got 3")


def test_an_unfinished_record_of_adaptive_kfac_is_an_error_at_loading():
    _, optimizer = trained(DOORS["AdaptiveKFAC"])
    state = optimizer.state_dict()
    refuses(optimizer, changed(state, "adaptive", "predicted"), ValueError, "must have 'predicted'")
    wrong = changed(state, "adaptive", "last_step", "weight", "before")
    refuses(optimizer, wrong, ValueError, "last_step must be of this model's parameters")
