"""Hessian-vector products of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from suite.core.checks import check_choice
from suite.jax.varying import vary_like


def hessian_vector_product(
    loss_fn: Callable[[Any], jax.Array], params: Any, vector: Any, *, method: str = "exact"
) -> Any:
    """H v of `loss_fn` at `params`, like these: `hvp=` of an update of Kron Newton, beside `vector=`.

    Args:
        loss_fn: the loss, (), as a function of the parameters alone.
        params, vector: pytrees of the same structure, shapes and dtypes; v.
        method: 'exact', by forward over reverse differentiation; or 'finite_difference', of two
            gradients, at the parameters and √eps v away, where the former does not exist.

    Raises:
        ValueError: another `method`.
    """
    check_choice("method", method, ("exact", "finite_difference"))
    gradient = jax.grad(loss_fn)
    if method == "exact":
        return jax.jvp(gradient, (params,), (vary_like(vector, params),))[1]
    step = max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(params)) ** 0.5
    moved = jax.tree.map(lambda p, v: p + jnp.asarray(step, p.dtype) * v, params, vector)
    return jax.tree.map(lambda a, b: (a - b) / step, gradient(moved), gradient(params))
