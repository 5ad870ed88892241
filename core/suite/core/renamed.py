"""What arguments of other packages are called here, said where one of those is given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# Of psgd_torch, kron_torch, heavyball and older versions of distributed_kron.
OF_KRON = {
    "precond_lr": "preconditioner_lr",
    "lr_preconditioner": "preconditioner_lr",
    "precond_init_scale": "preconditioner_init_scale",
    "precond_update_prob": "preconditioner_update_probability",
    "momentum_into_precond_update": "whiten",
    "whiten_grad": "whiten",
    "merge_dims": "merge_small_dims",
    "update_preconditioner_first": "update_first",
    "preconditioner_max_size": "max_size_triangular",
    "preconditioner_max_skew": "max_skew",
    "q_dtype": "precond_dtype",
    "lower_bound_beta": "betaL",
    "dQ": "geometry",
    "beta": "b1",
    "betas": "b1",
    "momentum": "b1",
    "rank_of_approximation": "rank",
    "exact_hessian_vector_product": "hvp",
    "grad_clip_max_amp": "clip",
    "grad_clip_max_amps": "clip",
    "params_sharding": "params_partition_specs",
    "preconditioner_sharding": "preconditioner_partition_spec",
    "lr": "learning_rate",
    "learning_rate": "lr",
    "lr_params": "lr",
}
# Of kfac-pytorch before 0.4, what it is made after, and kfac-jax.
OF_KFAC = {
    "factor_update_freq": "factor_update_steps",
    "fac_update_freq": "factor_update_steps",
    "TCov": "factor_update_steps",
    "inv_update_freq": "inv_update_steps",
    "kfac_update_freq": "inv_update_steps",
    "TInv": "inv_update_steps",
    "stat_decay": "factor_decay",
    "use_eigen_decomp": "compute_method",
    "comm_method": "gradient_worker_fraction",
    "verbose": "loglevel",
    "curvature_update_period": "factor_update_steps",
    "inverse_update_period": "inv_update_steps",
    "curvature_ema": "factor_decay",
    "norm_constraint": "kl_clip",
    "learning_rate_schedule": "learning_rate",
    "momentum_schedule": "momentum",
    "damping_schedule": "damping",
    "initial_damping": "damping",
    "l2_reg": "weight_decay",
    "multi_device": "mesh",
    "distributed_inverses": "mesh",
    "lr": "learning_rate",
}


def says_new_names(names: Mapping[str, str]) -> Callable[[F], F]:
    """A function whose TypeError, if it is given an argument of another name, tells that of here.

    Args:
        names: theirs to ours.
    """

    def decorate(function: F) -> F:
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            theirs = [k for k in kwargs if k not in known and names.get(k) in known]
            if theirs:
                told = "; ".join(f"{k} is {names[k]} here" for k in theirs)
                called = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"unknown arguments of {called}: {told}")
            return function(*args, **kwargs)

        return cast(F, checked)

    return decorate
