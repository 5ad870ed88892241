"""AdamW, K-FAC with momentum and PSGD Kron on handwritten digits, in PyTorch and in JAX.

Trains a deep autoencoder and a small convolutional classifier with each optimizer in each framework,
from the same weights and on the same minibatches; prints a table and writes it, with all curves, to
demo.json and demo.png. Hyperparameters, and how they were tuned: `contenders.py`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

import contenders
import digits

FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}
BAR = "{desc}  {percentage:3.0f}%|{bar:24}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"
EVALUATIONS = 60  # about so many points a curve has


@dataclass
class Run:
    """What became of one contender on one problem."""

    problem: str
    optimizer: str
    framework: str
    settings: dict[str, Any]
    steps: list[int] = field(default_factory=list)  # where the curve has its points
    seconds: list[float] = field(default_factory=list)  # spent in training steps until then
    losses: list[float] = field(default_factory=list)  # of the whole training set
    test_loss: float = math.nan
    test_accuracy: float = math.nan  # autoencoder: nan
    steps_to_adamw: int | None = None  # to reach AdamW's final loss in the same framework
    seconds_to_adamw: float | None = None
    seconds_per_step: float = math.nan  # the median
    setup_seconds: float = math.nan  # before the first step: compilation and warm-up
    total_seconds: float = math.nan  # of the run, with setup and evaluations
    optimizer_bytes: int = 0
    skipped_steps: int = 0

    @property
    def final_loss(self) -> float:
        return self.losses[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; `argv` as on the command line."""
    arguments = parse(argv)
    begin = time.perf_counter()
    modules = load_frameworks(arguments.frameworks)
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(describe_contenders(arguments.problems, arguments.optimizers))
    runs = []
    for problem in arguments.problems:
        for optimizer in arguments.optimizers:
            for framework in arguments.frameworks:
                with modules[framework].surroundings():
                    make_session = modules[framework].Session
                    run = train(
                        make_session, problem, optimizer, framework, arguments.seed, arguments.steps
                    )
                runs.append(run)
    compare_with_adamw(runs)
    total = time.perf_counter() - begin
    print(f"\n{table(runs)}\n\n{notes(runs)}")
    write_json(arguments.output / "demo.json", arguments, runs, total)
    draw(arguments.output / "demo.png", runs)
    print(f"\n{total:.0f} s in all. Wrote demo.json and demo.png to {arguments.output}.")
    return 0


# ---- the command line ----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add_choice(option: str, choices: Sequence[str]) -> None:
        parser.add_argument(
            option,
            type=lambda text: some_of(text, choices),
            default=list(choices),
            metavar=",".join(choices),
            help="any of these, separated by commas (default: all)",
        )

    add_choice("--optimizers", tuple(contenders.GRIDS))
    add_choice("--frameworks", tuple(FRAMEWORKS))
    add_choice("--problems", digits.PROBLEMS)
    parser.add_argument(
        "--steps",
        type=lambda text: whole_number(text, 1),
        default=contenders.STEPS,
        help="training steps of every run (default: %(default)s, for which the contenders are tuned)",
    )
    parser.add_argument(
        "--seed",
        type=lambda text: whole_number(text, 0),
        default=0,
        help="of initial weights, minibatches and Kron's noise (default: %(default)s; "
        f"tuning used {', '.join(map(str, contenders.TUNING_SEEDS))})",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="a folder (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.output.exists() and not arguments.output.is_dir():
        parser.error(f"argument --output: {arguments.output} exists and is not a folder")
    return arguments


def some_of(text: str, choices: Sequence[str]) -> list[str]:
    """The comma-separated names in `text`, in the order of `choices`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in choices]
    if unknown or not names:
        wrong = f"unknown: {', '.join(unknown)}" if unknown else "nothing given"
        raise argparse.ArgumentTypeError(f"{wrong}; choose from {', '.join(choices)}")
    return [choice for choice in choices if choice in names]


def whole_number(text: str, at_least: int) -> int:
    """`text` as an integer that is large enough."""
    try:
        number = int(text)
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {at_least}, got {text!r}")
    return number


def load_frameworks(names: list[str]) -> dict[str, Any]:
    """The modules `digits_torch` and `digits_jax`, of those that are asked for."""
    modules = {}
    for name in names:
        try:
            modules[name] = importlib.import_module(f"digits_{name}")
        except ImportError as error:
            raise SystemExit(f"--frameworks {name}: {error}") from error
    return modules


def describe_contenders(problems: list[str], optimizers: list[str]) -> str:
    """The hyperparameters: what was tuned as a table, what was not below it."""

    def text(settings: dict[str, Any]) -> str:
        return ", ".join(f"{name}={value}" for name, value in settings.items())

    rows = [("tuned for", *problems)]
    for optimizer in optimizers:
        chosen = (text(contenders.CHOSEN[problem][optimizer]) for problem in problems)
        rows.append((contenders.NAMES[optimizer], *chosen))
    lines = [align(rows, left=len(rows[0]))]
    lines += [
        f"{contenders.NAMES[name]}, not tuned: {text(contenders.FIXED[name])}" for name in optimizers
    ]
    (points,) = {len(contenders.grid(optimizer)) for optimizer in contenders.GRIDS}  # equal budgets
    seeds = ", ".join(map(str, contenders.TUNING_SEEDS))
    lines.append(
        f"Tuned: the best of {points} points each by final loss over seeds {seeds}, see contenders.py.\n"
        "Learning rates (lr) fall to zero along half a cosine.\n"
    )
    return "\n".join(lines)


# ---- a run ---------------------------------------------------------------------------------------


def train(make_session: Any, problem: str, optimizer: str, framework: str, seed: int, steps: int) -> Run:
    """Train one contender. Only training steps are on the clock that the curves show."""
    begin = time.perf_counter()
    run = Run(problem, optimizer, framework, contenders.settings(problem, optimizer))
    data = digits.load()
    title = f"{problem:11}  {contenders.NAMES[optimizer]:5}  {FRAMEWORKS[framework]:7}"
    with tqdm(total=steps, desc=title, unit="step", bar_format=BAR) as bar:
        bar.set_postfix_str("compiling" if framework == "jax" else "starting")
        session: digits.Session = make_session(problem, optimizer, run.settings, seed, steps)
        bar.reset()
        every = max(1, steps // EVALUATIONS)
        times: list[float] = []

        def note() -> None:
            loss, _ = session.evaluate(data.train_x, data.train_y)
            run.steps.append(len(times))
            run.seconds.append(sum(times))
            run.losses.append(loss)

        note()
        for step, batch in enumerate(digits.minibatches(seed, steps), 1):
            x, y = data.train_x[batch], data.train_y[batch]
            start = time.perf_counter()
            loss = session.step(x, y)
            times.append(time.perf_counter() - start)
            bar.set_postfix_str(f"loss {loss:.3g}", refresh=False)
            bar.update()
            if step % every == 0 or step == steps:
                note()
        bar.set_postfix_str(f"final loss {run.final_loss:.3g}")
    run.test_loss, run.test_accuracy = session.evaluate(data.test_x, data.test_y)
    run.seconds_per_step = statistics.median(times)
    run.setup_seconds = session.setup_seconds
    run.optimizer_bytes = session.optimizer_bytes()
    run.skipped_steps = session.skipped_steps()
    run.total_seconds = time.perf_counter() - begin
    return run


def compare_with_adamw(runs: list[Run]) -> None:
    """Fill in when each run first had AdamW's final loss, at the precision of its curve."""
    targets = {(r.problem, r.framework): r.final_loss for r in runs if r.optimizer == "adamw"}
    for run in runs:
        target = targets.get((run.problem, run.framework), math.nan)
        reached = [i for i, loss in enumerate(run.losses) if loss <= target]
        if reached:
            run.steps_to_adamw = run.steps[reached[0]]
            run.seconds_to_adamw = run.seconds[reached[0]]


# ---- results -------------------------------------------------------------------------------------


def table(runs: list[Run]) -> str:
    """One row per run."""
    head = ("problem", "optimizer", "framework", "final loss", "test loss", "accuracy")
    rows = [(*head, "steps to AdamW", "s to AdamW", "ms/step", "setup s", "memory KiB")]
    for run in runs:
        steps, seconds = run.steps_to_adamw, run.seconds_to_adamw
        rows.append(
            (
                run.problem,
                contenders.NAMES[run.optimizer],
                FRAMEWORKS[run.framework],
                f"{run.final_loss:.4g}",
                f"{run.test_loss:.4g}",
                "-" if math.isnan(run.test_accuracy) else f"{run.test_accuracy:.1%}",
                "-" if steps is None else str(steps),
                "-" if seconds is None else f"{seconds:.2f}",
                f"{1000 * run.seconds_per_step:.2f}",
                f"{run.setup_seconds:.1f}",
                f"{run.optimizer_bytes / 1024:.0f}",
            )
        )
    return align(rows, left=3)


def align(rows: Sequence[tuple[str, ...]], left: int) -> str:
    """Columns of equal width, the first `left` flush left, under a line below the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def notes(runs: list[Run]) -> str:
    """What the columns mean, and how far the frameworks are apart."""
    lines = [
        "final loss, test loss: mean over all training images and over all test images.",
        "    autoencoder: squared error of an image; convnet: divergence from smoothed labels.",
        "steps to AdamW, s to AdamW: until the loss is down to AdamW's final one in the same framework.",
        "    Training steps only, without setup and evaluations, both here and in ms/step, a median.",
        "setup s: before the first step; in JAX this is compilation. memory: the optimizer's state.",
    ]
    lines += [
        f"{run.problem}, {contenders.NAMES[run.optimizer]}, {FRAMEWORKS[run.framework]}: "
        f"{run.skipped_steps} steps were skipped, something in them was not finite."
        for run in runs
        if run.skipped_steps
    ]
    apart = framework_differences(runs)
    if apart:
        early = f"after {apart[0]['early_step']} steps"
        rows = [("PyTorch against JAX: relative difference of the loss", early, "at the end")]
        for found in apart:
            name = f"{found['problem']}, {contenders.NAMES[found['optimizer']]}"
            rows.append((name, f"{found['early']:.0e}", f"{found['final']:.0e}"))
        lines += ["", align(rows, left=1)]
        lines.append("One path, but for rounding, which grows along it; in float64 all stay below 1e-7.")
    return "\n".join(lines)


def framework_differences(runs: list[Run]) -> list[dict[str, Any]]:
    """How far PyTorch and JAX are apart, after about a tenth of the steps and at the end."""
    in_jax = {(run.problem, run.optimizer): run for run in runs if run.framework == "jax"}
    found = []
    for run in runs:
        other = in_jax.get((run.problem, run.optimizer))
        if run.framework == "torch" and other is not None:
            apart = [abs(a - b) / abs(a) for a, b in zip(run.losses, other.losses, strict=True)]
            early = next(i for i, step in enumerate(run.steps) if step >= run.steps[-1] / 10)
            found.append(
                {
                    "problem": run.problem,
                    "optimizer": run.optimizer,
                    "early_step": run.steps[early],
                    "early": apart[early],
                    "final": apart[-1],
                }
            )
    return found


def write_json(path: Path, arguments: argparse.Namespace, runs: list[Run], total_seconds: float) -> None:
    """Everything: settings, versions, one record with its curve per run."""
    packages = ("numpy", "sklearn", "torch", "jax", "optax")
    record = {
        "steps": arguments.steps,
        "seed": arguments.seed,
        "batch_size": digits.BATCH_SIZE,
        "tuning": {
            "seeds": contenders.TUNING_SEEDS,
            "steps": contenders.STEPS,
            "grids": contenders.GRIDS,
        },
        "python": platform.python_version(),
        "machine": platform.platform(),
        "packages": {n: sys.modules[n].__version__ for n in packages if n in sys.modules},
        "total_seconds": total_seconds,
        "framework_differences": framework_differences(runs),
        "runs": [{**asdict(run), "final_loss": run.final_loss} for run in runs],
    }
    path.write_text(json.dumps(without_nan(record), indent=1, allow_nan=False) + "\n")


def without_nan(value: Any) -> Any:
    """JSON knows no nan and no infinity: null stands for both."""
    if isinstance(value, dict):
        return {key: without_nan(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


COLORS = {"adamw": "#555555", "kfac": "#0072b2", "kron": "#d55e00"}
# Where both frameworks follow one curve, the thin dashed one lies on the broad pale one.
LINES: dict[str, dict[str, Any]] = {
    "torch": {"linewidth": 4, "alpha": 0.35, "solid_capstyle": "butt"},
    "jax": {"linewidth": 1.6, "linestyle": (0, (4, 1.5))},
}
LOSSES = {"autoencoder": "squared error of an image", "convnet": "divergence from smoothed labels"}


def draw(path: Path, runs: list[Run]) -> None:
    """Loss of the training set against steps and against seconds, one row per problem."""
    problems = list(dict.fromkeys(run.problem for run in runs))
    figure = Figure(figsize=(11, 0.9 + 3.7 * len(problems)), layout="constrained")
    panels = figure.subplots(len(problems), 2, squeeze=False, sharey="row")
    for row, problem in zip(panels, problems, strict=True):
        for panel, by_seconds in zip(row, (False, True), strict=True):
            for run in runs:
                if run.problem == problem:
                    panel.plot(
                        run.seconds if by_seconds else run.steps,
                        run.losses,
                        color=COLORS[run.optimizer],
                        **LINES[run.framework],
                        label=f"{contenders.NAMES[run.optimizer]}, {FRAMEWORKS[run.framework]}",
                    )
            panel.set_yscale("log")
            panel.set_xlim(left=0)
            panel.set_xlabel("seconds in training steps" if by_seconds else "steps")
            panel.grid(alpha=0.3, which="both", linewidth=0.6)
            panel.set_title(f"{problem}: loss against {'seconds' if by_seconds else 'steps'}")
        row[0].set_ylabel(f"{LOSSES[problem]},\ntraining set")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    columns = len({run.optimizer for run in runs})
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
