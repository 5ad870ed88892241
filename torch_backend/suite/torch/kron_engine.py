"""PSGD Kron over the parameters of one param group: momentum, whitening and clipping on buckets.

The tensors of a bucket are stacked. What a parameter's state holds are views of them, so that state
stays per parameter (`state_dict`, `load_state_dict`) while each step is a few calls for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from suite.core import blocks, buckets, moments, noise
from suite.core import kron as core_kron
from suite.core._namespace import lift
from suite.core.rounding import stochastic_round
from suite.core.step_size import Clip, clipped, normalized


class StepSettings(NamedTuple):
    """What one step of a group needs to know."""

    step: int
    b1: float
    update: bool  # whether factors are due
    preconditioner_lr: float
    whiten: str
    update_first: bool
    clip: Clip
    normalize_grads: bool
    stochastic_rounding: bool


class Pairs(NamedTuple):
    """Random vectors and the Hessian's products with them, like the parameters."""

    vectors: list[torch.Tensor]
    products: list[torch.Tensor]


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
        settings: StepSettings,
        pairs: Pairs | None = None,
    ) -> list[torch.Tensor | None]:
        """Absorb gradients and return directions; where not `finite`, zero directions and no change.

        With `pairs` the factors are fitted to them and not to the gradients.
        """
        if settings.normalize_grads:
            gradients = [None if g is None else normalized(g, g.ndim) for g in gradients]
        stacks = self._split(gradients)
        present = [stack is not None for stack in stacks]
        of_pairs = None if pairs is None else (self._split(pairs.vectors), self._split(pairs.products))
        for i, bucket in enumerate(self.buckets):
            here = [present[member.index] for member in bucket.members]
            if not any(here):
                continue
            keep = self._keep(i, here, finite)
            gradient = self._gather(i, stacks)
            signal = self._absorb(i, gradient, keep, settings)
            evidence, vector = (gradient if settings.whiten == "gradient" else signal), None
            if of_pairs is not None:
                vector, evidence = (self._gather(i, parts) for parts in of_pairs)
            if not settings.update_first:
                direction = self._precondition(i, self.packs[i].kron, signal, settings)
            state = self.packs[i].kron
            if settings.update:
                state = self._fit(i, evidence, vector, settings)
            if settings.update_first:
                direction = self._precondition(i, state, signal, settings)
            if settings.update:
                _write(self.packs[i].kron, state, keep)
            condition = keep.reshape(-1, *(1,) * (signal.ndim - 1)) if keep.ndim else keep
            buckets.scatter(bucket, torch.where(condition, direction, 0.0), stacks)
        return [
            None if gradient is None else blocks.merge(plan, [stacks[place] for place in places])
            for gradient, plan, places in zip(gradients, self.plans, self.stack_of, strict=True)
        ]

    def _split(self, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
        stacks: list[Any] = [None] * self.stacks
        for tensor, plan, places in zip(tensors, self.plans, self.stack_of, strict=True):
            if tensor is not None:
                for place, stack in zip(places, blocks.split(plan, tensor), strict=True):
                    stacks[place] = stack
        return stacks

    def _keep(self, i: int, here: list[bool], finite: torch.Tensor) -> torch.Tensor:
        """Whether blocks may change: () or (blocks,)."""
        if all(here):
            return finite
        spans = [m.stop - m.start for m in self.buckets[i].members]
        flags = [flag for flag, n in zip(here, spans, strict=True) for _ in range(n)]
        return finite & torch.tensor(flags, device=self.packs[i].momentum.device)

    def _gather(self, i: int, stacks: list[Any]) -> torch.Tensor:
        """The bucket's part of `stacks`, zeros for what is missing."""
        momentum = self.packs[i].momentum
        filled = {
            m.index: torch.zeros_like(momentum[m.start : m.stop])
            for m in self.buckets[i].members
            if stacks[m.index] is None
        }
        if filled:
            stacks = [filled.get(place, stack) for place, stack in enumerate(stacks)]
        return buckets.gather(self.buckets[i], stacks)

    def _noise(self, i: int, use: int, shape: torch.Size, settings: StepSettings) -> torch.Tensor:
        return noise.draw(self.packs[i].streams, settings.step, use, tuple(shape[1:]), torch.float32)

    def _absorb(
        self, i: int, gradient: torch.Tensor, keep: torch.Tensor, settings: StepSettings
    ) -> torch.Tensor:
        """Momentum with this gradient in it, unbiased."""
        pack = self.packs[i]
        old = pack.momentum
        if settings.stochastic_rounding:
            wide = moments.update_average(lift(old), gradient, settings.b1)
            unit = self._noise(i, noise.MOMENTUM, old.shape, settings)
            momentum = stochastic_round(wide, unit, old.dtype)
        else:
            momentum = moments.update_average(old, gradient, settings.b1)
        weight = moments.update_average(pack.weight, torch.ones_like(pack.weight), settings.b1)
        signal = moments.unbiased(momentum, weight)
        _select(old, momentum, keep)
        _select(pack.weight, weight, keep)
        return signal

    def _fit(
        self, i: int, evidence: torch.Tensor, vector: torch.Tensor | None, settings: StepSettings
    ) -> core_kron.KronState:
        """The bucket's factors after one update."""
        pack = self.packs[i]
        old, dtype = pack.kron, pack.kron.factors[0].dtype
        unit = noise.draw(pack.streams, settings.step, noise.FIT, tuple(evidence.shape[1:]), dtype)
        if settings.stochastic_rounding:
            old = self.rule.lifted(old)
        new = self.rule.update(old, evidence, unit, settings.preconditioner_lr, vector)
        new = self.rule.refresh(new)
        if settings.stochastic_rounding:
            noises = tuple(
                self._noise(i, noise.FACTOR + axis, q.shape, settings)
                for axis, q in enumerate(new.factors)
            )
            new = self.rule.rounded(new, noises, dtype)
        return new

    def _precondition(
        self, i: int, state: core_kron.KronState, signal: torch.Tensor, settings: StepSettings
    ) -> torch.Tensor:
        return clipped(self.rule.precondition(state, signal), settings.clip, signal.ndim - 1)

    def vectors(self, step: int) -> list[torch.Tensor]:
        """Noise like the parameters, for pairs (v, H v); the same in every framework."""
        stacks: list[Any] = [None] * self.stacks
        for bucket, pack in zip(self.buckets, self.packs, strict=True):
            dtype = torch.promote_types(pack.weight.dtype, torch.float32)
            shape = tuple(pack.momentum.shape[1:])
            buckets.scatter(bucket, noise.draw(pack.streams, step, noise.PAIR, shape, dtype), stacks)
        return [
            blocks.merge(plan, [stacks[place] for place in places]).to(parameter.dtype)
            for parameter, plan, places in zip(self.parameters, self.plans, self.stack_of, strict=True)
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
