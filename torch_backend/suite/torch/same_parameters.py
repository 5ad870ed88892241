"""Whether ranks that train together have the same parameters, as DDP gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from suite.torch.collectives import Ranks
from suite.torch.dtensors import is_sharded

_ROUNDING = 1e-6  # of the norm: what sums of equal numbers differ by on other devices


def require_same_parameters(
    named: Mapping[str, torch.Tensor], ranks: Ranks, what: str, otherwise: str
) -> None:
    """ValueError, on all ranks, unless parameters that are whole on each have the same numbers on all.

    One rank's expert, or its stage of a pipeline, may well look like another's.

    Args:
        named: by name; all ranks have the same names. Shards are left out.
        what: the optimizer.
        otherwise: what to do where they are to differ.
    """
    if ranks.alone:
        return
    whole = {name: x.detach() for name, x in named.items() if not is_sharded(x) and x.numel()}
    own = {name: (tuple(x.shape), *_sums(x)) for name, x in whole.items()}
    first, *others = ranks.gather(own, f"{what}'s comparison of parameters")
    for rank, record in enumerate(others, 1):  # the same on all ranks, which decide alike
        unlike = [x for x in first if x not in record or not _are_alike(first[x], record[x])]
        if unlike:
            raise ValueError(
                f"{what} needs the same parameters on all its ranks, got others on rank {rank} than on "
                f"rank 0: {unlike}; {otherwise}"
            )


def _sums(x: torch.Tensor) -> tuple[float, float]:
    """Σ x and |x|."""
    x = torch.view_as_real(x) if x.is_complex() else x
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # which that does not have
    total, squares = x.sum(dtype=wide), x.norm(dtype=wide)
    return total.item(), squares.item()


def _are_alike(one: tuple[tuple[int, ...], float, float], other: tuple[object, float, float]) -> bool:
    shape, total, norm = one
    if other[0] != shape:
        return False
    pairs = (total, other[1]), (norm, other[2])
    if not all(math.isfinite(x) for x in (*one[1:], *other[1:])):
        return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)
    size = math.sqrt(math.prod(shape)) * norm  # that of Σ |x|, at most
    return abs(total - other[1]) <= _ROUNDING * size and abs(norm - other[2]) <= _ROUNDING * norm
