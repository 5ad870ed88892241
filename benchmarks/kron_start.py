"""First step and compile time of Kron: does either grow with the number of layers?

    OMP_NUM_THREADS=1 python benchmarks/kron_start.py

A multilayer perceptron of width 64. torch: seconds of the first and of a later `step()`, eager. JAX:
processor seconds to trace and lower and to compile `tx.update`, and the lines of its program. Medians of
three interleaved rounds. Seed 0.
"""

from __future__ import annotations

import platform
import statistics
import time

import jax
import jax.numpy as jnp
import torch

import suite.jax
import suite.torch

DEPTHS = (5, 25, 50, 100)
ROUNDS = 3


def torch_steps(depth: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(depth)))
    optimizer = suite.torch.Kron(model.parameters())
    seconds = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds[0], min(seconds[1:])


def jax_compilation(depth: int) -> tuple[float, float, int]:
    params = [{"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)} for _ in range(depth)]
    tx = suite.jax.kron()
    state = tx.init(params)
    start = time.process_time()
    lowered = jax.jit(tx.update).lower(params, state, params)
    traced = time.process_time()
    lowered.compile()
    return traced - start, time.process_time() - traced, len(lowered.as_text().splitlines())


def main() -> None:
    torch.set_num_threads(1)
    versions = f"python {platform.python_version()}, torch {torch.__version__}, jax {jax.__version__}"
    print(versions)
    jax.jit(jnp.sin).lower(0.0).compile()  # JAX's own start is not Kron's
    rounds = [[torch_steps(n) + jax_compilation(n) for n in DEPTHS] for _ in range(ROUNDS)]
    print(f"{'parameters':>10}{'first step':>12}{'later':>8}{'trace':>8}{'compile':>9}{'lines':>8}")
    for depth, rows in zip(DEPTHS, zip(*rounds, strict=True), strict=True):
        first, later, trace, compiled, lines = map(statistics.median, zip(*rows, strict=True))
        row = f"{2 * depth:10}{first:11.2f}s{later:7.3f}s{trace:7.2f}s{compiled:8.2f}s{lines:8}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
