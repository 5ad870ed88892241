"""Steps of PSGD Kron: momentum, whitening and clipping, round by round and of several groups at once.

Fitting small factors costs calls rather than arithmetic. So they are fitted together, whichever param
groups they are of, where these fit alike, as those do that differ in learning rate or weight decay. (Not
where GraphedStep records: there each group reads numbers of its own.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from suite.core import buckets, moments, noise
from suite.core import kron as core_kron
from suite.core._namespace import Scalar, lift
from suite.core.rounding import stochastic_round
from suite.core.step_size import Clip, clipped, normalized, rms_clip_scale
from suite.torch.inplace import average_in
from suite.torch.kron_engine import KronEngine, Pack, used_up
from suite.torch.kron_rounds import Piece, gathered, joined, spread, which_may_change


class StepSettings(NamedTuple):
    """What one step of a group needs to know."""

    step: Scalar  # as is the factors' rate, a tensor where GraphedStep records
    b1: float
    update: bool  # whether factors are due
    preconditioner_lr: Scalar
    whiten: str
    update_first: bool
    clip: Clip
    normalize_grads: bool
    stochastic_rounding: bool


class Pairs(NamedTuple):
    """Random vectors and the Hessian's products with them, like the parameters."""

    vectors: list[torch.Tensor]
    products: list[torch.Tensor]


class _Work(NamedTuple):
    """What a step does with one piece."""

    piece: Piece
    pack: Pack  # its part of the bucket
    keep: torch.Tensor | None  # whether blocks may change; None: all do
    signal: torch.Tensor
    weight: torch.Tensor | None  # what the signal is still to be divided by
    evidence: torch.Tensor
    vector: torch.Tensor | None
    state: core_kron.KronState  # as it was


class GroupStep:
    """One step of an engine's parameters: absorb gradients and pass directions on.

    Where not `finite`, which the host does not look at, directions are zero and nothing changes.
    None: the host knows that all is finite, which saves copies.

    Args:
        move: called with (parameter, what is here of its direction) each.
        pairs: what the factors are fitted to; None: to the gradients.
        maximize: whether gradients are to be taken with the other sign.
    """

    def __init__(
        self,
        engine: KronEngine,
        gradients: list[torch.Tensor | None],
        finite: torch.Tensor | None,
        settings: StepSettings,
        move: Callable[[list[tuple[int, torch.Tensor]]], None],
        pairs: Pairs | None = None,
        maximize: bool = False,
    ) -> None:
        self.engine, self.settings = engine, settings
        self._gradients, self._finite, self._move = gradients, finite, move
        self._maximize = maximize
        self._present = [gradient is not None for gradient in gradients]
        self._pairs = pairs
        self._stacks: list[Any] = []
        self._of_pairs: tuple[list[Any], ...] = ()
        self._found: list[list[torch.Tensor]] = [[] for _ in engine.shares]

    def begin(self) -> None:
        """Collect gradients and cut them into blocks: copies, which last until the last round."""
        engine = self.engine
        gradients = self._gradients
        if self._maximize:
            gradients = [None if g is None else -g for g in gradients]
        gradients = engine.exchange.whole(gradients)
        if self.settings.normalize_grads:
            gradients = [None if g is None else normalized(g, g.ndim) for g in gradients]
        self._stacks = engine.split(gradients)
        self._filled = [stack is not None for stack in self._stacks]
        self._of_pairs = () if self._pairs is None else tuple(map(engine.split, self._pairs))

    def fits_like(self, other: GroupStep) -> bool:
        """Whether factors of both can be fitted in one call."""
        own, others = self.settings, other.settings
        return (
            self.engine.rule == other.engine.rule
            and own.stochastic_rounding == others.stochastic_rounding
            and (self._pairs is None) == (other._pairs is None)
            and _is_one_number(own.step, others.step)
            and _is_one_number(own.preconditioner_lr, others.preconditioner_lr)
        )

    def prepare(self, number: int) -> list[_Work]:
        """Take the gradients of a round into the momentum of its pieces, as far as there are some."""
        if number == 0:
            self.begin()
        return [
            self._prepared(piece)
            for piece in self.engine.rounds[number]
            if any([self._filled[i] for i, _ in piece.parts])  # noqa: C419
        ]

    def _prepared(self, piece: Piece) -> _Work:
        engine, settings = self.engine, self.settings
        pack = engine.pack(piece)
        keep = which_may_change(piece, self._filled, self._finite, pack.momentum.device)
        gradient = gathered(piece, self._stacks, pack.momentum)
        signal, weight = _absorb(pack, gradient, keep, settings)
        evidence, vector = (gradient if settings.whiten == "gradient" else signal), None
        if self._of_pairs:
            vector, evidence = (gathered(piece, parts, pack.momentum) for parts in self._of_pairs)
        state = engine.storage.full(engine.rule, pack.kron, factors=settings.update)
        if settings.update and not settings.update_first:  # new ones are written before these are used
            own = (state.lipschitz, state.preconditioners)
            L, P = (tuple(x.clone() for x in some) for some in own)
            state = core_kron.KronState(state.factors, L, P)
        return _Work(piece, pack, keep, signal, weight, evidence, vector, state)

    def finish(self, number: int, work: list[_Work], fitted: list[core_kron.KronState] | None) -> None:
        """Precondition a round and keep its new factors, if there are some."""
        engine, settings = self.engine, self.settings
        news: list[Any] = [None] * len(work)
        if fitted is not None:
            for w, new in zip(work, fitted, strict=True):
                kept = tuple(map(engine.storage.keep_factor, new.factors))
                _write(w.pack.kron.factors, kept, w.keep)
                _write(w.pack.kron.lipschitz, new.lipschitz, w.keep)
            squares = engine.refreshed([w.piece for w in work])
            pairs = zip(fitted, squares, strict=True)  # torch 2.6 does not trace `_replace`
            news = [core_kron.KronState(new.factors, new.lipschitz, P) for new, P in pairs]
        for w, new in zip(work, news, strict=True):
            used = w.state if new is None else new
            if new is not None and not settings.update_first:
                used = engine.rule.before_update(w.state, new)
            direction = _precondition(engine.rule, used, w.signal, w.weight, settings)
            if w.keep is not None and not _stays_finite(w.keep, settings):
                direction = torch.where(_of_blocks(w.keep, w.signal), direction, 0.0)
            for (i, _), part in zip(w.piece.parts, spread(w.piece, direction), strict=True):
                if self._filled[i]:
                    self._found[i].append(part)
        if number == len(engine.rounds) - 1:
            self._stacks, self._of_pairs = [], ()
        if engine.complete is not None:  # memory of their directions is free for the next round
            done = [i for i in engine.complete[number] if self._present[i]]
            self._move([(i, engine.merged(i, self._found)) for i in done])

    def end(self) -> None:
        """Exchange directions where ranks have shares of them."""
        engine = self.engine
        if engine.complete is None:
            directions = engine.exchange.directions(self._present, list(map(used_up, self._found)))
            self._move([(i, d) for i, d in enumerate(directions) if d is not None])


def take_steps(steps: Sequence[GroupStep]) -> None:
    """Each of several steps, of different engines."""
    for step in steps:
        if not step.engine.rounds:  # a rank without blocks takes part in the exchange
            step.begin()
    rounds = [(step, number) for step in steps for number in range(len(step.engine.rounds))]
    for together in joined([step.engine.extents[number] for step, number in rounds]):
        pool = [rounds[i] for i in together]
        work = [step.prepare(number) for step, number in pool]
        fitted: list[Any] = [None] * len(pool)
        for alike in _alike([step for step, _ in pool]):
            step = pool[alike[0]][0]
            some = iter(_fitted(step.engine.rule, [w for i in alike for w in work[i]], step.settings))
            for i in alike:
                fitted[i] = [next(some) for _ in work[i]] or None
        for (step, number), own, new in zip(pool, work, fitted, strict=True):
            step.finish(number, own, new)
    for step in steps:
        step.end()


def _alike(steps: Sequence[GroupStep]) -> list[list[int]]:
    """Which steps update factors, those together that do so alike."""
    found: list[list[int]] = []
    for i, step in enumerate(steps):
        if not step.settings.update:
            continue
        for others in found:
            if steps[others[0]].fits_like(step):
                others.append(i)
                break
        else:
            found.append([i])
    return found


def _is_one_number(a: Scalar, b: Scalar) -> bool:
    """Whether both are the same, as far as the host can tell."""
    return a is b or (isinstance(a, int | float) and isinstance(b, int | float) and a == b)


def _absorb(
    pack: Pack, gradient: torch.Tensor, keep: torch.Tensor | None, settings: StepSettings
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Momentum with this gradient in it; what it is still to be divided by, (blocks,) or None."""
    old = pack.momentum
    if (keep is None or not keep.ndim) and not settings.stochastic_rounding:
        average_in(old, gradient, settings.b1, keep)
        average_in(pack.weight, torch.ones_like(pack.weight), settings.b1, keep)
        later = not settings.update and not isinstance(settings.clip, tuple)
        later &= settings.clip is not None or keep is None  # a clip knows what to do about 0
        if later and old.dtype == pack.weight.dtype:  # the clip multiplies directions anyway
            return old, pack.weight
        return moments.unbiased(old, pack.weight), None
    if settings.stochastic_rounding:
        wide = moments.update_average(lift(old), gradient, settings.b1)
        unit = _noise(pack, noise.MOMENTUM, old.shape, settings)
        momentum = stochastic_round(wide, unit, old.dtype)
    else:
        momentum = moments.update_average(old, gradient, settings.b1)
    weight = moments.update_average(pack.weight, torch.ones_like(pack.weight), settings.b1)
    signal = moments.unbiased(momentum, weight)
    _select(old, momentum, keep)
    _select(pack.weight, weight, keep)
    return signal, None


def _fitted(
    rule: core_kron.Kron, work: list[_Work], settings: StepSettings
) -> list[core_kron.KronState]:
    """Factors after one update; P is not up to date."""
    rounds, olds = settings.stochastic_rounding, [w.state for w in work]
    units = _noises(work, settings.step)
    evidence, vectors = [w.evidence for w in work], [w.vector for w in work if w.vector is not None]
    wide = [rule.lifted(old) for old in olds] if rounds else olds
    rate = settings.preconditioner_lr
    found = rule.fit(wide, evidence, units, rate, vectors or None, with_P=False)
    if not rounds:
        return found
    rounded = []
    for w, new in zip(work, found, strict=True):
        noises = tuple(
            _noise(w.pack, noise.FACTOR + axis, q.shape, settings) for axis, q in enumerate(new.factors)
        )
        rounded.append(rule.rounded(new, noises, w.state.factors[0].dtype, with_P=False))
    return rounded


def _precondition(
    rule: core_kron.Kron,
    state: core_kron.KronState,
    signal: torch.Tensor,
    weight: torch.Tensor | None,
    settings: StepSettings,
) -> torch.Tensor:
    direction = rule.precondition(state, signal)
    if weight is not None:
        if settings.clip is None:
            return direction.div_(weight.reshape(-1, *(1,) * (signal.ndim - 1)))
        scale = rms_clip_scale(direction, settings.clip, signal.ndim - 1, weight)
        return direction.mul_(scale)
    if settings.clip is None or isinstance(settings.clip, tuple):
        return clipped(direction, settings.clip, signal.ndim - 1)
    # In two lines: a compiled step breaks its graph in between and cannot carry a bound method over.
    scale = rms_clip_scale(direction, settings.clip, signal.ndim - 1)
    return direction.mul_(scale)


def _noises(work: Sequence[_Work], step: Scalar) -> list[torch.Tensor]:
    """What the fit of each piece needs, of one device and dtype all together."""
    kinds = [((w.pack.streams.device, w.state.factors[0].dtype), 1) for w in work]
    found: list[Any] = [None] * len(work)
    for alike in buckets.plan_buckets(kinds):
        own = [work[member.index] for member in alike.members]
        shapes = [tuple(w.evidence.shape[1:]) for w in own]
        streams = [w.pack.streams for w in own]
        for member, drawn in zip(
            alike.members, noise.draws(streams, step, noise.FIT, shapes, alike.key[1]), strict=True
        ):
            found[member.index] = drawn
    return found


def _noise(pack: Pack, use: int, shape: torch.Size, settings: StepSettings) -> torch.Tensor:
    return noise.draw(pack.streams, settings.step, use, tuple(shape[1:]), torch.float32)


def _stays_finite(keep: torch.Tensor, settings: StepSettings) -> bool:
    """Whether directions are finite also where gradients are not, which the momentum did not take then.

    The parameters are moved by none of them.
    """
    return not (settings.update or settings.stochastic_rounding or keep.ndim)


def _write(
    olds: tuple[torch.Tensor, ...], news: tuple[torch.Tensor, ...], keep: torch.Tensor | None
) -> None:
    if keep is None:
        torch._foreach_copy_(olds, news)
        return
    for a, b in zip(olds, news, strict=True):
        _select(a, b, keep)


def _select(old: torch.Tensor, new: torch.Tensor, keep: torch.Tensor | None) -> None:
    """old <- new where `keep` (one flag, or one a block; None: all), in place, the host not waiting."""
    if keep is None:
        old.copy_(new)
        return
    torch.where(_of_blocks(keep, old), new, old, out=old)


def _of_blocks(flags: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Flags (), or (blocks,), to meet a stack of blocks."""
    return flags.reshape(-1, *(1,) * (x.ndim - 1)) if flags.ndim else flags
