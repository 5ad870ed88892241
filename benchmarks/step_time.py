"""What a step costs: plain, with new statistics, with new inverses, over AdamW's and over the floor.

    OMP_NUM_THREADS=1 python benchmarks/step_time.py [--workloads W1 W3 W4 W5] [--cycles 5] \
        [--contenders AdamW 'Kron, dense'] [--peers] [--device cuda [--tf32]] [--compile [blocks]] \
        [--seed 0] [--json FILE] [--plot FILE]

Contenders take turns, a cycle of ten steps each, in one process. Times are process CPU seconds on a CPU
(one thread) and synchronized wall-clock seconds on a GPU; medians over all steps of a kind. On a GPU
amortised steps are from cycles of their own, in which nothing waits but at the end, and MiB is what
these allocate besides what is there. A peer that cannot be imported or fails is reported with its
exception.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from floors import FLOORS, IN_BLOCKS, Floor
from options import whole, writable
from step_contenders import CONTENDERS, EVERY, PEERS, PERIOD, Contender, OurKFAC
from suite.core.blocks import Structure
from table import floors_of_steps
from versions import versions
from workloads import WORKLOADS, Workload

EXACT, SUBSET = "K-FAC, inverse", "K-FAC, inverse, of 1/8 of the examples"
WITHOUT = "K-FAC, inverse, statistics every 10"
CONVOLUTIONS = ("W2", "G1")  # workloads that are also measured with fewer examples


_READS = ("aten::_local_scalar_dense", "aten::nonzero")  # operations whose result the host reads


class _Lists(TorchFunctionMode):
    """Counts `tolist`, which on a CPU is no operation."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.Tensor.tolist
        return function(*args, **(kwargs or {}))


def host_syncs(function: Callable[[], None], device: torch.device, lists: bool = True) -> int:
    """How often the host reads a number from a tensor in one call, and on a GPU waits for it.

    Args:
        lists: whether to count `tolist` on a CPU, for which torch.compile would compile anew.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(one.message) for one in caught)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler talks
    activities = [torch.profiler.ProfilerActivity.CPU]
    counted = _Lists()
    with counted if lists else nullcontext(), torch.profiler.profile(activities=activities) as seen:
        function()
    return counted.count + sum(e.count for e in seen.key_averages() if e.key in _READS)


def _syncs_by_kind(one: Contender, device: torch.device, lists: bool) -> dict[str, int]:
    """The most reads in a whole step of each kind, over one cycle."""
    most: dict[str, int] = {}
    for step in range(1, PERIOD + 1):
        kind = one.kind(step)
        most[kind] = max(most.get(kind, 0), host_syncs(lambda: _whole(one), device, lists))
    return most


def _whole(one: Contender) -> None:
    one.workload.loss().backward()
    one.step()


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def compiled(workload: Workload, what: str | None) -> Workload:
    """Have torch.compile compile nothing, the model with its loss, or its blocks.

    Blocks: modules of one class, one after the other. A model of torch's own classes (`nn.Sequential`)
    is only compiled from outside: torch skips what such a module's `compile()` is about.
    """
    if what == "model":
        return workload._replace(loss=torch.compile(workload.loss))
    for block in blocks_of(workload.model) if what else ():
        block.compile()
    return workload


def blocks_of(model: nn.Module) -> list[nn.Module]:
    lists = [list(part) for part in model.modules() if isinstance(part, nn.Sequential)]
    return [block for part in lists if len(part) > 1 == len({*map(type, part)}) for block in part]


def run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One workload: its floors and its contenders, in turns."""
    device = torch.device(arguments.device)
    failed: dict[str, str] = {}
    found: dict[str, Contender] = {}
    first: dict[str, float] = {}
    chosen = dict(arguments.chosen)
    if name in CONVOLUTIONS and {EXACT, WITHOUT} <= set(chosen):
        chosen[SUBSET] = lambda w: OurKFAC(w, compute_method="inverse", max_examples=w.examples // 8)
    for contender, make in chosen.items():
        torch.manual_seed(arguments.seed)
        workload = WORKLOADS[name](device)
        start = clock(device)
        try:
            found[contender] = make(workload)
            found[contender].workload = compiled(workload, arguments.compile)
            _step(found[contender], device)
        except Exception as error:  # a peer may fail in any way
            if contender not in PEERS:
                raise
            found.pop(contender, None)
            failed[contender] = repr(error)
        first[contender] = clock(device) - start
        if arguments.compile and contender in found:  # for steps of each kind something is compiled
            for _ in range(PERIOD):
                _step(found[contender], device)
    torch.manual_seed(arguments.seed)
    plain = compiled(WORKLOADS[name](device), arguments.compile)
    dense, blocks = Floor(plain, device), Floor(plain, device, Structure())
    bare = {what: functools.partial(function, dense) for what, function in FLOORS.items()}
    bare |= {what: functools.partial(function, blocks) for what, function in IN_BLOCKS.items()}
    times: dict[str, dict[str, list[tuple[float, float]]]] = {c: {} for c in found}
    passes: list[float] = []
    cycles: dict[str, list[float]] = {c: [] for c in found}
    peaks = dict.fromkeys(found, 0)
    floors: dict[str, list[float]] = {f: [] for f in bare}
    for _ in range(arguments.cycles):
        for what, function in bare.items():
            start = clock(device)
            function()
            floors[what].append(clock(device) - start)
        for _ in range(3):
            start = clock(device)
            plain.loss().backward()
            passes.append(clock(device) - start)
            plain.model.zero_grad()
        for contender, one in list(found.items()):
            try:
                for step in range(1, PERIOD + 1):  # a cycle ends with the costly step
                    kind = one.kind(step)
                    times[contender].setdefault(kind, []).append(_step(one, device))
                if device.type == "cuda":
                    seconds, peak = _cycle(one, device)
                    cycles[contender].append(seconds)
                    peaks[contender] = max(peaks[contender], peak)
            except Exception as error:  # a peer may fail in any way, at any time
                if contender not in PEERS:
                    raise
                del found[contender]
                failed[contender] = repr(error)
    lists = not arguments.compile
    syncs = {contender: _syncs_by_kind(one, device, lists) for contender, one in found.items()}
    parameters = sum(p.numel() for p in plain.model.parameters())
    report = {
        "device": device.type,
        "parameters": parameters,
        "forward_backward": statistics.median(passes),
        "floors": {what: statistics.median(all_of) for what, all_of in floors.items()},
        "contenders": {
            contender: {
                "first_step": first[contender],
                "transient_bytes": peaks[contender],
                "cycle": statistics.median(cycles[contender]) if cycles[contender] else None,
                "bytes_per_parameter": one.state_bytes() / parameters,
                "steps": {
                    kind: {
                        "total": _typical(kind, [a + b for a, b in seen]),
                        "optimizer": _typical(kind, [b for _, b in seen]),
                        "worst": max(a + b for a, b in seen),
                        "count": len(seen),
                        "host_syncs": syncs[contender][kind],
                    }
                    for kind, seen in times[contender].items()
                },
            }
            for contender, one in found.items()
        },
        "failed": failed,
    }
    if {EXACT, WITHOUT} <= set(found):
        report["statistics"] = {
            contender: _statistics(report, contender)
            for contender in (EXACT, SUBSET)
            if contender in found
        }
    for one in report["contenders"].values():
        steps = one["steps"].values()
        one["amortised"] = sum(s["total"] * s["count"] for s in steps) / sum(s["count"] for s in steps)
        if one["cycle"] is not None:
            one["amortised"] = one["cycle"] / PERIOD
    return report


def _cycle(one: Contender, device: torch.device) -> tuple[float, int]:
    """Seconds of ten steps on a GPU, and bytes that they allocate besides what was there."""
    torch.cuda.reset_peak_memory_stats(device)
    before, start = torch.cuda.memory_allocated(device), clock(device)
    for _ in range(PERIOD):
        _whole(one)
    return clock(device) - start, torch.cuda.max_memory_allocated(device) - before


def _statistics(report: dict[str, Any], contender: str) -> float:
    """What a step takes longer with statistics than without, over forward and backward."""
    steps = report["contenders"][contender]["steps"]["statistics"]["total"]
    without = report["contenders"][WITHOUT]["steps"]["plain"]["total"]
    return (steps - without) / report["forward_backward"]


def _typical(kind: str, times: list[float]) -> float:
    return statistics.mean(times) if kind == "mixed" else statistics.median(times)


def _step(one: Contender, device: torch.device) -> tuple[float, float]:
    start = clock(device)
    one.workload.loss().backward()
    middle = clock(device)
    one.step()
    return middle - start, clock(device) - middle


def table(report: dict[str, Any]) -> str:
    """Multiples of AdamW's whole step, and the optimizer's part over the floor."""
    adamw = report["contenders"]["AdamW"]["amortised"]
    floors = report["floors"]
    allocated = f"{'MiB':>8s}" if report["device"] == "cuda" else ""
    lines = [
        f"  floors / AdamW, new factors every {PERIOD}: {floors_of_steps(report)}",
        f"  {'':46s}{'amortised':>10s}{'plain':>8s}{'stats':>8s}{'costly':>8s}{'worst':>8s}"
        f"{'opt/floor':>11s}{'B/param':>9s}{'first s':>9s}{'host syncs':>12s}{allocated}",
    ]
    for name, one in report["contenders"].items():
        steps = one["steps"]
        cheap = steps.get("plain") or steps.get("statistics") or steps["mixed"]
        costly = steps.get("refresh") or steps.get("update")
        over = cheap["optimizer"] / floors["two products"]
        cells = [f"{one['amortised'] / adamw:10.2f}"]
        cells += [
            f"{s['total'] / adamw:8.2f}" if s else f"{'':8s}"
            for s in (steps.get("plain"), steps.get("statistics"), costly)
        ]
        cells += [f"{max(s['worst'] for s in steps.values()) / adamw:8.2f}", f"{over:11.2f}"]
        cells += [f"{one['bytes_per_parameter']:9.1f}", f"{one['first_step']:9.2f}"]
        cells += [f"{'/'.join(str(kind['host_syncs']) for kind in steps.values()):>12s}"]
        if one["transient_bytes"]:
            cells += [f"{one['transient_bytes'] / 2**20:8.0f}"]
        lines.append(f"  {name:46s}{''.join(cells)}")
    lines += [
        f"  statistics of {name} / (forward + backward): {ratio:.2f}"
        for name, ratio in report.get("statistics", {}).items()
    ]
    lines += [f"  {name}: failed: {error}" for name, error in report["failed"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["W1", "W3", "W4", "W5"], choices=WORKLOADS)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=EVERY)
    parser.add_argument("--peers", action="store_true", help="those that can be imported, too")
    parser.add_argument("--cycles", type=whole, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tf32", action="store_true", help="for products of float32 on a GPU")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="model",
        choices=("model", "blocks"),
        help="by torch.compile, models or each of their blocks",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=writable)
    parser.add_argument("--plot", type=writable)
    arguments = parser.parse_args()
    try:
        torch.zeros(1, device=arguments.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device must be one that is here, got {arguments.device}: {error}")
    arguments.chosen = {
        name: make
        for name, make in EVERY.items()
        if name in {"AdamW", *arguments.contenders}  # AdamW is the unit
    }
    if arguments.peers:
        arguments.chosen |= PEERS
    torch.set_float32_matmul_precision("high" if arguments.tf32 else "highest")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # contenders' models are alike but for hooks
    warnings.filterwarnings("ignore")
    reports = {}
    for name in arguments.workloads:
        doc = WORKLOADS[name].__doc__ or ""
        reports[name] = run(name, arguments)
        print(f"{doc}\n{table(reports[name])}\n", flush=True)
        gc.collect()
    record = {
        "command": shlex.join(["step_time.py", *sys.argv[1:]]),
        "versions": versions("torch", "kron_torch", "heavyball"),
        "device": _device_name(arguments.device),
        "seed": arguments.seed,
        "workloads": reports,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.plot:
        _plot(record, arguments.plot)


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _plot(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reports = record["workloads"]
    figure, axes = pyplot.subplots(1, len(reports), figsize=(4 * len(reports), 4), squeeze=False)
    for axis, (name, report) in zip(axes[0], reports.items(), strict=True):
        adamw = report["contenders"]["AdamW"]["amortised"]
        names = list(report["contenders"])
        axis.barh(names, [report["contenders"][n]["amortised"] / adamw for n in names])
        axis.invert_yaxis()
        axis.set_title(name)
        axis.set_xlabel("amortised step / AdamW's")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
