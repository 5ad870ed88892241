"""What the ranks of a test do: train one small model on their shares of the same batches."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from suite.torch import KFAC, AdaptiveKFAC, thin
from suite.torch.collectives import Ranks

STEPS, BATCH = 10, 24


@dataclass(frozen=True)
class Settings:
    """One way to train."""

    wrap: str = "ddp"  # 'none': gradients are averaged by hand
    dtype: torch.dtype = torch.float64
    kfac: dict[str, Any] = field(default_factory=dict)
    micro: int = 1  # batches a step
    middle: str = ""  # 'gated': layers that share inputs; 'experts': a matrix for some of the examples;
    # 'functions': weights that functions get
    held_back: bool = False  # whether fully_shard reduces gradients with the last of them only
    ddp: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    shares: tuple[int, ...] = ()  # examples of each rank; default: equal
    loss: str = "mean"  # 'global': each rank's is scaled so that their average is that of all;
    # 'slopes': with derivatives by the inputs
    steps: int = STEPS
    batch: int = BATCH


def device() -> torch.device:
    """Where this process trains: on its GPU if it is in a group of NCCL."""
    accelerated = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if accelerated else torch.device("cpu")


def with_exchanges(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` with all collectives, although this process is the only rank."""
    with mock.patch.object(Ranks, "shortcut", False):
        return function(*args)


def train_on_old_gloo(settings: Settings) -> dict[str, Any]:
    """`train`, where the backend has no reduce_scatter."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")

    with mock.patch.object(dist, "reduce_scatter", refused):
        return train(settings)


def train_with_rows(settings: Settings) -> dict[str, Any]:
    """`train`, where directions may come from rows whatever a layer's size."""
    with mock.patch.object(thin, "SMALLEST", 0):
        return train(settings)


class Gated(nn.Module):
    """Three layers that read the same input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * torch.sigmoid(self.b(x)) + self.c(x)


class Experts(nn.Module):
    """A stack of matrices, one for each example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = x[:, :3].argmax(1), torch.zeros_like(x)
        for number in range(3):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, F.linear(x[rows], self.stack[number]))
        return out


class Functions(nn.Module):
    """Weights of its own that have axes for heads, are in lists, or are used as their transpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        scale = 1 / width**0.5
        self.heads = nn.Parameter(scale * torch.randn(width, 2, 3))
        self.out = nn.Parameter(scale * torch.randn(2, 3, width))
        self.listed = nn.ParameterList(scale * torch.randn(width, width) for _ in range(2))
        self.biases = nn.ParameterList(0.1 * torch.randn(width) for _ in range(2))
        self.inner, self.gain = nn.Linear(width, 7), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = torch.tanh(torch.einsum("...d,dhk->...hk", x, self.heads))
        x = torch.tanh(torch.einsum("nhk,hkd->nd", heads, self.out)) * self.gain
        for weight, bias in zip(self.listed, self.biases, strict=True):
            x = torch.tanh(F.linear(x, weight, bias))
        return F.linear(torch.tanh(self.inner(x)), self.inner.weight.t())


def network(dtype: torch.dtype = torch.float64, middle: str = "") -> nn.Module:
    """Convolution, linear and normalization layers whose sides no world divides."""
    torch.manual_seed(0)
    kinds = {"gated": Gated, "experts": Experts, "functions": Functions}
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(48, 10),
        nn.LayerNorm(10),
        nn.Tanh(),
        kinds[middle](10) if middle else nn.Linear(10, 10, bias=False),
        nn.Tanh(),
        nn.Linear(10, 3),
    ).to(device(), dtype)


def batches(dtype: torch.dtype, steps: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 1, 4, 4, generator=generator, dtype=dtype).to(device()),
            torch.randint(3, (size,), generator=generator).to(device()),
        )
        for _ in range(steps)
    ]


def world_and_rank() -> tuple[int, int]:
    if not dist.is_initialized():
        return 1, 0
    return dist.get_world_size(), dist.get_rank()


def wrapped(model: nn.Module, settings: Settings) -> nn.Module:
    """The model as its ranks train it."""
    if settings.wrap == "ddp" and dist.is_initialized():
        return DistributedDataParallel(model, **settings.ddp)
    if settings.wrap in ("fsdp", "hsdp") and dist.is_initialized():
        world = dist.get_world_size()
        shape, names = ((2, world // 2), ("r", "s")) if settings.wrap == "hsdp" else ((world,), ("s",))
        mesh = init_device_mesh(device().type, shape, mesh_dim_names=names)
        options = {**settings.fsdp, "mesh": mesh}
        if options.pop("mixed", False):
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model.children():
            if list(layer.parameters()):
                fully_shard(layer, **options)
        fully_shard(model, **options)
    return model


def share_of(batch: tuple[torch.Tensor, torch.Tensor], settings: Settings) -> Any:
    """This rank's examples."""
    world, rank = world_and_rank()
    if not settings.shares or world == 1:
        return [x[rank::world] for x in batch]
    start = sum(settings.shares[:rank])
    return [x[start : start + settings.shares[rank]] for x in batch]


def train(settings: Settings) -> dict[str, Any]:
    """Train; returns what every rank must agree on, and what it measured."""
    world, _ = world_and_rank()
    model = network(settings.dtype, settings.middle)
    run = wrapped(model, settings)
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(run, optimizer, **{"damping": 0.03, **settings.kfac})
    losses = []
    for batch in batches(settings.dtype, settings.steps, settings.batch):
        x, y = share_of(batch, settings)
        losses.append(backward(run, x, y, settings))
        if settings.wrap == "none" and world > 1:
            average_gradients(model)
        kfac.step()
        kfac.zero_grad()
    return {"parameters": parameters_of(model), **report(kfac), "losses": losses}


def measure(settings: Settings) -> tuple[dict[str, Any], dict[str, float], bool]:
    """Metrics that one rank asks for after the other; the ratios that it sees; whether any was sent."""
    _, rank = world_and_rank()
    model = network(settings.dtype)
    run = wrapped(model, settings)
    kfac = KFAC(run, damping=0.03, **settings.kfac)
    (batch,) = batches(settings.dtype, 1, settings.batch)
    backward(run, *share_of(batch, settings), settings)
    kfac.step()
    before = dict(kfac._engine.ranks.collectives)
    found = kfac.metrics()["layers"] if rank == 1 or not dist.is_initialized() else {}
    if dist.is_initialized():
        dist.barrier()
    found = found or kfac.metrics()["layers"]
    weights = {name: getattr(model, name).weight for name in found if name.isdigit()}
    ratios = {name: norm_of(w.grad) / norm_of(w.detach()) for name, w in weights.items()}
    return found, ratios, before != kfac._engine.ranks.collectives


def norm_of(x: Any) -> float:
    """Of the whole, which all ranks are asked for."""
    return float((x.full_tensor() if hasattr(x, "full_tensor") else x).norm())


def train_adaptively(settings: Settings) -> dict[str, Any]:
    """The same with AdaptiveKFAC."""
    model = network(settings.dtype, settings.middle)
    run = wrapped(model, settings)
    optimizer = AdaptiveKFAC(KFAC(run, **{"damping": 0.1, **settings.kfac}))
    losses = []
    for batch in batches(settings.dtype, settings.steps, settings.batch):
        x, y = share_of(batch, settings)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
            if settings.loss != "slopes":
                outputs = run(x)
                return F.cross_entropy(outputs, y), outputs
            points = x.clone().requires_grad_()
            outputs = run(points)
            (slopes,) = torch.autograd.grad(outputs.sum(), points, create_graph=True)
            return F.cross_entropy(outputs, y) + slopes.square().mean(), (outputs, slopes)

        losses.append(float(optimizer.step(closure)))
    counts = optimizer.rejected_steps, optimizer.skipped_steps, optimizer.damping
    return {"parameters": parameters_of(model), "losses": losses, "counts": counts}


def backward(run: nn.Module, x: torch.Tensor, y: torch.Tensor, settings: Settings) -> float:
    if len(x) == 0 and not isinstance(run, FSDPModule):  # a rank without data; fully_shard waits for it
        return 0.0
    parts = list(zip(x.chunk(settings.micro), y.chunk(settings.micro), strict=True))
    world, _ = world_and_rank()
    total = 0.0
    for number, (a, b) in enumerate(parts):
        last = number == len(parts) - 1
        hold = (
            isinstance(run, DistributedDataParallel)
            and not last
            and not settings.ddp.get("static_graph")
        )
        if settings.held_back and isinstance(run, FSDPModule):
            run.set_requires_gradient_sync(last)
        with run.no_sync() if hold else contextlib.nullcontext():  # type: ignore[operator]
            a = a.clone().requires_grad_(settings.loss == "slopes")
            output = run(a)
            if settings.loss == "slopes":
                (slopes,) = torch.autograd.grad(output.sum(), a, create_graph=True)
                losses = F.cross_entropy(output, b, reduction="none") + slopes.square().sum((1, 2, 3))
                share = world / settings.batch if settings.shares else 1 / len(a) / len(parts)
                loss = losses.sum() * share
            elif settings.loss == "global":
                loss = F.cross_entropy(output, b, reduction="sum") * world / settings.batch
            elif settings.loss == "sum":
                loss = F.cross_entropy(output, b, reduction="sum") * world
            else:
                loss = F.cross_entropy(output, b) / len(parts)
            loss.backward()
            total += float(loss.detach())
    return total


def average_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """Whole parameters, on every rank."""
    found = []
    for p in model.parameters():
        whole: Any = p.full_tensor() if hasattr(p, "full_tensor") else p
        found.append(whole.detach().cpu().clone())
    return found


def report(kfac: KFAC) -> dict[str, Any]:
    ranks = kfac._engine.ranks
    return {
        "bytes": dict(ranks.bytes_sent),
        "collectives": dict(ranks.collectives),
        "memory": kfac.memory_usage(),
        "plan": kfac.memory_plan(),
        "steps": (kfac.steps, kfac.skipped_steps),
    }


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Largest relative difference of two lists of parameters."""
    return max(
        float((x.double() - y.double()).norm() / y.double().norm()) for x, y in zip(a, b, strict=True)
    )


def quietly(function: Any, *args: Any) -> tuple[Any, list[str]]:
    """The result, and the text of the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = function(*args)
    return result, [str(w.message) for w in said]


# ---- jobs with a mishap --------------------------------------------------------------------------


class Branches(nn.Module):
    """Layers that only some batches reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)
        self.double()

    def forward(self, x: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        h = torch.tanh(self.left(h)) if left else h
        return self.head(torch.tanh(self.right(h)) if right else h)


def train_branches(kfac_settings: dict[str, Any], by_rank: bool) -> list[torch.Tensor]:
    """Half of the batch goes left, half right: on ranks of their own, or in one process."""
    world, rank = world_and_rank()
    model = Branches()
    run: nn.Module = model
    if world > 1:
        run = DistributedDataParallel(model, find_unused_parameters=True)
    kfac = KFAC(run, torch.optim.SGD(run.parameters(), lr=0.1), damping=0.03, **kfac_settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (24,), generator=generator)
        halves = [(x[:12], y[:12], True, False), (x[12:], y[12:], False, True)]
        for number, (a, b, left, right) in enumerate(halves):
            if world == 1:
                (F.cross_entropy(run(a, left, right), b) / 2).backward()
            elif rank % 2 == number:
                part = slice(rank // 2, None, world // 2)
                F.cross_entropy(run(a[part], left, right), b[part]).backward()
        kfac.step()
        kfac.zero_grad()
    return parameters_of(model)


class Spectrum(nn.Module):
    """A spectral convolution, whose weight is complex."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(0.3 * torch.randn(3, 5, 3, dtype=torch.complex128))
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.einsum("nik,iok->nok", torch.fft.rfft(x)[..., :3], self.weight)
        return self.head(torch.tanh(torch.fft.irfft(f, n=x.shape[-1])).mean(-1))


def train_spectrum(kfac_settings: dict[str, Any]) -> list[torch.Tensor]:
    world, rank = world_and_rank()
    model = Spectrum()
    run: nn.Module = DistributedDataParallel(model) if world > 1 else model
    kfac = KFAC(run, torch.optim.SGD(run.parameters(), lr=0.1), damping=0.03, **kfac_settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(24, 3, 8, generator=generator, dtype=torch.float64)[rank::world]
        y = torch.randint(3, (24,), generator=generator)[rank::world]
        F.cross_entropy(run(x), y).backward()
        kfac.step()
        kfac.zero_grad()
    return [torch.view_as_real(p) if p.is_complex() else p for p in parameters_of(model)]


def train_in_turn(kfac_settings: dict[str, Any]) -> tuple[list[torch.Tensor], list[bool]]:
    """Left and right are trained in turn, gradients being zeros meanwhile; and who wants statistics."""
    world, rank = world_and_rank()
    model = Branches()
    run: nn.Module = model
    if world > 1:
        run = DistributedDataParallel(model, find_unused_parameters=True)
    sgd = torch.optim.SGD(run.parameters(), lr=0.1)
    kfac = KFAC(run, sgd, damping=0.03, factor_update_steps=4, inv_update_steps=4, **kfac_settings)
    generator, wanted = torch.Generator().manual_seed(1), []
    for step in range(14):
        x = torch.randn(24, 6, generator=generator, dtype=torch.float64)[rank::world]
        y = torch.randint(3, (24,), generator=generator)[rank::world]
        F.cross_entropy(run(x, step % 2 == 0, step % 2 == 1), y).backward()
        kfac.step()
        kfac.zero_grad(set_to_none=False)
        wanted.append(kfac._engine.capture.clock.wanted)
    return parameters_of(model), wanted


def train_with_nan(settings: Settings, bad_rank: int, bad_step: int, where: str) -> dict[str, Any]:
    """One rank meets a number that is not finite in one step; returns what changed in that step."""
    _, rank = world_and_rank()
    model = network(settings.dtype)
    run = wrapped(model, settings)
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(run, optimizer, **{"damping": 0.03, **settings.kfac})
    changed, said = False, []
    for number, batch in enumerate(batches(settings.dtype, settings.steps, settings.batch)):
        x, y = share_of(batch, settings)
        if number == bad_step and rank == bad_rank and where == "input":
            x = x * float("nan")
        backward(run, x, y, settings)
        if number == bad_step and where == "gradient" and rank == bad_rank:
            gradient: Any = next(p for p in model.parameters() if _numel(p.grad))
            _local(gradient.grad).view(-1)[0] = float("inf")
        before = parameters_of(model), kfac.state_dict()["kfac"]["layers"]
        _, text = quietly(kfac.step)
        if number == bad_step:
            said = text
            after = parameters_of(model), kfac.state_dict()["kfac"]["layers"]
            changed = not _same(before, after)
        kfac.zero_grad()
    return {"parameters": parameters_of(model), "changed": changed, "said": said, **report(kfac)}


def _local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def _numel(x: Any) -> int:
    return 0 if x is None else int(_local(x).numel())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return all(_same(x, y) for x, y in zip(a, b, strict=True))


def mishap(kind: str, settings: Settings) -> float:
    """Rank 1 dies, stalls or stops taking steps after two of them; the others go on."""
    _, rank = world_and_rank()
    started = time.monotonic()
    model = network(settings.dtype)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=0.03, **settings.kfac)
    for number, batch in enumerate(batches(settings.dtype, 5, settings.batch)):
        x, y = share_of(batch, settings)
        backward(model, x, y, settings)
        if number < 2:
            average_gradients(model)
        if number == 2 and rank == 1:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "stalled":
                time.sleep(30)
            return time.monotonic() - started
        kfac.step()
        kfac.zero_grad()
    return time.monotonic() - started


def train_in_pairs(kfac_settings: dict[str, Any]) -> list[torch.Tensor]:
    """Ranks 0 and 2, and 1 and 3, train models of their own: each pair is a group."""
    _, rank = world_and_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + rank % 2)
    run = DistributedDataParallel(model, process_group=group)
    sgd = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(run, sgd, damping=0.03, process_group=group, **kfac_settings)
    for x, y in batches(torch.float64, STEPS, BATCH):
        F.cross_entropy(run(x[rank // 2 :: 2]), y[rank // 2 :: 2]).backward()
        kfac.step()
        kfac.zero_grad()
    return parameters_of(model)


def gradient_storage(settings: Settings) -> bool:
    """Whether directions are in the storage that the gradients had."""
    model = network(settings.dtype)
    run = wrapped(model, settings)
    kfac = KFAC(run, damping=0.03, **settings.kfac)
    same = []
    for batch in batches(settings.dtype, 2, settings.batch):
        x, y = share_of(batch, settings)
        backward(run, x, y, settings)
        before = [_local(p.grad).data_ptr() for p in model.parameters()]
        kfac.step()
        same.append(before == [_local(p.grad).data_ptr() for p in model.parameters()])
        run.zero_grad(set_to_none=False)
    return all(same)


class Positions(nn.Module):
    """A parameter that its module adds by itself, and three products of one input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position = nn.Parameter(torch.randn(7))
        self.q, self.k, self.v = (nn.Linear(7, 5) for _ in range(3))
        self.head = nn.Linear(5, 3)
        self.to(device(), torch.float64)

    def forward(self, x: torch.Tensor, apart: bool = False) -> torch.Tensor:
        x = x + self.position
        return self.head(torch.tanh(self.q(x)) * self.k(x.clone() if apart else x) + self.v(x))


def train_positions(settings: Settings, apart_from: int = 99) -> list[torch.Tensor]:
    world, rank = world_and_rank()
    model = Positions()
    run: nn.Module = model
    if dist.is_initialized() and settings.wrap == "ddp":
        run = DistributedDataParallel(model)
    elif dist.is_initialized():
        for layer in (model.q, model.head):
            fully_shard(layer)
        fully_shard(model)
    sgd = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(run, sgd, damping=0.03, **settings.kfac)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        x = torch.randn(24, 7, generator=generator, dtype=torch.float64).to(device())
        y = torch.randint(3, (24,), generator=generator).to(device())
        F.cross_entropy(run(x[rank::world], step >= apart_from), y[rank::world]).backward()
        kfac.step()
        kfac.zero_grad()
    return parameters_of(model)


def whole_between_micro_batches(settings: Settings) -> list[bool]:
    """By parameter, whether it still is whole after a pass that should keep it so."""
    model = network(settings.dtype)
    run: Any = wrapped(model, settings)
    kfac = KFAC(run, damping=0.03, **settings.kfac)
    run.set_reshard_after_backward(False)
    x, y = share_of(batches(settings.dtype, 1, settings.batch)[0], settings)
    backward(run, x, y, settings)
    found = [not hasattr(p, "full_tensor") for p in model.parameters()]
    kfac.detach()
    return found


def order_of_events(settings: Settings) -> list[str]:
    """What happens in the third step: computations and collectives, as they begin."""
    events: list[str] = []
    model = network(settings.dtype)
    run = wrapped(model, settings)
    kfac = KFAC(run, damping=0.03, **settings.kfac)

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            events.append(what)
            return function(*args, **kwargs)

        return noting

    for number, batch in enumerate(batches(settings.dtype, 3, settings.batch)):
        x, y = share_of(batch, settings)
        backward(run, x, y, settings)
        if number == 2:
            factors = kfac._engine.factors
            patches = [
                mock.patch.object(factors, "_refreshed", noted("inverse", factors._refreshed)),
                mock.patch.object(factors, "directions", noted("direction", factors.directions)),
                mock.patch.object(dist, "all_to_all_single", noted("leaves", dist.all_to_all_single)),
                mock.patch.object(dist, "broadcast", noted("leaves", dist.broadcast)),
            ]
            with contextlib.ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(patch)
                kfac.step()
        else:
            kfac.step()
        kfac.zero_grad()
    return events


def other_model_on_one_rank() -> str:
    _, rank = world_and_rank()
    model = nn.Linear(3, 2 + rank)
    try:
        KFAC(model)
    except ValueError as error:
        return str(error)
    return ""


def default_groups() -> tuple[int, int, int]:
    """The worlds of K-FAC where DDP has half of the ranks, of K-FAC and Kron where a mesh does."""
    from suite.torch import Kron

    _, rank = world_and_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(network(), process_group=halves[rank // 2])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    model = network()
    fully_shard(model, mesh=mesh["data"])
    kron = Kron(model.parameters())
    return KFAC(ddp)._engine.ranks.world, KFAC(model)._engine.ranks.world, kron._ranks.world


def group_timeouts() -> set[float]:
    kfac = KFAC(network(), gradient_worker_fraction=0.5)
    device = torch.device("cpu")
    groups: list[Any] = [g for g in kfac._engine.ranks._groups.values() if g is not None]
    assert len(groups) == 2
    return {g._get_backend(device).options._timeout.total_seconds() for g in groups}


class Seldom(nn.Module):
    """A layer that runs when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.seldom, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.asked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.seldom(x)) if self.asked else x)


def treatments(settings: dict[str, Any]) -> list[dict[str, str]]:
    """What the routing report says before and after a layer first runs, in a copy that resumes, too."""
    torch.manual_seed(0)
    model, found = Seldom(), []
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    for model.asked in (False, True, False):
        kfac.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        average_gradients(model)
        kfac.step()
        found.append({route.parameter: route.treatment for route in kfac.routing()})
        again = Seldom()
        resumed = KFAC(again, torch.optim.SGD(again.parameters(), lr=0.1), **settings)
        resumed.load_state_dict(kfac.state_dict())
        again(torch.randn(8, 4)).square().mean().backward()
        average_gradients(again)
        resumed.step()
        found.append({route.parameter: route.treatment for route in resumed.routing()})
    return found


def copies_with_a_group() -> bool:
    """Whether a copy of a KFAC with a group of its own takes the same step."""
    import copy

    group = dist.new_group([0, 1])
    model = network()
    kfac = KFAC(model, process_group=group, gradient_worker_fraction="MEM_OPT")
    for x, y in batches(torch.float64, 2, 8):
        backward(model, x, y, Settings())
        average_gradients(model)
        kfac.step()
        kfac.zero_grad()
    again, kfac_again = copy.deepcopy((model, kfac))
    ends = []
    for net, optimizer in ((model, kfac), (again, kfac_again)):
        (x, y) = batches(torch.float64, 3, 8)[-1]
        backward(net, x, y, Settings())
        average_gradients(net)
        optimizer.step()
        ends.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def dies_while_preconditioning(settings: Settings) -> None:
    """Rank 1 is killed after it has agreed to the step."""
    _, rank = world_and_rank()
    model = network(settings.dtype)
    kfac = KFAC(model, damping=0.03, **settings.kfac)
    x, y = share_of(batches(settings.dtype, 1, settings.batch)[0], settings)
    backward(model, x, y, settings)
    average_gradients(model)
    if rank == 1:
        kfac._engine.precondition = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    kfac.step()
