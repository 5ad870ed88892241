"""What a loss says about its outputs: the predictive distribution behind it, and its Hessian.

K-FAC's Fisher is the second moment of gradients of -log p(ŷ | outputs) with ŷ drawn from the model's
own predictions; with the labels of the data instead, it is the "empirical" Fisher. The losses here are
natural exponential families in their outputs, so that second moment is also the Hessian by the outputs,
and the Fisher is the generalised Gauss-Newton matrix (Martens 2020, arXiv:1412.1193, section 9). It can
be had in two ways:

    sampled   E[u uᵀ] = H        with u = `sample_gradient`: one backward pass, noisy
    exact     Σ_c l_c l_cᵀ = H   with l_c = column c of `square_root`: one backward pass per column

A pass takes its column at all terms at once. Where a value reaches several terms (attention, batch
norms) products of two terms' columns come in, too: each term's has to have a random sign, `with_signs`,
for them to vanish in expectation. Where none does, signs change nothing.

Outputs are (..., C) with classes or coordinates on the last axis; the other axes count the terms of the
loss. Nothing here knows of the mean or sum over terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from suite.core._namespace import Array, array_namespace, device_of, lift, padded_axes
from suite.core.checks import check_integer, check_number

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Categorical:
    """Softmax cross-entropy on logits: p = softmax(outputs), -log p(y) = -log p_y."""

    def noise_shape(self, shape: Shape) -> Shape:
        """(..., C) -> (...): one number per term."""
        self.columns(shape)
        return tuple(shape[:-1])

    def sample_gradient(self, outputs: Array, noise: Array) -> Array:
        """p - e_ŷ with ŷ ~ p, by inverting the distribution function at `noise`.

        Args:
            outputs: (..., C), logits; -inf is a class that never occurs.
            noise: (...), uniform on [0, 1).

        Returns:
            (..., C), in the dtype of `outputs`.
        """
        xp = array_namespace(outputs)
        weights, p = _softmax(outputs)
        below = xp.cumulative_sum(weights, axis=-1)
        target = _unit(noise, p)[..., None] * below[..., -1:]
        # The first class whose cumulative sum passes the target. Parallel sums are not monotone to the
        # last bit: a class of weight 0 is never it, and where no class is, the likeliest (weight 1) is.
        hit = (below > target) & (weights > 0)
        label = xp.argmax(xp.where(hit, xp.zeros_like(weights) + 2, weights), axis=-1)
        return xp.astype(p - _one_hot(label[..., None], p), outputs.dtype)

    def columns(self, shape: Shape) -> int:
        """How many columns `square_root` has for outputs of this shape: C."""
        return _last(shape)

    def square_root(self, outputs: Array, index: int) -> Array:
        """Column `index` = c of L with L Lᵀ = diag(p) - p pᵀ:  √p_c (e_c - p).

        Args:
            outputs: (..., C), logits.
            index: c, from 0 to C - 1.

        Returns:
            (..., C), in the dtype of `outputs`.
        """
        _check_index(index, outputs)
        xp = array_namespace(outputs)
        _, p = _softmax(outputs)
        column = xp.sqrt(p[..., index, None]) * (_one_hot(index, p) - p)
        return xp.astype(column, outputs.dtype)


@dataclass(frozen=True)
class Bernoulli:
    """Sigmoid cross-entropy on logits, coordinates independent: p = σ(outputs)."""

    def noise_shape(self, shape: Shape) -> Shape:
        """(..., C) -> (..., C): one number per coordinate."""
        self.columns(shape)
        return tuple(shape)

    def sample_gradient(self, outputs: Array, noise: Array) -> Array:
        """p - ŷ with ŷ = 1 where `noise` < p, else 0.

        Args:
            outputs: (..., C), logits.
            noise: (..., C), uniform on [0, 1).

        Returns:
            (..., C), in the dtype of `outputs`.
        """
        xp = array_namespace(outputs)
        p, q = _sigmoid(outputs)
        # -q for p - 1: the difference is all rounding when p is near 1.
        return xp.astype(xp.where(_unit(noise, p) < p, -q, p), outputs.dtype)

    def columns(self, shape: Shape) -> int:
        """How many columns `square_root` has for outputs of this shape: C."""
        return _last(shape)

    def square_root(self, outputs: Array, index: int) -> Array:
        """Column `index` = c of L with L Lᵀ = diag(p (1 - p)):  √(p_c (1 - p_c)) e_c.

        Args:
            outputs: (..., C), logits.
            index: c, from 0 to C - 1.

        Returns:
            (..., C), in the dtype of `outputs`.
        """
        _check_index(index, outputs)
        xp = array_namespace(outputs)
        p, q = _sigmoid(outputs)
        # Selected, not multiplied: a NaN elsewhere in the row is not this column's.
        column = xp.where(_one_hot(index, p) > 0, xp.sqrt(p * q), xp.zeros_like(p))
        return xp.astype(column, outputs.dtype)


@dataclass(frozen=True)
class Gaussian:
    """Squared error: -log p(y) = |outputs - y|² / (2 variance) + constant.

    Args:
        variance: of each coordinate; `variance` = 0.5 makes it the plain Σ (outputs - y)².
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        check_number("variance", self.variance, above=0)

    def noise_shape(self, shape: Shape) -> Shape:
        """(..., C) -> (2, ..., C): two numbers per coordinate."""
        self.columns(shape)
        return (2, *shape)

    def sample_gradient(self, outputs: Array, noise: Array) -> Array:
        """(outputs - ŷ) / variance with ŷ ~ N(outputs, variance), which is ε / √variance, ε ~ N(0, 1).

        ε by Box & Muller 1958: √(-2 log(1 - u)) cos(2π v).

        Args:
            outputs: (..., C); only their shape and dtype matter.
            noise: (2, ..., C), u and v, uniform on [0, 1).

        Returns:
            (..., C), in the dtype of `outputs`.
        """
        xp = array_namespace(outputs)
        uniform = _unit(noise, lift(outputs))
        radius = xp.sqrt(-2 * xp.log(1 - uniform[0, ...]))
        angle = (2 * math.pi) * uniform[1, ...]
        return xp.astype(radius * xp.cos(angle) * self.variance**-0.5, outputs.dtype)

    def columns(self, shape: Shape) -> int:
        """How many columns `square_root` has for outputs of this shape: C."""
        return _last(shape)

    def square_root(self, outputs: Array, index: int) -> Array:
        """Column `index` = c of L with L Lᵀ = I / variance:  e_c / √variance.

        Args:
            outputs: (..., C); only their shape and dtype matter.
            index: c, from 0 to C - 1.

        Returns:
            (..., C), in the dtype of `outputs`.
        """
        _check_index(index, outputs)
        xp = array_namespace(outputs)
        column = xp.broadcast_to(_one_hot(index, outputs) * self.variance**-0.5, outputs.shape)
        return xp.astype(column, outputs.dtype)


Likelihood: TypeAlias = Categorical | Bernoulli | Gaussian


def with_signs(column: Array, noise: Array) -> Array:
    """A column of `square_root`, each term's times -1 where its noise is negative.

    Args:
        column: (..., C).
        noise: (...), symmetric about 0, independent from term to term and column to column.
    """
    xp = array_namespace(column)
    signs = xp.where(noise < 0, xp.zeros_like(noise) - 1, xp.zeros_like(noise) + 1)
    return column * xp.astype(signs, column.dtype)[..., None]


def check_outputs(likelihood: Likelihood, shape: Shape, given: Iterable[Shape]) -> None:
    """Refuse one number for each of n examples as outputs (n,): they would be one term's n coordinates.

    Args:
        shape: of the outputs.
        given: shapes of what the model was given; (n, ...) of two axes or more is of n examples.

    Raises:
        ValueError: coordinates of a `Bernoulli` or `Gaussian` that are as many as the examples.
    """
    if isinstance(likelihood, Categorical) or len(shape) != 1 or shape[0] < 2:
        return
    if any(len(own) > 1 and own[0] == shape[0] for own in given):
        raise ValueError(
            f"outputs of {type(likelihood).__name__} must be (..., C), got ({shape[0]},), as many as "
            "examples: add an axis, outputs[..., None], or outputs[None] where they are one example's"
        )


def _last(shape: Shape) -> int:
    if not shape:
        raise ValueError(f"outputs must have their classes on a last axis, got shape {tuple(shape)}")
    return shape[-1]


def _check_index(index: int, outputs: Array) -> None:
    if getattr(index, "shape", None) == ():  # a 0-d array: its value may not be known yet
        return
    check_integer("index", index, at_least=0)
    columns = _last(outputs.shape)
    if index >= columns:
        raise ValueError(f"index must be < {columns}, the number of columns, got {index}")


def _unit(noise: Array, like: Array) -> Array:
    """Noise in the dtype of `like`, at most the largest number below 1, to which it may round."""
    xp = array_namespace(like)
    noise = xp.astype(noise, like.dtype)
    return xp.minimum(noise, xp.zeros_like(noise) + (1 - float(xp.finfo(like.dtype).eps) / 2))


def _one_hot(index: Array | int, like: Array) -> Array:
    """1 at `index` on the last axis of `like`, else 0: (1, ..., C), or (..., C) for `index` (..., 1)."""
    xp = array_namespace(like)
    classes = padded_axes(xp.arange(like.shape[-1], device=device_of(like)), like.ndim)
    return xp.astype(classes == index, like.dtype)


def _softmax(outputs: Array) -> tuple[Array, Array]:
    """exp(outputs - max outputs), at most 1, and softmax(outputs), in at least single precision."""
    xp = array_namespace(outputs)
    logits = lift(outputs)
    weights = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
    return weights, weights / xp.sum(weights, axis=-1, keepdims=True)


def _sigmoid(outputs: Array) -> tuple[Array, Array]:
    """σ(outputs) and 1 - σ(outputs), both without cancellation, in at least single precision."""
    xp = array_namespace(outputs)
    logits = lift(outputs)
    e = xp.exp(-xp.abs(logits))
    large, small = 1 / (1 + e), e / (1 + e)
    positive = logits >= 0
    return xp.where(positive, large, small), xp.where(positive, small, large)
