"""torch as the core's array namespace: the standard's names where torch spells them otherwise.

Only names that the core uses are here, each a plain alias or a one-line function, so that
`torch.compile` traces through them.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn import grad

from suite.core import _numpy

# Sides from which half a product is faster than a whole one; with rows twice as many. Measured.
_SMALLEST_HALVED, _SMALLEST_HALVED_TALL = 384, 128
# Asked here, for torch.compile cannot.
_ONEDNN = torch.backends.mkldnn.is_available()
_CPU_MULTIPLIES_BFLOAT16 = _ONEDNN and builtins.any(  # no public question exists
    getattr(torch.cpu, name, lambda: False)()
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
)
_STRIP = 128  # rows to handle at a time, to stay in the cache
# Sides of matrices that are inverted by halves, up to and from; of halves that no more are.
_LARGEST_SMALL, _SMALLEST_LARGE, _SMALLEST_LAPACK = 128, 768, 32
_CACHE = 131072  # numbers
# Of a GPU: sides up to which LAPACK's like is as fast as products, sides and numbers to handle at once.
_LARGEST_LEAF, _SMALLEST_SPLIT, _ON_DEVICE = 256, 512, 2**26
_SUMS_HALVES = hasattr(torch.ops.aten.bmm, "dtype")  # products with another dtype, since torch 2.8
_HAS_PRECISIONS = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # of each backend, since 2.9
_POSITIONS_AT_ONCE = 16384  # that a convolution sums in one float32 accumulator

abs = torch.abs
all = torch.all
any = torch.any
arange = torch.arange
argmax = torch.argmax
asarray = torch.asarray
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
int32 = torch.int32
isfinite = torch.isfinite
linalg = torch.linalg
log = torch.log
log2 = torch.log2
matmul = torch.matmul
mean = torch.mean
moveaxis = torch.moveaxis
ones = torch.ones
reshape = torch.reshape
sqrt = torch.sqrt
stack = torch.stack
sum = torch.sum
triu = torch.triu
where = torch.where
zeros = torch.zeros
zeros_like = torch.zeros_like


def argsort(x: torch.Tensor, *, axis: int, stable: Any) -> torch.Tensor:
    return torch.argsort(x, dim=axis, stable=stable)


def astype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def cumulative_sum(x: torch.Tensor, *, axis: int) -> torch.Tensor:
    return torch.cumsum(x, dim=axis)


def expand_dims(x: torch.Tensor, *, axis: int) -> torch.Tensor:
    return x.unsqueeze(axis)


def matrix_transpose(x: torch.Tensor) -> torch.Tensor:
    return x.mT


def max(x: torch.Tensor, *, axis: Any, keepdims: Any = False) -> torch.Tensor:
    return torch.amax(x, dim=axis, keepdim=keepdims)


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
    slow = not _LARGEST_SMALL < x.shape[-1] < _SMALLEST_LARGE
    compute = _inverses
    if _is_itself(x) and not x.requires_grad:
        if x.device.type == "cpu":
            compute = _by_halves if slow else _inverses
        elif x.shape[-1] > 1:
            compute = _on_device
    inverse, factored = compute(x)
    # Of positive definite matrices the diagonal bounds all entries; other infinities fail to factorize.
    finite = torch.isfinite(trace(x)) & torch.isfinite(trace(inverse))
    fine = (factored & finite)[..., None, None]
    return usually(fine, inverse, lambda: torch.full_like(inverse, torch.nan))


def _inverses(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., n, n) -> inverses, and whether (...) could be factorized."""
    factor, info = torch.linalg.cholesky_ex(x)
    factored = info == 0

    def eye() -> torch.Tensor:
        return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)

    inverse = torch.cholesky_inverse(usually(factored[..., None, None], factor, eye))
    # LAPACK's column order would survive until a checkpoint, and products round differently after it.
    return inverse.mT.contiguous(), factored  # it is symmetric


def _by_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`_inverses`, of matrices for whose size LAPACK is slow: small ones a cache of them at a time."""
    n = x.shape[-1]
    if n <= _LARGEST_SMALL:

        def squared(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            root, info = _inverse_root(part)
            return torch.matmul(root.mT, root), info

        return _in_parts(x, _CACHE, squared)
    inverses = torch.empty_like(x, memory_format=torch.contiguous_format).reshape(-1, n, n)
    infos = [torch.zeros(0, dtype=torch.int32)]
    for matrix, inverse in zip(x.reshape(-1, n, n), inverses, strict=True):
        root = torch.zeros_like(matrix, memory_format=torch.contiguous_format)
        infos.append(_large_inverse_root(matrix, root).reshape(1))
        for start, stop in _strips(n):  # of rootᵀ root, what is left of the diagonal and on it
            own = inverse[start:stop, :stop]
            torch.mm(root[start:, start:stop].mT, root[start:, :stop], out=own)
            own[:, start:] = (own[:, start:] + own[:, start:].mT) * 0.5
            inverse[:start, start:stop] = own[:, :start].mT
    return inverses.reshape(x.shape), (torch.cat(infos) == 0).reshape(x.shape[:-2])


def _on_device(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`_inverses` of a stack at once, by products: a GPU's libraries solve one matrix after another."""

    def squared(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, root, info = _factor_and_inverse(part)
        return _gram_of_lower(root), info

    return _in_parts(x, _ON_DEVICE, squared)


def _in_parts(
    x: torch.Tensor,
    numbers: int,
    squared: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_inverses`, so many numbers at a time; `squared` makes products rootᵀ root, and infos."""
    n = x.shape[-1]
    inverses = torch.empty_like(x, memory_format=torch.contiguous_format).reshape(-1, n, n)
    infos = [torch.zeros(0, dtype=torch.int32, device=x.device)]
    count = builtins.max(1, numbers // (n * n))
    for part, inverse in zip(x.reshape(-1, n, n).split(count), inverses.split(count), strict=True):
        product, info = squared(part)
        torch.add(product, product.mT, out=inverse).mul_(0.5)
        infos.append(info)
    return inverses.reshape(x.shape), (torch.cat(infos) == 0).reshape(x.shape[:-2])


def _factor_and_inverse(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k, n, n) -> L and L⁻¹ of x = L Lᵀ, by halves, and info as of `_inverse_root`.

    Products with an inverse err by its condition. What is below the diagonal of L is corrected once,
    which leaves what a solve with L would: else ill-conditioned matrices would not be factorized.
    """
    n = x.shape[-1]
    if n <= _LARGEST_LEAF:
        return _solved(x)
    k = _half(n)
    first, first_inverse, first_info = _factor_and_inverse(x[:, :k, :k])
    below = x[:, k:, :k]
    beside = torch.bmm(below, first_inverse.mT)
    beside = torch.baddbmm(beside, torch.baddbmm(below, beside, first.mT, alpha=-1), first_inverse.mT)
    rest = torch.baddbmm(x[:, k:, k:], beside, beside.mT, alpha=-1)
    second, second_inverse, second_info = _factor_and_inverse(rest)
    factor, inverse = (torch.zeros_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    factor[:, :k, :k], factor[:, k:, :k], factor[:, k:, k:] = first, beside, second
    inverse[:, :k, :k], inverse[:, k:, k:] = first_inverse, second_inverse
    inverse[:, k:, :k] = torch.bmm(second_inverse, torch.bmm(beside, first_inverse)).neg_()
    return factor, inverse, first_info + second_info


def _solved(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k, n, n) -> L and L⁻¹ of x = L Lᵀ, and info, by LAPACK and its like."""
    factor, info = torch.linalg.cholesky_ex(x)
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return factor, torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False), info


def _gram_of_lower(root: torch.Tensor) -> torch.Tensor:
    """(k, n, n) lower triangular -> rootᵀ root, without most of the zeros."""
    n = root.shape[-1]
    if n <= _SMALLEST_SPLIT:
        return torch.bmm(root.mT, root)
    k = _half(n)
    below, second = root[:, k:, :k], root[:, k:, k:]
    product = torch.empty_like(root)
    product[:, :k, :k] = torch.baddbmm(_gram_of_lower(root[:, :k, :k]), below.mT, below)
    across = torch.bmm(second.mT, below)
    product[:, k:, :k], product[:, :k, k:] = across, across.mT
    product[:, k:, k:] = _gram_of_lower(second)
    return product


def _half(n: int) -> int:
    """About n / 2, a multiple of 64: GPUs read aligned rows faster."""
    return -(-(n // 2) // 64) * 64


def _inverse_root(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, n, n) -> L⁻¹ of x = L Lᵀ, by halves, and LAPACK's (k,) info, not zero where there is none."""
    n = x.shape[-1]
    if n <= _SMALLEST_LAPACK:
        return _solved(x)[1:]
    k = n // 2
    first, first_info = _inverse_root(x[..., :k, :k])
    beside = torch.matmul(x[..., k:, :k], first.mT)
    second, second_info = _inverse_root(x[..., k:, k:] - torch.matmul(beside, beside.mT))
    root = torch.zeros_like(x, memory_format=torch.contiguous_format)
    root[..., :k, :k], root[..., k:, k:] = first, second
    root[..., k:, :k] = torch.matmul(second, torch.matmul(beside, first)).neg_()
    return root, first_info + second_info


def _large_inverse_root(x: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """`_inverse_root` of one matrix, into the zeros of `root`; returns info.

    Strip by strip, so that products with triangles leave out most of the zeros. Of x it reads what is
    on the diagonal and below it.
    """
    n = x.shape[-1]
    if n <= _LARGEST_SMALL:
        found, info = _inverse_root(x)
        root.copy_(found)
        return info
    k = n // 2
    above, below = _strips(k), _strips(n - k)
    first, second = root[:k, :k], root[k:, k:]
    first_info = _large_inverse_root(x[:k, :k], first)
    beside, product = x.new_empty(n - k, k), x.new_empty(n - k, k)
    for start, stop in above:
        torch.mm(x[k:, :stop], first[start:stop, :stop].mT, out=beside[:, start:stop])
    rest = x[k:, k:].clone()
    for start, stop in below:
        rest[start:stop, :stop].addmm_(beside[start:stop], beside[:stop].mT, alpha=-1)
    second_info = _large_inverse_root(rest, second)
    for start, stop in above:
        torch.mm(beside[:, start:], first[start:, start:stop], out=product[:, start:stop])
    for start, stop in below:
        torch.mm(second[start:stop, :stop], product[:stop], out=root[k + start : k + stop, :k])
    root[k:, :k].neg_()
    return first_info + second_info


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
    return torch.isfinite(least) & torch.isfinite(greatest)


def largest_entry(x: torch.Tensor, axis: tuple[int, ...], *, keepdims: Any) -> torch.Tensor:
    """max |x| over axes, without an array of |x|."""
    highest, lowest = (
        torch.amax(x, dim=axis, keepdim=keepdims),
        torch.amin(x, dim=axis, keepdim=keepdims),
    )
    return torch.maximum(highest, -lowest)


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
    if found.numel() and _is_at_hand(found):
        least, greatest = torch.stack(torch.aminmax(found)).tolist()
        if least > 1e-15 and greatest < torch.inf:
            return found
    return torch.where((found > 1e-15) & (found < torch.inf), found, other())


def inner_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Σ x y over all entries, without an array of products."""
    return torch.dot(x.reshape(-1), y.reshape(-1))


def add_diagonal(x: torch.Tensor, value: Any) -> torch.Tensor:
    """x + value I; `value` a number or (..., 1, 1)."""
    if not isinstance(value, float) and value.shape[:-2] != x.shape[:-2]:
        x = x.expand(torch.broadcast_shapes(x.shape, value.shape))
    y = x.clone(memory_format=torch.contiguous_format)
    torch.linalg.diagonal(y).add_(value if isinstance(value, float) else value[..., 0])
    return y


def pack(x: torch.Tensor) -> torch.Tensor:
    """See `_numpy.pack`: the same in place, strip by strip."""
    n = x.shape[-1]
    k = (n + 1) // 2
    packed = x.new_empty((*x.shape[:-2], k, n + 1 - n % 2))
    packed[..., :k] = x[..., :k, :k]
    packed[..., n - k + 1 :] = x[..., k:, :k].mT
    second, corner = x[..., k:, k:].mT, packed[..., : n - k, 1 : n - k + 1]
    for start, stop in _strips(n - k):
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
        for start, stop in _strips(lower.shape[-1]):
            lower[..., :start, start:stop] = lower[..., start:stop, :start].mT
            block = lower[..., start:stop, start:stop]
            block.copy_(torch.where(_is_lower(block), block, block.mT))
    return x


def _strips(n: int) -> list[tuple[int, int]]:
    return [(start, builtins.min(start + _STRIP, n)) for start in range(0, n, _STRIP)]


def _is_lower(x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    """(n, n): whether an entry of (..., n, n) is on or below a diagonal."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(diagonal)


def multiplies_as_it_is(x: torch.Tensor) -> Any:
    """Whether products of this dtype are a device's fastest: of bfloat16 where the hardware has them."""
    return x.dtype == torch.bfloat16 and (x.device.type != "cpu" or _CPU_MULTIPLIES_BFLOAT16)


def usually(condition: torch.Tensor, x: torch.Tensor, other: Callable[[], Any]) -> torch.Tensor:
    """`x` where the condition holds, else `other()`; on a CPU `x` itself if it holds everywhere."""
    if _is_at_hand(condition) and condition.all():
        return x
    return torch.where(condition, x, other())


def _is_at_hand(x: torch.Tensor) -> Any:
    """Whether the host has the numbers: nothing is traced, mapped, or on another device."""
    return _is_itself(x) and x.device.type == "cpu"


def _is_itself(x: torch.Tensor) -> Any:
    """Whether it stands for no other tensor: nothing is traced or mapped."""
    return (
        type(x) is torch.Tensor
        and not x.is_meta
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def transposed_times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """xᵀ y."""
    return x.mT @ y


def times_transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x yᵀ."""
    return x @ y.mT


def times_block_diagonal(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """See `suite.core.linalg.times_block_diagonal`; on a CPU straight to where the product belongs."""
    *batch, count, n, _ = blocks.shape
    if not _is_at_hand(x) or x.requires_grad or blocks.requires_grad:
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
    if n < _SMALLEST_HALVED_TALL or x.shape[-2] < n // 16 or not _is_at_hand(x) or not _pays_halved(x):
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


@contextlib.contextmanager
def full_precision(x: torch.Tensor) -> Iterator[None]:
    """Inside, products of single precision are of that, whatever is set for others (TF32).

    That is set for all threads: they are inside together, and the last one to leave puts it back.
    """
    if x.device.type == "cpu" or torch.compiler.is_compiling():
        yield
        return
    _inside.enter()
    try:
        yield
    finally:
        _inside.leave()


class _Inside:
    """Who is inside `full_precision`, and what to put back."""

    def __init__(self) -> None:
        self.lock, self.count, self.before = threading.Lock(), 0, ""

    def enter(self) -> None:
        with self.lock:
            if not self.count:
                self.before = _product_precision()
                if self.before:
                    _set_product_precision("ieee" if _HAS_PRECISIONS else "highest")
            self.count += 1

    def leave(self) -> None:
        with self.lock:
            self.count -= 1
            if not self.count and self.before:
                _set_product_precision(self.before)


_inside = _Inside()


def _product_precision() -> str:
    """What is set for products of float32, as it is to be set again; '' if nothing is less exact."""
    if not _HAS_PRECISIONS:
        old = torch.get_float32_matmul_precision()
        return "" if old == "highest" else old
    backends: Any = torch.backends
    found = backends.cuda.matmul.fp32_precision
    if found in ("ieee", "none"):
        return ""
    # What is set for all backends reads as if it were for this one, and must not become that.
    return "none" if backends.fp32_precision == found else str(found)


def _set_product_precision(value: str) -> None:
    if _HAS_PRECISIONS:
        settings: Any = torch.backends.cuda.matmul
        settings.fp32_precision = value
    else:
        torch.set_float32_matmul_precision(value)


def _pays_halved(x: torch.Tensor) -> Any:
    """Whether half of xᵀ x is faster than all of it: of large ones, and of tall ones but for views."""
    return x.shape[-1] >= _SMALLEST_HALVED or (x.shape[-2] >= 2 * x.shape[-1] and x.is_contiguous())


def parts(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """On a CPU `x` cut along its first axis into pieces of at most `count`; else `x`."""
    return x.split(count) if x.device.type == "cpu" else (x,)


def work_of_a_launch(x: torch.Tensor) -> int:
    """See `_numpy.work_of_a_launch`: some microseconds of a GPU that makes 10^13 products a second."""
    return 0 if x.device.type == "cpu" else 2**26


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
    if not _is_at_hand(x):
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
        total = torch.zeros((), dtype=x.dtype)
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
