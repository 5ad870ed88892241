"""What is installed, what imports what, and whether the README's code runs."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"core": "core", "torch": "torch_backend", "jax": "jax_backend"}
# What each portion of the namespace may import besides the standard library and itself.
ALLOWED = {
    "core": {"numpy", "suite.core"},
    "torch": {"torch", "suite.core", "suite.torch"},
    "jax": {"jax", "optax", "numpy", "suite.core", "suite.jax"},
}
TORCH = ("_torch", "_torch_inverses", "_torch_known", "_torch_precision")
SHIMS = {"core/suite/core/_jax.py": "jax", **{f"core/suite/core/{name}.py": "torch" for name in TORCH}}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name.split('.')[0])
sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize(
    ("blocked", "code"),
    [
        (("torch", "jax", "jaxlib", "optax"), "import suite.core; suite.core.kron.Kron()"),
        (("jax", "jaxlib", "optax"), "import suite.torch; suite.torch.KFAC"),
        (("torch",), "import suite.jax; suite.jax.kfac"),
    ],
)
def test_each_portion_works_without_the_other_frameworks(blocked, code):
    result = run(BLOCK.format(blocked=blocked) + code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("blocked", "portion", "advice"),
    [("torch", "torch", "pip install torch"), ("optax", "jax", "pip install jax optax")],
)
def test_a_missing_framework_says_what_to_install(blocked, portion, advice):
    result = run(BLOCK.format(blocked=(blocked,)) + f"import suite.{portion}")
    assert result.returncode != 0
    assert advice in result.stderr
    assert f"extra `{portion}`" in result.stderr


def test_importing_the_core_loads_no_framework():
    result = run("import suite.core, sys; print({'torch', 'jax', 'optax'} & set(sys.modules))")
    assert result.stdout.strip() == "set()", result.stderr


@pytest.mark.parametrize("portion", SOURCES)
def test_imports_point_one_way(portion):
    for path in (ROOT / SOURCES[portion]).rglob("*.py"):
        relative = path.relative_to(ROOT).as_posix()
        allowed = ALLOWED[portion] | {SHIMS.get(relative, "numpy")}
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{relative}: a relative import"
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                known = top in sys.stdlib_module_names or any(
                    name == a or name.startswith(a + ".") for a in allowed
                )
                assert known, f"{relative} imports {name}"


@pytest.mark.parametrize("portion", SOURCES)
def test_what_all_names_exists_and_what_is_public_is_named(portion):
    module = importlib.import_module(f"suite.{portion}")
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name)
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }
    assert own <= set(module.__all__)


def test_no_linear_algebra_in_the_adapters():
    """An adapter fetches, calls and writes back; products and factorizations are the core's.

    attention.py computes a model's own forward pass.
    """
    for portion in ("torch", "jax"):
        for path in (ROOT / SOURCES[portion]).rglob("*.py"):
            if path.name == "attention.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)), path
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    called = ast.unparse(node.func)
                    products = ("einsum", "matmul", "mm", "bmm", "mv", "dot", "vdot", "tensordot")
                    assert node.func.attr not in products, (path, called)
                    assert not called.startswith(("torch.linalg", "jnp.linalg", "jax.numpy.linalg")), (
                        path
                    )


def test_the_core_draws_no_random_numbers():
    for path in (ROOT / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("random", "rand", "randn"), path


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(readme_blocks())))
def test_the_readmes_code_runs(number):
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", readme_blocks()[number]], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_the_readme_has_its_two_commands_and_four_quickstarts():
    text = (ROOT / "README.md").read_text()
    first, rest = text.split("## Quickstart")
    assert re.findall(r"^python3 dev.py (\w+)", first, re.MULTILINE) == ["demo", "test"]
    assert rest.split("\n## ")[0].count("```python\n") == 4


def test_links_in_documents_lead_somewhere():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "RESULTS.md"]
    found = 0
    for document in documents:
        for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            if link.startswith("http"):
                continue
            assert target.exists(), (document, link)
            if anchor:
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
                assert anchor in anchors, (document, link)
            found += 1
    assert found > 40


@pytest.mark.slow
def test_the_wheel_built_through_the_sdist_has_every_file(tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    expected = {
        path.relative_to(ROOT / source).as_posix()
        for source in SOURCES.values()
        for path in (ROOT / source).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert len(expected) > 30
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("suite/")}
    assert packed == expected
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "tests/conftest.py", "dev.py"} <= names
