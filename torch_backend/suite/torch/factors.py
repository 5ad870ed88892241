"""The factors of all layers of a model: where they are, and the four verbs on their stacks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from suite.core import buckets, ekfac, linalg, statistics
from suite.core import kfac as core_kfac
from suite.torch.checks import warn_user
from suite.torch.layers import Layer
from suite.torch.rows import Bases

Pair = tuple[torch.Tensor, torch.Tensor]

# Another try at a factor that failed: more damping, in units of its mean eigenvalue, then float64.
_RETRIES = ((1e-3, None), (0.0, torch.float64))


class _Place(NamedTuple):
    """Where a layer's factor is."""

    bucket: int
    start: int
    stop: int


class LayerFactors:
    """Running averages of A and G, and what is derived from them, for each layer.

    Factors of one size are stacked, whichever layer and side they are of; layers may share an A.
    Nothing is allocated before it is needed.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        rule: core_kfac.KFAC,
        *,
        factor_dtype: torch.dtype | None,
        inv_dtype: torch.dtype | None,
        factor_scaling: statistics.FactorScaling,
        outer_product: bool,
        warm_start: bool,
    ) -> None:
        self.layers, self.rule = layers, rule
        self.factor_dtype, self.inv_dtype = factor_dtype, inv_dtype
        self.factor_scaling: statistics.FactorScaling = factor_scaling
        self.warm_start = warm_start
        self.keeps_products = rule.compute_method == "ekfac" or (
            outer_product and rule.compute_method == "eigen"
        )
        self.buckets = buckets.plan_buckets(
            [
                ((layer.sizes, layer.diagonal, layer.dtype, layer.device), layer.blocks)
                for layer in layers
            ]
        )
        self.input_of: dict[int, int] = {}  # layer -> the one whose A it shares
        self.factor_buckets: tuple[buckets.Bucket, ...] = ()
        self.owners: list[tuple[int, str]] = []  # (layer, side) of each stack in them
        self.places: dict[tuple[int, str], _Place] = {}
        self.factors: list[core_kfac.Factor] = []  # one stack for each size
        self.products: list[Pair] = []  # (second moments, their weight), one for each bucket
        self.retries = 0  # factorizations that a second or third try saved
        self._cache: dict[tuple[int, str], tuple[Any, torch.Tensor]] = {}

    # ---- memory --------------------------------------------------------------------------------

    def _plan_factors(self) -> tuple[list[tuple[Any, int]], list[tuple[int, str]]]:
        """(key, blocks) and (layer, side) of every factor, those of a bucket's layers together."""
        owners: list[tuple[int, str]] = []
        stacks = []
        for bucket in self.buckets:
            for side in ("A", "G"):
                for member in bucket.members:
                    if side == "A" and member.index in self.input_of:
                        continue
                    layer = self.layers[member.index]
                    at = 0 if side == "A" else 1
                    key = (layer.sizes[at], layer.diagonal[at], layer.dtype, layer.device)
                    stacks.append((key, layer.blocks))
                    owners.append((member.index, side))
        return stacks, owners

    def allocate(self) -> None:
        """Make the stacks, if there are none."""
        if self.factors:
            return
        stacks, self.owners = self._plan_factors()
        self.factor_buckets = buckets.plan_buckets(stacks)
        self.places = {}
        for number, bucket in enumerate(self.factor_buckets):
            (side, diagonal, dtype, device) = bucket.key
            like = torch.empty(0, dtype=self.factor_dtype or at_least_single(dtype), device=device)
            inverse_like = torch.empty(0, dtype=self.inv_dtype or at_least_single(dtype), device=device)
            self.factors.append(
                self.rule.init_factor(
                    like,
                    (bucket.blocks,),
                    side,
                    diagonal,
                    inverse_like,
                    identity_start=self.factor_scaling == "kfac_pytorch",
                )
            )
            for member in bucket.members:
                place = _Place(number, member.start, member.stop)
                self.places[self.owners[member.index]] = place
        for i, leader in self.input_of.items():
            self.places[i, "A"] = self.places[leader, "A"]
        self.products = []
        if self.keeps_products:
            for bucket in self.buckets:
                sizes, _, dtype, device = bucket.key
                shape = (bucket.blocks, sizes[1], sizes[0])
                wide = self.inv_dtype or at_least_single(dtype)
                average = torch.zeros(shape, dtype=at_least_single(wide), device=device)
                self.products.append((average, average[:, 0, 0] + 1))
        self._cache.clear()

    def memory_plan(self) -> dict[str, int]:
        """Bytes that `memory_usage` will show, without allocating them."""
        plan = {"factors": 0, "inverses": 0}
        for (side, diagonal, dtype, _), blocks in self._plan_factors()[0]:
            count = blocks * (side if diagonal else side * side)
            wide = at_least_single(dtype)
            factor, inverse = self.factor_dtype or wide, self.inv_dtype or wide
            plan["factors"] += count * factor.itemsize
            eigen = self.rule.keeps_eigenbases
            vectors = 0 if diagonal and eigen else count
            values = blocks * side if eigen else 0
            plan["inverses"] += (vectors + values) * inverse.itemsize
        if self.keeps_products:
            for bucket in self.buckets:
                sizes, _, dtype, _ = bucket.key
                wide = at_least_single(self.inv_dtype or at_least_single(dtype))
                plan["inverses"] += bucket.blocks * sizes[0] * sizes[1] * wide.itemsize
        return plan

    def memory_usage(self) -> dict[str, int]:
        """Bytes held by running averages ('factors') and by what was derived from them ('inverses')."""
        usage = {"factors": 0, "inverses": 0}
        for factor in self.factors:
            usage["factors"] += factor.average.nbytes
            inverse = factor.inverse
            arrays = inverse if isinstance(inverse, core_kfac.Eigen) else (inverse,)
            usage["inverses"] += sum(x.nbytes for x in arrays if x is not None)
        usage["inverses"] += sum(average.nbytes for average, _ in self.products)
        return usage

    # ---- update --------------------------------------------------------------------------------

    def update(self, new: Sequence[Pair | None], partial: set[int], factor_decay: float) -> None:
        """Average each layer's normalized (A, G) in.

        Args:
            new: by layer; None for one that saw nothing.
            partial: layers whose A is not all that they saw, and is left out.
            factor_decay: β.
        """
        self.allocate()
        for number, bucket in enumerate(self.factor_buckets):
            self._update_bucket(number, bucket, new, partial, factor_decay)
        self._cache.clear()

    def _update_bucket(
        self,
        number: int,
        bucket: buckets.Bucket,
        new: Sequence[Pair | None],
        partial: set[int],
        factor_decay: float,
    ) -> None:
        factor = self.factors[number]
        parts, seen = [], []
        for member in bucket.members:
            layer, side = self.owners[member.index]
            found = None if side == "A" and layer in partial else new[layer]
            seen += [found is not None] * (member.stop - member.start)
            if found is None:
                parts.append(torch.zeros_like(factor.average[member.start : member.stop]))
            else:
                parts.append(found[side == "G"].to(factor.average.dtype))
        mask = torch.tensor(seen, device=factor.weight.device)
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.factors[number] = self.rule.update_factor(factor, joined, mask, factor_decay)

    def update_products(self, new: Sequence[torch.Tensor | None], factor_decay: float) -> None:
        """Average each layer's normalized second moments in the eigenbasis in."""
        for number, bucket in enumerate(self.buckets):
            average, weight = self.products[number]
            seen = [new[m.index] is not None for m in bucket.members for _ in range(m.start, m.stop)]
            parts = []
            for member in bucket.members:
                found = new[member.index]
                if found is None:
                    found = torch.zeros_like(average[member.start : member.stop])
                parts.append(found.to(average.dtype))
            mask = torch.tensor(seen, device=average.device)
            self.products[number] = ekfac.update(average, weight, torch.cat(parts), mask, factor_decay)

    def share(self, input_of: dict[int, int]) -> None:
        """Change which layers share an A; those that no longer do start from what was shared."""
        records = self.state_dict() if self.factors else None
        if records is not None:
            for i, leader in self.input_of.items():
                if i not in input_of:
                    source = records[self.layers[leader].name]
                    records[self.layers[i].name] |= {
                        key: tensor for key, tensor in source.items() if key.startswith("A")
                    }
        self.input_of = dict(input_of)
        self.factors = []
        if records is not None:
            self.allocate()
            self._restore(records)

    # ---- refresh -------------------------------------------------------------------------------

    def refresh(self, damping: float) -> None:
        """Recompute all inverses or eigenbases."""
        if not self.factors:
            return
        dampings = self._dampings(damping)
        for number, factor in enumerate(self.factors):
            self.factors[number] = self._refreshed(number, factor, dampings[number])
        self._cache.clear()
        if self.keeps_products:
            for number in range(len(self.buckets)):
                A, _ = self._gathered(number, "A")
                G, _ = self._gathered(number, "G")
                self.products[number] = ekfac.restart(A, G)

    def bases(self, index: int) -> Bases | None:
        """The eigenvectors of a layer in which second moments are to be summed, for EKFAC."""
        layer = self.layers[index]
        # Of a table that is tied to a head the sums would miss the lookups.
        tied = any(site.transposed for site in layer.sites)
        known = layer.spec.kind in ("dense", "convolution", "transposed") and not tied
        if self.rule.compute_method != "ekfac" or not known or not self.is_ready(index):
            return None
        sides = []
        for side in ("A", "G"):
            place = self.places[index, side]
            vectors = self.factors[place.bucket].inverse.vectors
            sides.append(None if vectors is None else vectors[place.start : place.stop])
        return sides[0], sides[1]

    def _dampings(self, damping: float) -> list[Any]:
        """What goes onto the diagonals of each stack of factors."""
        if self.factor_scaling == "kfac_pytorch":  # the whole damping on both sides
            return [0.0 if self.rule.keeps_eigenbases else damping for _ in self.factors]
        if self.rule.keeps_eigenbases:
            return [0.0 for _ in self.factors]
        means = [core_kfac.mean_eigenvalue(factor) for factor in self.factors]

        def mean(index: int, side: str) -> torch.Tensor:
            place = self.places[index, side]
            return means[place.bucket][place.start : place.stop]

        groups: dict[int, list[int]] = {}
        for i in range(len(self.layers)):
            groups.setdefault(self.input_of.get(i, i), []).append(i)
        dampings = [torch.zeros_like(m) for m in means]
        for leader, members in groups.items():
            # One A, so one π for all that share it: from the mean of their G's.
            mean_G = torch.stack([mean(i, "G") for i in members]).mean(0)
            for i in members:
                split = self.rule.split_damping(mean(leader, "A"), mean_G, damping, self.layers[i].sizes)
                for side, value in zip(("A", "G"), split, strict=True):
                    place = self.places[i, side]
                    dampings[place.bucket][place.start : place.stop] = value
        return dampings

    def _refreshed(self, number: int, old: core_kfac.Factor, damping: Any) -> core_kfac.Factor:
        """`old` refreshed; a factor that fails gets more damping, then float64, then stays stale."""
        warm = self.warm_start and self.rule.keeps_eigenbases and bool(old.ready.all())
        new = self.rule.refresh_factor(old, damping, warm=warm)
        failed = new.failures > old.failures
        if not bool(failed.any()):
            return new
        for boost, dtype in _RETRIES:
            given = old if dtype is None else old._replace(average=old.average.to(dtype))
            again = self.rule.refresh_factor(given, damping, boost=boost)
            saved = failed & (again.failures == old.failures)
            self.retries += int(saved.sum())
            new = core_kfac.Factor(
                new.average,
                new.weight,
                core_kfac.where(saved, again.inverse, new.inverse),
                new.ready | saved,
                torch.where(saved, old.failures, new.failures),
            )
            failed = failed & ~saved
            if not bool(failed.any()):
                return new
        names = ", ".join(
            f"{self.layers[self.owners[m.index][0]].name!r} ({self.owners[m.index][1]})"
            for m in self.factor_buckets[number].members
            if bool(failed[m.start : m.stop].any())
        )
        warn_user(
            f"factorizations failed, also with more damping and in float64; the inverses before them "
            f"stay in use: {names}"
        )
        return new

    # ---- directions and reports -----------------------------------------------------------------

    def directions(self, number: int, gradient: torch.Tensor, damping: float) -> torch.Tensor:
        """(blocks, d_out, d_in) gradients of a bucket's layers, preconditioned."""
        A, ready_A = self._gathered(number, "A")
        G, ready_G = self._gathered(number, "G")
        products = None
        if self.keeps_products:
            average, weight = self.products[number]
            products = average / weight[:, None, None]
        direction: torch.Tensor = self.rule.apply(A, G, ready_A & ready_G, gradient, damping, products)
        return direction

    def _gathered(self, number: int, side: str) -> tuple[Any, torch.Tensor]:
        """(inverses, ready) of one side of a bucket's layers: a view if they are neighbours."""
        known = self._cache.get((number, side))
        if known is not None:
            return known
        places = [self.places[m.index, side] for m in self.buckets[number].members]
        factor = self.factors[places[0].bucket]
        index: Any = slice(places[0].start, places[-1].stop)
        if any(a.stop != b.start for a, b in itertools.pairwise(places)):
            rows = [row for place in places for row in range(place.start, place.stop)]
            index = torch.tensor(rows, device=factor.weight.device)
        inverse = factor.inverse
        if isinstance(inverse, core_kfac.Eigen):
            vectors = None if inverse.vectors is None else inverse.vectors[index]
            inverse = core_kfac.Eigen(vectors, inverse.values[index])
        else:
            inverse = inverse[index]
        self._cache[number, side] = inverse, factor.ready[index]
        return self._cache[number, side]

    def is_ready(self, index: int) -> bool:
        """Whether a layer has inverses: until then its direction is its gradient."""
        if not self.factors:
            return False
        for side in ("A", "G"):
            place = self.places[index, side]
            if not bool(self.factors[place.bucket].ready[place.start : place.stop].all()):
                return False
        return True

    def report(self, index: int) -> dict[str, Any]:
        """Plain numbers about a layer's factors."""
        record: dict[str, Any] = {}
        for side in ("A", "G"):
            place = self.places[index, side]
            factor = self.factors[place.bucket]
            at = slice(place.start, place.stop)
            weight = factor.weight[at].clamp_min(1e-30)
            average = factor.average[at] / weight.reshape(-1, *(1,) * (factor.average.ndim - 1))
            record[f"condition_{side}"] = _condition(average)
            record[f"failures_{side}"] = int(factor.failures[at].sum())
        record["ready"] = self.is_ready(index)
        return record

    # ---- checkpoints ---------------------------------------------------------------------------

    def sharing(self) -> dict[str, str]:
        """Layer -> the layer whose A it shares, by name."""
        names = [layer.name for layer in self.layers]
        return {names[i]: names[j] for i, j in self.input_of.items()}

    def state_dict(
        self, *, include_factors: bool = True, include_inverses: bool = True
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors by layer name; nothing for any before the first step."""
        if not self.factors:
            return {layer.name: {} for layer in self.layers}
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for i, layer in enumerate(self.layers):
            record: dict[str, torch.Tensor] = {}
            for side in ("A", "G"):
                if side == "A" and i in self.input_of:
                    continue
                place = self.places[i, side]
                tensors = _tensors(self.factors[place.bucket], side)
                for name, tensor in tensors.items():
                    derived = name not in (side, f"{side}_weight")
                    if include_factors and (include_inverses or not derived):
                        record[name] = tensor[place.start : place.stop]
            layers[layer.name] = record
        if self.keeps_products and include_factors and include_inverses:
            for number, bucket in enumerate(self.buckets):
                for member in bucket.members:
                    name = self.layers[member.index].name
                    at = slice(member.start, member.stop)
                    average, weight = self.products[number]
                    layers[name] |= {"products": average[at], "products_weight": weight[at]}
        return layers

    def load_state_dict(
        self,
        layers: Mapping[str, Mapping[str, torch.Tensor]],
        sharing: Mapping[str, str],
    ) -> None:
        """Take over `state_dict()`'s tensors; ValueError, and no change, if they do not fit."""
        names = [layer.name for layer in self.layers]
        missing, unknown = set(names) - layers.keys(), layers.keys() - set(names)
        if missing or unknown:
            raise ValueError(
                f"state_dict does not fit this model: layers missing {sorted(missing)}, "
                f"layers unknown {sorted(unknown)}"
            )
        for name in names:
            self._require_fit(name, layers[name], shared=name in sharing)
        at = {name: i for i, name in enumerate(names)}
        self.input_of = {at[a]: at[b] for a, b in sharing.items()}
        self.factors = []
        if any(layers.values()):
            self.allocate()
            self._restore(layers)

    def snapshot(self) -> tuple[Any, ...]:
        """All state, for `rewind`."""
        return self.input_of, list(self.factors), list(self.products)

    def rewind(self, snapshot: tuple[Any, ...]) -> None:
        """Back to a `snapshot`."""
        self.input_of, factors, products = snapshot
        self.factors = []
        if factors:
            self.allocate()
            self.factors, self.products = factors, products

    def has_inverses(self, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        """Whether a state dict's layers have what a refresh computes, or nothing to compute it from."""
        return all("G_ready" in record or "G" not in record for record in layers.values())

    def _require_fit(self, name: str, record: Mapping[str, torch.Tensor], *, shared: bool) -> None:
        layer = next(layer for layer in self.layers if layer.name == name)
        blocks, sizes = layer.blocks, layer.sizes
        expected: dict[str, tuple[int, ...]] = {
            "products": (blocks, sizes[1], sizes[0]),
            "products_weight": (blocks,),
        }
        for at, side in enumerate(("A", "G")):
            if side == "A" and shared:
                continue
            square = (blocks, sizes[at], sizes[at])
            full = (blocks, sizes[at]) if layer.diagonal[at] else square
            expected |= {side: full, f"{side}_inverse": full, f"{side}_vectors": square}
            expected |= {f"{side}_values": (blocks, sizes[at])}
            expected |= {f"{side}_{key}": (blocks,) for key in ("weight", "ready", "failures")}
        for key, tensor in record.items():
            if tuple(tensor.shape) != expected.get(key):
                raise ValueError(
                    f"state of layer {name!r} must have shape {expected.get(key)} for {key}, "
                    f"got {tuple(tensor.shape)}"
                )

    def _restore(self, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for number, bucket in enumerate(self.factor_buckets):
            factor = self.factors[number]
            side_of = [self.owners[m.index] for m in bucket.members]
            fields: dict[str, torch.Tensor] = {}
            for field, own in _tensors(factor, "").items():
                parts = []
                for member, (index, side) in zip(bucket.members, side_of, strict=True):
                    given = layers[self.layers[index].name].get(f"{side}{field}")
                    kept = own[member.start : member.stop]
                    parts.append(kept if given is None else given.to(own))
                fields[field] = torch.cat(parts)
            self.factors[number] = _with_tensors(factor, fields)
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


def _condition(average: torch.Tensor) -> float:
    """Largest over smallest eigenvalue, worst over the blocks."""
    average = average.double()
    if average.ndim == 2:
        average = torch.diag_embed(average)
    return float(linalg.condition_number(average).amax())


def _tensors(factor: core_kfac.Factor, side: str) -> dict[str, torch.Tensor]:
    """A factor's tensors by name; `_with_tensors` undoes it."""
    tensors = {side: factor.average, f"{side}_weight": factor.weight}
    inverse = factor.inverse
    if isinstance(inverse, core_kfac.Eigen):
        tensors[f"{side}_values"] = inverse.values
        if inverse.vectors is not None:
            tensors[f"{side}_vectors"] = inverse.vectors
    else:
        tensors[f"{side}_inverse"] = inverse
    tensors[f"{side}_ready"] = factor.ready
    tensors[f"{side}_failures"] = factor.failures
    return tensors


def _with_tensors(factor: core_kfac.Factor, tensors: dict[str, torch.Tensor]) -> core_kfac.Factor:
    inverse: Any = tensors.get("_inverse")
    if isinstance(factor.inverse, core_kfac.Eigen):
        inverse = core_kfac.Eigen(tensors.get("_vectors"), tensors["_values"])
    return core_kfac.Factor(
        tensors[""], tensors["_weight"], inverse, tensors["_ready"], tensors["_failures"]
    )
