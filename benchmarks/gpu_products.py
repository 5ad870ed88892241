"""What K-FAC's products and factorizations take on a GPU by precision, and how exact they are.

    python benchmarks/gpu_products.py [--seed 0] [--json FILE]

Second moments of 8192 rows: in float32, with TF32 allowed, and of bfloat16 as it is, summed in float32.
Inverses of stacks of factors, by `linalg.damped_inverse` and by PyTorch's Cholesky factorization and
inverse; their errors with TF32 allowed. Directions G⁻¹ ∇ A⁻¹ in float32 and with TF32 allowed, and what
the gradient's own rounding to bfloat16 does to them. Inverses of a 124M-parameter GPT before a forward
and backward pass and on a stream beside it. Milliseconds are medians; errors are relative, in the
Frobenius norm, to float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from options import writable
from suite.core import linalg
from suite.core.kfac import KFAC
from versions import versions
from workloads import WORKLOADS

DEVICE = torch.device("cuda")
ROWS, CONDITION = 8192, 1e4
FACTORS = ((36, 769), (60, 768), (12, 3073), (12, 3072))  # of the GPT, A and G
STACKS = (*FACTORS, (3, 4608), (64, 256), (200, 64), (20000, 2))


def milliseconds(function: Callable[[], Any], repeats: int = 7) -> float:
    found = []
    for number in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        if number > 1:
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


@contextmanager
def tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def spectrum(n: int) -> torch.Tensor:
    """(n, n) in float64, with eigenvalues from 1 to 1 / CONDITION."""
    basis = torch.linalg.qr(normal(n, n).double()).Q
    values = torch.logspace(0, -torch.log10(torch.tensor(CONDITION)).item(), n, dtype=torch.float64)
    return (basis * values.to(DEVICE)) @ basis.mT


def second_moments(n: int) -> dict[str, dict[str, float]]:
    rows = normal(1, ROWS, n)
    halves = rows.bfloat16()
    exact, of_halves = (x.double().mT @ x.double() for x in (rows, halves))
    found = {"float32": _measured(lambda: linalg.gram_in_single(rows), exact)}
    with tf32():
        found["TF32"] = _measured(lambda: linalg.gram_in_single(rows), exact)
    lifted = "bfloat16, lifted to float32"
    found[lifted] = _measured(lambda: linalg.gram_in_single(halves.float()), of_halves)
    found["bfloat16 as it is"] = _measured(lambda: linalg.gram_in_single(halves), of_halves)
    return found


def inverses(count: int, n: int) -> dict[str, dict[str, float]]:
    one = spectrum(n)
    exact, stack = torch.linalg.inv(one), one.float().expand(count, n, n).contiguous()

    def ours() -> torch.Tensor:
        return linalg.damped_inverse(stack, 0.0)

    def library() -> torch.Tensor:
        return torch.cholesky_inverse(torch.linalg.cholesky_ex(stack)[0])

    found = {"PyTorch": _measured(library, exact), "ours": _measured(ours, exact)}
    with tf32():
        found["ours, TF32 allowed"] = _measured(ours, exact)
    return found


def directions() -> dict[str, dict[str, float]]:
    """Of twelve layers 3072 x 768, the gradient largest where the factors are."""
    A, G = (spectrum(n) for n in (768, 3072))
    gradient = G @ normal(3072, 768).double() @ A
    halves = gradient.bfloat16().double()
    damped = [torch.linalg.inv(x + 0.03 * torch.eye(len(x), device=DEVICE)) for x in (A, G)]
    exact = damped[1] @ gradient @ damped[0]
    given = [x.float().expand(12, *x.shape).contiguous() for x in (*damped, gradient)]

    def ours() -> torch.Tensor:
        return KFAC("inverse").apply(given[0], given[1], None, given[2], 0.0)

    found = {"float32": _measured(ours, exact)}
    with tf32():
        found["TF32"] = _measured(ours, exact)
    rounded = damped[1] @ halves @ damped[0]
    found["in float64, of the gradient rounded to bfloat16"] = {"error": error(rounded, exact)}
    return found


def beside() -> dict[str, float]:
    """Inverses of a GPT's factors, and its forward and backward pass."""
    workload = WORKLOADS["G2"](DEVICE)
    stacks = []
    for count, n in FACTORS:
        rows = normal(count, n, 2 * n)
        stacks.append(rows @ rows.mT / n)
    stream = torch.cuda.Stream()

    def invert() -> list[torch.Tensor]:
        return [linalg.damped_inverse(x, 1e-3) for x in stacks]

    def passes() -> None:
        workload.loss().backward()
        workload.model.zero_grad()

    def together() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            invert()
        passes()
        torch.cuda.current_stream().wait_stream(stream)

    return {
        "inverses": milliseconds(invert),
        "passes": milliseconds(passes),
        "one after the other": milliseconds(lambda: (invert(), passes())),
        "on a stream of their own": milliseconds(together),
    }


def _measured(function: Callable[[], torch.Tensor], exact: torch.Tensor) -> dict[str, float]:
    result = function()
    found = error(result[0] if result.ndim == 3 else result, exact)
    del result
    return {"ms": milliseconds(function), "error": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=writable)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tables: dict[str, Any] = {}
    for n in (768, 3072):
        tables[f"second moments of {ROWS} x {n}"] = second_moments(n)
    for count, n in STACKS:
        tables[f"inverses of {count} x {n} x {n}, condition {CONDITION:.0e}"] = inverses(count, n)
    tables["directions of 12 x 3072 x 768"] = directions()
    for name, table in tables.items():
        print(name)
        for what, found in table.items():
            time_taken = f"{found['ms']:9.2f} ms" if "ms" in found else " " * 12
            print(f"  {what:50s}{time_taken}   error {found['error']:.1e}", flush=True)
    torch.set_float32_matmul_precision("high")
    tables["inverses and passes"] = beside()
    print("inverses and passes, ms", {k: round(v, 1) for k, v in tables["inverses and passes"].items()})
    record = {
        "command": " ".join(sys.argv),
        "versions": versions("torch"),
        "device": torch.cuda.get_device_name(),
        "seed": arguments.seed,
        "tables": tables,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
