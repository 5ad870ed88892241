"""Symmetric and triangular matrices in half the memory: one triangle, folded into a rectangle.

The lower triangle of S = [[S₁₁, S₂₁ᵀ], [S₂₁, S₂₂]], k = ⌈n/2⌉ rows in S₁₁, is three pieces: two
triangles, which complete each other to the rectangle of k rows that `pack` begins with (S₁₁'s on and
below its diagonal, S₂₂'s, transposed, above it), and S₂₁ᵀ beside them. So n (n + 1) / 2 numbers are
copied as blocks, without lists of indices.

Source: Gustavson, Waśniewski, Dongarra & Langou 2010 (ACM TOMS 37 (2)), rectangular full packed format;
the pieces are theirs, laid side by side.
"""

from __future__ import annotations

from suite.core import linalg
from suite.core._namespace import Array, array_namespace, factorizations


def packed_shape(side: int) -> tuple[int, int]:
    """(⌈n/2⌉, n or n + 1, whichever is odd): n (n + 1) / 2 numbers."""
    return (side + 1) // 2, side + 1 - side % 2


def side_of(packed: Array) -> int:
    """n of matrices (..., *packed_shape(n))."""
    rows, columns = packed.shape[-2:]
    return 2 * rows if columns > 2 * rows else 2 * rows - 1


def pack(x: Array, *, symmetric: bool = False) -> Array:
    """The lower triangles of (..., n, n) as (..., *packed_shape(n)).

    Args:
        symmetric: whether the upper ones are these transposed, up to rounding: either may be read then,
            which saves transposing two of three pieces. Else what is above the diagonal is not read.
    """
    packed: Array = factorizations(array_namespace(x)).pack(x, symmetric=symmetric)
    return packed


def unpack(packed: Array) -> Array:
    """Symmetric matrices (..., n, n) whose lower triangles `pack` has packed, to the last bit."""
    full: Array = factorizations(array_namespace(packed)).unpack(packed, side_of(packed))
    return full


def packed_diagonal(packed: Array) -> Array:
    """(..., n), the diagonals of the matrices (..., n, n) that `pack` has packed."""
    k = packed.shape[-2]
    m = side_of(packed) - k
    parts = linalg.diagonal(packed[..., :k]), linalg.diagonal(packed[..., :m, 1 : m + 1])
    return array_namespace(packed).concat(parts, axis=-1)


def pack_upper(x: Array) -> Array:
    """The upper triangles of (..., n, n) as (..., *packed_shape(n)); what is below them is not read."""
    return pack(linalg.transpose(x))


def unpack_upper(packed: Array) -> Array:
    """Upper triangular matrices (..., n, n), zero below, that `pack_upper` has packed, exactly."""
    return array_namespace(packed).triu(unpack(packed))
