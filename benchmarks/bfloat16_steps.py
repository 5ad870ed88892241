"""Steps to a target with factors in float32 and in bfloat16, at settings that the race has tuned.

    OMP_NUM_THREADS=1 python benchmarks/bfloat16_steps.py [--problems digits ...] [--json FILE]

Counts, no times: they do not depend on what else the machine does. Whether products with bfloat16
factors are in bfloat16, too, does depend on its processor, and is printed first.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from race_grids import versions
from race_torch import STARTS
from suite.core import linalg
from suite.torch import KFAC, Kron

# By problem: target, most steps, and what benchmarks/results/race.json found best for K-FAC and Kron.
TUNED: dict[str, tuple[float, int, dict[str, float], dict[str, float]]] = {
    "digits": (2.0, 800, {"kl_clip": 1e-3, "damping": 0.01}, {"lr": 0.003, "b1": 0.9}),
    "curves": (38.0, 400, {"kl_clip": 1.0, "damping": 1.0}, {"lr": 0.003, "b1": 0.9}),
    "characters": (2.2, 300, {"kl_clip": 1e-3, "damping": 0.01}, {"lr": 0.003, "b1": 0.8}),
    "xor": (0.1, 1000, {"lr": 0.009, "damping": 0.01}, {"lr": 0.01, "b1": 0.8}),
    "student 64": (0.6, 600, {"kl_clip": 1e-4, "damping": 0.01}, {"lr": 0.003, "b1": 0.9}),
}


def kfac(model: nn.Module, tuned: dict[str, float], dtype: torch.dtype | None) -> Any:
    settings: dict[str, Any] = dict(tuned)
    base = torch.optim.SGD(model.parameters(), settings.pop("lr", 0.1), momentum=0.9)
    return KFAC(model, base, compute_method="inverse", inv_update_steps=5, inv_dtype=dtype, **settings)


def kron(model: nn.Module, tuned: dict[str, float], dtype: torch.dtype | None) -> Any:
    settings: dict[str, Any] = dict(tuned)
    return Kron(model.parameters(), mu_dtype=dtype, precond_dtype=dtype, **settings)


def steps_to_target(name: str, make: Callable[[nn.Module], Any], seed: int) -> int | None:
    """Evaluated every ten steps; None: not reached."""
    target, most, *_ = TUNED[name]
    torch.manual_seed(seed)
    run = STARTS[name](seed)
    optimizer = make(run.model)
    for step in range(1, most + 1):
        run.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            with torch.no_grad():
                if run.evaluate().item() <= target:
                    return step
    return None


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=TUNED, default=list(TUNED))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    as_they_are = linalg.for_products(torch.ones(2, 2, dtype=torch.bfloat16))[0].dtype == torch.bfloat16
    print(f"products with bfloat16 factors in bfloat16: {as_they_are}", flush=True)
    found: dict[str, Any] = {
        "command": f"benchmarks/bfloat16_steps.py {' '.join(given or sys.argv[1:])}",
        "versions": versions("torch"),
        "products in bfloat16": as_they_are,
        "steps": {},
    }
    for name in arguments.problems:
        counts = found["steps"].setdefault(name, {})
        for method, make, tuned in (("K-FAC", kfac, TUNED[name][2]), ("Kron", kron, TUNED[name][3])):
            for label, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
                made = functools.partial(make, tuned=tuned, dtype=dtype)
                seeds = range(arguments.seeds)
                counts[f"{method}, {label}"] = [steps_to_target(name, made, seed) for seed in seeds]
                print(f"{name:12s}{method:6s}{label:9s}", counts[f"{method}, {label}"], flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
