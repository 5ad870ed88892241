"""Bucketed exchange against one collective for each tensor, over gloo on this machine.

    OMP_NUM_THREADS=1 python benchmarks/exchange.py [--world 2] [--repeats 15] [--json FILE]

K-FAC steps on the layers of a small residual network, statistics and inverses at every step, with
buckets of 25 MB and with none; both in one run, taking turns. Prints medians of the communicating
phases' time and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from options import whole, writable
from resnets import cifar_resnet
from suite.torch import KFAC
from versions import versions


def job(rank: int, world: int, store: str, repeats: int, out: str) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    runs = {}
    for name, megabytes in (("bucketed", 25.0), ("one by one", 0.0)):
        torch.manual_seed(0)
        model = cifar_resnet(depth=20, width=8, classes=10)
        kfac = KFAC(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            compute_method="inverse",
            gradient_worker_fraction="COMM_OPT",
            allreduce_bucket_cap_mb=megabytes,
        )
        runs[name] = (model, kfac, [])
    x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    for repeat in range(repeats + 2):
        for model, kfac, times in runs.values():
            torch.nn.functional.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            spent = [0.0]
            _time_communication(kfac, spent)
            dist.barrier()
            kfac.step()
            kfac.zero_grad()
            if repeat >= 2:
                times.append(spent[0])
    if rank == 0:
        medians = {name: statistics.median(times) for name, (_, _, times) in runs.items()}
        calls = {
            name: sum(kfac._engine.ranks.collectives.values()) / (repeats + 2)
            for name, (_, kfac, _) in runs.items()
        }
        result = {
            "seconds": medians,
            "collectives per step": calls,
            "ratio": medians["one by one"] / medians["bucketed"],
            "world": world,
            "repeats": repeats,
            "versions": versions("torch"),
            "seed": 0,
        }
        Path(out).write_text(json.dumps(result, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def _time_communication(kfac: KFAC, spent: list[float]) -> None:
    """Make the exchanges of this step add their time to `spent`."""
    ranks = kfac._engine.ranks
    for name in ("sum_to_owners", "send"):
        method = getattr(type(ranks), name)

        def timed(*args, _method=method, **kwargs):
            start = time.perf_counter()
            result = _method(ranks, *args, **kwargs)
            spent[0] += time.perf_counter() - start
            return result

        setattr(ranks, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=whole, default=2)
    parser.add_argument("--repeats", type=whole, default=15)
    parser.add_argument("--json", type=writable)
    given = parser.parse_args()
    folder = tempfile.mkdtemp()
    out = os.path.join(folder, "result.json")
    mp.spawn(job, (given.world, os.path.join(folder, "store"), given.repeats, out), given.world)
    result = json.loads(Path(out).read_text())
    for name, seconds in result["seconds"].items():
        print(
            f"{name:12} {1e3 * seconds:8.2f} ms  {result['collectives per step'][name]:6.1f} collectives"
        )
    print(f"one by one / bucketed: {result['ratio']:.2f}")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
