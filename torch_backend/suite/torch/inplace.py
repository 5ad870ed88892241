"""What changes large tensors where they are: on a CPU a new one costs ten times the arithmetic."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import nn

from suite.core._namespace import lift
from suite.core._torch import isfinite
from suite.core.linalg import headroom

HOST_DEVICES = ("cpu",)  # whose numbers can be read without waiting
_LARGEST_STACKED = 2**13  # numbers of a tensor that a CPU takes longer to start on than to copy
LARGEST_JOINED = 2**18  # numbers of a tensor that takes a device less time to copy than to start on


def average_in(
    average: torch.Tensor, new: torch.Tensor, decay: float, finite: torch.Tensor | None = None
) -> None:
    """`suite.core.moments.update_average`, into `average` itself; nothing unless `finite`, ()."""
    average.lerp_(_evidence(average, new, finite), 1.0 - decay)


def all_average_in(
    averages: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    decay: float,
    finite: torch.Tensor | None = None,
) -> None:
    """`average_in` of many tensors of one dtype."""
    evidence = [_evidence(*pair, finite) for pair in zip(averages, new, strict=True)]
    torch._foreach_lerp_(list(averages), evidence, 1.0 - decay)


def all_times(tensors: Sequence[torch.Tensor], scales: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of one dtype, which are used up, times one number each, (n,)."""
    found, each, alike = list(tensors), scales.unbind(), dict[torch.Size, list[int]]()
    for i, x in enumerate(tensors):
        alike.setdefault(x.shape if joins(x) else torch.Size(), []).append(i)
    for shape, numbers in alike.items():
        own, factors = [found[i] for i in numbers], [each[i] for i in numbers]
        if shape and len(own) > 1:
            product = torch.stack(own).mul_(torch.stack(factors).reshape(-1, *(1,) * len(shape)))
            for i, x in zip(numbers, product.unbind(), strict=True):
                found[i] = x
        else:
            torch._foreach_mul_(own, factors)
    return found


def joins(x: torch.Tensor) -> bool:
    """Whether it is so small that on its device several are best copied into one."""
    return x.device.type not in HOST_DEVICES and x.numel() <= LARGEST_JOINED


def _evidence(average: torch.Tensor, new: torch.Tensor, finite: torch.Tensor | None) -> torch.Tensor:
    """`new`; unless `finite` the average, which averaged into itself stays as it is to the last bit."""
    new = new.to(average.dtype)
    return new if finite is None else torch.where(finite.to(new.device), new, average)


def all_finite(
    tensors: Sequence[torch.Tensor],
    moments: Sequence[torch.Tensor] = (),
    scale: torch.Tensor | None = None,
    kept_dtype: torch.dtype | None = None,
    power: float = 1,
) -> torch.Tensor:
    """(): whether all numbers in tensors that are not empty are finite; the host does not wait.

    Args:
        power: at least 1; of tensors' numbers this power must be finite, in at least single precision.
        moments: Σ x xᵀ or Σ x²: the largest of their numbers is not finite if another is not.
        scale: (), which moments are to stay finite when multiplied with.
        kept_dtype: in which they are to do so, where it is not theirs.
    """
    # Both pass a NaN on. Of torch's ways this is by far the fastest on a CPU, and the other on a GPU.
    found = []
    for dtype, some in _by_dtype(tensors).items():
        if dtype.is_complex:
            some = [torch.view_as_real(x.resolve_conj()) for x in some]
        extremes = [extreme for x in _together(some) for extreme in torch.aminmax(x)]
        found += _are_finite(extremes, [x for x in some if not x.is_cpu], power=power)
    for some in _by_dtype(moments).values():
        here = [x for x in some if x.is_cpu]
        extremes = list(torch._foreach_max(here)) if here else []
        found += _are_finite(extremes, [x for x in some if not x.is_cpu], scale, kept_dtype)
    if not found:
        return torch.ones((), dtype=torch.bool, device="cpu")
    device = next((x.device for x in found if not x.is_cpu), found[0].device)
    return functools.reduce(torch.logical_and, [x.to(device) for x in found])


def read_flags(flags: Sequence[torch.Tensor]) -> list[list[bool]]:
    """What booleans, (n,), of one device or of several are; the host waits once for each device."""
    places: dict[torch.device, list[int]] = {}
    for i, flag in enumerate(flags):
        places.setdefault(flag.device, []).append(i)
    found: list[list[bool]] = [[] for _ in flags]
    for own in places.values():
        numbers = iter(torch.cat([flags[i] for i in own]).tolist())
        for i in own:
            found[i] = list(itertools.islice(numbers, len(flags[i])))
    return found


def _together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What is on CPUs, small ones of one shape stacked: to ask each takes longer than to copy it."""
    found, alike = list[torch.Tensor](), dict[torch.Size, list[torch.Tensor]]()
    for x in tensors:
        if x.is_cpu and x.numel() > _LARGEST_STACKED:
            found.append(x)
        elif x.is_cpu:
            alike.setdefault(x.shape, []).append(x)
    for own in alike.values():
        found += [torch.stack(own)] if len(own) > 1 else own
    return found


def _by_dtype(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for x in tensors:
        found.setdefault(x.dtype, []).append(x)
    return found


def _are_finite(
    numbers: list[torch.Tensor],
    elsewhere: Sequence[torch.Tensor],
    scale: torch.Tensor | None = None,
    kept_dtype: torch.dtype | None = None,
    power: float = 1,
) -> list[torch.Tensor]:
    """(): whether these numbers are, and tensors elsewhere; of each kind if there are any."""
    found = [torch.stack(numbers)] if numbers else []
    if elsewhere:
        found.append(nn.utils.get_total_norm(elsewhere, norm_type=float("inf")))
    if scale is not None:
        found = [x * scale.to(x) for x in found]
    if power > 1:
        found = [lift(x) for x in found]
        found = [x * headroom(torch.finfo(x.dtype).max, power) for x in found]
    return [isfinite(x.to(kept_dtype or x.dtype)).all() for x in found]
