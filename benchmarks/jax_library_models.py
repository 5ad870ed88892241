"""The same kinds of models in flax linen, flax nnx and equinox, with these libraries' own layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jax_models as plain
from jax_models import Case, classify, data, labels

KEY = jax.random.key(0)


def linen() -> dict[str, Any]:
    import flax.linen as nn

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(5)(nn.tanh(nn.Dense(32)(nn.tanh(nn.Dense(32)(x)))))

    class Residual(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.Conv(8, (3, 3))(nn.relu(nn.GroupNorm(4)(x)))
            return x + nn.Conv(8, (3, 3))(nn.relu(nn.GroupNorm(4)(y)))

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(8, (3, 3), use_bias=False)(x)
            return nn.Dense(5)(Residual()(Residual()(x)).mean((1, 2)))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any = None) -> Any:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(2, qkv_features=16)(y)
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
            return x, None

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(16, (4, 4), (4, 4))(x).reshape(x.shape[0], -1, 16)
            x = x + self.param("position", nn.initializers.normal(0.1), (1, 4, 16))
            for _ in range(2):
                x, _ = Block()(x)
            return nn.Dense(5)(nn.LayerNorm()(x).mean(1))

    class GPT(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            table = nn.Embed(50, 16)
            layers = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            x, _ = layers()(table(x), None)
            return table.attend(nn.LayerNorm()(x))

    class LSTM(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(3)(nn.RNN(nn.LSTMCell(16))(x)[:, -1])

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            a = nn.relu(nn.Conv(8, (3, 3))(x))
            b = nn.relu(nn.Conv(16, (3, 3), (2, 2))(a))
            joined = jnp.concatenate([a, nn.ConvTranspose(8, (2, 2), (2, 2))(b)], -1)
            return nn.Conv(1, (1, 1))(nn.relu(nn.Conv(8, (3, 3))(joined)))

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(16)(x)
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            x = x + jnp.swapaxes(nn.Dense(6)(nn.gelu(nn.Dense(12)(y))), 1, 2)
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
            return nn.Dense(5)(x.mean(1))

    def make(model: Any, x: Any, y: Any, loss: Any = None) -> Case:
        params = model.init(KEY, x)["params"]
        apply = lambda p, x: model.apply({"params": p}, x)  # noqa: E731
        if loss is not None:
            return (lambda p, x, y: loss(apply(p, x), y)), params, (x, y)
        return classify(apply), params, (x, y)

    images, tokens = data(8, 8, 8, 3), labels(50, 4, 8)
    square = lambda out, y: jnp.mean((out - y) ** 2)  # noqa: E731
    return {
        "mlp": lambda: make(MLP(), data(16, 20), labels(5, 16)),
        "resnet": lambda: make(ResNet(), images, labels(5, 8)),
        "vit": lambda: make(ViT(), images, labels(5, 8)),
        "gpt": lambda: make(GPT(), tokens, tokens),
        "unet": lambda: make(UNet(), data(4, 8, 8, 1), data(4, 8, 8, 1), square),
        "lstm": lambda: make(LSTM(), data(8, 5, 6), labels(3, 8)),
        "mixer": lambda: make(Mixer(), data(8, 6, 12), labels(5, 8)),
    }


def nnx() -> dict[str, Any]:
    from flax import nnx

    rngs = nnx.Rngs(0)

    class MLP(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = nnx.Linear(20, 32, rngs=rngs), nnx.Linear(32, 5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.b(nnx.tanh(self.a(x)))

    class ResNet(nnx.Module):
        def __init__(self) -> None:
            self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm, self.conv = nnx.GroupNorm(8, 4, rngs=rngs), nnx.Conv(8, 8, (3, 3), rngs=rngs)
            self.head = nnx.Linear(8, 5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = self.stem(x)
            x = x + self.conv(nnx.relu(self.norm(x)))
            return self.head(x.mean((1, 2)))

    class GPT(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.Embed(50, 16, rngs=rngs)
            self.n1, self.n2 = nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = self.table(x)
            x = x + self.attention(self.n1(x))
            x = x + self.down(nnx.gelu(self.up(self.n2(x))))
            return self.table.attend(x)

    def make(model: Any, x: Any, y: Any) -> Case:
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return classify(lambda p, x: nnx.merge(graph, p, rest)(x)), params, (x, y)

    tokens = labels(50, 4, 8)
    return {
        "mlp": lambda: make(MLP(), data(16, 20), labels(5, 16)),
        "resnet": lambda: make(ResNet(), data(8, 8, 8, 3), labels(5, 8)),
        "gpt": lambda: make(GPT(), tokens, tokens),
    }


def equinox() -> dict[str, Any]:
    import equinox as eqx

    class ConvNet(eqx.Module):
        a: Any
        b: Any
        norm: Any
        head: Any

        def __init__(self) -> None:
            self.a, self.b = eqx.nn.Conv2d(3, 8, 3, key=KEY), eqx.nn.Conv2d(8, 8, 3, 2, key=KEY)
            self.norm, self.head = eqx.nn.GroupNorm(4, 8), eqx.nn.Linear(32, 5, key=KEY)

        def __call__(self, x: Any) -> Any:
            x = jax.nn.relu(self.norm(self.a(x)))
            return self.head(jax.nn.relu(self.b(x)).reshape(-1))

    class Transformer(eqx.Module):
        table: Any
        attention: Any
        norm: Any
        mlp: Any
        head: Any

        def __init__(self) -> None:
            self.table = eqx.nn.Embedding(50, 16, key=KEY)
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=KEY)
            self.norm = eqx.nn.LayerNorm(16)
            self.mlp = eqx.nn.MLP(16, 16, 32, 1, key=KEY)
            self.head = eqx.nn.Linear(16, 50, key=KEY)

        def __call__(self, x: Any) -> Any:
            x = jax.vmap(self.table)(x)
            x = x + self.attention(x, x, x)
            x = x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))
            return jax.vmap(self.head)(x)

    class LSTM(eqx.Module):
        cell: Any
        head: Any

        def __init__(self) -> None:
            self.cell = eqx.nn.LSTMCell(6, 16, key=KEY)
            self.head = eqx.nn.Linear(16, 3, key=KEY)

        def __call__(self, xs: Any) -> Any:
            step = lambda state, x: (self.cell(x, state), None)  # noqa: E731
            (h, _), _ = jax.lax.scan(step, (jnp.zeros(16), jnp.zeros(16)), xs)
            return self.head(h)

    def make(model: Any, x: Any, y: Any) -> Case:
        params, static = eqx.partition(model, eqx.is_inexact_array)
        return classify(lambda p, x: jax.vmap(eqx.combine(p, static))(x)), params, (x, y)

    tokens = labels(50, 4, 8)
    mlp = eqx.nn.MLP(20, 5, 32, 2, key=KEY)
    return {
        "mlp": lambda: make(mlp, data(16, 20), labels(5, 16)),
        "resnet": lambda: make(ConvNet(), data(8, 3, 8, 8), labels(5, 8)),
        "gpt": lambda: make(Transformer(), tokens, tokens),
        "lstm": lambda: make(LSTM(), data(8, 5, 6), labels(3, 8)),
    }


LIBRARIES = {"plain": lambda: plain.PLAIN, "linen": linen, "nnx": nnx, "equinox": equinox}
