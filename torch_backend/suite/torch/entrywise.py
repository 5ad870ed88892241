"""Functions of each entry of a tensor, and their derivatives."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from suite.torch.hooks import over, raised
from suite.torch.operations import NEGATIONS, T

_RELU, _CLAMP = {torch.relu, T.relu, F.relu}, {torch.clamp, T.clamp, torch.clip, T.clip}
_CLAMP |= {torch.clamp_min, T.clamp_min, torch.clamp_max, T.clamp_max}
_EXTREMES = {torch.maximum, T.maximum, torch.minimum, T.minimum}
_POWER = {torch.pow, T.pow, T.__pow__, torch.float_power, T.float_power}
# By arguments and values.
_DERIVATIVES: dict[Any, Any] = {
    **dict.fromkeys(NEGATIONS, lambda x, y: -torch.ones_like(y)),
    **dict.fromkeys((torch.abs, T.abs, T.__abs__), lambda x, y: x.sign()),
    **dict.fromkeys((torch.exp, T.exp), lambda x, y: y),
    **dict.fromkeys((torch.expm1, T.expm1), lambda x, y: y + 1),
    **dict.fromkeys((torch.log, T.log), lambda x, y: 1 / x),
    **dict.fromkeys((torch.log1p, T.log1p), lambda x, y: 1 / (1 + x)),
    **dict.fromkeys((torch.sin, T.sin), lambda x, y: x.cos()),
    **dict.fromkeys((torch.cos, T.cos), lambda x, y: -x.sin()),
    **dict.fromkeys((torch.sigmoid, T.sigmoid, F.sigmoid), lambda x, y: y * (1 - y)),
    **dict.fromkeys((torch.tanh, T.tanh, F.tanh), lambda x, y: 1 - y * y),
    **dict.fromkeys((torch.erf, T.erf), lambda x, y: (2 / math.pi**0.5) * (-x * x).exp()),
    **dict.fromkeys((torch.reciprocal, T.reciprocal), lambda x, y: -y * y),
    **dict.fromkeys((torch.sqrt, T.sqrt), lambda x, y: 0.5 / y),
    **dict.fromkeys((torch.rsqrt, T.rsqrt), lambda x, y: -0.5 * y**3),
    **dict.fromkeys((torch.square, T.square), lambda x, y: 2 * x),
    **dict.fromkeys(_RELU, lambda x, y: (x > 0).to(y.dtype)),
    **dict.fromkeys(_CLAMP, lambda x, y: (x == y).to(y.dtype)),
    F.logsigmoid: lambda x, y: (-x).sigmoid(),
}
# Likewise, by what they are given besides.
_BY_TENSORS: dict[Any, Any] = {
    **dict.fromkeys(
        _EXTREMES, lambda x, y, other: (x == y).to(y.dtype) / (1 + (x == other).to(y.dtype))
    ),
    **dict.fromkeys(
        (torch.masked_fill, T.masked_fill), lambda x, y, mask, value: mask.logical_not().to(y.dtype)
    ),
}
# Likewise, by numbers that they are given besides.
_BY_NUMBERS: dict[Any, Any] = {
    **dict.fromkeys(
        _POWER,
        lambda x, y, exponent: exponent * x ** (exponent - 1) if exponent else torch.zeros_like(x),
    ),
    F.softplus: lambda x, y, beta=1.0, threshold=20.0: torch.where(
        beta * x > threshold, torch.ones_like(x), (beta * x).sigmoid()
    ),
    # Of the others, which may be in place as well, values have the sign of arguments.
    F.silu: lambda x, y, inplace=False: None if inplace else x.sigmoid() * (1 + x * (1 - x.sigmoid())),
    F.elu: lambda x, y, alpha=1.0, inplace=False: torch.where(x > 0, torch.ones_like(x), y + alpha),
    F.leaky_relu: lambda x, y, negative_slope=0.01, inplace=False: torch.where(
        x > 0, torch.ones_like(x), torch.full_like(x, negative_slope)
    ),
}


def derivative_of(function: Any, args: Any, kwargs: Any, output: T) -> T | None:
    """Of a function of each entry of its first argument; None: it is none, or not known."""
    if output.dtype.is_complex or args[0].dtype.is_complex:
        return None
    x, y = args[0].detach(), output.detach()
    if function is over:
        return -y / x if isinstance(args[1], int | float) else None
    if function is raised:
        return torch.full_like(x, args[1]).log() * y if isinstance(args[1], int | float) else None
    if function in _DERIVATIVES:
        return _DERIVATIVES[function](x, y)
    if function in _BY_TENSORS:
        return _BY_TENSORS[function](x, y, *args[1:], **kwargs)
    known = all([isinstance(n, int | float) for n in (*args[1:], *kwargs.values())])  # noqa: C419
    if function not in _BY_NUMBERS or not known:
        return None
    return _BY_NUMBERS[function](x, y, *args[1:], **kwargs)
