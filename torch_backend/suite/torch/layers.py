"""A block that K-FAC preconditions: its parameters, and where its products can be seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from suite.torch.dtensors import block_shape, is_sharded, local
from suite.torch.recurrent import Product
from suite.torch.rows import LayerSpec

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PRODUCTS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, nn.Embedding, nn.EmbeddingBag, Product)

# How the gradient matrix (blocks, d_out, d_in) lies in the parameters: rows of a weight with the bias as
# a last column, a transposed convolution's, a table's; scale and shift of units; one row; one column.
Layout = Literal["matrix", "transposed", "table", "unit", "vector", "bias"]


@dataclass(frozen=True, eq=False)
class Piece:
    """A parameter, or some rows of it."""

    parameter: nn.Parameter
    start: int = 0
    stop: int | None = None
    tensor_axes: int = 0  # of its mesh, see dtensors.py: then it is this rank's block

    @property
    def shape(self) -> tuple[int, ...]:
        if self.stop is None:
            return block_shape(self.parameter, self.tensor_axes)
        return (self.stop - self.start, *self.parameter.shape[1:])

    def grad(self) -> torch.Tensor | None:
        """The gradient of these rows, in its own storage."""
        gradient = self.parameter.grad
        if gradient is None or self.stop is None:
            return gradient
        return gradient[self.start : self.stop]

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

    @property
    def spec(self) -> LayerSpec:
        return self.sites[0].spec

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.parameter.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.parameter.device

    @property
    def is_product(self) -> bool:
        """Whether its module multiplies with a weight, so that it may be what a loss is made of."""
        return isinstance(self.sites[0].module, PRODUCTS) or self.spec.kind == "dense"

    def parameters(self) -> list[nn.Parameter]:
        return [piece.parameter for piece in (self.weight, self.bias) if piece is not None]

    def gradient_matrix(
        self, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(blocks, d_out, d_in): the weight's gradient, the bias's as its last column.

        Args:
            weight, bias: the gradients; default: those that the parameters have.
        """
        if weight is None:
            weight, bias = self.weight.grad(), self.bias.grad() if self.bias is not None else None
        assert weight is not None
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
        matrix = weight.reshape(self.blocks, self.sizes[1], -1)
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
        elif self.layout in ("table", "transposed"):
            columns = [matrix.mT.reshape(shape), matrix[..., 0]]
        else:
            if self.bias is None and math.prod(shape) == matrix.numel():
                return [matrix.reshape(shape)]
            width = math.prod(shape) // (self.blocks * self.sizes[1])
            own = matrix[..., :width] if self.layout == "matrix" else matrix
            columns = [own.reshape(shape), matrix[..., -1]]
        return columns[:1] if self.bias is None else [columns[0], columns[1].reshape(self.bias.shape)]
