"""Parameters that a module uses in its own forward: scales, shifts, tokens, positions, matrices.

No layer computes with them, so no hook sees their products. While such a module runs, a torch function
mode watches for the operations below with one of its parameters, or a view of one, as an operand and
puts a probe behind each. What is summed are the squares of every row's gradient by the parameter: the
diagonal of its Fisher block. The sums arrive as the gradient of a *slot* of the parameter's shape; what
the module does to view the parameter is done to the slot, so that autograd takes them home.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from suite.core.statistics import complex_second_moment_sum, elementwise_second_moment_sum
from suite.torch.calls import are_transposes
from suite.torch.copies import Copies
from suite.torch.derivatives import Noted, follow, is_awaited, is_recorded
from suite.torch.einsum import Labels, as_einsum, contraction_of_call, operands_of, rows_of_call
from suite.torch.entrywise import derivative_of
from suite.torch.gates import Member, Origin, Products
from suite.torch.hooks import (
    Mode,
    Stacks,
    in_backward,
    in_traced_graph,
    is_batched,
    is_within_functions,
    on_transformed,
    packs_with,
    raised,
    root_of,
    tensors_given,
    tensors_in,
    traceable,
    when_reached,
    without_modes,
)
from suite.torch.looked_up import UnlessBroadcast
from suite.torch.operations import (
    ADDED,
    ADDED_ENTRYWISE,
    ARITHMETIC,
    CASTS,
    CHOICES,
    COPIES,
    EXTREMES,
    LERP,
    LISTS,
    LOOKS,
    MATRIX,
    MAXIMA,
    PRELU,
    QUOTIENTS,
    SHIFTED,
    SPLITS,
    SUMS,
    TAKES,
    TIMES,
    VIEWS,
    WRITES,
    T,
    changes_in_graph,
    ends_of_groups,
    is_subtracted,
    mask_and_scores,
    turns_over,
    viewed,
)
from suite.torch.probe import passed_on
from suite.torch.resized import resized_slot
from suite.torch.rows import Axes, counts_like
from suite.torch.runs import Run

# Kinds of uses that are products of rows: the axes of the output that have the features.
_FEATURES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("linear", "right", "grouped"), (-1,)),
    "left": (-2,),
    "contraction": (),  # see `_How.labels`
}
_OF_LOOKUP = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


class Watched(NamedTuple):
    """A parameter, or a view of one, and where its sums go."""

    tensor: T  # kept alive: it is known by its identity
    slot: T  # of the same shape; complex: of real and imaginary parts
    ones: T  # (1, 1, 1), the slot of G
    counts: T  # (2,), the slot of the counts
    clock: Any = None  # says when statistics are taken, where not in every backward pass
    strays: Any = None  # a set, to put `name` into when a use is not understood
    name: str = ""
    recorded: Any = None  # the clock that knows of backward passes that are recorded
    capture: Any = None  # the LayerCapture whose slots these are
    turned: bool = False  # a matrix's transpose
    widened: bool = False  # an entry of the parameter is several of the tensor's
    reduce: bool = False  # a row is all of an example, of sums and products entry by entry
    origin: Origin | None = None  # None: it is one itself

    def of(self) -> Origin:
        """What it is a function of, entry by entry."""
        return self.origin or Origin(self.tensor, self.slot, 1)

    def transposed(self, tensor: T) -> Watched:
        """Of a tensor that is this one's transpose."""
        return self._replace(tensor=tensor, slot=self.slot.mT, turned=not self.turned)

    def misses(self, output: T) -> None:
        """This is made of it in a way that is not understood."""
        if self.strays is not None:
            when_reached([output], functools.partial(self.strays.add, self.name))


class FreeParameters(Mode):
    """Puts a probe behind every use of the watched parameters that is understood."""

    def __init__(
        self,
        watched: list[Watched],
        constants: list[T],
        weights: Sequence[T] = (),
        inside: Sequence[Watched] = (),
        running_modes: Stacks | None = None,
    ) -> None:
        """
        Args:
            constants: the module's own buffers, and parameters that are not watched.
            weights: those of layers inside of it, which are no data either.
            inside: parameters of modules inside, which their own modes see while they run.
            running_modes: modes of modules around it and inside whose forwards run, the innermost last.
        """
        super().__init__()
        self.watched, self.constants = [*watched, *inside], list(constants)
        seen = [] if self.is_traced else self.watched
        self.captures = {id(one.tensor): one.capture for one in seen}
        self.inside = {id(one.tensor): one.name for one in inside}
        self.running_modes = running_modes
        self.found: set[str] = set()  # names of what it met that is of modules inside
        self.weights: set[int] = set()
        if self.is_traced:  # where a graph begins under other modes, torch.compile has no id of a tensor
            self.constants += weights
        else:
            self.weights = {id(x) for x in weights} - {id(x) for x in constants}
        # What is made of no tensors (masks, or numbers of each example), by id; or in a graph.
        self.fresh: dict[int, weakref.ref[T]] = {}
        self.traced: list[T] = []
        self._ids: set[int] | None = None  # of what is watched or constant; None: to be found
        self.products = Products()  # not of what is compiled, nor are copies
        self.copies = Copies()
        self.saving = packs_with()
        self.counted_in_graph: list[tuple[Any, bool]] = []  # by capture: which kind of uses

    def watches(self, capture: Any) -> bool:
        """Whether a layer's parameter is among those that it was made for."""
        return any(one is capture for one in self.captures.values())

    def take(self, mode: FreeParameters, output: Any) -> None:
        """Go on with what another mode watched and its forward returned."""
        returned = [x for x in tensors_in(output, set()) if id(x) not in self.captures]
        found = [w for w in mode.watched if any([w.tensor is x for x in returned])]  # noqa: C419 (faster)
        self.watched += found
        self.found.update(watched.name for watched in found)
        self.copies.take(mode.copies, output)
        self._ids = None

    def _is_seen_inside(self, x: Any) -> bool:
        """Whether a parameter of a module inside is used where another mode sees it."""
        for mode in reversed(self.running_modes.own() if self.running_modes is not None else []):
            if mode is self:
                break
            if id(x) in mode.captures:
                return True
        return False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function, kwargs = traceable(function, args), kwargs or {}
        if self.looks_away():
            return function(*args, **kwargs)
        if is_within_functions():
            return self._transformed(function, args, kwargs)
        if self.is_traced or function not in SUMS or "out" in kwargs:
            return self._called(function, args, kwargs)
        with self.looking():
            members = self.products.in_sum(args)
        total = self._called(function, args, kwargs)
        if members:
            with self.looking():
                self.products.join(members, total)
        return total

    def _called(self, function: Any, args: Any, kwargs: Any) -> Any:
        with self.looking():
            follows = self.is_traced or self._follows(args, kwargs)
        if not follows or in_traced_graph() or function in LOOKS:
            return function(*args, **kwargs)
        if packs_with() is not self.saving:
            # A checkpoint inside of the forward runs its part again without this mode.
            output = function(*args, **kwargs)
            for watched in [known for x in (*args, *kwargs.values()) for known in self._known(x)]:
                if isinstance(output, T) and output.requires_grad:
                    watched.misses(output)
            return output
        if function is F.linear and kwargs:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            args, kwargs = (given["input"], given["weight"], given.get("bias")), {}
        if function is torch.einsum:
            equation, operands = operands_of(args)
            args = (equation, *operands)
        if function is torch.broadcast_tensors and not kwargs:
            return self._broadcast(args)
        if function is F.scaled_dot_product_attention:
            args, kwargs = self._with_mask_of_each(args, kwargs)
        if function in CHOICES and not kwargs:
            args = self._with_choices_of_each(args)
        written: list[Watched] = []
        if function in WRITES and not kwargs:
            args, written = self._with_values_of_each(function, args)
        before, version = args, None
        with self.looking():
            if not kwargs and function in (T.mul_, T.__imul__) and self._known(args[1]):
                before = (args[0].detach().clone(), args[1])  # the product takes its place
            if self._may_change(args):
                version = args[0]._version
        output = function(*args, **kwargs)
        with self.looking():
            if (version is not None and args[0]._version != version) or (
                self.is_traced and changes_in_graph(function, args, output)
            ):
                self._changed(args[0], output)
            for watched in written:
                watched.misses(args[0] if self.is_traced else root_of(args[0]))
            output = self._seen(function, args, kwargs, before, output)
        self._ids = None  # of what is known now
        return output

    def _broadcast(self, args: Any) -> tuple[Any, ...]:
        """`torch.broadcast_tensors`: what is watched is expanded."""
        shape = torch.broadcast_shapes(*[x.shape for x in args])
        return tuple([x if x.shape == shape else self._called(T.expand, (x, shape), {}) for x in args])

    def _with_mask_of_each(self, args: Any, kwargs: Any) -> Any:
        """An attention's arguments: a mask that is watched, which is added, for each score."""
        with self.looking():
            given, mask, shape = mask_and_scores(args, kwargs)
            is_watched = bool(self._known(mask))
        if not is_watched:
            return args, kwargs
        return (), given | {"attn_mask": self._called(T.expand, (mask, shape), {})}

    def _with_values_of_each(self, function: Any, args: Any) -> tuple[Any, list[Watched]]:
        """Arguments of what writes: a value that is watched, for each row; and values that are missed.

        They are where nothing has rows, or what is written to may have to be computed to know its shape.
        """
        target, value = args[0], args[-1]
        with self.looking():
            known = self._known(value)
            if not known or self.is_traced or self._without_rows(target):
                return args, known
            there = target.detach() if function is T.copy_ else target.detach()[args[1]]
            extra = value.ndim - there.ndim  # axes of length 1 in front, which are left out
            if self._was_fresh(target) and there.numel() == value.numel():  # a weight, it may be
                return args, known
        if extra > 0:
            value = self._called(T.reshape, (value, value.shape[extra:]), {})
        return (*args[:-1], self._for_each(value, there.shape)), []

    def _with_choices_of_each(self, args: Any) -> Any:
        """Arguments of `torch.where`: what is watched, for each row that it is put in the place of."""
        with self.looking():
            known = [bool(self._known(x)) or self.copies.has(x) for x in args]
            rows = [
                isinstance(x, T) and x.is_floating_point() and not self._without_rows(x)
                for x in args
                if not self._was_fresh(x) and not self.copies.has(x)
            ]
            if not any(known) or not any(rows):
                return args
            shape = torch.broadcast_shapes(*[x.shape for x in args if isinstance(x, T)])
        return tuple([self._for_each(x, shape) if k else x for x, k in zip(args, known, strict=True)])

    def _for_each(self, value: T, shape: torch.Size) -> Any:
        """A value that is watched, of this shape; its copies are uses."""
        # In front of a value that is not for several rows is an axis for the one that it is for.
        whole = shape if shape != value.shape else (1, *shape)
        values = self._called(T.expand, (value, whole), {})
        with self.looking():
            return values[0] if len(whole) > len(shape) else values

    def _transformed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A function within one of torch.func's transforms, which take no probes."""
        output = function(*args, **kwargs)
        if self.is_traced:
            return output
        with self.looking():
            for watched in [known for x in (*args, *kwargs.values()) for known in self._known(x)]:
                if watched.strays is not None:
                    on_transformed(output, functools.partial(watched.strays.add, watched.name))
        return output

    def _follows(self, args: Any, kwargs: Any) -> bool:
        """Whether an argument is known, or a view of what is, or none has rows: few functions' are."""
        if self._ids is None:
            self._ids = {id(x) for x in self.constants}
            self._ids |= {
                id(x) for watched in self.watched for x in (watched.tensor, root_of(watched.tensor))
            }
            self._ids |= self.copies.ids()
        rows = False
        for x in tensors_given(args, kwargs):
            if id(x) in self._ids or id(x._base) in self._ids or id(x) in self.fresh:
                return True
            rows = rows or (x.ndim > 0 and id(x) not in self.weights)
        return not rows

    def _seen(self, function: Any, args: Any, kwargs: Any, before: Any, output: Any) -> Any:
        """What a function made of arguments, with a probe behind it if it is a use that is understood.

        Args:
            before: the arguments as they were.
        """
        function, args, kwargs = _of_first(function, args, kwargs)
        operands = [x for x in args if isinstance(x, T)]
        given = [*operands, *(x for x in kwargs.values() if isinstance(x, T))]
        if self.inside and any(x.requires_grad for x in tensors_in(output, set())):
            others = [x for x in tensors_given(args, kwargs) if id(x) in self.inside]
            self.found.update(self.inside[id(x)] for x in others if self._known(x))
        written = args[0] if function is T.__setitem__ else output
        if isinstance(output, T) and not output.requires_grad and self._is_fresh(args, kwargs):
            if torch.compiler.is_compiling():
                self.traced.append(output)
            else:
                self.fresh[id(output)] = weakref.ref(output)
        elif self._is_constant(function, args, kwargs, output):
            made = written if isinstance(written, tuple | list) else [written]
            self.constants += [x for x in made if isinstance(x, T)]
        elif any([written is x for x in operands]):  # noqa: C419
            self.constants = [x for x in self.constants if x is not written]
        if isinstance(output, tuple | list):
            self._seen_parts(function, args, kwargs, output)
        if not isinstance(output, T) or not output.requires_grad:
            return output
        self._seen_in_lists(function, args, kwargs, output)
        if not torch.compiler.is_compiling() and output.is_leaf:
            return output  # a view of a parameter in a compiled graph, whose own derivative autograd has
        in_place = any(output is operand for operand in args[:1])
        if in_place and function in VIEWS | CASTS:
            return output  # nothing to view or to cast
        copied: list[tuple[Any, ...]] = []
        copied_in_graph: list[Watched] = []
        uses = [(place, x, self._known(x)) for place, x in enumerate(args)]
        if in_place:  # what it was is no more
            self.watched = [x for x in self.watched if x.tensor is not output]
        for place, operand, known in uses:
            derivative = None
            if known and place == 0 and self._is_of_entries(given, output):
                derivative = derivative_of(function, args, kwargs, output)
            for watched in known:
                if function in VIEWS and place == 0:
                    slot, origin = viewed(function, args[1:], kwargs, watched.slot), watched.origin
                    if origin is not None:
                        origin = origin.viewed(functools.partial(_of, function, args[1:], kwargs))
                    turned = watched.turned != turns_over(function, args, kwargs)
                    made = watched._replace(tensor=output, slot=slot, turned=turned, origin=origin)
                    self.watched.append(made)
                elif place == 0 and self.is_traced and are_transposes(output, operand):
                    # By an operator, as graphs of torch 2.15 have them.
                    self.watched.append(watched.transposed(output))
                elif place == 0 and _is_taken(function, output):
                    slot = function(watched.slot, *args[1:], **kwargs)
                    self.watched.append(watched._replace(tensor=output, slot=slot, origin=None))
                elif function in CASTS and place == 0:
                    origin = None if self.is_traced else watched.of()
                    self.watched.append(watched._replace(tensor=output, origin=origin))
                elif function is F.interpolate and place == 0 and not (self.is_traced or watched.reduce):
                    slot = resized_slot(watched.slot, args[1:], kwargs)
                    made = watched._replace(tensor=output, slot=slot, widened=True, origin=None)
                    self.watched.append(made)
                elif derivative is not None:
                    derivative = derivative.to(watched.slot.dtype)
                    slot, origin = watched.slot * derivative.square(), self._times(watched, derivative)
                    self.watched.append(watched._replace(tensor=output, slot=slot, origin=origin))
                elif self._fits(function, args, kwargs, place, output):
                    # 1 + p has no rows before it meets x. The square of a factor goes into squares.
                    factor = _factor(function, before, place)
                    of_tensor = isinstance(factor, T) and factor.dtype.is_complex
                    if of_tensor or isinstance(factor, complex):
                        watched.misses(output)
                        continue
                    if isinstance(factor, T):
                        factor = factor.detach().to(watched.slot.dtype)
                    slot = (watched.slot * factor**2).expand(output.shape)
                    widened = watched.widened or output.numel() > watched.slot.numel()
                    same = output.shape == watched.slot.shape
                    origin = self._times(watched, factor) if same else None
                    made = watched._replace(tensor=output, slot=slot, widened=widened, origin=origin)
                    self.watched.append(made)
                else:
                    others = operands
                    if function is F.linear:
                        others = operands[:1]
                    elif function in SHIFTED:
                        others = operands[1:2] if place != 1 else operands[2:]
                        if place == 0:  # one of two factors has the rows
                            others = [x for x in operands[1:] if not self._without_rows(x)] or others
                    others = [x for x in others if x is not operand and x.requires_grad]
                    # A buffer may be data, and its rows those of a product; parameters are none.
                    met = not any([self._without_rows(x) for x in others])  # noqa: C419
                    met = met and sum([x is operand for x in args]) == 1
                    ends, probed, member = ends_of_groups(function, args, kwargs), None, None
                    if function in TIMES and len(known) == 1 and not in_place and not self.is_traced:
                        alike = output.dtype.is_complex == watched.slot.is_complex()
                        member = Member(watched.of(), output.shape) if alike else None
                    copies = not in_place and self._makes_copies(function, args, place)
                    unless = UnlessBroadcast(watched.clock) if copies else None
                    if met and (not kwargs or ends is not None):
                        gated = watched if unless is None else watched._replace(clock=unless)
                        use = function, output, before, place, gated, ends, in_place
                        probed = _probed(*use, self._without_rows, self._counts_in_graph, member)
                    if probed is None:
                        watched.misses(output)
                        continue
                    output = probed
                    if self.is_traced and function in COPIES:
                        copied_in_graph.append(watched)
                    if unless is not None:
                        slot = functools.partial(
                            _copied_slot, function, args[1:], kwargs, watched, output.shape
                        )
                        copied.append((slot, watched, function in SUMS, unless))
                    if member is not None:
                        self.products.add(output, (member,))
        if self.copies.in_graph:
            self.copies.follow_in_graph(function, args, kwargs, output, self._without_rows)
        self.copies.in_graph += [(output, watched, False) for watched in copied_in_graph]
        if copied or self.copies.known:
            rest = self._without_rows, self._copied, copied
            output = self.copies.follow(function, args, kwargs, output, *rest)
        return output

    def _makes_copies(self, function: Any, args: Any, place: int) -> bool:
        """Whether a use may be one for all examples, and what it makes added to what they have each."""
        if self.is_traced:
            return False
        if function in COPIES:
            return place == 0
        return function in SUMS and len(args) == 2 and bool(self.copies.of(args[1 - place]))

    def _copied(self, function: Any, args: Any, output: T, place: int, source: Watched) -> T | None:
        """`output`, of a function of copies, with a probe behind it."""
        rest = self._without_rows, self._counts_in_graph, None
        return _probed(function, output, args, place, source, None, False, *rest)

    def _counts_in_graph(self, capture: Any, kind: bool) -> bool:
        """Whether the positions of this kind of uses count in a graph: those of the first do.

        Of others `Run.counts_as` says so, but of a graph nobody knows which backward passes reach first.
        """
        for one, first in self.counted_in_graph:
            if one is capture:
                return first == kind
        self.counted_in_graph.append((capture, kind))
        return True

    def _times(self, watched: Watched, derivative: Any) -> Origin | None:
        """What a function of a watched tensor is one of; no gate is joined in what is compiled."""
        return None if self.is_traced else watched.of().times(derivative)

    def _seen_parts(self, function: Any, args: Any, kwargs: Any, parts: Sequence[Any]) -> None:
        """What a function made several tensors of."""
        for watched in [known for x in args for known in self._known(x)]:
            if function in SPLITS and watched.tensor is args[0]:
                found, slots = None, function(watched.slot, *args[1:], **kwargs)
                if watched.origin is not None:
                    found = watched.origin.split(functools.partial(_of, function, args[1:], kwargs))
                origins: Sequence[Any] = [None] * len(parts) if found is None else found
                for x, slot, own in zip(parts, slots, origins, strict=True):
                    self.watched.append(watched._replace(tensor=x, slot=slot, origin=own))
                continue
            for x in parts:
                if isinstance(x, T) and x.requires_grad:
                    watched.misses(x)

    def _seen_in_lists(self, function: Any, args: Any, kwargs: Any, output: T) -> None:
        """What a function made of lists of tensors, or of tensors by keyword."""
        lists = [x for x in args if isinstance(x, list | tuple)]
        parts = tensors_given((), kwargs | {"": lists})
        where = {name: n for name, n in kwargs.items() if name != "tensors"}
        joins = function in LISTS and where.keys() <= {"dim"}
        joins = joins and all([self._was_fresh(x) or self._without_rows(x) for x in parts])  # noqa: C419
        for at, part in enumerate(parts):
            for watched in self._known(part):
                if not joins:
                    watched.misses(output)
                    continue
                zeros = [watched.slot.new_zeros(x.shape) for x in parts]
                slot = function([*zeros[:at], watched.slot, *zeros[at + 1 :]], *args[1:], **where)
                self.watched.append(watched._replace(tensor=output, slot=slot, origin=None))

    def _may_change(self, args: Any) -> bool:
        """Whether the first argument is watched, or has the memory of what is."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        if not args or not isinstance(args[0], T) or not args[0].requires_grad:
            return False
        root = root_of(args[0])
        with torch._C.DisableTorchFunction():  # other modes would be asked for each base
            return any([root is w.tensor or root is w.tensor._base for w in self.watched])  # noqa: C419

    def _changed(self, x: T, output: Any) -> None:
        """What is watched was changed in place: all that shares its memory is that no more."""
        root = root_of(x)
        before, self.watched = self.watched, []
        for watched in before:
            if watched.tensor is output or root_of(watched.tensor) is not root:
                self.watched.append(watched)
            elif watched.strays is not None:
                watched.strays.add(watched.name)

    def _is_fresh(self, args: Any, kwargs: Any) -> bool:
        """Whether what a function is given is no tensor, or was made of none."""
        return all([self._was_fresh(x) for x in tensors_given(args, kwargs)])  # noqa: C419

    def _is_constant(self, function: Any, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether a function was given what has no rows, and numbers beside that it has no more for."""
        given = tensors_given(args, kwargs)
        rowless = [self._without_rows(x) for x in given]
        if all(rowless):
            return len(given) > 0
        if not any(rowless) or function not in ARITHMETIC or not isinstance(output, T):
            return False
        pairs = list(zip(given, rowless, strict=True))
        fresh = all([is_rowless or self._was_fresh(x) for x, is_rowless in pairs])  # noqa: C419
        return fresh and output.numel() <= max([x.numel() for x, is_rowless in pairs if is_rowless])

    def _was_fresh(self, x: Any) -> bool:
        if torch.compiler.is_compiling():
            return any([x is one for one in self.traced])  # noqa: C419
        known = self.fresh.get(id(x))
        return known is not None and known() is x

    def _fits(self, function: Any, args: Any, kwargs: Any, place: int, output: T) -> bool:
        """Whether this is a sum, product or quotient, of what gives that watched at `place` no rows."""
        if function not in ARITHMETIC or kwargs:
            return False
        other = args[1 - place]
        if function in QUOTIENTS and place == 0 and not isinstance(other, T):
            return _divides(other)
        if self._was_fresh(other):
            own = args[place].shape
            in_front = output.ndim == len(own) and output.shape[0] == own[0]  # where examples would be
            return output.numel() == own.numel() or output.shape[0] == 1 or in_front
        if function in QUOTIENTS and isinstance(other, T) and not other.requires_grad:
            # Of the parameter's shape it has no axis for rows: a norm that no gradient goes through.
            return self._without_rows(other) or other.shape == args[place].shape
        return self._without_rows(other)

    def _is_of_entries(self, given: Sequence[T], output: Any) -> bool:
        """Whether what a function was given has no rows, and it made as much of it as it was given."""
        rowless = all([self._without_rows(x) or self._was_fresh(x) for x in given])  # noqa: C419
        return rowless and isinstance(output, T) and output.shape == given[0].shape

    def _known(self, operand: Any) -> list[Watched]:
        if self.inside and id(operand) in self.inside and self._is_seen_inside(operand):
            return []
        found = [watched for watched in self.watched if watched.tensor is operand]
        if self.is_traced and not found:  # modes are not asked for x.T
            turned = [w for w in self.watched if are_transposes(operand, w.tensor)]
            return [watched.transposed(operand) for watched in turned]
        return found

    def _without_rows(self, operand: Any) -> bool:
        """Whether an operand is a number, or made of parameters and buffers alone."""
        if isinstance(operand, int | float | complex) or bool(self._known(operand)):
            return True
        if not isinstance(operand, T):
            return False
        if operand.ndim == 0 or any([operand is x for x in self.constants]):  # noqa: C419
            return True
        if self.is_traced:  # modes are not asked for x.T
            base = operand._base  # in a graph nobody may ask for that of a base, which may be None then
            own = [*self.constants, *[watched.tensor for watched in self.watched]]
            return any([base is x for x in own])  # noqa: C419
        return id(operand) in self.weights


def _copied_slot(function: Any, rest: Any, kwargs: Any, watched: Watched, shape: torch.Size) -> T:
    """Of a copy, or of a sum with one."""
    if function in COPIES:
        return viewed(function, rest, kwargs, watched.slot)
    return watched.slot.expand(shape)


def _of(function: Any, rest: Any, kwargs: Any, x: T) -> Any:
    """A function of another first argument."""
    return function(x, *rest, **kwargs)


def _of_first(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A function and its arguments, with `F.embedding`'s table and a power's exponent in front."""
    if function is torch.pow and isinstance(args[0], int | float) and not kwargs:
        return raised, args[::-1], {}
    if function is not F.embedding:
        return function, args, kwargs
    given = dict(zip(_OF_LOOKUP, args, strict=False)) | kwargs
    if any([given.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")]):  # noqa: C419
        return function, args, kwargs
    return _rows_of_table, (given["weight"], given["input"], given.get("padding_idx")), {}


def _rows_of_table(table: T, index: T, padding_index: int | None) -> T:
    return F.embedding(index, table, padding_index)


def _is_taken(function: Any, output: T) -> bool:
    """Whether it has a tensor's entries in other places, or sums of some; a sum of all is a penalty."""
    return function is _rows_of_table or (function in TAKES and output.ndim > 0)


def _divides(x: Any) -> bool:
    """Whether it is a number to divide by."""
    return isinstance(x, int | float) and x != 0


def _factor(function: Any, args: Any, place: int) -> Any:
    """The derivative of a sum, product or quotient by its operand at `place`."""
    if function in SUMS:
        return -1 if is_subtracted(function, place) else 1
    other = args[1 - place]
    if function in TIMES:
        return other
    if isinstance(other, T):
        exact = other.is_floating_point() or other.is_complex()
        other = other.detach() if exact else other.to(args[place].dtype)
    return 1 / other if place == 0 else -other / args[1].detach() ** 2


def _share_of(function: Any, x: T, other: T) -> T:
    """What a maximum or a minimum of both has of `x`: all or nothing, and half of what is equal."""
    chosen = x > other if function in MAXIMA else x < other
    return (chosen + 0.5 * (x == other)).to(x.dtype)


def _probed(
    function: Any,
    output: T,
    args: Any,
    place: int,
    watched: Watched,
    ends: T | None,
    in_place: bool,
    without_rows: Callable[[Any], bool],
    counts_in_graph: Callable[[Any, bool], bool],
    member: Member | None,
) -> T | None:
    """`output`, with a probe behind it; None: this use is not understood.

    Args:
        without_rows: whether an operand is made of parameters and buffers alone.
        counts_in_graph: whether positions of a layer's product do, and where its parameter has inputs.
        member: as which a sum may join the product with others; None: not it.
    """
    others = [x for i, x in enumerate(args[:2]) if i != place and isinstance(x, T)]
    slot, shape = watched.slot, watched.slot.shape
    kind, other, axes, labels, followed, negative = "", None, None, None, True, False
    if function in SUMS or (function in COPIES and place == 0 and _broadcasts(shape, output.shape)):
        kind = "sum"
    elif function in TIMES and len(others) == 1:
        kind, other = "product", others[0]
    elif function in QUOTIENTS and len(others) == 1:
        if output.numel() == slot.numel() and output.ndim == slot.ndim:
            return None  # no rows: what it is over may be one for all examples
        kind, other = "product", _factor(function, args, place)
        followed = not others[0].requires_grad  # in derivatives
    elif function in EXTREMES and len(others) == 1:
        kind, other = "product", _share_of(function, args[place].detach(), others[0].detach())
    elif function in PRELU and place == 1:
        kind, other, negative = "product", others[0], True
        if other.ndim > 1 and len(shape) == 1:  # one for each channel, or for all
            slot = slot.reshape(-1, *(1,) * (other.ndim - 2))
    elif function is F.linear and place == 1 and len(shape) == 2:
        kind, other = "linear", args[0]
    elif (function is F.linear and place == 2) or (function in SHIFTED and place == 0):
        kind = "sum"
    elif function in ADDED_ENTRYWISE:
        kind, other = "product", args[3 - place]
    elif function in LERP and place == 2:
        kind, other = "product", args[1].detach() - args[0].detach()
        followed = not any(x.requires_grad for x in args[:2])
    elif function in ADDED:
        kind, other = ("right", args[1]) if place == 2 else ("left", args[2])
    elif function in MATRIX and len(others) == 1 and min(len(shape), others[0].ndim) >= 2:
        kind, other = ("right" if place == 1 else "left"), others[0]
        if function is T.__rmatmul__:
            kind = "left" if place == 1 else "right"
    elif ends is not None and len(shape) == 3 and args[0].ndim == 2:
        kind, other = "grouped", args[0]
    else:
        kind, other, slot, axes, labels = _contraction(function, args, place, watched)
    if not kind or (watched.slot.is_complex() and not output.is_complex()):
        return None
    if output.is_complex() and not watched.slot.is_complex() and kind not in ("sum", "product"):
        return None
    if watched.widened and kind not in ("sum", "product"):
        return None  # a factor of a matrix's rows: its gradient is a sum over them, not a row of x
    counts = kind in _FEATURES and not without_rows(other) and not output.is_complex()
    into_first = (kind in ("right", "grouped", "contraction")) != watched.turned if counts else None
    if into_first is not None and torch.compiler.is_compiling():
        into_first = into_first if counts_in_graph(watched.capture, into_first) else None
    how, source = _How(kind, axes, watched.reduce, into_first, negative, labels), None
    unfollowed = in_place or not followed
    if isinstance(other, T) and other.requires_grad | unfollowed and not torch.compiler.is_compiling():
        understood = not unfollowed and not output.dtype.is_complex
        source = _Source(watched._replace(slot=slot), how, understood)
    slots = slot if member is None else member.origin.slot, watched.ones, watched.counts
    run = None
    if counts and watched.capture is not None:
        run = watched.recorded.ran(watched.capture, False, in_backward(), False, True)
    is_compiling = torch.compiler.is_compiling()
    apply = _FreeProbe.apply if is_compiling else _FreeProbeOfDuals.apply
    told = None if is_compiling else watched.recorded
    rest = in_place, source, run, told, member
    with without_modes():
        probed: T = apply(output, other, *slots, how, watched.clock, ends, *rest)
    return probed


def _contraction(
    function: Any, args: Any, place: int, watched: Watched
) -> tuple[str, T | None, T, Axes | None, Labels | None]:
    """How an einsum, or what is one, uses the operand at `place`: kind, other, slot, axes and labels."""
    slot, written = watched.slot, as_einsum(function, args)
    equation, operands = written or ("", ())
    at = place - (len(args) - len(operands))
    if len(operands) != 2 or at < 0:
        return "", None, slot, None, None
    other = operands[1 - at]
    given = equation, at, watched.tensor, other
    found, labels = rows_of_call(*given), contraction_of_call(*given)
    if found is not None and not found.halves.order:
        return ("right" if found.halves.turned else "linear"), other, slot, found.axes, None
    if labels is None or labels.other != labels.out:
        return ("contraction" if labels else ""), other, slot, None, labels
    own, _, out = labels  # an entry for each of x, or for some
    slot = slot.permute([own.index(label) for label in out if label in own])
    return "product", other, slot[tuple([slice(None) if x in own else None for x in out])], None, None


class _How(NamedTuple):
    """What `elementwise_second_moment_sum` has to know of a use."""

    kind: str
    axes: Axes | None  # where features are, if not last
    reduce: bool
    into_first: bool | None  # whether the parameter lies (in, out); None: this is no product of rows
    negative: bool = False  # whether of what it is multiplied with only what is negative counts (PReLU)
    labels: Labels | None = None  # of a contraction


class _Source(NamedTuple):
    """What a parameter was used in, for its uses in derivatives."""

    watched: Watched
    how: _How
    understood: bool  # whether what it multiplied is still what it was
    turned: bool = False  # in a product in derivatives of that, with the transpose

    def passed(self, gradient: T, other: T, ends: T | None) -> T:
        """A backward pass that is recorded goes through; the gradient to go on with."""
        watched = self.watched
        if watched.recorded is None or watched.recorded.pausing:
            return gradient
        missed = functools.partial(watched.recorded.missed.add, watched.name)
        if is_batched(gradient):  # and what is put behind it would be lost
            missed()
            return gradient
        if not self.understood:
            noted: T = Noted.apply(gradient, watched.ones, missed)
            return noted

        def probe(y: T) -> T:
            slots = watched.slot, watched.ones, watched.counts
            x, following = gradient, self._replace(turned=not self.turned)
            if self.how.negative:
                x = gradient * (other < 0)
                following = following._replace(how=self.how._replace(negative=False), understood=False)
            rest = following, None, watched.recorded, None
            given = x, *slots, following.how, watched.clock, ends, False, *rest
            probed: T = _FreeProbeOfDuals.apply(y, *given)
            return probed

        if other.requires_grad:
            follow(other, probe)
        return gradient


def _positions(how: _How, output: T) -> int:
    """How many rows the output of a product has."""
    axes = _FEATURES[how.kind] if how.axes is None else how.axes.y[-how.axes.features[1] :]
    if how.labels is not None:
        own, other, out = how.labels
        axes = tuple([out.index(label) for label in own if label not in other])
    if how.kind == "left" and how.axes is None and output.ndim > 2:
        axes = -2, -1  # what is mixed are positions, of each example
    return output.numel() // max(math.prod([output.shape[axis] for axis in axes]), 1)


def _parts(x: T) -> tuple[T, T]:
    """The real and the imaginary one."""
    real, imaginary = torch.view_as_real(x.resolve_conj()).unbind(-1)
    return real, imaginary


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    """Whether only axes of length 1, or new ones in front, grew."""
    # A list, because torch.compile does not see through a generator here.
    return all([shape[-i] in (1, target[-i]) for i in range(1, len(shape) + 1)])  # noqa: C419


class _FreeProbe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: T,
        other: T | None,
        slot: T,
        ones: T,
        counts: T,
        how: _How,
        clock: Any,
        ends: T | None,
        in_place: bool,
        source: _Source | None,
        run: Run | None,
        told: Any,
        member: Member | None,
    ) -> T:
        """`told`: the clock, of backward passes."""
        ctx.source, ctx.slot, ctx.run, ctx.told, ctx.member = source, ones, run, told, member
        ctx.save_for_backward(other, ends)
        ctx.how, ctx.shape, ctx.dtype, ctx.clock = how, slot.shape, slot.dtype, clock
        ctx.dtype_of_ones = ones.dtype  # real
        ctx.in_place = in_place
        if in_place:  # whoever changed a tensor goes on with that, not with what is returned
            ctx.mark_dirty(y)
            return y
        return passed_on(y)

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        other, ends = ctx.saved_tensors
        on, waits = gradient, ctx.clock is None or ctx.clock.sampling
        if ctx.source is not None and is_recorded():
            on = ctx.source.passed(gradient, other, ends)
            waits = waits and is_awaited(ctx.slot)
        run: Run | None = ctx.run
        if not ctx.needs_input_grad[2] or not waits or not (run is None or run.is_awaited()):
            return on, *(None,) * 12
        if run is None and ctx.told is not None:
            ctx.told.passes()  # a run says so itself
        counts = run is None or run.reached()
        turned = ctx.source is not None and ctx.source.turned  # of a derivative of the product
        counts = counts and not turned and ctx.how.into_first is not None
        counts = counts and (run is None or run.counts_as(ctx.how.into_first))
        positions = _positions(ctx.how, gradient) if counts else 0
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            (kind, axes, reduce, _, negative, labels), shape = ctx.how, tuple(ctx.shape)
            if gradient.is_complex() and not ctx.dtype.is_complex:  # of what is real: the real part
                if other is not None:
                    gradient, other, kind = gradient * other.detach().conj(), None, "sum"
                gradient = gradient.real
            g = gradient.to(ctx.dtype)
            other = None if other is None else other.detach().to(ctx.dtype)
            other = other.clamp(max=0) if negative and other is not None else other
            if turned:
                g, other = other, g
            if axes is not None:
                assert other is not None
                g, other = axes.output(g), axes.input(other)
                sides = other.shape[-1], g.shape[-1]
                shape = sides if kind == "right" else sides[::-1]
            if ctx.member is not None:
                assert other is not None
                factor = other * ctx.member.derivative(ctx.dtype)
                g, other = ctx.member.gathers(g * factor.conj()), None
                if g is None:
                    return on, *(None,) * 12
            how = {"reduce": reduce, "labels": labels}
            if ctx.dtype.is_complex:
                by_parts = _parts(g), None if other is None else _parts(other)
                squares = torch.complex(*complex_second_moment_sum(*by_parts, kind, shape, ends, **how))
            else:
                squares = elementwise_second_moment_sum(g, other, kind, shape, ends, **how)
            squares = squares.reshape(ctx.shape)
        one = torch.ones((1, 1, 1), dtype=ctx.dtype_of_ones, device=gradient.device)
        return on, None, squares, one, counts_like(one, 1, positions), *(None,) * 8


class _FreeProbeOfDuals(_FreeProbe):
    """With a derivative forward, of which torch.compile wants none."""

    @staticmethod
    def jvp(ctx: Any, y: T, *rest: Any) -> T:
        return y.add_(0) if ctx.in_place else y.view_as(y)  # torch asks for a change in place
