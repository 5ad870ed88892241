"""K-FAC over all layers of a model: capture, buckets, and the four verbs on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from suite.core import kfac as core_kfac
from suite.core import statistics
from suite.core.placement import AssignmentStrategy, LayerShape, Placement, plan_placement
from suite.core.routing import Routing
from suite.core.step_size import kl_clip_coefficient
from suite.torch.agreement import Agreement, Agreements, Terms
from suite.torch.collectives import GATHERING, Ranks
from suite.torch.directions import Directions, squared_rates_times
from suite.torch.factor_refresh import Attempt, Turn
from suite.torch.factors import LayerFactors
from suite.torch.find_layers import FoundLayers
from suite.torch.gradients import GradientExchange
from suite.torch.kfac_reports import Reports
from suite.torch.model_capture import ModelCapture, Taken
from suite.torch.same_parameters import require_same_parameters
from suite.torch.summing import Scaling, summed_factors, summed_products

RANK_STRIDE = 1_000_003  # between the seeds of ranks: each draws noise for rows of its own


class KFACEngine:
    """State and steps of K-FAC for one model, on one device per layer, alone or with other ranks.

    All ranks call `agree`, `update`, `refresh` and `precondition` in the same order with the same
    settings; what is done in them depends on nothing that ranks do not share.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rule: core_kfac.KFAC,
        found: FoundLayers,
        factor_dtype: torch.dtype | None,
        inv_dtype: torch.dtype | None,
        loss_reduction: str,
        terms: Terms,
        factor_scaling: statistics.FactorScaling,
        outer_product: bool,
        warm_start: bool,
        seed: int,
        ranks: Ranks,
        tensor_ranks: Ranks,
        workers: int,
        strategy: AssignmentStrategy,
        colocate_factors: bool,
        symmetry_aware: bool,
        packed_factors: bool,
    ) -> None:
        self.rule = rule
        self.model = model
        self.ranks = ranks
        self.tensor_ranks = tensor_ranks  # those that have other blocks of the same layers
        self.loss_reduction: statistics.LossReduction = "sum" if loss_reduction == "sum" else "mean"
        self.factor_scaling: statistics.FactorScaling = factor_scaling
        self.layers = found.layers
        found.routing.require_preconditioned("K-FAC")
        self.capture = ModelCapture(
            model,
            found,
            seed=seed + RANK_STRIDE * ranks.rank,
            keeps_rows=self.is_alone,
        )
        self.agreements = Agreements(
            self.capture,
            ranks=ranks,
            tensor_ranks=tensor_ranks,
            loss_reduction=loss_reduction,
            terms=terms,
            factor_scaling=factor_scaling,
            factor_dtype=factor_dtype,
        )
        self.reports = Reports(model, found, self.capture, ranks)
        by_parameter: dict[int, list[int]] = {}
        for i, layer in enumerate(self.layers):
            for parameter in layer.parameters():
                by_parameter.setdefault(id(parameter), []).append(i)

        def place(shapes: Sequence[LayerShape], input_of: Mapping[int, int]) -> Placement:
            return plan_placement(
                shapes,
                ranks.world,
                workers,
                strategy=strategy,
                colocate_factors=colocate_factors,
                input_of=input_of,
                together=list(by_parameter.values()),
            )

        self.factors = LayerFactors(
            self.layers,
            rule,
            ranks=ranks,
            place=place,
            factor_dtype=factor_dtype,
            inv_dtype=inv_dtype,
            factor_scaling=factor_scaling,
            outer_product=outer_product,
            warm_start=warm_start,
            symmetric=symmetry_aware,
            packed=packed_factors,
        )
        self._require_the_same_layers()
        ranks.build_groups(
            [self.factors.placement.worker_groups, self.factors.placement.receiver_groups]
        )
        self.gradients = GradientExchange(self.layers, self.factors)
        self.clip_coefficient: torch.Tensor | None = None
        self.refreshed_at: int | None = None
        self.attempts: list[Attempt] = []  # of the last `refresh` in place

    def _require_the_same_layers(self) -> None:
        """ValueError, on all ranks, if some have other layers."""
        own = [(layer.name, layer.sizes, layer.diagonal, layer.blocks) for layer in self.layers]
        for rank, others in enumerate(self.ranks.gather(own, "K-FAC's comparison of models")):
            if others != own:
                unlike = sorted({x[0] for x in {*own} ^ {*others}}) or "in another order"
                raise ValueError(
                    "all ranks of process_group must have the same layers, got others on rank "
                    f"{rank} than on rank {self.ranks.rank}: {unlike}"
                )

    def require_the_same_parameters(self, agreed: Agreement) -> None:
        """ValueError, on all ranks, if some have other numbers than others in the layers of a step."""
        named = {
            f"{layer.name}, {kind}": piece.parameter
            for layer in (self.layers[i] for i in agreed.present)
            for kind, piece in (("weight", layer.weight), ("bias", layer.bias))
            if piece is not None
        }
        require_same_parameters(
            named,
            self.ranks,
            "K-FAC",
            "give process_group= the ranks that share them, or skip_layers= what each has of its own",
        )

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.ranks.alone and self.tensor_ranks.alone

    def agree(
        self,
        parameters: Iterable[torch.Tensor],
        taken: Taken,
        moves: Callable[[nn.Parameter], bool],
        doubted: Collection[int] = (),
        *,
        reads: bool = True,
    ) -> Agreement:
        """Whether the step can be taken and with which layers; see `Agreements.agree`.

        Raises:
            RuntimeError: a layer's weight is not the model's, or not as it was, any more.
        """
        self.reports.require_parameters(taken)
        return self.agreements.agree(
            parameters, taken, moves, self.factors.input_of, doubted, reads=reads
        )

    def update(
        self,
        taken: Taken,
        agreed: Agreement,
        factor_decay: float,
        only: Collection[int] | None = None,
    ) -> bool:
        """Average statistics into the factors of the layers that some rank has seen.

        Args:
            only: the layers that are due; None: all.

        Returns:
            Whether this was a step: not with gradients that are all zero and nothing seen, unless a base
            optimizer moves by its momentum. torch.distributed.checkpoint takes such a one, which moves
            nothing, to see what an optimizer's state looks like.
        """
        if not any(agreed.seen):
            return self.reports.nothing_seen()
        self.reports.unseen(agreed.seen)
        self.reports.thawed()
        self.reports.missed_derivatives()
        if self.capture.clock.is_compiled:
            self.reports.looked_up_for_all(taken, agreed.terms * agreed.share)
        else:  # a graph holds with the hooks that there were: without some it would be compiled anew
            self.capture.settle_functions(agreed.functional)
            self.capture.settle_free(agreed.functional, agreed.seen)
        partial = self._settle_sharing(taken, agreed)
        captures, sampled = self.capture.by_layer, self.capture.clock.sampled
        if not sampled:  # gradients of the loss of all ranks, of which this is a share
            share = agreed.share
            inverse = 1 / share if isinstance(share, float) else 1 / share.clamp_min(1e-30)
            taken = self.capture.all_unscaled(taken, inverse)
        elif self.loss_reduction == "mean":
            # Sampled gradients are of single terms: N times those of a loss that is their mean.
            taken = self.capture.all_unscaled(taken, agreed.terms)
        scaling = Scaling(agreed.terms, self.loss_reduction, self.factor_scaling)
        new = summed_factors(captures, taken, agreed, self.factors, scaling)
        seen = {
            (i, side): agreed.seen[i]
            and (only is None or i in only)
            and not (side == "A" and i in partial)
            for i, side in self.factors.all_keys()
        }
        usable = agreed.usable()
        self.factors.update(new, seen, factor_decay, usable)
        if self.rule.compute_method == "ekfac":
            measured = [m and (only is None or i in only) for i, m in enumerate(agreed.measured)]
            products = summed_products(captures, taken, measured, self.factors, scaling)
            self.factors.update_products(products, factor_decay, usable)
        return True

    # ---- layers that read the same input -------------------------------------------------------

    def _settle_sharing(self, taken: Taken, agreed: Agreement) -> set[int]:
        """Which layers share an A: those that read the same tensors in every call of the first passes.

        And, also later, in every call that was a part of the loss: two heads may run in every forward
        pass and have a micro-batch each.

        Returns:
            Layers that shared one and did not in this step, whose own A is therefore incomplete.
        """
        clock = self.capture.clock
        if clock.discovering:
            clock.discover(False)
            self.reports.strays()
            self.reports.ran_once_for_all()
            self.reports.transformed()
            found = self._find_sharing(taken, agreed)
            for capture in self.capture.by_layer:
                capture.inputs = []
            self._share(found)
        clock.forget()
        # One that leads and was no part of the loss has summed nothing for those that follow.
        input_of = self.factors.input_of
        alone = {i for i, j in input_of.items() if agreed.seen[i] and not agreed.seen[j]}
        turned = {i for i, j in input_of.items() if agreed.turned[i] or agreed.turned[j]}
        strangers = (agreed.strangers | alone | turned) & input_of.keys()
        if strangers:
            self._share({i: j for i, j in input_of.items() if i not in strangers})
        return strangers & agreed.incomplete

    def _find_sharing(self, taken: Taken, agreed: Agreement) -> dict[int, int]:
        """Layer -> the one whose A is its A, too, on every rank; only layers that were seen.

        Uses as the transpose have a part in A that is each layer's own.
        """
        first: dict[Any, int] = {}
        labels: dict[int, int] = {}  # layer -> the first that reads what it reads
        # The one that runs first leads: it has the input when the others come.
        captures = self.capture.by_layer
        for i in sorted(range(len(captures)), key=lambda i: captures[i].first_call):
            capture = captures[i]
            layer, spec = capture.layer, capture.layer.spec
            seen = taken[i]
            if seen is None or not capture.inputs or spec.kind not in ("dense", "convolution"):
                continue
            if len(layer.sites) > 1 or agreed.turned[i]:
                continue
            alike = spec._replace(diagonal=(layer.diagonal[0], False))
            calls = tuple(capture.inputs), seen.read
            key = (calls, alike, layer.sizes[0], layer.blocks, layer.dtype, layer.device)
            labels[i] = first.setdefault(key, i)
        everyone = self.ranks.gather(labels, "K-FAC's agreement on shared inputs")
        leaders: dict[Any, int] = {}
        input_of: dict[int, int] = {}
        for i in dict.fromkeys(i for found in everyone for i in found):
            leader = leaders.setdefault(tuple(found.get(i) for found in everyone), i)
            if leader != i:
                input_of[i] = leader
        return input_of

    def _share(self, input_of: dict[int, int]) -> None:
        self.factors.share(input_of)
        self._tell_captures()

    def _tell_captures(self) -> None:
        """Whose A is whose, and in which bases to sum second moments."""
        leaders = set(self.factors.input_of.values())
        for i, capture in enumerate(self.capture.by_layer):
            leader = self.factors.input_of.get(i)
            capture.leads = i in leaders
            capture.input_of = None if leader is None else self.capture.by_layer[leader]
            capture.bases = self.factors.bases(i)

    # ---- directions ----------------------------------------------------------------------------

    def refresh(
        self, damping: float, step: int, turn: Turn | None = None, *, in_place: bool = False
    ) -> None:
        """Recompute all inverses or eigenbases, or those whose turn it is in this step of a cycle.

        Args:
            in_place: see `LayerFactors.refresh_in_place`; `attempts` are what it returns.
        """
        if in_place:
            self.attempts = self.factors.refresh_in_place(damping)
            return
        self.factors.refresh(damping, turn)
        if turn is None or turn[0] == 0 or self.refreshed_at is None:
            self.refreshed_at = step if self.factors.allocated else None
        self._tell_captures()

    def return_to(self, derived: Any) -> None:
        """`LayerFactors.return_to`."""
        self.factors.return_to(derived)
        if self.rule.compute_method == "ekfac":
            self._tell_captures()

    def precondition(
        self,
        damping: float,
        kl_clip: float | None,
        lr_of: Callable[[nn.Parameter], Any],
        moves: Callable[[nn.Parameter], bool],
        agreed: Agreement,
    ) -> None:
        """Replace the gradients of all layers that have one on every rank by directions, in place."""
        self.reports.torn(agreed.torn)
        self.factors.allocate()
        if not agreed.present:
            self.reports.idle(moves)
            self.capture.forget_rows()
            return
        whole = self.gradients.whole(agreed.present, moves)
        known = self._directions_of_rows(whole, damping)
        rates: dict[int, list[Any]] = {}
        if kl_clip is not None:
            rates = {i: [lr_of(parameter) for parameter in self.layers[i].parameters()] for i in whole}
        directions = Directions(self.factors, whole, known, damping, rates)

        def change_of(chosen: Sequence[int]) -> torch.Tensor:
            return squared_rates_times(directions.products(chosen))

        def changes_of(chosen: Sequence[int]) -> torch.Tensor:
            if self.tensor_ranks.alone:
                return change_of(chosen)[None]
            split = [i for i in chosen if self.layers[i].tensor_split]
            both = change_of([i for i in chosen if i not in split]), change_of(split)
            return torch.stack([x.to(self.tensor_ranks.device, torch.float64) for x in both])

        def coefficient_of(changes: torch.Tensor) -> torch.Tensor:
            assert kl_clip is not None
            change = changes[0]
            if not self.tensor_ranks.alone and any(self.layers[i].tensor_split for i in agreed.present):
                phase = "K-FAC's sum for kl_clip over tensor-parallel ranks"
                change = change + self.tensor_ranks.total(changes[1:], phase)[0]
            coefficient: torch.Tensor = kl_clip_coefficient(change, kl_clip)
            return coefficient

        self.clip_coefficient = self.gradients.deliver(
            agreed.present,
            list(whole),
            directions.parts,
            changes_of,
            None if kl_clip is None else coefficient_of,
            moves,
        )

    def _directions_of_rows(
        self, whole: Mapping[int, Sequence[torch.Tensor]], damping: float
    ) -> dict[int, list[torch.Tensor]]:
        """Of layers whose gradients are those of the few rows that were kept."""
        given = {i: rows for i, kept in self.capture.kept.items() if (rows := kept.take()) is not None}
        given = {i: rows for i, rows in given.items() if i in whole and self.factors.is_ready(i)}
        if not given:
            return {}
        fits = torch.cat(
            [self.factors.rows_fit(i, rows, whole[i], damping) for i, rows in given.items()]
        )
        found: dict[int, list[torch.Tensor]] = {}
        for (i, rows), fit in zip(given.items(), fits.tolist(), strict=True):  # one wait for all
            if fit:
                found[i] = self.factors.direction_of_rows(i, rows, damping, bias=len(whole[i]) > 1)
            else:
                self.capture.kept[i].refuse()
        return found

    # ---- reports -------------------------------------------------------------------------------

    def routing(self, moves: Callable[[nn.Parameter], bool]) -> Routing:
        """The routing report; `moves`: whether a parameter is the optimizer's."""
        return self.reports.routing(self.factors, moves)

    def clipped_by(self) -> float:
        """What `kl_clip` multiplied the last directions with."""
        return 1.0 if self.clip_coefficient is None else float(self.clip_coefficient)

    def metrics(self, damping: float, step: int) -> dict[str, Any]:
        """Plain numbers for loggers; see `KFAC.metrics`."""
        return {
            "damping": damping,
            "kl_clip_coefficient": self.clipped_by(),
            "steps_since_refresh": None if self.refreshed_at is None else step - self.refreshed_at,
            "retries": self.factors.retries,
            "layers": self.reports.metrics(self.factors),
        }

    # ---- checkpoints ---------------------------------------------------------------------------

    def state_dict(
        self, *, gather: bool, include_factors: bool = True, include_inverses: bool = True
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors by layer name, of all ranks or of this one; of layers that are split by block, too."""
        if not gather:
            self.factors.allocate()
        collect = self.factors.gathered_state_dict if gather else self.factors.state_dict
        layers = collect(include_factors=include_factors, include_inverses=include_inverses)
        if self.tensor_ranks.alone:
            return layers
        split = [layer for layer in self.layers if layer.tensor_split]
        whole = {name: x for name, x in layers.items() if name not in {layer.name for layer in split}}
        blocks = {self._block_of(layer.name): layers[layer.name] for layer in split}
        if not gather or not self.factors.allocated:
            return whole | blocks
        # On the host: a tensor would arrive on the device that it comes from, and others' are many.
        sent = {name: {key: x.cpu() for key, x in own.items()} for name, own in blocks.items()}
        everyone = self.tensor_ranks.gather(sent, f"K-FAC's {GATHERING}")
        others = {name: x for own in everyone for name, x in own.items()}
        return whole | others | blocks

    def _block_of(self, name: str, rank: int | None = None) -> str:
        """What a checkpoint calls a layer's block of a tensor-parallel rank, by default this one."""
        own = self.tensor_ranks
        return f"{name}, block {own.rank if rank is None else rank} of {own.world}"

    def saved_names(self, name: str) -> list[str]:
        """What a checkpoint calls a layer, on whatever rank."""
        blocks = () if self.tensor_ranks.alone else range(self.tensor_ranks.world)
        return [name, *(self._block_of(name, rank) for rank in blocks)]

    def own_blocks(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """Of a `state_dict()` what is this rank's, by layer name, and what is not known."""
        if self.tensor_ranks.alone:
            return dict(layers)
        split = [layer.name for layer in self.layers if layer.tensor_split]
        of_split = {saved for name in split for saved in self.saved_names(name)}
        found = {name: x for name, x in layers.items() if name not in of_split}
        own = {name: self._block_of(name) for name in split}
        return found | {name: layers[block] for name, block in own.items() if block in layers}

    def load_state_dict(
        self,
        layers: Mapping[str, Mapping[str, torch.Tensor]],
        sharing: Mapping[str, str],
        discovered: bool,
        *,
        held: bool,
        refreshed: bool,
    ) -> None:
        """Take over `state_dict()`'s tensors; ValueError, and no change, if they do not fit.

        Args:
            held: whether it has factors, on whatever rank.
            refreshed: whether there were inverses.
        """
        own = self.own_blocks(layers)
        self.factors.load_state_dict(own, sharing, held=held, refreshed=refreshed)
        self.capture.clock.discover(not discovered)
        self._tell_captures()

    def snapshot(self) -> tuple[Any, ...]:
        """All state, for `rewind`."""
        return self.factors.snapshot(), self.capture.clock.discovering

    def rewind(self, snapshot: tuple[Any, ...]) -> None:
        """Back to a `snapshot`."""
        self.factors.rewind(snapshot[0])
        self.capture.clock.discover(snapshot[1])
        self._tell_captures()
