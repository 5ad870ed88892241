"""Two networks from the same numbers, in torch and in JAX; nothing in them knows of the optimizers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn


class Network(NamedTuple):
    """Weights as numpy arrays, in the order of both frameworks' parameters."""

    weights: list[np.ndarray]
    x: np.ndarray
    y: np.ndarray
    torch_layers: Any  # () -> list of modules
    jax_apply: Any  # (weights, x) -> logits
    to_jax: Any = list  # JAX may keep a weight in parts, or several as a stack
    from_jax: Any = list


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]) or 1)


def mlp() -> Network:
    rng = np.random.default_rng(1)
    sizes = ((9, 7), (8, 9), (8, 8), (4, 8))
    weights = [w for shape in sizes for w in (_normal(rng, *shape), 0.1 * rng.normal(size=shape[0]))]

    def layers() -> list[nn.Module]:
        linear = [nn.Linear(i, o) for o, i in sizes]
        return [m for layer in linear for m in (layer, nn.Tanh())][:-1]

    def apply(weights, x):
        for i in range(0, len(weights), 2):
            x = x @ weights[i].T + weights[i + 1]
            x = jnp.tanh(x) if i + 2 < len(weights) else x
        return x

    return Network(weights, rng.normal(size=(32, 7)), rng.integers(0, 4, 32), layers, apply)


def cnn() -> Network:
    rng = np.random.default_rng(2)
    shapes = ((4, 1, 3, 3), (4,), (6, 2, 3, 3), (5, 24), (5,))  # the second convolution has 2 groups
    weights = [_normal(rng, *s) if len(s) > 1 else 0.1 * rng.normal(size=s) for s in shapes]

    def layers() -> list[nn.Module]:
        first = nn.Conv2d(1, 4, 3, padding=1)
        second = nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False)
        return [first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(24, 5)]

    def apply(p, x):
        def convolve(x, w, stride, padding, groups):
            return jax.lax.conv_general_dilated(
                x,
                w,
                (stride, stride),
                [(padding, padding)] * 2,
                dimension_numbers=("NCHW", "OIHW", "NCHW"),
                feature_group_count=groups,
            )

        x = jnp.tanh(convolve(x, p[0], 1, 1, 1) + p[1][:, None, None])
        x = jnp.tanh(convolve(x, p[2], 2, 0, 2))
        return x.reshape(x.shape[0], -1) @ p[3].T + p[4]

    return Network(weights, rng.normal(size=(32, 1, 6, 6)), rng.integers(0, 5, 32), layers, apply)


class _Block(nn.Module):
    """x + attention(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class _MeanOverTokens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def attention() -> Network:
    rng = np.random.default_rng(3)
    width, heads = 8, 2
    shapes = ((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,))
    shapes = (*shapes, (4, width), (4,))
    weights = [_normal(rng, *s) if len(s) > 1 else 0.1 * rng.normal(size=s) for s in shapes]
    weights[0], weights[6] = 1 + weights[0], 1 + weights[6]

    def layers() -> list[nn.Module]:
        last = nn.RMSNorm(width, eps=1e-5)
        return [_Block(width, heads), last, _MeanOverTokens(), nn.Linear(width, 4)]

    def to_jax(weights: Any) -> list[Any]:
        scale, shift, in_weight, in_bias, *rest = weights
        split = [
            part
            for pair in zip(np.split(in_weight, 3), np.split(in_bias, 3), strict=True)
            for part in pair
        ]
        return [scale, shift, *split, *rest]

    def from_jax(weights: Any) -> list[Any]:
        scale, shift, *parts = weights
        return [scale, shift, np.concatenate(parts[0:6:2]), np.concatenate(parts[1:6:2]), *parts[6:]]

    def apply(p, x):
        scale, shift, *qkv = p[:8]
        y = x - jnp.mean(x, -1, keepdims=True)
        y = y * (jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5) * scale) + shift

        def project(w, b):
            return (y @ w.T + b).reshape(*x.shape[:2], heads, -1)

        q, k, v = (project(qkv[i], qkv[i + 1]) for i in (0, 2, 4))
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / jnp.sqrt(width / heads)
        mixed = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(x.shape)
        x = x + mixed @ p[8].T + p[9]
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p[10]
        return x.mean(1) @ p[11].T + p[12]

    x, y = rng.normal(size=(16, 5, width)), rng.integers(0, 4, 16)
    return Network(weights, x, y, layers, apply, to_jax, from_jax)


class _Tied(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight
        self.middle = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.table(x))))


def tied() -> Network:
    rng = np.random.default_rng(4)
    words, width = 11, 6
    weights = [
        rng.normal(size=(words, width)) / 2,
        _normal(rng, width, width),
        0.1 * rng.normal(size=width),
    ]

    def apply(p, x):
        return jnp.tanh(p[0][x] @ p[1].T + p[2]) @ p[0].T

    x, y = rng.integers(0, words, (8, 5)), rng.integers(0, words, (8, 5))
    return Network(weights, x, y, lambda: [_Tied(words, width)], apply)


def scanned() -> Network:
    rng = np.random.default_rng(5)
    depth, width = 3, 7
    pairs = [(_normal(rng, width, width), 0.1 * rng.normal(size=width)) for _ in range(depth)]
    weights = [w for pair in pairs for w in pair] + [_normal(rng, 4, width), 0.1 * rng.normal(size=4)]

    def layers() -> list[nn.Module]:
        inner = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())]
        return [*inner, nn.Linear(width, 4)]

    def to_jax(weights: Any) -> list[Any]:
        *inner, w, b = weights
        return [np.stack(inner[0::2]), np.stack(inner[1::2]), w, b]

    def from_jax(weights: Any) -> list[Any]:
        return [part for pair in zip(*weights[:2], strict=True) for part in pair] + list(weights[2:])

    def apply(p, x):
        def layer(x, wb):
            return jnp.tanh(x @ wb[0].T + wb[1]), None

        return jax.lax.scan(layer, x, (p[0], p[1]))[0] @ p[2].T + p[3]

    x, y = rng.normal(size=(32, width)), rng.integers(0, 4, 32)
    return Network(weights, x, y, layers, apply, to_jax, from_jax)


class _Decoder(nn.Module):
    """Back with the transpose of the weight, by functions; heads with axes of their own in between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(width))
        self.heads = nn.Parameter(torch.empty(hidden, 2, 3))
        self.out = nn.Parameter(torch.empty(2, 3, hidden))
        self.encoder = nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.encoder(x))
        h = torch.tanh(torch.einsum("nd,dhk->nhk", h, self.heads))
        h = torch.einsum("...hk,hkd->...d", h, self.out)
        return torch.nn.functional.linear(h, self.encoder.weight.t(), self.shift)


def decoder() -> Network:
    rng = np.random.default_rng(9)
    width, hidden = 7, 5
    shapes = ((width,), (hidden, 2, 3), (2, 3, hidden), (hidden, width), (hidden,))
    weights = [0.5 * rng.normal(size=s) if len(s) > 1 else 0.1 * rng.normal(size=s) for s in shapes]

    def apply(p, x):
        h = jnp.tanh(x @ p[3].T + p[4])
        h = jnp.tanh(jnp.einsum("nd,dhk->nhk", h, p[1]))
        h = jnp.einsum("nhk,hkd->nd", h, p[2])
        return h @ p[3] + p[0]

    x = rng.normal(size=(32, width))
    y = (x @ rng.normal(size=(width, width))).argmax(1)  # random labels end in chaos
    return Network(weights, x, y, lambda: [_Decoder(width, hidden)], apply)


class _Stack(nn.Module):
    """A matrix for each expert, all of which see every example."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, 5, width))
        self.down = nn.Parameter(torch.empty(experts, 5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.einsum("nd,ehd->neh", x, self.up))
        return torch.tanh(torch.einsum("neh,ehd->ned", hidden, self.down).mean(1))


def experts() -> Network:
    rng = np.random.default_rng(7)
    count, width = 3, 6
    shapes = ((width, width), (width,), (count, 5, width), (count, 5, width), (4, width), (4,))
    weights = [
        rng.normal(size=s) / np.sqrt(s[-1]) if len(s) > 1 else 0.1 * rng.normal(size=s) for s in shapes
    ]

    def layers() -> list[nn.Module]:
        return [nn.Linear(width, width), nn.Tanh(), _Stack(count, width), nn.Linear(width, 4)]

    def apply(p, x):
        x = jnp.tanh(x @ p[0].T + p[1])
        hidden = jnp.tanh(jnp.einsum("nd,ehd->neh", x, p[2]))
        x = jnp.tanh(jnp.einsum("neh,ehd->ned", hidden, p[3]).mean(1))
        return x @ p[4].T + p[5]

    return Network(weights, rng.normal(size=(32, width)), rng.integers(0, 4, 32), layers, apply)


class _Routed(nn.Module):
    """A matrix for each expert, some of the rows for each."""

    def __init__(self, sizes: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.up = nn.Parameter(torch.empty(len(sizes), 5, width))
        self.down = nn.Parameter(torch.empty(len(sizes), width, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for rows, up, down in zip(x.split(self.sizes), self.up, self.down, strict=True):
            parts.append(nn.functional.linear(torch.tanh(nn.functional.linear(rows, up)), down))
        return torch.tanh(torch.cat(parts))


def routed() -> Network:
    rng = np.random.default_rng(8)
    sizes, width = (14, 6, 12), 6
    shapes = ((width, width), (width,), (3, 5, width), (3, width, 5), (4, width), (4,))
    weights = [
        rng.normal(size=s) / np.sqrt(s[-1]) if len(s) > 1 else 0.1 * rng.normal(size=s) for s in shapes
    ]

    def layers() -> list[nn.Module]:
        return [nn.Linear(width, width), nn.Tanh(), _Routed(sizes, width), nn.Linear(width, 4)]

    def apply(p, x):
        x, counts = jnp.tanh(x @ p[0].T + p[1]), jnp.asarray(sizes, jnp.int32)
        hidden = jnp.tanh(jax.lax.ragged_dot(x, p[2].swapaxes(1, 2), counts))
        x = jnp.tanh(jax.lax.ragged_dot(hidden, p[3].swapaxes(1, 2), counts))
        return x @ p[4].T + p[5]

    return Network(weights, rng.normal(size=(32, width)), rng.integers(0, 4, 32), layers, apply)


class _Spectral(nn.Module):
    """A spectral convolution along positions, with complex weights of two real parameters."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.re, self.im = (nn.Parameter(torch.empty(width, width, modes)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.rfft(x, dim=1)
        out = torch.zeros_like(z)
        weight = self.re + 1j * self.im
        out[:, : weight.shape[-1]] = torch.einsum("nmi,iom->nmo", z[:, : weight.shape[-1]], weight)
        return torch.tanh(x + torch.fft.irfft(out, n=x.shape[1], dim=1))


def operator() -> Network:
    rng = np.random.default_rng(9)
    width, modes = 4, 3
    shapes = ((width, width), (width,), *((width, width, modes),) * 2, (3, width), (3,))
    weights = [
        rng.normal(size=s) / np.sqrt(s[1]) if len(s) > 1 else 0.1 * rng.normal(size=s) for s in shapes
    ]

    def layers() -> list[nn.Module]:
        return [nn.Linear(width, width), nn.Tanh(), _Spectral(width, modes), nn.Linear(width, 3)]

    def apply(p, x):
        x = jnp.tanh(x @ p[0].T + p[1])
        z = jnp.einsum("nmi,iom->nmo", jnp.fft.rfft(x, axis=1)[:, :modes], jax.lax.complex(p[2], p[3]))
        x = jnp.tanh(x + jnp.fft.irfft(z, n=x.shape[1], axis=1))
        return x @ p[4].T + p[5]

    return Network(weights, rng.normal(size=(6, 8, width)), rng.integers(0, 3, (6, 8)), layers, apply)


def torch_model(network: Network, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The model and its loss on the network's one batch, () -> 0-d tensor."""
    model = nn.Sequential(*network.torch_layers()).to(dtype)
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), network.weights, strict=True):
            parameter.copy_(torch.tensor(weight))
    x = torch.tensor(network.x, dtype=dtype if network.x.dtype.kind == "f" else None)
    y = torch.tensor(network.y).flatten()
    return model, lambda: nn.functional.cross_entropy(model(x).flatten(0, -2), y)


def torch_trajectory(network: Network, make: Any, steps: int, dtype: torch.dtype) -> list[np.ndarray]:
    """Parameters after `steps` steps of `make(model)` on the network's one batch."""
    model, loss_fn = torch_model(network, dtype)
    optimizer = make(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn().backward()
        optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def jax_loss(network: Network) -> Any:
    """(weights, x, y) -> mean cross-entropy."""

    def loss(weights, x, y):
        logits = network.jax_apply(weights, x)
        logits = logits.reshape(y.size, -1)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(y.size), y.reshape(-1)])

    return loss


def jax_arguments(network: Network, dtype: Any) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """(weights, x, y) for `jax_loss`."""
    weights = [jnp.asarray(w, dtype) for w in network.to_jax(network.weights)]
    x = jnp.asarray(network.x, dtype if network.x.dtype.kind == "f" else None)
    return weights, x, jnp.asarray(network.y)
