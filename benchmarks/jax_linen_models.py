"""The models of the coverage table with flax linen's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
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


class MLP(nn.Module):
    out: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(self.out)(nn.tanh(nn.Dense(WIDTH)(nn.tanh(nn.Dense(WIDTH)(x)))))


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Conv(16, (3, 3))(nn.relu(nn.GroupNorm(4)(x)))
        return x + nn.Conv(16, (3, 3))(nn.relu(nn.GroupNorm(4)(y)))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        return nn.Dense(CLASSES)(Residual()(Residual()(x)).mean((1, 2)))


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(WIDTH, (PATCH, PATCH), (PATCH, PATCH))(x).reshape(x.shape[0], -1, WIDTH)
        token = self.param("class", nn.initializers.normal(0.1), (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], 1)
        x = x + self.param("position", nn.initializers.normal(0.1), (1, x.shape[1], WIDTH))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(nn.LayerNorm()(x)[:, 0])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        q, k, v = jnp.split(nn.Dense(3 * WIDTH)(nn.LayerNorm()(x)), 3, axis=-1)
        x = x + nn.Dense(WIDTH)(attention(q, k, v, True))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))), None


class GPT(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        table = nn.Embed(VOCABULARY, WIDTH)
        layers = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        position = self.param("position", nn.initializers.normal(0.1), (LENGTH, WIDTH))
        x, _ = layers()(table(x) + position, None)
        return table.attend(nn.LayerNorm()(x))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        a = nn.relu(nn.Conv(8, (3, 3))(x))
        b = nn.relu(nn.Conv(16, (3, 3))(nn.relu(nn.Conv(16, (3, 3), (2, 2))(a))))
        joined = jnp.concatenate([a, nn.ConvTranspose(8, (2, 2), (2, 2))(b)], -1)
        return nn.Conv(1, (1, 1))(nn.relu(nn.Conv(8, (3, 3))(joined)))


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(CLASSES)(nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x)[:, -1])


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(WIDTH)(x)
        y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        x = x + jnp.swapaxes(nn.Dense(LENGTH)(nn.gelu(nn.Dense(32)(y))), 1, 2)
        x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(x.mean(1))


class GNN(nn.Module):
    @nn.compact
    def __call__(self, nodes: Any) -> Any:
        h = nn.tanh(nn.Dense(WIDTH)(nodes))
        message, update = nn.Dense(WIDTH), nn.Dense(WIDTH)
        for _ in range(2):
            sent = nn.relu(message(h[SENDERS]))
            h = h + nn.tanh(update(jax.ops.segment_sum(sent, RECEIVERS, NODES)))
        return nn.Dense(1)(h)


class Operator(nn.Module):
    """A Fourier neural operator, with the parts of its spectra."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(CHANNELS)(x)
        for i in range(2):
            shape, init = (CHANNELS, CHANNELS, MODES), nn.initializers.normal(0.1)
            parts = [self.param(f"{part}_{i}", init, shape) for part in ("real", "imaginary")]
            x = nn.gelu(spectral(*parts, x) + nn.Dense(CHANNELS)(x))
        return nn.Dense(1)(x)


class LogPsi(nn.Module):
    @nn.compact
    def __call__(self, r: Any) -> Any:
        h = nn.tanh(nn.Dense(WIDTH)(nn.tanh(nn.Dense(WIDTH)(pair_features(r)))))
        width = self.param("width", nn.initializers.ones, (2,))
        return jnp.sum(nn.Dense(1, use_bias=False)(h)) - jnp.sum(width * r**2)


def make(name: str, model: nn.Module) -> Callable[[], Case]:
    def build() -> Case:
        x = TASKS[name][1][0]
        x = x[0] if name in ("pinn", "vmc") else x  # models of one point
        params = model.init(jax.random.key(0), x)["params"]

        def apply(params: Any, x: Any) -> Any:
            y = model.apply({"params": params}, x)
            return y[0] if name == "pinn" else y

        return case(name, apply, params)

    return build


MODULES = {
    "mlp": MLP(CLASSES), "resnet": ResNet(), "vit": ViT(), "gpt": GPT(), "unet": UNet(), "lstm": LSTM(),
    "mixer": Mixer(), "gnn": GNN(), "pinn": MLP(1), "vmc": LogPsi(), "operator": Operator(),
}  # fmt: skip
MODELS = {name: make(name, model) for name, model in MODULES.items()}
