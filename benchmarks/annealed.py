"""The loss at the end of a cosine schedule: what the rate of Kron's fit makes of a whole training.

    OMP_NUM_THREADS=1 python benchmarks/annealed.py [--problems digits ...] [--contenders ...] \
        [--seeds 3] [--json FILE]

The race's problems in PyTorch, each for its whole budget of steps, the learning rate annealed from one
of the problem's grid to zero. Of each contender the rate with the lowest mean of final losses over all
seeds counts; '(edge)' marks one at the edge. In one process, seed by seed, with one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import race_torch
from options import whole, writable
from race_grids import KRON_VARIANTS
from race_problems import PROBLEMS, Problem
from suite.torch import Kron

FIRST_SEED = 200


def contenders() -> dict[str, Callable[[Any, float], torch.optim.Optimizer]]:
    def kron(**settings: Any) -> Callable[[Any, float], torch.optim.Optimizer]:
        return lambda parameters, lr: Kron(parameters, lr, **settings)

    rates = {name: kron(**given) for name, given in KRON_VARIANTS.items() if "rate" in name}
    return {
        "AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=0.0),
        "Kron": kron(),
        **rates,
    }


def final_loss(name: str, problem: Problem, make: Any, lr: float, seed: int) -> float:
    torch.manual_seed(seed)
    run = race_torch.STARTS[name](seed)
    optimizer = make(run.model.parameters(), lr)
    for step in range(problem.budget):
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / problem.budget)) / 2
        run.draw()()[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = run.evaluate().item()
    return loss if math.isfinite(loss) else math.inf


def race(name: str, problem: Problem, chosen: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    losses = {
        label: {
            f"{lr:g}": [final_loss(name, problem, make, lr, seed) for seed in seeds]
            for lr in problem.rates
        }
        for label, make in chosen.items()
    }
    found: dict[str, Any] = {}
    for label, by_rate in losses.items():
        best = min(by_rate, key=lambda lr: statistics.fmean(by_rate[lr]))
        edge = best in (f"{problem.rates[0]:g}", f"{problem.rates[-1]:g}")
        found[label] = {"lr": float(best), "edge": edge, "loss": statistics.fmean(by_rate[best])}
    return {
        "about": problem.about,
        "steps": problem.budget,
        "seeds": seeds,
        "contenders": found,
        "losses": {
            label: {lr: [x if math.isfinite(x) else None for x in row] for lr, row in by_rate.items()}
            for label, by_rate in losses.items()
        },
    }


def table(reports: dict[str, Any]) -> str:
    """Final losses, problems beside each other."""
    names = list(dict.fromkeys(label for report in reports.values() for label in report["contenders"]))
    lines = [f"| | {' | '.join(reports)} |", f"|{'---|' * (len(reports) + 1)}"]
    for label in names:
        cells = []
        for report in reports.values():
            one = report["contenders"].get(label)
            edge = " (edge)" if one and one["edge"] else ""
            cells.append(f"{one['loss']:.3g} at {one['lr']:g}{edge}" if one else "")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", nargs="+", choices=race_torch.STARTS, default=list(race_torch.STARTS)
    )
    parser.add_argument("--contenders", nargs="+", choices=contenders(), default=list(contenders()))
    parser.add_argument("--seeds", type=whole, default=3)
    parser.add_argument("--budget", type=whole, help="steps, instead of each problem's own number")
    parser.add_argument("--json", type=writable)
    arguments = parser.parse_args(argv)
    record: dict[str, Any] = {
        "command": shlex.join(["annealed.py", *(sys.argv[1:] if argv is None else argv)]),
        "versions": race_torch.prepare(),
        "problems": {},
    }
    chosen = {label: make for label, make in contenders().items() if label in arguments.contenders}
    seeds = list(range(FIRST_SEED, FIRST_SEED + arguments.seeds))
    for name in arguments.problems:
        problem = PROBLEMS[name]
        if arguments.budget:
            problem = problem._replace(budget=arguments.budget)
        record["problems"][name] = race(name, problem, chosen, seeds)
        print(table({name: record["problems"][name]}), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
