"""Values that differ between devices inside shard_map, by their types, or between members of `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_batching.custom_vmap
def of_any(chosen: jax.Array) -> jax.Array:
    """The boolean () itself; under `vmap` whether any member's is true, one for all."""
    return chosen


@of_any.def_vmap
def _of_members(size: int, batched: Any, chosen: jax.Array) -> tuple[jax.Array, bool]:
    return of_any(jnp.any(chosen, axis=0) if batched[0] else chosen), False


@jax.custom_batching.custom_vmap
def _in_member(chosen: jax.Array) -> jax.Array:
    """True, which a compiler takes away; under `vmap` each member's own boolean."""
    return jnp.full_like(chosen, True)


@_in_member.def_vmap
def _of_each(size: int, batched: Any, chosen: jax.Array) -> tuple[jax.Array, bool]:
    return (chosen if batched[0] else _in_member(chosen)), batched[0]


def cond(chosen: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any, like: Any) -> Any:
    """`lax.cond` that is one under `vmap`, too, and whose branches may vary differently over devices.

    `vmap` computes both sides of a `lax.cond` whose predicate is not one for all members; this one only
    where some member takes `yes`. `no` is to be what costs nothing.

    Args:
        like: what the branches read that may vary inside shard_map.
    """

    if any(varying_axes(x) for x in jax.tree.leaves(like)):
        kinds = [jax.eval_shape(branch, *operands) for branch in (yes, no)]
        yes, no = _varied(yes, kinds), _varied(no, kinds)

    def members(*own: Any) -> Any:
        return lax.cond(_in_member(chosen), yes, no, *own)

    return lax.cond(of_any(chosen), members, no, *operands)


def _varied(branch: Callable[..., Any], kinds: Sequence[Any]) -> Callable[..., Any]:
    """A branch whose results vary over devices as those of all kinds do."""
    return lambda *own: jax.tree.map(varying_alike, branch(*own), *kinds)


def varying_alike(slots: Any, *others: Any) -> Any:
    """Slots as varying over devices as what they will hold sums of, inside shard_map."""
    axes = set().union(*(varying_axes(other) for other in others))

    def vary(slot: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(slot)))
        if not missing:
            return slot
        if hasattr(lax, "pcast"):
            return lax.pcast(slot, missing, to="varying")
        return lax.pvary(slot, missing)  # type: ignore[attr-defined]

    return jax.tree.map(vary, slots) if axes else slots


def varying_axes(x: Any) -> set[str]:
    """The mesh axes over which a value differs between devices, inside shard_map."""
    kind = type_of(x)
    if hasattr(kind, "manual_axis_type"):  # jax 0.10
        return set(kind.manual_axis_type.varying)
    return set(getattr(kind, "vma", ()))


def type_of(x: Any) -> Any:
    """Of an array, or a type itself; None where jax has none to ask for."""
    if hasattr(x, "to_tangent_aval") and not isinstance(x, jax.Array):  # a type
        return x
    return jax.typeof(x) if hasattr(jax, "typeof") else None


def vary_like(tree: Any, like: Any) -> Any:
    """Each leaf as varying over the devices that the same leaf of `like` varies over."""
    return jax.tree.map(varying_alike, tree, like)
