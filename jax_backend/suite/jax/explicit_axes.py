"""Transformations of arrays whose sharding is in their types, on mesh axes that are explicit.

The mathematics joins leaves, cuts blocks and puts them elsewhere: with explicit axes each such step
would have to say how its result is sharded. So updates are computed as if the axes were automatic, and
what comes out has the shardings of what went in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from suite.jax.jaxprs import explicit_specs, on_automatic_axes


def across_explicit_axes(
    tx: optax.GradientTransformationExtraArgs,
    mesh: Any = None,
    specs: Callable[[Any], Any] = explicit_specs,
) -> optax.GradientTransformationExtraArgs:
    """`tx`, whose updates are like the gradients and whose state keeps its structure.

    Args:
        mesh: with explicit axes, see `on_automatic_axes`.
        specs: of a state, as `explicit_specs`.
    """

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        arrays = {name: value for name, value in extra.items() if _is_numeric(value)}
        others = {name: value for name, value in extra.items() if name not in arrays}

        def compute(updates: Any, state: Any, params: Any, arrays: Any) -> tuple[Any, Any]:
            return tx.update(updates, state, params, **arrays, **others)

        out = explicit_specs(updates), specs(state)
        return on_automatic_axes(compute, updates, state, params, arrays, out=out, mesh=mesh)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _is_numeric(tree: Any) -> bool:
    """Whether the leaves are arrays or numbers: functions, strings and the like pass as they are."""
    kinds = (jax.Array, np.ndarray, np.generic, int, float, complex)
    return all(isinstance(x, kinds) for x in jax.tree.leaves(tree))
