"""What single pieces of a step take on a CPU, contenders in turns.

    OMP_NUM_THREADS=1 python benchmarks/pieces.py [--only ...] [--rounds 21] [--json FILE]

'geometries': one update of Kron's factors, P included, by geometry. 'inverses': inverses of symmetric
matrices, damped, ours and LAPACK's by Cholesky factors. 'grams': Gram matrices, ours and whole products.
'compiled': steps of Kron as it is and by torch.compile, which takes inductor a minute or more.
Processor milliseconds, medians and the least of all rounds; float32, one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, get_args

import torch

from options import whole, writable
from suite.core import linalg
from suite.core.kron import Geometry, Kron
from suite.torch import Kron as Optimizer
from versions import versions

Act = Callable[[], Any]
AUTOENCODER = (64, 64, 32, 12, 32, 64, 64)


def geometries(side: int = 256) -> dict[str, dict[str, Act]]:
    gradient, noise = torch.randn(2, 1, side, side)

    def update(geometry: Geometry) -> Act:
        rule = Kron(geometry=geometry)
        state = rule.init(gradient, (1, side, side), (False, False))

        def act() -> None:
            nonlocal state
            (state,) = rule.fit([state], [gradient], [noise], 0.1)

        return act

    found = {geometry: update(geometry) for geometry in get_args(Geometry)}
    return {f"Kron's update of a {side} x {side} matrix": found}


def inverses() -> dict[str, dict[str, Act]]:
    def of(side: int) -> dict[str, Act]:
        rows = torch.randn(2 * side, side)
        matrix = rows.mT @ rows / len(rows)

        def by_lapack() -> torch.Tensor:
            damped = linalg.add_diagonal(matrix, 0.01)
            return torch.cholesky_inverse(torch.linalg.cholesky(damped))

        return {"ours": lambda: linalg.damped_inverse(matrix, 0.01), "LAPACK": by_lapack}

    return {f"inverse of side {side}": of(side) for side in (512, 1024, 2048)}


def grams() -> dict[str, dict[str, Act]]:
    def of(rows: int, side: int) -> dict[str, Act]:
        x = torch.randn(rows, side)
        return {"ours": lambda: linalg.gram(x), "product": lambda: x.mT @ x}

    shapes = ((256, 512), (256, 1024), (2048, 512), (2048, 2048))
    return {f"Gram matrix of {rows} rows of {side}": of(rows, side) for rows, side in shapes}


def compiled() -> dict[str, dict[str, Act]]:
    def of(compile_it: bool) -> Act:
        sides = itertools.pairwise(AUTOENCODER)
        model = torch.nn.Sequential(*(torch.nn.Linear(m, n) for m, n in sides))
        optimizer = Optimizer(model.parameters(), preconditioner_update_probability=1.0)
        step = torch.compile(optimizer.step) if compile_it else optimizer.step
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for _ in range(5):  # compiles
            step()
        return step

    found = {"as it is": of(False), "compiled": of(True)}
    return {"Kron's step of an autoencoder 64-64-32-12 and back": found}


PARTS = {f.__name__: f for f in (geometries, inverses, grams, compiled)}


def measured(contenders: dict[str, Act], rounds: int) -> dict[str, dict[str, float]]:
    """Processor milliseconds of each, in turns after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, act in contenders.items():
            start = time.process_time()
            act()
            if number:
                times[name].append(1e3 * (time.process_time() - start))
    return {name: {"median": statistics.median(t), "least": min(t)} for name, t in times.items()}


def table(report: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = ["| | | median ms | least ms |", "|---|---|---|---|"]
    for piece, found in report.items():
        for name, one in found.items():
            lines.append(f"| {piece} | {name} | {one['median']:.3g} | {one['least']:.3g} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rounds", type=whole, default=21)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=writable)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(arguments.seed)
    pieces = {}
    with torch.no_grad():
        for name in arguments.only:
            for piece, contenders in PARTS[name]().items():
                pieces[piece] = measured(contenders, arguments.rounds)
    print(table(pieces))
    if arguments.json:
        record = {
            "command": shlex.join(["pieces.py", *(sys.argv[1:] if argv is None else argv)]),
            "versions": versions("torch"),
            "seed": arguments.seed,
            "rounds": arguments.rounds,
            "pieces": pieces,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
