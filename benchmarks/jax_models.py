"""The models of the coverage table in plain JAX: functions of nested dicts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tasks import (
    CHANNELS,
    CLASSES,
    FEATURES,
    HEADS,
    LAYERS,
    LENGTH,
    MODES,
    NODES,
    PATCH,
    RECEIVERS,
    SENDERS,
    VOCABULARY,
    WIDTH,
    Case,
    case,
    pair_features,
    spectral,
)  # fmt: skip

_RNG = np.random.default_rng(1)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(_RNG.normal(size=shape) / np.sqrt(max(np.prod(shape[:-1]), 1)), jnp.float32)


def dense(*sides: int) -> dict[str, jax.Array]:
    return {"w": normal(*sides), "b": jnp.zeros(sides[-1])}


def affine(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def mlp(p: Any, x: jax.Array) -> jax.Array:
    for layer in p[:-1]:
        x = jnp.tanh(affine(layer, x))
    return affine(p[-1], x)


def layer_norm(p: Any, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]


def norm(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}


def conv(w: jax.Array, x: jax.Array, stride: int = 1, up: int = 1) -> jax.Array:
    if up > 1:
        return lax.conv_transpose(x, w, (up, up), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)


def plain_mlp() -> Case:
    return case("mlp", mlp, [dense(FEATURES, WIDTH), dense(WIDTH, WIDTH), dense(WIDTH, CLASSES)])


def plain_resnet() -> Case:
    width = 16
    params = {
        "stem": normal(3, 3, 3, width),
        "blocks": [
            {
                "n1": norm(width), "c1": normal(3, 3, width, width),
                "n2": norm(width), "c2": normal(3, 3, width, width),
            }
            for _ in range(2)
        ],
        "head": dense(width, CLASSES),
    }  # fmt: skip

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = conv(p["stem"], x)
        for b in p["blocks"]:
            y = conv(b["c1"], jax.nn.relu(layer_norm(b["n1"], x)))
            x = x + conv(b["c2"], jax.nn.relu(layer_norm(b["n2"], y)))
        return affine(p["head"], x.mean((1, 2)))

    return case("resnet", apply, params)


def block() -> dict[str, Any]:
    return {
        "n1": norm(WIDTH),
        "qkv": dense(WIDTH, 3 * WIDTH),
        "out": dense(WIDTH, WIDTH),
        "n2": norm(WIDTH),
        "up": dense(WIDTH, 2 * WIDTH),
        "down": dense(2 * WIDTH, WIDTH),
    }


def attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """Of (n, t, width) each, by HEADS heads."""
    n, t, width = q.shape
    q, k, v = (z.reshape(n, t, HEADS, width // HEADS) for z in (q, k, v))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / np.sqrt(width / HEADS)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
    return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(n, t, width)


def transformer_block(p: Any, x: jax.Array, causal: bool) -> jax.Array:
    q, k, v = jnp.split(affine(p["qkv"], layer_norm(p["n1"], x)), 3, axis=-1)
    x = x + affine(p["out"], attention(q, k, v, causal))
    return x + affine(p["down"], jax.nn.gelu(affine(p["up"], layer_norm(p["n2"], x))))


def plain_vit() -> Case:
    patches = (16 // PATCH) ** 2
    params = {
        "patch": normal(PATCH, PATCH, 3, WIDTH),
        "class": normal(1, WIDTH),
        "position": normal(patches + 1, WIDTH),
        "blocks": [block() for _ in range(2)],
        "norm": norm(WIDTH),
        "head": dense(WIDTH, CLASSES),
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = conv(p["patch"], x, stride=PATCH).reshape(x.shape[0], -1, WIDTH)
        token = jnp.broadcast_to(p["class"], (x.shape[0], 1, WIDTH))
        x = jnp.concatenate([token, x], 1) + p["position"]
        for b in p["blocks"]:
            x = transformer_block(b, x, False)
        return affine(p["head"], layer_norm(p["norm"], x)[:, 0])

    return case("vit", apply, params)


def plain_gpt() -> Case:
    """Fused qkv, tied head, scanned layers, remat."""
    params = {
        "table": normal(VOCABULARY, WIDTH),
        "position": normal(LENGTH, WIDTH),
        "blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *(block() for _ in range(LAYERS))),
        "norm": norm(WIDTH),
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        h = p["table"][x] + p["position"]
        body = jax.checkpoint(lambda h, b: (transformer_block(b, h, True), None))
        h, _ = lax.scan(body, h, p["blocks"])
        return layer_norm(p["norm"], h) @ p["table"].T

    return case("gpt", apply, params)


def plain_unet() -> Case:
    params = {
        "a": normal(3, 3, 1, 8), "b": normal(3, 3, 8, 16), "c": normal(3, 3, 16, 16),
        "up": normal(2, 2, 16, 8), "d": normal(3, 3, 16, 8), "out": normal(1, 1, 8, 1),
        "bias": jnp.zeros(1),
    }  # fmt: skip

    def apply(p: Any, x: jax.Array) -> jax.Array:
        a = jax.nn.relu(conv(p["a"], x))
        b = jax.nn.relu(conv(p["c"], jax.nn.relu(conv(p["b"], a, stride=2))))
        joined = jnp.concatenate([a, conv(p["up"], b, up=2)], -1)
        return conv(p["out"], jax.nn.relu(conv(p["d"], joined))) + p["bias"]

    return case("unet", apply, params)


def plain_lstm() -> Case:
    params = {
        "x": normal(FEATURES, 4 * WIDTH),
        "h": normal(WIDTH, 4 * WIDTH),
        "b": jnp.zeros(4 * WIDTH),
        "head": dense(WIDTH, CLASSES),
    }

    def apply(p: Any, xs: jax.Array) -> jax.Array:
        def step(state: Any, x: jax.Array) -> Any:
            h, c = state
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        zeros = jnp.zeros((xs.shape[0], WIDTH))
        (h, _), _ = lax.scan(step, (zeros, zeros), jnp.swapaxes(xs, 0, 1))
        return affine(p["head"], h)

    return case("lstm", apply, params)


def plain_mixer() -> Case:
    params = {
        "patch": dense(FEATURES, WIDTH), "n1": norm(WIDTH), "t1": dense(LENGTH, 32),
        "t2": dense(32, LENGTH), "n2": norm(WIDTH), "c1": dense(WIDTH, 2 * WIDTH),
        "c2": dense(2 * WIDTH, WIDTH), "head": dense(WIDTH, CLASSES),
    }  # fmt: skip

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = affine(p["patch"], x)
        y = jnp.swapaxes(layer_norm(p["n1"], x), 1, 2)
        x = x + jnp.swapaxes(affine(p["t2"], jax.nn.gelu(affine(p["t1"], y))), 1, 2)
        x = x + affine(p["c2"], jax.nn.gelu(affine(p["c1"], layer_norm(p["n2"], x))))
        return affine(p["head"], x.mean(1))

    return case("mixer", apply, params)


def plain_gnn() -> Case:
    """Two rounds of messages along edges, by the same weights."""
    params = {
        "self": dense(FEATURES, WIDTH),
        "message": dense(WIDTH, WIDTH),
        "update": dense(WIDTH, WIDTH),
        "out": dense(WIDTH, 1),
    }

    def apply(p: Any, nodes: jax.Array) -> jax.Array:
        h = jnp.tanh(affine(p["self"], nodes))
        for _ in range(2):
            sent = jax.nn.relu(affine(p["message"], h[SENDERS]))
            h = h + jnp.tanh(affine(p["update"], jax.ops.segment_sum(sent, RECEIVERS, NODES)))
        return affine(p["out"], h)

    return case("gnn", apply, params)


def plain_pinn() -> Case:
    params = [dense(2, WIDTH), dense(WIDTH, WIDTH), dense(WIDTH, 1)]
    return case("pinn", lambda p, x: mlp(p, x)[0], params)


def plain_operator() -> Case:
    """A Fourier neural operator, with the parts of its spectra."""
    shape = CHANNELS, CHANNELS, MODES
    params = {
        "lift": dense(1, CHANNELS),
        "blocks": [
            {"real": normal(*shape), "imaginary": normal(*shape), "local": dense(CHANNELS, CHANNELS)}
            for _ in range(2)
        ],
        "out": dense(CHANNELS, 1),
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = affine(p["lift"], x)
        for b in p["blocks"]:
            x = jax.nn.gelu(spectral(b["real"], b["imaginary"], x) + affine(b["local"], x))
        return affine(p["out"], x)

    return case("operator", apply, params)


def plain_vmc() -> Case:
    params = {"one": dense(4, WIDTH), "two": dense(WIDTH, WIDTH), "out": normal(WIDTH, 1)}
    params["width"] = jnp.ones(2)

    def log_psi(p: Any, r: jax.Array) -> jax.Array:
        h = jnp.tanh(affine(p["two"], jnp.tanh(affine(p["one"], pair_features(r)))))
        return jnp.sum(h @ p["out"]) - jnp.sum(p["width"] * r**2)

    return case("vmc", log_psi, params)


MODELS = {
    "mlp": plain_mlp, "resnet": plain_resnet, "vit": plain_vit, "gpt": plain_gpt, "unet": plain_unet,
    "lstm": plain_lstm, "mixer": plain_mixer, "gnn": plain_gnn, "pinn": plain_pinn, "vmc": plain_vmc,
    "operator": plain_operator,
}  # fmt: skip
