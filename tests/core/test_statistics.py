from __future__ import annotations

import math

import numpy as np
import pytest

from conftest import (
    also_eager_jax,
    assert_close,
    assert_identical,
    dtype_name,
    leaves,
    map_tree,
    normal,
    positive_definite,
    random,
    to_numpy,
)
from suite.core import _numpy
from suite.core.statistics import (
    LayerStatistics,
    add_transposed,
    batch_norm_second_moment_sum,
    complex_gradient,
    complex_second_moment_sum,
    cross_moment_sum,
    elementwise_second_moment_sum,
    grouped_second_moment_sum,
    mean_of_each,
    normalize,
    normalize_products,
    normalized_over_batch,
    second_moment_sum,
    unit_second_moment_sum,
)


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


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_groups_of_rows_are_summed_each_by_itself(xp, bias, diagonal):
    """Also one without rows; those behind the last are nobody's."""
    rows, ends = normal(9, 3), np.array([2, 2, 7])
    got = xp.run(
        grouped_second_moment_sum, xp.asarray(rows), xp.asarray(ends), bias=bias, diagonal=diagonal
    )
    parts = [rows[0:2], rows[2:2], rows[2:7]]
    expected = [second_moment_sum(part[None], bias=bias, diagonal=diagonal)[0] for part in parts]
    assert_close(got, np.stack(expected))


def test_each_blocks_mean_is_over_its_own_rows(xp):
    rows = [normal(n, 3, seed=n) for n in (4, 7)]
    sums = np.stack([second_moment_sum(x[None], bias=True)[0] for x in rows] + [np.zeros((4, 4))])
    expected = np.stack([x.T @ x / len(x) for x in rows] + [np.zeros((3, 3))])
    assert_close(xp.run(mean_of_each, xp.asarray(0.3 * sums)), expected)
    diagonals = np.diagonal(sums, axis1=1, axis2=2)
    got = xp.run(mean_of_each, xp.asarray(0.3 * diagonals))
    assert_close(got, np.diagonal(expected, axis1=1, axis2=2))


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


def test_a_unit_sums_the_outer_products_of_its_scale_and_shift(xp):
    scales, shifts = normal(5, 3), normal(5, 3, seed=1)
    args = xp.asarray(scales), xp.asarray(shifts)
    blocks, diagonal = (xp.run(unit_second_moment_sum, *args, both=both) for both in (True, False))
    expected = np.zeros((3, 2, 2))
    for r in range(5):
        for c in range(3):
            z = np.array([scales[r, c], shifts[r, c]])
            expected[c] += np.outer(z, z)
    assert_close(blocks, expected)
    assert_close(diagonal, expected[None, :, 0, 0])


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 6), (70, 2, 50, 41), (3, 1, 2, 1, 2)])
def test_units_of_a_batch_norm_are_those_of_its_normalized_input(xp, shape):
    x, g = normal(*shape) * 3 + 7, normal(*shape, seed=1)
    axes = tuple(i for i in range(len(shape)) if i != 1)
    normalized = x - x.mean(axes, keepdims=True)
    normalized = normalized / np.sqrt(normalized.var(axes, keepdims=True) + 0.1)
    z = np.stack([g * normalized, g], axis=-1)
    expected = np.einsum("nclz,ncly->czy", *2 * (z.reshape(*shape[:2], math.prod(shape[2:]), 2),))
    args = xp.asarray(x), xp.asarray(g)
    blocks, diagonal = (
        xp.run(batch_norm_second_moment_sum, *args, eps=0.1, both=both) for both in (True, False)
    )
    assert_close(blocks, expected)
    assert_close(diagonal, expected[None, :, 0, 0])


def test_chosen_examples_are_normalized_as_all_of_them_say(xp):
    x, chosen = normal(5, 3, 2, 4) * 3 + 7, np.array([4, 1, 1])
    deviation = np.sqrt(x.var((0, 2, 3), keepdims=True) + 0.1)
    expected = (x - x.mean((0, 2, 3), keepdims=True)) / deviation
    got = xp.run(normalized_over_batch, xp.asarray(x), 0.1, xp.asarray(chosen))
    assert_close(got, expected[chosen])


def test_units_in_half_precision_are_summed_in_single_precision(xp):
    if xp.half is None:
        pytest.skip("the library has no half precision")
    rows = xp.asarray(np.full((4096, 1), 8.0), xp.half)
    got = xp.run(unit_second_moment_sum, rows, rows, both=True)
    assert dtype_name(got) == "float32"
    assert_identical(got, np.full((1, 2, 2), 64 * 4096.0))


# kind: (shape of the parameter p, shape of the other operand x), with every way to broadcast
USES = {
    "sum": [((4,), (3, 2, 4)), ((2, 1), (3, 2, 4)), ((1, 1, 4), (3, 2, 4)), ((3, 4), (4,)), ((), (3,))],
    "product": [((4,), (3, 2, 4)), ((2, 1), (3, 2, 4)), ((1, 1, 4), (3, 2, 4)), ((3, 4), (4,)),
                ((), (3,))],
    "linear": [((2, 4), (5, 4)), ((2, 4), (3, 5, 4)), ((2, 4), (4,))],
    "right": [((4, 2), (5, 4)), ((4, 2), (3, 5, 4)), ((3, 4, 2), (3, 5, 4)), ((1, 4, 2), (3, 5, 4)),
              ((3, 4, 2), (5, 4))],
    "left": [((2, 4), (4, 5)), ((2, 4), (3, 4, 5)), ((3, 2, 4), (3, 4, 5)), ((1, 2, 4), (3, 4, 5)),
             ((3, 2, 4), (4, 5))],
}  # fmt: skip


def output(kind, p, x):
    """y, of which every entry is a sum over terms x[...] p[...]."""
    operation = {
        "sum": lambda: x + p,
        "product": lambda: x * p,
        "linear": lambda: x @ p.T,
        "right": lambda: x @ p,
        "left": lambda: p @ x,
    }
    return operation[kind]()


@pytest.mark.parametrize(
    ("kind", "shape", "other_shape"),
    [(kind, *shapes) for kind in USES for shapes in USES[kind]],
    ids=str,
)
def test_elementwise_second_moments_are_the_squares_of_every_rows_gradient(xp, kind, shape, other_shape):
    """A row is an entry of x's that p meets: its gradient by p, entry by entry of p."""
    x = normal(*other_shape, seed=1)
    g = normal(*output(kind, np.zeros(shape), x).shape, seed=2)
    expected = np.zeros(shape)
    for at in np.ndindex(shape):
        unit = np.zeros(shape)
        unit[at] = 1.0
        # y is linear in p: what p's entry is multiplied with on its way to every entry of y.
        slope = output(kind, unit, x) - output(kind, np.zeros(shape), x)
        for to in np.ndindex(g.shape):
            expected[at] += (g[to] * slope[to]) ** 2
    other = None if kind == "sum" else xp.asarray(x)
    got = xp.run(elementwise_second_moment_sum, xp.asarray(g), other, kind=kind, shape=shape)
    assert got.shape == shape
    assert_close(got, expected)


@pytest.mark.parametrize(
    ("own", "other", "out"),
    [
        ("i", "nti", "nt"),  # a vector
        ("i", "int", "tn"),
        ("i", "nti", "tin"),  # entry by entry
        ("it", "nti", "nti"),
        ("hi", "nthi", "nth"),  # a vector for each head
        ("ihd", "nthi", "dnth"),  # a matrix for each
        ("eio", "nti", "nteo"),  # all for each row
        ("oi", "ni", "on"),
        ("oai", "nai", "no"),
        ("j", "i", "ij"),
        ("ij", "j", "i"),  # of one row
    ],
)
def test_contractions_have_the_squares_of_every_rows_gradient(xp, own, other, out):
    sizes = {"n": 3, "t": 2, "h": 2, "i": 4, "o": 5, "d": 3, "e": 2, "a": 3, "j": 5}
    p, x, y = (np.zeros([sizes[label] for label in labels]) for labels in (own, other, out))
    x, g, expected = normal(*x.shape, seed=1), normal(*y.shape, seed=2), np.zeros(p.shape)
    for at in np.ndindex(p.shape):
        unit = np.zeros(p.shape)
        unit[at] = 1.0
        expected[at] = np.sum((g * np.einsum(f"{other},{own}->{out}", x, unit)) ** 2)
    kind = {"kind": "contraction", "labels": (own, other, out), "shape": p.shape}
    got = xp.run(elementwise_second_moment_sum, xp.asarray(g), xp.asarray(x), **kind)
    assert got.shape == p.shape
    assert_close(got, expected)


COMPLEX = [(kind, *shapes, None) for kind in USES for shapes in USES[kind]]
COMPLEX += [("contraction", (2, 4), (3, 5, 2, 4), ("hi", "nthi", "nth"))]
COMPLEX += [("contraction", (4, 3, 5), (2, 4, 5), ("iox", "bix", "box"))]


@pytest.mark.parametrize(("kind", "shape", "other_shape", "labels"), COMPLEX, ids=str)
def test_complex_parameters_have_the_squares_of_every_rows_parts(xp, kind, shape, other_shape, labels):
    """A row's gradient by p is g times the conjugate of what p's entry is multiplied with."""

    def complexes(*shape, seed):
        return normal(*shape, seed=seed) + 1j * normal(*shape, seed=seed + 1)

    def y_of(p, x):
        if labels is None:
            return output(kind, p, x)
        return np.einsum(f"{labels[1]},{labels[0]}->{labels[2]}", x, p)

    x = complexes(*other_shape, seed=1)
    g = complexes(*y_of(np.zeros(shape), x).shape, seed=3)
    expected = np.zeros((2, *shape))
    for at in np.ndindex(shape):
        unit = np.zeros(shape)
        unit[at] = 1.0
        rows = g * np.conj(y_of(unit, x) - y_of(np.zeros(shape), x))
        expected[(0, *at)], expected[(1, *at)] = np.sum(rows.real**2), np.sum(rows.imag**2)

    def parts(z):
        return xp.asarray(z.real.copy()), xp.asarray(z.imag.copy())

    other, options = (
        None if kind == "sum" else parts(x),
        {"kind": kind, "shape": shape, "labels": labels},
    )
    got = xp.run(complex_second_moment_sum, parts(g), other, **options)
    for one, part in zip(got, expected, strict=True):
        assert one.shape == shape
        assert_close(one, part)


@pytest.mark.parametrize(
    ("shape", "other_shape", "labels"), [case[1:] for case in COMPLEX[-2:]], ids=str
)
def test_a_complex_gradient_is_that_of_both_parts(xp, shape, other_shape, labels):
    """The loss changes by Re Σ ḡ dy where p changes, and so y."""

    def complexes(*shape, seed):
        return normal(*shape, seed=seed) + 1j * normal(*shape, seed=seed + 1)

    equation, x = f"{labels[1]},{labels[0]}->{labels[2]}", complexes(*other_shape, seed=1)
    g = complexes(*np.einsum(equation, x, np.zeros(shape)).shape, seed=3)
    parts = [[xp.asarray(part.copy()) for part in (z.real, z.imag)] for z in (g, x)]
    found = xp.run(complex_gradient, *parts, labels=labels, shape=shape)
    for unit, got in zip((1.0, 1.0j), found, strict=True):
        expected = np.zeros(shape)
        for at in np.ndindex(shape):
            change = np.zeros(shape, complex)
            change[at] = unit
            expected[at] = np.sum(g.conj() * np.einsum(equation, x, change)).real
        assert_close(got, expected)


# How many rows each group has, and how many there are behind the last one's.
GROUPS = [((2, 1, 3), 0), ((0, 4, 0, 1), 2), ((0, 0, 7, 0), 0), ((5,), 1), ((0, 0), 3), ((0, 0), 0),
          ((1,) * 9, 0), ((9, 1, 1, 1, 1, 1), 0)]  # fmt: skip


@also_eager_jax
@pytest.mark.parametrize(("sizes", "behind"), GROUPS, ids=str)
def test_a_grouped_product_has_the_squares_of_its_rows(xp, sizes, behind):
    """A row's gradient by its group's matrix is x gᵀ. What lies behind the last group is no number."""
    rows, groups = sum(sizes) + behind, len(sizes)
    x, g, ends = normal(rows, 3, seed=1), normal(rows, 2, seed=2), np.cumsum(sizes)
    expected = np.zeros((groups, 3, 2))
    for row in range(sum(sizes)):
        group = next(i for i in range(groups) if row < ends[i])
        expected[group] += np.outer(x[row], g[row]) ** 2
    x[sum(sizes) :] = g[sum(sizes) :] = np.nan
    g, x, ends = xp.asarray(g), xp.asarray(x), xp.asarray(ends, "int32")

    def squares(g, x, ends):
        return elementwise_second_moment_sum(g, x, "grouped", expected.shape, ends)

    got = xp.run(squares, g, x, ends)
    assert got.shape == expected.shape
    assert_close(got, expected)
    if xp.name == "torch":  # elsewhere than on a CPU
        assert_close(_numpy.over_groups(lambda x, g: x.mT @ g, x * x, g * g, ends), expected)


def test_kfac_pytorch_scaling_is_that_of_its_covariances(xp):
    """Patches and gradients are divided by the T places, then averaged over all N T rows."""
    N, T, patches, gradients = 4, 6, normal(24, 3), normal(24, 2)

    def get_cov(rows):  # kfac-pytorch 0.4.1, kfac/layers/utils.py
        scaled = rows.T @ (rows / rows.shape[0])
        return (scaled + scaled.T) / 2

    raw = sums(xp, patches[None], gradients[None])
    for reduction in ("mean", "sum"):  # it knows neither of them
        A, G = xp.run(
            normalize, raw, xp.asarray(float(N)), loss_reduction=reduction,
            factor_scaling="kfac_pytorch", places=T,
        )  # fmt: skip
        assert_close(A, get_cov(patches / T)[None])
        assert_close(G, get_cov(gradients / T)[None])


def test_products_are_in_the_units_of_the_factors(xp):
    """One row: the outer product of its squares is that of the diagonals of A and G."""
    N, inputs, gradients = 6, normal(1, 1, 3), normal(1, 1, 2)
    products = np.einsum("bri,brj->bij", gradients**2, inputs**2)
    for reduction in ("mean", "sum"):
        A, G = map(to_numpy, curvature(xp, sums(xp, inputs, gradients), N, reduction))
        got = xp.run(
            normalize_products, xp.asarray(products), xp.asarray(float(N)), loss_reduction=reduction
        )
        assert_close(to_numpy(got)[0], np.outer(np.diag(G[0]), np.diag(A[0])))


# One weight, used as W and as its transpose


def uses(diagonal=False):
    """(A, G) of the use as W (3 by 4) and, sides exchanged, of the use as its transpose."""
    A, G = positive_definite(2, 4), positive_definite(2, 3)
    other_A, other_G = 3 * positive_definite(2, 3, seed=1), 0.2 * positive_definite(2, 4, seed=1)
    if diagonal:  # the side of 3
        G, other_A = (np.stack([np.diag(x) for x in stack]) for stack in (G, other_A))
    return A, G, other_A, other_G


def total(x):
    return np.sum(x, axis=-1) if x.ndim == 2 else np.trace(x, axis1=-2, axis2=-1)


@pytest.mark.parametrize("diagonal", [False, True], ids=["dense", "diagonal"])
def test_both_uses_keep_their_trace_and_share_the_shape_by_it(xp, diagonal):
    A, G, other_A, other_G = uses(diagonal)
    got = [to_numpy(x) for x in xp.run(add_transposed, *xp.convert((A, G, other_A, other_G)))]
    traces = total(A) * total(G), total(other_A) * total(other_G)
    assert_close(total(got[0]) * total(got[1]), traces[0] + traces[1])
    assert_close(total(got[0]), total(A))
    share = traces[0] / (traces[0] + traces[1])
    for joined, own, other in ((got[0], A, other_G), (got[1], G, other_A)):
        for k in range(2):
            expected = share[k] * own[k] / total(own)[k] + (1 - share[k]) * other[k] / total(other)[k]
            assert_close(joined[k] / total(joined)[k], expected)


@pytest.mark.parametrize("which", ["as W", "as its transpose", "neither"])
def test_a_use_that_is_alone_is_all_there_is(xp, which):
    A, G, other_A, other_G = uses()
    if which != "as W":
        A, G = 0 * A, 0 * G
    if which != "as its transpose":
        other_A, other_G = 0 * other_A, 0 * other_G
    got = [to_numpy(x) for x in xp.run(add_transposed, *xp.convert((A, G, other_A, other_G)))]
    for k in range(2):
        expected = np.kron(G[k], A[k]) + np.kron(other_A[k], other_G[k])
        assert_close(np.kron(got[1][k], got[0][k]), expected)


def test_equal_uses_are_twice_the_one(xp):
    A, G, _, _ = uses()
    got = [to_numpy(x) for x in xp.run(add_transposed, *xp.convert((A, G, G, A)))]
    for k in range(2):
        assert_close(np.kron(got[1][k], got[0][k]), 2 * np.kron(G[k], A[k]))


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -2, 2])
def test_channels_may_be_on_any_axis(xp, both, axis):
    scales, shifts = normal(3, 4, 5, seed=1), normal(3, 4, 5, seed=2)
    channels = scales.shape[axis]
    rows = [np.moveaxis(x, axis, -1).reshape(-1, channels) for x in (scales, shifts)]
    z = np.stack(rows, axis=-1)  # (rows, channels, 2)
    expected = np.einsum("rci,rcj->cij", z, z) if both else (rows[0] ** 2).sum(0)[None]
    got = xp.run(
        lambda s, t: unit_second_moment_sum(s, t, both, axis), xp.asarray(scales), xp.asarray(shifts)
    )
    assert_close(got, expected)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_cross_moment_sum_is_the_sum_of_outer_products(xp, bias):
    g, a = normal(2, 5, 3), normal(2, 5, 4, seed=1)
    full = np.concatenate([a, np.ones((2, 5, 1))], axis=-1) if bias else a
    expected = np.stack([sum(np.outer(x, y) for x, y in zip(*rows)) for rows in zip(g, full)])  # noqa: B905
    assert_close(xp.run(cross_moment_sum, xp.asarray(g), xp.asarray(a), bias=bias), expected)
