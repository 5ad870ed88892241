"""What changes large tensors where they are: on a CPU a new one costs ten times the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def average_in(average: torch.Tensor, new: torch.Tensor, decay: float) -> None:
    """`suite.core.moments.update_average`, into `average` itself."""
    average.lerp_(new.to(average.dtype), 1.0 - decay)


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(): whether all numbers in tensors that are not empty are finite; the host does not wait."""
    tensors = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors]
    here = [x for x in tensors if x.device.type == "cpu"]
    elsewhere = [x for x in tensors if x.device.type != "cpu"]
    # Both pass a NaN on. Of torch's ways this is by far the fastest on a CPU, and the other on a GPU.
    extremes = [extreme.double() for x in here for extreme in torch.aminmax(x)]
    if not elsewhere:
        return torch.stack(extremes).isfinite().all() if extremes else torch.ones((), dtype=torch.bool)
    finite = nn.utils.get_total_norm(elsewhere, norm_type=float("inf")).isfinite()
    return finite & torch.stack(extremes).isfinite().all().to(finite.device) if extremes else finite
