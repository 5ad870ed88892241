"""Small models in plain JAX, each as (loss_fn, params, batch): nothing in them knows of K-FAC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Case = tuple[Callable[..., Any], Any, tuple[Any, ...]]

_RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(_RNG.normal(size=shape) / np.sqrt(max(np.prod(shape[:-1]), 1)), jnp.float32)


def data(*shape: int) -> jax.Array:
    return jnp.asarray(_RNG.normal(size=shape), jnp.float32)


def labels(high: int, *shape: int) -> jax.Array:
    return jnp.asarray(_RNG.integers(0, high, shape))


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1))


def classify(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x, y: cross_entropy(apply(params, x), y)


# ---- plain functions -----------------------------------------------------------------------------


def dense(*sides: int) -> dict[str, jax.Array]:
    return {"w": normal(*sides), "b": jnp.zeros(sides[-1])}


def affine(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


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
    params = [dense(20, 32), dense(32, 32), dense(32, 5)]

    def apply(p: Any, x: jax.Array) -> jax.Array:
        for layer in p[:-1]:
            x = jnp.tanh(affine(layer, x))
        return affine(p[-1], x)

    return classify(apply), params, (data(16, 20), labels(5, 16))


def plain_resnet() -> Case:
    params = {
        "stem": normal(3, 3, 3, 8),
        "blocks": [
            {"n1": norm(8), "c1": normal(3, 3, 8, 8), "n2": norm(8), "c2": normal(3, 3, 8, 8)}
            for _ in range(2)
        ],
        "head": dense(8, 5),
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = conv(p["stem"], x)
        for b in p["blocks"]:
            y = conv(b["c1"], jax.nn.relu(layer_norm(b["n1"], x)))
            x = x + conv(b["c2"], jax.nn.relu(layer_norm(b["n2"], y)))
        return affine(p["head"], x.mean((1, 2)))

    return classify(apply), params, (data(8, 8, 8, 3), labels(5, 8))


def block(width: int, heads: int) -> dict[str, Any]:
    return {
        "n1": norm(width),
        "qkv": dense(width, 3 * width),
        "out": dense(width, width),
        "n2": norm(width),
        "up": dense(width, 2 * width),
        "down": dense(2 * width, width),
    }


def transformer_block(p: Any, x: jax.Array, heads: int, causal: bool) -> jax.Array:
    n, t, d = x.shape
    q, k, v = jnp.split(affine(p["qkv"], layer_norm(p["n1"], x)), 3, axis=-1)
    q, k, v = (z.reshape(n, t, heads, d // heads) for z in (q, k, v))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / np.sqrt(d / heads)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
    mixed = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(n, t, d)
    x = x + affine(p["out"], mixed)
    return x + affine(p["down"], jax.nn.gelu(affine(p["up"], layer_norm(p["n2"], x))))


def plain_vit() -> Case:
    params = {
        "patch": normal(4, 4, 3, 16),
        "class": normal(1, 16),
        "position": normal(5, 16),
        "blocks": [block(16, 2) for _ in range(2)],
        "norm": norm(16),
        "head": dense(16, 5),
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = conv(p["patch"], x, stride=4).reshape(x.shape[0], 4, 16)
        token = jnp.broadcast_to(p["class"], (x.shape[0], 1, 16))
        x = jnp.concatenate([token, x], 1) + p["position"]
        for b in p["blocks"]:
            x = transformer_block(b, x, 2, False)
        return affine(p["head"], layer_norm(p["norm"], x)[:, 0])

    return classify(apply), params, (data(8, 8, 8, 3), labels(5, 8))


def plain_gpt() -> Case:
    """Fused qkv, tied head, scanned layers, remat."""
    blocks = [block(16, 2) for _ in range(3)]
    params = {
        "table": normal(50, 16),
        "position": normal(8, 16),
        "blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *blocks),
        "norm": norm(16),
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        h = p["table"][x] + p["position"]
        body = jax.checkpoint(lambda h, b: (transformer_block(b, h, 2, True), None))
        h, _ = lax.scan(body, h, p["blocks"])
        return layer_norm(p["norm"], h) @ p["table"].T

    return classify(apply), params, (labels(50, 4, 8), labels(50, 4, 8))


def plain_unet() -> Case:
    params = {
        "a": normal(3, 3, 1, 8), "b": normal(3, 3, 8, 16), "c": normal(3, 3, 16, 16),
        "up": normal(2, 2, 16, 8), "d": normal(3, 3, 16, 8), "out": normal(1, 1, 8, 1),
        "bias": jnp.zeros(1),
    }  # fmt: skip

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        a = jax.nn.relu(conv(p["a"], x))
        b = jax.nn.relu(conv(p["c"], jax.nn.relu(conv(p["b"], a, stride=2))))
        joined = jnp.concatenate([a, conv(p["up"], b, up=2)], -1)
        out = conv(p["out"], jax.nn.relu(conv(p["d"], joined))) + p["bias"]
        return jnp.mean((out - y) ** 2)

    return loss, params, (data(4, 8, 8, 1), data(4, 8, 8, 1))


def plain_lstm() -> Case:
    params = {"x": normal(6, 64), "h": normal(16, 64), "b": jnp.zeros(64), "head": dense(16, 3)}

    def apply(p: Any, xs: jax.Array) -> jax.Array:
        def step(state: Any, x: jax.Array) -> Any:
            h, c = state
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        zeros = jnp.zeros((xs.shape[0], 16))
        (h, _), _ = lax.scan(step, (zeros, zeros), jnp.swapaxes(xs, 0, 1))
        return affine(p["head"], h)

    return classify(apply), params, (data(8, 5, 6), labels(3, 8))


def plain_mixer() -> Case:
    params = {
        "patch": dense(12, 16), "n1": norm(16), "t1": dense(6, 12), "t2": dense(12, 6),
        "n2": norm(16), "c1": dense(16, 32), "c2": dense(32, 16), "head": dense(16, 5),
    }  # fmt: skip

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = affine(p["patch"], x)
        y = jnp.swapaxes(layer_norm(p["n1"], x), 1, 2)
        x = x + jnp.swapaxes(affine(p["t2"], jax.nn.gelu(affine(p["t1"], y))), 1, 2)
        x = x + affine(p["c2"], jax.nn.gelu(affine(p["c1"], layer_norm(p["n2"], x))))
        return affine(p["head"], x.mean(1))

    return classify(apply), params, (data(8, 6, 12), labels(5, 8))


def plain_gnn() -> Case:
    params = {
        "message": dense(16, 16),
        "self": dense(8, 16),
        "update": dense(16, 16),
        "out": dense(16, 1),
    }
    edges = labels(10, 2, 24)

    def loss(p: Any, nodes: jax.Array, y: jax.Array) -> jax.Array:
        h = jnp.tanh(affine(p["self"], nodes))
        for _ in range(2):
            sent = jax.nn.relu(affine(p["message"], h[edges[0]]))
            h = h + jnp.tanh(affine(p["update"], jax.ops.segment_sum(sent, edges[1], 10)))
        return jnp.mean((affine(p["out"], h)[:, 0] - y) ** 2)

    return loss, params, (data(10, 8), data(10))


def plain_pinn() -> Case:
    """Poisson's equation: a loss of second derivatives by the inputs."""
    params = [dense(2, 16), dense(16, 16), dense(16, 1)]

    def u(p: Any, x: jax.Array) -> jax.Array:
        for layer in p[:-1]:
            x = jnp.tanh(affine(layer, x))
        return affine(p[-1], x)[0]

    def loss(p: Any, x: jax.Array) -> jax.Array:
        laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(u, 1)(p, x)))(x)
        return jnp.mean((laplacian + 2 * jnp.sin(x).prod(-1)) ** 2)

    return loss, params, (data(16, 2),)


def plain_vmc() -> Case:
    """log |ψ| of two particles in a trap, weighted by their centred local energies."""
    params = {"one": dense(4, 16), "two": dense(16, 16), "out": normal(16, 1), "width": jnp.ones(2)}

    def log_psi(p: Any, r: jax.Array) -> jax.Array:
        features = jnp.concatenate([r, jnp.linalg.norm(r, axis=-1, keepdims=True), r[:, :1] ** 2], -1)
        h = jnp.tanh(affine(p["two"], jnp.tanh(affine(p["one"], features))))
        envelope = jnp.sum(p["width"] * jnp.sum(r**2, -1))
        return jnp.sum(h @ p["out"]) - envelope

    def loss(p: Any, r: jax.Array, energies: jax.Array) -> jax.Array:
        return 2 * jnp.mean(jax.vmap(log_psi, (None, 0))(p, r) * (energies - energies.mean()))

    return loss, params, (data(32, 2, 2), data(32))


PLAIN = {
    "mlp": plain_mlp, "resnet": plain_resnet, "vit": plain_vit, "gpt": plain_gpt, "unet": plain_unet,
    "lstm": plain_lstm, "mixer": plain_mixer, "gnn": plain_gnn, "pinn": plain_pinn, "vmc": plain_vmc,
}  # fmt: skip
