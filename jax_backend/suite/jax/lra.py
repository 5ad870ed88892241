"""Front doors of PSGD with one preconditioner for all parameters: low rank, and dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from suite.core import dense as core_dense
from suite.core import lra as core_lra
from suite.core import moments, noise
from suite.core.checks import check_choice, check_number
from suite.core.kron import FINITE_POWER
from suite.core.renamed import OF_KRON, says_new_names
from suite.core.schedules import advance_clock, precond_lr_schedule, precond_update_prob_schedule
from suite.core.step_size import Clip, check_clip, clipped
from suite.jax.at_once import compiled_unless_traced
from suite.jax.boxes import rebox, unbox
from suite.jax.dtypes import at_least_float32
from suite.jax.explicit_axes import (
    across_explicit_axes,
    on_automatic_axes,
    takes_explicit_settings,
)
from suite.jax.finite import all_finite, select, zero_unless
from suite.jax.hessian import hessian_vector_product
from suite.jax.kron import Integer, integer, with_learning_rate
from suite.jax.kron_blocks import require_real_floats
from suite.jax.kron_engine import Schedule, at
from suite.jax.masks import like
from suite.jax.varying import cond


class ScaleByVectorState(NamedTuple):
    """State of `scale_by_lra` and `scale_by_dense`."""

    steps: jax.Array  # (): steps, without skipped ones
    updates: jax.Array  # (): updates of the preconditioner
    update_clock: jax.Array  # (): see `suite.core.schedules.advance_clock`
    momentum: jax.Array  # (n,): all parameters as one vector
    weight: jax.Array  # (): how much evidence the momentum holds
    preconditioner: Any  # LRAState or DenseState
    skipped_steps: jax.Array  # (): steps that changed nothing: a gradient was not finite, or too large


@says_new_names(OF_KRON)
@takes_explicit_settings
def scale_by_lra(
    rank: Integer = np.int64(10),
    b1: float = 0.9,
    preconditioner_update_probability: Schedule | None = None,
    preconditioner_lr: Schedule | None = None,
    preconditioner_init_scale: float | None = None,
    *,
    betaL: float = 0.9,
    damping: float = 1e-9,
    whiten: Literal["momentum", "gradient"] = "momentum",
    clip: Clip = 1.1,
    hvp_method: Literal["exact", "finite_difference"] = "exact",
    seed: Integer = np.int64(0),
) -> optax.GradientTransformationExtraArgs:
    """Momentum, whitened by a diagonal plus low-rank preconditioner of all parameters as one vector.

    `update(..., value_fn=loss)` or `update(..., vector=v, hvp=Hv)` makes it LRA Newton, see
    `scale_by_kron`, which also says what steps are skipped.

    Args:
        rank: of the correction of the diagonal, >= 0; 0 is the diagonal case.
        preconditioner_init_scale, betaL, damping: see `suite.core.lra.LRA`.
        b1, preconditioner_update_probability, preconditioner_lr, whiten, hvp_method, seed: as in
            `scale_by_kron`.
        clip: the largest root mean square of the direction, or (that, the largest entry), or None.

    Raises:
        ValueError, TypeError: as `scale_by_kron`.

    References: see `suite.core.lra`.
    """
    rule = core_lra.LRA(integer("rank", rank, 0), betaL, damping, preconditioner_init_scale)

    def init(momentum: jax.Array, streams: jax.Array) -> core_lra.LRAState:
        shape = (momentum.shape[0], rule.rank)
        return rule.init(
            *(noise.draw(streams, 0, use, shape, momentum.dtype)[0] for use in (noise.FIT, noise.PAIR))
        )

    def fit(old: Any, evidence: Any, unit: Any, rate: Any, updates: Any, vector: Any) -> Any:
        return rule.update(old, evidence, unit, rate, updates % 2 == 0, vector)

    return _scale(
        init,
        fit,
        rule.precondition,
        b1,
        preconditioner_update_probability,
        preconditioner_lr,
        whiten,
        clip,
        hvp_method,
        seed,
    )


@says_new_names(OF_KRON)
@takes_explicit_settings
def scale_by_dense(
    geometry: core_dense.DenseGeometry = "Q0.5EQ1.5",
    b1: float = 0.0,
    preconditioner_update_probability: Schedule | None = 1.0,
    preconditioner_lr: Schedule | None = 0.1,
    preconditioner_init_scale: float | None = None,
    *,
    betaL: float = 0.9,
    damping: float = 1e-9,
    whiten: Literal["momentum", "gradient"] = "momentum",
    clip: Clip = None,
    hvp_method: Literal["exact", "finite_difference"] = "exact",
    seed: Integer = np.int64(0),
) -> optax.GradientTransformationExtraArgs:
    """Momentum times one dense preconditioner of all parameters as one vector: for small problems.

    `update(..., value_fn=loss)` or `update(..., vector=v, hvp=Hv)` fits |H|⁻¹ (dense Newton); without,
    gradients are whitened. Steps are skipped where `scale_by_kron` skips them.

    Args:
        geometry, preconditioner_init_scale, betaL, damping: see `suite.core.dense.Dense`.
        b1, preconditioner_update_probability, preconditioner_lr, whiten, hvp_method, seed: as in
            `scale_by_kron`, with other defaults: no momentum, and an update in every step, of a constant
            rate; None: schedules as there.
        clip: the largest root mean square of the direction, or (that, the largest entry), or None.

    Raises:
        ValueError, TypeError: as `scale_by_kron`.

    References: see `suite.core.dense`.
    """
    rule = core_dense.Dense(geometry, betaL, damping, preconditioner_init_scale)

    def init(momentum: jax.Array, streams: jax.Array) -> core_dense.DenseState:
        del streams
        return rule.init(momentum, momentum.shape)

    def fit(old: Any, evidence: Any, unit: Any, rate: Any, updates: Any, vector: Any) -> Any:
        del updates
        return rule.update(old, evidence, unit, rate, vector)

    return _scale(
        init,
        fit,
        rule.precondition,
        b1,
        preconditioner_update_probability,
        preconditioner_lr,
        whiten,
        clip,
        hvp_method,
        seed,
    )


def _scale(
    init_rule: Callable[..., Any],
    fit_rule: Callable[..., Any],
    precondition: Callable[..., jax.Array],
    b1: float,
    probability: Schedule | None,
    rate: Schedule | None,
    whiten: str,
    clip: Clip,
    hvp_method: str,
    seed: Integer,
) -> optax.GradientTransformationExtraArgs:
    check_number("b1", b1, at_least=0, below=1)
    probability = precond_update_prob_schedule() if probability is None else probability
    rate = precond_lr_schedule() if rate is None else rate
    if not callable(probability):
        check_number("preconditioner_update_probability", probability, above=0, at_most=1)
    if not callable(rate):
        check_number("preconditioner_lr", rate, above=0, below=1)
    check_choice("whiten", whiten, ("momentum", "gradient"))
    check_choice("hvp_method", hvp_method, ("exact", "finite_difference"))
    check_clip(clip)
    seed = integer("seed", seed, 0)

    def streams() -> jax.Array:
        return jnp.asarray(noise.stream_numbers(0, 1, int(seed)), jnp.int32)

    def flat(tree: Any) -> jax.Array:
        tree = unbox(tree)
        require_real_floats(jax.tree.leaves(tree))
        vector = ravel_pytree(tree)[0]
        return vector.astype(at_least_float32(vector.dtype))

    def require_own(state: ScaleByVectorState) -> None:
        own = jax.eval_shape(init_rule, state.momentum, streams())
        expected, found = (jax.tree.map(jnp.shape, x) for x in (own, state.preconditioner))
        if found != expected:
            raise ValueError(
                "state must be that of init(params) with these settings: its preconditioner must have "
                f"the shapes {expected}, got {found}"
            )

    def init(params: Any) -> ScaleByVectorState:
        momentum = jnp.zeros_like(on_automatic_axes(flat, params))
        return ScaleByVectorState(
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
            jnp.ones((), jnp.float32),
            momentum,
            jnp.zeros((), momentum.dtype),
            init_rule(momentum, streams()),
            jnp.zeros((), jnp.int32),
        )

    def update(
        updates: Any,
        state: ScaleByVectorState,
        params: Any = None,
        *,
        value_fn: Callable[[Any], jax.Array] | None = None,
        vector: Any = None,
        hvp: Any = None,
        **extra: Any,
    ) -> tuple[Any, ScaleByVectorState]:
        del extra
        if (vector is None) != (hvp is None):
            raise ValueError("vector and hvp must be given together")
        if value_fn is not None and params is None:
            raise ValueError("params must be given to update(...) with value_fn")
        plain = jax.tree.map(jnp.asarray, unbox(updates))
        if not any(leaf.size for leaf in jax.tree.leaves(plain)):
            return updates, state
        numbers = sum(leaf.size for leaf in jax.tree.leaves(plain))
        known = state.momentum.size
        if numbers != known:
            raise ValueError(f"updates must have the {known} numbers that init was given, got {numbers}")
        if vector is not None:
            vector, hvp = like(plain, unbox(vector)), like(plain, unbox(hvp))
        chosen = at(probability, state.steps + 1), at(rate, state.updates)
        if value_fn is None:
            directions, new_state = compiled(plain, state, vector, hvp, chosen)
        else:
            directions, new_state = moved_by(plain, state, vector, hvp, chosen, params, value_fn)
        return rebox(directions, updates), new_state

    def moved_by(
        plain: Any,
        state: ScaleByVectorState,
        vector: Any,
        hvp: Any,
        chosen: tuple[Any, Any],
        params: Any = None,
        value_fn: Callable[[Any], jax.Array] | None = None,
    ) -> tuple[Any, ScaleByVectorState]:
        require_own(state)
        gradient = flat(plain).astype(state.momentum.dtype)
        finite = all_finite((plain, hvp), FINITE_POWER)
        step = state.steps + 1
        due, clock = advance_clock(state.update_clock, chosen[0])
        momentum = moments.update_average(state.momentum, gradient, b1)
        weight = moments.update_average(state.weight, jnp.ones_like(state.weight), b1)
        signal = moments.unbiased(momentum[None], weight[None])[0]

        def pair() -> tuple[jax.Array | None, jax.Array]:
            if vector is not None:
                return flat(vector), flat(hvp)
            if value_fn is None:
                return None, gradient if whiten == "gradient" else signal
            values = jax.tree.map(jnp.asarray, unbox(params))
            shape, dtype = state.momentum.shape, state.momentum.dtype
            drawn = noise.draw(streams(), step, noise.PAIR, shape, dtype)[0]
            leaves, treedef = jax.tree.flatten(values)
            parts = jnp.split(drawn, np.cumsum([leaf.size for leaf in leaves])[:-1])
            shaped = [v.reshape(p.shape).astype(p.dtype) for v, p in zip(parts, leaves, strict=True)]
            v = jax.tree.unflatten(treedef, shaped)

            def loss(p: Any) -> jax.Array:
                return value_fn(rebox(p, params))

            return flat(v), flat(hessian_vector_product(loss, values, v, method=hvp_method))

        def fit(old: Any) -> tuple[Any, jax.Array]:
            v, evidence = pair()
            unit = noise.draw(streams(), step, noise.FIT, gradient.shape, gradient.dtype)[0]
            new = fit_rule(old, evidence, unit, chosen[1], state.updates, v)
            ok = all_finite(evidence, FINITE_POWER)
            return select(ok, new, old), ok

        new, ok = cond(
            due & finite,
            fit,
            lambda old: (old, jnp.asarray(True)),
            state.preconditioner,
            like=(state, gradient),
        )
        finite = finite & ok
        moved = clipped(precondition(new, signal), clip, 1)
        leaves, treedef = jax.tree.flatten(plain)
        parts = jnp.split(moved, np.cumsum([leaf.size for leaf in leaves])[:-1])
        shaped = [x.reshape(g.shape).astype(g.dtype) for x, g in zip(parts, leaves, strict=True)]
        directions = zero_unless(finite, jax.tree.unflatten(treedef, shaped))
        return directions, ScaleByVectorState(
            jnp.where(finite, step, state.steps),
            jnp.where(finite & due, state.updates + 1, state.updates),
            jnp.where(finite, clock, state.update_clock),
            jnp.where(finite, momentum, state.momentum),
            jnp.where(finite, weight, state.weight),
            new,
            state.skipped_steps + (~finite).astype(jnp.int32),
        )

    compiled = compiled_unless_traced(moved_by)
    return across_explicit_axes(optax.GradientTransformationExtraArgs(init, update))


@says_new_names(OF_KRON)
@takes_explicit_settings
def lra(
    learning_rate: Schedule = 0.001,
    rank: Integer = np.int64(10),
    b1: float = 0.9,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    preconditioner_update_probability: Schedule | None = None,
    preconditioner_lr: Schedule | None = None,
    preconditioner_init_scale: float | None = None,
    *,
    betaL: float = 0.9,
    damping: float = 1e-9,
    whiten: Literal["momentum", "gradient"] = "momentum",
    clip: Clip = 1.1,
    hvp_method: Literal["exact", "finite_difference"] = "exact",
    seed: Integer = np.int64(0),
) -> optax.GradientTransformationExtraArgs:
    """PSGD LRA: `scale_by_lra`, decoupled weight decay, learning rate.

        >>> tx = lra(learning_rate=1e-3, rank=10)
        >>> updates, state = tx.update(grads, tx.init(params), params)

    Arguments are those of `scale_by_lra`, and `weight_decay` and `weight_decay_mask` of `kron`.
    """
    preconditioner = scale_by_lra(
        rank,
        b1,
        preconditioner_update_probability,
        preconditioner_lr,
        preconditioner_init_scale,
        betaL=betaL,
        damping=damping,
        whiten=whiten,
        clip=clip,
        hvp_method=hvp_method,
        seed=seed,
    )
    return with_learning_rate(preconditioner, learning_rate, weight_decay, weight_decay_mask)


@says_new_names(OF_KRON)
@takes_explicit_settings
def dense_newton(
    learning_rate: Schedule = 0.01,
    geometry: core_dense.DenseGeometry = "Q0.5EQ1.5",
    b1: float = 0.0,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    preconditioner_update_probability: Schedule | None = 1.0,
    preconditioner_lr: Schedule | None = 0.1,
    preconditioner_init_scale: float | None = None,
    *,
    betaL: float = 0.9,
    damping: float = 1e-9,
    clip: Clip = None,
    hvp_method: Literal["exact", "finite_difference"] = "exact",
    seed: Integer = np.int64(0),
) -> optax.GradientTransformationExtraArgs:
    """Dense PSGD Newton: `scale_by_dense`, decoupled weight decay, learning rate.

        >>> tx = dense_newton(learning_rate=0.5)
        >>> updates, state = tx.update(grads, state, params, value_fn=loss_fn)

    Arguments are those of `scale_by_dense` but for `whiten`, and `weight_decay` and `weight_decay_mask`
    of `kron`.
    """
    preconditioner = scale_by_dense(
        geometry,
        b1,
        preconditioner_update_probability,
        preconditioner_lr,
        preconditioner_init_scale,
        betaL=betaL,
        damping=damping,
        clip=clip,
        hvp_method=hvp_method,
        seed=seed,
    )
    return with_learning_rate(preconditioner, learning_rate, weight_decay, weight_decay_mask)
