"""What a figure was measured with: versions of Python and packages, and this project's commit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import suite.core


def _commit() -> dict[str, str]:
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    where = Path(suite.core.__file__).parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        found = subprocess.run(describe, cwd=where, check=True, capture_output=True, text=True)
        return {"suite": found.stdout.strip()}
    return {}


_COMMIT = _commit()  # as it is when a measurement begins, whatever happens meanwhile


def versions(*packages: str) -> dict[str, str]:
    """Python's, those of packages that are installed, and the commit, '-dirty' with changes to it."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | _COMMIT
