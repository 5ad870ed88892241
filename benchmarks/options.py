"""What options may be: else an error before anything runs."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def whole(text: str) -> int:
    """A number of things, at least one."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"must be >= 1, got {number}")
    return number


def writable(text: str) -> Path:
    """A file to write."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"must be a file in a folder that exists, got {text}")
    return path
