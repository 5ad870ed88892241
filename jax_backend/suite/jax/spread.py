"""Many devices: each factorizes a share of every stack of factors, and hands the results round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Function = Callable[[Any, jax.Array], Any]


@dataclass(frozen=True)
class Spread:
    """How factorizations are shared out.

    Args:
        mesh: under `jit`, the devices to share them over, all axes of it; None: no sharing.
        axis_name: inside the user's own `shard_map`, the axis to share them over.
        gathered: whether every device gets all results; else, under `jit`, they stay where they were
            computed.
    """

    mesh: Mesh | None = None
    axis_name: str | None = None
    gathered: bool = True

    def over_stack(self, function: Function, worth_it: bool, stack: Any, extra: jax.Array) -> Any:
        """`function(stack, extra)`, for a pytree whose arrays share a leading axis.

        Args:
            function: works on each entry of the leading axis by itself.
            worth_it: False computes everything everywhere.
        """
        if not worth_it or (self.mesh is None and self.axis_name is None):
            return function(stack, extra)
        if self.axis_name is not None:
            return self._inside(function, stack, extra)
        return self._under_jit(function, stack, extra)

    def _under_jit(self, function: Function, stack: Any, extra: jax.Array) -> Any:
        mesh = self.mesh
        assert mesh is not None
        count = extra.shape[0]
        padded = _padded((stack, extra), mesh.size)
        split = PartitionSpec(mesh.axis_names)
        mapped = jax.shard_map(
            lambda pair: function(*pair), mesh=mesh, in_specs=(split,), out_specs=split, check_vma=False
        )
        out = jax.tree.map(lambda x: x[:count], mapped(padded))
        if not self.gathered:
            return out
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, everywhere), out)

    def _inside(self, function: Function, stack: Any, extra: jax.Array) -> Any:
        axis = self.axis_name
        assert axis is not None
        devices, count = lax.axis_size(axis), extra.shape[0]
        padded = _padded((stack, extra), devices)
        share = -(-count // devices)
        start = lax.axis_index(axis) * share
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, share), padded)
        out = function(*own)
        return jax.tree.map(lambda x: _all_gathered(x, axis)[:count], out)


def _all_gathered(x: jax.Array, axis: str) -> jax.Array:
    """Every device's part, joined, as a value that is equal on all of them."""
    if x.dtype == jnp.bool_:
        return _all_gathered(x.astype(jnp.int8), axis) > 0
    size = lax.axis_size(axis)
    whole = jnp.zeros((size, *x.shape), x.dtype)
    # A sum and not an all-gather: its result is known to be equal everywhere.
    whole = lax.dynamic_update_index_in_dim(whole, x, lax.axis_index(axis), 0)
    return lax.psum(whole, axis).reshape(-1, *x.shape[1:])


def _padded(tree: Any, devices: int) -> Any:
    """The last entry repeated until the leading axis can be shared out evenly."""

    def pad(x: jax.Array) -> jax.Array:
        missing = -x.shape[0] % devices
        return jnp.concatenate([x, *([x[-1:]] * missing)]) if missing else x

    return jax.tree.map(pad, tree)
