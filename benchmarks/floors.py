"""The bare products and factorizations as PyTorch has them, and nothing else.

Second moments are whole products, those of convolutions of patches: what does half of a symmetric
product, or correlations in place of patches, can take less.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from suite.core.blocks import Structure, plan_blocks
from workloads import Workload

Shape = tuple[int, int]

_LARGEST = 8192  # side of a factor: of a vocabulary it is diagonal, and no product


def grouped(workload: Workload) -> dict[tuple[int, int, int], int]:
    """How many layers there are of each (d_out, d_in, rows)."""
    found: dict[tuple[int, int, int], int] = {}
    for shape, rows in zip(workload.matrices, workload.rows, strict=True):
        key = (*shape, rows)
        found[key] = found.get(key, 0) + 1
    return found


class Floor:
    """Dense factors for every layer of a workload, or for its blocks, stacked by shape."""

    def __init__(
        self, workload: Workload, device: torch.device, structure: Structure | None = None
    ) -> None:
        self.stacks = []
        for (m, n, rows), count in grouped(workload).items():
            if max(m, n) > _LARGEST:
                continue
            random = torch.randn
            parts = [((m, n), (1, 1), count)]
            if structure is not None:
                plan = plan_blocks((m, n), structure)
                parts = [(t.sizes, t.diagonal_blocks, count * t.blocks) for t in plan.tiles]
            for (d_out, d_in), (c_out, c_in), blocks in parts:
                p, q = d_out // c_out, d_in // c_in
                self.stacks.append(
                    {
                        "G": random(blocks * c_out, p, d_in, device=device),
                        "L": torch.eye(p, device=device).repeat(blocks * c_out, 1, 1),
                        "R": torch.eye(q, device=device).repeat(blocks * c_in, 1, 1),
                    }
                )
            if structure is None:
                self.stacks[-1] |= {
                    "x": random(count, rows, n, device=device),
                    "g": random(count, rows, m, device=device),
                }

    def two_products(self) -> None:
        """A plain step of either method: L G R, of block-diagonal L and R block by block."""
        for s in self.stacks:
            torch.bmm(_before(torch.bmm(s["L"], s["G"]), s["R"]), s["R"])

    def rows(self) -> None:
        """A plain step of K-FAC from the rows of a batch, where these are fewer: (L g)ᵀ (R x)."""
        for s in self.stacks:
            if s["x"].shape[1] < min(s["G"].shape[1:]):
                torch.bmm(torch.bmm(s["g"], s["L"]).mT, torch.bmm(s["x"], s["R"]))
            else:
                torch.bmm(torch.bmm(s["L"], s["G"]), s["R"])

    def kron_update(self) -> None:
        """h = P g, the Gram matrix of each side, its product with Q, and QᵀQ."""
        for s in self.stacks:
            h = torch.bmm(_before(torch.bmm(s["L"], s["G"]), s["R"]), s["R"])
            rows = h.view_as(s["G"])
            for Q, T in ((s["L"], rows @ rows.mT), (s["R"], h.mT @ h)):
                torch.bmm(T, Q)
                torch.bmm(Q.mT, Q)

    def rotation(self) -> None:
        """What the default geometry's update has besides: R Q and R (R Q) of each side."""
        for s in self.stacks:
            for Q in (s["L"], s["R"]):
                torch.bmm(Q, torch.bmm(Q, Q))

    def statistics(self) -> None:
        """aᵀa and gᵀg."""
        for s in self.stacks:
            torch.bmm(s["x"].mT, s["x"])
            torch.bmm(s["g"].mT, s["g"])

    def inverses(self) -> None:
        """Cholesky and the inverse from it, of both sides."""
        for s in self.stacks:
            for side in (s["L"], s["R"]):
                torch.cholesky_inverse(torch.linalg.cholesky(side))


def _before(x: torch.Tensor, R: torch.Tensor) -> torch.Tensor:
    """The numbers of `x` as so many matrices as R has, with as many columns as R has rows."""
    return x.view(len(R), -1, R.shape[1])


FLOORS: dict[str, Callable[[Floor], None]] = {
    "two products": Floor.two_products,
    "Kron's update": Floor.kron_update,
    "Kron's rotation": Floor.rotation,
    "rows": Floor.rows,
    "statistics": Floor.statistics,
    "inverses": Floor.inverses,
}
IN_BLOCKS: dict[str, Callable[[Floor], None]] = {  # of Kron's default structure
    "two products, blocks": Floor.two_products,
    "Kron's update, blocks": Floor.kron_update,
    "Kron's rotation, blocks": Floor.rotation,
}
