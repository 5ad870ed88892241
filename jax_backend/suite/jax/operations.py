"""What an equation of a jaxpr means, for those operations that K-FAC understands."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from suite.jax.views import Shape, Step


class Reindex(NamedTuple):
    """Output = input, re-indexed; None: as it is."""

    step: Step | None


class Moved(NamedTuple):
    """The one input is handed on by a loop or a call that K-FAC cannot look through."""

    how: str = ""


class LoopSlice(NamedTuple):
    """A loop takes its input apart along the first axis."""

    length: int


class Returned(NamedTuple):
    """What a function with a derivative of its own returns."""

    given: tuple[int | None, ...]  # the call's inputs


class DotGeneral(NamedTuple):
    contracted: tuple[Shape, Shape]
    batch: tuple[Shape, Shape]


class Convolve(NamedTuple):
    """conv_general_dilated; specs are positions of (batch, feature, *spatial) as in XLA."""

    x_spec: Shape
    w_spec: Shape  # (out feature, in feature, *spatial)
    out_spec: Shape
    stride: Shape
    padding: tuple[tuple[int, int], ...]
    x_dilation: Shape
    dilation: Shape
    groups: int


class RaggedDot(NamedTuple):
    """Rows, each times the matrix of its group: `lax.ragged_dot` of (rows, d_in) and a stack."""

    group: int  # axes of the stack
    contracted: int


class Gather(NamedTuple):
    """Rows of a table, looked up along one axis of it."""

    axis: int
    offset_axes: Shape  # of the output: where the table's other axes are
    clip: bool  # whether indices out of range are brought into it; else they read nothing
    component: int  # of an index, which number it is along that axis


class Add(NamedTuple):
    """Elementwise sum, or difference: the first operand less the second."""

    signs: tuple[int, int]


class Multiply(NamedTuple):
    """Elementwise product."""


class Divide(NamedTuple):
    """Elementwise quotient."""


class Negate(NamedTuple):
    pass


class Concatenate(NamedTuple):
    axis: int
    stacks: bool  # whether the axis is a new one


class Iota(NamedTuple):
    axis: int


class Equal(NamedTuple):
    pass


class Select(NamedTuple):
    """Entry by entry one of the operands after the first, which says of which."""


class ByHand(NamedTuple):
    """A user's probe(x, w, y)."""


# Primitives whose outputs' entries are functions of the operands' entries there, and have derivatives.
ENTRY_BY_ENTRY = {
    "abs", "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "clamp",
    "cos", "cosh", "digamma", "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "integer_pow",
    "lgamma", "log", "log1p", "logistic", "max", "min", "mul", "neg", "pow", "rsqrt", "select_n", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh",
}  # fmt: skip
WITHOUT_DERIVATIVE = {
    "and", "eq", "floor", "ge", "gt", "is_finite", "le", "lt", "ne", "not", "or", "round", "sign",
    "stop_gradient",
}  # fmt: skip


_IDENTITIES = {
    "copy", "copy_p", "sharding_constraint", "name", "pvary", "pcast", "reduce_precision",
    "optimization_barrier", "mesh_cast", "reshard", "layout_constraint",
}  # fmt: skip


_ARITHMETIC = {"mul": Multiply(), "div": Divide(), "neg": Negate()}


def operation_of(eqn: Any) -> Any:
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.outvars) != 1:
        return None
    aval = eqn.outvars[0].aval
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        return DotGeneral(tuple(map(tuple, contracted)), tuple(map(tuple, batch)))  # type: ignore[arg-type]
    if name == "conv_general_dilated":
        return _convolve(params)
    if name == "ragged_dot_general":
        return _ragged_dot(eqn)
    if name == "gather":
        return _gather(eqn)
    if name in ("add", "add_any", "sub"):
        return Add((1, -1 if name == "sub" else 1))
    if name in _ARITHMETIC:
        return _ARITHMETIC[name]
    if name == "concatenate":
        return Concatenate(params["dimension"], False)
    if name == "stack":
        return Concatenate(params["axis"], True)
    if name == "iota":
        return Iota(params["dimension"])
    if name == "eq":
        return Equal()
    if name == "select_n":
        return Select()
    if not eqn.invars or not hasattr(eqn.invars[0].aval, "shape"):
        return None
    old, new = tuple(eqn.invars[0].aval.shape), tuple(getattr(aval, "shape", ()))
    if name in _IDENTITIES:
        return Reindex(None)
    if name == "convert_element_type":
        return Reindex(None)
    if name == "slice":
        strides = params["strides"] or (1,) * len(old)
        if old == new:
            return Reindex(None)
        return Reindex(
            ("slice", (tuple(params["start_indices"]), tuple(params["limit_indices"]), tuple(strides)))
        )
    if name == "transpose":
        return Reindex(("transpose", (tuple(params["permutation"]),)))
    if name == "rev":
        return Reindex(("rev", (tuple(params["dimensions"]),)))
    if name in ("squeeze", "expand_dims") or (name == "reshape" and params.get("dimensions") is None):
        return Reindex(("reshape", (old, new)))
    if name == "reduce_sum" and math.prod(old) == math.prod(new):
        return Reindex(("reshape", (old, new)))
    if name == "broadcast_in_dim":
        if math.prod(old) == math.prod(new):
            return Reindex(("reshape", (old, new)))
        return Reindex(("broadcast", (new, tuple(params["broadcast_dimensions"]))))
    if name == "tile" and all(a in (1, b) for a, b in zip(old, new, strict=True)):
        return Reindex(("broadcast", (new, tuple(range(len(new))))))
    return None


def _convolve(params: Any) -> Convolve | None:
    if params["batch_group_count"] != 1:
        return None
    numbers = params["dimension_numbers"]
    return Convolve(
        tuple(numbers.lhs_spec),
        tuple(numbers.rhs_spec),
        tuple(numbers.out_spec),
        tuple(params["window_strides"]),
        tuple((int(a), int(b)) for a, b in params["padding"]),
        tuple(params["lhs_dilation"]),
        tuple(params["rhs_dilation"]),
        params["feature_group_count"],
    )


def _ragged_dot(eqn: Any) -> RaggedDot | None:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (of_rows, of_stack), batch = numbers.dot_dimension_numbers
    grouped = [tuple(axes) for axes in (numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)]
    if any(map(len, batch)) or len(of_stack) != 1 or len(grouped[1]) != 1 or len(eqn.invars) != 3:
        return None
    shapes = [eqn.invars[i].aval.ndim for i in range(2)]
    if shapes != [2, 3] or tuple(of_rows) != (1,) or grouped[0] != (0,):
        return None
    return RaggedDot(grouped[1][0], of_stack[0])


def _gather(eqn: Any) -> Gather | None:
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    table, slices = tuple(eqn.invars[0].aval.shape), tuple(params["slice_sizes"])
    single = [axis for axis in numbers.start_index_map if slices[axis] == 1 and table[axis] != 1]
    single = single or list(numbers.collapsed_slice_dims)
    if len(single) != 1 or len(getattr(numbers, "operand_batching_dims", [])) > 0:
        return None
    (axis,) = single
    others = [i for i in range(len(table)) if i != axis]
    mode = str(params["mode"]).upper()
    clip = "CLIP" in mode
    if any(slices[i] != table[i] or i in numbers.collapsed_slice_dims for i in others):
        return None
    if len(numbers.start_index_map) > 1 and not clip and "PROMISE" not in mode:
        return None  # else the whole of each other axis is read, which can only start at 0
    kept = [i for i in range(len(table)) if i not in numbers.collapsed_slice_dims]
    offsets = dict(zip(kept, numbers.offset_dims, strict=True))
    component = tuple(numbers.start_index_map).index(axis)
    return Gather(axis, tuple(offsets[i] for i in others), clip, component)
