"""Kron's state over eight CPU devices, in one process and in two (`kron_devices.py` runs in its own)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("kron_devices.py")
ROOT = SCRIPT.parents[2]


def start(*arguments: str, script: Path = SCRIPT) -> subprocess.Popen[str]:
    paths = [str(ROOT / name) for name in ("core", "torch_backend", "jax_backend")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def result(process: subprocess.Popen[str]) -> dict:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def check(found: dict) -> None:
    assert found["difference"] < 1e-9
    assert found["batched_difference"] < 1e-9  # and blocks two at a time on every device
    assert found["moved"] > 1e-2
    assert found["specs_agree"]
    assert found["whole_at_init"] <= 20  # momentum of the vector, which every device has


def test_eight_devices_follow_one():
    found = result(start("own"))
    check(found)
    one, each = found["bucket_bytes"]
    assert each < one / 5  # not an eighth: small buckets are padded
    one, each = found["argument_bytes"]  # XLA's own count
    assert each < one / 3  # parameters and momentum are split in four, two, or not at all
    # One per bucket where every device has the gradients: the bias, one block, is summed with zeros.
    assert found["collectives"] == {
        "all-gather": found["buckets"] - 1,
        "all-reduce": 1,
        "all-to-all": 0,
        "collective-permute": 0,
    }


def test_eight_devices_follow_one_with_fewer_matrices_than_devices():
    found = result(start("shared"))
    check(found)
    one, each = found["bucket_bytes"]
    assert each < one / 1.5
    assert found["buckets"] == 3  # of 1 to 3 blocks: sums with zeros send them alone, in one call
    assert found["collectives"] == {
        "all-gather": 0,
        "all-reduce": 1,
        "all-to-all": 0,
        "collective-permute": 0,
    }


def test_two_processes_follow_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [start("shared", str(number), "2", address) for number in range(2)]
    for process in processes:
        check(result(process))


def test_orbax_goes_on_with_another_mesh(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    script = SCRIPT.with_name("kron_checkpoint.py")
    found = result(start(str(tmp_path), "shared", script=script))
    assert found["difference"] < 1e-12
    assert max(found["from arrays"]) < 1e-12
    assert found["moved"] > 1e-2
    # 3 matrices of 3 x 3 chunks of 4 x 5, over 8 and over 6 devices
    assert found["shapes"] == [[8, 3, 4, 4], [6, 3, 4, 4]]
