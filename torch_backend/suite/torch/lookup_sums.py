"""Sums of what a forward looked up once for all examples with what these have each.

`tokens + self.positions(torch.arange(n))`: the mode of a module (`functional.py`) sees the lookup, what
its axes are moved to, and where it is added. Modes of modules around it see that, too; the outermost
that does puts the probe behind the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from suite.torch.calls import ARGUMENTS
from suite.torch.capture import LayerCapture
from suite.torch.hooks import packs_with, root_of, tensors_given
from suite.torch.looked_up import LookedUp, as_repeated, axis_of_features
from suite.torch.made_weights import CHOICES
from suite.torch.operations import (
    ARITHMETIC,
    CASTS,
    COPIES,
    LISTS,
    NEGATIONS,
    QUOTIENTS,
    SUMS,
    TIMES,
    VIEWS,
    T,
)
from suite.torch.rows import LayerSpec

if TYPE_CHECKING:
    from suite.torch.functional import FunctionCapture

_MOST_SUMS = 8  # of what was looked up, for which others are looked for that have more rows
_SCALINGS = TIMES | QUOTIENTS | NEGATIONS
_MOVES = VIEWS | COPIES | CASTS | ARITHMETIC | NEGATIONS
# What changes its first argument, but for `T.__setitem__`.
_METHODS = vars(torch._C.TensorBase).items()
_IN_PLACE = {method for name, method in _METHODS if name.endswith("_") and not name.endswith("__")}
_IN_PLACE |= {T.__iadd__, T.__isub__, T.__imul__, T.__idiv__, T.__itruediv__}
# What does not broadcast, or whose rows are no tensor's of its operands.
_FOLLOWED = VIEWS | CASTS | COPIES | LISTS | ARGUMENTS.keys() | {torch.einsum, torch.nn.functional.pad}


class _InGraph(NamedTuple):
    """What a graph that is compiled found in a table, with its axes moved, or a multiple of it.

    Or the sum of that and of other things that have no examples, perhaps.
    """

    place: int  # in `FunctionCapture.uses`
    spec: LayerSpec
    x: torch.Tensor
    indices: torch.Tensor  # of `found`'s shape: what each number was looked up by
    marks: torch.Tensor  # likewise, which feature it is
    found: torch.Tensor
    since: int  # what of one `found` was noted together is true together, the newest
    factor: torch.Tensor | None = None  # (); None: 1
    kept: torch.Tensor | None = None  # where a mask left it, of `found`'s shape; None: everywhere
    size: int = 0  # of a sum: how many numbers it has

    def moved(self, found: torch.Tensor, step: Any) -> _InGraph:
        """What a step makes of it."""
        kept = None if self.kept is None else step(self.kept)
        return self._replace(found=found, indices=step(self.indices), marks=step(self.marks), kept=kept)

    def spread(self, found: torch.Tensor) -> _InGraph:
        """What is the same for more rows, or has a constant added."""
        return self.moved(found, functools.partial(torch.broadcast_to, size=found.shape))

    def masked(self, found: torch.Tensor, kept: torch.Tensor) -> _InGraph:
        """What is left of it where `kept`, of no more rows."""
        kept, spread = kept.expand(found.shape), self.spread(found)
        return spread._replace(kept=kept if spread.kept is None else kept & spread.kept)

    def positions(self, width: int) -> tuple[torch.Tensor, int] | None:
        """As those of a `LookedUp`."""
        axis = axis_of_features(self.marks, width)
        return None if axis is None else (self.indices.select(axis, 0), axis)


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
        self.moved: list[LookedUp] = []
        self._alive: list[torch.Tensor] = []  # what these are, for who adds it; of sums none
        self.in_graph: list[_InGraph] = []

    def outputs(self) -> list[torch.Tensor | None]:
        """What the last lookups found."""
        return [one.output() for one in self._latest()]

    def note_in_graph(self, place: int, spec: LayerSpec, x: torch.Tensor, found: torch.Tensor) -> None:
        """A lookup in a graph that is compiled."""
        indices = x[..., None].expand(found.shape)
        marks = torch.arange(found.shape[-1], device=x.device).expand(found.shape)
        self._note_in_graph([_InGraph(place, spec, x, indices, marks, found, 0)])

    def _note_in_graph(self, some: Sequence[_InGraph]) -> None:
        since = len(self.in_graph)
        self.in_graph += [one._replace(since=since) for one in some]

    def _note(self, output: torch.Tensor, some: Sequence[LookedUp]) -> None:
        self.moved += some
        if any([one.sums is None for one in some]):  # noqa: C419
            self._alive.append(output)

    def follow(self, function: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        """A function has made this; note what it made of a lookup."""
        if self.is_traced:
            self._follow_in_graph(function, args, kwargs, output)
            return
        self.miss(function, args, kwargs, output)
        if function in _MOVES:
            self._follow(function, args, kwargs, output)

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
        if self.is_traced:
            self._note_in_graph([one.masked(output, kept) for one in self._of_in_graph(operand)])
            return
        self._note(output, [one.masked(output, kept) for one in self._of(operand)])

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
        if len(args) != 2:
            return output
        if self.is_traced:
            return self._meet_in_graph(args, output, kept)
        # Of `x += y` Python goes on with what is returned, of a statement `x.add_(y)` with x.
        changed, sums = function in (T.add_, T.sub_), list[tuple[LookedUp, Any]]()
        for operand, other in (args, args[::-1]):
            for one in self._of(operand):
                capture = self._table_of(one)
                if capture is None or not self._is_first_of(capture):
                    continue
                if _only_shifts(other, operand, output) or _is_of_one(one, operand, output):
                    self.around.find(capture)  # of one example it may be what others are added to
                if _only_shifts(other, operand, output):
                    continue
                probed = capture.observe_sum(one, operand, output, changed, kept)
                if probed is not None:
                    output = probed[0]
                    (self._seeing(capture) or [self])[-1].around.find(capture)
                if _may_be_for_all(one.x) and self._may_have_no_examples(other):
                    sums.append((one, probed[1:] if probed else ()))
        if sums:
            new = [one.summed(output, *probes) for one, probes in sums]
            before = [one for one in self.moved if one.sums is not None][-_MOST_SUMS:]
            self.moved = [one for one in self.moved if one.sums is None] + before + new
        return output

    def _meet_in_graph(
        self, operands: Sequence[Any], output: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        sums = []
        for operand, other in (operands, operands[::-1]):
            for one in self._of_in_graph(operand):
                capture = self.around.uses[one.place][0]
                if not self._is_first_of(capture):
                    continue
                self.around.meets(one.place)
                if _only_shifts(other, operand, output):
                    continue
                is_part = _may_be_for_all(one.x) and self._may_have_no_examples(other)
                if is_part:
                    sums.append(one)
                if one.size and output.numel() <= one.size:
                    continue
                width = capture.layer.weight.shape[-1]
                found = one.positions(width)
                if found is None or output.ndim < -found[1] or output.shape[found[1]] != width:
                    capture.missed_in_graph = True
                    continue
                masks = [mask for mask in (one.kept, kept) if mask is not None]
                output = capture.observe_sum_in_graph(
                    one.spec, one.x, *found, one.factor, masks, output, one.size > 0, is_part
                )
        self._note_in_graph([one.spread(output)._replace(size=output.numel()) for one in sums])
        return output

    def _may_have_no_examples(self, x: Any) -> bool:
        """Whether it was looked up or is a parameter, so that a sum with it may be of none either."""
        if not isinstance(x, torch.Tensor):
            return False
        if isinstance(root_of(x), nn.Parameter):
            return True
        known: list[Any] = self._of_in_graph(x) if self.is_traced else self._of(x)
        return len(known) > 0 and all([_may_be_for_all(one.x) for one in known])  # noqa: C419

    def _of(self, x: Any) -> list[LookedUp]:
        """The lookups that something is, or is made of."""
        if not isinstance(x, torch.Tensor):
            return []
        found = [one for one in self._known() if one.output() is x]
        return [one for one in found if one.version == found[-1].version]

    def _of_in_graph(self, x: Any) -> list[_InGraph]:
        """The same where torch.compile traces."""
        found = [one for one in self.in_graph if one.found is x]
        return [one for one in found if one.since == found[-1].since]

    def _table_of(self, one: LookedUp) -> LayerCapture | None:
        """Where it was looked up, if that is in the module."""
        return next((capture for capture in self.tables if capture is one.capture), None)

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
        """The last lookups in each table."""
        for capture in self.tables:
            yield from capture.looked_up

    def _known(self) -> list[LookedUp]:
        return [*self._latest(), *self.moved]

    def _miss(self, one: LookedUp, result: torch.Tensor, followed: bool) -> None:
        capture = self._table_of(one)
        if capture is None:
            return
        under_way, here = [around.lookups() for around in capture.arounds], packs_with()
        if followed or all([own is None or own.saving is not here for own in under_way]):  # noqa: C419
            capture.miss_lookup(one, result)

    def _follow(self, function: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        """Its axes moved about, or a multiple of it."""
        for at, operand in enumerate(args[:2]):
            known = self._of(operand)
            if not known:
                continue
            step, factor = None, 1.0
            other = None if len(args) < 2 else args[1 - at]
            if function in SUMS:
                if len(args) != 2 or kwargs or not _only_shifts(other, operand, output):
                    continue
                step = functools.partial(torch.broadcast_to, size=output.shape)
            elif function in CASTS:
                if at or output is operand:
                    continue
            elif function not in _SCALINGS:
                if at:
                    continue
                step = functools.partial(_rearranged, function, args[1:], kwargs)
            else:
                factor = _scale(function, args, at)
                if factor is None:
                    continue
            self._note(output, [one.moved(output, step, factor) for one in known])

    def _follow_in_graph(self, function: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        """The same where torch.compile traces; and note what is not followed."""
        self._change_in_graph(function, args)
        for at, operand in enumerate(args[:2]):
            made = [
                new
                for one in self._of_in_graph(operand)
                for new in [self._made_in_graph(one, function, args, kwargs, output, at)]
                if new is not None
            ]
            self._note_in_graph(made)
            if made:
                return
        if function in SUMS and len(args) == 2 and not kwargs:
            return
        for x in tensors_given(args, kwargs):
            self._miss_in_graph(self._of_in_graph(x))

    def _miss_in_graph(self, some: Sequence[_InGraph]) -> None:
        for one in some:
            self.around.uses[one.place][0].missed_in_graph = True

    def _change_in_graph(self, function: Any, args: Any) -> None:
        """What shares its memory with what is changed is what it was no more."""
        if function not in _IN_PLACE and function is not T.__setitem__:
            return
        root = root_of(args[0])
        changed = [one for one in self.in_graph if root_of(one.found) is root]
        if function in ARITHMETIC:
            changed = [one for one in changed if one.found is not args[0]]
        if changed:
            self._miss_in_graph(changed)
            gone = [one.found for one in changed]
            self.in_graph = [
                one
                for one in self.in_graph
                if not any([one.found is x for x in gone])  # noqa: C419 (torch.compile)
            ]

    def _made_in_graph(
        self, one: _InGraph, function: Any, args: Any, kwargs: Any, output: torch.Tensor, at: int
    ) -> _InGraph | None:
        """Rearranged, shifted by what has no more rows, or a number of times; None: none of these."""
        if function not in _MOVES:
            return None
        if function in SUMS:
            shifts = len(args) == 2 and not kwargs and _only_shifts(args[1 - at], one.found, output)
            return one.spread(output) if shifts else None
        if function in _SCALINGS:
            factor = _scale(function, args, at)
            if factor is None or kwargs:
                return None
            if not isinstance(factor, torch.Tensor):
                dtype = self.around.uses[one.place][0].dtype
                factor = torch.ones((), dtype=dtype, device=output.device) * factor
            return one._replace(
                found=output, factor=factor if one.factor is None else one.factor * factor
            )
        if at or not _is_basic(function, args):
            return None
        if function in CASTS:
            return one._replace(found=output)
        return one.moved(output, functools.partial(_rearranged, function, args[1:], kwargs))


def _is_basic(function: Any, args: Any) -> bool:
    """Whether it rearranges alike whatever the dtype and the numbers are."""
    if function is T.view:
        return not any([isinstance(x, torch.dtype) for x in args[1:]])  # noqa: C419 (torch.compile)
    if function is not T.__getitem__:
        return True
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return not any([isinstance(i, torch.Tensor | list) for i in index])  # noqa: C419 (torch.compile)


def _scale(function: Any, args: Any, at: int) -> Any:
    """The number that a function multiplies its operand at this place with; None: it does not."""
    if function in NEGATIONS:
        return -1.0
    if len(args) != 2 or (at and function in QUOTIENTS):
        return None
    number = args[1 - at]
    if isinstance(number, torch.Tensor):
        if number.ndim or number.requires_grad or number.dtype.is_complex:
            return None
        number = number.detach().clone()  # which may be changed in place
    elif not isinstance(number, int | float | np.number) or isinstance(number, complex):
        return None
    elif not isinstance(number, int | float):
        number = float(number)
    if function in QUOTIENTS:
        return 1 / number if isinstance(number, torch.Tensor) or number else None
    return number


def _may_be_for_all(x: torch.Tensor) -> bool:
    """Whether what was looked up may be no example's, as far as the axes of its indices tell."""
    return x.ndim < 2


def _is_of_one(one: LookedUp, operand: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether a sum that was looked up may be added to one example."""
    alike = total.numel() == operand.numel()
    return one.sums is not None and alike and (operand.ndim < total.ndim or len(operand) == 1)


def _only_shifts(other: Any, operand: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether an operand's sum with this other one, a mask or a number, has no more rows than it.

    One number that is expanded is for what is to be as large.
    """
    if isinstance(other, int | float):
        return True
    constant = isinstance(other, torch.Tensor) and not other.requires_grad
    if not constant or total.numel() != operand.numel():
        return False
    return other.ndim == 0 or any([step != 0 for step in other.stride()])  # noqa: C419 (torch.compile)


def _rearranged(function: Any, rest: Any, kwargs: Any, x: torch.Tensor) -> Any:
    if function is torch.Tensor.view and not kwargs and not isinstance(rest[0], torch.dtype):
        return x.reshape(*rest)
    if function is torch.Tensor.repeat and not kwargs:
        return as_repeated(x, *rest)
    return function(x, *rest, **kwargs)
