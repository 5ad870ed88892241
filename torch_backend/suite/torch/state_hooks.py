"""Hooks that users register on the state of an optimizer whose `state_dict` changes torch's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch


def state_before_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """torch's `state_dict()`, before its post hooks, which get what the optimizer makes of it."""
    hooks = optimizer._optimizer_state_dict_post_hooks
    optimizer._optimizer_state_dict_post_hooks = OrderedDict()
    try:
        return torch.optim.Optimizer.state_dict(optimizer)
    finally:
        optimizer._optimizer_state_dict_post_hooks = hooks


def after_hooks(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """What post hooks of `state_dict` make of it."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        saved = hook(optimizer, saved) or saved
    return saved
