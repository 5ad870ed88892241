"""Hooks on modules that are no layers: free parameters, and outputs that are not covered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from suite.torch.capture import LayerCapture
from suite.torch.clock import CaptureClock
from suite.torch.free import FreeParameters
from suite.torch.free_probes import Watched
from suite.torch.hooks import (
    Hook,
    ModeAround,
    Stacks,
    after_forward,
    in_backward,
    is_exporting,
    without_modes,
)
from suite.torch.probe import Reached
from suite.torch.runs import Ending

# Modules whose parameters are no data, as tables and parameters by themselves may be.
_WITH_WEIGHTS = nn.Linear, nn.modules.conv._ConvNd


class FreeCapture(ModeAround):
    """`FreeParameters` around the forward of a module with parameters of its own, or of one around it.

    What is around a module may use its parameters, or what it returned that is made of them alone.
    """

    def __init__(
        self, module: nn.Module, running_modes: Stacks, captures: Sequence[LayerCapture] = ()
    ) -> None:
        """
        Args:
            running_modes: the modes of all of these whose forwards run, the innermost last.
        """
        super().__init__(module)
        self.captures, self.running_modes = captures, running_modes
        names = {id(parameter): name for name, parameter in module._parameters.items()}
        self.names = [names.get(id(capture.layer.weight.parameter)) for capture in captures]
        self.layers = [child for child in module.modules() if isinstance(child, _WITH_WEIGHTS)]
        self.inside: list[FreeCapture] = []  # of modules inside; not of what is compiled
        self.ran = False  # while it looked for what those have
        self.found: set[str] = set()  # names of the layers of those that it met

    def settle(self, needed: set[str]) -> bool:
        """Look no longer for what modules inside have, but for layers of these names.

        Returns:
            Whether there is nothing left to look for.
        """
        if self.ran:
            self.inside = [
                one for one in self.inside if any(c.layer.name in needed for c in one.captures)
            ]
        return not self.captures and not self.inside

    def enter(self) -> None:
        super().enter()
        mode = self.modes.own()[-1]
        if mode is not None and not torch.compiler.is_compiling():
            self.running_modes.push(mode)

    def observe(self, site: int, args: Any, kwargs: Any, output: Any) -> None:
        mode = self.modes.own()[-1] if self.modes.own() else None
        super().observe(site, args, kwargs, output)
        if not isinstance(mode, FreeParameters) or torch.compiler.is_compiling():
            return
        self.found |= mode.found
        running = self.running_modes.own()
        if mode in running:
            del running[running.index(mode) :]  # with those that were interrupted
        if output is not None and running and running[-1].saving is mode.saving:
            running[-1].take(mode, output)

    def make_mode(self) -> FreeParameters | None:
        inside = [] if torch.compiler.is_compiling() else self.inside
        within = [*self.captures, *(capture for one in inside for capture in one.captures)]
        if not any([capture.wanted(0) for capture in within]):  # noqa: C419 (torch.compile)
            return None
        watched, module = self._all_watched(), self.module()
        own = [] if module is None else [*module._parameters.values(), *module._buffers.values()]
        weights = [p for layer in self.layers for p in layer._parameters.values() if p is not None]
        of_inside = []
        for one in inside:
            child = one.module()
            of_inside += one._all_watched()
            own += [] if child is None else child._buffers.values()
        self.ran = self.ran or len(inside) > 0
        if module is not None and not torch.compiler.is_compiling():  # noise of weights, it may be
            shapes = {one.tensor.shape for one in watched}
            kept = [x for x in vars(module).values() if isinstance(x, torch.Tensor)]
            own += [x for x in kept if not x.requires_grad and x.shape in shapes]
        constants = [x for x in own if x is not None]
        return FreeParameters(watched, constants, weights, of_inside, self.running_modes)

    def _all_watched(self) -> list[Watched]:
        pairs = zip(self.captures, self.names, strict=True)
        return [self._watched(capture, name) for capture, name in pairs if capture.wanted(0)]

    def _watched(self, capture: LayerCapture, name: str | None) -> Watched:
        # While fully_shard's forward runs, the module has the whole parameter in place of its shard.
        module = self.module()
        parameter = capture.layer.weight.parameter
        if module is not None and name is not None:
            parameter = getattr(module, name)
        if not torch.compiler.is_compiling() and not in_backward():
            capture.forget_what_was_discarded()
        clock = capture.clock if capture.clock.sampled else None
        finds_out = torch.compiler.is_compiling() or capture.clock.discovering
        strays = capture.clock.strays if finds_out else None
        squares = torch.complex(*capture.A.unbind(-1)) if parameter.is_complex() else capture.A
        slots = squares, capture.G, capture.counts
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
        self.hooks = [Hook(self, module)]
        self.handles = [after_forward(module, self.hooks[0], prepend=True)]

    def observe(self, site: int, args: Any, kwargs: Any, output: Any) -> Any:
        if isinstance(output, tuple) and output:  # of a recurrent layer, the last with its state
            first = self.observe(site, args, kwargs, output[0])
            return output if first is output[0] else (first, *output[1:])
        module, clock = self.owner(), self.clock
        if module is None or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return output
        if self.is_covered() or not clock.wanted or not module.training:
            return output
        positions = output.numel() // max(self.channels, 1)
        if not torch.compiler.is_compiling() and clock.discovering and output.ndim > 1:
            clock.not_covered.append(len(output))
        if torch.compiler.is_compiling():
            if is_exporting():
                return output
            clock.ends(self.ending)
            with without_modes():
                return Reached.apply(output, self.ending.slot, positions)
        self.ending.sees(output, positions)
        return output
