"""Forward hooks that belong to one module and to one owner, who may go away first."""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

F = TypeVar("F", bound=Callable[..., Any])

# torch 2.6 has none.
_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
# Whether torch.compile sees all that modes do, and when they are off (pytorch/pytorch#149491).
_TRACES_MODES = torch.__version__ >= "2.8"  # by version, not by letter

_REVERSED_MINUS, _REVERSED_OVER = torch.Tensor.__rsub__, torch.Tensor.__rtruediv__
_POWER, _REVERSED_POWER = torch.Tensor.__pow__, torch.Tensor.__rpow__
_REVERSED_DIV, _UNFLATTEN = torch.Tensor.__rdiv__, torch.Tensor.unflatten
# NumPy's operators, by the names of the tensors' functions that torch.compile asks modes for instead,
# where these are no names of the arrays' own methods.
_OF_ARRAYS: dict[str, Any] = {
    "neg": operator.neg,
    "positive": operator.pos,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "ne": operator.ne,
    "add_": operator.iadd,
    "sub_": operator.isub,
    "mul_": operator.imul,
    "div_": operator.itruediv,
    "floor_divide_": operator.ifloordiv,
    "remainder_": operator.imod,
    "pow_": operator.ipow,
    "__rdiv__": lambda x, y: y / x,
}
_LONGEST_INDEX = 64  # what is longer, and starts with a number, is data
# What torch keeps of a hook by its number.
_BESIDE = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def before_forward(module: nn.Module, hook: Any) -> RemovableHandle:
    """`module.register_forward_pre_hook(hook)`, numbered as `after_forward` does."""
    with _numbered_by(module):
        return module.register_forward_pre_hook(hook)


def after_forward(module: nn.Module, hook: Any, **how: bool) -> RemovableHandle:
    """`module.register_forward_hook(hook, with_kwargs=True, **how)`, with a number by the module.

    torch numbers hooks of all modules one after the other, and what torch.compile has made of a module
    holds for hooks of the same numbers alone. With numbers by module it holds for modules alike: blocks
    that are compiled one by one are compiled once.
    """
    with _numbered_by(module):
        return module.register_forward_hook(hook, with_kwargs=True, **how)


@contextlib.contextmanager
def _numbered_by(module: nn.Module) -> Iterator[None]:
    """torch's own numbers are not negative."""
    before = RemovableHandle.next_id
    RemovableHandle.next_id = min((0, *module._forward_hooks, *module._forward_pre_hooks)) - 1
    try:
        yield
    finally:
        RemovableHandle.next_id = before


class Hook:
    """Calls `owner.observe(site, args, kwargs, output)` after the module's forward.

    The owner is not kept alive, and a copy of the module, be it deep or pickled, gets an inert hook.
    """

    def __init__(self, owner: Any, module: nn.Module, site: int = 0) -> None:
        self.owner = weakref.ref(owner)
        self.module = weakref.ref(module)
        self.site = site
        # Not asked of a clock: torch.compile guards each step of a way, and that two lead to one place.
        self.awake = True  # False: the owner has nothing to see
        self.owed = 0  # forwards that it has to see the end of all the same

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self.awake and not self.owed:
            return None
        owner = self.owner()
        if owner is None or self.module() is not module:
            return None
        return owner.observe(self.site, args, kwargs, output)

    def __deepcopy__(self, memo: Any) -> InertHook:
        return InertHook()

    def __reduce__(self) -> Any:
        return (InertHook, ())


class InertHook:
    """What a copy gets."""

    def __call__(self, *args: Any) -> None:
        return None


def drop_inert_hooks(module: nn.Module) -> None:
    """Take off what a copy of a module got in the place of hooks."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if isinstance(hook, InertHook)]:
            for others in _BESIDE:
                getattr(module, others, {}).pop(number, None)
            del hooks[number]


class Mode(TorchFunctionMode):
    """Watches the functions that run in a forward, which torch.compile may trace.

    Where torch.compile gives a forward up and compiles what that calls, it would compile
    `__torch_function__`, too, and run for one function what it has made of another.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for function in (cls.__torch_function__, *vars(cls).values()):
            if isinstance(function, FunctionType):
                _keep_from_compiling(function.__code__, alone=function is not cls.__torch_function__)

    def __init__(self) -> None:
        super().__init__()
        self.is_traced = torch.compiler.is_compiling()
        self.entered_by: ModeAround | None = None  # known outside of graphs
        self.is_away = False  # while what is compiled runs apart

    def looking(self) -> Any:
        """Around what it looks at: other modes would be asked for each attribute of a tensor."""
        off = _TRACES_MODES or not self.is_traced
        return torch._C.DisableTorchFunction() if off else contextlib.nullcontext()

    def looks_away(self) -> bool:
        """Whether what runs is compiled by itself, inside of a forward that is not, or is its graph.

        Autograd has what a backend made of a graph as one function, which runs without gradients. Where
        hooks are compiled apart from the forward, the mode is there then.
        """
        if torch.compiler.is_compiling():
            return not self.is_traced
        return self.is_traced and not torch.is_grad_enabled()


class Apart:
    """A call of what is compiled by itself, without the modes of forwards around it.

    They would leave to others what it does. But torch.compile makes one thing of a call under modes and
    another of one without; and what a checkpoint runs again, in the backward pass, has none around it.
    These need not save the same tensors in the same order, and torch would take one for another.
    """

    def __init__(self, call: Any) -> None:
        self.__wrapped__ = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        modes: list[Any] = []
        while isinstance(torch.overrides._get_current_function_mode(), Mode):
            modes.append(torch.overrides._pop_mode())
            modes[-1].is_away = True
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            for mode in reversed(modes):
                torch.overrides._push_mode(mode)
                mode.is_away = False

    @staticmethod
    def _name(module: nn.Module) -> str:
        """Where its compiled call is: of `torch.compile(module)`, or after `module.compile()`."""
        return "forward" if type(module).__name__ == "OptimizedModule" else "_compiled_call_impl"

    @classmethod
    def put_in(cls, model: nn.Module) -> None:
        """In the place of calls of the model and what is inside of it, as far as that is compiled."""
        for module in model.modules():
            name = cls._name(module)
            call = vars(module).get(name)
            is_off = getattr(call, "_torchdynamo_disable", False)
            if call is not None and not is_off and not isinstance(call, cls):
                vars(module)[name] = cls(call)

    @classmethod
    def take_out(cls, model: nn.Module) -> None:
        for module in model.modules():
            name = cls._name(module)
            call = vars(module).get(name)
            if isinstance(call, cls):
                vars(module)[name] = call.__wrapped__


def over(x: torch.Tensor, number: Any) -> torch.Tensor:
    """number / x"""
    return x.reciprocal() * number


def raised(x: torch.Tensor, base: Any) -> torch.Tensor:
    """base ** x"""
    return torch.pow(base, x)


def traceable(function: Any, args: Any) -> Any:
    """A function as a mode is to call it, and to know it by.

    torch.compile breaks its graph at the method `unflatten`, and cannot look for others in sets. Where
    NumPy's arrays are part of a graph, it cannot call on them what it asks modes for.
    """
    if args and isinstance(args[0], np.ndarray) and torch.compiler.is_compiling():
        return _OF_ARRAYS.get(function.__name__, function)
    if function is _REVERSED_MINUS:
        return torch.rsub
    if function is _REVERSED_OVER or function is _REVERSED_DIV:
        return over
    if function is _REVERSED_POWER:
        return raised
    if function is _POWER and torch.compiler.is_compiling():
        return torch.pow
    if function is _UNFLATTEN and torch.compiler.is_compiling():
        return torch.unflatten
    return function


def _keep_from_compiling(code: CodeType, *, alone: bool = False) -> None:
    """Have code run as it is, and what it calls, but where it is part of a graph.

    Args:
        alone: what calls it has been kept so, and only torch 2.6 needs to be told again.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        if alone:
            return
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    elif hasattr(frames, "skip_code"):  # torch 2.6
        frames.skip_code(code)


def uncompiled(hook: F) -> F:
    """A hook that runs in backward passes, which are not to be compiled with what calls them.

    `torch.compiler.disable` would load what compiles.
    """
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    _keep_from_compiling(hook.__code__)
    return hook


class Stacks:
    """What is under way, the innermost last: of each thread, as torch has its modes.

    What torch.compile traces, which cannot ask for the thread, is of the one that this was made in: a
    forward may be compiled in parts, and what was begun outside of a graph ends in one.
    """

    def __init__(self) -> None:
        self._home, self._here = threading.get_ident(), list[Any]()
        self._elsewhere = threading.local()  # whose stacks go with their threads

    def own(self) -> list[Any]:
        """Those of the thread that runs."""
        if torch.compiler.is_compiling() or threading.get_ident() == self._home:
            return self._here
        found: list[Any] = self._elsewhere.__dict__.setdefault("stack", [])
        return found

    def push(self, one: Any) -> None:
        self.own().append(one)

    def pop(self) -> Any:
        """The innermost; None: there is none."""
        own = self.own()
        return own.pop() if own else None


class ModeAround:
    """A torch function mode around every forward of a module, entered if `make_mode` returns one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.modes = Stacks()  # None for a forward without one
        self.under_way = Counter[int]()  # forwards, by thread, as far as no graph has them
        enter, self.leave = Enter(self, module), Hook(self, module)
        self.exit = _Exit(self, after_forward(module, self.leave, always_call=True))
        self.handles: list[Any] = [before_forward(module, enter), self.exit]
        self.hooks: tuple[Hook, ...] = enter, self.leave

    def make_mode(self) -> Mode | None:
        raise NotImplementedError

    def enter(self) -> None:
        # An interrupted forward may have left a mode, which goes on watching until `unwind`.
        watched = any([mode is not None for mode in self.modes.own()])  # noqa: C419 (torch.compile)
        traced = not torch.compiler.is_compiling() and torch.jit.is_tracing()  # which sees the mode
        mode = None if watched or traced else self.make_mode()
        if mode is not None:
            module, around = self.module(), torch.overrides._get_current_function_mode
            if (
                not torch.compiler.is_compiling()
                and module is not None
                and not isinstance(around(), Mode)
            ):
                Apart.put_in(module)
            mode.__enter__()
            if not torch.compiler.is_compiling():
                mode.entered_by = self
        self.modes.push(mode)
        if not torch.compiler.is_compiling():
            self.under_way[threading.get_ident()] += 1
            self.leave.owed += 1

    def observe(self, site: int, args: Any, kwargs: Any, output: Any) -> None:
        """The forward is over, or has raised."""
        if not torch.compiler.is_compiling() and not self.modes.own():
            return  # it began when there was nothing to see
        mode = self.modes.pop()
        if mode is not None:
            mode.__exit__(None, None, None)
        if not torch.compiler.is_compiling():
            self.under_way[threading.get_ident()] -= 1
            self.leave.owed -= 1
            if output is not None:  # else torch is going through its hooks
                self.exit.left()

    def unwind(self) -> bool:
        """Outside of any forward: leave a mode that an interrupted one left on torch's stack."""
        while self.modes.own() and self.modes.own()[-1] is None:
            self.observe(0, None, None, None)
        modes = self.modes.own()
        if not modes or torch.overrides._get_current_function_mode() is not modes[-1]:
            return False
        self.observe(0, None, None, None)
        return True


class _Exit:
    """The handle of a hook that leaves modes, which stays while other threads have some to leave."""

    _awaited: ClassVar[set[tuple[_Exit, ModeAround]]] = set()  # to keep them alive

    def __init__(self, around: ModeAround, handle: Any) -> None:
        self._around, self._handle = weakref.ref(around), handle
        self._is_removed = False

    def remove(self) -> None:
        self._is_removed = True
        self.left()

    def left(self) -> None:
        """A thread left one."""
        around = self._around()
        if not self._is_removed or around is None:
            return
        if _runs_elsewhere(around):
            self._awaited.add((self, around))
        else:
            self._handle.remove()
            self._awaited.discard((self, around))


def _runs_elsewhere(around: ModeAround) -> bool:
    """Whether another thread is within it."""
    if not any(around.under_way.values()):
        return False
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident(), None}
    return any(around.under_way[ident] > 0 for ident in others if ident is not None)


def leave_interrupted() -> None:
    """Take off torch's stack what forwards left there that were interrupted, of whatever models.

    Ctrl-C runs no hooks. What is left watches all functions, and keeps its model alive.
    """
    while True:
        mode: Any = torch.overrides._get_current_function_mode()
        entered_by = mode.entered_by if isinstance(mode, Mode) else None
        if entered_by is None or _is_running(entered_by.module()) or not entered_by.unwind():
            return


def _is_running(module: nn.Module | None) -> bool:
    """Whether a call of it is under way in this thread."""
    frame, code = sys._getframe(), nn.Module._call_impl.__code__
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code and frame.f_locals.get("self") is module:
            return True
    return False


class Enter(Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:  # type: ignore[override]
        if not self.awake:
            return
        owner = self.owner()
        if owner is not None and self.module() is module:
            owner.enter()


def when_reached(outputs: Sequence[Any], call: Callable[[], Any]) -> None:
    """Call when a backward pass comes to one of these, at once where torch.compile traces."""
    if torch.compiler.is_compiling():
        call()
        return
    for x in outputs:
        if isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf:
            x.register_hook(lambda gradient: call())


def can_be_read(x: torch.Tensor) -> bool:
    """Whether its numbers are there: not where something traces, nor where a graph is captured."""
    if type(x) is not torch.Tensor or x.is_meta or torch._C._len_torch_dispatch_stack():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def in_backward() -> bool:
    """Whether a backward pass is running: activation checkpointing then runs layers a second time."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def is_exporting() -> bool:
    """Whether torch.export traces, for which nothing trains."""
    asked = getattr(torch.compiler, "is_exporting", None)  # torch 2.6 has none
    return asked is not None and bool(asked())


def is_within_functions() -> bool:
    """Whether one of torch.func's transforms is running."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active


# To torch.compile it is what it is while that traces, as it sees to itself that transforms are the same.
is_within_functions._dynamo_marked_constant = True  # type: ignore[attr-defined]


def on_transformed(y: Any, call: Callable[[], None]) -> None:
    """Call when a gradient arrives at a layer's output that is of a transform.

    That is torch.func's, whose gradients by what is handed to it are its own business, or forward mode.
    """
    if not isinstance(y, torch.Tensor):
        return
    under = y
    while torch._C._functorch.is_functorch_wrapped_tensor(under):
        under = torch._C._functorch.get_unwrapped(under)
    if under is y and forward_ad._current_level >= 0:
        under = forward_ad.unpack_dual(y).tangent
    if under is not None and under is not y and under.requires_grad:
        under.register_hook(lambda gradient: call())


def is_transformed(y: Any) -> bool:
    """Whether a layer's output is of a transform, see `on_transformed`."""
    return is_within_functions() or (isinstance(y, torch.Tensor) and forward_ad._current_level >= 0)


def is_batched(x: torch.Tensor) -> bool:
    """Whether it is under a vmap, torch.func's or that of `is_grads_batched`, which has no name."""
    if is_within_functions():
        return True
    try:
        x.untyped_storage()
    except RuntimeError:  # a batch has none
        return True
    return False


def packs_with() -> Any:
    """What autograd packs tensors with that it saves; None: it keeps them, or it is not known."""
    if torch.compiler.is_compiling() or _top_hooks is None:
        return None
    hooks = _top_hooks(False)
    return None if hooks is None else hooks[0]


def graph_clock() -> int:
    """A number that every node of autograd's graph which is yet to come on this thread has at least."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def root_of(x: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, or the tensor itself: they have one memory, and change together."""
    with torch._C.DisableTorchFunction():  # modes would be asked
        return x if x._base is None else x._base


_keep_from_compiling(root_of.__code__, alone=True)


def is_data(some: Any) -> bool:
    """Whether a list is numbers, too many for an index."""
    return len(some) > _LONGEST_INDEX and isinstance(some[0], int | float)


def tensors_given(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among a function's arguments, and in lists of them and in lists in these."""
    found: list[torch.Tensor] = []
    waiting = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            waiting.append((x, 1))
    for some, levels in waiting:
        if is_data(some):
            continue
        for x in some:
            if isinstance(x, torch.Tensor):
                found.append(x)
            elif levels and isinstance(x, list | tuple):
                waiting.append((x, levels - 1))
    return found


def tensors_in(given: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All that are in what a module is given, holds or returns, but for what was `seen` before."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Mapping | list | tuple) and id(given) not in seen:
        seen.add(id(given))
        for one in given.values() if isinstance(given, Mapping) else given:
            yield from tensors_in(one, seen)


def without_modes() -> Any:
    """Around the call of an autograd function: torch.compile traces its backward pass there, too."""
    if _TRACES_MODES and torch.compiler.is_compiling():
        return torch._C.DisableTorchFunction()
    return contextlib.nullcontext()


def in_traced_graph() -> bool:
    """Asked in a mode's `__torch_function__`: whether its caller is a graph that torch.compile traced.

    What the mode does is a part of the graph then. torch.compile's backend 'eager' runs the graph's
    functions under the modes that it was traced in.
    """
    if not _TRACES_MODES or torch.compiler.is_compiling():
        return False
    caller = sys._getframe(2)
    while caller.f_back is not None and _passes_on(caller.f_code):
        caller = caller.f_back
    if not caller.f_code.co_filename.startswith("<eval_with_key>"):  # torch.fx's name for what it writes
        return False
    graph = caller.f_locals.get("self")
    return isinstance(graph, torch.fx.GraphModule) and "dynamo_compile_id" in graph.meta


def _passes_on(code: CodeType) -> bool:
    """Whether it is another mode's, or of a function written in Python, which asks modes itself."""
    asks = torch.overrides.__file__, torch.functional.__file__, torch.nn.functional.__file__
    return code.co_name in ("__torch_function__", "_called") or code.co_filename in asks
