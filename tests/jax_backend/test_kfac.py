"""`suite.jax.kfac` and `scale_by_kfac` as optax transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from suite.jax import kfac, scale_by_kfac, value_and_grad


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"]) * params["scale"]
    return jnp.mean(jnp.sum((hidden @ params["v"] - y) ** 2, 1))


PARAMS = {
    "w": normal(4, 6) * 0.5,
    "b": normal(6, seed=1) * 0.1,
    "v": normal(6, 2, seed=2) * 0.5,
    "scale": jnp.ones(6),
}
X, Y = normal(16, 4, seed=3), normal(16, 2, seed=4)
VAG = value_and_grad(loss_fn)
PLAN = VAG.plan(PARAMS, X, Y)
evaluate = jax.jit(VAG)  # tests that are not about tracing


def updates_of(tx):
    """`tx.update`, compiled: operation by operation JAX is slow."""
    return jax.jit(lambda grads, state, params, **extra: tx.update(grads, state, params, **extra))


def train(tx, steps, params=PARAMS, x=X):
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        loss, grads, statistics = VAG(params, x, Y)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return params, state, losses


@pytest.mark.parametrize("compute_method", ["eigen", "inverse"])
def test_it_learns_and_beats_plain_gradients(compute_method):
    tx = kfac(PLAN, 0.1, damping=1e-3, kl_clip=None, compute_method=compute_method)
    _, _, losses = train(tx, 60)
    params, plain, plain_gradient = PARAMS, [], jax.jit(jax.value_and_grad(loss_fn))
    for _ in range(60):
        loss, grads = plain_gradient(params, X, Y)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        plain.append(float(loss))
    assert losses[-1] < 0.8 * plain[-1]


def test_the_direction_is_the_dense_damped_solution():
    tx = scale_by_kfac(PLAN, damping=0.1, kl_clip=None)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    directions, _ = updates_of(tx)(grads, tx.init(PARAMS), PARAMS, statistics=statistics)
    sums = statistics["['v']"]
    A, G = sums.A[0] / 16, sums.G[0] * 16
    matrix = jnp.kron(G, A) + 0.1 * jnp.eye(12)
    expected = jnp.linalg.solve(matrix, grads["v"].T.reshape(-1)).reshape(2, 6).T
    np.testing.assert_allclose(directions["v"], expected, rtol=1e-9)
    np.testing.assert_array_equal(directions["scale"], grads["scale"])


def test_without_statistics_the_factors_stay():
    tx = scale_by_kfac(PLAN)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    _, state = updates_of(tx)(grads, tx.init(PARAMS), PARAMS, statistics=statistics)
    _, later = updates_of(tx)(grads, state, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, state.buckets, later.buckets)
    assert int(later.steps) == 2


def test_before_any_statistics_the_direction_is_the_gradient():
    tx = scale_by_kfac(PLAN, kl_clip=None)
    _, grads, _ = evaluate(PARAMS, X, Y)
    directions, _ = updates_of(tx)(grads, tx.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, directions, grads)


def test_periods_say_when_factors_and_inverses_move():
    tx = scale_by_kfac(PLAN, factor_update_steps=2, inv_update_steps=3)
    state, moved, update = tx.init(PARAMS), [], updates_of(tx)
    params = PARAMS
    for _ in range(6):
        _, grads, statistics = evaluate(params, X, Y)
        _, new = update(grads, state, params, statistics=statistics)
        pairs = list(zip(state.buckets, new.buckets, strict=True))
        changed = [any(not np.array_equal(a.A.average, b.A.average) for a, b in pairs)]
        changed.append(any(not np.array_equal(a.A.inverse.values, b.A.inverse.values) for a, b in pairs))
        moved.append(changed)
        state = new
        params = jax.tree.map(lambda p: 1.1 * p, params)
    assert [m[0] for m in moved] == [True, False, True, False, True, False]
    assert [m[1] for m in moved] == [True, False, False, True, False, False]


def test_the_fallback_has_its_own_learning_rate():
    tx = kfac(PLAN, 0.1, momentum=0.0, kl_clip=None, fallback=optax.sgd(0.7))
    _, grads, statistics = evaluate(PARAMS, X, Y)
    updates, _ = updates_of(tx)(grads, tx.init(PARAMS), PARAMS, statistics=statistics)
    np.testing.assert_allclose(updates["scale"], -0.7 * grads["scale"], rtol=1e-12)
    without = kfac(PLAN, 0.1, momentum=0.0, kl_clip=None)
    updates, _ = updates_of(without)(grads, without.init(PARAMS), PARAMS, statistics=statistics)
    np.testing.assert_allclose(updates["scale"], -0.1 * grads["scale"], rtol=1e-12)


def test_schedules_and_weight_decay():
    asked = []

    def rate(step):
        asked.append(step)
        return 0.1 / (1.0 + step)

    tx = kfac(PLAN, rate, momentum=0.0, weight_decay=0.5, kl_clip=None, damping=lambda step: 0.1 + step)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    _, state = updates_of(tx)(grads, tx.init(PARAMS), PARAMS, statistics=statistics)
    plain = scale_by_kfac(PLAN, kl_clip=None, damping=1.1)
    directions, _ = updates_of(plain)(grads, state.preconditioner, PARAMS, statistics=statistics)
    updates, _ = updates_of(tx)(grads, state, PARAMS, statistics=statistics)
    expected = jax.tree.map(lambda d, p: -0.05 * (d + 0.5 * p), directions, PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), updates, expected)
    assert asked


def test_a_step_that_is_not_finite_changes_nothing():
    tx = kfac(PLAN, 0.1, fallback=optax.adam(1e-3), weight_decay=0.1)
    params, state, _ = train(tx, 2)
    update = updates_of(tx)
    _, grads, statistics = evaluate(params, X, Y)
    for poison in (jnp.nan, jnp.inf, -jnp.inf):
        name = "['v']"
        bad = statistics[name]._replace(A=statistics[name].A.at[0, 0, 0].set(poison))
        poisoned = {
            "a layer's gradient": ({**grads, "w": grads["w"].at[0].set(poison)}, statistics),
            "a plain gradient": ({**grads, "scale": grads["scale"].at[0].set(poison)}, statistics),
            "statistics": (grads, {**statistics, name: bad}),
        }
        for where, (g, s) in poisoned.items():
            updates, after = update(g, state, params, statistics=s)
            jax.tree.map(lambda u: np.testing.assert_array_equal(u, jnp.zeros_like(u)), updates)
            assert int(after.skipped_steps) == 1, where
            assert int(after.preconditioner.steps) == 2
            old, new = state.preconditioner.buckets, after.preconditioner.buckets
            jax.tree.map(np.testing.assert_array_equal, (state.rest, old), (after.rest, new))
            updates, _ = update(grads, after, params, statistics=statistics)
            assert any(bool(jnp.any(u != 0)) for u in jax.tree.leaves(updates))


def test_what_was_due_in_a_skipped_step_is_due_in_the_next():
    tx = scale_by_kfac(PLAN, factor_update_steps=5, inv_update_steps=10)
    update = updates_of(tx)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    bad = {**grads, "w": grads["w"] * jnp.nan}
    _, state = update(bad, tx.init(PARAMS), PARAMS, statistics=statistics)
    assert not any(bool(jnp.any(b.ready)) for b in state.buckets)
    _, state = update(grads, state, PARAMS, statistics=statistics)
    assert all(bool(jnp.all(b.ready)) for b in state.buckets)


def test_one_compilation_donation_and_scan():
    tx = kfac(PLAN, 0.1, inv_update_steps=3)
    traces = []

    def step(carry, _):
        traces.append(1)
        params, state = carry
        loss, grads, statistics = VAG(params, X, Y)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return (optax.apply_updates(params, updates), state), loss

    compiled = jax.jit(step, donate_argnums=0)
    carry = (jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS))
    for _ in range(5):
        carry, _ = compiled(carry, None)
    assert len(traces) == 1
    scanned, _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), None, length=5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), scanned, carry)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(carry[1]))


def test_factor_steps_in_one_program_by_cond():
    """A step without statistics costs no statistics, and zeros stand for 'nothing seen'."""
    tx = scale_by_kfac(PLAN, factor_update_steps=2)
    state = tx.init(PARAMS)

    @jax.jit
    def step(state):
        def without(p):
            _, grads = jax.value_and_grad(loss_fn)(p, X, Y)
            return grads, jax.tree.map(jnp.zeros_like, VAG(p, X, Y)[2])

        due = state.steps % 2 == 0
        grads, statistics = jax.lax.cond(due, lambda p: VAG(p, X, Y)[1:], without, PARAMS)
        return tx.update(grads, state, PARAMS, statistics=statistics)[1]

    first = step(state)
    second = step(first)
    jax.tree.map(np.testing.assert_array_equal, first.buckets, second.buckets)


def test_chains():
    tx = optax.chain(optax.clip_by_global_norm(1.0), scale_by_kfac(PLAN), optax.scale(-0.1))
    _, _, losses = train(tx, 30)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"learning_rate": -1.0}, ValueError, "learning_rate must be >= 0"),
        ({"damping": -1.0}, ValueError, "damping must be >= 0"),
        ({"factor_decay": 1.0}, ValueError, "factor_decay"),
        ({"kl_clip": 0.0}, ValueError, "kl_clip must be > 0"),
        ({"factor_update_steps": 0}, ValueError, "factor_update_steps must be >= 1"),
        ({"inv_update_steps": 2.5}, TypeError, "inv_update_steps must be an integer"),
        ({"compute_method": "cholesky"}, ValueError, "compute_method must be one of"),
        ({"loss_reduction": "none"}, ValueError, "loss_reduction must be one of"),
        ({"momentum": 1.0}, ValueError, "momentum"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay"),
        ({"dampnig": 0.1}, TypeError, "dampnig"),
    ],
)
def test_bad_settings_are_errors(settings, error, message):
    with pytest.raises(error, match=message):
        kfac(PLAN, **{"learning_rate": 0.1, **settings})


def test_what_does_not_fit_the_plan_is_an_error():
    with pytest.raises(TypeError, match="plan must come from"):
        scale_by_kfac({"w": 1})
    tx = scale_by_kfac(PLAN)
    with pytest.raises(ValueError, match="structure and shapes"):
        tx.init({"w": jnp.ones((4, 6))})
    _, grads, statistics = evaluate(PARAMS, X, Y)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"missing \[\"\['w'\]\"\]"):
        tx.update(grads, state, PARAMS, statistics={"['v']": statistics["['v']"]})
    decayed = kfac(PLAN, 0.1, weight_decay=0.1)
    decayed_state = decayed.init(PARAMS)
    with pytest.raises(ValueError, match="params must be given"):
        decayed.update(grads, decayed_state)


def test_dtypes_of_parameters_are_kept():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    x, y = X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)
    plan = VAG.plan(params, x, y)
    tx = kfac(plan, 0.1)
    _, grads, statistics = VAG(params, x, y)
    updates, state = tx.update(grads, tx.init(params), params, statistics=statistics)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert {b.A.average.dtype for b in state.preconditioner.buckets} == {jnp.dtype(jnp.float32)}
