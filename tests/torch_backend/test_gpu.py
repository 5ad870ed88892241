"""On a GPU, or a simulated one: the trajectory of the CPU, and a host that does not wait."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.core import _torch_inverses, linalg
from suite.torch import KFAC, LRA, AdaptiveKFAC, Kron, replace_recurrent
from torch_backend.accelerator import DEVICE, SIMULATED, host_must_not_wait, is_available
from torch_backend.models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_available, reason="needs a GPU")]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(54, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3)),
    ).double()


def trajectory(make: Any, device: str, batch: int = 32, steps: int = 12) -> list[torch.Tensor]:
    model = network().to(device)
    optimizer = make(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(batch, 1, 8, 8, generator=generator, dtype=torch.float64).to(device)
        y = torch.randint(3, (batch,), generator=generator).to(device)

        def loss(x: torch.Tensor = x, y: torch.Tensor = y, model: nn.Module = model) -> Any:
            return F.cross_entropy(model(x), y)

        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def kfac(**settings: Any) -> Any:
    settings = {"damping": 0.03, "inv_update_steps": 3, **settings}
    return lambda m: KFAC(m, torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9), **settings)


CASES = {
    "eigen": kfac(),
    "inverse": kfac(compute_method="inverse"),
    "newton_schulz": kfac(compute_method="newton_schulz"),
    "ekfac": kfac(compute_method="ekfac"),
    "mc": kfac(fisher="mc", likelihood="categorical"),
    "type-2": kfac(fisher="type-2", likelihood="categorical"),
    "kl_clip": kfac(kl_clip=1e-3),
    "Kron": lambda m: Kron(m.parameters(), lr=0.01),
    "Kron, EQ": lambda m: Kron(m.parameters(), lr=0.01, geometry="EQ"),
    "Kron, blocks": lambda m: Kron(m.parameters(), lr=0.01, block_size=8),
    "LRA": lambda m: LRA(m.parameters(), lr=0.01),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trajectory_is_the_cpus(name):
    # EKFAC measures in eigenvectors, of which those of a null space are anyone's choice: have none.
    batch = 240 if name == "ekfac" else 32
    expected = trajectory(CASES[name], "cpu", batch)
    found = trajectory(CASES[name], DEVICE, batch)
    start = [p.detach() for p in network().parameters()]
    for a, b, c in zip(found, expected, start, strict=True):
        assert float((a - b).norm()) < 1e-8 * float(b.norm() + c.norm())
    assert any(
        float((b - c).norm()) > 1e-2 * float(c.norm()) for b, c in zip(expected, start, strict=True)
    )


def test_adaptive_kfac_takes_the_cpus_steps():
    """With running statistics and dropout of a share that leaves all as it is."""

    def train(device: str) -> tuple[list[torch.Tensor], float]:
        model = nn.Sequential(network(), nn.Dropout(0.0)).to(device)
        optimizer = AdaptiveKFAC(KFAC(model, damping=0.3, compute_method="inverse", inv_update_steps=3))
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            x = torch.randn(64, 1, 8, 8, generator=generator, dtype=torch.float64).to(device)
            y = (x[:, 0, :3].sum((1, 2)) > 0).long()

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
                outputs = model(x)
                return F.cross_entropy(outputs, y), outputs

            optimizer.step(closure)
        state = [*model.parameters(), *model.buffers()]
        return [x.detach().cpu().double() for x in state], optimizer.damping

    (expected, damping), (found, theirs) = train("cpu"), train(DEVICE)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm()) < 1e-8 * float(b.norm() + 1)
    assert theirs == damping != 0.3
    assert float((expected[0] - network()[0].weight.detach()).norm()) > 1e-2


@pytest.mark.parametrize("place", ["cpu", DEVICE])
@pytest.mark.parametrize("name", ["eigen", "inverse", "ekfac", "mc", "Kron", "LRA"])
def test_a_checkpoint_is_loaded_from_the_host_or_the_device(name, place):
    def train(model: nn.Module, optimizer: Any, batches: range) -> torch.Tensor:
        for number in batches:
            torch.manual_seed(number)
            x, y = torch.randn(32, 1, 8, 8, dtype=torch.float64), torch.randint(3, (32,))
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()
        return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])

    model, again = network().to(DEVICE), network().to(DEVICE)
    optimizer = CASES[name](model)
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    expected = train(model, optimizer, range(4, 8))
    file.seek(0)
    weights, state = torch.load(file, map_location=place, weights_only=True)
    again.load_state_dict(weights)
    resumed = CASES[name](again)
    resumed.load_state_dict(state)
    found = train(again, resumed, range(4, 8))  # a GPU's sums have an order of their own in every run
    assert float((found - expected).norm()) < 1e-10 * float(expected.norm())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["inverse", "Kron"])
def test_a_step_that_is_not_finite_changes_nothing(name, poison, recwarn):
    model = network().to(DEVICE)
    optimizer = CASES[name](model)
    x = torch.randn(32, 1, 8, 8, dtype=torch.float64, device=DEVICE)
    for step in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == 2:
            next(model.parameters()).grad.view(-1)[0] = poison
            before = copy.deepcopy(model.state_dict())
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


@pytest.mark.parametrize("clip", ["default", None, 1.0, (1.0, 2.0)])
@pytest.mark.parametrize("update", [0.01, 1.0])
def test_kron_stays_where_it_starts_until_a_step_is_finite(update, clip):
    """Before any evidence, with factors due and not."""
    settings = {} if clip == "default" else {"clip": clip}
    model = network().to(DEVICE).float()
    kron = Kron(model.parameters(), lr=0.01, preconditioner_update_probability=update, **settings)
    start = [p.detach().clone() for p in model.parameters()]
    for step in range(6):
        x = torch.randn(32, 1, 8, 8, device=DEVICE)
        kron.zero_grad()
        model(x).square().mean().backward()
        if step < 3:
            for p in model.parameters():
                p.grad.view(-1)[0] = float("nan")
        kron.step()
        moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True)]
        assert all(moved) if step >= 3 else not any(moved)
    assert kron.skipped_steps == 3
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1.0, 1e30])
def test_a_root_mean_square_is_that_of_numbers_of_any_size(size):
    x = (torch.randn(3, 40, 50, generator=torch.Generator().manual_seed(0)) * size).to(DEVICE)
    found = linalg.root_mean_square(x, (-2, -1))
    exact = np.sqrt((x.cpu().double().numpy() ** 2).mean((-2, -1), keepdims=True))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.cpu().numpy(), exact, rtol=1e-5)


def test_kron_of_parameters_on_several_devices():
    trajectories = []
    for devices in (("cpu", "cpu"), (DEVICE, "cpu"), ("cpu", DEVICE)):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(4, 4, dtype=torch.float64).to(d)) for d in devices]
        kron = Kron(parameters, lr=0.1, weight_decay=0.1)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(4, 4, dtype=torch.float64).to(p.device)
            kron.step()
        trajectories.append([p.detach().cpu() for p in parameters])
    for found in trajectories[1:]:
        for a, b in zip(found, trajectories[0], strict=True):
            assert float((a - b).norm()) < 1e-8 * float(b.norm())


@contextmanager
def tf32() -> Iterator[None]:
    """With it allowed, as users of half precision have it."""
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("n", [40, 300, 769])
def test_inverses_are_of_full_precision_where_others_products_are_not(n):
    random = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64)).Q
    x = (basis * torch.logspace(0, -4, n, dtype=torch.float64)) @ basis.mT
    exact = torch.linalg.inv(x)
    given = x.float().expand(2, n, n).to(DEVICE)
    with tf32():
        inverse = linalg.damped_inverse(given, 0.0)
        iterated = linalg.newton_schulz_inverse(given, 0.0, torch.zeros_like(given), 30)
    for found in (inverse, iterated):
        assert float((found[1].cpu().double() - exact).norm()) < 2e-3 * float(exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverses_of_matrices_of_one_number(dtype):
    numbers = [2.0, 1e-30, 3e38, 0.0, -0.0, -1.0, float("nan"), float("inf")]
    found, factored = _torch_inverses.inverses(
        torch.tensor(numbers, dtype=dtype, device=DEVICE)[:, None, None]
    )
    assert factored.tolist() == [True, True, True, False, False, False, False, True]
    expected = [1 / x for x in numbers[:3]]
    np.testing.assert_allclose(found[:3].flatten().tolist(), expected, rtol=1e-6)


FUSED = {
    "eigen": {},
    "inverse": {"compute_method": "inverse"},
    "statistics every 4": {"compute_method": "inverse", "factor_update_steps": 4},
    "newton_schulz": {"compute_method": "newton_schulz"},
    "ekfac": {"compute_method": "ekfac"},
    "packed": {"compute_method": "inverse", "packed_factors": True},
    "no kl_clip": {"kl_clip": None},
    "mc": {"fisher": "mc", "likelihood": "categorical"},
    "rows": {"compute_method": "inverse", "max_rows": 8},
    "examples": {"compute_method": "inverse", "max_examples": 8},
    "reduce": {"compute_method": "inverse", "weight_sharing": "reduce"},
    "diagonal": {"compute_method": "inverse", "max_factor_size": 8},
}
KRON = {
    "default": {},
    "dense": {"block_size": 4096},
    "QEQ": {"geometry": "QEQ"},
    "weight decay": {"weight_decay": 0.1},
    "packed": {"packed_factors": True},
    "bfloat16": {"precond_dtype": torch.bfloat16},
}


def steps_without_waiting(optimizer: Any, model: nn.Module, every: int, autocast: bool = False) -> None:
    """Twelve of them, of which the host may wait in each that is a multiple of `every`."""
    for step in range(12):
        x, y = torch.randn(32, 1, 8, 8, device=DEVICE), torch.randint(3, (32,), device=DEVICE)
        with host_must_not_wait(step % every > 0):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", KRON)
def test_krons_host_does_not_wait(name, autocast):
    model = network().to(DEVICE).float()
    kron = Kron(model.parameters(), lr=0.01, **KRON[name])
    steps_without_waiting(kron, model, 12, autocast)


def test_lras_host_does_not_wait():
    model = network().to(DEVICE).float()
    steps_without_waiting(LRA(model.parameters(), lr=0.01), model, 12)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_kfacs_host_waits_only_for_new_inverses(name, autocast):
    model = network().to(DEVICE).float()
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    kfac = KFAC(model, base, damping=0.1, inv_update_steps=4, **FUSED[name])
    steps_without_waiting(kfac, model, 4, autocast)


@pytest.mark.parametrize("tensor", [True, False])
def test_kl_clip_takes_rates_to_the_device_without_waiting(tensor):
    rates = (torch.full((), 0.1, device=DEVICE) if tensor else 0.1, 0.2)
    model = network().to(DEVICE).float()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "lr": rates[0]}, {"params": parameters[3:], "lr": rates[1]}]
    kfac = KFAC(model, torch.optim.SGD(groups, momentum=0.9, fused=True), inv_update_steps=4)
    steps_without_waiting(kfac, model, 4)


def make_inverse(model: nn.Module) -> Any:
    base = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    return KFAC(model, base, damping=0.03, compute_method="inverse", inv_update_steps=3)


def make_kron(model: nn.Module) -> Any:
    return Kron(model.parameters(), lr=0.01)


@pytest.mark.parametrize("make", [make_inverse, make_kron])
@pytest.mark.parametrize(
    "name", ["resnet20", "vit", "unet", "conformer", "mlp_mixer", "lstm_lm", "pinn"]
)
def test_models_follow_the_cpus_trajectory_and_do_not_wait(name, make):
    found = {}
    for device in ("cpu", DEVICE):
        model, batch, loss = MODELS[name](0)
        model = (replace_recurrent(model) if name == "lstm_lm" else model).double().to(device)
        batch = [x.to(device, torch.float64 if x.is_floating_point() else x.dtype) for x in batch]
        start = [p.detach().cpu().clone() for p in model.parameters()]
        optimizer = make(model)
        for step in range(6):
            with host_must_not_wait(device == DEVICE and step % 3 > 0):
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
        found[device] = [p.detach().cpu() for p in model.parameters()]
    for a, b, c in zip(found[DEVICE], found["cpu"], start, strict=True):
        assert float((a - b).norm()) < 1e-8 * float(b.norm() + c.norm())
    moved = [not torch.equal(b, c) for b, c in zip(found["cpu"], start, strict=True)]
    assert sum(moved) > 0.9 * len(moved)


@pytest.fixture
def _parameters_stay_themselves():
    """`model.to(device)` then is as to CUDA, also to a simulated device."""
    torch.__future__.set_swap_module_params_on_conversion(SIMULATED)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_parameters_stay_themselves")
@pytest.mark.parametrize("name", ["Kron", "Kron, blocks", "LRA"])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("state_is_moved", [False, True])
def test_a_model_may_be_moved_after_its_optimizer_was_made(name, after, state_is_moved):
    ends = []
    for moves in (True, False):
        model = network()
        optimizer = CASES[name](model)
        generator = torch.Generator().manual_seed(1)
        for step in range(5):
            if moves and step == after:
                parameters = [*model.parameters()]
                model.zero_grad()
                model.to(DEVICE)
                assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
                for record in optimizer.state.values() if state_is_moved else ():
                    record |= {key: x.to(DEVICE) for key, x in record.items()}
            device = next(model.parameters()).device
            x = torch.randn(16, 1, 8, 8, generator=generator, dtype=torch.float64).to(device)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        state = [x for record in optimizer.state.values() for x in record.values()]
        assert {x.device.type for x in state} == {DEVICE if moves else "cpu"}
        ends.append([p.detach().cpu() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("_parameters_stay_themselves")
def test_kfac_says_that_a_model_is_moved_first():
    model = network()
    kfac = CASES["inverse"](model)
    model.to(DEVICE)
    with pytest.raises(
        RuntimeError, match=f"layer '0' must run .* on cpu, got {DEVICE}.*move the model"
    ):
        model(torch.randn(4, 1, 8, 8, dtype=torch.float64, device=DEVICE))
    kfac.detach()


@pytest.mark.parametrize("used", [False, True])
def test_a_grad_scaler_that_kfac_was_not_given_is_warned_of(used, recwarn):
    """In the first step; one that has scaled nothing yet is nobody's."""
    scaler = torch.amp.GradScaler("cpu")
    if used:
        scaler.scale(torch.ones(()))
    for given in (scaler, None):
        model = nn.Linear(3, 2).to(DEVICE)
        kfac = KFAC(model, grad_scaler=given and (lambda: 1.0))
        for _ in range(2):
            model(torch.ones(4, 3, device=DEVICE)).square().sum().backward()
            kfac.step()
        said = [str(w.message) for w in recwarn if "a GradScaler is in use" in str(w.message)]
        assert len(said) == (used and given is None)
        kfac.detach()
