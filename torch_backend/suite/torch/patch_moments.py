"""Second moments of a convolution's patches, in compiled graphs as one operation.

How `suite.core.correlations` goes about them depends on the image's size, which a graph for any size has
no number for: traced through, each size would be compiled anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from suite.core import correlations

_SCHEMA = (
    "(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, int groups, bool bias)"
    " -> Tensor"
)


@torch.library.custom_op("suite::patch_second_moment_sum", mutates_args=(), schema=_SCHEMA)
def _in_graph(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    bias: bool,
) -> torch.Tensor:
    pairs = list(zip(padding[::2], padding[1::2], strict=True))
    with torch.autocast(x.device.type, enabled=False):
        found = correlations.second_moment_sum(x, kernel, stride, pairs, dilation, groups, bias=bias)
    return found.contiguous()


@_in_graph.register_fake
def _(x: torch.Tensor, kernel: Sequence[int], *rest: Any) -> torch.Tensor:
    *_, groups, bias = rest
    side = x.shape[1] // groups * math.prod(kernel) + int(bias)
    return x.new_empty((groups, side, side), dtype=torch.promote_types(x.dtype, torch.float32))


def patch_second_moment_sum(
    x: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    groups: int,
    bias: bool,
) -> torch.Tensor:
    """`correlations.second_moment_sum`, whose arguments these are."""
    if torch.compiler.is_compiling():
        flat = [side for pair in padding for side in pair]
        found: torch.Tensor = _in_graph(
            x, list(kernel), list(stride), flat, list(dilation), groups, bias
        )
        return found
    return correlations.second_moment_sum(x, kernel, stride, padding, dilation, groups, bias=bias)
