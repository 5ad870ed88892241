"""What gradients, or pairs (v, H v), tell the factors of a Kronecker-factored preconditioner.

`suite.core.kron` has the rule that they are fitted by. Here all stacks have one leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from suite.core import kronecker, linalg
from suite.core._namespace import Array, array_namespace, as_scalar, lift
from suite.core.damping import noise_size

if TYPE_CHECKING:
    from suite.core.kron import Kron, KronState


class Evidence(NamedTuple):
    """What k blocks tell their factors of one axis, in units of the signal's largest entry u.

    Of block-diagonal factors each block on the diagonal is one of the k.
    """

    factors: Array  # (k, n, n), or (k, n) of diagonal ones
    lipschitz: Array  # (k,), as it was, in units of 1
    seen: Array  # T / u², like the factors
    white: Array  # c / u², (k,), or what stands for it, like the factors
    unit: Array  # (k,), u
    usable: Array  # (k,), bool: whether it is evidence


def evidence_of(
    rule: Kron, state: KronState, gradient: Array, noise: Array, vector: Array | None
) -> list[Evidence]:
    """What a stack of blocks tells its factors, axis by axis; arguments as `Kron.update` takes them."""
    xp = array_namespace(gradient)
    ndim, batch = len(state.factors), state.lipschitz[0].ndim
    factors, preconditioners = (
        tuple(flat(lift(q), batch) for q in kept) for kept in (state.factors, state.preconditioners)
    )
    lipschitz = tuple(flat(L, batch) for L in state.lipschitz)
    compute = factors[0].dtype
    g, noise = (flat(xp.astype(x, compute), batch) for x in (gradient, noise))
    v = None if vector is None else flat(xp.astype(vector, compute), batch)
    own_axes = tuple(range(1, g.ndim))
    size = xp.abs(g)
    # An exactly zero gradient says nothing about curvature; fitting it would inflate Q.
    largest, told = _told_by(size, factors)
    usable = largest > 0
    if rule.preconditioner_init_scale is None:
        gain = _first_scale(g, v, lipschitz[0], rule.damping)
        factors = kronecker.scaled(factors, gain * gain if rule.fits_P else gain)
        preconditioners = kronecker.scaled(preconditioners, gain * gain)
    dither = size  # changed in place, as other fresh arrays here: new ones cost time on a CPU
    dither *= float(xp.finfo(compute).eps)
    dither += xp.reshape(noise_size(largest, rule.damping), (-1, *(1,) * len(own_axes)))
    dither *= noise
    dither += g
    g = dither
    reference = v
    if rule.geometry == "EQ":
        signal = kronecker.apply(factors, g)
        reference = _inverse_transposed(factors, noise if v is None else v)
    else:
        signal = kronecker.apply(preconditioners, g, symmetric=True)
    # Everything below is in units of the signal's largest entry u (T / u², c / u², L / u²): the
    # update is a ratio, and squares of 1e20 do not fit in float32.
    unit = linalg.largest_entry(signal, own_axes, keepdims=True)
    if reference is not None:
        for axis, flags in enumerate(told):
            if flags is not None:
                reference = reference * _along(flags, axis, reference)
        unit = xp.maximum(unit, linalg.largest_entry(reference, own_axes, keepdims=True))
        reference = reference / xp.maximum(unit, 1.0)
    unit = xp.maximum(unit, 1.0)
    signal /= unit
    u = xp.reshape(unit, (unit.shape[0],))
    found = []
    for axis, (q, L) in enumerate(zip(factors, lipschitz, strict=True)):
        is_diagonal = q.ndim == 2
        seen = kronecker.apply_factor(q, signal, axis, ndim) if rule.geometry == "QEP" else signal
        form = {"diagonal": is_diagonal, "blocks": kronecker.diagonal_blocks(q, signal, ndim)}
        T = kronecker.gram(seen, axis, ndim, **form)
        if reference is not None:
            own = reference
            if rule.geometry == "QEP":
                own = kronecker.apply_factor(q, reference, axis, ndim)
            white = kronecker.gram(own, axis, ndim, **form)
        else:
            white = math.prod(g.shape[1:]) / g.shape[1 + axis] / u / u
            for other, flags in enumerate(told):
                if other != axis and flags is not None:
                    white = white * xp.mean(xp.astype(flags, compute), axis=1)
            if rule.geometry == "QEP":
                square = q * q if is_diagonal else linalg.gram(linalg.transpose(q))
                white = kronecker.scaled((square,), white)[0]
        of_axis, flags = Evidence(q, xp.astype(L, compute), T, white, u, usable), told[axis]
        if flags is not None:
            each = _on_diagonals(of_axis, q.shape[1])
            of_axis = each._replace(usable=xp.reshape(flags, (-1,)))
        found.append(of_axis)
    return found


def flat(x: Array, batch: int) -> Array:
    """With one leading axis in place of `batch` of them."""
    if batch == 1:
        return x
    return array_namespace(x).reshape(x, (math.prod(x.shape[:batch]), *x.shape[batch:]))


def stacked(x: Array) -> Array:
    """Of block-diagonal matrices (k, c, n, n) the blocks, (k c, n, n); others as they are."""
    return array_namespace(x).reshape(x, (-1, *x.shape[2:])) if x.ndim == 4 else x


def for_each(x: Array, count: int) -> Array:
    """Numbers (k,) of matrices as those of their blocks, `count` each: (k count,)."""
    xp = array_namespace(x)
    return xp.reshape(xp.broadcast_to(x[:, None], (x.shape[0], count)), (-1,))


def _told_by(size: Array, factors: Sequence[Array]) -> tuple[Array, list[Array | None]]:
    """Gradients' largest entries, and along which blocks of a factor's diagonal some are not zero.

    Args:
        size: (k, ...), the entries' absolute values.

    Returns:
        (k,), and for each factor flags (k, c); None of one that is not block-diagonal.
    """
    xp = array_namespace(size)
    counts = [q.shape[1] if q.ndim == 4 else 1 for q in factors]
    grid = [x for n, c in zip(size.shape[1:], counts, strict=True) for x in (c, n // c)]
    inside = tuple(range(2, len(grid) + 1, 2))
    largest = xp.max(xp.reshape(size, (size.shape[0], *grid)), axis=inside)  # (k, c_1, ..., c_d)
    told: list[Array | None] = []
    for axis, count in enumerate(counts, 1):
        others = tuple(i for i in range(1, largest.ndim) if i != axis)
        told.append(_largest(largest, others) > 0 if count > 1 else None)
    return _largest(largest, tuple(range(1, largest.ndim))), told


def _largest(x: Array, axes: tuple[int, ...]) -> Array:
    return array_namespace(x).max(x, axis=axes) if axes else x


def _along(flags: Array, axis: int, x: Array) -> Array:
    """Flags (k, c) of the c parts of an axis of `x`, (k, ...), as ones and zeros to multiply it with."""
    xp = array_namespace(x)
    side = x.shape[1 + axis]
    each = xp.broadcast_to(flags[:, :, None], (*flags.shape, side // flags.shape[1]))
    shape = (x.shape[0], *(side if i == axis else 1 for i in range(x.ndim - 1)))
    return xp.astype(xp.reshape(each, shape), x.dtype)


def _on_diagonals(evidence: Evidence, count: int) -> Evidence:
    """Evidence of block-diagonal factors as that of the `count` blocks of each."""
    return Evidence(*(for_each(x, count) if x.ndim == 1 else stacked(x) for x in evidence))


def _first_scale(g: Array, v: Array | None, lipschitz: Array, damping: float) -> Array:
    """What a block's factors still lack, each: mean(g⁴)^(-1/8 d) at its first evidence, else 1.

    E[(P g)²] = 1 asks for P ~ 1 / |g|, and Q is its root; the fourth moment weighs large entries, so
    that the first steps are rather too short. Source: Li 2024 (arXiv:2402.11858), implementation.
    """
    xp = array_namespace(g)
    own_axes = tuple(range(1, g.ndim))
    largest = xp.max(xp.abs(g), axis=own_axes)
    fresh = (lipschitz == 0) & (largest > 0)
    one = xp.zeros_like(largest) + 1
    scale = xp.where(fresh, largest, one)
    unit = g / xp.reshape(scale, (-1, *(1,) * len(own_axes)))
    moment = xp.sqrt(xp.sqrt(xp.mean(unit**4, axis=own_axes)))  # in units of the largest entry
    size = xp.where(fresh, moment * largest + as_scalar(damping, g), one)
    if v is not None:
        size = size / xp.where(fresh, xp.sqrt(xp.mean(v * v, axis=own_axes)), one)
    return (1 / xp.sqrt(size)) ** (1 / len(own_axes))


def _inverse_transposed(factors: tuple[Array, ...], x: Array) -> Array:
    """(Q_1 ⊗ Q_2 ⊗ ...)⁻ᵀ x for triangular factors: dense, diagonal or block-diagonal ones."""
    xp = array_namespace(x)
    ndim = len(factors)
    for axis, q in enumerate(factors):
        if kronecker.is_diagonal(q, x, ndim):
            x = kronecker.apply_factor(1 / q, x, axis, ndim)
        else:
            rows = kronecker.unfold(x, axis, ndim, kronecker.diagonal_blocks(q, x, ndim))
            solved = linalg.solve_triangular(xp.matrix_transpose(q), rows, upper=False)
            x = kronecker.fold(solved, axis, x.shape, ndim)
    return x
