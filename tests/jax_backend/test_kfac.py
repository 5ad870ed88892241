"""`suite.jax.kfac` and `scale_by_kfac` as optax transformations."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from oracles import weighted_mean
from suite.core import linalg
from suite.jax import Categorical, eigenbases, kfac, scale_by_kfac, value_and_grad
from suite.jax.finite import all_finite, sum_if, zero_unless


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
MESH = jax.make_mesh((1,), ("data",))
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
    sums = statistics["['v']"].main
    A, G = sums.A[0] / 16, sums.G[0] * 16
    matrix = jnp.kron(G, A) + 0.1 * jnp.eye(12)
    expected = jnp.linalg.solve(matrix, grads["v"].T.reshape(-1)).reshape(2, 6).T
    np.testing.assert_allclose(directions["v"], expected, rtol=1e-9)
    sums = statistics["['scale']"].main
    np.testing.assert_allclose(directions["scale"], grads["scale"] / (sums.G[0] * 16 + 0.1), rtol=1e-9)


@pytest.mark.parametrize("fisher", [None, Categorical(exact=True)])
def test_batches_of_other_sizes_average_like_any(fisher):
    """A scale and its shift, of an epoch whose last batch is smaller."""
    params = {"scale": normal(4), "shift": normal(4, seed=1)}

    def logits(p, x):
        return jnp.tanh(p["scale"] * x + p["shift"])

    def loss(p, x):
        z = logits(p, x)
        value = jnp.mean(jnp.sum(jnp.sin(z) * jnp.arange(1.0, 5.0), axis=-1))
        return value if fisher is None else (value, z)

    vag = value_and_grad(loss, has_aux=fisher is not None, fisher=fisher)
    batches = [normal(size, 4, seed=size) for size in (12, 3, 24)]
    tx = scale_by_kfac(vag.plan(params, batches[0]), damping=0.1, kl_clip=None)
    state, history = tx.init(params), []

    def moments(x):
        """(terms, 4, 2, 2): of each term the Fisher matrix of each channel's scale and shift."""
        jacobian = jax.vmap(jax.jacobian(logits), (None, 0))(params, x[:, None])
        jacobian = jnp.stack([jacobian[k][:, 0] for k in ("scale", "shift")], -1)  # (n, 4, 4, 2)
        z = logits(params, x)
        if fisher is None:
            rows = jnp.einsum("no,nocu->ncu", jnp.cos(z) * jnp.arange(1.0, 5.0), jacobian)
            return rows[..., :, None] * rows[..., None, :]
        p = jax.nn.softmax(z)
        hessian = p[:, :, None] * jnp.eye(4) - p[:, :, None] * p[:, None, :]
        return jnp.einsum("noq,nocu,nqcv->ncuv", hessian, jacobian, jacobian)

    for x in batches:
        _, grads, statistics = vag(params, x)
        directions, state = updates_of(tx)(grads, state, params, statistics=statistics)
        history.append(np.asarray(jnp.mean(moments(x), 0)))
    matrices = weighted_mean(history, 0.95) + 0.1 * np.eye(2)
    gradients = np.stack([grads["scale"], grads["shift"]], -1)[..., None]
    expected = np.linalg.solve(matrices, gradients)[..., 0]
    np.testing.assert_allclose(directions["scale"], expected[:, 0], rtol=1e-9)
    np.testing.assert_allclose(directions["shift"], expected[:, 1], rtol=1e-9)


def test_without_statistics_the_factors_stay():
    tx = scale_by_kfac(PLAN)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    _, state = updates_of(tx)(grads, tx.init(PARAMS), PARAMS, statistics=statistics)
    _, later = updates_of(tx)(grads, state, PARAMS, statistics=None)
    jax.tree.map(np.testing.assert_array_equal, state.factors, later.factors)
    assert int(later.steps) == 2


def test_before_any_statistics_the_direction_is_the_gradient():
    tx = scale_by_kfac(PLAN, kl_clip=None)
    _, grads, _ = evaluate(PARAMS, X, Y)
    directions, _ = updates_of(tx)(grads, tx.init(PARAMS), PARAMS, statistics=None)
    jax.tree.map(np.testing.assert_array_equal, directions, grads)


def test_periods_say_when_factors_and_inverses_move():
    tx = scale_by_kfac(PLAN, factor_update_steps=2, inv_update_steps=3)
    state, moved, update = tx.init(PARAMS), [], updates_of(tx)
    params = PARAMS
    for _ in range(6):
        _, grads, statistics = evaluate(params, X, Y)
        _, new = update(grads, state, params, statistics=statistics)
        old, after = state.factors, new.factors
        averages = list(zip(old.averages, after.averages, strict=True))
        inverses = list(zip(old.inverses, after.inverses, strict=True))
        changed = [any(not np.array_equal(a, b) for a, b in averages)]
        changed.append(any(not np.array_equal(a.values, b.values) for a, b in inverses))
        moved.append(changed)
        state = new
        params = jax.tree.map(lambda p: 1.1 * p, params)
    assert [m[0] for m in moved] == [True, False, True, False, True, False]
    assert [m[1] for m in moved] == [True, False, False, True, False, False]


def test_the_fallback_has_its_own_learning_rate():
    vag = value_and_grad(loss_fn, plain=["['scale']"])
    plan = vag.plan(PARAMS, X, Y)
    _, grads, statistics = jax.jit(vag)(PARAMS, X, Y)
    tx = kfac(plan, 0.1, momentum=0.0, kl_clip=None, fallback=optax.sgd(0.7))
    updates, _ = updates_of(tx)(grads, tx.init(PARAMS), PARAMS, statistics=statistics)
    np.testing.assert_allclose(updates["scale"], -0.7 * grads["scale"], rtol=1e-12)
    without = kfac(plan, 0.1, momentum=0.0, kl_clip=None)
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


def test_finite_steps_outside_of_jit_show_no_nan_to_debug_nans():
    tx = kfac(PLAN, 0.1, damping=0.1, inv_update_steps=2)
    state = tx.init(PARAMS)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    with jax.debug_nans(True):
        plain, state = tx.update(grads, state, PARAMS, statistics=None)  # no layer has inverses yet
        updates, _ = tx.update(grads, state, PARAMS, statistics=statistics)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(updates), strict=True):
        assert jnp.any(a != b)


def test_a_step_that_is_not_finite_changes_nothing():
    tx = kfac(PLAN, 0.1, fallback=optax.adam(1e-3), weight_decay=0.1)
    params, state, _ = train(tx, 2)
    update = updates_of(tx)
    _, grads, statistics = evaluate(params, X, Y)
    for poison in (jnp.nan, jnp.inf, -jnp.inf):
        name = "['v']"
        main = statistics[name].main
        bad = statistics[name]._replace(main=main._replace(A=main.A.at[0, 0, 0].set(poison)))
        poisoned = {
            "a layer's gradient": ({**grads, "w": grads["w"].at[0].set(poison)}, statistics),
            "a plain gradient": ({**grads, "scale": grads["scale"].at[0].set(poison)}, statistics),
            "statistics": (grads, replace(statistics, layers={**statistics.layers, name: bad})),
        }
        for where, (g, s) in poisoned.items():
            updates, after = update(g, state, params, statistics=s)
            jax.tree.map(lambda u: np.testing.assert_array_equal(u, jnp.zeros_like(u)), updates)
            assert int(after.skipped_steps) == 1, where
            assert int(after.preconditioner.steps) == 2
            old, new = state.preconditioner.factors, after.preconditioner.factors
            jax.tree.map(np.testing.assert_array_equal, (state[1:], old), (after[1:], new))
            updates, _ = update(grads, after, params, statistics=statistics)
            assert any(bool(jnp.any(u != 0)) for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@pytest.mark.parametrize("hidden", [6, 200])
def test_a_step_whose_factors_would_overflow_changes_nothing(hidden, method):
    """All of its sums are finite: those of a mean of N terms are multiplied by N²."""

    def loss(p, x, scale):
        return scale * jnp.mean(jnp.sum((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2, axis=1))

    params = {"w": normal(4, hidden), "v": normal(hidden, 3, seed=1) / hidden}
    params, x = jax.tree.map(lambda p: p.astype(jnp.float32), (params, normal(64, 4, seed=2)))
    vag = value_and_grad(loss)
    plan = vag.plan(params, x, 1.0)
    tx = kfac(plan, 0.1, compute_method=method, inv_update_steps=2 if method == "ekfac" else 1)
    update, state = jax.jit(tx.update), tx.init(params)

    def step(state, scale):
        bases = eigenbases(state, plan) if method == "ekfac" else None
        _, grads, statistics = vag(params, x, scale, bases=bases)
        return statistics, *update(grads, state, params, statistics=statistics)

    *_, state = step(state, 1.0)
    one, _, _ = step(state, 1.0)
    sums = [(s.main.G, s.main.products) for s in one.layers.values()]
    largest = max(float(jnp.max(x)) for x in jax.tree.leaves(sums))
    spike, updates, after = step(state, 1e19 / largest**0.5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(spike))
    assert int(after.skipped_steps) == 1
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, state[0].factors, after[0].factors)
    _, updates, after = step(after, 1.0)
    assert any(np.any(u) for u in jax.tree.leaves(updates))
    assert np.all(after.preconditioner.factors.failures == 0)


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_a_spike_between_statistics_is_clipped_or_skipped(method):
    """A clipped step does not depend on the gradient's scale; single precision ends at 1.8e19."""
    single = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
    vag = value_and_grad(loss_fn)
    x, y = X.astype(jnp.float32), Y.astype(jnp.float32)
    tx = scale_by_kfac(vag.plan(single, x, y), lr=0.1, kl_clip=1e-6, compute_method=method)
    _, grads, statistics = vag(single, x, y)
    _, state = tx.update(grads, tx.init(single), statistics=statistics)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
    layers = {leaf for layer in vag.plan(single, x, y).layers for leaf in (layer.leaf, layer.bias)}

    def moved(scale):
        spiked = jax.tree.map(lambda g: g / largest * scale, grads)
        found, after = tx.update(spiked, state, statistics=None)
        own = [x for i, x in enumerate(jax.tree.leaves(found)) if i in layers]
        return own, int(after.skipped_steps)

    expected, _ = moved(1.0)
    assert all(bool(jnp.any(x != 0)) for x in expected)
    for scale in (1e10, 1e15, 1e19, 1e20, 1e30, 1e37):  # the sum for kl_clip overflows at 1e19
        found, skipped = moved(jnp.float32(scale))
        assert skipped == (scale > 1.8e19), scale
        for one, other in zip(expected, found, strict=True):
            wanted = one if scale < 1e18 else jnp.zeros_like(one)
            np.testing.assert_allclose(other, wanted, rtol=1e-4, atol=1e-8, err_msg=str(scale))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 1), (4, 1), (64, 1), (1, 4), (4, 5), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_squares_that_overflow_are_seen_under_jit(shape, dtype):
    """Compilers join constant factors."""
    told = jax.jit(functools.partial(all_finite, power=2))
    for value, expected in ((1e17, True), (1e20, False), (-1e30, False), (jnp.nan, False)):
        x = jnp.zeros(shape, dtype).reshape(-1).at[-1].set(value).reshape(shape)
        assert bool(told({"x": x, "others": jnp.zeros((3, 3))})) == expected, value
        assert bool(jax.jit(all_finite)(x)) == (not jnp.isnan(value))


def test_entries_of_a_leaf_that_no_layer_reads_stay_too():
    """In a step that is not finite; a clip before has made all of its gradients NaN."""
    params = {"w": normal(4, 5), "head": normal(5, 8, seed=1), "b": normal(3, seed=2)}
    x = normal(8, 4, seed=3)

    def loss(p, x):
        hidden = jnp.tanh(x @ p["w"])
        return jnp.mean((hidden @ p["head"][:, :3]) * jnp.sin(hidden @ p["head"][:, 4:7] + p["b"]))

    vag = value_and_grad(loss)
    plan = vag.plan(params, x)
    assert [layer.name for layer in plan.layers if layer.leaf == 1] == [
        "['head'] part 0",
        "['head'] part 1",
    ]
    tx = optax.chain(optax.clip_by_global_norm(1.0), kfac(plan, 0.1))
    state = tx.init(params)
    _, grads, statistics = vag(params, x.at[0, 0].set(jnp.nan))
    updates, after = jax.jit(tx.update)(grads, state, params, statistics=statistics)
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, jnp.zeros_like(u)), updates)
    jax.tree.map(np.testing.assert_array_equal, state[1].momentum, after[1].momentum)


def test_what_was_due_in_a_skipped_step_is_due_in_the_next():
    tx = scale_by_kfac(PLAN, factor_update_steps=5, inv_update_steps=10)
    update = updates_of(tx)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    bad = {**grads, "w": grads["w"] * jnp.nan}
    _, state = update(bad, tx.init(PARAMS), PARAMS, statistics=statistics)
    assert not bool(jnp.any(state.factors.ready))
    _, state = update(grads, state, PARAMS, statistics=statistics)
    assert bool(jnp.all(state.factors.ready))


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
    jax.tree.map(np.testing.assert_array_equal, first.factors, second.factors)


@pytest.mark.parametrize("fallback", [None, optax.adamw(1e-3)])
def test_what_has_no_update_may_be_anything(fallback):
    """In `params`, as for optax's own: a model of equinox's is given whole, with its functions."""

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["w"]) * jax.nn.softplus(p["s"])) ** 2)

    arrays = {"w": normal(3, 4), "s": normal(4), "activation": None}
    vag = value_and_grad(loss)
    tx = kfac(vag.plan(arrays, normal(8, 3)), 0.1, weight_decay=0.1, fallback=fallback)
    _, grads, statistics = vag(arrays, normal(8, 3))
    state, whole = tx.init(arrays), {**arrays, "activation": jnp.tanh}
    got, expected = (tx.update(grads, state, p, statistics=statistics)[0] for p in (whole, arrays))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


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
        ({"inv_update_steps": np.bool_(True)}, TypeError, "inv_update_steps must be an integer"),
        ({"inv_update_steps": np.array(-1)}, ValueError, "inv_update_steps must be >= 1"),
        ({"compute_method": "cholesky"}, ValueError, "compute_method must be one of"),
        ({"loss_reduction": "none"}, ValueError, "loss_reduction must be one of"),
        ({"momentum": 1.0}, ValueError, "momentum"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay"),
        ({"dampnig": 0.1}, TypeError, "dampnig"),
        ({"warm_start": 1}, TypeError, "warm_start must be True or False"),
        ({"factor_dtype": jnp.float16}, ValueError, "factor_dtype must have the range"),
        ({"inv_dtype": jnp.float16}, ValueError, "inv_dtype must have the range"),
        (
            {"warm_start": True, "compute_method": "newton_schulz"},
            ValueError,
            "warm_start must be False without eigenbases",
        ),
        ({"factor_dtype": "int32"}, TypeError, "factor_dtype must be a floating dtype"),
        ({"inv_dtype": 4}, TypeError, "inv_dtype must be a floating dtype"),
        ({"inv_dtype": np.float32(1)}, TypeError, "inv_dtype must be a floating dtype"),
        ({"fallback": "adam"}, TypeError, "fallback must be an optax transformation"),
        ({"mesh": 8}, TypeError, "mesh must be a jax.sharding.Mesh"),
        ({"mesh": MESH, "axis_name": "model"}, ValueError, "axis_name must be an axis of mesh"),
        ({"gradient_worker_fraction": 0.5}, ValueError, "below 1 needs mesh="),
        (
            {"mesh": MESH, "gradient_worker_fraction": 1.5},
            ValueError,
            "gradient_worker_fraction must be",
        ),
        (
            {"mesh": MESH, "assignment_strategy": "speed"},
            ValueError,
            "assignment_strategy must be one of",
        ),
    ],
)
def test_bad_settings_are_errors(settings, error, message):
    with pytest.raises(error, match=message):
        kfac(PLAN, **{"learning_rate": 0.1, **settings})


def test_what_does_not_fit_the_plan_is_an_error():
    with pytest.raises(TypeError, match="plan must come from"):
        scale_by_kfac({"w": 1})
    with pytest.raises(TypeError, match="plan must come from"):
        eigenbases(scale_by_kfac(PLAN).init(PARAMS), {"w": 1})
    with pytest.raises(ValueError, match=r"^lr must be >= 0, got -1"):
        scale_by_kfac(PLAN, lr=-1)
    with pytest.raises(TypeError, match="plain must be a sequence of names, got 5"):
        value_and_grad(lambda params: 0.0, plain=5)
    tx = scale_by_kfac(PLAN)
    with pytest.raises(ValueError, match="structure and shapes"):
        tx.init({"w": jnp.ones((4, 6))})
    _, grads, statistics = evaluate(PARAMS, X, Y)
    state, only = tx.init(PARAMS), {"['v']": statistics["['v']"]}
    with pytest.raises(ValueError, match=r"missing .*\['w'\].*Make the plan with"):
        tx.update(grads, state, PARAMS, statistics=replace(statistics, layers=only))
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
    assert {x.dtype for x in state.preconditioner.factors.averages} == {jnp.dtype(jnp.float32)}


# ---- statistics that do not come -----------------------------------------------------------------


def test_updates_without_statistics_are_an_error_or_counted():
    tx = kfac(PLAN, 0.1, factor_update_steps=2)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    state = tx.init(PARAMS)
    with pytest.raises(TypeError, match="needs statistics=, the third result"):
        tx.update(grads, state, PARAMS)
    with pytest.raises(TypeError, match=r"must be what suite\.jax\.value_and_grad returns, got dict"):
        tx.update(grads, state, PARAMS, statistics={"a": 1})
    update = updates_of(tx)
    missed = []
    for given in (None, None, PLAN.no_statistics(), statistics, statistics, None):
        _, state = update(grads, state, PARAMS, statistics=given)
        missed.append(int(state.missed_updates))
    assert missed == [0, 0, 1, 1, 1, 1]  # the update of the third step is that of the fourth


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_an_update_takes_the_next_statistics_where_its_own_did_not_come(method):
    settings = {"damping": 0.01, "kl_clip": None, "compute_method": method}
    tx = scale_by_kfac(PLAN, factor_update_steps=4, inv_update_steps=10, **settings)
    plain = scale_by_kfac(PLAN, **(settings | {"inv_update_steps": 10}))  # every update is due
    own, expected = tx.init(PARAMS), plain.init(PARAMS)
    update, reference = updates_of(tx), updates_of(plain)

    def given(seed, state):
        params = jax.tree.map(lambda p: p * (1 + 0.1 * seed), PARAMS)
        bases = eigenbases(state, PLAN) if method == "ekfac" else None
        return evaluate(params, X, Y, bases=bases)[1:]

    # Steps that are due: 0, 4, 8, 12. Late are those of 0 and 8, which come in steps 2 and 9.
    for step in range(13):
        grads, statistics = given(step, own)
        comes = step in (2, 3, 4, 5, 9, 11, 12)
        directions, own = update(grads, own, PARAMS, statistics=statistics if comes else None)
        if step in (2, 4, 9, 12):  # not 3, 5 and 11, of which none is due
            expected = expected._replace(steps=own.steps - 1 if step > 2 else expected.steps)
            plainly, expected = reference(grads, expected, PARAMS, statistics=statistics)
            assert_trees_close(directions, plainly)
            assert_trees_close(own.factors.averages, expected.factors.averages)
        if step == 10:  # inverses are due
            expected = expected._replace(steps=own.steps - 1)
            plainly, expected = reference(grads, expected, PARAMS, statistics=None)
            assert_trees_close(directions, plainly)
        assert bool(own.pending) == (step in (0, 1, 8))
    assert int(own.missed_updates) == 0


def test_a_skipped_step_does_not_part_updates_from_the_steps_that_capture():
    tx = kfac(PLAN, 0.01, damping=0.01, factor_update_steps=5, inv_update_steps=5)

    @jax.jit
    def step(carry, i):
        params, state = carry
        _, grads, statistics = VAG(params, X, Y, capture=i % 5 == 0)
        grads = jax.tree.map(lambda g: jnp.where(i == 2, jnp.nan, g), grads)
        updates, new = tx.update(grads, state, params, statistics=statistics)
        old = state.preconditioner.factors.weight
        moved = jnp.any(new.preconditioner.factors.weight != old)
        return (optax.apply_updates(params, updates), new), moved

    (_, state), moved = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), jnp.arange(26))
    assert np.flatnonzero(moved).tolist() == [0, 10, 15, 20, 25]  # in step 5 the next was not due yet
    assert int(state.skipped_steps) == 1
    assert int(state.missed_updates) == 0


def test_pending_updates_survive_steps_that_are_not_finite():
    tx = scale_by_kfac(PLAN, factor_update_steps=5)
    update = updates_of(tx)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    bad = {**grads, "w": grads["w"] * jnp.nan}
    _, state = update(grads, tx.init(PARAMS), PARAMS, statistics=None)
    _, state = update(bad, state, PARAMS, statistics=statistics)
    assert bool(state.pending)
    assert not np.any(state.factors.weight)
    _, state = update(grads, state, PARAMS, statistics=statistics)
    assert not bool(state.pending)
    assert np.all(state.factors.weight > 0)


# ---- composition ---------------------------------------------------------------------------------


def run(tx, steps=4, params=PARAMS, vag=VAG):
    """Parameters after some steps, and the state."""
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        _, grads, statistics = vag(params, X, Y)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def assert_trees_close(a, b, rtol=1e-9):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-12), a, b)


def test_a_gradient_stays_plain_until_both_of_its_inverses_are_there():
    tx = scale_by_kfac(PLAN, compute_method="inverse", damping=0.0, factor_decay=0.0, kl_clip=None)
    update = updates_of(tx)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    layer = next(layer.name for layer in PLAN.layers if "v" in layer.name)
    sums = statistics[layer].main
    singular = sums.G.at[..., 1].set(0.0).at[..., 1, :].set(0.0)
    without = replace(
        statistics,
        layers={
            **statistics.layers,
            layer: statistics[layer]._replace(main=sums._replace(G=singular)),
        },
    )
    first, state = update(grads, tx.init(PARAMS), PARAMS, statistics=without)
    np.testing.assert_array_equal(first["v"], grads["v"])
    assert np.abs(first["w"] - grads["w"]).max() > 1e-3
    assert int(state.factors.failures.sum()) == 1
    second, state = update(grads, state, PARAMS, statistics=statistics)
    A = np.asarray(sums.A[0]) / float(sums.rows[0])
    G = np.asarray(sums.G[0]) * float(statistics.terms)
    expected = np.linalg.solve(A, np.asarray(grads["v"])) @ np.linalg.inv(G)
    np.testing.assert_allclose(second["v"], expected, rtol=1e-9)
    third, state = update(grads, state, PARAMS, statistics=without)
    np.testing.assert_allclose(third["v"], expected, rtol=1e-9)
    assert int(state.factors.failures.sum()) == 2


def test_masked_and_partitioned_leaves_are_left_to_others():
    mask = {"w": True, "b": True, "v": False, "scale": False}
    masked = optax.chain(optax.masked(scale_by_kfac(PLAN, kl_clip=None), mask), optax.scale(-0.1))
    labels = {name: "kfac" if mine else "sgd" for name, mine in mask.items()}
    partition = optax.partition(
        {
            "kfac": optax.chain(scale_by_kfac(PLAN, kl_clip=None), optax.scale(-0.1)),
            "sgd": optax.sgd(0.1),
        },
        labels,
    )
    (one, state), (other, _) = run(masked), run(partition)
    assert_trees_close(one, other)
    plain, _ = run(
        optax.chain(optax.masked(scale_by_kfac(PLAN), dict.fromkeys(mask, False)), optax.scale(-0.1)), 1
    )
    first, _ = run(masked, 1)
    np.testing.assert_allclose(first["v"], plain["v"], rtol=1e-12)
    assert np.abs(first["w"] - plain["w"]).max() > 1e-3
    shapes = [
        x.shape
        for f in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "averages"))
        if hasattr(f, "averages")
        for x in f.averages
    ]
    assert shapes == [(1, 5, 5), (1, 6, 6)]
    with pytest.raises(ValueError, match="masked together"):
        optax.masked(scale_by_kfac(PLAN), {**mask, "b": False}).init(PARAMS)


def test_one_label_covers_a_whole_subtree_as_optax_has_it():
    """As if the plan had left that alone, and its optimizer were the fallback."""
    params = {
        "trunk": {"w": PARAMS["w"], "b": PARAMS["b"]},
        "head": {"v": PARAMS["v"], "c": jnp.ones(2)},
    }

    def loss(p, x, y):
        hidden = jnp.tanh(x @ p["trunk"]["w"] + p["trunk"]["b"])
        return jnp.mean(jnp.sum((hidden @ p["head"]["v"] + p["head"]["c"] - y) ** 2, 1))

    settings = {"damping": 0.01, "weight_decay": 0.1}
    decays = {"trunk": {"w": True, "b": False}, "head": {"v": True, "c": False}}
    alone = value_and_grad(loss, plain=["['head']['v']", "['head']['c']"])
    by_hand = kfac(
        alone.plan(params, X, Y), 0.1, fallback=optax.adam(0.01), **settings,
        weight_decay_mask={**decays, "head": False},
    )  # fmt: skip
    vag = value_and_grad(loss)
    ours = kfac(vag.plan(params, X, Y), 0.1, **settings, weight_decay_mask=decays)
    frozen = optax.transforms.selective_transform(ours, freeze_mask={"trunk": False, "head": True})
    mine, others = {"trunk": True, "head": False}, {"trunk": False, "head": True}
    of_labels = [
        optax.partition({"k": ours, "a": optax.adam(0.01)}, {"trunk": "k", "head": "a"}),
        optax.chain(optax.masked(ours, mine), optax.masked(optax.adam(0.01), others)),
    ]

    def trained(vag, tx):
        @jax.jit
        def step(params, state):
            _, grads, statistics = vag(params, X, Y)
            updates, state = tx.update(grads, state, params, statistics=statistics)
            return optax.apply_updates(params, updates), state

        moved, state = params, tx.init(params)
        for _ in range(3):
            moved, state = step(moved, state)
        return moved

    expected = trained(alone, by_hand)
    for tx in of_labels:
        assert_trees_close(trained(vag, tx), expected)
    held = trained(vag, frozen)
    jax.tree.map(np.testing.assert_array_equal, held["head"], params["head"])
    assert np.abs(held["trunk"]["w"] - params["trunk"]["w"]).max() > 1e-3
    all_of_it = optax.masked(scale_by_kfac(vag.plan(params, X, Y)), False)
    updates, _ = all_of_it.update(params, all_of_it.init(params), params, statistics=None)
    jax.tree.map(np.testing.assert_array_equal, updates, params)


def test_injected_hyperparameters():
    make = optax.inject_hyperparams(kfac)
    tx = make(
        PLAN,
        learning_rate=optax.linear_schedule(0.1, 0.0, 10),
        damping=lambda t: 0.01 / (1 + t),
        momentum=0.5,
        weight_decay=0.01,
        kl_clip=0.1,
        factor_decay=0.9,
        inv_update_steps=2,
    )
    same = kfac(
        PLAN,
        optax.linear_schedule(0.1, 0.0, 10),
        damping=lambda t: 0.01 / (1 + t),
        momentum=0.5,
        weight_decay=0.01,
        kl_clip=0.1,
        factor_decay=0.9,
        inv_update_steps=2,
    )
    (one, state), (other, _) = run(tx), run(same)
    assert_trees_close(one, other, 1e-5)  # injected numbers are float32
    assert set(state.hyperparams) >= {"learning_rate", "damping", "momentum", "kl_clip", "factor_decay"}


def test_multi_steps_takes_the_last_statistics_of_each_group():
    tx = optax.MultiSteps(kfac(PLAN, 0.1, damping=0.01), every_k_schedule=2)
    several, state = run(tx, 6)
    expected, _ = run(kfac(PLAN, 0.1, damping=0.01), 3)
    assert_trees_close(several, expected, 1e-5)  # it accumulates in float32
    assert int(state.inner_opt_state.preconditioner.steps) == 3


def test_capture_in_the_micro_step_that_multi_steps_takes_statistics_of():
    """As README has it."""
    plain = kfac(PLAN, 0.1, damping=0.01, factor_update_steps=2)
    tx = optax.MultiSteps(plain, every_k_schedule=3)

    @jax.jit
    def step(params, state):
        due = (state.inner_opt_state.preconditioner.steps % 2 == 0) & (state.mini_step == 2)
        _, grads, statistics = VAG(params, X, Y, capture=due)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(12):
        params, state = step(params, state)
    expected, _ = run(plain, 4)
    assert_trees_close(params, expected, 1e-5)  # it accumulates in float32
    assert int(state.inner_opt_state.preconditioner.missed_updates) == 0


def test_apply_if_finite_around():
    tx = optax.apply_if_finite(kfac(PLAN, 0.1), 3)
    assert_trees_close(run(tx)[0], run(kfac(PLAN, 0.1))[0])


@pytest.mark.parametrize(
    "name", ["factor_update_steps", "inv_update_steps", "damping", "factor_decay", "kl_clip"]
)
def test_every_hyperparameter_takes_a_schedule(name):
    value = {"factor_update_steps": 2, "inv_update_steps": 2, "damping": 0.1, "factor_decay": 0.5}
    constant = value.get(name, 0.01)
    moving = kfac(
        PLAN, 0.1, **{name: lambda t: jnp.where(t < 2, constant, 1 - 0.5 * (name == "factor_decay"))}
    )
    fixed = kfac(PLAN, 0.1, **{name: constant})
    scheduled = kfac(PLAN, 0.1, **{name: lambda t: constant})
    assert_trees_close(run(scheduled)[0], run(fixed)[0])
    if name != "factor_decay":
        far = run(moving, 6)[0]["w"] - run(fixed, 6)[0]["w"]
        assert np.abs(far).max() > 1e-9


@pytest.mark.parametrize("method", ["eigen", "inverse", "newton_schulz", "ekfac"])
def test_every_compute_method_trains(method):
    tx = kfac(PLAN, 0.1, damping=0.01, compute_method=method, inv_update_steps=3)
    state, params, losses = tx.init(PARAMS), PARAMS, []

    @jax.jit
    def step(params, state):
        bases = eigenbases(state, PLAN) if method == "ekfac" else None
        loss, grads, statistics = VAG(params, X, Y, bases=bases)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(30):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert int(state.preconditioner.factors.failures.max()) == 0


def test_ekfac_is_the_dense_correction():
    tx = scale_by_kfac(PLAN, damping=0.1, kl_clip=None, compute_method="ekfac", inv_update_steps=10)
    state = tx.init(PARAMS)
    _, grads, statistics = jax.jit(lambda: VAG(PARAMS, X, Y, bases=eigenbases(state, PLAN)))()
    _, state = updates_of(tx)(grads, state, PARAMS, statistics=statistics)
    _, grads, statistics = jax.jit(lambda: VAG(PARAMS, X, Y, bases=eigenbases(state, PLAN)))()
    directions, _ = updates_of(tx)(grads, state, PARAMS, statistics=statistics)
    U_A, U_G = (np.asarray(u[0]) for u in eigenbases(state, PLAN)["['v']"])
    hidden = np.tanh(X @ PARAMS["w"] + PARAMS["b"]) * PARAMS["scale"]
    g = 2 * (hidden @ PARAMS["v"] - Y) / 16
    second = 16 * ((g @ U_G) ** 2).T @ ((hidden @ U_A) ** 2)
    first = np.outer(
        np.diag(U_G.T @ (16 * g.T @ g) @ U_G), np.diag(U_A.T @ (hidden.T @ hidden / 16) @ U_A)
    )
    S = 0.95 * first + 0.05 * second
    gradient = U_G.T @ np.asarray(grads["v"]).T @ U_A
    expected = (U_G @ (gradient / (S + 0.1)) @ U_A.T).T
    np.testing.assert_allclose(directions["v"], expected, rtol=1e-7)
    with pytest.raises(ValueError, match="needs second moments in its eigenbases"):
        tx.update(grads, state, PARAMS, statistics=evaluate(PARAMS, X, Y)[2])
    with pytest.raises(ValueError, match="keeps inverses"):
        eigenbases(scale_by_kfac(PLAN, compute_method="inverse").init(PARAMS), PLAN)
    with pytest.raises(ValueError, match="one state of scale_by_kfac, got 0"):
        eigenbases((), PLAN)


def test_warm_starts_approach_the_eigenbasis():
    warm, cold = (scale_by_kfac(PLAN, damping=0.01, kl_clip=None, warm_start=w) for w in (True, False))
    _, grads, statistics = evaluate(PARAMS, X, Y)
    exact, state = updates_of(cold)(grads, cold.init(PARAMS), PARAMS, statistics=statistics)
    update, state = updates_of(warm), warm.init(PARAMS)
    # A first refresh of other factors gives a basis to start from that is wrong.
    other = jax.jit(VAG)(jax.tree.map(lambda p: -2 * p + 1, PARAMS), X, Y)[2]
    _, state = update(grads, state, PARAMS, statistics=other)
    errors = []
    for _ in range(150):
        found, state = update(grads, state, PARAMS, statistics=statistics)
        errors.append(float(jnp.abs(found["w"] - exact["w"]).max() / jnp.abs(exact["w"]).max()))
    assert errors[0] > 0.1
    assert errors[-1] < 0.05


def test_the_state_dtype_policy():
    plan = VAG.plan(jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS), X, Y)
    params = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
    tx = scale_by_kfac(plan, factor_dtype=jnp.bfloat16, inv_dtype=jnp.float32)
    state = tx.init(params)
    _, grads, statistics = jax.jit(VAG)(params, X.astype(jnp.float32), Y.astype(jnp.float32))
    updates, after = updates_of(tx)(grads, state, params, statistics=statistics)
    assert {x.dtype for x in after.factors.averages} == {jnp.dtype(jnp.bfloat16)}
    assert {x.values.dtype for x in after.factors.inverses} == {jnp.dtype(jnp.float32)}
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    assert all(bool(jnp.all(jnp.isfinite(u))) for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("last", ["value", "policy"])
def test_a_head_of_one_output_is_damped_also_where_it_shares_its_input(last):
    names = ["one", "two"] if last == "policy" else ["two", "one"]
    params = dict(zip(names, [normal(4, 1), normal(4, 3)], strict=True))

    def loss(params, x):
        value, policy = x @ params[names[0]], x @ params[names[1]]
        return jnp.mean(jnp.sum(policy**2, 1) + 1e-8 * value[:, 0] ** 2)

    vag = value_and_grad(loss)
    plan = vag.plan(params, X)
    assert len({layer.input_of or layer.name for layer in plan.layers}) == 1
    _, grads, statistics = vag(params, X)
    tx = scale_by_kfac(plan, compute_method="inverse", damping=0.01, kl_clip=None)
    directions, _ = updates_of(tx)(grads, tx.init(params), params, statistics=statistics)
    A = np.asarray(X.T @ X) / len(X)
    g = [float(np.mean(np.square(2 * s * X @ params[n]))) for n, s in zip(names, (1e-8, 1), strict=True)]
    pi = np.sqrt(np.trace(A) / 4 / np.mean(g))
    damped = (A + pi * 0.1 * np.eye(4)) * (g[0] + 0.1 / pi)
    expected = np.linalg.solve(damped, np.asarray(grads[names[0]]))
    np.testing.assert_allclose(directions[names[0]], expected, rtol=1e-9)


def test_what_is_not_a_number_though_the_step_is_finite_stays_to_be_seen():
    plan = value_and_grad(loss_fn, plain=["['scale']"]).plan(PARAMS, X, Y)
    _, grads, statistics = evaluate(PARAMS, X, Y)
    layers = {layer.name: statistics[layer.name] for layer in plan.layers}
    tx = kfac(plan, 0.1, fallback=optax.sgd(float("nan")))
    given = replace(statistics, layers=layers)
    updates, state = updates_of(tx)(grads, tx.init(PARAMS), PARAMS, statistics=given)
    assert int(state.skipped_steps) == 0
    assert np.isnan(updates["scale"]).all()
    assert np.isfinite(updates["w"]).all()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool, jnp.bfloat16, jnp.complex64])
def test_zeros_of_any_dtype_in_a_step_that_is_not_finite(dtype):
    x = jnp.ones(3, dtype)
    for condition in (True, False):
        found = zero_unless(jnp.asarray(condition), x)
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, x if condition else jnp.zeros_like(x))


def test_a_triangular_system_may_vary_over_devices_where_its_right_side_does_not():
    x, y = jnp.triu(normal(3, 4, 4)) + 4 * jnp.eye(4), normal(3, 4, 2)
    spec = jax.sharding.PartitionSpec("data")

    def solve(own):
        return linalg.solve_triangular(own, y, upper=True)

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    found = jax.jit(jax.shard_map(solve, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    np.testing.assert_allclose(x @ found, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_without_jit_steps_are_the_same(method):
    tx, found = kfac(PLAN, 0.1, damping=0.1, compute_method=method), []
    for disabled in (False, True):
        with jax.disable_jit(disabled):
            _, grads, statistics = VAG(PARAMS, X, Y)
            found.append(tx.update(grads, tx.init(PARAMS), PARAMS, statistics=statistics)[0])
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_a_mask_of_weight_decay_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="weight_decay_mask must have the structure of the parameters"):
        kfac(PLAN, 0.1, weight_decay=0.1, weight_decay_mask={"w": True}).init(PARAMS)


def test_a_state_of_another_method_or_plan_is_an_error():
    def loss_fn(p, x):
        return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)

    params, x = {"a": jnp.ones((5, 4)), "b": jnp.ones((4, 3))}, jnp.ones((6, 5))
    vag = value_and_grad(loss_fn)
    plan = vag.plan(params, x)
    _, grads, statistics = vag(params, x)
    states = [
        scale_by_kfac(plan, compute_method="eigen").init(params),
        scale_by_kfac(value_and_grad(loss_fn, plain=["['a']"]).plan(params, x)).init(params),
    ]
    tx = scale_by_kfac(plan, compute_method="inverse")
    for state in states:
        with pytest.raises(ValueError, match="with this plan and compute_method='inverse'"):
            tx.update(grads, state, params, statistics=statistics)


def test_a_run_has_derivatives_both_ways():
    """By its data, as in distillation."""

    def loss_fn(p, x):
        return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - 1) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    start = {"a": jax.random.normal(keys[0], (5, 4)), "b": jax.random.normal(keys[1], (4, 3))}
    data = jax.random.normal(keys[2], (9, 5))
    vag = value_and_grad(loss_fn)
    plan = vag.plan(start, data)
    tx = kfac(plan, 0.1, damping=0.05, compute_method="inverse")

    @jax.jit
    def end(shift):
        params, state, x = start, tx.init(start), data + shift * jnp.cos(data)
        for _ in range(3):
            _, grads, statistics = vag(params, x)
            updates, state = tx.update(grads, state, params, statistics=statistics)
            params = optax.apply_updates(params, updates)
        return loss_fn(params, data)

    expected = (end(1e-5) - end(-1e-5)) / 2e-5
    _, forward = jax.jvp(end, (0.0,), (1.0,))
    np.testing.assert_allclose(forward, expected, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(end)(0.0), forward, rtol=1e-9)


@pytest.mark.parametrize("condition", ["varies", "is one for all"])
@pytest.mark.parametrize("parts", ["vary", "are one for all", "both"])
def test_a_sum_if_in_shard_map_takes_what_varies_and_what_does_not(condition, parts):
    """As gradients of some leaves that are averaged over devices, and local ones of others."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = jax.sharding.PartitionSpec("d")

    def local(x):
        constant = jnp.asarray(2.0)
        own = {"vary": [x[0], x[0]], "are one for all": [constant] * 2, "both": [constant, x[0]]}
        holds = x[0] > 0 if condition == "varies" else constant > 0
        return sum_if(holds, own[parts]) + 0 * x

    for value, expected in ((2.0, 4.0), (-2.0, {"vary": -4.0, "both": 0.0}.get(parts, 4.0))):
        found = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.asarray([value]))
        holds = value > 0 or condition == "is one for all"
        assert float(found[0]) == (expected if holds else 0.0)


def test_a_sum_if_drops_what_is_not_finite():
    parts = [jnp.asarray(jnp.nan), jnp.asarray(1.0)]
    assert float(sum_if(jnp.asarray(False), parts)) == 0.0
    each = jax.vmap(lambda holds, x: sum_if(holds, [x, 2 * x]))
    np.testing.assert_array_equal(
        each(jnp.asarray([True, False]), jnp.asarray([1.0, jnp.inf])), [3.0, 0.0]
    )
