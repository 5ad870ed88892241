"""A block that K-FAC preconditions: its parameters, and where its products can be seen."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from suite.torch.dtensors import block_shape, is_sharded, local
from suite.torch.recurrent import Product
from suite.torch.rows import LayerSpec

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PRODUCTS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, nn.Embedding, nn.EmbeddingBag, Product)

# How the gradient matrix (blocks, d_out, d_in) lies in the parameters: rows of a weight with the bias as
# a last column, a transposed convolution's, that of a stack of matrices (in, out), a table's; scale and
# shift of units; one row; one column.
Layout = Literal["matrix", "transposed", "turned", "table", "unit", "vector", "bias"]


@dataclass(frozen=True, eq=False)
class Piece:
    """A parameter, or some rows of it."""

    parameter: nn.Parameter
    start: int = 0
    stop: int | None = None
    tensor_axes: int = 0  # of its mesh, see dtensors.py: then it is this rank's block

    @property
    def dtype(self) -> torch.dtype:
        """That of its numbers: a complex parameter is one of its parts, on an axis more."""
        return self.parameter.dtype.to_real()

    @property
    def shape(self) -> tuple[int, ...]:
        if self.parameter.is_complex():
            return (*self.parameter.shape, 2)
        if self.stop is None:
            return block_shape(self.parameter, self.tensor_axes)
        return (self.stop - self.start, *self.parameter.shape[1:])

    def grad(self) -> torch.Tensor | None:
        """The gradient of these rows, in its own storage."""
        gradient = self.parameter.grad
        if gradient is not None and gradient.is_conj():  # whose parts are no view
            self.parameter.grad = gradient = gradient.resolve_conj()
        return None if gradient is None else self.rows_of(gradient)

    def rows_of(self, like_parameter: torch.Tensor) -> torch.Tensor:
        """These rows of a tensor that has all."""
        if like_parameter.is_complex():
            return torch.view_as_real(like_parameter)
        return like_parameter if self.stop is None else like_parameter[self.start : self.stop]

    def is_here(self) -> bool:
        """Whether no other rank has a part of it."""
        shape = block_shape(self.parameter, self.tensor_axes)
        return tuple(local(self.parameter).shape) == shape

    def local_grad(self) -> torch.Tensor | None:
        """What this rank has of the gradient: of a sharded parameter its part of all rows."""
        gradient = self.parameter.grad
        return self.grad() if gradient is None or not is_sharded(gradient) else local(gradient)


@dataclass(frozen=True, eq=False)
class Site:
    """A module whose forward calls show a layer's input and output."""

    module: nn.Module
    owner: nn.Module  # its `training` says whether the call is part of training
    spec: LayerSpec
    transposed: bool = False  # the weight is used as its transpose
    scaling: str = ""  # how a parametrized weight depends on the layer's: 'weight_norm', ...
    functional: bool = False  # the module's own forward hands the weight to a function: functional.py
    weight_name: str = "weight"  # of the module's parameters, as functions get them
    bias_name: str = "bias"

    def held(self, name: str) -> Any:
        """What the module has by a name now: while fully_shard's forward runs, a whole parameter."""
        found: Any = self.module
        for part in name.split("."):  # lists of parameters are modules, too
            found = getattr(found, part)
        return found


@dataclass(frozen=True, eq=False)
class Layer:
    """`blocks` blocks with factors of sides (d_in, d_out), over one weight and perhaps its bias."""

    name: str
    weight: Piece
    bias: Piece | None
    layout: Layout
    blocks: int
    sizes: tuple[int, int]
    diagonal: tuple[bool, bool]
    sites: tuple[Site, ...]
    tensor_split: str = ""  # how tensor parallelism cuts it into blocks, '' if it does not
    order: tuple[
        int, ...
    ] = ()  # the weight's axes in the matrix's, which lies otherwise; (): as they are

    @property
    def spec(self) -> LayerSpec:
        return self.sites[0].spec

    @property
    def has_gradients_in_A(self) -> bool:
        """Whether the squares of its gradients are summed in A, and G counts their rows."""
        return self.spec.kind in ("norm", "free")

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.parameter.device

    @property
    def is_product(self) -> bool:
        """Whether its module multiplies with a weight, so that it may be what a loss is made of."""
        return isinstance(self.sites[0].module, PRODUCTS) or self.spec.kind in ("dense", "stack")

    @functools.cached_property
    def plain_shape(self) -> tuple[int, ...] | None:
        """The shape of a weight whose rows are the matrix's, but for a bias; None: they are not."""
        shape = self.weight.shape
        width = self.sizes[0] - (self.bias is not None)
        plain = self.layout == "matrix" and not self.order and self.blocks == 1
        plain = plain and math.prod(shape[1:]) == width
        return shape if plain else None

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def parameters(self) -> list[nn.Parameter]:
        return [piece.parameter for piece in self.pieces]

    def zeros(self, like: torch.Tensor) -> list[torch.Tensor]:
        """What its gradients would be that are zero."""
        return [like.new_zeros(piece.shape) for piece in self.pieces]

    def gradient_matrix(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(blocks, d_out, d_in) from gradients: the weight's, the bias's as its last column."""
        if self.layout == "unit":
            second = torch.zeros_like(weight) if bias is None else bias.to(weight.dtype)
            return torch.stack([weight.reshape(-1), second.reshape(-1)], dim=-1)[:, None, :]
        if self.layout == "vector":
            return weight.reshape(1, 1, -1)
        if self.layout == "bias":
            return weight.reshape(1, -1, 1)
        if self.layout == "table":
            return weight.mT[None]
        if self.layout == "transposed":
            return weight.reshape(self.blocks, self.sizes[0], self.sizes[1]).mT
        if self.layout == "turned":
            return weight.mT.reshape(self.blocks, self.sizes[1], self.sizes[0])
        matrix = (weight.permute(self.order) if self.order else weight).reshape(
            self.blocks, self.sizes[1], -1
        )
        if bias is not None:
            column = bias.reshape(self.blocks, self.sizes[1], 1)
            matrix = torch.cat([matrix, column.to(matrix.dtype)], dim=-1)
        elif matrix.shape[-1] < self.sizes[0]:
            matrix = torch.cat([matrix, torch.zeros_like(matrix[..., :1])], dim=-1)
        return matrix

    def split(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        """(blocks, d_out, d_in) -> what is the weight's, and the bias's if there is one."""
        shape = self.weight.shape
        if self.layout == "unit":
            columns = [matrix[:, 0, 0].reshape(shape), matrix[:, 0, 1]]
        elif self.layout == "turned":
            columns = [matrix.reshape(shape[0], shape[2], shape[1]).mT]
        elif self.layout in ("table", "transposed"):
            columns = [matrix.mT.reshape(shape), matrix[..., 0]]
        else:
            if self.order:
                turned = matrix.reshape([shape[axis] for axis in self.order])
                return [turned.permute([self.order.index(axis) for axis in range(len(shape))])]
            if self.bias is None and math.prod(shape) == matrix.numel():
                return [matrix.reshape(shape)]
            width = math.prod(shape) // (self.blocks * self.sizes[1])
            own = matrix[..., :width] if self.layout == "matrix" else matrix
            columns = [own.reshape(shape), matrix[..., -1]]
        return columns[:1] if self.bias is None else [columns[0], columns[1].reshape(self.bias.shape)]


def joined_gradients(
    layers: Sequence[Layer], gradients: Sequence[Sequence[torch.Tensor]]
) -> torch.Tensor:
    """(blocks, d_out, d_in): the gradient matrices of layers of one size, one behind the other.

    Args:
        gradients: of each layer, the weight's, and the bias's if it has one.
    """
    if not _are_alike(layers) or len({len(own) for own in gradients}) > 1:
        matrices = [layer.gradient_matrix(*own) for layer, own in zip(layers, gradients, strict=True)]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)
    weights, *biases = map(torch.stack, zip(*gradients, strict=True))
    rows = weights.flatten(2)
    if layers[0].bias is None:
        return rows
    column = biases[0][..., None].to(rows.dtype) if biases else torch.zeros_like(rows[..., :1])
    return torch.cat([rows, column], dim=-1)


def split_directions(layers: Sequence[Layer], joined: torch.Tensor) -> list[list[torch.Tensor]]:
    """Undo `joined_gradients`: what is each layer's weight's, and its bias's if there is one."""
    if len(layers) == 1:
        return [layers[0].split(joined)]
    if not _are_alike(layers):
        matrices = joined.split([layer.blocks for layer in layers])
        return [layer.split(matrix) for layer, matrix in zip(layers, matrices, strict=True)]
    shape, bias = layers[0].plain_shape, layers[0].bias is not None
    assert shape is not None
    weights = (joined[..., :-1] if bias else joined).unflatten(-1, shape[1:]).unbind()
    return [
        list(own) for own in zip(weights, *([joined[..., -1].unbind()] if bias else []), strict=True)
    ]


def _are_alike(layers: Sequence[Layer]) -> bool:
    """Whether they are several whose gradients can be stacked before they become matrices."""
    first = layers[0]
    return (
        len(layers) > 1
        and first.plain_shape is not None
        and all(layer.plain_shape == first.plain_shape for layer in layers)
        and len({layer.bias is None for layer in layers}) == 1
    )
