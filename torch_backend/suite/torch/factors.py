"""The four verbs on the factors of a model's layers, wherever those are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from suite.core import kfac as core_kfac
from suite.core import linalg
from suite.torch.factor_refresh import FactorRefresh
from suite.torch.factor_store import Key
from suite.torch.inplace import all_average_in, average_in, joins
from suite.torch.rows import Bases


class LayerFactors(FactorRefresh):
    """Running averages of A and G, what is derived from them, and directions."""

    def update(
        self,
        new: Mapping[Key, torch.Tensor],
        seen: Mapping[Key, bool],
        factor_decay: float,
        finite: torch.Tensor | None = None,
    ) -> None:
        """Average normalized second moments in.

        Args:
            new: of the factors that are here.
            seen: whether there is evidence for a factor; one without keeps its average.
            factor_decay: β.
            finite: (), whether all numbers of the step are; nothing changes if not. None: they are.
        """
        self.allocate()
        self.updated = True
        if not self.ranks.alone:
            self.seen.update(i for (i, side), here in seen.items() if side == "G" and here)
        for number, bucket in enumerate(self.factor_buckets):
            factor, known = self.factors[number], (number, "parts")
            if known not in self._cache:
                owners = {self.owners[m.index][0] for m in bucket.members}
                stacks = {i for i in owners if self.layers[i].spec.kind == "stack"}
                self._cache[number, "stacks"] = stacks
                ends = [(m.start, m.stop) for m in bucket.members]
                self._cache[known] = [factor.average[a:b] for a, b in ends]
            keys, stacks = [self.owners[m.index] for m in bucket.members], self._cache[number, "stacks"]
            if all(seen[key] for key in keys) and not stacks:
                given = self.storage.keep_all([new[key] for key in keys])
                if all(map(joins, given)):
                    average_in(factor.average, torch.cat(given), factor_decay, finite)
                else:
                    all_average_in(self._cache[known], given, factor_decay, finite)
                average_in(factor.weight, torch.ones_like(factor.weight), factor_decay, finite)
                continue
            for key, member, average in zip(keys, bucket.members, self._cache[known], strict=True):
                if not seen[key]:
                    continue
                weight = factor.weight[member.start : member.stop]
                kept, one = self.storage.keep(new[key]), torch.ones_like(weight)
                if key[0] in stacks:
                    kept, one = _where_present(new[key], (kept, average), (one, weight))
                average_in(average, kept, factor_decay, finite)
                average_in(weight, one, factor_decay, finite)

    def update_products(
        self,
        new: Mapping[int, torch.Tensor],
        factor_decay: float,
        finite: torch.Tensor | None = None,
    ) -> None:
        """Average normalized second moments in the eigenbasis in, of the layers that have new ones.

        Args:
            finite: see `update`.
        """
        for number, bucket in enumerate(self.buckets):
            average, weight = self.products[number]
            for member in bucket.members:
                at = slice(member.start, member.stop)
                if member.index not in new:
                    continue
                products, one = new[member.index], torch.ones_like(weight[at])
                if self.layers[member.index].spec.kind == "stack":
                    products, one = _where_present(products, (products, average[at]), (one, weight[at]))
                average_in(average[at], products, factor_decay, finite)
                average_in(weight[at], one, factor_decay, finite)

    def bases(self, index: int) -> Bases | None:
        """The eigenvectors of a layer in which second moments are to be summed, for EKFAC."""
        layer = self.layers[index]
        # Of a table that is tied to a head the sums would miss the lookups.
        tied = any(site.transposed for site in layer.sites)
        known = layer.spec.kind in ("dense", "convolution", "transposed", "stack") and not tied
        if self.rule.compute_method != "ekfac" or not known or not self.is_ready(index):
            return None
        sides = [self._inverse_of(index, side)[0].vectors for side in ("A", "G")]
        return sides[0], sides[1]

    def directions(self, number: int, gradient: torch.Tensor, damping: float) -> torch.Tensor:
        """(blocks, d_out, d_in) gradients of a bucket's layers, preconditioned."""
        A, G = (self.storage.full(self._gathered(number, side)[0]) for side in ("A", "G"))
        products = self._products(number, slice(None))
        direction: torch.Tensor = self.rule.apply(A, G, self._ready(number), gradient, damping, products)
        return direction

    def _products(self, number: int, at: slice) -> torch.Tensor | None:
        """(blocks, d_out, d_in): eigenvalues' products in a bucket, if they are kept."""
        if not self.keeps_products:
            return None
        average, weight = self.products[number]
        return average[at] / weight[at, None, None]

    def _products_of(self, index: int) -> torch.Tensor | None:
        """`_products` of one layer."""
        for number, bucket in enumerate(self.buckets if self.keeps_products else ()):
            for m in bucket.members:
                if m.index == index:
                    return self._products(number, slice(m.start, m.stop))
        return None

    def _ready(self, number: int) -> torch.Tensor | None:
        """(blocks,): which blocks of a bucket have inverses; None: all. Only asked after a refresh."""
        if (number, "ready") not in self._cache:
            ready = None
            if not self._stacks_are_ready(m.index for m in self.buckets[number].members):
                ready = self._gathered(number, "A")[1] & self._gathered(number, "G")[1]
                ready = None if bool(ready.all()) else ready
            self._cache[number, "ready"] = ready
        found: torch.Tensor | None = self._cache[number, "ready"]
        return found

    def readiness(self) -> tuple[list[torch.Tensor | None], list[tuple[bool, ...] | None]]:
        """`_ready` of all buckets, and the numbers in it. Only asked after a refresh."""
        known = (-1, "readiness")
        if known not in self._cache:
            masks = [self._ready(number) for number in range(len(self.buckets))]
            flags = [None if mask is None else tuple(mask.tolist()) for mask in masks]
            self._cache[known] = masks, flags
        found: tuple[list[torch.Tensor | None], list[tuple[bool, ...] | None]] = self._cache[known]
        return found

    def rows_fit(
        self,
        index: int,
        rows: tuple[torch.Tensor, torch.Tensor],
        gradient: Sequence[torch.Tensor],
        damping: float,
    ) -> torch.Tensor:
        """(1,): whether a layer's direction can be made of rows.

        Args:
            rows: (1, n, d_in without bias) inputs and (1, n, d_out) gradients of outputs.
            gradient: the weight's, and the bias's if there is one.
        """
        if (index, "probes") not in self._cache:
            self._cache[index, "probes"] = core_kfac.probes_for(*self._inverses_of(index), damping)
        weight, bias = gradient[0][None], gradient[1][None] if len(gradient) > 1 else None
        fits: torch.Tensor = core_kfac.rows_fit((weight, bias), *rows, self._cache[index, "probes"])
        return fits

    def direction_of_rows(
        self, index: int, rows: tuple[torch.Tensor, torch.Tensor], damping: float, *, bias: bool
    ) -> list[torch.Tensor]:
        """A layer's direction, the weight's part and perhaps the bias's; rows as in `rows_fit`."""
        inverses, products = self._inverses_of(index), self._products_of(index)
        direction = self.rule.apply_to_rows(
            *inverses, *rows, bias=bias, damping=damping, products=products
        )
        return [x[0] for x in direction if x is not None]

    def _inverses_of(self, index: int) -> tuple[Any, Any]:
        A, G = (self.storage.full(self._inverse_of(index, side)[0]) for side in ("A", "G"))
        return A, G

    def report(self, index: int) -> dict[str, Any]:
        """Plain numbers about a layer's factors, as far as this rank has them."""
        record: dict[str, Any] = {}
        for side in ("A", "G"):
            place = self.places.get(self._key(index, side))
            if place is None:
                continue
            factor = self.factors[place.bucket]
            at = slice(place.start, place.stop)
            weight = factor.weight[at].clamp_min(1e-30)
            average = self.storage.full(factor.average[at])
            average = average / weight.reshape(-1, *(1,) * (average.ndim - 1))
            record[f"condition_{side}"] = _condition(average)
            record[f"failures_{side}"] = int(factor.failures[at].sum())
        record["ready"] = self.is_ready(index)
        return record


def _condition(average: torch.Tensor) -> float:
    """About the largest over the smallest eigenvalue, worst over the blocks."""
    if average.ndim > 2:
        return float(linalg.condition_number(average).amax())
    least = average.float().amin(-1)
    ratio = torch.where(least <= 0, 1e38, average.float().amax(-1) / least)
    return float(ratio.clamp_max(1e38).amax())


def _where_present(
    sums: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The first of each pair, and the second for a stack's matrices whose `sums` are 0.

    An expert without rows keeps its average.
    """
    present = (sums.flatten(1) != 0).any(1)
    return tuple(torch.where(present.reshape(-1, *(1,) * (a.ndim - 1)), a, b) for a, b in pairs)
