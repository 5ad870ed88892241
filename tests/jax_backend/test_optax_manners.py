"""What every transformation of ours owes optax: one table, and the tests that all rows pass.

After optax's own common tests of its contributed optimizers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from suite.jax import dense_newton, kron, lra, scale_by_dense, scale_by_kron, scale_by_lra

pytestmark = pytest.mark.slow

# name: (factory, settings that suit the problems below, whether it is given the loss)
TRANSFORMATIONS = {
    "kron": (kron, {"learning_rate": 0.03}, False),
    "kron newton": (kron, {"learning_rate": 0.1, "min_ndim_triangular": np.int64(1)}, True),
    "lra": (lra, {"learning_rate": 0.03, "rank": np.int64(1)}, False),
    "lra newton": (lra, {"learning_rate": 0.1, "rank": np.int64(1)}, True),
    "dense newton": (dense_newton, {"learning_rate": 0.2, "clip": 1.0}, True),
}
every_transformation = pytest.mark.parametrize("name", TRANSFORMATIONS)


def parabola(dtype):
    target = jnp.asarray([1.0, -1.0], dtype)
    return jnp.asarray([-1.0, 10.0], dtype), target, lambda p: jnp.sum((p - target) ** 2)


def rosenbrock(dtype):
    def value(p):
        return jnp.sum(100.0 * (p[1] - p[0] ** 2) ** 2 + (1.0 - p[0]) ** 2)

    return jnp.asarray([0.0, 0.0], dtype), jnp.asarray([1.0, 1.0], dtype), value


def mixed(dtype):
    """A matrix, a vector and a scalar of different sizes of gradient."""
    target = {
        "w": jnp.asarray(np.arange(6.0).reshape(2, 3) / 6, dtype),
        "b": jnp.asarray([2.0], dtype),
        "s": jnp.asarray(-1.0, dtype),
    }

    def value(p):
        parts = jax.tree.map(lambda x, t: jnp.sum((x - t) ** 2), p, target)
        return parts["w"] + 10 * parts["b"] + 0.1 * parts["s"]

    return jax.tree.map(jnp.zeros_like, target), target, value


PROBLEMS = {"parabola": (parabola, 1500), "rosenbrock": (rosenbrock, 3000), "mixed": (mixed, 1500)}


def build(name, **more):
    factory, settings, newton = TRANSFORMATIONS[name]
    settings = settings | more
    return factory(**settings), newton


def step_of(tx, value, newton):
    def step(carry, _):
        params, state = carry
        extra = {"value_fn": value} if newton else {}
        updates, state = tx.update(jax.grad(value)(params), state, params, **extra)
        return (optax.apply_updates(params, updates), state), None

    return step


def train(tx, params, value, newton, steps):
    step = step_of(tx, value, newton)
    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=steps)[0])
    return run((params, tx.init(params)))


@pytest.mark.parametrize("problem", PROBLEMS)
@every_transformation
def test_it_finds_the_minimum(name, problem):
    make, steps = PROBLEMS[problem]
    params, target, value = make(jnp.float32)
    factory, settings, newton = TRANSFORMATIONS[name]
    rate = optax.cosine_decay_schedule(settings["learning_rate"], steps)
    tx = factory(**(settings | {"learning_rate": rate}))
    found, state = train(tx, params, value, newton, steps)
    assert float(value(found)) < 2e-3
    if problem != "rosenbrock":
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.06), found, target)
    assert int(state.skipped_steps) == 0


@every_transformation
def test_inject_hyperparams_without_naming_static_arguments(name):
    factory, settings, newton = TRANSFORMATIONS[name]
    _, _, value = mixed(jnp.float32)
    params = mixed(jnp.float32)[0]
    schedule = optax.linear_schedule(settings["learning_rate"], 0.0, 20)
    injected = optax.inject_hyperparams(factory)(**(settings | {"learning_rate": schedule}))
    after, state = train(injected, params, value, newton, 10)
    expected, _ = train(factory(**(settings | {"learning_rate": schedule})), params, value, newton, 10)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), after, expected)
    for hyperparameter in ("learning_rate", "b1", "betaL", "damping", "weight_decay"):
        assert state.hyperparams[hyperparameter].shape == ()
    # and it can be changed from outside
    state.hyperparams["b1"] = jnp.asarray(0.5, jnp.float32)
    injected.update(jax.grad(value)(after), state, after)


@every_transformation
def test_multi_steps_equals_the_step_of_the_mean_gradient(name):
    tx, newton = build(name)
    params, _, value = mixed(jnp.float32)
    every = optax.MultiSteps(tx, 2)
    whole, _ = train(tx, params, value, newton, 5)
    step = jax.jit(step_of(every, value, newton))
    carry = (params, every.init(params))
    for _ in range(10):
        carry, _ = step(carry, None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), whole, carry[0])


@every_transformation
def test_in_a_chain(name):
    tx, newton = build(name)
    params, _, value = mixed(jnp.float32)
    chained = optax.chain(optax.clip_by_global_norm(1e6), tx, optax.scale(1.0))
    plain, _ = train(tx, params, value, newton, 5)
    found, _ = train(chained, params, value, newton, 5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), plain, found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@every_transformation
def test_dtypes_and_structure_of_updates_and_state_are_stable(name, dtype):
    tx, newton = build(name)
    params, _, value = mixed(jnp.dtype(dtype))
    before = tx.init(params)
    extra = {"value_fn": value} if newton else {}
    updates, after = jax.jit(lambda g, s, p: tx.update(g, s, p, **extra))(
        jax.grad(value)(params), before, params
    )
    assert jax.tree.map(lambda u: u.dtype, updates) == jax.tree.map(lambda p: p.dtype, params)
    types = [jax.tree.map(lambda x: (x.dtype, x.shape, x.weak_type), s) for s in (before, after)]
    assert types[0] == types[1]


@every_transformation
def test_no_second_compilation(name):
    tx, newton = build(name)
    params, _, value = mixed(jnp.float32)
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry):
        traces.append(1)
        return step_of(tx, value, newton)(carry, None)[0]

    carry = (jax.tree.map(jnp.copy, params), tx.init(params))
    for _ in range(3):
        carry = step(carry)
    assert len(traces) == 1


@every_transformation
def test_a_loss_that_is_not_finite_changes_nothing(name):
    tx, newton = build(name, weight_decay=0.1)
    params, _, value = mixed(jnp.float32)
    params, state = train(tx, params, value, newton, 3)

    def broken(p):
        return value(p) * jnp.nan

    (after, counted), _ = jax.jit(step_of(tx, broken, newton))((params, state), None)
    jax.tree.map(np.testing.assert_array_equal, params, after)
    assert int(counted.skipped_steps) == 1
    inner = counted.preconditioner._replace(skipped_steps=state.preconditioner.skipped_steps)
    jax.tree.map(np.testing.assert_array_equal, inner, state.preconditioner)


@pytest.mark.parametrize("scale", [scale_by_kron, scale_by_lra, scale_by_dense])
def test_a_pair_of_the_users_own(scale):
    params, _, value = mixed(jnp.float64)
    tx = scale()
    grads = jax.grad(value)(params)
    vector = jax.tree.map(lambda p: jnp.ones_like(p), params)
    hvp = jax.jvp(jax.grad(value), (params,), (vector,))[1]
    moved, state = tx.update(grads, tx.init(params), params, vector=vector, hvp=hvp)
    plain, _ = tx.update(grads, tx.init(params), params)
    assert int(state.updates) == 1
    assert not np.allclose(moved["w"], plain["w"])
    with pytest.raises(ValueError, match="vector and hvp"):
        tx.update(grads, state, params, vector=vector)
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(grads, state, value_fn=value)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        *((kron, "block_size", 64), (kron, "max_skew", 1.0), (kron, "seed", 1)),
        *((lra, "rank", 2), (lra, "seed", 1), (dense_newton, "seed", 1)),
    ],
)
def test_a_number_that_decides_on_the_program_must_be_static(make, name, value):
    tx = optax.inject_hyperparams(make)(learning_rate=0.1, **{name: value})
    with pytest.raises(TypeError, match=rf"{name} decides on the program.*static_args"):
        tx.init({"w": jnp.zeros((2, 2))})
    static = optax.inject_hyperparams(make, static_args=name)
    static(learning_rate=0.1, **{name: value}).init({"w": jnp.zeros((2, 2))})


@every_transformation
def test_finite_steps_outside_of_jit_show_no_nan_to_debug_nans(name):
    factory, settings, takes_loss = TRANSFORMATIONS[name]
    params, _, value = mixed("float32")
    tx = factory(**settings)
    state = tx.init(params)
    extra = {"value_fn": value} if takes_loss else {}
    with jax.debug_nans(True):
        updates, _ = tx.update(jax.grad(value)(params), state, params, **extra)
    assert all(jnp.any(u != 0) for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("make", [kron, lra, dense_newton])
def test_a_label_without_parameters_is_none(make):
    """Of `optax.partition`: the optimizer has an empty tree then."""
    tx = optax.partition({"a": make(0.1), "b": optax.sgd(0.1)}, {"x": "b"})
    params = {"x": jnp.ones(2)}
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    np.testing.assert_allclose(updates["x"], -0.1, rtol=1e-6)
    alone, _ = make(0.1).update({}, make(0.1).init({}), {})
    assert alone == {}
