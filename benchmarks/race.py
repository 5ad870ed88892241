"""Steps and seconds to a target loss: K-FAC and Kron against AdamW and SGD on small problems.

    OMP_NUM_THREADS=1 python benchmarks/race.py [--framework torch] [--problems digits curves ...] \
        [--contenders AdamW Kron ...] [--peers] [--tuning-seeds 2] [--seeds 5] [--json FILE] \
        [--plot FILE]

`race_problems.py` has the problems and their targets, the same for all contenders and both frameworks.
Every contender has a grid of the same size, five step lengths a factor of about three apart times three
values of one more hyperparameter, and keeps its rate constant. The point that needs the fewest steps, in
the worse of the tuning seeds, is run again with other seeds: their medians are the result. There the
contenders take turns of ten steps each, in one process; seconds are process CPU seconds of forward,
backward and optimizer, without drawing minibatches and evaluating, in PyTorch of one thread, in JAX of
all that XLA has.
What compiles does so before, in steps of a throwaway, and has a column of its own: wall-clock seconds,
once a problem. '(edge)' marks a best value at the edge of its grid. A K-FAC step is as long as the root
of `kl_clip`, at lr 0.1, or lr where `kl_clip` does not bind: the problem says which one the grid has. A
peer that cannot be imported or fails is reported with its exception. `--json` keeps those problems in
the file that are not raced now.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare import workloads_of
from options import whole, writable
from race_grids import Contender
from race_problems import PROBLEMS, Problem
from table import race_table

FIRST_SEED = 100  # of those reported; tuning has 0, 1, ...
FRAMEWORKS = {"torch": "race_torch", "jax": "race_jax"}


class Run:
    """A contender on its way, with a clock that runs while it takes steps."""

    def __init__(
        self, problem: Problem, contender: Contender, point: dict[str, float], seed: int
    ) -> None:
        self.problem = problem
        self.training = contender.begin(seed, **point)
        self.compile_seconds = self.training.compile_seconds
        self.steps, self.seconds, self.losses = 0, 0.0, [self.training.evaluate()]

    @property
    def reached(self) -> bool:
        return self.losses[-1] <= self.problem.target

    @property
    def on(self) -> bool:
        return not self.reached and math.isfinite(self.losses[-1]) and self.steps < self.problem.budget

    def turn(self) -> None:
        minibatches = self.training.draw(self.problem.every)
        start = time.process_time()
        self.training.take(minibatches)
        self.seconds += time.process_time() - start
        self.steps += self.problem.every
        self.losses.append(self.training.evaluate())


def tune(
    problem: Problem, contender: Contender, seeds: int
) -> tuple[dict[str, float], list[Any], float]:
    """The point of the grid with the fewest steps in its worst seed; the lowest loss, if none arrives.

    A run ends early when it can no longer be the best. Also returned: what was tried, and the longest
    compilation.
    """
    best, fewest, lowest = contender.points()[0], math.inf, math.inf
    record, compiling = [], 0.0
    for point in contender.points():
        runs: list[Run] = []
        for seed in range(seeds):
            run = Run(problem, contender, point, seed)
            runs.append(run)
            compiling = max(compiling, run.compile_seconds)
            while run.on and run.steps + problem.every < fewest:
                run.turn()
            if not run.reached:
                break
        record.append({**point, "steps": [run.steps if run.reached else None for run in runs]})
        arrived = len(runs) == seeds and runs[-1].reached
        loss = min(runs[0].losses)
        if arrived or (fewest == math.inf and loss < lowest):
            best, lowest = point, loss
            fewest = max(run.steps for run in runs) if arrived else fewest
    return best, record, compiling


def race(
    problem: Problem,
    chosen: dict[str, Contender],
    tuning_seeds: int,
    seeds: int,
    may_fail: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """All of one problem: tuned one after the other, then run in turns."""
    failed: dict[str, str] = {}
    points, tuning, compiling = {}, {}, {}

    def guarded(name: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:  # a peer may fail in any way
            if name not in may_fail:
                raise
            failed[name] = repr(error)

    for name, contender in chosen.items():
        found = guarded(name, functools.partial(tune, problem, contender, tuning_seeds))
        if name not in failed:
            points[name], tuning[name], compiling[name] = found
    runs: dict[str, list[Run]] = {name: [] for name in points}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        now = {}
        for name, point in points.items():
            make = functools.partial(Run, problem, chosen[name], point, seed)
            now[name] = guarded(name, make)
        while any(run.on for name, run in now.items() if name not in failed):
            for name, run in now.items():
                if name not in failed and run.on:
                    guarded(name, run.turn)
        points = {name: point for name, point in points.items() if name not in failed}
        for name in points:
            del now[name].training
            runs[name].append(now[name])
    return {
        "about": problem.about,
        "target": problem.target,
        "budget": problem.budget,
        "contenders": {
            name: {
                **points[name],
                "edges": chosen[name].edges(points[name]),
                "compile_seconds": compiling[name],
                **result(runs[name]),
            }
            for name in points
        },
        "failed": failed,
        "grids": {name: chosen[name].grid for name in points},
        "tuning": {name: tuning[name] for name in points},
        "losses": {
            name: [float(f"{x:.4g}") if math.isfinite(x) else None for x in runs[name][0].losses]
            for name in points
        },
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
        "milliseconds_per_step": 1e3
        * statistics.median(run.seconds / max(run.steps, 1) for run in runs),
        "steps_of_seeds": all_of(steps),
        "seconds_of_seeds": all_of(seconds),
        "last_losses": all_of([run.losses[-1] for run in runs]),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", default="torch", choices=FRAMEWORKS)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, help="default: all it has")
    parser.add_argument("--contenders", nargs="+", help="default: all; AdamW is always there")
    parser.add_argument("--peers", action="store_true", help="those that can be imported, too")
    parser.add_argument("--tuning-seeds", type=whole, default=2)
    parser.add_argument("--seeds", type=whole, default=5, help="of the runs that are reported")
    parser.add_argument("--budget", type=whole, help="steps, instead of each problem's own number")
    parser.add_argument("--json", type=writable)
    parser.add_argument("--plot", type=writable)
    arguments = parser.parse_args(argv)
    framework = importlib.import_module(FRAMEWORKS[arguments.framework])
    missing = set(arguments.problems or ()) - framework.STARTS.keys()
    if missing:
        parser.error(f"{arguments.framework} has no problem {', '.join(sorted(missing))}")
    versions = framework.prepare()
    warnings.filterwarnings("ignore")
    record: dict[str, Any] = {"workloads": {}}
    if arguments.json and arguments.json.exists():
        record["workloads"] = workloads_of(arguments.json)
        if any("floors" in report for report in record["workloads"].values()):
            parser.error(
                f"--json must be a new file or one of race.py, got step_time's {arguments.json}"
            )
    for name in arguments.problems or framework.STARTS:
        problem = PROBLEMS[name]
        if arguments.budget:
            problem = problem._replace(budget=arguments.budget)
        peers = framework.peers(name, problem) if arguments.peers else {}
        named = bool(arguments.contenders)
        chosen = framework.contenders(name, problem, variants=named) | peers
        if arguments.contenders:
            unknown = set(arguments.contenders) - chosen.keys()
            if unknown - framework.contenders("digits", PROBLEMS["digits"], variants=True).keys():
                parser.error(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
            wanted = {"AdamW", *arguments.contenders}  # AdamW is the unit
            chosen = {key: value for key, value in chosen.items() if key in wanted}
        start = time.process_time()
        record["workloads"][name] = {
            **race(problem, chosen, arguments.tuning_seeds, arguments.seeds, frozenset(peers)),
            "command": shlex.join(["race.py", *(sys.argv[1:] if argv is None else argv)]),
            "versions": versions,
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
    names = list(dict.fromkeys(name for report in reports.values() for name in report["losses"]))
    lines: dict[str, Any] = {}
    for axis, (name, report) in zip(axes.flat, reports.items(), strict=False):
        every = PROBLEMS[name].every  # steps
        for contender, losses in report["losses"].items():
            number = names.index(contender)
            style = {"color": f"C{number}", "linestyle": "-" if number < 10 else ":", "linewidth": 1.2}
            step = report["contenders"][contender]["milliseconds_per_step"] / 1e3
            seconds = [every * step * i for i in range(len(losses))]
            finite = [math.nan if x is None else x for x in losses]
            (lines[contender],) = axis.semilogy(seconds, finite, **style)
        axis.axhline(report["target"], color="grey", linewidth=0.8, linestyle="--")
        first = max(losses[0] for losses in report["losses"].values())
        axis.set_ylim(0.8 * report["target"], 1.2 * first)  # some diverge
        axis.set(title=name, xlabel="CPU seconds", ylabel="loss")
    axes.flat[0].legend(lines.values(), lines, fontsize=8)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
