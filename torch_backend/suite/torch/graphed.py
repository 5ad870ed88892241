"""Whole steps of K-FAC without Python: recorded once for each kind of step, and replayed."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from suite.torch.checks import is_at_hand
from suite.torch.factor_refresh import Attempt
from suite.torch.kfac import KFAC
from suite.torch.recorders import RECORDERS

_MOST = 16  # kinds of steps that are recorded
_KNOWN = 256  # kinds that were met once
_NEW_INVERSES = "with new inverses"
_ASIDE = ("params", "param_names", "lr", "initial_lr")  # of a group: what kernels do not depend on


class _Recorded(NamedTuple):
    """A kind of step."""

    replay: Callable[[], None]
    inputs: list[torch.Tensor]  # where it reads a batch
    rates: list[torch.Tensor | None]  # and learning rates of groups; None: the user's own tensor
    outputs: Any  # where it leaves what `loss_of` returned
    overdue: tuple[Any, ...]  # what it tells K-FAC of the layers that ran
    terms: torch.Tensor | None  # where it leaves how many terms the loss had ...
    clipped: torch.Tensor | None  # ... and what kl_clip multiplied directions with
    attempts: list[Attempt]  # at new inverses: what the host is to look at
    held: Any  # what else it reads


class GraphedStep:
    """Forward pass, backward pass and K-FAC's step as one CUDA graph.

    On a GPU a step of a small model is Python starting kernels, a dozen for each layer in a step with
    statistics. A graph starts them all at once:

        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        step = GraphedStep(KFAC(model, base), lambda x, y: F.cross_entropy(model(x), y))
        for x, y in loader:
            loss = step(x, y)

    A kind of step (with statistics or new inverses or without, shapes of the batch, settings, which
    modules train and which parameters) runs as ever when it is met first, is recorded when it comes
    again, and replayed from then on. The learning rate of each group may be another in each step; a
    damping or factor decay that is makes every step another kind. Eigenbases ('eigen', 'ekfac') are not
    recorded, for the host looks while they are computed; steps with new ones run as ever. So do all on a
    device without graphs, with the same numbers. Of a factorization that fails in a recorded step the
    second try comes after the step, which takes the inverse before it. Hooks on steps run, like other
    code of Python, where a step runs as ever.

    Memory for activations is taken twice, for steps that are replayed and for those that are not.

    Args:
        kfac: in one process, with a fused base optimizer; `fisher='empirical'`, no `grad_scaler`, no
            `spread_inverses`, and `terms` no function. Other parameters of the base optimizer are moved
            as it does.
        loss_of: (*batch) -> the loss, (), or a tuple of it and of other tensors. It reads no numbers of
            the device (`item`, `if` on a tensor), takes nothing that changes but its arguments and what
            is on the device, and calls no `backward`. Autocast belongs in here.

    Raises:
        ValueError: a setting of `kfac` that needs the host in each step.
    """

    def __init__(self, kfac: KFAC, loss_of: Callable[..., Any]) -> None:
        if not isinstance(kfac, KFAC):
            raise TypeError(
                f"kfac must be a suite.torch.KFAC, got {type(kfac).__name__}: of other optimizers, Kron "
                "too, torch.compile(optimizer.step) makes graphs"
            )
        _require_recordable(kfac)
        self.kfac, self.loss_of = kfac, loss_of
        self._modules = list(kfac.model.modules())
        self._device = kfac._engine.layers[0].device
        make = RECORDERS.get(self._device.type)
        self._recorder = None if make is None else make(self._device)
        self._recorded: dict[Any, _Recorded] = {}
        self._met: set[Any] = set()
        self._memory: list[int] = []  # which tensors recorded steps read and write, besides inverses
        self._held: list[torch.Tensor] = []  # those of them that are not the model's parameters
        self._derived: Any = None  # where they read inverses
        self._records_inverses = not kfac._engine.rule.keeps_eigenbases
        self.replayed = 0
        self.as_ever = Counter[str]()  # steps that were not replayed, by reason

    def __call__(self, *batch: Any) -> Any:
        """Take a step; what `loss_of` returned, detached. Tensors of the batch may be on the host.

        Raises:
            RuntimeError: `loss_of` does what cannot be recorded. Nothing has changed then.
        """
        leaves, structure = tree_flatten(batch)
        leaves = [x.to(self._device, non_blocking=True) if _is_tensor(x) else x for x in leaves]
        kind, reason = self._kind(leaves, structure)
        if not reason and kind not in self._recorded:
            if kind not in self._met:
                self._met = {kind} if len(self._met) >= _KNOWN else self._met | {kind}
                reason = "of a kind that is new"
            elif len(self._recorded) == _MOST:
                reason = f"of another kind than the {_MOST} that are recorded"
            else:
                reason = self._record(kind, leaves, structure)
        if reason:
            self.as_ever[reason] += 1
            return self._run(tree_unflatten(leaves, structure))
        return self._replay(self._recorded[kind], leaves)

    def __repr__(self) -> str:
        reasons = "".join(f", {count} {reason}" for reason, count in self.as_ever.items())
        return f"GraphedStep({self.replayed} steps replayed{reasons})"

    # ---- kinds of steps ------------------------------------------------------------------------

    def _kind(self, leaves: list[Any], structure: Any) -> tuple[Any, str]:
        """(what a step's kernels depend on and the host knows, why it is not to be recorded or '')."""
        if self._recorder is None:
            return None, f"on a device without graphs ({self._device.type})"
        kfac, engine = self.kfac, self.kfac._engine
        self._forget_what_moved()
        if engine.capture.clock.discovering or not engine.factors.refreshed:
            return None, "before there are inverses"
        ready, due = tuple(engine.factors.readiness()[1]), self._is_due()
        if due and (any(ready) or not self._records_inverses):
            return None, _NEW_INVERSES
        if kfac._overdue.layers:
            return None, "with layers that run in turn"
        groups = kfac.param_groups
        if any(is_at_hand(group["lr"]) and not float(group["lr"]) for group in groups):
            return None, "with a learning rate of 0"
        settings = kfac.damping, kfac.factor_decay, kfac.kl_clip, kfac.lr
        of_groups = tuple(
            (key, value) for group in groups for key, value in group.items() if key not in _ASIDE
        )
        batch = tuple(
            (x.shape, x.stride(), x.dtype, x.requires_grad) if _is_tensor(x) else x for x in leaves
        )
        modes = tuple(module.training for module in self._modules)
        trained = tuple(p.requires_grad for p in engine.model.parameters())
        wanted = engine.capture.clock.wanted
        kind = due, wanted, ready, settings, repr(of_groups), batch, str(structure), modes, trained
        try:
            hash(kind)
        except TypeError:
            return None, "of a batch with parts that are neither tensors nor hashable"
        return kind, ""

    def _is_due(self) -> bool:
        """Whether the coming step has new inverses."""
        return bool(self.kfac.steps % self.kfac.inv_update_steps == 0)

    def _forget_what_moved(self) -> None:
        """Drop what is recorded, if tensors that it reads or writes are not in use any more."""
        kfac, modules = self.kfac, self._modules
        parameters = [p for group in kfac.param_groups for p in group["params"]]
        parameters += [p for module in modules for p in module._parameters.values() if p is not None]
        tensors = [factor.average for factor in kfac._engine.factors.factors]
        tensors += [x for own in kfac.state.values() for x in own.values() if _is_tensor(x)]
        tensors += [group["lr"] for group in kfac.param_groups if not is_at_hand(group["lr"])]
        tensors += [b for module in modules for b in module._buffers.values() if b is not None]
        tensors += [] if kfac._skipped.unread is None else [kfac._skipped.unread]
        memory = [*map(id, tensors), *[p.data_ptr() for p in parameters]]
        if memory != self._memory:
            self._forget()
            self._memory, self._held = memory, tensors  # so that none takes the place of another

    def _forget(self) -> None:
        self._recorded.clear()
        self._met.clear()
        self._derived = None

    # ---- steps ---------------------------------------------------------------------------------

    def _body(self, batch: Any) -> Any:
        """A step, whether it is recorded or not."""
        kfac = self.kfac
        with torch.enable_grad():
            found = self.loss_of(*batch)
            loss = found[0] if isinstance(found, tuple) else found
            if not _is_tensor(loss) or loss.ndim:
                got = tuple(loss.shape) if _is_tensor(loss) else type(loss).__name__
                raise TypeError(
                    f"loss_of must return a loss of shape (), or a tuple that begins with it, got {got}"
                )
            loss.backward()
        kfac.step()
        kfac.zero_grad()
        return tree_map(lambda x: x.detach() if _is_tensor(x) else x, found)

    def _run(self, batch: Any) -> Any:
        """A step that is not recorded."""
        if self._recorder is None:
            return self._body(batch)
        found = self._recorder.run(lambda: self._body(batch))
        if self._derived is not None:
            self.kfac._engine.return_to(self._derived)
        return found

    def _record(self, kind: Any, leaves: list[Any], structure: Any) -> str:
        """Why it was not recorded, or ''. Nothing has run: K-FAC's own attributes are as before."""
        kfac, engine = self.kfac, self.kfac._engine
        assert self._recorder is not None
        inputs = [x.clone().requires_grad_(x.requires_grad) if _is_tensor(x) else x for x in leaves]
        if self._derived is None:
            self._derived = engine.factors.derived()
        is_due = self._is_due()
        before = kfac.steps, copy.deepcopy(kfac._overdue), kfac._counted_terms, engine.clip_coefficient
        kfac.is_recording = True
        try:
            with _rates_on_device(kfac.param_groups, self._device) as rates:
                replay, outputs = self._recorder.record(
                    lambda: self._body(tree_unflatten(inputs, structure))
                )
            left = kfac._overdue.last, kfac._counted_terms, engine.clip_coefficient, engine.attempts
        except Exception as error:
            self._forget()
            kfac.zero_grad()
            kfac.reset_batch()
            if is_due:  # another kind tells whether it is because of `loss_of`
                self._records_inverses = False
                return _NEW_INVERSES
            raise RuntimeError(
                "this step cannot be recorded, as the error before this one says: loss_of must not read "
                "numbers of the device, nor bring any from the host"
            ) from error
        finally:
            kfac.is_recording, engine.attempts = False, []
            kfac._steps, kfac._overdue, kfac._counted_terms, engine.clip_coefficient = before
            kfac._set_clock()
        own, held = [x for x in inputs if _is_tensor(x)], engine.factors.readiness()[0]
        self._recorded[kind] = _Recorded(replay, own, rates, outputs, *left, held)
        return ""

    def _replay(self, recorded: _Recorded, leaves: list[Any]) -> Any:
        kfac, given = self.kfac, [x for x in leaves if _is_tensor(x)]
        with torch.no_grad():
            if given:
                torch._foreach_copy_(recorded.inputs, given)
            for rate, group in zip(recorded.rates, kfac.param_groups, strict=True):
                if rate is not None:
                    rate.fill_(float(group["lr"]))
            recorded.replay()
            found = tree_map(lambda x: x.clone() if _is_tensor(x) else x, recorded.outputs)
            if recorded.attempts:
                kfac._engine.factors.settle(recorded.attempts)
                kfac._engine.refreshed_at = kfac.steps
                kfac._skipped.look_back(kfac.steps)
        kfac._overdue.note(*recorded.overdue)
        kfac._counted_terms = recorded.terms
        kfac._engine.clip_coefficient = recorded.clipped
        kfac._steps += 1
        kfac._set_clock()
        self.replayed += 1
        return found


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


@contextlib.contextmanager
def _rates_on_device(
    groups: list[dict[str, Any]], device: torch.device
) -> Iterator[list[torch.Tensor | None]]:
    """Meanwhile learning rates that the host knows are numbers of the device, which can be changed.

    And optimizers that ask whether they may be recorded are told so: they are fused.
    """
    before: list[dict[str, Any]] = [
        {key: group[key] for key in ("lr", "capturable") if key in group} for group in groups
    ]
    rates: list[torch.Tensor | None] = []
    for group in groups:
        known = is_at_hand(group["lr"])
        rate = torch.full((), float(group["lr"]), device=device) if known else None
        rates.append(rate)
        group["lr"] = group["lr"] if rate is None else rate
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield rates
    finally:
        for group, own in zip(groups, before, strict=True):
            group.update(own)


def _require_recordable(kfac: KFAC) -> None:
    """ValueError unless the host has nothing to do in a step but to start it."""
    base, engine = kfac.optimizer, kfac._engine
    fused = base is not None and all(group.get("fused") for group in base.param_groups)
    if not fused or not getattr(base, "_step_supports_amp_scaling", False):
        raise ValueError(
            "kfac must have a fused optimizer, as SGD(..., fused=True) is, which the device keeps from "
            f"steps that are not finite, got {type(base).__name__}"
        )
    if not engine.is_alone:
        raise ValueError("kfac must be of one process: ranks agree on the host in each step")
    if len({layer.device for layer in engine.layers}) > 1:
        raise ValueError("kfac must have all layers on one device")
    for name, allowed in (("fisher", "empirical"), ("grad_scaler", None), ("spread_inverses", False)):
        if kfac._settings[name] != allowed:
            raise ValueError(
                f"{name} must be {allowed!r} in recorded steps, got {kfac._settings[name]!r}"
            )
    if callable(engine.agreements.terms):
        raise ValueError("terms must be no function in recorded steps, which would not call it")
