"""What statistics tell before they are used."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from suite.core.linalg import traces
from suite.jax.layers import LayerSums
from suite.jax.plan import Plan, Statistics

_CHECKED_THROUGHOUT = 128  # side of second moments of which every entry is looked at


def finite_signs(given: Statistics) -> list[jax.Array]:
    """Of which one is not finite if statistics are not, or if factors made of them would not be.

    No entry of a second moment exceeds its trace; of a mean of N terms factors are at most N² times the
    sums.
    """
    scale = jnp.square(jnp.maximum(jnp.asarray(given.terms, jnp.float32), 1))
    found, matrices = [given.terms], []
    for sums in given.layers.values():
        for own in (sums.main, sums.transposed):
            if own is None:
                continue
            found.append(own.rows)
            for x in (own.A, own.G, own.products):
                if x is None:
                    continue
                if x is own.products or x.ndim < 3:
                    found.append(x * scale.astype(x.dtype))
                    continue
                if x.shape[-1] <= _CHECKED_THROUGHOUT:
                    found.append(x)
                matrices.append(x)
    if matrices:
        diagonals = traces(matrices)  # in one product: there is less to compile
        found.append(diagonals * scale.astype(diagonals.dtype))
    return found


def are_evidence(given: Statistics, *, has_to_have_terms: bool) -> jax.Array:
    """Whether statistics are of anything, ().

    Args:
        has_to_have_terms: whether those of a loss without terms are not.
    """
    rows = [jnp.any(sums.main.rows > 0) for sums in given.layers.values()]
    seen = jnp.any(jnp.stack(rows))
    return seen & (jnp.asarray(given.terms) > 0) if has_to_have_terms else seen


def require_fit(plan: Plan, given: Statistics, products: bool) -> None:
    """Raise unless statistics are of this plan."""
    if given.sampled != plan.sampled:
        whose = ["the loss's gradients", "a Fisher"]
        raise ValueError(
            f"statistics do not fit the plan, which is of {whose[plan.sampled]}, got those of "
            f"{whose[given.sampled]} (sampled={given.sampled}): take the plan of the value_and_grad "
            "that they come from"
        )
    names = {layer.name for layer in plan.layers}
    if set(given.layers) != names:
        missing, unknown = sorted(names - set(given.layers)), sorted(set(given.layers) - names)
        raise ValueError(
            f"statistics do not fit the plan: missing {missing}, unknown {unknown}. Make the plan with "
            "arguments of the shapes that value_and_grad is called with, inside of shard_map if it is "
            "called there: of one example, or on one device, they may be understood otherwise, and so "
            "may masks that were arrays at hand and are arguments now"
        )
    expected = jax.eval_shape(plan.no_statistics).layers
    for name, sums in given.layers.items():
        shapes = [_shapes(sums), _shapes(expected[name])]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"statistics do not fit the plan: {name} must have second moments of the shapes "
                f"{shapes[1]}, got {shapes[0]}: arguments of other shapes may be understood otherwise, "
                "those of one example among them"
            )
    if products:
        measured: list[LayerSums] = [
            given.layers[layer.name] for layer in plan.layers if layer.measures_products
        ]
        if any(sums.main.products is None for sums in measured):
            raise ValueError(
                "compute_method='ekfac' needs second moments in its eigenbases: call "
                "value_and_grad(...)(params, ..., bases=suite.jax.eigenbases(tx_state, plan))"
            )


def _shapes(sums: LayerSums) -> list[tuple[int, ...] | None]:
    """Of A and G, in each orientation."""
    both = [own for own in (sums.main, sums.transposed) if own is not None]
    return [None if x is None else x.shape for own in both for x in (own.A, own.G)]
