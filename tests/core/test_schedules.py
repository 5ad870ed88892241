from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import assert_close
from suite.core.schedules import advance_clock, precond_lr_schedule, precond_update_prob_schedule

STEPS = [0, 1, 499, 500, 501, 1500, 4000, 10**6]


@pytest.mark.parametrize("schedule", [precond_update_prob_schedule(), precond_lr_schedule()])
def test_number_and_array_agree(xp, schedule):
    for step in STEPS:
        array = xp.run(schedule, xp.asarray(np.array(step, dtype=np.int32)))
        assert_close(array, schedule(step), rtol=1e-5)


def test_probability_is_flat_then_decays_then_is_flat():
    schedule = precond_update_prob_schedule(max_prob=0.8, min_prob=0.1, decay=0.01, flat_start=100)
    for step in (0, 50, 100):
        assert schedule(step) == 0.8
    for step in (101, 150, 250):
        assert math.isclose(schedule(step), 0.8 * math.exp(-0.01 * (step - 100)))
    assert schedule(100 + int(math.log(8) / 0.01) + 1) == 0.1
    assert schedule(10**9) == 0.1


def test_preconditioner_lr_falls_from_its_first_value_to_its_floor():
    schedule = precond_lr_schedule(max_lr=0.5, min_lr=0.01, decay_updates=20)
    assert schedule(0) == 0.5
    for updates in (1, 20, 100):
        assert math.isclose(schedule(updates), 0.5 / (1 + updates**2 / 400))
    assert schedule(20) == 0.25
    assert schedule(141) == schedule(10**9) == 0.01  # 0.5 / (1 + 141² / 400) < 0.01


@pytest.mark.parametrize(
    ("name", "value"), [("max_lr", 1.0), ("min_lr", 0.0), ("min_lr", 0.8), ("decay_updates", 0.0)]
)
def test_preconditioner_lr_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .* got {value!r}$"):
        precond_lr_schedule(**{name: value})


@given(
    st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0, 0.1), st.integers(0, 1000), st.integers(0, 5000)
)
def test_probability_never_rises_and_stays_within_its_bounds(a, b, decay, flat_start, step):
    low, high = sorted((a, b))
    schedule = precond_update_prob_schedule(high, low, decay, flat_start)
    assert low <= schedule(step + 1) <= schedule(step) <= high


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_prob", 0.0),
        ("max_prob", 1.5),
        ("min_prob", -0.1),
        ("min_prob", 1.01),
        ("decay", -0.1),
        ("flat_start", -1),
    ],
)
def test_value_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .* got {value!r}$"):
        precond_update_prob_schedule(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("decay", "0.1"), ("flat_start", "1"), ("max_prob", None)])
def test_value_of_another_type_is_named(name, value):
    with pytest.raises(TypeError, match=f"^{name} must be "):
        precond_update_prob_schedule(**{name: value})


def test_schedule_is_plain_data():
    # It goes into an optimizer's parameter groups, and so into copies, pickles and comparisons.
    schedule = precond_update_prob_schedule(0.9, decay=0.01)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(schedule) == hash(precond_update_prob_schedule(0.9, decay=0.01))
    assert schedule != precond_update_prob_schedule()


def run_clock(probabilities, clock=1.0):
    """The steps that are due."""
    due_at = []
    for step, probability in enumerate(probabilities):
        due, clock = advance_clock(clock, probability)
        if due:
            due_at.append(step)
    return due_at


def test_first_step_is_due():
    for probability in (1.0, 0.5, 0.03, 0.0):
        assert run_clock([probability])[0] == 0


@pytest.mark.parametrize("period", [1, 2, 3, 7, 10, 30])
def test_one_over_n_is_every_nth_step_for_ever(period):
    """Thirty thousand sums of a tenth do not drift by a step."""
    assert run_clock([1 / period] * 30000) == list(range(0, 30000, period))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300))
def test_updates_so_far_are_the_sum_of_probabilities_to_within_one(probabilities):
    due_at = run_clock(probabilities)
    for step in range(len(probabilities)):
        updates = sum(1 for t in due_at if t <= step)
        expected = 1 + sum(probabilities[:step])  # the first step's is free
        assert abs(updates - expected) <= 1 + 1e-4  # an update may come that much early


def test_updates_over_a_long_run_are_the_sum_of_probabilities_to_within_one():
    # A probability just below one: what each update comes early must not add up.
    for probability in (0.99995, 0.49998, 0.123):
        n = 50000
        assert abs(len(run_clock([probability] * n)) - n * probability) <= 1


def test_number_and_array_clocks_tick_alike(xp):
    probabilities = [0.3, 1.0, 0.1, 0.1, 0.7, 0.0, 0.9, 0.25]
    clock, array = 1.0, xp.asarray(np.float32(1.0))
    for probability in probabilities:
        due, clock = advance_clock(clock, probability)
        array_due, array = xp.run(advance_clock, array, probability)
        assert bool(xp.numpy(array_due)) == due
        assert_close(array, clock)


def test_clock_of_single_precision_keeps_time(xp):
    """The precision it has in a checkpoint, on an accelerator."""
    clock, due_at = xp.asarray(1.0, "float32"), []
    for step in range(300):
        due, clock = xp.run(advance_clock, clock, 0.1)
        if xp.numpy(due):
            due_at.append(step)
    assert due_at == list(range(0, 300, 10))


def test_an_array_clock_goes_on_after_a_probability_that_is_none(xp):
    clock, due_at = xp.asarray(1.0, "float32"), []
    for step, probability in enumerate([0.5, np.nan, 0.5, -3.0, 7.0, 0.5, 0.5, 0.5]):
        due, clock = xp.run(advance_clock, clock, xp.asarray(probability, "float32"))
        if xp.numpy(due):
            due_at.append(step)
    assert due_at == [0, 3, 5, 7]
