"""Transformations of arrays whose sharding is in their types, on mesh axes that are explicit.

The mathematics joins leaves, cuts blocks and puts them elsewhere: with explicit axes each such step
would have to say how its result is sharded. So updates are computed as if the axes were automatic, and
what comes out has the shardings of what went in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import jax
import numpy as np
import optax

from suite.jax.masks import beside, of_whole
from suite.jax.varying import type_of

F = TypeVar("F", bound=Callable[..., Any])


def on_automatic_axes(f: Callable[..., Any], *arguments: Any, out: Any = None, mesh: Any = None) -> Any:
    """f(*arguments), as if mesh axes that are explicit were not.

    Args:
        out: PartitionSpecs of the result, a pytree that its structure begins with; None: it is on every
            device.
        mesh: with explicit axes, which the result gets even where no argument has them.
    """
    around = jax.sharding.get_abstract_mesh()
    if not around.empty and not getattr(around, "explicit_axes", ()):
        mesh = None  # they are automatic already
    meshes = [own for own in map(explicit_mesh, jax.tree.leaves(arguments)) if own is not None]
    if mesh is None and not meshes:
        return f(*arguments)
    if not hasattr(jax.sharding, "auto_axes"):
        raise NotImplementedError(
            "arrays with explicit sharding axes need jax >= 0.7: make the mesh with AxisType.Auto"
        )
    out = jax.sharding.PartitionSpec() if out is None else out
    kind = meshes[0] if mesh is None else mesh
    explicit = set(kind.explicit_axes)  # others are automatic already, or those of a `shard_map` around
    out = jax.tree.map(lambda spec: _along(spec, explicit), out)
    automatic = functools.partial(jax.sharding.auto_axes, f, axes=tuple(kind.explicit_axes))
    if mesh is not None:  # whose devices are known: the arguments may be on others
        out = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), out)
        return automatic(out_sharding=out)(*arguments)
    with jax.sharding.use_abstract_mesh(kind):
        return automatic(out_sharding=out)(*arguments)


def _along(spec: Any, axes: set[str]) -> Any:
    """A PartitionSpec without the axes that are none of these."""

    def entry(x: Any) -> Any:
        return tuple(axis for axis in x if axis in axes) if isinstance(x, tuple) else x

    kept = [entry(x) for x in spec]
    return jax.sharding.PartitionSpec(*(x if isinstance(x, tuple) or x in axes else None for x in kept))


def explicit_specs(tree: Any) -> Any:
    """How arrays are sharded over explicit axes, as a pytree of PartitionSpecs."""

    def spec(x: Any) -> Any:
        return jax.sharding.PartitionSpec() if explicit_mesh(x) is None else jax.typeof(x).sharding.spec

    return jax.tree.map(spec, tree)


def explicit_mesh(x: Any) -> Any:
    """The mesh over whose explicit axes an array is sharded; None: it is not."""
    kind = type_of(x)
    mesh: Any = getattr(getattr(kind, "sharding", None), "mesh", None)
    return mesh if getattr(mesh, "explicit_axes", ()) else None


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
    return optax.GradientTransformationExtraArgs(tx.init, _Update(tx.update, mesh, specs))


def takes_explicit_settings(make: F) -> F:
    """A function that makes an `across_explicit_axes`, whose numbers may be arrays with explicit axes.

    `optax.inject_hyperparams` makes them so. What is computed on automatic axes must not close over
    them: there the transformation is made anew, of numbers that come in as arguments.
    """

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        tx = make(*args, **kwargs)
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = [isinstance(leaf, jax.Array) and explicit_mesh(leaf) is not None for leaf in leaves]
        places = [i for i, explicit in enumerate(arrays) if explicit]
        if not places:
            return tx

        def anew(numbers: Sequence[jax.Array]) -> optax.GradientTransformationExtraArgs:
            filled = list(leaves)
            for i, number in zip(places, numbers, strict=True):
                filled[i] = number
            args, kwargs = jax.tree.unflatten(treedef, filled)
            return make(*args, **kwargs)

        numbers = tuple(leaves[i] for i in places)
        return tx._replace(update=replace(tx.update, numbers=numbers, anew=anew))

    return cast(F, made)


@dataclass(frozen=True)
class _Update:
    inner: Callable[..., tuple[Any, Any]]
    mesh: Any
    specs: Callable[[Any], Any]
    numbers: tuple[jax.Array, ...] = ()  # with explicit axes, of which `anew` makes the transformation
    anew: Callable[[Sequence[jax.Array]], optax.GradientTransformationExtraArgs] | None = None

    def __call__(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        arrays = {name: value for name, value in extra.items() if _is_numeric(value)}
        others = {name: value for name, value in extra.items() if name not in arrays}
        if "value_fn" in others:
            others["value_fn"] = of_whole(others["value_fn"], updates, params)

        def compute(updates: Any, state: Any, params: Any, arrays: Any, numbers: Any) -> tuple[Any, Any]:
            inner = self.inner if self.anew is None else self.anew(numbers).update
            return inner(updates, state, params, **arrays, **others)

        given = updates, state, beside(updates, params), arrays, self.numbers
        out = explicit_specs(updates), self.specs(state)
        return on_automatic_axes(compute, *given, out=out, mesh=self.mesh)


def _is_numeric(tree: Any) -> bool:
    """Whether the leaves are arrays or numbers: functions, strings and the like pass as they are."""
    kinds = (jax.Array, np.ndarray, np.generic, int, float, complex)
    return all(isinstance(x, kinds) for x in jax.tree.leaves(tree))
