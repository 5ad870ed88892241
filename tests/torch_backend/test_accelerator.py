"""The tests for a GPU, on a simulated one, in a process of its own: a device is registered for good."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions describe devices otherwise")
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["test_gpu.py", "test_graphed.py", "test_graphed_kron.py"])
def test_the_tests_for_a_gpu_pass_on_a_simulated_one(name):
    file = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "SUITE_SIMULATE": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert re.search(r"^\d+ passed in", ran.stdout.splitlines()[-1]), ran.stdout[-4000:]
