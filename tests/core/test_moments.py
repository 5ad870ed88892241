from __future__ import annotations

import numpy as np
import pytest

from conftest import assert_close, dtype_name, normal, random
from oracles import weighted_mean
from suite.core import moments


def test_first_update_is_the_value_itself(xp):
    x = random(xp, 3, 2)
    average = xp.run(moments.update_average, x * 0, x, 0.95)
    weight = xp.run(moments.update_average, xp.asarray(0.0), xp.asarray(1.0), 0.95)
    assert_close(xp.run(moments.unbiased, average, weight), x)


def test_average_is_right_when_the_decay_changes_and_steps_are_skipped(xp):
    """Each item weighs (1 - its own β) times all later β; a power of one β cannot say that."""
    decays = [0.9, 0.5, 0.75, 0.0, 0.99]
    history = [normal(3, 2, seed=k) for k in range(len(decays))]
    average, weight = xp.asarray(np.zeros((3, 2))), xp.asarray(0.0)
    for x, decay in zip(history, decays, strict=True):
        average = xp.run(moments.update_average, average, xp.asarray(x), decay)
        weight = xp.run(moments.update_average, weight, xp.asarray(1.0), decay)
    weights = [(1 - d) * np.prod(decays[k + 1 :]) for k, d in enumerate(decays)]
    expected = sum(w * x for w, x in zip(weights, history, strict=True)) / sum(weights)
    assert_close(xp.run(moments.unbiased, average, weight), expected)


def test_constant_decay_gives_the_exponentially_weighted_mean(xp):
    history = [normal(3, 2, seed=k) for k in range(6)]
    average, weight = xp.asarray(np.zeros((3, 2))), xp.asarray(0.0)
    for x in history:
        average = xp.run(moments.update_average, average, xp.asarray(x), 0.8)
        weight = xp.run(moments.update_average, weight, xp.asarray(1.0), 0.8)
    assert_close(xp.run(moments.unbiased, average, weight), weighted_mean(history, 0.8))


def test_decay_may_be_an_array_of_another_precision(xp):
    average, x = random(xp, 3, 2), random(xp, 3, 2, seed=1)
    decay = xp.asarray(0.75, "float32")
    got = xp.run(moments.update_average, average, x, decay)
    assert dtype_name(got) == "float64"
    assert_close(got, 0.75 * normal(3, 2) + 0.25 * normal(3, 2, seed=1))


def test_without_evidence_the_mean_is_zero_and_not_nan(xp):
    mean = xp.run(moments.unbiased, random(xp, 2, 3), xp.asarray([0.0, 2.0]))
    assert_close(mean, normal(2, 3) / np.array([[np.inf], [2.0]]))


def test_average_keeps_its_dtype(xp):
    average = random(xp, 3, 2, dtype="float32")
    assert dtype_name(xp.run(moments.update_average, average, random(xp, 3, 2), 0.9)) == "float32"
    if xp.half is None:
        pytest.skip("the library has no half precision")
    assert (
        dtype_name(xp.run(moments.update_average, average, random(xp, 3, 2, dtype=xp.half), 0.9))
        == "float32"
    )
    assert dtype_name(xp.run(moments.unbiased, average, xp.asarray(0.5))) == "float32"


@pytest.mark.parametrize("is_array", [False, True])
def test_in_half_precision_a_decay_near_one_is_not_one(xp, is_array):
    """The first item weighs what it would in double precision, up to the average's own rounding."""
    if xp.half is None:
        pytest.skip("the library has no half precision")
    decay, x = 0.9995, random(xp, 3, 2, dtype=xp.half)
    given = xp.asarray(decay, "float32") if is_array else decay
    average = xp.run(moments.update_average, x * 0, x, given)
    assert dtype_name(average) == xp.half
    expected = (1 - decay) * xp.numpy(x).astype(float)
    np.testing.assert_allclose(xp.numpy(average).astype(float), expected, rtol=0.01)
    kept = xp.run(moments.mix, x, x * 0, xp.asarray([decay] * 3, "float32"))
    assert dtype_name(kept) == xp.half
    added = xp.run(moments.mix, x * 0, x, xp.asarray([decay] * 3, "float32"))
    np.testing.assert_allclose(xp.numpy(added).astype(float), expected, rtol=0.01)
