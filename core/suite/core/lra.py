"""PSGD with a low-rank preconditioner for all parameters as one vector: Q = (I + U Vᵀ) diag(d), P = QᵀQ.

Like `kron`, it whitens gradients or, given pairs (v, H v), becomes |H|⁻¹. It costs O(n r) in memory and
time and knows of no layers. With rank 0 it is the diagonal case.

References:
    Li 2022 (arXiv:2211.04422), section 4: the group I + U Vᵀ and its two updates.
    Pooladzandi & Li 2024 (arXiv:2402.04553), section 3.2; Li 2024 (arXiv:2402.11858): step sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from suite.core import linalg
from suite.core._namespace import Array, Scalar, array_namespace, as_scalar, lift
from suite.core.checks import check_integer, check_number
from suite.core.damping import noise_size

_START = 0.1**0.5  # ‖U‖ = ‖V‖ at the start: Q is near diagonal
_BALANCE = 0.1  # how far one update brings UᵀU and VᵀV together


def first_scale(gradient: Array, vector: Array | None, lipschitz: Array, damping: Scalar) -> Array:
    """What Q starts with: mean(h⁴)^(-1/8), times mean(v²)^(1/4) with a `vector`; (...).

    1 where there is memory already (`lipschitz` > 0) or no evidence (the gradient (..., n) all zero).
    E[(P h)²] = E[v²] asks for Q² ~ |v| / |h|; the fourth moment weighs large entries, so that the first
    steps are rather too short. Source: Li 2024 (arXiv:2402.11858), implementation.
    """
    xp = array_namespace(gradient)
    largest = xp.max(xp.abs(gradient), axis=-1)
    fresh = (lipschitz == 0) & (largest > 0)
    one = xp.zeros_like(largest) + 1
    unit = gradient / xp.where(fresh, largest, one)[..., None]
    size = xp.sqrt(xp.sqrt(xp.mean(unit**4, axis=-1))) * largest + as_scalar(damping, gradient)
    if vector is not None:
        v = xp.astype(vector, gradient.dtype)
        size = size / xp.where(fresh, xp.sqrt(xp.mean(v * v, axis=-1)), one)
    return 1 / xp.sqrt(xp.where(fresh, size, one))


class LRAState(NamedTuple):
    """One preconditioner for n numbers, or a stack of them."""

    U: Array  # (..., n, r)
    V: Array  # (..., n, r)
    d: Array  # (..., n)
    lipschitz: tuple[Array, Array, Array]  # (...): remembered smoothness for U, V and d


@dataclass(frozen=True)
class LRA:
    """The rule: `init`, `update` when due, `precondition` in each step.

    Args:
        rank: r >= 0, columns of U and V.
        betaL: decay of the remembered smoothness, in [0, 1).
        damping: noise added to the gradient (Newton: to H v), absolute; bounds P by about 1 / damping.
            It is at least 7e-16 of the largest entry (1e-123 in double precision).
        preconditioner_init_scale: of Q at the start; None: the first gradient sets it to
            mean(g⁴)^(-1/8), or the first pair to mean(v²)^(1/4) mean((H v)⁴)^(-1/8).
    """

    rank: int = 10
    betaL: float = 0.9
    damping: float = 1e-9
    preconditioner_init_scale: float | None = None

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, at_least=0)
        check_number("betaL", self.betaL, at_least=0, below=1)
        check_number("damping", self.damping, at_least=0)
        if self.preconditioner_init_scale is not None:
            check_number("preconditioner_init_scale", self.preconditioner_init_scale, above=0)

    def init(self, noise_U: Array, noise_V: Array) -> LRAState:
        """A start that depends on the noise, (..., n, r) each: U = V = 0 would never leave it."""
        xp = array_namespace(noise_U)
        scale = 1.0 if self.preconditioner_init_scale is None else self.preconditioner_init_scale
        zeros = xp.sum(xp.zeros_like(noise_U), axis=-1)
        none = tuple(xp.sum(zeros, axis=-1) for _ in range(3))
        U, V = (x * (_START / _or_one(_norm(x, 2))) for x in (noise_U, noise_V))
        return LRAState(U, V, zeros + as_scalar(scale, zeros), none)

    def update(
        self,
        state: LRAState,
        gradient: Array,
        noise: Array,
        preconditioner_lr: Scalar,
        update_U: Scalar,
        vector: Array | None = None,
    ) -> LRAState:
        """Fit d and one of U and V to one more gradient; nothing changes where it is all zero.

        With a = Q h, b = Q⁻ᵀ v, M = I + Vᵀ U and step μ = preconditioner_lr / L:

            d ← d - μ (P h ∘ h - v ∘ P⁻¹ v) ∘ d
            U ← U - μ (a aᵀ - b bᵀ) V M,   or   V ← V - μ (I + V Uᵀ)(a aᵀ - b bᵀ) U

        Args:
            gradient: (..., n), h: a gradient, or H v.
            noise: like `gradient`, mean 0 and variance 1: damping and, without `vector`, v.
            preconditioner_lr: in (0, 1).
            update_U: () or (...), whether U moves in this update, or V; true in half of the updates.
            vector: like `gradient`, v of the pair (v, H v).
        """
        xp = array_namespace(gradient)
        dtype = state.d.dtype
        U, V, d = (lift(x) for x in state[:3])
        h, noise = xp.astype(gradient, d.dtype), xp.astype(noise, d.dtype)
        v = noise if vector is None else xp.astype(vector, d.dtype)
        largest = xp.max(xp.abs(h), axis=-1)
        evidence = largest > 0
        if self.preconditioner_init_scale is None:
            d = d * first_scale(h, vector, state.lipschitz[2], self.damping)[..., None]
        h = h + noise_size(largest, self.damping)[..., None] * noise
        if self.rank:
            U, V = _balanced(U, V)
        inverse = linalg.inverse(_plus_identity(_product(V, U))) if self.rank else None

        # As in `kron`: all in units of the largest entry u, whose square would overflow.
        a, b = _apply(U, V, d * h), _inverse_transposed(U, V, inverse, v / d)
        u = xp.max(xp.maximum(xp.abs(a), xp.abs(b)), axis=-1)
        u = xp.maximum(u, xp.zeros_like(u) + 1)[..., None]
        a, b, h, v = a / u, b / u, h / u, v / u
        Ph = d * _apply(V, U, a)
        Pv = _inverse(U, V, inverse, b) / d
        u = u[..., 0]
        olds = tuple(xp.astype(L, d.dtype) / u / u for L in state.lipschitz)

        forward, backward = Ph * h, v * Pv
        bound = xp.max(xp.abs(forward), axis=-1) + xp.max(xp.abs(backward), axis=-1)
        L_d = self._remember(olds[2], bound)
        step = as_scalar(preconditioner_lr, L_d) / _or_one(L_d)
        new_d = d - step[..., None] * (forward - backward) * d

        new_U, new_V, L_U, L_V = U, V, olds[0], olds[1]
        if self.rank:
            aV, bV, aU, bU = _rows(a, V), _rows(b, V), _rows(a, U), _rows(b, U)
            M = _plus_identity(_product(V, U))
            bound = _norm(a, 1) * _norm(_columns(V, aV), 1) + _norm(b, 1) * _norm(_columns(V, bV), 1)
            L_U = self._remember(olds[0], bound[..., 0])
            move = _outer(a, _rows(aV, M)) - _outer(b, _rows(bV, M))
            step = as_scalar(preconditioner_lr, L_U) / _or_one(L_U)
            moved_U = U - step[..., None, None] * move
            bound = _norm(a, 1) * _norm(_columns(U, aU), 1) + _norm(b, 1) * _norm(_columns(U, bU), 1)
            L_V = self._remember(olds[1], bound[..., 0])
            move = _outer(a + _columns(V, aU), aU) - _outer(b + _columns(V, bU), bU)
            step = as_scalar(preconditioner_lr, L_V) / _or_one(L_V)
            moved_V = V - step[..., None, None] * move
            first = xp.astype(xp.asarray(update_U), xp.bool)
            wide = first[..., None, None]
            new_U, new_V = xp.where(wide, moved_U, U), xp.where(wide, V, moved_V)
            L_U, L_V = xp.where(first, L_U, olds[0]), xp.where(first, olds[1], L_V)

        def kept(new: Array, old: Array) -> Array:
            condition = xp.reshape(evidence, (*evidence.shape, *(1,) * (old.ndim - evidence.ndim)))
            return xp.where(condition, xp.astype(new, old.dtype), old)

        largest = float(xp.finfo(dtype).max)
        lipschitz = tuple(
            kept(xp.minimum(L * u * u, xp.zeros_like(L) + largest), old)
            for L, old in zip((L_U, L_V, L_d), state.lipschitz, strict=True)
        )
        return LRAState(kept(new_U, state.U), kept(new_V, state.V), kept(new_d, state.d), lipschitz)

    def _remember(self, old: Array, bound: Array) -> Array:
        xp = array_namespace(old)
        betaL = as_scalar(self.betaL, old)
        return xp.maximum(betaL * old + (1 - betaL) * bound, bound)

    def precondition(self, state: LRAState, gradient: Array) -> Array:
        """P g for g (..., n), in its dtype."""
        xp = array_namespace(gradient)
        U, V, d = (lift(x) for x in state[:3])
        x = d * xp.astype(gradient, d.dtype)
        return xp.astype(d * _apply(V, U, _apply(U, V, x)), gradient.dtype)


def _or_one(x: Array) -> Array:
    xp = array_namespace(x)
    return xp.where(x > 0, x, xp.zeros_like(x) + 1)


def _norm(x: Array, ndim: int) -> Array:
    """The Euclidean norm over the last `ndim` axes, kept with length 1."""
    xp = array_namespace(x)
    return xp.sqrt(xp.sum(x * x, axis=tuple(range(-ndim, 0)), keepdims=True))


def _product(x: Array, y: Array) -> Array:
    """Xᵀ Y, (..., r, r)."""
    return array_namespace(x).matmul(linalg.transpose(x), y)


def _plus_identity(x: Array) -> Array:
    return x + linalg.eye_like(x)


def _rows(x: Array, W: Array) -> Array:
    """xᵀ W: (..., n), (..., n, r) -> (..., r)."""
    return array_namespace(x).matmul(x[..., None, :], W)[..., 0, :]


def _columns(W: Array, x: Array) -> Array:
    """W x: (..., n, r), (..., r) -> (..., n)."""
    return array_namespace(x).matmul(W, x[..., None])[..., 0]


def _outer(x: Array, y: Array) -> Array:
    return x[..., :, None] * y[..., None, :]


def _apply(U: Array, V: Array, x: Array) -> Array:
    """(I + U Vᵀ) x."""
    return x + _columns(U, _rows(x, V))


def _inverse_transposed(U: Array, V: Array, inverse: Array | None, x: Array) -> Array:
    """(I + U Vᵀ)⁻ᵀ x = x - V M⁻ᵀ Uᵀ x, with `inverse` M⁻¹ = (I + Vᵀ U)⁻¹."""
    return x if inverse is None else x - _columns(V, _rows(_rows(x, U), inverse))


def _inverse(U: Array, V: Array, inverse: Array | None, x: Array) -> Array:
    """(I + U Vᵀ)⁻¹ x = x - U M⁻¹ Vᵀ x."""
    return x if inverse is None else x - _columns(U, _columns(inverse, _rows(x, V)))


def _balanced(U: Array, V: Array) -> tuple[Array, Array]:
    """U and V of equal norm, brought nearer to UᵀU = VᵀV; U Vᵀ changes at fourth order.

    With E the difference in units of the trace, (I - E + E²/2)(I + E + E²/2) = I + E⁴/4.
    """
    xp = array_namespace(U)
    rho = xp.sqrt(_or_one(_norm(U, 2)) / _or_one(_norm(V, 2)))
    U, V = U / rho, V * rho
    UU, VV = _product(U, U), _product(V, V)
    total = (linalg.trace(UU) + linalg.trace(VV))[..., None, None]
    E = _BALANCE * (UU - VV) / _or_one(total)
    half = 0.5 * xp.matmul(E, E)
    return U - xp.matmul(U, E - half), V + xp.matmul(V, E + half)
