from __future__ import annotations

import functools

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
from oracles import kfac_direction, kfac_direction_factored
from suite.core.kfac import KFAC, Eigen, all_usable, probes_for, rows_fit, usable

METHODS = ("eigen", "inverse", "newton_schulz", "ekfac")
ORACLES = {
    "eigen": kfac_direction,
    "inverse": kfac_direction_factored,
    "newton_schulz": kfac_direction_factored,
    "ekfac": kfac_direction,  # until it is given second moments (test_ekfac.py)
}
DIAGONALS = [(False, False), (True, False), (False, True), (True, True)]

every_method = pytest.mark.parametrize("method", METHODS)


@functools.cache
def direction_of(rule):
    """A function of (A, G, gradient, damping): the direction once A and G are all there is to know."""

    def direction(A, G, gradient, damping):
        batch = tuple(gradient.shape[:-2])
        diagonal = (A.ndim == len(batch) + 1, G.ndim == len(batch) + 1)
        state = rule.init(A, batch, (A.shape[-1], G.shape[-1]), diagonal)
        state = rule.update(state, A, G, ~state.ready, 0.0)
        return rule.precondition(rule.refresh(state, damping), gradient, damping)

    return direction


def direction(xp, method, A, G, gradient, damping, dtype=None):
    args = (xp.asarray(x, dtype) for x in (A, G, gradient))
    return to_numpy(xp.run(direction_of(KFAC(method)), *args, damping))


def factors(diagonal=(False, False)):
    A, G = positive_definite(2, 4), positive_definite(2, 3)
    return (
        np.stack([np.diag(a) for a in A]) if diagonal[0] else A,
        np.stack([np.diag(g) for g in G]) if diagonal[1] else G,
    )


def absorb(xp, rule, state, A, G, decay=0.5):
    seen = xp.asarray(np.ones(A.shape[0], dtype=bool))
    return xp.run(rule.update, state, xp.asarray(A), xp.asarray(G), seen, decay)


def fresh(xp, rule, batch=(2,), diagonal=(False, False), dtype="float64"):
    like = xp.asarray(np.zeros(1), dtype)
    return xp.run(rule.init, like, batch=batch, sizes=(4, 3), diagonal=diagonal)


# The direction


@every_method
@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_direction_equals_the_dense_solve(xp, method, diagonal):
    (A, G), gradient = factors(diagonal), normal(2, 3, 4)
    got = direction(xp, method, A, G, gradient, 0.1)
    for k in range(2):
        assert_close(got[k], ORACLES[method](A[k], G[k], 0.1, gradient[k]))


@every_method
@pytest.mark.parametrize("diagonal", [(False, False), (True, True)], ids=["dense", "diagonal"])
def test_layers_need_not_be_stacked(xp, method, diagonal):
    (A, G), gradient = factors(diagonal), normal(3, 4)
    expected = ORACLES[method](A[0], G[0], 0.1, gradient)
    assert_close(direction(xp, method, A[0], G[0], gradient, 0.1), expected)


@every_method
def test_diagonal_factor_equals_the_dense_one_that_happens_to_be_diagonal(xp, method):
    (A, G), gradient = factors((True, True)), normal(2, 3, 4)
    full_A, full_G = A[:, :, None] * np.eye(4), G[:, :, None] * np.eye(3)
    expected = direction(xp, method, full_A, full_G, gradient, 0.1)
    for a, g in ((A, G), (A, full_G), (full_A, G)):
        assert_close(direction(xp, method, a, g, gradient, 0.1), expected)


@every_method
def test_identity_factors_without_damping_give_the_gradient_to_the_last_bit(xp, method):
    gradient = normal(2, 3, 4)
    A, G = np.stack([np.eye(4)] * 2), np.stack([np.eye(3)] * 2)
    assert_identical(direction(xp, method, A, G, gradient, 0.0), gradient)


@every_method
def test_large_damping_gives_the_gradient_divided_by_it(xp, method):
    (A, G), gradient, damping = factors(), normal(2, 3, 4), 1e16
    got = direction(xp, method, A, G, gradient, damping) * damping
    # A ⊗ G is of order 10 beside λ, and A of order 10 beside √λ.
    assert_close(got, gradient, rtol=1e-14 if method == "eigen" else 1e-6)


@every_method
def test_more_damping_gives_a_shorter_direction_closer_to_the_gradients(xp, method):
    (A, G), gradient = factors(), normal(2, 3, 4)
    lengths, cosines = [], []
    for damping in (1e-6, 1e-2, 1e2, 1e6):
        d = direction(xp, method, A, G, gradient, damping)
        lengths.append(np.linalg.norm(d))
        cosines.append(np.sum(d * gradient) / np.linalg.norm(d) / np.linalg.norm(gradient))
    assert lengths == sorted(lengths, reverse=True)
    assert cosines == sorted(cosines)
    assert cosines[0] < 0.9
    assert cosines[-1] > 0.999


@every_method
def test_direction_is_a_descent_direction(xp, method):
    (A, G), gradient = factors(), normal(2, 3, 4)
    got = direction(xp, method, A, G, gradient, 1e-3)
    assert np.all(np.sum(got * gradient, axis=(-2, -1)) > 0)


@every_method
def test_rotating_inputs_and_outputs_rotates_the_direction(xp, method):
    (A, G), gradient, U, V = factors(), normal(2, 3, 4), orthogonal(4), orthogonal(3)
    got = direction(xp, method, U @ A @ U.T, V @ G @ V.T, V @ gradient @ U.T, 0.1)
    assert_close(got, V @ direction(xp, method, A, G, gradient, 0.1) @ U.T)


@every_method
def test_affine_change_of_inputs_and_outputs_does_not_change_the_step(xp, method):
    """a → M a, s → S⁻¹ s describe one function by the weights S⁻¹ W M⁻¹; without damping, one step."""
    (A, G), gradient = factors(), normal(2, 3, 4)
    M, S = normal(4, 4) + 2 * np.eye(4), normal(3, 3) + 2 * np.eye(3)
    got = direction(xp, method, M @ A @ M.T, S.T @ G @ S, S.T @ gradient @ M.T, 0.0)
    step = direction(xp, method, A, G, gradient, 0.0)
    assert_close(S @ got @ M, step, rtol=1e-7)


def test_scale_may_move_between_factors(xp):
    (A, G), gradient = factors(), normal(2, 3, 4)
    for method in METHODS:
        expected = direction(xp, method, A, G, gradient, 0.1)
        assert_close(direction(xp, method, 1e5 * A, G / 1e5, gradient, 0.1), expected)


# State


@every_method
def test_before_any_evidence_the_direction_is_the_gradient(xp, method):
    rule, gradient = KFAC(method), xp.asarray(normal(2, 3, 4))
    state = fresh(xp, rule)
    assert_identical(xp.run(rule.precondition, state, gradient, 0.1), gradient)
    # Nothing to invert is no failure, not even where it is singular.
    assert_identical(xp.run(rule.refresh, state, 0.0), state)
    absorbed = absorb(xp, rule, state, *factors())
    assert_identical(xp.run(rule.precondition, absorbed, gradient, 0.1), gradient)


@every_method
def test_layer_that_saw_nothing_keeps_its_state(xp, method):
    rule = KFAC(method)
    state = absorb(xp, rule, fresh(xp, rule), *factors())
    A, G = (xp.asarray(7 * x) for x in factors())
    seen = xp.asarray(np.array([True, False]))
    updated = xp.run(rule.update, state, A, G, seen, 0.5)
    for new, old in zip(leaves(updated), leaves(state), strict=True):
        assert_identical(to_numpy(new)[1], to_numpy(old)[1])
    assert_close(to_numpy(updated.A.average)[0], (0.25 + 3.5) * factors()[0][0])
    assert_close(updated.A.weight, np.array([0.75, 0.5]))


def test_eigenbasis_is_damped_anew_without_a_refresh(xp):
    rule, (A, G), gradient = KFAC("eigen"), factors(), normal(2, 3, 4)
    state = xp.run(rule.refresh, absorb(xp, rule, fresh(xp, rule), A, G), 123.0)
    for damping in (1e-3, 1.0):
        got = to_numpy(xp.run(rule.precondition, state, xp.asarray(gradient), damping))
        for k in range(2):
            assert_close(got[k], kfac_direction(A[k], G[k], damping, gradient[k]))


def test_eigenbasis_is_orthonormal_with_eigenvalues_that_are_not_negative(xp):
    rule = KFAC("eigen")
    state = xp.run(rule.refresh, absorb(xp, rule, fresh(xp, rule), *factors()), 0.1)
    for eigen in (state.A.inverse, state.G.inverse):
        vectors, values = to_numpy(eigen.vectors), to_numpy(eigen.values)
        identity = np.broadcast_to(np.eye(values.shape[-1]), vectors.shape)
        assert_close(np.swapaxes(vectors, -1, -2) @ vectors, identity)
        assert values.min() >= 0


def test_inverses_are_symmetric_positive_definite(xp):
    rule = KFAC("inverse")
    state = xp.run(rule.refresh, absorb(xp, rule, fresh(xp, rule), *factors()), 0.1)
    for inverse in map(to_numpy, (state.A.inverse, state.G.inverse)):
        assert_identical(inverse, np.swapaxes(inverse, -1, -2))
        assert np.linalg.eigvalsh(inverse).min() > 0


# Factors by themselves


@pytest.mark.parametrize("diagonal", [False, True], ids=["dense", "diagonal"])
@every_method
def test_an_identity_start_averages_from_the_identity_without_bias_correction(xp, method, diagonal):
    rule, like = KFAC(method), xp.asarray(np.zeros(1))
    factor = rule.init_factor(like, (2,), 4, diagonal, identity_start=True)
    x = factors((diagonal, False))[0]
    seen, eye = xp.asarray(np.array([True, True])), np.ones(4) if diagonal else np.eye(4)
    for steps in (1, 2):
        factor = xp.run(rule.update_factor, factor, xp.asarray(x), seen, 0.75)
        assert_close(factor.average, 0.75**steps * eye + (1 - 0.75**steps) * x)
        assert_identical(factor.weight, np.ones(2))
    assert_identical(factor.ready, np.array([False, False]))


@pytest.mark.parametrize("sides", [(4, 1), (1, 3), (1, 1)])
@pytest.mark.parametrize("diagonal", [(False, False), (True, True)], ids=["dense", "diagonal"])
@every_method
def test_where_a_side_is_a_number_damping_is_exact(xp, method, diagonal, sides):
    A, G = (positive_definite(2, n) for n in sides)
    if diagonal[0]:
        A, G = (np.stack([np.diag(x) for x in stack]) for stack in (A, G))
    gradient = normal(2, *sides[::-1])
    got = direction(xp, method, A, G, gradient, 0.1)
    for k in range(2):
        assert_close(got[k], kfac_direction(A[k], G[k], 0.1, gradient[k]))


def test_warm_refreshes_of_one_average_converge_to_its_eigenbasis(xp):
    rule, seen = KFAC("eigen"), xp.asarray(np.array([True, True]))
    eigenvalues, Q = np.array([8.0, 4.0, 2.0, 1.0]), np.stack([orthogonal(4, s) for s in (1, 2)])
    average = (Q * eigenvalues) @ np.swapaxes(Q, -1, -2)
    nearby = average + 0.05 * positive_definite(2, 4)
    factor = rule.init_factor(xp.asarray(average), (2,), 4)
    factor = xp.run(rule.update_factor, factor, xp.asarray(nearby), seen, 0.0)
    factor = xp.run(rule.refresh_factor, factor, 0.0)
    factor = xp.run(rule.update_factor, factor, xp.asarray(average), seen, 0.0)

    def off_diagonal(factor):
        V = to_numpy(factor.inverse.vectors)
        assert_close(np.swapaxes(V, -1, -2) @ V, np.broadcast_to(np.eye(4), V.shape))
        M = np.swapaxes(V, -1, -2) @ average @ V
        assert_close(to_numpy(factor.inverse.values), np.diagonal(M, axis1=-2, axis2=-1))
        return np.abs(M * (1 - np.eye(4))).max()

    factor = xp.run(rule.refresh_factor, factor, 0.0, warm=True)
    once = off_diagonal(factor)
    assert once > 1e-6  # one step is not all
    for _ in range(40):
        factor = xp.run(rule.refresh_factor, factor, 0.0, warm=True)
    assert off_diagonal(factor) < 1e-9
    assert_close(np.sort(to_numpy(factor.inverse.values)), np.stack([eigenvalues[::-1]] * 2))
    assert_identical(factor.failures, np.zeros(2))


@pytest.mark.parametrize("method", ["eigen", "inverse", "newton_schulz"])
def test_a_boost_adds_damping_in_units_of_the_mean_eigenvalue(xp, method):
    rule, (A, _) = KFAC(method), factors()
    factor = rule.init_factor(xp.asarray(A), (2,), 4)
    factor = xp.run(rule.update_factor, factor, xp.asarray(A), xp.asarray(np.array([True, True])), 0.5)
    damping = xp.asarray(np.array([0.1, 0.3]))
    inverse = xp.run(rule.refresh_factor, factor, damping, boost=0.5).inverse
    for k in range(2):
        boosted = A[k] + 0.5 * np.trace(A[k]) / 4 * np.eye(4)
        if method == "eigen":  # whose damping comes later
            V, d = to_numpy(inverse.vectors)[k], to_numpy(inverse.values)[k]
            assert_close((V * d) @ V.T, boosted)
        else:
            expected = np.linalg.inv(boosted + [0.1, 0.3][k] * np.eye(4))
            assert_close(to_numpy(inverse)[k], expected)


def test_a_singular_factor_that_fails_is_saved_by_a_boost(xp):
    rule, x = KFAC("inverse"), np.stack([positive_definite(4), np.diag([1.0, 1.0, 0.0, 0.0])])
    factor = rule.init_factor(xp.asarray(x), (2,), 4)
    factor = xp.run(rule.update_factor, factor, xp.asarray(x), xp.asarray(np.array([True, True])), 0.0)
    failed = xp.run(rule.refresh_factor, factor, 0.0)
    assert_identical(failed.ready, np.array([True, False]))
    saved = xp.run(rule.refresh_factor, factor, 0.0, boost=0.1)
    assert_identical(saved.ready, np.array([True, True]))
    assert_close(to_numpy(saved.inverse)[1], np.diag([1 / 1.05, 1 / 1.05, 20, 20]))


@pytest.mark.parametrize("diagonal", DIAGONALS)
@pytest.mark.parametrize("method", ["eigen", "ekfac"])
def test_products_take_the_place_of_the_eigenvalues(xp, method, diagonal):
    rule, gradient, products = KFAC(method), normal(2, 3, 4), np.abs(normal(2, 3, 4, seed=9))
    A, G = factors(diagonal)
    state = xp.run(rule.refresh, absorb(xp, rule, fresh(xp, rule, diagonal=diagonal), A, G), 0.1)

    def apply(state, gradient, products):
        return rule.apply(state.A.inverse, state.G.inverse, state.ready, gradient, 0.1, products)

    got = to_numpy(xp.run(apply, state, xp.asarray(gradient), xp.asarray(products)))
    for k in range(2):
        V_A, V_G = (
            np.eye(n) if d else to_numpy(side.inverse.vectors)[k]
            for n, d, side in zip((4, 3), diagonal, (state.A, state.G), strict=True)
        )
        basis = np.kron(V_G, V_A)
        curvature = basis @ np.diag(products[k].reshape(-1)) @ basis.T
        expected = np.linalg.solve(curvature + 0.1 * np.eye(12), gradient[k].reshape(-1))
        assert_close(got[k].reshape(-1), expected)


# Faults


@every_method
@pytest.mark.parametrize("factor", ["A", "G"])
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
def test_factor_that_is_not_finite_keeps_the_old_inverse_and_is_counted(xp, method, factor, value):
    rule, (A, G) = KFAC(method), factors()
    old = xp.run(rule.refresh, absorb(xp, rule, fresh(xp, rule), A, G), 0.1)
    clean = xp.run(rule.refresh, absorb(xp, rule, old, 3 * A, 5 * G), 0.1)
    bad = {"A": 3 * A, "G": 5 * G}
    bad[factor][1, 0, 0] = value
    new = xp.run(rule.refresh, absorb(xp, rule, old, **bad), 0.1)
    assert_identical(new.failures, np.array([0, 1]))
    assert_identical(new.ready, np.array([True, True]))
    sides = (new.A.inverse, new.G.inverse)
    kept, was = getattr(new, factor).inverse, getattr(old, factor).inverse
    for x, y in zip(leaves(kept), leaves(was), strict=True):
        assert_identical(to_numpy(x)[1], to_numpy(y)[1])
    for x, y in zip(leaves(sides), leaves((clean.A.inverse, clean.G.inverse)), strict=True):
        assert_close(to_numpy(x)[0], to_numpy(y)[0])
    again = xp.run(rule.refresh, new, 0.1)
    assert_identical(again.failures, np.array([0, 2]))


@pytest.mark.parametrize("diagonal", [(False, False), (True, True)], ids=["dense", "diagonal"])
def test_singular_factor_without_damping_fails_and_leaves_the_gradient(xp, diagonal):
    rule, (A, G), gradient = KFAC("inverse"), factors(diagonal), normal(2, 3, 4)
    G[1] = 0
    state = absorb(xp, rule, fresh(xp, rule, diagonal=diagonal), A, G)
    state = xp.run(rule.refresh, state, 0.0)
    assert_identical(state.failures, np.array([0, 1]))
    assert_identical(state.ready, np.array([True, False]))
    got = to_numpy(xp.run(rule.precondition, state, xp.asarray(gradient), 0.0))
    assert_identical(got[1], gradient[1])
    assert np.abs(got[0] - gradient[0]).max() > 0.01


@every_method
def test_zero_evidence_gives_the_gradient_divided_by_the_damping(xp, method):
    A, G, gradient = np.zeros((2, 4, 4)), np.zeros((2, 3, 3)), normal(2, 3, 4)
    assert_close(direction(xp, method, A, G, gradient, 0.25), 4 * gradient)


def test_zero_evidence_without_damping_gives_null_directions_a_zero_step(xp):
    A, G, gradient = np.zeros((2, 4, 4)), np.zeros((2, 3, 3)), normal(2, 3, 4)
    assert_identical(direction(xp, "eigen", A, G, gradient, 0.0), 0 * gradient)


v = normal(4)
U = orthogonal(4)
DIFFICULT = {
    "rank one": np.outer(v, v),
    "repeated eigenvalues": (U * np.array([2.0, 2.0, 1.0, 1.0])) @ U.T,
    "null space": (U * np.array([2.0, 2.0, 0.0, 0.0])) @ U.T,
    "identity": np.eye(4),
    "1e30": 1e30 * positive_definite(4),
    "1e-30": 1e-30 * positive_definite(4),
}


@every_method
@pytest.mark.parametrize("A", list(DIFFICULT.values()), ids=list(DIFFICULT))
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of a guess that is then not used
def test_single_precision_handles_difficult_factors(xp, method, A):
    A, G, gradient = np.stack([A, 0.5 * A]), positive_definite(2, 3), normal(2, 3, 4)
    got = direction(xp, method, A, G, gradient, 0.03, dtype="float32")
    for k in range(2):
        assert_close(got[k], ORACLES[method](A[k], G[k], 0.03, gradient[k]), rtol=1e-3)


@every_method
@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # as above
def test_opposite_extremes_of_single_precision_cancel(xp, method, scale):
    (A, G), gradient = factors(), normal(2, 3, 4)
    got = direction(xp, method, scale * A, G / scale, gradient, 0.1, dtype="float32")
    assert_close(got, direction(xp, method, A, G, gradient, 0.1), rtol=1e-3)


@every_method
@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_equal_extremes_of_single_precision_stay_finite(xp, method, scale):
    (A, G), gradient = factors(), normal(2, 3, 4)
    got = direction(xp, method, scale * A, scale * G, gradient, 0.1, dtype="float32")
    assert np.all(np.isfinite(got))
    # The curvature is 1e60 beside which the gradient is nothing, or 1e-60 beside the damping.
    assert_close(got, np.zeros_like(got) if scale > 1 else gradient / 0.1, rtol=1e-5)


# Numbers and names


@every_method
def test_damping_and_decay_may_be_arrays_of_another_precision(xp, method):
    rule, (A, G), gradient = KFAC(method), factors(), xp.asarray(normal(2, 3, 4))
    half = xp.asarray(0.5, "float32")

    def after(decay, damping):
        state = absorb(xp, rule, absorb(xp, rule, fresh(xp, rule), A, G, decay), 2 * A, G, decay)
        state = xp.run(rule.refresh, state, damping)
        return state, xp.run(rule.precondition, state, gradient, damping)

    (state, d), (_, expected) = after(half, half), after(0.5, 0.5)
    assert dtype_name(state.A.average) == dtype_name(state.A.weight) == dtype_name(d) == "float64"
    assert_close(d, expected)


@every_method
def test_inverses_may_be_kept_in_half_precision(xp, method):
    if xp.half is None:
        pytest.skip("the library has no half precision")
    rule, (A, G), gradient = KFAC(method), factors(), normal(2, 3, 4)
    state = xp.run(
        lambda like, half: rule.init(like, (2,), (4, 3), inverse_like=half),
        xp.asarray(np.zeros(1), "float32"),
        xp.asarray(np.zeros(1), xp.half),
    )
    state = xp.run(rule.refresh, absorb(xp, rule, state, A, G), 0.1)
    assert {dtype_name(x) for x in leaves((state.A.inverse, state.G.inverse))} == {xp.half}
    assert dtype_name(state.A.average) == dtype_name(state.G.average) == "float32"
    got = xp.run(rule.precondition, state, xp.asarray(gradient, "float32"), 0.1)
    assert dtype_name(got) == "float32"
    assert_close(got, direction(xp, method, A, G, gradient, 0.1), rtol=0.05)


def test_unknown_compute_method_is_named():
    with pytest.raises(
        ValueError,
        match=r"^compute_method must be one of 'eigen', 'inverse', 'newton_schulz', 'ekfac', got 'eig'$",
    ):
        KFAC("eig")


def test_rule_compares_by_value():
    assert KFAC("eigen") == KFAC() != KFAC("inverse")
    assert hash(KFAC("eigen")) == hash(KFAC())


@pytest.mark.parametrize("bias", [True, False])
def test_directions_from_rows_in_eigenbases_are_those_of_the_gradient_they_make(xp, bias):
    A, G, own = positive_definite(2, 5), positive_definite(2, 3), np.abs(normal(2, 3, 5)) + 0.1
    a, g = normal(2, 7, 5 - bias), normal(2, 7, 3, seed=1)
    whole = np.concatenate([a, np.ones((2, 7, 1))], 2) if bias else a
    gradient = np.swapaxes(g, 1, 2) @ whole
    (d_A, Q_A), (d_G, Q_G) = np.linalg.eigh(A), np.linalg.eigh(G)
    bases = tuple(Eigen(*map(xp.asarray, pair)) for pair in ((Q_A, d_A), (Q_G, d_G)))

    def from_rows(A, G, a, g, products):
        return KFAC("ekfac").apply_to_rows(A, G, a, g, bias=bias, damping=0.1, products=products)

    for products in (None, own):
        values = d_G[:, :, None] * d_A[:, None, :] if products is None else products
        rotated = np.swapaxes(Q_G, 1, 2) @ gradient @ Q_A / (values + 0.1)
        expected = Q_G @ rotated @ np.swapaxes(Q_A, 1, 2)
        given = *bases, xp.asarray(a), xp.asarray(g), None if products is None else xp.asarray(products)
        weight, column = xp.run(from_rows, *given)
        assert_close(weight, expected[..., : 5 - bias], rtol=1e-12)
        if bias:
            assert_close(column, expected[..., -1], rtol=1e-12)
        else:
            assert column is None


@pytest.mark.parametrize("bias", [True, False])
def test_directions_from_rows_are_those_of_the_gradient_they_make(xp, bias):
    A, G = positive_definite(2, 5), positive_definite(2, 3)
    a, g = normal(2, 7, 5 - bias), normal(2, 7, 3, seed=1)
    whole = np.concatenate([a, np.ones((2, 7, 1))], 2) if bias else a
    expected = G @ (np.swapaxes(g, 1, 2) @ whole) @ A
    rule = KFAC("inverse")
    weight, own = xp.run(rule.apply_to_rows, *map(xp.asarray, (A, G, a, g)), bias=bias)
    assert_close(weight, expected[..., : 5 - bias], rtol=1e-12)
    if bias:
        assert_close(own, expected[..., -1], rtol=1e-12)
    else:
        assert own is None


@pytest.mark.parametrize("bias", [False, True])
def test_no_rows_fit_a_gradient_of_zeros_alone(xp, bias):
    A, G = positive_definite(1, 5), positive_definite(1, 3)
    a, g = normal(1, 0, 5), normal(1, 0, 3)
    fits = functools.partial(_fits, xp, a, g, probes_for(xp.asarray(A), xp.asarray(G)), bias)
    assert fits(np.zeros((1, 3, 5))).all()
    assert not fits(normal(1, 3, 5)).any()
    rows = a[..., : 5 - bias], g
    parts = xp.run(KFAC("inverse").apply_to_rows, *map(xp.asarray, (A, G, *rows)), bias=bias)
    assert not to_numpy(parts[0]).any()
    assert to_numpy(parts[0]).shape == (1, 3, 5 - bias)
    assert not bias or not to_numpy(parts[1]).any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_rows_do_not_fit_a_gradient_whose_direction_is_off_by_a_matrix_of_rank_one(xp, seed, bias):
    A, G = positive_definite(1, 40), positive_definite(1, 30)
    a, g = normal(1, 20, 40), normal(1, 20, 30, seed=1)
    if bias:
        a[..., -1] = 1.0
    gradient = np.swapaxes(g, 1, 2) @ a
    off = np.linalg.norm(G @ gradient @ A) * 1e-5 * np.outer(normal(30, seed=seed), np.eye(40)[seed])
    off = np.linalg.solve(G, off / 30**0.5) @ np.linalg.inv(A)  # the gradient's, for that direction's
    fits = functools.partial(_fits, xp, a, g, probes_for(xp.asarray(A), xp.asarray(G)), bias)
    assert fits(gradient).all()
    assert not fits(gradient + off).any()


def _fits(xp, a, g, probes, bias, gradient):
    weight, own = (gradient[..., :-1], gradient[..., -1]) if bias else (gradient, None)
    parts = xp.asarray(weight), None if own is None else xp.asarray(own)
    rows = xp.asarray(a[..., :-1] if bias else a), xp.asarray(g)
    return to_numpy(rows_fit(parts, *rows, probes))


@pytest.mark.parametrize("damping", [1e-6, 1e-2, 10.0])
@pytest.mark.parametrize("seed", range(10))
def test_rows_do_not_fit_a_gradient_whose_direction_in_eigenbases_is_off(xp, seed, damping):
    """By a thousandth, in one product of eigenvectors, be it of large or of small eigenvalues."""
    A, G = (positive_definite(1, n)[0] @ np.diag(np.geomspace(1, 1e-3, n)) for n in (40, 30))
    (d_A, Q_A), (d_G, Q_G) = (np.linalg.eigh(x @ x.T) for x in (A, G))
    a, g = normal(1, 20, 40), normal(1, 20, 30, seed=1)
    gradient = np.swapaxes(g, 1, 2) @ a
    values = d_G[:, None] * d_A + damping
    direction = Q_G.T @ gradient[0] @ Q_A / values
    i, j = np.random.default_rng(seed).integers((30, 40))
    off = 1e-3 * np.linalg.norm(direction) * values[i, j] * np.outer(Q_G[:, i], Q_A[:, j])
    bases = (Eigen(xp.asarray(Q[None]), xp.asarray(d[None])) for d, Q in ((d_A, Q_A), (d_G, Q_G)))
    fits = functools.partial(_fits, xp, a, g, probes_for(*bases, damping), False)
    assert fits(gradient).all()
    assert not fits(gradient + off).any()


def test_inverses_that_overflow_are_not_usable(xp):
    inverses = np.stack([np.eye(3)] * 5)
    inverses[1, 2, 2] = np.inf
    inverses[2] = np.nan
    inverses[3, 1, 1] = -np.inf
    expected = np.array([True, False, False, False, True])
    assert_identical(xp.run(lambda x: usable(x, 1), xp.asarray(inverses)), expected)
    together = xp.run(lambda x: all_usable([x, x[:2, ...], x[:, 2, :]]), xp.asarray(inverses))
    diagonals = np.array([True, False, False, True, True])
    assert_identical(together, np.concatenate([expected, expected[:2], diagonals]))
