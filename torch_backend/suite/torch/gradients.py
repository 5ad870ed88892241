"""Gradients to where directions are computed, and directions to where parameters are.

Under data parallelism every rank has all gradients. Of sharded parameters (DTensors of FSDP2) each has
a part, a box of indices; the gradient workers of a layer get the whole from those who have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from suite.torch.collectives import Parcel
from suite.torch.dtensors import Box, box_of, deliveries, is_sharded, local, shape_of, size_of, slices
from suite.torch.factors import LayerFactors
from suite.torch.layers import Layer, Piece


class _Shipment(NamedTuple):
    """A parcel that is a box of a piece of a layer."""

    layer: int
    piece: int  # 0: the weight, 1: the bias
    box: Box
    parcel: Parcel


class GradientExchange:
    """Moves gradients and directions of all layers between ranks."""

    def __init__(self, layers: Sequence[Layer], factors: LayerFactors) -> None:
        self.layers, self.factors, self.ranks = layers, factors, factors.ranks
        self.sharded = any(is_sharded(p.parameter) for layer in layers for p in layer.pieces)
        self._boxes: list[list[list[Box]]] | None = None  # by rank, layer and piece
        self._inbound: list[_Shipment] = []
        self._outbound: list[_Shipment] = []
        self._planned: Any = None  # the placement they are for

    def whole(
        self, present: Sequence[int], moves: Callable[[nn.Parameter], bool]
    ) -> dict[int, list[torch.Tensor]]:
        """Weight's and bias's gradients of the layers `present` whose directions are computed here.

        Args:
            moves: whether the optimizer moves a parameter; nobody clears the gradients of others, which
                are zeros here.
        """
        rank, placement = self.ranks.rank, self.factors.placement
        mine = [i for i in present if placement.is_worker(i, rank)]
        if not self.sharded:
            here = {i: [_moved(piece, moves) for piece in self.layers[i].pieces] for i in mine}
            return {i: [x for x in parts if x is not None] for i, parts in here.items()}
        self._plan()
        chosen = set(present)
        shipments = [s for s in self._inbound if s.layer in chosen and moves(self._parameter_of(s))]
        found = self.ranks.send(
            [s.parcel for s in shipments],
            lambda n: self._part(shipments[n]),
            lambda n: self.layers[shipments[n].layer].device,
            "K-FAC's collection of sharded gradients",
        )
        result = {
            i: [
                torch.zeros(p.shape, dtype=p.dtype, device=self.layers[i].device)
                for p in self.layers[i].pieces
            ]
            for i in mine
        }
        for number, s in enumerate(shipments):
            if s.parcel.source == rank and rank in s.parcel.destinations:
                result[s.layer][s.piece][slices(s.box)] = self._part(s)
            elif number in found:
                result[s.layer][s.piece][slices(s.box)] = found[number]
        return result

    def deliver(
        self,
        present: Sequence[int],
        here: Sequence[int],
        parts_of: Callable[[int], Sequence[torch.Tensor]],
        changes_of: Callable[[Sequence[int]], torch.Tensor],
        coefficient_of: Callable[[torch.Tensor], torch.Tensor] | None,
        moves: Callable[[nn.Parameter], bool],
    ) -> torch.Tensor | None:
        """Put directions into the gradients' storage on all ranks.

        Args:
            present: the layers that have gradients.
            here: those of them whose directions are computed here.
            parts_of: layer -> its direction like its parameters, asked for when it leaves.
            changes_of: layers of those -> sums over them, which are added up over ranks.
            coefficient_of: the sums over all layers -> what to multiply directions with; None: nothing.
            moves: whether the optimizer moves a parameter; the gradients of others stay as they are.

        Returns:
            What `coefficient_of` returned.
        """
        self._plan()
        chosen, rank = set(present), self.ranks.rank
        shipments = [s for s in self._outbound if s.layer in chosen]

        def content(number: int) -> torch.Tensor:
            s = shipments[number]
            return parts_of(s.layer)[s.piece][slices(s.box)]

        found = self.ranks.send(
            [s.parcel for s in shipments],
            content,
            lambda n: self.layers[shipments[n].layer].device,
            "K-FAC's exchange of directions",
        )
        coefficient = None
        if coefficient_of is not None:
            coefficient = coefficient_of(self._over_ranks(here, changes_of))
        places: list[tuple[torch.Tensor, torch.Tensor]] = []  # (part of a gradient, what goes there)
        for number, s in enumerate(shipments):
            if number in found and moves(self._parameter_of(s)):
                places += self._place(s.layer, s.piece, s.box, found[number])
        for i in here:
            for j, (piece, part) in enumerate(zip(self.layers[i].pieces, parts_of(i), strict=True)):
                if not moves(piece.parameter):
                    continue
                if self._boxes is None:
                    if (gradient := piece.grad()) is not None:
                        places.append((gradient, part))
                elif size_of(box := self._box(rank, i, j)):
                    places += self._place(i, j, box, part[slices(box)])
        for device in dict.fromkeys(target.device for target, _ in places):
            own = [(target, part) for target, part in places if target.device == device]
            _write(own, None if coefficient is None else coefficient.to(device))
        return coefficient

    def _over_ranks(
        self, here: Sequence[int], changes_of: Callable[[Sequence[int]], torch.Tensor]
    ) -> torch.Tensor:
        """`changes_of` all layers, wherever they are."""
        ranks, placement = self.ranks, self.factors.placement
        if placement.groups == 1:
            return changes_of(here)
        # Of a layer's workers one tells: the first in its group.
        own = changes_of([i for i in here if placement.workers_of(i)[0] == ranks.rank])
        return ranks.total(own.to(ranks.device, torch.float64), "K-FAC's sum for kl_clip")

    def _place(
        self, i: int, j: int, box: Box, part: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where in a gradient `part` goes, and `part`; nothing for a bias that nothing used."""
        piece = self.layers[i].pieces[j]
        gradient = piece.parameter.grad
        if gradient is None:
            return []
        if not is_sharded(gradient):
            own_rows = piece.grad()
            assert own_rows is not None
            return [(own_rows, part)]
        own = _offset(piece, _box_of(piece), box)
        return [(local(gradient)[slices(own)], part)]

    # ---- who has and who needs what ------------------------------------------------------------

    def _plan(self) -> None:
        if self._planned is self.factors.placement or (self.ranks.alone and not self.sharded):
            return
        if self.sharded and self._boxes is None:
            boxes = [[_within(piece, _box_of(piece)) for piece in layer.pieces] for layer in self.layers]
            self._boxes = self.ranks.gather(boxes, "K-FAC's exchange of shard boundaries")
        placement = self.factors.placement
        self._planned = placement
        self._inbound, self._outbound = [], []
        for i, layer in enumerate(self.layers):
            workers = placement.workers_of(i)
            for j, piece in enumerate(layer.pieces):
                if self.sharded:
                    self._plan_inbound(i, j, workers)
                receivers: dict[tuple[int, Box], list[int]] = {}
                for rank in range(self.ranks.world):
                    source, box = placement.source(i, rank), self._box(rank, i, j)
                    if source != rank and size_of(box):
                        receivers.setdefault((source, box), []).append(rank)
                for (source, box), ranks in receivers.items():
                    parcel = Parcel(layer.name, shape_of(box), piece.dtype, source, tuple(ranks))
                    self._outbound.append(_Shipment(i, j, box, parcel))
        # Layers of one size after the other, as directions are computed.
        sizes = list(dict.fromkeys(layer.sizes for layer in self.layers))
        self._outbound.sort(key=lambda s: sizes.index(self.layers[s.layer].sizes))

    def _plan_inbound(self, i: int, j: int, workers: Sequence[int]) -> None:
        layer = self.layers[i]
        boxes = [self._box(rank, i, j) for rank in range(self.ranks.world)]
        dtype = layer.pieces[j].parameter.dtype
        for box, source, destinations in deliveries(boxes, workers):
            parcel = Parcel(layer.name, shape_of(box), dtype, source, destinations)
            self._inbound.append(_Shipment(i, j, box, parcel))

    def _box(self, rank: int, i: int, j: int) -> Box:
        """What a rank has of a piece, in the piece's indices."""
        if self._boxes is None:
            return tuple((0, n) for n in self.layers[i].pieces[j].shape)
        return self._boxes[rank][i][j]

    def _parameter_of(self, s: _Shipment) -> nn.Parameter:
        return self.layers[s.layer].pieces[s.piece].parameter

    def _part(self, s: _Shipment) -> torch.Tensor:
        piece = self.layers[s.layer].pieces[s.piece]
        gradient = piece.parameter.grad
        if gradient is None:
            return torch.zeros(shape_of(s.box), dtype=piece.parameter.dtype, device=self.ranks.device)
        return local(gradient)[slices(_offset(piece, _box_of(piece), s.box))]


def _write(
    places: Sequence[tuple[torch.Tensor, torch.Tensor]], coefficient: torch.Tensor | None
) -> None:
    """Second tensors into the first, times the coefficient."""
    targets = [target for target, _ in places]
    if coefficient is not None and coefficient.device.type == "cpu":
        for target, part in places:
            torch.mul(part, coefficient, out=target)  # one pass over memory
        return
    torch._foreach_copy_(targets, [part for _, part in places])  # few kernels
    if coefficient is not None:
        torch._foreach_mul_(targets, coefficient)


def _moved(piece: Piece, moves: Callable[[nn.Parameter], bool]) -> torch.Tensor | None:
    """A piece's gradient, if there is one; zeros of a parameter that the optimizer does not move."""
    gradient = piece.grad()
    return gradient if gradient is None or moves(piece.parameter) else torch.zeros_like(gradient)


def _box_of(piece: Piece) -> Box:
    """What this rank has of a parameter, in the indices of its tensor-parallel block."""
    return box_of(piece.parameter, piece.tensor_axes)


def _within(piece: Piece, box: Box) -> Box:
    """The part of a parameter's box that is in a piece, in the piece's indices."""
    if piece.stop is None:
        return box
    (start, stop), *rest = box
    start, stop = max(start, piece.start), min(stop, piece.stop)
    return ((start - piece.start, max(start, stop) - piece.start), *rest)


def _offset(piece: Piece, own: Box, box: Box) -> Box:
    """A box in a piece's indices -> in those of the local tensor, which is the box `own`."""
    first = piece.start if piece.stop is not None else 0
    shifts = [a - (first if axis == 0 else 0) for axis, (a, _) in enumerate(own)]
    return tuple((a - shift, b - shift) for (a, b), shift in zip(box, shifts, strict=True))
