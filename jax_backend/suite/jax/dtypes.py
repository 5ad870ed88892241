"""Settings that name a dtype or a precision: checked where they are given, not where they are used."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def check_dtype(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a floating dtype, or None."""
    if value is None:
        return
    try:
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
