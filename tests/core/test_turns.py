from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.core.turns import plan_turns

COSTS = st.lists(st.integers(0, 10**9), max_size=40)
STEPS = st.integers(1, 60)


@given(COSTS, STEPS)
def test_every_job_has_one_turn_in_the_cycle_and_jobs_keep_their_order(costs, steps):
    turns = plan_turns(costs, steps)
    assert len(turns) == len(costs)
    assert turns == sorted(turns)
    assert all(0 <= turn < steps for turn in turns)


@given(COSTS, STEPS)
def test_no_step_gets_more_than_its_share_and_one_job(costs, steps):
    turns = plan_turns(costs, steps)
    for step in range(steps):
        own = sum(cost for cost, turn in zip(costs, turns, strict=True) if turn == step)
        assert own <= sum(costs) / steps + max(costs, default=0)


def test_equal_jobs_are_dealt_out_evenly():
    assert plan_turns([7] * 6, 3) == [0, 0, 1, 1, 2, 2]
    assert plan_turns([7] * 2, 4) == [1, 3]


@given(COSTS)
def test_a_cycle_of_one_step_is_everyones_turn(costs):
    assert plan_turns(costs, 1) == [0] * len(costs)


def test_a_cycle_without_steps_is_refused():
    with pytest.raises(ValueError, match=r"^steps must be >= 1, got 0$"):
        plan_turns([1], 0)
