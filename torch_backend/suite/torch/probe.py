"""The identity behind a layer's output whose backward rule sums second moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from suite.torch.clock import CaptureClock
from suite.torch.derivatives import Call, Source, is_awaited, is_recorded
from suite.torch.hooks import without_modes
from suite.torch.looked_up import OfSum, UnlessBroadcast
from suite.torch.rows import Bases, LayerSpec, Sums, derivative_sums, keeps_half, sums
from suite.torch.runs import Run


class Reading(NamedTuple):
    """What a backward pass through a call notes."""

    read: list[int]
    token: int  # of the call's input


class About(NamedTuple):
    """What a backward pass through a call is to know of it."""

    spec: LayerSpec
    clock: CaptureClock | UnlessBroadcast | OfSum | None = None  # None: the pass takes statistics
    reading: Reading | None = None
    source: Source | None = None
    run: Run | None = None
    told: CaptureClock | None = None  # of backward passes
    asked: Callable[[Any, torch.Tensor], None] | None = None  # about an input and the output's gradient
    turned: bool = False  # whether it is a product with the transpose of the layer's weight


def passed_on(y: torch.Tensor) -> torch.Tensor:
    """What an identity's forward returns: no view, which would break in-place ops after it.

    In graphs no alias either. Outputs of a graph that are views of one tensor are made anew from that,
    by the same steps, and `detach` as one of them would cut off their gradients.
    """
    return y.clone() if torch.compiler.is_compiling() else y.detach()


class Probe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        x: torch.Tensor | None,
        A: torch.Tensor | None,
        G: torch.Tensor,
        counts: torch.Tensor,
        about: About,
        *rest: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Args:
            rest: slot of products, scale, chosen rows, bases of A and G, a factor of x; or nothing.
        """
        ctx.about, ctx.slot, ctx.call = about, G, None
        ctx.save_for_backward(x, *rest[1:])
        return passed_on(y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        spec, clock, reading, source, run, told, asked, _ = ctx.about
        wanted, on = ctx.needs_input_grad, gradient
        x, *rest = ctx.saved_tensors  # once: checkpoints compute what is read again
        scale, chosen, *vectors = rest or (None, None)
        if asked is not None and not (told is not None and told.sampling):  # which ends at statistics
            asked(x, gradient)
        waits = wanted[3] and (clock is None or clock.sampling)
        if source is not None and is_recorded():
            ctx.call = ctx.call or Call(run)
            on = source.capture.passed(source, ctx.call, gradient, x, scale, True)
            waits = waits and is_awaited(ctx.slot)
        if not waits or not (run is None or run.is_awaited()):
            return (on, *(None,) * (len(wanted) - 1))
        if run is None and told is not None:
            told.passes()  # a run says so itself
        counted = run is None or run.reached()
        if reading is not None:
            reading.read.append(reading.token)
        bases: Bases | None = (vectors[0], vectors[1]) if vectors and wanted[6] else None
        given = ctx, spec, gradient, x, scale, chosen, bases, vectors[2] if vectors else None
        if _is_plain(gradient.device.type):
            A, G, counts, products = Probe._sums(*given)
        else:
            with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
                A, G, counts, products = Probe._sums(*given)
        if not counted or (ctx.call is not None and not ctx.call.is_first()):
            counts = torch.stack([counts[0], torch.zeros_like(counts[0])])
        if not rest:
            return on, None, A, G, counts, None
        return on, None, A, G, counts, None, products, *(None,) * 5

    @staticmethod
    def _sums(
        ctx: Any,
        spec: LayerSpec,
        g: torch.Tensor,
        x: torch.Tensor | None,
        scale: torch.Tensor | None,
        chosen: torch.Tensor | None,
        bases: Bases | None,
        factor: torch.Tensor | None,
    ) -> Sums:
        if ctx.about.turned:
            assert x is not None
            x, g = x.to(ctx.slot.dtype), g.to(ctx.slot.dtype)
            return derivative_sums(spec, g, x, None, chosen, bases)
        as_it_is = g.dtype == ctx.slot.dtype
        if not as_it_is and (scale is not None or factor is not None or not keeps_half(spec, g)):
            g = g.to(ctx.slot.dtype)
        if scale is not None:
            g = g * scale
        if x is not None and x.is_floating_point():
            x = x if x.dtype == g.dtype else x.to(g.dtype)
            x = x if factor is None else x * factor[0]
        found = sums(spec, x, g, chosen=chosen, want_A=ctx.needs_input_grad[2], bases=bases)
        if factor is not None and found[0] is not None and found[0].ndim == 3:
            for products in (found[0][:, :-1, -1], found[0][:, -1, :-1]):  # of inputs with the one
                products *= factor[1]
        return found


class ProbeOfDuals(Probe):
    """With a derivative forward, of which torch.compile wants none."""

    @staticmethod
    def jvp(ctx: Any, y: torch.Tensor, *rest: Any) -> torch.Tensor:
        return y.view_as(y)


class ProbeInPlace(ProbeOfDuals):
    """Behind a tensor that was changed, and goes on as it: nobody may take what is returned."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *rest: Any) -> torch.Tensor:
        ProbeOfDuals.forward(ctx, y, *rest)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def jvp(ctx: Any, y: torch.Tensor, *rest: Any) -> torch.Tensor:
        return y.add_(0)  # torch asks for a change in place


class Reached(torch.autograd.Function):
    """Has a backward pass that ends at a slot go through an output, which counts its positions."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, slot: torch.Tensor, positions: int) -> torch.Tensor:
        ctx.positions, ctx.shape = positions, slot.shape
        ctx.kind = {"dtype": slot.dtype, "device": slot.device}
        return passed_on(y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.full(ctx.shape, float(ctx.positions), **ctx.kind), None


def probed(*args: Any) -> torch.Tensor:
    """`Probe.apply` without the look that torch takes for functorch's transforms, where none are."""
    if torch.compiler.is_compiling():
        with without_modes():
            found: torch.Tensor = Probe.apply(*args)
        return found
    found = _apply(*args)
    return found


_apply = super(torch.autograd.Function, ProbeOfDuals).apply


def _is_plain(device_type: str) -> bool:
    """Whether neither autograd nor autocast would have a part in what is computed now."""
    if torch.compiler.is_compiling():
        return False
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled(device_type)
