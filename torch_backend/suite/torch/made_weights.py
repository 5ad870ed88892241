"""What a layer's forward makes of its weight, and whether calls of the layer alone lead to the weight.

Rows, one for each output, that are multiplied, shifted, standardized or normalized are so many times
longer, and may take the weight's place, also where a mask leaves entries out. What gradients reach by
other ways has no part in the layer's statistics.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from suite.torch.calls import ARGUMENTS, RESHAPE
from suite.torch.hooks import can_be_read, tensors_in
from suite.torch.operations import (
    NEGATIONS,
    QUOTIENTS,
    SUMS,
    TIMES,
    TRIANGLES,
    T,
    is_subtracted,
)

# Operations that put a constant in the place of some entries, and which of their operands has those.
CHOICES = {T.masked_fill: (0,), torch.masked_fill: (0,), T.where: (0,), torch.where: (1, 2)}
_LIKE = {T.view_as, T.reshape_as, T.expand_as}
# Roundings that pass gradients straight through.
_FAKES = {
    torch.fake_quantize_per_tensor_affine,
    torch.fake_quantize_per_channel_affine,
    torch.fused_moving_avg_obs_fake_quant,
}


_MASKS: Any = WeakIdKeyDictionary()  # by tensor: its version, and whether it is one


class Made(NamedTuple):
    """What a layer's forward makes of its weight, the weight to begin with."""

    tensor: torch.Tensor
    place: int
    weight: torch.Tensor
    scale: torch.Tensor  # () or (outputs,): what its rows were multiplied with
    turned: bool  # (in, out): its rows are columns

    def after(self, scale: Any, output: torch.Tensor) -> Made:
        """What an operation that multiplies its rows with `scale` makes of it."""
        return self._replace(tensor=output, scale=self.scale * scale)


def scale_of(function: Any, args: Any, kwargs: Any, at: int, made: Made) -> Any:
    """What an operation multiplies the rows of its operand `at` with; None: it is no such operation."""
    x = made.tensor
    axis = _axis_of_rows(made)
    if axis is None:
        return None
    if function in RESHAPE or (function in _LIKE and at == 0 and not kwargs):
        return 1.0
    if function in _FAKES or function in TRIANGLES:
        return 1.0 if at == 0 else None
    if function is T.__getitem__:
        return 1.0 if at == 0 and _is_all(args[1], x.shape) else None
    if function is F.normalize:
        return _scale_of_normalized(x, axis, *args[1:], **kwargs) if at == 0 else None
    if function is F.batch_norm and at == 0 and axis == 1:
        given = dict(zip(ARGUMENTS[function], args, strict=False)) | kwargs
        if not given.get("training", False):
            return None
        gain = 1.0 if given.get("weight") is None else given["weight"]
        return (
            gain * (x.movedim(1, 0).flatten(1).var(1, unbiased=False) + given.get("eps", 1e-5)).rsqrt()
        )
    if function in NEGATIONS:
        return -1.0
    if not kwargs and function in CHOICES and _leaves_out(function, args, at, x):
        return 1.0
    if len(args) != 2 or kwargs or args[0] is args[1]:
        return None
    other = args[1 - at]
    constant = isinstance(other, torch.Tensor) and not other.requires_grad
    sign = -1.0 if function in SUMS and is_subtracted(function, at) else 1.0
    if function in SUMS and constant and torch.broadcast_shapes(other.shape, x.shape) == x.shape:
        return sign  # as in w + (w.round() - w).detach()
    by_row = _of_rows(other, x, axis)
    if by_row is None and function in TIMES and constant and other.shape == x.shape and _is_mask(other):
        return 1.0
    if by_row is None:
        return None
    other = by_row
    if function in SUMS:
        return sign
    if function in TIMES:
        return other
    return 1 / other if function in QUOTIENTS and at == 0 else None


def _is_all(index: Any, shape: torch.Size) -> bool:
    """Whether it takes everything: x[:, 0:n]."""
    given = index if isinstance(index, tuple) else (index,)
    slices = [s for s in given if isinstance(s, slice)]
    if len(slices) < len(given) or len(given) > len(shape):
        return False
    pairs = zip(slices, shape, strict=False)
    whole = [s.start in (None, 0) and s.stop in (None, n) and s.step in (None, 1) for s, n in pairs]
    return all(whole)


def _axis_of_rows(made: Made) -> int | None:
    """Along which axis it has one row after the other; None: it has another shape than its weight's."""
    x, weight = made.tensor, made.weight
    if made.turned:
        return 1 if x.shape == weight.shape else None
    rows = weight.shape[0]
    axis = 0 if x.shape[0] == rows else 1
    alike = x.shape[: axis + 1] == (*(1,) * axis, rows) and x.numel() == weight.numel()
    return axis if alike else None


def _scale_of_normalized(
    x: torch.Tensor, axis: int, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    """One over the lengths of a matrix's rows; None: something else is normalized."""
    if x.ndim != 2 or dim not in (1 - axis, -1 - axis) or out is not None:
        return None
    return 1 / x.norm(p, dim).clamp_min(eps)


def _of_rows(other: Any, x: torch.Tensor, axis: int) -> Any:
    """A number, or one for each row of `x`; None: it differs within rows."""
    if isinstance(other, int | float):
        return other
    if not isinstance(other, torch.Tensor):
        return None
    if other.numel() == 1:
        return other.reshape(())
    if other.layout is not torch.strided:
        return None
    sides = zip(range(other.ndim), other.shape, other.stride(), strict=True)
    if other.ndim != x.ndim or other.shape[axis] != x.shape[axis]:
        return None
    if any([i != axis and n > 1 and stride != 0 for i, n, stride in sides]):  # noqa: C419
        return None
    return other.movedim(axis, 0).flatten(1)[:, 0]


def _leaves_out(function: Any, args: Any, at: int, x: torch.Tensor) -> bool:
    """Whether some entries of `x`, the operand `at`, become a constant, and the others stay."""
    if len(args) != 3 or at not in CHOICES[function]:
        return False
    condition, other = (args[0], args[3 - at]) if function is torch.where else args[1:]
    fills = [y for y in (other,) if isinstance(y, torch.Tensor)]
    if condition.shape != x.shape or any([y.requires_grad for y in fills]):  # noqa: C419
        return False
    return all([torch.broadcast_shapes(y.shape, x.shape) == x.shape for y in fills])  # noqa: C419


def _is_mask(x: torch.Tensor) -> bool:
    """Whether its numbers are 0 or 1: asked once of a tensor while it stays as it is."""
    if x.layout is not torch.strided or torch.compiler.is_compiling() or not can_be_read(x):
        return x.dtype == torch.bool and x.layout is torch.strided
    known = _MASKS.get(x)
    if known is None or known[0] != x._version:
        known = _MASKS[x] = x._version, bool(((x == 0) | (x == 1)).all())
    return known[1]


def node_of(x: torch.Tensor) -> Any:
    """A tensor's node of autograd's graph; None: it has none."""
    if x.grad_fn is not None or not x.requires_grad:
        return x.grad_fn
    return torch.autograd.graph.get_gradient_edge(x).node


def reached_from(
    starts: Sequence[Any], ends: Container[Any], calls: Mapping[Any, Any], began: int
) -> set[Any]:
    """Nodes of autograd's graph behind `starts`, up to `ends` and to what was there before it `began`.

    Past `calls` it goes on to their inputs only.
    """
    found: set[Any] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        if node in ends or node._sequence_nr() < began:
            continue
        if node in calls:
            waiting += [node_of(x) for x in tensors_in(calls[node], set())]
        else:
            waiting += [before for before, _ in node.next_functions]
    return found
