"""What CUDA graphs do, on the simulated device: kernels are noted, and run later with the same memory.

Numbers of the host are part of what is noted. Reading a number of the device while it is noted is an
error, and so is bringing one from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class SimulatedGraphs:
    """In the place of `suite.torch.recorders.CUDAGraphs`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, body: Callable[[], Any]) -> Any:
        return body()

    def record(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        notes = _Notes(self.device)
        try:
            with notes, mock.patch("suite.torch.recorders._is_capturing", return_value=True):
                found = body()
        finally:
            notes.undo()
        return notes.replay, found


class _Notes(TorchDispatchMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.made: dict[int, Any] = {}  # by address: memory of what was made while noting
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # and what was in other memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = self._own((args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a number of the device is read")
        for x in _written(func, args, kwargs):
            if x.device.type == self.device.type and _place(x) not in self.made:
                flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
                self.before.setdefault(_place(x), (flat, flat.clone()))
        out = func(*args, **kwargs)
        found = self._own(out)
        if found and any(
            x.device.type == "cpu" and x.ndim for x in tree_flatten((args, kwargs))[0] if _is(x)
        ):
            raise RuntimeError(f"{func} brings numbers from the host")
        if given and not found and any(_is(x) for x in tree_flatten(out)[0]):
            raise RuntimeError(f"{func} takes numbers to the host")
        if given or found:
            made = [x for x in found if _place(x) not in {_place(y) for y in given}]
            for x in made:
                self.made[_place(x)] = x
            if made or _written(func, args, kwargs):
                self.calls.append((func, args, kwargs, made))
        return out

    def _own(self, tree: Any) -> list[torch.Tensor]:
        return [x for x in tree_flatten(tree)[0] if _is(x) and x.device.type == self.device.type]

    def undo(self) -> None:
        """Nothing has run."""
        for flat, content in self.before.values():
            flat.copy_(content)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                again = self._own(func(*args, **kwargs))
                if made and "empty" not in str(func):
                    for kept, new in zip(made, again, strict=True):
                        kept.copy_(new)


def _is(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _place(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation changes."""
    # Schemas do not tell of running statistics.
    found = [x for x in args[3:5] if _is(x)] if "native_batch_norm.default" in str(func) else []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_flatten(value)[0] if _is(x)]
    return found
