"""Rounding to a narrow dtype by chance, so that small updates are not lost on average."""

from __future__ import annotations

import math
from typing import Any

from suite.core._namespace import Array, array_namespace


def stochastic_round(x: Array, noise: Array, dtype: Any) -> Array:
    """`x` in `dtype`, a neighbour chosen with the probability that makes the mean `x`.

    Rounding to nearest loses every update below half a unit in the last place (2⁻⁹ of the value in
    bfloat16). Here |x|, in these units, goes up where noise in (0, 1) is below its
    fraction, else down. Where `dtype` is as wide as `x` is, there is nothing to round.

    Args:
        x: (...), in a wider dtype.
        noise: like `x`, uniform on ±√3 (`suite.core.noise`).
        dtype: floating dtype of the result.
    """
    xp = array_namespace(x)
    if xp.finfo(dtype).bits >= xp.finfo(x.dtype).bits:
        return xp.astype(x, dtype)
    usable = (x != 0) & xp.isfinite(x)
    size = xp.where(usable, xp.abs(x), xp.zeros_like(x) + 1)
    exponent = xp.floor(xp.log2(size))
    unit = xp.exp(exponent * math.log(2.0)) * float(xp.finfo(dtype).eps)
    # Below the normal numbers units stay as long; one that is not normal for x may be taken for 0.
    narrow = float(xp.finfo(dtype).smallest_normal) * float(xp.finfo(dtype).eps)
    unit = xp.maximum(unit, max(narrow, float(xp.finfo(x.dtype).smallest_normal)))
    chance = xp.astype(noise, x.dtype) * (0.5 / math.sqrt(3.0)) + 0.5
    count = size / unit
    whole = xp.floor(count)
    rounded = (whole + xp.astype(chance < count - whole, x.dtype)) * unit
    return xp.astype(xp.where(usable, xp.where(x < 0, -rounded, rounded), x), dtype)
