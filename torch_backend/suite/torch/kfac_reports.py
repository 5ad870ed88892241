"""What K-FAC tells its user: the routing report, warnings, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from suite.core import kfac as core_kfac
from suite.core import linalg
from suite.core.routing import Route, Routing
from suite.torch.capture import Captured
from suite.torch.checks import warn_user
from suite.torch.collectives import Ranks
from suite.torch.dtensors import local, named_with_owners, parameters_of
from suite.torch.factors import LayerFactors
from suite.torch.find_layers import FoundLayers
from suite.torch.layer_routes import NOT_GIVEN
from suite.torch.layers import Layer
from suite.torch.model_capture import ModelCapture, Taken
from suite.torch.recurrent import Product

_ATTACH_AGAIN = (
    "After replacing parameters, as fully_shard, load_state_dict(assign=True) and transformers' "
    "resize_token_embeddings do, detach() and attach again"
)


class Reports:
    """Remembers what has been said, and how the model was when K-FAC was attached."""

    def __init__(
        self, model: nn.Module, found: FoundLayers, capture: ModelCapture, ranks: Ranks
    ) -> None:
        self.model, self.capture, self.ranks = model, capture, ranks
        self.layers: Sequence[Layer] = found.layers
        self._routing = found.routing_of_all
        self._name_of = found.name_of
        self._shapes = [layer.weight.parameter.shape for layer in self.layers]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._named = named_with_owners(model)
        self._known = self.named_parameters()
        # Those, and what the optimizer was given since.
        self._met: dict[int, torch.Tensor] = {id(p): p for p in self._known.values()}
        self._has_seen = self._torn_reported = False
        self._has_compiled = False  # any layer
        self._said_periods = self._said_idle = False
        self._unseen = set(range(len(self.layers)))  # layers that never ran where a hook could see it
        self._saw_nothing = False  # in a step
        self._missed: set[str] = set()  # of whose derivatives was warned
        # Products of an attention and of recurrent modules know their axes.
        reduce = [layer.sites[0].module for layer in self.layers if layer.spec.reduce]
        if not all(isinstance(module, Product) for module in reduce):
            modules = model.named_modules()
            names = [name for name, m in modules if getattr(m, "batch_first", None) is False]
            if names:
                warn_user(
                    "weight_sharing='reduce' takes the first axis for the examples, also in modules "
                    f"beside these, which have positions there (batch_first=False): {', '.join(names)}"
                )

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The model's, by their names in reports and checkpoints: wrappers have no part in them."""
        return {self._name_of(name): p for name, p in self.parameters().items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's by their names in it, and not what stands in for them for a while."""
        return parameters_of(self.model, self._named)

    def require_parameters(self, taken: Taken) -> None:
        """RuntimeError if a layer ran whose weight is not the model's, or not as it was, any more."""
        shapes = zip(self.layers, self._shapes, strict=True)
        resized = [layer.name for layer, shape in shapes if layer.weight.parameter.shape != shape]
        if resized:
            raise RuntimeError(
                "the parameters of these layers must have the shapes that they had when K-FAC was "
                f"attached, got others: {', '.join(map(repr, resized))}. {_ATTACH_AGAIN}"
            )
        ran = [
            layer
            for layer, t, capture in zip(self.layers, taken, self.capture.by_layer, strict=True)
            if (t is not None or capture.had_others) and layer.weight.parameter.grad is None
        ]
        if not ran:
            return
        present = {id(p) for p in self.model.parameters()}
        replaced = [layer.name for layer in ran if id(layer.weight.parameter) not in present]
        if replaced:
            raise RuntimeError(
                "the parameters of these layers must be those that K-FAC was attached to, got others: "
                f"{', '.join(map(repr, replaced))}. {_ATTACH_AGAIN}"
            )

    def require_storage(self) -> None:
        """RuntimeError if a layer's weight has no numbers (what is offloaded, or never loaded)."""
        empty = [layer.name for layer in self.layers if layer.weight.parameter.is_meta]
        if empty:
            raise RuntimeError(
                "layers must be on a device that has their numbers, got on meta: "
                f"{', '.join(map(repr, empty))}. Load them before K-FAC is attached, or name them in "
                "skip_layers"
            )

    def gradients_are_zero(self) -> bool:
        """Whether there are gradients, on some rank, and all are zeros."""
        moving, given = self._gradients()
        return given and not moving

    def _gradients(self) -> tuple[bool, bool]:
        """Whether any rank has a gradient that is not zero, and whether it has any."""
        gradients = [layer.weight.local_grad() for layer in self.layers]
        here = [g is not None and bool(g.any()) for g in gradients]
        flags = [float(any(here)), float(any(g is not None for g in gradients))]
        total = self.ranks.total(
            torch.tensor(flags, dtype=torch.float64, device="cpu"), "K-FAC's report"
        )
        moving, given = (x > 0 for x in total.tolist())
        return moving, given

    def nothing_seen(self) -> bool:
        """No layer was seen: an error if none ever was though there are gradients, else a warning.

        Returns False, without a word, where all gradients are zeros.
        """
        said = "K-FAC saw no layer run in training mode with gradients since the last step"
        why = (
            "A model that torch.compile has compiled before K-FAC was attached loses its hooks (attach "
            "first, or call torch._dynamo.reset()), gradients from torch.func have none, and weights "
            "that a forward makes anew before a function gets them (times a mask) are not seen, nor are "
            "calls with nested tensors"
        )
        if all(layer.spec.kind == "free" for layer in self.layers):
            names = ", ".join(repr(layer.name) for layer in self.layers)
            why = (
                f"K-FAC does not know the operations in which {names} are used: see skip_layers, and "
                "attach it to networks, not to what calls them with parameters of its own"
            )
        elif not any(site.owner.training for layer in self.layers for site in layer.sites):
            why = (
                "The modules that have them are in eval mode, as from_pretrained of transformers leaves "
                "them: call train() of the whole model"
            )
        elif any(capture.called for capture in self.capture.by_layer):
            why = (
                "Its hooks ran, so these gradients are not those of a backward pass since: "
                "torch.autograd.grad and backward(inputs=...) compute what they are asked for alone "
                "(call loss.backward()), adjoint methods among those who call them (torchdiffeq's "
                "odeint_adjoint: take odeint), kfac.zero_grad() forgets the pass before it, and a "
                "factor_update_steps that changes after a forward pass finds no statistics of that"
            )
        if self.capture.clock.sampled:
            said = "K-FAC saw no backward pass through the model's output since the last step"
            why = (
                "With a sampled Fisher call the model itself, not its parts, and do not compile it: "
                "torch.compile traces one backward pass, and passes of our own are others. Gradients "
                "must come from backward(), not from torch.autograd.grad"
            )
        moving, given = self._gradients()
        if given and not moving:
            return False
        self._saw_nothing = True
        if not self.capture.attached:
            said = "K-FAC was detached: there are no statistics"
        elif self.model.training and moving:
            if not self._has_seen:
                raise RuntimeError(f"{said}, although its layers have gradients. {why}")
            said = f"{said}, although its layers have gradients ({why})"
        warn_user(f"{said}, so its factors were not updated")
        return True

    def periods(self, rule: core_kfac.KFAC, factor_update_steps: int, inv_update_steps: int) -> None:
        """Warn, once, of periods that schedules or a checkpoint brought, by which 'ekfac' is 'eigen'."""
        if self._said_periods:
            return
        try:
            rule.check_periods(factor_update_steps, inv_update_steps)
        except ValueError as error:
            self._said_periods = True
            warn_user(f"until they change: {error}")

    def looked_up_for_all(self, taken: Sequence[Captured | None], terms: torch.Tensor) -> None:
        """Warn, once, about tables whose rows a compiled graph may have looked up for all examples.

        Args:
            terms: (), of the loss of this rank.
        """
        if self._has_compiled:
            return
        self._has_compiled = True
        known = {
            capture.layer.name
            for capture in self.capture.by_layer
            if capture.summed_in_graph and not capture.missed_in_graph
        }
        counts = {
            layer.name: captured.positions[0].to(terms)
            for layer, captured in zip(self.layers, taken, strict=True)
            if captured is not None and layer.spec.kind == "embedding" and layer.name not in known
        }
        if not counts:
            return
        fewer = (torch.stack(list(counts.values())) < terms).tolist()
        names = ", ".join(repr(name) for name, few in zip(counts, fewer, strict=True) if few)
        if names:
            warn_user(
                "these tables were looked up in a compiled graph, with fewer rows than the loss has "
                "terms. If those are positions that all examples share, their second moments are of "
                "gradients summed over examples: expand the indices over the batch, look up outside of "
                f"the graph, or give skip_layers: {names}"
            )

    def unseen(self, seen: Sequence[bool]) -> None:
        """Warn, of each once, about layers that have a gradient but never ran where a hook could see."""
        self._has_seen = True
        self._unseen -= {i for i in self._unseen if seen[i]}
        unseen = []
        for i in sorted(self._unseen):
            gradient = self.layers[i].weight.local_grad()
            if gradient is not None and bool(gradient.any()):
                unseen.append(i)
        self._unseen.difference_update(unseen)
        if unseen:
            names = ", ".join(repr(self.layers[i].name) for i in unseen)
            sampled = (
                "layers that the tensor of output_of= is not made of, " * self.capture.clock.sampled
            )
            warn_user(
                "these layers got a gradient but were not seen running, and keep it plain (times "
                f"kl_clip's coefficient) until they are. Not seen are {sampled}calls in eval mode, by "
                "torch.func, with nested tensors, or inside of another's autograd.Function as by "
                "odeint_adjoint, what a module does with its own parameters outside of every forward (a "
                "method that a training loop calls), and functions that K-FAC does not know, of a "
                f"weight, of what is made of one, or with another bias: {names}"
            )

    def stale(self, layers: Sequence[int]) -> None:
        """Warn about layers that have gradients and had statistics, but no new ones any more."""
        if layers and self.capture.attached:
            names = ", ".join(repr(self.layers[i].name) for i in layers)
            warn_user(
                "these layers have gradients and were not seen in two steps that take statistics, as "
                "they were before: in eval mode, or where no hook sees them, their factors stay as they "
                f"are: {names}"
            )

    def thawed(self) -> None:
        """Once: warn about parameters that were frozen and have a gradient now."""
        if any(p.requires_grad and p.grad is not None for p in self._frozen):
            self._frozen = []
            warn_user(
                "parameters that were frozen when K-FAC was attached have gradients now and keep them "
                "plain: detach() and attach again to cover them"
            )

    def idle(self, moves: Callable[[nn.Parameter], bool]) -> None:
        """Once: warn where no layer can have a gradient any more, and other parameters train on."""
        weights = [layer.weight.parameter for layer in self.layers]
        if self._said_idle or any(weight.requires_grad and moves(weight) for weight in weights):
            return
        if any(p.grad is not None and moves(p) for p in self.model.parameters()):
            self._said_idle = True
            warn_user(
                "the weights of all layers that K-FAC preconditions were frozen, or taken from the "
                "optimizer, since it was attached: until they train again, what does keeps its plain "
                "gradient. detach() and attach again where that is to be covered instead"
            )

    def added(self, parameters: Iterable[torch.Tensor]) -> None:
        """Warn of what the optimizer moves from now on and only a new K-FAC would cover."""
        added = {id(p): p for p in parameters}
        self._met |= added
        frozen = {id(p) for p in self._frozen}
        self._frozen = [p for p in self._frozen if id(p) not in added]
        known = {id(p) for p in self._known.values()} - frozen
        names = [name for name, p in self.parameters().items() if id(p) in added.keys() - known]
        if names:
            listed = ", ".join(repr(self._name_of(name)) for name in names)
            warn_user(
                "these parameters were not covered when K-FAC was attached and keep their gradients "
                f"plain until you detach() and attach again: {listed}"
            )

    def joined(self, parameters: Iterable[torch.Tensor]) -> None:
        """Warn, of each once, about what has a gradient and came later than K-FAC: a new head."""
        new = [p for p in parameters if p.grad is not None and id(p) not in self._met]
        if new:
            self.added(new)

    def strays(self) -> None:
        """Once: warn about weights that something else than their layers uses."""
        strays = self.capture.strays()
        if strays:
            names = ", ".join(repr(name) for name in strays)
            warn_user(
                "statistics miss some uses of these weights, outside of their layer (by a function of "
                "torch.nn.functional perhaps, or in the training loop) or in an operation K-FAC does "
                f"not know: {names}. Call a layer that shares the weight instead, or name them in "
                "skip_layers; a penalty on the weight is no use of which they should know"
            )

    def ran_once_for_all(self) -> None:
        """Once: warn about layers whose G is of gradients that were summed over the examples."""
        found = dict.fromkeys((*self.capture.once_for_all, *sorted(self.capture.clock.lookups)))
        said = self.capture.clock.strays
        names = ", ".join(repr(name) for name in found if name not in said)
        if names:
            warn_user(
                "these layers ran once for all examples, it seems, and their second moments are of the "
                "examples' summed gradient, which vanishes near a minimum: expand what they read over "
                f"the batch, take fisher='mc', or name them in skip_layers: {names}"
            )

    def transformed(self) -> None:
        """Once: warn about layers that also ran where K-FAC sees nothing."""
        clock = self.capture.clock
        found = [repr(name) for name in sorted(clock.transformed)]
        found += ["some in what is compiled"] if clock.transformed_in_graph else []
        if found:
            names = ", ".join(found)
            warn_user(
                "these layers ran inside of torch.func's transforms, or with forward-mode derivatives, "
                f"where K-FAC sees nothing: statistics are of their other calls alone: {names}. Take "
                "derivatives by the inputs by torch.autograd.grad(..., create_graph=True) or carry them "
                "forward with the activations, as examples/train_pinn.py does"
            )

    def missed_derivatives(self) -> None:
        """Warn about layers whose part in derivatives by their inputs K-FAC does not understand."""
        missed, self.capture.clock.missed = self.capture.clock.missed - self._missed, set()
        self._missed |= missed
        if missed:
            names = ", ".join(map(repr, sorted(missed)))
            warn_user(
                "derivatives by inputs of these layers were computed with create_graph=True, and what a "
                f"loss of them owes to these layers has no part in their statistics: {names}"
            )

    def torn(self, torn: Sequence[int]) -> None:
        """Once: warn about layers that have a gradient on some ranks only."""
        if torn and not self._torn_reported:
            self._torn_reported = True
            names = ", ".join(repr(self.layers[i].name) for i in torn)
            warn_user(
                f"these layers have a gradient on some ranks and none on others, and keep it plain: "
                f"{names}. Average gradients over ranks before step(), zeros where there is none"
            )

    def routing(self, factors: LayerFactors, moves: Callable[[nn.Parameter], bool]) -> Routing:
        """The routing report; a layer without evidence yet says so, one that shares an A, too."""
        notes: dict[int, list[str]] = {}
        ready: set[int] = set()  # parameters with a layer that is
        weights: dict[int, list[nn.Parameter]] = {}  # by parameter, of the layers that it is of
        for i, layer in enumerate(self.layers):
            for parameter in layer.parameters():
                weights.setdefault(id(parameter), []).append(layer.weight.parameter)
            said = notes.setdefault(id(layer.weight.parameter), [])
            leader = factors.input_of.get(i)
            if leader is not None:
                said.append(f"shares A with {self.layers[leader].name}")
            own = {id(parameter) for parameter in layer.parameters()}
            if _has_frozen_bias(layer):
                said.append(
                    "its bias, a coordinate of A, is frozen now: attach again for an A without it"
                )
            if not (self._has_seen or self._saw_nothing) or factors.is_ready(i):
                ready |= own
                continue
            why = ["no statistics yet, its gradient passes through, times kl_clip's coefficient"]
            if layer.sites[0].functional:
                kind = type(layer.sites[0].module).__name__
                function = "calls no function that K-FAC knows with it"
                why.append(f"the own forward of this {kind} did not run, or {function}")
            for number in own:
                notes.setdefault(number, []).extend(why)
        route_of = {id(self._known[r.parameter]): r for r in self._routing if r.parameter in self._known}
        routes = []
        for full, parameter in self.parameters().items():
            name = self._name_of(full)
            known = route_of.get(id(parameter))
            if known is None:
                reason = "not the model's when K-FAC was attached: attach again to cover it"
                routes.append(Route(name, tuple(parameter.shape), "plain", "", reason))
                continue
            route = replace(known, parameter=name)
            said = list(notes.get(id(parameter), []))
            if parameter.requires_grad and not moves(parameter):
                route = Route(name, route.shape, "plain", "", NOT_GIVEN)
            if route.treatment == "frozen" and parameter.requires_grad:
                reason = "was frozen when K-FAC was attached: attach again to cover it"
                route = Route(name, route.shape, "plain", "", reason)
            if route.treatment == "kfac" and said:
                reason = "; ".join([route.reason, *dict.fromkeys(said)])
                treatment = "kfac" if id(parameter) in ready else "waiting"
                route = Route(name, route.shape, treatment, route.factors, reason)
            if route.treatment in ("kfac", "waiting"):
                route = _left_since(route, parameter, weights.get(id(parameter), []), moves)
            routes.append(route)
        # Of the optimizer's parameters that are none of the model's.
        routes += [route for route in self._routing if route.parameter not in self._known]
        return Routing(tuple(routes))

    def metrics(self, factors: LayerFactors) -> dict[str, dict[str, Any]]:
        """Plain numbers for loggers, by layer; see `KFAC.metrics`."""
        layers: dict[str, dict[str, Any]] = {}
        for i, layer in enumerate(self.layers):
            record = factors.report(i) if factors.allocated else {}
            parameter, piece = layer.weight.parameter, layer.weight
            if parameter.grad is not None and piece.is_here():  # metrics send nothing
                both = (piece.rows_of(local(x)) for x in (parameter.grad, parameter.detach()))
                update, weight = (float(linalg.norm(x)) for x in both)
                record["update_to_weight"] = update / max(weight, 1e-30)
            layers[layer.name] = record
        return layers


def _has_frozen_bias(layer: Layer) -> bool:
    """Whether the bias was frozen after K-FAC was attached, and the weight was not."""
    bias = layer.bias
    frozen = bias is not None and not bias.parameter.requires_grad
    return frozen and layer.weight.parameter.requires_grad


def _left_since(
    route: Route,
    parameter: nn.Parameter,
    weights: Sequence[nn.Parameter],
    moves: Callable[[nn.Parameter], bool],
) -> Route:
    """The route of what was frozen after K-FAC was attached, or is of layers whose weights left."""
    since = "frozen after K-FAC was attached"
    if not parameter.requires_grad:
        return Route(route.parameter, route.shape, "frozen", "", f"was {since}")
    if weights and not any(weight.requires_grad for weight in weights):
        reason = f"its layer's weight was {since}: attach again to cover it"
        return Route(route.parameter, route.shape, "plain", "", reason)
    if weights and not any(map(moves, weights)):
        reason = "its layer's weight is in the optimizer no more: attach again to cover it"
        return Route(route.parameter, route.shape, "plain", "", reason)
    return route
