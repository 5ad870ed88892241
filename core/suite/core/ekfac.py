"""EKFAC: second moments of the gradient measured in K-FAC's eigenbasis.

K-FAC's eigenbasis Q_A ⊗ Q_G is kept, and its eigenvalues d_G d_Aᵀ are replaced by what the gradients
of single rows really have there,

    S = E[(Q_Gᵀ g aᵀ Q_A)²] = E[(Q_Gᵀ g)² ((Q_Aᵀ a)²)ᵀ]   (elementwise squares),

the diagonal closest to the Fisher matrix in that basis, in Frobenius norm, where rows are examples.
Where several rows belong to one (positions, tokens) they count one by one, as in K-FAC-expand; George
et al. square the sum over an example's rows.

Source: George et al. 2018 (arXiv:1806.03884), section 3.
"""

from __future__ import annotations

from suite.core import linalg, moments
from suite.core._namespace import Array, Scalar, array_namespace, lift
from suite.core.kfac import Eigen, eigenvalue_products


def second_moment_in_basis(
    inputs: Array,
    outputs: Array,
    vectors_A: Array | None,
    vectors_G: Array | None,
    *,
    bias: bool = False,
) -> Array:
    """Σ over rows of (Q_Gᵀ g)² ((Q_Aᵀ a)²)ᵀ.

    Args:
        inputs: (..., rows, d_in - bias), rows a.
        outputs: (..., rows, d_out), rows g.
        vectors_A: (..., d_in, d_in), eigenvectors as columns; None for the identity.
        vectors_G: (..., d_out, d_out) or None.
        bias: append the coordinate 1 to every a.

    Returns:
        (..., d_out, d_in), in at least single precision.
    """
    xp = array_namespace(inputs)
    a, g = lift(inputs), lift(outputs)
    if vectors_A is None:
        if bias:
            a = xp.concat([a, xp.zeros_like(a[..., :1]) + 1], axis=-1)
    else:
        vectors_A = xp.astype(vectors_A, a.dtype)
        # The coordinate 1 meets the last row of Q_A; no column of ones is made.
        a = xp.matmul(a, vectors_A[..., : a.shape[-1], :])
        a = a + vectors_A[..., -1:, :] if bias else a
    if vectors_G is not None:
        g = xp.matmul(g, xp.astype(vectors_G, g.dtype))
    return linalg.transposed_times(g * g, a * a)


def grouped_second_moment_in_basis(
    inputs: Array, outputs: Array, ends: Array, vectors_A: Array | None, vectors_G: Array | None
) -> Array:
    """`second_moment_in_basis` of groups of rows that are one behind the other, each in its own basis.

    Args:
        inputs, outputs: (n, d_in), (n, d_out).
        ends: (groups,), the row behind each group's last, see `linalg.grouped_products`.
        vectors_A: (groups, d_in, d_in), eigenvectors as columns; None for the identity.
        vectors_G: (groups, d_out, d_out) or None.

    Returns:
        (groups, d_out, d_in), in at least single precision.
    """
    given = [vectors for vectors in (vectors_A, vectors_G) if vectors is not None]

    def products(a: Array, g: Array, *own: Array) -> Array:
        of_A = None if vectors_A is None else own[0]
        return second_moment_in_basis(a, g, of_A, None if vectors_G is None else own[-1])

    return linalg.over_groups(products, inputs, outputs, ends, *given)


def restart(A: Eigen, G: Eigen) -> tuple[Array, Array]:
    """Second moments for a new basis, and the weight of the evidence: K-FAC's own eigenvalues.

    Returns:
        d_G d_Aᵀ as a running average (..., d_out, d_in), and its weight (...,), 1.
    """
    products = eigenvalue_products(A, G)
    return products, products[..., 0, 0] * 0 + 1


def update(
    average: Array, weight: Array, new: Array, seen: Array, factor_decay: Scalar
) -> tuple[Array, Array]:
    """Average new second moments in, where `seen`.

    Args:
        average: (..., d_out, d_in), running sum; weight: (...,), the evidence in it.
        new: (..., d_out, d_in), normalized like K-FAC's factors (`statistics.normalize_products`).
        seen: (...,) bool.
        factor_decay: β in [0, 1).
    """
    xp = array_namespace(average)
    moved = moments.update_average(average, new, factor_decay)
    heavier = moments.update_average(weight, xp.zeros_like(weight) + 1, factor_decay)
    return xp.where(seen[..., None, None], moved, average), xp.where(seen, heavier, weight)
