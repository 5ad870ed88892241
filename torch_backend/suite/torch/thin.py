"""With fewer rows than dimensions a direction costs less from the rows than from the gradient they make.

Of a linear layer ∇ = Σ g aᵀ, so that G⁻¹ ∇ A⁻¹ = Σ (G⁻¹ g) (A⁻¹ a)ᵀ: for n rows n (d_out² + d_in² +
d_out d_in) multiplications in place of d_out d_in (d_out + d_in). The rows stand for the gradient only
while it is what backward passes made, or a multiple of it, and both must have one direction on random
vectors (`suite.core.kfac.rows_fit`); else the gradient itself is used.
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
_ROUNDINGS = 8  # of a number that is multiplied once or twice, by which its quotients differ, at most
_LOOKS = 8  # rows and columns of a gradient that are looked at for what has been done to it


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


class _Made(NamedTuple):
    """What backward passes, one after the other, have made of a parameter's gradient."""

    place: int
    version: int
    numbers: torch.Tensor  # some of its own
    passes: int

    def goes_on_in(self, gradient: torch.Tensor) -> bool:
        """Whether one more pass has added to it, and nothing else has changed it."""
        return (gradient.data_ptr(), gradient._version) == (self.place, self.version + 1)

    def factor(self, gradient: torch.Tensor) -> float | None:
        """What it has been multiplied with since, as clipping does; None: something else was done."""
        if gradient.data_ptr() != self.place:
            return None
        if gradient._version == self.version:
            return 1.0
        before, now = self.numbers.double(), _some_of(gradient).double()
        largest = before.abs().argmax()
        factor = now.flatten()[largest] / before.flatten()[largest]
        error = _ROUNDINGS * torch.finfo(gradient.dtype).eps * now.abs()
        return factor.item() if bool(((now - factor * before).abs() <= error).all()) else None


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
        self.pairs: list[_Pair] | None = []  # of passes that came to the weight; None: they are too many
        self.passing: list[_Pair] | None = []  # of the pass that runs, until it comes there
        self.task = -1  # its number
        self.missed = False  # whether a pass came to the weight of which there are no rows
        self.made: dict[int, _Made] = {}  # by parameter

    def probe(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y`, whose gradient will be kept with `x`, if that may pay."""
        if y.dtype != self.layer.dtype or self.refusals >= _REFUSALS or torch.jit.is_tracing():
            return y
        if not is_cheaper_by_rows(_rows(x), *self.layer.sizes):
            return y
        kept: torch.Tensor = _Keep.apply(y, x, self)
        return kept

    def add(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep a call's rows, as long as they are few."""
        if self.clock.sampling or self.missed:
            return
        now = torch._C._current_graph_task_id()
        if self.task != now:  # the one before, if it left rows here, was not about the weight
            self.task, self.passing = now, []
        try:
            pair = _Pair(x.detach(), gradient.detach(), x._version, gradient._version)
        except RuntimeError:  # a batch of gradients (`is_grads_batched`) cannot be kept
            self.passing = None
            return
        self.passing = self._few(self.passing, [pair])

    def _few(self, earlier: list[_Pair] | None, more: list[_Pair] | None) -> list[_Pair] | None:
        """Both, if they are not too many."""
        if earlier is None or more is None:
            return None
        both = [*earlier, *more]
        few = is_cheaper_by_rows(sum(_rows(pair.x) for pair in both), *self.layer.sizes)
        return both if few else None

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not (self.passing or self.pairs):
            self.missed = True  # the gradient may have this pass in it from now on
            return
        gradient, before = parameter.grad, self.made.pop(id(parameter), None)
        passes = 1
        if gradient is not None and before is not None and before.goes_on_in(gradient):
            passes += before.passes
        if parameter is self.layer.weight.parameter:
            self.pairs = self._few(self.pairs if passes > 1 else [], self.passing)
            self.passing = []
        if gradient is not None:  # a hook before this one may have used it up
            numbers = _some_of(gradient).clone()
            self.made[id(parameter)] = _Made(gradient.data_ptr(), gradient._version, numbers, passes)

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(1, n, d_in without bias) inputs and (1, n, d_out) gradients, if they may stand for ∇."""
        pairs, made = self.pairs, self.made
        self.forget()
        if not pairs:
            return None
        factors, passes = [], []
        for parameter in self.layer.parameters():
            own = made.get(id(parameter))
            factor = None if own is None or parameter.grad is None else own.factor(parameter.grad)
            if own is None or factor is None:
                return None
            factors.append(factor)
            passes.append(own.passes)
        if any((p.x._version, p.g._version) != (p.x_version, p.g_version) for p in pairs):
            return None
        factor, error = factors[0], _ROUNDINGS * torch.finfo(self.layer.dtype).eps
        if len({*passes}) > 1 or any(abs(other - factor) > error * abs(factor) for other in factors):
            return None
        g = _joined([p.g for p in pairs])
        return _joined([p.x for p in pairs]), g if factor == 1 else g * factor

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


def _some_of(x: torch.Tensor) -> torch.Tensor:
    """A view of some numbers of a matrix, from all over it, always the same ones; all of a vector's."""
    if x.ndim == 1:
        return x.detach()
    return x.detach()[tuple(slice(None, None, -(-n // _LOOKS)) for n in x.shape)]


def _rows(x: torch.Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [x.reshape(1, -1, x.shape[-1]) for x in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
