"""Which values of a program are the same, computed again."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from suite.jax import jaxprs
from suite.jax.operations import (
    Add,
    Divide,
    DotGeneral,
    LoopSlice,
    Moved,
    Multiply,
    Negate,
    Reindex,
    Returned,
    Select,
)
from suite.jax.views import Shape

_ENTRY_BY_ENTRY = {
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "cos", "cosh", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "ne",
    "nextafter", "not", "and", "or", "xor", "pow", "rem", "round", "rsqrt", "sign", "sin", "sinh",
    "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
}  # fmt: skip


def same_values(program: jaxprs.Program) -> list[int]:
    """For each value the first that is computed in the same way from the same values.

    So a derivative's values are those of the function itself, which it computes again, perhaps point by
    point: axes of length 1, which `x[None]` has under `vmap`, make no difference. What loops carry is
    alike if they start alike and all that they make of it is; what a `cond` returns is like nothing.
    """
    apart: set[int] = set()
    while True:
        first = _same_but(program, apart)
        ends: dict[int, int] = {}  # by what is carried in, of those that seem alike, what goes on
        found = {a for a, b in program.back if ends.setdefault(first[a], first[b]) != first[b]} - apart
        if not found:
            return first
        apart |= found


def _same_but(program: jaxprs.Program, apart: set[int]) -> list[int]:
    """`same_values`, where loops go on as they start, but for what is `apart` from all others."""
    first = list(range(len(program.avals)))
    known: dict[Any, tuple[int, ...]] = {}
    for node in program.nodes:
        value = node.inputs[0] if node.inputs else None
        if node.outputs[0] in apart or (isinstance(node.operation, Moved) and node.name == "cond"):
            continue
        if value is not None and _is_handed_on(program, node, value):
            first[node.outputs[0]] = first[value]
            continue
        # What loops and devices hand on stands at another place than in their call.
        own = not isinstance(node.operation, Moved | LoopSlice)
        numbers = [program.number(node, i) if own else None for i in range(len(node.inputs))]
        operands = tuple(
            str(number) if v is None or number is not None else first[v]
            for v, number in zip(node.inputs, numbers, strict=True)
        )
        avals = [program.avals[out] for out in node.outputs]
        kinds = tuple((_longer_than_1(aval.shape), aval.dtype) for aval in avals)
        loops = tuple(path if n is None else n for path, n in node.loops)
        key = (node.name, _what_is_done(program, node), operands, kinds, loops)
        for out, one in zip(node.outputs, known.setdefault(key, node.outputs), strict=True):
            first[out] = one
    return first


def _is_handed_on(program: jaxprs.Program, node: jaxprs.Node, value: int) -> bool:
    """Whether the output is the input, but for axes of length 1."""
    op, out = node.operation, program.avals[node.outputs[0]].shape
    if isinstance(op, Returned):
        return True
    if op == Reindex(None):  # also casts: to whole numbers they lose the rest
        before, after = (program.avals[v].dtype for v in (value, node.outputs[0]))
        both = jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)
        return both or before == after
    return _is_step(op, "reshape") and _longer_than_1(_shapes(program, node)[0]) == _longer_than_1(out)


def _what_is_done(program: jaxprs.Program, node: jaxprs.Node) -> Any:
    """The operation and its parameters, their axes counted without those of length 1 where known."""
    op, params, shapes = node.operation, dict(node.params or {}), _shapes(program, node)
    out = program.avals[node.outputs[0]].shape
    longer = [axis for axis, n in enumerate(out) if n != 1]
    done: Any = op, shapes
    if _is_step(op, "reshape"):
        params, done = {}, _longer_than_1(shapes[0])
    elif _is_step(op, "broadcast"):
        _, axes = op.step[1]
        given = {axis for axis, n in zip(axes, shapes[0], strict=True) if n != 1}
        params, done = {}, tuple(axis in given for axis in longer)
    elif isinstance(op, DotGeneral):
        del params["dimension_numbers"]
        done = tuple(
            tuple(len(_longer_than_1(shape[:axis])) for axis in axes if shape[axis] != 1)
            for each in (op.contracted, op.batch)
            for axes, shape in zip(each, shapes, strict=True)
        )
    elif _is_entry_by_entry(node, shapes, out):
        done = tuple(tuple(shape[axis] != 1 for axis in longer if shape) for shape in shapes)
    return done, tuple(sorted((name, str(x)) for name, x in params.items()))


def _is_entry_by_entry(node: jaxprs.Node, shapes: tuple[Shape, ...], out: Shape) -> bool:
    """Whether each entry of the output is made of one entry of each operand."""

    def fits(shape: Shape) -> bool:
        alike = len(shape) == len(out) and all(a in (1, n) for a, n in zip(shape, out, strict=True))
        return shape == () or alike

    known = isinstance(node.operation, Add | Multiply | Divide | Negate | Select)
    return (known or node.name in _ENTRY_BY_ENTRY) and all(map(fits, shapes))


def _shapes(program: jaxprs.Program, node: jaxprs.Node) -> tuple[Shape, ...]:
    return tuple(() if v is None else program.avals[v].shape for v in node.inputs)


def _is_step(op: Any, kind: str) -> bool:
    return isinstance(op, Reindex) and op.step is not None and op.step[0] == kind


def _longer_than_1(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)
