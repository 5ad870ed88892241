"""Bytes of all tensors at the worst moment of a step, by torch's profiler, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/peak_memory.py [--workload W1] \
        [--contenders 'K-FAC, inverse' 'K-FAC, inverse, packed'] [--seed 0]

Model, batch, gradients and what forward and backward keep are counted, too. Bytes a parameter.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import warnings
from pathlib import Path

import torch

from step_contenders import EVERY, PERIOD
from workloads import WORKLOADS

_MARK = "step: "


def peaks(workload: str, contender: str, seed: int) -> tuple[float, dict[str, float]]:
    """Bytes of state, and at the worst moment of each kind of step; the first is left out."""
    torch.manual_seed(seed)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        one = EVERY[contender](WORKLOADS[workload](torch.device("cpu")))
        for step in range(PERIOD + 1):
            with torch.profiler.record_function(_MARK + one.kind(step)):
                one.workload.loss().backward()
                one.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(_MARK)]
    spans = [(e["name"].removeprefix(_MARK), e["ts"], e["ts"] + e["dur"]) for e in steps]
    spans = sorted(spans, key=lambda span: span[1])[1:]
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    parameters = sum(p.numel() for p in one.workload.model.parameters())
    most: dict[str, float] = {}
    now = 0
    for event in changes:
        now += event["args"]["Bytes"]
        for kind, start, stop in spans:
            if start <= event["ts"] <= stop:
                most[kind] = max(most.get(kind, 0.0), now / parameters)
    return one.state_bytes() / parameters, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="W1", choices=WORKLOADS)
    parser.add_argument("--contenders", nargs="+", default=list(EVERY), choices=EVERY)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler talks
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print(f"{arguments.workload}, bytes a parameter, torch {torch.__version__}, seed {arguments.seed}")
    for name in arguments.contenders:
        state, most = peaks(arguments.workload, name, arguments.seed)
        worst = ", ".join(f"{kind} {found:.1f}" for kind, found in most.items())
        print(f"  {name:46s} state {state:5.1f}  worst moment: {worst}", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
