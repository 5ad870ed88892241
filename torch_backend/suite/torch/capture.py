"""K-FAC's statistics out of a model's forward and backward pass.

A forward hook puts an identity behind a layer's output. Its backward rule passes the output's gradient
on and returns Σ a aᵀ, Σ g gᵀ and the row count as the gradients of three inputs that nothing else uses
(*slots*). Autograd adds them up like any other gradient: over micro-batches, over repeated uses of a
layer, once under activation checkpointing, never in a forward pass without a backward one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from suite.core.statistics import LayerStatistics, second_moment_sum
from suite.torch.layers import Layer, LayerSpec, input_rows, output_rows


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        A: torch.Tensor,
        G: torch.Tensor,
        rows: torch.Tensor,
        spec: LayerSpec,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.spec = spec
        ctx.dtype = A.dtype
        # An alias, not a view: an output that is a view of an input breaks in-place ops after it.
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        spec = ctx.spec
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            inputs = input_rows(x.to(ctx.dtype), spec)
            A = second_moment_sum(inputs, diagonal=spec.diagonal[0], bias=spec.bias)
            outputs = output_rows(gradient.to(ctx.dtype), spec)
            G = second_moment_sum(outputs, diagonal=spec.diagonal[1])
            rows = torch.full((), inputs.shape[1], dtype=torch.float32, device=x.device)
        return gradient, None, A, G, rows, None


class _Hook:
    """The forward hook of one layer. A copy of the model gets an inert one."""

    def __init__(self, capture: LayerCapture, module: nn.Module) -> None:
        self.capture = weakref.ref(capture)
        self.module = weakref.ref(module)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        capture = self.capture()
        if capture is None or self.module() is not module:
            return None
        return capture.observe(args[0] if args else kwargs.get("input"), output)

    def __deepcopy__(self, memo: Any) -> _InertHook:
        return _InertHook()

    def __reduce__(self) -> Any:
        return (_InertHook, ())


class _InertHook:
    def __call__(self, *args: Any) -> None:
        return None


class LayerCapture:
    """One layer's slots and hook."""

    def __init__(self, layer: Layer, dtype: torch.dtype, clock: CaptureClock) -> None:
        attached = [h for h in layer.module._forward_hooks.values() if isinstance(h, _Hook)]
        if any(hook.capture() is not None for hook in attached):
            raise ValueError(
                f"layer {layer.name!r} already has a K-FAC attached: detach() that one first"
            )
        self.layer = layer
        self.clock = clock
        blocks, device = layer.spec.groups, layer.weight.device

        def slot(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            # Expanded from one number: only gradients take memory.
            return torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()

        def factor_slot(side: int, diagonal: bool) -> torch.Tensor:
            return slot(blocks, side) if diagonal else slot(blocks, side, side)

        self.A = factor_slot(layer.sizes[0], layer.spec.diagonal[0])
        self.G = factor_slot(layer.sizes[1], layer.spec.diagonal[1])
        self.rows = slot(dtype=torch.float32)
        hook = _Hook(self, layer.module)
        self.handle = layer.module.register_forward_hook(hook, with_kwargs=True)

    def observe(self, x: Any, y: Any) -> Any:
        """Probe a call of the layer, if it is part of training and this step wants statistics."""
        wanted = self.clock.wanted and self.layer.module.training
        if not wanted or not isinstance(x, torch.Tensor) or not y.requires_grad:
            return None
        again = _in_backward()
        self.clock.ran(self.layer, y, again)
        if not again and not torch.compiler.is_compiling():
            self._forget_what_was_discarded()
        return _Probe.apply(y, x, self.A, self.G, self.rows, self.layer.spec)

    def _forget_what_was_discarded(self) -> None:
        """Clearing the model's gradients, with whatever `zero_grad`, clears its statistics."""
        if self.A.grad is not None and self.layer.weight.grad is None:
            self.A.grad = self.G.grad = self.rows.grad = None

    def take(self) -> LayerStatistics | None:
        """What was summed since the last `take`; None if no backward pass went through the layer."""
        A, G, rows = self.A.grad, self.G.grad, self.rows.grad
        self.A.grad = self.G.grad = self.rows.grad = None
        if A is None or G is None or rows is None:
            return None
        return LayerStatistics(A, G, rows)


class OutputWatch:
    """The hook of a layer that is not covered: it may be the model's last, whose rows are counted."""

    def __init__(self, module: nn.Module, channels: int, clock: CaptureClock) -> None:
        self.module, self.channels, self.clock = weakref.ref(module), channels, weakref.ref(clock)
        self.handle = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        clock = self.clock()
        if clock is None or self.module() is not module or not isinstance(output, torch.Tensor):
            return
        wanted = clock.wanted and module.training and output.requires_grad
        if wanted and not _in_backward():
            clock.last, clock.last_rows = None, output.numel() // self.channels

    def __deepcopy__(self, memo: Any) -> _InertHook:
        return _InertHook()

    def __reduce__(self) -> Any:
        return (_InertHook, ())


class CaptureClock:
    """Shared by all layers of a model: whether statistics are wanted, and which layer ran last."""

    def __init__(self) -> None:
        self.wanted = True
        self.last: str | None = None  # None: a layer that is not covered
        self.last_rows = 0  # in its last call
        self.rows: dict[str, int] = {}  # of covered layers, in their last call

    def ran(self, layer: Layer, output: torch.Tensor, again: bool) -> None:
        """A covered layer produced an output, possibly one that was made before."""
        rows = output.numel() // (layer.sizes[1] * layer.spec.groups)
        self.rows[layer.name] = rows
        if not again:
            self.last, self.last_rows = layer.name, rows


def _in_backward() -> bool:
    """Whether a backward pass is running: activation checkpointing then runs layers a second time."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1
