"""Which layers K-FAC preconditions, and how each becomes rows and a gradient matrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from suite.core import patches
from suite.core.routing import Route, Routing, describe_factors

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LayerSpec(NamedTuple):
    """What turns a layer's tensors into rows: plain values, so that `torch.compile` can trace it."""

    groups: int
    bias: bool  # whether inputs get a coordinate 1 for the bias
    diagonal: tuple[bool, bool]  # of (A, G)
    kernel: tuple[int, ...]  # () for a dense layer
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    padding_mode: str


@dataclass(frozen=True)
class Layer:
    """One preconditioned layer: `spec.groups` blocks with factors of sides (d_in, d_out)."""

    name: str
    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None  # None when it has none or it is frozen
    sizes: tuple[int, int]
    spec: LayerSpec

    def gradient_matrix(self) -> torch.Tensor:
        """(groups, d_out, d_in): the weight's gradient, the bias's as its last column."""
        assert self.weight.grad is not None
        groups = self.spec.groups
        matrix = self.weight.grad.reshape(groups, self.sizes[1], -1)
        if self.bias is not None and self.bias.grad is not None:
            column = self.bias.grad.reshape(groups, self.sizes[1], 1)
            matrix = torch.cat([matrix, column.to(matrix.dtype)], dim=-1)
        elif self.spec.bias:
            matrix = torch.cat([matrix, torch.zeros_like(matrix[..., :1])], dim=-1)
        return matrix

    def write_gradient(self, matrix: torch.Tensor) -> None:
        """Put (groups, d_out, d_in) into the gradients' own storage."""
        assert self.weight.grad is not None
        width = matrix.shape[-1] - self.spec.bias
        self.weight.grad.copy_(matrix[..., :width].reshape(self.weight.shape))
        if self.bias is not None and self.bias.grad is not None:
            self.bias.grad.copy_(matrix[..., -1].reshape(self.bias.shape))


def input_rows(x: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """(groups, rows, d_in without bias) of a layer's input."""
    if not spec.kernel:
        return x.reshape(1, -1, x.shape[-1])
    if x.ndim == len(spec.kernel) + 1:  # no batch axis
        x = x[None]
    padding = spec.padding
    if spec.padding_mode != "zeros":
        # functional.pad takes the last axis first
        flat = [side for pair in reversed(padding) for side in pair]
        x = nn.functional.pad(x, flat, mode=spec.padding_mode)
        padding = ((0, 0),) * len(padding)
    return patches.patches(x, spec.kernel, spec.stride, padding, spec.dilation, spec.groups)


def output_rows(gradient: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """(groups, rows, d_out) of the gradient of a layer's output."""
    if not spec.kernel:
        return gradient.reshape(1, -1, gradient.shape[-1])
    if gradient.ndim == len(spec.kernel) + 1:
        gradient = gradient[None]
    return patches.output_rows(gradient, spec.groups)


def find_layers(
    model: nn.Module, skip_layers: Sequence[str], max_factor_size: int
) -> tuple[list[Layer], Routing]:
    """All layers of `model` that K-FAC covers, and the treatment of every parameter."""
    patterns = [re.compile(pattern) for pattern in skip_layers]
    owners: dict[int, list[str]] = {}
    for module_name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module_name)
    layers: list[Layer] = []
    routes: dict[int, Route] = {}
    skipped: set[str] = set()
    attention: set[str] = set()
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, nn.MultiheadAttention) or (name and parent in attention):
            attention.add(name)
        if (name and parent in skipped) or any(
            p.search(name) or p.search(type(module).__name__) for p in patterns
        ):
            skipped.add(name)
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        reason = _why_not(name, module, own, owners, skipped, attention)
        shared = "bias" in own and len(owners[id(own["bias"])]) > 1
        layer = None if reason else _make_layer(name, module, max_factor_size, shared)
        if layer is not None:
            layers.append(layer)
        for key, parameter in own.items():
            if id(parameter) in routes:
                continue
            full = f"{name}.{key}" if name else key
            shape = tuple(parameter.shape)
            if layer is not None and (parameter is layer.weight or parameter is layer.bias):
                factors = describe_factors(layer.sizes, layer.spec.diagonal)
                if layer.spec.groups > 1:
                    factors = f"{layer.spec.groups} x ({factors})"
                large = any(layer.spec.diagonal)
                why = type(module).__name__
                why += f"; a side above max_factor_size={max_factor_size} is diagonal" if large else ""
                routes[id(parameter)] = Route(full, shape, "kfac", factors, why)
            elif not parameter.requires_grad:
                routes[id(parameter)] = Route(full, shape, "frozen", "", "requires_grad is False")
            else:
                why = reason or "its layer's weight is preconditioned without it"
                routes[id(parameter)] = Route(full, shape, "plain", "", why)
    return layers, Routing(tuple(routes.values()))


def _why_not(
    name: str,
    module: nn.Module,
    own: dict[str, nn.Parameter],
    owners: dict[int, list[str]],
    skipped: set[str],
    attention: set[str],
) -> str:
    """Why a module with parameters keeps its plain gradient; '' if K-FAC covers it."""
    kind = next((k for k in (nn.Linear, *_CONVOLUTIONS) if isinstance(module, k)), None)
    if name in skipped:
        return "named by skip_layers"
    if kind is None:
        return f"{type(module).__name__} is not a kind of layer K-FAC covers here"
    if name in attention:
        return "nn.MultiheadAttention reads this weight without calling the layer"
    if type(module).forward is not kind.forward:
        return f"{type(module).__name__} has a forward of its own"
    if "weight" not in own:
        return f"the weight of this {kind.__name__} is computed (parametrized), not a parameter"
    weight = own["weight"]
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"layer {name!r} is lazy and has no shape yet: run one forward pass before attaching K-FAC"
        )
    if not weight.requires_grad:
        return "the layer's weight is frozen"
    if weight.numel() == 0:
        return "empty"
    if weight.is_complex():
        return "complex parameters are not covered"
    others = [owner for owner in owners[id(weight)] if owner != name]
    if others:
        return f"its weight is shared with {', '.join(repr(o) for o in others)}"
    return ""


def _make_layer(name: str, module: nn.Module, max_factor_size: int, bias_is_shared: bool) -> Layer:
    weight = module.get_parameter("weight")
    bias = module._parameters.get("bias")
    bias = bias if bias is not None and bias.requires_grad and not bias_is_shared else None
    groups = 1
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    mode = "zeros"
    if isinstance(module, _CONVOLUTIONS):
        groups, mode = module.groups, module.padding_mode
        kernel, stride = tuple(module.kernel_size), tuple(module.stride)
        dilation = tuple(module.dilation)
        padding = _padding(module)
    d_out = weight.shape[0] // groups
    d_in = weight.numel() // weight.shape[0] + (bias is not None)
    diagonal = (d_in > max_factor_size, d_out > max_factor_size)
    spec = LayerSpec(groups, bias is not None, diagonal, kernel, stride, padding, dilation, mode)
    return Layer(name, module, weight, bias, (d_in, d_out), spec)


def _padding(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """(before, after) per axis; 'same' puts the odd one after, as torch does."""
    given = module.padding
    assert isinstance(module.kernel_size, tuple)
    assert isinstance(module.dilation, tuple)
    if given == "valid":
        return ((0, 0),) * len(module.kernel_size)
    if given == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    assert isinstance(given, tuple)
    return tuple((side, side) for side in given)
