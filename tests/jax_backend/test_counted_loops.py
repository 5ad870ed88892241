"""Loops that take stacked weights apart by the number of the step: w[i] is layer i's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_fishers import check, normal

LAYERS = 3


def layer(p, h, i):
    return jnp.tanh(h @ p["w"][i] + p["b"][i])


def by_fori(p, x):
    return lax.fori_loop(0, LAYERS, lambda i, h: layer(p, h, i), x)


def by_tree(p, x):
    def step(i, h):
        own = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, i, keepdims=False), p)
        return jnp.tanh(h @ own["w"] + own["b"])

    return lax.fori_loop(0, LAYERS, step, x)


def by_scan(numbers, p, x):
    return lax.scan(lambda h, i: (layer(p, h, i), None), x, numbers)[0]


def carried(p, x):
    def step(i, both):
        p, h = both
        return p, layer(p, h, i)

    return lax.fori_loop(0, LAYERS, step, (p, x))[1]


COUNTED = {
    "fori_loop": by_fori,
    "dynamic_index_in_dim": by_tree,
    "scan of arange": lambda p, x: by_scan(jnp.arange(LAYERS), p, x),
    "scan of a known array": lambda p, x: by_scan(np.arange(LAYERS), p, x),
    "weights in the carry": carried,
    "jit": lambda p, x: jax.jit(by_fori)(p, x),
    "remat": lambda p, x: jax.checkpoint(by_fori)(p, x),
    "remat inside": lambda p, x: lax.fori_loop(
        0, LAYERS, lambda i, h: jax.checkpoint(layer)(p, h, i), x
    ),
    "vmap": lambda p, x: jax.vmap(lambda row: by_fori(p, row))(x),
    "int16": lambda p, x: lax.fori_loop(0, LAYERS, lambda i, h: layer(p, h, i.astype(jnp.int16)), x),
}


def stacked_params():
    return {"w": normal(LAYERS, 4, 4), "b": normal(LAYERS, 4, seed=1)}


def second_moments(p, x, target):
    """Σ a aᵀ, with a 1 behind a, and Σ g gᵀ of each layer, in a Python loop."""

    def loss(shifts):
        h, inputs = x, []
        for w, b, shift in zip(p["w"], p["b"], shifts, strict=True):
            inputs.append(h)
            h = jnp.tanh(h @ w + b + shift)
        return jnp.sum((h - target) ** 2), inputs

    gradients, inputs = jax.grad(loss, has_aux=True)(jnp.zeros((LAYERS, *x.shape)))
    inputs = [jnp.concatenate([a, jnp.ones((len(a), 1))], 1) for a in inputs]
    return [jnp.stack([rows.T @ rows for rows in all_rows]) for all_rows in (inputs, gradients)]


@pytest.mark.parametrize("name", COUNTED)
def test_a_step_has_its_own_layer(name):
    p, x, target = stacked_params(), normal(5, 4, seed=2), normal(5, 4, seed=3)
    run = COUNTED[name]
    plan, statistics = check(lambda p, x: jnp.sum((run(p, x) - target) ** 2), p, x)
    assert [(own.groups, own.sizes) for own in plan.layers] == [(LAYERS, (5, 4))]
    main = statistics[plan.layers[0].name].main
    A, G = second_moments(p, x, target)
    np.testing.assert_allclose(main.A, A, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(main.G, G, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(main.rows, [5] * LAYERS)


def of_outer_step(p, x):
    inner = lambda i, h: lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ p["w"][i]), h)  # noqa: E731
    return lax.fori_loop(0, LAYERS, inner, x)


def of_state(p, x):
    """A stack that the loop itself changes."""

    def step(i, both):
        h, w = both
        return jnp.tanh(h @ w[i]), 0.5 * w

    return lax.fori_loop(0, LAYERS, step, (x, p["w"]))[0]


OTHERS = {
    "from 1": lambda p, x: lax.fori_loop(1, LAYERS, lambda i, h: jnp.tanh(h @ p["w"][i]), x),
    "fewer steps": lambda p, x: lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ p["w"][i]), x),
    "backwards": lambda p, x: lax.fori_loop(0, LAYERS, lambda i, h: jnp.tanh(h @ p["w"][2 - i]), x),
    "a reversed scan": lambda p, x: lax.scan(
        lambda h, i: (jnp.tanh(h @ p["w"][i]), None), x, jnp.arange(LAYERS), reverse=True
    )[0],
    "other numbers": lambda p, x: lax.scan(
        lambda h, i: (jnp.tanh(h @ p["w"][i]), None), x, np.asarray([0, 2, 1])
    )[0],
    "an outer loop's step": of_outer_step,
    "a stack that changes": of_state,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_indices_leave_a_stack_plain(name):
    p = {"w": normal(LAYERS, 4, 4), "head": normal(4, 2, seed=1)}
    x, run = normal(5, 4, seed=2), OTHERS[name]
    check(lambda p, x: jnp.sum(jnp.sin(run(p, x) @ p["head"])), p, x, uncovered=["['w']"])


def numbered(kind):
    """Steps' numbers as another dtype writes them, which does not have them all."""

    def run(p, x):
        steps = len(p["w"])
        if kind == "iota":  # 256 and 257 are one number
            numbers = lax.iota(jnp.bfloat16, steps)
            return lax.scan(lambda h, i: (layer(p, h, i.astype(int)), None), x, numbers)[0]
        if kind == "carry":
            start = (np.int8(0), x)
            step = lambda both, _: ((both[0] + np.int8(1), layer(p, both[1], both[0])), None)  # noqa: E731
            return lax.scan(step, start, length=steps)[0][1]
        return lax.fori_loop(0, steps, lambda i, h: layer(p, h, i.astype(kind)), x)

    return run


@pytest.mark.parametrize(
    ("kind", "steps"), [("iota", 300), ("carry", 200), ("int8", 200), ("uint8", 300)]
)
def test_numbers_that_a_dtype_does_not_have_leave_a_stack_plain(kind, steps):
    p = {"w": 0.7 * normal(steps, 2, 2), "b": normal(steps, 2, seed=1), "head": normal(2, 2, seed=2)}
    x, run = normal(4, 2, seed=3), numbered(kind)
    loss = lambda p, x: jnp.sum(jnp.sin(run(p, x) @ p["head"]))  # noqa: E731
    check(loss, p, x, uncovered=["['w']", "['b']"])


def test_as_many_steps_as_a_dtype_has_numbers_have_a_block_each():
    p, x, run = {"w": normal(128, 2, 2), "b": normal(128, 2, seed=1)}, normal(4, 2), numbered("int8")
    plan, _ = check(lambda p, x: jnp.sum(jnp.sin(run(p, x))), p, x)
    assert [(own.groups, own.sizes) for own in plan.layers] == [(128, (3, 2))]
