"""Reading jaxprs: what is in one, and how versions of jax differ.

`flatten` turns a program into a list of nodes with numbered values, calls inlined and loops opened, in
which each operation that K-FAC understands has a name of our own (operations.py). probes.py runs one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from suite.jax.counters import Counters, Loop
from suite.jax.operations import ByHand, LoopSlice, Moved, Reindex, Returned, operation_of
from suite.jax.varying import varying_axes
from suite.jax.views import Shape

Path = tuple[int, ...]  # equation (and branch) numbers, outermost program first

PROBE = "suite_kfac_probe"  # of `capture.probe`: a call of this name


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
    outputs: tuple[int, ...]  # at least one
    loops: Loops
    custom: Custom | None
    params: Mapping[str, Any] | None = field(default=None, compare=False)  # the primitive's


@dataclass
class Program:
    nodes: list[Node] = field(default_factory=list)
    avals: list[Aval] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int | None, ...] = ()
    constants: set[int] = field(default_factory=set)  # arrays that were closed over
    known: dict[int, Any] = field(default_factory=dict)  # those of them that are at hand
    numbers: dict[tuple[Path, int], Any] = field(default_factory=dict)  # by equation and operand
    mapped: set[Path] = field(default_factory=set)  # calls of shard_map
    inlined: set[Path] = field(default_factory=set)  # calls that are run as if they were none
    customs: dict[Path, Any] = field(default_factory=dict)  # equations of functions with own derivatives
    varying: dict[int, Set[str]] = field(default_factory=dict)  # over which axes of devices, by its type
    merged: set[int] = field(default_factory=set)  # values that equal re-indexings make several times
    back: list[tuple[int, int]] = field(default_factory=list)  # (loop's carry in, carry out)
    # For each operand of an equation, the equation beside it that makes it; -1: known from the start.
    makers: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    def number(self, node: Node, operand: int) -> Any:
        """The number that an operand is as the program is written; None: it is none."""
        return self.numbers.get((node.path, operand))

    def is_mapped(self, node: Node) -> bool:
        """Whether an operation is inside of a `shard_map` that the loss calls."""
        return any(node.path[:depth] in self.mapped for depth in range(len(node.path)))

    def region(self, path: Path) -> Path:
        """The innermost loop, branch or other call around an equation that is not inlined; (): none."""
        depth = len(path) - 1
        while path[:depth] in self.inlined:
            depth -= 1
        return path[:depth]


CALLS = {"jit", "pjit", "closed_call", "core_call", "core_closed_call", "xla_call"}
REMAT = {"remat", "remat2", "checkpoint"}
_READS = {"get", "freeze"}  # of arrays that may be written to; all else with one may write
_CUSTOM = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


def flatten(closed: Any) -> Program:
    """The program of a jaxpr with its constants, one value for each of its inputs first."""
    return _Flattener().run(closed.jaxpr, closed.consts)


class _Flattener:
    def __init__(self) -> None:
        self.program = Program()
        self.same: dict[Any, tuple[int, ...]] = {}  # equal re-indexings are one value
        self.written: dict[int, int] = {}  # arrays that are part of the program, by id
        self.counters = Counters(self.program.known)

    def run(self, jaxpr: Any, consts: Sequence[Any]) -> Program:
        inputs = tuple(self.new(v.aval) for v in jaxpr.invars)
        self.program.inputs = inputs
        self.program.outputs = tuple(self.body(jaxpr, inputs, (), (), None, consts))
        return self.program

    def new(self, aval: Any) -> int:
        self.program.avals.append(Aval(tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)))
        value = len(self.program.avals) - 1
        if axes := varying_axes(aval):
            self.program.varying[value] = axes
        return value

    def literal(self, v: Any) -> int | None:
        """An array that was closed over, as jax may write it; None: a number."""
        if not np.ndim(v.val):
            return None
        if id(v.val) not in self.written:
            value = self.written[id(v.val)] = self.new(v.aval)
            self.program.constants.add(value)
            self.program.known[value] = v.val
        return self.written[id(v.val)]

    def add(self, node: Node) -> None:
        self.program.nodes.append(node)

    def body(
        self,
        jaxpr: Any,
        inputs: Sequence[int | None],
        prefix: Path,
        loops: Loops,
        custom: Custom | None,
        consts: Sequence[Any] = (),
        literals: Sequence[Any] = (),
    ) -> list[int | None]:
        """
        Args:
            consts: arrays that the jaxpr was closed over, as far as they are at hand.
            literals: for each input the number that it is; None: it is none.
        """
        env: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        constants = {v: self.new(v.aval) for v in jaxpr.constvars}
        self.program.constants.update(constants.values())
        self.program.known.update(zip(constants.values(), consts, strict=False))
        env.update(constants)

        def read(v: Any) -> int | None:
            return self.literal(v) if isinstance(v, jex.Literal) else env[v]

        given = dict(zip(jaxpr.invars, literals, strict=False))
        makers: dict[Any, int] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            path = (*prefix, number)
            values = [read(v) for v in eqn.invars]
            numbers = [_number(v, given) for v in eqn.invars]
            self.program.numbers.update({(path, i): x for i, x in enumerate(numbers) if x is not None})
            self.program.makers[path] = tuple(
                -1 if isinstance(v, jex.Literal) else makers.get(v, -1) for v in eqn.invars
            )
            makers.update(dict.fromkeys(eqn.outvars, number))
            if eqn.primitive.name == "convert_element_type" and numbers[0] is not None:
                (out,) = eqn.outvars
                with np.errstate(all="ignore"):  # -1e9 as a half, -1 as an unsigned integer
                    given[out] = np.asarray(numbers[0]).astype(out.aval.dtype).item()
            outputs = self.equation(eqn, values, path, loops, custom)
            self.counters.follow(eqn, values, outputs)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, values: Any, path: Path, loops: Any, custom: Any) -> Sequence[Any]:
        name = eqn.primitive.name

        def node(operation: Any, inputs: Any, aval: Any, params: Any = None) -> int:
            out = self.new(aval)
            self.add(Node(path, name, operation, tuple(inputs), (out,), loops, custom, params))
            return out

        if name in CALLS and eqn.params.get("name") == PROBE:
            return [node(ByHand(), values, eqn.outvars[0].aval)]
        if name in CALLS or name in REMAT:
            inner, consts = called(eqn)
            if name in CALLS:
                self.program.inlined.add(path)
            literals = [self.program.numbers.get((path, i)) for i in range(len(values))]
            return self.body(inner, values, path, loops, custom, consts, literals)
        if name in _CUSTOM:
            inner, consts = called(eqn)
            own = custom or Custom(path, name, tuple(values))
            self.program.customs[path] = eqn
            returned = self.body(inner, values, path, loops, own, consts)
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
            self.program.mapped.add(path)
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
                outs.append(node(_slice(shape, begin, end), values, out.aval))
            return outs
        if name == "unstack":
            shape, axis, outs = eqn.invars[0].aval.shape, eqn.params["axis"], []
            for i, out in enumerate(eqn.outvars):
                begin, end = [0] * len(shape), list(shape)
                begin[axis], end[axis] = i, i + 1
                one = out.aval.update(shape=(*shape[:axis], 1, *shape[axis + 1 :]))
                own = node(_slice(shape, begin, end), values, one)
                outs.append(node(Reindex(("reshape", (one.shape, out.aval.shape))), (own,), out.aval))
            return outs
        if name == "dynamic_slice" and self.counters.takes_apart(eqn, values, loops):
            (length, *part), (out,) = eqn.invars[0].aval.shape, eqn.outvars
            order = {"length": length, "reverse": False}
            one = node(LoopSlice(length), values[:1], out.aval.update(shape=tuple(part)), order)
            return [node(Reindex(("reshape", (tuple(part), out.aval.shape))), (one,), out.aval)]
        if name == "dynamic_slice" and all(isinstance(v, jex.Literal) for v in eqn.invars[1:]):
            shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
            known = zip((int(v.val) for v in eqn.invars[1:]), shape, sizes, strict=True)
            begin = [min(max(a, 0), n - k) for a, n, k in known]
            end = [a + k for a, k in zip(begin, sizes, strict=True)]
            return [node(_slice(shape, begin, end), values[:1], eqn.outvars[0].aval)]
        if name == "reshape" and eqn.params.get("dimensions") is not None:  # of vmapped convolutions
            order, given, (out,) = eqn.params["dimensions"], eqn.invars[0].aval, eqn.outvars
            turned = given.update(shape=tuple(given.shape[axis] for axis in order))
            moved = node(Reindex(("transpose", (tuple(order),))), values, turned)
            return [node(Reindex(("reshape", (turned.shape, out.aval.shape))), (moved,), out.aval)]
        if name in ("optimization_barrier", "device_put"):  # of several
            pairs = zip(values, eqn.outvars, strict=True)
            return [node(Reindex(None), (v,), out.aval) for v, out in pairs]
        operation = operation_of(eqn)
        key = None
        if isinstance(operation, Reindex) and None not in values:
            aval = eqn.outvars[0].aval
            key = (operation, tuple(values), tuple(aval.shape), str(aval.dtype), loops, custom)
            if key in self.same:
                self.program.merged.update(self.same[key])
                return self.same[key]
        outs_ = tuple(self.new(out.aval) for out in eqn.outvars)
        pairs = zip(values, eqn.invars, strict=True)
        written = [value for value, v in pairs if _is_ref(v) and name not in _READS]
        outputs = (*outs_, *written)
        if outputs:  # what only looks (`jax.debug.print`) is no use
            self.add(Node(path, name, operation, tuple(values), outputs, loops, custom, eqn.params))
        if key is not None:
            self.same[key] = outs_
        return outs_

    def scan(self, eqn: Any, values: Any, path: Path, loops: Any, custom: Any, node: Any) -> list[Any]:
        params = eqn.params
        inner, (consts, carries) = params["jaxpr"].jaxpr, scan_counts(params)
        length = int(params["length"])
        inputs: list[Any] = list(values[:consts])
        inside = (*loops, (path, length))
        loop = Loop(inside[-1], len(self.program.avals))
        unchanged = [inner.outvars[i] is inner.invars[consts + i] for i in range(carries)]
        order = {"length": length, "reverse": params["reverse"]}
        for i in range(carries):
            value, v = values[consts + i], inner.invars[consts + i]
            start = self.program.numbers.get((path, consts + i))
            begun = {**order, "start": start}
            inputs.append(value if unchanged[i] else node(Moved(), (value,), v.aval, begun))
            if not unchanged[i] and not params["reverse"]:
                self.counters.carried(loop, inputs[-1], v, inner.eqns, inner.outvars[i], start)
        for value, v in zip(values[consts + carries :], inner.invars[consts + carries :], strict=True):
            out = self.new(v.aval)
            self.add(Node(path, "scan", LoopSlice(length), (value,), (out,), inside, custom, order))
            inputs.append(out)
            if not params["reverse"]:
                self.counters.sliced(loop, value, out)
        returned = self.body(inner, inputs, path, inside, custom)
        outs: list[Any] = []
        for i, (value, out) in enumerate(zip(returned, eqn.outvars, strict=True)):
            if i < carries and unchanged[i]:
                outs.append(values[consts + i])
                continue
            if i < carries and value is not None:
                self.program.back.append((inputs[consts + i], value))
            outs.append(node(Moved(), (value,), out.aval, {**order, "last": i < carries}))
        return outs


def live_values(
    program: Program, roots: Sequence[int | None], held: Collection[tuple[Path, int]] = ()
) -> set[int]:
    """Values through which a gradient of the roots flows.

    Args:
        held: equations, and which operand of each it does not go on to.
    """
    live = {root for root in roots if root is not None}
    before = -1
    while before != len(live):
        before = len(live)
        for node in reversed(program.nodes):
            if not any(out in live for out in node.outputs) or stops_gradients(program, node):
                continue
            given = enumerate(given_to(node))
            live.update(v for i, v in given if v is not None and (node.path, i) not in held)
        live.update(out for into, out in program.back if into in live)
    return live


def differentiable_values(program: Program, inputs: Sequence[int]) -> set[int]:
    """Values through which a gradient may flow to some of these inputs."""
    found = {v for v in inputs if _is_float(program.avals[v].dtype)}
    before = -1
    while before != len(found):
        before = len(found)
        for node in program.nodes:
            if any(v in found for v in given_to(node)) and not stops_gradients(program, node):
                found.update(node.outputs)
        found.update(into for into, out in program.back if out in found)
    return found


def dependent_values(program: Program, starts: Iterable[int]) -> set[int]:
    """Values that are computed from some of these."""
    found = set(starts)
    before = -1
    while before != len(found):
        before = len(found)
        for node in program.nodes:
            if any(v in found for v in node.inputs):
                found.update(node.outputs)
        found.update(into for into, out in program.back if out in found)
    return found


def given_to(node: Node) -> tuple[int | None, ...]:
    """What a gradient may go on to: of a function with a derivative of its own all that it is given."""
    op = node.operation
    return (*node.inputs, *op.given) if isinstance(op, Returned) else node.inputs


# Operations of floats whose derivative JAX knows to be zero: it does not go through them.
_CONSTANT = {"stop_gradient", "sign", "floor", "ceil", "round", "bitcast_convert_type"}


def stops_gradients(program: Program, node: Node) -> bool:
    """Inside a function with a derivative of its own nothing does: that may be anything."""
    if node.custom is not None:
        return False
    return node.name in _CONSTANT or not any(_is_float(program.avals[out].dtype) for out in node.outputs)


def _is_float(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _slice(shape: Sequence[int], begin: Sequence[int], end: Sequence[int]) -> Reindex:
    """x[begin:end] along every axis; of the whole, nothing is moved."""
    if not any(begin) and tuple(end) == tuple(shape):
        return Reindex(None)
    return Reindex(("slice", (tuple(begin), tuple(end), (1,) * len(shape))))


def _is_ref(v: Any) -> bool:
    """Whether an operand is an array that may be written to (`jax.new_ref`)."""
    return hasattr(v.aval, "inner_aval")


def _number(v: Any, given: Mapping[Any, Any]) -> Any:
    """The number that an operand is written as, here or where this was called; None: it is none."""
    if isinstance(v, jex.Literal):
        return None if np.ndim(v.val) else v.val
    return given.get(v)


def called(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, its constants) of a call."""
    params = eqn.params
    called = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
    return (called.jaxpr, called.consts) if hasattr(called, "consts") else (called, ())


def scan_counts(params: Any) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # jax 0.11
    return len(consts), len(carries)


def _unsharded_inputs(eqn: Any) -> list[bool]:
    """For each input of a shard_map, whether every device gets all of it."""
    return [all(part is None for part in spec) for spec in shard_map_specs(eqn.params)[0]]


def shard_map_specs(params: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of its inputs and of its outputs."""
    if "in_specs" in params:
        return tuple(params["in_specs"]), tuple(params["out_specs"])

    def spec(names: Mapping[int, Any]) -> Any:  # jax 0.6.0
        return jax.sharding.PartitionSpec(*(names.get(i) for i in range(max(names, default=-1) + 1)))

    return tuple(map(spec, params["in_names"])), tuple(map(spec, params["out_names"]))


def bind(eqn: Any, values: list[Any]) -> list[Any]:
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Older versions of jax return the functions apart.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*functions, *values, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def dtype_is_float(aval: Any) -> bool:
    return aval.dtype is not None and jnp.issubdtype(aval.dtype, jnp.floating)
