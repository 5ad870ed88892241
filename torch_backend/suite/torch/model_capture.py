"""Capture over a whole model: the hooks on all of its layers, and what these saw since the last step."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from suite.core.noise import stream_numbers
from suite.torch.attention import Attention
from suite.torch.capture import Captured, LayerCapture
from suite.torch.clock import CaptureClock
from suite.torch.dtensors import sharded_modules
from suite.torch.factor_store import at_least_single
from suite.torch.find_layers import FoundLayers
from suite.torch.functional import (
    FunctionCapture,
    RunningLayer,
    callers,
    has_functions,
    only_calls,
)
from suite.torch.hooks import Apart, ModeAround, Stacks, leave_interrupted
from suite.torch.kinds import RECURRENT
from suite.torch.layers import CONVOLUTIONS, TRANSPOSED
from suite.torch.recurrent import Product
from suite.torch.stacks import StackCapture
from suite.torch.thin import KeptRows, can_be_thin
from suite.torch.uses import UseCounter
from suite.torch.watches import FreeCapture, OutputWatch

Taken = list[Captured | None]


class ModelCapture:
    """Hooks on a model until `detach()`, or until this object is gone."""

    def __init__(self, model: nn.Module, found: FoundLayers, *, seed: int, keeps_rows: bool) -> None:
        """Attach.

        Args:
            model: with no K-FAC on any of the layers found.
            found: its layers.
            seed: of the noise that chooses rows or examples, this rank's own.
            keeps_rows: whether layers keep their rows for directions.
        """
        self.model, self.layers = model, found.layers
        self.clock = CaptureClock()
        self.clock.stream.fill_(stream_numbers(-1, 1, seed)[0])  # of its own
        self.by_layer: list[LayerCapture] = []
        self.kept: dict[int, KeptRows] = {}  # by layer
        self._attached: list[Any] = []  # everything with hooks
        self._attentions = found.attentions
        leave_interrupted()
        self.once_for_all: dict[str, None] = {}  # names of layers, in order
        try:
            self._attach(model, found, seed, keeps_rows)
        except Exception:
            self.detach()
            raise
        # Whoever drops the last reference gets the model back as it was.
        weakref.finalize(self, _take_off, self._attached, self._attentions)

    def _attach(self, model: nn.Module, found: FoundLayers, seed: int, keeps_rows: bool) -> None:
        for attention in found.attentions:
            attention.attach()
        fully_sharded = {id(p) for part in sharded_modules(model) for p in part.parameters()}
        for i, layer in enumerate(self.layers):
            (stream,) = stream_numbers(i, 1, seed)
            capture = LayerCapture(layer, at_least_single(layer.dtype), self.clock, stream)
            capture.held_back = id(layer.weight.parameter) in fully_sharded
            self.by_layer.append(capture)
            self._attached.append(capture)
        if keeps_rows:
            for i, capture in enumerate(self.by_layer):
                if can_be_thin(capture.layer):
                    self.kept[i] = capture.kept = KeptRows(capture.layer, self.clock)
                    self._attached.append(capture.kept)
        self.clock.captures = self.by_layer
        devices = {layer.device for layer in self.layers}
        if len(devices) == 1 and any(
            s.spec.max_rows or s.spec.max_examples for x in self.layers for s in x.sites
        ):
            self.clock.move(*devices)
        self._slots = self.slots()
        self._running_modes = Stacks()
        self._uses = UseCounter(model, self.by_layer, self._running_modes)
        self._attached.append(self._uses)
        self._watch_passes(True)  # until it is known that the model is not compiled
        capture_of = {id(c.layer): c for c in self.by_layer}
        self._attach_free(model, found, capture_of)
        for module, layers in found.stacks.items():
            captures = [capture_of[id(layer)] for layer in layers if id(layer) in capture_of]
            if captures:
                self._attached.append(StackCapture(module, captures))
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
            elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and not isinstance(module, RECURRENT):
                channels = getattr(module, "proj_size", 0) or module.hidden_size
                channels *= 1 + getattr(module, "bidirectional", False)
            elif not isinstance(module, (nn.Linear, nn.Bilinear)):
                continue
            own = self._functions.get(module)
            seen = (lambda: False) if own is None else functools.partial(bool, own.found)
            self._attached.append(OutputWatch(module, channels, self.clock, seen))
        self._gather_hooks()

    def _gather_hooks(self) -> None:
        """Those that see nothing where neither statistics are wanted nor the model is discovered."""
        kept = {id(self.by_layer[i]) for i in self.kept}
        self.clock.hooks = [
            hook
            for attached in self._attached
            if id(attached) not in kept and not isinstance(attached, KeptRows)
            for hook in attached.hooks
        ]

    def _attach_free(
        self, model: nn.Module, found: FoundLayers, capture_of: Mapping[int, LayerCapture]
    ) -> None:
        """Watch what modules do with parameters that are no layers', and what is around these."""
        watches = {}
        for module, layers in found.free.items():
            captures = [capture_of[id(layer)] for layer in layers if id(layer) in capture_of]
            if captures:
                watches[module] = FreeCapture(module, self._running_modes, captures)
        owners = dict(watches)
        for module in model.modules() if owners else ():
            if only_calls(module) and module not in owners:
                continue
            inside = [owners[child] for child in module.modules() if child in owners]
            inside = [one for one in inside if one.module() is not module]
            if inside and module not in watches:
                watches[module] = FreeCapture(module, self._running_modes)
            if inside:
                watches[module].inside = inside
        self._free = list(watches.values())
        self._attached += self._free

    def settle_free(self, around: set[int], seen: Sequence[bool]) -> None:
        """After a step: watch no longer around modules that alone use their parameters.

        Args:
            around: layers that are used around their modules, on some rank, see `functional_layers`.
            seen: by layer, whether some rank has its statistics.
        """
        if not any(watch.ran and watch.inside for watch in self._free):
            return
        names = [layer.name for layer in self.layers]
        given = {names[i] for i in around} - {name for watch in self._free for name in watch.found}
        given |= {
            layer.name
            for layer, has in zip(self.layers, seen, strict=True)
            if not has and layer.weight.parameter.grad is not None
        }
        for watch in [watch for watch in self._free if watch.settle(watch.found | given)]:
            for handle in watch.handles:
                handle.remove()
            self._free.remove(watch)
            self._attached.remove(watch)
        self._gather_hooks()

    def _attach_functions(self, model: nn.Module) -> dict[nn.Module, FunctionCapture]:
        """By module, what watches the functions that its forward calls with weights of layers."""
        uses: dict[nn.Module, list[tuple[LayerCapture, int]]] = {}
        further: dict[nn.Module, list[tuple[LayerCapture, int]]] = {}  # out, of embeddings
        around = callers(model)
        for capture in self.by_layer:
            for index, site in enumerate(capture.layer.sites):
                if site.functional and site.spec.kind != "stack":
                    uses.setdefault(site.module, []).append((capture, index))
                if site.module in around and has_functions(capture.layer, site):
                    uses.setdefault(around[site.module], []).append((capture, index))
                at = site.module if site.functional else around.get(site.module)
                while site.spec.kind == "embedding" and at in around:
                    at = around[at]
                    further.setdefault(at, []).append((capture, index))
        found = {}
        for module in model.modules():  # from the outside in
            weights, tables = uses.get(module, []), further.get(module, [])
            if weights or tables:
                found[module] = FunctionCapture(module, weights, tables)
        watched = {id(capture): capture for own in uses.values() for capture, _ in own}
        self._attached += found.values()
        for capture in watched.values():
            modules = {site.module for site in capture.layer.sites}
            self._attached += [RunningLayer(capture, module) for module in modules]
        return found

    def functional_layers(self) -> set[int]:
        """The layers whose weights what is around their modules used, here and so far."""
        modes = self._functions.values()
        found = {id(own.uses[k][0]) for own in modes for k in own.found if not own.own[k]}
        names = {name for watch in self._free for name in watch.found}
        return {
            i
            for i, capture in enumerate(self.by_layer)
            if id(capture) in found or capture.layer.name in names
        }

    def settle_functions(self, functional: set[int]) -> None:
        """After a step: watch no longer where no rank's module gave a child's weight to a function."""
        given = {id(self.by_layer[i]) for i in functional}
        seen = {id(own.uses[k][0]) for own in self._functions.values() for k in own.found}

        def is_in_use(own: FunctionCapture) -> bool:
            """Tables further inside are where their sums were met, or on this rank nowhere."""
            here = {id(own.uses[k][0]) for k in own.found} | (given - seen)
            needed = [given] * len(own.weights) + [given & here] * (len(own.uses) - len(own.weights))
            return any(id(c) in those for (c, _), those in zip(own.uses, needed, strict=True))

        everyone = self._functions.values()
        gone = {id(own) for own in everyone if own.ran and not any(own.own) and not is_in_use(own)}
        if not gone:
            return
        self._functions = {m: own for m, own in self._functions.items() if id(own) not in gone}
        left = {id(capture) for own in self._functions.values() for capture, _ in own.uses}
        for capture in self.by_layer:
            capture.arounds = [own for own in capture.arounds if id(own) not in gone]
        for attached in self._attached:
            unused = isinstance(attached, RunningLayer) and id(attached.capture) not in left
            if unused or id(attached) in gone:
                for handle in attached.handles:
                    handle.remove()
                gone.add(id(attached))
        self._attached[:] = [attached for attached in self._attached if id(attached) not in gone]
        self._gather_hooks()

    def detach(self) -> None:
        """Take all hooks off the model."""
        self.unwind()
        self.forget_rows()
        _take_off(self._attached, self._attentions)
        self._attached.clear()
        Apart.take_out(self.model)

    @property
    def attached(self) -> bool:
        return bool(self._attached)

    def unwind(self) -> None:
        """Leave the modes that an interrupted forward pass left on torch's stack."""
        around = [attached for attached in self._attached if isinstance(attached, ModeAround)]
        while any([one.unwind() for one in around]):  # noqa: C419 (each must have its turn)
            pass
        leave_interrupted()
        for capture in self.by_layer:
            capture.running.clear()

    def _watch_passes(self, do: bool) -> None:
        """Whether backward passes ask for what was discarded, as no compiled forward pass does."""
        self._watches_passes = do
        for capture in self.by_layer:
            if do:
                capture.watch_passes()
            else:
                capture.leave_passes()

    def take_statistics(self, loss_scale: Callable[[], float] = lambda: 1.0) -> Taken:
        """What every layer saw since the last call; its gradients were `loss_scale()` times too large.

        It is asked only where there are statistics: a GradScaler's answer has to come from the device.
        """
        self.clock.taken = True
        self.clock.take_positions()
        nothing = all([slot.grad is None for slot in self._slots])  # noqa: C419 (it is faster)
        turned = [c.transposed[1] for c in self.by_layer if c.transposed]  # which derivatives may add
        nothing = nothing and all(slot.grad is None for slot in turned)
        if nothing and not self.clock.sampled:
            for capture in self.by_layer:
                capture.take_nothing()
            return [None for _ in self.by_layer]
        if self.clock.discovering and not self.clock.sampled:
            self.once_for_all.update(self._ran_once_for_all())
        if self._watches_passes != self.clock.is_compiled:  # which is known now, for something ran
            self._watch_passes(self.clock.is_compiled)
        counts = _unbound([capture.counted() for capture in self.by_layer])
        taken = [capture.take(pair) for capture, pair in zip(self.by_layer, counts, strict=True)]
        return self.all_unscaled(taken, loss_scale())

    def _ran_once_for_all(self) -> dict[str, None]:
        """The layers, by name, that computed something for all examples at once, as most did not."""
        ran = [capture for capture in self.by_layer if not _knows_axes(capture)]
        counts = collections.Counter(c.first.examples for c in ran if c.first.examples)
        if max(counts, default=0) < 2:  # what is trained may be there once (prompts for a frozen model)
            counts = collections.Counter(self.clock.not_covered)
        examples = max(counts, key=lambda n: (counts[n], n), default=0)
        if examples < 2 or self._uses.of_one_example:
            return {}
        calls = min((c.first.calls for c in ran if c.first.examples == examples), default=1)
        return {c.layer.name: None for c in ran if c.ran_once_for_all(examples, calls)}

    def slots(self) -> list[torch.Tensor]:
        """The leaves that statistics are gradients of."""
        return [slot for capture in self.by_layer for slot in capture.slots()]

    def begin_apart(self) -> None:
        """Forget what passes before found: examples, and autograd's nodes, which know of streams."""
        self.clock.forget_examples()
        for capture in self.by_layer:
            capture.forget_nodes()

    def forget_rows(self) -> None:
        """Drop what passes left for directions."""
        for kept in self.kept.values():
            kept.forget()

    def all_unscaled(self, taken: Taken, scale: Any) -> Taken:
        return [
            None if t is None else _unscaled(t, scale, layer.has_gradients_in_A)
            for t, layer in zip(taken, self.layers, strict=True)
        ]

    def strays(self) -> list[str]:
        """The layers, by name, whose weights something else used; asked once, after the first step."""
        in_graphs = [capture.layer.name for capture in self.by_layer if capture.strayed_in_graph]
        found = dict.fromkeys([*self._uses.strays(), *sorted(self.clock.strays), *in_graphs])
        if self.clock.is_compiled:  # a graph holds with the hooks of modules that there were
            self._uses.leave_weights()
        else:
            self._uses.detach()
        return list(found)


def _unbound(counts: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Both numbers of each, of those of one device and dtype in a few calls."""
    alike: dict[Any, dict[int, torch.Tensor]] = {}
    for i, pair in enumerate(counts):
        if pair is not None:
            alike.setdefault((pair.device, pair.dtype), {})[i] = pair
    found: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(counts)
    for own in alike.values():
        rows, positions = torch.stack(list(own.values())).unbind(1)
        for i, *both in zip(own, rows.unbind(), positions.unbind(), strict=True):
            found[i] = both[0], both[1]
    return found


def _unscaled(captured: Captured, scale: Any, in_A: bool) -> Captured:
    """Statistics of gradients that were `scale` times too large, and are in A or in G; in place."""
    if isinstance(scale, float) and scale == 1.0:
        return captured
    scale = scale.to(captured.main.G.device) if isinstance(scale, torch.Tensor) else scale
    squares = [captured.main.A if in_A else captured.main.G]
    if captured.transposed is not None:
        squares.append(captured.transposed.G)
    if captured.products is not None:
        squares.append(captured.products)
    for x in squares:
        x.div_(scale).div_(scale)
    return captured


def _knows_axes(capture: LayerCapture) -> bool:
    """Whether it is of an attention or a recurrent module, which put examples first or add an axis."""
    return isinstance(capture.layer.sites[0].module, Product)


def _take_off(attached: list[Any], attentions: list[Attention]) -> None:
    for one in attached:
        for handle in one.handles:
            handle.remove()
    for attention in attentions:
        attention.detach()
