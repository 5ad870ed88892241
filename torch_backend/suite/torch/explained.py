"""In the first step: whether a layer's calls explain its weight's gradient, or others use it, too."""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.hooks import unserializable_hook

from suite.core import explained, patches
from suite.core.noise import unit_noise
from suite.torch.dtensors import is_sharded
from suite.torch.hooks import is_batched, uncompiled
from suite.torch.layers import Layer
from suite.torch.rows import LayerSpec, batched, padded, rows_of

_ERROR = 1e-3  # of sums in single precision, whose factors may be rounded to TF32
_ERROR_OF_HALVES = 0.05
_PROBES = 2  # random vectors
_AT_ONCE = 2**22  # numbers of a matrix or of examples of which copies are made


def can_be_explained(layer: Layer) -> bool:
    """Whether a layer's rows make all of its weight's gradient, if it is used nowhere else."""
    weight = layer.weight.parameter
    return (
        layer.spec.kind in ("dense", "convolution", "transposed", "embedding")
        and layer.layout in ("matrix", "table", "transposed")
        and layer.weight.stop is None
        and not layer.tensor_split
        and not is_sharded(weight)
        and not weight._backward_hooks  # which may make another gradient of it
        and all(site.module is site.owner and not site.scaling for site in layer.sites)
    )


class _Sums(NamedTuple):
    """Of a backward pass, or of a call in it."""

    along: torch.Tensor
    size: torch.Tensor
    error: float  # of products of factors in their precision
    rows: int  # that are summed in single precision, each with an error of that
    terms: int  # that are summed in the weight's precision

    def __add__(self, other: _Sums) -> _Sums:  # type: ignore[override]
        sums = self.along + other.along, self.size + other.size
        counts = self.rows + other.rows, self.terms + other.terms
        return _Sums(*sums, max(self.error, other.error), *counts)


class Explained:
    """Compares R ∇ᵀ with Σ (R a) gᵀ of a layer's calls, for each backward pass by itself."""

    def __init__(self, layer: Layer, probes: dict[tuple[int, torch.device], torch.Tensor]) -> None:
        """`probes`: R by its length and device, of all layers that are asked about."""
        self.layer, self._probes = layer, probes
        self.is_off = False  # whether there were calls of which it cannot be told
        self._width = layer.gradient_matrix(layer.weight.parameter.detach()).shape[-1]
        self._passing: dict[int, _Sums] = {}  # by backward pass
        self._found: torch.Tensor | None = None  # whether a pass made another gradient
        self._was_called = False
        own = weakref.ref(self)

        @uncompiled
        @unserializable_hook  # a copy of the parameter asks nobody
        def arrived(gradient: torch.Tensor | None) -> None:
            asked = own()
            if asked is not None and gradient is not None:  # a graph may have none for it
                asked._arrived(gradient)

        self.handle = layer.weight.parameter.register_hook(arrived)

    def add(self, spec: LayerSpec, turned: bool, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """A backward pass comes to a call; `turned`: a lookup of rows that products have as columns."""
        if self.is_off:
            return
        if is_batched(gradient) or gradient.layout is not torch.strided:
            self.is_off = True
            return
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            if spec.kind != "embedding":
                along, size, rows = _of_products(spec, x, gradient, self._probes_on(gradient))
            else:
                along, size = self._of_lookups(x.reshape(-1), gradient, spec, turned)
                rows = x.numel()
        error = _ERROR if gradient.dtype.itemsize >= 4 else _ERROR_OF_HALVES
        terms = rows if spec.kind == "embedding" else 1
        found, now = _Sums(along, size, error, rows, terms), torch._C._current_graph_task_id()
        self._passing[now] = self._passing[now] + found if now in self._passing else found
        self._was_called = True

    def _of_lookups(
        self, x: torch.Tensor, gradient: torch.Tensor, spec: LayerSpec, turned: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = gradient.reshape(-1, gradient.shape[-1])
        probes, counts = self._probes_on(gradient), x != spec.padding_index
        if not turned:
            return explained.rows_along((probes[:, x] * counts)[None], outputs[None])
        shares = explained.along(outputs[None], probes[:, : outputs.shape[-1]]) * counts
        zeros = shares.new_zeros(1, _PROBES, self.layer.weight.shape[0])
        return zeros.index_add(2, x, shares), zeros.index_add(2, x, shares.abs())

    def _probes_on(self, like: torch.Tensor) -> torch.Tensor:
        """R, a column for each of the gradient's matrix."""
        key = self._width, like.device
        if key not in self._probes:
            stream = torch.zeros(1, dtype=torch.int32, device=like.device)
            self._probes[key] = unit_noise(stream, 0, (_PROBES, self._width), torch.float32)[0]
        return self._probes[key]

    def _arrived(self, gradient: torch.Tensor) -> None:
        """All of a pass's gradient by the weight is there."""
        if self.is_off:
            return
        if gradient.layout is not torch.strided or is_batched(gradient):
            self.is_off = True
            return
        weight = self.layer.weight.parameter
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
            along, *penalties = self._along(gradient, weight)
            sums = self._passing.pop(torch._C._current_graph_task_id(), None)
            if sums is None:  # no call of the layer was in this pass
                sums = _Sums(torch.zeros_like(along), along.abs(), _ERROR, 0, 0)
            halves = min(gradient.dtype.itemsize, weight.dtype.itemsize) < 4
            error = _ERROR_OF_HALVES if halves else sums.error
            error += sums.rows * torch.finfo(torch.float32).eps
            error += sums.terms * torch.finfo(gradient.dtype).eps
            found = explained.is_unexplained(along, *sums[:2], penalties, error)
            self._found = found if self._found is None else self._found | found

    def _along(self, gradient: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        """R ∇ᵀ, R Wᵀ and R sign(W)ᵀ, some rows of the matrices at a time."""
        probes = self._probes_on(gradient)
        matrices = [self.layer.gradient_matrix(x.detach()) for x in (gradient, weight)]
        count = max(1, _AT_ONCE // (len(matrices[0]) * matrices[0].shape[-1]))
        parts = [
            (explained.along(g, probes), *explained.penalties_along(w, probes))
            for g, w in zip(*(x.split(count, dim=1) for x in matrices), strict=True)
        ]
        return [torch.cat(own, dim=2) for own in zip(*parts, strict=True)]

    def misses_uses(self) -> bool:
        """Whether any pass made another gradient, as far as that can be told."""
        found, self._found, self._passing = self._found, None, {}
        if self.is_off or not self._was_called or found is None:
            return False
        return bool(found.any())


def _of_products(
    spec: LayerSpec, x: torch.Tensor, gradient: torch.Tensor, probes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Σ (R a) gᵀ and Σ |R a| |g|ᵀ of each block, and of how many rows; some examples at a time."""
    if spec.axes is not None:
        x, gradient = spec.axes.input(x), spec.axes.output(gradient)
    spec = spec._replace(axes=None, reduce=False)
    if spec.kind == "dense":
        x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    else:
        x, gradient = batched(x, spec), batched(gradient, spec)
    numbers = [math.prod(x.shape[1:]), math.prod(gradient.shape[1:])]
    if spec.kind == "transposed":  # whose rows are the output's patches
        numbers.append(gradient.shape[1] * math.prod(spec.kernel) * math.prod(x.shape[2:]))
    count = max(1, _AT_ONCE // max(1, *numbers))
    found, rows = [], 0
    for some, of in zip(x.split(count), gradient.split(count), strict=True):
        if spec.kind == "convolution":
            shares, outputs = _along_patches(spec, some, probes), patches.output_rows(of, spec.groups)
        else:
            inputs, outputs = rows_of(spec, some, of)
            shares = explained.along(inputs, probes[:, : inputs.shape[-1]])
        found.append(explained.rows_along(shares, outputs))
        rows += outputs.shape[1]
    along, size = (torch.stack(own).sum(0) for own in zip(*found, strict=True))
    return along, size, rows


def _along_patches(spec: LayerSpec, x: torch.Tensor, probes: torch.Tensor) -> torch.Tensor:
    """R a of each group's patches, (groups, k, rows): the convolution with R in the weight's place."""
    width = x.shape[1] // spec.groups
    kernel = probes[:, : width * math.prod(spec.kernel)].reshape(-1, width, *spec.kernel)
    x = padded(x.to(torch.promote_types(x.dtype, torch.float32)), spec)
    kernel = kernel.to(x.dtype).repeat(spec.groups, *(1,) * (kernel.ndim - 1))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(spec.kernel) - 1]
    y = convolve(x, kernel, None, spec.stride, 0, spec.dilation, spec.groups)
    return y.unflatten(1, (spec.groups, -1)).flatten(3).permute(1, 2, 0, 3).flatten(2)
