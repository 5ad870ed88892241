"""With fewer rows than dimensions a direction costs less from the rows than from the gradient they make.

Of a linear layer ∇ = Σ g aᵀ, so that G⁻¹ ∇ A⁻¹ = Σ (G⁻¹ g) (A⁻¹ a)ᵀ: for n rows n (d_out² + d_in² +
d_out d_in) multiplications in place of d_out d_in (d_out + d_in). The rows stand for the gradient only
while it is what one backward pass made, and both must have one direction on random vectors
(`suite.core.kfac.rows_fit`); else the gradient itself is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from suite.core.kfac import is_cheaper_by_rows
from suite.torch.dtensors import is_sharded
from suite.torch.inplace import HOST_DEVICES
from suite.torch.layers import Layer

SMALLEST = 128 * 128 * 256  # multiplications of a direction for which it is worth the hooks
_REFUSALS = 3  # directions that did not fit, after which a layer's rows are not kept any more


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

    @staticmethod
    def jvp(ctx: Any, y: torch.Tensor, x: Any, kept: Any) -> torch.Tensor:
        return y.view_as(y)


class _Pair(NamedTuple):
    x: torch.Tensor
    g: torch.Tensor
    x_version: int
    g_version: int


class KeptRows:
    """Inputs and output gradients of a layer since the last step: do they make its gradient?"""

    def __init__(self, layer: Layer, clock: Any) -> None:
        self.layer, self.clock = layer, clock
        self.refusals = 0
        self.forget()
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in layer.parameters()
        ]

    def forget(self) -> None:
        self.pairs: list[_Pair] = []
        self.made: dict[int, tuple[int, int]] = {}  # by parameter: where its gradient is, its version
        self.passes = 0  # that reached the weight
        self.rows = 0
        self.usable = True

    def probe(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y`, whose gradient will be kept with `x`, if that may pay."""
        if y.dtype != self.layer.dtype or self.refusals >= _REFUSALS or torch.jit.is_tracing():
            return y
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
            self.usable = False
        try:
            if self.usable:
                pair = _Pair(x.detach(), gradient.detach(), x._version, gradient._version)
                self.pairs.append(pair)
        except RuntimeError:  # a batch of gradients (`is_grads_batched`) cannot be kept
            self.usable = False
        if not self.usable:
            self.pairs.clear()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self.passes += parameter is self.layer.weight.parameter
        if parameter.grad is not None:  # a hook before this one may have used it up
            self.made[id(parameter)] = parameter.grad.data_ptr(), parameter.grad._version

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(1, n, d_in without bias) inputs and (1, n, d_out) gradients, if they may stand for ∇."""
        pairs, made, passes, usable = self.pairs, self.made, self.passes, self.usable
        self.forget()
        if not pairs or passes != 1 or not usable:
            return None
        for parameter in self.layer.parameters():
            gradient = parameter.grad
            if gradient is None or made.get(id(parameter)) != (gradient.data_ptr(), gradient._version):
                return None
        if any((p.x._version, p.g._version) != (p.x_version, p.g_version) for p in pairs):
            return None
        return _joined([p.x for p in pairs]), _joined([p.g for p in pairs])

    def refuse(self) -> None:
        """The rows were not those of the gradient: the weight is used elsewhere, too, or regularized."""
        self.refusals += 1


def can_be_thin(layer: Layer) -> bool:
    """Whether a layer is large, and all of its gradient comes from rows that its hooks see."""
    d_in, d_out = layer.sizes
    return (
        layer.spec.kind == "dense"
        and d_in * d_out * (d_in + d_out) >= SMALLEST
        and layer.layout == "matrix"
        and layer.blocks == 1
        and layer.diagonal == (False, False)
        and layer.device.type in HOST_DEVICES  # it has to see whether rows fit the gradient
        and layer.dtype in (torch.float32, torch.float64)
        and not any(is_sharded(parameter) for parameter in layer.parameters())
        and not layer.tensor_split
        and len(layer.sites) == 1
        and not layer.sites[0].scaling
        and not layer.sites[0].functional
        and layer.weight.stop is None
        and (layer.bias is None or layer.bias.stop is None)
        and layer.sizes[0] == layer.weight.shape[1] + (layer.bias is not None)
    )


def _rows(x: torch.Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [x.reshape(1, -1, x.shape[-1]) for x in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
