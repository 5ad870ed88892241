"""The benchmark race is the same race in both frameworks: equal starts, minibatches and losses."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import race_jax
import race_problems
import race_torch
from race_problems import PROBLEMS


@pytest.fixture(autouse=True)
def precision(monkeypatch):
    monkeypatch.setattr(
        race_problems, "curves", lambda: race_problems.Autoencoder((784, 20, 6), 32, curves)
    )
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


curves = race_problems.drawn_curves(count=100)
POINTS = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "AdamW": {"lr": 0.003, "b2": 0.99},
    "K-FAC": {"damping": 0.01},
    "K-FAC, adaptive": {"damping": 0.1},
    "Kron": {"lr": 0.003, "b1": 0.9},
}


@pytest.mark.parametrize(
    ("name", "contender"),
    [
        *((name, "SGD") for name in race_jax.STARTS),
        ("xor", "AdamW"),
        *(
            pytest.param(name, contender, marks=pytest.mark.slow)
            for name in ("digits", "poisson", "xor")
            for contender in ("K-FAC", "K-FAC, adaptive", "Kron")
        ),
    ],
)
def test_ten_steps_lose_the_same(name, contender):
    problem, losses = PROBLEMS[name], []
    for framework in (race_torch, race_jax):
        training = framework.contenders(name, problem)[contender].begin(5, **POINTS[contender])
        losses.append([training.evaluate()])
        for _ in range(5):
            training.take(training.draw(2))
            losses[-1].append(training.evaluate())
    rel = 1e-7 if name == "poisson" else 2e-3  # in float64; in float32
    assert losses[1] == pytest.approx(losses[0], rel=rel)
    assert losses[0][-1] != losses[0][0]
