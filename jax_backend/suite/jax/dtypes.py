"""Dtypes and precisions: how they are joined, and settings checked where they are given."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def at_least_float32(*dtypes: Any) -> Any:
    """What holds floats of all these and float32; JAX may be set to refuse `jnp.promote_types`."""
    floats = [dtype for dtype in map(jnp.dtype, dtypes) if jnp.issubdtype(dtype, jnp.inexact)]
    return functools.reduce(np.promote_types, floats, np.dtype(np.float32))


def check_dtype(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a floating dtype, or None."""
    if value is None:
        return
    try:
        if isinstance(value, np.ndarray | np.generic | jax.Array):  # which have a dtype, and are none
            raise TypeError
        is_floating = jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except (TypeError, ValueError):
        is_floating = False
    if not is_floating:
        raise TypeError(f"{name} must be a floating dtype or None, got {value!r}")


def check_precision(name: str, value: Any) -> None:
    """Raise ValueError unless `jax.default_matmul_precision` takes `value`."""
    try:
        with jax.default_matmul_precision(value):
            pass
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a precision of jax.default_matmul_precision or None, got {value!r}"
        ) from error
