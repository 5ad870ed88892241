"""A small convolutional network on handwritten digits: python examples/jax_cnn.py [--plot loss.png]"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

from jax_training import arguments, plot, train


def logits_of(params, x):
    for layer in params["convolutions"]:
        x = lax.conv_general_dilated(
            x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["b"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return x.reshape(x.shape[0], -1) @ params["head"]["w"] + params["head"]["b"]


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), y).mean()


def main() -> float:
    options = arguments("CNN", 150)
    widths = (1, 4, 4) if options.tiny else (1, 16, 32)
    rng = np.random.default_rng(0)

    def weight(*shape):
        return jnp.asarray(rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1])), jnp.float32)

    params = {
        "convolutions": [
            {"w": weight(3, 3, i, o), "b": jnp.zeros(o)} for i, o in itertools.pairwise(widths)
        ],
        "head": {"w": weight(4 * widths[-1], 10), "b": jnp.zeros(10)},
    }
    digits = load_digits()
    x = jnp.asarray(digits.images[..., None] / 16, jnp.float32)
    y = jnp.asarray(digits.target)
    rows = rng.permutation(len(y))
    own, held = rows[:1500], rows[1500:]
    picks = (rng.choice(own, 128) for _ in itertools.count())
    batches = ((x[i], y[i]) for i in picks)
    steps = 10 if options.tiny else options.steps
    params, losses = train(
        loss_fn, params, batches, steps, learning_rate=0.05, damping=0.01, inv_update_steps=5
    )
    plot(options.plot, losses, "cross-entropy")
    accuracy = float(jnp.mean(jnp.argmax(logits_of(params, x[held]), -1) == y[held]))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, held-out accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
