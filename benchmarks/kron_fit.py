"""How well PSGD Kron's factors fit a known covariance, and what an update costs.

    OMP_NUM_THREADS=1 python benchmarks/kron_fit.py --output kron-fit  # half an hour

Gradients are G = A_1^½ ⊗ A_2^½ ⊗ ... z with z standard normal and A_i of given condition (eigenvalues
log-spaced, geometric mean 1, random basis). The error is ‖P (A_1 ⊗ A_2 ⊗ ...) P - I‖_F / √N, exact in
float64 from the factors. The centre is a 64 x 32 matrix of condition 100 each, scale 1, float32, the
default `preconditioner_lr`. Rows vary one thing from it (condition, sides, rank, scale, dtype, steps),
then come corners where several are extreme at once; the full product would be thousands of fits. `drift`
rotates A_1 by a quarter turn in every plane per 3,000 updates; `floor 0.01` is the default with that
`min_lr`. Writes fit.json, fit.png and the table fit.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from options import whole
from suite.core.kron import Geometry, Kron
from suite.core.schedules import precond_lr_schedule
from versions import versions

GEOMETRIES = get_args(Geometry)
DRIFT_UPDATES = 3000
DEFAULT_RATE = precond_lr_schedule()


@dataclass(frozen=True)
class Case:
    """One covariance to fit."""

    label: str
    shape: tuple[int, ...] = (64, 32)
    condition: float = 100.0
    scale: float = 1.0  # of the gradients
    dtype: str = "float32"
    rate: Any = DEFAULT_RATE
    drift: bool = False


CENTRE = Case("64x32, condition 100")
CASES = (
    CENTRE,
    replace(CENTRE, label="constant 0.1", rate=lambda updates: 0.1),
    replace(CENTRE, label="floor 0.01", rate=precond_lr_schedule(min_lr=0.01)),
    replace(CENTRE, label="drift", drift=True),
    replace(CENTRE, label="drift, constant 0.1", drift=True, rate=lambda updates: 0.1),
    replace(CENTRE, label="drift, floor 0.01", drift=True, rate=precond_lr_schedule(min_lr=0.01)),
    replace(CENTRE, label="drift, no floor", drift=True, rate=precond_lr_schedule(min_lr=1e-6)),
    *(replace(CENTRE, label=f"condition {c:g}", condition=c) for c in (1.0, 1e3, 1e4)),
    *(
        replace(CENTRE, label="x".join(map(str, shape)), shape=shape)
        for shape in ((64,), (16, 16, 8), (8, 8, 8, 8), (8, 8))
    ),
    *(replace(CENTRE, label=f"scale {s:g}", scale=s) for s in (1e-4, 1e2)),
    replace(CENTRE, label="bfloat16", dtype="bfloat16"),
    replace(CENTRE, label="condition 1e4, scale 100", condition=1e4, scale=1e2),
    replace(CENTRE, label="condition 1e4, 8x8x8x8", condition=1e4, shape=(8, 8, 8, 8)),
    replace(
        CENTRE,
        label="the same, scale 0.0001, bfloat16",
        condition=1e4,
        scale=1e-4,
        shape=(8, 8, 8, 8),
        dtype="bfloat16",
    ),
    *(replace(CENTRE, label=f"{n}x{n}", shape=(n, n)) for n in (128, 256)),
)


class Covariance:
    """A_1 ⊗ A_2 ⊗ ... with A_1 rotating, and gradients of it."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        self.bases = [np.linalg.qr(self.rng.normal(size=(n, n)))[0] for n in case.shape]
        self.planes = np.linalg.qr(self.rng.normal(size=(case.shape[0],) * 2))[0]
        self.values = []
        for n in case.shape:
            values = np.logspace(0, -math.log10(case.condition), n)
            self.values.append(values / np.exp(np.log(values).mean()))
        self.roots = [(b * v**0.5) @ b.T for b, v in zip(self.bases, self.values, strict=True)]

    def rotate(self, updates: int) -> None:
        n, angle = self.case.shape[0], math.pi / 2 * updates / DRIFT_UPDATES
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        basis = self.planes @ np.kron(np.eye(n // 2), turn) @ self.planes.T @ self.bases[0]
        self.roots[0] = (basis * self.values[0] ** 0.5) @ basis.T

    def gradient(self) -> np.ndarray:
        g = self.rng.normal(size=self.case.shape)
        for axis, root in enumerate(self.roots):
            g = np.moveaxis(np.tensordot(root, g, axes=(1, axis)), 0, axis)
        return self.case.scale * g

    def error(self, preconditioners: tuple[torch.Tensor, ...]) -> float:
        """From X_i = P_i A_i P_i: ‖X - I‖² = Π ‖X_i‖² - 2 Π tr X_i + N."""
        X = [p.double().numpy() for p in preconditioners]
        X[0] = X[0] * self.case.scale
        X = [p @ root @ root @ p for p, root in zip(X, self.roots, strict=True)]
        squares = math.prod(float(np.sum(x * x)) for x in X)
        traces = math.prod(float(np.trace(x)) for x in X)
        N = math.prod(self.case.shape)
        return math.sqrt(max(squares - 2 * traces + N, 0.0) / N)


def fit(case: Case, geometry: Geometry, marks: list[int], seed: int) -> dict[str, Any]:
    """Errors after `marks` updates and the milliseconds of one."""
    covariance, dtype = Covariance(case, seed), getattr(torch, case.dtype)
    noise = torch.Generator().manual_seed(seed)
    rule = Kron(geometry, preconditioner_init_scale=None)
    state = rule.init(torch.empty(0, dtype=dtype), case.shape, (False,) * len(case.shape))
    errors, seconds = [], 0.0
    for update in range(1, max(marks) + 1):
        if case.drift:
            covariance.rotate(update)
        g = torch.tensor(covariance.gradient(), dtype=dtype)
        v = torch.randn(case.shape, generator=noise).to(dtype)
        start = time.perf_counter()
        state = rule.refresh(rule.update(state, g, v, float(case.rate(update - 1))))
        seconds += time.perf_counter() - start
        if update in marks:
            errors.append(covariance.error(state.preconditioners))
    return {"errors": errors, "ms": 1000 * seconds / max(marks)}


def table(results: list[dict[str, Any]]) -> str:
    """Cases by geometries: errors after 300 and after all updates."""
    geometries = list(dict.fromkeys(row["geometry"] for row in results))
    marks = results[0]["updates"]
    middle = min(range(len(marks)), key=lambda i: abs(marks[i] - 300))
    lines = ["| case | " + " | ".join(f"`{g}`" for g in geometries) + " |"]
    lines.append("|---" * (len(geometries) + 1) + "|")
    for case in dict.fromkeys(row["case"] for row in results):
        found = {row["geometry"]: row["errors"] for row in results if row["case"] == case}
        cells = [f"{found[g][middle]:.3g} / {found[g][-1]:.3g}" for g in geometries]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Error against updates: every geometry on the centre, with and without annealing, and drift."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [CENTRE.label, "constant 0.1", "drift"]
    figure, axes = plt.subplots(1, len(labels), figsize=(12, 3.5), sharey=True, layout="constrained")
    for axis, label in zip(axes, labels, strict=True):
        for row in results:
            if row["case"] == label:
                axis.loglog(row["updates"], row["errors"], marker=".", label=row["geometry"])
        axis.set(title=label, xlabel="updates")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("‖P (A ⊗ B) P - I‖ / √N")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


def main(argv: list[str] | None = None, report: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("kron-fit"))
    parser.add_argument("--updates", type=whole, default=3000, help="of the longest fits")
    parser.add_argument("--geometries", default=",".join(GEOMETRIES))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    longest = arguments.updates
    marks = sorted({min(longest, m) for m in (10, 20, 50, 100, 200, 300, 600, 1000, 2000, longest)})
    results: list[dict[str, Any]] = []
    report(f"{'case':34}{'geometry':12}" + "".join(f"{m:>9}" for m in marks) + "  ms/update")
    for case in CASES:
        for geometry in arguments.geometries.split(","):
            found = fit(case, geometry, marks, arguments.seed)
            results.append({"case": case.label, "geometry": geometry, "updates": marks, **found})
            numbers = "".join(f"{error:9.3g}" for error in found["errors"])
            report(f"{case.label:34}{geometry:12}{numbers}  {found['ms']:9.2f}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    record = {"seed": arguments.seed, "versions": versions("torch", "numpy"), "results": results}
    (arguments.output / "fit.json").write_text(json.dumps(record, indent=1) + "\n")
    (arguments.output / "fit.md").write_text(table(results))
    plot(results, arguments.output / "fit.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
