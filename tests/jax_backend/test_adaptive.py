"""`adaptive_kfac`: the step against dense Gauss-Newton matrices, and its manners with losses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from conftest import assert_close
from suite.jax import adaptive_kfac, scale_by_kfac, value_and_grad
from suite.jax.gauss_newton import linearized

SETTINGS = {"compute_method": "inverse", "inv_update_steps": 3}


def network(seed=0, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    sizes = ((4, 6), (6, 3))
    return [
        {"w": jnp.asarray(rng.normal(size=s) / 2, dtype), "b": jnp.asarray(rng.normal(size=s[1]), dtype)}
        for s in sizes
    ]


def data(count=40, seed=1, dtype=jnp.float64):
    x = np.random.default_rng(seed).normal(size=(count, 4))
    return jnp.asarray(x, dtype), jnp.asarray((x[:, :3] + 0.5 * x[:, 3:]).argmax(1))


def logits_of(params, x):
    first, last = params
    return jnp.tanh(x @ first["w"] + first["b"]) @ last["w"] + last["b"]


def loss_fn(params, batch):
    """Its terms have weights, as those of padded sequences do."""
    x, y = batch
    logits = logits_of(params, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    weights = weights_of(len(y)).astype(losses.dtype)
    return jnp.sum(weights * losses) / jnp.sum(weights), logits


def weights_of(count):
    return jnp.asarray([0.0, 1.0, 2.0, 1.0])[jnp.arange(count) % 4]


def transformation(params, batch, loss_fn=loss_fn, make=adaptive_kfac, **settings):
    vag = value_and_grad(loss_fn, has_aux=True)
    tx = make(vag.plan(params, batch), **{**SETTINGS, **settings})

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, state, batch):
        (loss, _), grads, statistics = vag(params, batch)
        updates, state = tx.update(
            grads, state, params, statistics=statistics, value_fn=lambda p: loss_fn(p, batch)
        )
        return optax.apply_updates(params, updates), state, loss

    return tx, step


def assert_same(tree, other):
    """Equal to the last bit."""
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def flat(params):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(params)])


def dense_gauss_newton(params, x):
    """Of the weighted mean cross-entropy, from explicit Jacobians and the Hessian diag(p) - p pᵀ."""
    logits = np.asarray(logits_of(params, x))
    jacobians = jax.tree.leaves(jax.jacrev(logits_of)(params, x))
    J = np.concatenate([np.asarray(j).reshape(*logits.shape, -1) for j in jacobians], -1)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    H = np.einsum("nc,cd->ncd", p, np.eye(p.shape[1])) - np.einsum("nc,nd->ncd", p, p)
    weights = np.array([0.0, 1.0, 2.0, 1.0])[np.arange(len(p)) % 4]
    return np.einsum("n,nci,ncd,ndj->ij", weights / weights.sum(), J, H, J)


def test_every_step_is_the_minimum_of_the_dense_quadratic_model():
    """The direction by `scale_by_kfac`; the rest by explicit matrices and the rule in words."""
    params, damping, delta, predicted = network(), 0.1, None, None
    tx, step = transformation(params, data(), damping=damping)
    state, vag = tx.init(params), value_and_grad(loss_fn, has_aux=True)
    plan = vag.plan(params, data())
    inner = scale_by_kfac(plan, kl_clip=None, **SETTINGS).init(params)
    unflat = jax.flatten_util.ravel_pytree(params)[1]
    momenta = []
    for number in range(8):
        batch, start = data(seed=number), flat(params)
        (loss, _), grads, statistics = vag(params, batch)
        if delta is not None:
            before = loss_fn(unflat(jnp.asarray(start - delta)), batch)[0]
            ratio = float(loss - before) / predicted
            damping *= 0.85 if ratio > 0.25 else 1 / 0.85 if ratio < 0 else 1
        kfac = scale_by_kfac(plan, kl_clip=None, damping=damping, **SETTINGS)
        directions, inner = kfac.update(grads, inner, params, statistics=statistics)
        direction = flat(directions)
        basis = direction[:, None] if delta is None else np.stack([direction, delta], 1)
        F = dense_gauss_newton(params, batch[0]) + damping * np.eye(len(start))
        M, b = basis.T @ F @ basis, basis.T @ flat(grads)
        c = -np.linalg.solve(M, b)
        params, state, returned = step(params, state, batch)
        delta, predicted = basis @ c, b @ c / 2
        assert_close(returned, loss)
        assert_close(flat(params) - start, delta, rtol=1e-6)
        assert_close(state.damping, damping)
        assert_close(state.learning_rate, -c[0], rtol=1e-6)
        momenta.append(float(state.momentum))
    assert momenta[0] == 0
    assert all(m != 0 for m in momenta[1:])


@pytest.mark.parametrize(
    "kind", ["squares", "residuals in parts", "jitted", "remat", "all remat", "scan", "vmap", "view"]
)
def test_products_are_the_dense_matrix_s_however_the_loss_is_written(kind):
    """½ mean |r|², whose Gauss-Newton matrix is Jᵀ J / n, and the loss itself."""
    params, (x, _) = network(), data()

    def residuals(params):
        if kind == "scan":
            return jax.lax.scan(lambda _, row: (None, logits_of(params, row)), None, x)[1]
        if kind == "vmap":
            return jax.vmap(lambda row: logits_of(params, row))(x)
        f = {"jitted": jax.jit, "remat": jax.checkpoint}.get(kind, lambda f: f)(logits_of)
        return f(params, x) - 0.5

    def value_fn(params):
        r = residuals(params)
        if kind == "residuals in parts":
            a, b = r[:10], {"rest": r[10:]}
            return (jnp.sum(a**2) + jnp.sum(b["rest"] ** 2)) / 80, (a, b)
        return jnp.mean(jnp.sum(r**2, 1)) / 2, r.T[:, None].astype("float32") if kind == "view" else r

    value_fn = {"jitted": jax.jit, "all remat": jax.checkpoint}.get(kind, lambda f: f)(value_fn)
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    u, v = ([jnp.asarray(rng.normal(size=p.shape)) for p in leaves] for _ in range(2))
    here = linearized(value_fn, leaves, functools.partial(jax.tree.unflatten, treedef))
    J = np.concatenate(
        [np.asarray(j).reshape(120, -1) for j in jax.tree.leaves(jax.jacrev(logits_of)(params, x))], 1
    )
    F = J.T @ J / 40
    expected = [a @ F @ b for a, b in ((flat(u), flat(u)), (flat(u), flat(v)), (flat(v), flat(v)))]
    assert_close(here.loss, value_fn(params)[0])
    assert_close(jnp.stack(here.products([u, v])), expected)


def test_it_learns_a_poisson_problem_without_tuning():
    """-u'' = π² sin(πx) on [0, 1]: mean squared error of u below 1e-5 in 60 steps."""
    rng = np.random.default_rng(0)
    params = [
        {"w": jnp.asarray(rng.uniform(-1, 1, (1, 16))), "b": jnp.asarray(rng.uniform(-1, 1, 16))},
        {"w": jnp.asarray(rng.uniform(-1, 1, (16, 1))) / 4, "b": jnp.zeros(1)},
    ]
    x = jnp.linspace(0, 1, 41)[:, None]

    def solution(params, x):
        """u and u'' at x, carried forward with the activations."""
        rows = jnp.stack([x, jnp.ones_like(x), jnp.zeros_like(x)])
        bias = jnp.stack([jnp.ones_like(x), jnp.zeros_like(x), jnp.zeros_like(x)])
        z, slope, bend = rows @ params[0]["w"] + bias * params[0]["b"]
        a = jnp.tanh(z)
        rows = jnp.stack([a, (1 - a**2) * slope, (1 - a**2) * (bend - 2 * a * slope**2)])
        u, _, second = (rows @ params[1]["w"] + bias * params[1]["b"])[..., 0]
        return u, second

    def poisson(params, x):
        u, second = solution(params, jnp.concatenate([x, x[:1], x[-1:]]))
        inside = second[:41] / np.pi**2 + jnp.sin(np.pi * x[:, 0])
        residuals = jnp.concatenate([inside, u[41:] * 41**0.5])
        return jnp.sum(residuals**2) / 41, residuals

    tx, step = transformation(params, x, poisson)
    state = tx.init(params)
    for _ in range(60):
        params, state, _ = step(params, state, x)
    error = solution(params, x)[0] - jnp.sin(np.pi * x[:, 0])
    assert jnp.mean(error**2) < 1e-5


def test_a_step_beyond_what_the_loss_can_bear_is_taken_back():
    first, batch = network(), data()

    def bounded(params, batch):
        loss, logits = loss_fn(params, batch)
        far = sum(
            jnp.sum((p - q) ** 2)
            for p, q in zip(jax.tree.leaves(params), jax.tree.leaves(first), strict=True)
        )
        return loss * jnp.where(far > 0.25, jnp.inf, 1.0), logits

    tx, step = transformation(first, batch, bounded)
    params, state, _ = step(first, tx.init(first), batch)
    assert np.linalg.norm(flat(params) - flat(first)) > 0.5
    kept = jax.tree.map(jnp.copy, state.preconditioner)
    params, state, _ = step(params, state, batch)
    assert_close(flat(params), flat(first), rtol=1e-15)
    assert state.rejected_steps == 1
    assert_same(state.preconditioner, kept)
    assert_close(state.damping, 0.4)
    for _ in range(15):
        params, state, _ = step(params, state, batch)
    assert loss_fn(params, batch)[0] < loss_fn(first, batch)[0]  # smaller steps, taken
    assert state.skipped_steps == 0


def test_outputs_that_the_loss_is_not_convex_in_end_in_skipped_steps():
    params, batch = network(), data()

    def concave(params, batch):
        logits = logits_of(params, batch[0])
        return jnp.mean(jnp.log1p((30 * logits - 90 * batch[1][:, None]) ** 2)), logits

    tx, step = transformation(params, batch, concave, damping=1e-3)
    after, state, _ = step(params, tx.init(params), batch)
    assert state.skipped_steps == 1
    assert_close(state.damping, 4e-3)
    assert_same(after, params)


def test_a_batch_that_is_not_finite_changes_nothing():
    first, batch = network(), data()
    bad = batch[0].at[3, 1].set(jnp.nan), batch[1]
    tx, step = transformation(first, batch)
    params, state, _ = step(first, tx.init(first), batch)
    before = jax.tree.map(jnp.copy, state)
    after, skipped, _ = step(params, state, bad)
    assert_same(after, params)
    assert skipped.skipped_steps == 1
    assert_same(skipped._replace(skipped=before.skipped), before)
    _, state, loss = step(params, skipped, batch)
    assert loss < loss_fn(first, batch)[0]
    assert state.reduction_ratio > 0  # of the step before the bad batch
    after, fresh, _ = step(first, tx.init(first), bad)
    assert_same(after, first)
    assert fresh.skipped_steps == 1


def test_a_gradient_that_is_not_finite_where_the_loss_is_changes_nothing():
    """Momentum and damping included."""
    first, batch = network(), data()
    vag = value_and_grad(loss_fn, has_aux=True)
    tx = adaptive_kfac(vag.plan(first, batch), **SETTINGS)

    @jax.jit
    def step(params, state, batch, factor):
        _, grads, statistics = vag(params, batch)
        grads = jax.tree.map(lambda g: g * factor, grads)
        value_fn = functools.partial(loss_fn, batch=batch)
        updates, state = tx.update(grads, state, params, statistics=statistics, value_fn=value_fn)
        return optax.apply_updates(params, updates), state

    params, state = first, tx.init(first)
    for seed in range(3):
        params, state = step(params, state, data(seed=seed), 1.0)
    assert state.momentum != 0
    after, hit = step(params, state, data(seed=9), jnp.nan)
    assert_same(after, params)
    assert hit.skipped_steps == 1
    counted = hit.preconditioner._replace(skipped_steps=state.preconditioner.skipped_steps)
    assert_same(hit._replace(preconditioner=counted), state)


def test_a_loss_that_was_not_finite_before_the_last_step_says_nothing_of_it():
    first, batch = network(), data()

    def walled(params, both):
        """Infinite around the first parameters, once `wall` is up."""
        batch, wall = both
        loss, logits = loss_fn(params, batch)
        near = jnp.sum((params[0]["b"] - first[0]["b"]) ** 2) < 1e-12
        return jnp.where(near & wall, jnp.inf, loss), logits

    tx, step = transformation(first, (batch, False), walled)
    params, state, _ = step(first, tx.init(first), (batch, False))
    after, state, _ = step(params, state, (batch, True))
    assert np.linalg.norm(flat(after) - flat(params)) > 1e-3
    assert state.skipped_steps == state.rejected_steps == 0
    assert_close(state.damping, 0.1)


@pytest.mark.parametrize("kind", ["clipped", "of a sum", "of other labels"])
def test_gradients_of_another_loss_move_nothing(kind):
    params, (x, y) = network(), data()
    vag = value_and_grad(loss_fn, has_aux=True)
    tx = adaptive_kfac(vag.plan(params, (x, y)))
    _, grads, statistics = vag(params, (x, y))
    labels = (y + 1) % 3 if kind == "of other labels" else y
    grads = jax.tree.map(lambda g: g * {"clipped": 0.5, "of a sum": 40.0}.get(kind, 1.0), grads)
    updates, state = tx.update(
        grads, tx.init(params), params, statistics=statistics, value_fn=lambda p: loss_fn(p, (x, labels))
    )
    assert_same(updates, jax.tree.map(jnp.zeros_like, params))
    assert state.skipped_steps == 1


def test_a_loss_may_depend_on_parameters_beside_its_outputs():
    """Its derivative is then that of all of it, its curvature that by the outputs."""
    params, batch = network(), data()

    def regularized(params, batch):
        loss, logits = loss_fn(params, batch)
        return loss + 0.3 * jnp.sum(params[1]["b"] ** 2), logits

    vag = value_and_grad(regularized, has_aux=True, plain=["[1]['b']"])
    tx = adaptive_kfac(vag.plan(params, batch), fallback=optax.set_to_zero())
    _, grads, statistics = vag(params, batch)
    _, state = tx.update(
        grads, tx.init(params), params, statistics=statistics, value_fn=lambda p: regularized(p, batch)
    )
    assert state.skipped_steps == 0
    assert state.predicted < 0
    leaves, treedef = jax.tree.flatten(params)
    here = linearized(
        lambda p: regularized(p, batch), leaves, functools.partial(jax.tree.unflatten, treedef)
    )
    rng = np.random.default_rng(0)
    v = [jnp.asarray(rng.normal(size=p.shape)) for p in leaves]
    assert_close(here.derivative(v)[0], np.dot(flat(grads), flat(v)))


@pytest.mark.filterwarnings("ignore:.*jax_debug_nans")
def test_nothing_in_it_is_nan_where_the_batch_is_finite():
    params, batch = network(), data()
    with jax.debug_nans(True):
        tx, step = transformation(params, batch)
        state = tx.init(params)
        for _ in range(3):
            params, state, _ = step(params, state, batch)
    assert np.isfinite(flat(params)).all()


@pytest.mark.parametrize("static", [(), ("plan", "compute_method", "inv_update_steps")])
def test_hyperparameters_may_be_injected(static):
    """In a step that may reuse the state's memory, which has some of them twice."""
    batch, found = data(), []
    for make in (adaptive_kfac, optax.inject_hyperparams(adaptive_kfac, static_args=static)):
        params = network()
        tx, step = transformation(params, batch, make=make, factor_decay=0.5, damping=0.2)
        state = tx.init(params)
        for _ in range(3):
            params, state, _ = step(params, state, batch)
        found.append(params)
    assert_close(flat(found[1]), flat(found[0]))


def test_a_batch_that_no_parameter_can_improve_is_no_error():
    params, batch = network(), data()

    def constant(params, batch):
        loss, logits = loss_fn(params, batch)
        return 0 * loss, logits

    tx, step = transformation(params, batch, constant)
    after, state = params, tx.init(params)
    for _ in range(3):
        after, state, _ = step(after, state, batch)
    assert_same(after, params)
    assert state.skipped_steps == state.rejected_steps == 0
    assert_close(state.damping, 0.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_half_precision_learns(dtype):
    params = network(dtype=dtype)
    batch = data(count=200, dtype=dtype)
    tx, step = transformation(params, batch)
    state, losses = tx.init(params), []
    for _ in range(15):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    assert state.damping.dtype == jnp.float32
    assert all(x.dtype == dtype for x in jax.tree.leaves(params))


def test_what_the_plan_does_not_cover_needs_a_fallback():
    params, batch = network(), data()
    vag = value_and_grad(loss_fn, has_aux=True, plain=["[1]['w']", "[1]['b']"])
    plan = vag.plan(params, batch)
    with pytest.raises(ValueError, match=r"fallback must be .* does not cover: \[\"\[1\]\['b'\]\""):
        adaptive_kfac(plan)
    tx = adaptive_kfac(plan, fallback=optax.sgd(0.1, momentum=0.9))
    state = tx.init(params)
    _, grads, statistics = vag(params, batch)
    updates, after = tx.update(
        grads, state, params, statistics=statistics, value_fn=lambda p: loss_fn(p, batch)
    )
    assert_close(updates[1]["w"], -0.1 * grads[1]["w"])
    assert jnp.sum(updates[0]["w"] * grads[0]["w"]) < 0
    bad = jax.tree.map(lambda g: g * jnp.nan, grads)
    updates, skipped = tx.update(
        bad, after, params, statistics=statistics, value_fn=lambda p: loss_fn(p, batch)
    )
    assert_same(updates, jax.tree.map(jnp.zeros_like, params))
    assert_same(skipped.fallback, after.fallback)


def test_what_has_no_update_may_be_anything():
    """In `params`, as for optax's own: a model of equinox's is given whole, with its functions."""
    batch, arrays = data(), {"layers": network(), "activation": None}

    def value_fn(p):
        return loss_fn(p["layers"], batch)

    def of_whole(p):
        assert p["activation"] is jnp.tanh
        return value_fn(p)

    vag = value_and_grad(value_fn, has_aux=True)
    tx = adaptive_kfac(vag.plan(arrays))
    _, grads, statistics = vag(arrays)
    state, whole = tx.init(arrays), {**arrays, "activation": jnp.tanh}
    got, expected = (
        tx.update(grads, state, p, statistics=statistics, value_fn=loss)[0]
        for p, loss in ((whole, of_whole), (arrays, value_fn))
    )
    assert_same(got, expected)


def test_bad_arguments_are_errors():
    params, batch = network(), data()
    vag = value_and_grad(loss_fn, has_aux=True)
    plan = vag.plan(params, batch)
    for wrong in ({"damping": 0.0}, {"compute_method": "none"}, {"factor_decay": 2.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            adaptive_kfac(plan, **wrong)
    tx = adaptive_kfac(plan)
    state = tx.init(params)
    _, grads, statistics = vag(params, batch)

    def given(**extra):
        tx.update(grads, state, params, **{"statistics": statistics, **extra})

    with pytest.raises(ValueError, match="params and value_fn must be given"):
        given()
    with pytest.raises(TypeError, match="needs statistics="):
        tx.update(grads, state, params, value_fn=lambda p: loss_fn(p, batch))
    with pytest.raises(ValueError, match="given all parameters, got masked ones"):
        tx.init([params[0], jax.tree.map(lambda _: optax.MaskedNode(), params[1])])

    def inside_a_loop(params):
        def body(carry, x):
            logits = logits_of(params, x)
            return carry + jnp.sum(logits**2), logits

        return jax.lax.scan(body, 0.0, batch[0])

    wrong = {
        r"\(loss, outputs\), got": lambda p: loss_fn(p, batch)[0],
        "scalar loss first": lambda p: loss_fn(p, batch)[::-1],
        "arrays of floats": lambda p: (loss_fn(p, batch)[0], [batch[1]]),
        "computed from the outputs": lambda p: (loss_fn(p, batch)[0], logits_of(p, batch[0]) + 1),
        "not in a loop": inside_a_loop,
        "from one another": lambda p: (
            jnp.sum(jnp.exp(p[0]["b"]) ** 2),
            (p[0]["b"], jnp.exp(p[0]["b"])),
        ),
    }
    for message, value_fn in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            given(value_fn=value_fn)
