"""Steps and seconds to a target loss: K-FAC and Kron against AdamW and SGD on small problems.

    OMP_NUM_THREADS=1 python benchmarks/race.py [--problems digits curves ...] \
        [--contenders AdamW Kron ...] [--peers] [--tuning-seeds 2] [--seeds 5] [--json FILE] \
        [--plot FILE]

`race_problems.py` has the problems and their targets, the same for all contenders. Every contender has
a grid of the same size, five step lengths a factor of about three apart times three values of one more
hyperparameter, and keeps its rate constant. The point that needs the fewest steps, in the worse of the
tuning seeds, is run again with other seeds: their medians are the result. There the contenders take
turns of ten steps each, in one process with one thread; seconds are process CPU seconds of forward,
backward and optimizer, without evaluations. '(edge)' marks a best value at the edge of its grid. A
K-FAC step is as long as the root of `kl_clip`, at lr 0.1, or lr where `kl_clip` does not bind: the
problem says which one the grid has. `--json` keeps those problems in the file that are not raced now.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from race_problems import PROBLEMS, Problem
from step_time import kron_torch_class
from suite.torch import KFAC, Kron
from table import race_table

FIRST_SEED = 100  # of those reported; tuning has 0, 1, ...


class Contender(NamedTuple):
    make: Callable[..., Any]  # (model, **hyperparameters) -> optimizer
    grid: dict[str, tuple[float, ...]]  # five step lengths, three of something else

    def points(self) -> list[dict[str, float]]:
        """All of the grid, from its centre outwards."""
        axes = [[(abs(i - len(v) // 2), x) for i, x in enumerate(v)] for v in self.grid.values()]
        order = sorted(itertools.product(*axes), key=lambda point: sum(far for far, _ in point))
        return [dict(zip(self.grid, (x for _, x in point), strict=True)) for point in order]

    def edges(self, point: dict[str, float]) -> list[str]:
        return [name for name, values in self.grid.items() if point[name] in (values[0], values[-1])]


def around(centre: float, factor: float, count: int) -> tuple[float, ...]:
    return tuple(float(f"{centre * factor**i:.3g}") for i in range(-(count // 2), count // 2 + 1))


def contenders(problem: Problem) -> dict[str, Contender]:
    def kfac(**settings: Any) -> Contender:
        def make(model: nn.Module, damping: float, lr: float = 0.1, kl_clip: float = 0.001) -> KFAC:
            base = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
            return KFAC(model, base, damping=damping, kl_clip=kl_clip, **settings)

        name, centre = problem.kfac_step
        steps = around(centre, 10 if name == "kl_clip" else 3, 5)
        return Contender(make, {name: steps, "damping": around(problem.damping, 10, 3)})

    def kron(**settings: Any) -> Contender:
        return Contender(
            lambda model, **tuned: Kron(model.parameters(), **settings, **tuned),
            {"lr": problem.rates, "b1": (0.8, 0.9, 0.95)},
        )

    def sgd(model: nn.Module, lr: float, momentum: float) -> Any:
        return torch.optim.SGD(model.parameters(), lr, momentum)

    def adamw(model: nn.Module, lr: float, b2: float) -> Any:
        return torch.optim.AdamW(model.parameters(), lr, betas=(0.9, b2), weight_decay=0.0)

    found = {
        "SGD": Contender(sgd, {"lr": around(problem.sgd, 3, 5), "momentum": (0.8, 0.9, 0.95)}),
        "AdamW": Contender(adamw, {"lr": problem.rates, "b2": (0.9, 0.99, 0.999)}),
        "Kron": kron(),
        "Kron, every 5": kron(preconditioner_update_probability=0.2),
        "K-FAC": kfac(compute_method="inverse", inv_update_steps=5),
        "K-FAC, every 5": kfac(compute_method="inverse", inv_update_steps=5, factor_update_steps=5),
    }
    if problem.small:
        found["K-FAC, eigen"] = kfac(compute_method="eigen", inv_update_steps=5)
    return found


def peers(problem: Problem) -> dict[str, Contender]:
    def kron_torch(model: nn.Module, **tuned: float) -> Any:
        return kron_torch_class()(model.parameters(), **tuned)

    grid = {"lr": problem.rates, "b1": (0.8, 0.9, 0.95)}
    return {"kron_torch": Contender(kron_torch, grid)}


class Run:
    """A contender on its way, with a clock that runs while it takes steps."""

    def __init__(
        self, problem: Problem, contender: Contender, point: dict[str, float], seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.problem = problem
        self.model, self._loss, self._evaluate = problem.start(seed)
        self.optimizer = contender.make(self.model, **point)
        self.steps, self.seconds, self.losses = 0, 0.0, [self.evaluate()]

    @torch.no_grad()
    def evaluate(self) -> float:
        return self._evaluate().item()

    @property
    def reached(self) -> bool:
        return self.losses[-1] <= self.problem.target

    @property
    def on(self) -> bool:
        return not self.reached and math.isfinite(self.losses[-1]) and self.steps < self.problem.budget

    def lowest(self, turns: int | None = None) -> float:
        return min(self.losses[: None if turns is None else turns + 1])

    def behind(self, lead: Run) -> bool:
        return self.lowest() > 1.05 * lead.lowest((len(self.losses) - 1) // 2)

    def turn(self) -> None:
        start = time.process_time()
        for _ in range(self.problem.every):
            self._loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.seconds += time.process_time() - start
        self.steps += self.problem.every
        self.losses.append(self.evaluate())


def tune(problem: Problem, contender: Contender, seeds: int) -> tuple[dict[str, float], list[Any]]:
    """The point of the grid with the fewest steps in its worst seed; the lowest loss, if none arrives.

    A run ends early when it can no longer be the best, or is more than twice as slow: its lowest loss is
    5 % above the one that the leading run of that seed had in half the steps.
    """
    best, fewest = contender.points()[0], math.inf
    lead: list[Run] = []
    record = []
    for point in contender.points():
        runs: list[Run] = []
        for seed in range(seeds):
            run = Run(problem, contender, point, seed)
            runs.append(run)
            while run.on and run.steps + problem.every < fewest:
                run.turn()
                if len(lead) > seed and run.behind(lead[seed]):
                    break
            if not run.reached:
                break
        record.append({**point, "steps": [run.steps if run.reached else None for run in runs]})
        arrived = len(runs) == seeds and runs[-1].reached
        if arrived or (fewest == math.inf and (not lead or runs[0].lowest() < lead[0].lowest())):
            best, lead = point, runs
            fewest = max(run.steps for run in runs) if arrived else fewest
    return best, record


def race(
    problem: Problem, chosen: dict[str, Contender], tuning_seeds: int, seeds: int
) -> dict[str, Any]:
    """All of one problem: tuned one after the other, then run in turns."""
    failed, points, tuning = {}, {}, {}
    for name, contender in chosen.items():
        try:
            points[name], tuning[name] = tune(problem, contender, tuning_seeds)
        except Exception as error:  # a peer may fail in any way
            if name not in peers(problem):
                raise
            failed[name] = repr(error)
    runs: dict[str, list[Run]] = {name: [] for name in points}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        now = {name: Run(problem, chosen[name], point, seed) for name, point in points.items()}
        while any(run.on for run in now.values()):
            for run in now.values():
                if run.on:
                    run.turn()
        for name, run in now.items():
            del run.model, run.optimizer, run._loss, run._evaluate
            runs[name].append(run)
    return {
        "about": problem.about,
        "target": problem.target,
        "budget": problem.budget,
        "contenders": {
            name: {
                **points[name],
                "edges": chosen[name].edges(points[name]),
                **result(runs[name]),
            }
            for name in points
        },
        "failed": failed,
        "grids": {name: chosen[name].grid for name in points},
        "tuning": tuning,
        "losses": {name: [float(f"{x:.4g}") for x in of[0].losses] for name, of in runs.items()},
    }


def result(runs: list[Run]) -> dict[str, Any]:
    """Medians over seeds; a run that has not arrived counts as infinite, an infinite median is None."""

    def median(values: list[float]) -> float | None:
        found = statistics.median(values)
        return found if math.isfinite(found) else None

    def all_of(values: list[float]) -> list[float | None]:
        return [v if math.isfinite(v) else None for v in values]

    steps = [run.steps if run.reached else math.inf for run in runs]
    seconds = [run.seconds if run.reached else math.inf for run in runs]
    return {
        "steps": median(steps),
        "seconds": median(seconds),
        "reached": sum(run.reached for run in runs),
        "milliseconds_per_step": 1e3 * statistics.median(run.seconds / run.steps for run in runs),
        "steps_of_seeds": all_of(steps),
        "seconds_of_seeds": all_of(seconds),
        "last_losses": all_of([run.losses[-1] for run in runs]),
    }


def main(argv: list[str] | None = None) -> None:
    names = [*contenders(PROBLEMS["digits"]), *peers(PROBLEMS["digits"])]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--contenders", nargs="+", default=names, choices=names)
    parser.add_argument("--peers", action="store_true", help="those that can be imported, too")
    parser.add_argument("--tuning-seeds", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5, help="of the runs that are reported")
    parser.add_argument("--budget", type=int, help="steps, instead of each problem's own number")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    warnings.filterwarnings("ignore")
    record: dict[str, Any] = {"workloads": {}}
    if arguments.json and arguments.json.exists():
        record = json.loads(arguments.json.read_text())
    for name in arguments.problems:
        problem = PROBLEMS[name]
        if arguments.budget:
            problem = problem._replace(budget=arguments.budget)
        field = contenders(problem) | (peers(problem) if arguments.peers else {})
        wanted = {"AdamW", *arguments.contenders}  # AdamW is the unit
        chosen = {key: value for key, value in field.items() if key in wanted}
        start = time.process_time()
        record["workloads"][name] = {
            **race(problem, chosen, arguments.tuning_seeds, arguments.seeds),
            "command": " ".join(["race.py", *(sys.argv[1:] if argv is None else argv)]),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "seeds": {
                "tuning": list(range(arguments.tuning_seeds)),
                "reported": list(range(FIRST_SEED, FIRST_SEED + arguments.seeds)),
            },
            "cpu_seconds": time.process_time() - start,
        }
        print(race_table(name, record["workloads"][name]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if arguments.plot:
        plot(record["workloads"], arguments.plot)


def plot(reports: dict[str, Any], path: Path) -> None:
    """The first seed's losses over the seconds that they took."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = math.ceil(len(reports) / 4)
    figure, axes = pyplot.subplots(rows, 4, figsize=(18, 4 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(reports) :]:
        axis.set_visible(False)
    for axis, (name, report) in zip(axes.flat, reports.items(), strict=False):
        every = PROBLEMS[name].every  # steps
        for number, (contender, losses) in enumerate(report["losses"].items()):
            step = report["contenders"][contender]["milliseconds_per_step"] / 1e3
            seconds = [every * step * i for i in range(len(losses))]
            axis.semilogy(seconds, losses, color=f"C{number}", linewidth=1.2, label=contender)
        axis.axhline(report["target"], color="grey", linewidth=0.8, linestyle="--")
        axis.set(title=name, xlabel="CPU seconds", ylabel="loss")
    axes.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
