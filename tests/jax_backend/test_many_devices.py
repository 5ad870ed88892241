"""One trajectory however arrays and factorizations are spread over devices and processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result(process: subprocess.Popen[str]) -> dict:
    out, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("case", ["trajectories", "own_shard_map"])
def test_eight_devices_follow_one(case):
    differences = result(start("many_devices.py", case))
    moved = {name: d for name, d in differences.items() if name.startswith("moved")}
    others = {name: d for name, d in differences.items() if name not in moved}
    assert min(moved.values()) > 0.1
    assert max(others.values()) < 1e-8, differences
    assert len(others) >= 4


def test_sharing_out_lowers_the_state_of_a_device():
    cost = result(start("many_devices.py", "cost"))
    assert cost["kept"]["state"] < 0.7 * cost["alone"]["state"], cost


def test_two_processes_over_gloo_follow_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    expected = result(start("two_processes.py", address, "-1"))
    both = [start("two_processes.py", address, str(rank)) for rank in (0, 1)]
    found = [result(process) for process in both]
    assert expected["devices"] == 1
    for one in found:
        assert one["devices"] == 2
        np.testing.assert_allclose(one["numbers"], expected["numbers"], rtol=1e-9)
