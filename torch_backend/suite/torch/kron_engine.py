"""The state of PSGD Kron over the parameters of one param group: momentum and factors, in buckets.

The tensors of a bucket are stacked. What a parameter's state holds are views of them, so that state
stays per parameter (`state_dict`, `load_state_dict`) while each step is a few calls for all of them
(kron_steps.py).

Over several ranks either all of them do the same, or each has a share of the blocks (kron_shares.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from suite.core import blocks, buckets, noise
from suite.core import kron as core_kron
from suite.torch.collectives import Ranks
from suite.torch.kron_rounds import Piece, extent, plan_rounds
from suite.torch.kron_shares import Share, ShareExchange, loads_of, plan_shares
from suite.torch.kron_storage import KronStorage


class Pack(NamedTuple):
    """The state of one bucket, stacked over its blocks."""

    momentum: torch.Tensor  # (blocks, *sizes)
    weight: torch.Tensor  # (blocks,), how much evidence the momentum holds
    kron: core_kron.KronState  # as the engine's storage keeps it
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
        packed_factors: bool,
        cache_preconditioner: bool | None,
        ranks: Ranks,
        shard: bool,
        loads: Mapping[int, int],  # by rank, what its blocks of other groups cost
    ) -> None:
        self.parameters, self.ranks = parameters, ranks
        self.like = [_like(p) for p in parameters]
        self.rule = rule
        self.storage = KronStorage(rule.factor_form, packed_factors, cache_preconditioner)
        self.mu_dtype, self.precond_dtype = mu_dtype, precond_dtype
        self.devices = [p.device for p in parameters]  # which they may leave
        self.dtypes = [p.dtype for p in self.like]  # which they may leave, too, and state does not
        self.plans = [blocks.plan_blocks(p.shape, structure) for p in self.like]
        self.shares = plan_shares(self.like, self.plans, ranks, shard, loads)
        self.exchange = ShareExchange(self.like, self.plans, self.shares, ranks, shard)
        own = [i for i, share in enumerate(self.shares) if share.owner == ranks.rank]
        self.buckets = tuple(  # of the shares that are here, by their number
            buckets.Bucket(b.key, tuple(replace(m, index=own[m.index]) for m in b.members))
            for b in buckets.plan_buckets([self._stack(self.shares[i]) for i in own])
        )
        whole = {
            i for i in own if self.exchange.is_local and self.plans[self.shares[i].parameter].is_whole
        }
        self.rounds = plan_rounds(self.buckets, whole)
        self.extents = [extent(self.buckets, pieces) for pieces in self.rounds]
        plain = (piece for pieces in self.rounds for piece in pieces if piece.plain)
        self.plain = {i for piece in plain for i, _ in piece.parts}  # neither cut nor joined again
        self.complete = self._complete() if self.exchange.is_local else None
        self.places = {m.index: (i, m) for i, bucket in enumerate(self.buckets) for m in bucket.members}
        streams = [
            _by_tile(plan, noise.stream_numbers(number, plan.blocks, seed))
            for number, plan in zip(numbers, self.plans, strict=True)
        ]
        self.packs: list[Pack] = []
        for bucket in self.buckets:
            shares = [self.shares[member.index] for member in bucket.members]
            of_blocks = [n for s in shares for n in streams[s.parameter][s.tile][s.start : s.stop]]
            pack = self._new_pack(bucket.key, bucket.blocks, of_blocks)
            self.packs.append(pack._replace(kron=self.storage.keep(pack.kron)))

    def loads(self) -> Counter[int]:
        """By rank, what its blocks cost."""
        return loads_of(self.shares, self.plans)

    def _complete(self) -> list[list[int]]:
        """The parameters all of whose blocks are done after a round, and not before it."""
        last: dict[int, int] = {}
        for number, pieces in enumerate(self.rounds):
            for piece in pieces:
                last |= {self.shares[i].parameter: number for i, _ in piece.parts}
        return [[i for i, when in last.items() if when == number] for number in range(len(self.rounds))]

    def _stack(self, share: Share) -> tuple[Any, int]:
        """(what blocks of one bucket have in common, number of blocks)"""
        parameter, plan = self.like[share.parameter], self.plans[share.parameter]
        tile = plan.tiles[share.tile]
        return _kind(tile, plan, parameter.dtype, parameter.device), share.stop - share.start

    def _new_pack(self, key: Any, count: int, streams: list[int]) -> Pack:
        sizes, diagonal, diagonal_blocks, dtype, device = key
        wide = torch.promote_types(dtype, torch.float32)
        like = torch.empty(0, dtype=self.precond_dtype or wide, device=device)
        kron = self.rule.init(like, (count, *sizes), diagonal, diagonal_blocks)
        # A geometry of P may have one array for both; but state is changed in place, and the rule, too.
        own = tuple(p.clone() if self.rule.fits_P else p for p in kron.preconditioners)
        return Pack(
            torch.zeros((count, *sizes), dtype=self.mu_dtype or _momentum_dtype(dtype), device=device),
            torch.zeros(count, dtype=wide, device=device),
            kron._replace(preconditioners=own),
            torch.tensor(streams, dtype=torch.int32, device=device),
        )

    def merged(self, parameter: int, found: list[list[torch.Tensor]]) -> torch.Tensor:
        """A parameter's direction out of what was found of its shares, which is used up."""
        shares = self.exchange.shares_of[parameter]
        if shares[0] in self.plain:
            return found[shares[0]].pop()
        return self.exchange.merged(parameter, [used_up(found[i]) for i in shares])

    def pack(self, piece: Piece) -> Pack:
        """The piece's part of its bucket, as views."""
        pack, bucket = self.packs[piece.bucket], self.buckets[piece.bucket]
        if piece.stop - piece.start == bucket.blocks:
            return pack
        part = slice(piece.start, piece.stop)
        kron = core_kron.KronState(*(tuple(x[part] for x in own) for own in pack.kron))
        return Pack(pack.momentum[part], pack.weight[part], kron, pack.streams[part])

    def split(self, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
        """By share, as `gathered` takes them; None for those of others and where there is no tensor."""
        stacks: list[Any] = [None] * len(self.shares)
        cut: dict[int, list[torch.Tensor]] = {}
        for i in self.places:
            share = self.shares[i]
            tensor = tensors[share.parameter]
            if tensor is None or i in self.plain:
                stacks[i] = tensor
                continue
            if share.parameter not in cut:
                cut[share.parameter] = blocks.split(self.plans[share.parameter], tensor)
            stack = cut[share.parameter][share.tile]
            whole = share.stop - share.start == stack.shape[0]
            stacks[i] = stack if whole else stack[share.start : share.stop]
        return stacks

    def within_reach(self, index: int, evidence: torch.Tensor) -> torch.Tensor:
        """A gradient, or product with the Hessian, in single precision where some of the state is."""
        x = as_real(evidence)
        if x.dtype != torch.float64:
            return x
        dtype = self.dtypes[index]
        wide = torch.promote_types(dtype, torch.float32)
        kept = {self.mu_dtype or _momentum_dtype(dtype), self.precond_dtype or wide}
        return x if kept == {torch.float64} else x.float()

    def vectors(self, step: int) -> list[torch.Tensor]:
        """Noise like the parameters, for pairs (v, H v); the same in every framework."""
        stacks: list[Any] = [None] * len(self.shares)
        for bucket, pack in zip(self.buckets, self.packs, strict=True):
            dtype = torch.promote_types(pack.weight.dtype, torch.float32)
            shape = tuple(pack.momentum.shape[1:])
            buckets.scatter(bucket, noise.draw(pack.streams, step, noise.PAIR, shape, dtype), stacks)
        found = self.exchange.directions([True] * len(self.parameters), stacks)
        return [x.to(p.dtype) for x, p in zip(found, self.parameters, strict=True) if x is not None]

    # ---- state -------------------------------------------------------------------------------------

    def is_left_behind(self) -> bool:
        """Whether the parameters are elsewhere than they were."""
        return any([p.device != d for p, d in zip(self.parameters, self.devices, strict=True)])  # noqa: C419

    def views(self, index: int) -> dict[str, torch.Tensor]:
        """The state of one parameter as far as it is here and as it is kept: views of every bucket."""
        return self._labelled(self._kept(index))

    def whole(self, index: int) -> dict[str, torch.Tensor]:
        """`views` with whole matrices."""
        return self._labelled(self._here_by_share(index))

    def _labelled(self, found: list[tuple[int, dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
        return {
            f"{self._label(self.shares[i])}.{name}": tensor
            for i, tensors in found
            for name, tensor in tensors.items()
        }

    def rows(self, index: int) -> dict[str, torch.Tensor]:
        """`whole`, block by block: names that do not depend on who has which blocks."""
        return {
            f"tile{self.shares[i].tile}.{name}.{self.shares[i].start + row}": tensor[row]
            for i, tensors in self._here_by_share(index)
            for name, tensor in tensors.items()
            for row in range(tensor.shape[0])
        }

    def expected(self, index: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of all state of one parameter, wherever it is."""
        plan, parameter = self.plans[index], self.like[index]
        found = {}
        for number, tile in enumerate(plan.tiles):
            key = _kind(tile, plan, parameter.dtype, torch.device("meta"))
            pack = self._new_pack(key, plan.tile_blocks(tile), [])
            for name, tensor in _named(pack).items():
                found[f"tile{number}.{name}"] = tuple(tensor.shape), tensor.dtype
        return found

    def gathered(self) -> list[dict[str, torch.Tensor]]:
        """All state of every parameter, on every rank; all ranks call it."""
        here = [dict(self._here_by_share(i)) for i in range(len(self.parameters))]
        return self.exchange.gathered(here, [self.expected(i) for i in range(len(self.parameters))])

    def restore(self, index: int, record: Mapping[str, torch.Tensor]) -> None:
        """Take over what is this rank's of `gathered` or `rows`."""
        for i, tensors in self._kept(index):
            share = self.shares[i]
            for name, tensor in tensors.items():
                given = record.get(f"tile{share.tile}.{name}")
                if given is not None:
                    given = given[share.start : share.stop]
                else:
                    rows = range(share.start, share.stop)
                    given = torch.stack([record[f"tile{share.tile}.{name}.{row}"] for row in rows])
                tensor.copy_(self.storage.keep_factor(given) if _is_factor(name) else given)

    def require(self, rule: core_kron.Kron) -> None:
        """ValueError for a rule that takes the factors for something else."""
        if rule.fits_P != self.rule.fits_P:
            kinds = ("Q", "P") if rule.fits_P else ("P", "Q")
            raise ValueError(
                f"geometry must be one whose factors are {kinds[0]}'s while there are such, got "
                f"{rule.geometry!r}, whose are {kinds[1]}'s: delete the state of the group's parameters "
                "to begin anew"
            )
        if rule.factor_form not in ("general", self.rule.factor_form):
            raise ValueError(
                f"geometry must be one for any factors while there are {self.rule.geometry!r}'s, got "
                f"{rule.geometry!r}, whose are {rule.factor_form}: delete the state of the group's "
                "parameters to begin anew"
            )

    def begins_by(self, rule: core_kron.Kron) -> bool:
        """Whether this rule begins with the factors that are here before the first step."""
        now = self.rule
        alike = rule.fits_P == now.fits_P
        return alike and rule.preconditioner_init_scale == now.preconditioner_init_scale

    def begin(self, rule: core_kron.Kron) -> None:
        """Begin anew with all parameters."""
        self.rule = rule
        for index in range(len(self.parameters)):
            self.reset(index)
        self.after_load()

    def reset(self, index: int) -> None:
        """Begin anew with one parameter; `after_load` has to follow."""
        for i, tensors in self._kept(index):
            number, member = self.places[i]
            count = member.stop - member.start
            fresh = self._new_pack(self.buckets[number].key, count, [])
            fresh = fresh._replace(kron=self.storage.keep(fresh.kron))
            for name, tensor in _named(fresh).items():
                tensors[name].copy_(tensor)

    def _here_by_share(self, index: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """What is here of one parameter, by number of its share, in whole matrices."""
        full = self.storage.full_factor
        return [
            (i, {n: full(x) if _is_factor(n) else x for n, x in tensors.items()})
            for i, tensors in self._kept(index)
        ]

    def _kept(self, index: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """Views of what is here of one parameter, by number of its share, as it is kept."""
        found = []
        for i, share in enumerate(self.shares):
            if share.parameter == index and i in self.places:
                number, member = self.places[i]
                tensors = _named(self.packs[number])
                found.append((i, {n: x[member.start : member.stop] for n, x in tensors.items()}))
        return found

    def _label(self, share: Share) -> str:
        plan = self.plans[share.parameter]
        whole = share.stop - share.start == plan.tile_blocks(plan.tiles[share.tile])
        return f"tile{share.tile}" if whole else f"tile{share.tile}.blocks{share.start}"

    @torch.compiler.disable  # it happens once, and torch 2.6 could not compile it
    def after_load(self) -> None:
        """Recompute what follows from loaded state: P = QᵀQ of every factor, as a step does."""
        for pieces in self.rounds:
            self.refreshed(pieces)

    def refreshed(self, pieces: Sequence[Piece]) -> list[tuple[torch.Tensor, ...]]:
        """P = QᵀQ of each of a round's pieces, of its factors where they are kept; they keep it.

        So it does not depend, to the last bit, on what the factors were fitted together with.
        """
        kept, full = [self.pack(piece).kron for piece in pieces], self.storage.full_factor
        whole = [core_kron.KronState(tuple(map(full, q)), L, P) for q, L, P in kept]
        found = [state.preconditioners for state in self.rule.square_all(whole)]
        for own, P in zip(kept, found, strict=True):
            if own.preconditioners:
                news = self.storage.keep_preconditioners(own.factors, P)
                torch._foreach_copy_(own.preconditioners, news)
        return found


def used_up(found: list[torch.Tensor]) -> torch.Tensor | None:
    """What is in a list, joined; None if it is empty, which it is afterwards."""
    joined = None if not found else found[0] if len(found) == 1 else torch.cat(found)
    found.clear()
    return joined


def as_real(x: torch.Tensor) -> torch.Tensor:
    """A view with an axis more, of length 2, of what is complex; what is real as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _like(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape, dtype and device of `as_real` of a parameter, without memory of its own."""
    if not parameter.is_complex():
        return parameter
    zero = torch.zeros((), dtype=parameter.dtype.to_real(), device=parameter.device)
    return zero.expand(*parameter.shape, 2)


def _momentum_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of the parameter, but for float16, in which directions overflow before they are clipped."""
    return torch.float32 if dtype == torch.float16 else dtype


def _kind(tile: blocks.Tile, plan: blocks.BlockPlan, dtype: torch.dtype, device: torch.device) -> Any:
    """What blocks of one bucket have in common."""
    return tile.sizes, plan.diagonal, tile.diagonal_blocks, dtype, device


def _by_tile(plan: blocks.BlockPlan, numbers: Sequence[int]) -> list[list[int]]:
    """The blocks' numbers, for each tile."""
    rest = iter(numbers)
    return [[next(rest) for _ in range(plan.tile_blocks(tile))] for tile in plan.tiles]


def _named(pack: Pack) -> dict[str, torch.Tensor]:
    """What a checkpoint needs of a bucket."""
    tensors = {"momentum": pack.momentum, "weight": pack.weight}
    for axis, (factor, L) in enumerate(zip(pack.kron.factors, pack.kron.lipschitz, strict=True)):
        tensors[f"factor{axis}"] = factor
        tensors[f"lipschitz{axis}"] = L
    return tensors


def _is_factor(name: str) -> bool:
    return name.startswith("factor")
