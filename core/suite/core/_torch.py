"""torch as the core's array namespace: the standard's names where torch spells them otherwise.

Only names that the core uses are here, each a plain alias or a one-line function, so that
`torch.compile` traces through them.
"""

from __future__ import annotations

import builtins
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn import grad

from suite.core import _namespace, _numpy, _torch_inverses, _torch_known, _torch_precision

_SMALL = 2**16  # numbers of which an array more costs less than a call more
# Sides from which half a product is faster than a whole one; with rows twice as many. Measured.
_SMALLEST_HALVED, _SMALLEST_HALVED_TALL = 384, 128
# Asked here, for torch.compile cannot.
_ONEDNN = torch.backends.mkldnn.is_available()
_CPU_MULTIPLIES_BFLOAT16 = _ONEDNN and builtins.any(  # no public question exists
    getattr(torch.cpu, name, lambda: False)()
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
)
_SUMS_HALVES = hasattr(torch.ops.aten.bmm, "dtype")  # products with another dtype, since torch 2.8
_POSITIONS_AT_ONCE = 16384  # that a convolution sums in one float32 accumulator
_namespace._torch = sys.modules[__name__]

abs = torch.abs
all = torch.all
any = torch.any
arange = torch.arange
argmax = torch.argmax
bool = torch.bool
broadcast_to = torch.broadcast_to
concat = torch.concat
cos = torch.cos
exp = torch.exp
eye = torch.eye
finfo = torch.finfo
float32 = torch.float32
float64 = torch.float64
floor = torch.floor
full = torch.full
full_precision = _torch_precision.full_precision
int32 = torch.int32
linalg = torch.linalg
log = torch.log
log2 = torch.log2
mean = torch.mean
moveaxis = torch.moveaxis
ones = torch.ones
repeated = _numpy.repeated
reshape = torch.reshape
sqrt = torch.sqrt
stack = torch.stack
sum = torch.sum
triu = torch.triu
usually = _torch_known.usually
where = torch.where
zeros = torch.zeros
zeros_like = torch.zeros_like


def argsort(x: torch.Tensor, *, axis: int, stable: Any) -> torch.Tensor:
    return torch.argsort(x, dim=axis, stable=stable)


def asarray(x: Any, **where: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor) and not where:  # which torch moves to the default device
        return x
    return torch.asarray(x, **where)


def astype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def cumulative_sum(x: torch.Tensor, *, axis: int) -> torch.Tensor:
    return torch.cumsum(x, dim=axis)


def expand_dims(x: torch.Tensor, *, axis: int) -> torch.Tensor:
    return x.unsqueeze(axis)


def matrix_transpose(x: torch.Tensor) -> torch.Tensor:
    return x.mT


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.ndim == y.ndim == 3 and x.shape[0] == y.shape[0]:
        return torch.bmm(x, y)  # as torch.matmul does it after five calls more
    return torch.matmul(x, y)


def max(x: torch.Tensor, *, axis: Any, keepdims: Any = False) -> torch.Tensor:
    return torch.amax(x, dim=axis, keepdim=keepdims)


def isfinite(x: torch.Tensor) -> torch.Tensor:
    """Whether numbers are; of two operations, where torch's own is of four."""
    if torch.compiler.is_compiling():  # which fuses these, and may know that 0 x is 0
        return torch.isfinite(x)
    return x * 0 == 0


def min(x: torch.Tensor, *, axis: Any, keepdims: Any = False) -> torch.Tensor:
    return torch.amin(x, dim=axis, keepdim=keepdims)


def maximum(x: Any, y: Any) -> torch.Tensor:
    if isinstance(y, (int, float)):
        return torch.clamp(x, min=y)
    return torch.maximum(x, y)


def minimum(x: Any, y: Any) -> torch.Tensor:
    if isinstance(y, (int, float)):
        return torch.clamp(x, max=y)
    return torch.minimum(x, y)


def permute_dims(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return torch.permute(x, axes)


def take(x: torch.Tensor, indices: torch.Tensor, *, axis: int) -> torch.Tensor:
    return x.index_select(axis, indices)


def take_along_axis(x: torch.Tensor, indices: torch.Tensor, *, axis: int) -> torch.Tensor:
    return torch.take_along_dim(x, indices, dim=axis)


def cholesky_inverse(x: torch.Tensor) -> torch.Tensor:
    """Inverses, symmetric; NaN throughout that of a matrix that is not finite and positive definite."""
    inverse, factored = _torch_inverses.inverses(x)
    # Of positive definite matrices the diagonal bounds all entries; other infinities fail to factorize.
    finite = isfinite(trace(x) + trace(inverse))
    fine = (factored & finite)[..., None, None]
    return usually(fine, inverse, lambda: torch.full_like(inverse, torch.nan))


def eigh(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and -vectors of (x + xᵀ) / 2; NaN where that is not finite or the solver gave up."""
    finite = are_finite(x)[..., None, None]
    # The solver may never come back from what is not finite.
    safe = usually(finite, x, lambda: torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
    values, vectors = _eigh((safe + safe.mT) * 0.5)
    values = usually(finite[..., 0], values, lambda: torch.full_like(values, torch.nan))
    return values, usually(finite, vectors, lambda: torch.full_like(vectors, torch.nan))


def _eigh(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        values, vectors = torch.linalg.eigh(x)
    except torch.linalg.LinAlgError:
        if x.ndim == 2:  # one matrix: LAPACK did not converge on it
            nan = torch.full_like(x, torch.nan)
            return nan[..., 0], nan
        pairs = [_eigh(matrix) for matrix in x]  # spare the rest of the stack
        values, vectors = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return values, vectors.contiguous()  # as in `cholesky_inverse`


def diagonal(x: torch.Tensor) -> torch.Tensor:
    """(..., n, n) -> (..., n), a view."""
    return torch.linalg.diagonal(x)


def trace(x: torch.Tensor) -> torch.Tensor:
    """The sum of each diagonal."""
    return diagonal(x).sum(-1)


def are_finite(x: torch.Tensor) -> torch.Tensor:
    """(..., n, n) -> (...): whether all entries are finite, without an array of answers."""
    least, greatest = torch.aminmax(x.flatten(-2), dim=-1)
    return isfinite(least) & isfinite(greatest)


def largest_entry(x: torch.Tensor, axis: tuple[int, ...], *, keepdims: Any) -> torch.Tensor:
    """max |x| over axes, without a large array of |x|; a CPU's norms take ten times as long."""
    if torch.compiler.is_compiling() or (x.is_cpu and x.numel() <= _SMALL):
        return torch.amax(torch.abs(x), dim=axis, keepdim=keepdims)
    if not x.is_cpu:
        return torch.linalg.vector_norm(x, math.inf, dim=axis, keepdim=keepdims)
    highest, lowest = (
        torch.amax(x, dim=axis, keepdim=keepdims),
        torch.amin(x, dim=axis, keepdim=keepdims),
    )
    return torch.maximum(highest, -lowest)


def largest_row(x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """The row of (..., n, n) whose `size`, (..., n), is largest, (..., 1, n)."""
    row = torch.argmax(size, dim=-1)[..., None, None]
    return torch.gather(x, -2, row.expand(*x.shape[:-2], 1, x.shape[-1]))


def root_mean_square(
    x: torch.Tensor, axis: tuple[int, ...], other: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """√(mean of x²) over axes, by `other()`, several times as long, where squares leave the range.

    On a GPU, where the host cannot see whether they do, single precision is squared in double.
    """
    is_cpu, has_double = x.device.type == "cpu", x.device.type != "mps"
    if torch.compiler.is_compiling() or not (is_cpu or (has_double and x.dtype == torch.float32)):
        return other()
    count = math.prod([x.shape[a] for a in axis])
    if not is_cpu:
        norm = torch.linalg.vector_norm(x, dim=axis, keepdim=True, dtype=torch.float64)
        return (norm / count**0.5).to(x.dtype)
    found = torch.linalg.vector_norm(x, dim=axis, keepdim=True) / count**0.5
    # What squares below float32's range would add is below its precision, of a mean square above 1e-30.
    if found.numel() and _torch_known.is_at_hand(found):
        least, greatest = torch.stack(torch.aminmax(found)).tolist()
        if least > 1e-15 and greatest < torch.inf:
            return found
    return torch.where((found > 1e-15) & (found < torch.inf), found, other())


def inner_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Σ x y over all entries, without an array of products."""
    return torch.dot(x.reshape(-1), y.reshape(-1))


def wrapping_product(x: torch.Tensor, factor: int) -> torch.Tensor:
    """int32, which is used up, times a number modulo 2³²."""
    if torch.compiler.is_compiling():  # to C++, in which what overflows may come to be anything
        return (x.to(torch.int64) * factor).to(torch.int32)
    return x.mul_(factor)


def add_diagonal(x: torch.Tensor, value: Any) -> torch.Tensor:
    """x + value I; `value` a number or (..., 1, 1)."""
    if not isinstance(value, float) and value.shape[:-2] != x.shape[:-2]:
        x = x.expand(torch.broadcast_shapes(x.shape, value.shape))
    y = x.clone(memory_format=torch.contiguous_format)
    torch.linalg.diagonal(y).add_(value if isinstance(value, float) else value[..., 0])
    return y


def pack(x: torch.Tensor, *, symmetric: Any = False) -> torch.Tensor:
    """See `_numpy.pack`: the same in place, strip by strip."""
    n = x.shape[-1]
    turned = x if symmetric else x.mT
    k = (n + 1) // 2
    packed = x.new_empty((*x.shape[:-2], k, n + 1 - n % 2))
    packed[..., :k] = x[..., :k, :k]
    packed[..., n - k + 1 :] = turned[..., :k, k:]
    second, corner = turned[..., k:, k:], packed[..., : n - k, 1 : n - k + 1]
    for start, stop in _torch_inverses.strips(n - k):
        corner[..., start:stop, stop:] = second[..., start:stop, stop:]
        block, upper = corner[..., start:stop, start:stop], second[..., start:stop, start:stop]
        block.copy_(torch.where(_is_lower(block, -1), block, upper))
    return packed


def unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """Undo `pack` of symmetric matrices."""
    k = (n + 1) // 2
    x = packed.new_empty((*packed.shape[:-2], n, n))
    beside = packed[..., n - k + 1 :]
    x[..., :k, k:], x[..., k:, :k] = beside, beside.mT
    first, second = x[..., :k, :k], x[..., k:, k:]
    first.copy_(packed[..., :k])
    second.copy_(packed[..., : n - k, 1 : n - k + 1])
    for lower in (first, second.mT):
        for start, stop in _torch_inverses.strips(lower.shape[-1]):
            lower[..., :start, start:stop] = lower[..., start:stop, :start].mT
            block = lower[..., start:stop, start:stop]
            block.copy_(torch.where(_is_lower(block), block, block.mT))
    return x


def _is_lower(x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    """(n, n): whether an entry of (..., n, n) is on or below a diagonal."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(diagonal)


def multiplies_as_it_is(x: torch.Tensor) -> Any:
    """Whether products of this dtype are a device's fastest: of bfloat16 where the hardware has them."""
    return x.dtype == torch.bfloat16 and (x.device.type != "cpu" or _CPU_MULTIPLIES_BFLOAT16)


def transposed_times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """xᵀ y."""
    return x.mT @ y


def times_transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x yᵀ."""
    return x @ y.mT


def times_block_diagonal(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """See `suite.core.linalg.times_block_diagonal`; on a CPU straight to where the product belongs."""
    *batch, count, n, _ = blocks.shape
    if not _torch_known.is_at_hand(x) or x.requires_grad or blocks.requires_grad:
        columns = x.unflatten(-1, (count, n)).transpose(-2, -3)
        return torch.matmul(columns, blocks).transpose(-2, -3).flatten(-2)
    product = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, found = (y.reshape(-1, *y.shape[-2:]) for y in (x, product))
    right = blocks.reshape(-1, count, n, n)
    if math.prod(batch) < count:
        columns, places = (y.unflatten(-1, (count, n)).transpose(-2, -3) for y in (rows, found))
        for own, matrices, place in zip(columns, right, places, strict=True):
            torch.bmm(own, matrices, out=place)
    else:
        pieces = zip(rows.split(n, -1), right.unbind(1), found.split(n, -1), strict=True)
        for own, matrices, place in pieces:
            torch.bmm(own, matrices, out=place)
    return product


def gram(x: torch.Tensor) -> torch.Tensor:
    """xᵀ x. On a CPU, of large matrices, 5/8 of it are computed and the rest is mirrored."""
    if x.ndim > 3:  # a product of more than three axes would copy its arguments every time
        return gram(x.flatten(0, -3)).unflatten(0, x.shape[:-2])
    n = x.shape[-1]
    small = n < _SMALLEST_HALVED_TALL or x.shape[-2] < n // 16
    if small or not _torch_known.is_at_hand(x) or not _pays_halved(x):
        return torch.bmm(x.mT, x) if x.ndim == 3 else torch.matmul(x.mT, x)
    product = torch.empty((*x.shape[:-2], n, n), dtype=x.dtype, device=x.device)
    edges = [n * i // 4 for i in range(5)]
    for start, stop in itertools.pairwise(edges):
        strip = torch.matmul(x[..., start:stop].mT, x[..., :stop])
        product[..., start:stop, :stop] = strip
        product[..., :start, start:stop] = strip[..., :start].mT
    return product


def gram_in_single(x: torch.Tensor) -> torch.Tensor:
    """xᵀ x in at least single precision."""
    if not sums_in_single(x):
        return gram(x.float() if x.dtype.itemsize < 4 else x)
    flat = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return _half_products(flat.mT, flat).reshape(*x.shape[:-2], x.shape[-1], x.shape[-1])


def sums_in_single(x: torch.Tensor) -> Any:
    """Whether the device sums products of this half precision in single: exact products, then."""
    return _SUMS_HALVES and x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cuda"


def _half_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x y of stacks (k, m, n) and (k, n, p) in half precision, summed in single."""
    return torch.bmm(x, y, out_dtype=torch.float32)


def _pays_halved(x: torch.Tensor) -> Any:
    """Whether half of xᵀ x is faster than all of it: of large ones, and of tall ones but for views."""
    return x.shape[-1] >= _SMALLEST_HALVED or (x.shape[-2] >= 2 * x.shape[-1] and x.is_contiguous())


def parts(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """On a CPU `x` cut along its first axis into pieces of at most `count`; else `x`."""
    return x.split(count) if x.device.type == "cpu" else (x,)


def work_of_a_launch(x: torch.Tensor) -> int:
    """See `_numpy.work_of_a_launch`: some microseconds of a GPU that makes 10^13 products a second.

    Or of a core that makes 3 10^10.
    """
    return 2**17 if x.device.type == "cpu" else 2**26


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Σ x² over the last axis, in at least single precision; on a device without an array of squares."""
    if x.device.type == "cpu" and x.dtype.itemsize >= 4:
        return (x * x).sum(-1)
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm * norm


def summed_gram(x: torch.Tensor) -> torch.Tensor:
    """Σ x xᵀ over the first axis of (k, m, n); on a CPU without an array of products or a copy of x."""
    halves = sums_in_single(x)
    if not halves and x.device.type == "cpu":
        zero = torch.zeros((x.shape[1], x.shape[1]), dtype=x.dtype, device=x.device)
        return torch.addbmm(zero, x, x.mT)
    flat = x.transpose(0, 1).flatten(1)  # elsewhere each of `addbmm`'s k products is a launch
    return _half_products(flat[None], flat.mT[None])[0] if halves else flat @ flat.mT


def over_groups(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    ends: torch.Tensor,
    *matrices: torch.Tensor,
) -> torch.Tensor:
    """See `_numpy.over_groups`; on a CPU group by group, which takes a fifth of the time."""
    if not _torch_known.is_at_hand(x):
        return _numpy.over_groups(function, x, y, ends, *matrices)  # the host does not wait for `ends`
    groups = enumerate(itertools.pairwise([0, *ends.tolist()]))
    return torch.stack(
        [
            function(x[start:stop], y[start:stop], *(z[group] for z in matrices))
            for group, (start, stop) in groups
        ]
    )


def correlations(
    x: torch.Tensor, kernel: tuple[int, int], dilation: tuple[int, int], groups: int
) -> torch.Tensor:
    """See `_numpy.correlations`. In float32 on a CPU the gradient of a convolution's weight."""
    below, beside = ((k - 1) * d for k, d in zip(kernel, dilation, strict=True))
    _, channels, height, width = x.shape
    tall, wide = kernel[0], 2 * kernel[1] - 1
    c = channels // groups
    if x.device.type == "cpu" and x.dtype == torch.float32 and _ONEDNN:
        # Images one below the other, zeros between them, channels together.
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for part in x.split(builtins.max(1, _POSITIONS_AT_ONCE // (height * width))):
            image = F.pad(part.permute(0, 2, 3, 1), (0, 0, 0, 0, 0, below))
            image = image.reshape(1, -1, width, channels).permute(0, 3, 1, 2)
            base = image[:, :, : image.shape[2] - below]
            size, around = (channels, c, tall, wide), (0, beside)
            total = total + grad.conv2d_weight(image, size, base, 1, around, dilation, groups)
        return total.reshape(groups, c, c, tall, wide).permute(0, 3, 4, 1, 2)
    # Shifted views of one buffer; the zeros between lines and images make them meet nothing else.
    flat = F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, beside, 0, below))
    flat = flat.reshape(-1, groups, c).transpose(0, 1)
    products = _half_products if sums_in_single(x) else torch.matmul
    sums: dict[tuple[int, int], torch.Tensor] = {}
    for i in range(tall):
        for j in range(-(wide // 2) if i else 0, wide // 2 + 1):
            shift = i * dilation[0] * (width + beside) + j * dilation[1]
            sums[i, j] = products(flat[:, : flat.shape[1] - shift].mT, flat[:, shift:])
            sums[-i, -j] = sums[i, j].mT
    order = [sums[i, j] for i in range(tall) for j in range(-(wide // 2), wide // 2 + 1)]
    return torch.stack(order, dim=1).reshape(groups, tall, wide, c, c)


def qr(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal factor of finite square matrices, by Householder reflections."""
    return torch.linalg.qr(x).Q.contiguous()  # as in `cholesky_inverse`


def solve_triangular(x: torch.Tensor, y: torch.Tensor, *, upper: Any) -> torch.Tensor:
    """The solution of x z = y for a stack of triangular matrices x."""
    return torch.linalg.solve_triangular(x, y, upper=upper)
