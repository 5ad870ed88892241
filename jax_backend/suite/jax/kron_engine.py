"""PSGD Kron over a pytree: momentum, whitening and clipping on buckets, on one device or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from suite.core import blocks, kronecker, moments, noise
from suite.core import kron as core_kron
from suite.core._namespace import lift
from suite.core.kron import FINITE_POWER
from suite.core.rounding import stochastic_round
from suite.core.schedules import advance_clock
from suite.core.step_size import Clip, clipped, normalized
from suite.jax.dtypes import at_least_float32
from suite.jax.finite import all_finite, select, zero_unless
from suite.jax.hessian import hessian_vector_product
from suite.jax.kron_blocks import Blocks, plan
from suite.jax.sharding import Layout, constrain, in_batches, specs_of
from suite.jax.varying import cond

Schedule = Any  # a number, a 0-d array, or a function of a count


class ScaleByKronState(NamedTuple):
    """State of `scale_by_kron`."""

    steps: jax.Array  # (): steps, without skipped ones
    updates: jax.Array  # (): updates of the factors
    update_clock: jax.Array  # (): see `suite.core.schedules.advance_clock`
    mu: Any  # momentum, like the parameters
    weight: jax.Array  # (): how much evidence the momentum holds
    buckets: tuple[core_kron.KronState, ...]  # blocks of equal shape, stacked
    skipped_steps: jax.Array  # (): steps that changed nothing: a gradient was not finite, or too large


@dataclass(frozen=True)
class Settings:
    """What `scale_by_kron` was called with, checked."""

    rule: core_kron.Kron
    structure: blocks.Structure
    b1: Any
    preconditioner_update_probability: Schedule
    preconditioner_lr: Schedule
    mu_dtype: Any
    precond_dtype: Any
    precond_update_precision: str | None
    precond_grads_precision: str | None
    scanned_layers: Any
    batch_size: int | None  # of `lax.map` over blocks; None: all at once
    params_partition_specs: Any
    layout: Layout
    whiten: str
    update_first: bool
    clip: Clip
    normalize_grads: bool
    stochastic_rounding: bool
    hvp_method: str
    seed: int

    def factor_dtype(self, leaf_dtype: Any) -> Any:
        return self.precond_dtype or at_least_float32(leaf_dtype)

    def layout_on(self, tree: Any) -> Layout:
        sharded = self.layout.axes or self.params_partition_specs is not None
        return self.layout.on(tree) if sharded else self.layout


def _plan(settings: Settings, tree: Any, mu: Any) -> Blocks:
    kinds: list[Any] = [jnp.result_type(m) for m in jax.tree.leaves(mu)]
    if settings.params_partition_specs is not None:
        specs = specs_of(tree, settings.params_partition_specs)
        kinds = list(zip(kinds, specs, strict=True))
    structure, scanned = settings.structure, settings.scanned_layers
    if settings.mu_dtype is None:
        tree = mu  # like the parameters: gradients may be of wider dtypes, one by one
    return plan(tree, structure, scanned, settings.seed, settings.factor_dtype, kinds)


def init(settings: Settings, params: Any) -> ScaleByKronState:
    """The state before the first step."""
    mu = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_momentum_dtype(settings, p)), params)
    static = _plan(settings, params, mu)
    layout = settings.layout_on(params)

    @jax.jit  # all at once, each share where it belongs: array by array takes longer to compile
    def start() -> list[Any]:
        made = []
        for bucket in static.buckets:
            blocks_of_all = layout.padded(bucket.blocks) if layout.axes else bucket.blocks
            like = jnp.zeros((), bucket.dtype)
            sizes = (blocks_of_all, *bucket.sizes)
            made.append(
                layout.place(settings.rule.init(like, sizes, bucket.diagonal, bucket.diagonal_blocks))
            )
        return made

    return ScaleByKronState(
        jnp.zeros((), jnp.int32),
        jnp.zeros((), jnp.int32),
        jnp.ones((), jnp.float32),
        constrain(mu, settings.params_partition_specs, layout),
        jnp.zeros((), at_least_float32(*map(jnp.result_type, jax.tree.leaves(params)))),
        tuple(start()),
        jnp.zeros((), jnp.int32),
    )


def _momentum_dtype(settings: Settings, parameter: jax.Array) -> Any:
    """None: the parameter's; not float16, in which directions overflow before they are clipped."""
    is_narrow = settings.mu_dtype is None and jnp.result_type(parameter) == jnp.float16
    return jnp.float32 if is_narrow else settings.mu_dtype


def schedules(settings: Settings, state: ScaleByKronState) -> tuple[Any, Any]:
    """The update probability and the factors' learning rate of the coming step."""
    probability = at(settings.preconditioner_update_probability, state.steps + 1)
    return probability, at(settings.preconditioner_lr, state.updates)


def update(
    settings: Settings,
    updates: Any,
    state: ScaleByKronState,
    params: Any,
    pair: tuple[Any, Any] | None,
    value_fn: Callable[[Any], jax.Array] | None,
    chosen: tuple[Any, Any],
) -> tuple[Any, ScaleByKronState]:
    """One step: directions like `updates`, and the new state.

    Args:
        pair: (v, H v) like the parameters, or None.
        value_fn: the loss as a function of the parameters, from which pairs are made when due, or None.
        chosen: what the `schedules` say.
    """
    _require_alike(updates, state.mu)
    static, layout = _plan(settings, updates, state.mu), settings.layout_on(updates)
    _require_factors(static, state.buckets)
    in_state = zip(static.buckets, state.buckets, strict=True)
    state = state._replace(buckets=tuple(layout.resized(old, b.blocks) for b, old in in_state))
    leaves, treedef = jax.tree.flatten(updates)
    gradients = static.join(leaves)
    leaves_of_mu = jax.tree.leaves(state.mu)
    old_mu = static.join(leaves_of_mu)

    def reached(product: Any) -> list[Any]:
        return _within_reach(settings, jax.tree.leaves(product), leaves_of_mu)

    given = () if pair is None else (pair[0], reached(pair[1]))
    finite = all_finite((_within_reach(settings, gradients, old_mu), given), FINITE_POWER)
    step = state.steps + 1
    probability, rate = chosen
    due, clock = advance_clock(state.update_clock, probability)
    if settings.normalize_grads:
        gradients = [normalized(g, g.ndim - 1) for g in gradients]
    # Chosen here: at the end, where a made pair may say no once more, it would be a pass of its own.
    mu = select(finite, _absorb(settings, static, step, old_mu, gradients), old_mu)
    weight = moments.update_average(state.weight, jnp.ones_like(state.weight), settings.b1)
    rows = [old.lipschitz[0].shape[0] for old in state.buckets]

    def stacked(joined: list[Any]) -> list[Any]:
        return list(map(layout.shared_out, static.split(joined), rows))

    signals = stacked(mu)  # still to be divided by their weight

    users_precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def made() -> tuple[Any, Any]:
        with jax.default_matmul_precision(users_precision):  # it is of the user's loss
            return _make_pair(settings, static, step, params, value_fn)

    def fit(olds: tuple[core_kron.KronState, ...]) -> Any:
        ok = jnp.asarray(True)
        if settings.whiten == "gradient":
            evidence = stacked(gradients)
        else:
            evidence = [moments.unbiased(signal, weight) for signal in signals]
        numbers = [jnp.asarray(bucket.streams, jnp.int32) for bucket in static.buckets]
        stacks: tuple[Any, ...] = (list(olds), evidence, list(map(layout.shared_out, numbers, rows)))
        if pair is not None or value_fn is not None:
            vector, product = pair or made()
            ok = all_finite(reached(product), FINITE_POWER)
            on_vector, on_product = (
                stacked(static.join(jax.tree.leaves(tree))) for tree in (vector, product)
            )
            stacks = (list(olds), on_product, stacks[2], on_vector)
        new = layout.each(_fitting(settings, step, rate), *stacks)
        return select(ok, tuple(new), olds), ok

    with jax.default_matmul_precision(settings.precond_update_precision):
        states, ok = cond(
            due & finite,
            fit,
            lambda olds: (olds, jnp.asarray(True)),
            state.buckets,
            like=(state, gradients),
        )
    finite = finite & ok
    used = states
    if not settings.update_first:
        used = tuple(map(settings.rule.before_update, state.buckets, states))
    directions = []
    with jax.default_matmul_precision(settings.precond_grads_precision):
        for bucket, of_bucket, signal in zip(static.buckets, used, signals, strict=True):
            precondition = _preconditioning(settings, weight)
            directions.append(layout.gathered(precondition, of_bucket, signal, blocks=bucket.blocks))
    merged = [x.astype(g.dtype) for x, g in zip(static.merge(directions), gradients, strict=True)]

    places = static.places(step > 0)

    def parted(joined: list[Any], like: Any) -> Any:
        tree = jax.tree.unflatten(treedef, static.part(joined, jax.tree.leaves(like), places))
        return constrain(tree, settings.params_partition_specs, layout)

    return parted(zero_unless(finite, merged), updates), ScaleByKronState(
        jnp.where(finite, step, state.steps),
        jnp.where(finite & due, state.updates + 1, state.updates),
        jnp.where(finite, clock, state.update_clock),
        parted(select(finite, mu, old_mu) if value_fn is not None else mu, state.mu),
        jnp.where(finite, weight, state.weight),
        states,
        state.skipped_steps + (~finite).astype(jnp.int32),
    )


def _within_reach(settings: Settings, evidence: list[Any], mu: list[Any]) -> list[Any]:
    """Gradients, or products with the Hessian, in single precision where some of the state is."""
    double, factors = jnp.dtype(jnp.float64), settings.precond_dtype
    in_double = [{m.dtype, jnp.dtype(factors or double)} == {double} for m in mu]
    return [
        x if kept or jnp.result_type(x) != double else x.astype(jnp.float32)
        for x, kept in zip(evidence, in_double, strict=True)
    ]


def _require_alike(updates: Any, mu: Any) -> None:
    """ValueError unless gradients have the structure and shapes of the parameters of `init`."""
    found, expected = jax.tree.structure(updates), jax.tree.structure(mu)
    if found != expected:  # type: ignore[operator]
        raise ValueError(f"updates must have the structure {expected}, got {found}")
    flat = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (updates, mu))
    shapes = [{jax.tree_util.keystr(path): jnp.shape(x) for path, x in leaves} for leaves in flat]
    if shapes[0] != shapes[1]:
        raise ValueError(f"updates must have the shapes {shapes[1]}, got {shapes[0]}")


def _require_factors(static: Blocks, states: Sequence[core_kron.KronState]) -> None:
    """ValueError unless factors have the shapes that the settings give the parameters."""
    found = [tuple(q.shape[1:] for q in state.factors) for state in states]
    expected = [
        tuple(map(kronecker.factor_shape, bucket.sizes, bucket.diagonal, bucket.diagonal_blocks))
        for bucket in static.buckets
    ]
    if found != expected:
        raise ValueError(
            "state must be that of init(params) with these settings (block_size, memory_save_mode, "
            f"shared_factors, ...): its factors must have the shapes {expected}, got {found}"
        )


def _absorb(
    settings: Settings, static: Blocks, step: jax.Array, mu: list[Any], gradients: list[Any]
) -> list[Any]:
    """Joined momentum with these joined gradients in it."""
    if not settings.stochastic_rounding:
        return [moments.update_average(m, g, settings.b1) for m, g in zip(mu, gradients, strict=True)]
    units = static.noise(step, noise.MOMENTUM, jnp.float32)
    return [
        stochastic_round(moments.update_average(lift(m), g, settings.b1), unit, m.dtype)
        for m, g, unit in zip(mu, gradients, units, strict=True)
    ]


def _make_pair(
    settings: Settings, static: Blocks, step: jax.Array, params: Any, value_fn: Any
) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten(params)
    wide = at_least_float32(*map(jnp.result_type, leaves))
    units = static.part(static.noise(step, noise.PAIR, wide), leaves, static.places(step > 0))
    vector = jax.tree.unflatten(treedef, [v.astype(p.dtype) for v, p in zip(units, leaves, strict=True)])
    return vector, hessian_vector_product(value_fn, params, vector, method=settings.hvp_method)


def _fitting(settings: Settings, step: jax.Array, rate: Any) -> Callable[..., list[Any]]:
    """One update of all buckets' factors, or of a device's share of them."""
    rule, rounds = settings.rule, settings.stochastic_rounding

    def fit(
        olds: list[core_kron.KronState],
        evidence: list[jax.Array],
        numbers: list[jax.Array],
        vectors: list[jax.Array] | None = None,
    ) -> list[core_kron.KronState]:
        units = [
            noise.draw(of_blocks, step, noise.FIT, x.shape[1:], old.factors[0].dtype)
            for of_blocks, x, old in zip(numbers, evidence, olds, strict=True)
        ]
        wide = [rule.lifted(old) for old in olds] if rounds else olds
        found = rule.fit(wide, evidence, units, rate, vectors)
        return list(map(rounded, found, numbers, olds)) if rounds else found

    def rounded(
        new: core_kron.KronState, numbers: jax.Array, old: core_kron.KronState
    ) -> core_kron.KronState:
        noises = tuple(
            noise.draw(numbers, step, noise.FACTOR + axis, q.shape[1:], jnp.float32)
            for axis, q in enumerate(new.factors)
        )
        return rule.rounded(new, noises, old.factors[0].dtype)

    if settings.batch_size is None:
        return fit
    size = settings.batch_size

    def fit_in_batches(*stacks: Any) -> list[core_kron.KronState]:
        alone = [[[x] for x in column] for column in stacks]
        return [in_batches(fit, size, *one)[0] for one in zip(*alone, strict=True)]

    return fit_in_batches


def _preconditioning(settings: Settings, weight: jax.Array) -> Callable[..., jax.Array]:
    """P m / `weight` of one bucket, or of a device's share of it, clipped."""

    def precondition(state: core_kron.KronState, signal: jax.Array) -> jax.Array:
        later = signal.dtype == weight.dtype  # directions are multiplied anyway
        signal = signal if later else moments.unbiased(signal, weight)
        direction = settings.rule.precondition(state, signal)
        return clipped(direction, settings.clip, signal.ndim - 1, weight if later else None)

    if settings.batch_size is None:
        return precondition
    size = settings.batch_size
    return lambda *arguments: in_batches(precondition, size, *arguments)


def at(value: Schedule, count: jax.Array) -> Any:
    """A schedule's value, or the value."""
    return value(count) if callable(value) else value
