"""Rounds of a step of Kron: what it handles at a time, be it part of a large bucket or many small ones.

On a CPU a round stays in the cache; elsewhere it bounds the memory that a step takes. A larger block is
a round by itself. What is in one round is fitted together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch

from suite.core.buckets import Bucket

# Numbers to handle together: more would not stay in a CPU's cache, or take memory elsewhere.
_CACHED, _JOINED = 2**17, 2**25


class Piece(NamedTuple):
    """Blocks of one bucket that a step handles at a time."""

    bucket: int
    start: int
    stop: int
    parts: tuple[tuple[int, slice], ...]  # numbers of shares, and which of their blocks these are
    plain: bool  # whether each share is a whole parameter of the block's shape


def _at_once(device: torch.device) -> int:
    return _CACHED if device.type == "cpu" else _JOINED


def plan_rounds(found: Sequence[Bucket], plain: Set[int]) -> list[list[Piece]]:
    """All blocks of buckets whose keys are (sizes, ..., device).

    Args:
        plain: the shares that are whole parameters of their block's shape.
    """
    pieces: list[Piece] = []
    for i, bucket in enumerate(found):
        sizes, *_, device = bucket.key
        most = max(1, _at_once(device) // math.prod(sizes))  # blocks
        for start in range(0, bucket.blocks, most):
            stop = min(start + most, bucket.blocks)
            parts = tuple(
                (m.index, slice(max(start, m.start) - m.start, min(stop, m.stop) - m.start))
                for m in bucket.members
                if m.start < stop and start < m.stop
            )
            pieces.append(Piece(i, start, stop, parts, all(share in plain for share, _ in parts)))
    extents = [extent(found, [piece]) for piece in pieces]
    return [[pieces[i] for i in together] for together in joined(extents)]


def extent(found: Sequence[Bucket], pieces: Sequence[Piece]) -> tuple[int, torch.device]:
    """How many numbers are in pieces of buckets, at least one piece, and where."""
    keys = [found[piece.bucket].key for piece in pieces]
    of_each = [math.prod(key[0]) * (p.stop - p.start) for key, p in zip(keys, pieces, strict=True)]
    return sum(of_each), keys[0][-1]


def joined(extents: Sequence[tuple[int, torch.device]]) -> list[list[int]]:
    """Which of these, in their order, to handle at a time."""
    found: list[list[int]] = []
    numbers, last = 0, None
    for i, (own, device) in enumerate(extents):
        if not found or device != last or numbers + own > _at_once(device):
            found.append([])
            numbers = 0
        found[-1].append(i)
        numbers, last = numbers + own, device
    return found


def which_may_change(
    piece: Piece, filled: Sequence[bool], finite: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Whether blocks may change: () or (blocks,); None: all do."""
    finite = None if finite is None else finite.to(device)
    if all(filled[i] for i, _ in piece.parts):
        return finite
    counts = [part.stop - part.start for _, part in piece.parts]
    mask = torch.zeros(sum(counts), dtype=torch.bool, device=device)
    for (i, _), own in zip(piece.parts, mask.split(counts), strict=True):
        if filled[i]:
            own.fill_(True)
    return mask if finite is None else finite & mask


def gathered(piece: Piece, stacks: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
    """The piece's part of `stacks`, zeros for what is missing.

    Args:
        stacks: by share; of plain pieces not stacks of one block but tensors like the block.
    """
    shape = like.shape[1:]
    if piece.plain:
        tensors = [like.new_zeros(shape) if stacks[i] is None else stacks[i] for i, _ in piece.parts]
        return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
    found = [
        like.new_zeros((part.stop - part.start, *shape)) if stacks[i] is None else stacks[i][part]
        for i, part in piece.parts
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def spread(piece: Piece, joined: torch.Tensor) -> Sequence[torch.Tensor]:
    """Undo `gathered`: what belongs to each of the piece's parts."""
    if piece.plain:
        return joined.unbind()
    return joined.split([blocks.stop - blocks.start for _, blocks in piece.parts])
