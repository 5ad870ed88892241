"""PSGD with one dense preconditioner for all parameters as one vector: for small problems.

P = QᵀQ becomes |H|⁻¹ from pairs (v, H v), or whitens gradients. It has n² numbers; an update is a few
products of Q with a vector: an alternative to quasi-Newton methods that needs no line search and bears
noise.

References: Li 2015 (arXiv:1512.04202); Li 2024 (arXiv:2402.11858), the local coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from suite.core import linalg
from suite.core._namespace import Array, Scalar, array_namespace, as_scalar, device_of, lift
from suite.core.checks import check_choice, check_number
from suite.core.damping import noise_size
from suite.core.lra import first_scale

DenseGeometry = Literal["Q0.5EQ1.5", "QEQ", "QUAD", "EQ", "QEP", "QUAD4P"]


class DenseState(NamedTuple):
    """One preconditioner for n numbers, or a stack of them."""

    Q: Array  # (..., n, n); P itself in QUAD4P
    lipschitz: Array  # (...)


@dataclass(frozen=True)
class Dense:
    """The rule: `init`, `update` when due, `precondition` in each step.

    Args:
        geometry: as in `suite.core.kron.Kron`, without 'PRO4P'.
        betaL: decay of the remembered smoothness, in [0, 1).
        damping: noise added to H v or the gradient, absolute; bounds P by about 1 / damping.
            It is at least 7e-16 of the largest entry (1e-123 in double precision).
        preconditioner_init_scale: of Q at the start; None: set by the first pair or gradient, see
            `suite.core.kron.Kron`.
    """

    geometry: DenseGeometry = "Q0.5EQ1.5"
    betaL: float = 0.9
    damping: float = 1e-9
    preconditioner_init_scale: float | None = None

    def __post_init__(self) -> None:
        check_choice("geometry", self.geometry, get_args(DenseGeometry))
        check_number("betaL", self.betaL, at_least=0, below=1)
        check_number("damping", self.damping, at_least=0)
        if self.preconditioner_init_scale is not None:
            check_number("preconditioner_init_scale", self.preconditioner_init_scale, above=0)

    def init(self, like: Array, shape: tuple[int, ...]) -> DenseState:
        """Q = `preconditioner_init_scale` I for vectors of `shape` (..., n), in the dtype of `like`."""
        xp = array_namespace(like)
        where = {"dtype": like.dtype, "device": device_of(like)}
        scale = 1.0 if self.preconditioner_init_scale is None else self.preconditioner_init_scale
        scale = as_scalar(scale, like) ** (2 if self.geometry == "QUAD4P" else 1)
        ones = xp.zeros((*shape, shape[-1]), **where) + scale
        return DenseState(ones * linalg.eye_like(ones), xp.zeros(shape[:-1], **where))

    def update(
        self,
        state: DenseState,
        gradient: Array,
        noise: Array,
        preconditioner_lr: Scalar,
        vector: Array | None = None,
    ) -> DenseState:
        """Fit Q to one more pair; nothing changes where `gradient` is all zero.

        With h = `gradient` and step μ = preconditioner_lr / L, ℓ = Σ a² + Σ b²:

            EQ         Q ← Q - μ triu(a aᵀ - b bᵀ) Q,   a = Q h, b = Q⁻ᵀ v
            QEP        Q ← Q - μ (a aᵀ - b bᵀ) Q,       a = Q P h, b = Q v
            QEQ        Q ← Q - μ Q (a aᵀ - v vᵀ),       a = P h, b = v, as in all below
            Q0.5EQ1.5  Q ← rotate(Q - μ (a aᵀ - v vᵀ) Q)
            QUAD       Q ← sym(K Q K),  K = I - ½ μ (a aᵀ - v vᵀ);  QUAD4P: P, and μ for ½ μ

        Args:
            gradient: (..., n), H v, or a gradient.
            noise: like `gradient`, mean 0 and variance 1: damping and, without `vector`, v.
            preconditioner_lr: in (0, 1).
            vector: like `gradient`, v of the pair (v, H v).
        """
        xp = array_namespace(gradient)
        Q = lift(state.Q)
        h, noise = xp.astype(gradient, Q.dtype), xp.astype(noise, Q.dtype)
        v = noise if vector is None else xp.astype(vector, Q.dtype)
        largest = xp.max(xp.abs(h), axis=-1)
        evidence = largest > 0
        if self.preconditioner_init_scale is None:
            gain = first_scale(h, vector, state.lipschitz, self.damping)
            Q = Q * (gain * gain if self.geometry == "QUAD4P" else gain)[..., None, None]
        h = h + noise_size(largest, self.damping)[..., None] * noise
        a, b = self._pair(Q, h, v)
        # As in `kron`: in units of the largest entry, whose square would overflow.
        u = xp.max(xp.maximum(xp.abs(a), xp.abs(b)), axis=-1)
        u = xp.maximum(u, xp.zeros_like(u) + 1)
        a, b = a / u[..., None], b / u[..., None]
        bound = xp.sum(a * a + b * b, axis=-1)
        old = xp.astype(state.lipschitz, Q.dtype) / u / u
        betaL = as_scalar(self.betaL, old)
        L = xp.maximum(betaL * old + (1 - betaL) * bound, bound)
        step = (as_scalar(preconditioner_lr, L) / xp.where(L > 0, L, xp.zeros_like(L) + 1))[
            ..., None, None
        ]
        new = xp.where(evidence[..., None, None], self._step(Q, a, b, step), Q)
        largest = float(xp.finfo(state.lipschitz.dtype).max)
        L = xp.minimum(L * u * u, xp.zeros_like(L) + largest)
        L = xp.where(evidence, xp.astype(L, state.lipschitz.dtype), state.lipschitz)
        return DenseState(xp.astype(new, state.Q.dtype), L)

    def _pair(self, Q: Array, h: Array, v: Array) -> tuple[Array, Array]:
        if self.geometry == "EQ":
            solved = linalg.solve_triangular(linalg.transpose(Q), v[..., None], upper=False)
            return _times(Q, h), solved[..., 0]
        if self.geometry == "QUAD4P":
            return _times(Q, h), v
        Ph = _times(linalg.transpose(Q), _times(Q, h))
        return (_times(Q, Ph), _times(Q, v)) if self.geometry == "QEP" else (Ph, v)

    def _step(self, Q: Array, a: Array, b: Array, step: Array) -> Array:
        xp = array_namespace(Q)

        def left(x: Array) -> Array:  # (a aᵀ - b bᵀ) x
            T = linalg.transpose(x)
            return (
                a[..., :, None] * _times(T, a)[..., None, :]
                - b[..., :, None] * _times(T, b)[..., None, :]
            )

        def right(x: Array) -> Array:  # x (a aᵀ - b bᵀ)
            return (
                _times(x, a)[..., :, None] * a[..., None, :]
                - _times(x, b)[..., :, None] * b[..., None, :]
            )

        if self.geometry == "EQ":
            E = a[..., :, None] * a[..., None, :] - b[..., :, None] * b[..., None, :]
            return Q - step * xp.matmul(xp.triu(E), Q)
        if self.geometry == "QEP":
            return Q - step * left(Q)
        if self.geometry == "QEQ":
            return Q - step * right(Q)
        if self.geometry == "Q0.5EQ1.5":
            return linalg.rotate_towards_symmetry(Q - step * left(Q))
        side = step if self.geometry == "QUAD4P" else 0.5 * step
        Q = Q - side * left(Q)
        return linalg.symmetrize(Q - side * right(Q))

    def precondition(self, state: DenseState, gradient: Array) -> Array:
        """P g for g (..., n), in its dtype."""
        xp = array_namespace(gradient)
        Q = lift(state.Q)
        x = _times(Q, xp.astype(gradient, Q.dtype))
        if self.geometry != "QUAD4P":
            x = _times(linalg.transpose(Q), x)
        return xp.astype(x, gradient.dtype)


def _times(Q: Array, x: Array) -> Array:
    """Q x: (..., n, n), (..., n) -> (..., n)."""
    return array_namespace(x).matmul(Q, x[..., None])[..., 0]
