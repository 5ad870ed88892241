"""On CUDA alone: products of half precision that the device sums in single."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oracles import convolution_rows
from suite.torch import KFAC

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Halves(nn.Module):
    """Layers whose statistics are sums of products."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv2d(8, 16, 3, padding=1)
        self.apart = nn.Conv2d(16, 8, 3, stride=2, groups=2, bias=False)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.apart(F.relu(self.near(x))))
        return self.last(self.norm(x.permute(0, 2, 3, 1)))


GEOMETRIES = {"near": ((3, 3), (1, 1), ((1, 1),) * 2, (1, 1), 1)}
GEOMETRIES["apart"] = ((3, 3), (2, 2), ((0, 0),) * 2, (1, 1), 2)


def halves_loss(model: Any, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype):
        out = model(x)
    return out.float().square().sum(-1).mean() * 16


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_halves_are_those_of_their_numbers(dtype, compiled):
    torch.manual_seed(0)
    model = Halves().to("cuda")
    x, seen = torch.randn(64, 8, 13, 13, device="cuda"), dict[str, list[np.ndarray]]()

    def look(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        read = x.detach().to(y.dtype).double().cpu().numpy()  # as autocast has it
        y.register_hook(lambda g: seen.update({name: [read, g.double().cpu().numpy()]}))

    for name in ("near", "apart", "last"):
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda _, args, y, name=name: look(name, args[0], y))
    halves_loss(model, dtype, x).backward()
    model = Halves().to("cuda")
    torch.manual_seed(0)
    model.load_state_dict(Halves().state_dict())
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0), compute_method="inverse")
    halves_loss(torch.compile(model) if compiled else model, dtype, x).backward()
    kfac.step()
    found = kfac.state_dict()["kfac"]["layers"]
    for name, (a, g) in seen.items():
        if name in GEOMETRIES:
            geometry = GEOMETRIES[name]
            rows = np.stack(convolution_rows(a, *geometry))
            groups, channels = geometry[-1], g.shape[1] // geometry[-1]
            g = (
                g.reshape(len(g), groups, channels, -1)
                .transpose(1, 0, 3, 2)
                .reshape(groups, -1, channels)
            )
        else:
            rows, g = a.reshape(1, -1, a.shape[-1]), g.reshape(1, -1, g.shape[-1])
        if model.get_submodule(name).bias is not None:
            rows = np.concatenate([rows, np.ones((*rows.shape[:2], 1))], axis=-1)
        A = np.swapaxes(rows, 1, 2) @ rows / rows.shape[1]
        G = 64 * 6 * 6 * (np.swapaxes(g, 1, 2) @ g)
        # A compiled model rounds in other places.
        for side, exact in (("A", A), ("G", G)):
            sums, weight = (found[name][key].double().cpu().numpy() for key in (side, f"{side}_weight"))
            error = np.linalg.norm(sums / weight[:, None, None] - exact)
            assert error < (2e-2 if compiled else 2e-4) * np.linalg.norm(exact), (name, side)
