"""The report that says what happens to every parameter, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """One parameter's treatment."""

    parameter: str
    shape: tuple[int, ...]
    treatment: str  # 'kfac', 'kron', 'plain', 'fallback', 'frozen', 'waiting' (for evidence)
    factors: str  # the factors' shapes, '' without any
    reason: str

    @property
    def preconditioned(self) -> bool:
        return self.treatment in ("kfac", "kron")

    @property
    def diagonal(self) -> bool:
        """Whether all of its factors are diagonal."""
        return "diag" in self.factors and not re.search(r"\dx\d", self.factors)


@dataclass(frozen=True)
class Routing:
    """All routes, in the model's order. `print` it for a table."""

    routes: tuple[Route, ...]

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def __len__(self) -> int:
        return len(self.routes)

    def __getitem__(self, parameter: str) -> Route:
        for route in self.routes:
            if route.parameter == parameter:
                return route
        raise KeyError(parameter)

    def __str__(self) -> str:
        header = ("parameter", "shape", "treatment", "factors", "reason")
        rows = [
            (r.parameter, "x".join(map(str, r.shape)) or "()", r.treatment, r.factors, r.reason)
            for r in self.routes
        ]
        table = _table([header, *rows])
        total = sum(_size(r.shape) for r in self.routes)
        covered = sum(_size(r.shape) for r in self.routes if r.preconditioned)
        share = 100 * covered / total if total else 0.0
        diagonal = sum(_size(r.shape) for r in self.routes if r.preconditioned and r.diagonal)
        by_diagonals = f", {diagonal:,} of them by diagonals alone" if diagonal else ""
        return (
            f"{table}\n{covered:,} of {total:,} parameters preconditioned ({share:.1f} %){by_diagonals}"
        )

    def require_preconditioned(self, what: str) -> None:
        """Raise ValueError if no parameter is preconditioned: a second-order method in name only."""
        if not any(route.preconditioned for route in self.routes):
            raise ValueError(f"{what} would precondition nothing:\n{self}")


def describe_factors(sides: Sequence[int], diagonal: Sequence[bool]) -> str:
    """'256x256, diag 4096' for a dense factor of side 256 and a diagonal one of 4096."""
    return ", ".join(
        f"diag {side}" if d else f"{side}x{side}" for side, d in zip(sides, diagonal, strict=True)
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
