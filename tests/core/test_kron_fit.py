"""The default step sizes fit a known covariance, and follow one that moves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conftest import orthogonal
from suite.core.kron import Kron
from suite.core.schedules import precond_lr_schedule

pytestmark = pytest.mark.slow

SHAPE = (64, 32)
VALUES = [np.logspace(1, -1, n) for n in SHAPE]  # condition 100 each


def matrix(basis, values):
    return (basis * values) @ basis.T


def error(P, covariances):
    """‖P (A ⊗ B) P - I‖ / √N, from ‖X ⊗ Y - I‖² = ‖X‖² ‖Y‖² - 2 tr X tr Y + N."""
    X, Y = (p @ c @ p for p, c in zip(P, covariances, strict=True))
    N = len(X) * len(Y)
    square = np.sum(X * X) * np.sum(Y * Y) - 2 * np.trace(X) * np.trace(Y) + N
    return math.sqrt(max(square, 0) / N)


def fit(rate, updates, turn=0.0, seed=0):
    """Errors after 300 and after all updates; A turns by `turn` in every plane of a random basis."""
    rng = np.random.default_rng(seed)
    bases, planes = [orthogonal(n, seed=seed) for n in SHAPE], orthogonal(64, seed=seed + 1)
    rule = Kron(preconditioner_init_scale=None)
    state = rule.init(np.zeros(1), SHAPE, (False, False))
    right, found = matrix(bases[1], VALUES[1] ** 0.5), {}
    for t in range(1, updates + 1):
        angle = turn * t
        block = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        basis = planes @ np.kron(np.eye(32), block) @ planes.T @ bases[0]
        if turn or t == 1:
            left = matrix(basis, VALUES[0] ** 0.5)
        g = left @ rng.normal(size=SHAPE) @ right
        state = rule.refresh(rule.update(state, g, rng.normal(size=SHAPE), rate(t - 1)))
        if t in (300, updates):
            covariances = (matrix(basis, VALUES[0]), matrix(bases[1], VALUES[1]))
            found[t] = error(state.preconditioners, covariances)
    return found


def test_the_error_of_the_fit_is_itself_right():
    """Against the Kronecker product in full."""
    P, C = [matrix(orthogonal(n), np.linspace(1, 2, n)) for n in (4, 3)], [np.eye(4), 2 * np.eye(3)]
    full = np.kron(*P) @ np.kron(*C) @ np.kron(*P) - np.eye(12)
    assert math.isclose(error(P, C), np.linalg.norm(full) / math.sqrt(12))


def test_the_default_fits_within_the_bounds():
    found = fit(precond_lr_schedule(), 3000)
    assert found[300] <= 0.15  # a constant 0.1 stays at 0.33
    assert found[3000] <= 0.07


def test_the_default_follows_a_covariance_that_turns():
    """By a quarter in every plane per 3,000 updates; without a floor the fit is lost."""
    turn = math.pi / 2 / 3000
    assert fit(precond_lr_schedule(), 2000, turn)[2000] < 0.5
    assert fit(precond_lr_schedule(min_lr=1e-6), 2000, turn)[2000] > 1.0
