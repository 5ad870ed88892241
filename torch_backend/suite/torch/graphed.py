"""Whole steps without Python: recorded once for each kind of step, and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from suite.torch.checks import is_at_hand, warn_user
from suite.torch.graph_kinds import Kind, Recordable, is_known, kind_of, why_not
from suite.torch.graphed_kfac import RecordableKFAC
from suite.torch.graphed_kron import RecordableKron
from suite.torch.kfac import KFAC
from suite.torch.kron import Kron
from suite.torch.recorders import RECORDERS, BrokenRecording

_MOST, _IDLE = 16, 64  # kinds of steps that stay recorded, and steps without one after which it goes
_KNOWN = 256  # kinds that were met once
_PATIENCE = 50  # steps of which some should have been replayed


class _Recorded(NamedTuple):
    """A kind of step."""

    replay: Callable[[], None]
    inputs: list[torch.Tensor]  # where it reads a batch
    outputs: Any  # where it leaves what `loss_of` returned
    record: Any  # what the optimizer needs to know at a replay


class GraphedStep:
    """Forward pass, backward pass and step of `KFAC` or `Kron` as one CUDA graph.

    On a GPU a step of a small model is Python starting kernels, a dozen for each layer in a step with
    statistics. A graph starts them all at once:

        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        periods = {"factor_update_steps": 10, "inv_update_steps": 10}
        kfac = KFAC(model, base, compute_method="inverse", **periods)
        step = GraphedStep(kfac, lambda x, y: F.cross_entropy(model(x), y))
        for x, y in loader:
            loss = step(x, y)

    A kind of step (with statistics, new inverses or factors or without, shapes of the batch, settings,
    which modules train and which parameters) runs as ever when it is met first, is recorded when it
    comes again, and replayed from then on. The learning rate of each group may be another in each step,
    and with Kron the rate and the schedule of its factors; another setting that changes, like a damping
    or momentum, makes every step another kind. `print(step)` says how many steps were replayed, and why
    others were not; there is a warning if none of the first are.

    Eigenbases ('eigen', 'ekfac') are not recorded, for the host looks while they are computed: steps
    with new ones run as ever. So do all on a device without graphs. Up to rounding the numbers are the
    same, but for the learning rate of K-FAC, which is one of single precision. Of a factorization that
    fails in a replayed step the second try comes after the step, which takes the inverse before it.

    Gradients are None before and after. Only parameters of the model and the optimizer get any. Memory
    for activations is taken twice, for steps that are replayed and for those that are not. Steps of
    the optimizer itself, other passes and checkpoints may come in between.

    Args:
        optimizer: in one process, on one device. KFAC with a fused base optimizer, `fisher='empirical'`,
            no `grad_scaler`, no `spread_inverses`, and `terms` no function; other parameters of the base
            optimizer are moved as it does. Or Kron without `hvp`, whose schedules are functions of the
            count alone.
        loss_of: (*batch) -> the loss, (), or a tuple of it and of other tensors. What it does besides
            starting kernels happens only where a step runs as ever: it must not take numbers of the
            device to the host (`item`, `if` on a tensor), or what changes but by its arguments or in
            place. These are tensors and plain values, in tuples, lists and dicts. Autocast belongs in
            here, `backward` does not.
        model: what `loss_of` runs. Default: K-FAC's; Kron has none.

    Raises:
        ValueError, TypeError: a setting that needs the host in each step; another optimizer, no
            function, no model.
    """

    def __init__(
        self, optimizer: KFAC | Kron, loss_of: Callable[..., Any], model: nn.Module | None = None
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not callable(loss_of):
            raise TypeError(f"loss_of must be a function of the batch, got {loss_of!r}")
        self.optimizer, self.loss_of = optimizer, loss_of
        self._part: Recordable
        if isinstance(optimizer, KFAC):
            self._part = RecordableKFAC(optimizer)
            model = optimizer.model if model is None else model
        elif isinstance(optimizer, Kron):
            self._part = RecordableKron(optimizer)
        else:
            raise TypeError(
                f"optimizer must be a suite.torch.KFAC or Kron, got {type(optimizer).__name__}: of "
                "others torch.compile(optimizer.step) makes graphs"
            )
        if model is None:
            raise TypeError("model must be what loss_of runs, got None: Kron knows but parameters")
        self._modules = list(model.modules())
        self._device = self._part.device
        make = RECORDERS.get(self._device.type)
        self._recorder = None if make is None else make(self._device)
        self._recorded: dict[Kind, _Recorded] = {}
        self._met: set[Kind] = set()
        self._waited = Counter[Kind]()  # how often their first steps made the host wait
        self._refused: dict[Kind, str] = {}  # why they cannot be recorded
        self._used: dict[Kind, int] = {}  # by what is recorded, the step that was one last
        self._has_told = False  # that there are some
        self._memory: list[int] = []  # which tensors recorded steps read and write
        self._held: list[torch.Tensor] = []  # those of them that are not the model's parameters
        self.replayed = 0
        self.as_ever = Counter[str]()  # steps that were not replayed, by reason

    def __call__(self, *batch: Any) -> Any:
        """Take a step; what `loss_of` returned, detached. Tensors of the batch may be on the host.

        Raises:
            ValueError: a tensor of the batch was computed from what has a gradient.
            RuntimeError: CUDA could not record the step, and the process should go no further.
        """
        leaves, structure = tree_flatten(batch)
        if any(_is_tensor(x) and x.grad_fn is not None for x in leaves):
            raise ValueError("batch must be of data, got a tensor that has a gradient to pass on")
        here = {id(x): x.to(self._device, non_blocking=True) for x in leaves if _is_tensor(x)}
        leaves = [here.get(id(x), x) for x in leaves]  # what is one tensor stays one
        parameters = self._parameters()
        if any(p.grad is not None for p in parameters):
            self._clear()
        kind, reason = self._kind(leaves, structure, parameters)
        if kind is None:
            found = self._run(leaves, structure)
        elif kind in self._recorded:
            return self._replay(kind, leaves)
        elif kind in self._refused:
            reason = self._refused[kind]
            found = self._run(leaves, structure)
        elif kind not in self._met:
            reason = self._news_in(kind)
            found = self._watch(kind, leaves, structure)
        elif not self._has_room():
            reason = f"of another kind than the {_MOST} that are recorded"
            found = self._run(leaves, structure)
        elif self._record(kind, leaves, structure):
            return self._replay(kind, leaves)
        else:
            reason = self._refused[kind]
            found = self._run(leaves, structure)
        self.as_ever[reason] += 1
        if self._recorder is not None and not self.replayed and self.as_ever.total() == _PATIENCE:
            warn_user(f"none of {_PATIENCE} steps could be replayed: {self!r}")
        return found

    def __repr__(self) -> str:
        reasons = "".join(f", {count} {reason}" for reason, count in self.as_ever.items())
        return f"GraphedStep({self.replayed} steps replayed{reasons})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a GraphedStep cannot be copied or pickled: make one of the copied model and optimizer"
        )

    # ---- kinds of steps ------------------------------------------------------------------------

    def _kind(
        self, leaves: list[Any], structure: Any, parameters: list[torch.Tensor]
    ) -> tuple[Kind | None, str]:
        """(the coming step's, '') or (None, why that is not to be recorded)."""
        if self._recorder is None:
            return None, f"on a device without graphs ({self._device.type})"
        self._forget_what_moved(parameters)
        reason = self._part.not_yet() or why_not(self._part, leaves)
        if reason:
            return None, reason
        return kind_of(self._part, leaves, structure, self._modules, parameters), ""

    def _news_in(self, kind: Kind) -> str:
        """What is new in a kind that is."""
        if not self._met:
            return "that are the first with parameters and state where they are"
        news = min(map(kind.differences, self._met), key=len)
        return f"of a kind that is new ({' and '.join(news)})"

    def _parameters(self) -> list[torch.Tensor]:
        """The optimizer's, and the model's once more."""
        found = [p for group in self.optimizer.param_groups for p in group["params"]]
        found += [p for module in self._modules for p in module._parameters.values() if p is not None]
        return found

    def _forget_what_moved(self, parameters: list[torch.Tensor]) -> None:
        """Drop what is recorded, if it reads or writes tensors that are not in use any more."""
        tensors = self._part.memory()
        groups = self.optimizer.param_groups
        tensors += [group["lr"] for group in groups if not is_at_hand(group["lr"])]
        tensors += [b for module in self._modules for b in module._buffers.values() if b is not None]
        memory = [*map(id, tensors), *[x.data_ptr() for x in (*tensors, *parameters)]]
        if memory != self._memory:
            self._recorded.clear()
            self._used.clear()
            self._met.clear()
            self._waited.clear()
            self._refused.clear()
            self._part.forget()
            if self._recorder is not None:
                self._recorder.forget()
            self._memory, self._held = memory, tensors  # so that none takes the place of another

    # ---- steps ---------------------------------------------------------------------------------

    def _body(self, batch: Any) -> Any:
        """A step, whether it is recorded or not."""
        found = self._passes(batch)
        self._take_step()
        return _detached(found)

    def _passes(self, batch: Any) -> Any:
        """Forward and backward; what `loss_of` returned."""
        self._part.begin_pass()
        with torch.enable_grad():
            found = self.loss_of(*batch)
            loss = found[0] if isinstance(found, tuple) and found else found
            if not _is_tensor(loss) or loss.ndim:
                got = tuple(loss.shape) if _is_tensor(loss) else type(loss).__name__
                raise TypeError(
                    f"loss_of must return a loss of shape (), or a tuple that begins with it, got {got}"
                )
            # What is neither the model's nor the optimizer's would keep a gradient from step to step.
            own = [p for p in self._parameters() if p.requires_grad and p.is_leaf]
            loss.backward(inputs=[*{id(p): p for p in (*own, *self._part.slots())}.values()])
        return found

    def _take_step(self) -> None:
        self.optimizer.step()
        self._clear()
        self._part.begin_pass()

    def _clear(self) -> None:
        """Gradients and statistics."""
        for p in self._parameters():
            p.grad = None
        self.optimizer.zero_grad()

    def _run(self, leaves: list[Any], structure: Any) -> Any:
        """A step as ever."""
        batch = tree_unflatten(leaves, structure)
        if self._recorder is None:
            return self._body(batch)
        return self._recorder.run(lambda: self._body(batch))

    def _watch(self, kind: Kind, leaves: list[Any], structure: Any) -> Any:
        """A step as ever, the first of its kind."""
        recorder = self._recorder
        assert recorder is not None

        def body() -> Any:
            found, waits = recorder.watched(lambda: self._passes(tree_unflatten(leaves, structure)))
            self._take_step()  # in which the optimizer itself may look
            if not waits:
                self._met = {kind} if len(self._met) >= _KNOWN else self._met | {kind}
                return found
            self._waited[kind] += 1
            if self._waited[kind] > 1:  # once it may have had something to settle
                self._refuse(kind, f"that make the host wait ({waits})")
            return found

        return _detached(recorder.run(body))

    def _has_room(self) -> bool:
        """Whether another kind may be recorded; one that has not come for long makes room."""
        if len(self._recorded) < _MOST:
            return True
        oldest = min(self._recorded, key=self._used.__getitem__)
        if self._steps() - self._used[oldest] <= _IDLE:
            return False
        del self._recorded[oldest], self._used[oldest]
        return True

    def _steps(self) -> int:
        return self.replayed + self.as_ever.total()

    def _refuse(self, kind: Kind, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            warn_user(f"there are steps that cannot be recorded, and run as ever: {why}")
        self._refused[kind] = why

    def _record(self, kind: Kind, leaves: list[Any], structure: Any) -> bool:
        """Whether it could be recorded. Nothing has run: the optimizer is as before."""
        assert self._recorder is not None
        copies = {
            id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in leaves if _is_tensor(x)
        }
        batch = tree_unflatten([copies.get(id(x), x) for x in leaves], structure)
        done = False
        try:
            with self._part.recording() as recording:
                replay, outputs = self._recorder.record(lambda: self._body(batch))
                if not all(map(is_known, tree_flatten(outputs)[0])):
                    raise TypeError("loss_of returns what is neither tensors nor plain values")
                own = [copies[key] for key in copies]
                self._recorded[kind] = _Recorded(replay, own, outputs, recording.record())
            done = True
        except BrokenRecording as error:
            raise RuntimeError(
                f"CUDA could not record a step ({error}): loss_of must not take numbers to the host; "
                "begin anew without what does, or without GraphedStep"
            ) from error
        except Exception as error:
            self._refuse(kind, f"that cannot be recorded ({error})")
        finally:
            if not done:
                self._recorder.forget()
                self._clear()
                self._part.reset()
        return done

    def _replay(self, kind: Kind, leaves: list[Any]) -> Any:
        recorded = self._recorded[kind]
        self._used[kind] = self._steps()
        given = list({id(x): x for x in leaves if _is_tensor(x)}.values())
        with torch.no_grad():
            if given:
                torch._foreach_copy_(recorded.inputs, given)
            self._part.begin_replay(recorded.record)
            recorded.replay()
            # The next replay of another kind may use the same memory.
            found = tree_map(lambda x: x.clone() if _is_tensor(x) else x, recorded.outputs)
            self.replayed += 1
            self._part.end_replay(recorded.record)
        return found


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _detached(found: Any) -> Any:
    return tree_map(lambda x: x.detach() if _is_tensor(x) else x, found)
