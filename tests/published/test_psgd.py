"""The core's Kron follows the published PSGD updates step by step (`oracles.PSGD` transcribes them)."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from conftest import assert_close, normal
from oracles import PSGD, kronecker_product, norm_bound
from suite.core import linalg
from suite.core.kron import Geometry, Kron

GEOMETRIES = get_args(Geometry)
STEPS = 50


def gradients(shape: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """Correlated and ill-scaled along every axis, of a size that drifts twentyfold and jumps once."""
    mixers = [np.logspace(0, -2, n) * normal(n, n, seed=seed + i).T for i, n in enumerate(shape)]
    result = []
    for t in range(STEPS):
        g = normal(*shape, seed=1000 + t)
        for axis, mixer in enumerate(mixers):
            g = np.moveaxis(np.tensordot(mixer, g, axes=(1, axis)), 0, axis)
        result.append(g * np.exp(-3 * t / STEPS) * (100 if t == 20 else 1))
    return result


def multiples_of_identity(shape, diagonal, scale):
    """Factors whose Kronecker product is `scale` I."""
    each = scale ** (1 / len(shape))
    return [np.full(n, each) if d else each * np.eye(n) for n, d in zip(shape, diagonal, strict=True)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    ("shape", "diagonal"),
    [
        ((5,), (False,)),
        ((5,), (True,)),
        ((4, 3), (False, False)),
        ((4, 3), (True, False)),
        ((4, 3), (False, True)),
        ((4, 3), (True, True)),
        ((3, 4, 2), (False, False, False)),
        ((3, 4, 2), (False, True, False)),
        ((3, 4, 2), (True, False, True)),
    ],
)
def test_fifty_steps_equal_the_published_update(geometry, shape, diagonal):
    follows_the_oracle(geometry, shape, diagonal, (1,) * len(shape))


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    ("shape", "diagonal", "blocks"),
    [
        ((6,), (False,), (2,)),
        ((6, 4), (False, False), (2, 1)),
        ((6, 4), (False, False), (3, 2)),
        ((3, 6), (True, False), (1, 3)),
        ((2, 4, 6), (False, False, False), (1, 2, 2)),
        ((4, 3, 4), (False, True, False), (2, 1, 4)),
    ],
)
def test_block_diagonal_factors_take_the_published_step_on_their_blocks(
    geometry, shape, diagonal, blocks
):
    follows_the_oracle(geometry, shape, diagonal, blocks)


def follows_the_oracle(geometry, shape, diagonal, blocks):
    lr, damping, scale = 0.5, 1e-3, 0.7
    rule = Kron(geometry, betaL=0.9, damping=damping, preconditioner_init_scale=scale)
    state = rule.init(np.zeros(1), shape, diagonal, blocks)
    start = scale**2 if rule.fits_P else scale
    factors = multiples_of_identity(shape, diagonal, start)
    oracle = PSGD(geometry, factors, betaL=0.9, damping=damping, blocks=blocks)

    for t, g in enumerate(gradients(shape, seed=7)):
        v = normal(*shape, seed=5000 + t)
        state = rule.update(state, g, v, lr)
        state = rule.refresh(state)
        oracle.update(g, v, lr)
        P = oracle.P()
        assert_close(kronecker_product(state.preconditioners), P)
        assert_close(rule.precondition(state, g), oracle.direction(g))
    assert_close(np.array(state.lipschitz), np.array(oracle.L))


def pairs(shape: tuple[int, ...], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(v, H v) of a symmetric, ill-conditioned and indefinite H."""
    n = int(np.prod(shape))
    basis = np.linalg.qr(normal(n, n, seed=seed))[0]
    H = (basis * np.logspace(1, -1, n) * np.where(np.arange(n) % 3, 1, -1)) @ basis.T
    vectors = [normal(*shape, seed=3000 + t) for t in range(STEPS)]
    return [(v, (H @ v.reshape(-1)).reshape(shape)) for v in vectors]


@pytest.mark.parametrize("init_scale", [0.7, None])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    ("shape", "diagonal", "blocks"),
    [
        ((5,), (False,), None),
        ((4, 3), (False, True), None),
        ((3, 4, 2), (False, False, False), None),
        ((4, 6), (False, False), (2, 3)),
    ],
)
def test_fifty_newton_steps_equal_the_published_update(geometry, shape, diagonal, blocks, init_scale):
    history = pairs(shape, seed=7)
    damping = 1e-3 if init_scale else 0.0
    rule = Kron(geometry, damping=damping, preconditioner_init_scale=init_scale)
    state = rule.init(np.zeros(1), shape, diagonal, blocks)
    v, h = history[0]
    scale = init_scale or np.mean(v**2) ** 0.25 * np.mean(h**4) ** -0.125
    start = scale**2 if rule.fits_P else scale
    factors = multiples_of_identity(shape, diagonal, start)
    oracle = PSGD(geometry, factors, betaL=0.9, damping=damping, blocks=blocks)
    for t, (v, h) in enumerate(history):
        noise = normal(*shape, seed=5000 + t)
        state = rule.refresh(rule.update(state, h, noise, 0.5, v))
        oracle.update(h, noise, 0.5, pair=v)
        assert_close(kronecker_product(state.preconditioners), oracle.P())
    assert_close(np.array(state.lipschitz), np.array(oracle.L))


@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g != "QEP"])  # always balanced
def test_without_balancing_each_factor_equals_the_published_one(geometry):
    shape, diagonal = (3, 4, 2), (False, True, False)
    rule = Kron(geometry)
    state = rule.init(np.zeros(1), shape, diagonal)
    oracle = PSGD(geometry, multiples_of_identity(shape, diagonal, 1.0), betaL=0.9, damping=1e-9)
    for t, g in enumerate(gradients(shape, seed=7)):
        v = normal(*shape, seed=5000 + t)
        state = rule.square(rule.update(state, g, v, 0.5))
        oracle.update(g, v, 0.5)
        for q, expected in zip(state.factors, oracle.Q, strict=True):
            assert_close(q, expected)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_without_a_scale_the_first_gradient_sets_it(geometry):
    """To mean(g⁴)^(-1/8), so that P g is of order one; then the updates are the published ones."""
    shape, diagonal = (4, 3), (False, True)
    rule = Kron(geometry, damping=0.0, preconditioner_init_scale=None)
    state = rule.init(np.zeros(1), shape, diagonal)
    history = [1e-6 * g for g in gradients(shape, seed=7)][:10]
    scale = np.mean(history[0] ** 4) ** (-1 / 4 if rule.fits_P else -1 / 8)
    oracle = PSGD(geometry, multiples_of_identity(shape, diagonal, scale), betaL=0.9, damping=0.0)
    for t, g in enumerate([np.zeros(shape), *history]):  # one that is zero is no evidence
        v = normal(*shape, seed=5000 + t)
        state = rule.refresh(rule.update(state, g, v, 0.5))
        if t > 0:
            oracle.update(g, v, 0.5)
            assert_close(rule.precondition(state, g), oracle.direction(g))


def test_the_trajectory_moved_far_from_its_start():
    # Guards the test above: agreement near the identity would say little.
    oracle = PSGD("QEQ", [np.eye(4), np.eye(3)], betaL=0.9, damping=1e-3)
    for t, g in enumerate(gradients((4, 3), seed=7)):
        oracle.update(g, normal(4, 3, seed=5000 + t), 0.5)
    assert np.linalg.cond(oracle.P()) > 100


@pytest.mark.parametrize("kind", ["symmetric", "skew", "rank one", "zero"])
def test_spectral_norm_bound_equals_the_published_one(kind):
    x = normal(6, 6) * 1e5
    x = {
        "symmetric": x + x.T,
        "skew": x - x.T,
        "rank one": np.outer(x[0], x[0]),
        "zero": np.zeros((6, 6)),
    }[kind]
    assert_close(linalg.spectral_norm_bound(x), norm_bound(x))
