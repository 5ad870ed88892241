"""Weights of linear layers, convolutions and norms that are no subclass of torch's, by their source.

Many packages have a linear layer of their own (`F.linear(x, self.weight, self.bias)`), and many models a
matrix (`x @ self.weight`, `torch.einsum("...i,io->...o", x, self.weight)`). The blocks of a weight have
to be known before any pass runs. So the source of the module's forward is read, and of the methods that
it calls: a parameter that is the weight of such products and nothing else is a layer's. One that is used
otherwise, too, or whose source is not there or not understood, is not. So it is with a parameter that is
the scale of a norm (`F.layer_norm(x, shape, self.weight, self.bias)`).
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch.calls import ARGUMENTS, CONVOLVE, NORMS
from suite.torch.einsum import Halves, halves_of, labels_of, sides_of, with_letters
from suite.torch.kinds import scaling_of_function
from suite.torch.sources import definition, live_nodes, parameters_of, tree_of

# By function: how many axes of positions its weight has, its arguments, and whether the weight lies
# (in, out). The bias of addmm comes first, and has a block of its own.
_FUNCTIONS: dict[Any, tuple[int, tuple[str, ...], bool]] = {
    F.linear: (0, ("input", "weight", "bias"), False),
    torch.conv1d: (1, CONVOLVE, False),
    torch.conv2d: (2, CONVOLVE, False),
    torch.conv3d: (3, CONVOLVE, False),
    torch.matmul: (0, ("input", "weight"), True),
    torch.mm: (0, ("input", "weight"), True),
    torch.addmm: (0, ("", "input", "weight"), True),
    torch.bmm: (0, ("input", "weight"), True),
    torch.baddbmm: (0, ("", "input", "weight"), True),
}
_METHODS = {"matmul": torch.matmul, "mm": torch.mm, "bmm": torch.bmm}
# Those that take a stack of matrices whole, and those that take nothing else.
_OF_STACKS_ALONE = torch.bmm, torch.baddbmm, torch.einsum
_OF_STACKS = torch.matmul, *_OF_STACKS_ALONE
_CASTS = {"to", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone"}
_SIDES = ("weight", "bias")
_MOST_FUNCTIONS = 50  # that are read of one module
_ASKED = {"shape", "dtype", "device", "ndim", "requires_grad", "size", "dim", "is_cuda", "numel"}


class OwnWeight(NamedTuple):
    """A parameter that its module's forward multiplies inputs with, and does nothing else with."""

    name: str  # or that of a list or dict of parameters, all of which are such
    bias: str  # the parameter that the same calls take, of a list at the same place; '': none
    axes: int  # of positions; 0: a linear layer's
    groups: int
    turned: bool  # it lies (in, out)
    stacked: bool = False  # it is a stack of such matrices
    joined: bool = False  # which all get the same inputs, and are one of more outputs
    ndim: int = 2  # how many axes it has to have
    leading: int = 1  # how many of those are the first side of a matrix
    order: tuple[int, ...] = ()  # see `einsum.Halves`


class OwnNorm(NamedTuple):
    """A parameter that is the scale in its module's calls of one norm, and nothing else."""

    name: str
    bias: str  # the parameter that is the shift in them, and nothing else; '': none
    norm: str  # see `rows.LayerSpec`


class _Weight(NamedTuple):
    """An expression that may take a parameter's place in a product."""

    name: str
    turned: bool  # as `functional.py` follows it: once, and a number comes before
    scaled: bool
    indexed: bool  # one or some of the parameter's matrices
    nodes: tuple[ast.AST, ...]  # the parameter's, and those of variables that hold it
    place: str = ""  # in a list of parameters
    along: int | None = None  # the axis along which it is normalized


class _Product(NamedTuple):
    function: Any
    axes: int  # of positions
    turned: bool  # whether it takes the weight as (in, out)
    weight: _Weight
    bias: _Weight | None = None
    groups: float | None = 1  # None: not known
    joined: bool = False  # whether all matrices of a stack get the same inputs
    matrix: tuple[int, Halves] | None = None  # of an einsum's: `OwnWeight.ndim`, and how it lies

    def of_lists(self, lists: Container[str]) -> _Product:
        """With the names of these lists for those of their parameters."""
        weight, bias = self.weight, self.bias
        if bias is not None:
            bias = bias._replace(name=_list_of(bias.name, lists))
        return self._replace(weight=weight._replace(name=_list_of(weight.name, lists)), bias=bias)


def own_weights(
    module: nn.Module, own: Container[str], lists: Mapping[str, nn.Parameter] | None = None
) -> list[OwnWeight]:
    """Those of a module's parameters, of the names `own`, that are weights of its products.

    Args:
        own: of those in a list or a dict of parameters 'name.key'.
        lists: of each list or dict, by its name, one of its parameters.
    """
    try:
        return _read(module, own, lists or {})
    except Exception:  # whatever a source holds: without it its parameters are free ones
        return []


def own_norms(module: nn.Module, own: Container[str]) -> list[OwnNorm]:
    """Those of a module's parameters, of the names `own`, that are scales of its norms."""
    try:
        readers = _readers(module, own, {})
    except Exception:  # as for `own_weights`
        return []
    calls = [call for reader in readers for call in reader.norms]
    refused = {name for reader in readers for name in reader.other_uses(of_norms=True)}
    pairs = {(weight.name, bias.name) for _, weight, bias in calls if bias is not None}
    shifts = Counter(shift for _, shift in pairs)
    found = []
    scales = dict.fromkeys(weight.name for _, weight, _ in calls)
    for name in scales:
        uses = {(norm, bias.name if bias else "") for norm, weight, bias in calls if weight.name == name}
        if name in refused or name in shifts or len(uses) > 1:
            continue
        ((norm, shift),) = uses
        alone = shift not in {*refused, *scales} and shifts[shift] == 1
        found.append(OwnNorm(name, shift if alone else "", norm))
    return found


def _readers(module: nn.Module, own: Container[str], lists: Mapping[str, nn.Parameter]) -> list[_Reader]:
    """Of a module's forward, and of the methods that it calls; none where these are not there."""
    if "forward" in vars(module) or type(module).__getattr__ is not nn.Module.__getattr__:
        return []
    readers, methods = [], [(0, "forward")]
    for start, name in methods:
        found = definition(type(module), start, name)
        if found is None:
            return []
        place, function = found
        if type(module).__mro__[place].__module__.startswith("torch.nn."):
            continue
        reader = _Reader(module, own, lists, function, tree_of(function.__code__))
        readers.append(reader)
        methods += [called for called in reader.calls(place) if called not in methods]
    for reader in readers:  # which grow
        readers += reader.follow()
        if len(readers) > _MOST_FUNCTIONS:  # one that calls itself
            return []
    return readers


def _read(module: nn.Module, own: Container[str], lists: Mapping[str, nn.Parameter]) -> list[OwnWeight]:
    readers = _readers(module, own, lists)
    products = [product for reader in readers for product in reader.products]
    refused = {name for reader in readers for name in reader.other_uses()}
    # Where one does not know which of a list's parameters are used, it is all of them.
    whole = {*lists} & {*refused, *(p.weight.name for p in products)}
    products = [product.of_lists(whole) for product in products]
    refused |= {_list_of(name, whole) for name in refused}
    return [
        weight
        for name in dict.fromkeys(product.weight.name for product in products)
        if name not in refused
        for weight in _agreed(
            lists[name] if name in lists else module.get_parameter(name),
            [p for p in products if p.weight.name == name],
            refused,
            lists,
        )
    ]


def _list_of(name: str, lists: Container[str]) -> str:
    """The name of the list that a parameter is in, if it is in one of these."""
    around = name.partition(".")[0]
    return around if around in lists else name


def _agreed(
    parameter: torch.Tensor,
    products: list[_Product],
    refused: Container[str],
    lists: Container[str],
) -> Iterator[OwnWeight]:
    """The layer that products with one parameter are calls of, if they are those of one."""
    uses: set[tuple[int, int, bool, bool, int, int, tuple[int, ...]]] = set()
    products = [p for p in products if p.axes in (0, parameter.ndim - 2)]  # others do not run,
    if any(p.axes for p in products):  # nor does what multiplies matrices
        products = [p for p in products if p.axes]
    stacked = parameter.ndim == 3 and all(p.axes == 0 and p.matrix is None for p in products)
    for function, axes, turned, weight, _, groups, joined, matrix in products:
        if not isinstance(groups, int) or groups < 1 or (axes and weight.turned):
            return
        if matrix is not None:
            if weight.scaled or weight.indexed or (weight.turned and matrix[0] > 2):
                return
            ndim, (_, leading, order) = matrix
            uses.add((axes, groups, weight.turned != turned, joined, ndim, leading, order))
            continue
        if weight.along is not None and (axes or weight.along != (weight.turned == turned)):
            return  # what is normalized is no row
        whole = function in _OF_STACKS_ALONE or (function in _OF_STACKS and not weight.indexed)
        if stacked and (weight.scaled or function is torch.addmm or not (weight.indexed or whole)):
            return
        if not stacked and (weight.indexed or function in _OF_STACKS_ALONE):
            return
        uses.add((axes, groups, weight.turned != turned, joined, 2 + axes + stacked, 1, ()))
    # A matrix may be used as its transpose, too. Then it lies (out, in).
    one_matrix = parameter.ndim == 2 and not any(p.axes or p.weight.scaled for p in products)
    agreed = sorted(uses)[: len(uses) == 1 or one_matrix]
    for axes, groups, turned, joined, ndim, leading, order in agreed:
        alike = [p for p in products if (p.weight.turned != p.turned) == turned]
        biases = {_name_of_bias(product, lists) for product in alike}
        bias = biases.pop() if len(biases) == 1 else ""
        bias = "" if bias in refused or stacked else bias
        name = products[0].weight.name
        yield OwnWeight(name, bias, axes, groups, turned, stacked, joined, ndim, leading, order)


def _name_of_bias(product: _Product, lists: Container[str]) -> str:
    weight, bias = product.weight, product.bias
    if bias is None or bias.scaled or bias.turned:
        return ""
    of_lists = (weight.name in lists, bias.name in lists)
    alike = of_lists == (False, False) or (all(of_lists) and weight.place == bias.place)
    return bias.name if alike else ""


class _Reader:
    """Of one function what it does with a module's parameters."""

    def __init__(
        self,
        module: nn.Module,
        own: Container[str],
        lists: Mapping[str, nn.Parameter],
        function: Any,
        tree: ast.FunctionDef,
        *,
        is_method: bool = True,
        bound: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            is_method: whether the first argument is the module.
            bound: arguments that are parameters, and their names.
        """
        self.module, self.own, self.lists, self.function = module, own, lists, function
        self.me = (tree.args.posonlyargs + tree.args.args)[0].arg if is_method else ""
        self.bound = bound or {}
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        self.singles = {name for name, tensor in tensors if tensor.numel() == 1}
        self.nodes = live_nodes(tree, self._axes_of)
        plain, named = tree.args.posonlyargs + tree.args.args, tree.args.kwonlyargs
        last = plain[len(plain) - len(tree.args.defaults) :]
        given = [
            *zip(last, tree.args.defaults, strict=True),
            *zip(named, tree.args.kw_defaults, strict=True),
        ]
        # Arguments that are numbers, if they are not given.
        self.defaults = {
            x.arg for x, y in given if isinstance(y, ast.Constant) and isinstance(y.value, int | float)
        }
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.stored = Counter(n.arg for n in self.nodes if isinstance(n, ast.arg))
        self.stored.update(
            n.id for n in self.nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
        )
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.stored.update((n.asname or n.name).partition(".")[0] for n in node.names)
        # Names with what they are set to, each as often as it is set so.
        self.given = [
            (target.id, node.value)
            for node in self.nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        self.changed = set(self._changed_in_place())
        self.variables: dict[str, ast.expr] = {}
        self.unpacked: dict[str, ast.expr] = {}  # what they are taken apart of
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._bind(target, node.value)
        self.weights: dict[ast.AST, _Weight | None] = {}  # of expressions that were looked at
        self.numbers: dict[ast.AST, float | None] = {}
        self.loops: dict[str, dict[ast.AST, _Weight]] = {}  # by variable, and by what it is bound in
        for node in self.nodes:
            if isinstance(node, ast.For | ast.comprehension):
                scope = node if isinstance(node, ast.For) else self.parents[node]
                for name, found in self._loop(node.target, node.iter):
                    self.loops.setdefault(name, {})[scope] = found
        self.weights.clear()  # with variables of loops that were not known then
        self.products = list(self._products())
        self.norms = list(self._norms())
        self.handed: set[ast.AST] = set()  # to functions that are read for them

    def _axes_of(self, node: ast.expr) -> int | None:
        """How many axes a parameter has; None: it is none, or one in a list."""
        name = self.bound.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Attribute) and self._is_me(node.value):
            name = node.attr
        parameter = None if name is None else self.module._parameters.get(name)
        return None if parameter is None else parameter.ndim

    def follow(self) -> Iterator[_Reader]:
        """Of functions, and of methods of the module, that are given parameters by themselves."""
        for node in self.nodes:
            if not isinstance(node, ast.Call):
                continue
            function, is_method = self._value(node.func), False
            if isinstance(node.func, ast.Attribute) and self._is_me(node.func.value):
                found = definition(type(self.module), 0, node.func.attr)
                function, is_method = found and found[1], True
            if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
                continue
            if self._weight(node) is not None:  # it scales one
                continue
            if function.__module__.partition(".")[0] == "torch" or _is_einsum(function):
                continue
            arguments = [*node.args, *(k.value for k in node.keywords)]
            if not any(self._handed(x) for x in arguments):
                continue
            try:
                given = parameters_of(node, function, int(is_method))
            except Exception:  # its source is not there, or no function's
                continue
            if given is None:
                continue
            bound = {name: own for name, x in given.items() if (own := self._handed(x))}
            self.handed.update(given[name] for name in bound)
            tree, where = tree_of(function.__code__), (self.module, self.own, self.lists)
            yield _Reader(*where, function, tree, is_method=is_method, bound=bound)

    def _handed(self, node: ast.expr) -> str:
        """The name of the parameter that an argument is, as it is; '': it is something else."""
        found = self._weight(node)
        whole = found is not None and not (found.turned or found.scaled or found.indexed or found.place)
        direct = isinstance(node, ast.Attribute) or (
            isinstance(node, ast.Name) and node.id in self.bound
        )
        return found.name if found is not None and whole and direct else ""

    def _changed_in_place(self) -> Iterator[str]:
        """Names of variables of which parts are set, or that functions change."""
        for node in self.nodes:
            changed: ast.AST | None = None
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                changed = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                changed = node.func.value if node.func.attr.endswith("_") else None
            elif isinstance(node, ast.keyword) and node.arg == "out":
                changed = node.value
            while isinstance(changed, ast.Subscript | ast.Attribute):  # h[0].add_(x)
                changed = changed.value
            if isinstance(changed, ast.Name):
                yield changed.id

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        """Note what variables are set to that nothing else sets."""
        names = target.elts if isinstance(target, ast.Tuple | ast.List) else []
        if isinstance(target, ast.Name) and self.stored[target.id] == 1:
            self.variables[target.id] = value
        elif isinstance(value, ast.Tuple) and len(value.elts) == len(names):
            for name, part in zip(names, value.elts, strict=True):
                self._bind(name, part)
        else:
            alone = [x.id for x in names if isinstance(x, ast.Name) and self.stored[x.id] == 1]
            self.unpacked.update(dict.fromkeys(alone, value))

    def calls(self, place: int) -> Iterator[tuple[int, str]]:
        """The methods of the module that it names, with the place of the base to look for them from.

        Args:
            place: that of its own.
        """
        for node in self.nodes:
            if not isinstance(node, ast.Attribute):
                continue
            start = None
            if self._is_me(node.value):
                start = 0
            elif isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
                start = place + 1
            if start is not None and definition(type(self.module), start, node.attr) is not None:
                yield start, node.attr

    def other_uses(self, of_norms: bool = False) -> set[str]:
        """The parameters that it uses in other ways than in products, or than in norms, too."""
        pairs = [(p.weight, p.bias) for p in self.products]
        if of_norms:
            pairs = [(weight, bias) for _, weight, bias in self.norms]
        weights = [x for pair in pairs for x in pair if x is not None]
        known = {node for weight in weights for node in weight.nodes} | self.handed
        found = set()
        for node in self.nodes:
            names = isinstance(node, ast.Name) or (
                isinstance(node, ast.Attribute) and self._is_me(node.value)
            )
            if not names or node in known or not isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
                continue
            used = node
            if self._list(node) and self._weight(self.parents[node]) is not None:
                used = self.parents[node]
            weight = self._weight(used)
            name = self._list(used) if weight is None else weight.name
            if name and not self._is_asked(used):
                found.add(name)
            if weight is None and isinstance(used, ast.Name):  # perhaps behind its loop, or set anew
                if used.id in self.bound:
                    found.add(self.bound[used.id])
                scopes = self.loops.get(used.id, {}).items()
                found.update(lost.name for scope, lost in scopes if isinstance(scope, ast.For))
        return found

    def _list(self, node: ast.AST) -> str:
        """Which of the module's lists of parameters it is; '': none."""
        is_ours = isinstance(node, ast.Attribute) and self._is_me(node.value)
        return node.attr if is_ours and node.attr in self.lists else ""  # type: ignore[attr-defined]

    def _loop(self, target: ast.expr, given: ast.expr) -> Iterator[tuple[str, _Weight]]:
        """What variables of a loop over lists of parameters, or over stacks of matrices, hold."""
        pairs = [(target, given)]
        named = {k.arg for k in given.keywords} if isinstance(given, ast.Call) else set()
        if isinstance(given, ast.Call) and isinstance(given.func, ast.Name) and named <= {"strict"}:
            targets = target.elts if isinstance(target, ast.Tuple) else []
            known = given.func.id in ("zip", "enumerate") and not self._is_set(given.func)
            if known and given.func.id == "enumerate" and len(targets) == 2 and len(given.args) == 1:
                yield from self._loop(targets[1], given.args[0])
            pairs = []
            if known and given.func.id == "zip" and len(targets) == len(given.args):
                pairs = list(zip(targets, given.args, strict=True))
        place = f"{target.lineno}:{target.col_offset}"
        for variable, iterated in pairs:
            name, stack = self._list(iterated), self._stack(iterated)
            if not isinstance(variable, ast.Name):
                continue
            if name:
                yield variable.id, _Weight(name, False, False, False, (iterated,), place)
            elif stack is not None:
                yield variable.id, stack._replace(indexed=True)

    def _stack(self, node: ast.AST) -> _Weight | None:
        """A stack of matrices, not one of them; None: it is something else."""
        found = self._weight(node)
        if (
            found is None
            or found.indexed
            or found.scaled
            or found.name not in self.own
            or "." in found.name
        ):
            return None
        return found if self.module.get_parameter(found.name).ndim == 3 else None

    def _products(self) -> Iterator[_Product]:
        for node in self.nodes:
            given: Mapping[str, ast.expr] = {}
            function = None
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                function, given = torch.matmul, {"input": node.left, "weight": node.right}
            elif isinstance(node, ast.Call) and _is_einsum(self._value(node.func)):
                yield from self._einsum(node)
            elif isinstance(node, ast.Call) and self._value(node.func) is torch.tensordot:
                yield from self._tensordot(node)
            elif isinstance(node, ast.Call):
                function, given = self._call(node)
            found = {name: self._weight(node) for name, node in given.items()}
            weight, left = found.get("weight"), found.get("input")
            if (weight is None) == (left is None):  # one of two parameters has no rows
                continue
            if self._are_parameters(given["input" if weight is not None else "weight"]):
                continue
            if weight is None:
                if (
                    left is not None and not left.scaled and function in _METHODS.values()
                ):  # the left factor is (out, in)
                    yield _Product(function, 0, False, left)
                continue
            groups = self._number(given["groups"]) if "groups" in given else 1
            axes, _, turned = _FUNCTIONS[function]
            yield _Product(function, axes, turned, weight, found.get("bias"), groups)

    def _norms(self) -> Iterator[tuple[str, _Weight, _Weight | None]]:
        """Calls of norms with a parameter as the scale, and perhaps one as the shift."""
        for node in self.nodes:
            function = self._value(node.func) if isinstance(node, ast.Call) else None
            norm = next((name for known, name in NORMS.items() if known is function), "batch")
            if norm == "batch":  # has statistics of its own
                continue
            given = _by_name(node, ARGUMENTS[function], node.args)  # type: ignore[attr-defined, arg-type]
            weight, bias = (self._weight(given[key]) if key in given else None for key in _SIDES)
            if weight is not None and not any(x and (x.turned or x.scaled) for x in (weight, bias)):
                yield norm, weight, bias

    def _einsum(self, node: ast.Call) -> Iterator[_Product]:
        """A product of something with a matrix, or with a stack of matrices."""
        if len(node.args) != 3 or node.keywords:
            return
        # einops has the equation behind the operands.
        at = 0 if self._value(node.func) is torch.einsum else 2
        equation, operands = node.args[at], [x for i, x in enumerate(node.args) if i != at]
        weights = [self._weight(operand) for operand in operands]
        if not isinstance(equation, ast.Constant) or weights.count(None) != 1:
            return
        place = 1 - weights.index(None)
        if self._are_parameters(operands[1 - place]):
            return
        weight, text = weights[place], str(equation.value)
        labels = labels_of(with_letters(text) if at else text, place)
        sides = None if labels is None else sides_of(labels)
        if weight is None or labels is None or sides is None:
            return
        own, halves = labels.own, halves_of(labels)
        if halves is not None:
            yield _Product(torch.einsum, 0, halves.turned, weight, matrix=(len(own), halves))
        elif len(own) == 3 and len(sides.into) == 1 and own[0] == (sides.groups or sides.out[0]):
            joined = not sides.groups
            yield _Product(torch.einsum, 0, own[1] == sides.into, weight, joined=joined)

    def _tensordot(self, node: ast.Call) -> Iterator[_Product]:
        """A product of something with a matrix, along one axis of both."""
        given = _by_name(node, ("a", "b", "dims"), node.args)
        if given.keys() != {"a", "b", "dims"}:
            return
        operands = [given["a"], given["b"]]
        weights = [self._weight(operand) for operand in operands]
        try:
            dims = ast.literal_eval(given["dims"])
        except ValueError:  # no numbers
            return
        if weights.count(None) != 1 or self._are_parameters(operands[weights.index(None)]):
            return
        place = 1 - weights.index(None)
        axes = [[-1], [0]][place] if dims == 1 else dims[place] if isinstance(dims, list | tuple) else []
        axes = [axes] if isinstance(axes, int) else axes
        if len(axes) != 1 or axes[0] not in (-2, -1, 0, 1):
            return
        turned = axes[0] % 2 == 0
        yield _Product(torch.einsum, 0, turned, weights[place], matrix=(2, Halves(turned, 1)))  # type: ignore[arg-type]

    def _call(self, node: ast.Call) -> tuple[Any, Mapping[str, ast.expr]]:
        """The function that is called, and its arguments by name; nothing if it is none of ours."""
        function = self._value(node.func)
        arguments = next((names for f, (_, names, _) in _FUNCTIONS.items() if f is function), None)
        positional = node.args
        if arguments is None and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            function, arguments = _METHODS[node.func.attr], ("input", "weight")
            positional = [node.func.value, *node.args]
        given = {} if arguments is None else _by_name(node, arguments, positional)
        return (function, given) if given else (None, {})

    def _are_parameters(self, node: ast.AST) -> bool:
        """Whether an expression is made of the module's parameters, and of nothing that has rows."""
        return self._sources(node, set()) - {"again"} == {"parameters"}

    def _sources(self, node: ast.AST, seen: set[str]) -> set[str]:
        """What an expression is made of: 'parameters', 'data', which is whatever is not known.

        And 'again', where that is a variable that was looked at.

        Args:
            seen: variables that were looked at, which grows.
        """
        if isinstance(node, ast.Name):
            if node.id not in self.stored:
                known = self.function.__globals__.get(node.id, len)
                return set() if callable(known) or isinstance(known, ModuleType) else {"data"}
            if node.id in seen:
                return {"again"}
            seen.add(node.id)
            given = [v for n, v in self.given if n == node.id]
            # An argument, or set in another way, or changed.
            if len(given) < self.stored[node.id] or node.id in self.changed:
                return {"data"}
            return set().union(*(self._sources(value, seen) for value in given))
        if isinstance(node, ast.Attribute) and self._is_me(node.value):
            if node.attr in self.module._parameters or node.attr in self.lists:
                return {"parameters"}
            number = isinstance(vars(self.module).get(node.attr), int | float | str)
            return set() if number else {"data"}
        if self._is_me(node):
            return {"data"}
        found = set().union(*(self._sources(part, seen) for part in ast.iter_child_nodes(node)))
        return found or ({"data"} if isinstance(node, ast.Call) else set())  # who knows what it makes

    def _is_me(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.me

    def _is_asked(self, node: ast.AST) -> bool:
        """Whether only something like a shape is wanted of it, or whether it is there."""
        parent = self.parents.get(node)
        while isinstance(parent, ast.Subscript) and parent.value is node:  # w[0].numel()
            node, parent = parent, self.parents.get(parent)
        if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name):
            return parent.func.id == "len" and not self._is_set(parent.func)
        if isinstance(parent, ast.Compare):
            return all(isinstance(op, ast.Is | ast.IsNot) for op in parent.ops)
        return isinstance(parent, ast.Attribute) and parent.attr in _ASKED

    def _is_set(self, name: ast.Name) -> bool:
        """Whether a built-in's name means something else in the function."""
        return name.id in self.stored or name.id in self.function.__globals__

    def _variable(self, node: ast.AST, among: Mapping[str, ast.expr] | None = None) -> ast.expr | None:
        """What the variable of this name was set to, before."""
        known = self.variables if among is None else among
        value: Any = known.get(node.id) if isinstance(node, ast.Name) else None
        if value is None:
            return None
        end = value.end_lineno, value.end_col_offset
        if end > (node.lineno, node.col_offset):  # type: ignore[attr-defined]
            return None
        return value

    def _weight(self, node: ast.AST) -> _Weight | None:
        """What an expression makes of a parameter; None: nothing that may take its place."""
        if node not in self.weights:
            self.weights[node] = self._made_of_weight(node)
        return self.weights[node]

    def _made_of_weight(self, node: ast.AST) -> _Weight | None:
        value = self._variable(node)
        if value is not None:
            found = self._weight(value)
            return None if found is None else found._replace(nodes=(*found.nodes, node))
        if isinstance(node, ast.Name) and self.stored[node.id] > 1:
            several = self._in_branches(node)
            if several is not None:
                return several
        if isinstance(node, ast.Name) and node.id in self.bound:
            alone = self.stored[node.id] == 1 and node.id not in self.changed
            return _Weight(self.bound[node.id], False, False, False, (node,)) if alone else None
        if isinstance(node, ast.Name):
            whole = self._variable(node, self.unpacked)
            found = self._in_loop(node) if whole is None else self._stack(whole)
            if found is not None and whole is not None:
                found = found._replace(indexed=True)
            return None if found is None else found._replace(nodes=(*found.nodes, node))
        if isinstance(node, ast.Subscript | ast.Attribute) and self._list(node.value):
            return self._in_list(node)
        if isinstance(node, ast.Attribute):
            if self._is_me(node.value):
                return (
                    _Weight(node.attr, False, False, False, (node,)) if node.attr in self.own else None
                )
            return _turned(self._weight(node.value)) if node.attr in ("T", "mT") else None
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice | ast.Tuple):
            found = self._weight(node.value)
            return None if found is None or found.indexed else found._replace(indexed=True)
        if isinstance(node, ast.Call) and self._value(node.func) is F.normalize and node.args:
            named = _by_name(node, ("input", "p", "dim", "eps", "out"), node.args)
            found = self._weight(named["input"]) if named else None
            along = self._number(named["dim"]) if "dim" in named else 1
            if found is None or found.turned or found.indexed or along not in (-2, -1, 0, 1):
                return None
            return found._replace(scaled=True, along=int(along) % 2)
        if isinstance(node, ast.Call) and node.args and isinstance(self._value(node.func), FunctionType):
            return self._scaled_by(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "unbind" and not node.keywords:
                by_torch = self._value(node.func) is torch.unbind
                given = node.args if by_torch else [node.func.value, *node.args]
                return self._stack(given[0]) if {*map(self._number, given[1:])} <= {0} else None
            found, name = self._weight(node.func.value), node.func.attr
            if found is not None and name == "transpose":
                listed = self.lists.get(found.name)
                ndim = (self.module.get_parameter(found.name) if listed is None else listed).ndim
                last = [{-1, -2}, {ndim - 1, ndim - 2}, *([{0, 1}] if found.indexed else [])]
                return _turned(found) if {*map(self._number, node.args)} in last else None
            if name == "t":
                return _turned(found)
            is_view = found is not None and found.turned and found.scaled
            return found if name in _CASTS and not is_view else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            pairs = [(node.left, node.right), (node.right, node.left)]
            for one, other in pairs[: 1 if isinstance(node.op, ast.Div) else 2]:
                found = self._weight(one)
                if found is not None and not found.turned and self._is_number(other):
                    return found._replace(scaled=True)
        return None

    def _scaled_by(self, node: ast.Call) -> _Weight | None:
        """A weight of which a function of numbers besides scales the rows."""
        found = self._weight(node.args[0])
        if found is None or found.turned or found.indexed or found.name not in self.own:
            return None
        numbers = [self._number(x) for x in node.args[1:]]
        named = {k.arg: self._number(k.value) for k in node.keywords if k.arg is not None}
        if len(named) < len(node.keywords) or None in (*numbers, *named.values()):
            return None
        function, parameter = self._value(node.func), self.module.get_parameter(found.name)
        scaled = scaling_of_function(lambda weight: function(weight, *numbers, **named), parameter)
        return found._replace(scaled=True) if scaled == "scaled rows" else None

    def _in_branches(self, node: ast.Name) -> _Weight | None:
        """What a variable holds that is set several times, to one parameter or multiples of it."""
        given = [value for name, value in self.given if name == node.id]
        if len(given) < self.stored[node.id] or node.id in self.changed:
            return None
        if any(self._is_in_a_loop(value) for value in given):
            return None
        here = node.lineno, node.col_offset
        before = [self._weight(v) for v in given if (v.end_lineno, v.end_col_offset) <= here]
        found = [weight for weight in before if weight is not None]
        if not found or len(found) < len(before):
            return None
        nodes = tuple(dict.fromkeys(n for weight in found for n in weight.nodes))
        scaled = any(weight.scaled for weight in found)
        alike = {weight._replace(nodes=(), scaled=scaled) for weight in found}
        return found[0]._replace(nodes=(*nodes, node), scaled=scaled) if len(alike) == 1 else None

    def _is_in_a_loop(self, node: ast.AST) -> bool:
        around: ast.AST | None = node
        while around is not None and not isinstance(around, ast.For | ast.While | ast.comprehension):
            around = self.parents.get(around)
        return around is not None

    def _in_loop(self, node: ast.Name) -> _Weight | None:
        """What a variable of the loop holds that an expression is in, if nothing else sets it there."""
        scopes = self.loops.get(node.id, {})
        inner: ast.AST | None = node
        while inner is not None and inner not in scopes:
            inner = self.parents.get(inner)
        if inner is None:
            return None
        names = [n for n in ast.walk(inner) if isinstance(n, ast.Name) and n.id == node.id]
        sets = [n for n in names if not isinstance(n.ctx, ast.Load)]
        return scopes[inner] if len(sets) == 1 else None

    def _in_list(self, node: ast.Subscript | ast.Attribute) -> _Weight | None:
        """A parameter that is taken out of a list or a dict."""
        name = self._list(node.value)
        if isinstance(node, ast.Attribute):
            place, key = node.attr, node.attr
        else:
            place = ast.dump(node.slice)
            known = isinstance(node.slice, ast.Constant)
            key = str(node.slice.value) if known else ""  # type: ignore[attr-defined]
            if isinstance(node.slice, ast.Slice):
                return None
        if f"{name}.{key}" in self.own:
            name = f"{name}.{key}"
        elif isinstance(node, ast.Attribute):
            return None
        return _Weight(name, False, False, False, (node.value,), place)

    def _number(self, node: ast.AST) -> float | None:
        """An expression's value, if it is a number; of one in a tensor, 1."""
        if node not in self.numbers:
            self.numbers[node] = self._computed(node)
        return self.numbers[node]

    def _is_number(self, node: ast.AST) -> bool:
        """Whether an expression is a number, also of an argument that is one by default, or of sizes."""
        if self._number(node) is not None:
            return True
        if isinstance(node, ast.Name):
            return node.id in self.defaults and self.stored[node.id] == 1
        if isinstance(node, ast.BinOp):
            return self._is_number(node.left) and self._is_number(node.right)
        if isinstance(node, ast.Call) and self._value(node.func) in (math.sqrt, np.sqrt):
            return all(map(self._is_number, node.args))
        asked = node.func if isinstance(node, ast.Call) else node
        return isinstance(asked, ast.Attribute) and asked.attr == "numel"

    def _computed(self, node: ast.AST) -> float | None:
        value: Any = self._variable(node)
        if value is not None:
            value = self._number(value)
        elif isinstance(node, ast.Constant):
            value = node.value
        elif isinstance(node, ast.Attribute) and self._is_me(node.value):
            value = vars(self.module).get(node.attr)
            if node.attr in self.singles:
                value = 1
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self._number(node.operand)
            value = None if operand is None else -operand
        elif isinstance(node, ast.Call) and self._value(node.func) is math.sqrt:
            operand = self._number(node.args[0])
            value = None if operand is None else math.sqrt(abs(operand))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.Pow):
            left, right = self._number(node.left), self._number(node.right)
            if left is not None and right is not None:
                value = _combined(node.op, left, right)
        return value if isinstance(value, int | float) else None

    def _value(self, node: ast.AST) -> Any:
        """What a dotted name in the function means; None: it is not known."""
        if isinstance(node, ast.Name):
            known = node.id not in self.stored and node.id not in self.function.__code__.co_freevars
            return self.function.__globals__.get(node.id) if known else None
        value = self._value(node.value) if isinstance(node, ast.Attribute) else None
        # Only of what is there: of anything else to ask for an attribute may import, or raise.
        return vars(value).get(node.attr) if isinstance(value, ModuleType) else None  # type: ignore[attr-defined]


def _by_name(
    node: ast.Call, names: Sequence[str], positional: Sequence[ast.expr]
) -> dict[str, ast.expr]:
    """A call's arguments by name; none if some are not written out.

    Args:
        names: of the function's arguments, in order.
    """
    given = {k.arg: k.value for k in node.keywords if k.arg is not None}
    if any(isinstance(x, ast.Starred) for x in positional) or len(given) < len(node.keywords):
        return {}
    return dict(zip(names, positional, strict=False)) | given


def _combined(operation: ast.operator, left: float, right: float) -> float | None:
    """A product, quotient or power of two numbers; None: there is none that is real."""
    try:
        if isinstance(operation, ast.Pow):
            found: Any = float(left) ** right  # of whole numbers it may have no end
        else:
            found = left * right if isinstance(operation, ast.Mult) else left / right
    except ArithmeticError:
        return None
    return found if isinstance(found, int | float) else None


def _is_einsum(function: Any) -> bool:
    """Whether it is torch's, or einops', which calls that."""
    return function is torch.einsum or (
        getattr(function, "__name__", "") == "einsum"
        and getattr(function, "__module__", "").startswith("einops.")
    )


def _turned(weight: _Weight | None) -> _Weight | None:
    return None if weight is None or weight.turned else weight._replace(turned=True)
