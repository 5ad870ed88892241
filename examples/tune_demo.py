"""Tune the demo's contenders again, as `contenders.py` says, and write `tuning.json`.

A few hundred short runs in PyTorch; about ten minutes on two cores with `--jobs 2`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import warnings
from pathlib import Path
from typing import Any

from tqdm import tqdm

import contenders
import digits
from digits_torch import Session, surroundings

OUTPUT = Path(__file__).with_name("tuning.json")

Trial = tuple[str, str, dict[str, float], int]  # problem, optimizer, point of the grid, seed


def final_loss(trial: Trial) -> float:
    """The loss of the whole training set after one run; inf if the run diverged."""
    problem, optimizer, point, seed = trial
    data = digits.load()
    with surroundings(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step .* was skipped", RuntimeWarning)
        settings = {**contenders.FIXED[optimizer], **point}
        session = Session(problem, optimizer, settings, seed, contenders.STEPS)
        for batch in digits.minibatches(seed, contenders.STEPS):
            if not math.isfinite(session.step(data.train_x[batch], data.train_y[batch])):
                return math.inf
        loss, _ = session.evaluate(data.train_x, data.train_y)
    return loss if math.isfinite(loss) else math.inf


def main(argv: list[str] | None = None) -> int:
    """Run all trials, write them down, and say whether `contenders.py` has the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes to run trials in (default: 1)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the file to write")
    arguments = parser.parse_args(argv)
    trials: list[Trial] = [
        (problem, optimizer, point, seed)
        for problem in digits.PROBLEMS
        for optimizer in contenders.GRIDS
        for point in contenders.grid(optimizer)
        for seed in contenders.TUNING_SEEDS
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        losses = list(tqdm(pool.imap(final_loss, trials), total=len(trials), unit="run", smoothing=0))

    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    places = len(contenders.TUNING_SEEDS)
    for place in range(0, len(trials), places):
        problem, optimizer, point, _ = trials[place]
        of_seeds = losses[place : place + places]
        row = {**point, "losses": of_seeds, "mean": sum(of_seeds) / places}
        results.setdefault(problem, {}).setdefault(optimizer, []).append(row)
    agrees = True
    for problem, of_problem in results.items():
        for optimizer, rows in of_problem.items():
            best = min(rows, key=lambda row: row["mean"])
            point = {name: best[name] for name in contenders.GRIDS[optimizer]}
            same = point == contenders.CHOSEN[problem][optimizer]
            agrees &= same
            edges = [
                n for n, grid in contenders.GRIDS[optimizer].items() if point[n] in (grid[0], grid[-1])
            ]
            print(
                f"{problem:11}  {optimizer:5}  mean final loss {best['mean']:.4g}  {point}"
                f"{'' if same else '  NOT the choice in contenders.py'}"
                f"{'  at the edge of the grid: ' + ', '.join(edges) if edges else ''}"
            )
    record = {"steps": contenders.STEPS, "seeds": contenders.TUNING_SEEDS, "fixed": contenders.FIXED}
    text = json.dumps(_plain({**record, "results": results}), indent=1, allow_nan=False)
    arguments.output.write_text(text + "\n")
    return 0 if agrees else 1


def _plain(value: Any) -> Any:
    """JSON has no infinity: null is a run that diverged."""
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
