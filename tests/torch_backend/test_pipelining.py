"""Stages of torch.distributed.pipelining, each with a K-FAC of its own: the step of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from suite.torch import KFAC
from torch_backend.crew import Crew
from torch_backend.distributed_jobs import distance

pytestmark = pytest.mark.slow

MICRO = 4
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


@pytest.fixture(scope="module")
def crew():
    members = Crew(2)
    yield members
    members.close()


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 6)) for _ in "ab"]
    return [part.double() for part in parts]


def kfac_of(stage: nn.Module, **settings: Any) -> KFAC:
    sgd = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    return KFAC(stage, sgd, damping=0.03, kl_clip=1e-3, **settings)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(16, 6, generator=generator, dtype=torch.float64),
            torch.randint(6, (16,), generator=generator),
        )
        for _ in range(4)
    ]


def in_one_process() -> list[list[torch.Tensor]]:
    parts = stages()
    optimizers = [kfac_of(part) for part in parts]
    for x, y in batches():
        F.cross_entropy(nn.Sequential(*parts)(x), y).backward()
        for kfac in optimizers:
            kfac.step()
            kfac.zero_grad()
    return [[p.detach() for p in part.parameters()] for part in parts]


def in_a_pipeline(schedule: str, divided: bool) -> list[torch.Tensor]:
    """Either the loss is divided by the number of micro-batches, or the schedule divides gradients."""
    rank, groups = dist.get_rank(), [dist.new_group([0]), dist.new_group([1])]
    own = stages()[rank]
    settings: dict[str, Any] = {} if divided else {"grad_scaler": lambda: MICRO}
    kfac = kfac_of(own, process_group=groups[rank], **settings)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) / (MICRO if divided else 1)

    stage = PipelineStage(own, rank, 2, torch.device("cpu"))
    run = SCHEDULES[schedule](stage, MICRO, loss_fn=loss, scale_grads=not divided)
    for x, y in batches():
        run.step(x) if rank == 0 else run.step(target=y)
        kfac.step()
        kfac.zero_grad()
    return [p.detach().clone() for p in own.parameters()]


@pytest.mark.parametrize("divided", [True, False], ids=["divided loss", "divided gradients"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_take_the_step_of_one_process(crew, schedule, divided):
    for found, expected in zip(
        crew.run(in_a_pipeline, 2, schedule, divided), in_one_process(), strict=True
    ):
        assert distance(found, expected) < 1e-9
