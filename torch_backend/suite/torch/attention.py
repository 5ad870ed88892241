"""Attention with its four products in the open: nn.MultiheadAttention, and the function that it calls.

The module's own forward calls no layer: weights go into one function, where no hook sees a product.
While K-FAC is attached, forward passes in training run the same mathematics written out here, each
product in a module of its own; all others run torch's forward. Modules that give weights of layers to
that function themselves (fairseq's attention, WavLM's, CLIP's pooling) get it written out where a step
takes statistics (`functional.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from suite.torch.recurrent import Product

_KEYS = ("q", "k", "v")
ARGUMENTS = tuple(inspect.signature(F.multi_head_attention_forward).parameters)


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
        swapped = module.batch_first and query.ndim == 3
        if not module.training or not _fit(
            query, key, value, attn_mask, key_padding_mask, module.num_heads, module.embed_dim, swapped
        ):
            return nn.MultiheadAttention.forward(
                module, query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        with_each = self._weights_and_biases()

        def project(name: str, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self._products[name](x, *with_each[name])
            return found

        return attention(
            project,
            query,
            key,
            value,
            heads=module.num_heads,
            batch_first=module.batch_first,
            bias_k=module.bias_k,
            bias_v=module.bias_v,
            add_zero_attn=module.add_zero_attn,
            dropout=module.dropout,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )

    def _weights_and_biases(self) -> dict[str, tuple[Any, Any]]:
        module = self.module
        biases: Any = (None, None, None)
        if module.in_proj_bias is not None:
            biases = module.in_proj_bias.chunk(3)
        if module._qkv_same_embed_dim:
            weights: Any = module.in_proj_weight.chunk(3)
        else:
            weights = [getattr(module, f"{name}_proj_weight") for name in _KEYS]
        # torch 2.6's compiler takes no strict zip where a layer's hook ends a graph.
        found = {name: (weights[i], biases[i]) for i, name in enumerate(_KEYS)}
        found["out"] = module.out_proj.weight, module.out_proj.bias
        return found


def attention(
    project: Callable[[str, torch.Tensor], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    heads: int,
    batch_first: bool,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout: float,
    key_padding_mask: torch.Tensor | None,
    need_weights: bool,
    attn_mask: torch.Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """F.multi_head_attention_forward in training, whose documentation holds.

    Args:
        project: the product 'q', 'k', 'v' or 'out' of rows (batch, length, features).
        batch_first: whether inputs and output are (batch, length, features), not (length, batch, ...).
    """
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched = query.ndim == 3
    if not batched or not batch_first:
        # Examples first, for products too; one tensor stays one, whose products share a factor.
        given = query, key, value
        query = _turned(query)
        key = query if given[1] is given[0] else _turned(key)
        value = key if given[2] is given[1] else _turned(value)
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
    q, k, v = project("q", query), project("k", key), project("v", value)
    batch, extra = q.shape[0], 0
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(batch, -1, -1)], dim=1)
        v = torch.cat([v, bias_v.expand(batch, -1, -1)], dim=1)
        extra += 1
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        extra += 1
    width = q.shape[-1] // heads
    q, k, v = (t.reshape(batch, t.shape[1], heads, width).transpose(1, 2) for t in (q, k, v))
    mask = _mask(attn_mask, key_padding_mask, batch, heads, extra, q.dtype)
    weights = None
    if not need_weights:
        # As in torch: the hint takes the place of the mask, also beside `extra` sources.
        causal = is_causal and key_padding_mask is None
        out = F.scaled_dot_product_attention(
            q, k, v, None if causal else mask, dropout, is_causal=causal
        )
    else:
        scores = (q / math.sqrt(width)) @ k.mT
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = F.dropout(weights, dropout)
        out = weights @ v
    out = project("out", out.transpose(1, 2).flatten(2))
    if not batched:
        out = out[0]
    elif not batch_first:
        out = out.transpose(0, 1)
    if weights is not None:
        weights = weights.mean(1) if average_attn_weights else weights
        weights = weights if batched else weights[0]
    return out, weights


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x[None] if x.ndim == 2 else x.transpose(0, 1)


def _fit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    heads: int,
    width: int,
    swapped: bool = False,
) -> bool:
    """Whether arguments are what torch takes; all else is for torch to refuse.

    Args:
        query, key, value: (length, batch, features), or without the batch.
        swapped: whether they are (batch, length, features).
    """
    if query.is_nested or query.ndim not in (2, 3) or key.ndim != query.ndim or value.ndim != query.ndim:
        return False
    if query.shape[-1] != width or width % heads or key.shape[:-1] != value.shape[:-1]:
        return False
    lengths = query.shape[swapped], key.shape[swapped]
    batch = () if query.ndim == 2 else (query.shape[not swapped],)
    if query.ndim == 3 and key.shape[not swapped] != query.shape[not swapped]:
        return False
    count = heads * math.prod(batch)
    if attn_mask is not None and tuple(attn_mask.shape) not in (lengths, (count, *lengths)):
        return False
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != (*batch, lengths[1]):
        return False
    kinds = {mask.dtype for mask in (attn_mask, key_padding_mask) if mask is not None} - {torch.bool}
    # Of several precisions autocast makes one.
    return kinds <= {query.dtype} or (
        torch.is_autocast_enabled(query.device.type) and all(kind.is_floating_point for kind in kinds)
    )


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


# ---- the function --------------------------------------------------------------------------------


def weights_of(given: Mapping[str, Any]) -> list[Any]:
    """The weights in a call of F.multi_head_attention_forward, given its arguments by name."""
    names = [f"{key}_proj_weight" for key in _KEYS] if _is_separate(given) else ["in_proj_weight"]
    return [given.get(name) for name in (*names, "out_proj_weight")]


def can_be_written_out(given: Mapping[str, Any]) -> bool:
    """Whether a call is one that `attention` knows, and each of its layers gets one input."""
    query, key, value = given["query"], given["key"], given["value"]
    masks = given.get("attn_mask"), given.get("key_padding_mask")
    heads, width = given["num_heads"], given["embed_dim_to_check"]
    if not given.get("training", True) or not _fit(query, key, value, *masks, heads, width):
        return False
    if (given["bias_k"] is None) != (given["bias_v"] is None):
        return False
    if given.get("static_k") is not None or given.get("static_v") is not None:
        return False
    return _is_separate(given) or (query is key and key is value)


def written_out(
    given: Mapping[str, Any], biases: Sequence[Any], linear: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a call returns.

    Args:
        biases: of q, k and v, where `in_proj_bias` is joined of such.
        linear: with F.linear's arguments.
    """
    packed: list[torch.Tensor] = []

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "out":
            return linear(x, given["out_proj_weight"], given["out_proj_bias"])
        place = _KEYS.index(name)
        if _is_separate(given):
            return linear(x, given[f"{name}_proj_weight"], biases[place])
        if not packed:
            packed.extend(linear(x, given["in_proj_weight"], given["in_proj_bias"]).chunk(3, dim=-1))
        return packed[place]

    return attention(
        project,
        given["query"],
        given["key"],
        given["value"],
        heads=given["num_heads"],
        batch_first=False,
        bias_k=given["bias_k"],
        bias_v=given["bias_v"],
        add_zero_attn=given["add_zero_attn"],
        dropout=given["dropout_p"],
        key_padding_mask=given.get("key_padding_mask"),
        need_weights=given.get("need_weights", True),
        attn_mask=given.get("attn_mask"),
        average_attn_weights=given.get("average_attn_weights", True),
        is_causal=given.get("is_causal", False),
    )


def _is_separate(given: Mapping[str, Any]) -> bool:
    return bool(given.get("use_separate_proj_weight", False))
