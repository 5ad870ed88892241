"""Whether the rows that a layer saw explain its weight's gradient, ∇ = Σ g aᵀ, along random vectors.

Where they do not the weight is used elsewhere, too. What a penalty Σ w² or Σ |w| adds is no use.
Source: Freivalds 1979 (Fast probabilistic algorithms), section 2, for the question.
"""

from __future__ import annotations

from collections.abc import Sequence

from suite.core._namespace import Array, Scalar, array_namespace, lift
from suite.core.linalg import root_mean_square, times_transposed


def along(rows: Array, probes: Array) -> Array:
    """R Xᵀ, (..., k, n), in at least single precision: vectors are rows, for columns take far longer.

    Args:
        rows: (..., n, d), X.
        probes: (..., k, d), R.
    """
    rows = lift(rows)
    return times_transposed(array_namespace(rows).astype(probes, rows.dtype), rows)


def penalties_along(weight: Array, probes: Array) -> tuple[Array, Array]:
    """R Wᵀ and R sign(W)ᵀ, (..., k, n) both: what penalties Σ w² and Σ |w| add, up to a number each.

    Args:
        weight: (..., n, d), W.
        probes: (..., k, d), R.
    """
    xp = array_namespace(weight)
    dtype = lift(weight).dtype
    signs = xp.astype(weight > 0, dtype)
    signs -= xp.astype(weight < 0, dtype)
    return along(weight, probes), along(signs, probes)


def rows_along(shares: Array, outputs: Array) -> tuple[Array, Array]:
    """Σ (R a) gᵀ, and Σ |R a| |g|ᵀ: what rounding errors of the first are in proportion to.

    Args:
        shares: (..., k, n), R a of rows a, `along`.
        outputs: (..., n, d_out), rows g.

    Returns:
        (..., k, d_out) and (..., k, d_out), in at least single precision.
    """
    xp = array_namespace(outputs)
    outputs = lift(outputs)
    shares = xp.astype(shares, outputs.dtype)
    return xp.matmul(shares, outputs), xp.matmul(xp.abs(shares), xp.abs(outputs))


def is_unexplained(
    gradient: Array, rows: Array, size: Array, penalties: Sequence[Array], tolerance: Scalar
) -> Array:
    """Whether R ∇ᵀ is not Σ (R a) gᵀ, nor that and multiples of what penalties add.

    Args:
        gradient: (..., k, d_out), R ∇ᵀ, `along`.
        rows, size: (..., k, d_out), as `rows_along` has them of all rows.
        penalties: (..., k, d_out) each.
        tolerance: the error of a sum, in units of its terms' absolute values.

    Returns:
        (...), bool; False if anything is not finite.
    """
    xp = array_namespace(gradient)
    rest = gradient - rows
    own = (rest.ndim - 2, rest.ndim - 1)
    found: list[Array] = []
    for penalty in penalties:
        penalty = xp.astype(penalty, rest.dtype)
        for other in found:
            penalty = penalty - other * xp.sum(other * penalty, axis=own, keepdims=True)
        norm = root_mean_square(penalty, own) * (penalty.shape[-1] * penalty.shape[-2]) ** 0.5
        unit = penalty / xp.where(norm > 0, norm, 1.0)
        rest = rest - unit * xp.sum(unit * rest, axis=own, keepdims=True)
        found.append(unit)
    left, whole = (root_mean_square(x, own)[..., 0, 0] for x in (rest, size))
    return left > tolerance * whole
