from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import assert_identical, dtype_name, library
from oracles import murmur_finalizer
from suite.core import noise


def draw(streams, step, shape):
    return noise.unit_noise(np.asarray(streams, dtype=np.int32), step, shape, np.float64)


STREAMS, POSITIONS = 64, 1000


def test_every_bit_is_the_hash_of_stream_step_and_position(xp):
    """The same floats in every library, and those of plain integers modulo 2³²."""
    streams, step, shape = [0, 1, -1, 2**31 - 1, -(2**31), 77777], 123456, (3, 2)

    def expected(stream, position):
        key = murmur_finalizer((stream + 1013904223) % 2**32) ^ step
        h = murmur_finalizer(key) ^ murmur_finalizer(position + 374761393)
        bits = murmur_finalizer(h)
        signed = bits - 2**32 if bits >= 2**31 else bits
        return (signed + 0.5) * (2.0**-31 * 3.0**0.5)

    arrays = xp.asarray(np.array(streams, dtype=np.int32))
    drawn = xp.run(noise.unit_noise, arrays, step=step, shape=shape, dtype=xp.dtype("float64"))
    numbers = [[expected(s, p) for p in range(math.prod(shape))] for s in streams]
    assert_identical(drawn, np.reshape(numbers, (len(streams), *shape)))


def test_bits_do_not_need_64_bit_integers():
    """JAX has none by default; other tests run with them."""
    jax, shape = pytest.importorskip("jax", minversion="0.8.0"), (3, 2)
    streams = np.array([0, -1, 2**31 - 1], dtype=np.int32)
    with jax.enable_x64(False):
        arrays = jax.numpy.asarray(streams), jax.numpy.asarray(77, dtype="int32")
        drawn = noise.unit_noise(*arrays, shape, jax.numpy.float32)
    assert_identical(drawn, noise.unit_noise(streams, 77, shape, np.float32))


def test_step_may_be_an_array_and_traced(xp):
    streams = np.array([3, -4], dtype=np.int32)

    kind = {"shape": (5,), "dtype": xp.dtype("float64")}
    for step in (0, 7, 2**31 - 1):
        array = xp.asarray(np.array(step, dtype=np.int32))
        drawn = xp.run(noise.unit_noise, xp.asarray(streams), array, **kind)
        assert_identical(drawn, draw(streams, step, (5,)))


def test_noise_of_a_stream_does_not_depend_on_its_neighbours(xp):
    streams = np.array([5, -7, 123456789], dtype=np.int32)
    kind = {"step": 3, "shape": (2, 2), "dtype": xp.dtype("float64")}
    together = xp.numpy(xp.run(noise.unit_noise, xp.asarray(streams), **kind))
    for i in range(3):
        alone = xp.run(noise.unit_noise, xp.asarray(streams[i : i + 1]), **kind)
        assert_identical(together[i : i + 1], alone)


def test_stacks_of_several_shapes_are_drawn_together_as_they_are_alone(xp):
    streams = [np.array(own, dtype=np.int32) for own in ([5, -7], [9], [], [2**31 - 1])]
    shapes = ((2, 3), (), (4,), (7, 1, 2))
    kind = {"use": noise.PAIR, "shapes": shapes, "dtype": xp.dtype("float64")}
    together = xp.run(noise.draws, [xp.asarray(own) for own in streams], step=3, **kind)
    for found, own, shape in zip(together, streams, shapes, strict=True):
        assert tuple(found.shape) == (len(own), *shape)
        for block, stream in zip(xp.numpy(found), own, strict=True):
            assert_identical(block[None], draw([stream], 3 + 2**26, shape))


def test_drawing_takes_little_more_room_than_what_is_drawn():
    draw([1], 0, (10,))
    tracemalloc.start()
    drawn = noise.unit_noise(np.array([1], dtype=np.int32), 0, (1000, 400), np.float32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 4.1 * drawn.nbytes


def test_shape_only_arranges_the_numbers():
    assert_identical(draw([9], 4, (2, 3, 2)).reshape(1, 12), draw([9], 4, (12,)))
    assert draw([9], 4, ()).shape == (1,)


def test_mean_is_zero_variance_one_and_the_distribution_uniform():
    x = draw(range(STREAMS), 1, (POSITIONS,))
    n = x.size
    assert np.abs(x).max() <= np.sqrt(3)
    # Five standard errors: 1/√n of the mean; √(kurtosis - 1) = √0.8 over √n of the variance.
    assert abs(x.mean()) < 5 / np.sqrt(n)
    assert abs(x.var() - 1) < 5 * np.sqrt(0.8 / n)
    counts, _ = np.histogram(x, bins=20, range=(-np.sqrt(3), np.sqrt(3)))
    chi_squared = np.sum((counts - n / 20) ** 2 / (n / 20))
    assert chi_squared < 19 + 5 * np.sqrt(2 * 19)


def correlations(x):
    """Between all pairs of rows."""
    C = np.corrcoef(x)
    return C[np.triu_indices(len(C), 1)]


def assert_uncorrelated(x):
    r = correlations(x) * np.sqrt(x.shape[1])  # about standard normal each
    assert abs(r.mean()) < 5 / np.sqrt(r.size)
    assert abs(r.var() - 1) < 0.2
    assert np.abs(r).max() < 5.5


def test_streams_are_uncorrelated():
    assert_uncorrelated(draw(range(STREAMS), 1, (POSITIONS,)))


def test_streams_of_a_whole_model_are_uncorrelated():
    streams = [
        noise.stream_numbers(p, 2, seed)[b] for p in range(8) for b in range(2) for seed in (0, 1)
    ]
    assert len(set(streams)) == 32
    assert_uncorrelated(draw(streams, 1, (POSITIONS,)))


def test_steps_are_uncorrelated():
    assert_uncorrelated(np.stack([draw([3], t, (POSITIONS,))[0] for t in range(STREAMS)]))


def test_positions_are_uncorrelated():
    assert_uncorrelated(draw(range(POSITIONS), 1, (STREAMS,)).T)


def test_stream_step_and_position_do_not_trade_places():
    # Noise of stream s at step t must not be that of stream t at step s, nor shifted by a position.
    seen = {}
    for stream in range(20):
        for step in range(20):
            seen[stream, step] = tuple(draw([stream], step, (3,))[0])
    assert len({x for row in seen.values() for x in row}) == 20 * 20 * 3


def test_dtype_is_the_one_asked_for(xp):
    streams = xp.asarray(np.array([1], dtype=np.int32))
    for name in filter(None, ("float64", "float32", xp.half)):
        drawn = xp.run(noise.unit_noise, streams, step=0, shape=(4,), dtype=xp.dtype(name))
        assert dtype_name(drawn) == name
        assert np.all(np.abs(xp.numpy(drawn)) < 1.75)


def test_streams_are_int32_in_every_library():
    numbers = noise.stream_numbers(70000, 5, seed=2**40 + 1)
    for name in ("numpy", "torch"):
        x = library(name).asarray(np.array(numbers, dtype=np.int32))
        assert dtype_name(x) == "int32"
        assert x.shape == (5,)


@given(st.integers(0, 2**20), st.integers(0, 2**64), st.integers(1, 2000))
def test_stream_numbers_stay_int32_and_are_distinct_within_a_parameter(parameter, seed, blocks):
    numbers = noise.stream_numbers(parameter, blocks, seed)
    assert len(numbers) == len(set(numbers)) == blocks
    assert all(-(2**31) <= number < 2**31 for number in numbers)


@given(st.integers(0, 30000), st.integers(1, 30000), st.integers(0, 2**64))
def test_stream_numbers_of_two_parameters_are_disjoint(p, distance, seed):
    for q in (p + 1, p + distance):
        first, second = (set(noise.stream_numbers(k, 2000, seed)) for k in (p, q))
        assert not first & second


def test_stream_numbers_do_not_depend_on_how_many_blocks_follow():
    assert noise.stream_numbers(3, 5, 1) == noise.stream_numbers(3, 50, 1)[:5]
