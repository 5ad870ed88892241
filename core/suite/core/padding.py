"""Factors of different sizes in one stack: those smaller than the stack's get something harmless behind.

A factor of side n in the corner of an m × m matrix that is diagonal behind it is inverted, or taken to
its eigenbasis, by itself: the two parts never meet. So one factorization serves several sizes, and is
compiled once instead of once for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from suite.core._namespace import Array, array_namespace, device_of, lift
from suite.core.checks import check_number
from suite.core.linalg import eye_like, traces


def size_classes(counts: Mapping[int, int], allowance: float = 0.05) -> dict[int, int]:
    """For each side the one that it is padded to, at a cost of at most `allowance` more factorization.

    The cost of a side is n³. The step up to the next size that costs least is taken first.

    Args:
        counts: side -> how many factors have it.
        allowance: >= 0, in units of the cost without padding.
    """
    check_number("allowance", allowance, at_least=0)
    left = allowance * sum(count * n**3 for n, count in counts.items())
    members = {n: [n] for n in sorted(counts)}
    number = dict(counts)
    while len(members) > 1:
        sides = sorted(members)
        steps = [(number[n] * (m**3 - n**3), n, m) for n, m in itertools.pairwise(sides)]
        cost, n, m = min(steps)
        if cost > left:
            break
        left -= cost
        members[m] += members.pop(n)
        number[m] += number.pop(n)
    return {n: m for m, own in members.items() for n in own}


def mean_eigenvalues(averages: Sequence[Array], weight: Array, sides: Sequence[int]) -> Array:
    """tr F / n of unbiased averages, (k,), in at least single precision; 0 without evidence.

    Args:
        averages: stacks (k_i, m_i, m_i), zero behind the first n rows and columns of each factor, or
            diagonals (k_i, m_i); of k factors together.
        weight: (k,), how much evidence the sums hold.
        sides: n of each.
    """
    sums = traces(averages)
    xp = array_namespace(sums)
    weight = xp.astype(weight, sums.dtype)
    usable = weight > 0
    parts = xp.where(usable, weight, xp.zeros_like(weight) + 1)
    means = sums / xp.asarray(sides, dtype=sums.dtype, device=device_of(sums)) / parts
    return xp.where(usable, means, xp.zeros_like(means))


def fill(average: Array, weight: Array, means: Array, sides: Sequence[int], *, below: bool) -> Array:
    """A diagonal behind each factor of a stack: (k, m, m).

    Args:
        average: (k, m, m), zero behind the first n rows and columns of each factor.
        weight: (k,), how much evidence the sums hold.
        means: (k,), `mean_eigenvalues`.
        sides: n of each.
        below: whether what is behind is below all eigenvalues of a positive semi-definite factor (minus
            their mean), so that an ascending order starts with it; else it is 1, times `weight`.
    """
    xp = array_namespace(average)
    wide, device = lift(average), device_of(average)
    weight, means = xp.astype(weight, wide.dtype), xp.astype(means, wide.dtype)
    behind = xp.where(weight > 0, weight, xp.zeros_like(weight) + 1)
    if below:
        behind = -xp.where(means > 0, means * weight, behind)
    own = xp.asarray(sides, device=device)
    outside = xp.arange(average.shape[-1], device=device)[None, :] >= own[:, None]
    added = (xp.astype(outside, wide.dtype) * behind[:, None])[:, :, None] * eye_like(wide)
    filled: Array = average + xp.astype(added, average.dtype)
    return filled
