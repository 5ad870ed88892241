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
_LAUNCHES = 7  # more than with patches, for each place of a kernel


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

    With stride s the image is first dealt out to s images, every s-th position to one of them, as
    channels: a 7x7 kernel with stride 2 becomes a 4x4 kernel with stride 1. Patches are made where they
    are less work (3x3 with stride 2, small images without padding; on a GPU where all of it is little
    beside its launches: 15 for patches, 73 without for 3x3), and for kernels with three axes.
    What is taken off at the borders leaves rounding errors in proportion to the sums over whole images:
    entries that are smaller than that by the precision are lost.

    Args:
        x: (n, channels, *sizes).
        kernel, stride, padding, dilation, groups: see `patches.patches`.
        bias: append the coordinate 1 to every patch.

    Returns:
        (groups, d, d), d = channels / groups * kernel places + bias, in at least single precision.
    """
    x, strides = linalg.for_sums(x), list(stride)
    for axis, (k, s, pad) in enumerate(zip(kernel, stride, padding, strict=True)):
        if k == 1 and tuple(pad) == (0, 0) and s > 1:
            x = x[(slice(None),) * (2 + axis) + (slice(None, None, s), ...)]
            strides[axis] = 1
    if math.prod(kernel) == 1 and not any(map(sum, padding)) and not bias:
        return output_second_moment_sum(x, groups)
    axes = [_Axis(*sides) for sides in zip(x.shape[2:], kernel, strides, padding, dilation, strict=True)]
    if len(axes) == 1:
        x, axes = x[:, :, None, :], [_Axis(1, 1, 1, (0, 0), 1), *axes]
    if len(axes) == 2 and x.shape[0] > 0:
        plane = _Plane(axes[0].dealt(), axes[1].dealt())
        patch_work = math.prod([axis.kernel**2 * axis.places for axis in axes])
        saved = patch_work - plane.work() * math.prod(strides) ** 2
        saved *= x.shape[0] * x.shape[1] ** 2 // groups
        launches = _LAUNCHES * math.prod(kernel)
        if saved > launches * factorizations(array_namespace(x)).work_of_a_launch(x):
            moments = plane.second_moment_sum(_dealt(x, axes), groups, bias)
            return _kept(moments, axes, x.shape[1] // groups, bias)
    if len(kernel) == 1:
        x = x[:, :, 0, :]
    features = x.shape[1] * math.prod(kernel)
    places = max(math.prod([axis.places for axis in axes]), 1)
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
    y = linalg.for_sums(y)
    n, channels, *sizes = y.shape
    places = math.prod(sizes)
    if groups == 1 and places >= channels:  # else each example's product is a sliver
        return linalg.summed_gram(xp.reshape(y, (n, channels, places)))[None, ...]
    return linalg.gram_in_single(patches.output_rows(y, groups))


class _Axis:
    """One axis of a convolution.

    Place i of the kernel sees, at place y of the output, the position y * stride + i * dilation - before
    of the image, and outside of the image zeros.
    """

    def __init__(self, size: int, kernel: int, stride: int, padding: Pair, dilation: int) -> None:
        self.size, self.kernel, self.stride = size, kernel, stride
        self.padding, self.dilation = padding, dilation
        self.places = patches.output_size(size, kernel, stride, padding, dilation)

    def dealt(self) -> _Axis:
        """The axis of each of `stride` images that its positions, with padding, are dealt out to."""
        if self.stride == 1:
            return self
        kernel = (self.kernel - 1) * self.dilation // self.stride + 1
        return _Axis(self.places + kernel - 1, kernel, 1, (0, 0), 1)

    def dealt_places(self) -> list[Pair]:
        """For each place of the kernel, which image it sees and at which place of that one's kernel."""
        if self.stride == 1:
            return [(0, i) for i in range(self.kernel)]
        return [divmod(i * self.dilation, self.stride)[::-1] for i in range(self.kernel)]

    def strips(self) -> list[range]:
        """The first and the last positions, those that some place of the kernel misses (stride 1)."""
        before, size = self.padding[0], self.size
        first = range(min(max(self.dilation * (self.kernel - 1) - before, 0), size))
        last = range(min(max(self.places - before, 0), size), size)
        return [range(size)] if first.stop > last.start else [s for s in (first, last) if s]

    def seen(self, place: int) -> Pair:
        """The positions [start, stop) that a place of the kernel sees (stride 1)."""
        start = place * self.dilation - self.padding[0]
        return min(max(start, 0), self.size), min(max(start + self.places, 0), self.size)

    def missed(self, place: int, other: int, strip: range) -> list[Pair]:
        """What a pair of places does not see: two positions at its distance, counted in a strip."""
        start, stop = self.seen(place)
        distance = (other - place) * self.dilation
        return [
            (u - strip.start, u + distance - strip.start)
            for u in strip
            if not start <= u < stop and u + distance in strip
        ]


def _dealt(x: Array, axes: Sequence[_Axis]) -> Array:
    """(n, channels, height, width) -> (n, channels * strides, height', width')."""
    if all(axis.stride == 1 for axis in axes):
        return x
    xp = array_namespace(x)
    down, right = axes[0].stride, axes[1].stride
    for at, axis in enumerate(axes, start=2):
        if axis.stride > 1:
            before, size = axis.padding[0], axis.dealt().size * axis.stride
            after = max(size - before - axis.size, 0)
            x = patches.zero_padded(x, [(before, after) if i == at else (0, 0) for i in (2, 3)])
            x = x[:, :, :size, :] if at == 2 else x[..., :size]
    n, channels, height, width = x.shape
    x = xp.reshape(x, (n, channels, height // down, down, width // right, right))
    x = xp.permute_dims(x, (0, 1, 3, 5, 2, 4))
    return xp.reshape(x, (n, channels * down * right, height // down, width // right))


def _kept(moments: Array, axes: Sequence[_Axis], channels: int, bias: bool) -> Array:
    """Of the places of all images that were dealt out those of the kernel, in its order."""
    if all(axis.stride == 1 for axis in axes):
        return moments
    xp = array_namespace(moments)
    (down, tall), (right, wide) = ((axis.stride, axis.dealt().kernel) for axis in axes)
    rows, columns = (axis.dealt_places() for axis in axes)
    found = [
        (((c * down + a) * right + b) * tall + i) * wide + j
        for c in range(channels)
        for a, i in rows
        for b, j in columns
    ]
    kept = xp.asarray(found + [moments.shape[-1] - 1] * bias, device=device_of(moments))
    return xp.take(xp.take(moments, kept, axis=1), kept, axis=2)


class _Plane:
    """A convolution with stride 1 over two axes."""

    def __init__(self, rows: _Axis, columns: _Axis) -> None:
        self.rows, self.columns = rows, columns

    def work(self) -> int:
        """Products of all channels with all channels for an image."""
        rows, columns = self.rows, self.columns
        inside = rows.kernel * (2 * columns.kernel - 1) * rows.size * columns.size
        border = sum((columns.kernel * len(strip)) ** 2 * columns.places for strip in rows.strips())
        border += sum(rows.kernel * len(strip) ** 2 * rows.size for strip in columns.strips())
        return inside + border

    def second_moment_sum(self, x: Array, groups: int, bias: bool) -> Array:
        xp = array_namespace(x)
        tall, wide = self.rows.kernel, self.columns.kernel
        lines, borders = self.lines(x, groups), self.border_rows(x, groups)
        c = lines[0].shape[-1]
        blocks: dict[Pair, Array] = {}
        for i in range(tall):
            for other in range(i, tall):
                block = lines[other - i]
                for start, strip in borders:
                    for u, v in self.rows.missed(i, other, start):
                        block = block - xp.permute_dims(strip[:, :, u, :, :, v, :], (0, 2, 4, 1, 3))
                blocks[i, other] = block
                blocks[other, i] = xp.permute_dims(block, (0, 2, 1, 4, 3))
        grid = xp.stack([blocks[i, j] for i in range(tall) for j in range(tall)], axis=1)
        grid = xp.reshape(grid, (groups, tall, tall, wide, wide, c, c))
        side = c * tall * wide
        # In two steps that each move pieces of memory: together they take a third of the time of one.
        moments = xp.reshape(xp.permute_dims(grid, (0, 5, 1, 3, 2, 4, 6)), (groups * side, -1, c))
        moments = xp.reshape(xp.matrix_transpose(moments), (groups, side, side))
        return self.with_bias(moments, x, groups) if bias else moments

    def lines(self, x: Array, groups: int) -> list[Array]:
        """For each vertical distance, over all pairs of lines: (groups, wide, wide, c, c)."""
        xp = array_namespace(x)
        tall, wide = self.rows.kernel, self.columns.kernel
        dilation = self.rows.dilation, self.columns.dilation
        every = factorizations(xp).correlations(x, (tall, wide), dilation, groups)
        borders = [
            (start, xp.permute_dims(strip, (2, 5, 4, 0, 1, 3)))  # (columns, columns, tall, groups, c, c)
            for start, strip in self.border_columns(x, groups)
        ]
        every = xp.permute_dims(every, (2, 1, 0, 3, 4))
        pairs = []
        for j in range(wide):
            for other in range(wide):
                pair = every[other - j + wide - 1, ...]
                for start, strip in borders:
                    for u, v in self.columns.missed(j, other, start):
                        pair = pair - strip[u, v, ...]
                pairs.append(pair)
        stacked = xp.stack(pairs, axis=2)  # (tall, groups, pairs, c, c)
        stacked = xp.reshape(stacked, (tall, groups, wide, wide, *stacked.shape[3:]))
        return [stacked[apart, ...] for apart in range(tall)]

    def border_rows(self, x: Array, groups: int) -> list[tuple[range, Array]]:
        """Σ over pairs of rows in a strip: (groups, c, rows, wide, c, rows, wide)."""
        xp = array_namespace(x)
        c, wide, found = x.shape[1] // groups, self.columns.kernel, []
        for strip in self.rows.strips():
            kernel, padding = (len(strip), wide), ((0, 0), self.columns.padding)
            some = x[:, :, strip.start : strip.stop, :]
            rows = patches.patches(some, kernel, (1, 1), padding, (1, self.columns.dilation), groups)
            shape = (groups, c, len(strip), wide, c, len(strip), wide)
            found.append((strip, xp.reshape(linalg.gram_in_single(rows), shape)))
        return found

    def border_columns(self, x: Array, groups: int) -> list[tuple[range, Array]]:
        """Σ over pairs of columns in a strip: (groups, c, columns, c, tall, columns)."""
        xp = array_namespace(x)
        c, tall, down, found = x.shape[1] // groups, self.rows.kernel, self.rows.dilation, []
        for strip in self.columns.strips():
            some, columns = x[..., strip.start : strip.stop], len(strip)
            padding = (0, down * (tall - 1)), (0, 0)
            below = patches.patches(some, (tall, columns), (1, 1), padding, (down, 1), groups)
            here = patches.patches(some, (1, columns), (1, 1), ((0, 0), (0, 0)), (1, 1), groups)
            products = linalg.transposed_times(lift(here), lift(below))
            found.append((strip, xp.reshape(products, (groups, c, columns, c, tall, columns))))
        return found

    def with_bias(self, moments: Array, x: Array, groups: int) -> Array:
        """Second moments of the patches with a 1 behind."""
        xp = array_namespace(x)
        total = xp.sum(lift(x), axis=0)
        rows, columns = ([a.seen(k) for k in range(a.kernel)] for a in (self.rows, self.columns))
        sums = [xp.sum(total[:, a:b, c:d], axis=(1, 2)) for a, b in rows for c, d in columns]
        vector = xp.reshape(xp.stack(sums, axis=-1), (groups, moments.shape[-1], 1))
        count = float(x.shape[0] * self.rows.places * self.columns.places)
        corner = xp.zeros((groups, 1, 1), dtype=moments.dtype, device=device_of(moments)) + count
        lower = xp.concat([xp.matrix_transpose(vector), corner], axis=-1)
        return xp.concat([xp.concat([moments, vector], axis=-1), lower], axis=-2)
