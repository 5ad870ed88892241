"""Linear algebra that the standard leaves out or leaves unsafe, over stacks of matrices.

A matrix that cannot be handled (not finite, not positive definite, solver gave up) comes back as NaN,
alone: its neighbours in the stack are unharmed, nothing raises, and nothing waits for a device.
Half precision is lifted to float32 inside and the result comes back in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from suite.core._namespace import (
    Array,
    Scalar,
    array_namespace,
    as_scalar,
    device_of,
    factorizations,
    lift,
    padded_axes,
)
from suite.core.checks import check_integer

_PROCRUSTES_STEP = 0.125  # below 1/4 the truncated rotation is orthogonal to 1e-3 (arXiv:2402.11858)


def transpose(x: Array) -> Array:
    """(..., m, n) -> (..., n, m)."""
    return array_namespace(x).matrix_transpose(x)


def transposed_times(x: Array, y: Array) -> Array:
    """xᵀ y: (..., n, m) and (..., n, k) -> (..., m, k), without a copy of xᵀ."""
    product: Array = factorizations(array_namespace(x)).transposed_times(x, y)
    return product


def times_transposed(x: Array, y: Array) -> Array:
    """x yᵀ: (..., m, n) and (..., k, n) -> (..., m, k), without a copy of yᵀ."""
    product: Array = factorizations(array_namespace(x)).times_transposed(x, y)
    return product


def gram(x: Array) -> Array:
    """xᵀ x: (..., m, n) -> (..., n, n), symmetric."""
    product: Array = factorizations(array_namespace(x)).gram(x)
    return product


def for_sums(x: Array) -> Array:
    """`x` as second moments are summed of it: as it is if `gram_in_single` multiplies that, else lifted.

    Products of two numbers of half precision are exact in single. On GPUs that multiply them as they
    are and sum in single that is several times faster.
    """
    return x if sums_in_single(x) else lift(x)


def sums_in_single(x: Array) -> bool:
    """Whether `for_sums` leaves `x` in half precision."""
    return bool(factorizations(array_namespace(x)).sums_in_single(x))


def gram_in_single(x: Array) -> Array:
    """`gram`, in at least single precision."""
    product: Array = factorizations(array_namespace(x)).gram_in_single(x)
    return product


def sum_of_squares(x: Array) -> Array:
    """Σ x² over the last axis, in at least single precision; `x` as of `for_sums`."""
    total: Array = factorizations(array_namespace(x)).sum_of_squares(x)
    return total


def summed_gram(x: Array) -> Array:
    """Σ x xᵀ over the first axis: (k, m, n) -> (m, m), symmetric; `x` as of `for_sums`."""
    total: Array = factorizations(array_namespace(x)).summed_gram(x)
    return total


def for_products(*factors: Array) -> tuple[Array, ...]:
    """Factors as they are multiplied with: in bfloat16 if all are and the device does that faster.

    That is about twice as fast and more, and what they multiply is rounded to bfloat16, too. Elsewhere,
    and in float16, whose range is short, in at least single precision.
    """
    fast = all(factorizations(array_namespace(x)).multiplies_as_it_is(x) for x in factors)
    return factors if fast else tuple(map(lift, factors))


def grouped_products(x: Array, y: Array, ends: Array) -> Array:
    """xᵀ y over the rows of each group: (rows, m), (rows, n) -> (groups, m, n).

    Args:
        ends: (groups,), integers: the row behind each group's last. Rows behind the last group's may be
            anything.
    """
    return over_groups(_transposed_matmul, x, y, ends)


def over_groups(
    function: Callable[..., Array], x: Array, y: Array, ends: Array, *matrices: Array
) -> Array:
    """What a `function` sums over rows, of each group.

    Args:
        function: of arrays (..., rows, m), (..., rows, n) and (..., p, q); rows of zeros add nothing.
        x, y: (rows, m), (rows, n).
        ends: see `grouped_products`.
        matrices: (groups, p, q), what the function needs of each group.

    Returns:
        (groups, m', n'), of the function's m' and n'.
    """
    sums: Array = factorizations(array_namespace(x)).over_groups(function, x, y, ends, *matrices)
    return sums


def _transposed_matmul(x: Array, y: Array) -> Array:
    return array_namespace(x).matmul(transpose(x), y)


def symmetrize(x: Array) -> Array:
    """(x + xᵀ) / 2."""
    return (x + transpose(x)) * 0.5


def times_block_diagonal(x: Array, blocks: Array) -> Array:
    """x diag(B_1, ..., B_c) for rows (..., m, c n) and blocks (..., c, n, n)."""
    product: Array = factorizations(array_namespace(x)).times_block_diagonal(x, blocks)
    return product


def eye_like(x: Array) -> Array:
    """The identity of the size, dtype and device of the matrices (..., n, n) in `x`: (1, ..., n, n)."""
    xp = array_namespace(x)
    return padded_axes(xp.eye(x.shape[-1], dtype=x.dtype, device=device_of(x)), x.ndim)


def diagonal(x: Array) -> Array:
    """(..., n, n) -> (..., n); not to be written to, as it may be a view."""
    found: Array = factorizations(array_namespace(x)).diagonal(x)
    return found


def trace(x: Array) -> Array:
    """(..., n, n) -> (...): the sum of each diagonal."""
    total: Array = factorizations(array_namespace(x)).trace(x)
    return total


def traces(stacks: Sequence[Array]) -> Array:
    """Traces of stacks (k, n, n), and sums of rows of stacks (k, n), of any n: (Σ k,), in their order.

    Of matrices as one product, for a compiler has less to do than for one of each size. In at least
    single precision.
    """
    xp, device = array_namespace(*stacks), device_of(stacks[0])
    dtype = max((lift(x).dtype for x in stacks), key=lambda dtype: int(xp.finfo(dtype).bits))
    rows = [xp.astype(diagonal(x), dtype) for x in stacks if x.ndim == 3]
    widest, joined = max((x.shape[-1] for x in rows), default=0), None
    padded = []
    for x in rows:
        zeros = xp.zeros((x.shape[0], widest - x.shape[-1]), dtype=dtype, device=device)
        padded.append(xp.concat([x, zeros], axis=-1))
    if padded:
        joined = xp.concat(padded, axis=0)
        with factorizations(xp).full_precision(joined):
            joined = xp.matmul(joined, xp.ones((widest,), dtype=dtype, device=device))
    found, start = [], 0
    for x in stacks:
        if joined is not None and x.ndim == 3:
            found.append(joined[start : start + x.shape[0]])
            start += x.shape[0]
        else:  # vectors, and these may be long
            found.append(xp.sum(xp.astype(x, dtype), axis=-1))
    total: Array = xp.concat(found, axis=0)
    return total


def inner_product(x: Array, y: Array) -> Array:
    """Σ x y over all entries, (), in at least single precision."""
    total: Array = factorizations(array_namespace(x, y)).inner_product(lift(x), lift(y))
    return total


def finite_marks(x: Array, power: float = 1) -> Array:
    """(...) -> (m,), few numbers, of which one is not finite if and only if an entry of x is not.

    Of a matrix its product with a constant matrix, which compilers have ready; comparisons they compile
    for each shape. A vector is returned as it is, or a power of it.

    Args:
        power: at least 1; with 2 also where an entry, or a matrix's row's sum, is so large that its
            square is not finite in at least single precision, and so on.
    """
    xp = array_namespace(x)
    constant = 0.0
    largest = float(xp.finfo(x.dtype).max)
    if power > 1 and largest > 1e30:  # the powers of float16 are finite in single precision
        constant = headroom(largest, power)
    if x.ndim > 1 and x.shape[-1] != 1:
        shape = (x.shape[-1], 2)  # one column is slower
        x = x @ xp.full(shape, constant, dtype=x.dtype, device=device_of(x))
    elif constant:  # compilers join factors that are constant, and what the caller multiplies with
        x = xp.abs(x) ** power
    return xp.reshape(x, (-1,))


def headroom(largest: float, power: float) -> float:
    """By what numbers can be multiplied whose `power` is not above the largest of a dtype."""
    return 2.0 ** round(math.log2(largest) * (1 - 1 / power))


def norm(x: Array) -> Array:
    """√Σ x², over all axes; in units of the largest entry, so that no square overflows."""
    xp = array_namespace(x)
    x = lift(x)
    largest = xp.max(xp.abs(x), axis=tuple(range(x.ndim)))
    unit = x / _at_least_tiny(largest)
    return largest * xp.sqrt(xp.sum(unit * unit))


def row_norms(x: Array) -> Array:
    """(rows, ...) -> (rows,): the norm of everything in a row."""
    xp = array_namespace(x)
    flat = xp.reshape(lift(x), (x.shape[0], -1))
    return xp.sqrt(xp.sum(flat * flat, axis=-1))


def normed_row_scales(direction: Array, magnitude: Array) -> Array:
    """(rows,): how many times longer rows of magnitude * direction / ‖direction‖ are than direction's.

    Args:
        direction: (rows, ...).
        magnitude: (), or with as many axes as `direction`, of length 1 where norms are taken over them.
    """
    xp = array_namespace(direction)
    direction, magnitude = lift(direction), lift(magnitude)
    shape = magnitude.shape if magnitude.ndim else (1,) * direction.ndim
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    lengths = xp.sqrt(xp.sum(direction * direction, axis=axes, keepdims=True))
    return row_norms(direction * (magnitude / lengths)) / row_norms(direction)


def bilinear(u: Array, x: Array, v: Array) -> Array:
    """uᵀ x v for x (m, n), u (m,), v (n,)."""
    xp = array_namespace(x)
    return xp.sum(lift(u) * xp.matmul(lift(x), lift(v)))


def condition_number(x: Array) -> Array:
    """About ‖x‖₂ ‖x⁻¹‖₂, the largest over the smallest eigenvalue, at the cost of one inverse.

    Both from below, by power iterations: within a few percent in most cases.

    Args:
        x: (..., n, n), symmetric positive semi-definite.

    Returns:
        (...); 1e38 for a matrix that is singular to its precision, NaN for one that is not finite.
    """
    xp = array_namespace(x)
    safe, finite = _guard(x)
    found = _spectral_norm(safe) * _spectral_norm(damped_inverse(safe, 0.0))
    found = xp.where(found < 1e38, found, 1e38)  # NaN, too
    return xp.where(finite[..., 0, 0], found, float("nan"))


def _spectral_norm(x: Array, iterations: int = 16) -> Array:
    """‖x‖₂ of symmetric x, from below, by power iterations from the row of largest norm: (...)."""
    xp = array_namespace(x)
    largest = _or_one(largest_entry(x, (-2, -1), keepdims=True))
    x = x / largest
    vector = factorizations(xp).largest_row(x, sum_of_squares(x))
    for _ in range(iterations):
        length = xp.sqrt(sum_of_squares(vector))
        vector = xp.matmul(vector / _or_one(length)[..., None], x)
    return xp.sqrt(sum_of_squares(vector))[..., 0] * largest[..., 0, 0]


def add_diagonal(x: Array, value: Scalar) -> Array:
    """`x` + `value` I, for (..., n, n) matrices and a number or a (...) array."""
    xp = array_namespace(x)
    value = as_scalar(value, x)
    if not isinstance(value, float):
        value = xp.reshape(value, (*value.shape, 1, 1))
    return factorizations(xp).add_diagonal(x, value)


def _guard(x: Array) -> tuple[Array, Array]:
    """Finite matrices to work on, and which (..., 1, 1) were finite to begin with."""
    xp = array_namespace(x)
    x = lift(x)
    finite = factorizations(xp).are_finite(x)[..., None, None]
    return usually(finite, x, lambda: eye_like(x)), finite


def usually(condition: Array, x: Array, other: Callable[[], Array]) -> Array:
    """`x` where `condition`, else `other()`; where the host can see that it always holds, `x` itself.

    Args:
        condition: broadcasts to `x`, which must not be NaN where it holds.
        other: of a shape and dtype that do not change those of `x`.
    """
    chosen: Array = factorizations(array_namespace(x)).usually(condition, x, other)
    return chosen


def damped_inverse(x: Array, damping: Scalar) -> Array:
    """(`x` + `damping` I)⁻¹ by Cholesky, symmetric to the last bit.

    Args:
        x: (..., n, n), symmetric positive semi-definite.
        damping: a number or (...), added to the diagonal.

    Returns:
        (..., n, n); NaN for a matrix that is not finite or, damped, not positive definite.
    """
    damped = add_diagonal(lift(x), damping)
    library = factorizations(array_namespace(x))
    with library.full_precision(x):
        inverse: Array = library.cholesky_inverse(damped)
    return inverse


def newton_schulz_inverse(x: Array, damping: Scalar, start: Array, iterations: int) -> Array:
    """(`x` + `damping` I)⁻¹ by matrix products alone, for devices on which factorizations are slow.

        X ← X + X R,   R = I - M X,   M = x + damping I,   so that R ← R²

    The start I / b with b = min(‖M‖_∞, ‖M‖_F) >= ‖M‖₂ leaves R = I - M / b, with eigenvalues from 0 to
    1 - 1/κ, κ = b / λ_min(M): X grows towards the inverse from below, to within about 1 % of it in
    ⌈log₂ κ + 2.2⌉ iterations (6 for κ = 10, 13 for 1e3, 19 for 1e5), and each further one squares the
    error. A guess X₀ with ‖I - M X₀‖_F = r < 1 takes ⌈log₂(-4.6 / ln r)⌉ (1 for r = 0.1, 3 for 0.5, 6
    for 0.9). An iteration is two products. Rounding leaves a relative error of about 1e-8 κ in single
    precision, in which products run here also where others run in less (TF32).

    Sources: Schulz 1933; Ben-Israel & Cohen 1966 for scaled starts.

    Args:
        x: (..., n, n), symmetric positive semi-definite.
        damping: a number or (...), added to the diagonal.
        start: (..., n, n), a guess such as the last inverse; zeros if there is none. Used for each
            matrix for which r^(2^iterations) <= 0.01, so that it is sure to converge; else I / b is.
        iterations: how many, at least 1; the same for all matrices.

    Returns:
        (..., n, n), symmetric to the last bit; NaN for a matrix that is not finite, or whose last
        iteration still changed X by more than 10 % (Frobenius norm; the next would change it by about
        the square of that): it needs more iterations, or is not positive definite.
    """
    check_integer("iterations", iterations, at_least=1)
    xp = array_namespace(x)
    safe, finite = _guard(add_diagonal(lift(x), damping))
    safe = symmetrize(safe)
    bound = _norm_bound(safe)
    M = safe / bound  # of norm 1, and X its inverse: nothing over- or underflows
    identity = eye_like(M)
    guess = symmetrize(xp.astype(start, M.dtype)) * bound
    # Less than: in single precision the bound of 27 iterations and more rounds to 1, which zeros have.
    converges = _frobenius(identity - xp.matmul(M, guess)) < 0.01 ** (0.5**iterations)
    X = xp.where(converges, guess, identity)

    def iterate(X: Array, change: Array) -> tuple[Array, Array]:
        # Symmetrizing X in here would make it unstable for κ of 1e6 in single precision.
        change = xp.matmul(X, identity - xp.matmul(M, X))
        return X + change, change

    with factorizations(xp).full_precision(x):
        X, change = factorizations(xp).repeated(iterate, (X, X), iterations)
    size = _frobenius(X)
    converged = (_frobenius(change) <= 0.1 * size) & xp.isfinite(size)  # False for NaN
    return xp.where(finite & converged, symmetrize(X) / bound, float("nan"))


def _frobenius(x: Array) -> Array:
    """(..., m, n) -> (..., 1, 1): the root of the sum of squares."""
    xp = array_namespace(x)
    return xp.sqrt(xp.sum(x * x, axis=(-2, -1), keepdims=True))


def _norm_bound(x: Array) -> Array:
    """min(‖x‖_∞, ‖x‖_F), two upper bounds of ‖x‖₂ for symmetric x: (..., 1, 1), 1 for a zero matrix."""
    xp = array_namespace(x)
    rows = _or_one(xp.max(xp.sum(xp.abs(x), axis=-1, keepdims=True), axis=-2, keepdims=True))
    return xp.minimum(rows, rows * _or_one(_frobenius(x / rows)))


def eigh(x: Array) -> tuple[Array, Array]:
    """Eigenvalues, clipped at zero from below, and eigenvectors of positive semi-definite matrices.

    Args:
        x: (..., n, n), symmetric; the rounding errors that make an eigenvalue negative are removed.

    Returns:
        values (..., n), ascending, and vectors (..., n, n), one a column; NaN for a matrix that is
        not finite or on which the solver did not converge.
    """
    xp = array_namespace(x)
    values, vectors = factorizations(xp).eigh(lift(x))
    # maximum(NaN, 0) is NaN in the standard, so a failed block stays visible.
    return xp.maximum(values, xp.zeros_like(values)), vectors


def warm_eigh(x: Array, vectors: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors of positive semi-definite `x`, improved from those of a near matrix.

        Q R = x V,   values = diag(Qᵀ x Q)

    One step of orthogonal iteration. Repeated on one matrix it converges to the eigenvectors, the angle
    between two of them by λ_j / λ_i < 1 a step. At any time Q is orthonormal and the values are the best
    diagonal for it; what is missing is the off-diagonal part of Qᵀ x Q.

    Source: Vyas et al. 2024 (arXiv:2409.11321), algorithm 4 (SOAP's refresh of its eigenbasis); the
    columns are sorted as in its reference implementation.

    Args:
        x: (..., n, n), symmetric.
        vectors: (..., n, n), orthonormal columns: an earlier basis, or the identity.

    Returns:
        values (..., n), >= 0 and roughly descending, and vectors (..., n, n), one a column; NaN for a
        matrix or basis that is not finite.
    """
    xp = array_namespace(x)
    safe, finite = _guard(x)
    basis, finite_basis = _guard(vectors)
    finite = finite & finite_basis
    safe = symmetrize(safe)
    with factorizations(xp).full_precision(x):
        image = xp.matmul(safe, basis)
        # QR trusts its first columns most. Those of small eigenvalues are rounding errors: they come
        # last, and those of null vectors are completed to a basis.
        order = xp.argsort(-xp.sum(basis * image, axis=-2), axis=-1, stable=True)[..., None, :]
        image = xp.take_along_axis(image, xp.broadcast_to(order, image.shape), axis=-1)
        Q = factorizations(xp).qr(image)
        values = xp.sum(Q * xp.matmul(safe, Q), axis=-2)
    values = xp.maximum(values, xp.zeros_like(values))
    nan = float("nan")
    return xp.where(finite[..., 0], values, nan), xp.where(finite, Q, nan)


def solve_triangular(x: Array, y: Array, *, upper: bool) -> Array:
    """x⁻¹ y for triangular x (..., n, n) and y (..., n, k); not finite for a singular x."""
    return factorizations(array_namespace(x)).solve_triangular(lift(x), lift(y), upper=upper)


def inverse(x: Array) -> Array:
    """x⁻¹ of any square matrices (..., n, n), by QR; NaN for one that is singular or not finite."""
    xp = array_namespace(x)
    safe, finite = _guard(x)
    with factorizations(xp).full_precision(x):
        Q = factorizations(xp).qr(safe)
        R = xp.triu(xp.matmul(transpose(Q), safe))
        regular = xp.all(xp.sum(xp.abs(R * eye_like(R)), axis=-1) > 0, axis=-1)[..., None, None]
        solved = solve_triangular(xp.where(regular, R, eye_like(R)), transpose(Q), upper=True)
    return xp.where(finite & regular, solved, float("nan"))


def rotate_towards_symmetry(q: Array, chosen: Array | None = None) -> Array:
    """One step of the orthogonal Procrustes problem min ‖U Q - I‖ over rotations U.

    U = exp(a R) ≈ I + a R + ½ (a R)², R = (Qᵀ - Q) / ‖Qᵀ - Q‖, with the best a up to a bound. P = QᵀQ
    does not change but for the truncation. Source: Li 2024 (arXiv:2402.11858).

    Args:
        q: (..., n, n).
        chosen: (...) bool, the matrices to rotate; None: all. The others come back as they are.
    """
    xp = array_namespace(q)
    q = lift(q)
    R = transpose(q) - q
    bound = spectral_norm_bound(R)[..., None, None]
    # What is symmetric but for rounding stays as it is: the direction to turn it in would be noise, and
    # a derivative by q that noise divided by the rounding.
    rounding = 16 * float(xp.finfo(q.dtype).eps) * xp.abs(trace(q))[..., None, None]
    turns = bound > rounding
    R *= xp.astype(turns, q.dtype) / xp.where(turns, bound, 1.0)
    RQ = xp.matmul(R, q)
    RRQ = xp.matmul(R, RQ)
    slope, curvature = trace(RQ)[..., None, None], trace(RRQ)[..., None, None]
    concave = curvature < 0
    best = -slope / xp.where(concave, curvature, -1.0)
    a = xp.where(concave, xp.minimum(best, _PROCRUSTES_STEP), _PROCRUSTES_STEP)
    if chosen is not None:
        a = xp.where(chosen[..., None, None], a, 0.0)
    # In place of fresh arrays: on a CPU a new one costs more than the arithmetic.
    RRQ *= 0.5 * a
    RRQ += RQ
    RRQ *= a
    RRQ += q
    return RRQ


def spectral_norm_bound(x: Array) -> Array:
    """A cheap lower bound of ‖x‖₂ for symmetric or skew-symmetric x, within a factor that is near 1.

    Two power iterations started from the row of largest norm, on x scaled by its largest entry so that
    nothing over- or underflows. Three matrix-vector products.

    Source: Li 2024 (arXiv:2402.11858), the norm bound of its reference implementation.

    Args:
        x: (..., n, n).

    Returns:
        (...); 0 for a zero matrix.
    """
    xp = array_namespace(x)
    x = lift(x)
    largest = largest_entry(x, (-2, -1), keepdims=True)
    # Of a zero matrix, as at first, it is zero, and so are its derivatives: no 0 / 0, and no root of 0.
    x = x / _or_one(largest)
    # No entry of x exceeds 1, and one is 1, so that the row's norm is at least 1; entries of `twice` are
    # at most n². No norm below leaves the range of single precision up to sides of millions.
    once = xp.matmul(factorizations(xp).largest_row(x, sum_of_squares(x)), x)
    twice = xp.matmul(once, x)
    before, after = sum_of_squares(once), sum_of_squares(twice)
    gain = xp.sqrt(_at_least_tiny(after / _or_one(before)))
    return (largest[..., 0] * gain)[..., 0]


def largest_entry(x: Array, axis: tuple[int, ...], *, keepdims: bool = False) -> Array:
    """max |x| over axes."""
    return factorizations(array_namespace(x)).largest_entry(x, axis, keepdims=keepdims)


def root_mean_square(x: Array, axis: tuple[int, ...]) -> Array:
    """√(mean of x²) over axes, which stay with size 1; of numbers of any size, 1e30 or 1e-30."""
    xp = array_namespace(x)

    def scaled() -> Array:
        largest = _at_least_tiny(largest_entry(x, axis, keepdims=True))
        norm = xp.linalg.vector_norm(x / largest, axis=axis, keepdims=True)
        return largest * (norm / math.prod([x.shape[a] for a in axis]) ** 0.5)

    return factorizations(xp).root_mean_square(x, axis, scaled)


def _at_least_tiny(x: Array) -> Array:
    """Sizes that are no smaller than the smallest normal number: the denominators of what may be 0."""
    xp = array_namespace(x)
    return xp.maximum(x, float(xp.finfo(x.dtype).smallest_normal))


def _or_one(x: Array) -> Array:
    """`x` where it is positive, else 1."""
    xp = array_namespace(x)
    return xp.where(x > 0, x, 1.0)
