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

from typing import Literal, NamedTuple

from suite.core._namespace import Array, array_namespace, device_of, lift

LossReduction = Literal["mean", "sum"]


class LayerStatistics(NamedTuple):
    """Raw sums over the rows that a layer saw, for a stack of blocks (groups of a convolution)."""

    A: Array  # (blocks, d_in, d_in) or its diagonal (blocks, d_in): Σ a aᵀ
    G: Array  # (blocks, d_out, d_out) or its diagonal (blocks, d_out): Σ g gᵀ
    rows: Array  # (): how many rows were summed


def second_moment_sum(rows: Array, *, diagonal: bool = False, bias: bool = False) -> Array:
    """Σ x xᵀ over rows x, or the diagonal of that; with `bias`, of the rows [x, 1].

    The column of ones is added to the sums, not to the rows: no copy of the data.

    Args:
        rows: (blocks, n, d).
        diagonal: return the (blocks, d) diagonal only.
        bias: append the coordinate 1 to every row.

    Returns:
        (blocks, d', d') or (blocks, d'), d' = d + bias, in at least single precision.
    """
    xp = array_namespace(rows)
    rows = lift(rows)
    count = xp.zeros((rows.shape[0], 1), dtype=rows.dtype, device=device_of(rows)) + float(rows.shape[1])
    if diagonal:
        squares = xp.sum(rows * rows, axis=1)
        return xp.concat([squares, count], axis=-1) if bias else squares
    products = xp.matmul(xp.matrix_transpose(rows), rows)
    if not bias:
        return products
    sums = xp.sum(rows, axis=1)
    right = xp.concat([sums, count], axis=-1)[..., None]
    return xp.concat([xp.concat([products, sums[:, None, :]], axis=-2), right], axis=-1)


def normalize(
    statistics: LayerStatistics, terms: Array, loss_reduction: LossReduction
) -> tuple[Array, Array]:
    """Curvature factors (A, G) from raw sums: see the module's equation.

    Args:
        statistics: sums of one layer; where `rows` is 0 the result is 0.
        terms: (), N, how many terms the loss averages or sums.
        loss_reduction: 'mean' or 'sum', what the loss does over its terms.
    """
    xp = array_namespace(statistics.A)
    rows = xp.maximum(statistics.rows, xp.zeros_like(statistics.rows) + 1e-30)
    A = statistics.A / xp.astype(rows, statistics.A.dtype)
    if loss_reduction == "sum":
        return A, statistics.G
    return A, statistics.G * xp.astype(terms, statistics.G.dtype)
