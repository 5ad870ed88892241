"""Models of flax, equinox and haiku, nnx's own optimizer, and orbax's checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from suite.jax import kfac, kron, value_and_grad, verify

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import jax_coverage
import jax_library_models
import jax_models
import jax_tasks

pytestmark = pytest.mark.slow

# haiku is no requirement of the tests: its models are measured where it is installed.
LIBRARIES = {"plain": None, "linen": "flax", "nnx": "flax", "equinox": "equinox", "haiku": "haiku"}
CASES = [(library, name) for library in LIBRARIES for name in jax_tasks.TASKS]
# Where a library's program is not the plain model's over again.
VERIFIED = [(library, name) for library in ("plain", "equinox") for name in jax_tasks.TASKS]
VERIFIED += [("linen", "vit"), ("linen", "lstm"), ("linen", "unet"), ("nnx", "gpt"), ("haiku", "gpt")]


def model_of(library, name):
    """(loss_fn, params, batch)"""
    if LIBRARIES[library] is not None:
        pytest.importorskip(LIBRARIES[library])
    return jax_library_models.models(library)[name]()


@pytest.fixture(autouse=True)
def single_precision():
    """What these libraries' models are made for."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.mark.parametrize(("library", "name"), CASES)
def test_models_are_covered_to_the_last_parameter(library, name):
    loss_fn, params, batch = model_of(library, name)
    routing = value_and_grad(loss_fn, require="all").routing(params, *batch)
    assert all(route.preconditioned for route in routing)


@pytest.mark.parametrize(("library", "name"), VERIFIED)
def test_nothing_is_missed(library, name):
    loss_fn, params, batch = model_of(library, name)
    assert max(verify(loss_fn, params, *batch, rtol=1e-3).values()) < 1e-4


@pytest.mark.parametrize("library", ["linen", "nnx", "equinox"])
def test_kron_trains_their_models(library):
    loss_fn, params, batch = model_of(library, "mlp")
    tx = kron(0.003)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(30):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


def test_what_the_table_says_the_user_writes_trains():
    loss_fn, params, batch = jax_models.plain_mlp()
    before = float(loss_fn(params, *batch))
    for train in (jax_coverage.train_with_adam, jax_coverage.train_with_kfac):
        trained, _ = train(loss_fn, params, [batch] * 10)
        assert float(loss_fn(trained, *batch)) < before
    assert jax_coverage.lines_in_training() == 4
    assert all(jax_coverage.lines_in_models(library) == 0 for library in LIBRARIES)


def test_nested_dictionaries_like_haikus():
    """Parameters named by module paths, the model a pure function that looks them up."""
    params = {
        "net/~/linear_0": {"w": jax_models.normal(48, 8), "b": jnp.zeros(8)},
        "net/~/linear_1": {"w": jax_models.normal(8, 10), "b": jnp.zeros(10)},
    }

    def apply(params, x):
        def linear(name, x):
            own = params[f"net/~/{name}"]
            return jnp.dot(x, own["w"], precision=None) + jnp.broadcast_to(
                own["b"], (*x.shape[:-1], own["b"].size)
            )

        return linear("linear_1", jnp.tanh(linear("linear_0", x)))

    loss_fn, params, batch = jax_tasks.case("mlp", apply, params)
    plan = value_and_grad(loss_fn, require="all").plan(params, *batch)
    assert [layer.name for layer in plan.layers] == [f"['net/~/linear_{i}']['w']" for i in (0, 1)]
    tx = kfac(plan, 0.1, damping=0.01)

    @jax.jit
    def step(params):
        _, grads, statistics = value_and_grad(loss_fn)(params, *batch)
        return tx.update(grads, tx.init(params), params, statistics=statistics)[0]

    updates = step(params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_nnx_optimizers_pass_statistics_on():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(
        nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(8, 2, rngs=nnx.Rngs(1))
    )
    graph, params = nnx.split(model, nnx.Param)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 4)), jnp.float32)
    y = x[:, :2] ** 2

    def loss_fn(params, x, y):
        return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

    vag = value_and_grad(loss_fn)
    tx = kfac(vag.plan(params, x, y), 0.05, damping=0.01)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads, statistics = vag(nnx.state(model, nnx.Param), x, y)
        optimizer.update(model, grads, statistics=statistics)
        return loss

    losses = [float(step(model, optimizer, x, y)) for _ in range(15)]
    assert losses[-1] < 0.7 * losses[0]


def test_orbax_round_trip(tmp_path):
    checkpoints = pytest.importorskip("orbax.checkpoint")
    loss_fn, params, batch = jax_models.plain_mlp()
    vag = value_and_grad(loss_fn)
    tx = kfac(vag.plan(params, *batch), 0.1, inv_update_steps=2, fallback=optax.adam(1e-3))

    @jax.jit
    def step(params, state):
        _, grads, statistics = vag(params, *batch)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state)
    with checkpoints.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: (params, state))
        restored = checkpointer.restore(tmp_path / "state", like)
    assert jax.tree.structure(restored) == jax.tree.structure((params, state))
    one, other = step(params, state), step(*restored)
    jax.tree.map(np.testing.assert_array_equal, one, other)
