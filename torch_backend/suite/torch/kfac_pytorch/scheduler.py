"""kfac.scheduler."""

from suite.torch.schedulers import KFACParamScheduler, LambdaParamScheduler

__all__ = ["KFACParamScheduler", "LambdaParamScheduler"]
