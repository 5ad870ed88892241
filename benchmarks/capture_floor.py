"""What K-FAC's capture costs in eager PyTorch, and the least that it could.

    OMP_NUM_THREADS=1 python benchmarks/capture_floor.py [--workloads W1 W4] [--rounds 25] [--seed 0]

A forward and backward pass of models of linear layers (see `workloads.py`): plain, with K-FAC's hooks
and their statistics, and with the least that makes the same sums: a hook behind each layer that puts an
identity there, whose backward rule adds aᵀa and gᵀg to running averages, two calls of `addmm_`. That one
knows nothing of biases, micro-batches, checkpointing, autocast, or numbers that are not finite.
Contenders take turns, one thread; process CPU seconds, medians, over the plain pass's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from options import whole
from suite.torch import KFAC
from workloads import WORKLOADS, Workload

WARM_UP = 3
LINEAR = ("W1", "W4")  # whose layers are all linear, of rows


class Least(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Any, x: Any, A: Any, G: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.sums = A, G
        return y.detach()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,), (A, G) = ctx.saved_tensors, ctx.sums
        A.addmm_(x.T, x, beta=0.95)
        G.addmm_(g.T, g, beta=0.95)
        return g, None, None, None


def plain(workload: Workload) -> Callable[[], None]:
    return lambda: None


def ours(workload: Workload) -> Callable[[], None]:
    kfac = KFAC(workload.model, compute_method="inverse")
    workload.loss().backward()
    kfac.step()  # the first finds out which layers share an input
    workload.model.zero_grad()
    return kfac.reset_batch


def least(workload: Workload) -> Callable[[], None]:
    for module in workload.model.modules():
        if isinstance(module, nn.Linear):
            running_sums(module)
    return lambda: None


def running_sums(layer: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """The averages, times 20, of aᵀa and gᵀg that passes through the layer add to from now on."""
    A, G = (torch.zeros(n, n) for n in (layer.in_features, layer.out_features))
    layer.register_forward_hook(lambda _, inputs, y: Least.apply(y, inputs[0], A, G))
    return A, G


CONTENDERS = {"plain": plain, "K-FAC": ours, "least": least}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=LINEAR, choices=LINEAR)
    parser.add_argument("--rounds", type=whole, default=25)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    for name in arguments.workloads:
        passes = {}
        for contender, attach in CONTENDERS.items():
            torch.manual_seed(arguments.seed)
            workload = WORKLOADS[name](torch.device("cpu"))
            passes[contender] = workload, attach(workload)
        seconds: dict[str, list[float]] = {contender: [] for contender in passes}
        for number in range(WARM_UP + arguments.rounds):
            for contender, (workload, forget) in passes.items():
                start = time.process_time()
                workload.loss().backward()
                spent = time.process_time() - start
                workload.model.zero_grad()
                forget()
                if number >= WARM_UP:
                    seconds[contender].append(spent)
        medians = {contender: statistics.median(all_of) for contender, all_of in seconds.items()}
        found[name] = {c: round(median / medians["plain"], 3) for c, median in medians.items()}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
