"""Checkpoints of several ranks continue on any number of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from distributed import latest
from torch_backend.checkpoint_jobs import (
    END,
    SAVED_AT,
    die_while_saving,
    load_and_go_on,
    load_file_and_go_on,
    load_into_nothing,
    load_own_share,
    load_what_one_rank_cannot,
    save,
    save_on_one,
    state_of_one_layer,
)
from torch_backend.crew import Crew
from torch_backend.distributed_jobs import Settings, distance, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def crew():
    members = Crew(4)
    yield members
    members.close()


CASES = {
    "mem, eigen": Settings(kfac={"gradient_worker_fraction": "MEM_OPT", "inv_update_steps": 3}),
    "comm, inverse": Settings(
        "fsdp", kfac={"compute_method": "inverse", "inv_update_steps": 3, "symmetry_aware": True}
    ),
    "mem, shared inputs": Settings(
        middle="gated",
        kfac={
            "gradient_worker_fraction": "MEM_OPT",
            "compute_method": "inverse",
            "inv_update_steps": 3,
        },
    ),
    "experts": Settings("fsdp", middle="experts", kfac={"inv_update_steps": 3}),
    "comm, shared inputs": Settings("fsdp", middle="gated", kfac={"inv_update_steps": 3}),
    "mem, ekfac": Settings(
        "fsdp",
        kfac={"compute_method": "ekfac", "inv_update_steps": 3, "gradient_worker_fraction": "MEM_OPT"},
        batch=240,
    ),
}


def uninterrupted(settings: Settings) -> list[torch.Tensor]:
    own = {k: v for k, v in settings.kfac.items() if k in ("compute_method", "inv_update_steps")}
    return train(replace(settings, wrap="none", steps=END, kfac=own))["parameters"]


@pytest.mark.parametrize("how", ["own", "optimizer"])
@pytest.mark.parametrize("name", CASES)
def test_saved_on_four_ranks_and_continued_on_any(crew, tmp_path, name, how):
    settings = CASES[name]
    expected = uninterrupted(settings)
    crew.run(save, 4, settings, how, str(tmp_path))
    for world in (1, 2, 3, 4):
        for parameters, steps in crew.run(load_and_go_on, world, settings, how, str(tmp_path)):
            assert steps == SAVED_AT
            assert distance(parameters, expected) < 1e-9


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("how", ["own", "optimizer"])
def test_packed_and_whole_factors_continue_each_other(crew, tmp_path, how, packed):
    settings = CASES["comm, inverse"]
    expected = uninterrupted(settings)
    first, second = (
        replace(settings, kfac={**settings.kfac, "packed_factors": flag})
        for flag in (packed, not packed)
    )
    crew.run(save, 3, first, how, str(tmp_path))
    for parameters, steps in crew.run(load_and_go_on, 2, second, how, str(tmp_path)):
        assert steps == SAVED_AT
        assert distance(parameters, expected) < 1e-9


def test_every_factor_is_on_one_rank_and_saved_once(crew, tmp_path):
    settings = CASES["mem, eigen"]
    shares = crew.run(save, 4, settings, "own", str(tmp_path))
    (whole,) = crew.run(save, 1, settings, "own", str(tmp_path / "alone"))
    assert sum(shares) == whole
    assert max(shares) < whole


@pytest.mark.parametrize("strategy", ["COMM_OPT", "MEM_OPT"])
def test_torch_save_on_one_rank_of_what_all_have_gathered(crew, tmp_path, strategy):
    settings = Settings(kfac={"gradient_worker_fraction": strategy, "inv_update_steps": 3})
    path = str(tmp_path / "checkpoint.pt")
    crew.run(save_on_one, 4, settings, path)
    expected = uninterrupted(settings)
    for world in (1, 3, 4):
        for parameters, steps in crew.run(load_file_and_go_on, world, settings, path):
            assert steps == SAVED_AT
            assert distance(parameters, expected) < 1e-9


@pytest.mark.parametrize("strategy", ["COMM_OPT", "MEM_OPT"])
def test_ranks_without_any_factor_gather_them_too(crew, strategy):
    expected = state_of_one_layer(strategy)
    for record in crew.run(state_of_one_layer, 4, strategy):
        assert record.keys() == expected.keys()
        for side in "AG":
            torch.testing.assert_close(record[side], expected[side], rtol=1e-12, atol=0)


@pytest.mark.parametrize("inverses", [True, False], ids=["whole", "without inverses"])
@pytest.mark.parametrize(
    "kfac", [{"gradient_worker_fraction": "MEM_OPT"}, {"colocate_factors": False}], ids=["mem", "apart"]
)
def test_ranks_without_any_factor_load_with_the_others(crew, kfac, inverses):
    expected = load_own_share(Settings(), inverses)
    for found in crew.run(load_own_share, 4, Settings(kfac=kfac), inverses):
        for gradient, known in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, known, rtol=1e-9, atol=1e-12)


def test_a_template_without_room_is_an_error(crew, tmp_path):
    settings = Settings()
    crew.run(save, 2, settings, "own", str(tmp_path))
    (said,) = crew.run(load_into_nothing, 1, settings, str(tmp_path))
    assert "state_dict must have the factors that rank 0 keeps, got none" in said
    assert "give it state_dict(gather=False)" in said


@pytest.mark.parametrize(
    ("wrong", "why"), [("layers", "missing ['1']"), ("shapes", "must have shape"), ("version", "got 1")]
)
def test_a_state_that_one_rank_cannot_take_is_taken_by_none(crew, wrong, why):
    (first, steps), (second, others) = crew.run(load_what_one_rank_cannot, 2, wrong)
    assert "of another rank does not fit" in first
    assert why in second
    assert steps == others == 1


@pytest.mark.parametrize("delay", [0.6, 0.9, 1.3])
def test_a_rank_killed_at_any_instant_leaves_the_last_checkpoint_readable(tmp_path, delay):
    members = Crew(2)
    settings = Settings()
    try:
        results = members.run(die_while_saving, 2, settings, str(tmp_path), delay, fails=True)
    finally:
        members.close()
    assert results[0] is None  # killed
    assert isinstance(results[1], str)  # said so, within the process group's timeout
    found = latest(tmp_path)
    if found is None:
        pytest.fail(
            "no checkpoint was complete before the kill: the delay is too short to show anything"
        )
    names = dcp.FileSystemReader(found).read_metadata().state_dict_metadata
    assert any(name.startswith("kfac.layers.0.A") for name in names)
    members = Crew(1)
    try:
        (steps,) = members.run(load_and_go_on_from, 1, settings, str(found))
    finally:
        members.close()
    assert steps == int(found.name.removeprefix("step"))


def load_and_go_on_from(settings: Settings, path: str) -> int:
    """Loads a checkpoint of any step and takes one more; returns the steps there were."""
    from torch_backend.checkpoint_jobs import go_on, make, state_of

    _, run, base, kfac = make(settings)
    state = state_of(run, base, kfac, "own")
    dcp.load(state, checkpoint_id=path)
    kfac.load_state_dict({"kfac": state["kfac"]})
    before = kfac.steps
    go_on(run, kfac, settings, before, before + 1)
    assert kfac.steps == before + 1
    return before
