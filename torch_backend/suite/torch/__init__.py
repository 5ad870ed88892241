"""K-FAC and PSGD Kron for PyTorch: `from suite.torch import KFAC, Kron`."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "suite.torch needs PyTorch, which is not installed: `pip install torch`, "
        "or install this package with its extra `torch`"
    ) from error

from suite.core.schedules import precond_update_prob_schedule
from suite.torch.kfac import KFAC, ComputeMethod, KFACPreconditioner
from suite.torch.kron import Kron

__all__ = ["KFAC", "ComputeMethod", "KFACPreconditioner", "Kron", "precond_update_prob_schedule"]
