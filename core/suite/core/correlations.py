"""Second moments of what a convolution reads and writes, without the matrix of patches.

The sum over an image of the product of what two places of a kernel see depends, away from the borders,
on how far apart the places are. So the image is correlated with itself, at every difference of two
places once: 13 products of channels with channels for a 3x3 kernel (by symmetry), where patches take
81. What a pair of places misses at the borders is taken off exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from suite.core import linalg, patches, statistics
from suite.core._namespace import Array, array_namespace, device_of, factorizations, lift

Pair = tuple[int, int]

_ENTRIES_AT_ONCE = 2**19  # of patches: of float32 two megabytes


def second_moment_sum(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[Pair],
    dilation: Sequence[int],
    groups: int = 1,
    *,
    bias: bool = False,
) -> Array:
    """Σ p pᵀ over the rows p of `patches.patches`.

    Patches are made where they are less work, on small images without padding, and where a kernel with
    several places has a stride other than 1 or three axes.

    Args:
        x: (n, channels, *sizes).
        kernel, stride, padding, dilation, groups: see `patches.patches`.
        bias: append the coordinate 1 to every patch.

    Returns:
        (groups, d, d), d = channels / groups * kernel places + bias, in at least single precision.
    """
    x, strides = lift(x), list(stride)
    for axis, (k, s, pad) in enumerate(zip(kernel, stride, padding, strict=True)):
        if k == 1 and tuple(pad) == (0, 0) and s > 1:
            x = x[(slice(None),) * (2 + axis) + (slice(None, None, s), ...)]
            strides[axis] = 1
    if math.prod(kernel) == 1 and not any(map(sum, padding)) and not bias:
        return output_second_moment_sum(x, groups)
    if len(kernel) == 2 and strides == [1, 1]:
        plane = _Plane(x, (kernel[0], kernel[1]), (padding[0], padding[1]), (dilation[0], dilation[1]))
        if plane.is_less_work():
            return plane.second_moment_sum(groups, bias)
    if len(kernel) == 1 and strides == [1]:
        plane = _Plane(x[:, :, None, :], (1, kernel[0]), ((0, 0), padding[0]), (1, dilation[0]))
        if plane.is_less_work():
            return plane.second_moment_sum(groups, bias)
    features = x.shape[1] * math.prod(kernel)
    sides = zip(x.shape[2:], kernel, strides, padding, dilation, strict=True)
    places = max(math.prod([patches.output_size(*side) for side in sides]), 1)
    # Small enough for the processor's cache, and rows enough for the product to be worth its sum.
    examples = max(_ENTRIES_AT_ONCE // (features * places), 4 * features // places, 1)
    total: Array = 0
    for part in factorizations(array_namespace(x)).parts(x, examples):
        rows = patches.patches(part, kernel, strides, padding, dilation, groups)
        total = total + statistics.second_moment_sum(rows, bias=bias)
    return total


def output_second_moment_sum(y: Array, groups: int = 1) -> Array:
    """Σ g gᵀ over the rows g of `patches.output_rows`: (groups, channels / groups, channels / groups).

    Args:
        y: (n, channels, *sizes).
    """
    xp = array_namespace(y)
    y = lift(y)
    n, channels, *sizes = y.shape
    places = math.prod(sizes)
    if groups == 1 and places >= channels:  # else each example's product is a sliver
        return linalg.summed_gram(xp.reshape(y, (n, channels, places)))[None, ...]
    return linalg.gram(patches.output_rows(y, groups))


class _Plane:
    """A convolution with stride 1 over two axes.

    The kernel's place (i, j) sees, at the output's place (y, x), the image's position
    (y + i * dilation - before, x + j * dilation - before), and outside of the image zeros.
    """

    def __init__(self, x: Array, kernel: Pair, padding: tuple[Pair, Pair], dilation: Pair) -> None:
        self.x, self.kernel, self.padding, self.dilation = x, kernel, padding, dilation
        self.places = [
            patches.output_size(size, k, 1, p, d)
            for size, k, p, d in zip(x.shape[2:], kernel, padding, dilation, strict=True)
        ]

    def strips(self, axis: int) -> list[range]:
        """The first and the last positions along an axis, those that some place of the kernel misses."""
        size, k, places = self.x.shape[2 + axis], self.kernel[axis], self.places[axis]
        before = self.padding[axis][0]
        first = range(min(max(self.dilation[axis] * (k - 1) - before, 0), size))
        last = range(min(max(places - before, 0), size), size)
        return [range(size)] if first.stop > last.start else [s for s in (first, last) if s]

    def seen(self, axis: int, place: int) -> tuple[int, int]:
        """The positions [start, stop) that a place of the kernel sees."""
        start, size = place * self.dilation[axis] - self.padding[axis][0], self.x.shape[2 + axis]
        return min(max(start, 0), size), min(max(start + self.places[axis], 0), size)

    def is_less_work(self) -> bool:
        """Than the product of all patches; multiplications, an image."""
        (height, width), (tall, wide) = self.x.shape[2:], self.kernel
        work = tall * (2 * wide - 1) * height * width
        work += sum((wide * len(strip)) ** 2 * self.places[1] for strip in self.strips(0))
        work += sum(tall * len(strip) ** 2 * height for strip in self.strips(1))
        return self.x.shape[0] > 0 and work < (tall * wide) ** 2 * math.prod(self.places)

    def second_moment_sum(self, groups: int, bias: bool) -> Array:
        xp = array_namespace(self.x)
        tall, wide = self.kernel
        lines, borders = self.lines(groups), self.border_rows(groups)
        c = lines[0].shape[-1]
        blocks: dict[Pair, Array] = {}
        for i in range(tall):
            for other in range(i, tall):
                block = lines[other - i]
                for start, strip in borders:
                    for u, v in self.missed(0, i, other, start):
                        block = block - xp.permute_dims(strip[:, :, u, :, :, v, :], (0, 2, 4, 1, 3))
                blocks[i, other] = block
                blocks[other, i] = xp.permute_dims(block, (0, 2, 1, 4, 3))
        grid = xp.stack([blocks[i, j] for i in range(tall) for j in range(tall)], axis=1)
        grid = xp.reshape(grid, (groups, tall, tall, wide, wide, c, c))
        side = c * tall * wide
        # In two steps that each move pieces of memory: together they take a third of the time of one.
        moments = xp.reshape(xp.permute_dims(grid, (0, 5, 1, 3, 2, 4, 6)), (groups * side, -1, c))
        moments = xp.reshape(xp.matrix_transpose(moments), (groups, side, side))
        return self.with_bias(moments, groups) if bias else moments

    def lines(self, groups: int) -> list[Array]:
        """For each vertical distance, over all pairs of lines: (groups, wide, wide, c, c)."""
        xp = array_namespace(self.x)
        tall, wide = self.kernel
        every = factorizations(xp).correlations(self.x, self.kernel, self.dilation, groups)
        borders = self.border_columns(groups)
        lines = []
        for apart in range(tall):
            pairs = []
            for j in range(wide):
                for other in range(wide):
                    pair = every[:, apart, other - j + wide - 1, :, :]
                    for start, strip in borders:
                        for u, v in self.missed(1, j, other, start):
                            pair = pair - strip[:, :, u, :, apart, v]
                    pairs.append(pair)
            stacked = xp.stack(pairs, axis=1)
            lines.append(xp.reshape(stacked, (groups, wide, wide, *stacked.shape[2:])))
        return lines

    def missed(self, axis: int, place: int, other: int, strip: range) -> list[Pair]:
        """What a pair of places does not see: two positions at its distance, counted in a strip."""
        start, stop = self.seen(axis, place)
        distance = (other - place) * self.dilation[axis]
        return [
            (u - strip.start, u + distance - strip.start)
            for u in strip
            if not start <= u < stop and u + distance in strip
        ]

    def border_rows(self, groups: int) -> list[tuple[range, Array]]:
        """Σ over pairs of rows in a strip: (groups, c, rows, wide, c, rows, wide)."""
        xp = array_namespace(self.x)
        wide, found = self.kernel[1], []
        for strip in self.strips(0):
            x = self.x[:, :, strip.start : strip.stop, :]
            padding = (0, 0), self.padding[1]
            rows = patches.patches(x, (len(strip), wide), (1, 1), padding, (1, self.dilation[1]), groups)
            c = x.shape[1] // groups
            shape = (groups, c, len(strip), wide, c, len(strip), wide)
            found.append((strip, xp.reshape(linalg.gram(rows), shape)))
        return found

    def border_columns(self, groups: int) -> list[tuple[range, Array]]:
        """Σ over pairs of columns in a strip: (groups, c, columns, c, tall, columns)."""
        xp = array_namespace(self.x)
        tall, found = self.kernel[0], []
        for strip in self.strips(1):
            x = self.x[..., strip.start : strip.stop]
            c, columns = x.shape[1] // groups, len(strip)
            padding = (0, self.dilation[0] * (tall - 1)), (0, 0)
            below = patches.patches(x, (tall, columns), (1, 1), padding, (self.dilation[0], 1), groups)
            here = patches.patches(x, (1, columns), (1, 1), ((0, 0), (0, 0)), (1, 1), groups)
            products = xp.matmul(xp.matrix_transpose(here), below)
            found.append((strip, xp.reshape(products, (groups, c, columns, c, tall, columns))))
        return found

    def with_bias(self, moments: Array, groups: int) -> Array:
        """Second moments of the patches with a 1 behind."""
        xp = array_namespace(self.x)
        total = xp.sum(self.x, axis=0)
        rows, columns = ([self.seen(a, k) for k in range(self.kernel[a])] for a in (0, 1))
        sums = [xp.sum(total[:, a:b, c:d], axis=(1, 2)) for a, b in rows for c, d in columns]
        vector = xp.reshape(xp.stack(sums, axis=-1), (groups, moments.shape[-1], 1))
        count = float(self.x.shape[0] * math.prod(self.places))
        corner = xp.zeros((groups, 1, 1), dtype=moments.dtype, device=device_of(moments)) + count
        lower = xp.concat([xp.matrix_transpose(vector), corner], axis=-1)
        return xp.concat([xp.concat([moments, vector], axis=-1), lower], axis=-2)
