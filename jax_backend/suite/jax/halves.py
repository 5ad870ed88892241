"""A traced function cut in two: a loss, at the outputs of its model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex

from suite.jax.jaxprs import CALLS, REMAT, bind, called, dtype_is_float
from suite.jax.operations import Reindex, operation_of


class Halves(NamedTuple):
    """A program cut in two: up to some values of it, and from these on."""

    before: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]  # arguments -> values, the rest
    after: Callable[[Sequence[Any], Sequence[Any]], Any]  # values, the rest -> first output


def cut(function: Callable[[Sequence[Any]], Sequence[Any]], arguments: Sequence[Any]) -> Halves:
    """Cut a function, arrays to arrays, at all of its outputs but the first, which is made of these.

    Calls are opened for that, and rematerialized parts where nothing else helps; loops are not.

    Raises:
        ValueError: the first output does not depend on the others, or these depend on each other.
    """
    closed = jax.make_jaxpr(function)(arguments)
    for calls in (CALLS, CALLS | REMAT):
        opened = functools.partial(_opened, closed.jaxpr, closed.consts, calls=calls)
        halves = _cut(jax.make_jaxpr(opened)(list(arguments)))
        if halves is not None:
            return halves
    raise ValueError("the loss must be computed from the outputs, and not in a loop that makes them")


def _cut(whole: Any) -> Halves | None:
    makers = {v: eqn for eqn in whole.jaxpr.eqns for v in eqn.outvars}
    result, *values = whole.jaxpr.outvars
    values = [_whence(v, makers) for v in values]
    after: set[Any] = {v for v in values if not isinstance(v, jex.Literal)}
    parts: tuple[list[Any], list[Any]] = ([], [])
    for eqn in whole.jaxpr.eqns:
        later = any(v in after for v in eqn.invars if not isinstance(v, jex.Literal))
        if later and any(v in after for v in eqn.outvars):
            raise ValueError(
                "outputs must not be computed from one another: return only what the loss is made of"
            )
        parts[later].append(eqn)
        after.update(eqn.outvars if later else ())
    if isinstance(result, jex.Literal) or result not in after:
        return None
    own = {v for eqn in parts[1] for v in eqn.outvars} | set(values)
    read = [v for eqn in parts[1] for v in eqn.invars if not isinstance(v, jex.Literal)]
    rest = list(dict.fromkeys(v for v in read if v not in own))

    def first(given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        env = dict(zip(whole.jaxpr.constvars, whole.consts, strict=True))
        env.update(zip(whole.jaxpr.invars, given, strict=True))
        _run_equations(parts[0], env)
        return [_read(env, v) for v in values], [env[v] for v in rest]

    def then(given: Sequence[Any], kept: Sequence[Any]) -> Any:
        env = dict(zip(rest, kept, strict=True))
        env.update(pair for pair in zip(values, given, strict=True) if pair[0] in after)
        _run_equations(parts[1], env)
        return env[result]

    return Halves(first, then)


def _whence(v: Any, makers: Mapping[Any, Any]) -> Any:
    """What `v` is the same numbers as, in another shape or order: the loss may be made of that."""
    while not isinstance(v, jex.Literal) and v in makers:
        eqn = makers[v]
        if not isinstance(operation_of(eqn), Reindex):
            break
        (before,) = eqn.invars
        if before.aval.size != v.aval.size or not dtype_is_float(before.aval):
            break
        v = before
    return v


def _opened(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], *, calls: Set[str]
) -> list[Any]:
    """Run a jaxpr, the equations of calls of these kinds one by one."""
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in calls:
            inner, own = called(eqn)
            outputs = _opened(inner, own, [_read(env, v) for v in eqn.invars], calls=calls)
            env.update(zip(eqn.outvars, outputs, strict=True))
        else:
            _run_equations([eqn], env)
    return [_read(env, v) for v in jaxpr.outvars]


def _run_equations(equations: Sequence[Any], env: dict[Any, Any]) -> None:
    for eqn in equations:
        outputs = bind(eqn, [_read(env, v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outputs, strict=True))


def _read(env: Mapping[Any, Any], v: Any) -> Any:
    return v.val if isinstance(v, jex.Literal) else env[v]
