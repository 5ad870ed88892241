"""What the ranks of a test do with checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from suite.torch import KFAC
from torch_backend.distributed_jobs import (
    Settings,
    backward,
    batches,
    network,
    parameters_of,
    share_of,
    world_and_rank,
    wrapped,
)

SAVED_AT, END = 4, 8


def make(settings: Settings) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, KFAC]:
    model = network(settings.dtype, settings.middle)
    run = wrapped(model, settings)
    base = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9)
    return model, run, base, KFAC(run, base, **{"damping": 0.03, **settings.kfac})


def go_on(run: nn.Module, kfac: KFAC, settings: Settings, first: int, last: int) -> None:
    for batch in batches(settings.dtype, last, settings.batch)[first:]:
        x, y = share_of(batch, settings)
        backward(run, x, y, settings)
        kfac.step()
        kfac.zero_grad()


def state_of(run: nn.Module, base: Any, kfac: KFAC, how: str) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(run)}
    if how == "optimizer":  # as torch's own functions see it
        return {**state, "optimizer": get_optimizer_state_dict(run, kfac)}
    return {
        **state,
        "optimizer": get_optimizer_state_dict(run, base),
        **kfac.state_dict(gather=False),
    }


def save(settings: Settings, how: str, path: str) -> int:
    _, run, base, kfac = make(settings)
    go_on(run, kfac, settings, 0, SAVED_AT)
    dcp.save(state_of(run, base, kfac, how), checkpoint_id=path)
    return sum(
        x.nbytes for r in kfac.state_dict(gather=False)["kfac"]["layers"].values() for x in r.values()
    )


def load_and_go_on(settings: Settings, how: str, path: str) -> tuple[list[torch.Tensor], int]:
    model, run, base, kfac = make(settings)
    state = state_of(run, base, kfac, how)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(run, state["model"])
    if how == "optimizer":
        set_optimizer_state_dict(run, kfac, state["optimizer"])
    else:
        set_optimizer_state_dict(run, base, state["optimizer"])
        kfac.load_state_dict({"kfac": state["kfac"]})
    steps = kfac.steps
    go_on(run, kfac, settings, SAVED_AT, END)
    return parameters_of(model), steps


def save_on_one(settings: Settings, path: str) -> None:
    """Plain torch.save on rank 0 of what all ranks gathered."""
    _, rank = world_and_rank()
    model, run, _, kfac = make(settings)
    go_on(run, kfac, settings, 0, SAVED_AT)
    state = kfac.state_dict()
    if rank == 0:
        torch.save({"model": model.state_dict(), "kfac": state}, path)


def load_file_and_go_on(settings: Settings, path: str) -> tuple[list[torch.Tensor], int]:
    model, run, _, kfac = make(settings)
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    kfac.load_state_dict(state["kfac"])
    steps = kfac.steps
    go_on(run, kfac, settings, SAVED_AT, END)
    return parameters_of(model), steps


def load_into_nothing(settings: Settings, path: str) -> str:
    """`state_dict()` of a KFAC that has taken no step has no room for factors."""
    _, _, _, kfac = make(settings)
    state = {"kfac": kfac.state_dict()["kfac"]}
    dcp.load(state, checkpoint_id=path)
    try:
        kfac.load_state_dict({"kfac": {**state["kfac"], "gathered": False}})
    except ValueError as error:
        return str(error)
    return "loaded"


def load_what_one_rank_cannot(wrong: str) -> tuple[str, int]:
    """What each rank says, and how many steps it is at after all."""
    _, rank = world_and_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    kfac = KFAC(model)
    model(torch.ones(4, 3)).sum().backward()
    kfac.step()
    record = dict(kfac.state_dict()["kfac"]) | {"steps": 5}
    if rank == 1:
        layers = dict(record["layers"])
        if wrong == "layers":
            layers["2"] = layers.pop("1")
        elif wrong == "shapes":
            layers["1"] = {**layers["1"], "A": layers["0"]["A"]}
        else:
            record["version"] = 1
        record["layers"] = layers
    said = ""
    try:
        kfac.load_state_dict({"kfac": record})
    except ValueError as error:
        said = str(error)
    return said, kfac.steps


def die_while_saving(settings: Settings, folder: str, delay: float) -> None:
    """Saves again and again, each time to a new folder, and is killed at some instant."""
    from distributed import save_atomically

    _, run, base, kfac = make(settings)
    _, rank = world_and_rank()
    if rank == 0:
        timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    end = time.monotonic() + 20
    number = 0
    while time.monotonic() < end:
        go_on(run, kfac, settings, number, number + 1)
        number += 1
        save_atomically(state_of(run, base, kfac, "own"), folder, number)


def state_of_one_layer(strategy: str) -> dict[str, torch.Tensor]:
    """More ranks than layers: some have nothing."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    kfac = KFAC(model, gradient_worker_fraction=strategy)
    for _ in range(2):
        model(torch.ones(4, 3, dtype=torch.float64)).square().mean().backward()
        kfac.step()
        kfac.zero_grad()
    return kfac.state_dict()["kfac"]["layers"][""]


def load_own_share(settings: Settings, include_inverses: bool) -> list[torch.Tensor]:
    """Each rank loads what it saved itself, also nothing, and goes on."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)  # the same on all ranks
    kfac = KFAC(model, damping=0.1, **settings.kfac)
    for load in (False, True):
        if load:
            state = kfac.state_dict(gather=False, include_inverses=include_inverses)
            kfac.load_state_dict(state)
        kfac.zero_grad()
        model(x).square().mean().backward()
        kfac.step()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
