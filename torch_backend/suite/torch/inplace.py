"""What changes large tensors where they are: on a CPU a new one costs ten times the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def average_in(average: torch.Tensor, new: torch.Tensor, decay: float) -> None:
    """`suite.core.moments.update_average`, into `average` itself."""
    average.lerp_(new.to(average.dtype), 1.0 - decay)


def all_average_in(averages: Sequence[torch.Tensor], new: Sequence[torch.Tensor], decay: float) -> None:
    """`average_in` of many tensors of one dtype."""
    torch._foreach_lerp_(list(averages), [x.to(averages[0].dtype) for x in new], 1.0 - decay)


_SMALL = 2**14  # numbers in a tensor below which a call for it costs more than a copy of it
_JOINED = 2**15  # in tensors that small ones are copied to: no new pages, and in the cache


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(): whether all numbers in tensors that are not empty are finite; the host does not wait."""
    tensors = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors]
    here = [x for x in tensors if x.device.type == "cpu"]
    elsewhere = [x for x in tensors if x.device.type != "cpu"]
    # Both pass a NaN on. Of torch's ways this is by far the fastest on a CPU, and the other on a GPU.
    extremes = [extreme.double() for x in _few(here) for extreme in torch.aminmax(x)]
    if not elsewhere:
        return torch.stack(extremes).isfinite().all() if extremes else torch.ones((), dtype=torch.bool)
    finite = nn.utils.get_total_norm(elsewhere, norm_type=float("inf")).isfinite()
    return finite & torch.stack(extremes).isfinite().all().to(finite.device) if extremes else finite


def _few(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same numbers in fewer tensors."""
    found: list[torch.Tensor] = []
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    for x in tensors:
        if x.numel() < _SMALL:
            small.setdefault(x.dtype, []).append(x.reshape(-1))
        else:
            found.append(x)
    for parts in small.values():
        length = max(1, _JOINED * len(parts) // sum(map(len, parts)))
        found += [torch.cat(parts[i : i + length]) for i in range(0, len(parts), length)]
    return found
