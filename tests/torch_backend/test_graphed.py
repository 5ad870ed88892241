"""Recorded steps of K-FAC, on a GPU or a simulated one: the trajectory of steps as ever."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import KFAC, GraphedStep, Kron, recorders
from torch_backend.accelerator import DEVICE, SIMULATED, host_must_not_wait, is_available
from torch_backend.models import MODELS
from torch_backend.simulated_graphs import SimulatedGraphs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_available, reason="needs a GPU")]
LR = 0.0625  # a number of single precision, which a fused optimizer takes its rate in


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    if SIMULATED:
        monkeypatch.setitem(recorders.RECORDERS, DEVICE, SimulatedGraphs)


def network(dropout: float = 0.0, unused: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout)),
        *(nn.Linear(54, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 3)),
    )
    if unused:
        model[9].unused = nn.Linear(12, 12)
    return model.double().to(DEVICE)


def made(model: nn.Module, base: Any = None, **settings: Any) -> KFAC:
    base = base or torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=True)
    settings = {"damping": 0.03, "compute_method": "inverse", "inv_update_steps": 5, **settings}
    return KFAC(model, base, **settings)


def batches(count: int, sizes: tuple[int, ...] = (32,)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        n = sizes[i % len(sizes)]
        x = torch.randn(n, 1, 8, 8, generator=generator, dtype=torch.float64)
        found.append((x.to(DEVICE), torch.randint(3, (n,), generator=generator).to(DEVICE)))
    return found


def as_ever(kfac: KFAC, loss_of: Any, *batch: Any) -> torch.Tensor:
    kfac.zero_grad()
    loss = loss_of(*batch)
    loss.backward()
    kfac.step()
    return loss.detach()


def compared(
    given: list[Any], make: Any = made, change: Any = lambda i, kfac: None, **options: Any
) -> GraphedStep:
    """Both trajectories, with `change(i, kfac)` before each step; the recorded one's."""
    ends, losses, graphed = [], [], None
    for recorded in (False, True):
        model = network(**options)
        kfac = make(model)

        def loss_of(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(x), y)

        graphed = GraphedStep(kfac, loss_of) if recorded else None
        own = []
        for i, batch in enumerate(given):
            change(i, kfac)
            loss = graphed(*batch) if graphed else as_ever(kfac, loss_of, *batch)
            own.append(float(loss))
        losses.append(own)
        numbers = kfac.steps, kfac.skipped_steps, kfac.counted_terms, kfac.metrics()
        ends.append(([x.detach().double() for x in model.state_dict().values()], numbers))
    (expected, theirs), (found, ours) = ends
    start = [x.double() for x in network(**options).state_dict().values()]
    for a, b, c in zip(found, expected, start, strict=True):
        assert float((a - b).norm()) <= 1e-9 * float(b.norm() + c.norm())
    assert any(
        float((b - c).norm()) > 1e-2 * float(c.norm()) for b, c in zip(expected, start, strict=True)
    )
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-8, atol=1e-10)
    assert ours[:3] == theirs[:3]
    assert ours[3]["kl_clip_coefficient"] == pytest.approx(theirs[3]["kl_clip_coefficient"], rel=1e-6)
    assert ours[3]["steps_since_refresh"] == theirs[3]["steps_since_refresh"]
    for name, layer in theirs[3]["layers"].items():
        of_ours = ours[3]["layers"][name]
        for key in ("condition_A", "condition_G"):
            if layer[key] < 1e8:  # else it is of roundings
                assert of_ours[key] == pytest.approx(layer[key], rel=1e-5)
    assert graphed is not None
    return graphed


SETTINGS = {
    "inverse": {},
    "eigen": {"compute_method": "eigen"},
    "ekfac": {"compute_method": "ekfac"},
    "newton_schulz": {"compute_method": "newton_schulz"},
    "outer product": {"compute_method": "eigen", "compute_eigenvalue_outer_product": True},
    "packed": {"packed_factors": True},
    "statistics every 3": {"factor_update_steps": 3, "inv_update_steps": 6},
    "no kl_clip": {"kl_clip": None},
    "small kl_clip": {"kl_clip": 1e-4},
    "rows": {"max_rows": 8},
    "examples": {"max_examples": 8},
    "terms": {"terms": 32.0},
    "sum": {"loss_reduction": "sum", "damping": 3.0},
    "kfac_pytorch": {"factor_scaling": "kfac_pytorch"},
    "diagonal": {"max_factor_size": 8},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_steps_are_the_same_steps(name):
    # EKFAC measures in eigenvectors, of which those of a null space are anyone's choice: have none.
    given = batches(24, (240,) if name == "ekfac" else (32,))
    graphed = compared(given, lambda model: made(model, **SETTINGS[name]))
    assert graphed.replayed >= 12
    assert sum(graphed.as_ever.values()) + graphed.replayed == 24
    method = SETTINGS[name].get("compute_method", "inverse")
    assert (graphed.as_ever["with new inverses"] > 0) == (method in ("eigen", "ekfac"))


@pytest.mark.parametrize("kind", ["Nesterov", "groups", *([] if SIMULATED else ["Adam"])])
def test_of_other_fused_optimizers(kind):
    def make(model: nn.Module) -> KFAC:
        parameters = list(model.parameters())
        if kind == "Adam":
            base: Any = torch.optim.AdamW(parameters, lr=2**-8, fused=True)
        elif kind == "Nesterov":
            base = torch.optim.SGD(parameters, lr=LR, momentum=0.9, nesterov=True, fused=True)
        else:
            groups = [
                {"params": parameters[:4], "lr": LR / 2},
                {"params": parameters[4:], "weight_decay": 0.1},
            ]
            base = torch.optim.SGD(groups, lr=LR, fused=True)
        return made(model, base)

    assert compared(batches(18), make).replayed > 9


def test_learning_rates_may_change_and_settings_too():
    def change(i: int, kfac: KFAC) -> None:
        for group in kfac.param_groups:
            group["lr"] = LR * 2.0 ** -(i % 4)
        if i == 20:
            kfac.damping = 0.3
        if i == 30:
            kfac.param_groups[0]["momentum"] = 0.5

    graphed = compared(batches(40), change=change)
    # Steps with new inverses and others, of three settings, and once before memory is as it stays.
    assert graphed.as_ever["of a kind that is new"] == 2 * 3 + 1
    assert graphed.replayed == 40 - sum(graphed.as_ever.values()) > 20


def test_a_rate_on_the_device_is_read_there():
    def make(model: nn.Module) -> KFAC:
        rate = torch.full((), LR, device=DEVICE)
        return made(model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True))

    def change(i: int, kfac: KFAC) -> None:
        kfac.param_groups[0]["lr"].fill_(LR * 2.0 ** -(i % 3))

    assert compared(batches(18), make, change).replayed > 9


def test_what_a_step_depends_on_makes_kinds():
    """Sizes of batches, modes of modules, and what is frozen."""

    def change(i: int, kfac: KFAC) -> None:
        kfac.model[1].train(i < 20)
        kfac.model[0].weight.requires_grad_(i < 30)

    graphed = compared(batches(42, (32, 32, 20)), change=change)
    assert graphed.as_ever["of a kind that is new"] == 2 * 2 * 3 + 1
    assert graphed.replayed > 20


def test_dropout_is_drawn_anew_in_each_step():
    model = network(0.5)
    kfac = made(model)
    seen = []

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        dropped = model[6](torch.ones(4, 50, device=DEVICE))
        return F.cross_entropy(model(x), y), dropped

    step = GraphedStep(kfac, loss_of)
    for batch in batches(18):
        before = step.replayed
        loss, dropped = step(*batch)
        assert loss.ndim == 0
        if step.replayed > before:
            seen.append(dropped.cpu())
    assert len(seen) > 8
    assert len({tuple(x.flatten().tolist()) for x in seen}) == len(seen)


def fails_once(kfac: KFAC) -> None:
    """Give a factor an eigenvalue that is below zero with its damping, and above it with 0.001 more."""
    factors = kfac._engine.factors
    number = next(i for i, f in enumerate(factors.factors) if f.average.ndim == 3)
    average, weight = factors.factors[number].average, factors.factors[number].weight
    average[0] = torch.eye(len(average[0]), dtype=average.dtype, device=DEVICE) * weight[0]
    for _ in range(50):  # the damping depends on the mean of all eigenvalues
        share = factors._dampings(kfac.damping, factors._groups())[number][0]
        mean = average[0].diagonal().mean() / weight[0]
        average[0, 0, 0] = -(share + 5e-4 * mean) * weight[0]


def test_factorizations_that_fail_are_tried_again_after_the_step():
    ends, retries = [], []
    for recorded in (False, True):
        model = network()
        kfac = made(model, factor_update_steps=100)

        def loss_of(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(x), y)

        step = GraphedStep(kfac, loss_of)
        for i, batch in enumerate(batches(17)):
            if i == 15:
                fails_once(kfac)
                was = step.replayed
            _ = step(*batch) if recorded else as_ever(kfac, loss_of, *batch)
            if i == 15:
                ends.append([factor.inverse.clone() for factor in kfac._engine.factors.factors])
                assert step.replayed == was + recorded
        retries.append(kfac.metrics()["retries"])
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert retries == [1, 1]
    for a, b in zip(*ends, strict=True):
        assert float((a - b).norm()) <= 1e-8 * float(b.norm())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_recorded_step_that_is_not_finite_changes_nothing(poison):
    model = network()
    kfac = made(model)
    step = GraphedStep(kfac, lambda x, y: F.cross_entropy(model(x), y))
    given = batches(14)
    for i, (x, y) in enumerate(given):
        if i == 8:
            before = copy.deepcopy(dict(model.named_parameters()))
            was = step.replayed
            step(torch.full_like(x, poison), y)
            assert step.replayed == was + 1
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
            assert kfac.skipped_steps == 1
            for module in model.modules():  # running statistics are the model's own
                if isinstance(module, nn.BatchNorm2d):
                    module.reset_running_stats()
            continue
        if i == 10:
            with pytest.warns(RuntimeWarning, match="1 of the steps before step 10 were skipped"):
                step(x, y)
            continue
        step(x, y)
    assert kfac.skipped_steps == 1
    assert kfac.steps == 14
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_checkpoint_may_be_loaded_in_between():
    given = batches(30)
    ends = []
    for recorded in (False, True):
        model = network()
        kfac = made(model)

        def loss_of(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(x), y)

        take = GraphedStep(kfac, loss_of) if recorded else None
        file = io.BytesIO()
        for i, batch in enumerate(given):
            if i == 13:
                torch.save((model.state_dict(), kfac.state_dict()), file)
            if i == 22:
                file.seek(0)
                weights, state = torch.load(file, weights_only=True)
                model.load_state_dict(weights)
                kfac.load_state_dict(state)
            _ = take(*batch) if take else as_ever(kfac, loss_of, *batch)
        ends.append([p.detach().clone() for p in model.parameters()])
        assert kfac.steps == 13 + 8
        assert take is None or take.replayed > 12
    for a, b in zip(*ends, strict=True):
        assert float((a - b).norm()) < 1e-9 * float(b.norm())


def test_tensors_that_take_the_place_of_others_are_seen():
    """Else a recorded step would go on with memory that is not in use any more."""

    def change(i: int, kfac: KFAC) -> None:
        if i == 12:
            for p in kfac.model.parameters():
                p.data = p.data.clone()
        if i == 23:
            for state in kfac.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].clone()
        if i == 33:
            kfac.model[1].running_mean = kfac.model[1].running_mean.clone()

    graphed = compared(batches(44), change=change)
    assert graphed.as_ever["of a kind that is new"] == 2 * 4 + 1


def test_layers_that_never_run_do_not_matter():
    assert compared(batches(24), unused=True).replayed > 12


@pytest.mark.parametrize("name", ["resnet20", "vit", "mlp_mixer", "pinn"])
def test_models_follow_the_trajectory_of_steps_as_ever_and_the_host_does_not_wait(name):
    ends = []
    for recorded in (False, True):
        model, batch, loss = MODELS[name](0)
        model = model.double().to(DEVICE)
        batch = [x.to(DEVICE, torch.float64 if x.is_floating_point() else x.dtype) for x in batch]
        kfac = made(model, inv_update_steps=4)
        start = [p.detach().clone() for p in model.parameters()]
        step = GraphedStep(kfac, lambda *b, model=model, loss=loss: loss(model, list(b)))
        for i in range(11):
            if recorded:
                with host_must_not_wait(i % 4 > 2):
                    step(*batch)
            else:
                as_ever(kfac, lambda *b, model=model, loss=loss: loss(model, list(b)), *batch)
        assert not recorded or step.replayed >= 6
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b, c in zip(*ends, start, strict=True):
        assert float((a - b).norm()) <= 1e-8 * float(b.norm() + c.norm())


def test_under_autocast():
    """Half precision of a step that is replayed is that of one as ever."""
    ends = []
    for recorded in (False, True):
        model = network().float()
        kfac = made(model, damping=0.1)

        def loss_of(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            with torch.autocast(DEVICE, torch.bfloat16):
                return F.cross_entropy(model(x).float(), y)

        step = GraphedStep(kfac, loss_of)
        for x, y in batches(18):
            _ = step(x.float(), y) if recorded else as_ever(kfac, loss_of, x.float(), y)
        assert not recorded or step.replayed > 9
        ends.append([p.detach().double() for p in model.parameters()])
    start = [p.detach().double() for p in network().parameters()]
    for a, b, c in zip(*ends, start, strict=True):
        assert float((a - b).norm()) <= 0.02 * float((b - c).norm()) + 1e-6


def test_batches_may_come_from_the_host():
    given = [(x.cpu(), y.cpu()) for x, y in batches(12)]
    model, other = network(), network()
    step = GraphedStep(made(model), lambda x, y: F.cross_entropy(model(x), y))
    kfac = made(other)
    for (x, y), (u, v) in zip(given, batches(12), strict=True):
        loss = step(x, y)
        assert loss.device.type == DEVICE
        as_ever(kfac, lambda x, y: F.cross_entropy(other(x), y), u, v)
    assert step.replayed > 5
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert float((p - q).detach().norm()) <= 1e-9


def test_what_cannot_be_recorded_is_an_error_that_changes_nothing():
    model = network()
    kfac = made(model)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        return loss * 2 if loss.item() > 1e6 else loss

    step = GraphedStep(kfac, loss_of)
    given = batches(5)
    for batch in given[:3]:
        step(*batch)
    before, numbers = copy.deepcopy(model.state_dict()), (kfac.steps, repr(kfac._overdue.waits))
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        step(*given[3])
    assert numbers == (kfac.steps, repr(kfac._overdue.waits)) == (3, numbers[1])
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert kfac.param_groups[0]["lr"] == LR
    as_ever(kfac, loss_of, *given[4])  # goes on as ever
    assert kfac.steps == 4


@pytest.mark.parametrize("kind", ["K-FAC", "Kron"])
def test_a_users_own_graph_of_a_step_is_refused(kind):
    """It would repeat one kind of step for good, in silence."""
    model = network()
    optimizer: Any = made(model) if kind == "K-FAC" else Kron(model.parameters(), lr=0.01)

    def body() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    recorder = recorders.RECORDERS[DEVICE](next(model.parameters()).device)
    x, y = batches(1)[0]
    for _ in range(3):
        recorder.run(body)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        recorder.record(body)
