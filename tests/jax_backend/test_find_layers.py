"""What capture looks through: loops, branches, calls, views, tables; against dense Fishers.

The oracle: for one row, A ⊗ G of a layer is the outer product of its gradient with itself, exactly. For
several rows the Fisher's diagonal for an entry read once per row is Σ over rows of squared gradients,
by `jax.grad` of one example at a time.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental.jet import jet
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_fishers import assert_exact, check, dense_block, exact_blocks, normal
from suite.jax import eigenbases, kfac, probe, value_and_grad, verify
from suite.jax.views import View, overlap

# ---- products ------------------------------------------------------------------------------------


@st.composite
def dot_generals(draw):
    """Shapes of x and w with one row, and dimension numbers in any order."""
    letters = {
        "b": draw(st.lists(st.integers(1, 3), max_size=2)),
        "c": draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)),
        "o": draw(st.lists(st.integers(1, 3), max_size=2)),
        "n": [1] * draw(st.integers(0, 2)),
    }

    def operand(kinds):
        axes = [(kind, i) for kind in kinds for i in range(len(letters[kind]))]
        axes = draw(st.permutations(axes))
        return axes, tuple(letters[kind][i] for kind, i in axes)

    (x_axes, x_shape), (w_axes, w_shape) = operand("bnc"), operand("boc")
    order = {k: draw(st.permutations([(k, i) for i in range(len(letters[k]))])) for k in "bc"}
    numbers = tuple(
        tuple(tuple(axes.index(a) for a in order[k]) for axes in (x_axes, w_axes)) for k in "cb"
    )
    return x_shape, w_shape, numbers, draw(st.booleans())


@pytest.mark.slow
@given(dot_generals())
def test_any_dot_general_is_exact_for_one_row(case):
    x_shape, w_shape, numbers, x_first = case
    x, w = normal(*x_shape, seed=1), normal(*w_shape, seed=2)
    if not x_first:
        numbers = tuple(pair[::-1] for pair in numbers)

    def product(w, x):
        return lax.dot_general(*((x, w) if x_first else (w, x)), numbers)

    c = normal(*product(w, x).shape, seed=3)
    vag = value_and_grad(lambda p, x: jnp.sum(product(p, x) * c))
    _, _gradient, statistics = jax.jit(vag)(w, x)
    plan = vag.plan(w, x)
    expected = exact_blocks(plan, [lambda p: jnp.sum(product(p, x) * c)], w)
    found = dense_block(plan, statistics)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    verify(lambda p, x: jnp.sum(product(p, x) * c), w, x, rtol=1e-10)


@st.composite
def convolutions(draw):
    rank = draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    sizes = [draw(st.integers(4, 6)) for _ in range(rank)]
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    settings = {
        "window_strides": each(1, 2),
        "padding": tuple((draw(st.integers(-1, 2)), draw(st.integers(0, 2))) for _ in range(rank)),
        "lhs_dilation": each(1, 2),
        "rhs_dilation": each(1, 2),
        "feature_group_count": groups,
    }
    letters = "HW"[:rank]
    specs = ["".join(draw(st.permutations(list(letters + pair)))) for pair in ("NC", "OI", "NC")]
    x = {"N": 2, "C": groups * draw(st.integers(1, 2)), **dict(zip(letters, sizes, strict=True))}
    w = {"O": groups * draw(st.integers(1, 2)), "I": x["C"] // groups}
    w |= dict(zip(letters, kernel, strict=True))
    return [x[i] for i in specs[0]], [w[i] for i in specs[1]], tuple(specs), settings


@pytest.mark.slow
@given(convolutions())
def test_any_convolutions_rows_are_its_patches(case):
    x_shape, w_shape, specs, settings = case
    x, w = normal(*x_shape), normal(*w_shape, seed=1)
    conv = functools.partial(lax.conv_general_dilated, dimension_numbers=specs, **settings)
    y = jax.eval_shape(conv, x, w)
    if 0 in y.shape:
        return
    c = normal(*y.shape, seed=2)

    def loss(p, x):
        return jnp.sum(conv(x, p) * c)

    verify(loss, w, x, rtol=1e-9)
    vag = value_and_grad(loss)
    _, _, statistics = jax.jit(vag)(w, x)
    (layer,) = vag.plan(w, x).layers
    (sums,) = statistics.layers.values()
    # tr A of a block is the sum of squared inputs over all that one output channel reads
    jacobian = jax.jit(jax.jacobian(lambda w: conv(x, w)))(w)
    channel = specs[2].index("C")
    squares = jnp.sum(jacobian**2, axis=tuple(i for i in range(jacobian.ndim) if i != channel))
    per_block = squares.reshape(layer.groups, -1)[:, 0]
    np.testing.assert_allclose(jnp.trace(sums.main.A, axis1=1, axis2=2), per_block, rtol=1e-9, atol=1e-9)
    assert float(sums.main.rows[0]) == c.size // y.shape[channel]


@pytest.mark.slow
@given(convolutions())
def test_any_convolution_of_one_place_is_exact(case):
    """Strides longer than the image leave one place."""
    x_shape, w_shape, specs, settings = case
    x_shape[specs[0].index("N")] = 1
    settings = {**settings, "window_strides": (40,) * (len(x_shape) - 2)}
    x, w = normal(*x_shape), normal(*w_shape, seed=1)
    conv = functools.partial(lax.conv_general_dilated, dimension_numbers=specs, **settings)
    y = jax.eval_shape(conv, x, w)
    if 0 in y.shape:
        return
    assert y.size == y.shape[specs[2].index("C")]
    c = normal(*y.shape, seed=2)

    def loss(p):
        return jnp.sum(conv(x, p) * c)

    vag = value_and_grad(loss)
    _, _, statistics = jax.jit(vag)(w)
    plan = vag.plan(w)
    expected = exact_blocks(plan, [loss], w)
    np.testing.assert_allclose(dense_block(plan, statistics), expected, rtol=1e-9, atol=1e-12)


def test_a_convolution_of_one_place_is_exact():
    def loss(p, x):
        y = lax.conv_general_dilated(x, p["k"], (1, 1), "VALID") + p["b"][:, None, None]
        return jnp.sum(jnp.sin(y))

    params = {"k": normal(4, 1, 3, 2), "b": normal(4, seed=1)}
    grouped = functools.partial(lax.conv_general_dilated, feature_group_count=2)
    plan = assert_exact(loss, params, normal(1, 1, 3, 2, seed=2))
    assert plan.layers[0].bias is not None

    def in_groups(p, x):
        return jnp.sum(jnp.sin(grouped(x, p, (1, 1), "VALID")))

    plan = assert_exact(in_groups, normal(4, 2, 3, 2), normal(1, 4, 3, 2, seed=2))
    assert plan.layers[0].groups == 2


def test_heads_and_experts_are_stacks_of_blocks():
    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.einsum("ehd,nhe->nhd", p, x)))

    plan = assert_exact(loss, normal(3, 4, 2), normal(1, 4, 3, seed=1))
    assert plan.layers[0].groups == 4
    ensembles = normal(3, 4, 2), normal(3, 2, seed=1)

    def vmapped(p, x):
        return jnp.sum(jnp.sin(jax.vmap(lambda w, b, x: x @ w + b)(*p, jnp.stack([x, 2 * x, -x]))))

    plan = assert_exact(vmapped, ensembles, normal(1, 4, seed=2))
    assert plan.layers[0].groups == 3
    assert plan.layers[0].bias is not None


# ---- tables and elementwise ----------------------------------------------------------------------


def test_lookups_count_rows():
    table, ids = normal(7, 3), jnp.array([[1, 2, 1], [0, 6, 1]])

    def loss(p, ids, take):
        return jnp.sum(jnp.sin(take(p, ids)) * normal(2, 3, 3, seed=1))

    for take in (
        lambda p, ids: p[ids],
        lambda p, ids: jnp.take(p, ids, axis=0),
        lambda p, ids: jnp.take(p, ids, axis=0, mode="clip"),
        lambda p, ids: jnp.moveaxis(jnp.take(p.T, ids, axis=1), 0, -1),
        lambda p, ids: jax.vmap(lambda i: p[i])(ids),
        lambda p, ids: jax.vmap(jax.vmap(lambda i: p[i]))(ids),
    ):
        plan, statistics = check(functools.partial(loss, take=take), table, ids)
        own = statistics["params"].main
        np.testing.assert_array_equal(own.A[0], [1, 3, 1, 0, 0, 0, 1])
        g = np.asarray(jnp.cos(table[ids]) * normal(2, 3, 3, seed=1)).reshape(6, 3)
        np.testing.assert_allclose(own.G[0], g.T @ g, rtol=1e-12)
        assert plan.layers[0].diagonal == (True, False)
    one = jnp.array([[2]])
    assert_exact(lambda p, ids: jnp.sum(jnp.sin(p[ids])), table, one)


@st.composite
def lookups(draw):
    """A table of two or three axes, one of them looked up along, by indices of any shape."""
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    shape[axis] = draw(st.integers(2, 6))
    low, high = (-2, shape[axis] + 2) if draw(st.booleans()) else (0, shape[axis] - 1)
    ids = st.integers(low, high)
    where = draw(st.lists(st.integers(1, 3), max_size=2))
    ids = np.array(draw(st.lists(ids, min_size=int(np.prod(where)), max_size=int(np.prod(where)))))
    form = draw(st.sampled_from(["clip", "fill", "wrap", "one-hot", "vmap"]))
    ids = ids % shape[axis] if form == "one-hot" else ids  # else of nothing: a row of zeros
    return tuple(shape), axis, ids.reshape(where).astype(int), form


@pytest.mark.slow
@given(lookups())
def test_any_lookup_is_exact_row_by_row(case):
    shape, axis, ids, form = case
    table, n = normal(*shape), shape[axis]

    def look_up(p, ids):
        if form == "one-hot":
            return jnp.tensordot(jax.nn.one_hot(ids, n, dtype=p.dtype), p, ((ids.ndim,), (axis,)))
        if form == "vmap":
            one = jnp.moveaxis(p, axis, 0)
            flat = jax.vmap(lambda i: one.at[i].get(mode="clip"))(ids.reshape(-1))
            return flat.reshape(*ids.shape, *one.shape[1:])
        taken = jnp.take(p, ids, axis, mode=form, fill_value=0)
        return jnp.moveaxis(taken, range(axis, axis + ids.ndim), range(ids.ndim))

    c = normal(*ids.shape, *np.delete(shape, axis), seed=1)

    def loss(p, ids):
        return jnp.sum(look_up(p, ids) * c)

    verify(loss, table, ids, rtol=1e-10)
    vag = value_and_grad(loss)
    _, _, statistics = jax.jit(vag)(table, ids)
    plan = vag.plan(table, ids)
    (layer,) = plan.layers
    assert layer.diagonal[0] or n == 1
    own = statistics["params"].main
    # One lookup at a time: which entry of the table it reads, and its gradient there.
    counts, G = np.zeros(n), np.zeros((own.G.shape[-1],) * 2)
    each = jax.jacobian(lambda p: jnp.sum(look_up(p, ids) * c, axis=tuple(range(ids.ndim, c.ndim))))
    gradients = np.asarray(jax.jit(each)(table))
    for place in np.ndindex(*ids.shape):
        rows = np.moveaxis(gradients[place], axis, 0).reshape(n, -1)
        counts += np.abs(rows).sum(1) > 0
        G += rows.T @ rows
    np.testing.assert_array_equal(own.A[0], counts)
    np.testing.assert_allclose(own.G[0], G, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["one_hot", "hessian", "jacfwd"])
def test_one_hot_tangents_leave_A_of_rows_beside_them_whole(form):
    """Also those of `jax.hessian` and `jax.jacfwd` by one input, from an identity of one entry."""
    d = 2 if form == "one_hot" else 1
    params = {"w": normal(d, 4), "b": normal(4, seed=1), "v": normal(4, seed=2)}
    x = normal(5, d, seed=3)

    def loss(p, x):
        def u(x):
            return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]

        def residual(x):
            if form == "one_hot":
                return jax.jvp(u, (x,), (jax.nn.one_hot(1, d, dtype=x.dtype),))[1] - u(x)
            return getattr(jax, form)(u)(x).sum() - u(x)

        return jnp.mean(jax.vmap(residual)(x) ** 2)

    plan, statistics = check(loss, params, x)
    assert [layer.diagonal for layer in plan.layers] == [(False, False)] * 2
    A = statistics["['w']"].main.A[0]
    np.testing.assert_allclose(A[-1], [*x.sum(0), 5], rtol=1e-12)  # tangents have no bias
    np.testing.assert_allclose(A[0, :-1] - x[:, 0] @ x, [1 if d == 1 else 0, 0][:d], atol=1e-12)


def test_a_product_with_one_hot_rows_has_a_diagonal_A():
    table, ids = normal(7, 3), jnp.array([1, 2, 1])

    def loss(p, ids):
        return jnp.sum(jnp.sin(jax.nn.one_hot(ids, 7, dtype=p.dtype) @ p))

    plan, statistics = check(loss, table, ids)
    assert plan.layers[0].diagonal == (True, False)
    np.testing.assert_array_equal(statistics["params"].main.A[0], [0, 2, 1, 0, 0, 0, 0])


def second_moments(scales, shifts):
    """(channels, 2, 2): Σ z zᵀ over rows (rows, channels)."""
    z = np.stack([np.asarray(scales, np.float64), np.asarray(shifts, np.float64)], axis=-1)
    return np.einsum("rci,rcj->cij", z, z)


def test_a_scale_and_its_shift_are_a_block_for_each_channel():
    params = {"scale": 1 + 0.1 * normal(4), "shift": normal(4, seed=1), "t": jnp.asarray(0.7)}
    params["position"] = normal(3, 4, seed=2)
    x = normal(5, 3, 4, seed=3)

    def loss(p, x):
        y = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        y = y * p["scale"] + p["shift"] + p["position"]
        return jnp.sum(jnp.sin(y) * p["t"]) / 7

    plan, statistics = check(loss, params, x)
    assert {layer.kind for layer in plan.layers} == {"elementwise"}
    assert plan.routing["['shift']"].reason == "shift of ['scale']"
    # rows one by one: each example and position by itself
    rows = x.reshape(-1, 1, 4)
    position = jnp.tile(params["position"], (5, 1))[:, None]
    each = jax.vmap(jax.grad(loss), ({"scale": None, "shift": None, "t": None, "position": 0}, 0))(
        {**params, "position": position[:, None]}, rows[:, None]
    )
    main = statistics["['scale']"].main
    np.testing.assert_allclose(main.A, second_moments(each["scale"], each["shift"]), rtol=1e-10)
    np.testing.assert_array_equal(main.G, np.full((4, 1), 15.0))
    np.testing.assert_array_equal(main.rows, np.full(4, 15.0))
    examples = jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])
    squares = jnp.sum(examples["position"] ** 2, 0).reshape(-1)
    np.testing.assert_allclose(statistics["['position']"].main.G[0], squares, rtol=1e-10)
    # one row for each example
    vag = value_and_grad(loss, rows="reduce")
    reduced = jax.jit(vag)(params, x)[2]["['scale']"].main
    np.testing.assert_allclose(
        reduced.A, second_moments(examples["scale"], examples["shift"]), rtol=1e-10
    )
    np.testing.assert_array_equal(reduced.rows, np.full(4, 5.0))


@pytest.mark.parametrize("case", ["alone", "read again", "other channels", "twice"])
def test_what_is_added_to_a_scaled_value_is_not_always_its_shift(case):
    params = {"scale": 1 + 0.1 * normal(4), "shift": normal(4, seed=1)}

    def loss(p, x):
        scaled = x * p["scale"]
        if case == "alone":  # something that is no sum is between them
            return jnp.sum(jnp.sin(jnp.sin(scaled) + p["shift"]))
        if case == "read again":
            return jnp.sum(jnp.sin(scaled + p["shift"]) + scaled**2)
        if case == "other channels":
            return jnp.sum(jnp.sin(scaled + jnp.flip(p["shift"])))
        return jnp.sum(jnp.sin(scaled + p["shift"]) + jnp.cos(x + p["shift"]))

    plan, _ = check(loss, params, normal(5, 4, seed=3))
    for name in params:
        assert plan.routing[f"['{name}']"].reason.startswith("diagonal")


@pytest.mark.parametrize("late", [False, True], ids=["flax", "equinox"])
def test_scales_and_shifts_of_scanned_norms(late):
    params = {
        "scale": 1 + 0.1 * normal(3, 4),
        "shift": normal(3, 4, seed=1),
        "w": normal(3, 4, 4, seed=2),
    }
    x = normal(5, 2, 4, seed=3)

    def norm(p, x):
        deviation = x - x.mean(-1, keepdims=True)
        inverse = lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        if late:
            return p["scale"] * (deviation * inverse) + p["shift"]
        return deviation * (inverse * p["scale"]) + p["shift"]

    def loss(p, x):
        def block(x, p):
            return x + jnp.tanh(norm(p, x)) @ p["w"], None

        return jnp.sum(lax.scan(block, x, p)[0] ** 2)

    plan, statistics = check(loss, params, x)
    (layer,) = (layer for layer in plan.layers if layer.kind == "elementwise")
    assert (layer.groups, layer.sizes) == (12, (2, 1))

    def of_one_row(x):
        grads = jax.grad(loss)(params, x[None, None])
        return grads["scale"], grads["shift"]

    scales, shifts = jax.vmap(of_one_row)(x.reshape(-1, 4))  # nothing mixes rows
    expected = second_moments(scales.reshape(10, 12), shifts.reshape(10, 12))
    np.testing.assert_allclose(statistics["['scale']"].main.A, expected, rtol=1e-9)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["bare", "jit", "remat"])
def test_a_scale_that_first_meets_the_deviations_is_its_rows(wrap):
    """Batch norm as flax and haiku write it: rows times (scale / deviation)."""
    params = {"w": normal(4, 3), "scale": 1 + 0.1 * normal(3, seed=1), "shift": normal(3, seed=2)}
    params["scale"] = params["scale"].at[0].set(0.0)  # as in the last norm of a residual block
    x = normal(6, 4, seed=3)

    def norm(scale, shift, y):
        inverse = lax.rsqrt(y.var(0, keepdims=True) + 1e-5)
        return (y - y.mean(0, keepdims=True)) * (scale[None] * inverse) + shift

    def loss(p, x):
        return jnp.sum(jnp.sin(wrap(norm)(p["scale"], p["shift"], x @ p["w"])))

    _, statistics = check(loss, params, x)
    y = np.asarray(x @ params["w"])
    normed = (y - y.mean(0)) / np.sqrt(y.var(0) + 1e-5)
    g = np.cos(normed * params["scale"] + params["shift"])
    own = statistics["['scale']"].main
    np.testing.assert_allclose(own.A, second_moments(g * normed, g), rtol=1e-9, atol=1e-12)
    assert float(own.rows[0]) == 6


def test_a_leaf_times_an_activation_of_its_shape_hides_no_other_leaf():
    params = {"gate": normal(4), "w": normal(4, 3, seed=1)}

    def loss(p, x):  # of one example: no rows to tell apart
        return jnp.sum(jnp.sin((p["gate"] * x) @ p["w"]))

    plan, _ = check(loss, params, normal(4, seed=2), uncovered=["['gate']"])
    assert plan.routing["['gate']"].reason == "used by `dot_general`, times an array of its shape"

    def rows_and_more(p, x):
        scaled = p["gate"] * x[0]
        return jnp.sum(jnp.sin((x * scaled) @ p["w"])) + jnp.sum(scaled**2)

    check(rows_and_more, params, normal(5, 4, seed=2), uncovered=["['gate']"])


@pytest.mark.parametrize(
    "spread",
    [
        lambda s: 1 + s,
        lambda s: jnp.expand_dims(s, (0, 1)) + 1,
        lambda s: 1 + jnp.expand_dims(s, (0, 1)),
        lambda s: jax.jit(lambda s: (s[None] - 0.5)[None] + 1.5)(s),
    ],
)
def test_a_scale_about_one_is_followed_to_its_rows(spread):
    params = {"s": 0.1 * normal(4), "w": normal(4, 3, seed=1)}

    def loss(p, x):
        return jnp.sum(jnp.sin((x * spread(p["s"])) @ p["w"]))

    x = normal(5, 6, 4, seed=2)
    _, statistics = check(loss, params, x)
    rows = jax.vmap(jax.grad(loss), (None, 0))(params, x.reshape(30, 1, 1, 4))["s"]
    np.testing.assert_allclose(statistics["['s']"].main.G[0], (rows**2).sum(0), rtol=1e-10)
    assert float(statistics["['s']"].main.rows[0]) == 30


def test_an_inserted_axis_is_not_taken_for_the_batch():
    params = {"shift": normal(4), "w": normal(4, 3, seed=1)}

    def loss(p, x):  # the shift meets the rows when it is a sum with the mean
        h = jnp.tanh(x @ p["w"].T)
        return jnp.sum(jnp.sin((h + (p["shift"][None] - h.mean(0, keepdims=True))) @ p["w"]))

    plan, _ = check(loss, params, normal(5, 3, seed=2), uncovered=["['shift']"])
    assert plan.routing["['shift']"].reason == "used by `sub`"

    def of_data(p, x):  # a mean without a derivative leaves it a shift
        return jnp.sum(jnp.sin((x + (p["shift"][None] - x.mean(0, keepdims=True))) @ p["w"]))

    def of_row(p, deviation):
        return jnp.sum(jnp.sin((deviation + p["shift"]) @ p["w"]))

    x = normal(5, 4, seed=2)
    _, statistics = check(of_data, params, x)
    rows = jax.vmap(jax.grad(of_row), (None, 0))(params, x - x.mean(0))["shift"]
    np.testing.assert_allclose(statistics["['shift']"].main.G[0], (rows**2).sum(0), rtol=1e-10)
    assert float(statistics["['shift']"].main.rows[0]) == 5


CHOICES = {
    "where": lambda p, x, mask: jnp.where(mask, p, x),
    "where not": lambda p, x, mask: jnp.where(~mask, x, p),
    "half of it": lambda p, x, mask: jnp.where(mask, 0.5 * (2 * p), x),
    "whole": lambda p, x, mask: jnp.where(mask, jnp.broadcast_to(p, x.shape), x),
    "mapped": jax.vmap(lambda p, x, mask: jnp.where(mask, p, x), (None, 0, 0)),
    "row by row": jax.vmap(jax.vmap(lambda *a: jnp.where(a[2], a[0], a[1]), (None, 0, 0)), (None, 0, 0)),
    "in a loop": lambda p, x, mask: lax.map(lambda a: jnp.where(a[1], p, a[0]), (x, mask)),
    "remat": jax.checkpoint(lambda p, x, mask: jnp.where(mask, p, x)),
}


@pytest.mark.parametrize("examples", [1, 5])
@pytest.mark.parametrize("name", CHOICES)
def test_a_token_in_the_place_of_activations_has_the_gradients_of_its_rows(name, examples):
    params, x = {"t": normal(4), "w": normal(4, 3, seed=1)}, normal(examples, 3, 4, seed=2)
    mask = (jnp.arange(3 * examples) % 3 != 1).reshape(examples, 3, 1)

    def loss(p, x, mask):
        return jnp.sum(jnp.sin(CHOICES[name](p["t"], jnp.cos(x), mask) @ p["w"]))

    _, statistics = check(loss, params, x, mask)
    h = np.where(mask, params["t"], np.cos(x)).reshape(-1, 4)
    g = (np.cos(h @ params["w"]) @ params["w"].T)[np.asarray(mask).ravel()]
    np.testing.assert_allclose(statistics["['t']"].main.G[0], (g**2).sum(0), rtol=1e-10)


def test_a_token_in_the_place_of_what_is_the_same_for_all_is_repeated_for_each():
    params, x = {"t": normal(4), "w": normal(4, 3, seed=1)}, normal(5, 4, seed=2)

    def loss(p, x):
        return jnp.sum(jnp.sin((x + jnp.where(x > 0, p["t"], jnp.cos(jnp.arange(4.0)))) @ p["w"]))

    _, statistics = check(loss, params, x)
    each = jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])["t"]
    np.testing.assert_allclose(statistics["['t']"].main.G[0], jnp.sum(each**2, 0), rtol=1e-10)


@pytest.mark.parametrize("others", [(), (np.zeros(2, np.uint32), np.ones(3))])
def test_one_example_is_covered_like_many(others):
    """Whatever else comes along: keys, weights of classes."""
    params = {"position": normal(1, 5, 4), "scale": normal(4, seed=1), "token": normal(1, 1, 4, seed=2)}
    params |= {"w": normal(4, 3, seed=3), "shift": normal(3, seed=4)}

    def loss(p, x, *others):
        x = jnp.concatenate([jnp.broadcast_to(p["token"], (len(x), 1, 4)), x + p["position"]], 1)
        return jnp.sum(
            jnp.sin(jnp.cos(x[:, 0] * p["scale"] @ p["w"] + x[:, 2, :3]) + p["shift"]) + x.sum()
        )

    x = normal(3, 5, 4, seed=5)
    many, _ = check(loss, params, x, *others)
    one, statistics = check(loss, params, x[:1], *others)
    assert one.names == many.names
    assert [layer.sizes for layer in one.layers] == [layer.sizes for layer in many.layers]
    gradients = jax.grad(loss)(params, x[:1], *others)
    for name in ("position", "scale", "token", "shift"):
        expected = gradients[name].reshape(-1) ** 2
        np.testing.assert_allclose(statistics[f"['{name}']"].main.G[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", ["scale last", "scale first", "of the batch"])
@pytest.mark.parametrize("inner", [(), (2,)])
def test_norms_of_one_example_are_those_of_many(order, inner):
    """Scale and shift are one layer, whose sums over examples are those of the examples' own."""
    params = {"s": 1 + 0.1 * normal(4), "b": normal(4, seed=1), "w": normal(4, 3, seed=2)}

    def loss(p, x):
        axes = (0, *range(1, x.ndim - 1)) if order == "of the batch" else -1
        centred = x if order == "of the batch" else x - x.mean(axes, keepdims=True)
        factor = jax.lax.rsqrt((centred**2).mean(axes, keepdims=True) + 1e-3)
        if order == "of the batch":  # of numbers that one example leaves as they are
            factor = jax.lax.stop_gradient(factor * 0 + 2.0)
        x = centred * factor * p["s"] if order == "scale last" else centred * (factor * p["s"])
        return jnp.sum(jnp.sin((x + p["b"]) @ p["w"]))

    x = normal(3, *inner, 4, seed=5)
    many, whole = check(loss, params, x)
    totals = None
    for i in range(3):
        one, statistics = check(loss, params, x[i : i + 1])
        assert one.names == many.names
        assert [layer.sizes for layer in one.layers] == [layer.sizes for layer in many.layers]
        totals = statistics if totals is None else jax.tree.map(jnp.add, totals, statistics)
    for got, expected in zip(jax.tree.leaves(totals), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_no_examples_are_an_error_that_says_so():
    """Nothing tells then which axes are a batch's."""
    params = {"w": normal(3, 2), "b": normal(2, seed=1)}
    vag = value_and_grad(lambda p, x: jnp.sum((x @ p["w"] + p["b"]) ** 2))
    for call in (vag.plan, vag):
        with pytest.raises(ValueError, match="at least one example, got empty ones"):
            call(params, jnp.ones((0, 3)))


def test_an_argument_may_be_empty_where_others_are_not():
    params = {"w": normal(3, 2), "b": normal(2, seed=1)}
    x, boxes = normal(4, 3, seed=2), jnp.zeros((0, 3))

    def loss(p, x, boxes):
        return jnp.sum(jnp.sin(jnp.concatenate([x, boxes]) @ p["w"] + p["b"]))

    def steps(p, x, numbers):
        total, _ = jax.lax.scan(lambda c, n: (c + n, None), 1.0, numbers)
        return total * loss(p, x, boxes)

    expected = value_and_grad(loss)(params, x, x[:0])[2]
    for function, other in ((loss, boxes), (steps, jnp.zeros(0))):
        found = value_and_grad(function)(params, x, other)[2]
        for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12)
    plain = value_and_grad(lambda p, x: loss(p, x, boxes))(params, x)[2]
    np.testing.assert_allclose(
        plain.layers["['w']"].main.A[0],
        np.pad(x, ((0, 0), (0, 1)), constant_values=1).T
        @ np.pad(x, ((0, 0), (0, 1)), constant_values=1),
        rtol=1e-12,
    )


@pytest.mark.parametrize("shape", [(3, 0), (0, 2)])
def test_an_empty_weight_is_no_layer(shape):
    params = {"w": jnp.zeros(shape), "v": normal(3, 2)}

    def loss(p, x):
        y = x @ p["v"]
        return jnp.sum(jnp.sin(y + x[:, :0] @ p["w"] if shape[0] == 0 else y)) + jnp.sum(
            x[:, : shape[0]] @ p["w"]
        )

    x = normal(4, 3, seed=1)
    vag = value_and_grad(loss)
    plan = vag.plan(params, x)
    assert [layer.name for layer in plan.layers] == ["['v']"]
    assert "empty" in vag.routing(params, x)["['w']"].reason
    tx = kfac(plan, 0.1)
    _, grads, statistics = vag(params, x)
    updates, _ = tx.update(grads, tx.init(params), params, statistics=statistics)
    assert updates["w"].shape == shape
    assert float(jnp.abs(updates["v"]).max()) > 0


@pytest.mark.parametrize("start", [0, 2, 4, 9, -1])
def test_a_slice_at_a_known_place_is_a_slice(start):
    """Beyond the end it is moved back, as XLA does."""
    params, x = {"pos": normal(7, 3), "w": normal(3, 2, seed=1)}, normal(5, 4, 3, seed=2)
    begin = {0: 0, 2: 2, 4: 3, 9: 3, -1: 3}[start]

    def loss(p, x, dynamic):
        if dynamic:
            rows = lax.dynamic_slice_in_dim(p["pos"], start, 4)
            w = lax.dynamic_slice(p["w"], (0, 0), (3, 2))
        else:
            rows, w = p["pos"][begin : begin + 4], p["w"]
        return jnp.mean(jnp.sin(jnp.tanh(x + rows) @ w))

    found, expected = (value_and_grad(loss)(params, x, dynamic) for dynamic in (True, False))
    assert set(found[2].layers) == {"['pos']", "['w']"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected)


def _most_memory() -> float:
    """What this process ever had, in GiB."""
    used = pytest.importorskip("resource").getrusage(0).ru_maxrss
    return used / 2 ** (30 if sys.platform == "darwin" else 20)


def test_the_plan_of_a_large_leaf_in_parts_takes_no_memory():
    leaf = jax.ShapeDtypeStruct((16, 4096, 2, 8192), jnp.bfloat16)  # 2^30 entries
    x = jax.ShapeDtypeStruct((3, 4096), jnp.bfloat16)

    def loss(p, x):
        def layer(x, w):
            return x + (jnp.tanh(x @ w[:, 0]) * (x @ w[:, 1])).mean(), None

        return lax.scan(layer, x, p)[0].astype(jnp.float32).mean()

    before = _most_memory()
    assert len(value_and_grad(loss).plan(leaf, x).layers) == 2
    assert _most_memory() - before < 0.5


@pytest.mark.parametrize("seed", range(20))
def test_overlap_equals_counting_how_often_each_entry_is_read(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(2, 7, size=3).tolist())
    views, read = [], np.zeros(shape, int)
    for _ in range(2):
        starts = rng.integers(2, size=3).tolist()
        limits = [int(rng.integers(a + 1, n + 1)) for a, n in zip(starts, shape, strict=True)]
        strides = rng.integers(1, 4, size=3).tolist()
        views.append(
            View((("slice", (starts, limits, strides)), ("transpose", ((2, 0, 1),))), ((),) * 3)
        )
        read[tuple(map(slice, starts, limits, strides))] += 1
    assert overlap(shape, views) == (read.max() > 1)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_what_a_leaf_is_unstacked_to_are_its_parts(axis):
    stacked = {"w": jnp.stack([normal(4, 4, seed=i) for i in range(3)], axis), "b": normal(3, 4, seed=3)}
    x = normal(6, 4)

    def loss(p, x, unstack):
        ws = jnp.unstack(p["w"], axis=axis) if unstack else jnp.moveaxis(p["w"], axis, 0)
        for w, b in zip(ws, jnp.unstack(p["b"]) if unstack else p["b"], strict=True):
            x = x + jnp.tanh(x @ w + b)
        return jnp.mean(x**2)

    found, expected = (value_and_grad(loss)(stacked, x, unstack) for unstack in (True, False))
    assert set(found[2].layers) == {f"['w'] part {i}" for i in range(3)}
    assert all(sums.main.G.shape == (1, 4, 4) for sums in found[2].layers.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected)


def test_scales_of_a_stack_that_is_scanned_in_parts_are_parts():
    stack = {"w": normal(3, 4, 4), "b": normal(3, 4, seed=1), "s": normal(3, 4, seed=2)}
    x = normal(6, 4, seed=3)

    def block(x, p):
        return x + jnp.tanh((x * p["s"]) @ p["w"] + p["b"]), None

    def loss(p, x):
        for part in (slice(1), slice(1, None)):
            x, _ = lax.scan(block, x, jax.tree.map(lambda leaf, part=part: leaf[part], p))
        return jnp.mean(jnp.sum(x**2, -1))

    plan, statistics = check(loss, stack, x)
    of_each = jax.vmap(lambda one: jax.grad(loss)(stack, one[None]))(x)
    tx, (_, grads, _) = kfac(plan, 0.1, damping=0.1, kl_clip=None), value_and_grad(loss)(stack, x)
    updates, _ = tx.update(grads, tx.init(stack), stack, statistics=statistics)
    squares = np.sum(of_each["s"] ** 2, 0)
    found = np.concatenate([statistics[f"['s'] part {part}"].main.G for part in (0, 1)])
    np.testing.assert_allclose(found * 36, squares, rtol=1e-10)  # the loss is the mean of 6
    np.testing.assert_allclose(updates["s"], -0.1 * grads["s"] / (squares / 6 + 0.1), rtol=1e-9)
    sizes = {layer.name: (layer.groups, layer.sizes) for layer in plan.layers}
    assert sizes["['w'] part 0"] == (1, (5, 4))  # with its biases
    assert sizes["['w'] part 1"] == (2, (5, 4))


def test_slices_of_a_fused_projection_are_layers_of_their_own():
    x = normal(6, 4)

    def loss(p, x):
        q, k, v = (x @ w for w in jnp.split(p, 3, axis=1))
        return jnp.sum(jax.nn.softmax(q @ k.T) @ v)

    plan, _statistics = check(loss, normal(4, 9, seed=1), x)
    assert len(plan.layers) == 3
    assert [layer.input_of for layer in plan.layers].count(None) == 1  # one A for all

    def fused(p, x):
        q, k, v = jnp.split(x @ p, 3, axis=1)
        return jnp.sum(jax.nn.softmax(q @ k.T) @ v)

    plan, _ = check(fused, normal(4, 9, seed=1), x)
    assert plan.layers[0].sizes == (4, 9)

    def part(p, x):
        return jnp.sum(jnp.sin(x @ p[:, 2:5][::-1]))

    plan = assert_exact(part, normal(4, 9, seed=1), x[:1])
    assert plan.layers[0].sizes == (4, 3)


# ---- ties ----------------------------------------------------------------------------------------


def test_a_leaf_used_in_both_orientations_is_one_block():
    x, w = normal(5, 4), normal(4, 3, seed=1)

    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ p) @ p.T))

    plan, statistics = check(loss, w, x)
    (layer,) = plan.layers
    assert layer.tied
    own = statistics["params"]
    hidden = np.tanh(x @ w)
    np.testing.assert_allclose(own.main.A[0], x.T @ x, rtol=1e-12)
    np.testing.assert_allclose(own.transposed.A[0], hidden.T @ hidden, rtol=1e-12)


def test_a_tied_table_is_its_heads_block():
    table, ids = normal(7, 3), jnp.array([1, 2, 1])

    def loss(p, ids):
        return -jnp.sum(jax.nn.log_softmax(jnp.tanh(p[ids]) @ p.T)[:, 0])

    plan, statistics = check(loss, table, ids)
    (layer,) = plan.layers
    assert layer.sizes == (3, 7)
    assert layer.diagonal == (False, True)
    np.testing.assert_array_equal(statistics["params"].transposed.A[0], [0, 2, 1, 0, 0, 0, 0])
    hidden = np.tanh(table[ids])
    np.testing.assert_allclose(statistics["params"].main.A[0], hidden.T @ hidden, rtol=1e-12)
    assert float(statistics.terms) == 3


# ---- control flow --------------------------------------------------------------------------------

STACKED = {"w": 0.5 * normal(3, 4, 4), "b": normal(3, 4, seed=1)}


def unrolled(p, x):
    for i in range(3):
        x = jnp.tanh(x @ p["w"][i] + p["b"][i])
    return jnp.sum(jnp.sin(x))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["bare", "remat", "jit"])
def test_scanned_layers_are_stacks(wrap):
    x = normal(5, 4, seed=2)

    def loss(p, x):
        body = wrap(lambda x, wb: (jnp.tanh(x @ wb[0] + wb[1]), None))
        return jnp.sum(jnp.sin(lax.scan(body, x, (p["w"], p["b"]))[0]))

    plan, statistics = check(loss, STACKED, x)
    (layer,) = plan.layers
    assert (layer.groups, layer.sizes) == (3, (5, 4))
    # against the same layers as leaves of their own
    split = [{"w": STACKED["w"][i], "b": STACKED["b"][i]} for i in range(3)]

    def by_hand(p, x):
        for layer in p:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.sum(jnp.sin(x))

    _, apart = check(by_hand, split, x)
    for i in range(3):
        for side in ("A", "G"):
            np.testing.assert_allclose(
                getattr(statistics["['w']"].main, side)[i],
                getattr(apart[f"[{i}]['w']"].main, side)[0],
                rtol=1e-10,
            )
    assert float(statistics.terms) == 5


def test_parts_of_a_stack_by_index_are_layers():
    plan, _ = check(unrolled, STACKED, normal(5, 4, seed=2))
    assert len([layer for layer in plan.layers if layer.leaf == 1]) == 3


def test_a_scan_that_is_transposed_nested_reversed_and_normalized():
    params = {
        "w": 0.3 * normal(4, 2, 3, 4),  # (in, outer, inner, out)
        "g": 1 + 0.1 * normal(2, 3, 4, seed=1),
        "shared": normal(4, 4, seed=2),
    }
    x = normal(1, 4, seed=3)

    def loss(p, x):
        stacked = jnp.moveaxis(p["w"], 0, 2)

        def inner(x, wg):
            return jnp.tanh((x * wg[1]) @ wg[0]), None

        def outer(x, wg):
            x, _ = lax.scan(inner, x @ p["shared"], wg, reverse=True)
            return x, jnp.sum(x)

        x, sums = lax.scan(outer, x, (stacked, p["g"]))
        return jnp.sum(jnp.sin(x)) + jnp.sum(sums)

    plan, _ = check(loss, params, x)
    groups = {plan.names[layer.leaf]: layer.groups for layer in plan.layers}
    assert groups == {"['w']": 6, "['g']": 6, "['shared']": 1}
    assert_exact(loss, params, x, index=[layer.name for layer in plan.layers].index("['w']"))


def test_a_recurrent_network_by_scan_adds_over_steps():
    params = {"w": normal(3, 4), "u": 0.5 * normal(4, 4, seed=1), "b": normal(4, seed=2)}
    xs = normal(6, 5, 3, seed=3)

    def loss(p, xs):
        def step(h, x):
            h = jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"])
            return h, None

        return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros((5, 4)), xs)[0]))

    plan, statistics = check(loss, params, xs)
    flat = xs.reshape(30, 3)
    np.testing.assert_allclose(statistics["['w']"].main.A[0, :3, :3], flat.T @ flat, rtol=1e-12)
    assert float(statistics["['u']"].main.rows[0]) == 30
    assert plan.routing["['b']"].reason == "bias of ['w']"

    def carried(p, xs):  # the parameters go through the loop's carry unchanged
        def step(carry, x):
            h, p = carry
            return (jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"]), p), None

        (h, _), _ = lax.scan(step, (jnp.zeros((5, 4)), p), xs)
        return jnp.sum(jnp.sin(h))

    _, other = check(carried, params, xs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), statistics, other)


def test_branches_count_what_ran():
    params = {"w": normal(4, 3), "v": normal(4, 3, seed=1)}
    x = normal(5, 4, seed=2)

    plan, statistics = check(
        lambda p, x, yes: jnp.sum(
            jnp.sin(lax.cond(yes, lambda x: x @ p["w"], lambda x: jnp.tanh(x @ p["v"]), x))
        ),
        params,
        x,
        jnp.asarray(True),
    )
    np.testing.assert_allclose(statistics["['w']"].main.A[0], x.T @ x, rtol=1e-12)
    assert float(statistics["['v']"].main.rows[0]) == 0
    assert len(plan.layers) == 2


@pytest.mark.parametrize("trunk", [True, False])
@pytest.mark.parametrize("task", [0, 1, 2, 3])
def test_the_terms_of_a_loss_with_heads_in_branches_are_those_of_the_head_that_ran(trunk, task):
    params = {"t": normal(4, 5), "token": normal(5, 3, seed=1), "example": normal(5, 3, seed=2)}
    params["tied"] = normal(5, 3, seed=3)
    x = normal(8, 6, 4, seed=4)

    def loss(p, x, task, switch=lax.switch):
        features = jnp.tanh(x @ p["t"] if trunk else x @ jnp.ones((4, 5)))
        heads = [
            lambda h: jnp.mean(jnp.sin(h @ p["token"])),
            lambda h: jnp.mean(jnp.sin(h.mean(1) @ p["example"])),
            lambda h: jnp.mean(jnp.cos(h @ p["tied"])),
            lambda h: jnp.mean(jnp.cos(h.mean(1) @ p["tied"])),
        ]
        return switch(task, heads, features)

    _, statistics = check(loss, params, x, jnp.asarray(task), uncovered=[] if trunk else ["['t']"])
    assert float(statistics.terms) == [48, 8, 48, 8][task]
    chosen = functools.partial(loss, task=task, switch=lambda i, heads, h: heads[i](h))
    _, _, alone = value_and_grad(chosen)(params, x)
    assert float(alone.terms) == float(statistics.terms)
    for name, sums in alone.layers.items():
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10),
            sums,
            statistics[name],
        )


def test_a_head_that_a_branch_leaves_out_counts_no_terms_of_its_own():
    params = {"t": normal(4, 3), "v": normal(3, 3, seed=1)}

    def loss(p, x, yes):
        return jnp.mean(lax.cond(yes, lambda h: jnp.sin(h @ p["v"]), lambda h: h, x @ p["t"]))

    for yes in (True, False):
        _, statistics = check(loss, params, normal(5, 4, seed=2), jnp.asarray(yes))
        assert float(statistics.terms) == 5


def loss_in(p, x):
    return jnp.mean(jnp.sin(jnp.tanh(x @ p["w"]) @ p["v"] + p["b"]))


def written(p, x, z, ref):
    ref[...] = 2 * loss_in(p, z)
    return loss_in(p, x) + ref[...]


def added_in_a_loop(p, x, z, ref):
    def body(i, _):
        ref[...] += loss_in(p, lax.dynamic_slice_in_dim(z, i, 1))

    lax.fori_loop(0, len(z), body, None)
    return loss_in(p, x) + 2 * ref[...] / len(z)


def added_in_a_branch(p, x, z, ref):
    def add():
        ref[...] += 2 * loss_in(p, z)

    lax.cond(z[0, 0] < 100, add, lambda: None)
    return loss_in(p, x) + ref[...]


def added_in_a_call(p, x, z, ref):
    @jax.jit
    def add(ref, p):
        ref[...] += 2 * loss_in(p, z)
        return loss_in(p, x)

    return add(ref, p) + jax.freeze(ref)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="needs jax.new_ref")
@pytest.mark.parametrize("how", [written, added_in_a_loop, added_in_a_branch, added_in_a_call])
def test_uses_whose_results_are_written_to_an_array(how):
    params = {"w": normal(4, 3), "v": normal(3, 2, seed=1), "b": normal(2, seed=2)}
    x, z = normal(5, 4, seed=3), normal(6, 4, seed=4)

    def loss(p, x, z):
        return how(p, x, z, jax.new_ref(jnp.zeros(())))

    _, statistics = check(loss, params, x, z)
    _, expected = check(lambda p, x, z: loss_in(p, x) + 2 * loss_in(p, z), params, x, z)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), statistics, expected)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="needs jax.new_ref")
def test_a_leaf_that_is_written_to_an_array_is_plain():
    def loss(p, x):
        ref = jax.new_ref(jnp.zeros((4, 3)))
        ref[...] = p["w"]
        return loss_in(p, x) + jnp.mean((x @ ref[...]) ** 2)

    params = {"w": normal(4, 3), "v": normal(3, 2, seed=1), "b": normal(2, seed=2)}
    plan, _ = check(loss, params, normal(5, 4, seed=3), uncovered=["['w']"])
    assert "`swap`" in plan.routing["['w']"].reason


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="needs jax.new_ref")
def test_an_array_that_a_loss_writes_to_is_written_once():
    """Running statistics that are no output."""
    mean = jax.new_ref(jnp.zeros(4))

    def loss(p, x):
        mean[...] += x.mean(0)
        return loss_in(p, x - x.mean(0))

    params = {"w": normal(4, 3), "v": normal(3, 2, seed=1), "b": normal(2, seed=2)}
    x = normal(5, 4, seed=3)
    value_and_grad(loss)(params, x)
    jax.jit(value_and_grad(loss))(params, x)
    np.testing.assert_allclose(mean[...], 2 * x.mean(0), rtol=1e-12)


def test_functions_with_derivatives_of_their_own():
    params = {"w": normal(4, 3), "b": normal(3, seed=1), "v": normal(3, 2, seed=2)}
    x = normal(5, 4, seed=3)

    @jax.custom_vjp
    def dense(x, w):
        return x @ w

    dense.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    @jax.custom_jvp
    def half(x):
        return x / 2

    half.defjvps(lambda t, _, x: t / 2)

    def loss(p, x):
        hidden = jax.nn.gelu(half(dense(x, p["w"]) + p["b"]))
        return jnp.sum(jax.nn.silu(jax.nn.logsumexp(hidden @ p["v"], axis=1)))

    plan, statistics = check(loss, params, x)
    np.testing.assert_allclose(statistics["['w']"].main.A[0, :4, :4], x.T @ x, rtol=1e-12)
    assert plan.layers[0].bias is not None or plan.layers[1].bias is not None
    assert_exact(lambda p, x: jnp.sum(jnp.sin(dense(x, p))), params["w"], x[:1])

    @jax.custom_vjp
    def straight_through(w):
        return jnp.round(w)

    straight_through.defvjp(lambda w: (jnp.round(w), None), lambda _, g: (g,))

    def quantized(p, x):
        return jnp.sum(jnp.sin(x @ straight_through(p["w"]) + p["b"])) + jnp.sum(
            jnp.sin(x[:, :3] @ p["v"])
        )

    plan, statistics = check(quantized, params, x)
    assert plan.routing["['b']"].reason == "bias of ['w']"
    np.testing.assert_allclose(statistics["['w']"].main.A[0, :4, :4], x.T @ x, rtol=1e-12)
    g = np.cos(x @ jnp.round(params["w"]) + params["b"])
    np.testing.assert_allclose(statistics["['w']"].main.G[0], g.T @ g, rtol=1e-12)

    @jax.custom_jvp
    def rounded(w, step):
        return jnp.round(w / step) * step

    rounded.defjvp(lambda given, moved: (rounded(*given), moved[0]))

    @jax.custom_vjp
    def doubled(w):
        return jnp.round(w)

    doubled.defvjp(lambda w: (jnp.round(w), None), lambda _, g: (2 * g,))

    def of(function):
        return lambda p, x: jnp.sum(jnp.sin(x @ function(p["w"]))) + jnp.sum(jnp.sin(x[:, :3] @ p["v"]))

    check(of(lambda w: rounded(w, 0.1)), params, x, uncovered=["['b']"])
    check(of(lambda w: rounded(w, lax.stop_gradient(jnp.max(w)))), params, x, uncovered=["['b']"])
    plan, _ = check(of(doubled), params, x, uncovered=["['b']", "['w']"])
    assert plan.routing["['w']"].reason.startswith("used by `dot_general`, of a function of it")


def test_a_derivative_of_its_own_may_be_by_what_its_function_does_not_read():
    """The energy of variational Monte Carlo: a mean, whose gradient is by log |psi|."""
    params = {"w": normal(4, 3), "b": normal(3, seed=1), "v": normal(3, 1, seed=2)}
    x, energies = normal(8, 4, seed=3), normal(8, seed=4)

    def log_psi(p, x):
        return (jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"])[:, 0]

    @jax.custom_vjp
    def by_vjp(logs, energies):
        return jnp.mean(energies)

    def backward(kept, g):
        return 2 * g * (kept - jnp.mean(kept)) / len(kept), jnp.zeros_like(kept)

    by_vjp.defvjp(lambda logs, energies: (jnp.mean(energies), energies), backward)
    by_jvp = jax.custom_jvp(lambda logs, energies: jnp.mean(energies))
    by_jvp.defjvps(lambda t, _, logs, e: jnp.mean(2 * t * (e - jnp.mean(e))), None)

    def plainly(p, x, e):
        return jnp.mean(2 * log_psi(p, x) * (e - jnp.mean(e)))

    _, expected = check(plainly, params, x, energies)
    for energy in (by_vjp, by_jvp):
        _, found = check(lambda p, x, e, f=energy: f(log_psi(p, x), e), params, x, energies)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_inside_the_loss(check_vma):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    params = {"w": normal(4, 3), "b": normal(3, seed=1)}
    x = normal(6, 4, seed=2)

    def loss(p, x):
        def local(p, x):
            return lax.pmean(jnp.mean(jnp.sin(x @ p["w"] + p["b"])), "data")

        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
        )(p, x)

    _, statistics = check(loss, params, x)
    np.testing.assert_allclose(statistics["['w']"].main.A[0, :4, :4], x.T @ x, rtol=1e-12)


def test_a_leaf_that_a_shard_map_divides_is_plain_and_says_why():
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    params = {"w": normal(4, 3), "v": normal(3, 2, seed=1)}

    def loss(p, x):
        def local(w, v, x):
            return jnp.sin(lax.psum(jnp.tanh(x @ w) @ v, "model"))

        specs = P(None, "model"), P(), P()
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        return jnp.sum(mapped(p["w"], p["v"], x))

    plan, _ = check(loss, params, normal(6, 4, seed=2), uncovered=["['w']"])
    assert plan.routing["['w']"].reason == "used by `shard_map`, which divides it over devices"
    with pytest.raises(ValueError, match="`shard_map`, which divides it"):
        value_and_grad(loss, require="all").plan(params, normal(6, 4, seed=2))


def test_casts_metrics_and_stopped_gradients_do_not_hide_a_layer():
    params = {"w": normal(4, 3).astype(jnp.float32), "v": normal(3, 2, seed=1).astype(jnp.bfloat16)}
    x = normal(5, 4, seed=2).astype(jnp.float32)

    def loss(p, x):
        hidden = jnp.tanh(x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16))
        y = hidden.astype(jnp.float32) @ p["v"].astype(jnp.float32)
        target = x @ lax.stop_gradient(p["w"])[:, :2]
        labels = jnp.argmax(x @ p["w"], axis=1)
        value = jnp.mean((y - target) ** 2) + 0 * jnp.sum(labels)
        return value, {"norm": jnp.sum(p["w"] ** 2), "labels": labels, "name": "run", "none": None}

    vag = value_and_grad(loss, has_aux=True, require="all")
    plan = vag.plan(params, x)
    assert {layer.name for layer in plan.layers} == {"['w']", "['v']"}
    (_, aux), _, statistics = vag(params, x)
    assert aux["name"] == "run"
    assert aux["none"] is None
    assert statistics["['v']"].main.A.dtype == jnp.float32
    np.testing.assert_allclose(aux["norm"], jnp.sum(params["w"] ** 2), rtol=1e-6)


def test_a_loss_with_derivatives_by_its_inputs():
    """A PINN: forward derivatives and their backward passes use each weight in both orientations."""
    params = {"w": normal(2, 6), "b": normal(6, seed=1), "v": normal(6, 1, seed=2)}
    x = normal(5, 2, seed=3)

    def u(p, x):
        return (jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])[0]

    def loss(p, x):
        laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(u, 1)(p, x)))(x)
        return jnp.mean((laplacian - 1.0) ** 2)

    vag = value_and_grad(loss)
    plan = vag.plan(params, x)
    assert plan.routing["['w']"].treatment == "kfac", str(plan)
    assert plan.routing["['v']"].treatment == "kfac", str(plan)
    verify(loss, params, x, rtol=1e-9)


def test_probes_by_hand():
    params = {"w": normal(4, 3), "v": normal(3, 2, seed=1)}
    x = normal(5, 4, seed=2)

    def kernel(x, w):
        return jnp.sum(x[:, :, None] * w, axis=1)  # a product that capture does not know

    def loss(p, x, marked):
        y = kernel(x, p["w"])
        y = probe(x, p["w"], y) if marked else y
        return jnp.sum(jnp.sin(jnp.tanh(y) @ p["v"]))

    _plan, statistics = check(functools.partial(loss, marked=True), params, x)
    np.testing.assert_allclose(statistics["['w']"].main.A[0], x.T @ x, rtol=1e-12)
    plain = value_and_grad(functools.partial(loss, marked=False)).plan(params, x)
    assert plain.routing["['w']"].treatment == "plain" or plain.layers[1].kind == "elementwise"

    def incomplete(p, x):
        return loss(p, x, True) + jnp.sum(p["w"] * x[:4, :3])

    with pytest.raises(ValueError, match=r"miss uses of these parameters.*\['w'\]"):
        verify(incomplete, params, x)
    with pytest.raises(ValueError, match=r"probe\(x, w, y\) needs"):
        probe(x, params["w"], x)


def test_a_gradient_that_is_zero_up_to_rounding_is_no_missed_use():
    params = {"q": normal(4, 3), "k": normal(4, 3, seed=1), "b": normal(3, seed=2)}
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    x = normal(6, 4, seed=3).astype(jnp.float32)

    def loss(p, x):  # a softmax over keys takes no notice of their bias
        scores = (x @ p["q"]) @ (x @ p["k"] + p["b"]).T
        return jnp.sum(jax.nn.softmax(scores) @ jnp.sin(x))

    grads = jax.grad(loss)(params, x)
    assert jnp.abs(grads["b"]).max() < 1e-4 * jnp.abs(grads["k"]).max()
    assert verify(loss, params, x)["['b']"] < 1e-3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_products_in_low_precision_miss_nothing(dtype):
    params = {"w": normal(4, 8), "b": normal(8, seed=1), "v": normal(8, 3, seed=2)}
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    x = normal(64, 4, seed=3)

    def loss(p, x, weight=0.0):
        low = jax.tree.map(lambda p: p.astype(dtype), p)
        h = x.astype(dtype)
        h = probe(h, low["w"], h @ low["w"])
        y = jnp.tanh(h + low["b"]) @ low["v"]
        return jnp.mean(jnp.sin(y.astype(jnp.float32))) + weight * jnp.sum(p["w"][:, :4] * x[:4])

    errors = verify(loss, params, x)
    assert 0 < max(errors.values()) < 0.05
    with pytest.raises(ValueError, match="miss uses"):
        verify(loss, params, x, rtol=1e-6)
    with pytest.raises(ValueError, match=r"miss uses of these parameters.*\['w'\]"):
        verify(functools.partial(loss, weight=0.1), params, x)


def test_required_coverage_and_plain_parameters():
    params = {"w": normal(4, 3), "u": normal(2, seed=1)}

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ p["w"])) + jnp.sum(p["u"] ** 2)

    x = normal(5, 4, seed=2)
    value_and_grad(loss, require="most").plan(params, x)
    with pytest.raises(ValueError, match=r"require='all', but K-FAC covers 12 of 14"):
        value_and_grad(loss, require="all").plan(params, x)
    with pytest.raises(ValueError, match="would precondition nothing"):
        value_and_grad(loss, plain=["['w']"]).plan(params, x)
    with pytest.raises(ValueError, match="plain must name parameters"):
        value_and_grad(loss, plain=["w"]).plan(params, x)
    with pytest.raises(TypeError, match="sequence of names"):
        value_and_grad(loss, plain="['w']")
    with pytest.raises(ValueError, match="require must be one of"):
        value_and_grad(loss, require="some")
    route = value_and_grad(loss).routing(params, x)["['u']"]
    assert route.reason == "used by terms of the loss that are made of parameters alone"


@pytest.mark.parametrize("batch", [5, 1])
@pytest.mark.parametrize("use", [lambda p, x: p * x, lambda p, x: x - p])
def test_reduced_rows_of_a_scale_or_a_shift_alone(use, batch):
    p, x = normal(4), normal(batch, 3, 4, seed=1)

    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.tanh(use(p, x)) @ jnp.arange(4.0)))

    main = value_and_grad(loss, rows="reduce")(p, x)[2]["params"].main
    of_examples = jax.vmap(jax.grad(loss), (None, 0))(p, x[:, None])
    np.testing.assert_allclose(main.G[0], jnp.sum(of_examples**2, 0), rtol=1e-10)


def test_reduced_rows():
    w, x = normal(4, 3), normal(5, 6, 4, seed=1)

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ p))

    _, _, statistics = value_and_grad(loss, rows="reduce")(w, x)
    own, mean = statistics["params"].main, np.asarray(x.mean(1))
    np.testing.assert_allclose(own.A[0], mean.T @ mean, rtol=1e-10)
    g = np.asarray(jnp.cos(x @ w).sum(1))
    np.testing.assert_allclose(own.G[0], g.T @ g, rtol=1e-10)
    assert float(own.rows[0]) == 5
    kernel, images = normal(3, 2, 2, 2), normal(5, 2, 4, 4, seed=1)

    def convolved(p, x):
        return jnp.sum(jnp.sin(lax.conv_general_dilated(x, p, (1, 1), "VALID")))

    _, _, statistics = value_and_grad(convolved, rows="reduce")(kernel, images)
    g = np.asarray(jnp.cos(lax.conv_general_dilated(images, kernel, (1, 1), "VALID")).sum((2, 3)))
    np.testing.assert_allclose(statistics["params"].main.G[0], g.T @ g, rtol=1e-10)
    assert float(statistics["params"].main.rows[0]) == 5


@pytest.mark.parametrize("rows", ["expand", "reduce"])
def test_terms_of_a_loss_over_positions(rows):
    """4 examples of 5 positions are 20 terms, also where the last layers are not covered."""
    w, x = {"a": normal(3, 6), "b": normal(6, 2)}, normal(4, 5, 3, seed=1)

    def loss(p, x):
        return jnp.mean(jnp.sum((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2, -1))

    for plain in ((), ("['b']",)):
        assert float(value_and_grad(loss, rows=rows, plain=plain)(w, x)[2].terms) == 20
    table = normal(7, 3)

    def tied(p, ids):
        return -jnp.mean(jax.nn.log_softmax(p[ids] @ p.T)[..., 0])

    assert float(value_and_grad(tied, rows=rows)(table, jnp.arange(20).reshape(4, 5) % 7)[2].terms) == 20


def with_all_steps(p, h):
    """A head on the last step, in the loss, and on all of them, beside it."""
    return h[:, -1] @ p["head"] + p["bias"], h @ p["head"] + p["bias"]


def with_another(p, h):
    return h.mean(1) @ p["head"] + p["bias"], h @ p["other"] + p["shift"]


@pytest.mark.parametrize("model", [with_all_steps, with_another])
@pytest.mark.parametrize("how", ["aux", "dropped", "stopped"])
def test_what_the_loss_does_not_depend_on_is_none_of_its_terms(model, how):
    p = {"w": normal(3, 6), "head": normal(6, 2), "bias": normal(2), "other": normal(6, 2)}
    p |= {"shift": normal(2, seed=5)}
    x = normal(4, 5, 3, seed=1)

    def loss(p, x):
        y, others = model(p, jnp.tanh(x @ p["w"]))
        value = jnp.mean(jnp.sum(y**2, -1))
        if how == "stopped":
            value = value + 0 * lax.stop_gradient(others).sum()
        return (value, others) if how == "aux" else value

    statistics = value_and_grad(loss, has_aux=how == "aux")(p, x)[2]
    assert float(statistics.terms) == 4


def test_a_decoder_that_runs_again_beside_the_loss_adds_no_terms():
    p = {"mean": normal(3, 6), "w": normal(6, 5), "b": normal(5), "head": normal(5, 3), "c": normal(3)}
    x, noise = normal(8, 3, seed=1), normal(8, 6, seed=2)

    def decoder(p, z):
        return jnp.tanh(z @ p["w"] + p["b"]) @ p["head"] + p["c"]

    def loss(p, x):
        mean = x @ p["mean"]
        error = jnp.mean(jnp.sum((decoder(p, mean + noise) - x) ** 2, -1))
        return error + jnp.mean(mean**2), decoder(p, mean)

    assert float(value_and_grad(loss, has_aux=True)(p, x)[2].terms) == 8


@pytest.mark.parametrize("shape", [(6,), (1, 6)])
def test_a_spectral_norm_of_the_last_weight_is_no_term(shape):
    p, x, u = {"w": normal(3, 6), "head": normal(6, 2), "b": normal(2)}, normal(8, 3), normal(*shape)

    def loss(p, x, u):
        v = lax.stop_gradient(u @ p["head"])
        norm = jnp.squeeze(u @ p["head"] @ v.T)
        return jnp.mean((jnp.tanh(x @ p["w"]) @ (p["head"] / norm) + p["b"]) ** 2)

    assert float(value_and_grad(loss)(p, x, u)[2].terms) == 8


@pytest.mark.parametrize("examples", [1, 4])
def test_a_head_with_a_penalty_counts_its_terms(examples):
    p = {"w": normal(3, 6), "head": normal(6, 2), "bias": normal(2)}

    def loss(p, x):
        y = jnp.tanh(x @ p["w"]).mean(1) @ p["head"] + p["bias"]
        return jnp.mean(jnp.sum(y**2, -1)) + 1e-3 * jnp.sum(p["head"] ** 2)

    assert float(value_and_grad(loss)(p, normal(examples, 5, 3))[2].terms) == examples


def test_capture_is_chosen_by_a_traced_flag():
    w, x = normal(4, 3), normal(5, 4, seed=1)

    def loss(p, x):
        return jnp.mean(jnp.sin(x @ p)), {"size": x.shape[0], "y": x @ p}

    vag = value_and_grad(loss, has_aux=True)
    step = jax.jit(lambda due: vag(w, x, capture=due)[1:])
    grads, statistics = step(True)
    others, nothing = step(False)
    np.testing.assert_allclose(grads, others, rtol=1e-12)
    assert float(statistics["params"].main.rows[0]) == 5
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(nothing))
    (_value, aux), grads, none = vag(w, x, capture=False)
    assert none is None
    assert aux["size"] == 5
    np.testing.assert_allclose(grads, others, rtol=1e-12)
    assert jax.tree.map(jnp.shape, vag.plan(w, x).no_statistics()) == jax.tree.map(jnp.shape, statistics)


@pytest.mark.parametrize("rows", ["expand", "reduce"])
def test_terms_of_a_loss_whose_trained_leaves_are_not_in_products(rows):
    """4 examples of 5 positions, with products that are not trained, or not covered."""
    x, frozen = normal(4, 5, 6, seed=2), normal(6, 3, seed=3)
    p = {"scale": normal(6), "shift": normal(6, seed=1), "bias": normal(3, seed=4)}

    def loss(p, x):
        return jnp.mean(jnp.sin((x * p["scale"] + p["shift"]) @ frozen + p["bias"]))

    def scanned(p, x):
        h, _ = lax.scan(lambda h, s: (jnp.tanh(h * s), None), x, jnp.stack([frozen[:, 0]] * 3))
        return loss(p, h)

    def again(p, x):  # each of its uses has as many rows
        return loss(p, jnp.tanh(x * p["scale"] + p["shift"]))

    def trained(p, x):
        return jnp.mean(jnp.sin((x * p["scale"] + p["shift"]) @ p["w"] + p["bias"]))

    vag = functools.partial(value_and_grad, rows=rows)
    for f in (loss, scanned, again):
        assert float(vag(f)(p, x)[2].terms) == 20
    assert float(vag(trained, plain=["['w']"])(p | {"w": frozen}, x)[2].terms) == 20
    del p["bias"]
    assert float(vag(lambda p, x: loss(p | {"bias": 0.0}, x))(p, x)[2].terms) == 20


@pytest.mark.parametrize("order", ["value first", "value last"])
def test_terms_are_counted_of_values_and_not_of_their_derivatives(order):
    """u of 7 points and u - u' of 5, in whatever order: 12 terms, by the bias that is u's alone."""
    p = {"w": normal(1, 4), "b": normal(4, seed=1), "v": normal(4, 1, seed=2), "c": normal(1, seed=3)}
    x, y = normal(5, 1, seed=4), normal(7, 1, seed=5)

    def u(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]

    def residual(p, x):
        value, slope = jax.jvp(lambda x: u(p, x), (x,), (jnp.ones_like(x),))
        return jnp.sum((value - slope) ** 2)

    def loss(p, x, y):
        parts = [lambda: jnp.sum(u(p, y) ** 2), lambda: residual(p, x)]
        return sum(part() for part in (parts if order == "value first" else parts[::-1]))

    assert float(value_and_grad(loss)(p, x, y)[2].terms) == 12


def test_terms_of_a_head_that_is_used_twice_and_tied_to_a_lookup():
    table, ids = normal(7, 4), jnp.arange(6).reshape(2, 3)

    def loss(table, ids):
        hidden = jnp.tanh(table[ids])
        return jnp.mean(jnp.sin(hidden[:1] @ table.T)) + jnp.mean(jnp.sin(hidden[1:] @ table.T))

    assert float(value_and_grad(loss)(table, ids)[2].terms) == 6


def test_complex_parameters_are_said_to_be_so():
    p = {"w": normal(3, 4), "c": (normal(4, 2) + 1j * normal(4, 2, seed=1))}

    def loss(p, x):
        return jnp.sum(jnp.abs(jnp.tanh(x @ p["w"]) @ p["c"]) ** 2)

    plan = value_and_grad(loss).plan(p, normal(5, 3))
    assert plan.routing["['c']"].reason.startswith("complex128 parameters are not covered: keep")
    with pytest.raises(ValueError, match=r"fallback must be given where .* got \['c'\] of complex128"):
        kfac(plan, 0.1).init(p)
    kfac(plan, 0.1, fallback=optax.adam(1e-3)).init(p)


@pytest.mark.parametrize("rows", ["expand", "reduce"])
@pytest.mark.parametrize("layers", [2, 6, 18])
def test_rows_of_scales_and_shifts_of_several_layers_in_one_leaf(layers, rows):
    p = {"s": 1 + 0.1 * normal(layers, 3), "b": normal(layers, 3, seed=1)}
    x = normal(5, 7, 3, seed=2)

    def loss(p, x):
        for i in range(layers):
            x = jnp.sin(x * p["s"][i] + p["b"][i])
        return jnp.mean(jnp.sum(x**2, -1))

    main = jax.jit(value_and_grad(loss, rows=rows))(p, x)[2]["['s']"].main
    expected = np.full(layers * 3, 35.0 if rows == "expand" else 5.0)
    np.testing.assert_array_equal(main.rows, expected)
    np.testing.assert_array_equal(main.G[:, 0], expected)


def test_one_example_is_one_row_of_scales_and_shifts_too():
    p = {"s": 1 + 0.1 * normal(3), "b": normal(3, seed=1), "w": normal(3, 2, seed=2)}
    x = normal(1, 7, 3, seed=3)

    def loss(p, x):
        return jnp.sum(jnp.sin((x * p["s"] + p["b"]) @ p["w"]))

    grads = jax.grad(loss)(p, x)
    main = value_and_grad(loss, rows="reduce")(p, x)[2]["['s']"].main
    np.testing.assert_array_equal(main.rows, np.ones(3))
    np.testing.assert_allclose(main.A, second_moments(grads["s"][None], grads["b"][None]), rtol=1e-10)


def test_terms_of_a_head_with_a_bias_in_some_of_its_calls():
    p = {"w": normal(3, 2), "b": normal(2, seed=1)}
    x, y = normal(3, 3, seed=2), normal(8, 3, seed=3)

    def loss(p, x, y):
        return jnp.sum(jnp.sin(x @ p["w"] + p["b"])) + jnp.sum(jnp.sin(y @ p["w"]))

    assert float(value_and_grad(loss)(p, x, y)[2].terms) == 11


# ---- derivatives by the inputs -------------------------------------------------------------------


def mlp_of_a_point(p, x, activation=jnp.tanh):
    for w, b in p[:-1]:
        x = activation(x @ w + b)
    return (x @ p[-1][0] + p[-1][1])[0]


def points_and_mlp():
    p = [(normal(i, o, seed=i), normal(o, seed=o)) for i, o in ((2, 5), (5, 4), (4, 1))]
    return p, normal(9, 2, seed=1), normal(4, 2, seed=2)


LAPLACIANS = {
    "reverse": lambda u, x: sum(jax.grad(lambda x, i=i: jax.grad(u)(x)[i])(x)[i] for i in range(2)),
    "forward": lambda u, x: sum(
        jax.jvp(lambda x, e=e: jax.jvp(u, (x,), (e,))[1], (x,), (e,))[1] for e in jnp.eye(2)
    ),
    "hessian": lambda u, x: jnp.trace(jax.hessian(u)(x)),
    "forward over reverse": lambda u, x: jnp.trace(jax.jacfwd(jax.grad(u))(x)),
}


# Whose derivatives have their value or not, of one operation or of several, or with a rule of their own.
ACTIVATIONS = [jnp.tanh, jnp.sin, jnp.square, jax.nn.silu, jax.nn.gelu, jax.nn.softplus]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", LAPLACIANS)
def test_the_terms_of_a_loss_of_derivatives_are_its_points(kind, activation):
    p, x, y = points_and_mlp()

    def at(f, p, x):
        return jax.vmap(lambda x: f(lambda z: mlp_of_a_point(p, z, activation), x))(x)

    def residual(p, x):
        return jnp.mean(at(LAPLACIANS[kind], p, x) ** 2)

    def boundary(p, x, y):
        return residual(p, x) + jnp.mean(at(lambda u, z: u(z), p, y) ** 2)

    def and_more(p, x, y):  # beside the loss
        return boundary(p, x, y), at(lambda u, z: u(z), p, jnp.ones((50, 2)))

    def terms(loss, *batch, **options):
        return float(value_and_grad(loss, **options)(p, *batch)[2].terms)

    assert terms(residual, x) == pytest.approx(9)
    assert terms(boundary, x, y) == pytest.approx(13)
    assert terms(and_more, x, y, has_aux=True) == pytest.approx(13)


def by_jet(u, x, e):
    return jet(u, (x,), ((e, jnp.zeros_like(x)),))[1][1]


@pytest.mark.parametrize("activation", [jnp.tanh, jnp.sin])
@pytest.mark.parametrize("mapped", [False, True])
def test_the_terms_of_a_loss_of_derivatives_of_second_order_by_jet_are_its_points(mapped, activation):
    p, x, y = points_and_mlp()

    def laplacian(u, x):
        if mapped:
            return jax.vmap(lambda e: by_jet(u, x, e))(jnp.eye(2)).sum()
        return sum(by_jet(u, x, e) for e in jnp.eye(2))

    def at(f, p, x):
        return jax.vmap(lambda x: f(lambda z: mlp_of_a_point(p, z, activation), x))(x)

    def residual(p, x):
        return jnp.mean(at(laplacian, p, x) ** 2)

    def boundary(p, x, y):
        return residual(p, x) + jnp.mean(at(lambda u, z: u(z), p, y) ** 2)

    assert value_and_grad(residual).plan(p, x).last[0].terms == 9
    assert value_and_grad(boundary).plan(p, x, y).last[0].terms == 13


SEEDS = {  # of zeros like x
    "zeros_like": jnp.zeros_like,
    "times 0": lambda x: 0.0 * x,
    "moved": lambda x: -jnp.zeros((3, 7)).T / 3 + jnp.zeros_like(x),
    "made of zeros": lambda x: jnp.zeros_like(x) * jnp.sin(x),
}


@pytest.mark.parametrize("kind", SEEDS)
def test_products_with_seeds_of_zeros_beside_a_layers_values_are_no_uses(kind):
    p = {"w": normal(3, 4), "b": normal(4, seed=4), "s": normal(4, seed=1), "o": normal(4, 2, seed=2)}
    x = normal(7, 3, seed=3)

    def loss(p, x, zeros):
        h = x @ p["w"] + p["b"]
        h = jnp.tanh(h + (0.0 if zeros is None else jnp.cos(zeros(x) @ p["w"]) - 1))
        return jnp.mean(jnp.sin((h * p["s"]) @ p["o"]) ** 2)

    found, expected = (value_and_grad(loss)(p, x, zeros) for zeros in (SEEDS[kind], None))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bias_first", [False, True])
def test_a_recurrent_network_from_zeros_has_all_of_its_products(bias_first):
    p = {"h": normal(4, 4), "x": normal(3, 4, seed=1), "b": normal(4, seed=2)}
    x = normal(7, 5, 3, seed=3)

    def loss(p, x, h):
        for t in range(5):
            y = (
                h @ p["h"] + p["b"] + x[:, t] @ p["x"]
                if bias_first
                else h @ p["h"] + x[:, t] @ p["x"] + p["b"]
            )
            h = jnp.tanh(y)
        return jnp.mean(h**2)

    found = value_and_grad(lambda p, x: loss(p, x, jnp.zeros((7, 4))))(p, x)
    expected = value_and_grad(loss)(p, x, jnp.zeros((7, 4)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_rows_of_other_data_beside_a_layers_are_terms():
    p, x = {"w": normal(3, 2), "b": normal(2, seed=1)}, normal(6, 3, seed=2)

    def loss(p, x):
        others = jnp.concatenate([x - x[:1], x * 2, x - x[1:2]])
        return jnp.mean(jnp.sin(x @ p["w"] + p["b"])) + jnp.mean(jnp.sin(others @ p["w"]))

    assert value_and_grad(loss).plan(p, x).last[0].terms == 24


@pytest.mark.parametrize("several", [False, True])
def test_weights_may_be_put_on_a_device(several):
    p, x = {"w": normal(3, 4), "b": normal(4, seed=1)}, normal(7, 3, seed=2)
    device = jax.devices()[0]

    def loss(p, x, move):
        return jnp.mean(jnp.sin(x @ move(p)["w"] + move(p)["b"]))

    def moved(p):
        return jax.device_put(p, device) if several else {k: jax.device_put(v) for k, v in p.items()}

    found, expected = (value_and_grad(loss)(p, x, f) for f in (moved, lambda p: p))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def normalized(h):
    return (h - h.mean()) * lax.rsqrt(h.var() + 0.1)


# What a network does before its head, of (parameters, h, the layer before, the point), and behind it.
ENDS = {
    "residual": (lambda p, h, below, z: h + below, None),
    "gate of its own": (lambda p, h, below, z: p["a"] * h + (1 - p["a"]) * below, None),
    "scale": (lambda p, h, below, z: h * p["s"], None),
    "norm": (lambda p, h, below, z: normalized(h) * p["s"] + p["t"], None),
    "softmax": (lambda p, h, below, z: jax.nn.softmax(h), None),
    "gate of the point": (lambda p, h, below, z: h * jnp.sin(z[0]), None),
    "side by side": (lambda p, h, below, z: jnp.concatenate([h[:2] ** 2, h[2:]]), None),
    "boundary": (None, lambda u, z: u * z[1] * (1 - z[1])),
    "initial value": (None, lambda u, z: u * z[0] + jnp.sin(z[1])),
}
E = np.eye(2)
DERIVATIVES = {
    "reverse": lambda u, z: jax.grad(u)(z)[0] - jax.hessian(u)(z)[1, 1],
    "forward": lambda u, z: (
        jax.jvp(u, (z,), (E[0],))[1] - jax.jvp(lambda z: jax.jvp(u, (z,), (E[1],))[1], (z,), (E[1],))[1]
    ),
    "products": lambda u, z: u(z) * jax.grad(u)(z)[1] + jax.grad(u)(z)[0] - jax.hessian(u)(z)[1, 1],
    "value and slopes": lambda u, z: sum(map(jnp.sum, jax.value_and_grad(u)(z))),
    "every direction": lambda u, z: sum(
        map(jnp.sum, jax.vmap(lambda e: jax.jvp(u, (z,), (e,)))(jnp.eye(2)))
    ),
    "linearized": lambda u, z: jax.linearize(jax.grad(u), z)[1](jnp.asarray(E[1]))[1],
}


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize("kind", DERIVATIVES)
@pytest.mark.parametrize("end", ENDS)
def test_the_terms_of_a_loss_of_derivatives_are_its_points_with_other_ends(end, kind, remat):
    p = {"w1": normal(2, 4), "b1": normal(4), "w2": normal(4, 4, seed=1), "b2": normal(4, seed=1)}
    p |= {"o": normal(4, 1, seed=2), "c": normal(1), "s": 1 + normal(4), "t": normal(4, seed=3)}
    p |= {"a": normal(1, seed=4)}
    x, y = normal(9, 2, seed=1), normal(4, 2, seed=2)
    before, behind = ENDS[end]

    def network(p, z):
        below = jnp.tanh(z @ p["w1"] + p["b1"])
        h = jnp.tanh(below @ p["w2"] + p["b2"])
        u = ((h if before is None else before(p, h, below, z)) @ p["o"] + p["c"])[0]
        return u if behind is None else behind(u, z)

    if remat:
        network = jax.checkpoint(network)

    def residual(p, x):
        each = jax.vmap(lambda x: DERIVATIVES[kind](lambda z: network(p, z), x))
        return jnp.mean(each(x) ** 2)

    def boundary(p, x, y):
        return residual(p, x) + jnp.mean(jax.vmap(lambda z: network(p, z))(y) ** 2)

    for loss, batch, count in ((residual, (x,), 9), (boundary, (x, y), 13)):
        (last, *_) = value_and_grad(loss).plan(p, *batch).last
        assert last.terms == count


CONVERTED = {
    "a mask in half precision": lambda h: jax.nn.softmax(jnp.where(h > 0, h, -1e9).astype("float32")),
    "unsigned": lambda h: h * jnp.where(jnp.arange(4, dtype=jnp.uint32) > 1, jnp.uint32(3), -1 % 5),
    "clipped": lambda h: h * jnp.clip(jnp.arange(4, dtype=jnp.uint8), -5, 1000),
    "not a number": lambda h: h + 0 * jax.jit(lambda v: lax.convert_element_type(v, "int32"))(np.nan),
    "a negative number": lambda h: h * jax.jit(lambda v: lax.convert_element_type(v, "uint32"))(-1),
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_numbers_that_do_not_fit_their_type_are_no_obstacle(kind):
    p = {"w": normal(3, 4).astype("float32"), "b": normal(4).astype("float32")}

    def loss(p, x):
        h = (x @ p["w"] + p["b"]).astype("float16")
        return jnp.mean(CONVERTED[kind](h).astype("float32") ** 2)

    assert value_and_grad(loss).plan(p, normal(7, 3).astype("float32")).last[0].terms == 7


def test_what_a_scan_of_two_arrays_takes_apart_differs_where_a_number_comes_first():
    p = {"w": normal(3, 4), "b": normal(4), "v": normal(4, 1), "c": normal(1)}

    def loss(p, x, y, temperature):
        def network(x):
            return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]

        def step(total, pair):
            first, second = pair
            both = network(temperature * first) + network(temperature * second)
            return total + jnp.mean(both**2), None

        return lax.scan(step, 0.0, (x, y))[0]

    def with_a_number(p, x, y):
        return jax.jit(loss)(p, x, y, 0.5)

    plan = value_and_grad(with_a_number).plan(p, normal(8, 5, 3), normal(8, 5, 3, seed=1))
    assert plan.last[0].terms == 80


def test_what_is_computed_again_is_counted_once_and_what_differs_apart():
    p, x = {"w": normal(3, 4), "v": normal(4, 2, seed=1), "b": normal(2)}, normal(5, 3)

    def model(p, x):
        return jnp.tanh(x @ p["w"]) @ p["v"] + p["b"]

    losses = {
        5: lambda p, x: jnp.mean(model(p, x) ** 2) + jnp.mean(jnp.sin(jax.jit(model)(p, x))),
        10: lambda p, x: jnp.mean((model(p, x) - model(p, 2 * x)) ** 2),
        15: lambda p, x: sum(jnp.mean(model(p, k * x) ** 2) for k in (1, 2, 2.0, 3)),
        20: lambda p, x: (
            sum(jnp.mean(model(p, x.sum(i, keepdims=True) + x)) for i in (0, 1, 0))
            + jnp.mean(model(p, x[::-1]))
            + jnp.mean(model(p, x[jnp.array([0, 2, 1, 4, 3])]))
        ),
    }
    for count, loss in losses.items():
        assert value_and_grad(loss).plan(p, x).last[0].terms == count


def test_what_differs_in_more_than_axes_of_length_1_differs():
    p, x, z = {"w": normal(3, 4), "v": normal(4, 2, seed=1)}, normal(3, 3), normal(3, seed=2)

    def terms(*inputs):
        def loss(p, x, z):
            return sum(jnp.mean((jnp.tanh(f(x, z) @ p["w"]) @ p["v"]) ** 2) for f in inputs)

        return value_and_grad(loss).plan(p, x, z).last[0].terms

    def of_each(x, z):
        return jax.vmap(lambda x: x[None] + z[None])(x)[:, 0]

    assert terms(lambda x, z: x + z, of_each) == 3
    assert terms(lambda x, z: x + z, lambda x, z: x + z[:, None]) == 6
    assert terms(lambda x, z: x @ x[None, 0].T + x, lambda x, z: x.T @ x[0][:, None] + x) == 6
    assert terms(lambda x, z: jnp.cumsum(x, 0), lambda x, z: jnp.cumsum(x[None], 2)[0]) == 6
    assert terms(lambda x, z: z[:, None] + 0 * x, lambda x, z: z + 0 * x) == 6


def recurrent(p, x, start=0.0, reverse=False):
    """Of (time, examples, features)."""

    def step(h, x):
        h = jnp.tanh(x @ p["u"] + h @ p["w"] + p["b"])
        return h, h

    first = jnp.full((x.shape[1], 4), start)
    return lax.scan(step, first, x, reverse=reverse)[1] @ p["v"]


def augmented(p, x, choice):
    x = lax.cond(choice > 0, lambda x: x[:, ::-1], lambda x: 2 * x, x)
    return jnp.tanh(x[0] @ p["u"]) @ p["v"]


# Each with what it has the terms of.
IN_TURN = {
    "two sequences": (
        lambda p, x, y, a: jnp.mean(recurrent(p, x) ** 2) + jnp.mean(recurrent(p, y) ** 2),
        lambda p, x, y, a: jnp.mean(recurrent(p, jnp.concatenate([x, y], 1)) ** 2),
    ),
    "one sequence from two states": (
        lambda p, x, y, a: jnp.mean(recurrent(p, x, 1.0) ** 2) + jnp.mean(recurrent(p, x, 2.0) ** 2),
        lambda p, x, y, a: jnp.mean(recurrent(p, jnp.concatenate([x, y], 1)) ** 2),
    ),
    "both directions": (
        lambda p, x, y, a: jnp.mean(recurrent(p, x) * recurrent(p, x, reverse=True)),
        lambda p, x, y, a: jnp.mean(recurrent(p, jnp.concatenate([x, y], 1)) ** 2),
    ),
    "one sequence again": (
        lambda p, x, y, a: jnp.mean(recurrent(p, x) ** 2) + jnp.mean(jnp.sin(recurrent(p, x))),
        lambda p, x, y, a: jnp.mean(recurrent(p, x) ** 2),
    ),
    "two augmentations": (
        lambda p, x, y, a: jnp.mean(augmented(p, x, a[0]) * augmented(p, x, a[1])),
        lambda p, x, y, a: jnp.mean(augmented(p, jnp.concatenate([x, y], 1), a[0])),
    ),
    "a tied head of the last step": (
        lambda p, x, y, a: jnp.mean(jnp.tanh(x @ p["u"] + p["b"])[-1] @ p["u"].T),
        lambda p, x, y, a: jnp.mean(jnp.sin(x[0] @ p["u"])),
    ),
}


@pytest.mark.parametrize("case", IN_TURN)
def test_what_runs_in_turn_is_as_what_runs_at_once(case):
    p = {"u": normal(3, 4), "w": normal(4, 4), "b": normal(4), "v": normal(4, 2)}
    batch = normal(5, 6, 3), normal(5, 6, 3, seed=1), jnp.asarray([0, 1])
    in_turn, at_once = (value_and_grad(loss).plan(p, *batch).last[0].terms for loss in IN_TURN[case])
    assert in_turn == at_once


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", ["products", "value and slopes", "every direction"])
def test_the_terms_of_a_loss_of_derivatives_of_layers_without_biases(kind, stacked):
    p, x = {"w": normal(2, 4), "W": normal(3, 4, 4, seed=1), "o": normal(4, 1, seed=2)}, normal(9, 2)

    def network(p, z):
        h = jnp.tanh(z @ p["w"])
        if stacked:
            return (lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["W"])[0] @ p["o"])[0]
        for i in range(3):
            h = jnp.tanh(h @ p["W"][i])
        return (h @ p["o"])[0]

    def loss(p, x):
        return jnp.mean(jax.vmap(lambda x: DERIVATIVES[kind](lambda z: network(p, z), x))(x) ** 2)

    assert value_and_grad(loss).plan(p, x).last[0].terms == 9


def test_the_terms_of_energies_and_forces_and_of_a_gradient_penalty():
    p, x, y = points_and_mlp()

    def energy(p, x):
        return jax.vmap(functools.partial(mlp_of_a_point, p))(x)

    def slopes(p, x):
        return jax.vmap(jax.grad(functools.partial(mlp_of_a_point, p)))(x)

    def forces(p, x):
        return jnp.mean(energy(p, x) ** 2) + jnp.mean(slopes(p, x) ** 2)

    def penalty(p, x, y):
        sizes = jnp.linalg.norm(slopes(p, 0.5 * x[:4] + 0.5 * y), axis=1)
        return energy(p, x).mean() - energy(p, y).mean() + jnp.mean((sizes - 1) ** 2)

    assert float(value_and_grad(forces)(p, x)[2].terms) == 9
    assert float(value_and_grad(penalty)(p, x, y)[2].terms) == 9 + 4 + 4


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", LAPLACIANS)
def test_terms_of_a_batch_of_values_and_of_derivatives_point_by_point(kind, activation):
    """Each point is a batch of one where it is differentiated, and all are one where they are not."""
    p, x, y = points_and_mlp()

    def u(p, x):
        for w, b in p[:-1]:
            x = activation(x @ w + b)
        return x @ p[-1][0] + p[-1][1]

    def loss(p, x, y):
        sums = jax.vmap(lambda x: LAPLACIANS[kind](lambda x: u(p, x[None])[0, 0], x))(x)
        return jnp.mean((sums + u(p, x)[:, 0]) ** 2) + jnp.mean(u(p, y) ** 2)

    assert value_and_grad(loss).plan(p, x, y).last[0].terms == 9 + 4


# A last layer whose bias, if it has one, is no column beside the weight.
LAST_LAYERS = {
    "no bias": lambda w, b, h: h @ w,
    "times a number": lambda w, b, h: 0.5 * (h @ w) + b,
    "weight times a number": lambda w, b, h: h @ (0.5 * w),
}


@pytest.mark.parametrize("last", LAST_LAYERS)
@pytest.mark.parametrize("order", ["derivative first", "value first"])
def test_terms_of_values_beside_derivatives_without_a_bias_in_any_order(last, order):
    """u + u' of 9 points, and u of 4 on the boundary; a derivative has a product that nothing reads."""
    p, x, y = points_and_mlp()

    def u(p, x):
        for w, b in p[:-1]:
            x = jnp.tanh(x @ w + b)
        return LAST_LAYERS[last](*p[-1], x)

    def loss(p, x, y):
        parts = {
            "derivative first": lambda: jax.vmap(jax.grad(lambda x: u(p, x)[0]))(x)[:, 0],
            "value first": lambda: u(p, x)[:, 0],
        }
        found = {name: parts[name]() for name in sorted(parts, key=order.__ne__)}
        return jnp.mean(sum(found.values()) ** 2) + jnp.mean(u(p, y) ** 2)

    assert value_and_grad(loss).plan(p, x, y).last[0].terms == 9 + 4


def padded(rows):
    return np.pad(np.asarray(rows), ((0, 0), (0, 1)))


def test_a_bias_that_some_uses_have_is_a_coordinate_that_is_zero_in_the_others():
    """u and its derivative along v, of which the loss is: W has rows (x, 1) and (v, 0)."""
    w, b, c = normal(4, 3), normal(3, seed=1), normal(5, 3, seed=2)
    x, v = normal(5, 4, seed=3), normal(5, 4, seed=4)

    def loss(p, x, v, eps=(0.0, 0.0)):
        y, slope = jax.jvp(lambda x: x @ p["w"] + p["b"] + eps[0], (x,), (v,))
        return jnp.sum(jnp.sin(y) * jnp.cos(slope + eps[1]) * c)

    p = {"w": w, "b": b}
    plan = value_and_grad(loss).plan(p, x, v)
    assert [layer.sizes for layer in plan.layers] == [(5, 3)]
    main = value_and_grad(loss)(p, x, v)[2]["['w']"].main
    g = jax.grad(lambda eps: loss(p, x, v, eps))((jnp.zeros((5, 3)),) * 2)
    inputs = np.concatenate([np.pad(x, ((0, 0), (0, 1)), constant_values=1), padded(v)])
    outputs = np.concatenate(g)
    np.testing.assert_allclose(main.A[0], inputs.T @ inputs, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(main.G[0], outputs.T @ outputs, rtol=1e-10, atol=1e-12)
    verify(loss, p, x, v, rtol=1e-10)


def test_so_it_is_beside_uses_as_the_transpose():
    """The network's slope by x is a product with Wᵀ; the uses with the bias are the main ones."""
    w, b, c = normal(4, 3), normal(3, seed=1), normal(3, seed=2)
    x = normal(5, 4, seed=3)

    def energy(p, x, eps):
        return jnp.sum(jnp.sin(x @ p["w"] + p["b"] + eps) * c)

    def loss(p, x, eps=(0.0, 0.0)):
        slope = jax.grad(energy, 1)(p, x, eps[0]) + eps[1]
        return jnp.sum(slope**3)

    p = {"w": w, "b": b}
    sums = value_and_grad(loss)(p, x)[2]["['w']"]
    eps = (jnp.zeros((5, 3)), jnp.zeros((5, 4)))
    g, v = jax.grad(lambda eps: loss(p, x, eps))(eps)
    (by_output,) = jax.grad(lambda eps: energy(p, x, eps), argnums=(0,))(eps[0])
    inputs = np.pad(x, ((0, 0), (0, 1)), constant_values=1)
    np.testing.assert_allclose(sums.main.A[0], inputs.T @ inputs, rtol=1e-10)
    np.testing.assert_allclose(sums.main.G[0], g.T @ g, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(sums.transposed.A[0], by_output.T @ by_output, rtol=1e-10)
    np.testing.assert_allclose(sums.transposed.G[0], padded(v).T @ padded(v), rtol=1e-10, atol=1e-12)
    verify(loss, p, x, rtol=1e-10)


def test_so_it_is_in_convolutions():
    p = {"w": normal(3, 2, 2, 2), "b": normal(3, seed=1)}
    x, v = normal(5, 2, 4, 4, seed=3), normal(5, 2, 4, 4, seed=4)

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME")

    def loss(p, x, v):
        y, slope = jax.jvp(lambda x: convolve(x, p["w"]) + p["b"][:, None, None], (x,), (v,))
        return jnp.mean(jnp.sum(jnp.sin(y) * jnp.cos(slope), (1, 2, 3)))

    (layer,) = value_and_grad(loss).plan(p, x, v).layers
    assert layer.sizes == (9, 3)
    verify(loss, p, x, v, rtol=1e-9)
    A = value_and_grad(loss)(p, x, v)[2]["['w']"].main.A[0]
    np.testing.assert_allclose(A[-1, -1], 5 * 16)  # ones are in the rows of x
    patches = jax.lax.conv_general_dilated_patches(jnp.concatenate([x, v]), (2, 2), (1, 1), "SAME")
    rows = np.moveaxis(patches, 1, -1).reshape(-1, 8)
    np.testing.assert_allclose(A[:-1, :-1], rows.T @ rows, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(A[-1, :-1], rows[: 5 * 16].sum(0), rtol=1e-10, atol=1e-12)


def test_so_it_is_in_eigenbases():
    w, b = normal(4, 3), normal(3, seed=1)
    x, v = normal(5, 4, seed=3), normal(5, 4, seed=4)

    def loss(p, x, v, eps=(0.0, 0.0)):
        y, slope = jax.jvp(lambda x: x @ p["w"] + p["b"] + eps[0], (x,), (v,))
        return jnp.sum(jnp.sin(y) * jnp.cos(slope + eps[1]))

    p, vag = {"w": w, "b": b}, value_and_grad(loss)
    tx = kfac(vag.plan(p, x, v), 0.1, compute_method="ekfac", inv_update_steps=5)
    bases = eigenbases(tx.init(p), vag.plan(p, x, v))
    turns = [np.linalg.qr(normal(n, n, seed=n))[0][None] for n in (5, 3)]
    bases = {name: tuple(map(jnp.asarray, turns)) for name in bases}
    products = vag(p, x, v, bases=bases)[2]["['w']"].main.products[0]
    g = np.concatenate(jax.grad(lambda eps: loss(p, x, v, eps))((jnp.zeros((5, 3)),) * 2))
    inputs = np.concatenate([np.pad(x, ((0, 0), (0, 1)), constant_values=1), padded(v)])
    expected = ((g @ turns[1][0]) ** 2).T @ (inputs @ turns[0][0]) ** 2
    np.testing.assert_allclose(products, expected, rtol=1e-9)


def test_second_moments_in_eigenbases_are_of_both_uses_of_a_tied_weight():
    """y = tanh(x W) Wᵀ, called eagerly with arrays of NumPy: the rows of W's two gradients, turned."""
    w, x = normal(4, 3), np.asarray(normal(5, 4, seed=3))

    def loss(p, x, eps=(0.0, 0.0)):
        h = x @ p["w"] + eps[0]
        return jnp.sum(jnp.sin(jnp.tanh(h) @ p["w"].T + eps[1]))

    p, vag = {"w": w}, value_and_grad(loss)
    plan = vag.plan(p, x)
    assert plan.layers[0].measures_products
    turns = [np.linalg.qr(normal(n, n, seed=n))[0] for n in plan.layers[0].sizes]
    bases = {"['w']": tuple(jnp.asarray(q)[None] for q in turns)}
    sums = vag(p, x, bases=bases)[2]["['w']"]
    first, second = jax.grad(lambda eps: loss(p, x, eps))((jnp.zeros((5, 3)), jnp.zeros((5, 4))))
    sides = [(x, first), (second, jnp.tanh(x @ w))]  # rows of what has 4 columns, and of what has 3
    if plan.layers[0].sizes == (3, 4):
        sides = [pair[::-1] for pair in sides]
    expected = sum(((g @ turns[1]) ** 2).T @ (a @ turns[0]) ** 2 for a, g in sides)
    found = sums.main.products[0] + sums.transposed.products[0]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("kind", ["int32", "uint8", "bool"])
def test_inputs_may_be_counts(kind):
    p, x = {"w": normal(4, 3), "b": normal(3, seed=1)}, np.arange(24).reshape(6, 4) % 7 % 2

    def loss(p, x):
        return jnp.mean(jnp.sin(x @ p["w"] + p["b"]))

    vag, x = value_and_grad(loss), jnp.asarray(x)
    verify(loss, p, x.astype(kind), rtol=1e-9)
    found, expected = (vag(p, given)[2].layers for given in (x.astype(kind), x.astype(p["w"].dtype)))
    assert found.keys() == {"['w']"}
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("wide", ["shared", "own"])
def test_an_ensembles_convolutions_are_its_members(wide):
    params = {"c": normal(2, 3, 3, 2, 4), "d": normal(2, 2, 2, 4, 5, seed=1)}
    x = normal(6, 6, 5, 2, seed=2) if wide == "shared" else normal(2, 6, 6, 5, 2, seed=2)

    def member(p, x):
        for name in ("c", "d"):
            layout = ("NHWC", "HWIO", "NHWC")
            x = jnp.tanh(lax.conv_general_dilated(x, p[name], (2, 1), "SAME", dimension_numbers=layout))
        return jnp.mean(x**2)

    def together(p, x):
        return jnp.sum(jax.vmap(member, (0, None if wide == "shared" else 0))(p, x))

    def in_turn(p, x):
        both = [x, x] if wide == "shared" else x
        return sum(member(jax.tree.map(lambda w, i=i: w[i], p), both[i]) for i in range(2))

    found, parts = (value_and_grad(loss)(params, x)[2] for loss in (together, in_turn))
    for name in ("['c']", "['d']"):
        one, several = found[name].main, [parts[f"{name} part {i}"].main for i in (0, 1)]
        for i, own in enumerate(several):
            whole = len(one.G) == 1  # one product with the inputs that both share
            G = one.G[0][4 * i : 4 * (i + 1), 4 * i : 4 * (i + 1)] if whole else one.G[i]
            A = several[0].A if own.A is None else own.A  # of members that read the same
            np.testing.assert_allclose(one.A[0 if whole else i], A[0], rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(G, own.G[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.uint32])
def test_indices_are_no_keys_whatever_their_kind(dtype):
    """Time first: a class of each example is looked up and shared by all times."""
    params, classes = {"table": normal(3, 4), "w": normal(4, 2, seed=1)}, np.arange(8) % 3
    x = normal(7, 8, 4, seed=2)

    def loss(p, classes, x, of_each=0.0):
        return jnp.mean((jnp.tanh(x + (p["table"][classes] + of_each)[None]) @ p["w"]) ** 2)

    g = jax.grad(lambda e: loss(params, classes, x, e))(jnp.zeros((8, 4)))
    statistics = value_and_grad(loss)(params, classes.astype(dtype), x)[2]["['table']"].main
    np.testing.assert_allclose(statistics.G[0], g.T @ g, rtol=1e-12, atol=1e-16)
    assert statistics.rows[0] == 8


@pytest.mark.parametrize("key", [jax.random.PRNGKey(3), jax.random.split(jax.random.PRNGKey(3), 2)])
def test_keys_by_their_numbers_are_no_examples(key):
    params, x = {"w": normal(4, 2)}, normal(5, 4, seed=1)

    def loss(p, x, key):
        key = key if key.ndim == 1 else key[1]
        return jnp.mean((x * jax.random.bernoulli(key, 0.5, x.shape) @ p["w"]) ** 2)

    statistics = value_and_grad(loss)(params, x, key)[2]
    kept = x * jax.random.bernoulli(key if key.ndim == 1 else key[1], 0.5, x.shape)
    np.testing.assert_allclose(statistics["['w']"].main.A[0], kept.T @ kept, rtol=1e-12)
    assert statistics.terms == 5


@pytest.mark.parametrize("shared", [True, False])
def test_an_ensemble_on_one_input_is_told_what_it_shares(shared):
    """G of what all members make of one input is joint; with inputs of their own each has its own."""
    params = {"w": jnp.ones((4, 2, 6)), "v": jnp.ones((4, 6, 1))}

    def loss(params, x):
        x = x if shared else jnp.broadcast_to(x, (4, *x.shape))
        member = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]  # noqa: E731
        return jnp.mean(jax.vmap(member, (0, None if shared else 0))(params, x) ** 2)

    route = value_and_grad(loss).plan(params, jnp.ones((8, 2))).routing["['w']"]
    assert ("one G for all 4 that have this input, 24 x 24" in route.reason) == shared
    assert route.factors == ("2x2, 24x24" if shared else "4 x (2x2, 6x6)")
