"""Complex weights that are made of real leaves, as of a Fourier neural operator: `re + 1j * im`.

One fact is carried beside each such value: "a sum of leaves, each times a number, in the real part or in
the imaginary one". Where it meets rows the leaves have the squares of each row's gradient.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from suite.jax import jaxprs, operations
from suite.jax.layers import ComplexPart, Elementwise, Use
from suite.jax.probes import ComplexScale
from suite.jax.uses import Origin, Site, Uses
from suite.jax.views import Shape, Step, View, apply_steps


class Times(NamedTuple):
    """A weight of this shape was multiplied or divided by an operand."""

    path: jaxprs.Path
    operand: int
    divides: bool
    constant: Shape  # axes along which the operand does not change
    shape: Shape
    before: int  # steps that were taken then


class Member(NamedTuple):
    """A leaf in a complex weight, times `factor`, or that times i, and times numbers after."""

    origin: Origin
    imaginary: bool
    factor: float
    scales: tuple[Times, ...] = ()

    def times(self, number: complex) -> Member | None:
        """None: both of the product's parts would be made of the leaf."""
        if number.imag and number.real:
            return None
        if not number.imag:
            return self._replace(factor=self.factor * number.real)
        factor = self.factor * (-number.imag if self.imaginary else number.imag)
        return self._replace(imaginary=not self.imaginary, factor=factor)


Members = tuple[Member, ...]


class ComplexWeights:
    """Asked of each operation with a view of a leaf, or with what complex weight it became."""

    def __init__(
        self,
        program: jaxprs.Program,
        uses: Uses,
        *,
        is_constant: Callable[[int], bool],
        is_once: Callable[..., bool],
        scales: Callable[[int, Origin, Shape], Shape | None],
        elementwise: Callable[[jaxprs.Node, int, Origin, ComplexPart], bool],
    ) -> None:
        """
        Args:
            is_constant: whether a value is made of no leaf and of no argument.
            is_once: whether none of some values is an example's.
            scales: along which axes a value does not change that is no example's, and is not made of the
                leaf, where a weight of a shape is multiplied with it; None: it is something else.
            elementwise: notes the use of a leaf, at an operand's place, in a sum or product entry by
                entry; whether it is one.
        """
        self.program, self.uses = program, uses
        self.is_constant, self.is_once, self.scales = is_constant, is_once, scales
        self.elementwise = elementwise
        self.known: dict[int, Members] = {}

    def meet(self, node: jaxprs.Node, origins: Sequence[Origin | None]) -> bool:
        """Whether an operation is one of complex numbers that are made of leaves.

        Args:
            origins: of each operand that is a view of a leaf.
        """
        own = [self.known.get(v, ()) if v is not None else () for v in node.inputs]
        makes = node.name in ("complex", "convert_element_type") and self._is_complex(node.outputs[0])
        if not any(own) and not (makes and any(origins)):
            return False
        made = None if node.custom is not None else self._made(node, origins, own)
        if made is not None:
            self.known[node.outputs[0]] = made
            return True
        if node.custom is not None or any(origins) or not self._is_used(node, own):
            for origin in [*origins, *(member.origin for members in own for member in members)]:
                self.uses.rule_out(origin, f"`{node.name}`, of a complex number made of it")
        return True

    def rule_out(self, value: int | None, why: str) -> None:
        for member in self.known.get(value, ()):  # type: ignore[arg-type]
            self.uses.rule_out(member.origin, why)

    def _is_complex(self, value: int | None) -> bool:
        kind = None if value is None else self.program.avals[value].dtype
        return kind is not None and jnp.issubdtype(kind, jnp.complexfloating)

    def _made(
        self, node: jaxprs.Node, origins: Sequence[Origin | None], own: Sequence[Members]
    ) -> Members | None:
        """What complex weight an operation makes; None: none."""
        op, out = node.operation, node.outputs[0]
        if not self._is_complex(out):
            return None
        if node.name == "complex":
            others = [v for v, o in zip(node.inputs, origins, strict=True) if o is None]
            if any(v is not None and not self.is_constant(v) for v in others):
                return None
            return tuple(Member(o, bool(i), 1.0) for i, o in enumerate(origins) if o is not None)
        if isinstance(op, operations.Reindex):
            origin = origins[0]
            given = own[0] if origin is None else (Member(origin, False, 1.0),)
            return tuple(m._replace(origin=m.origin.moved(op.step)) for m in given)
        if any(origins):
            return None
        if isinstance(op, operations.Negate):
            return self._times(own[0], -1.0)
        if isinstance(op, operations.Add):
            shape = self.program.avals[out].shape
            for v, members in zip(node.inputs, own, strict=True):
                if v is not None and not members and not self.is_constant(v):
                    return None
                if members and self.program.avals[v].shape != shape:  # type: ignore[index]
                    return None
            signed = [self._times(members, s) for members, s in zip(own, op.signs, strict=True)]
            return tuple(member for members in signed for member in members or ())
        if isinstance(op, (operations.Multiply, operations.Divide)):
            return self._multiplied(node, own, isinstance(op, operations.Divide))
        return None

    def _multiplied(self, node: jaxprs.Node, own: Sequence[Members], divides: bool) -> Members | None:
        """A weight times a number, or what is no example's; None: neither."""
        shape = self.program.avals[node.outputs[0]].shape
        for place in (0,) if divides else (0, 1):
            number, other = self.program.number(node, 1 - place), node.inputs[1 - place]
            if not own[place] or (divides and number == 0):
                continue
            if number is not None:
                return self._times(own[place], 1 / number if divides else number)
            found = [self._scaled(node, place, member, shape, divides) for member in own[place]]
            if other is not None and None not in found:
                self.rule_out(other, f"`{node.name}`, which scales a weight")
                return tuple(found)  # type: ignore[arg-type]
        return None

    def _scaled(
        self, node: jaxprs.Node, place: int, member: Member, shape: Shape, divides: bool
    ) -> Member | None:
        value, other = node.inputs[place], node.inputs[1 - place]
        if other is None or value is None or self.program.avals[value].shape != shape:
            return None
        constant = None if member.origin.widened else self.scales(other, member.origin, shape)
        if constant is None:
            return None
        one = Times(node.path, 1 - place, divides, constant, shape, len(member.origin.inner))
        return member._replace(scales=(*member.scales, one))

    def _times(self, members: Members, number: Any) -> Members | None:
        found = tuple(member.times(complex(number)) for member in members)
        return None if None in found else found  # type: ignore[return-value]

    def _is_used(self, node: jaxprs.Node, own: Sequence[Members]) -> bool:
        """Whether an operation is one of a complex weight with rows, which is noted."""
        op = node.operation
        if all(own[:2]) or not self._is_complex(node.outputs[0]):
            return False
        place = 0 if own[0] else 1
        if isinstance(op, (operations.Add, operations.Multiply)):
            return all(self._met_entries(node, place, member) for member in own[place])
        if not isinstance(op, operations.DotGeneral) or node.inputs[1 - place] is None:
            return False
        labels = self._labels(node, op, place)
        sites = [self._contraction(node, place, member, labels) for member in own[place]]
        if None in sites:
            return False
        self.uses.sites += sites  # type: ignore[arg-type]
        return True

    def _met_entries(self, node: jaxprs.Node, place: int, member: Member) -> bool:
        part = ComplexPart(member.imaginary, member.factor)
        if not self.elementwise(node, place, member.origin, part):
            return False
        shape = self.program.avals[node.outputs[0]].shape
        whole: Step = ("broadcast", (shape, tuple(range(len(shape)))))
        scales = tuple(self._scale(one, member.origin, [whole], True) for one in member.scales)
        site = self.uses.sites.pop()
        self.uses.sites.append(site._replace(use=site.use._replace(complex_scales=scales)))
        return True

    def _scale(
        self, one: Times, origin: Origin, steps: Sequence[Step], of_outputs: bool
    ) -> ComplexScale:
        """`steps` are from what the weight has become."""
        whole: Step = ("broadcast", (one.shape, tuple(range(len(one.shape)))))
        moves = (whole, *origin.inner[one.before :], *steps)
        return ComplexScale(one.path, one.operand, one.divides, moves, of_outputs)

    def _scale_of(self, one: Times, origin: Origin, labels: tuple[str, str, str]) -> ComplexScale | None:
        """What a product's output or input is multiplied with for a weight's; None: that of neither."""
        sides = [1 if axis in one.constant else n for axis, n in enumerate(one.shape)]
        index = np.broadcast_to(np.arange(math.prod(sides)).reshape(sides), one.shape)
        index = apply_steps(index, origin.inner[one.before :])
        own, *others = labels
        varies = {c for axis, c in enumerate(own) if (index != index.take([0], axis)).any()}
        for its in others[::-1]:
            if varies <= set(its):
                left = tuple(n if c in its else 1 for c, n in zip(own, index.shape, strict=True))
                order = sorted(range(len(own)), key=lambda axis: its.find(own[axis]))
                sizes = dict(zip(own, left, strict=True))
                steps: tuple[Step, ...] = (
                    ("slice", ((0,) * len(own), left, (1,) * len(own))),
                    ("transpose", (tuple(order),)),
                    (
                        "reshape",
                        (tuple(left[axis] for axis in order), tuple(sizes.get(c, 1) for c in its)),
                    ),
                )
                return self._scale(one, origin, steps, its == labels[2])
        return None

    def _labels(self, node: jaxprs.Node, op: operations.DotGeneral, place: int) -> tuple[str, str, str]:
        """Of a product: (the weight's axes, the rows', the output's)."""
        letters = iter(string.ascii_letters)
        names: tuple[dict[int, str], dict[int, str]] = ({}, {})  # by axis of either operand
        for axes in (op.batch, op.contracted):
            for a, b in zip(*axes, strict=True):
                names[0][a] = names[1][b] = next(letters)
        out = [names[0][a] for a in op.batch[0]]
        for own, value in zip(names, node.inputs, strict=False):
            for axis in range(len(self.program.avals[value].shape)):  # type: ignore[index]
                if axis not in own:
                    own[axis] = next(letters)
                    out.append(own[axis])
        both = ["".join(own[axis] for axis in sorted(own)) for own in names]
        return both[place], both[1 - place], "".join(out)

    def _contraction(
        self, node: jaxprs.Node, place: int, member: Member, labels: tuple[str, str, str]
    ) -> Site | None:
        origin, x, out = member.origin, node.inputs[1 - place], node.outputs[0]
        if origin.widened or origin.slope is not None or origin.made or origin.repeated is not None:
            return None
        scales = [self._scale_of(one, origin, labels) for one in member.scales]
        if None in scales:
            return None
        part = ComplexPart(member.imaginary, member.factor, labels)
        product = Elementwise(origin.part, origin.inner, True, 1, None, part)
        sides = zip(labels[2], self.program.avals[out].shape, strict=True)
        rows = math.prod(side for label, side in sides if label not in labels[0])
        use = Use(node.path, 0, 1 - place, product, False, origin.scans, origin.stack, 1, rows)
        use = use._replace(
            examples=rows,
            multipliers=origin.multipliers,
            once=self.is_once(x),
            complex_scales=tuple(one for one in scales if one is not None),
        )
        k = len(origin.stack)
        view = View(origin.outer, (tuple(range(k)), tuple(range(k, k + len(origin.part))), ()))
        block = math.prod(origin.part), 1
        return Site(origin.leaf, use, view, block, False, None, out, node.loops)
