"""kfac.hyperparams."""

from __future__ import annotations

from collections.abc import Callable

from suite.core.checks import check_number

__all__ = ["exp_decay_factor_averaging"]


def exp_decay_factor_averaging(min_value: float = 0.95) -> Callable[[int], float]:
    """A schedule for `factor_decay`: the plain average of all steps until that decays slower.

        decay(t) = min(1 - 1 / max(t, 1), min_value)

    Sources: Martens & Grosse 2015 (arXiv:1503.05671), section 5; kfac-pytorch's function of this name.

    Args:
        min_value: the decay from then on, in (0, 1]; 1: the average of all steps, for ever.
    """
    check_number("min_value", min_value, above=0, at_most=1)
    return lambda step: min(1 - 1 / max(step, 1), min_value)
