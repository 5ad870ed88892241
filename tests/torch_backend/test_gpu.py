"""On a CUDA device: the trajectory of the CPU, and a host that does not wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import KFAC, LRA, Kron

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(54, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3)),
    ).double()


def trajectory(make: Any, device: str, steps: int = 12) -> list[torch.Tensor]:
    model = network().to(device)
    optimizer = make(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(32, 1, 8, 8, generator=generator, dtype=torch.float64).to(device)
        y = torch.randint(3, (32,), generator=generator).to(device)

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
    expected = trajectory(CASES[name], "cpu")
    found = trajectory(CASES[name], "cuda")
    start = [p.detach() for p in network().parameters()]
    for a, b, c in zip(found, expected, start, strict=True):
        assert float((a - b).norm()) < 1e-8 * float(b.norm() + c.norm())
    assert any(
        float((b - c).norm()) > 1e-2 * float(c.norm()) for b, c in zip(expected, start, strict=True)
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["inverse", "Kron"])
def test_a_step_that_is_not_finite_changes_nothing(name, poison, recwarn):
    model = network().cuda()
    optimizer = CASES[name](model)
    x = torch.randn(32, 1, 8, 8, dtype=torch.float64, device="cuda")
    for step in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == 2:
            next(model.parameters()).grad.view(-1)[0] = poison
            before = copy.deepcopy(model.state_dict())
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


def test_kron_of_parameters_on_several_devices():
    trajectories = []
    for devices in (("cpu", "cpu"), ("cuda", "cpu"), ("cpu", "cuda")):
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


def test_krons_host_does_not_wait():
    model = network().cuda().float()
    kron = Kron(model.parameters(), lr=0.01)
    x = torch.randn(32, 1, 8, 8, device="cuda")
    for step in range(6):
        kron.zero_grad()
        model(x).square().mean().backward()
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            kron.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("every", [1, 4])
def test_kfacs_host_waits_only_for_new_inverses(every):
    model = network().cuda().float()
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    kfac = KFAC(
        model, base, compute_method="inverse", damping=0.1, factor_update_steps=every, inv_update_steps=4
    )
    x = torch.randn(32, 1, 8, 8, device="cuda")
    for step in range(12):
        kfac.zero_grad()
        model(x).square().mean().backward()
        torch.cuda.set_sync_debug_mode("error" if step % 4 else "default")
        try:
            kfac.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
