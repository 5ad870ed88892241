"""Solve Poisson's equation on the unit square with a physics-informed neural network, in float64.

    python train_pinn.py --optimizer kfac --output kfac.json
    python train_pinn.py --optimizer adamw --output adamw.json

    -Δu = 2 k² π² sin(k π x) sin(k π y) inside, u = 0 on the boundary

has the solution sin(k π x) sin(k π y), to which the network's relative L2 error is measured.
Raissi, Perdikaris & Karniadakis 2019 (doi:10.1016/j.jcp.2018.10.045).
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

import training

SETTINGS: dict[str, dict[str, float]] = {
    "kfac": {
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "damping": 1e-3,
        "kl_clip": 0.01,
        "factor_decay": 0.95,
        "factor_update_steps": 1,
        "inv_update_steps": 5,
    },
    "kron": {"lr": 3e-3, "b1": 0.9, "weight_decay": 0.0},
    "adamw": {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0},
}
Field = Callable[[torch.Tensor], torch.Tensor]  # (n, 2) points to (n, 1) values


def network(width: int, depth: int) -> nn.Sequential:
    """`depth` hidden layers with tanh, in float64: second derivatives lose many digits."""
    sides = [2, *[width] * depth]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sides):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1)).double()


def laplacian(field: Field, points: torch.Tensor) -> torch.Tensor:
    """(n, 1): ∂²u/∂x² + ∂²u/∂y² at the (n, 2) points, to be differentiated further."""
    points = points.detach().requires_grad_()
    # Points do not see each other, so the gradient of a sum holds the gradients of all points.
    (gradient,) = torch.autograd.grad(field(points).sum(), points, create_graph=True)
    second = [
        torch.autograd.grad(gradient[:, axis].sum(), points, create_graph=True)[0][:, axis : axis + 1]
        for axis in range(points.shape[1])
    ]
    return sum(second, torch.zeros_like(points[:, :1]))


def poisson_loss(
    field: Field, interior: torch.Tensor, boundary: torch.Tensor, frequency: int, weight: float
) -> torch.Tensor:
    """Mean squared residual, in units of its size at u = 0, and `weight` times that of the boundary."""
    scale = 2 * (frequency * math.pi) ** 2
    residual = laplacian(field, interior) / scale + solution(interior, frequency)
    return residual.square().mean() + weight * field(boundary).square().mean()


def solution(points: torch.Tensor, frequency: int) -> torch.Tensor:
    """(n, 1) values of sin(k π x) sin(k π y)."""
    return (frequency * math.pi * points).sin().prod(1, keepdim=True)


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
    problem.add_argument("--frequency", type=training.whole, default=2, help="k (default: 2)")
    problem.add_argument("--boundary-points", type=training.whole, default=128, help="default: 128")
    problem.add_argument("--boundary-weight", type=float, default=1.0, help="default: 1")
    problem.add_argument(
        "--steps-per-epoch", type=training.whole, default=100, help="each on new points (default: 100)"
    )
    problem.add_argument("--width", type=training.whole, default=32, help="default: 32")
    problem.add_argument("--depth", type=training.whole, default=3, help="hidden layers (default: 3)")
    problem.add_argument(
        "--fake-data", action="store_true", help="for the other scripts' sake: no effect"
    )
    options = training.parse(parser)
    if options.amp != "none":
        parser.error("--amp must be none: this needs float64")
    return options


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    model = network(options.width, options.depth)
    run = training.Run(options, model, options.steps_per_epoch * options.accumulate)

    def batches(epoch: int, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in range(start, run.batches):
            random = training.generator(options.seed, epoch, batch)
            yield draw_points(options.batch_size, options.boundary_points, random)

    def loss_of(points: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return poisson_loss(model, *points, options.frequency, options.boundary_weight)

    def evaluate() -> dict[str, float]:
        axis = torch.linspace(0, 1, 101, dtype=torch.float64, device=run.device)
        grid = torch.cartesian_prod(axis, axis)
        exact = solution(grid, options.frequency)
        return {"relative_l2_error": float((model(grid) - exact).norm() / exact.norm())}

    run.train(batches, loss_of, evaluate)
    print(f"relative L2 error to the solution: {run.log[-1]['relative_l2_error']:.3e}")


if __name__ == "__main__":
    main()
