"""A character-level GPT, its layers scanned and rematerialised, its table tied to its head.

    python examples/jax_gpt.py [--text FILE] [--plot loss.png]

Without a text it reads Python's own standard library.
"""

from __future__ import annotations

import argparse
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jax_training import arguments, plot, train


def normalized(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def layer(x, p, heads):
    n, t, d = x.shape
    qkv = normalized(x, p["scale1"]) @ p["qkv"]
    q, k, v = (part.reshape(n, t, heads, -1) for part in jnp.split(qkv, 3, axis=-1))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / np.sqrt(d / heads)
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
    x = x + jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(n, t, d) @ p["out"]
    return x + jax.nn.gelu(normalized(x, p["scale2"]) @ p["up"]) @ p["down"]


def loss_fn(params, tokens):
    x = params["table"][tokens[:, :-1]] + params["position"]
    body = jax.checkpoint(lambda x, p: (layer(x, p, heads=4), None))
    x, _ = lax.scan(body, x, params["layers"])
    logits = normalized(x, params["scale"]) @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def main() -> float:
    sys.argv, text_file = split_text_option(sys.argv)
    options = arguments("GPT", 300)
    depth, width, length = (2, 16, 16) if options.tiny else (4, 64, 64)
    text = open(text_file).read() if text_file else inspect.getsource(argparse)  # noqa: SIM115
    characters = sorted(set(text))
    codes = np.array([characters.index(c) for c in text[:100_000]])
    rng = np.random.default_rng(0)

    def weight(*shape, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale / np.sqrt(shape[-2]), jnp.float32)

    params = {
        "table": jnp.asarray(rng.normal(size=(len(characters), width)) * 0.1, jnp.float32),
        "position": jnp.asarray(rng.normal(size=(length, width)) * 0.1, jnp.float32),
        "layers": {
            "scale1": jnp.ones((depth, width)),
            "qkv": weight(depth, width, 3 * width),
            "out": weight(depth, width, width, scale=0.3),
            "scale2": jnp.ones((depth, width)),
            "up": weight(depth, width, 4 * width),
            "down": weight(depth, 4 * width, width, scale=0.3),
        },
        "scale": jnp.ones(width),
    }

    def batches():
        while True:
            starts = rng.integers(0, len(codes) - length - 1, 4 if options.tiny else 32)
            yield (jnp.asarray(np.stack([codes[s : s + length + 1] for s in starts])),)

    _, losses = train(
        loss_fn, params, batches(), 10 if options.tiny else options.steps,
        learning_rate=0.1, damping=0.01, kl_clip=0.003, factor_update_steps=2, inv_update_steps=10,
    )  # fmt: skip
    plot(options.plot, losses, "cross-entropy of a character", log=False)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[-1]


def split_text_option(argv):
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--text")
    known, rest = parser.parse_known_args(argv[1:])
    return [argv[0], *rest], known.text


if __name__ == "__main__":
    main()
