"""Directions of the layers whose gradients are here, and their products with these gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from suite.core.linalg import inner_product
from suite.torch.factors import LayerFactors
from suite.torch.layers import joined_gradients, split_directions


class Directions:
    """Directions, computed a bucket of layers at a time, when one of them is asked for."""

    def __init__(
        self,
        factors: LayerFactors,
        gradients: Mapping[int, Sequence[torch.Tensor]],
        known: Mapping[int, list[torch.Tensor]],
        damping: float,
        rates: Mapping[int, Sequence[Any]],
    ) -> None:
        """
        Args:
            gradients: the weight's and perhaps the bias's.
            known: directions that need no product.
            rates: learning rates of the weight and perhaps the bias, of layers that `products` are of.
        """
        self._factors, self._gradients, self._damping = factors, gradients, damping
        self._rates = rates
        self._asked = {i for i in gradients if i not in known}
        self._product: dict[int, torch.Tensor] = {}  # by bucket of layers with one rate
        self._number_of = {m.index: n for n, b in enumerate(factors.buckets) for m in b.members}
        self._known = known
        self._found: dict[int, list[torch.Tensor]] = {}

    def parts(self, index: int) -> list[torch.Tensor]:
        """The direction of a layer with a gradient: the weight's, and the bias's if there is one."""
        if index in self._known:
            return self._known[index]
        if index not in self._found:
            self._compute(self._number_of[index])
        return self._found[index]

    def products(self, chosen: Sequence[int]) -> list[tuple[Any, torch.Tensor]]:
        """⟨direction, gradient⟩: (rate, product) of parameters, or of all layers of a bucket."""
        by_bucket: dict[int, list[int]] = {}
        found = []
        for i in chosen:
            if i in self._asked:
                by_bucket.setdefault(self._number_of[i], []).append(i)
            else:
                found += self._products_of(i)
        for number, layers in by_bucket.items():
            self.parts(layers[0])
            count = sum(m.index in self._asked for m in self._factors.buckets[number].members)
            if number in self._product and len(layers) == count:
                found.append((self._rates[layers[0]][0], self._product[number]))
                continue
            for i in layers:
                found += self._products_of(i)
        return found

    def _products_of(self, index: int) -> list[tuple[Any, torch.Tensor]]:
        given = zip(self._rates[index], self.parts(index), self._gradients[index], strict=False)
        return [(rate, inner_product(d, g.to(d.dtype))) for rate, d, g in given]  # a bias may have none

    def _compute(self, number: int) -> None:
        indices = [m.index for m in self._factors.buckets[number].members]
        layers = [self._factors.layers[i] for i in indices]
        like = next(self._gradients[i][0] for i in indices if i in self._asked)
        given = [
            self._gradients[i] if i in self._asked else layer.zeros(like)
            for i, layer in zip(indices, layers, strict=True)
        ]
        joined = joined_gradients(layers, given)
        direction = self._factors.directions(number, joined, self._damping)
        rates = [rate for i in indices for rate in self._rates.get(i, ())]
        if rates and all(_is_same(rate, rates[0]) for rate in rates):
            self._product[number] = inner_product(direction, joined)
        for i, parts in zip(indices, split_directions(layers, direction), strict=True):
            if i in self._asked:
                self._found[i] = parts


def _is_same(rate: Any, other: Any) -> bool:
    """Whether two learning rates are known to be equal, the host not waiting for tensors."""
    tensors = isinstance(rate, torch.Tensor) or isinstance(other, torch.Tensor)
    return rate is other or (not tensors and rate == other)


def squared_rates_times(products: Sequence[tuple[Any, torch.Tensor]]) -> torch.Tensor:
    """(): Σ lr² x over pairs (lr, x)."""
    if not products:
        return torch.zeros((), device="cpu")
    dtype = functools.reduce(torch.promote_types, (x.dtype for _, x in products))
    device = products[0][1].device
    alike: list[tuple[Any, list[torch.Tensor]]] = []
    for rate, x in products:
        if not alike or not _is_same(rate, alike[-1][0]):
            alike.append((rate, []))
        alike[-1][1].append(x.to(device, dtype))
    total = torch.zeros((), dtype=dtype, device=device)
    for rate, own in alike:
        if isinstance(rate, torch.Tensor):
            rate = rate.to(device, dtype, non_blocking=rate.is_cpu)
        total = total + torch.stack(own).sum() * rate * rate
    return total
