"""What all ranks know of a step of K-FAC before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from suite.core import statistics
from suite.core.checks import check_number
from suite.torch.capture import Captured
from suite.torch.checks import warn_user
from suite.torch.collectives import Ranks
from suite.torch.dtensors import local
from suite.torch.inplace import HOST_DEVICES, all_finite, read_flags
from suite.torch.layers import Layer
from suite.torch.model_capture import ModelCapture, Taken

Terms: TypeAlias = float | torch.Tensor | Callable[[], float | torch.Tensor] | None


class Agreement(NamedTuple):
    """What all ranks know of a step before anything changes."""

    unusable: tuple[int, ...]  # ranks with a gradient or statistic that is not finite
    finite: torch.Tensor | None  # (): whether all are finite, if no rank had to look yet
    present: list[int]  # layers with a gradient on every rank
    torn: list[int]  # layers with a gradient on some
    seen: list[bool]  # by layer: whether any rank has statistics
    idle: set[int]  # layers that should have been seen and were not, with a gradient of zeros
    measured: list[bool]  # by layer: whether any rank has second moments in the eigenbasis
    turned: list[bool]  # by layer: whether any rank has statistics of uses as the transpose
    strangers: set[int]  # layers that read another input than the one whose A they share
    incomplete: set[int]  # layers that left out inputs of which another layer has the sum
    functional: set[int]  # layers whose weights functions got around their modules
    terms: torch.Tensor  # (): N, of all ranks
    share: float | torch.Tensor  # of this rank's loss in the loss of all
    has_terms: torch.Tensor | None = None  # (): whether the loss has any; None: it has

    def usable(self) -> torch.Tensor | None:
        """Whether averages may take statistics, (), as far as no rank had to look; None: they may."""
        if self.finite is None or self.has_terms is None:
            return self.has_terms if self.finite is None else self.finite
        return self.finite & self.has_terms.to(self.finite.device)

    def counted_terms(self) -> torch.Tensor:
        """(): N, which may be 0."""
        return self.terms if self.has_terms is None else self.terms * self.has_terms


class Agreements:
    """Makes one before each step; ranks that are not alone call it together."""

    def __init__(
        self,
        capture: ModelCapture,
        *,
        ranks: Ranks,
        tensor_ranks: Ranks,
        loss_reduction: str,
        terms: Terms,
        factor_scaling: statistics.FactorScaling,
        factor_dtype: torch.dtype | None,
    ) -> None:
        self.capture = capture
        self.layers: Sequence[Layer] = capture.layers
        self.ranks = ranks
        self.tensor_ranks = tensor_ranks  # those that have other blocks of the same layers
        self.loss_reduction = loss_reduction
        self.terms = terms
        self.factor_scaling = factor_scaling
        self.factor_dtype = factor_dtype
        self._untold = False  # whether it was said that nothing tells of terms

    def agree(
        self,
        parameters: Iterable[torch.Tensor],
        taken: Taken,
        moves: Callable[[nn.Parameter], bool],
        input_of: Mapping[int, int],
        doubted: Collection[int] = (),
        *,
        reads: bool = True,
    ) -> Agreement:
        """Whether the step can be taken and with which layers; ranks that are not alone wait for it.

        Args:
            parameters: whose gradients must be finite.
            taken: of this rank.
            moves: whether the optimizer moves a parameter.
            input_of: layer -> the one whose A is its A, too.
            doubted: layers that may be idle.
            reads: whether the host may look; else none is taken for idle.
        """
        count, world = len(self.layers), self.ranks.world
        present = [
            layer.weight.parameter.grad is not None and moves(layer.weight.parameter)
            for layer in self.layers
        ]
        clock = self.capture.clock
        read = [() if t is None else t.read for t in taken]
        parted = {i for i, j in input_of.items() if read[i] != read[j]}
        functional = self.capture.functional_layers()
        unseen = [i for i, t in enumerate(taken) if present[i] and t is None and clock.wanted]
        idle = self._with_zeros([i for i in unseen if i in doubted]) if reads else set()
        used = taken
        if clock.is_compiled:  # no graph asks which layers are frozen: they tell of terms alone
            pairs = zip(self.layers, taken, strict=True)
            used = [None if _is_frozen(layer) else t for layer, t in pairs]
        flags = [
            present,
            [i in unseen and i not in idle for i in range(count)],
            [t is not None for t in used],
            [t is not None and t.products is not None for t in used],
            [t is not None and t.transposed is not None for t in used],
            [i in parted for i in range(count)],
            [capture.incomplete for capture in self.capture.by_layer],
            [i in functional for i in range(count)],
        ]
        terms = self.terms_of(taken)
        finite = self._all_finite(parameters, taken, terms)
        if self.ranks.alone and self.tensor_ranks.alone:
            return Agreement(
                unusable=(),
                finite=finite,
                present=[i for i, flag in enumerate(flags[0]) if flag],
                torn=[],
                seen=flags[2],
                idle=idle,
                measured=flags[3],
                turned=flags[4],
                strangers={i for i, flag in enumerate(flags[5]) if flag},
                incomplete={i for i, flag in enumerate(flags[6]) if flag},
                functional=functional,
                terms=torch.where(terms > 0, terms, torch.ones_like(terms)),
                share=1.0,
                has_terms=self._has_any(terms),
            )
        numbers = [0.0] * world + [float(flag) for row in flags for flag in row]
        header = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        if self.ranks.alone:
            header[0] = not bool(finite)
            total = terms
        else:
            header = torch.cat([header.to(self.ranks.device), terms.to(self.ranks.device)[None]])
            header[self.ranks.rank] = (~finite).to(header)
            header = self.ranks.total(header, "K-FAC's agreement on the step")
            total, header = header[-1], header[:-1].cpu()
        counts = [int(x) for x in header.tolist()]
        if not self.tensor_ranks.alone:
            bad = torch.tensor([float(sum(counts[:world]))], dtype=torch.float64, device="cpu")
            bad = self.tensor_ranks.total(bad, "K-FAC's agreement on the step")
            counts[self.ranks.rank] += int(bad) if not any(counts[:world]) else 0
        present_on, *others = (counts[world + i * count :][:count] for i in range(len(flags)))
        moved, seen, measured, turned, strangers, incomplete, anywhere = (
            [n > 0 for n in row] for row in others
        )
        wanted = range(count) if clock.wanted else ()
        return Agreement(
            unusable=tuple(r for r in range(world) if counts[r]),
            finite=None,
            present=[i for i, n in enumerate(present_on) if n == world],
            torn=[i for i, n in enumerate(present_on) if 0 < n < world],
            seen=seen,
            idle={i for i in wanted if present_on[i] == world and not seen[i] and not moved[i]},
            measured=measured,
            turned=turned,
            strangers={i for i, flag in enumerate(strangers) if flag},
            incomplete={i for i, flag in enumerate(incomplete) if flag},
            functional={i for i, flag in enumerate(anywhere) if flag},
            terms=torch.where(total > 0, total, torch.ones_like(total)),
            share=self._share_of(terms, total),
            has_terms=self._has_any(total),
        )

    def _with_zeros(self, layers: Sequence[int]) -> set[int]:
        """Those of which this rank has no gradient but zeros."""
        known = [(i, self.layers[i].weight.local_grad()) for i in layers]
        given = [(i, g) for i, g in known if g is not None]
        flags = read_flags([g.any()[None] for _, g in given])
        return {*layers} - {i for (i, _), (flag,) in zip(given, flags, strict=True) if flag}

    def _has_any(self, terms: torch.Tensor) -> torch.Tensor | None:
        """Labels may all be ignored; but a number that nobody gave is only 0 where it is not known."""
        return None if self.terms is None or self.capture.clock.sampled else terms > 0

    def _share_of(self, terms: torch.Tensor, total: torch.Tensor) -> float | torch.Tensor:
        """Weight of this rank's loss in that of all: by its terms where it is their mean."""
        if self.ranks.alone or self.factor_scaling == "kfac_pytorch":
            return 1.0
        if self.loss_reduction != "mean":
            return 1.0 / self.ranks.world
        equal = torch.full_like(total, 1.0 / self.ranks.world)
        return torch.where(total > 0, terms.to(total) / total.clamp_min(1), equal)

    def _all_finite(
        self, parameters: Iterable[torch.Tensor], taken: Taken, terms: torch.Tensor
    ) -> torch.Tensor:
        """(): whether all gradients and statistics here are, and factors made of them will be."""
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        tensors = [g._values() if g.is_sparse else g for g in gradients]
        moments = [x for t in taken if t is not None for x in _arrays(t)]
        # Of a mean of N terms, over ranks that share them, factors are at most N² times the sums.
        scale = (terms * self.ranks.world).clamp_min(1).square()
        given = [x for x in tensors if x.numel()], [x for x in moments if x.numel()]
        return all_finite(*given, scale, self.factor_dtype, power=2)

    def terms_of(self, taken: Taken) -> torch.Tensor:
        """How many terms the loss has: if not given, output positions of the product that ran last.

        That is the number of examples for a classifier, of tokens for a language model, of pixels for a
        segmentation network. A layer that runs several times counts each time: right for a head that
        reads one token at a time, too many for a last layer that is applied to its own output.
        """
        clock = self.capture.clock
        rows = [t.main.rows for t in taken if t is not None]
        if not rows:
            return torch.zeros((), device="cpu")
        if clock.sampled:
            return torch.full_like(rows[0], max(t.terms for t in taken if t is not None))
        if self.terms is not None:
            given = self.terms() if callable(self.terms) else self.terms
            check_terms(given, at_least=0)  # of all ranks there may be more
            return _number_like(rows[0], given)
        pairs = zip(self.layers, taken, strict=True)
        seen = [(layer, t.positions) for layer, t in pairs if t is not None]
        last = clock.last_run()
        for layer, (positions, transposed) in seen:
            if layer.name == last.layer:
                return transposed if last.transposed and transposed is not None else positions
        if clock.last_positions is not None:  # of a layer that is not covered, perhaps frozen
            return _number_like(rows[0], clock.last_positions)
        known = {layer.name: positions for layer, positions in seen if layer.spec.kind != "free"}
        compiled = clock.compiled_looked_up
        table = clock.looked_up.layer if compiled is None else compiled.layer.name
        if table in known:
            positions, transposed = known[table]  # there are no products but lookups
            return positions if transposed is None else transposed
        if known:
            return known[next(reversed(known))][0]
        # No layer saw anything that would tell: `agree` makes 0 one term.
        if self.loss_reduction == "mean" and not self._untold:
            self._untold = True
            warn_user(
                "no layer tells how many terms the loss is the mean of, which is taken for one: where "
                "there are more, give terms=lambda: n"
            )
        return torch.zeros_like(rows[0])


def _is_frozen(layer: Layer) -> bool:
    return not any(p.requires_grad or p.grad is not None for p in layer.parameters())


def _number_like(like: torch.Tensor, number: Any) -> torch.Tensor:
    """(), of `like`'s dtype and on its device."""
    if isinstance(number, torch.Tensor):
        return number.to(like).reshape(())
    return torch.full_like(like, float(number))


def check_terms(terms: Any, **bounds: float) -> None:
    """TypeError or ValueError unless it is one number, within the bounds where the host knows it."""
    if not isinstance(terms, torch.Tensor):
        check_number("terms", terms, **bounds)
    elif terms.numel() != 1:
        raise ValueError(f"terms must be one number, got a tensor of shape {tuple(terms.shape)}")
    elif terms.device.type in HOST_DEVICES:
        check_number("terms", terms.item(), **bounds)


def _arrays(captured: Captured) -> list[torch.Tensor]:
    """What is finite if all of the statistics are: of Σ x xᵀ the diagonal, for |Σ x y|² <= Σ x² Σ y².

    Small ones as they are: read in order they come faster out of memory than their diagonals do.
    """
    arrays = [captured.main.A, captured.main.G]
    if captured.transposed is not None:
        arrays += [captured.transposed.A, captured.transposed.G]
    large = (x.ndim == 3 and x.shape[-1] > 128 for x in arrays)
    arrays = [x.diagonal(dim1=-2, dim2=-1) if d else x for x, d in zip(arrays, large, strict=True)]
    return arrays if captured.products is None else [*arrays, captured.products]
