"""K-FAC's settings: their names, their rules, and what they amount to."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from suite.core.checks import check_choice, check_integer
from suite.core.likelihoods import Bernoulli, Categorical, Gaussian
from suite.core.placement import gradient_workers
from suite.torch.agreement import check_terms
from suite.torch.checks import check_dtype, check_number, require_known
from suite.torch.collectives import Ranks
from suite.torch.dtensors import groups_of, is_sharded, require_all_shards, require_same_blocks
from suite.torch.find_layers import FoundLayers
from suite.torch.fisher import Likelihood


class ComputeMethod(enum.Enum):
    """How the preconditioner is applied; the strings do as well."""

    EIGEN = "eigen"
    INVERSE = "inverse"
    NEWTON_SCHULZ = "newton_schulz"
    EKFAC = "ekfac"


class DistributedStrategy(enum.Enum):
    """Named values of `gradient_worker_fraction`; the strings do as well."""

    COMM_OPT = "comm_opt"  # 1: every rank has all inverses, no direction travels
    HYBRID_OPT = "hybrid_opt"  # 1/2
    MEM_OPT = "mem_opt"  # 1/world: a layer's inverses are on one rank, which sends its direction


class AssignmentStrategy(enum.Enum):
    """What is balanced over ranks; the strings do as well."""

    COMPUTE = "compute"  # n³, the cost of factorizations
    MEMORY = "memory"  # n², the size of factors


SHARINGS = ("expand", "reduce")
HYPERPARAMETERS = (  # which may be functions of the step count
    "factor_update_steps",
    "inv_update_steps",
    "damping",
    "factor_decay",
    "kl_clip",
    "lr",
)
_CHOICES = {
    "loss_reduction": ("mean", "sum", "global_mean"),
    "fisher": ("empirical", "mc", "type-2"),
    "factor_scaling": ("fisher", "kfac_pytorch"),
}
_FLAGS = (
    "compute_eigenvalue_outer_product",
    "spread_inverses",
    "colocate_factors",
    "symmetry_aware",
    "packed_factors",
    "update_factors_in_hook",
    "compute_factor_in_hook",
)
_LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
}


def choice_of(name: str, value: Any, kind: type[enum.Enum]) -> Any:
    """The value of an enum's member, given as such or as a string in either case."""
    if isinstance(value, kind):
        return value.value
    value = value.lower() if isinstance(value, str) else value
    check_choice(name, value, tuple(member.value for member in kind))
    return value


def ranks_of(model: nn.Module, found: FoundLayers, group: Any, bucket_mb: float) -> tuple[Ranks, Ranks]:
    """The ranks that have the same layers and other data, and those that have other blocks of layers."""
    covered = {id(p) for layer in found.layers for p in layer.parameters()}
    of_model = model.parameters()
    own: list[tuple[Any, int, bool]] = [
        (p, found.tensor_axes[id(p)], id(p) in covered) for p in of_model
    ]
    if group is not None:  # replicas, too, have other data
        meshes = [(p, range(p.device_mesh.ndim - n)) for p, n, kept in own if kept and is_sharded(p)]
        require_all_shards(meshes, group)
    data, tensor = groups_of(own, asked=group is None)
    if group is None:
        data = _group_of_ddp(model, covered) or data
    if tensor is None:
        return Ranks(data if group is None else group, bucket_mb), Ranks(alone=True)
    others = Ranks(tensor)
    if group is not None:
        split_layers = [(p, axes) for p, axes, is_covered in own if is_covered and axes]
        require_same_blocks(split_layers, torch.distributed.get_process_group_ranks(group))
    if group is None and data is None:
        if torch.distributed.get_world_size() != others.world:
            raise ValueError(
                "process_group must be given: of the ranks that hold the same tensor-parallel blocks, "
                "for example mesh['dp'].get_group(), got None"
            )
        return Ranks(bucket_mb=bucket_mb, alone=True), others
    return Ranks(data if group is None else group, bucket_mb), others


def _group_of_ddp(model: nn.Module, covered: set[int]) -> Any:
    """The process group of the DDP that has all covered parameters; None: none has, or not all.

    Args:
        covered: their ids.

    Raises:
        ValueError: some are of one group, some of another.
    """
    kind = nn.parallel.DistributedDataParallel
    inner: dict[int, Any] = {}  # by parameter, of the innermost
    for module in model.modules():  # from the outside in
        if isinstance(module, kind):
            inner |= {id(p): module.process_group for p in module.parameters() if id(p) in covered}
    own = ((torch.distributed.get_process_group_ranks(group), group) for group in inner.values())
    groups = {frozenset(ranks): group for ranks, group in own}
    if len(groups) > 1:
        raise ValueError(
            "process_group must be given where layers are in several DistributedDataParallel of other "
            f"ranks, got {' and '.join(str(sorted(ranks)) for ranks in groups)}"
        )
    return next(iter(groups.values()), None) if inner.keys() == covered else None


def workers_of(fraction: Any, alias: Any, world: int) -> int:
    """Gradient workers of each layer, from a fraction or a strategy's name."""
    if fraction is not None and alias is not None:
        raise ValueError(
            "gradient_worker_fraction and grad_worker_fraction are one setting: give one of them, "
            f"got {fraction!r} and {alias!r}"
        )
    value = (
        DistributedStrategy.COMM_OPT if fraction is alias else alias if fraction is None else fraction
    )
    if isinstance(value, (DistributedStrategy, str)):
        name = choice_of("gradient_worker_fraction", value, DistributedStrategy)
        value = {"comm_opt": 1.0, "hybrid_opt": 0.5, "mem_opt": 0.0}[name]
    require_known("gradient_worker_fraction", value)
    return gradient_workers(world, value)


def likelihood_of(given: Likelihood | str | None, fisher: str) -> Likelihood | None:
    """The likelihood of a Fisher that needs one, else None."""
    if given is not None and not isinstance(given, Categorical | Bernoulli | Gaussian):
        check_choice("likelihood", given, tuple(_LIKELIHOODS))
        given = _LIKELIHOODS[given]()
    if fisher == "empirical":
        return None
    if given is None:
        raise ValueError(f"likelihood must be given with fisher={fisher!r}, got None")
    return given


def check_model_and_optimizer(model: Any, optimizer: Any) -> None:
    """TypeError or ValueError if K-FAC cannot be attached to one or wrapped around the other."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is None:
        return
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {kind}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer must step without evaluating the model again, got {kind}, whose step needs a "
            "closure"
        )


def check_settings(given: Mapping[str, Any]) -> None:
    """TypeError or ValueError if a value is bad, by itself or beside the others; `KFAC`'s names."""
    for name, flag in given.items():
        if name in _FLAGS and not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    for name in ("max_factor_size", "fisher_samples", "accumulation_steps"):
        check_integer(name, given[name], at_least=1)
    for name in ("seed", "loglevel"):
        check_integer(name, given[name], at_least=0)
    for name in ("max_rows", "max_examples"):
        if given[name] is not None:
            check_integer(name, given[name], at_least=1)
    check_number("allreduce_bucket_cap_mb", given["allreduce_bucket_cap_mb"], at_least=0)
    for name, choices in _CHOICES.items():
        check_choice(name, given[name], choices)
    skipped, terms, scaler = given["skip_layers"], given["terms"], given["grad_scaler"]
    if isinstance(skipped, str):
        raise TypeError(f"skip_layers must be a list of patterns, got the string {skipped!r}")
    if skipped is not None and not isinstance(skipped, Sequence | Set):
        raise TypeError(f"skip_layers must be a list of patterns, got {skipped!r}")
    if given["output_of"] is not None and not callable(given["output_of"]):
        raise TypeError(f"output_of must be a function or None, got {given['output_of']!r}")
    if scaler is not None and not (callable(scaler) or isinstance(scaler, torch.amp.GradScaler)):
        kind = type(scaler).__name__
        raise TypeError(f"grad_scaler must be a GradScaler, a function or None, got {kind}")
    if terms is not None and given["fisher"] != "empirical":
        raise ValueError(f"terms must be None with fisher={given['fisher']!r}, which counts its own")
    if terms is not None and not callable(terms):
        check_terms(terms, above=0)
    sharing = given["weight_sharing"]
    for kind, value in (sharing if isinstance(sharing, Mapping) else {"": sharing}).items():
        check_choice(f"weight_sharing[{kind!r}]" if kind else "weight_sharing", value, SHARINGS)
    if given["max_rows"] is not None and sharing == "reduce":
        raise ValueError(
            "max_rows must be None with weight_sharing='reduce', whose rows are those of whole "
            f"examples, got {given['max_rows']}"
        )
    for name in ("factor_dtype", "inv_dtype"):
        check_dtype(name, given[name])
        if given[name] == torch.float16:
            raise ValueError(
                f"{name} must have the range of float32, got {given[name]}: inverses and second moments "
                "leave that of float16, torch.bfloat16 takes as little room"
            )
    for name in HYPERPARAMETERS:
        if not callable(given[name]):
            check_hyperparameter(name, given[name])
    if given["compute_method"] == "ekfac" and given["factor_scaling"] == "kfac_pytorch":
        raise ValueError("compute_method must not be 'ekfac' with factor_scaling='kfac_pytorch'")


def check_hyperparameter(name: str, value: Any) -> None:
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
