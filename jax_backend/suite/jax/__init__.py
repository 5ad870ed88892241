"""K-FAC and PSGD Kron for JAX: `from suite.jax import kfac, kron, value_and_grad`."""

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"suite.jax needs jax and optax, and {error.name} is not installed: `pip install jax optax`, "
        "or install this package with its extra `jax`"
    ) from error

from suite.core.schedules import precond_lr_schedule, precond_update_prob_schedule
from suite.jax.adaptive import adaptive_kfac
from suite.jax.capture import probe, value_and_grad, verify
from suite.jax.fisher import Bernoulli, Categorical, Gaussian
from suite.jax.hessian import hessian_vector_product
from suite.jax.kfac import kfac, scale_by_kfac
from suite.jax.kfac_state import eigenbases, state_specs
from suite.jax.kron import get_opt_state_partition_specs, kron, routing, scale_by_kron
from suite.jax.lra import dense_newton, lra, scale_by_dense, scale_by_lra
from suite.jax.plan import Plan, Statistics

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Plan",
    "Statistics",
    "adaptive_kfac",
    "dense_newton",
    "eigenbases",
    "get_opt_state_partition_specs",
    "hessian_vector_product",
    "kfac",
    "kron",
    "lra",
    "precond_lr_schedule",
    "precond_update_prob_schedule",
    "probe",
    "routing",
    "scale_by_dense",
    "scale_by_kfac",
    "scale_by_kron",
    "scale_by_lra",
    "state_specs",
    "value_and_grad",
    "verify",
]
