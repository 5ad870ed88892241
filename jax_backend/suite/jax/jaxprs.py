"""Reading and running jaxprs: what is in one, and how versions of jax differ, only this file knows.

`flatten` turns a program into a list of nodes with numbered values, calls inlined and loops opened, in
which each operation that K-FAC understands has a name of our own. `evaluate` runs the program as it was
traced, with probes behind some of its values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from suite.jax.views import Shape, Step, apply_steps

Path = tuple[int, ...]  # equation (and branch) numbers, outermost program first

PROBE = "suite_kfac_probe"  # of `capture.probe`: a call of this name


# ---- what equations mean -----------------------------------------------------------------------


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


class ByHand(NamedTuple):
    """A user's probe(x, w, y)."""


class Aval(NamedTuple):
    shape: Shape
    dtype: Any


# Enclosing scans and their lengths, and branches of a `cond` with None.
Loops = tuple[tuple[Path, int | None], ...]


@dataclass(frozen=True)
class Custom:
    """A call of a function with a derivative of its own, which its inside does not show."""

    path: Path
    name: str
    inputs: tuple[int | None, ...]
    outputs: list[int | None] = field(default_factory=list, compare=False)  # values inside


@dataclass(frozen=True)
class Node:
    """One operation of the flattened program."""

    path: Path
    name: str  # the primitive's
    operation: Any
    inputs: tuple[int | None, ...]  # None for literals
    outputs: tuple[int, ...]
    loops: Loops
    custom: Custom | None


@dataclass
class Program:
    nodes: list[Node] = field(default_factory=list)
    avals: list[Aval] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int | None, ...] = ()
    back: list[tuple[int, int]] = field(default_factory=list)  # (loop's carry in, carry out)
    # For each operand of an equation, the equation beside it that makes it; -1: known from the start.
    makers: dict[Path, tuple[int, ...]] = field(default_factory=dict)


# ---- flattening --------------------------------------------------------------------------------

CALLS = {"jit", "pjit", "closed_call", "core_call", "core_closed_call", "xla_call"}
REMAT = {"remat", "remat2", "checkpoint"}
_CUSTOM = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_IDENTITIES = {
    "copy", "copy_p", "sharding_constraint", "name", "pvary", "pcast", "reduce_precision",
    "optimization_barrier", "mesh_cast", "reshard", "layout_constraint",
}  # fmt: skip


def flatten(jaxpr: Any) -> Program:
    """The program of a jaxpr, one value for each of its inputs first."""
    return _Flattener().run(jaxpr)


class _Flattener:
    def __init__(self) -> None:
        self.program = Program()
        self.same: dict[Any, tuple[int, ...]] = {}  # equal re-indexings are one value

    def run(self, jaxpr: Any) -> Program:
        inputs = tuple(self.new(v.aval) for v in jaxpr.invars)
        self.program.inputs = inputs
        self.program.outputs = tuple(self.body(jaxpr, inputs, (), (), None))
        return self.program

    def new(self, aval: Any) -> int:
        self.program.avals.append(Aval(tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)))
        return len(self.program.avals) - 1

    def add(self, node: Node) -> None:
        self.program.nodes.append(node)

    def body(
        self,
        jaxpr: Any,
        inputs: Sequence[int | None],
        prefix: Path,
        loops: Loops,
        custom: Custom | None,
    ) -> list[int | None]:
        env: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update({v: self.new(v.aval) for v in jaxpr.constvars})

        def read(v: Any) -> int | None:
            return None if isinstance(v, jex.Literal) else env[v]

        makers: dict[Any, int] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            path = (*prefix, number)
            values = [read(v) for v in eqn.invars]
            self.program.makers[path] = tuple(
                -1 if isinstance(v, jex.Literal) else makers.get(v, -1) for v in eqn.invars
            )
            makers.update(dict.fromkeys(eqn.outvars, number))
            env.update(zip(eqn.outvars, self.equation(eqn, values, path, loops, custom), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, values: Any, path: Path, loops: Any, custom: Any) -> Sequence[Any]:
        name = eqn.primitive.name

        def node(operation: Any, inputs: Any, aval: Any, label: str = name) -> int:
            out = self.new(aval)
            self.add(Node(path, label, operation, tuple(inputs), (out,), loops, custom))
            return out

        if name in CALLS and eqn.params.get("name") == PROBE:
            return [node(ByHand(), values, eqn.outvars[0].aval)]
        if name in CALLS or name in REMAT:
            inner, _ = called(eqn)
            return self.body(inner, values, path, loops, custom)
        if name in _CUSTOM:
            inner, _ = called(eqn)
            own = custom or Custom(path, name, tuple(values))
            returned = self.body(inner, values, path, loops, own)
            if custom is None:
                own.outputs.extend(returned)
            return [
                node(Returned(tuple(values)), (v,), o.aval)
                for v, o in zip(returned, eqn.outvars, strict=True)
            ]
        if name == "scan":
            return self.scan(eqn, values, path, loops, custom, node)
        if name == "cond":
            branches = [
                self.body(branch.jaxpr, values[1:], (*path, i), (*loops, ((*path, i), None)), custom)
                for i, branch in enumerate(eqn.params["branches"])
            ]
            return [
                node(Moved(), each, out.aval)
                for each, out in zip(zip(*branches, strict=True), eqn.outvars, strict=True)
            ]
        if name == "shard_map":
            inner = eqn.params["jaxpr"]
            whole = _unsharded_inputs(eqn)
            inputs = [
                v if same else node(Moved("which divides it over devices"), (v,), i.aval)
                for v, same, i in zip(values, whole, inner.invars, strict=True)
            ]
            returned = self.body(inner, inputs, path, loops, custom)
            return [node(Moved(), (v,), o.aval) for v, o in zip(returned, eqn.outvars, strict=True)]
        if name == "split":
            starts = np.cumsum([0, *eqn.params["sizes"]])
            shape = eqn.invars[0].aval.shape
            outs = []
            for i, out in enumerate(eqn.outvars):
                begin, end = [0] * len(shape), list(shape)
                begin[eqn.params["axis"]], end[eqn.params["axis"]] = int(starts[i]), int(starts[i + 1])
                step = ("slice", (tuple(begin), tuple(end), (1,) * len(shape)))
                outs.append(node(Reindex(step), values, out.aval))
            return outs
        if name == "optimization_barrier":
            pairs = zip(values, eqn.outvars, strict=True)
            return [node(Reindex(None), (v,), out.aval) for v, out in pairs]
        operation = operation_of(eqn)
        key = None
        if isinstance(operation, Reindex) and None not in values:
            aval = eqn.outvars[0].aval
            key = (operation, tuple(values), tuple(aval.shape), str(aval.dtype), loops, custom)
            if key in self.same:
                return self.same[key]
        outs_ = tuple(self.new(out.aval) for out in eqn.outvars)
        self.add(Node(path, name, operation, tuple(values), outs_, loops, custom))
        if key is not None:
            self.same[key] = outs_
        return outs_

    def scan(self, eqn: Any, values: Any, path: Path, loops: Any, custom: Any, node: Any) -> list[Any]:
        params = eqn.params
        inner, (consts, carries) = params["jaxpr"].jaxpr, _scan_counts(params)
        length = int(params["length"])
        inputs: list[Any] = list(values[:consts])
        unchanged = [inner.outvars[i] is inner.invars[consts + i] for i in range(carries)]
        for i in range(carries):
            value, v = values[consts + i], inner.invars[consts + i]
            inputs.append(value if unchanged[i] else node(Moved(), (value,), v.aval))
        inside = (*loops, (path, length))
        for value, v in zip(values[consts + carries :], inner.invars[consts + carries :], strict=True):
            out = self.new(v.aval)
            self.add(Node(path, "scan", LoopSlice(length), (value,), (out,), inside, custom))
            inputs.append(out)
        returned = self.body(inner, inputs, path, inside, custom)
        outs: list[Any] = []
        for i, (value, out) in enumerate(zip(returned, eqn.outvars, strict=True)):
            if i < carries and unchanged[i]:
                outs.append(values[consts + i])
                continue
            if i < carries and value is not None:
                self.program.back.append((inputs[consts + i], value))
            outs.append(node(Moved(), (value,), out.aval))
        return outs


def live_values(program: Program, roots: Sequence[int | None]) -> set[int]:
    """Values through which a gradient of the roots flows."""
    live = {root for root in roots if root is not None}
    before = -1
    while before != len(live):
        before = len(live)
        for node in reversed(program.nodes):
            if not any(out in live for out in node.outputs) or stops_gradients(program, node):
                continue
            live.update(v for v in node.inputs if v is not None)
        live.update(out for into, out in program.back if into in live)
    return live


def differentiable_values(program: Program, inputs: Sequence[int]) -> set[int]:
    """Values through which a gradient may flow to some of these inputs."""
    found = {v for v in inputs if _is_float(program.avals[v].dtype)}
    before = -1
    while before != len(found):
        before = len(found)
        for node in program.nodes:
            op = node.operation
            given = (*node.inputs, *op.given) if isinstance(op, Returned) else node.inputs
            if any(v in found for v in given) and not stops_gradients(program, node):
                found.update(node.outputs)
        found.update(into for into, out in program.back if out in found)
    return found


def stops_gradients(program: Program, node: Node) -> bool:
    """Inside a function with a derivative of its own nothing does: that may be anything."""
    if node.custom is not None:
        return False
    return node.name == "stop_gradient" or not any(
        _is_float(program.avals[out].dtype) for out in node.outputs
    )


def _is_float(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def called(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, its constants) of a call."""
    params = eqn.params
    called = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
    return (called.jaxpr, called.consts) if hasattr(called, "consts") else (called, ())


def _scan_counts(params: Any) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # jax 0.11
    return len(consts), len(carries)


def _unsharded_inputs(eqn: Any) -> list[bool]:
    """For each input of a shard_map, whether every device gets all of it."""
    return [all(part is None for part in spec) for spec in _shard_map_specs(eqn.params)[0]]


def _shard_map_specs(params: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of its inputs and of its outputs."""
    if "in_specs" in params:
        return tuple(params["in_specs"]), tuple(params["out_specs"])

    def spec(names: Mapping[int, Any]) -> Any:  # jax 0.6.0
        return jax.sharding.PartitionSpec(*(names.get(i) for i in range(max(names, default=-1) + 1)))

    return tuple(map(spec, params["in_names"])), tuple(map(spec, params["out_names"]))


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


# ---- running -----------------------------------------------------------------------------------


class Multiplier(NamedTuple):
    """A number that is an operand of the equation at `path`, or its inverse; without one, -1."""

    path: Path
    operand: int | None
    divides: bool


Numbers = dict[tuple[Path, int], Any]  # (): operands of equations


@dataclass(frozen=True)
class Probe:
    """Replaces output `out` of the equation at `path` by f(x, y, slots), x an operand of it.

    With `multipliers`, f gets (x, the product of each chain of them).
    """

    path: Path
    out: int
    x_operand: int | None
    apply: Callable[[Any, jax.Array, Any], jax.Array]
    stack: tuple[Path, ...]  # scans along which the slots are stacked, outermost first
    factor: tuple[Path, int, tuple[Step, ...]] | None = None  # of x: an operand before, re-indexed
    multipliers: tuple[tuple[Multiplier, ...], ...] = ()


Slots = Mapping[int, Any]  # by number of the probe


def evaluate(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], probes: Sequence[Probe], slots: Slots
) -> list[Any]:
    """Run a jaxpr with probes.

    Calls that hold a probe, or a number for one, are run inline (jit), or as what they are (remat, scan,
    cond, shard_map); all else is bound as it was traced.
    """
    at: dict[Path, list[int]] = {}
    for number, probe in enumerate(probes):
        for depth in range(1, len(probe.path) + 1):
            at.setdefault(probe.path[:depth], []).append(number)
    return _Runner(probes, at).run(jaxpr, consts, arguments, (), slots, {})


class _Runner:
    def __init__(self, probes: Sequence[Probe], at: dict[Path, list[int]]) -> None:
        self.probes, self.at = probes, at
        self.factors: dict[Path, list[int]] = {}
        self.numbers: dict[Path, set[int]] = {}
        self.opened = {path[:-1] for path in at}
        for probe in probes:
            if probe.factor is not None:
                self.factors.setdefault(probe.factor[0], []).append(probe.factor[1])
            for path, operand, _ in (m for chain in probe.multipliers for m in chain):
                self.opened.update(path[:depth] for depth in range(1, len(path)))
                if operand is not None:
                    self.numbers.setdefault(path, set()).add(operand)

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        arguments: Sequence[Any],
        prefix: Path,
        slots: Slots,
        numbers: Numbers,
    ) -> list[Any]:
        """Adds to `numbers` those that are operands here, as soon as they are known."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))
        factors: dict[tuple[Path, int], Any] = {}
        last_use = {
            v: number
            for number, eqn in enumerate(jaxpr.eqns)
            for v in eqn.invars
            if not isinstance(v, jex.Literal)
        }
        kept = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}

        def read(v: Any) -> Any:
            return v.val if isinstance(v, jex.Literal) else env[v]

        awaited: dict[Any, list[tuple[Path, int]]] = {}
        for number, eqn in enumerate(jaxpr.eqns if self.numbers else ()):
            for i in self.numbers.get((*prefix, number), ()):
                v, key = eqn.invars[i], ((*prefix, number), i)
                if isinstance(v, jex.Literal) or v in env:
                    numbers[key] = _one_entry(read(v))
                else:
                    awaited.setdefault(v, []).append(key)

        for number, eqn in enumerate(jaxpr.eqns):
            path = (*prefix, number)
            values = [read(v) for v in eqn.invars]
            here = self.at.get(path, ())
            factors.update(((path, i), values[i]) for i in self.factors.get(path, ()))
            if path in self.opened:
                outputs = self.call(eqn, values, path, slots, numbers)
            else:
                outputs = bind(eqn, values)
            for i in here:
                probe = self.probes[i]
                if probe.path == path:
                    x = None if probe.x_operand is None else values[probe.x_operand]
                    if probe.factor is not None:
                        source, operand, steps = probe.factor
                        x = x * apply_steps(factors[source, operand], steps)
                    if probe.multipliers:
                        x = x, tuple(_product(chain, numbers) for chain in probe.multipliers)
                    outputs[probe.out] = probe.apply(x, outputs[probe.out], slots[i])
            env.update(zip(eqn.outvars, outputs, strict=True))
            numbers.update((key, _one_entry(env[v])) for v in eqn.outvars for key in awaited.get(v, ()))
            for v in eqn.invars:  # let go of values as the program itself would
                if not isinstance(v, jex.Literal) and last_use[v] == number and v not in kept:
                    env.pop(v, None)
        return [read(v) for v in jaxpr.outvars]

    def call(self, eqn: Any, values: list[Any], path: Path, slots: Slots, numbers: Numbers) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            inner, consts = called(eqn)
            return self.run(inner, consts, values, path, slots, numbers)
        own = {i: slots[i] for i in self.at.get(path, ())}
        if name in REMAT:
            inner, consts = called(eqn)

            def again(values: Any, own: Any, numbers: Numbers) -> tuple[list[Any], Numbers]:
                numbers = dict(numbers)
                return self.run(inner, consts, values, path, own, numbers), numbers

            wrapped = jax.checkpoint(again, policy=params["policy"], prevent_cse=params["prevent_cse"])
            outputs, found = wrapped(values, own, numbers)
            numbers.update(found)  # what is multiplied inside may be used outside
            return list(outputs)
        if name == "cond":
            branches = [
                functools.partial(self.branch, branch, (*path, i), own, numbers)
                for i, branch in enumerate(params["branches"])
            ]
            return list(lax.switch(values[0], branches, *values[1:]))
        if name == "scan":
            return self.scan(eqn, values, path, own, numbers)
        assert name == "shard_map", name
        return self.shard_map(eqn, values, path, own, numbers)

    def branch(self, branch: Any, path: Path, slots: Slots, numbers: Numbers, *values: Any) -> list[Any]:
        return self.run(branch.jaxpr, branch.consts, values, path, slots, dict(numbers))

    def scan(
        self, eqn: Any, values: list[Any], path: Path, slots: Mapping[int, Any], numbers: Numbers
    ) -> list[Any]:
        params = eqn.params
        inner, (consts, carries) = params["jaxpr"], _scan_counts(params)
        fixed = values[:consts]
        sliced = {i: s for i, s in slots.items() if path in self.probes[i].stack}
        shared = {i: s for i, s in slots.items() if i not in sliced}

        def step(carry: Any, xs: Any) -> Any:
            slices, own = xs
            arguments = [*fixed, *carry, *slices]
            given = {**shared, **own}
            out = self.run(inner.jaxpr, inner.consts, arguments, path, given, dict(numbers))
            return tuple(out[:carries]), tuple(out[carries:])

        carry, ys = lax.scan(
            step,
            tuple(values[consts : consts + carries]),
            (tuple(values[consts + carries :]), sliced),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]

    def shard_map(
        self, eqn: Any, values: list[Any], path: Path, slots: Mapping[int, Any], numbers: Numbers
    ) -> list[Any]:
        params = eqn.params
        in_specs, out_specs = _shard_map_specs(params)

        def inside(values: Any, own: Any, numbers: Numbers) -> Any:
            return tuple(self.run(params["jaxpr"], (), values, path, own, dict(numbers)))

        settings: dict[str, Any] = {
            "mesh": params["mesh"],
            "in_specs": (in_specs, jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec()),
            "out_specs": out_specs,
        }
        shard_map: Any = getattr(jax, "shard_map", None)
        if shard_map is None:  # jax 0.6.0
            from jax.experimental.shard_map import shard_map

            settings |= {"check_rep": params["check_rep"], "auto": params["auto"]}
        else:
            axes = params.get("newly_manual_axes") or params.get("manual_axes") or ()
            settings |= {"check_vma": params["check_vma"], "axis_names": set(axes)}
        mapped = shard_map(inside, **settings)
        return list(mapped(tuple(values), dict(slots), numbers))


def _one_entry(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x[(0,) * x.ndim] if x.ndim else x


def _product(chain: Sequence[Multiplier], numbers: Numbers) -> jax.Array:
    product = jnp.ones((), jnp.float32)
    for path, operand, divides in chain:
        number = -1.0 if operand is None else numbers[path, operand]
        product = product / number if divides else product * number
    return product


def bind(eqn: Any, values: list[Any]) -> list[Any]:
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Older versions of jax return the functions apart.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*functions, *values, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


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
    kind: Any = jax.typeof(x) if hasattr(jax, "typeof") else None
    if hasattr(kind, "manual_axis_type"):  # jax 0.10
        return set(kind.manual_axis_type.varying)
    return set(getattr(kind, "vma", ()))


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
    meshes = [own for own in map(_explicit_mesh, jax.tree.leaves(arguments)) if own is not None]
    if mesh is None and not meshes:
        return f(*arguments)
    if not hasattr(jax.sharding, "auto_axes"):
        raise NotImplementedError(
            "arrays with explicit sharding axes need jax >= 0.7: make the mesh with AxisType.Auto"
        )
    out = jax.sharding.PartitionSpec() if out is None else out
    if mesh is not None:  # whose devices are known: the arguments may be on others
        out = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), out)
        return jax.sharding.auto_axes(f, out_sharding=out)(*arguments)
    with jax.sharding.use_abstract_mesh(meshes[0]):
        return jax.sharding.auto_axes(f, out_sharding=out)(*arguments)


def explicit_specs(tree: Any) -> Any:
    """How arrays are sharded over explicit axes, as a pytree of PartitionSpecs."""

    def spec(x: Any) -> Any:
        return jax.sharding.PartitionSpec() if _explicit_mesh(x) is None else jax.typeof(x).sharding.spec

    return jax.tree.map(spec, tree)


def _explicit_mesh(x: Any) -> Any:
    kind = jax.typeof(x) if hasattr(jax, "typeof") else None
    mesh: Any = getattr(getattr(kind, "sharding", None), "mesh", None)
    return mesh if getattr(mesh, "explicit_axes", ()) else None


def dtype_is_float(aval: Any) -> bool:
    return aval.dtype is not None and jnp.issubdtype(aval.dtype, jnp.floating)


def vary_like(tree: Any, like: Any) -> Any:
    """Each leaf as varying over the devices that the same leaf of `like` varies over."""
    return jax.tree.map(varying_alike, tree, like)
