"""The factors of all layers when many devices share the work of factorizing them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from suite.core import kfac as core_kfac
from suite.core.placement import LayerShape, Placement
from suite.jax import shares
from suite.jax.factors import Factors
from suite.jax.factors_state import FactorsState

Rows = dict[str, jax.Array]  # by dtype, (rows, 128) of a device


class Size(NamedTuple):
    """Factors of one size, and what each device does with those that are its own."""

    n: int
    diagonal: bool
    dtypes: tuple[str, str]  # of averages and inverses
    walk: shares.Walk
    average_at: np.ndarray  # (devices, most): where the walk's averages start,
    inverse_at: np.ndarray  # and its inverses
    kept: tuple[int, int]  # how many numbers they are


class SpreadFactors(Factors):
    """Each device factorizes its share, as the core's placement says, and all get all results."""

    # ---- who has what --------------------------------------------------------------------------

    @functools.cached_property
    def placement(self) -> Placement:
        """Of blocks, each for itself: those of a scan may go to many devices."""
        shapes: list[LayerShape] = []
        input_of: list[tuple[int, int]] = []
        start = self._blocks
        for i, (layer, leader) in enumerate(zip(self.layers, self.leader, strict=True)):
            shapes += [LayerShape(layer.sizes, layer.diagonal)] * layer.groups
            if leader != i:
                input_of += [(start[i] + b, start[leader] + b) for b in range(layer.groups)]
        return shares.placement(
            tuple(shapes),
            tuple(input_of),
            self.spread.devices,
            self.spread.workers,
            self.spread.strategy,
        )

    @functools.cached_property
    def _blocks(self) -> list[int]:
        """The number of each layer's first block."""
        return [int(x) for x in np.cumsum([0, *(layer.groups for layer in self.layers)])]

    def block(self, layer: int, group: int) -> int:
        """A block's number in the placement."""
        return self._blocks[layer] + group

    @functools.cached_property
    def homes(self) -> dict[int, tuple[int, int]]:
        """Of each factor, the device that computes it and the group of its gradient workers."""
        found = {}
        for stack, (_, _, _, layers, side) in enumerate(self.stacks):
            blocks = [self.block(i, b) for i in layers for b in range(self.layers[i].groups)]
            for number, block in zip(self.numbers(stack), blocks, strict=True):
                owner = self.placement.owner_of[block, "AG"[side]]
                found[number] = owner, self.placement.group_of[block]
        return found

    def shared(self) -> list[int]:
        """The stacks that are shared out: a diagonal factor is not worth the exchange."""
        return [number for number, (_, diagonal, _, _, _) in enumerate(self.stacks) if not diagonal]

    def pairs(self, layer: int) -> bool:
        return False

    def stored_at(self, number: int) -> tuple[int, int]:
        """In which of many stores a factor's average and inverse are; here all have everything."""
        return 0, 0

    @functools.cached_property
    def stores(self) -> tuple[dict[str, shares.Store], dict[str, shares.Store]]:
        """Where averages and inverses lie, by dtype."""
        members: tuple[dict[str, dict[int, tuple[int, int]]], ...] = {}, {}
        for stack in self.shared():
            n, diagonal, *_ = self.stacks[stack]
            basis = n if self.rule.keeps_eigenbases and not diagonal else 0
            for at, more in ((0, 0), (1, basis)):
                own = members[at].setdefault(self.dtypes(stack)[at].name, {})
                for number in self.numbers(stack):
                    own[number] = ((n if diagonal else n * n) + more, self.stored_at(number)[at])
        averages, inverses = ({dtype: shares.store(own) for dtype, own in m.items()} for m in members)
        return averages, inverses

    def each_size(self) -> Iterator[Size]:
        """What is shared out, by size."""
        averages, inverses = self.stores
        for (n, diagonal, *dtypes), stacks in self.sizes().items():
            numbers = [f for s in stacks if s in self.shared() for f in self.numbers(s)]
            if not numbers:
                continue
            average, inverse = averages[dtypes[0].name], inverses[dtypes[1].name]
            walk = shares.walk({f: [self.homes[f][0]] for f in numbers}, self.spread.devices)
            yield Size(
                n,
                diagonal,
                (dtypes[0].name, dtypes[1].name),
                walk,
                walk.look_up(average.starts),
                walk.look_up(inverse.starts),
                (average.sizes[numbers[0]], inverse.sizes[numbers[0]]),
            )

    # ---- refresh -------------------------------------------------------------------------------

    def _refresh_factors(self, state: FactorsState, damping: Any) -> FactorsState:
        """Averages and inverses are packed, inverses computed and unpacked; diagonal ones everywhere."""
        dampings = self._dampings(self._means(state), damping)
        shared = self.shared()
        averages = self._packed(0, {s: _in_one(state.averages[s]) for s in shared})
        inverses = self._packed(1, {s: _in_one(state.inverses[s]) for s in shared})
        small = state.weight, state.ready, state.failures

        def local(_: Any, common: Any) -> Any:
            return (), self.refresh_own(*common)

        _, (rows, ready, failures) = self.spread.run(local, (), (averages, inverses, small, dampings))
        found = self._unpacked(rows, {s: state.inverses[s] for s in shared})
        for stack in range(len(self.stacks)):
            if stack not in found:
                own = self.entries(stack)
                factor = core_kfac.Factor(
                    state.averages[stack],
                    state.weight[own],
                    state.inverses[stack],
                    state.ready[own],  # only shared ones are in `ready`
                    failures[own],
                )
                factor = self._refreshed(factor, dampings[own].astype(factor.weight.dtype))
                found[stack] = factor.inverse
                ready, failures = ready.at[own].set(factor.ready), failures.at[own].set(factor.failures)
        new = tuple(found[stack] for stack in range(len(self.stacks)))
        return state._replace(inverses=new, ready=ready, failures=failures)

    def refresh_own(self, averages: Rows, inverses: Rows, small: Any, damping: jax.Array) -> Any:
        """On one device: refresh its own factors, and exchange inverses with its group.

        Args:
            small: weight, ready and failures of all factors.
            damping: of all factors.

        Returns:
            Inverses of the group; ready and failures of all factors.
        """
        weight, ready, failures = small
        new = {dtype: self.spread.vary(jnp.zeros_like(rows)) for dtype, rows in inverses.items()}
        done = self.spread.vary((jnp.zeros(ready.shape, jnp.int32), jnp.zeros_like(failures)))
        for size in self.each_size():
            dtype = size.dtypes[1]
            one = self._refresh_one(size, averages, inverses[dtype], (weight, ready, damping))
            new[dtype], done = self.walk(size.walk, one, (new[dtype], done))
        new = {dtype: self.spread.to_workers(rows, self.placement) for dtype, rows in new.items()}
        is_ready, failed = self.spread.total(done)
        return new, is_ready > 0, failures + failed

    def _refresh_one(
        self, size: Size, averages: Rows, known: jax.Array, small: Any
    ) -> Callable[..., Any]:
        weight, ready, damping = small
        average_of = self.reader(size, averages)
        inverse_at = jnp.asarray(size.inverse_at)[self.spread.index()]
        like, inverse_like = (jnp.zeros((), dtype) for dtype in size.dtypes)
        first = self.rule.init_factor(like, (1,), size.n, size.diagonal, inverse_like)

        def one(k: jax.Array, f: jax.Array, carry: Any) -> Any:
            rows, (now_ready, failed) = carry
            old = self.out_of_one(shares.read(known, inverse_at[k], size.kept[1])[None], size)
            factor = first._replace(
                average=average_of(k),
                weight=weight[f][None].astype(first.weight.dtype),
                inverse=core_kfac.where(ready[f][None], old, first.inverse),
                ready=ready[f][None],
            )
            factor = self._refreshed(factor, damping[f][None].astype(first.weight.dtype))
            rows = shares.write(rows, inverse_at[k], _in_one(factor.inverse))
            now_ready = now_ready.at[f].set(factor.ready[0].astype(jnp.int32))
            return rows, (now_ready, failed.at[f].set(factor.failures[0]))

        return one

    def walk(self, walk: shares.Walk, one: Callable[..., Any], carry: Any) -> Any:
        """`one(k, number, carry)` for each of this device's entries."""
        me = self.spread.index()
        count, own = jnp.asarray(walk.counts)[me], jnp.asarray(walk.entries)[me]
        return lax.fori_loop(0, count, lambda k, carry: one(k, own[k], carry), carry)

    def reader(self, size: Size, averages: Rows) -> Callable[[jax.Array], jax.Array]:
        """k -> the average of this device's k-th factor, as a stack of one."""
        at, rows = jnp.asarray(size.average_at)[self.spread.index()], averages[size.dtypes[0]]
        shape = (1, size.n) if size.diagonal else (1, size.n, size.n)
        return lambda k: shares.read(rows, at[k], size.kept[0]).reshape(shape)

    # ---- packing -------------------------------------------------------------------------------

    def _packed(self, at: int, stacks: dict[int, jax.Array]) -> Rows:
        groups: dict[str, list[jax.Array]] = {}
        for stack, x in stacks.items():
            groups.setdefault(self.dtypes(stack)[at].name, []).append(x)
        return {dtype: shares.pack(xs) for dtype, xs in groups.items()}

    def _unpacked(self, rows: Rows, like: dict[int, Any]) -> dict[int, Any]:
        """Inverses by stack."""
        found = {}
        for dtype, own in rows.items():
            stacks = [s for s in like if self.dtypes(s)[1].name == dtype]
            shapes = [jax.eval_shape(_in_one, like[s]).shape for s in stacks]
            for stack, x in zip(stacks, shares.unpack(own, shapes), strict=True):
                found[stack] = self.out_of_one(x, self.stacks[stack])
        return found

    def out_of_one(self, x: jax.Array, size: Any) -> Any:
        """Undo `_in_one` for inverses."""
        n, diagonal = size[:2]
        if not self.rule.keeps_eigenbases:
            return x if diagonal else x.reshape(-1, n, n)
        if diagonal:
            return core_kfac.Eigen(None, x)
        return core_kfac.Eigen(x[:, : n * n].reshape(-1, n, n), x[:, n * n :])


def _in_one(arrays: Any) -> jax.Array:
    """A stack of averages, inverses or eigenbases, their eigenvalues behind them: (count, size)."""
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in jax.tree.leaves(arrays)], axis=1)
