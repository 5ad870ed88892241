"""K-FAC: precondition a layer's gradient matrix with the inverse of A ⊗ G.

For a layer s = W a the Fisher block of W is approximated by A ⊗ G, A the second moment of the inputs a
and G that of the output gradients; the direction is G⁻¹ ∇W A⁻¹, damped.

References:
    Martens & Grosse 2015 (arXiv:1503.05671): the approximation, factored damping.
    Grosse & Martens 2016 (arXiv:1602.01407): convolutions.
    Pauloski et al. 2020 (arXiv:2007.00784): eigenbasis against inverse, running averages, KL clipping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from suite.core import linalg, moments
from suite.core._namespace import Array, Scalar, array_namespace, device_of, lift
from suite.core.checks import check_choice
from suite.core.damping import split_damping, tikhonov

ComputeMethod = Literal["eigen", "inverse"]


class Eigen(NamedTuple):
    """One factor in its eigenbasis."""

    vectors: Array | None  # (..., n, n), one a column; None for a diagonal factor
    values: Array  # (..., n), >= 0


class KFACState(NamedTuple):
    """One stack of layers with equal factor sizes. A diagonal factor is (..., n) for (..., n, n)."""

    A: Array  # (..., d_in, d_in), running sum of the inputs' second moment
    G: Array  # (..., d_out, d_out), running sum of the output gradients' second moment
    weight: Array  # (...,), how much evidence A and G hold: divide by it
    A_inverse: Eigen | Array  # Eigen, or the damped inverse like A
    G_inverse: Eigen | Array
    ready: Array  # (...,) bool: a refresh has succeeded; until then the direction is the gradient
    failures: Array  # (...,) int32: refreshes that failed and kept the inverses before them


@dataclass(frozen=True)
class KFAC:
    """The rule: `init`, `update` with normalized factors, `refresh` now and then, `precondition`.

    Args:
        compute_method: 'eigen' keeps eigenbases and damps the Kronecker product itself, exactly, with
            the damping of the moment; 'inverse' keeps inverses damped by the factored rule, at about a
            quarter of the cost of a refresh and half that of a direction.
    """

    compute_method: ComputeMethod = "eigen"

    def __post_init__(self) -> None:
        check_choice("compute_method", self.compute_method, get_args(ComputeMethod))

    def init(
        self,
        like: Array,
        batch: tuple[int, ...],
        sizes: tuple[int, int],
        diagonal: tuple[bool, bool] = (False, False),
        inverse_like: Array | None = None,
    ) -> KFACState:
        """No evidence yet: factors are zero and the direction is the gradient.

        Args:
            like: any array with the factors' dtype and device.
            batch: leading axes, a stack of layers.
            sizes: (d_in, d_out).
            diagonal: whether (A, G) keep their diagonal only.
            inverse_like: any array with the dtype of inverses and eigenbases; default `like`.
        """
        xp = array_namespace(like)
        inverse_like = like if inverse_like is None else inverse_like
        device = device_of(like)

        def factor(side: int, is_diagonal: bool) -> Array:
            shape = (*batch, side) if is_diagonal else (*batch, side, side)
            return xp.zeros(shape, dtype=like.dtype, device=device)

        def inverse(side: int, is_diagonal: bool) -> Eigen | Array:
            dtype = inverse_like.dtype
            ones = xp.ones((*batch, side), dtype=dtype, device=device)
            if is_diagonal:
                return Eigen(None, ones) if self.compute_method == "eigen" else ones
            eye = xp.zeros((*batch, side, side), dtype=dtype, device=device)
            eye = eye + xp.eye(side, dtype=dtype, device=device)
            return Eigen(eye, ones) if self.compute_method == "eigen" else eye

        return KFACState(
            A=factor(sizes[0], diagonal[0]),
            G=factor(sizes[1], diagonal[1]),
            weight=xp.zeros(batch, dtype=lift(like).dtype, device=device),
            A_inverse=inverse(sizes[0], diagonal[0]),
            G_inverse=inverse(sizes[1], diagonal[1]),
            ready=xp.zeros(batch, dtype=xp.bool, device=device),
            failures=xp.zeros(batch, dtype=xp.int32, device=device),
        )

    def update(
        self, state: KFACState, A: Array, G: Array, seen: Array, factor_decay: Scalar
    ) -> KFACState:
        """Average new factors in.

        Args:
            A, G: like the state's, normalized (`statistics.normalize`).
            seen: (...,) bool; a layer that saw no rows keeps its state.
            factor_decay: β of the running average, in [0, 1).
        """
        xp = array_namespace(state.A)

        def average(old: Array, new: Array) -> Array:
            keep = xp.reshape(seen, (*seen.shape, *(1,) * (old.ndim - seen.ndim)))
            return xp.where(keep, moments.update_average(old, new, factor_decay), old)

        one = xp.zeros_like(state.weight) + 1
        return state._replace(
            A=average(state.A, A), G=average(state.G, G), weight=average(state.weight, one)
        )

    def refresh(self, state: KFACState, damping: Scalar) -> KFACState:
        """Recompute inverses or eigenbases from the averages.

        A layer whose factors are not finite, or whose factorization fails, keeps its old ones and its
        `failures` count goes up; a layer without evidence is left alone.

        Args:
            damping: λ >= 0. It enters 'inverse' here and 'eigen' in `precondition`.
        """
        xp = array_namespace(state.A)
        batch = state.weight.ndim
        A = lift(moments.unbiased(state.A, state.weight))
        G = lift(moments.unbiased(state.G, state.weight))
        A_inverse: Eigen | Array
        G_inverse: Eigen | Array
        if self.compute_method == "eigen":
            A_inverse, G_inverse = _eigen(A, batch), _eigen(G, batch)
        else:
            damping_A, damping_G = split_damping(
                _mean_eigenvalue(A, batch), _mean_eigenvalue(G, batch), damping
            )
            A_inverse = _inverse(A, damping_A, batch)
            G_inverse = _inverse(G, damping_G, batch)
        seen = state.weight > 0
        succeeded = _finite(A_inverse, batch) & _finite(G_inverse, batch)
        replace = seen & succeeded
        failed = xp.astype(seen & ~succeeded, xp.int32)
        return state._replace(
            A_inverse=_where(replace, A_inverse, state.A_inverse),
            G_inverse=_where(replace, G_inverse, state.G_inverse),
            ready=state.ready | replace,
            failures=state.failures + failed,
        )

    def precondition(self, state: KFACState, gradient: Array, damping: Scalar) -> Array:
        """G⁻¹ ∇ A⁻¹; layers that are not `ready` return their gradient.

            eigen:    Q_G [ (Q_Gᵀ ∇ Q_A) / (d_G d_Aᵀ + λ) ] Q_Aᵀ
            inverse:  (G + √λ/π I)⁻¹ ∇ (A + π √λ I)⁻¹, damped when it was refreshed

        Args:
            gradient: (..., d_out, d_in).
            damping: λ >= 0, used by 'eigen'.
        """
        xp = array_namespace(gradient)
        if self.compute_method == "eigen":
            A, G = state.A_inverse, state.G_inverse
            assert isinstance(A, Eigen)
            assert isinstance(G, Eigen)
            x = xp.astype(gradient, lift(A.values).dtype)
            x = _rotate(G.vectors, x, A.vectors, back=False)
            products = lift(G.values)[..., :, None] * lift(A.values)[..., None, :]
            x = x * tikhonov(products, damping)
            x = _rotate(G.vectors, x, A.vectors, back=True)
        else:
            A, G = lift(state.A_inverse), lift(state.G_inverse)
            x = xp.astype(gradient, A.dtype)
            batch = state.weight.ndim
            x = G[..., :, None] * x if G.ndim == batch + 1 else xp.matmul(G, x)
            x = x * A[..., None, :] if A.ndim == batch + 1 else xp.matmul(x, A)
        return xp.where(state.ready[..., None, None], xp.astype(x, gradient.dtype), gradient)


def _rotate(left: Array | None, x: Array, right: Array | None, *, back: bool) -> Array:
    """Into the eigenbases (leftᵀ x right) or `back` (left x rightᵀ); None stands for I."""
    xp = array_namespace(x)
    if left is not None:
        left = lift(left)
        x = xp.matmul(left if back else linalg.transpose(left), x)
    if right is not None:
        right = lift(right)
        x = xp.matmul(x, linalg.transpose(right) if back else right)
    return x


def _eigen(factor: Array, batch: int) -> Eigen:
    xp = array_namespace(factor)
    if factor.ndim == batch + 1:
        return Eigen(None, xp.maximum(factor, xp.zeros_like(factor)))
    values, vectors = linalg.eigh(factor)
    return Eigen(vectors, values)


def _inverse(factor: Array, damping: Array, batch: int) -> Array:
    if factor.ndim == batch + 1:
        xp = array_namespace(factor)
        damped = factor + xp.asarray(damping, dtype=factor.dtype)[..., None]
        # A zero entry without damping has no inverse: NaN makes this refresh a failure.
        return xp.where(damped > 0, 1 / xp.where(damped > 0, damped, damped * 0 + 1), float("nan"))
    return linalg.damped_inverse(factor, damping)


def _mean_eigenvalue(factor: Array, batch: int) -> Array:
    if factor.ndim == batch + 1:
        return array_namespace(factor).mean(factor, axis=-1)
    return linalg.trace(factor) / factor.shape[-1]


def _finite(inverse: Eigen | Array, batch: int) -> Array:
    arrays = [x for x in inverse if x is not None] if isinstance(inverse, Eigen) else [inverse]
    xp = array_namespace(arrays[0])
    finite = [xp.all(xp.isfinite(x), axis=tuple(range(batch, x.ndim))) for x in arrays]
    return finite[0] if len(finite) == 1 else finite[0] & finite[1]


def _where(condition: Array, new: Any, old: Any) -> Any:
    if isinstance(new, Eigen):
        vectors = None if new.vectors is None else _where(condition, new.vectors, old.vectors)
        return Eigen(vectors, _where(condition, new.values, old.values))
    xp = array_namespace(condition)
    condition = xp.reshape(condition, (*condition.shape, *(1,) * (new.ndim - condition.ndim)))
    return xp.where(condition, xp.astype(new, old.dtype), old)
