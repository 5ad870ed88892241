"""Settings of `suite.jax.kron` against something simpler: boxes, batches, meshes, old names."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from suite.core import noise
from suite.core.rounding import stochastic_round
from suite.jax import (
    get_opt_state_partition_specs,
    hessian_vector_product,
    kron,
    scale_by_dense,
    scale_by_kron,
    scale_by_lra,
)

pytestmark = pytest.mark.slow


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


PARAMS = {"s": normal(5, 6, 4), "w": normal(9, 7, seed=1), "b": normal(7, seed=2)}
SCANNED = {"s": True, "w": False, "b": False}


def directions(tx, params=PARAMS, steps=4):
    state, update = tx.init(params), jax.jit(tx.update)
    for seed in range(steps):
        grads = jax.tree.map(lambda p, seed=seed: normal(*p.shape, seed=seed + 10), params)
        updates, state = update(grads, state, params)
    return updates, state


def assert_same(a, b, rtol=1e-10):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol), a, b)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_blocks_in_batches_are_the_same_blocks(size):
    settings = {"scanned_layers": SCANNED, "block_size": 4}
    whole, _ = directions(scale_by_kron(**settings))
    batched = scale_by_kron(**settings, lax_map_scanned_layers=True, lax_map_batch_size=size)
    assert_same(whole, directions(batched)[0])


def test_settings_of_all_parameters_fit_those_that_are_not_masked():
    """As in `optax.partition`, with another optimizer for the biases."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    specs = {"s": P(None, "x"), "w": P("x"), "b": P()}
    labels = {"s": "kron", "w": "kron", "b": "sgd"}
    with jax.set_mesh(mesh):
        own = scale_by_kron(scanned_layers=SCANNED, params_partition_specs=specs)
        whole, _ = directions(optax.partition({"kron": own, "sgd": optax.sgd(0.1)}, labels))
    alone = {name: x for name, x in PARAMS.items() if name != "b"}
    expected, _ = directions(scale_by_kron(scanned_layers={"s": True, "w": False}), alone)
    assert_same({name: whole[name] for name in alone}, expected, rtol=1e-6)  # other noise streams
    assert_same(whole["b"], -0.1 * normal(7, seed=13))


def test_settings_of_all_parameters_fit_where_one_label_covers_a_subtree():
    nested = {"own": {"s": PARAMS["s"], "w": PARAMS["w"]}, "rest": {"b": PARAMS["b"], "c": normal(3)}}
    specs = {"own": {"s": P(None, "x"), "w": P("x")}, "rest": {"b": P(), "c": P()}}
    scanned = {"own": {"s": True, "w": False}, "rest": {"b": False, "c": False}}
    decays = {"own": {"s": False, "w": True}, "rest": {"b": True, "c": True}}
    settings = {"learning_rate": 0.1, "weight_decay": 0.1}
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("x",))):
        tx = kron(
            **settings, scanned_layers=scanned, params_partition_specs=specs, weight_decay_mask=decays
        )
        labelled = {"kron": tx, "sgd": optax.sgd(0.1)}
        whole, _ = directions(optax.partition(labelled, {"own": "kron", "rest": "sgd"}), nested)
    alone = kron(**settings, scanned_layers=scanned["own"], weight_decay_mask=decays["own"])
    assert_same(whole["own"], directions(alone, nested["own"])[0])
    assert_same(whole["rest"]["b"], -0.1 * normal(7, seed=13))
    deeper = {"own": {"s": {"x": True}, "w": False}, "rest": scanned["rest"]}
    with pytest.raises(ValueError, match="scanned_layers must have the structure"):
        optax.masked(kron(scanned_layers=deeper), {"own": True, "rest": False}).init(nested)


def test_gradients_of_another_structure_or_shape_are_an_error():
    tx = scale_by_kron()
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="updates must have the structure"):
        tx.update({"w": PARAMS["w"]}, state)
    with pytest.raises(ValueError, match=r"updates must have the shapes .*\['w'\]\": \(9, 7\)"):
        tx.update(PARAMS | {"w": PARAMS["w"].T}, state)


@jax.tree_util.register_pytree_node_class
class Model:
    """A container of the user's, which has no == of its own."""

    def __init__(self, w):
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_parameters_may_be_in_a_class_that_has_no_equality():
    tx, w = scale_by_kron(), PARAMS["w"]
    updates, _ = tx.update(Model(w), tx.init(Model(w)))
    expected, _ = tx.update(w, tx.init(w))
    np.testing.assert_array_equal(updates.w, expected)
    with pytest.raises(ValueError, match=r"must have the shapes .*\(9, 7\)}, got .*\(7, 9\)}"):
        tx.update(Model(w.T), tx.init(Model(w)))


def test_batches_bound_the_memory_of_a_step():
    """XLA's own count of temporary bytes; the new state, which it has in it, is the same for both."""
    params = {"w": jnp.zeros((64, 96, 96), jnp.float32)}

    def temporary(**settings):
        tx = scale_by_kron(scanned_layers={"w": True}, **settings)
        compiled = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).compile()
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes - memory.output_size_in_bytes

    # The products of a step are 4 of 64 blocks' instead of all.
    assert temporary(lax_map_scanned_layers=True, lax_map_batch_size=4) < 0.6 * temporary()


class Box:
    """What flax's Partitioned looks like."""

    def __init__(self, value, names):
        self.value, self.names = value, names

    def unbox(self):
        return self.value

    def replace_boxed(self, value):
        return Box(value, self.names)


jax.tree_util.register_pytree_node(
    Box, lambda box: ((box.value,), box.names), lambda names, children: Box(children[0], names)
)


def boxed(make):
    names = {"s": ("layers", "in", "out"), "w": ("in", "out"), "b": ("out",)}
    return {k: make(v, names[k]) if k != "b" else v for k, v in PARAMS.items()}


@pytest.mark.parametrize("kind", ["look-alike", "flax"])
def test_boxes_are_opened_and_closed(kind):
    make = Box
    if kind == "flax":
        make = pytest.importorskip("flax.core.meta").Partitioned
    params = boxed(make)
    tx = kron(0.1, weight_decay=0.1, scanned_layers=SCANNED)
    plain_tx = kron(0.1, weight_decay=0.1, scanned_layers=SCANNED)
    state, plain_state = tx.init(params), plain_tx.init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(plain_state)
    grads = jax.tree.map(lambda p: normal(*p.shape, seed=3), params)
    plain = jax.tree.map(lambda p: normal(*p.shape, seed=3), PARAMS)
    updates, _ = jax.jit(tx.update)(grads, state, params)
    expected, _ = jax.jit(plain_tx.update)(plain, plain_state, PARAMS)
    assert isinstance(updates["w"], make)
    assert updates["w"].names == ("in", "out")
    assert_same({k: u.value if isinstance(u, make) else u for k, u in updates.items()}, expected)
    moved = optax.apply_updates(params, updates)
    assert isinstance(moved["s"], make)
    specs = get_opt_state_partition_specs(params, scanned_layers=SCANNED)
    assert jax.tree.structure(specs) == jax.tree.structure(state)


def test_newton_in_boxes_hands_the_loss_its_boxes():
    params = boxed(Box)

    def value_fn(p):
        return jnp.sum(p["w"].value ** 2 * (1 + jnp.arange(7.0))) + jnp.sum(p["s"].value ** 2)

    tx = kron(0.1)
    updates, _ = tx.update(jax.grad(value_fn)(params), tx.init(params), params, value_fn=value_fn)
    assert isinstance(updates["w"], Box)


def test_whitening_the_gradient_fits_to_gradients():
    """With b1 near 1 the momentum hardly moves, and what is fitted decides the direction's size."""
    settings = {"b1": 0.99, "clip": None, "preconditioner_init_scale": None}
    big, _ = directions(scale_by_kron(**settings), steps=60)
    small, _ = directions(scale_by_kron(**settings, whiten="gradient"), steps=60)
    assert jnp.linalg.norm(small["w"]) < 0.5 * jnp.linalg.norm(big["w"])


def test_update_first_or_after():
    g = {"w": normal(4, 3)}
    for first in (True, False):
        tx = scale_by_kron(update_first=first, clip=None, damping=0.0)
        moved, state = tx.update(g, tx.init(g))
        expected = tx.update(g, state)[0] if first else g  # the start is the identity
        ratio = np.asarray(moved["w"] / expected["w"])
        assert first or np.allclose(ratio, 1)
        assert int(state.updates) == 1
    assert not np.allclose(scale_by_kron().update(g, scale_by_kron().init(g))[0]["w"], g["w"])


def test_clip_bounds_mean_and_entries():
    g = jax.tree.map(lambda p: 1e3 * p, PARAMS)
    tx = scale_by_kron(clip=(0.5, 0.7), update_first=False)
    moved, _ = tx.update(g, tx.init(PARAMS))
    assert float(jnp.sqrt(jnp.mean(moved["w"] ** 2))) <= 0.5
    assert max(float(jnp.max(jnp.abs(u))) for u in moved.values()) <= 0.7
    free = scale_by_kron(clip=None, update_first=False)
    assert_same(free.update(g, free.init(PARAMS))[0], g)


def test_normalized_gradients_know_no_scale_and_scanned_layers_are_apart():
    settings = {"normalize_grads": True, "scanned_layers": SCANNED}
    state = scale_by_kron(**settings).init(PARAMS)
    plain, _ = scale_by_kron(**settings).update(PARAMS, state)
    factors = jnp.asarray([1.0, 10.0, 100.0, 1e-3, 1e-6])[:, None, None]
    scaled = {k: v * (factors if k == "s" else 1e4) for k, v in PARAMS.items()}
    assert_same(plain, scale_by_kron(**settings).update(scaled, state)[0], rtol=1e-8)


def test_stochastic_rounding_keeps_what_nearest_loses():
    """Steps of a quarter of a unit in the last place: lost by rounding to nearest, kept on average."""
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    grads = {"w": jnp.full((64, 64), 1 + 2**-7, jnp.bfloat16)}  # one unit above 1

    def average(**settings):
        tx = scale_by_kron(
            b1=0.98, mu_dtype="bfloat16", preconditioner_update_probability=1e-3, **settings
        )
        state = tx.init(params)
        state = state._replace(mu=params, weight=jnp.ones_like(state.weight))
        update = jax.jit(tx.update)
        for _ in range(30):
            _, state = update(grads, state)
        return float(jnp.mean(state.mu["w"].astype(jnp.float64)))

    exact = 1 + 2**-7 * (1 - 0.98**30)
    assert abs(average(stochastic_rounding=True) - exact) < 2e-4
    assert abs(average() - exact) > 2e-3


def test_rounded_state_is_near_the_exact_one():
    settings = {"preconditioner_lr": 0.1}
    exact, _ = directions(scale_by_kron(**settings), steps=10)
    half = {"mu_dtype": "bfloat16", "precond_dtype": "bfloat16", "stochastic_rounding": True}
    rounded, state = directions(scale_by_kron(**settings, **half), steps=10)
    assert {q.dtype for b in state.buckets for q in b.factors} == {jnp.dtype(jnp.bfloat16)}
    for name in PARAMS:
        error = jnp.linalg.norm(exact[name] - rounded[name]) / jnp.linalg.norm(exact[name])
        assert float(error) < 0.1


def test_stochastic_rounding_has_no_bias():
    x = normal(1000).astype(jnp.float32)
    streams = jnp.arange(400, dtype=jnp.int32)
    draws = noise.unit_noise(streams, 1, (1000,), jnp.float32)
    rounded = jax.vmap(lambda unit: stochastic_round(x, unit, jnp.bfloat16))(draws)
    assert rounded.dtype == jnp.bfloat16
    mean = np.mean(np.asarray(rounded, np.float64), axis=0)
    unit = np.abs(np.asarray(x, np.float64)) * 2.0**-7
    assert np.max(np.abs(mean - np.asarray(x)) / unit) < 0.15  # six standard errors
    nearest = np.abs(np.asarray(x.astype(jnp.bfloat16), np.float64) - np.asarray(x)) / unit
    assert np.max(nearest) > 0.45


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_hessian_vector_product(method):
    H = normal(5, 5) + normal(5, 5).T
    found = hessian_vector_product(
        lambda x: 0.5 * x @ H @ x, normal(5), normal(5, seed=3), method=method
    )
    np.testing.assert_allclose(found, H @ normal(5, seed=3), rtol=1e-6, atol=1e-6)


def test_positions_and_names_are_distributed_krons():
    names = list(inspect.signature(kron).parameters)
    assert names[:23] == [
        *("learning_rate", "b1", "weight_decay", "weight_decay_mask"),
        *("preconditioner_update_probability", "max_size_triangular", "min_ndim_triangular"),
        *("memory_save_mode", "preconditioner_lr", "preconditioner_init_scale", "mu_dtype"),
        *("precond_dtype", "precond_update_precision", "precond_grads_precision", "scanned_layers"),
        *("lax_map_scanned_layers", "lax_map_batch_size", "merge_small_dims", "target_merged_dim_size"),
        *("partition_grads_into_blocks", "block_size", "params_partition_specs"),
        "preconditioner_partition_spec",
    ]
    assert list(inspect.signature(scale_by_kron).parameters)[:20] == [names[1], *names[4:23]]
    defaults = [p.default for p in inspect.signature(kron).parameters.values()][:23]
    # as in distributed_kron 2.0.0, but for the two schedules that None stands for (at 4 and 8), and for
    # block_size, 256 there
    assert defaults == [
        *(0.0003, 0.9, 0.0, None, None, 8192, 2, None, None, 1.0, None, None),
        *("tensorfloat32", None, None, False, 8, True, 4096, True, 128, None, None),
    ]
    specs = inspect.signature(get_opt_state_partition_specs).parameters
    assert list(specs) == ["params", "scale_by_kron_only", "kwargs"]


def test_partition_specs_of_a_tree_with_none_in_place_of_a_parameter():
    """As of an equinox layer without a bias."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    params = {"a": None, **PARAMS, "z": None}
    specs = {"a": None, "s": P(None, "x"), "w": P("x"), "b": None, "z": None}
    expected, _ = directions(scale_by_kron())
    labels = {"a": None, "s": "kron", "w": "kron", "b": "sgd", "z": None}
    with jax.set_mesh(mesh):
        tx = scale_by_kron(params_partition_specs=specs)
        found, _ = directions(tx, params)
        partly, _ = directions(optax.partition({"kron": tx, "sgd": optax.sgd(0.1)}, labels), params)
    assert_same({name: found[name] for name in PARAMS}, expected)
    assert_same(partly["b"], -0.1 * normal(7, seed=13))
    assert found["a"] is partly["z"] is None
    of_state = get_opt_state_partition_specs(params, True, params_partition_specs=specs)
    assert of_state.mu == {"a": None, "s": P(None, "x"), "w": P("x"), "b": P(), "z": None}


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_partition_specs_have_the_states_structure(only, weight_decay):
    specs = {"s": P(None, "x"), "w": P("x", None), "b": None}
    settings = {"learning_rate": 0.1, "weight_decay": weight_decay, "scanned_layers": SCANNED}
    spread = {"params_partition_specs": specs, "preconditioner_partition_spec": P("x", None)}
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), PARAMS)
    found = get_opt_state_partition_specs(shapes, only, **settings, **spread)
    tx = scale_by_kron(scanned_layers=SCANNED) if only else kron(**settings)
    assert jax.tree.structure(found) == jax.tree.structure(tx.init(PARAMS))
    inner = found if only else found.preconditioner
    assert inner.mu == {"s": P(None, "x"), "w": P("x", None), "b": P()}
    assert set(jax.tree.leaves(inner.buckets)) == {P(("x",))}
    assert inner.steps == P()


@pytest.mark.filterwarnings("ignore:.*mesh.*context manager has been deprecated:DeprecationWarning")
def test_a_train_state_with_shardings_of_its_own_under_an_old_mesh_context():
    """The pattern of distributed_kron's example: shardings read off the state, buffers donated."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "pipeline"))
    specs = {"s": P("pipeline", None, "fsdp"), "w": P("fsdp", None), "b": P(None)}
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    settings = {"weight_decay": 0.01, "scanned_layers": SCANNED}
    spread = {"params_partition_specs": specs, "preconditioner_partition_spec": P("fsdp", None)}
    tx = kron(**settings, **spread)

    @jax.jit
    def start():
        params = jax.lax.with_sharding_constraint(PARAMS, places)
        return params, tx.init(params)

    with mesh:
        state = start()
    shardings = jax.tree.map(lambda x: x.sharding, state)

    def step(grads, state):
        updates, inner = tx.update(grads, state[1], state[0])
        return updates, (optax.apply_updates(state[0], updates), inner)

    whole = (places, shardings)
    compiled = jax.jit(step, in_shardings=whole, out_shardings=whole, donate_argnums=(0, 1))
    with mesh:
        updates, _ = compiled(jax.device_put(jax.tree.map(jnp.ones_like, PARAMS), places), state)
    plain = kron(**settings)
    expected, _ = plain.update(jax.tree.map(jnp.ones_like, PARAMS), plain.init(PARAMS), PARAMS)
    assert_same(updates, expected)


def test_the_parameters_axes_are_used_where_no_spec_is_given():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    specs = {"s": P(None, "x"), "w": P("x"), "b": P()}
    with jax.set_mesh(mesh):
        state = scale_by_kron(params_partition_specs=specs, scanned_layers=SCANNED).init(PARAMS)
    leaf = state.buckets[0].factors[0]
    assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), leaf.ndim)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"whiten": "g"}, ValueError, "whiten must be one of"),
        ({"clip": -1.0}, ValueError, "clip must be > 0"),
        ({"clip": (1.0, 2.0, 3.0)}, ValueError, "clip must be a number or"),
        ({"update_first": 1}, TypeError, "update_first must be True or False"),
        ({"max_skew": 0.0}, ValueError, "max_skew must be > 0"),
        ({"lax_map_batch_size": 0}, ValueError, "lax_map_batch_size must be >= 1"),
        ({"hvp_method": "guess"}, ValueError, "hvp_method must be one of"),
        ({"preconditioner_partition_spec": ("x",)}, TypeError, "must be a PartitionSpec"),
    ],
)
def test_bad_settings_are_errors(settings, error, message):
    with pytest.raises(error, match=message):
        kron(**settings)


def test_sharding_needs_a_mesh_with_its_axes():
    tx = scale_by_kron(preconditioner_partition_spec=P("x"))
    with pytest.raises(ValueError, match="needs a mesh"):
        tx.init(PARAMS)
    mesh = Mesh(np.array(jax.devices()[:1]), ("y",))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="must have the axes"):
        tx.init(PARAMS)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match="a spec for each of 3 parameters, got 1"),
    ):
        scale_by_kron(params_partition_specs={"w": P()}).init(PARAMS)
    specs = {key: P("y") for key in PARAMS}
    wrong = {f"{key}s" if key == min(PARAMS) else key: spec for key, spec in specs.items()}
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"the keys of the parameters.*is none of"):
        scale_by_kron(params_partition_specs=wrong).init(PARAMS)
    with pytest.raises(TypeError, match="must hold PartitionSpecs or None, got 'y'"):
        scale_by_kron(params_partition_specs=dict.fromkeys(PARAMS, "y"))


def equations(jaxpr):
    """How many there are, in branches and calls as well."""
    found = 0
    for equation in jaxpr.eqns:
        found += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                found += equations(inner) if hasattr(inner, "eqns") else 0
    return found


def test_a_program_hardly_grows_with_the_number_of_equal_layers():
    def size(layers):
        params = [{"w": normal(8, 6), "b": normal(6)} for _ in range(layers)]
        tx = kron()
        traced = jax.jit(tx.update).trace(params, tx.init(params), params)
        return equations(traced.jaxpr.jaxpr)

    parameters = 2 * 20
    assert size(40) - size(20) <= 8 * parameters


def test_blocks_keep_the_order_of_the_parameters():
    """Equal leaves are joined, but another's blocks come between theirs; scanned leaves stay apart."""
    params = {"a": normal(4, 4), "b": normal(8, 4, seed=1), "c": normal(4, 4, seed=2)}
    alone = {name: x[None] for name, x in params.items()}
    settings = {"block_size": 4, "shared_factors": False}
    together = scale_by_kron(**settings)
    apart = scale_by_kron(**settings, scanned_layers=dict.fromkeys(params, True))
    state, other = together.init(params), apart.init(alone)
    for step in range(3):
        grads = {name: (step + 1) * jnp.sin((3 + step) * x) for name, x in params.items()}
        moved, state = jax.jit(together.update)(grads, state)
        grads = {name: x[None] for name, x in grads.items()}
        expected, other = jax.jit(apart.update)(grads, other)
    assert [bucket.lipschitz[0].shape for bucket in state.buckets] == [(4,)]
    assert_same(moved, {name: x[0] for name, x in expected.items()})
    assert_same(state.buckets, other.buckets)


@pytest.mark.parametrize("scale", [scale_by_kron, scale_by_lra, scale_by_dense])
def test_a_pair_for_all_parameters_is_that_of_those_that_are_not_masked(scale):
    tree = {"a": {"w": normal(3, 2), "v": normal(3, 2, seed=1)}, "b": normal(3, 2, seed=2)}
    vector, product = (jax.tree.map(lambda x, n=n: jnp.sin(n * x), tree) for n in (3.0, 5.0))
    alone = scale()
    own = {"b": tree["b"]}
    given = {"vector": {"b": vector["b"]}, "hvp": {"b": product["b"]}}
    expected, _ = alone.update(own, alone.init(own), own, **given)
    for mask in ({"a": False, "b": True}, {"a": {"w": False, "v": False}, "b": True}):
        masked = optax.masked(scale(), mask)
        found, _ = masked.update(tree, masked.init(tree), tree, vector=vector, hvp=product)
        np.testing.assert_array_equal(found["b"], expected["b"])
    with pytest.raises(ValueError, match="vector and hvp must have the shapes"):
        alone.update(own, alone.init(own), own, vector=vector, hvp=product)
    with pytest.raises(ValueError, match="updates must have"):
        alone.update(tree, alone.init(own), tree)


def test_the_loss_of_pairs_is_computed_in_the_users_precision():
    params = {"w": jnp.ones((4, 3))}
    x = jnp.ones((5, 4))
    tx = scale_by_kron(preconditioner_update_probability=1.0)

    def step(params):
        loss = lambda p: jnp.sum(jnp.tanh(x @ p["w"]))  # noqa: E731
        return tx.update(params, tx.init(params), params, value_fn=loss)

    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(step)(params))
    shapes = "[5,3] = dot_general["
    dots = [part.split("]\n")[0] for part in text.split(shapes)[1:]]
    assert dots
    assert all("HIGHEST" in dot[:300] for dot in dots)


def test_extra_arguments_that_are_no_arrays_are_ignored():
    params = {"w": jnp.ones((4, 3))}
    tx = kron()
    tx.update(params, tx.init(params), params, phase="warmup", about={"f": len, "epoch": 3})


@pytest.mark.parametrize("geometry", ["Q0.5EQ1.5", "QEQ", "QEP", "EQ", "QUAD", "PRO4P", "QUAD4P"])
def test_a_run_has_derivatives_both_ways(geometry):
    """Of the first step, too, where factors are multiples of the identity: nothing is divided by 0."""
    tx, start = scale_by_kron(geometry=geometry), {"w": normal(5, 8)}

    def end(shift):
        state, total = tx.init(start), 0.0
        for number in range(3):
            gradient = {"w": jnp.roll(start["w"], number, 0) + shift * jnp.cos(start["w"] + number)}
            updates, state = tx.update(gradient, state, start)
            total += jnp.vdot(jnp.sin(start["w"]), updates["w"])
        return total

    end = jax.jit(end)
    expected = (end(1e-5) - end(-1e-5)) / 2e-5
    _, forward = jax.jvp(end, (0.0,), (1.0,))
    np.testing.assert_allclose(forward, expected, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(end)(0.0), forward, rtol=1e-9)


@pytest.mark.parametrize(
    "settings",
    [{"block_size": 64}, {"memory_save_mode": "one_diag"}, {"shared_factors": False}],
    ids=lambda settings: next(iter(settings)),
)
def test_a_state_of_other_settings_is_an_error(settings):
    params = {"w": jnp.ones((200, 200))}
    state = scale_by_kron(**settings).init(params)
    with pytest.raises(ValueError, match=r"state must be that of init\(params\) with these settings"):
        scale_by_kron().update(params, state, params)


@pytest.mark.parametrize(
    ("scale", "other"),
    [(functools.partial(scale_by_lra, rank=2), scale_by_lra), (scale_by_dense, scale_by_lra)],
    ids=["of another rank", "of another rule"],
)
def test_so_is_one_of_all_parameters(scale, other):
    params = {"w": jnp.ones((4, 3))}
    tx, state = scale(), other().init(params)
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(
            ValueError, match=r"state must be that of init\(params\) with these settings"
        ):
            update(params, state, params)
