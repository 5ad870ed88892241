"""What K-FAC has to know of a GradScaler: the scale of the loss, and whether gradients still have it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeAlias

import torch

GradScaling: TypeAlias = torch.amp.GradScaler | Callable[[], float] | None


def scale_of(grad_scaler: GradScaling) -> float:
    """What the loss was multiplied with."""
    if grad_scaler is None:
        return 1.0
    if isinstance(grad_scaler, torch.amp.GradScaler):
        return float(grad_scaler.get_scale())
    return float(grad_scaler())


def require_unscaled(grad_scaler: GradScaling, kfac: object, base: object) -> None:
    """RuntimeError if a GradScaler has not unscaled any optimizer's gradients since its update.

    Args:
        kfac, base: the two optimizers of the same gradients, of which it may have unscaled one.
    """
    if not isinstance(grad_scaler, torch.amp.GradScaler) or not grad_scaler.is_enabled():
        return
    states = getattr(grad_scaler, "_per_optimizer_states", None)  # since 2.0; no public question exists
    if states is None:
        return
    unscaled = {key for key, state in states.items() if state["found_inf_per_device"]}
    if {id(kfac), id(base)} <= unscaled:
        raise RuntimeError(
            "gradients must be unscaled once, got unscale_ of the base optimizer and of KFAC: call "
            "scaler.unscale_(kfac) before scaler.step(kfac)"
        )
    if not unscaled:
        raise RuntimeError(
            "gradients must be unscaled before step(): call scaler.unscale_(optimizer), or "
            "scaler.step(kfac)"
        )


def refuse_unknown_scaler() -> None:
    """ValueError if the caller's caller is a GradScaler.

    Others ask what it asks, too, who may scale nothing: trainers, before they clip gradients.
    """
    asks = sys._getframe(2).f_locals.get("self")
    if isinstance(asks, torch.amp.GradScaler):
        raise ValueError(
            "grad_scaler must be given to KFAC where a GradScaler scales the loss: statistics are "
            "of scaled gradients"
        )
