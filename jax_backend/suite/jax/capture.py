"""`value_and_grad` that also returns K-FAC's statistics, for any loss function and model library.

Behind the output of every layer's product goes an identity whose backward rule returns Σ a aᵀ, Σ g gᵀ
and the row count as cotangents of zeros that nothing else reads. JAX adds them up like any gradient:
over repeated uses of a leaf, through remat, under jit and whatever sharding the user's gradient has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from suite.core.checks import check_integer
from suite.core.routing import Route, Routing, describe_factors
from suite.core.statistics import LayerStatistics
from suite.jax import jaxprs
from suite.jax.layers import Layer, block_shape, empty_statistics, layer_statistics

Statistics = dict[str, LayerStatistics]


@dataclass(frozen=True)
class Plan:
    """What K-FAC covers of a loss function's parameters. `print(plan)` is the routing report."""

    layers: tuple[Layer, ...]
    last: str  # the covered layer whose product comes last
    terms_per_row: float  # of that layer: the loss has as many terms as the very last product has rows
    names: tuple[str, ...]  # of all parameter leaves, in order
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    treedef: Any
    routing: Routing
    sites: tuple[tuple[jaxprs.Path, int, int], ...]  # (path, operand of x, place in `layers`)

    def __str__(self) -> str:
        return str(self.routing)

    def covered(self) -> list[bool]:
        """For each parameter leaf, whether K-FAC preconditions it."""
        leaves = {leaf for layer in self.layers for leaf in (layer.spec.leaf, layer.bias)}
        return [place in leaves for place in range(len(self.names))]


class value_and_grad:
    """Like `jax.value_and_grad`, with K-FAC's statistics as a third result.

        >>> vag = value_and_grad(loss_fn, has_aux=True)
        >>> plan = vag.plan(params, batch)
        >>> (loss, aux), grads, statistics = vag(params, batch)

    Dense layers (any dot_general with one parameter) and convolutions are found by looking at the loss
    function's program; nothing is registered. The loss is differentiated by its first argument. Every
    call traces `loss_fn` again, so call it under `jax.jit` as you would `jax.value_and_grad`.

    Whatever is done to gradients must be done to statistics: average both over micro-batches or devices.

    Args:
        loss_fn: (params, *args, **kwargs) -> scalar loss, or (loss, aux) with `has_aux`.
        has_aux: whether `loss_fn` returns a pair.
        max_factor_size: a side above this gets a diagonal factor.

    References: statistics see `suite.core.statistics`.
    """

    def __init__(
        self, loss_fn: Callable[..., Any], has_aux: bool = False, *, max_factor_size: int = 8192
    ) -> None:
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be callable, got {loss_fn!r}")
        check_integer("max_factor_size", max_factor_size, at_least=1)
        self._loss_fn = loss_fn
        self._has_aux = has_aux
        self._max_factor_size = max_factor_size
        functools.update_wrapper(self, loss_fn, updated=())

    def plan(self, params: Any, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes; arrays may be `jax.ShapeDtypeStruct`s.

        Raises:
            ValueError: a loss function in which nothing would be preconditioned.
        """
        return self._trace(params, args, kwargs).plan

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Statistics]:
        """(value, gradients, statistics by layer name)."""
        traced = self._trace(params, args, kwargs)
        plan = traced.plan
        statistic_dtypes = [_statistics_dtype(plan, layer) for layer in plan.layers]
        slots = [empty_statistics(*pair) for pair in zip(plan.layers, statistic_dtypes, strict=True)]

        def probed(leaves: list[Any], slots: list[LayerStatistics]) -> Any:
            probes = {
                path: (x_operand, _probe(plan.layers[i], slots[i], statistic_dtypes[i]))
                for path, x_operand, i in plan.sites
            }
            flat = jaxprs.evaluate(
                traced.jaxpr.jaxpr, traced.jaxpr.consts, [*leaves, *traced.arguments], probes
            )
            out = jax.tree.unflatten(traced.out_tree, flat)
            return out if self._has_aux else (out, None)

        gradient = jax.value_and_grad(probed, argnums=(0, 1), has_aux=True)
        (loss, aux), (grads, sums) = gradient(jax.tree.leaves(params), slots)
        grads = jax.tree.unflatten(plan.treedef, grads)
        statistics = {layer.name: s for layer, s in zip(plan.layers, sums, strict=True)}
        return ((loss, aux) if self._has_aux else loss), grads, statistics

    def _trace(self, params: Any, args: Any, kwargs: Any) -> _Traced:
        """The program of the loss function, and the plan that follows from it."""
        leaves, treedef = jax.tree.flatten(params)
        others, others_tree = jax.tree.flatten((args, kwargs))
        # Flags and other Python values stay what they are: the function may branch on them.
        is_array = [hasattr(x, "shape") and not isinstance(x, np.generic) for x in others]
        arrays = [x for x, yes in zip(others, is_array, strict=True) if yes]

        def flat(leaves: list[Any], arrays: list[Any]) -> Any:
            given = iter(arrays)
            filled = [next(given) if yes else x for x, yes in zip(others, is_array, strict=True)]
            args, kwargs = jax.tree.unflatten(others_tree, filled)
            return self._loss_fn(jax.tree.unflatten(treedef, leaves), *args, **kwargs)

        jaxpr, out_shape = jax.make_jaxpr(flat, return_shape=True)(leaves, arrays)
        out_tree = jax.tree.structure(out_shape)
        if self._has_aux and not (isinstance(out_shape, tuple) and len(out_shape) == 2):
            raise TypeError("with has_aux=True loss_fn must return (loss, aux)")
        loss = out_shape[0] if self._has_aux else out_shape
        if getattr(loss, "shape", None) != ():
            raise TypeError(f"loss_fn must return a scalar loss, got {loss}")
        uses = jaxprs.find_uses(jaxpr.jaxpr, len(leaves))
        plan = _plan(uses, params, self._max_factor_size)
        return _Traced(jaxpr, out_tree, arrays, plan)


@dataclass(frozen=True)
class _Traced:
    jaxpr: Any
    out_tree: Any
    arguments: list[Any]
    plan: Plan


def _statistics_dtype(plan: Plan, layer: Layer) -> Any:
    return jnp.promote_types(plan.dtypes[layer.spec.leaf], jnp.float32)


def _probe(
    layer: Layer, slots: LayerStatistics, dtype: Any
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    @jax.custom_vjp
    def identity(y: jax.Array, x: jax.Array, slots: LayerStatistics) -> jax.Array:
        del x, slots
        return y

    def forward(y: jax.Array, x: jax.Array, slots: LayerStatistics) -> tuple[jax.Array, jax.Array]:
        del slots
        return y, x

    def backward(x: jax.Array, gradient: jax.Array) -> tuple[Any, Any, Any]:
        sums = LayerStatistics(*layer_statistics(x, gradient, layer, dtype))
        return gradient, jnp.zeros_like(x), sums

    identity.defvjp(forward, backward)
    return lambda x, y: identity(y, jax.lax.stop_gradient(x), slots)


def _plan(uses: jaxprs.Uses, params: Any, max_factor_size: int) -> Plan:
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = tuple(jax.tree_util.keystr(path) or "params" for path, _ in with_paths)
    leaves = [leaf for _, leaf in with_paths]
    shapes = tuple(tuple(np.shape(leaf)) for leaf in leaves)
    dtypes = tuple(jnp.result_type(leaf) for leaf in leaves)

    sites_of: dict[int, list[jaxprs.Site]] = {}
    for site in uses.sites:
        sites_of.setdefault(site.spec.leaf, []).append(site)
    reasons = {
        leaf: _why_not(leaf, sites_of.get(leaf, []), uses, dtypes[leaf]) for leaf in range(len(leaves))
    }
    bias_of = _biases(uses, sites_of, reasons)

    layers: list[Layer] = []
    for leaf, sites in sites_of.items():
        if reasons[leaf]:
            continue
        spec, bias = sites[0].spec, bias_of.get(leaf)
        groups, d_out, d_in = block_shape(spec)
        sizes = (d_in + (bias is not None), d_out)
        diagonal = (sizes[0] > max_factor_size, sizes[1] > max_factor_size)
        layers.append(Layer(names[leaf], spec, bias, groups, sizes, diagonal))
    layers.sort(key=lambda layer: layer.spec.leaf)
    place = {layer.spec.leaf: i for i, layer in enumerate(layers)}
    covered = [site for site in uses.sites if site.spec.leaf in place]
    routing = Routing(tuple(_route(leaf, names, shapes, layers, reasons) for leaf in range(len(leaves))))
    routing.require_preconditioned("K-FAC")
    return Plan(
        layers=tuple(layers),
        last=names[covered[-1].spec.leaf],
        terms_per_row=_rows(uses, uses.sites[-1]) / _rows(uses, covered[-1]),
        names=names,
        shapes=shapes,
        dtypes=dtypes,
        treedef=treedef,
        routing=routing,
        sites=tuple((site.path, site.x_operand, place[site.spec.leaf]) for site in covered),
    )


def _rows(uses: jaxprs.Uses, site: jaxprs.Site) -> int:
    """Rows that the site's leaf multiplies, in all its products."""
    return sum(other.rows for other in uses.sites if other.spec.leaf == site.spec.leaf)


def _why_not(leaf: int, sites: list[jaxprs.Site], uses: jaxprs.Uses, dtype: Any) -> str:
    """Why a leaf is not the weight of a layer; '' if it is."""
    if leaf in uses.others:
        kinds = ", ".join(dict.fromkeys(uses.others[leaf]))
        return f"used by {kinds}" if not sites else f"a layer's weight, but also used by {kinds}"
    if leaf in uses.biases:
        return "added to a layer that is not covered with it" if not sites else "both weight and bias"
    if not sites:
        return "not used"
    if any(site.spec != sites[0].spec for site in sites):
        return "used by several layers in different orientations"
    if not jnp.issubdtype(dtype, jnp.floating):
        return f"{dtype} parameters are not covered"
    return ""


def _biases(
    uses: jaxprs.Uses, sites_of: dict[int, list[jaxprs.Site]], reasons: dict[int, str]
) -> dict[int, int]:
    """weight leaf -> bias leaf, where the bias follows every use of the weight and nothing else."""
    weight_at = {site.path: leaf for leaf, sites in sites_of.items() for site in sites}
    found: dict[int, int] = {}
    for bias, bias_uses in uses.biases.items():
        weights = {weight_at[use.path] for use in bias_uses}
        weight = next(iter(weights))
        everywhere = {use.path for use in bias_uses} == {s.path for s in sites_of[weight]}
        elsewhere = bias in uses.others or bias in sites_of
        if len(weights) == 1 and everywhere and not elsewhere and not reasons[weight]:
            found[weight] = bias
    return found


def _route(
    leaf: int,
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    layers: list[Layer],
    reasons: dict[int, str],
) -> Route:
    for layer in layers:
        if leaf in (layer.spec.leaf, layer.bias):
            factors = describe_factors(layer.sizes, layer.diagonal)
            if layer.groups > 1:
                factors = f"{layer.groups} x ({factors})"
            kind = type(layer.spec.product).__name__.lower()
            role = f"weight of a {kind} layer" if leaf == layer.spec.leaf else f"bias of {layer.name}"
            return Route(names[leaf], shapes[leaf], "kfac", factors, role)
    return Route(names[leaf], shapes[leaf], "plain", "", reasons[leaf])
