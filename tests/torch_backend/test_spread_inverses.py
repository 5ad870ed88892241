"""Inverses of some layers in every step: in its turn a layer gets what a refresh of all gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from suite.core.turns import plan_turns
from suite.torch import KFAC

PERIOD = 4
METHODS: dict[str, dict[str, Any]] = {
    "inverse": {"compute_method": "inverse"},
    "packed": {"compute_method": "inverse", "packed_factors": True},
    "newton_schulz": {"compute_method": "newton_schulz"},
    "eigen": {},
    "outer product": {"compute_eigenvalue_outer_product": True},
    "ekfac": {"compute_method": "ekfac"},
    "kfac_pytorch": {"factor_scaling": "kfac_pytorch", "compute_method": "inverse"},
}


class Heads(nn.Module):
    """Layers of several sizes; two heads share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        )
        self.policy, self.value = nn.Linear(8, 5), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return torch.cat([self.policy(x), self.value(x)], dim=-1)


NAMES = ("body.0", "body.2", "body.4", "policy", "value")
GROUPS = (("body.0",), ("body.2",), ("body.4",), ("policy", "value"))  # of layers that share an A
COSTS = (7**3 + 8**3, 9**3 + 8**3, 9**3 + 8**3, 9**3 + 5**3 + 1)


def standing(lr: float = 0.0, **settings: Any) -> tuple[nn.Module, KFAC]:
    """A model; with lr 0 one that does not move, so that all runs have the same factors."""
    torch.manual_seed(0)
    model = Heads().double()
    base = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {"damping": 0.01, "kl_clip": None, "factor_decay": 0.7, **settings}
    return model, KFAC(model, base, **settings)


def run(model: nn.Module, kfac: KFAC, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    kfac.zero_grad()
    model(x).square().sum(-1).mean().backward()
    kfac.step()


def inverses(kfac: KFAC) -> dict[str, dict[str, torch.Tensor]]:
    kinds = ("inverse", "values", "vectors")
    layers = kfac.state_dict()["kfac"]["layers"]
    return {n: {k: x for k, x in r.items() if k.endswith(kinds)} for n, r in layers.items()}


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_a_layer_has_the_inverses_of_its_turn_until_its_next(settings):
    model, spread = standing(spread_inverses=True, inv_update_steps=PERIOD, **settings)
    turn_of = {
        name: turn
        for names, turn in zip(GROUPS, plan_turns(COSTS, PERIOD), strict=True)
        for name in names
    }
    assert sorted(set(turn_of.values())) == [0, 1, 2, 3]
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for step in range(3 * PERIOD):
        run(model, spread, step)
        now = inverses(spread)
        fresh = inverses(refreshed_at(step, settings))
        for name in NAMES:
            if step == 0 or turn_of[name] == step % PERIOD:  # the first time it is everyone's turn
                expected[name] = fresh[name]
            for kind, tensor in expected[name].items():
                torch.testing.assert_close(now[name][kind], tensor, rtol=1e-10, atol=1e-12)
    for name in NAMES:  # a test that could fail: they change from turn to turn
        assert any((now[name][k] - x).abs().max() > 1e-6 for k, x in first(settings)[name].items())


def refreshed_at(step: int, settings: dict[str, Any]) -> KFAC:
    """All inverses computed in this one step, of factors that have averaged since the first."""
    if settings.get("compute_method") == "ekfac":  # has eigen's bases, but not in every step
        settings = {}
    model, kfac = standing(inv_update_steps=step or 2, **settings)
    for k in range(step + 1):
        run(model, kfac, k)
    return kfac


def first(settings: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    return inverses(refreshed_at(0, settings))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "ekfac"])  # needs longer ones
def test_a_cycle_of_one_step_is_a_refresh_of_all(name):
    settings, parameters = METHODS[name], []
    for spread in (False, True):
        model, kfac = standing(lr=0.1, spread_inverses=spread, inv_update_steps=1, **settings)
        for step in range(5):
            run(model, kfac, step)
        parameters.append([p.detach() for p in model.parameters()])
    for a, b in zip(*parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_saved_state_does_not_change_with_later_turns():
    model, kfac = standing(spread_inverses=True, inv_update_steps=PERIOD, compute_method="inverse")
    run(model, kfac, 0)
    saved = inverses(kfac)
    copies = {n: {k: x.clone() for k, x in r.items()} for n, r in saved.items()}
    for step in range(1, PERIOD + 1):
        run(model, kfac, step)
    for name, record in copies.items():
        for kind, tensor in record.items():
            assert torch.equal(saved[name][kind], tensor)
            assert not torch.equal(inverses(kfac)[name][kind], tensor)


def test_it_takes_true_or_false():
    with pytest.raises(TypeError, match=r"^spread_inverses must be True or False, got 1$"):
        standing(spread_inverses=1)
