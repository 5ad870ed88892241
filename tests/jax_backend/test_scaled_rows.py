"""Weights whose rows or columns are multiplied with something before their product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_fishers import assert_exact, check, dense_block, exact_blocks, normal
from suite.jax import eigenbases, kfac, value_and_grad

S = lambda y: jnp.sum(jnp.sin(y))  # noqa: E731
GAINS = jnp.asarray([0.5, 2.0, -1.5])

BY_OUTPUT = {
    "a leaf": lambda p: p["w"] * p["g"],
    "a leaf before": lambda p: p["g"] * p["w"],
    "its exponential": lambda p: jnp.exp(p["g"]) * p["w"],
    "divided": lambda p: p["w"] / (2 + p["g"] ** 2),
    "constants": lambda p: p["w"] * GAINS,
    "constants and a leaf": lambda p: (p["w"] * GAINS) / (2 + jnp.sin(p["g"])),
    "turned": lambda p: (p["w"].T * p["g"][:, None]).T,
    "reshaped": lambda p: (p["w"].reshape(2, 2, 3) * p["g"]).reshape(4, 3),
    "a number, too": lambda p: 0.3 * (p["w"] * p["g"]) * 2.0,
    "its norm, of which there is no derivative": lambda p: (
        p["w"] / lax.stop_gradient(jnp.linalg.norm(p["w"], axis=0, keepdims=True))
    ),
    "rounded": lambda p: (lambda w: w + lax.stop_gradient(jnp.round(w) - w))(p["w"] * GAINS),
    "beside what is known": lambda p: jnp.eye(4, 3) - p["w"] * p["g"],
    "jit": lambda p: jax.jit(jnp.multiply)(p["w"], jnp.broadcast_to(p["g"], (4, 3))),
    "remat": lambda p: jax.checkpoint(jnp.multiply)(p["w"], jnp.broadcast_to(p["g"], (4, 3))),
}


def parameters(**more):
    return {"g": normal(3, seed=1), "w": normal(4, 3), **more}


@pytest.mark.parametrize("compute", ["plain", "jit", "remat", "einsum"])
@pytest.mark.parametrize("name", BY_OUTPUT)
def test_rows_of_a_weight_are_exact_for_one_example(name, compute):
    kernel = BY_OUTPUT[name]
    run = {"jit": jax.jit, "remat": jax.checkpoint}.get(compute, lambda f: f)
    product = (lambda x, w: jnp.einsum("ni,io->no", x, w)) if compute == "einsum" else jnp.matmul

    def loss(p, x):
        return jnp.sum(jnp.sin(run(lambda p, x: product(x, kernel(p)))(p, x)))

    plan = assert_exact(loss, parameters(), normal(1, 4, seed=2), uncovered=["['g']"])
    assert plan.routing["['w']"].reason == "weight of a dense layer"


def test_a_bias_beside_is_a_layer_by_itself():
    x = normal(5, 4, seed=2)

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ (p["w"] * p["g"]) + p["b"]))

    params = parameters(b=normal(3, seed=3))
    plan, statistics = check(loss, params, x, uncovered=["['g']"])
    g = np.cos(x @ (params["w"] * params["g"]) + params["b"])
    own = statistics["['w']"].main
    np.testing.assert_allclose(own.A[0], x.T @ x, rtol=1e-12)
    np.testing.assert_allclose(own.G[0], (g * params["g"]).T @ (g * params["g"]), rtol=1e-12)
    assert plan.routing["['b']"].factors == "diag 1, diag 3"
    assert plan.routing["['g']"].reason == "used by `mul`, which scales a weight"


def test_columns_and_both():
    gains = jnp.asarray([0.5, 2.0, -1.5, 3.0])[:, None]
    x = normal(5, 4, seed=2)
    for kernel in (lambda p: p["w"] * gains, lambda p: p["w"] * gains * p["g"]):

        def loss(p, x, kernel=kernel):
            return jnp.sum(jnp.sin(x @ kernel(p)))

        names = ["['g']"]
        assert_exact(loss, parameters(), x[:1], uncovered=names)
        _, statistics = check(loss, parameters(), x, uncovered=names)
        rows = x * gains[:, 0]
        np.testing.assert_allclose(statistics["['w']"].main.A[0], rows.T @ rows, rtol=1e-12)


def test_uses_as_the_transpose():
    """As in derivatives of a network by its inputs."""

    def loss(p, x):
        f = lambda x: jnp.sum(jnp.sin(jnp.sin(x @ (p["w"] * p["g"])) @ p["v"]))  # noqa: E731
        return jnp.sum(jax.grad(f)(x) ** 2)

    params = parameters(v=normal(3, 2))
    check(loss, params, normal(5, 4, seed=2), uncovered=["['g']"])

    def transposed(p, x):
        return jnp.sum(jnp.sin(x @ (p["w"] * p["g"]).T))

    assert_exact(transposed, parameters(), normal(1, 3, seed=2), uncovered=["['g']"])


@pytest.mark.parametrize("layout", ["HWIO", "OIHW"])
@pytest.mark.parametrize("side", ["O", "I"])
def test_kernels_of_convolutions(layout, side):
    sizes = {"H": 3, "W": 3, "I": 2, "O": 3}
    shape = [sizes[axis] for axis in layout]
    gains = normal(sizes[side], seed=4).reshape([sizes[side] if axis == side else 1 for axis in layout])

    def loss(p, x):
        numbers = ("NHWC", layout, "NHWC")
        y = lax.conv_general_dilated(x, p["k"] * gains, (1, 1), "VALID", dimension_numbers=numbers)
        return jnp.sum(jnp.sin(y))

    assert_exact(loss, {"k": normal(*shape)}, normal(1, 3, 3, 2))
    check(loss, {"k": normal(*shape)}, normal(4, 5, 5, 2))


def test_stacks_that_a_scan_takes_apart():
    params = {"w": normal(3, 4, 4), "g": normal(3, 4, seed=1)}

    def loss(p, x):
        return jnp.sum(lax.scan(lambda h, p: (jnp.sin(h @ (p["w"] * p["g"])), None), x, p)[0])

    assert_exact(loss, params, normal(1, 4), uncovered=["['g']"])


CHANGED = {  # stacks (3, 4, 4), before a loop takes them apart
    "columns": lambda p: p["w"] * p["g"][:, None],
    "rows": lambda p: p["w"] * p["g"][:, :, None],
    "a number each": lambda p: p["w"] * jnp.sum(p["g"], 1)[:, None, None],
    "divided": lambda p: p["w"] / (2 + jnp.sin(p["g"][:, None])),
    "one for all": lambda p: p["w"] * jnp.sum(p["g"], 0)[None, None],
    "norms": lambda p: p["w"] / jnp.linalg.norm(p["w"], axis=1, keepdims=True),
    "magnitudes": lambda p: p["g"][:, None] * p["w"] / jnp.linalg.norm(p["w"], axis=1, keepdims=True),
}
LOOPS = {
    "scan": lambda w, x: lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, w)[0],
    "reverse": lambda w, x: lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, w, reverse=True)[0],
    "remat": lambda w, x: lax.scan(jax.checkpoint(lambda h, w: (jnp.sin(h @ w), None)), x, w)[0],
    "fori_loop": lambda w, x: lax.fori_loop(0, 3, lambda i, h: jnp.sin(h @ w[i]), x),
    "jit": lambda w, x: jax.jit(lambda w: LOOPS["scan"](w, x))(w),
    "two loops": lambda w, x: LOOPS["fori_loop"](w, LOOPS["scan"](w, x)),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", CHANGED)
def test_stacks_that_are_changed_before_a_loop_takes_them_apart(name, loop):
    """As if each step changed its own part."""
    params, run = {"w": normal(3, 4, 4), "g": normal(3, 4, seed=1), "v": normal(4, 2)}, LOOPS[loop]

    def loss(p, x):
        return jnp.sum(jnp.sin(run(CHANGED[name](p), x) @ p["v"]))

    def inside(p, x):
        def layer(h, own):
            one = jax.tree.map(lambda leaf: leaf[None], own)
            one["g"] = p["g"] if name == "one for all" else one["g"]
            return jnp.sin(h @ CHANGED[name](one)[0]), None

        stacks = {"w": p["w"], "g": p["g"]}
        h, _ = lax.scan(layer, x, stacks, reverse=loop == "reverse")
        if loop == "two loops":
            h, _ = lax.scan(layer, h, stacks)
        return jnp.sum(jnp.sin(h @ p["v"]))

    x = normal(5, 4)
    plan, found = check(loss, params, x, uncovered=["['g']"])
    assert next(layer for layer in plan.layers if layer.name == "['w']").groups == 3
    *_, expected = value_and_grad(inside)(params, x)
    own, others = (stats["['w']"].main for stats in (found, expected.layers))
    np.testing.assert_allclose(own.A, others.A, rtol=1e-9)
    np.testing.assert_allclose(own.G, others.G, rtol=1e-9, atol=1e-12)
    if name not in ("norms", "magnitudes") and loop != "two loops":  # whose uses have but one G
        assert_exact(loss, params, normal(1, 4), uncovered=["['g']"])


def test_experts_with_one_number_each():
    params = {"w": normal(2, 4, 3), "g": normal(2, seed=1)}

    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.einsum("eni,eio->eno", x, p["w"] * p["g"][:, None, None])))

    assert_exact(loss, params, normal(2, 1, 4), uncovered=["['g']"])


@pytest.mark.parametrize(
    "kernel",
    [
        lambda p, x: p["w"] * jnp.outer(jnp.arange(1.0, 5.0), p["g"]),
        lambda p, x: jax.nn.softmax(p["w"], 0),
        lambda p, x: p["w"] * jnp.mean(x, 0)[:, None],
        lambda p, x: jnp.concatenate([p["w"] * p["g"], p["w"]], 1)[:, :3],
    ],
)
def test_what_is_neither_by_row_nor_by_column_or_the_weights_own_is_plain(kernel):
    def loss(p, x):
        return jnp.sum(jnp.sin(x @ kernel(p, x))) + jnp.sum(jnp.sin(x @ p["v"])) + jnp.sum(p["g"] ** 2)

    check(loss, parameters(v=normal(4, 2)), normal(5, 4), uncovered=["['g']", "['w']"])


def _spectral(w, hold):
    """By one step of power iteration, as flax and haiku have it."""
    u = jnp.ones(w.shape[-1])
    v = lax.stop_gradient(w @ u / jnp.linalg.norm(w @ u))
    u = lax.stop_gradient(v @ w / jnp.linalg.norm(v @ w))
    return w / hold(v @ w @ u)


def _standardized(w, hold):
    return (w - hold(jnp.mean(w, 0))) / hold(jnp.std(w, 0))


# What a weight is changed by that is made of it, handed through `hold`.
OWN = {
    "norms of outputs": lambda w, hold: GAINS * w / hold(jnp.linalg.norm(w, axis=0)),
    "norms of inputs": lambda w, hold: w / hold(jnp.linalg.norm(w, axis=1, keepdims=True)),
    "rsqrt": lambda w, hold: w * hold(lax.rsqrt(jnp.sum(w * w, 0, keepdims=True) + 1e-6)),
    "a number over the norm": lambda w, hold: w * hold(2.0 / jnp.linalg.norm(w, axis=0)),
    "norm of all": lambda w, hold: 2.0 * w / hold(jnp.linalg.norm(w)),
    "largest entry": lambda w, hold: w / hold(jnp.max(jnp.abs(w))),
    "largest norm": lambda w, hold: w * hold(jnp.minimum(1.0, 1.5 / jnp.linalg.norm(w, axis=0))),
    "singular value": lambda w, hold: w / hold(jnp.linalg.norm(w, 2)),
    "power iteration": _spectral,
    "standardized": _standardized,
    "centered": lambda w, hold: w - hold(jnp.mean(w, 0, keepdims=True)),
    "jit": lambda w, hold: w / jax.jit(lambda w: hold(jnp.linalg.norm(w, axis=0)))(w),
    "remat": lambda w, hold: jax.checkpoint(lambda w: w / hold(jnp.linalg.norm(w, axis=0)))(w),
}


@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_a_norm_of_a_weight_that_it_is_divided_by_is_held(name, derivative):
    """Exact for one example but for what the gradient has through the norm, as in PyTorch."""
    x = normal(1, 4, seed=2)

    def loss(p, x, hold=lambda x: x):
        f = lambda x: jnp.sum(jnp.sin(x @ OWN[name](p["w"], hold)))  # noqa: E731
        return jnp.sum(jax.jvp(f, (x,), (jnp.sin(x),))[1] ** 2) if derivative else f(x)

    params = {"w": normal(4, 3)}
    plan, statistics = check(loss, params, x)
    assert "norms (or what else of it changes it) as constants" in plan.routing["['w']"].reason
    held = lambda p, x: loss(p, x, lax.stop_gradient)  # noqa: E731
    _, expected = check(held, params, x)
    for side in ("A", "G"):
        found, other = (getattr(s["['w']"].main, side) for s in (statistics, expected))
        np.testing.assert_allclose(found, other, rtol=1e-12, atol=1e-14)
    if not derivative:
        found = dense_block(plan, statistics)[0]
        block = exact_blocks(plan, [lambda p: held(p, x)], params)[0]
        np.testing.assert_allclose(found, block, rtol=1e-9, atol=1e-11 * np.abs(block).max())


def test_norms_of_kernels_and_of_what_a_scan_takes_apart():
    params = {"k": normal(3, 3, 2, 2), "s": normal(3, 8, 8)}

    def loss(p, x):
        k = p["k"] / jnp.sqrt(jnp.sum(p["k"] ** 2, (0, 1, 2)) + 1e-4)
        h = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        norms = jnp.linalg.norm(p["s"], axis=1)

        def step(h, layer):
            w, norm = layer
            return jnp.sin(h @ (w / norm) + jnp.cos(h) @ (w / norm)), None

        h = lax.scan(step, h.reshape(len(h), 8), (p["s"], norms))[0]
        return jnp.sum(jnp.sin(h))

    check(loss, params, normal(5, 2, 2, 2))


def test_a_norm_that_is_logged_is_held_too():
    def loss(p, x):
        norm = jnp.linalg.norm(p["w"], axis=0)
        return jnp.sum(jnp.sin(x @ (p["w"] / norm))), norm

    plan = value_and_grad(loss, has_aux=True).plan({"w": normal(4, 3)}, normal(5, 4))
    assert plan.routing["['w']"].treatment == "kfac"


@pytest.mark.parametrize("logged", [False, True])
def test_products_in_a_spectral_norm_are_no_uses(logged):
    """As flax has it: guarded against zero, and the value of power iteration among the outputs."""

    def sigma(w):
        v = lax.stop_gradient(w @ jnp.ones(3) / jnp.linalg.norm(w @ jnp.ones(3)))
        return v @ w @ lax.stop_gradient(v @ w / jnp.linalg.norm(v @ w))

    def loss(p, x, hold=lambda x: x, weight=0.0):
        s = sigma(p["w"])
        y = x @ (p["w"] / hold(jnp.where(s != 0, s, 1.0)))
        value = jnp.mean(jnp.sum(jnp.sin(y @ p["v"]), 1)) + (weight * s**2 if weight else 0.0)
        return (value, s) if logged else (value, None)

    params, x = {"v": normal(3, 2), "w": normal(4, 3)}, normal(8, 4)
    found, held = (
        value_and_grad(lambda p, x, h=h: loss(p, x, h), has_aux=True)(params, x)[2]["['w']"].main
        for h in (lambda x: x, lax.stop_gradient)
    )
    assert float(found.rows[0]) == float(held.rows[0]) == 8
    np.testing.assert_allclose(found.G, held.G, rtol=1e-12)
    penalized = value_and_grad(lambda p, x: loss(p, x, weight=0.01), has_aux=True)
    assert penalized.plan(params, x).penalized == ("['w']",)
    np.testing.assert_allclose(penalized(params, x)[2]["['w']"].main.G, held.G, rtol=1e-12)


@pytest.mark.parametrize(
    "number",
    [
        lambda p, x: jnp.mean(jnp.tanh(x @ p["w"])),
        lambda p, x: 1 / jnp.std(x @ p["w"], 0),
        lambda p, x: jnp.mean(jax.nn.softplus(jnp.tanh(x @ p["w"]) @ p["u"])),
    ],
)
def test_numbers_that_are_made_of_examples_too_leave_a_weight_plain(number):
    def loss(p, x):
        return jnp.sum(jnp.sin(x @ (p["w"] * number(p, x)))) + jnp.sum(jnp.sin(x @ p["v"]))

    params = {"u": normal(3, 3, seed=3), "v": normal(4, 3, seed=1), "w": normal(4, 3)}
    plan = value_and_grad(loss).plan(params, normal(7, 4))
    assert plan.routing["['w']"].treatment == "plain", str(plan)


def test_what_a_norm_is_used_for_besides_keeps_a_weight_plain():
    kernel = lambda w: w / jnp.linalg.norm(w, axis=0)  # noqa: E731
    besides = {
        "a penalty": lambda w, v, x: jnp.sum(x @ kernel(w)) + jnp.sum(jnp.linalg.norm(w, axis=0) ** 4),
        "another weight": lambda w, v, x: jnp.sum(x @ kernel(w) + x @ (v / jnp.linalg.norm(w, axis=0))),
        "activations": lambda w, v, x: jnp.sum(x @ kernel(w) * jnp.linalg.norm(w, axis=0)),
        "its own shift": lambda w, v, x: jnp.sum(x @ kernel(w) + jnp.sum(kernel(w))),
    }
    for use in besides.values():

        def loss(p, x, use=use):
            return jnp.sin(use(p["w"], p["v"], x)) + jnp.sum(jnp.sin(x @ p["v"] + x @ p["u"]))

        params = {"u": normal(4, 3, seed=3), "v": normal(4, 3, seed=1), "w": normal(4, 3)}
        plan = value_and_grad(loss).plan(params, normal(5, 4))
        assert plan.routing["['w']"].treatment == "plain", str(plan)
        assert plan.routing["['u']"].treatment == "kfac"


def test_tables_and_positions_are_plain():
    def loss(p, x, tokens):
        y = x + p["positions"] * p["g"] + (p["table"] * p["g"])[tokens]
        return jnp.sum(jnp.sin(y @ p["v"]))

    params = {"positions": normal(4, 3), "g": normal(3), "table": normal(7, 3), "v": normal(3, 2)}
    tokens = jnp.asarray(np.random.default_rng(0).integers(7, size=(5, 4)))
    names = ["['g']", "['positions']", "['table']"]
    check(loss, params, normal(5, 4, 3), tokens, uncovered=names)


@pytest.mark.parametrize("turned", [False, True])
def test_second_moments_in_eigenbases_are_of_scaled_rows(turned):
    w, x = normal(4, 3), normal(5, 3 if turned else 4, seed=2)
    by_row, by_column = GAINS, jnp.asarray([0.5, 2.0, -1.5, 3.0])

    def loss(p, x, eps=0.0):
        kernel = p * by_row * by_column[:, None]
        return jnp.sum(jnp.sin(x @ (kernel.T if turned else kernel) + eps))

    vag = value_and_grad(loss)
    plan = vag.plan(w, x)
    tx = kfac(plan, 0.1, compute_method="ekfac", inv_update_steps=5)
    sides = plan.layers[0].sizes
    turns = [np.linalg.qr(normal(n, n, seed=n))[0][None] for n in sides]
    bases = {name: tuple(map(jnp.asarray, turns)) for name in eigenbases(tx.init(w), plan)}
    (own,) = (vag(w, x, bases=bases)[2][layer.name].main for layer in plan.layers)
    into, out = (by_row, by_column) if turned else (by_column, by_row)
    g = out * jax.grad(lambda eps: loss(w, x, eps))(jnp.zeros((5, sides[1])))
    expected = ((g @ turns[1][0]) ** 2).T @ ((into * x) @ turns[0][0]) ** 2
    np.testing.assert_allclose(own.products[0], expected, rtol=1e-9)


@pytest.mark.parametrize("traced", [False, True])
def test_a_step_of_scaled_rows_is_the_dense_one(traced):
    """With the capture outside and inside of the update."""
    params, x, damping = parameters(), normal(16, 4), 0.1

    def loss(p, x):
        return jnp.mean(jnp.sum(jnp.sin(x @ (p["w"] * lax.stop_gradient(p["g"]))), 1))

    vag = value_and_grad(loss)
    settings = {"momentum": 0.0, "damping": damping, "kl_clip": None, "compute_method": "eigen"}
    tx = kfac(vag.plan(params, x), 1.0, **settings)
    state = tx.init(params)

    def step(params, state, due):
        _, grads, statistics = vag(params, x, capture=due) if traced else vag(params, x)
        return tx.update(grads, state, params, statistics=statistics)[0]

    updates = jax.jit(step)(params, state, jnp.asarray(True))
    g = np.cos(x @ (params["w"] * params["g"])) * params["g"]
    matrix = np.kron(x.T @ x / 16, g.T @ g / 16) + damping * np.eye(12)
    expected = -np.linalg.solve(matrix, np.asarray(x.T @ g / 16).ravel())
    np.testing.assert_allclose(np.asarray(updates["w"]).ravel(), expected, rtol=1e-9)


def test_an_input_scaled_layer_shares_its_input_with_none():
    """Its A is of the input times something, and another's is not."""
    gains, x = jnp.asarray([0.5, 2.0, -1.5, 3.0])[:, None], normal(5, 4)

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ p["v"])) + jnp.sum(jnp.cos(x @ (p["w"] * gains)))

    plan, statistics = check(loss, {"v": normal(4, 2), "w": normal(4, 3)}, x)
    assert all(layer.input_of is None for layer in plan.layers)
    rows = x * gains[:, 0]
    np.testing.assert_allclose(statistics["['v']"].main.A[0], x.T @ x, rtol=1e-12)
    np.testing.assert_allclose(statistics["['w']"].main.A[0], rows.T @ rows, rtol=1e-12)


SCALES = jnp.asarray([1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: S(x * (p["s"][None] * SCALES[None]) + p["b"]),
        lambda p, x: S(x[:, None] * (p["t"] * jnp.broadcast_to(SCALES, (2, 3)))),
        lambda p, x: S(((p["t"] * SCALES[None, :, None][:, :, 0]) * p["s"] + p["b"]) @ p["w"] + x[0, 0]),
        lambda p, x: S(jnp.concatenate([p["s"][None], p["t"] * SCALES[:2, None]]) @ p["w"] + x[0, 0]),
    ],
)
def test_scales_of_activations_are_what_they_were(loss):
    """A scale or a shift times constants is no weight of a product, and codes are an input of one."""
    params = {"s": normal(3), "b": normal(3, seed=1), "t": normal(2, 3), "w": normal(3, 3)}
    plan = value_and_grad(loss).plan(params, normal(5, 3))
    assert "scales a weight" not in str(plan)
    assert plan.layers
