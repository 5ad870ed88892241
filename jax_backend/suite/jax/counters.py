"""Values that are the number of a loop's step, with which a loop takes stacks apart itself: w[i].

`lax.fori_loop` carries it along, a `lax.scan` over `jnp.arange(n)` has it as the slice of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np


class Loop(NamedTuple):
    place: tuple[Any, int | None]  # its path, and how many steps it has
    first: int  # values before this one were there before the loop


class Counters:
    """Told of each loop that goes forwards, and of each equation."""

    def __init__(self, known: Mapping[int, Any]) -> None:
        """`known`: arrays that were closed over and are at hand, by value."""
        self.known = known
        self.counts: dict[int, Loop] = {}
        self.rows: dict[int, int] = {}  # what is 0, 1, ... n - 1: n
        self.negative: set[int] = set()  # whether a count is below 0

    def carried(self, loop: Loop, value: int, given: Any, eqns: Any, returned: Any, start: Any) -> None:
        """A loop starts with a number in a carry, and goes on with what one of its equations makes."""
        if start != 0 or not _can_count(given.aval.dtype, loop.place[1]):
            return
        for eqn in eqns:
            if returned in eqn.outvars and eqn.primitive.name == "add":
                one, other = eqn.invars
                steps = isinstance(other, jex.Literal) and not np.ndim(other.val) and other.val == 1
                if one is given and steps:
                    self.counts[value] = loop

    def sliced(self, loop: Loop, stack: int | None, value: int) -> None:
        """A loop takes an array apart."""
        if stack is None:
            return
        n = self.rows.get(stack)
        array = self.known.get(stack)
        if array is not None and not isinstance(array, jax.core.Tracer):
            kind, ndim = np.dtype(array.dtype).kind, np.ndim(array)
            if kind in "iu" and ndim == 1 and getattr(array, "is_fully_addressable", True):
                n = len(array) if np.array_equal(array, np.arange(len(array))) else None
        if n is not None:
            self.counts[value] = loop

    def follow(self, eqn: Any, values: Sequence[int | None], outputs: Sequence[int | None]) -> None:
        """Indexing asks whether an index is negative, and takes it as it is if not."""
        name, out = eqn.primitive.name, outputs[0] if len(outputs) == 1 else None
        if out is None:
            return
        aval = eqn.outvars[0].aval
        if name == "iota" and len(aval.shape) == 1 and _can_count(aval.dtype, aval.shape[0]):
            self.rows[out] = aval.shape[0]
        first = values[0] if values else None
        if first is None:
            return
        if name == "convert_element_type" and first in self.counts:
            if _can_count(aval.dtype, self.counts[first].place[1]):
                self.counts[out] = self.counts[first]
        elif name == "lt" and first in self.counts:
            bound = eqn.invars[1]
            if isinstance(bound, jex.Literal) and not np.ndim(bound.val) and bound.val == 0:
                self.negative.add(out)
        elif name == "select_n" and first in self.negative and values[1] in self.counts:
            self.counts[out] = self.counts[values[1]]

    def takes_apart(self, eqn: Any, values: Sequence[int | None], loops: Sequence[Any]) -> bool:
        """Whether a `dynamic_slice` takes what belongs to a step of the innermost loop from a stack."""
        stack, index = values[:2]
        count = None if index is None else self.counts.get(index)
        if stack is None or count is None or not loops or count.place != loops[-1]:
            return False
        (length, *rest), sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
        return stack < count.first and length == loops[-1][1] and tuple(sizes) == (1, *rest)


def _can_count(dtype: Any, steps: int | None) -> bool:
    """Whether a dtype has the numbers of so many steps: after 127 those of int8 are negative."""
    return steps is not None and np.dtype(dtype).kind in "iu" and steps - 1 <= np.iinfo(dtype).max
