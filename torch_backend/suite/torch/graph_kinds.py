"""Kinds of an optimizer's steps: what the kernels of a step depend on, as far as the host knows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from suite.torch.checks import is_at_hand

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, type(None))
_ASIDE = ("params", "param_names", "lr", "initial_lr")  # of a group: what kernels do not depend on


class Recordable(Protocol):
    """What `GraphedStep` asks of an optimizer."""

    device: torch.device

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def memory(self) -> list[torch.Tensor]:
        """What a step reads and writes, besides parameters, buffers and what records hold."""

    def forget(self) -> None:
        """There are no records any more."""

    def not_yet(self) -> str:
        """Why no step can be recorded or replayed so far, or ''; the coming one is prepared."""

    def why_not(self) -> str:
        """Why the coming step is not to be recorded, or ''."""

    def kind(self) -> Mapping[str, Any]:
        """What the kernels of the coming step depend on besides settings of groups, by name."""

    def aside(self) -> Sequence[str]:
        """Settings of groups that they do not depend on, or that `kind` has."""

    def begin_pass(self) -> None:
        """Forward and backward follow, of a step by itself."""

    def slots(self) -> list[torch.Tensor]:
        """What else backward has to reach."""

    def reset(self) -> None:
        """Forget passes that had no step."""

    def recording(self) -> AbstractContextManager[Any]:
        """A step is taken that does not run; what has a `record()` of it, which replays are given.

        Afterwards the optimizer is as before.
        """

    def begin_replay(self, record: Any) -> None: ...

    def end_replay(self, record: Any) -> None: ...


class Kind(NamedTuple):
    """Steps of one kind differ in numbers that are on the device alone, and in learning rates."""

    of_optimizer: tuple[tuple[str, Any], ...]
    settings: str  # of its groups
    batch: tuple[Any, ...]
    training_modules: tuple[bool, ...]
    trained_parameters: tuple[bool, ...]

    def differences(self, other: Kind) -> list[str]:
        """In words, for users."""
        ours, theirs = ([*kind.of_optimizer, *kind._asdict().items()] for kind in (self, other))
        names = [name for (name, a), (_, b) in zip(ours, theirs, strict=True) if a != b]
        return [name.replace("_", " ") for name in names if name != "of_optimizer"]


def why_not(part: Recordable, leaves: Sequence[Any]) -> str:
    """Why the coming step is not to be recorded, or ''.

    Args:
        leaves: the parts of a batch.
    """
    reason = part.why_not()
    if reason:
        return reason
    if any(isinstance(value, torch.Tensor) for _, value in _settings(part)):
        return "with settings that are tensors"
    if torch.is_autocast_enabled(part.device.type):
        return "with autocast around them, which belongs into loss_of"
    if _has_hooks(part.optimizer) or _has_hooks(getattr(part.optimizer, "optimizer", None)):
        return "with hooks on the optimizer's step"
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if any(x.layout is not torch.strided or x.is_nested for x in tensors):
        return "of a batch with tensors that are sparse or nested"
    if not all(map(is_known, leaves)):
        return "of a batch with parts that are neither tensors nor plain values"
    return ""


def kind_of(
    part: Recordable,
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
        tuple(part.kind().items()),
        repr(_settings(part)),
        (str(structure), *_signature(leaves)),
        tuple(module.training for module in modules),
        tuple(p.requires_grad for p in parameters),
    )


def is_known(x: Any) -> bool:
    """Whether what is recorded can be told to be of this part of a batch, or to return it."""
    return isinstance(x, (torch.Tensor, *_PLAIN))


@contextmanager
def rates_on_device(
    groups: Sequence[dict[str, Any]], device: torch.device, dtypes: Sequence[torch.dtype]
) -> Iterator[list[torch.Tensor | None]]:
    """Meanwhile learning rates that the host knows are numbers of the device, which can be changed.

    And optimizers that ask whether they may be recorded are told so: they are fused.

    Args:
        dtypes: by group, of rates.

    Yields:
        By group, the number; None: it is the user's own.
    """
    before: list[dict[str, Any]] = [
        {key: group[key] for key in ("lr", "capturable") if key in group} for group in groups
    ]
    rates: list[torch.Tensor | None] = []
    for group, dtype in zip(groups, dtypes, strict=True):
        rate = None
        if is_at_hand(group["lr"]):
            rate = torch.full((), float(group["lr"]), dtype=dtype, device=device)
            group["lr"] = rate
        rates.append(rate)
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield rates
    finally:
        for group, own in zip(groups, before, strict=True):
            group.update(own)


def set_rates(rates: Sequence[torch.Tensor | None], groups: Sequence[dict[str, Any]]) -> None:
    """Have those of `rates_on_device` be the groups'."""
    for rate, group in zip(rates, groups, strict=True):
        if rate is not None:
            rate.fill_(float(group["lr"]))


def _settings(part: Recordable) -> list[tuple[str, Any]]:
    """Of the optimizer, by group."""
    aside = {*_ASIDE, *part.aside()}
    groups = part.optimizer.param_groups
    return [item for group in groups for item in group.items() if item[0] not in aside]


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
