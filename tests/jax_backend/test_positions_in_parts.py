"""Positions that are sums of what was looked up for rows and for columns.

The oracle: gradients of every example at the sum with its tokens, and how often a row was looked up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from suite.jax import value_and_grad

VOCABULARY, HEIGHT, LENGTH, WIDTH, EXAMPLES = 11, 3, 6, 4, 10
ROWS, COLUMNS = jnp.arange(HEIGHT), jnp.arange(2)
ROW_OF, COLUMN_OF = jnp.arange(LENGTH) // 2, jnp.arange(LENGTH) % 2


def grid(p):
    return p["row"][ROWS][:, None] + p["column"][COLUMNS][None]


SUMS = {  # of tokens, (examples, LENGTH, WIDTH)
    "one by one": lambda p, h: h + p["row"][ROW_OF] + p["column"][COLUMN_OF],
    "positions first": lambda p, h: (p["row"][ROW_OF] + p["column"][COLUMN_OF])[None] + h,
    "a grid": lambda p, h: h + grid(p).reshape(LENGTH, WIDTH),
    "a grid of images": lambda p, h: (h.reshape(-1, *grid(p).shape) + grid(p)).reshape(h.shape),
    "features first": lambda p, h: (
        (h.reshape(-1, HEIGHT, 2, WIDTH).transpose(0, 3, 1, 2) + grid(p).transpose(2, 0, 1))
        .transpose(0, 2, 3, 1)
        .reshape(h.shape)
    ),
    "broadcast": lambda p, h: (
        h
        + (
            jnp.broadcast_to(p["row"][ROWS][:, None], (HEIGHT, 2, WIDTH))
            + jnp.broadcast_to(p["column"][COLUMNS], (HEIGHT, 2, WIDTH))
        ).reshape(LENGTH, WIDTH)
    ),
    "of every example": lambda p, h: h + jax.vmap(lambda x: x + grid(p).reshape(LENGTH, WIDTH))(0 * h),
}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.parametrize("how", SUMS)
def test_parts_of_positions_have_the_gradients_of_every_example(how):
    params = {
        "column": normal(0, 2, WIDTH),
        "head": normal(1, 8, VOCABULARY),
        "hidden": normal(2, WIDTH, 8),
        "row": normal(3, HEIGHT, WIDTH),
        "tokens": normal(4, VOCABULARY, WIDTH),
    }
    x = jnp.asarray(np.random.default_rng(5).integers(VOCABULARY, size=(EXAMPLES, LENGTH)))

    def loss(p, x, added=0.0):
        h = SUMS[how](p, p["tokens"][x]) + added
        scores = jax.nn.log_softmax(jnp.tanh(h @ p["hidden"]) @ p["head"])
        return -jnp.mean(jnp.take_along_axis(scores, jnp.roll(x, 1, 1)[..., None], -1))

    gradient = jax.grad(loss, 2)(params, x, jnp.zeros((EXAMPLES, LENGTH, WIDTH)))
    rows = gradient.reshape(-1, WIDTH)
    vag = value_and_grad(lambda p, x: loss(p, x))
    plan, sums = vag.plan(params, x), vag(params, x)[2]
    for name, index in (("row", ROW_OF), ("column", COLUMN_OF)):
        assert plan.routing[f"['{name}']"].reason == "weight of a lookup layer"
        found = sums.layers[f"['{name}']"]
        np.testing.assert_allclose(found.main.G[0], rows.T @ rows, rtol=1e-9, atol=1e-12)
        counts = EXAMPLES * np.bincount(index, minlength=len(params[name]))
        np.testing.assert_allclose(found.main.A.ravel(), counts, rtol=1e-9)


def test_a_row_that_each_example_gets_has_the_gradients_of_every_example():
    params = {"head": normal(0, WIDTH, 3), "table": normal(1, 5, WIDTH)}

    def loss(p, x, added=0.0):
        h = x + jnp.broadcast_to(p["table"][jnp.arange(5)[2:3]], x.shape) + added
        return jnp.mean((jnp.tanh(h) @ p["head"]) ** 2)

    x = normal(2, EXAMPLES, WIDTH)
    rows = jax.grad(loss, 2)(params, x, jnp.zeros_like(x))
    sums = value_and_grad(lambda p, x: loss(p, x))(params, x)[2].layers["['table']"].main
    np.testing.assert_allclose(sums.G[0], rows.T @ rows, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(sums.A.ravel(), EXAMPLES * np.eye(5)[2], rtol=1e-9)
