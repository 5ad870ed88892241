"""What all layers of a model share while it runs: whether statistics are wanted, and what ran."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from suite.core.noise import unit_noise
from suite.torch.hooks import Hook, in_backward, uncompiled
from suite.torch.rows import stratified
from suite.torch.runs import Ending, Run

if TYPE_CHECKING:
    from suite.torch.capture import LayerCapture


class CaptureClock:
    """Shared by all layers of a model."""

    def __init__(self) -> None:
        self.wanted = True  # changed by `want`, and for a while by `paused`
        self.pausing = False  # neither statistics nor rows are
        self.sampled = False  # statistics come from passes of our own (`fisher`) ...
        self.sampling = False  # ... one of which is running
        # Steps, and a stream, of the noise that chooses rows and examples: moved to where it is used.
        self.count = torch.zeros((), dtype=torch.int32, device="cpu")
        self.stream = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.runs = 0
        self.last = Run(self, -1, None)  # the latest product that backward passes went through
        self.looked_up = Run(self, -1, None)  # and table, whose rows may be there for all examples
        # A call in a compiled graph, after which no other ran: a layer's and whether it was one with the
        # transpose, or of a layer that is not covered. No names: graphs are for all layers alike.
        self.compiled_last: tuple[LayerCapture, bool] | Ending | None = None
        self.compiled_looked_up: LayerCapture | None = None
        self.is_compiled = False  # whether any layer ran in such a graph so far
        self.last_positions: Any = None  # of the last step, if that is not covered: number or tensor ()
        self.endings: list[Ending] = []  # of all layers that are not covered
        self.captures: list[LayerCapture] = []  # of all that are
        self.taken = False  # whether what layers were called is of the last step, until one runs
        # Which layers read the same inputs. Not to be asked in graphs, which would be compiled anew.
        self.discovering = True  # changed by `discover`
        self.awake = True  # whether hooks have anything to see
        self.hooks: list[Hook] = []  # that look for nothing else
        self.not_covered: list[int] = []  # of what ran and is not covered, the length of the first axis
        self.strays: set[str] = set()  # names of what has a use that is missed
        self.lookups: set[str] = set()  # what was looked up once for all, in what is not followed
        self.transformed: set[str] = set()  # layers that ran where there are no statistics
        self.transformed_in_graph = False  # whether some did so in compiled graphs
        self.missed: set[str] = set()  # layers whose uses in derivatives are not understood
        self._passing: set[int] = set()  # the backward passes that came to a layer and are not over
        # By what made a tensor: what is handed to modules of fully_shard's own, and what is to others.
        self._wrapped: dict[tuple[int, int, int], tuple[weakref.ref[torch.Tensor], int]] = {}
        self._plain: dict[tuple[int, int, int], tuple[weakref.ref[torch.Tensor], int]] = {}
        self._tokens: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._next = 0
        self.calls = 0
        self._examples: tuple[Any, torch.Tensor] | None = None

    def move(self, device: torch.device) -> None:
        """Have what noise is made of where it is used."""
        self.count, self.stream = self.count.to(device), self.stream.to(device)

    def want(self, statistics: bool) -> None:
        """Whether the coming step takes statistics."""
        self.wanted = statistics
        self._rouse()

    def discover(self, discovering: bool) -> None:
        """Whether it is still to be found out what the model does."""
        self.discovering = discovering
        self._rouse()

    def _rouse(self) -> None:
        awake = self.wanted or self.discovering
        if awake != self.awake:
            self.awake = awake
            for hook in self.hooks:
                hook.awake = awake

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs meanwhile is not seen."""
        before = self.wanted, self.pausing
        self.wanted, self.pausing = False, True
        try:
            yield
        finally:
            self.wanted, self.pausing = before

    def chosen(self, stream: torch.Tensor, count: int, total: int, device: torch.device) -> torch.Tensor:
        """(count,), indices below `total`: from the step count, not from torch's generator.

        Args:
            stream: (1,), int32.
        """
        streams = stream.to(device, non_blocking=True)
        now = self.count.to(device, non_blocking=True)
        noise = unit_noise(streams, now, (count,), torch.float32)
        return stratified((noise[0] / (2 * 3**0.5) + 0.5).clamp(0, 1 - 2**-24), total)

    def examples(self, count: int, total: int, device: torch.device) -> torch.Tensor:
        """`chosen`, drawn once in a step for all layers."""
        if torch.compiler.is_compiling():
            return self.chosen(self.stream, count, total, device)
        key = (count, total, device, self.count._version)
        if self._examples is None or self._examples[0] != key:
            self._examples = key, self.chosen(self.stream, count, total, device)
        return self._examples[1]

    def forget_examples(self) -> None:
        """Choose them anew, with the same result."""
        self._examples = None

    def ran(
        self,
        owner: LayerCapture,
        transposed: bool,
        again: bool,
        looks_up: bool,
        is_product: bool | None = None,
    ) -> Run | None:
        """A covered layer produced an output, possibly one that was made before.

        Args:
            is_product: whether it was one of rows with the layer's weight; None: as the layer says.

        Returns:
            What the backward pass through this call is to say so to; None: nobody asks.
        """
        if not torch.compiler.is_compiling() and self.taken:  # what is read there is compiled in
            for capture in self.captures:
                capture.called = False
            self.taken = False
        if not transposed:
            owner.called = True
        layer = owner.layer
        is_product = layer.is_product if is_product is None else is_product
        if torch.compiler.is_compiling():
            self.is_compiled = True
            if looks_up:
                self.compiled_looked_up = owner
            elif is_product:
                self.compiled_last = owner, transposed
            return None
        if again or not (looks_up or is_product):
            return None
        self.runs += 1
        if looks_up:
            self.compiled_looked_up = None
        else:
            self.compiled_last = None
        return Run(self, self.runs, owner, layer.name, transposed=transposed, looks_up=looks_up)

    @uncompiled
    def passes(self) -> None:
        """A backward pass has come to a layer, before it adds to any sum.

        Layers ask what was discarded, and when it is over where gradients are. A pass of our own has
        none: the loss's, around it, says where they are.
        """
        now = torch._C._current_graph_task_id()
        if now == -1 or now in self._passing or self.sampling:
            return
        if not self._passing and self.wanted and not self.pausing and not self.sampled:
            for capture in self.captures:
                capture.forget_what_was_discarded()
        self._passing.add(now)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(_Pass(self, now))

    def passed(self, now: int, *, raised: bool) -> None:
        """A backward pass is over."""
        self._passing.discard(now)
        for capture in self.captures:
            if raised:
                capture.may_be_taken = False
            else:
                capture.note_gradients(inside=bool(self._passing))

    def pass_elsewhere(self) -> bool:
        """Whether a backward pass runs, and that in another thread."""
        return bool(self._passing) and not in_backward()

    def has_run(self, owner: LayerCapture) -> bool:
        """Whether a layer was called in this step, with its weight as it is."""
        if torch.compiler.is_compiling():  # to which it is of this forward
            return owner.called
        return not self.taken and owner.called

    def ends(self, ending: Ending) -> Run | None:
        """A layer that is not covered produced an output, perhaps the model's; see `ran`."""
        if torch.compiler.is_compiling():
            self.is_compiled = True
            self.compiled_last = ending
            return None
        self.runs += 1
        self.compiled_last = None
        ending.doubted.clear()
        return Run(self, self.runs, ending)

    def last_run(self) -> Run:
        """The last product of the loss."""
        if self.compiled_last is None:
            return self.last
        if isinstance(self.compiled_last, Ending):
            return Run(self, -1, self.compiled_last)
        owner, transposed = self.compiled_last
        return Run(self, -1, None, owner.layer.name, transposed=transposed)

    def take_positions(self) -> None:
        """Note those of the layer that ran last, if it is not covered; all are counted anew then."""
        self._passing.clear()  # those that raised
        last = self.last_run().owner
        self.last_positions = last.positions() if isinstance(last, Ending) else None
        for ending in self.endings:
            ending.begin()

    def discarded(self, *, again: bool = False) -> None:
        """A layer's statistics were: if all gradients were, count what layers not covered saw anew.

        Args:
            again: see `Ending.begin`.
        """
        if all(ending.positions() is None for ending in self.endings):
            return
        ours = (p for capture in self.captures for p in capture.layer.parameters())
        if all(p.grad is None for p in ours if p.requires_grad):
            for ending in self.endings:
                ending.begin(again=again)

    def token(self, x: torch.Tensor) -> int:
        """A number that is the same for the same tensor with the same content."""
        known = self._tokens.get(id(x))
        if known is not None and known[0]() is x and known[1] == x._version:
            return known[2]
        wrapped = _wrapped_by_fully_shard(x)
        node, number = wrapped or (x.grad_fn, x.output_nr)
        key = id(node), number, x._version
        # Two that nobody wrapped are one only where they are one tensor.
        alike = [self._wrapped] if wrapped is None else [self._wrapped, self._plain]
        living = (made[key] for made in alike if key in made and made[key][0]() is not None)
        token = next((token for _, token in living), 0)
        if not token:
            self._next += 1
            token = self._next
        if node is not None:  # which lives while what it led to does
            own = self._plain if wrapped is None else self._wrapped
            own[key] = weakref.ref(x), token
        self._tokens[id(x)] = (weakref.ref(x), x._version, token)
        return token

    def forget(self) -> None:
        """Drop what `token` remembers."""
        self._tokens.clear()
        self._wrapped.clear()
        self._plain.clear()


def _wrapped_by_fully_shard(x: torch.Tensor) -> tuple[Any, int] | None:
    """What made a tensor, (node, which of its results), that is handed to a module of fully_shard's own.

    Each such module gets a tensor of its own, the same as others', and as what is not wrapped, if one
    node made both.
    """
    node = x.grad_fn
    if node is None or type(node).__name__ != "RegisterPostBackwardFunctionBackward":
        return None
    source: tuple[Any, int] = node.next_functions[x.output_nr]
    return source


class _Pass:
    """Called at the end of a backward pass; what raises drops it instead."""

    _clock: CaptureClock | None = None  # of one that torch.compile makes while it traces

    def __init__(self, clock: CaptureClock, number: int) -> None:
        self._clock, self._number = clock, number

    def __call__(self) -> None:
        self._over(raised=False)

    def __del__(self) -> None:
        self._over(raised=True)

    def _over(self, raised: bool) -> None:
        if self._clock is not None:
            self._clock.passed(self._number, raised=raised)
