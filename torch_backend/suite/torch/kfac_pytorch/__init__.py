"""kfac-pytorch's modules by their names: `from suite.torch import kfac_pytorch as kfac`."""

from suite.torch.kfac import KFAC
from suite.torch.kfac_pytorch import enums, hyperparams, preconditioner, scheduler
from suite.torch.kfac_pytorch.enums import AssignmentStrategy, ComputeMethod, DistributedStrategy
from suite.torch.kfac_pytorch.preconditioner import KFACPreconditioner
from suite.torch.kfac_pytorch.scheduler import KFACParamScheduler, LambdaParamScheduler

__all__ = [
    "KFAC",
    "AssignmentStrategy",
    "ComputeMethod",
    "DistributedStrategy",
    "KFACParamScheduler",
    "KFACPreconditioner",
    "LambdaParamScheduler",
    "enums",
    "hyperparams",
    "preconditioner",
    "scheduler",
]
