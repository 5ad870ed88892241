"""When a preconditioner is updated and how far: deterministic, with clock and count as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from suite.core._namespace import Scalar, array_namespace, as_scalar
from suite.core.checks import check_number

# Ten times 0.1 is not 1 in floating point; an update that is due by this much is due.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class precond_update_prob_schedule:
    """Update often while curvature is unknown, rarely once it is known.

        p(t) = clip(max_prob exp(-decay (t - flat_start)), min_prob, max_prob)

    Called with the step count, a number or a 0-d array. Source: the function of this name in
    distributed_kron.

    Args:
        max_prob, min_prob: bounds of the probability, at most 1; `max_prob` is above 0.
        decay: decay rate per step, >= 0.
        flat_start: steps before the decay starts, >= 0.
    """

    max_prob: float = 1.0
    min_prob: float = 0.03
    decay: float = 0.001
    flat_start: float = 500

    def __post_init__(self) -> None:
        check_number("max_prob", self.max_prob, above=0, at_most=1)
        check_number("min_prob", self.min_prob, at_least=0, at_most=self.max_prob)
        check_number("decay", self.decay, at_least=0)
        check_number("flat_start", self.flat_start, at_least=0)

    def __call__(self, step: Any) -> Any:
        if isinstance(step, (int, float)):
            late = max(step - self.flat_start, 0)
            return max(self.max_prob * math.exp(-self.decay * late), self.min_prob)
        xp = array_namespace(step)
        late = xp.astype(step, xp.float32) - self.flat_start
        value = self.max_prob * xp.exp(-self.decay * xp.maximum(late, xp.zeros_like(late)))
        return xp.maximum(value, xp.zeros_like(value) + self.min_prob)


@dataclass(frozen=True)
class precond_lr_schedule:
    """Long steps while the preconditioner is far from its optimum, short ones once it is near.

        μ(t) = max(min_lr, max_lr / (1 + (t / decay_updates)²))

    A constant step leaves a noise floor of order √μ, so it must fall; the long ones before let the
    factors follow the first, fast changes of a training. `min_lr` is what follows a covariance that
    drifts: a smaller one fits a constant covariance better and a moving one worse.
    `benchmarks/kron_fit.py` has the figures.

    Called with the number of factor updates done before, a number or a 0-d array.

    Args:
        max_lr: the first step, in (0, 1).
        min_lr: the last ones, in (0, max_lr].
        decay_updates: updates after which the step has halved, > 0.
    """

    max_lr: float = 0.4
    min_lr: float = 0.004
    decay_updates: float = 50.0

    def __post_init__(self) -> None:
        check_number("max_lr", self.max_lr, above=0, below=1)
        check_number("min_lr", self.min_lr, above=0, at_most=self.max_lr)
        check_number("decay_updates", self.decay_updates, above=0)

    def __call__(self, updates: Any) -> Any:
        if isinstance(updates, (int, float)):
            late = updates / self.decay_updates
            return max(self.max_lr / (1 + late * late), self.min_lr)
        xp = array_namespace(updates)
        # The library's widest default: where that is double, frameworks agree to its last digits.
        late = xp.astype(updates, xp.asarray(0.0).dtype) / self.decay_updates
        value = self.max_lr / (1 + late * late)
        return xp.maximum(value, xp.zeros_like(value) + self.min_lr)


def advance_clock(clock: Scalar, probability: Scalar) -> tuple[Scalar, Scalar]:
    """Turn an update probability into updates at even distances, with no dice.

    An update is due when the clock has reached 1; each step then adds `probability`. A clock that starts
    at 1 makes the first step an update.

    Args:
        clock: a number or a 0-d array.
        probability: in [0, 1]; a traced one, of which nobody can complain, is cut to that, and NaN is 0.

    Returns:
        (whether to update now, the new clock).
    """
    if isinstance(clock, (int, float)):
        # In single precision, as JAX keeps it: both frameworks must update in the same steps for ever.
        now, one = np.float32(clock), np.float32(1)
        due = bool(now >= np.float32(1.0 - _TOLERANCE))
        return due, float((now - one if due else now) + np.float32(probability))
    due = clock >= 1.0 - _TOLERANCE
    xp = array_namespace(clock)
    rest = xp.where(due, clock - 1.0, clock)  # what an update comes early is owed
    added = xp.zeros_like(clock) + as_scalar(probability, clock)
    added = xp.where(added >= 0, added, xp.zeros_like(clock))
    return due, rest + xp.where(added <= 1, added, xp.zeros_like(clock) + 1)
