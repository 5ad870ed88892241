"""Whether a checkpoint is one of a KFAC, and the KFAC of a copied model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from suite.core.checks import check_integer
from suite.torch.settings import check_hyperparameter

if TYPE_CHECKING:
    from suite.torch.kfac import KFAC

VERSION = 3
_SAVED = {  # in a checkpoint, under 'kfac'
    *("version", "compute_method", "steps", "skipped_steps", "refreshed_at", "draws", "hyperparameters"),
    *("layers", "inputs", "discovered", "gathered", "factors", "inverses"),
}


def _scales_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """What of a KFAC's settings says what its factors are numbers of."""
    reduction = "sum" if settings["loss_reduction"] == "sum" else "mean"  # over all ranks or each
    return {"factor_scaling": settings["factor_scaling"], "loss_reduction": reduction}


def is_kfac_pytorchs(state_dict: Mapping[str, Any]) -> bool:
    return "kfac" not in state_dict and "steps" in state_dict


def from_kfac_pytorch(
    state_dict: Mapping[str, Any], names: Iterable[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A checkpoint of kfac-pytorch's as one of a KFAC of that `factor_scaling`, which computes inverses.

    Args:
        names: of the layers here. Those of a model inside of DistributedDataParallel begin with
            'module.', there or here.
        settings: what that KFAC is made with.
    """
    found = dict(state_dict.get("layers") or {})
    for name in names:
        for other in (f"module.{name}", name.removeprefix("module.")):
            if name not in found and other in found:
                found[name] = found.pop(other)
    layers = {
        name: {
            key: tensor
            for side in ("A", "G")
            if isinstance(x := record.get(side), torch.Tensor) and x.ndim == 2
            for key, tensor in ((side, x[None]), (f"{side}_weight", torch.ones_like(x[0, :1])))
        }
        for name, record in found.items()
    }
    kfac = {
        "version": VERSION,
        "compute_method": settings["compute_method"],
        "steps": state_dict["steps"],
        "skipped_steps": 0,
        "refreshed_at": None,
        "draws": 0,
        "hyperparameters": {k: v for k, v in state_dict.items() if k not in ("steps", "layers")},
        "layers": layers or {name: {} for name in names},
        "inputs": inputs_of({}, settings),
        "discovered": False,
        "gathered": False,
        "factors": any(layers.values()),
        "inverses": False,
    }
    return {"kfac": kfac}


def inputs_of(sharing: Mapping[str, str], settings: Mapping[str, Any], waits: Sequence[int] = ()) -> str:
    """A checkpoint's 'inputs': which layer has whose A, what its factors are numbers of, who waits.

    A string: what stores nested dicts and lists flat loses which there are, and those that are empty,
    and wants all that there are in every file, older ones, too.
    """
    record = {"inputs": [*sharing.items()], "scales": _scales_of(settings)}
    return json.dumps(record | ({"waits": [*waits]} if waits else {}))


def sharing_of(kfac: Mapping[str, Any]) -> dict[str, str]:
    """Layer -> the one whose A it has, from a checkpoint's 'kfac'."""
    return dict(_record_of(kfac)["inputs"])


def waits_of(kfac: Mapping[str, Any]) -> list[int]:
    """What layers that run in turn wait for, from a checkpoint's 'kfac'; older ones have it beside."""
    waits = _record_of(kfac).get("waits", kfac.get("waits", []))
    return [int(number) for number in waits]


def _record_of(kfac: Mapping[str, Any]) -> dict[str, Any]:
    """What `inputs_of` made; older checkpoints have a list of the first alone, perhaps as a string."""
    inputs = kfac["inputs"]
    found = json.loads(inputs) if isinstance(inputs, str) else inputs
    return found if isinstance(found, dict) else {"inputs": found, "scales": {}}


def misfit(
    state_dict: Mapping[str, Any],
    settings: Mapping[str, Any],
    hyperparameters: Iterable[str],
    has_base: bool,
) -> str | None:
    """Why it is no `state_dict` of such a KFAC, whatever its layers; None: it is one.

    Args:
        settings: what that KFAC is made with.
        hyperparameters: the names of those that it has.
        has_base: whether it has a base optimizer.
    """
    kfac, known = state_dict.get("kfac"), sorted(hyperparameters)
    if not isinstance(kfac, Mapping):
        said = f"state_dict must have a 'kfac' entry, got keys {sorted(state_dict)}"
        if is_kfac_pytorchs(state_dict):
            said += ": kfac-pytorch's factors are those of factor_scaling='kfac_pytorch' alone"
        elif "param_groups" in state_dict:
            said += (
                ", as of the optimizer alone, or of flatten_optimizer_state_dict=True, which loses it: "
                "load, and save, without that option"
            )
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
        for name in ("steps", "skipped_steps", "draws"):
            check_integer(f"{name} of the state_dict", kfac[name], at_least=0)
        for name, value in kfac["hyperparameters"].items():
            check_hyperparameter(name, value)
    except (TypeError, ValueError) as error:
        return str(error)
    saved, own = _record_of(kfac)["scales"], _scales_of(settings)
    methods = kfac["compute_method"], settings["compute_method"]
    if kfac["inverses"] or "ekfac" in methods:  # else averages are the same
        saved, own = saved | {"compute_method": methods[0]}, own | {"compute_method": methods[1]}
    for name, value in saved.items() if kfac["factors"] else ():
        if value != own[name]:
            return f"{name} of the state_dict must be {own[name]!r}, got {value!r}"
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
