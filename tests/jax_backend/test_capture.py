"""`suite.jax.value_and_grad`: what is found in a loss function's program, and what it saw."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from suite.jax import value_and_grad, verify


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def check(loss_fn, params, *args, has_aux: bool = False):
    """Same value and gradients as jax's own; then the plan and the statistics."""
    vag = value_and_grad(loss_fn, has_aux=has_aux)
    value, grads, statistics = jax.jit(vag)(params, *args)
    expected = jax.jit(jax.value_and_grad(loss_fn, has_aux=has_aux))(params, *args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), (value, grads), expected
    )
    errors = verify(loss_fn, params, *args, has_aux=has_aux, rtol=1e-10)
    plan = vag.plan(params, *args)
    assert list(errors)
    assert set(errors) == {n for n, yes in zip(plan.names, plan.covered(), strict=True) if yes}
    return plan, statistics


def test_dense_layers_with_bias():
    params = {"w": normal(4, 3), "b": normal(3, seed=1), "v": normal(3, 2, seed=2)}
    x = normal(5, 4, seed=3)

    def loss(p, x):
        return jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])

    plan, statistics = check(loss, params, x)
    assert {r.parameter: r.treatment for r in plan.routing} == dict.fromkeys(
        ("['w']", "['b']", "['v']"), "kfac"
    )
    assert [last.layer for last in plan.last] == ["['v']"]
    a = np.concatenate([x, np.ones((5, 1))], 1)
    np.testing.assert_allclose(statistics["['w']"].main.A[0], a.T @ a, rtol=1e-12)
    hidden = np.tanh(x @ params["w"] + params["b"])
    np.testing.assert_allclose(statistics["['v']"].main.A[0], hidden.T @ hidden, rtol=1e-12)
    g = np.full((5, 2), 1 / 10)  # of the mean over 10 outputs
    np.testing.assert_allclose(statistics["['v']"].main.G[0], g.T @ g, rtol=1e-12)
    g = (1 - hidden**2) * (g @ np.asarray(params["v"]).T)
    np.testing.assert_allclose(statistics["['w']"].main.G[0], g.T @ g, rtol=1e-12)
    assert float(statistics["['w']"].main.rows[0]) == 5


@pytest.mark.parametrize(
    ("subscripts", "x_shape", "w_shape", "sizes", "groups", "rows"),
    [
        ("ni,io->no", (5, 4), (4, 3), (4, 3), 1, 5),
        ("ni,oi->no", (5, 4), (3, 4), (4, 3), 1, 5),
        ("oi,ni->on", (5, 4), (3, 4), (4, 3), 1, 5),
        ("nti,iho->ntho", (2, 3, 4), (4, 2, 3), (4, 6), 1, 6),
        ("ntho,hoi->nti", (2, 3, 2, 3), (2, 3, 4), (6, 4), 1, 6),
        ("eni,eio->eno", (2, 5, 4), (2, 4, 3), (4, 3), 2, 5),
        ("nei,eoi->neo", (5, 2, 4), (2, 3, 4), (4, 3), 2, 5),
        ("ni,i->n", (5, 4), (4,), (4, 1), 1, 5),
        ("ni,aibo->no", (5, 4), (1, 4, 1, 3), (4, 3), 1, 5),  # sums over axes of one entry
    ],
)
def test_products_of_any_axes(subscripts, x_shape, w_shape, sizes, groups, rows):
    x, w = normal(*x_shape), normal(*w_shape, seed=1)
    left, right = (w, x) if subscripts.startswith("o") else (x, w)
    coefficients = normal(*jnp.einsum(subscripts, left, right).shape, seed=2)

    def loss(p, x):
        operands = (p, x) if subscripts.startswith("o") else (x, p)
        return jnp.sum(jnp.einsum(subscripts, *operands) * coefficients)

    plan, statistics = check(loss, w, x)
    (layer,) = plan.layers
    assert (layer.sizes, layer.groups) == (sizes, groups)
    (layer_sums,) = statistics.layers.values()
    sums = layer_sums.main
    assert float(sums.rows[0]) == rows
    # For one row Σ a aᵀ ⊗ Σ g gᵀ is the outer product of the gradient with itself, so that the traces'
    # product is the gradient's squared norm. The example index is the letter n.
    if rows == 5 and subscripts.startswith("n"):
        single = x[:1]
        one = jnp.take(coefficients, jnp.array([0]), axis=subscripts.split("->")[1].index("n"))

        def loss_of_one(p, x):
            operands = (p, x) if subscripts.startswith("o") else (x, p)
            return jnp.sum(jnp.einsum(subscripts, *operands) * one)

        _, gradient, statistics = jax.jit(value_and_grad(loss_of_one))(w, single)
        (layer_sums,) = statistics.layers.values()
        sums = layer_sums.main
        total = sum(jnp.trace(sums.A[i]) * jnp.trace(sums.G[i]) for i in range(groups))
        np.testing.assert_allclose(total, jnp.sum(gradient**2), rtol=1e-12)


@pytest.mark.parametrize(
    ("numbers", "x_shape", "w_shape", "settings"),
    [
        (("NCHW", "OIHW", "NCHW"), (3, 2, 5, 6), (4, 2, 3, 2), {}),
        (("NHWC", "HWIO", "NHWC"), (3, 5, 6, 2), (3, 2, 2, 4), {"padding": "SAME"}),
        (("NHWC", "HWIO", "NHWC"), (3, 5, 6, 2), (3, 2, 2, 4), {"window_strides": (2, 1)}),
        (("NHWC", "HWIO", "NHWC"), (3, 7, 6, 2), (3, 2, 2, 4), {"rhs_dilation": (2, 1)}),
        (("NHWC", "HWIO", "NHWC"), (3, 5, 6, 4), (3, 2, 2, 6), {"feature_group_count": 2}),
        (("NHC", "HIO", "NHC"), (3, 8, 2), (3, 2, 4), {"padding": [(2, 0)]}),
        (("NDHWC", "DHWIO", "NDHWC"), (2, 3, 4, 3, 2), (2, 2, 2, 2, 3), {}),
    ],
)
def test_convolutions(numbers, x_shape, w_shape, settings):
    x, w = normal(*x_shape), normal(*w_shape, seed=1)
    spatial = len(x_shape) - 2
    settings = {"window_strides": (1,) * spatial, "padding": "VALID", **settings}
    conv = functools.partial(lax.conv_general_dilated, dimension_numbers=numbers, **settings)
    coefficients = normal(*conv(x, w).shape, seed=2)

    def loss(p, x):
        return jnp.sum(conv(x, p) * coefficients)

    plan, statistics = check(loss, w, x)
    (layer,), (layer_sums,) = plan.layers, statistics.layers.values()
    sums = layer_sums.main
    groups = settings.get("feature_group_count", 1)
    channels = w_shape[-1] if numbers[1].endswith("O") else w_shape[0]
    assert layer.groups == groups
    assert layer.sizes == (int(np.prod(w_shape)) // channels, channels // groups)
    assert float(sums.rows[0]) == coefficients.size // channels
    # Oracle: one output place and channel at a time. d y[place, channel] / d w is the patch there, so
    # Σ over places of its outer product with itself is A of that channel's group.
    jacobian = jax.jit(jax.jacobian(lambda w: conv(x, w)))(w)
    y_axes = [numbers[2].index("C"), *(i for i, c in enumerate(numbers[2]) if c != "C")]
    w_axes = [numbers[1].index("O"), numbers[1].index("I")]
    w_axes += [i for i, c in enumerate(numbers[1]) if c not in "OI"]
    n = len(numbers[2])
    jacobian = jnp.transpose(jacobian, [*y_axes, *(n + a for a in w_axes)])
    jacobian = jacobian.reshape(channels, -1, channels, layer.sizes[0])
    for group in range(groups):
        channel = group * channels // groups
        patches = jacobian[channel, :, channel]
        np.testing.assert_allclose(sums.A[group], patches.T @ patches, rtol=1e-10, atol=1e-12)
    rows = np.transpose(coefficients, y_axes).reshape(groups, channels // groups, -1)
    np.testing.assert_allclose(sums.G, rows @ rows.transpose(0, 2, 1), rtol=1e-10)


def test_a_convolution_with_bias_in_every_layout():
    x = normal(3, 5, 6, 2)
    params = {"w": normal(3, 2, 2, 4, seed=1), "b": normal(4, seed=2)}

    def last(p, x):
        y = lax.conv_general_dilated(
            x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.sin(y + p["b"]))

    def first(p, x):
        w = jnp.transpose(p["w"], (3, 2, 0, 1))
        y = lax.conv_general_dilated(
            jnp.transpose(x, (0, 3, 1, 2)), w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        return jnp.sum(jnp.sin(y + p["b"][:, None, None]))

    results = [check(loss, params, x) for loss in (last, first)]
    for plan, _ in results:
        assert all(route.treatment == "kfac" for route in plan.routing)
        assert plan.layers[0].bias is not None
    for name in ("A", "G"):
        a, b = (getattr(statistics["['w']"].main, name) for _, statistics in results)
        # the kernel's offsets and channels come in the same order in both layouts: (in, *offsets)
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_bias_under_vmap():
    """The example axis comes last in the product then, and is moved before the bias is added."""
    params = {"w": normal(3, 4), "b": normal(3, seed=1), "k": normal(2, 1, 3, seed=2), "c": normal(2, 1)}
    x = normal(5, 4, seed=3)

    def one(p, x):
        y = jnp.tanh(p["w"] @ x + p["b"])
        y = lax.conv_general_dilated(y[None, None], p["k"], (1,), "SAME")[0] + p["c"]
        return jnp.sum(jnp.sin(y))

    def loss(p, x):
        return jnp.mean(jax.vmap(one, (None, 0))(p, x))

    def by_hand(p, x):
        y = jnp.tanh(x @ p["w"].T + p["b"])
        y = lax.conv_general_dilated(y[:, None], p["k"], (1,), "SAME") + p["c"]
        return jnp.mean(jnp.sum(jnp.sin(y), (1, 2)))

    (plan, statistics), (_, expected) = (check(f, params, x) for f in (loss, by_hand))
    assert all(route.treatment == "kfac" for route in plan.routing)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), statistics, expected)


def test_weights_behind_casts_transposes_and_reshapes():
    params = {"w": normal(6, 2), "v": normal(2, 3, seed=1)}
    x = normal(5, 4, seed=2)

    def loss(p, x):
        w = p["w"].T.reshape(3, 4).astype(jnp.float64)[None][0]
        return jnp.sum(jnp.tanh(x @ w.T) @ p["v"].T)

    vag = value_and_grad(loss)
    routing = vag.plan(params, x).routing
    assert routing["['v']"].treatment == "kfac"
    assert routing["['w']"].treatment in ("kfac", "plain")  # [None][0] is a slice in some versions

    def simpler(p, x):
        return jnp.sum(jnp.tanh(x @ p["w"].T.reshape(3, 4).T) @ p["v"].T)

    plan, statistics = check(simpler, params, x)
    assert plan.routing["['w']"].treatment == "kfac"
    np.testing.assert_allclose(statistics["['w']"].main.A[0], x.T @ x, rtol=1e-12)


def test_inside_jit_and_remat_and_after_custom_gradients():
    params = {"w": normal(4, 4), "b": normal(4, seed=1), "v": normal(4, 2, seed=2)}
    x = normal(5, 4, seed=3)

    def block(p, x):
        return jax.nn.relu(x @ p["w"] + p["b"])

    def loss(p, x, wrap):
        return jnp.sum(jax.nn.log_softmax(wrap(block)(p, x) @ p["v"])[:, 0])

    expected = None
    for wrap in (lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(jax.jit(f)))):
        plan, statistics = check(functools.partial(loss, wrap=wrap), params, x)
        assert all(route.treatment == "kfac" for route in plan.routing)
        if expected is not None:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), statistics, expected)
        expected = statistics


def test_a_leaf_used_twice_adds_up():
    w, x = normal(4, 4), normal(5, 4, seed=1)

    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ p) @ p)

    plan, statistics = check(loss, w, x)
    rows = np.concatenate([x, np.tanh(x @ w)])
    np.testing.assert_allclose(statistics["params"].main.A[0], rows.T @ rows, rtol=1e-12)
    assert float(statistics["params"].main.rows[0]) == 10
    assert len(plan.layers) == 1


def on(w, x):
    return jnp.sum(jnp.sin(x @ w))


def on_some(w, x):
    """Each example has a branch of its own."""
    branches = lambda x: x @ w, lambda x: 2 * x
    return jnp.sum(jax.vmap(lambda x: lax.cond(x[0] > 0, *branches, x))(x))


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda p, x: on(p["w"], x) + jnp.sum(p["u"] ** 2), "that are made of parameters alone"),
        (
            lambda p, x: jnp.sin(on(p["w"], x) + on(p["u"], x) + jnp.sum(p["u"] * p["u"])),
            "but also used by `reduce_sum`, of a function of it",
        ),
        (
            lambda p, x: jnp.sin(on(p["w"], x[:, None] + p["u"]) + jnp.sum(jnp.exp(p["u"]))),
            "added or multiplied elementwise, but also used by `reduce_sum`, of a function of it",
        ),
        (lambda p, x: on(p["w"], x), "not used"),
        (lambda p, x: on(p["w"], x) + on(p["u"] @ p["u"], x), "used by `dot_general`"),
        (lambda p, x: on(p["w"], x) + on(jnp.exp(p["u"]), x), "used by `dot_general`, of a function"),
        (lambda p, x: on(p["w"], x) + on(jnp.max(p["u"]) / p["u"], x), "used by `reduce_max`, `div`"),
        (lambda p, x: on(p["w"], x) + on(2.0 / p["u"], x), "used by `dot_general`, of a function"),
        (
            lambda p, x: on(p["w"], x) + on(p["u"] * x[:4], x),
            "used by `dot_general`, times an array of its shape",
        ),
        (
            lambda p, x: on(p["w"], x) + on(jnp.concatenate([p["u"], x[:4]]), jnp.ones((2, 8))),
            "concatenate",
        ),
        (lambda p, x: on(p["w"], x) + on(p["u"], x) + on(p["u"][:3], x[:, :3]), "overlap"),
        (
            lambda p, x: on(p["w"], x) + lax.scan(lambda c, _: (x[:4] @ c, 0), p["u"], None, 2)[0].sum(),
            "used by `scan`",
        ),
        (lambda p, x: on(p["w"], x) + on_some(p["u"], x), "choose between results, by `jnp.where`"),
        (
            lambda p, x: on(p["w"], x) + jnp.sum(x[:4, None] @ jnp.broadcast_to(p["u"], (4, 4, 4))),
            "used by `dot_general`, broadcast before",
        ),
    ],
)
def test_what_is_not_covered_is_plain_and_says_why(loss, why):
    params = {"w": normal(4, 4), "u": normal(4, 4, seed=1)}
    plan, statistics = check(loss, params, normal(5, 4, seed=2))
    route = plan.routing["['u']"]
    assert route.treatment == "plain"
    assert any(part in route.reason for part in why.split("|")), route.reason
    assert set(statistics.layers) == {"['w']"}
    assert plan.covered() == [False, True]


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y.reshape(2, 3, 5),
        lambda y: y.reshape(2, 1, 3, 5),
        lambda y: y.reshape(2, 3, 5).transpose(1, 0, 2),
        lambda y: y.reshape(2, 3, 5).reshape(3, 2, 5),
        lambda y: y.reshape(2, 3, 5).reshape(6, 5)[None],
    ],
)
def test_a_bias_behind_a_reshape_of_rows_is_the_products(after):
    params, x = {"w": normal(4, 5), "b": normal(5, seed=1)}, normal(6, 4, seed=2)
    plan, statistics = check(lambda p, x: jnp.sum(jnp.sin(after(x @ p["w"]) + p["b"])), params, x)
    (layer,) = plan.layers
    rows = np.concatenate([x, np.ones((6, 1))], 1)
    g = np.cos(x @ params["w"] + params["b"])
    np.testing.assert_allclose(statistics[layer.name].main.A[0], rows.T @ rows, rtol=1e-12)
    np.testing.assert_allclose(statistics[layer.name].main.G[0], g.T @ g, rtol=1e-12)


@pytest.mark.parametrize("shape", [(2, 5, 3), (10, 3), (3, 10), (6, 5, 1)])
def test_a_bias_behind_a_reshape_of_features_is_apart(shape):
    """Its entries are no longer the product's outputs, or it is each one's that is no row."""

    def loss(p, x):
        y = (x @ p["w"]).reshape(shape)
        return jnp.sum(jnp.sin(y + p["b"]))

    params, x = {"w": normal(4, 5), "b": normal(shape[-1], seed=1)}, normal(6, 4, seed=2)
    plan, _ = check(loss, params, x)
    assert len(plan.layers) == 2


def test_a_bias_whose_sum_is_not_all_that_follows_is_apart():
    params = {"w": normal(4, 3), "b": normal(3, seed=1)}
    x = normal(5, 4, seed=2)

    def loss(p, x):
        y = x @ p["w"]
        return jnp.sum(jnp.tanh(y + p["b"]) + y**2)  # d loss / d y is not d loss / d (y + b)

    plan, statistics = check(loss, params, x)
    assert [layer.bias for layer in plan.layers] == [None, None]
    g = 1 - np.tanh(x @ params["w"] + params["b"]) ** 2
    np.testing.assert_allclose(statistics["['b']"].main.G[0], (g**2).sum(0), rtol=1e-12)
    g = g + 2 * np.asarray(x @ params["w"])
    np.testing.assert_allclose(statistics["['w']"].main.G[0], g.T @ g, rtol=1e-12)


@pytest.mark.parametrize(
    "join",
    [
        lambda y, b, c: y - b,
        lambda y, b, c: b - y,
        lambda y, b, c: (c - y) + b,
        lambda y, b, c: b + (c - y),
        lambda y, b, c: (y - c) - b,
    ],
)
def test_a_bias_that_has_not_the_sign_of_its_product_is_apart(join):
    params = {"w": normal(4, 3), "b": normal(3, seed=1)}
    x, c = normal(5, 4, seed=2), normal(5, 3, seed=3)

    def loss(p, x):
        return jnp.sum(jnp.tanh(join(x @ p["w"], p["b"], c)))

    plan, statistics = check(loss, params, x)
    assert [layer.bias for layer in plan.layers] == [None, None]
    g = 1 - np.tanh(join(x @ params["w"], params["b"], c)) ** 2
    np.testing.assert_allclose(statistics["['b']"].main.G[0], (g**2).sum(0), rtol=1e-12)
    np.testing.assert_allclose(statistics["['w']"].main.A[0], x.T @ x, rtol=1e-12)


def test_a_bias_behind_what_is_subtracted_is_the_products():
    params = {"w": normal(4, 3), "b": normal(3, seed=1)}
    x, c = normal(5, 4, seed=2), normal(5, 3, seed=3)
    _, expected = check(lambda p: jnp.sum(jnp.tanh(x @ p["w"] + p["b"] + (-c))), params)
    plan, statistics = check(lambda p: jnp.sum(jnp.tanh((x @ p["w"] - c) + p["b"])), params)
    assert plan.layers[0].bias is not None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), statistics, expected)


def test_a_shift_that_is_subtracted_is_diagonal():
    params = {"mu": normal(4), "w": normal(4, 3, seed=1)}
    x = normal(5, 4, seed=2)

    def loss(p, x):
        return jnp.sum(jnp.sin((x - p["mu"]) @ p["w"]))

    _, statistics = check(loss, params, x)
    each = jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])["mu"]
    np.testing.assert_allclose(statistics["['mu']"].main.G[0], (each**2).sum(0), rtol=1e-12)


@jax.custom_vjp
def reversed_gradient(x):
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@jax.custom_jvp
def half_gradient(x):
    return x.T.T


half_gradient.defjvps(lambda t, _, x: t / 2)


@pytest.mark.parametrize("function", [reversed_gradient, half_gradient, jax.jit(reversed_gradient)])
def test_a_bias_behind_a_derivative_of_its_own_is_apart(function):
    params = {"w": normal(4, 3), "b": normal(3, seed=1)}
    x = normal(5, 4, seed=2)

    def loss(p, x):
        return jnp.sum(jnp.tanh(function(x @ p["w"]) + p["b"]))

    plan, statistics = check(loss, params, x)
    assert [layer.bias for layer in plan.layers] == [None, None]
    g = 1 - np.tanh(x @ params["w"] + params["b"]) ** 2
    np.testing.assert_allclose(statistics["['b']"].main.G[0], (g**2).sum(0), rtol=1e-12)
    factor = 0.25 if function is half_gradient else 1.0
    np.testing.assert_allclose(statistics["['w']"].main.G[0], factor * g.T @ g, rtol=1e-12)


def test_a_bias_of_two_layers_is_apart():
    params = {"w": normal(4, 3), "v": normal(4, 3, seed=3), "b": normal(3, seed=1)}

    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) + jnp.sin(x @ p["v"] + p["b"]))

    plan, _ = check(loss, params, normal(5, 4, seed=2))
    assert {layer.name: layer.bias for layer in plan.layers} == dict.fromkeys(
        ("['b']", "['v']", "['w']")
    )


def test_auxiliary_outputs_flags_and_keyword_arguments():
    params = {"w": normal(4, 3)}

    def loss(p, x, train, *, scale):
        logits = x @ p["w"]
        if train:
            logits = logits * scale
        return jnp.sum(jnp.sin(logits)), {"logits": logits, "train": jnp.asarray(train)}

    vag = value_and_grad(loss, has_aux=True)
    x = normal(5, 4, seed=1)
    (value, aux), _, _ = vag(params, x, True, scale=2.0)
    (expected, _), _ = jax.value_and_grad(loss, has_aux=True)(params, x, True, scale=2.0)
    np.testing.assert_allclose(value, expected)
    assert aux["logits"].shape == (5, 3)
    assert bool(aux["train"])


def test_capture_and_flags_of_the_loss_may_be_static_arguments_of_jit():
    w, x = normal(4, 3), normal(5, 4, seed=1)

    def loss(p, x, train):
        return jnp.sum(jnp.sin(x @ p)) if train else jnp.sum(x @ p)

    step = jax.jit(value_and_grad(loss), static_argnames=("capture", "train"))
    for train in (True, False):  # by position, as jax.jit finds with the signature
        value, grads, statistics = step(w, x, train, capture=True)
        plain, same, none = step(w, x, train, capture=False)
        assert none is None
        assert float(statistics["params"].main.rows[0]) == 5
        expected = jax.value_and_grad(loss)(w, x, train)
        np.testing.assert_allclose(value, expected[0], rtol=1e-12)
        np.testing.assert_allclose(plain, expected[0], rtol=1e-12)
        for found in (grads, same):
            np.testing.assert_allclose(found, expected[1], rtol=1e-12)


def test_a_plan_needs_no_data():
    vag = value_and_grad(lambda p, x: jnp.sum(x @ p))
    shape = jax.ShapeDtypeStruct
    plan = vag.plan(shape((4, 3), jnp.float32), shape((5, 4), jnp.float32))
    assert "kfac" in str(plan)
    assert plan.layers[0].sizes == (4, 3)


def test_large_sides_are_diagonal():
    x, w = normal(5, 7), normal(7, 3, seed=1)
    vag = value_and_grad(lambda p, x: jnp.sum(jnp.tanh(x @ p)), max_factor_size=6)
    _, _, statistics = jax.jit(vag)(w, x)
    np.testing.assert_allclose(statistics["params"].main.A[0], (x**2).sum(0), rtol=1e-12)
    assert "diag 7" in str(vag.plan(w, x))


def test_half_precision_activations_give_float32_statistics():
    params = {"w": normal(4, 3).astype(jnp.float32)}

    def loss(p, x):
        return jnp.sum((x @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    vag = value_and_grad(loss)
    _, grads, statistics = jax.jit(vag)(params, normal(5, 4, seed=1).astype(jnp.bfloat16))
    assert statistics["['w']"].main.A.dtype == jnp.float32
    assert grads["['w']".strip("[]'")].dtype == jnp.float32


def test_averaging_statistics_over_micro_batches_is_the_whole_batch():
    w, x = normal(4, 3), normal(6, 4, seed=1)
    vag = jax.jit(value_and_grad(lambda p, x: jnp.mean(jnp.sum(jnp.tanh(x @ p) ** 2, 1))))
    _, grads, whole = vag(w, x)
    parts = [vag(w, part) for part in (x[:3], x[3:])]
    mean = jax.tree.map(lambda *xs: sum(xs) / 2, *[(g, s) for _, g, s in parts])
    np.testing.assert_allclose(mean[0], grads, rtol=1e-12)
    one, two = whole["params"].main, mean[1]["params"].main
    np.testing.assert_allclose(two.A / two.rows[0], one.A / one.rows[0], rtol=1e-12)
    np.testing.assert_allclose(two.G * two.rows[0], one.G * one.rows[0], rtol=1e-12)


def test_a_program_inside_jit_with_constants():
    constant = np.arange(3.0)
    w, x = normal(4, 3), normal(5, 4, seed=1)
    plan, statistics = check(jax.jit(lambda p, x: jnp.sum(jnp.sin(x @ p + constant))), w, x)
    np.testing.assert_allclose(statistics["params"].main.A[0], x.T @ x, rtol=1e-12)
    assert plan.routing["params"].treatment == "kfac"


def test_complex_products_are_not_covered():
    params = {"w": normal(4, 3), "v": normal(4, 3, seed=1)}

    def loss(p, x):
        return jnp.sum(jnp.abs(jnp.fft.fft(x) @ p["w"]) ** 2) + jnp.sum(jnp.sin(x @ p["v"]))

    plan, _ = check(loss, params, normal(5, 4, seed=2))
    assert plan.routing["['w']"].treatment == "plain"
    assert plan.routing["['v']"].treatment == "kfac"


def test_the_loss_has_as_many_terms_as_the_last_product_has_rows_covered_or_not():
    params = {"k": normal(3, 1, 2), "v": normal(2, 3, seed=1)}

    def loss(p, x, penalty):
        y = lax.conv_general_dilated(
            x, p["k"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        ).mean(1)
        return jnp.sin(jnp.mean(jnp.sin(y @ p["v"])) + penalty * jnp.sum(p["v"] ** 2))

    x = normal(5, 7, 1, seed=2)
    vag = value_and_grad(loss)
    covered, penalised = vag.plan(params, x, 0.0 * jnp.ones(())), vag.plan(params, x, jnp.ones(()))
    assert [r.treatment for r in penalised.routing] == ["kfac", "plain"]
    for plan in (covered, penalised):
        (last,) = plan.last
        rows = {"['k']": 35, "['v']": 5}[last.layer]
        assert rows * last.terms_per_row == pytest.approx(5)


def test_errors():
    with pytest.raises(TypeError, match="loss_fn must be callable"):
        value_and_grad(3)
    with pytest.raises(ValueError, match="max_factor_size must be >= 1"):
        value_and_grad(lambda p: p, max_factor_size=0)
    with pytest.raises(TypeError, match="scalar loss"):
        value_and_grad(lambda p, x: x @ p)(normal(4, 3), normal(5, 4))
    with pytest.raises(TypeError, match="loss, aux"):
        value_and_grad(lambda p, x: jnp.sum(x @ p), has_aux=True)(normal(4, 3), normal(5, 4))
    with pytest.raises(ValueError, match="would precondition nothing"):
        value_and_grad(lambda p: jnp.sum(p**2)).plan(normal(4, 3))
    with pytest.raises(TypeError, match=r"bases must be what suite\.jax\.eigenbases returns, got tuple"):
        value_and_grad(lambda p, x: jnp.sum(x @ p))(normal(4, 3), normal(5, 4), bases=(1, 2))


def test_the_plan_says_how_many_terms_and_by_which_layer():
    params = {"v": normal(4, 3), "w": normal(3, 4)}

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2)

    x = normal(5, 2, 3, seed=1)
    vag = value_and_grad(loss)
    plan = vag.plan(params, x)
    assert str(plan).endswith("terms of the loss: 10, by the layer that runs last, ['v']")
    assert float(vag(params, x)[2].terms) == 10


def laplacian_loss(p, points, weight=1.0):
    def u(z):
        return (jnp.tanh(jnp.tanh(z @ p["a"]) @ p["w"]) @ p["v"])[0]

    return jnp.mean(weight * jax.vmap(lambda z: jnp.trace(jax.hessian(u)(z)) + 1)(points) ** 2)


@pytest.mark.parametrize(
    ("loss", "arguments"),
    [
        (lambda p: laplacian_loss(p, grid()), ()),
        (lambda p, weight: weight * laplacian_loss(p, grid()), (1.0,)),
        (lambda p, weight: laplacian_loss(p, grid(), weight), (1.0,)),
        (lambda p, step: laplacian_loss(p, grid()), (3,)),
        (lambda p, weights: weights[0] * laplacian_loss(p, grid()), (np.ones(2),)),
        (lambda p, end: laplacian_loss(p, end * grid()), (1.0,)),
    ],
    ids=["no argument", "a weight", "a weight of each", "not used", "weights", "of an interval"],
)
def test_points_that_a_loss_makes_are_its_terms_whatever_it_is_given(loss, arguments):
    params = {"a": normal(2, 6), "w": normal(6, 4, seed=1), "v": normal(4, 1, seed=2)}
    expected = value_and_grad(laplacian_loss)(params, grid())[2]
    sums = value_and_grad(loss)(params, *(jnp.asarray(x) for x in arguments))[2]
    assert float(sums.terms) == float(expected.terms) == 16
    for own, other in zip(jax.tree.leaves(sums), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-12)


def grid():
    side = jnp.linspace(0, 1, 4)
    return jnp.stack(jnp.meshgrid(side, side), -1).reshape(-1, 2)


def counted_loss(p, x, *, counted):
    """Of tokens, some of which do not count."""
    own = jnp.sum(jnp.sin(jnp.tanh(x @ p["w"]) @ p["v"]), -1)
    return jnp.sum(own * counted) / jnp.sum(counted)


def test_terms_that_are_given_make_G_the_mean_over_these():
    params, x = {"v": normal(4, 2), "w": normal(3, 4, seed=1)}, normal(5, 7, 3, seed=2)
    vag = value_and_grad(counted_loss, terms=lambda x, counted: counted.sum())
    assert str(vag.plan(params, x, counted=jnp.ones((5, 7)))).endswith("those that `terms` gives")
    compiled = jax.jit(vag)
    for count in (3, 20):
        counted = jnp.arange(35).reshape(5, 7) < count
        # One gradient for each token that counts, by the outputs of the last layer.
        outputs = jnp.tanh(x @ params["w"]) @ params["v"]
        gradients = np.cos(np.asarray(outputs))[np.asarray(counted)]
        _, grads, statistics = compiled(params, x, counted=counted)
        G = statistics["['v']"].main.G[0] * statistics.terms
        np.testing.assert_allclose(G, gradients.T @ gradients / count, rtol=1e-12)
        expected = jax.grad(counted_loss)(params, x, counted=counted)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), grads, expected)
    assert compiled._cache_size() == 1
    due = jax.jit(lambda due: vag(params, x, counted=counted, capture=due)[2].terms)
    assert [float(due(True)), float(due(False))] == [20, 0]
    assert float(value_and_grad(counted_loss, terms=12)(params, x, counted=counted)[2].terms) == 12


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        (0, ValueError, "terms must be > 0, got 0"),
        ("all", TypeError, "terms must be a number, got 'all'"),
        (lambda x: -x.shape[0], ValueError, "terms must be >= 0, got -5"),
        (lambda x: x.shape, TypeError, r"terms must be a number, got \(5, 4\)"),
        (lambda x: x[:, 0], ValueError, r"terms must be one number, got an array of shape \(5,\)"),
        (lambda x: x.sum() > 0, TypeError, "terms must be a number, got one of bool"),
        (lambda x: jnp.asarray(jnp.nan), ValueError, "terms must be >= 0, got nan"),
        (lambda x: None, TypeError, "terms must be a number, got None"),
    ],
)
def test_terms_that_are_no_number_of_terms_are_errors(terms, error, message):
    with pytest.raises(error, match=message):
        value_and_grad(lambda p, x: jnp.mean(x @ p), terms=terms)(normal(4, 3), normal(5, 4))


@pytest.mark.parametrize("loss", [lambda p, capture=False: p.sum(), lambda p, bases: (p * bases).sum()])
def test_an_argument_that_is_named_as_one_of_ours_is_an_error(loss):
    with pytest.raises(ValueError, match="must have no argument named as one of value_and_grad's, got"):
        value_and_grad(loss)


def test_params_that_are_no_arrays_are_an_error_that_names_them():
    params = {"activation": jnp.tanh, "w": normal(3, 4)}
    with pytest.raises(TypeError, match=r"params must be arrays, got a .* at \['activation'\]"):
        value_and_grad(lambda p, x: jnp.sum(p["activation"](x @ p["w"]))).plan(params, normal(2, 3))


def test_a_mask_for_all_examples_does_not_make_them_one():
    params = {"bias": normal(1, 2, 4, 4), "w": normal(3, 6, seed=1)}

    def loss(p, x, mask):
        q = (x @ p["w"]).reshape(len(x), 4, 2, 3)
        logits = jnp.einsum("nqhd,nkhd->nhqk", q, q) + (p["bias"] + mask)
        return jnp.mean(jnp.sin(jax.nn.softmax(logits)) ** 2)

    x = normal(5, 4, 3, seed=2)
    found = [
        value_and_grad(loss)(params, x, mask)[2] for mask in (jnp.zeros((4, 4)), jnp.zeros((1, 1, 4, 4)))
    ]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_the_plan_says_what_is_computed_once_for_all_examples():
    params = {"c": normal(1, 4), "g": normal(4, 18, seed=1), "h": normal(3, 2, seed=2), "s": normal(3)}

    def loss(p, x):
        made = (jnp.tanh(jnp.ones((1, 1)) @ p["c"]) @ p["g"]).reshape(6, 3)
        return jnp.mean((jnp.tanh(x @ made) * p["s"]) @ p["h"])

    def said(vag, *arguments):
        return {r.parameter for r in vag.plan(params, *arguments).routing if "once for all" in r.reason}

    x = normal(8, 6, seed=3)
    assert said(value_and_grad(loss), x) == {"['c']", "['g']"}
    assert said(value_and_grad(lambda p: loss(p, x))) == {"['c']", "['g']"}  # data that is closed over
    # Where nothing is data, no product is told from another.
    assert not said(value_and_grad(lambda p: loss(p, jnp.linspace(0, 1, 48).reshape(8, 6))))


@pytest.mark.parametrize("steps", [jnp.sign, jnp.round, jnp.floor, jnp.ceil, jnp.trunc])
def test_what_only_passes_through_a_constant_function_is_not_used(steps):
    """Its layer leads no other, tells nothing of the number of terms, and is not in the statistics."""
    params, x = {"gate": normal(4, 4), "value": normal(4, 4, seed=1)}, normal(8, 4, seed=2)

    def loss(p, x):
        return jnp.mean(jnp.sum((jnp.tanh(x @ p["value"]) * steps((x + 1.0) @ p["gate"])) ** 2, 1))

    plan, statistics = check(loss, params, x)
    assert plan.routing["['gate']"].treatment == "plain"
    assert "shares" not in plan.routing["['value']"].reason
    assert statistics.terms == 8
    (value,) = statistics.layers.values()
    np.testing.assert_allclose(value.main.A[0], x.T @ x, rtol=1e-12)


@pytest.mark.filterwarnings("error")
def test_verify_takes_the_size_of_a_complex_gradient():
    params = {"w": jnp.full((3, 3), 1e3j), "l": jnp.ones((4, 3))}

    def loss(p, x):
        return jnp.mean(jnp.abs((x @ p["l"]) @ p["w"]))

    assert verify(loss, params, jnp.ones((2, 4)), rtol=1e-10)["['l']"] < 1e-10


def test_verify_says_that_gradients_are_not_finite():
    params = {"w": normal(3, 3), "v": normal(3, 2, seed=1)}
    x = jnp.ones((2, 3)).at[0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match=r"must be finite to be compared, those of \['w'\] are not"):
        verify(lambda p, x: jnp.mean(x @ p["w"]) + jnp.sum(p["v"]), params, x)


@pytest.mark.parametrize("capture", ["plan", True, False, "traced"])
@pytest.mark.parametrize("aux", ["array", "none"])
def test_no_tracer_is_kept(aux, capture):
    params, x = {"w": normal(3, 2)}, normal(4, 3, seed=1)

    def loss(p, x):
        outputs = x @ p["w"]
        return jnp.mean(outputs**2), (outputs if aux == "array" else None, "label")

    vag = value_and_grad(loss, has_aux=True)
    with jax.check_tracer_leaks():
        if capture == "plan":
            vag.plan(params, x)
            return
        if capture == "traced":
            (value, found), *_ = jax.jit(lambda p, x, c: _arrays(vag(p, x, capture=c)))(params, x, True)
        else:
            (value, found), *_ = jax.jit(lambda p, x: _arrays(vag(p, x, capture=capture)))(params, x)
    outputs = x @ params["w"]
    np.testing.assert_allclose(value, jnp.mean(outputs**2), rtol=1e-12)
    if aux == "array":
        np.testing.assert_allclose(found[0], outputs, rtol=1e-12)


def _arrays(returned):
    """Without the label, which jit cannot return."""
    (value, (outputs, label)), grads, statistics = returned
    assert label == "label"
    return (value, (outputs,)), grads, statistics


def watched(look):
    """(loss, parameters, data): `look` is given values of all kinds, and returns nothing."""

    def loss(p, x):
        look(*p.values(), p["w"].T, x, jnp.sum(p["v"] ** 2))
        found = p["positions"][jnp.arange(3)][None]
        normed = p["w"] / jnp.linalg.norm(p["w"])
        masked = jnp.where(jnp.triu(jnp.ones((4, 3), bool)), p["v"], 0.0)
        look(found, normed, masked, 2 * p["b"], p["v"] @ jnp.ones((3, 4)))
        h = jnp.tanh((p["table"][x] + found) @ normed + p["b"][None, None])

        @jax.checkpoint
        def step(h, w):
            look(w, h @ w)
            return jnp.tanh(h @ w), None

        h, _ = lax.scan(step, h, p["stack"])
        scaled = h * p["scale"][None, None]
        look(scaled, p["scale"] * 2)

        def head(row):
            look(row, p["v"])
            return row @ masked

        products = jax.vmap(head)(scaled + p["shift"][None, None])
        return lax.cond(jnp.sum(x) > 0, lambda y: (look(y), jnp.mean(y**2))[1], jnp.sum, products)

    shapes = {"table": (7, 4), "positions": (5, 4), "w": (4, 4), "b": (4,), "stack": (2, 4, 4)}
    shapes |= {"scale": (4,), "shift": (4,), "v": (4, 3)}
    params = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return loss, params, jnp.arange(12).reshape(4, 3) % 7


def test_what_is_printed_is_no_use():
    seen = []
    loss, params, x = watched(lambda *values: jax.debug.callback(lambda *v: seen.append(v), *values))
    silent, _, _ = watched(lambda *values: None)
    plan, statistics = check(loss, params, x)
    jax.effects_barrier()
    assert seen
    expected, others = check(silent, params, x)
    assert str(plan) == str(expected)
    assert all(r.treatment == "kfac" for r in plan.routing), str(plan)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), statistics, others)


def test_a_norm_of_a_weight_may_be_printed_in_order():
    params, x = {"w": normal(4, 3)}, normal(5, 4, seed=1)

    def loss(p, x):
        jax.debug.callback(lambda norm: None, jnp.linalg.norm(p["w"]), ordered=True)
        return jnp.mean((x @ p["w"]) ** 2)

    _, statistics = check(loss, params, x)
    np.testing.assert_allclose(statistics["['w']"].main.A[0], x.T @ x, rtol=1e-12)
