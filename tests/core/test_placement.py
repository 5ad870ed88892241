"""Who computes what: every plan is complete and fair, and the same wherever it is made."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.core.layer_lists import gpt, resnet50
from suite.core.placement import (
    LayerShape,
    gradient_workers,
    makespan_bound,
    plan_owners,
    plan_placement,
)

LISTS = {"resnet50": resnet50(), "gpt12": gpt(layers=12, width=768)}


@st.composite
def problems(draw):
    """(layers, world, workers, settings): anything a user could ask for."""
    sides = st.integers(1, 40)
    layer = st.builds(
        LayerShape, st.tuples(sides, sides), st.tuples(st.booleans(), st.booleans()), st.integers(1, 4)
    )
    layers = draw(st.lists(layer, min_size=1, max_size=12))
    world = draw(st.integers(1, 12))
    workers = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    followers = draw(st.lists(st.integers(1, len(layers)), max_size=4, unique=True))
    input_of = {i: 0 for i in followers if i < len(layers)}
    together = [draw(st.lists(st.integers(0, len(layers) - 1), min_size=1, max_size=3))]
    settings = {
        "strategy": draw(st.sampled_from(["compute", "memory"])),
        "colocate_factors": workers == 1 or draw(st.booleans()),
        "input_of": input_of,
        "together": together,
    }
    return layers, world, workers, settings


@given(problems())
def test_every_factor_has_one_owner_among_its_layers_workers(problem):
    layers, world, workers, settings = problem
    plan = plan_placement(layers, world, workers, **settings)
    keys = {(i, side) for i in range(len(layers)) for side in "AG"}
    assert plan.owner_of.keys() == keys - {(i, "A") for i in settings["input_of"]}
    for (i, _), owner in plan.owner_of.items():
        assert owner in plan.workers_of(i)
    for i, leader in settings["input_of"].items():
        assert plan.workers_of(i) == plan.workers_of(leader)
    for group in settings["together"]:
        assert len({plan.workers_of(i) for i in group}) == 1
    if settings["colocate_factors"]:
        for i in range(len(layers)):
            leader = settings["input_of"].get(i, i)
            assert plan.owner_of[i, "G"] == plan.owner_of[leader, "A"]


@given(problems())
def test_both_kinds_of_groups_partition_the_world(problem):
    layers, world, workers, settings = problem
    plan = plan_placement(layers, world, workers, **settings)
    for groups, size in ((plan.worker_groups, workers), (plan.receiver_groups, world // workers)):
        assert sorted(itertools.chain(*groups)) == list(range(world))
        assert {len(group) for group in groups} == {size}
    for column in plan.worker_groups:
        for row in plan.receiver_groups:
            assert len(set(column) & set(row)) == 1
    for i in range(len(layers)):
        for rank in range(world):
            source = plan.source(i, rank)
            assert source in plan.workers_of(i)
            assert any({source, rank} <= set(row) for row in plan.receiver_groups)
            assert plan.is_worker(i, rank) == (rank in plan.workers_of(i)) == (source == rank)


@given(problems())
def test_loads_are_those_of_the_owners(problem):
    layers, world, workers, settings = problem
    plan = plan_placement(layers, world, workers, **settings)
    loads = [0] * world
    for (i, side), owner in plan.owner_of.items():
        at = "AG".index(side)
        power = 1 if layers[i].diagonal[at] else 2 if settings["strategy"] == "memory" else 3
        loads[owner] += layers[i].blocks * layers[i].sizes[at] ** power
    assert list(plan.loads) == loads
    assert plan.makespan == max(loads)
    assert plan_placement(layers, world, workers, **settings) == plan


@pytest.mark.parametrize("colocate", [True, False], ids=["colocated", "apart"])
@pytest.mark.parametrize("strategy", ["compute", "memory"])
@pytest.mark.parametrize("world", [2, 3, 4, 8, 16, 64, 256, 1024])
@pytest.mark.parametrize("name", LISTS)
def test_the_makespan_of_real_models_is_within_a_third_of_the_bound(name, world, strategy, colocate):
    layers = LISTS[name]
    for workers in {1, world // 2, world} if colocate else {world}:
        if world % max(workers, 1):
            continue
        plan = plan_placement(layers, world, workers, strategy=strategy, colocate_factors=colocate)
        costs = [[layer.cost(side, strategy) for side in "AG"] for layer in layers]
        jobs = [sum(pair) for pair in costs] if colocate else [c for pair in costs for c in pair]
        assert plan.makespan <= 4 / 3 * makespan_bound(jobs, world)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_no_assignment_beats_the_bound_and_the_plan_is_near_the_best(costs, world):
    """Against all assignments, by trying them."""
    best = min(
        max(sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(world))
        for ranks in itertools.product(range(world), repeat=len(costs))
    )
    assert makespan_bound(costs, world) <= best
    layers = [LayerShape((c, 1), (True, True)) for c in costs]  # a cost of c + 1 each
    jobs = [c + 1 for c in costs]
    best = min(
        max(sum(c for c, r in zip(jobs, ranks, strict=True) if r == rank) for rank in range(world))
        for ranks in itertools.product(range(world), repeat=len(jobs))
    )
    assert best <= plan_placement(layers, world, world).makespan <= 4 / 3 * best


def test_a_shuffled_model_is_as_fair():
    layers = resnet50()
    bound = makespan_bound([x.cost("A", "compute") + x.cost("G", "compute") for x in layers], 4)
    for seed in range(5):
        random.Random(seed).shuffle(layers)
        assert plan_placement(layers, 4, 2).makespan <= 4 / 3 * bound


def test_owners_of_further_jobs_are_those_with_less_to_do():
    assert plan_owners([2, 2, 2], 3) == [0, 1, 2]
    assert plan_owners([2, 2, 2], 3, [9, 0, 3]) == [1, 1, 2]


@pytest.mark.parametrize(
    ("world", "fraction", "expected"),
    [
        (1, 1, 1),
        (1, 0.5, 1),
        (4, 1.0, 4),
        (4, 0.5, 2),
        (4, 0.25, 1),
        (4, 0, 1),
        (6, 1 / 3, 2),
        (3, 0, 1),
    ],
)
def test_fractions_that_divide_the_world(world, fraction, expected):
    assert gradient_workers(world, fraction) == expected


@pytest.mark.parametrize(("world", "fraction"), [(3, 0.5), (4, 0.75), (8, 0.4), (6, 5 / 6)])
def test_other_fractions_are_errors_that_name_those(world, fraction):
    with pytest.raises(ValueError, match="gradient_worker_fraction must divide") as error:
        gradient_workers(world, fraction)
    for n in range(1, world + 1):
        assert (f" {n}/{world}" in str(error.value)) == (world % n == 0)


def test_bad_arguments_are_errors():
    layer = LayerShape((3, 2))
    with pytest.raises(ValueError, match="workers must divide world=4, got 3"):
        plan_placement([layer], 4, 3)
    with pytest.raises(ValueError, match="colocate_factors must be True"):
        plan_placement([layer], 4, 1, colocate_factors=False)
    with pytest.raises(ValueError, match="strategy must be one of"):
        plan_placement([layer], 4, 2, strategy="fast")
    with pytest.raises(ValueError, match="gradient_worker_fraction must be"):
        gradient_workers(4, 1.5)
