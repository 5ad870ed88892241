"""The contenders' hyperparameters, and how they were found.

Each contender got the same budget: five learning rates times five values of one more hyperparameter that
matters to it, for each problem. `CHOSEN` has the combination with the lowest loss of the whole training
set after `STEPS` steps, averaged over `TUNING_SEEDS`; none lies at the edge of its grid. The demo's own
seed is another one. All results are in `tuning.json`, which `tune_demo.py` writes. Tuning ran in PyTorch
only, for JAX follows the same path, as the demo's last lines show.

`FIXED` was not tuned. Every learning rate falls to zero along half a cosine, weight decay is decoupled.
K-FAC keeps its default `kl_clip`: without a bound the empirical Fisher it estimates, which shrinks with
the loss, makes ever longer steps. K-FAC's and Kron's costly updates are not made in every step.
"""

from __future__ import annotations

import itertools
from typing import Any

STEPS = 300
TUNING_SEEDS = (101, 102, 103)

NAMES = {"adamw": "AdamW", "kfac": "K-FAC", "kron": "Kron"}

GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "adamw": {"lr": (0.002, 0.005, 0.012, 0.03, 0.08), "b2": (0.7, 0.8, 0.9, 0.99, 0.999)},
    "kfac": {"lr": (0.03, 0.08, 0.2, 0.5, 1.2), "damping": (0.0003, 0.001, 0.003, 0.01, 0.03)},
    "kron": {"lr": (0.002, 0.005, 0.012, 0.03, 0.08), "preconditioner_lr": (0.1, 0.3, 0.5, 0.7, 0.9)},
}

FIXED: dict[str, dict[str, Any]] = {
    "adamw": {"b1": 0.9, "weight_decay": 1e-4},
    "kfac": {
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "kl_clip": 0.001,
        "factor_update_steps": 5,
        "inv_update_steps": 10,
        "compute_method": "inverse",
    },
    "kron": {"b1": 0.9, "weight_decay": 1e-4, "preconditioner_update_probability": 0.5},
}

CHOSEN: dict[str, dict[str, dict[str, float]]] = {
    "autoencoder": {
        "adamw": {"lr": 0.005, "b2": 0.9},
        "kfac": {"lr": 0.5, "damping": 0.01},
        "kron": {"lr": 0.005, "preconditioner_lr": 0.7},
    },
    "convnet": {
        "adamw": {"lr": 0.03, "b2": 0.9},
        "kfac": {"lr": 0.08, "damping": 0.001},
        "kron": {"lr": 0.012, "preconditioner_lr": 0.3},
    },
}


def grid(optimizer: str) -> list[dict[str, float]]:
    """All combinations that tuning tries."""
    names, values = zip(*GRIDS[optimizer].items(), strict=True)
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def settings(problem: str, optimizer: str) -> dict[str, Any]:
    """What a contender runs with."""
    return {**FIXED[optimizer], **CHOSEN[problem][optimizer]}
