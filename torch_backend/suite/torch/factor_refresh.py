"""Inverses and eigenbases: of all layers or of those whose turn it is, and brought to their users."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from suite.core import buckets, ekfac
from suite.core import kfac as core_kfac
from suite.core.packing import pack, packed_shape, unpack
from suite.core.turns import plan_turns
from suite.torch.checks import warn_user
from suite.torch.collectives import Parcel
from suite.torch.factor_store import (
    FactorStore,
    Key,
    Pair,
    at_least_single,
    copy_inverse,
    factor_rows,
    rows_of,
)
from suite.torch.inplace import read_flags

# Another try at a factor that failed: more damping, in units of its mean eigenvalue, then float64.
_RETRIES = ((1e-3, None), (0.0, torch.float64))


Turn = tuple[int, int]  # step of a cycle, of how many
Group = tuple[int, list[int]]  # a layer with an A, and all layers that have it


class Attempt(NamedTuple):
    """Factorizations that were just done, of a stack of factors; the host has not looked at them."""

    number: int  # of the stack
    at: slice  # of its blocks
    failed: torch.Tensor  # (blocks,) bool
    damping: Any  # a number or (blocks,)


class FactorRefresh(FactorStore):
    """A store that computes what it derives from its averages."""

    def refresh(self, damping: float, turn: Turn | None = None) -> None:
        """Recompute inverses or eigenbases, each on its owner, and bring them to their users.

        Args:
            turn: (step, of how many): only of the layers whose turn it is in this step of a cycle; of
                all if there are none yet.
        """
        if not self.allocated:
            return
        if turn is not None and self.refreshed:
            self._refresh_some(damping, turn)
            return
        warm = [self._may_start_warm(number, stack) for number, stack in enumerate(self.factors)]
        self.refreshed, self.inverted = True, set(self.seen)
        self._cache.clear()
        dampings = self._dampings(damping, self._groups())
        attempts: dict[int, Attempt] = {}

        def fresh(number: int) -> core_kfac.Factor:
            if number not in attempts:
                attempts[number] = self._refreshed(number, dampings[number], warm[number])
                if not self.ranks.alone:  # before they leave
                    self._settle([attempts[number]])
            return self.factors[number]

        self._spread(self.all_keys(), fresh)
        for number in range(len(self.factors)):
            fresh(number)
        if self.ranks.alone:
            self._settle(list(attempts.values()))
        self._restart_products(set(range(len(self.layers))))

    def refresh_in_place(self, damping: float) -> list[Attempt]:
        """`refresh` in one process into the memory of the inverses before, without anybody's looking.

        To be recorded, where all inverses are known to be ready: see `settle`.
        """
        dampings = self._dampings(damping, self._groups())
        attempts = [
            self._refresh_rows(number, slice(0, bucket.blocks), dampings[number])
            for number, bucket in enumerate(self.factor_buckets)
        ]
        self._renew_joined()
        return attempts

    def settle(self, attempts: Sequence[Attempt]) -> None:
        """Look which of `refresh_in_place`'s factorizations failed, and try those again."""
        if self._settle(attempts):
            self._renew_joined()

    def _renew_joined(self) -> None:
        """Bring inverses to where they are once more, beside those of layers that are not neighbours."""
        for number in range(len(self.buckets)):
            for side in ("A", "G"):
                kept = self._cache.get((number, side))
                if kept is not None and self._neighbours(number, side) is None:
                    self._join_into(kept[0], number, side)

    def _join_into(self, kept: Any, number: int, side: str) -> None:
        """`_gathered` of layers that are not neighbours, in the memory that there is for it."""
        self._cache.pop((number, side), None)
        inverse, ready = self._gathered(number, side)
        copy_inverse(kept, inverse)
        self._cache[number, side] = kept, ready

    def _refresh_some(self, damping: float, turn: Turn) -> None:
        """Of layers that share an A all at once: their dampings depend on each other."""
        step, steps = turn
        groups = self._groups()
        turns = plan_turns([self._cost(*group) for group in groups], steps)
        groups = [group for group, own in zip(groups, turns, strict=True) if own == step]
        if not groups:
            return
        due = {i for _, members in groups for i in members}
        self.inverted |= due & self.seen
        keys = [key for key in self.all_keys() if key[0] in due]
        dampings = self._dampings(damping, groups)
        self._settle(
            [
                self._refresh_rows(number, at, dampings[number])
                for number, bucket in enumerate(self.factor_buckets)
                for at in _runs(bucket, [self.owners[m.index][0] in due for m in bucket.members])
            ]
        )
        self._spread(keys, lambda number: self.factors[number])
        for number, bucket in enumerate(self.buckets):
            if any(m.index in due for m in bucket.members):
                for what in ("A", "G", "ready"):
                    self._cache.pop((number, what), None)
        for i in due:
            for what in ("layer is ready", "probes"):
                self._cache.pop((i, what), None)
        self._restart_products(due)

    def _refresh_rows(self, number: int, at: slice, damping: Any) -> Attempt:
        """Some of a stack of factors, in place."""
        some, damping = factor_rows(self.factors[number], at), _rows(damping, at)
        warm = self._may_start_warm(number, some)
        failed = []
        for part in self.storage.portions(some):
            here = factor_rows(some, part)
            full = self.storage.full_factor(here)
            new = self.rule.refresh_factor(full, _rows(damping, part), warm=warm)
            failed.append(new.failures > here.failures)
            self._put(here, new._replace(inverse=self.storage.keep(new.inverse)))
        return Attempt(number, at, torch.cat(failed), damping)

    def _put(self, here: core_kfac.Factor, new: core_kfac.Factor) -> None:
        """Inverses or eigenbases, as they are kept, in the place of others."""
        copy_inverse(here.inverse, new.inverse)
        here.ready.copy_(new.ready)
        here.failures.copy_(new.failures)

    def _may_start_warm(self, number: int, some: core_kfac.Factor) -> bool:
        """Whether eigenbases of some of a stack, or of all of it, can start from those before."""
        if not self.warm_start:
            return False
        return bool(self._cache.get((number, "stack is ready")) or some.ready.all())

    def _restore(self, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        super()._restore(layers)
        # A checkpoint made without second moments has the eigenvalues that they start from.
        without = {i for i, layer in enumerate(self.layers) if "products" not in layers[layer.name]}
        members = [{m.index for m in bucket.members} for bucket in self.buckets]
        self._restart_products({i for own in members if own & without for i in own})

    def _restart_products(self, due: set[int]) -> None:
        """Second moments in the eigenbases of these layers, from the new bases."""
        if not self.keeps_products:
            return
        for number, bucket in enumerate(self.buckets):
            if all(m.index in due for m in bucket.members):
                A, G = (self._gathered(number, side)[0] for side in ("A", "G"))
                self.products[number] = ekfac.restart(A, G)
                continue
            for m in bucket.members:
                if m.index in due:
                    A, G = (self._inverse_of(m.index, side)[0] for side in ("A", "G"))
                    for kept, new in zip(self.products[number], ekfac.restart(A, G), strict=True):
                        kept[m.start : m.stop] = new

    def derived(self) -> Any:
        """The memory of what was derived from averages: for `return_to`."""
        sides = [(number, side) for number in range(len(self.buckets)) for side in ("A", "G")]
        apart = [key for key in sides if self._neighbours(*key) is None and not self.storage.packed]
        joined = {key: self._gathered(*key)[0] for key in apart}
        return list(self.factors), list(self.products), joined

    def return_to(self, derived: Any) -> None:
        """Bring new inverses to the memory of others, where recorded kernels read them."""
        factors, products, joined = derived
        stacks = zip(factors, self.factors, strict=True)
        pairs = zip(products, self.products, strict=True)
        if all(a.inverse is b.inverse for a, b in stacks) and all(a is b for a, b in pairs):
            return
        for number, (old, factor) in enumerate(zip(factors, self.factors, strict=True)):
            if factor.inverse is not old.inverse:
                self._put(old, factor)
                self.factors[number] = old
        for number, (kept, new) in enumerate(zip(products, self.products, strict=True)):
            if new is not kept:
                torch._foreach_copy_(kept, new)
                self.products[number] = kept
        for number in range(len(self.buckets)):
            for side in ("A", "G"):
                self._cache.pop((number, side), None)
        for key, kept in joined.items():
            self._join_into(kept, *key)

    def _groups(self) -> list[Group]:
        """Layers that share an A, in the order of the layers that have it."""
        groups: dict[int, list[int]] = {}
        for i in range(len(self.layers)):
            groups.setdefault(self.input_of.get(i, i), []).append(i)
        return list(groups.items())

    def _cost(self, leader: int, members: Sequence[int]) -> int:
        """Of a group's factorizations."""
        costs = [self._shape(leader).cost("A", "compute")]
        costs += [self._shape(i).cost("G", "compute") for i in members]
        return sum(costs)

    def _spread(self, sent: Sequence[Key], fresh: Callable[[int], core_kfac.Factor]) -> None:
        """Send inverses or eigenbases from their owners to their users.

        Args:
            sent: whose.
            fresh: number of a stack of factors -> the stack, computed when the first of it leaves.
        """
        if self.ranks.alone:
            return
        # One size after the other, as they are computed.
        sizes = list(dict.fromkeys(self._kind(*key) for key in sent))
        keys = sorted(sent, key=lambda key: sizes.index(self._kind(*key)))
        parcels = []
        for key in keys:
            i, side = key
            layer, at = self.layers[i], 0 if side == "A" else 1
            dtype = self.inv_dtype or at_least_single(layer.dtype)
            size = layer.blocks * self._packed_size(layer.sizes[at], layer.diagonal[at])
            owner = self.placement.owner_of[key]
            parcels.append(Parcel(layer.name, (size,), dtype, owner, self._users(key)))

        def content(number: int) -> torch.Tensor:
            place = self.places[keys[number]]
            return self._packed(fresh(place.bucket), slice(place.start, place.stop))

        found = self.ranks.send(
            parcels, content, lambda n: self.layers[keys[n][0]].device, "K-FAC's exchange of inverses"
        )
        for number, flat in found.items():
            key = keys[number]
            kind = self._kind(*key)
            blocks = self.layers[key[0]].blocks
            self.received[key] = self._unpacked(flat.reshape(blocks, -1), kind[0], kind[1])

    def _packed_size(self, side: int, diagonal: bool) -> int:
        """Numbers that travel for one block: the inverse or basis, and whether there is one."""
        if self.rule.keeps_eigenbases:
            return side + 1 if diagonal else side * side + side + 1
        if diagonal:
            return side + 1
        halved = self.symmetric or self.storage.packed
        return (math.prod(packed_shape(side)) if halved else side * side) + 1

    def _packed(self, factor: core_kfac.Factor, at: slice) -> torch.Tensor:
        """(blocks, packed size)"""
        inverse = rows_of(factor.inverse, at)
        if isinstance(inverse, core_kfac.Eigen):
            parts = [inverse.values] if inverse.vectors is None else [inverse.values, inverse.vectors]
        elif self.symmetric and inverse.ndim == 3 and not self.storage.packed:
            parts = [pack(inverse, symmetric=True)]
        else:
            parts = [inverse]
        ready = factor.ready[at].to(parts[0].dtype)
        return torch.cat([*(x.reshape(x.shape[0], -1) for x in parts), ready[:, None]], dim=1)

    def _unpacked(self, flat: torch.Tensor, side: int, diagonal: bool) -> tuple[Any, torch.Tensor]:
        ready, flat = flat[:, -1] != 0, flat[:, :-1]
        if self.rule.keeps_eigenbases:
            values = flat[:, :side]
            vectors = None if diagonal else flat[:, side:].reshape(-1, side, side)
            return core_kfac.Eigen(vectors, values), ready
        if diagonal:
            return flat, ready
        if self.symmetric or self.storage.packed:
            packed = flat.reshape(-1, *packed_shape(side))
            return packed if self.storage.packed else unpack(packed), ready
        return flat.reshape(-1, side, side), ready

    def _dampings(self, damping: float, groups: Sequence[Group]) -> list[Any]:
        """What goes onto the diagonals of each stack of factors, where these groups' are."""
        if self.factor_scaling == "kfac_pytorch":  # the whole damping on both sides
            return [0.0 if self.rule.keeps_eigenbases else damping for _ in self.factors]
        if self.rule.keeps_eigenbases:
            return [0.0 for _ in self.factors]
        keys = [(leader, "A") for leader, _ in groups]
        keys += [(i, "G") for _, members in groups for i in members]
        mean_of = self._mean_eigenvalues(keys)
        alike: dict[Any, list[Group]] = {}  # groups that share the damping out by one rule
        means: dict[int, Pair] = {}  # by leader
        for leader, members in groups:
            # One A, so one π for all that share it: from the mean of their G's. No number among
            # these G's may leave its damping to an A that has to suit the others, too.
            mean_G = mean_of[members[0], "G"]
            if len(members) > 1:
                mean_G = torch.stack([mean_of[i, "G"] for i in members]).mean(0)
            mean_A = mean_of[leader, "A"]
            d_in, d_out = self.layers[leader].sizes
            sizes = min(d_in, 2), min(d_out, 2) if len(members) == 1 else 2
            means[leader] = mean_A, mean_G
            alike.setdefault((sizes, mean_A.dtype, mean_G.dtype, mean_A.device), []).append(
                (leader, members)
            )
        share_of: dict[Key, torch.Tensor] = {}
        for (sizes, *_), some in alike.items():
            pairs = [means[leader] for leader, _ in some]
            of_A, of_G = (torch.cat(side) for side in zip(*pairs, strict=True))
            shares = self.rule.split_damping(of_A, of_G, damping, sizes)
            blocks = [mean_A.shape[0] for mean_A, _ in pairs]
            split = (share.split(blocks) for share in shares)
            for (leader, members), for_A, for_G in zip(some, *split, strict=True):
                share_of[leader, "A"] = for_A
                share_of |= {(i, "G"): for_G for i in members}
        dampings = []
        for factor, bucket in zip(self.factors, self.factor_buckets, strict=True):
            own: list[torch.Tensor] = []
            for m in bucket.members:
                share = share_of.get(self.owners[m.index])
                own.append(factor.weight.new_zeros(m.stop - m.start) if share is None else share)
            dampings.append(torch.cat(own) if len(own) > 1 else own[0])
        return dampings

    def _mean_eigenvalues(self, keys: Sequence[Key]) -> dict[Key, torch.Tensor]:
        """(blocks,) of factors, wherever they are."""
        parts = [self.storage.mean_eigenvalue(factor) for factor in self.factors]
        here: dict[Key, torch.Tensor] = {}
        for mean, bucket in zip(parts, self.factor_buckets, strict=True):
            sizes = [m.stop - m.start for m in bucket.members]
            own = (self.owners[m.index] for m in bucket.members)
            here |= zip(own, mean.split(sizes), strict=True)

        def elsewhere(i: int) -> torch.Tensor:
            layer = self.layers[i]
            dtype = at_least_single(self.factor_dtype or layer.dtype)
            return torch.zeros(layer.blocks, dtype=dtype, device=layer.device)

        found = {key: here[key] if key in here else elsewhere(key[0]) for key in keys}
        if self.ranks.alone:
            return found
        joined = torch.cat([mean.to(self.ranks.device, torch.float64) for mean in found.values()])
        total = self.ranks.total(joined, "K-FAC's exchange of traces")
        pieces = total.split([mean.shape[0] for mean in found.values()])
        return {key: piece.to(found[key]) for key, piece in zip(found, pieces, strict=True)}

    def _refreshed(self, number: int, damping: Any, warm: bool) -> Attempt:
        """New inverses or eigenbases of a stack of factors in new memory."""
        old = self.factors[number]
        parts, portions = [], self.storage.portions(old)
        for at in portions:
            part = self.storage.full_factor(factor_rows(old, at) if len(portions) > 1 else old)
            new = self.rule.refresh_factor(part, _rows(damping, at), warm=warm)
            parts.append((self.storage.keep(new.inverse), new.ready, new.failures))
        inverses, ready, failures = zip(*parts, strict=True)
        if len(parts) == 1:
            new = old._replace(inverse=inverses[0], ready=ready[0], failures=failures[0])
        else:
            new = old._replace(
                inverse=_joined(inverses), ready=torch.cat(ready), failures=torch.cat(failures)
            )
        self.factors[number] = new
        return Attempt(number, slice(0, len(old.failures)), new.failures > old.failures, damping)

    def _settle(self, attempts: Sequence[Attempt]) -> bool:
        """Look which factorizations failed, of all attempts in one wait, and try those again.

        Returns:
            Whether any failed.
        """
        ready = [self.factors[attempt.number].ready for attempt in attempts]
        flags = read_flags([attempt.failed for attempt in attempts] + ready)
        for attempt, mask, failed, known in zip(
            attempts, ready, flags[: len(attempts)], flags[len(attempts) :], strict=True
        ):
            if any(failed):
                self._try_again(attempt)
                known = mask.tolist()
            self._cache[attempt.number, "stack is ready"] = all(known)
        return any(map(any, flags[: len(attempts)]))

    def _try_again(self, attempt: Attempt) -> None:
        """A factor that failed gets more damping, then float64, then keeps the inverse before it."""
        some = factor_rows(self.factors[attempt.number], attempt.at)
        left = []
        for part in self.storage.portions(some):
            here, failed = factor_rows(some, part), attempt.failed[part]
            new, damping = self.storage.full_factor(here), _rows(attempt.damping, part)
            for boost, dtype in _RETRIES:
                if not bool(failed.any()):
                    break
                given = new if dtype is None else new._replace(average=new.average.to(dtype))
                again = self.rule.refresh_factor(given, damping, boost=boost)
                saved = failed & (again.failures == new.failures)
                self.retries += int(saved.sum())
                new = new._replace(
                    inverse=core_kfac.where(saved, again.inverse, new.inverse),
                    ready=new.ready | saved,
                    failures=new.failures - saved.to(new.failures),
                )
                failed = failed & ~saved
            self._put(here, new._replace(inverse=self.storage.keep(new.inverse)))
            left.append(failed)
        lost = torch.cat(left).tolist()
        first = attempt.at.start
        names = ", ".join(
            self._label(self.owners[m.index])
            for m in self.factor_buckets[attempt.number].members
            if any(lost[max(m.start - first, 0) : max(m.stop - first, 0)])
        )
        if names:
            warn_user(
                f"factorizations failed, also with more damping and in float64; the inverses before "
                f"them stay in use: {names}"
            )

    def _gathered(self, number: int, side: str) -> tuple[Any, torch.Tensor]:
        """(inverses as they are kept, ready) of a side of a bucket's layers: a view of neighbours."""
        known: Any = self._cache.get((number, side))
        if known is not None:
            return known
        neighbours = self._neighbours(number, side)
        if neighbours is not None:
            factor, index = self.factors[neighbours[0]], neighbours[1]
            found = rows_of(factor.inverse, index), factor.ready[index]
        else:
            parts = [self._inverse_of(m.index, side) for m in self.buckets[number].members]
            found = _joined([part[0] for part in parts]), torch.cat([part[1] for part in parts])
            if self.storage.packed:  # to save memory: no second copy is kept
                return found
        self._cache[number, side] = found
        return found

    def _neighbours(self, number: int, side: str) -> tuple[int, slice] | None:
        """The stack, and its part, that a side of a bucket's layers is; None: it is in several."""
        places = [self.places.get(self._key(m.index, side)) for m in self.buckets[number].members]
        here = [place for place in places if place is not None]
        pairs = itertools.pairwise(here)
        if len(here) < len(places) or any(a.bucket != b.bucket or a.stop != b.start for a, b in pairs):
            return None
        return here[0].bucket, slice(here[0].start, here[-1].stop)


def _runs(bucket: buckets.Bucket, chosen: Sequence[bool]) -> list[slice]:
    """Where chosen members of a bucket are, neighbours together."""
    runs: list[slice] = []
    for member, here in zip(bucket.members, chosen, strict=True):
        if here and runs and runs[-1].stop == member.start:
            runs[-1] = slice(runs[-1].start, member.stop)
        elif here:
            runs.append(slice(member.start, member.stop))
    return runs


def _rows(damping: Any, at: slice) -> Any:
    """Of a number, or of one for each block, those of some blocks."""
    return damping[at] if isinstance(damping, torch.Tensor) else damping


def _joined(inverses: Sequence[Any]) -> Any:
    if not isinstance(inverses[0], core_kfac.Eigen):
        return torch.cat(list(inverses))
    vectors = [x.vectors for x in inverses if x.vectors is not None]
    values = torch.cat([x.values for x in inverses])
    return core_kfac.Eigen(torch.cat(vectors) if vectors else None, values)
