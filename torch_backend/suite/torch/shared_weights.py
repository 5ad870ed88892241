"""What a forward makes of constants by products with parameters, once for all examples.

`F.linear(x, torch.einsum("k,kio->oi", self.coefficients, self.basis))`, or a kernel, or positions, that
layers make of coordinates: rows of that product are the constant's. The examples' gradients are summed
before they reach it, and the square of their sum is not the sum of their squares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from suite.torch.calls import CONVOLVE
from suite.torch.einsum import operands_of
from suite.torch.hooks import root_of, tensors_given, tensors_in
from suite.torch.looked_up import spreads
from suite.torch.operations import ADDED, ADDED_STACKS, ARITHMETIC, COPIES, GRIDS, MATRIX, WRITES, T

_CONVOLUTIONS: set[Any] = {torch.conv1d, torch.conv2d, torch.conv3d}
_CONVOLUTIONS |= {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
_MATRIX = MATRIX | {torch.mv, T.mv} - {T.__rmatmul__}
_PRODUCTS = {
    F.linear,
    torch.einsum,
    torch.outer,
    T.outer,
    *_CONVOLUTIONS,
    *_MATRIX,
    *ADDED,
    *ADDED_STACKS,
}


class _Made(NamedTuple):
    """What a tensor is made of, where that is parameters and constants alone."""

    layers: frozenset[str] = frozenset()  # whose weights it is a function of
    multiplied: frozenset[str] = frozenset()  # those of them that are in a product, or meet its rows


class SharedWeights:
    """Finds, in one forward, what is made of a model's parameters and constants alone, and by what."""

    def __init__(self, model: nn.Module) -> None:
        self._constants: dict[int, torch.Tensor] = {}
        for module in model.modules():
            kept = (*module._buffers.values(), *module._parameters.values(), *vars(module).values())
            own = [x for x in kept if isinstance(x, torch.Tensor) and x.is_leaf]
            self._constants.update((id(x), x) for x in own)
        self._made: dict[Any, _Made] = {}  # by autograd's node

    def follow(
        self, function: Any, args: Any, kwargs: Any, output: Any, layer_of: Callable[[Any], str]
    ) -> frozenset[str]:
        """The layers whose products with constants a function gives to several examples.

        Args:
            layer_of: the name of the layer whose weight something is; '': it is none.
        """
        given = tensors_given(args, kwargs)
        if function in COPIES or len({id(x) for x in given}) < len(given):
            return frozenset()  # each example may have one
        made = [self._made_of(x, layer_of) for x in given]
        if (given or function in GRIDS) and all(x is not None for x in made):
            layers = frozenset[str]().union(*(x.layers for x in made if x is not None))
            multiplied = frozenset[str]().union(*(x.multiplied for x in made if x is not None))
            # A product of weights alone has no rows.
            takes_rows = function in _PRODUCTS and any(x is not None and not x.layers for x in made)
            takes_rows = takes_rows or (bool(multiplied) and function in _PRODUCTS | ARITHMETIC)
            multiplied = layers if takes_rows and len(given) > 1 else multiplied
            for x in tensors_in(output, set()):
                if x.grad_fn is not None:
                    self._made[x.grad_fn] = _Made(layers, multiplied)
                else:
                    self._constants[id(x)] = x
            return frozenset()
        if given and (function in WRITES or output is given[0]):
            self._forget(given[0])
        if function in ARITHMETIC and isinstance(output, torch.Tensor) and output.ndim > 0:
            several = len(output) > 1
            spread = [one for x, one in zip(given, made, strict=True) if several and spreads(x, output)]
            return frozenset[str]().union(*(one.multiplied for one in spread if one is not None))
        if function not in _PRODUCTS:
            return frozenset()
        x, weight = _input_and_weight(function, args, kwargs)
        before, behind = (self._made_of(one, layer_of) for one in (x, weight))
        if before is None and behind is not None and _is_for_all(function, x, weight, True):
            return behind.multiplied
        if behind is None and before is not None and _is_for_all(function, weight, x, False):
            return before.multiplied
        return frozenset()

    def _forget(self, x: torch.Tensor) -> None:
        """What is in a constant's memory is none any more."""
        root = root_of(x)
        if id(root) in self._constants:
            kept = [one for one in self._constants.values() if root_of(one) is not root]
            self._constants = {id(one): one for one in kept}

    def _made_of(self, x: Any, layer_of: Callable[[Any], str]) -> _Made | None:
        """None: it is not made of parameters and constants alone."""
        if not isinstance(x, torch.Tensor):
            return None
        if x.grad_fn is None:
            name = layer_of(x)
            return _Made(frozenset([name] if name else [])) if id(x) in self._constants else None
        node: Any = x.grad_fn
        while node is not None and node not in self._made:
            made_by = getattr(node, "_forward_cls", None)
            if made_by is None or not made_by.__module__.startswith("suite."):
                return None
            node = node.next_functions[0][0]  # of a probe of our own: what goes through
        return None if node is None else self._made[node]


def _input_and_weight(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Two operands of a product, the weight behind if one is called that."""
    if function is torch.einsum:
        args = operands_of(args)[1]
        return tuple(args) if len(args) == 2 else (None, None)
    names = ("bias", *CONVOLVE) if function in ADDED | ADDED_STACKS else CONVOLVE
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get("input"), given.get("weight")


def _is_for_all(function: Any, x: Any, weight: Any, is_behind: bool) -> bool:
    """Whether each of several examples in `x` is multiplied with `weight`.

    Args:
        is_behind: whether the weight is the second operand.
    """
    if not isinstance(x, torch.Tensor) or x.is_nested or x.ndim < 2:
        return False
    if function is F.linear and not is_behind:
        return False
    if function in _CONVOLUTIONS:
        return is_behind and len(x) > 1
    if function in _MATRIX | ADDED and weight.ndim != 2:
        return False
    if is_behind and function is not F.linear and x.shape[-2] == x.shape[-1]:
        return False  # edges between what has rows
    is_turned = not is_behind and x.ndim == 2 and function is not torch.einsum
    return x.shape[1 if is_turned else 0] > 1
