"""The demo's models, optimizers and training step in PyTorch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import digits
from suite.torch import KFAC, Kron


class Autoencoder(nn.Module):
    """Linear layers with tanh between them."""

    def __init__(self, weights: digits.Weights) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(w.shape[1], w.shape[0]) for w, _ in weights)
        fill(self, weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class ConvNet(nn.Module):
    """Convolutions with ReLU, then a linear classifier."""

    def __init__(self, weights: digits.Weights) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(w.shape[1], w.shape[0], 3, stride, padding=1)
            for (w, _), stride in zip(weights[:-1], digits.CONVNET_STRIDES, strict=True)
        )
        self.classifier = nn.Linear(weights[-1][0].shape[1], digits.CLASSES)
        fill(self, weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, 1, 8, 8)
        for convolution in self.convolutions:
            x = torch.relu(convolution(x))
        return self.classifier(x.flatten(1))


def fill(model: nn.Module, weights: digits.Weights) -> None:
    """Give a model its initial weights."""
    arrays = [array for pair in weights for array in pair]
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(array))


def loss_of(problem: str, outputs: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What is minimized, see `digits.py`."""
    if problem == "autoencoder":
        return (outputs - x).square().sum(1).mean()
    return F.cross_entropy(outputs, y, label_smoothing=digits.LABEL_SMOOTHING) - digits.LABEL_ENTROPY


def make_optimizer(name: str, model: nn.Module, settings: dict[str, Any], seed: int) -> Any:
    """A contender, with its settings from `contenders.py`."""
    settings = dict(settings)
    if name == "adamw":
        betas = (settings.pop("b1"), settings.pop("b2"))
        return torch.optim.AdamW(model.parameters(), betas=betas, **settings)
    if name == "kfac":
        descent = {key: settings.pop(key) for key in ("lr", "momentum", "weight_decay")}
        return KFAC(model, torch.optim.SGD(model.parameters(), **descent), **settings)
    return Kron(model.parameters(), seed=seed, **settings)


class Session:
    """A `digits.Session` in PyTorch, on the CPU."""

    def __init__(
        self, problem: str, optimizer: str, settings: dict[str, Any], seed: int, steps: int
    ) -> None:
        self._problem = problem
        start = time.perf_counter()
        self._begin(optimizer, settings, seed, steps)
        self.step(np.zeros((digits.BATCH_SIZE, 64), np.float32), np.zeros(digits.BATCH_SIZE, np.int32))
        self._begin(optimizer, settings, seed, steps)
        self.setup_seconds = time.perf_counter() - start

    def _begin(self, optimizer: str, settings: dict[str, Any], seed: int, steps: int) -> None:
        kind = Autoencoder if self._problem == "autoencoder" else ConvNet
        self._model = kind(digits.initial_weights(self._problem, seed))
        self._optimizer = make_optimizer(optimizer, self._model, settings, seed)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
        )

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        loss, _ = self._forward(x, y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._schedule.step()
        return loss.item()

    def _forward(self, x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = torch.from_numpy(x), torch.from_numpy(y).long()
        outputs = self._model(inputs)
        right = (outputs.argmax(1) == labels).float().mean()
        return loss_of(self._problem, outputs, inputs, labels), right

    @torch.no_grad()
    def evaluate(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        loss, right = self._forward(x, y)
        return loss.item(), math.nan if self._problem == "autoencoder" else right.item()

    def optimizer_bytes(self) -> int:
        optimizer = self._optimizer
        own = sum(optimizer.memory_usage().values()) if isinstance(optimizer, KFAC | Kron) else 0
        if isinstance(optimizer, Kron):
            return own
        state = [x for values in optimizer.state.values() for x in values.values()]
        return own + sum(x.nbytes for x in state if isinstance(x, torch.Tensor))

    def skipped_steps(self) -> int:
        return getattr(self._optimizer, "skipped_steps", 0)


@contextmanager
def surroundings() -> Iterator[None]:
    """One thread, as these models are too small to share; denormal numbers, which are slow, are zero."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
