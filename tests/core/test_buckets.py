from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conftest import assert_identical, normal
from suite.core import buckets as module
from suite.core.buckets import cut, gather, plan_buckets, scatter, together

KEYED = st.lists(st.tuples(st.sampled_from(["a", "b", (2, 3)]), st.integers(1, 4)), max_size=12)


@given(KEYED)
def test_every_stack_is_in_the_one_bucket_of_its_key(stacks):
    buckets = plan_buckets(stacks)
    assert [b.key for b in buckets] == list(dict.fromkeys(key for key, _ in stacks))
    assert sorted(m.index for b in buckets for m in b.members) == list(range(len(stacks)))
    for bucket in buckets:
        assert [m.index for m in bucket.members] == [
            i for i, (key, _) in enumerate(stacks) if key == bucket.key
        ]


@given(KEYED)
def test_members_lie_end_to_end(stacks):
    for bucket in plan_buckets(stacks):
        stop = 0
        for member in bucket.members:
            assert member.start == stop
            assert member.stop - member.start == stacks[member.index][1]
            stop = member.stop
        assert bucket.blocks == stop


@given(KEYED)
def test_scatter_undoes_gather(stacks):
    arrays = [normal(blocks, 2, seed=i) for i, (_, blocks) in enumerate(stacks)]
    back = [None] * len(arrays)
    for bucket in plan_buckets(stacks):
        scatter(bucket, gather(bucket, arrays), back)
    assert_identical(back, arrays)


@given(KEYED, st.integers(1, 9))
def test_cut_buckets_hold_the_same_members_and_no_more_blocks_than_asked(stacks, most):
    arrays = [normal(blocks, 2, seed=i) for i, (_, blocks) in enumerate(stacks)]
    back = [None] * len(arrays)
    for bucket in plan_buckets(stacks):
        parts = cut(bucket, most)
        assert [m.index for part in parts for m in part.members] == [m.index for m in bucket.members]
        for part in parts:
            assert part.key == bucket.key
            assert part.blocks <= most or len(part.members) == 1
            scatter(part, gather(part, arrays), back)
        assert all(a.blocks + b.members[0].stop > most for a, b in itertools.pairwise(parts))
    assert_identical(back, arrays)


def test_gather_joins_in_order_in_every_library(xp):
    arrays = [normal(2, 3, seed=0), normal(1, 5), normal(3, 3, seed=1)]
    of_three, of_five = plan_buckets([(x.shape[1:], len(x)) for x in arrays])
    assert of_three.blocks == 5

    def there_and_back(*arrays):
        back = [None] * 3
        for bucket in (of_three, of_five):
            scatter(bucket, gather(bucket, arrays), back)
        return gather(of_three, arrays), back

    joined, back = xp.run(there_and_back, *map(xp.asarray, arrays))
    assert_identical(joined, np.concatenate([arrays[0], arrays[2]]))
    assert_identical(back, arrays)


def test_a_single_member_is_not_copied():
    x, back = normal(2, 3), [None]
    (bucket,) = plan_buckets([("a", 2)])
    joined = gather(bucket, [x])
    scatter(bucket, joined, back)
    assert joined is x
    assert back[0] is x


def test_no_stacks_no_buckets():
    assert plan_buckets([]) == ()


@given(st.lists(st.tuples(st.sampled_from([(), (2,), (2, 3)]), st.integers(0, 4)), max_size=9))
def test_together_is_each_alone_in_a_call_for_each_kind(kinds):
    stacks = [(normal(k, *shape, seed=i), normal(k, seed=100 + i)) for i, (shape, k) in enumerate(kinds)]
    calls = []

    def function(x, y):
        calls.append(x.shape[1:])
        return (x * y.reshape(-1, *(1,) * (x.ndim - 1)),)

    found = together(function, stacks)
    assert sorted(calls) == sorted(set(calls))
    for (got,), stack in zip(found, stacks, strict=True):
        assert_identical(got, function(*stack)[0])


def test_together_joins_no_more_numbers_than_it_may(monkeypatch):
    monkeypatch.setattr(module, "_MOST_TOGETHER", 12)
    sizes = []

    def function(x):
        sizes.append(x.size)
        return (-x,)

    stacks = [(normal(k, 2, 2, seed=k),) for k in (1, 2, 1, 5, 1)]
    for (got,), (x,) in zip(together(function, stacks), stacks, strict=True):
        assert_identical(got, -x)
    assert sizes == [12, 4, 20, 4]


def test_together_keeps_dtypes_apart():
    stacks = [(np.ones(2, dtype),) for dtype in ("float32", "float64", "float32")]
    found = together(lambda x: (x + 1,), stacks)
    assert [x.dtype for (x,) in found] == ["float32", "float64", "float32"]
