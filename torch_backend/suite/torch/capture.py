"""K-FAC's statistics out of a model's forward and backward pass.

A forward hook puts an identity behind a layer's output. Its backward rule passes the output's gradient
on and returns Σ a aᵀ, Σ g gᵀ and counts as the gradients of inputs that nothing else uses (*slots*).
Autograd adds them up like any other gradient: over micro-batches, over repeated uses of a layer, once
under activation checkpointing, never in a forward pass without a backward one.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from suite.core.statistics import LayerStatistics
from suite.torch.clock import CaptureClock
from suite.torch.derivatives import (
    PRODUCTS,
    Call,
    DerivativeProbe,
    Noted,
    Source,
    follow,
    is_awaited,
)
from suite.torch.dtensors import is_cut, is_sharded, like, local
from suite.torch.explained import Explained
from suite.torch.first_step import FirstStep
from suite.torch.hooks import (
    Hook,
    after_forward,
    in_backward,
    is_batched,
    is_transformed,
    is_within_functions,
    on_transformed,
    uncompiled,
    when_reached,
    without_modes,
)
from suite.torch.layers import Layer, Site
from suite.torch.looked_up import (
    LookedUp,
    OfSum,
    UnlessBroadcast,
    counts_in_sum,
    is_of_each,
)
from suite.torch.prepared import prepared
from suite.torch.probe import About, ProbeInPlace, Reached, Reading, probed
from suite.torch.rows import Bases, LayerSpec, example_count, output_positions, row_count
from suite.torch.runs import Ending, Run
from suite.torch.thin import KeptRows

_MOST_LOOKUPS = 8  # of one table whose sums are looked for


class Captured(NamedTuple):
    """What one layer saw since it was last asked."""

    main: LayerStatistics
    transposed: LayerStatistics | None  # of uses as the transpose
    positions: tuple[torch.Tensor, torch.Tensor | None]  # (): of the outputs of both kinds of uses
    products: torch.Tensor | None  # (blocks, d_out, d_in), second moments in the eigenbasis
    terms: float  # of the losses that `fisher` drew samples of
    read: tuple[int, ...]  # tokens of the inputs of its calls that backward passes reached, if noted


def dense(x: Any) -> Any:
    """A layer's input, if it is sparse (features of a graph's nodes) written out."""
    if not isinstance(x, torch.Tensor) or x.layout is torch.strided or x.is_nested:
        return x
    with torch.no_grad():
        return x.to_dense()


def is_training(clock: CaptureClock, site: Site) -> bool:
    """Whether calls of a site are part of training now, as far as modules and torch say so."""
    if clock.pausing or not site.owner.training or not torch.is_grad_enabled():
        return False
    is_compiling = torch.compiler.is_compiling()
    # Under torch.func's transforms tensors are wrapped, and hooks cannot tell what is summed.
    if is_within_functions():
        if is_compiling:  # where what arrives at its outputs cannot be told
            clock.transformed_in_graph = True
        return False
    return is_compiling or not torch.jit.is_tracing()


def _place_of(site: Site, weight: nn.Parameter) -> tuple[nn.Module, str] | None:
    """Where a site's module, or its owner, keeps a weight: functional_call puts others there."""
    for module in (*site.module.modules(), *site.owner.modules()):
        for name, parameter in module._parameters.items():
            if parameter is weight:
                return module, name
    return None


class LayerCapture:
    """One layer's slots and hooks."""

    def __init__(self, layer: Layer, dtype: torch.dtype, clock: CaptureClock, stream: int) -> None:
        """`stream`: of the noise that chooses rows or examples."""
        self.layer = layer
        self.clock = clock
        self._shape = layer.weight.parameter.shape
        # A tensor: what torch.compile makes of a layer holds for others, too.
        self.stream = torch.full((1,), stream, dtype=torch.int32, device=layer.device)
        self.bases: Bases | None = None  # set to sum second moments in
        self.input_of: LayerCapture | None = None  # whose A is this layer's, too
        self.leads = False  # whether this layer's A is another's, too
        self.incomplete = False  # what `left_out` was for what was taken last
        self.left_out = False  # whether a call of this step was left to the layer that shares its A
        self.inputs: list[int] = []  # tokens of the inputs of this step's calls
        self.recomputed = False  # whether those were in backward passes, of reentrant checkpoints
        self.read: list[int] = []  # of those whose A others share, or may: that a backward pass reached
        self.first_call = 0  # its number among all layers' calls
        self.looked_up: list[LookedUp] = []  # the last calls, of an embedding
        self.arounds: list[Any] = []  # what watches the sums that its lookups are in (functional.py)
        self.summed_in_graph = False  # whether it saw one in a graph that is compiled
        self.missed_in_graph = False  # whether it saw what is no such sum there, and is not followed
        # 1 / σ of the last call there: as a result it is made in the graph's forward, and not in its
        # backward pass, of vectors that other calls have changed by then.
        self.scale_in_graph: torch.Tensor | None = None
        self.strayed_in_graph = False  # whether it saw a use of the weight there that is not understood
        self.ran = False  # whether it was called in this step, and not only computed again
        self.called = False  # the same, with its weight as it is, in compiled graphs, too
        self.began = 0  # how often sums began anew
        self.counted_kind: tuple[int, Any] | None = None  # of uses whose positions count since then
        self._trained = layer.parameters()
        self._places = [_place_of(site, layer.weight.parameter) for site in layer.sites]
        self.with_others = False  # whether a call of this step was with other weights than the layer's
        self.had_others = False  # the same of what was taken last
        self._ending: Ending | None = None  # of calls that train nothing of it
        self._nodes: dict[bool, Any] = {}  # autograd's, of G of uses as the transpose, or of others
        self.running: list[int] = []  # first sites of modules that run, if functional.py asks
        self.first, self.first_of_bias = FirstStep(), FirstStep()  # of calls, and uses of each
        self.explained: Explained | None = None  # in the first steps, where it can be told
        self.seen: list[weakref.ref[torch.Tensor]] = []  # the inputs of this step's calls
        self.shape_of_places = 1  # positions of one example, for kfac-pytorch's scaling
        self.handles: list[Any] = []
        self.hooks: list[Hook] = []
        self._numbers: list[tuple[nn.Module, int]] = []  # theirs, by which modules keep them
        self.pass_handles: list[Any] = []  # of these those of `watch_passes`
        self._began: Any = None  # what they call
        self.dtype = dtype
        self.counts_each = layer.spec.kind == "stack"  # rows, by a coordinate 1 of the inputs
        sizes = (layer.sizes[0] + self.counts_each, layer.sizes[1])
        self.A, self.G, self.counts = self._slots(sizes, layer.diagonal)
        self.of_sums: tuple[torch.Tensor, ...] = ()  # of lookups for all examples, in compiled graphs
        self.of_sums_of_sums: tuple[torch.Tensor, ...] = ()  # of such with others
        if layer.spec.kind == "embedding":
            self.of_sums = self._slots(sizes, layer.diagonal)
            self.of_sums_of_sums = self._slots(sizes, layer.diagonal)
        if layer.spec.kind == "free":
            self.A = self._slot(*layer.weight.shape)
        self.transposed: tuple[torch.Tensor, ...] = ()
        if any(site.transposed for site in layer.sites):
            self.turn()
        self.products = self._slot(layer.blocks, layer.sizes[1], layer.sizes[0])
        self.sampled: dict[int, torch.Tensor] = {}  # by slot: of passes of our own
        self.terms = 0.0  # of the losses that those are about
        self.kept: KeptRows | None = None  # set to keep rows of the passes
        self.held_back = False  # whether fully_shard may hold gradients back until it reduces them
        self.taken_elsewhere = False  # whether gradients were when the last backward pass was over
        self.may_be_taken = False  # the same of a pass inside of one that runs, which may add some yet
        self._noted: list[tuple[int, int]] = []  # which sums there were then
        if layer.spec.kind != "free":
            for i, site in enumerate(layer.sites):
                if site.functional:
                    continue
                hook = Hook(self, site.module, i)
                handle = after_forward(site.module, hook, prepend=True)
                self._numbers.append((site.module, handle.id))
                self.handles.append(handle)
                self.hooks.append(hook)

    def come_first(self) -> bool:
        """Have hooks see what layers compute and not what others make of it that were put in front.

        Returns:
            Whether there were any.
        """
        moved = False
        for module, number in self._numbers:
            hooks: Any = module._forward_hooks
            # Others' numbers are torch's, which are not negative: `after_forward`.
            if number in hooks and any(n >= 0 for n in itertools.takewhile(number.__ne__, hooks)):
                hooks.move_to_end(number, last=False)
                moved = True
        return moved

    def _slot(self, *shape: int) -> torch.Tensor:
        # Expanded from one number: only gradients take memory.
        zero = torch.zeros((), dtype=self.dtype, device=self.layer.device)
        return zero.expand(shape).requires_grad_()

    def _slots(
        self, sizes: tuple[int, int], diagonal: tuple[bool, bool]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        blocks = self.layer.blocks
        factors = [
            self._slot(blocks, side) if d else self._slot(blocks, side, side)
            for side, d in zip(sizes, diagonal, strict=True)
        ]
        return factors[0], factors[1], self._slot(2)

    def turn(self) -> None:
        """Have slots for uses as the transpose."""
        if not self.transposed:
            self.transposed = self._slots(self.layer.sizes[::-1], self.layer.diagonal[::-1])
            if self.pass_handles:
                self._tell_of_passes(self.transposed)

    def is_awaited(self, transposed: bool) -> bool:
        """Whether the backward pass that runs wants the sums of uses as the transpose, or of others."""
        if transposed not in self._nodes:
            slot = self.transposed[1] if transposed else self.G
            self._nodes[transposed] = torch.autograd.graph.get_gradient_edge(slot).node
        return torch._C._will_engine_execute_node(self._nodes[transposed])

    def forget_nodes(self) -> None:
        """Forget what `is_awaited` asks for."""
        self._nodes.clear()

    def is_trained_by_pass(self) -> bool:
        """Whether the backward pass that runs adds to its sums, or to its parameters' gradients."""
        # Where a rank has no examples there are only counts in the graph.
        if any(map(is_awaited, (self.G, self.counts, *self.transposed[1:2]))):
            return True
        leaves = [p for p in self.layer.parameters() if p.requires_grad and p.is_leaf]
        try:
            nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in leaves]
            return any(map(torch._C._will_engine_execute_node, nodes))
        except RuntimeError:  # of a leaf that `torch.autograd.grad` was asked for
            return False

    def slots(self) -> list[torch.Tensor]:
        """All slots, in a fixed order."""
        own = self.A, self.G, self.counts, *self.transposed, self.products
        return [*own, *self.of_sums, *self.of_sums_of_sums]

    def counted_slots(self) -> list[torch.Tensor]:
        """The slots that grow with every backward pass, whatever its gradients."""
        counting = self.G if self.layer.has_gradients_in_A else self.A
        return [counting, self.counts, *self.transposed[::2]]

    def _keeps(self, site: Site, x: Any, y: Any) -> bool:
        usable = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and y.requires_grad
        return usable and is_training(self.clock, site) and not torch.compiler.is_compiling()

    def wanted(self, index: int) -> bool:
        """Whether a call of a site is to have a part in statistics."""
        site = self.layer.sites[index]
        return self.clock.wanted and is_training(self.clock, site) and self.is_trained(index)

    def is_trained(self, index: int) -> bool:
        """Whether a call of a site trains the layer: it is not frozen, and the call is with its weight.

        A leaf in the weight's place is another's. What is made of the weight (fast weights, a mask) is
        no leaf, and may train it.
        """
        if torch.compiler.is_compiling():
            return True
        if not any([p.requires_grad for p in self._trained]):  # noqa: C419 (faster)
            return False
        place = self._places[index]
        if place is None or self.held_back:  # while fully_shard's forward runs it has whole parameters
            return True
        module, name = place
        weight = module._parameters.get(name)
        if weight is None:  # perhaps a tensor that is no parameter took its place
            weight = vars(module).get(name)
        if weight is not None and not weight.is_leaf:
            self.cannot_tell()
        own = weight is self.layer.weight.parameter or weight is None or not weight.is_leaf
        self.with_others |= not own
        return own

    def cannot_tell(self) -> None:
        """A part of the weight's gradient may be of what is not probed, or no product of rows."""
        if self.explained is not None:
            self.explained.is_off = True

    def _passes_by(self, site: Site, y: torch.Tensor) -> None:
        """A call that trains nothing of the layer may be the model's last, whose positions count."""
        if not self.layer.is_product or not y.numel():
            return
        if self._ending is None:
            self._ending = Ending(self.clock, self.layer.device)
            self.clock.endings.append(self._ending)
        self._ending.sees(y, output_positions(site.spec, y))

    def observe(self, index: int, args: Any, kwargs: Any, y: Any) -> Any:
        """Probe a call of the layer, if it is part of training and this step wants statistics."""
        clock = self.clock
        if self.kept is None and not clock.wanted and not clock.discovering:
            return y
        is_compiling = torch.compiler.is_compiling()
        if type(y) is not torch.Tensor and not is_compiling:
            return self._observe(index, args, kwargs, y)
        # Modes would be asked for each attribute of a tensor.
        with without_modes() if is_compiling else torch._C.DisableTorchFunction():
            return self._observe(index, args, kwargs, y)

    def _observe(self, index: int, args: Any, kwargs: Any, y: Any) -> Any:
        site = self.layer.sites[index]
        x = args[0] if args else kwargs.get("input")
        trained = self.is_trained(index)
        if not torch.compiler.is_compiling() and self.clock.discovering:
            self._note_call(y, trained)
            watched = site.owner.training and not self.clock.pausing and torch.is_grad_enabled()
            if torch.is_grad_enabled() and (not watched or is_transformed(y)):
                self.cannot_tell()
            if self.come_first():
                self.cannot_tell()
            if watched:
                on_transformed(y, functools.partial(self.clock.transformed.add, self.layer.name))
        x = dense(x)
        if getattr(x, "is_nested", False) or getattr(y, "is_nested", False):
            self.cannot_tell()
            return y
        if self.kept is not None and trained and self._keeps(site, x, y):
            y = self.kept.probe(x, y)
        seen = self.clock.wanted and is_training(self.clock, site) and isinstance(x, torch.Tensor)
        if not seen or not y.requires_grad:
            return y
        if not trained:
            self._passes_by(site, y)
            return y
        if not y.numel():  # an expert without tokens has seen nothing
            # Passes of our own must still go through what fully_shard has to gather on all ranks.
            return Reached.apply(y, self.counts, 0) if self.clock.sampled and self.held_back else y
        if is_sharded(y):  # of a tensor-parallel layer: what is here is a block
            if not self.layer.tensor_split and is_cut(y):
                raise RuntimeError(
                    f"layer {self.layer.name!r} must see all rows on each rank that has a copy of it, "
                    f"got output of placements {tuple(y.placements)}, as SequenceParallel and "
                    "distribute_module make it: leave the layer out by skip_layers=, or have its input "
                    "on all ranks; for data-parallel training take fully_shard or DDP"
                )
            probed = self._probed(site, local(x), local(y), args, kwargs, whole=False)
            return like(y, probed)
        return self._probed(site, x, y, args, kwargs)

    def _note_call(self, y: Any, trained: bool) -> None:
        """In the first step: a call made `y`, of the weight and perhaps a bias."""
        self.first.note_call(y, trained)
        if self.layer.bias is not None:
            self.first_of_bias.note_call(y, trained)

    def observe_function(
        self, index: int, x: Any, y: Any, spec: LayerSpec, made: torch.Tensor | None = None
    ) -> Any:
        """`observe` of a function that got the layer's weight.

        Args:
            spec: what the call was like.
            made: () or (d_out,), of what was made of the weight and took its place: what the weight's
                rows were multiplied with.
        """
        counts = not torch.compiler.is_compiling() and self.clock.discovering
        if counts and self.is_trained(index):
            self._note_call(y, True)
            self.first.calls_of_made += made is not None
        if counts and torch.is_grad_enabled() and not is_training(self.clock, self.layer.sites[index]):
            self.cannot_tell()
        site, x = self.layer.sites[index], dense(x)
        if not self.wanted(index) or not isinstance(x, torch.Tensor) or not y.numel() or is_sharded(y):
            return y
        return self._probed(replace(site, spec=spec), x, y, (), {}, made=made)

    def observe_transpose(self, index: int, x: Any, y: Any, spec: LayerSpec) -> Any:
        """`observe_function` of a function that got the weight's transpose: y = x W, as in decoders.

        Args:
            spec: the layer's, of 'dense', but for the axes, which are those of the product.
        """
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and self.clock.discovering:
            self.first.note_call(y, self.is_trained(index))
        site, x = self.layer.sites[index], dense(x)
        if not self.wanted(index) or not isinstance(x, torch.Tensor) or not y.numel() or is_sharded(y):
            return y
        if is_compiling:
            return self._probed_transpose_in_graph(x, y, spec)
        again = in_backward()
        if not again:
            self.forget_what_was_discarded()
        self.turn()
        run = self.clock.ran(self, True, again, False)
        axes = None if spec.axes is None else spec.axes.turned()
        source = Source(self, replace(site, spec=spec._replace(axes=axes)), True)
        counts = self.transposed[2]
        return self._probed_derivative(source, Call(run), x, y, None, None, True, counts)

    def _probed_transpose_in_graph(self, x: torch.Tensor, y: torch.Tensor, spec: LayerSpec) -> Any:
        """Where torch.compile traces, to which derivatives of a product are not known."""
        self.clock.ran(self, True, False, False)
        axes = None if spec.axes is None else spec.axes.turned()
        spec = spec._replace(axes=axes)
        about = About(spec, self.clock if self.clock.sampled else None, turned=True)
        chosen, bases = self._chosen(spec, y, x), self.bases
        G, A, counts = self.transposed
        if bases is None and chosen is None:
            return probed(y, x, A, G, counts, about)
        slot = None if bases is None else self.products
        return probed(y, x, A, G, counts, about, slot, None, chosen, *(bases or (None, None)), None)

    def _probed(
        self,
        site: Site,
        x: torch.Tensor,
        y: torch.Tensor,
        args: Any,
        kwargs: Any,
        of_sum: OfSum | None = None,
        made: torch.Tensor | None = None,
        whole: bool = True,
        in_place: bool = False,
    ) -> Any:
        """
        Args:
            whole: whether the layer computed `y` from `x`, and not from what `x` is a block of.
            in_place: whether `y` itself is to have the probe behind it.
        """
        if y.device != self.G.device:
            raise RuntimeError(
                f"layer {self.layer.name!r} must run where it was when K-FAC was attached, on "
                f"{self.G.device}, got {y.device}: move the model first, then attach"
            )
        shape = self.layer.weight.parameter.shape
        if not torch.compiler.is_compiling() and shape != self._shape:
            raise RuntimeError(
                f"layer {self.layer.name!r} must have a weight of the shape that it had when K-FAC was "
                f"attached, {tuple(self._shape)}, got {tuple(shape)}: detach() before layers grow or "
                "shrink, then attach again"
            )
        spec = site.spec
        if y.dtype.is_complex:  # of a real weight the gradient is the real part of a product
            if self.clock.discovering:
                when_reached([y], functools.partial(self.clock.strays.add, self.layer.name))
            return y
        again = in_backward()
        scale = factor = None
        given = x
        if site.scaling or spec.kind == "bag":
            with torch.no_grad():
                x, scale = prepared(site, x, y, args, kwargs)
            if site.scaling == "spectral_norm" and torch.compiler.is_compiling():
                self.scale_in_graph = scale
        if made is not None and spec.bias:
            # The bias, a coordinate of x, is not longer. What rows share belongs to the others: the mean
            # of their squares, and beside the bias their mean. So x is another layer's input no more.
            length = made.square().mean().sqrt()
            x, factor = x.detach(), torch.stack([length, made.mean() / (length + (length == 0))])
        elif made is not None and spec.kind == "embedding":
            scale = made
        elif made is not None:
            rows = self.layer.weight.shape[self.layer.layout == "transposed"]
            scale = made.expand(rows).reshape(-1, *(1,) * len(spec.kernel))
        source = None
        if spec.kind in PRODUCTS and given.requires_grad and not torch.compiler.is_compiling():
            scaled = site.scaling in ("magnitude", "weight_norm of inputs", "scaled columns")
            source = Source(self, site, factor is None and not scaled and whole)
        run = self._note(site, x, y, again)
        slots = self.transposed if site.transposed else (self.A, self.G, self.counts)
        shared = self.input_of is not None and not site.transposed and self._has_input_of(x)
        bases = None if site.transposed else self.bases
        chosen = self._chosen(spec, x, y)
        clock: Any = self.clock if self.clock.sampled else None
        if of_sum is not None:
            clock = of_sum
        elif spec.kind == "embedding" and not torch.compiler.is_compiling():
            clock = UnlessBroadcast(clock)
        rest: tuple[torch.Tensor | None, ...] = ()
        if any([v is not None for v in (bases, scale, chosen, factor)]):  # noqa: C419 (torch.compile)
            slot = None if bases is None else self.products
            rest = (slot, scale, chosen, *(bases or (None, None)), factor)
        told = None if torch.compiler.is_compiling() else self.clock
        asked = None
        if told is not None and self.explained is not None and told.discovering and of_sum is None:
            turned = site.transposed and spec.kind != "embedding"
            if whole and made is None and scale is None and not (turned or in_place):
                asked = functools.partial(self.explained.add, spec, site.transposed)
            else:
                self.cannot_tell()
        found = (ProbeInPlace.apply if in_place else probed)(
            y,
            None if spec.kind == "bias" else x,  # what is saved must not be changed in place
            None if shared else slots[0],
            slots[1],
            slots[2],
            About(spec, clock, self._reading(x), source, run, told, asked),
            *rest,
        )
        if isinstance(clock, UnlessBroadcast):
            one = LookedUp(weakref.ref(found), x, clock, site, found._version, capture=self)
            self._note_lookup(one)
        elif spec.kind == "embedding" and not self.clock.sampled:
            for around in self.arounds:
                around.looked_up_in_graph(self, spec, x, found)
        return found

    def passed(
        self,
        source: Source,
        call: Call,
        gradient: torch.Tensor,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        turned: bool,
    ) -> torch.Tensor:
        """A backward pass that is recorded goes through a call, or a product in derivatives of it.

        Args:
            gradient: by what comes out there.
            x: what goes in there.
            scale: what the gradient by the call's output is multiplied with for statistics.
            turned: whether what the pass computes is a product with the transpose of the call's.

        Returns:
            The gradient to go on with.
        """
        self.cannot_tell()
        if self.clock.pausing:
            return gradient
        name, is_norm = self.layer.name, source.site.spec.kind == "norm"
        if is_batched(gradient):  # and what is put behind it would be lost
            self.clock.missed.add(name)
            return gradient
        # In derivatives of higher order the scale of a norm is elsewhere, too.
        if not source.understood or (is_norm and not turned):
            missed = functools.partial(self.clock.missed.add, name)
            noted: torch.Tensor = Noted.apply(gradient, self.G, missed)
            return noted
        if not x.requires_grad:
            return gradient
        at = x if is_norm else None
        follow(x, lambda y: self._probed_derivative(source, call, gradient, y, at, scale, turned))
        return gradient

    def _probed_derivative(
        self,
        source: Source,
        call: Call,
        x: torch.Tensor,
        y: torch.Tensor,
        at: torch.Tensor | None,
        scale: torch.Tensor | None,
        turned: bool,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Probe `y`, what a product in derivatives of a call made of `x`.

        Args:
            positions: the slot for the call's positions, if not its own.
        """
        self.cannot_tell()
        site, is_norm = source.site, source.site.spec.kind == "norm"
        slots: tuple[torch.Tensor, ...] = (self.A, self.G, self.counts)
        own = self.transposed if site.transposed else slots
        if not is_norm and turned != site.transposed:
            self.turn()
            slots = self.transposed
        if not is_norm and turned:
            slots = slots[1], slots[0], slots[2]
        pair = (y, x) if turned else (x, y)
        bases = None if site.transposed else self.bases
        probed: torch.Tensor = DerivativeProbe.apply(
            y,
            *slots,
            own[2] if positions is None else positions,
            None if bases is None else self.products,
            source,
            call,
            turned,
            x,
            at,
            scale,
            self._chosen(site.spec, *pair),
            *(bases or (None, None)),
        )
        return probed

    def _note_lookup(self, one: LookedUp) -> None:
        """Those of now, the last one at the end, as far as what they found is still there.

        In the first step those that backward passes came to, too.
        """
        asks = self.clock.discovering
        here = [x for x in self.looked_up if x.output() is not None or (asks and x.unless.was_reached)]
        self.looked_up = [*here, one][-_MOST_LOOKUPS:]

    def observe_sum(
        self,
        last: LookedUp,
        operand: torch.Tensor,
        total: torch.Tensor,
        changed: bool = False,
        kept: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, UnlessBroadcast] | None:
        """Probe what an embedding's output was added to, if that has more rows.

        Positions are often looked up once for all examples. What reaches the lookup then is the sum of
        the examples' gradients, whose square is not the sum of their squares.

        Args:
            last: a lookup, or what was made of it, the operand.
            changed: whether the total took the place of another tensor, which goes on as it.
            kept: where the lookup is a part of it; None: everywhere.

        Returns:
            The total with a probe behind it, and by what another takes its place; None: there is none.
        """
        width = self.layer.weight.shape[-1]
        if self.leads or self.input_of is not None or not self.clock.wanted:
            return None
        if total.numel() < last.x.numel() * width:
            return None
        if last.sums is not None and total.numel() <= last.size:
            return None
        if total.dtype.is_complex:
            self.miss_lookup(last, total)
            return None
        found = last.positions(width) if operand._version == last.version else None
        if found is None or total.ndim < -found[1] or total.shape[found[1]] != width:
            self.miss_lookup(last, total)
            return None
        index, axis = found
        rows = total if axis == -1 else total.movedim(axis, -1)
        if not counts_in_sum(last.x, index, rows):
            return None
        in_place = changed and rows is total and not total._is_view()
        if changed and not in_place and self.clock.discovering:
            # Who goes on with the tensor that was changed, and not with what is returned, passes it by.
            last.unless.passed_by = functools.partial(self.clock.strays.add, self.layer.name)
        factor = last.factor
        if not isinstance(factor, torch.Tensor):
            factor = None if factor == 1 else torch.full((), factor, device=total.device)
        for places in (last.kept, kept):
            if places is not None:
                places = places.expand(total.shape).movedim(axis, -1).to(self.G.dtype)
                factor = places if factor is None else places * factor
        index = index.broadcast_to(rows.shape[:-1])
        clock = self.clock if self.clock.sampled else None
        of_sum = OfSum(clock, (last.unless, *(last.sums or ())))
        probed = self._probed(last.site, index, rows, (), {}, of_sum, made=factor, in_place=in_place)
        return probed if axis == -1 else probed.movedim(-1, axis), of_sum.unless

    def miss_lookup(self, one: LookedUp, result: torch.Tensor) -> None:
        """What a lookup is used in is not followed: note it if that has more rows, of all examples."""
        width = self.layer.weight.shape[-1]
        if not self.clock.discovering or result.numel() <= one.x.numel() * width:
            return
        if one.sums is not None and result.numel() <= one.size:
            return
        found = one.positions(width)
        if found is not None and result.ndim >= -found[1]:
            index, axis = found
            if is_of_each(one.x, index, result.movedim(axis, -1)):
                return  # once an example, for all its rows
        self.clock.lookups.add(self.layer.name)

    def observe_sum_in_graph(
        self,
        spec: LayerSpec,
        x: torch.Tensor,
        index: torch.Tensor,
        axis: int,
        factor: torch.Tensor | None,
        masks: Sequence[torch.Tensor],
        total: torch.Tensor,
        of_sums: bool = False,
        is_part: bool = False,
    ) -> torch.Tensor:
        """`observe_sum` in a graph that is compiled, of what was looked up, times a factor.

        What the lookup's own probe is to do was traced before. So it sums as ever, beside this.

        Args:
            x: what was looked up.
            index: what each row of what is added has of it.
            axis: of features, from the end.
            masks: where it is a part of the total.
            of_sums: whether what is added is such a sum itself, whose place these statistics take.
            is_part: whether the total may be such a sum.
        """
        rows = total if axis == -1 else total.movedim(axis, -1)
        if not counts_in_sum(x, index, rows):
            if x.ndim and x.ndim == total.ndim - 1 and len(x) == len(total) and not is_part:
                self.summed_in_graph = True  # once an example, for all its rows
            return total
        self.summed_in_graph = True
        for mask in masks:
            places = mask.expand(total.shape).movedim(axis, -1).to(self.dtype)
            factor = places if factor is None else places * factor
        rest = () if factor is None else (None, factor, None, None, None, None)
        index, about = index.broadcast_to(rows.shape[:-1]), About(spec)
        slots = self.of_sums_of_sums if of_sums else self.of_sums
        found: torch.Tensor = probed(rows, index, *slots, about, *rest)
        return found if axis == -1 else found.movedim(-1, axis)

    def _note(self, site: Site, x: torch.Tensor, y: torch.Tensor, again: bool) -> Run | None:
        spec = site.spec
        looks_up = spec.kind in ("embedding", "bag")
        run = self.clock.ran(self, site.transposed, again, looks_up)
        if spec.kernel and y.ndim > 2:
            self.shape_of_places = math.prod(y.shape[-len(spec.kernel) :])
        if torch.compiler.is_compiling():
            return run
        # Of reentrant checkpoints, whose forward passes are not seen, when they compute again.
        if not again or not self.ran:
            self.forget_what_was_discarded(again=again)
        if again:
            self.clock.passes()
            for ending in () if self.ran else self.clock.endings:
                ending.believe()
        self.ran |= not again
        if self.leads:
            self.seen.append(weakref.ref(x))
        if self.clock.discovering:
            self._discover(spec, x, y, again)
        return run

    def _discover(self, spec: LayerSpec, x: torch.Tensor, y: torch.Tensor, again: bool) -> None:
        """Note what a call read."""
        self.first.note_axes(spec, x, y, again)
        if not self.inputs:
            self.first_call, self.recomputed = self.clock.calls, again
        if again == self.recomputed:
            self.clock.calls += 1
            # What is read along other axes is another input.
            is_moved = spec.axes is not None and spec.axes.moves_input()
            self.inputs.append(self.clock.token(x.detach() if is_moved else x))

    def ran_once_for_all(self, examples: int, calls: int) -> bool:
        """Whether calls in the first step, at most so many, were for all examples at once."""
        if not self._has_sums() or not self.first.was_once_for_all(examples, calls):
            return False
        if self.layer.spec.kind != "embedding":
            return True
        reached = [one for one in self.looked_up if one.unless.was_reached]
        if not reached:
            return False
        found = reached[-1]
        if found.x.shape == (examples,) or found.unless.was_broadcast:
            return False
        return self.first.was_for_all_only()

    def _has_input_of(self, x: torch.Tensor) -> bool:
        """Whether this call's input is one that the layer whose A this layer shares has summed."""
        assert self.input_of is not None
        if torch.compiler.is_compiling():
            return False
        seen = [y for reference in self.input_of.seen if (y := reference()) is not None]
        token = self.clock.token
        found = any(y is x for y in seen) or any(token(y) == token(x) for y in seen)
        self.left_out |= found
        return found

    def _reading(self, x: torch.Tensor) -> Reading | None:
        """For the backward pass of a call with this input; None: nobody asks whether there was one."""
        if torch.compiler.is_compiling():
            return None
        if not self.clock.discovering and not self.leads and self.input_of is None:
            return None
        return Reading(self.read, self.clock.token(x))

    def _chosen(self, spec: LayerSpec, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """The examples or rows that statistics are taken from; None: all of them."""
        count = spec.max_examples or spec.max_rows
        if not count:
            return None
        total = example_count(spec, y) if spec.max_examples else row_count(spec, x)
        if count >= total:
            return None
        if spec.max_examples:
            return self.clock.examples(count, total, y.device)
        return self.clock.chosen(self.stream, count, total, y.device)

    def forget_what_was_discarded(self, *, again: bool = False) -> None:
        """Setting the model's gradients to None, whoever does it, clears its statistics.

        Args:
            again: whether a checkpoint runs the layer for the backward pass.
        """
        # Or are a micro-batch's, which fully_shard has not reduced yet.
        if self.taken_elsewhere or self.may_be_taken:
            return
        if self.clock.pass_elsewhere():  # whose gradients are still to come
            return
        if self._has_sums() and self._has_no_gradients():
            self.clear()
            self.clock.discarded(again=again)

    def _has_sums(self) -> bool:
        return any(self._sum(slot) is not None for slot in (self.G, *self.transposed[1:2]))

    def _has_no_gradients(self) -> bool:
        return all(p.grad is None for p in self.layer.parameters())

    def note_gradients(self, *, inside: bool) -> None:
        """A backward pass is over: hooks may have taken its gradients elsewhere as they came.

        Args:
            inside: whether another runs, as around a reentrant checkpoint's.
        """
        sums = [self._sum(slot) for slot in (self.G, *self.transposed[1:2])]
        marks = [(id(x), x._version) for x in sums if x is not None]
        self.may_be_taken = False
        if not marks or marks == self._noted:
            return  # the pass did not come here
        if inside:
            self.may_be_taken = self._has_no_gradients()
        else:
            self._noted, self.taken_elsewhere = marks, self._has_no_gradients()

    def watch_passes(self) -> None:
        """Have every backward pass ask what was discarded before it adds to any sum.

        For forward passes that torch.compile compiled, which do not ask.
        """
        if self.pass_handles:
            return
        own, before = weakref.ref(self), -1

        @uncompiled
        @unserializable_hook  # a copy of the parameter watches for nobody
        def began(gradient: torch.Tensor) -> None:
            nonlocal before
            capture, now = own(), torch._C._current_graph_task_id()
            if capture is None or before == now:
                return
            before, clock = now, capture.clock
            if clock.wanted and not clock.pausing and not clock.sampled:
                capture.forget_what_was_discarded()
                clock.passes()

        self._began = began
        trained = [p for p in self.layer.parameters() if p.requires_grad]
        self._tell_of_passes([*trained, *self.slots()])

    def _tell_of_passes(self, tensors: Sequence[torch.Tensor]) -> None:
        handles = [x.register_hook(self._began) for x in tensors]
        self.pass_handles += handles
        self.handles += handles

    def leave_passes(self) -> None:
        """Undo `watch_passes`."""
        for handle in self.pass_handles:
            handle.remove()
        self.handles = [handle for handle in self.handles if handle not in self.pass_handles]
        self.pass_handles = []

    def clear(self) -> None:
        self.sampled.clear()
        self.seen.clear()
        self.read.clear()
        self._noted.clear()
        self.looked_up = []
        self.left_out = self.ran = False
        self.began += 1
        self.terms = 0.0
        for slot in self.slots():
            slot.grad = None

    def _sum(self, slot: torch.Tensor) -> torch.Tensor | None:
        return self.sampled.get(id(slot)) if self.clock.sampled else slot.grad

    def take_nothing(self) -> None:
        """`take` where no slot has a sum."""
        self._begin_step()
        self.ran = False
        self.seen.clear()
        self.terms = 0.0

    def _begin_step(self) -> None:
        self.incomplete, self.left_out = self.left_out, False
        self.had_others, self.with_others = self.with_others, False

    def counted(self) -> torch.Tensor | None:
        """(2,), rows and positions since the last `take`; None if no backward pass counted any."""
        of_sums = self._summed()
        return of_sums[2].grad if of_sums else self._sum(self.counts)

    def _summed(self) -> tuple[torch.Tensor, ...]:
        """The slots of lookups for all examples, beside which A and G are of sums; none: of no graph."""
        for slots in (self.of_sums_of_sums, self.of_sums):
            if slots and slots[1].grad is not None:
                return slots
        return ()

    def take(self, counts: Sequence[torch.Tensor] | None) -> Captured | None:
        """What was summed since the last `take`; None if no backward pass went through the layer.

        Args:
            counts: (), (): what was `counted`, which takes one call for many layers.
        """
        A, G = self._sum(self.A), self._sum(self.G)
        of_sums = self._summed()
        if of_sums:
            A, G = of_sums[0].grad, of_sums[1].grad
        transposed = positions = None
        sums = [self._sum(slot) for slot in self.transposed]  # of most layers there are none
        if sums and sums[0] is not None and sums[1] is not None and sums[2] is not None:
            transposed, positions = LayerStatistics(sums[0], sums[1], sums[2][0]), sums[2][1]
        products, terms = self._sum(self.products), self.terms
        read = tuple(sorted(self.read)) if self.read else ()
        self._begin_step()
        self.clear()
        if counts is None or G is None:
            if transposed is None:
                return None
            counts = torch.zeros_like(self.counts).unbind() if counts is None else counts
            G = torch.zeros_like(self.G)
        if A is None:
            A = torch.zeros_like(self.A)
        if self.layer.spec.kind == "free":
            A = A.reshape(1, -1)
        main = LayerStatistics(A, G, counts[0])
        return Captured(main, transposed, (counts[1], positions), products, terms, read)
