"""The factors of all layers: the four verbs on their stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from suite.core import buckets, ekfac, kronecker, moments, padding, statistics
from suite.core import kfac as core_kfac
from suite.jax.devices import whole_on_others
from suite.jax.dtypes import at_least_float32
from suite.jax.factor_layout import FactorLayout
from suite.jax.factors_state import (
    FactorsState,
    averages_of,
    inverses_of,
    with_averages,
    with_inverses,
)
from suite.jax.layers import Layer, Sums
from suite.jax.plan import Statistics
from suite.jax.varying import cond, of_any


class Factors(FactorLayout):
    """A refresh stacks factors of about one size, so that one factorization is compiled for all."""

    # ---- init ----------------------------------------------------------------------------------

    def init(self) -> FactorsState:
        """Before the first step; as one program, for each array by itself takes longer to compile."""
        return jax.jit(self._start)()

    def _start(self) -> FactorsState:
        averages, inverses = [], []
        for number, stack in enumerate(self.stacks):
            like, inverse_like = (jnp.zeros((), dtype) for dtype in self.dtypes(number))
            count = len(self.numbers(number))
            factor = self.rule.init_factor(like, (count,), stack.n, stack.diagonal, inverse_like)
            averages.append(factor.average)
            inverses.append(factor.inverse)
        products = []
        if self.keeps_products:
            for bucket in self.buckets:
                sizes, _, dtype, *_ = bucket.key
                wide = at_least_float32(self.inv_dtype or dtype)
                shape = (bucket.blocks, sizes[1], sizes[0])
                products.append((jnp.zeros(shape, wide), jnp.ones(bucket.blocks, wide)))
        return FactorsState(tuple(averages), tuple(inverses), *self.no_evidence(), tuple(products))

    def no_evidence(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Weight, ready and failures of all factors before the first step."""
        count, kind = self.first[-1], at_least_float32(*(stack.dtype for stack in self.stacks))
        return jnp.zeros(count, kind), jnp.zeros(count, bool), jnp.zeros(count, jnp.int32)

    # ---- now and then --------------------------------------------------------------------------

    def update_if(
        self, due: jax.Array, state: FactorsState, given: Statistics, factor_decay: Any
    ) -> FactorsState:
        """`update` where due, by a branch that has nothing but what `update` changes."""
        new = cond(
            due,
            lambda: averages_of(self.update(state, given, factor_decay)),
            lambda: averages_of(state),
            like=(state, given),
        )
        return with_averages(state, new)

    def refresh_if(self, due: jax.Array, state: FactorsState, damping: Any) -> FactorsState:
        """`refresh` where due, by a branch that has nothing but what `refresh` changes."""
        new = cond(
            due,
            lambda: inverses_of(self.refresh(state, damping)),
            lambda: inverses_of(state),
            like=state,
        )
        return with_inverses(state, new)

    # ---- update --------------------------------------------------------------------------------

    def require_own(self, state: FactorsState) -> None:
        """ValueError unless a state is laid out as that of `init` is."""
        if state.shares is not None:
            raise ValueError(
                "state must have all factors on every device, got one with shares: of a "
                "gradient_worker_fraction below 1"
            )
        in_bases = self.rule.compute_method in ("eigen", "ekfac")
        expected = [
            ((len(self.numbers(i)), *kronecker.factor_shape(s.n, s.diagonal, 1)), in_bases)
            for i, s in enumerate(self.stacks)
        ]
        pairs = zip(state.averages, state.inverses, strict=True)
        found = [(x.shape, isinstance(y, core_kfac.Eigen)) for x, y in pairs]
        if found != expected or bool(state.products) != (self.keeps_products and bool(self.buckets)):
            raise ValueError(
                "state must be that of init(params) with this plan and compute_method="
                f"{self.rule.compute_method!r}: its factors must have the shapes, and be in eigenbases, "
                f"as {expected}, got {found}"
            )

    def update(self, state: FactorsState, given: Statistics, factor_decay: Any) -> FactorsState:
        """Average normalized statistics in."""
        if not self.stacks:
            return state
        new, seen = self._new(given)
        kept = jnp.where(seen, factor_decay, 1.0).astype(state.weight.dtype)
        averages = [
            moments.mix(average, x, kept[self.entries(number)])
            for number, (average, x) in enumerate(zip(state.averages, new, strict=True))
        ]
        state = state._replace(
            averages=tuple(averages),
            weight=moments.mix(state.weight, jnp.ones_like(state.weight), kept),
        )
        products = list(state.products)
        for number, bucket in enumerate(self.buckets if self.keeps_products else ()):
            average, weight = products[number]
            parts, seen_parts = [], []
            for member in bucket.members:
                sums, transposed = given.layers[self.layers[member.index].name]
                blocks = slice(member.start, member.stop)
                if sums.products is None:
                    parts.append(jnp.zeros_like(average[blocks]))
                    seen_parts.append(jnp.zeros(member.stop - member.start, bool))
                else:
                    both = sums.products
                    if transposed is not None and transposed.products is not None:
                        both = both + transposed.products
                    own = self._of_the_loss(both, given.terms)
                    parts.append(
                        statistics.normalize_products(own, given.terms, self.loss_reduction).astype(
                            average.dtype
                        )
                    )
                    seen_parts.append(sums.rows > 0)
            seen = jnp.concatenate(seen_parts) & self.ready(state, bucket)
            products[number] = ekfac.update(average, weight, jnp.concatenate(parts), seen, factor_decay)
        return state._replace(products=tuple(products))

    def _new(self, given: Statistics) -> tuple[list[jax.Array], jax.Array]:
        """For each stack what was seen now, normalized, and of which factors anything was."""
        of_layer = [self._normalized(layer, given) for layer in self.layers]
        new, seen = [], []
        for number, stack in enumerate(self.stacks):
            parts = [of_layer[i][stack.side].astype(self.dtypes(number)[0]) for i in stack.layers]
            new.append(jnp.concatenate(parts))
            seen += [given.layers[self.layers[i].name].main.rows > 0 for i in stack.layers]
        return new, jnp.concatenate(seen)

    def _normalized(self, layer: Layer, given: Statistics) -> tuple[jax.Array, jax.Array]:
        sums = given.layers[layer.name]
        leader = given.layers[layer.input_of or layer.name].main.A
        assert leader is not None
        A, G = self._pair(sums.main._replace(A=leader), given.terms)
        if sums.transposed is not None:
            A, G = statistics.add_transposed(A, G, *self._pair(sums.transposed, given.terms))
        return statistics.with_unit_G(A, G) if layer.has_gradients_in_A else (A, G)

    def _pair(self, sums: Sums, terms: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert sums.A is not None
        rows = sums.rows.reshape(-1, *(1,) * (sums.A.ndim - 1))
        G = self._of_the_loss(sums.G, terms)
        raw = statistics.LayerStatistics(sums.A, G, rows)
        return statistics.normalize(raw, terms, self.loss_reduction)

    def _of_the_loss(self, x: jax.Array, terms: jax.Array) -> jax.Array:
        """Sampled gradients are of single terms: N times those of a loss that is their mean."""
        if self.plan.sampled and self.loss_reduction == "mean":
            terms = jnp.where(terms > 0, terms, 1).astype(x.dtype)
            return x / terms / terms
        return x

    # ---- refresh -------------------------------------------------------------------------------

    def refresh(self, state: FactorsState, damping: Any) -> FactorsState:
        """Recompute all inverses or eigenbases, those of one size together."""
        if not self.stacks:
            return state
        new = self._refresh_factors(state, damping)
        if not self.keeps_products:
            return new
        products = []
        for bucket, (average, weight) in zip(self.buckets, state.products, strict=True):
            restarted = ekfac.restart(self._gathered(new, bucket, 0), self._gathered(new, bucket, 1))
            ready = self.ready(new, bucket)
            products.append(
                (
                    core_kfac.where(ready, restarted[0], average),
                    core_kfac.where(ready, restarted[1], weight),
                )
            )
        return new._replace(products=tuple(products))

    def _refresh_factors(self, state: FactorsState, damping: Any) -> FactorsState:
        """Sizes that are near each other are factorized together, which is compiled once."""
        if not self.pads:
            return self._refresh_by_size(state, damping)
        classes = list(self.classes().items())
        counts = [[len(self.numbers(n)) for n in numbers] for _, numbers in classes]
        order = np.concatenate([np.asarray(self.numbers(n)) for _, numbers in classes for n in numbers])
        back, spans = np.argsort(order), list(zip(*_bounds([sum(c) for c in counts]), strict=True))
        weights = _picked(state.weight, order)
        sides = [self.stacks[n].n for _, numbers in classes for n in numbers for _ in self.numbers(n)]
        averages = [
            jnp.concatenate([_behind(state.averages[number], m) for number in numbers])
            for (m, *_), numbers in classes
        ]
        means = padding.mean_eigenvalues(averages, weights, sides)
        dampings = self._dampings(means, damping, order)
        below = self.rule.keeps_eigenbases
        found: list[Any] = []
        for average, (start, stop) in zip(averages, spans, strict=True):
            weight, own = weights[start:stop], sides[start:stop]
            if average.ndim == 3:
                average = padding.fill(average, weight, means[start:stop], own, below=below)
            found.append(self.rule.invert(average, weight, dampings[start:stop].astype(weight.dtype)))
        fine = core_kfac.all_usable(found)
        new: list[Any] = [None] * len(self.stacks)
        for inverse, (_, numbers), own in zip(found, classes, counts, strict=True):
            for number, first, last in zip(numbers, *_bounds(own), strict=True):
                new[number] = _in_front(inverse, slice(first, last), self.stacks[number].n)
        seen, computed = state.weight > 0, _picked(fine, back)
        replaces = seen & computed
        replaces &= _picked(replaces | state.ready, self.partners)
        inverses = [
            core_kfac.where(replaces[self.entries(number)], x, old)
            for number, (x, old) in enumerate(zip(new, state.inverses, strict=True))
        ]
        return state._replace(
            inverses=tuple(inverses),
            ready=state.ready | replaces,
            failures=state.failures + (seen & ~computed).astype(jnp.int32),
        )

    def _refresh_by_size(self, state: FactorsState, damping: Any) -> FactorsState:
        dampings = self._dampings(self._means(state), damping)
        inverses = list(state.inverses)
        order, ready, failures = [], [], []
        for numbers in self.sizes().values():
            entries = np.concatenate([np.asarray(self.numbers(n)) for n in numbers])
            joined = core_kfac.Factor(
                jnp.concatenate([state.averages[n] for n in numbers]),
                state.weight[entries],
                jax.tree.map(lambda *xs: jnp.concatenate(xs), *(state.inverses[n] for n in numbers)),
                state.ready[entries],
                state.failures[entries],
            )
            refreshed = self._refreshed(joined, dampings[entries].astype(joined.weight.dtype))
            counts = [len(self.numbers(n)) for n in numbers]
            for number, start, stop in zip(numbers, *_bounds(counts), strict=True):
                inverses[number] = jax.tree.map(lambda x, a=start, b=stop: x[a:b], refreshed.inverse)
            order.append(entries)
            ready.append(refreshed.ready)
            failures.append(refreshed.failures)
        back = np.argsort(np.concatenate(order))
        return state._replace(
            inverses=tuple(inverses),
            ready=jnp.concatenate(ready)[back],
            failures=jnp.concatenate(failures)[back],
        )

    def _refreshed(self, factor: core_kfac.Factor, damping: jax.Array) -> core_kfac.Factor:
        if not self.warm_start or factor.average.ndim == 2:
            return self.rule.refresh_factor(factor, damping)
        return lax.cond(
            of_any(~jnp.all(factor.ready)),  # under `vmap` all start cold if one has to
            lambda: self.rule.refresh_factor(factor, damping),
            lambda: self.rule.refresh_factor(factor, damping, warm=True),
        )

    def _dampings(self, means: jax.Array, damping: Any, order: np.ndarray | None = None) -> jax.Array:
        """What goes onto the diagonal of each factor, from the mean eigenvalues of all.

        Args:
            order: the factors' numbers, as they are in `means`, and in the result; None: 0, 1, 2, ...
        """
        if self.rule.keeps_eigenbases:
            return jnp.zeros_like(means)
        groups: dict[int, list[int]] = {}
        for i, leader in enumerate(self.leader):
            groups.setdefault(leader, []).append(i)
        alike: dict[Any, list[tuple[int, int, list[int]]]] = {}
        for leader, members in groups.items():
            numbers = [tuple(side == 1 for side in self.layers[i].sizes) for i in members]
            for b in range(self.layers[leader].groups):
                alike.setdefault(tuple(numbers), []).append((leader, b, members))
        order = np.arange(self.first[-1]) if order is None else order
        at, found, parts = np.argsort(order), [], []
        for kinds, blocks in alike.items():
            inputs = [self.number(i, 0, b) for i, b, _ in blocks]
            sides = np.asarray([[self.number(i, 1, b) for i in members] for _, b, members in blocks])
            mean_A, alone = _picked(means, at[inputs]), len(kinds) == 1
            # One A, so one π for all that share it: from the mean of their G's. No number among
            # these G's may leave its damping to an A that has to suit the others, too.
            mean_G = _picked(means, at[sides[:, 0] if alone else sides])
            mean_G = mean_G if alone else jnp.mean(mean_G, axis=1)
            for place, kind in enumerate(kinds):
                sizes = 1 if kind[0] else 2, 1 if kind[1] and alone else 2
                split = self.rule.split_damping(mean_A, mean_G, damping, sizes)
                if place == len(kinds) - 1:
                    found += inputs
                    parts.append(split[0])
                found += [int(f) for f in sides[:, place]]
                parts.append(split[1])
        return _picked(jnp.concatenate(parts), np.argsort(found)[order])

    def _means(self, state: FactorsState) -> jax.Array:
        """Mean eigenvalues of all factors."""
        return jnp.concatenate(
            [
                core_kfac.mean_eigenvalue(average, state.weight[self.entries(number)])
                for number, average in enumerate(state.averages)
            ]
        )

    # ---- directions ----------------------------------------------------------------------------

    def precondition(
        self, state: FactorsState, gradients: Sequence[jax.Array], damping: Any
    ) -> list[jax.Array]:
        """Directions of all layers, from their gradient matrices."""
        directions: list[Any] = [None] * len(self.layers)
        for number, bucket in enumerate(self.buckets):
            A, G = self._gathered(state, bucket, 0), self._gathered(state, bucket, 1)
            products = None
            if self.keeps_products:
                average, weight = state.products[number]
                products = average / weight[:, None, None]
            joined = buckets.gather(bucket, gradients)
            paired = all(self.pairs(member.index) for member in bucket.members)
            # Inverses that are identities can be applied; identical eigenbases would divide by 1 + λ.
            always = paired and not self.rule.keeps_eigenbases
            ready = None if always else self.ready(state, bucket)
            found = self.apply(bucket, A, G, ready, joined, damping, products)
            buckets.scatter(bucket, found, directions)
        return directions

    def apply(
        self,
        bucket: buckets.Bucket,
        A: Any,
        G: Any,
        ready: jax.Array | None,
        gradient: jax.Array,
        damping: Any,
        products: jax.Array | None = None,
    ) -> jax.Array:
        """Directions of layers of a bucket: G⁻¹ ∇ A⁻¹, or of what is transposed A⁻¹ ∇ᵀ G⁻¹."""
        if self.rule.keeps_eigenbases and ready is not None:
            # Eigenvalues 0 and damping 1 only turn a gradient there and back: there is less to compile
            # than for a choice between arrays.
            known = ready[:, None].astype(G.values.dtype)
            G = G._replace(values=G.values * known)
            products = None if products is None else products * known[:, :, None]
            damping = jnp.where(ready, damping, 1.0)[:, None, None]
            ready = None
        if bucket.key[3]:
            A, G, products = G, A, None if products is None else products.mT
        return self.rule.apply(A, G, ready, gradient, damping, products)

    def bases(self, state: FactorsState) -> dict[str, Any]:
        """Eigenvectors of (A, G) by layer, in which `value_and_grad` measures second moments."""
        found = {}
        for i, layer in enumerate(self.layers):
            if not layer.measures_products:
                continue
            sides = []
            for side in (0, 1):
                place = self.places[i, side]
                inverse = state.inverses[place.stack]
                assert isinstance(inverse, core_kfac.Eigen)
                vectors = inverse.vectors
                sides.append(None if vectors is None else vectors[place.start : place.stop])
            found[layer.name] = (sides[0], sides[1])
        return found

    def ready(self, state: FactorsState, bucket: buckets.Bucket) -> jax.Array:
        """Which of a bucket's layers have inverses of both sides, (blocks,)."""
        groups = [(m.index, b) for m in bucket.members for b in range(self.layers[m.index].groups)]
        A, G = (np.asarray([self.number(i, side, b) for i, b in groups]) for side in (0, 1))
        return state.ready[A] & state.ready[G]

    def _gathered(self, state: FactorsState, bucket: buckets.Bucket, side: int) -> Any:
        """Inverses of one side of a bucket's layers."""
        places = [self.places[member.index, side] for member in bucket.members]
        stack = self.stacks[places[0].stack]
        if stack.side == side and stack.layers == [member.index for member in bucket.members]:
            return state.inverses[places[0].stack]
        parts = [
            jax.tree.map(lambda x, p=place: x[p.start : p.stop], state.inverses[place.stack])
            for place in places
        ]
        return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def _behind(average: jax.Array, side: int) -> jax.Array:
    """Zeros behind a stack of factors."""
    missing = side - average.shape[-1]
    if not missing:
        return average
    return lax.pad(
        average, jnp.zeros((), average.dtype), ((0, 0, 0), *((0, missing, 0),) * (average.ndim - 1))
    )


def _in_front(inverse: Any, own: slice, side: int) -> Any:
    """What is not padding, of some of a stack; in an eigenbasis padding comes first."""
    if isinstance(inverse, core_kfac.Eigen):
        values = inverse.values[own, inverse.values.shape[-1] - side :]
        if inverse.vectors is None:
            return core_kfac.Eigen(None, values)
        padded = inverse.vectors.shape[-1] - side
        return core_kfac.Eigen(inverse.vectors[own, :side, padded:], values)
    return inverse[own, :side] if inverse.ndim == 2 else inverse[own, :side, :side]


def _picked(x: jax.Array, at: Any) -> jax.Array:
    """x[at], for places that are known: indexing would be six operations, for negative ones."""
    return lax.gather(
        whole_on_others(x),
        np.asarray(at, np.int32)[..., None],
        lax.GatherDimensionNumbers((), (0,), (0,)),
        (1,),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _bounds(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where stacks of so many begin and end, one behind the other."""
    stops = np.cumsum(counts).tolist()
    return [stop - count for stop, count in zip(stops, counts, strict=True)], stops
