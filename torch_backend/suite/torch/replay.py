"""A closure called again: with the same random numbers, without traces, with derivatives."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Draws:
    """The state of the random number generators that a model on these devices uses.

    `rewind` puts them back to where they were when this was made.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._host = torch.get_rng_state()
        self._others = [
            (d, torch.get_device_module(d).get_rng_state(d)) for d in devices if d.type != "cpu"
        ]

    def rewind(self) -> None:
        """Draw the same numbers again."""
        torch.set_rng_state(self._host)
        for device, state in self._others:
            torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """What the model does to its buffers (running statistics) meanwhile is forgotten."""
    put_back = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    copies = {id(b): b.clone() for _, _, b in put_back}
    try:
        for module, name, buffer in put_back:
            module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in put_back:
            module._buffers[name] = buffer


@torch.no_grad()
def value_before(
    closure: Callable[[], Any], model: nn.Module, moves: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Any:
    """What `closure` returns with every (parameter, step) taken back, for that call only."""
    present = [p.clone() for p, _ in moves]
    try:
        for parameter, step in moves:
            parameter.sub_(step)
        with buffers_kept(model):
            return closure()
    finally:
        for (parameter, _), value in zip(moves, present, strict=True):
            parameter.copy_(value)


@torch.no_grad()
def derivatives_along(
    closure: Callable[[], Sequence[torch.Tensor]],
    model: nn.Module,
    direction: Mapping[int, torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors that `closure` returns, each with its derivative along a direction of parameters.

    By forward-mode differentiation. scaled_dot_product_attention, whose fused kernels have none, runs
    written out, and uncompiled what torch.compile has compiled.

    Args:
        direction: by the parameters' ids; those that are not there do not move.
    """
    _load_forward_mode()
    places = [
        (m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None
    ]
    with (
        forward_ad.dual_level(),
        sdpa_kernel(SDPBackend.MATH),
        _uncompiled(),
        buffers_kept(model),
    ):
        moving: dict[int, Any] = {
            id(p): forward_ad.make_dual(p.detach(), direction[id(p)])
            for _, _, p in places
            if id(p) in direction
        }
        try:
            for module, name, parameter in places:
                module._parameters[name] = moving.get(id(parameter), parameter)
            returned = closure()
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter
        pairs = [forward_ad.unpack_dual(x) for x in returned]
        return [(x, torch.zeros_like(x) if t is None else t) for x, t in pairs]


@functools.cache
def _load_forward_mode() -> None:
    """torch's first dual number imports what it warns of itself."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; asking would load it
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
