"""What steps that are recorded are tried on, on a GPU or a simulated one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from suite.torch import recorders
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
