"""Factorizations for jax.numpy.

On the CPU a stack is walked matrix by matrix: jaxlib's batched LAPACK kernels run on the thread pool
that they wait for, and as many of them at once as there are cores stop for ever (seen with jaxlib
0.10.2). Elsewhere the stack is one batched call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from suite.core import _numpy

_LARGEST_WHOLE = 512  # side of triangles whose zeros a CPU multiplies, too; else it compiles for longer

# In the standard's words; the compiler joins them.
pack, unpack, times_block_diagonal = _numpy.pack, _numpy.unpack, _numpy.times_block_diagonal
over_groups = _numpy.over_groups


def _over_stack(
    function: Callable[..., Any],
    *arrays: jax.Array,
    vectors: int = 0,
    on_cpu: Callable[..., Any] | None = None,
) -> Any:
    """`function` of matrices (n, n), which returns so many vectors (n,) and a matrix."""
    batch = arrays[0].shape[:-2]
    flat = tuple(x.reshape(-1, *x.shape[-2:]) for x in arrays)
    if flat[0].shape[0] == 1:  # no loop to compile
        in_turn = _alone
    elif len(flat) == 1 and flat[0].shape[0] > 0:
        in_turn = functools.partial(_in_place, vectors)
    else:  # many stacks may vary differently over devices; a loop over none would not be
        in_turn = _mapped
    cpu = functools.partial(in_turn, on_cpu or function)
    if jax.default_backend() == "cpu":  # nothing else to choose from, which would take time to trace
        out = cpu(*flat)
    else:
        out = lax.platform_dependent(*flat, cpu=cpu, default=jax.vmap(function))
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out)


def _alone(function: Callable[..., Any], *stacks: jax.Array) -> Any:
    """`function` of stacks of one matrix."""
    return jax.tree.map(lambda x: x[None], function(*(x[0] for x in stacks)))


def _mapped(function: Callable[..., Any], *stacks: jax.Array) -> Any:
    """`function` of one matrix after the other."""
    return lax.map(lambda matrices: function(*matrices), stacks)


def _in_place(vectors: int, function: Callable[..., Any], stack: jax.Array) -> Any:
    """`_mapped` of one stack that is not empty; results take the place of its matrices."""

    def step(i: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
        i = jnp.asarray(i, jnp.uint32)  # never negative, which need not be asked then
        new = function(lax.dynamic_index_in_dim(found[-1], i, keepdims=False))
        new = new if vectors else (new,)
        return [lax.dynamic_update_index_in_dim(x, y, i, 0) for x, y in zip(found, new, strict=True)]

    found = lax.fori_loop(0, stack.shape[0], step, [*[stack[..., 0]] * vectors, stack])
    return tuple(found) if vectors else found[0]


def _cholesky_inverse(x: jax.Array) -> jax.Array:
    # LAPACK's L⁻¹ is in memory L⁻ᵀ row by row. The barrier has the compiler leave it at that, which
    # takes less time to compile and to run; where the product is in parts it does not.
    root = lax.optimization_barrier(_inverse_root(x).T)
    return _symmetric(times_transposed(root, root))


def _large_cholesky_inverse(x: jax.Array) -> jax.Array:
    """`_cholesky_inverse`, its product without most of the triangle's zeros."""
    root, k = _inverse_root(x), x.shape[-1] // 2
    below = transposed_times(root[k:, k:], root[k:])
    inverse = lax.dynamic_update_slice(jnp.zeros_like(x), gram(root[:, :k]), (0, 0))
    inverse = lax.dynamic_update_slice(inverse, below, (k, 0))
    return _symmetric(lax.dynamic_update_slice(inverse, below[:, :k].T, (0, k)))


def _inverse_root(x: jax.Array) -> jax.Array:
    """L⁻¹ of x = L Lᵀ, by LAPACK and its like; where there is none its last row is NaN.

    So the inverse is NaN throughout. Of infinities on the diagonal alone there would be a finite one.
    """
    marked = jnp.where(jnp.isfinite(x), x, jnp.nan)
    factor = lax.linalg.cholesky_p.bind(marked)  # the solver does not read what is above the diagonal
    eye = jnp.eye(x.shape[-1], dtype=x.dtype)
    return lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True)


def _symmetric(inverse: jax.Array) -> jax.Array:
    return (inverse + inverse.T) * jnp.asarray(0.5, inverse.dtype)


def _eigh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    finite = are_finite(x)
    # The solver may never come back from what is not finite.
    safe = jnp.where(finite, x, jnp.zeros_like(x))
    vectors, values = lax.linalg.eigh(safe)
    mark = jnp.where(finite, 1, jnp.nan).astype(x.dtype)
    return values * mark, vectors * mark


def _inverses_of_two(x: jax.Array) -> jax.Array:
    """`_cholesky_inverse` of a whole stack at once: of scales and shifts there are thousands."""
    a, b, c = x[..., 0, 0], x[..., 1, 0], x[..., 1, 1]
    ratio = b / a
    rest = c - ratio * b  # what Cholesky leaves of c
    corner = 1 / rest
    beside = -ratio * corner
    inverse = _two_by_two(1 / a - beside * ratio, beside, corner)
    positive = (a > 0) & (rest > 0) & jnp.isfinite(a) & jnp.isfinite(c)
    fine = positive & jnp.all(jnp.isfinite(inverse), axis=(-2, -1))
    return jnp.where(fine[..., None, None], inverse, jnp.nan)


def _eigh_of_two(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_eigh` of a whole stack at once, by one rotation (Golub & Van Loan 2013, section 8.5.2)."""
    x = (x + jnp.matrix_transpose(x)) * 0.5
    a, b, c = x[..., 0, 0], x[..., 1, 0], x[..., 1, 1]
    tau = (c - a) / jnp.where(b == 0, 1, 2 * b)
    tangent = jnp.where(tau < 0, -1, 1) / (jnp.abs(tau) + jnp.hypot(tau, jnp.ones_like(tau)))
    tangent = jnp.where(b == 0, 0, tangent).astype(x.dtype)
    cosine = lax.rsqrt(1 + tangent * tangent)
    sine = tangent * cosine
    first, second = a - tangent * b, c + tangent * b
    swap = first > second
    values = jnp.stack([jnp.minimum(first, second), jnp.maximum(first, second)], axis=-1)
    low, high = jnp.stack([cosine, -sine], axis=-1), jnp.stack([sine, cosine], axis=-1)
    chosen = swap[..., None]
    vectors = jnp.stack([jnp.where(chosen, high, low), jnp.where(chosen, low, high)], axis=-1)
    mark = jnp.where(are_finite(x), 1, jnp.nan).astype(x.dtype)
    return values * mark[..., None], vectors * mark[..., None, None]


def _two_by_two(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.stack([a, b, b, c], axis=-1).reshape(*a.shape, 2, 2)


# Compiled, so that a call outside jit compiles once and not every time; inside jit this changes nothing.


@jax.jit
def cholesky_inverse(x: jax.Array) -> jax.Array:
    """Inverses, symmetric; NaN throughout that of a matrix that is not finite and positive definite."""
    if x.shape[-1] == 2:
        return _inverses_of_two(x)
    on_cpu = _large_cholesky_inverse if x.shape[-1] > _LARGEST_WHOLE else None
    return _over_stack(_cholesky_inverse, x, on_cpu=on_cpu)


@jax.jit
def eigh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues and -vectors of (x + xᵀ) / 2; NaN where that is not finite or the solver gave up."""
    if x.shape[-1] == 2:
        return _eigh_of_two(x)
    values, vectors = _over_stack(_eigh, x, vectors=1)
    return values, vectors


def diagonal(x: jax.Array) -> jax.Array:
    """(..., n, n) -> (..., n), as a slice with a stride: a gather or a product compiles for longer."""
    flat = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])  # -1 is unknown of no matrices
    return lax.slice_in_dim(flat, 0, None, x.shape[-1] + 1, axis=-1)  # indexing would be a gather


def trace(x: jax.Array) -> jax.Array:
    """The sum of each diagonal; as a product, for which no loops are compiled."""
    return jnp.matmul(diagonal(x), jnp.ones(x.shape[-1], x.dtype), precision="highest")


def are_finite(x: jax.Array) -> jax.Array:
    """(..., n, n) -> (...): whether all entries are finite; as a product, see `trace`."""
    zeros = jnp.zeros((x.shape[-1], 2), x.dtype)
    marks = transposed_times(jnp.matmul(x, zeros), jnp.broadcast_to(zeros, (*x.shape[:-1], 2)))
    return jnp.isfinite(marks[..., 0, 0])


def largest_entry(x: jax.Array, axis: tuple[int, ...], *, keepdims: bool) -> jax.Array:
    """max |x| over axes; |x| is no array, for the compiler joins the two."""
    return jnp.max(jnp.abs(x), axis=axis, keepdims=keepdims)


def largest_row(x: jax.Array, size: jax.Array) -> jax.Array:
    """The row of (..., n, n) whose `size`, (..., n), is largest, (..., 1, n); as a product."""
    chosen = jax.nn.one_hot(jnp.argmax(size, axis=-1), x.shape[-1], dtype=x.dtype)
    return jnp.matmul(chosen[..., None, :], x)


def root_mean_square(x: jax.Array, axis: tuple[int, ...], other: Callable[[], jax.Array]) -> jax.Array:
    """√(mean of x²) over axes, as `other()` has it."""
    return other()


def repeated(function: Callable[..., Any], start: tuple[jax.Array, ...], count: int) -> Any:
    """See `_numpy.repeated`; as a loop, for which one round is compiled."""
    return lax.fori_loop(0, count, lambda _, arrays: function(*arrays), start)


def inner_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Σ x y over all entries."""
    # Not as one contraction: where several axes are sharded over several axes of a mesh, XLA's
    # partitioner may leave each device with a sum of its own (jaxlib 0.10.2). jax 0.6 compiles sums of
    # products several times as long as products of vectors, for which what is sharded is gathered.
    if jax.__version_info__ < (0, 7):
        return jnp.vdot(x, y, precision="highest")
    return jnp.sum(x * y)


def wrapping_product(x: jax.Array, factor: int) -> jax.Array:
    """int32 times a number modulo 2³²."""
    return x * factor


def add_diagonal(x: jax.Array, value: Any) -> jax.Array:
    """x + value I."""
    # Axes in front are written out: `jax_numpy_rank_promotion` may be set to refuse them otherwise.
    axes = max(x.ndim, jnp.ndim(value))
    parts = x, jnp.eye(x.shape[-1], dtype=x.dtype), jnp.asarray(value, x.dtype)
    x, eye, value = (lax.expand_dims(part, range(axes - part.ndim)) for part in parts)
    return x + value * eye


def multiplies_as_it_is(x: jax.Array) -> bool:
    """Whether products of this dtype are a device's fastest: of bfloat16 not on CPUs."""
    return x.dtype == jnp.bfloat16 and jax.default_backend() != "cpu"


def usually(condition: jax.Array, x: jax.Array, other: Callable[[], Any]) -> jax.Array:
    """`x` where the condition holds and it is a number, else `other()`.

    Asked of every entry, whether it is NaN: of a choice that holds for whole rows the compiler makes a
    loop for either answer, and takes two to three times as long for it.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # no integer is NaN
        return jnp.where(condition, x, other())
    return _chosen(condition, x, other())


@jax.jit  # outside of any other `jax.debug_nans` would find the mark; inside this changes nothing
def _chosen(condition: jax.Array, x: jax.Array, other: jax.Array) -> jax.Array:
    shape = condition.shape
    mark = lax.select(condition, jnp.zeros(shape, x.dtype), jnp.full(shape, jnp.nan, x.dtype))
    return lax.select(jnp.isnan(x + mark), jnp.broadcast_to(other, x.shape), x)


def transposed_times(x: jax.Array, y: jax.Array) -> jax.Array:
    """xᵀ y."""
    return _contract(x, y, -2)


def times_transposed(x: jax.Array, y: jax.Array) -> jax.Array:
    """x yᵀ."""
    return _contract(x, y, -1)


def _contract(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """As one operation: a transposition before it is a copy where there are more axes than two."""
    batch, summed = tuple(range(x.ndim - 2)), (x.ndim + axis,)
    return lax.dot_general(x, y, ((summed, summed), (batch, batch)))


def gram(x: jax.Array) -> jax.Array:
    """xᵀ x; the compiler decides how."""
    return transposed_times(x, x)


def gram_in_single(x: jax.Array) -> jax.Array:
    """xᵀ x in at least single precision."""
    return gram(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x)


def sums_in_single(x: jax.Array) -> bool:
    """See `_numpy.sums_in_single`; TF32, which products of float32 are by default, is exact for them."""
    del x
    return False


def full_precision(x: jax.Array) -> Any:
    """Inside, products of single precision are of that, whatever is set for others (TF32)."""
    del x
    return jax.default_matmul_precision("highest")


def parts(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """`x`: the compiler decides what is made at once."""
    del count
    return (x,)


def work_of_a_launch(x: jax.Array) -> int:
    """See `_numpy.work_of_a_launch`: compiled, operations start by themselves."""
    del x
    return 0


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Σ x² over the last axis."""
    return jnp.sum(x * x, axis=-1)


def summed_gram(x: jax.Array) -> jax.Array:
    """Σ x xᵀ over the first axis of (k, m, n)."""
    return jnp.tensordot(x, x, axes=((0, 2), (0, 2)))


def correlations(
    x: jax.Array, kernel: tuple[int, int], dilation: tuple[int, int], groups: int
) -> jax.Array:
    """See `_numpy.correlations`; written as the gradient of a convolution's kernel is."""
    n, _, height, width = x.shape
    below, beside = ((k - 1) * d for k, d in zip(kernel, dilation, strict=True))

    def correlate(x: jax.Array) -> jax.Array:
        # XLA's CPU backend brings axes into this order by itself, but not inside of a cond or a loop:
        # there any other takes some 30 times as long (jaxlib 0.10.2).
        sums = lax.conv_general_dilated(
            jnp.transpose(x, (1, 2, 3, 0)),
            jnp.transpose(x, (2, 3, 0, 1)),
            tuple(dilation),
            ((0, below), (beside, beside)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.transpose(sums, (0, 3, 1, 2))

    if groups == 1:
        sums = correlate(x)[None]
    else:
        sums = jax.vmap(correlate, 1)(x.reshape(n, groups, -1, height, width))
    return jnp.transpose(sums, (0, 3, 4, 2, 1))


@jax.jit
def qr(x: jax.Array) -> jax.Array:
    """The orthonormal factor of finite square matrices, by Householder reflections."""
    return _over_stack(lambda m: lax.linalg.qr(m)[0], x)


@functools.partial(jax.jit, static_argnames="upper")
def solve_triangular(x: jax.Array, y: jax.Array, *, upper: bool) -> jax.Array:
    """The solution of x z = y for a stack of triangular matrices x."""
    return _over_stack(
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=not upper), x, y
    )
