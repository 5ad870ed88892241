"""Products that a loss computes twice: of a function, and again in the derivatives of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from jax.extend import core as jex

from jax_fishers import check, normal
from suite.jax import value_and_grad
from suite.jax.repeats import without_repeats

P = {"w": normal(2, 5), "b": normal(5), "v": normal(5, 1, seed=1), "c": normal(1, seed=2)}
X = normal(7, 2, seed=3)


def network(p, x, added=0.0, activation=jnp.tanh):
    return activation(x @ p["w"] + p["b"] + added) @ p["v"] + p["c"]


def pulled_back(u, x, *added):
    value, pull = jax.vjp(lambda x: u(x, *added), x)
    return value, pull(jnp.ones_like(value))[0]


def slope_of(u):
    return jax.grad(lambda x, *added: u(x, *added).sum())


# u and u' at the points x; what is added to the layers' outputs are arguments, too.
SLOPES = {
    "one after another": lambda u, x, *added: (u(x, *added), slope_of(u)(x, *added)),
    "slopes first": lambda u, x, *added: (slope_of(u)(x, *added), u(x, *added))[::-1],
    "jit": lambda u, x, *added: (jax.jit(u)(x, *added), jax.jit(slope_of(u))(x, *added)),
    "point by point": lambda u, x, *added: (u(x, *added), jax.vmap(slope_of(u))(x, *added)),
    "at once": pulled_back,
}


ACTIVATIONS = [jnp.tanh, jnp.sin, jax.nn.silu, jax.nn.gelu, jax.nn.softplus, jax.nn.relu]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", SLOPES)
def test_a_layer_of_values_and_slopes_at_the_same_points_is_used_once(way, activation):
    """What is added to a layer's output, in values and slopes, has the gradient of both."""

    def loss(p, x, *added):
        u, slope = SLOPES[way](functools.partial(network, p, activation=activation), x, *added)
        return jnp.mean((u[:, 0] - 1 + slope[:, 0]) ** 2)

    plan, statistics = check(lambda p, x: loss(p, x), P, X)
    g = jax.grad(loss, 2)(P, X, jnp.zeros((7, 5)))
    own, rows = statistics["['w']"].main, np.concatenate([X, np.ones((7, 1))], 1)
    np.testing.assert_array_equal(own.rows, 7)
    np.testing.assert_allclose(own.A[0], rows.T @ rows, rtol=1e-12)
    np.testing.assert_allclose(own.G[0], g.T @ g, rtol=1e-10)
    assert plan.last[0].terms == 7


CURVATURES = {
    "hessian": lambda u, x: u(x) + jnp.trace(jax.hessian(u)(x)),
    "hessian first": lambda u, x: jnp.trace(jax.hessian(u)(x)) + u(x),
    "one by one": lambda u, x: u(x) * jax.grad(u)(x)[0] - jax.grad(lambda x: jax.grad(u)(x)[1])(x)[1],
    "forward over reverse": lambda u, x: u(x) * jax.grad(u)(x)[0] - jax.jacfwd(jax.grad(u))(x)[1, 1],
}


@pytest.mark.parametrize(
    "activation", [jax.nn.elu, jax.nn.softplus, jax.nn.mish], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("way", CURVATURES)
def test_the_terms_of_values_beside_derivatives_of_second_order_are_the_points(way, activation):
    hidden = {"h": normal(5, 5, seed=4), "d": normal(5, seed=5)}

    def loss(p, x):
        def u(x):
            h = activation(x @ p["w"] + p["b"])
            return (activation(h @ p["h"] + p["d"]) @ p["v"] + p["c"])[0]

        return jnp.mean(jax.vmap(functools.partial(CURVATURES[way], u))(x) ** 2)

    assert value_and_grad(loss).plan(P | hidden, X).last[0].terms == 7


def own_derivative(turned):
    """sin, with its derivative or the opposite one."""
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda x, t: (jnp.sin(x[0]), (-1 if turned else 1) * jnp.cos(x[0]) * t[0]))
    return f


def programs():
    @functools.partial(jax.custom_vjp)
    def turned(x):
        return x

    turned.defvjp(lambda x: (x, None), lambda _, g: (-g,))

    def draws_of_two_kinds(p, x):
        key = jax.random.key(3)
        with jax.threefry_partitionable(True):
            a = jax.random.normal(key, x.shape)
        with jax.threefry_partitionable(False):
            b = jax.random.normal(key, x.shape)
        return network(p, a) * network(p, b + 1)

    def dropout(key, x):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    keys = jax.random.key(0), jax.random.key(1)
    return {
        "derivatives turned": lambda p, x: (
            network(p, x, activation=own_derivative(False))
            + network(p, x, activation=own_derivative(True))
        ),
        "gradients turned": lambda p, x: network(p, x) + jnp.sin(turned(x @ p["w"]) @ p["v"]),
        "draws of two kinds": draws_of_two_kinds,
        "zero added": lambda p, x: network(p, 0.0 + x) + network(p, x + 0),
        "no gradient": lambda p, x: network(p, x) * jax.lax.stop_gradient(network(p, x)),
        "signs of zeros": lambda p, x: network(p, x / 0.0 > 0) + network(p, x / -0.0 > 0),
        "rounded": lambda p, x: network(p, x) + network(p, x.astype("float16").astype(x.dtype)),
        "dropout": lambda p, x: network(p, dropout(keys[0], x)) + network(p, dropout(keys[1], x)),
        "other weights": lambda p, x: network(p, x) + network(p | {"w": 2 * p["w"]}, x),
    }


@pytest.mark.parametrize("name", programs())
def test_a_program_without_repeats_computes_the_same(name):
    """Where what is nearly alike is not; it is rewritten, for it has a product twice."""

    def loss(p, x):
        again = jnp.sum(jnp.sin(x @ p["w"]) * jnp.cos(x @ p["w"]))
        return again + jnp.mean(programs()[name](p, x) ** 2)

    leaves, tree = jax.tree.flatten((P, X))
    closed = jax.make_jaxpr(lambda leaves: loss(*jax.tree.unflatten(tree, leaves)))(leaves)
    shared = without_repeats(closed, leaves)
    assert shared is not closed

    def run(closed):
        return jax.value_and_grad(lambda own: jex.jaxpr_as_fun(closed)(*own)[0])(leaves)

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), run(shared), run(closed))


def test_a_jitted_part_that_asks_for_shardings_stays_one():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    features = jax.jit(jnp.sin, out_shardings=sharding)

    def loss(p, x):
        return jnp.mean((network(p, features(x)) * network(p, features(x))) ** 2)

    leaves, tree = jax.tree.flatten((P, X))
    closed = jax.make_jaxpr(lambda leaves: loss(*jax.tree.unflatten(tree, leaves)))(leaves)
    shared = without_repeats(closed, leaves)
    assert shared is not closed
    calls = [eqn for eqn in shared.jaxpr.eqns if "out_shardings" in eqn.params]
    assert [eqn.params["out_shardings"] for eqn in calls] == [(sharding,)]


@pytest.mark.parametrize("along", ["forward", "several"])
def test_the_terms_of_values_beside_derivatives_without_biases_are_the_points(along):
    p = {"w": P["w"], "v": P["v"]}

    def loss(p, x):
        def u(x):
            return jnp.tanh(x @ p["w"]) @ p["v"]

        value = u(x)
        if along == "forward":
            slope = jax.jvp(u, (x,), (jnp.ones_like(x),))[1]
        else:
            slope = jax.vmap(lambda x: jax.jacfwd(u)(x).sum())(x)[:, None]
        return jnp.mean((value + slope) ** 2)

    assert value_and_grad(loss).plan(p, X).last[0].terms == 7


def test_a_bias_stays_in_its_layers_block_beside_derivatives_by_jet():

    def loss(p, x):
        zeros = jnp.zeros_like(x)
        y, (_, second) = jet(lambda x: network(p, x), (x,), ((jnp.ones_like(x), zeros),))
        return jnp.mean((network(p, x) + y + second) ** 2)

    blocks = {r.parameter: r.factors for r in value_and_grad(loss).routing(P, X)}
    assert blocks["['w']"] == "3x3, 5x5"  # with the bias


def test_a_program_in_which_nothing_is_computed_twice_stays_as_it_is():
    closed = jax.make_jaxpr(lambda p, x: network(p, x) + network(p, 2 * x))(P, X)
    assert without_repeats(closed, [*jax.tree.leaves(P), X]) is closed


def test_what_loops_and_remat_hold_stays_in_them_twice_if_need_be():

    def loss(p, x):
        def step(total, x):
            return total + jnp.sum(network(p, x[None])), None

        total, _ = jax.lax.scan(step, 0.0, x)
        return total + jnp.sum(jax.checkpoint(network)(p, x)) * jnp.sum(network(p, x) ** 2)

    assert float(value_and_grad(loss)(P, X)[2]["['w']"].main.rows[0]) == 3 * 7
