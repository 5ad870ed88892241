"""Statistics of layers under autocast from halves as they are, as on CUDA, are those of lifted ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.core import _torch
from suite.torch import KFAC

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "rows": {"max_rows": 40},
    "examples": {"max_examples": 4},
    "reduce": {"weight_sharing": "reduce"},
    "ekfac": {"compute_method": "ekfac", "inv_update_steps": 5},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, stride=1, padding=1, groups=2), nn.ConvTranspose2d(8, 4, 2, stride=2)),
        *(nn.Flatten(), nn.Linear(256, 16), nn.LayerNorm(16), nn.Linear(16, 3)),
    )


def statistics(model: nn.Module, dtype: torch.dtype, settings: Any) -> dict[Any, torch.Tensor]:
    """Of each layer, after two steps that move nothing."""
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    kfac = KFAC(model, base, **({"compute_method": "inverse"} | settings))
    torch.manual_seed(1)
    for _ in range(2):
        x, y = torch.randn(16, 3, 4, 4), torch.randint(3, (16,))
        with torch.autocast("cpu", dtype):
            logits = model(x)
        F.cross_entropy(logits.float(), y).backward()
        kfac.step()
        kfac.zero_grad()
    layers = kfac.state_dict()["kfac"]["layers"]
    names = ("A", "G", "products", "A_weight", "G_weight")
    return {(i, name): own[name] for i, own in layers.items() for name in names if name in own}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_halves_have_the_statistics_of_lifted_numbers(name, dtype, monkeypatch):
    model, asked = network(), []
    lifted = statistics(copy.deepcopy(model), dtype, SETTINGS[name])

    def products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert x.dtype == y.dtype == dtype
        asked.append(x.shape)
        return torch.bmm(x.float(), y.float())

    monkeypatch.setattr(_torch, "sums_in_single", lambda x: x.dtype == dtype)
    monkeypatch.setattr(_torch, "_half_products", products)
    halves = statistics(model, dtype, SETTINGS[name])
    assert bool(asked) != (name == "reduce")  # means of positions are not the numbers of a layer
    assert halves.keys() == lifted.keys()
    for key, found in halves.items():
        assert found.dtype == torch.float32
        # The first layer's input, and the last one's, are rounded as autocast rounds them.
        error = float((found - lifted[key]).norm() / lifted[key].norm())
        assert error < 2 * torch.finfo(dtype).eps, (key, error)
