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


def torch_model(network: Network, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The model and its loss on the network's one batch, () -> 0-d tensor."""
    model = nn.Sequential(*network.torch_layers()).to(dtype)
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), network.weights, strict=True):
            parameter.copy_(torch.tensor(weight))
    x, y = torch.tensor(network.x, dtype=dtype), torch.tensor(network.y)
    return model, lambda: nn.functional.cross_entropy(model(x), y)


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
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(y.size), y])

    return loss


def jax_arguments(network: Network, dtype: Any) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """(weights, x, y) for `jax_loss`."""
    weights = [jnp.asarray(w, dtype) for w in network.weights]
    return weights, jnp.asarray(network.x, dtype), jnp.asarray(network.y)
