"""What each kind of layer saw, as raw sums: from its input and its output's gradient."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from suite.core import correlations, patches
from suite.core.ekfac import second_moment_in_basis
from suite.core.linalg import sums_in_single
from suite.core.statistics import (
    batch_norm_second_moment_sum,
    normalized_over_batch,
    second_moment_sum,
    unit_second_moment_sum,
)
from suite.torch.hooks import can_be_read
from suite.torch.patch_moments import patch_second_moment_sum
from suite.torch.recorders import is_recording

Bases = tuple[torch.Tensor | None, torch.Tensor | None]  # eigenvectors of (A, G)


class Axes(NamedTuple):
    """Where a product's input and output have their features, if not on the last axis."""

    x: tuple[int, ...]  # all axes in this order: rows, as the output has them, and then features
    y: tuple[int, ...]
    features: tuple[int, int]  # on how many axes of each

    def turned(self) -> Axes:
        """Of a product with the transpose."""
        return Axes(self.y, self.x, self.features[::-1])

    def moves_input(self) -> bool:
        """Whether the input is not (*rows, features) as it is."""
        return self.features[0] > 1 or self.x != (*range(len(self.x)),)

    def are_last(self) -> bool:
        """Whether neither the input nor the output is moved."""
        return not self.moves_input() and self.features[1] == 1 and self.y == (*range(len(self.y)),)

    def row_count(self, x: torch.Tensor) -> int:
        """How many rows an input has."""
        return x.numel() // math.prod([x.shape[axis] for axis in self.x[-self.features[0] :]])

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """(*rows, features)."""
        return x.permute(self.x).flatten(-self.features[0])

    def output(self, y: torch.Tensor) -> torch.Tensor:
        """(*rows, features)."""
        return y.permute(self.y).flatten(-self.features[1])


class LayerSpec(NamedTuple):
    """How a layer's tensors become sums: plain values, so that `torch.compile` can trace it."""

    # 'dense', 'convolution', 'transposed', 'embedding', 'bag', 'norm' (scale and shift of a
    # normalized input), 'bias' (added along `channel_axis`), 'free' (see free.py), 'stack' (see
    # stacks.py)
    kind: str
    diagonal: tuple[bool, bool] = (False, False)  # of (A, G)
    bias: bool = False  # whether inputs get a coordinate 1 for the bias
    groups: int = 1
    kernel: tuple[int, ...] = ()  # of a convolution
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    padding_mode: str = "zeros"
    norm: str = ""  # 'layer', 'rms', 'group', 'batch', 'instance'; '': the input is what is scaled
    norm_size: int = 1  # trailing axes of 'layer' and 'rms', groups of 'group'; rows of a table
    eps: float | None = 0.0
    channel_axis: int = -1  # of 'norm' and 'bias'
    padding_index: int = -1  # of 'embedding'
    reduce: bool = False  # one row an example (K-FAC-reduce), not one a position (K-FAC-expand)
    max_rows: int = 0  # statistics from a random subset of at most so many rows; 0: from all
    max_examples: int = 0  # likewise of examples
    axes: Axes | None = None  # of 'dense'; None: features are last


def paddings(
    given: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """(before, after) per axis; 'same' puts the odd one after, as torch does."""
    if given == "valid":
        return ((0, 0),) * len(kernel)
    if given == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((side, side) for side in given)


class Sums(NamedTuple):
    """The gradients of a layer's slots."""

    A: torch.Tensor | None
    G: torch.Tensor
    counts: torch.Tensor  # (2,): rows summed, and positions of the output
    products: torch.Tensor | None  # (blocks, d_out, d_in): Σ (g in its basis)² (a in its basis)²ᵀ


def sums(
    spec: LayerSpec,
    x: torch.Tensor | None,
    gradient: torch.Tensor,
    *,
    chosen: torch.Tensor | None = None,
    want_A: bool = True,
    bases: Bases | None = None,
) -> Sums:
    """Σ a aᵀ, Σ g gᵀ and counts of one call of a layer.

    Args:
        x: the layer's input; of a bag, its second moments (`bag_second_moments`); of a bias, None.
        gradient: of the loss by the layer's output.
        chosen: the indices of the examples (if the spec has `max_examples`) or of the rows to take;
            None: all of them.
        want_A: whether Σ a aᵀ is to be computed; another layer with the same input may have it.
        bases: eigenvectors of A and G, to sum second moments in; None: do not.
    """
    if chosen is not None and spec.max_examples:
        return _sums_of_some(spec, x, gradient, chosen, want_A, bases)
    if spec.kind == "dense" and spec.axes is None and not spec.reduce and chosen is bases is None:
        return _dense_sums(spec, x, gradient, want_A)
    positions = output_positions(spec, gradient)
    if spec.axes is not None:
        assert x is not None
        x, gradient = spec.axes.input(x), spec.axes.output(gradient)
        spec = spec._replace(axes=None)
    if spec.kind == "bias":
        rows = _channel_rows(gradient, spec)
        one = gradient.new_full((1, 1, 1), rows.shape[1])
        G = second_moment_sum(rows, diagonal=spec.diagonal[1])
        return Sums(one, G, counts_like(gradient, rows.shape[1], positions), None)
    assert x is not None
    if spec.kind == "norm":
        return _norm_sums(spec, x, gradient, positions)
    if spec.kind in ("embedding", "bag"):
        return _embedding_sums(spec, x, gradient, positions)
    share = 1.0 if chosen is None else row_count(spec, x) / chosen.numel()
    if chosen is None and bases is None and _without_rows(spec):
        A = None
        if want_A:
            given = (spec.kernel, spec.stride, spec.padding, spec.dilation, spec.groups, spec.bias)
            A = patch_second_moment_sum(batched(x, spec), *given)
        gradient = batched(gradient, spec)
        if spec.diagonal[1]:
            G = second_moment_sum(patches.output_rows(gradient, spec.groups), diagonal=True)
        else:
            G = correlations.output_second_moment_sum(gradient, spec.groups)
        return Sums(A, G, counts_like(gradient, positions, positions), None)
    inputs, outputs = rows_of(spec, x, gradient, chosen)
    A = None
    if want_A:
        A = second_moment_sum(inputs, diagonal=spec.diagonal[0], bias=spec.bias)
    G = second_moment_sum(outputs, diagonal=spec.diagonal[1])
    products = None
    if bases is not None:
        products = second_moment_in_basis(inputs, outputs, *bases, bias=spec.bias)
    if chosen is not None:
        A, G = None if A is None else A * share, G * share
        products = None if products is None else products * share
    return Sums(A, G, counts_like(gradient, round(inputs.shape[1] * share), positions), products)


def _dense_sums(spec: LayerSpec, x: Any, gradient: torch.Tensor, want_A: bool) -> Sums:
    """`sums` of what most layers are, in as few calls: there may be hundreds of small ones."""
    of_A, of_G = spec.diagonal
    G = second_moment_sum(gradient.reshape(1, -1, gradient.shape[-1]), diagonal=of_G)
    A = None
    if want_A:
        A = second_moment_sum(x.reshape(1, -1, x.shape[-1]), diagonal=of_A, bias=spec.bias)
    rows = gradient.numel() // gradient.shape[-1]
    return Sums(A, G, counts_like(gradient, rows, rows), None)


def has_no_examples(spec: LayerSpec, x: torch.Tensor) -> bool:
    """Whether a call's input, it seems, is one for all examples: what is in front has length 1.

    Or it is a parameter, or positions or distances that are looked up, or one number. One row may be one
    that an expert was given.
    """
    if spec.kind == "embedding":
        if x.numel() == 1 or (x.ndim > 1 and len(x) == 1):
            return True
        return x.ndim < 3 and can_be_read(x) and _are_positions(x)
    if spec.kind not in ("dense", "convolution", "transposed", "norm"):
        return False
    return isinstance(x, torch.nn.Parameter) or (len(x) == 1 and x.ndim > 2)


def _are_positions(x: torch.Tensor) -> bool:
    """Whether indices are 0, 1, 2, ..., or a matrix of what depends on the distance of two of these."""
    if x.ndim < 2:
        return torch.equal(x, torch.arange(x.numel(), dtype=x.dtype, device=x.device))
    alike = len(x) == x.shape[1] > 2 and torch.equal(x[1:, 1:], x[:-1, :-1])
    return alike and bool((x != x[0, 0]).any())


def keeps_half(spec: LayerSpec, gradient: torch.Tensor) -> bool:
    """Whether `sums` takes input and gradient in half precision: what the layer multiplied, and fast."""
    kept = spec.kind in ("dense", "convolution", "transposed") or spec.norm == "batch"
    return kept and not spec.reduce and sums_in_single(gradient)


def derivative_sums(
    spec: LayerSpec,
    x: torch.Tensor,
    gradient: torch.Tensor,
    at: torch.Tensor | None,
    chosen: torch.Tensor | None = None,
    bases: Bases | None = None,
) -> Sums:
    """`sums` of a product in a layer's derivatives, in which its bias has no part.

    Args:
        x, gradient: shaped like the layer's input and output. One is what went into the product, the
            other the loss's gradient by what came out.
        at: of a norm, its input, at which it was differentiated.
    """
    if spec.kind == "norm":
        assert at is not None
        # All of them have a symmetric Jacobian, along each group that they normalize.
        with torch.enable_grad():
            at = at.detach().requires_grad_()
            (x,) = torch.autograd.grad(_normalized(spec, at), at, x)
        found = _normalized_sums(spec, x, gradient, 0)
        if spec.bias and found.A is not None:  # of the shift
            found.A[:, 1:], found.A[:, :, 1:] = 0, 0
        return found
    if bases is not None and bases[0] is not None and spec.bias:
        bases = (bases[0][..., :-1, :], bases[1])
    found = sums(spec._replace(bias=False), x, gradient, chosen=chosen, bases=bases)
    if not spec.bias:
        return found
    assert found.A is not None  # its last coordinate is the bias's
    A = F.pad(found.A, (0, 1) if spec.diagonal[0] else (0, 1, 0, 1))
    products = found.products
    if products is not None and products.shape[-1] < A.shape[-1]:
        products = F.pad(products, (0, 1))
    return found._replace(A=A, products=products)


def _sums_of_some(
    spec: LayerSpec,
    x: torch.Tensor | None,
    gradient: torch.Tensor,
    chosen: torch.Tensor,
    want_A: bool,
    bases: Bases | None,
) -> Sums:
    """`sums` from the chosen examples, in proportion."""
    assert x is not None
    share, some = gradient.shape[0] / chosen.numel(), gradient.index_select(0, chosen)
    if spec.norm == "batch":  # every example has a part in how each is normalized
        x = normalized_over_batch(x, spec.eps or 0.0, chosen)
        A, G, counts, products = _normalized_sums(spec, x, some, output_positions(spec, some))
    else:
        A, G, counts, products = sums(spec, x.index_select(0, chosen), some, want_A=want_A, bases=bases)
    return Sums(
        None if A is None else A * share,
        G * share,
        torch.round(counts * share),
        None if products is None else products * share,
    )


def example_count(spec: LayerSpec, y: torch.Tensor) -> int:
    """How many examples a call of a layer had, if it has `max_examples`; 1 without a batch axis."""
    axes = 1 + len(spec.kernel) if spec.kernel else max(-spec.channel_axis, 1)
    return 1 if y.ndim == axes else y.shape[0]


def output_positions(spec: LayerSpec, y: torch.Tensor) -> int:
    """How many positions a layer's output has: examples, tokens, pixels."""
    axis = spec.channel_axis
    if spec.axes is not None:
        return spec.axes.turned().row_count(y)
    if spec.kind in ("convolution", "transposed"):
        axis = -1 - len(spec.kernel)
    elif spec.norm in ("layer", "rms"):
        return y.numel() // math.prod(y.shape[-spec.norm_size :])
    return y.numel() // y.shape[axis]


def stratified(noise: torch.Tensor, total: int) -> torch.Tensor:
    """One index from each of `noise.numel()` equal parts of range(`total`): every index as likely."""
    count = noise.numel()
    position = (torch.arange(count, device=noise.device) + noise.double()) * (total / count)
    return position.long().clamp_(max=total - 1)


def bag_second_moments(
    indices: torch.Tensor,
    bags: torch.Tensor,
    weights: torch.Tensor,
    rows: int,
) -> torch.Tensor:
    """(rows,): Σ over bags of (the summed weight of each row of the table in that bag)².

    Args:
        indices, bags, weights: (n,): which row, in which bag, with which weight.
        rows: how many rows the table has.
    """
    keys, order = torch.sort(bags * rows + indices)
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    segment = first.cumsum(0) - 1
    totals = torch.zeros_like(weights).index_add_(0, segment, weights[order])
    row = torch.zeros_like(indices).scatter_(0, segment, indices[order])
    return weights.new_zeros(rows).index_add_(0, row, totals.square())


def rows_of(
    spec: LayerSpec, x: torch.Tensor, gradient: torch.Tensor, chosen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks, rows, d_in without bias) and (blocks, rows, d_out) of a product without `axes`."""
    if spec.kind == "dense":
        if spec.reduce and x.ndim > 2:
            inner = tuple(range(1, x.ndim - 1))
            return x.mean(inner)[None], gradient.sum(inner)[None]
        inputs, outputs = x.reshape(1, -1, x.shape[-1]), gradient.reshape(1, -1, gradient.shape[-1])
        if chosen is not None:
            return inputs[:, chosen], outputs[:, chosen]
        return inputs, outputs
    x, gradient = batched(x, spec), batched(gradient, spec)
    padding = spec.padding
    if spec.padding_mode != "zeros":
        x = padded(x, spec)
        padding = ((0, 0),) * len(padding)
    if spec.kind == "transposed":
        # The input is what a convolution of the output's gradient would meet: the roles change.
        # Output padding asks for more positions after the last input's, or for fewer than none.
        sides = zip(x.shape[2:], gradient.shape[2:], *spec[4:8], strict=True)
        after = [(n - 1) * s + d * (k - 1) + 1 - out - p[0] for n, out, k, s, p, d in sides]
        for axis, extra in enumerate(after, start=2):
            gradient = gradient.narrow(axis, 0, gradient.shape[axis] + min(extra, 0))
        padding = tuple((p[0], max(a, 0)) for p, a in zip(padding, after, strict=True))
        outputs = patches.patches(
            gradient, spec.kernel, spec.stride, padding, spec.dilation, spec.groups
        )
        inputs = patches.output_rows(x, spec.groups)
        if chosen is not None:
            inputs, outputs = inputs[:, chosen], outputs[:, chosen]
    elif chosen is not None:
        inputs = patches.patches_at(
            x, spec.kernel, spec.stride, padding, spec.dilation, spec.groups, chosen
        )
        outputs = patches.output_rows(gradient, spec.groups)[:, chosen]
    else:
        inputs = patches.patches(x, spec.kernel, spec.stride, padding, spec.dilation, spec.groups)
        outputs = patches.output_rows(gradient, spec.groups)
    if spec.reduce:
        examples = x.shape[0]
        inputs = inputs.unflatten(1, (examples, -1)).mean(2)
        outputs = outputs.unflatten(1, (examples, -1)).sum(2)
    return inputs, outputs


def _without_rows(spec: LayerSpec) -> bool:
    """Whether `correlations` has Σ a aᵀ and Σ g gᵀ."""
    plain = spec.kind == "convolution" and spec.padding_mode == "zeros" and not spec.reduce
    return plain and not spec.diagonal[0]


def row_count(spec: LayerSpec, x: torch.Tensor) -> int:
    """How many rows a call of a layer had, if it has `max_rows` and more than one row an example."""
    if spec.reduce or not spec.max_rows:
        return 0
    if spec.axes is not None:
        return spec.axes.row_count(x)
    if spec.kind == "dense":
        return x.numel() // x.shape[-1]
    x = batched(x, spec)
    if spec.kind == "transposed":
        return x.shape[0] * math.prod(x.shape[2:])
    sides = zip(x.shape[2:], spec.kernel, spec.stride, spec.padding, spec.dilation, strict=True)
    return x.shape[0] * math.prod([patches.output_size(*side) for side in sides])


def padded(x: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """A convolution's input with what it puts around that."""
    sides = [side for pair in reversed(spec.padding) for side in pair]  # the last axis first
    return F.pad(x, sides, mode="constant" if spec.padding_mode == "zeros" else spec.padding_mode)


def batched(x: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """With the batch axis that a convolution lets you leave out."""
    return x[None] if x.ndim == len(spec.kernel) + 1 else x


def _norm_sums(spec: LayerSpec, x: torch.Tensor, gradient: torch.Tensor, positions: int) -> Sums:
    if spec.norm == "batch" and not spec.reduce and x.numel():
        A = batch_norm_second_moment_sum(x, gradient, spec.eps or 0.0, spec.bias)
        return _unit_sums(A, gradient, positions, positions)
    return _normalized_sums(spec, _normalized(spec, x), gradient, positions)


def _normalized(spec: LayerSpec, x: torch.Tensor) -> torch.Tensor:
    """What a norm's scale is multiplied with, shaped like `x`."""
    eps = spec.eps or 0.0
    if spec.norm in ("layer", "rms"):
        shape = x.shape[-spec.norm_size :]
        if spec.norm == "layer":
            return F.layer_norm(x, shape, eps=eps)
        return F.rms_norm(x, shape, eps=spec.eps)  # None: that of the dtype
    if spec.norm == "group":
        return F.group_norm(x, spec.norm_size, eps=eps)
    if spec.norm == "batch":
        return F.batch_norm(x, None, None, training=True, eps=eps)
    if spec.norm == "instance" and x.ndim == -spec.channel_axis:  # no batch axis
        return F.instance_norm(x[None], eps=eps)[0]
    return F.instance_norm(x, eps=eps) if spec.norm == "instance" else x


def _normalized_sums(spec: LayerSpec, x: torch.Tensor, gradient: torch.Tensor, positions: int) -> Sums:
    """Of a scale and shift that follow what `x` has gone through already."""
    if spec.norm in ("layer", "rms"):
        width = math.prod(x.shape[-spec.norm_size :])
        x, gradient = (t.reshape(*t.shape[: t.ndim - spec.norm_size], width) for t in (x, gradient))
    elif spec.norm == "instance" and x.ndim == -spec.channel_axis:
        x, gradient = x[None], gradient[None]
    axis = spec.channel_axis % x.ndim
    channels = x.shape[axis]
    scales, shifts = gradient * x, gradient
    if spec.reduce and x.ndim > 2:
        inner = tuple(i for i in range(1, x.ndim) if i != axis)
        scales, shifts, axis = scales.sum(inner), shifts.sum(inner), 1
    A = unit_second_moment_sum(scales, shifts, spec.bias, axis)
    return _unit_sums(A, gradient, scales.numel() // channels, positions)


def _unit_sums(A: torch.Tensor, gradient: torch.Tensor, rows: int, positions: int) -> Sums:
    ones = A.new_full((A.shape[0], 1, 1), rows)
    return Sums(A, ones, counts_like(gradient, rows, positions), None)


def _embedding_sums(spec: LayerSpec, x: torch.Tensor, gradient: torch.Tensor, positions: int) -> Sums:
    outputs = gradient.reshape(1, -1, gradient.shape[-1])
    counts = counts_like(gradient, outputs.shape[1], positions)
    if spec.kind == "bag":
        A = x[None].to(gradient.dtype)
    else:
        # Padding looks nothing up: it is no row.
        used = (x != spec.padding_index).reshape(-1).to(gradient.dtype)
        outputs = outputs * used[:, None]
        A = gradient.new_zeros(spec.norm_size).index_add_(0, x.reshape(-1), used)[None]
        counts = torch.stack([used.sum().to(counts.dtype), counts[1]])
    G = second_moment_sum(outputs, diagonal=spec.diagonal[1])
    return Sums(A, G, counts, None)


def _channel_rows(gradient: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    gradient = gradient.movedim(spec.channel_axis, -1)
    if spec.reduce and gradient.ndim > 2:
        gradient = gradient.sum(tuple(range(1, gradient.ndim - 1)))
    return gradient.reshape(1, -1, gradient.shape[-1])


def counts_like(like: torch.Tensor, rows: int, positions: int) -> torch.Tensor:
    """(2,), of `like`'s dtype or of single precision, on its device; the host does not wait."""
    dtype = like.dtype if like.dtype.itemsize >= 4 else torch.float32
    if torch.compiler.is_compiling() or type(like) is not torch.Tensor or is_recording():
        return torch.stack([like.new_full((), float(n), dtype=dtype) for n in (rows, positions)])
    return _known_counts(rows, positions, dtype, like.device)


@functools.lru_cache(maxsize=256)
def _known_counts(rows: int, positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Not to be changed in place. Autograd copies it, for it is not the only one who has it."""
    counts = torch.tensor([float(rows), float(positions)], dtype=dtype, device="cpu")
    return counts.to(device, non_blocking=True)
