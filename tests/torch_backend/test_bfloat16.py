"""Products with bfloat16 factors: of rows in bfloat16 on hardware that has them, else in float32.

Not of gradients, whose products come one after the other: the second amplifies the first one's rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from suite.core import kfac, kron

SIZES = 40, 30  # d_in, d_out
BF16, FLOAT16 = torch.bfloat16, torch.float16


def positive_definite(n: int, seed: int) -> torch.Tensor:
    x = torch.randn(n, 2 * n, generator=torch.Generator().manual_seed(seed))
    return x @ x.mT / (2 * n)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def as_float64(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def by_gradient(dtype):
    A, G = (positive_definite(n, n).to(dtype) for n in SIZES)
    gradient = random(*SIZES[::-1])
    found = kfac.KFAC("inverse").apply(A, G, None, gradient, 0.0)
    return found, as_float64(G) @ as_float64(gradient) @ as_float64(A)


def by_rows(dtype):
    A, G = (positive_definite(n, n).to(dtype) for n in SIZES)
    a, g = random(7, SIZES[0] - 1), random(7, SIZES[1])
    parts = kfac.KFAC("inverse").apply_to_rows(A, G, a, g, bias=True)
    rows = np.concatenate([as_float64(a), np.ones((7, 1))], 1)
    expected = as_float64(G) @ as_float64(g).T @ rows @ as_float64(A)
    return torch.cat([parts[0], parts[1][:, None]], 1), expected


def by_kron(dtype):
    rule, gradient = kron.Kron(), random(1, *SIZES[::-1])
    state = rule.init(torch.empty(0, dtype=dtype), (1, *SIZES[::-1]), (False, False))
    P = tuple(positive_definite(n, n).to(dtype)[None] for n in SIZES[::-1])
    found = rule.precondition(state._replace(preconditioners=P), gradient)
    return found, as_float64(P[0]) @ as_float64(gradient) @ as_float64(P[1])


@pytest.mark.parametrize("direction", [by_gradient, by_rows, by_kron])
@pytest.mark.parametrize(("dtype", "has_bfloat16"), [(BF16, True), (BF16, False), (FLOAT16, True)])
def test_only_rows_on_hardware_that_has_bfloat16_are_multiplied_in_it(
    monkeypatch, direction, dtype, has_bfloat16
):
    monkeypatch.setattr("suite.core._torch._CPU_MULTIPLIES_BFLOAT16", has_bfloat16)
    found, expected = direction(dtype)
    assert found.dtype == torch.float32
    error = np.linalg.norm(as_float64(found) - expected) / np.linalg.norm(expected)
    rounded = direction is by_rows and dtype == BF16 and has_bfloat16
    assert 1e-4 < error < 1e-2 if rounded else error < 1e-6
