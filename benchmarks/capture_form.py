"""K-FAC's capture as an identity behind each layer, against one fused with the layer's product.

    OMP_NUM_THREADS=1 python benchmarks/capture_form.py

A forward and backward pass of an autoencoder (784-1000-500-250-30 and back, batch 256, seed 0), with the
statistics of every layer. The contenders take turns; process CPU seconds, medians and their ratios to
the plain pass, and the bytes that autograd saves for the backward pass.
"""

from __future__ import annotations

import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from suite.torch.capture import _Probe
from suite.torch.rows import LayerSpec, sums

SIZES = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
SPEC = LayerSpec("dense", bias=True)
ROUNDS, WARM_UP = 25, 3


class Fused(torch.autograd.Function):
    """The product itself, whose backward pass returns the statistics, too."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, A: Any, G: Any, counts: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        found = sums(SPEC, x, gradient, noise=None)
        return gradient @ weight, gradient.T @ x, gradient.sum(0), found.A, found.G, found.counts


def plain(layer: nn.Linear, x: torch.Tensor, slots: Any) -> torch.Tensor:
    return layer(x)


def identity(layer: nn.Linear, x: torch.Tensor, slots: Any) -> Any:
    return _Probe.apply(layer(x), x, *slots, None, None, None, None, None, SPEC, None)


def fused(layer: nn.Linear, x: torch.Tensor, slots: Any) -> Any:
    return Fused.apply(x, layer.weight, layer.bias, *slots)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(SIZES)]
    slots = [
        [
            torch.zeros(()).expand(shape).requires_grad_()
            for shape in ((1, a + 1, a + 1), (1, b, b), (2,))
        ]
        for a, b in itertools.pairwise(SIZES)
    ]
    x = torch.randn(256, SIZES[0])

    def forward(kind: Callable[..., Any]) -> torch.Tensor:
        h = x
        for layer, own in zip(layers, slots, strict=True):
            h = torch.tanh(kind(layer, h, own))
        return (h - x).square().mean()

    seconds: dict[str, list[float]] = {kind.__name__: [] for kind in (plain, identity, fused)}
    saved: dict[str, int] = {}
    for _ in range(ROUNDS + WARM_UP):
        for kind in (plain, identity, fused):
            start = time.process_time()
            forward(kind).backward()
            seconds[kind.__name__].append(time.process_time() - start)
            for tensor in [*(p for m in layers for p in m.parameters()), *itertools.chain(*slots)]:
                tensor.grad = None
    for kind in (plain, identity, fused):
        held: dict[int, int] = {}

        def pack(tensor: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(kind)
        saved[kind.__name__] = sum(held.values())
    medians = {name: statistics.median(times[WARM_UP:]) for name, times in seconds.items()}
    report = {
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "cpu_seconds": medians,
        "times_plain": {name: value / medians["plain"] for name, value in medians.items()},
        "saved_bytes": saved,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
