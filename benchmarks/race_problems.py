"""What the race trains: six problems, each a model, a minibatch loss, and a target.

A seed gives the initial weights and the minibatches. The data, and what `evaluate` averages over, are
the same for all seeds: training data, since this is about optimization.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from train_language_model import GPT
from train_pinn import Network, draw_points, solution

Tensor = torch.Tensor


class Start(NamedTuple):
    """One run, before its first step."""

    model: nn.Module
    loss: Callable[[], Tensor]  # of the next minibatch
    evaluate: Callable[[], Tensor]  # what has to reach the target


class Problem(NamedTuple):
    """A race. Of the grids only the centres differ from one problem to the next."""

    about: str
    start: Callable[[int], Start]  # from a seed
    target: float  # of `evaluate`
    budget: int  # steps
    every: int = 10  # steps from one evaluation to the next
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # of AdamW and Kron
    sgd: float = 0.1  # learning rate
    kfac_step: tuple[str, float] = ("kl_clip", 0.001)  # what tells how long a step is, and its centre
    damping: float = 0.01
    small: bool = False  # enough for eigendecompositions to take part


# ---- data ----------------------------------------------------------------------------------------


@functools.cache
def digits() -> Tensor:
    """(1797, 64) pixels in [0, 1]."""
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().data / 16, dtype=torch.float32)


@functools.cache
def curves(count: int = 2000, side: int = 28, dots: int = 60) -> Tensor:
    """(count, side²) images in [0, 1] of cubic Bézier curves with random control points."""
    random = torch.Generator().manual_seed(0)
    control = side * (0.1 + 0.8 * torch.rand(count, 4, 2, generator=random))
    t = torch.linspace(0, 1, dots)[:, None]
    bernstein = torch.cat([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3], 1)
    points = bernstein @ control  # (count, dots, 2)
    pixels = torch.arange(side) + 0.5
    bumps = torch.exp(-0.5 * ((points[..., None] - pixels) / 0.8) ** 2)  # (count, dots, 2, side)
    images = torch.zeros(count, side, side)
    for dot in range(dots):
        torch.maximum(images, bumps[:, dot, 0, :, None] * bumps[:, dot, 1, None, :], out=images)
    return images.flatten(1)


@functools.cache
def text() -> Tensor:
    """The characters of Python's argparse module, as numbers."""
    characters = Path(argparse.__file__).read_text()
    letters = {letter: number for number, letter in enumerate(sorted(set(characters)))}
    return torch.tensor([letters[letter] for letter in characters])


# ---- problems ------------------------------------------------------------------------------------


def autoencoder(seed: int, data: Callable[[], Tensor], sizes: Sequence[int], batch: int) -> Start:
    """`sizes`, mirrored: tanh, a linear code, Bernoulli pixels.

    The last layer starts at the mean image's logits; `evaluate` subtracts the entropy of the pixels.
    """
    sides = [*sizes, *sizes[-2::-1]]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sides):
        layers += [nn.Linear(a, b), nn.Tanh()]
        nn.init.xavier_normal_(layers[-2].weight)
        nn.init.zeros_(layers[-2].bias)
    del layers[2 * len(sizes) - 3], layers[-1]
    model, x, draws = nn.Sequential(*layers), data(), torch.Generator().manual_seed(seed)
    mean = x.mean(0).clamp(0.01, 0.99)
    with torch.no_grad():
        layers[-1].bias.copy_(torch.log(mean / (1 - mean)))
    sample = x[:: max(1, len(x) // 500)]

    def nats(images: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(images), images, reduction="sum") / len(images)

    entropy = -(torch.xlogy(sample, sample) + torch.xlogy(1 - sample, 1 - sample)).sum() / len(sample)
    return Start(
        model,
        lambda: nats(x[torch.randint(len(x), (batch,), generator=draws)]),
        lambda: nats(sample) - entropy,
    )


def poisson(seed: int, width: int = 32, depth: int = 3) -> Start:
    """-Δu = 2π² sin(πx) sin(πy) on the unit square, u = 0 around it; the same points in every step."""
    model = Network(width, depth)
    inside, boundary = draw_points(256, 64, torch.Generator().manual_seed(seed))

    def loss() -> Tensor:
        u = model(torch.cat([inside, boundary]))
        residual = u[: len(inside), 3] / (2 * math.pi**2) + solution(inside, 1)
        return residual.square().mean() + u[len(inside) :, 0].square().mean()

    return Start(model, loss, loss)


def characters(seed: int, context: int = 32, batch: int = 16) -> Start:
    """The next character of a text."""
    data, draws = text(), torch.Generator().manual_seed(seed)
    model = GPT(int(data.max()) + 1, context, width=64, heads=4, depth=2)
    fixed = torch.linspace(0, len(data) - context - 2, 128).long()

    def nats(starts: Tensor) -> Tensor:
        rows = data[starts[:, None] + torch.arange(context + 1)]
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return Start(
        model,
        lambda: nats(torch.randint(len(data) - context - 1, (batch,), generator=draws)),
        lambda: nats(fixed),
    )


class Recurrent(nn.Module):
    """A tanh RNN, in layers that are called once a step; an orthogonal matrix keeps the state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.keep = nn.Linear(2, width), nn.Linear(width, width, bias=False)
        self.write = nn.Linear(width, 1)
        nn.init.orthogonal_(self.keep.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], self.write.in_features)
        for seen in x:
            h = torch.tanh(self.read(seen) + self.keep(h))
        return self.write(h)[:, 0]


def delayed_xor(seed: int, length: int = 12, batch: int = 128, width: int = 32) -> Start:
    """Two of `length` bits are marked, one in the first tenth; their XOR is asked for at the end.

    After Hochreiter & Schmidhuber 1997.
    """
    model, draws = Recurrent(width), torch.Generator().manual_seed(seed)

    def sequences(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        bits = torch.randint(2, (length, count), generator=random).float()
        marks, columns, tenth = torch.zeros(length, count), torch.arange(count), length / 10
        first = (tenth * torch.rand(count, generator=random)).long()
        second = (tenth + 4 * tenth * torch.rand(count, generator=random)).long().maximum(first + 1)
        marks[first, columns] = marks[second, columns] = 1.0
        return torch.stack([2 * bits - 1, marks], 2), bits[first, columns] + bits[second, columns] == 1

    def nats(x: Tensor, odd: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x), odd.float())

    fixed = sequences(1024, torch.Generator().manual_seed(1 << 20))
    return Start(model, lambda: nats(*sequences(batch, draws)), lambda: nats(*fixed))


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

    def nats(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(x[rows]), y[rows])

    sample = torch.arange(512)
    entropy = -torch.xlogy(y[sample], y[sample]).sum() / len(sample)
    return Start(
        model,
        lambda: nats(torch.randint(len(x), (batch,), generator=draws)),
        lambda: nats(sample) - entropy,
    )


PROBLEMS: dict[str, Problem] = {
    "digits": Problem(
        "autoencoder of 8 x 8 digits, 64-64-32-12 and back, batch 256",
        functools.partial(autoencoder, data=digits, sizes=(64, 64, 32, 12), batch=256),
        target=2.0,
        budget=800,
        sgd=0.03,
        small=True,
    ),
    "curves": Problem(
        "autoencoder of 28 x 28 Bézier curves, 784-128-64-32-16-6 and back, batch 128",
        functools.partial(autoencoder, data=curves, sizes=(784, 128, 64, 32, 16, 6), batch=128),
        target=38.0,
        budget=400,
        sgd=0.003,
        kfac_step=("kl_clip", 0.01),
        damping=0.1,
    ),
    "poisson": Problem(
        "PINN, Poisson's equation in 2 dimensions, 32-32-32, float64, 320 fixed points",
        poisson,
        target=1e-3,
        budget=1200,
        sgd=0.01,
        kfac_step=("kl_clip", 1e-5),
        damping=0.001,
        small=True,
    ),
    "characters": Problem(
        "GPT, next character of a Python module, width 64, 2 layers, 16 x 32 characters",
        characters,
        target=2.2,
        budget=300,
        sgd=0.3,
    ),
    "xor": Problem(
        "XOR of two of 12 bits, tanh RNN of width 32, batch 128",
        delayed_xor,
        target=0.1,
        budget=1000,
        kfac_step=("lr", 0.001),
        damping=0.001,
    ),
    **{
        f"student {batch}": Problem(
            f"student of a random CNN, 12 x 12 x 3 in, 16 channels, batch {batch}",
            functools.partial(student, batch=batch),
            target=0.6,
            budget=600,
            kfac_step=("kl_clip", 1e-4),
        )
        for batch in (16, 64, 256)
    },
}
