"""Leaves that are multiplied with a number before their product, against Fishers of the leaf itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_fishers import assert_exact, check, normal
from suite.jax import probe, value_and_grad, verify

C = jnp.asarray(0.6, float)

TIMES = {
    "literal": lambda w, c: w * 0.35,
    "number first": lambda w, c: np.float64(0.35) * w,
    "division": lambda w, c: w / np.sqrt(5.0),
    "computed": lambda w, c: w / jnp.sqrt(5),
    "array": lambda w, c: w * jnp.asarray(0.3),
    "minus": lambda w, c: -w,
    "from a number": lambda w, c: 2.0 - w,
    "argument": lambda w, c: c * w,
    "weak type": lambda w, c: w * jnp.asarray(0.6) / jax.jit(lambda c: c)(c),
    "zero": lambda w, c: (c - c) * w,
    "several": lambda w, c: ((-(w.T * c)).T / (2 + c)) * 3.0,
    "broadcast": lambda w, c: w * jnp.full(w.shape, c),
    "jit": lambda w, c: jax.jit(lambda w: w * jnp.sin(c))(w),
    "remat": lambda w, c: jax.checkpoint(lambda w: jnp.sin(c) * w)(w),
    "view": lambda w, c: -((c * w[::-1]).reshape(-1)[::-1].reshape(w.shape)) * c,
    "its norm": lambda w, c: w / lax.stop_gradient(jnp.sqrt(jnp.sum(w**2))),
}

# What multiplies a bias is not known yet when its product runs: the bias is a layer by itself.
COMPUTED_LATER = ("computed", "weak type", "zero", "several", "broadcast", "jit", "remat", "its norm")


@pytest.mark.parametrize("bias", ["none", "plain", "times"])
@pytest.mark.parametrize("name", TIMES)
def test_a_weight_times_a_number_is_exact_for_one_row(name, bias):
    times = TIMES[name]
    params = {"w": normal(4, 3)} | ({} if bias == "none" else {"b": normal(3, seed=1)})

    def loss(p, x, c):
        y = x @ times(p["w"], c)
        if bias != "none":
            y = y + (times(p["b"], c) if bias == "times" else p["b"])
        return jnp.sum(jnp.sin(y))

    x = normal(1, 4, seed=2)
    plan = assert_exact(loss, params, x, C, index=int(bias == "times" and name in COMPUTED_LATER))
    assert len(plan.layers) == 1 + (bias == "times" and name in COMPUTED_LATER)
    if len(plan.layers) == 1:
        assert (plan.layers[0].bias is None) == (bias == "none")
    else:
        assert_exact(loss, params, x, C, diagonal=True)


def test_rows_and_outputs_of_a_weight_times_a_number():
    params = {"w": normal(4, 3), "b": normal(3, seed=1)}
    x, c = normal(5, 4, seed=2), 0.35

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ (c * p["w"]) + p["b"]))

    _, statistics = check(loss, params, x)
    own = statistics["['w']"].main
    rows = np.concatenate([c * x, np.ones((5, 1))], 1)
    g = np.cos(x @ (c * params["w"]) + params["b"])
    np.testing.assert_allclose(own.A[0], rows.T @ rows, rtol=1e-12)
    np.testing.assert_allclose(own.G[0], g.T @ g, rtol=1e-12)

    # Without a bias A is that of all layers with this input.
    _, statistics = check(lambda p, x: jnp.sum(jnp.sin(x @ (c * p))), params["w"], x)
    g = c * np.cos(x @ (c * params["w"]))
    np.testing.assert_allclose(statistics["params"].main.A[0], x.T @ x, rtol=1e-12)
    np.testing.assert_allclose(statistics["params"].main.G[0], g.T @ g, rtol=1e-12)


def test_an_A_is_shared_where_its_rows_are_not_multiplied():
    params = {"u": normal(4, 3), "v": normal(4, 3, seed=1), "w": normal(4, 3, seed=2)}
    biases = {"a": normal(3, seed=3), "b": normal(3, seed=4)}
    x = normal(5, 4, seed=5)

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ p["u"]) * jnp.sin(x @ (0.3 * p["v"])) * jnp.sin(x @ -p["w"]))

    plan, _ = check(loss, params, x)
    assert [layer.input_of for layer in plan.layers] == [None, "['u']", "['u']"]

    def with_biases(p, x):
        return jnp.sum(jnp.sin(x @ p["u"] + p["a"]) * jnp.sin(x @ (0.3 * p["v"]) + p["b"]))

    del params["w"]
    plan, _ = check(with_biases, params | biases, x)
    assert [layer.input_of for layer in plan.layers] == [None, None]


@pytest.mark.parametrize("max_factor_size", [3, 100])
@pytest.mark.parametrize("identity", [True, False])
def test_second_moments_in_a_basis(max_factor_size, identity):
    params = {"w": normal(4, 3), "b": normal(3, seed=1)}
    x = normal(5, 4, seed=2)

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ (p["w"] / 3) + 2 * p["b"]))

    U_A, U_G = np.linalg.qr(normal(5, 5, seed=3))[0], np.linalg.qr(normal(3, 3, seed=4))[0]
    bases = {"['w']": (None if identity else jnp.asarray(U_A)[None], jnp.asarray(U_G)[None])}
    vag = value_and_grad(loss, max_factor_size=max_factor_size)
    own = jax.jit(functools.partial(vag, bases=bases))(params, x)[2]["['w']"].main
    each = jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])
    each = np.concatenate([each["w"], each["b"][:, None]], 1)  # (rows, d_in, d_out)
    rotated = U_G.T @ each.swapaxes(1, 2) @ (np.eye(5) if identity else U_A)
    np.testing.assert_allclose(own.products[0], (rotated**2).sum(0), rtol=1e-10)
    rows = np.concatenate([x / 3, np.full((5, 1), 2.0)], 1)
    A = np.diag(own.A[0]) if max_factor_size == 3 else own.A[0]
    expected = rows.T @ rows
    expected = np.diag(np.diag(expected)) if max_factor_size == 3 else expected
    np.testing.assert_allclose(A, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bias", [True, False])
def test_reduced_rows(bias):
    params = {"w": normal(4, 3)} | ({"b": normal(3, seed=1)} if bias else {})
    x, c = normal(5, 6, 4, seed=2), 0.35

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ (c * p["w"]) + p.get("b", 0.0)))

    own = value_and_grad(loss, rows="reduce")(params, x)[2]["['w']"].main
    means = np.asarray(x.mean(1))
    g = np.asarray(jnp.cos(x @ (c * params["w"]) + params.get("b", 0.0)).sum(1))
    rows, g = (np.concatenate([c * means, np.ones((5, 1))], 1), g) if bias else (means, c * g)
    np.testing.assert_allclose(own.A[0], rows.T @ rows, rtol=1e-10)
    np.testing.assert_allclose(own.G[0], g.T @ g, rtol=1e-10)


@pytest.mark.parametrize("bias", ["none", "plain", "times"])
def test_a_kernel_times_a_number(bias):
    """A single place, so that it is exact; then many."""
    params = {"k": normal(4, 2, 3, 2)} | ({} if bias == "none" else {"b": normal(4, seed=1)})

    def loss(p, x, c):
        y = lax.conv_general_dilated(x, p["k"] * c, (1, 1), "VALID")
        if bias != "none":
            y = y + (p["b"] * (0.5 if bias == "times" else 1.0))[:, None, None]
        return jnp.sum(jnp.sin(y))

    plan = assert_exact(loss, params, normal(1, 2, 3, 2, seed=2), C)
    assert (plan.layers[0].bias is None) == (bias == "none")
    check(loss, params, normal(3, 2, 5, 4, seed=2), C)


def test_a_table_times_a_number_and_its_head_with_another():
    table, ids = normal(7, 3), jnp.array([1, 2, 1])
    c, d = 1.7, 0.4

    def loss(p, ids):
        return jnp.sum(jnp.sin((p * c)[ids]))

    _, statistics = check(loss, table, ids)
    g = c * np.cos(c * table[ids])
    np.testing.assert_array_equal(statistics["params"].main.A[0], [0, 2, 1, 0, 0, 0, 0])
    np.testing.assert_allclose(statistics["params"].main.G[0], g.T @ g, rtol=1e-12)
    assert_exact(loss, table, ids[:1][None])

    def tied(p, ids):
        return jnp.sum(jnp.sin(jnp.tanh((p * c)[ids]) @ (p / d).T))

    plan, statistics = check(tied, table, ids)
    (layer,) = plan.layers
    assert layer.tied
    hidden = np.tanh(c * table[ids])
    g = np.cos(hidden @ np.asarray(table / d).T)
    own = statistics["params"]
    np.testing.assert_allclose(own.main.A[0], hidden.T @ hidden, rtol=1e-12)
    np.testing.assert_allclose(own.main.G[0], ((g / d) ** 2).sum(0), rtol=1e-12)
    g = c * (1 - hidden**2) * (g @ np.asarray(table / d))
    np.testing.assert_array_equal(own.transposed.A[0], [0, 2, 1, 0, 0, 0, 0])
    np.testing.assert_allclose(own.transposed.G[0], g.T @ g, rtol=1e-12)


def test_a_leaf_used_twice_with_different_numbers_is_one_block():
    params, x = {"w": normal(4, 4), "b": normal(4, seed=1)}, normal(5, 4, seed=2)

    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ (0.3 * p["w"])) @ -p["w"]))

    _, statistics = check(loss, {"w": params["w"]}, x)
    w = np.asarray(params["w"])
    hidden = np.tanh(0.3 * x @ w)
    last = np.cos(hidden @ w)
    first = (1 - hidden**2) * (last @ -w.T)
    own = statistics["['w']"].main
    np.testing.assert_allclose(own.A[0], x.T @ x + hidden.T @ hidden, rtol=1e-12)
    np.testing.assert_allclose(own.G[0], 0.09 * first.T @ first + last.T @ last, rtol=1e-12)

    def with_bias(p, x):
        hidden = jnp.tanh(x @ (0.3 * p["w"]) + p["b"])
        return jnp.sum(jnp.sin(hidden @ -p["w"] + 2 * p["b"]))

    plan, statistics = check(with_bias, params, x)
    assert plan.layers[0].bias is not None
    hidden = np.tanh(0.3 * x @ w + params["b"])
    rows = [0.3 * x, -hidden], [np.ones((5, 1)), np.full((5, 1), 2.0)]
    rows = np.concatenate([np.concatenate(side) for side in rows], 1)
    np.testing.assert_allclose(statistics["['w']"].main.A[0], rows.T @ rows, rtol=1e-12)


@pytest.mark.parametrize("max_factor_size", [3, 100])
@pytest.mark.parametrize("basis", ["none", "identity", "eigenvectors"])
@pytest.mark.parametrize("of", ["tangents", "a use without the bias"])
def test_uses_without_the_bias_have_the_coordinates_of_those_with_it(of, basis, max_factor_size):
    """c belongs to the inputs of both: A and G of one block are sums over all of them."""
    c, params = 0.25, {"w": normal(4, 3), "b": normal(3, seed=1)}
    x, t = normal(5, 4, seed=2), normal(5, 4, seed=3)

    def loss(p, x, t):
        if of == "tangents":
            y, tangent = jax.jvp(lambda x: x @ (c * p["w"]) + p["b"], (x,), (t,))
        else:
            y, tangent = x @ (c * p["w"]) + p["b"], t @ (c * p["w"])
        return jnp.sum(jnp.sin(y) * jnp.cos(tangent))

    U_A, U_G = (np.linalg.qr(normal(n, n, seed=4))[0] for n in (5, 3))
    U_A = None if basis == "identity" else U_A
    bases = {"['w']": (None if U_A is None else jnp.asarray(U_A)[None], jnp.asarray(U_G)[None])}
    vag = value_and_grad(loss, max_factor_size=max_factor_size)
    own = vag(params, x, t, bases=None if basis == "none" else bases)[2]["['w']"].main
    verify(loss, params, x, t, rtol=1e-10)

    y, tangent = np.asarray(c * x @ params["w"] + params["b"]), np.asarray(c * t @ params["w"])
    g = np.concatenate([np.cos(y) * np.cos(tangent), -np.sin(y) * np.sin(tangent)])
    rows = np.concatenate([np.c_[c * x, np.ones(5)], np.c_[c * t, np.zeros(5)]])
    expected = np.diag(np.sum(rows**2, 0)) if max_factor_size == 3 else rows.T @ rows
    A = np.diag(own.A[0]) if max_factor_size == 3 else own.A[0]
    np.testing.assert_allclose(A, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(own.G[0], g.T @ g, rtol=1e-12)
    if basis != "none":
        products = np.square(g @ U_G).T @ np.square(rows if U_A is None else rows @ U_A)
        np.testing.assert_allclose(own.products[0], products, rtol=1e-10)


STACKED = {"w": 0.5 * normal(3, 4, 4), "b": normal(3, 4, seed=1)}
NUMBERS = jnp.asarray([0.3, -1.2, 0.8])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["bare", "remat", "jit"])
@pytest.mark.parametrize("where", ["inside", "outside", "of each", "jit inside", "remat inside"])
def test_scanned_layers_times_numbers(wrap, where, bias):
    x = normal(5, 4, seed=2)
    numbers = NUMBERS if where == "of each" else jnp.full(3, C)
    helper = {"jit inside": jax.jit, "remat inside": jax.checkpoint}.get(where, lambda f: f)

    def loss(p, x, c, each):
        def body(x, layer):
            w, b, own = layer
            if where != "outside":
                w = helper(lambda w, own: w * (own if where == "of each" else c))(w, own)
            return jnp.tanh(x @ w + (b if bias else 0.0)), None

        stack = c * p["w"] if where == "outside" else p["w"]
        return jnp.sum(jnp.sin(lax.scan(wrap(body), x, (stack, p["b"], each))[0]))

    def by_hand(p, x, numbers):
        for i, layer in enumerate(p):
            x = jnp.tanh(x @ (numbers[i] * layer["w"]) + (layer["b"] if bias else 0.0))
        return jnp.sum(jnp.sin(x))

    plain = [] if bias else ["['b']"]
    _, statistics = check(loss, STACKED, x, C, NUMBERS, uncovered=plain)
    split = [{"w": STACKED["w"][i], "b": STACKED["b"][i]} for i in range(3)]
    plain = [] if bias else [f"[{i}]['b']" for i in range(3)]
    _, apart = check(by_hand, split, x, numbers, uncovered=plain)
    for i in range(3):
        for side in ("A", "G"):
            np.testing.assert_allclose(
                getattr(statistics["['w']"].main, side)[i],
                getattr(apart[f"[{i}]['w']"].main, side)[0],
                rtol=1e-10,
            )


@pytest.mark.parametrize("where", ["inside", "outside", "own"])
def test_ensembles_branches_and_devices(where):
    params = {"w": normal(3, 4, 2), "b": normal(3, 2, seed=1)}
    x = normal(1, 4, seed=2)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    def vmapped(p, x, c):
        times = (lambda w: w) if where == "outside" else (lambda w: w * c)
        w, xs = p["w"] * c if where == "outside" else p["w"], jnp.stack([x, 2 * x, -x])
        return jnp.sum(jnp.sin(jax.vmap(lambda w, b, x: x @ times(w) + b)(w, p["b"], xs)))

    plan = assert_exact(vmapped, params, x, C)
    assert plan.layers[0].groups == 3
    params = {"w": params["w"][0], "b": params["b"][0]}

    def multiplied(w, c, x):
        return w * (c if where == "own" else jnp.sin(c))

    def branched(p, x, c):
        w = multiplied(p["w"], c, x) if where == "outside" else p["w"]
        times = (lambda w: w) if where == "outside" else (lambda w: multiplied(w, c, x))
        return lax.cond(
            c > 0,
            lambda x: jnp.sum(jnp.sin(x @ times(w) + p["b"])),
            lambda x: jnp.sum(jnp.cos(x)),
            x,
        )

    assert_exact(branched, params, x, C)

    def mapped(p, x, c):
        w = multiplied(p["w"], c, x) if where == "outside" else p["w"]

        def local(w, b, x, c):
            w = w if where == "outside" else multiplied(w, c, x)
            return lax.psum(jnp.sum(jnp.sin(x @ w + b)), "data")

        specs = P(), P(), P("data"), P()
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(w, p["b"], x, c)

    assert_exact(mapped, params, x, C)


@pytest.mark.parametrize(
    "spread",
    [
        lambda s, c: 1 + c * s,
        lambda s, c: (1 - s[None]) / 3,
        lambda s, c: jnp.broadcast_to(c * s, (6, 4)),
        lambda s, c: 0.5 * jnp.broadcast_to(s, (6, 4)),
    ],
)
@pytest.mark.parametrize("join", [jnp.multiply, jnp.add, jnp.subtract])
def test_an_elementwise_leaf_times_a_number(spread, join):
    params = {"s": 0.1 * normal(4), "w": normal(4, 3, seed=1)}

    def loss(p, x, c):
        return jnp.sum(jnp.sin(join(x, spread(p["s"], c)) @ p["w"]))

    x = normal(5, 6, 4, seed=2)
    _, statistics = check(loss, params, x, C)
    each = jax.vmap(jax.grad(lambda s, x: jnp.sum(jnp.sin(join(x, s) @ params["w"]))), (None, 0))
    at = jnp.broadcast_to(spread(params["s"], C), (6, 4))
    rows = jnp.stack([each(at[i], x[:, i]) for i in range(6)], 1).reshape(30, 4)
    jacobian = jax.vmap(jax.grad(lambda s, i: jnp.broadcast_to(spread(s, C), (6, 4))[0, i]), (None, 0))
    rows = rows @ jacobian(params["s"], jnp.arange(4))
    np.testing.assert_allclose(statistics["['s']"].main.G[0], (rows**2).sum(0), rtol=1e-10)
    assert float(statistics["['s']"].main.rows[0]) == 30


@pytest.mark.parametrize("times", [lambda w: 0.3 * w, lambda w: -w], ids=["literal", "minus"])
@pytest.mark.parametrize("index", [0, 1])
def test_leaves_beside_each_other_times_a_number(times, index):
    params = [normal(4, 2), normal(4, 3, seed=1), normal(2, seed=2), normal(3, seed=3)]

    def loss(p, x):
        kernel = times(jnp.concatenate([p[0], 2 * p[1]], 1)).astype(float)
        return jnp.sum(jnp.sin(x @ kernel + jnp.concatenate([p[2], p[3]])))

    plan = assert_exact(loss, params, normal(1, 4, seed=4), index=index)
    assert [layer.bias for layer in plan.layers] == [2, 3]


def test_low_precision_and_marked_products():
    params = {"w": normal(4, 3).astype(jnp.float32), "b": normal(3, seed=1).astype(jnp.float32)}
    x = normal(5, 4, seed=2).astype(jnp.float32)

    def loss(p, x):
        w = (p["w"].astype(jnp.bfloat16) * 0.35).astype(jnp.float32) / jnp.sqrt(jnp.float32(3))
        return jnp.sum(jnp.sin(x @ w + p["b"]))

    assert verify(loss, params, x, rtol=1e-2)
    own = jax.jit(value_and_grad(loss))(params, x)[2]["['w']"].main
    c = float(jnp.bfloat16(0.35)) / np.sqrt(3)
    rows = np.concatenate([c * x, np.ones((5, 1))], 1)
    np.testing.assert_allclose(own.A[0], rows.T @ rows, rtol=1e-5)
    assert own.A.dtype == own.G.dtype == jnp.float32

    def marked(p, x):
        w = 0.3 * p
        return jnp.sum(jnp.sin(probe(x, w, jnp.sum(x[:, :, None] * w, axis=1))))

    assert_exact(marked, normal(4, 3), normal(1, 4, seed=1))


@pytest.mark.parametrize(
    "quantized",
    [
        lambda w, q, _: w + lax.stop_gradient(q(w) - w),
        lambda w, q, _: lax.stop_gradient(q(w) - w) + w,
        lambda w, q, _: w - lax.stop_gradient(w - q(w)),
        lambda w, q, _: (0.5 * w + lax.stop_gradient(q(w) - w))[::-1],
        lambda w, q, noise: w + 0.1 * noise,
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_straight_through_weight_is_exact_for_one_row(quantized, bias):
    params = {"w": normal(4, 3)} | ({"b": normal(3, seed=1)} if bias else {})
    noise = normal(4, 3, seed=3)

    def loss(p, x, noise):
        w = quantized(p["w"], lambda w: jnp.round(w * 8) / 8, noise)
        return jnp.sum(jnp.sin(x @ w + p.get("b", 0.0)))

    plan = assert_exact(loss, params, normal(1, 4, seed=2), noise)
    assert (plan.layers[0].bias is not None) == bias
    check(loss, params, normal(5, 4, seed=2), noise)


@jax.custom_vjp
def rounded(w):
    return lax.stop_gradient(jnp.round(w * 8) / 8)


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (2 * g,))


@jax.custom_vjp
def as_integers(w):
    return jnp.round(w * 8).astype(jnp.int8).astype(w.dtype) / 8


as_integers.defvjp(lambda w: (as_integers(w), None), lambda _, g: (2 * g,))


@jax.custom_vjp
def unread(w):
    return jnp.ones(())


unread.defvjp(lambda w: (jnp.ones(()), w), lambda w, g: (g * jnp.cos(w),))


def test_a_number_inside_a_derivative_of_its_own_stops_capture():
    @jax.custom_vjp
    def dense(x, w):
        return x @ (0.5 * w)

    dense.defvjp(lambda x, w: (dense(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    params = {"u": normal(4, 4), "w": normal(4, 3, seed=1)}

    def loss(p, x):  # the derivatives are twice those of what is inside
        return jnp.sum(jnp.sin(dense(x, p["u"]) @ p["w"]))

    plan, _ = check(loss, params, normal(5, 4, seed=2), uncovered=["['u']"])
    assert plan.routing["['u']"].reason.startswith("used by `custom_vjp_call`, whose derivative")


@pytest.mark.parametrize(
    "of",
    [
        lambda w: w + rounded(w),
        lambda w: w + as_integers(w),
        lambda w: w + (lax.stop_gradient(w) + w),
        lambda w: w * unread(w),
        lambda w: w + unread(w),
        lambda w: w * lax.scan(lambda c, _: (c * jnp.mean(w), None), 1.0, None, 2)[0],
    ],
)
def test_what_has_a_derivative_is_no_number(of):
    params = {"u": normal(4, 4), "w": normal(4, 3, seed=1)}

    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ of(p["u"])) @ p["w"]))

    check(loss, params, normal(5, 4, seed=2), uncovered=["['u']"])


@pytest.mark.parametrize(
    "of",
    [
        lambda w: w * jnp.max(rounded(w)),
        lambda w: w * jnp.max(as_integers(w)),
        lambda w: w * jnp.mean(w),
        lambda w: w / jnp.sqrt(jnp.sum(w**2)),
        lambda w: w * lax.cond(w[0, 0] > 0, jnp.max, jnp.min, w),
    ],
)
def test_a_number_of_a_weight_that_it_is_multiplied_with_is_held(of):
    params = {"u": normal(4, 4), "w": normal(4, 3, seed=1)}

    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ of(p["u"])) @ p["w"]))

    plan, _ = check(loss, params, normal(5, 4, seed=2))
    assert "as constants" in plan.routing["['u']"].reason


@pytest.mark.parametrize(
    "of",
    [
        lambda q, x: q * 0.5,
        lambda q, x: -q,
        lambda q, x: q + 0.1 * x,
        lambda q, x: x + q,
        lambda q, x: lax.stop_gradient(jnp.round(q) - q) + q,
    ],
)
def test_a_leaf_that_meets_a_weight_as_its_input_leaves_it_covered(of):
    """Latent codes, scaled or with something added, are activations."""
    params = {"q": normal(5, 4), "v": normal(2, 2, seed=1), "w": normal(4, 2, seed=2)}

    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.tanh(of(p["q"], x) @ p["w"]) @ p["v"]))

    check(loss, params, normal(5, 4, seed=3), uncovered=["['q']"])


def test_no_number_is_taken_from_nothing():
    params = {"u": normal(4, 2), "w": normal(4, 0, seed=1)}

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ p["u"])) + jnp.sum(x @ (p["w"] * jnp.full((4, 0), 0.5)))

    check(loss, params, normal(5, 4, seed=2), uncovered=["['w']"])


@pytest.mark.skipif(not hasattr(jax.sharding, "auto_axes"), reason="jax 0.7 has explicit axes")
def test_a_number_that_is_sharded_over_explicit_axes():
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((1,), ("d",), axis_types=(explicit,), devices=jax.devices()[:1])
    params, x = {"b": normal(3), "w": normal(4, 3, seed=1)}, normal(5, 4, seed=2)

    def moments(times):
        def loss(p, x):
            product = jnp.dot(x, times(p["w"]) * p["w"], **layout)
            return jnp.sum(jnp.sin(product + p["b"]))

        found = value_and_grad(loss)(params, x)[2]["['w']"].main
        return np.asarray(found.A), np.asarray(found.G)

    layout = {}
    expected = moments(lambda w: 0.6)
    with jax.set_mesh(mesh):
        layout = {"out_sharding": P("d", None)}
        params["w"], x = (jax.device_put(a, P("d", None)) for a in (params["w"], x))
        found = moments(lambda w: jnp.full_like(w, 0.6))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
