"""Weights that are used elsewhere than in their layers, which capture cannot see."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from suite.torch.capture import LayerCapture, _Hook

# Kinds whose module passes its weight to one function in every call.
_COUNTED = ("dense", "convolution", "transposed", "embedding", "bag")


class UseCounter:
    """Counts, in the first training passes of a model, the functions that take a layer's weight.

    A layer's own call is one. Whatever is above that is a use that the layer's statistics miss, such as
    `functional.linear(x, self.embedding.weight)`.
    """

    def __init__(self, model: nn.Module, captures: list[LayerCapture]) -> None:
        self.model = weakref.ref(model)
        self.captures = [
            c
            for c in captures
            if c.layer.spec.kind in _COUNTED
            and c.layer.weight.stop is None
            and all(site.module is site.owner and not site.scaling for site in c.layer.sites)
        ]
        self.counts: dict[int, int] = {}
        self.modes: list[_Counting | None] = []
        self.handles = [
            model.register_forward_pre_hook(_EnterCounter(self, model)),
            model.register_forward_hook(_Hook(self, model), with_kwargs=True, always_call=True),
        ]

    def enter(self) -> None:
        mode = None
        clock = self.captures[0].clock if self.captures else None
        compiling = torch.compiler.is_compiling()
        if clock is not None and clock.discovering and clock.wanted and not compiling:
            mode = _Counting({id(c.layer.weight.parameter) for c in self.captures}, self.counts)
            mode.__enter__()
        self.modes.append(mode)

    def observe(self, site: int, args: Any, kwargs: Any, output: Any) -> None:
        mode = self.modes.pop() if self.modes else None
        if mode is not None:
            mode.__exit__(None, None, None)

    def strays(self) -> list[str]:
        """The layers whose weights were used more often than the layers ran."""
        return [
            c.layer.name
            for c in self.captures
            if self.counts.get(id(c.layer.weight.parameter), 0) > c.calls > 0
        ]

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []


class _EnterCounter(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:  # type: ignore[override]
        counter = self.capture()
        if counter is not None and self.module() is module:
            counter.enter()


class _Counting(TorchFunctionMode):
    def __init__(self, watched: set[int], counts: dict[int, int]) -> None:
        super().__init__()
        self.watched, self.counts = watched, counts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            for operand in (*args, *kwargs.values()):
                if id(operand) in self.watched:
                    self.counts[id(operand)] = self.counts.get(id(operand), 0) + 1
        return output
