from __future__ import annotations

import numpy as np
import pytest

from conftest import (
    assert_close,
    assert_identical,
    dtype_name,
    normal,
    positive_definite,
    random,
    to_numpy,
)
from suite.core import step_size


@pytest.mark.parametrize("inner", [2.0, -2.0, 1e30])
def test_clipped_step_meets_the_limit_exactly(xp, inner):
    nu = xp.numpy(xp.run(step_size.kl_clip_coefficient, xp.asarray(inner), 0.5))
    assert_close(nu**2 * abs(inner), 0.5)
    assert 0 < nu < 1


@pytest.mark.parametrize("inner", [0.0, 0.1, -0.1, 0.5, 1e-300])
def test_short_step_is_left_alone(xp, inner):
    assert_identical(xp.run(step_size.kl_clip_coefficient, xp.asarray(inner), 0.5), np.float64(1))


@pytest.mark.parametrize("inner", [np.inf, -np.inf, np.nan])
def test_a_step_that_is_too_long_to_be_measured_is_not_taken(xp, inner):
    assert_identical(xp.run(step_size.kl_clip_coefficient, xp.asarray(inner), 0.5), np.float64(0))


def test_kl_clip_may_be_an_array_of_another_precision(xp):
    nu = xp.run(step_size.kl_clip_coefficient, xp.asarray(2.0), xp.asarray(0.5, "float32"))
    assert_identical(nu, np.float64(0.5))


def test_a_quadratic_step_is_the_minimum(xp):
    M, b = positive_definite(5, 2), normal(5, 2)
    step, change = xp.run(step_size.quadratic_step, xp.asarray(M), xp.asarray(b))
    expected = -np.linalg.solve(M, b[..., None])[..., 0]
    assert_close(step, expected)
    assert_close(change, np.einsum("ni,ni->n", b, expected) / 2)


@pytest.mark.parametrize("along", [0.0, 2.0])  # no step before, or one along the direction
def test_without_a_step_before_of_its_own_it_is_the_rate_alone(xp, along):
    v = np.array([1.0, along])
    M, b = 3 * np.outer(v, v), -v
    step, change = xp.run(step_size.quadratic_step, xp.asarray(M), xp.asarray(b))
    assert_close(step, [1 / 3, 0.0])
    assert_close(change, np.float64(-1 / 6))


def test_without_curvature_there_is_no_step(xp):
    step, change = xp.run(
        step_size.quadratic_step, xp.asarray(np.zeros((2, 2))), xp.asarray(np.array([-1.0, -1.0]))
    )
    assert_identical(step, np.zeros(2))
    assert_identical(change, np.float64(0))


def test_a_step_before_that_is_almost_along_the_direction_does_not_blow_up():
    rng = np.random.default_rng(0)
    for _ in range(200):
        v = rng.standard_normal(10)
        both = np.stack([v, v * 3 + 1e-7 * rng.standard_normal(10)]).astype(np.float32)
        M, b = both @ both.T, (both @ v.astype(np.float32))
        step, change = step_size.quadratic_step(M, -b)
        assert np.linalg.norm(step @ both - v) < 0.01 * np.linalg.norm(v)
        assert_close(change, -v @ v / 2, 1e-3)


def rms(x):
    return np.sqrt(np.mean(x * x, axis=(-2, -1)))


def test_rms_clip_scales_long_blocks_down_and_leaves_short_ones(xp):
    x = normal(3, 4, 3) * np.array([0.1, 2.0, 1e6])[:, None, None]
    got = xp.numpy(xp.run(step_size.rms_clip, xp.asarray(x), max_rms=1.1, ndim=2))
    assert_identical(got[0], x[0])
    assert_close(rms(got[1:]), np.full(2, 1.1))
    for k in (1, 2):
        assert_close(got[k] / rms(got[k]), x[k] / rms(x[k]))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_rms_clip_survives_the_extremes_of_single_precision(xp, size):
    x = (size * np.array([[1.0, -1.0], [0.5, 0.5]])).astype(np.float32)
    clipped = xp.numpy(xp.run(step_size.rms_clip, xp.asarray(x), max_rms=1.0, ndim=2))
    expected = x if size < 1 else x / size / rms(x.astype(np.float64) / size)
    np.testing.assert_allclose(clipped, expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's
@pytest.mark.parametrize("weight", [None, 0.5])
def test_a_bound_beyond_single_precision_is_none(xp, weight):
    x = xp.asarray(normal(2, 3), "float32")
    given = None if weight is None else xp.asarray(np.full(2, weight), "float32")
    scale = step_size.rms_clip_scale(x, 1e300, 1, given)
    assert_close(scale, np.full((2, 1), 1.0 if weight is None else 2.0))


def test_rms_clip_of_zero_is_zero(xp):
    assert_identical(
        xp.run(step_size.rms_clip, xp.asarray(np.zeros((2, 3))), max_rms=1.0, ndim=2), np.zeros((2, 3))
    )


def test_rms_clip_keeps_the_dtype(xp):
    digits = {"float32": 24, "float16": 11, "bfloat16": 8}
    for name in filter(None, ("float32", xp.half)):
        x = xp.asarray(100 * normal(2, 3, 2), name)
        clipped = xp.run(step_size.rms_clip, x, max_rms=1.0, ndim=2)
        assert dtype_name(clipped) == name
        # Computed in single precision and rounded once.
        exact = xp.numpy(x).astype(np.float64)
        exact = exact / rms(exact)[:, None, None]
        rounding = 1.01 * 2.0 ** -digits[name] + 1e-6
        np.testing.assert_allclose(xp.numpy(clipped), exact, rtol=rounding)


def test_max_rms_may_be_an_array(xp):
    x = random(xp, 2, 3, 2)
    by_number = xp.run(step_size.rms_clip, x, max_rms=0.25, ndim=2)
    assert_identical(xp.run(step_size.rms_clip, x, xp.asarray(0.25, "float32"), ndim=2), by_number)


def test_amplitude_clip_bounds_each_entry_and_leaves_the_others(xp):
    x = normal(3, 4)
    found = to_numpy(xp.run(step_size.amplitude_clip, xp.asarray(x), 0.5))
    np.testing.assert_array_equal(found, np.clip(x, -0.5, 0.5))


def test_normalized_tensors_have_norm_one_at_every_scale_and_zeros_stay(xp):
    x = normal(4, 3, 2) * np.array([1.0, 1e30, 1e-30, 0.0])[:, None, None]
    found = to_numpy(xp.run(step_size.normalized, xp.asarray(x, "float32"), ndim=2))
    lengths = np.sqrt(np.sum(found.astype(float) ** 2, axis=(1, 2)))
    assert_close(lengths, [1, 1, 1, 0], rtol=1e-6)
    assert_close(found[0], x[0] / np.linalg.norm(x[0]), rtol=1e-6)


def test_clipped_bounds_the_mean_first_and_entries_then(xp):
    x = 10 * normal(2, 3, 4)
    by_mean = to_numpy(step_size.rms_clip(xp.asarray(x), 0.8, 2))
    found = to_numpy(step_size.clipped(xp.asarray(x), (0.8, 1.0), 2))
    assert_close(found, np.clip(by_mean, -1, 1))
    assert_close(step_size.clipped(xp.asarray(x), 0.8, 2), by_mean)
    assert_close(step_size.clipped(xp.asarray(x), (None, 1.0), 2), np.clip(x, -1, 1))
    assert_close(step_size.clipped(xp.asarray(x), None, 2), x)


@pytest.mark.parametrize("clip", [None, 0.8, (0.8, 1.0), (None, 1.0)])
@pytest.mark.parametrize("weight", [0.3, [0.3, 2.0]])
def test_directions_still_to_be_divided_by_a_weight_are_clipped_as_if_they_were(xp, clip, weight):
    x, weight = np.array([1.0, 0.1])[:, None, None] * normal(2, 3, 4), np.asarray(weight)
    found = xp.run(lambda x, w: step_size.clipped(x, clip, 2, w), xp.asarray(x), xp.asarray(weight))
    expected = step_size.clipped(x / weight.reshape(-1, 1, 1), clip, 2)
    assert_close(found, expected)


@pytest.mark.parametrize("clip", [None, 0.8, (0.8, 1.0)])
def test_without_any_weight_nothing_was_seen(xp, clip):
    x, weight = xp.asarray(np.zeros((2, 3))), xp.asarray(np.zeros(()))
    assert_identical(step_size.clipped(x, clip, 2, weight), np.zeros((2, 3)))


@pytest.mark.parametrize("clip", [0.0, -1.0, (1.0, 0.0), (1.0,), (1.0, 1.0, 1.0)])
def test_a_bound_that_is_none_is_an_error(clip):
    with pytest.raises(ValueError, match="clip must be"):
        step_size.check_clip(clip)
