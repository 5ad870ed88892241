"""Layers as JAX writes them: one product of activations with a re-indexed parameter leaf."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from suite.core import patches
from suite.core.statistics import LayerStatistics, second_moment_sum

Step = tuple[str, tuple[Any, ...]]


class Dense(NamedTuple):
    """A dot_general. Axes are grouped as (batch, free, contracted), each group in product order."""

    x_axes: tuple[tuple[int, ...], ...]
    w_axes: tuple[tuple[int, ...], ...]
    x_first: bool  # whether x is the left operand: the output is (batch, x free, w free) then


class Convolution(NamedTuple):
    """A conv_general_dilated; specs are positions of (batch, feature, *spatial) as in XLA."""

    x_spec: tuple[int, ...]
    w_spec: tuple[int, ...]  # (out feature, in feature, *spatial)
    out_spec: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int


class LayerSpec(NamedTuple):
    """Everything static about a layer; equal for all uses of its leaf."""

    leaf: int  # the weight's place among the parameter leaves
    steps: tuple[Step, ...]  # from the leaf to the product's operand
    operand: tuple[int, ...]  # shape of that operand
    product: Dense | Convolution


class Layer(NamedTuple):
    """One preconditioned layer: `groups` blocks with factors of sides `sizes` = (d_in, d_out)."""

    name: str
    spec: LayerSpec
    bias: int | None  # the bias's place among the parameter leaves
    groups: int
    sizes: tuple[int, int]  # d_in counts the bias
    diagonal: tuple[bool, bool]


def block_shape(spec: LayerSpec) -> tuple[int, int, int]:
    """(groups, d_out, d_in without bias) of a layer's gradient matrix."""
    product, shape = spec.product, spec.operand
    if isinstance(product, Convolution):
        out = shape[product.w_spec[0]]
        return product.groups, out // product.groups, math.prod(shape) // out
    batch, free, contracted = (math.prod(shape[a] for a in axes) for axes in product.w_axes)
    return batch, free, contracted


def feature_axes(spec: LayerSpec) -> tuple[int, ...]:
    """Axes of the product's output that run over its blocks and features, in that order."""
    product = spec.product
    if isinstance(product, Convolution):
        return (product.out_spec[1],)
    batch, x_free, w_free = len(product.x_axes[0]), len(product.x_axes[1]), len(product.w_axes[1])
    start = batch + (x_free if product.x_first else 0)
    return (*range(batch), *range(start, start + w_free))


def input_rows(x: jax.Array, spec: LayerSpec) -> jax.Array:
    """(groups, rows, d_in without bias)."""
    product = spec.product
    if isinstance(product, Convolution):
        return patches.patches(
            jnp.transpose(x, product.x_spec),
            product.kernel,
            product.stride,
            product.padding,
            product.dilation,
            product.groups,
        )
    return _grouped(x, product.x_axes)


def output_rows(gradient: jax.Array, spec: LayerSpec) -> jax.Array:
    """(groups, rows, d_out)."""
    product = spec.product
    if isinstance(product, Convolution):
        return patches.output_rows(jnp.transpose(gradient, product.out_spec), product.groups)
    groups, d_out, _ = block_shape(spec)
    if product.x_first:
        return gradient.reshape(groups, -1, d_out)
    return jnp.matrix_transpose(gradient.reshape(groups, d_out, -1))


def layer_statistics(
    x: jax.Array, gradient: jax.Array, layer: Layer, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(Σ a aᵀ, Σ g gᵀ, rows) of one use of a layer, from its input and its output's gradient."""
    inputs = input_rows(x.astype(dtype), layer.spec)
    outputs = output_rows(gradient.astype(dtype), layer.spec)
    A = second_moment_sum(inputs, diagonal=layer.diagonal[0], bias=layer.bias is not None)
    G = second_moment_sum(outputs, diagonal=layer.diagonal[1])
    return A, G, jnp.full((), inputs.shape[1], jnp.float32)


def empty_statistics(layer: Layer, dtype: Any) -> LayerStatistics:
    """Zeros of the shapes of a layer's statistics."""

    def factor(side: int, diagonal: bool) -> jax.Array:
        shape = (layer.groups, side) if diagonal else (layer.groups, side, side)
        return jnp.zeros(shape, dtype)

    A, G = (factor(s, d) for s, d in zip(layer.sizes, layer.diagonal, strict=True))
    return LayerStatistics(A, G, jnp.zeros((), jnp.float32))


def gradient_matrix(leaves: list[jax.Array], layer: Layer) -> jax.Array:
    """(groups, d_out, d_in) out of the gradient's leaves, the bias as last column."""
    operand = apply_steps(leaves[layer.spec.leaf], layer.spec.steps)
    product = layer.spec.product
    if isinstance(product, Convolution):
        matrix = jnp.transpose(operand, product.w_spec).reshape(block_shape(layer.spec))
    else:
        matrix = _grouped(operand, product.w_axes)
    if layer.bias is None:
        return matrix
    column = leaves[layer.bias].reshape(layer.groups, layer.sizes[1], 1)
    return jnp.concatenate([matrix, column.astype(matrix.dtype)], axis=-1)


def write_gradient(leaves: list[jax.Array], layer: Layer, matrix: jax.Array) -> None:
    """Undo `gradient_matrix`: put the direction into the list of leaves."""
    spec, product = layer.spec, layer.spec.product
    if layer.bias is not None:
        old = leaves[layer.bias]
        leaves[layer.bias] = matrix[..., -1].reshape(old.shape).astype(old.dtype)
        matrix = matrix[..., :-1]
    if isinstance(product, Convolution):
        order: tuple[int, ...] = product.w_spec
    else:
        order = tuple(axis for axes in product.w_axes for axis in axes)
    operand = matrix.reshape([spec.operand[axis] for axis in order])
    operand = jnp.transpose(operand, _inverse(order))
    old = leaves[spec.leaf]
    leaves[spec.leaf] = invert_steps(operand, spec.steps).astype(old.dtype)


def apply_steps(x: Any, steps: tuple[Step, ...]) -> Any:
    """Re-index a leaf (a jax or numpy array) the way the program did."""
    for kind, arguments in steps:
        if kind == "transpose":
            x = x.transpose(arguments[0])
        elif kind == "reshape":
            x = x.reshape(arguments[1])
        else:
            shape, axes = arguments
            expanded = [1] * len(shape)
            for size, axis in zip(x.shape, axes, strict=True):
                expanded[axis] = size
            x = np.broadcast_to(x.reshape(expanded), shape)
    return x


def invert_steps(x: jax.Array, steps: tuple[Step, ...]) -> jax.Array:
    """Undo `apply_steps`, for steps that lose nothing."""
    for kind, arguments in reversed(steps):
        if kind == "transpose":
            x = jnp.transpose(x, _inverse(arguments[0]))
        else:
            assert kind == "reshape"
            x = x.reshape(arguments[0])
    return x


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.argsort(order))


def _grouped(x: jax.Array, axes: tuple[tuple[int, ...], ...]) -> jax.Array:
    """Transpose to the order of three groups of axes and flatten each group."""
    sides = [math.prod(x.shape[a] for a in group) for group in axes]
    return jnp.transpose(x, [a for group in axes for a in group]).reshape(sides)
