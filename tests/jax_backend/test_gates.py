"""Sums of products of one leaf, p a + (1 - p) b: one use, whose gradient is g (a - b)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_fishers import check, normal, squares_of_rows
from suite.jax import value_and_grad


def gate(p, x):
    return p * x + (1 - p) * jnp.cos(x)


def scanned(p, x):
    return lax.scan(lambda h, _: (gate(p, h), None), x, length=1)[0]


# (a function of the leaf and rows of 4, how many entries the leaf has)
GATES = {
    "gate": (gate, 4),
    "the other way": (lambda p, x: (1 - p) * jnp.sin(x) - x * p, 4),
    "of three": (lambda p, x: p * x - (jnp.sin(x) * (-p) + (1 - p) * jnp.cos(x)), 4),
    "of slices": (lambda p, x: p[1:] * x + jnp.sin(x) * (1 - p[1:]), 5),
    "of two halves": (lambda p, x: p[:4] * x + (1 - p[4:]) * jnp.cos(x), 8),
    "one number": (gate, ()),
    "jit": (jax.jit(gate), 4),
    "remat": (jax.checkpoint(gate), 4),
    "scan": (scanned, 4),
    "vmap": (lambda p, x: jax.vmap(functools.partial(gate, p))(x), 4),
    "lerp": (lambda p, x: jnp.cos(x) + p * (x - jnp.cos(x)), 4),
}


def loss_of(function, p, x):
    return jnp.sum(jnp.sin(function(p["mu"], x) @ p["w"]))


def sizes(size):
    return {"mu": 0.4 + 0.1 * normal(*np.atleast_1d(size).astype(int)), "w": normal(4, 3, seed=1)}


@pytest.mark.parametrize("rows", ["expand", "reduce"])
@pytest.mark.parametrize("name", GATES)
def test_a_gate_has_the_squares_of_its_rows_gradients(name, rows):
    function, size = GATES[name]
    params, x = sizes(size), normal(6, 4, seed=2)
    if size == ():
        params["mu"] = jnp.asarray(0.4)
    check(functools.partial(loss_of, function), params, x)
    statistics = value_and_grad(functools.partial(loss_of, function), rows=rows)(params, x)[2]
    squares = squares_of_rows(functools.partial(loss_of, function), params, x, "mu", rows)
    main = statistics.layers["['mu']"].main
    np.testing.assert_allclose(main.G.ravel(), np.ravel(squares), rtol=1e-10)


def test_a_shift_after_it_is_its_shift():
    params, x = {**sizes(4), "shift": normal(4, seed=5)}, normal(6, 4, seed=2)

    def loss(p, x):
        return jnp.sum(jnp.sin((gate(p["mu"], x) + p["shift"]) @ p["w"]))

    plan, statistics = check(loss, params, x)
    assert plan.routing["['shift']"].reason == "shift of ['mu']"
    each = jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])
    pairs = jnp.stack([each["mu"], each["shift"]], -1)
    expected = jnp.einsum("nci,ncj->cij", pairs, pairs)
    np.testing.assert_allclose(statistics["['mu']"].main.A, expected, rtol=1e-10)


@pytest.mark.parametrize("case", ["read again", "times a number", "another leaf", "through a function"])
def test_other_sums_are_uses_by_themselves(case):
    params = sizes(4)
    if case == "another leaf":
        params["nu"] = 0.3 + 0.1 * normal(4, seed=7)

    def made(p, q, r, x):
        first, second = p * x, (1 - q) * jnp.cos(x)
        if case == "read again":
            return first + second + jnp.sin(first)
        if case == "times a number":
            return first + (3 * q) * jnp.cos(x)
        if case == "another leaf":
            return first + (1 - r) * jnp.cos(x)
        return first + jnp.tanh(second)

    def loss(p, x):
        return jnp.sum(jnp.sin(made(p["mu"], p["mu"], p.get("nu"), x) @ p["w"]))

    x = normal(6, 4, seed=2)
    _, statistics = check(loss, params, x)
    uses = [jnp.broadcast_to(params["mu"], x.shape)] * 2
    nu = params.get("nu")
    found = jax.grad(lambda p, q: jnp.sum(jnp.sin(made(p, q, nu, x) @ params["w"])), (0, 1))(*uses)
    squares = sum(jnp.sum(g**2, 0) for g in found)
    np.testing.assert_allclose(statistics["['mu']"].main.G.ravel(), squares, rtol=1e-10)


def test_in_derivatives_each_sum_is_a_use():
    """u and ∂u/∂x, of which each has a gate, with slopes for rows there."""
    params, x = sizes(4), normal(6, 4, seed=2)
    head = params["w"].sum(1)

    def made(p, q, x):
        y = jnp.tanh(gate(p, x))
        slope = (1 - y**2) * (q - (1 - q) * jnp.sin(x))
        return jnp.sum(jnp.sin(slope @ head))

    def loss(p, x):
        _, slope = jax.jvp(lambda x: jnp.tanh(gate(p["mu"], x)), (x,), (jnp.ones_like(x),))
        return jnp.sum(jnp.sin(slope @ jnp.sum(p["w"], 1)))

    statistics = value_and_grad(loss)(params, x)[2]
    both = [jnp.broadcast_to(params["mu"], x.shape)] * 2
    found = jax.grad(made, (0, 1))(*both, x)
    squares = sum(jnp.sum(g**2, 0) for g in found)
    np.testing.assert_allclose(statistics.layers["['mu']"].main.G.ravel(), squares, rtol=1e-10)
