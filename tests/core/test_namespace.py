from __future__ import annotations

import numpy as np
import pytest

from conftest import also_eager_jax, assert_close, assert_identical, dtype_name, normal, random
from suite.core._namespace import array_namespace, as_scalar, device_of, factorizations, lift


@also_eager_jax
def test_namespace_makes_arrays_of_the_same_kind(xp):
    x = random(xp, 2)
    made = array_namespace(x).zeros(2, dtype=x.dtype, device=device_of(x))
    assert type(made) is type(x)
    assert made.dtype == x.dtype


@also_eager_jax
def test_new_arrays_lie_beside_the_old_one(xp):
    x = random(xp, 2)
    made = array_namespace(x).eye(2, dtype=x.dtype, device=device_of(x))
    assert made.device == x.device


def test_namespace_is_found_while_tracing(xp):
    assert_close(xp.run(lambda x: array_namespace(x).exp(x), random(xp, 3)), np.exp(normal(3)))


def test_factorizations_exist_for_every_library(xp):
    module = factorizations(array_namespace(random(xp, 2)))
    for name in ("cholesky_inverse", "eigh", "solve_triangular"):
        assert callable(getattr(module, name))


@also_eager_jax
def test_numbers_pass_as_scalars_and_arrays_take_the_operands_dtype(xp):
    for name in filter(None, ("float64", "float32", xp.half)):
        like = random(xp, 2, dtype=name)
        assert as_scalar(3, like) == 3.0
        assert isinstance(as_scalar(3, like), float)
        for dtype in ("float64", "float32"):
            scalar = as_scalar(xp.asarray(0.5, dtype), like)
            assert dtype_name(scalar) == name
            assert dtype_name(scalar * like) == name


def test_lift_raises_half_precision_only(xp):
    for name in ("float64", "float32"):
        assert dtype_name(lift(random(xp, 2, dtype=name))) == name
    if xp.half is None:
        pytest.skip("the library has no half precision")
    half = random(xp, 2, dtype=xp.half)
    assert dtype_name(lift(half)) == "float32"
    assert_identical(lift(half), xp.numpy(half))


x, y, flags = normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(2, 3, 4) > 0
POSITIVE = np.abs(x)
# How the standard defines each name that torch lacks or spells otherwise: numpy is the reference.
CALLS = {
    "argsort": lambda xp, x, y, m: xp.argsort(x, axis=-1, stable=True),
    "cos": lambda xp, x, y, m: xp.cos(x),
    "cumulative_sum": lambda xp, x, y, m: xp.cumulative_sum(x, axis=1),
    "take": lambda xp, x, y, m: xp.take(x, xp.argsort(x[0, :, 0], axis=0, stable=True), axis=1),
    "take_along_axis": lambda xp, x, y, m: xp.take_along_axis(
        x, xp.argsort(y, axis=1, stable=True), axis=1
    ),
    "abs": lambda xp, x, y, m: xp.abs(x),
    "all": lambda xp, x, y, m: (xp.all(m), xp.all(m, axis=(-2, -1)), xp.all(m, axis=1)),
    "any": lambda xp, x, y, m: (xp.any(m), xp.any(m, axis=(-2, -1)), xp.any(m, axis=1)),
    "arange": lambda xp, x, y, m: xp.arange(5, dtype=xp.int32),
    "argmax": lambda xp, x, y, m: xp.argmax(x, axis=-1),
    "asarray": lambda xp, x, y, m: xp.asarray(x),
    "astype": lambda xp, x, y, m: (xp.astype(x, xp.float32), xp.astype(m, xp.int32)),
    "broadcast_to": lambda xp, x, y, m: xp.broadcast_to(x, (5, 2, 3, 4)),
    "concat": lambda xp, x, y, m: (xp.concat([x, y], axis=-1), xp.concat([x, y], axis=0)),
    "exp": lambda xp, x, y, m: xp.exp(x),
    "expand_dims": lambda xp, x, y, m: (xp.expand_dims(x, axis=0), xp.expand_dims(x, axis=-1)),
    "eye": lambda xp, x, y, m: xp.eye(3, dtype=xp.float64),
    "floor": lambda xp, x, y, m: xp.floor(3 * x),
    "full": lambda xp, x, y, m: xp.full((2, 3), 2.5, dtype=xp.float32),
    "isfinite": lambda xp, x, y, m: xp.isfinite(x / (x * m)),
    "log": lambda xp, x, y, m: xp.log(xp.abs(x)),
    "log2": lambda xp, x, y, m: xp.log2(xp.abs(x)),
    "matmul": lambda xp, x, y, m: (
        xp.matmul(x, xp.matrix_transpose(y)),
        xp.matmul(x[:1], xp.matrix_transpose(y)),
        xp.matmul(x[0], xp.matrix_transpose(y)),
        xp.matmul(x[None], xp.matrix_transpose(y)[:, None]),
        xp.matmul(x, y[0, 0]),
    ),
    "matrix_transpose": lambda xp, x, y, m: xp.matrix_transpose(x),
    "max": lambda xp, x, y, m: (
        xp.max(x, axis=(-2, -1), keepdims=True),
        xp.max(x, axis=-1),
        xp.max(x, axis=(0, 1, 2)),
    ),
    "maximum": lambda xp, x, y, m: (xp.maximum(x, y), xp.maximum(x / (x * m), y)),
    "mean": lambda xp, x, y, m: (xp.mean(x, axis=-1), xp.mean(x, axis=(0, 2), keepdims=True)),
    "min": lambda xp, x, y, m: (
        xp.min(x, axis=(-2, -1), keepdims=True),
        xp.min(x, axis=-1),
        xp.min(x, axis=(0, 1, 2)),
    ),
    "minimum": lambda xp, x, y, m: (xp.minimum(x, y), xp.minimum(x / (x * m), y)),
    "moveaxis": lambda xp, x, y, m: xp.moveaxis(x, 2, 0),
    "ones": lambda xp, x, y, m: xp.ones((2, 3), dtype=xp.float32),
    "permute_dims": lambda xp, x, y, m: xp.permute_dims(x, (2, 0, 1)),
    "reshape": lambda xp, x, y, m: (xp.reshape(x, (2, -1)), xp.reshape(x, (24,))),
    "sqrt": lambda xp, x, y, m: xp.sqrt(xp.abs(x)),
    "stack": lambda xp, x, y, m: xp.stack([x, y], axis=-1),
    "sum": lambda xp, x, y, m: (xp.sum(x), xp.sum(x, axis=(-2, -1)), xp.sum(x, axis=1, keepdims=True)),
    "triu": lambda xp, x, y, m: xp.triu(x),
    "where": lambda xp, x, y, m: (xp.where(m, x, y), xp.where(m, x, float("nan"))),
    "zeros": lambda xp, x, y, m: xp.zeros((2, 3), dtype=xp.float64),
    "zeros_like": lambda xp, x, y, m: xp.zeros_like(x),
}
# Data types and submodules have nothing to call; the factorizations are tested in test_linalg.py.
NOT_CALLED = {"bool", "float32", "float64", "int32", "finfo", "linalg"}
NOT_CALLED |= {"cholesky_inverse", "eigh", "gram", "qr", "solve_triangular"}
NOT_CALLED |= {"add_diagonal", "are_finite", "diagonal", "inner_product", "trace", "usually"}
NOT_CALLED |= {"largest_entry", "largest_row", "parts", "repeated", "root_mean_square"}
NOT_CALLED |= {"summed_gram"}
NOT_CALLED |= {"times_block_diagonal", "times_transposed", "transposed_times"}
NOT_CALLED |= {"correlations", "work_of_a_launch"}  # tested in test_correlations.py
NOT_CALLED |= {"over_groups"}  # tested in test_statistics.py
NOT_CALLED |= {"multiplies_as_it_is"}  # tested in torch_backend/test_bfloat16.py
# Tested in test_on_a_gpu.py.
NOT_CALLED |= {"full_precision", "gram_in_single", "sum_of_squares", "sums_in_single"}
NOT_CALLED |= {"pack", "unpack"}  # tested in test_packing.py
NOT_CALLED |= {"wrapping_product"}  # tested in test_noise.py, compiled in test_kron_options.py


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
def test_torchs_names_mean_what_they_mean_in_numpy(name):
    torch, _torch = pytest.importorskip("torch"), pytest.importorskip("suite.core._torch")
    got = CALLS[name](_torch, *map(torch.tensor, (x, y, flags)))
    expected = CALLS[name](np, x, y, flags)
    if not isinstance(expected, tuple):
        got, expected = (got,), (expected,)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)
        assert dtype_name(a) == str(b.dtype)


def test_every_name_that_torch_is_given_is_checked_above():
    _torch = pytest.importorskip("suite.core._torch")
    imported = {
        "annotations",
        "builtins",
        "itertools",
        "math",
        "sys",
        "torch",
        "F",
        "grad",
    }
    imported |= {"Any", "Callable"}
    names = {name for name in vars(_torch) if not name.startswith("_")} - imported
    assert names == set(CALLS) | NOT_CALLED


def test_torchs_maximum_and_minimum_take_numbers_as_well():
    torch, _torch = pytest.importorskip("torch"), pytest.importorskip("suite.core._torch")
    assert_close(_torch.maximum(torch.tensor(x), 0.5), np.maximum(x, 0.5))
    assert_close(_torch.minimum(torch.tensor(x), 0.5), np.minimum(x, 0.5))


def test_only_torch_needs_a_namespace_of_ours(xp):
    name = array_namespace(random(xp, 2)).__name__
    assert (name == "suite.core._torch") == (xp.name == "torch")
