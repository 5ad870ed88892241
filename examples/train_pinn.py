"""Solve Poisson's equation on the unit square with a physics-informed neural network, in float64.

    python train_pinn.py --optimizer kfac --output kfac.json
    python train_pinn.py --optimizer adamw --output adamw.json
    python train_pinn.py --optimizer adaptive --same-points --epochs 3

    -Δu = 2 k² π² sin(k π x) sin(k π y) inside, u = 0 on the boundary

has the solution sin(k π x) sin(k π y), to which the network's relative L2 error is measured.

The network carries u's derivatives forward, from layer to layer, beside u (Li et al. 2023,
arXiv:2307.08214). So they are inputs and outputs of its linear layers like u itself, and K-FAC takes
its statistics of all of them (Dangel, Müller & Zeinhofer 2024, arXiv:2405.15603). It does so, too, where
derivatives come from torch.autograd.grad(..., create_graph=True), but not from torch.func: those pass by
its statistics, which are of the plain calls then (the boundary), and it takes far more damping.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import training

SETTINGS: training.Settings = {
    "kfac": {
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "damping": 1e-3,
        "kl_clip": 1e-4,
        "factor_decay": 0.95,
        "factor_update_steps": 1,
        "inv_update_steps": 5,
        "compute_method": "inverse",
        "warmup": 0.0,
    },
    "adaptive": {
        "damping": 0.1,  # the first
        "factor_decay": 0.95,
        "factor_update_steps": 1,
        "inv_update_steps": 5,
        "compute_method": "inverse",
    },
    "kron": {"lr": 3e-3, "b1": 0.9, "weight_decay": 0.0, "warmup": 0.0},
    "adamw": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "warmup": 0.0},
    "sgd": {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.0, "warmup": 0.0},
}


class Network(nn.Module):
    """Hidden layers with tanh, for a function u of two variables and its Laplacian.

    A point is four rows for a layer: a value, its derivatives by x and by y, and its Laplacian. The bias
    is the weight of one more input, which is 1 in the first row and 0, its derivative, in the others.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sides = [2, *[width] * depth, 1]
        self.layers = nn.ModuleList(
            nn.Linear(before + 1, after, bias=False) for before, after in itertools.pairwise(sides)
        )
        self.double()  # second derivatives lose many digits

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """(n, 4): u, ∂u/∂x, ∂u/∂y and Δu at the (n, 2) points."""
        unit = torch.eye(2, dtype=points.dtype, device=points.device).expand(len(points), 2, 2)
        rows = torch.cat([points[:, None], unit, torch.zeros_like(points[:, None])], dim=1)
        one = torch.zeros_like(rows[:, :, :1])
        one[:, 0] = 1
        for layer in self.layers[:-1]:
            rows = tanh(layer(torch.cat([rows, one], dim=2)))
        return self.layers[-1](torch.cat([rows, one], dim=2)).squeeze(2)


def tanh(rows: torch.Tensor) -> torch.Tensor:
    """(n, 4, width) values and derivatives of functions to those of their tanh, by the chain rule."""
    value, gradient, laplacian = rows.split([1, 2, 1], dim=1)
    y = value.tanh()
    first = 1 - y * y
    second = -2 * y * first
    squares = gradient.square().sum(1, keepdim=True)
    return torch.cat([y, first * gradient, first * laplacian + second * squares], dim=1)


def solution(points: torch.Tensor, frequency: int) -> torch.Tensor:
    """(n,) values of sin(k π x) sin(k π y)."""
    return (frequency * math.pi * points).sin().prod(1)


def draw_points(
    interior: int, boundary: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(interior, 2) points of the unit square and (boundary, 2) of its boundary, evenly distributed."""
    inside = torch.rand(interior, 2, generator=random, dtype=torch.float64)
    outside = torch.rand(boundary, 2, generator=random, dtype=torch.float64)
    side = torch.randint(4, (boundary,), generator=random)
    outside[torch.arange(boundary), side % 2] = (side // 2).double()
    return inside, outside


def parse() -> argparse.Namespace:
    parser = training.parser(__doc__, SETTINGS, epochs=20, batch_size=256)
    problem = parser.add_argument_group("problem")
    problem.add_argument("--frequency", type=training.whole, default=1, help="k (default: 1)")
    problem.add_argument("--boundary-points", type=training.whole, default=128, help="default: 128")
    problem.add_argument("--boundary-weight", type=float, default=1.0, help="default: 1")
    problem.add_argument(
        "--steps-per-epoch", type=training.whole, default=100, help="each on new points (default: 100)"
    )
    problem.add_argument(
        "--same-points",
        action="store_true",
        help="the same points in every step, as adaptive wants it with fewer than about 1,000",
    )
    problem.add_argument("--width", type=training.whole, default=32, help="default: 32")
    problem.add_argument("--depth", type=training.whole, default=3, help="hidden layers (default: 3)")
    options = training.parse(parser)
    if options.amp != "none":
        parser.error("--amp must be none: this needs float64")
    return options


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    model = Network(options.width, options.depth)
    run = training.Run(options, model, options.steps_per_epoch * options.accumulate)
    scale = 2 * (options.frequency * math.pi) ** 2  # the right hand side is this times the solution

    def batches(epoch: int, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in range(start, run.batches):
            random = training.generator(options.seed, *(() if options.same_points else (epoch, batch)))
            yield draw_points(options.batch_size, options.boundary_points, random)

    def loss_of(points: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        inside, boundary = points
        u = model(torch.cat([inside, boundary]))
        residual = u[: len(inside), 3] / scale + solution(inside, options.frequency)
        around = u[len(inside) :, 0]
        loss = residual.square().mean() + options.boundary_weight * around.square().mean()
        return loss, (residual, around)

    def evaluate() -> dict[str, float]:
        axis = torch.linspace(0, 1, 101, dtype=torch.float64, device=run.device)
        grid = torch.cartesian_prod(axis, axis)
        exact = solution(grid, options.frequency)
        return {"relative_l2_error": float((model(grid)[:, 0] - exact).norm() / exact.norm())}

    run.train(batches, loss_of, evaluate)
    print(f"relative L2 error to the solution: {run.log[-1]['relative_l2_error']:.3e}")


if __name__ == "__main__":
    main()
