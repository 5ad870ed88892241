"""Who computes what: K-FAC's factors and directions spread over the ranks of a job.

KAISA (Pauloski et al. 2021, arXiv:2107.01739, section 3) arranges W ranks as a grid. A layer has g
*gradient workers*, one column of the grid, which hold its inverses and compute its direction; in every
row one of them sends the direction to the others of the row, the *receivers*. With g = W (COMM_OPT)
every rank has all inverses and no direction travels; with g = 1 (MEM_OPT) no inverse travels and every
rank holds its own share only; HYBRID_OPT is between. One gradient worker is each factor's *owner*: it
averages the factor and inverts it.

Everything here is a function of integers, so that all ranks come to the same plan without talking.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from suite.core.checks import check_choice, check_integer, check_number

AssignmentStrategy = Literal["compute", "memory"]


class LayerShape(NamedTuple):
    """What a layer's factors cost: `blocks` of sides (d_in, d_out), dense or diagonal."""

    sizes: tuple[int, int]
    diagonal: tuple[bool, bool] = (False, False)
    blocks: int = 1

    def elements(self, side: str, *, packed: bool = False) -> int:
        """Numbers in a factor; `packed`: in one triangle of each of its matrices."""
        at = 0 if side == "A" else 1
        n = self.sizes[at]
        if self.diagonal[at]:
            return self.blocks * n
        return self.blocks * (n * (n + 1) // 2 if packed else n * n)

    def cost(self, side: str, strategy: AssignmentStrategy) -> int:
        """What its owner takes on: n³ to factorize it, or its n² numbers."""
        at = 0 if side == "A" else 1
        if self.diagonal[at] or strategy == "memory":
            return self.elements(side)
        return self.blocks * self.sizes[at] ** 3


@dataclass(frozen=True)
class Placement:
    """A plan for `world` ranks. Layers are numbered as they were given."""

    world: int
    workers: int  # gradient workers of every layer, g
    group_of: tuple[int, ...]  # by layer, the number of its worker group
    owner_of: Mapping[tuple[int, str], int]  # by (layer, 'A' or 'G'); a shared A's by its leader only
    loads: tuple[int, ...]  # by rank, the cost of what it owns

    @property
    def groups(self) -> int:
        """How many worker groups there are; also the number of ranks in a receiver group."""
        return self.world // self.workers

    @property
    def worker_groups(self) -> tuple[tuple[int, ...], ...]:
        """The grid's columns: each layer's inverses are in one of them. They partition the ranks."""
        return tuple(tuple(range(g, self.world, self.groups)) for g in range(self.groups))

    @property
    def receiver_groups(self) -> tuple[tuple[int, ...], ...]:
        """The grid's rows, of neighbouring ranks: directions travel inside of one at every step."""
        return tuple(tuple(range(row, row + self.groups)) for row in range(0, self.world, self.groups))

    @property
    def makespan(self) -> int:
        """The cost of the rank that owns most."""
        return max(self.loads)

    def workers_of(self, layer: int) -> tuple[int, ...]:
        """The ranks that hold a layer's inverses and compute its direction."""
        return self.worker_groups[self.group_of[layer]]

    def is_worker(self, layer: int, rank: int) -> bool:
        """Whether `rank` has the inverses of `layer`."""
        return rank % self.groups == self.group_of[layer]

    def source(self, layer: int, rank: int) -> int:
        """The gradient worker in `rank`'s row, which has the direction of `layer` for it."""
        return rank // self.groups * self.groups + self.group_of[layer]


def gradient_workers(world: int, fraction: float) -> int:
    """How many of `world` ranks compute each layer's direction.

    Args:
        world: W >= 1.
        fraction: in [0, 1]; anything up to 1/W means one rank.

    Raises:
        ValueError: groups of that size would not partition the world; says which fractions do.
    """
    check_integer("world", world, at_least=1)
    check_number("gradient_worker_fraction", fraction, at_least=0, at_most=1)
    exact = max(1.0, world * fraction)
    workers = round(exact)
    if abs(exact - workers) > 1e-6 * world or world % workers:
        fitting = ", ".join(f"{n}/{world}" for n in range(1, world + 1) if world % n == 0)
        raise ValueError(
            f"gradient_worker_fraction must divide {world} ranks into equal groups, got {fraction}: "
            f"one of {fitting} would"
        )
    return workers


def plan_placement(
    layers: Sequence[LayerShape],
    world: int,
    workers: int,
    *,
    strategy: AssignmentStrategy = "compute",
    colocate_factors: bool = True,
    input_of: Mapping[int, int] | None = None,
    together: Sequence[Sequence[int]] = (),
) -> Placement:
    """Spread factors over ranks so that the busiest has as little as possible.

    Longest processing time first (Graham 1969, within 4/3 of the optimum for independent jobs), then
    single moves and exchanges away from the busiest rank while they help.

    Args:
        layers: their shapes.
        world: number of ranks W.
        workers: gradient workers of each layer, a divisor of W.
        strategy: 'compute' balances the cost n³ of factorizations, 'memory' the size n² of factors.
        colocate_factors: give all factors of a layer to one owner.
        input_of: layer -> the layer whose A is its A, too.
        together: sets of layers that must have the same gradient workers.

    Raises:
        ValueError: workers that do not divide the world; one worker with factors that are not colocated.
    """
    check_integer("world", world, at_least=1)
    check_integer("workers", workers, at_least=1)
    check_choice("strategy", strategy, ("compute", "memory"))
    if world % workers:
        raise ValueError(f"workers must divide world={world}, got {workers}")
    if workers == 1 and world > 1 and not colocate_factors:
        raise ValueError(
            "colocate_factors must be True with one gradient worker per layer (MEM_OPT), which needs "
            "both factors of a layer in one place, got False"
        )
    input_of = dict(input_of or {})
    units = _units(len(layers), [*together, *([i, j] for i, j in input_of.items())])
    jobs = _jobs(layers, units, input_of, strategy, colocate_factors)
    groups = world // workers
    members = [tuple(range(g, world, groups)) for g in range(groups)]
    group_of_unit = _spread_units(jobs, len(units), members)
    schedule = _Schedule(world, members, jobs, group_of_unit)
    schedule.improve()
    unit_of = {layer: number for number, unit in enumerate(units) for layer in unit}
    return Placement(
        world,
        workers,
        tuple(schedule.group_of_unit[unit_of[i]] for i in range(len(layers))),
        {
            factor: rank
            for job, rank in zip(jobs, schedule.rank_of, strict=True)
            for factor in job.factors
        },
        tuple(schedule.loads),
    )


def plan_owners(costs: Sequence[int], world: int, loads: Sequence[int] = ()) -> list[int]:
    """A rank for each of some independent jobs, so that the busiest has as little as possible.

    Args:
        costs: of the jobs.
        world: number of ranks.
        loads: what each rank has to do already; none: nothing.
    """
    check_integer("world", world, at_least=1)
    jobs = [_Job(cost, number, ((number, ""),)) for number, cost in enumerate(costs)]
    schedule = _Schedule(world, [tuple(range(world))], jobs, [0] * len(jobs), loads)
    schedule.improve()
    return schedule.rank_of


def makespan_bound(costs: Sequence[int], world: int) -> int:
    """A makespan that no assignment of jobs of these costs to `world` ranks can beat.

    Not below the largest job, nor the mean load; and of the k W + 1 largest jobs some rank gets k + 1.
    """
    ordered = sorted(costs, reverse=True)
    bound = max(ordered[0], -(-sum(ordered) // world))
    for k in range(1, (len(ordered) - 1) // world + 1):
        last = k * world  # the (k W + 1)-th job
        bound = max(bound, sum(ordered[last - k : last + 1]))
    return bound


class _Job(NamedTuple):
    cost: int
    unit: int
    factors: tuple[tuple[int, str], ...]


def _units(layers: int, together: Sequence[Sequence[int]]) -> list[list[int]]:
    """Layers that must have the same workers, joined."""
    leader = list(range(layers))

    def find(i: int) -> int:
        while leader[i] != i:
            i = leader[i]
        return i

    for group in together:
        first = find(group[0])
        for i in group[1:]:
            leader[max(first, find(i))] = first = min(first, find(i))
    found: dict[int, list[int]] = {}
    for i in range(layers):
        found.setdefault(find(i), []).append(i)
    return list(found.values())


def _jobs(
    layers: Sequence[LayerShape],
    units: Sequence[Sequence[int]],
    input_of: Mapping[int, int],
    strategy: AssignmentStrategy,
    colocate: bool,
) -> list[_Job]:
    jobs = []
    for number, unit in enumerate(units):
        together: dict[int, list[tuple[int, str]]] = {}  # by the layer that leads a shared A
        for i in unit:
            mine = together.setdefault(input_of.get(i, i), [])
            mine += [(i, side) for side in ("A", "G") if side == "G" or i not in input_of]
        for factors in together.values():
            costs = [layers[i].cost(side, strategy) for i, side in factors]
            if colocate:
                jobs.append(_Job(sum(costs), number, tuple(factors)))
            else:
                jobs += [_Job(c, number, (f,)) for c, f in zip(costs, factors, strict=True)]
    return jobs


def _spread_units(jobs: Sequence[_Job], units: int, members: Sequence[Sequence[int]]) -> list[int]:
    """Worker groups of equal total cost."""
    costs = [0] * units
    for job in jobs:
        costs[job.unit] += job.cost
    heap = [(0, group) for group in range(len(members))]
    group_of = [0] * units
    for unit in sorted(range(units), key=lambda u: (-costs[u], u)):
        load, group = heapq.heappop(heap)
        group_of[unit] = group
        heapq.heappush(heap, (load + costs[unit], group))
    return group_of


class _Schedule:
    """Jobs on ranks, inside of their unit's worker group."""

    def __init__(
        self,
        world: int,
        members: Sequence[tuple[int, ...]],
        jobs: Sequence[_Job],
        group_of_unit: list[int],
        loads: Sequence[int] = (),
    ) -> None:
        self.members, self.jobs, self.group_of_unit = members, jobs, group_of_unit
        self.before = list(loads) or [0] * world
        self.loads = list(self.before)
        self.rank_of = [0] * len(jobs)
        for group in range(len(members)):
            self._fill(group)

    def _fill(self, group: int) -> None:
        """Longest processing time first inside of one group."""
        ranks = self.members[group]
        for rank in ranks:
            self.loads[rank] = self.before[rank]
        heap = [(self.loads[rank], rank) for rank in ranks]
        heapq.heapify(heap)
        own = [i for i, job in enumerate(self.jobs) if self.group_of_unit[job.unit] == group]
        for i in sorted(own, key=lambda i: (-self.jobs[i].cost, i)):
            load, rank = heapq.heappop(heap)
            self.rank_of[i] = rank
            self.loads[rank] = load + self.jobs[i].cost
            heapq.heappush(heap, (self.loads[rank], rank))

    def improve(self) -> None:
        """Take work off the busiest rank while that lowers the makespan or the number at it."""
        while self._relieve() or self._move_unit():
            pass

    def _relieve(self) -> bool:
        """Move a job of the busiest rank, or exchange it, inside of the group."""
        busiest = max(range(len(self.loads)), key=lambda r: (self.loads[r], -r))
        peers = self.members[busiest % len(self.members)]
        mine = [i for i, rank in enumerate(self.rank_of) if rank == busiest]
        top = self.loads[busiest]
        on: dict[int, list[int]] = {rank: [] for rank in peers}
        for i, rank in enumerate(self.rank_of):
            if rank in on:
                on[rank].append(i)
        for rank in sorted(peers, key=lambda r: (self.loads[r], r)):
            if rank == busiest:
                continue
            for i in mine:
                for j in (None, *on[rank]):
                    gain = self.jobs[i].cost - (0 if j is None else self.jobs[j].cost)
                    if gain > 0 and self.loads[rank] + gain < top:
                        self._put(i, rank)
                        if j is not None:
                            self._put(j, busiest)
                        return True
        return False

    def _put(self, job: int, rank: int) -> None:
        self.loads[self.rank_of[job]] -= self.jobs[job].cost
        self.loads[rank] += self.jobs[job].cost
        self.rank_of[job] = rank

    def _move_unit(self) -> bool:
        """Give a unit of the busiest group to the idlest one, if that lowers the higher makespan."""
        if len(self.members) == 1:
            return False
        makespans = [max(self.loads[r] for r in ranks) for ranks in self.members]
        totals = [sum(self.loads[r] for r in ranks) for ranks in self.members]
        busiest = max(range(len(makespans)), key=lambda g: (makespans[g], -g))
        idlest = min(range(len(totals)), key=lambda g: (totals[g], g))
        units = [u for u, group in enumerate(self.group_of_unit) if group == busiest]
        before = list(self.loads), list(self.rank_of)
        for unit in units:
            self.group_of_unit[unit] = idlest
            self._fill(busiest)
            self._fill(idlest)
            now = max(self.loads[r] for g in (busiest, idlest) for r in self.members[g])
            if now < makespans[busiest]:
                return True
            self.group_of_unit[unit] = busiest
            self.loads, self.rank_of = list(before[0]), list(before[1])
        return False
