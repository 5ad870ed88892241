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
    rounds: list[list[Piece]] = []
    numbers, last = 0, None
    for i, bucket in enumerate(found):
        sizes, *_, device = bucket.key
        size, limit = math.prod(sizes), _at_once(device)
        most = max(1, limit // size)  # blocks
        for start in range(0, bucket.blocks, most):
            stop = min(start + most, bucket.blocks)
            parts = tuple(
                (m.index, slice(max(start, m.start) - m.start, min(stop, m.stop) - m.start))
                for m in bucket.members
                if m.start < stop and start < m.stop
            )
            own = (stop - start) * size
            if not rounds or device != last or numbers + own > limit:
                rounds.append([])
                numbers = 0
            rounds[-1].append(Piece(i, start, stop, parts, all(share in plain for share, _ in parts)))
            numbers, last = numbers + own, device
    return rounds


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
