"""`suite.jax.kron` and `scale_by_kron` as optax transformations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from suite.jax import dense_newton, kron, lra, routing, scale_by_kron


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


PARAMS = {"w": normal(4, 6), "b": jnp.zeros(6), "v": normal(6, 2, seed=2), "s": jnp.ones(())}
X, Y = normal(16, 4, seed=3), normal(16, 2, seed=4)


def loss_fn(params, scale=1.0):
    hidden = jnp.tanh(X @ params["w"] + params["b"]) * params["s"]
    return scale * jnp.mean((hidden @ params["v"] - Y) ** 2)


def train(tx, steps, params=PARAMS, scale=1.0):
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, scale)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return params, state, losses


@pytest.mark.parametrize("geometry", ["Q0.5EQ1.5", "QEQ", "QUAD", "EQ"])
def test_it_learns(geometry):
    _, _, losses = train(kron(0.01, geometry=geometry), 200)
    assert losses[-1] < 0.3 * losses[0]


def test_scaling_the_loss_leaves_the_trajectory_unchanged():
    plain, _, _ = train(kron(0.01, damping=0.0), 30)
    scaled, _, _ = train(kron(0.01, damping=0.0, preconditioner_init_scale=1 / 8), 30, scale=64.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), plain, scaled)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.chain(
            optax.masked(tx, {"w": True, "b": False, "v": True, "s": False}),
            optax.masked(optax.sgd(0.1), {"w": False, "b": True, "v": False, "s": True}),
        ),
        lambda tx: optax.multi_transform(
            {"kron": tx, "sgd": optax.sgd(0.1)}, {"w": "kron", "b": "sgd", "v": "kron", "s": "sgd"}
        ),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.flatten(tx),
    ],
    ids=["chain", "masked", "multi_transform", "apply_if_finite", "MultiSteps", "flatten"],
)
def test_it_composes(wrap):
    _, state, losses = train(wrap(kron(0.01)), 60)
    assert losses[-1] < losses[0]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_inject_hyperparams_with_a_schedule():
    static = ("b1", "weight_decay", "max_size_triangular", "min_ndim_triangular", "preconditioner_lr")
    static += ("preconditioner_init_scale", "target_merged_dim_size", "block_size", "betaL", "damping")
    static += ("seed", "preconditioner_update_probability")
    tx = optax.inject_hyperparams(kron, static_args=static)(
        learning_rate=optax.linear_schedule(0.01, 0.0, 10), preconditioner_update_probability=1.0
    )
    params, state, _ = train(tx, 11)
    after, _, _ = train(tx, 12)
    assert abs(float(state.hyperparams["learning_rate"])) < 1e-8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, after)


@pytest.mark.parametrize("injected", [False, True])
def test_the_mean_of_a_momentum_in_half_precision(injected):
    """In bfloat16 a b1 of 0.999 is 1."""
    never = {"preconditioner_update_probability": lambda t: 0.0 * t, "update_first": False}

    def make(b1, mu_dtype="bfloat16"):
        return kron(1.0, b1=b1, mu_dtype=mu_dtype, clip=None, **never)

    grads = {"w": jnp.ones((4, 4), jnp.float32)}

    def moved(tx):
        state, found = tx.init(grads), []
        for _ in range(20):
            updates, state = tx.update(grads, state, grads)
            found.append(float(updates["w"][0, 0]))
        return found

    tx = optax.inject_hyperparams(make)(b1=0.999) if injected else make(0.999)
    expected = moved(make(0.999, None))
    assert expected[0] != 0
    np.testing.assert_allclose(moved(tx), expected, rtol=0.05)


@pytest.mark.parametrize("quiet", [1e-5, 1e-4])
def test_float16_parameters_take_a_bounded_step_where_gradients_jump(quiet):
    params = {"w": jnp.ones((16, 8), jnp.float16)}
    tx = kron(0.01)
    state, update = tx.init(params), jax.jit(tx.update)
    for i in range(60):
        noise = jax.random.normal(jax.random.key(i), (16, 8)) * (10.0 if i == 50 else quiet)
        updates, state = update({"w": noise.astype(jnp.float16)}, state, params)
        assert updates["w"].dtype == jnp.float16
        assert float(jnp.sqrt(jnp.mean(jnp.square(updates["w"].astype(jnp.float32))))) < 1.2 * 0.01
        assert i < 50 or bool(jnp.any(updates["w"] != 0))
    assert int(state.skipped_steps) == 0


@pytest.mark.parametrize("make", [kron, lra])
def test_a_jump_by_all_that_a_float_holds_is_a_bounded_step_or_none(make):
    tx = make(0.01)
    params = {"w": jnp.ones((16, 8), jnp.float32)}
    state, update = tx.init(params), jax.jit(tx.update)
    for i, size in enumerate([1e-9] * 300 + [1e24, 1e30, 1e38]):
        noise = jnp.clip(jax.random.normal(jax.random.key(i), (16, 8), jnp.float32), -2, 2) * size
        updates, state = update({"w": noise}, state, params)
        assert bool(jnp.any(updates["w"] != 0)) == (size < 1e25), i
        assert float(jnp.sqrt(jnp.mean(jnp.square(updates["w"])))) < 1.2 * 0.01
    assert int(state.skipped_steps) == 2


@pytest.mark.parametrize("newton", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{"mu_dtype": jnp.float32}, {"precond_dtype": jnp.float32}, {"mu_dtype": jnp.bfloat16}, {}],
)
def test_a_gradient_of_double_precision_is_skipped_where_state_in_single_does_not_hold_it(
    settings, newton
):
    params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    tx = kron(0.01, **settings)
    state, update = tx.init(params), jax.jit(tx.update)
    for i in range(4):
        size = 1e60 if i == 2 else 1.0
        grads = jax.tree.map(lambda p, s=size: p * s, params)
        pair = {"vector": params, "hvp": grads} if newton else {}
        updates, state = update(params if newton else grads, state, params, **pair)
        moved = bool(jnp.any(updates["w"] != 0))
        assert moved != bool(i == 2 and settings), i
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(updates)), i
    assert int(state.skipped_steps) == len(settings)


def test_newton_needs_all_parameters_beside_masked_ones():
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}

    def loss(p):
        return jnp.sum(p["a"] @ p["b"]) ** 2

    tx = optax.masked(kron(0.01), {"a": True, "b": False})
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"value_fn must be None under optax\.masked"):
        tx.update(jax.grad(loss)(params), state, params, value_fn=loss)


def test_one_compilation_donation_and_scan():
    tx = kron(0.01, preconditioner_update_probability=0.5)
    traces = []

    def step(carry, _):
        traces.append(1)
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    compiled = jax.jit(step, donate_argnums=0)
    carry = (jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS))
    for _ in range(5):
        carry, _ = compiled(carry, None)
    assert len(traces) == 1
    scanned, _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), None, length=5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), scanned, carry)


@pytest.mark.parametrize("settings", [{"weight_decay": 0.1}, {"geometry": "EQ"}])
def test_a_step_that_is_not_finite_changes_nothing(settings):
    tx = kron(0.01, **settings)
    params, state, _ = train(tx, 2)
    grads = jax.jit(jax.grad(loss_fn))(params)
    update = jax.jit(tx.update)
    for poison in (jnp.nan, jnp.inf, -jnp.inf):
        bad = {**grads, "v": grads["v"].at[0, 0].set(poison)}
        updates, after = update(bad, state, params)
        jax.tree.map(lambda u: np.testing.assert_array_equal(u, jnp.zeros_like(u)), updates)
        assert int(after.skipped_steps) == 1
        for name in ("steps", "update_clock", "mu", "weight", "buckets"):
            old, new = getattr(state.preconditioner, name), getattr(after.preconditioner, name)
            jax.tree.map(np.testing.assert_array_equal, old, new)
        updates, _ = update(grads, after, params)
        assert all(bool(jnp.all(jnp.isfinite(u))) for u in jax.tree.leaves(updates))


def test_scanned_layers_are_independent_parameters():
    stacked = {"w": normal(3, 4, 5)}
    apart = {str(i): stacked["w"][i] for i in range(3)}
    together = scale_by_kron(scanned_layers={"w": True}, damping=0.0)
    single = scale_by_kron(damping=0.0)
    a, b = together.init(stacked), single.init(apart)
    update_together, update_single = jax.jit(together.update), jax.jit(single.update)
    for seed in range(5):
        g = normal(3, 4, 5, seed=seed)
        u, a = update_together({"w": g}, a)
        v, b = update_single({str(i): g[i] for i in range(3)}, b)
        for i in range(3):
            np.testing.assert_allclose(u["w"][i], v[str(i)], rtol=1e-10)
    with pytest.raises(ValueError, match="scanned_layers must have the structure"):
        scale_by_kron(scanned_layers=[True]).init(stacked)
    for value in (2, "yes"):
        with pytest.raises(TypeError, match=f"scanned_layers must be True or False, got {value!r}"):
            scale_by_kron(scanned_layers={"w": value}).init(stacked)


@pytest.mark.parametrize("make", [kron, lra, dense_newton])
def test_newton_of_parameters_that_differ_between_devices(make):
    """Members of an ensemble, one on each device of the user's own shard_map."""
    tx, members = make(0.1), jax.tree.map(lambda leaf: leaf[None], PARAMS)

    def step(members):
        params = jax.tree.map(lambda leaf: leaf[0], members)
        updates, _ = tx.update(jax.grad(loss_fn)(params), tx.init(params), params, value_fn=loss_fn)
        return jax.tree.map(lambda leaf: leaf[None], updates)

    spec = jax.sharding.PartitionSpec("members")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("members",))
    found = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec))(members)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found, jax.jit(step)(members))


@jax.tree_util.register_dataclass
@dataclass
class Variable:
    """As of flax's nnx, whose optimizers get the tree with them in `init` and without in `update`."""

    value: Any


def test_scanned_layers_may_be_in_boxes_that_gradients_are_not_in():
    params = {"w": normal(3, 4, 5), "b": normal(5)}
    scanned = {"w": Variable(True), "b": Variable(False)}
    tx, expected = kron(0.1, scanned_layers=scanned), kron(0.1, scanned_layers={"w": True, "b": False})
    boxed = tx.init({name: Variable(leaf) for name, leaf in params.items()})
    state = expected.init(params)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(boxed), jax.tree.leaves(state))
    found, given = (own.update(params, state, params)[0] for own in (tx, expected))
    jax.tree.map(np.testing.assert_array_equal, found, given)
    with pytest.raises(ValueError, match="scanned_layers must have the structure"):
        kron(0.1, scanned_layers={"w": Variable(True), "c": Variable(False)}).init(params)


def test_a_parameter_may_be_a_python_number():
    """As for optax's own."""
    numbers, arrays = {"a": 1.5, "w": normal(3, 4)}, {"a": jnp.asarray(1.5), "w": normal(3, 4)}
    grads = {"a": jnp.asarray(0.3), "w": normal(3, 4, seed=1)}
    tx = kron(0.1)
    (got, _), (expected, _) = (tx.update(grads, tx.init(p), p) for p in (numbers, arrays))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert float(jnp.abs(got["a"])) > 0


@pytest.mark.parametrize("make", [kron, lra, dense_newton])
def test_what_has_no_update_may_be_anything(make):
    """In `params`, as for optax's own: a model of equinox's is given whole, with its functions."""
    grads = {"w": normal(3, 4), "activation": None, "seen": None}
    params = {"w": normal(3, 4, seed=1), "activation": jnp.tanh, "seen": jnp.arange(3)}
    arrays = {"w": params["w"], "activation": None, "seen": None}
    tx = make(0.1, weight_decay=0.1)
    state = tx.init(arrays)
    (got, _), (expected, _) = (tx.update(grads, state, p) for p in (params, arrays))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("make", [kron, lra, dense_newton])
def test_the_loss_gets_what_has_no_update_too(make):
    grads = {"w": normal(3, 4), "activation": None, "seen": None}
    params = {"w": normal(3, 4, seed=1), "activation": jnp.tanh, "seen": jnp.arange(3)}
    arrays = {"w": params["w"], "activation": None, "seen": None}

    def loss(p):
        return jnp.sum(p["activation"](p["w"]) ** 2) * p["seen"][2]

    tx = make(0.1)
    given = (params, loss), (arrays, lambda p: jnp.sum(jnp.tanh(p["w"]) ** 2) * 2)
    (got, _), (expected, _) = (
        tx.update(grads, tx.init(arrays), p, value_fn=value_fn) for p, value_fn in given
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("make", [kron, lra, dense_newton])
def test_gradients_and_the_parameters_of_a_loss_may_be_python_numbers(make):
    numbers, arrays = {"a": 1.5, "w": normal(3, 4)}, {"a": jnp.asarray(1.5), "w": normal(3, 4)}
    tx = make(0.1)

    def loss(p):
        return jnp.sum(p["w"] ** 2) * p["a"] ** 2

    outcomes = [tx.update(p, tx.init(p), p, value_fn=loss)[0] for p in (numbers, arrays)]
    jax.tree.map(np.testing.assert_array_equal, *outcomes)


def test_leaves_of_every_kind_keep_shape_and_dtype():
    params = {
        "scalar": jnp.ones(()),
        "row": normal(1, 7),
        "kernel": normal(3, 3, 2, 4),
        "half": normal(4, 3).astype(jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
        "single": normal(2, 2).astype(jnp.float32),
    }
    tx = kron(0.1)
    state, update = tx.init(params), jax.jit(tx.update)
    for seed in range(3):
        grads = {k: normal(*p.shape, seed=seed + 1).astype(p.dtype) for k, p in params.items()}
        updates, state = update(grads, state, params)
    for name, leaf in params.items():
        assert updates[name].shape == leaf.shape
        assert updates[name].dtype == leaf.dtype
        assert bool(jnp.all(jnp.isfinite(updates[name].astype(jnp.float32))))
    report = routing(params)
    assert report["['row']"].factors == "diag 7"
    assert report["['kernel']"].factors == "9x9, 8x8"
    assert report["['empty']"].treatment == "plain"
    factor_dtypes = {q.dtype for b in state.preconditioner.buckets for q in b.factors}
    assert factor_dtypes == {jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)}


def test_gradients_may_be_wider_than_their_parameters():
    params = {"a": normal(3, 3).astype(jnp.bfloat16), "b": normal(3, 3, seed=1).astype(jnp.float32)}
    tx = kron(0.1)
    grads = {k: normal(3, 3, seed=5).astype(jnp.float32) for k in params}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert all(bool(jnp.all(jnp.isfinite(u))) for u in updates.values())


def test_momentum_and_factor_dtypes():
    tx = scale_by_kron(mu_dtype=jnp.bfloat16, precond_dtype=jnp.float32)
    state = tx.init(PARAMS)
    for _ in range(2):
        _, state = jax.jit(tx.update)(jax.grad(loss_fn)(PARAMS), state)
    assert {m.dtype for m in jax.tree.leaves(state.mu)} == {jnp.dtype(jnp.bfloat16)}
    assert {q.dtype for b in state.buckets for q in b.factors} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"learning_rate": -1.0}, ValueError, "learning_rate must be >= 0"),
        ({"b1": 1.0}, ValueError, "b1 must be"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay"),
        ({"preconditioner_update_probability": 1.5}, ValueError, "preconditioner_update_probability"),
        ({"preconditioner_lr": 0.0}, ValueError, "preconditioner_lr must be > 0"),
        ({"preconditioner_init_scale": 0.0}, ValueError, "preconditioner_init_scale"),
        ({"memory_save_mode": "diag"}, ValueError, "memory_save_mode must be one of"),
        ({"block_size": 0}, ValueError, "block_size must be >= 1"),
        ({"geometry": "E"}, ValueError, "geometry must be one of"),
        ({"seed": -1}, ValueError, "seed"),
        ({"mu_dtype": jnp.int32}, TypeError, "mu_dtype must be a floating dtype"),
        ({"precond_dtype": ""}, TypeError, "precond_dtype must be a floating dtype"),
        ({"precond_update_precision": "hihg"}, ValueError, "precond_update_precision must be"),
        ({"learnign_rate": 0.1}, TypeError, "learnign_rate"),
    ],
)
def test_bad_settings_are_errors(settings, error, message):
    with pytest.raises(error, match=message):
        kron(**settings)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ({"w": True}, ValueError, "weight_decay_mask must have the structure of the parameters"),
        (lambda params: [True], ValueError, "weight_decay_mask must have the structure"),
        ("w", TypeError, "weight_decay_mask must have leaves True or False, got 'w'"),
    ],
)
def test_a_mask_that_does_not_fit_is_an_error(mask, error, message):
    with pytest.raises(error, match=message):
        kron(weight_decay=0.1, weight_decay_mask=mask).init(PARAMS)
    fine = {"w": np.array(True), "b": jnp.array(False), "v": 1, "s": np.False_}
    for good in (fine, True, lambda params: jax.tree.map(lambda x: x.ndim > 1, params)):
        kron(weight_decay=0.1, weight_decay_mask=good).init(PARAMS)


def test_refusals():
    with pytest.raises(ValueError, match=r"complex.*split_real_and_imaginary"):
        kron().init(jnp.ones(2, jnp.complex64))
    optax.contrib.split_real_and_imaginary(kron()).init(jnp.ones(2, jnp.complex64))
    tx = kron(weight_decay=0.1)
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_gradients_of_several_types_for_equal_parameters():
    params = {"a": jnp.ones((4, 3), jnp.float32), "b": jnp.ones((4, 3), jnp.float32)}
    gradients = {"a": normal(4, 3), "b": normal(4, 3, seed=1).astype(jnp.float32)}
    tx = kron(0.01)
    state = tx.init(params)
    updates, after = tx.update(gradients, state, params)
    assert [updates[name].dtype for name in "ab"] == [jnp.float64, jnp.float32]
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)
    single, _ = tx.update(jax.tree.map(lambda g: g.astype(jnp.float32), gradients), state, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, single)


@pytest.mark.parametrize("name", ["mu_dtype", "precond_dtype"])
def test_types_that_overflow_early_are_an_error(name):
    with pytest.raises(ValueError, match=f"{name} must reach as far as float32"):
        kron(0.01, **{name: jnp.float16})


@pytest.mark.parametrize("make", [kron, lra, dense_newton])
@pytest.mark.parametrize("leaf", [jnp.arange(3), True, jax.random.key(0)], ids=["ints", "bool", "key"])
def test_parameters_that_are_no_floats_are_an_error(leaf, make):
    with pytest.raises(ValueError, match="parameters must be floats, got"):
        make(0.01).init({"w": jnp.ones((3, 3)), "other": leaf})
