"""How Kron's Q and P = QᵀQ are kept between steps: whole or as triangles, with P or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from suite.core import kron as core_kron
from suite.core import kronecker
from suite.core.packing import pack, pack_upper, side_of, unpack, unpack_upper


@dataclass(frozen=True)
class KronStorage:
    """What is kept of a `suite.core.kron.KronState`, and the state that a step takes made of it.

    Args:
        form: of Q, see `suite.core.kron.Kron.factor_form`; 'general' ones cannot be packed.
        packed: whether what has two equal triangles, or one of zeros, is kept as one; diagonals are not.
        cached: whether P is kept, and not computed from Q when it is needed; None: that of an axis is
            if computing it would take long, see `suite.core.kronecker.squares_are_cheap`.
    """

    form: core_kron.FactorForm
    packed: bool
    cached: bool | None

    def keep(self, state: core_kron.KronState) -> core_kron.KronState:
        """The state as it is kept."""
        factors = tuple(map(self.keep_factor, state.factors))
        kept = self.keep_preconditioners(factors, state.preconditioners)
        return state._replace(factors=factors, preconditioners=kept)

    def keep_preconditioners(
        self, factors: Sequence[torch.Tensor], preconditioners: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """P of the axes of which it is kept, as it is, beside factors as they are."""
        pairs = zip(preconditioners, self._kept_axes(factors), strict=True)
        return tuple(self._keep_preconditioner(p) for p, is_kept in pairs if is_kept)

    def full(
        self, rule: core_kron.Kron, kept: core_kron.KronState, *, factors: bool
    ) -> core_kron.KronState:
        """Undo `keep`; the factors only if they are asked for."""
        is_kept = self._kept_axes(kept.factors)
        found = iter(unpack(p) if self._is_packed(p) else p for p in kept.preconditioners)
        needed = zip(kept.factors, is_kept, strict=True)
        whole = [self.full_factor(q) if factors or not own else q for q, own in needed]
        missing = tuple(q for q, own in zip(whole, is_kept, strict=True) if not own)
        if missing and not (self.packed and self.form == "symmetric" and rule.fits_P):
            missing = rule.square(kept._replace(factors=missing)).preconditioners
        squares = iter(missing)  # of packed P themselves they are these, to the last bit
        preconditioners = tuple(next(found) if own else next(squares) for own in is_kept)
        return kept._replace(factors=tuple(whole), preconditioners=preconditioners)

    def _kept_axes(self, factors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
        """For each axis, whether P is kept beside the factors that are, (blocks, ...)."""
        if self.cached is not None:
            return (self.cached,) * len(factors)
        matrices = [1 if q.ndim == 2 else self._side(q) for q in factors]
        counts = [q.shape[1] if q.ndim in (2, 4) else 1 for q in factors]
        sides = [m * c for m, c in zip(matrices, counts, strict=True)]
        return tuple(not cheap for cheap in kronecker.squares_are_cheap(sides, matrices))

    def _side(self, q: torch.Tensor) -> int:
        """n of matrices (..., n, n) as they are kept."""
        return side_of(q) if self.form != "general" and self._is_packed(q) else q.shape[-1]

    def require(self, rule: core_kron.Kron, stochastic_rounding: bool) -> None:
        """ValueError for settings with which factors would not stay what is packed."""
        if not self.packed:
            return
        if rule.factor_form != self.form:
            raise ValueError(
                f"geometry must leave factors {self.form!r}, as packed_factors=True has them, got "
                f"{rule.geometry!r}, whose factors are {rule.factor_form!r}"
            )
        if stochastic_rounding and self.form == "symmetric":
            raise ValueError(
                "stochastic_rounding must be False with packed_factors=True and "
                f"geometry={rule.geometry!r}: rounded by chance, factors are not symmetric"
            )

    def keep_factor(self, q: torch.Tensor) -> torch.Tensor:
        """A stack of Q's as it is kept: (blocks, n, n), diagonal (blocks, n) or block-diagonal."""
        if self.form == "general" or not self._is_packed(q):
            return q
        return pack_upper(q) if self.form == "upper" else pack(q, symmetric=True)

    def full_factor(self, q: torch.Tensor) -> torch.Tensor:
        """Undo `keep_factor`."""
        if self.form == "general" or not self._is_packed(q):
            return q
        return unpack_upper(q) if self.form == "upper" else unpack(q)

    def _keep_preconditioner(self, p: torch.Tensor) -> torch.Tensor:
        return pack(p, symmetric=True) if self._is_packed(p) else p

    def _is_packed(self, x: torch.Tensor) -> bool:
        return self.packed and x.ndim >= 3
