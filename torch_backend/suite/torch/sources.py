"""The sources of functions: of what a module runs, and of what that hands its parameters to."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType


class NotUnderstoodError(Exception):
    """What a module runs cannot be told."""


def definition(cls: type, start: int, name: str) -> tuple[int, FunctionType] | None:
    """The function of a method or a property, and its class's place among the bases from `start` on.

    None: there is none, or it knows no instance.
    """
    for place, base in enumerate(cls.__mro__[start:], start):
        if name not in vars(base):
            continue
        found = vars(base)[name]
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, functools.cached_property):
            found = found.func
        elif isinstance(found, (staticmethod, classmethod)) or not hasattr(type(found), "__get__"):
            return None
        found = inspect.unwrap(found) if isinstance(found, FunctionType) else found
        if not isinstance(found, FunctionType):
            raise NotUnderstoodError
        return place, found
    return None


@functools.lru_cache(maxsize=256)
def tree_of(code: CodeType) -> ast.FunctionDef:
    """A function's source."""
    source = inspect.getsource(code)
    (tree,) = ast.parse("if True:\n" + source if source[0].isspace() else source).body
    tree = tree.body[0] if isinstance(tree, ast.If) else tree
    if not isinstance(tree, ast.FunctionDef):
        raise NotUnderstoodError
    # The file may have changed since it was imported.
    now = compile(ast.Module([tree], []), "", "exec", dont_inherit=True).co_consts
    if not any(_alike(code, own) for own in now if isinstance(own, CodeType)):
        raise NotUnderstoodError
    return tree


def _alike(code: CodeType, other: CodeType) -> bool:
    """Whether they use the same names."""
    names = ("co_name", "co_names", "co_varnames")
    return all(getattr(code, name) == getattr(other, name) for name in names)


def live_nodes(tree: ast.AST, axes_of: Callable[[ast.expr], int | None]) -> list[ast.AST]:
    """All nodes of a function that matter to gradients.

    Not of `with torch.no_grad()`, nor of what cannot run: `if weight.dim() == 3: ...` of a matrix.

    Args:
        axes_of: how many axes an expression has, of parameters; None: it is none.
    """
    found, waiting = [], [tree]
    for node in waiting:
        found.append(node)
        for _, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                waiting.append(value)
            elif isinstance(value, list):
                parts = [x for x in value if isinstance(x, ast.AST)]
                waiting += _that_run(parts, axes_of)
    return found


def _that_run(parts: list[ast.AST], axes_of: Callable[[ast.expr], int | None]) -> Iterator[ast.AST]:
    """Of statements that follow each other those that may run, without tests whose outcome is known."""
    for part in parts:
        known = _outcome(part.test, axes_of) if isinstance(part, ast.If) else None
        if isinstance(part, ast.With) and any(map(_is_without_gradients, part.items)):
            continue
        if not isinstance(part, ast.If) or known is None:
            yield part
            continue
        taken: list[ast.AST] = [*(part.body if known else part.orelse)]
        yield from _that_run(taken, axes_of)
        if taken and isinstance(taken[-1], ast.Return | ast.Raise):
            return


def _is_without_gradients(item: ast.withitem) -> bool:
    return ast.unparse(item.context_expr) in ("torch.no_grad()", "torch.inference_mode()")


def _outcome(test: ast.expr, axes_of: Callable[[ast.expr], int | None]) -> bool | None:
    """Whether a comparison of a parameter's number of axes holds; None: it is something else."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    left, (op,), (right,) = test.left, test.ops, test.comparators
    left = left.func if isinstance(left, ast.Call) and not left.args else left
    if not (isinstance(left, ast.Attribute) and left.attr in ("dim", "ndim")):
        return None
    axes = axes_of(left.value)
    if axes is None or not isinstance(right, ast.Constant) or not isinstance(op, ast.Eq | ast.NotEq):
        return None
    return (axes == right.value) == isinstance(op, ast.Eq)


def parameters_of(call: ast.Call, function: FunctionType, skip: int) -> Mapping[str, ast.expr] | None:
    """What a call gives a function, by the names of its parameters; None: it cannot be told.

    Args:
        skip: how many parameters come before those of the call: `self`.
    """
    arguments = tree_of(function.__code__).args
    names = [x.arg for x in (*arguments.posonlyargs, *arguments.args)][skip:]
    keywords = {k.arg: k.value for k in call.keywords}
    starred = any(isinstance(x, ast.Starred) for x in call.args)
    if starred or None in keywords or len(call.args) > len(names):
        return None
    given = dict(zip(names, call.args, strict=False))
    known = {*names, *(x.arg for x in arguments.kwonlyargs)}
    if not keywords.keys() <= known - given.keys():
        return None
    return given | {str(name): value for name, value in keywords.items()}
