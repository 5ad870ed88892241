"""A loss as a convex function of a model's outputs: its value, and its Gauss-Newton products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from suite.core.linalg import inner_product
from suite.jax.explicit_axes import on_automatic_axes
from suite.jax.halves import cut

Arrays = Sequence[jax.Array]


class Linearized(NamedTuple):
    """A loss and its outputs near some parameters."""

    loss: jax.Array
    push: Callable[
        [Arrays], tuple[Arrays, Any]
    ]  # J v, and the same of all else that the loss is made of
    slope: Callable[[Arrays, Any], jax.Array]  # from these the derivative of the loss
    gradient: Arrays  # by the outputs
    hessian: Callable[[Arrays], Arrays]  # H u, H the Hessian of the loss by the outputs

    def derivative(self, direction: Arrays) -> tuple[jax.Array, jax.Array]:
        """Of the loss along a direction, and ‖gradient‖ ‖J v‖, of which it is what is not cancelled."""
        tangents, others = self.push(list(direction))
        norms = total(self.gradient, self.gradient), total(tangents, tangents)
        return self.slope(tangents, others), jnp.sqrt(norms[0]) * jnp.sqrt(norms[1])

    def products(self, directions: Sequence[Arrays]) -> list[jax.Array]:
        """(J v)ᵀ H (J w) over pairs v <= w of directions, row by row, each () in at least float32."""
        tangents = [self.push(list(v))[0] for v in directions]
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
    halves = cut(lambda given: _flat(value_fn(rebuild(given))), list(leaves))
    (outputs, rest), push = jax.linearize(halves.before, list(leaves))
    loss, slope = jax.linearize(halves.after, outputs, rest)
    gradient, hessian = jax.linearize(jax.grad(lambda given: halves.after(given, rest)), outputs)
    return Linearized(loss, push, slope, gradient, hessian)


def total(left: Arrays, right: Arrays) -> jax.Array:
    """Σ <x, y> over the arrays of two lists, () in at least float32."""

    def summed(left: Arrays, right: Arrays) -> jax.Array:
        return jnp.sum(jnp.stack([inner_product(x, y) for x, y in zip(left, right, strict=True)]))

    return on_automatic_axes(summed, left, right)


def _flat(returned: Any) -> list[jax.Array]:
    """[loss, *outputs]."""
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        raise TypeError(f"value_fn must return (loss, outputs), got {returned!r}")
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
