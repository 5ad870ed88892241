"""Products of one parameter, entry by entry, that a sum joins: gates p a + (1 - p) b.

The sum's gradient g is that of either product, so that a row's gradient by p is g (a - b). By themselves
the products would count as if g a and g b had nothing to do with each other, which is far more where a
and b are alike. Where a backward pass comes to such a sum, the probes behind its products add up what
they have of each row's gradient, and the last of them squares that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from suite.torch.hooks import root_of

T: Any = torch.Tensor


class Origin(NamedTuple):
    """What a watched tensor is a function of, entry by entry."""

    tensor: T  # a parameter or a view of one
    slot: T  # of its shape
    derivative: Any  # by it: a tensor of that shape, or a number

    def times(self, derivative: Any) -> Origin:
        found = self.derivative * derivative
        if isinstance(found, T):
            found = found.expand(self.tensor.shape).contiguous()
        return self._replace(derivative=found)

    def viewed(self, view: Callable[[T], Any]) -> Origin | None:
        """The same of a view of all three; None: not all three can be viewed so."""
        found = self.split(lambda x: (view(x),))
        return None if found is None else found[0]

    def split(self, split: Callable[[T], Any]) -> list[Origin] | None:
        """The same of the parts of all three; see `viewed`."""
        try:
            tensors, slots = split(self.tensor), split(self.slot)
        except (RuntimeError, TypeError):  # what was copied or cast can be viewed as the original cannot
            return None
        derivative = self.derivative
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


class Group:
    """Products that sums join, and what a backward pass through these has of their rows' gradients."""

    def __init__(self) -> None:
        self.within: Group | None = None  # that it was joined with; it keeps no member alive
        self.awaited: dict[int, set[Member]] = {}  # by pass: those whose turn is still to come
        self.rows: dict[int, T] = {}


class Member:
    """One product."""

    def __init__(self, origin: Origin, shape: torch.Size) -> None:
        self.origin, self.shape = origin, shape
        self._first = Group()

    @property
    def group(self) -> Group:
        found = self._first
        while found.within is not None:
            found = found.within
        return found

    def derivative(self, dtype: torch.dtype) -> Any:
        """By the origin, of what has rows on the other side: a tensor or a number."""
        found = self.origin.derivative
        return found.to(dtype) if isinstance(found, T) else found

    def gathers(self, rows: T) -> T | None:
        """Of a backward pass that came here, with these gradients of rows by the origin.

        Returns:
            Those of all products that are one with this; None: they are not complete.
        """
        now, group = torch._C._current_graph_task_id(), self.group
        awaited = group.awaited.get(now)
        if awaited is None or self not in awaited:
            return rows
        awaited.discard(self)
        before = group.rows.pop(now, None)
        rows = rows if before is None else before + rows
        if not awaited:
            del group.awaited[now]
            return rows
        group.rows[now] = rows
        return None


class Products:
    """The products that a forward has made of watched parameters, and sums of them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[T], tuple[Member, ...]]] = {}

    def add(self, output: T, members: tuple[Member, ...]) -> None:
        key, known = id(output), self._known
        known[key] = weakref.ref(output, lambda _: known.pop(key, None)), members

    def _members(self, x: Any) -> tuple[Member, ...]:
        found = self._known.get(id(x))
        return found[1] if found is not None and found[0]() is x else ()

    def in_sum(self, args: Any) -> tuple[Member, ...]:
        """Those that a sum is of; (): it is not one of products of the same entries, or of one alone."""
        if not self._known or len(args) != 2:
            return ()
        one, other = map(self._members, args)
        if not one or not other:  # as in 0 + p a, which sum() begins with
            number = isinstance(args[0] if other else args[1], int | float)
            return (one or other) if number else ()
        alike = one[0].shape == other[0].shape and one[0].origin.is_of(other[0].origin)
        return (*one, *other) if alike else ()

    def join(self, members: tuple[Member, ...], total: T) -> None:
        """A sum was made of them."""
        if total.shape != members[0].shape or not total.requires_grad:
            return
        self.add(total, members)
        first, *others = members
        if not others:
            return
        for member in others:
            if member.group is not first.group:
                member.group.within = first.group

        def arrived(gradient: T) -> None:
            now = torch._C._current_graph_task_id()
            first.group.awaited.setdefault(now, set()).update(members)

        total.register_hook(arrived)
