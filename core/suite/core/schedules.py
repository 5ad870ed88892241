"""When a preconditioner is updated: deterministic, with its clock as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from suite.core._namespace import Scalar, array_namespace, as_scalar
from suite.core.checks import check_integer, check_number

# Ten times 0.1 is not 1 in floating point; an update that is due by this much is due.
_TOLERANCE = 1e-4


def precond_update_prob_schedule(
    max_prob: float = 1.0, min_prob: float = 0.03, decay: float = 0.001, flat_start: int = 500
) -> Callable[[Any], Any]:
    """Update often while curvature is unknown, rarely once it is known.

        p(t) = clip(max_prob exp(-decay (t - flat_start)), min_prob, max_prob)

    Source: distributed_kron's schedule of the same name.

    Args:
        max_prob, min_prob: bounds of the probability, in (0, 1].
        decay: decay rate per step, >= 0.
        flat_start: steps before the decay starts, >= 0.

    Returns:
        A function of the step count, which may be a number or a 0-d array.
    """
    check_number("max_prob", max_prob, above=0, at_most=1)
    check_number("min_prob", min_prob, above=0, at_most=max_prob)
    check_number("decay", decay, at_least=0)
    check_integer("flat_start", flat_start, at_least=0)

    def schedule(step: Any) -> Any:
        if isinstance(step, (int, float)):
            value = max_prob * math.exp(-decay * max(step - flat_start, 0))
            return max(value, min_prob)
        xp = array_namespace(step)
        late = xp.astype(step, xp.float32) - flat_start
        value = max_prob * xp.exp(-decay * xp.maximum(late, xp.zeros_like(late)))
        return xp.maximum(value, xp.zeros_like(value) + min_prob)

    return schedule


def advance_clock(clock: Scalar, probability: Scalar) -> tuple[Scalar, Scalar]:
    """Turn an update probability into updates at even distances, with no dice.

    An update is due when the clock has reached 1; each step then adds `probability`. A clock that starts
    at 1 makes the first step an update.

    Args:
        clock: a number or a 0-d array.
        probability: in [0, 1].

    Returns:
        (whether to update now, the new clock).
    """
    due = clock >= 1.0 - _TOLERANCE
    if isinstance(clock, (int, float)):
        return due, (max(clock - 1.0, 0.0) if due else clock) + probability
    xp = array_namespace(clock)
    rest = xp.where(due, xp.maximum(clock - 1.0, xp.zeros_like(clock)), clock)
    return due, rest + as_scalar(probability, clock)
