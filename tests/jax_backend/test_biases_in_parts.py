"""Weights and biases that a loss takes apart itself: each part is a layer, with its part of the bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from conftest import assert_close
from suite.jax import eigenbases, kfac, value_and_grad, verify

LAYERS, D = 3, 4


def numbers(*shape, seed=0):
    return jnp.asarray(0.4 * np.random.default_rng([seed, *shape]).normal(size=shape))


HEAD = {"v": numbers(D, 2), "c": numbers(2)}


def head(p, x):
    return jnp.sin(x @ p["v"] + p["c"])


def layer(x, w, b):
    return x + jnp.tanh(x @ w + b)


def in_turn(p, x):
    for i in range(LAYERS):
        x = layer(x, p["w"][i], p["b"][i])
    return head(p, x)


def first_alone(p, x):
    x = layer(x, p["w"][0], p["b"][0])
    x, _ = jax.lax.scan(lambda x, own: (layer(x, *own), None), x, (p["w"][1:], p["b"][1:]))
    return head(p, x)


def backwards(p, x):
    """The stack lies the other way round, and has a layer without a bias and one that is not used."""
    x = layer(x, p["w"][4], p["b"][4])
    x = layer(x, p["w"][2], p["b"][2])
    x = x + jnp.tanh(x @ p["w"][1])
    return head(p, x)


def backwards_alone(p, x):
    for w, b in zip(p["w"], [*p["b"], 0.0], strict=True):
        x = layer(x, w, b)
    return head(p, x)


def gated(q, k, v, p):
    return head(p, jnp.tanh(q * k + v))


def split(p, x):
    w, b = jnp.split(p["w"], 3, -1), jnp.split(p["b"], 3)
    return gated(*(x @ w + b for w, b in zip(w, b, strict=True)), p)


def split_alone(p, x):
    return gated(*(x @ w + b for w, b in zip(p["w"], p["b"], strict=True)), p)


STACKS = [numbers(LAYERS, D, D), numbers(LAYERS, D)]
FIVE = [numbers(5, D, D), numbers(5, D)]
# A loss's function and its leaves (w, b), the same of leaves by themselves, and how those lie in them.
CASES = {
    "a loop": (in_turn, STACKS, in_turn, [[*x] for x in STACKS], lambda x: [*x]),
    "the first alone": (first_alone, STACKS, in_turn, [[*x] for x in STACKS], lambda x: [*x]),
    "some": (
        backwards,
        FIVE,
        backwards_alone,
        [[FIVE[0][i] for i in (4, 2, 1)], [FIVE[1][i] for i in (4, 2)]],
        lambda x: [x[4], x[2], *([x[1]] if x.ndim > 2 else [])],
    ),
    "columns": (
        split,
        [jnp.concatenate([*STACKS[0]], -1), STACKS[1].reshape(-1)],
        split_alone,
        [[*x] for x in STACKS],
        lambda x: jnp.split(x, 3, -1),
    ),
}


def trained(function, own, **settings):
    def loss(p, x):
        return jnp.mean(function(p, x) ** 2)

    params = {"w": own[0], "b": own[1], **HEAD}
    vag = value_and_grad(loss)
    plan = vag.plan(params, numbers(16, D))
    assert max(verify(loss, params, numbers(16, D)).values()) < 1e-9
    tx = kfac(plan, learning_rate=0.1, damping=0.03, **settings)

    @jax.jit
    def step(params, state, x):
        bases = eigenbases(state, plan) if settings["compute_method"] == "ekfac" else None
        _, gradients, statistics = vag(params, x, bases=bases)
        updates, state = tx.update(gradients, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for seed in range(5):
        params, state = step(params, state, numbers(16, D, seed=seed))
    return params, plan


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@pytest.mark.parametrize("name", CASES)
def test_a_part_of_a_bias_is_in_its_layers_block(name, method):
    function, own, alone, leaves, parts_of = CASES[name]
    settings = {"compute_method": method}
    if method == "ekfac":
        settings["inv_update_steps"] = 3
    found, plan = trained(function, own, **settings)
    expected, _ = trained(alone, leaves, **settings)
    for key in ("w", "b"):
        for a, b in zip(parts_of(found[key]), expected[key], strict=True):
            assert_close(a, b)
    for key in HEAD:
        assert_close(found[key], expected[key])
    (route,) = [route for route in plan.routing if route.parameter == "['b']"]
    assert route.reason.startswith("bias of ['w'] part 0 and ")


def test_what_is_not_used_stays_as_it_is():
    (function, own, *_), settings = CASES["some"], {"compute_method": "inverse"}
    found, _ = trained(function, own, **settings)
    for unused in (0, 3):
        assert jnp.array_equal(found["w"][unused], own[0][unused])
    for unused in (0, 1, 3):
        assert jnp.array_equal(found["b"][unused], own[1][unused])


@pytest.mark.parametrize(("name", "others"), [("some", "['w'] part 1"), ("a loop", "2 others")])
def test_the_plan_names_the_layers_of_a_bias(name, others):
    function, own, *_ = CASES[name]
    params = {"w": own[0], "b": own[1], **HEAD}
    plan = value_and_grad(lambda p, x: jnp.mean(function(p, x) ** 2)).plan(params, numbers(16, D))
    (route,) = [route for route in plan.routing if route.parameter == "['b']"]
    assert route.reason == f"bias of ['w'] part 0 and {others}"


def every_other(p, x):
    return head(p, layer(x, p["w"][0], p["b"][::2]))


def one_to_rows(p, x):
    return head(p, layer(x, p["w"][0], p["b"][0]) * p["b"][1])


def overlapping(p, x):
    return head(p, layer(layer(x, p["w"][0], p["b"][:D]), p["w"][1], p["b"][2 : D + 2]))


@pytest.mark.parametrize(
    ("function", "bias"),
    [(every_other, numbers(2 * D)), (one_to_rows, numbers(2, D)), (overlapping, numbers(D + 2))],
)
def test_other_parts_are_no_coordinates_of_A(function, bias):
    _, plan = trained(function, [numbers(2, D, D), bias], compute_method="inverse")
    routes = {route.parameter: route for route in plan.routing}
    assert not routes["['b']"].reason.startswith("bias")
    assert routes["['w']"].factors.startswith(f"{D}x{D}, {D}x{D}")
