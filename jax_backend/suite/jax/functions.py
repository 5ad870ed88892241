"""Functions of a leaf that take its entries one by one, as the program computes them.

What multiplies rows may be exp(p), softplus(p) or 1 - sigmoid(p): widths, temperatures and decays are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax

from suite.jax import jaxprs, operations
from suite.jax.slopes import Slope
from suite.jax.uses import Origin


class Functions:
    """Asked of each operation with a view of a leaf."""

    def __init__(
        self,
        program: jaxprs.Program,
        *,
        differentiable: Set[int],
        of_data: Set[int],
        origins: dict[int, Origin],
        is_number: Callable[[int], bool],
    ) -> None:
        """
        Args:
            differentiable: values through which a gradient may flow to leaves.
            of_data: values that are computed from what is no parameter.
            origins: by value, as far as they are known.
            is_number: whether a value is one number, broadcast.
        """
        self.program, self.differentiable, self.of_data = program, differentiable, of_data
        self.origins, self.is_number = origins, is_number
        self.whole: dict[jaxprs.Path, Origin | None] = {}  # by function with a derivative of its own
        self.inside: dict[jaxprs.Path, list[jaxprs.Node]] = {}  # what it does, and returns
        for node in program.nodes:
            if node.custom is not None or isinstance(node.operation, operations.Returned):
                path = node.path if node.custom is None else node.custom.path
                self.inside.setdefault(path, []).append(node)

    def after(self, node: jaxprs.Node, known: Sequence[Origin | None]) -> Origin | None:
        """What an operation makes of a leaf's entries, one by one; None: that is not what it does.

        Args:
            known: of each operand.
        """
        real = jaxprs.dtype_is_float(self.program.avals[node.outputs[0]])
        if not real or node.custom is not None or node.name not in operations.ENTRY_BY_ENTRY:
            return None
        chooses = isinstance(node.operation, operations.Select)
        if chooses and node.inputs[0] in self.of_data:
            return None
        made = self._of_one(node, node.inputs[chooses:], known[chooses:])
        return made and self._made(node.path, known, made)

    def is_within(self, node: jaxprs.Node) -> bool:
        """Whether an operation is within such a function that has a derivative of its own.

        What that returns is among the origins then.
        """
        op, custom = node.operation, node.custom
        if custom is None and not isinstance(op, operations.Returned):
            return False
        path, given = (node.path, op.given) if custom is None else (custom.path, custom.inputs)
        if path not in self.whole:
            self.whole[path] = self._whole(path, given)
        made = self.whole[path]
        if made is not None and custom is None:
            self.origins[node.outputs[0]] = made
        return made is not None

    def _whole(self, path: jaxprs.Path, given: Sequence[int | None]) -> Origin | None:
        """What a function with a derivative of its own, which is run as one equation, returns."""
        known = [None if v is None else self.origins.get(v) for v in given]
        *inside, end = self.inside[path]
        others = [v for v, origin in zip(given, known, strict=True) if origin is None]
        if not any(known) or len(self.program.customs[path].outvars) > 1:
            return None
        if len(others) == len(given) - 1 and self.differentiable.isdisjoint(others):
            (place,) = (i for i, origin in enumerate(known) if origin is not None)
            if self._passes_gradients(path, place):
                return known[place]._replace(shifted=True)  # type: ignore[union-attr]
        if not all(map(self._is_by_entry, inside)):
            return None
        made = self._of_one(end, given, known)
        return made and self._made(path, known, made)

    def _passes_gradients(self, path: jaxprs.Path, place: int) -> bool:
        """Whether a function's own derivative by an operand is 1, as of straight-through roundings."""
        eqn = self.program.customs[path]
        if self.program.varying or any(hasattr(v.aval, "inner_aval") for v in eqn.invars):
            return False

        def pulled(gradient: Any, *values: Any) -> Any:
            def function(own: Any) -> Any:
                return jaxprs.bind(eqn, [*values[:place], own, *values[place + 1 :]])[0]

            return jax.vjp(function, values[place])[1](gradient)[0]

        kinds = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in (*eqn.outvars, *eqn.invars)]
        if kinds[0] != kinds[1 + place]:
            return False
        traced = jax.make_jaxpr(pulled)(*kinds).jaxpr
        return traced.outvars[0] is traced.invars[0]

    def _is_by_entry(self, node: jaxprs.Node) -> bool:
        op, first = node.operation, next(iter(node.inputs), None)
        if isinstance(op, operations.Reindex):
            return op.step is None or first is None or self.is_number(first)
        by_entry = node.name in operations.ENTRY_BY_ENTRY | operations.WITHOUT_DERIVATIVE
        return by_entry or isinstance(op, operations.Returned)

    def _of_one(
        self, node: jaxprs.Node, values: Sequence[int | None], known: Sequence[Origin | None]
    ) -> Origin | None:
        """The origin that operands have in common, if the others are numbers without a derivative."""
        avals, found = self.program.avals, None
        for value, origin in zip(values, known, strict=True):
            if origin is None:
                if value is not None and (value in self.differentiable or not self.is_number(value)):
                    return None
                continue
            assert value is not None
            own = origin._replace(slope=None, sloped=0)
            if (
                (found is not None and own != found)
                or avals[value].shape != avals[node.outputs[0]].shape
                or origin.shifted
                or origin.made
            ):
                return None
            found = own
        return found

    def _made(self, path: jaxprs.Path, known: Sequence[Origin | None], origin: Origin) -> Origin | None:
        """The origin of the output of the equation at `path`."""
        starts, through = set[tuple[jaxprs.Path, int]](), {path}
        for place, own in enumerate(known):
            if own is None:
                continue
            if own.slope is None:
                starts.add((path, place))
            elif self.program.region(own.slope.path) == self.program.region(path):
                starts |= own.slope.starts
                through |= own.slope.through
            else:  # made outside of a loop, or the like, that this is in
                return None
        slope = Slope(path, frozenset(starts), frozenset(through))
        return origin._replace(slope=slope, sloped=len(origin.inner))
