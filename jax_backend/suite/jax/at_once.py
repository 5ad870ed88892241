"""What nothing traces is compiled once: `lax.cond` of new functions would be, in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer


def compiled_unless_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of pytrees of arrays, compiled where its caller is not, for each kind of these once.

    Schedules, which users hand in, are called before: where nothing is traced they may be any function.
    """
    compiled = jax.jit(function)

    def called(*args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs)))
        return (function if traced else compiled)(*args, **kwargs)

    return called
