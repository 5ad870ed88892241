"""A contender of the race: how a run of it begins, and the grid that it is tuned on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from race_problems import Problem
from suite.core.schedules import precond_lr_schedule, precond_update_prob_schedule

Grid = dict[str, tuple[float, ...]]  # five step lengths, three of something else


class Training(NamedTuple):
    """A run, before its first step."""

    draw: Callable[[int], Sequence[Any]]  # so many minibatches
    take: Callable[[Sequence[Any]], None]  # a step with each of these, and be done with them
    evaluate: Callable[[], float]  # what has to reach the target
    compile_seconds: float = 0.0  # wall clock; what compiled before the clock of steps starts


class Contender(NamedTuple):
    begin: Callable[..., Training]  # (seed, **hyperparameters)
    grid: Grid

    def points(self) -> list[dict[str, float]]:
        """All of the grid, from its centre outwards."""
        axes = [[(abs(i - len(v) // 2), x) for i, x in enumerate(v)] for v in self.grid.values()]
        order = sorted(itertools.product(*axes), key=lambda point: sum(far for far, _ in point))
        return [dict(zip(self.grid, (x for _, x in point), strict=True)) for point in order]

    def edges(self, point: dict[str, float]) -> list[str]:
        several = {name: values for name, values in self.grid.items() if len(values) > 1}
        return [name for name, values in several.items() if point[name] in (values[0], values[-1])]


def around(centre: float, factor: float, count: int) -> tuple[float, ...]:
    return tuple(float(f"{centre * factor**i:.3g}") for i in range(-(count // 2), count // 2 + 1))


# In every one of 20 steps, then ever more seldom down to every tenth.
_FALLING = precond_update_prob_schedule(flat_start=20, decay=0.02, min_prob=0.1)
# Kron's other structures and a cheaper geometry, raced when they are named.
KRON_VARIANTS: dict[str, dict[str, Any]] = {
    "Kron, QEQ": {"geometry": "QEQ"},
    "Kron, falling": {"preconditioner_update_probability": _FALLING},
    "Kron, falling, QEQ": {"preconditioner_update_probability": _FALLING, "geometry": "QEQ"},
    "Kron, constant rate": {"preconditioner_lr": 0.1},
    "Kron, rate to 0.1": {"preconditioner_lr": precond_lr_schedule(min_lr=0.1)},
    "Kron, rate to 0.03": {"preconditioner_lr": precond_lr_schedule(min_lr=0.03)},
    "Kron, own factors": {"shared_factors": False},
    "Kron, blocks of 256": {"block_size": 256},
    "Kron, blocks of 16": {"block_size": 16},
    "Kron, blocks of 16, own factors": {"block_size": 16, "shared_factors": False},
    "Kron, whole": {"partition_grads_into_blocks": False},
    "Kron, one_diag": {"memory_save_mode": "one_diag"},
}

DECAYS = (0.8, 0.9, 0.95)  # of momentum
SQUARES = (0.9, 0.99, 0.999)  # of Adam's second moments


def sgd_grid(problem: Problem) -> Grid:
    return {"lr": around(problem.sgd, 3, 5), "momentum": DECAYS}


def adam_grid(problem: Problem) -> Grid:
    return {"lr": problem.rates, "b2": SQUARES}


def kron_grid(problem: Problem) -> Grid:
    return {"lr": problem.rates, "b1": DECAYS}


def muon_grid(problem: Problem) -> Grid:
    """AdamW's rates: Muon's steps are scaled to the root mean square of AdamW's (arXiv:2502.16982)."""
    return {"lr": problem.rates, "momentum": DECAYS}


def kfac_grid(problem: Problem) -> Grid:
    name, centre = problem.kfac_step
    steps = around(centre, 10 if name == "kl_clip" else 3, 5)
    return {name: steps, "damping": around(problem.damping, 10, 3)}
