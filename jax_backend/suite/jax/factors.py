"""The factors of all layers: where they are, and the four verbs on their stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from suite.core import buckets, ekfac, statistics
from suite.core import kfac as core_kfac
from suite.jax.layers import Layer, LayerSums, Sums
from suite.jax.plan import Plan, Statistics
from suite.jax.spread import Spread

# Above this side a stack of layers costs a copy of every gradient and saves nothing.
_STACKED_UP_TO = 128


class FactorsState(NamedTuple):
    """Arrays of all factors."""

    factors: tuple[core_kfac.Factor, ...]  # one stack for each bucket of layers and side
    products: tuple[tuple[jax.Array, jax.Array], ...]  # EKFAC: (second moments, weight), a bucket each
    shares: Shares | None = None  # averages and inverses, where devices keep some of them each


class Shares(NamedTuple):
    """By dtype, a row for each device (see `suite.jax.shares`); `Factor`s then have () for theirs."""

    averages: dict[str, jax.Array]
    inverses: dict[str, jax.Array]


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
            keys.append(((layer.sizes, layer.diagonal, plan.dtypes[layer.leaf], alone), layer.groups))
        self.buckets = buckets.plan_buckets(keys)
        at = {layer.name: i for i, layer in enumerate(self.layers)}
        # A layer whose leader is not here leads itself; its statistics then come from the leader's.
        self.leader = [at.get(layer.input_of or layer.name, i) for i, layer in enumerate(self.layers)]
        self.places: dict[tuple[int, int], _Place] = {}
        self.stacks: list[
            tuple[int, bool, Any, list[int], int]
        ] = []  # side, diagonal, dtype, layers, at
        for bucket in self.buckets:
            sizes, diagonal, dtype, _ = bucket.key
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
                    self.stacks.append((sizes[side], diagonal[side], dtype, owners, side))
        for i, leader in enumerate(self.leader):
            self.places[i, 0] = self.places[leader, 0]

    # ---- init ----------------------------------------------------------------------------------

    def init(self) -> FactorsState:
        factors = []
        for number, (n, diagonal, _, owners, _) in enumerate(self.stacks):
            count = sum(self.layers[i].groups for i in owners)
            like, inverse_like = (jnp.zeros((), dtype) for dtype in self.dtypes(number))
            factors.append(self.rule.init_factor(like, (count,), n, diagonal, inverse_like))
        products = []
        if self.keeps_products:
            for bucket in self.buckets:
                sizes, _, dtype, _ = bucket.key
                wide = jnp.promote_types(self.inv_dtype or dtype, jnp.float32)
                shape = (bucket.blocks, sizes[1], sizes[0])
                products.append((jnp.zeros(shape, wide), jnp.ones(bucket.blocks, wide)))
        return FactorsState(tuple(factors), tuple(products))

    # ---- update --------------------------------------------------------------------------------

    def update(self, state: FactorsState, given: Statistics, factor_decay: Any) -> FactorsState:
        """Average normalized statistics in."""
        factors = [
            self.rule.update_factor(factor, new, seen, factor_decay)
            for factor, (new, seen) in zip(state.factors, self._new(given), strict=True)
        ]
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
        return state._replace(factors=tuple(factors), products=tuple(products))

    def _new(self, given: Statistics) -> list[tuple[jax.Array, jax.Array]]:
        """For each stack what was seen now, normalized, and of which factors anything was."""
        new = [self._normalized(layer, given) for layer in self.layers]
        pairs = []
        for number, (_, _, _, owners, side) in enumerate(self.stacks):
            parts = [new[i][side].astype(self.dtypes(number)[0]) for i in owners]
            seen = [given.layers[self.layers[i].name].main.rows > 0 for i in owners]
            pairs.append((jnp.concatenate(parts), jnp.concatenate(seen)))
        return pairs

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
        dampings = self._dampings(state, damping)
        factors = list(state.factors)
        for numbers in self.sizes().values():
            parts = [factors[number] for number in numbers]
            joined = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
            refreshed = self._refreshed(joined, jnp.concatenate([dampings[n] for n in numbers]))
            start = 0
            for number, part in zip(numbers, parts, strict=True):
                stop = start + part.weight.shape[0]
                factors[number] = jax.tree.map(lambda x, a=start, b=stop: x[a:b], refreshed)
                start = stop
        return state._replace(factors=tuple(factors))

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

    def _dampings(self, state: FactorsState, damping: Any) -> list[jax.Array]:
        """What goes onto the diagonals of each stack of factors."""
        if self.rule.keeps_eigenbases:
            return [jnp.zeros_like(factor.weight) for factor in state.factors]
        means = self._means(state)

        def mean(i: int, side: int) -> jax.Array:
            place = self.places[i, side]
            return means[place.stack][place.start : place.stop]

        parts: dict[tuple[int, int], jax.Array] = {}
        groups: dict[int, list[int]] = {}
        for i, leader in enumerate(self.leader):
            groups.setdefault(leader, []).append(i)
        for leader, members in groups.items():
            # One A, so one π for all that share it: from the mean of their G's.
            mean_G = jnp.mean(jnp.stack([mean(i, 1) for i in members]), axis=0)
            for i in members:
                split = self.rule.split_damping(mean(leader, 0), mean_G, damping, self.layers[i].sizes)
                parts[leader, 0], parts[i, 1] = split
        return [
            jnp.concatenate([parts[i, side] for i in owners]) for _, _, _, owners, side in self.stacks
        ]

    def _means(self, state: FactorsState) -> list[jax.Array]:
        """Mean eigenvalues of each stack."""
        return [core_kfac.mean_eigenvalue(factor) for factor in state.factors]

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
            found = self.rule.apply(A, G, ready_A & ready_G, joined, damping, products)
            buckets.scatter(bucket, found, directions)
        return directions

    def bases(self, state: FactorsState) -> dict[str, Any]:
        """Eigenvectors of (A, G) by layer, in which `value_and_grad` measures second moments."""
        found = {}
        for i, layer in enumerate(self.layers):
            if not layer.measures_products:
                continue
            sides = []
            for side in (0, 1):
                place = self.places[i, side]
                inverse = state.factors[place.stack].inverse
                assert isinstance(inverse, core_kfac.Eigen)
                vectors = inverse.vectors
                sides.append(None if vectors is None else vectors[place.start : place.stop])
            found[layer.name] = (sides[0], sides[1])
        return found

    def _gathered(self, state: FactorsState, bucket: buckets.Bucket, side: int) -> tuple[Any, Any]:
        """(inverses, ready) of one side of a bucket's layers."""
        places = [self.places[member.index, side] for member in bucket.members]
        first = places[0].stack
        own = self.stacks[first][3]
        factor = state.factors[first]
        if own == [member.index for member in bucket.members] and self.stacks[first][4] == side:
            return factor.inverse, factor.ready
        parts = []
        for place in places:
            factor = state.factors[place.stack]
            pair = (factor.inverse, factor.ready)
            parts.append(jax.tree.map(lambda x, p=place: x[p.start : p.stop], pair))
        inverse, ready = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
        return inverse, ready


def any_rows(given: Statistics) -> jax.Array:
    """Whether statistics are of anything, ()."""
    rows = [jnp.any(sums.main.rows > 0) for sums in given.layers.values()]
    return jnp.any(jnp.stack(rows))


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
