"""The factors of all layers when many devices share the work and the memory of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from suite.core import buckets, moments
from suite.core import kfac as core_kfac
from suite.jax import shares
from suite.jax.factors_state import FactorsState, Shares, shares_of
from suite.jax.plan import Statistics
from suite.jax.spread_factors import Rows, SpreadFactors


class KeptFactors(SpreadFactors):
    """Averages stay with the device that inverts them, inverses with their layers' gradient workers.

    Those compute the layers' directions and send them to all others at every step.
    """

    def shared(self) -> list[int]:
        return list(range(len(self.stacks)))

    def stored_at(self, number: int) -> tuple[int, int]:
        return self.homes[number]

    def init(self) -> FactorsState:
        rows = self.spread.rows_here()

        def zeros(stores: dict[str, shares.Store]) -> Rows:
            made = {dtype: jnp.zeros(own.shape(rows), dtype) for dtype, own in stores.items()}
            return {dtype: self.spread.divided(x) for dtype, x in made.items()}

        averages, inverses = self.stores
        kept = Shares(zeros(averages), zeros(inverses))
        return FactorsState((), (), *self.no_evidence(), (), {self.layout: kept})

    @functools.cached_property
    def layout(self) -> str:
        """A name of where each factor lies and what its inverse is. Shapes may be alike by chance."""
        told: list[Any] = [self.rule.compute_method, self.spread.devices, self.placement.groups]
        told.append(sorted(self.homes.items()))
        for stores in self.stores:
            for dtype, own in sorted(stores.items()):
                told += [dtype, sorted(own.starts.items()), sorted(own.sizes.items())]
        return f"layout {hashlib.sha256(repr(told).encode()).hexdigest()[:8]}"

    def require_own(self, state: FactorsState) -> None:
        rows = self.spread.rows_here()
        wanted = [{dtype: own.shape(rows) for dtype, own in stores.items()} for stores in self.stores]
        if state.shares is None:
            raise ValueError(
                f"state must have shares for {rows} devices, for gradient_worker_fraction is below 1, "
                "got one with all factors on every device"
            )
        got = [{k: x.shape for k, x in own.items()} for own in shares_of(state)]
        if got != wanted:
            raise ValueError(
                "state must have shares of the shapes that this gradient_worker_fraction, "
                f"assignment_strategy and number of devices have, {wanted}, got {got}"
            )
        if set(state.shares) != {self.layout}:
            raise ValueError(
                "state must be that of init(params) with this gradient_worker_fraction, "
                "assignment_strategy, compute_method and number of devices, whose shares lie as "
                f"{self.layout!r} says, got {sorted(state.shares)}"
            )

    def update(self, state: FactorsState, given: Statistics, factor_decay: Any) -> FactorsState:
        new, seen = self._new(given)
        kept = shares_of(state)

        def local(own: Shares, common: Any) -> Any:
            averages = _row(own.averages)
            new, seen, decay = common
            for size in self.each_size():
                dtype = size.dtypes[0]
                one = self._update_one(size, averages, new, seen, decay)
                averages[dtype] = self.walk(size.walk, one, averages[dtype])
            return own._replace(averages=_as_row(averages)), ()

        kept, _ = self.spread.run(local, kept, (new, seen, factor_decay))
        share = jnp.where(seen, factor_decay, 1.0).astype(state.weight.dtype)
        weight = moments.mix(state.weight, jnp.ones_like(state.weight), share)
        return state._replace(weight=weight, shares={self.layout: kept})

    def _update_one(
        self, size: Any, averages: Rows, new: Sequence[jax.Array], seen: Any, decay: Any
    ) -> Any:
        stacks = [s for s, own in enumerate(self.stacks) if self._is_of(s, size)]
        joined = jnp.concatenate([new[s] for s in stacks])
        position = {f: i for i, f in enumerate(f for s in stacks for f in self.numbers(s))}
        average_at = jnp.asarray(size.average_at)[self.spread.index()]
        at = jnp.asarray(size.walk.look_up(position))[self.spread.index()]
        first = self.rule.init_factor(jnp.zeros((), size.dtypes[0]), (1,), 1)

        def one(k: jax.Array, f: jax.Array, rows: jax.Array) -> jax.Array:
            average = self.reader(size, {size.dtypes[0]: rows})(k)
            factor = first._replace(average=average)
            factor = self.rule.update_factor(factor, joined[at[k]][None], seen[f][None], decay)
            return shares.write(rows, average_at[k], factor.average.reshape(1, -1))

        return one

    def _is_of(self, stack: int, size: Any) -> bool:
        names = tuple(dtype.name for dtype in self.dtypes(stack))
        return (*self.stacks[stack][:2], names) == (size.n, size.diagonal, size.dtypes)

    def _means(self, state: FactorsState) -> jax.Array:
        def local(own: Shares, weight: jax.Array) -> Any:
            averages = _row(own.averages)
            total = self.spread.vary(jnp.zeros_like(weight))
            for size in self.each_size():
                total = self.walk(size.walk, self._mean_one(size, averages, weight), total)
            return (), self.spread.total(total)

        _, means = self.spread.run(local, shares_of(state), state.weight)
        return means

    def _mean_one(self, size: Any, averages: Rows, weight: jax.Array) -> Callable[..., Any]:
        read = self.reader(size, averages)

        def one(k: jax.Array, f: jax.Array, total: jax.Array) -> jax.Array:
            mean = core_kfac.mean_eigenvalue(read(k), weight[f][None])
            return total.at[f].set(mean[0].astype(total.dtype))

        return one

    def _refresh_factors(self, state: FactorsState, damping: Any) -> FactorsState:
        def local(own: Shares, common: Any) -> Any:
            small, damping = common
            rows, *counts = self.refresh_own(_row(own.averages), _row(own.inverses), small, damping)
            return own._replace(inverses=_as_row(rows)), counts

        small = state.weight, state.ready, state.failures
        common = small, self._dampings(self._means(state), damping)
        kept, (ready, failures) = self.spread.run(local, shares_of(state), common)
        return state._replace(ready=ready, failures=failures, shares={self.layout: kept})

    # ---- directions ----------------------------------------------------------------------------

    def precondition(
        self, state: FactorsState, gradients: Sequence[jax.Array], damping: Any
    ) -> list[jax.Array]:
        joined, ready = [], []
        alike: dict[Any, list[int]] = {}  # buckets of one shape
        for number, bucket in enumerate(self.buckets):
            joined.append(buckets.gather(bucket, gradients))
            ready.append(self.ready(state, bucket))
            alike.setdefault((*bucket.key[:4], joined[-1].dtype), []).append(number)

        def local(own: Shares, common: Any) -> Any:
            joined, ready, damping = common
            found: list[Any] = [None] * len(joined)
            for numbers in alike.values():
                given = [joined[i] for i in numbers], [ready[i] for i in numbers]
                moved = self._directions(numbers, _row(own.inverses), *given, damping)
                for i, x in zip(numbers, moved, strict=True):
                    found[i] = x
            return (), self.spread.to_receivers(found, self.placement)

        _, found = self.spread.run(local, shares_of(state), (joined, ready, damping))
        directions: list[Any] = [None] * len(self.layers)
        for bucket, x in zip(self.buckets, found, strict=True):
            buckets.scatter(bucket, x, directions)
        return directions

    def _directions(
        self,
        numbers: Sequence[int],
        inverses: Rows,
        given: Sequence[jax.Array],
        ready: Any,
        damping: Any,
    ) -> list[jax.Array]:
        """Of buckets of one shape: those of this device's group, and zeros for the rest."""
        gradient, ready = jnp.concatenate(given), jnp.concatenate(ready)
        bucket = self.buckets[numbers[0]]
        blocks = [
            (member.index, b)
            for number in numbers
            for member in self.buckets[number].members
            for b in range(self.layers[member.index].groups)
        ]
        placement = self.placement
        places = {j: placement.workers_of(self.block(*block)) for j, block in enumerate(blocks)}
        walk = shares.walk(places, self.spread.devices)
        read = [self._reader_of_side(side, blocks, walk, inverses) for side in (0, 1)]

        def one(k: jax.Array, j: jax.Array, out: jax.Array) -> jax.Array:
            sides = read[0](k), read[1](k)
            found = self.apply(bucket, *sides, ready[j][None], gradient[j][None], damping)
            return out.at[j].set(found[0])

        out = self.walk(walk, one, self.spread.vary(jnp.zeros_like(gradient)))
        stops = np.cumsum([self.buckets[number].blocks for number in numbers])
        return list(jnp.split(out, stops[:-1]))

    def _reader_of_side(
        self, side: int, blocks: Sequence[tuple[int, int]], walk: shares.Walk, inverses: Rows
    ) -> Callable[[jax.Array], Any]:
        """k -> the inverse of one side of this device's k-th block, as a stack of one."""
        own = self.places[blocks[0][0], side].stack
        dtype = self.dtypes(own)[1].name
        kept = self.stores[1][dtype]
        factor = {j: self.number(i, side, b) for j, (i, b) in enumerate(blocks)}
        starts = walk.look_up({j: kept.starts[f] for j, f in factor.items()})
        at, size = jnp.asarray(starts)[self.spread.index()], kept.sizes[factor[0]]
        return lambda k: self.out_of_one(
            shares.read(inverses[dtype], at[k], size)[None], self.stacks[own]
        )


def _row(divided: Rows) -> Rows:
    """A device's own, of arrays that the program of one device sees as (1, rows, 128)."""
    return {dtype: x[0] for dtype, x in divided.items()}


def _as_row(own: Rows) -> Rows:
    return {dtype: x[None] for dtype, x in own.items()}
