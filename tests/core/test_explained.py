"""Whether rows explain a gradient: against loops, and what a penalty or another use adds."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import assert_close, normal
from suite.core import explained

N, D_IN, D_OUT, K = 7, 4, 6, 2


@pytest.fixture
def rows():
    return normal(N, D_IN), normal(N, D_OUT, seed=1), normal(K, D_IN, seed=2)


def test_along_a_vector_are_the_sums_of_loops(rows):
    a, g, r = rows
    found, size = explained.rows_along(explained.along(a, r), g)
    for k in range(K):
        assert_close(found[k], sum(g[i] * sum(a[i] * r[k]) for i in range(N)))
        assert_close(size[k], sum(abs(g[i]) * abs(sum(a[i] * r[k])) for i in range(N)))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (lambda w: 0 * w, False),
        (lambda w: 0.3 * w, False),  # of 0.15 Σ w²
        (lambda w: 0.2 * np.sign(w), False),  # of 0.2 Σ |w|
        (lambda w: w - 0.5 * np.sign(w), False),
        (lambda w: w**3, True),
        (lambda w: w @ w.T @ w, True),
        (lambda w: normal(*w.shape, seed=9), True),
        (lambda w: np.nan * w, False),
    ],
)
def test_what_is_neither_of_rows_nor_of_a_penalty_is_unexplained(rows, more, expected, dtype, scale):
    a, g, r = (x.astype(dtype) for x in rows)
    g, w = g * np.asarray(scale, dtype), normal(D_OUT, D_IN, seed=3).astype(dtype)
    gradient = g.T @ a + (scale * more(w)).astype(dtype)
    given = explained.along(gradient, r), *explained.rows_along(explained.along(a, r), g)
    penalties = explained.penalties_along(w, r)
    assert bool(explained.is_unexplained(*given, penalties, 1e-3)) == expected


def test_rounding_errors_of_terms_that_cancel_explain_themselves(rows):
    a, g, r = rows
    a, g = np.concatenate([a, a]), np.concatenate([g, -g])
    error = 1e-5 * normal(D_OUT, D_IN, seed=4)
    penalties = explained.penalties_along(normal(D_OUT, D_IN, seed=3), r)
    given = *explained.rows_along(explained.along(a, r), g), penalties, 1e-3
    assert not explained.is_unexplained(explained.along(error, r), *given)
    assert explained.is_unexplained(explained.along(1e4 * error, r), *given)
