"""K-FAC over all layers of a model: capture, buckets, and the four verbs on them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from suite.core import kfac as core_kfac
from suite.core import linalg, statistics
from suite.core.noise import stream_numbers
from suite.core.placement import AssignmentStrategy, LayerShape, Placement, plan_placement
from suite.core.routing import Route, Routing
from suite.core.step_size import kl_clip_coefficient
from suite.torch.attention import Attention
from suite.torch.capture import (
    CaptureClock,
    Captured,
    FreeCapture,
    LayerCapture,
    OutputWatch,
)
from suite.torch.checks import warn_user
from suite.torch.collectives import Ranks
from suite.torch.directions import Directions, squared_rates_times
from suite.torch.dtensors import local, sharded_modules
from suite.torch.factor_refresh import Turn
from suite.torch.factor_store import at_least_single
from suite.torch.factors import LayerFactors
from suite.torch.find_layers import NOT_GIVEN, FoundLayers
from suite.torch.functional import FunctionCapture, RunningLayer, callers, has_functions
from suite.torch.gradients import GradientExchange
from suite.torch.hooks import Hook, ModeAround
from suite.torch.inplace import all_finite
from suite.torch.layers import CONVOLUTIONS, TRANSPOSED, Layer
from suite.torch.summing import Scaling, summed_factors, summed_products
from suite.torch.thin import KeptRows, can_be_thin
from suite.torch.uses import UseCounter

Taken = list[Captured | None]
_ATTACH_AGAIN = (
    "After replacing parameters, as load_state_dict(assign=True) and transformers' "
    "resize_token_embeddings do, detach() and attach again"
)


class Agreement(NamedTuple):
    """What all ranks know of a step before anything changes."""

    unusable: tuple[int, ...]  # ranks with a gradient or statistic that is not finite
    finite: torch.Tensor | None  # (): whether all are finite, if no rank had to look yet
    present: list[int]  # layers with a gradient on every rank
    torn: list[int]  # layers with a gradient on some
    seen: list[bool]  # by layer: whether any rank has statistics
    measured: list[bool]  # by layer: whether any rank has second moments in the eigenbasis
    strangers: set[int]  # layers that read another input than the one whose A they share
    incomplete: set[int]  # layers that left out inputs of which another layer has the sum
    functional: set[int]  # layers whose weights functions got around their modules
    terms: torch.Tensor  # (): N, of all ranks
    share: float | torch.Tensor  # of this rank's loss in the loss of all


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
        terms: float | torch.Tensor | Callable[[], float | torch.Tensor] | None,
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
        self.global_mean = loss_reduction == "global_mean"
        self.loss_reduction: statistics.LossReduction = "sum" if loss_reduction == "sum" else "mean"
        self.terms = terms
        self.factor_scaling: statistics.FactorScaling = factor_scaling
        self.factor_dtype = factor_dtype
        self.layers, self._routing = found.layers, found.routing_of_all
        found.routing.require_preconditioned("K-FAC")
        self._shapes = [layer.weight.parameter.shape for layer in self.layers]
        self.clock = CaptureClock()
        own_seed = seed + RANK_STRIDE * ranks.rank
        (self.clock.stream,) = stream_numbers(-1, 1, own_seed)  # apart from that of every layer
        self.captures: list[LayerCapture] = []
        self.kept: dict[int, KeptRows] = {}  # by layer
        self._attached: list[Any] = []  # everything with hooks
        self._attentions = found.attentions
        self._name_of = found.name_of
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._known = {found.name_of(name): p for name, p in model.named_parameters()}
        try:
            self._attach(model, found, own_seed)
        except Exception:
            self.detach()
            raise
        # Whoever drops the last reference gets the model back as it was.
        weakref.finalize(self, _take_off, self._attached, self._attentions)
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
        self._unseen_reported = self._torn_reported = False

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

    def _attach(self, model: nn.Module, found: FoundLayers, seed: int) -> None:
        sites = [site for layer in self.layers for site in layer.sites]
        ours = {id(m) for site in sites for m in (site.module, site.owner)}
        ours |= {id(model), *(id(attention.module) for attention in found.attentions)}
        for name, module in model.named_modules():
            if id(module) not in ours:
                continue  # a part that both have and this one leaves alone
            forward = module.__dict__.get("forward")
            hooked = list(module._forward_hooks.values())
            if isinstance(forward, Attention):
                hooked += list(forward.product("q")._forward_hooks.values())
            if any(isinstance(h, Hook) and h.owner() is not None for h in hooked):
                raise ValueError(
                    f"layer {found.name_of(name)!r} already has a K-FAC attached: "
                    "detach() that one first, or name the layer in skip_layers"
                )
            if isinstance(forward, Attention):  # of a K-FAC that is gone
                forward.detach()
        for attention in found.attentions:
            attention.attach()
        fully_sharded = {id(p) for part in sharded_modules(model) for p in part.parameters()}
        for i, layer in enumerate(self.layers):
            (stream,) = stream_numbers(i, 1, seed)
            capture = LayerCapture(layer, at_least_single(layer.dtype), self.clock, stream)
            capture.held_back = id(layer.weight.parameter) in fully_sharded
            self.captures.append(capture)
            self._attached.append(capture)
        if self.is_alone and not self.rule.keeps_eigenbases:
            for i, capture in enumerate(self.captures):
                if can_be_thin(capture.layer):
                    self.kept[i] = capture.kept = KeptRows(capture.layer, self.clock)
                    self._attached.append(capture.kept)
        self._slots = [slot for capture in self.captures for slot in capture.slots()]
        self._uses = UseCounter(model, self.captures)
        self._attached.append(self._uses)
        capture_of = {id(c.layer): c for c in self.captures}
        for module, layers in found.free.items():
            captures = [capture_of[id(layer)] for layer in layers if id(layer) in capture_of]
            if captures:
                self._attached.append(FreeCapture(module, captures))
        self._functions = self._attach_functions(model)
        sites = [site for layer in self.layers for site in layer.sites]
        covered = {id(site.module) for site in sites if not site.functional}
        covered |= {id(attention.module.out_proj) for attention in found.attentions}
        for module in model.modules():
            if id(module) in covered:
                continue
            channels: Any = getattr(module, "out_features", None)
            if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
                channels = module.out_channels
            elif not isinstance(module, nn.Linear):
                continue
            own = self._functions.get(module)
            seen = (lambda: False) if own is None else functools.partial(bool, own.found)
            self._attached.append(OutputWatch(module, channels, self.clock, seen))

    def _attach_functions(self, model: nn.Module) -> dict[nn.Module, FunctionCapture]:
        """By module, what watches the functions that its forward calls with weights of layers."""
        uses: dict[nn.Module, list[tuple[LayerCapture, int]]] = {}
        around = callers(model)
        for capture in self.captures:
            for index, site in enumerate(capture.layer.sites):
                if site.functional:
                    uses.setdefault(site.module, []).append((capture, index))
                if site.module in around and has_functions(capture.layer, site):
                    uses.setdefault(around[site.module], []).append((capture, index))
        found = {module: FunctionCapture(module, own) for module, own in uses.items()}
        watched = {id(capture): capture for own in uses.values() for capture, _ in own}
        self._attached += [*found.values(), *map(RunningLayer, watched.values())]
        return found

    def _functional_layers(self) -> set[int]:
        """The layers whose weights functions around their modules got, here and so far."""
        modes = self._functions.values()
        found = {id(own.uses[k][0]) for own in modes for k in own.found if not own.own[k]}
        return {i for i, capture in enumerate(self.captures) if id(capture) in found}

    def _settle_functions(self, functional: set[int]) -> None:
        """After a step: watch no longer where no rank's module gave a child's weight to a function."""
        given = {id(self.captures[i]) for i in functional}
        gone = {
            id(own)
            for own in self._functions.values()
            if own.ran and not any(own.own) and not any(id(c) in given for c, _ in own.uses)
        }
        if not gone:
            return
        self._functions = {m: own for m, own in self._functions.items() if id(own) not in gone}
        left = {id(capture) for own in self._functions.values() for capture, _ in own.uses}
        for attached in self._attached:
            unused = isinstance(attached, RunningLayer) and id(attached.capture) not in left
            if unused or id(attached) in gone:
                for handle in attached.handles:
                    handle.remove()
                gone.add(id(attached))
        self._attached[:] = [attached for attached in self._attached if id(attached) not in gone]

    def detach(self) -> None:
        """Take all hooks off the model."""
        self.unwind()
        self.forget_rows()
        _take_off(self._attached, self._attentions)
        self._attached.clear()

    @property
    def attached(self) -> bool:
        return bool(self._attached)

    def unwind(self) -> None:
        """Leave the modes that an interrupted forward pass left on torch's stack."""
        around = [attached for attached in self._attached if isinstance(attached, ModeAround)]
        while any([one.unwind() for one in around]):  # noqa: C419 (each must have its turn)
            pass
        for capture in self.captures:
            capture.running = 0

    # ---- statistics ----------------------------------------------------------------------------

    def take_statistics(self, loss_scale: Callable[[], float] = lambda: 1.0) -> Taken:
        """What every layer saw since the last call; its gradients were `loss_scale()` times too large.

        It is asked only where there are statistics: a GradScaler's answer has to come from the device.
        """
        if not self.clock.sampled and all(slot.grad is None for slot in self._slots):
            for capture in self.captures:
                capture.take_nothing()
            return [None for _ in self.captures]
        taken = [capture.take() for capture in self.captures]
        return self._all_unscaled(taken, loss_scale())

    def forget_rows(self) -> None:
        """Drop what passes left for directions."""
        for kept in self.kept.values():
            kept.forget()

    def _all_unscaled(self, taken: Taken, scale: Any) -> Taken:
        return [
            None if t is None else _unscaled(t, scale, layer.spec.kind)
            for t, layer in zip(taken, self.layers, strict=True)
        ]

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.ranks.alone and self.tensor_ranks.alone

    def agree(
        self,
        parameters: Iterable[torch.Tensor],
        taken: Taken,
        moves: Callable[[nn.Parameter], bool],
    ) -> Agreement:
        """Whether the step can be taken and with which layers; ranks that are not alone wait for it.

        Args:
            parameters: whose gradients must be finite.
            taken: of this rank.
            moves: whether the optimizer moves a parameter.
        """
        count, world = len(self.layers), self.ranks.world
        present = [
            layer.weight.parameter.grad is not None and moves(layer.weight.parameter)
            for layer in self.layers
        ]
        self._require_parameters(taken)
        names, self.clock.strangers = self.clock.strangers, set()
        read = [() if t is None else t.read for t in taken]
        names |= {self.layers[i].name for i, j in self.factors.input_of.items() if read[i] != read[j]}
        functional = self._functional_layers()
        flags = [
            present,
            [t is not None for t in taken],
            [t is not None and t.products is not None for t in taken],
            [layer.name in names for layer in self.layers],
            [capture.incomplete for capture in self.captures],
            [i in functional for i in range(count)],
        ]
        terms = self._terms(taken)
        finite = self._all_finite(parameters, taken, terms)
        if self.is_alone:
            return Agreement(
                unusable=(),
                finite=finite,
                present=[i for i, flag in enumerate(flags[0]) if flag],
                torn=[],
                seen=flags[1],
                measured=flags[2],
                strangers={i for i, flag in enumerate(flags[3]) if flag},
                incomplete={i for i, flag in enumerate(flags[4]) if flag},
                functional=functional,
                terms=torch.where(terms > 0, terms, torch.ones_like(terms)),
                share=1.0,
            )
        header = torch.zeros(world + len(flags) * count, dtype=torch.float64)
        header[world:] = torch.tensor([flag for row in flags for flag in row])
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
            bad = torch.tensor([float(sum(counts[:world]))], dtype=torch.float64)
            bad = self.tensor_ranks.total(bad, "K-FAC's agreement on the step")
            counts[self.ranks.rank] += int(bad) if not any(counts[:world]) else 0
        present_on, *others = (counts[world + i * count :][:count] for i in range(len(flags)))
        seen, measured, strangers, incomplete, anywhere = ([n > 0 for n in row] for row in others)
        return Agreement(
            unusable=tuple(r for r in range(world) if counts[r]),
            finite=None,
            present=[i for i, n in enumerate(present_on) if n == world],
            torn=[i for i, n in enumerate(present_on) if 0 < n < world],
            seen=seen,
            measured=measured,
            strangers={i for i, flag in enumerate(strangers) if flag},
            incomplete={i for i, flag in enumerate(incomplete) if flag},
            functional={i for i, flag in enumerate(anywhere) if flag},
            terms=torch.where(total > 0, total, torch.ones_like(total)),
            share=self._share_of(terms, total),
        )

    def _require_parameters(self, taken: Taken) -> None:
        """RuntimeError if a layer ran whose weight is not the model's, or not as it was, any more."""
        shapes = zip(self.layers, self._shapes, strict=True)
        resized = [layer.name for layer, shape in shapes if layer.weight.parameter.shape != shape]
        if resized:
            raise RuntimeError(
                "the parameters of these layers must have the shapes that they had when K-FAC was "
                f"attached, got others: {', '.join(map(repr, resized))}. {_ATTACH_AGAIN}"
            )
        pairs = zip(self.layers, taken, strict=True)
        ran = [layer for layer, t in pairs if t is not None and layer.weight.parameter.grad is None]
        if not ran:
            return
        present = {id(p) for p in self.model.parameters()}
        replaced = [layer.name for layer in ran if id(layer.weight.parameter) not in present]
        if replaced:
            raise RuntimeError(
                "the parameters of these layers must be those that K-FAC was attached to, got others: "
                f"{', '.join(map(repr, replaced))}. {_ATTACH_AGAIN}"
            )

    def _share_of(self, terms: torch.Tensor, total: torch.Tensor) -> float | torch.Tensor:
        """Weight of this rank's loss in that of all: by its terms where it is their mean."""
        if self.ranks.alone or self.factor_scaling == "kfac_pytorch":
            return 1.0
        if self.loss_reduction == "sum" or self.global_mean:
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
        return all_finite(*given, scale, self.factor_dtype)

    def update(self, taken: Taken, agreed: Agreement, factor_decay: float) -> bool:
        """Average statistics into the factors of the layers that some rank has seen.

        Returns:
            Whether this was a step at all: not with gradients that are all zero and nothing seen, as
            torch.distributed.checkpoint has it to see what an optimizer's state looks like.
        """
        if not any(agreed.seen):
            return self._report_nothing()
        self._report_unseen(agreed.seen)
        self._report_thawed()
        self._settle_functions(agreed.functional)
        partial = self._settle_sharing(taken, agreed)
        if not self.clock.sampled:  # gradients of the loss of all ranks, of which this is a share
            share = agreed.share
            inverse = 1 / share if isinstance(share, float) else 1 / share.clamp_min(1e-30)
            taken = self._all_unscaled(taken, inverse)
        elif self.loss_reduction == "mean":
            # Sampled gradients are of single terms: N times those of a loss that is their mean.
            taken = self._all_unscaled(taken, agreed.terms)
        scaling = Scaling(agreed.terms, self.loss_reduction, self.factor_scaling)
        new = summed_factors(self.captures, taken, agreed.seen, self.factors, scaling)
        seen = {
            (i, side): agreed.seen[i] and not (side == "A" and i in partial)
            for i, side in self.factors.all_keys()
        }
        self.factors.update(new, seen, factor_decay, agreed.finite)
        if self.rule.compute_method == "ekfac":
            products = summed_products(self.captures, taken, agreed.measured, self.factors, scaling)
            self.factors.update_products(products, factor_decay, agreed.finite)
        return True

    def _terms(self, taken: Taken) -> torch.Tensor:
        """How many terms the loss has: if it is not given, output positions of the layer that ran last.

        That is the number of examples for a classifier, of tokens for a language model, of pixels for a
        segmentation network. A layer that runs several times counts each time: right for a head that
        reads one token at a time, too many for a last layer that is applied to its own output.
        """
        rows = [t.main.rows for t in taken if t is not None]
        if not rows:
            return torch.zeros(())
        if self.clock.sampled:
            return torch.full_like(rows[0], max(t.terms for t in taken if t is not None))
        if self.terms is not None:
            given = self.terms() if callable(self.terms) else self.terms
            return torch.as_tensor(given).to(rows[0])
        known = {
            layer.name: t.positions
            for layer, t in zip(self.layers, taken, strict=True)
            if t is not None and layer.spec.kind != "free"
        }
        if not known:  # nothing but free parameters: `agree` makes it one term
            return torch.zeros_like(rows[0])
        if self.clock.last in known:
            positions, transposed = known[self.clock.last]
            if self.clock.last_transposed and transposed is not None:
                return transposed
            return positions
        name = next(reversed(known))
        seen = self.clock.positions.get(name)
        if self.clock.last is not None or not seen:
            return known[name][0]
        # A layer that is not covered came last: its positions in units of those of one that is.
        return known[name][0] * (self.clock.last_positions / seen)

    def _report_nothing(self) -> bool:
        """No layer was seen: an error if none ever was though there are gradients, else a warning.

        Returns False, without a word, where all gradients are zeros.
        """
        said = "K-FAC saw no layer run in training mode with gradients since the last step"
        why = (
            "A model that torch.compile has compiled before K-FAC was attached loses its hooks (attach "
            "first, or call torch._dynamo.reset()), and gradients from torch.func have none"
        )
        if all(layer.spec.kind == "free" for layer in self.layers):
            names = ", ".join(repr(layer.name) for layer in self.layers)
            why = f"K-FAC does not know the operations in which {names} are used: see skip_layers"
        elif self.clock.positions:
            why = (
                "Its hooks ran, so these gradients are not those of a backward pass since: "
                "torch.autograd.grad and backward(inputs=...) compute what they are asked for alone "
                "(call loss.backward()), and kfac.zero_grad() forgets the pass before it"
            )
        if self.clock.sampled:
            said = "K-FAC saw no backward pass through the model's output since the last step"
            why = "With a sampled Fisher call the model itself, not its parts"
        gradients = [layer.weight.local_grad() for layer in self.layers]
        here = [g is not None and bool(g.any()) for g in gradients]
        flags = torch.tensor([any(here), any(g is not None for g in gradients)], dtype=torch.float64)
        moving, given = (x > 0 for x in self.ranks.total(flags, "K-FAC's report").tolist())
        if given and not moving:
            return False
        if not self.attached:
            said = "K-FAC was detached: there are no statistics"
        elif self.model.training and moving:
            if not self._unseen_reported:
                raise RuntimeError(f"{said}, although its layers have gradients. {why}")
            said = f"{said}, although its layers have gradients ({why})"
        warn_user(f"{said}, so its factors were not updated")
        return True

    def _report_unseen(self, seen: Sequence[bool]) -> None:
        """Once: warn about layers that have a gradient but never ran where a hook could see it."""
        if self._unseen_reported:
            return
        self._unseen_reported = True
        unseen: list[Layer] = []
        for layer, here in zip(self.layers, seen, strict=True):
            gradient = layer.weight.local_grad()
            if not here and gradient is not None and bool(gradient.any()):
                unseen.append(layer)
        if unseen:
            names = ", ".join(repr(layer.name) for layer in unseen)
            warn_user(
                "these layers got a gradient but were not seen running in training mode, and keep "
                f"their plain gradient (times kl_clip's coefficient) until they are: {names}"
            )

    def _report_thawed(self) -> None:
        """Once: warn about parameters that were frozen and have a gradient now."""
        if any(p.requires_grad and p.grad is not None for p in self._frozen):
            self._frozen = []
            warn_user(
                "parameters that were frozen when K-FAC was attached have gradients now and keep them "
                "plain: detach() and attach again to cover them"
            )

    def report_added(self, parameters: Iterable[torch.Tensor]) -> None:
        """Warn about the model's parameters that the optimizer moves from now on, not covered."""
        covered = {id(p) for layer in self.layers for p in layer.parameters()}
        added = {id(p) for p in parameters} - covered
        names = [n for n, p in self.model.named_parameters() if id(p) in added]
        if names:
            listed = ", ".join(repr(self._name_of(name)) for name in names)
            warn_user(
                "these parameters were not covered when K-FAC was attached and keep their gradients "
                f"plain until you detach() and attach again: {listed}"
            )

    def _report_strays(self) -> None:
        """Once: warn about weights that something else than their layers uses."""
        strays = [*self._uses.strays(), *sorted(self.clock.strays)]
        self._uses.detach()
        if strays:
            names = ", ".join(repr(name) for name in strays)
            warn_user(
                "statistics miss some uses of these weights, outside of their layer (by a function of "
                f"torch.nn.functional perhaps) or in an operation K-FAC does not know: {names}. Call a "
                "layer that shares the weight instead, or name them in skip_layers"
            )

    # ---- layers that read the same input -------------------------------------------------------

    def _settle_sharing(self, taken: Taken, agreed: Agreement) -> set[int]:
        """Which layers share an A: those that read the same tensors in every call of the first passes.

        And, also later, in every call that was a part of the loss: two heads may run in every forward
        pass and have a micro-batch each.

        Returns:
            Layers that shared one and did not in this step, whose own A is therefore incomplete.
        """
        if self.clock.discovering:
            self.clock.discovering = False
            self._report_strays()
            found = self._find_sharing(taken)
            for capture in self.captures:
                capture.inputs = []
            self._share(found)
        self.clock.forget()
        # One that leads and was no part of the loss has summed nothing for those that follow.
        alone = {i for i, j in self.factors.input_of.items() if agreed.seen[i] and not agreed.seen[j]}
        strangers = (agreed.strangers | alone) & self.factors.input_of.keys()
        if strangers:
            self._share({i: j for i, j in self.factors.input_of.items() if i not in strangers})
        return strangers & agreed.incomplete

    def _find_sharing(self, taken: Taken) -> dict[int, int]:
        """Layer -> the one whose A is its A, too, on every rank; only layers that were seen."""
        first: dict[Any, int] = {}
        labels: dict[int, int] = {}  # layer -> the first that reads what it reads
        # The one that runs first leads: it has the input when the others come.
        for i in sorted(range(len(self.captures)), key=lambda i: self.captures[i].first_call):
            capture = self.captures[i]
            layer, spec = capture.layer, capture.layer.spec
            seen = taken[i]
            if seen is None or not capture.inputs or spec.kind not in ("dense", "convolution"):
                continue
            if len(layer.sites) > 1:
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
        for i, capture in enumerate(self.captures):
            leader = self.factors.input_of.get(i)
            capture.leads = i in leaders
            capture.input_of = None if leader is None else self.captures[leader]
            capture.bases = self.factors.bases(i)

    # ---- directions ----------------------------------------------------------------------------

    def refresh(self, damping: float, step: int, turn: Turn | None = None) -> None:
        """Recompute all inverses or eigenbases, or those whose turn it is in this step of a cycle."""
        self.factors.refresh(damping, turn)
        if turn is None or turn[0] == 0 or self.refreshed_at is None:
            self.refreshed_at = step if self.factors.allocated else None
        self._tell_captures()

    def precondition(
        self,
        damping: float,
        kl_clip: float | None,
        lr_of: Callable[[nn.Parameter], Any],
        agreed: Agreement,
    ) -> None:
        """Replace the gradients of all layers that have one on every rank by directions, in place."""
        self._report_torn(agreed.torn)
        self.factors.allocate()
        if not agreed.present:
            self.forget_rows()
            return
        whole = self.gradients.whole(agreed.present)
        known = self._directions_of_rows(whole)
        rates = {i: lr_of(self.layers[i].weight.parameter) for i in whole} if kl_clip is not None else {}
        directions = Directions(self.factors, whole, known, damping, rates)

        def change_of(chosen: Sequence[int]) -> torch.Tensor:
            products = directions.products(chosen)
            return squared_rates_times([(rates[i], product) for i, product in products])

        def changes_of(chosen: Sequence[int]) -> torch.Tensor:
            if self.tensor_ranks.alone:
                return change_of(chosen)[None]
            split = [i for i in chosen if self.layers[i].tensor_split]
            both = change_of([i for i in chosen if i not in split]), change_of(split)
            return torch.stack([x.to(self.tensor_ranks.device, torch.float64) for x in both])

        def coefficient_of(changes: torch.Tensor) -> torch.Tensor:
            assert kl_clip is not None
            change = changes[0]
            if any(self.layers[i].tensor_split for i in agreed.present):
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
        )

    def _directions_of_rows(
        self, whole: Mapping[int, Sequence[torch.Tensor]]
    ) -> dict[int, list[torch.Tensor]]:
        """Of layers whose gradients are those of the few rows that were kept."""
        given = {i: rows for i, kept in self.kept.items() if (rows := kept.take()) is not None}
        given = {i: rows for i, rows in given.items() if i in whole and self.factors.is_ready(i)}
        if not given:
            return {}
        fits = torch.cat([self.factors.rows_fit(i, rows, whole[i]) for i, rows in given.items()])
        found: dict[int, list[torch.Tensor]] = {}
        for (i, rows), fit in zip(given.items(), fits.tolist(), strict=True):  # one wait for all
            if fit:
                found[i] = self.factors.direction_of_rows(i, rows, bias=len(whole[i]) > 1)
            else:
                self.kept[i].refuse()
        return found

    def _report_torn(self, torn: Sequence[int]) -> None:
        """Once: warn about layers that have a gradient on some ranks only."""
        if torn and not self._torn_reported:
            self._torn_reported = True
            names = ", ".join(repr(self.layers[i].name) for i in torn)
            warn_user(
                f"these layers have a gradient on some ranks and none on others, and keep it plain: "
                f"{names}. Average gradients over ranks before step(), zeros where there is none"
            )

    # ---- reports -------------------------------------------------------------------------------

    def current_routing(self, moves: Callable[[nn.Parameter], bool]) -> Routing:
        """The routing report; a layer without evidence yet says so, one that shares an A, too."""
        notes: dict[int, list[str]] = {}
        ready: set[int] = set()  # parameters with a layer that is
        for i, layer in enumerate(self.layers):
            said = notes.setdefault(id(layer.weight.parameter), [])
            leader = self.factors.input_of.get(i)
            if leader is not None:
                said.append(f"shares A with {self.layers[leader].name}")
            own = {id(parameter) for parameter in layer.parameters()}
            if not self._unseen_reported or self.factors.is_ready(i):
                ready |= own
                continue
            why = ["no statistics yet, its gradient passes through, times kl_clip's coefficient"]
            if layer.sites[0].functional:
                kind = type(layer.sites[0].module).__name__
                why.append(f"the own forward of this {kind} calls no function that K-FAC knows with it")
            for number in own:
                notes.setdefault(number, []).extend(why)
        names = {self._name_of(n): p for n, p in self.model.named_parameters()}
        routes = []
        for name, now in names.items():
            if self._known.get(name) is not now:
                reason = "not the model's when K-FAC was attached: attach again to cover it"
                routes.append(Route(name, tuple(now.shape), "plain", "", reason))
        for route in self._routing:
            parameter = names.get(route.parameter)
            if parameter is not self._known.get(route.parameter):
                continue  # it was exchanged, or is gone
            said = list(notes.get(id(parameter), []))
            if parameter is not None and parameter.requires_grad and not moves(parameter):
                route = Route(route.parameter, route.shape, "plain", "", NOT_GIVEN)
            if route.treatment == "frozen" and parameter is not None and parameter.requires_grad:
                reason = "was frozen when K-FAC was attached: attach again to cover it"
                route = Route(route.parameter, route.shape, "plain", "", reason)
            if route.treatment == "kfac" and said:
                reason = "; ".join([route.reason, *dict.fromkeys(said)])
                treatment = "kfac" if id(parameter) in ready else "waiting"
                route = Route(route.parameter, route.shape, treatment, route.factors, reason)
            routes.append(route)
        return Routing(tuple(routes))

    def metrics(self, damping: float, step: int) -> dict[str, Any]:
        """Plain numbers for loggers; see `KFAC.metrics`."""
        layers: dict[str, dict[str, Any]] = {}
        for i, layer in enumerate(self.layers):
            record = self.factors.report(i) if self.factors.allocated else {}
            gradient = layer.weight.local_grad()
            if gradient is not None:
                norm = float(linalg.norm(local(layer.weight.parameter.detach())))
                record["update_to_weight"] = float(linalg.norm(gradient)) / max(norm, 1e-30)
            layers[layer.name] = record
        coefficient = self.clip_coefficient
        return {
            "damping": damping,
            "kl_clip_coefficient": 1.0 if coefficient is None else float(coefficient),
            "steps_since_refresh": None if self.refreshed_at is None else step - self.refreshed_at,
            "retries": self.factors.retries,
            "layers": layers,
        }

    # ---- checkpoints ---------------------------------------------------------------------------

    def state_dict(
        self, *, gather: bool, include_factors: bool = True, include_inverses: bool = True
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors by layer name, of all ranks or of this one."""
        if not gather:
            self.factors.allocate()
        collect = self.factors.gathered_state_dict if gather else self.factors.state_dict
        return collect(include_factors=include_factors, include_inverses=include_inverses)

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
        self.factors.load_state_dict(layers, sharing, held=held, refreshed=refreshed)
        self.clock.discovering = not discovered
        self._tell_captures()

    def snapshot(self) -> tuple[Any, ...]:
        """All state, for `rewind`."""
        return self.factors.snapshot(), self.clock.discovering

    def rewind(self, snapshot: tuple[Any, ...]) -> None:
        """Back to a `snapshot`."""
        self.factors.rewind(snapshot[0])
        self.clock.discovering = snapshot[1]
        self._tell_captures()


RANK_STRIDE = 1_000_003  # between the seeds of ranks: each draws noise for rows of its own


def _unscaled(captured: Captured, scale: Any, kind: str) -> Captured:
    """Statistics of gradients that were `scale` times too large, of a layer of this kind; in place."""
    if isinstance(scale, float) and scale == 1.0:
        return captured
    scale = scale.to(captured.main.G.device) if isinstance(scale, torch.Tensor) else scale
    # The gradients of norm and free layers are in A, and their G counts rows.
    squares = [captured.main.A if kind in ("norm", "free") else captured.main.G]
    if captured.transposed is not None:
        squares.append(captured.transposed.G)
    if captured.products is not None:
        squares.append(captured.products)
    for x in squares:
        x.div_(scale).div_(scale)
    return captured


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


def _take_off(attached: list[Any], attentions: list[Attention]) -> None:
    for one in attached:
        for handle in one.handles:
            handle.remove()
    for attention in attentions:
        attention.detach()
