"""What the first step shows of how a model uses a layer, so as to warn of what is not seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from suite.torch.hooks import when_reached
from suite.torch.rows import LayerSpec, has_no_examples

_FAR = 100  # how many steps back from an input are looked at


def is_of_parameters(x: torch.Tensor) -> bool:
    """Whether it is a parameter, or made of parameters and of nothing that has no gradient."""
    if x.grad_fn is None:
        return isinstance(x, torch.nn.Parameter)
    todo: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        given = node.next_functions
        if type(node).__module__ == "torch.autograd.function":  # of our own probes what goes through
            given = given[:1]
        before = [function for function, _ in given]
        leaf = before or isinstance(getattr(node, "variable", None), torch.nn.Parameter)
        if None in before or len(seen) > _FAR or not leaf:
            return False
        todo += before
    return True


class Unreached:
    """Counts what no backward pass has come to."""

    def __init__(self) -> None:
        self._reached: list[bool] = []

    def watch(self, outputs: Sequence[Any]) -> None:
        """Count these as one."""
        place = len(self._reached)
        self._reached.append(False)
        when_reached(outputs, lambda: self._reached.__setitem__(place, True))

    def leave_out(self, count: int) -> None:
        """Count the last ones no more."""
        places = range(len(self._reached) - count, len(self._reached))
        for place in places:
            self._reached[place] = True

    def count(self) -> int:
        return self._reached.count(False)


class FirstStep:
    """Calls of a layer, and uses of its weight."""

    def __init__(self) -> None:
        self.calls = 0  # of the layer, probed or not
        self.calls_of_made = 0  # of these, those of something made of the weight in its place
        self.uses = 0  # of the weight, by functions
        self.uses_to_make = 0  # of these, those to make that
        self.examples = 0  # on the first axis of the last call's output
        self._without_examples: list[torch.Size] = []  # inputs of calls for all examples, it seems
        self._of_parameters: list[torch.Size] = []  # those of them that are made of parameters
        self._unreached_calls, self._unreached_uses = Unreached(), Unreached()

    def note_call(self, y: Any, trained: bool) -> None:
        """A call made `y`, with the layer's own weight if it `trained`."""
        self.calls += trained
        if trained and isinstance(y, torch.Tensor) and y.requires_grad:
            self._unreached_calls.watch([y])

    def note_use(self, made: Sequence[torch.Tensor]) -> None:
        """A function made this of the weight."""
        self.uses += 1
        self._unreached_uses.watch(made)

    def note_made(self, uses: int) -> None:
        """So many of the last uses were to make what took the weight's place."""
        self.uses_to_make += uses
        self._unreached_uses.leave_out(max(uses, 0))

    def note_axes(self, spec: LayerSpec, x: torch.Tensor, y: torch.Tensor, again: bool) -> None:
        """What a call was like, which a checkpoint perhaps computes again."""
        self.examples = len(y) if y.ndim > 1 else 0
        if not again and has_no_examples(spec, x):
            self._without_examples.append(x.shape)
            if is_of_parameters(x):
                self._of_parameters.append(x.shape)

    def misses_uses(self) -> bool:
        """Whether the loss used the weight more often than it used the layer."""
        besides = self.uses - self.uses_to_make - (self.calls - self.calls_of_made)
        unreached = self._unreached_uses.count() - self._unreached_calls.count()
        return self.calls > 0 and besides > max(unreached, 0)

    def was_once_for_all(self, examples: int, calls: int) -> bool:
        """Whether there were calls, at most so many, that were for so many examples at once.

        Beside others, which have examples, only those whose input is made of parameters: one row may be
        what is left of a batch in parts.
        """
        shapes = self._without_examples if self.was_for_all_only() else self._of_parameters
        behind = any(examples in shape[1:-1] for shape in shapes)  # a time that is in front
        return 0 < len(shapes) <= calls and not behind

    def was_for_all_only(self) -> bool:
        """Whether there were no calls but for all examples at once."""
        return self.calls == len(self._without_examples)
