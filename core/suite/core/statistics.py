"""What a layer saw, as raw sums, and the one place that turns sums into curvature factors.

A layer computes s = W a for many rows: one row per example, position or token. With N terms in the
loss, R rows, and g the gradient of the loss (as the user wrote it) by a row of s,

    A = Σ a aᵀ / R,        G = N Σ g gᵀ  (mean over the N terms)   or   Σ g gᵀ  (their sum)

so that A ⊗ G approximates the Fisher matrix of the loss that is being minimised: for a mean, each
term's own gradient is N g, and (1/N) Σ (N g)(N g)ᵀ = N Σ g gᵀ. This is K-FAC-expand of Eschenhagen et
al. 2023 (arXiv:2311.00636, section 3.1); for one row per example it is Martens & Grosse 2015
(arXiv:1503.05671, section 3).

Sums of sums are sums: micro-batches, ranks and repeated use of a layer all add up before the one
normalisation. So does averaging the sums together with the gradients, because the counts are averaged,
too (of k equal shares, Σ a aᵀ and R both lose the factor k; N Σ g gᵀ keeps its value).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from suite.core import linalg
from suite.core._namespace import Array, array_namespace, device_of, factorizations, lift

LossReduction = Literal["mean", "sum"]
FactorScaling = Literal["fisher", "kfac_pytorch"]

_ENTRIES_AT_ONCE = 2**18  # of float32 a megabyte


class LayerStatistics(NamedTuple):
    """Raw sums over the rows that a layer saw, for a stack of blocks (groups of a convolution)."""

    A: Array  # (blocks, d_in, d_in) or its diagonal (blocks, d_in): Σ a aᵀ
    G: Array  # (blocks, d_out, d_out) or its diagonal (blocks, d_out): Σ g gᵀ
    rows: Array  # (): how many rows were summed


def second_moment_sum(rows: Array, *, diagonal: bool = False, bias: bool = False) -> Array:
    """Σ x xᵀ over rows x, or the diagonal of that; with `bias`, of the rows [x, 1].

    The column of ones is added to the rows where these are few, else to the sums: there are more steps
    to that, but no copy of the rows.

    Args:
        rows: (blocks, n, d).
        diagonal: return the (blocks, d) diagonal only.
        bias: append the coordinate 1 to every row.

    Returns:
        (blocks, d', d') or (blocks, d'), d' = d + bias, in at least single precision.
    """
    if not bias and not diagonal:
        return linalg.gram_in_single(rows)
    xp = array_namespace(rows)
    rows = lift(rows) if diagonal else linalg.for_sums(rows)
    if not bias:
        return xp.sum(rows * rows, axis=1)
    lifted = xp.finfo(rows.dtype).bits >= 32  # else a column more would leave rows that are not aligned
    if not diagonal and rows.shape[1] < 10 * rows.shape[2] and lifted:
        ones = xp.ones((*rows.shape[:2], 1), dtype=rows.dtype, device=device_of(rows))
        return linalg.gram(xp.concat([rows, ones], axis=-1))
    dtype = rows.dtype if lifted else xp.float32
    count = xp.full((rows.shape[0], 1), float(rows.shape[1]), dtype=dtype, device=device_of(rows))
    if diagonal:
        return xp.concat([xp.sum(rows * rows, axis=1), count], axis=-1)
    products = linalg.gram_in_single(rows)
    sums = xp.sum(rows, axis=1, dtype=dtype)
    right = xp.concat([sums, count], axis=-1)[..., None]
    return xp.concat([xp.concat([products, sums[:, None, :]], axis=-2), right], axis=-1)


def grouped_second_moment_sum(
    rows: Array, ends: Array, *, diagonal: bool = False, bias: bool = False
) -> Array:
    """`second_moment_sum` of groups of rows that are one behind the other.

    Args:
        rows: (n, d).
        ends: (groups,), the row behind each group's last, see `linalg.grouped_products`.

    Returns:
        (groups, d', d') or (groups, d'), d' = d + bias, in at least single precision.
    """
    xp = array_namespace(rows)
    rows = lift(rows)
    ones = xp.ones((rows.shape[0], 1), dtype=rows.dtype, device=device_of(rows))
    if bias:
        rows = xp.concat([rows, ones], axis=-1)
    if diagonal:
        return linalg.grouped_products(rows * rows, ones, ends)[..., 0]
    return linalg.grouped_products(rows, rows, ends)


def mean_of_each(A: Array) -> Array:
    """Sums of rows with a coordinate 1 -> the mean of each block's own rows, without it.

    Args:
        A: (blocks, d + 1, d + 1) or (blocks, d + 1), Σ x xᵀ times whatever number.

    Returns:
        (blocks, d, d) or (blocks, d); 0 of a block without rows.
    """
    if A.ndim == 2:
        return A[:, :-1] / _or_one(A[:, -1:])
    return A[:, :-1, :-1] / _or_one(A[:, -1:, -1:])


def cross_moment_sum(outputs: Array, inputs: Array, *, bias: bool = False) -> Array:
    """Σ g aᵀ over pairs of rows: the gradient of the weight, if nothing is missing.

    Args:
        outputs: (blocks, n, d_out), rows g.
        inputs: (blocks, n, d_in - bias), rows a.
        bias: append the coordinate 1 to every a.

    Returns:
        (blocks, d_out, d_in).
    """
    xp = array_namespace(outputs)
    products = linalg.transposed_times(outputs, inputs)
    if not bias:
        return products
    return xp.concat([products, xp.sum(outputs, axis=1)[..., None]], axis=-1)


def unit_second_moment_sum(scales: Array, shifts: Array, both: bool, channel_axis: int = -1) -> Array:
    """Σ z zᵀ for every channel of a layer that scales and shifts each channel by itself.

    Source: Amari et al. 2019 (arXiv:1808.07172), unit-wise Fisher; Osawa et al. 2019
    (arXiv:1811.12019), section 4.2, for normalization layers.

    Args:
        scales: (rows, channels), each row's gradient by the scale; rows may be on several axes.
        shifts: likewise, each row's gradient by the shift.
        channel_axis: where the channels are.
        both: (channels, 2, 2) of z = (scale, shift); else the diagonal (1, channels) of the scales.
    """
    xp = array_namespace(scales)
    scales, shifts = lift(scales), lift(shifts)
    rows = tuple(i for i in range(scales.ndim) if i != channel_axis % scales.ndim)
    squares = xp.sum(scales * scales, axis=rows)
    if not both:
        return squares[None, :]
    cross, shifted = xp.sum(scales * shifts, axis=rows), xp.sum(shifts * shifts, axis=rows)
    return xp.reshape(xp.stack([squares, cross, cross, shifted], axis=-1), (-1, 2, 2))


def batch_norm_second_moment_sum(x: Array, gradient: Array, eps: float, both: bool) -> Array:
    """`unit_second_moment_sum` of a layer that scales and shifts what is normalized over the batch.

    Args:
        x: (n, channels, *sizes), the layer's input, before it is normalized.
        gradient: like x, of the loss by the layer's output.
        eps: added to each channel's variance.
        both: see `unit_second_moment_sum`.
    """
    xp = array_namespace(x)
    x, gradient = _places_last(x), _places_last(gradient)
    mean = _channel_sums(x)[:, None] / float(x.shape[0] * x.shape[2])
    sums = []
    for some, shifts in zip(_parts(x), _parts(gradient), strict=True):
        scales = some - mean  # in at least single precision: the mean is
        squares, shifted = _channel_squares(scales), _channel_squares(shifts)
        scales *= shifts  # where it is: memory that is new costs more than what is done with it
        scaled = _channel_squares(scales)
        scales *= shifts
        sums.append([squares, scaled, _channel_sums(scales), shifted])
    squares, scaled, cross, shifted = (sum(some[1:], some[0]) for some in zip(*sums, strict=True))
    deviation = xp.sqrt(squares / float(x.shape[0] * x.shape[2]) + eps)
    scaled, cross = scaled / (deviation * deviation), cross / deviation
    if not both:
        return scaled[None, :]
    return xp.reshape(xp.stack([scaled, cross, cross, shifted], axis=-1), (-1, 2, 2))


def normalized_over_batch(x: Array, eps: float, chosen: Array) -> Array:
    """The `chosen` examples of (n, channels, *sizes), normalized as all n of them say.

    Args:
        x: the input of a batch norm.
        eps: added to each channel's variance.
        chosen: (examples,), integers in [0, n).
    """
    xp = array_namespace(x)
    rows, shape = float(math.prod(x.shape) // x.shape[1]), (1, -1, *(1,) * (x.ndim - 2))
    flat = _places_last(x)
    mean = _channel_sums(flat) / rows
    squares = []
    for some in _parts(flat):
        squares.append(_channel_squares(some - mean[:, None]))
    deviation = xp.sqrt(sum(squares[1:], squares[0]) / rows + eps)
    return (xp.take(lift(x), chosen, axis=0) - xp.reshape(mean, shape)) / xp.reshape(deviation, shape)


def _places_last(x: Array) -> Array:
    """(n, channels, *sizes) -> (n, channels, places), as `linalg.for_sums` has it."""
    x = linalg.for_sums(x)
    return array_namespace(x).reshape(x, (*x.shape[:2], math.prod(x.shape[2:])))


def _channel_sums(x: Array) -> Array:
    """(n, channels, places) -> (channels,), in at least single precision."""
    xp = array_namespace(x)
    dtype = xp.float32 if xp.finfo(x.dtype).bits < 32 else x.dtype
    return xp.sum(xp.sum(x, axis=-1, dtype=dtype), axis=0)


def _channel_squares(x: Array) -> Array:
    """`_channel_sums` of x²."""
    return array_namespace(x).sum(linalg.sum_of_squares(x), axis=0)


def _parts(x: Array) -> Any:
    """A few examples at a time, so that what is made of them stays in the processor's cache."""
    of_an_example = max(math.prod(x.shape[1:]), 1)
    return factorizations(array_namespace(x)).parts(x, max(_ENTRIES_AT_ONCE // of_an_example, 1))


def elementwise_second_moment_sum(
    gradient: Array,
    other: Array | None,
    kind: str,
    shape: tuple[int, ...],
    ends: Array | None = None,
    *,
    reduce: bool = False,
    labels: tuple[str, str, str] | None = None,
) -> Array:
    """Of a parameter's `shape`: Σ over the rows that share an element of its gradient's square.

    Args:
        gradient: of the loss by the output y of an operation on the parameter p.
        other: what p was multiplied with; None for 'sum'.
        kind: 'sum' (y = x + p), 'product' (x p, elementwise), 'linear' (x pᵀ), 'right' (x p), 'left'
            (p x), 'grouped' (x p[i] of the rows before ends[i]) or 'contraction' (see `labels`). p was
            broadcast to what the operation needed.
        shape: of p.
        ends: (groups,), of 'grouped': the row behind each group's last, see `linalg.grouped_products`.
        reduce: of 'sum' and 'product': a row is all of an example. Examples are on the axis in front, or
            the first along which p was broadcast.
        labels: of a contraction, y = einsum('other,own->out', x, p): (own, other, out), with a character
            for each axis. Each of p's is one of x or of y, and each other axis is one of both.
    """
    xp = array_namespace(gradient)
    if reduce and kind in ("sum", "product"):
        rows = gradient if other is None else gradient * other
        grown = _grown(rows, shape)
        inner = tuple(grown if rows.shape[:1] == (1,) else grown[1:])
        rows = xp.sum(rows, axis=inner, keepdims=True) if inner else rows
        return _sum_to(rows * rows, shape)
    squares = gradient * gradient
    if other is None:
        return _sum_to(squares, shape)
    return _products(squares, other * other, kind, shape, ends, labels)


def complex_second_moment_sum(
    gradient: tuple[Array, Array],
    other: tuple[Array, Array] | None,
    kind: str,
    shape: tuple[int, ...],
    ends: Array | None = None,
    *,
    reduce: bool = False,
    labels: tuple[str, str, str] | None = None,
) -> tuple[Array, Array]:
    """`elementwise_second_moment_sum` of a complex parameter's real part, and of its imaginary part.

    With g the gradient by y whose parts are those by the parts of y, the gradient by p of a row is g x̄.

    Args: as there, but for real and imaginary parts of `gradient` and `other`.
    """
    a, b = gradient
    if other is None or kind in ("sum", "product"):
        rows = (a, b) if other is None else (a * other[0] + b * other[1], b * other[0] - a * other[1])
        real, imaginary = (
            elementwise_second_moment_sum(x, None, "sum", shape, reduce=reduce) for x in rows
        )
        return real, imaginary
    c, d = other
    xp, rest = array_namespace(a), (kind, shape, ends, labels)
    # The squares of a row's real and imaginary part: their sum |g|² |x|², and their difference Re(g x̄)².
    both = _products(a * a + b * b, c * c + d * d, *rest)
    difference = _products(a * a - b * b, c * c - d * d, *rest) + 4.0 * _products(a * b, c * d, *rest)
    zero = xp.zeros_like(both)
    return xp.maximum(both + difference, zero) / 2.0, xp.maximum(both - difference, zero) / 2.0


def complex_gradient(
    gradient: tuple[Array, Array],
    other: tuple[Array, Array],
    labels: tuple[str, str, str],
    shape: tuple[int, ...],
) -> tuple[Array, Array]:
    """Σ g x̄ over all rows of a contraction: the gradient by a complex parameter's parts.

    Args: as of `complex_second_moment_sum`.
    """
    (a, b), (c, d) = gradient, other
    real = _contracted(a, c, labels, shape) + _contracted(b, d, labels, shape)
    return real, _contracted(b, c, labels, shape) - _contracted(a, d, labels, shape)


def _products(
    squares: Array,
    others: Array,
    kind: str,
    shape: tuple[int, ...],
    ends: Array | None,
    labels: tuple[str, str, str] | None,
) -> Array:
    """Σ over rows of `squares`, like y, times `others`, like x; arguments as above."""
    xp = array_namespace(squares)
    if labels is not None:
        return _contracted(squares, others, labels, shape)
    if kind == "product":
        return _sum_to(squares * others, shape)
    if kind == "grouped":
        return linalg.grouped_products(others, squares, ends)
    if kind == "left":
        return _sum_to(xp.matmul(squares, xp.matrix_transpose(others)), shape)
    if len(shape) == 2:
        squares = xp.reshape(squares, (-1, squares.shape[-1]))
        others = xp.reshape(others, (-1, others.shape[-1]))
    product = xp.matmul(xp.matrix_transpose(others), squares)
    return xp.matrix_transpose(product) if kind == "linear" else _sum_to(product, shape)


def _contracted(y: Array, x: Array, labels: tuple[str, str, str], shape: tuple[int, ...]) -> Array:
    """einsum('other,out->own', x, y) for p's `shape`."""
    xp, (own, other, out) = array_namespace(y), labels
    groups = [c for c in own if c in other and c in out]
    rows = [c for c in out if c not in own]
    into, outs = ([c for c in own if c not in some] for some in (out, other))
    sizes = dict(zip(own, shape, strict=True)) | dict(zip(out, y.shape, strict=True))

    def stacked(z: Array, its: str, features: list[str]) -> Array:
        z = xp.permute_dims(z, tuple([its.index(c) for c in [*groups, *rows, *features]]))
        return xp.reshape(
            z, tuple([math.prod([sizes[c] for c in some]) for some in (groups, rows, features)])
        )

    product = xp.matmul(xp.matrix_transpose(stacked(x, other, into)), stacked(y, out, outs))
    order = [*groups, *into, *outs]
    found = xp.reshape(product, tuple([sizes[c] for c in order]))
    return xp.permute_dims(found, tuple([order.index(c) for c in own]))


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo a broadcast from `shape` by sums."""
    xp, grown = array_namespace(x), _grown(x, shape)
    return xp.reshape(xp.sum(x, axis=tuple(grown)) if grown else x, shape)


def _grown(x: Array, shape: tuple[int, ...]) -> list[int]:
    """The axes along which `x` was broadcast from `shape`."""
    extra = x.ndim - len(shape)
    return [i for i in range(x.ndim) if i < extra or (shape[i - extra] == 1 and x.shape[i] != 1)]


def normalize(
    statistics: LayerStatistics,
    terms: Array,
    loss_reduction: LossReduction,
    factor_scaling: FactorScaling = "fisher",
    places: int = 1,
) -> tuple[Array, Array]:
    """Curvature factors (A, G) from raw sums: see the module's equation.

    Args:
        statistics: sums of one layer; where `rows` is 0 the result is 0.
        terms: (), N, how many terms the loss averages or sums.
        loss_reduction: 'mean' or 'sum', what the loss does over its terms.
        factor_scaling: 'kfac_pytorch' gives A = Σ a aᵀ / (R T²) and G = Σ g gᵀ / (R T²) instead, T the
            positions of a convolution's output: what kfac-pytorch 0.4 computes, for its users' settings.
        places: T.
    """
    rows, kind = statistics.rows, (loss_reduction, factor_scaling, places)
    xp, A, G = array_namespace(rows), statistics.A, statistics.G
    # Counts are exact in any precision, their reciprocals are not.
    A_scale = input_scale(xp.astype(rows, A.dtype), factor_scaling, places)
    G_scale = gradient_scale(xp.astype(rows, G.dtype), xp.astype(terms, G.dtype), *kind)
    return A * A_scale, G * G_scale


def input_scale(rows: Array, factor_scaling: FactorScaling = "fisher", places: int = 1) -> Array:
    """(): what turns the raw sum Σ a aᵀ into the factor A; arguments as of `normalize`."""
    return 1 / _or_tiny(rows * float(places) ** 2 if factor_scaling == "kfac_pytorch" else rows)


def gradient_scale(
    rows: Array,
    terms: Array,
    loss_reduction: LossReduction,
    factor_scaling: FactorScaling = "fisher",
    places: int = 1,
) -> Array:
    """(): what turns the raw sum Σ g gᵀ into the factor G; arguments as of `normalize`."""
    if factor_scaling == "kfac_pytorch":
        return 1 / _or_tiny(rows * float(places) ** 2)
    return array_namespace(rows).zeros_like(terms) + 1 if loss_reduction == "sum" else terms


def with_unit_G(A: Array, G: Array) -> tuple[Array, Array]:
    """The same Kronecker products with G = 1, of blocks whose G is one number; 0 stays 0.

    A of a scale and shift, or of a parameter that no layer computes with, is a mean of squared
    gradients, and G counts them. Each by itself depends on how many terms the loss had, and on how many
    processes and micro-batches shared them, so that its average over steps would say nothing.

    Args:
        A: (blocks, n, n) or (blocks, n), normalized.
        G: (blocks, 1, 1) or (blocks, 1), or of one block for all.
    """
    xp = array_namespace(A)
    number = xp.reshape(G, (-1, *(1,) * (A.ndim - 1)))
    return A * number, xp.astype(G > 0, G.dtype)


def normalize_products(products: Array, terms: Array, loss_reduction: LossReduction) -> Array:
    """Σ (Q_Gᵀ g)² ((Q_Aᵀ a)²)ᵀ in the units of A ⊗ G.

    A is a mean over rows and G a sum; a sum over rows of their products needs no division.

    Args:
        products: (..., d_out, d_in), `ekfac.second_moment_in_basis`.
        terms: (), N, how many terms the loss averages or sums.
        loss_reduction: see `normalize`.
    """
    if loss_reduction == "sum":
        return products
    return products * array_namespace(products).astype(terms, products.dtype)


def add_transposed(A: Array, G: Array, transposed_A: Array, transposed_G: Array) -> tuple[Array, Array]:
    """One Kronecker product for a weight that is used both as W and as Wᵀ (a tied embedding).

    The sum of two products is not a product. Each side becomes the mean of both uses' factors, scaled
    to one mean eigenvalue and weighted by the use's share of the trace. The trace is kept, and A's scale
    as well, so that it can be averaged with that of steps in which there were no uses as Wᵀ.

    Args:
        A, G: (blocks, n, n) and (blocks, m, m), or their diagonals, of the use as W.
        transposed_A, transposed_G: like G and like A, of the use as Wᵀ.
    """
    xp = array_namespace(A)
    means = [_mean_diagonal(x) for x in (A, G, transposed_A, transposed_G)]
    first, second = means[0] * means[1], means[2] * means[3]
    share = first / _or_one(first + second)

    def joined(one: Array, mean: Array, other: Array, other_mean: Array, scale: Array) -> Array:
        shape = (-1, *(1,) * (one.ndim - 1))
        left = xp.reshape(share * scale / _or_one(mean), shape)
        right = xp.reshape((1 - share) * scale / _or_one(other_mean), shape)
        return one * left + other * right

    scale = _or_one(means[0])
    new_A = joined(A, means[0], transposed_G, means[3], scale)
    return new_A, joined(G, means[1], transposed_A, means[2], (first + second) / scale)


def _or_tiny(count: Array) -> Array:
    """A count to divide by; where it is 0, so is what is divided."""
    return array_namespace(count).maximum(count, array_namespace(count).zeros_like(count) + 1e-30)


def _mean_diagonal(x: Array) -> Array:
    """(blocks, n, n) or (blocks, n) -> (blocks,)."""
    xp = array_namespace(x)
    return xp.mean(x, axis=-1) if x.ndim == 2 else linalg.trace(x) / x.shape[-1]


def _or_one(x: Array) -> Array:
    xp = array_namespace(x)
    return xp.where(x > 0, x, xp.zeros_like(x) + 1)
