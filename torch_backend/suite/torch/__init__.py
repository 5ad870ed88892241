"""K-FAC and PSGD Kron for PyTorch: `from suite.torch import KFAC, Kron`."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "suite.torch needs PyTorch, which is not installed: `pip install torch`, "
        "or install this package with its extra `torch`"
    ) from error

from suite.core import _torch as _functions  # noqa: F401  # before anything is compiled
from suite.core.likelihoods import Bernoulli, Categorical, Gaussian
from suite.core.schedules import precond_lr_schedule, precond_update_prob_schedule
from suite.torch.adaptive import AdaptiveKFAC
from suite.torch.attached import detach
from suite.torch.graphed import GraphedStep
from suite.torch.kfac import KFAC, KFACPreconditioner
from suite.torch.kron import Kron
from suite.torch.lra import LRA, DenseNewton
from suite.torch.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell, replace_recurrent
from suite.torch.schedulers import KFACParamScheduler, LambdaParamScheduler
from suite.torch.settings import AssignmentStrategy, ComputeMethod, DistributedStrategy

__all__ = [
    "GRU",
    "KFAC",
    "LRA",
    "LSTM",
    "RNN",
    "AdaptiveKFAC",
    "AssignmentStrategy",
    "Bernoulli",
    "Categorical",
    "ComputeMethod",
    "DenseNewton",
    "DistributedStrategy",
    "GRUCell",
    "Gaussian",
    "GraphedStep",
    "KFACParamScheduler",
    "KFACPreconditioner",
    "Kron",
    "LSTMCell",
    "LambdaParamScheduler",
    "RNNCell",
    "detach",
    "precond_lr_schedule",
    "precond_update_prob_schedule",
    "replace_recurrent",
]
