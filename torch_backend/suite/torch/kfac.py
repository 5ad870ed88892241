"""The front door of K-FAC for PyTorch."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, overload

import torch
from torch import nn

from suite.core.checks import check_choice, check_integer, check_number
from suite.core.routing import Routing
from suite.torch.checks import check_dtype
from suite.torch.kfac_engine import KFACEngine

Schedule: TypeAlias = float | Callable[[int], float]


class ComputeMethod(enum.Enum):
    """How the preconditioner is applied; the strings 'eigen' and 'inverse' do as well."""

    EIGEN = "eigen"
    INVERSE = "inverse"


class KFAC(torch.optim.Optimizer):
    """Kronecker-factored approximate curvature, before or around any torch optimizer.

    Without `optimizer` it is a preconditioner in the manner of kfac-pytorch: `step()` replaces the
    gradients of the layers it covers by natural-gradient directions, and the optimizer's own `step()`
    follows. With `optimizer` it is one optimizer, whose `step(closure=None)` does both.

        >>> kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        >>> loss = criterion(model(x), y)
        >>> loss.backward()
        >>> kfac.step()
        >>> kfac.zero_grad()

    Linear and Conv1d-3d layers are preconditioned (`print(kfac.routing())`); every other parameter
    keeps its gradient. Statistics are taken from forward passes in training mode with gradients, on
    steps t with t % factor_update_steps == 0. A step whose gradients or statistics are not all finite
    changes nothing: gradients are set to None, `skipped_steps` goes up, and a RuntimeWarning says so.

    Args:
        model: the model; its layers get forward hooks until `detach()`.
        optimizer: a torch optimizer over the model's parameters, or None.
        factor_update_steps: steps between updates of the factors' running averages.
        inv_update_steps: steps between computations of inverses or eigenbases.
        damping: Tikhonov damping λ, in units of curvature.
        factor_decay: decay of the running averages, in [0, 1).
        kl_clip: bound of lr² Σ⟨direction, gradient⟩; None switches clipping off.
        lr: the learning rate in that bound. Default: the optimizer's for each parameter, or 0.1
            without one.
        compute_method: 'eigen' or 'inverse', see `suite.core.kfac.KFAC`.
        skip_layers: regular expressions; layers whose name or class name one of them matches (by
            `re.search`), and all inside them, are left alone.
        factor_dtype: dtype of the running averages; default: the parameter's, at least float32.
        inv_dtype: dtype of inverses and eigenbases; default: likewise.
        max_factor_size: a side above this gets a diagonal factor.
        loss_reduction: 'mean' or 'sum': what the loss does over its terms.
        grad_scaler: the GradScaler of mixed-precision training, or a function that returns the scale of
            the loss: statistics are taken of scaled gradients and have to be unscaled. Gradients must be
            unscaled before `step()`: `scaler.unscale_(optimizer)`, or `scaler.step(kfac)`.

    The first six and lr take a number or a function of the step count.

    Raises:
        ValueError, TypeError: a bad value, a model on which nothing would be preconditioned, or one
            that has a K-FAC attached already.

    References: see `suite.core.kfac`. Argument names are kfac-pytorch's (Pauloski et al. 2021,
    arXiv:2107.01739).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        factor_update_steps: int | Callable[[int], int] = 1,
        inv_update_steps: int | Callable[[int], int] = 1,
        damping: Schedule = 0.001,
        factor_decay: Schedule = 0.95,
        kl_clip: Schedule | None = 0.001,
        lr: Schedule | None = None,
        compute_method: ComputeMethod | str = ComputeMethod.EIGEN,
        skip_layers: Sequence[str] | None = None,
        factor_dtype: torch.dtype | None = None,
        inv_dtype: torch.dtype | None = None,
        max_factor_size: int = 8192,
        loss_reduction: str = "mean",
        grad_scaler: torch.amp.GradScaler | Callable[[], float] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {kind}")
        if isinstance(skip_layers, str):
            raise TypeError(f"skip_layers must be a list of patterns, got the string {skip_layers!r}")
        if isinstance(compute_method, ComputeMethod):
            method = compute_method.value
        else:
            check_choice("compute_method", compute_method, ("eigen", "inverse", "EIGEN", "INVERSE"))
            method = compute_method.lower()
        check_integer("max_factor_size", max_factor_size, at_least=1)
        check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        check_dtype("factor_dtype", factor_dtype)
        check_dtype("inv_dtype", inv_dtype)
        if grad_scaler is not None and not (
            callable(grad_scaler) or isinstance(grad_scaler, torch.amp.GradScaler)
        ):
            kind = type(grad_scaler).__name__
            raise TypeError(f"grad_scaler must be a GradScaler, a function or None, got {kind}")
        self._grad_scaler = grad_scaler
        self._hyperparameters: dict[str, Any] = {
            "factor_update_steps": factor_update_steps,
            "inv_update_steps": inv_update_steps,
            "damping": damping,
            "factor_decay": factor_decay,
            "kl_clip": kl_clip,
            "lr": lr,
        }
        for name, value in self._hyperparameters.items():
            if not callable(value):
                _check(name, value)
        self._base: torch.optim.Optimizer | None = None
        self._engine = KFACEngine(
            model,
            compute_method=method,  # type: ignore[arg-type]
            skip_layers=list(skip_layers or ()),
            factor_dtype=factor_dtype,
            inv_dtype=inv_dtype,
            max_factor_size=max_factor_size,
            loss_reduction=loss_reduction,  # type: ignore[arg-type]
        )
        covered = [
            p for layer in self._engine.layers for p in (layer.weight, layer.bias) if p is not None
        ]
        super().__init__(covered, {})
        self._base = optimizer
        self._steps = 0
        self._skipped_steps = 0

    # With a base optimizer its groups, state and defaults are ours: schedulers, GradScaler and
    # checkpoints of one see those of the other, also after the base has replaced them.

    def _shared(name: str) -> property:  # type: ignore[misc]
        def get(self: KFAC) -> Any:
            return getattr(self._base, name) if self._base is not None else self.__dict__[f"_own_{name}"]

        def put(self: KFAC, value: Any) -> None:
            if self._base is not None:
                setattr(self._base, name, value)
            else:
                self.__dict__[f"_own_{name}"] = value

        return property(get, put)

    param_groups = _shared("param_groups")
    state = _shared("state")
    defaults = _shared("defaults")
    del _shared

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; it keeps its plain gradient unless a layer has it."""
        if self._base is not None:
            self._base.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    @property
    def steps(self) -> int:
        """Steps taken, without skipped ones: what was due in one of those is due in the next."""
        return self._steps

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing because a gradient or a statistic was not finite."""
        return self._skipped_steps

    def hyperparameter(self, name: str) -> Any:
        """The value of a hyperparameter at this step, e.g. `kfac.hyperparameter('damping')`."""
        value = self._hyperparameters[name]
        if callable(value):
            value = value(self._steps)
            _check(name, value)
        return value

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Precondition the gradients in place; with a base optimizer, then step it.

        Args:
            closure: re-evaluates the model and returns the loss; called once, first.

        Returns:
            What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor_update_steps = self.hyperparameter("factor_update_steps")
        inv_update_steps = self.hyperparameter("inv_update_steps")
        damping = self.hyperparameter("damping")
        factor_decay = self.hyperparameter("factor_decay")
        kl_clip = self.hyperparameter("kl_clip")
        lr_of = self._lr_of()
        taken = self._engine.take_statistics(self._loss_scale())
        parameters = self._parameters()
        if self._engine.finite(parameters, taken):
            if self._steps % factor_update_steps == 0:
                self._engine.update(taken, factor_decay)
            if self._steps % inv_update_steps == 0:
                self._engine.refresh(damping)
            self._engine.precondition(damping, kl_clip, lr_of)
            if self._base is not None:
                self._base.step()
            self._steps += 1
        else:
            self._skipped_steps += 1
            for parameter in parameters:
                parameter.grad = None
            warnings.warn(
                f"step {self._steps} was skipped: a gradient or a statistic was not finite "
                f"({self._skipped_steps} skipped so far)",
                RuntimeWarning,
                stacklevel=3,
            )
        self._engine.clock.wanted = self._steps % self.hyperparameter("factor_update_steps") == 0
        return loss

    def _parameters(self) -> list[torch.Tensor]:
        """The model's parameters as they are now, and whatever else the base optimizer moves."""
        groups = self._base.param_groups if self._base is not None else []
        own = [*self._engine.model.parameters(), *(p for group in groups for p in group["params"])]
        return list({id(p): p for p in own}.values())

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a KFAC cannot be copied or pickled, its model's hooks belong to it: make a new one on the "
            "copied model and load this one's state_dict()"
        )

    def _loss_scale(self) -> float:
        if self._grad_scaler is None:
            return 1.0
        scaler = self._grad_scaler
        return float(scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) else scaler())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and statistics of backward passes that no step has used."""
        super().zero_grad(set_to_none)
        self._engine.take_statistics(1.0)

    def _lr_of(self) -> Callable[[nn.Parameter], Any]:
        lr = self.hyperparameter("lr")
        if lr is not None or self._base is None:
            constant = 0.1 if lr is None else lr
            return lambda parameter: constant
        rates = {id(p): group["lr"] for group in self.param_groups for p in group["params"]}
        return lambda parameter: rates.get(id(parameter), 0.0)

    def routing(self) -> Routing:
        """What happens to every parameter of the model and why; prints as a table."""
        return self._engine.current_routing()

    def memory_usage(self) -> dict[str, int]:
        """Bytes of K-FAC's own state: {'factors': ..., 'inverses': ...}."""
        return self._engine.memory_usage()

    def detach(self) -> None:
        """Take all hooks off the model. The factors stay; no further statistics arrive."""
        self._engine.detach()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: plain numbers and tensors, by layer name under 'kfac'.

        With a base optimizer its 'state' and 'param_groups' are there as well.
        """
        numbers = {k: v for k, v in self._hyperparameters.items() if not callable(v)}
        kfac = {
            "version": 1,
            "compute_method": self._engine.rule.compute_method,
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
            "hyperparameters": numbers,
            "layers": self._engine.state_dict(),
        }
        base = self._base.state_dict() if self._base is not None else {}
        return {**base, "kfac": kfac}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict()`.

        Raises:
            ValueError: layers that do not fit, by name; nothing has changed then.
        """
        if "kfac" not in state_dict:
            raise ValueError(f"state_dict must have a 'kfac' entry, got keys {sorted(state_dict)}")
        kfac = state_dict["kfac"]
        if kfac["version"] != 1:
            raise ValueError(f"state_dict version must be 1, got {kfac['version']!r}")
        if kfac["compute_method"] != self._engine.rule.compute_method:
            raise ValueError(
                f"compute_method of the state_dict must be {self._engine.rule.compute_method!r}, "
                f"got {kfac['compute_method']!r}"
            )
        before = list(self._engine.states)
        self._engine.load_state_dict(kfac["layers"])
        if self._base is not None:
            try:
                self._base.load_state_dict({k: v for k, v in state_dict.items() if k != "kfac"})
            except Exception:
                self._engine.states = before
                raise
        for name, value in kfac["hyperparameters"].items():
            if not callable(self._hyperparameters[name]):
                self._hyperparameters[name] = value
        self._steps, self._skipped_steps = kfac["steps"], kfac["skipped_steps"]
        self._engine.clock.wanted = self._steps % self.hyperparameter("factor_update_steps") == 0

    def __repr__(self) -> str:
        settings = {
            **self._hyperparameters,
            "compute_method": self._engine.rule.compute_method,
            "layers": len(self._engine.layers),
            "steps": self._steps,
        }
        inner = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        base = "" if self._base is None else f"optimizer={self._base!r}, "
        return f"KFAC({base}{inner})"


KFACPreconditioner = KFAC


def _check(name: str, value: Any) -> None:
    if name in ("factor_update_steps", "inv_update_steps"):
        check_integer(name, value, at_least=1)
    elif name == "damping":
        check_number(name, value, at_least=0)
    elif name == "factor_decay":
        check_number(name, value, at_least=0, below=1)
    elif name == "kl_clip" and value is not None:
        check_number(name, value, above=0)
    elif name == "lr" and value is not None:
        check_number(name, value, at_least=0)
