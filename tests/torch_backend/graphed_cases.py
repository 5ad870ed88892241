"""What steps that are recorded are tried on, on a GPU or a simulated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import GraphedStep, recorders
from torch_backend.accelerator import DEVICE, SIMULATED
from torch_backend.simulated_graphs import SimulatedGraphs

LR = 0.0625  # a number of single precision, which a fused optimizer takes its rate in


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
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


def batches(count: int, sizes: tuple[int, ...] = (32,)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        n = sizes[i % len(sizes)]
        x = torch.randn(n, 1, 8, 8, generator=generator, dtype=torch.float64)
        found.append((x.to(DEVICE), torch.randint(3, (n,), generator=generator).to(DEVICE)))
    return found


def an_interrupt_while_recording_leaves_nothing(
    make: Callable[[nn.Module], Any], is_recorded: Callable[[Any], bool], count: int
) -> None:
    """The trajectory of `count` steps is that without it.

    Args:
        make: the optimizer of a model.
        is_recorded: whether its step is recorded now.
    """
    ends = []
    for interrupted in (False, True):
        model = network()
        optimizer = make(model)
        left = [interrupted]

        def loss_of(
            x: torch.Tensor,
            y: torch.Tensor,
            model: nn.Module = model,
            optimizer: Any = optimizer,
            left: list[bool] = left,
        ) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            if is_recorded(optimizer) and left[0]:
                left[0] = False
                loss.backward(retain_graph=True)
                raise KeyboardInterrupt
            return loss

        step = GraphedStep(optimizer, loss_of, model)
        for batch in batches(count):
            try:
                step(*batch)
            except KeyboardInterrupt:
                assert all(p.grad is None for p in model.parameters())
                step(*batch)
        assert left == [False]
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        assert float((a - b).norm()) <= 1e-9 * float(b.norm())
