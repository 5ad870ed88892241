"""Tensor-parallel linear layers: a block for each rank's part, the same as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from suite.torch import KFAC, Kron
from torch_backend.crew import Crew
from torch_backend.distributed_jobs import distance, quietly

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def crew():
    members = Crew(4)
    yield members
    members.close()


class Net(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 5, bias=bias)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(torch.tanh(self.up(x)))))


class InParts(nn.Module):
    """The same network with its two layers cut in half by hand: what block-diagonal factors mean."""

    def __init__(self) -> None:
        super().__init__()
        whole = Net()
        self.up = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(2))
        self.norm, self.head = whole.norm, whole.head
        self.double()
        with torch.no_grad():
            for i in range(2):
                rows = slice(4 * i, 4 * i + 4)
                self.up[i].weight.copy_(whole.up.weight[rows])
                self.up[i].bias.copy_(whole.up.bias[rows])
                self.down[i].weight.copy_(whole.down.weight[:, rows])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Copies of the input: halves that share an A would share the split of the damping, too.
        parts = [down(torch.tanh(up(x.clone()))) for up, down in zip(self.up, self.down, strict=True)]
        return self.head(self.norm(parts[0] + parts[1]))

    def whole(self) -> list[torch.Tensor]:
        up = [torch.cat([getattr(m, n) for m in self.up]) for n in ("weight", "bias")]
        down = torch.cat([m.weight for m in self.down], dim=1)
        return [*up, down, *self.norm.parameters(), *self.head.parameters()]


def train(
    model: nn.Module, kfac: KFAC, ranks: tuple[int, int], average: Any = None, bad: int = -1
) -> list[str]:
    said: list[str] = []
    generator = torch.Generator().manual_seed(3)
    for step in range(6):
        x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (24,), generator=generator)
        part = slice(ranks[1], None, ranks[0])
        F.cross_entropy(model(x[part]), y[part]).backward()
        if average is not None:
            average(model)
        if step == 2 and bad >= 0 and dist.get_rank() == bad:
            up: Any = model.up
            up.weight.grad.to_local()[0] = float("nan")
        said += quietly(kfac.step)[1]
        kfac.zero_grad()
    return said


def tensor_parallel(
    tp: int, fsdp: bool, settings: dict[str, Any], bias: bool = False, bad: int = -1
) -> tuple[list[torch.Tensor], str, list[str], tuple[int, int]]:
    dp = dist.get_world_size() // tp
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = Net(bias)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    group, average = None, None
    if fsdp:
        fully_shard(model, mesh=mesh["dp"])
    elif dp > 1:
        group = mesh["dp"].get_group()

        def average(model: nn.Module) -> None:
            for p in model.parameters():
                gradient: Any = p.grad
                here = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                dist.all_reduce(here, group=group)
                here /= dp

    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(model, sgd, damping=0.03, process_group=group, **settings)
    rank: int = mesh.get_local_rank("dp")
    said = train(model, kfac, (dp, rank), average, bad)
    found = []
    for p in model.parameters():
        whole: Any = quietly(p.full_tensor)[0] if hasattr(p, "full_tensor") else p
        found.append(whole.detach().clone())
    return found, str(kfac.routing()), said, (kfac.steps, kfac.skipped_steps)


def loss_parallel_sampled(fisher: str, picks: bool) -> list[torch.Tensor] | str:
    """A head whose logits stay split, as DTensors, up to the loss."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Net()
    split = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, {**split, "head": ColwiseParallel(use_local_output=False)})
    settings = {"output_of": lambda output: output.full_tensor()} if picks else {}
    kfac = sampled(model, fisher, **settings)
    try:
        with loss_parallel():
            train(model, kfac, (1, 0))
    except TypeError as error:
        return str(error)
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().clone() for p in found]


def sampled(model: nn.Module, fisher: str, **settings: Any) -> KFAC:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kind = {"fisher": fisher, "likelihood": "categorical", "skip_layers": ["head"]}
    return KFAC(model, sgd, damping=0.03, **kind, **settings)


@pytest.mark.parametrize("fisher", ["mc", "type-2"])
def test_a_sampled_fisher_wants_outputs_whole_and_says_so(crew, fisher):
    parts = InParts()
    train(parts, sampled(parts, fisher), (1, 0))
    for found in crew.run(loss_parallel_sampled, 2, fisher, True):
        assert distance(found, [p.detach() for p in parts.whole()]) < 1e-9
    for said in crew.run(loss_parallel_sampled, 2, fisher, False):
        assert "got a DTensor" in said
        assert "give output_of=lambda output: output.full_tensor()" in said


SETTINGS = {
    "eigen": {},
    "inverse": {"compute_method": "inverse"},
    "mem": {"gradient_worker_fraction": "MEM_OPT", "inv_update_steps": 2},
    "without kl_clip": {"kl_clip": None},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    ("world", "fsdp"), [(2, False), (4, False), (4, True)], ids=["alone", "with data parallel", "fsdp"]
)
def test_it_is_a_network_in_parts(crew, world, fsdp, name):
    settings = {k: v for k, v in SETTINGS[name].items() if k != "gradient_worker_fraction"}
    parts = InParts()
    sgd = torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9)
    train(parts, KFAC(parts, sgd, damping=0.03, **settings), (1, 0))
    for found, routing, said, _ in crew.run(tensor_parallel, world, 2, fsdp, SETTINGS[name]):
        assert distance(found, [p.detach() for p in parts.whole()]) < 1e-9
        assert "outputs split over ranks: G is block-diagonal" in routing
        assert "inputs split over ranks: A is block-diagonal" in routing
        assert not said


def test_a_bias_that_belongs_to_all_blocks_stays_one(crew):
    results = crew.run(tensor_parallel, 4, 2, True, {}, True)
    for found, routing, _, _ in results:
        assert "down.bias" in routing
        assert distance(found, results[0][0]) == 0


def with_spread_rows(spread: bool) -> tuple[list[torch.Tensor], str]:
    """A head that each rank has a copy of, and runs on a part of the rows."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, said = Net(), ""
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if spread:
        plan["down"] = RowwiseParallel(output_layouts=Shard(0))
        plan |= {name: SequenceParallel(sequence_dim=0) for name in ("norm", "head")}
    parallelize_module(model, mesh["tp"], plan)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def loss() -> torch.Tensor:
        y: Any = model(x)
        y = y.full_tensor() if hasattr(y, "full_tensor") else y
        return y.square().mean()

    if spread:
        refused = KFAC(model)
        with pytest.raises(RuntimeError, match=r"layer 'head' must see all rows .* skip_layers=") as e:
            loss()
        said = str(e.value)
        refused.detach()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, sgd, damping=0.1, skip_layers=["norm", "head"])
    for _ in range(4):
        kfac.zero_grad()
        loss().backward()
        quietly(kfac.step)
    whole: list[Any] = list(model.parameters())
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in whole], said


def test_rows_that_are_spread_over_copies_of_a_layer_are_an_error_and_may_be_left_out(crew):
    expected = crew.run(with_spread_rows, 2, False)[0][0]
    for found, said in crew.run(with_spread_rows, 2, True):
        assert distance(found, expected) < 1e-9
        assert "Shard(dim=0)" in said


def under_ddp(
    bias: bool = False, bad: int = -1
) -> tuple[dict[str, torch.Tensor], str, tuple[int, int], str]:
    """DDP over the other axis, which makes plain parameters of DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net(bias)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ddp = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])
    own = dict(model.named_parameters())  # it puts others into their places in every forward pass
    with pytest.raises(
        ValueError, match=r"parameters must be whole or DTensors, got .* fully_shard"
    ) as e:
        Kron(ddp.parameters())
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(ddp, sgd, damping=0.03)
    generator = torch.Generator().manual_seed(3)
    for step in range(6):
        x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
        part = slice(mesh.get_local_rank("dp"), None, 2)
        y = torch.randint(3, (24,), generator=generator)
        F.cross_entropy(ddp(x[part]), y[part]).backward()
        if step == 2 and bad == dist.get_rank():
            own["up.weight"].grad[0] = float("nan")  # type: ignore[index]
        quietly(kfac.step)
        kfac.zero_grad()
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        blocks = [torch.empty_like(own[name]) for _ in range(2)]
        dist.all_gather(blocks, own[name].detach().contiguous(), group=mesh["tp"].get_group())
        own[name] = nn.Parameter(torch.cat(blocks, dim))
    found = {name: p.detach().clone() for name, p in own.items()}
    return found, str(kfac.routing()), (kfac.steps, kfac.skipped_steps), str(e.value)


def test_ddp_over_tensor_parallelism_is_a_network_in_parts(crew):
    parts = InParts()
    sgd = torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9)
    train(parts, KFAC(parts, sgd, damping=0.03), (1, 0))
    for found, routing, steps, said in crew.run(under_ddp, 4):
        assert distance(list(found.values()), [p.detach() for p in parts.whole()]) < 1e-9
        assert "outputs split over ranks: G is block-diagonal" in routing
        assert steps == (6, 0)
        assert "got 3 that are blocks" in said
    for bad in (0, 3):
        results = crew.run(under_ddp, 4, True, bad)
        for found, _, steps, _ in results:
            assert steps == (5, 1)
            assert distance(list(found.values()), list(results[0][0].values())) == 0


@pytest.mark.parametrize("bad", [0, 3])
def test_a_block_that_is_not_finite_skips_the_step_on_all(crew, bad):
    for found, _, said, steps in crew.run(tensor_parallel, 4, 2, True, {}, False, bad):
        assert steps == (5, 1)
        assert any("step 2 was skipped" in text for text in said)
        assert all(bool(p.isfinite().all()) for p in found)


def test_a_mesh_with_one_tensor_parallel_rank_is_none(crew):
    whole = Net()
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    train(whole, KFAC(whole, sgd, damping=0.03), (1, 0))
    for found, *_ in crew.run(tensor_parallel, 2, 1, True, {}):
        assert distance(found, [p.detach() for p in whole.parameters()]) < 1e-9


def resumed(how: str, folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    """What training goes on to from a checkpoint, without one, and what another mesh says to it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def made(mesh: Any = mesh) -> tuple[nn.Module, KFAC]:
        model = Net()
        if "tp" in mesh.mesh_dim_names:
            layers = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], layers)
        fully_shard(model, mesh=mesh["dp"])
        return model, KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=0.03)

    ranks = 2, mesh.get_local_rank("dp")
    model, kfac = made()
    train(model, kfac, ranks)
    path = f"{folder}/state"
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    if how == "dcp":
        dcp.save(kfac.state_dict(gather=False), checkpoint_id=path)
    else:
        state = kfac.state_dict()
        if dist.get_rank() == 0:
            torch.save(state["kfac"], path)
    dist.barrier()
    other, again = made()
    other.load_state_dict(weights)
    if how == "dcp":
        state = again.state_dict(gather=False)
        dcp.load(state, checkpoint_id=path)
        again.load_state_dict(state)
        said = ""
    else:
        again.load_state_dict({**state, "kfac": torch.load(path, weights_only=True)})
        _, flat = made(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        try:
            flat.load_state_dict(state)
            said = "nothing"
        except ValueError as error:
            said = str(error)
    for goes_on in ((model, kfac), (other, again)):
        train(*goes_on, ranks)
    both = [[quietly(p.full_tensor)[0].detach() for p in m.parameters()] for m in (other, model)]
    return both[0], both[1], said


@pytest.mark.parametrize("how", ["torch.save", "dcp"])
def test_a_checkpoint_has_the_blocks_of_all_ranks(crew, how, tmp_path):
    """Saved by one rank, each has its own again; a mesh with other blocks is told so."""
    for found, expected, said in crew.run(resumed, 4, how, str(tmp_path)):
        assert distance(found, expected) == 0
        assert how == "dcp" or "layers missing ['down', 'up']" in said


def without_group() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    try:
        KFAC(model)
    except ValueError as error:
        return str(error)
    return ""


def test_who_has_other_data_must_be_said_where_the_mesh_does_not(crew):
    assert all("process_group must be given" in said for said in crew.run(without_group, 4))
