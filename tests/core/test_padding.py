"""Factors of several sizes in one stack are as if each were alone."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import assert_close, library, positive_definite, to_numpy
from suite.core import linalg, padding

SIDES = (2, 3, 5)
WEIGHT = np.array([0.5, 1.0, 0.1])


def stack(scale=1.0):
    """Sums of factors of several sizes in one stack, zeros behind them."""
    sums = np.zeros((3, 5, 5))
    for i, n in enumerate(SIDES):
        sums[i, :n, :n] = scale * WEIGHT[i] * positive_definite(n, seed=i)
    return sums


def filled(average, weight, sides, *, below):
    means = padding.mean_eigenvalues([average], weight, sides)
    return padding.fill(average, weight, means, sides, below=below), means


def test_means_of_several_stacks_are_each_factors(xp):
    sums = stack()
    parts = [sums[:2, :3, :3], sums[2:], np.abs(sums[:1, :, 0])]
    weight = np.array([0.5, 1.0, 0.1, 0.0])
    means = xp.run(
        lambda w, *stacks: padding.mean_eigenvalues(stacks, w, (2, 3, 5, 5)),
        *xp.convert((weight, *parts)),
    )
    expected = [np.trace(sums[i]) / n / weight[i] for i, n in enumerate(SIDES)]
    assert_close(to_numpy(means), np.array([*expected, 0.0]))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_inverses_are_those_of_each_factor(xp, scale):
    average, means = xp.run(
        lambda x, w: filled(x, w, SIDES, below=False), *xp.convert((stack(scale), WEIGHT))
    )
    for i, n in enumerate(SIDES):
        alone = stack(scale)[i, :n, :n] / WEIGHT[i]
        found = to_numpy(average)[i] / WEIGHT[i]
        assert_close(found[:n, :n], alone)
        assert_close(found[n:, n:], np.eye(5 - n))
        assert not found[:n, n:].any()
        assert not found[n:, :n].any()
        assert_close(to_numpy(means)[i], np.trace(alone) / n)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 0.0])
def test_eigenbases_have_the_padding_first(xp, scale):
    def run(x, w):
        average, _ = filled(x, w, SIDES, below=True)
        return linalg.eigh(average / w[:, None, None])

    values, vectors = map(to_numpy, xp.run(run, *xp.convert((stack(scale), WEIGHT))))
    for i, n in enumerate(SIDES):
        alone = stack(scale)[i, :n, :n] / WEIGHT[i]
        own = vectors[i][:n, 5 - n :]
        assert_close(own.T @ own, np.eye(n))
        assert_close(values[i][5 - n :], np.linalg.eigvalsh(alone))
        assert_close((own * values[i][5 - n :]) @ own.T, alone)


def test_without_evidence_the_mean_is_zero(xp):
    average, means = xp.run(
        lambda x, w: filled(x, w, SIDES, below=False),
        *xp.convert((np.zeros((3, 5, 5)), np.zeros(3))),
    )
    assert_close(to_numpy(means), np.zeros(3))
    assert np.isfinite(to_numpy(average)).all()


def cost(counts, sides):
    return sum(count * sides[n] ** 3 for n, count in counts.items())


def test_classes_are_few_and_cost_what_is_allowed():
    # The factors of the 784-1000-500-250-30 autoencoder.
    counts = {785: 1, 1001: 2, 501: 2, 251: 2, 31: 1, 1000: 2, 500: 2, 250: 2, 30: 1, 784: 1}
    for allowance in (0.0, 0.001, 0.05, 0.5, 10.0):
        classes = padding.size_classes(counts, allowance)
        assert set(classes) == set(counts)
        assert all(m in counts and m >= n for n, m in classes.items())
        assert cost(counts, classes) <= (1 + allowance) * cost(counts, {n: n for n in counts})
    assert len(set(padding.size_classes(counts).values())) == 4
    assert padding.size_classes(counts, 0.0) == {n: n for n in counts}
    assert set(padding.size_classes(counts, 10.0).values()) == {1001}
    with pytest.raises(ValueError, match="allowance must be >= 0"):
        padding.size_classes(counts, -1.0)


def test_sides_that_half_precision_cannot_count():
    torch = library("torch")
    sums = torch.convert(
        np.stack([np.diag([1.0] * n + [0.0] * (515 - n)) for n in (513, 515)]), "bfloat16"
    )
    average, means = filled(sums, torch.convert(np.ones(2)), (513, 515), below=False)
    assert_close(to_numpy(average), np.stack([np.eye(515)] * 2))
    np.testing.assert_allclose(to_numpy(means), 1.0, rtol=1e-6)
