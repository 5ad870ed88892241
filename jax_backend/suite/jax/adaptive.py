"""K-FAC that finds its learning rate, momentum and damping from a quadratic model of the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from suite.core import kfac as core_kfac
from suite.core import statistics as core_statistics
from suite.core.checks import check_number
from suite.core.damping import levenberg_marquardt
from suite.core.step_size import quadratic_step
from suite.jax.dtypes import at_least_float32
from suite.jax.explicit_axes import across_explicit_axes
from suite.jax.finite import select
from suite.jax.gauss_newton import linearized, total
from suite.jax.kfac import Schedule, of_the_rest, plan_leaves, scale_by_kfac
from suite.jax.kfac_state import ScaleByKFACState, explicit_state_specs
from suite.jax.masks import beside, of_whole
from suite.jax.plan import Plan
from suite.jax.spread import spread_of
from suite.jax.varying import cond

_HIGHEST = 1e4  # of damping


class AdaptiveKFACState(NamedTuple):
    """State of `adaptive_kfac`."""

    preconditioner: ScaleByKFACState
    before: list[jax.Array]  # the covered leaves as they were before the last step
    predicted: jax.Array  # (): what that was to change the loss by; 0: there is none to judge
    fallback: Any  # the fallback's own state
    damping: jax.Array  # ()
    learning_rate: jax.Array  # (): the coefficient of the direction in the last step
    momentum: jax.Array  # (): that of the step before
    reduction_ratio: jax.Array  # (): how the loss changed over how it was to change; 0: not known yet
    rejected_steps: jax.Array  # (): steps that were taken back
    skipped: jax.Array  # (): skipped besides the preconditioner's, for the loss or the quadratic model

    @property
    def skipped_steps(self) -> jax.Array:
        """Steps that changed nothing: something was not finite, not convex, or of another loss."""
        return self.preconditioner.skipped_steps + self.skipped


class _Step(NamedTuple):
    """What a step comes to."""

    changes: list[jax.Array]  # of the covered leaves
    preconditioner: ScaleByKFACState
    predicted: jax.Array
    weights: jax.Array  # (2,): learning rate and momentum
    moved: jax.Array  # (): bool
    skipped: jax.Array  # (): bool


def adaptive_kfac(
    plan: Plan,
    *,
    damping: float = 0.1,
    fallback: optax.GradientTransformation | None = None,
    factor_update_steps: Schedule = 1,
    inv_update_steps: Schedule = 1,
    factor_decay: Schedule = 0.95,
    compute_method: core_kfac.ComputeMethod = "eigen",
    warm_start: bool = False,
    factor_dtype: Any = None,
    inv_dtype: Any = None,
    loss_reduction: core_statistics.LossReduction = "mean",
    mesh: Mesh | None = None,
    axis_name: str | None = None,
    gradient_worker_fraction: float | str | None = None,
    assignment_strategy: str = "compute",
) -> optax.GradientTransformationExtraArgs:
    """K-FAC without a learning rate, momentum or damping to tune, for full or large batches.

        >>> vag = value_and_grad(loss_fn, has_aux=True)  # loss_fn(params, batch) -> (loss, outputs)
        >>> tx = adaptive_kfac(vag.plan(params, batch), compute_method="inverse", inv_update_steps=5)
        >>> state = tx.init(params)
        >>> (loss, _), grads, statistics = vag(params, batch)
        >>> updates, state = tx.update(
        ...     grads, state, params, statistics=statistics, value_fn=lambda p: loss_fn(p, batch)
        ... )

    The step is c₁ d + c₂ δ, d the direction of K-FAC and δ the step before. c is where a quadratic model
    of the loss is lowest, whose curvature is the exact Gauss-Newton matrix of the batch plus damping.
    Damping falls while the loss of the next batch goes down as the model said, and rises when it goes
    up; a step that raises it by more than it was to fall, or makes it infinite, is taken back.

    `value_fn` is a function of the parameters that returns the loss and the array, or pytree of arrays,
    that the loss is a convex function of: logits, or the residuals of a PINN. It is differentiated
    forward along d and δ, and evaluated at the parameters before the last step. Gradients have to be its
    own, of the same batch and random numbers, unclipped: steps where its derivative along d is another
    than theirs are skipped, and counted. Call `update` under `jax.jit`.

    Batches have to be large enough that their curvature is that of the problem: from some 50 or 100
    examples for small networks, the more the better: a PINN of 2,300 parameters with new points in every
    step stands still with 256 of them, and does well with 1,000, or with the same 256 always.
    On smaller ones `state.damping` rises to 10⁴, where nothing moves; there `kfac` does better.

    Args:
        plan: from `value_and_grad(...).plan(params, batch)`.
        damping: where damping starts, > 0; 0.1 suits losses that are means of terms near 1.
        fallback: the whole optimizer, learning rate included, of all leaves that are not in the plan;
            none that takes `value_fn` itself.
        axis_name: inside your own `shard_map`: average gradients and statistics over it first, those
            of `lax.pcast(params, axis_name, to="varying")` where `check_vma` is on; `value_fn` is the
            device's own, and averaged here.

    All others are `scale_by_kfac`'s.

    Limits:
        Outputs that the loss is not convex in end in skipped steps. Functions with a reverse rule of
        their own (`jax.custom_vjp`) have no forward derivative, an error of jax's. Outputs that a
        `scan` or `cond` makes together with the loss cannot be told from it. `update` is to be given
        all parameters, none masked. A step that is taken back leaves the fallback's.

    Raises:
        ValueError, TypeError: a bad value, leaves that neither the plan nor `fallback` has; in `update`
            without params or value_fn, or a loss that is not computed from the outputs.

    References:
        Martens & Grosse 2015 (arXiv:1503.05671), sections 6.4, 6.5 and 7. There damping is adapted by
        the loss of the minibatch that made the step, which every step lowers, however noisy.
    """
    check_number("damping", damping, above=0)
    preconditioner = functools.partial(
        scale_by_kfac,
        plan,
        kl_clip=None,
        factor_update_steps=factor_update_steps,
        inv_update_steps=inv_update_steps,
        factor_decay=factor_decay,
        compute_method=compute_method,
        warm_start=warm_start,
        factor_dtype=factor_dtype,
        inv_dtype=inv_dtype,
        loss_reduction=loss_reduction,
        mesh=mesh,
        axis_name=axis_name,
        gradient_worker_fraction=gradient_worker_fraction,
        assignment_strategy=assignment_strategy,
    )
    start = preconditioner(damping=damping)  # raises what is wrong with settings
    spread = spread_of(mesh, axis_name, gradient_worker_fraction, assignment_strategy)

    def with_damping(
        updates: Any, state: ScaleByKFACState, params: Any = None, *, damping: Any, **extra: Any
    ) -> tuple[Any, ScaleByKFACState]:
        return preconditioner(damping=damping).update(updates, state, params, **extra)

    # Damping is an argument: its mesh axes, too, have to be automatic where they are explicit.
    direction = across_explicit_axes(
        optax.GradientTransformationExtraArgs(start.init, with_damping),
        spread.explicit_mesh,
        functools.partial(explicit_state_specs, spread=spread),
    )
    covered = plan.covered()
    left = [name for name, ours in zip(plan.names, covered, strict=True) if not ours]
    if left and fallback is None:
        raise ValueError(f"fallback must be an optimizer for what the plan does not cover: {left}")

    def is_left(tree: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), [not ours for ours in covered])

    rest = of_the_rest(fallback, is_left)

    def ours_of(tree: Any) -> list[jax.Array]:
        leaves = plan_leaves(plan, tree)
        if any(leaf is None for leaf in leaves):
            raise ValueError("adaptive_kfac must be given all parameters, got masked ones")
        return [jnp.asarray(x) for x, ours in zip(leaves, covered, strict=True) if ours]

    def init(params: Any) -> AdaptiveKFACState:
        dtype = at_least_float32(*(x.dtype for x in ours_of(params)))
        # A copy: `optax.inject_hyperparams` has the same array in its own state; both may be donated.
        number = functools.partial(jnp.array, dtype=dtype)
        return AdaptiveKFACState(
            start.init(params),
            jax.tree.map(jnp.copy, ours_of(params)),
            number(0),
            rest.init(params),
            number(damping),
            number(0),
            number(0),
            number(0),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
        )

    def update(
        updates: Any,
        state: AdaptiveKFACState,
        params: Any = None,
        *,
        value_fn: Callable[[Any], Any] | None = None,
        **extra: Any,
    ) -> tuple[Any, AdaptiveKFACState]:
        if params is None or value_fn is None:
            raise ValueError("params and value_fn must be given to update(...)")
        value_fn, params = of_whole(value_fn, updates, params), beside(updates, params)
        now, dtype = ours_of(params), state.damping.dtype
        gradients = ours_of(updates)

        def rebuild(values: Any) -> Any:
            leaves, given = jax.tree.leaves(params), iter(values)
            mixed = [next(given) if ours else x for x, ours in zip(leaves, covered, strict=True)]
            return jax.tree.unflatten(jax.tree.structure(params), mixed)

        def mean(x: jax.Array) -> jax.Array:
            x = x.astype(dtype)
            return x if axis_name is None else lax.pmean(x, axis_name)

        here = linearized(value_fn, now, rebuild)
        loss, old = mean(here.loss), mean(value_fn(rebuild(state.before))[0])

        # Was the last step good? Losses of this batch, before it and now, tell.
        judged = state.predicted < 0
        adapts = judged & jnp.isfinite(old)  # else it is not the step's fault
        known = adapts | ~judged | jnp.isfinite(loss)  # else the next batch tells
        change = loss - old
        rounding = 8 * float(jnp.finfo(here.loss.dtype).eps) * jnp.abs(old)
        change = jnp.where(jnp.abs(change) < rounding, 0, change)
        adapted, stands = levenberg_marquardt(state.damping, change, state.predicted, highest=_HIGHEST)
        rejected = adapts & ~stands
        damping = jnp.where(adapts, adapted, state.damping)
        ratio = change / jnp.minimum(state.predicted, -float(jnp.finfo(dtype).tiny))

        def take() -> _Step:
            directions, new = direction.update(
                updates, state.preconditioner, params, damping=damping, **extra
            )
            finite = new.skipped_steps == state.preconditioner.skipped_steps
            steps = [jnp.where(judged, p - q, 0) for p, q in zip(now, state.before, strict=True)]
            vectors = [ours_of(directions), steps]
            curvature = [mean(x) for x in here.products(vectors)]
            dots = [total(u, v).astype(dtype) for i, u in enumerate(vectors) for v in vectors[i:]]
            first, mixed, last = (c + damping * x for c, x in zip(curvature, dots, strict=True))
            M = jnp.stack([jnp.stack([first, mixed]), jnp.stack([mixed, last])])
            b = jnp.stack([total(v, gradients).astype(dtype) for v in vectors])
            weights, predicted = quadratic_step(M, b)
            convex = jnp.isfinite(jnp.sum(weights) + predicted + loss)
            convex &= (weights[0] != 0) | (b[0] == 0)
            derivative, terms = map(mean, here.derivative(vectors[0]))
            coarse = max(0.01, *(8 * float(jnp.finfo(x.dtype).eps) for x in (*now, *here.gradient)))
            sound = convex & (jnp.abs(derivative - b[0]) <= 0.1 * jnp.abs(b[0]) + coarse * terms)
            moved = finite & sound
            joint = [
                weights[0] * d.astype(dtype) + weights[1] * s.astype(dtype)
                for d, s in zip(*vectors, strict=True)
            ]
            changes = [
                jnp.where(moved, x, 0).astype(d.dtype) for x, d in zip(joint, vectors[0], strict=True)
            ]
            # Losses are seldom below zero: a model that promises more than the loss itself is off.
            predicted = jnp.maximum(predicted, -jnp.abs(loss))
            return _Step(
                changes,
                new,
                jnp.where(moved, predicted, jnp.where(finite, 0, state.predicted)),
                jnp.stack([-weights[0], weights[1]]),
                moved,
                finite & ~sound,
            )

        def stay() -> _Step:
            back = [jnp.where(rejected, q - p, 0) for p, q in zip(now, state.before, strict=True)]
            return _Step(
                back,
                state.preconditioner,
                jnp.where(rejected, 0, state.predicted),
                jnp.zeros(2, dtype),
                jnp.asarray(False),
                ~known,
            )

        goes = known & ~rejected
        step = cond(goes, take, stay, like=(state, updates, loss))
        damping = jnp.where(goes & step.skipped, jnp.minimum(4 * damping, _HIGHEST), damping)
        # A gradient or statistic that is not finite: as if the step had not been.
        lost = step.preconditioner.skipped_steps > state.preconditioner.skipped_steps
        damping = jnp.where(lost, state.damping, damping)
        rate, momentum = jnp.where(
            step.moved, step.weights, jnp.stack([state.learning_rate, state.momentum])
        )
        extra.pop("statistics", None)
        others, new_fallback = rest.update(updates, state.fallback, params, **extra)
        changes = iter(step.changes)
        moves = [
            next(changes) if ours else jnp.where(step.moved, x, 0)
            for x, ours in zip(jax.tree.leaves(others), covered, strict=True)
        ]
        new_state = AdaptiveKFACState(
            step.preconditioner,
            select(step.moved, now, state.before),
            step.predicted,
            select(step.moved, new_fallback, state.fallback),
            damping,
            rate,
            momentum,
            jnp.where(adapts & ~lost, ratio, state.reduction_ratio),
            state.rejected_steps + rejected.astype(jnp.int32),
            state.skipped + step.skipped.astype(jnp.int32),
        )
        return jax.tree.unflatten(jax.tree.structure(updates), moves), new_state

    return optax.GradientTransformationExtraArgs(init, update)
