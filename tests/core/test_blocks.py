from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import assert_identical
from suite.core.blocks import Structure, merge, merge_sides, plan_blocks, split

SIDES = st.integers(1, 7)


@st.composite
def structures(draw):
    return Structure(
        max_size_triangular=draw(st.integers(0, 12)),
        min_ndim_triangular=draw(st.integers(0, 3)),
        memory_save_mode=draw(st.sampled_from([None, "one_diag", "smart_one_diag", "all_diag"])),
        merge_small_dims=draw(st.booleans()),
        target_merged_dim_size=draw(st.integers(1, 30)),
        partition_grads_into_blocks=draw(st.booleans()),
        block_size=draw(st.integers(1, 9)),
        shared_factors=draw(st.booleans()),
    )


@st.composite
def plans(draw):
    shape = draw(st.lists(SIDES, max_size=4))
    scanned = bool(shape) and draw(st.booleans())
    return plan_blocks(shape, draw(structures()), scanned=scanned)


def numbered(plan):
    """A parameter whose every entry is its own number."""
    return np.arange(float(math.prod(plan.shape))).reshape(plan.shape)


@given(plans())
def test_merge_undoes_split(plan):
    x = numbered(plan)
    assert_identical(merge(plan, split(plan, x)), x)


@given(plans())
def test_every_entry_is_in_exactly_one_block(plan):
    entries = np.concatenate([stack.reshape(-1) for stack in split(plan, numbered(plan))])
    assert_identical(np.sort(entries), np.arange(entries.size, dtype=float))
    assert entries.size == math.prod(plan.shape)


@given(plans())
def test_blocks_are_the_slices_that_the_tiles_describe(plan):
    x = numbered(plan)
    scanned = x.reshape(*plan.shape[: plan.scanned], *plan.merged)
    stacked = scanned if plan.scanned else scanned[None]
    for tile, stack in zip(plan.tiles, split(plan, x), strict=True):
        blocks = iter(stack)
        for parameter in stacked:
            for index in itertools.product(*map(range, tile.counts)):
                where = tuple(
                    slice(start + i * size, start + (i + 1) * size)
                    for start, size, i in zip(tile.starts, tile.sizes, index, strict=True)
                )
                assert_identical(next(blocks), parameter[where])
        assert next(blocks, None) is None
        assert len(stack) == plan.tile_blocks(tile)


@given(plans())
def test_plan_counts_what_split_gives(plan):
    stacks = split(plan, numbered(plan))
    assert plan.blocks == sum(len(stack) for stack in stacks)
    elements = 0
    for tile, stack in zip(plan.tiles, stacks, strict=True):
        for n, c, is_diagonal in zip(stack.shape[1:], tile.diagonal_blocks, plan.diagonal, strict=True):
            assert n % c == 0
            elements += len(stack) * (n if is_diagonal else c * (n // c) ** 2)
    assert plan.factor_elements() == elements


@given(st.lists(SIDES, max_size=4), structures())
def test_only_axes_with_dense_factors_are_cut_and_only_into_blocks_of_the_size(shape, structure):
    plan = plan_blocks(shape, structure)
    for axis, (side, is_diagonal) in enumerate(zip(plan.merged, plan.diagonal, strict=True)):
        sizes = {tile.sizes[axis] // tile.diagonal_blocks[axis] for tile in plan.tiles}
        if is_diagonal or not structure.partition_grads_into_blocks:
            assert sizes == {side}
        else:
            longest = structure.block_size
            equal = {n for n in range(1, longest + 1) if side % n == 0 and 2 * n > longest}
            if side <= longest:
                assert sizes == {side}
            elif equal:
                assert sizes == {max(equal)}
            else:
                assert sizes == {longest, side % longest}
        for tile in plan.tiles:
            assert 1 in (tile.counts[axis], tile.diagonal_blocks[axis])
            shared = structure.shared_factors
            assert (tile.counts if shared else tile.diagonal_blocks)[axis] == 1
    assert len(plan.tiles) <= 2 ** len(plan.merged)


@pytest.mark.parametrize(
    ("shape", "factors"),
    [
        ((1000, 784), "8 x 125x125, 7 x 112x112"),
        ((64, 576), "64x64, 6 x 96x96"),
        ((1009, 30), "7 x 128x128 + 113x113, 30x30"),
        ((7,), "diag 7"),
        ((9000, 512), "diag 9000, 4 x 128x128"),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_a_plan_describes_its_factors(shape, factors, shared):
    assert plan_blocks(shape, Structure(shared_factors=shared)).describe_factors() == factors


def test_a_plan_says_in_how_many_blocks_it_is_cut():
    assert plan_blocks((1000, 784), Structure()).describe() == "2 axes after merging"
    assert plan_blocks((1009, 784), Structure()).describe() == "2 axes after merging, in 2 blocks"
    own = plan_blocks((1000, 784), Structure(shared_factors=False))
    assert own.describe() == "2 axes after merging, in 56 blocks"


def test_shared_factors_take_less_than_those_of_every_block():
    """1000 x 784 in 8 x 7 chunks: 8 + 7 factors, and not 56 of each side."""
    shared, own = (plan_blocks((1000, 784), Structure(shared_factors=s)) for s in (True, False))
    assert shared.factor_elements() == 8 * 125**2 + 7 * 112**2
    assert own.factor_elements() == 56 * (125**2 + 112**2)


@given(st.lists(SIDES, max_size=4), structures())
def test_scanned_parameters_are_planned_like_one_of_them(shape, structure):
    one, stack = plan_blocks(shape, structure), plan_blocks([3, *shape], structure, scanned=True)
    assert (stack.merged, stack.diagonal, stack.tiles) == (one.merged, one.diagonal, one.tiles)
    assert stack.blocks == 3 * one.blocks
    assert stack.factor_elements() == 3 * one.factor_elements()


def test_split_and_merge_in_every_library(xp):
    plan = plan_blocks((2, 5, 7), Structure(block_size=3, merge_small_dims=False), scanned=True)
    x = numbered(plan)
    assert len(plan.tiles) == 4  # both axes leave a remainder
    stacks = xp.run(lambda x: split(plan, x), xp.asarray(x))
    assert_identical(list(stacks), split(plan, x))
    assert_identical(xp.run(lambda *stacks: merge(plan, stacks), *stacks), x)


def test_split_reads_without_a_copy_where_there_is_one_block():
    x = np.arange(12.0).reshape(3, 4)
    (stack,) = split(plan_blocks((3, 4), Structure()), x)
    assert np.shares_memory(stack, x)


def test_known_split():
    plan = plan_blocks((3, 2), Structure(block_size=2, shared_factors=False))
    full, rest = split(plan, np.array([[1, 2], [3, 4], [5, 6]]))
    assert_identical(full, np.array([[[1, 2], [3, 4]]]))
    assert_identical(rest, np.array([[[5, 6]]]))


def test_scalar_is_one_block_of_one_diagonal_entry():
    plan = plan_blocks((), Structure())
    assert (plan.merged, plan.diagonal, plan.blocks) == ((1,), (True,), 1)
    assert_identical(merge(plan, split(plan, np.array(3.0))), np.array(3.0))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_a_parameter_without_entries_has_blocks_without_any(shape):
    plan = plan_blocks(shape, Structure(block_size=2))
    (stack,) = split(plan, np.zeros(shape))
    assert stack.size == 0
    assert merge(plan, [stack]).shape == shape


def test_scanned_scalar_is_an_error_with_the_shape():
    with pytest.raises(ValueError, match=r"at least one axis, got shape \(\)$"):
        plan_blocks((), Structure(), scanned=True)


# Merging


def partitions(sides):
    """Every way to multiply neighbours, as tuples of groups."""
    if not sides:
        return [()]
    found = []
    for k in range(1, len(sides) + 1):
        found += [(tuple(sides[:k]), *rest) for rest in partitions(sides[k:])]
    return found


@given(st.lists(st.integers(1, 12), max_size=5), st.integers(1, 200))
def test_merged_sides_are_fewest_then_smallest_within_the_target(shape, target):
    merged = merge_sides(tuple(shape), target)
    sides = [side for side in shape if side > 1]
    if len(sides) <= 2:
        assert merged == (tuple(sides) or (1,))
        return
    products = [
        tuple(math.prod(group) for group in groups)
        for groups in partitions(sides)
        if len(groups) >= 2 and all(len(g) == 1 or math.prod(g) <= target for g in groups)
    ]
    assert merged in products
    best = min((len(p), sum(n * n for n in p)) for p in products)
    assert (len(merged), sum(n * n for n in merged)) == best


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 200))
def test_merging_keeps_the_number_of_entries_and_is_done_once(shape, target):
    merged = merge_sides(tuple(shape), target)
    assert math.prod(merged) == math.prod(shape)
    if len(merged) > 2:
        assert all(a * b > target for a, b in itertools.pairwise(merged))


@pytest.mark.parametrize(
    ("shape", "target", "merged"),
    [
        ((64, 32, 3, 3), 2048, (64, 288)),  # not (2048, 9): 64² + 288² is less
        ((64, 32, 3, 3), 100, (64, 32, 9)),
        ((64, 1, 3, 3), 2048, (64, 9)),
        ((5000, 300), 2048, (5000, 300)),  # a matrix stays a matrix
        ((2, 3), 2048, (2, 3)),
        ((7,), 2048, (7,)),
        ((1, 1), 2048, (1,)),
        ((), 2048, (1,)),
        ((4, 4, 4), 0, (4, 4, 4)),
    ],
)
def test_known_merges(shape, target, merged):
    assert merge_sides(shape, target) == merged


# Dense or diagonal


@pytest.mark.parametrize(
    ("shape", "options", "diagonal"),
    [
        ((4, 6), {}, (False, False)),
        ((4, 6), {"max_size_triangular": 5}, (False, True)),
        ((4, 6), {"max_size_triangular": 6}, (False, False)),
        ((4, 6), {"max_size_triangular": 0}, (True, True)),
        ((4, 6), {"min_ndim_triangular": 3}, (True, True)),
        # Axes count as they are before they merge, here to (64, 288), but where chunks would be longer.
        ((64, 32, 3, 3), {"max_size_triangular": 200}, (False, False)),
        (
            (64, 32, 3, 3),
            {"max_size_triangular": 200, "partition_grads_into_blocks": False},
            (False, True),
        ),
        ((64, 32, 3, 3), {"max_size_triangular": 200, "block_size": 256}, (False, True)),
        ((64, 32, 3, 3), {"max_size_triangular": 0}, (True, True)),
        ((64, 32, 32), {"max_size_triangular": 20, "block_size": 16}, (True, True)),
        ((300, 4, 4), {"max_size_triangular": 200}, (True, False)),
        ((64, 32, 3, 3), {"min_ndim_triangular": 4}, (False, False)),
        ((64, 32, 3, 3), {"min_ndim_triangular": 5}, (True, True)),
        ((6,), {}, (True,)),
        ((6,), {"min_ndim_triangular": 1}, (False,)),
        ((6, 1), {}, (True,)),  # an axis of size 1 does not make a matrix of a vector
        ((4, 6), {"memory_save_mode": "one_diag"}, (False, True)),
        ((6, 4), {"memory_save_mode": "one_diag"}, (True, False)),
        ((6, 6), {"memory_save_mode": "one_diag"}, (False, True)),
        ((4, 6), {"memory_save_mode": "smart_one_diag"}, (False, True)),
        ((6, 6), {"memory_save_mode": "smart_one_diag"}, (False, False)),
        ((4, 6), {"memory_save_mode": "all_diag"}, (True, True)),
        ((2, 3, 4), {"merge_small_dims": False, "memory_save_mode": "one_diag"}, (False, False, True)),
    ],
)
def test_known_structures(shape, options, diagonal):
    assert plan_blocks(shape, Structure(**options)).diagonal == diagonal


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_size_triangular", -1, "max_size_triangular must be >= 0, got -1"),
        ("min_ndim_triangular", -1, "min_ndim_triangular must be >= 0, got -1"),
        (
            "memory_save_mode",
            "onediag",
            "memory_save_mode must be one of None, 'one_diag', 'smart_one_diag', 'all_diag', "
            "got 'onediag'",
        ),
        ("target_merged_dim_size", 0, "target_merged_dim_size must be >= 1, got 0"),
        ("block_size", 0, "block_size must be >= 1, got 0"),
    ],
)
def test_option_out_of_range_is_named(name, value, message):
    with pytest.raises(ValueError, match="must be") as error:
        Structure(**{name: value})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_size_triangular", 8192.0),
        ("block_size", "256"),
        ("merge_small_dims", 1),
        ("partition_grads_into_blocks", None),
    ],
)
def test_option_of_another_type_is_named(name, value):
    with pytest.raises(TypeError, match=f"^{name} must be "):
        Structure(**{name: value})


@pytest.mark.parametrize(
    ("shape", "max_skew", "expected"),
    [
        ((100, 4), 1.0, (True, False)),
        ((100, 4), 25.0, (False, False)),  # 100² = 25 x 400
        ((8, 8), 1.0, (False, False)),
        ((8, 9), 1.0, (False, True)),
        ((100, 4), None, (False, False)),
    ],
)
def test_sides_whose_square_exceeds_the_parameter_are_diagonal(shape, max_skew, expected):
    assert plan_blocks(shape, Structure(max_skew=max_skew)).diagonal == expected
