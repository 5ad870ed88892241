"""Functions of a leaf, entry by entry, that meet rows: their slopes are part of the rows' gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_fishers import check, normal, squares_of_rows
from suite.jax import value_and_grad

softplus, sigmoid = jax.nn.softplus, jax.nn.sigmoid


@jax.custom_jvp
def doubled(p):
    """Its derivative is three times what its inside has."""
    return jnp.sin(p)


doubled.defjvp(lambda given, moved: (jnp.sin(given[0]), 3 * jnp.cos(given[0]) * moved[0]))


@jax.custom_vjp
def flipped(p):
    return jnp.exp(p)


flipped.defvjp(lambda p: (jnp.exp(p), p), lambda p, g: (-g * p,))


def of_scan(function, x):
    return lax.scan(lambda h, _: (function(h), None), x, length=1)[0]


def gate(p, x):
    return sigmoid(p) * x + (1 - sigmoid(p)) * jnp.cos(x)


# (a function of the leaf and rows of 4, how many entries the leaf has)
FUNCTIONS = {
    "exp": (lambda p, x: x * jnp.exp(p), 4),
    "exp of a number": (lambda p, x: x * jnp.exp(p), ()),
    "softplus": (lambda p, x: softplus(p) * x, 4),
    "an own derivative": (lambda p, x: doubled(p) * x, 4),
    "an own derivative backward": (lambda p, x: x * flipped(p), 4),
    "of that": (lambda p, x: x * jnp.log(2 + doubled(2 * p)), 4),
    "relu": (lambda p, x: x * jax.nn.relu(p - 0.4), 4),
    "numbers before and after": (lambda p, x: x * (2 - 3 * jnp.exp(-2 * p + 1) / 5), 4),
    "of functions": (lambda p, x: x * jnp.exp(-jnp.exp(p)), 4),
    "twice": (lambda p, x: x * (p * jnp.exp(p) + jnp.square(p)), 4),
    "a choice": (lambda p, x: x * jnp.where(p > 0.4, jnp.exp(p), p**3), 4),
    "bounds": (lambda p, x: x * jnp.clip(jnp.sin(p), 0.38, 0.42), 4),
    "added": (lambda p, x: jnp.sin(x) - jnp.exp(p), 4),
    "in place of others": (lambda p, x: jnp.where(x > 0, x, jnp.exp(p)), 4),
    "divides": (lambda p, x: jnp.sin(x) / p, 4),
    "of which divides": (lambda p, x: jnp.sin(x) / softplus(p), 4),
    "divided by rows": (lambda p, x: p / (2 + jnp.cos(x)), 4),
    "divided by rows, and a function": (lambda p, x: jnp.exp(p) / (2 + x**2), 4),
    "a number divided": (lambda p, x: x * (2 / p), 4),
    "times its whole part": (
        lambda p, x: x * (lambda e: e * e.astype(int).astype(e.dtype))(jnp.exp(p + 1)),
        4,
    ),
    "moved before": (lambda p, x: x * jnp.exp(p[1:][::-1]), 5),
    "moved after": (lambda p, x: x * jnp.exp(p)[1:][::-1], 5),
    "moved between": (lambda p, x: x * jnp.sin(jnp.exp(p)[1:]), 5),
    "parts with functions": (lambda p, x: x * jnp.sin(jnp.split(jnp.exp(p), 2)[1]), 8),
    "a gate": (gate, 4),
    "a gate of functions": (lambda p, x: jnp.exp(p) * x - p * jnp.cos(x), 4),
    "a gate of multiples": (
        lambda p, x: (lambda g: g * x + (1 - g) * jnp.cos(x))(2 * sigmoid(p / 3)),
        4,
    ),
    "jit": (jax.jit(gate), 4),
    "jit of the function": (lambda p, x: x * jax.jit(jnp.exp)(p), 4),
    "jit of parts": (lambda p, x: x * jnp.log(jax.jit(lambda p: jnp.exp(p)[1:] + 1)(p)), 5),
    "remat": (jax.checkpoint(gate), 4),
    "remat of the rest": (lambda p, x: jax.checkpoint(jnp.multiply)(jnp.exp(p), x), 4),
    "in a scan": (lambda p, x: of_scan(lambda h: h * jnp.exp(p), x), 4),
    "outside of a scan": (lambda p, x: (lambda d: of_scan(lambda h: h * d, x))(jnp.exp(p)), 4),
    "in a branch": (lambda p, x: lax.cond(x[0, 0] > 9, lambda: x, lambda: x * jnp.exp(p)), 4),
    "vmap": (lambda p, x: jax.vmap(lambda x: x * jnp.exp(p))(x), 4),
}


def loss_of(function, p, x):
    return jnp.sum(jnp.sin(function(p["mu"], x) @ p["w"]))


def sizes(size):
    mu = jnp.asarray(0.4) if size == () else 0.4 + 0.1 * normal(size)
    return {"mu": mu, "w": normal(4, 3, seed=1)}


@pytest.mark.parametrize("rows", ["expand", "reduce"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_squares_of_its_rows_gradients(name, rows):
    function, size = FUNCTIONS[name]
    params, x = sizes(size), normal(6, 4, seed=2)
    own = functools.partial(loss_of, function)
    check(own, params, x)
    found = value_and_grad(own, rows=rows)(params, x)[2].layers["['mu']"].main.G
    squares = squares_of_rows(own, params, x, "mu", rows)
    np.testing.assert_allclose(found.ravel(), np.ravel(squares), rtol=1e-10)


def test_a_shift_after_it_is_its_shift():
    params, x = {**sizes(4), "shift": normal(4, seed=5)}, normal(6, 4, seed=2)

    def loss(p, x):
        return jnp.sum(jnp.sin((x * jnp.exp(p["mu"]) + p["shift"]) @ p["w"]))

    plan, statistics = check(loss, params, x)
    assert plan.routing["['shift']"].reason == "shift of ['mu']"
    each = jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])
    pairs = jnp.stack([each["mu"], each["shift"]], -1)
    expected = jnp.einsum("nci,ncj->cij", pairs, pairs)
    np.testing.assert_allclose(statistics["['mu']"].main.A, expected, rtol=1e-10)


def test_what_is_added_to_a_product_is_by_itself_and_no_bias():
    params, x = sizes(3), normal(6, 4, seed=2)

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ p["w"] + softplus(p["mu"])))

    _, statistics = check(loss, params, x)
    each = jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])["mu"]
    np.testing.assert_allclose(statistics["['mu']"].main.G.ravel(), jnp.sum(each**2, 0), rtol=1e-10)
    assert statistics["['w']"].main.A.shape == (1, 4, 4)


@pytest.mark.parametrize("remat", [False, True])
def test_stacked_layers_have_each_their_own(remat):
    params = {"mu": 0.1 * normal(3, 4), "w": normal(4, 2, seed=1)}
    x = normal(6, 4, seed=2)

    def layer(h, mu):
        return jnp.sin(h * jnp.exp(mu)), None

    def loss(p, x):
        h, _ = lax.scan(jax.checkpoint(layer) if remat else layer, x, p["mu"])
        return jnp.sum(jnp.sin(h @ p["w"]))

    _, statistics = check(loss, params, x)
    each = jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])["mu"]
    np.testing.assert_allclose(
        statistics["['mu']"].main.G.reshape(3, 4), jnp.sum(each**2, 0), rtol=1e-10
    )


def test_several_functions_of_several_leaves():
    """A policy's Gaussian, and a radial basis: centres, widths and a temperature."""
    params = {
        "mean": normal(4, 3, seed=1),
        "log_std": 0.1 * normal(3, seed=2),
        "centres": normal(5, 3, seed=3),
        "widths": 0.3 * normal(5, seed=4),
        "temperature": jnp.asarray(0.2),
    }
    x, actions = normal(6, 4, seed=5), normal(6, 3, seed=6)

    def loss(p, x, actions):
        z = (actions - x @ p["mean"]) / jnp.exp(p["log_std"])
        distances = jnp.sum((z[:, None] - p["centres"]) ** 2, -1)
        basis = jnp.exp(-distances / softplus(p["widths"]))
        return jnp.mean(jax.nn.logsumexp(basis * jnp.exp(p["temperature"]), -1))

    _, statistics = check(loss, params, x, actions)
    one_by_one = functools.partial(jax.vmap(jax.grad(loss), (None, 0, 0)), params)
    each = one_by_one(x[:, None], actions[:, None])
    for name in ("log_std", "widths"):
        squares = jnp.sum(each[name] ** 2, 0) / 36  # of a mean
        np.testing.assert_allclose(
            statistics[f"['{name}']"].main.G.ravel(), squares, rtol=1e-10, err_msg=name
        )


UNCOVERED = {
    "a sum of them": (lambda p, x: x * jnp.sum(jnp.exp(p)), "reduce_sum"),
    "shares": (lambda p, x: x * jax.nn.softmax(p), "exp"),
    "a product of matrices": (lambda p, x: jnp.tile(x @ softplus(p)[:, None], 4), "dot_general"),
    "what a loop takes apart": (
        lambda p, x: lax.scan(lambda h, d: (jnp.sin(h + d), None), x, jnp.exp(p))[0],
        "scan",
    ),
}


@pytest.mark.parametrize("name", UNCOVERED)
def test_what_is_not_followed_is_plain_and_the_report_says_by_what(name):
    function, primitive = UNCOVERED[name]
    plan, _ = check(
        functools.partial(loss_of, function), sizes(4), normal(6, 4, seed=2), uncovered=["['mu']"]
    )
    assert primitive in plan.routing["['mu']"].reason


def test_steps_that_choose_by_a_traced_boolean_measure_it():
    params, x = sizes(4), normal(6, 4, seed=2)
    vag = value_and_grad(functools.partial(loss_of, gate))
    whole = vag(params, x)[2].layers["['mu']"].main.G
    for due in (True, False):
        found = jax.jit(lambda due: vag(params, x, capture=due))(due)[2].layers["['mu']"].main.G
        np.testing.assert_allclose(found, whole * due, rtol=1e-12)
