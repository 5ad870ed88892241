"""The factors of all layers: where they are, and the four verbs on their stacks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from suite.core import buckets, ekfac, linalg, moments, padding, statistics
from suite.core import kfac as core_kfac
from suite.jax.factors_state import (
    FactorsState,
    averages_of,
    inverses_of,
    with_averages,
    with_inverses,
)
from suite.jax.layers import Layer, LayerSums, Sums
from suite.jax.plan import Plan, Statistics
from suite.jax.spread import Spread

# Above this side a stack of layers costs a copy of every gradient and saves nothing.
_STACKED_UP_TO = 128


class Stack(NamedTuple):
    """Factors of one size."""

    n: int
    diagonal: bool
    dtype: Any  # of the parameters
    layers: list[int]
    side: int  # 0 for A and 1 for G


class _Place(NamedTuple):
    """Where a layer's factor is."""

    stack: int
    start: int
    stop: int


class Factors:
    """What is static about the factors of the layers whose parameters are present.

    Layers of equal sizes are stacked; a refresh stacks all factors of one side, so that each size's
    factorization is compiled once. Layers may share an A.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[Layer],
        rule: core_kfac.KFAC,
        *,
        factor_dtype: Any,
        inv_dtype: Any,
        warm_start: bool,
        loss_reduction: statistics.LossReduction,
        spread: Spread,
    ) -> None:
        self.plan, self.layers, self.rule = plan, list(layers), rule
        self.factor_dtype, self.inv_dtype = factor_dtype, inv_dtype
        self.warm_start, self.spread = warm_start, spread
        self.loss_reduction: statistics.LossReduction = loss_reduction
        self.keeps_products = rule.compute_method == "ekfac"
        keys = []
        for i, layer in enumerate(self.layers):
            alone = i if max(layer.sizes) > _STACKED_UP_TO else None
            kind = layer.sizes, layer.diagonal, plan.dtypes[layer.leaf], layer.input_first
            keys.append(((*kind, alone), layer.groups))
        self.buckets = buckets.plan_buckets(keys)
        at = {layer.name: i for i, layer in enumerate(self.layers)}
        # A layer whose leader is not here leads itself; its statistics then come from the leader's.
        self.leader = [at.get(layer.input_of or layer.name, i) for i, layer in enumerate(self.layers)]
        self.places: dict[tuple[int, int], _Place] = {}
        self.stacks: list[Stack] = []
        for bucket in self.buckets:
            sizes, diagonal, dtype, *_ = bucket.key
            for side in (0, 1):
                owners, count = [], 0
                for member in bucket.members:
                    if side == 0 and self.leader[member.index] != member.index:
                        continue
                    groups = member.stop - member.start
                    place = _Place(len(self.stacks), count, count + groups)
                    self.places[member.index, side] = place
                    owners.append(member.index)
                    count += groups
                if owners:
                    self.stacks.append(Stack(sizes[side], diagonal[side], dtype, owners, side))
        for i, leader in enumerate(self.leader):
            self.places[i, 0] = self.places[leader, 0]

    @property
    def written(self) -> list[bool]:
        """By leaf."""
        own = {i for layer in self.layers for i in (layer.leaf, layer.bias)}
        return [i in own for i in range(len(self.plan.names))]

    @functools.cached_property
    def first(self) -> list[int]:
        """The number of each stack's first factor, counting through all, and one behind the last."""
        counts = [sum(self.layers[i].groups for i in stack.layers) for stack in self.stacks]
        return [int(x) for x in np.cumsum([0, *counts])]

    def numbers(self, stack: int) -> range:
        """Of its factors."""
        return range(self.first[stack], self.first[stack + 1])

    def entries(self, stack: int) -> slice:
        """Where its factors are among all."""
        return slice(self.first[stack], self.first[stack + 1])

    def number(self, layer: int, side: int, group: int) -> int:
        """Of one factor."""
        place = self.places[layer, side]
        return self.first[place.stack] + place.start + group

    # ---- init ----------------------------------------------------------------------------------

    def init(self) -> FactorsState:
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
                wide = jnp.promote_types(self.inv_dtype or dtype, jnp.float32)
                shape = (bucket.blocks, sizes[1], sizes[0])
                products.append((jnp.zeros(shape, wide), jnp.ones(bucket.blocks, wide)))
        return FactorsState(tuple(averages), tuple(inverses), *self.no_evidence(), tuple(products))

    def no_evidence(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Weight, ready and failures of all factors before the first step."""
        kinds = [jnp.promote_types(stack.dtype, jnp.float32) for stack in self.stacks]
        count, kind = self.first[-1], jnp.result_type(*kinds) if kinds else jnp.float32
        return jnp.zeros(count, kind), jnp.zeros(count, bool), jnp.zeros(count, jnp.int32)

    # ---- now and then --------------------------------------------------------------------------

    def update_if(
        self, due: jax.Array, state: FactorsState, given: Statistics, factor_decay: Any
    ) -> FactorsState:
        """`update` where due, by a branch that has nothing but what `update` changes."""
        new = jax.lax.cond(
            due,
            lambda: averages_of(self.update(state, given, factor_decay)),
            lambda: averages_of(state),
        )
        return with_averages(state, new)

    def refresh_if(self, due: jax.Array, state: FactorsState, damping: Any) -> FactorsState:
        """`refresh` where due, by a branch that has nothing but what `refresh` changes."""
        new = jax.lax.cond(
            due,
            lambda: inverses_of(self.refresh(state, damping)),
            lambda: inverses_of(state),
        )
        return with_inverses(state, new)

    # ---- update --------------------------------------------------------------------------------

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
            _, ready = self._gathered(state, bucket, 0)
            _, ready_G = self._gathered(state, bucket, 1)
            parts, seen_parts = [], []
            for member in bucket.members:
                sums = given.layers[self.layers[member.index].name].main
                blocks = slice(member.start, member.stop)
                if sums.products is None:
                    parts.append(jnp.zeros_like(average[blocks]))
                    seen_parts.append(jnp.zeros(member.stop - member.start, bool))
                else:
                    own = self._of_the_loss(sums.products, given.terms)
                    parts.append(
                        statistics.normalize_products(own, given.terms, self.loss_reduction).astype(
                            average.dtype
                        )
                    )
                    seen_parts.append(sums.rows > 0)
            seen = jnp.concatenate(seen_parts) & ready & ready_G
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
        return A, G

    def _pair(self, sums: Sums, terms: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert sums.A is not None
        rows = sums.rows.reshape(-1, *(1,) * (sums.A.ndim - 1))
        G = self._of_the_loss(sums.G, terms)
        raw = statistics.LayerStatistics(sums.A, G, rows)
        return statistics.normalize(raw, terms, self.loss_reduction)

    def _of_the_loss(self, x: jax.Array, terms: jax.Array) -> jax.Array:
        """Sampled gradients are of single terms: N times those of a loss that is their mean."""
        if self.plan.sampled and self.loss_reduction == "mean":
            terms = jnp.maximum(terms, 1e-30).astype(x.dtype)
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
            A, ready_A = self._gathered(new, bucket, 0)
            G, ready_G = self._gathered(new, bucket, 1)
            restarted = ekfac.restart(A, G)
            ready = ready_A & ready_G
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
        prepared: list[Any] = []
        means: list[Any] = [None] * len(self.stacks)
        for (m, diagonal, *_), numbers in self._classes().items():
            parts = [state.averages[number] for number in numbers]
            counts = [part.shape[0] for part in parts]
            entries = np.concatenate([np.asarray(self.numbers(n)) for n in numbers])
            average = _behind(parts, m)
            weight = state.weight[entries]
            sides = np.repeat([self.stacks[n].n for n in numbers], counts).tolist()
            if diagonal:
                found = core_kfac.mean_eigenvalue(average, weight)
            else:
                average, found = padding.fill(average, weight, sides, below=self.rule.keeps_eigenbases)
            for number, mean in zip(numbers, _split(found, counts), strict=True):
                means[number] = mean
            prepared.append((numbers, counts, entries, average, weight))
        dampings = self._dampings(jnp.concatenate(means), damping)
        new: list[Any] = [None] * len(self.stacks)
        fine: list[Any] = [None] * len(self.stacks)
        for numbers, counts, entries, average, weight in prepared:
            inverse = self.rule.invert(average, weight, dampings[entries].astype(weight.dtype))
            usable = core_kfac.usable(inverse, 1)
            for number, start, stop in zip(numbers, *_bounds(counts), strict=True):
                new[number] = _in_front(inverse, slice(start, stop), self.stacks[number].n)
                fine[number] = usable[start:stop]
        seen, computed = state.weight > 0, jnp.concatenate(fine)
        replaces = seen & computed
        replaces &= (replaces | state.ready)[self.partners]
        inverses = [
            core_kfac.where(replaces[self.entries(number)], x, old)
            for number, (x, old) in enumerate(zip(new, state.inverses, strict=True))
        ]
        return state._replace(
            inverses=tuple(inverses),
            ready=state.ready | replaces,
            failures=state.failures + (seen & ~computed).astype(jnp.int32),
        )

    @functools.cached_property
    def partners(self) -> np.ndarray:
        """Of each factor, the one without which it is not replaced: of the other side, in `pairs`."""
        found = np.arange(self.first[-1])
        for i, layer in enumerate(self.layers):
            for b in range(layer.groups if self.pairs(i) else 0):
                A, G = self.number(i, 0, b), self.number(i, 1, b)
                found[A], found[G] = G, A
        return found

    def pairs(self, layer: int) -> bool:
        """Whether both inverses of a layer are identities until both are ready, to be applied always."""
        shared = [i for i, leader in enumerate(self.leader) if leader == self.leader[layer]]
        return self.pads and not self.rule.keeps_eigenbases and shared == [layer]

    @property
    def pads(self) -> bool:
        """Whether inverses are computed without those before, which are not padded."""
        return self.rule.compute_method != "newton_schulz" and not self.warm_start

    def _classes(self) -> dict[Any, list[int]]:
        """Stacks by padded side, whether diagonal, and dtypes."""
        counts: dict[Any, dict[int, int]] = {}
        for number, (n, diagonal, *_) in enumerate(self.stacks):
            if not diagonal:
                own = counts.setdefault(self.dtypes(number), {})
                own[n] = own.get(n, 0) + len(self.numbers(number))
        classes = {dtypes: padding.size_classes(own) for dtypes, own in counts.items()}
        groups: dict[Any, list[int]] = {}
        for number, (n, diagonal, *_) in enumerate(self.stacks):
            dtypes = self.dtypes(number)
            side = n if diagonal else classes[dtypes][n]
            groups.setdefault((side, diagonal, *dtypes), []).append(number)
        return groups

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

    def sizes(self) -> dict[Any, list[int]]:
        """Stacks by side, whether diagonal, and dtypes of averages and inverses."""
        groups: dict[Any, list[int]] = {}
        for number, (n, diagonal, _, _, _) in enumerate(self.stacks):
            groups.setdefault((n, diagonal, *self.dtypes(number)), []).append(number)
        return groups

    def dtypes(self, stack: int) -> tuple[Any, Any]:
        """Of the stack's averages and inverses."""
        wide = jnp.promote_types(self.stacks[stack][2], jnp.float32)
        return jnp.dtype(self.factor_dtype or wide), jnp.dtype(self.inv_dtype or wide)

    def _refreshed(self, factor: core_kfac.Factor, damping: jax.Array) -> core_kfac.Factor:
        if not (self.warm_start and self.rule.keeps_eigenbases) or factor.average.ndim == 2:
            return self.rule.refresh_factor(factor, damping)
        return jax.lax.cond(
            jnp.all(factor.ready),
            lambda: self.rule.refresh_factor(factor, damping, warm=True),
            lambda: self.rule.refresh_factor(factor, damping),
        )

    def _dampings(self, means: jax.Array, damping: Any) -> jax.Array:
        """What goes onto the diagonal of each factor, from the mean eigenvalues of all."""
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
        order, parts = [], []
        for kinds, blocks in alike.items():
            mean_A = means[np.asarray([self.number(i, 0, b) for i, b, _ in blocks])]
            sides = np.asarray([[self.number(i, 1, b) for i in members] for _, b, members in blocks])
            # One A, so one π for all that share it: from the mean of their G's.
            mean_G = jnp.mean(means[sides], axis=1)
            for place, kind in enumerate(kinds):
                sizes = 1 if kind[0] else 2, 1 if kind[1] else 2
                split = self.rule.split_damping(mean_A, mean_G, damping, sizes)
                if place == len(kinds) - 1:
                    order += [self.number(i, 0, b) for i, b, _ in blocks]
                    parts.append(split[0])
                order += [int(f) for f in sides[:, place]]
                parts.append(split[1])
        return jnp.concatenate(parts)[np.argsort(order)]

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
            A, ready_A = self._gathered(state, bucket, 0)
            G, ready_G = self._gathered(state, bucket, 1)
            products = None
            if self.keeps_products:
                average, weight = state.products[number]
                products = average / weight[:, None, None]
            joined = buckets.gather(bucket, gradients)
            ready = None if self.pairs(bucket.members[0].index) else ready_A & ready_G
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

    def _gathered(self, state: FactorsState, bucket: buckets.Bucket, side: int) -> tuple[Any, Any]:
        """(inverses, ready) of one side of a bucket's layers."""
        places = [self.places[member.index, side] for member in bucket.members]
        first = places[0].stack
        stack = self.stacks[first]
        if stack.side == side and stack.layers == [member.index for member in bucket.members]:
            return state.inverses[first], state.ready[self.entries(first)]
        parts = []
        for place in places:
            own = slice(self.first[place.stack] + place.start, self.first[place.stack] + place.stop)
            inverse = jax.tree.map(lambda x, p=place: x[p.start : p.stop], state.inverses[place.stack])
            parts.append((inverse, state.ready[own]))
        inverse, ready = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
        return inverse, ready


def _behind(parts: Sequence[jax.Array], side: int) -> jax.Array:
    """Stacks of factors as one, with zeros behind them; written one by one, which compiles fastest."""
    first, count = parts[0], sum(part.shape[0] for part in parts)
    if count == first.shape[0] and side == first.shape[-1]:
        return first
    joined = jnp.zeros((count, *(side,) * (first.ndim - 1)), first.dtype)
    for part, start in zip(parts, _bounds([part.shape[0] for part in parts])[0], strict=True):
        joined = jax.lax.dynamic_update_slice(joined, part, (start, *(0,) * (first.ndim - 1)))
    return joined


def _in_front(inverse: Any, own: slice, side: int) -> Any:
    """What is not padding, of some of a stack; in an eigenbasis padding comes first."""
    if isinstance(inverse, core_kfac.Eigen):
        values = inverse.values[own, inverse.values.shape[-1] - side :]
        if inverse.vectors is None:
            return core_kfac.Eigen(None, values)
        padded = inverse.vectors.shape[-1] - side
        return core_kfac.Eigen(inverse.vectors[own, :side, padded:], values)
    return inverse[own, :side] if inverse.ndim == 2 else inverse[own, :side, :side]


def _split(x: jax.Array, counts: Sequence[int]) -> list[jax.Array]:
    return [x[start:stop] for start, stop in zip(*_bounds(counts), strict=True)]


def _bounds(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where stacks of so many begin and end, one behind the other."""
    stops = np.cumsum(counts).tolist()
    return [stop - count for stop, count in zip(stops, counts, strict=True)], stops


def any_rows(given: Statistics) -> jax.Array:
    """Whether statistics are of anything, ()."""
    rows = [jnp.any(sums.main.rows > 0) for sums in given.layers.values()]
    return jnp.any(jnp.stack(rows))


def finite_statistics(given: Statistics | None) -> jax.Array:
    """Whether all statistics are finite, (); of second moments the diagonal bounds all entries."""
    if given is None:
        return jnp.asarray(True)
    marks = [given.terms]
    for sums in given.layers.values():
        for own in (sums.main, sums.transposed):
            if own is None:
                continue
            moments = [x for x in (own.A, own.G) if x is not None]
            marks += [own.rows, *(linalg.diagonal(x) if x.ndim == 3 else x for x in moments)]
            if own.products is not None:
                marks.append(linalg.finite_mark(own.products))
    kind = jnp.result_type(*marks)
    return jnp.isfinite(linalg.finite_mark(jnp.concatenate([x.ravel().astype(kind) for x in marks])))


def require_fit(plan: Plan, given: Statistics, products: bool) -> None:
    """Raise unless statistics are of this plan."""
    if not isinstance(given, Statistics):
        raise TypeError(
            f"statistics must be what suite.jax.value_and_grad returns, got {type(given).__name__}"
        )
    names = {layer.name for layer in plan.layers}
    if set(given.layers) != names:
        missing, unknown = sorted(names - set(given.layers)), sorted(set(given.layers) - names)
        raise ValueError(f"statistics do not fit the plan: missing {missing}, unknown {unknown}")
    if products:
        measured: list[LayerSums] = [
            given.layers[layer.name] for layer in plan.layers if layer.measures_products
        ]
        if any(sums.main.products is None for sums in measured):
            raise ValueError(
                "compute_method='ekfac' needs second moments in its eigenbases: call "
                "value_and_grad(...)(params, ..., bases=suite.jax.eigenbases(tx_state, plan))"
            )
