"""Linear algebra that the standard leaves out or leaves unsafe, over stacks of matrices.

A matrix that cannot be handled (not finite, not positive definite, solver gave up) comes back as NaN,
alone: its neighbours in the stack are unharmed, nothing raises, and nothing waits for a device.
Half precision is lifted to float32 inside and the result comes back in float32.
"""

from __future__ import annotations

from suite.core._namespace import (
    Array,
    Scalar,
    array_namespace,
    as_scalar,
    device_of,
    factorizations,
    lift,
)


def transpose(x: Array) -> Array:
    """(..., m, n) -> (..., n, m)."""
    return array_namespace(x).matrix_transpose(x)


def symmetrize(x: Array) -> Array:
    """(x + xᵀ) / 2."""
    return (x + transpose(x)) * 0.5


def eye_like(x: Array) -> Array:
    """The identity of the size, dtype and device of the matrices (..., n, n) in `x`."""
    xp = array_namespace(x)
    return xp.eye(x.shape[-1], dtype=x.dtype, device=device_of(x))


def trace(x: Array) -> Array:
    """(..., n, n) -> (...): the sum of each diagonal."""
    return array_namespace(x).sum(x * eye_like(x), axis=(-2, -1))


def add_diagonal(x: Array, value: Scalar) -> Array:
    """`x` + `value` I, for (..., n, n) matrices and a number or a (...) array."""
    xp = array_namespace(x)
    value = as_scalar(value, x)
    if not isinstance(value, float):
        value = xp.reshape(value, (*value.shape, 1, 1))
    return x + value * eye_like(x)


def _guard(x: Array) -> tuple[Array, Array]:
    """Finite matrices to work on, and which (..., 1, 1) were finite to begin with."""
    xp = array_namespace(x)
    x = lift(x)
    finite = xp.all(xp.isfinite(x), axis=(-2, -1))[..., None, None]
    return xp.where(finite, x, eye_like(x)), finite


def damped_inverse(x: Array, damping: Scalar) -> Array:
    """(`x` + `damping` I)⁻¹ by Cholesky, symmetric to the last bit.

    Args:
        x: (..., n, n), symmetric positive semi-definite.
        damping: a number or (...), added to the diagonal.

    Returns:
        (..., n, n); NaN for a matrix that is not finite or, damped, not positive definite.
    """
    xp = array_namespace(x)
    safe, finite = _guard(add_diagonal(lift(x), damping))
    inverse = symmetrize(factorizations(xp).cholesky_inverse(safe))
    return xp.where(finite, inverse, float("nan"))


def eigh(x: Array) -> tuple[Array, Array]:
    """Eigenvalues, clipped at zero from below, and eigenvectors of positive semi-definite matrices.

    Args:
        x: (..., n, n), symmetric; the rounding errors that make an eigenvalue negative are removed.

    Returns:
        values (..., n), ascending, and vectors (..., n, n), one a column; NaN for a matrix that is
        not finite or on which the solver did not converge.
    """
    xp = array_namespace(x)
    safe, finite = _guard(x)
    values, vectors = factorizations(xp).eigh(symmetrize(safe))
    nan = float("nan")
    # maximum(NaN, 0) is NaN in the standard, so a failed block stays visible.
    values = xp.maximum(values, xp.zeros_like(values))
    return xp.where(finite[..., 0], values, nan), xp.where(finite, vectors, nan)


def solve_triangular(x: Array, y: Array, *, upper: bool) -> Array:
    """x⁻¹ y for triangular x (..., n, n) and y (..., n, k); not finite for a singular x."""
    return factorizations(array_namespace(x)).solve_triangular(lift(x), lift(y), upper=upper)


def spectral_norm_bound(x: Array) -> Array:
    """A cheap lower bound of ‖x‖₂ for symmetric or skew-symmetric x, within a factor that is near 1.

    Two power iterations started from the row of largest norm, on x scaled by its largest entry so that
    nothing over- or underflows. Three matrix-vector products.

    Source: Li 2024 (arXiv:2402.11858), the norm bound of its reference implementation.

    Args:
        x: (..., n, n).

    Returns:
        (...); 0 for a zero matrix.
    """
    xp = array_namespace(x)
    x = lift(x)
    largest = xp.max(xp.abs(x), axis=(-2, -1), keepdims=True)
    x = x / _or_one(largest)
    row = xp.argmax(xp.sum(x * x, axis=-1), axis=-1)
    positions = xp.arange(x.shape[-1], device=device_of(x))
    start = xp.astype(positions == row[..., None], x.dtype)[..., None, :]
    once = xp.matmul(xp.matmul(start, x), x)
    norm = xp.sqrt(xp.sum(once * once, axis=-1, keepdims=True))
    twice = xp.matmul(once / _or_one(norm), x)
    return (largest * xp.sqrt(xp.sum(twice * twice, axis=-1, keepdims=True)))[..., 0, 0]


def _or_one(x: Array) -> Array:
    """`x` where it is positive, else 1: a denominator."""
    xp = array_namespace(x)
    return xp.where(x > 0, x, xp.zeros_like(x) + 1)
