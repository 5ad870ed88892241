"""The models of the coverage table with flax nnx's own layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

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

RNGS = nnx.Rngs(0)


def linear(into: int, out: int, **settings: Any) -> nnx.Linear:
    return nnx.Linear(into, out, rngs=RNGS, **settings)


def conv(into: int, out: int, size: int, stride: int = 1) -> nnx.Conv:
    return nnx.Conv(into, out, (size, size), (stride, stride), rngs=RNGS)


def norm() -> nnx.LayerNorm:
    return nnx.LayerNorm(WIDTH, rngs=RNGS)


class MLP(nnx.Module):
    def __init__(self, into: int, out: int) -> None:
        self.a, self.b, self.c = linear(into, WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, out)

    def __call__(self, x: Any) -> Any:
        return self.c(nnx.tanh(self.b(nnx.tanh(self.a(x)))))


class Residual(nnx.Module):
    def __init__(self) -> None:
        self.n1, self.n2 = (nnx.GroupNorm(16, 4, rngs=RNGS) for _ in range(2))
        self.c1, self.c2 = conv(16, 16, 3), conv(16, 16, 3)

    def __call__(self, x: Any) -> Any:
        y = self.c1(nnx.relu(self.n1(x)))
        return x + self.c2(nnx.relu(self.n2(y)))


class ResNet(nnx.Module):
    def __init__(self) -> None:
        self.stem, self.a, self.b = conv(3, 16, 3), Residual(), Residual()
        self.head = linear(16, CLASSES)

    def __call__(self, x: Any) -> Any:
        return self.head(self.b(self.a(self.stem(x))).mean((1, 2)))


class Encoder(nnx.Module):
    def __init__(self) -> None:
        self.n1, self.n2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=RNGS)
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.n1(x))
        return x + self.down(nnx.gelu(self.up(self.n2(x))))


class ViT(nnx.Module):
    def __init__(self) -> None:
        self.patch = conv(3, WIDTH, PATCH, PATCH)
        self.token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.position = nnx.Param(0.1 * jax.random.normal(RNGS(), ((16 // PATCH) ** 2 + 1, WIDTH)))
        self.a, self.b, self.norm = Encoder(), Encoder(), norm()
        self.head = linear(WIDTH, CLASSES)

    def __call__(self, x: Any) -> Any:
        x = self.patch(x).reshape(x.shape[0], -1, WIDTH)
        token = jnp.tile(self.token[...], (x.shape[0], 1, 1))
        x = self.b(self.a(jnp.concatenate([token, x], 1) + self.position))
        return self.head(self.norm(x)[:, 0])


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.n1, self.n2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.qkv, self.out = (nnx.Linear(WIDTH, n * WIDTH, rngs=rngs) for n in (3, 1))
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.out(attention(*jnp.split(self.qkv(self.n1(x)), 3, axis=-1), True))
        return x + self.down(nnx.gelu(self.up(self.n2(x))))


class GPT(nnx.Module):
    def __init__(self) -> None:
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=RNGS)
        self.position = nnx.Param(0.1 * jax.random.normal(RNGS(), (LENGTH, WIDTH)))

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks, self.norm = stacked(RNGS), norm()

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def layers(x: Any, block: Block) -> Any:
            return block(x)

        x = layers(self.table(x) + self.position, self.blocks)
        return self.table.attend(self.norm(x))


class UNet(nnx.Module):
    def __init__(self) -> None:
        self.a, self.b, self.c = conv(1, 8, 3), conv(8, 16, 3, 2), conv(16, 16, 3)
        self.up = nnx.ConvTranspose(16, 8, (2, 2), (2, 2), rngs=RNGS)
        self.d, self.out = conv(16, 8, 3), conv(8, 1, 1)

    def __call__(self, x: Any) -> Any:
        a = nnx.relu(self.a(x))
        b = nnx.relu(self.c(nnx.relu(self.b(a))))
        return self.out(nnx.relu(self.d(jnp.concatenate([a, self.up(b)], -1))))


class LSTM(nnx.Module):
    def __init__(self) -> None:
        self.rnn = nnx.RNN(nnx.LSTMCell(FEATURES, WIDTH, rngs=RNGS))
        self.head = linear(WIDTH, CLASSES)

    def __call__(self, x: Any) -> Any:
        zeros = jnp.zeros((x.shape[0], WIDTH))
        return self.head(self.rnn(x, initial_carry=(zeros, zeros))[:, -1])


class Mixer(nnx.Module):
    def __init__(self) -> None:
        self.patch, self.head = linear(FEATURES, WIDTH), linear(WIDTH, CLASSES)
        self.n1, self.t1, self.t2 = norm(), linear(LENGTH, 32), linear(32, LENGTH)
        self.n2, self.c1, self.c2 = norm(), linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def __call__(self, x: Any) -> Any:
        x = self.patch(x)
        y = jnp.swapaxes(self.n1(x), 1, 2)
        x = x + jnp.swapaxes(self.t2(nnx.gelu(self.t1(y))), 1, 2)
        x = x + self.c2(nnx.gelu(self.c1(self.n2(x))))
        return self.head(x.mean(1))


class GNN(nnx.Module):
    def __init__(self) -> None:
        self.own, self.out = linear(FEATURES, WIDTH), linear(WIDTH, 1)
        self.message, self.update = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def __call__(self, nodes: Any) -> Any:
        h = nnx.tanh(self.own(nodes))
        for _ in range(2):
            sent = nnx.relu(self.message(h[SENDERS]))
            h = h + nnx.tanh(self.update(jax.ops.segment_sum(sent, RECEIVERS, NODES)))
        return self.out(h)


class Spectral(nnx.Module):
    def __init__(self) -> None:
        shape = CHANNELS, CHANNELS, MODES
        self.real, self.imaginary = (
            nnx.Param(nnx.initializers.normal(0.1)(RNGS.params(), shape)) for _ in range(2)
        )
        self.local = linear(CHANNELS, CHANNELS)

    def __call__(self, x: Any) -> Any:
        return nnx.gelu(spectral(self.real[...], self.imaginary[...], x) + self.local(x))


class Operator(nnx.Module):
    """A Fourier neural operator, with the parts of its spectra."""

    def __init__(self) -> None:
        self.lift, self.out = linear(1, CHANNELS), linear(CHANNELS, 1)
        self.a, self.b = Spectral(), Spectral()

    def __call__(self, x: Any) -> Any:
        return self.out(self.b(self.a(self.lift(x))))


class LogPsi(nnx.Module):
    def __init__(self) -> None:
        self.one, self.two = linear(4, WIDTH), linear(WIDTH, WIDTH)
        self.out = linear(WIDTH, 1, use_bias=False)
        self.width = nnx.Param(jnp.ones(2))

    def __call__(self, r: Any) -> Any:
        h = nnx.tanh(self.two(nnx.tanh(self.one(pair_features(r)))))
        return jnp.sum(self.out(h)) - jnp.sum(self.width * r**2)


def make(name: str, model: nnx.Module) -> Case:
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def apply(params: Any, x: Any) -> Any:
        y = nnx.merge(graph, params, rest)(x)
        return y[0] if name == "pinn" else y

    return case(name, apply, params)


MODELS = {
    "mlp": lambda: make("mlp", MLP(FEATURES, CLASSES)),
    "resnet": lambda: make("resnet", ResNet()),
    "vit": lambda: make("vit", ViT()),
    "gpt": lambda: make("gpt", GPT()),
    "unet": lambda: make("unet", UNet()),
    "lstm": lambda: make("lstm", LSTM()),
    "mixer": lambda: make("mixer", Mixer()),
    "gnn": lambda: make("gnn", GNN()),
    "pinn": lambda: make("pinn", MLP(2, 1)),
    "vmc": lambda: make("vmc", LogPsi()),
    "operator": lambda: make("operator", Operator()),
}
