"""What the step-time benchmark trains: a model, a batch, and a loss, by name."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from resnets import cifar_resnet, resnet50
from train_language_model import GPT


class Workload(NamedTuple):
    model: nn.Module
    loss: Callable[[], torch.Tensor]  # of one forward pass over its batch
    matrices: list[tuple[int, int]]  # (d_out, d_in) of the weights, for floors
    rows: list[int]  # of each of them, in one batch
    examples: int  # in one batch
    precision: Any = None  # autocast's dtype


def autoencoder(device: torch.device) -> Workload:
    """W1: 784-1000-500-250-30 and back, batch 256."""
    sizes = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return _of(nn.Sequential(*layers[:-1]).to(device), torch.rand(256, 784, device=device), F.mse_loss)


def resnet20(device: torch.device) -> Workload:
    """W2: ResNet-20, 32 x 32, batch 64."""
    model = cifar_resnet(depth=20, width=16, classes=10).to(device)
    x, y = torch.randn(64, 3, 32, 32, device=device), torch.randint(10, (64,), device=device)
    return _of(model, x, lambda output, _: F.cross_entropy(output, y))


def gpt(device: torch.device) -> Workload:
    """W3: a GPT, d = 256, 4 layers, sequence 128, batch 8."""
    model = GPT(vocabulary=128, context=128, width=256, heads=4, depth=4).to(device)
    tokens = torch.randint(128, (8, 129), device=device)
    return _of(model, tokens[:, :-1], lambda output, _: _next(output, tokens))


def many_small(device: torch.device) -> Workload:
    """W4: 200 layers of 64 x 64, batch 256; orthogonal, for torch's default leaves gradients of zero."""
    layers: list[nn.Module] = []
    for _ in range(200):
        layers += [nn.Linear(64, 64, bias=False), nn.Tanh()]
        nn.init.orthogonal_(layers[-2].weight)
    return _of(nn.Sequential(*layers).to(device), torch.randn(256, 64, device=device), F.mse_loss)


def one_large(device: torch.device) -> Workload:
    """W5: one 2048 x 2048, batch 256, as inside of a network: its input has a gradient, too."""
    model = nn.Linear(2048, 2048, bias=False).to(device)
    return _of(model, torch.randn(256, 2048, device=device, requires_grad=True), F.mse_loss)


def imagenet(device: torch.device) -> Workload:
    """G1, for a GPU: ResNet-50 in bfloat16, 224 x 224, batch 256, channels last in memory."""
    model = resnet50(classes=1000).to(device, memory_format=torch.channels_last)
    x, y = torch.randn(256, 3, 224, 224, device=device), torch.randint(1000, (256,), device=device)
    x = x.to(memory_format=torch.channels_last)
    return _of(model, x, lambda output, _: F.cross_entropy(output, y), torch.bfloat16)


def gpt2(device: torch.device) -> Workload:
    """G2, for a GPU: a GPT of 124 million parameters in bfloat16, sequence 1024, batch 8."""
    model = GPT(vocabulary=50304, context=1024, width=768, heads=12, depth=12).to(device)
    tokens = torch.randint(50304, (8, 1025), device=device)
    return _of(model, tokens[:, :-1], lambda output, _: _next(output, tokens), torch.bfloat16)


WORKLOADS: dict[str, Callable[[torch.device], Workload]] = {
    "W1": autoencoder,
    "W2": resnet20,
    "W3": gpt,
    "W4": many_small,
    "W5": one_large,
    "G1": imagenet,
    "G2": gpt2,
}


def _next(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten())


def _of(
    model: nn.Module,
    x: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    precision: Any = None,
) -> Workload:
    def run() -> torch.Tensor:
        with torch.autocast(x.device.type, precision, enabled=precision is not None):
            return loss(model(x), x)

    matrices, rows = [], []

    def look(module: Any, _: Any, output: torch.Tensor) -> None:
        weight = module.weight
        matrices.append((weight.shape[0], weight[0].numel()))
        channels = output.shape[1] if output.ndim == 4 else output.shape[-1]
        rows.append(output.numel() // channels)

    handles = [
        module.register_forward_hook(look)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return Workload(model, run, matrices, rows, len(x), precision)
