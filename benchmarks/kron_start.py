"""First step and compile time of Kron: do they grow with the number of layers, or of their shapes?

    OMP_NUM_THREADS=1 python benchmarks/kron_start.py

Multilayer perceptrons: many layers of one shape, and autoencoders with layers of many. torch: seconds of
the first and of a later `step()`, eager. JAX: processor seconds to trace and lower and to compile
`tx.update`, the lines of its program, and AdamW's seconds to compile. Medians of three rounds. Seed 0.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import optax
import torch

import suite.jax
import suite.torch

MODELS = {f"{depth} layers of 64": (64,) * (depth + 1) for depth in (5, 25, 50, 100)}
for encoder in ((64, 64, 32, 12), (784, 1000, 500, 250, 30)):
    MODELS["-".join(map(str, encoder)) + " and back"] = (*encoder, *encoder[-2::-1])
ROUNDS = 3


def torch_steps(sides: tuple[int, ...]) -> tuple[float, float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(m, n) for m, n in itertools.pairwise(sides)))
    optimizer = suite.torch.Kron(model.parameters())
    seconds = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds[0], min(seconds[1:])


def jax_compilation(
    tx: optax.GradientTransformation, sides: tuple[int, ...]
) -> tuple[float, float, int]:
    params = [{"w": jnp.zeros((m, n)), "b": jnp.zeros(n)} for m, n in itertools.pairwise(sides)]
    state = tx.init(params)
    start = time.process_time()
    lowered = jax.jit(tx.update).lower(params, state, params)
    traced = time.process_time()
    lowered.compile()
    return traced - start, time.process_time() - traced, len(lowered.as_text().splitlines())


def measured(sides: tuple[int, ...]) -> tuple[float, ...]:
    kron, adamw = (jax_compilation(tx, sides) for tx in (suite.jax.kron(), optax.adamw(0.001)))
    return (*torch_steps(sides), *kron, adamw[1])


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    versions = f"python {platform.python_version()}, torch {torch.__version__}, jax {jax.__version__}"
    print(versions)
    jax.jit(jnp.sin).lower(0.0).compile()  # JAX's own start is not Kron's
    rounds = [[measured(sides) for sides in MODELS.values()] for _ in range(ROUNDS)]
    print(f"{'':32}{'first step':>11}{'later':>8}{'trace':>8}{'compile':>9}{'lines':>8}{'AdamW':>8}")
    for name, rows in zip(MODELS, zip(*rounds, strict=True), strict=True):
        first, later, trace, compiled, lines, adamw = map(statistics.median, zip(*rows, strict=True))
        row = f"{name:32}{first:10.2f}s{later:7.3f}s{trace:7.2f}s{compiled:8.2f}s{lines:8}{adamw:7.2f}s"
        print(row, flush=True)


if __name__ == "__main__":
    main()
