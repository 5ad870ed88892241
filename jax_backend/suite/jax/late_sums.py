"""Statistics of the products that the loss function runs by itself, after its derivative is known.

Such a product leaves its input and its output's gradient; all sums together are a function of these,
which one `lax.cond` can leave out in steps that want none. So passes forward and backward are compiled
once, and not inside of a `cond`, where XLA computes the gradients of convolutions on a CPU some 25 times
slower (jaxlib 0.10.2). What runs in loops, in remat or over devices is summed on the way back.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from suite.jax.explicit_axes import explicit_mesh
from suite.jax.jaxprs import CALLS, called
from suite.jax.layers import Layer, LayerSums, Sums, Use
from suite.jax.probes import Probe
from suite.jax.varying import varying_axes

Site = tuple[Layer, Use]
Measure = Callable[[Layer, Use, Any, jax.Array, Sums], Sums]


def late_outputs(closed: Any, arguments: Sequence[Any], sites: Sequence[Site]) -> dict[int, Any]:
    """Zeros like the outputs of the products, by number of the site, that are summed late.

    Args:
        closed: the loss function's jaxpr, as it will be run.
        arguments: what it will be run with. Where they, or what a product reads and makes, are spread
            over devices by their types, those of gradients are not known, and it is not summed late.
    """
    if any(map(_is_spread, (*arguments, *closed.consts))):
        return {}
    found = {}
    for number, (_, use) in enumerate(sites):
        equation = _inline(closed.jaxpr, use.path)
        if equation is None or any(_is_spread(v.aval) for v in (*equation.invars, *equation.outvars)):
            continue
        aval = equation.outvars[use.out].aval
        found[number] = jnp.zeros(aval.shape, aval.dtype)
    return found


def _is_spread(x: Any) -> bool:
    """Whether the type of an array, or a type, says that it is divided or differs over devices."""
    return bool(varying_axes(x)) or explicit_mesh(x) is not None


def _inline(jaxpr: Any, path: Sequence[int]) -> Any:
    """The equation at `path`, if nothing but calls is around it."""
    for number in path[:-1]:
        equation = jaxpr.eqns[number]
        if equation.primitive.name not in CALLS:
            return None
        jaxpr, _ = called(equation)
    return jaxpr.eqns[path[-1]]


def late_probe(use: Use, keep: Callable[[Any], None]) -> Probe:
    """Hands the product's input to `keep`; its slot's cotangent is the gradient of the output."""

    def apply(x: Any, y: jax.Array, slot: jax.Array) -> jax.Array:
        keep(x)
        return _leave_gradient(y, slot)

    return Probe(use.path, use.out, use.x_operand, apply, use.scans, *use.reads)


@jax.custom_vjp
def _leave_gradient(y: jax.Array, slot: jax.Array) -> jax.Array:
    del slot
    return y


_leave_gradient.defvjp(lambda y, slot: (y, None), lambda _, gradient: (gradient, gradient))


def add_late(
    found: dict[str, LayerSums],
    sites: Sequence[Site],
    inputs: Mapping[int, Any],
    gradients: Mapping[int, jax.Array],
    measure: Measure,
) -> dict[str, LayerSums]:
    """`found` and the sums of late products, from their inputs and their outputs' gradients."""
    places = [(layer.name, "transposed" if use.transposed else "main") for layer, use in sites]
    early = {place for number, place in enumerate(places) if number not in gradients}
    parts: dict[tuple[str, str], list[Sums]] = {}
    for number, place in enumerate(places):
        like = getattr(found[place[0]], place[1])
        own = parts.setdefault(place, [like] if place in early else [])
        if number in gradients:
            own.append(measure(*sites[number], inputs[number], gradients[number], like))
    added = dict(found)
    for (name, side), sums in parts.items():
        total = functools.reduce(functools.partial(jax.tree.map, operator.add), sums)
        added[name] = added[name]._replace(**{side: total})
    return added
