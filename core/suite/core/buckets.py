"""Stacks of equal shape are served together: one batched call instead of one call a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from suite.core._namespace import Array, array_namespace, device_of

_MOST_TOGETHER = 2**23  # numbers in an array


@dataclass(frozen=True)
class Member:
    """Where one stack sits in its bucket."""

    index: int  # which of the planned stacks
    start: int  # its first block in the bucket
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Stacks that share a key, joined along their leading axis in order of their index."""

    key: Any
    members: tuple[Member, ...]

    @property
    def blocks(self) -> int:
        return self.members[-1].stop


def plan_buckets(stacks: Sequence[tuple[Hashable, int]]) -> tuple[Bucket, ...]:
    """Group stacks, given as (key, number of blocks), by key; buckets in order of first appearance."""
    members: dict[Hashable, list[Member]] = {}
    for index, (key, blocks) in enumerate(stacks):
        group = members.setdefault(key, [])
        start = group[-1].stop if group else 0
        group.append(Member(index, start, start + blocks))
    return tuple(Bucket(key, tuple(group)) for key, group in members.items())


def cut(bucket: Bucket, most: int) -> tuple[Bucket, ...]:
    """A bucket as several of at most `most` blocks each; a member with more has one to itself."""
    groups: list[list[Member]] = []
    for member in bucket.members:
        if not groups or member.stop - groups[-1][0].start > most:
            groups.append([])
        groups[-1].append(member)
    return tuple(
        Bucket(
            bucket.key,
            tuple(Member(m.index, m.start - group[0].start, m.stop - group[0].start) for m in group),
        )
        for group in groups
    )


def gather(bucket: Bucket, stacks: Sequence[Array]) -> Array:
    """The bucket's members out of all `stacks`, joined: (blocks, ...). No copy for a single member."""
    parts = [stacks[member.index] for member in bucket.members]
    return parts[0] if len(parts) == 1 else array_namespace(parts[0]).concat(parts, axis=0)


def scatter(bucket: Bucket, joined: Array, stacks: list[Any]) -> None:
    """Undo `gather`: put each member's part of `joined` into its place in the list `stacks`."""
    for member in bucket.members:
        whole = len(bucket.members) == 1
        stacks[member.index] = joined if whole else joined[member.start : member.stop, ...]


def together(
    function: Callable[..., tuple[Array, ...]], stacks: Sequence[tuple[Array, ...]]
) -> list[tuple[Array, ...]]:
    """`function` of each of the stacks, those that are alike joined: one call for all of them.

    Joining copies, which costs memory: arrays with more than `_MOST_TOGETHER` numbers stay alone.

    Args:
        function: of arrays (k, ...), to arrays (k, ...), for each of the k by itself.
        stacks: its arguments, with a k of their own; those of one stack are on one device.
    """
    keys = [(device_of(s[0]), *((x.shape[1:], x.dtype) for x in s)) for s in stacks]
    found: list[Any] = [None] * len(stacks)
    for bucket in plan_buckets([(k, s[0].shape[0]) for k, s in zip(keys, stacks, strict=True)]):
        largest = max(math.prod(shape) for shape, _ in bucket.key[1:])
        for part in cut(bucket, max(1, _MOST_TOGETHER // max(1, largest))):
            rows = [stacks[member.index] for member in part.members]
            if len(rows) == 1:
                found[part.members[0].index] = function(*rows[0])
                continue
            xp = array_namespace(rows[0][0])
            results = function(*(xp.concat(column, axis=0) for column in zip(*rows, strict=True)))
            for m in part.members:
                found[m.index] = tuple(x[m.start : m.stop, ...] for x in results)
    return found
