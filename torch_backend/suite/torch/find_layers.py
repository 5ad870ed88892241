"""Which parameters of a model K-FAC preconditions, and in which blocks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from suite.torch.attention import Attention
from suite.torch.dtensors import (
    hidden_layout,
    require_not_flattened,
    sharded_modules,
    split_dim,
    tensor_axes,
)
from suite.torch.kinds import (
    FUNCTIONS,
    HIDDEN,
    KINDS,
    NORMS,
    RECURRENT,
    channel_axis,
    forward_of_its_own,
    is_linear_by_another_name,
    norm_spec,
    parametrization,
    why_hidden,
    why_not,
    why_not_embedding,
)
from suite.torch.layer_routes import routes
from suite.torch.layers import CONVOLUTIONS, TRANSPOSED, Layer, Layout, Piece, Site
from suite.torch.own_weights import OwnNorm, OwnWeight, own_norms, own_weights
from suite.torch.recurrent import Product
from suite.torch.rows import LayerSpec, paddings

_LISTS = (nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)
_COMPUTED = "its weight is computed, by a parametrization or a hook that K-FAC does not know"
_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)"
)


def plain_name(name: str) -> str:
    """A module's or parameter's name without the parts that wrappers put into it."""
    return _WRAPPERS.sub("", name).lstrip(".")


class FoundLayers:
    """All blocks of a model that K-FAC covers, and the treatment of every parameter.

    Args:
        skip_layers: regular expressions, see `suite.torch.KFAC`.
        moved: the parameters that the optimizer has; None: all.
        weight_sharing: 'expand' or 'reduce', or which of them for which class name.
        only: the kinds of modules to cover; default: all known ones, and free parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        skip_layers: Sequence[str] = (),
        max_factor_size: int = 8192,
        weight_sharing: str | Mapping[str, str] = "expand",
        max_rows: int = 0,
        max_examples: int = 0,
        only: tuple[type[nn.Module], ...] | None = None,
        moved: set[int] | None = None,
    ) -> None:
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(
                "model must be one that hooks can be put on, got a torch.jit.ScriptModule: attach to "
                "the model that it was made of"
            )
        require_not_flattened(model.parameters())
        self.layers: list[Layer] = []
        self.attentions: list[Attention] = []
        self.free: dict[nn.Module, list[Layer]] = {}  # by the module whose forward uses them
        self.stacks: dict[nn.Module, list[Layer]] = {}  # likewise
        self._patterns = [_pattern(text) for text in skip_layers]
        self.unmatched = set(skip_layers)  # those that skip nothing
        self._max_factor_size = max_factor_size
        self._weight_sharing = weight_sharing
        self._max_rows = max_rows
        self._max_examples = max_examples
        self._only = only
        self._moved = moved
        if not isinstance(weight_sharing, str):
            known = {type(module).__name__ for module in model.modules()}
            unknown = sorted(set(weight_sharing) - known)
            if unknown:
                raise ValueError(
                    f"weight_sharing must name classes of the model's modules, got {unknown}"
                )
        fully_sharded = {id(p) for module in sharded_modules(model) for p in module.parameters()}
        self.tensor_axes = {id(p): tensor_axes(p, id(p) in fully_sharded) for p in model.parameters()}
        self._reasons: dict[int, str] = {}
        # (parameter, first row) -> its layer's place in `layers`
        self._by_weight: dict[tuple[int, int], int] = {}
        self._owners: dict[int, list[str]] = {}
        # Of nn.Module: a model's own may not know the argument (torchrl's losses).
        named = [name for name, _ in nn.Module.named_parameters(model, remove_duplicate=False)]
        # A model may have a part named `module` of its own, without which names would be ambiguous.
        self._strip = len(set(map(plain_name, named))) == len(named)
        self._aliases = aliases(model)
        for full, module in model.named_modules():  # each once, whatever names it has
            for parameter in self._own(module).values():
                self._owners.setdefault(id(parameter), []).append(full)
        self._walk(model)
        self.layers = [
            layer
            for layer in self.layers
            if self._reasons.get(id(layer.weight.parameter)) is None or layer.weight.stop is not None
        ]
        rows = [s.spec for layer in self.layers for s in layer.sites if s.spec.max_rows]
        if rows and all(spec.reduce for spec in rows):
            raise ValueError(
                "max_rows must be None where weight_sharing is 'reduce' for all layers that have it, "
                f"got {max_rows}"
            )
        found = model, self.layers, self._reasons, self.name_of
        self.routing = routes(*found, moved, max_factor_size)
        # As if the optimizer moved every parameter.
        self.routing_of_all = routes(*found, None, max_factor_size)

    def name_of(self, full: str) -> str:
        """The name in reports and checkpoints of a module or parameter with this name in the model."""
        return plain_name(full) if self._strip else full

    def _own(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """A module's parameters by name, but for those that are a layer's inside of it."""
        own = module.named_parameters(recurse=False)
        return {key: p for key, p in own if (module, id(p)) not in self._aliases}

    # ---- the walk ------------------------------------------------------------------------------

    def _walk(self, model: nn.Module) -> None:
        skipped: set[str] = set()
        claimed: set[nn.Module] = set()  # by a module around them that runs them itself
        parents: dict[str, nn.Module] = {}
        for raw, module in model.named_modules():
            name = self.name_of(raw)
            parent = raw.rpartition(".")[0]
            around = parents.get(parent)
            parents[raw] = around if isinstance(module, _CONTAINERS) and around is not None else module
            if self._is_skipped(raw, module) or (raw and parent in skipped):
                skipped.add(raw)
                self._say(module, "named by skip_layers")
                continue
            if module in claimed:
                continue
            own = self._own(module)
            if any(map(nn.parameter.is_lazy, own.values())):
                raise ValueError(
                    f"layer {name!r} is lazy and has no shape yet: run one forward pass before "
                    "attaching K-FAC"
                )
            if isinstance(module, torch.jit.ScriptModule):
                skipped.add(raw)
                self._say(module, "TorchScript runs it: hooks see nothing of it", recurse=True)
                continue
            if self._only is not None and type(module) not in self._only:
                kind = type(module).__name__
                self._say(module, f"{kind} is not a kind of layer that kfac-pytorch covers")
            elif isinstance(module, nn.MultiheadAttention):
                if self._attention(name, module):
                    claimed.add(module.out_proj)
            elif isinstance(module, RECURRENT):
                self._recurrent(name, module)
            elif (
                nn.utils.parametrize.is_parametrized(module)
                or hasattr(module, "weight_v")
                or parametrization(module)[0] is not None
            ):
                self._parametrized(name, module, own)
                claimed |= (
                    set(module.parametrizations.modules())
                    if hasattr(module, "parametrizations")
                    else set()
                )
            elif isinstance(module, KINDS):
                self._module(name, module, own)
                beside = {key: p for key, p in own.items() if key not in ("weight", "bias")}
                if beside and forward_of_its_own(module):  # low-rank terms, gains
                    self._own_parameters(name, module, beside, {})
            elif isinstance(module, HIDDEN):
                self._say(module, why_hidden(module))
            elif is_linear_by_another_name(module, own):
                self._linear_by_another_name(name, module, own)
            elif own and isinstance(module, _CONTAINERS):
                self._free_parameters(name, parents[raw], own)
            elif not isinstance(module, _CONTAINERS):
                lists = {
                    key: {k: p for k, p in child.named_parameters(recurse=False) if "." not in k}
                    for key, child in module.named_children()
                    if isinstance(child, _LISTS) and not self._is_skipped(_join(raw, key), child)
                }
                if own or lists:
                    self._own_parameters(name, module, own, lists)

    def _is_skipped(self, raw: str, module: nn.Module) -> bool:
        """Whether a pattern matches a module's name, with or without its wrappers', or its class."""
        kind, names = type(module).__name__, {raw, self.name_of(raw)}
        if isinstance(module, nn.MultiheadAttention) or next(module.children(), None) is None:
            return self._matches({*names, kind})
        # 'Conv2d' names layers, and is not to take along all that is in a Conv2dBlock.
        return self._matches(names, kind)

    def _matches(self, names: Iterable[str], whole: str = "") -> bool:
        """Whether a pattern is found in one of the names, or is one of the `whole` name."""
        found = {
            pattern.pattern
            for pattern in self._patterns
            if any(map(pattern.search, names)) or (whole and pattern.fullmatch(whole))
        }
        self.unmatched -= found
        return bool(found)

    def _module(self, name: str, module: nn.Module, own: dict[str, nn.Parameter]) -> None:
        """One module of a known kind."""
        kind = next(k for k in KINDS if isinstance(module, k))
        own_forward = forward_of_its_own(module)
        if own_forward and kind not in FUNCTIONS:
            self._say(module, f"this {type(module).__name__} has a forward of its own")
            return
        weight, bias = own.get("weight"), own.get("bias")
        if weight is None:  # or another computes it, such as torch.nn.utils.prune
            self._say(module, _COMPUTED)
            return
        reason = why_not(weight)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            reason = reason or why_not_embedding(name, module)
        if reason:
            self._reasons.setdefault(id(weight), reason)
            if bias is not None and not why_not(bias):
                self._bias(name, module, bias, own_forward)
            return
        spec = self._spec(module, weight, bias)
        if self.tensor_axes[id(weight)] or hidden_layout(weight) is not None:
            if own_forward:
                self._say(module, f"a tensor-parallel {type(module).__name__} with a forward of its own")
            else:
                self._tensor_parallel(name, module, weight, bias, spec)
            return
        shared = bias is not None and len(self._owners[id(bias)]) > 1
        own_bias = bias is not None and not shared and not why_not(bias)
        with_bias = bias is not None and own_bias and self._together(weight, bias)
        if isinstance(module, TRANSPOSED):
            self._add(name, Piece(weight), None, "transposed", Site(module, module, spec))
            if own_bias:
                assert bias is not None
                self._bias(name, module, bias)
            return
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            self._add(
                name, Piece(weight), None, "table", Site(module, module, spec, functional=own_forward)
            )
            return
        spec = spec._replace(bias=with_bias)
        layout: Layout = "matrix"
        if isinstance(module, NORMS):
            layout = "unit" if with_bias else "vector"
        piece = Piece(bias) if with_bias and bias is not None else None
        self._add(name, Piece(weight), piece, layout, Site(module, module, spec, functional=own_forward))
        if bias is not None and not with_bias and not shared and not why_not(bias):
            self._bias(name, module, bias, own_forward)

    def _together(self, weight: nn.Parameter, bias: nn.Parameter) -> bool:
        """Whether the optimizer moves both, or none: they can be one block."""
        return self._moved is None or (id(weight) in self._moved) == (id(bias) in self._moved)

    def _tensor_parallel(
        self,
        name: str,
        module: nn.Module,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        spec: LayerSpec,
    ) -> None:
        """A linear layer of which this rank has a block of outputs (or of inputs)."""
        if not isinstance(module, nn.Linear):
            self._say(module, f"a tensor-parallel {type(module).__name__}: only nn.Linear is covered")
            return
        axes = self.tensor_axes[id(weight)]
        dim = split_dim(weight, axes)
        piece = Piece(weight, tensor_axes=axes)
        site = Site(module, module, spec)
        if bias is None or why_not(bias) or not self._together(weight, bias):
            self._add(name, piece, None, "matrix", site)
        elif split_dim(bias, self.tensor_axes[id(bias)]) is None and dim is not None:
            # Of inputs: the bias belongs to all blocks, and gets a block of its own.
            self._add(name, piece, None, "matrix", site)
            self._bias(name, module, bias)
        else:
            own = Piece(bias, tensor_axes=self.tensor_axes[id(bias)])
            site = replace(site, spec=spec._replace(bias=True))
            self._add(name, piece, own, "matrix", site)
        place = self._by_weight.get((id(weight), 0))
        if dim is not None and place is not None:
            side, letter = (("outputs", "G"), ("inputs", "A"))[dim]
            split = f"{side} split over ranks: {letter} is block-diagonal, a block a rank"
            self.layers[place] = replace(self.layers[place], tensor_split=split)

    def _spec(self, module: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None) -> LayerSpec:
        reduce = self._reduces(module)
        if isinstance(module, nn.Linear):
            return LayerSpec("dense", reduce=reduce, max_rows=self._max_rows)
        if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
            return LayerSpec(
                "transposed" if isinstance(module, TRANSPOSED) else "convolution",
                groups=module.groups,
                kernel=tuple(module.kernel_size),
                stride=tuple(module.stride),
                padding=paddings(module.padding, tuple(module.kernel_size), tuple(module.dilation)),
                dilation=tuple(module.dilation),
                padding_mode=module.padding_mode,
                reduce=reduce,
                max_rows=0 if self._max_examples else self._max_rows,
                max_examples=self._max_examples,
            )
        if isinstance(module, nn.Embedding):
            padding = -1 if module.padding_idx is None else module.padding_idx
            # Of the weight: who puts a longer one there may leave `num_embeddings` as it was.
            return LayerSpec("embedding", padding_index=padding, norm_size=len(module.weight))
        if isinstance(module, nn.EmbeddingBag):
            return LayerSpec("bag", norm_size=len(module.weight))
        spec = norm_spec(module, reduce)
        over_positions = spec.norm in ("batch", "group", "instance")
        return spec._replace(max_examples=self._max_examples if over_positions else 0)

    def _reduces(self, module: nn.Module) -> bool:
        if isinstance(self._weight_sharing, str):
            return self._weight_sharing == "reduce"
        return self._weight_sharing.get(type(module).__name__, "expand") == "reduce"

    def _bias(self, name: str, module: nn.Module, bias: nn.Parameter, own_forward: bool = False) -> None:
        """A bias by itself: a product with the input 1; where nobody knows what follows it, nothing."""
        if own_forward:
            reason = f"this {type(module).__name__} has a forward of its own"
            self._reasons.setdefault(id(bias), f"{reason}, and does not train the weight with it")
            return
        axis = channel_axis(module)
        spec = LayerSpec("bias", channel_axis=axis, reduce=self._reduces(module))
        if bias.ndim != 1:
            self._reasons.setdefault(id(bias), "a shift of several axes without its scale")
        elif (id(bias), 0) not in self._by_weight:
            piece = Piece(bias, tensor_axes=self.tensor_axes[id(bias)])
            self._add(_join(name, "bias"), piece, None, "bias", Site(module, module, spec))

    def _attention(self, name: str, module: nn.MultiheadAttention) -> bool:
        """The four products of nn.MultiheadAttention, which its own forward does not show."""
        own = vars(module).get("forward")
        original = type(module).forward is nn.MultiheadAttention.forward
        if not original or not (own is None or isinstance(own, Attention)):
            self._say(module, f"{type(module).__name__} has a forward of its own")
            return False
        attention = Attention(module)
        self.attentions.append(attention)
        for key, weight, bias, start, stop in attention.products():
            if weight is None or why_not(weight):
                continue
            if not isinstance(weight, nn.Parameter):
                packed = "in_proj_weight" if module._qkv_same_embed_dim else f"{key}_proj_weight"
                user, attribute = (module.out_proj, "weight") if key == "out" else (module, packed)
                self._say_computed(user, attribute, bias)
                continue
            piece = Piece(weight, start, stop)
            bias_piece = None
            if bias is not None and bias.requires_grad and self._together(weight, bias):
                out = piece.shape[0]
                at = {"q": 0, "k": out, "v": 2 * out}.get(key) if key != "out" else None
                bias_piece = Piece(bias) if at is None else Piece(bias, at, at + out)
            spec = LayerSpec(
                "dense",
                bias=bias_piece is not None,
                max_rows=self._max_rows,
                reduce=self._reduces(module),
            )
            inner = "out_proj" if key == "out" else f"in_proj.{key}"
            site = Site(attention.product(key), module, spec)
            self._add(_join(name, inner), piece, bias_piece, "matrix", site)
        for key in ("bias_k", "bias_v"):
            parameter = getattr(module, key)
            if parameter is not None:
                self._free_parameters(name, module, {key: parameter})
        return True

    def _recurrent(self, name: str, module: nn.Module) -> None:
        """The products of a recurrent module that is written out."""
        for product in module.modules():
            if not isinstance(product, Product):
                continue
            weight = getattr(module, product.weight_name)
            bias = getattr(module, product.bias_name) if product.bias_name else None
            if not isinstance(weight, nn.Parameter):
                self._say_computed(module, product.weight_name, bias)
                continue
            if why_not(weight):
                continue
            with_bias = isinstance(bias, nn.Parameter) and bias.requires_grad
            with_bias = with_bias and self._together(weight, bias)  # type: ignore[arg-type]
            spec = LayerSpec("dense", bias=with_bias, max_rows=self._max_rows)
            piece = Piece(bias) if bias is not None and with_bias else None
            site = Site(product, module, spec)
            self._add(_join(name, product.weight_name), Piece(weight), piece, "matrix", site)

    def _parametrized(self, name: str, module: nn.Module, own: dict[str, nn.Parameter]) -> None:
        """weight_norm, spectral_norm and pruning of a known layer: see `Site.scaling`."""
        direction, magnitude, scaling = parametrization(module)
        layout: Layout = "matrix"
        if isinstance(module, TRANSPOSED):
            layout = "transposed"
            if scaling == "weight_norm":
                scaling, magnitude = "weight_norm of inputs", None
            elif scaling not in ("spectral_norm", "pruned"):
                direction = None
        if not isinstance(module, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)) or direction is None:
            self._say(module, _COMPUTED)
            for parametrized in getattr(module, "parametrizations", {}).values():
                self._say(parametrized, _COMPUTED, recurse=True)
            return
        if forward_of_its_own(module):  # what it returns need not be the product
            kind = type(module).__name__
            reason = f"its weight is computed, and this {kind} has a forward of its own"
            self._say(module, reason, recurse=True)
            return
        bias = own.get("bias")
        if not why_not(direction):
            spec = self._spec(module, direction, bias)
            site = Site(module, module, spec, scaling=scaling)
            self._add(name, Piece(direction), None, layout, site)
        if magnitude is not None and not why_not(magnitude):
            axis = channel_axis(module)
            spec = LayerSpec("norm", channel_axis=axis, reduce=self._reduces(module))
            site = Site(module, module, spec, scaling="magnitude")
            self._add(_join(name, "magnitude"), Piece(magnitude), None, "vector", site)
        if bias is not None and not why_not(bias):
            self._bias(name, module, bias)  # the scaling is not its
        if "bias_orig" in own:
            self._reasons.setdefault(id(own["bias_orig"]), _COMPUTED)

    def _linear_by_another_name(
        self, name: str, module: nn.Module, own: dict[str, nn.Parameter]
    ) -> None:
        """x W + b, whose weight lies (in, out)."""
        spec = LayerSpec("dense", reduce=self._reduces(module), max_rows=self._max_rows)
        weight, bias = own["weight"], own["bias"]
        reason = why_not(weight)
        if reason:
            self._reasons.setdefault(id(weight), reason)
        else:
            self._add(name, Piece(weight), None, "transposed", Site(module, module, spec))
        if not why_not(bias):
            self._bias(name, module, bias)

    def _own_parameters(
        self,
        name: str,
        module: nn.Module,
        own: dict[str, nn.Parameter],
        lists: Mapping[str, Mapping[str, nn.Parameter]],
    ) -> None:
        """Parameters that a module's own forward uses: as weights of products, or otherwise.

        Args:
            lists: its lists and dicts of parameters.
        """
        entries = {_join(key, k): p for key, some in lists.items() for k, p in some.items()}
        left = {
            key: p for key, p in (own | entries).items() if not self._is_left_out(_join(name, key), p)
        }
        real = {key: p for key, p in left.items() if not p.is_complex()}
        held = Counter(id(p) for p in (*module._parameters.values(), *entries.values()))  # by two names
        matrices = {
            key
            for key, p in real.items()
            if p.ndim > 1 and held[id(p)] == 1 and not self.tensor_axes[id(p)]
        }
        weights: list[OwnWeight] = []
        if matrices:
            first = {key: next(iter(some.values())) for key, some in lists.items() if some}
            read = own_weights(module, real, first)
            weights = [one for found in read for one in _of_each(found, lists)]
        biases = Counter(found.bias for found in weights)
        for found in weights:
            if found.name not in matrices:
                continue
            weight, bias = left[found.name], real.get(found.bias)
            if weight.ndim != found.ndim or len(weight) % found.groups:
                continue
            if weight.ndim > 2 and not found.axes and len(self._owners[id(weight)]) > 1:
                continue
            if bias is not None and (
                found.turned
                or bias.shape != weight.shape[:1]
                or biases[found.bias] > 1
                or len(self._owners[id(bias)]) > 1
                or not self._together(weight, bias)
            ):
                bias = None
            self._own_weight(name, module, found, weight, bias)
            left = {key: p for key, p in left.items() if p is not weight and p is not bias}
        for norm in own_norms(module, left.keys() & real.keys()) if left else []:
            used = [left[norm.name], *([left[norm.bias]] if norm.bias else [])]
            used = used if self._together(used[0], used[-1]) else used[:1]
            if not any(len(self._owners[id(p)]) > 1 or self.tensor_axes[id(p)] for p in used):
                self._own_norm(name, module, norm, *used)
                left = {key: p for key, p in left.items() if not any(p is one for one in used)}
        self._free_parameters(name, module, {key: p for key, p in left.items() if key in own})

    def _own_norm(
        self,
        name: str,
        module: nn.Module,
        found: OwnNorm,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
    ) -> None:
        over_positions = found.norm == "group"
        spec = LayerSpec(
            "norm",
            bias=bias is not None,
            norm=found.norm,
            channel_axis=1 if over_positions else -1,
            reduce=self._reduces(module),
            max_examples=self._max_examples if over_positions else 0,
        )
        site = Site(module, module, spec, functional=True, weight_name=found.name, bias_name=found.bias)
        own_name = name if name and found.name == "weight" else _join(name, found.name)
        own_bias = None if bias is None else Piece(bias)
        self._add(own_name, Piece(weight), own_bias, "unit" if own_bias else "vector", site)

    def _own_weight(
        self,
        name: str,
        module: nn.Module,
        found: OwnWeight,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
    ) -> None:
        reduce = self._reduces(module) and not found.stacked
        kernel = tuple(weight.shape[2:]) if found.axes else ()
        spec = LayerSpec(
            "convolution" if kernel else "stack" if found.stacked else "dense",
            bias=bias is not None,
            groups=len(weight) if found.stacked and not found.joined else found.groups,
            kernel=kernel,
            reduce=reduce,
            max_rows=0 if kernel and self._max_examples else self._max_rows,
            max_examples=self._max_examples if kernel else 0,
        )
        site = Site(module, module, spec, functional=True, weight_name=found.name, bias_name=found.bias)
        turned: Layout = "turned" if found.stacked else "transposed"
        layout: Layout = turned if found.turned else "matrix"
        own_name = name if name and found.name == "weight" else _join(name, found.name)
        own_bias = None if bias is None else Piece(bias)
        self._add(own_name, Piece(weight), own_bias, layout, site, found.leading, found.order)
        if found.stacked and self.layers[-1].weight.parameter is weight:
            self.stacks.setdefault(module, []).append(self.layers[-1])

    def _is_left_out(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether it has no block, for a reason that is noted."""
        named, reason = self._matches([name]), why_not(parameter, by_entries=True)
        if reason or named:
            self._reasons.setdefault(id(parameter), reason or "named by skip_layers")
            return True
        return False

    def _free_parameters(self, name: str, user: nn.Module, own: dict[str, nn.Parameter]) -> None:
        """Parameters that a module's own forward uses: seen through `free.FreeParameters`."""
        biases = {id(layer.bias.parameter) for layer in self.layers if layer.bias is not None}
        for key, parameter in own.items():
            if self._is_left_out(_join(name, key), parameter) or (id(parameter), 0) in self._by_weight:
                continue
            if id(parameter) in biases:  # a layer has it
                continue
            spec = LayerSpec("free", diagonal=(True, False), reduce=self._reduces(user))
            site = Site(user, user, spec)
            self._add(_join(name, key), Piece(parameter), None, "vector", site)
            self.free.setdefault(user, []).append(self.layers[-1])

    # ---- blocks --------------------------------------------------------------------------------

    def _add(
        self,
        name: str,
        weight: Piece,
        bias: Piece | None,
        layout: Layout,
        site: Site,
        leading: int = 1,
        order: tuple[int, ...] = (),
    ) -> None:
        """A new block, or another use of the weight of one.

        Args:
            leading: how many of the weight's axes are its first side.
            order: see `Layer.order`.
        """
        place = self._by_weight.get((id(weight.parameter), weight.start))
        if place is not None:
            self._tie(place, name, bias, layout, site, order)
            return
        spec = site.spec
        shape = tuple(weight.shape[axis] for axis in order) or weight.shape
        count, first = math.prod(shape), math.prod(shape[:leading])
        blocks, sizes = 1, (count, 1)
        if spec.kind == "stack":
            blocks, (matrices, *sides) = spec.groups, shape
            into, out = sides if layout == "turned" else sides[::-1]
            sizes = (into, out * matrices // blocks)
        elif layout == "matrix":
            blocks = spec.groups
            sizes = (count // first + spec.bias, first // blocks)
        elif layout == "transposed":
            blocks = spec.groups
            sizes = (first // blocks, count // first)
        elif layout == "table":
            sizes = shape  # type: ignore[assignment]
        elif layout == "unit":
            blocks, sizes = count, (2, 1)
        elif layout == "bias":
            sizes = (1, count)
        limit = self._max_factor_size
        diagonal = (
            sizes[0] > limit or layout in ("table", "vector"),
            sizes[1] > limit,
        )
        site = replace(site, spec=spec._replace(diagonal=diagonal))
        layer = Layer(name, weight, bias, layout, blocks, sizes, diagonal, (site,), order=order)
        self._by_weight[id(weight.parameter), weight.start] = len(self.layers)
        self.layers.append(layer)

    def _tie(
        self,
        place: int,
        name: str,
        bias: Piece | None,
        layout: Layout,
        site: Site,
        order: tuple[int, ...],
    ) -> None:
        """A weight in a second place: one block, whose statistics add up."""
        layer = self.layers[place]
        neither = (False, False)
        spec = site.spec._replace(diagonal=neither, bias=False)
        known = layer.spec._replace(diagonal=neither, bias=False)
        alike = (layout, order, spec) == (layer.layout, layer.order, known)
        if not alike and {layout, layer.layout} != {"matrix", "table"}:
            self._reasons[id(layer.weight.parameter)] = "its weight is used by layers of different kinds"
            return
        same = bias is not None and layer.bias is not None and bias.parameter is layer.bias.parameter
        if not same and layer.layout != "unit":
            # A bias that is not all uses' has a block of its own.
            self._split_bias(place)
            layer = self.layers[place]
            site = replace(site, spec=site.spec._replace(bias=False))
            if bias is not None:
                self._bias_apart(name, site, bias)
        if alike:
            site = replace(site, spec=layer.spec)
            self.layers[place] = replace(layer, sites=(*layer.sites, site))
        else:
            self._tie_table(place, layout, site)

    def _bias_apart(self, name: str, site: Site, bias: Piece) -> None:
        if bias.stop is None:
            self._bias(name, site.module, bias.parameter, site.functional)
        else:
            reason = "a product that has its own part of this bias shares its weight with another"
            self._reasons.setdefault(id(bias.parameter), reason)

    def _split_bias(self, place: int) -> None:
        layer = self.layers[place]
        if layer.bias is None:
            return
        self.layers[place] = replace(
            layer,
            bias=None,
            sizes=(layer.sizes[0] - 1, layer.sizes[1]),
            sites=tuple(replace(s, spec=s.spec._replace(bias=False)) for s in layer.sites),
        )
        self._bias_apart(layer.name, layer.sites[0], layer.bias)

    def _tie_table(self, place: int, layout: Layout, site: Site) -> None:
        """An embedding whose table is a linear layer's weight: the block is the linear layer's."""
        layer = self.layers[place]
        dense = site if layout == "matrix" else next(s for s in layer.sites if s.spec.kind == "dense")
        rows, width = layer.weight.parameter.shape
        wide = width > self._max_factor_size
        # The side of the table's rows is diagonal, because the lookups' is.
        known = [s for s in (*layer.sites, site) if s is not dense]
        dense = replace(dense, spec=dense.spec._replace(diagonal=(wide, True), bias=False))
        others = [
            replace(s, spec=dense.spec)
            if s.spec.kind == "dense"
            else replace(s, spec=s.spec._replace(diagonal=(True, wide)), transposed=True)
            for s in known
        ]
        self.layers[place] = Layer(
            layer.name,
            layer.weight,
            None,
            "matrix",
            1,
            (width, rows),
            (wide, True),
            (dense, *others),
        )

    # ---- why not -------------------------------------------------------------------------------

    def _say(self, module: nn.Module, reason: str, *, recurse: bool = False) -> None:
        for parameter in module.parameters() if recurse else self._own(module).values():
            self._reasons.setdefault(id(parameter), reason)

    def _say_computed(self, module: nn.Module, attribute: str, bias: nn.Parameter | None) -> None:
        """Of what makes up a weight that is no parameter itself, and of the bias that goes with it."""
        names = {f"{attribute}_{part}" for part in ("g", "v", "orig")}
        own = [
            parameter
            for name, parameter in module.named_parameters()
            if name.startswith(f"parametrizations.{attribute}.") or name in names
        ]
        for parameter in own if bias is None else [*own, bias]:
            self._reasons.setdefault(id(parameter), _COMPUTED)


def aliases(model: nn.Module) -> set[tuple[nn.Module, int]]:
    """Modules, and the ids of what they have of a layer inside: `self.weight = self.inner.weight`."""
    holders: dict[int, list[tuple[str, str, nn.Module]]] = {}
    for full, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((full, name, module))
    return {
        (module, parameter)
        for parameter, some in holders.items()
        for full, name, module in some
        for other, own, inner in some
        if other != full and other.startswith(full and full + ".") and not isinstance(module, KINDS)
        if isinstance(inner, KINDS) or (_is_weight(inner, own) and not _names(module, name))
    }


def _is_weight(module: nn.Module, name: str) -> bool:
    """Whether a module's own forward is a layer with a parameter of this name."""
    own = dict(module.named_parameters(recurse=False))
    found: list[OwnWeight | OwnNorm] = [*own_weights(module, own), *own_norms(module, own)]
    return any(name in (one.name, one.bias) for one in found)


def _names(module: nn.Module, name: str) -> bool:
    """Whether a module's forward may use what it has by this name."""
    code = getattr(type(module).forward, "__code__", None)
    return code is None or name in code.co_names


def _of_each(found: OwnWeight, lists: Mapping[str, Mapping[str, nn.Parameter]]) -> Iterator[OwnWeight]:
    """Of a list of parameters each, with its own bias."""
    if found.name not in lists:
        yield found
    for key in lists.get(found.name, ()):
        bias = _join(found.bias, key) if found.bias in lists else ""
        yield found._replace(name=_join(found.name, key), bias=bias)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:
        raise ValueError(f"skip_layers must be regular expressions, got {text!r}: {error}") from error


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
