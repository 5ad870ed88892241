from __future__ import annotations

import importlib.util
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import assert_close, assert_identical, convolutions, library, normal, to_numpy
from oracles import convolution_rows
from suite.core import correlations, linalg
from suite.core._namespace import array_namespace, factorizations
from suite.core.correlations import output_second_moment_sum, second_moment_sum

NONE = ((0, 0), (0, 0))
SAME = ((1, 1), (1, 1))


@pytest.fixture(autouse=True, scope="module")
def free_launches():
    """What is small would be summed from patches on a CPU, too."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    with mock.patch("suite.core._torch.work_of_a_launch", return_value=0):
        yield


def oracle(x, *geometry, bias=False):
    """Σ p pᵀ over patches that are made entry by entry, a 1 appended to each with `bias`."""
    rows = np.stack(convolution_rows(x, *geometry))
    rows = np.concatenate([rows, np.ones((*rows.shape[:2], 1))], axis=-1) if bias else rows
    return np.einsum("gri,grj->gij", rows, rows)


@given(convolutions(), st.booleans())
def test_second_moments_are_those_of_the_rows(convolution, bias):
    assert_close(second_moment_sum(*convolution, bias=bias), oracle(*convolution, bias=bias))


@given(convolutions(ranks=(1, 2), places=5), st.booleans())
def test_second_moments_without_patches_are_those_of_the_rows(convolution, bias):
    """Whatever is less work."""
    with mock.patch.object(correlations._Plane, "work", return_value=0):
        got = second_moment_sum(*convolution, bias=bias)
    assert_close(got, oracle(*convolution, bias=bias))


@given(convolutions(ranks=(1, 2), places=5), st.booleans())
def test_second_moments_at_stride_one_are_those_of_the_rows(convolution, bias):
    x, kernel, stride, *rest = convolution
    geometry = kernel, [1] * len(stride), *rest
    assert_close(second_moment_sum(x, *geometry, bias=bias), oracle(x, *geometry, bias=bias))


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "made"),
    [
        *[(32, 3, 1, 1, False), (7, 3, 1, 1, False), (64, 7, 2, 3, False)],
        *[(3, 3, 1, 0, True), (32, 3, 2, 1, True)],
    ],
)
def test_patches_are_made_where_they_are_less_work(size, kernel, stride, padding, made):
    geometry = (kernel,) * 2, (stride,) * 2, ((padding,) * 2,) * 2, (1, 1)
    plane = correlations._Plane.second_moment_sum
    with mock.patch.object(correlations._Plane, "second_moment_sum", autospec=True) as used:
        used.side_effect = plane
        second_moment_sum(normal(1, 1, size, size), *geometry)
    assert used.called != made


# Every kind of border: the same size, one side only, more padding than the kernel reaches, none, images
# smaller than the kernel or than its reach, kernels that are not square, groups, channels by themselves.
GEOMETRIES = [
    ((2, 2, 6, 5), (3, 3), (1, 1), SAME, (1, 1), 1),
    ((2, 2, 6, 5), (5, 5), (1, 1), ((2, 2), (2, 2)), (1, 1), 1),
    ((1, 2, 12, 11), (7, 5), (1, 1), ((3, 3), (2, 2)), (1, 1), 2),
    ((2, 2, 6, 5), (3, 3), (1, 1), ((2, 0), (0, 1)), (1, 1), 1),
    ((2, 2, 4, 5), (2, 3), (1, 1), ((3, 4), (5, 3)), (1, 1), 1),
    ((2, 2, 9, 8), (3, 3), (1, 1), NONE, (1, 1), 1),
    ((2, 2, 9, 8), (3, 2), (1, 1), ((2, 2), (3, 3)), (2, 3), 1),
    ((3, 2, 1, 2), (3, 3), (1, 1), SAME, (1, 1), 1),
    ((3, 2, 2, 1), (5, 5), (1, 1), ((2, 2), (4, 1)), (1, 1), 1),
    ((2, 2, 2, 2), (3, 3), (1, 1), ((4, 4), (4, 4)), (4, 4), 1),
    ((2, 6, 5, 5), (3, 3), (1, 1), SAME, (1, 1), 3),
    ((2, 4, 5, 5), (3, 3), (1, 1), SAME, (1, 1), 4),
    ((2, 3, 5, 6), (1, 3), (1, 1), ((0, 0), (1, 1)), (1, 1), 1),
    ((2, 3, 5, 6), (3, 1), (1, 1), ((1, 1), (0, 0)), (1, 1), 1),
    ((2, 3, 5, 6), (1, 1), (1, 1), NONE, (1, 1), 1),
    ((2, 3, 5, 6), (1, 1), (2, 3), NONE, (1, 1), 1),
    ((2, 3, 5, 6), (1, 1), (2, 1), ((1, 0), (0, 1)), (1, 1), 3),
    ((2, 3, 5, 6), (1, 3), (2, 1), ((0, 0), (1, 1)), (1, 1), 1),
    ((2, 4, 6, 5), (3, 2), (1, 2), ((1, 2), (0, 1)), (2, 1), 2),
    ((2, 2, 13, 12), (7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1), 1),
    ((2, 4, 13, 11), (7, 5), (3, 2), ((3, 1), (0, 2)), (1, 1), 2),
    ((2, 2, 17, 16), (5, 5), (2, 1), ((2, 2), (4, 4)), (1, 2), 1),
    ((2, 2, 23, 22), (5, 5), (2, 2), ((4, 0), (0, 3)), (2, 1), 1),
    ((2, 2, 30), (9,), (2,), ((4, 3),), (1,), 1),
    ((2, 3, 9), (5,), (1,), ((2, 2),), (1,), 1),
    ((2, 4, 9), (3,), (1,), ((0, 4),), (2,), 2),
    ((1, 2, 3, 4, 3), (2, 2, 3), (1, 1, 1), ((1, 0), (0, 0), (1, 1)), (1, 1, 1), 1),
]


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding", "dilation", "groups"), GEOMETRIES)
def test_second_moments_are_those_of_the_rows_at_every_border(
    shape, kernel, stride, padding, dilation, groups
):
    x, geometry = normal(*shape), (kernel, stride, padding, dilation, groups)
    for name in ("numpy", "torch"):
        for bias in (False, True):
            got = second_moment_sum(library(name).asarray(x), *geometry, bias=bias)
            assert_close(to_numpy(got), oracle(x, *geometry, bias=bias))


@pytest.mark.parametrize("geometry", GEOMETRIES[:14:3])
def test_second_moments_are_the_same_in_every_library(xp, geometry):
    shape, *geometry = geometry
    x = normal(*shape)
    for bias in (False, True):
        got = xp.run(lambda x, bias=bias: second_moment_sum(x, *geometry, bias=bias), xp.asarray(x))
        assert_close(xp.numpy(got), oracle(x, *geometry, bias=bias))


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "view"])
@pytest.mark.parametrize(("shape", "kernel", "stride", "padding", "dilation", "groups"), GEOMETRIES)
def test_single_precision_on_a_cpu_gives_the_same(
    shape, kernel, stride, padding, dilation, groups, layout
):
    torch = pytest.importorskip("torch")
    x, geometry = normal(*shape), (kernel, stride, padding, dilation, groups)
    given = torch.tensor(x, dtype=torch.float32)
    if layout == "channels last":
        given = given.movedim(1, -1).contiguous().movedim(-1, 1)
    elif layout == "view":
        given = torch.stack([given, given + 1], -1)[..., 0]
    expected = oracle(x, *geometry, bias=True)
    got = second_moment_sum(given, *geometry, bias=True)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(to_numpy(got), expected, rtol=1e-5, atol=1e-5 * expected.max())


def test_many_images_sum_to_the_precision_of_few():
    torch = pytest.importorskip("torch")
    x = torch.rand(96, 3, 32, 32, generator=torch.Generator().manual_seed(0)) + 1
    geometry = (3, 3), (1, 1), SAME, (1, 1), 1
    got, expected = (second_moment_sum(y, *geometry) for y in (x, x.double()))
    assert float(((got - expected) / expected).abs().max()) < 5e-6


def test_half_precision_is_summed_in_single(xp):
    x = xp.asarray(np.full((1, 2, 48, 48), 8.0), xp.half)  # 64 * 48**2 is beyond float16
    got = xp.run(second_moment_sum, x, kernel=(3, 3), stride=(1, 1), padding=SAME, dilation=(1, 1))
    assert_identical(xp.numpy(got)[0, 4, 4], np.float32(64 * 48**2))
    outputs = xp.run(output_second_moment_sum, x)
    assert_identical(xp.numpy(outputs), np.full((1, 2, 2), 64 * 48**2, np.float32))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shape", [(3, 4, 5, 2), (3, 4, 1), (2, 4), (1, 4, 2, 2, 3), (0, 4, 5, 2)])
def test_output_second_moments_are_those_of_the_rows(xp, shape, groups):
    y = normal(*shape)
    got = xp.run(output_second_moment_sum, xp.asarray(y), groups=groups)
    grouped = y.reshape(shape[0], groups, 4 // groups, math.prod(shape[2:]))
    assert_close(xp.numpy(got), np.einsum("ngcp,ngdp->gcd", grouped, grouped))


@pytest.mark.parametrize("groups", [1, 2])
def test_correlations_are_sums_over_shifted_positions(xp, groups):
    """Position by position, zeros around the image."""
    x, (tall, wide), (down, right) = normal(2, 4, 5, 3), (3, 2), (2, 3)
    grouped = x.reshape(2, groups, -1, 5, 3)
    c = grouped.shape[2]
    expected = np.zeros((groups, tall, 2 * wide - 1, c, c))
    for i, j, y, z in np.ndindex(tall, 2 * wide - 1, 5, 3):
        v, w = y + i * down, z + (j - wide + 1) * right
        if v < 5 and 0 <= w < 3:
            pairs = grouped[..., y, z], grouped[..., v, w]
            expected[:, i, j] += np.einsum("ngc,ngd->gcd", *pairs)
    got = xp.run(
        lambda x: factorizations(array_namespace(x)).correlations(
            x, (tall, wide), (down, right), groups
        ),
        xp.asarray(x),
    )
    assert_close(xp.numpy(got), expected)


def test_summed_gram_is_the_sum_of_products(xp):
    x = normal(3, 4, 5)
    got = xp.run(linalg.summed_gram, xp.asarray(x))
    assert_close(xp.numpy(got), np.einsum("kmn,kpn->mp", x, x))


def test_an_empty_batch_has_sums_of_zero():
    for name in ("numpy", "torch"):
        x = library(name).asarray(np.zeros((0, 4, 5, 4)))
        got = second_moment_sum(x, (3, 3), (1, 1), SAME, (1, 1), 2)
        assert_identical(to_numpy(got), np.zeros((2, 18, 18)))
