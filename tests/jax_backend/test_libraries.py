"""Models of flax and equinox, nnx's own optimizer, and orbax's checkpoints."""

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
import jax_library_models
import jax_models

pytestmark = pytest.mark.slow

# What is not covered, and why; everything else is.
UNCOVERED = {
    ("plain", "vit"): {"['class']": "used by `concatenate`"},
    ("plain", "pinn"): {"[2]['b']": "not used"},  # only derivatives enter the loss
}
CASES = [("plain", name) for name in jax_models.PLAIN]
CASES += [("linen", n) for n in ("mlp", "resnet", "vit", "gpt", "unet", "lstm", "mixer")]
CASES += [("nnx", n) for n in ("mlp", "resnet", "gpt")]
CASES += [("equinox", n) for n in ("mlp", "resnet", "gpt", "lstm")]


@pytest.fixture(autouse=True)
def single_precision():
    """What these libraries' models are made for."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.mark.parametrize(("library", "name"), CASES)
def test_models_are_covered_and_nothing_is_missed(library, name):
    if library != "plain":
        pytest.importorskip("equinox" if library == "equinox" else "flax")
    loss_fn, params, batch = jax_library_models.LIBRARIES[library]()[name]()
    routing = value_and_grad(loss_fn).routing(params, *batch)
    plain = {r.parameter: r.reason for r in routing if not r.preconditioned}
    assert plain == UNCOVERED.get((library, name), {})
    assert max(verify(loss_fn, params, *batch, rtol=1e-3).values()) < 1e-4


@pytest.mark.parametrize("library", ["linen", "nnx", "equinox"])
def test_kron_trains_their_models(library):
    pytest.importorskip("equinox" if library == "equinox" else "flax")
    loss_fn, params, batch = jax_library_models.LIBRARIES[library]()["mlp"]()
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
