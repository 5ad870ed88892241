"""With fewer rows than dimensions a direction costs less from the rows than from the gradient they make.

Of a linear layer ∇ = Σ g aᵀ, so that G⁻¹ ∇ A⁻¹ = Σ (G⁻¹ g) (A⁻¹ a)ᵀ: for n rows n (d_out² + d_in² +
d_out d_in) multiplications in place of d_out d_in (d_out + d_in). The rows stand for the gradient only
while it is what one backward pass made of them; whatever else is done to it, it is used itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from suite.core.kfac import is_cheaper_by_rows, rows_make_gradient
from suite.torch.layers import Layer

SMALLEST = 128 * 128 * 256  # multiplications of a direction for which it is worth the hooks
HOST_DEVICES = ("cpu",)  # elsewhere the host would have to wait to see whether rows fit the gradient


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, x: torch.Tensor, kept: KeptRows) -> torch.Tensor:
        ctx.kept = kept
        ctx.save_for_backward(x)  # not in `kept`: under checkpointing it is made again
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.kept.add(x, gradient)
        return gradient, None, None


class _Pair(NamedTuple):
    x: torch.Tensor
    g: torch.Tensor
    x_version: int
    g_version: int


class KeptRows:
    """Inputs and output gradients of a layer since the last step: do they make its gradient?"""

    def __init__(self, layer: Layer, clock: Any) -> None:
        self.layer, self.clock = layer, clock
        self.pairs: list[_Pair] = []
        self.made: dict[int, tuple[torch.Tensor, int]] = {}  # by parameter: gradient and its version
        self.passes = 0  # that reached the weight
        self.rows = 0
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in layer.parameters()
        ]

    def probe(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y`, whose gradient will be kept with `x`, if that may pay."""
        if not is_cheaper_by_rows(_rows(x), *self.layer.sizes):
            return y
        kept: torch.Tensor = _Keep.apply(y, x, self)
        return kept

    def add(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep a call's rows, as long as they are few and of one pass."""
        if self.clock.sampling:
            return
        self.rows += _rows(x)
        if self.passes or not is_cheaper_by_rows(self.rows, *self.layer.sizes):
            self.pairs.clear()
        else:
            self.pairs.append(_Pair(x.detach(), gradient.detach(), x._version, gradient._version))

    def forget(self) -> None:
        self.pairs, self.made, self.passes, self.rows = [], {}, 0, 0

    def _accumulated(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.made[id(parameter)] = gradient, gradient._version
        self.passes += parameter is self.layer.weight.parameter

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(1, n, d_in without bias) inputs and (1, n, d_out) gradients, if they can stand for ∇."""
        pairs, made, passes, rows = self.pairs, self.made, self.passes, self.rows
        self.forget()
        if not pairs or passes != 1 or sum(_rows(pair.x) for pair in pairs) != rows:
            return None
        for parameter in self.layer.parameters():
            gradient, version = made.get(id(parameter), (None, 0))
            if gradient is None or parameter.grad is not gradient or gradient._version != version:
                return None
        if any((p.x._version, p.g._version) != (p.x_version, p.g_version) for p in pairs):
            return None
        inputs, outputs = (
            _joined(parts, self.layer.dtype) for parts in ([p.x for p in pairs], [p.g for p in pairs])
        )
        weight, bias = (None if p is None else p.grad() for p in (self.layer.weight, self.layer.bias))
        assert weight is not None
        made_of = rows_make_gradient(inputs, outputs, weight[None], None if bias is None else bias[None])
        return (
            (inputs, outputs) if bool(made_of.all()) else None
        )  # else the weight is used elsewhere, too


def can_be_thin(layer: Layer) -> bool:
    """Whether a layer is large, and all of its gradient comes from rows that its hooks see."""
    d_in, d_out = layer.sizes
    return (
        layer.spec.kind == "dense"
        and d_in * d_out * (d_in + d_out) >= SMALLEST
        and layer.layout == "matrix"
        and layer.blocks == 1
        and layer.diagonal == (False, False)
        and layer.device.type in HOST_DEVICES
        and not layer.tensor_split
        and len(layer.sites) == 1
        and not layer.sites[0].scaling
        and layer.weight.stop is None
        and (layer.bias is None or layer.bias.stop is None)
        and layer.sizes[0] == layer.weight.shape[1] + (layer.bias is not None)
    )


def taken(kept: Mapping[int, KeptRows]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """`KeptRows.take` of layers, where there is something."""
    found = {i: rows.take() for i, rows in kept.items()}
    return {i: rows for i, rows in found.items() if rows is not None}


def _rows(x: torch.Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    flat = [x.reshape(1, -1, x.shape[-1]).to(dtype) for x in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
