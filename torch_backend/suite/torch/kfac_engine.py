"""K-FAC over all layers of a model: capture, buckets, and the four verbs on them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from suite.core import buckets, ekfac, linalg, statistics
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
from suite.torch.hooks import Hook, ModeAround
from suite.torch.layers import FoundLayers, Layer
from suite.torch.uses import UseCounter

Taken = list[Captured | None]

# Another try at a factor that failed: more damping, in units of its mean eigenvalue, then float64.
_RETRIES = ((1e-3, None), (0.0, torch.float64))


_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class _Place(NamedTuple):
    """Where a layer's factor is."""

    bucket: int
    start: int
    stop: int


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
        self.warm_start = warm_start
        self.keeps_products = rule.compute_method == "ekfac" or (
            outer_product and rule.compute_method == "eigen"
        )
        self.factor_dtype, self.inv_dtype = factor_dtype, inv_dtype
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
        self.buckets = buckets.plan_buckets(
            [
                ((layer.sizes, layer.diagonal, layer.dtype, layer.device), layer.blocks)
                for layer in self.layers
            ]
        )
        self.input_of: dict[int, int] = {}  # layer -> the one whose A it shares
        self.factor_buckets: tuple[buckets.Bucket, ...] = ()
        self.owners: list[tuple[int, str]] = []  # (layer, side) of each stack in them
        self.places: dict[tuple[int, str], _Place] = {}
        self.factors: list[core_kfac.Factor] = []  # one stack for each size; empty until needed
        self.products: list[tuple[torch.Tensor, torch.Tensor]] = []  # one for each bucket
        self.retries = 0  # factorizations that a second or third try saved
        self.clip_coefficient: torch.Tensor | None = None
        self.refreshed_at: int | None = None
        self._cache: dict[tuple[int, str], tuple[Any, torch.Tensor]] = {}
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
            dtype = _at_least_single(layer.dtype)
            self.captures.append(LayerCapture(layer, dtype, self.clock, stream))
        self._uses = UseCounter(model, self.captures)
        self._attached.append(self._uses)
        capture_of = {id(c.layer): c for c in self.captures}
        self._attached += self.captures
        for module, layers in found.free.items():
            captures = [capture_of[id(layer)] for layer in layers if id(layer) in capture_of]
            if captures:
                self._attached.append(FreeCapture(module, captures))
        covered = {id(site.module) for layer in self.layers for site in layer.sites}
        covered |= {id(attention.module.out_proj) for attention in found.attentions}
        for module in model.modules():
            if isinstance(module, nn.Linear) and id(module) not in covered:
                self._attached.append(OutputWatch(module, module.out_features, self.clock))
            elif isinstance(module, _CONVOLUTIONS) and id(module) not in covered:
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
        self._allocate()
        terms = self._terms(taken)
        new = [None if t is None else self._normalized(i, t, terms) for i, t in enumerate(taken)]
        for number, bucket in enumerate(self.factor_buckets):
            self._update_bucket(number, bucket, new, partial, factor_decay)
        if self.rule.compute_method == "ekfac":
            self._update_products(taken, terms, factor_decay)
        self._cache.clear()

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

    def _of_the_loss(self, captured: Captured, terms: torch.Tensor) -> Captured:
        """Sampled gradients are of single terms: N times those of a loss that is their mean."""
        if self.clock.sampled and self.loss_reduction == "mean":
            return _unscaled(captured, terms)
        return captured

    def _update_bucket(
        self,
        number: int,
        bucket: buckets.Bucket,
        new: list[tuple[torch.Tensor, torch.Tensor] | None],
        partial: set[int],
        factor_decay: float,
    ) -> None:
        factor = self.factors[number]
        parts, seen = [], []
        for member in bucket.members:
            layer, side = self.owners[member.index]
            found = None if side == "A" and layer in partial else new[layer]
            seen += [found is not None] * (member.stop - member.start)
            if found is None:
                parts.append(torch.zeros_like(factor.average[member.start : member.stop]))
            else:
                parts.append(found[side == "G"].to(factor.average.dtype))
        mask = torch.tensor(seen, device=factor.weight.device)
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.factors[number] = self.rule.update_factor(factor, joined, mask, factor_decay)

    def _update_products(self, taken: Taken, terms: torch.Tensor, factor_decay: float) -> None:
        for number, bucket in enumerate(self.buckets):
            average, weight = self.products[number]
            parts, seen = [], []
            for member in bucket.members:
                captured = taken[member.index]
                if captured is not None:
                    captured = self._of_the_loss(captured, terms)
                sums = None if captured is None else captured.products
                seen += [sums is not None] * (member.stop - member.start)
                if sums is None:
                    parts.append(torch.zeros_like(average[member.start : member.stop]))
                else:
                    one = statistics.normalize_products(sums, terms.to(sums.device), self.loss_reduction)
                    parts.append(one.to(average.dtype))
            mask = torch.tensor(seen, device=average.device)
            self.products[number] = ekfac.update(average, weight, torch.cat(parts), mask, factor_decay)

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
        through = ", or no backward pass through the model's output" if self.clock.sampled else ""
        said = f"K-FAC saw no layer run in training mode with gradients since the last step{through}"
        gradients = [layer.weight.grad() for layer in self.layers]
        moving = any(g is not None and bool(g.any()) for g in gradients)
        if not self.attached:
            said = "K-FAC was detached: there are no statistics"
        elif self.model.training and moving and not self._unseen_reported:
            raise RuntimeError(
                f"{said}, although its layers have gradients: their hooks were lost. A model that "
                "torch.compile has compiled before K-FAC was attached does that: attach first, or call "
                "torch._dynamo.reset()"
            )
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
        strangers = {i for i in self.input_of if self.layers[i].name in names}
        if strangers:
            self._share({i: j for i, j in self.input_of.items() if i not in strangers})
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
        """Change which layers share an A; those that no longer do start from what was shared."""
        records = self.state_dict() if self.factors else None
        if records is not None:
            for i, leader in self.input_of.items():
                if i not in input_of:
                    source = records[self.layers[leader].name]
                    records[self.layers[i].name] |= {
                        key: tensor for key, tensor in source.items() if key.startswith("A")
                    }
        self.input_of = dict(input_of)
        self.factors = []
        self._point_captures()
        if records is not None:
            self._allocate()
            self._restore(records)

    def _point_captures(self) -> None:
        for i, capture in enumerate(self.captures):
            leader = self.input_of.get(i)
            capture.input_of = None if leader is None else self.captures[leader]

    # ---- memory --------------------------------------------------------------------------------

    def _plan_factors(self) -> tuple[list[tuple[Any, int]], list[tuple[int, str]]]:
        """(key, blocks) and (layer, side) of every factor, those of a bucket's layers together."""
        owners: list[tuple[int, str]] = []
        stacks = []
        for bucket in self.buckets:
            for side in ("A", "G"):
                for member in bucket.members:
                    if side == "A" and member.index in self.input_of:
                        continue
                    layer = self.layers[member.index]
                    at = 0 if side == "A" else 1
                    key = (layer.sizes[at], layer.diagonal[at], layer.dtype, layer.device)
                    stacks.append((key, layer.blocks))
                    owners.append((member.index, side))
        return stacks, owners

    def _allocate(self) -> None:
        if self.factors:
            return
        stacks, self.owners = self._plan_factors()
        self.factor_buckets = buckets.plan_buckets(stacks)
        self.places = {}
        for number, bucket in enumerate(self.factor_buckets):
            (side, diagonal, dtype, device) = bucket.key
            like = torch.empty(0, dtype=self.factor_dtype or _at_least_single(dtype), device=device)
            inverse_like = torch.empty(0, dtype=self.inv_dtype or _at_least_single(dtype), device=device)
            self.factors.append(
                self.rule.init_factor(
                    like,
                    (bucket.blocks,),
                    side,
                    diagonal,
                    inverse_like,
                    identity_start=self.factor_scaling == "kfac_pytorch",
                )
            )
            for member in bucket.members:
                place = _Place(number, member.start, member.stop)
                self.places[self.owners[member.index]] = place
        for i, leader in self.input_of.items():
            self.places[i, "A"] = self.places[leader, "A"]
        self.products = []
        if self.keeps_products:
            for bucket in self.buckets:
                sizes, _, dtype, device = bucket.key
                shape = (bucket.blocks, sizes[1], sizes[0])
                wide = self.inv_dtype or _at_least_single(dtype)
                average = torch.zeros(shape, dtype=_at_least_single(wide), device=device)
                self.products.append((average, average[:, 0, 0] + 1))
        self._cache.clear()

    def memory_plan(self) -> dict[str, int]:
        """Bytes that `memory_usage` will show, without allocating them."""
        plan = {"factors": 0, "inverses": 0}
        for (side, diagonal, dtype, _), blocks in self._plan_factors()[0]:
            count = blocks * (side if diagonal else side * side)
            wide = _at_least_single(dtype)
            factor, inverse = self.factor_dtype or wide, self.inv_dtype or wide
            plan["factors"] += count * factor.itemsize
            eigen = self.rule.keeps_eigenbases
            vectors = 0 if diagonal and eigen else count
            values = blocks * side if eigen else 0
            plan["inverses"] += (vectors + values) * inverse.itemsize
        if self.keeps_products:
            for bucket in self.buckets:
                sizes, _, dtype, _ = bucket.key
                wide = _at_least_single(self.inv_dtype or _at_least_single(dtype))
                plan["inverses"] += bucket.blocks * sizes[0] * sizes[1] * wide.itemsize
        return plan

    def memory_usage(self) -> dict[str, int]:
        """Bytes held by running averages ('factors') and by what was derived from them ('inverses')."""
        usage = {"factors": 0, "inverses": 0}
        for factor in self.factors:
            usage["factors"] += factor.average.nbytes
            inverse = factor.inverse
            arrays = inverse if isinstance(inverse, core_kfac.Eigen) else (inverse,)
            usage["inverses"] += sum(x.nbytes for x in arrays if x is not None)
        usage["inverses"] += sum(average.nbytes for average, _ in self.products)
        return usage

    # ---- refresh -------------------------------------------------------------------------------

    def refresh(self, damping: float, step: int) -> None:
        """Recompute all inverses or eigenbases."""
        if not self.factors:
            return
        dampings = self._dampings(damping)
        for number, factor in enumerate(self.factors):
            self.factors[number] = self._refreshed(number, factor, dampings[number])
        self._cache.clear()
        self.refreshed_at = step
        if self.keeps_products:
            for number in range(len(self.buckets)):
                A, _ = self._gathered(number, "A")
                G, _ = self._gathered(number, "G")
                self.products[number] = ekfac.restart(A, G)
        self._give_bases()

    def _give_bases(self) -> None:
        """Tell the captures in which bases to sum second moments, for EKFAC."""
        if self.rule.compute_method != "ekfac":
            return
        for i, layer in enumerate(self.layers):
            known = layer.spec.kind in ("dense", "convolution", "transposed")
            tied = any(site.transposed for site in layer.sites)  # sums would miss those uses
            if not known or tied or not self._is_ready(i):
                continue
            sides = []
            for side in ("A", "G"):
                place = self.places[i, side]
                vectors = self.factors[place.bucket].inverse.vectors
                sides.append(None if vectors is None else vectors[place.start : place.stop])
            self.captures[i].bases = (sides[0], sides[1])

    def _dampings(self, damping: float) -> list[Any]:
        """What goes onto the diagonals of each stack of factors."""
        if self.factor_scaling == "kfac_pytorch":  # the whole damping on both sides
            return [0.0 if self.rule.keeps_eigenbases else damping for _ in self.factors]
        if self.rule.keeps_eigenbases:
            return [0.0 for _ in self.factors]
        means = [core_kfac.mean_eigenvalue(factor) for factor in self.factors]

        def mean(index: int, side: str) -> torch.Tensor:
            place = self.places[index, side]
            return means[place.bucket][place.start : place.stop]

        groups: dict[int, list[int]] = {}
        for i in range(len(self.layers)):
            groups.setdefault(self.input_of.get(i, i), []).append(i)
        dampings = [torch.zeros_like(m) for m in means]
        for leader, members in groups.items():
            # One A, so one π for all that share it: from the mean of their G's.
            mean_G = torch.stack([mean(i, "G") for i in members]).mean(0)
            for i in members:
                split = self.rule.split_damping(mean(leader, "A"), mean_G, damping, self.layers[i].sizes)
                for side, value in zip(("A", "G"), split, strict=True):
                    place = self.places[i, side]
                    dampings[place.bucket][place.start : place.stop] = value
        return dampings

    def _refreshed(self, number: int, old: core_kfac.Factor, damping: Any) -> core_kfac.Factor:
        """`old` refreshed; a factor that fails gets more damping, then float64, then stays stale."""
        warm = self.warm_start and self.rule.keeps_eigenbases and bool(old.ready.all())
        new = self.rule.refresh_factor(old, damping, warm=warm)
        failed = new.failures > old.failures
        if not bool(failed.any()):
            return new
        for boost, dtype in _RETRIES:
            given = old if dtype is None else old._replace(average=old.average.to(dtype))
            again = self.rule.refresh_factor(given, damping, boost=boost)
            saved = failed & (again.failures == old.failures)
            self.retries += int(saved.sum())
            new = core_kfac.Factor(
                new.average,
                new.weight,
                core_kfac.where(saved, again.inverse, new.inverse),
                new.ready | saved,
                torch.where(saved, old.failures, new.failures),
            )
            failed = failed & ~saved
            if not bool(failed.any()):
                return new
        names = ", ".join(
            f"{self.layers[self.owners[m.index][0]].name!r} ({self.owners[m.index][1]})"
            for m in self.factor_buckets[number].members
            if bool(failed[m.start : m.stop].any())
        )
        warn_user(
            f"factorizations failed, also with more damping and in float64; the inverses before them "
            f"stay in use: {names}"
        )
        return new

    # ---- directions ----------------------------------------------------------------------------

    def precondition(
        self,
        damping: float,
        kl_clip: float | None,
        lr_of: Callable[[nn.Parameter], Any],
        moves: Callable[[nn.Parameter], bool],
    ) -> None:
        """Replace the gradients of all layers that the optimizer `moves` by directions, in place."""
        self._allocate()
        gradients: list[Any] = [None] * len(self.layers)
        directions: list[Any] = [None] * len(self.layers)
        for number, bucket in enumerate(self.buckets):
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
            buckets.scatter(bucket, self._directions(number, joined, damping), directions)
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

    def _directions(self, number: int, gradient: torch.Tensor, damping: float) -> torch.Tensor:
        A, ready_A = self._gathered(number, "A")
        G, ready_G = self._gathered(number, "G")
        products = None
        if self.keeps_products:
            average, weight = self.products[number]
            products = average / weight[:, None, None]
        direction: torch.Tensor = self.rule.apply(A, G, ready_A & ready_G, gradient, damping, products)
        return direction

    def _gathered(self, number: int, side: str) -> tuple[Any, torch.Tensor]:
        """(inverses, ready) of one side of a bucket's layers: a view if they are neighbours."""
        known = self._cache.get((number, side))
        if known is not None:
            return known
        places = [self.places[m.index, side] for m in self.buckets[number].members]
        factor = self.factors[places[0].bucket]
        index: Any = slice(places[0].start, places[-1].stop)
        if any(a.stop != b.start for a, b in itertools.pairwise(places)):
            rows = [row for place in places for row in range(place.start, place.stop)]
            index = torch.tensor(rows, device=factor.weight.device)
        inverse = factor.inverse
        if isinstance(inverse, core_kfac.Eigen):
            vectors = None if inverse.vectors is None else inverse.vectors[index]
            inverse = core_kfac.Eigen(vectors, inverse.values[index])
        else:
            inverse = inverse[index]
        self._cache[number, side] = inverse, factor.ready[index]
        return self._cache[number, side]

    # ---- reports -------------------------------------------------------------------------------

    def current_routing(self, moves: Callable[[nn.Parameter], bool]) -> Routing:
        """The routing report; a layer without evidence yet says so, one that shares an A, too."""
        notes: dict[int, list[str]] = {}
        for i, layer in enumerate(self.layers):
            said = notes.setdefault(id(layer.weight.parameter), [])
            leader = self.input_of.get(i)
            if leader is not None:
                said.append(f"shares A with {self.layers[leader].name}")
            if self._unseen_reported and self.factors and not self._is_ready(i):
                said.append("no statistics yet, its gradient passes through")
        names = {self._name_of(n): p for n, p in self.model.named_parameters()}
        routes = []
        for route in self.routing:
            parameter = names.get(route.parameter)
            said = list(notes.get(id(parameter), []))
            if parameter is not None and not moves(parameter):
                said.append("not in the optimizer: its gradient is left alone")
            if route.treatment == "frozen" and parameter is not None and parameter.requires_grad:
                reason = "was frozen when K-FAC was attached: attach again to cover it"
                route = Route(route.parameter, route.shape, "plain", "", reason)
            if route.treatment == "kfac" and said:
                reason = "; ".join([route.reason, *dict.fromkeys(said)])
                route = Route(route.parameter, route.shape, "kfac", route.factors, reason)
            routes.append(route)
        return Routing(tuple(routes))

    def _is_ready(self, index: int) -> bool:
        for side in ("A", "G"):
            place = self.places[index, side]
            if not bool(self.factors[place.bucket].ready[place.start : place.stop].all()):
                return False
        return True

    def metrics(self, damping: float, step: int) -> dict[str, Any]:
        """Plain numbers for loggers; see `KFAC.metrics`."""
        layers: dict[str, dict[str, Any]] = {}
        for i, layer in enumerate(self.layers):
            record: dict[str, Any] = {}
            if self.factors:
                for side in ("A", "G"):
                    place = self.places[i, side]
                    factor = self.factors[place.bucket]
                    at = slice(place.start, place.stop)
                    average = factor.average[at] / factor.weight[at].clamp_min(1e-30).reshape(
                        -1, *(1,) * (factor.average.ndim - 1)
                    )
                    record[f"condition_{side}"] = _condition(average)
                    record[f"failures_{side}"] = int(factor.failures[at].sum())
                record["ready"] = self._is_ready(i)
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
            "retries": self.retries,
            "layers": layers,
        }

    # ---- checkpoints ---------------------------------------------------------------------------

    def sharing(self) -> dict[str, str]:
        """Layer -> the layer whose A it shares, by name."""
        names = [layer.name for layer in self.layers]
        return {names[i]: names[j] for i, j in self.input_of.items()}

    def state_dict(
        self, *, include_factors: bool = True, include_inverses: bool = True
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors by layer name; nothing for any before the first step."""
        if not self.factors:
            return {layer.name: {} for layer in self.layers}
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for i, layer in enumerate(self.layers):
            record: dict[str, torch.Tensor] = {}
            for side in ("A", "G"):
                if side == "A" and i in self.input_of:
                    continue
                place = self.places[i, side]
                tensors = _tensors(self.factors[place.bucket], side)
                for name, tensor in tensors.items():
                    derived = name not in (side, f"{side}_weight")
                    if include_factors and (include_inverses or not derived):
                        record[name] = tensor[place.start : place.stop]
            layers[layer.name] = record
        if self.keeps_products and include_factors and include_inverses:
            for number, bucket in enumerate(self.buckets):
                for member in bucket.members:
                    name = self.layers[member.index].name
                    at = slice(member.start, member.stop)
                    average, weight = self.products[number]
                    layers[name] |= {"products": average[at], "products_weight": weight[at]}
        return layers

    def load_state_dict(
        self,
        layers: Mapping[str, Mapping[str, torch.Tensor]],
        sharing: Mapping[str, str],
        discovered: bool,
    ) -> None:
        """Take over `state_dict()`'s tensors; ValueError, and no change, if they do not fit."""
        names = [layer.name for layer in self.layers]
        missing, unknown = set(names) - layers.keys(), layers.keys() - set(names)
        if missing or unknown:
            raise ValueError(
                f"state_dict does not fit this model: layers missing {sorted(missing)}, "
                f"layers unknown {sorted(unknown)}"
            )
        for name in names:
            self._require_fit(name, layers[name], shared=name in sharing)
        at = {name: i for i, name in enumerate(names)}
        self.input_of = {at[a]: at[b] for a, b in sharing.items()}
        self.clock.discovering = not discovered
        self.factors = []
        self._point_captures()
        if any(layers.values()):
            self._allocate()
            self._restore(layers)

    def snapshot(self) -> tuple[Any, ...]:
        """All state, for `rewind`."""
        return self.input_of, list(self.factors), list(self.products), self.clock.discovering

    def rewind(self, snapshot: tuple[Any, ...]) -> None:
        """Back to a `snapshot`."""
        self.input_of, factors, products, self.clock.discovering = snapshot
        self.factors = []
        self._point_captures()
        if factors:
            self._allocate()
            self.factors, self.products = factors, products
            self._give_bases()

    def has_inverses(self, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        """Whether a state dict's layers have what a refresh computes, or nothing to compute it from."""
        return all("G_ready" in record or "G" not in record for record in layers.values())

    def _require_fit(self, name: str, record: Mapping[str, torch.Tensor], *, shared: bool) -> None:
        layer = next(layer for layer in self.layers if layer.name == name)
        blocks, sizes = layer.blocks, layer.sizes
        expected: dict[str, tuple[int, ...]] = {
            "products": (blocks, sizes[1], sizes[0]),
            "products_weight": (blocks,),
        }
        for at, side in enumerate(("A", "G")):
            if side == "A" and shared:
                continue
            square = (blocks, sizes[at], sizes[at])
            full = (blocks, sizes[at]) if layer.diagonal[at] else square
            expected |= {side: full, f"{side}_inverse": full, f"{side}_vectors": square}
            expected |= {f"{side}_values": (blocks, sizes[at])}
            expected |= {f"{side}_{key}": (blocks,) for key in ("weight", "ready", "failures")}
        for key, tensor in record.items():
            if tuple(tensor.shape) != expected.get(key):
                raise ValueError(
                    f"state of layer {name!r} must have shape {expected.get(key)} for {key}, "
                    f"got {tuple(tensor.shape)}"
                )

    def _restore(self, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for number, bucket in enumerate(self.factor_buckets):
            factor = self.factors[number]
            side_of = [self.owners[m.index] for m in bucket.members]
            fields: dict[str, torch.Tensor] = {}
            for field, own in _tensors(factor, "").items():
                parts = []
                for member, (index, side) in zip(bucket.members, side_of, strict=True):
                    given = layers[self.layers[index].name].get(f"{side}{field}")
                    kept = own[member.start : member.stop]
                    parts.append(kept if given is None else given.to(own))
                fields[field] = torch.cat(parts)
            self.factors[number] = _with_tensors(factor, fields)
        if self.keeps_products:
            for number, bucket in enumerate(self.buckets):
                average, weight = self.products[number]
                records = [layers[self.layers[m.index].name] for m in bucket.members]
                if all("products" in record for record in records):
                    self.products[number] = (
                        torch.cat([r["products"].to(average) for r in records]),
                        torch.cat([r["products_weight"].to(weight) for r in records]),
                    )
        self._give_bases()
        self._cache.clear()


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


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _condition(average: torch.Tensor) -> float:
    """Largest over smallest eigenvalue, worst over the blocks."""
    average = average.double()
    if average.ndim == 2:
        average = torch.diag_embed(average)
    return float(linalg.condition_number(average).amax())


def _take_off(attached: list[Any], attentions: list[Attention]) -> None:
    for one in attached:
        for handle in one.handles:
            handle.remove()
    for attention in attentions:
        attention.detach()


def _tensors(factor: core_kfac.Factor, side: str) -> dict[str, torch.Tensor]:
    """A factor's tensors by name; `_with_tensors` undoes it."""
    tensors = {side: factor.average, f"{side}_weight": factor.weight}
    inverse = factor.inverse
    if isinstance(inverse, core_kfac.Eigen):
        tensors[f"{side}_values"] = inverse.values
        if inverse.vectors is not None:
            tensors[f"{side}_vectors"] = inverse.vectors
    else:
        tensors[f"{side}_inverse"] = inverse
    tensors[f"{side}_ready"] = factor.ready
    tensors[f"{side}_failures"] = factor.failures
    return tensors


def _with_tensors(factor: core_kfac.Factor, tensors: dict[str, torch.Tensor]) -> core_kfac.Factor:
    inverse: Any = tensors.get("_inverse")
    if isinstance(factor.inverse, core_kfac.Eigen):
        inverse = core_kfac.Eigen(tensors.get("_vectors"), tensors["_values"])
    return core_kfac.Factor(
        tensors[""], tensors["_weight"], inverse, tensors["_ready"], tensors["_failures"]
    )
