"""What statistics tell before they are used."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from suite.jax.layers import LayerSums
from suite.jax.plan import Plan, Statistics


def any_rows(given: Statistics) -> jax.Array:
    """Whether statistics are of anything, ()."""
    rows = [jnp.any(sums.main.rows > 0) for sums in given.layers.values()]
    return jnp.any(jnp.stack(rows))


def require_fit(plan: Plan, given: Statistics, products: bool) -> None:
    """Raise unless statistics are of this plan."""
    if not isinstance(given, Statistics):
        raise TypeError(
            f"statistics must be what suite.jax.value_and_grad returns, got {type(given).__name__}"
        )
    names = {layer.name for layer in plan.layers}
    if set(given.layers) != names:
        missing, unknown = sorted(names - set(given.layers)), sorted(set(given.layers) - names)
        raise ValueError(
            f"statistics do not fit the plan: missing {missing}, unknown {unknown}. Make the plan with "
            "arguments of the shapes that value_and_grad is called with"
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
