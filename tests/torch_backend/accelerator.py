"""The device of test_gpu.py: CUDA's, or with `SUITE_SIMULATE` set a simulated one (accelerator.cpp)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

SIMULATED = "SUITE_SIMULATE" in os.environ
DEVICE = "simulated" if SIMULATED else "cuda"
NAME = "accelerator_device"  # of the compiled module
SOURCE = Path(__file__).with_suffix(".cpp")


def build() -> Path:
    """The compiled module; what is the same is compiled once."""
    made_of = [SOURCE.read_bytes(), Path(__file__).read_bytes(), torch.__version__, sys.version]
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()
    target = Path(tempfile.gettempdir()) / f"suite-accelerator-{key[:16]}" / f"{NAME}.so"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        flags = [
            "-shared",
            "-fPIC",
            "-std=c++20",
            "-O0",
            "-w",
            "-DTORCH_EXTENSION_NAME=accelerator_device",
        ]
        built = target.with_name(f"{os.getpid()}.so")
        command = [os.environ.get("CXX", "c++"), *flags, *(f"-isystem{path}" for path in includes)]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        subprocess.run([*command, str(SOURCE), *libraries, "-o", str(built)], check=True)
        built.replace(target)
    return target


def register() -> Any:
    """Make 'simulated' a device of this process, for good."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    torch.utils.rename_privateuse1_backend(DEVICE)
    module: Any = ModuleType(f"torch.{DEVICE}")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.device = lambda device: nullcontext()
    module.synchronize = lambda device=None: None
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module(DEVICE, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return device


device = register() if SIMULATED else None
is_available = SIMULATED or torch.cuda.is_available()


@contextmanager
def host_must_not_wait(must_not: bool = True) -> Iterator[None]:
    """An error where the host waits for the device."""
    _allow(not must_not)
    try:
        yield
    finally:
        _allow(True)


def _allow(waiting: bool) -> None:
    if device is not None:
        device.allow(waiting)
        return
    with warnings.catch_warnings():  # that this does not yet see all that waits
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("default" if waiting else "error")
