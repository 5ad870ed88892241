"""Uses of a weight in the derivatives that a loss is made of.

`torch.autograd.grad(u, x, create_graph=True)` goes backward through y = W x with a product of its own,
∂u/∂x = Wᵀ ∂u/∂y. A loss of ∂u/∂x (a PINN's residual, forces, a gradient penalty) has a part of its
gradient by W from there: (∂u/∂y) vᵀ, where v is the loss's gradient by ∂u/∂x. So this is a use as the
transpose, with input ∂u/∂y and output gradient v. A derivative of the derivative goes backward through
this product, which makes one more with W, and so on.

A layer's probe sees a backward pass that is itself recorded go through, and what comes: the input of the
next product. The output of that is the gradient by the layer's input, where a hook, for as long as the
pass runs, puts a probe. All that the input's uses add to it have one gradient v, so that it does not
matter how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from suite.torch.rows import Bases, counts_like, derivative_sums, output_positions

if TYPE_CHECKING:
    from suite.torch.capture import LayerCapture
    from suite.torch.layers import Site
    from suite.torch.runs import Run

# Kinds of layers whose derivatives by their input use the weight. (Those of sums and lookups do not.)
PRODUCTS = ("dense", "convolution", "transposed", "norm")


class Call:
    """What the probes behind a layer's call, and behind products in its derivatives, share."""

    def __init__(self, run: Run | None) -> None:
        self.run = run
        self.counted = -1  # the last backward pass in which its positions were counted

    def is_first(self) -> bool:
        """Whether no other probe of it has said so in the backward pass that runs."""
        now = torch._C._current_graph_task_id()
        before, self.counted = self.counted, now
        return before != now


class Source(NamedTuple):
    """Whose call it is."""

    capture: LayerCapture
    site: Site
    understood: bool  # whether products in its derivatives are


def is_recorded() -> bool:
    """Asked in a backward pass: whether its derivatives may be taken."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def is_awaited(slot: torch.Tensor) -> bool:
    """Whether the backward pass that runs wants a slot's gradient."""
    node = torch.autograd.graph.get_gradient_edge(slot).node
    return torch._C._will_engine_execute_node(node)


def follow(x: torch.Tensor, probe: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put a probe behind the gradient by `x` that the backward pass that runs will come to."""
    if x.is_leaf:  # what was saved may be a copy
        x = torch.autograd.graph.get_gradient_edge(x).node.variable  # type: ignore[attr-defined]
    now = torch._C._current_graph_task_id()

    def arrived(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or torch._C._current_graph_task_id() != now:
            return None
        return probe(gradient) if gradient.requires_grad else None

    handle = x.register_hook(arrived)
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(handle.remove)


class Noted(torch.autograd.Function):
    """Behind a gradient: calls when a loss that depends on it goes backward to the slots."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, slot: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.slot, ctx.call = slot, call
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if is_awaited(ctx.slot):
            ctx.call()
        return gradient, None, None

    @staticmethod
    def jvp(ctx: Any, y: torch.Tensor, *rest: Any) -> torch.Tensor:
        return y.view_as(y)


class DerivativeProbe(torch.autograd.Function):
    """Behind a product in derivatives of a layer, as `probe.Probe` is behind the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        A: torch.Tensor,
        G: torch.Tensor,
        counts: torch.Tensor,
        positions: torch.Tensor,
        products: torch.Tensor | None,
        source: Source,
        call: Call,
        turned: bool,
        *rest: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Args:
            y: what the product made.
            A, G, counts: slots for the sums of the side that the layer's call has its input at, of the
                other side, and of rows.
            positions: the slot of counts of the call itself.
            products: that of products in bases; None: no bases.
            turned: whether it is a product with the transpose of what the call's is with.
            rest: the product's input, the call's, scale, chosen rows, bases of A and G.
        """
        ctx.source, ctx.call, ctx.turned, ctx.slot = source, call, turned, G
        ctx.save_for_backward(*rest)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        source, wanted = ctx.source, ctx.needs_input_grad
        given, x, scale, chosen, *vectors = ctx.saved_tensors
        on, clock = gradient, source.capture.clock
        waits = not clock.sampled or clock.sampling
        if is_recorded():
            on = source.capture.passed(source, ctx.call, gradient, given, scale, not ctx.turned)
        if not wanted[2] or not waits or not (clock.sampling or is_awaited(ctx.slot)):
            return on, *(None,) * 14
        clock.passes()
        run, first = ctx.call.run, ctx.call.is_first()
        counted = (run is None or run.reached()) and first
        spec, dtype = source.site.spec, ctx.slot.dtype
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            bases: Bases | None = (vectors[0], vectors[1]) if wanted[5] else None
            inputs, outputs = (gradient, given) if ctx.turned else (given, gradient)
            inputs, outputs = inputs.to(dtype), outputs.to(dtype)
            at = None if x is None else x.to(dtype)
            outputs = outputs if scale is None else outputs * scale
            found = derivative_sums(spec, inputs, outputs, at, chosen, bases)
            rows, zero = found.counts[0], torch.zeros_like(found.counts[0])
            positions = output_positions(spec, outputs) if counted else 0
            places = counts_like(found.counts, 0, positions)
        sums = found.A, found.G, torch.stack([rows, zero]), places, found.products
        return on, *sums, *(None,) * 9

    @staticmethod
    def jvp(ctx: Any, y: torch.Tensor, *rest: Any) -> torch.Tensor:
        return y.view_as(y)
