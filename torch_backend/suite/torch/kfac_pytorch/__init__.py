"""kfac-pytorch's modules by their names: `from suite.torch import kfac_pytorch as kfac`."""

from suite.torch.kfac_pytorch import enums, hyperparams, preconditioner, scheduler

__all__ = ["enums", "hyperparams", "preconditioner", "scheduler"]
