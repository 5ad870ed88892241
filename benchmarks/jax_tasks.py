"""Data and losses of the models that coverage is measured on: the same for every library.

A model is `apply(params, inputs)`; nothing in it, or here, knows of K-FAC.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Apply = Callable[..., Any]
Case = tuple[Callable[..., Any], Any, tuple[Any, ...]]  # (loss_fn, params, batch)

BATCH, WIDTH, HEADS, LAYERS = 32, 64, 4, 3
CLASSES, VOCABULARY, LENGTH, PATCH = 10, 96, 16, 4
FEATURES = 48  # of an example of the MLP, of a step of the LSTM and of a patch of the Mixer
NODES, EDGES = 64, 256
POINTS, CHANNELS, MODES = (
    32,
    32,
    8,
)  # of the operator: where functions are known, and what is made of them
PARTICLES = 4

_RNG = np.random.default_rng(0)


def data(*shape: int) -> jax.Array:
    return jnp.asarray(_RNG.normal(size=shape), jnp.float32)


def labels(high: int, *shape: int) -> jax.Array:
    return jnp.asarray(_RNG.integers(0, high, shape), jnp.int32)


SENDERS, RECEIVERS = labels(NODES, 2, EDGES)


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1))


def classify(apply: Apply) -> Apply:
    return lambda params, x, y: cross_entropy(apply(params, x), y)


def regress(apply: Apply) -> Apply:
    return lambda params, x, y: jnp.mean((apply(params, x) - y) ** 2)


def poisson(u: Apply) -> Apply:
    """A PINN: second derivatives of u by a point (2,), and the boundary's values."""

    def loss(params: Any, inside: jax.Array, boundary: jax.Array) -> jax.Array:
        laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(u, 1)(params, x)))(inside)
        edge = jax.vmap(u, (None, 0))(params, boundary)
        return jnp.mean((laplacian + 2 * jnp.sin(inside).prod(-1)) ** 2) + jnp.mean(edge**2)

    return loss


def variational(log_psi: Apply) -> Apply:
    """Monte Carlo: log |ψ| at r (PARTICLES, 2), weighted by centred local energies."""

    def loss(params: Any, r: jax.Array, energies: jax.Array) -> jax.Array:
        return 2 * jnp.mean(jax.vmap(log_psi, (None, 0))(params, r) * (energies - energies.mean()))

    return loss


def pair_features(r: jax.Array) -> jax.Array:
    """(PARTICLES, 4): where each particle is, how far from the centre and from the others."""
    centre = jnp.linalg.norm(r, axis=-1, keepdims=True)
    apart = jnp.sum((r[:, None] - r[None]) ** 2, -1).mean(1, keepdims=True)
    return jnp.concatenate([r, centre, apart], -1)


def spectral(real: jax.Array, imaginary: jax.Array, x: jax.Array) -> jax.Array:
    """x (..., POINTS, CHANNELS), whose first MODES frequencies get a matrix each, (in, out, MODES)."""
    z = jnp.fft.rfft(x, axis=-2)
    z = jnp.einsum("...mi,iom->...mo", z[..., :MODES, :], real + 1j * imaginary)
    behind = POINTS // 2 + 1 - MODES
    z = jnp.pad(z, [(0, 0)] * (z.ndim - 2) + [(0, behind), (0, 0)])
    return jnp.fft.irfft(z, n=POINTS, axis=-2)


IMAGES, TOKENS = data(BATCH, 16, 16, 3), labels(VOCABULARY, BATCH, LENGTH)
PICKED = labels(CLASSES, BATCH)

# The loss of a model's `apply`, and its batch.
TASKS: dict[str, tuple[Callable[[Apply], Apply], tuple[Any, ...]]] = {
    "mlp": (classify, (data(BATCH, FEATURES), PICKED)),
    "resnet": (classify, (IMAGES, PICKED)),
    "vit": (classify, (IMAGES, PICKED)),
    "gpt": (classify, (TOKENS, TOKENS)),
    "unet": (regress, (data(BATCH, 16, 16, 1), data(BATCH, 16, 16, 1))),
    "lstm": (classify, (data(BATCH, LENGTH, FEATURES), PICKED)),
    "mixer": (classify, (data(BATCH, LENGTH, FEATURES), PICKED)),
    "gnn": (regress, (data(NODES, FEATURES), data(NODES, 1))),
    "pinn": (poisson, (data(4 * BATCH, 2), data(BATCH, 2))),
    "vmc": (variational, (data(4 * BATCH, PARTICLES, 2), data(4 * BATCH))),
    "operator": (regress, (data(BATCH, POINTS, 1), data(BATCH, POINTS, 1))),
}


def case(name: str, apply: Apply, params: Any) -> Case:
    loss_of, batch = TASKS[name]
    return loss_of(apply), params, batch
