"""Random programs of layers, from one description: K-FAC takes the same steps in torch and in JAX.

Each framework finds the layers in its own way, torch by hooks and function modes, JAX in the program.
The batch is whole, in micro-batches or computed again by a checkpoint, in JAX also mapped example by
example.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from suite.jax import kfac, value_and_grad
from suite.torch import KFAC

pytestmark = pytest.mark.slow

STEPS, EXAMPLES, LENGTH = 3, 6, 3


class Own(nn.Module):
    """A layer that is none of torch's."""

    def __init__(self, weight, bias=None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias


class Product(Own):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Columns(Own):
    def forward(self, x):
        return x @ self.weight


class Heads(Own):
    def forward(self, x):
        return torch.einsum("...hi,hio->...ho", x, self.weight)


class EachPosition(Own):
    def forward(self, x):
        return torch.einsum("nti,tio->nto", x, self.weight)


class Positions(Own):
    def forward(self, x):
        return x + self.weight


class Token(Own):
    def forward(self, x):
        return torch.where(x[..., :1] > 0, self.weight, x)


def module(make: Any) -> Callable[..., nn.Module]:
    """One of torch's own layers, with these parameters."""

    def made(weight, bias=None):
        layer = make(weight, bias is not None)
        layer.weight = weight
        if bias is not None:
            layer.bias = bias
        return layer

    return made


def normalized(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


def convolved(x, w, b):
    names = ("NCH", "OIH", "NCH")
    return jax.lax.conv_general_dilated(x, w, (1,), [(1, 1)], dimension_numbers=names) + b[:, None]


def affine(x, w, *b):
    return x @ w.T + b[0] if b else x @ w.T


# Kinds of layers: torch's module, made of its parameters, and the same function of arrays.
KINDS: dict[str, tuple[Any, Any]] = {
    "linear": (module(lambda w, b: nn.Linear(w.shape[1], w.shape[0], b)), affine),
    "product": (Product, affine),
    "columns": (Columns, lambda x, w: x @ w),
    "heads": (Heads, lambda x, w: jnp.einsum("...hi,hio->...ho", x, w)),
    "each position": (EachPosition, lambda x, w: jnp.einsum("nti,tio->nto", x, w)),
    "convolution": (module(lambda w, b: nn.Conv1d(*w.shape[1::-1], 3, padding=1)), convolved),
    "norm": (module(lambda w, b: nn.LayerNorm(len(w))), normalized),
    "table": (module(lambda w, b: nn.Embedding(*w.shape)), lambda x, w: w[x]),
    "positions": (Positions, lambda x, w: x + w),
    "token": (Token, lambda x, w: jnp.where(x[..., :1] > 0, w, x)),
}


class Program:
    """Operations on an array (examples, positions, features), the last of which may be gone."""

    def __init__(self, seed: int) -> None:
        self.random, self.normal = random.Random(seed), np.random.default_rng(seed).normal
        self.weights: list[np.ndarray] = []
        self.layers: list[tuple[str, tuple[int, ...]]] = []
        self.shape, self.operations, self.names = [LENGTH, 4], [], []
        self.tokens = self.random.random() < 0.3
        if self.tokens:
            table = self.layer("table", (7, 4))
            self.operations.append(lambda xp, use, x: use(table, x))
        for _ in range(self.random.randint(2, 5)):
            possible = ANYWHERE + (WITH_POSITIONS if len(self.shape) == 2 else [])
            drawn = self.random.choice(possible)
            self.operations.append(drawn(self))
            self.names.append(drawn.__name__)
        self.operations.append(self.product(2))

    def weight(self, *shape: int) -> int:
        self.weights.append(self.normal(size=shape) / np.sqrt(shape[-1]))
        return len(self.weights) - 1

    def layer(self, kind: str, *shapes: tuple[int, ...]) -> int:
        self.layers.append((kind, tuple(self.weight(*shape) for shape in shapes)))
        return len(self.layers) - 1

    def linear(self, into: int, out: int) -> int:
        kind, bias = self.random.choice(["linear", "product"]), self.random.random() < 0.5
        return self.layer(kind, (out, into), *([(out,)] if bias else []))

    def product(self, out: int) -> Callable[..., Any]:
        layer, self.shape[-1] = self.linear(self.shape[-1], out), out
        return lambda xp, use, x: use(layer, x)


def activated(p: Program):
    product = p.product(p.random.choice([3, 4, 6]))
    return lambda xp, use, x: xp.tanh(product(xp, use, x))


def columns(p: Program):
    layer, p.shape[-1] = p.layer("columns", (p.shape[-1], 4)), 4
    return lambda xp, use, x: xp.tanh(use(layer, x))


def residual(p: Program):
    layer = p.linear(p.shape[-1], p.shape[-1])
    return lambda xp, use, x: x + xp.tanh(use(layer, x))


def twice(p: Program):
    layer = p.linear(p.shape[-1], p.shape[-1])
    return lambda xp, use, x: use(layer, x) * xp.tanh(use(layer, xp.sin(x)))


def gate(p: Program):
    first, second = (p.linear(p.shape[-1], 4) for _ in range(2))
    p.shape[-1] = 4
    return lambda xp, use, x: use(first, x) * xp.tanh(use(second, x))


def norm(p: Program):
    layer = p.layer("norm", (p.shape[-1],), (p.shape[-1],))
    return lambda xp, use, x: use(layer, x)


def beside(p: Program):
    layer = p.linear(p.shape[-1], 3)
    p.shape[-1] += 3
    return lambda xp, use, x: xp.concatenate([x, use(layer, x)], -1)


def attention(p: Program):
    query, key, value = (p.linear(p.shape[-1], p.shape[-1]) for _ in range(3))

    def apply(xp, use, x):
        weights = xp.exp(use(query, x) @ use(key, x).swapaxes(1, 2))
        return x + weights / weights.sum(-1)[..., None] @ use(value, x)

    return apply


def mixed(p: Program):
    layer = p.linear(p.shape[0], p.shape[0])
    return lambda xp, use, x: xp.tanh(use(layer, x.swapaxes(1, 2))).swapaxes(1, 2)


def recurrent(p: Program):
    first, again = p.linear(p.shape[-1], 4), p.linear(4, 4)
    p.shape[-1] = 4

    def apply(xp, use, x):
        states = [xp.tanh(use(first, x[:, 0]))]
        for t in range(1, x.shape[1]):
            states.append(xp.tanh(use(first, x[:, t]) + use(again, states[-1])))
        return xp.stack(states, 1)

    return apply


def convolution(p: Program):
    layer, p.shape[-1] = p.layer("convolution", (4, p.shape[-1], 3), (4,)), 4
    return lambda xp, use, x: xp.tanh(use(layer, x.swapaxes(1, 2)).swapaxes(1, 2))


def each_position(p: Program):
    layer, p.shape[-1] = p.layer("each position", (*p.shape, 3)), 3
    return lambda xp, use, x: xp.tanh(use(layer, x))


def heads(p: Program):
    into, layer = p.product(6), p.layer("heads", (2, 3, 3))

    def apply(xp, use, x):
        x = into(xp, use, x)
        return xp.tanh(use(layer, x.reshape(*x.shape[:-1], 2, 3))).reshape(x.shape)

    return apply


def positions(p: Program):
    layer = p.layer("positions", tuple(p.shape))
    return lambda xp, use, x: use(layer, x)


def token(p: Program):
    layer = p.layer("token", (p.shape[-1],))
    return lambda xp, use, x: use(layer, x)


def pooled(p: Program):
    del p.shape[0]
    return lambda xp, use, x: x.mean(1)


def for_all_positions(p: Program):
    layer = p.linear(p.shape[-1], p.shape[-1])
    return lambda xp, use, x: x + use(layer, x.mean(1))[:, None]


ANYWHERE = [activated, columns, residual, twice, gate, norm, beside, heads]
WITH_POSITIONS = [
    *(attention, mixed, recurrent, convolution, each_position),
    *(positions, token, pooled, for_all_positions),
]


class Network(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.own = [nn.Parameter(torch.from_numpy(w.copy())) for w in program.weights]
        self.layers = nn.ModuleList(
            KINDS[kind][0](*(self.own[i] for i in weights)) for kind, weights in program.layers
        )

    def forward(self, x):
        for operation in self.program.operations:
            x = operation(torch, lambda layer, x: self.layers[layer](x), x)
        return x


def torch_trajectory(program, x, y, how, settings):
    model, x, y = Network(program), torch.from_numpy(x), torch.from_numpy(y)
    base = torch.optim.SGD(model.own, lr=0.05, momentum=0.9)
    kfac = KFAC(model, base, **settings)
    for _ in range(STEPS):
        kfac.zero_grad()
        parts = [slice(0, 2), slice(2, None)] if how == "micro-batches" else [slice(None)]
        for part in parts:
            out = checkpoint(model, x[part], use_reentrant=False) if how == "again" else model(x[part])
            (F.mse_loss(out, y[part]) * len(out) / len(x)).backward()
        kfac.step()
    assert all(one.treatment == "kfac" for one in kfac.routing()), kfac.routing()
    return [p.detach().numpy() for p in model.own]


def jax_trajectory(program, x, y, how, settings):
    settings = {**settings}
    limit = settings.pop("max_factor_size")

    def network(weights, x):
        def use(layer, x):
            kind, places = program.layers[layer]
            return KINDS[kind][1](x, *(weights[i] for i in places))

        for operation in program.operations:
            x = operation(jnp, use, x)
        return x

    def loss(weights, x, y):
        if how == "mapped":
            out = jax.vmap(lambda x: network(weights, x[None])[0])(x)
        else:
            out = (jax.checkpoint(network) if how == "again" else network)(weights, x)
        return jnp.mean((out - y) ** 2)

    vag, weights = value_and_grad(loss, max_factor_size=limit), list(map(jnp.asarray, program.weights))
    plan = vag.plan(weights, x, y)
    assert all(one.treatment == "kfac" for one in plan.routing), plan
    tx = kfac(plan, 0.05, momentum=0.9, **settings)
    state = tx.init(weights)

    @jax.jit
    def step(weights, state):
        halves = [slice(0, 3), slice(3, None)] if how == "micro-batches" else [slice(None)]
        found = [vag(weights, x[part], y[part]) for part in halves]
        _, grads, statistics = jax.tree.map(lambda *each: sum(each) / len(each), *found)
        updates, state = tx.update(grads, state, weights, statistics=statistics)
        return optax.apply_updates(weights, updates), state

    for _ in range(STEPS):
        weights, state = step(weights, state)
    return list(map(np.asarray, weights))


@pytest.mark.parametrize("seed", range(20))
def test_both_frameworks_take_the_same_steps(seed):
    program, drawn = Program(seed), random.Random(-seed - 1)
    rng = np.random.default_rng(seed + 1000)
    x = rng.integers(7, size=(EXAMPLES, LENGTH)) if program.tokens else None
    x = rng.normal(size=(EXAMPLES, LENGTH, 4)) if x is None else x
    y = rng.normal(size=(EXAMPLES, *program.shape))
    settings = {
        "damping": 0.05,
        "factor_update_steps": drawn.choice([1, 2]),
        "inv_update_steps": 2,
        "compute_method": drawn.choice(["inverse", "eigen"]),
        "max_factor_size": drawn.choice([5, 8192]),
        "kl_clip": drawn.choice([0.001, None]),
    }
    ours = torch_trajectory(program, x, y, drawn.choice(["whole", "micro-batches", "again"]), settings)
    ways = ["whole", "mapped", "micro-batches", "again"]
    theirs = jax_trajectory(program, x, y, drawn.choice(ways), settings)
    for before, a, b in zip(program.weights, ours, theirs, strict=True):
        # A shift of all keys of an attention has no gradient but rounding errors.
        assert np.abs(a - b).max() <= 1e-7 * np.abs(a - before).max() + 1e-12, program.names
    assert max(np.abs(a - b).max() for a, b in zip(ours, program.weights, strict=True)) > 1e-3
