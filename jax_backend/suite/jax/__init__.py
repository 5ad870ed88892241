"""K-FAC and PSGD Kron for JAX: `from suite.jax import kfac, kron, value_and_grad`."""

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"suite.jax needs jax and optax, and {error.name} is not installed: `pip install jax optax`, "
        "or install this package with its extra `jax`"
    ) from error

from suite.core.schedules import precond_update_prob_schedule
from suite.jax.capture import probe, value_and_grad, verify
from suite.jax.fisher import Bernoulli, Categorical, Gaussian
from suite.jax.kfac import eigenbases, kfac, scale_by_kfac
from suite.jax.kron import kron, routing, scale_by_kron
from suite.jax.plan import Plan, Statistics

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Plan",
    "Statistics",
    "eigenbases",
    "kfac",
    "kron",
    "precond_update_prob_schedule",
    "probe",
    "routing",
    "scale_by_kfac",
    "scale_by_kron",
    "value_and_grad",
    "verify",
]
