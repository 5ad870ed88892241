"""The project's two commands, each with all of its own set-up: `python3 dev.py demo` and `... test`.

Both make a virtual environment in .venv (once), install the project with the versions pinned in
constraints.txt and the CPU build of PyTorch, and run. Arguments after the command are passed on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = ENVIRONMENT / "installed"
# On Linux, PyPI's torch is the CUDA build, gigabytes of it; elsewhere PyPI has the CPU build.
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"

# The tests' independent K-FAC. Its dependencies ask for torchvision and with it another torch.
CURVLINOPS = (
    "curvlinops-for-pytorch",
    "backpack-for-pytorch",
    "einconv",
    "einops",
    "linear-operator",
)


def main(arguments: list[str]) -> int:
    commands = {"demo": demo, "test": test}
    if not arguments or arguments[0] not in commands:
        print(__doc__)
        return 2
    install()
    return commands[arguments[0]](arguments[1:])


def install() -> None:
    """The virtual environment, again only if what it is made from has changed."""
    made_from = ("constraints.txt", "pyproject.toml", "dev.py")
    wanted = "\n".join((ROOT / name).read_text() for name in made_from)
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    print("Setting up .venv (once; a few minutes)", flush=True)
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    cpu = ["--extra-index-url", CPU_WHEELS, "--retries", "1"] if sys.platform == "linux" else []
    subprocess.run([*pip, "--no-deps", *cpu, *constraints, "torch"], check=True)
    subprocess.run([*pip, *constraints, "--editable", f"{ROOT}[dev]"], check=True)
    subprocess.run([*pip, "--no-deps", *constraints, *CURVLINOPS], check=True)
    STAMP.write_text(wanted)


def demo(arguments: list[str]) -> int:
    """Train on handwritten digits with AdamW, K-FAC and Kron, in PyTorch and in JAX."""
    return subprocess.call([str(PYTHON), str(ROOT / "examples" / "demo.py"), *arguments], cwd=ROOT)


def test(arguments: list[str]) -> int:
    """Linters and types, then the tests: fast ones first, slow ones after."""
    if arguments:
        return subprocess.call([str(PYTHON), "-m", "pytest", *arguments], cwd=ROOT)
    steps = [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["pytest", "-q", "-n", "2", "-m", "not slow"],
        ["pytest", "-q", "-n", "2", "-m", "slow"],
    ]
    for step in steps:
        print(f"$ {' '.join(step)}", flush=True)
        code = subprocess.call([str(PYTHON), "-m", *step], cwd=ROOT)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
