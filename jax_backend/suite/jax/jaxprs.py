"""Finding a model's layers in the program of its loss, and running that program with probes.

The loss function is traced to a jaxpr. One fact is carried beside each value: "a re-indexing of exactly
one parameter leaf". Every product that meets such a value is a layer use; everything else that does is a
reason not to cover the leaf. This is the only file that reads jaxprs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from suite.jax.layers import Convolution, Dense, LayerSpec, Step, apply_steps, block_shape, feature_axes

Path = tuple[int, ...]  # equation numbers, outermost program first


class Origin(NamedTuple):
    """The fact: this value is the leaf, re-indexed by these steps."""

    leaf: int
    shape: tuple[int, ...]  # the leaf's
    steps: tuple[Step, ...]
    lossless: bool  # every entry of the leaf occurs exactly once


class Site(NamedTuple):
    """One product in the program that uses a parameter leaf as its weight."""

    path: Path
    x_operand: int
    spec: LayerSpec
    rows: int  # how many rows of x it multiplies


class _Output(NamedTuple):
    """A product's output, its axes moved about: where each one was, None for a new one of size 1."""

    site: Site
    axes: tuple[int | None, ...]


class BiasUse(NamedTuple):
    """A leaf added to the output of the product at `path`, one number for each output feature."""

    path: Path


@dataclass
class Uses:
    """How a program uses its parameter leaves."""

    sites: list[Site] = field(default_factory=list)
    biases: dict[int, list[BiasUse]] = field(default_factory=dict)
    others: dict[int, list[str]] = field(default_factory=dict)  # primitives that rule a leaf out

    def rule_out(self, origin: Origin | None, why: str) -> None:
        if origin is not None:
            self.others.setdefault(origin.leaf, []).append(why)


def find_uses(jaxpr: Any, leaves: int) -> Uses:
    """All uses of the first `leaves` inputs of a jaxpr."""
    uses = Uses()
    facts: list[Origin | None] = [
        Origin(i, tuple(v.aval.shape), (), True) if i < leaves else None
        for i, v in enumerate(jaxpr.invars)
    ]
    for origin in _walk(jaxpr, facts, (), uses):
        uses.rule_out(origin, "being returned from the loss function")
    return uses


def _walk(jaxpr: Any, facts: Sequence[Origin | None], prefix: Path, uses: Uses) -> list[Origin | None]:
    env: dict[Any, Origin] = {v: f for v, f in zip(jaxpr.invars, facts, strict=True) if f is not None}
    products: dict[Any, _Output] = {}  # a variable that is a product's output, its axes moved about
    readers = Counter(
        v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jex.Literal)
    ) + Counter(v for v in jaxpr.outvars if not isinstance(v, jex.Literal))

    def fact(v: Any) -> Origin | None:
        return None if isinstance(v, jex.Literal) else env.get(v)

    for number, eqn in enumerate(jaxpr.eqns):
        path = (*prefix, number)
        known = [fact(v) for v in eqn.invars]
        if not any(known):
            output = _moved_output(eqn, products, readers)
            if output is not None:
                products[eqn.outvars[0]] = output
            continue
        inner = _inner(eqn)
        if inner is not None:
            returned = _walk(inner[0], known, path, uses)
            env.update({v: f for v, f in zip(eqn.outvars, returned, strict=True) if f is not None})
            continue
        moved = _reindexed(eqn, known)
        if moved is not None:
            env[eqn.outvars[0]] = moved
            continue
        site = _site(eqn, known, path)
        if site is not None:
            uses.sites.append(site)
            axes = tuple(range(eqn.outvars[0].aval.ndim))
            products[eqn.outvars[0]] = _Output(site, axes)
            continue
        bias = _bias(eqn, known, products, readers)
        if bias is not None:
            leaf, use = bias
            uses.biases.setdefault(leaf, []).append(use)
            continue
        for origin in known:
            uses.rule_out(origin, f"`{eqn.primitive.name}`")
    return [fact(v) for v in jaxpr.outvars]


def _inner(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """(jaxpr, its constants) of a call that may be looked into: jit and remat; else None."""
    if eqn.primitive.name in ("jit", "pjit", "closed_call"):
        closed = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
        return closed.jaxpr, closed.consts
    if eqn.primitive.name in ("remat", "remat2", "checkpoint"):
        return eqn.params["jaxpr"], ()
    return None


def _reindexed(eqn: Any, known: list[Origin | None]) -> Origin | None:
    origin, name, params = known[0], eqn.primitive.name, eqn.params
    if origin is None or len(eqn.outvars) != 1:
        return None
    old, new = tuple(eqn.invars[0].aval.shape), tuple(eqn.outvars[0].aval.shape)
    if name == "slice" and old == new:
        return origin
    if name == "transpose":
        step: Step = ("transpose", (tuple(params["permutation"]),))
    elif name in ("reshape", "squeeze", "expand_dims"):
        if params.get("dimensions") is not None and name == "reshape":
            return None
        step = ("reshape", (old, new))
    elif name == "broadcast_in_dim":
        if np.prod(old) == np.prod(new):
            step = ("reshape", (old, new))
        else:
            step = ("broadcast", (new, tuple(params["broadcast_dimensions"])))
            return origin._replace(steps=(*origin.steps, step), lossless=False)
    elif name in ("convert_element_type", "copy", "copy_p", "sharding_constraint"):
        return origin if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) else None
    else:
        return None
    return origin._replace(steps=(*origin.steps, step))


def _site(eqn: Any, known: list[Origin | None], path: Path) -> Site | None:
    if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
        return None
    if sum(origin is not None for origin in known) != 1:
        return None
    w = 0 if known[0] is not None else 1
    origin = known[w]
    assert origin is not None
    product = _dense(eqn, w) if eqn.primitive.name == "dot_general" else _convolution(eqn, w)
    if product is None or not origin.lossless:
        return None
    if any(not jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*eqn.invars, *eqn.outvars)):
        return None
    spec = LayerSpec(origin.leaf, origin.steps, tuple(eqn.invars[w].aval.shape), product)
    groups, d_out, _ = block_shape(spec)
    return Site(path, 1 - w, spec, math.prod(eqn.outvars[0].aval.shape) // max(groups * d_out, 1))


def _dense(eqn: Any, w: int) -> Dense:
    contracted, batch = eqn.params["dimension_numbers"]

    def axes(operand: int) -> tuple[tuple[int, ...], ...]:
        b, c = tuple(batch[operand]), tuple(contracted[operand])
        free = (a for a in range(eqn.invars[operand].aval.ndim) if a not in b and a not in c)
        return b, tuple(free), c

    return Dense(axes(1 - w), axes(w), x_first=w == 1)


def _convolution(eqn: Any, w: int) -> Convolution | None:
    p = eqn.params
    dilated = any(d != 1 for d in p["lhs_dilation"])
    cropped = any(side < 0 for pair in p["padding"] for side in pair)
    if w != 1 or dilated or cropped or p["batch_group_count"] != 1:
        return None
    numbers = p["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    return Convolution(
        tuple(numbers.lhs_spec),
        tuple(numbers.rhs_spec),
        tuple(numbers.out_spec),
        tuple(kernel[axis] for axis in numbers.rhs_spec[2:]),
        tuple(p["window_strides"]),
        tuple((int(a), int(b)) for a, b in p["padding"]),
        tuple(p["rhs_dilation"]),
        p["feature_group_count"],
    )


def _moved_output(eqn: Any, products: dict[Any, _Output], readers: Counter[Any]) -> _Output | None:
    """What comes of a product's output that only this equation reads, if it merely moves axes.

    `vmap` transposes outputs, and convolutions of one example get an axis of size 1 on the way.
    """
    if not eqn.invars or isinstance(eqn.invars[0], jex.Literal):
        return None
    v = eqn.invars[0]
    before = products.get(v)
    if before is None or readers[v] != 1:
        return None
    name, old, new = eqn.primitive.name, v.aval.shape, eqn.outvars[0].aval.shape
    if name == "transpose":
        return before._replace(axes=tuple(before.axes[i] for i in eqn.params["permutation"]))
    if name == "convert_element_type" or (name == "slice" and old == new):
        return before
    longer = [axis for axis, size in zip(before.axes, old, strict=True) if size != 1]
    if name not in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
        return None
    if [n for n in old if n != 1] != [n for n in new if n != 1]:
        return None
    kept = iter(longer)
    return before._replace(axes=tuple(None if size == 1 else next(kept) for size in new))


def _bias(
    eqn: Any, known: list[Origin | None], products: dict[Any, _Output], readers: Counter[Any]
) -> tuple[int, BiasUse] | None:
    """Whether an equation adds a leaf to a product's output that nothing else reads."""
    if eqn.primitive.name not in ("add", "add_any"):
        return None
    for b in (0, 1):
        origin, other = known[b], eqn.invars[1 - b]
        output = None if isinstance(other, jex.Literal) else products.get(other)
        if origin is None or output is None or readers[other] != 1:
            continue
        # Where each entry of the added array comes from, without touching its values.
        index = apply_steps(
            np.arange(np.prod(origin.shape, dtype=int)).reshape(origin.shape), origin.steps
        )
        if index.ndim != len(output.axes):
            continue
        features = feature_axes(output.site.spec)
        rows = [i for i, axis in enumerate(output.axes) if axis not in features]
        if any(index.shape[i] != 1 and index.strides[i] != 0 for i in rows):
            continue
        index = index[tuple(0 if i in rows else slice(None) for i in range(index.ndim))]
        there = [axis for axis in output.axes if axis in features]
        index = index.transpose([there.index(axis) for axis in features if axis in there])
        groups, d_out, _ = block_shape(output.site.spec)
        if np.array_equal(index.ravel(), np.arange(groups * d_out)):
            return origin.leaf, BiasUse(output.site.path)
    return None


Probe = tuple[int, Callable[[jax.Array, jax.Array], jax.Array]]


def evaluate(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], probes: dict[Path, Probe]
) -> list[Any]:
    """Run a jaxpr; at each path of `probes`, (k, f), f(x, y) replaces the output y, x is operand k.

    Calls that hold a probed product are run inline (jit) or as the remat they are; all else is bound
    as it was traced.
    """
    inside = {path[:depth] for path in probes for depth in range(1, len(path))}
    return _run(jaxpr, consts, arguments, (), probes, inside)


def _run(
    jaxpr: Any,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    prefix: Path,
    probes: dict[Path, Probe],
    inside: set[Path],
) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))
    last_use = {
        v: number
        for number, eqn in enumerate(jaxpr.eqns)
        for v in eqn.invars
        if not isinstance(v, jex.Literal)
    }
    kept = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, jex.Literal) else env[v]

    for number, eqn in enumerate(jaxpr.eqns):
        path = (*prefix, number)
        values = [read(v) for v in eqn.invars]
        if path in inside:
            inner = _inner(eqn)
            assert inner is not None

            def run(*xs: Any, inner: Any = inner, path: Path = path) -> list[Any]:
                return _run(inner[0], inner[1], xs, path, probes, inside)

            if "policy" in eqn.params:
                params = eqn.params
                run = jax.checkpoint(run, policy=params["policy"], prevent_cse=params["prevent_cse"])
            outputs = run(*values)
        else:
            bound = eqn.primitive.get_bind_params(eqn.params)
            # Older versions of jax return the functions apart.
            functions, params = bound if isinstance(bound, tuple) else ((), bound)
            with eqn.ctx.manager:
                outputs = eqn.primitive.bind(*functions, *values, **params)
            if not eqn.primitive.multiple_results:
                outputs = [outputs]
        if path in probes:
            x_operand, probe = probes[path]
            outputs = [probe(values[x_operand], outputs[0])]
        env.update(zip(eqn.outvars, outputs, strict=True))
        for v in eqn.invars:  # let go of values as the program itself would
            if not isinstance(v, jex.Literal) and last_use[v] == number and v not in kept:
                env.pop(v, None)
    return [read(v) for v in jaxpr.outvars]
