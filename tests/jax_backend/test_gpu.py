"""On a GPU: the trajectory of the CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from suite.core import linalg
from suite.jax import adaptive_kfac, eigenbases, kfac, kron, lra, value_and_grad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]

STEPS = 12
Tree = Any


def problem() -> tuple[Tree, Tree, Tree]:
    """Parameters and a batch, on the host: a convolution, a norm, layers in a scan, a head."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape) / np.sqrt(max(np.prod(shape[1:]), 1))

    params = {
        "conv": normal(4, 2, 3, 3),
        "bias": normal(4),
        "scale": 1 + 0.1 * normal(16),
        "shift": 0.1 * normal(16),
        "scanned": {"w": normal(3, 16, 16), "b": 0.1 * normal(3, 16)},
        "head": normal(16, 3),
    }
    return params, rng.normal(size=(32, 2, 6, 6)), rng.integers(0, 3, 32)


def logits_of(params: Tree, x: jax.Array) -> jax.Array:
    numbers = ("NCHW", "OIHW", "NCHW")
    x = jax.lax.conv_general_dilated(x, params["conv"], (2, 2), "VALID", dimension_numbers=numbers)
    x = jnp.tanh(x + params["bias"][:, None, None]).reshape(x.shape[0], -1)
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * params["scale"] + params["shift"]

    def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ p["w"] + p["b"]), None

    x, _ = jax.lax.scan(layer, x, params["scanned"])
    return x @ params["head"]


def loss_fn(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), y).mean()


def train_kfac(device: Any, dtype: Any, **settings: Any) -> Tree:
    params, x, y = on(device, dtype)
    vag = value_and_grad(loss_fn)
    plan = vag.plan(params, x, y)
    tx = kfac(plan, 0.05, damping=0.03, inv_update_steps=3, **settings)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: Tree, state: Tree) -> Tree:
        bases = eigenbases(state, plan) if settings["compute_method"] == "ekfac" else None
        _, grads, statistics = vag(params, x, y, bases=bases)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def train(tx: Any, device: Any, dtype: Any) -> Tree:
    params, x, y = on(device, dtype)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: Tree, state: Tree) -> Tree:
        updates, state = tx.update(jax.grad(loss_fn)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def train_adaptive(device: Any, dtype: Any) -> Tree:
    params, x, y = on(device, dtype)

    def both(params: Tree) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    vag = value_and_grad(both, has_aux=True)
    tx = adaptive_kfac(vag.plan(params), damping=0.3, inv_update_steps=3)
    state = tx.init(params)

    @jax.jit
    def step(params: Tree, state: Tree) -> Tree:
        _, grads, statistics = vag(params)
        updates, state = tx.update(grads, state, params, statistics=statistics, value_fn=both)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def on(device: Any, dtype: Any) -> Tree:
    params, x, y = problem()
    floats = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, x))
    return jax.device_put((*floats, y), device)


CASES = {
    **{
        method: lambda *where, method=method: train_kfac(*where, compute_method=method)
        for method in ("eigen", "inverse", "newton_schulz", "ekfac")
    },
    "kron": lambda *where: train(kron(0.01), *where),
    "kron, EQ": lambda *where: train(kron(0.01, geometry="EQ"), *where),
    "kron, blocks": lambda *where: train(kron(0.01, block_size=8), *where),
    "adaptive_kfac": train_adaptive,
    "lra": lambda *where: train(lra(0.01), *where),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trajectory_is_the_cpus(name):
    (cpu,), gpu = jax.devices("cpu")[:1], jax.devices("gpu")[0]
    trajectories = []
    for device in (cpu, gpu):
        with jax.default_device(device):
            found = CASES[name](device, jnp.float64)
        assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(found))
        trajectories.append(jax.tree.map(np.asarray, found))
    start = problem()[0]
    for a, b, c in zip(*map(jax.tree.leaves, (*trajectories, start)), strict=True):
        assert np.linalg.norm(a - b) < 1e-8 * (np.linalg.norm(b) + np.linalg.norm(c))
    moved = zip(*map(jax.tree.leaves, (trajectories[0], start)), strict=True)
    assert all(np.linalg.norm(b - c) > 1e-5 * np.linalg.norm(c) for b, c in moved)


@pytest.mark.parametrize("n", [40, 300, 769])
def test_inverses_are_of_full_precision_where_others_products_are_not(n):
    """Products of float32 are TF32's by default."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(n, n))).Q
    x = (basis * np.logspace(0, -4, n)) @ basis.T
    exact = np.linalg.inv(x)
    given = jnp.stack([jnp.asarray(x, jnp.float32)] * 2)
    inverse = linalg.damped_inverse(given, 0.0)
    iterated = linalg.newton_schulz_inverse(given, 0.0, jnp.zeros_like(given), 30)
    for found in (inverse, iterated):
        assert found.dtype == jnp.float32
        assert np.linalg.norm(np.asarray(found[1], np.float64) - exact) < 2e-3 * np.linalg.norm(exact)
