"""The models of the coverage table with dm-haiku's own layers; parameters are dicts of dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from jax_models import attention
from jax_tasks import (
    CHANNELS,
    CLASSES,
    HEADS,
    LAYERS,
    LENGTH,
    MODES,
    NODES,
    PATCH,
    RECEIVERS,
    SENDERS,
    TASKS,
    VOCABULARY,
    WIDTH,
    Case,
    case,
    pair_features,
    spectral,
)  # fmt: skip


def norm() -> hk.LayerNorm:
    return hk.LayerNorm(-1, True, True)


def mlp(out: int) -> Callable[..., Any]:
    return lambda x: hk.nets.MLP([WIDTH, WIDTH, out], activation=jnp.tanh)(x)


def resnet(x: Any) -> Any:
    x = hk.Conv2D(16, 3, with_bias=False)(x)
    for _ in range(2):
        y = hk.Conv2D(16, 3)(jax.nn.relu(hk.GroupNorm(4)(x)))
        x = x + hk.Conv2D(16, 3)(jax.nn.relu(hk.GroupNorm(4)(y)))
    return hk.Linear(CLASSES)(x.mean((1, 2)))


def vit(x: Any) -> Any:
    x = hk.Conv2D(WIDTH, PATCH, PATCH)(x).reshape(x.shape[0], -1, WIDTH)
    small = hk.initializers.RandomNormal(0.1)
    token = hk.get_parameter("class", (1, 1, WIDTH), init=small)
    x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], 1)
    x = x + hk.get_parameter("position", x.shape[1:], init=small)
    for _ in range(2):
        y = norm()(x)
        x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init_scale=1.0)(y, y, y)
        x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(2 * WIDTH)(norm()(x))))
    return hk.Linear(CLASSES)(norm()(x)[:, 0])


def block(x: Any) -> Any:
    q, k, v = jnp.split(hk.Linear(3 * WIDTH)(norm()(x)), 3, axis=-1)
    x = x + hk.Linear(WIDTH)(attention(q, k, v, True))
    return x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(2 * WIDTH)(norm()(x))))


def gpt(x: Any) -> Any:
    table = hk.Embed(VOCABULARY, WIDTH)
    position = hk.get_parameter("position", (LENGTH, WIDTH), init=hk.initializers.RandomNormal(0.1))
    x = hk.experimental.layer_stack(LAYERS)(hk.remat(block))(table(x) + position)
    return norm()(x) @ table.embeddings.T


def unet(x: Any) -> Any:
    a = jax.nn.relu(hk.Conv2D(8, 3)(x))
    b = jax.nn.relu(hk.Conv2D(16, 3)(jax.nn.relu(hk.Conv2D(16, 3, 2)(a))))
    joined = jnp.concatenate([a, hk.Conv2DTranspose(8, 2, 2)(b)], -1)
    return hk.Conv2D(1, 1)(jax.nn.relu(hk.Conv2D(8, 3)(joined)))


def lstm(x: Any) -> Any:
    cell = hk.LSTM(WIDTH)
    outputs, _ = hk.dynamic_unroll(cell, x, cell.initial_state(x.shape[0]), time_major=False)
    return hk.Linear(CLASSES)(outputs[:, -1])


def mixer(x: Any) -> Any:
    x = hk.Linear(WIDTH)(x)
    y = jnp.swapaxes(norm()(x), 1, 2)
    x = x + jnp.swapaxes(hk.Linear(LENGTH)(jax.nn.gelu(hk.Linear(32)(y))), 1, 2)
    x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(2 * WIDTH)(norm()(x))))
    return hk.Linear(CLASSES)(x.mean(1))


def gnn(nodes: Any) -> Any:
    h = jnp.tanh(hk.Linear(WIDTH)(nodes))
    message, update = hk.Linear(WIDTH), hk.Linear(WIDTH)
    for _ in range(2):
        sent = jax.nn.relu(message(h[SENDERS]))
        h = h + jnp.tanh(update(jax.ops.segment_sum(sent, RECEIVERS, NODES)))
    return hk.Linear(1)(h)


def pinn(x: Any) -> Any:
    return mlp(1)(x)[0]


def operator(x: Any) -> Any:
    """A Fourier neural operator, with the parts of its spectra."""
    x = hk.Linear(CHANNELS)(x)
    for i in range(2):
        shape, init = (CHANNELS, CHANNELS, MODES), hk.initializers.RandomNormal(0.1)
        parts = [hk.get_parameter(f"{part}_{i}", shape, init=init) for part in ("real", "imaginary")]
        x = jax.nn.gelu(spectral(*parts, x) + hk.Linear(CHANNELS)(x))
    return hk.Linear(1)(x)


def log_psi(r: Any) -> Any:
    h = jnp.tanh(hk.Linear(WIDTH)(jnp.tanh(hk.Linear(WIDTH)(pair_features(r)))))
    width = hk.get_parameter("width", (2,), init=jnp.ones)
    return jnp.sum(hk.Linear(1, with_bias=False)(h)) - jnp.sum(width * r**2)


def make(name: str, function: Callable[..., Any]) -> Callable[[], Case]:
    def build() -> Case:
        model = hk.without_apply_rng(hk.transform(function))
        x = TASKS[name][1][0]
        params = model.init(jax.random.key(0), x[0] if name in ("pinn", "vmc") else x)
        return case(name, model.apply, params)

    return build


FUNCTIONS = {
    "mlp": mlp(CLASSES), "resnet": resnet, "vit": vit, "gpt": gpt, "unet": unet, "lstm": lstm,
    "mixer": mixer, "gnn": gnn, "pinn": pinn, "vmc": log_psi, "operator": operator,
}  # fmt: skip
MODELS = {name: make(name, function) for name, function in FUNCTIONS.items()}
