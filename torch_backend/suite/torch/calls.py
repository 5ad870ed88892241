"""Functions that take a layer's weight: what a call of one is as a call of the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from suite.torch.layers import Site
from suite.torch.operations import ADDED, T
from suite.torch.rows import Axes, LayerSpec, paddings

# Which take a layer's weight transposed, (in, out).
PRODUCTS = (torch.matmul, torch.mm, T.matmul, T.mm, T.__matmul__, *ADDED)
CONVOLVE = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
RESHAPE = {T.reshape, torch.reshape, T.view, T.flatten, torch.flatten, T.unflatten, torch.unflatten}
RESHAPE |= {T.squeeze, torch.squeeze, T.unsqueeze, torch.unsqueeze}
# By function: the names of its arguments, by which it may be called.
ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    **dict.fromkeys(PRODUCTS, ("input", "weight")),
    **dict.fromkeys(ADDED, ("bias", "input", "weight")),
    torch.conv1d: CONVOLVE,
    torch.conv2d: CONVOLVE,
    torch.conv3d: CONVOLVE,
    F.embedding: ("input", "weight", "padding_idx"),
    T.__getitem__: ("weight", "input"),
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.batch_norm: (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "training",
        "momentum",
        "eps",
    ),
}
NORMS = {F.layer_norm: "layer", F.rms_norm: "rms", F.group_norm: "group", F.batch_norm: "batch"}


def call_of(function: Any, given: Mapping[str, Any], site: Site) -> LayerSpec | None:
    """What a call of a function with a layer's weight is as one of the layer; None: not one.

    Args:
        given: the arguments by name.
    """
    spec, bias = site.spec, given.get("bias")
    if spec.bias and bias is None:
        return None  # what has a coordinate of A is not there
    if "alpha" in given or "beta" in given:
        return None
    if function is F.linear or function in PRODUCTS:
        return spec if spec.kind == "dense" else None
    if function in (F.embedding, T.__getitem__):
        padding = given.get("padding_idx")
        found = spec._replace(padding_index=-1 if padding is None else padding % spec.norm_size)
        return found if spec.kind == "embedding" else None
    if function in NORMS:
        return _norm(NORMS[function], given, spec)
    if spec.kind != "convolution" or given.get("groups", 1) != spec.groups:
        return None
    axes = len(spec.kernel)
    dilation = _each(given.get("dilation", 1), axes)
    return spec._replace(
        stride=_each(given.get("stride", 1), axes),
        padding=paddings(_each(given.get("padding", 0), axes), spec.kernel, dilation),
        dilation=dilation,
        padding_mode="zeros",
    )


def _norm(norm: str, given: Mapping[str, Any], spec: LayerSpec) -> LayerSpec | None:
    if spec.norm != norm or (norm == "batch" and not given.get("training", False)):
        return None
    size = spec.norm_size
    if norm in ("layer", "rms"):
        size = len(given["normalized_shape"])
    elif norm == "group":
        size = given["num_groups"]
    return spec._replace(norm_size=size, eps=given.get("eps", None if norm == "rms" else 1e-5))


def _each(value: Any, axes: int) -> Any:
    """What functions take for all axes, for each; words as they are."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return (value,) * axes
    return tuple(value) * axes if len(value) == 1 else tuple(value)


def behind(ndim: int) -> Axes | None:
    """Of products with a weight as the left factor: features are before the last axis."""
    if ndim < 2:
        return None
    axes = (*range(ndim - 2), ndim - 1, ndim - 2)
    return Axes(axes, axes, (1, 1))


def keeps_order(function: Any, args: Any) -> bool:
    """Whether it returns all of its argument's numbers, in their order."""
    if function is T.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        # By its parts: a slice that ends at a length is not to fix that for torch.compile.
        parts = [(i.start, i.stop, i.step) if isinstance(i, slice) else (i,) for i in index]
        return all([all([p is None or p is ... for p in of_one]) for of_one in parts])  # noqa: C419
    return function in RESHAPE


def summed(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of one of the `SUMS` by position, where all that is named are its operands."""
    rest = {name: x for name, x in kwargs.items() if name not in ("input", "other")}
    if rest.get("alpha") == 1:
        del rest["alpha"]
    named = [kwargs[name] for name in ("input", "other") if name in kwargs]
    return (args, kwargs) if rest else ((*args, *named), {})


def rows_of(table: torch.Tensor, index: Any) -> torch.Tensor | None:
    """The numbers of the rows that an index takes; None: it takes something else."""
    if isinstance(index, slice) and table.ndim == 2:
        return torch.arange(len(table), device=table.device)[index]
    if isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32):
        return index % len(table)  # -1 is the last
    return None


def is_transpose(x: Any, weight: torch.Tensor) -> bool:
    """Whether it is a weight's transposed view."""
    return weight.ndim == 2 and are_transposes(x, weight)


def are_transposes(x: Any, matrices: torch.Tensor) -> bool:
    """Whether it is a view of a matrix, or of a stack of them, with the last two axes exchanged."""
    # By its base, for torch.compile does not show `weight.T` to modes.
    if not isinstance(x, torch.Tensor) or x._base is not matrices or not x.ndim == matrices.ndim >= 2:
        return False
    shape, stride = matrices.shape, matrices.stride()
    alike = x.shape == (*shape[:-2], shape[-1], shape[-2])
    return alike and x.stride() == (*stride[:-2], stride[-1], stride[-2])
