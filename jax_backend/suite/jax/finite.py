"""A step that is not finite changes nothing: decided on the device, without a branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from suite.core.linalg import finite_marks, inner_product, usually
from suite.jax.dtypes import at_least_float32

T = TypeVar("T")


def all_finite(tree: Any, power: float = 1) -> jax.Array:
    """Whether every number in a pytree is finite, (); with `power` as `finite_marks` has it."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    marks = [finite_marks(x, power) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not marks:
        return jnp.asarray(True)
    kind = at_least_float32(*(x.dtype for x in marks))
    together = jnp.concatenate([x.astype(kind) for x in marks])
    return jnp.isfinite(inner_product(together, jnp.zeros_like(together)))


def sum_if(condition: jax.Array, parts: Sequence[jax.Array]) -> jax.Array:
    """The sum of numbers, (), or 0 where a condition does not hold.

    By a branch, for compilers write a plain sum of many into each kernel that uses it.
    """
    together = jnp.stack(parts)
    # Zeros by a choice, not by the branch: within `shard_map` both branches are to vary alike.
    chosen = jnp.where(condition, together, jnp.zeros_like(together))
    found: jax.Array = jax.lax.cond(condition, jnp.sum, lambda x: x[0], chosen)
    return found


def select(condition: jax.Array, new: T, old: T) -> T:
    """`new` where `condition`, else `old`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


@jax.jit  # outside of any other `jax.debug_nans` would find the mark below; inside this changes nothing
def zero_unless(condition: jax.Array, tree: T) -> T:
    """The pytree itself, or zeros; what is NaN although the condition holds stays so, to be seen."""
    nan_or_zero = jnp.where(condition, jnp.nan, 0)

    def chosen(x: jax.Array) -> jax.Array:
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        other = nan_or_zero.astype(x.dtype) if inexact else jnp.zeros((), x.dtype)
        return usually(condition, x, lambda: other)

    return jax.tree.map(chosen, tree)
