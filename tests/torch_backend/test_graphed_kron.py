"""Recorded steps of Kron, on a GPU or a simulated one: the trajectory of steps as ever."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import GraphedStep, Kron
from torch_backend.accelerator import DEVICE, host_must_not_wait, is_available
from torch_backend.graphed_cases import (
    LR,
    an_interrupt_while_recording_leaves_nothing,
    batches,
    graphs,  # noqa: F401 (a fixture)
    network,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_available, reason="needs a GPU")]


def made(model: nn.Module, **settings: Any) -> Kron:
    settings = {"lr": LR / 4, "preconditioner_update_probability": 0.25, "block_size": 8, **settings}
    return Kron(model.parameters(), **settings)


def as_ever(kron: Kron, loss_of: Any, *batch: Any) -> torch.Tensor:
    kron.zero_grad()
    loss = loss_of(*batch)
    loss.backward()
    kron.step()
    return loss.detach()


def all_state(kron: Kron) -> list[torch.Tensor]:
    every = [x for engine in kron._engines for pack in engine.packs for x in pack if torch.is_tensor(x)]
    return every + [
        x for engine in kron._engines for pack in engine.packs for own in pack.kron for x in own
    ]


def compared(
    given: list[Any],
    make: Any = made,
    change: Any = lambda i, model, kron: None,
    take: Any = None,
    prepare: Any = lambda model: model,
    rtol: float = 1e-9,
) -> GraphedStep:
    """Both trajectories, with `change(i, model, kron)` before each step; the recorded one's.

    Args:
        take: (model, x, y) -> loss.
    """
    ends, seen, graphed = [], [], None
    for recorded in (False, True):
        model = prepare(network())
        kron = make(model)

        def loss_of(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(x), y) if take is None else take(model, x, y)

        graphed = GraphedStep(kron, loss_of, model) if recorded else None
        own = list[float]()
        for i, batch in enumerate(given):
            change(i, model, kron)
            loss = graphed(*batch) if graphed else as_ever(kron, loss_of, *batch)
            own += [float(loss), kron.skipped_steps]
            for group in kron.param_groups:
                own += [group["steps"], group["updates"], group["update_clock"]]
                own += [x for entry in group["behind"] for x in entry]
        seen.append(own)
        ends.append([x.double().clone() for x in (*model.state_dict().values(), *all_state(kron))])
    expected, found = ends
    start = [x.double() for x in prepare(network()).state_dict().values()]
    torch.testing.assert_close(*map(torch.tensor, seen), rtol=1e-5, atol=1e-7, equal_nan=True)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm()) <= rtol * float(b.norm())
    assert any(
        float((b - c).norm()) > 1e-2 * float(c.norm()) for b, c in zip(expected, start, strict=False)
    )
    assert graphed is not None
    return graphed


def new_kinds(graphed: GraphedStep) -> int:
    return sum(count for why, count in graphed.as_ever.items() if "new (" in why or "first" in why)


SETTINGS: dict[str, dict[str, Any]] = {
    "every factor in every step": {"preconditioner_update_probability": 1.0},
    "schedules": {"preconditioner_update_probability": None},
    "a constant rate": {"preconditioner_lr": 0.1},
    "EQ": {"geometry": "EQ"},
    "QUAD": {"geometry": "QUAD"},
    "PRO4P": {"geometry": "PRO4P"},
    "packed": {"geometry": "QUAD", "packed_factors": True},
    "P computed in every step": {"cache_preconditioner": False},
    "the gradient whitened": {"whiten": "gradient"},
    "the update after": {"update_first": False},
    "no clip": {"clip": None},
    "two clips": {"clip": (1.0, 2.0)},
    "normalized": {"normalize_grads": True},
    "decay": {"weight_decay": 0.1, "maximize": False},
    "scale from the gradient": {"preconditioner_init_scale": None},
    "rounded by chance": {"mu_dtype": torch.bfloat16, "stochastic_rounding": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_steps_are_the_same_steps(name):
    kinds = 1 if name in ("every factor in every step", "schedules") else 2
    graphed = compared(batches(20), lambda model: made(model, **SETTINGS[name]))
    assert sum(graphed.as_ever.values()) == new_kinds(graphed) == kinds
    assert graphed.replayed == 20 - new_kinds(graphed)


def test_rates_and_schedules_may_change_and_settings_too():
    def change(i: int, model: nn.Module, kron: Kron) -> None:
        kron.param_groups[0]["lr"] = LR / 4 * 0.9 ** (i % 5)
        if i == 12:
            kron.param_groups[0]["preconditioner_update_probability"] = 0.5
        if i == 16:
            kron.param_groups[0]["preconditioner_lr"] = 0.05
        if i == 20:
            kron.param_groups[0]["b1"] = 0.5
        if i == 28:
            kron.param_groups[0]["geometry"] = "QEQ"

    graphed = compared(batches(36), change=change)
    assert new_kinds(graphed) == 2 * 3
    assert graphed.replayed == 36 - 2 * 3


def test_a_rate_on_the_device_is_read_there():
    def make(model: nn.Module) -> Kron:
        return made(model, lr=torch.full((), LR / 4, device=DEVICE))

    def change(i: int, model: nn.Module, kron: Kron) -> None:
        kron.param_groups[0]["lr"].fill_(LR * 2.0 ** -(2 + i % 3))

    assert compared(batches(12), make, change).replayed == 10


def test_groups_have_schedules_of_their_own():
    def make(model: nn.Module) -> Kron:
        parameters = list(model.parameters())
        groups = [
            {"params": parameters[:4], "preconditioner_update_probability": 0.5, "lr": LR / 8},
            {"params": parameters[4:7], "whiten": "gradient", "b1": 0.8},
            {"params": parameters[7:], "weight_decay": 0.1, "preconditioner_update_probability": 1.0},
        ]
        return Kron(groups, lr=LR / 4, preconditioner_update_probability=0.25, block_size=8)

    graphed = compared(batches(20), make)
    assert new_kinds(graphed) == 3
    assert graphed.replayed == 17


def test_parameters_may_come_late_or_never_and_heads_may_take_turns():
    """Schedules count a parameter's own gradients."""

    def take(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        features = model[:-2](x)
        return F.cross_entropy(features[:, :3] if len(x) == 20 else model[-2:](features), y)

    def change(i: int, model: nn.Module, kron: Kron) -> None:
        model[0].weight.requires_grad_(i > 18)

    def with_unused(model: nn.Module) -> nn.Module:
        model[9].unused = nn.Linear(5, 7, dtype=torch.float64, device=DEVICE)
        torch.nn.init.ones_(model[9].unused.weight)
        torch.nn.init.ones_(model[9].unused.bias)
        return model

    graphed = compared(batches(60, (32, 32, 20)), change=change, take=take, prepare=with_unused)
    assert graphed.replayed > 25
    assert len(graphed.optimizer.param_groups[0]["behind"]) > 2


def test_a_recorded_step_that_is_not_finite_moves_nothing():
    given = batches(16)
    given[9] = (given[9][0] * torch.nan, given[9][1])
    given[12] = (given[12][0] * torch.inf, given[12][1])

    def change(i: int, model: nn.Module, kron: Kron) -> None:
        if i in (10, 13):  # running statistics are the model's own
            model[1].reset_running_stats()
            assert kron.skipped_steps == 1 + (i == 13)

    graphed = compared(given, change=change)
    assert graphed.replayed == 14
    assert graphed.optimizer.skipped_steps == 2


def test_other_steps_checkpoints_groups_and_state_come_in_between():
    file = io.BytesIO()
    more = []

    def change(i: int, model: nn.Module, kron: Kron) -> None:
        if i in (6, 7, 8):
            as_ever(kron, lambda x, y: F.cross_entropy(model(x), y), *batches(i)[-1])
        if i == 10:
            file.seek(0)
            torch.save((model.state_dict(), kron.state_dict()), file)
        if i == 17:
            file.seek(0)
            weights, state = torch.load(file, weights_only=True)
            model.load_state_dict(weights)
            kron.load_state_dict(state)
        if i == 24:
            for record in kron.state.values():
                for name in record:
                    record[name] = record[name].clone() * (0.5 if "momentum" in name else 1)
        if i == 30:
            del kron.state[model[0].weight]
        if i == 36:
            more.append(nn.Linear(3, 3, dtype=torch.float64, device=DEVICE))
            nn.init.eye_(more[-1].weight)
            model.more = more[-1]
            kron.add_param_group({"params": list(more[-1].parameters())})

    graphed = compared(batches(46), change=change)
    assert graphed.replayed > 32


def test_the_host_does_not_wait_for_a_replayed_step():
    model = network().float()
    kron = made(model)
    step = GraphedStep(kron, lambda x, y: F.cross_entropy(model(x), y), model)
    for i, (x, y) in enumerate(batches(12)):
        x = x.float()
        with host_must_not_wait(i > 8):
            step(x, y)
    assert step.replayed == 10


def test_in_single_precision_and_under_autocast():
    def take(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return F.cross_entropy(model(x.float()).float(), y)

    graphed = compared(batches(12), take=take, prepare=lambda model: model.float(), rtol=1e-5)
    assert graphed.replayed == 10


def test_rates_in_half_precision_are_those_of_steps_as_ever():
    def take(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x.bfloat16()).float(), y)

    def make(model: nn.Module) -> Kron:
        return made(model, lr=0.0173)  # which bfloat16 does not have

    graphed = compared(batches(12), make, take=take, prepare=lambda model: model.bfloat16(), rtol=1e-6)
    assert graphed.replayed == 10


def test_what_waits_runs_as_ever_with_a_warning():
    def take(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y) * (2.0 if float(x.sum()) > 1e9 else 1.0)

    with pytest.warns(RuntimeWarning, match="run as ever: that make the host wait") as caught:
        graphed = compared(batches(14), take=take)
    assert graphed.replayed == 0
    assert len(caught) == 1


def test_an_interrupt_while_recording_leaves_nothing():
    an_interrupt_while_recording_leaves_nothing(made, lambda kron: kron._recording is not None, 10)


def test_what_needs_the_host_is_an_error():
    model = network()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    with pytest.raises(ValueError, match="hvp must be None in recorded steps, got 'exact'"):
        GraphedStep(Kron(model.parameters(), hvp="exact"), loss_of, model)
    with pytest.raises(TypeError, match="model must be what loss_of runs, got None"):
        GraphedStep(made(model), loss_of)
    both: Any = [*model.parameters(), nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="must have all parameters on one device, got 2"):
        GraphedStep(Kron(both), loss_of, model)
    other: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="KFAC or Kron, got SGD"):
        GraphedStep(other, loss_of, model)
