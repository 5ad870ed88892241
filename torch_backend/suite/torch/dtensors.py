"""Parameters that are DTensors: what this rank has of them.

A mesh has axes over which FSDP2 shards (and replicates) a parameter, then axes of tensor parallelism.
For K-FAC the block that is left after the latter takes the parameter's place: for a weight that is split
by outputs (ColwiseParallel) G is block-diagonal with a block a rank, for one that is split by inputs
(RowwiseParallel) A is. Kron preconditions the whole parameter, whatever splits it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def is_sharded(x: torch.Tensor) -> bool:
    """Whether it is a DTensor. Asked by an attribute: importing the class takes long."""
    return hasattr(x, "device_mesh")


def local(x: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    if not is_sharded(x):
        return x
    part: torch.Tensor = x.to_local()  # type: ignore[attr-defined]
    return part


def like(y: Any, part: torch.Tensor) -> torch.Tensor:
    """A DTensor as `y` is, of which this rank has `part`."""
    made: torch.Tensor = type(y).from_local(
        part, y.device_mesh, y.placements, run_check=False, shape=y.shape, stride=y.stride()
    )
    return made


def is_cut(x: Any) -> bool:
    """Whether ranks have parts of a DTensor, and neither copies of it nor terms of a sum."""
    return any(placement.is_shard() for placement in x.placements)


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that `fully_shard` was called on."""
    return [module for module in model.modules() if hasattr(module, "set_reshard_after_backward")]


@contextlib.contextmanager
def kept_whole(modules: Iterable[Any]) -> Iterator[None]:
    """Modules that `fully_shard` was called on keep their parameters after backward passes in here."""
    before = [(module, _reshards(module)) for module in modules]
    try:
        for module, _ in before:
            module.set_reshard_after_backward(False, recurse=False)
        yield
    finally:
        for module, value in before:
            module.set_reshard_after_backward(value, recurse=False)


def _reshards(module: Any) -> bool:
    """What was last given to `set_reshard_after_backward`; no public question exists."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch < 2.13
    return all(group is None or group.reshard_after_backward for group in groups)


def tensor_axes(parameter: Any, fully_sharded: bool) -> int:
    """How many of the last axes of a parameter's mesh are of tensor parallelism."""
    if not is_sharded(parameter):
        return 0
    ndim: int = parameter.device_mesh.ndim
    if not fully_sharded:
        return ndim
    # FSDP2's own axes come first: one that shards, or one that replicates and one that shards.
    return ndim - (2 if ndim > 1 and parameter.placements[0].is_replicate() else 1)


def hidden_layout(parameter: Any) -> Any:
    """What a parameter is laid out like that DistributedDataParallel(device_mesh=) made plain, or None.

    It hides tensor parallelism from whoever holds the parameter: what is here is a block.
    """
    return getattr(parameter, "_st_info", None)


Named = Mapping[str, tuple[Any, Any]]  # the module that has a parameter, and this


def named_with_owners(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A model's parameters by name, for `parameters_of`."""
    return {name: (_owner(model, name), p) for name, p in model.named_parameters()}


def parameters_of(model: nn.Module, before: Named) -> dict[str, Any]:
    """A model's parameters by name, with those of `before` in whose places others are for a while.

    `fully_shard` has whole ones there between a forward pass and the next backward pass, and
    DistributedDataParallel(device_mesh=) DTensors that are none after a forward pass; neither are an
    optimizer's, nor get gradients. Another module's in the place of one that is gone are its own.
    """
    found = {name: _original(model, name, p, before) for name, p in model.named_parameters()}
    for name, (owner, p) in before.items():
        if name not in found and hidden_layout(p) is not None and _owner(model, name) is owner:
            found[name] = p
    return found


def _original(model: nn.Module, name: str, now: Any, before: Named) -> Any:
    owner, p = before.get(name, (None, None))
    if p is None or p is now or not (is_sharded(p) or hidden_layout(p) is not None):
        return now
    gathered = is_sharded(p) and getattr(now, "device_mesh", None) != p.device_mesh
    return p if (gathered or not is_sharded(p)) and _owner(model, name) is owner else now


def _owner(model: nn.Module, name: str) -> Any:
    module: Any = model
    for part in name.split(".")[:-1]:
        module = getattr(module, part, None)
    return module


def chunk(start: int, stop: int, parts: int, number: int) -> tuple[int, int]:
    """The range that torch.chunk gives to one of `parts`."""
    each = -(-(stop - start) // parts)
    first = min(start + number * each, stop)
    return first, min(first + each, stop)


Box = tuple[tuple[int, int], ...]  # (start, stop) on each axis


def box_of(parameter: Any, tensor_axes: int = 0) -> Box:
    """What this rank has of a parameter, in the indices of the whole.

    Args:
        tensor_axes: with K-FAC's number of them: in the indices of this rank's tensor-parallel block.

    Raises:
        ValueError: a way to shard that is not known.
    """
    if not is_sharded(parameter):
        return tuple((0, n) for n in parameter.shape)
    mesh = parameter.device_mesh
    box = [(0, n) for n in block_shape(parameter, tensor_axes)]
    axes = [(axis, parameter.placements[axis]) for axis in range(mesh.ndim - tensor_axes)]
    # FSDP2 over tensor parallelism: its axis comes first in the mesh, but cuts what the other has left.
    axes.sort(key=lambda pair: hasattr(pair[1], "split_factor"))
    for axis, placement in axes:
        dim = getattr(placement, "dim", None)
        if dim is not None:
            start, stop = box[dim]
            box[dim] = chunk(start, stop, mesh.size(axis), mesh.get_local_rank(axis))
    if shape_of(box) != tuple(local(parameter).shape):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is sharded in a way that is not known: "
            f"placements {parameter.placements} on {mesh}"
        )
    return tuple(box)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


def shape_of(box: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(b - a for a, b in box)


def size_of(box: Box) -> int:
    return torch.Size(shape_of(box)).numel()


def deliveries(boxes: Sequence[Box], wanted: Sequence[int]) -> list[tuple[Box, int, tuple[int, ...]]]:
    """Who brings which part of a sharded tensor to whom: (box, source, destinations).

    A rank that has a part (there may be copies) is its own source.

    Args:
        boxes: what each rank has.
        wanted: the ranks that need the whole.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        if size_of(box):
            holders.setdefault(box, []).append(rank)
    found = []
    for box, ranks in holders.items():
        by_source: dict[int, list[int]] = {}
        for rank in wanted:
            source = rank if rank in ranks else ranks[rank % len(ranks)]
            by_source.setdefault(source, []).append(rank)
        found += [(box, source, tuple(targets)) for source, targets in by_source.items()]
    return found


def block_shape(parameter: Any, axes: int) -> tuple[int, ...]:
    """The shape of what tensor parallelism leaves of a parameter here.

    Args:
        axes: `tensor_axes` of it.
    """
    shape = list(parameter.shape)
    if axes:
        mesh = parameter.device_mesh
        for axis in range(mesh.ndim - axes, mesh.ndim):
            dim = getattr(parameter.placements[axis], "dim", None)
            if dim is not None:
                start, stop = chunk(0, shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
                shape[dim] = stop - start
    return tuple(shape)


def split_dim(parameter: Any, axes: int) -> int | None:
    """The axis on which tensor parallelism splits a parameter; None where ranks have copies.

    Raises:
        ValueError: split on several axes.
    """
    placements = parameter.placements[-axes:] if axes else ()
    hidden = hidden_layout(parameter)
    placements = placements if hidden is None else hidden.placements
    dims = {getattr(placement, "dim", None) for placement in placements} - {None}
    if len(dims) > 1:
        raise ValueError(f"K-FAC knows weights split on one axis, got placements {placements}")
    return dims.pop() if dims else None


def groups_of(parameters: Iterable[tuple[Any, int, bool]], asked: bool) -> tuple[Any, Any]:
    """The ranks with the same blocks of parameters and other data, and those with other blocks.

    Args:
        parameters: with their `tensor_axes`, and whether K-FAC covers them: those tell, if any does.
        asked: whether the first are.

    Returns:
        (group of data-parallel ranks, of tensor-parallel ranks), None where no mesh has such an axis.

    Raises:
        ValueError: covered parameters are sharded, or split, over other ranks than others, or split on
            several axes.
    """
    meshes = []
    for p, axes, covered in parameters:
        if is_sharded(p):
            meshes.append((p.device_mesh, axes, covered))
        elif hidden_layout(p) is not None:
            meshes.append((hidden_layout(p).mesh, hidden_layout(p).mesh.ndim, covered))
    several = [mesh for mesh, axes, covered in meshes if covered and axes > 1]
    if several:
        raise ValueError(f"K-FAC knows one tensor-parallel axis, got mesh {several[0]}")
    shards = [(_data_ranks(m, axes), (m, m.ndim - axes), c) for m, axes, c in meshes if m.ndim > axes]
    without = "leave some out by skip_layers="
    experts = f"{without}, as experts that are spread over ranks, or give process_group="
    data = _told(shards, "sharded", experts) if asked else None
    groups = [(mesh.get_group(mesh.ndim - 1), covered) for mesh, axes, covered in meshes if axes == 1]
    splits = [(torch.distributed.get_process_group_ranks(g), g, covered) for g, covered in groups]
    return None if data is None else _group(*data), _told(splits, "split", without)


def _told(found: Sequence[tuple[Sequence[int], Any, bool]], how: str, otherwise: str) -> Any:
    """Of ranks, what goes with them, and whether covered: what goes with the covered ones', or others'.

    Raises:
        ValueError: covered ones have several.
    """
    for is_covered in (True, False):
        own: dict[frozenset[int], Any] = {}
        for ranks, it, covered in found:
            if covered is is_covered:
                own.setdefault(frozenset(ranks), it)
        if is_covered and len(own) > 1:
            raise ValueError(
                f"layers must be {how} over the same ranks, got some over ranks "
                f"{' and some over '.join(str(sorted(ranks)) for ranks in own)}: {otherwise}"
            )
        if own:
            return next(iter(own.values()))
    return None


def require_same_blocks(parameters: Iterable[tuple[Any, int]], ranks: Iterable[int]) -> None:
    """ValueError if some of the ranks have other tensor-parallel blocks of parameters than this one.

    Args:
        parameters: that are split, with their `tensor_axes`.
    """
    for parameter, axes in parameters:
        mesh = parameter.device_mesh
        others = ({*mesh.mesh.flatten().tolist()} - {*_data_ranks(mesh, axes)}) & {*ranks}
        if others:
            raise ValueError(
                "process_group must have ranks with the same tensor-parallel blocks, got one that also "
                f"has {sorted(others)}, with others of a parameter of shape {tuple(parameter.shape)}: "
                "leave its layer out by skip_layers=, or give the group of those that share it"
            )


def require_all_shards(parameters: Iterable[tuple[Any, Iterable[int]]], group: Any) -> None:
    """ValueError unless a process group has all ranks of DTensors' meshes along some of their axes.

    What others have of such a gradient would count as zeros.

    Args:
        parameters: with the axes of their meshes.
    """
    for parameter, axes in parameters:
        needed = {*_ranks_along(parameter.device_mesh, axes)}
        ranks = {*torch.distributed.get_process_group_ranks(group)}
        if not needed <= ranks:
            raise ValueError(
                f"process_group must have all ranks {sorted(needed)} over which a parameter of shape "
                f"{tuple(parameter.shape)} is sharded, got one of ranks {sorted(ranks)}: give that of "
                "their whole mesh, or none"
            )


def shard_axes(parameter: Any) -> list[int]:
    """The axes of a DTensor's mesh over which it is split, not copied."""
    return [i for i, x in enumerate(parameter.placements) if getattr(x, "dim", None) is not None]


def _data_ranks(mesh: Any, axes: int) -> tuple[int, ...]:
    """The ranks of a mesh with this rank's tensor-parallel block.

    Args:
        axes: how many of its last axes are of tensor parallelism.
    """
    return _ranks_along(mesh, range(mesh.ndim - axes))


def _ranks_along(mesh: Any, axes: Iterable[int]) -> tuple[int, ...]:
    """The ranks of a mesh that are where this one is on all but these axes."""
    ranks, kept = mesh.mesh, {*axes}
    for axis in reversed(range(mesh.ndim)):
        if axis not in kept:
            ranks = ranks.select(axis, mesh.get_local_rank(axis))
    return tuple(ranks.flatten().tolist())


def _group(mesh: Any, axes: int) -> Any:
    """The process group of this rank along the first axes of a mesh."""
    if axes == mesh.ndim:
        return mesh_group(mesh)
    return mesh.get_group(0) if axes == 1 else mesh[mesh.mesh_dim_names[:axes]]._flatten().get_group()


def mesh_group(mesh: Any) -> Any:
    """The process group of all ranks of a mesh."""
    return mesh.get_group(0) if mesh.ndim == 1 else mesh._flatten().get_group()


def group_of_all(parameters: Iterable[Any]) -> Any:
    """The process group of the mesh that has all the ranks of all meshes; None without any.

    Raises:
        ValueError: none has.
    """
    meshes: dict[frozenset[int], Any] = {}
    for parameter in parameters:
        if is_sharded(parameter):
            mesh = parameter.device_mesh
            meshes.setdefault(frozenset(mesh.mesh.flatten().tolist()), mesh)
    if not meshes:
        return None
    largest = max(meshes, key=len)
    if not all(ranks <= largest for ranks in meshes):
        raise ValueError(
            "process_group must be given where parameters are sharded over other ranks than others, got "
            f"{' and '.join(str(sorted(ranks)) for ranks in meshes)}"
        )
    return mesh_group(meshes[largest])


def require_not_flattened(parameters: Iterable[torch.Tensor]) -> None:
    """ValueError where FullyShardedDataParallel has put parameters into flat ones, or cut these.

    With one rank, or NO_SHARD, it leaves the user's as they are.
    """
    flattened = [x for x in parameters if getattr(x, "_fsdp_flattened", False)]
    flat = any(getattr(x, "_is_flat_param", False) for x in flattened)
    if flat or (flattened and all(x.ndim < 2 for x in flattened)):
        raise ValueError(
            "parameters must keep their shapes, got those of FullyShardedDataParallel: use fully_shard "
            "(FSDP2)"
        )


def require_not_hidden(parameters: Iterable[torch.Tensor]) -> None:
    """ValueError where DistributedDataParallel(device_mesh=) has made plain parameters of DTensors."""
    hidden = sum(hidden_layout(x) is not None for x in parameters)
    if hidden:
        raise ValueError(
            f"parameters must be whole or DTensors, got {hidden} that are blocks of tensor parallelism, "
            "made plain by DistributedDataParallel(device_mesh=...): use fully_shard over that mesh"
        )


def settle(parameters: Iterable[Any]) -> None:
    """Lay gradients out as their parameters; tensor parallelism may leave sums over ranks to be done.

    One number for many, as `torch.autograd.grad` has a sum's, cannot be written to.
    """
    for p in parameters:
        g = p.grad
        if g is None:
            continue
        if is_sharded(g):
            if tuple(g.placements) != tuple(p.placements):
                p.grad = g.redistribute(placements=p.placements)
        elif g.layout is torch.strided and 0 in g.stride():
            p.grad = g.contiguous()
