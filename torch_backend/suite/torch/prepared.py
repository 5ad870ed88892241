"""What stands for a call's input and its output's gradient where a layer's weight is made of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from suite.core import linalg
from suite.torch.kinds import made_by, spectral_norm_of
from suite.torch.layers import Site
from suite.torch.rows import bag_second_moments


def prepared(
    site: Site, x: torch.Tensor, y: torch.Tensor, args: Any, kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What stands for the input in the sums, and what the output's gradient is multiplied with."""
    module: Any = site.module
    if site.spec.kind == "bag":
        names = ("input", "offsets", "per_sample_weights")
        given = dict(zip(names, args, strict=False)) | kwargs
        moments = _bag(module, given["input"], given.get("offsets"), given.get("per_sample_weights"))
        return moments, None
    shape = (-1,) if isinstance(module, nn.Linear) else (-1, *(1,) * len(module.kernel_size))
    if "weight" in module._parameters:  # nothing makes it any more
        return (y if site.scaling == "magnitude" else x), None
    if site.scaling == "magnitude":
        # What the magnitude scales. Not the output divided by it: it may be zero.
        direction = _weight_norm(module)[1]
        lengths = linalg.row_norms(direction)
        unit = direction / lengths.reshape(-1, *(1,) * (direction.ndim - 1))
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(unit.dtype)  # at least single precision, as lengths are
            if isinstance(module, nn.Linear):
                return nn.functional.linear(x, unit), None
            return module._conv_forward(x, unit, None), None
    if site.scaling == "pruned":  # entries that a mask leaves out move to no effect
        return x, None
    if site.scaling == "spectral_norm":
        return x, 1 / _spectral_norm(module)
    if site.scaling in ("scaled rows", "scaled columns"):
        stack = module.parametrizations.weight
        weights = made_by(stack, stack.original), stack.original
        if site.scaling == "scaled columns":
            made, own = (linalg.row_norms(weight.mT) for weight in weights)
            return x * (made / own), None
        made, own = map(linalg.row_norms, weights)
        return x, (made / own).reshape(shape)
    magnitude, direction = _weight_norm(module)
    if site.scaling == "weight_norm of inputs":  # torch's dim=0 of a transposed convolution
        scale = magnitude.reshape(-1) / linalg.row_norms(direction)
        return x * scale.reshape(shape), None
    if site.scaling == "weight_norm":
        return x, (magnitude.reshape(-1) / linalg.row_norms(direction)).reshape(shape)
    # Magnitudes of columns, or one of all: what rows have of them is how much longer they are.
    return x, linalg.normed_row_scales(direction, magnitude).reshape(shape)


def _weight_norm(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(magnitudes, directions) of torch's old or new weight_norm."""
    if hasattr(module, "weight_g"):
        return module.weight_g, module.weight_v
    stack = module.parametrizations.weight
    return stack.original0, stack.original1


def _spectral_norm(module: Any) -> torch.Tensor:
    """σ as torch's old or new spectral_norm had it; asking would run another power iteration."""
    hook = spectral_norm_of(module)
    if hook is not None:
        weight, dim, u, v = module.weight_orig, hook.dim, module.weight_u, module.weight_v
    else:
        stack = module.parametrizations.weight
        weight, dim, u, v = stack.original, stack[0].dim, stack[0]._u, stack[0]._v
    sigma: torch.Tensor = linalg.bilinear(u, weight.movedim(dim, 0).flatten(1), v)
    return sigma


def _bag(
    module: nn.EmbeddingBag, indices: torch.Tensor, offsets: Any, weights: torch.Tensor | None
) -> torch.Tensor:
    """The second moments of a bag's input, see `rows.bag_second_moments`."""
    flat = indices.reshape(-1)
    if indices.ndim == 2:
        count = indices.shape[0]
        bags = torch.arange(count, device=flat.device).repeat_interleave(indices.shape[1])
    else:
        ends = offsets[1:] if not module.include_last_offset else offsets[1:-1]
        count = len(ends) + 1
        bags = torch.bucketize(torch.arange(len(flat), device=flat.device), ends, right=True)
    dtype = torch.promote_types(module.weight.dtype, torch.float32)
    share = torch.ones_like(flat, dtype=dtype) if weights is None else weights.reshape(-1).to(dtype)
    if module.padding_idx is not None:
        share = share * (flat != module.padding_idx)
    if module.mode == "mean":
        real = (
            torch.ones_like(share)
            if module.padding_idx is None
            else (flat != module.padding_idx).to(dtype)
        )
        sizes = torch.zeros(count, dtype=dtype, device=flat.device).index_add_(0, bags, real)
        share = share / sizes.clamp_(min=1)[bags]
    return bag_second_moments(flat, bags, share, len(module.weight))
