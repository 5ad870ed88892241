"""A function on every device of a mesh, in every version of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def on_devices(
    function: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` of each device's share; what comes out is taken to be as `out_specs` say."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    from jax.experimental.shard_map import shard_map  # jax 0.6.0

    return shard_map(function, mesh, in_specs, out_specs, check_rep=False)


def axis_size(axes: str | tuple[str, ...]) -> int:
    """How many devices there are along mesh axes, inside `shard_map`.

    Raises:
        NameError: outside of it.
    """
    return int(lax.psum(1, axes))
