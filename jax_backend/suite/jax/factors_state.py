"""The arrays of all factors, and which of them an update and a refresh change."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from suite.core import kfac as core_kfac


class FactorsState(NamedTuple):
    """Arrays of all factors."""

    factors: tuple[core_kfac.Factor, ...]  # one stack for each bucket of layers and side
    products: tuple[tuple[jax.Array, jax.Array], ...]  # EKFAC: (second moments, weight), a bucket each
    shares: Shares | None = None  # averages and inverses, where devices keep some of them each


class Shares(NamedTuple):
    """By dtype, a row for each device (see `suite.jax.shares`); `Factor`s then have () for theirs."""

    averages: dict[str, jax.Array]
    inverses: dict[str, jax.Array]


def averages_of(state: FactorsState) -> Any:
    """What an update changes."""
    rows = None if state.shares is None else state.shares.averages
    return [(factor.average, factor.weight) for factor in state.factors], state.products, rows


def with_averages(state: FactorsState, new: Any) -> FactorsState:
    """The state with other `averages_of`."""
    pairs, products, rows = new
    factors = [
        factor._replace(average=average, weight=weight)
        for factor, (average, weight) in zip(state.factors, pairs, strict=True)
    ]
    shares = None if state.shares is None else state.shares._replace(averages=rows)
    return FactorsState(tuple(factors), products, shares)


def inverses_of(state: FactorsState) -> Any:
    """What a refresh changes."""
    rows = None if state.shares is None else state.shares.inverses
    parts = [(factor.inverse, factor.ready, factor.failures) for factor in state.factors]
    return parts, state.products, rows


def with_inverses(state: FactorsState, new: Any) -> FactorsState:
    """The state with other `inverses_of`."""
    parts, products, rows = new
    factors = [
        factor._replace(inverse=inverse, ready=ready, failures=failures)
        for factor, (inverse, ready, failures) in zip(state.factors, parts, strict=True)
    ]
    shares = None if state.shares is None else state.shares._replace(inverses=rows)
    return FactorsState(tuple(factors), products, shares)
