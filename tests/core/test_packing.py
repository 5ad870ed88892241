from __future__ import annotations

import functools

import numpy as np
import pytest

from conftest import assert_identical, dtype_name, normal
from suite.core import packing

SIDES = (1, 2, 5, 6, 301)


def symmetric(n, *batch):
    lower = np.tril(normal(*batch, n, n))
    return lower + np.swapaxes(np.tril(lower, -1), -1, -2)


@pytest.mark.parametrize("n", SIDES)
def test_symmetric_matrices_come_back_to_the_last_bit_from_half_the_numbers(xp, n):
    x = symmetric(n, 2, 3)
    packed = xp.run(packing.pack, xp.asarray(x))
    assert tuple(packed.shape) == (2, 3, *packing.packed_shape(n))
    assert packed.shape[-2] * packed.shape[-1] == n * (n + 1) // 2
    assert packing.side_of(packed) == n
    assert_identical(xp.run(packing.unpack, packed), x)


@pytest.mark.parametrize("n", SIDES)
def test_what_is_known_to_be_symmetric_is_packed_the_same(xp, n):
    x = xp.asarray(symmetric(n, 2, 3))
    packed = xp.run(functools.partial(packing.pack, symmetric=True), x)
    assert_identical(packed, xp.run(packing.pack, x))


@pytest.mark.parametrize("n", SIDES)
def test_the_diagonal_is_read_from_what_is_packed(xp, n):
    x = normal(2, n, n)
    packed = xp.run(packing.pack, xp.asarray(x))
    found = xp.run(packing.packed_diagonal, packed)
    assert_identical(found, np.diagonal(x, axis1=-2, axis2=-1))


@pytest.mark.parametrize("n", SIDES)
def test_upper_triangular_matrices_come_back_to_the_last_bit(xp, n):
    x = np.triu(normal(2, n, n))
    packed = xp.run(packing.pack_upper, xp.asarray(x))
    assert tuple(packed.shape) == (2, *packing.packed_shape(n))
    assert_identical(xp.run(packing.unpack_upper, packed), x)


@pytest.mark.parametrize("n", SIDES)
def test_each_number_of_the_lower_triangle_is_packed_once(xp, n):
    x = np.tril(np.arange(1.0, n * n + 1).reshape(n, n))
    packed = xp.numpy(xp.run(packing.pack, xp.asarray(x)))
    assert sorted(packed.reshape(-1)) == sorted(x[x > 0])


def test_what_is_above_the_diagonal_is_not_read(xp):
    x = normal(2, 7, 7)
    bad = x + np.triu(np.full((7, 7), np.nan), 1)
    assert_identical(xp.run(packing.pack, xp.asarray(bad)), xp.run(packing.pack, xp.asarray(x)))


def test_zeros_keep_their_sign_and_what_is_not_finite_its_place(xp):
    x = symmetric(6)
    x[4, 1] = x[1, 4] = -0.0
    x[5, 3] = x[3, 5] = np.nan
    x[2, 2] = np.inf
    back = xp.numpy(xp.run(packing.unpack, xp.run(packing.pack, xp.asarray(x))))
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(np.signbit(back[[4, 1], [1, 4]]), [True, True])


def test_half_precision_stays(xp):
    if xp.half is None:
        pytest.skip("the library has no half precision")
    x = xp.asarray(symmetric(5), xp.half)
    packed = xp.run(packing.pack, x)
    assert dtype_name(packed) == xp.half
    assert_identical(xp.run(packing.unpack, packed), xp.numpy(x))
