"""Kron on several processes: replicated or shared out, whole or sharded parameters, one trajectory."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from suite.torch import LRA, Kron
from torch_backend.crew import Crew
from torch_backend.distributed_jobs import (
    Settings,
    average_gradients,
    backward,
    batches,
    distance,
    network,
    parameters_of,
    quietly,
    share_of,
    world_and_rank,
    wrapped,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def crew():
    members = Crew(4)
    yield members
    members.close()


def make(settings: Settings, kron: dict[str, Any]) -> tuple[nn.Module, nn.Module, Kron]:
    model = network(settings.dtype)
    run = wrapped(model, settings)
    # Blocks of 4: several to a layer, with remainders.
    kron = {"lr": 0.05, "block_size": 4, "weight_decay": 0.01, **kron}
    return model, run, Kron(run.parameters(), **kron)


def go_on(run: nn.Module, kron: Kron, settings: Settings, first: int, last: int) -> None:
    for batch in batches(settings.dtype, last, settings.batch)[first:]:
        x, y = share_of(batch, settings)
        backward(run, x, y, settings)
        kron.step()
        kron.zero_grad()


def train_kron(settings: Settings, kron: dict[str, Any]) -> dict[str, Any]:
    model, run, optimizer = make(settings, kron)
    go_on(run, optimizer, settings, 0, settings.steps)
    ranks = optimizer._ranks
    return {
        "parameters": parameters_of(model),
        "memory": optimizer.memory_usage(),
        "collectives": dict(ranks.collectives),
        "bytes": dict(ranks.bytes_sent),
    }


def alone(settings: Settings, kron: dict[str, Any]) -> list[torch.Tensor]:
    own = {k: v for k, v in kron.items() if k not in ("distributed", "allreduce_bucket_cap_mb")}
    return train_kron(Settings("none", settings.dtype, steps=settings.steps), own)["parameters"]


@pytest.mark.parametrize("distributed", ["replicate", "shard"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_any_number_of_ranks_follows_the_trajectory_of_one(crew, wrap, world, distributed):
    settings, kron = Settings(wrap), {"distributed": distributed}
    expected = alone(settings, kron)
    results = crew.run(train_kron, world, settings, kron)
    for result in results:
        assert distance(result["parameters"], expected) < 1e-9
        assert distance(result["parameters"], results[0]["parameters"]) == 0


VARIANTS: dict[str, tuple[int, Settings, dict[str, Any]]] = {
    "hsdp": (4, Settings("hsdp"), {}),
    "hsdp, replicated": (4, Settings("hsdp"), {"distributed": "replicate"}),
    "one by one": (3, Settings(), {"allreduce_bucket_cap_mb": 0}),
    "one by one, fsdp": (3, Settings("fsdp"), {"allreduce_bucket_cap_mb": 0}),
    "broadcasts": (3, Settings(), {"allreduce_bucket_cap_mb": 1e-5}),
    "whole matrices": (4, Settings(), {"partition_grads_into_blocks": False}),
    "factors of every block": (4, Settings(), {"shared_factors": False}),
    "factors of every block, fsdp": (3, Settings("fsdp"), {"shared_factors": False}),
    "EQ": (2, Settings(), {"geometry": "EQ"}),
    "whitened gradients": (2, Settings("fsdp"), {"whiten": "gradient", "update_first": False}),
    "normalized": (3, Settings("fsdp"), {"normalize_grads": True}),
    "scale from the first gradient": (3, Settings(), {"preconditioner_init_scale": None}),
    "no resharding": (2, Settings("fsdp", fsdp={"reshard_after_forward": False}), {}),
    "packed": (3, Settings(), {"packed_factors": True, "geometry": "EQ"}),
    "packed, fsdp": (2, Settings("fsdp"), {"packed_factors": True, "geometry": "QUAD"}),
    "packed, replicated": (2, Settings("fsdp"), {"packed_factors": True, "distributed": "replicate"}),
    "nothing cached": (3, Settings(), {"packed_factors": True, "cache_preconditioner": False}),
    "diagonal": (2, Settings("fsdp"), {"memory_save_mode": "one_diag"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_so_does_every_variant(crew, name):
    world, settings, kron = VARIANTS[name]
    kron = {"distributed": "shard", **kron}
    expected = alone(settings, kron)
    for result in crew.run(train_kron, world, settings, kron):
        assert distance(result["parameters"], expected) < 1e-9


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_single_precision(crew, wrap):
    settings, kron = Settings(wrap, torch.float32), {"distributed": "shard"}
    expected = alone(settings, kron)
    for result in crew.run(train_kron, 4, settings, kron):
        assert distance(result["parameters"], expected) < 1e-5


@pytest.mark.parametrize(
    ("shared", "largest"), [(True, 0.6), (False, 0.4)]
)  # shares of matrices are coarser than those of their blocks
def test_shares_of_the_state_add_up_and_are_fair(crew, shared, largest):
    (whole,) = crew.run(train_kron, 1, Settings(), {"shared_factors": shared})
    kron = {"distributed": "shard", "shared_factors": shared}
    parts = crew.run(train_kron, 4, Settings(), kron)
    for name, total in whole["memory"].items():
        own = [part["memory"][name] for part in parts]
        assert sum(own) == total
        assert max(own) < largest * total
    assert parts[0]["collectives"]["Kron's exchange of directions"] == Settings().steps


def memory_of_groups() -> int:
    """Bytes of a rank's state of eight equal matrices in groups of their own."""
    kron = Kron([{"params": [torch.zeros(8, 8)]} for _ in range(8)], lr=0.1, distributed="shard")
    return sum(kron.memory_usage().values())


def test_groups_are_shared_out_together(crew):
    (whole,) = crew.run(memory_of_groups, 1)
    assert crew.run(memory_of_groups, 4) == [whole // 4] * 4


def test_without_sharing_nothing_but_the_agreement_is_sent(crew):
    settings = Settings()
    (result, _) = crew.run(train_kron, 2, settings, {"distributed": "replicate"})
    assert result["collectives"] == {
        "Kron's agreement on the step": settings.steps,
        "Kron's number of parameters": 1,
    }


def kron_with_nan(settings: Settings, kron: dict[str, Any]) -> tuple[bool, int, list[torch.Tensor]]:
    model, run, optimizer = make(settings, kron)
    _, rank = world_and_rank()
    changed = False
    for step, batch in enumerate(batches(settings.dtype, 4, settings.batch)):
        x, y = share_of(batch, settings)
        backward(run, x, y, settings)
        if step == 2 and rank == 1:
            gradients: list[Any] = [p.grad for p in model.parameters()]
            here = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
            next(g for g in here if g.numel()).view(-1)[0] = float("nan")
        before = parameters_of(model)
        with pytest.warns(RuntimeWarning, match="a step was skipped") if step == 2 else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            changed = any(
                not torch.equal(a, b) for a, b in zip(before, parameters_of(model), strict=True)
            )
    return changed, optimizer.skipped_steps, parameters_of(model)


@pytest.mark.parametrize("distributed", ["replicate", "shard"])
@pytest.mark.parametrize("wrap", ["none", "fsdp"])
def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_on_all(crew, wrap, distributed):
    for changed, skipped, parameters in crew.run(
        kron_with_nan, 3, Settings(wrap), {"distributed": distributed}
    ):
        assert not changed
        assert skipped == 1
        assert all(bool(p.isfinite().all()) for p in parameters)


# ---- tensor parallelism: the whole matrix, not a slice --------------------------------------------


def tensor_parallel(fsdp: bool, distributed: str, first: int = 0) -> list[torch.Tensor]:
    """`first`: the place of the first layer that is."""
    world, rank = world_and_rank()
    torch.manual_seed(0)
    sides = (6, 8, 6, 5, 3)
    layers = [x for pair in itertools.pairwise(sides) for x in (nn.Linear(*pair), nn.Tanh())]
    model = nn.Sequential(*layers[:-1]).double()
    dp = 1
    if world > 1:
        dp = world // 2
        mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
        split = {str(first): ColwiseParallel(), str(first + 2): RowwiseParallel()}
        parallelize_module(model, mesh["tp"], split)
        if fsdp:
            fully_shard(model, mesh=mesh["dp"])
        rank = mesh.get_local_rank("dp")
    optimizer = Kron(model.parameters(), lr=0.05, distributed=distributed, block_size=4)
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (24,), generator=generator)
        F.cross_entropy(model(x[rank::dp]), y[rank::dp]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return quietly(parameters_of, model)[0]


@pytest.mark.parametrize("distributed", ["replicate", "shard"])
@pytest.mark.parametrize(("world", "fsdp"), [(2, False), (4, True)])
def test_tensor_parallel_layers_are_preconditioned_whole(crew, world, fsdp, distributed):
    expected = tensor_parallel(False, "replicate")
    for parameters in crew.run(tensor_parallel, world, fsdp, distributed):
        assert distance(parameters, expected) < 1e-9


@pytest.mark.parametrize("distributed", ["replicate", "shard"])
def test_the_ranks_are_those_of_the_largest_mesh(crew, distributed):
    """The first parameter may be on the data-parallel axis alone."""
    expected = tensor_parallel(False, "replicate")
    for parameters in crew.run(tensor_parallel, 4, True, distributed, 2):
        assert distance(parameters, expected) < 1e-9


# ---- checkpoints ----------------------------------------------------------------------------------


def save(settings: Settings, kron: dict[str, Any], how: str, path: str) -> None:
    model, run, optimizer = make(settings, kron)
    go_on(run, optimizer, settings, 0, 4)
    dcp.save(_state(run, model, optimizer, how), checkpoint_id=path)


def _state(run: nn.Module, model: nn.Module, optimizer: Kron, how: str) -> dict[str, Any]:
    if how != "own":
        saved = get_optimizer_state_dict(run, optimizer, options=_options(how))
        return {"model": model.state_dict(), "kron": saved}
    # By number: the keys of a nested dict must be strings.
    state = optimizer.state_dict(gather=False)
    state["state"] = {str(i): record for i, record in state["state"].items()}
    return {"model": model.state_dict(), "kron": state}


def _options(how: str) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=how == "flattened")


def load_and_go_on(
    settings: Settings, kron: dict[str, Any], how: str, path: str
) -> tuple[list[torch.Tensor], int]:
    model, run, optimizer = make(settings, kron)
    state = _state(run, model, optimizer, how)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    if how != "own":
        set_optimizer_state_dict(run, optimizer, state["kron"], options=_options(how))
    else:
        records = {int(i): record for i, record in state["kron"]["state"].items()}
        optimizer.load_state_dict({**state["kron"], "state": records})
    go_on(run, optimizer, settings, 4, 8)
    return parameters_of(model), optimizer.param_groups[0]["steps"]


@pytest.mark.parametrize(
    ("wrap", "how"),
    [
        ("ddp", "own"),
        ("ddp", "optimizer"),
        ("fsdp", "own"),
        ("fsdp", "optimizer"),
        ("fsdp", "flattened"),
    ],
)
def test_saved_on_four_ranks_and_continued_on_any(crew, tmp_path, wrap, how):
    settings, kron = Settings(wrap, steps=8), {"distributed": "shard"}
    expected = alone(settings, kron)
    crew.run(save, 4, settings, kron, how, str(tmp_path))
    for world in (1, 2, 3, 4):
        for parameters, steps in crew.run(load_and_go_on, world, settings, kron, how, str(tmp_path)):
            assert steps == 8
            assert distance(parameters, expected) < 1e-9


def test_a_flattened_state_of_blocks_that_ranks_share_out_is_an_error(crew, tmp_path):
    settings, kron = Settings(steps=8), {"distributed": "shard"}
    crew.run(save, 2, settings, kron, "flattened", str(tmp_path))
    for said in crew.run(load_and_go_on, 2, settings, kron, "flattened", str(tmp_path), fails=True):
        assert "does not find blocks that ranks share out: load, and save, without that option" in said


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("how", ["own", "optimizer"])
def test_packed_and_whole_factors_continue_each_other(crew, tmp_path, how, packed):
    settings, kron = Settings("fsdp", steps=8), {"distributed": "shard", "geometry": "EQ"}
    expected = alone(settings, kron)
    crew.run(save, 3, settings, {**kron, "packed_factors": packed}, how, str(tmp_path))
    other = {**kron, "packed_factors": not packed}
    for parameters, _ in crew.run(load_and_go_on, 2, settings, other, how, str(tmp_path)):
        assert distance(parameters, expected) < 1e-9


def step_with_other_parameters(zero: bool) -> str:
    """One rank has a parameter more, by itself or as ZeroRedundancyOptimizer deals them out."""
    rank = world_and_rank()[1]
    parameters = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(5 if zero else 2 + rank)]
    if zero:
        # Here, for to import it warns of what torch deprecates.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(parameters, Kron)
    else:
        optimizer = Kron(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("zero", [False, True])
def test_other_parameters_on_another_rank_are_an_error(crew, zero):
    for rank, said in enumerate(crew.run(step_with_other_parameters, 2, zero)):
        own = 3 - rank if zero else 2 + rank
        assert f"the same on all ranks, got {own} here and 5 on 2 ranks: give process_group=" in said
        assert "in place of a ZeroRedundancyOptimizer, distributed='shard'" in said


def train_torn(distributed: str) -> tuple[list[torch.Tensor], list[str]]:
    """One rank lacks one parameter's gradient in one step."""
    model = network()
    optimizer = Kron(model.parameters(), lr=0.05, distributed=distributed, block_size=4)
    world, rank = world_and_rank()
    said: list[str] = []
    for step, (x, y) in enumerate(batches(torch.float64, 4, 24)):
        backward(model, x[rank::world], y[rank::world], Settings())
        average_gradients(model)
        if step == 1 and rank == 1:
            next(model.parameters()).grad = None
        said += quietly(optimizer.step)[1]
        optimizer.zero_grad()
    return parameters_of(model), said


@pytest.mark.parametrize("distributed", ["replicate", "shard"])
def test_a_gradient_that_one_rank_lacks_moves_its_parameter_nowhere(crew, distributed):
    results = crew.run(train_torn, 2, distributed)
    assert distance(results[0][0], results[1][0]) == 0
    for _, said in results:
        assert len(said) == 1
        assert "parameters [0] have a gradient on some ranks and none on others" in said[0]


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)
        self.tokens = slice(None)  # those of this rank, for the norm
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x[:, self.tokens])
        return self.head((x + self.down(torch.tanh(self.up(h)))).mean(1))


def sequence_parallel(distributed: str) -> list[torch.Tensor]:
    model = Sequence()
    if world_and_rank()[0] > 1:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(model, mesh, plan)
        model.tokens = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
    optimizer = Kron(model.parameters(), lr=0.05, distributed=distributed)
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        x = torch.randn(8, 4, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (8,), generator=generator)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return quietly(parameters_of, model)[0]


@pytest.mark.parametrize("distributed", ["replicate", "shard"])
def test_gradients_of_sequence_parallel_norms_are_summed_first(crew, distributed):
    expected = sequence_parallel("replicate")
    for parameters in crew.run(sequence_parallel, 2, distributed):
        assert distance(parameters, expected) < 1e-9


# ---- what is refused, and what fails --------------------------------------------------------------


def refused() -> list[str]:
    model = network()
    fully_shard(model)
    said = []
    for make_it in (
        lambda: Kron(network().parameters(), hvp="exact"),
        lambda: Kron(model.parameters(), hvp="finite_difference"),
        lambda: LRA(model.parameters()),
    ):
        try:
            make_it()
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_sharded_is_an_error(crew):
    for said in crew.run(refused, 2):
        assert "hvp must not be 'exact' with several ranks" in said[0]
        assert "must not be sharded with hvp='finite_difference'" in said[1]
        assert "DTensor" in said[2]


def test_bad_settings_are_errors():
    parameters = list(network().parameters())
    with pytest.raises(ValueError, match="distributed must be one of 'replicate', 'shard', got 'both'"):
        Kron(parameters, distributed="both")
    with pytest.raises(ValueError, match="distributed must be 'replicate' with hvp='exact'"):
        Kron(parameters, distributed="shard", hvp="exact")


def stops(settings: Settings) -> str:
    model, _, optimizer = make(settings, {"distributed": "shard"})
    _, rank = world_and_rank()
    for step, batch in enumerate(batches(settings.dtype, 3, settings.batch)):
        x, y = share_of(batch, settings)
        backward(model, x, y, settings)
        if step == 1 and rank == 1:
            return "stopped"
        optimizer.step()
        optimizer.zero_grad()
    return "done"


def test_a_rank_that_stops_is_an_error_that_says_what_was_going_on():
    members = Crew(2)
    try:
        results = members.run(stops, 2, Settings("none"), fails=True)
    finally:
        members.close()
    assert results[1] == "stopped"
    assert "Kron's agreement on the step failed on rank 0 of 2" in results[0]
