"""What the race is about: problems, their targets and grids, and data, first weights and minibatches.

Everything here is numpy, so that both frameworks race with the same numbers. A seed gives the first
weights and the minibatches; the data, and what is evaluated, are the same for all seeds: training data,
since this is about optimization.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Layer = tuple[Array, Array]  # weight (out, in) and bias (out,)


class Problem(NamedTuple):
    """A race. Of the grids only the centres differ from one problem to the next."""

    about: str
    target: float  # loss
    budget: int  # steps
    every: int = 10  # steps from one evaluation to the next
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # of AdamW and Kron
    sgd: float = 0.1  # learning rate
    kfac_step: tuple[str, float] = ("kl_clip", 0.001)  # what tells how long a step is, and its centre
    damping: float = 0.01
    small: bool = False  # enough for eigendecompositions to take part


PROBLEMS: dict[str, Problem] = {
    "digits": Problem(
        "autoencoder of 8 x 8 digits, 64-64-32-12 and back, batch 256",
        target=2.0,
        budget=800,
        sgd=0.03,
        small=True,
    ),
    "curves": Problem(
        "autoencoder of 28 x 28 Bézier curves, 784-128-64-32-16-6 and back, batch 128",
        target=38.0,
        budget=400,
        sgd=0.003,
        kfac_step=("kl_clip", 0.01),
        damping=0.1,
    ),
    "poisson": Problem(
        "PINN, Poisson's equation in 2 dimensions, 32-32-32, float64, 320 fixed points",
        target=1e-3,
        budget=1200,
        rates=(1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
        sgd=0.01,
        kfac_step=("kl_clip", 1e-5),
        damping=0.001,
        small=True,
    ),
    "characters": Problem(
        "GPT, next character of a Python module, width 64, 2 layers, 16 x 32 characters",
        target=2.2,
        budget=300,
        sgd=0.3,
    ),
    "xor": Problem(
        "XOR of two of 12 bits, tanh RNN of width 32, batch 128",
        target=0.1,
        budget=1000,
        kfac_step=("lr", 0.001),
        damping=0.001,
    ),
    **{
        f"student {batch}": Problem(
            f"student of a random CNN, 12 x 12 x 3 in, 16 channels, batch {batch}",
            target=0.6,
            budget=600,
            kfac_step=("kl_clip", 1e-4),
        )
        for batch in (16, 64, 256)
    },
}


def randoms(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """For the first weights, and for the minibatches."""
    return np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])


# ---- autoencoders --------------------------------------------------------------------------------


class Autoencoder(NamedTuple):
    """tanh layers, a linear code, Bernoulli pixels in the last layer's logits; loss in nats an image."""

    sizes: tuple[int, ...]  # mirrored
    batch: int
    images: Array  # (count, sizes[0]) in [0, 1]

    @property
    def code(self) -> int:
        """The layer whose outputs have no tanh, beside the last."""
        return len(self.sizes) - 2

    @property
    def sample(self) -> Array:
        """Images to evaluate on."""
        return self.images[:: max(1, len(self.images) // 500)]

    @property
    def entropy(self) -> float:
        """Of the sample's pixels: the loss that no model can be below."""
        x = self.sample.astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = [np.where(p > 0, p * np.log(p), 0.0) for p in (x, 1 - x)]
        return -float(np.sum(terms)) / len(x)

    def first(self, random: np.random.Generator) -> list[Layer]:
        """Xavier's weights; the last bias is the mean image's logits."""
        sides = [*self.sizes, *self.sizes[-2::-1]]
        layers = [
            (_float32(random.standard_normal((b, a)) * math.sqrt(2 / (a + b))), np.zeros(b, np.float32))
            for a, b in itertools.pairwise(sides)
        ]
        mean = self.images.mean(0).clip(0.01, 0.99)
        layers[-1][1][:] = np.log(mean / (1 - mean))
        return layers

    def batches(self, random: np.random.Generator) -> Iterator[Array]:
        """(batch,) rows of `images`, for ever."""
        while True:
            yield random.integers(len(self.images), size=self.batch)


def digits() -> Autoencoder:
    from sklearn.datasets import load_digits

    return Autoencoder((64, 64, 32, 12), 256, _float32(load_digits().data / 16))


def curves() -> Autoencoder:
    return Autoencoder((784, 128, 64, 32, 16, 6), 128, drawn_curves())


@functools.cache
def drawn_curves(count: int = 2000, side: int = 28, dots: int = 60) -> Array:
    """(count, side²) images in [0, 1] of cubic Bézier curves with random control points."""
    control = side * (0.1 + 0.8 * np.random.default_rng(0).random((count, 4, 2)))
    t = np.linspace(0, 1, dots)[:, None]
    bernstein = np.concatenate([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3], 1)
    points = bernstein @ control  # (count, dots, 2)
    pixels = np.arange(side) + 0.5
    bumps = _float32(np.exp(-0.5 * ((points[..., None] - pixels) / 0.8) ** 2))  # (count, dots, 2, side)
    images = np.zeros((count, side, side), np.float32)
    for dot in range(dots):
        np.maximum(images, bumps[:, dot, 0, :, None] * bumps[:, dot, 1, None, :], out=images)
    return images.reshape(count, -1)


# ---- the others ----------------------------------------------------------------------------------


def poisson_points(
    random: np.random.Generator, inside: int = 256, boundary: int = 64
) -> tuple[Array, Array]:
    """(inside, 2) points of the unit square and (boundary, 2) of its boundary, evenly distributed."""
    interior, edge = random.random((inside, 2)), random.random((boundary, 2))
    side = random.integers(4, size=boundary)
    edge[np.arange(boundary), side % 2] = side // 2
    return interior, edge


def poisson_first(random: np.random.Generator, sides: Sequence[int] = (2, 32, 32, 32, 1)) -> list[Array]:
    """Weights (out, in + 1), evenly distributed within ±(in + 1)^-½; the bias is the last column."""
    return [_even(random, (b, a + 1), a + 1) for a, b in itertools.pairwise(sides)]


XOR_LENGTH, XOR_BATCH, XOR_WIDTH = 12, 128, 32


def xor_sequences(
    random: np.random.Generator, count: int = XOR_BATCH, length: int = XOR_LENGTH
) -> tuple[Array, Array]:
    """Two of `length` bits are marked, one in the first tenth; their XOR is asked for at the end.

    (length, count, 2): ±1 and the mark; (count,): 0 or 1. After Hochreiter & Schmidhuber 1997.
    """
    bits = random.integers(2, size=(length, count))
    marks, columns, tenth = np.zeros((length, count)), np.arange(count), length / 10
    first = (tenth * random.random(count)).astype(int)
    second = np.maximum((tenth + 4 * tenth * random.random(count)).astype(int), first + 1)
    marks[first, columns] = marks[second, columns] = 1
    odd = bits[first, columns] ^ bits[second, columns]
    return _float32(np.stack([2 * bits - 1, marks], 2)), _float32(odd)


def xor_fixed() -> tuple[Array, Array]:
    """Sequences to evaluate on."""
    return xor_sequences(np.random.default_rng(1 << 20), 1024)


def xor_first(random: np.random.Generator, width: int = XOR_WIDTH) -> dict[str, Array]:
    """Of a tanh RNN that reads 2 numbers a step: an orthogonal matrix keeps the state."""
    orthogonal, triangular = np.linalg.qr(random.standard_normal((width, width)))
    first = {
        "read": _even(random, (width, 2), 2),
        "read bias": _even(random, (width,), 2),
        "keep": orthogonal * np.sign(np.diag(triangular)),
        "write": _even(random, (1, width), width),
        "write bias": _even(random, (1,), width),
    }
    return {name: _float32(x) for name, x in first.items()}


def _even(random: np.random.Generator, shape: tuple[int, ...], inputs: int) -> Array:
    return random.uniform(-1, 1, shape) / math.sqrt(inputs)


def _float32(x: Array) -> Array:
    return x.astype(np.float32)
