"""Which rank has which of Kron's blocks, and how gradients and directions get there and back.

Blocks of a parameter that every rank has whole are shared out; each rank fits and preconditions its own
and all get the directions. Of a parameter that is sharded (a DTensor) no rank has a whole block: one
rank gets all parts of the gradient, preconditions the whole, and sends everyone's part of the direction.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from suite.core import blocks
from suite.core.placement import plan_owners
from suite.torch.collectives import GATHERING, Parcel, Ranks
from suite.torch.dtensors import Box, box_of, deliveries, is_sharded, local, shape_of, size_of, slices


class Share(NamedTuple):
    """Blocks `start` to `stop` of one tile of a parameter, and the rank that has them."""

    parameter: int
    tile: int
    start: int
    stop: int
    owner: int


def plan_shares(
    parameters: Sequence[torch.Tensor],
    plans: Sequence[blocks.BlockPlan],
    ranks: Ranks,
    shard: bool,
    loads: Mapping[int, int],
) -> list[Share]:
    """All blocks of all parameters, in an order that every rank agrees on.

    Without `shard` every rank has all of them.

    Args:
        loads: by rank, what its blocks of other parameters cost.
    """
    whole = [
        Share(number, tile, 0, plan.tile_blocks(plan.tiles[tile]), ranks.rank)
        for number, plan in enumerate(plans)
        for tile in range(len(plan.tiles))
    ]
    if not shard or ranks.alone:
        return whole
    parts: list[Share] = []
    for share in whole:
        pieces = 1 if is_sharded(parameters[share.parameter]) else min(share.stop, ranks.world)
        edges = [share.stop * i // pieces for i in range(pieces + 1)]
        parts += [share._replace(start=a, stop=b) for a, b in itertools.pairwise(edges)]
    # A sharded parameter is one job, whatever its tiles.
    jobs: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        key = part.parameter if is_sharded(parameters[part.parameter]) else (part.parameter, i)
        jobs.setdefault(key, []).append(i)
    costs = [sum(_cost(parts[i], plans) for i in members) for members in jobs.values()]
    owner: dict[int, int] = {}
    before = [loads.get(rank, 0) for rank in range(ranks.world)]
    for members, rank in zip(jobs.values(), plan_owners(costs, ranks.world, before), strict=True):
        owner |= dict.fromkeys(members, rank)
    return [part._replace(owner=owner[i]) for i, part in enumerate(parts)]


def loads_of(shares: Sequence[Share], plans: Sequence[blocks.BlockPlan]) -> Counter[int]:
    """By rank, what its blocks cost."""
    loads: Counter[int] = Counter()
    for share in shares:
        loads[share.owner] += _cost(share, plans)
    return loads


def _cost(share: Share, plans: Sequence[blocks.BlockPlan]) -> int:
    """Multiplications of one product with a block's preconditioner."""
    plan = plans[share.parameter]
    tile = plan.tiles[share.tile]
    kinds = zip(tile.sizes, plan.diagonal, tile.diagonal_blocks, strict=True)
    sides = sum(1 if d else n // c for n, d, c in kinds)
    return (share.stop - share.start) * torch.Size(tile.sizes).numel() * sides


class ShareExchange:
    """Brings gradients to the owners of blocks, and directions to whom parameters are."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        plans: Sequence[blocks.BlockPlan],
        shares: Sequence[Share],
        ranks: Ranks,
        shard: bool,
    ) -> None:
        self.parameters, self.plans, self.shares, self.ranks = parameters, plans, shares, ranks
        self.shard = shard and not ranks.alone
        self.sharded = [is_sharded(p) for p in parameters]
        self.shares_of: list[list[int]] = [[] for _ in parameters]
        for i, share in enumerate(shares):
            self.shares_of[share.parameter].append(i)
        self._boxes: list[list[Box]] | None = None  # by rank and parameter

    @property
    def is_local(self) -> bool:
        """Whether nothing travels."""
        return not self.shard and not any(self.sharded)

    def boxes(self, parameter: int) -> list[Box]:
        """What every rank has of a sharded parameter."""
        if self._boxes is None:
            own = [box_of(p) for p in self.parameters]
            self._boxes = self.ranks.gather(own, "Kron's exchange of shard boundaries")
        return [of_rank[parameter] for of_rank in self._boxes]

    def _owner(self, parameter: int) -> int:
        return self.shares[self.shares_of[parameter][0]].owner

    def whole(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Whole gradients, of sharded parameters where they are preconditioned."""
        if not any(self.sharded):
            return list(gradients)
        result: list[torch.Tensor | None] = list(gradients)
        parcels, boxes_of, which = [], [], []
        everyone = tuple(range(self.ranks.world))
        for i, gradient in enumerate(gradients):
            if not self.sharded[i] or gradient is None:
                continue
            wanted = (self._owner(i),) if self.shard else everyone
            dtype = self.parameters[i].dtype
            for box, source, targets in deliveries(self.boxes(i), wanted):
                parcels.append(Parcel(f"parameter {i}", shape_of(box), dtype, source, targets))
                boxes_of.append(box)
                which.append(i)
            here = self.ranks.rank in wanted
            like = local(gradient)
            result[i] = like.new_zeros(self.parameters[i].shape) if here else None

        def content(number: int) -> torch.Tensor:
            gradient = gradients[which[number]]
            assert gradient is not None
            return local(gradient)

        found = self.ranks.send(
            parcels,
            content,
            lambda n: self.parameters[which[n]].device,
            "Kron's collection of sharded gradients",
        )
        for number, parcel in enumerate(parcels):
            target = result[which[number]]
            if number in found:
                assert target is not None
                target[slices(boxes_of[number])] = found[number]
            elif parcel.source == self.ranks.rank and self.ranks.rank in parcel.destinations:
                assert target is not None
                target[slices(boxes_of[number])] = content(number)
        return result

    def directions(
        self, present: Sequence[bool], stacks: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """What each parameter here moves along, from stacks of directions by share."""
        filled = self._everyones(present, stacks) if self.shard else list(stacks)
        result: list[torch.Tensor | None] = []
        for i, here in enumerate(present):
            parts = [filled[j] for j in self.shares_of[i]]
            if not here or any(part is None for part in parts):
                result.append(None)
            else:
                result.append(self.merged(i, parts))
        if any(self.sharded):
            self._to_boxes(present, result)
        return result

    def merged(self, i: int, parts: Sequence[Any]) -> torch.Tensor:
        """A whole direction from those of all shares of a parameter."""
        if len(parts) == 1:
            only: torch.Tensor = blocks.merge(self.plans[i], parts)
            return only
        tiles: dict[int, list[torch.Tensor]] = {}
        for number, part in zip(self.shares_of[i], parts, strict=True):
            tiles.setdefault(self.shares[number].tile, []).append(part)
        joined = [own[0] if len(own) == 1 else torch.cat(own) for own in tiles.values()]
        merged: torch.Tensor = blocks.merge(self.plans[i], joined)
        return merged

    def _everyones(self, present: Sequence[bool], stacks: Sequence[torch.Tensor | None]) -> list[Any]:
        """Stacks of all shares of parameters that every rank has whole."""
        chosen, parcels = [], []
        for number, share in enumerate(self.shares):
            i = share.parameter
            if present[i] and not self.sharded[i]:
                sizes = self.plans[i].tiles[share.tile].sizes
                others = tuple(r for r in range(self.ranks.world) if r != share.owner)
                shape = (share.stop - share.start, *sizes)
                chosen.append(number)
                parcels.append(
                    Parcel(f"parameter {i}", shape, self.parameters[i].dtype, share.owner, others)
                )

        def content(n: int) -> torch.Tensor:
            stack = stacks[chosen[n]]
            assert stack is not None
            return stack

        found = self.ranks.send(
            parcels,
            content,
            lambda n: self.parameters[self.shares[chosen[n]].parameter].device,
            "Kron's exchange of directions",
        )
        filled = list(stacks)
        for n, stack in found.items():
            filled[chosen[n]] = stack
        return filled

    def _to_boxes(self, present: Sequence[bool], result: list[torch.Tensor | None]) -> None:
        """Replace whole directions of sharded parameters by what is this rank's of them."""
        rank = self.ranks.rank
        if not self.shard:
            for i, here in enumerate(self.sharded):
                direction = result[i]
                if here and direction is not None:
                    result[i] = direction[slices(self.boxes(i)[rank])]
            return
        parcels, which, boxes_of = [], [], []
        for i, here in enumerate(self.sharded):
            if not here or not present[i]:
                continue
            receivers: dict[Box, list[int]] = {}
            for other, box in enumerate(self.boxes(i)):
                if size_of(box):
                    receivers.setdefault(box, []).append(other)
            for box, ranks in receivers.items():
                dtype = self.parameters[i].dtype
                parcels.append(
                    Parcel(f"parameter {i}", shape_of(box), dtype, self._owner(i), tuple(ranks))
                )
                which.append(i)
                boxes_of.append(box)

        def content(n: int) -> torch.Tensor:
            direction = result[which[n]]
            assert direction is not None
            return direction[slices(boxes_of[n])]

        found = self.ranks.send(
            parcels,
            content,
            lambda n: self.parameters[which[n]].device,
            "Kron's return of directions to shards",
        )
        mine: dict[int, torch.Tensor] = {}
        for n, parcel in enumerate(parcels):
            if n in found:
                mine[which[n]] = found[n]
            elif parcel.source == rank and rank in parcel.destinations:
                mine[which[n]] = content(n)
        for i, here in enumerate(self.sharded):
            if here and present[i]:
                empty = local(self.parameters[i])
                result[i] = mine[i] if i in mine else torch.zeros_like(empty)

    def gathered(
        self,
        here: Sequence[Mapping[int, Mapping[str, torch.Tensor]]],
        expected: Sequence[Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
    ) -> list[dict[str, torch.Tensor]]:
        """State tensors of all shares, joined by parameter, on every rank.

        Args:
            here: for each parameter, share -> name -> tensor, of the shares on this rank.
            expected: for each parameter, 'tile.name' -> shape and dtype.
        """
        everyone = tuple(range(self.ranks.world))
        parcels, which = [], []
        for number, share in enumerate(self.shares):
            prefix = f"tile{share.tile}."
            for key, (shape, dtype) in expected[share.parameter].items():
                if key.startswith(prefix):
                    part = (share.stop - share.start, *shape[1:])
                    parcels.append(
                        Parcel(f"parameter {share.parameter}", part, dtype, share.owner, everyone)
                    )
                    which.append((number, key))

        def content(n: int) -> torch.Tensor:
            number, key = which[n]
            return here[self.shares[number].parameter][number][key.split(".", 1)[1]]

        def device_of(n: int) -> torch.device:
            return self.parameters[self.shares[which[n][0]].parameter].device

        found = self.ranks.send(parcels, content, device_of, f"Kron's {GATHERING}")
        parts: list[dict[str, list[torch.Tensor]]] = [{} for _ in self.parameters]
        for n, (number, key) in enumerate(which):
            tensor = found[n] if n in found else content(n)
            parts[self.shares[number].parameter].setdefault(key, []).append(tensor)
        return [
            {key: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for key, pieces in own.items()}
            for own in parts
        ]
