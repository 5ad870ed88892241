"""kfac.preconditioner."""

from suite.torch.kfac import KFACPreconditioner

__all__ = ["KFACPreconditioner"]
