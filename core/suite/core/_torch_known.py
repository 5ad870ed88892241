"""What the host can know about a tensor, without waiting for anything."""

from __future__ import annotations

from collections.abc import Callable

import torch


def usually(condition: torch.Tensor, x: torch.Tensor, other: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`x` where the condition holds, else `other()`; on a CPU `x` itself if it holds everywhere."""
    if is_at_hand(condition) and condition.all():
        return x
    return torch.where(condition, x, other())


def is_at_hand(x: torch.Tensor) -> bool:
    """Whether the host has the numbers: nothing is traced, mapped, or on another device."""
    return is_itself(x) and x.device.type == "cpu"


def is_itself(x: torch.Tensor) -> bool:
    """Whether it stands for no other tensor: nothing is traced or mapped."""
    return (
        type(x) is torch.Tensor
        and not x.is_meta
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )
