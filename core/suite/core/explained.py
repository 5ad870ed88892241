"""Whether the rows that a layer saw explain its weight's gradient, ∇ = Σ g aᵀ, along random vectors.

Where they do not the weight is used elsewhere, too. What a penalty Σ w² or Σ |w| adds is no use.
Source: Freivalds 1979 (Fast probabilistic algorithms), section 2, for the question.
"""

from __future__ import annotations

from collections.abc import Sequence

from suite.core._namespace import Array, Scalar, array_namespace, lift
from suite.core.linalg import root_mean_square, transposed_times


def along(rows: Array, probes: Array) -> Array:
    """X R, (..., n, k), in at least single precision.

    Args:
        rows: (..., n, d), X.
        probes: (..., d, k), R.
    """
    rows = lift(rows)
    xp = array_namespace(rows)
    found: Array = xp.matmul(rows, xp.astype(probes, rows.dtype))
    return found


def penalties_along(weight: Array, probes: Array) -> tuple[Array, Array]:
    """W R and sign(W) R, (..., n, k) both: what penalties Σ w² and Σ |w| add, up to a number each.

    Args:
        weight: (..., n, d), W.
        probes: (..., d, k), R.
    """
    xp = array_namespace(weight)
    dtype = lift(weight).dtype
    signs = xp.astype(weight > 0, dtype)
    signs -= xp.astype(weight < 0, dtype)
    return along(weight, probes), along(signs, probes)


def rows_along(inputs: Array, outputs: Array, probes: Array) -> tuple[Array, Array]:
    """Σ g aᵀ R, and Σ |g| |aᵀ R|: what rounding errors of the first are in proportion to.

    Args:
        inputs, outputs: (..., n, d_in) and (..., n, d_out), rows a and g.
        probes: (..., d_in, k), R.

    Returns:
        (..., d_out, k) and (..., d_out, k), in at least single precision.
    """
    xp = array_namespace(outputs)
    outputs = lift(outputs)
    shares = xp.astype(along(inputs, probes), outputs.dtype)
    return transposed_times(outputs, shares), transposed_times(xp.abs(outputs), xp.abs(shares))


def is_unexplained(
    gradient: Array, rows: Array, size: Array, penalties: Sequence[Array], tolerance: Scalar
) -> Array:
    """Whether ∇ R is not Σ g aᵀ R, nor that and multiples of what penalties add.

    Args:
        gradient: (..., d_out, k), ∇ R, `along`.
        rows, size: (..., d_out, k), as `rows_along` has them of all rows.
        penalties: (..., d_out, k) each.
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
