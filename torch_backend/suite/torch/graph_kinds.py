"""Kinds of K-FAC's steps: what the kernels of a step depend on, as far as the host knows it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from suite.torch.checks import is_at_hand
from suite.torch.kfac import KFAC

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, type(None))
_ASIDE = ("params", "param_names", "lr", "initial_lr")  # of a group: what kernels do not depend on
_HYPERPARAMETERS = ("damping", "factor_decay", "kl_clip", "lr")


class Kind(NamedTuple):
    """Steps of one kind differ in numbers that are on the device alone, and in learning rates."""

    new_inverses: bool
    statistics: bool
    layers_with_inverses: tuple[Any, ...]
    hyperparameters: tuple[Any, ...]  # of K-FAC
    settings: str  # of the optimizer
    batch: tuple[Any, ...]
    training_modules: tuple[bool, ...]
    trained_parameters: tuple[bool, ...]

    def differences(self, other: Kind) -> list[str]:
        """In words, for users."""
        return [n.replace("_", " ") for n in self._fields if getattr(self, n) != getattr(other, n)]


def why_not(kfac: KFAC, device: torch.device, leaves: Sequence[Any]) -> str:
    """Why the coming step is not to be recorded, or ''.

    Args:
        kfac: with inverses.
        leaves: the parts of a batch.
    """
    engine, groups = kfac._engine, kfac.param_groups
    if _is_due(kfac) and (engine.rule.keeps_eigenbases or any(engine.factors.readiness()[1])):
        return "with new inverses"
    if not engine.capture.attached:
        return "after detach()"
    if kfac._overdue.layers:
        return "with layers that run in turn"
    if all(is_at_hand(group["lr"]) and not float(group["lr"]) for group in groups):
        return "with a learning rate of 0"
    settings = [*_hyperparameters(kfac), *(value for _, value in _settings(kfac))]
    if any(isinstance(value, torch.Tensor) for value in settings):
        return "with settings that are tensors"
    if torch.is_autocast_enabled(device.type):
        return "with autocast around them, which belongs into loss_of"
    if _has_hooks(kfac) or _has_hooks(kfac.optimizer):
        return "with hooks on the optimizer's step"
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if any(x.layout is not torch.strided or x.is_nested for x in tensors):
        return "of a batch with tensors that are sparse or nested"
    if not all(map(is_known, leaves)):
        return "of a batch with parts that are neither tensors nor plain values"
    return ""


def kind_of(
    kfac: KFAC,
    leaves: Sequence[Any],
    structure: Any,
    modules: Sequence[nn.Module],
    parameters: Sequence[torch.Tensor],
) -> Kind:
    """The coming step's.

    Args:
        leaves, structure: a batch.
        modules, parameters: of the model; and of the optimizer.
    """
    return Kind(
        _is_due(kfac),
        kfac._engine.capture.clock.wanted,
        tuple(kfac._engine.factors.readiness()[1]),
        _hyperparameters(kfac),
        repr(_settings(kfac)),
        (str(structure), *_signature(leaves)),
        tuple(module.training for module in modules),
        tuple(p.requires_grad for p in parameters),
    )


def is_known(x: Any) -> bool:
    """Whether what is recorded can be told to be of this part of a batch, or to return it."""
    return isinstance(x, (torch.Tensor, *_PLAIN))


def _is_due(kfac: KFAC) -> bool:
    """Whether the coming step has new inverses."""
    return bool(kfac.steps % kfac.inv_update_steps == 0)


def _hyperparameters(kfac: KFAC) -> tuple[Any, ...]:
    return tuple(getattr(kfac, name) for name in _HYPERPARAMETERS)


def _settings(kfac: KFAC) -> list[tuple[str, Any]]:
    """Of the optimizer, by group."""
    return [item for group in kfac.param_groups for item in group.items() if item[0] not in _ASIDE]


def _signature(leaves: Sequence[Any]) -> list[Any]:
    """What is known of a batch without looking; equal tensors may be one and the same."""
    first = {id(x): i for i, x in reversed([*enumerate(leaves)])}
    return [
        (x.shape, x.stride(), x.dtype, x.requires_grad, first[id(x)])
        if isinstance(x, torch.Tensor)
        else (type(x), x)
        for x in leaves
    ]


def _has_hooks(optimizer: Any) -> bool:
    own = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    return any((_global_optimizer_pre_hooks, _global_optimizer_post_hooks, *own))
