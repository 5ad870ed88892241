"""Leaves that the loss repeats for each example, and leaves that are moved before they are used."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_fishers import check, normal
from suite.jax import value_and_grad


def attended(q, x):
    return jax.nn.softmax(q @ x.swapaxes(-1, -2), -1) @ x


def normed(h):
    return (h - h.mean(-1, keepdims=True)) / h.std(-1, keepdims=True)


def recurrent(p, x):
    """From a learned state."""
    start = jnp.tile(p["mu"], (len(x), 1))
    return lax.scan(lambda h, x: (jnp.tanh(h @ p["u"] + x), None), start, x.swapaxes(0, 1))[0]


def unrolled(p, x):
    h = jnp.tile(p["mu"], (len(x), 1))
    for step in range(3):
        h = jnp.tanh(h @ p["u"] + x[:, step])
    return h


def deviations(p, x):
    """A density with a deviation for each row, as distrax has it."""
    rows = x[:, 0]
    width = jnp.broadcast_to(jnp.exp(p["mu"]), rows.shape)
    return -0.5 * (rows / width) ** 2 - jnp.log(width)


# (a function of leaves mu and u, and rows (3, 4) or tokens; what mu is)
COPIES = {
    "a learned state": (recurrent, (4,)),
    "a learned state, unrolled": (unrolled, (4,)),
    "deviations": (deviations, (4,)),
    "latents": (lambda p, x: attended(normed(jnp.tile(p["mu"], (len(x), 1, 1))), x), (2, 4)),
    "a learned state, by repeat": (
        lambda p, x: jnp.tanh((h := jnp.repeat(p["mu"][None], len(x), 0)) @ p["u"] * x[:, 0] + h),
        (4,),
    ),
    "latents, by repeat": (
        lambda p, x: attended(normed(jnp.repeat(p["mu"][None], len(x), axis=0)), x),
        (2, 4),
    ),
    "latents that are added": (
        lambda p, x: (lambda z: z + attended(normed(z), x))(jnp.tile(p["mu"], (len(x), 1, 1))),
        (2, 4),
    ),
    "a function of them": (
        lambda p, x: jnp.cumsum(jnp.broadcast_to(jnp.exp(p["mu"]), (len(x), 4)), 1) * x[:, 0],
        (4,),
    ),
    "moved about": (
        lambda p, x: jnp.sort(jnp.broadcast_to(p["mu"], (len(x), 4))[:, ::-1] * x[:, 0], 1),
        (4,),
    ),
    "vmap": (
        lambda p, x: jax.vmap(
            lambda x: lax.scan(lambda h, x: (jnp.tanh(h @ p["u"] + x), None), p["mu"], x)[0]
        )(x),
        (4,),
    ),
    "jit": (lambda p, x: jax.jit(recurrent)(p, x), (4,)),
    "remat": (lambda p, x: jax.checkpoint(unrolled)(p, x), (4,)),
}


def loss_of(function, p, x):
    return jnp.sum(jnp.sin(function(p, x) @ p["w"]))


@pytest.mark.parametrize("name", COPIES)
def test_copies_have_each_examples_gradient(name):
    function, shape = COPIES[name]
    params = {"mu": 0.4 + 0.1 * normal(*shape), "u": normal(4, 4, seed=1), "w": normal(4, 3, seed=2)}
    x, own = normal(5, 3, 4, seed=3), functools.partial(loss_of, function)
    unused = [] if jax.grad(own)(params, x)["u"].any() else ["['u']"]
    plan, statistics = check(own, params, x, uncovered=unused)
    assert "diagonal" in plan.routing["['mu']"].reason
    each = jax.vmap(jax.grad(own), (None, 0))(params, x[:, None])["mu"]
    main = statistics["['mu']"].main
    np.testing.assert_allclose(main.G.ravel(), jnp.sum(each**2, 0).ravel(), rtol=1e-10)
    assert float(main.rows[0]) == 5


def test_a_shift_that_is_repeated_and_added_stays_a_bias():
    params, x = {"w": normal(4, 3), "b": normal(3, seed=1)}, normal(5, 4, seed=2)

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ p["w"] + jnp.broadcast_to(p["b"], (len(x), 3))))

    plan, _ = check(loss, params, x)
    assert plan.routing["['b']"].reason == "bias of ['w']"


def shifted(h, shift):
    return jnp.tanh(h + jnp.sort(shift))


def in_turn(p, x):
    """The same shift in each of five layers."""
    h = x @ p["w"]
    for shift in jnp.tile(p["mu"], (5, 1)):
        h = shifted(h, shift)
    return h


# As many gains, heads, queries or layers as examples: (a function of leaves mu and w (n, 4), and rows
# (., n, n))
OTHERS = {
    "layers": in_turn,
    "layers, by scan": lambda p, x: lax.scan(
        lambda h, shift: (shifted(h, shift), None), x @ p["w"], jnp.tile(p["mu"], (5, 1))
    )[0],
    "layers, by number": lambda p, x: (
        lambda shifts: lax.fori_loop(0, 5, lambda i, h: shifted(h, shifts[i]), x @ p["w"])
    )(jnp.repeat(p["mu"][None], 5, axis=0)),
    "a mean": lambda p, x: jnp.tanh(x @ p["w"]) * normed(jnp.tile(p["mu"], (5, 1))).mean(0),
    "gains of inputs": lambda p, x: x @ (p["w"] * jnp.broadcast_to(p["mu"], p["w"].shape)),
    "a weight of copies": lambda p, x: x @ jnp.cumsum(jnp.tile(p["mu"], (len(p["w"]), 1)), 0),
    "heads": lambda p, x: (lambda s: jnp.sin((x @ p["w"]) * s) * s)(
        jnp.broadcast_to(p["mu"], p["w"].shape)
    ),
    "queries": lambda p, x: jax.nn.softmax(
        jnp.einsum("qd,btd->bqt", jnp.sort(jnp.tile(p["mu"], (len(p["w"]), 1)), 1), x @ p["w"])
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_as_often_as_there_are_examples_is_not_one_of_each(name):
    def loss(p, x):
        return jnp.sum(jnp.sin(OTHERS[name](p, x))) + jnp.sum(jnp.sin(x @ p["u"]))

    params = {"mu": normal(4), "w": normal(5, 4, seed=1), "u": normal(5, 3, seed=2)}
    plans = [value_and_grad(loss).plan(params, normal(n, 5, 5, seed=3)) for n in (5, 7)]
    assert plans[0].routing.routes == plans[1].routing.routes


def test_copies_and_another_use_that_is_none_leave_a_leaf_plain():
    params, x = {"w": normal(4, 3), "b": normal(3, seed=1)}, normal(5, 4, seed=2)

    def loss(p, x):
        copies = jnp.sort(jnp.broadcast_to(p["b"], (len(x), 3)), 1) * x[:, :3]
        return jnp.sum(jnp.sin(x @ p["w"] + copies + jnp.cumsum(p["b"])))

    plan, _ = check(loss, params, x, uncovered=["['b']"])
    assert "`cumsum`" in plan.routing["['b']"].reason
    assert "`sort`" in plan.routing["['b']"].reason


# ---- moved before they are used ------------------------------------------------------------------


def test_a_weight_with_noise_of_a_learned_size_is_a_weight():
    """Blundell et al. 2015 (arXiv:1505.05424): the mean's gradient is Σ g aᵀ."""
    params, x = {"mu": normal(4, 3), "rho": normal(4, 3, seed=1)}, normal(5, 4, seed=2)
    key = jax.random.key(0)

    def loss(p, x, key):
        deviation = jax.nn.softplus(p["rho"])
        w = p["mu"] + deviation * jax.random.normal(key, deviation.shape)
        prior = jnp.sum(p["mu"] ** 2 + deviation**2 - 2 * jnp.log(deviation))
        return jnp.sum(jnp.sin(x @ w)) + 0.01 * prior

    plan, statistics = check(loss, params, x, key, uncovered=["['rho']"])
    assert plan.penalized == ("['mu']", "['rho']")
    np.testing.assert_allclose(statistics["['mu']"].main.A[0], x.T @ x, rtol=1e-12)


def test_adapted_weights_are_the_weights():
    """MAML (Finn et al. 2017, arXiv:1703.03400): uses before and after the step of the inner loop."""
    params = {"w": normal(4, 6), "b": normal(6, seed=1), "v": normal(6, 2, seed=2)}
    x = normal(8, 4, seed=3)

    def inner(p, x):
        return jnp.mean(jnp.sin(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]))

    def loss(p, x):
        grads = jax.grad(inner)(p, x[:4])
        return inner(jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), x[4:])

    plan, _ = check(loss, params, x)
    assert plan.routing["['b']"].reason == "bias of ['w']"


def test_activations_with_a_leaf_added_are_no_weights():
    """Codes of the examples' own shape, moved by data, and then multiplied."""
    params, x = {"codes": normal(5, 4), "w": normal(4, 3, seed=1)}, normal(5, 4, seed=2)
    mixing = np.asarray(normal(4, 4, seed=3))

    def loss(p, x):
        h = jnp.tanh((p["codes"] + x) @ mixing)
        return jnp.sum(jnp.sin(h @ p["w"])) + jnp.sum(jnp.sin((p["codes"] + x) @ p["w"]))

    check(loss, params, x, uncovered=["['codes']"])
    plan = value_and_grad(loss).plan(params, x)
    assert plan.routing["['w']"].treatment == "kfac"
