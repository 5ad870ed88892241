"""Where the factors of all layers are: which are stacked, how they are numbered, who waits for whom."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from suite.core import buckets, padding, statistics
from suite.core import kfac as core_kfac
from suite.jax.dtypes import at_least_float32
from suite.jax.layers import Layer
from suite.jax.plan import Plan
from suite.jax.spread import Spread

# Above this side a stack of layers costs a copy of every gradient and saves nothing.
_STACKED_UP_TO = 128


class Stack(NamedTuple):
    """Factors of one size."""

    n: int
    diagonal: bool
    dtype: Any  # of the parameters
    layers: list[int]
    side: int  # 0 for A and 1 for G


class _Place(NamedTuple):
    """Where a layer's factor is."""

    stack: int
    start: int
    stop: int


class FactorLayout:
    """What is static about the factors of the layers whose parameters are present.

    Layers of equal sizes are stacked; layers may share an A. Factors have numbers: those of the stacks,
    one behind the other.
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[Layer],
        rule: core_kfac.KFAC,
        *,
        factor_dtype: Any,
        inv_dtype: Any,
        warm_start: bool,
        loss_reduction: statistics.LossReduction,
        spread: Spread,
    ) -> None:
        self.plan, self.layers, self.rule = plan, list(layers), rule
        self.factor_dtype, self.inv_dtype = factor_dtype, inv_dtype
        self.warm_start, self.spread = warm_start, spread
        self.loss_reduction: statistics.LossReduction = loss_reduction
        self.keeps_products = rule.compute_method == "ekfac"
        keys = []
        for i, layer in enumerate(self.layers):
            alone = i if max(layer.sizes) > _STACKED_UP_TO else None
            kind = layer.sizes, layer.diagonal, plan.dtypes[layer.leaf], layer.input_first
            keys.append(((*kind, alone), layer.groups))
        self.buckets = buckets.plan_buckets(keys)
        at = {layer.name: i for i, layer in enumerate(self.layers)}
        # A layer whose leader is not here leads itself; its statistics then come from the leader's.
        self.leader = [at.get(layer.input_of or layer.name, i) for i, layer in enumerate(self.layers)]
        self.places: dict[tuple[int, int], _Place] = {}
        self.stacks: list[Stack] = []
        for bucket in self.buckets:
            sizes, diagonal, dtype, *_ = bucket.key
            for side in (0, 1):
                owners, count = [], 0
                for member in bucket.members:
                    if side == 0 and self.leader[member.index] != member.index:
                        continue
                    groups = member.stop - member.start
                    place = _Place(len(self.stacks), count, count + groups)
                    self.places[member.index, side] = place
                    owners.append(member.index)
                    count += groups
                if owners:
                    self.stacks.append(Stack(sizes[side], diagonal[side], dtype, owners, side))
        for i, leader in enumerate(self.leader):
            self.places[i, 0] = self.places[leader, 0]

    @property
    def written(self) -> list[bool]:
        """Whether the layers here have all entries of a leaf, by leaf."""
        left = [math.prod(shape) for shape in self.plan.shapes]
        for layer in self.layers:
            d_in, d_out = layer.sizes
            if layer.bias is not None:
                left[layer.bias] -= layer.groups * d_out
            left[layer.leaf] -= layer.groups * (d_in - (layer.bias is not None)) * d_out
        return [entries == 0 for entries in left]

    @functools.cached_property
    def first(self) -> list[int]:
        """The number of each stack's first factor, counting through all, and one behind the last."""
        counts = [sum(self.layers[i].groups for i in stack.layers) for stack in self.stacks]
        return [int(x) for x in np.cumsum([0, *counts])]

    def numbers(self, stack: int) -> range:
        """Of its factors."""
        return range(self.first[stack], self.first[stack + 1])

    def entries(self, stack: int) -> slice:
        """Where its factors are among all."""
        return slice(self.first[stack], self.first[stack + 1])

    def number(self, layer: int, side: int, group: int) -> int:
        """Of one factor."""
        place = self.places[layer, side]
        return self.first[place.stack] + place.start + group

    def sizes(self) -> dict[Any, list[int]]:
        """Stacks by side, whether diagonal, and dtypes of averages and inverses."""
        groups: dict[Any, list[int]] = {}
        for number, (n, diagonal, _, _, _) in enumerate(self.stacks):
            groups.setdefault((n, diagonal, *self.dtypes(number)), []).append(number)
        return groups

    def dtypes(self, stack: int) -> tuple[Any, Any]:
        """Of the stack's averages and inverses."""
        wide = at_least_float32(self.stacks[stack].dtype)
        return jnp.dtype(self.factor_dtype or wide), jnp.dtype(self.inv_dtype or wide)

    @property
    def pads(self) -> bool:
        """Whether inverses are computed without those before, which are not padded."""
        return self.rule.compute_method != "newton_schulz" and not self.warm_start

    def classes(self) -> dict[Any, list[int]]:
        """Stacks by padded side, whether diagonal, and dtypes."""
        counts: dict[Any, dict[int, int]] = {}
        for number, (n, diagonal, *_) in enumerate(self.stacks):
            if not diagonal:
                own = counts.setdefault(self.dtypes(number), {})
                own[n] = own.get(n, 0) + len(self.numbers(number))
        classes = {dtypes: padding.size_classes(own) for dtypes, own in counts.items()}
        groups: dict[Any, list[int]] = {}
        for number, (n, diagonal, *_) in enumerate(self.stacks):
            dtypes = self.dtypes(number)
            side = n if diagonal else classes[dtypes][n]
            groups.setdefault((side, diagonal, *dtypes), []).append(number)
        return groups

    @functools.cached_property
    def partners(self) -> np.ndarray:
        """Of each factor, the one without which it is not replaced: of the other side, in `pairs`."""
        found = np.arange(self.first[-1])
        for i, layer in enumerate(self.layers):
            for b in range(layer.groups if self.pairs(i) else 0):
                A, G = self.number(i, 0, b), self.number(i, 1, b)
                found[A], found[G] = G, A
        return found

    def pairs(self, layer: int) -> bool:
        """Whether both inverses of a layer are identities until both are ready."""
        shared = [i for i, leader in enumerate(self.leader) if leader == self.leader[layer]]
        return self.pads and shared == [layer]
