"""Weights that reach `torch.nn.functional` by another way than their module's own forward.

A subclass of a layer with a forward of its own (timm's norms, scaled embeddings), a layer that is no
subclass of torch's (`own_weights.py`), or a module that hands a child's weight to a function
(`F.linear(x, self.qkv.weight)`), has no call that a module's hook could read. While such a module runs,
a torch function mode watches for the functions of `calls.py` with one of these weights, and treats each
call as one of the layer. So is `x @ self.weight.T`, or `self.weight @ x.mT`, or `torch.einsum` of a
product, and of a layer with a bias the sum of a product and that. What a layer's own forward makes of
its weight by multiplying, shifting and standardizing rows may take its place (`made_weights.py`). The
mode also watches for sums of what was looked up once for all examples (`lookup_sums.py`). Attention by
its function, of weights of layers, is written out (`attention.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import attention
from suite.torch.calls import (
    ARGUMENTS,
    PRODUCTS,
    behind,
    call_of,
    is_transpose,
    keeps_order,
    rows_of,
    summed,
)
from suite.torch.capture import LayerCapture, is_training
from suite.torch.einsum import Rows, operands_of, rows_of_call, tensordot_as_einsum
from suite.torch.hooks import (
    Enter,
    Hook,
    Mode,
    ModeAround,
    after_forward,
    before_forward,
    graph_clock,
    in_traced_graph,
    is_data,
    packs_with,
    root_of,
    tensors_given,
    tensors_in,
    traceable,
    when_reached,
)
from suite.torch.layers import Layer, Site
from suite.torch.lookup_sums import Lookups
from suite.torch.made_weights import Made, node_of, reached_from, scale_of
from suite.torch.operations import (
    ADDED,
    ADDITIONS,
    CASTS,
    JOINS,
    SHAPED_LIKE,
    SUMS,
    T,
    changes_in_graph,
    is_subtracted,
    mask_and_scores,
    turns,
)
from suite.torch.rows import Axes, LayerSpec

_LISTS = list, tuple
_WRITES = frozenset([T.zero_, T.fill_, T.masked_fill_, T.__setitem__])
_CALLING = (nn.Sequential.forward, nn.Module.forward)  # which do nothing but to call children


def has_functions(layer: Layer, site: Site) -> bool:
    """Whether a module around may call the function of a layer that runs by itself, too."""
    return (
        site.spec.kind in ("dense", "convolution", "embedding", "norm")
        and site.module is site.owner
        and not site.scaling
        and not layer.tensor_split
        and layer.weight.stop is None
    )


def only_calls(module: nn.Module) -> bool:
    """Whether its forward does nothing but to call children."""
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward in _CALLING


def callers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """By module, the one around it whose forward may do more than to call its children."""
    found: dict[nn.Module, nn.Module] = {}

    def walk(module: nn.Module, around: nn.Module | None) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        own = around if type(module).forward in _CALLING else module
        for child in module.children():
            if child not in found and own is not None:
                found[child] = own
                walk(child, own)
            elif own is None:
                walk(child, None)

    walk(model, None)
    return found


def place_of(layer: Layer, module: nn.Module) -> int:
    """The first of a layer's sites that are this module's; -1: none is. Alike for layers alike."""
    return next((i for i, site in enumerate(layer.sites) if site.module is module), -1)


class RunningLayer:
    """Knows when a module of a layer runs, whose own use of the weight is none of one around it."""

    def __init__(self, capture: LayerCapture, module: nn.Module) -> None:
        self.capture, self.place = capture, place_of(capture.layer, module)
        self.hooks = Enter(self, module), Hook(self, module)
        self.handles = [
            before_forward(module, self.hooks[0]),
            after_forward(module, self.hooks[1], always_call=True),
        ]

    def enter(self) -> None:
        self.capture.running.append(self.place)

    def observe(self, site: int, args: Any, kwargs: Any, output: Any) -> None:
        if self.capture.running:
            self.capture.running.pop()


class _Met:
    """Whether a weight was met: where torch.compile traces this is set, and a set would be looked at."""

    def __init__(self) -> None:
        self.yet = False


class FunctionCapture(ModeAround):
    """Watches what a module's forward does with weights of its own, or of its children."""

    def __init__(
        self,
        module: nn.Module,
        weights: Sequence[tuple[LayerCapture, int]],
        tables: Sequence[tuple[LayerCapture, int]],
    ) -> None:
        """
        Args:
            weights: captures, and which of their sites they are, whose weights its forward may use.
            tables: likewise, those of embeddings further inside.
        """
        super().__init__(module)
        self.weights, self.uses = list(weights), [*weights, *tables]
        self.places = [place_of(capture.layer, module) for capture, _ in self.uses]
        # By short ways: torch.compile guards each step of a way, and that two lead to one place.
        self.sites = [capture.layer.sites[index] for capture, index in self.uses]
        self.own = [site.module is module for site in self.sites]
        self.turned = [capture.layer.layout == "transposed" for capture, _ in self.uses]
        self.makes = [self._makes_weights(place) for place in range(len(self.uses))]
        self.clock = self.uses[0][0].clock
        for (capture, _), site in zip(self.uses, self.sites, strict=True):
            if site.spec.kind in ("dense", "embedding"):  # no graph can make what its sums are kept in
                capture.turn()
        self._met = [_Met() for _ in self.uses]
        self.ran = False
        self.tables = [capture for capture, _ in self.uses if capture.layer.spec.kind == "embedding"]
        for capture in self.tables:
            capture.arounds.append(self)

    def looked_up_in_graph(
        self, capture: LayerCapture, spec: LayerSpec, x: torch.Tensor, found: torch.Tensor
    ) -> None:
        """A lookup in a graph that is compiled."""
        mode = self.mode()
        if mode is None or mode.lookups is None or not mode.is_traced:
            return
        for place, (own, _) in enumerate(self.uses):
            if own is capture:
                mode.lookups.note_in_graph(place, spec, x, found)
                mode.refresh_followed()
                return

    def find(self, capture: LayerCapture) -> None:
        """Note that it is needed for a table."""
        for place, (own, _) in enumerate(self.uses):
            if own is capture:
                self.meets(place)

    def meets(self, place: int) -> None:
        """Note that its forward uses a weight, or what was looked up in a table."""
        self._met[place].yet = True

    @property
    def found(self) -> set[int]:
        """Places in `uses` that it met so far."""
        return {place for place, one in enumerate(self._met) if one.yet}

    def mode(self) -> _Watching | None:
        """That of the forward that runs, which may have called itself; None: there is none."""
        modes = [mode for mode in self.modes.own() if isinstance(mode, _Watching)]
        if not torch.compiler.is_compiling():
            modes = [mode for mode in modes if not mode.is_away]
        return modes[-1] if modes else None

    def make_mode(self) -> _Watching | None:
        if not self._is_wanted():
            if not torch.compiler.is_compiling() and self.clock.discovering and torch.is_grad_enabled():
                for capture, _ in self.uses:
                    capture.cannot_tell()
            return None
        if torch.compiler.is_compiling():  # what is read there otherwise is compiled in
            for capture, _ in self.weights:
                capture.called = False
        self.ran = True
        return _Watching(self)

    def _is_wanted(self) -> bool:
        if not torch.compiler.is_compiling():
            return any([capture.wanted(index) for capture, index in self.uses])  # noqa: C419 (each notes)
        wanted = [self.clock.wanted and is_training(self.clock, site) for site in self.sites]
        return any(wanted)

    def lookups(self) -> Lookups | None:
        """Those of the forward that runs."""
        mode = self.mode()
        return None if mode is None else mode.lookups

    def awaits_bias(self, place: int, given: Mapping[str, Any]) -> bool:
        """Whether what is made of a layer's weight is the layer's output once its bias is added."""
        spec = self.sites[place].spec
        return spec.kind == "dense" and spec.bias and given.get("bias") is None

    def stray(self, place: int, output: torch.Tensor | None = None) -> None:
        """A use of a weight is missed, which made this `output`, if it is one that may lead nowhere."""
        capture, _ = self.uses[place]
        if torch.compiler.is_compiling():
            capture.strayed_in_graph = True
            return
        if not capture.clock.discovering:
            return
        note = functools.partial(capture.clock.strays.add, capture.layer.name)
        if output is None:
            note()
        else:
            when_reached([output], note)

    def _makes_weights(self, place: int) -> bool:
        """Whether what is computed from a weight may take its place: in the forward of its layer."""
        kind, weight = self.sites[place].spec.kind, self.uses[place][0].layer.weight
        is_matrix = kind == "dense" and len(weight.shape) == 2
        return self.own[place] and (is_matrix or kind == "convolution")

    def fits(self, place: int, shape: torch.Size, rows: Rows) -> bool:
        """Whether a weight's axes are those of a layer's inputs and outputs."""
        capture, index = self.uses[place]
        turned, leading, order = rows.halves
        first = math.prod([shape[axis] for axis in (order or range(len(shape)))[:leading]])
        rest = math.prod(shape) // max(first, 1)
        d_in, d_out = capture.layer.sizes
        d_in -= capture.layer.sites[index].spec.bias
        fits = (d_in, d_out) == ((first, rest) if turned else (rest, first))
        return fits and capture.layer.order == order

    def is_inside(self, place: int) -> bool:
        """Whether a module runs, the layer's own or one in between, that sees what it does itself."""
        capture, _ = self.uses[place]
        running = capture.running
        if len(running) > 0 and not (self.own[place] and running[-1] == self.places[place]):
            return True
        if place < len(self.weights):
            return False
        under_way = [around for around in capture.arounds if around.mode() is not None]
        return under_way[-1] is not self

    def is_table(self, place: int) -> bool:
        """Whether it is an embedding's, by itself."""
        site = self.sites[place]
        return site.spec.kind == "embedding" and not site.transposed

    def is_norm(self, place: int) -> bool:
        """Whether it is a normalization's."""
        return self.sites[place].spec.kind == "norm"

    def has_bias(self, place: int) -> bool:
        """Whether a layer's bias is a coordinate of its input."""
        return self.sites[place].spec.bias

    def observe(self, site: int, args: Any, kwargs: Any, output: Any) -> None:
        mode = self.modes.own()[-1] if self.modes.own() else None
        super().observe(site, args, kwargs, output)
        if isinstance(mode, _Watching) and output is not None:
            mode.settle(output)

    def meet(
        self,
        places: list[int],
        function: Any,
        given: Mapping[str, Any],
        output: Any,
        made: torch.Tensor | None = None,
        axes: Axes | None = None,
    ) -> Any:
        """The output of a function that got a weight, or what was `made` of it, with a probe behind."""
        for place in places:
            (capture, index), site = self.uses[place], self.sites[place]
            if self.is_inside(place):
                return output
            spec = None if given["input"].is_nested else call_of(function, given, site)
            if spec is not None:
                self.meets(place)
                spec = spec._replace(axes=axes)
                return capture.observe_function(index, given["input"], output, spec, made)
        return output

    def meet_transpose(self, places: list[int], x: Any, output: Any, axes: Axes | None) -> Any:
        """The output of a product with a weight's transpose, with a probe behind it.

        Args:
            axes: of the product, of `x` and `output`.
        """
        for place in places:
            capture, index = self.uses[place]
            layer, site = capture.layer, self.sites[place]
            if self.is_inside(place) or site.transposed:
                return output
            spec = site.spec
            if spec.kind == "embedding":  # a head with the table's rows
                spec = _product_with(layer, spec)
            # A bias that follows this product is none of the layer's inputs.
            if spec.kind == "dense" and (not spec.bias or capture.clock.has_run(capture)):
                self.meets(place)
                return capture.observe_transpose(index, x, output, spec._replace(axes=axes))
            if torch.compiler.is_compiling():
                self.stray(place)
        return output

    def meet_mixtures(self, places: list[int], x: Any, output: Any, axes: Axes | None) -> Any:
        """The output of a product with a table, x's mixtures of its rows, with a probe behind it."""
        for place in places:
            capture, index = self.uses[place]
            if self.is_inside(place):
                return output
            self.meets(place)
            spec = _product_with(capture.layer, self.sites[place].spec)
            return capture.observe_function(index, x, output, spec._replace(axes=axes))
        return output

    def counted(self, place: int) -> tuple[int, int, int] | None:
        """Uses of a weight so far, calls, and calls of what was made of it; None: nobody counts."""
        capture, _ = self.uses[place]
        if torch.compiler.is_compiling() or not capture.clock.discovering:
            return None
        first = capture.first
        return first.uses, first.calls, first.calls_of_made

    def settle(self, place: int, before: tuple[int, int, int], is_missed: bool) -> None:
        """A forward is over that called the layer: other uses led to that, or nowhere, or are missed.

        Args:
            before: what was `counted` when it began.
            is_missed: whether gradients reach the weight by another way than calls of the layer.
        """
        capture, _ = self.uses[place]
        uses, calls, of_made = (
            now - then for now, then in zip(self.counted(place) or before, before, strict=True)
        )
        if calls:
            capture.first.note_made(uses - (calls - of_made))
            if is_missed:
                self.stray(place)


class _Known(NamedTuple):
    """A layer's 'weight' (out, in), the 'transpose' of that or the 'bias', a cast or a view of one.

    A view has its numbers in their order; it is the thing itself while it has its `shape`.
    """

    tensor: torch.Tensor
    place: int  # in `FunctionCapture.uses`
    role: str
    shape: torch.Size

    def acts_as(self, role: str) -> bool:
        """Whether the tensor is this: 'weight', 'transpose', 'bias' or, of a bias, a 'column'."""
        if role == "bias":
            return self.role == role and self.tensor.shape[-1:] == self.shape
        if role == "column":
            return self.role == "bias" and self.tensor.shape[-2:] == (*self.shape, 1)
        return self.role == role and self.tensor.shape == self.shape


class _Product(NamedTuple):
    """Of a layer's weight, or a cast of it, that awaits the layer's bias."""

    tensor: torch.Tensor
    place: int
    x: torch.Tensor
    axes: Axes | None

    def role_of_bias(self) -> str:
        """What a layer's bias has to be to be added to it."""
        behind = 0 if self.axes is None else self.tensor.ndim - 1 - self.axes.y[-1]
        of_one = self.axes is None or self.axes.features[1] == 1
        return ("bias", "column")[behind] if of_one and behind < 2 else ""

    def turned(self, output: torch.Tensor) -> _Product:
        """With its last two axes exchanged."""
        ndim = output.ndim
        exchanged = {ndim - 1: ndim - 2, ndim - 2: ndim - 1}
        axes = self.axes or Axes(tuple(range(self.x.ndim)), tuple(range(ndim)), (1, 1))
        y = tuple([exchanged.get(axis, axis) for axis in axes.y])
        return self._replace(tensor=output, axes=axes._replace(y=y))


class _Watching(Mode):
    def __init__(self, around: FunctionCapture) -> None:
        super().__init__()
        self.around = around
        self.lookups = Lookups(around, around.tables, self.is_traced) if around.tables else None
        # Of modules, and not of layers: while fully_shard's forward runs, they have whole parameters.
        self.known: list[_Known] = []
        self.products: list[_Product] = []
        self.made: list[Made] = []
        # Biases one behind the other, and their version then.
        self.joined: list[tuple[torch.Tensor, int, tuple[Any, ...]]] = []
        self._ids: tuple[int, set[int]] = -1, set()  # of the tensors in `known` and `made`, so many
        # And in `products` and `lookups.moved`. All only grow, but for `_changed`, which forgets both.
        self._followed: tuple[int, set[int]] = -1, set()
        # Where torch.compile traces: the parameters among all of these, and the others.
        self._followed_in_graph: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self.calls: dict[Any, Any] = {}  # by node of autograd's graph: a layer's call, and its input
        self.before: dict[int, tuple[int, int, int]] = {}  # by place: what had been counted
        self.began = 0 if torch.compiler.is_compiling() else graph_clock()
        for place, site in enumerate(around.sites):
            weight, turned = site.held(site.weight_name), around.turned[place]
            self.known.append(_Known(weight, place, "transpose" if turned else "weight", weight.shape))
            if around.makes[place]:
                one = torch.ones((), dtype=around.uses[place][0].dtype, device=weight.device)
                self.made.append(Made(weight, place, weight, one, turned))
                before = around.counted(place)
                if before is not None:
                    self.before[place] = before
            if site.spec.bias:
                bias = site.held(site.bias_name)
                self.known.append(_Known(bias, place, "bias", bias.shape))
        self.saving = packs_with()
        if self.is_traced:
            self.refresh_followed()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function, kwargs = traceable(function, args), kwargs or {}
        if self.looks_away():
            return function(*args, **kwargs)
        if not (self._follows_in_graph(args, kwargs) if self.is_traced else self._follows(args, kwargs)):
            return function(*args, **kwargs)
        with self.looking():
            ours = self._ours(args)  # changed through it, perhaps, or through a view of it
            version = None if ours is None else ours._version
        if function is F.multi_head_attention_forward and torch.is_grad_enabled():
            found = self._attend(dict(zip(attention.ARGUMENTS, args, strict=False)) | kwargs)
            if found is not None:
                return found
        if function is F.scaled_dot_product_attention and self.lookups is not None:
            args, kwargs = self._with_mask_of_each(self.lookups, args, kwargs)
        if self.is_traced and self.lookups is not None and function in (T.add_, T.sub_) and not kwargs:
            args = args[0], self._of_each(self.lookups, args[1], args[0])
        output = function(*args, **kwargs)
        by_graph = in_traced_graph()
        with self.looking():
            if ours is not None and version != ours._version:
                self._changed(function, args, kwargs)
                return output
            if self.is_traced and changes_in_graph(function, args, output) and self._is_ours(args[0]):
                self._changed(function, args, kwargs)
                self.refresh_followed()
                return output
            if self.is_traced and isinstance(output, _LISTS):
                for x in output:
                    if isinstance(x, torch.Tensor) and x.requires_grad:
                        self._stray_in_graph(function, args, kwargs, x)
            if by_graph or not isinstance(output, torch.Tensor) or not output.requires_grad:
                return output
            before = self._count()
            found = self._seen(function, args, kwargs, output)
            if self.is_traced:
                if found is output and self._count() == before:
                    self._stray_in_graph(function, args, kwargs, output)
                self.refresh_followed()
            return found

    def _seen(self, function: Any, args: Any, kwargs: Any, output: torch.Tensor) -> Any:
        """What a function made of what is followed, with a probe behind it if that is a use."""
        if packs_with() is not self.saving:
            if self.lookups is not None:
                self.lookups.miss(function, args, kwargs, output, followed=False)
            return output  # a checkpoint inside of the forward runs its part again without this mode
        if function in SUMS and kwargs:
            args, kwargs = summed(args, kwargs)
        if self.lookups is not None:
            masked = self.lookups.mask(function, args, kwargs, output)
            if masked is not None:
                return masked
            self.lookups.follow(function, args, kwargs, output)
        if function in JOINS:
            parts = tuple(args[0] if args else kwargs["tensors"])
            if any([self._places(x, "bias") for x in parts]):  # noqa: C419
                self.joined.append((output, _version(output), parts))
                return output
        if function in CASTS:
            self._follow(args[0], output)
            return output
        if self.made and torch.is_grad_enabled():  # a weight that is renewed is none that is used
            with torch.no_grad():
                self._follow_made(function, args, kwargs, output)
        if args and keeps_order(function, args):
            self._view(args[0], output)
        if self.products and turns(function, args, kwargs):
            found = [p for p in self.products if p.tensor is args[0]]
            self.products += [p.turned(output) for p in found]
            if found:
                return output
        sums = function in SUMS and not kwargs
        for product in self._met(args, kwargs) if self.products else ():
            bias = args[args[0] is product.tensor] if sums and function in ADDITIONS else None
            if product.place in self._places(bias, product.role_of_bias()):
                self._note_call(product.tensor, product.x)
                sum_of = {"input": product.x, "bias": bias}
                return self.around.meet([product.place], F.linear, sum_of, output, None, product.axes)
            self.around.stray(product.place, output)
        if sums:
            self._follow_shifted(function, args, output)
            return output if self.lookups is None else self.lookups.meet(function, args, output)
        if function is torch.einsum:
            return self._meet_einsum(*operands_of(args), output)
        if function is torch.tensordot:
            as_einsum = tensordot_as_einsum(args, kwargs)
            return output if as_einsum is None else self._meet_einsum(*as_einsum, output)
        names = ARGUMENTS.get(function)
        if names is None:
            return output
        given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        left, axes = self._is_left(function, args, kwargs), None
        if left:
            given = {"input": args[1], "weight": args[0]}
            axes = behind(args[1].ndim)
        if self._is_weight(given.get("input")):  # the product of two weights is no layer's
            return output
        turned = function in PRODUCTS and not left
        places = self._places(given.get("weight"), "transpose" if turned else "weight")
        if function is T.__getitem__:
            given["input"] = rows_of(*args) if places else None
            if given["input"] is None:
                return output
        bias = given.get("bias")
        if bias is not None:  # another bias than the layer's is no coordinate of its input
            beside = self._places(bias, "bias")
            places = [p for p in places if not self.around.has_bias(p) or p in beside]
        for place in places:
            if self.around.awaits_bias(place, given):
                self.products.append(_Product(output, place, given["input"], axes))
        if function in (F.linear, *PRODUCTS):
            tables = any([self.around.is_table(place) for place in places])  # noqa: C419
            opposite = self._opposite(given.get("weight"), turned) if tables or not places else []
            plain = "alpha" not in given and "beta" not in given
            if opposite and plain:
                self._note_call(output, given["input"])
                return self.around.meet_transpose(opposite, given["input"], output, axes)
            mixed = [] if places else self._tables(given.get("weight"), turned)
            if mixed and plain:
                return self.around.meet_mixtures(mixed, given["input"], output, axes)
        if not places:
            return self._meet_made(function, given, output)
        self._note_call(output, given["input"])
        return self.around.meet(places, function, given, output, None, axes)

    def _attend(self, given: Mapping[str, Any]) -> Any:
        """What attention by its function returns, if some of its weights are layers'; else None."""
        if packs_with() is not self.saving:  # a checkpoint's second run will be torch's
            return None
        with self.looking():
            ours = [bool(self._places(x, "weight")) for x in attention.weights_of(given)]
            if not any(ours) or not attention.can_be_written_out(given):
                return None
            biases = self._biases(given["in_proj_bias"])

        def linear(*args: Any) -> Any:
            return self.__torch_function__(F.linear, (), args)

        return attention.written_out(given, biases, linear)

    def _with_mask_of_each(self, lookups: Lookups, args: Any, kwargs: Any) -> Any:
        """An attention's arguments: a mask that was looked up, which is added, for each score."""
        with self.looking():
            given, mask, shape = mask_and_scores(args, kwargs)
            if not lookups.has(mask):
                return args, kwargs
            scores = mask.new_zeros(()).expand(shape)
        return (), given | {"attn_mask": self.__torch_function__(torch.add, (), (scores, mask))}

    def _of_each(self, lookups: Lookups, found: Any, like: torch.Tensor) -> Any:
        """What was looked up for each number of what is changed in place: that is not made anew."""
        with self.looking():
            if not lookups.has(found) or found.numel() == like.numel():
                return found
            zeros = like.new_zeros(()).expand(like.shape)
        return self.__torch_function__(torch.add, (), (zeros, found))

    def _biases(self, bias: Any) -> Any:
        """Of q, k and v, in one tensor: those of layers where it was joined of such."""
        if bias is None:
            return None, None, None
        biases = bias.chunk(3)
        for joined, version, parts in self.joined:
            alike = joined is bias and [x.shape for x in parts] == [x.shape for x in biases]
            if alike and version == _version(bias):
                return parts
        return biases

    def _meet_einsum(self, equation: Any, operands: Sequence[Any], output: torch.Tensor) -> Any:
        weights = [self._is_weight(operand) or self._is_made(operand) for operand in operands]
        if sum(weights) != 1 or len(weights) != 2:
            return output
        place = weights.index(True)
        weight, x = operands[place], operands[1 - place]
        found = rows_of_call(equation, place, weight, x)
        if found is None:
            return output
        turned, axes = found.halves.turned, found.axes
        places = [
            p
            for p in self._places(weight, "transpose" if turned else "weight")
            if self.around.fits(p, weight.shape, found)
        ]
        if not places and weight.ndim == 2:
            opposite, mixed = self._opposite(weight, turned), self._tables(weight, turned)
            if opposite:
                self._note_call(output, x)
                return self.around.meet_transpose(opposite, x, output, axes)
            if mixed:
                return self.around.meet_mixtures(mixed, x, output, axes)
        given = {"input": x, "bias": None}
        for p in places:
            if self.around.awaits_bias(p, given):
                self.products.append(_Product(output, p, x, axes))
        if not places and axes.are_last() and not found.halves.order:
            function: Any = torch.matmul if turned else F.linear
            return self._meet_made(function, given | {"weight": weight}, output)
        if not places:
            return output
        self._note_call(output, x)
        return self.around.meet(places, F.linear, given, output, None, axes)

    def _is_left(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Whether a layer's weight is the left factor of a product, and the right one has rows."""
        if function not in PRODUCTS or function in ADDED or kwargs or len(args) != 2:
            return False
        weight, x = args
        ours = self._places(weight, "weight") or self._places(weight, "transpose")
        return isinstance(x, torch.Tensor) and bool(ours)

    def _note_call(self, output: torch.Tensor, x: Any) -> None:
        if self.before:
            self.calls[output.grad_fn] = x

    def settle(self, output: Any) -> None:
        """The forward has returned `output`, and has left what it left on its modules."""
        if not self.before:
            return
        with torch._C.DisableTorchFunction():  # other modes are to see none of this
            weights = {node_of(made.weight): made.place for made in self.made}
            ours = weights.keys() | {node_of(made.tensor) for made in self.made}
            modules = {site.module for site in self.around.sites}
            held = [x for module in modules for x in tensors_in(vars(module), set())]
            kept = [node_of(x) for x in held if x.requires_grad]
            starts = [
                *map(node_of, tensors_in(output, set())),
                *(node for node in kept if node not in ours),
            ]
            reached = reached_from(starts, weights, self.calls, self.began)
        missed = {place for node, place in weights.items() if node in reached}
        for place, before in self.before.items():
            self.around.settle(place, before, place in missed)

    def _count(self) -> int:
        """Of what is known by now, and followed."""
        return len(self.known) + len(self.made) + len(self.products)

    def _stray_in_graph(self, function: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        """What nobody understood made this of a child's weight or bias, unless it is a view of that.

        Of functions that no graph has, autograd tells more, and `UseCounter` counts them.
        """
        if function in CASTS or function in SHAPED_LIKE:
            return
        for x in tensors_given(args, kwargs):
            base = x if x._base is None else x._base
            if output is x or output._base is base:
                return
            for known in self.known:
                used = known.tensor is x or known.tensor is base
                joined = known.role == "bias" and function in JOINS  # see `_biases`
                if not used or joined or self.around.own[known.place]:
                    continue
                if not self.around.is_inside(known.place):
                    self.around.stray(known.place)

    def _follows(self, args: Any, kwargs: Any) -> bool:
        """Whether an argument is followed, or a view of what is: few are, in any forward."""
        moved = [] if self.lookups is None else self.lookups.moved
        count = self._count() + len(moved)
        if self._followed[0] != count:
            tensors = [one.tensor for some in (self.known, self.made, self.products) for one in some]
            self._followed = count, {id(x) for x in (*tensors, *(one.output() for one in moved))}
        ids = self._followed[1]
        looked_up = [] if self.lookups is None else [id(x) for x in self.lookups.outputs()]
        with torch._C.DisableTorchFunction():  # other modes would be asked for each base
            for x in tensors_given(args, kwargs):
                if id(x) in ids or id(x) in looked_up or id(x._base) in ids:
                    return True
        return False

    def _follows_in_graph(self, args: Any, kwargs: Any) -> bool:
        """`_follows` where torch.compile traces, which takes a millisecond for a few lines of Python."""
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, torch.Tensor):
                if self._is_followed_in_graph(x):
                    return True
            elif isinstance(x, _LISTS) and not is_data(x) and self._follows_in_graph(x, {}):
                return True
        return False

    def _is_followed_in_graph(self, x: torch.Tensor) -> bool:
        """Whether it is followed, or a view of what is: modes are not asked for x.T."""
        parameters, others = self._followed_in_graph
        if isinstance(x, nn.Parameter):  # loops, of which torch.compile traces less than of `any`
            for one in parameters:  # noqa: SIM110
                if one is x:
                    return True
            return False
        for one in others:
            if one is x:
                return True
        base = x._base
        if base is not None:
            for one in parameters if isinstance(base, nn.Parameter) else others:
                if one is base:
                    return True
        return False

    def refresh_followed(self) -> None:
        """Look for what is known by now in the graph that torch.compile traces, and for its lookups."""
        followed = [one.tensor for some in (self.known, self.made, self.products) for one in some]
        if self.lookups is not None:
            followed += [one.found for one in self.lookups.in_graph]
        parameters: list[torch.Tensor] = [x for x in followed if isinstance(x, nn.Parameter)]
        others = [x for x in followed if not isinstance(x, nn.Parameter)]
        self._followed_in_graph = parameters, others

    def _ours(self, args: Any) -> torch.Tensor | None:
        """A function's first argument, where it is known, made of what is or a view, and may be changed.

        Without gradients its values change, and it stays the same function of the weight.
        """
        if not args or not isinstance(args[0], torch.Tensor):
            return None
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        count = len(self.known) + len(self.made)
        if self._ids[0] != count:
            tensors = [known.tensor for known in self.known] + [made.tensor for made in self.made]
            self._ids = count, {id(root_of(x)) for x in tensors}
        found: torch.Tensor = args[0]
        return found if id(root_of(found)) in self._ids[1] else None

    def _is_ours(self, x: torch.Tensor) -> bool:
        """Whether it is known, made of what is or a view, where torch.compile traces."""
        root = root_of(x)
        return any([root_of(one.tensor) is root for some in (self.known, self.made) for one in some])  # noqa: C419

    def _changed(self, function: Any, args: Any, kwargs: Any) -> None:
        """A copy of something that is known was changed in place: it is that no more, nor are views.

        A bias stays one where numbers took the place of some entries, as in Swin V2.
        """
        x, self._ids, self._followed = args[0], (-1, set()), (-1, set())
        root, role = root_of(x), "bias" if _writes_numbers(function, args, kwargs) else ""
        gone = [k for k in self.known if k.role != role and root_of(k.tensor) is root]
        self.known = [k for k in self.known if k.role == role or root_of(k.tensor) is not root]
        before = [made for made in self.made if made.tensor is x]
        self.made = [made for made in self.made if root_of(made.tensor) is not root]
        for made in before[-1:]:
            with torch.no_grad():
                scale = scale_of(function, args, kwargs, 0, made)
            if scale is not None:
                self.made.append(made.after(scale, x))
        if self.is_traced:
            followed = [made.place for made in self.made if made.tensor is x]
            missed = [one.place for one in gone if one.role != "bias" and one.place not in followed]
            for place in missed:
                if not self.around.is_inside(place):
                    self.around.stray(place)

    def _follow_made(self, function: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        found = []
        if function in JOINS and args and len(args[0]) == 1:  # as einops joins what it packs
            function, args, kwargs = T.view_as, (args[0][0], args[0][0]), {}
        for made in self.made:
            at = [i for i, x in enumerate(args) if x is made.tensor]
            if not at:
                continue
            scale = scale_of(function, args, kwargs, at[0], made)
            if scale is not None:
                found.append(made.after(scale, output))
        self.made += found

    def _follow_shifted(self, function: Any, args: Any, output: torch.Tensor) -> None:
        """A norm's scale and a number, such as 1 + weight: it has the same derivative."""
        for place, x in enumerate(args):
            if is_subtracted(function, place) or not isinstance(args[1 - place], int | float):
                continue
            if any([self.around.is_norm(one) for one in self._places(x, "weight")]):  # noqa: C419
                self._view(x, output)

    def _is_made(self, x: Any) -> bool:
        """Whether it is made of a layer's weight, or a transpose of that."""
        return any([x is own.tensor or is_transpose(x, own.tensor) for own in self.made])  # noqa: C419

    def _meet_made(self, function: Any, given: Mapping[str, Any], output: Any) -> Any:
        weight = given.get("weight")
        for made in self.made:
            alike = made.tensor is weight
            if made.turned != (function in PRODUCTS):
                alike = is_transpose(weight, made.tensor)
            if alike and made.tensor.shape == made.weight.shape:
                beside = self._places(given.get("bias"), "bias")
                if self.around.has_bias(made.place) and made.place not in beside:
                    return output  # another bias
                self._note_call(output, given["input"])
                return self.around.meet([made.place], function, given, output, made.scale)
        return output

    def _is_weight(self, x: Any) -> bool:
        """Whether it is a layer's, or a view of one."""
        return isinstance(x, torch.Tensor) and any(
            [known.tensor is x or known.tensor is x._base for known in self.known]  # noqa: C419
        )

    def _opposite(self, weight: Any, turned: bool) -> list[int]:
        """The layers whose transpose a product has. For a table that is one with a row an output.

        Args:
            turned: whether the product takes the weight as (in, out).
        """
        roles = ("transpose", "weight") if turned else ("weight", "transpose")
        tables, others = (self._places(weight, role) for role in roles)
        found = [p for p in tables if self.around.is_table(p)]
        return found or [p for p in others if not self.around.is_table(p)]

    def _tables(self, weight: Any, turned: bool) -> list[int]:
        """The tables of whose rows a product is made: x W, and not x Wᵀ as in a head."""
        found = self._places(weight, "weight" if turned else "transpose")
        return [place for place in found if self.around.is_table(place)]

    def _places(self, tensor: Any, role: str) -> list[int]:
        return [known.place for known in self._found(tensor, role)]

    def _found(self, tensor: Any, role: str) -> list[_Known]:
        """What a tensor is in this role."""
        turned = {"weight": "transpose", "transpose": "weight"}.get(role)
        return [
            known if known.tensor is tensor else known._replace(role=role, shape=known.shape[::-1])
            for known in self.known
            if (known.tensor is tensor and known.acts_as(role))
            or (known.role == turned and is_transpose(tensor, known.tensor))
        ]

    def _view(self, tensor: Any, output: torch.Tensor) -> None:
        """The same numbers in the same order."""
        if output is not tensor:
            self.known += [k._replace(tensor=output) for k in self.known if k.tensor is tensor]

    def _met(self, args: Any, kwargs: Any) -> list[_Product]:
        """The products among a function's arguments, or in lists of them."""
        given = [x if isinstance(x, list | tuple) else (x,) for x in (*args, *kwargs.values())]
        return [p for p in self.products if any([p.tensor is x for some in given for x in some])]  # noqa: C419

    def _follow(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """A cast of something that is known."""
        if output is tensor:
            return
        self.products += [p._replace(tensor=output) for p in self.products if p.tensor is tensor]
        self.made += [m.after(1.0, output) for m in self.made if m.tensor is tensor]
        turned = [k for role in ("weight", "transpose") for k in self._found(tensor, role)]
        self.known += [k._replace(tensor=output) for k in turned if k.tensor is not tensor]
        self._view(tensor, output)


def _product_with(table: Layer, spec: LayerSpec) -> LayerSpec:
    """What a product with a table, or with its transpose, is like."""
    return LayerSpec("dense", diagonal=table.diagonal, max_rows=spec.max_rows)


def _writes_numbers(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function puts what no gradient goes through into its first argument."""
    written = (*args[1:], *kwargs.values())
    return function in _WRITES and not any([isinstance(x, T) and x.requires_grad for x in written])  # noqa: C419


def _version(x: torch.Tensor) -> int:
    """How often it was changed in place, which a graph does not tell."""
    return 0 if torch.compiler.is_compiling() else x._version
