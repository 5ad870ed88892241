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
from torch.overrides import TorchFunctionMode


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


class Buffers:
    """A model's buffers (running statistics) as they are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (m, n, b) for m in model.modules() for n, b in m._buffers.items() if b is not None
        ]
        self._values = {id(b): b.clone() for _, _, b in self._places}

    def put_back(self) -> None:
        """Undo what has been done to them since."""
        for _, _, buffer in self._places:
            buffer.copy_(self._values[id(buffer)])

    @contextlib.contextmanager
    def stood_in(self) -> Iterator[None]:
        """Copies of what they were are in their places meanwhile, and forgotten then."""
        copies = {key: value.clone() for key, value in self._values.items()}
        try:
            for module, name, buffer in self._places:
                module._buffers[name] = copies[id(buffer)]
            yield
        finally:
            for module, name, buffer in self._places:
                module._buffers[name] = buffer


@contextlib.contextmanager
def without_reducers(model: nn.Module) -> Iterator[None]:
    """A model in DistributedDataParallel runs meanwhile as if it were in none.

    That awaits a backward pass for each forward one, and has functions without forward-mode derivatives.
    """
    wrappers = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    own = [vars(wrapper).get("forward") for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            vars(wrapper)["forward"] = wrapper.module.__call__
        yield
    finally:
        for wrapper, forward in zip(wrappers, own, strict=True):
            vars(wrapper).pop("forward", None)
            if forward is not None:
                vars(wrapper)["forward"] = forward


def value_with(closure: Callable[[], Any], values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """What `closure` returns where every (parameter, value) has that value, for that call only."""
    present = [p.detach().clone() for p, _ in values]
    try:
        _put(values)
        return closure()
    finally:
        _put([(p, x) for (p, _), x in zip(values, present, strict=True)])


@torch.no_grad()
def _put(values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for parameter, value in values:
        parameter.copy_(value)


_aten = torch.ops.aten
_BY_NUMBER: dict[Any, Callable[..., torch.Tensor]] = {
    torch.mul: _aten.mul.Scalar,
    torch.Tensor.mul: _aten.mul.Scalar,
    torch.div: _aten.div.Scalar,
    torch.Tensor.div: _aten.div.Scalar,
    torch.add: _aten.add.Scalar,
    torch.Tensor.add: _aten.add.Scalar,
    torch.sub: _aten.sub.Scalar,
    torch.Tensor.sub: _aten.sub.Scalar,
}


class _ByNumbers(TorchFunctionMode):
    """Arithmetic of a tensor and a number, by the operations that are for that.

    Others make a tensor of the number first, whose derivative is zero, and torch takes as long for what
    follows of that as for twenty small operations.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = not kwargs and len(args) == 2 and type(args[0]) in (torch.Tensor, nn.Parameter)
        if known and type(args[1]) in (int, float) and not args[0].is_nested:
            func = _BY_NUMBER.get(func, func)
        return func(*args, **(kwargs or {}))


# What torch.autograd.grad says of parameters that no graph leads to.
_BY_PARAMETERS = (
    "does not require grad and does not have a grad_fn",
    "One of the differentiated Tensors appears to not have been used in the graph",
    "One of the differentiated Tensors does not require grad",
)


def derivatives_along(
    closure: Callable[[], Sequence[torch.Tensor]],
    model: nn.Module,
    direction: Mapping[int, torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors that `closure` returns, each with its derivative along a direction of parameters.

    By forward-mode differentiation. Attention, whose fused kernels have none, runs written out, and
    uncompiled what torch.compile has compiled.

    Args:
        direction: by the parameters' ids; those that are not there do not move.

    Raises:
        RuntimeError: an operation without a forward-mode derivative.
    """
    _load_forward_mode()
    places = [
        (m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None
    ]
    with forward_ad.dual_level(), _attention_written_out(), _uncompiled(), _ByNumbers():
        moving: dict[int, Any] = {
            id(p): forward_ad.make_dual(p.detach(), direction[id(p)])
            for _, _, p in places
            if id(p) in direction
        }
        try:
            for module, name, parameter in places:
                module._parameters[name] = moving.get(id(parameter), parameter)
            returned = closure()
        except NotImplementedError as error:
            raise RuntimeError(
                "the model must be made of operations with forward-mode derivatives, which torch lacks "
                f"for one in it: {error}"
            ) from error
        except RuntimeError as error:
            if "ested forward mode AD" in str(error):
                raise RuntimeError(
                    "the closure must not take derivatives in forward mode itself (torch.func.hessian, "
                    "jvp, jacfwd do), which torch cannot nest: torch.autograd.grad can be differentiated"
                ) from error
            if any(text in str(error) for text in _BY_PARAMETERS):
                raise RuntimeError(
                    "the closure must not take gradients by the parameters, as weights of a loss's "
                    "terms do that are made of these gradients' norms: make them before step(), as "
                    "numbers that the closure takes"
                ) from error
            raise
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter
        pairs = [forward_ad.unpack_dual(x) for x in returned]
        return [(x.detach(), torch.zeros_like(x) if t is None else t.detach()) for x, t in pairs]


@contextlib.contextmanager
def _attention_written_out() -> Iterator[None]:
    """Without fused kernels, and nn.MultiheadAttention's fast path, which evaluation takes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@functools.cache
def _load_forward_mode() -> None:
    """torch's first dual number imports what it warns of itself."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; asking would load it
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
