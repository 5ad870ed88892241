"""A program without products that it computes twice: in a derivative, and of the function beside it.

A product that is read in two places is one use, whose gradient is the sum of theirs; computed twice it
would be two, without what is between them. The compiler makes one of them in any case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from suite.jax.jaxprs import CALLS, PROBE, bind, called

_PRODUCTS = {"dot_general", "conv_general_dilated"}
_RANDOM = {"rng_uniform"}  # each time anew

Make = Callable[[Any, list[Any]], Sequence[Any]]  # of an equation and its operands: what it returns


def without_repeats(closed: Any, arguments: Sequence[Any]) -> Any:
    """A jaxpr in which equal products of the same values are one; the same jaxpr, if there are none.

    Found are those outside of loops, branches and `remat`, which is to compute again; calls (`jit`) are
    opened then.
    """
    found = _Sharing(lambda eqn, values: [object() for _ in eqn.outvars])
    found.run(closed.jaxpr, closed.consts, [object() for _ in arguments])
    if not found.repeats_products:
        return closed
    return jax.make_jaxpr(lambda given: _Sharing(bind).run(closed.jaxpr, closed.consts, given))(
        arguments
    )


class _Sharing:
    """Runs a jaxpr, each of its equations once for the same operands."""

    def __init__(self, make: Make) -> None:
        self.make, self.repeats_products = make, False
        self.known: dict[Hashable, tuple[list[Any], Sequence[Any]]] = {}  # operands, for their ids

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, jex.Literal) else env[v]

        for eqn in jaxpr.eqns:
            values = [read(v) for v in eqn.invars]
            if _is_open(eqn):
                outputs: Sequence[Any] = self.run(*called(eqn), values)
            elif (same := _without_zero(eqn, values)) is not None:
                outputs = [same]
            elif eqn.effects or eqn.primitive.name in _RANDOM:
                outputs = self.make(eqn, values)
            else:
                outputs = self.once(eqn, values)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def once(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        own = _known_derivative(eqn)
        params = own or tuple((name, _key(eqn.params[name])) for name in sorted(eqn.params))
        operands = tuple(
            (str(v.val), str(v.aval)) if isinstance(v, jex.Literal) and not np.ndim(v.val) else id(value)
            for v, value in zip(eqn.invars, values, strict=True)
        )
        key = eqn.primitive, params, operands, str(eqn.ctx)  # which random bits depend on, too
        if key not in self.known:
            self.known[key] = values, self.make(eqn, values)
        elif eqn.primitive.name in _PRODUCTS:
            self.repeats_products = True
        return self.known[key][1]


def _is_open(eqn: Any) -> bool:
    """Whether it is a call that asks for nothing, as `jit` with shardings does."""
    given = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    asks = any(isinstance(one, jax.sharding.Sharding) for one in given)
    return eqn.primitive.name in CALLS and eqn.params.get("name") != PROBE and not asks


def _without_zero(eqn: Any, values: list[Any]) -> Any:
    """y of 0.0 + y, as `jet` writes it; None: it is no such sum."""
    if eqn.primitive.name != "add":
        return None
    zeros = [isinstance(v, jex.Literal) and not np.ndim(v.val) and v.val == 0 for v in eqn.invars]
    if zeros.count(True) != 1:
        return None
    other = zeros.index(False)
    return values[other] if eqn.invars[other].aval == eqn.outvars[0].aval else None


def _known_derivative(eqn: Any) -> Hashable:
    """What tells calls of jax's own `logaddexp` (`softplus`) apart; None: it is no such call.

    Of other functions with derivatives of their own each call may have another.
    """
    if eqn.primitive.name != "custom_jvp_call":
        return None
    program = eqn.params["call_jaxpr"]
    source = str(getattr(getattr(program.jaxpr, "debug_info", None), "func_src_info", ""))
    is_own = source.startswith("logaddexp at " + os.path.join(os.path.dirname(jax.__file__), ""))
    return str(program) if is_own else None


def _key(x: Any) -> Hashable:
    """Equal for equal parameters; what cannot tell, as a program, equals itself alone."""
    try:
        hash(x)
    except TypeError:
        return id(x)
    return x
