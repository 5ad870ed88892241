"""Directions of the layers whose gradients are here, and their products with these gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from suite.core import buckets
from suite.core.linalg import inner_product
from suite.torch.factors import LayerFactors


class Directions:
    """Directions, computed a bucket of layers at a time, when one of them is asked for."""

    def __init__(
        self,
        factors: LayerFactors,
        gradients: Mapping[int, torch.Tensor],
        known: Mapping[int, list[torch.Tensor]],
        damping: float,
        rates: Mapping[int, Any],
    ) -> None:
        self._factors, self._gradients, self._damping = factors, gradients, damping
        self._rates = rates
        self._product: dict[int, torch.Tensor] = {}  # by bucket of layers with one rate
        self._number_of = {m.index: n for n, b in enumerate(factors.buckets) for m in b.members}
        self._known = known
        self._found: list[Any] = [None] * len(factors.layers)

    def parts(self, index: int) -> list[torch.Tensor]:
        """The direction of a layer with a gradient: the weight's, and the bias's if there is one."""
        known = self._known.get(index)
        return self._factors.layers[index].split(self.of(index)) if known is None else known

    def of(self, index: int) -> torch.Tensor:
        """(blocks, d_out, d_in) of a layer with a gradient, which is not known from rows."""
        if self._found[index] is None:
            self._compute(self._number_of[index])
        direction: torch.Tensor = self._found[index]
        return direction

    def products(self, chosen: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """⟨direction, gradient⟩: (layer, its product, or that of all layers of one bucket and rate)."""
        by_bucket: dict[int, list[int]] = {}
        for i in chosen:
            by_bucket.setdefault(self._number_of[i], []).append(i)
        found = []
        for number, layers in by_bucket.items():
            self.of(layers[0])
            count = sum(m.index in self._gradients for m in self._factors.buckets[number].members)
            if number in self._product and len(layers) == count:
                found.append((layers[0], self._product[number]))
            else:
                found += [(i, inner_product(self.of(i), self._gradients[i])) for i in layers]
        return found

    def _compute(self, number: int) -> None:
        bucket, gradients = self._factors.buckets[number], self._gradients
        like = next(gradients[m.index] for m in bucket.members if m.index in gradients)
        parts = [
            gradients[m.index]
            if m.index in gradients
            else torch.zeros_like(like[:1]).expand(m.stop - m.start, -1, -1)
            for m in bucket.members
        ]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        found: list[Any] = [None] * len(self._found)
        direction = self._factors.directions(number, joined, self._damping)
        buckets.scatter(bucket, direction, found)
        rates = [self._rates[m.index] for m in bucket.members if m.index in self._rates]
        if rates and all(_is_same(rate, rates[0]) for rate in rates):
            self._product[number] = inner_product(direction, joined)
        for member in bucket.members:
            if member.index in gradients:
                self._found[member.index] = found[member.index]


def _is_same(rate: Any, other: Any) -> bool:
    """Whether two learning rates are known to be equal, the host not waiting for tensors."""
    tensors = isinstance(rate, torch.Tensor) or isinstance(other, torch.Tensor)
    return rate is other or (not tensors and rate == other)


def squared_rates_times(products: Sequence[tuple[Any, torch.Tensor]]) -> torch.Tensor:
    """(): Σ lr² x over pairs (lr, x)."""
    if not products:
        return torch.zeros(())
    dtype = functools.reduce(torch.promote_types, (x.dtype for _, x in products))
    device = products[0][1].device
    terms = torch.stack([x.to(device, dtype) for _, x in products])
    rates = [rate for rate, _ in products]
    if any(isinstance(rate, torch.Tensor) for rate in rates):
        factors = torch.stack([torch.as_tensor(rate, dtype=dtype, device=device) for rate in rates])
    else:
        factors = torch.tensor(rates, dtype=dtype, device=device)
    return (factors * factors * terms).sum()
