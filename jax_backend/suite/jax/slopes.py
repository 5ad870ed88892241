"""Derivatives of functions of a leaf that take its entries one by one: exp(p), softplus(p), p exp(-p).

A row's gradient by p is its gradient by f(p), times f'(p).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from suite.jax.jaxprs import Path, bind, dtype_is_float
from suite.jax.operations import Reindex, operation_of
from suite.jax.varying import varying_alike

SLOPE = -1  # in place of an operand's number


class Slope(NamedTuple):
    """The derivative of what the equation at `path` makes of a leaf, entry by entry."""

    path: Path
    starts: frozenset[tuple[Path, int]]  # operands of equations that are the leaf's own entries
    through: frozenset[Path]  # the equations that make it of these, the last one's among them

    @property
    def key(self) -> tuple[Path, int]:
        """Its place among the operands of equations."""
        return self.path, SLOPE


Slopes = dict[Any, jax.Array]  # by variable of a jaxpr


class Follower:
    """What is known of a program's slopes, while it runs."""

    def __init__(self, slopes: Sequence[Slope]) -> None:
        self.starts = frozenset[tuple[Path, int]]().union(*(slope.starts for slope in slopes))
        self.through = frozenset[Path]().union(*(slope.through for slope in slopes))

    def follow(self, eqn: Any, values: Sequence[Any], path: Path, slopes: Slopes) -> None:
        """Add those of an equation's outputs, of what it makes of a leaf's entries or moves about."""
        if not self.starts:
            return
        given = known(slopes, eqn.invars)
        for i, value in enumerate(values):
            if (path, i) in self.starts:
                given[i] = varying_alike(jnp.ones_like(value), value)
        if given and path in self.through:
            slopes[eqn.outvars[0]] = _of_function(eqn, values, given)
        elif given and eqn.primitive.name in _SIDE_BY_SIDE:
            slopes.update((eqn.outvars[i], slope) for i, slope in given.items())
        elif given and _moves_entries(eqn):
            moved = bind(eqn, [given.get(i, value) for i, value in enumerate(values)])
            slopes.update(zip(eqn.outvars, moved, strict=True))


def known(slopes: Slopes, variables: Sequence[Any]) -> dict[int, jax.Array]:
    """The slopes of some variables, and literals, by place."""
    given = ((i, v) for i, v in enumerate(variables) if not isinstance(v, jex.Literal))
    return {i: slopes[v] for i, v in given if v in slopes}


_SIDE_BY_SIDE = {"optimization_barrier", "device_put"}  # each output is one of the inputs


def _moves_entries(eqn: Any) -> bool:
    """Whether all outputs are the first operand, re-indexed, and have its derivative."""
    if not dtype_is_float(eqn.outvars[0].aval):
        return False
    moves = eqn.primitive.name in {"split", "unstack", "dynamic_slice", "reshape"}
    return moves or isinstance(operation_of(eqn), Reindex)


def _of_function(eqn: Any, values: Sequence[Any], given: Mapping[int, jax.Array]) -> jax.Array:
    """The chain rule: the slope of the output, by those of operands."""

    def function(*own: jax.Array) -> jax.Array:
        both = dict(zip(given, own, strict=True))
        return bind(eqn, [both.get(i, value) for i, value in enumerate(values)])[0]

    out, pull = jax.vjp(function, *(values[i] for i in given))
    derivatives = pull(varying_alike(jnp.ones_like(out), out))
    first, *others = (slope * own for slope, own in zip(given.values(), derivatives, strict=True))
    return sum(others, first)
