"""What all layers of a model share while it runs: whether statistics are wanted, and what ran."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from suite.core.noise import unit_noise
from suite.torch.layers import Layer
from suite.torch.rows import stratified


class Ending:
    """Counts the positions of a layer that is not covered, for it may be the model's last."""

    def __init__(self, device: torch.device | None) -> None:
        self.slot = torch.zeros((), device=device, requires_grad=True)  # whose gradient is the count
        self.ran = False  # in this step
        self.was_last = self.was_passed = False  # in any step so far: whether it was, or not

    def counts(self) -> bool:
        """Whether it can be the last, as far as is known: most are in front of others, in every step."""
        return self.was_last or not self.was_passed


class CaptureClock:
    """Shared by all layers of a model."""

    def __init__(self) -> None:
        self.wanted = True
        self.pausing = False  # neither statistics nor rows are
        self.sampled = False  # statistics come from passes of our own (`fisher`) ...
        self.sampling = False  # ... one of which is running
        self.count = torch.zeros((), dtype=torch.int32)  # steps, for the noise that chooses rows
        self.last: str | None = None  # None: a layer that is not covered
        self.last_ending: Ending | None = None  # what counts its positions then
        self.last_positions: torch.Tensor | None = None  # what that had counted when it was last taken
        self.last_transposed = False  # whether that used its weight as the transpose
        self.looked_up: str | None = None  # the last table, whose rows may be there for all examples
        self.endings: list[Ending] = []  # of all layers that are not covered
        self.called: dict[str, bool] = {}  # the layers that ran in this step, by name
        self.taken = False  # whether these are of the last step, until a layer runs
        self.discovering = True  # which layers read the same inputs
        self.strangers: set[str] = set()  # layers that turned out not to
        self.strays: set[str] = set()  # free parameters with a use that is not understood
        self.transformed: set[str] = set()  # layers that ran where there are no statistics
        self.missed: set[str] = set()  # layers whose uses in derivatives are not understood
        self._tokens: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._next = 0
        self.calls = 0
        self.stream = 0  # of the noise that chooses examples
        self._examples: tuple[Any, torch.Tensor] | None = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs meanwhile is not seen."""
        before = self.wanted, self.pausing
        self.wanted, self.pausing = False, True
        try:
            yield
        finally:
            self.wanted, self.pausing = before

    def chosen(self, stream: int, count: int, total: int, device: torch.device) -> torch.Tensor:
        """(count,), indices below `total`: from the step count, not from torch's generator."""
        streams = torch.full((1,), stream, dtype=torch.int32, device=device)
        now = self.count.to(device, non_blocking=True)
        noise = unit_noise(streams, now, (count,), torch.float32)
        return stratified((noise[0] / (2 * 3**0.5) + 0.5).clamp(0, 1 - 2**-24), total)

    def examples(self, count: int, total: int, device: torch.device) -> torch.Tensor:
        """`chosen`, drawn once in a step for all layers."""
        if torch.compiler.is_compiling():
            return self.chosen(self.stream, count, total, device)
        key = (count, total, device, self.count._version)
        if self._examples is None or self._examples[0] != key:
            self._examples = key, self.chosen(self.stream, count, total, device)
        return self._examples[1]

    def ran(self, layer: Layer, transposed: bool, again: bool, looks_up: bool) -> None:
        """A covered layer produced an output, possibly one that was made before."""
        if self.taken and not torch.compiler.is_compiling():  # what is read there is compiled in
            self.called.clear()
            self.taken = False
        if not transposed:
            self.called[layer.name] = True
        if not again and looks_up:
            self.looked_up = layer.name
        elif not again and layer.is_product:
            self.last, self.last_transposed = layer.name, transposed

    def has_run(self, layer: Layer) -> bool:
        """Whether a layer was called in this step, with its weight as it is."""
        return not self.taken and layer.name in self.called

    def ends(self, ending: Ending) -> None:
        """A layer that is not covered produced an output, perhaps the model's."""
        self.last, self.last_ending, ending.ran = None, ending, True

    def take_positions(self) -> None:
        """Note those of the layer that ran last, if it is not covered; all are counted anew then."""
        last = self.last_ending if self.last is None else None
        self.last_positions = None if last is None else last.slot.grad
        for ending in self.endings:
            if ending.ran:
                ending.was_last |= ending is last
                ending.was_passed |= ending is not last
                ending.ran = False
        self.forget_positions()

    def forget_positions(self) -> None:
        """Count those of layers that are not covered anew."""
        for ending in self.endings:
            ending.slot.grad = None

    def token(self, x: torch.Tensor) -> int:
        """A number that is the same for the same tensor with the same content."""
        known = self._tokens.get(id(x))
        if known is not None and known[0]() is x and known[1] == x._version:
            return known[2]
        self._next += 1
        self._tokens[id(x)] = (weakref.ref(x), x._version, self._next)
        return self._next

    def forget(self) -> None:
        """Drop what `token` remembers."""
        self._tokens.clear()
