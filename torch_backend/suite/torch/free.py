"""Parameters that a module uses in its own forward: scales, shifts, tokens, positions, matrices.

No layer computes with them, so no hook sees their products. While such a module runs, a torch function
mode watches for the operations below with one of its parameters, or a view of one, as an operand and
puts a probe behind each. What is summed are the squares of every row's gradient by the parameter: the
diagonal of its Fisher block. The sums arrive as the gradient of a *slot* of the parameter's shape; what
the module does to view the parameter is done to the slot, so that autograd takes them home.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from suite.torch.calls import are_transposes
from suite.torch.copies import Copies
from suite.torch.einsum import operands_of, tensordot_as_einsum
from suite.torch.entrywise import derivative_of
from suite.torch.free_probes import Watched, factor_of, slot_of_product, with_probe
from suite.torch.gates import Member, Origin, Products
from suite.torch.hooks import (
    Mode,
    Stacks,
    in_traced_graph,
    is_within_functions,
    on_transformed,
    packs_with,
    raised,
    root_of,
    tensors_given,
    tensors_in,
    traceable,
)
from suite.torch.looked_up import UnlessBroadcast
from suite.torch.operations import (
    ARITHMETIC,
    CASTS,
    CHOICES,
    COPIES,
    GRIDS,
    LISTS,
    LOOKS,
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
    mask_and_scores,
    turns_over,
    viewed,
)
from suite.torch.resized import resized_slot

_OF_LOOKUP = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


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
        seen = function, args, kwargs
        if function is torch.tensordot:
            found = tensordot_as_einsum(args, kwargs)
            seen = seen if found is None else (torch.einsum, (found[0], *found[1]), {})
        elif function is torch.complex and kwargs.keys() == {"real", "imag"}:
            seen = function, (kwargs["real"], kwargs["imag"]), {}
        before, version = seen[1], None
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
            output = self._seen(*seen, before, output)
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
        if function in GRIDS:
            self.constants.append(output)
        elif isinstance(output, T) and not output.requires_grad and self._is_fresh(args, kwargs):
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
                    slot = slot_of_product(watched.slot, 1, output.is_complex())
                    origin = None if self.is_traced or slot is not watched.slot else watched.of()
                    self.watched.append(watched._replace(tensor=output, slot=slot, origin=origin))
                elif function is torch.complex and self._is_of_entries(given, output):
                    slot = slot_of_product(watched.slot, 1j if place else 1, True)
                    self.watched.append(watched._replace(tensor=output, slot=slot, origin=None))
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
                    factor = factor_of(function, before, place)
                    if isinstance(factor, T) and not factor.is_complex():
                        factor = factor.detach().to(watched.ones.dtype)
                    slot = slot_of_product(watched.slot, factor, output.is_complex())
                    if slot is None:
                        watched.misses(output)
                        continue
                    slot = slot.expand(output.shape)
                    widened = watched.widened or output.numel() > watched.slot.numel()
                    same = output.shape == watched.slot.shape and not isinstance(factor, complex)
                    same = same and slot.is_complex() == watched.slot.is_complex()
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
                        probed = with_probe(*use, self._without_rows, self._counts_in_graph, member)
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
        return with_probe(function, output, args, place, source, None, False, *rest)

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
