"""Many devices: who they are, and the sums in which they hand results round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from suite.core.checks import check_choice
from suite.core.placement import AssignmentStrategy, Placement, gradient_workers
from suite.jax.devices import axis_size, on_devices
from suite.jax.varying import varying_alike, varying_axes

_FRACTIONS = {"comm_opt": 1.0, "hybrid_opt": 0.5, "mem_opt": 0.0}
STRATEGIES = ("compute", "memory")


@dataclass(frozen=True)
class Spread:
    """How factors and directions are shared out; a device's number is its place in the mesh.

    Args:
        mesh: under `jit`, the devices to share them over, all axes of it; None: no sharing.
        axis_name: inside the user's own `shard_map` (over `mesh`, if that is given, too), the axis to
            share them over.
        fraction: of the devices, which hold a layer's inverses: the gradient workers.
        strategy: what is balanced.
    """

    mesh: Mesh | None = None
    axis_name: str | None = None
    fraction: float = 1.0
    strategy: AssignmentStrategy = "compute"

    @property
    def alone(self) -> bool:
        """Nothing to share out, or nobody to share it with."""
        return self.axis_name is None and (self.mesh is None or self.mesh.size == 1)

    @property
    def axes(self) -> Any:
        """For collectives."""
        if self.axis_name is not None:
            return self.axis_name
        assert self.mesh is not None
        return self.mesh.axis_names

    @property
    def explicit_mesh(self) -> Mesh | None:
        """The mesh, where results have its axes in their types."""
        if self.alone or self.axis_name is not None:
            return None
        return self.mesh if getattr(self.mesh, "explicit_axes", ()) else None

    @property
    def automatic_mesh(self) -> Mesh:
        """The mesh for programs, which run as if explicit axes were automatic: JAX wants them alike."""
        assert self.mesh is not None
        if self.explicit_mesh is None:
            return self.mesh
        kinds = (jax.sharding.AxisType.Auto,) * len(self.mesh.axis_names)
        return Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds)

    @property
    def devices(self) -> int:
        if self.mesh is None:
            return axis_size(self.axes)
        return self.mesh.size if self.axis_name is None else self.mesh.shape[self.axis_name]

    @property
    def workers(self) -> int:
        """Gradient workers of a layer."""
        return gradient_workers(self.devices, self.fraction)

    @property
    def keeps(self) -> bool:
        """Whether a device keeps a share of the inverses only."""
        return not self.alone and self.fraction < 1 and self.workers < self.devices

    # ---- programs ------------------------------------------------------------------------------

    def divided(self, x: jax.Array) -> jax.Array:
        """(devices, ...) with a row on each device."""
        # The user's `shard_map` does that, or `on_explicit_mesh`.
        if self.axis_name is not None or self.explicit_mesh is not None:
            return x
        assert self.mesh is not None
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(self.axes)))

    def on_explicit_mesh(self, tree: Any, specs: Any) -> Any:
        """A new state, with the axes of the explicit mesh in its types; without such a mesh as it is.

        By a transfer: nothing else tells `jax.jit` which devices an explicit mesh is of.
        """
        mesh = self.explicit_mesh
        if mesh is None:
            return tree
        return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))

    def rows_here(self) -> int:
        """Rows of a divided array that the program sees: one inside the user's `shard_map`."""
        if self.axis_name is not None:
            try:
                axis_size(self.axis_name)
            except NameError:  # state is made before, outside
                return self.devices
            return 1
        return self.devices

    def run(self, function: Callable[..., Any], own: Any, common: Any) -> Any:
        """`function(own, common)` on each device, which returns such a pair.

        Args:
            own: divided arrays, of which the function sees one row.
            common: arrays that are equal everywhere.
        """
        if self.axis_name is not None:
            return function(own, common)
        specs = PartitionSpec(self.axes), PartitionSpec()
        return on_devices(function, self.automatic_mesh, specs, specs)(own, common)

    # ---- inside of them ------------------------------------------------------------------------

    def index(self) -> jax.Array:
        return lax.axis_index(self.axes)

    def vary(self, tree: Any) -> Any:
        """Values as differing between devices, where JAX tracks that."""
        return varying_alike(tree, self.index())

    def total(self, tree: Any) -> Any:
        """Summed over all devices."""
        return lax.psum(tree, self.axes)

    def to_workers(self, x: jax.Array, placement: Placement) -> jax.Array:
        """Summed over the gradient workers of a group."""
        if placement.workers == 1:
            return x
        groups = placement.worker_groups
        if placement.groups == 1:
            return lax.psum(x, self.axes)
        if not self._tracked():
            return lax.psum(x, self.axes, axis_index_groups=groups)
        # psum in groups is missing where JAX tracks what differs: round the ring, then.
        around = [(a, b) for own in groups for a, b in zip(own, (*own[1:], own[0]), strict=True)]
        total = x
        for _ in range(placement.workers - 1):
            x = lax.ppermute(x, self.axes, around)
            total = total + x
        return total

    def to_receivers(self, tree: Any, placement: Placement) -> Any:
        """Summed over one gradient worker of each group."""
        if placement.groups == 1:
            return tree
        if not self._tracked():
            return lax.psum(tree, self.axes, axis_index_groups=placement.receiver_groups)
        # The sum over all devices is what JAX knows to be equal everywhere: one row of the grid gives.
        gives = self.index() < placement.groups
        return lax.psum(jax.tree.map(lambda x: jnp.where(gives, x, jnp.zeros_like(x)), tree), self.axes)

    def _tracked(self) -> bool:
        return bool(varying_axes(self.index()))


def spread_of(
    mesh: Any, axis_name: Any, gradient_worker_fraction: Any, assignment_strategy: Any
) -> Spread:
    """The settings of `scale_by_kfac`, checked."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if axis_name is not None and not isinstance(axis_name, str):
        raise TypeError(f"axis_name must be the name of a mesh axis, got {axis_name!r}")
    if mesh is not None and axis_name is not None and axis_name not in mesh.axis_names:
        raise ValueError(f"axis_name must be an axis of mesh, {mesh.axis_names}, got {axis_name!r}")
    fraction = 1.0 if gradient_worker_fraction is None else gradient_worker_fraction
    if isinstance(fraction, str):
        check_choice("gradient_worker_fraction", fraction.lower(), tuple(_FRACTIONS))
        fraction = _FRACTIONS[fraction.lower()]
    strategy = assignment_strategy
    strategy = strategy.lower() if isinstance(strategy, str) else strategy
    check_choice("assignment_strategy", strategy, STRATEGIES)
    spread = Spread(mesh, axis_name, fraction, cast(AssignmentStrategy, strategy))
    gradient_workers(1 if mesh is None else spread.devices, fraction)
    if mesh is None and fraction < 1:
        raise ValueError(
            "gradient_worker_fraction below 1 needs mesh=, the devices that it is a share of, "
            f"got {gradient_worker_fraction!r}"
        )
    return spread
