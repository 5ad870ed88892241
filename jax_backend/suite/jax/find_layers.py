"""Which parameter leaves are weights of layers, from the flattened program of a loss.

One fact is carried beside each value: "a view of exactly one parameter leaf, times a number". A product
that meets such a value is a use of a layer; anything else that does is a reason not to cover the leaf.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from suite.jax import jaxprs, operations
from suite.jax.activations import Activations
from suite.jax.beside import Beside
from suite.jax.complex_weights import ComplexWeights
from suite.jax.copies import Copies
from suite.jax.derivatives import Derivatives
from suite.jax.examples import batch_of, of_examples
from suite.jax.functions import Functions
from suite.jax.gates import one_use
from suite.jax.joined import Piece, moved, pieces, window, windows
from suite.jax.layers import (
    ComplexPart,
    Convolution,
    Dense,
    Elementwise,
    Factor,
    Grouped,
    Lookup,
    Product,
    Sloped,
    Use,
    example_count,
    feature_axes,
)
from suite.jax.lookups import Lookups
from suite.jax.made_weights import MadeWeights, seen_through
from suite.jax.penalties import find_penalties
from suite.jax.probes import Multiplier
from suite.jax.uses import BiasUse, Origin, Site, Uses
from suite.jax.views import Shape, Step, View, apply_steps, entries, in_order, lift, same_entries


class _Meeting(NamedTuple):
    """A leaf, or a piece of a concatenation, as an operand."""

    place: int  # which operand
    origin: Origin
    shape: Shape
    piece: Piece | None


class _Scaled(NamedTuple):
    """A leaf times an activation of its shape, re-indexed: a batch norm's scale / deviation."""

    origin: Origin
    factor: Factor
    first: int  # the value that the product was


@dataclass
class _Scaling:
    """What becomes of such a product: uses row by row, or a reason against them."""

    node: jaxprs.Node
    met: _Meeting
    rows: list[Site] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    is_met: bool = False  # is a scale of the activation


def find_uses(program: jaxprs.Program, leaves: int, roots: Sequence[int | None]) -> Uses:
    """All uses of the first `leaves` inputs of a program on which its `roots` depend."""
    return _Finder(program, leaves, roots).run()


class _Finder:
    def __init__(self, program: jaxprs.Program, leaves: int, roots: Sequence[int | None]) -> None:
        self.program, self.uses = program, Uses(Derivatives(program, program.inputs[leaves:]))
        self.differentiable = jaxprs.differentiable_values(program, program.inputs[:leaves])
        data = {*program.inputs[leaves:], *program.constants}
        self.of_data = jaxprs.dependent_values(program, data)
        # Numbers and random keys have no axis for examples.
        with_axes = {v for v in program.inputs[leaves:] if self.shape(v) and not self.is_raw_key(v)}
        self.of_arguments = jaxprs.dependent_values(program, with_axes)
        keys = {v for v in with_axes if jax.dtypes.issubdtype(self.kind(v), jax.dtypes.prng_key)}
        self.of_examples, weights = of_examples(program, leaves, with_axes - keys)
        self.live = jaxprs.live_values(program, roots)
        self.uses.penalties = find_penalties(
            program,
            program.inputs[:leaves],
            roots[0],
            data=self.of_examples or self.of_data,
            differentiable=self.differentiable,
            live=self.live,
        )
        if self.uses.penalties:
            self.live = jaxprs.live_values(program, roots, self.uses.penalties)
        self.origins: dict[int, Origin] = {}
        for i, value in enumerate(program.inputs[:leaves]):
            shape = program.avals[value].shape
            self.origins[value] = Origin(i, (), (), (), shape, ())
            if 0 in shape:
                self.uses.rule_out(self.origins.pop(value), "nothing: it is empty")
        lengths = {self.shape(value)[0] for value in self.live & with_axes}
        if lengths == {0}:  # nothing would tell what layers make of them
            raise ValueError("arguments of the loss must have at least one example, got empty ones")
        tables = {n.inputs[0] for n in program.nodes if isinstance(n.operation, operations.Gather)}
        self.one_example = self.is_of_one(
            [v for v in program.inputs[leaves:] if v not in weights and v not in tables]
        )
        self.joined: dict[int, tuple[Piece, ...]] = {}
        self.scaled: dict[int, _Scaled] = {}
        self.scalings: dict[int, _Scaling] = {}
        self.early: dict[int, tuple[Site, tuple[Step, ...]]] = {}  # a leaf times rows, re-indexed
        self.products: dict[int, Site] = {}  # a leaf times rows, and sums of such
        self.beside = Beside(program, self.uses, live=self.live, of_data=self.of_data)
        self.late: dict[Any, Site] = {}  # by place: of which site it is what it may be moved to
        self.roots = [root for root in roots if root is not None]
        self.nodes = [n for n in program.nodes if any(out in self.live for out in n.outputs)]
        self.readers = Counter(v for n in self.nodes for v in n.inputs if v is not None)
        self.readers.update(self.roots)
        self.activations = Activations(program, self.readers, self.of_examples)
        arguments = [v for v in program.inputs[leaves:] if v not in weights]
        arguments = [v for v in arguments or sorted(program.constants) if self.shape(v)]
        self.batch = batch_of(program, arguments)
        self.copies = Copies(program, self.uses, leaves=leaves, arguments=arguments, batch=self.batch)
        self.lookups = Lookups(
            program,
            self.uses,
            self.activations,
            of_data=self.of_data,
            of_arguments=self.of_arguments,
            readers=self.readers,
        )
        self.complexes = ComplexWeights(
            program,
            self.uses,
            is_constant=lambda v: v not in self.of_arguments and v not in self.differentiable,
            is_once=self.is_once,
            scales=lambda *given: self.made.axes_of_scale(*given),
            elementwise=lambda node, place, origin, part: self.elementwise(
                node,
                _Meeting(place, origin, self.shape(node.inputs[place]), None),  # type: ignore[arg-type]
                part,
            ),
        )
        self.made = MadeWeights(
            program,
            leaves=leaves,
            roots=self.roots,
            live=self.live,
            differentiable=self.differentiable,
            of_examples=self.of_examples,
            batch=self.batch,
            one_example=self.one_example,
            origins=self.origins,
            is_number=self.activations.is_number,
        )
        self.functions = Functions(
            program,
            differentiable=self.differentiable,
            of_data=self.of_data,
            origins=self.origins,
            is_number=self.activations.is_number,
        )

    def is_of_one(self, arguments: Sequence[int]) -> bool:
        """Whether they are one example: its arrays have a batch axis of length 1.

        Of several most must: masks are of length 1 there, too, and tables of others. A tie is the
        first's. Vectors have that axis where matrices have one of their length, or where all are
        vectors; keys and statistics have none.
        """
        shapes = [self.shape(v) for v in arguments if self.shape(v) and not self.is_raw_key(v)]
        lengths = {shape[0] for shape in shapes if len(shape) > 1} or {shape[0] for shape in shapes}
        single = [shape[0] == 1 for shape in shapes if len(shape) > 1 or shape[0] in {1, *lengths}]
        return 2 * sum(single) + sum(single[:1]) > len(single)

    def is_raw_key(self, value: int) -> bool:
        """Whether an argument holds `jax.random.PRNGKey`s: two or four uint32 that become a key."""
        if self.kind(value) != np.uint32 or self.shape(value)[-1:] not in ((2,), (4,)):
            return False
        made = jaxprs.dependent_values(self.program, {value})
        nodes = [node for node in self.program.nodes if node.name == "random_wrap"]
        return any(v in made for node in nodes for v in node.inputs)

    def run(self) -> Uses:
        for node in self.program.nodes:
            live = any(out in self.live for out in node.outputs)
            live = live and not jaxprs.stops_gradients(self.program, node)
            if live and self.functions.is_within(node):
                continue
            known = [None if v is None else self.origins.get(v) for v in node.inputs]
            if live and self.serve(node, known):
                continue
            if live and self.complexes.meet(node, known):
                continue
            if live and any(v in self.scaled for v in node.inputs):
                self.meet_scaled(node, known)
            if any(v in self.joined for v in node.inputs):
                if live:
                    self.meet_joined(node, known)
            elif not any(known):
                self.activations.follow(node)
                if live:
                    self.lookups.weigh(node)
                    self.lookups.add_up(node)
                    self.scale_later(node)
                    self.join(node)
                else:
                    self.beside.follow(node, known)
            elif live:
                self.meet(node, known)
            else:
                self.meet_beside(node, known)
        for root in self.roots:
            self.uses.rule_out(self.origins.get(root), "being returned")
            self.complexes.rule_out(root, "being returned")
            self.rule_out_pieces(self.joined.get(root, ()))
            if root in self.scaled:
                self.scalings[self.scaled[root].first].others.append("being returned")
        self.uses.held = self.made.own.held()
        self.settle_scalings()
        self.copies.settle(self.repeated)
        self.beside.settle()
        self.beside.leave_out_zeros()
        self.uses.each_its_own = any(map(self.is_of_each, self.nodes))
        for leaf, marked in self.uses.by_hand.items():  # the user vouches for them
            self.uses.sites = [s for s in self.uses.sites if s.leaf != leaf or s in marked]
            self.uses.biases.pop(leaf, None)
        return self.uses

    def shape(self, value: int) -> Shape:
        return self.program.avals[value].shape

    def kind(self, value: int) -> Any:
        return self.program.avals[value].dtype

    def is_once(self, *beside: int | None) -> bool:
        """Whether none of what a leaf is applied to is an example's."""
        return bool(self.of_examples) and not any(v in self.of_examples for v in beside)

    def is_of_each(self, node: jaxprs.Node) -> bool:
        """Whether it is a product of what is an example's, with a gradient, and no sum over all."""
        products = (operations.DotGeneral, operations.Convolve, operations.RaggedDot)
        out = node.outputs[0]
        with_gradient = isinstance(node.operation, products) and out in self.differentiable
        return with_gradient and self.shape(out) != () and not self.is_once(*node.inputs)

    # ---- values that are a leaf's --------------------------------------------------------------

    def meet(self, node: jaxprs.Node, known: list[Origin | None]) -> None:
        """An operation with a view of a leaf."""
        op = node.operation
        name = node.custom.name if node.custom is not None else node.name
        if isinstance(op, operations.Reindex) and known[0] is not None and self.stays_real(node):
            self.origins[node.outputs[0]] = self.copies.moved(node, known[0])
            return
        place = next(i for i, origin in enumerate(known) if origin is not None)
        is_function = any(origin is not None and origin.slope is not None for origin in known)
        function = self.functions.after(node, known) if is_function else None
        if function is not None:
            self.origins[node.outputs[0]] = function
            return
        multiplier = self.multiplier(node, place)
        if multiplier is not None:
            self.origins[node.outputs[0]] = known[place].times(multiplier)  # type: ignore[union-attr]
            return
        if isinstance(op, operations.Add) and None in node.inputs and self.stays_real(node):
            # a leaf and a number, as in 1 + scale, have the leaf's gradient
            self.origins[node.outputs[0]] = known[place]  # type: ignore[assignment]
            return
        made = self.made.after(node, known)
        if made is not None:
            self.origins[node.outputs[0]] = made
            for origin in known:
                if origin is not None and origin.leaf != made.leaf:
                    self.uses.rule_out(origin, f"`{name}`, which scales a weight")
            return
        function = None if is_function else self.functions.after(node, known)
        if function is not None:
            self.origins[node.outputs[0]] = function
            return
        apart = isinstance(op, operations.LoopSlice) and known[0] is not None and not is_function
        if apart and not known[0].widened:  # type: ignore[union-attr]
            part = self.taken_apart(node, known[0], op.length)  # type: ignore[arg-type]
            if part is not None:
                self.origins[node.outputs[0]] = part
                return
        if isinstance(op, operations.ByHand) and (known[1] is None or known[0] is not None):
            raise ValueError(
                "probe(x, w, y): w must be one parameter leaf, transposed or reshaped at most, "
                "and x must not be"
            )
        met = [
            _Meeting(i, origin, self.shape(node.inputs[i]), None)  # type: ignore[arg-type]
            for i, origin in enumerate(known)
            if origin is not None
        ]
        if isinstance(op, operations.Concatenate) and self.concatenated(node, known):
            return
        changed = [one for one in met if one.origin.is_changed or one.origin.repeated is not None]
        if len(changed) == 1 and len(met) == 2:  # scaled codes meet a weight
            self.uses.rule_out(changed[0].origin, f"`{name}` with another leaf")
            met = [one for one in met if one is not changed[0]]
        if len(met) == 1 or isinstance(op, operations.ByHand):
            if isinstance(op, (operations.Add, operations.Multiply, operations.Select)):
                if isinstance(op, operations.Multiply) and self.scale(node, met[0]):
                    return
                if self.elementwise(node, met[0]):
                    return
                place = met[0].place
                if self.made.is_shift(node, place) or self.made.is_perturbed(node, place, met[0].origin):
                    other = node.inputs[1 - place]
                    by_data = other in self.differentiable and other in self.of_arguments
                    origin = met[0].origin._replace(
                        shifted=True, by_data=by_data or met[0].origin.by_data
                    )
                    minus = isinstance(op, operations.Add) and op.signs[place] < 0
                    turned = origin.times(Multiplier(node.path, None, False))
                    self.origins[node.outputs[0]] = turned if minus else origin
                    return
            elif isinstance(op, operations.Divide):
                if self.elementwise(node, met[0]):
                    return
            elif op is not None and not isinstance(op, operations.Concatenate):
                site = self.product(node, met[-1])
                if site is not None:
                    self.uses.sites.append(site)
                    if site.input not in self.differentiable:
                        self.uses.of_data.add(site.use.place)
                    if isinstance(op, operations.ByHand):
                        self.uses.by_hand.setdefault(site.leaf, []).append(site)
                    out = node.outputs[0]
                    self.activations.outputs[out] = self.activations.made_by(site, out)
                    if isinstance(site.use.product, Lookup):
                        self.lookups.found(node, site, met[-1].origin)
                    return
        how = op.how if isinstance(op, operations.Moved) else ""
        if name == "select_n" and not any(v in self.of_data for v in node.inputs[1:]):
            masks = self.made.is_mask_of(node, met[0].place)
            if not masks:
                met = [one._replace(origin=one.origin._replace(repeated=None)) for one in met]
            masks &= not met[0].origin.widened
            how = "as of a `cond` under `vmap`: choose between results, by `jnp.where`"
            how = "which masks it, though not for products alone" if masks else how
        elif name == "dot_general" and len({one.origin.leaf for one in met}) > 1:
            how = "with another parameter"
        for one in met:
            before = "broadcast before" if one.origin.widened else ""
            own = how or ("of a function of it" if one.origin.slope is not None else before)
            self.uses.rule_out(one.origin, f"`{name}`, {own}" if own else f"`{name}`")

    def repeated(self, node: jaxprs.Node, origin: Origin) -> Site | None:
        """The copies of a leaf, which a re-indexing makes, as a use of it."""
        if not self.elementwise(node, _Meeting(0, origin, self.shape(node.outputs[0]), None)):
            return None
        return self.uses.sites.pop()

    def serve(self, node: jaxprs.Node, known: list[Origin | None]) -> bool:
        """Whether an operation computes what a weight is changed by of that weight, as its norm."""
        leaves = self.made.own.serves(node)
        for origin, value in zip(known, node.inputs, strict=True) if leaves else ():
            if origin is not None and origin.leaf not in leaves:
                self.uses.rule_out(origin, f"`{node.name}`, which scales a weight")
            self.rule_out_pieces(self.joined.get(value, ()))  # type: ignore[arg-type]
        return bool(leaves)

    def meet_beside(self, node: jaxprs.Node, known: list[Origin | None]) -> None:
        """An operation that the loss does not depend on: y = x w + b where its derivatives have x."""
        self.beside.follow(node, known)
        op, out = node.operation, node.outputs[0]
        met = [
            _Meeting(i, origin, self.shape(node.inputs[i]), None)  # type: ignore[arg-type]
            for i, origin in enumerate(known)
            if origin is not None
        ]
        made = self.made.after(node, known)
        if isinstance(op, operations.Reindex) and known[0] is not None:
            self.origins[out] = known[0].moved(op.step)
        elif made is not None:
            self.origins[out] = made
        elif len(met) == 1 and (multiplier := self.multiplier(node, met[0].place)) is not None:
            self.origins[out] = met[0].origin.times(multiplier)
        elif isinstance(op, operations.Add):
            self.beside.added(node)
        elif len(met) == 1 and isinstance(op, (operations.DotGeneral, operations.Convolve)):
            site = self.product(node, met[0])
            if site is not None:
                self.beside.found(site)

    def multiplier(self, node: jaxprs.Node, place: int) -> Multiplier | None:
        """The number, without a derivative, that the operand at `place` is multiplied with."""
        op, out = node.operation, node.outputs[0]
        if node.custom is not None or not self.stays_real(node):
            return None
        if isinstance(op, operations.Negate):
            return Multiplier(node.path, None, False)
        if isinstance(op, operations.Add):
            minus = None in node.inputs and op.signs[place] < 0  # 1 - scale
            return Multiplier(node.path, None, False) if minus else None
        divides = isinstance(op, operations.Divide)
        if not isinstance(op, operations.Multiply) and not (divides and place == 0):
            return None
        w, other = node.inputs[place], node.inputs[1 - place]
        assert w is not None
        if self.shape(w) != self.shape(out):
            return None
        if other is not None:
            # A leaf that is broadcast already may be multiplied as an activation.
            widened = w in self.origins and self.origins[w].widened
            if widened or other in self.differentiable or not self.activations.is_number(other):
                return None
        return Multiplier(node.path, 1 - place, divides)

    def known_before(self, multiplier: Multiplier, path: jaxprs.Path) -> bool:
        """Whether a number that is used later can be read when the equation at `path` runs."""
        if multiplier.operand is None:
            return True
        *inside, _ = multiplier.path
        depth = len(inside)  # else it is of a call that has not begun, or that is over
        maker = self.program.makers[multiplier.path][multiplier.operand]
        return path[:depth] == tuple(inside) and maker < path[depth]

    def concatenated(self, node: jaxprs.Node, known: list[Origin | None]) -> bool:
        """Leaves side by side, or one that is broadcast (a class token) beside activations."""
        op, out = node.operation, node.outputs[0]
        shapes = [() if v is None else self.shape(v) for v in node.inputs]
        if None in node.inputs or not self.stays_real(node):
            return False
        if op.stacks:
            new = [(*shape[: op.axis], 1, *shape[op.axis :]) for shape in shapes]
            steps = [("reshape", pair) for pair in zip(shapes, new, strict=True)]
            known = [k and k.moved(step) for k, step in zip(known, steps, strict=True)]
            shapes = new
        found = pieces(known, op.axis, [shape[op.axis] for shape in shapes])
        if all(known) and not any(piece.origin.widened for piece in found):
            self.joined[out] = found
            return True
        whole = self.shape(out)
        self.elementwise_or_none(node, [_Meeting(0, p.origin, p.shape(whole), p) for p in found])
        return True

    def elementwise_or_none(self, node: jaxprs.Node, met: list[_Meeting]) -> None:
        for one in met:
            if not self.elementwise(node, one):
                self.uses.rule_out(one.origin, "`concatenate`")

    def meet_joined(self, node: jaxprs.Node, known: list[Origin | None]) -> None:
        """An operation with several leaves side by side: with each of them, or with none."""
        op, out = node.operation, node.outputs[0]
        places = [i for i, v in enumerate(node.inputs) if v in self.joined]
        joined = self.joined[node.inputs[places[0]]]  # type: ignore[index]
        if isinstance(op, operations.Reindex) and self.stays_real(node):
            after = moved(joined, op.step)
            if after is not None:
                self.joined[out] = after
                return
        multiplier = self.multiplier(node, places[0])
        if multiplier is not None:
            self.joined[out] = tuple(p._replace(origin=p.origin.times(multiplier)) for p in joined)
            return
        if len(places) == 1 and not any(known):
            whole = self.shape(node.inputs[places[0]])  # type: ignore[arg-type]
            met = [_Meeting(places[0], p.origin, p.shape(whole), p) for p in joined]
            if isinstance(op, operations.Add):
                self.elementwise_or_none(node, met)
                return
            if isinstance(op, (operations.DotGeneral, operations.Convolve, operations.Gather)):
                sites = [self.product(node, one) for one in met]
                if None not in sites:
                    self.uses.sites += sites  # type: ignore[arg-type]
                    self.activations.parted[out] = tuple(self.activations.made_by(s, out) for s in sites)
                    return
        for i, v in enumerate(node.inputs):
            self.uses.rule_out(known[i], "`concatenate`")
            self.rule_out_pieces(self.joined.get(v, ()))  # type: ignore[arg-type]

    def scale(self, node: jaxprs.Node, met: _Meeting) -> bool:
        """Whether a leaf times an activation of its own shape may yet be multiplied with rows."""
        other, out = node.inputs[1 - met.place], node.outputs[0]
        alike = other is not None and met.shape == self.shape(other)
        if not alike or met.origin.widened or node.custom is not None or not self.stays_real(node):
            return False
        self.scaled[out] = _Scaled(met.origin, Factor(node.path, 1 - met.place, ()), out)
        self.scalings[out] = _Scaling(node, met)
        return True

    def meet_scaled(self, node: jaxprs.Node, known: list[Origin | None]) -> None:
        """What such a product is multiplied with, row by row; for all else it is an activation."""
        op = node.operation
        places = [i for i, v in enumerate(node.inputs) if v in self.scaled]
        found = self.scaled[node.inputs[places[0]]]  # type: ignore[index]
        scaling, (path, place, steps) = self.scalings[found.first], found.factor
        beside = len(places) == 1 and node.path[:-1] == path[:-1] and self.stays_real(node)
        if isinstance(op, operations.Reindex) and beside:
            after = steps if op.step is None else (*steps, op.step)
            moved_on = found.origin.moved(op.step)
            self.scaled[node.outputs[0]] = found._replace(
                origin=moved_on, factor=Factor(path, place, after)
            )
            return
        if isinstance(op, operations.Multiply) and beside and not any(known):
            shape = self.shape(node.inputs[places[0]])  # type: ignore[arg-type]
            if self.elementwise(node, _Meeting(places[0], found.origin, shape, None)):
                site = self.uses.sites.pop()
                site = site._replace(use=site.use._replace(factor=found.factor))
                scaling.rows.append(site)
                self.activations.outputs[site.value] = self.activations.made_by(site, site.value)
                return
        for i in places:
            scaling = self.scalings[self.scaled[node.inputs[i]].first]  # type: ignore[index]
            if not scaling.rows and not scaling.others:  # a shift may follow
                scaling.is_met = self.elementwise(scaling.node, scaling.met)
            scaling.others.append(f"`{node.name}`, times an array of its shape")

    def settle_scalings(self) -> None:
        for scaling in self.scalings.values():
            if scaling.rows and not scaling.others:
                self.uses.sites += scaling.rows
            elif not scaling.is_met and not self.elementwise(scaling.node, scaling.met):
                for why in dict.fromkeys(scaling.others):
                    self.uses.rule_out(scaling.met.origin, why)

    def scale_later(self, node: jaxprs.Node) -> None:
        """(scale * 1/σ) * (x - mean) is scale * ((x - mean) * 1/σ), which a shift may be added to."""
        op, out = node.operation, node.outputs[0]
        for place, value in enumerate(node.inputs):
            known = None if value is None else self.early.get(value)
            if value is None or known is None or self.readers[value] != 1 or node.custom is not None:
                continue
            site, steps = known
            path, beside = site.use.path, site.loops == node.loops and self.stays_real(node)
            if not beside or path[:-1] != node.path[:-1]:
                continue
            if isinstance(op, operations.Reindex):
                self.early[out] = site, steps if op.step is None else (*steps, op.step)
            elif isinstance(op, operations.Multiply) and node.inputs[1 - place] is not None:
                use, product = site.use, site.use.product
                assert isinstance(product, Elementwise)
                whole = self.shape(out)
                if self.shape(value) != whole:
                    steps = (*steps, ("broadcast", (whole, tuple(range(len(whole))))))
                product = product._replace(steps=(*product.steps, *steps))
                rows = math.prod(whole) // max(math.prod(product.shape), 1)
                factor = Factor(path, use.x_operand, steps)  # type: ignore[arg-type]
                use = use._replace(path=node.path, out=0, x_operand=1 - place, product=product)
                once = use.once and self.is_once(node.inputs[1 - place])
                use = use._replace(factor=factor, rows=rows, examples=rows, once=once)
                late = site._replace(use=use, value=out)
                self.activations.outputs[out] = self.activations.made_by(late, out)
                self.late[use.place] = site
            return

    def join(self, node: jaxprs.Node) -> None:
        """Have products of a leaf that nothing but this sum reads be one use."""
        if not isinstance(node.operation, operations.Add) or node.custom is not None:
            return
        one, other = (None if v is None else self.products.get(v) for v in node.inputs)
        if one is None or other is None or {self.readers[site.value] for site in (one, other)} != {1}:
            return
        places = [i for i, site in enumerate(self.uses.sites) if site is one or site is other]
        site = one_use(node, (one, other)) if len(places) == 2 else None
        if site is not None:
            self.uses.sites[places[0]] = self.products[site.value] = site
            del self.uses.sites[places[1]]
            self.activations.outputs[site.value] = self.activations.made_by(site, site.value)

    def rule_out_pieces(self, joined: Sequence[Piece]) -> None:
        for piece in joined:
            self.uses.rule_out(piece.origin, "`concatenate`")

    def stays_real(self, node: jaxprs.Node) -> bool:
        return jaxprs.dtype_is_float(self.program.avals[node.outputs[0]])

    def taken_apart(self, node: jaxprs.Node, origin: Origin, length: int) -> Origin | None:
        """The part of a stack that a loop's step takes; None: it was moved after it was changed."""
        if any(made.before < len(origin.inner) for made in origin.made):
            return None
        steps = origin.steps
        part = self.shape(node.outputs[0])
        path = node.loops[-1][0]
        stack, scans = (*origin.stack, length), (*origin.scans, path)
        made = tuple(one.taken_apart(path) for one in origin.made)
        return Origin(origin.leaf, steps, stack, scans, part, (), origin.multipliers, made=made)

    def product(self, node: jaxprs.Node, met: _Meeting) -> Site | None:
        w, origin, operand, piece = met
        if origin.widened or origin.slope is not None:
            return None
        found = self.spec(node, w, operand)
        if found is None:
            return None
        product, steps, axes, x_place, checked = found
        if any(not jaxprs.dtype_is_float(self.program.avals[v]) for v in checked):
            return None
        where = self.where(node, x_place)
        if where is None:
            return None
        k = len(origin.stack)
        lifted = tuple(lift(step, origin.stack) for step in steps)
        made = seen_through(origin, steps, axes)
        if made is None or (
            origin.made and (piece is not None or isinstance(product, Lookup | Grouped))
        ):
            return None
        scales, masks = made
        groups, out, into = (tuple(a + k for a in group) for group in axes)
        view = View((*origin.steps, *lifted), ((*range(k), *groups), out, into))
        shape = apply_steps(np.empty(operand, np.int8), steps).shape
        inner, d_out, d_in = (math.prod(shape[a] for a in group) for group in axes)
        value, x = node.outputs[0], node.inputs[x_place]
        assert x is not None
        if origin.by_data and self.is_once(x):
            return None
        y_shape, reads, owns = self.shape(value), None, None
        if piece is not None:
            along = windows(node.operation, product, found[2], piece)
            if along is None:
                return None
            reads, owns = window(self.shape(x), along[0], piece), window(y_shape, along[1], piece)
            y_shape = y_shape if along[1] is None else piece._replace(axis=along[1]).shape(y_shape)
        rows = math.prod(y_shape) // max((1 if isinstance(product, Grouped) else inner) * d_out, 1)
        path, out_index, x_operand = where
        use = Use(path, out_index, x_operand, product, False, origin.scans, origin.stack, inner, rows)
        counted = rows if isinstance(product, Lookup) else example_count(product, self.shape(x))
        use = use._replace(
            x_window=reads,
            y_window=owns,
            examples=min(counted, rows),
            multipliers=origin.multipliers,
            once=self.is_once(x),
            row_scales=scales,
            masks=masks,
            sizes=(node.path, 2) if isinstance(product, Grouped) else None,
        )
        hot = isinstance(product, Dense) and product.x_axes[2] == (self.activations.one_hot.get(x, -1),)
        return Site(origin.leaf, use, view, (d_out, d_in), hot, x, value, node.loops)

    def spec(
        self, node: jaxprs.Node, w: int, operand: Shape
    ) -> tuple[Product, tuple[Step, ...], Any, int, tuple[int, ...]] | None:
        """(product, steps to the view, its axes, operand of x, values that must be real)."""
        op = node.operation
        if any(v is None for v in node.inputs[:2]):
            return None
        given: tuple[Any, ...] = node.inputs
        real = given[w], *node.outputs  # and not x, which may be counts
        if isinstance(op, operations.DotGeneral):

            def axes(i: int, ndim: int) -> tuple[Shape, Shape, Shape]:
                batch, contracted = op.batch[i], op.contracted[i]
                free = (a for a in range(ndim) if a not in batch and a not in contracted)
                return batch, tuple(free), contracted

            x_axes = axes(1 - w, len(self.shape(given[1 - w])))
            batch, free, contracted = axes(w, len(operand))
            dense = Dense(x_axes, len(free), w == 1)
            return dense, (), (batch, free, contracted), 1 - w, real
        if isinstance(op, operations.ByHand):
            x_shape = self.shape(given[0])
            if len(operand) != 2 or x_shape[-1:] != operand[:1]:
                raise ValueError(
                    f"probe(x, w, y) needs x (..., d_in) and w (d_in, d_out), "
                    f"got {x_shape} and {operand}"
                )
            last = len(x_shape) - 1
            hand = Dense(((), tuple(range(last)), (last,)), 1, True)
            return hand, (), ((), (1,), (0,)), 0, real
        if isinstance(op, operations.Convolve) and w == 1:
            kernel = tuple(operand[axis] for axis in op.w_spec[2:])
            convolution = Convolution(
                op.x_spec,
                op.out_spec,
                kernel,
                op.stride,
                op.padding,
                op.x_dilation,
                op.dilation,
                op.groups,
            )
            ordered = tuple(operand[axis] for axis in op.w_spec)
            split = (op.groups, ordered[0] // op.groups, *ordered[1:])
            steps: tuple[Step, ...] = (("transpose", (op.w_spec,)), ("reshape", (ordered, split)))
            return convolution, steps, ((0,), (1,), tuple(range(2, len(split)))), 0, real
        known = isinstance(op, operations.RaggedDot) and given[2] is not None
        if known and w == 1 and node.custom is None:  # whose inside is not run
            (columns,) = {0, 1, 2} - {op.group, op.contracted}
            of_stack = (op.group,), (columns,), (op.contracted,)
            return Grouped(given[2]), (), of_stack, 0, real
        if isinstance(op, operations.Gather) and w == 0:
            others = tuple(axis for axis in range(len(operand)) if axis != op.axis)
            lookup = Lookup(operand[op.axis], op.offset_axes, op.clip, op.component)
            return lookup, (), ((), others, (op.axis,)), 1, real
        return None

    def where(
        self, node: jaxprs.Node, x_place: int | None
    ) -> tuple[jaxprs.Path, int, int | None] | None:
        """(path, output, operand) of a probe; a function with its own derivative is probed outside."""
        if node.custom is None:
            return node.path, 0, x_place
        x = None if x_place is None else node.inputs[x_place]
        custom = node.custom
        if node.outputs[0] not in custom.outputs or (x is not None and x not in custom.inputs):
            return None
        if self.readers[node.outputs[0]] != 1:
            return None
        operand = None if x is None else custom.inputs.index(x)
        return custom.path, custom.outputs.index(node.outputs[0]), operand

    def elementwise(self, node: jaxprs.Node, met: _Meeting, part: ComplexPart | None = None) -> bool:
        """A leaf added to, multiplied with or put beside something larger; whether it is that.

        Or in the place of something, where that is activations.

        Args:
            part: which the leaf is of a complex operand.
        """
        p, origin, operand, piece = met
        repeats = isinstance(node.operation, operations.Reindex)
        beside = repeats or isinstance(node.operation, operations.Concatenate)
        chosen = isinstance(node.operation, operations.Select)
        operands, at = (node.inputs[1:], p - 1) if chosen else (node.inputs, p)
        if chosen and (len(operands) != 2 or node.inputs[0] is None):
            return False
        other = None if beside else operands[1 - at]
        if chosen and other not in self.of_data:
            return False
        value = node.outputs[0]
        shape = self.shape(value) if piece is None else piece.shape(self.shape(value))
        inner = origin.inner
        if operand != shape:
            axes = tuple(range(len(shape))) if operand else ()
            inner = (*inner, ("broadcast", (shape, axes)))
        is_quotient = isinstance(node.operation, operations.Divide)
        divides = is_quotient and p == 1
        multiplies = is_quotient or isinstance(node.operation, operations.Multiply)
        signs = node.operation.signs if isinstance(node.operation, operations.Add) else (1, 1)
        real = [v for v in (*operands, value) if v is not None and part is None]
        if any(not jaxprs.dtype_is_float(self.program.avals[v]) for v in real):
            return False
        if multiplies and other is None:
            return False
        by_itself = origin.slope is not None or is_quotient
        if by_itself and node.custom is not None:  # whose inside is not run
            return False
        bias_of = None
        is_sum = not multiplies and not chosen and other is not None and signs == (1, 1) and part is None
        if is_sum and not by_itself:
            assert other is not None
            bias_of = self.bias(node, other, origin, inner, piece)
        # An entry for each row, or one for all of them? Of one example only the axis tells; of more, an
        # axis of length 1 is no batch's, and what has it is still to meet the rows.
        of_one = self.one_example and shape[:1] == (1,) and (beside or other is not None)
        shared = math.prod(shape) > origin.size or of_one
        if (bias_of is None and not shared) or origin.made:
            return False
        where = self.where(node, 0 if chosen else 1 - p if multiplies else None)
        if where is None:
            return False
        path, out_index, x_operand = where
        product = Elementwise(origin.part, inner, multiplies, signs[at], at if chosen else None, part)
        owns = None if piece is None else window(self.shape(value), piece.axis, piece)
        size = math.prod(origin.part)
        rows = math.prod(shape) // max(origin.size, 1)
        use = Use(
            path, out_index, x_operand, product, False, origin.scans, origin.stack, 1, rows, None, owns
        )
        once = self.is_once(*(node.inputs if beside else (other,))) and not repeats
        use = use._replace(examples=rows, multipliers=origin.multipliers, once=once)
        if origin.slope is not None:
            use = use._replace(sloped=Sloped(origin.slope, inner[origin.sloped :]))
        if is_quotient:
            use = use._replace(divided_by=(node.path, 1) if divides else None, inverts=not divides)
        k = len(origin.stack)
        view = View(origin.outer, (tuple(range(k)), tuple(range(k, k + len(origin.part))), ()))
        site = Site(origin.leaf, use, view, (size, 1), False, None, value, node.loops, origin.repeated)
        if bias_of is None:
            self.uses.sites.append(site)
            if multiplies and piece is None and node.custom is None and part is None:
                self.activations.outputs[value] = self.activations.made_by(site, value)
                if not is_quotient:
                    self.products[value] = site
                if not by_itself:
                    self.early[value] = site, ()
        else:
            added_to, start = bias_of
            if added_to.use.place in self.late:
                early = self.late.pop(added_to.use.place)
                self.uses.sites = [added_to if one is early else one for one in self.uses.sites]
            self.uses.biases.setdefault(origin.leaf, []).append(BiasUse(added_to, site, start))
        return True

    def bias(
        self, node: jaxprs.Node, other: int, origin: Origin, inner: tuple[Step, ...], piece: Piece | None
    ) -> tuple[Site, int] | None:
        """The product to whose output, that nothing else reads, a leaf is added feature by feature.

        And where in the leaf the entries begin that are.
        """
        output = self.activations.outputs.get(other)
        if piece is not None:  # the kernel beside the others where this leaf is beside the others
            own = window(self.shape(node.outputs[0]), piece.axis, piece)
            parts = [o for o in self.activations.parted.get(other, ()) if o.site.use.y_window == own]
            output = parts[0] if len(parts) == 1 else None
        if (
            output is None
            or self.readers[other] != 1
            or self.shape(other) != self.shape(node.outputs[0])
        ):
            return None
        site = output.site
        if isinstance(site.use.product, Grouped):
            return None
        if site.loops != node.loops or site.use.scans != origin.scans or node.custom is not None:
            return None
        if not all(self.known_before(each, site.use.path) for each in origin.multipliers):
            return None
        of_scale = isinstance(site.use.product, Elementwise)
        count = math.prod(origin.part) if of_scale else origin.size
        if count != site.use.groups * site.block[0]:
            return None
        leaf = self.shape(self.program.inputs[origin.leaf])
        index = entries(leaf, origin.outer, origin.stack, inner)
        k = len(origin.stack)
        if of_scale:  # whose shift this is
            scale, steps = self.shape(self.program.inputs[site.leaf]), site.view.steps
            scaled = entries(scale, steps, site.use.lengths, site.use.product.steps)
            same = in_order(scale, steps) and in_order(leaf, origin.outer)
            found = same and same_entries(scaled, index, output.axes, k)
            return (site, 0) if found else None
        features = feature_axes(site.use.product)
        rows = [i for i, axis in enumerate(output.axes) if axis not in features]
        if 0 in index.shape:
            return None
        if any(index.shape[i + k] != 1 and index.strides[i + k] != 0 for i in rows):
            return None
        index = index[(..., *(0 if i in rows else slice(None) for i in range(len(output.axes))))]
        there = [axis for axis in output.axes if axis in features]
        order = [there.index(axis) + k for axis in features if axis in there]
        index = index.transpose([*range(k), *order])
        index = index.ravel()
        found = np.array_equal(index, index[0] + np.arange(index.size))
        return (site, int(index[0])) if found else None
