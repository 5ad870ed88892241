"""Inverses of symmetric positive definite matrices, by what is fastest for their size and device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from suite.core._torch_known import is_itself, usually

_STRIP = 128  # rows to handle at a time, to stay in the cache
# Of a CPU: sides of matrices that LAPACK inverts as fast as products do, and of halves of others.
_LARGEST_WHOLE, _LARGEST_HALF = 1792, 256
# Of a GPU the same of its library; sides of triangles that are halved, numbers to handle at once.
_LARGEST_LEAF, _SMALLEST_SPLIT, _ON_DEVICE = 256, 512, 2**26


def inverses(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., n, n) -> inverses, symmetric, and whether (...) could be factorized; others are anything."""
    compute = by_library
    if is_itself(x) and not x.requires_grad:
        if x.device.type != "cpu":
            compute = on_device if x.shape[-1] > 1 else of_numbers
        elif x.shape[-1] > _LARGEST_WHOLE:
            compute = by_strips
    return compute(x)


def of_numbers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`inverses` of matrices of one number."""
    return x.reciprocal(), x[..., 0, 0] > 0


def by_library(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`inverses` by LAPACK and its like."""
    factor, info = torch.linalg.cholesky_ex(x)
    factored = info == 0

    def eye() -> torch.Tensor:
        return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)

    inverse = torch.cholesky_inverse(usually(factored[..., None, None], factor, eye))
    # LAPACK's column order would survive until a checkpoint, and products round differently after it.
    return inverse.mT.contiguous(), factored  # it is symmetric


def by_strips(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`inverses` of large matrices, of products that leave out most of a triangle's zeros."""

    def invert(part: torch.Tensor, inverses: torch.Tensor) -> torch.Tensor:
        (matrix,), (inverse,) = part, inverses
        root = torch.zeros_like(matrix, memory_format=torch.contiguous_format)
        info = _factorize(matrix, torch.empty_like(root), root)
        for start, stop in strips(len(matrix)):  # of rootᵀ root, what is left of the diagonal and on it
            own = inverse[start:stop, :stop]
            torch.mm(root[start:, start:stop].mT, root[start:, :stop], out=own)
            own[:, start:] = (own[:, start:] + own[:, start:].mT) * 0.5
            inverse[:start, start:stop] = own[:, :start].mT
        return info[None]

    return _in_parts(x, 1, invert)


def _in_parts(
    x: torch.Tensor, count: int, invert: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`inverses`, so many matrices at a time.

    Args:
        invert: writes inverses of (k, n, n) into its second argument; returns LAPACK's (k,) info.
    """
    n = x.shape[-1]
    found = torch.empty_like(x, memory_format=torch.contiguous_format).reshape(-1, n, n)
    infos = [torch.zeros(0, dtype=torch.int32, device=x.device)]
    parts = zip(x.reshape(-1, n, n).split(count), found.split(count), strict=True)
    infos += [invert(part, inverses) for part, inverses in parts if len(part)]
    return found.reshape(x.shape), (torch.cat(infos) == 0).reshape(x.shape[:-2])


def _factorize(x: torch.Tensor, factor: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """(n, n) -> L and L⁻¹ of x = L Lᵀ, below the diagonals of `factor` and of zeros, and LAPACK's info.

    Of x it reads what is on the diagonal and below it.
    """
    n = x.shape[-1]
    if n <= _LARGEST_HALF:
        own_factor, own_root, info = _solved(x)
        factor.copy_(own_factor)
        root.copy_(own_root)
        return info
    k = n // 2
    above, below = strips(k), strips(n - k)
    first, second, beside = root[:k, :k], root[k:, k:], factor[k:, :k]
    first_info = _factorize(x[:k, :k], factor[:k, :k], first)
    # A product with `first` would err by its condition.
    beside.copy_(torch.linalg.solve_triangular(factor[:k, :k].mT, x[k:, :k], upper=True, left=False))
    rest = x[k:, k:].clone()
    for start, stop in below:
        rest[start:stop, :stop].addmm_(beside[start:stop], beside[:stop].mT, alpha=-1)
    second_info = _factorize(rest, factor[k:, k:], second)
    product = x.new_empty(n - k, k)
    for start, stop in above:
        torch.mm(beside[:, start:], first[start:, start:stop], out=product[:, start:stop])
    for start, stop in below:
        torch.mm(second[start:stop, :stop], product[:stop], out=root[k + start : k + stop, :k])
    root[k:, :k].neg_()
    return first_info + second_info


def strips(n: int) -> list[tuple[int, int]]:
    """Where parts of n rows begin and end."""
    return [(start, min(start + _STRIP, n)) for start in range(0, n, _STRIP)]


def on_device(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`inverses` of a stack at once, by products: a GPU's libraries solve one matrix after another."""

    def invert(part: torch.Tensor, inverses: torch.Tensor) -> torch.Tensor:
        _, root, info = _factor_and_inverse(part)
        product = gram_of_lower(root)
        torch.add(product, product.mT, out=inverses).mul_(0.5)
        return info

    return _in_parts(x, max(1, _ON_DEVICE // x.shape[-1] ** 2), invert)


def _factor_and_inverse(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k, n, n) -> L and L⁻¹ of x = L Lᵀ, by halves, and LAPACK's (k,) info, zero where there is one.

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


def gram_of_lower(root: torch.Tensor) -> torch.Tensor:
    """(k, n, n) lower triangular -> rootᵀ root, without most of the zeros."""
    n = root.shape[-1]
    if n <= _SMALLEST_SPLIT:
        return torch.bmm(root.mT, root)
    k = _half(n)
    below, second = root[:, k:, :k], root[:, k:, k:]
    product = torch.empty_like(root)
    product[:, :k, :k] = torch.baddbmm(gram_of_lower(root[:, :k, :k]), below.mT, below)
    across = torch.bmm(second.mT, below)
    product[:, k:, :k], product[:, :k, k:] = across, across.mT
    product[:, k:, k:] = gram_of_lower(second)
    return product


def _half(n: int) -> int:
    """About n / 2, a multiple of 64: GPUs read aligned rows faster."""
    return -(-(n // 2) // 64) * 64


def _solved(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(..., n, n) -> L and L⁻¹ of x = L Lᵀ, and info, by LAPACK and its like."""
    factor, info = torch.linalg.cholesky_ex(x)
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return factor, torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False), info
