"""Weights of which a mask leaves entries out, against sums over rows and jax's own gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_fishers import check, normal
from suite.jax import kfac, probe, value_and_grad, verify

KEPT = np.tril(np.ones((4, 3)), 1)
ARRAY = jnp.asarray(KEPT)

MASKS = {
    "numpy": lambda w: w * KEPT,
    "array": lambda w: ARRAY * w,
    "booleans": lambda w: w * (KEPT > 0),
    "integers": lambda w: w * KEPT.astype(np.int32),
    "turned": lambda w: (w.T * KEPT.T).T,
    "where": lambda w: jnp.where(KEPT > 0, w, 0.0),
    "where not": lambda w: jnp.where(KEPT == 0, 0.0, w),
    "tril": lambda w: jnp.tril(w, 1),
    "times tril": lambda w: w * jnp.tril(jnp.ones((4, 3)), 1),
    "where one": lambda w: w * jnp.where(KEPT > 0, 1.0, 0.0),
    "less than one": lambda w: w * (1 - jnp.triu(jnp.ones((4, 3)), 2)),
    "two": lambda w: w * (KEPT * np.ones((4, 1))) * jnp.tril(jnp.ones((4, 3)), 1),
    "jit": jax.jit(lambda w: w * ARRAY),
    "remat": jax.checkpoint(lambda w: w * ARRAY),
}


@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_rows_and_outputs_of_a_masked_weight(name, simplified, constants_in_programs):
    constants_in_programs(simplified)
    masked, x = MASKS[name], normal(5, 4)
    params = {"w": normal(4, 3), "b": normal(3, seed=1)}

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ masked(p["w"]) + p["b"]))

    plan, statistics = check(loss, params, x)
    assert [(layer.name, layer.sizes) for layer in plan.layers] == [("['w']", (5, 3))]
    own = statistics["['w']"].main
    rows = np.concatenate([x, np.ones((5, 1))], 1)
    g = np.cos(x @ (KEPT * params["w"]) + params["b"])
    np.testing.assert_allclose(own.A[0], rows.T @ rows, rtol=1e-12)
    np.testing.assert_allclose(own.G[0], g.T @ g, rtol=1e-12)


FIXED = normal(4, 3, seed=2)


def rounded(w):
    return w + lax.stop_gradient(jnp.round(w) - w)


SHIFTED = {
    "unit triangular": (lambda w: w * KEPT + jnp.eye(4, 3), KEPT),
    "beside a frozen part": (lambda w: (1 - KEPT) * FIXED + jnp.tril(w, 1), KEPT),
    "in place of a frozen part": (lambda w: jnp.where(KEPT > 0, w, FIXED), KEPT),
    "in place of what it was": (lambda w: jnp.where(KEPT > 0, w, lax.stop_gradient(w)), KEPT),
    "plus a number": (lambda w: w * KEPT + 0.5, KEPT),
    "less than a matrix": (lambda w: FIXED - w * KEPT, -KEPT),
    "less than a matrix, all of it": (lambda w: FIXED - w, -np.ones((4, 3))),
    "masked, then rounded": (lambda w: rounded(w * KEPT), KEPT),
    "rounded, then masked": (lambda w: rounded(w) * KEPT, KEPT),
    "masked, rounded, turned": (lambda w: rounded(KEPT.T * w.T).T, KEPT),
}


@pytest.mark.parametrize("name", SHIFTED)
def test_what_has_no_derivative_is_added_to_what_a_mask_leaves(name):
    (of, kept), x = SHIFTED[name], normal(5, 4)
    params = {"w": normal(4, 3), "b": normal(3, seed=1)}
    plan, statistics = check(lambda p, x: jnp.sum(jnp.sin(x @ of(p["w"]) + p["b"])), params, x)
    assert [(layer.name, layer.sizes) for layer in plan.layers] == [("['w']", (5, 3))]
    own = statistics["['w']"].main
    sign = -1 if kept.min() < 0 else 1  # of the weight's rows against the bias's ones
    rows = np.concatenate([sign * x, np.ones((5, 1))], 1)
    g = np.cos(x @ of(params["w"]) + params["b"])
    np.testing.assert_allclose(own.A[0], rows.T @ rows, rtol=1e-12)
    np.testing.assert_allclose(own.G[0], g.T @ g, rtol=1e-12)


def test_what_is_masked_for_more_than_products_is_named_so():
    def loss(p, x, kept):
        w = jnp.exp(jnp.where(kept, p["w"], 0.0))
        return jnp.sum(jnp.sin(x @ p["v"])) + jnp.sum(jnp.sin(x @ w))

    params = {"v": normal(4, 3, seed=1), "w": normal(4, 3)}
    plan, _ = check(loss, params, normal(5, 4), jnp.asarray(KEPT > 0), uncovered=["['w']"])
    assert (
        plan.routing["['w']"].reason
        == "used by `select_n`, which masks it, though not for products alone"
    )


def test_what_is_masked_and_added_to_examples_is_no_weight():
    """Though these are as many as the leaf has rows."""

    def loss(p, x):
        return jnp.sum(jnp.sin((x + p["t"] * KEPT) @ p["v"]))

    params = {"t": normal(4, 3), "v": normal(3, 2)}
    _, statistics = check(loss, params, normal(4, 3, seed=3), uncovered=["['t']"])
    rows = normal(4, 3, seed=3) + params["t"] * KEPT
    np.testing.assert_allclose(statistics["['v']"].main.A[0], rows.T @ rows, rtol=1e-12)


def test_a_number_beside_a_mask_scales_rows():
    x, c = normal(5, 4), 0.35
    plan, statistics = check(lambda p, x: jnp.sum(jnp.sin(x @ (c * p * KEPT))), normal(4, 3), x)
    own = statistics[plan.layers[0].name]
    g = c * np.cos(x @ (c * KEPT * normal(4, 3)))
    np.testing.assert_allclose(own.main.A[0], x.T @ x, rtol=1e-12)
    np.testing.assert_allclose(own.main.G[0], g.T @ g, rtol=1e-12)


def test_a_kernel_that_sees_only_what_came_before():
    before = np.ones((3, 3, 1, 1))
    before[1, 1:], before[2] = 0, 0
    params, x = {"w": normal(3, 3, 2, 4)}, normal(2, 5, 5, 2)

    def loss(p, x):
        kernel = p["w"] * jnp.broadcast_to(before, p["w"].shape)
        y = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.sin(y))

    plan, _ = check(loss, params, x)
    assert plan.routing["['w']"].treatment == "kfac"


@pytest.mark.parametrize(
    "of",
    [
        lambda w, m: w * m,  # what an argument is may change
        lambda w, m: w * (2.0 * KEPT),
        lambda w, m: jnp.where(KEPT[0, 0] > 0, w, 0.0),  # all of it or nothing
        lambda w, m: jnp.where(KEPT > 0, w, jnp.sin(w)),
        lambda w, m: jnp.where(KEPT > 0, w, w**2),
    ],
)
def test_what_is_no_mask_is_none(of):
    def loss(p, x, m):
        return jnp.sum(jnp.sin(x @ p["v"])) + jnp.sum(jnp.sin(x @ of(p["w"], m)))

    params = {"v": normal(4, 3, seed=1), "w": normal(4, 3)}
    check(loss, params, normal(5, 4), ARRAY, uncovered=["['w']"])


def test_masked_positions_are_plain():
    """Their gradients are those of what is left, which the sum's are not."""

    def loss(p, x):
        return jnp.sum(jnp.sin((x + p["t"] * KEPT) @ p["v"]))

    params = {"t": normal(4, 3), "v": normal(3, 2)}
    check(loss, params, normal(5, 4, 3), uncovered=["['t']"])


def test_masked_codes_are_an_input():
    def loss(p, x):
        return jnp.sum(jnp.sin((p["z"] * KEPT) @ p["v"])) + jnp.sum(x**2)

    params = {"z": normal(4, 3), "v": normal(3, 2)}
    _, statistics = check(loss, params, normal(5, 4), uncovered=["['z']"])
    z = KEPT * params["z"]
    np.testing.assert_allclose(statistics["['v']"].main.A[0], z.T @ z, rtol=1e-12)


def test_verify_compares_what_masks_leave():
    """Two uses with masks of their own are one block; and a use that is missed is noticed."""
    params, x = {"w": normal(4, 3)}, normal(5, 4)

    def both(p, x):
        return jnp.sum(jnp.sin(x @ (p["w"] * KEPT))) + jnp.sum(jnp.sin(x @ (p["w"] * (1 - KEPT))))

    plan, _ = check(both, params, x)
    assert len(plan.layers[0].uses) == 2

    def missed(p, x):
        w = p["w"] * KEPT
        return jnp.sum(jnp.sin(probe(x, w, x @ w))) + jnp.sum(jnp.sin(p["w"] * x[:4, :3]))

    with pytest.raises(ValueError, match="the statistics miss uses"):
        verify(missed, params, x)


def test_a_stack_is_masked_inside_of_the_scan_that_takes_it_apart():
    kept = np.tril(np.ones((3, 3)))

    def loss(p, x):
        return jnp.sum(lax.scan(lambda h, w: (jnp.sin(h @ (w * kept)), None), x, p["w"])[0])

    plan, _ = check(loss, {"w": normal(2, 3, 3)}, normal(5, 3))
    assert plan.layers[0].groups == 2


OF_STACKS = {
    "one each": lambda w: w * np.stack([np.tril(np.ones((3, 3))), np.triu(np.ones((3, 3)))]),
    "one for all": lambda w: w * np.tril(np.ones((3, 3))),
    "where": lambda w: jnp.where(np.tril(np.ones((3, 3))) > 0, w, 0.0),
    "vmap": jax.vmap(lambda w: jnp.where(np.tril(np.ones((3, 3))) > 0, w, 0.0)),
    "tril": jnp.tril,
}


@pytest.mark.parametrize("name", OF_STACKS)
def test_a_stack_is_masked_before_a_scan_takes_it_apart(name):
    masked = OF_STACKS[name]

    def loss(p, x):
        return jnp.sum(lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, masked(p["w"]))[0])

    def unrolled(shifts, p, x):
        seen = []
        for w, shift in zip(masked(p["w"]), shifts, strict=True):
            seen.append(x)
            x = jnp.sin(x @ w + shift)
        return jnp.sum(x), seen

    p, x = {"w": normal(2, 3, 3)}, normal(5, 3)
    plan, statistics = check(loss, p, x)
    assert plan.layers[0].groups == 2
    gradients, seen = jax.grad(unrolled, has_aux=True)(jnp.zeros((2, *x.shape)), p, x)
    for i, (a, g) in enumerate(zip(seen, gradients, strict=True)):
        np.testing.assert_allclose(statistics["['w']"].main.A[i], a.T @ a, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(statistics["['w']"].main.G[i], g.T @ g, rtol=1e-9, atol=1e-12)


def test_masks_of_a_stack_are_scanned_with_it():
    kept = np.stack([np.tril(np.ones((3, 3))), np.triu(np.ones((3, 3)))])

    def loss(p, x, kept=kept):
        def layer(h, given):
            w, mask = given
            return jnp.sin(h @ (w * mask)), None

        return jnp.sum(lax.scan(layer, x, (p["w"], kept))[0])

    plan, _ = check(loss, {"w": normal(2, 3, 3)}, normal(5, 3))
    assert plan.layers[0].groups == 2
    with pytest.raises(ValueError, match="would precondition nothing"):
        value_and_grad(lambda p, x: loss(p, x, 2 * kept)).plan({"w": normal(2, 3, 3)}, normal(5, 3))


def test_other_uses_of_masked_scales_positions_and_codes_are_what_they_were():
    def loss(p, x, known):
        h = jnp.where(known[:, None], x, p["codes"])
        h = (h * p["gain"] + p["shift"]) @ p["w"]
        return jnp.sum(jnp.sin(h * (p["scale"][None] * KEPT[:1, :3])))

    names = ("gain", "shift", "scale")
    params = {name: normal(3, seed=i) for i, name in enumerate(names)}
    params |= {"codes": normal(4, 3, seed=5), "w": normal(3, 3)}
    plan, _ = check(loss, params, normal(4, 3), np.arange(4) > 1, uncovered=["['codes']"])
    assert [layer.kind for layer in plan.layers].count("dense") == 1


def test_a_direction_of_a_masked_weight_is_the_dense_one():
    params, x, damping = normal(4, 3), normal(16, 4), 0.1

    def loss(p, x):
        return jnp.mean(jnp.sum(jnp.sin(x @ (p * KEPT)), 1))

    vag = value_and_grad(loss)
    tx = kfac(
        vag.plan(params, x), 1.0, momentum=0.0, damping=damping, kl_clip=None, compute_method="eigen"
    )
    _, grads, statistics = vag(params, x)
    updates, _ = tx.update(grads, tx.init(params), params, statistics=statistics)
    g = np.cos(x @ (KEPT * params))
    matrix = np.kron(x.T @ x / 16, g.T @ g / 16) + damping * np.eye(12)
    expected = -np.linalg.solve(matrix, np.asarray(KEPT * (x.T @ g) / 16).ravel())
    np.testing.assert_allclose(np.asarray(updates).ravel(), expected, rtol=1e-9)


@pytest.fixture
def constants_in_programs():
    """Have jax write arrays that were closed over into programs, as it will by default."""
    name = "jax_use_simplified_jaxpr_constants"
    before = getattr(jax.config, name, None)

    def use(simplified):
        if simplified and before is None:
            pytest.skip("this jax has no such programs")
        if before is not None:
            jax.config.update(name, simplified)

    yield use
    if before is not None:
        jax.config.update(name, before)
