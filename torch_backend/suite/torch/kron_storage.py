"""How Kron's Q and P = QᵀQ are kept between steps: whole or as triangles, with P or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from suite.core import kron as core_kron
from suite.core.packing import pack, pack_upper, unpack, unpack_upper


@dataclass(frozen=True)
class KronStorage:
    """What is kept of a `suite.core.kron.KronState`, and the state that a step takes made of it.

    Args:
        form: of Q, see `suite.core.kron.Kron.factor_form`; 'general' ones cannot be packed.
        packed: whether what has two equal triangles, or one of zeros, is kept as one; diagonals are not.
        cached: whether P is kept, and not computed from Q when it is needed.
    """

    form: core_kron.FactorForm
    packed: bool
    cached: bool

    def keep(self, state: core_kron.KronState) -> core_kron.KronState:
        """The state as it is kept."""
        kept = tuple(map(self._keep_preconditioner, state.preconditioners)) if self.cached else ()
        factors = tuple(map(self.keep_factor, state.factors))
        return state._replace(factors=factors, preconditioners=kept)

    def full(
        self, rule: core_kron.Kron, kept: core_kron.KronState, *, factors: bool
    ) -> core_kron.KronState:
        """Undo `keep`; the factors only if they are asked for, or P has to be computed from them."""
        if not self.cached:
            whole = tuple(map(self.full_factor, kept.factors))
            if self.packed and self.form == "symmetric" and rule.fits_P:  # to the last bit
                return kept._replace(factors=whole, preconditioners=whole)
            return rule.square(kept._replace(factors=whole))
        whole = tuple(unpack(p) if self._is_packed(p) else p for p in kept.preconditioners)
        if factors:
            kept = kept._replace(factors=tuple(map(self.full_factor, kept.factors)))
        return kept._replace(preconditioners=whole)

    def renewed(
        self, rule: core_kron.Kron, kept: Sequence[core_kron.KronState]
    ) -> list[core_kron.KronState]:
        """What is kept, with the P of its factors, which may have changed."""
        if not self.cached:
            return list(kept)
        whole = [state._replace(factors=tuple(map(self.full_factor, state.factors))) for state in kept]
        squared = map(self.keep, rule.square_all(whole))
        return [
            own._replace(preconditioners=new.preconditioners)
            for own, new in zip(kept, squared, strict=True)
        ]

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
        return pack_upper(q) if self.form == "upper" else pack(q)

    def full_factor(self, q: torch.Tensor) -> torch.Tensor:
        """Undo `keep_factor`."""
        if self.form == "general" or not self._is_packed(q):
            return q
        return unpack_upper(q) if self.form == "upper" else unpack(q)

    def _keep_preconditioner(self, p: torch.Tensor) -> torch.Tensor:
        return pack(p) if self._is_packed(p) else p

    def _is_packed(self, x: torch.Tensor) -> bool:
        return self.packed and x.ndim >= 3
