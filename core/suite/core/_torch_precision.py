"""Products in full single precision where others may run in less."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_HAS_PRECISIONS = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # of each backend, since 2.9


@contextlib.contextmanager
def full_precision(x: torch.Tensor) -> Iterator[None]:
    """Inside, products of single precision are of that, whatever is set for others (TF32).

    That is set for all threads: they are inside together, and the last one to leave puts it back.
    """
    if x.device.type == "cpu" or torch.compiler.is_compiling():
        yield
        return
    _inside.enter()
    try:
        yield
    finally:
        _inside.leave()


class _Inside:
    """Who is inside `full_precision`, and what to put back."""

    def __init__(self) -> None:
        self.lock, self.count, self.before = threading.Lock(), 0, ""

    def enter(self) -> None:
        with self.lock:
            if not self.count:
                self.before = _product_precision()
                if self.before:
                    _set_product_precision("ieee" if _HAS_PRECISIONS else "highest")
            self.count += 1

    def leave(self) -> None:
        with self.lock:
            self.count -= 1
            if not self.count and self.before:
                _set_product_precision(self.before)


_inside = _Inside()


def _product_precision() -> str:
    """What is set for products of float32, as it is to be set again; '' if nothing is less exact."""
    if not _HAS_PRECISIONS:
        old = torch.get_float32_matmul_precision()
        return "" if old == "highest" else old
    backends: Any = torch.backends
    found = backends.cuda.matmul.fp32_precision
    if found in ("ieee", "none"):
        return ""
    # What is set for all backends reads as if it were for this one, and must not become that.
    return "none" if backends.fp32_precision == found else str(found)


def _set_product_precision(value: str) -> None:
    if _HAS_PRECISIONS:
        settings: Any = torch.backends.cuda.matmul
        settings.fp32_precision = value
    else:
        torch.set_float32_matmul_precision(value)
