from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import suite.core

SUBMODULES = sorted(module.name for module in pkgutil.iter_modules(suite.core.__path__))
# Front doors and engines import the checks by name; simulate is a command.
NOT_OFFERED = {"checks", "renamed", "simulate"}
OF_TORCH = ("_torch", "_torch_inverses", "_torch_known", "_torch_precision")
LIBRARY_SPECIFIC = {"_jax": "jax", **dict.fromkeys(OF_TORCH, "torch")}


def loaded_by(statement: str) -> set[str]:
    """The frameworks that a fresh interpreter has loaded after a statement."""
    report = (
        f"{statement}\nimport sys\nprint(*({{'torch', 'jax', 'jaxlib', 'optax'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_core_loads_neither_torch_nor_jax():
    names = [name for name in SUBMODULES if name not in LIBRARY_SPECIFIC]
    imports = "\n".join(f"import suite.core.{name}" for name in names)
    assert loaded_by(f"import suite.core\n{imports}") == set()


def test_core_on_numpy_arrays_loads_neither_torch_nor_jax():
    use = """
import numpy as np
from suite.core import kfac, kron, linalg
x = np.eye(3)
for geometry in ("Q0.5EQ1.5", "QEQ", "QUAD", "EQ"):
    rule = kron.Kron(geometry)
    state = rule.refresh(rule.update(rule.init(x, (3, 3), (False, True)), x, x, 0.1))
    rule.precondition(state, x)
linalg.damped_inverse(x, 0.1), linalg.eigh(x)
"""
    assert loaded_by(use) == set()


def test_the_check_above_would_notice():
    pytest.importorskip("torch")
    assert loaded_by("import suite.core._torch") == {"torch"}


def test_all_lists_every_public_submodule():
    public = {name for name in SUBMODULES if not name.startswith("_")} - NOT_OFFERED
    assert set(suite.core.__all__) == public | {"__version__"}
    assert suite.core.__all__ == sorted(suite.core.__all__)


def test_every_name_in_all_exists():
    for name in suite.core.__all__:
        value = getattr(suite.core, name)
        assert isinstance(value, str if name == "__version__" else ModuleType)


@pytest.mark.parametrize("name", SUBMODULES)
def test_every_submodule_says_what_it_is_for(name):
    if name in LIBRARY_SPECIFIC:
        pytest.importorskip(LIBRARY_SPECIFIC[name])
    assert importlib.import_module(f"suite.core.{name}").__doc__
