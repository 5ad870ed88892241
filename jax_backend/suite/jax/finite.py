"""A step that is not finite changes nothing: decided on the device, without a branch."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from suite.core.linalg import finite_mark, usually

T = TypeVar("T")


def all_finite(tree: Any) -> jax.Array:
    """Whether every number in a pytree is finite, ()."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    if not leaves:
        return jnp.asarray(True)
    return jnp.all(jnp.stack([jnp.isfinite(finite_mark(x)) for x in leaves]))


def select(condition: jax.Array, new: T, old: T) -> T:
    """`new` where `condition`, else `old`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def zero_unless(condition: jax.Array, tree: T) -> T:
    """The pytree itself, or zeros; what is NaN although the condition holds stays so, to be seen."""
    return jax.tree.map(lambda x: usually(condition, x, lambda: _nan_or_zero(condition, x)), tree)


def _nan_or_zero(condition: jax.Array, x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return jnp.where(condition, jnp.nan, 0).astype(x.dtype)
