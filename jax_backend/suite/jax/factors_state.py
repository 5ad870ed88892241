"""The arrays of all factors, and which of them an update and a refresh change."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class FactorsState(NamedTuple):
    """Arrays of all factors; those of one entry each are in one array, so that one operation has all."""

    averages: tuple[jax.Array, ...]  # (k, n, n) or (k, n), of each stack
    inverses: tuple[Any, ...]  # inverses or eigenbases, of each stack
    weight: jax.Array  # (factors,): how much evidence is in the averages
    ready: jax.Array  # (factors,): whether inverses are of evidence
    failures: jax.Array  # (factors,): factorizations that failed
    products: tuple[tuple[jax.Array, jax.Array], ...]  # EKFAC: (second moments, weight), a bucket each
    # Averages and inverses, where devices keep some of them each, by a name of where each of them lies.
    shares: dict[str, Shares] | None = None


class Shares(NamedTuple):
    """By dtype, a row for each device (see `suite.jax.shares`); the state has no others then."""

    averages: dict[str, jax.Array]
    inverses: dict[str, jax.Array]


def shares_of(state: FactorsState) -> Shares:
    """Of a state that has some."""
    assert state.shares is not None
    (own,) = state.shares.values()
    return own


def averages_of(state: FactorsState) -> Any:
    """What an update changes."""
    rows = None if state.shares is None else shares_of(state).averages
    return state.averages, state.weight, state.products, rows


def with_averages(state: FactorsState, new: Any) -> FactorsState:
    """The state with other `averages_of`."""
    averages, weight, products, rows = new
    state = state._replace(averages=averages, weight=weight, products=products)
    return state if state.shares is None else _with_shares(state, averages=rows)


def inverses_of(state: FactorsState) -> Any:
    """What a refresh changes."""
    rows = None if state.shares is None else shares_of(state).inverses
    return state.inverses, state.ready, state.failures, state.products, rows


def with_inverses(state: FactorsState, new: Any) -> FactorsState:
    """The state with other `inverses_of`."""
    inverses, ready, failures, products, rows = new
    state = state._replace(inverses=inverses, ready=ready, failures=failures, products=products)
    return state if state.shares is None else _with_shares(state, inverses=rows)


def _with_shares(state: FactorsState, **new: Any) -> FactorsState:
    assert state.shares is not None
    return state._replace(shares={name: own._replace(**new) for name, own in state.shares.items()})
