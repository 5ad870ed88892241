"""The core's K-FAC against exact curvature where K-FAC is exact, and against dense solves elsewhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from conftest import assert_close, normal, positive_definite
from oracles import kfac_direction, kfac_direction_factored, weighted_mean
from suite.core import moments, step_size
from suite.core.kfac import KFAC
from suite.core.statistics import LayerStatistics, normalize, second_moment_sum


def curvature_factors(inputs, output_gradients, terms, loss_reduction, *, bias=False):
    """A and G of one layer, from its rows (n, d_in) and the loss's gradients (m, d_out)."""
    sums = LayerStatistics(
        second_moment_sum(inputs[None], bias=bias),
        second_moment_sum(output_gradients[None]),
        np.asarray(float(len(inputs))),
    )
    A, G = normalize(sums, np.asarray(float(terms)), loss_reduction)
    return A[0], G[0]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_one_sample_gives_the_exact_fisher(bias, loss_reduction):
    a, g = normal(1, 4), normal(1, 3)
    A, G = curvature_factors(a, g, terms=1, loss_reduction=loss_reduction, bias=bias)
    inputs = np.append(a[0], 1.0) if bias else a[0]
    gradient = np.outer(g[0], inputs).reshape(-1)
    assert_close(np.kron(G, A), np.outer(gradient, gradient))


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_deep_linear_network_with_squared_loss_gives_the_exact_gauss_newton_matrix(
    layer, loss_reduction
):
    """Curvature of the squared loss Σ ½ |f(x) - y|², or its mean, in the weights of one layer.

    G sums over one backward pass per output coordinate: the square root of the loss's own Hessian, I.
    In a linear network these gradients do not depend on the input, so the expectation of the Kronecker
    product is the product of the expectations.
    """
    N, widths = 5, (4, 3, 2, 3)
    x = normal(N, widths[0])
    weights = [normal(o, i, seed=7) for i, o in itertools.pairwise(widths)]

    def network(weights, x):
        for W in weights:
            x = x @ W.T
        return x

    # Linear in each layer's weights: the difference to W + E is the derivative along E, exactly.
    jacobians = np.zeros((N, widths[-1], weights[layer].size))
    for k in range(weights[layer].size):
        E = np.zeros(weights[layer].size)
        E[k] = 1.0
        moved = [W + E.reshape(W.shape) if i == layer else W for i, W in enumerate(weights)]
        jacobians[:, :, k] = network(moved, x) - network(weights, x)
    exact = sum(J.T @ J for J in jacobians) / (N if loss_reduction == "mean" else 1)

    inputs = network(weights[:layer], x)
    downstream = np.eye(widths[layer + 1])
    for W in weights[layer + 1 :]:
        downstream = W @ downstream
    one_sample = downstream / (N if loss_reduction == "mean" else 1)  # row c: gradient of output c
    backward = np.concatenate([one_sample] * N)
    A, G = curvature_factors(inputs, backward, terms=N, loss_reduction=loss_reduction)
    assert_close(np.kron(G, A), exact)


def evidence(steps, *, diagonal_A=False, diagonal_G=False):
    A = [positive_definite(4, seed=k) for k in range(steps)]
    G = [positive_definite(3, seed=k) for k in range(steps)]
    return [np.diag(x) for x in A] if diagonal_A else A, [np.diag(x) for x in G] if diagonal_G else G


def absorb(rule, A, G, decay, diagonal=(False, False)):
    """The state of a stack of one layer after seeing A[0], G[0], then A[1], G[1], ..."""
    state = rule.init(np.zeros(1), (1,), (4, 3), diagonal)
    for a, g in zip(A, G, strict=True):
        state = rule.update(state, a[None], g[None], np.array([True]), decay)
    return state


@pytest.mark.parametrize("diagonal", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("damping", [1e-8, 1e-3, 1.0, 1e4])
def test_eigen_equals_the_dense_solve_with_damping_of_the_product(damping, diagonal):
    A, G = evidence(1, diagonal_A=diagonal[0], diagonal_G=diagonal[1])
    rule, gradient = KFAC("eigen"), normal(1, 3, 4)
    state = rule.refresh(absorb(rule, A, G, 0.0, diagonal), damping)
    expected = kfac_direction(A[0], G[0], damping, gradient[0])
    assert_close(rule.precondition(state, gradient, damping)[0], expected)


@pytest.mark.parametrize("diagonal", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("damping", [1e-8, 1e-3, 1.0, 1e4])
def test_inverse_equals_the_dense_solve_with_factored_damping(damping, diagonal):
    A, G = evidence(1, diagonal_A=diagonal[0], diagonal_G=diagonal[1])
    A[0] = 100 * A[0]  # so that π is far from 1
    rule, gradient = KFAC("inverse"), normal(1, 3, 4)
    state = rule.refresh(absorb(rule, A, G, 0.0, diagonal), damping)
    expected = kfac_direction_factored(A[0], G[0], damping, gradient[0])
    assert_close(rule.precondition(state, gradient, damping)[0], expected)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_running_average_is_the_weighted_mean_of_all_evidence(steps, decay):
    history = [normal(3, 2, seed=k) for k in range(steps)]
    average, weight = np.zeros((3, 2)), np.zeros(())
    for x in history:
        average = moments.update_average(average, x, decay)
        weight = moments.update_average(weight, np.ones(()), decay)
    assert_close(moments.unbiased(average, weight), weighted_mean(history, decay))


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("compute_method", ["eigen", "inverse"])
def test_direction_comes_from_the_weighted_mean_of_all_evidence(compute_method, steps):
    A, G = evidence(steps)
    rule, decay, damping, gradient = KFAC(compute_method), 0.95, 1e-2, normal(1, 3, 4)
    state = rule.refresh(absorb(rule, A, G, decay), damping)
    oracle = kfac_direction if compute_method == "eigen" else kfac_direction_factored
    expected = oracle(weighted_mean(A, decay), weighted_mean(G, decay), damping, gradient[0])
    assert_close(rule.precondition(state, gradient, damping)[0], expected)


def test_kl_clip_limits_the_quadratic_estimate_of_the_change_in_predictions():
    """ν = min(1, √(κ / |Σ lr² ⟨d, g⟩|)), Pauloski et al. 2020 (arXiv:2007.00784), equation 18."""
    layers = [(normal(3, 4, seed=k), normal(3, 4, seed=k + 9)) for k in range(3)]
    for lr, clip in [(0.1, 1e-3), (0.001, 1e-3), (10.0, 5.0)]:
        total = 0.0
        for d, g in layers:
            for i in range(3):
                for j in range(4):
                    total += lr**2 * d[i, j] * g[i, j]
        inner = sum(np.sum(d * g) for d, g in layers) * lr**2
        nu = min(1.0, np.sqrt(clip / abs(total)))
        assert_close(step_size.kl_clip_coefficient(np.asarray(inner), clip), nu)
