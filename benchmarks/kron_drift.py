"""Would steps that follow the measured error of the fit serve a covariance that moves? What was tried.

    OMP_NUM_THREADS=1 python benchmarks/kron_drift.py

Covariances are those of `kron_fit.py`, 64x32, condition 100, float64, geometry Q0.5EQ1.5. Three rules:
`default`; `excess`, whose step is at least 0.4 times the running mean of tr(E²) / n above what white
noise gives, E = h hᵀ / m - I of the preconditioned gradient h (n, m); `agreement`, with the running mean
of ⟨E, E before⟩ / n in its place, which is 0 for independent errors. Both have effect after 100 updates
and give at most 0.1. Gradients stand still, drift, vary in size (times exp(s - ¼), s normal of variance
¼), or are correlated as momentum of b1 = 0.9 is. Prints errors after 300, 1,000 and 3,000 updates.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import torch

from kron_fit import CENTRE, DEFAULT_RATE, Covariance
from options import whole
from suite.core.kron import Kron

RULES = ("default", "excess", "agreement")
KINDS = ("still", "drift", "varying size", "momentum")
B1 = 0.9


def fit(rule_of_step: str, kind: str, seed: int, marks: tuple[int, ...]) -> list[float]:
    case = replace(CENTRE, dtype="float64", drift=kind == "drift")
    covariance, rule = Covariance(case, seed), Kron(preconditioner_init_scale=None)
    noise = torch.Generator().manual_seed(seed)
    state = rule.init(torch.empty(0, dtype=torch.float64), case.shape, (False, False))
    n, m = case.shape
    before, mean, weight, signal = torch.zeros(n, n), 0.0, 0.0, None
    errors = []
    for update in range(max(marks)):
        if case.drift:
            covariance.rotate(update + 1)
        gradient = covariance.gradient()
        if kind == "varying size":
            gradient *= np.exp(0.5 * covariance.rng.normal() - 0.25)
        if kind == "momentum" and signal is not None:
            gradient = B1 * signal + (1 - B1**2) ** 0.5 * gradient
        signal = gradient
        g = torch.tensor(signal)
        step = float(DEFAULT_RATE(update))
        if rule_of_step != "default" and update:
            h = state.preconditioners[0] @ g @ state.preconditioners[1].T
            E = h @ h.T / m - torch.eye(n)
            found = (E * E).sum() / n - (n + 1) / m
            if rule_of_step == "agreement":
                found = (E * before).sum() / n
            before, mean, weight = E, 0.99 * mean + 0.01 * float(found), 0.99 * weight + 0.01
            if update > 100:
                step = max(step, min(0.1, 0.4 * mean / weight))
        v = torch.randn(case.shape, generator=noise).double()
        state = rule.refresh(rule.update(state, g, v, step))
        if update + 1 in marks:
            errors.append(covariance.error(state.preconditioners))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=whole, default=3000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    marks = tuple(min(mark, arguments.updates) for mark in (300, 1000, 3000))
    for kind in KINDS:
        for rule_of_step in RULES:
            errors = fit(rule_of_step, kind, arguments.seed, marks)
            print(f"{kind:14}{rule_of_step:12}" + " / ".join(f"{e:.3f}" for e in errors), flush=True)


if __name__ == "__main__":
    main()
