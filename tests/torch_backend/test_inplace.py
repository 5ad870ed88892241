"""What is changed in place equals the core's functions, and finite is what numpy calls so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from suite.core import moments
from suite.torch.inplace import all_average_in, all_finite, average_in


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_average_in_place_is_the_cores(dtype):
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(3, 5, 5, generator=generator, dtype=dtype) for _ in range(2))
    expected = moments.update_average(old.numpy(), new.numpy(), 0.95)
    average_in(old, new, 0.95)
    np.testing.assert_allclose(old.numpy(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-14)


def test_many_averages_are_averages():
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(3, 5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = moments.update_average(old.numpy(), new.numpy(), 0.95)
    all_average_in(old.split([2, 1]), new.split([2, 1]), 0.95)
    np.testing.assert_allclose(old.numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", range(3))
def test_any_number_that_is_not_finite_is_found(dtype, bad, where):
    tensors = [torch.ones(4, 3, dtype=dtype), torch.zeros(2, dtype=torch.float64), torch.ones(())]
    tensors[1][0] = 1e308  # finite, and too large for a square or a sum
    assert bool(all_finite(tensors))
    tensors[where].view(-1)[-1] = bad
    assert not bool(all_finite(tensors))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 1, 40, 98, 99])
def test_it_is_found_among_many_small_tensors(bad, where):
    tensors = [
        torch.full((50, 100 + i), 1e38, dtype=[torch.float64, torch.float32][i % 2]).mT
        for i in range(100)
    ]
    assert bool(all_finite(tensors))
    tensors[where][-1, -1] = bad
    assert not bool(all_finite(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("numbers", [2**12, 2**12 + 1, 2**13, 2**13 + 1])
@pytest.mark.parametrize("where", range(3))
def test_it_is_found_whether_they_are_stacked_or_not(dtype, numbers, where):
    tensors = [torch.ones(numbers, dtype=dtype) for _ in range(3)]
    assert bool(all_finite(tensors))
    tensors[where][-1] = complex(0.0, float("nan")) if dtype.is_complex else float("nan")
    assert not bool(all_finite(tensors))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", range(7))
def test_it_is_found_among_small_ones_of_one_shape(dtype, bad, where):
    tensors = [torch.ones(4, 3, dtype=dtype), *torch.ones(3, 4, 3, dtype=dtype).mT.mT.unbind()]
    tensors += [torch.ones(3, 4, dtype=dtype).mT, torch.ones(3, 4, dtype=dtype), torch.ones(4, 3)]
    assert bool(all_finite(tensors))
    tensors[where][-1, -1] = bad
    assert not bool(all_finite(tensors))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [(0, 0), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_of_second_moments_too(dtype, bad, where):
    rows = torch.ones(4, 2, dtype=dtype)
    few, many = torch.ones(3, dtype=torch.float64), -torch.ones(2)
    assert bool(all_finite([many], [few, rows.mT @ rows]))
    rows[where] = bad
    assert not bool(all_finite([many], [few, rows.mT @ rows]))
    assert not bool(all_finite([], [rows.square().sum(0)]))
    assert not bool(all_finite([rows], []))


def test_complex_numbers_have_two_parts():
    x = torch.ones(3, dtype=torch.complex64)
    assert bool(all_finite([x, x.conj()]))
    x[1] = complex(0.0, float("inf"))
    assert not bool(all_finite([x]))
    assert not bool(all_finite([x.conj()]))


def test_nothing_is_finite():
    assert bool(all_finite([]))
