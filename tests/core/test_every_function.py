"""What holds for every function of stacks of blocks: one table, and the properties all rows share.

A new core function that works on stacks belongs into CASES.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from conftest import (
    also_eager_jax,
    assert_close,
    assert_identical,
    dtype_name,
    leaves,
    library,
    map_tree,
    normal,
    positive_definite,
    to_numpy,
)
from suite.core import (
    damping,
    dense,
    ekfac,
    explained,
    kfac,
    kron,
    kronecker,
    linalg,
    lra,
    moments,
    packing,
    padding,
    statistics,
    step_size,
)
from suite.core._namespace import array_namespace
from suite.core.likelihoods import Bernoulli, Categorical, Gaussian, with_signs

B = 3  # blocks in a stack


def spectrum(x):
    """What eigh says, free of the eigenvectors' signs: the values and the matrix they rebuild."""
    values, vectors = linalg.eigh(x)
    return values, (vectors * values[..., None, :]) @ linalg.transpose(vectors)


def warm_spectrum(x, basis):
    values, vectors = linalg.warm_eigh(x, basis)
    return values, (vectors * values[..., None, :]) @ linalg.transpose(vectors)


def kron_state(diagonal):
    """A state in mid-training: upper triangular factors, so that it is one for every geometry."""
    factors = tuple(
        0.5 + np.abs(normal(B, n, seed=5)) if d else np.triu(0.3 * normal(B, n, n, seed=6)) + np.eye(n)
        for n, d in zip((4, 3), diagonal, strict=True)
    )
    squares = tuple(q * q if q.ndim == 2 else np.swapaxes(q, -1, -2) @ q for q in factors)
    lipschitz = tuple(np.abs(normal(B, seed=7 + i)) for i in range(2))
    return kron.KronState(factors, lipschitz, squares)


def lra_state():
    lipschitz = tuple(np.abs(normal(B, seed=7 + i)) for i in range(3))
    U, V = (0.3 * normal(B, 5, 2, seed=k) for k in (1, 2))
    return lra.LRAState(U, V, 0.5 + np.abs(normal(B, 5)), lipschitz)


def lra_update(update_U, rule):
    return lambda state, h, noise, v: rule.update(state, h, noise, 0.1, update_U, v)


def dense_state():
    return dense.DenseState(np.triu(0.3 * normal(B, 5, 5)) + np.eye(5), np.abs(normal(B, seed=7)))


def kfac_state(compute_method, diagonal):
    state = kfac.KFAC(compute_method).init(np.zeros(1), (B,), (4, 3), diagonal)
    A, G = kfac_factors(diagonal, seed=3)
    weight = np.full(B, 0.6)
    return kfac.KFACState(
        state.A._replace(average=0.6 * A, weight=weight),
        state.G._replace(average=0.6 * G, weight=weight),
    )


def kfac_factors(diagonal, seed=0):
    A, G = positive_definite(B, 4, seed=seed), positive_definite(B, 3, seed=seed)
    diagonal_of = np.diagonal
    return (
        diagonal_of(A, axis1=-2, axis2=-1).copy() if diagonal[0] else A,
        diagonal_of(G, axis1=-2, axis2=-1).copy() if diagonal[1] else G,
    )


def kron_update(rule):
    return lambda state, g, v: rule.update(state, g, v, 0.1)


def kron_fit(state, g, v, other, h, w):
    return kron.Kron().fit([state, other], [g, h], [v, w], 0.1)


def newton_update(rule):
    return lambda state, h, noise, v: rule.update(state, h, noise, 0.1, v)


def kfac_step(compute_method):
    rule = kfac.KFAC(compute_method)

    def step(state, A, G, seen, gradient):
        state = rule.update(state, A, G, seen, 0.9)
        state = rule.refresh(state, 0.1)
        return state.A.average, state.G.average, state.A.weight, rule.precondition(state, gradient, 0.1)

    return step


def five(like):
    """A count as an array of its own, which no block of `like` can harm."""
    return array_namespace(like).zeros((), dtype=like.dtype) + 5


def factor_of(compute_method, average):
    rule = kfac.KFAC(compute_method)
    factor = rule.init_factor(np.zeros(1), (B,), average.shape[-1], average.ndim == 2)
    return factor._replace(average=0.6 * average, weight=np.full(B, 0.6))


def eigen_of(n, seed=0):
    values, vectors = np.linalg.eigh(positive_definite(B, n, seed=seed))
    return kfac.Eigen(vectors, values)


def transposed_first(function):
    """A function of (rows, channels), whose blocks are channels, as one of (channels, rows)."""
    return lambda *args: function(*map(linalg.transpose, args))


FIRST_INVERSE = np.linalg.inv(positive_definite(B, 4)[0] + abs(normal(B)[0]) * np.eye(4))
SEEN = np.array([True, False, True])
CASES = {
    "moments.update_average": (
        lambda s, x: moments.update_average(s, x, 0.9),
        (normal(B, 4, 2), normal(B, 4, 2, seed=1)),
    ),
    "moments.mix": (
        moments.mix,
        (normal(B, 4, 2), normal(B, 4, 2, seed=1), np.array([0.5, 1.0, 0.0])),
    ),
    "explained.along": (explained.along, (normal(B, 4, 3), normal(B, 2, 3, seed=1))),
    "explained.rows_along": (
        explained.rows_along,
        (normal(B, 2, 4), normal(B, 4, 3, seed=1)),
    ),
    "explained.is_unexplained": (
        lambda x, p: explained.is_unexplained(x, 0 * x, 1 + 0 * x, [p], 0.1),
        (normal(B, 5, 2), normal(B, 5, 2, seed=1)),
    ),
    "explained.penalties_along": (
        explained.penalties_along,
        (normal(B, 5, 3), normal(B, 2, 3, seed=2)),
    ),
    "padding.mean_eigenvalues": (
        lambda x, w: padding.mean_eigenvalues([x], w, [3] * x.shape[0]),
        (positive_definite(B, 4), np.abs(normal(B)) + 0.1),
    ),
    "padding.fill": (
        lambda x, w: padding.fill(x, w, w, [3] * x.shape[0], below=True),
        (positive_definite(B, 4), np.array([0.5, 1.0, 0.1])),
    ),
    "packing.pack": (packing.pack, (normal(B, 5, 5),)),
    "packing.unpack": (packing.unpack, (normal(B, 3, 5),)),
    "packing.packed_diagonal": (packing.packed_diagonal, (normal(B, 3, 5),)),
    "packing.pack_upper": (packing.pack_upper, (normal(B, 4, 4),)),
    "packing.unpack_upper": (packing.unpack_upper, (normal(B, 2, 5),)),
    "moments.unbiased": (moments.unbiased, (normal(B, 4, 2), np.array([0.5, 1.0, 0.1]))),
    "statistics.second_moment_sum": (statistics.second_moment_sum, (normal(B, 5, 3),)),
    "statistics.second_moment_sum bias": (
        lambda x: statistics.second_moment_sum(x, bias=True),
        (normal(B, 5, 3),),
    ),
    "statistics.second_moment_sum diagonal": (
        lambda x: statistics.second_moment_sum(x, diagonal=True, bias=True),
        (normal(B, 5, 3),),
    ),
    "statistics.cross_moment_sum": (
        lambda g, a: statistics.cross_moment_sum(g, a, bias=True),
        (normal(B, 5, 3), normal(B, 5, 2, seed=1)),
    ),
    "statistics.mean_of_each": (
        lambda x: statistics.mean_of_each(statistics.second_moment_sum(x, bias=True)),
        (normal(B, 5, 3),),
    ),
    "statistics.mean_of_each diagonal": (
        lambda x: statistics.mean_of_each(statistics.second_moment_sum(x, bias=True, diagonal=True)),
        (normal(B, 5, 3),),
    ),
    "statistics.unit_second_moment_sum": (
        transposed_first(lambda x, y: statistics.unit_second_moment_sum(x, y, both=True)),
        (normal(B, 5), normal(B, 5, seed=1)),
    ),
    "statistics.unit_second_moment_sum diagonal": (
        transposed_first(lambda x, y: statistics.unit_second_moment_sum(x, y, both=False)[0, ...]),
        (normal(B, 5), normal(B, 5, seed=1)),
    ),
    "statistics.batch_norm_second_moment_sum": (
        transposed_first(lambda x, y: statistics.batch_norm_second_moment_sum(x, y, 0.1, both=True)),
        (normal(B, 5), normal(B, 5, seed=1)),
    ),
    "statistics.elementwise_second_moment_sum": (
        lambda g, x: statistics.elementwise_second_moment_sum(g, x, "right", (g.shape[0], 4, 2)),
        (normal(B, 5, 2), normal(B, 5, 4)),
    ),
    "statistics.complex_second_moment_sum": (
        lambda a, b, c, d: statistics.complex_second_moment_sum(
            (a, b), (c, d), "right", (a.shape[0], 4, 2)
        ),
        (normal(B, 5, 2), normal(B, 5, 2, seed=1), normal(B, 5, 4), normal(B, 5, 4, seed=1)),
    ),
    "statistics.complex_gradient": (
        lambda a, b, c, d: statistics.complex_gradient(
            (a, b), (c, d), ("zio", "zni", "zno"), (a.shape[0], 4, 2)
        ),
        (normal(B, 5, 2), normal(B, 5, 2, seed=1), normal(B, 5, 4), normal(B, 5, 4, seed=1)),
    ),
    "kfac.rows_fit": (
        lambda A, G, a, g: kfac.rows_fit((g.mT @ a, None), a, g, kfac.probes_for(A, G)),
        (positive_definite(B, 4), positive_definite(B, 3), normal(B, 6, 4), normal(B, 6, 3)),
    ),
    "kfac.rows_fit in eigenbases": (
        lambda A, G, a, g: kfac.rows_fit(
            (g.mT @ a, None),
            a,
            g,
            kfac.probes_for(kfac.Eigen(A, A[..., 0] ** 2), kfac.Eigen(G, G[..., 0] ** 2), 0.1),
        ),
        (positive_definite(B, 4), positive_definite(B, 3), normal(B, 6, 4), normal(B, 6, 3)),
    ),
    "kfac.all_usable": (
        lambda x: kfac.all_usable([kfac.KFAC("inverse").invert(x, x[:, 0, 0] * 0 + 1, -2.0)]),
        (positive_definite(B, 4) * np.array([0.0, 1.0, 1e3])[:, None, None],),
    ),
    "kfac.usable": (
        lambda x: kfac.usable(kfac.KFAC("inverse").invert(x, x[:, 0, 0] * 0 + 1, -2.0), 1),
        (positive_definite(B, 4) * np.array([0.0, 1.0, 1e3])[:, None, None],),
    ),
    "statistics.normalize": (
        lambda A, G: statistics.normalize(
            statistics.LayerStatistics(A, G, five(A)), five(A) + 1, "mean"
        ),
        (positive_definite(B, 4), positive_definite(B, 3)),
    ),
    "statistics.input_scale": (
        lambda A: A * statistics.input_scale(five(A)),
        (positive_definite(B, 4),),
    ),
    "statistics.gradient_scale": (
        lambda G: G * statistics.gradient_scale(five(G), five(G) + 1, "mean"),
        (positive_definite(B, 3),),
    ),
    "statistics.with_unit_G": (
        lambda A, G: statistics.with_unit_G(A, G[:, 0, :]),
        (positive_definite(B, 2), np.array([12.0, 3.0, 0.0])[:, None, None]),
    ),
    "statistics.normalize_products": (
        lambda x: statistics.normalize_products(x, five(x), "mean"),
        (np.abs(normal(B, 3, 4)),),
    ),
    "statistics.add_transposed": (
        statistics.add_transposed,
        (*kfac_factors((False, True)), np.abs(normal(B, 3)), positive_definite(B, 4, seed=2)),
    ),
    "ekfac.second_moment_in_basis": (
        lambda a, g, V: ekfac.second_moment_in_basis(a, g, V, None, bias=True),
        (normal(B, 5, 3), normal(B, 5, 2), np.linalg.qr(normal(B, 4, 4)).Q),
    ),
    "ekfac.restart": (ekfac.restart, (eigen_of(4), eigen_of(3))),
    "ekfac.update": (
        lambda average, weight, new, seen: ekfac.update(average, weight, new, seen, 0.9),
        (np.abs(normal(B, 3, 4)), np.abs(normal(B)), np.abs(normal(B, 3, 4, seed=1)), SEEN),
    ),
    "damping.tikhonov": (lambda x: damping.tikhonov(x, 0.1), (np.abs(normal(B, 4, 2)),)),
    "damping.noise_size": (lambda x: damping.noise_size(x, 0.5), (np.abs(normal(B)),)),
    "damping.split_damping": (
        lambda A, G: damping.split_damping(A, G, 0.1),
        (np.abs(normal(B)), np.abs(normal(B, seed=1))),
    ),
    "damping.factored_damping": (
        lambda A, G: damping.factored_damping(A, G, 0.1),
        (positive_definite(B, 4), positive_definite(B, 3)),
    ),
    "linalg.transpose": (linalg.transpose, (normal(B, 4, 3),)),
    "linalg.symmetrize": (linalg.symmetrize, (normal(B, 4, 4),)),
    "linalg.for_products": (linalg.for_products, (normal(B, 4, 4), normal(B, 3))),
    "linalg.for_sums": (linalg.for_sums, (normal(B, 4, 4),)),
    "linalg.diagonal": (linalg.diagonal, (normal(B, 4, 4),)),
    "linalg.trace": (linalg.trace, (normal(B, 4, 4),)),
    "linalg.traces": (lambda x: linalg.traces([x]), (normal(B, 4, 4),)),
    "linalg.row_norms": (linalg.row_norms, (normal(B, 4, 2),)),
    "linalg.condition_number": (linalg.condition_number, (positive_definite(B, 4),)),
    "linalg.add_diagonal": (linalg.add_diagonal, (normal(B, 4, 4), normal(B))),
    "linalg.damped_inverse": (linalg.damped_inverse, (positive_definite(B, 4), np.abs(normal(B)))),
    "linalg.newton_schulz_inverse": (
        lambda x, damping, start: linalg.newton_schulz_inverse(x, damping, start, 12),
        (
            positive_definite(B, 4),
            np.abs(normal(B)),
            # A guess, none, and one that is of no use.
            np.stack([0.9 * FIRST_INVERSE, np.zeros((4, 4)), -1e3 * np.eye(4)]),
        ),
    ),
    "linalg.eigh": (spectrum, (positive_definite(B, 4),)),
    "linalg.warm_eigh": (warm_spectrum, (positive_definite(B, 4), np.linalg.qr(normal(B, 4, 4)).Q)),
    "linalg.solve_triangular upper": (
        lambda x, y: linalg.solve_triangular(x, y, upper=True),
        (np.triu(normal(B, 4, 4)) + 3 * np.eye(4), normal(B, 4, 2)),
    ),
    "linalg.solve_triangular lower": (
        lambda x, y: linalg.solve_triangular(x, y, upper=False),
        (np.tril(normal(B, 4, 4)) + 3 * np.eye(4), normal(B, 4, 2)),
    ),
    "linalg.root_mean_square": (lambda x: linalg.root_mean_square(x, (-2, -1)), (normal(B, 4, 3),)),
    "linalg.largest_entry": (lambda x: linalg.largest_entry(x, (-2, -1)), (normal(B, 4, 3),)),
    "linalg.usually": (lambda x: linalg.usually(x > 0, x, lambda: -2 * x), (normal(B, 4, 3),)),
    "linalg.transposed_times": (linalg.transposed_times, (normal(B, 4, 2), normal(B, 4, 3, seed=1))),
    "linalg.times_block_diagonal": (
        linalg.times_block_diagonal,
        (normal(B, 4, 6), normal(B, 2, 3, 3, seed=1)),
    ),
    "linalg.times_transposed": (linalg.times_transposed, (normal(B, 2, 4), normal(B, 3, 4, seed=1))),
    "linalg.gram": (linalg.gram, (normal(B, 4, 3),)),
    "linalg.sum_of_squares": (linalg.sum_of_squares, (normal(B, 4, 3),)),
    "linalg.gram_in_single": (linalg.gram_in_single, (normal(B, 4, 3),)),
    "linalg.spectral_norm_bound": (linalg.spectral_norm_bound, (positive_definite(B, 4),)),
    "kronecker.apply": (
        lambda F, x: kronecker.apply(F, x),
        ((normal(B, 4, 4), normal(B, 3), normal(B, 2, 2)), normal(B, 4, 3, 2)),
    ),
    "kronecker.gram": (
        lambda x: tuple(kronecker.gram(x, i, 3, diagonal=i == 1) for i in range(3)),
        (normal(B, 4, 3, 2),),
    ),
    "damping.levenberg_marquardt": (
        lambda damping_, actual, predicted: damping.levenberg_marquardt(damping_, actual, predicted),
        (np.array([0.1, 1e-10, 2.0]), np.array([-1.0, 0.5, 3.0]), np.array([-1.0, -1.0, -2.0])),
    ),
    "step_size.quadratic_step": (
        step_size.quadratic_step,
        (positive_definite(B, 2), normal(B, 2)),
    ),
    "step_size.rms_clip_scale": (
        lambda x, weight: x * step_size.rms_clip_scale(x, 0.9, 2, weight),
        (normal(B, 3, 4), abs(normal(B))),
    ),
    "step_size.rms_clip": (
        lambda x: step_size.rms_clip(x, 0.9, 2),
        (normal(B, 4, 3) * np.array([0.1, 1.0, 10.0])[:, None, None],),
    ),
    "step_size.clipped": (
        lambda x: step_size.clipped(x, (0.9, 1.1), 2),
        (normal(B, 4, 3) * np.array([0.1, 1.0, 10.0])[:, None, None],),
    ),
    "step_size.amplitude_clip": (
        lambda x: step_size.amplitude_clip(x, 0.9),
        (normal(B, 4, 3),),
    ),
    "step_size.normalized": (
        lambda x: step_size.normalized(x, 2),
        (normal(B, 4, 3) * np.array([1e-6, 1.0, 1e4])[:, None, None],),
    ),
    "linalg.inverse": (linalg.inverse, (normal(B, 4, 4) + 2 * np.eye(4),)),
    "lra.first_scale": (
        lambda g, L: lra.first_scale(g, None, L, 1e-9),
        (normal(B, 5), np.array([0.0, 1.0, 0.0])),
    ),
    "lra.LRA.init": (lra.LRA(2).init, (normal(B, 5, 2), normal(B, 5, 2, seed=1))),
    "lra.LRA.precondition": (lra.LRA(2).precondition, (lra_state(), normal(B, 5))),
    "linalg.rotate_towards_symmetry": (
        linalg.rotate_towards_symmetry,
        (np.eye(4) + 0.3 * normal(B, 4, 4),),
    ),
    "kronecker.balancing": (kronecker.balancing, (np.abs(normal(B)), np.abs(normal(B, seed=1)))),
    "kronecker.scaled": (
        lambda q, r, gain: kronecker.scaled((q, r), gain),
        (normal(B, 4, 4), normal(B, 3), normal(B, seed=1)),
    ),
    "kron.Kron.refresh": (kron.Kron().refresh, (kron_state((True, False)),)),
    "kron.Kron.lifted": (kron.Kron().lifted, (kron_state((False, True)),)),
    "kron.Kron.precondition": (
        kron.Kron().precondition,
        (kron_state((False, True)), normal(B, 4, 3)),
    ),
}
for geometry in ("Q0.5EQ1.5", "QEQ", "QUAD", "EQ"):
    CASES[f"kron.Kron.update {geometry}"] = (
        kron_update(kron.Kron(geometry)),
        (kron_state((False, True)), normal(B, 4, 3), normal(B, 4, 3, seed=1)),
    )
    CASES[f"kron.Kron.update newton {geometry}"] = (
        newton_update(kron.Kron(geometry)),
        (kron_state((False, True)), *(normal(B, 4, 3, seed=k) for k in range(3))),
    )
CASES["kron.Kron.fit"] = (
    kron_fit,
    (
        *(kron_state((False, True)), normal(B, 4, 3), normal(B, 4, 3, seed=1)),
        *(kron_state((False, False)), normal(B, 4, 3, seed=2), normal(B, 4, 3, seed=3)),
    ),
)
for update_U in (True, False):
    CASES[f"lra.LRA.update {update_U}"] = (
        lra_update(update_U, lra.LRA(2, preconditioner_init_scale=1.0)),
        (lra_state(), *(normal(B, 5, seed=k) for k in range(3))),
    )
for geometry in ("Q0.5EQ1.5", "QEQ", "QUAD", "EQ", "QEP", "QUAD4P"):
    CASES[f"dense.Dense.update {geometry}"] = (
        newton_update(dense.Dense(geometry)),
        (dense_state(), *(normal(B, 5, seed=k) for k in range(3))),
    )
CASES["dense.Dense.precondition"] = (dense.Dense().precondition, (dense_state(), normal(B, 5)))
CASES["kron.Kron.update first"] = (
    kron_update(kron.Kron(preconditioner_init_scale=None)),
    (
        kron_state((False, True))._replace(lipschitz=(np.zeros(B), np.zeros(B))),
        normal(B, 4, 3),
        normal(B, 4, 3, seed=1),
    ),
)
for method, diagonal in (
    ("eigen", (False, False)),
    ("eigen", (True, False)),
    ("inverse", (False, False)),
    ("inverse", (False, True)),
    ("newton_schulz", (False, False)),
    ("ekfac", (True, False)),
):
    CASES[f"kfac.KFAC {method} {diagonal}"] = (
        kfac_step(method),
        (kfac_state(method, diagonal), *kfac_factors(diagonal), SEEN, normal(B, 3, 4)),
    )
CASES["kfac.mean_eigenvalue"] = (
    kfac.mean_eigenvalue,
    (positive_definite(B, 4), np.array([0.5, 1.0, 0.1])),
)
CASES["kfac.eigenvalue_products"] = (kfac.eigenvalue_products, (eigen_of(4), eigen_of(3)))
CASES["kfac.where"] = (kfac.where, (SEEN, eigen_of(4), eigen_of(4, seed=1)))
CASES["kfac.KFAC.split_damping"] = (
    lambda A, G: kfac.KFAC("inverse").split_damping(A, G, 0.1, (4, 1)),
    (np.abs(normal(B)), np.array([0.5, 0.0, 2.0])),
)
CASES["kfac.KFAC.refresh_factor boost"] = (
    lambda factor, damping: kfac.KFAC("inverse").refresh_factor(factor, damping, boost=0.5).inverse,
    (factor_of("inverse", positive_definite(B, 4)), np.abs(normal(B))),
)
CASES["kfac.KFAC.apply products"] = (
    lambda A, G, ready, gradient, products: kfac.KFAC("ekfac").apply(
        A, G, ready, gradient, 0.1, products
    ),
    (eigen_of(4), eigen_of(3), SEEN, normal(B, 3, 4), np.abs(normal(B, 3, 4, seed=1))),
)

for name, likelihood in (("Categorical", Categorical()), ("Bernoulli", Bernoulli())):
    CASES[f"likelihoods.{name}.sample_gradient"] = (
        likelihood.sample_gradient,
        (normal(B, 2, 4), np.random.default_rng(8).random(likelihood.noise_shape((B, 2, 4)))),
    )
CASES["likelihoods.Gaussian.sample_gradient"] = (
    # Its noise has an axis of two before that of the stack.
    lambda x, u: Gaussian(0.3).sample_gradient(x, array_namespace(u).moveaxis(u, 1, 0)),
    (normal(B, 2, 4), np.random.default_rng(8).random((B, 2, 2, 4))),
)
for name, likelihood in (
    ("Categorical", Categorical()),
    ("Bernoulli", Bernoulli()),
    ("Gaussian", Gaussian(0.3)),
):
    CASES[f"likelihoods.{name}.square_root"] = (
        lambda x, rule=likelihood: rule.square_root(x, 1),
        (normal(B, 2, 4),),
    )

CASES["likelihoods.with_signs"] = (with_signs, (normal(B, 2, 4), normal(B, 2, seed=3)))

every_case = pytest.mark.parametrize(("function", "args"), list(CASES.values()), ids=list(CASES))


@also_eager_jax
@every_case
def test_a_stack_of_blocks_equals_a_loop_over_them(xp, function, args):
    """The loop runs in numpy, so this is also what makes all libraries agree."""
    together = leaves(xp.run(function, *xp.convert(args)))
    alone = [leaves(function(*map_tree(lambda x, i=i: x[i : i + 1], args))) for i in range(B)]
    for k, stack in enumerate(together):
        assert stack.shape[0] == B
        assert_close(stack, np.concatenate([parts[k] for parts in alone]))


@every_case
def test_inputs_are_left_alone_and_a_second_call_gives_the_same(xp, function, args):
    converted = xp.convert(args)
    first = xp.run(function, *converted)
    assert_identical(converted, args)
    assert_identical(xp.run(function, *converted), first)


@every_case
def test_single_precision_stays_single_and_agrees(xp, function, args):
    single = leaves(xp.run(function, *xp.convert(args, "float32")))
    double = leaves(function(*args))
    for x, expected in zip(single, double, strict=True):
        assert dtype_name(x) == ("float32" if expected.dtype == np.float64 else expected.dtype)
        assert_close(x, expected, rtol=2e-5)


def poison(args, value, which):
    """`args` with `value` in block 1 of floating leaf number `which`."""
    number = iter(range(len(leaves(args))))

    def leaf(x):
        if next(number) != which or x.dtype != np.float64:
            return x
        x = x.copy()
        x[1].reshape(-1)[:1] = value  # writes into the copy: a view of it
        return x

    return map_tree(leaf, args)


@every_case
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
def test_a_block_that_is_not_finite_harms_no_other(xp, function, args, value):
    clean = leaves(xp.run(function, *xp.convert(args)))
    for which in range(len(leaves(args))):
        results = leaves(xp.run(function, *xp.convert(poison(args, value, which))))
        for x, expected in zip(results, clean, strict=True):
            assert_close(to_numpy(x)[[0, 2]], to_numpy(expected)[[0, 2]])


# Lifted on purpose, or what eigenvalues are summed and multiplied into: it stays in single precision.
LIFTED = ("kfac.mean_eigenvalue", "kfac.eigenvalue_products", "kron.Kron.lifted")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("k") and name not in LIFTED])
def test_half_precision_goes_in_and_comes_out(name):
    """Factors and gradients in bfloat16 are lifted inside; state and directions keep their dtype."""
    function, args = CASES[name]
    torch = library("torch")
    halves = torch.convert(args, "bfloat16")
    rounded = library("numpy").convert(map_tree(to_numpy, halves), "float64")
    for x, expected in zip(leaves(function(*halves)), leaves(function(*rounded)), strict=True):
        if expected.dtype == np.float64:
            assert dtype_name(x) == "bfloat16"
            assert np.linalg.norm(to_numpy(x) - expected) < 0.05 * np.linalg.norm(expected)


# Parts of `apply` and `gram`, which are cases; functions of no stack.
OTHERS = {
    *("kronecker.is_diagonal", "kronecker.unfold", "kronecker.fold", "kronecker.apply_factor"),
    *("kronecker.diagonal_blocks", "kronecker.squares_are_cheap", "kronecker.factor_shape"),
    *("linalg.norm", "linalg.bilinear", "kfac.is_cheaper_by_rows", "kfac.probes_for"),
    "padding.size_classes",
    *("linalg.eye_like", "linalg.finite_marks", "linalg.inner_product", "step_size.kl_clip_coefficient"),
    "linalg.headroom",
    *("step_size.check_clip", "linalg.summed_gram", "statistics.normalized_over_batch"),
    *("linalg.grouped_products", "linalg.normed_row_scales", "statistics.grouped_second_moment_sum"),
    *("linalg.sums_in_single", "linalg.over_groups", "ekfac.grouped_second_moment_in_basis"),
}


@pytest.mark.parametrize(
    "module",
    [
        *(damping, dense, ekfac, explained, kfac, kron, kronecker, linalg, lra, moments, padding),
        *(statistics, step_size),
    ],
)
def test_every_public_function_is_a_case(module):
    short = module.__name__.rpartition(".")[2]
    own = {
        f"{short}.{name}"
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    }
    assert own - OTHERS <= {name.split()[0] for name in CASES}
