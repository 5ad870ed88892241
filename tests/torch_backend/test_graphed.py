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
from torch_backend.graphed_cases import (
    LR,
    an_interrupt_while_recording_leaves_nothing,
    batches,
    graphs,  # noqa: F401 (a fixture)
    network,
)
from torch_backend.models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_available, reason="needs a GPU")]


def made(model: nn.Module, base: Any = None, **settings: Any) -> KFAC:
    base = base or torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=True)
    settings = {"damping": 0.03, "compute_method": "inverse", "inv_update_steps": 5, **settings}
    return KFAC(model, base, **settings)


def as_ever(kfac: KFAC, loss_of: Any, *batch: Any) -> torch.Tensor:
    kfac.zero_grad()
    loss = loss_of(*batch)
    loss.backward()
    kfac.step()
    return loss.detach()


def compared(
    given: list[Any],
    make: Any = made,
    change: Any = lambda i, kfac: None,
    take: Any = None,
    **options: Any,
) -> GraphedStep:
    """Both trajectories, with `change(i, kfac)` before each step; the recorded one's.

    Args:
        take: (model, x, y) -> loss.
    """
    ends, seen, graphed = [], [], None
    for recorded in (False, True):
        model = network(**options)
        kfac = make(model)

        def loss_of(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(x), y) if take is None else take(model, x, y)

        graphed = GraphedStep(kfac, loss_of) if recorded else None
        own = []
        for i, batch in enumerate(given):
            change(i, kfac)
            loss = graphed(*batch) if graphed else as_ever(kfac, loss_of, *batch)
            clipped = kfac._engine.clipped_by()
            own.append([float(loss), kfac.steps, kfac.skipped_steps, kfac.counted_terms, clipped])
            own[-1] += kfac._overdue.waits
        seen.append(own)
        ends.append(([x.double().clone() for x in model.state_dict().values()], kfac.metrics()))
    (expected, theirs), (found, ours) = ends
    start = [x.double() for x in network(**options).state_dict().values()]
    torch.testing.assert_close(*map(torch.tensor, seen), rtol=1e-5, atol=1e-7, equal_nan=True)
    for a, b, c in zip(found, expected, start, strict=True):
        assert float((a - b).norm()) <= 1e-9 * float(b.norm() + c.norm())
    assert any(
        float((b - c).norm()) > 1e-2 * float(c.norm()) for b, c in zip(expected, start, strict=True)
    )
    assert ours["steps_since_refresh"] == theirs["steps_since_refresh"]
    for name, layer in theirs["layers"].items():
        for key in ("condition_A", "condition_G"):
            if layer[key] < 1e8:  # else it is of roundings
                assert ours["layers"][name][key] == pytest.approx(layer[key], rel=1e-5)
    assert graphed is not None
    return graphed


def new_kinds(graphed: GraphedStep) -> int:
    return sum(count for why, count in graphed.as_ever.items() if "new (" in why or "first" in why)


SETTINGS = {
    "inverse": {},
    "eigen": {"compute_method": "eigen"},
    "ekfac": {"compute_method": "ekfac"},
    "newton_schulz": {"compute_method": "newton_schulz"},
    "outer product": {"compute_method": "eigen", "compute_eigenvalue_outer_product": True},
    "packed": {"packed_factors": True},
    "inverses in every step": {"inv_update_steps": 1},
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
    # Steps with new inverses and others, of three settings.
    assert new_kinds(graphed) == 2 * 3
    assert graphed.replayed == 40 - sum(graphed.as_ever.values()) > 20


def test_a_rate_on_the_device_is_read_there():
    def make(model: nn.Module) -> KFAC:
        rate = torch.full((), LR, device=DEVICE)
        return made(model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True))

    def change(i: int, kfac: KFAC) -> None:
        kfac.param_groups[0]["lr"].fill_(LR * 2.0 ** -(i % 3))

    assert compared(batches(18), make, change).replayed > 9


@pytest.mark.filterwarnings("ignore:these layers have gradients and were not seen:RuntimeWarning")
def test_what_a_step_depends_on_makes_kinds():
    """Sizes of batches, modes of modules, and what is frozen."""

    def change(i: int, kfac: KFAC) -> None:
        kfac.model[1].train(i < 20)
        kfac.model[0].weight.requires_grad_(i < 30)

    graphed = compared(batches(42, (32, 32, 20)), change=change)
    assert new_kinds(graphed) == 2 * 2 * 3
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


def fails(kfac: KFAC, once: bool) -> None:
    """Give a factor an eigenvalue that is below zero with its damping, and above it with 0.001 more.

    Args:
        once: else it is far below zero.
    """
    factors = kfac._engine.factors
    number = next(i for i, f in enumerate(factors.factors) if f.average.ndim == 3)
    average, weight = factors.factors[number].average, factors.factors[number].weight
    average[0] = torch.eye(len(average[0]), dtype=average.dtype, device=DEVICE) * weight[0]
    for _ in range(50):  # the damping depends on the mean of all eigenvalues
        share = factors._dampings(kfac.damping, factors._groups())[number][0]
        mean = average[0].diagonal().mean() / weight[0]
        average[0, 0, 0] = -(share + (5e-4 if once else 0.1) * mean) * weight[0]


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.filterwarnings("ignore:factorizations failed, also with more damping:RuntimeWarning")
def test_factorizations_that_fail_are_tried_again_after_the_step(once):
    ends, retries, failures = [], [], []
    for recorded in (False, True):
        model = network()
        kfac = made(model, factor_update_steps=100)

        def loss_of(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(x), y)

        step = GraphedStep(kfac, loss_of)
        for i, batch in enumerate(batches(17)):
            if i == 15:
                fails(kfac, once)
                was = step.replayed
            _ = step(*batch) if recorded else as_ever(kfac, loss_of, *batch)
            if i == 15:
                ends.append([factor.inverse.clone() for factor in kfac._engine.factors.factors])
                assert step.replayed == was + recorded
        retries.append(kfac.metrics()["retries"])
        failures.append([factor.failures.tolist() for factor in kfac._engine.factors.factors])
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert retries == [int(once)] * 2
    assert failures[0] == failures[1]
    assert sum(map(sum, failures[0])) == 1 - once
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
    file = io.BytesIO()

    def change(i: int, kfac: KFAC) -> None:
        if i == 13:
            file.seek(0)
            torch.save((kfac.model.state_dict(), kfac.state_dict()), file)
        if i == 22:
            file.seek(0)
            weights, state = torch.load(file, weights_only=True)
            kfac.model.load_state_dict(weights)
            kfac.load_state_dict(state)

    graphed = compared(batches(30), change=change)
    assert graphed.optimizer.steps == 13 + 8
    assert graphed.replayed > 12


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
    assert new_kinds(graphed) == 2 * 4


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


@pytest.mark.parametrize("waits", [True, False])
def test_what_cannot_be_recorded_runs_as_ever_with_a_warning(waits):
    host = torch.ones(3, dtype=torch.float64)

    def take(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if waits:
            return F.cross_entropy(model(x), y) * (2.0 if float(x.sum()) > 1e9 else 1.0)
        return F.cross_entropy(model(x), y, weight=host.to(DEVICE, non_blocking=True))

    reason = "make the host wait" if waits else "cannot be recorded .*"
    with pytest.warns(RuntimeWarning, match=f"run as ever: that {reason}") as caught:
        graphed = compared(batches(14), take=take)
    assert graphed.replayed == 0
    assert len(caught) == 1


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


# ---- odd loops ---------------------------------------------------------------------------------


def plain_step(i: int, kfac: KFAC) -> None:
    model: Any = kfac.model
    as_ever(kfac, lambda x, y: F.cross_entropy(model(x), y), *batches(i + 1)[i])


@pytest.mark.parametrize("method", ["inverse", "ekfac"])
def test_steps_of_the_optimizer_itself_come_in_between(method):
    """Also those that compute inverses."""

    def change(i: int, kfac: KFAC) -> None:
        if i in (11, 12, 13, 14, 15, 22):
            plain_step(i, kfac)

    given = batches(34, (240,) if method == "ekfac" else (32,))
    graphed = compared(given, lambda model: made(model, compute_method=method), change)
    assert graphed.replayed > 12


def test_two_of_one_optimizer_take_turns():
    ends = []
    for recorded in (False, True):
        model = network()
        kfac = made(model)

        def loss_of(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return F.cross_entropy(model(x), y)

        steps = [GraphedStep(kfac, loss_of) for _ in range(2)]
        for i, batch in enumerate(batches(60)):
            if recorded:
                steps[i % 3 == 0](*batch)
            else:
                as_ever(kfac, loss_of, *batch)
        assert not recorded or min(step.replayed for step in steps) > 8
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        assert float((a - b).norm()) <= 1e-9 * float(b.norm())


@pytest.mark.parametrize("kind", ["backward", "error", "interrupt"])
def test_gradients_that_are_left_over_have_no_part(kind):
    """Of passes for other ends, and of steps that ended early."""

    class Early(KeyboardInterrupt if kind == "interrupt" else RuntimeError):
        pass

    ends = []
    for recorded in (False, True):
        model = network()
        kfac = made(model)
        now = {"raises": False}

        def loss_of(
            x: torch.Tensor, y: torch.Tensor, model: nn.Module = model, now: Any = now
        ) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            if now["raises"]:
                loss.backward(retain_graph=True)
                raise Early
            return loss

        step = GraphedStep(kfac, loss_of)
        for i, (x, y) in enumerate(batches(30)):
            if i in (3, 4, 8, 9, 17) and kind == "backward":
                loss_of(x * 2, y).backward()
            elif i in (3, 4, 8, 9, 17):  # of a new size: it is not replayed
                now["raises"] = True
                with pytest.raises(Early):
                    step(x[: 8 + i], y[: 8 + i]) if recorded else as_ever(kfac, loss_of, x, y)
                now["raises"] = False
            _ = step(x, y) if recorded else as_ever(kfac, loss_of, x, y)
        assert not recorded or step.replayed > 12
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        assert float((a - b).norm()) <= 1e-9 * float(b.norm())


def test_examples_are_chosen_anew_after_other_passes_of_the_same_step():
    def change(i: int, kfac: KFAC) -> None:
        model: Any = kfac.model
        if i in (2, 3, 4, 9, 14):
            x, y = batches(1)[0]
            F.cross_entropy(model(x), y).backward()
            kfac.zero_grad()

    graphed = compared(batches(24), lambda model: made(model, max_examples=8), change)
    assert graphed.replayed > 12


@pytest.mark.parametrize("step", [10, 15, 16])
@pytest.mark.filterwarnings("ignore:.*skipped:RuntimeWarning")
def test_steps_that_are_not_finite_are_the_same_steps(step):
    """Also those that new inverses are due in, and what comes after them."""
    given = batches(30)
    given[step] = (given[step][0] * torch.nan, given[step][1])

    def change(i: int, kfac: KFAC) -> None:
        if i == step + 1:  # running statistics are the model's own
            kfac.model[1].reset_running_stats()

    with pytest.warns(RuntimeWarning) as caught:
        graphed = compared(given, change=change)
    assert graphed.replayed > 15
    told = [str(one.message) for one in caught]
    assert len(told) == 2
    assert told[0] == told[1]


def test_what_waits_for_some_batches_is_recorded_for_others():
    def take(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        return loss * 2 if len(x) == 20 and float(loss.detach()) > 1e9 else loss

    with pytest.warns(RuntimeWarning, match="run as ever: that make the host wait"):
        graphed = compared(batches(40, (32, 20)), take=take)
    assert graphed.replayed > 10
    assert {kind.batch[1][0][0] for kind in graphed._recorded} == {32}


def test_parts_of_a_batch_that_are_no_tensors():
    """Plain values are told apart; in what else a batch is one cannot look."""

    class Batch:
        def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
            self.x, self.y = x, y

    model = network()
    kfac = made(model)

    def loss_of(batch: Any, flag: Any = None) -> torch.Tensor:
        if isinstance(batch, Batch):
            return F.cross_entropy(model(batch.x), batch.y)
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        return loss * 2 if flag is True else loss

    step = GraphedStep(kfac, loss_of)
    for x, y in batches(8):
        step(Batch(x, y))
    assert step.as_ever["of a batch with parts that are neither tensors nor plain values"] > 4
    x, y = batches(1)[0]
    losses = {}
    for flag in (1, 1, 1, True, 1, True, 1.0, True):
        before = float(loss_of({"x": x, "y": y}, flag).detach())
        losses[flag, type(flag)] = float(step({"x": x, "y": y}, flag)) == pytest.approx(before, rel=1e-6)
    assert all(losses.values())
    assert step.replayed >= 2


def test_a_buffer_whose_memory_is_another_is_seen():
    def change(i: int, kfac: KFAC) -> None:
        if i == 13:
            kfac.model[1].running_mean.data = kfac.model[1].running_mean.data.clone()

    assert compared(batches(24), change=change).replayed > 10


@pytest.mark.filterwarnings("ignore:K-FAC was detached:RuntimeWarning")
def test_without_hooks_nothing_is_recorded_any_more():
    def change(i: int, kfac: KFAC) -> None:
        if i == 12:
            kfac.detach()

    graphed = compared(batches(16), lambda model: made(model, inv_update_steps=9), change)
    assert graphed.as_ever["after detach()"] == 4


def test_an_interrupt_while_recording_leaves_nothing():
    an_interrupt_while_recording_leaves_nothing(made, lambda kfac: kfac._is_graphed, 16)


def test_periods_may_change():
    def change(i: int, kfac: KFAC) -> None:
        if i == 15:
            kfac.factor_update_steps = 8
        if i == 30:
            kfac.factor_update_steps, kfac.inv_update_steps = 2, 7

    assert compared(batches(45), change=change).replayed > 25


def test_terms_are_those_of_the_last_step_that_counted_them():
    settings = {"factor_update_steps": 4, "inv_update_steps": 8}
    graphed = compared(batches(40, (32, 32, 32, 20)), lambda model: made(model, **settings))
    assert graphed.replayed > 15


def test_what_is_around_a_step_is_no_part_of_what_is_recorded():
    model = network().float()
    kfac = made(model, damping=0.1)
    step = GraphedStep(kfac, lambda x, y: F.cross_entropy(model(x).float(), y))
    given = [(x.float(), y) for x, y in batches(20)]
    for batch in given[:8]:
        step(*batch)
    with torch.autocast(DEVICE, torch.bfloat16):
        step(*given[8])
    assert step.as_ever["with autocast around them, which belongs into loss_of"] == 1
    called = []
    hook = kfac.optimizer.register_step_post_hook(lambda *_: called.append(1))
    for batch in given[9:12]:
        step(*batch)
    assert len(called) == step.as_ever["with hooks on the optimizer's step"] == 3
    hook.remove()
    before = step.replayed
    step(*given[12])
    assert step.replayed == before + 1


def test_heads_may_take_turns():
    def take(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        features = model[:-2](x)
        return F.cross_entropy(features[:, :3] if len(x) == 20 else model[-2:](features), y)

    settings = {"factor_update_steps": 1, "inv_update_steps": 6}
    graphed = compared(batches(40, (32, 20)), lambda m: made(m, **settings), take=take)
    assert graphed.replayed > 20


@pytest.mark.parametrize(("same", "host"), [(True, False), (True, True), (False, False)])
def test_layers_that_share_an_input_by_the_same_tensor(same, host):
    """A step that is given another tensor for one of them has more factors from then on."""
    ends = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)]).double().to(DEVICE)
        kfac = made(model)

        def loss_of(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, model: Any = model) -> Any:
            return F.cross_entropy(model[2](torch.tanh(model[0](a) + model[1](b))), y)

        step = GraphedStep(kfac, loss_of)
        generator = torch.Generator().manual_seed(1)
        for i in range(24):
            a = torch.randn(16, 6, generator=generator, dtype=torch.float64).to(DEVICE)
            b = a if same or i < 12 else a.clone()
            y = torch.randint(3, (16,), generator=generator).to(DEVICE)
            own = a.cpu() if host else a
            _ = step(own, own if host else b, y) if recorded else as_ever(kfac, loss_of, a, b, y)
        assert not recorded or step.replayed > 6
        assert (len(kfac._engine.factors.input_of) == 1) == same
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        assert float((a - b).norm()) <= 1e-9 * float(b.norm())


def test_a_step_that_is_never_the_same_is_told_of():
    model = network()
    kfac = made(model)
    step = GraphedStep(kfac, lambda x, y: F.cross_entropy(model(x), y))
    message = "none of 50 steps could be replayed.*of a kind that is new .settings"
    x, y = batches(1)[0]

    def train() -> None:
        for i in range(60):
            kfac.param_groups[0]["momentum"] = 0.9 - i / 1000  # as OneCycleLR does
            step(x, y)

    with pytest.warns(RuntimeWarning, match=message) as caught:
        train()
    assert len(caught) == 1


def test_a_buffer_that_is_made_anew_is_told_of():
    model = network()
    kfac = made(model)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model[1].running_mean = model[1].running_mean * 0.5
        return F.cross_entropy(model(x), y)

    step = GraphedStep(kfac, loss_of)
    for batch in batches(12):
        step(*batch)
    assert step.replayed == 0
    assert step.as_ever["that are the first with parameters and state where they are"] >= 9


def test_groups_may_stand_still():
    def make(model: nn.Module) -> KFAC:
        parameters = list(model.parameters())
        groups = [{"params": parameters[:4], "lr": 0.0}, {"params": parameters[4:]}]
        return made(model, torch.optim.SGD(groups, lr=LR, momentum=0.9, fused=True))

    def change(i: int, kfac: KFAC) -> None:
        kfac.param_groups[1]["lr"] = 0.0 if 12 <= i < 15 else LR

    graphed = compared(batches(24), make, change)
    assert graphed.as_ever["with a learning rate of 0"] == 3
    assert graphed.replayed > 12


def test_kinds_that_have_not_come_for_long_make_room():
    def change(i: int, kfac: KFAC) -> None:
        kfac.damping = 0.03 * 1.1 ** (i // 11)

    graphed = compared(batches(120), change=change)
    assert len(graphed._recorded) == 16
    assert graphed.replayed > 60


def test_kinds_that_are_too_many_are_not_recorded_over_and_over():
    model = network()
    kfac = made(model, inv_update_steps=1000)
    recorded = []

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if kfac._is_graphed:
            recorded.append(len(x))
        return F.cross_entropy(model(x), y)

    step = GraphedStep(kfac, loss_of)
    x, y = batches(1, (40,))[0]
    for i in range(120):
        step(x[: 20 + i % 20], y[: 20 + i % 20])
    assert len(recorded) == len({*recorded}) == 16
    assert step.as_ever["of another kind than the 16 that are recorded"] > 8
    assert step.replayed > 40


def test_rates_are_of_single_precision_whatever_the_default_is():
    torch.set_default_dtype(torch.float64)
    try:
        assert compared(batches(14)).replayed > 6
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["damping", "kl_clip"])
def test_settings_that_are_tensors_are_not_recorded(name):
    settings = {name: torch.tensor(0.0625)}
    graphed = compared(batches(12), lambda model: made(model, compute_method="eigen", **settings))
    assert graphed.replayed == 0
    assert graphed.as_ever["with settings that are tensors"] > 6


def test_passes_of_another_network_keep_their_gradients():
    """A discriminator's, through which the loss goes: a recorded step must not write to these."""
    other = nn.Linear(3, 3, dtype=torch.float64, device=DEVICE)

    def take(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(other(model(x)), y)

    def change(i: int, kfac: KFAC) -> None:
        other.zero_grad()
        x, y = batches(1)[0]
        F.cross_entropy(other(kfac.model(x).detach()), y).backward()

    assert compared(batches(16), change=change, take=take).replayed > 8
