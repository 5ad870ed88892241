"""Sums of what a forward looked up once for all examples with what these have each.

`tokens + self.positions(torch.arange(n))`: the mode of a module (`functional.py`) sees the lookup, what
its axes are moved to, and where it is added. Modes of modules around it see that, too; the outermost
that does puts the probe behind the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from suite.torch.calls import ARGUMENTS, keeps_order
from suite.torch.capture import LayerCapture
from suite.torch.free import CASTS, COPIES, QUOTIENTS, SUMS, TIMES, VIEWS, T, order_of
from suite.torch.hooks import packs_with, tensors_given
from suite.torch.looked_up import LookedUp, as_repeated
from suite.torch.made_weights import CHOICES
from suite.torch.rows import LayerSpec

if TYPE_CHECKING:
    from suite.torch.functional import FunctionCapture

_ARITHMETIC = TIMES | QUOTIENTS | SUMS
_MOVES = VIEWS | COPIES | CASTS | _ARITHMETIC
# What does not broadcast, or whose rows are no tensor's of its operands.
_FOLLOWED = VIEWS | CASTS | COPIES | ARGUMENTS.keys() | {torch.einsum}
_FOLLOWED |= {torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack}
_FOLLOWED |= {torch.nn.functional.pad}


class _InGraph(NamedTuple):
    """What a graph that is compiled found in a table, with its axes moved, or a multiple of it."""

    place: int  # in `FunctionCapture.uses`
    spec: LayerSpec
    x: torch.Tensor
    indices: torch.Tensor  # of `found`'s shape, alike along the axis of features
    axis: int  # of features, from the end
    found: torch.Tensor
    factor: torch.Tensor | None  # (); None: 1
    kept: torch.Tensor | None = None  # where a mask left it, of `found`'s shape; None: everywhere

    def moved(self, found: torch.Tensor, step: Any, axis: int | None = None) -> _InGraph:
        """What a step makes of it, which may move the axis of features."""
        axis = self.axis if axis is None else axis
        kept = None if self.kept is None else step(self.kept)
        return self._replace(found=found, indices=step(self.indices), axis=axis, kept=kept)

    def masked(self, found: torch.Tensor, kept: torch.Tensor) -> _InGraph:
        """What is left of it where `kept`, of no more rows."""
        kept = kept.expand(found.shape)
        if self.kept is not None:
            kept = kept & self.kept
        return self._replace(found=found, indices=self.indices.expand(found.shape), kept=kept)

    def has_features_in(self, output: torch.Tensor) -> bool:
        """Whether the axis of features may be where it was."""
        return output.ndim >= -self.axis and output.shape[self.axis] == self.found.shape[self.axis]


class Lookups:
    """What one forward of a module has made so far of what was looked up in tables."""

    def __init__(self, around: FunctionCapture, tables: Sequence[LayerCapture], traced: bool) -> None:
        """
        Args:
            around: watches the forward.
            tables: those of embeddings in the module.
            traced: whether torch.compile traces the forward.
        """
        self.around, self.tables, self.is_traced = around, tables, traced
        self.saving = packs_with()
        self.moved: list[tuple[torch.Tensor, LookedUp]] = []  # kept alive, for who adds it
        self.in_graph: list[_InGraph] = []

    def outputs(self) -> list[torch.Tensor | None]:
        """What the last lookups found."""
        return [one.output() for one in self._latest()]

    def note_in_graph(self, place: int, spec: LayerSpec, x: torch.Tensor, found: torch.Tensor) -> None:
        """A lookup in a graph that is compiled."""
        indices = x[..., None].expand(found.shape)
        self.in_graph.append(_InGraph(place, spec, x, indices, -1, found, None))

    def follow(self, function: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        """A function has made this; note what it made of a lookup."""
        self.miss(function, args, kwargs, output)
        if function in _MOVES:
            self._follow(function, args, kwargs, output)
            if self.in_graph and args:
                self.in_graph += self._moved_in_graph(function, args, kwargs, output)

    def has(self, x: Any) -> bool:
        """Whether it is what a lookup found, or what became of that."""
        if self.in_graph:
            return any([one.found is x for one in self.in_graph])  # noqa: C419 (torch.compile)
        return any([one.output() is x for one in self._known()]) and x is not None  # noqa: C419

    def mask(self, function: Any, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor | None:
        """The output, perhaps with a probe, where constants take the place of some entries of a lookup.

        Returns:
            None: the function is none that does so.
        """
        if function not in CHOICES or kwargs or len(args) != 3:
            return None
        for at in CHOICES[function]:
            condition, other = (args[0], args[3 - at]) if function is torch.where else args[1:]
            if not self.has(args[at]) or (isinstance(other, torch.Tensor) and other.requires_grad):
                continue
            kept = condition if at == 1 or function is T.where else ~condition
            if output.numel() == args[at].numel():
                self._leave(args[at], output, kept)
            return self.meet(function, (args[at], condition), output, kept)
        return None

    def _leave(self, operand: torch.Tensor, output: torch.Tensor, kept: torch.Tensor) -> None:
        """Note that a lookup, or what was made of it, is left in `output` where `kept`."""
        if self.in_graph:
            self.in_graph += [one.masked(output, kept) for one in self.in_graph if one.found is operand]
            return
        known = [one for one in self._known() if one.output() is operand]
        self.moved += [(output, one.masked(output, kept)) for one in known]

    def miss(
        self, function: Any, args: Any, kwargs: Any, output: torch.Tensor, followed: bool = True
    ) -> None:
        """Note, while it is found out what a model does, lookups for all examples that are not followed.

        In products with what has more rows, and sums by other functions than `SUMS`.

        Args:
            followed: whether sums are, where the function ran.
        """
        if torch.compiler.is_compiling() or not self.tables[0].clock.discovering:
            return
        if function in _FOLLOWED:
            return
        if followed and function in SUMS and not kwargs:
            return
        given = tensors_given(args, kwargs)
        if len(given) < 2:
            return
        for one in self._known():
            if any([x is one.output() for x in given]):  # noqa: C419 (torch.compile)
                self._miss(one, output, followed)

    def meet(
        self, function: Any, args: Any, output: torch.Tensor, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A sum, with a probe behind it if it is of a lookup for fewer rows, or what became of it.

        Args:
            kept: where the lookup is a part of it; None: everywhere.
        """
        if self.in_graph:
            return self._meet_in_graph(args, output, kept)
        # Of `x += y` Python goes on with what is returned, of a statement `x.add_(y)` with x.
        changed = function in (T.add_, T.sub_) and not self.is_traced
        for capture in self.tables:
            if not self._is_first_of(capture):
                continue
            for operand, other in (args, args[::-1]) if len(args) == 2 else ():
                last = capture.looked_up
                if last is None or not isinstance(operand, torch.Tensor):
                    continue
                known = [one for _, one in reversed(self.moved) if one.unless is last.unless]
                if _only_shifts(other, operand, output):
                    if any([one.output() is operand for one in (*known, last)]):  # noqa: C419
                        self.around.find(capture)  # of one example it may be what others are added to
                    continue
                probed = capture.observe_sum([*known, last], operand, output, changed, kept)
                if probed is not None:
                    (self._seeing(capture) or [self])[-1].around.find(capture)
                    return probed
        return output

    def _meet_in_graph(
        self, operands: Sequence[Any], output: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        for operand in operands:
            for one in reversed(self.in_graph):  # what was changed in place is there again
                capture = self.around.uses[one.place][0]
                if operand is one.found and self._is_first_of(capture):
                    self.around.meets(one.place)
                    if one.has_features_in(output):
                        masks = [mask for mask in (one.kept, kept) if mask is not None]
                        output = capture.observe_sum_in_graph(
                            one.spec, one.x, one.indices, one.axis, one.factor, masks, output
                        )
                    break
        return output

    def _is_first_of(self, capture: LayerCapture) -> bool:
        """Whether these are the outermost that see a function with a table's lookup."""
        seeing = self._seeing(capture)
        return not seeing or seeing[0] is self

    def _seeing(self, capture: LayerCapture) -> list[Lookups]:
        """Who sees what this one does with a table's lookup, from the outside in."""
        under_way = [around.lookups() for around in capture.arounds]
        return [one for one in under_way if one is not None and self._sees_with(one)]

    def _sees_with(self, other: Lookups) -> bool:
        """Whether both look at the same functions."""
        return self.is_traced == other.is_traced and self.saving is other.saving

    def _latest(self) -> Iterator[LookedUp]:
        """The last lookup in each table."""
        for capture in self.tables:
            if capture.looked_up is not None:
                yield capture.looked_up

    def _known(self) -> list[LookedUp]:
        return [*self._latest(), *(one for _, one in self.moved)]

    def _miss(self, one: LookedUp, result: torch.Tensor, followed: bool) -> None:
        for capture in self.tables:
            if capture.looked_up is None or capture.looked_up.unless is not one.unless:
                continue
            under_way, here = [around.lookups() for around in capture.arounds], packs_with()
            if followed or all([own is None or own.saving is not here for own in under_way]):  # noqa: C419
                capture.miss_lookup(one, result)

    def _follow(self, function: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        """Its axes moved about, or a multiple of it."""
        for one in self._known():
            at = [i for i, x in enumerate(args[:2]) if x is one.output()]
            if not at:
                continue
            other = None if len(args) < 2 else args[1 - at[0]]
            if function in SUMS:
                if isinstance(other, int | float):
                    self.moved.append((output, one.moved(output, None)))
                elif len(args) == 2 and not kwargs and _only_shifts(other, args[at[0]], output):
                    step = functools.partial(torch.broadcast_to, size=output.shape)
                    self.moved.append((output, one.moved(output, step)))
            elif function in CASTS:
                if at == [0] and output is not args[0]:
                    self.moved.append((output, one.moved(output, None)))
            elif function not in TIMES | QUOTIENTS and at == [0]:
                step = functools.partial(_rearranged, function, args[1:], kwargs)
                self.moved.append((output, one.moved(output, step)))
            elif function in TIMES and isinstance(other, int | float):
                self.moved.append((output, one.moved(output, None, other)))
            elif function in QUOTIENTS and at == [0] and isinstance(other, int | float) and other:
                self.moved.append((output, one.moved(output, None, 1 / other)))

    def _moved_in_graph(
        self, function: Any, args: Any, kwargs: Any, output: torch.Tensor
    ) -> list[_InGraph]:
        """What a step makes of lookups that is still one."""
        moved = [self._made_in_graph(one, function, args, kwargs, output) for one in self.in_graph]
        return [one for one in moved if one is not None]

    def _made_in_graph(
        self, one: _InGraph, function: Any, args: Any, kwargs: Any, output: torch.Tensor
    ) -> _InGraph | None:
        """Rearranged, shifted by what has no more rows, or a number of times; None: none of these."""
        if args[0] is one.found and function not in _ARITHMETIC:
            return _rearranged_in_graph(one, function, args, kwargs, output)
        if function not in _ARITHMETIC or len(args) != 2 or kwargs:
            return None
        first, second = args
        if first is not one.found and second is not one.found:
            return None
        other = second if first is one.found else first
        if function in SUMS and not isinstance(other, (int, float)):
            if not _only_shifts(other, one.found, output):
                return None
            return one.moved(output, functools.partial(torch.broadcast_to, size=output.shape))
        if function in SUMS:
            return one._replace(found=output)
        if not isinstance(other, (int, float)):
            return None
        if function in QUOTIENTS:
            if first is not one.found or not other:
                return None
            other = 1 / other
        dtype = self.around.uses[one.place][0].dtype
        factor = torch.ones((), dtype=dtype, device=output.device)
        factor = factor * other if one.factor is None else one.factor * other
        return one._replace(found=output, factor=factor)


def _rearranged_in_graph(
    one: _InGraph, function: Any, args: Any, kwargs: Any, output: torch.Tensor
) -> _InGraph | None:
    """A cast, with more axes in front, in another order, or the same for more rows; None: none of it."""
    if function in CASTS:
        return one._replace(found=output)
    again = functools.partial(_rearranged, function, args[1:], kwargs)
    order, shape = order_of(function, args, kwargs), one.found.shape
    if order is not None:
        axis = order.index(one.found.ndim + one.axis) - one.found.ndim
        return one.moved(output, again, axis)
    if keeps_order(function, args):
        last = output.shape[output.ndim - len(shape) :]
        return one.moved(output, again) if last == shape and output.numel() == shape.numel() else None
    return one.moved(output, again) if function in COPIES and one.has_features_in(output) else None


def _only_shifts(other: Any, operand: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether an operand's sum with this other one, a mask or a number, has no more rows than it."""
    if isinstance(other, int | float):
        return True
    constant = isinstance(other, torch.Tensor) and not other.requires_grad
    return constant and total.numel() == operand.numel()


def _rearranged(function: Any, rest: Any, kwargs: Any, x: torch.Tensor) -> Any:
    if function is torch.Tensor.view and not kwargs and not isinstance(rest[0], torch.dtype):
        return x.reshape(*rest)
    if function is torch.Tensor.repeat and not kwargs:
        return as_repeated(x, *rest)
    return function(x, *rest, **kwargs)
