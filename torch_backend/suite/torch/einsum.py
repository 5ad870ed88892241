"""Products of rows with a weight that are written as `torch.einsum`, of that or of another name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from suite.torch.operations import ADDED_STACKS, MATRIX, T
from suite.torch.rows import Axes

_ELLIPSIS = "."
_OF_VECTORS = {torch.mv, T.mv}
_OUTER, _INNER = {torch.outer, T.outer}, {torch.inner, T.inner}


class Labels(NamedTuple):
    """Of an equation of two operands: a character for each axis, `_ELLIPSIS` for any number of them."""

    own: str  # the weight's
    other: str
    out: str


class Halves(NamedTuple):
    """How a weight lies as a matrix."""

    turned: bool  # whether inputs come first
    leading: int  # on how many axes what comes first is
    order: tuple[int, ...] = ()  # its axes as (out, in), where inputs are on both sides of outputs


class Rows(NamedTuple):
    """How a product with a weight is one of rows with a matrix."""

    halves: Halves
    axes: Axes


class Sides(NamedTuple):
    """A weight's labels by what they are."""

    groups: str  # which both operands and the result have: for each a product of its own
    out: str
    into: str


def labels_of(equation: str, place: int) -> Labels | None:
    """The labels if the weight is the operand at `place`, of two; None: they are not understood."""
    left, arrow, out = equation.replace(" ", "").replace("...", _ELLIPSIS).partition("->")
    operands = left.split(",")
    if len(operands) != 2:
        return None
    if not arrow:
        once = [x for x in left if x != "," and left.count(x) == 1]
        out = "".join(sorted(once))  # the ellipsis comes first
        if left.count(_ELLIPSIS) > 1:
            return None
    known = all(x.isalpha() or x == _ELLIPSIS for x in "".join([*operands, out]))
    return Labels(operands[place], operands[1 - place], out) if known else None


def with_letters(pattern: str) -> str:
    """einops' equation, whose axes are words apart from each other, with a letter for each."""
    letters: dict[str, str] = {"...": "..."}
    left, arrow, out = pattern.partition("->")
    parts = []
    for operand in (*left.split(","), out):
        names = operand.split()
        for name in names:
            letters.setdefault(name, chr(ord("a") + len(letters) - 1))
        parts.append("".join(letters[name] for name in names))
    return f"{','.join(parts[:-1])}{arrow}{parts[-1]}"


def sides_of(labels: Labels) -> Sides | None:
    """What a weight's axes are; None: it is no product of rows with a matrix, or with one a group."""
    own, other, out = labels
    for some in labels:
        if len({*some}) < len(some):
            return None
    if _ELLIPSIS in own or any(x not in other and x not in out for x in own):
        return None
    if any(x not in own and x not in out for x in other):  # summed before
        return None
    groups = "".join(x for x in own if x in other and x in out)
    sides = Sides(
        groups,
        "".join(x for x in own if x not in other),
        "".join(x for x in own if x not in out),
    )
    return sides if sides.out and sides.into else None


def halves_of(labels: Labels) -> Halves | None:
    """How a matrix lies; None: it is none, or a stack."""
    sides = sides_of(labels)
    if sides is None or sides.groups:
        return None
    if labels.own == sides.into + sides.out:
        return Halves(True, len(sides.into))
    turned = sides.out + sides.into
    order = tuple(map(labels.own.index, turned)) if labels.own != turned else ()
    return Halves(False, len(sides.out), order)


def labels_of_call(equation: Any, place: int, weight: torch.Tensor, x: Any) -> Labels | None:
    """`labels_of` for two operands, with one for each axis of an ellipsis, the last of which are alike.

    Args:
        place: of the weight; `x` is the other operand.

    Returns:
        None also where an axis of length 1 stands for all.
    """
    labels = labels_of(equation, place) if isinstance(equation, str) else None
    if labels is None or not isinstance(x, torch.Tensor):
        return None
    own, other, out = labels
    if _ELLIPSIS in own and _ELLIPSIS not in other:
        return None  # a matrix's product with a vector has no rows
    counts = [
        len(x.shape) - len(of) + 1 if _ELLIPSIS in of else 0 for of, x in ((own, weight), (other, x))
    ]
    if (_ELLIPSIS in own + other) != (_ELLIPSIS in out) or min(counts) < 0:
        return None
    axes = "".join([chr(ord("0") + i) for i in range(max(counts))])
    own, other = (
        of.replace(_ELLIPSIS, axes[len(axes) - n :]) for of, n in zip((own, other), counts, strict=True)
    )
    labels = Labels(own, other, out.replace(_ELLIPSIS, axes))
    if len(own) != weight.ndim or len(other) != x.ndim:
        return None
    sizes = dict(zip(own, weight.shape, strict=True))
    alike = [sizes.get(label, n) == n for label, n in zip(other, x.shape, strict=True)]
    return labels if all(alike) else None


def contraction_of_call(equation: Any, place: int, weight: torch.Tensor, x: Any) -> Labels | None:
    """The labels where an entry of a weight meets one of x, or one of the result, for each row.

    None: so it is not.

    Args: as of `labels_of_call`.
    """
    labels = labels_of_call(equation, place, weight, x)
    if labels is None or any([len({*some}) < len(some) for some in labels]):  # noqa: C419
        return None
    own, other, out = labels
    met = all([label in other or label in out for label in own])  # noqa: C419
    return labels if met and all([label in own or label in out for label in other]) else None  # noqa: C419


def as_einsum(function: Any, args: Any) -> tuple[str, Sequence[Any]] | None:
    """The equation and the operands, the last of the arguments, of a function that is such a product."""
    if function is torch.einsum:
        equation, operands = operands_of(args)
        return equation, operands
    if function in ADDED_STACKS:
        return "bij,bjk->bik", args[1:]
    if len(args) != 2 or not all([isinstance(x, torch.Tensor) for x in args]):  # noqa: C419
        return None
    if function in _OUTER:
        return "i,j->ij", args
    if function in _INNER:
        return ("...i,i->..." if args[1].ndim == 1 else "...i,oi->...o"), args
    if function in MATRIX | _OF_VECTORS and function is not T.__rmatmul__:
        if args[1].ndim == 1:
            return "...i,i->...", args
        if args[0].ndim == 1:
            return "i,...ij->...j", args
    return None


def tensordot_as_einsum(args: Any, kwargs: Any) -> tuple[str, Sequence[Any]] | None:
    """The equation and the operands of a call of `torch.tensordot`; None: its axes are not at hand."""
    given = dict(zip(("a", "b", "dims"), args, strict=False)) | kwargs
    a, b, dims = given.get("a"), given.get("b"), given.get("dims", 2)
    if given.get("out") is not None or not (isinstance(a, T) and isinstance(b, T)):
        return None
    if isinstance(dims, int):
        dims = range(a.ndim - dims, a.ndim), range(dims)
    if isinstance(dims, T) or len(dims) != 2 or a.ndim + b.ndim > 26:
        return None
    pairs = [[side] if isinstance(side, int) else [*side] for side in dims]
    labels = [chr(ord("a") + axis) for axis in range(a.ndim + b.ndim)]
    of_a, of_b = labels[: a.ndim], labels[a.ndim :]
    for first, second in zip(*pairs, strict=True):
        of_b[second] = of_a[first]
    both = [x for x in of_a if x in of_b]
    out = [x for x in (*of_a, *of_b) if x not in both]
    return f"{''.join(of_a)},{''.join(of_b)}->{''.join(out)}", (a, b)


def operands_of(args: Any) -> tuple[Any, Sequence[Any]]:
    """The equation and the operands that `torch.einsum` got."""
    operands = args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = operands[0]
    return args[0], operands


def rows_of_call(equation: Any, place: int, weight: torch.Tensor, x: Any) -> Rows | None:
    """How a product with a matrix is one of rows.

    Args: as of `labels_of_call`.
    """
    labels = labels_of_call(equation, place, weight, x)
    sides = None if labels is None else sides_of(labels)
    halves = None if labels is None else halves_of(labels)
    if labels is None or sides is None or halves is None:
        return None
    own, other, out = labels
    rows = [label for label in other if label not in own]
    x_axes, y_axes = (
        tuple([of.index(label) for label in [*rows, *features]])
        for of, features in ((other, sides.into), (out, sides.out))
    )
    return Rows(halves, Axes(x_axes, y_axes, (len(sides.into), len(sides.out))))
