"""Parameters that `torch.nn.functional.interpolate` resizes, as positions of an image of another size.

Each entry of what it makes, q = W p with weights by axis, is a use of several. The gradient by p_j in
the use i is W_ij g_i, and the sum of the squares of all (W ∘ W)ᵀ g².
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from suite.core.kronecker import apply_factor


def resized_slot(slot: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """What the squares of the gradients of a resized parameter are to be added to.

    Args:
        slot: (n, c, *sizes), of the parameter.
        args: of `interpolate` behind the parameter.

    Returns:
        (n, c, *new sizes), a linear function of `slot`.
    """
    given = _hashable(args), tuple((name, _hashable(x)) for name, x in sorted(kwargs.items()))
    for axis in range(2, slot.ndim):
        weights = _weights(tuple(slot.shape[2:]), axis, slot.dtype, slot.device, *given)
        slot = apply_factor(weights.square(), slot, axis, slot.ndim)
    return slot


@functools.lru_cache(maxsize=64)  # they are those of every pass
def _weights(
    sizes: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
    device: torch.device,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
) -> torch.Tensor:
    """(new size, size) along one axis: the others', of what is constant there, sum to one."""
    n, lengths = sizes[axis - 2], [1] * len(sizes)
    lengths[axis - 2] = n
    each = torch.eye(n, dtype=dtype, device=device).reshape(n, 1, *lengths)
    found = F.interpolate(each.expand(n, 1, *sizes), *args, **dict(kwargs)).movedim(axis, -1)
    return found.flatten(0, -2)[:: found.numel() // (n * found.shape[-1])].mT.contiguous()


def _hashable(x: Any) -> Any:
    return tuple(map(_hashable, x)) if isinstance(x, list | tuple) else x
