"""kfac.enums."""

from suite.torch.settings import AssignmentStrategy, ComputeMethod, DistributedStrategy

__all__ = ["AssignmentStrategy", "ComputeMethod", "DistributedStrategy"]
