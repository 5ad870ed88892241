"""One rank with a process group and all of its collectives: over gloo, and over NCCL where a GPU is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_backend.checkpoint_jobs import load_and_go_on, save
from torch_backend.crew import Crew
from torch_backend.distributed_jobs import (
    Settings,
    distance,
    gradient_storage,
    train,
    train_positions,
    train_with_nan,
    train_with_rows,
    with_exchanges,
)
from torch_backend.test_distributed import METHODS, STRATEGIES
from torch_backend.test_distributed import alone as alone_kfac
from torch_backend.test_kron_distributed import alone as alone_kron
from torch_backend.test_kron_distributed import train_kron

pytestmark = pytest.mark.slow

NCCL = pytest.param(
    "nccl",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
)


@pytest.fixture(scope="module", params=["gloo", NCCL])
def crew(request):
    members = Crew(1, request.param)
    yield members
    members.close()


def run(crew: Crew, *job: Any) -> Any:
    (result,) = crew.run(with_exchanges, 1, *job)
    return result


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_kfac_follows_the_trajectory_without_a_group(crew, wrap, strategy, method):
    kfac = {**METHODS[method], "gradient_worker_fraction": strategy}
    settings = Settings(wrap, kfac=kfac, batch=240 if method == "ekfac" else 24)
    result = run(crew, train, settings)
    assert distance(result["parameters"], alone_kfac(settings)) < 1e-9
    assert result["steps"] == (settings.steps, 0)
    assert result["collectives"]["K-FAC's agreement on the step"] == settings.steps
    assert result["collectives"]["K-FAC's sum of statistics"] == settings.steps


VARIANTS = {
    "one by one": Settings(kfac={"allreduce_bucket_cap_mb": 0}),
    "small buckets": Settings("fsdp", kfac={"allreduce_bucket_cap_mb": 0.001}),
    "symmetric": Settings(kfac={"symmetry_aware": True, "compute_method": "inverse"}),
    "stale": Settings("fsdp", kfac={"inv_update_steps": 3, "factor_update_steps": 2}),
    "accumulation": Settings("ddp", micro=2),
    "resharded": Settings("fsdp", fsdp={"reshard_after_forward": True}),
    "bucket view": Settings(ddp={"gradient_as_bucket_view": True}),
    "kl_clip": Settings(kfac={"kl_clip": 1e-3}),
    "type-2": Settings("fsdp", kfac={"fisher": "type-2", "likelihood": "categorical"}),
    "sum": Settings(kfac={"loss_reduction": "sum", "damping": 0.3}, loss="sum"),
    "single precision": Settings("fsdp", torch.float32),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_so_does_every_variant(crew, name):
    settings = VARIANTS[name]
    within = 1e-9 if settings.dtype == torch.float64 else 1e-5
    assert distance(run(crew, train, settings)["parameters"], alone_kfac(settings)) < within


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_free_parameters_and_shared_inputs(crew, wrap):
    settings = Settings(wrap)
    assert distance(run(crew, train_positions, settings), train_positions(settings)) < 1e-9


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_few_rows(crew, wrap):
    settings = Settings(wrap, kfac={"compute_method": "inverse"}, batch=4)
    (result,) = crew.run(train_with_rows, 1, settings)
    assert distance(result["parameters"], alone_kfac(settings)) < 1e-9


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_gradients_keep_their_storage(crew, wrap):
    assert run(crew, gradient_storage, Settings(wrap))


@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_number_that_is_not_finite_skips_the_step(crew, wrap, where):
    result = run(crew, train_with_nan, Settings(wrap), 0, 4, where)
    assert not result["changed"]
    assert result["steps"] == (9, 1)
    assert all(p.isfinite().all() for p in result["parameters"])


@pytest.mark.parametrize("distributed", ["replicate", "shard"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_kron_follows_the_trajectory_without_a_group(crew, wrap, distributed):
    settings, kron = Settings(wrap), {"distributed": distributed}
    result = run(crew, train_kron, settings, kron)
    assert distance(result["parameters"], alone_kron(settings, kron)) < 1e-9
    assert result["collectives"]["Kron's agreement on the step"] == settings.steps


@pytest.mark.parametrize("how", ["own", "optimizer"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_checkpoints_continue_the_trajectory(crew, tmp_path, wrap, how):
    settings = Settings(wrap, kfac={"inv_update_steps": 3}, steps=8)
    run(crew, save, settings, how, str(tmp_path))
    parameters, steps = run(crew, load_and_go_on, settings, how, str(tmp_path))
    assert steps == 4
    assert distance(parameters, alone_kfac(settings)) < 1e-9
