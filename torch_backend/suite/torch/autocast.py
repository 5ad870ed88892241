"""The user's autocast is about the model: optimizers compute in the dtypes they keep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch


def without_autocast(tensors: Iterable[torch.Tensor]) -> Any:
    """A context in which products on these tensors' devices keep their dtypes."""
    kinds = {x.device.type for x in tensors}
    kinds -= {"meta"}  # of which torch knows no autocast
    enabled = [kind for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]
    if not enabled:
        return contextlib.nullcontext()
    if len(enabled) == 1:
        return torch.autocast(enabled[0], enabled=False)
    stack = contextlib.ExitStack()
    for kind in enabled:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
