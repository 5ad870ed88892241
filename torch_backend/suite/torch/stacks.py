"""Stacks of matrices, one for each expert or head: (n, out, in) or (n, in, out).

No module computes with one of them by itself. While the module that has the stack runs, a torch
function mode watches for products with it, or with a matrix of it, and puts a probe behind each, which
sums Σ a aᵀ and Σ g gᵀ for each matrix. They arrive as gradients of *slots* with the stack's first axis:
what the module does to take a matrix out of the stack is done to the slots, so that autograd takes them
home. Inputs get a coordinate 1, whose square counts each matrix's own rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from suite.core.ekfac import grouped_second_moment_in_basis, second_moment_in_basis
from suite.core.statistics import grouped_second_moment_sum, second_moment_sum
from suite.torch.calls import are_transposes
from suite.torch.capture import LayerCapture, dense
from suite.torch.clock import CaptureClock
from suite.torch.derivatives import Noted, is_awaited, is_recorded
from suite.torch.einsum import labels_of_call, operands_of, sides_of
from suite.torch.hooks import (
    Mode,
    ModeAround,
    in_backward,
    in_traced_graph,
    packs_with,
    traceable,
    when_reached,
    without_modes,
)
from suite.torch.operations import ADDED_STACKS, CASTS, LOOKS, MATRIX, T, ends_of_groups, turns
from suite.torch.probe import passed_on
from suite.torch.rows import Bases, counts_like
from suite.torch.runs import Run

_TURN_MATRIX = {T.T.__get__, T.t, torch.t}
_UNBIND = {T.unbind, torch.unbind}  # also what a loop over a tensor calls


class _Watched(NamedTuple):
    """A stack or a matrix of it, or a view or a cast, and where its sums go."""

    tensor: T  # kept alive: it is known by its identity
    A: T  # slots: (n, in + 1, in + 1) or (n, in + 1), or without n
    G: T
    counts: T
    products: T | None  # (n, out, in) or (out, in), where second moments in the eigenbases are wanted
    bases: Bases  # (n, in, in) and (n, out, out), or without n
    turned: bool  # whether it is (..., in, out)
    joined: bool  # whether all matrices are one of more outputs, which come matrix by matrix
    diagonal: tuple[bool, bool]
    capture: LayerCapture

    @property
    def clock(self) -> CaptureClock | None:
        """Says when statistics are taken, where not in every backward pass."""
        return self.capture.clock if self.capture.clock.sampled else None

    def taken(self, index: Any) -> _Watched:
        """What belongs to some of the matrices, or to one."""
        products, bases = self.products, self.bases
        if products is not None:
            products = products[index]
            A, G = (None if x is None else x[index] for x in bases)
            bases = A, G
        return self._replace(A=self.A[index], G=self.G[index], products=products, bases=bases)


class StackCapture(ModeAround):
    """`_Watching` around the forward of a module with stacks of its own."""

    def __init__(self, module: nn.Module, captures: list[LayerCapture]) -> None:
        super().__init__(module)
        self.captures = captures

    def make_mode(self) -> _Watching | None:
        wanted = [capture for capture in self.captures if capture.wanted(0)]
        if self.module() is None or not wanted:
            return None
        watched = []
        for capture in wanted:
            if not torch.compiler.is_compiling() and not in_backward():
                capture.forget_what_was_discarded()
            layer, site = capture.layer, capture.layer.sites[0]
            stack = site.held(site.weight_name)
            products = None if capture.bases is None else capture.products
            slots = capture.A, capture.G, capture.counts, products, capture.bases or (None, None)
            joined = layer.blocks < len(stack)
            turned = layer.layout == "turned"
            watched.append(_Watched(stack, *slots, turned, joined, layer.diagonal, capture))
        return _Watching(watched)


class _Watching(Mode):
    def __init__(self, watched: list[_Watched]) -> None:
        super().__init__()
        self.watched, self.saving = watched, packs_with()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function, kwargs = traceable(function, args), kwargs or {}
        if self.looks_away():
            return function(*args, **kwargs)
        output = function(*args, **kwargs)
        if in_traced_graph() or function in LOOKS:
            return output
        given = [x for some in (*args, *kwargs.values()) for x in _listed(some)]
        if self.is_traced:
            self._turn(given)
        known = [w for w in self.watched if any([x is w.tensor for x in given])]  # noqa: C419 (torch.compile)
        if not known:
            return output
        with self.looking():
            return self._seen(function, args, kwargs, known, output)

    def _turn(self, given: Sequence[Any]) -> None:
        """Watch what is x.mT of a stack, for which torch.compile does not ask modes."""
        for x in given:
            if any([x is w.tensor for w in self.watched]):  # noqa: C419 (torch.compile)
                continue
            turned = [w for w in self.watched if are_transposes(x, w.tensor) and not w.joined]
            self.watched += [w._replace(tensor=x, turned=not w.turned) for w in turned]

    def _seen(
        self, function: Any, args: Any, kwargs: Any, known: Sequence[_Watched], output: Any
    ) -> Any:
        """What a function made of stacks, with a probe behind it if it is a product."""
        made = [x for x in _listed(output) if isinstance(x, T)]
        if not any([x.requires_grad and x.numel() for x in made]):  # noqa: C419 (torch.compile)
            return output
        if not torch.compiler.is_compiling() and made[0].is_leaf:
            return output
        for watched in known:
            if packs_with() is not self.saving:
                # A checkpoint inside of the forward runs its part again without this mode.
                self._missed(watched.capture, output)
                continue
            views = _views(function, args, kwargs, watched, output)
            if views:
                self.watched += [view for view in views if view.tensor is not watched.tensor]
                continue
            rows = _rows(function, args, kwargs, watched)
            if rows is not None:
                output = _probed(output, rows, watched)
            else:
                self._missed(watched.capture, output)
        return output

    def _missed(self, capture: LayerCapture, output: Any) -> None:
        if capture.clock.discovering:
            strays = capture.clock.strays
            when_reached(_listed(output), functools.partial(strays.add, capture.layer.name))


def _listed(x: Any) -> Sequence[Any]:
    return x if isinstance(x, list | tuple) else (x,)


def _views(function: Any, args: Any, kwargs: Any, watched: _Watched, output: Any) -> list[_Watched]:
    """What are a stack's matrices still, or some of them; nothing: it is not."""
    if not args or args[0] is not watched.tensor:
        return []
    ndim, apart = watched.tensor.ndim, watched.tensor.ndim > 2 and not watched.joined
    if function in _UNBIND and apart and not kwargs and args[1:] in ((), (0,)):
        return [watched._replace(tensor=one).taken(i) for i, one in enumerate(output)]
    if not isinstance(output, T):
        return []
    if function in CASTS:
        return [watched._replace(tensor=output)]
    turned = turns(function, args, kwargs) or are_transposes(output, watched.tensor)
    if turned or (function in _TURN_MATRIX and ndim == 2):
        return [watched._replace(tensor=output, turned=not watched.turned)]
    if function is T.__getitem__ and apart and not isinstance(args[1], tuple):
        return [watched._replace(tensor=output).taken(args[1])]
    return []


class _Rows(NamedTuple):
    """How a product's input and output are rows, (matrices, rows, features) or (rows, features)."""

    x: T
    of_input: Any  # x -> rows
    of_output: Any  # y -> rows
    ends: T | None = None  # of groups of rows, each of its own matrix


def _rows(function: Any, args: Any, kwargs: Any, watched: _Watched) -> _Rows | None:
    """The rows of a product with a stack or a matrix; None: it is no product that is understood."""
    if function is torch.einsum:
        return _rows_of_einsum(args, watched)
    if watched.joined:
        return None
    if function is F.linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        linear = given["weight"] is watched.tensor and not watched.turned and watched.tensor.ndim == 2
        return _Rows(given["input"], _flat, _flat) if linear else None
    ends = ends_of_groups(function, args, kwargs)
    if ends is not None:
        grouped = args[1] is watched.tensor and watched.turned and args[0].ndim == 2
        return _Rows(args[0], _same, _same, ends) if grouped and watched.tensor.ndim == 3 else None
    if function in ADDED_STACKS and not kwargs and args[0] is not watched.tensor:
        function, args = torch.bmm, args[1:]
    if function not in MATRIX or kwargs or len(args) != 2 or function is T.__rmatmul__:
        return None
    place = int(args[1] is watched.tensor)
    x = args[1 - place]
    if not isinstance(x, T) or x is watched.tensor or watched.turned != bool(place) or x.ndim < 2:
        return None
    turn = _same if place else _turned
    if watched.tensor.ndim == 2:
        return _Rows(x, lambda x: _flat(turn(x)), lambda y: _flat(turn(y)))
    matrices = watched.tensor.shape[:-2]
    fits = all([n in (1, m) for n, m in zip(x.shape[-3::-1], matrices[::-1], strict=False)])  # noqa: C419
    if math.prod(matrices) > 1 and (not fits or (len(matrices) > 1 and x.ndim > watched.tensor.ndim)):
        return None
    by_matrix = functools.partial(_by_matrix, matrices=matrices)
    return _Rows(x, lambda x: by_matrix(turn(x)), lambda y: by_matrix(turn(y)))


def _rows_of_einsum(args: Any, watched: _Watched) -> _Rows | None:
    """Of a product of two operands."""
    equation, operands = operands_of(args)
    if len(operands) != 2 or watched.tensor.ndim != 3 or operands[0] is operands[1]:
        return None
    place = int(operands[1] is watched.tensor)
    x = operands[1 - place]
    labels = labels_of_call(equation, place, watched.tensor, x)
    sides = None if labels is None else sides_of(labels)
    if labels is None or sides is None:
        return None
    own, other, out = labels
    matrix, first, second = own[0], own[1], own[2]
    d_out, d_in = (second, first) if watched.turned else (first, second)
    known = ("",) if watched.joined else ("", matrix)
    if sides.into != d_in or sides.groups not in known:
        return None
    rows = [label for label in other if label not in own]
    count = len(watched.tensor)

    def of_input(x: T) -> T:
        if watched.joined:
            return _flat(_ordered(x, other, [*rows, d_in]))
        if matrix not in other:
            x = x.expand(count, *x.shape)
        labels = other if matrix in other else matrix + other
        return _ordered(x, labels, [matrix, *rows, d_in]).reshape(count, -1, x.shape[labels.index(d_in)])

    def of_output(y: T) -> T:
        if watched.joined:
            return _flat(_ordered(y, out, [*rows, matrix, d_out]).flatten(-2))
        return _ordered(y, out, [matrix, *rows, d_out]).reshape(count, -1, y.shape[out.index(d_out)])

    return _Rows(x, of_input, of_output)


def _ordered(x: T, labels: str, order: list[str]) -> T:
    """Its axes, of these labels, in this order."""
    return x.permute([labels.index(label) for label in order])


def _same(x: T) -> T:
    return x


def _turned(x: T) -> T:
    return x.mT


def _flat(x: T) -> T:
    """(..., features) -> (rows, features)."""
    return x.reshape(-1, x.shape[-1])


def _by_matrix(x: T, matrices: torch.Size) -> T:
    """(..., *matrices, rows, features), or broadcast to that -> (matrices, rows, features)."""
    count = math.prod(matrices)
    if count > 1:
        front = x.shape[: max(x.ndim - 2 - len(matrices), 0)]
        x = x.expand(*front, *matrices, *x.shape[-2:])
        x = x.movedim(-3, 0) if len(matrices) == 1 else x
    return x.reshape(count, -1, x.shape[-1])


def _probed(output: T, rows: _Rows, watched: _Watched) -> T:
    slots = watched.A, watched.G, watched.counts, watched.products
    apply = _StackProbe.apply if torch.compiler.is_compiling() else _StackProbeOfDuals.apply
    recorded = None
    if rows.x.requires_grad and not torch.compiler.is_compiling():
        recorded = watched.capture
    run = watched.capture.clock.ran(watched.capture, False, in_backward(), False)
    told = None if torch.compiler.is_compiling() else watched.capture.clock
    given = rows, watched.diagonal, watched.clock, rows.ends, *watched.bases, recorded, run, told
    with without_modes():
        probed: T = apply(output, dense(rows.x), *slots, *given)
    return probed


class _StackProbe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: T,
        x: T,
        A: T,
        G: T,
        counts: T,
        products: T | None,
        rows: _Rows,
        diagonal: tuple[bool, bool],
        clock: CaptureClock | None,
        ends: T | None,
        vectors_A: T | None,
        vectors_G: T | None,
        recorded: LayerCapture | None,
        run: Run | None,
        told: CaptureClock | None,
    ) -> T:
        """
        Args:
            recorded: whose uses in derivatives are missed, if there are any.
            told: of backward passes.
        """
        ctx.save_for_backward(x, ends, vectors_A, vectors_G)
        ctx.of_input, ctx.of_output = rows.of_input, rows.of_output
        ctx.diagonal, ctx.clock, ctx.recorded, ctx.run, ctx.told = diagonal, clock, recorded, run, told
        ctx.dtype = G.dtype
        ctx.shapes = A.shape, G.shape, None if products is None else products.shape
        return passed_on(y)

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        x, ends, *bases = ctx.saved_tensors
        on, waits = gradient, ctx.clock is None or ctx.clock.sampling
        if ctx.recorded is not None and is_recorded() and not ctx.recorded.clock.pausing:
            capture = ctx.recorded
            missed = functools.partial(capture.clock.missed.add, capture.layer.name)
            on = Noted.apply(gradient, capture.G, missed)
            waits = waits and is_awaited(capture.G)
        waits = waits and (ctx.run is None or ctx.run.is_awaited())
        if not ctx.needs_input_grad[3] or not waits:
            return on, *(None,) * 14
        if ctx.run is None and ctx.told is not None:
            ctx.told.passes()  # a run says so itself
        counted = ctx.run is None or ctx.run.reached()
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            inputs = ctx.of_input(x.detach().to(ctx.dtype))
            outputs = ctx.of_output(gradient.to(ctx.dtype))
            diagonal_A, diagonal_G = ctx.diagonal
            products = None
            vectors = [None if x is None else x.reshape(-1, *x.shape[-2:]) for x in bases]
            if ends is not None:
                A = grouped_second_moment_sum(inputs, ends, diagonal=diagonal_A, bias=True)
                G = grouped_second_moment_sum(outputs, ends, diagonal=diagonal_G)
                if ctx.needs_input_grad[5]:
                    products = grouped_second_moment_in_basis(inputs, outputs, ends, *vectors)
            else:
                inputs, outputs = (z if z.ndim == 3 else z[None] for z in (inputs, outputs))
                A = second_moment_sum(inputs, diagonal=diagonal_A, bias=True)
                G = second_moment_sum(outputs, diagonal=diagonal_G)
                if ctx.needs_input_grad[5]:
                    products = second_moment_in_basis(inputs, outputs, *vectors)
            found = (A, G, products)
            sums = [
                x if x is None else x.reshape(shape) for x, shape in zip(found, ctx.shapes, strict=True)
            ]
            positions = math.prod(outputs.shape[:-1]) if counted else 0
            counts = counts_like(outputs, outputs.shape[-2], positions)
        return on, None, *sums[:2], counts, sums[2], *(None,) * 9


class _StackProbeOfDuals(_StackProbe):
    """With a derivative forward, of which torch.compile wants none."""

    @staticmethod
    def jvp(ctx: Any, y: T, *rest: Any) -> T:
        return y.view_as(y)
