from __future__ import annotations

import numpy as np
import pytest

from conftest import (
    also_eager_jax,
    assert_close,
    assert_identical,
    dtype_name,
    normal,
    orthogonal,
    positive_definite,
    to_numpy,
)
from oracles import kfac_direction
from suite.core import ekfac
from suite.core.kfac import KFAC, Eigen


def bases(*present):
    """Orthonormal (2, n, n) for A (n = 4) and G (n = 3); None where a side keeps its diagonal."""
    return [
        np.stack([orthogonal(n, seed=s) for s in (1, 2)]) if here else None
        for n, here in zip((4, 3), present, strict=True)
    ]


@also_eager_jax
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("present", [(True, True), (False, True), (True, False), (False, False)])
def test_second_moments_are_the_diagonal_of_the_rows_fisher_in_the_basis(xp, present, bias):
    a, g = normal(2, 5, 4 - bias), normal(2, 5, 3)
    Q_A, Q_G = bases(*present)
    got = xp.run(
        lambda *args: ekfac.second_moment_in_basis(*args, bias=bias), *xp.convert((a, g, Q_A, Q_G))
    )
    for k in range(2):
        basis = np.kron(np.eye(3) if Q_G is None else Q_G[k], np.eye(4) if Q_A is None else Q_A[k])
        fisher = np.zeros((12, 12))
        for row_a, row_g in zip(a[k], g[k], strict=True):
            gradient = np.outer(row_g, [*row_a, 1.0] if bias else row_a).reshape(-1)
            fisher += np.outer(gradient, gradient)
        expected = np.diag(basis.T @ fisher @ basis).reshape(3, 4)
        assert_close(to_numpy(got)[k], expected)


@also_eager_jax
@pytest.mark.parametrize("present", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("sizes", [(3, 2), (0, 5), (0, 0), (7, 1)], ids=str)
def test_groups_of_rows_have_the_second_moments_of_each_group(xp, sizes, present, monkeypatch):
    """What lies behind the last group is no number."""
    Q_A, Q_G = bases(*present)
    ends = np.cumsum(sizes)
    a, g = normal(ends[-1] + 2, 4, seed=1), normal(ends[-1] + 2, 3, seed=2)
    parts = list(zip(np.split(a, ends)[:2], np.split(g, ends)[:2], strict=True))
    expected = [
        ekfac.second_moment_in_basis(
            *part, None if Q_A is None else Q_A[k], None if Q_G is None else Q_G[k]
        )
        for k, part in enumerate(parts)
    ]
    a[ends[-1] :] = g[ends[-1] :] = np.nan
    given = a, g, xp.asarray(ends, "int32"), Q_A, Q_G
    given = xp.convert(given)
    got = xp.run(ekfac.grouped_second_moment_in_basis, *given)
    assert_close(got, np.stack(expected))
    if xp.name == "torch":  # as elsewhere than on a CPU
        monkeypatch.setattr("suite.core._torch_known.is_at_hand", lambda x: False)
        assert_close(ekfac.grouped_second_moment_in_basis(*given), np.stack(expected))


def test_no_rows_give_zero(xp):
    Q_A, Q_G = xp.convert(bases(True, True))
    nothing = xp.asarray(np.zeros((2, 0, 3)))
    got = xp.run(
        lambda *args: ekfac.second_moment_in_basis(*args, bias=True), nothing, nothing, Q_A, Q_G
    )
    assert_identical(got, np.zeros((2, 3, 4)))


def test_half_precision_rows_are_summed_in_single_precision(xp):
    if xp.half is None:
        pytest.skip("the library has no half precision")
    # 4096 products of 16: bfloat16 stops counting at 256, float16 overflows beyond 65504.
    rows = xp.asarray(np.full((1, 4096, 1), 2.0), xp.half)
    got = xp.run(lambda a, g: ekfac.second_moment_in_basis(a, g, None, None), rows, rows)
    assert dtype_name(got) == "float32"
    assert_identical(got, np.full((1, 1, 1), 65536.0))


def test_a_restart_has_kfacs_own_eigenvalues_and_full_weight(xp):
    A, G = positive_definite(2, 4), positive_definite(2, 3)
    values, vectors = zip(*(np.linalg.eigh(x) for x in (A, G)), strict=True)
    eigen = [Eigen(Q, d) for Q, d in zip(vectors, values, strict=True)]
    average, weight = xp.run(ekfac.restart, *xp.convert(tuple(eigen)))
    for k in range(2):
        basis = np.kron(vectors[1][k], vectors[0][k])
        diagonal = np.diag(basis.T @ np.kron(G[k], A[k]) @ basis)
        assert_close(to_numpy(average)[k], diagonal.reshape(3, 4))
    assert_identical(weight, np.ones(2))


def test_update_averages_where_seen(xp):
    average, weight, new = np.abs(normal(2, 3, 4)), np.array([1.0, 0.5]), np.abs(normal(2, 3, 4, seed=1))
    seen = np.array([True, False])
    got = xp.run(ekfac.update, *xp.convert((average, weight, new, seen)), 0.75)
    assert_close(to_numpy(got[0])[0], 0.75 * average[0] + 0.25 * new[0])
    assert_close(to_numpy(got[1])[0], 0.75 * 1 + 0.25)
    assert_identical(to_numpy(got[0])[1], average[1])
    assert_identical(to_numpy(got[1])[1], weight[1])


def test_no_other_diagonal_in_the_basis_is_closer_to_the_rows_fisher():
    a, g = normal(1, 7, 4), normal(1, 7, 3)
    A, G = (np.einsum("bri,brj->bij", x, x) for x in (a, g))
    basis = np.kron(np.linalg.eigh(G[0])[1], np.linalg.eigh(A[0])[1])
    vectors = np.einsum("ri,rj->rij", g[0], a[0]).reshape(7, -1)
    fisher = vectors.T @ vectors
    S = ekfac.second_moment_in_basis(a, g, np.linalg.eigh(A)[1], np.linalg.eigh(G)[1]).reshape(-1)

    def distance(diagonal):
        return np.linalg.norm(basis @ np.diag(diagonal) @ basis.T - fisher)

    kfac = np.kron(np.linalg.eigvalsh(G[0]), np.linalg.eigvalsh(A[0])) / 7
    assert distance(S) < 0.99 * distance(kfac)
    for seed in range(5):
        assert distance(S) < distance(S + 0.01 * normal(12, seed=seed))


def test_the_direction_is_the_dense_solve_with_the_second_moments(xp):
    rule, gradient = KFAC("ekfac"), normal(2, 3, 4)
    A, G = positive_definite(2, 4), positive_definite(2, 3)
    products = np.abs(normal(2, 3, 4, seed=5))
    values, vectors = zip(*(np.linalg.eigh(x) for x in (A, G)), strict=True)
    eigen = tuple(Eigen(Q, d) for Q, d in zip(vectors, values, strict=True))

    def direction(eigen, ready, gradient, products):
        return rule.apply(*eigen, ready, gradient, 0.1, products)

    args = xp.convert((eigen, np.array([True, False]), gradient, products))
    got = to_numpy(xp.run(direction, *args))
    basis = np.kron(vectors[1][0], vectors[0][0])
    curvature = basis @ np.diag(products[0].reshape(-1)) @ basis.T + 0.1 * np.eye(12)
    assert_close(got[0].reshape(-1), np.linalg.solve(curvature, gradient[0].reshape(-1)))
    assert_identical(got[1], gradient[1])  # not ready
    own = values[1][..., :, None] * values[0][..., None, :]
    args = xp.convert((eigen, np.array([True, True]), gradient, own))
    got = to_numpy(xp.run(direction, *args))
    for k in range(2):
        assert_close(got[k], kfac_direction(A[k], G[k], 0.1, gradient[k]))
