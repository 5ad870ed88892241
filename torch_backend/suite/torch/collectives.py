"""What ranks tell each other: sums to owners, tensors from where they are to where they are needed.

All communication of this package goes through here, from `step()` and never from hooks, in one order
that every rank derives from the same plan. Tensors travel in flat buckets, one collective for each.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from suite.torch.checks import warn_user

GATHERING = "gathering of its state, for which every rank calls state_dict()"


class Parcel(NamedTuple):
    """A tensor that travels. The same list of parcels, in the same order, is known to every rank."""

    name: str  # of the layer, for errors
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: int  # the rank that has it; in a sum all ranks have a part
    destinations: tuple[int, ...]  # the ranks that get it; in a sum one

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


_MADE: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class _Travelling:
    """A collective under way."""

    work: Any  # torch's handle; None: nothing to wait for
    what: str  # what went wrong if it fails
    unpack: Callable[[], None]

    def arrived(self) -> bool:
        return self.work is None or bool(self.work.is_completed())

    def wait(self) -> None:
        try:
            if self.work is not None:
                self.work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self.what}. The backend says: {error}") from error

    def finish(self) -> None:
        self.wait()
        self.unpack()


class _Summing(NamedTuple):
    """A collective that brings all ranks' parts, and their sum when they are there."""

    work: Any
    parts: torch.Tensor  # (ranks, numbers)
    total: torch.Tensor  # (numbers,)

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.parts, dim=0, out=self.total)


class SameGroup:
    """A process group among settings that are copied: copies share it, a pickle leaves it out."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> SameGroup:
        return self

    def __reduce__(self) -> Any:
        return SameGroup, (None,)


class Ranks:
    """The ranks that train together, as one of them sees the others.

    Args:
        group: a process group; None: the default one, or this process alone if there is none.
        bucket_mb: parcels travel in buckets of at most about so many megabytes; 0: one by one.
        alone: this process alone, whatever there is.
    """

    shortcut = True  # a group of one rank runs no collectives; tests of a backend have it run them

    def __init__(
        self, group: dist.ProcessGroup | None = None, bucket_mb: float = 25.0, *, alone: bool = False
    ) -> None:
        started = dist.is_available() and dist.is_initialized() and not alone
        # A number stands for a group of which this process is no member.
        if dist.is_available() and not isinstance(group, dist.ProcessGroup | int | None):
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup, as mesh['dp'].get_group() is, "
                f"got {type(group).__name__}"
            )
        self.group = group
        self.world = dist.get_world_size(group) if started else 1
        self.rank = dist.get_rank(group) if started else 0
        self._may_be_joined = not (started or alone)
        self.alone = not started or (self.world == 1 and self.shortcut)
        if self.rank < 0:
            raise ValueError("process_group must have this process as a member, got one without it")
        self.bucket_bytes = bucket_mb * 2**20
        self.bytes_sent: dict[str, int] = {}  # by phase, by this rank to others
        self.collectives: dict[str, int] = {}  # by phase
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}  # None: not in it
        self.device = torch.device("cpu")  # what the group's backend moves
        if not self.alone and "nccl" in str(dist.get_backend(group)):
            self.device = torch.device("cuda", torch.cuda.current_device())

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        return Ranks, (None, self.bucket_bytes / 2**20)

    def require_current(self, what: str) -> None:
        """RuntimeError where torch.distributed was initialized anew, with other ranks.

        Says once that it was initialized later: each process would go its own way.
        """
        if not self.alone and self.group is None and dist.get_world_size() != self.world:
            raise RuntimeError(
                f"torch.distributed was initialized anew, with {dist.get_world_size()} ranks for "
                f"{self.world}: make the {what} anew, and load its state"
            )
        if self._may_be_joined and dist.is_available() and dist.is_initialized():
            self._may_be_joined = False
            if dist.get_world_size() > 1:
                warn_user(
                    f"torch.distributed was initialized after the {what} was made, which takes this "
                    f"process to be alone: make the {what} afterwards"
                )

    def total(self, vector: torch.Tensor, phase: str) -> torch.Tensor:
        """The sum over all ranks, on the device of `vector`."""
        if self.alone:
            return vector
        moved = vector.to(self.device, copy=True)
        self._count(phase, 2 * moved.nbytes * (self.world - 1) // self.world)
        self._start(phase, (), lambda: dist.all_reduce(moved, group=self.group, async_op=True)).wait()
        return moved.to(vector.device)

    def gather(self, item: Any, phase: str) -> list[Any]:
        """Everyone's `item`, any that can be pickled, by rank."""
        if self.alone:
            return [item]
        found: list[Any] = [None] * self.world
        self._count(phase, 0)

        def run() -> None:
            dist.all_gather_object(found, item, group=self.group)

        self._start(phase, (), run)
        return found

    def sum_to_owners(
        self,
        parcels: Sequence[Parcel],
        part: Callable[[int], torch.Tensor | None],
        device_of: Callable[[int], torch.device],
        phase: str,
    ) -> dict[int, torch.Tensor]:
        """Sum every parcel over all ranks; its destination gets the sum.

        Args:
            parcels: with one destination each.
            part: parcel number -> this rank's part; None stands for zeros.
            device_of: parcel number -> where the sum is wanted.
            phase: for errors and counts.

        Returns:
            By number, the sums that are for this rank.
        """
        sums: dict[int, torch.Tensor] = {}
        if self.alone:
            for i, parcel in enumerate(parcels):
                given = part(i)
                sums[i] = torch.zeros(parcel.shape, dtype=parcel.dtype) if given is None else given
            return sums

        def start(bucket: list[int]) -> _Travelling:
            dtype = parcels[bucket[0]].dtype
            by_owner: list[list[int]] = [[] for _ in range(self.world)]
            for i in bucket:
                by_owner[parcels[i].destinations[0]].append(i)
            flats = []
            for numbers in by_owner:
                pieces = [torch.zeros(1, dtype=dtype, device=self.device)]  # no part is empty
                for i in numbers:
                    given = part(i)
                    if given is None:
                        given = torch.zeros(parcels[i].shape, dtype=dtype, device=self.device)
                    pieces.append(given.to(device=self.device, dtype=dtype).reshape(-1))
                flats.append(torch.cat(pieces))
            mine = torch.empty_like(flats[self.rank])
            sent = sum(x.nbytes for r, x in enumerate(flats) if r != self.rank)
            self._count(phase, sent)
            names = [parcels[i].name for i in bucket]

            def unpack() -> None:
                start = 1
                for i in by_owner[self.rank]:
                    parcel = parcels[i]
                    found = mine[start : start + parcel.numel].reshape(parcel.shape)
                    sums[i] = found.to(device_of(i))
                    start += parcel.numel

            return self._start(
                phase,
                names,
                lambda: self._reduce_scatter(mine, flats),
                unpack,
            )

        # All has been computed: two at a time keep copies few.
        self._pipeline(self._buckets(parcels), start, at_once=2)
        return sums

    def send(
        self,
        parcels: Sequence[Parcel],
        content: Callable[[int], torch.Tensor],
        device_of: Callable[[int], torch.device],
        phase: str,
    ) -> dict[int, torch.Tensor]:
        """Bring every parcel from its source to its destinations.

        Args:
            content: parcel number -> the tensor, asked of the source only, when its bucket leaves:
                what is computed then is computed while the buckets before it travel.

        Returns:
            By number, the tensors that are for this rank and come from another.
        """
        received: dict[int, torch.Tensor] = {}
        travelling = [i for i, p in enumerate(parcels) if any(d != p.source for d in p.destinations)]
        if self.alone or not travelling:
            return received

        def start(bucket: list[int]) -> _Travelling:
            if bucket[0] in large:
                return self._broadcast(bucket[0], parcels[bucket[0]], content, arrive, phase)
            outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.world)]
            incoming: list[list[int]] = [[] for _ in range(self.world)]
            dtype = parcels[bucket[0]].dtype
            for i in bucket:
                parcel = parcels[i]
                if parcel.source == self.rank:
                    flat = content(i).to(device=self.device, dtype=dtype).reshape(-1)
                    for other in parcel.destinations:
                        if other != self.rank:
                            outgoing[other].append(flat)
                elif self.rank in parcel.destinations:
                    incoming[parcel.source].append(i)
            sizes_out = [sum(x.numel() for x in pieces) for pieces in outgoing]
            sizes_in = [sum(parcels[i].numel for i in numbers) for numbers in incoming]
            empty = torch.empty(0, dtype=dtype, device=self.device)
            given = torch.cat([empty, *(x for pieces in outgoing for x in pieces)])
            taken = empty.new_empty(sum(sizes_in))
            self._count(phase, given.nbytes)

            def unpack() -> None:
                at = 0
                for i in (i for numbers in incoming for i in numbers):
                    arrive(i, taken[at : at + parcels[i].numel])
                    at += parcels[i].numel

            return self._start(
                phase,
                [parcels[i].name for i in bucket],
                lambda: dist.all_to_all_single(
                    taken, given, sizes_in, sizes_out, group=self.group, async_op=True
                ),
                unpack,
            )

        def arrive(i: int, flat: torch.Tensor) -> None:
            received[i] = flat.reshape(parcels[i].shape).to(device_of(i))

        large = {i for i in travelling if self._is_large(parcels[i])}
        rounds = [[i] for i in travelling if i in large]
        rounds += self._buckets(parcels, [i for i in travelling if i not in large])
        self._pipeline(rounds, start)
        return received

    def _broadcast(
        self,
        number: int,
        parcel: Parcel,
        content: Callable[[int], torch.Tensor],
        arrive: Callable[[int, torch.Tensor], None],
        phase: str,
    ) -> _Travelling:
        """A parcel too large to be copied for each of its destinations."""
        here = parcel.source == self.rank
        if not here and self.rank not in parcel.destinations:
            return _Travelling(None, "", _nothing)
        if here:
            flat = content(number).to(device=self.device, dtype=parcel.dtype).reshape(-1).contiguous()
        else:
            flat = torch.empty(parcel.numel, dtype=parcel.dtype, device=self.device)
        self._count(phase, flat.nbytes if here else 0)
        source = parcel.source if self.group is None else dist.get_global_rank(self.group, parcel.source)
        everyone = tuple(sorted({parcel.source, *parcel.destinations}))
        group = self.group if len(everyone) == self.world else self._groups[everyone]
        return self._start(
            phase,
            [parcel.name],
            lambda: dist.broadcast(flat, src=source, group=group, async_op=True),
            _nothing if here else lambda: arrive(number, flat),
        )

    def build_groups(self, partitions: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """Make process groups, once, in which large parcels can be broadcast.

        Args:
            partitions: of the ranks into groups; the same, and called, on all of them.
        """
        for ranks in (ranks for partition in partitions for ranks in partition):
            key = tuple(sorted(ranks))
            if not 1 < len(key) < self.world or key in self._groups:
                continue
            self._groups[key] = None
            if self.rank in key:
                names = [r if self.group is None else dist.get_global_rank(self.group, r) for r in key]
                made = _made_of(dist.group.WORLD if self.group is None else self.group)
                if key not in made:
                    timeout = _timeout_of(self.group, self.device)
                    made[key] = dist.new_group(names, timeout=timeout, use_local_synchronization=True)
                self._groups[key] = made[key]

    def _is_large(self, parcel: Parcel) -> bool:
        """Whether to broadcast it: in a bucket it would be copied for each of its destinations."""
        everyone = tuple(sorted({parcel.source, *parcel.destinations}))
        copies = len(everyone) - 1
        if copies < 2 or parcel.numel * parcel.dtype.itemsize * copies <= self.bucket_bytes:
            return False
        return len(everyone) == self.world or everyone in self._groups

    def _buckets(
        self, parcels: Sequence[Parcel], chosen: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Parcel numbers, cut where a bucket is full; one dtype in each."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i in range(len(parcels)) if chosen is None else chosen:
            by_dtype.setdefault(parcels[i].dtype, []).append(i)
        found: list[list[int]] = []
        for dtype, numbers in by_dtype.items():
            room = -1.0
            for i in numbers:
                size = parcels[i].numel * dtype.itemsize
                if size > room:
                    found.append([])
                    room = self.bucket_bytes
                found[-1].append(i)
                room -= size
        return found

    def _pipeline(
        self,
        rounds: list[list[int]],
        start: Callable[[list[int]], _Travelling],
        at_once: int | None = None,
    ) -> None:
        """Buckets travel while the next are computed and packed; what has arrived is unpacked.

        Args:
            at_once: how many may travel; None: any number, so that no rank waits for what others still
                compute before all it has itself is on its way.
        """
        travelling: deque[_Travelling] = deque()
        for bucket in rounds:
            travelling.append(start(bucket))
            while travelling and (len(travelling) == at_once or travelling[0].arrived()):
                travelling.popleft().finish()
        for one in travelling:
            one.finish()

    def _start(
        self,
        phase: str,
        names: Sequence[str],
        run: Callable[[], Any],
        unpack: Callable[[], None] = _nothing,
    ) -> _Travelling:
        """Run a collective; what it or waiting for it raises says what it was for."""
        where = f" (layers {names[0]!r} to {names[-1]!r})" if names else ""
        what = (
            f"{phase}{where} failed on rank {self.rank} of {self.world}: another rank died, or stalled "
            "past the process group's timeout, or did not take this step"
        )
        try:
            return _Travelling(run(), what, unpack)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"{what}. The backend says: {error}") from error

    def _reduce_scatter(self, mine: torch.Tensor, flats: list[torch.Tensor]) -> Any:
        """Into `mine` the sum of what ranks have for this one; gloo of torch 2.6 can only send it."""
        try:
            return dist.reduce_scatter(mine, flats, group=self.group, async_op=True)
        except RuntimeError as error:
            if "does not support reduce_scatter" not in str(error):
                raise
        parts, sizes = mine.new_empty(self.world, mine.numel()), [x.numel() for x in flats]
        arriving, equal = parts.view(-1), [mine.numel()] * self.world
        work = dist.all_to_all_single(
            arriving, torch.cat(flats), equal, sizes, group=self.group, async_op=True
        )
        return _Summing(work, parts, mine)

    def _count(self, phase: str, sent: int) -> None:
        self.bytes_sent[phase] = self.bytes_sent.get(phase, 0) + sent
        self.collectives[phase] = self.collectives.get(phase, 0) + 1


def _made_of(group: Any) -> dict[tuple[int, ...], Any]:
    """The groups of some of its ranks so far, by these: each has threads, and nobody takes it off."""
    made: dict[tuple[int, ...], Any] = _MADE.setdefault(group, {})
    return made


def _timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """How long the collectives of a group wait; no public question exists."""
    try:
        own: Any = dist.group.WORLD if group is None else group
        options = own._get_backend(device).options
    except (AttributeError, RuntimeError):
        return None
    return getattr(options, "_timeout", None)
