"""What K-FAC has to know of a GradScaler: the scale of the loss, and whether gradients still have it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from suite.torch.checks import check_number, warn_user
from suite.torch.inplace import HOST_DEVICES

GradScaling: TypeAlias = torch.amp.GradScaler | Callable[[], float] | None


def scale_of(grad_scaler: GradScaling) -> float:
    """What the loss was multiplied with."""
    if grad_scaler is None:
        return 1.0
    if isinstance(grad_scaler, torch.amp.GradScaler):
        return float(grad_scaler.get_scale())
    scale = grad_scaler()
    check_number("what grad_scaler returns", scale, above=0)
    return float(scale)


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


def warn_of_unknown_scaler(parameters: Iterable[torch.Tensor]) -> None:
    """Warn if a GradScaler has scaled a loss, perhaps this one.

    Nothing refers to it that a preconditioner sees: it is looked for among all objects, which takes a
    while, and so not where nobody needs one.
    """
    if all(p.device.type in HOST_DEVICES for p in parameters):
        return
    if not _is_in_use():
        return
    gc.collect()  # one of an earlier training may only be waiting for that
    if _is_in_use():
        warn_user(
            "a GradScaler is in use that K-FAC was not given: if it scales this model's loss, "
            "statistics are too large by the square of its scale, and K-FAC does next to nothing: "
            "give grad_scaler=scaler"
        )


def _is_in_use() -> bool:
    return any(map(_scales, gc.get_objects()))


def _scales(thing: object) -> bool:
    if not issubclass(type(thing), torch.amp.GradScaler):  # a proxy's own class may be anything
        return False
    assert isinstance(thing, torch.amp.GradScaler)
    return thing.is_enabled() and getattr(thing, "_scale", None) is not None
