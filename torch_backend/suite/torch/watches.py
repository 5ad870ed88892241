"""Hooks on modules that are no layers: free parameters, and outputs that are not covered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from suite.torch.capture import LayerCapture
from suite.torch.clock import CaptureClock
from suite.torch.free import FreeParameters, Watched
from suite.torch.hooks import Hook, ModeAround, after_forward, in_backward, is_exporting, without_modes
from suite.torch.probe import Reached
from suite.torch.runs import Ending

# Modules whose parameters are no data, as tables and parameters by themselves may be.
_WITH_WEIGHTS = nn.Linear, nn.modules.conv._ConvNd


class FreeCapture(ModeAround):
    """`FreeParameters` around the forward of a module with parameters of its own, or of one around it.

    What is around a module may use its parameters, or what it returned that is made of them alone.
    """

    def __init__(self, module: nn.Module, captures: Sequence[LayerCapture] = ()) -> None:
        super().__init__(module)
        self.captures = captures
        names = {id(parameter): name for name, parameter in module._parameters.items()}
        self.names = [names.get(id(capture.layer.weight.parameter)) for capture in captures]
        self.layers = [child for child in module.modules() if isinstance(child, _WITH_WEIGHTS)]
        self.inside: list[FreeCapture] = []  # not of what is compiled
        self.around: FreeCapture | None = None
        self.ran = self.uses_inside = False  # ran: while it looked for what modules inside have

    def put_inside(self, around: FreeCapture) -> None:
        """The other one's forward calls the module's."""
        self.around = around
        around.inside.append(self)
        for capture in self.captures:
            capture.watched_by.append(around)

    def all_inside(self) -> Iterator[LayerCapture]:
        """Of what may be used here, and is of modules inside."""
        for one in self.inside:
            yield from one.captures
            yield from one.all_inside()

    def mode(self) -> FreeParameters | None:
        """That of the forward that runs; None: there is none."""
        modes = [mode for mode in self.modes.own() if isinstance(mode, FreeParameters)]
        return modes[-1] if modes else None

    def settle(self, seen: set[str]) -> bool:
        """After a step: look no longer for what modules inside have, if these alone use it.

        Args:
            seen: names of the layers that have statistics.

        Returns:
            Whether there is nothing left to look for.
        """
        needed = self.uses_inside or any(capture.layer.name not in seen for capture in self.all_inside())
        if self.ran and not needed:
            for one in self.inside:
                one.around = None
                for capture in one.captures:
                    capture.watched_by.remove(self)
            self.inside = []
        return not self.captures and not self.inside

    def observe(self, site: int, args: Any, kwargs: Any, output: Any) -> None:
        mode = None if torch.compiler.is_compiling() else self.mode()
        super().observe(site, args, kwargs, output)
        if mode is None:
            return
        self.uses_inside = self.uses_inside or mode.uses_inside
        outer = None if self.around is None else self.around.mode()
        if outer is not None and outer.saving is mode.saving:
            outer.take(mode, output)

    def make_mode(self) -> FreeParameters | None:
        inside, within = self.inside, [*self.captures, *self.all_inside()]
        if torch.compiler.is_compiling():
            inside, within = [], [*self.captures]
        if not any([capture.wanted(0) for capture in within]):  # noqa: C419 (torch.compile)
            return None
        watched, elsewhere, module = self._all_watched(), {}, self.module()
        own = [] if module is None else [*module._parameters.values(), *module._buffers.values()]
        for one in inside:
            found, child = one._all_watched(), one.module()
            watched += found
            elsewhere.update({id(w.tensor): one.runs for w in found})
            own += [] if child is None else child._buffers.values()
        weights = [p for layer in self.layers for p in layer._parameters.values() if p is not None]
        self.ran = self.ran or len(inside) > 0
        return FreeParameters(watched, [x for x in own if x is not None], weights, elsewhere)

    def _all_watched(self) -> list[Watched]:
        pairs = zip(self.captures, self.names, strict=True)
        return [self._watched(capture, name) for capture, name in pairs if capture.wanted(0)]

    def runs(self) -> bool:
        """Whether a forward is under way that is watched."""
        return self.mode() is not None

    def _watched(self, capture: LayerCapture, name: str | None) -> Watched:
        # While fully_shard's forward runs, the module has the whole parameter in place of its shard.
        module = self.module()
        parameter = capture.layer.weight.parameter
        if module is not None and name is not None:
            parameter = getattr(module, name)
        if not torch.compiler.is_compiling() and not in_backward():
            capture.forget_what_was_discarded()
        clock = capture.clock if capture.clock.sampled else None
        strays = capture.clock.strays if capture.clock.discovering else None
        slots = capture.A, capture.G, capture.counts
        reduce = capture.layer.spec.reduce
        name = capture.layer.name
        return Watched(parameter, *slots, clock, strays, name, capture.clock, capture, reduce=reduce)


class OutputWatch:
    """Watches a layer that is not covered: it may be the model's last, whose positions are counted."""

    def __init__(
        self,
        module: nn.Module,
        channels: int,
        clock: CaptureClock,
        is_covered: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_covered`: whether it turned out to be, though that was not certain."""
        self.channels, self.clock, self.is_covered = channels, clock, is_covered
        self.owner = weakref.ref(module)
        device = next((parameter.device for parameter in module.parameters()), None)
        self.ending = Ending(clock, device)
        clock.endings.append(self.ending)
        hook = Hook(self, module)
        self.handles = [after_forward(module, hook, prepend=True)]

    def observe(self, site: int, args: Any, kwargs: Any, output: Any) -> Any:
        module, clock = self.owner(), self.clock
        if module is None or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return output
        if self.is_covered() or not clock.wanted or not module.training:
            return output
        positions = output.numel() // max(self.channels, 1)
        if clock.discovering and not torch.compiler.is_compiling() and output.ndim > 1:
            clock.not_covered.append(len(output))
        if torch.compiler.is_compiling():
            if is_exporting():
                return output
            clock.ends(self.ending)
            with without_modes():
                return Reached.apply(output, self.ending.slot, positions)
        self.ending.sees(output, positions)
        return output
