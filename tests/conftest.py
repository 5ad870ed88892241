"""What every test shares: the array libraries, random arrays, and the way back to numpy."""

from __future__ import annotations

import os

# Before numpy is loaded: on small matrices LAPACK's threads only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import itertools
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

# The core's tests also run where only numpy is installed; the libraries that are missing are skipped.
if find_spec("jax"):
    # Thousands of small programs, each run a few times: compiling them is all the time there is, and
    # what these flags leave out is four fifths of it. The last one is about to go, and XLA ends the
    # process at a flag that it does not know.
    FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
        FLAGS += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    import jax

    jax.config.update("jax_enable_x64", True)
if find_spec("torch"):
    import torch

    torch.set_num_threads(1)
if find_spec("array_api_strict"):
    import array_api_strict

    # Shapes that depend on values cannot be traced, so the core must do without them.
    array_api_strict.set_array_api_strict_flags(
        api_version="2024.12", boolean_indexing=False, data_dependent_shapes=False
    )

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25, database=None)
settings.load_profile("suite")

Tree = Any  # an array, a number, None, or (named) tuples and lists of these

LIBRARIES = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax",  # compiled, through Library.run
    "jax-eager": "jax",
    "array-api-strict": "array_api_strict",
}


class Library:
    """One array library: numpy arrays in, its own arrays through the core, numpy arrays out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def asarray(self, x: Any, dtype: str | None = None) -> Any:
        """A copy of a numpy array, in its own dtype or in the one that is named."""
        x = np.asarray(x)
        if self.name == "torch":
            return torch.tensor(x, dtype=self.dtype(dtype) if dtype else None)
        if self.name.startswith("jax"):
            return jax.numpy.array(x, dtype=self.dtype(dtype) if dtype else None)
        if self.name == "array-api-strict":
            return array_api_strict.asarray(x, dtype=self.dtype(dtype) if dtype else None, copy=True)
        return np.array(x, dtype=dtype)

    def dtype(self, name: str) -> Any:
        """The library's dtype of a name such as 'float32' or 'bfloat16'."""
        if self.name == "torch":
            return getattr(torch, name)
        if self.name.startswith("jax"):
            return getattr(jax.numpy, name)
        return getattr(array_api_strict if self.name == "array-api-strict" else np, name)

    @property
    def half(self) -> str | None:
        """The name of a floating dtype narrower than float32, if the library has one."""
        return {"numpy": "float16", "array-api-strict": None}.get(self.name, "bfloat16")

    def numpy(self, x: Any) -> np.ndarray:
        return to_numpy(x)

    def convert(self, tree: Tree, dtype: str | None = None) -> Tree:
        """A tree of numpy arrays as this library's; `dtype` replaces the dtype of floating ones."""

        def leaf(x: Any) -> Any:
            if not isinstance(x, np.ndarray):
                return x
            return self.asarray(x, dtype if np.issubdtype(x.dtype, np.floating) else None)

        return map_tree(leaf, tree)

    def run(self, function: Callable[..., Any], *args: Tree, **static: Any) -> Tree:
        """`function(*args, **static)`, compiled where that is what this library stands for."""
        if self.name != "jax":
            return function(*args, **static)
        # Methods of equal rules are one function, which Python's own comparison of methods denies.
        method_of = getattr(function, "__self__", None), getattr(function, "__func__", function)
        key = (*method_of, *sorted(static.items()))
        if key not in self._compiled:
            self._compiled[key] = jax.jit(partial(function, **static))
        return self._compiled[key](*args)


_LIBRARIES: dict[str, Library] = {}
_MOST_MAPPINGS = 40_000  # of memory; XLA takes four a program, and ends a process that may have no more
_RAN = itertools.count(1)  # tests


@pytest.fixture(autouse=True)
def _programs_are_forgotten_in_time():
    """Linux grants a process 65,530 mappings of memory."""
    yield
    mappings = Path("/proc/self/maps")
    if next(_RAN) % 100 or not find_spec("jax") or not mappings.exists():
        return
    if len(mappings.read_text().splitlines()) > _MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def settings_of_torch():
    """Benchmarks have numbers below the normal ones flushed, and set threads, for the whole process."""
    threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


@pytest.fixture(params=[name for name in LIBRARIES if name != "jax-eager"], scope="module")
def xp(request: pytest.FixtureRequest) -> Library:
    """Every array library in turn."""
    return library(request.param)


# Eager JAX runs the operations that jit compiles, but compiles each of them by itself, at more than the
# cost of all other libraries together. Every function of the core meets it once, in a test marked so.
also_eager_jax = pytest.mark.parametrize("xp", list(LIBRARIES), indirect=True)


def library(name: str) -> Library:
    """The library of a name in `LIBRARIES`; skips the test where it is not installed."""
    pytest.importorskip(LIBRARIES[name])
    return _LIBRARIES.setdefault(name, Library(name))


def map_tree(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """`function` on every leaf; tuples, named tuples and lists keep their kind."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(function, x) for x in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tree(function, x) for x in tree)
    return tree if tree is None else function(tree)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of a tree in order."""
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def to_numpy(x: Any) -> np.ndarray:
    """Any library's array as a numpy array; bfloat16, which numpy lacks, as float32."""
    if find_spec("torch") and isinstance(x, torch.Tensor):
        x = x.detach()
        x = x.float() if x.dtype == torch.bfloat16 else x
        return x.numpy().copy()
    if str(getattr(x, "dtype", "")) == "bfloat16":
        x = x.astype("float32")
    return np.array(x)


def dtype_name(x: Any) -> str:
    """'float32' and the like, for any library's array."""
    return str(x.dtype).rpartition(".")[2]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers; equal shapes need different seeds to differ."""
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def positive_definite(*shape: int, seed: int = 0) -> np.ndarray:
    """Well-conditioned symmetric matrices (..., n, n), given (..., n)."""
    x = normal(*shape, 2 * shape[-1], seed=seed)
    return x @ np.swapaxes(x, -1, -2) / shape[-1] + 0.1 * np.eye(shape[-1])


def orthogonal(n: int, seed: int = 0) -> np.ndarray:
    """A rotation or reflection without structure."""
    return np.linalg.qr(normal(n, n, seed=seed))[0]


def random(xp: Library, *shape: int, seed: int = 0, dtype: str | None = None) -> Any:
    """`normal` numbers as an array of the library."""
    return xp.asarray(normal(*shape, seed=seed), dtype)


def assert_close(actual: Any, expected: Any, rtol: float = 1e-9) -> None:
    """Equal up to `rtol` times the largest entry expected, to which small entries owe their rounding."""
    actual, expected = to_numpy(actual), to_numpy(expected)
    finite = np.abs(expected[np.isfinite(expected)])
    scale = finite.max() if finite.size else 0.0
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * scale, strict=False)


def assert_identical(actual: Tree, expected: Tree) -> None:
    """Equal to the last bit, leaf by leaf."""
    a, b = leaves(actual), leaves(expected)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(to_numpy(x), to_numpy(y))


def same(a: object, b: object) -> bool:
    """Whether two nested states are equal bit for bit."""
    if find_spec("torch") and isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and all(map(same, a, b))
    return a == b


@st.composite
def convolutions(draw, ranks=(1, 3), places=3):
    """(x, kernel, stride, padding, dilation, groups) with at least one place for the kernel.

    Images are at most `places` larger than that needs.
    """
    rank = draw(st.integers(*ranks))
    groups = draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 3)) for _ in range(rank)]
    stride = [draw(st.integers(1, 3)) for _ in range(rank)]
    dilation = [draw(st.integers(1, 2)) for _ in range(rank)]
    padding = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(rank)]
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sizes = [
        max(1, span - sum(pad)) + draw(st.integers(0, places))
        for span, pad in zip(spans, padding, strict=True)
    ]
    channels = groups * draw(st.integers(1, 2))
    return normal(draw(st.integers(1, 2)), channels, *sizes), kernel, stride, padding, dilation, groups
