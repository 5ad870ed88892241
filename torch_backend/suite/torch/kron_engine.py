"""PSGD Kron over the parameters of one param group: momentum, whitening and clipping on buckets.

The tensors of a bucket are stacked. What a parameter's state holds are views of them, so that state
stays per parameter (`state_dict`, `load_state_dict`) while each step is a few calls for all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from suite.core import blocks, buckets, moments, noise
from suite.core import kron as core_kron
from suite.core.step_size import rms_clip

MAX_RMS = 1.1  # a whitened gradient has root mean square 1; distributed_kron's bound


class Pack(NamedTuple):
    """The state of one bucket, stacked over its blocks."""

    momentum: torch.Tensor  # (blocks, *sizes)
    weight: torch.Tensor  # (blocks,), how much evidence the momentum holds
    kron: core_kron.KronState
    streams: torch.Tensor  # (blocks,) int32, noise streams


class KronEngine:
    """Blocks, buckets and state of the parameters of one group."""

    def __init__(
        self,
        parameters: list[torch.Tensor],
        numbers: list[int],
        rule: core_kron.Kron,
        structure: blocks.Structure,
        *,
        seed: int,
        mu_dtype: torch.dtype | None,
        precond_dtype: torch.dtype | None,
    ) -> None:
        self.parameters = parameters
        self.rule = rule
        self.plans = [blocks.plan_blocks(p.shape, structure) for p in parameters]
        stacks: list[tuple[Any, int]] = []
        self.stack_of: list[list[int]] = []  # for each parameter, its stacks' places in `stacks`
        for parameter, plan in zip(parameters, self.plans, strict=True):
            self.stack_of.append([])
            for tile in plan.tiles:
                key = (tile.sizes, plan.diagonal, parameter.dtype, parameter.device)
                self.stack_of[-1].append(len(stacks))
                stacks.append((key, plan.tile_blocks(tile)))
        self.buckets = buckets.plan_buckets(stacks)
        self.stacks = len(stacks)
        self.places = {m.index: (i, m) for i, bucket in enumerate(self.buckets) for m in bucket.members}
        owner: list[list[int]] = []
        for number, plan in zip(numbers, self.plans, strict=True):
            of_blocks = iter(noise.stream_numbers(number, plan.blocks, seed))
            owner += [[next(of_blocks) for _ in range(plan.tile_blocks(tile))] for tile in plan.tiles]
        self.packs: list[Pack] = []
        for bucket in self.buckets:
            sizes, diagonal, dtype, device = bucket.key
            factor_dtype = precond_dtype or torch.promote_types(dtype, torch.float32)
            like = torch.empty(0, dtype=factor_dtype, device=device)
            streams = [stream for member in bucket.members for stream in owner[member.index]]
            self.packs.append(
                Pack(
                    torch.zeros((bucket.blocks, *sizes), dtype=mu_dtype or dtype, device=device),
                    torch.zeros(
                        bucket.blocks, dtype=torch.promote_types(dtype, torch.float32), device=device
                    ),
                    rule.init(like, (bucket.blocks, *sizes), diagonal),
                    torch.tensor(streams, dtype=torch.int32, device=device),
                )
            )

    def step(
        self,
        gradients: list[torch.Tensor | None],
        finite: torch.Tensor,
        *,
        b1: float,
        update: bool,
        step: int,
        preconditioner_lr: float,
    ) -> list[torch.Tensor | None]:
        """Absorb gradients and return directions; where not `finite`, zero directions and no change."""
        stacks: list[Any] = [None] * self.stacks
        for gradient, plan, places in zip(gradients, self.plans, self.stack_of, strict=True):
            if gradient is not None:
                for place, stack in zip(places, blocks.split(plan, gradient), strict=True):
                    stacks[place] = stack
        for i, bucket in enumerate(self.buckets):
            present = [stacks[member.index] is not None for member in bucket.members]
            if not any(present):
                continue
            pack = self.packs[i]
            keep = finite
            if not all(present):
                for member, here in zip(bucket.members, present, strict=True):
                    if not here:
                        stacks[member.index] = torch.zeros_like(
                            pack.momentum[member.start : member.stop]
                        )
                spans = [m.stop - m.start for m in bucket.members]
                flags = [flag for flag, n in zip(present, spans, strict=True) for _ in range(n)]
                keep = keep & torch.tensor(flags, device=pack.momentum.device)
            gradient = buckets.gather(bucket, stacks)
            ndim = gradient.ndim - 1
            momentum = moments.update_average(pack.momentum, gradient, b1)
            weight = moments.update_average(pack.weight, torch.ones_like(pack.weight), b1)
            signal = moments.unbiased(momentum, weight)
            state = pack.kron
            if update:
                unit = noise.unit_noise(
                    pack.streams, step, tuple(gradient.shape[1:]), state.factors[0].dtype
                )
                state = self.rule.update(state, signal, unit, preconditioner_lr)
                state = self.rule.refresh(state)
                _write(pack.kron, state, keep)
            direction = rms_clip(self.rule.precondition(state, signal), MAX_RMS, ndim)
            _select(pack.momentum, momentum, keep)
            _select(pack.weight, weight, keep)
            condition = keep.reshape(-1, *(1,) * ndim) if keep.ndim else keep
            buckets.scatter(bucket, torch.where(condition, direction, 0.0), stacks)
        return [
            None if gradient is None else blocks.merge(plan, [stacks[place] for place in places])
            for gradient, plan, places in zip(gradients, self.plans, self.stack_of, strict=True)
        ]

    def views(self, index: int) -> dict[str, torch.Tensor]:
        """The state of one parameter: views of its part of every bucket it is in."""
        found: dict[str, torch.Tensor] = {}
        for tile, place in enumerate(self.stack_of[index]):
            i, member = self.places[place]
            for name, tensor in _named(self.packs[i]).items():
                found[f"tile{tile}.{name}"] = tensor[member.start : member.stop]
        return found

    def after_load(self) -> None:
        """Recompute what follows from loaded state: P = QᵀQ of every factor."""
        for i, pack in enumerate(self.packs):
            self.packs[i] = pack._replace(kron=self.rule.square(pack.kron))


def _named(pack: Pack) -> dict[str, torch.Tensor]:
    """What a checkpoint needs of a bucket."""
    tensors = {"momentum": pack.momentum, "weight": pack.weight}
    for axis, (factor, L) in enumerate(zip(pack.kron.factors, pack.kron.lipschitz, strict=True)):
        tensors[f"factor{axis}"] = factor
        tensors[f"lipschitz{axis}"] = L
    return tensors


def _write(old: core_kron.KronState, new: core_kron.KronState, keep: torch.Tensor) -> None:
    for olds, news in zip(old, new, strict=True):
        for a, b in zip(olds, news, strict=True):
            _select(a, b, keep)


def _select(old: torch.Tensor, new: torch.Tensor, keep: torch.Tensor) -> None:
    """old <- new where `keep` (one flag, or one a block), in place, the host not waiting."""
    condition = keep.reshape(-1, *(1,) * (old.ndim - 1)) if keep.ndim else keep
    torch.where(condition, new, old, out=old)
