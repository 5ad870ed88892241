"""Weights that are used elsewhere than in their layers, which capture cannot see."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from suite.torch.capture import LayerCapture
from suite.torch.explained import Explained, can_be_explained
from suite.torch.first_step import FirstStep
from suite.torch.functional import RunningLayer
from suite.torch.hooks import (
    Mode,
    ModeAround,
    Stacks,
    graph_clock,
    in_traced_graph,
    root_of,
    tensors_given,
    tensors_in,
    traceable,
    when_reached,
)
from suite.torch.made_weights import node_of, reached_from
from suite.torch.operations import CASTS, SHAPED_LIKE, WRITES
from suite.torch.shared_weights import SharedWeights

# Kinds whose module passes its weight, and its bias, to one function in every call.
_COUNTED = ("dense", "convolution", "transposed", "embedding", "bag", "norm", "bias")
# Kinds of which all is seen that the module itself does with them.
_WATCHED = ("stack", "free")
# Nodes of autograd's graph that pass on what they got, with its axes moved or cast.
_PASSING = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"),
    *("AliasBackward0", "ToCopyBackward0", "CloneBackward0"),
}


class UseCounter(ModeAround):
    """Counts, in the first training passes of a model, the functions that take a layer's weight or bias.

    A layer's own call is one. Whatever is above that is a use that the layer's statistics miss, such as
    `functional.linear(x, self.embedding.weight)`. So is one of a stack of matrices, or of a parameter
    that is no layer's, while the module that has it is not running.
    """

    def __init__(self, model: nn.Module, captures: list[LayerCapture], running_modes: Stacks) -> None:
        """
        Args:
            running_modes: of forwards that run, and are watched for parameters that are no layers'.
        """
        super().__init__(model)
        self.running_modes = running_modes
        self.model = model
        self.of_one_example = False  # whether the model was given what has a length of 1
        self.captures = [
            c
            for c in captures
            if c.layer.spec.kind in (*_COUNTED, *_WATCHED)
            and c.layer.weight.stop is None
            and all(site.module is site.owner and not site.scaling for site in c.layer.sites)
        ]
        watched = [c for c in self.captures if c.layer.spec.kind in _WATCHED]
        self.running = [RunningLayer(c, site.module) for c in watched for site in c.layer.sites]
        self.handles += [handle for running in self.running for handle in running.handles]
        self.hooks += tuple(hook for running in self.running for hook in running.hooks)
        self.explained = []
        probes: dict[tuple[int, torch.device], torch.Tensor] = {}
        for capture in self.captures:
            if can_be_explained(capture.layer):
                capture.explained = Explained(capture.layer, probes)
                self.explained.append(capture)
        self.weight_handles = [c.explained.handle for c in self.explained if c.explained is not None]
        self.handles += self.weight_handles

    def enter(self) -> None:
        super().enter()
        if not torch.compiler.is_compiling() and self.captures and self.captures[0].clock.discovering:
            for capture in self.captures[0].clock.captures:
                capture.come_first()

    def observe(self, site: int, args: Any, kwargs: Any, output: Any) -> None:
        mode = self.modes.own()[-1] if self.modes.own() else None
        super().observe(site, args, kwargs, output)
        if args is None or torch.jit.is_tracing():  # it was interrupted
            return
        if output is not None and mode is not None:
            mode.note_functions(output)
        given = [x for x in tensors_given(args, kwargs) if not x.is_nested and x.ndim > 1]
        self.of_one_example = self.of_one_example or any(x.shape[0] == 1 for x in given)

    def make_mode(self) -> _Counting | None:
        if torch.compiler.is_compiling() or not self.captures:
            return None
        clock = self.captures[0].clock
        if not clock.discovering or not clock.wanted:
            return None
        if not self.model.training or not torch.is_grad_enabled():
            return None
        weights = [(c.layer.weight.parameter, (c, c.first)) for c in self.captures]
        biases = [(c.layer.bias.parameter, (c, c.first_of_bias)) for c in self.captures if c.layer.bias]
        watched = {id(x): own for x, own in (*biases, *weights) if x.requires_grad}
        return _Counting(watched, self.running_modes, SharedWeights(self.model))

    def strays(self) -> list[str]:
        """The layers whose weights or biases the loss used more often than it used the layers.

        Or whose gradients are not what their calls make, as where a training loop uses weights, too.
        """
        counted = [
            c
            for c in self.captures
            if c.layer.spec.kind in _COUNTED and (c.first.misses_uses() or c.first_of_bias.misses_uses())
        ]
        # Graphs tell nobody of their calls.
        asked = [] if self.captures and self.captures[0].clock.is_compiled else self.explained
        other = [c for c in asked if c.explained is not None and c.explained.misses_uses()]
        return list(dict.fromkeys(c.layer.name for c in (*counted, *other)))

    def leave_weights(self) -> None:
        """Compare no more gradients of weights; hooks of modules stay."""
        for handle in self.weight_handles:
            handle.remove()

    def detach(self) -> None:
        """Stop counting."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for capture in self.explained:
            capture.explained = None


def _note(capture: LayerCapture, place: int, by_inputs: Any, by_outputs: Any) -> None:
    """A Function's backward pass is over: it is a use if it has a gradient by the weight."""
    if by_inputs[place] is not None:
        capture.clock.strays.add(capture.layer.name)


class _Counting(Mode):
    def __init__(
        self,
        watched: dict[int, tuple[LayerCapture, FirstStep]],
        running_modes: Stacks,
        shared: SharedWeights,
    ) -> None:
        super().__init__()
        self.running_modes, self.shared = running_modes, shared
        self.watched = watched  # by the id of a weight or a bias, whose uses are noted there
        self.casts: dict[int, tuple[torch.Tensor, int]] = {}  # a weight's, and which
        self.began = graph_clock()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function, kwargs = traceable(function, args), kwargs or {}
        if self.looks_away():
            return function(*args, **kwargs)
        output = function(*args, **kwargs)
        # The last takes weights for names of what it differentiates by.
        if not in_traced_graph() and function is not torch.autograd.grad:
            with self.looking():
                self._count(function, args, kwargs, output)
                self._find_shared(function, args, kwargs, output)
        return output

    def _find_shared(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Note layers whose products with constants several examples get."""
        for name in self.shared.follow(function, args, kwargs, output, self._layer_of):
            clock = next(c.clock for c, _ in self.watched.values())
            if not clock.sampled:
                when_reached([output], functools.partial(clock.lookups.add, name))

    def _layer_of(self, operand: Any) -> str:
        weight = self._weight(operand)
        return self.watched[weight][0].layer.name if weight else ""

    def _count(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        several = output if isinstance(output, list | tuple) else (output,)
        if function in WRITES:  # gradients come to what is written to, not to a view of a part
            several = (root_of(args[0]),)
        made = [x for x in several if isinstance(x, torch.Tensor) and x.requires_grad]
        if not made:
            return
        if function in CASTS:
            weight = self._weight(args[0])
            if weight and output is not args[0]:
                self.casts[id(output)] = output, weight
        if function in CASTS or function in SHAPED_LIKE or any(self._weight(x) for x in made):
            return  # a view: what takes it is the use
        given = [x if isinstance(x, list | tuple) else (x,) for x in (*args, *kwargs.values())]
        for weight in [self._weight(operand) for operands in given for operand in operands]:
            if weight:
                self._used(*self.watched[weight], made)

    def _used(self, capture: LayerCapture, first: FirstStep, made: list[torch.Tensor]) -> None:
        first.note_use(made)
        if capture.layer.spec.kind not in _WATCHED or capture.running:
            return
        if not any(mode.watches(capture) for mode in self.running_modes.own()):
            when_reached(made, functools.partial(capture.clock.strays.add, capture.layer.name))

    def note_functions(self, output: Any) -> None:
        """Note weights that others' autograd.Functions got, as of a head and its loss in one.

        Args:
            output: of the forward; what it was made of is in autograd's graph.
        """
        nodes = reached_from([node_of(x) for x in tensors_in(output, set())], (), {}, self.began)
        for node in nodes:
            made_by = getattr(node, "_forward_cls", None)
            if made_by is None or made_by.__module__.partition(".")[0] in ("torch", "suite"):
                continue
            for place, (before, _) in enumerate(node.next_functions):
                while before is not None and before.name() in _PASSING:
                    before = before.next_functions[0][0]
                found = self.watched.get(id(getattr(before, "variable", None)))
                if found is not None:
                    node.register_hook(functools.partial(_note, found[0], place))

    def _weight(self, operand: Any) -> int:
        """Which weight an operand is, or is a view or a cast of; 0: none."""
        for tensor in (operand, getattr(operand, "_base", None)):
            if id(tensor) in self.watched:
                return id(tensor)
            if id(tensor) in self.casts:
                return self.casts[id(tensor)][1]
        return 0
