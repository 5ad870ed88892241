from __future__ import annotations

import functools
import math

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
from suite.core._namespace import array_namespace, factorizations


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


@pytest.mark.parametrize(
    ("n", "good"),
    [(33, 1), (64, 40), (100, 12), (128, 7), (129, 1), (513, 2), (600, 1), (1024, 1), (1025, 1)],
)
def test_damped_inverse_of_larger_matrices(xp, n, good):
    """JAX leaves out a triangle's zeros; of the last two matrices one is bad in each half."""
    rows = normal(n, n + 10)
    x = np.stack([rows @ rows.T / n * (i + 1) for i in range(good + 2)])
    x[-2, 3, 3] = x[-1, -3, -3] = -1.0
    got = to_numpy(xp.run(linalg.damped_inverse, xp.asarray(x), 0.1))
    assert_close(got[:-2], np.linalg.inv(x[:-2] + 0.1 * np.eye(n)))
    assert_identical(got[:-2], np.swapaxes(got[:-2], -1, -2))
    assert np.all(np.isnan(got[-2:]))


@pytest.mark.parametrize("damping", [1e-4, 5e-6])
@pytest.mark.parametrize("n", [100, 600, 1100])
def test_damped_inverse_needs_little_damping_in_single_precision(xp, n, damping):
    """Of factors with few rows; it errs by what rounding and the condition explain."""
    rows = normal(n // 8, n)
    average = (rows.T @ rows / len(rows)).astype(np.float32)
    damped = (average + np.float32(damping) * np.eye(n, dtype=np.float32)).astype(np.float64)
    got = to_numpy(xp.run(linalg.damped_inverse, xp.asarray(average, "float32"), damping))
    exact = np.linalg.inv(damped)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert error < np.finfo(np.float32).eps * np.linalg.cond(damped)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(3, 3), (400, 7), (520, 450), (599, 599)])
def test_damped_inverse_of_a_large_matrix_that_is_not_finite_is_nan_throughout(xp, at, value):
    x = np.eye(600) * 2
    x[at] = x[at[::-1]] = value
    got = to_numpy(xp.run(linalg.damped_inverse, xp.asarray(np.stack([x, 2 * np.eye(600)])), 0.0))
    assert np.all(np.isnan(got[0]))
    assert_close(got[1], np.eye(600) / 2)


def test_damped_inverse_is_symmetric_to_the_last_bit_and_positive_definite(xp):
    inverse = xp.numpy(xp.run(linalg.damped_inverse, xp.asarray(positive_definite(3, 4)), 1e-3))
    assert_identical(inverse, np.swapaxes(inverse, -1, -2))
    assert np.linalg.eigvalsh(inverse).min() > 0


def test_a_stack_of_no_matrices_has_no_inverses_no_eigenvalues_and_no_diagonals(xp):
    x, y = xp.asarray(np.zeros((0, 3, 3))), xp.asarray(np.zeros((0, 3, 2)))
    for n in (3, 1000):
        empty = xp.asarray(np.zeros((0, n, n)))
        assert to_numpy(xp.run(linalg.damped_inverse, empty, 0.1)).shape == (0, n, n)
    values, vectors = map(to_numpy, xp.run(linalg.eigh, x))
    assert values.shape == (0, 3)
    assert vectors.shape == (0, 3, 3)
    solved = xp.run(lambda a, b: linalg.solve_triangular(a, b, upper=True), x, y)
    assert to_numpy(solved).shape == (0, 3, 2)
    assert to_numpy(xp.run(linalg.diagonal, x)).shape == (0, 3)
    assert to_numpy(xp.run(linalg.trace, x)).shape == (0,)


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


@pytest.mark.parametrize("n", [2, 3, 40])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_damped_inverse_is_nan_throughout_wherever_one_number_is_not_finite(xp, n, value):
    places = [(i, i) for i in sorted({0, 1, n // 2, n - 1})] + [(n - 1, 0), (n - 1, n - 2)]
    x = np.stack([positive_definite(n)] * (len(places) + 1))
    for k, (i, j) in enumerate(places):
        x[k, i, j] = x[k, j, i] = value
    found = to_numpy(xp.run(linalg.damped_inverse, xp.asarray(x), 0.1))
    assert np.isnan(found[:-1]).all()
    assert_close(found[-1], np.linalg.inv(x[-1] + 0.1 * np.eye(n)))


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


def graded(n: int, condition: float) -> np.ndarray:
    """Eigenvalues spread evenly in the logarithm from 1 down to 1 / condition."""
    U = orthogonal(n)
    return (U * np.logspace(0, -np.log10(condition), n)) @ U.T


def norm_bound(x: np.ndarray) -> float:
    return min(np.linalg.norm(x, np.inf), np.linalg.norm(x))


@pytest.mark.parametrize("condition", [1e0, 1e1, 1e2, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_newton_schulz_inverse_takes_the_iterations_it_says(xp, condition, dtype):
    n = 6
    x = graded(n, condition)
    iterations = math.ceil(math.log2(norm_bound(x) * condition) + 2.2)
    arrays = xp.asarray(x, dtype), 0.0, xp.asarray(np.zeros((n, n)), dtype)
    expected = np.linalg.inv(x)

    def relative_error(iterations):
        got = to_numpy(xp.run(linalg.newton_schulz_inverse, *arrays, iterations=iterations))
        return np.linalg.norm(got - expected) / np.linalg.norm(expected)

    assert relative_error(iterations) < 0.02
    epsilon = np.finfo(dtype).eps
    assert relative_error(iterations + 4) < epsilon * (10 + condition)
    if condition > 1:
        assert np.isnan(relative_error(iterations - 2))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("iterations", [10, 30, 60])
def test_newton_schulz_inverse_of_numbers_does_not_start_from_zeros(xp, dtype, iterations):
    """The bound on a guess's residual rounds to 1, the residual of zeros, which would stay zeros."""
    numbers = np.array([1e-20, 0.7, 3.0, 1e20])[:, None, None]
    arrays = xp.asarray(numbers, dtype), 0.0, xp.asarray(np.zeros_like(numbers), dtype)
    got = to_numpy(xp.run(linalg.newton_schulz_inverse, *arrays, iterations=iterations))
    assert_close(got * numbers, np.ones_like(numbers), rtol=1e-6)


def test_newton_schulz_inverse_takes_one_step_from_a_good_guess(xp):
    x, damping = positive_definite(3, 4), np.array([0.0, 0.1, 2.0])
    M = x + damping[:, None, None] * np.eye(4)
    guess = np.linalg.inv(M) * np.array([1.02, 0.97, 1.04])[:, None, None]
    got = xp.run(
        linalg.newton_schulz_inverse, xp.asarray(x), xp.asarray(damping), xp.asarray(guess), iterations=1
    )
    assert_close(got, 2 * guess - guess @ M @ guess, rtol=1e-12)


@pytest.mark.parametrize(("residual", "needed"), [(0.09, 1), (0.49, 3), (0.89, 6)])
def test_newton_schulz_inverse_uses_a_guess_only_if_it_converges_in_time(xp, residual, needed):
    """A guess (1 - r / 2) M⁻¹ has ‖I - M X₀‖_F = r in four dimensions, and then r^(2^k)."""
    x = graded(4, 1e3)
    expected = np.linalg.inv(x)
    arrays = xp.asarray(x), 0.0, xp.asarray((1 - residual / 2) * expected)
    got = xp.run(linalg.newton_schulz_inverse, *arrays, iterations=needed)
    assert_close(got, (1 - (residual / 2) ** 2**needed) * expected)
    far = xp.asarray(x), 0.0, xp.asarray(-expected)
    assert np.all(np.isnan(to_numpy(xp.run(linalg.newton_schulz_inverse, *far, iterations=needed))))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("condition", [1e8, 1e9])
def test_newton_schulz_inverse_takes_nothing_that_overflows_for_an_inverse(xp, condition):
    """Of matrices whose damping single precision cannot hold: NaN, or about as long as 1 / damping."""
    rows = normal(200, 2, 3)
    x = (np.swapaxes(rows, 1, 2) @ rows).astype(np.float32)
    damping = (np.linalg.norm(x, 2, axis=(1, 2)) / condition).astype(np.float32)
    arrays = (xp.asarray(a, "float32") for a in (x, damping, np.zeros_like(x)))
    got = to_numpy(xp.run(linalg.newton_schulz_inverse, *arrays, iterations=30))
    finite = np.isfinite(got).all((1, 2))
    assert np.all(np.isnan(got[~finite]))
    assert np.all(np.linalg.norm(got[finite], 2, axis=(1, 2)) * damping[finite] < 10)


def test_newton_schulz_inverse_chooses_the_start_for_each_matrix(xp):
    x = np.stack([graded(4, 10.0)] * 5)
    good = np.linalg.inv(x[0]) * 1.01
    starts = [good, np.zeros((4, 4)), np.full((4, 4), np.nan), np.full((4, 4), np.inf), -good]
    with np.errstate(invalid="ignore"):
        got = xp.run(
            linalg.newton_schulz_inverse, xp.asarray(x), 0.0, xp.asarray(np.stack(starts)), iterations=7
        )
    got = to_numpy(got)
    assert_close(got[0], np.linalg.inv(x[0]), rtol=1e-12)
    for i in (2, 3, 4):
        assert_identical(got[i], got[1])  # no guess and a useless one are the same
    assert_close(got[1], np.linalg.inv(x[0]), rtol=1e-2)


@each_matrix
def test_newton_schulz_inverse_of_single_precision_handles_difficult_matrices(xp, x):
    damping = 1e-2 * max(np.trace(x) / 4, 1e-30)
    x = x.astype(np.float32)
    inverse = xp.run(
        linalg.newton_schulz_inverse, xp.asarray(x), damping, xp.asarray(np.zeros_like(x)), iterations=14
    )
    inverse = to_numpy(inverse)
    assert_identical(inverse, inverse.T)
    damped = x.astype(np.float64) + damping * np.eye(4)
    assert_close(inverse.astype(np.float64) @ damped, np.eye(4), rtol=1e-3)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # numpy's, as X diverges
def test_newton_schulz_inverse_of_a_bad_matrix_is_nan_throughout_and_alone(xp):
    good = positive_definite(4)
    poisoned = good.copy()
    poisoned[2, 0] = np.nan
    bad = [np.full((4, 4), np.inf), poisoned, np.diag([1.0, -1.0, 1.0, 1.0]), np.zeros((4, 4))]
    for start in (np.zeros((4, 4)), np.linalg.inv(good)):
        x = xp.asarray(np.stack([good, *bad, 2 * good]))
        starts = xp.asarray(np.stack([start] * 6))
        got = to_numpy(xp.run(linalg.newton_schulz_inverse, x, 0.0, starts, iterations=16))
        assert np.all(np.isnan(got[1:5]))
        assert_close(got[0], np.linalg.inv(good))
        assert_close(got[5], np.linalg.inv(2 * good))


def test_newton_schulz_inverse_needs_an_iteration():
    with pytest.raises(ValueError, match=r"iterations must be >= 1, got 0"):
        linalg.newton_schulz_inverse(np.eye(2), 0.1, np.eye(2), 0)


def rebuilt(values: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return (vectors * values[..., None, :]) @ np.swapaxes(vectors, -1, -2)


@pytest.mark.parametrize("condition", [1e1, 1e6])
def test_warm_eigh_repeated_converges_to_the_eigendecomposition(xp, condition):
    x, n = graded(6, condition), 6
    vectors = xp.asarray(np.eye(n))
    errors = []
    for _ in range(60):
        values, vectors = xp.run(linalg.warm_eigh, xp.asarray(x), vectors)
        errors.append(np.linalg.norm(rebuilt(to_numpy(values), to_numpy(vectors)) - x))
    assert np.all(np.diff(errors) <= 1e-14)
    assert errors[0] > 0.01
    assert errors[-1] < 1e-9
    assert_close(np.sort(to_numpy(values)), np.linalg.eigvalsh(x))


def test_warm_eigh_converges_at_the_ratio_of_eigenvalues():
    x = graded(2, 4.0)
    vectors, errors = np.eye(2), []
    for _ in range(12):
        values, vectors = linalg.warm_eigh(x, vectors)
        errors.append(np.linalg.norm(rebuilt(values, vectors) - x))
    np.testing.assert_allclose(np.divide(errors[1:], errors[:-1])[4:], 0.25, rtol=1e-2)


def test_warm_eigh_is_one_step_of_orthogonal_iteration(xp):
    """The first k columns span the images of the k columns with the largest Rayleigh quotients."""
    x, V = positive_definite(3, 5), np.stack([orthogonal(5, seed) for seed in (1, 2, 3)])
    values, Q = map(to_numpy, xp.run(linalg.warm_eigh, xp.asarray(x), xp.asarray(V)))
    for b in range(3):
        quotients = [v @ x[b] @ v for v in V[b].T]
        image = (x[b] @ V[b])[:, np.argsort(quotients)[::-1]]
        for k in range(1, 6):
            assert_close(Q[b, :, :k] @ Q[b, :, :k].T, image[:, :k] @ np.linalg.pinv(image[:, :k]))
        assert_close(values[b], np.diag(Q[b].T @ x[b] @ Q[b]))


@each_matrix
@pytest.mark.parametrize("start", ["identity", "eigenvectors", "other"])
def test_warm_eigh_of_single_precision_stays_orthonormal_on_difficult_matrices(xp, x, start):
    """From the eigenvectors it also rebuilds the matrix, though eigh lists the null vectors first."""
    x = x.astype(np.float32)
    V = {"identity": np.eye(4), "eigenvectors": np.linalg.eigh(x)[1], "other": orthogonal(4, 7)}[start]
    values, Q = map(to_numpy, xp.run(linalg.warm_eigh, xp.asarray(x), xp.asarray(V, "float32")))
    assert values.min() >= 0
    assert_close(Q.T @ Q, np.eye(4), rtol=1e-5)
    if start == "eigenvectors":
        assert_close(rebuilt(values.astype(np.float64), Q), x, rtol=1e-5)
    if np.linalg.matrix_rank(x) == 1:
        # Its image has one direction: whatever the start, the eigenvector is found at once.
        assert_close(rebuilt(values.astype(np.float64), Q), x, rtol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["matrix", "basis"])
def test_warm_eigh_of_what_is_not_finite_is_nan_throughout_and_alone(xp, value, where):
    x, V = positive_definite(3, 4), np.stack([np.linalg.eigh(m)[1] for m in positive_definite(3, 4)])
    (x if where == "matrix" else V)[1, 2, 0] = value
    values, vectors = map(to_numpy, xp.run(linalg.warm_eigh, xp.asarray(x), xp.asarray(V)))
    assert np.all(np.isnan(values[1]))
    assert np.all(np.isnan(vectors[1]))
    for i in (0, 2):
        assert_close(rebuilt(values[i], vectors[i]), x[i])


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


@pytest.mark.parametrize("axis", [(0,), (-2, -1), (0, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_the_largest_entry_is_that_of_absolute_values(xp, axis, keepdims):
    x = normal(3, 4, 2)  # of either sign
    got = xp.run(lambda x: linalg.largest_entry(x, axis, keepdims=keepdims), xp.asarray(x))
    assert_identical(xp.numpy(got), np.abs(x).max(axis=axis, keepdims=keepdims))


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 300, 300)])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
def test_the_largest_entry_of_few_numbers_and_of_many_is_not_finite_where_one_is_not(xp, shape, bad):
    if xp.name == "jax" and bad is not None and np.isnan(bad):
        pytest.skip("XLA's maximum may pass over NaN")
    x = normal(*shape)
    x[1, -1, 0] = -7.0 if bad is None else bad
    got = xp.numpy(xp.run(lambda x: linalg.largest_entry(x, (1, 2)), xp.asarray(x)))
    assert_identical(got, np.abs(x).max(axis=(1, 2)))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_the_largest_row_is_that_of_the_largest_size(xp, batch):
    x, size = normal(*batch, 4, 4), np.abs(normal(*batch, 4))

    def largest_row(x, size):
        return factorizations(array_namespace(x)).largest_row(x, size)

    expected = np.take_along_axis(x, size.argmax(-1)[..., None, None], axis=-2)
    assert_identical(xp.numpy(xp.run(largest_row, xp.asarray(x), xp.asarray(size))), expected)


@pytest.mark.parametrize("sizes", [(1.0, 1e-3, 7.0), (1e-30, 1.0, 0.0), (1e36, 1e-12, 1e30)])
@pytest.mark.parametrize("axis", [(-2, -1), (1, 2, 3)])
def test_the_root_mean_square_of_numbers_of_any_size(xp, axis, sizes):
    x = (normal(3, 2, 40, 50) * np.array(sizes)[:, None, None, None]).astype(np.float32)
    got = to_numpy(xp.run(lambda x: linalg.root_mean_square(x, axis), xp.asarray(x)))
    expected = np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=axis, keepdims=True))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


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


def test_traces_of_several_sizes_are_in_the_order_of_their_stacks(xp):
    stacks = [normal(2, 3, 3), normal(1, 7, seed=1), normal(3, 5, 5, seed=2), normal(2, 1, 1, seed=3)]
    found = xp.run(lambda *given: linalg.traces(given), *map(xp.asarray, stacks))
    each = [np.trace(x, axis1=1, axis2=2) if x.ndim == 3 else x.sum(1) for x in stacks]
    assert_close(found, np.concatenate(each))
    only = xp.run(lambda x: linalg.traces([x]), xp.asarray(stacks[1].astype(np.float32)))
    assert_close(only, stacks[1].sum(1), rtol=1e-6)


def test_norm_is_that_of_all_entries(xp):
    x = normal(2, 3, 4)
    assert_close(xp.run(linalg.norm, xp.asarray(x)), math.sqrt(sum(v**2 for v in x.flat)))
    assert_identical(xp.run(linalg.norm, xp.asarray(np.zeros((2, 3)))), np.zeros(()))
    assert_close(xp.run(linalg.norm, xp.asarray(np.array(-3.0))), 3.0)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_norm_neither_overflows_nor_underflows(xp, size):
    x = xp.asarray(np.full((3, 3), -size, dtype=np.float32))
    np.testing.assert_allclose(xp.numpy(xp.run(linalg.norm, x)), 3 * size, rtol=1e-5)


def test_row_norms_are_the_norms_of_all_that_is_in_a_row(xp):
    x = normal(3, 2, 4)
    expected = [math.sqrt(sum(v**2 for v in row.flat)) for row in x]
    assert_close(xp.run(linalg.row_norms, xp.asarray(x)), expected)


@pytest.mark.parametrize("axis", [None, 0, 2])
def test_rows_of_a_normed_weight_are_so_many_times_longer(xp, axis):
    """The weight by its definition (Salimans & Kingma 2016, equation 2), slice by slice."""
    rng = np.random.default_rng(0)
    v = rng.normal(size=(4, 2, 3))
    g, weight = np.asarray(rng.normal()), np.empty_like(v)
    if axis is None:
        weight = g * v / np.sqrt((v**2).sum())
    else:
        g = rng.normal(size=[n if i == axis else 1 for i, n in enumerate(v.shape)])
        for i in range(v.shape[axis]):
            part = (slice(None),) * axis + (i,)
            weight[part] = g.reshape(-1)[i] * v[part] / np.sqrt((v[part] ** 2).sum())
    expected = [np.linalg.norm(w) / np.linalg.norm(d) for w, d in zip(weight, v, strict=True)]
    assert_close(xp.run(linalg.normed_row_scales, xp.asarray(v), xp.asarray(g)), np.array(expected))


def test_bilinear_is_the_double_sum(xp):
    u, x, v = normal(3), normal(3, 4), normal(4)
    expected = sum(u[i] * x[i, j] * v[j] for i in range(3) for j in range(4))
    assert_close(xp.run(linalg.bilinear, *xp.convert((u, x, v))), expected)


@pytest.mark.parametrize("scale", [1e-28, 1.0, 1e28])
def test_condition_number_is_about_the_ratio_of_the_extreme_eigenvalues(xp, scale):
    values = np.array([[1.0, 2.0, 5.0], [4.0, 0.5, 1.0], [3.0, 3.0, 3.0], [1e-4, 1.0, 30.0]])
    U = orthogonal(3)
    x = scale * (U * values[:, None, :]) @ U.T
    expected = values.max(-1) / values.min(-1)
    for dtype in (np.float32, np.float64):
        got = xp.numpy(xp.run(linalg.condition_number, xp.asarray(x.astype(dtype))))
        assert np.all(got <= expected * (1.02 if dtype is np.float32 else 1 + 1e-9))
        assert_close(got, expected, rtol=0.1)


@pytest.mark.parametrize("rows", [600, 2000])
def test_condition_number_of_second_moments_is_near(xp, rows):
    data = np.random.default_rng(0).normal(size=(rows, 512))
    x = data.T @ data / rows
    got = float(xp.numpy(xp.run(linalg.condition_number, xp.asarray(x))))
    expected = np.linalg.cond(x)
    assert 0.85 * expected < got <= expected * (1 + 1e-9)


def test_condition_number_of_a_singular_matrix_is_large_and_of_one_that_is_not_finite_nan(xp):
    x = np.stack([np.diag([0.0, 1.0]), np.zeros((2, 2)), np.full((2, 2), np.nan), np.eye(2)])
    got = xp.numpy(xp.run(linalg.condition_number, xp.asarray(x)))
    assert np.isnan(got[2])
    assert_close(got[[0, 1, 3]], [1e38, 1e38, 1.0])


def test_any_number_of_leading_axes(xp):
    x = positive_definite(2, 2, 3)
    inverse = xp.run(linalg.damped_inverse, xp.asarray(x), 0.1)
    assert_close(inverse, np.linalg.inv(x + 0.1 * np.eye(3)))
    products = xp.run(
        linalg.newton_schulz_inverse, xp.asarray(x), 0.1, xp.asarray(np.zeros_like(x)), iterations=14
    )
    assert_close(products, np.linalg.inv(x + 0.1 * np.eye(3)))
    basis = xp.asarray(np.linalg.eigh(x)[1])
    values, vectors = map(xp.numpy, xp.run(linalg.warm_eigh, xp.asarray(x), basis))
    assert_close((vectors * values[..., None, :]) @ np.swapaxes(vectors, -1, -2), x)
    values, vectors = map(xp.numpy, xp.run(linalg.eigh, xp.asarray(x)))
    assert_close((vectors * values[..., None, :]) @ np.swapaxes(vectors, -1, -2), x)
    assert_close(
        xp.run(linalg.spectral_norm_bound, xp.asarray(x[0, 0])), np.linalg.norm(x[0, 0], 2), rtol=0.1
    )


@pytest.mark.parametrize(
    "shape",
    [(7, 3), (2, 5, 4), (400, 384), (2, 100, 387), (20, 500), (3, 1, 400), (270, 131), (2, 256, 128)],
)
def test_gram_is_the_product_and_symmetric(xp, shape):
    x = np.random.default_rng(0).normal(size=shape)
    for given in (x, np.swapaxes(np.ascontiguousarray(np.swapaxes(x, -1, -2)), -1, -2)):
        got = xp.numpy(xp.run(linalg.gram, xp.asarray(given)))
        np.testing.assert_allclose(got, np.swapaxes(x, -1, -2) @ x, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(got, np.swapaxes(got, -1, -2), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
def test_products_with_transposed_matrices(xp, batch):
    generator = np.random.default_rng(0)
    x, y, z = (generator.normal(size=(*batch, *shape)) for shape in ((4, 2), (4, 3), (5, 2)))
    first = xp.numpy(xp.run(linalg.transposed_times, xp.asarray(x), xp.asarray(y)))
    second = xp.numpy(xp.run(linalg.times_transposed, xp.asarray(x), xp.asarray(z)))
    np.testing.assert_allclose(first, np.einsum("...ni,...nj->...ij", x, y), rtol=1e-12)
    np.testing.assert_allclose(second, np.einsum("...in,...jn->...ij", x, z), rtol=1e-12)


@pytest.mark.parametrize(("batch", "count"), [((), 2), ((1,), 3), ((2, 3), 2), ((2,), 4), ((0,), 2)])
def test_a_product_with_a_block_diagonal_matrix(xp, batch, count):
    x, blocks = normal(*batch, 5, 3 * count), normal(*batch, count, 3, 3, seed=1)
    got = xp.numpy(xp.run(linalg.times_block_diagonal, xp.asarray(x), xp.asarray(blocks)))
    columns = x.reshape(*batch, 5, count, 3)
    expected = np.einsum("...mci,...cij->...mcj", columns, blocks).reshape(x.shape)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: linalg.damped_inverse(x, 0.1),
        lambda x: linalg.newton_schulz_inverse(x, 0.1, x, 14),
        linalg.eigh,
        lambda x: linalg.warm_eigh(x, linalg.eye_like(x)),
        linalg.spectral_norm_bound,
        linalg.norm,
        linalg.condition_number,
        lambda x: linalg.solve_triangular(x, x, upper=True),
    ],
    ids=[
        "damped_inverse",
        "newton_schulz_inverse",
        "eigh",
        "warm_eigh",
        "spectral_norm_bound",
        "norm",
        "condition_number",
        "solve_triangular",
    ],
)
def test_half_precision_is_lifted_to_single(xp, function):
    if xp.half is None:
        pytest.skip("the library has no half precision")
    x = xp.asarray(np.triu(positive_definite(4)), xp.half)
    for result in leaves(xp.run(function, x)):
        assert dtype_name(result) == "float32"
        assert np.all(np.isfinite(to_numpy(result)))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [1e300, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(1,), (5,), (4, 5), (3, 4, 5)])
def test_finite_marks_tell_whether_all_is_finite(xp, shape, value):
    x = normal(*shape)
    x[tuple(n // 2 for n in shape)] = value
    marks = to_numpy(xp.run(linalg.finite_marks, xp.convert(x)))
    assert marks.shape == (x.size if x.ndim == 1 else 2 * x.size // 5,)
    assert np.all(np.isfinite(marks)) == np.isfinite(value)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize(
    ("power", "value", "finite"),
    [(2, 1e100, True), (2, -1e153, True), (2, 1e160, False), (1.5, -1e204, True), (1.5, -1e210, False)],
)
@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 5)])
def test_finite_marks_tell_whether_powers_are_finite(xp, shape, power, value, finite):
    x = normal(*shape)
    x[tuple(n // 2 for n in shape)] = value
    marks = to_numpy(xp.run(functools.partial(linalg.finite_marks, power=power), xp.convert(x)))
    assert np.all(np.isfinite(marks)) == finite


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_squares_of_half_precision_are_those_in_single(xp):
    if xp.half is None:
        pytest.skip("the library has no half precision")
    for value, finite in ((6e4, True), (1e30, dtype_name(xp.asarray(1.0, xp.half)) != "bfloat16")):
        x = xp.asarray(np.full((3, 4), value), xp.half)
        given = np.all(np.isfinite(to_numpy(x)))
        marks = to_numpy(xp.run(functools.partial(linalg.finite_marks, power=2), x))
        assert np.all(np.isfinite(marks)) == (finite and given)


def test_finite_marks_of_nothing_and_of_a_number(xp):
    assert xp.run(linalg.finite_marks, xp.asarray(np.asarray(np.nan))).shape == (1,)
    for shape in [(0,), (0, 3), (3, 0)]:
        assert np.all(to_numpy(xp.run(linalg.finite_marks, xp.asarray(np.zeros(shape)))) == 0)


def test_inner_product_is_the_sum_over_all_entries(xp):
    x, y = normal(3, 4), normal(3, 4, seed=1)
    assert_close(xp.run(linalg.inner_product, xp.asarray(x), xp.asarray(y)), np.sum(x * y))


def test_inner_product_of_half_precision_is_summed_in_single(xp):
    if xp.half is None:
        pytest.skip("the library has no half precision")
    # Neither bfloat16 (8 bits) nor float16 (up to 65504) can hold 64 * 4097.
    x = xp.asarray(np.full(4097, 8.0), xp.half)
    assert_identical(xp.run(linalg.inner_product, x, x), np.float32(64 * 4097))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")
def test_an_inverse_that_overflows_is_nan_throughout_and_its_neighbour_is_not(xp):
    x = np.stack([positive_definite(3), np.diag([1.0, 1.0, 1e-310])])
    inverse = to_numpy(xp.run(linalg.damped_inverse, xp.asarray(x), 0.0))
    assert_close(inverse[0], np.linalg.inv(x[0]))
    assert np.all(np.isnan(inverse[1]))
