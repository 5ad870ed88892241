"""K-FAC over all layers of a model: capture, buckets, and the four verbs on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from suite.core import buckets, statistics
from suite.core import kfac as core_kfac
from suite.core.routing import Route, Routing
from suite.core.step_size import inner_product, kl_clip_coefficient
from suite.torch.capture import CaptureClock, LayerCapture, OutputWatch
from suite.torch.layers import Layer, find_layers

_FIELDS = ("A", "G", "weight", "ready", "failures")


class KFACEngine:
    """State and steps of K-FAC for one model, on one device per layer."""

    def __init__(
        self,
        model: nn.Module,
        *,
        compute_method: core_kfac.ComputeMethod,
        skip_layers: list[str],
        factor_dtype: torch.dtype | None,
        inv_dtype: torch.dtype | None,
        max_factor_size: int,
        loss_reduction: statistics.LossReduction,
    ) -> None:
        self.rule = core_kfac.KFAC(compute_method)
        self.loss_reduction: statistics.LossReduction = loss_reduction
        self.layers, self.routing = find_layers(model, skip_layers, max_factor_size)
        self.routing.require_preconditioned("K-FAC")
        self.clock = CaptureClock()
        self.captures: list[LayerCapture] = []
        self.watches: list[OutputWatch] = []
        try:
            for layer in self.layers:
                dtype = _at_least_single(layer.weight.dtype)
                self.captures.append(LayerCapture(layer, dtype, self.clock))
        except ValueError:
            self.detach()
            raise
        covered = {id(layer.module) for layer in self.layers}
        self.watches = [
            OutputWatch(module, module.weight.shape[0], self.clock)
            for module in model.modules()
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
            and id(module) not in covered
        ]
        self.model = model
        self.buckets = buckets.plan_buckets(
            [
                (
                    (layer.sizes, layer.spec.diagonal, layer.weight.dtype, layer.weight.device),
                    layer.spec.groups,
                )
                for layer in self.layers
            ]
        )
        self.states: list[core_kfac.KFACState] = []
        for bucket in self.buckets:
            sizes, diagonal, weight_dtype, device = bucket.key
            dtype = _at_least_single(weight_dtype)
            like = torch.empty(0, dtype=factor_dtype or dtype, device=device)
            inverse_like = torch.empty(0, dtype=inv_dtype or dtype, device=device)
            self.states.append(self.rule.init(like, (bucket.blocks,), sizes, diagonal, inverse_like))
        self._unseen_reported = False

    def detach(self) -> None:
        """Take all hooks off the model."""
        for handle in [c.handle for c in self.captures] + [w.handle for w in self.watches]:
            handle.remove()
        self.captures, self.watches = [], []

    # ---- one step ------------------------------------------------------------------------------

    def take_statistics(self, loss_scale: float = 1.0) -> list[statistics.LayerStatistics | None]:
        """What every layer saw since the last call; its gradients were `loss_scale` times too large."""
        taken = [capture.take() for capture in self.captures]
        if loss_scale == 1.0:
            return taken
        return [t if t is None else t._replace(G=t.G / loss_scale / loss_scale) for t in taken]

    def finite(
        self, parameters: Iterable[torch.Tensor], taken: list[statistics.LayerStatistics | None]
    ) -> bool:
        """Whether all gradients and statistics are; the one place where the host waits."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        tensors = [g._values() if g.is_sparse else g for g in gradients]
        tensors += [x for t in taken if t is not None for x in (t.A, t.G)]
        if not tensors:
            return True
        largest = nn.utils.get_total_norm(tensors, norm_type=float("inf"))
        return bool(largest.isfinite())

    def update(self, taken: list[statistics.LayerStatistics | None], factor_decay: float) -> None:
        """Average statistics into the factors of the layers that saw something."""
        if all(t is None for t in taken):
            warnings.warn(
                "K-FAC saw no layer run in training mode with gradients since the last step, so its "
                "factors were not updated",
                RuntimeWarning,
                stacklevel=4,
            )
            return
        self._report_unseen(taken)
        terms = self._terms(taken)
        for i, bucket in enumerate(self.buckets):
            A, G, seen = [], [], []
            for member in bucket.members:
                sums, state = taken[member.index], self.states[i]
                blocks = member.stop - member.start
                seen += [sums is not None] * blocks
                if sums is None:
                    A.append(torch.zeros_like(state.A[member.start : member.stop]))
                    G.append(torch.zeros_like(state.G[member.start : member.stop]))
                else:
                    terms = terms.to(sums.A.device)
                    new = statistics.normalize(sums, terms, self.loss_reduction)
                    A.append(new[0].to(state.A.dtype))
                    G.append(new[1].to(state.G.dtype))
            mask = torch.tensor(seen, device=A[0].device)
            self.states[i] = self.rule.update(
                self.states[i], torch.cat(A), torch.cat(G), mask, factor_decay
            )

    def refresh(self, damping: float) -> None:
        """Recompute all inverses or eigenbases."""
        self.states = [self.rule.refresh(state, damping) for state in self.states]

    def precondition(
        self, damping: float, kl_clip: float | None, lr_of: Callable[[nn.Parameter], Any]
    ) -> None:
        """Replace the gradients of all layers by directions, in place."""
        gradients: list[Any] = [None] * len(self.layers)
        directions: list[Any] = [None] * len(self.layers)
        for i, bucket in enumerate(self.buckets):
            for member in bucket.members:
                layer = self.layers[member.index]
                if layer.weight.grad is not None:
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
            buckets.scatter(bucket, self.rule.precondition(self.states[i], joined, damping), directions)
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not used:
            return
        if kl_clip is not None:
            device = gradients[used[0]].device
            inner: Any = 0.0
            for i in used:
                lr = lr_of(self.layers[i].weight)
                inner = inner + (lr * lr * inner_product(directions[i], gradients[i])).to(device)
            coefficient = kl_clip_coefficient(inner, kl_clip)
        for i in used:
            direction = directions[i]
            if kl_clip is not None:
                direction = direction * coefficient.to(device=direction.device, dtype=direction.dtype)
            self.layers[i].write_gradient(direction)

    def _terms(self, taken: list[statistics.LayerStatistics | None]) -> torch.Tensor:
        """How many terms the loss has: the rows of the layer that ran last.

        That is the number of examples for a classifier, of tokens for a language model, of pixels for a
        segmentation network: the rows of the model's output.
        """
        rows = {layer.name: t.rows for layer, t in zip(self.layers, taken, strict=True) if t is not None}
        if self.clock.last in rows:
            return rows[self.clock.last]
        name = next(reversed(rows))
        seen = self.clock.rows.get(name)
        if self.clock.last is not None or not seen:
            return rows[name]
        # A layer that is not covered came last: its rows in units of those of one that is.
        return rows[name] * (self.clock.last_rows / seen)

    def _report_unseen(self, taken: list[statistics.LayerStatistics | None]) -> None:
        """Once: warn about layers that have a gradient but never ran through their hook."""
        if self._unseen_reported:
            return
        self._unseen_reported = True
        unseen: list[Layer] = [
            layer
            for layer, t in zip(self.layers, taken, strict=True)
            if t is None and layer.weight.grad is not None and bool(layer.weight.grad.any())
        ]
        if unseen:
            names = ", ".join(repr(layer.name) for layer in unseen)
            warnings.warn(
                "these layers got a gradient but were not seen running in training mode, and keep "
                f"their plain gradient until they are: {names}",
                RuntimeWarning,
                stacklevel=5,
            )

    # ---- reports and checkpoints ---------------------------------------------------------------

    def current_routing(self) -> Routing:
        """The routing report; a layer without evidence yet says so."""
        ready: dict[int, bool] = {}
        for bucket, state in zip(self.buckets, self.states, strict=True):
            for member in bucket.members:
                layer = self.layers[member.index]
                ready[id(layer)] = bool(state.ready[member.start : member.stop].all())
        waiting = {layer.name for layer in self.layers if not ready[id(layer)] and self._unseen_reported}
        routes = []
        for route in self.routing:
            owner = route.parameter.rpartition(".")[0]
            if route.treatment == "kfac" and owner in waiting:
                reason = f"{route.reason}; no statistics yet, its gradient passes through"
                route = Route(route.parameter, route.shape, "kfac", route.factors, reason)
            routes.append(route)
        return Routing(tuple(routes))

    def memory_usage(self) -> dict[str, int]:
        """Bytes held by running averages ('factors') and by what was derived from them ('inverses')."""
        usage = {"factors": 0, "inverses": 0}
        for state in self.states:
            for name, tensor in _tensors(state).items():
                usage["factors" if name in _FIELDS else "inverses"] += tensor.nbytes
        return usage

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors by layer name."""
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for bucket, state in zip(self.buckets, self.states, strict=True):
            for member in bucket.members:
                layers[self.layers[member.index].name] = {
                    name: tensor[member.start : member.stop] for name, tensor in _tensors(state).items()
                }
        return {layer.name: layers[layer.name] for layer in self.layers}

    def load_state_dict(self, layers: dict[str, dict[str, torch.Tensor]]) -> None:
        """Take over `state_dict()`'s tensors; ValueError, and no change, if they do not fit."""
        own = self.state_dict()
        missing, unknown = own.keys() - layers.keys(), layers.keys() - own.keys()
        if missing or unknown:
            raise ValueError(
                f"state_dict does not fit this model: layers missing {sorted(missing)}, "
                f"layers unknown {sorted(unknown)}"
            )
        for name, tensors in own.items():
            found = {key: tuple(tensor.shape) for key, tensor in layers[name].items()}
            expected = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
            if found != expected:
                raise ValueError(f"state of layer {name!r} must have shapes {expected}, got {found}")
        for i, (bucket, state) in enumerate(zip(self.buckets, self.states, strict=True)):
            names = [self.layers[member.index].name for member in bucket.members]
            joined = {
                key: torch.cat([layers[name][key].to(tensor.device) for name in names]).to(tensor.dtype)
                for key, tensor in _tensors(state).items()
            }
            self.states[i] = _with_tensors(state, joined)


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _tensors(state: core_kfac.KFACState) -> dict[str, torch.Tensor]:
    """A state's tensors by name; `_with_tensors` undoes it."""
    tensors = {name: getattr(state, name) for name in _FIELDS}
    for side in ("A", "G"):
        inverse = getattr(state, f"{side}_inverse")
        if isinstance(inverse, core_kfac.Eigen):
            tensors[f"{side}_values"] = inverse.values
            if inverse.vectors is not None:
                tensors[f"{side}_vectors"] = inverse.vectors
        else:
            tensors[f"{side}_inverse"] = inverse
    return tensors


def _with_tensors(state: core_kfac.KFACState, tensors: dict[str, torch.Tensor]) -> core_kfac.KFACState:
    fields: dict[str, Any] = {name: tensors[name] for name in _FIELDS}
    for side in ("A", "G"):
        if isinstance(getattr(state, f"{side}_inverse"), core_kfac.Eigen):
            eigen = core_kfac.Eigen(tensors.get(f"{side}_vectors"), tensors[f"{side}_values"])
            fields[f"{side}_inverse"] = eigen
        else:
            fields[f"{side}_inverse"] = tensors[f"{side}_inverse"]
    return state._replace(**fields)
