"""The front door of PSGD Kron for JAX: optax transformations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from suite.core import blocks
from suite.core import kron as core_kron
from suite.core.checks import check_choice, check_flag, check_integer, check_number, check_wide
from suite.core.renamed import OF_KRON, says_new_names
from suite.core.routing import Route, Routing
from suite.core.schedules import precond_lr_schedule, precond_update_prob_schedule
from suite.core.step_size import Clip, check_clip
from suite.jax import kron_blocks, kron_engine
from suite.jax.at_once import compiled_unless_traced
from suite.jax.boxes import rebox, unbox
from suite.jax.dtypes import check_dtype, check_precision
from suite.jax.explicit_axes import (
    across_explicit_axes,
    explicit_specs,
    on_automatic_axes,
    takes_explicit_settings,
)
from suite.jax.finite import zero_unless
from suite.jax.kron_engine import ScaleByKronState, Schedule, Settings, at
from suite.jax.masks import decayed_weights, is_masked, like
from suite.jax.sharding import layout_of, specs_like

# Defaults are numpy integers because optax.inject_hyperparams makes traced arrays of Python's, and block
# shapes cannot depend on those.
Integer = int | np.integer


class KronOptState(NamedTuple):
    """State of `kron`, `lra` and `dense_newton`."""

    preconditioner: Any  # ScaleByKronState, or ScaleByVectorState
    rest: Any  # weight decay

    @property
    def skipped_steps(self) -> jax.Array:
        return self.preconditioner.skipped_steps


@says_new_names(OF_KRON)
@takes_explicit_settings
def scale_by_kron(
    b1: float = 0.9,
    preconditioner_update_probability: Schedule | None = None,
    max_size_triangular: Integer = np.int64(8192),
    min_ndim_triangular: Integer = np.int64(2),
    memory_save_mode: blocks.MemorySaveMode | None = None,
    preconditioner_lr: Schedule | None = None,
    preconditioner_init_scale: float | None = 1.0,
    mu_dtype: Any = None,
    precond_dtype: Any = None,
    precond_update_precision: str | None = "tensorfloat32",
    precond_grads_precision: str | None = None,
    scanned_layers: Any = None,
    lax_map_scanned_layers: bool = False,
    lax_map_batch_size: Integer = np.int64(8),
    merge_small_dims: bool = True,
    target_merged_dim_size: Integer = np.int64(4096),
    partition_grads_into_blocks: bool = True,
    block_size: Integer = np.int64(128),
    params_partition_specs: Any = None,
    preconditioner_partition_spec: Any = None,
    *,
    geometry: core_kron.Geometry = "Q0.5EQ1.5",
    betaL: float = 0.9,
    damping: float = 1e-9,
    max_skew: float | None = None,
    shared_factors: bool = True,
    whiten: Literal["momentum", "gradient"] = "momentum",
    update_first: bool = True,
    clip: Clip = 1.1,
    normalize_grads: bool = False,
    stochastic_rounding: bool = False,
    hvp_method: Literal["exact", "finite_difference"] = "exact",
    seed: Integer = np.int64(0),
) -> optax.GradientTransformationExtraArgs:
    """Momentum, whitened by a Kronecker-factored preconditioner fitted on the fly, for chains.

    A step with a gradient that is not finite, or in single precision above about 4e25 (an entry, or a
    row's sum), changes no momentum and no factor, returns zeros and is counted in `skipped_steps`.

    `update` takes two more arguments, either of which makes it Kron Newton, P fitted to |H|⁻¹:
    `value_fn`, the loss as a function of the parameters, which is differentiated twice when the factors
    are due; or `vector` and `hvp`, a pair (v, H v) like the parameters with v white, in every step.

    Args:
        b1: decay of the momentum, in [0, 1).
        preconditioner_update_probability: how often factors are updated, a number in (0, 1] or a
            function of the step; spread evenly, not drawn. Default: `precond_update_prob_schedule()`.
        max_size_triangular, min_ndim_triangular, memory_save_mode, merge_small_dims,
        target_merged_dim_size, partition_grads_into_blocks, block_size, max_skew, shared_factors: which
            factors a parameter gets, see `suite.core.blocks.Structure`.
        preconditioner_lr: step size of the factors' updates, in (0, 1), a number or a function of how
            many there have been. Default: `precond_lr_schedule()`.
        preconditioner_init_scale: factors start as the identity times (their share of) this; None
            sets it from each block's first gradient.
        mu_dtype: dtype of the momentum; default: the parameter's, float32 for float16.
        precond_dtype: dtype of the factors; default: the parameter's, at least float32.
        precond_update_precision, precond_grads_precision: `jax.default_matmul_precision` of the
            factors' updates and of preconditioning.
        scanned_layers: a pytree of booleans like the parameters; True where axis 0 stacks layers.
        lax_map_scanned_layers, lax_map_batch_size: serve so many blocks of a stack at a time, which
            bounds the memory of a step.
        params_partition_specs: a pytree of PartitionSpecs like the parameters, kept by the momentum and
            the directions.
        preconditioner_partition_spec: blocks are divided over the mesh axes that it names; default:
            those of the parameters. Needs a mesh around (`jax.set_mesh(mesh)`) or sharded arrays.
        geometry, betaL, damping: how factors are fitted, see `suite.core.kron.Kron`.
        whiten: what factors are fitted to, 'momentum' or 'gradient'; what they precondition is always
            the momentum, in pure noise smaller than the gradient by √((1 - b1) / (1 + b1)).
        update_first: whether the factors' update comes before the step that is due, or after it.
        clip: the largest root mean square of a preconditioned block, or (that, the largest entry); None:
            unbounded. A whitened block's is 1.
        normalize_grads: divide each parameter's gradient by its norm first.
        stochastic_rounding: of a momentum or factors in half precision, whose small updates rounding to
            nearest would lose.
        hvp_method: how `value_fn` is used, 'exact' or 'finite_difference'.
        seed: of the noise that the fit uses; the same seed gives the same run, also in torch.

    Raises:
        ValueError, TypeError: a bad value; in `init` parameters that are no real floats; in `update`
            half a pair, one of other shapes, or `value_fn` without `params`.

    References: see `suite.core.kron`. Argument names are distributed_kron's.
    """
    check_number("b1", b1, at_least=0, below=1)
    if preconditioner_update_probability is None:
        preconditioner_update_probability = precond_update_prob_schedule()
    elif not callable(preconditioner_update_probability):
        name = "preconditioner_update_probability"
        check_number(name, preconditioner_update_probability, above=0, at_most=1)
    if preconditioner_lr is None:
        preconditioner_lr = precond_lr_schedule()
    elif not callable(preconditioner_lr):
        check_number("preconditioner_lr", preconditioner_lr, above=0, below=1)
    check_choice("whiten", whiten, ("momentum", "gradient"))
    check_choice("hvp_method", hvp_method, ("exact", "finite_difference"))
    check_clip(clip)
    flags = {"update_first": update_first, "normalize_grads": normalize_grads}
    flags |= {
        "stochastic_rounding": stochastic_rounding,
        "lax_map_scanned_layers": lax_map_scanned_layers,
    }
    for name, flag in flags.items():
        check_flag(name, flag)
    structure = blocks.Structure(
        integer("max_size_triangular", max_size_triangular, 0),
        integer("min_ndim_triangular", min_ndim_triangular, 0),
        memory_save_mode,
        merge_small_dims,
        integer("target_merged_dim_size", target_merged_dim_size, 1),
        partition_grads_into_blocks,
        integer("block_size", block_size, 1),
        _static("max_skew", max_skew),
        shared_factors,
    )
    for name, dtype in {"mu_dtype": mu_dtype, "precond_dtype": precond_dtype}.items():
        check_dtype(name, dtype)
        if dtype is not None:
            check_wide(name, jnp.dtype(dtype).name, float(jnp.finfo(dtype).max))
    check_precision("precond_update_precision", precond_update_precision)
    check_precision("precond_grads_precision", precond_grads_precision)
    batch_size = integer("lax_map_batch_size", lax_map_batch_size, 1)
    settings = Settings(
        core_kron.Kron(geometry, betaL, damping, preconditioner_init_scale),
        structure,
        b1,
        preconditioner_update_probability,
        preconditioner_lr,
        mu_dtype,
        precond_dtype,
        precond_update_precision,
        precond_grads_precision,
        scanned_layers,
        batch_size if lax_map_scanned_layers else None,
        params_partition_specs,
        layout_of(params_partition_specs, preconditioner_partition_spec),
        whiten,
        update_first,
        clip,
        normalize_grads,
        stochastic_rounding,
        hvp_method,
        integer("seed", seed, 0),
    )

    compiled = compiled_unless_traced(functools.partial(kron_engine.update, settings, value_fn=None))

    def init(params: Any) -> ScaleByKronState:
        params = unbox(params)
        whole: Any = PartitionSpec()
        specs = settings.params_partition_specs
        of_mu = explicit_specs(params) if specs is None else specs_like(params, specs)
        buckets: Any = settings.layout.spec
        out = ScaleByKronState(whole, whole, whole, of_mu, whole, buckets, whole)
        scale = settings.rule.preconditioner_init_scale
        if not isinstance(scale, jax.Array):
            return on_automatic_axes(functools.partial(kron_engine.init, settings), params, out=out)

        def start(params: Any, scale: jax.Array) -> ScaleByKronState:
            rule = replace(settings.rule, preconditioner_init_scale=scale)
            return kron_engine.init(replace(settings, rule=rule), params)

        return on_automatic_axes(start, params, scale, out=out)

    def update(
        updates: Any,
        state: ScaleByKronState,
        params: Any = None,
        *,
        value_fn: Callable[[Any], jax.Array] | None = None,
        vector: Any = None,
        hvp: Any = None,
        **extra: Any,
    ) -> tuple[Any, ScaleByKronState]:
        del extra
        if (vector is None) != (hvp is None):
            raise ValueError("vector and hvp must be given together")
        if value_fn is not None and params is None:
            raise ValueError("params must be given to update(...) with value_fn")
        if value_fn is not None and any(map(is_masked, jax.tree.leaves(params, is_leaf=is_masked))):
            raise ValueError(
                "value_fn must be None under optax.masked and optax.partition, which hide parameters "
                "that it needs: give vector and hvp"
            )
        plain = jax.tree.map(jnp.asarray, unbox(updates))
        pair = None if vector is None else (like(plain, unbox(vector)), like(plain, unbox(hvp)))
        chosen = kron_engine.schedules(settings, state)
        if value_fn is None:
            moved, state = compiled(plain, state, None, pair, chosen=chosen)
            return rebox(moved, updates), state

        def loss(values: Any) -> jax.Array:  # which may want its parameters in their boxes
            return value_fn(rebox(values, params))

        values = jax.tree.map(jnp.asarray, unbox(params))
        moved, state = kron_engine.update(settings, plain, state, values, pair, loss, chosen)
        return rebox(moved, updates), state

    return across_explicit_axes(optax.GradientTransformationExtraArgs(init, update))


@says_new_names(OF_KRON)
@takes_explicit_settings
def kron(
    learning_rate: Schedule = 0.0003,
    b1: float = 0.9,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    preconditioner_update_probability: Schedule | None = None,
    max_size_triangular: Integer = np.int64(8192),
    min_ndim_triangular: Integer = np.int64(2),
    memory_save_mode: blocks.MemorySaveMode | None = None,
    preconditioner_lr: Schedule | None = None,
    preconditioner_init_scale: float | None = 1.0,
    mu_dtype: Any = None,
    precond_dtype: Any = None,
    precond_update_precision: str | None = "tensorfloat32",
    precond_grads_precision: str | None = None,
    scanned_layers: Any = None,
    lax_map_scanned_layers: bool = False,
    lax_map_batch_size: Integer = np.int64(8),
    merge_small_dims: bool = True,
    target_merged_dim_size: Integer = np.int64(4096),
    partition_grads_into_blocks: bool = True,
    block_size: Integer = np.int64(128),
    params_partition_specs: Any = None,
    preconditioner_partition_spec: Any = None,
    *,
    geometry: core_kron.Geometry = "Q0.5EQ1.5",
    betaL: float = 0.9,
    damping: float = 1e-9,
    max_skew: float | None = None,
    shared_factors: bool = True,
    whiten: Literal["momentum", "gradient"] = "momentum",
    update_first: bool = True,
    clip: Clip = 1.1,
    normalize_grads: bool = False,
    stochastic_rounding: bool = False,
    hvp_method: Literal["exact", "finite_difference"] = "exact",
    seed: Integer = np.int64(0),
) -> optax.GradientTransformationExtraArgs:
    """PSGD Kron: `scale_by_kron`, decoupled weight decay, learning rate.

        >>> tx = kron(learning_rate=3e-4)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(grads, state, params)

    A step that `scale_by_kron` skips changes nothing but `state.skipped_steps`.

    Args:
        learning_rate: a number, 0-d array or function of the step count.
        weight_decay, weight_decay_mask: as in `optax.add_decayed_weights`.

    All others are `scale_by_kron`'s.
    """
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
        lax_map_scanned_layers,
        lax_map_batch_size,
        merge_small_dims,
        target_merged_dim_size,
        partition_grads_into_blocks,
        block_size,
        params_partition_specs,
        preconditioner_partition_spec,
        geometry=geometry,
        betaL=betaL,
        damping=damping,
        max_skew=max_skew,
        shared_factors=shared_factors,
        whiten=whiten,
        update_first=update_first,
        clip=clip,
        normalize_grads=normalize_grads,
        stochastic_rounding=stochastic_rounding,
        hvp_method=hvp_method,
        seed=seed,
    )
    return with_learning_rate(preconditioner, learning_rate, weight_decay, weight_decay_mask)


def with_learning_rate(
    preconditioner: optax.GradientTransformationExtraArgs,
    learning_rate: Schedule,
    weight_decay: float,
    weight_decay_mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """Decoupled weight decay and a learning rate behind a preconditioner; a skipped step has neither."""
    if not callable(learning_rate):
        check_number("learning_rate", learning_rate, at_least=0)
    check_number("weight_decay", weight_decay, at_least=0)
    decays = not isinstance(weight_decay, (int, float)) or weight_decay != 0
    decay = decayed_weights(weight_decay, weight_decay_mask) if decays else optax.identity()

    def init(params: Any) -> KronOptState:
        return KronOptState(preconditioner.init(params), decay.init(unbox(params)))

    def update(
        updates: Any, state: KronOptState, params: Any = None, **extra: Any
    ) -> tuple[Any, KronOptState]:
        if params is None and decays:
            raise ValueError("params must be given to update(...) when weight_decay is not 0")
        whitened, inner = preconditioner.update(updates, state.preconditioner, params, **extra)
        decayed, rest = decay.update(unbox(whitened), state.rest, unbox(params))
        rate = at(learning_rate, state.preconditioner.steps)
        dtypes = {d.dtype for d in jax.tree.leaves(decayed)}
        rates = {dtype: -jnp.asarray(rate, dtype) for dtype in dtypes}
        moved = jax.tree.map(lambda d: rates[d.dtype] * d, decayed)
        if decays:  # else a skipped step's directions are zeros already
            finite = inner.skipped_steps == state.preconditioner.skipped_steps
            moved = zero_unless(finite, moved)
        return rebox(moved, updates), KronOptState(inner, rest)

    return across_explicit_axes(optax.GradientTransformationExtraArgs(init, update))


def get_opt_state_partition_specs(params: Any, scale_by_kron_only: bool = False, **kwargs: Any) -> Any:
    """The PartitionSpecs of the state of `kron`, or of `scale_by_kron`, as a pytree like it.

        >>> specs = get_opt_state_partition_specs(params, preconditioner_partition_spec=P("fsdp"))
        >>> shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    Args:
        params: arrays, `jax.ShapeDtypeStruct`s or boxes of these; nothing is computed.
        scale_by_kron_only: of `scale_by_kron`'s state, in place of `kron`'s.
        kwargs: what `kron` or `scale_by_kron` is called with.

    Raises:
        ValueError, TypeError: as those do.
    """
    check_flag("scale_by_kron_only", scale_by_kron_only)
    specs = kwargs.pop("params_partition_specs", None)
    layout = layout_of(specs, kwargs.pop("preconditioner_partition_spec", None))
    factory: Callable[..., Any] = kron
    if scale_by_kron_only:
        factory = scale_by_kron
        known = (
            inspect.signature(kron).parameters.keys()
            - inspect.signature(scale_by_kron).parameters.keys()
        )
        kwargs = {name: value for name, value in kwargs.items() if name not in known}
    shapes = jax.eval_shape(factory(**kwargs).init, unbox(params))
    inner = shapes if scale_by_kron_only else shapes.preconditioner
    whole = jax.tree.map(lambda _: PartitionSpec(), inner)
    mu = whole.mu if specs is None else specs_like(inner.mu, specs)
    own = whole._replace(mu=mu, buckets=jax.tree.map(lambda _: layout.spec, inner.buckets))
    return (
        own
        if scale_by_kron_only
        else KronOptState(own, jax.tree.map(lambda _: PartitionSpec(), shapes.rest))
    )


def routing(params: Any, scanned_layers: Any = None, **structure: Any) -> Routing:
    """What `kron` gives every leaf of `params` and why; prints as a table.

    Args:
        params: arrays or `jax.ShapeDtypeStruct`s.
        scanned_layers: as in `scale_by_kron`.
        structure: of `suite.core.blocks.Structure`.

    Raises:
        ValueError, TypeError: a bad value, parameters that are no real floats.
    """
    params = unbox(params)
    static = kron_blocks.plan(
        params, blocks.Structure(**structure), scanned_layers, 0, lambda dtype: dtype
    )
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    routes = []
    for (path, leaf), plan in zip(paths, static.plans, strict=True):
        name, shape = jax.tree_util.keystr(path) or "params", tuple(leaf.shape)
        if plan is None:
            routes.append(Route(name, shape, "plain", "", "empty"))
            continue
        routes.append(Route(name, shape, "kron", plan.describe_factors(), plan.describe()))
    return Routing(tuple(routes))


def integer(name: str, value: Any, at_least: int) -> int:
    """A setting that has to be known when a step is traced."""
    check_integer(name, _static(name, value), at_least=at_least)
    return int(value)


def _static(name: str, value: Any) -> Any:
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} decides on the program and cannot be an array: name it in the static_args of "
            "optax.inject_hyperparams"
        )
    return value
