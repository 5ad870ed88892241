"""Where the factors of a model's layers are, in memory and in checkpoints.

A rank keeps the running averages that it owns, and the inverses of the layers whose directions it
computes (`suite.core.placement`); in one process that is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from suite.core import buckets, statistics
from suite.core import kfac as core_kfac
from suite.core.placement import LayerShape, Placement
from suite.torch.collectives import GATHERING, Parcel, Ranks
from suite.torch.factor_storage import FactorStorage
from suite.torch.layers import Layer
from suite.torch.recorders import is_recording

Pair = tuple[torch.Tensor, torch.Tensor]
Key = tuple[int, str]  # a layer's number, 'A' or 'G'


class _Place(NamedTuple):
    """Where a layer's factor is."""

    bucket: int
    start: int
    stop: int


class FactorStore:
    """Stacks of factors, of one size each, whichever layer and side they are of; layers may share an A.

    Nothing is allocated before it is needed.

    Args:
        ranks: who trains together.
        place: (shapes, layer -> the one whose A it shares) -> who owns what.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        rule: core_kfac.KFAC,
        *,
        ranks: Ranks,
        place: Callable[[Sequence[LayerShape], Mapping[int, int]], Placement],
        factor_dtype: torch.dtype | None,
        inv_dtype: torch.dtype | None,
        factor_scaling: statistics.FactorScaling,
        outer_product: bool,
        warm_start: bool,
        symmetric: bool,
        packed: bool,
    ) -> None:
        self.layers, self.rule, self.ranks = layers, rule, ranks
        self.factor_dtype, self.inv_dtype = factor_dtype, inv_dtype
        self.factor_scaling: statistics.FactorScaling = factor_scaling
        self.warm_start, self.symmetric = warm_start, symmetric
        self.storage = FactorStorage(packed)
        self.keeps_products = rule.compute_method == "ekfac" or (
            outer_product and rule.compute_method == "eigen"
        )
        self._place = place
        self.owners: list[Key] = []  # of each stack in `factor_buckets`
        self.places: dict[Key, _Place] = {}  # of the factors that are here
        self.factors: list[core_kfac.Factor] = []  # one stack for each size, as `storage` keeps it
        self.received: dict[Key, tuple[Any, torch.Tensor]] = {}  # (inverses, ready) of others' factors
        self.products: list[Pair] = []  # (second moments, their weight), one for each bucket
        self.seen: set[int] = set()  # layers that some rank has statistics of
        self.inverted: set[int] = set()  # those of them that the last inverses are of
        self.retries = 0  # factorizations that a second or third try saved
        self._cache: dict[tuple[int, str], Any] = {}  # what follows from the stacks, until they change
        self._plan({})

    def _plan(self, input_of: Mapping[int, int]) -> None:
        """Decide who owns what, given which layer shares whose A, and what is here."""
        if is_recording():
            raise RuntimeError("layers that had one input have others now")
        self.input_of = dict(input_of)
        shapes = [self._shape(i) for i in range(len(self.layers))]
        self.placement = self._place(shapes, self.input_of)
        worked = [i for i in range(len(shapes)) if self.placement.is_worker(i, self.ranks.rank)]
        found = buckets.plan_buckets(
            [
                ((layer.sizes, layer.diagonal, layer.dtype, layer.device), layer.blocks)
                for layer in (self.layers[i] for i in worked)
            ]
        )
        self.buckets = tuple(  # of the layers whose directions are computed here, by layer number
            buckets.Bucket(b.key, tuple(replace(m, index=worked[m.index]) for m in b.members))
            for b in found
        )
        self.allocated = self.refreshed = self.updated = False
        self.factors, self.products, self.received = [], [], {}
        self._cache.clear()

    def _shape(self, index: int) -> LayerShape:
        layer = self.layers[index]
        return LayerShape(layer.sizes, layer.diagonal, layer.blocks)

    def all_keys(self) -> list[Key]:
        """All factors of the model, in one order on every rank."""
        sides = ((i, side) for i in range(len(self.layers)) for side in ("A", "G"))
        return [key for key in sides if key[1] == "G" or key[0] not in self.input_of]

    def _plan_factors(self) -> tuple[list[tuple[Any, int]], list[Key]]:
        """(key, blocks) and owner of the factors that are here, those of a bucket's layers together."""
        owners: list[Key] = []
        stacks = []
        for bucket in self.buckets:
            for side in ("A", "G"):
                for member in bucket.members:
                    i = member.index
                    if self.placement.owner_of.get((i, side)) != self.ranks.rank:
                        continue
                    stacks.append((self._kind(i, side), self.layers[i].blocks))
                    owners.append((i, side))
        return stacks, owners

    def _kind(self, index: int, side: str) -> Any:
        """What factors of one stack have in common."""
        layer, at = self.layers[index], 0 if side == "A" else 1
        return layer.sizes[at], layer.diagonal[at], layer.dtype, layer.device

    def _new(self, kind: Any, blocks: int) -> core_kfac.Factor:
        """A stack of factors without evidence."""
        side, diagonal, dtype, device = kind
        like = torch.empty(0, dtype=self.factor_dtype or at_least_single(dtype), device=device)
        inverse_like = torch.empty(0, dtype=self.inv_dtype or at_least_single(dtype), device=device)
        factor: core_kfac.Factor = self.rule.init_factor(
            like,
            (blocks,),
            side,
            diagonal,
            inverse_like,
            identity_start=self.factor_scaling == "kfac_pytorch",
        )
        return factor

    def _users(self, key: Key) -> tuple[int, ...]:
        """The ranks that need a factor's inverse."""
        if self.rule.compute_method == "ekfac":  # second moments in its eigenbasis are of all data
            return tuple(range(self.ranks.world))
        return self.placement.workers_of(key[0])

    def allocate(self) -> None:
        """Make the stacks, if there are none."""
        if self.allocated:
            return
        stacks, self.owners = self._plan_factors()
        self.factor_buckets = buckets.plan_buckets(stacks)
        self.factors, self.places, self.received = [], {}, {}  # an interrupted call may have made some
        for number, bucket in enumerate(self.factor_buckets):
            self.factors.append(self.storage.keep_factor(self._new(bucket.key, bucket.blocks)))
            for member in bucket.members:
                place = _Place(number, member.start, member.stop)
                self.places[self.owners[member.index]] = place
        for key in self.all_keys():
            if key not in self.places and self.ranks.rank in self._users(key):
                others = self._new(self._kind(*key), self.layers[key[0]].blocks)
                self.received[key] = self.storage.keep(others.inverse), others.ready
        self.products = []
        if self.keeps_products:
            for bucket in self.buckets:
                sizes, _, dtype, device = bucket.key
                shape = (bucket.blocks, sizes[1], sizes[0])
                wide = self.inv_dtype or at_least_single(dtype)
                average = torch.zeros(shape, dtype=at_least_single(wide), device=device)
                self.products.append((average, average[:, 0, 0] + 1))
        self.allocated = True
        self._cache.clear()

    def memory_plan(self) -> dict[str, int]:
        """Bytes that `memory_usage` will show on this rank, without allocating them."""
        plan = {"factors": 0, "inverses": 0}
        for i, side in self.all_keys():
            layer, at = self.layers[i], 0 if side == "A" else 1
            size, diagonal = layer.sizes[at], layer.diagonal[at]
            count = self._shape(i).elements(side, packed=self.storage.packed)
            wide = at_least_single(layer.dtype)
            factor, inverse = self.factor_dtype or wide, self.inv_dtype or wide
            if self.placement.owner_of[i, side] == self.ranks.rank:
                plan["factors"] += count * factor.itemsize
            if self.ranks.rank in self._users((i, side)):
                if self.rule.keeps_eigenbases:
                    count = layer.blocks * size * (1 if diagonal else size + 1)
                plan["inverses"] += count * inverse.itemsize
        if self.keeps_products:
            for bucket in self.buckets:
                sizes, _, dtype, _ = bucket.key
                wide = at_least_single(self.inv_dtype or at_least_single(dtype))
                plan["inverses"] += bucket.blocks * sizes[0] * sizes[1] * wide.itemsize
        return plan

    def memory_usage(self) -> dict[str, int]:
        """Bytes held by running averages ('factors') and by what was derived from them ('inverses')."""
        usage = {"factors": 0, "inverses": 0}
        inverses = [factor.inverse for factor in self.factors]
        inverses += [inverse for inverse, _ in self.received.values()]
        for factor in self.factors:
            usage["factors"] += factor.average.nbytes
        for inverse in inverses:
            arrays = inverse if isinstance(inverse, core_kfac.Eigen) else (inverse,)
            usage["inverses"] += sum(x.nbytes for x in arrays if x is not None)
        usage["inverses"] += sum(average.nbytes for average, _ in self.products)
        return usage

    def _key(self, index: int, side: str) -> Key:
        return (self.input_of.get(index, index), side) if side == "A" else (index, side)

    def _inverse_of(self, index: int, side: str) -> tuple[Any, torch.Tensor]:
        """(inverse as it is kept, ready) of one layer's factor, where this rank uses it."""
        key = self._key(index, side)
        place = self.places.get(key)
        if place is not None:
            factor, at = self.factors[place.bucket], slice(place.start, place.stop)
            return rows_of(factor.inverse, at), factor.ready[at]
        return self.received[key]

    def is_ready(self, index: int) -> bool:
        """Whether a layer, or a matrix of it, has inverses: until then its direction is its gradient."""
        if not self.allocated:
            return False
        if self.ranks.rank not in self._users((index, "G")):
            started = self.factor_scaling == "kfac_pytorch"  # from the identity
            return self.refreshed and (started or index in self.inverted)
        key = (index, "layer is ready")
        if key not in self._cache:
            A, G = (self._inverse_of(index, side)[1] for side in ("A", "G"))
            ready = (A & G).any() if self.layers[index].spec.kind == "stack" else (A & G).all()
            self._cache[key] = self._stacks_are_ready([index]) or bool(ready)
        found: bool = self._cache[key]
        return found

    def _stacks_are_ready(self, indices: Iterable[int]) -> bool:
        """Whether the host knows, without looking, that all factors in the stacks of layers are."""
        keys = [self._key(i, side) for i in indices for side in ("A", "G")]
        places = [self.places.get(key) for key in keys]
        return all(
            place is not None and self._cache.get((place.bucket, "stack is ready")) for place in places
        )

    def _label(self, key: Key) -> str:
        return f"{self.layers[key[0]].name!r} ({key[1]})"

    # ---- checkpoints ---------------------------------------------------------------------------

    def sharing(self) -> dict[str, str]:
        """Layer -> the layer whose A it shares, by name."""
        names = [layer.name for layer in self.layers]
        return {names[i]: names[j] for i, j in self.input_of.items()}

    def share(self, input_of: dict[int, int]) -> None:
        """Change which layers share an A; those that no longer do start from what was shared.

        All ranks call it with the same, and tell each other their state if there is any.
        """
        records = self.gathered_state_dict() if self.updated else None
        refreshed = self.refreshed
        self._plan(input_of)
        if records is not None:
            self.allocate()
            self._restore(records)
            self.refreshed = refreshed

    def state_dict(
        self, *, include_factors: bool = True, include_inverses: bool = True
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors by layer name, as far as this rank has them; nothing before the first step.

        A shared A is in the record of each layer that has it. What later steps may change in place is
        copied.
        """
        layers: dict[str, dict[str, torch.Tensor]] = {layer.name: {} for layer in self.layers}
        if not self.allocated or not include_factors:
            return layers
        for i, layer in enumerate(self.layers):
            for side in ("A", "G"):
                place = self.places.get(self._key(i, side))
                if place is not None:
                    own = factor_rows(self.factors[place.bucket], slice(place.start, place.stop))
                    tensors = _tensors(self.storage.full_factor(own), side)
                    layers[layer.name] |= {name: tensor.clone() for name, tensor in tensors.items()}
                elif self._key(i, side) in self.received:
                    inverse, ready = self.received[self._key(i, side)]
                    layers[layer.name] |= _inverse_tensors(self.storage.full(inverse), ready, side)
        if self.keeps_products:
            for number, bucket in enumerate(self.buckets):
                for member in bucket.members:
                    name = self.layers[member.index].name
                    at = slice(member.start, member.stop)
                    average, weight = self.products[number]
                    layers[name] |= {
                        "products": average[at].clone(),
                        "products_weight": weight[at].clone(),
                    }
        if not include_inverses:
            kept = ("A", "G", "A_weight", "G_weight")
            layers = {n: {k: x for k, x in r.items() if k in kept} for n, r in layers.items()}
        return layers

    def gathered_state_dict(self, **included: bool) -> dict[str, dict[str, torch.Tensor]]:
        """`state_dict()` with every rank's tensors, on every rank; all ranks call it."""
        here = self.state_dict(**included)
        if self.ranks.alone or not self.allocated or not included.get("include_factors", True):
            return here
        parcels, names = [], []
        everyone = tuple(range(self.ranks.world))
        for i, layer in enumerate(self.layers):
            expected = self._expected(i, included.get("include_inverses", True))
            for name, (shape, dtype) in expected.items():
                key = self._key(i, name[0]) if name[0] in "AG" else (i, "G")
                owner = self.placement.owner_of[key]
                parcels.append(Parcel(layer.name, shape, dtype, owner, everyone))
                names.append((i, name))

        def content(number: int) -> torch.Tensor:
            i, name = names[number]
            return here[self.layers[i].name][name]

        def device_of(number: int) -> torch.device:
            return self.layers[names[number][0]].device

        found = self.ranks.send(parcels, content, device_of, f"K-FAC's {GATHERING}")
        for number, (i, name) in enumerate(names):
            record = here[self.layers[i].name]
            if number in found:
                record[name] = found[number]
        return here

    def _expected(
        self, index: int, inverses: bool = True
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of a layer's tensors in a state dict."""
        layer = self.layers[index]
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for side in ("A", "G"):
            *kind, _ = self._kind(index, side)
            template = _tensors(self._new((*kind, torch.device("meta")), layer.blocks), side)
            kept = [name for name in template if inverses or name in (side, f"{side}_weight")]
            expected |= {name: (tuple(template[name].shape), template[name].dtype) for name in kept}
        if self.keeps_products and inverses:
            wide = at_least_single(self.inv_dtype or at_least_single(layer.dtype))
            shape = (layer.blocks, layer.sizes[1], layer.sizes[0])
            expected["products"] = (shape, wide)
            expected["products_weight"] = (shape[:1], wide)
        return expected

    def load_state_dict(
        self,
        layers: Mapping[str, Mapping[str, torch.Tensor]],
        sharing: Mapping[str, str],
        *,
        held: bool,
        refreshed: bool,
    ) -> None:
        """Take over `state_dict()`'s tensors; ValueError, and no change, if they do not fit.

        Args:
            held: whether it has factors, on whatever rank.
            refreshed: whether there were inverses.
        """
        problem = self.misfit(layers)
        if problem is not None:
            raise ValueError(problem)
        names = [layer.name for layer in self.layers]
        at = {name: i for i, name in enumerate(names)}
        before = self.snapshot()
        self.seen, self.inverted = set(), set()
        own, wanted = self.input_of, {at[a]: at[b] for a, b in sharing.items()}
        self._plan(wanted)
        if not held:
            return
        lacking = self._lacking(layers)
        everyone = self.ranks.gather(bool(lacking), "K-FAC's agreement on a checkpoint")
        if any(everyone) and own != wanted:
            # What filled state_dict(gather=False) is as layers were placed when that was made.
            self._plan(own)
            lacking = self._lacking(layers)
            everyone = self.ranks.gather(bool(lacking), "K-FAC's agreement on a checkpoint")
        if any(everyone):
            self.rewind(before)
            whose = f"{', '.join(map(self._label, lacking))}" if lacking else "other ranks' share"
            raise ValueError(
                f"state_dict must have the factors that rank {self.ranks.rank} keeps, got none of "
                f"{whose}. Another rank's share does not do; and a "
                "checkpoint library fills what is there, so give it state_dict(gather=False), which "
                "has room for factors before the first step, too"
            )
        self._restore(layers)
        self.refreshed = refreshed
        self.seen, self.inverted = (
            # None: of another rank's share
            {i for i, name in enumerate(names) if (x := layers[name].get(key)) is None or bool(x.any())}
            for key in ("G_weight", "G_ready")
        )
        if self.input_of != wanted:
            self.share(wanted)

    def _lacking(self, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Key]:
        """The factors that this rank keeps, as layers are placed now, and a checkpoint has not."""
        self.allocate()
        return [key for key in self.places if key[1] not in layers[self.layers[key[0]].name]]

    def snapshot(self) -> tuple[Any, ...]:
        """All state, for `rewind`."""
        flags = self.allocated, self.refreshed, self.updated, set(self.seen), set(self.inverted)
        return self.input_of, flags, list(self.factors), list(self.products), dict(self.received)

    def rewind(self, snapshot: tuple[Any, ...]) -> None:
        """Back to a `snapshot`."""
        input_of, flags, factors, products, received = snapshot
        self._plan(input_of)
        if flags[0]:
            self.allocate()
            self.factors, self.products, self.received = factors, products, received
        _, self.refreshed, self.updated, self.seen, self.inverted = flags

    def misfit(self, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> str | None:
        """Why tensors of a `state_dict()` are none of these layers; None: they fit."""
        names = [layer.name for layer in self.layers]
        missing, unknown = set(names) - layers.keys(), layers.keys() - set(names)
        if missing or unknown:
            return (
                f"state_dict does not fit this model: layers missing {sorted(missing)}, "
                f"layers unknown {sorted(unknown)}"
            )
        for i, name in enumerate(names):
            expected = self._expected(i)
            for key, tensor in layers[name].items():
                shape = expected[key][0] if key in expected else None
                found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else tensor
                if found != shape or shape is None:
                    return f"state of layer {name!r} must have shape {shape} for {key}, got {found!r}"
        return None

    def _restore(self, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for number, bucket in enumerate(self.factor_buckets):
            factor = self.storage.full_factor(self.factors[number])
            side_of = [self.owners[m.index] for m in bucket.members]
            fields: dict[str, torch.Tensor] = {}
            for field, own in _tensors(factor, "").items():
                parts = []
                for member, (index, side) in zip(bucket.members, side_of, strict=True):
                    given = layers[self.layers[index].name].get(f"{side}{field}")
                    kept = own[member.start : member.stop]
                    parts.append(kept if given is None else given.to(own))
                fields[field] = torch.cat(parts)
            self.factors[number] = self.storage.keep_factor(_with_tensors(factor, fields))
        for key in self.all_keys():
            record = layers[self.layers[key[0]].name]
            if key not in self.places and self.ranks.rank in self._users(key):
                new = self._new(self._kind(*key), self.layers[key[0]].blocks)
                fields = _tensors(new, "")
                for field, kept in fields.items():
                    if f"{key[1]}{field}" in record:
                        fields[field] = record[f"{key[1]}{field}"].to(kept, copy=True)
                new = self.storage.keep_factor(_with_tensors(new, fields))
                self.received[key] = new.inverse, new.ready
        self.updated = True
        if self.keeps_products:
            for number, bucket in enumerate(self.buckets):
                average, weight = self.products[number]
                records = [layers[self.layers[m.index].name] for m in bucket.members]
                if all("products" in record for record in records):
                    self.products[number] = (
                        torch.cat([r["products"].to(average) for r in records]),
                        torch.cat([r["products_weight"].to(weight) for r in records]),
                    )
        self._cache.clear()


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """The dtype factors of parameters of this one are kept in."""
    return torch.promote_types(dtype, torch.float32)


def rows_of(inverse: Any, at: slice) -> Any:
    """Some of a stack of inverses or eigenbases."""
    if isinstance(inverse, core_kfac.Eigen):
        return core_kfac.Eigen(
            None if inverse.vectors is None else inverse.vectors[at], inverse.values[at]
        )
    return inverse[at]


def copy_inverse(kept: Any, new: Any) -> None:
    """Inverses or eigenbases into the place of others."""
    if isinstance(kept, core_kfac.Eigen):
        if kept.vectors is not None:
            kept.vectors.copy_(new.vectors)
        kept.values.copy_(new.values)
    else:
        kept.copy_(new)


def factor_rows(factor: core_kfac.Factor, at: slice) -> core_kfac.Factor:
    """Some of a stack of factors."""
    return core_kfac.Factor(
        factor.average[at],
        factor.weight[at],
        rows_of(factor.inverse, at),
        factor.ready[at],
        factor.failures[at],
    )


def _tensors(factor: core_kfac.Factor, side: str) -> dict[str, torch.Tensor]:
    """A factor's tensors by name; `_with_tensors` undoes it."""
    tensors = {side: factor.average, f"{side}_weight": factor.weight}
    tensors |= _inverse_tensors(factor.inverse, factor.ready, side)
    tensors[f"{side}_failures"] = factor.failures
    return tensors


def _inverse_tensors(inverse: Any, ready: torch.Tensor, side: str) -> dict[str, torch.Tensor]:
    if not isinstance(inverse, core_kfac.Eigen):
        return {f"{side}_inverse": inverse, f"{side}_ready": ready}
    tensors = {f"{side}_values": inverse.values}
    if inverse.vectors is not None:
        tensors[f"{side}_vectors"] = inverse.vectors
    return {**tensors, f"{side}_ready": ready}


def _with_tensors(factor: core_kfac.Factor, tensors: dict[str, torch.Tensor]) -> core_kfac.Factor:
    inverse: Any = tensors.get("_inverse")
    if isinstance(factor.inverse, core_kfac.Eigen):
        inverse = core_kfac.Eigen(tensors.get("_vectors"), tensors["_values"])
    return core_kfac.Factor(
        tensors[""], tensors["_weight"], inverse, tensors["_ready"], tensors["_failures"]
    )
