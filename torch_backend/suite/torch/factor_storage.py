"""How K-FAC's factors are kept between steps: as they are, or as triangles (`suite.core.packing`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from suite.core.kfac import Factor, mean_eigenvalue
from suite.core.packing import pack, packed_diagonal, unpack

_AT_ONCE = 2**19  # packed numbers that are unpacked together: a matrix of side 1023, or many small ones


@dataclass(frozen=True)
class FactorStorage:
    """What is symmetric may be packed: averages and inverses, not diagonals, nor eigenbases.

    Args:
        packed: whether it is.
    """

    packed: bool

    def keep(self, x: Any) -> Any:
        """Averages or inverses (blocks, n, n), diagonals (blocks, n) or eigenbases, as they are kept."""
        return pack(x, symmetric=True) if self._is_packed(x) else x

    def keep_all(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`keep` of many that are alike but for their number of blocks, small ones together."""
        if not self._is_packed(given[0]):
            return list(given)
        kept, at_once = list[torch.Tensor](), max(1, _AT_ONCE // given[0][0].numel())
        for start in range(0, len(given), at_once):
            own = given[start : start + at_once]
            joined = torch.cat(list(own)) if len(own) > 1 else own[0]
            kept += self.keep(joined).split([len(x) for x in own])
        return kept

    def full(self, x: Any) -> Any:
        """Undo `keep`; a new tensor where that packs."""
        return unpack(x) if self._is_packed(x) else x

    def mean_eigenvalue(self, factor: Factor) -> torch.Tensor:
        """`suite.core.kfac.mean_eigenvalue` of a stack as it is kept: (blocks,)."""
        packed = self._is_packed(factor.average)
        average = packed_diagonal(factor.average) if packed else factor.average
        mean: torch.Tensor = mean_eigenvalue(average, factor.weight)
        return mean

    def portions(self, factor: Factor) -> list[slice]:
        """Parts of a stack to unpack one after the other; a stack that is not packed as a whole."""
        blocks, numbers = factor.average.shape[0], factor.average[0].numel()
        if not self._is_packed(factor.inverse):
            return [slice(0, blocks)]
        step = max(1, _AT_ONCE // numbers)
        return [slice(start, min(start + step, blocks)) for start in range(0, blocks, step)]

    def keep_factor(self, factor: Factor) -> Factor:
        return factor._replace(average=self.keep(factor.average), inverse=self.keep(factor.inverse))

    def full_factor(self, factor: Factor) -> Factor:
        return factor._replace(average=self.full(factor.average), inverse=self.full(factor.inverse))

    def _is_packed(self, x: Any) -> bool:
        return self.packed and isinstance(x, torch.Tensor) and x.ndim == 3
