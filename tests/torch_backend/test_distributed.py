"""Several processes train exactly as one with all the data. Collectives run over gloo."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from suite.core.placement import LayerShape, plan_placement
from suite.core.traffic import footprint
from suite.torch import KFAC, AssignmentStrategy, DistributedStrategy
from torch_backend.crew import STALLED, Crew
from torch_backend.distributed_jobs import (
    BATCH,
    STEPS,
    Settings,
    backward,
    batches,
    copies_with_a_group,
    default_groups,
    dies_while_preconditioning,
    distance,
    gradient_storage,
    group_timeouts,
    measure,
    mishap,
    network,
    order_of_events,
    other_model_on_one_rank,
    parameters_of,
    share_of,
    train,
    train_adaptively,
    train_branches,
    train_in_pairs,
    train_in_turn,
    train_on_old_gloo,
    train_positions,
    train_spectrum,
    train_with_nan,
    treatments,
    whole_between_micro_batches,
    world_and_rank,
    wrapped,
)

pytestmark = pytest.mark.slow

STRATEGIES = ("COMM_OPT", "HYBRID_OPT", "MEM_OPT")


@pytest.fixture(scope="module")
def crew():
    members = Crew(4)
    yield members
    members.close()


@cache
def _alone(key: str) -> list[torch.Tensor]:
    return train(_SETTINGS[key])["parameters"]


_SETTINGS: dict[str, Settings] = {}


def alone(settings: Settings) -> list[torch.Tensor]:
    """The parameters after training in this process, without a process group."""
    kept = ("factor_scaling", "fisher", "likelihood", "compute_method", "inv_update_steps")
    kept += ("factor_update_steps", "kl_clip", "weight_sharing", "loss_reduction", "damping")
    kept += ("compute_eigenvalue_outer_product", "warm_start", "spread_inverses")
    own = {name: value for name, value in settings.kfac.items() if name in kept}
    if settings.loss == "global" or settings.shares:
        loss = "mean" if settings.loss == "global" else settings.loss
        settings = replace(settings, loss=loss, shares=())
        own.pop("loss_reduction")
    settings = replace(settings, wrap="none", kfac=own)
    _SETTINGS[repr(settings)] = settings
    return _alone(repr(settings))


def check(crew: Crew, world: int, settings: Settings, within: float = 1e-9) -> list[dict[str, Any]]:
    expected = alone(settings)
    results = crew.run(train, world, settings)
    for result in results:
        assert distance(result["parameters"], expected) < within
        assert result["steps"] == (settings.steps, 0)
        assert result["memory"] == result["plan"]
    for result in results[1:]:  # ranks agree to the last bit
        assert distance(result["parameters"], results[0]["parameters"]) == 0
    return results


METHODS = {
    "eigen": {},
    "inverse": {"compute_method": "inverse"},
    # Second moments depend on the basis of A's null space: enough rows for there to be none.
    "ekfac": {"compute_method": "ekfac", "inv_update_steps": 3},
}


@pytest.mark.parametrize(
    ("world", "method"),
    [*((world, method) for world in (2, 4) for method in METHODS), (1, "inverse"), (3, "inverse")],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_any_number_of_ranks_follows_the_trajectory_of_one(crew, wrap, world, strategy, method):
    settings = Settings(
        wrap,
        kfac={**METHODS[method], "gradient_worker_fraction": strategy},
        batch=240 if method == "ekfac" else 24,
    )
    if world == 3 and strategy == "HYBRID_OPT":
        with pytest.raises(AssertionError, match=r"one of 1/3, 3/3 would"):
            crew.run(train, world, settings)
        return
    check(crew, world, settings)


@pytest.mark.parametrize("loss", ["mean", "slopes"])
@pytest.mark.parametrize("strategy", ["COMM_OPT", "MEM_OPT"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_so_it_does_where_learning_rate_and_damping_are_found(crew, world, strategy, loss):
    kfac = {"compute_method": "inverse", "inv_update_steps": 2}
    expected = train_adaptively(Settings("none", kfac=kfac, loss=loss))
    found = crew.run(
        train_adaptively,
        world,
        Settings(
            kfac={**kfac, "gradient_worker_fraction": strategy},
            loss=loss,
            ddp={"find_unused_parameters": strategy == "MEM_OPT"},
        ),
    )
    for result in found:
        assert distance(result["parameters"], expected["parameters"]) < 1e-9
        assert result["counts"][:2] == expected["counts"][:2]
        assert distance(result["parameters"], found[0]["parameters"]) == 0
        assert result["counts"] == found[0]["counts"]
    with pytest.raises(AssertionError, match="parameters must be whole, got DTensors"):
        crew.run(train_adaptively, world, Settings("fsdp", kfac=kfac))


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_metrics_are_of_what_a_rank_has_and_send_nothing(crew, wrap):
    """A factor's condition is known to the rank that averages it, the norm of shards to none."""
    kfac = {"gradient_worker_fraction": "MEM_OPT"}
    alone, ratios, _ = measure(Settings("none"))
    assert ratios.keys() == alone.keys()
    results = crew.run(measure, 3, Settings(wrap, kfac=kfac))
    for name, expected in alone.items():
        for key in ("condition_A", "condition_G"):
            (value,) = [found[name][key] for found, *_ in results if key in found[name]]
            assert 1 / value == pytest.approx(1 / expected[key], rel=1e-6, abs=1e-12)
        for found, seen, sent in results:
            assert not sent
            assert seen[name] == pytest.approx(ratios[name], rel=1e-9)
            assert ("update_to_weight" in found[name]) is (wrap == "ddp")
            assert found[name].get("update_to_weight", seen[name]) == pytest.approx(seen[name], rel=1e-9)


VARIANTS: dict[str, tuple[int, Settings]] = {
    "by hand": (3, Settings("none")),
    "one by one": (3, Settings(kfac={"allreduce_bucket_cap_mb": 0})),
    "one by one, memory": (4, Settings("fsdp", kfac={"allreduce_bucket_cap_mb": 0})),
    "small buckets": (4, Settings(kfac={"allreduce_bucket_cap_mb": 0.004})),
    "small buckets, mem": (
        4,
        Settings(kfac={"allreduce_bucket_cap_mb": 0.001, "gradient_worker_fraction": "mem_opt"}),
    ),
    "broadcasts in subgroups": (
        4,
        Settings(kfac={"allreduce_bucket_cap_mb": 0.0001, "gradient_worker_fraction": 0.5}),
    ),
    "symmetric inverse": (2, Settings(kfac={"symmetry_aware": True, "compute_method": "inverse"})),
    "symmetric eigen": (4, Settings(kfac={"symmetry_aware": True, "gradient_worker_fraction": 0.5})),
    "packed inverse": (3, Settings(kfac={"packed_factors": True, "compute_method": "inverse"})),
    "packed newton-schulz, fsdp": (
        2,
        Settings("fsdp", kfac={"packed_factors": True, "compute_method": "newton_schulz"}),
    ),
    "packed inverse, hybrid": (
        4,
        Settings(
            kfac={
                "packed_factors": True,
                "symmetry_aware": True,
                "compute_method": "inverse",
                "gradient_worker_fraction": 0.5,
                "inv_update_steps": 3,
            }
        ),
    ),
    "packed eigen, fsdp": (
        2,
        Settings("fsdp", kfac={"packed_factors": True, "gradient_worker_fraction": "MEM_OPT"}),
    ),
    "apart": (4, Settings(kfac={"colocate_factors": False})),
    "apart, hybrid, inverse": (
        4,
        Settings(
            kfac={
                "colocate_factors": False,
                "gradient_worker_fraction": 0.5,
                "compute_method": "inverse",
            }
        ),
    ),
    "memory": (4, Settings(kfac={"assignment_strategy": "MEMORY", "gradient_worker_fraction": 0.5})),
    "stale": (
        4,
        Settings(
            kfac={
                "inv_update_steps": 3,
                "factor_update_steps": 2,
                "gradient_worker_fraction": "MEM_OPT",
            }
        ),
    ),
    "stale, fsdp": (3, Settings("fsdp", kfac={"inv_update_steps": 3, "factor_update_steps": 2})),
    "spread, more steps than layers": (
        2,
        Settings(
            steps=12,
            kfac={"spread_inverses": True, "compute_method": "inverse", "inv_update_steps": 10},
        ),
    ),
    "accumulation": (2, Settings(micro=3)),
    "accumulation, fsdp": (2, Settings("fsdp", micro=3)),
    "accumulation, fsdp, held back": (2, Settings("fsdp", micro=3, held_back=True)),
    "accumulation, hsdp, held back": (4, Settings("hsdp", micro=3, held_back=True)),
    "accumulation, static graph": (2, Settings(micro=2, ddp={"static_graph": True})),
    "static graph": (2, Settings(ddp={"static_graph": True})),
    "bucket views": (3, Settings(ddp={"gradient_as_bucket_view": True})),
    "no resharding": (3, Settings("fsdp", fsdp={"reshard_after_forward": False})),
    "hsdp": (4, Settings("hsdp")),
    "hsdp, mem": (4, Settings("hsdp", kfac={"gradient_worker_fraction": "MEM_OPT"})),
    "hsdp, hybrid, inverse": (
        4,
        Settings("hsdp", kfac={"gradient_worker_fraction": 0.5, "compute_method": "inverse"}),
    ),
    "without kl_clip": (4, Settings(kfac={"kl_clip": None, "gradient_worker_fraction": "MEM_OPT"})),
    "sum": (4, Settings(loss="sum", kfac={"loss_reduction": "sum", "damping": 1.0})),
    "type-2": (3, Settings(kfac={"fisher": "type-2", "likelihood": "categorical"})),
    "type-2, fsdp": (3, Settings("fsdp", kfac={"fisher": "type-2", "likelihood": "categorical"})),
    "type-2, held back": (
        2,
        Settings(
            "fsdp", micro=3, held_back=True, kfac={"fisher": "type-2", "likelihood": "categorical"}
        ),
    ),
    "type-2, static graph": (
        2,
        Settings(ddp={"static_graph": True}, kfac={"fisher": "type-2", "likelihood": "categorical"}),
    ),
    "reduce": (2, Settings(kfac={"weight_sharing": "reduce"})),
    "outer products": (2, Settings(kfac={"compute_eigenvalue_outer_product": True})),
    "newton-schulz": (2, Settings(kfac={"compute_method": "newton_schulz"})),
    "warm start": (4, Settings(kfac={"warm_start": True, "inv_update_steps": 2}, batch=240)),
    "spread": (
        4,
        Settings(
            kfac={
                "spread_inverses": True,
                "inv_update_steps": 3,
                "compute_method": "inverse",
                "gradient_worker_fraction": 0.5,
            }
        ),
    ),
    "spread, ekfac, fsdp": (
        3,
        Settings(
            "fsdp", kfac={"spread_inverses": True, "inv_update_steps": 3, "compute_method": "ekfac"}
        ),
    ),
    "derivatives": (3, Settings(loss="slopes", kfac={"gradient_worker_fraction": "MEM_OPT"})),
    "derivatives on some ranks": (
        3,
        Settings("none", loss="slopes", shares=(13, 11, 0), kfac={"loss_reduction": "global_mean"}),
    ),
    "derivatives, shared inputs": (2, Settings(loss="slopes", middle="gated", micro=2)),
    "experts": (3, Settings(middle="experts", micro=2, kfac={"gradient_worker_fraction": "MEM_OPT"})),
    "experts, fsdp": (2, Settings("fsdp", middle="experts", kfac={"compute_method": "inverse"})),
    "functions": (3, Settings(middle="functions", micro=2)),
    "functions, fsdp": (
        2,
        Settings("fsdp", middle="functions", kfac={"gradient_worker_fraction": "MEM_OPT"}),
    ),
    "a rank without data": (
        3,
        Settings("none", loss="global", shares=(13, 11, 0), kfac={"loss_reduction": "global_mean"}),
    ),
    "unequal batches": (
        4,
        Settings(loss="global", shares=(9, 7, 5, 3), kfac={"loss_reduction": "global_mean"}),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_so_does_every_variant(crew, name):
    world, settings = VARIANTS[name]
    check(crew, world, settings)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_single_precision(crew, wrap, strategy):
    settings = Settings(wrap, dtype=torch.float32, kfac={"gradient_worker_fraction": strategy})
    check(crew, 4, settings, within=1e-5)


def with_passes_thrown_away(
    settings: Settings, thrown: bool, compiled: bool = False
) -> list[torch.Tensor]:
    """Parameters after some steps, before which gradients of other passes were cleared."""
    model = network()
    run: Any = wrapped(model, settings)
    base = torch.optim.SGD(run.parameters(), lr=0.1)
    kfac = KFAC(run, base, damping=0.03)
    if compiled:
        warnings.filterwarnings("ignore", ".*not a leaf Tensor")  # dynamo looks at .grad
        run.compile(backend="aot_eager")
    for number, batch in enumerate(batches(torch.float64, 4, BATCH)):
        x, y = share_of(batch, settings)
        if thrown and number != 2:
            backward(run, 3 * x, y, settings)
            (run if number else base).zero_grad()
        backward(run, x, y, settings)
        kfac.step()
        kfac.zero_grad()
    return parameters_of(model)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, Settings("ddp")),
        (2, Settings("fsdp")),
        (2, Settings("fsdp", micro=3)),
        (2, Settings("fsdp", micro=3, held_back=True)),
        (4, Settings("hsdp", micro=3, held_back=True)),
    ],
    ids=["ddp", "fsdp", "accumulation", "held back", "hsdp, held back"],
)
def test_passes_whose_gradients_are_cleared_leave_nothing(crew, world, settings):
    expected = with_passes_thrown_away(settings, False)
    for parameters in crew.run(with_passes_thrown_away, world, settings, True):
        assert distance(parameters, expected) < 1e-9


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile does not trace modes")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_passes_of_compiled_models_whose_gradients_are_cleared_leave_nothing(crew, wrap):
    settings = Settings(wrap, micro=2)
    expected = with_passes_thrown_away(settings, False)
    for parameters in crew.run(with_passes_thrown_away, 2, settings, True, True):
        assert distance(parameters, expected) < 1e-9


@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
def test_parameters_that_stay_whole_between_passes_do_so_with_any_fisher(crew, fisher):
    kfac = {"fisher": fisher, "likelihood": None if fisher == "empirical" else "categorical"}
    for whole in crew.run(whole_between_micro_batches, 2, Settings("fsdp", kfac=kfac)):
        assert all(whole)


@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
def test_a_rank_of_fsdp_may_have_no_examples_with_any_fisher(crew, fisher):
    kfac = {"fisher": fisher, "loss_reduction": "global_mean"}
    kfac["likelihood"] = None if fisher == "empirical" else "categorical"
    check(crew, 2, Settings("fsdp", shares=(0, BATCH), loss="global", kfac=kfac))


def test_mixed_precision_of_fsdp_follows_single_precision_within_its_own(crew):
    settings = Settings("fsdp", dtype=torch.float32, fsdp={"mixed": True})
    expected = alone(replace(settings, fsdp={}))
    for result in crew.run(train, 2, settings):
        assert distance(result["parameters"], expected) < 0.05
        assert all(p.dtype == torch.float32 for p in result["parameters"])


def test_unequal_batches_of_mean_losses_weigh_by_their_counts(crew):
    """One step: the factors are those of the whole batch, whatever each rank's share of it."""
    settings = Settings(steps=1, shares=(11, 1), batch=12, kfac={"kl_clip": None})
    (first, second) = crew.run(factors_after_a_step, 2, settings)
    expected = factors_after_a_step(replace(settings, wrap="none"))
    assert first.keys() == second.keys() == expected.keys()
    for name, factor in expected.items():
        torch.testing.assert_close(first[name], factor, rtol=1e-9, atol=1e-12)
        assert torch.equal(first[name], second[name])


def factors_after_a_step(settings: Settings) -> dict[str, torch.Tensor]:
    model = network()
    run = wrapped(model, settings)
    kfac = KFAC(run, **settings.kfac)
    x, y = share_of(batches(settings.dtype, 1, settings.batch)[0], settings)
    backward(run, x, y, settings)
    kfac.step()
    layers = kfac.state_dict()["kfac"]["layers"]
    return {f"{n}.{side}": r[side].clone() for n, r in layers.items() for side in "AG"}


def with_ignored_labels(all_of_a_rank: bool) -> tuple[list[torch.Tensor], float | None]:
    """Parameters, and the number of terms, where ranks have different numbers of labels."""
    world, rank = world_and_rank()
    model = network()
    run = wrapped(model, Settings())
    given: list[torch.Tensor] = []
    base = torch.optim.SGD(run.parameters(), lr=0.1)
    counted = {"loss_reduction": "global_mean", "terms": lambda: (given[-1] >= 0).sum()}
    kfac = KFAC(run, base, damping=0.03, **counted)
    for x, y in batches(torch.float64, 4, BATCH):
        y = y.where(x[:, 0, 0, 0] > 0, -100)
        if all_of_a_rank:
            y[::2] = -100
        given.append(y[rank::world])
        loss = F.cross_entropy(run(x[rank::world]), given[-1], reduction="sum")
        (loss * world / (y >= 0).sum()).backward()
        kfac.step()
        kfac.zero_grad()
    return parameters_of(model), kfac.counted_terms


@pytest.mark.parametrize("all_of_a_rank", [False, True])
def test_terms_are_those_that_each_rank_counts_together(crew, all_of_a_rank):
    expected, terms = with_ignored_labels(all_of_a_rank)
    for parameters, counted in crew.run(with_ignored_labels, 2, all_of_a_rank):
        assert distance(parameters, expected) < 1e-9
        assert counted == terms


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_see_different_layers_do_not_wait_for_each_other(crew, world, strategy):
    settings = {"gradient_worker_fraction": strategy}
    expected = train_branches({}, False)
    for parameters in crew.run(train_branches, world, settings, True):
        assert distance(parameters, expected) < 1e-9


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_complex_parameters_have_one_trajectory(crew, strategy):
    expected = train_spectrum({})
    for parameters in crew.run(train_spectrum, 4, {"gradient_worker_fraction": strategy}):
        assert distance(parameters, expected) < 1e-9


@pytest.mark.parametrize("world", [2, 4])
def test_layers_whose_gradients_are_zeros_in_turn_are_asked_for_on_all_ranks(crew, world):
    expected, wanted = train_in_turn({})
    assert wanted[:4] == [False, True, True, True]  # the right side is trained in steps 1 and 3
    for parameters, own in crew.run(train_in_turn, world, {"gradient_worker_fraction": "MEM_OPT"}):
        assert own == wanted
        assert distance(parameters, expected) < 1e-9


@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize(
    ("wrap", "strategy"), [("ddp", "COMM_OPT"), ("ddp", "MEM_OPT"), ("fsdp", "MEM_OPT"), ("none", 0.5)]
)
def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_on_all(crew, wrap, strategy, where):
    settings = Settings(wrap, kfac={"gradient_worker_fraction": strategy}, steps=4)
    results = crew.run(train_with_nan, 2, settings, 1, 2, where)
    for result in results:
        assert not result["changed"]
        assert result["steps"] == (3, 1)
        assert any("step 2 was skipped" in text and "on ranks [" in text for text in result["said"])
        assert all(bool(p.isfinite().all()) for p in result["parameters"])
    if where == "gradient":
        assert all("on ranks [1]" in " ".join(result["said"]) for result in results)
    assert distance(results[0]["parameters"], results[1]["parameters"]) == 0


@pytest.mark.parametrize("kind", ["killed", "stalled", "stopped"])
def test_a_rank_that_is_gone_is_an_error_that_says_what_was_going_on(kind):
    """Not a hang: within the process group's timeout."""
    members = Crew(3)
    try:
        results = members.run(mishap, 3, kind, Settings("none"), fails=True)
    finally:
        members.close()
    assert (results[1] is None) == (kind == "killed")
    for rank in (0, 2):
        assert isinstance(results[rank], str)
        assert "K-FAC's agreement on the step failed on rank" in results[rank]
        assert "another rank died, or stalled past the process group's timeout" in results[rank]


def test_strategies_trade_memory_for_communication(crew):
    """KAISA's trade: more gradient workers, more inverses and fewer directions travelling."""
    results = {s: crew.run(train, 4, Settings(kfac={"gradient_worker_fraction": s})) for s in STRATEGIES}
    inverses = {s: sum(r["memory"]["inverses"] for r in results[s]) for s in STRATEGIES}
    factors = {s: sum(r["memory"]["factors"] for r in results[s]) for s in STRATEGIES}
    assert inverses["COMM_OPT"] == 2 * inverses["HYBRID_OPT"] == 4 * inverses["MEM_OPT"]
    assert len(set(factors.values())) == 1
    directions = {
        s: sum(r["bytes"].get("K-FAC's exchange of directions", 0) for r in results[s])
        for s in STRATEGIES
    }
    assert directions["COMM_OPT"] == 0 < directions["HYBRID_OPT"] < directions["MEM_OPT"]
    assert "K-FAC's exchange of inverses" not in results["MEM_OPT"][0]["collectives"]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_gradients_keep_their_storage(crew, wrap):
    """With DDP's gradient_as_bucket_view they are views that must not be replaced."""
    views = {"gradient_as_bucket_view": True}
    for strategy in STRATEGIES:
        settings = Settings(wrap, ddp=views, kfac={"gradient_worker_fraction": strategy})
        assert all(crew.run(gradient_storage, 4, settings))


@pytest.mark.parametrize("bucket_mb", [0, 25])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backend_without_reduce_scatter_takes_the_same_steps(crew, strategy, bucket_mb):
    """Gloo's of torch 2.6."""
    kfac = {"gradient_worker_fraction": strategy, "allreduce_bucket_cap_mb": bucket_mb}
    for result in crew.run(train_on_old_gloo, 4, Settings(kfac=kfac)):
        assert distance(result["parameters"], alone(Settings(kfac=kfac))) < 1e-9


@pytest.mark.parametrize("strategy", ["COMM_OPT", "MEM_OPT"])
def test_a_group_that_is_passed_in_is_the_world(crew, strategy):
    expected = [alone(Settings()), train_scaled(2.0)]
    for rank, parameters in enumerate(
        crew.run(train_in_pairs, 4, {"gradient_worker_fraction": strategy})
    ):
        assert distance(parameters, expected[rank % 2]) < 1e-9


def train_scaled(factor: float) -> list[torch.Tensor]:
    """One process, from parameters `factor` times as large."""
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), damping=0.03)
    for x, y in batches(torch.float64, STEPS, BATCH):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        kfac.step()
        kfac.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_each_exchange_is_one_collective_a_step(crew):
    settings = Settings(kfac={"gradient_worker_fraction": "HYBRID_OPT", "compute_method": "inverse"})
    for result in crew.run(train, 4, settings):
        counts = result["collectives"]
        compared = "K-FAC's comparison of models", "K-FAC's comparison of parameters"
        for once in (*compared, "K-FAC's agreement on shared inputs"):
            assert counts.pop(once) == 1
        assert set(counts.values()) == {settings.steps}
        assert len(counts) == 6  # the agreement, sums, traces, inverses, kl_clip's sum, directions


@pytest.mark.parametrize("bucket_mb", [0, 1e-4])
@pytest.mark.parametrize(("strategy", "what"), [("COMM_OPT", "inverse"), ("MEM_OPT", "direction")])
def test_what_is_computed_leaves_while_the_rest_is_computed(crew, strategy, what, bucket_mb):
    kfac = {"allreduce_bucket_cap_mb": bucket_mb, "gradient_worker_fraction": strategy}
    overlapped = []
    for events in crew.run(order_of_events, 2, Settings(kfac=kfac)):
        first, last = events.index(what), len(events) - 1 - events[::-1].index(what)
        overlapped.append("leaves" in events[first:last])
    assert any(overlapped)  # a rank may have one thing to compute


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_bytes_of_directions_are_those_that_the_plan_says(crew, workers):
    settings = Settings(kfac={"gradient_worker_fraction": workers / 4, "compute_method": "inverse"})
    layers = [
        LayerShape((9 + 1, 3)),
        LayerShape((48 + 1, 10)),
        LayerShape((2, 1), blocks=10),
        LayerShape((10, 10)),
        LayerShape((10 + 1, 3)),
    ]
    cost = footprint(layers, plan_placement(layers, 4, workers), eigen=False, itemsize=8)
    results = crew.run(train, 4, settings)
    sent = sum(r["bytes"].get("K-FAC's exchange of directions", 0) for r in results)
    assert sent == settings.steps * cost.step.total
    memory = [r["memory"] for r in results]
    assert max(m["factors"] for m in memory) == cost.factors
    assert max(m["inverses"] for m in memory) == cost.inverses


def test_upper_triangles_are_half_of_what_travels(crew):
    sent = []
    for symmetric in (False, True):
        settings = Settings(kfac={"symmetry_aware": symmetric, "compute_method": "inverse"})
        results = crew.run(train, 2, settings)
        for phase in ("K-FAC's sum of statistics", "K-FAC's exchange of inverses"):
            sent.append(sum(r["bytes"][phase] for r in results))
    for full, half in zip(sent[:2], sent[2:], strict=True):
        assert 0.5 < half / full < 0.56


def test_strategies_are_enums_strings_or_numbers_and_bad_ones_are_errors():
    model = network()
    for value in (DistributedStrategy.COMM_OPT, "comm_opt", "MEM_OPT", 1, 0.5, 1.0):
        KFAC(model, gradient_worker_fraction=value).detach()
    KFAC(model, grad_worker_fraction=DistributedStrategy.HYBRID_OPT).detach()
    KFAC(model, assignment_strategy=AssignmentStrategy.MEMORY).detach()
    with pytest.raises(ValueError, match="gradient_worker_fraction must be one of"):
        KFAC(model, gradient_worker_fraction="fast")
    with pytest.raises(ValueError, match="are one setting"):
        KFAC(model, gradient_worker_fraction=1.0, grad_worker_fraction=0.5)
    with pytest.raises(ValueError, match="gradient_worker_fraction must be"):
        KFAC(model, gradient_worker_fraction=2.0)
    with pytest.raises(ValueError, match="assignment_strategy must be one of"):
        KFAC(model, assignment_strategy="luck")
    with pytest.raises(ValueError, match="allreduce_bucket_cap_mb must be"):
        KFAC(model, allreduce_bucket_cap_mb=-1)
    with pytest.raises(TypeError, match="colocate_factors must be True or False"):
        KFAC(model, colocate_factors=1)


def test_memory_opt_needs_colocated_factors(crew):
    settings = Settings(kfac={"gradient_worker_fraction": "MEM_OPT", "colocate_factors": False})
    with pytest.raises(AssertionError, match="colocate_factors must be True"):
        crew.run(train, 2, settings)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_free_parameters_and_shared_inputs(crew, wrap):
    expected = train_positions(Settings("none"))
    for parameters in crew.run(train_positions, 4, Settings(wrap)):
        assert distance(parameters, expected) < 1e-9


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_layers_that_stop_sharing_an_input(crew, wrap, strategy):
    """Whoever owns what, also where some ranks own nothing."""
    expected = train_positions(Settings("none"), 3)
    settings = Settings(wrap, kfac={"gradient_worker_fraction": strategy})
    for parameters in crew.run(train_positions, 4, settings, 3):
        assert distance(parameters, expected) < 1e-9


def test_other_layers_on_one_rank_are_an_error_on_all(crew):
    for said in crew.run(other_model_on_one_rank, 3):
        assert "all ranks of process_group must have the same layers" in said


def test_groups_are_those_of_the_wrapper_or_the_mesh(crew):
    assert crew.run(default_groups, 4) == [(2, 2, 2)] * 4


def test_groups_of_our_own_wait_as_long_as_the_given_one(crew):
    assert crew.run(group_timeouts, 4) == [{STALLED}] * 4


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("scaling", ["fisher", "kfac_pytorch"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_say_which_layers_have_no_inverses(crew, strategy, scaling, period):
    settings = {"gradient_worker_fraction": strategy, "factor_scaling": scaling}
    settings |= {"inv_update_steps": period}
    names = [f"{layer}.{p}" for layer in ("first", "seldom", "last") for p in ("weight", "bias")]
    trained = dict.fromkeys(names, "kfac")
    at_first = trained | {"seldom.weight": "waiting", "seldom.bias": "waiting"}
    if scaling == "kfac_pytorch":  # starts from the identity
        at_first = trained
    for found in crew.run(treatments, 2, settings):
        assert found == [at_first] * (1 + period) + [trained] * (5 - period)


def test_a_copy_shares_the_group(crew):
    assert all(crew.run(copies_with_a_group, 2))


@pytest.mark.parametrize("strategy", ["COMM_OPT", "MEM_OPT"])
def test_the_error_names_the_layers_that_were_travelling(strategy):
    members = Crew(2)
    settings = Settings("none", kfac={"gradient_worker_fraction": strategy, "kl_clip": None})
    try:
        results = members.run(dies_while_preconditioning, 2, settings, fails=True)
    finally:
        members.close()
    assert results[1] is None
    if strategy == "MEM_OPT":
        assert "(layers '0' to '8') failed on rank 0" in results[0]
    else:
        assert results[0] is None  # nothing travels after the agreement: the step was whole
