from __future__ import annotations

import numpy as np
import pytest

from conftest import dtype_name, to_numpy
from suite.core import noise
from suite.core.rounding import stochastic_round

# Around powers of two, where the unit changes, and where nothing may happen.
VALUES = np.array([1.0, 0.999, 1.001, -2.0, -1.997, 3.1416, 3e-3, -999.0, 0.0, 1 + 2**-9], np.float32)


def draws(xp, count=2000):
    streams = xp.asarray(np.arange(count, dtype=np.int32))
    return noise.unit_noise(streams, 3, (len(VALUES),), xp.dtype("float32"))


def rounded(xp):
    if xp.half is None:
        pytest.skip("no narrow dtype")
    x = xp.asarray(np.tile(VALUES, (2000, 1)))
    return stochastic_round(x, draws(xp), xp.dtype(xp.half))


def units(xp):
    digits = 7 if xp.half == "bfloat16" else 10
    return 2.0 ** (np.floor(np.log2(np.abs(np.where(VALUES == 0, 1, VALUES)).astype(float))) - digits)


def test_the_mean_is_the_value(xp):
    result = to_numpy(rounded(xp)).astype(float)
    inside = (VALUES == 0) | (np.abs(VALUES) > 1e-3) & (np.abs(VALUES) < 1e4)  # of float16, too
    error = np.abs(result.mean(0) - VALUES.astype(float)) / units(xp)
    assert error[inside].max() < 0.06  # five standard errors


def test_only_neighbours_are_chosen_and_what_fits_stays(xp):
    result = rounded(xp)
    assert dtype_name(result) == xp.half
    result = to_numpy(result).astype(float)
    inside = (np.abs(VALUES) > 1e-3) & (np.abs(VALUES) < 1e4)
    assert (np.abs(result - VALUES) / units(xp))[:, inside].max() < 1
    assert set(np.unique(result[:, 0])) == {1.0}
    assert set(np.unique(result[:, 8])) == {0.0}
    assert len(np.unique(result[:, 5])) == 2


def test_what_is_as_wide_or_not_finite_is_left_alone(xp):
    x = xp.asarray(np.array([1.1, np.inf, -np.inf, np.nan], np.float32))
    unit = xp.asarray(np.ones(4, np.float32))
    np.testing.assert_array_equal(to_numpy(stochastic_round(x, unit, xp.dtype("float32"))), to_numpy(x))
    if xp.half is not None:
        result = to_numpy(stochastic_round(x, unit, xp.dtype(xp.half))).astype(float)
        np.testing.assert_array_equal(result[1:], [np.inf, -np.inf, np.nan])


def test_uses_of_noise_are_independent(xp):
    streams = xp.asarray(np.arange(4, dtype=np.int32))
    uses = [to_numpy(noise.draw(streams, 5, use, (500,), xp.dtype("float64"))) for use in range(6)]
    assert np.abs(np.corrcoef([u.reshape(-1) for u in uses]) - np.eye(6)).max() < 0.1
    np.testing.assert_array_equal(
        uses[0], to_numpy(noise.unit_noise(streams, 5, (500,), xp.dtype("float64")))
    )


@pytest.mark.parametrize("size", [1e-45, 3.8e-44, 1e-40, 1e-36, 3e38])
def test_the_mean_of_numbers_at_the_ends_of_the_range_is_the_value(xp, size):
    if xp.half != "bfloat16":
        pytest.skip("float16 has another range")
    x = np.full(20000, size, np.float32)
    noise = np.random.default_rng(0).uniform(-(3**0.5), 3**0.5, x.shape).astype(np.float32)
    result = to_numpy(stochastic_round(xp.asarray(x), xp.asarray(noise), xp.dtype(xp.half))).astype(
        float
    )
    assert np.isfinite(result).all()
    assert abs(result.mean() - float(x[0])) < 0.05 * max(float(x[0]), 1.2e-38)
