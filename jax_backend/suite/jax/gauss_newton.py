"""A loss as a convex function of a model's outputs: its value, and its Gauss-Newton products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from suite.core.linalg import inner_product
from suite.jax import jaxprs

Arrays = Sequence[jax.Array]


class Linearized(NamedTuple):
    """A loss and its outputs near some parameters."""

    loss: jax.Array
    push: Callable[[Arrays], Arrays]  # J v
    hessian: Callable[[Arrays], Arrays]  # H u, H the Hessian of the loss by the outputs

    def products(self, directions: Sequence[Arrays]) -> list[jax.Array]:
        """(J v)ᵀ H (J w) over pairs v <= w of directions, row by row, each () in at least float32."""
        tangents = [self.push(v) for v in directions]
        curved = [self.hessian(u) for u in tangents]
        return [total(h, u) for i, h in enumerate(curved) for u in tangents[i:]]


def linearized(
    value_fn: Callable[[Any], Any], leaves: Arrays, rebuild: Callable[[Arrays], Any]
) -> Linearized:
    """`value_fn` at `rebuild(leaves)`, with its derivatives by these leaves.

    Raises:
        TypeError: not a scalar loss and a pytree of arrays of floats.
        ValueError: a loss that is not computed from the outputs.
    """
    halves = jaxprs.cut(lambda given: _flat(value_fn(rebuild(given))), list(leaves))
    outputs, push, rest = jax.linearize(halves.before, list(leaves), has_aux=True)

    def loss(outputs: Arrays) -> jax.Array:
        return halves.after(outputs, rest)

    _, hessian = jax.linearize(jax.grad(loss), outputs)
    return Linearized(loss(outputs), lambda v: push(list(v)), hessian)


def total(left: Arrays, right: Arrays) -> jax.Array:
    """Σ <x, y> over the arrays of two lists, () in at least float32."""

    def summed(left: Arrays, right: Arrays) -> jax.Array:
        return jnp.sum(jnp.stack([inner_product(x, y) for x, y in zip(left, right, strict=True)]))

    return jaxprs.on_automatic_axes(summed, left, right)


def _flat(returned: Any) -> list[jax.Array]:
    """[loss, *outputs]."""
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        raise TypeError(f"value_fn must return (loss, outputs), got {type(returned).__name__}")
    loss, outputs = returned
    listed = jax.tree.leaves(outputs)
    if getattr(loss, "shape", None) != ():
        raise TypeError(f"value_fn must return a scalar loss first, got {loss!r}")
    if not listed or not all(
        hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) for x in listed
    ):
        raise TypeError(
            "value_fn must return the arrays of floats that the loss is a function of second, "
            f"got {outputs!r}"
        )
    return [loss, *listed]
