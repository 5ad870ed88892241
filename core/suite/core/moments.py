"""Running averages that know how much evidence they hold.

    s_t = β s_{t-1} + (1 - β) x_t,    w_t = β w_{t-1} + (1 - β),    average = s_t / w_t

The weight w is Adam's bias correction 1 - βᵗ (Kingma & Ba 2014, arXiv:1412.6980, section 3) carried
as a number instead of a power: it stays right when β changes, and when a step is skipped.
"""

from __future__ import annotations

from suite.core._namespace import Array, Scalar, array_namespace, as_scalar, lift


def update_average(average: Array, new: Array, decay: Scalar) -> Array:
    """β `average` + (1 - β) `new`, in the dtype of `average`.

    Computed in at least single precision: in bfloat16 a β of 0.999 is 1.

    Args:
        average: (...), the running sum s.
        new: (...), what was seen now.
        decay: β in [0, 1).
    """
    xp, wide = array_namespace(average), lift(average)
    decay = as_scalar(decay, wide)
    return xp.astype(wide * decay + xp.astype(new, wide.dtype) * (1.0 - decay), average.dtype)


def mix(old: Array, new: Array, kept: Array) -> Array:
    """`kept` `old` + (1 - `kept`) `new`, each of a stack with a share of its own, in the dtype of `old`.

    Numbers, not a choice between arrays, which compilers take ten times as long for. In at least single
    precision, as `update_average`.

    Args:
        old, new: (*batch, *shape); `new` must be finite also where nothing of it is taken.
        kept: (*batch,), in [0, 1].
    """
    xp, wide = array_namespace(old), lift(old)
    shape = (*kept.shape, *(1,) * (old.ndim - kept.ndim))
    old_share, new_share = (xp.reshape(xp.astype(x, wide.dtype), shape) for x in (kept, 1 - kept))
    return xp.astype(wide * old_share + xp.astype(new, wide.dtype) * new_share, old.dtype)


def unbiased(average: Array, weight: Array) -> Array:
    """The mean of what was seen: `average` / `weight`, and 0 where nothing was.

    Args:
        average: (..., *shape), running sums.
        weight: (...), their weights; leading axes as in `average`.
    """
    xp = array_namespace(average, weight)
    weight = xp.astype(weight, average.dtype)
    weight = xp.reshape(weight, tuple(weight.shape) + (1,) * (average.ndim - weight.ndim))
    return average / xp.where(weight > 0, weight, float("inf"))
