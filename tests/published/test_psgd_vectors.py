"""LRA and dense PSGD follow the published updates for fifty steps (`oracles` transcribes them)."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from conftest import assert_close, normal
from oracles import DensePSGD, LowRankPSGD
from suite.core.dense import Dense, DenseGeometry
from suite.core.lra import LRA

STEPS, N = 50, 12


def hessian() -> np.ndarray:
    """Symmetric, indefinite, condition 1e4."""
    basis = np.linalg.qr(normal(N, N))[0]
    return (basis * np.logspace(2, -2, N) * np.where(np.arange(N) % 3, 1, -1)) @ basis.T


def evidence(newton: bool) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """(gradient or H v, noise, v): gradients of an ill-conditioned covariance that jump once."""
    H, history = hessian(), []
    for t in range(STEPS):
        v = normal(N, seed=100 + t)
        h = H @ v if newton else np.abs(H) @ normal(N, seed=900 + t) * (100 if t == 20 else 1)
        history.append((h, normal(N, seed=500 + t), v if newton else None))
    return history


def first_scale(h: np.ndarray, v: np.ndarray | None) -> float:
    return float(np.mean(h**4) ** -0.125 * (1 if v is None else np.mean(v**2) ** 0.25))


@pytest.mark.parametrize("newton", [False, True], ids=["whitening", "newton"])
@pytest.mark.parametrize("init_scale", [0.7, None])
@pytest.mark.parametrize("rank", [0, 1, 4])
def test_low_rank(rank, init_scale, newton):
    history = evidence(newton)
    damping = 1e-3 if init_scale else 0.0
    rule = LRA(rank, betaL=0.8, damping=damping, preconditioner_init_scale=init_scale)
    noise = [normal(N, rank, seed=1), normal(N, rank, seed=2)]
    state = rule.init(*noise)
    start = [x * np.sqrt(0.1) / np.linalg.norm(x) if rank else x for x in noise]
    scale = init_scale or first_scale(history[0][0], history[0][2])
    oracle = LowRankPSGD(*start, np.full(N, scale), betaL=0.8, damping=damping)
    for t, (h, eps, v) in enumerate(history):
        on_U = t % 3 == 0
        state = rule.update(state, h, eps, 0.5, np.asarray(on_U), v)
        oracle.update(h, eps, 0.5, on_U, v)
        assert_close(rule.precondition(state, h), oracle.P() @ h)
        for x, expected in zip(state[:3], (oracle.U, oracle.V, oracle.d), strict=True):
            assert_close(x, expected)
    assert_close(np.array(state.lipschitz), np.array(oracle.L))
    assert np.linalg.cond(oracle.P()) > 3  # it moved


@pytest.mark.parametrize("newton", [False, True], ids=["whitening", "newton"])
@pytest.mark.parametrize("init_scale", [0.7, None])
@pytest.mark.parametrize("geometry", get_args(DenseGeometry))
def test_dense(geometry, init_scale, newton):
    history = evidence(newton)
    damping = 1e-3 if init_scale else 0.0
    rule = Dense(geometry, betaL=0.8, damping=damping, preconditioner_init_scale=init_scale)
    state = rule.init(np.zeros(1), (N,))
    scale = init_scale or first_scale(history[0][0], history[0][2])
    start = (scale**2 if geometry == "QUAD4P" else scale) * np.eye(N)
    oracle = DensePSGD(geometry, start, betaL=0.8, damping=damping)
    for h, eps, v in history:
        state = rule.update(state, h, eps, 0.5, v)
        oracle.update(h, eps, 0.5, v)
        assert_close(rule.precondition(state, h), oracle.P() @ h)
    assert_close(state.Q, oracle.Q)
    assert_close(state.lipschitz, np.array(oracle.L))
    assert np.linalg.cond(oracle.P()) > 10


@pytest.mark.parametrize("geometry", get_args(DenseGeometry))
def test_dense_newton_becomes_the_inverse_of_the_absolute_hessian(geometry):
    values = np.logspace(0.5, -0.5, N) * np.where(np.arange(N) % 3, 1, -1)
    basis = np.linalg.qr(normal(N, N))[0]
    H, expected = (basis * values) @ basis.T, (basis / np.abs(values)) @ basis.T
    rule = Dense(geometry)
    state = rule.init(np.zeros(1), (N,))
    for t in range(4000):
        v = normal(N, seed=100 + t)
        state = rule.update(state, H @ v, normal(N, seed=t), 0.5 / (1 + t / 1000), v)
    P = state.Q if geometry == "QUAD4P" else state.Q.T @ state.Q
    assert np.linalg.norm(P - expected) < 0.2 * np.linalg.norm(expected)  # it starts at 0.8
