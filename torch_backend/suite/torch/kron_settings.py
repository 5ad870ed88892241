"""Kron's settings: their rules, which of them groups may change, and what they amount to in a step."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch

from suite.core import blocks
from suite.core import kron as core_kron
from suite.core.checks import check_choice, check_flag, check_integer, check_wide
from suite.core.renamed import OF_KRON
from suite.core.schedules import advance_clock
from suite.torch.checks import check_clip, check_dtype, check_number, is_at_hand, require_known
from suite.torch.kron_steps import StepSettings
from suite.torch.kron_storage import KronStorage

Schedule: TypeAlias = float | Callable[[int], float]
Whiten: TypeAlias = Literal["momentum", "gradient"]

STRUCTURE = (
    "max_size_triangular",
    "min_ndim_triangular",
    "memory_save_mode",
    "merge_small_dims",
    "target_merged_dim_size",
    "partition_grads_into_blocks",
    "block_size",
    "max_skew",
    "shared_factors",
)

# What torch, and schedulers of torch and timm, keep in groups.
_NOT_OURS = {"params", "param_names", "name", "initial_lr", "lr_scale"}
# Settings of other optimizers, which would be ignored in silence. What else is in a group is the user's.
_OTHERS = {"betas", "b2", "eps", "momentum", "nesterov", "dampening", "amsgrad", "capturable", "fused",
           "foreach", "rho", "precondition_frequency", "learning_rate", "lr_params"}  # fmt: skip
SCHEDULES = ("preconditioner_update_probability", "preconditioner_lr")  # may be functions of counts
_RULE = ("geometry", "betaL", "damping", "preconditioner_init_scale")
_STEP = ("b1", "whiten", "update_first", "clip", "normalize_grads", "stochastic_rounding")
FIXED = (
    *STRUCTURE,
    "mu_dtype",
    "precond_dtype",
    "packed_factors",
    "cache_preconditioner",
)  # what a group's blocks and state are made for
COUNTS = ("steps", "updates", "update_clock")  # of factors
BEGINNING = (0, 0, 1.0)  # due: the first step fits the factors
_FLAGS = (
    "maximize",
    "update_first",
    "normalize_grads",
    "stochastic_rounding",
    "packed_factors",
)


def check_group(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if not (callable(value) and name in SCHEDULES):
            _check_setting(name, value)
    blocks.Structure(**{name: settings[name] for name in STRUCTURE})
    rule = rule_of(settings)
    storage = KronStorage(rule.factor_form, settings["packed_factors"], settings["cache_preconditioner"])
    storage.require(rule, settings["stochastic_rounding"])


@torch._disable_dynamo  # the host's arithmetic, of numbers that change in every step
def planned(group: dict[str, Any]) -> tuple[core_kron.Kron, StepSettings, dict[str, Any]]:
    """A group's rule and next step, checked, and the counts after it."""
    for name in (*_STEP, "lr", "weight_decay", "maximize"):
        if is_at_hand(group[name]):
            _check_setting(name, group[name])
    before = tuple(group[name] for name in COUNTS)
    due, rate, counts = _turn(group, before)
    settings = StepSettings(
        step=counts[0],
        update=due,
        preconditioner_lr=rate,
        **{name: group[name] for name in _STEP},
    )
    return rule_of(group), settings, dict(zip(COUNTS, counts, strict=True))


def _turn(group: dict[str, Any], counts: tuple[Any, ...]) -> tuple[bool, float, tuple[Any, ...]]:
    """Whether factors are due after so many steps, their rate, and the counts afterwards."""
    steps, updates, clock = counts
    due, clock = advance_clock(clock, value_at("preconditioner_update_probability", group, steps + 1))
    rate = value_at("preconditioner_lr", group, updates)
    return bool(due), rate, (steps + 1, updates + int(due), clock)


def classes(
    group: dict[str, Any], settings: StepSettings
) -> tuple[list[tuple[bool, float]], dict[int, int]]:
    """What parameters may do in the coming step, whichever have a gradient.

    Returns:
        ((whether factors are due, their rate or 0) of each class, the group's own first,
        the classes of those behind, by number)
    """
    found = {(settings.update, settings.preconditioner_lr if settings.update else 0.0): 0}
    behind = {}
    for i, *counts in group["behind"]:
        due, rate, _ = _turn(group, tuple(counts))
        behind[i] = found.setdefault((due, rate if due else 0.0), len(found))
    return list(found), behind


@torch._disable_dynamo
def turns(
    group: dict[str, Any],
    settings: StepSettings,
    planned_counts: dict[str, Any],
    present: list[bool],
) -> list[tuple[StepSettings, list[bool] | None]]:
    """The step of a group by parameters that take it alike, and which these are; None: all.

    A parameter's schedules count the steps in which it has a gradient, so that one that is unfrozen
    late, or trained in turn with others, is fitted as if it were alone. Those that lag behind their
    group's counts are in its 'behind': (number among those of the group that are not empty, *counts).

    Args:
        settings, planned_counts: of parameters with the group's own counts, from `planned`.
        present: which of the group's parameters that are not empty have a gradient.
    """
    if all(present) and not group["behind"]:
        return [(settings, None)]
    own = tuple(group[name] for name in COUNTS)
    after = tuple(planned_counts[name] for name in COUNTS)
    behind = {i: counts for i, *counts in group["behind"]}
    found: dict[tuple[bool, float], list[bool]] = {}
    left = []
    known = {own: (settings.update, settings.preconditioner_lr, after)}
    for i, here in enumerate(present):
        counts = tuple(behind.get(i, own))
        if here:
            if counts not in known:
                known[counts] = _turn(group, counts)
            due, rate, counts = known[counts]
            members = found.setdefault((due, rate if due else 0.0), [False] * len(present))
            members[i] = True
        if counts != after:
            left.append((i, *counts))
    group["behind"] = left
    return [
        (settings._replace(update=due, preconditioner_lr=rate), members)
        for (due, rate), members in found.items()
    ]


def require_same(group: dict[str, Any], fixed: dict[str, Any]) -> None:
    for name, value in fixed.items():
        if group[name] != value:
            raise ValueError(
                f"{name} must stay {value!r}, for which blocks and state were made, got {group[name]!r}"
            )


def value_at(name: str, group: dict[str, Any], count: int) -> float:
    """A setting of `SCHEDULES` after so many steps or updates, checked."""
    value = group[name]
    if callable(value):
        value = value(count)
        if name == "preconditioner_update_probability":  # a schedule may end its updates
            check_number(name, value, at_least=0, at_most=1)
            return float(value)
    _check_setting(name, value)
    return float(value)


def _check_setting(name: str, value: Any) -> None:
    if name in ("lr", "weight_decay"):
        check_number(name, value, at_least=0)
    elif name == "b1":
        check_number(name, value, at_least=0, below=1)
    elif name == "preconditioner_update_probability":
        check_number(name, value, above=0, at_most=1)
    elif name == "preconditioner_lr":
        check_number(name, value, above=0, below=1)
    elif name == "whiten":
        check_choice(name, value, get_args(Whiten))
    elif name in _RULE or name == "max_skew":
        require_known(name, value)  # the rule, and the structure, have the bounds
    elif name == "clip":
        check_clip(value)
    elif name in _FLAGS or (name == "cache_preconditioner" and value is not None):
        check_flag(name, value)
    elif name == "seed":
        check_integer(name, value, at_least=0)
    elif name in ("mu_dtype", "precond_dtype") and value is not None:
        check_dtype(name, value)
        check_wide(name, value, torch.finfo(value).max)


def check_counts(saved: dict[str, Any]) -> None:
    """Raise unless a group out of a state says how far it has come."""
    for name in ("steps", "updates"):
        check_integer(name, saved.get(name), at_least=0)
    check_number("update_clock", saved.get("update_clock"), at_least=-1, at_most=2)


def as_given(name: str, saved: Any) -> Any:
    """A setting out of a state, of which torch may have made a list where it was a tuple."""
    return tuple(saved) if name == "clip" and isinstance(saved, list) else copy.deepcopy(saved)


def rule_of(settings: dict[str, Any]) -> core_kron.Kron:
    for name in _RULE:
        require_known(name, settings[name])
    return core_kron.Kron(**{name: settings[name] for name in _RULE})


def is_misplaced(key: str, ours: Sequence[str]) -> bool:
    """Whether a key of a group is another optimizer's setting, or like one of `ours`."""
    if key in _NOT_OURS:
        return False
    return (
        key in _OTHERS
        or key in OF_KRON
        or key in ours
        or bool(difflib.get_close_matches(key, ours, cutoff=0.8))
    )
