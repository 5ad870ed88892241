"""What share of a model's parameters K-FAC covers in JAX, and what capture costs, model by model.

    python benchmarks/jax_coverage.py [--library plain linen nnx equinox] [--model gpt ...] [--no-time]

A library that is not installed is left out. No line of a model's code is about K-FAC. `verified` is the
largest error of Σ g aᵀ against the gradient, over all covered leaves; `cost` the time of a step with
statistics over that of `jax.value_and_grad`, medians of interleaved calls.
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np

from jax_library_models import LIBRARIES
from suite.jax import value_and_grad, verify


def median_times(functions, repeats: int = 15) -> list[float]:
    times = [[] for _ in functions]
    for _ in range(repeats):
        for own, function in zip(times, functions, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function())
            own.append(time.perf_counter() - start)
    return [float(np.median(own)) for own in times]


def report(name: str, case, timed: bool) -> str:
    loss_fn, params, batch = case
    vag = value_and_grad(loss_fn)
    start = time.perf_counter()
    plan = vag.plan(params, *batch)
    trace = time.perf_counter() - start
    sizes = {r.parameter: int(np.prod(r.shape, dtype=int)) for r in plan.routing}
    covered = sum(sizes[r.parameter] for r in plan.routing if r.preconditioned)
    factored = sum(
        sizes[plan.names[leaf]]
        for leaf in {
            x for layer in plan.layers if layer.kind != "elementwise" for x in (layer.leaf, layer.bias)
        }
        if leaf is not None
    )
    total = sum(sizes.values())
    error = max(verify(loss_fn, params, *batch, rtol=1e-2).values())
    line = (
        f"{name:16} {total:8,} {covered / total:8.1%} {factored / total:9.1%} {trace:8.2f} {error:9.0e}"
    )
    if timed:
        captured, plain = jax.jit(vag), jax.jit(jax.value_and_grad(loss_fn))
        seconds = []
        for function in (captured, plain):
            start = time.perf_counter()
            function.lower(params, *batch).compile()
            seconds.append(time.perf_counter() - start)
        captured(params, *batch), plain(params, *batch)
        times = median_times([lambda: captured(params, *batch), lambda: plain(params, *batch)])
        line += f" {seconds[0]:8.2f} {seconds[1]:8.2f} {times[0] / times[1]:6.2f}"
    reasons = [f"{r.parameter}: {r.reason}" for r in plan.routing if not r.preconditioned]
    return "\n".join([line, *(f"    not covered: {reason}" for reason in reasons)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", nargs="*", default=list(LIBRARIES), choices=list(LIBRARIES))
    parser.add_argument("--model", nargs="*")
    parser.add_argument("--no-time", action="store_true")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.default_backend()}")
    print("model             params  covered  factored  trace s  verified compile s   plain s   cost")
    for library in options.library:
        try:
            cases = LIBRARIES[library]()
        except ImportError as error:
            print(f"{library}: {error}")
            continue
        for name, make in cases.items():
            if not options.model or name in options.model:
                print(report(f"{library} {name}", make(), not options.no_time), flush=True)


if __name__ == "__main__":
    main()
