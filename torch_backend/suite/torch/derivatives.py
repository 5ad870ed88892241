"""Uses of a weight in the derivatives that a loss is made of.

`torch.autograd.grad(u, x, create_graph=True)` goes backward through y = W x with a product of its own,
∂u/∂x = Wᵀ ∂u/∂y. A loss of ∂u/∂x (a PINN's residual, forces, a gradient penalty) has a part of its
gradient by W from there: (∂u/∂y) vᵀ, where v is the loss's gradient by ∂u/∂x. So this is a use as the
transpose, with input ∂u/∂y and output gradient v. A derivative of the derivative goes backward through
this product, which makes one more with W, and so on.

A layer's probe sees a backward pass that is itself recorded go through, and what comes: the input of the
next product. The output of that is the gradient by the layer's input, where a hook puts a probe. All
that the input's uses add to it have one gradient v, so that it does not matter how many there are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from suite.torch.clock import CaptureClock
from suite.torch.hooks import is_batched
from suite.torch.rows import Bases, LayerSpec, counts_like, derivative_sums, output_positions

# Kinds of layers whose derivatives by their input use the weight. (Those of sums and lookups do not.)
PRODUCTS = ("dense", "convolution", "transposed", "norm")


class Passed(NamedTuple):
    """What is known of a product when a backward pass has gone through the one before."""

    gradient: torch.Tensor  # by the output of the one before: this one's input
    x: torch.Tensor | None  # the input of the one before


# Puts a probe behind the output of a product in derivatives.
Probe = Callable[["Product", Passed, torch.Tensor], torch.Tensor]


class Product:
    """A product with a weight: a layer's own call, or one in derivatives of that."""

    def __init__(
        self, clock: CaptureClock, name: str, probe: Probe | None, call: Product | None = None
    ) -> None:
        """
        Args:
            name: of the layer.
            probe: for products in derivatives of this one; None: they are not understood.
            call: the layer's own; None: this is it.
        """
        self.clock, self.name, self.probe = clock, name, probe
        self.call = self if call is None else call
        self.turned = False  # whether it is with the transpose of what the call's is with
        self.counted = -1  # the last backward pass in which the call's positions were counted

    def next(self) -> Product:
        """The product that a backward pass through this one makes."""
        found = Product(self.clock, self.name, self.probe, self.call)
        found.turned = not self.turned
        return found

    def watch(self, x: torch.Tensor) -> None:
        """Look for derivatives by this product's input, as long as there is the product."""
        # The graph, whose nodes have the product, has `x`. And `x` may stay when the graph has gone.
        handle = x.register_hook(functools.partial(_arrived, weakref.ref(self)))
        if x.is_leaf:
            weakref.finalize(self, handle.remove)

    def passed(self, gradient: torch.Tensor, x: torch.Tensor | None = None) -> None:
        """A backward pass that is recorded goes through; `gradient` is by this product's output."""
        if self.clock.pausing:
            return
        if self.probe is None or is_batched(gradient):
            self.clock.missed.add(self.name)
        else:
            self.clock.wait(self, Passed(gradient, x))

    def is_first(self) -> bool:
        """Whether the backward pass that runs has come to no product of the call before."""
        now = torch._C._current_graph_task_id()
        before, self.call.counted = self.call.counted, now
        return before != now


def _arrived(reference: weakref.ref[Product], gradient: torch.Tensor) -> torch.Tensor | None:
    """Of a product's input: the output of the next product, if a pass has gone through this one."""
    product = reference()
    passed = None if product is None else product.clock.waiting(product)
    if product is None or product.probe is None or passed is None or not gradient.requires_grad:
        return None
    following = product.next()
    if passed.gradient.requires_grad:
        following.watch(passed.gradient)
    return product.probe(following, passed, gradient)


class DerivativeProbe(torch.autograd.Function):
    """Behind a product in derivatives of a layer, as `capture._Probe` is behind the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        A: torch.Tensor,
        G: torch.Tensor,
        counts: torch.Tensor,
        positions: torch.Tensor,
        products: torch.Tensor | None,
        product: Product,
        spec: LayerSpec,
        clock: Any,
        *rest: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Args:
            y: what the product made.
            A, G, counts: slots for the sums of the side that the layer's call has its input at, of the
                other side, and of rows.
            positions: the slot of counts of the call itself.
            products: that of products in bases; None: no bases.
            spec: of the call.
            clock: says when statistics are taken, where not in every backward pass.
            rest: the product's input, the layer's, scale, chosen rows, bases of A and G.
        """
        ctx.product, ctx.spec, ctx.clock, ctx.dtype = product, spec, clock, A.dtype
        ctx.save_for_backward(*rest)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        product, wanted = ctx.product, ctx.needs_input_grad
        given, x, scale, chosen, *vectors = ctx.saved_tensors
        if torch.is_grad_enabled():
            product.passed(gradient, given)
        if not wanted[2] or (ctx.clock is not None and not ctx.clock.sampling):
            return gradient, *(None,) * 14
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            bases: Bases | None = (vectors[0], vectors[1]) if wanted[5] else None
            inputs, outputs = (gradient, given) if product.turned else (given, gradient)
            inputs, outputs = inputs.to(ctx.dtype), outputs.to(ctx.dtype)
            at = None if x is None else x.to(ctx.dtype)
            outputs = outputs if scale is None else outputs * scale
            found = derivative_sums(ctx.spec, inputs, outputs, at, chosen, bases)
            rows, zero = found.counts[0], torch.zeros_like(found.counts[0])
            positions = output_positions(ctx.spec, outputs) if product.is_first() else 0
            places = counts_like(found.counts, 0, positions)
        sums = found.A, found.G, torch.stack([rows, zero]), places, found.products
        return gradient, *sums, *(None,) * 9
