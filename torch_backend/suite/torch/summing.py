"""Statistics of all ranks, summed and normalized where each factor is averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from suite.core import statistics
from suite.core.packing import pack, packed_shape, unpack
from suite.core.statistics import LayerStatistics
from suite.torch.agreement import Agreement
from suite.torch.capture import Captured, LayerCapture
from suite.torch.collectives import Parcel
from suite.torch.factor_store import Key
from suite.torch.factors import LayerFactors
from suite.torch.inplace import LARGEST_JOINED, all_times


class Scaling(NamedTuple):
    """What turns sums into factors."""

    terms: torch.Tensor  # (): N, of all ranks
    loss_reduction: statistics.LossReduction
    factor_scaling: statistics.FactorScaling


def summed_factors(
    captures: Sequence[LayerCapture],
    taken: Sequence[Captured | None],
    agreed: Agreement,
    factors: LayerFactors,
    scaling: Scaling,
) -> dict[Key, torch.Tensor]:
    """Normalized (A, G) of the layers that some rank has seen, of the factors that are kept here.

    Args:
        captures, taken: by layer; `taken` of this rank.
    """
    if factors.ranks.alone:
        return _all_normalized(captures, taken, scaling)
    turned = zip(captures, agreed.turned, strict=True)
    packs = [_Pack(capture, factors.symmetric, flag) for capture, flag in turned]
    keys = [key for key in factors.all_keys() if agreed.seen[key[0]]]
    parcels = [
        Parcel(
            factors.layers[i].name,
            (packs[i].size(side),),
            captures[i].dtype,
            -1,
            (factors.placement.owner_of[i, side],),
        )
        for i, side in keys
    ]

    def part(number: int) -> torch.Tensor | None:
        i, side = keys[number]
        captured = taken[i]
        if captured is None:
            return None
        if scaling.factor_scaling == "kfac_pytorch":  # T is this rank's: the owner may not have run it
            captured = _over_places(captured, captures[i].shape_of_places)
        return packs[i].packed(captured, side)

    sums = factors.ranks.sum_to_owners(
        parcels, part, lambda n: factors.layers[keys[n][0]].device, "K-FAC's sum of statistics"
    )
    return {keys[n]: packs[keys[n][0]].factor(flat, keys[n][1], scaling) for n, flat in sums.items()}


def summed_products(
    captures: Sequence[LayerCapture],
    taken: Sequence[Captured | None],
    measured: Sequence[bool],
    factors: LayerFactors,
    scaling: Scaling,
) -> dict[int, torch.Tensor]:
    """Normalized second moments in the eigenbases, of the layers whose directions are computed here.

    Args:
        captures, taken: by layer; `measured`: whether any rank has such moments of a layer.
    """
    ranks, layers = factors.ranks, factors.layers
    chosen = [i for i, here in enumerate(measured) if here]
    shapes = {i: tuple(captures[i].products.shape) for i in chosen}
    owners = {i: factors.placement.owner_of[i, "G"] for i in chosen}
    sums: dict[int, torch.Tensor]
    parcels = [Parcel(layers[i].name, shapes[i], captures[i].dtype, -1, (owners[i],)) for i in chosen]

    def part(number: int) -> torch.Tensor | None:
        captured = taken[chosen[number]]
        return None if captured is None else captured.products

    def device_of(number: int) -> torch.device:
        return layers[chosen[number]].device

    sums = ranks.sum_to_owners(parcels, part, device_of, "K-FAC's sum of second moments")
    parcels = [
        p._replace(source=owners[i], destinations=factors.placement.workers_of(i))
        for i, p in zip(chosen, parcels, strict=True)
    ]
    sums |= ranks.send(parcels, lambda n: sums[n], device_of, "K-FAC's exchange of second moments")
    return {
        chosen[n]: statistics.normalize_products(x, scaling.terms.to(x.device), scaling.loss_reduction)
        for n, x in sums.items()
    }


def _all_normalized(
    captures: Sequence[LayerCapture], taken: Sequence[Captured | None], scaling: Scaling
) -> dict[Key, torch.Tensor]:
    """`_normalized` of every layer, those alike in a few calls; the sums are used up."""
    found: dict[Key, torch.Tensor] = {}
    alike: dict[Any, dict[int, LayerStatistics]] = {}
    for i, captured in enumerate(taken):
        if captured is None:
            continue
        places = captures[i].shape_of_places
        if captured.transposed is not None:
            found[i, "A"], found[i, "G"] = _normalized(captured, scaling, places)
        else:
            main = captured.main
            key = places, main.A.device, main.A.dtype, main.G.dtype
            alike.setdefault(key, {})[i] = main
    kind, reduction = scaling.factor_scaling, scaling.loss_reduction
    for (places, device, of_A, of_G), sums in alike.items():
        rows = torch.stack([main.rows for main in sums.values()])
        terms = scaling.terms.to(device).expand(len(sums))
        A, G = [main.A for main in sums.values()], [main.G for main in sums.values()]
        A = all_times(A, statistics.input_scale(rows, kind, places).to(of_A))
        if kind == "kfac_pytorch" or reduction == "mean":
            G = all_times(G, statistics.gradient_scale(rows, terms, reduction, kind, places).to(of_G))
        units: dict[Any, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        for i, *pair in zip(sums, A, G, strict=True):
            found[i, "A"], found[i, "G"] = pair
            if captures[i].layer.has_gradients_in_A:
                alone = i if pair[0].numel() > LARGEST_JOINED else None
                units.setdefault((pair[0].shape[1:], pair[1].shape[1:], alone), []).append((i, *pair))
            elif captures[i].counts_each:
                found[i, "A"], found[i, "G"] = _of_kind(captures[i], *pair)
        for those in units.values():
            found |= _with_unit_G(those)
    return found


def _with_unit_G(layers: list[tuple[int, torch.Tensor, torch.Tensor]]) -> dict[Key, torch.Tensor]:
    """`_of_kind` of many layers' (number, A, G) in one call: there are as many norms as other layers."""
    if len(layers) == 1:
        i, A, G = layers[0]
        A, G = statistics.with_unit_G(A, G)
        return {(i, "A"): A, (i, "G"): G}
    counts = [len(A) for _, A, _ in layers]
    A = torch.cat([A for _, A, _ in layers])
    G = torch.cat([G.expand(n, *G.shape[1:]) for n, (_, _, G) in zip(counts, layers, strict=True)])
    A, G = statistics.with_unit_G(A, G)
    found: dict[Key, torch.Tensor] = {}
    for (i, _, own), of_A, of_G in zip(layers, A.split(counts), G.split(counts), strict=True):
        found[i, "A"], found[i, "G"] = of_A, of_G[: len(own)]
    return found


def _of_kind(
    capture: LayerCapture, A: torch.Tensor, G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of a layer's kind, of those whose mean is over all rows."""
    if capture.layer.has_gradients_in_A:
        return statistics.with_unit_G(A, G)
    if capture.counts_each:  # of a stack of matrices each one's over its own rows
        return statistics.mean_of_each(A), G
    return A, G


def _normalized(captured: Captured, scaling: Scaling, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors; the sums that were captured are used up for them."""
    A, G = _scaled(captured.main, scaling, places)
    if captured.transposed is not None:
        A, G = statistics.add_transposed(A, G, *_scaled(captured.transposed, scaling))
    return A, G


def _scaled(
    sums: LayerStatistics, scaling: Scaling, places: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    terms = scaling.terms.to(sums.A.device)
    kind = scaling.factor_scaling
    A_scale = statistics.input_scale(sums.rows, kind, places)
    G_scale = statistics.gradient_scale(sums.rows, terms, scaling.loss_reduction, kind, places)
    return sums.A.mul_(A_scale.to(sums.A.dtype)), sums.G.mul_(G_scale.to(sums.G.dtype))


class _Pack:
    """How the sums of one layer travel: what an owner of a side needs, in one vector."""

    def __init__(self, capture: LayerCapture, symmetric: bool, turned: bool) -> None:
        self.capture, self.symmetric = capture, symmetric
        self.turned = turned  # used as the transpose, too: each side of the factors needs all sums

    def _shapes(self, side: str) -> list[tuple[int, ...]]:
        capture = self.capture
        A = (1, capture.A.numel()) if capture.layer.spec.kind == "free" else tuple(capture.A.shape)
        G = tuple(capture.G.shape)
        if not self.turned:
            return [A if side == "A" else G, (1,)]
        return [A, G, (1,), G, A, (1,)]

    def _packs(self, shape: tuple[int, ...]) -> bool:
        return self.symmetric and len(shape) == 3 and shape[1] == shape[2]

    def size(self, side: str) -> int:
        return sum(
            s[0] * s[1] * (s[1] + 1) // 2 if self._packs(s) else math.prod(s) for s in self._shapes(side)
        )

    def packed(self, captured: Captured, side: str) -> torch.Tensor:
        main, other = captured.main, captured.transposed
        parts = [main.A if side == "A" else main.G, main.rows]
        if self.turned:
            parts = [main.A, main.G, main.rows]
            if other is None:
                parts += [main.A.new_zeros(s) for s in self._shapes(side)[3:]]
            else:
                parts += [other.A, other.G, other.rows]
        shapes = self._shapes(side)
        packed = [
            pack(x.reshape(shape), symmetric=True) if self._packs(shape) else x
            for x, shape in zip(parts, shapes, strict=True)
        ]
        return torch.cat([x.to(main.A.dtype).reshape(-1) for x in packed])

    def factor(self, flat: torch.Tensor, side: str, scaling: Scaling) -> torch.Tensor:
        """Undo `packed` of the sum, and normalize."""
        parts, at = [], 0
        for shape in self._shapes(side):
            packed = self._packs(shape)
            size = shape[0] * shape[1] * (shape[1] + 1) // 2 if packed else math.prod(shape)
            piece = flat[at : at + size]
            at += size
            if packed:
                parts.append(unpack(piece.reshape(shape[0], *packed_shape(shape[1]))))
            else:
                parts.append(piece.reshape(shape))
        if self.turned:
            main = LayerStatistics(parts[0], parts[1], parts[2][0])
            other = LayerStatistics(parts[3], parts[4], parts[5][0])
            used = other if bool(other.rows > 0) else None
            captured = Captured(main, used, (main.rows, None), None, 0.0, ())
            return _normalized(captured, scaling, 1)[0 if side == "A" else 1]
        rows = parts[1].to(parts[0].dtype, copy=True).reshape(1, 1, 1)  # G, where A has gradients
        pair = (parts[0], rows) if side == "A" else (rows, parts[0])
        scaled = _scaled(LayerStatistics(*pair, parts[1][0]), scaling)
        return _of_kind(self.capture, *scaled)[0 if side == "A" else 1]


def _over_places(captured: Captured, places: int) -> Captured:
    main = captured.main
    return captured._replace(main=main._replace(A=main.A / places**2, G=main.G / places**2))
