"""Each likelihood against its definition: the dense Hessian, and the law of the sampled gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conftest import assert_close, dtype_name, normal, to_numpy
from suite.core.likelihoods import Bernoulli, Categorical, Gaussian, check_outputs

LIKELIHOODS = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(),
    "gaussian 0.3": Gaussian(0.3),
}
every_likelihood = pytest.mark.parametrize(
    "likelihood", list(LIKELIHOODS.values()), ids=list(LIKELIHOODS)
)


def softmax(z):
    return np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def negative_log_likelihood(likelihood, z, y):
    """-log p(y | z) of one term, up to a constant; y is a label, labels or a target."""
    if isinstance(likelihood, Categorical):
        return np.log(np.exp(z).sum()) - z[y]
    if isinstance(likelihood, Bernoulli):
        return np.sum(np.log1p(np.exp(z)) - y * z)
    return np.sum((z - y) ** 2) / (2 * likelihood.variance)


def finite_difference_hessian(likelihood, z, y, h=1e-4):
    n = len(z)
    E = h * np.eye(n)

    def f(x):
        return negative_log_likelihood(likelihood, x, y)

    return np.array(
        [
            [
                (f(z + E[i] + E[j]) - f(z + E[i] - E[j]) - f(z - E[i] + E[j]) + f(z - E[i] - E[j]))
                / (4 * h * h)
                for j in range(n)
            ]
            for i in range(n)
        ]
    )


def square_root(xp, likelihood, z):
    """All columns, (..., C, C)."""
    count = likelihood.columns(z.shape)
    columns = [xp.run(likelihood.square_root, xp.asarray(z), index=c) for c in range(count)]
    return np.stack(list(map(to_numpy, columns)), axis=-1)


def even_noise(shape, draws):
    """`draws` evenly spread numbers on the unit interval, the same for all positions."""
    u = (np.arange(draws) + 0.5) / draws
    return np.broadcast_to(u.reshape(-1, *[1] * len(shape)), (draws, *shape))


@every_likelihood
@pytest.mark.parametrize("labels", [(0, 1.0), (2, 0.0)])
def test_square_root_times_its_transpose_is_the_hessian_whatever_the_label(xp, likelihood, labels):
    z = normal(4)
    y = labels[0] if isinstance(likelihood, Categorical) else labels[1]
    L = square_root(xp, likelihood, z)
    np.testing.assert_allclose(L @ L.T, finite_difference_hessian(likelihood, z, y), atol=2e-7)


def dense_hessian(likelihood, z):
    """(..., C, C), from the textbook."""
    eye = np.eye(z.shape[-1])
    if isinstance(likelihood, Categorical):
        p = softmax(z)
        return p[..., None] * eye - p[..., :, None] * p[..., None, :]
    if isinstance(likelihood, Bernoulli):
        p = sigmoid(z)
        return (p * (1 - p))[..., None] * eye
    return np.broadcast_to(eye / likelihood.variance, (*z.shape, z.shape[-1]))


@every_likelihood
@pytest.mark.parametrize("shape", [(3,), (5, 1), (2, 3, 4)])
def test_square_root_is_that_of_the_hessian_for_each_term(xp, likelihood, shape):
    z = 2 * normal(*shape)
    L = square_root(xp, likelihood, z)
    assert_close(L @ np.swapaxes(L, -1, -2), dense_hessian(likelihood, z), rtol=1e-12)


def test_categorical_gradient_is_that_of_the_label_whose_interval_holds_the_noise(xp):
    p = np.array([0.1, 0.5, 0.0, 0.4])
    z = np.log(p, where=p > 0, out=np.full(4, -np.inf)) + 7.0
    noise = np.array([0.0, 0.05, 0.11, 0.59, 0.61, 0.9999, 1 - 2.0**-53])
    labels = [0, 0, 1, 1, 3, 3, 3]
    got = xp.run(Categorical().sample_gradient, xp.asarray(np.tile(z, (7, 1))), xp.asarray(noise))
    assert_close(got, p - np.eye(4)[labels], rtol=1e-12)


def test_bernoulli_gradient_is_that_of_one_where_the_noise_is_below_the_probability(xp):
    z = np.array([-1.0, 0.0, 2.0])
    p = sigmoid(z)
    noise = np.stack([p - 1e-6, p + 1e-6, np.zeros(3), np.full(3, 1 - 2.0**-53)])
    got = xp.run(Bernoulli().sample_gradient, xp.asarray(np.tile(z, (4, 1))), xp.asarray(noise))
    assert_close(got, p - np.array([[1.0], [0.0], [1.0], [0.0]]), rtol=1e-12)


def test_gaussian_gradient_is_the_box_muller_number_over_the_deviation(xp):
    z = normal(6, 2)
    noise = np.random.default_rng(0).random((2, 6, 2))
    got = xp.run(Gaussian(0.3).sample_gradient, xp.asarray(z), xp.asarray(noise))
    expected = [
        math.sqrt(-2 * math.log(1 - u)) * math.cos(2 * math.pi * v) / math.sqrt(0.3)
        for u, v in zip(noise[0].flat, noise[1].flat, strict=True)
    ]
    assert_close(got, np.reshape(expected, (6, 2)), rtol=1e-12)


@pytest.mark.parametrize("name", ["categorical", "bernoulli"])
def test_sampled_gradients_have_mean_zero_and_the_hessian_as_second_moment(name):
    """Over noise spread evenly, so up to one in `draws`; Bernoulli coordinates only by themselves."""
    likelihood, draws = LIKELIHOODS[name], 20_000
    z = normal(4)
    u = likelihood.sample_gradient(
        np.tile(z, (draws, 1)), even_noise(likelihood.noise_shape(z.shape), draws)
    )
    H = dense_hessian(likelihood, z)
    np.testing.assert_allclose(u.mean(axis=0), 0, atol=2 / draws)
    moment = u.T @ u / draws
    if name == "bernoulli":  # all its coordinates were given the same noise here
        moment, H = np.diag(moment), np.diag(H)
    np.testing.assert_allclose(moment, H, atol=4 / draws)


@every_likelihood
def test_sampled_gradients_of_independent_noise_have_the_hessian_as_second_moment(likelihood):
    draws = 200_000
    z = normal(3)
    noise = np.random.default_rng(1).random(likelihood.noise_shape((draws, 3)))
    u = likelihood.sample_gradient(np.tile(z, (draws, 1)), noise)
    scale = np.abs(dense_hessian(likelihood, z)).max()
    np.testing.assert_allclose(u.mean(axis=0), 0, atol=5 * math.sqrt(scale / draws))
    np.testing.assert_allclose(
        u.T @ u / draws, dense_hessian(likelihood, z), atol=10 * scale / math.sqrt(draws)
    )


@every_likelihood
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_ends_of_the_noise_and_large_logits_give_finite_likely_gradients(xp, likelihood, dtype):
    """Noise of exactly 0, and of 1 less than float32 can tell from 1, never draws the impossible."""
    z = np.array([[1e4, -1e4, 0.0], [-1e4, -1e4, 1e4], [0.0, 0.0, 0.0], [-1e38, 0.0, 1e38]])
    for u in (0.0, 2.0**-60, 1 - 2.0**-53):
        noise = np.full(likelihood.noise_shape(z.shape), u)
        got = to_numpy(xp.run(likelihood.sample_gradient, xp.asarray(z, dtype), xp.asarray(noise)))
        assert np.all(np.isfinite(got))
        if isinstance(likelihood, Gaussian):
            assert np.abs(got).max() < 20  # √(-2 log 2⁻⁵⁴) = 8.7, over the deviation 0.55
        else:
            # The drawn label is certain where the logits are large, which leaves no gradient.
            certain = np.abs(z).max(axis=-1) > 0 if isinstance(likelihood, Categorical) else z != 0
            assert np.all(got[certain] == 0)
            assert np.all(got[~certain] != 0)
        for c in range(3):
            column = to_numpy(xp.run(likelihood.square_root, xp.asarray(z, dtype), index=c))
            assert np.all(np.isfinite(column))


def test_categorical_never_draws_a_class_of_no_probability(xp):
    """Also where a cumulative sum over many classes is rounded."""
    classes, draws = 1000, 200
    masked = np.arange(classes) % 3 != 1
    z = np.where(masked, -np.inf, normal(classes)).astype(np.float32)
    noise = np.concatenate([np.linspace(0, 1, draws, endpoint=False), [1 - 2.0**-53, 1 - 2.0**-24]])
    got = xp.run(
        Categorical().sample_gradient,
        xp.asarray(np.tile(z, (len(noise), 1))),
        xp.asarray(noise.astype(np.float64)),
    )
    got = to_numpy(got)
    labels = np.argmin(got, axis=-1)
    assert np.all(got.min(axis=-1) < -0.9)
    assert not np.any(masked[labels])
    assert np.all(np.diff(labels) >= 0)
    assert labels[0] == 1
    assert labels[len(noise) // 2] in range(400, 600)


@every_likelihood
def test_half_precision_comes_back_and_is_computed_in_single(xp, likelihood):
    if xp.half is None:
        pytest.skip("the library has no half precision")
    z = np.array([[1.0, -0.5, 0.25], [8.0, 0.0, -4.0]])  # exact in half precision
    noise = np.random.default_rng(2).random(likelihood.noise_shape(z.shape))
    half = xp.asarray(z, xp.half)
    got = xp.run(likelihood.sample_gradient, half, xp.asarray(noise))
    assert dtype_name(got) == xp.half
    expected = likelihood.sample_gradient(z, noise)
    np.testing.assert_allclose(to_numpy(got), expected, rtol=2.0**-8, atol=1e-7)
    for c in range(3):
        column = xp.run(likelihood.square_root, half, index=c)
        assert dtype_name(column) == xp.half
        np.testing.assert_allclose(
            to_numpy(column), likelihood.square_root(z, c), rtol=2.0**-8, atol=1e-7
        )


@every_likelihood
def test_no_terms_are_no_gradients(xp, likelihood):
    z = np.zeros((0, 3))
    noise = np.zeros(likelihood.noise_shape(z.shape))
    assert to_numpy(xp.run(likelihood.sample_gradient, xp.asarray(z), xp.asarray(noise))).shape == (0, 3)
    assert to_numpy(xp.run(likelihood.square_root, xp.asarray(z), index=0)).shape == (0, 3)


@pytest.mark.parametrize(
    ("likelihood", "expected"),
    [(Categorical(), (5, 7)), (Bernoulli(), (5, 7, 3)), (Gaussian(), (2, 5, 7, 3))],
)
def test_shapes_of_noise_and_columns(likelihood, expected):
    assert likelihood.noise_shape((5, 7, 3)) == expected
    assert likelihood.columns((5, 7, 3)) == 3


@every_likelihood
def test_outputs_without_an_axis_are_refused(likelihood):
    for call in (likelihood.noise_shape, likelihood.columns):
        with pytest.raises(
            ValueError, match=r"outputs must have their classes on a last axis, got shape"
        ):
            call(())


@pytest.mark.parametrize("likelihood", [Bernoulli(), Gaussian()])
def test_one_number_for_each_example_needs_an_axis(likelihood):
    name = type(likelihood).__name__
    with pytest.raises(ValueError, match=rf"outputs of {name} must be \(..., C\), got \(32,\), as many"):
        check_outputs(likelihood, (32,), [(32,), (32, 4)])
    for shape, given in {(32,): [(32,), (4, 32)], (32, 1): [(32, 4)], (1,): [(1, 4)]}.items():
        check_outputs(likelihood, shape, given)
    check_outputs(Categorical(), (32,), [(32, 4)])  # a choice of one of them


@every_likelihood
def test_a_column_that_is_not_there_is_refused(likelihood):
    with pytest.raises(ValueError, match=r"index must be < 3, the number of columns, got 3"):
        likelihood.square_root(np.zeros((2, 3)), 3)
    with pytest.raises(ValueError, match=r"index must be >= 0, got -1"):
        likelihood.square_root(np.zeros((2, 3)), -1)


@pytest.mark.parametrize("variance", [0.0, -1.0, math.inf, math.nan])
def test_a_variance_that_is_not_positive_is_refused(variance):
    with pytest.raises(ValueError, match=r"variance must be (> 0|finite), got"):
        Gaussian(variance)


def test_likelihoods_are_equal_when_their_fields_are():
    assert Gaussian(2.0) == Gaussian(2.0) != Gaussian(3.0)
    assert Categorical() == Categorical()
