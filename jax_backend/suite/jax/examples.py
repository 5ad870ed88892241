"""Which values of a loss's program are examples', and which are the same for all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import jax.numpy as jnp

from suite.jax import jaxprs, operations
from suite.jax.activations import moved_axes
from suite.jax.views import Shape

_PRODUCTS = (operations.DotGeneral, operations.Convolve)


def of_examples(
    program: jaxprs.Program, leaves: int, arguments: Collection[int]
) -> tuple[set[int], set[int]]:
    """Values that are computed from data, what is `ones_like` them (tangents of each example), and what
    is repeated for each.

    And inputs that are no data, but weights which are not trained.

    Args:
        leaves: how many inputs are trained; all else is data, or weights which are not trained.
        arguments: inputs that may have an axis for examples. Where no product with what is a leaf's
            alone is one with theirs (class weights), what is closed over is data, too.
    """
    given: set[int] = {*program.inputs[leaves:], *program.constants}
    trained = jaxprs.dependent_values(program, program.inputs[:leaves])
    trained -= jaxprs.dependent_values(program, given)
    shaped = [v for v in program.inputs[leaves:] if v in arguments and _shape(program, v)]
    trained |= _times_constants(program, trained, batch_of(program, shaped))
    if _meet(program, trained, jaxprs.dependent_values(program, arguments)):
        given = set(program.inputs[leaves:])
    weights: set[int] = set()
    while more := _weights(program, given - weights, trained):  # with fewer to mistake axes for
        weights |= more
    data = given - weights
    if not any(_shape(program, v) for v in data):  # nothing to tell them from
        data = set(given)
    found = jaxprs.dependent_values(program, data)
    lengths = {_shape(program, v)[0] for v in data if _shape(program, v)}
    shapes = {
        shape
        for shape in (_shape(program, v) for v in found)
        if len(shape) > 1 or (shape and shape[0] in lengths)  # also of points that were put together
    }
    batch = batch_of(program, [v for v in program.inputs[leaves:] if v in data and _shape(program, v)])
    if batch > 1:
        shapes |= {(batch, *(1,) * more) for more in (1, 2, 3)}  # to repeat something by
    made = [node for node in program.nodes if isinstance(node.operation, operations.Reindex)]
    filled = {node.outputs[0] for node in made if node.inputs == (None,)}
    repeated = {v for v in filled if _shape(program, v) in shapes}
    repeated |= {node.outputs[0] for node in made if _repeats(program, node, batch)}
    tables = _tables(program, program.inputs[:leaves])
    repeated = {v for v in repeated if not _meets_tables(program, v, tables)}
    found = jaxprs.dependent_values(program, found | repeated)
    # Where arguments are weights of terms, or not used, examples are made in the loss: unknown which.
    return found if _reach(program, found, program.inputs[:leaves]) else set(), weights


def batch_of(program: jaxprs.Program, arguments: Sequence[int]) -> int:
    """How many examples there are: as most arguments have on their first axis, or the first has."""
    lengths = [_shape(program, v)[0] for v in arguments]
    return max(lengths, key=lengths.count, default=1)


def axes_of(program: jaxprs.Program, starts: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """Where axes of some values are in what is made of them, as far as that can be told."""
    found = {value: set(axes) for value, axes in starts.items()}
    for node in program.nodes:
        axes = [found.get(v, set()) if v is not None else set() for v in node.inputs]
        if any(axes):
            _move_on(program, node, axes, found)
    return found


def _move_on(
    program: jaxprs.Program,
    node: jaxprs.Node,
    axes: Sequence[Collection[int]],
    found: dict[int, set[int]],
) -> None:
    """Add where an operation puts axes of its operands."""
    shapes = [_shape(program, v) for v in node.inputs]
    for result in node.outputs:
        out = set[int]()
        if isinstance(node.operation, operations.DotGeneral):
            known = [{(axis, 0) for axis in own} for own in axes]
            out = {axis for axis, _ in _of_product(node.operation, known, shapes)}
        else:
            for shape, own in zip(shapes, axes, strict=True):
                places = _places_after(node, shape, _shape(program, result)) if own else {}
                out |= {places[axis] for axis in own if places.get(axis, -1) >= 0}
        if out:
            found.setdefault(result, set()).update(out)


def _places_after(node: jaxprs.Node, old: Shape, new: Shape) -> dict[int, int]:
    if isinstance(node.operation, operations.LoopSlice):
        return {axis: axis - 1 for axis in range(1, len(old))}
    summed = (node.params or {}).get("axes")
    if node.name.startswith("reduce_") and summed is not None:
        kept = [axis for axis in range(len(old)) if axis not in summed]
        return {axis: place for place, axis in enumerate(kept)}
    return _places(node.operation, old, new)


def are_for_examples(
    program: jaxprs.Program, value: int, axis: int, examples: Mapping[int, Collection[int]]
) -> bool:
    """Whether what has an axis as long as there are examples may be one of each: none meets another's.

    Args:
        examples: along which axes values have examples.
    """
    found, single = {value: {axis}}, set[int]()  # made of one example's, or of all of them together
    for node in program.nodes:
        axes = [found.get(v, set()) if v is not None else set() for v in node.inputs]
        given = [examples.get(v, ()) if v is not None else () for v in node.inputs]
        if not single.isdisjoint(node.inputs):
            if any(given):
                return False
            single.update(node.outputs)
        if not any(axes):
            continue
        if _takes_one(program, node, axes[0]):
            single.update(node.outputs)
        met = [(own, given[j], i, j) for i, own in enumerate(axes) for j in range(len(given)) if i != j]
        met = [pair for pair in met if pair[0] and pair[1]]
        if not met or isinstance(node.operation, operations.Gather):
            _move_on(program, node, axes, found)
        elif not all(_is_beside(node.operation, *pair) for pair in met):
            return False
    return True


def _takes_one(program: jaxprs.Program, node: jaxprs.Node, axes: Collection[int]) -> bool:
    """Whether one place along such an axis is taken, as by a loop's step, or all are reduced to one."""
    op = node.operation
    if isinstance(op, operations.LoopSlice):
        return 0 in axes
    if node.name.startswith("reduce_"):
        return not set(axes).isdisjoint((node.params or {}).get("axes", ()))
    if not isinstance(op, operations.Reindex) or op.step is None or op.step[0] != "slice":
        return False
    before, after = (_shape(program, v) for v in (node.inputs[0], node.outputs[0]))
    return any(before[axis] > after[axis] == 1 for axis in axes)


def _is_beside(op: object, own: Collection[int], other: Collection[int], i: int, j: int) -> bool:
    """Whether one of some axes of operand i goes along with one of operand j's."""
    if not isinstance(op, operations.DotGeneral):
        return any(axis in other for axis in own)
    bound = [*op.batch[i], *op.contracted[i]], [*op.batch[j], *op.contracted[j]]
    pairs = dict(zip(*bound, strict=True))
    return any(pairs.get(axis) in other for axis in own)


def _repeats(program: jaxprs.Program, node: jaxprs.Node, batch: int) -> bool:
    """Whether it puts an axis of this length in front of rows, or of indices, but for axes of length 1.

    A matrix may as well be of gains, as many as a weight has inputs.
    """
    step, value, out = node.operation.step, node.inputs[0], program.avals[node.outputs[0]]
    first = next((axis for axis, n in enumerate(out.shape) if n > 1), None)
    if step is None or step[0] != "broadcast" or value is None or first is None:
        return False
    if out.shape[first] != batch or (len(out.shape) < 3 and jnp.issubdtype(out.dtype, jnp.inexact)):
        return False
    before = dict(zip(step[1][1], _shape(program, value), strict=True))
    return before.pop(first, 1) == 1 and any(n > 1 for n in before.values())


def _tables(program: jaxprs.Program, leaves: Sequence[int]) -> dict[int, set[int]]:
    """Axes along which values that are made of no data are no examples: of leaves and constants, and
    those that differ by place, as in masks and waves of positions.
    """
    given = jaxprs.dependent_values(program, program.inputs[len(leaves) :])
    known = [v for v in (*leaves, *program.constants) if _shape(program, v)]
    axes = {v: set(range(len(_shape(program, v)))) for v in known}
    for node in program.nodes:
        for result in node.outputs:
            shape, own = _shape(program, result), set[int]()
            if isinstance(node.operation, operations.Iota):
                own = {node.operation.axis}
            for value in node.inputs:
                if value is not None and value in axes:
                    places = _places(node.operation, _shape(program, value), shape)
                    own |= {places[axis] for axis in axes[value] if places.get(axis, -1) >= 0}
            own = {axis for axis in own if shape[axis] > 1}
            if own and result not in given:
                axes[result] = own
    return axes


def _meets_tables(program: jaxprs.Program, value: int, tables: Mapping[int, Collection[int]]) -> bool:
    """Whether what may be repeated for each example meets a table that is one along the same axis."""
    same, length = {value}, _shape(program, value)[0]
    for node in program.nodes:
        if same.isdisjoint(node.inputs) or isinstance(node.operation, _PRODUCTS):
            continue
        others = [v for v in node.inputs if v is not None and v not in same]
        if any(0 in tables.get(v, ()) and _shape(program, v)[0] == length for v in others):
            return True
        if isinstance(node.operation, operations.Reindex):
            same.update(v for v in node.outputs if _shape(program, v)[:1] == (length,))
    return False


def _times_constants(program: jaxprs.Program, trained: Collection[int], batch: int) -> set[int]:
    """What becomes of values of leaves alone that are multiplied with constants, as with a mask, or that
    known indices look up (kernels of symmetric networks), or that are coefficients in a basis.

    Args:
        batch: how many examples there are: a constant with as many rows may be theirs.
    """
    constant = jaxprs.dependent_values(program, program.constants)
    constant -= jaxprs.dependent_values(program, program.inputs)
    found: set[int] = set()
    alike = (operations.Multiply, operations.Divide, operations.Select)
    for node in program.nodes:
        own = [v for v in node.inputs if v in trained or v in found]
        others = [v for v in node.inputs if v is not None and v not in own]
        if not own or not all(v in constant for v in others):
            continue
        whole = any(_shape(program, v) == _shape(program, node.outputs[0]) for v in own)
        looks_up = isinstance(node.operation, operations.Gather) and node.inputs[0] in own
        mixes = isinstance(node.operation, operations.DotGeneral) and not any(
            batch in _shape(program, v) for v in others
        )
        if (whole and isinstance(node.operation, alike)) or looks_up or mixes or not others:
            found.update(node.outputs)
    return found


def _meet(program: jaxprs.Program, some: Collection[int], others: Collection[int]) -> bool:
    """Whether there is a product of one of the former and one of the latter."""
    pairs = [node.inputs[:2] for node in program.nodes if isinstance(node.operation, _PRODUCTS)]
    return any((a in some and b in others) or (b in some and a in others) for a, b in pairs)


def _reach(program: jaxprs.Program, some: set[int], leaves: Collection[int]) -> bool:
    """Whether any of these, but for numbers, is used together with what leaves are a part of."""
    of_leaves = jaxprs.dependent_values(program, leaves)
    numbers = {v for v in some if not _shape(program, v)}
    for node in program.nodes:
        given = {v for v in node.inputs if v is not None and _shape(program, v)}
        if isinstance(node.operation, operations.Reindex) and numbers.issuperset(node.inputs):
            numbers.update(node.outputs)
        if given & some - numbers and len(given) > 1 and given & of_leaves:
            return True
    return False


def _weights(program: jaxprs.Program, given: Collection[int], trained: Collection[int]) -> set[int]:
    """What has no examples on its leading axis: a product sums over it and another axis of data.

    Or one with anything that is not made of it does, while data's leading axis stays beside it: it is
    the outputs of W in x Wᵀ. Not what a graph's matrix, or any whose two axes are of one length, is
    multiplied with, nor the rows that what is `trained` is multiplied with.
    """
    of_given = jaxprs.dependent_values(program, given)
    rows: set[int] = set()
    # Where leading axes are: pairs of an axis and the value whose leading axis it was.
    leading = {v: {(0, v)} for v in given if _shape(program, v)}
    found: set[int] = set()
    for node in program.nodes:
        op = node.operation
        out: set[tuple[int, int]] = set()
        known = [leading.get(v, set()) if v is not None else set() for v in node.inputs]
        if isinstance(op, operations.DotGeneral):
            for i in (0, 1):
                sums = dict(zip(op.contracted[i], op.contracted[1 - i], strict=True))
                others, shape = {axis for axis, _ in known[1 - i]}, _shape(program, node.inputs[1 - i])
                square = {shape[axis] for axis in others} if len(shape) == 2 else set()
                bound = (*op.contracted[i], *op.batch[i])
                beside = {v for a, v in known[i] if a not in bound}
                made_of = {v for _, v in known[1 - i]}
                found |= {v for a, v in known[i] if a in sums and v not in made_of and beside - {v}}
                sums = {a: b for a, b in sums.items() if b not in others and shape[b] not in square}
                if node.inputs[1 - i] in trained:
                    rows |= beside
                if node.inputs[1 - i] in of_given:
                    found |= {v for a, v in known[i] if a in sums}
            out = _of_product(op, known, [_shape(program, v) for v in node.inputs])
        else:
            if isinstance(op, operations.Convolve) and node.inputs[0] in of_given:
                whole = op.groups == 1  # else each example may have a kernel
                found |= {v for axis, v in known[1] if whole or axis != op.w_spec[0]}
                known[1] = set()
            for value, pairs in zip(node.inputs, known, strict=True):
                for result in node.outputs if pairs else ():
                    places = _places(op, _shape(program, value), _shape(program, result))
                    out |= {(places[axis], v) for axis, v in pairs if places.get(axis, -1) >= 0}
        for result in node.outputs if out else ():
            leading[result] = out
    return found - rows


def _shape(program: jaxprs.Program, value: int | None) -> Shape:
    return () if value is None else program.avals[value].shape


def _of_product(
    op: operations.DotGeneral, known: list[set[tuple[int, int]]], shapes: list[Shape]
) -> set[tuple[int, int]]:
    """Where leading axes of two operands are in their product."""
    out: set[tuple[int, int]] = set()
    first = len(op.batch[0])
    for i in (0, 1):
        bound = (*op.batch[i], *op.contracted[i])
        free = [axis for axis in range(len(shapes[i])) if axis not in bound]
        places = {axis: place for place, axis in enumerate(op.batch[i])}
        places |= {axis: first + place for place, axis in enumerate(free)}
        out |= {(places[axis], v) for axis, v in known[i] if axis in places}
        first += len(free)
    return out


def _places(op: object, old: Shape, new: Shape) -> dict[int, int]:
    """Where an operation puts its input's axes, as far as that can be told: -1 is nowhere."""
    if isinstance(op, operations.LoopSlice):  # of stacked weights, or of steps in time
        return {0: 0} if new else {}
    step = op.step if isinstance(op, operations.Reindex) else None
    axes = None if step is None else moved_axes(old, step)
    if axes is not None:
        return dict(enumerate(axes))
    if old == new or (step is not None and step[0] in ("slice", "rev")):
        return {axis: axis for axis in range(len(old))}
    if step is None and len(old) == len(new) and all(a in (1, b) for a, b in zip(old, new, strict=True)):
        return {axis: axis for axis, n in enumerate(old) if n > 1}
    reshaped = step is not None and step[0] == "reshape"
    if reshaped and old[0] > 1:
        before, after = ([axis for axis, n in enumerate(shape) if n > 1] for shape in (old, new))
        if [old[axis] for axis in before] == [new[axis] for axis in after]:
            return dict(zip(before, after, strict=True))
    return {0: 0} if new and (reshaped or old[0] == new[0]) else {}
