"""Errors for bad hyperparameters: name, rule and value, before anything has changed."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import numpy as np


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise unless `value` is a finite number within the bounds.

    0-d arrays pass, but for NumPy's: their value may not be known yet (traced) or not be on this host.
    """
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        value = value.item()
    elif getattr(value, "shape", None) == ():
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    rules = [
        (above, ">", lambda bound: value > bound),
        (at_least, ">=", lambda bound: value >= bound),
        (at_most, "<=", lambda bound: value <= bound),
        (below, "<", lambda bound: value < bound),
    ]
    given = [(bound, sign, holds) for bound, sign, holds in rules if bound is not None]
    finite = abs(value) <= sys.float_info.max  # also of integers that are no floats
    within = all(holds(bound) for bound, _, holds in given)
    if not finite or not within:
        rule = "finite" if within else " and ".join(f"{sign} {bound}" for bound, sign, _ in given)
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def check_integer(name: str, value: Any, *, at_least: int) -> None:
    """Raise unless `value` is an integer of at least `at_least`."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be >= {at_least}, got {value!r}")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise unless `value` is one of `choices`."""
    if not isinstance(value, str | None) or value not in choices:  # arrays compare by element
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}")


def check_wide(name: str, value: Any, largest: float) -> None:
    """Raise unless numbers of the dtype `value`, up to `largest`, reach as far as those of float32."""
    if largest < 1e38:
        raise ValueError(f"{name} must reach as far as float32, as bfloat16 does, got {value}")


def check_flag(name: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
