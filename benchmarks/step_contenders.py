"""The optimizers whose steps are measured, ours and a peer, each on a model of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from suite.torch import KFAC, Kron
from workloads import Workload

PERIOD = 10  # steps from one refresh to the next, for all contenders


class Contender:
    """An optimizer on a model of its own."""

    kinds: tuple[str, ...] = ("plain",)  # of steps

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def kind(self, step: int) -> str:
        return self.kinds[0]

    def step(self) -> None:
        raise NotImplementedError

    def state_bytes(self) -> int:
        raise NotImplementedError


class Torch(Contender):
    def __init__(self, workload: Workload, make: Callable[[Any], Any], kinds: Any = ()) -> None:
        super().__init__(workload)
        self.optimizer = make(workload.model.parameters())
        self._kinds = kinds

    def kind(self, step: int) -> str:
        return self._kinds[step % PERIOD] if self._kinds else "plain"

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_bytes(self) -> int:
        return _bytes(list(self.optimizer.state.values()))


class OurKron(Torch):
    def state_bytes(self) -> int:
        return sum(self.optimizer.memory_usage().values())


class OurKFAC(Torch):
    def __init__(self, workload: Workload, clips: bool = False, **settings: Any) -> None:
        """`clips`: the norm of the gradient, before the step, as many loops do."""
        Contender.__init__(self, workload)
        self.clips = clips
        parameters = list(workload.model.parameters())
        # One pass over memory for three; and on a GPU the host need not look at each step.
        self.base = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True)
        self.optimizer = KFAC(workload.model, self.base, inv_update_steps=PERIOD, **settings)
        self.every = settings.get("factor_update_steps", 1)
        self.spread = settings.get("spread_inverses", False)

    def kind(self, step: int) -> str:
        if self.spread:  # steps of several lengths
            return "mixed"
        if step % PERIOD == 0:
            return "refresh"
        return "statistics" if step % self.every == 0 else "plain"

    def step(self) -> None:
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.workload.model.parameters(), 1.0)
        super().step()

    def state_bytes(self) -> int:
        return sum(self.optimizer.memory_usage().values()) + _bytes(list(self.base.state.values()))


def _bytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(_bytes(x) for x in tree.values())
    if isinstance(tree, list | tuple):
        return sum(_bytes(x) for x in tree)
    return 0


UPDATES = ("update", *["plain"] * (PERIOD - 1))
MIXED = ("mixed",) * PERIOD  # a peer's own clock says which step is which: means, not medians


def kron(**settings: Any) -> Callable[[Workload], Contender]:
    settings = {"lr": 1e-4, "preconditioner_update_probability": 1 / PERIOD, **settings}
    return lambda w: OurKron(w, lambda p: Kron(p, **settings), UPDATES)


def kron_torch_class() -> Any:
    import kron_torch as package

    return package.Kron


def kron_torch(workload: Workload) -> Contender:
    make, probability = kron_torch_class(), 1 / PERIOD
    return Torch(
        workload, lambda p: make(p, lr=1e-4, preconditioner_update_probability=probability), MIXED
    )


CONTENDERS: dict[str, Callable[[Workload], Contender]] = {
    "AdamW": lambda w: Torch(w, lambda p: torch.optim.AdamW(p, lr=1e-4)),
    "AdamW, fused": lambda w: Torch(w, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True)),
    "Kron": kron(),
    "Kron, QEQ": kron(geometry="QEQ"),
    "Kron, dense": kron(partition_grads_into_blocks=False),
    "Kron, dense, QEQ": kron(partition_grads_into_blocks=False, geometry="QEQ"),
    "Kron, bf16": kron(mu_dtype=torch.bfloat16, precond_dtype=torch.bfloat16),
    "K-FAC": lambda w: OurKFAC(w),
    "K-FAC, inverse": lambda w: OurKFAC(w, compute_method="inverse"),
    "K-FAC, inverse, statistics every 10": lambda w: OurKFAC(
        w, compute_method="inverse", factor_update_steps=PERIOD
    ),
    "K-FAC, inverse, spread": lambda w: OurKFAC(w, compute_method="inverse", spread_inverses=True),
}
DENSE = {"partition_grads_into_blocks": False}
EQ, QUAD4P = {**DENSE, "geometry": "EQ"}, {**DENSE, "geometry": "QUAD4P"}
PACKED, UNCACHED = {"packed_factors": True}, {"cache_preconditioner": False}
HALF = {"mu_dtype": torch.bfloat16, "precond_dtype": torch.bfloat16}
VARIANTS: dict[str, Callable[[Workload], Contender]] = {  # when they are named
    "Kron, own factors": kron(shared_factors=False),
    "Kron, blocks of 256": kron(block_size=256),
    "Kron, packed": kron(**PACKED),
    "Kron, without P": kron(**UNCACHED),
    "K-FAC, inverse, bf16": lambda w: OurKFAC(w, compute_method="inverse", inv_dtype=torch.bfloat16),
    "K-FAC, inverse, bf16, statistics every 10": lambda w: OurKFAC(
        w, compute_method="inverse", inv_dtype=torch.bfloat16, factor_update_steps=PERIOD
    ),
    "K-FAC, inverse, clipped, statistics every 10": lambda w: OurKFAC(
        w, clips=True, compute_method="inverse", factor_update_steps=PERIOD
    ),
    "K-FAC, inverse, packed": lambda w: OurKFAC(w, compute_method="inverse", **PACKED),
    "K-FAC, inverse, packed, bf16": lambda w: OurKFAC(
        w,
        compute_method="inverse",
        factor_dtype=torch.bfloat16,
        inv_dtype=torch.bfloat16,
        **PACKED,
    ),
    "Kron, dense, packed": kron(**DENSE, **PACKED),
    "Kron, dense, without P": kron(**DENSE, **UNCACHED),
    "Kron, dense, EQ": kron(**EQ),
    "Kron, dense, EQ, packed": kron(**EQ, **PACKED),
    "Kron, dense, EQ, packed, without P": kron(**EQ, **PACKED, **UNCACHED),
    "Kron, dense, QUAD4P": kron(**QUAD4P),
    "Kron, dense, QUAD4P, packed, without P": kron(**QUAD4P, **PACKED, **UNCACHED),
    "Kron, dense, QUAD4P, packed, without P, bf16": kron(**QUAD4P, **PACKED, **UNCACHED, **HALF),
}
EVERY = CONTENDERS | VARIANTS
PEERS = {"kron_torch": kron_torch}
