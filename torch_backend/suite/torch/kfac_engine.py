"""K-FAC over all layers of a model: capture, buckets, and the four verbs on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from suite.core import buckets, linalg, statistics
from suite.core import kfac as core_kfac
from suite.core.noise import stream_numbers
from suite.core.routing import Route, Routing
from suite.core.step_size import inner_product, kl_clip_coefficient
from suite.torch.attention import Attention
from suite.torch.capture import (
    CaptureClock,
    Captured,
    FreeCapture,
    LayerCapture,
    OutputWatch,
)
from suite.torch.checks import warn_user
from suite.torch.factors import LayerFactors, at_least_single
from suite.torch.find_layers import FoundLayers
from suite.torch.hooks import Hook, ModeAround
from suite.torch.layers import CONVOLUTIONS, TRANSPOSED, Layer
from suite.torch.uses import UseCounter

Taken = list[Captured | None]


class KFACEngine:
    """State and steps of K-FAC for one model, on one device per layer."""

    def __init__(
        self,
        model: nn.Module,
        *,
        rule: core_kfac.KFAC,
        found: FoundLayers,
        factor_dtype: torch.dtype | None,
        inv_dtype: torch.dtype | None,
        loss_reduction: statistics.LossReduction,
        factor_scaling: statistics.FactorScaling,
        outer_product: bool,
        warm_start: bool,
        seed: int,
    ) -> None:
        self.rule = rule
        self.model = model
        self.loss_reduction: statistics.LossReduction = loss_reduction
        self.factor_scaling: statistics.FactorScaling = factor_scaling
        self.layers, self.routing = found.layers, found.routing
        self.routing.require_preconditioned("K-FAC")
        self.clock = CaptureClock()
        self.captures: list[LayerCapture] = []
        self._attached: list[Any] = []  # everything with hooks
        self._attentions = found.attentions
        self._name_of = found.name_of
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        try:
            self._attach(model, found, seed)
        except Exception:
            self.detach()
            raise
        # Whoever drops the last reference gets the model back as it was.
        weakref.finalize(self, _take_off, self._attached, self._attentions)
        self.factors = LayerFactors(
            self.layers,
            rule,
            factor_dtype=factor_dtype,
            inv_dtype=inv_dtype,
            factor_scaling=factor_scaling,
            outer_product=outer_product,
            warm_start=warm_start,
        )
        self.clip_coefficient: torch.Tensor | None = None
        self.refreshed_at: int | None = None
        self._unseen_reported = False

    def _attach(self, model: nn.Module, found: FoundLayers, seed: int) -> None:
        for name, module in model.named_modules():
            forward = module.__dict__.get("forward")
            hooked = list(module._forward_hooks.values())
            if isinstance(forward, Attention):
                hooked += list(forward.product("q")._forward_hooks.values())
            if any(isinstance(h, Hook) and h.owner() is not None for h in hooked):
                raise ValueError(
                    f"layer {found.name_of(name)!r} already has a K-FAC attached: "
                    "detach() that one first"
                )
            if isinstance(forward, Attention):  # of a K-FAC that is gone
                forward.detach()
        for attention in found.attentions:
            attention.attach()
        for i, layer in enumerate(self.layers):
            (stream,) = stream_numbers(i, 1, seed)
            capture = LayerCapture(layer, at_least_single(layer.dtype), self.clock, stream)
            self.captures.append(capture)
            self._attached.append(capture)
        self._uses = UseCounter(model, self.captures)
        self._attached.append(self._uses)
        capture_of = {id(c.layer): c for c in self.captures}
        for module, layers in found.free.items():
            captures = [capture_of[id(layer)] for layer in layers if id(layer) in capture_of]
            if captures:
                self._attached.append(FreeCapture(module, captures))
        covered = {id(site.module) for layer in self.layers for site in layer.sites}
        covered |= {id(attention.module.out_proj) for attention in found.attentions}
        for module in model.modules():
            if isinstance(module, nn.Linear) and id(module) not in covered:
                self._attached.append(OutputWatch(module, module.out_features, self.clock))
            elif isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)) and id(module) not in covered:
                self._attached.append(OutputWatch(module, module.out_channels, self.clock))

    def detach(self) -> None:
        """Take all hooks off the model."""
        self.unwind()
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

    # ---- statistics ----------------------------------------------------------------------------

    def take_statistics(self, loss_scale: float = 1.0) -> Taken:
        """What every layer saw since the last call; its gradients were `loss_scale` times too large."""
        taken = [capture.take() for capture in self.captures]
        return [None if t is None else _unscaled(t, loss_scale) for t in taken]

    def finite(self, parameters: Iterable[torch.Tensor], taken: Taken) -> bool:
        """Whether all gradients and statistics are; the one place where the host waits."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        tensors = [g._values() if g.is_sparse else g for g in gradients]
        tensors += [x for t in taken if t is not None for x in _arrays(t)]
        tensors = [x for x in tensors if x.numel()]
        if not tensors:
            return True
        largest = nn.utils.get_total_norm(tensors, norm_type=float("inf"))
        return bool(largest.isfinite())

    def update(self, taken: Taken, factor_decay: float) -> None:
        """Average statistics into the factors of the layers that saw something."""
        if all(t is None for t in taken):
            self._report_nothing()
            return
        self._report_unseen(taken)
        self._report_thawed()
        partial = self._settle_sharing()
        terms = self._terms(taken)
        new = [None if t is None else self._normalized(i, t, terms) for i, t in enumerate(taken)]
        self.factors.update(new, partial, factor_decay)
        if self.rule.compute_method == "ekfac":
            products = [None if t is None else self._normalized_products(t, terms) for t in taken]
            self.factors.update_products(products, factor_decay)

    def _normalized(
        self, index: int, captured: Captured, terms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        terms = terms.to(captured.main.A.device)
        captured = self._of_the_loss(captured, terms)
        places = self.captures[index].shape_of_places
        A, G = statistics.normalize(
            captured.main, terms, self.loss_reduction, self.factor_scaling, places
        )
        if captured.transposed is not None:
            other = statistics.normalize(
                captured.transposed, terms, self.loss_reduction, self.factor_scaling
            )
            A, G = statistics.add_transposed(A, G, *other)
        return A, G

    def _normalized_products(self, captured: Captured, terms: torch.Tensor) -> torch.Tensor | None:
        if captured.products is None:
            return None
        terms = terms.to(captured.products.device)
        products = self._of_the_loss(captured, terms).products
        normalized: torch.Tensor = statistics.normalize_products(products, terms, self.loss_reduction)
        return normalized

    def _of_the_loss(self, captured: Captured, terms: torch.Tensor) -> Captured:
        """Sampled gradients are of single terms: N times those of a loss that is their mean."""
        if self.clock.sampled and self.loss_reduction == "mean":
            return _unscaled(captured, terms)
        return captured

    def _terms(self, taken: Taken) -> torch.Tensor:
        """How many terms the loss has: the output positions of the layer that ran last.

        That is the number of examples for a classifier, of tokens for a language model, of pixels for a
        segmentation network. A layer that runs several times counts each time: right for a head that
        reads one token at a time, too many for a last layer that is applied to its own output.
        """
        first = next(t.main.rows for t in taken if t is not None)
        if self.clock.sampled:
            return torch.full_like(first, max(t.terms for t in taken if t is not None))
        known = {
            layer.name: t.positions
            for layer, t in zip(self.layers, taken, strict=True)
            if t is not None and layer.spec.kind != "free"
        }
        if not known:  # nothing but free parameters: one term
            return torch.ones_like(first)
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

    def _report_nothing(self) -> None:
        """No layer was seen: an error if none ever was though there are gradients, else a warning."""
        said = "K-FAC saw no layer run in training mode with gradients since the last step"
        why = (
            "A model that torch.compile has compiled before K-FAC was attached loses its hooks: attach "
            "first, or call torch._dynamo.reset()"
        )
        if self.clock.sampled:
            said = "K-FAC saw no backward pass through the model's output since the last step"
            why = "With a sampled Fisher call the model itself, not its parts"
        gradients = [layer.weight.grad() for layer in self.layers]
        moving = any(g is not None and bool(g.any()) for g in gradients)
        if not self.attached:
            said = "K-FAC was detached: there are no statistics"
        elif self.model.training and moving:
            if not self._unseen_reported:
                raise RuntimeError(f"{said}, although its layers have gradients. {why}")
            said = f"{said}, although its layers have gradients ({why})"
        warn_user(f"{said}, so its factors were not updated")

    def _report_unseen(self, taken: Taken) -> None:
        """Once: warn about layers that have a gradient but never ran where a hook could see it."""
        if self._unseen_reported:
            return
        self._unseen_reported = True
        unseen: list[Layer] = []
        for layer, t in zip(self.layers, taken, strict=True):
            gradient = layer.weight.grad()
            if t is None and gradient is not None and bool(gradient.any()):
                unseen.append(layer)
        if unseen:
            names = ", ".join(repr(layer.name) for layer in unseen)
            warn_user(
                "these layers got a gradient but were not seen running in training mode, and keep "
                f"their plain gradient until they are: {names}"
            )

    def _report_thawed(self) -> None:
        """Once: warn about parameters that were frozen and have a gradient now."""
        if any(p.requires_grad and p.grad is not None for p in self._frozen):
            self._frozen = []
            warn_user(
                "parameters that were frozen when K-FAC was attached have gradients now and keep them "
                "plain: detach() and attach again to cover them"
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

    def _settle_sharing(self) -> set[int]:
        """Which layers share an A: those that read the same tensors in every call of the first passes.

        Returns:
            Layers that shared one and did not in this step, whose own A is therefore incomplete.
        """
        if self.clock.discovering:
            self.clock.discovering = False
            self._report_strays()
            found = self._find_sharing()
            for capture in self.captures:
                capture.inputs = []
            self.clock.forget()
            self._share(found)
        names, self.clock.strangers = self.clock.strangers, set()
        strangers = {i for i in self.factors.input_of if self.layers[i].name in names}
        if strangers:
            self._share({i: j for i, j in self.factors.input_of.items() if i not in strangers})
        return {i for i in strangers if self.captures[i].incomplete}

    def _find_sharing(self) -> dict[int, int]:
        first: dict[Any, int] = {}
        input_of: dict[int, int] = {}
        # The one that runs first leads: it has the input when the others come.
        order = sorted(range(len(self.captures)), key=lambda i: self.captures[i].first_call)
        for i in order:
            capture = self.captures[i]
            layer, spec = capture.layer, capture.layer.spec
            if not capture.inputs or spec.kind not in ("dense", "convolution"):
                continue
            if len(layer.sites) > 1:
                continue
            alike = spec._replace(diagonal=(layer.diagonal[0], False))
            key = (tuple(capture.inputs), alike, layer.sizes[0], layer.blocks, layer.dtype, layer.device)
            leader = first.setdefault(key, i)
            if leader != i:
                input_of[i] = leader
        return input_of

    def _share(self, input_of: dict[int, int]) -> None:
        self.factors.share(input_of)
        self._tell_captures()

    def _tell_captures(self) -> None:
        """Whose A is whose, and in which bases to sum second moments."""
        for i, capture in enumerate(self.captures):
            leader = self.factors.input_of.get(i)
            capture.input_of = None if leader is None else self.captures[leader]
            capture.bases = self.factors.bases(i)

    # ---- directions ----------------------------------------------------------------------------

    def refresh(self, damping: float, step: int) -> None:
        """Recompute all inverses or eigenbases."""
        self.factors.refresh(damping)
        self.refreshed_at = step if self.factors.factors else None
        self._tell_captures()

    def precondition(
        self,
        damping: float,
        kl_clip: float | None,
        lr_of: Callable[[nn.Parameter], Any],
        moves: Callable[[nn.Parameter], bool],
    ) -> None:
        """Replace the gradients of all layers that the optimizer `moves` by directions, in place."""
        self.factors.allocate()
        gradients: list[Any] = [None] * len(self.layers)
        directions: list[Any] = [None] * len(self.layers)
        for number, bucket in enumerate(self.factors.buckets):
            for member in bucket.members:
                layer = self.layers[member.index]
                weight = layer.weight.parameter
                if weight.grad is not None and moves(weight):
                    gradients[member.index] = layer.gradient_matrix()
            present = [m for m in bucket.members if gradients[m.index] is not None]
            if not present:
                continue
            zeros = torch.zeros_like(gradients[present[0].index][:1])
            parts = [
                zeros.expand(m.stop - m.start, -1, -1)
                if gradients[m.index] is None
                else gradients[m.index]
                for m in bucket.members
            ]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            buckets.scatter(bucket, self.factors.directions(number, joined, damping), directions)
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not used:
            return
        self.clip_coefficient = None
        if kl_clip is not None:
            device = gradients[used[0]].device
            inner: Any = 0.0
            for i in used:
                lr = lr_of(self.layers[i].weight.parameter)
                inner = inner + (lr * lr * inner_product(directions[i], gradients[i])).to(device)
            self.clip_coefficient = kl_clip_coefficient(inner, kl_clip)
        for i in used:
            direction = directions[i]
            if self.clip_coefficient is not None:
                coefficient = self.clip_coefficient
                direction = direction * coefficient.to(device=direction.device, dtype=direction.dtype)
            self.layers[i].write_gradient(direction)

    # ---- reports -------------------------------------------------------------------------------

    def current_routing(self, moves: Callable[[nn.Parameter], bool]) -> Routing:
        """The routing report; a layer without evidence yet says so, one that shares an A, too."""
        notes: dict[int, list[str]] = {}
        for i, layer in enumerate(self.layers):
            said = notes.setdefault(id(layer.weight.parameter), [])
            leader = self.factors.input_of.get(i)
            if leader is not None:
                said.append(f"shares A with {self.layers[leader].name}")
            if self._unseen_reported and not self.factors.is_ready(i):
                said.append("no statistics yet, its gradient passes through")
        names = {self._name_of(n): p for n, p in self.model.named_parameters()}
        routes = []
        for route in self.routing:
            parameter = names.get(route.parameter)
            said = list(notes.get(id(parameter), []))
            if route.treatment == "kfac" and parameter is not None and not moves(parameter):
                reason = "not in the optimizer: its gradient is left alone"
                route = Route(route.parameter, route.shape, "plain", "", reason)
            if route.treatment == "frozen" and parameter is not None and parameter.requires_grad:
                reason = "was frozen when K-FAC was attached: attach again to cover it"
                route = Route(route.parameter, route.shape, "plain", "", reason)
            if route.treatment == "kfac" and said:
                reason = "; ".join([route.reason, *dict.fromkeys(said)])
                route = Route(route.parameter, route.shape, "kfac", route.factors, reason)
            routes.append(route)
        return Routing(tuple(routes))

    def metrics(self, damping: float, step: int) -> dict[str, Any]:
        """Plain numbers for loggers; see `KFAC.metrics`."""
        layers: dict[str, dict[str, Any]] = {}
        for i, layer in enumerate(self.layers):
            record = self.factors.report(i) if self.factors.factors else {}
            gradient = layer.weight.grad()
            if gradient is not None:
                norm = float(linalg.norm(layer.weight.parameter.detach()))
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
        self, *, include_factors: bool = True, include_inverses: bool = True
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors by layer name."""
        return self.factors.state_dict(
            include_factors=include_factors, include_inverses=include_inverses
        )

    def load_state_dict(
        self,
        layers: Mapping[str, Mapping[str, torch.Tensor]],
        sharing: Mapping[str, str],
        discovered: bool,
    ) -> None:
        """Take over `state_dict()`'s tensors; ValueError, and no change, if they do not fit."""
        self.factors.load_state_dict(layers, sharing)
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


def _unscaled(captured: Captured, scale: Any) -> Captured:
    """Statistics of gradients that were `scale` times too large."""
    if isinstance(scale, float) and scale == 1.0:
        return captured
    scale = scale.to(captured.main.G.device) if isinstance(scale, torch.Tensor) else scale
    main, transposed, products = captured.main, captured.transposed, captured.products
    return captured._replace(
        main=main._replace(G=main.G / scale / scale),
        transposed=None if transposed is None else transposed._replace(G=transposed.G / scale / scale),
        products=None if products is None else products / scale / scale,
    )


def _arrays(captured: Captured) -> list[torch.Tensor]:
    arrays = [captured.main.A, captured.main.G]
    if captured.transposed is not None:
        arrays += [captured.transposed.A, captured.transposed.G]
    return arrays if captured.products is None else [*arrays, captured.products]


def _take_off(attached: list[Any], attentions: list[Attention]) -> None:
    for one in attached:
        for handle in one.handles:
            handle.remove()
    for attention in attentions:
        attention.detach()
