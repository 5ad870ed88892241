"""Which ranks train together, and what is said where that is not so."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from suite.torch import KFAC, DenseNewton, Kron
from torch_backend.crew import Crew
from torch_backend.distributed_jobs import distance, parameters_of, quietly

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def crew():
    members = Crew(4)
    yield members
    members.close()


class Net(nn.Module):
    """Two layers that share an input, and one that may be a rank's own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)) * self.second(x))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def train(run: nn.Module, optimizer: Any, part: slice, seed: int = 0, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
        run(x[part]).square().mean(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def kfac_of(model: nn.Module, run: nn.Module, **settings: Any) -> KFAC:
    return KFAC(model, torch.optim.SGD(run.parameters(), lr=0.1), damping=0.1, **settings)


def said_by(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


# ---- two trainings side by side -------------------------------------------------------------------


def two_trainings(kind: str) -> list[torch.Tensor] | str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own, place = divmod(dist.get_rank(), 2)
    model = Net(own)
    run = DDP(model, process_group=groups[own])
    if kind == "kron":
        optimizer: Any = Kron(run.parameters(), lr=0.01, distributed="shard")
    else:
        optimizer = kfac_of(Around(run) if kind == "around" else model, run)
    said = said_by(train, run, optimizer, slice(place, None, 2), own)
    return said or [p.detach().clone() for p in model.parameters()]


def test_the_group_of_ddp_inside_of_a_model(crew):
    for rank, found in enumerate(crew.run(two_trainings, 4, "around")):
        model = Net(rank // 2)
        train(model, kfac_of(model, model), slice(None), rank // 2)
        assert distance(found, [p.detach() for p in model.parameters()]) < 1e-12


@pytest.mark.parametrize("kind", ["kfac", "kron"])
def test_who_takes_another_training_for_its_own_is_told(crew, kind):
    for said in crew.run(two_trainings, 4, kind):
        assert "needs the same parameters on all its ranks" in said
        assert "give process_group=" in said


# ---- experts and meshes ---------------------------------------------------------------------------


def own_head(skip: bool) -> list[torch.Tensor] | str:
    model = Net()
    rank = dist.get_rank()
    with torch.no_grad():
        model.head.weight.mul_(1 + rank)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["head.weight", "head.bias"])
    run = DDP(model)
    kfac = kfac_of(run, run, kl_clip=None, skip_layers=["head"] if skip else [])
    said = said_by(train, run, kfac, slice(rank, None, 2))
    return said or [p.detach().clone() for p in (*model.first.parameters(), *model.second.parameters())]


def test_an_expert_of_one_rank_is_no_copy_of_anothers(crew):
    for said in crew.run(own_head, 2, False):
        assert "['head, weight']" in said
        assert "or skip_layers=" in said
    skipped = crew.run(own_head, 2, True)
    assert distance(*skipped) == 0


class Parts(nn.Module):
    """A layer on all ranks, and an expert that two of them share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.expert = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.tanh(self.dense(x)))


def parts_in_ddp(wraps_dense: bool) -> tuple[int, str]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Parts()
    if wraps_dense:
        model.dense = DDP(model.dense)
    model.expert = DDP(model.expert, process_group=groups[dist.get_rank() // 2])
    world = kfac_of(model, model, skip_layers=["expert"])._engine.ranks.world
    return world, said_by(kfac_of, copy_of(model), model)


def copy_of(model: nn.Module) -> nn.Module:
    """Modules anew, DDP around the same."""
    again = Parts()
    for name in ("dense", "expert"):
        part = getattr(model, name)
        if isinstance(part, DDP):
            setattr(again, name, DDP(getattr(again, name), process_group=part.process_group))
    return again


@pytest.mark.parametrize("wraps_dense", [True, False])
def test_the_group_is_that_of_the_layers_that_are_covered(crew, wraps_dense):
    for world, of_both in crew.run(parts_in_ddp, 4, wraps_dense):
        assert world == 4
        assert ("layers are in several DistributedDataParallel" in of_both) is wraps_dense


def frozen_of_each() -> list[str]:
    """What no rank moves may differ; nor is FSDP1 refused where it leaves parameters as they are."""
    rank, model = dist.get_rank(), Net()
    with torch.no_grad():
        model.head.requires_grad_(False).weight.mul_(1 + rank)
    kron = Kron(model.parameters(), lr=0.01, distributed="shard")
    run = DDP(Net())
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    found = [said_by(kron.step), said_by(train, run, kfac_of(run, run), slice(rank, None, 2))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        no_shard = FullyShardedDataParallel(
            Net(),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        return [*found, said_by(KFAC, no_shard), said_by(Kron, no_shard.parameters())]


def test_what_does_no_harm_is_no_error(crew):
    assert crew.run(frozen_of_each, 2) == [[""] * 4] * 2


def meshes_of_experts() -> tuple[str, int, str, str]:
    """Dense layers sharded over four ranks, stacked experts over two, of which each rank has half."""
    model = Net()
    model.experts = nn.Parameter(torch.ones(4, 6, 6, dtype=torch.float64))
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_mod_ep", "ep"))
    held = nn.Module()
    held.weight = nn.Parameter(distribute_tensor(model.experts.detach(), sparse["ep"], [Shard(0)]))
    model.experts = None
    model.held = held
    fully_shard(held, mesh=sparse["dp_mod_ep"], shard_placement_fn=lambda p: Shard(1))
    fully_shard(model, mesh=dense)
    world = kfac_of(model, model, skip_layers=["held"])._engine.ranks.world
    split = Net()
    parallelize_module(split, sparse["ep"], {"first": ColwiseParallel()})
    wide = said_by(lambda: kfac_of(split, split, process_group=dist.group.WORLD))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    apart = [
        nn.Parameter(distribute_tensor(torch.ones(4, 4), other[axis], [Shard(0)])) for axis in ("a", "b")
    ]
    small = Net()
    fully_shard(small.first, mesh=other["a"])
    fully_shard(small.head, mesh=other["b"])
    return said_by(kfac_of, small, small), world, said_by(Kron, apart), wide


def test_layers_over_several_meshes(crew):
    for of_layers, world, of_kron, wide in crew.run(meshes_of_experts, 4):
        assert "layers must be sharded over the same ranks" in of_layers
        assert world == 4
        assert "process_group must be given" in of_kron
        assert "process_group must have ranks with the same tensor-parallel blocks" in wide


def flattened(use_orig_params: bool) -> list[str]:
    run = FullyShardedDataParallel(Net(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    return [said_by(KFAC, run), said_by(Kron, run.parameters())]


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_flat_parameters_are_refused(crew, use_orig_params):
    for said in crew.run(flattened, 2, use_orig_params):
        assert all("use fully_shard" in text for text in said)


def sharded_after_it() -> str:
    model = Net()
    kfac = kfac_of(model, model)
    fully_shard(model)
    return said_by(train, model, kfac, slice(dist.get_rank(), None, 2))


def test_a_model_that_is_sharded_after_kfac_is_made_is_an_error_that_says_so(crew):
    for said in crew.run(sharded_after_it, 2):
        assert "got others: 'first', 'second', 'head'" in said
        assert "After replacing parameters, as fully_shard" in said


def inside_of_join() -> tuple[str, int]:
    model = Net()
    run = DDP(model)
    kfac = kfac_of(run, run)
    with run.join():
        said = said_by(train, run, kfac, slice(dist.get_rank(), None, 2))
    return said, kfac.steps


def test_join_is_an_error_before_anything_changes(crew):
    for said, steps in crew.run(inside_of_join, 2):
        assert "K-FAC does not step inside of DistributedDataParallel.join()" in said
        assert steps == 0


# ---- groups that are given ------------------------------------------------------------------------


def hsdp_with(axis: str, kind: str) -> list[torch.Tensor] | str:
    """Two replicas of halves, trained by the ranks of one axis of the mesh, or of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    later = kind == "kron, sharded later"
    group = dist.group.WORLD if axis == "both" else mesh[axis].get_group()
    made = model.parameters()
    if not later:
        fully_shard(model, mesh=mesh)
        made = model.parameters()
    try:
        if kind == "kfac":
            optimizer: Any = kfac_of(model, model, process_group=group)
        else:
            share = "replicate" if kind == "kron, replicated" else "shard"
            optimizer = Kron(made, lr=0.01, distributed=share, process_group=group)
    except ValueError as error:
        return str(error)
    if later:
        fully_shard(model, mesh=mesh)
        optimizer.param_groups[0]["params"] = list(model.parameters())
    said = said_by(train, model, optimizer, slice(dist.get_rank(), None, 4))
    return said or quietly(parameters_of, model)[0]


@pytest.mark.parametrize("kind", ["kfac", "kron", "kron, replicated", "kron, sharded later"])
@pytest.mark.parametrize("axis", ["replicate", "shard", "both"])
def test_a_group_has_all_ranks_of_the_shards(crew, kind, axis):
    """Or it is refused. Kron may do without replicas, whose gradient is the same."""
    fits = axis == "both" or (axis == "shard" and kind != "kfac")
    alone = Net()
    train(
        alone, kfac_of(alone, alone) if kind == "kfac" else Kron(alone.parameters(), 0.01), slice(None)
    )
    for found in crew.run(hsdp_with, 4, axis, kind):
        if fits:
            assert distance(found, [p.detach() for p in alone.parameters()]) < 1e-9
        else:
            assert "process_group must have all ranks [" in found
            assert "got one of ranks [" in found


def stage_of_each() -> str:
    """A rank's own stage, of a pipeline: plain parameters, and a group of one."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = Net(dist.get_rank())
    alone = groups[dist.get_rank()]
    kron = Kron(model.parameters(), lr=0.01, distributed="shard", process_group=alone)
    return said_by(train, model, kron, slice(None)) or said_by(
        train, model, kfac_of(model, model, process_group=alone), slice(None)
    )


def test_a_group_of_one_is_fine_for_plain_parameters(crew):
    assert crew.run(stage_of_each, 2) == ["", ""]


# ---- what is kept ---------------------------------------------------------------------------------


def groups_made() -> list[int]:
    model, counts = Net(), []
    for _ in range(3):
        kfac = kfac_of(model, model, gradient_worker_fraction="HYBRID_OPT")
        kfac.detach()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_a_kfac_that_is_made_again_has_the_groups_of_the_one_before(crew):
    for counts in crew.run(groups_made, 4):
        assert counts[0] > 1
        assert len({*counts}) == 1


def whole_state(wrap: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    rank, both = dist.get_rank(), []
    for _ in range(2):
        model = Net()
        run = DDP(model) if wrap == "ddp" else fully_shard(model)
        adam = torch.optim.Adam(run.parameters(), lr=0.01)
        both.append((model, run, KFAC(run, adam, damping=0.1, factor_update_steps=2)))
    (model, run, kfac), (other, run_of_other, again) = both
    train(run, kfac, slice(rank, None, 2))
    saved = [get_optimizer_state_dict(model, kfac, options=options)]
    dist.broadcast_object_list(saved, 0)
    other.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
    set_optimizer_state_dict(other, again, copy.deepcopy(saved[0]), options=options)
    for goes_on in ((run, kfac), (run_of_other, again)):
        train(*goes_on, slice(rank, None, 2), seed=1)
    return quietly(parameters_of, other)[0], quietly(parameters_of, model)[0]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_the_whole_state_on_one_rank(crew, wrap):
    """torch's `full_state_dict`; two layers share an input, which a new K-FAC does not know."""
    for found, expected in crew.run(whole_state, 2, wrap):
        assert distance(found, expected) == 0


def later_and_newton() -> tuple[str, list[str]]:
    parameters = [nn.Parameter(torch.ones(3, 3))]
    kron = Kron(parameters)
    kron._ranks.world = 3  # as if there had been more
    parameters[0].grad = torch.ones(3, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DenseNewton(parameters)
        DenseNewton(parameters, hvp="finite_difference")
    return said_by(kron.step), [str(warning.message) for warning in caught]


def test_other_ranks_than_before_and_derivatives_of_each_rank(crew):
    for said, warned in crew.run(later_and_newton, 2):
        assert "initialized anew, with 2 ranks for 3: make the Kron anew" in said
        assert len(warned) == 1
        assert "nothing averages over ranks" in warned[0]


def with_whole_parameters(how: str, bad: int) -> tuple[list[torch.Tensor], tuple[int, int], bool]:
    """A step that finds whole parameters in the places of fully_shard's, and one that is not finite."""
    rank, model = dist.get_rank(), Net()
    if dist.get_world_size() > 1:
        fully_shard(model)
        if how == "backward":
            model.set_reshard_after_backward(False)  # type: ignore[operator]
    own = list(model.parameters())
    sgd = torch.optim.SGD(own, lr=0.1)
    kfac = KFAC(model, damping=0.1, factor_update_steps=4, compute_method="inverse")
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        x = torch.randn(24, 4, generator=generator, dtype=torch.float64)
        x = x[rank :: dist.get_world_size()]
        loss = model(x).square().mean()
        (loss * float("nan") if step == bad == 0 else loss).backward()
        gradient: Any = own[2].grad
        if step == bad > 0:
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = float(
                "nan"
            )
        if how == "forward":
            with torch.no_grad():
                model(x)
        quietly(kfac.step)
        sgd.step()
        sgd.zero_grad()
        kfac.zero_grad()
        routed = "not the model's" not in str(kfac.routing())
        if dist.get_world_size() > 1:
            model.reshard()  # type: ignore[operator]
    return quietly(parameters_of, model)[0], (kfac.steps, kfac.skipped_steps), routed


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_whole_parameters_while_kfac_steps_are_not_the_ones_that_have_gradients(crew, how, bad):
    ((expected, *_),) = crew.run(with_whole_parameters, 1, how, bad)
    assert all(bool(p.isfinite().all()) for p in expected)
    for found, steps, routed in crew.run(with_whole_parameters, 2, how, bad):
        assert distance(found, expected) < 1e-9
        assert steps == (3, 1)
        assert routed


def with_shards_of_each_layer(wrap: str) -> tuple[list[torch.Tensor], list[str], int]:
    """Two layers read one tensor, which fully_shard hands to each as a tensor of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).double(), nn.Tanh(), Net())
    children = dict(model[2].named_children())
    by_themselves = [model[0], *children.values()] if wrap == "each" else [children.get(wrap)]
    for layer in filter(None, by_themselves):
        fully_shard(layer)
    if wrap != "none":
        fully_shard(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, sgd, damping=0.03, compute_method="inverse")
    rank, world = dist.get_rank(), dist.get_world_size()
    train(model, kfac, slice(rank, None, world), steps=4)
    shared = [route.parameter for route in kfac.routing().routes if "shares A" in route.reason]
    return quietly(parameters_of, model)[0], shared, sum(kfac.memory_usage().values())


def test_layers_that_read_one_tensor_share_its_second_moment_however_they_are_sharded(crew):
    ((expected, shared, size),) = crew.run(with_shards_of_each_layer, 1, "none")
    assert shared == ["2.second.weight"]
    for wrap in ("root", "each", "first", "second"):
        for found, own, _ in crew.run(with_shards_of_each_layer, 2, wrap):
            assert own == shared
            assert distance(found, expected) < 1e-9
        ((_, _, alone),) = crew.run(with_shards_of_each_layer, 1, wrap)
        assert alone == size


def with_another_head() -> tuple[int, bool, bool]:
    """A layer that is exchanged after fully_shard and K-FAC."""
    model = fully_shard(Net())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, damping=0.1)
    model.head = nn.Linear(5, 3).double()  # type: ignore[assignment]
    sgd.add_param_group({"params": list(model.head.parameters())})
    model(torch.ones(6, 4).double()).square().mean().backward()
    model.head.bias.grad[0] = float("nan")  # type: ignore[index]
    quietly(kfac.step)
    gone = all(p.grad is None for p in model.head.parameters())
    return kfac.skipped_steps, gone, "not the model's when K-FAC was attached" in str(kfac.routing())


def test_a_layer_that_is_exchanged_is_no_whole_parameter_of_fully_shard(crew):
    assert crew.run(with_another_head, 2) == [(1, True, True)] * 2
