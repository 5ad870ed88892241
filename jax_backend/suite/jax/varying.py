"""Values that differ between devices inside shard_map, by their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def cond(chosen: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any, like: Any) -> Any:
    """`lax.cond` whose branches may return what varies differently over devices, inside shard_map.

    Args:
        like: what they read that may vary; where nothing of it does, this is `lax.cond`.
    """
    if not any(varying_axes(x) for x in jax.tree.leaves(like)):
        return lax.cond(chosen, yes, no, *operands)
    kinds = [jax.eval_shape(branch, *operands) for branch in (yes, no)]

    def varied(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *own: jax.tree.map(varying_alike, branch(*own), *kinds)

    return lax.cond(chosen, varied(yes), varied(no), *operands)


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
