"""Which device has which numbers, and where in its memory: tables made before the program runs.

What a device keeps lies in one array of rows of 128 numbers, an entry behind the other, so that a large
one takes room on its own devices only. Tables say where each starts; every device walks through its own
entries, and the program is one for all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from suite.core.placement import AssignmentStrategy, LayerShape, Placement, plan_placement

_WIDTH = 128  # of a row: indices of rows stay below 2³¹ where those of numbers would not


class Walk(NamedTuple):
    """The entries that are a device's own."""

    counts: np.ndarray  # (devices,)
    entries: np.ndarray  # (devices, most); what is behind a device's count is unused

    def look_up(self, table: Mapping[int, int]) -> np.ndarray:
        """(devices, most): each entry's value, 0 where it is unused."""
        used = np.arange(self.entries.shape[1]) < self.counts[:, None]
        found = np.zeros(self.entries.shape, np.int32)
        found[used] = [table[int(entry)] for entry in self.entries[used]]
        return found


def walk(devices_of: Mapping[int, Sequence[int]], devices: int) -> Walk:
    """From entry -> the devices whose own it is."""
    own: list[list[int]] = [[] for _ in range(devices)]
    for entry, places in devices_of.items():
        for place in places:
            own[place].append(entry)
    counts = np.asarray([len(mine) for mine in own], np.int32)
    entries = np.zeros((devices, int(counts.max(initial=0))), np.int32)
    for row, mine in zip(entries, own, strict=True):
        row[: len(mine)] = mine
    return Walk(counts, entries)


@dataclass(frozen=True)
class Store:
    """Where entries lie, in memory of which many devices have some each."""

    sizes: Mapping[int, int]  # entry -> how many numbers it is
    starts: Mapping[int, int]  # entry -> row
    length: int  # rows of the fullest

    def shape(self, devices: int) -> tuple[int, int, int]:
        return devices, self.length, _WIDTH


def store(entries: Mapping[int, tuple[int, int]]) -> Store:
    """From entry -> (how many numbers it is, its place)."""
    ends: dict[int, int] = {}
    starts = {}
    for entry, (size, place) in entries.items():
        starts[entry] = ends.get(place, 0)
        ends[place] = starts[entry] + _rows(size)
    sizes = {entry: size for entry, (size, _) in entries.items()}
    return Store(sizes, starts, max(ends.values(), default=0))


def read(rows: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """(size,) numbers from row `start` of (rows, 128)."""
    return lax.dynamic_slice_in_dim(rows, start, _rows(size)).reshape(-1)[:size]


def write(rows: jax.Array, start: jax.Array, values: jax.Array) -> jax.Array:
    """Put (1, size) numbers at row `start` of (rows, 128)."""
    return lax.dynamic_update_slice_in_dim(rows, _in_rows(values).astype(rows.dtype), start, 0)


def pack(stacks: Sequence[jax.Array]) -> jax.Array:
    """Stacks (count, size) as the (rows, 128) of a store in which all have one place."""
    return jnp.concatenate([_in_rows(stack) for stack in stacks])


def unpack(rows: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Undo `pack`."""
    stacks, start = [], 0
    for count, size in shapes:
        stop = start + count * _rows(size)
        stacks.append(rows[start:stop].reshape(count, -1)[:, :size])
        start = stop
    return stacks


@functools.lru_cache(maxsize=64)
def placement(
    layers: tuple[LayerShape, ...],
    input_of: tuple[tuple[int, int], ...],
    devices: int,
    workers: int,
    strategy: AssignmentStrategy,
) -> Placement:
    """The core's plan, made once for all programs."""
    return plan_placement(
        layers,
        devices,
        workers,
        strategy=strategy,
        colocate_factors=workers == 1,
        input_of=dict(input_of),
    )


def _rows(size: int) -> int:
    return -(-size // _WIDTH)


def _in_rows(stack: jax.Array) -> jax.Array:
    """(count, size) -> (count · rows, 128), zeros behind each entry."""
    missing = -stack.shape[1] % _WIDTH
    return jnp.pad(stack, ((0, 0), (0, missing))).reshape(-1, _WIDTH)
