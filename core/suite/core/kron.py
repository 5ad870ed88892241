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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from suite.core import kronecker, linalg
from suite.core._namespace import Array, Scalar, array_namespace, as_scalar, device_of, lift
from suite.core.buckets import together
from suite.core.checks import check_choice, check_number
from suite.core.rounding import stochastic_round

Geometry = Literal["Q0.5EQ1.5", "QEQ", "QUAD", "EQ", "QEP", "PRO4P", "QUAD4P"]
FactorForm = Literal["general", "symmetric", "upper"]

_LARGEST_LIPSCHITZ = 1e30  # it must stay finite in float32 to be forgotten again


class KronState(NamedTuple):
    """One stack of blocks of one shape; index i runs over a block's axes."""

    factors: tuple[Array, ...]  # Q_i, in the forms of `suite.core.kronecker`
    lipschitz: tuple[Array, ...]  # L_i, (...,): remembered bound of the update's smoothness
    preconditioners: tuple[Array, ...]  # P_i = Q_iᵀ Q_i, as `refresh` left them


class _Evidence(NamedTuple):
    """What k blocks tell their factors of one axis, in units of the signal's largest entry u.

    Of block-diagonal factors each block on the diagonal is one of the k.
    """

    factors: Array  # (k, n, n), or (k, n) of diagonal ones
    lipschitz: Array  # (k,), as it was, in units of 1
    seen: Array  # T / u², like the factors
    white: Array  # c / u², (k,), or what stands for it, like the factors
    unit: Array  # (k,), u
    usable: Array  # (k,), bool: whether it is evidence


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
            own = (side,) if is_diagonal else (side, side) if c == 1 else (c, side // c, side // c)
            ones = xp.zeros((*batch, *own), **where) + scale ** (1 / len(sides))
            factors.append(ones if is_diagonal else ones * xp.eye(own[-1], **where))
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
    ) -> list[KronState]:
        """`update` and `refresh` of several stacks: factors of one size, of whatever axis, in one go.

        Args:
            states, gradients, noises: one for each stack, as `update` takes them.
            preconditioner_lr: of all of them.
            vectors: one for each stack; None: the gradients are not H v.

        Raises:
            ValueError: not as many of one as of the others.
        """
        updated = self._update_all(states, gradients, noises, preconditioner_lr, vectors)
        return self._refresh_all(updated)

    def _update_all(
        self,
        states: Sequence[KronState],
        gradients: Sequence[Array],
        noises: Sequence[Array],
        preconditioner_lr: Scalar,
        vectors: Sequence[Array] | None,
    ) -> list[KronState]:
        evidence: list[_Evidence] = []
        given = [None] * len(states) if vectors is None else vectors
        for stack in zip(states, gradients, noises, given, strict=True):
            evidence += self._evidence(*stack)
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

    def _evidence(
        self, state: KronState, gradient: Array, noise: Array, vector: Array | None
    ) -> list[_Evidence]:
        """What a stack of blocks tells its factors, axis by axis, as if it had one leading axis."""
        xp = array_namespace(gradient)
        ndim, batch = len(state.factors), state.lipschitz[0].ndim

        def flat(x: Array) -> Array:
            return _flat(x, batch)

        factors, preconditioners = (
            tuple(flat(lift(q)) for q in kept) for kept in (state.factors, state.preconditioners)
        )
        lipschitz = tuple(map(flat, state.lipschitz))
        compute = factors[0].dtype
        g, noise = (flat(xp.astype(x, compute)) for x in (gradient, noise))
        v = None if vector is None else flat(xp.astype(vector, compute))
        own_axes = tuple(range(1, g.ndim))
        # An exactly zero gradient says nothing about curvature; fitting it would inflate Q.
        usable, told = _told_by(g, factors)
        if self.preconditioner_init_scale is None:
            gain = self._first_scale(g, v, lipschitz[0], own_axes)
            factors = kronecker.scaled(factors, gain * gain if self.fits_P else gain)
            preconditioners = kronecker.scaled(preconditioners, gain * gain)
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
            seen = kronecker.apply_factor(q, signal, axis, ndim) if self.geometry == "QEP" else signal
            form = {"diagonal": is_diagonal, "blocks": kronecker.diagonal_blocks(q, signal, ndim)}
            T = kronecker.gram(seen, axis, ndim, **form)
            if reference is not None:
                own = reference
                if self.geometry == "QEP":
                    own = kronecker.apply_factor(q, reference, axis, ndim)
                white = kronecker.gram(own, axis, ndim, **form)
            else:
                white = math.prod(g.shape[1:]) / g.shape[1 + axis] / u / u
                for other, flags in enumerate(told):
                    if other != axis and flags is not None:
                        white = white * xp.mean(xp.astype(flags, compute), axis=1)
                if self.geometry == "QEP":
                    square = q * q if is_diagonal else linalg.gram(linalg.transpose(q))
                    white = kronecker.scaled((square,), white)[0]
            of_axis, flags = _Evidence(q, xp.astype(L, compute), T, white, u, usable), told[axis]
            if flags is not None:
                each = _on_diagonals(of_axis, q.shape[1])
                of_axis = each._replace(usable=xp.reshape(flags, (-1,)))
            found.append(of_axis)
        return found

    def _fitted(self, preconditioner_lr: Scalar, *evidence: Array) -> tuple[Array, Array]:
        """New factors and L of blocks with this `_Evidence`."""
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
        return self._refresh_all([state])[0]

    def _refresh_all(self, states: Sequence[KronState]) -> list[KronState]:
        flat = [[_flat(q, s.lipschitz[0].ndim) for q in s.factors] for s in states]
        found_sizes = iter(together(_sizes, [(_stacked(q),) for factors in flat for q in factors]))
        sizes = [[_largest_of_each(next(found_sizes)[0], q.shape[0]) for q in own] for own in flat]
        gains = together(kronecker.balancing, [tuple(own) for own in sizes])
        pairs = [
            (_stacked(q), _for_each(gain, q.shape[1]) if q.ndim == 4 else gain)
            for own, of_own in zip(flat, gains, strict=True)
            for q, gain in zip(own, of_own, strict=True)
        ]
        refreshed = iter(together(self._balanced, pairs))
        found = []
        for state in states:
            factors, preconditioners = [], []
            for old in state.factors:
                q, P = next(refreshed)
                xp = array_namespace(q)
                factors.append(xp.reshape(q, old.shape))
                preconditioners.append(xp.reshape(P, old.shape))
            found.append(KronState(tuple(factors), state.lipschitz, tuple(preconditioners)))
        return found

    def _balanced(self, q: Array, gain: Array) -> tuple[Array, Array]:
        """Factors (k, n, n) or (k, n) times their `gain` (k,), and what is cached of them."""
        xp = array_namespace(q)
        q = xp.astype(kronecker.scaled((lift(q),), gain)[0], q.dtype)
        return q, self._square(q, q.ndim == 2)

    def square(self, state: KronState) -> KronState:
        """Cache P_i = Q_iᵀ Q_i of the factors as they are; where those are P's, symmetrized."""
        return self.square_all([state])[0]

    def square_all(self, states: Sequence[KronState]) -> list[KronState]:
        """`square` of several stacks, computed together as `fit` does it: to the same last bit."""
        flat = [(_stacked(_flat(q, s.lipschitz[0].ndim)),) for s in states for q in s.factors]
        squares = iter(together(lambda q: (self._square(q, q.ndim == 2),), flat))
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
        direction = kronecker.apply(P, xp.astype(gradient, P[0].dtype), symmetric=True)
        return xp.astype(direction, gradient.dtype)


def _sizes(q: Array) -> tuple[Array]:
    """The largest entry of each of a stack of factors, (k,)."""
    return (linalg.largest_entry(lift(q), tuple(range(1, q.ndim))),)


def _stacked(x: Array) -> Array:
    """Of block-diagonal matrices (k, c, n, n) the blocks, (k c, n, n); others as they are."""
    return array_namespace(x).reshape(x, (-1, *x.shape[2:])) if x.ndim == 4 else x


def _told_by(g: Array, factors: Sequence[Array]) -> tuple[Array, list[Array | None]]:
    """Which gradients have an entry that is not zero, and along which blocks of a factor's diagonal.

    Returns:
        Flags (k,), and for each factor (k, c); None of one that is not block-diagonal.
    """
    xp = array_namespace(g)
    counts = [q.shape[1] if q.ndim == 4 else 1 for q in factors]
    grid = [x for n, c in zip(g.shape[1:], counts, strict=True) for x in (c, n // c)]
    inside = tuple(range(2, len(grid) + 1, 2))
    largest = linalg.largest_entry(xp.reshape(g, (g.shape[0], *grid)), inside)  # (k, c_1, ..., c_d)
    told: list[Array | None] = []
    for axis, count in enumerate(counts, 1):
        others = tuple(i for i in range(1, largest.ndim) if i != axis)
        flags = (xp.max(largest, axis=others) if others else largest) > 0
        told.append(flags if count > 1 else None)
    return xp.max(largest, axis=tuple(range(1, largest.ndim))) > 0, told


def _along(flags: Array, axis: int, x: Array) -> Array:
    """Flags (k, c) of the c parts of an axis of `x`, (k, ...), as ones and zeros to multiply it with."""
    xp = array_namespace(x)
    side = x.shape[1 + axis]
    each = xp.broadcast_to(flags[:, :, None], (*flags.shape, side // flags.shape[1]))
    shape = (x.shape[0], *(side if i == axis else 1 for i in range(x.ndim - 1)))
    return xp.astype(xp.reshape(each, shape), x.dtype)


def _on_diagonals(evidence: _Evidence, count: int) -> _Evidence:
    """Evidence of block-diagonal factors as that of the `count` blocks of each."""
    return _Evidence(*(_for_each(x, count) if x.ndim == 1 else _stacked(x) for x in evidence))


def _for_each(x: Array, count: int) -> Array:
    """Numbers (k,) of matrices as those of their blocks, `count` each."""
    xp = array_namespace(x)
    return xp.reshape(xp.broadcast_to(x[:, None], (x.shape[0], count)), (-1,))


def _largest_of_each(x: Array, count: int) -> Array:
    """Numbers of blocks, the largest for each of `count` matrices."""
    if x.shape[0] == count:
        return x
    xp = array_namespace(x)
    return xp.max(xp.reshape(x, (count, -1)), axis=1)


def _flat(x: Array, batch: int) -> Array:
    """With one leading axis in place of `batch` of them."""
    if batch == 1:
        return x
    return array_namespace(x).reshape(x, (math.prod(x.shape[:batch]), *x.shape[batch:]))


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
