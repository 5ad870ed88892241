"""Leaves that meet activations or each other in a concatenation, against dense Fishers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jax_fishers import assert_exact, check, dense_block, exact_blocks, normal
from suite.jax import value_and_grad, verify


def gates(p, x):
    kernel = jnp.concatenate([p["i"]["w"], p["f"]["w"]], axis=-1)
    bias = jnp.concatenate([p["i"]["b"], p["f"]["b"]])
    return x @ kernel + bias


GATES = {
    "i": {"w": normal(4, 2), "b": normal(2, seed=1)},
    "f": {"w": normal(4, 3, seed=2), "b": normal(3, seed=3)},
}


def test_kernels_beside_each_other_are_the_layers_they_would_be_apart():
    x = normal(5, 4, seed=4)

    def joined(p, x):
        return jnp.sum(jnp.sin(gates(p, x)))

    def apart(p, x):
        return sum(jnp.sum(jnp.sin(x @ p[name]["w"] + p[name]["b"])) for name in ("f", "i"))

    (plan, found), (other, expected) = (check(loss, GATES, x) for loss in (joined, apart))
    assert [(r.parameter, r.treatment) for r in plan.routing] == [
        (r.parameter, r.treatment) for r in other.routing
    ]
    assert [layer.bias is not None for layer in plan.layers] == [True, True]
    assert [layer.input_of for layer in plan.layers].count(None) == 1  # one A for both
    for name in found.layers:
        one, two = found[name].main, expected[name].main
        np.testing.assert_allclose(one.G, two.G, rtol=1e-12)
        np.testing.assert_allclose(one.rows, two.rows)
    A = next(s.main.A for s in found.layers.values() if s.main.A is not None)
    B = next(s.main.A for s in expected.layers.values() if s.main.A is not None)
    np.testing.assert_allclose(A, B, rtol=1e-12)


@pytest.mark.parametrize("index", [0, 1])
def test_a_recurrent_cells_joined_kernels_are_exact_for_one_row(index):
    def loss(p, x):
        return jnp.sum(jnp.sin(jax.jit(gates)(p, x)))

    assert_exact(loss, GATES, normal(1, 4, seed=4), index=index)


@pytest.mark.parametrize(
    ("shapes", "join", "x_shape", "subscripts"),
    [
        ([(2, 3), (4, 3)], lambda ws: jnp.concatenate(ws), (1, 6), "ni,io->no"),
        ([(2, 3), (4, 3)], lambda ws: jnp.concatenate(ws).T, (1, 6), "ni,oi->no"),
        ([(4, 3), (4, 3)], lambda ws: jnp.stack(ws), (1, 2, 4), "nei,eio->neo"),
        ([(4, 3), (4, 3)], lambda ws: jnp.stack(ws, 1), (1, 4), "ni,ieo->neo"),
        ([(1, 4, 3), (2, 4, 3)], lambda ws: jnp.concatenate(ws).astype(float), (1, 4, 3), "nio,eio->ne"),
        ([(4, 1), (4, 2)], lambda ws: jnp.concatenate(ws, 1)[:, None], (1, 4), "ni,iao->nao"),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_any_axis_of_a_product_may_be_joined(shapes, join, x_shape, subscripts, index):
    params = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]

    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.einsum(subscripts, x, join(p))))

    assert_exact(loss, params, normal(*x_shape, seed=9), index=index)


@st.composite
def joined_dots(draw):
    """Sizes of a product's axes, in any order in w, and which of them is cut where."""
    sizes = {
        "b": draw(st.integers(1, 3)),
        "o": draw(st.integers(1, 3)),
        "i": draw(st.integers(1, 3)),
    }
    cut = draw(st.sampled_from("boi"))
    sizes[cut] += draw(st.integers(1, 3))
    order = "".join(draw(st.permutations("boi")))
    return sizes, cut, draw(st.integers(1, sizes[cut] - 1)), order, draw(st.booleans())


@pytest.mark.slow
@given(joined_dots())
def test_any_joined_dot_general_is_exact_for_one_row(case):
    sizes, cut, first, order, x_first = case
    x = normal(sizes["b"], 1, sizes["i"])
    axis = order.index(cut)
    w = normal(*(sizes[letter] for letter in order), seed=1)
    params = jnp.split(w, [first], axis=axis)

    def loss(p, x):
        joined = jnp.concatenate(p, axis=axis)
        numbers = (((2,), (order.index("i"),)), ((0,), (order.index("b"),)))
        if not x_first:
            numbers = tuple(pair[::-1] for pair in numbers)
        y = lax.dot_general(*((x, joined) if x_first else (joined, x)), numbers)
        return jnp.sum(y * normal(*y.shape, seed=2))

    verify(loss, params, x, rtol=1e-10)
    vag = value_and_grad(loss, require="all")
    plan, statistics = vag.plan(params, x), jax.jit(vag)(params, x)[2]
    for index in range(2):
        expected = exact_blocks(plan, [lambda p: loss(p, x)], params, index)
        np.testing.assert_allclose(dense_block(plan, statistics, index), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("index", [0, 1])
def test_joined_kernels_of_a_convolution(axis, index):
    """By output or input channels; a single place, so that it is exact."""
    shapes = ([(1, 2, 3), (3, 2, 3)], [(4, 1, 3), (4, 1, 3)])[axis]
    params = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]

    def loss(p, x):
        y = lax.conv_general_dilated(x, jnp.concatenate(p, axis), (1,), "VALID")
        return jnp.sum(jnp.sin(y))

    assert_exact(loss, params, normal(1, 2, 3, seed=5), index=index)


def test_tables_beside_each_other():
    params, ids = [normal(5, 2), normal(5, 3, seed=1)], jnp.array([1, 4, 1])

    def loss(p, ids):
        return jnp.sum(jnp.sin(jnp.concatenate(p, 1)[ids]))

    plan, statistics = check(loss, params, ids)
    for i in range(2):
        own = statistics[f"[{i}]"].main
        g = np.cos(params[i][ids])
        np.testing.assert_allclose(own.G[0], g.T @ g, rtol=1e-12)
    np.testing.assert_array_equal(statistics[plan.layers[0].name].main.A[0], [0, 2, 0, 0, 1])


@pytest.mark.parametrize("form", ["broadcast", "tile", "vmap"])
def test_a_token_beside_activations_is_diagonal(form):
    params = {"token": normal(1, 4), "w": normal(4, 3, seed=1)}
    x = normal(5, 3, 4, seed=2)

    def rows(p, x):
        if form == "broadcast":
            token = jnp.broadcast_to(p["token"], (x.shape[0], 1, 4))
        elif form == "tile":
            token = jnp.tile(p["token"], (x.shape[0], 1, 1))
        else:
            return jax.vmap(lambda one: jnp.concatenate([p["token"], one]))(x)
        return jnp.concatenate([token, x], 1)

    def loss(p, x):
        return jnp.sum(jnp.sin(rows(p, x) @ p["w"]))

    _, statistics = check(loss, params, x)
    each = jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])["token"]
    squares = jnp.sum(each**2, 0).reshape(-1)
    np.testing.assert_allclose(statistics["['token']"].main.G[0], squares, rtol=1e-10)
    assert float(statistics["['token']"].main.rows[0]) == 5


def test_one_leaf_twice_in_a_concatenation_is_not_given_the_others_bias():
    params = {"w": normal(4, 2), "b": normal(2, seed=1), "c": normal(2, seed=2)}

    def loss(p, x):
        y = x @ jnp.concatenate([p["w"], p["w"]], 1) + jnp.concatenate([p["b"], p["c"]])
        return jnp.sum(jnp.sin(y) * normal(5, 4, seed=3))

    plan, statistics = check(loss, params, normal(5, 4, seed=4))
    assert [layer.bias for layer in plan.layers] == [None, None, None]
    assert float(statistics["['w']"].main.rows[0]) == 10


def step(x, w):
    return jnp.tanh(x @ w), 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: jnp.sum(jnp.concatenate([p["u"], p["v"]]) ** 2),
        lambda p, x: jnp.sum(jnp.concatenate([p["u"], x[:4], p["v"]]) * x[:1]),
        lambda p, x: jnp.sum(jnp.concatenate([p["u"], p["v"]]).reshape(-1, 8) @ jnp.ones(8)),
        lambda p, x: lax.scan(step, x, jnp.stack([p["u"], p["v"]]))[0].sum(),
        lambda p, x: jnp.concatenate([p["u"], p["v"]])[0, 0],
    ],
)
def test_concatenations_that_stop_capture_are_named(loss):
    params = {"u": normal(4, 4), "v": normal(4, 4, seed=1), "w": normal(4, 3, seed=2)}

    def whole(p, x):
        return jnp.sin(loss(p, x) + jnp.sum(jnp.sin(x @ p["w"])))

    plan, _ = check(whole, params, normal(5, 4, seed=3), uncovered=["['u']", "['v']"])
    assert "`concatenate`" in plan.routing["['u']"].reason
