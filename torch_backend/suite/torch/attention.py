"""nn.MultiheadAttention with its four products in the open.

The module's own forward calls no layer: weights go into one function, where no hook sees a product.
While K-FAC is attached, forward passes in training run the same mathematics written out here, each
product in a module of its own; all others run torch's forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from suite.torch.recurrent import Product

_KEYS = ("q", "k", "v")


class Attention:
    """Replaces the forward of one nn.MultiheadAttention between `attach` and `detach`."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        self.module = module
        self._products = {key: Product("in_proj_weight", "in_proj_bias") for key in _KEYS} | {
            "out": Product("out_proj.weight", "out_proj.bias")
        }
        for product in self._products.values():
            product.train(module.training)

    def product(self, key: str) -> Product:
        """The module that computes the product 'q', 'k', 'v' or 'out'."""
        return self._products[key]

    def products(
        self,
    ) -> Iterator[tuple[str, Any, Any, int, int | None]]:
        """(key, weight, bias, first row, last row) of each product."""
        module = self.module
        size = module.embed_dim
        for i, key in enumerate(_KEYS):
            if module._qkv_same_embed_dim:
                weight, rows = module.in_proj_weight, (i * size, (i + 1) * size)
            else:
                weight, rows = getattr(module, f"{key}_proj_weight"), (0, None)
            yield key, weight, module.in_proj_bias, *rows
        yield "out", module.out_proj.weight, module.out_proj.bias, 0, None

    def attach(self) -> None:
        # In the instance's __dict__: taking it out restores the class's.
        self.module.forward = self  # type: ignore[method-assign]

    def detach(self) -> None:
        if self.module.__dict__.get("forward") is self:
            del self.module.forward

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As nn.MultiheadAttention's forward, whose documentation holds."""
        module = self.module
        if not module.training or query.is_nested:
            return nn.MultiheadAttention.forward(
                module, query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.ndim == 3
        if not batched or not module.batch_first:
            # Examples first, for products too; one tensor stays one, whose products share a factor.
            given = query, key, value
            query = self._turned(query)
            key = query if given[1] is given[0] else self._turned(key)
            value = key if given[2] is given[1] else self._turned(value)
            if not batched and key_padding_mask is not None:
                key_padding_mask = key_padding_mask[None]
        q, k, v = self._project(query, key, value)
        out, weights = self._attend(q, k, v, key_padding_mask, attn_mask, is_causal, need_weights)
        out = self._products["out"](out, module.out_proj.weight, module.out_proj.bias)
        if not batched:
            out = out[0]
        elif not module.batch_first:
            out = out.transpose(0, 1)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        return out, weights

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        return x[None] if x.ndim == 2 else x.transpose(0, 1)

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> list[torch.Tensor]:
        biases: Any = (None, None, None)
        if self.module.in_proj_bias is not None:
            biases = self.module.in_proj_bias.chunk(3)
        if self.module._qkv_same_embed_dim:
            weights: Any = self.module.in_proj_weight.chunk(3)
        else:
            weights = [getattr(self.module, f"{name}_proj_weight") for name in _KEYS]
        given = query, key, value
        # torch 2.6's compiler takes no strict zip where a layer's hook ends a graph.
        return [self._products[k](given[i], weights[i], biases[i]) for i, k in enumerate(_KEYS)]

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_padding_mask: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(batch, target, embed) from projected (batch, length, embed); weights by head, if wanted."""
        module = self.module
        batch = q.shape[0]
        extra = 0
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat([k, module.bias_k.expand(batch, -1, -1)], dim=1)
            v = torch.cat([v, module.bias_v.expand(batch, -1, -1)], dim=1)
            extra += 1
        if module.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        heads, width = module.num_heads, module.head_dim
        q, k, v = (t.reshape(batch, t.shape[1], heads, width).transpose(1, 2) for t in (q, k, v))
        mask = _mask(attn_mask, key_padding_mask, batch, heads, extra, q.dtype)
        dropout = module.dropout if module.training else 0.0
        if not need_weights:
            # As in torch: the hint takes the place of the mask, also beside `extra` sources.
            causal = is_causal and key_padding_mask is None
            out = F.scaled_dot_product_attention(
                q, k, v, None if causal else mask, dropout, is_causal=causal
            )
            return out.transpose(1, 2).flatten(2), None
        scores = (q / math.sqrt(width)) @ k.mT
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout)
        return (weights @ v).transpose(1, 2).flatten(2), weights


def _mask(
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    batch: int,
    heads: int,
    extra: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """One mask to add to (batch, heads, target, source) scores; the `extra` last sources are open."""
    total = None
    if attn_mask is not None:
        total = _additive(attn_mask, dtype)
        if total.ndim == 3:
            total = total.reshape(batch, heads, *total.shape[1:])
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, dtype)[:, None, None, :]
        total = padding if total is None else total + padding
    return total if total is None or not extra else F.pad(total, (0, extra))


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
