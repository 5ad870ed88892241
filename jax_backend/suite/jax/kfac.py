"""The front door of K-FAC for JAX: optax transformations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from suite.core import kfac as core_kfac
from suite.core import statistics as core_statistics
from suite.core.checks import check_choice, check_integer, check_number
from suite.core.linalg import inner_product
from suite.core.renamed import OF_KFAC, says_new_names
from suite.core.step_size import kl_clip_coefficient
from suite.jax.at_once import compiled_unless_traced
from suite.jax.dtypes import at_least_float32, check_dtype
from suite.jax.explicit_axes import across_explicit_axes, takes_explicit_settings
from suite.jax.factors import Factors
from suite.jax.finite import all_finite, select, sum_if, zero_unless
from suite.jax.given import are_evidence, finite_signs, require_fit
from suite.jax.kept_factors import KeptFactors
from suite.jax.kfac_state import KFACOptState, ScaleByKFACState, explicit_state_specs
from suite.jax.layers import gradient_matrix, write_gradient
from suite.jax.masks import decayed_weights, is_masked
from suite.jax.plan import Plan, Statistics
from suite.jax.spread import spread_of
from suite.jax.spread_factors import SpreadFactors

Schedule = Any  # a number, a 0-d array, or a function of the step count

_MISSING: Any = object()


@says_new_names(OF_KFAC)
@takes_explicit_settings
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
    warm_start: bool = False,
    factor_dtype: Any = None,
    inv_dtype: Any = None,
    loss_reduction: core_statistics.LossReduction = "mean",
    mesh: Mesh | None = None,
    axis_name: str | None = None,
    gradient_worker_fraction: float | str | None = None,
    assignment_strategy: str = "compute",
) -> optax.GradientTransformationExtraArgs:
    """Replace the gradients of the layers in `plan` by natural-gradient directions, for chains.

    Other leaves pass through. `update(grads, state, params, statistics=statistics)` takes the third
    result of `suite.jax.value_and_grad`, or None in a step that updates no factors; to leave it out is
    an error. A step whose gradients, their squares or statistics are not all finite changes no factor,
    returns zeros, is counted. Masked leaves (`optax.masked`, `optax.partition`) are left alone.

    Args:
        plan: from `value_and_grad(...).plan(params, batch)`.
        factor_update_steps: steps between updates of the factors; statistics given in between are
            ignored, and need not be computed. An update that was due in a step without statistics takes
            the next that come.
        inv_update_steps: steps between computations of inverses or eigenbases; the first are computed
            when there are statistics.
        damping: Tikhonov damping λ >= 0, in units of curvature.
        factor_decay: decay of the running averages, in [0, 1).
        kl_clip: bound of lr² Σ⟨direction, gradient⟩; None switches clipping off.
        lr: the learning rate in that bound.
        compute_method: 'eigen', 'inverse', 'newton_schulz' or 'ekfac', see `suite.core.kfac.KFAC`. For
            'ekfac' statistics must come from `value_and_grad(...)(..., bases=eigenbases(state, plan))`,
            and be due between refreshes, too: factor_update_steps is no multiple of inv_update_steps.
        warm_start: eigenbases ('eigen', 'ekfac') start from the ones before and improve by one
            orthogonal iteration.
        factor_dtype, inv_dtype: dtypes of running averages and of inverses; default: the parameter's,
            at least float32.
        loss_reduction: 'mean' or 'sum': what the loss does over its terms. The steps of a mean are those
            of a sum with `damping` and `kl_clip` times the number of terms.
        mesh: under `jit` with arrays sharded over it, share out the factorizations over its devices.
        axis_name: inside your own `shard_map`, share them out over this axis; average gradients and
            statistics over it first, those of `lax.pcast(params, axis_name, to="varying")` where
            `check_vma` is on.
        gradient_worker_fraction: the share of devices that hold a layer's inverses and compute its
            direction, which the others receive: a number in [1 / devices, 1], or 'COMM_OPT' (1),
            'HYBRID_OPT' (1/2) or 'MEM_OPT' (1 / devices). Default: 1. Below 1 running averages are with
            the device that factorizes them, only. Inside your own `shard_map` that needs `mesh`, too,
            and `state_specs` for the state. See `suite.core.placement`.
        assignment_strategy: 'compute' or 'memory', what is balanced over devices: n³ or n².

    All from factor_update_steps to lr take a number or a function of the step count.

    Raises:
        ValueError, TypeError: a bad value; in `init` and `update` what does not fit the plan.
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
    for name, dtype in {"factor_dtype": factor_dtype, "inv_dtype": inv_dtype}.items():
        check_dtype(name, dtype)
        if dtype is not None and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp:
            raise ValueError(
                f"{name} must have the range of float32, got {jnp.dtype(dtype)}: inverses and second "
                "moments leave that of float16, bfloat16 takes as little room"
            )
    rule = core_kfac.KFAC(compute_method)
    rule.check_warm_start(warm_start)
    if all(isinstance(period, Integral) for period in (factor_update_steps, inv_update_steps)):
        rule.check_periods(factor_update_steps, inv_update_steps)
    spread = spread_of(mesh, axis_name, gradient_worker_fraction, assignment_strategy)
    if spread.keeps and rule.compute_method == "ekfac":
        raise ValueError(
            "gradient_worker_fraction must be 1 with compute_method='ekfac', whose second moments every "
            f"device measures in all eigenbases, got {gradient_worker_fraction!r}"
        )
    kind = Factors if spread.alone else KeptFactors if spread.keeps else SpreadFactors

    def factors_of(tree: Any) -> tuple[list[Any], Factors]:
        leaves = plan_leaves(plan, tree)
        here = [leaf is not None for leaf in leaves]
        layers = []
        for layer in plan.layers:
            if here[layer.leaf] and (layer.bias is None or here[layer.bias]):
                layers.append(layer)
            elif here[layer.leaf] or (layer.bias is not None and here[layer.bias]):
                assert layer.bias is not None
                masked = plan.names[layer.bias if here[layer.leaf] else layer.leaf]
                raise ValueError(
                    f"{plan.names[layer.leaf]} and {plan.names[layer.bias]} must be masked together, or "
                    f"both not, or what is masked left alone: value_and_grad(..., plain=[{masked!r}])"
                )
        factors = (kind if layers else Factors)(
            plan,
            layers,
            rule,
            factor_dtype=factor_dtype,
            inv_dtype=inv_dtype,
            warm_start=warm_start,
            loss_reduction=loss_reduction,
            spread=spread,
        )
        return leaves, factors

    def init(params: Any) -> ScaleByKFACState:
        _, factors = factors_of(params)
        counts = [jnp.zeros((), jnp.int32) for _ in range(3)]
        pending = jnp.zeros((), bool)
        state = ScaleByKFACState(counts[0], factors.init(), counts[1], counts[2], pending)
        return spread.on_explicit_mesh(state, explicit_state_specs(state, spread))

    def update(
        updates: Any,
        state: ScaleByKFACState,
        params: Any = None,
        *,
        statistics: Statistics | None = _MISSING,
        **extra: Any,
    ) -> tuple[Any, ScaleByKFACState]:
        del params, extra
        if statistics is _MISSING:
            raise TypeError(
                "K-FAC's update(...) needs statistics=, the third result of suite.jax.value_and_grad, "
                "or None in a step that updates no factors"
            )
        if not isinstance(statistics, Statistics | None):
            kind = type(statistics).__name__
            raise TypeError(f"statistics must be what suite.jax.value_and_grad returns, got {kind}")
        at = {name: _at(value, state.steps) for name, value in settings.items()}
        moved: tuple[Any, ScaleByKFACState] = compiled(updates, state, statistics, at)
        return moved

    def moved_by(
        updates: Any, state: ScaleByKFACState, statistics: Statistics | None, at: dict[str, Any]
    ) -> tuple[Any, ScaleByKFACState]:
        leaves, factors = factors_of(updates)
        factors.require_own(state.factors)
        if statistics is not None:
            require_fit(plan, statistics, factors.keeps_products)
        signs = [] if statistics is None else finite_signs(statistics)
        finite = all_finite(updates, power=2) & all_finite(signs)
        gradients = [gradient_matrix(leaves, layer) for layer in factors.layers]
        leaves = [
            leaf if own else zero_unless(finite, leaf)
            for leaf, own in zip(leaves, factors.written, strict=True)
        ]
        due = finite & (state.steps % at["factor_update_steps"] == 0)
        wanted = due | (finite & state.pending)
        new, seen = state.factors, jnp.asarray(False)
        if statistics is not None:
            of_terms = plan.terms_given or loss_reduction == "mean"
            seen = are_evidence(statistics, has_to_have_terms=of_terms)
            new = factors.update_if(wanted & seen, new, statistics, at["factor_decay"])
        # Without inverses the first statistics that are late would wait for a whole period.
        first = finite & state.pending & seen & ~jnp.any(new.ready)
        inverts = first | (finite & (state.steps % at["inv_update_steps"] == 0))
        new = factors.refresh_if(inverts, new, at["damping"])
        directions = factors.precondition(new, gradients, at["damping"])
        if at["kl_clip"] is not None and directions:
            parts = [inner_product(d, g) for d, g in zip(directions, gradients, strict=True)]
            dtype = at_least_float32(*(x.dtype for x in parts))
            total = sum_if(finite, [x.astype(dtype) for x in parts])
            coefficient = kl_clip_coefficient(at["lr"] ** 2 * total, at["kl_clip"])
            directions = [d * coefficient.astype(d.dtype) for d in directions]
        for layer, direction in zip(factors.layers, zero_unless(finite, directions), strict=True):
            write_gradient(leaves, layer, direction)
        new_state = ScaleByKFACState(
            state.steps + finite.astype(jnp.int32),
            new,
            state.skipped_steps + (~finite).astype(jnp.int32),
            state.missed_updates + (due & state.pending).astype(jnp.int32),
            jnp.where(finite, wanted & ~seen, state.pending),
        )
        moved = jax.tree.unflatten(
            jax.tree.structure(updates), [leaf for leaf in leaves if leaf is not None]
        )
        return moved, new_state

    compiled = compiled_unless_traced(moved_by)
    specs = functools.partial(explicit_state_specs, spread=spread)
    tx = optax.GradientTransformationExtraArgs(init, update)
    return across_explicit_axes(tx, spread.explicit_mesh, specs)


@says_new_names(OF_KFAC)
@takes_explicit_settings
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
    warm_start: bool = False,
    factor_dtype: Any = None,
    inv_dtype: Any = None,
    loss_reduction: core_statistics.LossReduction = "mean",
    mesh: Mesh | None = None,
    axis_name: str | None = None,
    gradient_worker_fraction: float | str | None = None,
    assignment_strategy: str = "compute",
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
        check_number("learning_rate", learning_rate, at_least=0)
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
        warm_start=warm_start,
        factor_dtype=factor_dtype,
        inv_dtype=inv_dtype,
        loss_reduction=loss_reduction,
        mesh=mesh,
        axis_name=axis_name,
        gradient_worker_fraction=gradient_worker_fraction,
        assignment_strategy=assignment_strategy,
    )
    spread = spread_of(mesh, axis_name, gradient_worker_fraction, assignment_strategy)
    # A weight decay that is an array may be anything: it is traced, or changes between steps.
    decays = not isinstance(weight_decay, (int, float)) or weight_decay != 0
    covered = plan.covered()

    def is_ours(tree: Any) -> list[bool]:
        here = [leaf is not None for leaf in plan_leaves(plan, tree)]
        return [c or fallback is None for c, h in zip(covered, here, strict=True) if h]

    def is_of_fallback(tree: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), [not ours for ours in is_ours(tree)])

    rest = of_the_rest(fallback, is_of_fallback)

    def init(params: Any) -> KFACOptState:
        flat, treedef = jax.tree.flatten(params)
        mine = is_ours(params)
        moved = zip(plan_leaves(plan, params), plan.names, strict=True)
        here = [name for leaf, name in moved if leaf is not None]
        for leaf, name, ours in zip(flat, here, mine, strict=True):
            if ours and jnp.iscomplexobj(leaf):
                raise ValueError(
                    f"fallback must be given where parameters are complex, got {name} of "
                    f"{jnp.result_type(leaf)}: their gradients are conjugates in JAX"
                )
        if decays:
            decayed_weights(0.0, weight_decay_mask).init(params)
        kept = [
            jnp.zeros_like(p) if ours else optax.MaskedNode() for p, ours in zip(flat, mine, strict=True)
        ]
        return KFACOptState(
            preconditioner.init(params), jax.tree.unflatten(treedef, kept), rest.init(params)
        )

    def update(
        updates: Any, state: KFACOptState, params: Any = None, **extra: Any
    ) -> tuple[Any, KFACOptState]:
        if params is None and decays:
            raise ValueError("params must be given to update(...) when weight_decay is not 0")
        directions, inner = preconditioner.update(updates, state.preconditioner, params, **extra)
        finite = inner.skipped_steps == state.preconditioner.skipped_steps
        extra.pop("statistics", None)
        others, new_fallback = rest.update(directions, state.fallback, params, **extra)
        if decays:
            # In a step that is not finite directions are zero, and so is all that is done to momentum.
            decay = decayed_weights(jnp.where(finite, weight_decay, 0.0), weight_decay_mask)
            directions, _ = decay.update(directions, decay.init(params), params)
        rate = jnp.where(finite, _at(learning_rate, state.preconditioner.steps), 0.0)
        keep = jnp.where(finite, momentum, 1.0)
        in_dtype = functools.cache(lambda dtype: (keep.astype(dtype), -rate.astype(dtype)))
        treedef: Any = jax.tree.structure(directions)
        flat = treedef.flatten_up_to(directions)
        momenta, moved = treedef.flatten_up_to(state.momentum), treedef.flatten_up_to(others)
        for i, ours in enumerate(is_ours(directions)):
            if ours:
                kept, step = in_dtype(momenta[i].dtype)
                momenta[i] = momenta[i] * kept + flat[i].astype(kept.dtype)
                moved[i] = momenta[i] * step
            else:
                moved[i] = zero_unless(finite, moved[i])
        new_state = KFACOptState(
            inner, jax.tree.unflatten(treedef, momenta), select(finite, new_fallback, state.fallback)
        )
        return jax.tree.unflatten(treedef, moved), new_state

    specs = functools.partial(explicit_state_specs, spread=spread)
    tx = optax.GradientTransformationExtraArgs(init, update)
    return across_explicit_axes(tx, spread.explicit_mesh, specs)


def of_the_rest(fallback: Any, mask: Callable[[Any], Any]) -> optax.GradientTransformationExtraArgs:
    """`fallback`, or nothing if it is None, for the leaves that `mask` says."""
    if fallback is not None and not (hasattr(fallback, "init") and hasattr(fallback, "update")):
        raise TypeError(f"fallback must be an optax transformation or None, got {fallback!r}")
    other = optax.identity() if fallback is None else fallback
    return optax.with_extra_args_support(optax.masked(other, mask))


def plan_leaves(plan: Plan, tree: Any) -> list[Any]:
    """Leaves in the plan's order; None for masked ones, of which one node may stand for a subtree."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_masked)
    # flax's nnx hands optimizers the same tree without the boxes around its leaves.
    known = [name.removesuffix(".value") for name in plan.names]
    names: list[str] = []
    leaves: list[Any] = []
    for path, leaf in with_paths:
        name = jax.tree_util.keystr(path).removesuffix(".value")
        below = (name + "[", name + ".")
        own = [name]
        if is_masked(leaf) and treedef != plan.treedef:
            own = [x for x in known[len(names) :] if x == name or x.startswith(below)]
        names += own
        leaves += [None] * len(own) if is_masked(leaf) else [leaf]
    shapes = tuple(None if leaf is None else tuple(jnp.shape(leaf)) for leaf in leaves)
    same = treedef == plan.treedef or names == known
    if not same or any(shape not in (None, own) for shape, own in zip(shapes, plan.shapes, strict=True)):
        raise ValueError(
            f"parameters or gradients must have the plan's structure and shapes, "
            f"{dict(zip(known, plan.shapes, strict=True))}, got {list(zip(names, shapes, strict=True))}"
        )
    return leaves


def _at(value: Schedule, count: jax.Array) -> Any:
    return value(count) if callable(value) else value


def _check(name: str, value: Any) -> None:
    if name in ("factor_update_steps", "inv_update_steps"):
        if isinstance(value, np.ndarray) and not value.ndim:
            value = value.item()
        if isinstance(value, np.generic) or getattr(value, "shape", None) != ():
            check_integer(name, value, at_least=1)
    elif name == "factor_decay":
        check_number(name, value, at_least=0, below=1)
    elif name == "kl_clip" and value is not None:
        check_number(name, value, above=0)
    elif name in ("damping", "lr"):
        check_number(name, value, at_least=0)
