"""Transformations of arrays whose sharding is in their types, on mesh axes that are explicit.

The mathematics joins leaves, cuts blocks and puts them elsewhere: with explicit axes each such step
would have to say how its result is sharded. So updates are computed as if the axes were automatic, and
what comes out has the shardings of what went in.
"""

from __future__ import annotations

from typing import Any

import optax

from suite.jax.jaxprs import explicit_specs, on_automatic_axes


def across_explicit_axes(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """`tx`, whose updates are like the gradients and whose state keeps its structure."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        functions = {name: value for name, value in extra.items() if callable(value)}
        arrays = {name: value for name, value in extra.items() if name not in functions}

        def compute(updates: Any, state: Any, params: Any, arrays: Any) -> tuple[Any, Any]:
            return tx.update(updates, state, params, **arrays, **functions)

        out = explicit_specs((updates, state))
        return on_automatic_axes(compute, updates, state, params, arrays, out=out)

    return optax.GradientTransformationExtraArgs(tx.init, update)
