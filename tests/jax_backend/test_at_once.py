"""Updates that nobody compiles: compiled once, and what they are when they are compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from suite.jax import dense_newton, kfac, kron, lra, scale_by_kron, value_and_grad

PARAMS = {
    "w": np.random.default_rng(0).normal(size=(5, 4)),
    "v": np.random.default_rng(1).normal(size=(4, 3)),
}
X = np.random.default_rng(2).normal(size=(8, 5))


def loss(params, x):
    return jnp.mean(jnp.sum((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2, axis=-1))


VAG = value_and_grad(loss)
MAKERS = {
    "kfac": lambda: kfac(VAG.plan(PARAMS, X), 0.1, inv_update_steps=2, damping=lambda t: 0.1 / (1 + t)),
    "kron": lambda: kron(0.01, preconditioner_update_probability=0.5),
    "scale_by_kron": lambda: optax.chain(scale_by_kron(), optax.scale(-0.01)),
    "lra": lambda: lra(0.01, rank=2),
    "dense_newton": lambda: dense_newton(0.01),
}


COMPILED: list[str] = []


def heard(name, seconds, **more):
    if "backend_compile" in name:
        COMPILED.append(name)


jax.monitoring.register_event_duration_secs_listener(heard)


def steps(tx, count, wrap, each=lambda: None):
    params, state = jax.tree.map(jnp.asarray, PARAMS), tx.init(PARAMS)

    def one(params, state):
        _, grads, statistics = VAG(params, X)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    one = wrap(one)
    for _ in range(count):
        params, state = one(params, state)
        each()
    return params, state


@pytest.mark.parametrize("name", MAKERS)
def test_an_update_that_is_not_compiled_is_compiled_once(name):
    counts = [len(COMPILED)]
    found = steps(MAKERS[name](), 6, lambda one: one, lambda: counts.append(len(COMPILED)))
    expected = steps(MAKERS[name](), 6, jax.jit)
    assert counts[0] < counts[3]
    assert counts[3:] == [counts[3]] * 4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, expected)


def test_a_flag_that_is_no_tracer_compiles_nothing_more():
    counts = []
    for number in range(6):
        _, grads, statistics = VAG(PARAMS, X, capture=jnp.asarray(number % 2 == 0))
        rows = [float(layer.main.rows[0]) for layer in statistics.layers.values()]
        assert rows == ([8.0, 8.0] if number % 2 == 0 else [0.0, 0.0])
        jax.tree.map(np.testing.assert_allclose, grads, jax.grad(loss)(PARAMS, X))
        counts.append(len(COMPILED))
    assert counts[3:] == [counts[3]] * 3


def test_a_pair_and_a_loss_still_give_the_pair():
    vector = jax.tree.map(jnp.ones_like, jax.tree.map(jnp.asarray, PARAMS))
    grads = jax.grad(loss)(PARAMS, X)
    for make in (kron, lra):
        tx = make(0.01)
        ends = []
        for more in ({}, {"value_fn": lambda p: loss(p, X)}):
            updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS, vector=vector, hvp=grads, **more)
            ends.append(updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), *ends)


@pytest.mark.parametrize("name", ["kfac", "kron", "lra"])
def test_schedules_of_what_nothing_traces_may_be_any_function(name):
    box = {"value": 0.0}

    def chosen(step):
        return box["value"] if int(step) >= 0 else 0.0

    makers = {
        "kfac": lambda value: kfac(VAG.plan(PARAMS, X), 0.1, damping=value, kl_clip=None),
        "kron": lambda value: kron(0.1, preconditioner_lr=value),
        "lra": lambda value: lra(0.1, rank=2, preconditioner_lr=value),
    }
    tx, params = makers[name](chosen), jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    for value in (0.1, 0.5, 0.9):
        box["value"] = value
        _, grads, statistics = VAG(params, X)
        alike = makers[name](value)
        expected, _ = jax.jit(lambda *given, tx=alike: tx.update(*given[:3], statistics=given[3]))(
            grads, state, params, statistics
        )
        updates, state = tx.update(grads, state, params, statistics=statistics)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), updates, expected)
