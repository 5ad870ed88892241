"""What a figure was measured with: versions of Python and packages, and this project's commit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path


def versions(*packages: str) -> dict[str, str]:
    """Python's, those of packages that are installed, and the commit, '-dirty' with changes to it."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(
            describe, cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        )
        found["suite"] = commit.stdout.strip()
    return found
