"""Damping: how far curvature is trusted."""

from __future__ import annotations

from suite.core import linalg
from suite.core._namespace import Array, Scalar, array_namespace, as_scalar


def tikhonov(values: Array, damping: Scalar) -> Array:
    """1 / (`values` + `damping`), elementwise; 0 where the sum is 0 or too small to be divided by.

    With eigenvalues of A ⊗ G this is the inverse of A ⊗ G + λ I in its eigenbasis.
    Source: Grosse & Martens 2016 (arXiv:1602.01407), appendix B.

    Args:
        values: (...), eigenvalues >= 0.
        damping: λ >= 0, in units of curvature. With λ = 0 null directions get a zero step.
    """
    xp = array_namespace(values)
    damped = values + as_scalar(damping, values)
    least = float(xp.finfo(damped.dtype).smallest_normal)
    if isinstance(damping, float) and damping >= least:
        return 1 / damped
    null = damped < least  # not so for NaN, which stays visible
    one = xp.zeros_like(damped) + 1
    return xp.where(null, xp.zeros_like(damped), one / xp.where(null, one, damped))


def noise_size(largest: Array, damping: Scalar) -> Array:
    """(...): how large the noise is that a fitted preconditioner's evidence gets: `damping`, or more.

    It is at least 7e-16 of the evidence's largest entry (1e-123 in double precision): parts that are
    exactly zero, such as rows of tokens that do not occur, would else let P grow until it is not finite.

    Args:
        largest: (...), the evidence's largest absolute value.
        damping: at least 0, absolute.
    """
    xp = array_namespace(largest)
    least = float(xp.finfo(largest.dtype).smallest_normal) ** 0.4
    return xp.maximum(least * largest, as_scalar(damping, largest))


def split_damping(mean_A: Array, mean_G: Array, damping: Scalar) -> tuple[Array, Array]:
    """λ shared out between A and G: (π √λ, √λ / π) with π² = `mean_A` / `mean_G`.

    Args:
        mean_A: (...), mean eigenvalue of A, tr A / dim A.
        mean_G: (...), mean eigenvalue of G.
        damping: λ >= 0, in units of curvature.

    Returns:
        What to add to the diagonals of A and of G, each (...). π is 1 where a mean is not positive.
    """
    xp = array_namespace(mean_A, mean_G)
    usable = (mean_A > 0) & (mean_G > 0)
    # A quotient of roots, not the root of a quotient: the latter overflows for means 1e30 and 1e-30.
    pi = xp.sqrt(xp.where(usable, mean_A, 1.0)) / xp.sqrt(xp.where(usable, mean_G, 1.0))
    damping = as_scalar(damping, mean_A)
    root = damping**0.5
    return root * pi, root / pi


def factored_damping(A: Array, G: Array, damping: Scalar) -> tuple[Array, Array]:
    """Split `damping` between A and G so that each is damped in its own units.

        (A + π √λ I) ⊗ (G + π⁻¹ √λ I),   π² = (tr A / dim A) / (tr G / dim G)

    Source: Martens & Grosse 2015 (arXiv:1503.05671), section 6.3.

    Args:
        A: (..., d_in, d_in), second moment of the layer inputs.
        G: (..., d_out, d_out), second moment of the output gradients.
        damping: λ >= 0, in units of curvature.
    """
    mean_A, mean_G = linalg.trace(A) / A.shape[-1], linalg.trace(G) / G.shape[-1]
    damping_A, damping_G = split_damping(mean_A, mean_G, damping)
    return linalg.add_diagonal(A, damping_A), linalg.add_diagonal(G, damping_G)


def levenberg_marquardt(
    damping: Array,
    actual: Array,
    predicted: Array,
    *,
    decay: float = 0.85,
    growth: float = 4.0,
    lowest: float = 1e-10,
    highest: float = 1e4,
) -> tuple[Array, Array]:
    """The damping after a step, from how the loss changed and how a quadratic model said it would.

    With ρ = `actual` / `predicted`, damping falls where ρ > 1/4, rises where ρ < 0 (the loss went up),
    and stays in between; where the loss rose by more than the model said that it would fall, or is not
    finite, the step is to be taken back, and damping grows by much.

    Source: Moré 1978 (The Levenberg-Marquardt algorithm: implementation and theory), section 4; Martens
    & Grosse 2015 (arXiv:1503.05671), section 6.5, whose thresholds are 3/4 and 1/4 for losses of the
    minibatch that made the step. These are for another one's, which a step improves by less.

    Args:
        damping: λ, (...), > 0.
        actual: (...), the change of the loss, of the same data before and after.
        predicted: (...), the model's, <= 0.
        decay: what λ is multiplied with, or divided by, in (0, 1).
        growth: what λ is multiplied with for a step that is to be taken back, > 1.
        lowest, highest: bounds of λ.

    Returns:
        λ, (...), and (...) bool: the step may stand.
    """
    xp = array_namespace(damping, actual, predicted)
    stands = actual <= -predicted  # not so for NaN
    good, bad = actual < predicted / 4, actual > 0
    new = xp.where(good, damping * decay, xp.where(bad, damping / decay, damping))
    new = xp.where(stands, new, damping * growth)
    zero = xp.zeros_like(new)
    return xp.minimum(xp.maximum(new, zero + lowest), zero + highest), stands
