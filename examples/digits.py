"""What all contenders share: real digits, the order in which they are seen, the initial weights.

All of it is numpy, so that PyTorch and JAX start from the same numbers and see the same minibatches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from sklearn.datasets import load_digits

PROBLEMS = ("autoencoder", "convnet")
TRAIN_SIZE = 1536  # six minibatches; the other 261 digits are the test set
BATCH_SIZE = 256

# 64 pixels to a code of 12 numbers and back in eight layers; tanh between layers.
AUTOENCODER_WIDTHS = (64, 64, 64, 64, 12, 64, 64, 64, 64)
# Three 3 x 3 convolutions with ReLU, strides 1, 2, 2 (sides 8, 4, 2), then a linear layer.
CONVNET_CHANNELS = (1, 16, 16, 16)
CONVNET_STRIDES = (1, 2, 2)
CLASSES = 10

# Losses, as means over images. Autoencoder: squared error, summed over pixels. Convnet: divergence from
# smoothed labels, that is cross-entropy less its minimum, the labels' own entropy. (With hard labels the
# minimum lies at infinite weights, and a better optimizer is one that overfits further.)
LABEL_SMOOTHING = 0.1
_RIGHT, _WRONG = 1 - LABEL_SMOOTHING * (CLASSES - 1) / CLASSES, LABEL_SMOOTHING / CLASSES
LABEL_ENTROPY = -_RIGHT * math.log(_RIGHT) - (CLASSES - 1) * _WRONG * math.log(_WRONG)

Weights = list[tuple[np.ndarray, np.ndarray]]  # (weight, bias) of every layer, in torch's orientation


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits, 8 x 8 pixels in [0, 1]; the split never changes."""

    train_x: np.ndarray  # (1536, 64) float32
    train_y: np.ndarray  # (1536,) int32
    test_x: np.ndarray  # (261, 64) float32
    test_y: np.ndarray  # (261,) int32


def load() -> Digits:
    """The 1797 digits that come with scikit-learn."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = (pixels[order] / 16).astype(np.float32)
    y = labels[order].astype(np.int32)
    return Digits(x[:TRAIN_SIZE], y[:TRAIN_SIZE], x[TRAIN_SIZE:], y[TRAIN_SIZE:])


def minibatches(seed: int, steps: int) -> np.ndarray:
    """(steps, BATCH_SIZE) places in the training set: one shuffled epoch after the other."""
    rng = np.random.default_rng([seed, 1])
    epochs = -(-steps * BATCH_SIZE // TRAIN_SIZE)
    order = np.concatenate([rng.permutation(TRAIN_SIZE) for _ in range(epochs)])
    return order[: steps * BATCH_SIZE].reshape(steps, BATCH_SIZE)


def initial_weights(problem: str, seed: int) -> Weights:
    """Weights to start from, with zero biases.

    Normal, of variance 2 / (fan in + fan out) before a tanh (Glorot & Bengio 2010) and 2 / fan in
    before a ReLU (He et al. 2015).
    """
    shapes: list[tuple[int, ...]]
    if problem == "autoencoder":
        shapes = [(n_out, n_in) for n_in, n_out in pairwise(AUTOENCODER_WIDTHS)]
        variances = [2 / sum(shape) for shape in shapes]
    else:
        shapes = [(c_out, c_in, 3, 3) for c_in, c_out in pairwise(CONVNET_CHANNELS)]
        shapes.append((CLASSES, 2 * 2 * CONVNET_CHANNELS[-1]))
        variances = [2 * shape[0] / np.prod(shape) for shape in shapes]
    rng = np.random.default_rng([seed, 2])
    return [
        ((variance**0.5 * rng.standard_normal(shape)).astype(np.float32), np.zeros(shape[0], np.float32))
        for shape, variance in zip(shapes, variances, strict=True)
    ]


class Session(Protocol):
    """A model and its optimizer, ready to train; one class per framework."""

    setup_seconds: float  # JAX: compilation; PyTorch: first step of a throw-away copy

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Train on one minibatch; returns its loss, once everything is done."""
        ...

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        """(loss, accuracy) of a data set; an autoencoder has no accuracy and says nan."""
        ...

    def optimizer_bytes(self) -> int:
        """Size of all arrays that the optimizer keeps between steps."""
        ...

    def skipped_steps(self) -> int:
        """Steps that the optimizer refused because something was not finite."""
        ...
