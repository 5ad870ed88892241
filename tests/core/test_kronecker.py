from __future__ import annotations

import itertools

import numpy as np
import pytest

from conftest import assert_close, assert_identical, normal, orthogonal, random
from oracles import block_diagonal, contraction, kronecker_product
from suite.core import kronecker

SHAPES = [(4,), (4, 3), (4, 3, 2)]
every_structure = pytest.mark.parametrize(
    ("shape", "diagonal"),
    [(shape, d) for shape in SHAPES for d in itertools.product((False, True), repeat=len(shape))],
)


def factors_for(shape, diagonal, seed=0):
    pairs = enumerate(zip(shape, diagonal, strict=True))
    return [normal(n, seed=seed + i) if d else normal(n, n, seed=seed + i) for i, (n, d) in pairs]


@every_structure
def test_apply_equals_the_dense_kronecker_product(xp, shape, diagonal):
    factors, x = factors_for(shape, diagonal), normal(*shape, seed=9)
    expected = (kronecker_product(factors) @ x.reshape(-1)).reshape(shape)
    got = xp.run(kronecker.apply, [xp.asarray(factor) for factor in factors], xp.asarray(x))
    assert_close(got, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_gram_is_the_contraction_with_itself_over_all_other_axes(xp, shape):
    x = normal(*shape)
    for axis in range(len(shape)):
        expected = contraction(x, x, axis)
        which = {"axis": axis, "ndim": len(shape)}
        full = xp.run(kronecker.gram, xp.asarray(x), **which, diagonal=False)
        diagonal = xp.run(kronecker.gram, xp.asarray(x), **which, diagonal=True)
        assert_close(full, expected)
        assert_close(diagonal, np.diag(expected))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_fold_undoes_unfold(shape, batch):
    x = normal(*batch, *shape)
    for axis in range(len(shape)):
        matrix = kronecker.unfold(x, axis, len(shape))
        assert matrix.shape[: len(batch) + 1] == (*batch, shape[axis])
        assert_identical(kronecker.fold(matrix, axis, x.shape, len(shape)), x)
        groups = kronecker.unfold(x, axis, len(shape), blocks=shape[axis])
        assert groups.shape[: len(batch) + 2] == (*batch, shape[axis], 1)
        assert_identical(kronecker.fold(groups, axis, x.shape, len(shape)), x)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_unfold_has_one_row_for_each_index_of_its_axis(xp, axis):
    x = normal(3, 2, 4)
    rows = xp.numpy(kronecker.unfold(xp.asarray(x), axis, 3))
    for i in range(x.shape[axis]):
        assert_identical(rows[i], np.take(x, i, axis).reshape(-1))


def test_leading_axes_are_a_batch(xp):
    x, dense, diagonal = normal(2, 3, 4, 3), normal(2, 3, 4, 4), normal(2, 3, 3)
    got = xp.numpy(xp.run(kronecker.apply, [xp.asarray(dense), xp.asarray(diagonal)], xp.asarray(x)))
    for i, j in itertools.product(range(2), range(3)):
        assert_close(got[i, j], dense[i, j] @ x[i, j] * diagonal[i, j])


def test_diagonal_factor_equals_the_dense_one_that_happens_to_be_diagonal(xp):
    x = random(xp, 4, 3, 2)
    for axis, n in enumerate((4, 3, 2)):
        d = normal(n)
        as_vector = kronecker.apply_factor(xp.asarray(d), x, axis, 3)
        assert_close(as_vector, kronecker.apply_factor(xp.asarray(np.diag(d)), x, axis, 3))


@pytest.mark.parametrize("batch", [(), (5,)])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2)])
def test_a_factor_may_change_the_length_of_its_axis(xp, shape, batch):
    x = normal(*batch, *shape)
    for axis, n in enumerate(shape):
        F, ndim = normal(*batch, 5, n), len(shape)
        got = xp.run(kronecker.apply_factor, xp.asarray(F), xp.asarray(x), axis=axis, ndim=ndim)
        pairs = zip(F, x, strict=True) if batch else [(F, x)]
        expected = [np.moveaxis(np.tensordot(f, own, (1, axis)), 0, axis) for f, own in pairs]
        assert_close(got, np.stack(expected) if batch else expected[0])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(4, 6, 2), (6, 4, 6)])
def test_block_diagonal_factor_equals_the_dense_one_with_zeros(xp, axis, shape):
    x, n = random(xp, 5, *shape), shape[axis] // 2
    blocks = normal(5, 2, n, n)
    full = np.stack([block_diagonal(own) for own in blocks])
    in_blocks = xp.run(kronecker.apply_factor, xp.asarray(blocks), x, axis=axis, ndim=3)
    assert_close(in_blocks, kronecker.apply_factor(xp.asarray(full), x, axis, 3))


@pytest.mark.parametrize("shape", [(6, 4), (4,), (2, 4, 6)])
def test_gram_in_blocks_is_the_diagonal_of_the_whole(xp, shape):
    x = normal(3, *shape)
    for axis, side in enumerate(shape):
        n, whole = side // 2, [contraction(own, own, axis) for own in x]
        which = {"axis": axis, "ndim": len(shape), "diagonal": False, "blocks": 2}
        found = xp.numpy(xp.run(kronecker.gram, xp.asarray(x), **which))
        for k, full in enumerate(whole):
            assert_close(found[k], np.stack([full[:n, :n], full[n:, n:]]))


def test_factors_of_different_axes_commute(xp):
    x, F, H = random(xp, 4, 3, 2), random(xp, 4, 4), random(xp, 2, 2)
    one = kronecker.apply_factor(H, kronecker.apply_factor(F, x, 0, 3), 2, 3)
    other = kronecker.apply_factor(F, kronecker.apply_factor(H, x, 2, 3), 0, 3)
    assert_close(one, other)


def test_orthogonal_factors_keep_the_norm(xp):
    x = random(xp, 4, 3)
    y = xp.run(kronecker.apply, [xp.asarray(orthogonal(4)), xp.asarray(orthogonal(3))], x)
    assert_close(np.linalg.norm(xp.numpy(y)), np.linalg.norm(xp.numpy(x)))


def test_a_diagonal_is_told_by_its_axes():
    x = np.zeros((5, 4, 3))
    assert kronecker.is_diagonal(np.zeros((5, 4)), x, 2)
    assert not kronecker.is_diagonal(np.zeros((5, 4, 4)), x, 2)
    assert not kronecker.is_diagonal(np.zeros((5, 2, 2, 2)), x, 2)
    assert kronecker.diagonal_blocks(np.zeros((5, 2, 2, 2)), x, 2) == 2
    assert kronecker.diagonal_blocks(np.zeros((5, 4, 4)), x, 2) is None
    assert kronecker.diagonal_blocks(np.zeros((5, 4)), x, 2) is None
