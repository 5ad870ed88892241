"""Products of one parameter, entry by entry, that a sum joins: gates p a + (1 - p) b.

The sum's gradient g is that of either product, so that a row's gradient by p is g (a - b). By themselves
the products would count as if g a and g b had nothing to do with each other, which is far more where a
and b are alike. So the sum is made of the products without their probes, and has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from suite.core.statistics import elementwise_second_moment_sum
from suite.torch.derivatives import is_awaited, is_recorded
from suite.torch.hooks import root_of
from suite.torch.rows import counts_like

T: Any = torch.Tensor

RECENT = 8  # products that are remembered, and kept alive, while a module's forward runs


class Origin(NamedTuple):
    """What a watched tensor is a function of, entry by entry."""

    tensor: T  # a parameter or a view of one
    slot: T  # of its shape
    derivative: Any  # by it: a tensor, or 1

    def times(self, derivative: Any) -> Origin:
        return self._replace(derivative=self.derivative * derivative)

    def viewed(self, view: Any) -> Origin:
        """The same of a view of all three."""
        derivative = self.derivative
        derivative = view(derivative) if isinstance(derivative, T) else derivative
        return Origin(view(self.tensor), view(self.slot), derivative)

    def split(self, split: Any) -> list[Origin]:
        """The same of the parts of all three."""
        derivative = self.derivative
        tensors, slots = split(self.tensor), split(self.slot)
        each = split(derivative) if isinstance(derivative, T) else [derivative] * len(tensors)
        return [Origin(*parts) for parts in zip(tensors, slots, each, strict=True)]

    def is_of(self, other: Origin) -> bool:
        """Whether both are of the same entries."""
        x, y = self.tensor, other.tensor
        if x is y:
            return True
        if root_of(x) is not root_of(y):
            return False
        places = [(z.shape, z.stride(), z.storage_offset()) for z in (x, y)]
        return bool(places[0] == places[1])


class Part(NamedTuple):
    """A product of something with rows and a function of the origin."""

    coefficient: Any  # the derivative of that by the origin, and the product's sign: tensor or number
    other: T  # with the rows
    source: Any  # what knows of the product's uses in derivatives; None: it has none


class Product(NamedTuple):
    """One product, or the sum of some."""

    output: T  # what the forward goes on with
    plain: T  # the same without a probe
    version: int  # of the output: whoever changed it in place wants all of that
    origin: Origin
    watched: Any
    how: Any
    parts: tuple[Part, ...]

    def is_known_as(self, x: Any) -> bool:
        return x is self.output and x._version == self.version

    def joins(self, other: Product) -> bool:
        """Whether a sum of both can be followed as one use."""
        if self.plain.shape != other.plain.shape or self.watched.capture is not other.watched.capture:
            return False
        return self.origin.is_of(other.origin)

    def joined(self, other: Product, signs: Sequence[int], total: T) -> Product:
        """The sum of both, with a probe behind it."""
        parts = tuple(
            part._replace(coefficient=part.coefficient * sign)
            for product, sign in zip((self, other), signs, strict=True)
            for part in product.parts
        )
        watched = self.watched
        slots = self.origin.slot, watched.ones, watched.counts
        output: T = _Probe.apply(total, *slots, self.how, watched.clock, parts)
        return self._replace(output=output, plain=total, version=output._version, parts=parts)


class _Probe(torch.autograd.Function):
    """As `free._FreeProbe`, behind a sum of products."""

    @staticmethod
    def forward(
        ctx: Any, y: T, slot: T, ones: T, counts: T, how: Any, clock: Any, parts: tuple[Part, ...]
    ) -> T:
        ctx.how, ctx.clock, ctx.slot, ctx.shape, ctx.dtype = how, clock, ones, slot.shape, slot.dtype
        ctx.sources = [part.source for part in parts]
        ctx.numbers = [None if isinstance(c, T) else c for c, *_ in parts]
        ctx.save_for_backward(
            *[x for c, other, _ in parts for x in (c if isinstance(c, T) else None, other)]
        )
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        saved = ctx.saved_tensors
        others, tensors = saved[1::2], saved[::2]
        on, waits = gradient, ctx.clock is None or ctx.clock.sampling
        if is_recorded():
            for source, other in zip(ctx.sources, others, strict=True):
                on = on if source is None else source.passed(on, other, None)
            waits = waits and is_awaited(ctx.slot)
        if not ctx.needs_input_grad[1] or not waits:
            return on, *(None,) * 6
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            factor: Any = 0
            for number, tensor, other in zip(ctx.numbers, tensors, others, strict=True):
                coefficient = number if tensor is None else tensor.to(ctx.dtype)
                factor = factor + coefficient * other.detach().to(ctx.dtype)
            g, reduce = gradient.to(ctx.dtype), ctx.how.reduce
            squares = elementwise_second_moment_sum(
                g, factor, "product", tuple(ctx.shape), reduce=reduce
            )
            one = torch.ones((1, 1, 1), dtype=ctx.dtype, device=gradient.device)
        return on, squares, one, counts_like(one, 1, 0), *(None,) * 3

    @staticmethod
    def jvp(ctx: Any, y: T, *rest: Any) -> T:
        return y.view_as(y)
