"""The front door of PSGD Kron for JAX: optax transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from suite.core import blocks, buckets, moments, noise
from suite.core import kron as core_kron
from suite.core.checks import check_integer, check_number
from suite.core.routing import Route, Routing, describe_factors
from suite.core.schedules import advance_clock, precond_update_prob_schedule
from suite.core.step_size import rms_clip
from suite.jax.finite import all_finite, select, zero_unless

Schedule = Any  # a number, a 0-d array, or a function of the step count

MAX_RMS = 1.1  # a whitened gradient has root mean square 1; distributed_kron's bound


class ScaleByKronState(NamedTuple):
    """State of `scale_by_kron`."""

    steps: jax.Array  # (): steps, without skipped ones
    update_clock: jax.Array  # (): see `suite.core.schedules.advance_clock`
    mu: Any  # momentum, like the parameters
    weight: jax.Array  # (): how much evidence the momentum holds
    buckets: tuple[core_kron.KronState, ...]  # blocks of equal shape, stacked
    skipped_steps: jax.Array  # (): steps that changed nothing because a gradient was not finite


class KronOptState(NamedTuple):
    """State of `kron`."""

    preconditioner: ScaleByKronState
    rest: Any  # weight decay

    @property
    def skipped_steps(self) -> jax.Array:
        return self.preconditioner.skipped_steps


class _Blocks(NamedTuple):
    """The static side of the state: blocks of every leaf and their buckets."""

    plans: list[blocks.BlockPlan | None]  # None: an empty leaf
    buckets: tuple[buckets.Bucket, ...]
    streams: list[list[int]]  # noise streams of every bucket's blocks


def scale_by_kron(
    b1: float = 0.9,
    preconditioner_update_probability: Schedule | None = None,
    max_size_triangular: int = 8192,
    min_ndim_triangular: int = 2,
    memory_save_mode: blocks.MemorySaveMode | None = None,
    preconditioner_lr: Schedule = 0.1,
    preconditioner_init_scale: float | None = 1.0,
    mu_dtype: Any = None,
    precond_dtype: Any = None,
    precond_update_precision: str | None = "tensorfloat32",
    precond_grads_precision: str | None = None,
    scanned_layers: Any = None,
    merge_small_dims: bool = True,
    target_merged_dim_size: int = 2048,
    partition_grads_into_blocks: bool = True,
    block_size: int = 256,
    *,
    geometry: core_kron.Geometry = "Q0.5EQ1.5",
    betaL: float = 0.9,
    damping: float = 1e-9,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Momentum, whitened by a Kronecker-factored preconditioner fitted on the fly, for chains.

    A step with a gradient that is not finite changes no momentum and no factor, returns zeros and is
    counted in the state's `skipped_steps`.

    Args:
        b1: decay of the momentum, in [0, 1).
        preconditioner_update_probability: how often factors are updated, a number in (0, 1] or a
            function of the step; spread evenly, not drawn. Default: `precond_update_prob_schedule()`.
        max_size_triangular, min_ndim_triangular, memory_save_mode, merge_small_dims,
        target_merged_dim_size, partition_grads_into_blocks, block_size: which factors a parameter gets,
            see `suite.core.blocks.Structure`.
        preconditioner_lr: step size of the factors' updates, in (0, 1); number or schedule.
        preconditioner_init_scale: factors start as the identity times (their share of) this; None
            sets it from each block's first gradient.
        mu_dtype: dtype of the momentum; default: the parameter's.
        precond_dtype: dtype of the factors; default: the parameter's, at least float32.
        precond_update_precision, precond_grads_precision: `jax.default_matmul_precision` of the
            factors' updates and of preconditioning.
        scanned_layers: a pytree of booleans like the parameters; True where axis 0 stacks layers.
        geometry, betaL, damping: how factors are fitted, see `suite.core.kron.Kron`.
        seed: of the noise that the fit uses; the same seed gives the same run, also in torch.

    References: see `suite.core.kron`. Argument names are distributed_kron's.
    """
    check_number("b1", b1, at_least=0, below=1)
    if preconditioner_update_probability is None:
        preconditioner_update_probability = precond_update_prob_schedule()
    elif not callable(preconditioner_update_probability):
        name = "preconditioner_update_probability"
        check_number(name, preconditioner_update_probability, above=0, at_most=1)
    if not callable(preconditioner_lr):
        check_number("preconditioner_lr", preconditioner_lr, above=0, below=1)
    check_integer("seed", seed, at_least=0)
    rule = core_kron.Kron(geometry, betaL, damping, preconditioner_init_scale)
    structure = blocks.Structure(
        max_size_triangular,
        min_ndim_triangular,
        memory_save_mode,
        merge_small_dims,
        target_merged_dim_size,
        partition_grads_into_blocks,
        block_size,
    )

    def factor_dtype(leaf_dtype: Any) -> Any:
        return precond_dtype or jnp.promote_types(leaf_dtype, jnp.float32)

    def init(params: Any) -> ScaleByKronState:
        static = _plan(params, structure, scanned_layers, seed, factor_dtype)
        states = []
        for bucket in static.buckets:
            sizes, diagonal, dtype = bucket.key
            like = jnp.zeros((), dtype)
            shape = (bucket.blocks, *sizes)
            states.append(rule.init(like, shape, diagonal))
        weight_dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
        return ScaleByKronState(
            jnp.zeros((), jnp.int32),
            jnp.ones((), jnp.float32),
            jax.tree.map(lambda p: jnp.zeros_like(p, dtype=mu_dtype), params),
            jnp.zeros((), weight_dtype),
            tuple(states),
            jnp.zeros((), jnp.int32),
        )

    def update(
        updates: Any, state: ScaleByKronState, params: Any = None, **extra: Any
    ) -> tuple[Any, ScaleByKronState]:
        del params, extra
        static = _plan(updates, structure, scanned_layers, seed, factor_dtype)
        finite = all_finite(updates)
        step = state.steps + 1
        due, clock = advance_clock(state.update_clock, _at(preconditioner_update_probability, step))
        mu = jax.tree.map(lambda m, g: moments.update_average(m, g, b1), state.mu, updates)
        weight = moments.update_average(state.weight, jnp.ones_like(state.weight), b1)
        signals: list[Any] = []
        for plan, m in zip(static.plans, jax.tree.leaves(mu), strict=True):
            if plan is not None:
                signals += blocks.split(plan, moments.unbiased(m, weight))

        joined = [buckets.gather(bucket, signals) for bucket in static.buckets]

        def fit(
            olds: tuple[core_kron.KronState, ...], joined: list[jax.Array]
        ) -> tuple[core_kron.KronState, ...]:
            rate = _at(preconditioner_lr, step)
            new = []
            for old, signal, streams in zip(olds, joined, static.streams, strict=True):
                numbers = jnp.asarray(streams, jnp.int32)
                unit = noise.unit_noise(numbers, step, signal.shape[1:], old.factors[0].dtype)
                new.append(rule.refresh(rule.update(old, signal, unit, rate)))
            return tuple(new)

        with jax.default_matmul_precision(precond_update_precision):
            states = jax.lax.cond(due & finite, fit, lambda olds, joined: olds, state.buckets, joined)
        directions: list[Any] = [None] * len(signals)
        with jax.default_matmul_precision(precond_grads_precision):
            for bucket, new, signal in zip(static.buckets, states, joined, strict=True):
                whitened = rms_clip(rule.precondition(new, signal), MAX_RMS, signal.ndim - 1)
                buckets.scatter(bucket, whitened, directions)

        flat, treedef = jax.tree.flatten(updates)
        stacks = iter(directions)
        moved = [
            g if plan is None else blocks.merge(plan, [next(stacks) for _ in plan.tiles]).astype(g.dtype)
            for g, plan in zip(flat, static.plans, strict=True)
        ]
        new_state = ScaleByKronState(
            jnp.where(finite, step, state.steps),
            jnp.where(finite, clock, state.update_clock),
            select(finite, mu, state.mu),
            jnp.where(finite, weight, state.weight),
            states,
            state.skipped_steps + (~finite).astype(jnp.int32),
        )
        return jax.tree.unflatten(treedef, zero_unless(finite, moved)), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def kron(
    learning_rate: Schedule = 0.0003,
    b1: float = 0.9,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    preconditioner_update_probability: Schedule | None = None,
    max_size_triangular: int = 8192,
    min_ndim_triangular: int = 2,
    memory_save_mode: blocks.MemorySaveMode | None = None,
    preconditioner_lr: Schedule = 0.1,
    preconditioner_init_scale: float | None = 1.0,
    mu_dtype: Any = None,
    precond_dtype: Any = None,
    precond_update_precision: str | None = "tensorfloat32",
    precond_grads_precision: str | None = None,
    scanned_layers: Any = None,
    merge_small_dims: bool = True,
    target_merged_dim_size: int = 2048,
    partition_grads_into_blocks: bool = True,
    block_size: int = 256,
    *,
    geometry: core_kron.Geometry = "Q0.5EQ1.5",
    betaL: float = 0.9,
    damping: float = 1e-9,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """PSGD Kron: `scale_by_kron`, decoupled weight decay, learning rate.

        >>> tx = kron(learning_rate=3e-4)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(grads, state, params)

    A step that is not finite changes nothing but the counts; `state.skipped_steps` says how many.

    Args:
        learning_rate: a number, 0-d array or function of the step count.
        weight_decay, weight_decay_mask: as in `optax.add_decayed_weights`.

    All others are `scale_by_kron`'s.
    """
    if not callable(learning_rate):
        check_number("learning_rate", learning_rate, at_least=0)
    check_number("weight_decay", weight_decay, at_least=0)
    preconditioner = scale_by_kron(
        b1,
        preconditioner_update_probability,
        max_size_triangular,
        min_ndim_triangular,
        memory_save_mode,
        preconditioner_lr,
        preconditioner_init_scale,
        mu_dtype,
        precond_dtype,
        precond_update_precision,
        precond_grads_precision,
        scanned_layers,
        merge_small_dims,
        target_merged_dim_size,
        partition_grads_into_blocks,
        block_size,
        geometry=geometry,
        betaL=betaL,
        damping=damping,
        seed=seed,
    )
    decay = (
        optax.add_decayed_weights(weight_decay, weight_decay_mask) if weight_decay else optax.identity()
    )

    def init(params: Any) -> KronOptState:
        return KronOptState(preconditioner.init(params), decay.init(params))

    def update(
        updates: Any, state: KronOptState, params: Any = None, **extra: Any
    ) -> tuple[Any, KronOptState]:
        if params is None and weight_decay:
            raise ValueError("params must be given to update(...) when weight_decay is not 0")
        finite = all_finite(updates)
        whitened, inner = preconditioner.update(updates, state.preconditioner, params, **extra)
        decayed, rest = decay.update(whitened, state.rest, params)
        rate = _at(learning_rate, state.preconditioner.steps)
        moved = jax.tree.map(lambda d: -jnp.asarray(rate, d.dtype) * d, decayed)
        return zero_unless(finite, moved), KronOptState(inner, rest)

    return optax.GradientTransformationExtraArgs(init, update)


def routing(params: Any, scanned_layers: Any = None, **structure: Any) -> Routing:
    """What `kron` gives every leaf of `params` and why; prints as a table.

    Args:
        params: arrays or `jax.ShapeDtypeStruct`s.
        scanned_layers: as in `scale_by_kron`.
        structure: of `suite.core.blocks.Structure`.
    """
    static = _plan(params, blocks.Structure(**structure), scanned_layers, 0, lambda dtype: dtype)
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    routes = []
    for (path, leaf), plan in zip(paths, static.plans, strict=True):
        name, shape = jax.tree_util.keystr(path) or "params", tuple(leaf.shape)
        if plan is None:
            routes.append(Route(name, shape, "plain", "", "empty"))
            continue
        cut = f", in {plan.blocks} blocks" if plan.blocks > 1 else ""
        reason = f"{len(plan.merged)} axes after merging{cut}"
        routes.append(Route(name, shape, "kron", describe_factors(plan.merged, plan.diagonal), reason))
    return Routing(tuple(routes))


def _plan(
    tree: Any,
    structure: blocks.Structure,
    scanned_layers: Any,
    seed: int,
    factor_dtype: Callable[[Any], Any],
) -> _Blocks:
    leaves, treedef = jax.tree.flatten(tree)
    if any(jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating) for leaf in leaves):
        raise ValueError("Kron does not cover complex parameters: give it real and imaginary parts")
    scanned = [False] * len(leaves)
    if scanned_layers is not None:
        scanned, scanned_treedef = jax.tree.flatten(scanned_layers)
        if scanned_treedef != treedef:  # type: ignore[operator]
            raise ValueError(f"scanned_layers must have the structure {treedef}, got {scanned_treedef}")
    plans: list[blocks.BlockPlan | None] = []
    stacks, owner = [], []
    for number, (leaf, is_scanned) in enumerate(zip(leaves, scanned, strict=True)):
        if leaf.size == 0:
            plans.append(None)
            continue
        plan = blocks.plan_blocks(leaf.shape, structure, scanned=is_scanned)
        plans.append(plan)
        streams = iter(noise.stream_numbers(number, plan.blocks, seed))
        # By the factors' dtype: gradients may come in a wider one than their parameters.
        dtype = jnp.dtype(factor_dtype(jnp.result_type(leaf)))
        for tile in plan.tiles:
            stacks.append(((tile.sizes, plan.diagonal, dtype), plan.tile_blocks(tile)))
            owner.append([next(streams) for _ in range(plan.tile_blocks(tile))])
    planned = buckets.plan_buckets(stacks)
    return _Blocks(plans, planned, [[s for m in b.members for s in owner[m.index]] for b in planned])


def _at(value: Schedule, count: jax.Array) -> Any:
    return value(count) if callable(value) else value
