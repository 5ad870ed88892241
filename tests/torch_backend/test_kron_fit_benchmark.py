"""The benchmark of Kron's fit: its error is right, and its table has every case."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import kron_fit


@pytest.mark.parametrize("turned", [False, True])
def test_the_error_is_that_of_the_whole_product(turned):
    case = replace(kron_fit.CENTRE, shape=(4, 3, 2), scale=0.1)
    covariance = kron_fit.Covariance(case, seed=0)
    if turned:
        covariance.rotate(100)
    rng = np.random.default_rng(1)
    P = [rng.normal(size=(n, n)) for n in case.shape]
    P = [p + p.T for p in P]
    A = functools.reduce(np.kron, [root @ root for root in covariance.roots]) * case.scale**2
    whole = functools.reduce(np.kron, P)
    expected = np.linalg.norm(whole @ A @ whole - np.eye(24)) / np.sqrt(24)
    assert np.isclose(covariance.error(tuple(map(torch.tensor, P))), expected, rtol=1e-9)


def test_gradients_have_the_covariance():
    covariance = kron_fit.Covariance(replace(kron_fit.CENTRE, shape=(3, 2), scale=2.0), seed=0)
    samples = np.stack([covariance.gradient().reshape(-1) for _ in range(20000)])
    expected = 4 * functools.reduce(np.kron, [root @ root for root in covariance.roots])
    found = samples.T @ samples / len(samples)
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.slow
def test_the_command_writes_a_row_for_every_case(tmp_path):
    few = ["--updates", "2", "--geometries", "QEQ,EQ", "--output", str(tmp_path)]
    assert kron_fit.main(few, report=lambda line: None) == 0
    rows = (tmp_path / "fit.md").read_text().splitlines()
    assert [row.split(" | ")[0][2:] for row in rows[2:]] == [case.label for case in kron_fit.CASES]
    results = json.loads((tmp_path / "fit.json").read_text())["results"]
    assert len(results) == 2 * len(kron_fit.CASES)
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")
