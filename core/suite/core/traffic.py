"""What a placement costs before anything runs: memory of a rank, and what ranks send each other.

The trade of KAISA (Pauloski et al. 2021, arXiv:2107.01739, section 3): more gradient workers hold more
inverses and send more of them at each refresh; fewer send more directions at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from suite.core.placement import LayerShape, Placement


@dataclass(frozen=True)
class Traffic:
    """One phase, in bytes; `sent` and `received` are those of the busiest ranks."""

    sent: int
    received: int
    total: int  # sent by all ranks together; a broadcast counts once
    collectives: int  # that the busiest rank takes part in


@dataclass(frozen=True)
class Footprint:
    """Of one placement, in bytes; memory is the fullest rank's."""

    factors: int  # running averages
    inverses: int
    update: Traffic  # sums of statistics to owners
    refresh: Traffic  # inverses or eigenbases to gradient workers
    step: Traffic  # directions to receivers

    @property
    def memory(self) -> int:
        return self.factors + self.inverses


def footprint(
    layers: Sequence[LayerShape],
    placement: Placement,
    *,
    eigen: bool = True,
    symmetric: bool = False,
    itemsize: int = 4,
    bucket_bytes: int = 25 * 2**20,
) -> Footprint:
    """Memory and traffic of K-FAC on layers of these shapes.

    Args:
        layers: as the placement was planned for.
        placement: who owns what.
        eigen: eigenbases, with their eigenvalues; else inverses.
        symmetric: upper triangles of symmetric matrices travel.
        itemsize: bytes of a number.
        bucket_bytes: what would be copied to more than so many bytes is broadcast.
    """
    world = placement.world
    factors, inverses = [0] * world, [0] * world
    update, refresh, step = (_Phase(world, bucket_bytes) for _ in range(3))
    for (i, side), owner in placement.owner_of.items():
        layer, at = layers[i], "AG".index(side)
        full = layer.elements(side) * itemsize
        packed = layer.elements(side, packed=symmetric) * itemsize
        factors[owner] += full
        values = layer.blocks * layer.sizes[at] * itemsize
        held = full if not eigen else values + (0 if layer.diagonal[at] else full)
        for rank in placement.workers_of(i):
            inverses[rank] += held
        update.sum(packed, owner)
        refresh.send(held if eigen else packed, owner, placement.workers_of(i))
    for i, layer in enumerate(layers):
        size = layer.blocks * layer.sizes[0] * layer.sizes[1] * itemsize
        for row in placement.receiver_groups:
            step.send(size, placement.source(i, row[0]), row)
    return Footprint(max(factors), max(inverses), update.traffic(), refresh.traffic(), step.traffic())


class _Phase:
    def __init__(self, world: int, bucket_bytes: int) -> None:
        self.world, self.bucket_bytes = world, bucket_bytes
        self.sent, self.received = [0] * world, [0] * world
        self.broadcasts = [0] * world
        self.in_buckets = 0

    def sum(self, size: int, owner: int) -> None:
        self.in_buckets += size
        for rank in range(self.world):
            self.sent[rank] += size if rank != owner else 0
        self.received[owner] += size * (self.world > 1)

    def send(self, size: int, source: int, destinations: Iterable[int]) -> None:
        others = [rank for rank in destinations if rank != source]
        for rank in others:
            self.received[rank] += size
        if len(others) > 1 and size * len(others) > self.bucket_bytes:
            self.sent[source] += size
            for rank in (source, *others):
                self.broadcasts[rank] += 1
        elif others:
            self.sent[source] += size * len(others)
            self.in_buckets += size

    def traffic(self) -> Traffic:
        if self.world == 1:
            return Traffic(0, 0, 0, 0)
        rounds = -(-self.in_buckets // self.bucket_bytes)
        collectives = rounds + max(self.broadcasts)
        return Traffic(max(self.sent), max(self.received), sum(self.sent), collectives)
