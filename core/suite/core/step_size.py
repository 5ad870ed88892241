"""How long a preconditioned step may be."""

from __future__ import annotations

from typing import Any

from suite.core._namespace import Array, Scalar, array_namespace, as_scalar, lift
from suite.core.checks import check_number
from suite.core.linalg import root_mean_square
from suite.core.moments import unbiased


def kl_clip_coefficient(inner: Array, kl_clip: Scalar) -> Array:
    """The factor in (0, 1] that keeps a natural-gradient step within a trust region.

        ν = min(1, √(κ / |lr² Σ ⟨direction, gradient⟩|))

    The sum is a quadratic estimate of the change of the model's predictive distribution (twice its KL
    divergence). Source: Ba, Grosse & Martens 2017 (Distributed second-order optimization using
    Kronecker-factored approximations), section 5; Pauloski et al. 2020 (arXiv:2007.00784), equation 18.

    Args:
        inner: (), lr² Σ ⟨direction, gradient⟩ over all preconditioned layers.
        kl_clip: κ > 0.

    Returns:
        ν, (); 0 where the sum is not finite, as that of finite terms may be.
    """
    xp = array_namespace(inner)
    size = xp.abs(inner)
    limit = as_scalar(kl_clip, size)
    large = size > limit
    found = xp.where(large, xp.sqrt(limit / xp.where(large, size, 1.0)), 1.0)
    return xp.where(xp.isfinite(size), found, 0.0)


def quadratic_step(curvature: Array, slope: Array) -> tuple[Array, Array]:
    """How far along a direction d, and along the step before δ, a quadratic model of the loss is lowest.

        q(c) = ½ cᵀ M c + bᵀ c,   the coming step being c₁ d + c₂ δ

    Learning rate and momentum in one. A δ that is zero, or lies along d to rounding, has no part in it,
    and a d without curvature none in the step. Source: Martens & Grosse 2015 (arXiv:1503.05671),
    section 7.

    Args:
        curvature: M, (..., 2, 2), vᵀ (F + λ I) w of d and δ, symmetric, without negative eigenvalues.
        slope: b, (..., 2), vᵀ ∇h of each.

    Returns:
        c, (..., 2), and q(c), (...), the predicted change of the loss, never above 0.
    """
    xp = array_namespace(curvature, slope)
    along, mixed, before = curvature[..., 0, 0], curvature[..., 0, 1], curvature[..., 1, 1]
    zero, one = xp.zeros_like(along), xp.zeros_like(along) + 1
    curved = along > 0
    share = mixed / xp.where(curved, along, one)
    left = before - share * mixed  # of δ's curvature, with d's part in it taken out
    usable = curved & (left > 8 * float(xp.finfo(curvature.dtype).eps) * before)
    slope_left = slope[..., 1] - share * slope[..., 0]
    momentum = xp.where(usable, -slope_left / xp.where(usable, left, one), zero)
    rate = xp.where(curved, -slope[..., 0] / xp.where(curved, along, one) - share * momentum, zero)
    change = slope[..., 0] * rate + slope[..., 1] * momentum
    return xp.stack([rate, momentum], axis=-1), change / 2


def rms_clip(direction: Array, max_rms: Scalar, ndim: int, weight: Array | None = None) -> Array:
    """Each block scaled down to a root mean square of at most `max_rms`.

    A whitened gradient has root mean square 1; a block far above that was preconditioned with factors
    that do not fit it yet.

    Args:
        direction: (..., *block), a stack of blocks.
        max_rms: the largest root mean square allowed, > 0.
        ndim: how many trailing axes make up one block.
        weight: (...) or (), what the directions are to be divided by before that; None: by nothing.
    """
    scale = rms_clip_scale(direction, max_rms, ndim, weight)
    return array_namespace(direction).astype(lift(direction) * scale, direction.dtype)


def rms_clip_scale(direction: Array, max_rms: Scalar, ndim: int, weight: Array | None = None) -> Array:
    """What `rms_clip` multiplies blocks with, (..., 1, ...) in at least single precision.

    Args:
        direction, max_rms, ndim, weight: as in `rms_clip`. The scale divides by the weight, too, which
            saves a pass over the directions. Where it is 0 nothing was seen, and the scale is 0.
    """
    xp = array_namespace(direction)
    axes = tuple(range(direction.ndim - ndim, direction.ndim))
    x = lift(direction)
    scale = as_scalar(max_rms, x) / xp.maximum(root_mean_square(x, axes), 1e-30)
    if weight is None:
        return xp.minimum(scale, 1.0)
    weight = xp.reshape(xp.astype(weight, x.dtype), (*weight.shape, *(1,) * (x.ndim - weight.ndim)))
    return xp.minimum(scale, 1 / xp.where(weight > 0, weight, float("inf")))


Clip = Any  # None, a number or 0-d array, or a pair of these


def check_clip(clip: Clip) -> None:
    """Raise unless `clip` is None, a number > 0, or a pair of these."""
    if isinstance(clip, tuple) and len(clip) != 2:
        raise ValueError(f"clip must be a number or (mean, entry), got {clip!r}")
    for bound in clip if isinstance(clip, tuple) else (clip,):
        if bound is not None:
            check_number("clip", bound, above=0)


def clipped(direction: Array, clip: Clip, ndim: int, weight: Array | None = None) -> Array:
    """Blocks bounded in root mean square, then entries in size.

    Args:
        direction: (..., *block), a stack of blocks.
        clip: the largest root mean square, or (that, the largest entry); None: no bound.
        ndim: how many trailing axes make up one block.
        weight: (...) or (), what the directions are to be divided by before that; None: by nothing.
    """
    mean, entry = clip if isinstance(clip, tuple) else (clip, None)
    if mean is not None:
        direction = rms_clip(direction, mean, ndim, weight)
    elif weight is not None:
        direction = unbiased(direction, weight)
    return direction if entry is None else amplitude_clip(direction, entry)


def amplitude_clip(direction: Array, max_amplitude: Scalar) -> Array:
    """Each entry bounded to ±`max_amplitude`, > 0."""
    xp = array_namespace(direction)
    limit = xp.zeros_like(direction) + as_scalar(max_amplitude, direction)
    return xp.minimum(xp.maximum(direction, -limit), limit)


def normalized(gradient: Array, ndim: int) -> Array:
    """Each tensor of a stack divided by its Euclidean norm; zeros stay zeros.

    Args:
        gradient: (..., *shape).
        ndim: how many trailing axes make up one tensor.
    """
    xp = array_namespace(gradient)
    axes = tuple(range(gradient.ndim - ndim, gradient.ndim))
    x = lift(gradient)
    largest = xp.max(xp.abs(x), axis=axes, keepdims=True)
    one = xp.zeros_like(largest) + 1
    unit = x / xp.where(largest > 0, largest, one)
    norm = xp.sqrt(xp.sum(unit * unit, axis=axes, keepdims=True))
    return xp.astype(unit / xp.where(largest > 0, norm, one), gradient.dtype)
