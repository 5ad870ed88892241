"""Functions of torch, by what they make of a tensor that is followed through a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

T: Any = torch.Tensor

ADDITIONS = {torch.add, T.add, T.__add__, T.__radd__, T.add_, T.__iadd__}
SUMS = ADDITIONS | {torch.sub, T.sub, T.__sub__, T.__rsub__, torch.rsub, T.sub_, T.__isub__}
NEGATIONS = {torch.neg, T.neg, T.__neg__}
TIMES = {torch.mul, T.mul, T.__mul__, T.__rmul__, T.mul_, T.__imul__, torch.multiply, T.multiply}
PRELU = {torch.prelu, F.prelu, T.prelu}
COPIES = {T.expand, T.expand_as, T.repeat, torch.broadcast_to, torch.tile, T.tile}
WRITES = {T.__setitem__, T.copy_}  # the last argument to places of the first
CHOICES = {torch.where, T.where}
ADDED, ADDED_STACKS = {torch.addmm, T.addmm}, {torch.baddbmm, T.baddbmm}
ADDED_ENTRYWISE, LERP = {torch.addcmul, T.addcmul}, {torch.lerp, T.lerp}
MATRIX = {torch.matmul, T.matmul, T.__matmul__, T.__rmatmul__, torch.mm, T.mm, torch.bmm, T.bmm}
CASTS = {T.to, T.type_as, T.float, T.half, T.bfloat16, T.double, T.contiguous, T.clone}
SHAPED_LIKE = {T.view_as, T.reshape_as, T.expand_as}  # their second argument
VIEWS = {T.t, torch.t, T.T.__get__, T.mT.__get__, T.transpose, torch.transpose, T.reshape,
         torch.reshape, T.view, T.unsqueeze, torch.unsqueeze, T.squeeze, torch.squeeze, T.flatten,
         torch.flatten, T.permute, torch.permute, T.__getitem__, T.narrow, torch.narrow,
         torch.view_as_complex, torch.view_as_real}  # fmt: skip
TRIANGLES = {torch.tril, T.tril, torch.triu, T.triu}  # zeros in the place of some entries
# Entries of a tensor in other places, sums of some, or without some: what each is multiplied with is 1.
TAKES = {torch.index_select, T.index_select, torch.gather, T.gather, torch.take_along_dim,
         T.take_along_dim, torch.roll, T.roll, torch.flip, T.flip, torch.repeat_interleave,
         T.repeat_interleave, torch.diag, T.diag, torch.diag_embed, T.diag_embed, torch.diagonal,
         T.diagonal, T.unfold, torch.sum, T.sum, *TRIANGLES}  # fmt: skip
JOINS = {torch.cat, torch.concat, torch.concatenate, torch.hstack}
LISTS = JOINS | {torch.stack, torch.vstack}
_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
SPLITS = {T.chunk, torch.chunk, T.split, torch.split, T.unbind, torch.unbind, T.tensor_split,
           torch.tensor_split}  # fmt: skip
_TRANSPOSE, _TURN = {T.transpose, torch.transpose, T.swapaxes, torch.swapaxes}, {T.mT.__get__}
_PERMUTE = {T.permute, torch.permute}
# Products of rows with their group's matrix of a stack. torch.compile shows modes none of torch's own,
# only the operator that transformers has for what those cannot do, which is known by its name.
_GROUPED = {getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)} - {None}
_GROUPED_OPERATOR = "transformers.grouped_mm_fallback"
SHIFTED = ADDED | ADDED_STACKS | ADDED_ENTRYWISE  # products that the first operand is added to
GRIDS = {torch.arange, torch.linspace, torch.logspace, torch.eye}  # as a module's buffers may hold
LOOKS = {T._base.__get__}  # no uses of a view: another mode looks whose it is
MAXIMA = {torch.maximum, T.maximum, torch.max, T.max}
EXTREMES = MAXIMA | {torch.minimum, T.minimum, torch.min, T.min}
QUOTIENTS = {torch.div, T.div, torch.true_divide, T.true_divide, T.__truediv__}
ARITHMETIC = SUMS | TIMES | QUOTIENTS


def is_subtracted(function: Any, place: int) -> bool:
    """Whether the operand at `place` of one of the `SUMS` is taken off the other."""
    if function in ADDITIONS:
        return False
    return place == (0 if function in (T.__rsub__, torch.rsub) else 1)


def changes_in_graph(function: Any, args: Any, output: Any) -> bool:
    """Whether it changed its first argument, of whose versions torch.compile does not tell.

    Without gradients its values change, and it stays the same function of what it was made of.
    """
    if not args or not isinstance(args[0], T) or not torch.is_grad_enabled():
        return False
    return function is T.__setitem__ or (output is args[0] and function not in VIEWS | CASTS)


def mask_and_scores(args: Any, kwargs: Any) -> tuple[dict[str, Any], Any, Any]:
    """An attention's arguments by name, its mask, and the shape of its scores with that, or None."""
    given = dict(zip(_OF_ATTENTION, args, strict=False)) | kwargs
    mask = given.get("attn_mask")
    if mask is None:
        return given, None, None
    query, key = given["query"].shape, given["key"].shape
    # With groups of heads the query has all of them.
    heads = 3 if given.get("enable_gqa") else 2
    first = torch.broadcast_shapes(query[:-heads], key[:-heads])
    scores = (*first, *query[len(query) - heads : -1], key[-2])
    return given, mask, torch.broadcast_shapes(scores, mask.shape)


def turns_over(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a view is a matrix's transpose."""
    matrix = args[0].ndim == 2
    return turns(function, args, kwargs) or (matrix and function in (T.t, torch.t, T.T.__get__))


def turns(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether it exchanges its first argument's last two axes."""
    order = order_of(function, args, kwargs) or []
    return len(order) > 1 and order == [*range(len(order) - 2), len(order) - 1, len(order) - 2]


def order_of(function: Any, args: Any, kwargs: Any) -> list[int] | None:
    """The axes of a function's first argument in the order of its output; None: it moves none."""
    if kwargs or function not in _TURN | _TRANSPOSE | _PERMUTE:
        return None
    ndim = args[0].ndim
    if function in _PERMUTE:
        axes = args[1:] if isinstance(args[1], int) else args[1]
        return [axis % ndim for axis in axes]
    first, second = (-2, -1) if function in _TURN else args[1:]
    order = [*range(ndim)]
    order[first], order[second] = order[second], order[first]
    return order


def ends_of_groups(function: Any, args: Any, kwargs: Any) -> Any:
    """Of a grouped product the offsets of its groups' ends, if it has any."""
    if function not in _GROUPED and str(function) != _GROUPED_OPERATOR:
        return None
    return args[2] if len(args) > 2 else kwargs.get("offs")


def viewed(function: Any, rest: Any, kwargs: Any, slot: T) -> T:
    """A view of a slot; what was copied on the way can be viewed as the slot itself cannot."""
    if function is torch.view_as_complex:  # which lies in memory as it pleases
        return torch.complex(*slot.unbind(-1))
    if function is torch.view_as_real and not slot.is_complex():  # of what is real, whatever was added
        return torch.stack([slot, torch.zeros_like(slot)], -1)
    try:
        return function(slot, *rest, **kwargs)
    except RuntimeError:
        return function(slot.contiguous(), *rest, **kwargs)
