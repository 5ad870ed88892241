"""What share of a model's parameters K-FAC covers in JAX, what the user writes for it, what it costs.

    python benchmarks/jax_coverage.py [--library plain linen nnx equinox haiku] [--model gpt ...]
        [--no-time] [--output docs/jax_coverage.md]

A library that is not installed is left out, and said so. See `ABOUT` for the columns.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import inspect
import platform
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax

import jax_library_models
from options import writable
from suite.jax import kfac, value_and_grad, verify

PACKAGES = {"linen": "flax", "nnx": "flax", "equinox": "equinox", "haiku": "dm-haiku"}

ABOUT = """\
- *covered*: the share of parameters that K-FAC preconditions; *factored*: that of those in a block of
  factors A ⊗ G, where scales and shifts are blocks of 2 x 2, positions, tokens and spectra diagonal.
- *lines*: what the user writes about K-FAC, in the model + in the training script, where it takes the
  place of Adam (`train_with_adam` and `train_with_kfac` of the benchmark, counted by `difflib`).
- *verified*: the largest error of Σ g aᵀ against the gradient over all covered leaves, in units of a
  leaf's largest gradient, in float32.
- *trace*: CPU seconds to find the layers, the tracing of the loss included. *compile*: CPU seconds to
  trace and compile a step with statistics and, after it, `jax.value_and_grad` alone.
- *cost*: the CPU time of a step with statistics over that of `jax.value_and_grad`, medians of 31
  interleaved calls. A square layer's moments are 4 products of its size beside the gradient's 6: 1.67 is
  par. A of a 3 x 3 kernel has 9 times the channels for a side, so that convolutions to few channels cost
  more, and G of an LSTM's fused gates 4 times the width. Steps of mlp, gnn and vmc take a millisecond or
  less, and in some runs XLA's threads spend several times as much on one of them as in others: 8 is one
  model's figure in one run, and 1.4 to 3 in all others.
"""


# ---- what the user writes ------------------------------------------------------------------------


def train_with_adam(loss_fn, params, batches):
    tx = optax.adam(1e-3)
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in batches:
        params, state, loss = step(params, state, batch)
    return params, loss


def train_with_kfac(loss_fn, params, batches):
    vag = value_and_grad(loss_fn)
    tx = kfac(vag.plan(params, *batches[0]), 0.05, fallback=optax.adam(1e-3))
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        loss, grads, statistics = vag(params, *batch)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state, loss

    for batch in batches:
        params, state, loss = step(params, state, batch)
    return params, loss


def lines_in_training() -> int:
    """Lines that differ, the function's name apart."""
    before, after = (inspect.getsource(f).splitlines()[1:] for f in (train_with_adam, train_with_kfac))
    return sum(line.startswith("+ ") for line in difflib.ndiff(before, after))


def lines_in_models(library: str) -> int:
    """Lines of a library's models that speak of K-FAC."""
    source = Path(__file__).with_name(jax_library_models.MODULES[library] + ".py").read_text()
    return len(re.findall(r"^.*\b(?:suite|kfac|probe)\b.*$", source, re.MULTILINE))


# ---- what is measured ----------------------------------------------------------------------------


class Row(NamedTuple):
    library: str
    model: str
    params: int
    covered: float
    factored: float
    lines: tuple[int, int]
    verified: float
    trace: float
    compile: tuple[float, float] | None
    cost: float | None
    reasons: tuple[str, ...]

    def cells(self) -> list[str]:
        cells = [
            self.library, self.model, f"{self.params:,}", f"{self.covered:.1%}", f"{self.factored:.1%}",
            f"{self.lines[0]} + {self.lines[1]}", f"{self.verified:.0e}", f"{self.trace:.2f}",
        ]  # fmt: skip
        if self.compile is not None:
            cells += [f"{self.compile[0]:.1f}, {self.compile[1]:.1f}", f"{self.cost:.2f}"]
        return cells


def median_times(functions, repeats: int = 31) -> list[float]:
    times = [[] for _ in functions]
    for _ in range(repeats):
        for own, function in zip(times, functions, strict=True):
            start = time.process_time()
            jax.block_until_ready(function())
            own.append(time.process_time() - start)
    return [float(np.median(own)) for own in times]


def measure(library: str, name: str, case, timed: bool) -> Row:
    loss_fn, params, batch = case
    vag = value_and_grad(loss_fn)
    start = time.process_time()
    plan = vag.plan(params, *batch)
    trace = time.process_time() - start
    sizes = {r.parameter: int(np.prod(r.shape, dtype=int)) for r in plan.routing}
    total = sum(sizes.values())
    covered = sum(sizes[r.parameter] for r in plan.routing if r.preconditioned)
    in_blocks = {
        leaf for layer in plan.layers if layer.kind != "elementwise" for leaf in (layer.leaf, layer.bias)
    }
    factored = sum(sizes[plan.names[leaf]] for leaf in in_blocks if leaf is not None)
    error = max(verify(loss_fn, params, *batch, rtol=1e-2).values())
    seconds, cost = None, None
    if timed:
        compiled, taken = [], []
        for function in (vag, jax.value_and_grad(loss_fn)):
            start = time.process_time()
            compiled.append(jax.jit(function).lower(params, *batch).compile())
            taken.append(time.process_time() - start)
        for run in compiled:
            jax.block_until_ready(run(params, *batch))
        times = median_times([lambda run=run: run(params, *batch) for run in compiled])
        seconds, cost = (taken[0], taken[1]), times[0] / times[1]
    return Row(
        library,
        name,
        total,
        covered / total,
        factored / total,
        (lines_in_models(library), lines_in_training()),
        error,
        trace,
        seconds,
        cost,
        tuple(f"{r.parameter}: {r.reason}" for r in plan.routing if not r.preconditioned),
    )


def table(rows: list[Row]) -> str:
    head = ["library", "model", "parameters", "covered", "factored", "lines", "verified", "trace s"]
    if rows and rows[0].compile is not None:
        head += ["compile s", "cost"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    return "\n".join(lines)


def versions(libraries: list[str]) -> str:
    packages = ["jax", "numpy", *dict.fromkeys(PACKAGES[x] for x in libraries if x in PACKAGES)]
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return f"Python {platform.python_version()}, {found}, {jax.default_backend()}"


def report(rows: list[Row], left_out: list[str], command: str) -> str:
    libraries = list(dict.fromkeys(row.library for row in rows))
    whole = sum(row.covered == 1.0 for row in rows)
    parts = [
        "# What K-FAC covers in JAX\n",
        f"```\n{command}\n```\n",
        f"{versions(libraries)};\nseeds 0 (data) and 1 (plain models), 0 in the libraries. "
        f"{whole} of {len(rows)} models are covered to the last parameter.\n",
        ABOUT,
        table(rows),
    ]
    reasons = [f"- {r.library} {r.model}: `{reason}`" for r in rows for reason in r.reasons]
    if reasons:
        parts += ["\nNot covered:\n", "\n".join(reasons)]
    if left_out:
        parts += ["\nNot installed: " + ", ".join(left_out) + "."]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    known = list(jax_library_models.MODULES)
    parser.add_argument("--library", nargs="*", default=known, choices=known)
    parser.add_argument("--model", nargs="*")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--output", type=writable, help="write the table to this file")
    options = parser.parse_args()
    rows, left_out = [], []
    for library in options.library:
        try:
            models = jax_library_models.models(library)
        except ImportError as error:
            print(f"{library}: {error}")
            left_out.append(library)
            continue
        for name, make in models.items():
            if not options.model or name in options.model:
                rows.append(measure(library, name, make(), not options.no_time))
                print("  ".join([*rows[-1].cells(), *rows[-1].reasons]), flush=True)
    command = " ".join(["python", "benchmarks/jax_coverage.py", *sys.argv[1:]])
    text = report(rows, left_out, command)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
