"""Dense Fishers of small JAX models, to compare captured statistics with.

For one row, A ⊗ G of a layer is the outer product of its gradient with itself, exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from suite.jax import value_and_grad, verify
from suite.jax.layers import gradient_matrix


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def check(loss_fn, params, *args, uncovered=(), **settings):
    """Gradients are jax's own, Σ g aᵀ is the gradient; returns plan and statistics."""
    vag = value_and_grad(loss_fn, **settings)
    plan = vag.plan(params, *args)
    plain = {r.parameter for r in plan.routing if r.treatment == "plain"}
    assert plain == set(uncovered), str(plan)
    value, grads, statistics = jax.jit(vag)(params, *args)
    expected = jax.jit(jax.value_and_grad(loss_fn))(params, *args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), (value, grads), expected
    )
    verify(loss_fn, params, *args, rtol=1e-10)
    return plan, statistics


def squares_of_rows(loss, params, x, leaf, rows):
    """Σ over rows of a leaf's squared gradients; those of one number are as many as x has entries."""
    if params[leaf].shape == () and rows == "expand":
        each = jnp.broadcast_to(params[leaf], x.shape)
        return jnp.sum(jax.grad(lambda own: loss({**params, leaf: own}, x))(each) ** 2)
    return jnp.sum(jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])[leaf] ** 2, 0)


def dense_block(plan, statistics, index=0):
    """A ⊗ G of one layer as matrices over the flattened (d_out, d_in), one for each block."""
    layer = plan.layers[index]
    own = statistics[layer.name].main
    leader = statistics[layer.input_of or layer.name].main.A
    inputs, outputs, rows = (np.asarray(x) for x in (leader, own.G, own.rows))
    blocks = []
    for i in range(layer.groups):
        A, G = (np.diag(f[i]) if f[i].ndim == 1 else f[i] for f in (inputs, outputs))
        blocks.append(np.kron(G, A) / rows[i])
    return blocks


def exact_blocks(plan, losses, params, index=0):
    """Σ over the losses of gradient outer products, of the same blocks."""
    layer = plan.layers[index]
    total = 0.0
    for loss in losses:
        gradient = jax.jit(
            lambda p, loss=loss: gradient_matrix(jax.tree.leaves(jax.grad(loss)(p)), layer)
        )
        matrix = np.asarray(gradient(params))
        flat = (matrix.swapaxes(1, 2) if layer.input_first else matrix).reshape(layer.groups, -1)
        total = total + flat[:, :, None] * flat[:, None, :]
    return total


def assert_exact(loss_of_one_row, params, *args, index=0, diagonal=False, **settings):
    plan, statistics = check(loss_of_one_row, params, *args, **settings)
    expected = exact_blocks(plan, [lambda p: loss_of_one_row(p, *args)], params, index)
    for found, block in zip(dense_block(plan, statistics, index), expected, strict=True):
        if diagonal:
            found, block = np.diag(found), np.diag(block)
        np.testing.assert_allclose(found, block, rtol=1e-9, atol=1e-11 * np.abs(block).max())
    return plan
