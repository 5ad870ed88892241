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

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from suite.core import kronecker, linalg
from suite.core._namespace import Array, Scalar, array_namespace, as_scalar, device_of, lift
from suite.core.checks import check_choice, check_number
from suite.core.rounding import stochastic_round

Geometry = Literal["Q0.5EQ1.5", "QEQ", "QUAD", "EQ", "QEP", "PRO4P", "QUAD4P"]
FactorForm = Literal["general", "symmetric", "upper"]

_LARGEST_LIPSCHITZ = 1e30  # it must stay finite in float32 to be forgotten again


class KronState(NamedTuple):
    """One stack of blocks of one shape; index i runs over a block's axes."""

    factors: tuple[Array, ...]  # Q_i, (..., n_i, n_i) dense or (..., n_i) diagonal
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

    def init(self, like: Array, shape: tuple[int, ...], diagonal: tuple[bool, ...]) -> KronState:
        """Q = `preconditioner_init_scale` I, spread evenly over the factors.

        Args:
            like: any array; its dtype (at least the factors' precision) and device are used.
            shape: (*batch, n_1, ..., n_d), a stack of blocks.
            diagonal: for each of the d axes, whether its factor is diagonal.
        """
        given = self.preconditioner_init_scale
        xp = array_namespace(like)
        scale = as_scalar(1.0 if given is None else given, like) ** (2 if self.fits_P else 1)
        where = {"dtype": like.dtype, "device": device_of(like)}
        batch, sides = shape[: len(shape) - len(diagonal)], shape[len(shape) - len(diagonal) :]
        factors = []
        for side, is_diagonal in zip(sides, diagonal, strict=True):
            shape_of_factor = (*batch, side) if is_diagonal else (*batch, side, side)
            ones = xp.zeros(shape_of_factor, **where) + scale ** (1 / len(sides))
            factors.append(ones if is_diagonal else ones * xp.eye(side, **where))
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

        With h = P g, T = Σ h hᵀ over the other axes and c = numel / n the value of T for white h, the
        steps on one factor are, for μ = preconditioner_lr / L, L = max(betaL L + (1 - betaL) ℓ, ℓ) and
        ℓ = ‖T‖ + c:

            QEQ        Q ← Q - μ Q (T - c I)
            Q0.5EQ1.5  Q ← rotate(Q - μ (T - c I) Q),  PRO4P the same with P for Q
            QUAD       Q ← sym(K Q K),  K = I - ½ μ (T - c I)
            QUAD4P     P ← sym(K P K),  K = I - μ (T - c I)
            QEP        Q ← Q - μ (Q T Qᵀ - c Q Qᵀ) Q,  ℓ = ‖Q T Qᵀ + c Q Qᵀ‖
            EQ         Q ← Q - μ triu(T₁ - T₂) Q,  T₁ of Q g, T₂ of Q⁻ᵀ v

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
        xp = array_namespace(gradient)
        ndim = len(state.factors)
        dtype = state.factors[0].dtype
        factors = tuple(lift(q) for q in state.factors)
        compute = factors[0].dtype
        g, noise = xp.astype(gradient, compute), xp.astype(noise, compute)
        batch = g.ndim - ndim
        own_axes = tuple(range(batch, g.ndim))
        # An exactly zero gradient says nothing about curvature; fitting it would inflate Q.
        evidence = linalg.largest_entry(g, own_axes) > 0
        preconditioners = tuple(lift(p) for p in state.preconditioners)
        v = None if vector is None else xp.astype(vector, compute)
        if self.preconditioner_init_scale is None:
            gain = self._first_scale(g, v, state.lipschitz[0], own_axes)
            factors = _scaled(factors, gain * gain if self.fits_P else gain, batch)
            preconditioners = _scaled(preconditioners, gain * gain, batch)
        dither = xp.abs(g)  # changed in place, as other fresh arrays here: new ones cost time on a CPU
        dither *= float(xp.finfo(compute).eps)
        dither += as_scalar(self.damping, g)
        dither *= noise
        dither += g
        g = dither
        reference = v
        if self.geometry == "EQ":
            signal = kronecker.apply(factors, g)
            reference = _inverse_transposed(factors, noise if v is None else v)
        else:
            signal = kronecker.apply(preconditioners, g)
        # Everything below is in units of the signal's largest entry u (T / u², c / u², L / u²): the
        # update is a ratio, and squares of 1e20 do not fit in float32.
        unit = linalg.largest_entry(signal, own_axes, keepdims=True)
        if reference is not None:
            unit = xp.maximum(unit, linalg.largest_entry(reference, own_axes, keepdims=True))
            reference = reference / xp.maximum(unit, xp.zeros_like(unit) + 1)
        unit = xp.maximum(unit, xp.zeros_like(unit) + 1)
        signal /= unit
        u = xp.reshape(unit, g.shape[:batch])

        new_factors, new_lipschitz = [], []
        for axis, (q, old_L) in enumerate(zip(factors, state.lipschitz, strict=True)):
            is_diagonal = kronecker.is_diagonal(q, g, ndim)
            seen = kronecker.apply_factor(q, signal, axis, ndim) if self.geometry == "QEP" else signal
            T = kronecker.gram(seen, axis, ndim, diagonal=is_diagonal)
            scalar = False  # whether `white` is a number times I
            if self.geometry == "QEP" and reference is not None:
                own = kronecker.apply_factor(q, reference, axis, ndim)
                white = kronecker.gram(own, axis, ndim, diagonal=is_diagonal)
                total = T + white
            elif self.geometry == "QEP":
                square = q * q if is_diagonal else linalg.gram(linalg.transpose(q))
                c = math.prod(g.shape[batch:]) / g.shape[batch + axis] / u / u
                white = square * xp.reshape(c, (*c.shape, *(1,) * (q.ndim - batch)))
                total = T + white
            elif reference is None:
                scalar = True
                white = math.prod(g.shape[batch:]) / g.shape[batch + axis] / u / u
                total = T
            else:
                white = kronecker.gram(reference, axis, ndim, diagonal=is_diagonal)
                total = T + white
            bound = xp.max(total, axis=-1) if is_diagonal else linalg.spectral_norm_bound(total)
            if scalar:
                bound = bound + white
            L = xp.astype(old_L, compute) / u / u
            betaL = as_scalar(self.betaL, L)
            L = xp.maximum(betaL * L + (1 - betaL) * bound, bound)
            step = as_scalar(preconditioner_lr, L) / L
            step = xp.where(evidence, step, xp.zeros_like(step))
            new_q = self._step(q, T, white, step, is_diagonal, scalar)
            new_factors.append(xp.astype(new_q, dtype))
            L = xp.minimum(L * u * u, xp.zeros_like(L) + _LARGEST_LIPSCHITZ)
            new_lipschitz.append(xp.where(evidence, xp.astype(L, old_L.dtype), old_L))
        return KronState(tuple(new_factors), tuple(new_lipschitz), state.preconditioners)

    def _first_scale(
        self, g: Array, v: Array | None, lipschitz: Array, own_axes: tuple[int, ...]
    ) -> Array:
        """What a block's factors still lack, each: mean(g⁴)^(-1/8 d) at its first evidence, else 1.

        E[(P g)²] = 1 asks for P ~ 1 / |g|, and Q is its root; the fourth moment weighs large entries, so
        that the first steps are rather too short. Source: Li 2024 (arXiv:2402.11858), implementation.
        """
        xp = array_namespace(g)
        largest = xp.max(xp.abs(g), axis=own_axes)
        fresh = (lipschitz == 0) & (largest > 0)
        one = xp.zeros_like(largest) + 1
        unit = g / xp.reshape(
            xp.where(fresh, largest, one), (*g.shape[: -len(own_axes)], *(1,) * len(own_axes))
        )
        moment = xp.sqrt(xp.sqrt(xp.mean(unit**4, axis=own_axes)))  # in units of the largest entry
        size = xp.where(fresh, moment * largest + as_scalar(self.damping, g), one)
        if v is not None:
            size = size / xp.where(fresh, xp.sqrt(xp.mean(v * v, axis=own_axes)), one)
        return (1 / xp.sqrt(size)) ** (1 / len(own_axes))

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
        factors = balance(state.factors, state.lipschitz[0].ndim)
        return self.square(state._replace(factors=factors))

    def square(self, state: KronState) -> KronState:
        """Cache P_i = Q_iᵀ Q_i of the factors as they are; where those are P's, symmetrized."""
        batch = state.lipschitz[0].ndim
        if self.fits_P:
            own = tuple(q if q.ndim == batch + 1 else linalg.symmetrize(q) for q in state.factors)
            return state._replace(preconditioners=own)
        return state._replace(preconditioners=_squares(state.factors, batch))

    def lifted(self, state: KronState) -> KronState:
        """The state in at least single precision, for `update` before `rounded`."""
        wide = tuple(lift(q) for q in state.factors)
        return state._replace(factors=wide, preconditioners=tuple(map(lift, state.preconditioners)))

    def rounded(self, state: KronState, noises: tuple[Array, ...], dtype: Any) -> KronState:
        """The state with factors rounded to `dtype` by chance, one noise like each, and their cache."""
        factors = tuple(
            stochastic_round(q, noise, dtype) for q, noise in zip(state.factors, noises, strict=True)
        )
        return self.square(state._replace(factors=factors))

    def precondition(self, state: KronState, gradient: Array) -> Array:
        """P g, with the preconditioners as `refresh` left them; dtype and shape of `gradient`."""
        xp = array_namespace(gradient)
        P = tuple(lift(p) for p in state.preconditioners)
        return xp.astype(kronecker.apply(P, xp.astype(gradient, P[0].dtype)), gradient.dtype)


def balance(factors: tuple[Array, ...], batch: int) -> tuple[Array, ...]:
    """Give all factors of a block the same largest entry; their Kronecker product stays the same.

    Args:
        factors: dense (..., n, n) or diagonal (..., n) over `batch` leading axes.
        batch: how many leading axes stack blocks.
    """
    if len(factors) == 1:
        return factors
    xp = array_namespace(factors[0])

    def largest(q: Array) -> Array:
        return xp.max(xp.abs(lift(q)), axis=tuple(range(batch, q.ndim)))

    sizes = [largest(q) for q in factors]
    usable = sizes[0] > 0  # a factor that is zero cannot be balanced against the others
    for size in sizes[1:]:
        usable = usable & (size > 0)
    one = xp.zeros_like(sizes[0]) + 1
    logs = [xp.log(xp.where(usable, size, one)) for size in sizes]
    mean = logs[0]
    for log in logs[1:]:
        mean = mean + log
    mean = mean / len(factors)
    return tuple(
        xp.astype(_scaled((lift(q),), xp.exp(mean - log), batch)[0], q.dtype)
        for q, log in zip(factors, logs, strict=True)
    )


def _squares(factors: tuple[Array, ...], batch: int) -> tuple[Array, ...]:
    xp = array_namespace(factors[0])

    def square(q: Array) -> Array:
        if q.ndim == batch + 1:
            return q * q
        lifted = lift(q)
        return xp.astype(linalg.gram(lifted), q.dtype)

    return tuple(square(q) for q in factors)


def _scaled(factors: tuple[Array, ...], gain: Array, batch: int) -> tuple[Array, ...]:
    """Every factor of a block times the block's number in `gain` (...)."""
    xp = array_namespace(gain)
    return tuple(q * xp.reshape(gain, (*gain.shape, *(1,) * (q.ndim - batch))) for q in factors)


def _inverse_transposed(factors: tuple[Array, ...], x: Array) -> Array:
    """(Q_1 ⊗ Q_2 ⊗ ...)⁻ᵀ x for upper triangular and diagonal factors."""
    xp = array_namespace(x)
    ndim = len(factors)
    for axis, q in enumerate(factors):
        if kronecker.is_diagonal(q, x, ndim):
            x = kronecker.apply_factor(1 / q, x, axis, ndim)
        else:
            rows = kronecker.unfold(x, axis, ndim)
            solved = linalg.solve_triangular(xp.matrix_transpose(q), rows, upper=False)
            x = kronecker.fold(solved, axis, x.shape, ndim)
    return x
