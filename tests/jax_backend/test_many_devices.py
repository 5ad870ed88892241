"""One trajectory however arrays and factorizations are spread over devices and processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
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


@pytest.mark.parametrize(
    ("case", "least"),
    [
        *(("trajectories", 9), ("several_axes", 4), ("fractions", 9), ("own_shard_map", 9)),
        *(("ensembles", 9), ("capture", 9), ("predictions", 10), ("adaptive", 5)),
    ],
)
def test_eight_devices_follow_one(case, least):
    differences = result(start("many_devices.py", case))
    moved = {name: d for name, d in differences.items() if name.startswith("moved")}
    others = {name: d for name, d in differences.items() if name not in moved}
    assert min(moved.values()) > 0.1
    assert max(others.values()) < 1e-9, differences
    assert len(others) >= least


@pytest.mark.skipif(not hasattr(jax.sharding, "auto_axes"), reason="needs jax 0.7")
@pytest.mark.parametrize("case", ["explicit_axes", "explicit_mesh", "partly_explicit"])
def test_optimizers_take_explicit_axes(case):
    differences = result(start("many_devices.py", case))
    moved = {name: d for name, d in differences.items() if name.startswith("moved")}
    others = {name: d for name, d in differences.items() if name not in moved}
    assert min(moved.values()) > 0.01
    assert max(others.values()) < 1e-9, differences


def test_a_factorization_that_fails_on_its_device_is_what_it_is_on_one():
    found = result(start("many_devices.py", "failures"))
    expected = found.pop("alone")
    assert 2 in expected["failures"]
    for one in found.values():
        assert one["failures"] == expected["failures"]
        np.testing.assert_allclose(one["numbers"], expected["numbers"], rtol=1e-9)


def test_what_devices_keep_and_send():
    found = result(start("many_devices.py", "cost"))
    rows = found["rows"]
    alone, whole, half, quarter, least = (rows[f] for f in ("None", "1", "0.5", "0.25", "0.125"))
    # Without a mesh every device does everything: gradients and statistics travel, once.
    assert alone["branches"] == 0
    directions = 4 * (12 * 64 * 64 + 64 * 256)
    large, small = 4 * 256**2, 4 * 64**2
    inverses = large + 25 * small
    for row in (whole, half, quarter, least):
        assert row["kinds"]["all-gather"] == 0
        travels = row is not whole
        assert row["step"] == alone["step"] + directions * travels
        assert row["step collectives"] <= alone["step collectives"] + 1
    counts = 2 * 4 * 26  # ready and failures of each factor
    assert whole["branches"] == inverses + counts
    assert whole["branches"] > half["branches"] > quarter["branches"] > least["branches"] == counts + 104
    # Averages are with one device, inverses with fewer and fewer.
    assert alone["state"] == whole["state"] > half["state"] > max(quarter["state"], least["state"])
    # At last the fullest device has the large factor and the other one of its layer; and the momentum.
    assert least["state"] - directions <= 2 * (large + small) + 1024
    # The large factor's device has nothing else to do.
    for loads in found["loads"].values():
        assert max(loads) <= 256**3 + 64**3
    message = found["refused"]["0.3"]
    assert "gradient_worker_fraction must divide 8" in message
    assert "1/8, 2/8, 4/8, 8/8" in message
    layouts = {what: message for what, message in found["refused"].items() if "state" in what}
    assert set(found["refused"]) == {"0.3", str(1 / 3), "half", *layouts}
    assert len(layouts) == 5
    for what, message in layouts.items():
        shares = "all factors on every device" if "in one of 1/4" not in what else "have shares"
        assert message.startswith("state must have"), what
        assert shares in message or what == "a state of 1/8 in one of 1/4", what
    # Whose factors lie elsewhere in arrays of the same shapes.
    assert [alike for alike, _ in found["alike"]] == [True, True]
    assert all("whose shares lie as 'layout " in message for _, message in found["alike"])


def test_devices_draw_labels_of_their_own():
    assert result(start("many_devices.py", "draws")) == {"kinds": 4}


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
