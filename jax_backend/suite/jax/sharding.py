"""Kron's buckets over the devices of a mesh: each device fits and applies its share of the blocks.

A bucket's leading axis is padded to a multiple of the devices' number and divided among them. Fitting
needs no communication; preconditioning ends in one all-gather per bucket, or in a sum where a bucket has
few blocks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from suite.jax.devices import on_devices
from suite.jax.masks import is_masked, keys_of, unmasked

T = Any


@dataclass(frozen=True)
class Layout:
    """Over which mesh axes the blocks of every bucket are divided; none: every device has all."""

    axes: tuple[str, ...] = ()
    mesh: Any = None

    @property
    def spec(self) -> PartitionSpec:
        """Of an array whose leading axis counts blocks."""
        return PartitionSpec(self.axes) if self.axes else PartitionSpec()

    def on(self, tree: Any) -> Layout:
        """The layout on the mesh around (`jax.set_mesh(mesh)`, `with mesh:`), or else on that of `tree`.

        Raises:
            ValueError: there is none, or it lacks one of the axes.
        """
        mesh = _mesh_around() or next(filter(None, map(_mesh_of, jax.tree.leaves(tree))), None)
        if mesh is None:
            raise ValueError(
                f"sharding the preconditioner over {self.axes} needs a mesh: jax.set_mesh(mesh), or "
                "arrays that are sharded"
            )
        missing = [axis for axis in self.axes if axis not in mesh.axis_names]
        if missing:
            raise ValueError(f"the mesh must have the axes {missing}, got {mesh.axis_names}")
        return Layout(self.axes, mesh)

    def devices(self) -> int:
        """How many shares there are."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def padded(self, blocks: int) -> int:
        """The next multiple of the number of shares."""
        return -(-blocks // self.devices()) * self.devices()

    def place(self, tree: T) -> T:
        """The arrays (blocks, ...) with their blocks divided."""
        return self.constrain(tree, self.spec) if self.axes else tree

    def constrain(self, tree: T, spec: PartitionSpec) -> T:
        """Arrays with the sharding `spec`."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), tree)

    def are_few(self, blocks: int) -> bool:
        """Whether most shares of so many blocks would be padding."""
        return bool(self.axes) and 2 * blocks < self.devices()

    def shared_out(self, x: jax.Array, blocks: int) -> jax.Array:
        """An array that every device has, padded to `blocks` and divided; few blocks stay whole."""
        if not self.axes:
            return x
        # Whole before it is divided anew: XLA finds no direct way from one sharding to the other.
        x = x if self.are_few(x.shape[0]) else pad(x, blocks)
        x = self.constrain(x, PartitionSpec())
        return x if self.are_few(x.shape[0]) else self.place(x)

    def resized(self, state: T, blocks: int) -> T:
        """State of `blocks` and their padding, as of another number of devices, as it is with these.

        Raises:
            ValueError: there are fewer in it.
        """
        rows = self.padded(blocks) if self.axes else blocks

        def of_these(x: jax.Array) -> jax.Array:
            if x.shape[0] < blocks:
                raise ValueError(f"the state must have {blocks} blocks of a kind, got {x.shape[0]}")
            return x if x.shape[0] == rows else pad(x[:blocks], rows)

        return jax.tree.map(of_these, state)

    def each(self, function: Callable[..., T], *args: Any) -> T:
        """`function` of every device's share of the arrays; the results stay divided."""
        return self._mapped(function, self.spec, *args) if self.axes else function(*args)

    def gathered(self, function: Callable[..., jax.Array], *args: Any, blocks: int) -> jax.Array:
        """`function` of every device's share, one array, then all `blocks` on every device."""
        if not self.axes:
            return function(*args)

        def share(*own: Any) -> jax.Array:
            found = function(*own)
            if not self.are_few(blocks):
                return jax.lax.all_gather(found, self.axes, tiled=True)[:blocks]
            # A sum with zeros, of what is wanted alone, sends less than all shares.
            place = jax.lax.axis_index(self.axes)
            whole = jnp.zeros((blocks, *found.shape[1:]), found.dtype)
            return jax.lax.psum(whole.at[place].set(found[0], mode="drop"), self.axes)

        return self._mapped(share, PartitionSpec(), *args)

    def _mapped(self, function: Callable[..., T], out: PartitionSpec, *args: Any) -> T:
        """`function` on every device; of arrays of few blocks, which it has whole, its own or zeros."""

        def is_whole(x: jax.Array) -> bool:
            return self.are_few(x.shape[0])

        def own(x: jax.Array) -> jax.Array:
            place, blocks = jax.lax.axis_index(self.axes), x.shape[0]
            taken = jax.lax.dynamic_slice_in_dim(x, jnp.minimum(place, blocks - 1), 1)
            return jnp.where(place < blocks, taken, jnp.zeros_like(taken))

        whole = jax.tree.map(is_whole, args)
        mapped = on_devices(
            lambda *given: function(*jax.tree.map(lambda w, x: own(x) if w else x, whole, given)),
            self.mesh,
            in_specs=jax.tree.map(lambda w: PartitionSpec() if w else self.spec, whole),
            out_specs=out,
        )
        return mapped(*args)


def layout_of(params_partition_specs: Any, preconditioner_partition_spec: Any) -> Layout:
    """Blocks go over the axes of `preconditioner_partition_spec`, or else over those of the parameters.

    Raises:
        TypeError: not a PartitionSpec.
    """
    if preconditioner_partition_spec is not None:
        specs = [preconditioner_partition_spec]
        if not isinstance(preconditioner_partition_spec, PartitionSpec):
            given = repr(preconditioner_partition_spec)
            raise TypeError(f"preconditioner_partition_spec must be a PartitionSpec, got {given}")
    else:
        specs = jax.tree.leaves(params_partition_specs, is_leaf=is_spec)
        for spec in specs:
            if not is_spec(spec):
                raise TypeError(f"params_partition_specs must hold PartitionSpecs or None, got {spec!r}")
    axes: list[str] = []
    for spec in specs:
        for entry in spec or ():
            for axis in entry if isinstance(entry, tuple) else (entry,):
                if axis is not None and axis not in axes:
                    axes.append(axis)
    return Layout(tuple(axes))


def pad(x: jax.Array, blocks: int) -> jax.Array:
    """Zero blocks behind the others: they are no evidence, and their factors stay as they are."""
    missing = blocks - x.shape[0]
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x


def constrain(tree: T, params_partition_specs: Any, layout: Layout) -> T:
    """A pytree like the parameters, with their sharding."""
    if params_partition_specs is None:
        return tree
    specs = specs_of(tree, params_partition_specs)
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, list(map(layout.constrain, leaves, specs)))


def specs_like(tree: Any, params_partition_specs: Any) -> Any:
    """The specs as a pytree of the structure of `tree`, see `specs_of`."""
    return jax.tree.unflatten(jax.tree.structure(tree), specs_of(tree, params_partition_specs))


def specs_of(tree: Any, params_partition_specs: Any) -> list[PartitionSpec]:
    """The specs of the leaves of `tree`; None for one of them stands for PartitionSpec().

    Raises:
        ValueError: another number of specs than leaves, or other keys.
    """
    leaves = jax.tree.leaves(tree)
    specs: list[Any] = []
    with contextlib.suppress(ValueError):  # lists, and trees with or without boxes, go by order
        specs = unmasked(params_partition_specs, tree)
    if not specs or not all(map(is_spec, specs)):
        named = jax.tree_util.tree_flatten_with_path(params_partition_specs, is_leaf=is_spec)[0]
        specs = [spec for _, spec in named]
        places = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_absent)[0]
        if len(specs) == len(places):
            for (path, _), (own, _) in zip(named, places, strict=True):
                found, expected = keys_of(path), keys_of(own)
                if found and expected and found != expected:  # a list of specs has none
                    raise ValueError(
                        "params_partition_specs must have the keys of the parameters: "
                        f"{jax.tree_util.keystr(path)} is none of them"
                    )
            specs = [spec for spec, (_, x) in zip(specs, places, strict=True) if not _is_absent(x)]
    if len(specs) != len(leaves):
        raise ValueError(
            f"params_partition_specs must have a spec for each of {len(leaves)} parameters, "
            f"got {len(specs)}"
        )
    return [PartitionSpec() if spec is None else spec for spec in specs]


def _is_absent(x: Any) -> bool:
    """Whether a node of a pytree of parameters stands where there is none: masked, or equinox's None."""
    return x is None or is_masked(x)


def _mesh_around() -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    try:  # an enclosing `with mesh:` shows in what a constraint does
        return _mesh_of(jax.lax.with_sharding_constraint(jnp.zeros(()), PartitionSpec()))
    except (RuntimeError, ValueError):
        return None


def _mesh_of(x: Any) -> Any:
    """The mesh of an array, concrete where the array is; None without one."""
    try:
        sharding = x.sharding if isinstance(x, jax.Array) and not isinstance(x, Tracer) else None
        mesh = getattr(sharding or jax.typeof(x).sharding, "mesh", None)
    except TypeError:  # not an array
        return None
    return None if mesh is None or mesh.empty else mesh


def is_spec(x: Any) -> bool:
    """Whether a node of a pytree of specs is one."""
    return x is None or isinstance(x, PartitionSpec)


def in_batches(function: Callable[..., T], batch_size: int, *args: Any) -> T:
    """`function` of stacks, `batch_size` of their blocks at a time, by `lax.map`."""
    blocks = jax.tree.leaves(args)[0].shape[0]
    whole = blocks // batch_size * batch_size
    if whole == 0 or blocks <= batch_size:
        return function(*args)
    head = jax.tree.map(lambda x: x[:whole].reshape(-1, batch_size, *x.shape[1:]), args)
    done = jax.lax.map(lambda part: function(*part), head)
    done = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), done)
    if whole == blocks:
        return done
    rest = function(*jax.tree.map(lambda x: x[whole:], args))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), done, rest)
