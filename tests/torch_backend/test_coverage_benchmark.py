"""`benchmarks/torch_coverage.py` on models of known shares."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import torch_coverage
from torch_models import Case


class Rotated(nn.Module):
    """A layer, a shift, a matrix whose use K-FAC does not know, and a layer that does not run."""

    def __init__(self, rotates):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5)])
        self.shift, self.unused = nn.Parameter(torch.ones(5)), nn.Linear(2, 2)
        self.generators = nn.ParameterList(nn.Parameter(torch.zeros(5, 5)) for _ in range(2))
        self.rotates = rotates

    def forward(self, x):
        y = sum(layer(x) for layer in self.layers) + self.shift
        for generator in self.generators if self.rotates else ():
            y = y @ torch.linalg.matrix_exp(generator - generator.mT)
        return {"y": y, "shape": [y.mean(0), y.shape]}


class ZeroHead(nn.Sequential):
    def __init__(self):
        super().__init__(Rotated(True), nn.Linear(1, 1))
        nn.init.zeros_(self[1].weight)

    def forward(self, x):
        return self[1](self[0](x)["y"][:, :1])


def test_what_is_behind_a_head_of_zeros_counts():
    row = torch_coverage.measure("here", Case("Zero", ZeroHead, lambda: (torch.randn(6, 4),)))
    assert row.left[0].startswith("`*.generators.*` (50): ")


def row_of(rotates):
    case = Case("Rotated", lambda: Rotated(rotates), lambda: {"x": torch.randn(6, 4)})
    return torch_coverage.measure("here", case)


def test_shares_are_of_the_parameters_with_a_gradient():
    layers, shift, generators = 2 * 25, 5, 2 * 25
    row = row_of(rotates=True)
    assert row.parameters == layers + shift + generators + 6
    assert row.covered == pytest.approx((layers + shift) / (layers + shift + generators))
    assert row.factored == pytest.approx(layers / (layers + shift + generators))
    assert len(row.left) == 1
    assert row.left[0].startswith("`generators.*` (50): ")
    row = row_of(rotates=False)
    assert (row.covered, row.factored, row.left) == (1, pytest.approx(layers / (layers + shift)), ())


def test_the_report_counts_models_and_says_what_is_left():
    text = torch_coverage.report([row_of(True), row_of(False)], ["timm"], "a command")
    assert "| here | 2 | 1 | 0 | 1 |" in text
    assert "- here Rotated, 52.38% covered: `generators.*` (50): " in text
    assert "| here | Rotated | 111 | 100.00% | 90.91% |" in text
    assert "Not installed: timm." in text


def test_a_step_that_is_skipped_is_an_error():
    case = Case("Rotated", lambda: Rotated(False), lambda: (torch.full((6, 4), torch.nan),))
    with pytest.raises(RuntimeError, match="here's Rotated: its step was skipped"):
        torch_coverage.measure("here", case)
