"""A deep autoencoder on handwritten digits: python examples/jax_autoencoder.py [--plot loss.png]"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jax_training import arguments, plot, train
from suite.jax import Bernoulli


def loss_fn(params, x):
    y = x
    for number, layer in enumerate(params):
        y = y @ layer["w"] + layer["b"]
        y = jnp.tanh(y) if number not in (len(params) // 2 - 1, len(params) - 1) else y
    return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(y, x), -1)), y


def main() -> float:
    options = arguments("autoencoder", 300)
    encoder = (64, 20, 4) if options.tiny else (64, 200, 100, 50, 8)
    sides = (*encoder, *encoder[-2::-1])
    keys = jax.random.split(jax.random.key(0), len(sides))
    params = [
        {"w": jax.random.normal(k, (i, o)) / np.sqrt(i), "b": jnp.zeros(o)}
        for k, i, o in zip(keys, sides[:-1], sides[1:], strict=False)
    ]
    images = jnp.asarray(load_digits().data / 16, jnp.float32)
    rng = np.random.default_rng(0)
    batches = ((images[rng.integers(0, len(images), 256)],) for _ in itertools.count())
    _, losses = train(
        loss_fn, params, batches, 10 if options.tiny else options.steps, has_aux=True,
        fisher=Bernoulli(), learning_rate=0.1, damping=0.03, kl_clip=0.01, inv_update_steps=5,
    )  # fmt: skip
    plot(options.plot, losses, "cross-entropy of an image")
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return losses[-1]


if __name__ == "__main__":
    main()
