"""The numerics of K-FAC and PSGD Kron as pure functions over any array library.

Importing this package loads neither torch nor jax. Leading axes of every array are a batch; noise, step
counts and hyperparameters that change are arguments.
"""

from suite.core import (
    blocks,
    buckets,
    correlations,
    damping,
    dense,
    ekfac,
    kfac,
    kron,
    kron_evidence,
    kronecker,
    layer_lists,
    likelihoods,
    linalg,
    lra,
    moments,
    noise,
    packing,
    padding,
    patches,
    placement,
    rounding,
    routing,
    schedules,
    statistics,
    step_size,
    traffic,
    turns,
)

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "blocks",
    "buckets",
    "correlations",
    "damping",
    "dense",
    "ekfac",
    "kfac",
    "kron",
    "kron_evidence",
    "kronecker",
    "layer_lists",
    "likelihoods",
    "linalg",
    "lra",
    "moments",
    "noise",
    "packing",
    "padding",
    "patches",
    "placement",
    "rounding",
    "routing",
    "schedules",
    "statistics",
    "step_size",
    "traffic",
    "turns",
]
