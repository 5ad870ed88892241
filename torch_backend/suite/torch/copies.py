"""Copies of parameters that may be there once for all examples, as positions are along rows and columns.

A copy counts as a use: a token is copied for each example. But where it is added to what has more rows
(`x + shift.expand(length, -1)`), also joined with other copies
(`x + torch.cat([row[:, None].expand(h, w, -1), column.expand(h, w, -1)], -1)`), the rows of that sum
take the place of those of the copies.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from suite.torch.hooks import tensors_given, tensors_in
from suite.torch.looked_up import OfSum, UnlessBroadcast, spreads
from suite.torch.operations import (
    ARITHMETIC,
    CASTS,
    COPIES,
    LISTS,
    QUOTIENTS,
    SUMS,
    TIMES,
    VIEWS,
    T,
    viewed,
)

if TYPE_CHECKING:
    from suite.torch.free_probes import Watched


class Copy(NamedTuple):
    """A tensor that has copies of a parameter."""

    output: weakref.ref[T]
    slot: Callable[[], T]  # of its shape
    source: Watched
    joined: bool  # with other copies
    probes: tuple[UnlessBroadcast, ...]  # that take statistics of it, unless it is added to more rows


class Copies:
    """Those that a forward has made so far."""

    def __init__(self) -> None:
        self.known: list[Copy] = []
        self.in_graph: list[tuple[T, Watched, bool]] = []  # and whether joined; in what is compiled

    def of(self, x: Any) -> list[Copy]:
        """What something has copies of."""
        return [one for one in self.known if one.output() is x]

    def has(self, x: Any) -> bool:
        """Whether something has copies, also where torch.compile traces."""
        return len(self.of(x)) > 0 or any([x is held for held, *_ in self.in_graph])  # noqa: C419

    def ids(self) -> set[int]:
        return {id(one.output()) for one in self.known} - {id(None)}

    def note(
        self,
        output: T,
        slot: Callable[[], T],
        source: Watched,
        joined: bool,
        *probes: UnlessBroadcast,
    ) -> None:
        self.known.append(Copy(weakref.ref(output), slot, source, joined, probes))

    def take(self, others: Copies, returned: Any) -> None:
        """Go on with those of another forward that it returned."""
        if others.known:
            self.known += [one for x in tensors_in(returned, set()) for one in others.of(x)]

    def follow(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        output: T,
        without_rows: Callable[[Any], bool],
        probed: Callable[[Any, Any, T, int, Watched], T | None],
        new: Sequence[tuple[Any, ...]] = (),
    ) -> T:
        """What a function made of copies, with a probe behind it if it has more rows than they have.

        Args:
            new: what else the output has copies of, as `note` has it.
            without_rows: whether something is a number, or made of parameters and buffers alone.
            probed: the output of a function with a probe behind it, of a use at a place.
        """
        if any([output is x for x in args]):  # noqa: C419 (faster): what it was is no more
            self.known = [one for one in self.known if one.output() is not output]
            return output
        if function in LISTS:
            self._join(function, args, kwargs, output, without_rows)
            return output
        found = list(new)
        for place, operand in enumerate(args[:2]):
            for one in self.of(operand):
                slot = self._slot(function, args, kwargs, place, one.slot)
                if slot is None:
                    continue
                probes = one.probes
                if function in SUMS | COPIES and _has_more_rows(operand, output, one.joined):
                    clock = OfSum(one.source.clock, probes)
                    source = one.source._replace(slot=one.slot(), clock=clock, widened=True)
                    made = probed(function, args, output, place, source)
                    if made is None:
                        continue
                    output, probes = made, (*probes, clock.unless)
                other = args[1 - place] if function in SUMS else 0
                copies = len(self.of(other)) > 0
                if without_rows(other) or copies:
                    found.append((slot, one.source, one.joined or copies, *probes))
        for some in found:
            self.note(output, *some)
        return output

    def follow_in_graph(
        self, function: Any, args: Any, kwargs: Any, output: T, without_rows: Callable[[Any], bool]
    ) -> None:
        """The same where torch.compile traces, which knows of no later use: what is missed is noted."""
        given = tensors_given(args, kwargs)
        found = [(x, *some) for x in given for held, *some in self.in_graph if held is x]
        if not found:
            return
        if function in SUMS | COPIES:
            for operand, watched, joined in found:
                if _has_more_rows(operand, output, joined):
                    watched.misses(output)
        copies = [x for x, *_ in found]
        others = [x for x in given if not any([x is one for one in copies])]  # noqa: C419 (torch.compile)
        joins = function in ARITHMETIC | LISTS and all([without_rows(x) for x in others])  # noqa: C419
        if joins or function in VIEWS | CASTS | COPIES:
            several = any([x is not copies[0] for x in copies])  # noqa: C419 (torch.compile)
            self.in_graph += [(output, watched, joined or several) for _, watched, joined in found]

    def _slot(
        self, function: Any, args: Any, kwargs: Any, place: int, slot: Callable[[], T]
    ) -> Callable[[], T] | None:
        """The slot of what a function makes of a copy; None: it is not followed."""
        rest = args[1:]
        if place == 0 and function in CASTS:
            return slot
        if place == 0 and function in VIEWS | COPIES:
            return lambda: viewed(function, rest, kwargs, slot())
        if kwargs or len(args) != 2:
            return None
        if function in SUMS:
            shape = torch.broadcast_shapes(*(x.shape for x in args if isinstance(x, T)))
            return lambda: slot().expand(shape)
        number = args[1 - place]
        if not isinstance(number, int | float) or (function in QUOTIENTS and (place or not number)):
            return None
        if function in QUOTIENTS:
            return lambda: slot() / number**2
        return (lambda: slot() * number**2) if function in TIMES else None

    def _join(
        self, function: Any, args: Any, kwargs: Any, output: T, without_rows: Callable[[Any], bool]
    ) -> None:
        """Note a list of copies, and of what is there once for all, that is one tensor."""
        parts = tensors_given((), kwargs | {"": [x for x in args if isinstance(x, list | tuple)]})
        if not all([self.of(x) or without_rows(x) for x in parts]):  # noqa: C419
            return
        where = {name: x for name, x in kwargs.items() if name != "tensors"}
        shapes = [x.shape for x in parts]
        for at, part in enumerate(parts):
            for one in self.of(part):
                slot = functools.partial(_joined, function, args[1:], where, shapes, at, one.slot)
                others = any([self.of(x) for x in parts if x is not part])  # noqa: C419
                self.note(output, slot, one.source, one.joined or others, *one.probes)


def _has_more_rows(operand: T, output: T, joined: bool) -> bool:
    """Of three axes the second may as well be that of examples, where copies are joined."""
    return spreads(operand, output) or (joined and output.ndim == 3 and output.numel() > operand.numel())


def _joined(
    function: Any, rest: Any, where: Any, shapes: Sequence[Any], at: int, slot: Callable[[], T]
) -> T:
    """The slot of a part among zeros for the others, of these shapes."""
    own = slot()
    parts = [own if i == at else own.new_zeros(shape) for i, shape in enumerate(shapes)]
    return function(parts, *rest, **where)
