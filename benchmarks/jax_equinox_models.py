"""The models of the coverage table with equinox's own layers, of one example each and under `vmap`."""

from __future__ import annotations

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_models import attention
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

_NUMBERS = itertools.count()


def key() -> jax.Array:
    return jax.random.key(next(_NUMBERS))


def linear(into: int, out: int, **settings: Any) -> eqx.nn.Linear:
    return eqx.nn.Linear(into, out, key=key(), **settings)


def conv(into: int, out: int, size: int, stride: int = 1, padding: Any = "SAME") -> eqx.nn.Conv2d:
    return eqx.nn.Conv2d(into, out, size, stride, padding, key=key())


def mlp(into: int, out: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(into, out, WIDTH, 2, jax.nn.tanh, key=key())


class Residual(eqx.Module):
    n1: Any
    c1: Any
    n2: Any
    c2: Any

    def __init__(self) -> None:
        self.n1, self.n2 = eqx.nn.GroupNorm(4, 16), eqx.nn.GroupNorm(4, 16)
        self.c1, self.c2 = conv(16, 16, 3), conv(16, 16, 3)

    def __call__(self, x: Any) -> Any:
        y = self.c1(jax.nn.relu(self.n1(x)))
        return x + self.c2(jax.nn.relu(self.n2(y)))


class ResNet(eqx.Module):
    stem: Any
    a: Any
    b: Any
    head: Any

    def __init__(self) -> None:
        self.stem, self.a, self.b = conv(3, 16, 3), Residual(), Residual()
        self.head = linear(16, CLASSES)

    def __call__(self, x: Any) -> Any:
        return self.head(self.b(self.a(self.stem(jnp.moveaxis(x, -1, 0)))).mean((1, 2)))


class Encoder(eqx.Module):
    n1: Any
    attention: Any
    n2: Any
    mlp: Any

    def __init__(self) -> None:
        self.n1, self.n2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key())
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=key())

    def __call__(self, x: Any) -> Any:
        y = jax.vmap(self.n1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.n2)(x))


class ViT(eqx.Module):
    patch: Any
    token: Any
    position: Any
    a: Any
    b: Any
    norm: Any
    head: Any

    def __init__(self) -> None:
        self.patch, self.token = conv(3, WIDTH, PATCH, PATCH, 0), jnp.zeros((1, WIDTH))
        self.position = 0.1 * jax.random.normal(key(), ((16 // PATCH) ** 2 + 1, WIDTH))
        self.a, self.b, self.norm = Encoder(), Encoder(), eqx.nn.LayerNorm(WIDTH)
        self.head = linear(WIDTH, CLASSES)

    def __call__(self, x: Any) -> Any:
        x = self.patch(jnp.moveaxis(x, -1, 0)).reshape(WIDTH, -1).T
        x = self.b(self.a(jnp.concatenate([self.token, x]) + self.position))
        return self.head(self.norm(x[0]))


class Block(eqx.Module):
    n1: Any
    qkv: Any
    out: Any
    n2: Any
    mlp: Any

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.n1, self.n2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[0])
        self.out = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=keys[2])

    def __call__(self, x: Any) -> Any:
        q, k, v = jnp.split(jax.vmap(self.qkv)(jax.vmap(self.n1)(x)), 3, axis=-1)
        x = x + jax.vmap(self.out)(attention(q[None], k[None], v[None], True)[0])
        return x + jax.vmap(self.mlp)(jax.vmap(self.n2)(x))


class GPT(eqx.Module):
    table: Any
    position: Any
    blocks: Any
    norm: Any

    def __init__(self) -> None:
        self.table = eqx.nn.Embedding(VOCABULARY, WIDTH, key=key())
        self.position = 0.1 * jax.random.normal(key(), (LENGTH, WIDTH))
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(key(), LAYERS))
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x: Any) -> Any:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        body = jax.checkpoint(lambda x, arrays: (eqx.combine(arrays, static)(x), None))
        x, _ = jax.lax.scan(body, jax.vmap(self.table)(x) + self.position, arrays)
        return jax.vmap(self.norm)(x) @ self.table.weight.T


class UNet(eqx.Module):
    a: Any
    b: Any
    c: Any
    up: Any
    d: Any
    out: Any

    def __init__(self) -> None:
        self.a, self.b, self.c = conv(1, 8, 3), conv(8, 16, 3, 2), conv(16, 16, 3)
        self.up = eqx.nn.ConvTranspose2d(16, 8, 2, 2, key=key())
        self.d, self.out = conv(16, 8, 3), conv(8, 1, 1)

    def __call__(self, x: Any) -> Any:
        a = jax.nn.relu(self.a(jnp.moveaxis(x, -1, 0)))
        b = jax.nn.relu(self.c(jax.nn.relu(self.b(a))))
        y = self.out(jax.nn.relu(self.d(jnp.concatenate([a, self.up(b)]))))
        return jnp.moveaxis(y, 0, -1)


class LSTM(eqx.Module):
    cell: Any
    head: Any

    def __init__(self) -> None:
        self.cell, self.head = eqx.nn.LSTMCell(FEATURES, WIDTH, key=key()), linear(WIDTH, CLASSES)

    def __call__(self, xs: Any) -> Any:
        start = (jnp.zeros(WIDTH), jnp.zeros(WIDTH))
        (h, _), _ = jax.lax.scan(lambda state, x: (self.cell(x, state), None), start, xs)
        return self.head(h)


class Mixer(eqx.Module):
    patch: Any
    n1: Any
    tokens: Any
    n2: Any
    channels: Any
    head: Any

    def __init__(self) -> None:
        self.patch, self.head = linear(FEATURES, WIDTH), linear(WIDTH, CLASSES)
        self.n1, self.n2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.tokens = eqx.nn.MLP(LENGTH, LENGTH, 32, 1, jax.nn.gelu, key=key())
        self.channels = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=key())

    def __call__(self, x: Any) -> Any:
        x = jax.vmap(self.patch)(x)
        x = x + jax.vmap(self.tokens, 1, 1)(jax.vmap(self.n1)(x))
        x = x + jax.vmap(self.channels)(jax.vmap(self.n2)(x))
        return self.head(x.mean(0))


class GNN(eqx.Module):
    own: Any
    message: Any
    update: Any
    out: Any

    def __init__(self) -> None:
        self.own, self.out = linear(FEATURES, WIDTH), linear(WIDTH, 1)
        self.message, self.update = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def __call__(self, nodes: Any) -> Any:
        h = jnp.tanh(jax.vmap(self.own)(nodes))
        for _ in range(2):
            sent = jax.nn.relu(jax.vmap(self.message)(h[SENDERS]))
            received = jax.ops.segment_sum(sent, RECEIVERS, NODES)
            h = h + jnp.tanh(jax.vmap(self.update)(received))
        return jax.vmap(self.out)(h)


class Spectral(eqx.Module):
    real: Any
    imaginary: Any
    local: Any

    def __init__(self) -> None:
        shape = CHANNELS, CHANNELS, MODES
        self.real, self.imaginary = (0.1 * jax.random.normal(key(), shape) for _ in range(2))
        self.local = linear(CHANNELS, CHANNELS)

    def __call__(self, x: Any) -> Any:
        return jax.nn.gelu(spectral(self.real, self.imaginary, x) + jax.vmap(self.local)(x))


class Operator(eqx.Module):
    """A Fourier neural operator, with the parts of its spectra."""

    lift: Any
    blocks: Any
    out: Any

    def __init__(self) -> None:
        self.lift, self.out = linear(1, CHANNELS), linear(CHANNELS, 1)
        self.blocks = [Spectral(), Spectral()]

    def __call__(self, x: Any) -> Any:
        x = jax.vmap(self.lift)(x)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.out)(x)


class LogPsi(eqx.Module):
    one: Any
    two: Any
    out: Any
    width: Any

    def __init__(self) -> None:
        self.one, self.two, self.width = linear(4, WIDTH), linear(WIDTH, WIDTH), jnp.ones(2)
        self.out = linear(WIDTH, 1, use_bias=False)

    def __call__(self, r: Any) -> Any:
        h = jnp.tanh(jax.vmap(self.two)(jnp.tanh(jax.vmap(self.one)(pair_features(r)))))
        return jnp.sum(jax.vmap(self.out)(h)) - jnp.sum(self.width * r**2)


def make(name: str, model: eqx.Module) -> Case:
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(params: Any, x: Any) -> Any:
        model = eqx.combine(params, static)
        # The graph is one example, as the loss takes points and walkers one by one.
        return model(x) if name in ("gnn", "pinn", "vmc") else jax.vmap(model)(x)

    return case(name, apply, params)


MODELS = {
    "mlp": lambda: make("mlp", mlp(FEATURES, CLASSES)),
    "resnet": lambda: make("resnet", ResNet()),
    "vit": lambda: make("vit", ViT()),
    "gpt": lambda: make("gpt", GPT()),
    "unet": lambda: make("unet", UNet()),
    "lstm": lambda: make("lstm", LSTM()),
    "mixer": lambda: make("mixer", Mixer()),
    "gnn": lambda: make("gnn", GNN()),
    "pinn": lambda: make("pinn", mlp(2, "scalar")),
    "vmc": lambda: make("vmc", LogPsi()),
    "operator": lambda: make("operator", Operator()),
}
