from __future__ import annotations

import numpy as np
import pytest

from conftest import assert_close, assert_identical, dtype_name, leaves, map_tree, normal, random
from suite.core.statistics import LayerStatistics, normalize, second_moment_sum


def sums(xp, inputs, output_gradients):
    """Raw sums of one use of a layer, for rows (blocks, n, d)."""
    return LayerStatistics(
        xp.run(second_moment_sum, xp.asarray(inputs)),
        xp.run(second_moment_sum, xp.asarray(output_gradients)),
        xp.asarray(float(inputs.shape[1])),
    )


def curvature(xp, statistics, terms, loss_reduction):
    return xp.run(normalize, statistics, xp.asarray(float(terms)), loss_reduction=loss_reduction)


def add(*parts):
    return LayerStatistics(*(sum(fields[1:], fields[0]) for fields in zip(*parts, strict=True)))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_second_moment_sum_is_the_sum_of_outer_products(xp, bias):
    rows = normal(2, 5, 3)
    full = np.concatenate([rows, np.ones((2, 5, 1))], axis=-1) if bias else rows
    expected = sum(np.stack([np.outer(block[k], block[k]) for block in full]) for k in range(5))
    dense = xp.run(second_moment_sum, xp.asarray(rows), bias=bias)
    diagonal = xp.run(second_moment_sum, xp.asarray(rows), bias=bias, diagonal=True)
    assert_close(dense, expected)
    assert_close(diagonal, np.stack([np.diag(block) for block in expected]))


@pytest.mark.parametrize("diagonal", [False, True], ids=["dense", "diagonal"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_no_rows_give_zero(xp, bias, diagonal):
    # An empty batch: the last shard of a data set on one of many ranks.
    got = second_moment_sum(xp.asarray(np.zeros((2, 0, 3))), bias=bias, diagonal=diagonal)
    assert_identical(got, np.zeros((2, 3 + bias) if diagonal else (2, 3 + bias, 3 + bias)))


def test_second_moment_sum_is_symmetric_and_positive_semidefinite(xp):
    S = xp.numpy(xp.run(second_moment_sum, random(xp, 2, 2, 5), bias=True))
    assert_close(S, np.swapaxes(S, -1, -2), rtol=1e-15)
    assert np.linalg.eigvalsh(S).min() > -1e-12


def test_half_precision_rows_are_summed_in_single_precision(xp):
    if xp.half is None:
        pytest.skip("the library has no half precision")
    # 4096 ones: bfloat16 stops counting at 256, float16 overflows beyond 65504.
    S = xp.run(second_moment_sum, xp.asarray(np.full((1, 4096, 2), 8.0), xp.half), bias=True)
    assert dtype_name(S) == "float32"
    assert_identical(S, 4096.0 * np.array([[[64, 64, 8], [64, 64, 8], [8, 8, 1]]]))


def test_mean_loss_rescales_each_terms_gradient_and_sum_loss_does_not(xp):
    """With the loss a mean over N terms, a term's own gradient is N times what backward gives."""
    N, inputs, own_gradients = 6, normal(1, 6, 3), normal(1, 6, 2)
    fisher_G = np.einsum("bni,bnj->bij", own_gradients, own_gradients)
    for reduction, divisor, expected in (("mean", N, fisher_G / N), ("sum", 1, fisher_G)):
        A, G = curvature(xp, sums(xp, inputs, own_gradients / divisor), N, reduction)
        assert_close(A, np.einsum("bni,bnj->bij", inputs, inputs) / N)
        assert_close(G, expected)


def test_repeating_the_data_changes_nothing_for_a_mean_loss(xp):
    N, inputs, gradients = 4, normal(1, 4, 3), normal(1, 4, 2)
    once = curvature(xp, sums(xp, inputs, gradients), N, "mean")
    # Every term now has half its weight in the mean.
    twice = sums(xp, np.tile(inputs, (1, 2, 1)), np.tile(gradients, (1, 2, 1)) / 2)
    for x, y in zip(curvature(xp, twice, 2 * N, "mean"), once, strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_of_uneven_size_add_up(xp, reduction):
    N, inputs, gradients = 6, normal(1, 6, 3), normal(1, 6, 2)
    whole = curvature(xp, sums(xp, inputs, gradients), N, reduction)
    parts = [sums(xp, inputs[:, s], gradients[:, s]) for s in (slice(0, 1), slice(1, 3), slice(3, 6))]
    for x, y in zip(curvature(xp, xp.run(add, *parts), N, reduction), whole, strict=True):
        assert_close(x, y)


def test_averaging_sums_over_ranks_with_the_gradients_changes_nothing(xp):
    """k ranks, each with its own mean loss over its share: gradients and sums are averaged alike."""
    k, N, inputs, gradients = 3, 6, normal(1, 6, 3), normal(1, 6, 2)
    whole = curvature(xp, sums(xp, inputs, gradients), N, "mean")
    shares = [slice(r * N // k, (r + 1) * N // k) for r in range(k)]
    ranks = [sums(xp, inputs[:, s], k * gradients[:, s]) for s in shares]
    average = xp.run(lambda *ranks: map_tree(lambda x: x / k, add(*ranks)), *ranks)
    for x, y in zip(curvature(xp, average, N / k, "mean"), whole, strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_layer_that_saw_nothing_has_zero_factors(xp, reduction):
    nothing = LayerStatistics(
        xp.asarray(np.zeros((1, 3, 3))), xp.asarray(np.zeros((1, 2, 2))), xp.asarray(0.0)
    )
    A, G = xp.run(normalize, nothing, xp.asarray(0.0), loss_reduction=reduction)
    assert_identical((A, G), (np.zeros((1, 3, 3)), np.zeros((1, 2, 2))))


def test_factors_keep_their_dtype_whatever_the_counts_are(xp):
    statistics = LayerStatistics(
        random(xp, 1, 3, 3, dtype="float32"), random(xp, 1, 2, 2, dtype="float32"), xp.asarray(4.0)
    )
    for x in leaves(xp.run(normalize, statistics, xp.asarray(4.0), loss_reduction="mean")):
        assert dtype_name(x) == "float32"
