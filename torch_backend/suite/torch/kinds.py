"""Which kinds of modules K-FAC knows, how they scale their weights, and why others are left alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm

from suite.torch.dtensors import is_sharded
from suite.torch.layers import CONVOLUTIONS, TRANSPOSED
from suite.torch.recurrent import WRITTEN_OUT
from suite.torch.rows import LayerSpec

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *_BATCH_NORMS, *_INSTANCE_NORMS)
KINDS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, nn.Embedding, nn.EmbeddingBag, *NORMS)
# Whose functions `functional.py` knows, so that subclasses may have a forward of their own.
FUNCTIONS = (
    nn.Linear,
    *CONVOLUTIONS,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    *_BATCH_NORMS,
)
RECURRENT = tuple(WRITTEN_OUT.values())
HIDDEN = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear, nn.SyncBatchNorm)


def norm_spec(module: nn.Module, reduce: bool) -> LayerSpec:
    """The spec of a normalization layer."""
    eps: Any = module.eps
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        norm = "layer" if isinstance(module, nn.LayerNorm) else "rms"
        size = len(module.normalized_shape)
        return LayerSpec("norm", norm=norm, norm_size=size, eps=eps, reduce=reduce)
    if isinstance(module, nn.GroupNorm):
        groups = module.num_groups
        return LayerSpec("norm", norm="group", norm_size=groups, eps=eps, channel_axis=1, reduce=reduce)
    norm = "batch" if isinstance(module, _BATCH_NORMS) else "instance"
    axis = channel_axis(module)
    return LayerSpec("norm", norm=norm, eps=eps, channel_axis=axis, reduce=reduce)


def channel_axis(module: nn.Module) -> int:
    """Where an output has its channels, counted from the end where a batch axis may be missing."""
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        return -1 - len(module.kernel_size)
    if isinstance(module, _INSTANCE_NORMS):
        return -2 - _INSTANCE_NORMS.index(next(k for k in _INSTANCE_NORMS if isinstance(module, k)))
    return 1 if isinstance(module, (nn.GroupNorm, *_BATCH_NORMS)) else -1


def forward_of_its_own(module: nn.Module) -> bool:
    """Whether a module of a known kind runs something else than its kind does."""
    kind = next(k for k in KINDS if isinstance(module, k))
    return type(module).forward is not kind.forward or "forward" in vars(module)


def is_linear_by_another_name(module: nn.Module, own: Mapping[str, nn.Parameter]) -> bool:
    """Whether it is transformers' `Conv1D`: GPT-2's linear layers, which are no subclass of torch's."""
    if type(module).__name__ != "Conv1D" or own.keys() != {"weight", "bias"}:
        return False
    weight, bias = own["weight"], own["bias"]
    return weight.ndim == 2 and bias.shape == weight.shape[1:] and getattr(module, "nf", 0) == len(bias)


def parametrization(
    module: nn.Module,
) -> tuple[nn.Parameter | None, nn.Parameter | None, str]:
    """(what has the weight's shape, the magnitudes, how they scale) of a known parametrization."""
    own = dict(module.named_parameters(recurse=False))  # which hooks may compute in turn
    if "weight_v" in own and "weight_g" in own:  # nn.utils.weight_norm
        return _normed(own["weight_v"], own["weight_g"])
    hooked = _scaling_by_hooks(module)
    if hooked and "weight_orig" in own:
        return own["weight_orig"], None, hooked
    parametrizations: Any = getattr(module, "parametrizations", None)
    if parametrizations is None or set(parametrizations) != {"weight"}:
        return None, None, ""
    stack = parametrizations["weight"]
    kind = type(stack[0]).__name__ if len(stack) == 1 else ""
    if kind == "_WeightNorm":
        return _normed(stack.original1, stack.original0)
    if kind == "_SpectralNorm":
        return stack.original, None, "spectral_norm"
    scaling = _scaling_of_functions(stack)
    return (stack.original, None, scaling) if scaling else (None, None, "")


def made_by(stack: Any, weight: torch.Tensor) -> torch.Tensor:
    """What the functions of a `ParametrizationList` make of a weight."""
    for function in stack:
        weight = function(weight)
    return weight


def _scaling_of_functions(stack: Any) -> str:
    """What parametrizations without state scale of a weight, as those of nGPT's or StyleGAN's layers."""
    original = getattr(stack, "original", None)
    has_state = any(True for part in stack for _ in (*part.parameters(), *part.buffers()))
    if original is None or has_state:
        return ""
    return scaling_of_function(lambda weight: made_by(stack, weight), original)


def scaling_of_function(function: Callable[[torch.Tensor], Any], weight: torch.Tensor) -> str:
    """What a function scales of a weight: 'scaled rows', 'scaled columns'; '': something else.

    It is tried on random weights of two lengths.
    """
    if weight.ndim < 2 or weight.is_meta:
        return ""
    generator = torch.Generator("cpu").manual_seed(0)
    random = torch.randn(weight.shape, generator=generator, device="cpu").to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            ratios = [function(weight) / weight for weight in (random, 3 * random)]
    except Exception:  # whatever it does with a weight that is not its own
        return ""
    if any(ratio.shape != random.shape for ratio in ratios):
        return ""
    if all(_is_even(ratio, tuple(range(1, ratio.ndim))) for ratio in ratios):
        return "scaled rows"
    return "scaled columns" if random.ndim == 2 and all(_is_even(x, (0,)) for x in ratios) else ""


def _is_even(ratio: torch.Tensor, axes: tuple[int, ...]) -> bool:
    """Whether it is above 0 and, along the axes, the same but for rounding."""
    least, most = ratio.amin(axes), ratio.amax(axes)
    rounding = 64 * torch.finfo(ratio.dtype).eps
    return bool(((least > 0) & (most - least <= rounding * most)).all())


def spectral_norm_of(module: nn.Module) -> SpectralNorm | None:
    """The hook of torch.nn.utils' older spectral_norm that makes a module's weight, if there is one."""
    hooks = module._forward_pre_hooks.values()
    return next((h for h in hooks if isinstance(h, SpectralNorm) and h.name == "weight"), None)


def _scaling_by_hooks(module: nn.Module) -> str:
    """How a known hook that makes the weight of `weight_orig` scales it; '': there is none."""
    masks = [
        hook
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == "weight"
    ]
    if any(type(hook).apply_mask is not BasePruningMethod.apply_mask for hook in masks):
        return ""
    if spectral_norm_of(module) is not None:
        return "" if masks else "spectral_norm"
    return "pruned" if masks else ""


def _normed(direction: Any, magnitude: Any) -> tuple[nn.Parameter | None, nn.Parameter | None, str]:
    """weight_norm; its magnitudes are known where there is one for each row of the weight."""
    rows = direction.shape[0]
    if magnitude.ndim == direction.ndim and magnitude.shape[0] == magnitude.numel() == rows:
        return direction, magnitude, "weight_norm"
    return direction, None, "weight_norm by columns"


def why_not(parameter: nn.Parameter, *, by_entries: bool = False) -> str:
    """Why a parameter cannot be preconditioned; '' if it can.

    Args:
        by_entries: whether it has a diagonal, as complex ones may have of their parts.
    """
    if not parameter.requires_grad:
        return "frozen"
    if parameter.numel() == 0:
        return "empty"
    if parameter.is_complex() and is_sharded(parameter):
        return "sharded complex parameters are not covered"
    if parameter.is_complex() and not by_entries:
        return "complex weights of layers are not covered"
    return ""


def why_not_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> str:
    if module.sparse:
        raise ValueError(
            f"layer {name!r} has sparse gradients (sparse=True), which K-FAC cannot precondition: "
            "use sparse=False, or name it in skip_layers"
        )
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq makes its gradient another loss's"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "a maximum over a bag is no product"
    return ""


def why_hidden(module: nn.Module) -> str:
    for base in WRITTEN_OUT:
        kind = base.__name__
        if type(module) is base:
            return f"nn.{kind} hides its steps: use suite.torch.{kind}, or replace_recurrent(model)"
        if isinstance(module, base):
            return f"a subclass of nn.{kind} hides its steps: derive it from suite.torch.{kind}"
    return f"{type(module).__name__} is not a kind of layer K-FAC covers"
