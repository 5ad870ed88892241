"""Running a jaxpr as it was traced, with probes behind some of its values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from suite.jax.dtypes import at_least_float32
from suite.jax.explicit_axes import explicit_mesh
from suite.jax.jaxprs import CALLS, REMAT, Path, bind, called, scan_counts, shard_map_specs
from suite.jax.slopes import SLOPE, Follower, Slope, Slopes, known
from suite.jax.views import Step, View, apply_steps, matrices


class Multiplier(NamedTuple):
    """A number that is an operand of the equation at `path`, or its inverse; without one, -1."""

    path: Path
    operand: int | None
    divides: bool


class RowScale(NamedTuple):
    """What rows or columns of a leaf are multiplied with: an operand of an equation, or its inverse."""

    path: Path
    operand: int
    divides: bool
    view: View  # of the operand: the product's matrices, one number in each row or column
    of_outputs: bool  # by row, each of which is an output
    scans: tuple[Path, ...] = ()  # that take the operand apart

    def vector(self, operand: jax.Array) -> jax.Array:
        """(groups, d_out) or (groups, d_in)."""
        (_, (shape, _)), *_ = self.view.steps  # to which the operand is broadcast
        found = matrices(operand.reshape(operand.shape or (1,) * len(shape)), self.view)
        found = found[:, :, 0] if self.of_outputs else found[:, 0, :]
        return 1 / found if self.divides else found


class Mask(NamedTuple):
    """What entries of a leaf are multiplied with, or where they stay: an operand of an equation."""

    path: Path
    operand: int
    chosen: int | None  # what it is where they stay; None: it is a factor
    view: View  # of the operand: the product's matrices
    scans: tuple[Path, ...] = ()  # that take the operand apart

    def matrix(self, operand: jax.Array) -> jax.Array:
        """(groups, d_out, d_in)."""
        found = matrices(operand, self.view)
        return found if self.chosen is None else found == self.chosen


class ComplexScale(NamedTuple):
    """What a complex weight is multiplied with: an operand of an equation, or its inverse."""

    path: Path
    operand: int
    divides: bool
    steps: tuple[Step, ...]  # of the operand, to what the product's output or input is multiplied with
    of_outputs: bool

    def factor(self, operand: jax.Array) -> jax.Array:
        found: jax.Array = apply_steps(operand, self.steps)
        return 1 / found if self.divides else found


Numbers = dict[tuple[Path, int], Any]  # operands of equations: (), or as they are; and slopes


@dataclass(frozen=True)
class Probe:
    """Replaces output `out` of the equation at `path` by f(x, y, slots), x an operand of it.

    With `multipliers` or `operands` x is (x, the product of each chain of numbers, those operands).
    """

    path: Path
    out: int
    x_operand: int | None
    apply: Callable[[Any, jax.Array, Any], jax.Array]
    stack: tuple[Path, ...]  # scans along which the slots are stacked, outermost first
    factor: tuple[Path, int, tuple[Step, ...]] | None = None  # of x: an operand before, re-indexed
    multipliers: tuple[tuple[Multiplier, ...], ...] = ()
    operands: tuple[tuple[Path, int], ...] = ()  # of equations before
    slopes: tuple[Slope, ...] = ()  # those that are among them
    apart: tuple[tuple[tuple[Path, int], tuple[Path, ...]], ...] = ()  # and which scans take which apart


Slots = Mapping[int, Any]  # by number of the probe


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    probes: Sequence[Probe],
    slots: Slots,
    held: Sequence[tuple[Path, int]] = (),
) -> list[Any]:
    """Run a jaxpr with probes, and without derivatives by `held` operands of equations.

    Calls that hold a probe, or a number for one, are run inline (jit), or as what they are (remat, scan,
    cond, shard_map); all else is bound as it was traced.
    """
    at: dict[Path, list[int]] = {}
    for number, probe in enumerate(probes):
        for depth in range(1, len(probe.path) + 1):
            at.setdefault(probe.path[:depth], []).append(number)
    return _Runner(probes, at, held).run(jaxpr, consts, arguments, (), slots, {})


class _Runner:
    def __init__(
        self, probes: Sequence[Probe], at: dict[Path, list[int]], held: Sequence[tuple[Path, int]]
    ) -> None:
        self.probes, self.at = probes, at
        self.held: dict[Path, list[int]] = {}
        self.factors: dict[Path, list[int]] = {}
        self.numbers: dict[Path, set[int]] = {}
        self.whole: set[tuple[Path, int]] = set()  # which of them are `operands`
        self.apart: dict[tuple[Path, int], set[Path]] = {}  # and which scans take them apart
        self.opened = {path[:-1] for path in at}
        self.follower = Follower([slope for probe in probes for slope in probe.slopes])
        for path in self.follower.through:
            self.opened.update(path[:depth] for depth in range(1, len(path)))
        for path, place in held:
            self.held.setdefault(path, []).append(place)
            self.opened.update(path[:depth] for depth in range(1, len(path)))
        for probe in probes:
            if probe.factor is not None:
                self.factors.setdefault(probe.factor[0], []).append(probe.factor[1])
            self.whole.update(probe.operands)
            for key, scans in probe.apart:
                self.apart.setdefault(key, set()).update(scans)
            needed = [(m.path, m.operand) for chain in probe.multipliers for m in chain]
            for path, operand in (*needed, *probe.operands):
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
        slopes: Slopes | None = None,
    ) -> list[Any]:
        """Adds to `numbers` those that are operands here as soon as they are known, and to `slopes`."""
        slopes = {} if slopes is None else slopes
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
            for i in self.numbers.get((*prefix, number), set()) - {SLOPE}:
                v, key = eqn.invars[i], ((*prefix, number), i)
                if isinstance(v, jex.Literal) or v in env:
                    numbers[key] = self.known(key, read(v))
                else:
                    awaited.setdefault(v, []).append(key)

        for number, eqn in enumerate(jaxpr.eqns):
            path = (*prefix, number)
            values = [read(v) for v in eqn.invars]
            for i in self.held.get(path, ()):
                values[i] = lax.stop_gradient(values[i])
            here = self.at.get(path, ())
            factors.update(((path, i), values[i]) for i in self.factors.get(path, ()))
            if path in self.opened or (eqn.primitive.name in CALLS and known(slopes, eqn.invars)):
                outputs = self.call(eqn, values, path, slots, numbers, slopes)
            else:
                outputs = bind(eqn, values)
                self.follower.follow(eqn, values, path, slopes)
            if SLOPE in self.numbers.get(path, ()):
                numbers[path, SLOPE] = slopes[eqn.outvars[0]]
            for i in here:
                probe = self.probes[i]
                if probe.path == path:
                    x = None if probe.x_operand is None else values[probe.x_operand]
                    if probe.factor is not None:
                        source, operand, steps = probe.factor
                        x = x * apply_steps(factors[source, operand], steps)
                    if probe.multipliers or probe.operands:
                        factors_of_x = tuple(_product(chain, numbers) for chain in probe.multipliers)
                        x = x, factors_of_x, [numbers[key] for key in probe.operands]
                    outputs[probe.out] = probe.apply(x, outputs[probe.out], slots[i])
            env.update(zip(eqn.outvars, outputs, strict=True))
            found = [(v, key) for v in eqn.outvars for key in awaited.get(v, ())]
            numbers.update((key, self.known(key, env[v])) for v, key in found)
            for v in eqn.invars:  # let go of values as the program itself would
                if not isinstance(v, jex.Literal) and last_use[v] == number and v not in kept:
                    env.pop(v, None)
        return [read(v) for v in jaxpr.outvars]

    def known(self, key: tuple[Path, int], operand: Any) -> jax.Array:
        return jnp.asarray(operand) if key in self.whole else _one_entry(operand)

    def call(
        self, eqn: Any, values: list[Any], path: Path, slots: Slots, numbers: Numbers, slopes: Slopes
    ) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            inner, consts = called(eqn)
            inside = {inner.invars[i]: slope for i, slope in known(slopes, eqn.invars).items()}
            outputs = self.run(inner, consts, values, path, slots, numbers, inside)
            returned = known(inside, inner.outvars)
            slopes.update((eqn.outvars[i], slope) for i, slope in returned.items())
            return outputs
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
        inner, (consts, carries) = params["jaxpr"], scan_counts(params)
        fixed = values[:consts]
        sliced = {i: s for i, s in slots.items() if path in self.probes[i].stack}
        shared = {i: s for i, s in slots.items() if i not in sliced}
        apart = [key for key, x in numbers.items() if x.ndim and path in self.apart.get(key, ())]

        whole = [numbers[key] for key in apart]
        parts = [jnp.broadcast_to(x, (params["length"], *x.shape[1:])) for x in whole]

        def step(carry: Any, xs: Any) -> Any:
            slices, own, numbers_here = xs
            arguments = [*fixed, *carry, *slices]
            given = {**shared, **own}
            known = {**numbers, **dict(zip(apart, numbers_here, strict=True))}
            out = self.run(inner.jaxpr, inner.consts, arguments, path, given, known)
            return tuple(out[:carries]), tuple(out[carries:])

        carry, ys = lax.scan(
            step,
            tuple(values[consts : consts + carries]),
            (tuple(values[consts + carries :]), sliced, parts),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]

    def shard_map(
        self, eqn: Any, values: list[Any], path: Path, slots: Mapping[int, Any], numbers: Numbers
    ) -> list[Any]:
        params = eqn.params
        in_specs, out_specs = shard_map_specs(params)

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
    """The number that all entries are."""
    x = jnp.asarray(x)
    if explicit_mesh(x) is not None:
        return jnp.max(x)  # no part of what is sharded can be taken
    return x[(0,) * x.ndim] if x.ndim else x


def _product(chain: Sequence[Multiplier], numbers: Numbers) -> jax.Array:
    given = [numbers[path, operand] for path, operand, _ in chain if operand is not None]
    dtype = at_least_float32(*(number.dtype for number in given))
    product = jnp.ones((), dtype)
    for path, operand, divides in chain:
        number = -1.0 if operand is None else numbers[path, operand].astype(dtype)
        product = product / number if divides else product * number
    return product
