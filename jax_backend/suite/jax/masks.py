"""Settings that are given for all parameters, where some of those are masked.

`optax.masked` and `optax.partition` put a MaskedNode, which has no leaves, where a parameter, or a whole
subtree, is another transformation's; what the user says about all parameters keeps its leaves there.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def unmasked(settings: Any, tree: Any) -> list[Any]:
    """What `settings`, a pytree for all parameters, holds for each leaf of `tree`, some of it masked.

    Raises:
        ValueError: it has another structure.
    """
    places, treedef = jax.tree.flatten(tree, is_leaf=is_masked)
    own = treedef.flatten_up_to(settings)  # type: ignore[attr-defined]
    return [x for x, place in zip(own, places, strict=True) if not is_masked(place)]


def keys_of(path: Any) -> tuple[Any, ...]:
    """The keys of dictionaries on the way to a leaf; boxes and other nodes aside."""
    return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))


def like(updates: Any, tree: Any) -> Any:
    """A vector or product of all parameters as one of those that are not masked in `updates`.

    optax masks updates and parameters, but not what else `update` is given.

    Raises:
        ValueError: it has other leaves.
    """
    leaves, treedef = jax.tree.flatten(updates)
    own = jax.tree.leaves(tree)
    if len(own) > len(leaves):
        with contextlib.suppress(ValueError):
            own = jax.tree.leaves(unmasked(tree, updates))
    expected, found = ([jnp.shape(x) for x in some] for some in (leaves, own))
    if expected != found:
        raise ValueError(f"vector and hvp must have the shapes {expected} of the updates, got {found}")
    return jax.tree.unflatten(treedef, own)


def beside(updates: Any, params: Any) -> Any:
    """`params` with None where `updates` has it: what has no update may be anything.

    As in optax, where a whole model of equinox's, with its functions and integers, may be `params`.
    """
    with contextlib.suppress(ValueError):  # or it has another structure
        return jax.tree.map(
            lambda own, p: None if own is None else p, updates, params, is_leaf=lambda x: x is None
        )
    return params


def of_whole(value_fn: Any, updates: Any, params: Any) -> Any:
    """`value_fn`, a function of parameters, as one of those that `beside` leaves."""
    leaves = jax.tree.leaves(updates, is_leaf=lambda x: x is None)
    if not callable(value_fn) or not any(x is None for x in leaves):
        return value_fn

    def of(values: Any) -> Any:
        def back(own: Any, value: Any, p: Any) -> Any:
            return p if own is None else value

        return value_fn(jax.tree.map(back, updates, values, params, is_leaf=lambda x: x is None))

    return of


def decayed_weights(weight_decay: Any, mask: Any) -> optax.GradientTransformation:
    """`optax.add_decayed_weights`, whose `init` says what is wrong with a mask.

    Raises:
        ValueError: `mask` has another structure than the parameters, or a part of it, have.
        TypeError: it has a leaf that is no boolean.
    """
    if mask is None:
        return optax.add_decayed_weights(weight_decay)

    def own(params: Any) -> Any:
        given = mask(params) if callable(mask) else mask
        with contextlib.suppress(ValueError):  # or it is a prefix
            leaves = unmasked(given, params)
            if jax.tree_util.all_leaves(leaves):
                return jax.tree.unflatten(jax.tree.structure(params), leaves)
        return given

    decay = optax.add_decayed_weights(weight_decay, own)

    def init(params: Any) -> Any:
        given = own(params)
        for leaf in jax.tree.leaves(given):
            if not isinstance(leaf, bool | int) and getattr(leaf, "dtype", None) != np.bool_:
                raise TypeError(f"weight_decay_mask must have leaves True or False, got {leaf!r}")
        try:
            jax.tree.map(lambda *_: None, given, params)
        except ValueError as error:
            raise ValueError(
                "weight_decay_mask must have the structure of the parameters, or a prefix of it, "
                f"{jax.tree.structure(params)}, got {jax.tree.structure(given)}"
            ) from error
        return decay.init(params)

    return optax.GradientTransformation(init, decay.update)


def is_masked(x: Any) -> bool:
    """Whether a node of a pytree stands where another transformation's parameter is."""
    return isinstance(x, optax.MaskedNode)
