"""Whose turn it is: work that is due once in so many steps, spread evenly over these."""

from __future__ import annotations

from collections.abc import Sequence

from suite.core.checks import check_integer


def plan_turns(costs: Sequence[int], steps: int) -> list[int]:
    """For each job the step of a cycle, 0 to steps - 1, in which it is done.

    Jobs keep their order, so that neighbours are done together. No step gets more than its share of the
    whole cost and one job.

    Args:
        costs: of each job, >= 0.
        steps: of a cycle, >= 1.
    """
    check_integer("steps", steps, at_least=1)
    total = max(1, sum(costs))
    turns, before = [], 0
    for cost in costs:
        # By the middle of the job: two whose middles are in one step overlap it but for half of each.
        turns.append(min(steps - 1, (2 * before + cost) * steps // (2 * total)))
        before += cost
    return turns
