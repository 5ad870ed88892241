"""What is found in a loss's program: views of parameter leaves, and what they are used for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from suite.jax import jaxprs
from suite.jax.layers import Use
from suite.jax.penalties import Penalties
from suite.jax.probes import Multiplier
from suite.jax.slopes import Slope
from suite.jax.views import Shape, Step, View, entries, lift

if TYPE_CHECKING:
    from suite.jax.derivatives import Derivatives


class Made(NamedTuple):
    """A matrix, or a stack, was multiplied or divided by an operand, or stays where that says so."""

    path: jaxprs.Path
    operand: int
    divides: bool
    constant: Shape  # axes along which the operand does not change
    is_mask: bool
    shape: Shape
    before: int = 0  # steps inside of the scans
    chosen: int | None = None  # what the operand is where the matrix stays; None: it is a factor
    scans: tuple[jaxprs.Path, ...] = ()  # that take the result apart, and so the operand

    def taken_apart(self, scan: jaxprs.Path) -> Made:
        """What it is for a step of a scan over a stack that it is the last change of."""
        constant = tuple(axis - 1 for axis in self.constant if axis)
        scans = (*self.scans, scan)
        return self._replace(shape=self.shape[1:], constant=constant, before=0, scans=scans)


class Origin(NamedTuple):
    """The fact: this value is a view of a leaf.

    `outer` makes of the leaf a stack that scans take apart along its leading axes, `stack`; `inner` is
    what follows inside of them.
    """

    leaf: int
    outer: tuple[Step, ...]
    stack: Shape
    scans: tuple[jaxprs.Path, ...]
    part: Shape  # of what the innermost of these scans takes; the leaf's, without one
    inner: tuple[Step, ...]
    multipliers: tuple[Multiplier, ...] = ()
    shifted: bool = False  # something without a derivative was added, or of the weight's shape
    by_data: bool = False  # and that is made of arguments: it may be an activation, with a leaf added
    made: tuple[Made, ...] = ()
    slope: Slope | None = None  # of a function of the entries, times `multipliers`
    sloped: int = 0  # steps inside of the scans that are before that
    repeated: int | None = None  # the value that holds it once for each example, if there was one

    @property
    def is_changed(self) -> bool:
        """Whether it may as well be an activation that a leaf has a part in, as latent codes are."""
        return self.shifted or bool(self.multipliers or self.made or self.slope)

    @property
    def widened(self) -> bool:
        return any(kind == "broadcast" for kind, _ in self.inner)

    @property
    def size(self) -> int:
        """How many entries of the part there are in it, a slice perhaps of a table of positions."""
        count = math.prod(self.part)
        if not any(kind == "slice" for kind, _ in self.inner):
            return count
        there = np.zeros(count, bool)
        there[entries(self.part, (), (), self.inner)] = True
        return int(there.sum())

    @property
    def steps(self) -> tuple[Step, ...]:
        """From the leaf to the whole stack."""
        return (*self.outer, *(lift(step, self.stack) for step in self.inner))

    def moved(self, step: Step | None) -> Origin:
        return self if step is None else self._replace(inner=(*self.inner, step))

    def times(self, multiplier: Multiplier) -> Origin:
        return self._replace(multipliers=(*self.multipliers, multiplier))


class Site(NamedTuple):
    """One use of a leaf, before uses are joined to layers."""

    leaf: int
    use: Use
    view: View  # for elementwise uses: the leaf itself, or its stack of parts
    block: tuple[int, int]  # (d_out, d_in without bias)
    one_hot: bool  # whether inputs are one-hot
    input: int | None  # the value that is the input
    value: int  # the value that is the output
    loops: jaxprs.Loops
    repeated: int | None = None  # of its origin

    @property
    def executions(self) -> int:
        """How often it runs for each block, if its branches are taken."""
        lengths = (1 if n is None else n for _, n in self.loops)
        return math.prod(lengths) // max(math.prod(self.use.lengths), 1)

    def excludes(self, other: Site) -> bool:
        """Whether it is in another branch of the same `cond`."""
        own, others = ({p[:-1]: p for p, n in site.loops if n is None} for site in (self, other))
        return any(others.get(cond, path) != path for cond, path in own.items())


class BiasUse(NamedTuple):
    """Entries of a leaf added to the output of a product, one for each block and feature."""

    site: Site  # the product's
    instead: Site  # the sum as a use by itself
    start: int  # the first of them; the others come behind

    @property
    def end(self) -> int:
        use = self.site.use
        return self.start + math.prod(use.lengths) * use.groups * self.site.block[0]


@dataclass
class Uses:
    """How a program uses its parameter leaves."""

    derivatives: Derivatives  # the program's
    sites: list[Site] = field(default_factory=list)  # in the program's order
    biases: dict[int, list[BiasUse]] = field(default_factory=dict)
    others: dict[int, list[str]] = field(default_factory=dict)  # primitives that rule a leaf out
    of_repeated: dict[int, list[str]] = field(default_factory=dict)  # and those of copies, by value
    by_hand: dict[int, list[Site]] = field(default_factory=dict)  # a user's probes
    of_data: set[Any] = field(default_factory=set)  # places of products with what no leaf is a part of
    beside: list[Site] = field(default_factory=list)  # values of which the loss has derivatives only
    # By equation and operand, which is numbers made of a leaf that change it, as constants: that leaf
    held: dict[tuple[jaxprs.Path, int], int] = field(default_factory=dict)
    # By equation and operand, which is a term of the loss that is made of leaves alone: of which
    penalties: Penalties = field(default_factory=dict)
    each_its_own: bool = False  # whether examples are in products with gradients, frozen ones among them

    def rule_out(self, origin: Origin | None, why: str) -> None:
        if origin is None:
            return
        if origin.repeated is not None:
            self.of_repeated.setdefault(origin.repeated, []).append(why)
        else:
            self.others.setdefault(origin.leaf, []).append(why)
