"""The plan: which layers K-FAC covers, and the report that says so."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from suite.core.routing import Route, Routing, describe_factors
from suite.jax import jaxprs
from suite.jax.dtypes import at_least_float32
from suite.jax.layers import Elementwise, Grouped, Layer, LayerSums, Lookup, empty_sums, unit_rows
from suite.jax.uses import BiasUse, Site, Uses
from suite.jax.views import Signature, overlap, signature

Require = Literal["all", "most"] | None


class Last(NamedTuple):
    """A covered layer whose product comes last where those before it in the list do not run."""

    layer: str
    terms_per_row: float  # the loss has as many terms as the very last product has rows
    terms: float  # how many those are


@dataclass(frozen=True)
class Plan:
    """What K-FAC covers of a loss function's parameters. `print(plan)` is the routing report, and what
    the loss is taken to be a mean or sum of.
    """

    layers: tuple[Layer, ...]
    last: tuple[Last, ...]
    sampled: bool  # whether statistics are of the model's predictions, not of the loss
    terms_given: bool  # whether `value_and_grad` was told how many terms the loss has
    names: tuple[str, ...]  # of all parameter leaves, in order
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    treedef: Any
    routing: Routing
    penalized: tuple[str, ...] = ()  # parameters of which the loss has terms without examples

    def __str__(self) -> str:
        said = str(self.routing)
        if self.penalized:
            own = ", ".join(self.penalized)
            said += (
                f"\nin the gradients only: terms of the loss made of nothing but parameters, of {own}"
            )
        if self.terms_given:
            return f"{said}\nterms of the loss: those that `terms` gives"
        if self.sampled or not self.last:
            return said
        name, _, terms = self.last[0]
        said += f"\nterms of the loss: {terms:g}, by the layer that runs last, {name}"
        (layer,) = (layer for layer in self.layers if layer.name == name)
        if all(use.once for use in layer.uses):
            said += ", which is computed once for all examples: give `terms` if that is wrong"
        return said

    def covered(self) -> list[bool]:
        """For each parameter leaf, whether K-FAC preconditions it."""
        leaves = {leaf for layer in self.layers for leaf in (layer.leaf, layer.bias)}
        return [place in leaves for place in range(len(self.names))]

    def dtype(self, layer: Layer) -> Any:
        """Of a layer's statistics."""
        return at_least_float32(self.dtypes[layer.leaf])

    def no_statistics(self, *, products: bool = False) -> Statistics:
        """Statistics of nothing: for the branch of a `lax.cond` that computes none.

        Args:
            products: with those of EKFAC, as of a `value_and_grad` that is given `bases`.
        """
        layers = {layer.name: empty_sums(layer, self.dtype(layer), products) for layer in self.layers}
        return Statistics(layers, jnp.zeros((), jnp.float32), self.sampled)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["layers", "terms"], meta_fields=["sampled"]
)
@dataclass(frozen=True)
class Statistics:
    """What all layers saw, a pytree: to be averaged as gradients are."""

    layers: dict[str, LayerSums]
    terms: jax.Array  # (): how many terms the loss has
    sampled: bool = False  # whether they are of the model's predictions, not of the loss

    def __getitem__(self, name: str) -> LayerSums:
        return self.layers[name]


def make_plan(
    program: jaxprs.Program,
    uses: Uses,
    params: Any,
    *,
    max_factor_size: int,
    plain: Sequence[str],
    sampled: bool,
    reduce: bool,
    require: Require,
    terms_given: bool,
) -> Plan:
    """Join uses to layers, and report."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = tuple(jax.tree_util.keystr(path) or "params" for path, _ in with_paths)
    leaves = [leaf for _, leaf in with_paths]
    shapes = tuple(tuple(np.shape(leaf)) for leaf in leaves)
    dtypes = tuple(jnp.result_type(leaf) for leaf in leaves)
    unknown = sorted(set(plain) - set(names))
    if unknown:
        raise ValueError(f"plain must name parameters, of {list(names)}, got {unknown}")
    assembly = _Assembly(uses, names, shapes, dtypes, max_factor_size, set(plain))
    layers = assembly.layers()
    products = [use for layer in layers if layer.kind != "elementwise" for use in layer.uses]
    of_each = uses.each_its_own or not all(use.once for use in products)
    changed, penalized = set(uses.held.values()), frozenset[int]().union(*uses.penalties.values())
    reasons = dict.fromkeys(penalized, "used by terms of the loss that are made of parameters alone")
    reasons |= assembly.reasons
    routes = tuple(
        _route(i, names, shapes, layers, reasons.get(i, "not used"), of_each, i in changed)
        for i in range(len(leaves))
    )
    routing = Routing(routes)
    routing.require_preconditioned("K-FAC")
    _require(require, routing)
    last = _last(uses, layers, reduce)
    said = tuple(names[leaf] for leaf in sorted(penalized))
    return Plan(layers, last, sampled, terms_given, names, shapes, dtypes, treedef, routing, said)


class _Assembly:
    def __init__(
        self, uses: Uses, names: Any, shapes: Any, dtypes: Any, max_factor_size: int, plain: set[str]
    ) -> None:
        self.uses, self.names, self.shapes, self.dtypes = uses, names, shapes, dtypes
        self.max_factor_size, self.plain = max_factor_size, plain
        self.reasons: dict[int, str] = {}

    def layers(self) -> tuple[Layer, ...]:
        sites: dict[int, list[Site]] = {}
        for site in self.uses.sites:
            sites.setdefault(site.leaf, []).append(site)
        products = {
            leaf: own
            for leaf, own in sites.items()
            if not any(isinstance(s.use.product, Elementwise) for s in own)
        }
        blocks: dict[int, list[list[tuple[Site, bool]]]] = {}
        for leaf, own in products.items():
            reason = self.excluded(leaf, own)
            found = [] if reason else self.blocks(leaf, own)
            if found:
                blocks[leaf] = found
            else:
                self.reasons[leaf] = reason or "used in ways that overlap without being equal"
        biases, units = self.biases(blocks), self.units(sites)
        beside = {*(bias for bias, _ in biases.values()), *units.values()}
        alone = [bias for bias in self.uses.biases if bias not in beside and bias not in products]
        layers = [
            self.layer(leaf, number if len(found) > 1 else None, block, biases.get((leaf, number)))
            for leaf, found in blocks.items()
            for number, block in enumerate(found)
        ]
        layers += [self.unit(leaf, sites[leaf], bias) for leaf, bias in units.items()]
        for leaf in dict.fromkeys([*sites, *alone]):
            if leaf in products or leaf in units:
                continue
            own = [*sites.get(leaf, ()), *(use.instead for use in self.uses.biases.get(leaf, ()))]
            reason = self.excluded(leaf, own)
            if not reason and any(not isinstance(s.use.product, Elementwise) for s in own):
                reason = "a layer's weight, but also added or multiplied elementwise"
            alike: dict[Signature | None, list[tuple[Site, bool]]] = {}
            for s in own:
                alike.setdefault(signature(self.shapes[leaf], s.view), []).append((s, False))
            views = [block[0][0].view for block in alike.values()]
            if not reason and len(views) > 1 and (None in alike or overlap(self.shapes[leaf], views)):
                reason = "used in ways that overlap without being equal"
            if reason:
                self.reasons[leaf] = reason
                continue
            for number, block in enumerate(alike.values()):
                layers.append(self.layer(leaf, number if len(alike) > 1 else None, block, None))
        for leaf in self.uses.others:
            if leaf not in self.reasons and leaf not in sites and leaf not in self.uses.biases:
                self.reasons[leaf] = self.excluded(leaf, [])
        layers.sort(key=lambda layer: (layer.leaf, layer.name))
        return self.shared(layers)

    def excluded(self, leaf: int, sites: list[Site]) -> str:
        """Why a leaf is not covered, whatever its products are; '' if nothing speaks against it."""
        if self.names[leaf] in self.plain:
            return "named in `plain`"
        if not jnp.issubdtype(self.dtypes[leaf], jnp.floating):
            is_complex = jnp.issubdtype(self.dtypes[leaf], jnp.complexfloating)
            instead = ": keep real and imaginary parts as two leaves" if is_complex else ""
            return f"{self.dtypes[leaf]} parameters are not covered{instead}"
        products = [s for s in sites if not isinstance(s.use.product, Elementwise)]
        if leaf in self.uses.others and leaf not in self.uses.by_hand:
            kinds = ", ".join(dict.fromkeys(self.uses.others[leaf]))
            if not sites:
                own = ", whose derivative is a rule of its own" if "`custom_" in kinds else ""
                return f"used by {kinds}{own}"
            how = "a layer's weight" if products else "added or multiplied elementwise"
            return f"{how}, but also used by {kinds}"
        if products and leaf in self.uses.biases:
            return "both weight and bias"
        if any(s.use.once for s in sites if isinstance(s.use.product, Elementwise)):
            return "applied elementwise once for all examples"
        return ""

    def blocks(self, leaf: int, sites: list[Site]) -> list[list[tuple[Site, bool]]]:
        """Sites by what they use of the leaf, each with whether it is used transposed."""
        found: list[tuple[Signature | None, list[tuple[Site, bool]]]] = []
        for site in sites:
            key = signature(self.shapes[leaf], site.view)
            for known, members in found:
                if key is not None and known is not None and key in (known, known.transposed()):
                    # A square view without an order of its own may be both: then it is not transposed.
                    members.append((site, key != known))
                    break
                if key is None and site.view == members[0][0].view:
                    members.append((site, False))
                    break
            else:
                found.append((key, [(site, False)]))
        views = [members[0][0].view for _, members in found]
        if len(views) > 1 and overlap(self.shapes[leaf], views):
            return []
        return [_oriented(members) for _, members in found]

    def biases(
        self, blocks: dict[int, list[list[tuple[Site, bool]]]]
    ) -> dict[tuple[int, int], tuple[int, int]]:
        """(weight leaf, number of its block) -> (bias leaf, its first entry there).

        It is where nothing but uses of the block has the bias, nor another one. Where layers have parts
        of one leaf, all of them must be so.

        Uses without it, as those in derivatives of a layer are, have a 0 in its place. The block's
        orientation becomes that of the uses with it. Where uses as W have one and those as Wᵀ another,
        as in a tied autoencoder, it is that of the uses that run first.
        """
        at = {
            site.use.place: ((leaf, number), turned)
            for leaf, found in blocks.items()
            for number, block in enumerate(found)
            for site, turned in block
        }
        found: dict[tuple[int, int], tuple[int, int]] = {}
        turned: list[tuple[int, int]] = []
        for bias, bias_uses in self.uses.biases.items():
            parts: dict[int, list[BiasUse]] = {}
            for use in bias_uses:
                parts.setdefault(use.start, []).append(use)
            own = {start: self.block_of(uses, at) for start, uses in parts.items()}
            places = [of_part[0] for of_part in own.values() if of_part is not None]
            if len({*places}) < len(own) or self.excluded(bias, []):
                continue
            ends = sorted((start, uses[0].end) for start, uses in parts.items())
            apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
            elsewhere = any(site.leaf == bias for site in self.uses.sites)
            products = [s.use.product for leaf, number in places for s, _ in blocks[leaf][number]]
            if not apart or elsewhere or any(isinstance(product, Lookup) for product in products):
                continue
            # Beside rows that are multiplied it is no column, for it is not.
            if not any(scale.of_outputs for u in bias_uses for scale in u.site.use.row_scales):
                found |= {place: (bias, start) for start, place in zip(own, places, strict=True)}
            turned += [of_part[0] for of_part in own.values() if of_part is not None and of_part[1]]
        for leaf, number in turned:
            members = [(s, not transposed) for s, transposed in blocks[leaf][number]]
            blocks[leaf][number] = sorted(members, key=lambda member: member[1])
        return found

    def block_of(
        self, bias_uses: list[BiasUse], at: Mapping[Any, tuple[tuple[int, int], bool]]
    ) -> tuple[tuple[int, int], bool] | None:
        """The block whose bias these uses add, and whether it is another way round; None: there is none.

        Args:
            at: by place of a product its block, and whether it is used transposed.
        """
        places = {use.site.use.place for use in bias_uses}
        owners = {at[place][0] for place in places if place in at}
        if not places <= at.keys() or len(owners) != 1:
            return None
        owner, after = next(iter(owners)), {at[place][1] for place in places}
        first = min(use.site.use.path for use in bias_uses)
        rivals = [
            use.site.use
            for uses in self.uses.biases.values()
            for use in uses
            if not any(use is one for one in bias_uses) and use.site.leaf == owner[0]
        ]
        rivals = [use for use in rivals if use.place not in at or at[use.place][0] == owner]
        if any(use.place not in at or at[use.place][1] in after or use.path < first for use in rivals):
            return None
        return (owner, after == {True}) if len(after) == 1 else None

    def units(self, sites: dict[int, list[Site]]) -> dict[int, int]:
        """scale leaf -> shift leaf, where the shift follows every use of the scale and nothing else."""
        found: dict[int, int] = {}
        for shift, uses in self.uses.biases.items():
            scale = uses[0].site.leaf
            own = sites.get(scale, [])
            places, shifted = ({s.use.place for s in some} for some in (own, [u.site for u in uses]))
            elsewhere = shift in sites or scale in found or scale in self.uses.biases
            elementwise = all(isinstance(site.use.product, Elementwise) for site in own)
            if places != shifted or elsewhere or not elementwise:
                continue
            alike = len({signature(self.shapes[scale], site.view) for site in own}) == 1
            same = alike and self.dtypes[scale] == self.dtypes[shift]
            if same and not self.excluded(scale, own) and not self.excluded(shift, []):
                found[scale] = shift
        return found

    def unit(self, leaf: int, sites: list[Site], shift: int) -> Layer:
        """A block for each entry of a scale, with its shift."""
        site = sites[0]
        count = site.block[0]
        after = {u.site.use.place: u.instead.use.multipliers for u in self.uses.biases[shift]}
        uses = []
        for use in (s.use for s in sites):
            assert isinstance(use.product, Elementwise)
            # What `capture._terms` takes the mean of, over all entries.
            rows, examples = (float(np.mean(unit_rows(use.product, reduce))) for reduce in (False, True))
            use = use._replace(groups=count, rows=rows, examples=examples)  # type: ignore[arg-type]
            uses.append(use._replace(biased=True, bias_multipliers=after[use.place]))
        view = site.view._replace(axes=((*site.view.axes[0], *site.view.axes[1]), (), ()))
        groups = count * math.prod(site.use.lengths)
        return Layer(
            self.names[leaf], leaf, view, shift, groups, (2, 1), (False, True), tuple(uses), None
        )

    def layer(
        self,
        leaf: int,
        number: int | None,
        block: list[tuple[Site, bool]],
        bias_at: tuple[int, int] | None,
    ) -> Layer:
        """`bias_at`: the bias's leaf, and its first entry there."""
        site, (bias, start) = block[0][0], bias_at or (None, 0)
        d_out, d_in = site.block
        groups = site.use.groups * int(np.prod(site.use.lengths, dtype=int))
        sizes = (d_in + (bias is not None), d_out)
        main = [s for s, transposed in block if not transposed]
        other = [s for s, transposed in block if transposed]

        def counts(sites: list[Site]) -> bool:
            """Whether all rows are one-hot. Tangents may be, e_1, beside rows of numbers."""
            looked_up = any(isinstance(s.use.product, Lookup) for s in sites)
            return looked_up or (bool(sites) and all(s.one_hot for s in sites))

        elementwise = isinstance(site.use.product, Elementwise)
        diagonal = (
            sizes[0] > self.max_factor_size or counts(main) or elementwise,
            sizes[1] > self.max_factor_size or counts(other) or elementwise,
        )
        sums = () if bias is None else self.uses.biases[bias]
        beside = {u.site.use.place: u.instead.use.multipliers for u in sums}
        uses = tuple(
            s.use._replace(
                transposed=transposed,
                biased=s.use.place in beside,
                bias_multipliers=beside.get(s.use.place, ()),
            )
            for s, transposed in block
        )
        name = self.names[leaf] if number is None else f"{self.names[leaf]} part {number}"
        return Layer(name, leaf, site.view, bias, groups, sizes, diagonal, uses, None, start)

    def shared(self, layers: list[Layer]) -> tuple[Layer, ...]:
        """Layers that read the same input share one A: the first in the program has it."""
        order = {s.use.place: i for i, s in enumerate(self.uses.sites)}
        site_of = {s.use.place: s for s in self.uses.sites}
        first: dict[Any, str] = {}
        leaders: dict[str, str] = {}
        for layer in sorted(layers, key=lambda layer: order.get(layer.uses[0].place, len(order))):
            use = layer.uses[0]
            if len(layer.uses) > 1 or isinstance(use.product, (Elementwise, Lookup)):
                continue
            by_inputs = any(not scale.of_outputs for scale in use.row_scales)
            if by_inputs or (use.chains and layer.bias is not None):  # the rows of its A are multiplied
                continue
            site = site_of[use.place]
            product = use.product._replace(**_without_output(use.product))
            alike = (product, site.loops, use.scans, layer.sizes[0], layer.groups, layer.diagonal[0])
            key = (site.input, use.x_window, alike, layer.bias is not None, self.dtypes[layer.leaf])
            leader = first.setdefault(key, layer.name)
            if leader != layer.name:
                leaders[layer.name] = leader
        return tuple(layer._replace(input_of=leaders.get(layer.name)) for layer in layers)


def _without_output(product: Any) -> dict[str, Any]:
    """What two products of one input may differ in and still have equal input rows."""
    if isinstance(product, Grouped):
        return {}
    return {"out_spec": ()} if hasattr(product, "out_spec") else {"w_free": 0, "x_first": True}


def _oriented(members: list[tuple[Site, bool]]) -> list[tuple[Site, bool]]:
    """The orientation in which no lookup is the main one: a tied table's block is the head's."""
    main = [site for site, transposed in members if not transposed]
    other = [site for site, transposed in members if transposed]
    if other and all(isinstance(site.use.product, Lookup) for site in main):
        main, other = other, main
    return [*((site, False) for site in main), *((site, True) for site in other)]


def _last(uses: Uses, layers: tuple[Layer, ...], reduce: bool) -> tuple[Last, ...]:
    """The covered layers whose products come last: those in branches, back to one that always runs.

    Where none is covered, lookups; then those that are added or multiplied elementwise; and at last
    products of what is no example's.
    """
    owner = {u.place: layer for layer in layers for u in layer.uses}
    values = [*(u.site for own in uses.biases.values() for u in own), *uses.beside]
    sites = [*uses.sites, *(u.instead for own in uses.biases.values() for u in own)]
    sites = [s for s in sites if not (s.use.once and isinstance(s.use.product, Elementwise))]
    products = [s for s in sites if not isinstance(s.use.product, Elementwise)]
    if uses.beside:
        own_layer = {layer.leaf: layer for layer in layers if layer.kind != "elementwise"}
        owner |= {s.use.place: own_layer[s.leaf] for s in uses.beside if s.leaf in own_layer}
        products += uses.beside
    products = uses.derivatives.leave_out(products, values, uses.beside)
    # As they run; lookups first, which may be of what all examples have in common (classes, positions).
    products.sort(key=lambda site: (not isinstance(site.use.product, Lookup), site.use.path))
    # Nor are one-row products of data and what is also used by others: a weight's singular vectors'.
    ruled = [s.leaf in uses.others and s.use.place in uses.of_data for s in products]
    pairs = zip(products, ruled, strict=True)
    products = [s for s, is_out in pairs if not is_out or s.use.rows > 1] or products
    once, of_examples = ([s for s in products if s.use.once is is_once] for is_once in (True, False))
    if not any(s.use.place in owner for s in of_examples):
        others = [s for s in sites if s not in products]
        of_examples = [*sorted(others, key=lambda site: site.use.path), *of_examples]
    products = [*once, *of_examples]
    found: list[Last] = []
    for site in reversed(products):
        layer = owner.get(site.use.place)
        if layer is None:
            continue
        if all(layer.name != last.layer for last in found):
            found.append(Last(layer.name, *_terms(site, layer, owner, products, sites, uses, reduce)))
        if all(length is not None for _, length in site.loops):
            break
    return tuple(found)


def _terms(
    last: Site,
    layer: Layer,
    owner: Mapping[Any, Layer],
    products: list[Site],
    sites: list[Site],
    uses: Uses,
    reduce: bool,
) -> tuple[float, float]:
    """The loss's terms where this covered product is the last that ran: by its layer's rows, and all.

    The terms are positions, also where `reduce` makes one row of all of an example.

    Args:
        owner: layers by the places of their products.
        products: those that may be terms, as they run.
        sites: all uses in the loss.
    """
    products, sites = ([s for s in some if not s.excludes(last)] for some in (products, sites))
    very_last, mine = products[-1], {use.place: use for use in layer.uses}

    def rows(site: Site) -> float:
        use = mine.get(site.use.place, site.use)
        # Of grouped rows the mean over groups is counted.
        groups = use.groups if isinstance(use.product, Grouped) else 1
        return (use.examples if reduce else use.rows) * site.executions / groups

    own = [s for s in products if owner.get(s.use.place) is layer]
    counted = [s for s in sites if s.use.place in mine and not mine[s.use.place].transposed]
    if owner.get(very_last.use.place) is not layer:
        own = [s for s in products if s.leaf == very_last.leaf and s.view == very_last.view]
    else:  # of a tied autoencoder the decoder's, which has the transpose; so has what reverse mode makes
        turned = {s.view for s in sites if s.use.place in mine and mine[s.use.place].transposed}
        own = [s for s in own if (s.view in turned) == (very_last.view in turned)]
    # Of a tied table the head's rows, not the lookups'.
    own = [s for s in own if not isinstance(s.use.product, Lookup)] or own
    own = list({uses.derivatives.made_of(s): s for s in own}.values()) if len(own) > 1 else own
    positions = sum(s.use.rows * s.executions for s in own)
    return positions / (sum(map(rows, counted)) or 1), positions


def _route(
    leaf: int,
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    layers: tuple[Layer, ...],
    reason: str,
    of_each: bool,
    is_changed: bool,
) -> Route:
    """
    Args:
        reason: why the leaf is plain, if it is.
        of_each: whether examples have products each of their own, beside what is computed once.
        is_changed: whether numbers change the leaf that are made of it, as a norm.
    """
    own = [layer for layer in layers if layer.leaf == leaf]
    if own:
        factors, words = [], []
        for layer in own:
            described = describe_factors(layer.sizes, layer.diagonal)
            factors.append(f"{layer.groups} x ({described})" if layer.groups > 1 else described)
        layer = own[0]
        words.append(
            f"weight of a {layer.kind} layer"
            if layer.kind != "elementwise"
            else "diagonal: a part of a complex weight"
            if any(isinstance(use.product, Elementwise) and use.product.part for use in layer.uses)
            else "diagonal: added or multiplied elementwise"
            if layer.bias is None
            else f"scale of {names[layer.bias]}, a block for each entry"
        )
        if len(own) > 1:
            words.append(f"in {len(own)} parts")
        uses = [use for use in layer.uses if use.half != "outputs"]
        if len(uses) > 1:
            words.append(f"one block for {len(uses)} uses")
        if layer.tied:
            words.append("some of them transposed")
        if is_changed:
            words.append("its norms (or what else of it changes it) as constants")
        once = sum(use.once for use in uses)
        if of_each and once:
            some = "" if once == len(uses) else f"{once} of them "
            words.append(f"{some}computed once for all examples, of whose summed gradient G is")
        if layer.input_of:
            words.append(f"shares A with {layer.input_of}")
        if (members := _members(layer, shapes[leaf])) in {other.groups for other in layers} - {1}:
            words.append(
                f"one G for all {members} that have this input, {layer.sizes[1]} x {layer.sizes[1]}: "
                "repeat the input where they are an ensemble"
            )
        return Route(names[leaf], shapes[leaf], "kfac", "; ".join(factors), ", ".join(words))
    of_bias = [layer for layer in layers if layer.bias == leaf]
    if of_bias:
        what = "shift" if of_bias[0].kind == "elementwise" else "bias"
        first, *others = (layer.name for layer in of_bias)
        more = f" and {others[0] if len(others) == 1 else f'{len(others)} others'}" if others else ""
        return Route(names[leaf], shapes[leaf], "kfac", "", f"{what} of {first}{more}")
    return Route(names[leaf], shapes[leaf], "plain", "", reason)


def _members(layer: Layer, shape: tuple[int, ...]) -> int:
    """How many matrices a leaf stacks that one input is multiplied with; 1 if it does not."""
    if len(shape) != 3 or layer.kind != "dense" or layer.groups > 1:
        return 1
    members, first, last = shape
    sides = layer.sizes[0] - (layer.bias is not None), layer.sizes[1]
    # A head's output has these sides, too, where its heads together are as wide as the model.
    turned = sides == (last, members * first) and last != members * first
    return members if turned or sides == (first, members * last) else 1


def _require(require: Require, routing: Routing) -> None:
    sizes = {route.parameter: int(np.prod(route.shape, dtype=int)) for route in routing}
    total = sum(sizes.values())
    covered = sum(sizes[route.parameter] for route in routing if route.preconditioned)
    if (require == "all" and covered < total) or (require == "most" and 2 * covered <= total):
        raise ValueError(
            f"require={require!r}, but K-FAC covers {covered:,} of {total:,} parameters:\n{routing}"
        )
