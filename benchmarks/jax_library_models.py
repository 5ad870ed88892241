"""The models of the coverage table, by library; a library is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from jax_tasks import Case

MODULES = {
    "plain": "jax_models",
    "linen": "jax_linen_models",
    "nnx": "jax_nnx_models",
    "equinox": "jax_equinox_models",
    "haiku": "jax_haiku_models",
}


def models(library: str) -> dict[str, Callable[[], Case]]:
    """name -> (loss_fn, params, batch), made when called. Raises ImportError without the library."""
    return importlib.import_module(MODULES[library]).MODELS
