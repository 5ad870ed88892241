"""PSGD Kron: a preconditioner P = QᵀQ, Q = Q_1 ⊗ Q_2 ⊗ ..., fitted until P g is white.

Whitening fits P to (E[g gᵀ])^(-1/2): at the optimum the preconditioned gradient h = P g satisfies
E[h hᵀ] = I in every axis. Newton fits P to |H|⁻¹ from pairs of a random vector v and the Hessian's
product H v: at the optimum E[P H v (P H v)ᵀ] = E[v vᵀ]. Each update is one relative step on a Lie group
or on the positive definite cone, with step `preconditioner_lr` / L where L bounds the local smoothness.

References:
    Li 2015 (arXiv:1512.04202): the fitting criterion.
    Li 2022 (arXiv:2211.04422) and Pooladzandi & Li 2024 (arXiv:2402.04553): Kronecker factors, EQ.
    Li 2024 (arXiv:2402.11858): the geometries QEQ, QUAD and Q0.5EQ1.5.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from suite.core import kronecker, linalg
from suite.core._namespace import Array, Scalar, array_namespace, as_scalar, device_of, lift
from suite.core.buckets import together
from suite.core.checks import check_choice, check_number
from suite.core.kron_evidence import Evidence, evidence_of, flat, for_each, stacked
from suite.core.rounding import stochastic_round

Geometry = Literal["Q0.5EQ1.5", "QEQ", "QUAD", "EQ", "QEP", "PRO4P", "QUAD4P"]
FactorForm = Literal["general", "symmetric", "upper"]

FINITE_POWER = 1.5  # of gradients; P, about 1 / damping at most, leaves them finite where this is
_LARGEST_LIPSCHITZ = 1e30  # it must stay finite in float32 to be forgotten again


class KronState(NamedTuple):
    """One stack of blocks of one shape; index i runs over a block's axes."""

    factors: tuple[Array, ...]  # Q_i, in the forms of `suite.core.kronecker`
    lipschitz: tuple[Array, ...]  # L_i, (...,): remembered bound of the update's smoothness
    preconditioners: tuple[Array, ...]  # P_i = Q_iᵀ Q_i, as `refresh` left them


@dataclass(frozen=True)
class Kron:
    """The rule. `init`, then in each step `update` and `refresh` when due, and `precondition`.

    Args:
        geometry: the local coordinates dQ in which a step is taken.
            'Q0.5EQ1.5': dQ = Q^½ E Q^1.5, kept near symmetric by a rotation; the most robust.
            'QEQ': dQ = Q E Q, over the general linear group.
            'QUAD': a quadratic form that keeps Q symmetric positive definite.
            'EQ': dQ = E Q, over upper triangular matrices; the oldest, needs triangular solves.
            'QEP': dQ = Q E P; steps follow P's own scales, which speeds up the fit of small curvature
            and slows down the escape from an ill-conditioned Q.
            'PRO4P', 'QUAD4P': 'Q0.5EQ1.5' and 'QUAD' on P itself in place of Q: one product less, and
            half the range of a float.
        betaL: decay of L between updates, in [0, 1); larger forgets outliers more slowly.
        damping: noise added to the gradient (Newton: to H v), absolute; bounds P by about 1 / damping.
            It is at least 7e-16 of the gradient's largest entry (1e-123 in double precision).
        preconditioner_init_scale: factors start as the identity, ‖Q‖ being this number; with None each
            block's is set by its first gradient that is not zero, to mean(g⁴)^(-1/8), or by its first
            pair, to mean(v²)^(1/4) mean((H v)⁴)^(-1/8).
    """

    geometry: Geometry = "Q0.5EQ1.5"
    betaL: float = 0.9
    damping: float = 1e-9
    preconditioner_init_scale: float | None = 1.0

    def __post_init__(self) -> None:
        check_choice("geometry", self.geometry, get_args(Geometry))
        check_number("betaL", self.betaL, at_least=0, below=1)
        check_number("damping", self.damping, at_least=0)
        if self.preconditioner_init_scale is not None:
            check_number("preconditioner_init_scale", self.preconditioner_init_scale, above=0)

    def init(
        self,
        like: Array,
        shape: tuple[int, ...],
        diagonal: tuple[bool, ...],
        diagonal_blocks: tuple[int, ...] | None = None,
    ) -> KronState:
        """Q = `preconditioner_init_scale` I, spread evenly over the factors.

        Args:
            like: any array; its dtype (at least the factors' precision) and device are used.
            shape: (*batch, n_1, ..., n_d), a stack of blocks.
            diagonal: for each of the d axes, whether its factor is diagonal.
            diagonal_blocks: for each, how many equal blocks are on its factor's diagonal, with zeros
                around them; 1: the factor is dense. Default: all are dense or diagonal.
        """
        given = self.preconditioner_init_scale
        xp = array_namespace(like)
        scale = as_scalar(1.0 if given is None else given, like) ** (2 if self.fits_P else 1)
        where = {"dtype": like.dtype, "device": device_of(like)}
        batch, sides = shape[: len(shape) - len(diagonal)], shape[len(shape) - len(diagonal) :]
        factors = []
        cuts = diagonal_blocks or (1,) * len(sides)
        for side, is_diagonal, c in zip(sides, diagonal, cuts, strict=True):
            own = kronecker.factor_shape(side, is_diagonal, c)
            ones = xp.zeros((*batch, *own), **where) + scale ** (1 / len(sides))
            factors.append(ones if is_diagonal else ones * linalg.eye_like(ones))
        lipschitz = tuple(xp.zeros(batch, **where) for _ in sides)
        return self.square(KronState(tuple(factors), lipschitz, tuple(factors)))

    @property
    def fits_P(self) -> bool:
        """Whether the factors are those of P and not of its root Q."""
        return self.geometry in ("PRO4P", "QUAD4P")

    @property
    def factor_form(self) -> FactorForm:
        """What updates leave a dense factor: symmetric, zero below the diagonal, or neither."""
        forms: dict[str, FactorForm] = {"EQ": "upper", "QUAD": "symmetric", "QUAD4P": "symmetric"}
        return forms.get(self.geometry, "general")

    def update(
        self,
        state: KronState,
        gradient: Array,
        noise: Array,
        preconditioner_lr: Scalar,
        vector: Array | None = None,
    ) -> KronState:
        """Fit the factors to one more gradient. Blocks whose gradient is all zero are left alone.

        So are blocks on a factor's diagonal where the gradient is zero all along the other axes; for the
        other factors these parts do not count in c.

        With h = P g, T = Σ h hᵀ over the other axes and c = numel / n the value of T for white h, the
        steps on one factor are, for μ = preconditioner_lr / L, L = max(betaL L + (1 - betaL) ℓ, ℓ) and
        ℓ = ‖T‖ + c:

            QEQ        Q ← Q - μ Q (T - c I)
            Q0.5EQ1.5  Q ← rotate(Q - μ (T - c I) Q),  PRO4P the same with P for Q
            QUAD       Q ← sym(K Q K),  K = I - ½ μ (T - c I)
            QUAD4P     P ← sym(K P K),  K = I - μ (T - c I)
            QEP        Q ← Q - μ (Q T Qᵀ - c Q Qᵀ) Q,  ℓ = ‖Q T Qᵀ + c Q Qᵀ‖
            EQ         Q ← Q - μ triu(T₁ - T₂) Q,  T₁ of Q g, T₂ of Q⁻ᵀ v

        The blocks of a block-diagonal factor take these steps one by one, with T's own block for T; the
        largest of their L's is what they remember.

        With `vector`, the same for Newton: H v stands for g, Σ v vᵀ for c I (QEP: Q Σ v vᵀ Qᵀ for
        c Q Qᵀ), and ℓ = ‖T + Σ v vᵀ‖.

        Args:
            state: its `preconditioners` must be those of its factors (`refresh`).
            gradient: (..., n_1, ..., n_d), g or H v.
            noise: like `gradient`, mean 0 and variance 1; v in EQ without `vector`, else only damping.
            preconditioner_lr: in (0, 1).
            vector: like `gradient`, v of the pair (v, H v); mean 0 and variance 1.

        Returns:
            The state with new factors and L; its `preconditioners` are out of date until `refresh`.
        """
        vectors = None if vector is None else [vector]
        return self._update_all([state], [gradient], [noise], preconditioner_lr, vectors)[0]

    def fit(
        self,
        states: Sequence[KronState],
        gradients: Sequence[Array],
        noises: Sequence[Array],
        preconditioner_lr: Scalar,
        vectors: Sequence[Array] | None = None,
        *,
        with_P: bool = True,
    ) -> list[KronState]:
        """`update` and `refresh` of several stacks: factors of one size, of whatever axis, in one go.

        Args:
            states, gradients, noises: one for each stack, as `update` takes them.
            preconditioner_lr: of all of them.
            vectors: one for each stack; None: the gradients are not H v.
            with_P: whether to compute P, too; else `preconditioners` are out of date.

        Raises:
            ValueError: not as many of one as of the others.
        """
        updated = self._update_all(states, gradients, noises, preconditioner_lr, vectors)
        return self._refresh_all(updated, with_P)

    def _update_all(
        self,
        states: Sequence[KronState],
        gradients: Sequence[Array],
        noises: Sequence[Array],
        preconditioner_lr: Scalar,
        vectors: Sequence[Array] | None,
    ) -> list[KronState]:
        evidence: list[Evidence] = []
        given = [None] * len(states) if vectors is None else vectors
        for stack in zip(states, gradients, noises, given, strict=True):
            evidence += evidence_of(self, *stack)
        fitted = iter(together(functools.partial(self._fitted, preconditioner_lr), evidence))
        found = []
        for state in states:
            shape = state.lipschitz[0].shape
            factors, lipschitz = [], []
            for q, L in zip(state.factors, state.lipschitz, strict=True):
                new_q, new_L = next(fitted)
                xp = array_namespace(new_q)
                factors.append(xp.astype(xp.reshape(new_q, q.shape), q.dtype))
                new_L = _largest_of_each(new_L, math.prod(shape))
                lipschitz.append(xp.astype(xp.reshape(new_L, shape), L.dtype))
            found.append(KronState(tuple(factors), tuple(lipschitz), state.preconditioners))
        return found

    def _fitted(self, preconditioner_lr: Scalar, *evidence: Array) -> tuple[Array, Array]:
        """New factors and L of blocks with this `Evidence`."""
        q, L, T, white, u, usable = evidence
        xp = array_namespace(q)
        is_diagonal, scalar = q.ndim == 2, white.ndim == 1
        total = T if scalar else T + white
        bound = xp.max(total, axis=-1) if is_diagonal else linalg.spectral_norm_bound(total)
        if scalar:
            bound = bound + white
        betaL = as_scalar(self.betaL, L)
        new_L = xp.maximum(betaL * (L / u / u) + (1 - betaL) * bound, bound)
        step = as_scalar(preconditioner_lr, L) / new_L
        step = xp.where(usable, step, 0.0)
        new_q = self._step(q, T, white, step, is_diagonal, scalar)
        new_L = xp.minimum(new_L * u * u, _LARGEST_LIPSCHITZ)
        return new_q, xp.where(usable, new_L, L)

    def _step(
        self, q: Array, T: Array, white: Array, step: Array, is_diagonal: bool, scalar: bool
    ) -> Array:
        xp = array_namespace(q)
        half = 1.0 if self.fits_P else 0.5  # of a quadratic step, whose two sides add up
        if is_diagonal:
            relative = step[..., None] * (T - (white[..., None] if scalar else white))
            quadratic = self.geometry in ("QUAD", "QUAD4P")
            return q * (1 - half * relative) ** 2 if quadratic else q * (1 - relative)
        step = step[..., None, None]
        if self.geometry == "EQ":
            return q - step * xp.matmul(xp.triu(T - white), q)
        if self.geometry == "QEP":
            return q - step * xp.matmul(T - white, q)
        number = white[..., None, None] if scalar else None

        def less(x: Array, first: Array, second: Array, step: Array) -> Array:
            """x - step (T - white) x, or with the factors in the other order."""
            product = xp.matmul(first, second)
            product *= -step
            product += x if number is None else x * (1 + step * number)
            return product

        E = T - white if number is None else T
        if self.geometry == "QEQ":
            return less(q, q, E, step)
        if self.geometry in ("Q0.5EQ1.5", "PRO4P"):
            return linalg.rotate_towards_symmetry(less(q, E, q, step), step[..., 0, 0] > 0)
        q = less(q, E, q, half * step)
        return linalg.symmetrize(less(q, q, E, half * step))

    def refresh(self, state: KronState) -> KronState:
        """Balance the factors (a gauge: Q's product stays) and cache the P_i."""
        return self._refresh_all([state])[0]

    def _refresh_all(self, states: Sequence[KronState], with_P: bool = True) -> list[KronState]:
        flattened = [[flat(q, s.lipschitz[0].ndim) for q in s.factors] for s in states]
        found_sizes = iter(together(_sizes, [(stacked(q),) for factors in flattened for q in factors]))
        sizes = [[_largest_of_each(next(found_sizes)[0], q.shape[0]) for q in own] for own in flattened]
        gains = together(kronecker.balancing, [tuple(own) for own in sizes])
        pairs = [
            (stacked(q), for_each(gain, q.shape[1]) if q.ndim == 4 else gain)
            for own, of_own in zip(flattened, gains, strict=True)
            for q, gain in zip(own, of_own, strict=True)
        ]
        refreshed = iter(together(functools.partial(self._balanced, with_P), pairs))
        found = []
        for state in states:
            arrays = [next(refreshed) for _ in state.factors]  # each factor, and its P if asked for
            shaped = [
                tuple(array_namespace(x).reshape(x, old.shape) for x in own)
                for own, old in zip(arrays, state.factors, strict=True)
            ]
            factors = tuple(own[0] for own in shaped)
            preconditioners = tuple(own[1] for own in shaped) if with_P else state.preconditioners
            found.append(KronState(factors, state.lipschitz, preconditioners))
        return found

    def _balanced(self, with_P: bool, q: Array, gain: Array) -> tuple[Array, ...]:
        """Factors (k, n, n) or (k, n) times their `gain` (k,), and what is cached of them."""
        xp = array_namespace(q)
        q = xp.astype(kronecker.scaled((lift(q),), gain)[0], q.dtype)
        return (q, self._square(q, q.ndim == 2)) if with_P else (q,)

    def square(self, state: KronState) -> KronState:
        """Cache P_i = Q_iᵀ Q_i of the factors as they are; where those are P's, symmetrized."""
        return self.square_all([state])[0]

    def square_all(self, states: Sequence[KronState]) -> list[KronState]:
        """`square` of several stacks, computed together."""
        own_blocks = [(stacked(flat(q, s.lipschitz[0].ndim)),) for s in states for q in s.factors]
        squares = iter(together(lambda q: (self._square(q, q.ndim == 2),), own_blocks))
        found = []
        for state in states:
            own = [(q, next(squares)[0]) for q in state.factors]
            P = tuple(array_namespace(p).reshape(p, q.shape) for q, p in own)
            found.append(state._replace(preconditioners=P))
        return found

    def _square(self, q: Array, is_diagonal: bool) -> Array:
        if self.fits_P:
            return q if is_diagonal else linalg.symmetrize(q)
        if is_diagonal:
            return q * q
        return array_namespace(q).astype(linalg.gram(lift(q)), q.dtype)

    def before_update(self, old: KronState, new: KronState) -> KronState:
        """What preconditions a step whose update, from `old` to `new`, comes after it.

        That is `old`, but for blocks whose scale the first gradient has yet to set.
        """
        if self.preconditioner_init_scale is not None:
            return old
        xp = array_namespace(old.lipschitz[0])
        bounds = functools.reduce(operator.add, old.lipschitz)  # 0 until the first update

        def chosen(a: Array, b: Array) -> Array:
            axes = (1,) * (a.ndim - bounds.ndim)
            return xp.where(xp.reshape(bounds, (*bounds.shape, *axes)) > 0, a, b)

        return KronState(*(tuple(map(chosen, *pair)) for pair in zip(old, new, strict=True)))

    def lifted(self, state: KronState) -> KronState:
        """The state in at least single precision, for `update` before `rounded`."""
        wide = tuple(lift(q) for q in state.factors)
        return state._replace(factors=wide, preconditioners=tuple(map(lift, state.preconditioners)))

    def rounded(
        self, state: KronState, noises: tuple[Array, ...], dtype: Any, *, with_P: bool = True
    ) -> KronState:
        """The state with factors rounded to `dtype` by chance, one noise like each.

        With their P; unless `with_P` it is out of date.
        """
        factors = tuple(
            stochastic_round(q, noise, dtype) for q, noise in zip(state.factors, noises, strict=True)
        )
        state = state._replace(factors=factors)
        return self.square(state) if with_P else state

    def precondition(self, state: KronState, gradient: Array) -> Array:
        """P g, with the preconditioners as `refresh` left them; dtype and shape of `gradient`."""
        xp = array_namespace(gradient)
        P = tuple(lift(p) for p in state.preconditioners)
        direction = kronecker.apply(P, xp.astype(gradient, P[0].dtype), symmetric=True)
        return xp.astype(direction, gradient.dtype)


def _sizes(q: Array) -> tuple[Array]:
    """The largest entry of each of a stack of factors, (k,)."""
    return (linalg.largest_entry(lift(q), tuple(range(1, q.ndim))),)


def _largest_of_each(x: Array, count: int) -> Array:
    """Numbers of blocks, the largest for each of `count` matrices."""
    if x.shape[0] == count:
        return x
    xp = array_namespace(x)
    return xp.max(xp.reshape(x, (count, -1)), axis=1)
