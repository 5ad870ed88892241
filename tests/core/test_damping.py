from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import assert_close, assert_identical, dtype_name, leaves, normal, positive_definite
from suite.core.damping import factored_damping, levenberg_marquardt, noise_size, split_damping, tikhonov


def test_tikhonov_is_the_inverse_of_the_damped_value(xp):
    values = np.abs(normal(2, 4))
    assert_close(xp.run(tikhonov, xp.asarray(values), 0.3), 1 / (values + 0.3))


def test_tikhonov_without_damping_gives_null_directions_a_zero_step(xp):
    got = xp.run(tikhonov, xp.asarray([0.0, 4.0, 1e-300]), damping=0.0)
    assert_close(got, np.array([0.0, 0.25, 1e300]))


def test_tikhonov_does_not_divide_by_what_leaves_the_range():
    tiny = np.array([1e-45, 1e-40, 1e-37], np.float32)
    assert_identical(tikhonov(tiny, 0.0)[:2], np.zeros(2, np.float32))
    assert_close(tikhonov(tiny, 0.0)[2:], [1e37], 1e-6)


@pytest.mark.parametrize("zero", [0, 0.0])
def test_zero_damping_is_honoured(zero):
    assert_identical(tikhonov(np.array([0.5]), zero), np.array([2.0]))
    assert_identical(split_damping(np.array([3.0]), np.array([2.0]), zero), (np.zeros(1), np.zeros(1)))


def test_noise_is_the_damping_or_what_no_evidence_of_its_precision_shows(xp):
    sizes = np.array([0.0, 1e-9, 1e3])
    assert_identical(xp.numpy(xp.run(noise_size, xp.asarray(sizes), damping=1e-9)), np.full(3, 1e-9))
    single = xp.numpy(xp.run(noise_size, xp.asarray(sizes, "float32"), damping=0.0))
    assert single[0] == 0
    assert np.all(single[1:] > 0)
    assert np.all(single[1:] < 1e-8 * np.finfo(np.float32).eps * sizes[1:])


def test_split_parts_multiply_to_the_damping_in_the_ratio_of_the_means(xp):
    mean_A, mean_G = np.array([4.0, 1e-8, 7.0]), np.array([9.0, 1e8, 7.0])
    part_A, part_G = map(xp.numpy, xp.run(split_damping, xp.asarray(mean_A), xp.asarray(mean_G), 0.25))
    assert_close(part_A * part_G, np.full(3, 0.25))
    assert_close(part_A / part_G, mean_A / mean_G, rtol=1e-9)


def test_factored_damping_does_not_depend_on_which_factor_carries_the_scale(xp):
    """(c A) ⊗ (G / c) is A ⊗ G, and so is the damped product."""
    A, G, c = positive_definite(4), positive_definite(3), 1e4

    def product(A, G):
        damped_A, damped_G = xp.run(factored_damping, xp.asarray(A), xp.asarray(G), 0.1)
        return np.kron(xp.numpy(damped_A), xp.numpy(damped_G))

    assert_close(product(c * A, G / c), product(A, G))


def test_factored_damping_is_the_papers_formula(xp):
    A, G, damping = 7 * positive_definite(4), positive_definite(3), 0.1
    pi = np.sqrt((np.trace(A) / 4) / (np.trace(G) / 3))
    damped_A, damped_G = xp.run(factored_damping, xp.asarray(A), xp.asarray(G), damping)
    assert_close(damped_A, A + pi * np.sqrt(damping) * np.eye(4))
    assert_close(damped_G, G + np.sqrt(damping) / pi * np.eye(3))


def test_split_is_even_where_a_factor_has_no_scale(xp):
    means = xp.asarray([0.0, 5.0, 0.0]), xp.asarray([2.0, 0.0, 0.0])
    for part in xp.run(split_damping, *means, 0.25):
        assert_identical(part, np.full(3, 0.5))


def test_split_survives_means_that_are_single_precision_s_extremes_apart(xp):
    means = xp.asarray([1e30, 1e-30], "float32"), xp.asarray([1e-30, 1e30], "float32")
    part_A, part_G = map(xp.numpy, xp.run(split_damping, *means, 1e-4))
    assert_close(part_A, np.array([1e28, 1e-32]), rtol=1e-5)
    np.testing.assert_allclose(part_G, [1e-32, 1e28], rtol=1e-5)


def test_damping_may_be_an_array_of_another_precision(xp):
    damping = xp.asarray(0.25, "float32")
    A, G = xp.asarray(positive_definite(4)), xp.asarray(positive_definite(3))
    as_array = xp.run(factored_damping, A, G, damping)
    assert all(dtype_name(x) == "float64" for x in leaves(as_array))
    for x, y in zip(as_array, xp.run(factored_damping, A, G, 0.25), strict=True):
        assert_close(x, y)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_more_damping_never_lengthens_a_step(one, other):
    low, high = sorted((one, other))
    values = np.array([0.0, 1e-9, 1.0, 1e9])
    assert np.all(tikhonov(values, high) <= tikhonov(values, low))


def test_damping_falls_after_good_steps_and_rises_after_bad_ones(xp):
    """ρ = 1, 0.3, 0.2, 0, -0.5, -1; then steps to be taken back, -1.1, NaN and infinity."""
    actual = np.array([-2.0, -0.6, -0.4, 0.0, 1.0, 2.0, 2.2, np.nan, np.inf])
    damping, stands = xp.run(
        levenberg_marquardt,
        xp.asarray(np.full(9, 0.1)),
        xp.asarray(actual),
        xp.asarray(np.full(9, -2.0)),
        decay=0.5,
        growth=10.0,
    )
    assert_close(damping, [0.05, 0.05, 0.1, 0.1, 0.2, 0.2, 1.0, 1.0, 1.0])
    assert_identical(stands, np.arange(9) < 6)


def test_damping_stays_within_its_bounds(xp):
    damping, _ = xp.run(
        levenberg_marquardt,
        xp.asarray([1e-3, 1e3]),
        xp.asarray([-1.0, 9.0]),
        xp.asarray([-1.0, -1.0]),
        lowest=9e-4,
        highest=2e3,
    )
    assert_close(damping, [9e-4, 2e3])
