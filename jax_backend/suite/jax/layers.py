"""Layers as JAX writes them: products of activations with views of a parameter leaf."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from suite.core import correlations, patches
from suite.core.ekfac import grouped_second_moment_in_basis, second_moment_in_basis
from suite.core.linalg import grouped_products
from suite.core.statistics import (
    complex_gradient,
    complex_second_moment_sum,
    cross_moment_sum,
    grouped_second_moment_sum,
    second_moment_sum,
)
from suite.jax.probes import ComplexScale, Mask, Multiplier, RowScale
from suite.jax.slopes import Slope
from suite.jax.varying import varying_alike
from suite.jax.views import (
    Shape,
    Step,
    View,
    apply_steps,
    entries,
    grouped,
    matrices,
    write_matrices,
)

Bases = tuple[jax.Array | None, jax.Array | None]  # eigenvectors of (A, G)


class Dense(NamedTuple):
    """A dot_general. The axes of x are grouped as (batch, free, contracted), in product order."""

    x_axes: tuple[Shape, Shape, Shape]
    w_free: int  # how many free axes w has
    x_first: bool  # whether x is the left operand: the output is (batch, x free, w free) then


class Convolution(NamedTuple):
    """A conv_general_dilated; specs are positions of (batch, feature, *spatial) as in XLA."""

    x_spec: Shape
    out_spec: Shape
    kernel: Shape
    stride: Shape
    padding: tuple[tuple[int, int], ...]
    x_dilation: Shape
    dilation: Shape
    groups: int


class Lookup(NamedTuple):
    """Rows of a table; x are the indices, (..., components)."""

    rows: int
    offset_axes: Shape  # of the output: the features
    clip: bool
    component: int


class Grouped(NamedTuple):
    """A ragged_dot: rows (n, d_in), those of one group behind those of another."""

    sizes: int  # the value that says how many rows each group has


class ComplexPart(NamedTuple):
    """A leaf times `factor` is the real part of a complex weight, or the imaginary one."""

    imaginary: bool
    factor: float
    labels: tuple[str, str, str] | None = None  # of a product that sums: the weight's axes, x's, y's


class Elementwise(NamedTuple):
    """A sum with, or product by, a leaf that is broadcast: `steps` from the leaf to the operand.

    Or a choice of the leaf where it is put in the place of activations.
    """

    shape: Shape  # of the leaf, or of the part of it that an enclosing scan takes
    steps: tuple[Step, ...]
    multiplies: bool
    sign: int  # -1 where the leaf is subtracted
    case: int | None = None  # the choice that takes the leaf
    part: ComplexPart | None = None

    def gradient(self, x: Any, of_output: jax.Array) -> jax.Array:
        """What each place adds to the leaf's gradient; x is the factor, or what chooses."""
        if self.case is not None:
            return jnp.where(x == self.case, of_output, 0)
        if self.part is not None and self.part.labels is not None:
            own = complex_gradient(*_parts(x, of_output), self.part.labels, self.operand)
            return self.part.factor * own[self.part.imaginary]
        found = of_output * x if self.multiplies else self.sign * of_output
        if self.part is not None:  # of the conjugate of what the gradient by a complex number is
            found = self.part.factor * (-found.imag if self.part.imaginary else found.real)
        return found

    def squares(self, x: Any, of_output: jax.Array, reduce: bool) -> jax.Array:
        """Σ over rows of the squares of each one's gradient: of the leaf's, or its part's, shape."""
        if self.part is not None and self.part.labels is not None:
            given = *_parts(x, of_output), "contraction", self.operand
            both = complex_second_moment_sum(*given, labels=self.part.labels)
            return _to_leaf(self, self.part.factor**2 * both[self.part.imaginary])
        factor = jnp.broadcast_to(x, of_output.shape).astype(of_output.dtype) if self.multiplies else x
        rows = self.gradient(factor, of_output)
        rows, shared = _of_examples(self, rows) if reduce else (rows, 1)
        return _to_leaf(self, rows * rows) / shared

    @property
    def operand(self) -> Shape:
        """The shape of what the leaf has become."""
        shape: Shape = entries(self.shape, (), (), self.steps).shape
        return shape


Product = Dense | Convolution | Lookup | Grouped | Elementwise


class Factor(NamedTuple):
    """What a leaf is multiplied with before it meets rows: an operand of the equation at `path`."""

    path: tuple[int, ...]
    operand: int
    steps: tuple[Step, ...]  # what follows before the rows


class Part(NamedTuple):
    """One of the products with a leaf that a sum joins: what is multiplied there, and its sign."""

    path: tuple[int, ...]
    operand: int
    sign: int
    sloped: Sloped | None  # what is multiplied besides


class Sloped(NamedTuple):
    """What rows meet is a function of a leaf's entries: its derivative, where they meet."""

    slope: Slope
    steps: tuple[Step, ...]  # from there to the rows

    def derivative(self, operand: jax.Array) -> jax.Array:
        return apply_steps(operand, self.steps)


# Of a lookup once for all examples inputs are seen there, outputs where each example has its own.
Half = Literal["both", "inputs", "outputs"]


class Use(NamedTuple):
    """One place in the program where a layer's product is."""

    path: tuple[int, ...]
    out: int
    x_operand: int | None
    product: Product
    transposed: bool  # whether it uses W as Wᵀ
    scans: tuple[tuple[int, ...], ...]  # the loops that take the leaf apart
    lengths: Shape  # and their lengths
    groups: int  # blocks in each of their steps
    rows: int  # rows of one block; where they are grouped, of all
    x_window: Step | None = None  # what part of the input it reads
    y_window: Step | None = None  # what part of the output is its own, where leaves are concatenated
    factor: Factor | None = None  # of the input
    examples: int = 0  # rows of one block with 'reduce'
    multipliers: tuple[Multiplier, ...] = ()  # of the leaf
    bias_multipliers: tuple[Multiplier, ...] = ()
    biased: bool = False  # whether the layer's bias is added to it
    once: bool = False  # whether its input is the same for all examples
    half: Half = "both"
    shared_by: int = 1  # examples, of a lookup's inputs
    features: int | None = None  # the axis of what a lookup found, of its outputs; None: numbers
    row_scales: tuple[RowScale, ...] = ()  # what rows or columns of its matrices are multiplied with
    masks: tuple[Mask, ...] = ()  # and what leaves entries of them out
    complex_scales: tuple[ComplexScale, ...] = ()
    parts: tuple[Part, ...] = ()  # of a sum of products, whose input is that of their inputs
    sloped: Sloped | None = None
    divided_by: tuple[tuple[int, ...], int] | None = None  # an operand: what is made of a leaf divides
    inverts: bool = False  # whether a leaf is divided by the input
    sizes: tuple[tuple[int, ...], int] | None = None  # an operand: how many rows each group has

    @property
    def place(self) -> tuple[Any, ...]:
        """One for each use of a leaf in the program."""
        part = self.product.part if isinstance(self.product, Elementwise) else None
        return self.path, self.out, self.x_window, self.y_window, part

    @property
    def chains(self) -> tuple[tuple[Multiplier, ...], ...]:
        """Of the weight and the bias; () where neither is multiplied, and x comes without them."""
        both = self.multipliers, self.bias_multipliers
        return both if any(both) else ()

    @property
    def slopes(self) -> tuple[Slope, ...]:
        sloped = [part.sloped for part in self.parts] + [self.sloped]
        return tuple(one.slope for one in sloped if one is not None)

    @property
    def operands(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Where those are, which x comes with, and slopes."""
        there: tuple[RowScale | Mask | ComplexScale | Part, ...]
        there = (*self.row_scales, *self.masks, *self.complex_scales, *self.parts)
        others = (one for one in (self.divided_by, self.sizes) if one is not None)
        slopes = (slope.key for slope in self.slopes)
        return (*((one.path, one.operand) for one in there), *slopes, *others)

    @property
    def reads(self) -> tuple[Any, ...]:
        """What a probe needs besides its place and its operand."""
        changes: tuple[RowScale | Mask, ...] = (*self.row_scales, *self.masks)
        apart = tuple(((one.path, one.operand), one.scans) for one in changes if one.scans)
        return self.factor, self.chains, self.operands, self.slopes, apart

    def own(self, layer: Layer, x: Any, gradient: jax.Array) -> _Own:
        """Its part of the product's input and of its output's gradient, and what both are scaled with.

        y = (c W) a + c' b is W and b on the coordinates (c a, c'), which the lengths are: of (a, 1).
        All uses of a layer with a bias are on these, for they add up: those without the bias on c a.
        Without a bias the gradient gets c, and A stays what other layers with this input share; so it
        does in uses as Wᵀ, whose sums are apart.
        """
        lengths, by_input, by_output, mask, ends = None, None, None, None, None
        derivative: Any = None
        if self.chains or self.operands:
            x, factors, operands = x
            given = iter(operands)
            for scale in self.row_scales:
                vector = scale.vector(next(given).astype(gradient.dtype))
                if scale.of_outputs:
                    by_output = _both(by_output, vector)
                else:
                    by_input = _both(by_input, vector)
            for one in self.masks:
                mask = _both(mask, one.matrix(next(given)).astype(gradient.dtype))
            for times in self.complex_scales:
                factor = times.factor(next(given))
                x, gradient = (x, gradient * factor) if times.of_outputs else (x * factor, gradient)
            inputs = [next(given).astype(gradient.dtype) for _ in self.parts]
            derivatives = [
                None if one is None else one.derivative(next(given).astype(gradient.dtype))
                for one in (*(part.sloped for part in self.parts), self.sloped)
            ]
            derivative = derivatives.pop()
            if self.parts:
                each = zip(self.parts, inputs, derivatives, strict=True)
                x = sum(part.sign * (own if by is None else own * by) for part, own, by in each)
            if self.divided_by is not None:
                divisor = next(given).astype(gradient.dtype)
                derivative = -(1 if derivative is None else derivative) / divisor**2
            if self.sizes is not None:
                ends = jnp.cumsum(next(given))
        if self.chains:
            c, bias_c = (factor.astype(gradient.dtype) for factor in factors)
            if layer.bias is None or self.transposed:
                gradient = gradient * c
            else:
                lengths = jnp.full(layer.sizes[0] - 1, c)
                lengths = jnp.append(lengths, bias_c) if self.biased else lengths
        if self.x_window is not None:
            x = apply_steps(x, (self.x_window,))
        if self.y_window is not None:
            gradient = apply_steps(gradient, (self.y_window,))
        if self.inverts:
            x = 1 / x
        if derivative is not None:
            of_input = isinstance(self.product, Elementwise) and self.product.multiplies
            x, gradient = (x * derivative, gradient) if of_input else (x, gradient * derivative)
        return _Own(x, gradient, lengths, by_input, by_output, mask, ends)


class _Own(NamedTuple):
    """A use's part of a product, and what its matrices are times: by input and output, and by entry."""

    x: Any
    gradient: jax.Array
    lengths: jax.Array | None  # (d_in,), or without the bias's
    by_input: jax.Array | None  # (groups, d_in)
    by_output: jax.Array | None  # (groups, d_out)
    mask: jax.Array | None  # (groups, d_out, d_in)
    ends: jax.Array | None  # (groups,): the row behind each group's last


def _both(before: jax.Array | None, factor: jax.Array) -> jax.Array:
    return factor if before is None else before * factor


def _scaled(rows: jax.Array, by: jax.Array | None) -> jax.Array:
    """Rows (groups, n, d), times (groups, d)."""
    return rows if by is None else rows * by[:, None, :].astype(rows.dtype)


class Layer(NamedTuple):
    """One preconditioned layer: `groups` blocks with factors of sides `sizes` = (d_in, d_out)."""

    name: str
    leaf: int  # the weight's place among the parameter leaves
    view: View
    bias: int | None  # the bias's place among the parameter leaves
    groups: int
    sizes: tuple[int, int]  # d_in counts the bias
    diagonal: tuple[bool, bool]
    uses: tuple[Use, ...]
    input_of: str | None  # the layer whose A it shares
    bias_start: int = 0  # the first of the bias's entries in its leaf; the others come behind

    @property
    def kind(self) -> str:
        return type(self.uses[0].product).__name__.lower()

    @property
    def has_gradients_in_A(self) -> bool:
        """Whether A is of gradients by scales and shifts, and G counts them."""
        return isinstance(self.uses[0].product, Elementwise) and self.bias is not None

    @property
    def tied(self) -> bool:
        return any(use.transposed for use in self.uses)

    @property
    def input_first(self) -> bool:
        """Whether d_in comes before d_out in the leaf, and so in `gradient_matrix`."""
        _, out, into = self.view.axes
        return bool(out) and bool(into) and min(into) < min(out)

    @property
    def measures_products(self) -> bool:
        """Whether EKFAC's second moments are summed for it."""
        return all(isinstance(use.product, Dense | Convolution | Grouped) for use in self.uses)


class Sums(NamedTuple):
    """Raw sums of a layer's uses in one orientation, one entry for each block."""

    A: jax.Array | None  # (groups, d_in, d_in) or (groups, d_in): Σ a aᵀ; None if another layer has it
    G: jax.Array  # (groups, d_out, d_out) or (groups, d_out): Σ g gᵀ
    rows: jax.Array  # (groups,): how many rows were summed
    products: jax.Array | None  # (groups, the layer's own d_out, d_in): for EKFAC


class LayerSums(NamedTuple):
    """What one layer saw."""

    main: Sums
    transposed: Sums | None  # of uses as Wᵀ: sides (d_out, d_in)


def empty_sums(layer: Layer, dtype: Any, products: bool) -> LayerSums:
    """Zeros of the shapes of a layer's sums."""

    def factor(side: int, diagonal: bool) -> jax.Array:
        shape = (layer.groups, side) if diagonal else (layer.groups, side, side)
        return jnp.zeros(shape, dtype)

    A, G = (factor(s, d) for s, d in zip(layer.sizes, layer.diagonal, strict=True))
    rows = jnp.zeros(layer.groups, jnp.float32)
    kept = None
    if products and layer.measures_products:
        kept = jnp.zeros((layer.groups, layer.sizes[1], layer.sizes[0]), dtype)
    main = Sums(None if layer.input_of else A, G, rows, kept)
    return LayerSums(main, Sums(G, A, rows, kept) if layer.tied else None)


def use_sums(
    layer: Layer, use: Use, x: Any, gradient: jax.Array, like: Sums, bases: Bases | None, reduce: bool
) -> Sums:
    """What one use of a layer saw: its input, and the gradient of its output.

    Args:
        like: zeros of the result's shapes and dtypes.
        bases: eigenvectors for EKFAC.
        reduce: one row for each example (the leading axis), not for each position.
    """
    product, dtype = use.product, like.G.dtype
    given = use.own(layer, x, in_precision(gradient, dtype))
    x, gradient, lengths, by_input, by_output, _, ends = given
    rows = jnp.full(like.rows.shape, float(use.rows), jnp.float32)
    if isinstance(product, Elementwise) and layer.bias is not None:
        units = unit_sums(product, x, gradient, reduce)
        units = units if lengths is None else units * (lengths[:, None] * lengths[None, :])
        counts = jnp.asarray(unit_rows(product, reduce), rows.dtype)
        return Sums(units, counts[:, None].astype(dtype), counts, None)
    if isinstance(product, Elementwise):
        # A of one entry, 1: each entry of the leaf is a layer with one input by itself.
        diagonal = product.squares(x, gradient, reduce).astype(dtype)
        return Sums(jnp.full((1, 1), use.rows, dtype), diagonal.reshape(1, -1), rows, None)
    diagonal_A, diagonal_G = layer.diagonal[::-1] if use.transposed else layer.diagonal
    if isinstance(product, Lookup) and use.half == "outputs":
        features = use.features
        outputs = gradient[..., None] if features is None else jnp.moveaxis(gradient, features, -1)
        outputs = outputs.reshape(1, -1, outputs.shape[-1])
        G = second_moment_sum(outputs, diagonal=diagonal_G)
        return Sums(jnp.zeros((1, product.rows), dtype), G, rows, None)
    if isinstance(product, Grouped):
        assert ends is not None
        x, counts = jnp.asarray(x, dtype), jnp.diff(ends, prepend=0).astype(rows.dtype)
        A = None if like.A is None else grouped_second_moment_sum(x, ends, diagonal=diagonal_A)
        G = grouped_second_moment_sum(gradient, ends, diagonal=diagonal_G)
        a, g = (gradient, x) if use.transposed else (x, gradient)
        measured = like.products
        if measured is not None and bases is not None:
            of_A, of_G = bases
            measured = grouped_second_moment_in_basis(a, g, ends, of_A, of_G)
        return Sums(A, G, counts, measured)
    if reduce and use.rows:
        rows = rows * (example_count(product, x.shape) / use.rows)
    if isinstance(product, Lookup):
        indices, valid = _lookups(product, x)
        counts = jnp.zeros(product.rows, dtype).at[indices].add(valid.astype(dtype))
        if use.half == "inputs":
            return Sums(counts[None] * use.shared_by, jnp.zeros_like(like.G), rows, None)
        outputs = gradient_rows(product, gradient, use.groups) * valid[None, :, None].astype(dtype)
        rows = jnp.full(like.rows.shape, 1.0, jnp.float32) * jnp.sum(valid).astype(jnp.float32)
        return Sums(counts[None], second_moment_sum(outputs, diagonal=diagonal_G), rows, None)
    A, inputs = None, None
    if like.A is not None or bases is not None:
        x = jnp.asarray(x, dtype)
        if like.A is not None and not reduce and bases is None and _without_patches(product, diagonal_A):
            A = _convolution_second_moment(product, x, use.biased)
            if by_input is not None:
                by = jnp.pad(by_input, ((0, 0), (0, use.biased)), constant_values=1).astype(A.dtype)
                A = A * by[:, :, None] * by[:, None, :]
        else:
            inputs = _scaled(input_rows(product, x, reduce), by_input)
            A = second_moment_sum(inputs, diagonal=diagonal_A, bias=use.biased)
    outputs = _scaled(gradient_rows(product, gradient, use.groups, reduce), by_output)
    G = second_moment_sum(outputs, diagonal=diagonal_G)
    products = None
    if like.products is not None:
        if bases is None:
            products = jnp.zeros_like(like.products)
        else:
            of_A, of_G = _longer(_without_bias(bases, layer, use), lengths)
            assert inputs is not None
            a, g = (outputs, inputs) if use.transposed else (inputs, outputs)
            products = second_moment_in_basis(a, g, of_A, of_G, bias=use.biased)
            if lengths is not None and bases[0] is None:
                products = products * (lengths**2)[None, None, :]
            products = _as_long(products, like.products.shape, 1)
    if lengths is not None and A is not None:
        squares = lengths**2 if diagonal_A else lengths[:, None] * lengths[None, :]
        A = A * squares[None]
    A = None if like.A is None or A is None else _as_long(A, like.A.shape, 1 if diagonal_A else 2)
    return Sums(A, _as_long(G, like.G.shape, 1 if diagonal_G else 2), rows, products)


def in_precision(gradient: jax.Array, dtype: Any) -> jax.Array:
    """A gradient in a factor's type; a complex one stays complex, in single precision at least."""
    if jnp.iscomplexobj(gradient):
        dtype = jnp.result_type(dtype, jnp.complex64)
    return gradient.astype(dtype)


def _parts(x: Any, of_output: jax.Array) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The parts of a product's complex gradient, of which JAX has the conjugate, and of its input."""
    return (of_output.real, -of_output.imag), (x.real, x.imag)


def use_gradient(layer: Layer, use: Use, x: Any, gradient: jax.Array) -> jax.Array:
    """(groups, d_out, d_in): what one use adds to the layer's gradient, Σ g aᵀ, for `verify`."""
    product = use.product
    x, gradient, lengths, by_input, by_output, mask, ends = use.own(layer, x, gradient)
    if isinstance(product, Elementwise):
        given = product.gradient(x, gradient)
        if layer.bias is None:
            return _to_leaf(product, given).reshape(1, -1, 1)
        both = [_to_leaf(product, part).reshape(-1, 1) for part in (given, gradient)]
        matrix = jnp.stack(both, axis=-1)
        return matrix if lengths is None else matrix * lengths
    if use.half == "outputs":
        matrix = jnp.zeros((1, layer.sizes[1], layer.sizes[0]), gradient.dtype)
        return matrix  # all of it is in the other half
    if isinstance(product, Grouped):
        assert ends is not None
        matrix = grouped_products(gradient, x.astype(gradient.dtype), ends)
        return jnp.matrix_transpose(matrix) if use.transposed else matrix
    outputs = _scaled(gradient_rows(product, gradient, use.groups), by_output)
    if isinstance(product, Lookup):
        indices, valid = _lookups(product, x)
        table = jnp.zeros((product.rows, outputs.shape[-1]), gradient.dtype)
        table = table.at[indices].add(outputs[0] * valid[:, None].astype(gradient.dtype))
        matrix = jnp.matrix_transpose(table)[None]
    else:
        inputs = _scaled(input_rows(product, x.astype(gradient.dtype), False), by_input)
        matrix = cross_moment_sum(outputs, inputs, bias=use.biased)
        matrix = matrix if lengths is None else matrix * lengths[None, None, :]
        if mask is not None:
            rest = matrix.shape[-1] - mask.shape[-1]  # the bias's column
            matrix = matrix * jnp.pad(mask, ((0, 0), (0, 0), (0, rest)), constant_values=1)
    matrix = jnp.matrix_transpose(matrix) if use.transposed else matrix
    return _as_long(matrix, (*matrix.shape[:2], layer.sizes[0]), 1)


def _without_bias(bases: Bases, layer: Layer, use: Use) -> Bases:
    """For a use without the bias that others have: the rows of Q for the other coordinates."""
    vectors_A, vectors_G = bases
    if use.biased or layer.bias is None or vectors_A is None:
        return bases
    return vectors_A[:, :-1], vectors_G


def _as_long(x: jax.Array, shape: tuple[int, ...], axes: int) -> jax.Array:
    """Zeros behind the last `axes` axes: the place of a bias that a use does not have."""
    if x.shape == shape:
        return x
    widths = zip(shape[-axes:], x.shape[-axes:], strict=True)
    return jnp.pad(x, [(0, 0)] * (x.ndim - axes) + [(0, new - old) for new, old in widths])


def _longer(bases: Bases, lengths: jax.Array | None) -> Bases:
    """Qᵀ (D a) = (D Q)ᵀ a."""
    vectors_A, vectors_G = bases
    if lengths is None or vectors_A is None:
        return bases
    return vectors_A * lengths[None, :, None].astype(vectors_A.dtype), vectors_G


def input_rows(product: Dense | Convolution, x: jax.Array, reduce: bool) -> jax.Array:
    """(groups, rows, d_in without bias)."""
    if isinstance(product, Convolution):
        x, padding = _convolved(product, x)
        rows = patches.patches(
            x, product.kernel, product.stride, padding, product.dilation, product.groups
        )
        return _mean(rows, x.shape[0]) if reduce else rows
    rows = grouped(x, product.x_axes)
    return _mean(rows, example_count(product, x.shape)) if reduce else rows


def gradient_rows(product: Product, gradient: jax.Array, groups: int, reduce: bool = False) -> jax.Array:
    """(groups, rows, d_out)."""
    if isinstance(product, Convolution):
        given = jnp.transpose(gradient, product.out_spec)
        rows = patches.output_rows(given, product.groups)
        return _sum(rows, given.shape[0]) if reduce else rows
    if isinstance(product, Lookup):
        features = product.offset_axes
        others = tuple(axis for axis in range(gradient.ndim) if axis not in features)
        return grouped(gradient, ((), others, features))
    assert isinstance(product, Dense)
    batch, free = len(product.x_axes[0]), len(product.x_axes[1])
    first = tuple(range(batch))
    start = batch + (0 if product.x_first else product.w_free)
    x_free = tuple(range(start, start + free))
    w_free = tuple(axis for axis in range(gradient.ndim) if axis not in (*first, *x_free))
    rows = grouped(gradient, (first, x_free, w_free))
    examples = gradient.shape[x_free[0]] if x_free else 1
    return _sum(rows, examples) if reduce else rows


def feature_axes(product: Product) -> Shape:
    """Axes of the product's output that run over its blocks and features, in that order."""
    if isinstance(product, Convolution):
        return (product.out_spec[1],)
    if isinstance(product, Lookup):
        return product.offset_axes
    if isinstance(product, Grouped):
        return (1,)
    assert isinstance(product, Dense)
    batch, free = len(product.x_axes[0]), len(product.x_axes[1])
    start = batch + (free if product.x_first else 0)
    return (*range(batch), *range(start, start + product.w_free))


def gradient_matrix(leaves: list[jax.Array], layer: Layer) -> jax.Array:
    """(groups, d_out, d_in) or, with `input_first`, (groups, d_in, d_out) out of the gradient's leaves.

    So nothing is transposed. The bias is the last input.
    """
    matrix = matrices(leaves[layer.leaf], _as_in_leaf(layer))
    if layer.bias is None:
        return matrix
    axis = 1 if layer.input_first else 2
    bias, count = leaves[layer.bias], layer.groups * layer.sizes[1]
    if count < bias.size:
        bias = lax.slice_in_dim(bias.reshape(-1), layer.bias_start, layer.bias_start + count)
    bias = jnp.expand_dims(bias.reshape(layer.groups, layer.sizes[1]), axis)
    if layer.groups > 1:
        return jnp.concatenate([matrix, bias.astype(matrix.dtype)], axis=axis)
    # Without the axis of length one there is less to compile; a concatenation would be compiled, and
    # made, once for each shape in which it is used.
    matrix, bias = (jnp.squeeze(x, 0) for x in (matrix, bias.astype(matrix.dtype)))
    behind, before = [(0, 0, 0)] * 2, [(0, 0, 0)] * 2
    behind[axis - 1], before[axis - 1] = (0, 1, 0), (matrix.shape[axis - 1], 0, 0)
    zero = jnp.zeros((), matrix.dtype)
    return (lax.pad(matrix, zero, behind) + lax.pad(bias, zero, before))[None]


def write_gradient(leaves: list[jax.Array], layer: Layer, matrix: jax.Array) -> None:
    """Undo `gradient_matrix`: put the direction into the list of leaves."""
    if layer.bias is not None:
        matrix, bias = jnp.split(matrix, [layer.sizes[0] - 1], axis=1 if layer.input_first else 2)
        leaves[layer.bias] = with_bias(leaves[layer.bias], layer, bias)
    leaves[layer.leaf] = write_matrices(leaves[layer.leaf], _as_in_leaf(layer), matrix)


def with_bias(leaf: jax.Array, layer: Layer, bias: jax.Array) -> jax.Array:
    """The leaf that a layer's bias is in, or is, with this one."""
    bias = bias.astype(leaf.dtype)
    if bias.size < leaf.size:
        places = slice(layer.bias_start, layer.bias_start + bias.size)
        bias = leaf.reshape(-1).at[places].set(bias.reshape(-1))
    return bias.reshape(leaf.shape)


def _as_in_leaf(layer: Layer) -> View:
    groups, out, into = layer.view.axes
    return layer.view._replace(axes=(groups, into, out)) if layer.input_first else layer.view


def unit_sums(product: Elementwise, x: Any, gradient: jax.Array, reduce: bool) -> jax.Array:
    """(entries, 2, 2): Σ z zᵀ over all that read an entry; z are its gradient and its shift's."""
    scales = jnp.broadcast_to(x, gradient.shape).astype(gradient.dtype) * gradient
    shifts, shared = gradient, 1
    if reduce:
        (scales, shared), (shifts, _) = (_of_examples(product, z) for z in (scales, shifts))
    pairs = (scales, scales), (scales, shifts), (shifts, shifts)
    squares, cross, shifted = (_to_leaf(product, a * b).reshape(-1) / shared for a, b in pairs)
    return jnp.stack([squares, cross, cross, shifted], axis=-1).reshape(-1, 2, 2)


def _of_examples(product: Elementwise, rows: jax.Array) -> tuple[jax.Array, int]:
    """The sum over all positions of an example at each of them, and how many those are."""
    _, inner = broadcast_rows(product)
    summed = jnp.sum(rows, axis=inner, keepdims=True)
    return jnp.broadcast_to(summed, rows.shape), math.prod(rows.shape[axis] for axis in inner)


def broadcast_rows(product: Elementwise) -> tuple[Shape, Shape]:
    """The axes along which a leaf is broadcast, and of these the ones that are no example's.

    Examples are on the axis in front, or the first on which there are none of the leaf's entries.
    """
    index = entries(product.shape, (), (), product.steps)
    sides = enumerate(zip(index.shape, index.strides, strict=True))
    rows = tuple(axis for axis, (n, stride) in sides if n > 1 and stride == 0)
    of_one = index.shape[:1] == (1,)
    return rows, rows if of_one else rows[1:]


def unit_rows(product: Elementwise, reduce: bool) -> np.ndarray:
    """(entries,): how many rows read each entry; examples with `reduce`."""
    index = entries(product.shape, (), (), product.steps)
    rows, inner = broadcast_rows(product)
    each = math.prod(index.shape[axis] for axis in rows if not reduce or axis not in inner)
    first = index[tuple(0 if axis in rows else slice(None) for axis in range(index.ndim))]
    return np.bincount(first.ravel(), minlength=math.prod(product.shape)) * each


def _to_leaf(product: Elementwise, x: jax.Array) -> jax.Array:
    """Sum what was broadcast, undo what was moved."""
    leaf = varying_alike(jnp.zeros(product.shape, x.dtype), x)
    (summed,) = jax.vjp(lambda leaf: apply_steps(leaf, product.steps), leaf)[1](x)
    return summed


def example_count(product: Product, x_shape: Shape) -> int:
    """How long the leading axis of a product's rows is."""
    if isinstance(product, Convolution):
        return x_shape[product.x_spec[0]]
    if isinstance(product, Dense):
        free = product.x_axes[1]
        return x_shape[free[0]] if free else 1
    return x_shape[0] if isinstance(product, Grouped) else math.prod(x_shape[:-1])


def _mean(rows: jax.Array, examples: int) -> jax.Array:
    groups, _, width = rows.shape
    return jnp.mean(rows.reshape(groups, examples, -1, width), axis=2)


def _sum(rows: jax.Array, examples: int) -> jax.Array:
    groups, _, width = rows.shape
    return jnp.sum(rows.reshape(groups, examples, -1, width), axis=2)


def _lookups(product: Lookup, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(n,) indices and whether each is one."""
    indices = x[..., product.component].reshape(-1)
    if product.clip:
        return jnp.clip(indices, 0, product.rows - 1), jnp.ones(indices.shape, bool)
    valid = (indices >= 0) & (indices < product.rows)
    return jnp.where(valid, indices, 0), valid


def _convolved(product: Convolution, x: jax.Array) -> tuple[jax.Array, tuple[tuple[int, int], ...]]:
    """(n, channels, *sizes) and the zeros around it; gaps and crops are made here."""
    x = jnp.transpose(x, product.x_spec)
    plain = all(d == 1 for d in product.x_dilation)
    if plain and all(side >= 0 for pair in product.padding for side in pair):
        return x, product.padding
    widths = [(a, b, d - 1) for (a, b), d in zip(product.padding, product.x_dilation, strict=True)]
    padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *widths])
    return padded, ((0, 0),) * len(widths)


def _without_patches(product: Product, diagonal: bool) -> bool:
    """Whether Σ a aᵀ can be had from `correlations.second_moment_sum`."""
    return isinstance(product, Convolution) and not diagonal


def _convolution_second_moment(product: Any, x: jax.Array, bias: bool) -> jax.Array:
    x, padding = _convolved(product, x)
    given: Any = (product.kernel, product.stride, padding, product.dilation, product.groups)
    return correlations.second_moment_sum(x, *given, bias=bias)
