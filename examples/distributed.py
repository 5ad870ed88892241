"""Checkpoints of several ranks that a crash at any instant leaves readable."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

LATEST = "latest"  # a file that names the newest complete checkpoint's folder


def save_atomically(state: dict[str, Any], folder: str | Path, step: int) -> None:
    """Write a new checkpoint, then point to it, then drop the one before; called by all ranks.

    The latest one is never written over: if it is of this step, nothing happens.
    """
    folder = Path(folder)
    name = f"step{step}"
    before = latest(folder)
    if before is not None and before.name == name:
        return
    dcp.save(state, checkpoint_id=folder / name)
    if dist.get_rank() == 0:
        beside = folder / f"{LATEST}.new"
        with open(beside, "w") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, folder / LATEST)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint's folder, if there is one."""
    pointer = Path(folder) / LATEST
    return Path(folder) / pointer.read_text() if pointer.exists() else None
