"""The race in PyTorch: its problems' models and losses, its contenders and peers."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import race_problems as problems
from race_grids import (
    DECAYS,
    KRON_VARIANTS,
    Contender,
    Grid,
    Training,
    adam_grid,
    around,
    kfac_grid,
    kron_grid,
    muon_grid,
    sgd_grid,
)
from race_problems import Problem, randoms
from step_contenders import kron_torch_class
from suite.torch import KFAC, AdaptiveKFAC, Kron
from train_language_model import GPT
from train_pinn import Network, solution
from versions import versions

Tensor = torch.Tensor
Closure = Callable[[], tuple[Tensor, Tensor]]  # a loss, and the outputs or residuals that it is made of


class Start(NamedTuple):
    """One run, before its first step."""

    model: nn.Module
    draw: Callable[[], Closure]  # of the next minibatch
    evaluate: Callable[[], Tensor]  # what has to reach the target


# ---- problems ------------------------------------------------------------------------------------


def autoencoder(seed: int, data: Callable[[], problems.Autoencoder]) -> Start:
    given = data()
    weights, draws = randoms(seed)
    layers: list[nn.Module] = []
    for number, (weight, bias) in enumerate(given.first(weights)):
        layers.append(nn.Linear(weight.shape[1], weight.shape[0]))
        _set(layers[-1].weight, weight)
        _set(layers[-1].bias, bias)
        if number != given.code:
            layers.append(nn.Tanh())
    model = nn.Sequential(*layers[:-1])
    x, sample, entropy = torch.from_numpy(given.images), torch.from_numpy(given.sample), given.entropy
    rows = given.batches(draws)

    def nats(images: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(images)
        total = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        return total / len(images), logits

    def draw() -> Closure:
        return functools.partial(nats, x[torch.from_numpy(next(rows))])

    return Start(model, draw, lambda: nats(sample)[0] - entropy)


def poisson(seed: int) -> Start:
    """-Δu = 2π² sin(πx) sin(πy) on the unit square, u = 0 around it; the same points in every step."""
    weights, draws = randoms(seed)
    first = problems.poisson_first(weights)
    model = Network(len(first[0]), len(first) - 1)
    for layer, weight in zip(model.layers, first, strict=True):
        _set(layer.weight, weight)
    inside, boundary = map(torch.from_numpy, problems.poisson_points(draws))

    def loss() -> tuple[Tensor, Tensor]:
        u = model(torch.cat([inside, boundary]))
        residual = u[: len(inside), 3] / (2 * math.pi**2) + solution(inside, 1)
        parts = residual, u[len(inside) :, 0]
        residuals = torch.cat([part / len(part) ** 0.5 for part in parts])
        return residuals.square().sum(), residuals

    return Start(model, lambda: loss, lambda: loss()[0])


class Recurrent(nn.Module):
    """A tanh RNN, in layers that are called once a step."""

    def __init__(self, first: dict[str, np.ndarray]) -> None:
        super().__init__()
        width = len(first["keep"])
        self.read, self.keep = nn.Linear(2, width), nn.Linear(width, width, bias=False)
        self.write = nn.Linear(width, 1)
        for name in ("read", "keep", "write"):
            layer = getattr(self, name)
            _set(layer.weight, first[name])
            if layer.bias is not None:
                _set(layer.bias, first[f"{name} bias"])

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], self.write.in_features)
        for seen in x:
            h = torch.tanh(self.read(seen) + self.keep(h))
        return self.write(h)[:, 0]


def delayed_xor(seed: int) -> Start:
    weights, draws = randoms(seed)
    model = Recurrent(problems.xor_first(weights))

    def nats(x: Tensor, odd: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        return F.binary_cross_entropy_with_logits(logits, odd), logits

    fixed = [torch.from_numpy(a) for a in problems.xor_fixed()]
    return Start(
        model,
        lambda: functools.partial(nats, *map(torch.from_numpy, problems.xor_sequences(draws))),
        lambda: nats(*fixed)[0],
    )


@functools.cache
def text() -> Tensor:
    """The characters of Python's argparse module, as numbers."""
    characters = Path(argparse.__file__).read_text()
    letters = {letter: number for number, letter in enumerate(sorted(set(characters)))}
    return torch.tensor([letters[letter] for letter in characters])


def characters(seed: int, context: int = 32, batch: int = 16) -> Start:
    """The next character of a text."""
    data, draws = text(), torch.Generator().manual_seed(seed)
    model = GPT(int(data.max()) + 1, context, width=64, heads=4, depth=2)
    fixed = torch.linspace(0, len(data) - context - 2, 128).long()

    def rows(starts: Tensor) -> Tensor:
        return data[starts[:, None] + torch.arange(context + 1)]

    def nats(rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(rows[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, rows[:, 1:].flatten()), logits

    def draw() -> Closure:
        starts = torch.randint(len(data) - context - 1, (batch,), generator=draws)
        return functools.partial(nats, rows(starts))

    return Start(model, draw, lambda: nats(rows(fixed))[0])


def convolutions(widths: Sequence[int]) -> nn.Module:
    """3 x 3 convolutions of 12 x 12 x 3 images, all but the first with stride 2, then 10 classes."""
    layers: list[nn.Module] = []
    for number, (a, b) in enumerate(itertools.pairwise([3, *widths])):
        layers += [nn.Conv2d(a, b, 3, stride=1 if number == 0 else 2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(9 * widths[-1], 10))


@functools.cache
def taught(count: int = 2048) -> tuple[Tensor, Tensor]:
    """Random images, and the probabilities that a random network, its logits scaled to 2, gives them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(count, 3, 12, 12)
        with torch.no_grad():
            logits = convolutions((8, 8, 8))(x)
        logits = logits - logits.mean(0)
        return x, (2 * logits / logits.std()).softmax(1)


def student(seed: int, batch: int) -> Start:
    """The divergence of a student, twice as wide, from its teacher."""
    (x, y), draws = taught(), torch.Generator().manual_seed(seed)
    model = convolutions((16, 16, 16))

    def nats(images: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(images)
        return F.cross_entropy(logits, probabilities), logits

    def draw() -> Closure:
        rows = torch.randint(len(x), (batch,), generator=draws)
        return functools.partial(nats, x[rows], y[rows])

    sample = x[:512], y[:512]
    entropy = -torch.xlogy(sample[1], sample[1]).sum() / 512
    return Start(model, draw, lambda: nats(*sample)[0] - entropy)


@torch.no_grad()
def _set(parameter: Tensor, value: np.ndarray) -> None:
    parameter.copy_(torch.from_numpy(value))


STARTS: dict[str, Callable[[int], Start]] = {
    "digits": functools.partial(autoencoder, data=problems.digits),
    "curves": functools.partial(autoencoder, data=problems.curves),
    "poisson": poisson,
    "characters": characters,
    "xor": delayed_xor,
    **{f"student {batch}": functools.partial(student, batch=batch) for batch in (16, 64, 256)},
}


# ---- contenders ----------------------------------------------------------------------------------


def begin(
    start: Callable[[int], Start], make: Callable[..., Any], warm: int, seed: int, **point: float
) -> Training:
    """`warm` steps of a throwaway come first: what they compile is compiled when the clock starts."""

    def fresh() -> Training:
        torch.manual_seed(seed)
        run = start(seed)
        optimizer = make(run.model, **point)

        def draw(count: int) -> list[Closure]:
            return [run.draw() for _ in range(count)]

        def take(minibatches: Sequence[Closure]) -> None:
            for closure in minibatches:
                if isinstance(optimizer, AdaptiveKFAC):
                    optimizer.step(closure)
                else:
                    closure()[0].backward()
                    optimizer.step()
                optimizer.zero_grad()

        @torch.no_grad()
        def evaluate() -> float:
            return run.evaluate().item()

        return Training(draw, take, evaluate)

    if not warm:
        return fresh()
    began = time.perf_counter()
    throwaway = fresh()
    throwaway.take(throwaway.draw(warm))
    compiling = time.perf_counter() - began
    return fresh()._replace(compile_seconds=compiling)


def contenders(name: str, problem: Problem, *, variants: bool = False) -> dict[str, Contender]:
    def kfac(**settings: Any) -> Contender:
        def make(model: nn.Module, damping: float, lr: float = 0.1, kl_clip: float = 0.001) -> KFAC:
            base = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
            return KFAC(model, base, damping=damping, kl_clip=kl_clip, **settings)

        return _contender(name, make, kfac_grid(problem))

    def kron(**settings: Any) -> Contender:
        def make(model: nn.Module, **tuned: float) -> Kron:
            return Kron(model.parameters(), **settings, **tuned)

        return _contender(name, make, kron_grid(problem))

    def sgd(model: nn.Module, lr: float, momentum: float) -> Any:
        return torch.optim.SGD(model.parameters(), lr, momentum)

    def adamw(model: nn.Module, lr: float, b2: float) -> Any:
        return torch.optim.AdamW(model.parameters(), lr, betas=(0.9, b2), weight_decay=0.0)

    found = {
        "SGD": _contender(name, sgd, sgd_grid(problem)),
        "AdamW": _contender(name, adamw, adam_grid(problem)),
        "Kron": kron(),
        "Kron, every 5": kron(preconditioner_update_probability=0.2),
        "K-FAC": kfac(compute_method="inverse", inv_update_steps=5),
        "K-FAC, every 5": kfac(compute_method="inverse", inv_update_steps=5, factor_update_steps=5),
    }

    def adaptive(model: nn.Module, damping: float) -> AdaptiveKFAC:
        return AdaptiveKFAC(KFAC(model, damping=damping, compute_method="inverse", inv_update_steps=5))

    found["K-FAC, adaptive"] = _contender(name, adaptive, {"damping": (0.1,)})  # nothing to tune
    if problem.small:
        found["K-FAC, eigen"] = kfac(compute_method="eigen", inv_update_steps=5)
    if variants:
        found |= {label: kron(**settings) for label, settings in KRON_VARIANTS.items()}
        found |= {
            f"K-FAC, every {n}": kfac(
                compute_method="inverse", inv_update_steps=n, factor_update_steps=n
            )
            for n in (10, 20)
        }
    return found


def heavyball_class(name: str) -> Any:
    import heavyball

    return getattr(heavyball, name)


class Together(NamedTuple):
    """Optimizers of different parameters, as one."""

    optimizers: list[torch.optim.Optimizer]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def torch_muon(model: nn.Module, lr: float, momentum: float) -> Together:
    """Muon of the matrices but embeddings, AdamW of the rest, as its documentation says; one rate."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and p not in tables]
    rest = [p for p in model.parameters() if p.ndim != 2 or p in tables]
    settings: dict[str, Any] = {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(matrices, lr, momentum=momentum, **settings)
    return Together([muon, *([torch.optim.AdamW(rest, lr, weight_decay=0.0)] if rest else [])])


def peers(name: str, problem: Problem) -> dict[str, Contender]:
    """Each in its own way: kron_torch and heavyball compile their steps."""
    if "torch._dynamo" in sys.modules:  # whose limit of recompilations problems before may have reached
        torch._dynamo.reset()

    def kron_torch(model: nn.Module, **tuned: float) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints how large its factors are
            return kron_torch_class()(model.parameters(), **tuned)

    def psgd(model: nn.Module, lr: float, b1: float) -> Any:
        return heavyball_class("PSGDKron")(model.parameters(), lr, beta=b1)

    def soap(model: nn.Module, lr: float, b2: float) -> Any:
        return heavyball_class("SOAP")(model.parameters(), lr, betas=(0.9, b2), weight_decay=0.0)

    def muon(model: nn.Module, lr: float, b1: float) -> Any:
        return heavyball_class("Muon")(model.parameters(), lr, betas=(b1, 0.99))

    rates = around(3 * problem.rates[2], math.sqrt(10), 5)  # of Muon, whose steps are shorter
    return {
        "torch.optim.Muon": _contender(name, torch_muon, muon_grid(problem)),
        "kron_torch": _contender(name, kron_torch, kron_grid(problem), warm=3),
        "heavyball PSGDKron": _contender(name, psgd, kron_grid(problem), warm=3),
        "heavyball SOAP": _contender(name, soap, adam_grid(problem), warm=3),
        "heavyball Muon": _contender(name, muon, {"lr": rates, "b1": DECAYS}, warm=3),
    }


def _contender(name: str, make: Callable[..., Any], grid: Grid, warm: int = 0) -> Contender:
    return Contender(functools.partial(begin, STARTS[name], make, warm), grid)


def prepare() -> dict[str, str]:
    """The process is set up; versions."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    return versions("torch", "kron_torch", "heavyball")
