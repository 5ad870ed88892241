"""The two hyperparameter schedulers of kfac-pytorch, for a `KFAC`.

New code needs neither: every hyperparameter of `KFAC` takes a function of the step count. These are for
training scripts that have one.

Sources: KFACParamScheduler of kfac-pytorch 0.3 and LambdaParamScheduler of 0.4 (Pauloski et al. 2021,
arXiv:2107.01739).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

from suite.core.checks import check_integer
from suite.torch.checks import check_number, check_state_dict
from suite.torch.settings import check_hyperparameter

if TYPE_CHECKING:
    from suite.torch.kfac import KFAC


class KFACParamScheduler:
    """Multiply damping and update periods at given epochs.

        damping = damping at the start * damping_alpha ** (epochs of damping_schedule that have begun)

    and likewise factor_update_steps and inv_update_steps, rounded down. The epoch is `start_epoch`, and
    one more at each `step()`:

        >>> scheduler = KFACParamScheduler(kfac, damping_alpha=0.5, damping_schedule=[20, 40])
        >>> for epoch in range(60):
        ...     train(model, kfac)
        ...     scheduler.step()

    Args:
        kfac: the preconditioner. The values it has now are those at the start; to resume, make the
            scheduler first and load K-FAC's state_dict after that.
        damping_alpha: > 0, factor of the damping.
        damping_schedule: epochs; one that is listed twice counts twice.
        update_freq_alpha: > 0, factor of both update periods. Above 1, updates become rarer.
        update_freq_schedule: epochs, likewise.
        start_epoch: the epoch that training begins or resumes with; what is due by then happens now.

    Raises:
        ValueError, TypeError: a bad value, a period that would fall below 1, or a schedule for a
            hyperparameter that is a function of the step count already.
    """

    def __init__(
        self,
        kfac: KFAC,
        damping_alpha: float = 1,
        damping_schedule: Sequence[int] | None = None,
        update_freq_alpha: float = 1,
        update_freq_schedule: Sequence[int] | None = None,
        start_epoch: int = 0,
    ) -> None:
        _require_kfac("kfac", kfac)
        check_number("damping_alpha", damping_alpha, above=0)
        check_number("update_freq_alpha", update_freq_alpha, above=0)
        for name, schedule in (
            ("damping_schedule", damping_schedule),
            ("update_freq_schedule", update_freq_schedule),
        ):
            if not isinstance(schedule, Sequence | Set | None) or isinstance(schedule, str):
                raise TypeError(f"{name} must be a list of epochs or None, got {schedule!r}")
            for epoch in schedule or ():
                check_integer(f"every epoch of {name}", epoch, at_least=0)
        check_integer("start_epoch", start_epoch, at_least=0)
        self.kfac = kfac
        self.epoch = start_epoch
        self._plans: dict[str, tuple[float, tuple[int, ...]]] = {}
        if damping_schedule:
            self._plans["damping"] = (damping_alpha, tuple(damping_schedule))
        if update_freq_schedule:
            for name in ("factor_update_steps", "inv_update_steps"):
                self._plans[name] = (update_freq_alpha, tuple(update_freq_schedule))
        self._start = {name: _number(kfac, name) for name in self._plans}
        for name, (alpha, schedule) in self._plans.items():
            if name != "damping":
                last = int(self._start[name] * alpha ** len(schedule))
                check_integer(f"{name} at the end of update_freq_schedule", last, at_least=1)
        self._apply()

    def step(self, epoch: int | None = None) -> None:
        """Begin the next epoch, or epoch number `epoch`."""
        if epoch is not None:
            check_integer("epoch", epoch, at_least=0)
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self._apply()

    def _apply(self) -> None:
        for name, (alpha, schedule) in self._plans.items():
            value = self._start[name] * alpha ** sum(epoch <= self.epoch for epoch in schedule)
            self.kfac.set_hyperparameter(name, value if name == "damping" else int(value))

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the values at the start; K-FAC's own values are in its state_dict."""
        return {"epoch": self.epoch, "start": dict(self._start)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a scheduler with the same schedules was, and set what it had set."""
        check_state_dict(state_dict, "epoch", "start")
        epoch, start = state_dict["epoch"], dict(state_dict["start"])
        if set(start) != set(self._plans):
            raise ValueError(
                f"state_dict must have start values of {sorted(self._plans)}, got {sorted(start)}"
            )
        check_integer("epoch of the state_dict", epoch, at_least=0)
        for name, value in start.items():
            check_hyperparameter(name, value)
        self.epoch, self._start = epoch, start
        self._apply()


class LambdaParamScheduler:
    """Multiply hyperparameters, at every `step()`, by functions of K-FAC's step count.

    value ← value * function(steps), so that factors add up over the calls; rounded down for the two
    update periods.

        >>> scheduler = LambdaParamScheduler(kfac, damping_lambda=lambda steps: 0.999)
        >>> kfac.step()
        >>> scheduler.step()

    Args:
        preconditioner: the `KFAC`.
        factor_update_steps_lambda, inv_update_steps_lambda, damping_lambda, factor_decay_lambda,
            kl_clip_lambda, lr_lambda: the factor of that hyperparameter, given the number of steps
            taken; None leaves it alone.

    Raises:
        ValueError, TypeError: a function for a hyperparameter that is a function of the step count
            already, or that is None; no function; at `step` what makes no valid value.
    """

    def __init__(
        self,
        preconditioner: KFAC,
        *,
        factor_update_steps_lambda: Callable[[int], float] | None = None,
        inv_update_steps_lambda: Callable[[int], float] | None = None,
        damping_lambda: Callable[[int], float] | None = None,
        factor_decay_lambda: Callable[[int], float] | None = None,
        kl_clip_lambda: Callable[[int], float] | None = None,
        lr_lambda: Callable[[int], float] | None = None,
    ) -> None:
        given = {
            "factor_update_steps": factor_update_steps_lambda,
            "inv_update_steps": inv_update_steps_lambda,
            "damping": damping_lambda,
            "factor_decay": factor_decay_lambda,
            "kl_clip": kl_clip_lambda,
            "lr": lr_lambda,
        }
        for name, function in given.items():
            if function is not None and not callable(function):
                raise TypeError(f"{name}_lambda must be a function of the step count, got {function!r}")
        _require_kfac("preconditioner", preconditioner)
        self.preconditioner = preconditioner
        self._functions = {name: f for name, f in given.items() if f is not None}
        for name in self._functions:
            _number(preconditioner, name)

    def step(self, step: int | None = None) -> None:
        """Multiply once; call it after `preconditioner.step()`.

        Args:
            step: what to give to the functions in place of the preconditioner's own count.
        """
        steps = self.preconditioner.steps if step is None else step
        values = {}
        for name, function in self._functions.items():
            factor = function(steps)
            check_number(f"what {name}_lambda returns", factor)
            value = _number(self.preconditioner, name) * factor
            values[name] = int(value) if name.endswith("_steps") else value
        for name, value in values.items():
            check_hyperparameter(name, value)  # all of them before any is set
        for name, value in values.items():
            self.preconditioner.set_hyperparameter(name, value)


def _require_kfac(name: str, given: Any) -> None:
    if not hasattr(given, "set_hyperparameter"):  # what wraps one may have it
        raise TypeError(f"{name} must be a KFAC, got {type(given).__name__}")


def _number(kfac: KFAC, name: str) -> float:
    """A hyperparameter's value, refused if it is a function of the step count or None."""
    value = kfac.hyperparameter(name)
    if value is None:
        raise ValueError(f"{name} must be a number to be multiplied, got None")
    kfac.set_hyperparameter(name, value)  # changes nothing, but refuses a function
    return value
