"""What a step takes on a GPU when it is recorded as a CUDA graph, and as ever.

    python benchmarks/graphs.py [--workloads W1 W3 W4 W5] [--cycles 7] [--json FILE]

Contenders take turns, a cycle of ten steps each, in which nothing waits but at the end; medians of
wall-clock time. Inverses, and Kron's factors, are renewed in every tenth step.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from options import whole, writable
from step_contenders import PERIOD
from suite.torch import KFAC, GraphedStep, Kron
from suite.torch.recorders import CUDAGraphs
from versions import versions
from workloads import WORKLOADS, Workload

Step = Callable[[], Any]
FIRST = 4 * PERIOD  # steps before any is measured: kinds of steps are recorded, or compiled


def as_ever(workload: Workload, optimizer: Any, step: Step | None = None) -> Step:
    def take() -> None:
        workload.loss().backward()
        (step or optimizer.step)()
        optimizer.zero_grad()

    return take


def adamw(workload: Workload, *, recorded: bool, fused: bool = True) -> Step:
    parameters = list(workload.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=fused, capturable=recorded)
    take = as_ever(workload, optimizer)
    if not recorded:
        return take
    graphs = CUDAGraphs(parameters[0].device)
    for _ in range(3):
        graphs.run(take)
    replay, _ = graphs.record(take)
    everything = workload, optimizer, graphs  # the graph knows but addresses

    def again() -> None:
        assert everything
        replay()

    return again


def kron(workload: Workload, mode: str | None = None, *, recorded: bool = False) -> Step:
    optimizer = Kron(workload.model.parameters(), lr=1e-4, preconditioner_update_probability=1 / PERIOD)
    if recorded:
        return GraphedStep(optimizer, workload.loss, workload.model)
    return as_ever(workload, optimizer, torch.compile(optimizer.step, mode=mode) if mode else None)


def kfac(workload: Workload, every: int, *, recorded: bool) -> Step:
    base = torch.optim.SGD(workload.model.parameters(), lr=1e-4, momentum=0.9, fused=True)
    settings = {"compute_method": "inverse", "inv_update_steps": PERIOD, "factor_update_steps": every}
    optimizer = KFAC(workload.model, base, **settings)
    return GraphedStep(optimizer, workload.loss) if recorded else as_ever(workload, optimizer)


CONTENDERS: dict[str, Callable[[Workload], Step]] = {
    "AdamW": functools.partial(adamw, recorded=False, fused=False),
    "AdamW, fused": functools.partial(adamw, recorded=False),
    "AdamW, fused, recorded": functools.partial(adamw, recorded=True),
    "Kron": kron,
    "Kron, recorded": functools.partial(kron, recorded=True),
    "Kron, step compiled": functools.partial(kron, mode="default"),
    "Kron, step compiled with graphs": functools.partial(kron, mode="reduce-overhead"),
    "K-FAC, inverse": functools.partial(kfac, every=1, recorded=False),
    "K-FAC, inverse, recorded": functools.partial(kfac, every=1, recorded=True),
    "K-FAC, inverse, statistics every 10": functools.partial(kfac, every=PERIOD, recorded=False),
    "K-FAC, inverse, statistics every 10, recorded": functools.partial(
        kfac, every=PERIOD, recorded=True
    ),
}


def seconds(take: Step, steps: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        take()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One workload: for each contender milliseconds of a step, amortised and of the kinds."""
    report: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    for contender in arguments.contenders:
        torch.manual_seed(arguments.seed)
        memory = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            steps[contender] = take = CONTENDERS[contender](WORKLOADS[name](torch.device("cuda")))
            seconds(take, FIRST)
        except Exception as error:  # of torch.compile: another may work
            if "compiled" not in contender:
                raise
            steps.pop(contender, None)
            report[contender] = {"failed": repr(error)[:500]}
            continue
        peak = torch.cuda.max_memory_allocated() - memory
        report[contender] = {"first_steps": time.perf_counter() - start, "peak_bytes": peak}
    cycles: dict[str, list[float]] = {contender: [] for contender in steps}
    cheap: dict[str, list[float]] = {contender: [] for contender in steps}
    for _ in range(arguments.cycles):
        for contender, take in steps.items():
            # A cycle begins with the costly step, as counted from the first.
            costly, rest = seconds(take, 1), seconds(take, PERIOD - 1)
            cheap[contender].append(rest / (PERIOD - 1))
            report[contender].setdefault("costly", []).append(costly)
            cycles[contender].append(seconds(take, PERIOD) / PERIOD)
    for contender in steps:
        own = report[contender]
        own["amortised"] = statistics.median(cycles[contender])
        own["cheap"] = statistics.median(cheap[contender])
        own["costly"] = statistics.median(own["costly"])
    return report


def table(report: dict[str, Any]) -> str:
    """Milliseconds, and amortised steps over those of AdamW as ever and recorded."""
    lines = [
        f"  {'':46s}{'ms':>9s}{'cheap':>9s}{'costly':>9s}{'/ AdamW':>9s}{'/ recorded':>11s}{'MiB':>8s}"
    ]
    first = [report[name]["amortised"] for name in ("AdamW", "AdamW, fused, recorded") if name in report]
    for name, own in report.items():
        if "failed" in own:
            lines.append(f"  {name:46s} failed: {own['failed']}")
            continue
        numbers = "".join(f"{own[key] * 1e3:9.3f}" for key in ("amortised", "cheap", "costly"))
        over = "".join(f"{own['amortised'] / other:10.2f}" for other in first)
        lines.append(f"  {name:46s}{numbers}{over}{own['peak_bytes'] / 2**20:8.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["W1", "W3", "W4", "W5"], choices=WORKLOADS)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--cycles", type=whole, default=7)
    parser.add_argument("--tf32", action="store_true", help="for products of float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=writable)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU that has CUDA graphs")
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("high" if arguments.tf32 else "highest")
    command = vars(arguments) | {"json": None}
    record = {"versions": versions("torch"), "device": torch.cuda.get_device_name(), "options": command}
    record["workloads"] = {}
    for name in arguments.workloads:
        record["workloads"][name] = run(name, arguments)
        print(
            f"{name}: {(WORKLOADS[name].__doc__ or '').strip()}\n{table(record['workloads'][name])}",
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
