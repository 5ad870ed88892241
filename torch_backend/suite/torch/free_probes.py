"""Probes behind uses of parameters by themselves, which sum the squares of each row's gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from suite.core.statistics import complex_second_moment_sum, elementwise_second_moment_sum
from suite.torch.derivatives import Noted, follow, is_awaited, is_recorded
from suite.torch.einsum import Labels, as_einsum, contraction_of_call, rows_of_call
from suite.torch.gates import Member, Origin
from suite.torch.hooks import (
    in_backward,
    is_batched,
    when_reached,
    without_modes,
)
from suite.torch.operations import (
    ADDED,
    ADDED_ENTRYWISE,
    COPIES,
    EXTREMES,
    LERP,
    MATRIX,
    MAXIMA,
    PRELU,
    QUOTIENTS,
    SHIFTED,
    SUMS,
    TIMES,
    T,
    is_subtracted,
)
from suite.torch.probe import passed_on
from suite.torch.rows import Axes, counts_like
from suite.torch.runs import Run

# Kinds of uses that are products of rows: the axes of the output that have the features.
_FEATURES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("linear", "right", "grouped"), (-1,)),
    "left": (-2,),
    "contraction": (),  # see `_How.labels`
}


class Watched(NamedTuple):
    """A parameter, or a view of one, and where its sums go."""

    tensor: T  # kept alive: it is known by its identity
    slot: T  # of the same shape; complex: of real and imaginary parts
    ones: T  # (1, 1, 1), the slot of G
    counts: T  # (2,), the slot of the counts
    clock: Any = None  # says when statistics are taken, where not in every backward pass
    strays: Any = None  # a set, to put `name` into when a use is not understood
    name: str = ""
    recorded: Any = None  # the clock that knows of backward passes that are recorded
    capture: Any = None  # the LayerCapture whose slots these are
    turned: bool = False  # a matrix's transpose
    widened: bool = False  # an entry of the parameter is several of the tensor's
    reduce: bool = False  # a row is all of an example, of sums and products entry by entry
    origin: Origin | None = None  # None: it is one itself

    def of(self) -> Origin:
        """What it is a function of, entry by entry."""
        return self.origin or Origin(self.tensor, self.slot, 1)

    def transposed(self, tensor: T) -> Watched:
        """Of a tensor that is this one's transpose."""
        return self._replace(tensor=tensor, slot=self.slot.mT, turned=not self.turned)

    def misses(self, output: T) -> None:
        """This is made of it in a way that is not understood."""
        if self.strays is not None:
            when_reached([output], functools.partial(self.strays.add, self.name))


def factor_of(function: Any, args: Any, place: int) -> Any:
    """The derivative of a sum, product or quotient by its operand at `place`."""
    if function in SUMS:
        return -1 if is_subtracted(function, place) else 1
    other = args[1 - place]
    if function in TIMES:
        return other
    if isinstance(other, T):
        exact = other.is_floating_point() or other.is_complex()
        other = other.detach() if exact else other.to(args[place].dtype)
    return 1 / other if place == 0 else -other / args[1].detach() ** 2


def slot_of_product(slot: T, factor: Any, is_complex: bool) -> T | None:
    """The slot of a tensor times a number or what has no rows, which may be the first complex one.

    None: a row's gradients by both parts of the tensor are made of those by both parts of the product.
    """
    if isinstance(factor, T) and factor.is_complex():
        return None
    if isinstance(factor, complex):
        if factor.real and factor.imag:
            return None
        if factor.imag:  # i z has the parts of z in each other's places
            real, imaginary = _parts(slot) if slot.is_complex() else (slot, torch.zeros_like(slot))
            slot = torch.complex(imaginary, real)
        factor = factor.imag or factor.real
    if is_complex and not slot.is_complex():
        slot = torch.complex(slot, torch.zeros_like(slot))
    return slot if isinstance(factor, int) and factor == 1 else slot * factor**2


def _share_of(function: Any, x: T, other: T) -> T:
    """What a maximum or a minimum of both has of `x`: all or nothing, and half of what is equal."""
    chosen = x > other if function in MAXIMA else x < other
    return (chosen + 0.5 * (x == other)).to(x.dtype)


def with_probe(
    function: Any,
    output: T,
    args: Any,
    place: int,
    watched: Watched,
    ends: T | None,
    in_place: bool,
    without_rows: Callable[[Any], bool],
    counts_in_graph: Callable[[Any, bool], bool],
    member: Member | None,
) -> T | None:
    """`output`, with a probe behind it; None: this use is not understood.

    Args:
        without_rows: whether an operand is made of parameters and buffers alone.
        counts_in_graph: whether positions of a layer's product do, and where its parameter has inputs.
        member: as which a sum may join the product with others; None: not it.
    """
    others = [x for i, x in enumerate(args[:2]) if i != place and isinstance(x, T)]
    slot, shape = watched.slot, watched.slot.shape
    kind, other, axes, labels, followed, negative = "", None, None, None, True, False
    if function in SUMS or (function in COPIES and place == 0 and _broadcasts(shape, output.shape)):
        kind = "sum"
    elif function in TIMES and len(others) == 1:
        kind, other = "product", others[0]
    elif function in QUOTIENTS and len(others) == 1:
        if output.numel() == slot.numel() and output.ndim == slot.ndim:
            return None  # no rows: what it is over may be one for all examples
        kind, other = "product", factor_of(function, args, place)
        followed = not others[0].requires_grad  # in derivatives
    elif function in EXTREMES and len(others) == 1:
        kind, other = "product", _share_of(function, args[place].detach(), others[0].detach())
    elif function in PRELU and place == 1:
        kind, other, negative = "product", others[0], True
        if other.ndim > 1 and len(shape) == 1:  # one for each channel, or for all
            slot = slot.reshape(-1, *(1,) * (other.ndim - 2))
    elif function is F.linear and place == 1 and len(shape) == 2:
        kind, other = "linear", args[0]
    elif (function is F.linear and place == 2) or (function in SHIFTED and place == 0):
        kind = "sum"
    elif function in ADDED_ENTRYWISE:
        kind, other = "product", args[3 - place]
    elif function in LERP and place == 2:
        kind, other = "product", args[1].detach() - args[0].detach()
        followed = not any(x.requires_grad for x in args[:2])
    elif function in ADDED:
        kind, other = ("right", args[1]) if place == 2 else ("left", args[2])
    elif function in MATRIX and len(others) == 1 and min(len(shape), others[0].ndim) >= 2:
        kind, other = ("right" if place == 1 else "left"), others[0]
        if function is T.__rmatmul__:
            kind = "left" if place == 1 else "right"
    elif ends is not None and len(shape) == 3 and args[0].ndim == 2:
        kind, other = "grouped", args[0]
    else:
        kind, other, slot, axes, labels = _contraction(function, args, place, watched)
    if not kind or (watched.slot.is_complex() and not output.is_complex()):
        return None
    if output.is_complex() and not watched.slot.is_complex() and kind not in ("sum", "product"):
        return None
    if watched.widened and kind not in ("sum", "product"):
        return None  # a factor of a matrix's rows: its gradient is a sum over them, not a row of x
    counts = kind in _FEATURES and not without_rows(other) and not output.is_complex()
    into_first = (kind in ("right", "grouped", "contraction")) != watched.turned if counts else None
    if into_first is not None and torch.compiler.is_compiling():
        into_first = into_first if counts_in_graph(watched.capture, into_first) else None
    how, source = _How(kind, axes, watched.reduce, into_first, negative, labels), None
    unfollowed = in_place or not followed
    if isinstance(other, T) and other.requires_grad | unfollowed and not torch.compiler.is_compiling():
        understood = not unfollowed and not output.dtype.is_complex
        source = _Source(watched._replace(slot=slot), how, understood)
    slots = slot if member is None else member.origin.slot, watched.ones, watched.counts
    run = None
    if counts and watched.capture is not None:
        run = watched.recorded.ran(watched.capture, False, in_backward(), False, True)
    is_compiling = torch.compiler.is_compiling()
    apply = _FreeProbe.apply if is_compiling else _FreeProbeOfDuals.apply
    told = None if is_compiling else watched.recorded
    rest = in_place, source, run, told, member
    with without_modes():
        probed: T = apply(output, other, *slots, how, watched.clock, ends, *rest)
    return probed


def _contraction(
    function: Any, args: Any, place: int, watched: Watched
) -> tuple[str, T | None, T, Axes | None, Labels | None]:
    """How an einsum, or what is one, uses the operand at `place`: kind, other, slot, axes and labels."""
    slot, written = watched.slot, as_einsum(function, args)
    equation, operands = written or ("", ())
    at = place - (len(args) - len(operands))
    if len(operands) != 2 or at < 0:
        return "", None, slot, None, None
    other = operands[1 - at]
    given = equation, at, watched.tensor, other
    found, labels = rows_of_call(*given), contraction_of_call(*given)
    if found is not None and not found.halves.order:
        return ("right" if found.halves.turned else "linear"), other, slot, found.axes, None
    if labels is None or labels.other != labels.out:
        return ("contraction" if labels else ""), other, slot, None, labels
    own, _, out = labels  # an entry for each of x, or for some
    slot = slot.permute([own.index(label) for label in out if label in own])
    return "product", other, slot[tuple([slice(None) if x in own else None for x in out])], None, None


class _How(NamedTuple):
    """What `elementwise_second_moment_sum` has to know of a use."""

    kind: str
    axes: Axes | None  # where features are, if not last
    reduce: bool
    into_first: bool | None  # whether the parameter lies (in, out); None: this is no product of rows
    negative: bool = False  # whether of what it is multiplied with only what is negative counts (PReLU)
    labels: Labels | None = None  # of a contraction


class _Source(NamedTuple):
    """What a parameter was used in, for its uses in derivatives."""

    watched: Watched
    how: _How
    understood: bool  # whether what it multiplied is still what it was
    turned: bool = False  # in a product in derivatives of that, with the transpose

    def passed(self, gradient: T, other: T, ends: T | None) -> T:
        """A backward pass that is recorded goes through; the gradient to go on with."""
        watched = self.watched
        if watched.recorded is None or watched.recorded.pausing:
            return gradient
        missed = functools.partial(watched.recorded.missed.add, watched.name)
        if is_batched(gradient):  # and what is put behind it would be lost
            missed()
            return gradient
        if not self.understood:
            noted: T = Noted.apply(gradient, watched.ones, missed)
            return noted

        def probe(y: T) -> T:
            slots = watched.slot, watched.ones, watched.counts
            x, following = gradient, self._replace(turned=not self.turned)
            if self.how.negative:
                x = gradient * (other < 0)
                following = following._replace(how=self.how._replace(negative=False), understood=False)
            rest = following, None, watched.recorded, None
            given = x, *slots, following.how, watched.clock, ends, False, *rest
            probed: T = _FreeProbeOfDuals.apply(y, *given)
            return probed

        if other.requires_grad:
            follow(other, probe)
        return gradient


def _positions(how: _How, output: T) -> int:
    """How many rows the output of a product has."""
    axes = _FEATURES[how.kind] if how.axes is None else how.axes.y[-how.axes.features[1] :]
    if how.labels is not None:
        own, other, out = how.labels
        axes = tuple([out.index(label) for label in own if label not in other])
    if how.kind == "left" and how.axes is None and output.ndim > 2:
        axes = -2, -1  # what is mixed are positions, of each example
    return output.numel() // max(math.prod([output.shape[axis] for axis in axes]), 1)


def _parts(x: T) -> tuple[T, T]:
    """The real and the imaginary one."""
    real, imaginary = torch.view_as_real(x.resolve_conj()).unbind(-1)
    return real, imaginary


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    """Whether only axes of length 1, or new ones in front, grew."""
    # A list, because torch.compile does not see through a generator here.
    return all([shape[-i] in (1, target[-i]) for i in range(1, len(shape) + 1)])  # noqa: C419


class _FreeProbe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: T,
        other: T | None,
        slot: T,
        ones: T,
        counts: T,
        how: _How,
        clock: Any,
        ends: T | None,
        in_place: bool,
        source: _Source | None,
        run: Run | None,
        told: Any,
        member: Member | None,
    ) -> T:
        """`told`: the clock, of backward passes."""
        ctx.source, ctx.slot, ctx.run, ctx.told, ctx.member = source, ones, run, told, member
        ctx.save_for_backward(other, ends)
        ctx.how, ctx.shape, ctx.dtype, ctx.clock = how, slot.shape, slot.dtype, clock
        ctx.dtype_of_ones = ones.dtype  # real
        ctx.in_place = in_place
        if in_place:  # whoever changed a tensor goes on with that, not with what is returned
            ctx.mark_dirty(y)
            return y
        return passed_on(y)

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        other, ends = ctx.saved_tensors
        on, waits = gradient, ctx.clock is None or ctx.clock.sampling
        if ctx.source is not None and is_recorded():
            on = ctx.source.passed(gradient, other, ends)
            waits = waits and is_awaited(ctx.slot)
        run: Run | None = ctx.run
        if not ctx.needs_input_grad[2] or not waits or not (run is None or run.is_awaited()):
            return on, *(None,) * 12
        if run is None and ctx.told is not None:
            ctx.told.passes()  # a run says so itself
        counts = run is None or run.reached()
        turned = ctx.source is not None and ctx.source.turned  # of a derivative of the product
        counts = counts and not turned and ctx.how.into_first is not None
        counts = counts and (run is None or run.counts_as(ctx.how.into_first))
        positions = _positions(ctx.how, gradient) if counts else 0
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            (kind, axes, reduce, _, negative, labels), shape = ctx.how, tuple(ctx.shape)
            if gradient.is_complex() and not ctx.dtype.is_complex:  # of what is real: the real part
                if other is not None:
                    gradient, other, kind = gradient * other.detach().conj(), None, "sum"
                gradient = gradient.real
            g = gradient.to(ctx.dtype)
            other = None if other is None else other.detach().to(ctx.dtype)
            other = other.clamp(max=0) if negative and other is not None else other
            if turned:
                g, other = other, g
            if axes is not None:
                assert other is not None
                g, other = axes.output(g), axes.input(other)
                sides = other.shape[-1], g.shape[-1]
                shape = sides if kind == "right" else sides[::-1]
            if ctx.member is not None:
                assert other is not None
                factor = other * ctx.member.derivative(ctx.dtype)
                g, other = ctx.member.gathers(g * factor.conj()), None
                if g is None:
                    return on, *(None,) * 12
            how = {"reduce": reduce, "labels": labels}
            if ctx.dtype.is_complex:
                by_parts = _parts(g), None if other is None else _parts(other)
                squares = torch.complex(*complex_second_moment_sum(*by_parts, kind, shape, ends, **how))
            else:
                squares = elementwise_second_moment_sum(g, other, kind, shape, ends, **how)
            squares = squares.reshape(ctx.shape)
        one = torch.ones((1, 1, 1), dtype=ctx.dtype_of_ones, device=gradient.device)
        return on, None, squares, one, counts_like(one, 1, positions), *(None,) * 8


class _FreeProbeOfDuals(_FreeProbe):
    """With a derivative forward, of which torch.compile wants none."""

    @staticmethod
    def jvp(ctx: Any, y: T, *rest: Any) -> T:
        return y.add_(0) if ctx.in_place else y.view_as(y)  # torch asks for a change in place
