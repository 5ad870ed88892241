"""The front door of K-FAC for JAX: optax transformations."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from suite.core import buckets, statistics
from suite.core import kfac as core_kfac
from suite.core.checks import check_choice, check_integer, check_number
from suite.core.step_size import inner_product, kl_clip_coefficient
from suite.jax.capture import Plan, Statistics
from suite.jax.finite import all_finite, select, zero_unless
from suite.jax.layers import gradient_matrix, write_gradient

Schedule = Any  # a number, a 0-d array, or a function of the step count


class ScaleByKFACState(NamedTuple):
    """State of `scale_by_kfac`."""

    steps: jax.Array  # (): steps, without skipped ones: what was due then is due next
    buckets: tuple[core_kfac.KFACState, ...]  # layers of equal factor sizes, stacked
    skipped_steps: jax.Array  # (): steps that changed nothing because something was not finite


class KFACOptState(NamedTuple):
    """State of `kfac`."""

    preconditioner: ScaleByKFACState
    rest: Any  # momentum, weight decay and the fallback

    @property
    def skipped_steps(self) -> jax.Array:
        return self.preconditioner.skipped_steps


def scale_by_kfac(
    plan: Plan,
    *,
    factor_update_steps: Schedule = 1,
    inv_update_steps: Schedule = 1,
    damping: Schedule = 0.001,
    factor_decay: Schedule = 0.95,
    kl_clip: Schedule | None = 0.001,
    lr: Schedule = 0.1,
    compute_method: core_kfac.ComputeMethod = "eigen",
    factor_dtype: Any = None,
    inv_dtype: Any = None,
    loss_reduction: statistics.LossReduction = "mean",
) -> optax.GradientTransformationExtraArgs:
    """Replace the gradients of the layers in `plan` by natural-gradient directions, for chains.

    Other leaves pass through. `update(grads, state, params, statistics=statistics)` takes the third
    result of `suite.jax.value_and_grad`; without it (or None) factors are not updated in this step. A
    step whose gradients or statistics are not all finite changes no factor, returns zeros, is counted.

    Args:
        plan: from `value_and_grad(...).plan(params, batch)`.
        factor_update_steps: steps between updates of the factors; statistics given in between are
            ignored, and need not be computed.
        inv_update_steps: steps between computations of inverses or eigenbases.
        damping: Tikhonov damping λ >= 0, in units of curvature.
        factor_decay: decay of the running averages, in [0, 1).
        kl_clip: bound of lr² Σ⟨direction, gradient⟩; None switches clipping off.
        lr: the learning rate in that bound.
        compute_method: 'eigen', 'inverse' or 'newton_schulz', see `suite.core.kfac.KFAC`.
        factor_dtype, inv_dtype: dtypes of running averages and of inverses; default: the parameter's,
            at least float32.
        loss_reduction: 'mean' or 'sum': what the loss does over its terms.

    The first six and lr take a number or a function of the step count.
    """
    settings = {
        "factor_update_steps": factor_update_steps,
        "inv_update_steps": inv_update_steps,
        "damping": damping,
        "factor_decay": factor_decay,
        "kl_clip": kl_clip,
        "lr": lr,
    }
    for name, value in settings.items():
        if not callable(value):
            _check(name, value)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must come from value_and_grad(...).plan(...), got {type(plan).__name__}")
    check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
    # The capture here does not sum second moments in an eigenbasis, which 'ekfac' needs.
    check_choice("compute_method", compute_method, ("eigen", "inverse", "newton_schulz"))
    rule = core_kfac.KFAC(compute_method)
    planned = buckets.plan_buckets(
        [
            ((layer.sizes, layer.diagonal, plan.dtypes[layer.spec.leaf]), layer.groups)
            for layer in plan.layers
        ]
    )

    def init(params: Any) -> ScaleByKFACState:
        _leaves(plan, params)
        states = []
        for bucket in planned:
            sizes, diagonal, weight_dtype = bucket.key
            dtype = jnp.promote_types(weight_dtype, jnp.float32)
            like = jnp.zeros((), factor_dtype or dtype)
            inverse_like = jnp.zeros((), inv_dtype or dtype)
            states.append(rule.init(like, (bucket.blocks,), sizes, diagonal, inverse_like))
        return ScaleByKFACState(jnp.zeros((), jnp.int32), tuple(states), jnp.zeros((), jnp.int32))

    def update(
        updates: Any,
        state: ScaleByKFACState,
        params: Any = None,
        *,
        statistics: Statistics | None = None,
        **extra: Any,
    ) -> tuple[Any, ScaleByKFACState]:
        del params, extra
        leaves = _leaves(plan, updates)
        at = {name: _at(value, state.steps) for name, value in settings.items()}
        finite = all_finite(leaves) & all_finite(statistics)
        states = state.buckets
        if statistics is not None:
            due = finite & (state.steps % at["factor_update_steps"] == 0)
            sums = _stacked(plan, planned, statistics)
            terms = statistics[plan.last].rows * plan.terms_per_row
            states = jax.lax.cond(
                due, _absorb, lambda olds, *_: olds, states, sums, terms, at["factor_decay"]
            )
        due = finite & (state.steps % at["inv_update_steps"] == 0)
        states = jax.lax.cond(due, _refresh, lambda olds, _: olds, states, at["damping"])
        directions = _precondition(leaves, states, at)
        new_state = ScaleByKFACState(
            state.steps + finite.astype(jnp.int32),
            states,
            state.skipped_steps + (~finite).astype(jnp.int32),
        )
        directions = zero_unless(finite, directions)
        return jax.tree.unflatten(jax.tree.structure(updates), directions), new_state

    def _absorb(olds: _States, sums: list[_Sums], terms: jax.Array, factor_decay: Any) -> _States:
        new = []
        for old, of_layers in zip(olds, sums, strict=True):
            pairs = [_normalize(one, terms, loss_reduction) for one in of_layers]
            A = jnp.concatenate([A.astype(old.A.average.dtype) for A, _ in pairs])
            G = jnp.concatenate([G.astype(old.G.average.dtype) for _, G in pairs])
            seen = jnp.concatenate([jnp.full(one.A.shape[0], one.rows > 0) for one in of_layers])
            new.append(rule.update(old, A, G, seen, factor_decay))
        return tuple(new)

    def _refresh(olds: _States, damping: Any) -> _States:
        return tuple(rule.refresh(old, damping) for old in olds)

    def _precondition(leaves: list[Any], states: Any, at: dict[str, Any]) -> list[Any]:
        gradients = [gradient_matrix(leaves, layer) for layer in plan.layers]
        directions: list[Any] = [None] * len(plan.layers)
        for bucket, old in zip(planned, states, strict=True):
            joined = buckets.gather(bucket, gradients)
            buckets.scatter(bucket, rule.precondition(old, joined, at["damping"]), directions)
        if at["kl_clip"] is not None:
            total = sum(inner_product(d, g) for d, g in zip(directions, gradients, strict=True))
            coefficient = kl_clip_coefficient(at["lr"] ** 2 * total, at["kl_clip"])
            directions = [d * coefficient.astype(d.dtype) for d in directions]
        leaves = list(leaves)
        for layer, direction in zip(plan.layers, directions, strict=True):
            write_gradient(leaves, layer, direction)
        return leaves

    return optax.GradientTransformationExtraArgs(init, update)


def kfac(
    plan: Plan,
    learning_rate: Schedule,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    fallback: optax.GradientTransformation | None = None,
    factor_update_steps: Schedule = 1,
    inv_update_steps: Schedule = 1,
    damping: Schedule = 0.001,
    factor_decay: Schedule = 0.95,
    kl_clip: Schedule | None = 0.001,
    compute_method: core_kfac.ComputeMethod = "eigen",
    factor_dtype: Any = None,
    inv_dtype: Any = None,
    loss_reduction: statistics.LossReduction = "mean",
) -> optax.GradientTransformationExtraArgs:
    """K-FAC with momentum: a complete optimizer.

        >>> tx = kfac(plan, learning_rate=0.1, fallback=optax.adam(1e-3))
        >>> state = tx.init(params)
        >>> updates, state = tx.update(grads, state, params, statistics=statistics)

    A step that is not finite changes nothing but the counts; `state.skipped_steps` says how many.

    Args:
        plan: from `value_and_grad(...).plan(params, batch)`.
        learning_rate: a number, 0-d array or function of the step count; of the leaves in the plan.
        momentum: heavy-ball momentum in [0, 1), over directions.
        weight_decay, weight_decay_mask: added to directions before momentum, as torch's SGD does.
        fallback: the whole optimizer, learning rate included, of all other leaves. Default: the same
            momentum and learning rate, on their plain gradient.

    All others are `scale_by_kfac`'s, whose `lr` is the learning rate.
    """
    if not callable(learning_rate):
        _check("lr", learning_rate)
    check_number("momentum", momentum, at_least=0, below=1)
    check_number("weight_decay", weight_decay, at_least=0)
    preconditioner = scale_by_kfac(
        plan,
        factor_update_steps=factor_update_steps,
        inv_update_steps=inv_update_steps,
        damping=damping,
        factor_decay=factor_decay,
        kl_clip=kl_clip,
        lr=learning_rate,
        compute_method=compute_method,
        factor_dtype=factor_dtype,
        inv_dtype=inv_dtype,
        loss_reduction=loss_reduction,
    )
    parts = [optax.add_decayed_weights(weight_decay, weight_decay_mask)] if weight_decay else []
    descent = optax.chain(*parts, optax.trace(momentum))
    own = [True] * len(plan.names) if fallback is None else plan.covered()

    def labels(tree: Any) -> Any:
        chosen = ["kfac" if mine else "fallback" for mine in own]
        return jax.tree.unflatten(jax.tree.structure(tree), chosen)

    other = optax.identity() if fallback is None else fallback
    rest = optax.with_extra_args_support(
        optax.multi_transform({"kfac": descent, "fallback": other}, labels)
    )

    def init(params: Any) -> KFACOptState:
        return KFACOptState(preconditioner.init(params), rest.init(params))

    def update(
        updates: Any, state: KFACOptState, params: Any = None, **extra: Any
    ) -> tuple[Any, KFACOptState]:
        if params is None and weight_decay:
            raise ValueError("params must be given to update(...) when weight_decay is not 0")
        finite = all_finite(updates) & all_finite(extra.get("statistics"))
        directions, inner = preconditioner.update(updates, state.preconditioner, params, **extra)
        extra.pop("statistics", None)
        directions, new_rest = rest.update(directions, state.rest, params, **extra)
        rate = _at(learning_rate, state.preconditioner.steps)
        scaled = [
            -jnp.asarray(rate, d.dtype) * d if mine else d
            for d, mine in zip(jax.tree.leaves(directions), own, strict=True)
        ]
        moved = jax.tree.unflatten(jax.tree.structure(directions), scaled)
        new_state = KFACOptState(inner, select(finite, new_rest, state.rest))
        return zero_unless(finite, moved), new_state

    return optax.GradientTransformationExtraArgs(init, update)


_States = tuple[core_kfac.KFACState, ...]
_Sums = list[statistics.LayerStatistics]
_normalize = statistics.normalize


def _stacked(plan: Plan, planned: tuple[buckets.Bucket, ...], given: Statistics) -> list[_Sums]:
    """The raw sums of the layers of each bucket."""
    names = [layer.name for layer in plan.layers]
    if set(given) != set(names):
        missing, unknown = sorted(set(names) - set(given)), sorted(set(given) - set(names))
        raise ValueError(f"statistics do not fit the plan: missing {missing}, unknown {unknown}")
    return [[given[names[member.index]] for member in bucket.members] for bucket in planned]


def _leaves(plan: Plan, tree: Any) -> list[Any]:
    leaves, treedef = jax.tree.flatten(tree)
    shapes = tuple(tuple(jnp.shape(leaf)) for leaf in leaves)
    if treedef != plan.treedef or shapes != plan.shapes:
        raise ValueError(
            f"parameters or gradients must have the plan's structure and shapes, "
            f"{plan.treedef} with {plan.shapes}, got {treedef} with {shapes}"
        )
    return leaves


def _at(value: Schedule, count: jax.Array) -> Any:
    return value(count) if callable(value) else value


def _check(name: str, value: Any) -> None:
    if name in ("factor_update_steps", "inv_update_steps"):
        if getattr(value, "shape", None) != ():
            check_integer(name, value, at_least=1)
    elif name == "factor_decay":
        check_number(name, value, at_least=0, below=1)
    elif name == "kl_clip" and value is not None:
        check_number(name, value, above=0)
    elif name in ("damping", "lr"):
        check_number("learning_rate" if name == "lr" else name, value, at_least=0)
