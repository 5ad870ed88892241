"""`value_and_grad` that also returns K-FAC's statistics, for any loss function and model library.

Behind the output of every layer's product goes an identity whose backward rule returns Σ a aᵀ, Σ g gᵀ
and the row count as cotangents of zeros that nothing else reads. JAX adds them up like any gradient:
over repeated uses of a leaf, through scan and remat, under jit and whatever sharding the gradient has.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from suite.core.checks import check_choice, check_integer, check_number
from suite.core.likelihoods import check_outputs
from suite.core.routing import Routing
from suite.jax import jaxprs
from suite.jax.explicit_axes import explicit_specs, on_automatic_axes
from suite.jax.find_layers import find_uses
from suite.jax.fisher import Fisher
from suite.jax.late_sums import add_late, late_outputs, late_probe
from suite.jax.layers import (
    Bases,
    Layer,
    LayerSums,
    Sums,
    Use,
    empty_sums,
    in_precision,
    use_gradient,
    use_sums,
    with_bias,
)
from suite.jax.plan import Plan, Require, Statistics, make_plan
from suite.jax.probes import Probe, evaluate
from suite.jax.repeats import without_repeats
from suite.jax.uses import Uses
from suite.jax.varying import cond, vary_like, varying_alike, varying_axes
from suite.jax.views import write_matrices

AllBases = dict[str, Bases]  # by layer
Terms = float | jax.Array | Callable[..., Any] | None


class value_and_grad:
    """Like `jax.value_and_grad`, with K-FAC's statistics as a third result.

        >>> vag = value_and_grad(loss_fn, has_aux=True)
        >>> plan = vag.plan(params, batch)
        >>> (loss, aux), grads, statistics = vag(params, batch)

    Layers are found by looking at the loss function's program; nothing is registered. The loss is
    differentiated by its first argument. Every call traces `loss_fn` again, so call it under `jax.jit`
    as you would `jax.value_and_grad`.

    Average both gradients and statistics over micro-batches or devices. With `fisher=None` divide
    statistics by a loss scale S, too, or by S² where the loss is a sum of its terms.

    Args:
        loss_fn: (params, *args, **kwargs) -> scalar loss, or (loss, aux) with `has_aux`.
        has_aux: whether `loss_fn` returns a pair; aux may hold anything.
        fisher: None takes the statistics of the loss's own gradients ("empirical"); `Categorical(...)`,
            `Bernoulli(...)` or `Gaussian(...)` those of the model's predictions, which `loss_fn` must
            return in aux.
        rows: 'expand' takes each position of a sequence or image for a row, 'reduce' each example (the
            leading axis of a product's input), its inputs averaged and its gradients summed.
            Eschenhagen et al. 2023 (arXiv:2311.00636).
        terms: how many terms the loss is the mean of: a number, or a function of the arguments of a call
            after params (but for `key`) that returns one, traced or not. Inside shard_map these are the
            device's own. None takes the rows of the product that runs last, with a sampled or exact
            Fisher the outputs: too many where some do not count (labels that are ignored) or are
            averaged or summed before the loss. Factors G grow with it.
        max_factor_size: a side above this gets a diagonal factor.
        plain: names of parameters, as in the routing report, to leave alone.
        require: 'all' or 'most' makes it an error if not all, or not more than half, of the parameters
            are covered.

    Raises:
        ValueError, TypeError: a bad value, a Fisher without `has_aux`.

    References: statistics see `suite.core.statistics`.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        has_aux: bool = False,
        *,
        fisher: Fisher | None = None,
        rows: str = "expand",
        terms: Terms = None,
        max_factor_size: int = 8192,
        plain: Sequence[str] = (),
        require: Require = None,
    ) -> None:
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be callable, got {loss_fn!r}")
        if fisher is not None and not isinstance(fisher, Fisher):
            raise TypeError(f"fisher must be None, Categorical, Bernoulli or Gaussian, got {fisher!r}")
        if fisher is not None and not has_aux:
            raise ValueError(
                f"fisher={type(fisher).__name__} needs the model's outputs: return (loss, aux) from "
                "loss_fn and set has_aux=True"
            )
        check_choice("rows", rows, ("expand", "reduce"))
        check_integer("max_factor_size", max_factor_size, at_least=1)
        check_choice("require", require, (None, "most", "all"))
        if isinstance(plain, str) or not isinstance(plain, Sequence | Set):
            raise TypeError(f"plain must be a sequence of names, got {plain!r}")
        if terms is not None and not callable(terms):
            _check_terms(terms, above=0)
        self._loss_fn, self._has_aux, self._fisher = loss_fn, has_aux, fisher
        self._terms = terms
        self._reduce, self._max_factor_size = rows == "reduce", max_factor_size
        self._plain, self._require = tuple(plain), require
        functools.update_wrapper(self, loss_fn, updated=())
        self._needs_key = fisher is not None and not fisher.exact
        self._has_key = self._needs_key or (fisher is not None and not _takes_key(loss_fn))
        self.__signature__ = _with_own_arguments(loss_fn, self._has_key, self._needs_key)

    def plan(self, params: Any, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes; arrays may be `jax.ShapeDtypeStruct`s.

        That of a loss with an axis name (`lax.pmean`) is made where it has one, inside of `shard_map`.

        Raises:
            ValueError: a loss function in which nothing, or less than required, would be preconditioned.
        """
        return self._plan(self._trace(params, args, self._without_key(kwargs)), params)

    def routing(self, params: Any, *args: Any, **kwargs: Any) -> Routing:
        """What happens to every parameter, and why: `plan(...).routing`."""
        return self.plan(params, *args, **kwargs).routing

    def __call__(
        self,
        params: Any,
        *args: Any,
        capture: bool | jax.Array = True,
        bases: AllBases | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Statistics | None]:
        """(value, gradients, statistics).

        Args:
            capture: False is `jax.value_and_grad` and nothing else, with None for statistics. A traced
                boolean chooses by `lax.cond`; where False, the statistics are of nothing. A Fisher's
                own passes backward are in the `cond`, too.
            bases: for EKFAC, `suite.jax.eigenbases(optimizer_state)`.
            key: with a sampled Fisher, a `jax.random` key; not handed to `loss_fn`, whose own, if it has
                one, is named otherwise (`dropout_key`). With an exact one it may be given if `loss_fn`
                takes none (nor any keyword), and decides on the signs of columns; else the outputs do,
                to the last bit.

        Raises:
            TypeError: `capture` is no boolean or scalar; a sampled Fisher has no key; `terms` no number.
            ValueError: `terms` is negative or not finite, as far as the host knows.
        """
        given = kwargs.get("key")
        if self._needs_key and given is None:
            raise TypeError(
                "a sampled Fisher needs key=, a jax.random key, in each call; or Fisher exact=True"
            )
        if self._has_key and given is not None and not _is_key(given):
            raise TypeError(f"key must be one jax.random key, got {given!r}")
        if jnp.ndim(capture) if _is_array(capture) else not isinstance(capture, (int, float)):
            raise TypeError(f"capture must be True, False or a scalar array, got {capture!r}")
        if isinstance(capture, (bool, np.bool_)):
            if not capture:
                value, grads = self.without_statistics(params, *args, **kwargs)
                return value, grads, None
            return self._captured(params, args, kwargs, bases, None)
        if isinstance(capture, Tracer) or capture:
            due = capture if isinstance(capture, Tracer) else None
            return self._captured(params, args, kwargs, bases, due)
        value, grads = self.without_statistics(params, *args, **kwargs)
        plan = self.plan(params, *args, **kwargs)
        return value, grads, plan.no_statistics(products=bases is not None)

    def without_statistics(self, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """(value, gradients): a plain `jax.value_and_grad`, for steps that update no factors."""
        kwargs = self._without_key(kwargs)
        if not self._has_aux:
            return jax.value_and_grad(self._loss_fn)(params, *args, **kwargs)
        static: list[Any] = []

        def split(params: Any) -> Any:
            loss, aux = self._loss_fn(params, *args, **kwargs)
            arrays, static[:] = _apart(aux)
            return loss, arrays

        (loss, arrays), grads = jax.value_and_grad(split, has_aux=True)(params)
        return (loss, _joined(static, arrays)), grads

    # ---- with statistics -----------------------------------------------------------------------

    def _without_key(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not self._has_key:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != "key"}

    def _captured(
        self,
        params: Any,
        args: Any,
        kwargs: dict[str, Any],
        bases: AllBases | None,
        due: jax.Array | None,  # whether there are statistics; None: there are
    ) -> tuple[Any, Any, Statistics]:
        traced = self._trace(params, args, self._without_key(kwargs))
        plan = self._plan(traced, params)
        _check_bases(bases, plan)
        leaves = jax.tree.leaves(params)
        # Inside shard_map they are summed over devices where, and only where, gradients are.
        empty = {
            layer.name: varying_alike(
                empty_sums(layer, plan.dtype(layer), bases is not None), leaves[layer.leaf]
            )
            for layer in plan.layers
        }
        sites = [(layer, use) for layer in plan.layers for use in layer.uses]
        late = late_outputs(traced.jaxpr, [*leaves, *traced.arguments], sites)
        known = bases or {}

        def measure(layer: Layer, use: Use, x: Any, gradient: jax.Array, like: Sums) -> Sums:
            return use_sums(layer, use, x, gradient, like, known.get(layer.name), self._reduce)

        def measure_if_due(layer: Layer, use: Use) -> Any:
            """`measure` on the way back, where a loop may have taken the bases apart."""

            def sums(x: Any, gradient: jax.Array, like: Sums, given: Any) -> Sums:
                own, due = given

                def measured() -> Sums:
                    return use_sums(layer, use, x, gradient, like, own, self._reduce)

                if due is None:
                    return measured()
                return cond(due, measured, lambda: like, like=(x, gradient, given))

            return sums

        def run(leaves: list[Any], slots: Any) -> Any:
            sums, outputs = slots
            inputs: dict[int, Any] = {}
            probes, own = [], {}
            for i, (layer, use) in enumerate(sites):
                if i in late:
                    probes.append(late_probe(use, functools.partial(inputs.__setitem__, i)))
                    own[i] = outputs[i]
                else:
                    probes.append(_probe(use, measure_if_due(layer, use)))
                    like = sums[layer.name].transposed if use.transposed else sums[layer.name].main
                    chosen = None if due is None else jnp.broadcast_to(due, use.lengths)
                    own[i] = (_by_loop(use, like), (_by_loop(use, known.get(layer.name)), chosen))
            return traced.run(leaves, probes, own), inputs

        def if_due(sums: Callable[[], Any], otherwise: Any, read: Any) -> Any:
            if due is None:
                return sums()
            return cond(due, sums, lambda: otherwise, like=(due, otherwise, read))

        if self._fisher is None:
            both = jax.value_and_grad(lambda *given: _loss_first(*run(*given)), (0, 1), has_aux=True)
            (loss, (arrays, inputs)), (grads, (found, gradients)) = both(leaves, (empty, late))
            if late:
                early, read = found, (inputs, gradients)
                found = if_due(lambda: add_late(early, sites, *read, measure), early, read)
        else:
            (loss, outputs), pull, (arrays, inputs) = jax.vjp(
                lambda *given: _loss_and_outputs(*run(*given)), leaves, (empty, late), has_aux=True
            )
            grads, _ = pull((jnp.ones_like(loss), jnp.zeros_like(outputs)))

            def sums_of(gradient: jax.Array) -> dict[str, LayerSums]:
                _, (found, gradients) = pull((jnp.zeros_like(loss), gradient))
                return add_late(found, sites, inputs, gradients, measure)

            key = kwargs.get("key") if self._has_key else None
            found = if_due(
                lambda: self._sampled(outputs, sums_of, empty, key),
                empty,
                (leaves, traced.arguments, outputs),
            )
        # Sums over the devices that share parameters are of all of their terms.
        apart = set[str]().union(*(varying_axes(leaves[layer.leaf]) for layer in plan.layers))
        if self._terms is not None:
            own = self._given_terms(args, kwargs)
            shared = set[str]().union(*map(varying_axes, traced.arguments)) - apart
            rows = found[plan.layers[0].name].main.rows
            terms = lax.psum(jnp.asarray(own, rows.dtype), tuple(sorted(shared)))
        elif self._fisher is None:
            terms = _terms(plan, found)
        else:
            columns = self._fisher.likelihood.columns(outputs.shape)
            devices = lax.psum(1, tuple(varying_axes(outputs) - apart))
            terms = jnp.full((), devices * (outputs.size / columns), jnp.float32)
        if due is not None:
            terms = jnp.where(due, terms, 0.0)
        value = (loss, _joined(traced.aux, arrays)) if self._has_aux else loss
        return value, jax.tree.unflatten(plan.treedef, grads), Statistics(found, terms, plan.sampled)

    def _given_terms(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """How many terms the loss has, of a call with these arguments, as `terms` says."""
        given = self._terms
        if callable(given):
            given = given(*args, **self._without_key(kwargs))
            _check_terms(given, at_least=0)
        return given

    def _sampled(self, outputs: Any, sums_of: Any, empty: Any, key: Any) -> dict[str, LayerSums]:
        """Sums of backward passes from the outputs alone: inputs and rows count once."""
        fisher = self._fisher
        assert fisher is not None
        count = fisher.passes(outputs.shape)

        def one(total: Any, index: Any) -> Any:
            given = outputs, index, key
            gradient = on_automatic_axes(fisher.gradient, *given, out=explicit_specs(outputs))
            gradient = lax.stop_gradient(gradient).astype(outputs.dtype)
            return jax.tree.map(jnp.add, total, sums_of(gradient)), None

        if count == 1:
            found, _ = one(empty, 0)
            return found
        found, _ = lax.scan(one, empty, jnp.arange(count))

        def shared_out(sums: Sums | None) -> Sums | None:
            if sums is None:
                return None
            A, G, rows, products = sums
            if not fisher.exact:
                G, products = G / count, None if products is None else products / count
            return Sums(None if A is None else A / count, G, rows / count, products)

        return {
            name: LayerSums(shared_out(s.main), shared_out(s.transposed))  # type: ignore[arg-type]
            for name, s in found.items()
        }

    def _trace(self, params: Any, args: Any, kwargs: Any) -> _Traced:
        """The program of the loss function."""
        leaves, treedef = jax.tree.flatten(params)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
            if not hasattr(leaf, "shape") and not isinstance(leaf, (int, float, complex)):
                raise TypeError(
                    f"params must be arrays, got a {type(leaf).__name__} at "
                    f"{jax.tree_util.keystr(path)}: filter it out, as by equinox.partition(model, "
                    "equinox.is_inexact_array)"
                )
        others, others_tree = jax.tree.flatten((args, kwargs))
        # Flags and other Python values stay what they are: the function may branch on them.
        is_array = [hasattr(x, "shape") and not isinstance(x, np.generic) for x in others]
        arrays = [x for x, yes in zip(others, is_array, strict=True) if yes]
        symbolic = [
            x.shape for x in (*leaves, *arrays) if not all(isinstance(n, Integral) for n in jnp.shape(x))
        ]
        if symbolic:
            raise TypeError(
                f"arguments must have sizes that are numbers, got {symbolic[0]}: layers are found by "
                "them, so that jax.export needs a program for each size"
            )
        static: list[Any] = []

        def flat(leaves: list[Any], arrays: list[Any]) -> Any:
            given = iter(arrays)
            filled = [next(given) if yes else x for x, yes in zip(others, is_array, strict=True)]
            args, kwargs = jax.tree.unflatten(others_tree, filled)
            result = self._loss_fn(jax.tree.unflatten(treedef, leaves), *args, **kwargs)
            aux: Any = ()
            if self._has_aux:
                if not (isinstance(result, tuple) and len(result) == 2):
                    raise TypeError("with has_aux=True loss_fn must return (loss, aux)")
                result, aux = result
            if getattr(result, "shape", None) != ():
                raise TypeError(f"loss_fn must return a scalar loss, got {result}")
            outputs = [] if self._fisher is None else [self._outputs(aux)]
            aux_arrays, static[:] = _apart(aux)
            return result, *outputs, *aux_arrays

        jaxpr = without_repeats(jax.make_jaxpr(flat)(leaves, arrays), [*leaves, *arrays])
        if self._fisher is not None:
            shape = jaxpr.out_avals[1].shape
            check_outputs(self._fisher.likelihood, shape, _shapes_of_data(jaxpr, arrays))
        return _Traced(jaxpr, arrays, static)

    def _outputs(self, aux: Any) -> Any:
        assert self._fisher is not None
        outputs = self._fisher.outputs(aux)
        if not _is_array(outputs) or not jnp.issubdtype(outputs.dtype, jnp.floating):
            kind = f"one of {outputs.dtype}" if _is_array(outputs) else type(outputs).__name__
            raise TypeError(
                f"outputs of {type(self._fisher).__name__} must pick an array of floats from the "
                f"auxiliary output, got {kind}"
            )
        self._fisher.likelihood.columns(outputs.shape)
        return outputs

    def _plan(self, traced: _Traced, params: Any) -> Plan:
        return self._plan_and_uses(traced, params)[0]

    def _plan_and_uses(self, traced: _Traced, params: Any) -> tuple[Plan, Uses]:
        program = jaxprs.flatten(traced.jaxpr)
        # A sampled Fisher is about the outputs: what else the loss does with parameters is no matter.
        root = program.outputs[0] if self._fisher is None else program.outputs[1]
        uses = find_uses(program, len(jax.tree.leaves(params)), [root])
        plan = make_plan(
            program,
            uses,
            params,
            max_factor_size=self._max_factor_size,
            plain=self._plain,
            sampled=self._fisher is not None,
            reduce=self._reduce,
            require=self._require,
            terms_given=self._terms is not None,
        )
        return plan, uses


def probe(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    """Say that y = x w, for products that capture cannot see into (a kernel, a sparse product).

        >>> y = probe(x, w, my_kernel(x, w))

    Other uses of `w` do not stop it from being covered then: `verify` checks that nothing is missing.

    Args:
        x: (..., d_in), activations.
        w: (d_in, d_out): a parameter, or a transpose, reshape, slice or cast of one.
        y: (..., d_out).

    Returns:
        y; use the result, not the argument.

    Raises:
        ValueError: other shapes.
    """
    if x.ndim < 1 or w.ndim != 2 or (*x.shape[:-1], w.shape[1]) != y.shape or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"probe(x, w, y) needs x (..., d_in), w (d_in, d_out) and y (..., d_out), "
            f"got {x.shape}, {w.shape} and {y.shape}"
        )
    return _marked(x, w, y)


def _mark(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    del x, w
    return y


_mark.__name__ = jaxprs.PROBE
_marked = jax.jit(_mark)


def verify(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    plain: Sequence[str] = (),
    rtol: float | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Check that what capture sees is all there is: Σ g aᵀ over the rows of each layer is its gradient.

    But for what its gradient has through a norm, deviation or mean of the weight that changes it.

    Args:
        loss_fn, has_aux, plain: as for `value_and_grad`.
        params, args, kwargs: what the loss is called with; arrays, not shapes.
        rtol: allowed error, in units of a leaf's largest gradient; but no less than √ε of the largest
            of all leaves, as some gradients are 0 up to rounding (a bias of keys before a softmax).
            None: 1e-3, or 16 ε of the coarsest type that its layer computes in, if that is more.

    Returns:
        The error of each covered leaf, in those units.

    Raises:
        ValueError: an error above `rtol`, naming the leaf; gradients that are not finite.
    """
    if rtol is not None:
        check_number("rtol", rtol, above=0)
    vag = value_and_grad(loss_fn, has_aux, plain=plain)
    traced = vag._trace(params, args, kwargs)
    plan, uses = vag._plan_and_uses(traced, params)
    # A layer without its bias's column: the bias is checked through it.
    sites = [(layer, use) for layer in plan.layers for use in layer.uses]

    epsilons: dict[int | None, float] = {}  # of the coarsest type that a leaf meets, found in tracing

    def measure(layer: Layer, use: Use) -> Any:
        def gradient_of(x: Any, gradient: jax.Array, like: jax.Array, own: None) -> jax.Array:
            given = (v.dtype for v in (*jax.tree.leaves(x), gradient))
            kinds = [kind for kind in given if jnp.issubdtype(kind, jnp.inexact)]
            coarsest = max(float(jnp.finfo(kind).eps) for kind in kinds)
            for leaf in (layer.leaf, layer.bias):
                epsilons[leaf] = max(epsilons.get(leaf, 0.0), coarsest)
            return use_gradient(layer, use, x, in_precision(gradient, like.dtype))

        return gradient_of

    def both(leaves: list[Any]) -> Any:
        probes = [_probe(use, measure(layer, use)) for layer, use in sites]
        empty = {
            layer.name: jnp.zeros((layer.groups, layer.sizes[1], layer.sizes[0]), plan.dtype(layer))
            for layer in plan.layers
        }

        def run(leaves: list[Any], sums: Any) -> Any:
            slots = {i: _by_loop(use, (sums[layer.name], None)) for i, (layer, use) in enumerate(sites)}
            return traced.run(leaves, probes, slots, [*uses.held, *uses.penalties])[0]

        return jax.grad(run, (0, 1))(leaves, empty)

    grads, found = jax.jit(both)(jax.tree.leaves(params))
    errors: dict[str, float] = {}
    sums: dict[int, Any] = {}
    for layer in plan.layers:
        matrix = found[layer.name]
        if layer.bias is not None:
            biases = sums.get(layer.bias, jnp.zeros(plan.shapes[layer.bias], matrix.dtype))
            sums[layer.bias] = with_bias(biases, layer, matrix[..., -1])
            matrix = matrix[..., :-1]
        given = sums.get(layer.leaf, jnp.zeros(plan.shapes[layer.leaf], matrix.dtype))
        sums[layer.leaf] = write_matrices(given, layer.view, matrix)
    sizes = [float(np.abs(np.asarray(g)).max(initial=0.0)) for g in grads]
    if bad := [name for name, size in zip(plan.names, sizes, strict=True) if not np.isfinite(size)]:
        raise ValueError(f"gradients must be finite to be compared, those of {', '.join(bad)} are not")
    largest = max(sizes)
    for leaf, total in sums.items():
        gradient = np.asarray(grads[leaf], np.float64)
        rounding = largest * float(jnp.finfo(plan.dtypes[leaf]).eps) ** 0.5
        scale = max(np.abs(gradient).max(initial=0.0), rounding) or 1.0
        difference = np.abs(np.asarray(total, np.float64) - gradient).max(initial=0.0)
        errors[plan.names[leaf]] = float(difference / scale)
    for leaf in sums:  # whose own gradient is rounded, too
        epsilons[leaf] = max(epsilons.get(leaf, 0.0), float(jnp.finfo(plan.dtypes[leaf]).eps))
    allowed = {plan.names[leaf]: rtol or max(1e-3, 16 * epsilons[leaf]) for leaf in sums}
    wrong = {name: error for name, error in errors.items() if not error <= allowed[name]}
    if wrong:
        listed = ", ".join(f"{name} by {error:.2g}" for name, error in wrong.items())
        raise ValueError(
            f"the statistics miss uses of these parameters, whose Σ g aᵀ differs from their gradient, "
            f"in units of its largest entry: {listed}. Name them in `plain`"
        )
    return errors


def _shapes_of_data(jaxpr: Any, arguments: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """Of arguments, and of what was closed over, for which the program is read only when asked."""
    yield from map(jnp.shape, arguments)
    yield from map(jnp.shape, jaxprs.flatten(jaxpr).known.values())


@dataclass(frozen=True)
class _Traced:
    jaxpr: Any
    arguments: list[Any]
    aux: Any  # (leaves that are no arrays, tree, which are arrays)

    def run(
        self,
        leaves: list[Any],
        probes: Sequence[Probe],
        slots: Any,
        held: Sequence[tuple[jaxprs.Path, int]] = (),
    ) -> list[Any]:
        given = [*leaves, *self.arguments]
        return evaluate(self.jaxpr.jaxpr, self.jaxpr.consts, given, probes, slots, held)


def _probe(use: Use, measure: Callable[..., Any]) -> Probe:
    @jax.custom_vjp
    def identity(y: jax.Array, x: Any, slot: Any) -> jax.Array:
        del x, slot
        return y

    def forward(y: jax.Array, x: Any, slot: Any) -> tuple[jax.Array, Any]:
        return y, (x, slot)

    def backward(kept: Any, gradient: jax.Array) -> tuple[Any, Any, Any]:
        x, (like, given) = kept
        sums = on_automatic_axes(measure, x, gradient, like, given)
        return gradient, None, (vary_like(sums, like), None)

    identity.defvjp(forward, backward)

    def apply(x: Any, y: jax.Array, slot: Any) -> jax.Array:
        return identity(y, x, varying_alike(slot, y, *jax.tree.leaves(x)))

    return Probe(use.path, use.out, use.x_operand, apply, use.scans, *use.reads)


def _by_loop(use: Use, slot: Any) -> Any:
    """(groups, ...) as (*loops that take the leaf apart, blocks of one step, ...)."""
    return jax.tree.map(lambda s: s.reshape(*use.lengths, use.groups, *s.shape[1:]), slot)


def _terms(plan: Plan, found: dict[str, LayerSums]) -> jax.Array:
    """How many terms the loss has, (), by the last product that ran."""
    terms: Any = None
    for name, terms_per_row, _ in reversed(plan.last):
        rows = jnp.mean(found[name].main.rows)
        own = rows * terms_per_row
        terms = own if terms is None else jnp.where(rows > 0, own, terms)
    return jnp.ones((), jnp.float32) if terms is None else terms


def _check_terms(terms: Any, **bounds: float) -> None:
    """TypeError or ValueError unless it is one number, within the bounds where the host knows it."""
    if not _is_array(terms):
        check_number("terms", terms, **bounds)
        return
    if terms.ndim:
        raise ValueError(f"terms must be one number, got an array of shape {terms.shape}")
    number = jnp.issubdtype(terms.dtype, jnp.integer) or jnp.issubdtype(terms.dtype, jnp.floating)
    if not number:
        raise TypeError(f"terms must be a number, got one of {terms.dtype}")
    if not isinstance(terms, Tracer) and getattr(terms, "is_fully_addressable", True):
        check_number("terms", terms.item(), **bounds)


def _loss_first(out: list[Any], inputs: Any) -> tuple[Any, Any]:
    return out[0], (out[1:], inputs)


def _loss_and_outputs(out: list[Any], inputs: Any) -> tuple[tuple[Any, Any], Any]:
    return (out[0], out[1]), (out[2:], inputs)


def _signature(loss_fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(loss_fn)
    except ValueError:  # a builtin
        return inspect.signature(lambda params, *args, **kwargs: None)


def _takes_key(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function has an argument `key` of its own."""
    theirs = _signature(loss_fn).parameters
    return "key" in theirs or any(p.kind is p.VAR_KEYWORD for p in theirs.values())


def _with_own_arguments(
    loss_fn: Callable[..., Any], has_key: bool, needs_key: bool
) -> inspect.Signature:
    """The signature of `loss_fn`, where `jax.jit` looks for static arguments, with those of a call."""
    own, theirs = inspect.signature(value_and_grad.__call__).parameters, _signature(loss_fn)
    ours = {n: p for n, p in own.items() if p.kind is p.KEYWORD_ONLY}
    if has_key:
        default = inspect.Parameter.empty if needs_key else None
        ours["key"] = inspect.Parameter("key", inspect.Parameter.KEYWORD_ONLY, default=default)
    taken = sorted(ours.keys() & theirs.parameters.keys())
    if taken:
        hint = ": key is the sampled Fisher's, call yours dropout_key" if "key" in taken else ""
        raise ValueError(
            f"loss_fn must have no argument named as one of value_and_grad's, got {taken}{hint}"
        )
    both = ours | dict(theirs.parameters)
    return theirs.replace(parameters=sorted(both.values(), key=lambda p: p.kind))


def _is_key(x: Any) -> bool:
    """Whether `jax.random` takes it as one key: typed, or as its numbers."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.ndim == 0
    return x.ndim == 1 and x.dtype == jnp.uint32


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _apart(x: Any) -> tuple[list[Any], list[Any]]:
    """The arrays in a tree, and the rest of it, without them: jax would take them for leaked tracers."""
    leaves, tree = jax.tree.flatten(x)
    is_array = [_is_array(x) for x in leaves]
    rest = [None if yes else x for x, yes in zip(leaves, is_array, strict=True)]
    return [x for x, yes in zip(leaves, is_array, strict=True) if yes], [rest, tree, is_array]


def _joined(static: Any, arrays: Sequence[Any]) -> Any:
    leaves, tree, is_array = static
    given = iter(arrays)
    filled = [next(given) if yes else x for x, yes in zip(leaves, is_array, strict=True)]
    return jax.tree.unflatten(tree, filled)


def _check_bases(bases: AllBases | None, plan: Plan) -> None:
    if bases is None:
        return
    if not isinstance(bases, dict):
        raise TypeError(f"bases must be what suite.jax.eigenbases returns, got {type(bases).__name__}")
    unknown = sorted(set(bases) - {layer.name for layer in plan.layers})
    if unknown:
        raise ValueError(f"bases do not fit the plan: unknown layers {unknown}")
