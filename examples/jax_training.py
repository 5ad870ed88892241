"""What the JAX examples share: a training loop with a progress bar, and a plot of what it printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import matplotlib
import optax
from tqdm import tqdm

from suite.jax import adaptive_kfac, kfac, value_and_grad

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def arguments(description: str, steps: int) -> argparse.Namespace:
    """--steps, --tiny, --plot."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a small model")
    parser.add_argument("--plot", type=Path, default=None, help="where to save the curve")
    return parser.parse_args()


def train(
    loss_fn: Callable[..., Any],
    params: Any,
    batches: Iterable[tuple[Any, ...]],
    steps: int,
    *,
    has_aux: bool = False,
    fisher: Any = None,
    factor_update_steps: int = 1,
    adaptive: bool = False,
    **settings: Any,
) -> tuple[Any, list[float]]:
    """Parameters and losses after `steps` steps of K-FAC; one program for all of them.

    With `adaptive` K-FAC finds learning rate, momentum and damping itself; aux is then what the loss is
    computed from.
    """
    vag = value_and_grad(loss_fn, has_aux=has_aux, fisher=fisher)
    batches = iter(batches)
    batch = next(batches)
    plan = vag.plan(params, *batch)
    tqdm.write(str(plan))
    settings |= {"fallback": optax.adam(1e-3), "factor_update_steps": factor_update_steps}
    tx = adaptive_kfac(plan, **settings) if adaptive else kfac(plan, **settings)

    @jax.jit
    def step(params: Any, state: Any, key: Any, batch: tuple[Any, ...]) -> Any:
        due = state.preconditioner.steps % factor_update_steps == 0
        given = {"key": key} if fisher is not None and not fisher.exact else {}
        value, grads, statistics = vag(params, *batch, capture=due, **given)
        extra = {"value_fn": lambda params: loss_fn(params, *batch)} if adaptive else {}
        updates, state = tx.update(grads, state, params, statistics=statistics, **extra)
        return optax.apply_updates(params, updates), state, value[0] if has_aux else value

    state, losses = tx.init(params), []
    bar = tqdm(range(steps), mininterval=1.0)
    for number in bar:
        params, state, loss = step(params, state, jax.random.key(number), batch)
        losses.append(float(loss))
        bar.set_postfix(loss=f"{losses[-1]:.4g}")
        batch = next(batches, batch)
    if int(state.skipped_steps) or int(state.preconditioner.missed_updates):
        missed = int(state.preconditioner.missed_updates)
        tqdm.write(f"skipped {int(state.skipped_steps)}, missed {missed}")
    return params, losses


def plot(path: Path | None, values: list[float], what: str, *, log: bool = True) -> None:
    """Save a curve."""
    if path is None:
        return
    figure, axes = plt.subplots()
    axes.plot(values)
    axes.set_xlabel("step")
    axes.set_ylabel(what)
    if log:
        axes.set_yscale("log")
    figure.savefig(path)
    plt.close(figure)
