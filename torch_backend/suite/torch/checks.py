"""Errors for bad torch-specific hyperparameters: name, rule and value; warnings where users look."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from suite.core import checks, step_size
from suite.torch.inplace import HOST_DEVICES


def check_number(name: str, value: Any, **bounds: float) -> None:
    """`suite.core.checks.check_number`, of a 0-d tensor, too: its value is known here."""
    if isinstance(value, torch.Tensor):
        if value.ndim:
            raise TypeError(f"{name} must be a number or a 0-d tensor, got shape {tuple(value.shape)}")
        value = value.item()
    checks.check_number(name, value, **bounds)


def is_at_hand(value: Any) -> bool:
    """Whether the host knows a setting without waiting for a device."""
    return not isinstance(value, torch.Tensor) or value.device.type in HOST_DEVICES


def require_known(name: str, value: Any) -> None:
    """TypeError if a setting is a tensor, whose value the rules that it is for do not ask."""
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a number, got a tensor of shape {tuple(value.shape)}")


def plain(value: Any) -> Any:
    """A setting as `torch.load(weights_only=True)` reads it: Python's number for NumPy's."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value


def check_state_dict(state_dict: Any, *keys: str) -> None:
    """Raise unless it is a mapping that has these keys: TypeError, ValueError."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}")
    if not set(keys) <= set(state_dict):
        raise ValueError(f"state_dict must have {list(keys)}, got keys {sorted(map(str, state_dict))}")


def check_clip(value: Any) -> None:
    """`suite.core.step_size.check_clip`, of numbers that are known."""
    for bound in value if isinstance(value, tuple | list) else (value,):
        require_known("clip", bound)
    step_size.check_clip(value)


def check_dtype(name: str, value: Any) -> None:
    """Raise unless `value` is a real floating-point torch.dtype or None."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name} must be a floating torch.dtype or None, got {value!r}")


@torch._disable_dynamo
def warn_of_a_skipped_step(optimizer: Any) -> None:
    skipped = optimizer.skipped_steps
    warn_user(f"a step was skipped: a gradient was not finite, or too large ({skipped} skipped so far)")


def warn_user(message: str) -> None:
    """A RuntimeWarning at the line that called into torch or into this library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] not in ("torch", "contextlib") and not name.startswith("suite."):
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
