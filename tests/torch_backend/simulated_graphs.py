"""What CUDA graphs do, on the simulated device: kernels are noted, and run later with the same memory.

Numbers of the host are part of what is noted. Reading a number of the device while it is noted is an
error, and so is bringing one from the host. Memory that was made while noting has no numbers before it
is replayed; afterwards only what somebody else has a tensor of, until another is replayed. To go on with
memory from outside that nobody else has a tensor of any more is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map


class SimulatedGraphs:
    """In the place of `suite.torch.recorders.CUDAGraphs`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.noted: list[_Notes] = []  # that share their memory

    def forget(self) -> None:
        self.noted = []

    def run(self, body: Callable[[], Any]) -> Any:
        return body()

    def watched(self, body: Callable[[], Any]) -> tuple[Any, str]:
        with _Reads() as reads:
            found = body()
        return found, "somewhere" if reads.any else ""

    def record(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        notes = _Notes(self.device)
        try:
            with notes, mock.patch("suite.torch.recorders._is_capturing", return_value=True):
                found = body()
        finally:
            notes.undo()
        self.noted.append(notes)
        together = self.noted

        def replay() -> None:
            for other in together:
                other.spoil()
            notes.replay()

        return replay, found


class _Reads(TorchDispatchMode):
    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class _Notes(TorchDispatchMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.made: dict[int, torch.Tensor] = {}  # by address: memory that was made while noting
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # and what was in other memory
        self.ours: list[torch.Tensor] = []  # views that the notes are of, one for each use

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = self._own((args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a number of the device is read")
        written = _written(func, args, kwargs)
        for x in written:
            if self._is_own(x) and _place(x) not in self.made:
                flat = _flat(x)
                self.before.setdefault(_place(x), (flat, flat.clone()))
        out = func(*args, **kwargs)
        found = self._own(out)
        on_host = [x for x in tree_flatten((args, kwargs))[0] if _is(x) and x.device.type == "cpu"]
        if found and any(x.ndim or "copy" in str(func) for x in on_host):
            raise RuntimeError(f"{func} brings numbers from the host")
        if given and not found and any(_is(x) for x in tree_flatten(out)[0]):
            raise RuntimeError(f"{func} takes numbers to the host")
        if given or found:
            places = {_place(x) for x in given}
            made = [x for x in found if _place(x) not in places]
            self.made |= {_place(x): _flat(x) for x in made}
            if made or written:
                self.calls.append((func, *self._ours((args, kwargs)), self._ours(made)))
        return out

    def _is_own(self, x: Any) -> bool:
        return _is(x) and x.device.type == self.device.type

    def _own(self, tree: Any) -> list[torch.Tensor]:
        return [x for x in tree_flatten(tree)[0] if self._is_own(x)]

    def _ours(self, tree: Any) -> Any:
        """With views of our own in the place of the device's tensors: so others' can be counted."""

        def view(x: Any) -> Any:
            if not self._is_own(x):
                return x
            self.ours.append(x.detach())
            return self.ours[-1]

        return tree_map(view, tree)

    def undo(self) -> None:
        """Nothing has run."""
        for flat, content in self.before.values():
            flat.copy_(content)
        self.before.clear()
        self.spoil()

    def spoil(self) -> None:
        """Fill with what is no number in any precision, and no flag or index that makes sense."""
        for flat in self.made.values():
            flat.fill_(255)

    def replay(self) -> None:
        ours = Counter(map(_place, (*self.ours, *self.made.values())))
        others = {place: _uses(x) - ours[place] for x in self.ours for place in [_place(x)]}
        if any(count <= 0 for place, count in others.items() if place not in self.made):
            raise RuntimeError("memory is read or written that is not in use any more")
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                again = self._own(func(*args, **kwargs))
                if made and "empty" not in str(func):
                    for kept, new in zip(made, again, strict=True):
                        kept.copy_(new)
        for place, flat in self.made.items():
            if others.get(place, 0) <= 0:
                flat.fill_(255)


def _is(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _place(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _flat(x: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's memory."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _uses(x: torch.Tensor) -> int:
    """How many tensors have this memory."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation changes."""
    # Schemas do not tell of running statistics.
    found = [x for x in args[3:5] if _is(x)] if "native_batch_norm.default" in str(func) else []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_flatten(value)[0] if _is(x)]
    return found
