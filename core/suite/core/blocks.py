"""How one parameter becomes blocks for a Kronecker-factored preconditioner. Plans are made of ints.

A parameter's axes are merged until few are left, each merged axis gets a dense or a diagonal factor, and
axes longer than `block_size` are cut: into equal chunks, or these and one remainder. That is at most two
kinds of chunk per axis, so a parameter becomes a few *tiles*: grids of equal chunks. Either a tile is
one block, its factors block-diagonal with a block for every chunk, or each chunk is a block with factors
of its own, one slice, reshape and transpose away however many there are.

Source: the options are distributed_kron's; merging and blocking go back to Anil et al. 2020
(arXiv:2002.09018).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from suite.core._namespace import Array, array_namespace
from suite.core.checks import check_choice, check_flag, check_integer, check_number

MemorySaveMode = Literal["one_diag", "smart_one_diag", "all_diag"]


@dataclass(frozen=True)
class Structure:
    """Which factors a parameter gets. Names and meanings are distributed_kron's.

    Args:
        max_size_triangular: an axis longer than this gets a diagonal factor; what axes merge to if all
            of them are, or if it would be left in chunks that are.
        min_ndim_triangular: a parameter with fewer axes (of size > 1, before they merge) gets diagonal
            factors only.
        memory_save_mode: None; 'one_diag', the longest axis is diagonal; 'smart_one_diag', it is if it
            is longer than all the others; 'all_diag', all are.
        merge_small_dims: merge neighbouring axes (a kernel's input channels and offsets, say) while
            their product is at most `target_merged_dim_size`; at least two axes stay.
        partition_grads_into_blocks: cut axes with dense factors into chunks of at most `block_size`.
        max_skew: an axis with side² > max_skew times the parameter's size gets a diagonal factor, whose
            matrix would be larger than the parameter itself (at 1, psgd_torch's); None: no such rule.
        shared_factors: equal chunks that an axis is cut into have one block-diagonal factor, whose
            blocks serve all equal chunks of the other axes (a remainder has its own). Without it every
            combination of chunks has factors to itself, as in distributed_kron.
    """

    max_size_triangular: int = 8192
    min_ndim_triangular: int = 2
    memory_save_mode: MemorySaveMode | None = None
    merge_small_dims: bool = True
    target_merged_dim_size: int = 4096
    partition_grads_into_blocks: bool = True
    block_size: int = 128
    max_skew: float | None = None
    shared_factors: bool = True

    def __post_init__(self) -> None:
        check_integer("max_size_triangular", self.max_size_triangular, at_least=0)
        check_integer("min_ndim_triangular", self.min_ndim_triangular, at_least=0)
        modes = (None, *get_args(MemorySaveMode))
        check_choice("memory_save_mode", self.memory_save_mode, modes)
        check_flag("merge_small_dims", self.merge_small_dims)
        check_integer("target_merged_dim_size", self.target_merged_dim_size, at_least=1)
        check_flag("partition_grads_into_blocks", self.partition_grads_into_blocks)
        check_integer("block_size", self.block_size, at_least=1)
        if self.max_skew is not None:
            check_number("max_skew", self.max_skew, above=0)
        check_flag("shared_factors", self.shared_factors)


@dataclass(frozen=True)
class Tile:
    """A regular grid of equal blocks: along axis i, counts[i] of sizes[i] from starts[i]."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    diagonal_blocks: tuple[int, ...]  # how many a block's factor of axis i has on its diagonal

    @property
    def blocks(self) -> int:
        return math.prod(self.counts)


@dataclass(frozen=True)
class BlockPlan:
    """One parameter's blocks."""

    shape: tuple[int, ...]  # the parameter's
    scanned: int  # leading axes that stack independent parameters, 0 or 1
    merged: tuple[int, ...]  # sides after merging, without the scanned axis
    diagonal: tuple[bool, ...]  # per merged axis
    tiles: tuple[Tile, ...]  # in order of their starts, the last axis fastest

    @property
    def blocks(self) -> int:
        """How many blocks the parameter has."""
        return sum(self.tile_blocks(tile) for tile in self.tiles)

    @property
    def is_whole(self) -> bool:
        """Whether the parameter, as it is, is its one block."""
        return len(self.tiles) == 1 and self.tiles[0].sizes == self.shape

    def tile_blocks(self, tile: Tile) -> int:
        """Blocks of a tile in all scanned layers."""
        return tile.blocks * math.prod(self.shape[: self.scanned])

    def factor_elements(self) -> int:
        """Numbers in all factors Q_i of this parameter."""
        total = 0
        for tile in self.tiles:
            sides = zip(tile.sizes, self.diagonal, tile.diagonal_blocks, strict=True)
            total += self.tile_blocks(tile) * sum(n if d else n * n // c for n, d, c in sides)
        return total

    def describe_factors(self) -> str:
        """'8 x 125x125, diag 10000' for 1000 in eight chunks and a diagonal factor."""
        texts = []
        for axis, (side, is_diagonal) in enumerate(zip(self.merged, self.diagonal, strict=True)):
            chunks = {}  # by their start: those of tiles beside each other are the same
            for t in self.tiles:
                c = t.diagonal_blocks[axis]
                chunks[t.starts[axis]] = t.counts[axis] * c, t.sizes[axis] // c
            dense = [f"{count} x {n}x{n}" if count > 1 else f"{n}x{n}" for count, n in chunks.values()]
            texts.append(f"diag {side}" if is_diagonal else " + ".join(dense))
        return ", ".join(texts)

    def describe(self) -> str:
        """Where the factors come from."""
        cut = f", in {self.blocks} blocks" if self.blocks > 1 else ""
        return f"{len(self.merged)} axes after merging{cut}"


def plan_blocks(shape: Sequence[int], structure: Structure, *, scanned: bool = False) -> BlockPlan:
    """The blocks of a parameter of `shape`; with `scanned`, axis 0 stacks parameters of one kind."""
    shape = tuple(int(side) for side in shape)
    if scanned and not shape:
        raise ValueError("a scanned parameter must have at least one axis, got shape ()")
    own = shape[int(scanned) :]
    groups = _merged(own, structure.target_merged_dim_size if structure.merge_small_dims else 0)
    merged = tuple(map(math.prod, groups))
    diagonal = _diagonal_axes(groups, structure)
    chunks = []
    for side, is_diagonal in zip(merged, diagonal, strict=True):
        cut = structure.partition_grads_into_blocks and not is_diagonal
        of_axis = _chunks(side, structure.block_size if cut else side)
        if structure.shared_factors:
            chunks.append([(start, 1, count * size, count) for start, count, size in of_axis])
        else:
            chunks.append([(start, count, size, 1) for start, count, size in of_axis])
    tiles = tuple(
        Tile(*(tuple(part) for part in zip(*chosen, strict=True)))
        for chosen in itertools.product(*chunks)
    )
    return BlockPlan(shape, int(scanned), merged, diagonal, tiles)


def merge_sides(shape: tuple[int, ...], target: int) -> tuple[int, ...]:
    """Sides after merging neighbours up to `target`: fewest axes, then the smallest factors.

    Axes of size 1 vanish. A tensor with two or more longer axes keeps at least two: merging a matrix
    into one axis would square the size of its factor.
    """
    return tuple(map(math.prod, _merged(shape, target)))


def _merged(shape: tuple[int, ...], target: int) -> tuple[tuple[int, ...], ...]:
    """The sides that become one, for each that `merge_sides` returns."""
    sides = tuple(side for side in shape if side != 1) or (1,)
    if len(sides) <= 2:
        return tuple((side,) for side in sides)
    candidates = []
    for cuts in itertools.product((False, True), repeat=len(sides) - 1):
        groups = [[sides[0]]]
        for cut, side in zip(cuts, sides[1:], strict=True):
            if cut:
                groups.append([side])
            else:
                groups[-1].append(side)
        merged = tuple(math.prod(group) for group in groups)
        allowed = all(len(g) == 1 or p <= target for g, p in zip(groups, merged, strict=True))
        if allowed and len(merged) >= 2:
            cost = sum(n * n for n in merged)
            candidates.append((len(merged), cost, merged, tuple(map(tuple, groups))))
    return min(candidates)[3]


def _diagonal_axes(groups: tuple[tuple[int, ...], ...], structure: Structure) -> tuple[bool, ...]:
    merged = tuple(map(math.prod, groups))
    own_ndim = sum(side > 1 for group in groups for side in group)
    if structure.memory_save_mode == "all_diag" or own_ndim < structure.min_ndim_triangular:
        return (True,) * len(merged)
    longest_dense = structure.max_size_triangular
    is_cut = structure.partition_grads_into_blocks and structure.block_size <= longest_dense
    diagonal = [
        side <= 1 or min(group) > longest_dense or (side > longest_dense and not is_cut)
        for side, group in zip(merged, groups, strict=True)
    ]
    if structure.max_skew is not None:
        limit = structure.max_skew * math.prod(merged)
        diagonal = [d or side**2 > limit for d, side in zip(diagonal, merged, strict=True)]
    longest = max(range(len(merged)), key=lambda axis: (merged[axis], axis))
    unique = merged.count(merged[longest]) == 1
    if structure.memory_save_mode == "one_diag" or (
        structure.memory_save_mode == "smart_one_diag" and unique and len(merged) > 1
    ):
        diagonal[longest] = True
    return tuple(diagonal)


def _chunks(side: int, block_size: int) -> list[tuple[int, int, int]]:
    """(start, count, size) of chunks of a side.

    Equal ones, the longest above half of `block_size` that divide the side, if any do: of at most 128,
    1000 is 8 x 125 and 576 is 6 x 96. A remainder is a kind of block of its own, with factors of its
    own along the other axes, too.
    """
    if side <= block_size:
        return [(0, 1, side)]
    for size in range(block_size, block_size // 2, -1):
        if side % size == 0:
            return [(0, side // size, size)]
    count, rest = divmod(side, block_size)
    return [(0, count, block_size), (count * block_size, 1, rest)]


def split(plan: BlockPlan, x: Array) -> list[Array]:
    """A parameter-shaped array as one stack of blocks (blocks, *sizes) per tile."""
    xp = array_namespace(x)
    scan = math.prod(plan.shape[: plan.scanned])
    x = xp.reshape(x, (scan, *plan.merged))
    if _is_one_block(plan):
        return [x]
    stacks = []
    for tile in plan.tiles:
        part = x
        if len(plan.tiles) > 1:
            ranges = zip(tile.starts, tile.counts, tile.sizes, strict=True)
            part = x[(slice(None), *(slice(s, s + c * n) for s, c, n in ranges))]
        if tile.blocks > 1:
            grid = itertools.chain(*zip(tile.counts, tile.sizes, strict=True))
            part = xp.reshape(part, (scan, *grid))
            ndim = len(tile.sizes)
            counts, sizes = range(1, 2 * ndim, 2), range(2, 2 * ndim + 1, 2)
            part = xp.permute_dims(part, (0, *counts, *sizes))
        stacks.append(xp.reshape(part, (scan * tile.blocks, *tile.sizes)))
    return stacks


def _is_one_block(plan: BlockPlan) -> bool:
    return len(plan.tiles) == 1 and plan.tiles[0].blocks == 1


def merge(plan: BlockPlan, stacks: Sequence[Array]) -> Array:
    """Undo `split`."""
    xp = array_namespace(stacks[0])
    if _is_one_block(plan):
        return xp.reshape(stacks[0], plan.shape)
    scan = math.prod(plan.shape[: plan.scanned])
    parts = []
    for tile, stack in zip(plan.tiles, stacks, strict=True):
        part = stack
        if tile.blocks > 1:
            ndim = len(tile.sizes)
            part = xp.reshape(part, (scan, *tile.counts, *tile.sizes))
            pairs = itertools.chain(*((1 + i, 1 + ndim + i) for i in range(ndim)))
            part = xp.permute_dims(part, (0, *pairs))
        extent = (c * n for c, n in zip(tile.counts, tile.sizes, strict=True))
        parts.append(xp.reshape(part, (scan, *extent)))
    # Tiles come in itertools.product order: join neighbours along the last axis, then the one before.
    for axis in range(len(plan.merged), 0, -1):
        chunks = len({tile.starts[axis - 1] for tile in plan.tiles})
        if chunks > 1:
            groups = [parts[i : i + chunks] for i in range(0, len(parts), chunks)]
            parts = [xp.concat(group, axis=axis) for group in groups]
    return xp.reshape(parts[0], plan.shape)
