from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import assert_close, assert_identical, convolutions, library, normal
from oracles import convolution_rows
from suite.core.patches import output_rows, output_size, patches, patches_at


@given(convolutions())
def test_rows_are_the_patches_under_the_kernel(convolution):
    assert_identical(patches(*convolution), np.stack(convolution_rows(*convolution)))


@given(convolutions(), st.data())
def test_chosen_rows_are_those_of_all_rows(convolution, data):
    rows = np.stack(convolution_rows(*convolution))
    index = st.integers(0, rows.shape[1] - 1)
    chosen = np.array(data.draw(st.lists(index, min_size=1, max_size=5)))
    assert_identical(patches_at(*convolution, chosen), rows[:, chosen])


EXAMPLES = [
    ((2, 3, 7), [3], [2], [(1, 2)], [2], 1),
    ((2, 4, 5, 4), [2, 3], [2, 1], [(0, 0), (1, 1)], [1, 1], 2),
    ((1, 2, 3, 3, 2), [2, 2, 1], [1, 2, 1], [(1, 0), (0, 0), (0, 1)], [1, 2, 1], 2),
]


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding", "dilation", "groups"), EXAMPLES)
def test_rows_are_the_same_in_every_library(xp, shape, kernel, stride, padding, dilation, groups):
    x = normal(*shape)
    expected = np.stack(convolution_rows(x, kernel, stride, padding, dilation, groups))
    got = xp.run(lambda x: patches(x, kernel, stride, padding, dilation, groups), xp.asarray(x))
    assert_identical(got, expected)


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding", "dilation", "groups"), EXAMPLES)
def test_chosen_rows_are_the_same_in_every_library(xp, shape, kernel, stride, padding, dilation, groups):
    x = normal(*shape)
    rows = np.stack(convolution_rows(x, kernel, stride, padding, dilation, groups))
    chosen = np.array([rows.shape[1] - 1, 0, 3, 3])  # in any order, and more than once
    got = xp.run(
        lambda x, chosen: patches_at(x, kernel, stride, padding, dilation, groups, chosen),
        xp.asarray(x),
        xp.asarray(chosen),
    )
    assert_identical(got, rows[:, chosen])


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding", "dilation", "groups"), EXAMPLES)
def test_rows_times_kernel_are_the_convolution(shape, kernel, stride, padding, dilation, groups):
    """torch's own convolution: features in the order of its kernels, places in that of its outputs."""
    torch = pytest.importorskip("torch")
    x = torch.tensor(normal(*shape))
    W = torch.tensor(normal(2 * groups, shape[1] // groups, *kernel))
    flat = [width for pair in reversed(padding) for width in pair]
    convolve = getattr(torch.nn.functional, f"conv{len(kernel)}d")
    padded = torch.nn.functional.pad(x, flat)
    y = convolve(padded, W, stride=stride, dilation=dilation, groups=groups)
    rows = patches(x, kernel, stride, padding, dilation, groups)
    product = rows @ W.reshape(groups, 2, -1).mT
    assert_close(product, output_rows(y, groups))


def test_output_rows_are_one_place_each(xp):
    y = normal(2, 6, 3, 2)
    rows = xp.numpy(xp.run(output_rows, xp.asarray(y), groups=3))
    assert rows.shape == (3, 12, 2)
    for group in range(3):
        for example in range(2):
            for i in range(3):
                for j in range(2):
                    row = rows[group, example * 6 + i * 2 + j]
                    assert_identical(row, y[example, 2 * group : 2 * group + 2, i, j])


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))
def test_output_size_counts_the_places(size, kernel, stride, pad, dilation):
    padded = size + pad + 1
    places = [start for start in range(0, padded, stride) if start + dilation * (kernel - 1) < padded]
    if places:
        assert output_size(size, kernel, stride, (pad, 1), dilation) == len(places)


def test_an_empty_batch_has_no_rows():
    for name in ("numpy", "torch"):
        x = library(name).asarray(np.zeros((0, 4, 5, 4)))
        assert patches(x, [2, 2], [1, 1], [(0, 0), (0, 0)], [1, 1], 2).shape == (2, 0, 8)
        assert output_rows(x, 2).shape == (2, 0, 2)
