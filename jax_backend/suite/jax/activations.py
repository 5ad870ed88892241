"""What is known of values that are no parameter's: outputs of products, counts, one-hot rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from suite.jax import jaxprs, operations
from suite.jax.layers import Elementwise, feature_axes
from suite.jax.views import Shape, Step


class Output(NamedTuple):
    """A product's output, its axes moved about: where each one was, None for a new one of size 1.

    Of rows several may have been one, or one several, of which it is the first.
    """

    site: Any  # find_layers.Site
    axes: tuple[int | None, ...]


class LookedUp(NamedTuple):
    """What a lookup found, its axes moved about, and how many examples have it in common.

    They do where it was broadcast along a new axis in front: positions, looked up once for all examples.
    Those of rows and columns have copies of each other's, before that.
    """

    site: Any  # find_layers.Site
    features: int | None  # the axis that they are on; None: of a table of numbers
    examples: int = 1
    copies: int = 1  # for every example


class Activations:
    """Facts about a program's values, of which `readers` counts who reads them."""

    def __init__(
        self, program: jaxprs.Program, readers: Mapping[int, int], of_examples: Set[int]
    ) -> None:
        """`of_examples`: values that differ between examples; none: it is not known."""
        self.program, self.readers, self.of_examples = program, readers, of_examples
        self.outputs: dict[int, Output] = {}
        self.parted: dict[int, tuple[Output, ...]] = {}  # of products with several leaves side by side
        self.looked_up: dict[int, tuple[LookedUp, ...]] = {}  # summed up, where they are several
        self.counting: dict[int, int] = {}  # value -> the axis along which it counts 0, 1, 2, ...
        self.one_hot: dict[int, int] = {}  # value -> the axis along which it is one-hot
        self.constant: dict[int, set[int]] = {}  # value -> axes along which it is constant
        self.numbers: set[int] = set()  # values that are one number, broadcast

    def shape(self, value: int) -> Shape:
        return self.program.avals[value].shape

    def made_by(self, site: Any, value: int) -> Output:
        """The output of a product."""
        return Output(site, tuple(range(len(self.shape(value)))))

    def is_number(self, value: int) -> bool:
        """Whether it is one number, or was before a broadcast; a batch of one is not."""
        return 0 not in self.shape(value) and (not self.shape(value) or value in self.numbers)

    def follow(self, node: jaxprs.Node) -> None:
        """Facts about activations."""
        op, out = node.operation, node.outputs[0]
        first = node.inputs[0] if node.inputs else None
        if isinstance(op, operations.Reindex) and (first is None or self.is_number(first)):
            self.numbers.add(out)
        if isinstance(op, operations.Iota):
            self.counting[out] = op.axis
        elif isinstance(op, operations.Returned) and first in self.outputs:
            # Of a product made inside; one from outside has whatever gradient the function gives it.
            made_here = self.outputs[first].site.use.path == node.path
            if made_here and self.readers[first] == 1:
                self.outputs[out] = self.outputs[first]
        elif isinstance(op, operations.Reindex) and first is not None:
            self.follow_output(first, out, op.step)
            self.follow_lookups(first, out, op.step)
            self.follow_counts(first, out, op.step)
        elif isinstance(op, operations.Add):
            # What is added to a product has no part in its gradient: a bias may still follow.
            for value, sign in zip(node.inputs, op.signs, strict=True):
                known = None if value is None else self.outputs.get(value)
                if value is None or known is None or sign < 0 or node.custom is not None:
                    continue
                alone = self.readers[value] == 1 and known.site.loops == node.loops
                if alone and self.shape(value) == self.shape(out):
                    self.outputs[out] = known
                    break
        elif isinstance(op, operations.Equal):
            for one, other in (node.inputs, node.inputs[::-1]):
                if one is None or other is None or one not in self.counting:
                    continue
                axis = self.counting[one]
                flat = self.shape(other)[axis] == 1 or axis in self.constant.get(other, ())
                if flat and self.shape(out)[axis] == self.shape(one)[axis]:
                    self.one_hot[out] = axis

    def is_for_all(self, value: int) -> bool:
        """Whether a value is known to be the same for all examples."""
        return bool(self.of_examples) and value not in self.of_examples

    def follow_output(self, old: int, new: int, step: Step | None) -> None:
        """`vmap` transposes outputs, and convolutions of one example get an axis of size 1."""
        before = self.outputs.get(old)
        if before is None or self.readers[old] != 1:
            return
        if step is None:
            self.outputs[new] = before
        elif step[0] == "transpose":
            self.outputs[new] = before._replace(axes=tuple(before.axes[i] for i in step[1][0]))
        elif step[0] == "reshape":
            axes = _reshaped(before, *step[1])
            if axes is not None:
                self.outputs[new] = before._replace(axes=axes)

    def follow_lookups(self, old: int, new: int, step: Step | None) -> None:
        known = self.looked_up.get(old, ()) if self.readers[old] == 1 else ()
        axes = None if step is None else moved_axes(self.shape(old), step)
        found = []
        for one in known:
            if step is None:
                found.append(one)
            elif axes is None and step[0] == "reshape" and one.examples == 1:  # of rows, however many
                features = one.features and _same_axis(one.features, *step[1])
                if features is None or features > 0:
                    found.append(one._replace(features=features))
            elif axes is not None and one.examples == 1:
                features = one.features
                if features is not None:
                    features = None if self.shape(old)[features] == 1 else axes[features]
                shape, kept = self.shape(new), [axis for axis in axes if axis >= 0]
                grown = [i for i, n in enumerate(shape) if n > 1 and i not in kept]
                if grown in ([], [0]) and features != -1:
                    found.append(one._replace(features=features, examples=shape[0] if grown else 1))
                elif features != -1 and self.is_for_all(new):
                    copies = one.copies * math.prod(shape[i] for i in grown)
                    found.append(one._replace(features=features, copies=copies))
        if found:
            self.looked_up[new] = tuple(found)

    def follow_counts(self, old: int, new: int, step: Step | None) -> None:
        if step is None:
            for facts in (self.counting, self.one_hot):
                if old in facts:
                    facts[new] = facts[old]
            return
        kind, arguments = step
        shape = self.shape(old)
        axes = moved_axes(shape, step)
        if kind == "broadcast":
            kept = arguments[1]
            self.constant[new] = {
                i for i in range(len(arguments[0])) if i not in kept or shape[kept.index(i)] == 1
            }
        if axes is not None:
            for facts in (self.counting, self.one_hot):
                if old in facts and axes[facts[old]] >= 0:
                    facts[new] = axes[facts[old]]


def _reshaped(output: Output, old: Shape, new: Shape) -> tuple[int | None, ...] | None:
    """Where each axis of a reshape was, of several that became one the first.

    None: features are not whole any more; of an elementwise product's output nothing may be split.
    """
    axes, product = output.axes, output.site.use.product
    if 0 in old:
        return None
    whole = axes if isinstance(product, Elementwise) else feature_axes(product)
    before = [(axis, n) for axis, n in zip(axes, old, strict=True) if n != 1]
    found: list[int | None] = [None] * len(new)
    after = [i for i, n in enumerate(new) if n != 1]
    while before and after:
        some, places = [before.pop(0)], [after.pop(0)]
        size, count = some[0][1], new[places[0]]
        while size != count:
            if size < count:
                some.append(before.pop(0))
                size *= some[-1][1]
            else:
                places.append(after.pop(0))
                count *= new[places[-1]]
        if any(axis in whole for axis, _ in some) and len(some) + len(places) > 2:
            return None
        for i in places:
            found[i] = some[0][0]
    return tuple(found)


def _same_axis(axis: int, old: Shape, new: Shape) -> int:
    """Where an axis is after a reshape that leaves it whole; -1: it does not."""
    before = math.prod(old[:axis])
    places = [i for i, n in enumerate(new) if n == old[axis] and math.prod(new[:i]) == before]
    return places[-1] if places else -1


def moved_axes(shape: Shape, step: Step) -> list[int] | None:
    """Where each axis of a value of this shape goes, -1 if of length 1; None: they do not stay whole."""
    kind, arguments = step
    if kind == "broadcast":
        return [-1 if n == 1 else axis for n, axis in zip(shape, arguments[1], strict=True)]
    if kind == "transpose":
        return [-1 if n == 1 else arguments[0].index(i) for i, n in enumerate(shape)]
    if kind == "reshape" and [n for n in shape if n != 1] == [n for n in arguments[1] if n != 1]:
        kept = iter([i for i, n in enumerate(arguments[1]) if n != 1])
        return [-1 if n == 1 else next(kept) for n in shape]
    return None
