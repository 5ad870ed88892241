"""Errors for bad torch-specific hyperparameters: name, rule and value."""

from __future__ import annotations

from typing import Any

import torch


def check_dtype(name: str, value: Any) -> None:
    """Raise unless `value` is a real floating-point torch.dtype or None."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{name} must be a floating torch.dtype or None, got {value!r}")
