"""Whose gradients K-FAC's statistics are of: descriptions of the loss, for sampled and exact Fishers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from suite.core import likelihoods
from suite.core.checks import check_flag, check_integer
from suite.jax.dtypes import at_least_float32
from suite.jax.varying import varying_axes


def _all_of(aux: Any) -> Any:
    return aux


@dataclass(frozen=True)
class Fisher:
    """Statistics of the model's own predictive distribution; see its three kinds.

    Args:
        outputs: picks the array of the model's outputs, (..., C), from the loss's auxiliary output,
            which is all of it by default. The last axis is of classes or coordinates, the others count
            the loss's terms: of n scalars it has to be (n, 1), as (n,) is one term of n coordinates.
            Positions whose labels are ignored are left out of G by `lax.stop_gradient` of their outputs
            (`jnp.where`) and by `terms` of `value_and_grad`.
        exact: sum over the C columns of the loss's Hessian by the outputs ("type-2"), a backward pass
            for each, without noise; else sample labels from the model. A pass takes its column at all
            terms at once, each with a sign of its own. Where a layer's output reaches several terms
            (attention before outputs (n, t, C), batch norms), products of two terms' columns come in
            with two random signs, as noise. The call's `key` decides on the signs, if it is given one
            and the loss has none, else the outputs do, to the last bit: other signs on other devices.
        samples: how many times to sample: as many backward passes. Not with `exact`.
    """

    outputs: Callable[[Any], Any] = _all_of
    exact: bool = False
    samples: int = 1

    def __post_init__(self) -> None:
        if not callable(self.outputs):
            raise TypeError(f"outputs must be a function of the auxiliary output, got {self.outputs!r}")
        check_flag("exact", self.exact)
        check_integer("samples", self.samples, at_least=1)

    @property
    def likelihood(self) -> likelihoods.Likelihood:
        raise NotImplementedError

    def passes(self, shape: tuple[int, ...]) -> int:
        """How many backward passes."""
        return self.likelihood.columns(shape) if self.exact else self.samples

    def gradient(self, outputs: jax.Array, index: jax.Array, key: jax.Array | None) -> jax.Array:
        """By the outputs, of pass `index`."""
        dtype = at_least_float32(outputs.dtype)
        if self.exact:
            column = self.likelihood.square_root(outputs, index)  # type: ignore[arg-type]
            if key is None:  # what the outputs add up to is another number in each step
                total = jnp.sum(outputs, dtype=dtype).astype(jnp.float32)
                key = jax.random.fold_in(jax.random.key(0), lax.bitcast_convert_type(total, jnp.uint32))
            key = jax.random.fold_in(_own(key, outputs), index)
            noise = jax.random.rademacher(key, outputs.shape[:-1], dtype)
            signed: jax.Array = likelihoods.with_signs(column, noise)
            return signed
        assert key is not None
        shape = self.likelihood.noise_shape(outputs.shape)
        noise = jax.random.uniform(jax.random.fold_in(_own(key, outputs), index), shape, dtype)
        return self.likelihood.sample_gradient(outputs, noise)


def _own(key: jax.Array, outputs: jax.Array) -> jax.Array:
    """Another key on each of the devices that have other outputs, inside `shard_map`."""
    for axis in sorted(varying_axes(outputs)):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


@dataclass(frozen=True)
class Categorical(Fisher):
    """Softmax cross-entropy; outputs are logits. `outputs`, `exact`, `samples`: see `Fisher`."""

    @property
    def likelihood(self) -> likelihoods.Categorical:
        return likelihoods.Categorical()


@dataclass(frozen=True)
class Bernoulli(Fisher):
    """Sigmoid cross-entropy, summed over the last axis; outputs are logits.

    `outputs`, `exact`, `samples`: see `Fisher`.
    """

    @property
    def likelihood(self) -> likelihoods.Bernoulli:
        return likelihoods.Bernoulli()


@dataclass(frozen=True)
class Gaussian(Fisher):
    """Squared error |outputs - y|² / (2 variance), summed over the last axis; variance > 0.

    `outputs`, `exact`, `samples`: see `Fisher`.
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        likelihoods.Gaussian(self.variance)

    @property
    def likelihood(self) -> likelihoods.Gaussian:
        return likelihoods.Gaussian(self.variance)
