from __future__ import annotations

import numpy as np
import pytest

from conftest import (
    assert_close,
    assert_identical,
    dtype_name,
    leaves,
    normal,
    orthogonal,
    positive_definite,
    to_numpy,
)
from suite.core import linalg


def difficult(n: int = 4) -> dict[str, np.ndarray]:
    """Positive semi-definite matrices that have broken somebody's eigensolver."""
    v, U = normal(n), orthogonal(n)
    return {
        "zero": np.zeros((n, n)),
        "identity": np.eye(n),
        "rank one": np.outer(v, v),
        "all ones": np.ones((n, n)),
        "repeated": (U * np.array([2.0, 2.0, 0.0, 0.0])) @ U.T,
        "graded": (U * np.logspace(0, -12, n)) @ U.T,
        "diagonal": np.diag(np.arange(float(n))),
        "huge": 1e30 * positive_definite(n),
        "tiny": 1e-30 * positive_definite(n),
    }


MATRICES = difficult()
each_matrix = pytest.mark.parametrize("x", list(MATRICES.values()), ids=list(MATRICES))


def test_damped_inverse_is_the_inverse_of_the_damped_matrix(xp):
    x, damping = positive_definite(3, 4), np.array([0.0, 0.1, 1e4])
    got = xp.run(linalg.damped_inverse, xp.asarray(x), xp.asarray(damping))
    assert_close(got, np.linalg.inv(x + damping[:, None, None] * np.eye(4)))


def test_damped_inverse_is_symmetric_to_the_last_bit_and_positive_definite(xp):
    inverse = xp.numpy(xp.run(linalg.damped_inverse, xp.asarray(positive_definite(3, 4)), 1e-3))
    assert_identical(inverse, np.swapaxes(inverse, -1, -2))
    assert np.linalg.eigvalsh(inverse).min() > 0


@each_matrix
def test_eigh_of_single_precision_rebuilds_difficult_matrices(xp, x):
    x = x.astype(np.float32)
    values, vectors = map(to_numpy, xp.run(linalg.eigh, xp.asarray(x)))
    assert values.min() >= 0
    assert np.all(np.diff(values) >= 0)
    assert_close(vectors.T @ vectors, np.eye(4), rtol=1e-5)
    assert_close((vectors.astype(np.float64) * values) @ vectors.T, x, rtol=1e-5)


@each_matrix
def test_damped_inverse_of_single_precision_handles_difficult_matrices(xp, x):
    damping = 1e-2 * max(np.trace(x) / 4, 1e-30)
    x = x.astype(np.float32)
    inverse = to_numpy(xp.run(linalg.damped_inverse, xp.asarray(x), damping))
    damped = x.astype(np.float64) + damping * np.eye(4)
    assert_close(inverse.astype(np.float64) @ damped, np.eye(4), rtol=1e-3)


@pytest.mark.parametrize("name", ["not finite", "indefinite"])
@pytest.mark.parametrize("batch", ["neighbours", "alone"])
def test_damped_inverse_of_a_bad_matrix_is_nan_throughout_and_alone(xp, name, batch):
    bad = {"not finite": np.full((4, 4), np.inf), "indefinite": np.diag([1.0, -1.0, 1.0, 1.0])}[name]
    good = positive_definite(4)
    if batch == "alone":
        assert np.all(np.isnan(xp.numpy(xp.run(linalg.damped_inverse, xp.asarray(bad), 0.1))))
        return
    got = xp.numpy(xp.run(linalg.damped_inverse, xp.asarray(np.stack([good, bad, 2 * good])), 0.1))
    assert np.all(np.isnan(got[1]))
    assert_close(got[0], np.linalg.inv(good + 0.1 * np.eye(4)))
    assert_close(got[2], np.linalg.inv(2 * good + 0.1 * np.eye(4)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_eigh_of_a_matrix_that_is_not_finite_is_nan_throughout_and_alone(xp, value):
    x = positive_definite(3, 4)
    x[1, 2, 0] = value
    values, vectors = map(xp.numpy, xp.run(linalg.eigh, xp.asarray(x)))
    assert np.all(np.isnan(values[1]))
    assert np.all(np.isnan(vectors[1]))
    for i in (0, 2):
        assert_close((vectors[i] * values[i]) @ vectors[i].T, x[i])


def test_eigh_removes_the_rounding_that_makes_eigenvalues_negative(xp):
    x = np.diag([-1e-12, 1.0, -1e-9])
    values, _ = xp.run(linalg.eigh, xp.asarray(x))
    assert_identical(values, np.array([0.0, 0.0, 1.0]))


def test_eigh_reads_both_triangles(xp):
    x = positive_definite(4)
    crooked = x + np.triu(np.ones((4, 4)), 1) - np.tril(np.ones((4, 4)), -1)
    values, _ = xp.run(linalg.eigh, xp.asarray(crooked))
    assert_close(values, np.linalg.eigvalsh(x))


@pytest.mark.parametrize("upper", [True, False], ids=["upper", "lower"])
def test_solve_triangular_solves(xp, upper):
    x, y = normal(2, 4, 4) + 3 * np.eye(4), normal(2, 4, 3)
    x = np.triu(x) if upper else np.tril(x)
    z = xp.run(linalg.solve_triangular, xp.asarray(x), xp.asarray(y), upper=upper)
    assert_close(x @ xp.numpy(z), y)


def test_solve_triangular_with_a_singular_matrix_spares_its_neighbours(xp):
    x, y = np.stack([np.eye(3), np.diag([1.0, 0.0, 1.0]), 2 * np.eye(3)]), normal(3, 3, 2)
    z = xp.run(linalg.solve_triangular, xp.asarray(x), xp.asarray(y), upper=True)
    z = xp.numpy(z)
    assert not np.all(np.isfinite(z[1]))
    assert_close(z[0], y[0])
    assert_close(z[2], y[2] / 2)


KINDS = {
    "symmetric": lambda x: x + np.swapaxes(x, -1, -2),
    "positive": lambda x: x @ np.swapaxes(x, -1, -2),
    "skew": lambda x: x - np.swapaxes(x, -1, -2),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("n", [1, 3, 8])
def test_spectral_norm_bound_lies_between_frobenius_over_root_n_and_the_norm(xp, kind, n):
    """Each power iteration from the largest row only adds to that row's norm, itself ≥ ‖x‖_F / √n."""
    x = KINDS[kind](normal(50, n, n))
    bound = xp.numpy(xp.run(linalg.spectral_norm_bound, xp.asarray(x)))
    norm = np.linalg.norm(x, 2, axis=(-2, -1))
    assert np.all(bound <= norm * (1 + 1e-12))
    assert np.all(bound >= np.linalg.norm(x, axis=(-2, -1)) / np.sqrt(n) * (1 - 1e-12))
    if n > 1:
        assert np.mean(bound / norm) > 0.9  # random matrices of this size: 0.955 and more


def test_spectral_norm_bound_of_a_diagonal_or_rank_one_matrix_is_exact(xp):
    v = normal(3, 5)
    x = np.concatenate([v[:, :, None] * v[:, None, :], v[:, :, None] * np.eye(5)])
    got = xp.run(linalg.spectral_norm_bound, xp.asarray(x))
    assert_close(got, np.concatenate([np.sum(v * v, axis=-1), np.abs(v).max(axis=-1)]))


@pytest.mark.parametrize("size", [0.0, 1e-36, 1e36])
def test_spectral_norm_bound_neither_overflows_nor_underflows(xp, size):
    x = (size * np.ones((1, 4, 4))).astype(np.float32)
    np.testing.assert_allclose(
        xp.numpy(xp.run(linalg.spectral_norm_bound, xp.asarray(x))), 4 * size, rtol=1e-4
    )


def test_add_diagonal_takes_a_number_or_one_for_each_matrix(xp):
    x, values = normal(2, 3, 3), np.array([2.0, -1.0])
    assert_close(xp.run(linalg.add_diagonal, xp.asarray(x), 0.5), x + 0.5 * np.eye(3))
    got = xp.run(linalg.add_diagonal, xp.asarray(x), xp.asarray(values))
    assert_close(got, x + values[:, None, None] * np.eye(3))


def test_trace_transpose_and_symmetrize_act_on_each_matrix(xp):
    x = normal(2, 3, 3)
    assert_close(linalg.trace(xp.asarray(x)), np.trace(x, axis1=-2, axis2=-1))
    assert_identical(linalg.transpose(xp.asarray(x)), np.swapaxes(x, -1, -2))
    assert_close(linalg.symmetrize(xp.asarray(x)), (x + np.swapaxes(x, -1, -2)) / 2)


def test_any_number_of_leading_axes(xp):
    x = positive_definite(2, 2, 3)
    inverse = xp.run(linalg.damped_inverse, xp.asarray(x), 0.1)
    assert_close(inverse, np.linalg.inv(x + 0.1 * np.eye(3)))
    values, vectors = map(xp.numpy, xp.run(linalg.eigh, xp.asarray(x)))
    assert_close((vectors * values[..., None, :]) @ np.swapaxes(vectors, -1, -2), x)
    assert_close(
        xp.run(linalg.spectral_norm_bound, xp.asarray(x[0, 0])), np.linalg.norm(x[0, 0], 2), rtol=0.1
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: linalg.damped_inverse(x, 0.1),
        linalg.eigh,
        linalg.spectral_norm_bound,
        lambda x: linalg.solve_triangular(x, x, upper=True),
    ],
    ids=["damped_inverse", "eigh", "spectral_norm_bound", "solve_triangular"],
)
def test_half_precision_is_lifted_to_single(xp, function):
    if xp.half is None:
        pytest.skip("the library has no half precision")
    x = xp.asarray(np.triu(positive_definite(4)), xp.half)
    for result in leaves(xp.run(function, x)):
        assert dtype_name(result) == "float32"
        assert np.all(np.isfinite(to_numpy(result)))
