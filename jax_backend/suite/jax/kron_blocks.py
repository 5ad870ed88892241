"""The static side of PSGD Kron over a pytree: equal leaves are joined, cut and put into buckets.

Equal leaves become one array before anything is computed, so that the program has one reshape and one
slice per parameter and all mathematics once per kind of parameter: it compiles fast at any depth.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from suite.core import blocks, buckets, noise
from suite.core.checks import check_flag
from suite.jax.dtypes import at_least_float32
from suite.jax.masks import keys_of, unmasked


@dataclass(frozen=True)
class Group:
    """Leaves of equal shape, dtype and treatment; joined, they are one scanned parameter."""

    members: tuple[int, ...]  # places of the leaves
    plan: blocks.BlockPlan  # of the joined array (leaves, *shape), or of one leaf that is scanned itself
    stacked: bool  # whether joining adds the leading axis


@dataclass(frozen=True)
class Bucket:
    """Blocks of one kind, of all parameters, in the order of the parameters."""

    sizes: tuple[int, ...]
    diagonal: tuple[bool, ...]
    diagonal_blocks: tuple[int, ...]  # of each factor
    dtype: Any  # of the factors
    streams: list[int]  # noise streams of the blocks
    parts: tuple[tuple[int, int, int], ...]  # group, tile and number of blocks of what is joined
    order: np.ndarray | None  # which of the joined blocks comes at each place; None: as joined

    @property
    def blocks(self) -> int:
        return len(self.streams)


@dataclass(frozen=True)
class Blocks:
    """Groups of leaves, and the buckets of their blocks."""

    plans: list[blocks.BlockPlan | None]  # of every leaf; None: it is empty
    groups: tuple[Group, ...]
    buckets: tuple[Bucket, ...]

    def join(self, leaves: list[Any]) -> list[Any]:
        """Leaves like the parameters as one array (leaves, *shape) per group."""
        joined = []
        for group in self.groups:
            own = [leaves[i] for i in group.members]
            kinds = {x.dtype for x in own}
            if len(kinds) > 1:  # of gradients
                own = [x.astype(at_least_float32(*kinds)) for x in own]
            if group.stacked:
                own = [x.reshape(1, *x.shape) for x in own]
            joined.append(own[0] if len(own) == 1 else jax.lax.concatenate(own, 0))
        return joined

    def part(self, joined: list[Any], leaves: list[Any], places: Sequence[Any]) -> list[Any]:
        """Undo `join`, with `places(...)`; what is empty is taken from `leaves`."""
        leaves = list(leaves)
        for group, x in zip(self.groups, joined, strict=True):
            rest = (np.uint32(0),) * (x.ndim - 1)
            for k, i in enumerate(group.members):
                own = x
                if len(group.members) > 1:
                    own = jax.lax.dynamic_slice(x, (places[k], *rest), (1, *x.shape[1:]))
                leaves[i] = own.reshape(leaves[i].shape).astype(leaves[i].dtype)
        return leaves

    def places(self, always: jax.Array) -> Sequence[Any]:
        """0, 1, ... up to the largest group, as numbers unknown to a compiler.

        XLA on a CPU compiles each slice at a known place anew, 15 ms each, and all slices at unknown
        places as one. What comes out of a branch is unknown.

        Args:
            always: a boolean that is true, which the compiler must not know either.
        """
        count = max((len(group.members) for group in self.groups), default=0)
        return jax.lax.cond(always, *_ranges(count)) if count > 1 else (0,)

    def split(self, joined: list[Any]) -> list[Any]:
        """Groups as one array (blocks, *sizes) per bucket."""
        stacks = [blocks.split(group.plan, x) for group, x in zip(self.groups, joined, strict=True)]
        found = []
        for bucket in self.buckets:
            own = [stacks[group][tile] for group, tile, _ in bucket.parts]
            whole = own[0] if len(own) == 1 else jnp.concatenate(own)
            found.append(whole if bucket.order is None else _taken(whole, bucket.order))
        return found

    def merge(self, found: list[Any]) -> list[Any]:
        """Undo `split`."""
        stacks: list[list[Any]] = [[None] * len(group.plan.tiles) for group in self.groups]
        for bucket, x in zip(self.buckets, found, strict=True):
            if bucket.order is not None:
                x = _taken(x, np.argsort(bucket.order))
            counts = [count for _, _, count in bucket.parts]
            own = jax.lax.split(x, counts) if len(counts) > 1 else (x,)
            for (group, tile, _), stack in zip(bucket.parts, own, strict=True):
                stacks[group][tile] = stack
        return [blocks.merge(group.plan, own) for group, own in zip(self.groups, stacks, strict=True)]

    def noise(self, step: jax.Array, use: int, dtype: Any) -> list[Any]:
        """Noise like the groups."""
        return self.merge(
            [
                noise.draw(jnp.asarray(bucket.streams, jnp.int32), step, use, bucket.sizes, dtype)
                for bucket in self.buckets
            ]
        )


def plan(
    tree: Any,
    structure: blocks.Structure,
    scanned_layers: Any,
    seed: int,
    factor_dtype: Callable[[Any], Any],
    kinds: list[Hashable] | None = None,
) -> Blocks:
    """Blocks and buckets of a pytree.

    Args:
        kinds: of every leaf, what else than shape and dtype it must share with those it is joined with.

    Raises:
        TypeError: `scanned_layers` that are not booleans.
        ValueError: leaves that are no floats, or complex; `scanned_layers` of another structure.
    """
    leaves = jax.tree.leaves(tree)
    require_real_floats(leaves)
    scanned = _scanned(scanned_layers, tree, len(leaves))
    plans: list[blocks.BlockPlan | None] = []
    members: dict[Hashable, list[int]] = {}
    for i, (leaf, is_scanned) in enumerate(zip(leaves, scanned, strict=True)):
        shape, size = np.shape(leaf), np.size(leaf)
        plans.append(blocks.plan_blocks(shape, structure, scanned=is_scanned) if size else None)
        if size:
            # Scanned leaves stay alone: their leading axis may be sharded.
            kind = (jnp.result_type(leaf), kinds[i] if kinds else None, i if is_scanned else None)
            members.setdefault((shape, kind), []).append(i)
    groups = []
    for own in members.values():
        shape, stacked = np.shape(leaves[own[0]]), not scanned[own[0]]
        whole = (len(own), *shape) if stacked else shape
        groups.append(Group(tuple(own), blocks.plan_blocks(whole, structure, scanned=True), stacked))

    streams = [
        noise.stream_numbers(i, of_leaf.blocks if of_leaf else 0, seed)
        for i, of_leaf in enumerate(plans)
    ]
    # By the factors' dtype: gradients may come in a wider one than their parameters.
    stacks, places = [], []
    for number, group in enumerate(groups):
        dtype = jnp.dtype(factor_dtype(jnp.result_type(leaves[group.members[0]])))
        start = 0  # a tile's first block in each member
        for t, tile in enumerate(group.plan.tiles):
            blocks_of_all = group.plan.tile_blocks(tile)
            each = blocks_of_all // len(group.members)
            alike = (tile.sizes, group.plan.diagonal, tile.diagonal_blocks, dtype)
            stacks.append((alike, blocks_of_all))
            owners = [(i, start + block) for i in group.members for block in range(each)]
            places.append((number, t, owners))
            start += each
    found = []
    for planned in buckets.plan_buckets(stacks):
        own_places = [places[member.index] for member in planned.members]
        owners = [owner for _, _, of_part in own_places for owner in of_part]
        order = sorted(range(len(owners)), key=owners.__getitem__)
        own_streams = [streams[leaf][block] for leaf, block in sorted(owners)]
        parts = tuple((number, t, len(of_part)) for number, t, of_part in own_places)
        as_joined = order == list(range(len(order)))
        order_of_parts = None if as_joined else np.asarray(order, np.int32)
        sizes, diagonal, cuts, dtype = planned.key
        found.append(Bucket(sizes, diagonal, cuts, dtype, own_streams, parts, order_of_parts))
    return Blocks(plans, tuple(groups), tuple(found))


def require_real_floats(leaves: Sequence[Any]) -> None:
    """ValueError unless all parameters are of real floats."""
    for leaf in leaves:
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                "complex parameters are not covered: optax.contrib.split_real_and_imaginary(...) around "
                "the optimizer gives it real and imaginary parts"
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"parameters must be floats, got {dtype}: leave others out, as by optax.masked or "
                "equinox.filter(model, equinox.is_inexact_array)"
            )


def _scanned(scanned_layers: Any, tree: Any, leaves: int) -> list[bool]:
    """Whether each leaf is scanned."""
    if scanned_layers is None:
        return [False] * leaves
    scanned, given = jax.tree.flatten(scanned_layers)
    for flag in scanned:
        check_flag("scanned_layers", bool(flag) if isinstance(flag, np.bool_) else flag)
    expected = jax.tree.structure(tree)
    if given == expected:  # type: ignore[operator]
        return scanned
    with contextlib.suppress(ValueError):
        own = unmasked(scanned_layers, tree)
        if jax.tree_util.all_leaves(own):
            return own
    paths = (
        [path for path, _ in jax.tree_util.tree_flatten_with_path(x)[0]] for x in (tree, scanned_layers)
    )
    own, found = (list(map(keys_of, some)) for some in paths)
    if all(own) and own == found:  # flax's nnx hands optimizers a tree with and without boxes
        return scanned
    raise ValueError(f"scanned_layers must have the structure {expected}, got {given}")


@functools.cache
def _ranges(count: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """0, 1, ..., and zeros: two branches. Cached, for JAX knows functions by their identity."""
    return (
        lambda: tuple(np.uint32(k) for k in range(count)),
        lambda: (np.uint32(0),) * count,
    )


def _taken(x: jax.Array, order: np.ndarray) -> jax.Array:
    return x.at[order].get(mode="promise_in_bounds", unique_indices=True)
