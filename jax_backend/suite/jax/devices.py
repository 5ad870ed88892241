"""A function on every device of a mesh, in every version of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec


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


def whole_on_others(x: jax.Array) -> jax.Array:
    """`x`, inside of a `shard_map` over some of the axes not divided over the others.

    XLA (jaxlib 0.10.2) ends the process where a `gather` there is of an array that it divided.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if getattr(mesh, "manual_axes", ()) and getattr(mesh, "auto_axes", ()):
        return lax.with_sharding_constraint(x, PartitionSpec())
    return x
