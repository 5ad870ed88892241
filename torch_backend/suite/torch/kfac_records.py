"""Whether a checkpoint is one of a KFAC, and the KFAC of a copied model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from suite.torch.settings import check_hyperparameter

if TYPE_CHECKING:
    from suite.torch.kfac import KFAC

VERSION = 3
_SAVED = {  # in a checkpoint, under 'kfac'
    *("version", "compute_method", "steps", "skipped_steps", "refreshed_at", "draws", "hyperparameters"),
    *("layers", "inputs", "discovered", "gathered", "factors", "inverses"),
}


def inputs_of(sharing: Mapping[str, str]) -> str:
    """A checkpoint's 'inputs': which layer has whose A.

    A string: what stores nested dicts and lists flat loses which there are, and those that are empty.
    """
    return json.dumps([*sharing.items()])


def sharing_of(kfac: Mapping[str, Any]) -> dict[str, str]:
    """Layer -> the one whose A it has, from a checkpoint's 'kfac'; older ones have a list."""
    inputs = kfac["inputs"]
    return dict(json.loads(inputs) if isinstance(inputs, str) else inputs)


def misfit(
    state_dict: Mapping[str, Any], compute_method: str, hyperparameters: Iterable[str], has_base: bool
) -> str | None:
    """Why it is no `state_dict` of such a KFAC, whatever its layers; None: it is one.

    Args:
        hyperparameters: the names of those that it has.
        has_base: whether it has a base optimizer.
    """
    kfac, known = state_dict.get("kfac"), sorted(hyperparameters)
    if not isinstance(kfac, Mapping):
        said = f"state_dict must have a 'kfac' entry, got keys {sorted(state_dict)}"
        if "steps" in state_dict:
            said += ": kfac-pytorch's factors do not fit these, which begin anew"
        return said
    if kfac.get("version") != VERSION:
        return f"state_dict version must be {VERSION}, got {kfac.get('version')!r}"
    missing = sorted(_SAVED - kfac.keys())
    if missing:
        return f"the state_dict's 'kfac' entry must have {sorted(_SAVED)}, got none of {missing}"
    unknown = sorted(kfac["hyperparameters"].keys() - set(known))
    if unknown:
        return f"hyperparameters of the state_dict must be among {known}, got {unknown}"
    try:
        for name, value in kfac["hyperparameters"].items():
            check_hyperparameter(name, value)
    except (TypeError, ValueError) as error:
        return str(error)
    if kfac["compute_method"] != compute_method:
        saved = kfac["compute_method"]
        return f"compute_method of the state_dict must be {compute_method!r}, got {saved!r}"
    of_base = len(state_dict) > 1 if has_base else "param_groups" in state_dict
    if kfac["gathered"] and has_base != of_base:
        kinds = ("with", "without") if has_base else ("without", "with")
        return f"state_dict must be of a KFAC {kinds[0]} an optimizer, got one {kinds[1]}"
    return None


def made_again(
    kind: type[KFAC],
    model: nn.Module,
    base: torch.optim.Optimizer | None,
    settings: Mapping[str, Any],
    trained: frozenset[str],
    given: frozenset[str],
) -> KFAC:
    """A KFAC of a copied model and optimizer, without what it had summed up.

    Its layers are those of the parameters that had gradients, and were the optimizer's, when the one
    that is copied was made.

    Args:
        settings: it is made with.
        trained, given: names of those parameters.
    """
    now = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
    later = {id(p) for name, p, _ in now if name not in given}
    groups = [] if base is None else [(group, group["params"]) for group in base.param_groups]
    for name, p, flag in now:
        if flag != (name in trained):
            p.requires_grad_(name in trained)
    for group, parameters in groups:
        group["params"] = [p for p in parameters if id(p) not in later]
    held = {id(p) for _, parameters in groups for p in parameters}
    for group, _ in groups[:1]:  # those that the optimizer had, and has no more
        group["params"] += [p for name, p, _ in now if name in given and id(p) not in held]
    try:
        return kind(model, base, **settings)
    finally:
        for _, p, flag in now:
            p.requires_grad_(flag)
        for group, parameters in groups:
            group["params"] = parameters
