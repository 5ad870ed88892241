"""PSGD Kron's equations in NumPy, one parameter and one block at a time, with nothing of the library.

Geometries are Li 2024's (arXiv:2402.11858); which factors a parameter gets is distributed_kron's.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

EPS = float(np.finfo(np.float64).eps)


def noise(seed: int, parameter: int, block: int, step: int, shape: tuple[int, ...]) -> Any:
    """Uniform on ±√3: MurmurHash3's finalizer of stream, step and position."""

    def mixed(h: Any) -> Any:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
        return h

    def words(number: int) -> Any:
        return np.asarray([number % 2**32], np.uint32)

    stream = seed * 0x9E3779B1 + (parameter << 16) + block
    key = mixed(mixed(words(stream + 1013904223)) ^ words(step))
    places = mixed(np.arange(math.prod(shape), dtype=np.uint32) + np.uint32(374761393))
    bits = mixed(key ^ places).view(np.int32).astype(np.float64)
    return ((bits + 0.5) * 2.0**-31 * 3.0**0.5).reshape(shape)


def axes_of(shape: tuple[int, ...], s: dict[str, Any]) -> list[tuple[int, bool, list[Any]]]:
    """Side, whether it is diagonal, and chunks (start, count, size) of each axis after merging."""
    sides, ways = [n for n in shape if n != 1] or [1], []
    for cuts in itertools.product([False, True], repeat=len(sides) - 1):
        groups = [[sides[0]]]
        for cut, side in zip(cuts, sides[1:], strict=True):
            groups = [*groups, [side]] if cut else [*groups[:-1], [*groups[-1], side]]
        allowed = all(len(g) == 1 or math.prod(g) <= s["target_merged_dim_size"] for g in groups)
        if all(cuts) or (len(sides) > 2 and len(groups) > 1 and allowed):
            merged = [math.prod(g) for g in groups]
            ways.append((len(groups), sum(n * n for n in merged), merged, groups))
    _, _, merged, groups = min(ways)
    few = s["memory_save_mode"] == "all_diag" or sum(n > 1 for n in sides) < s["min_ndim_triangular"]
    longest, found = max(range(len(merged)), key=lambda i: (merged[i], i)), []
    for i, (n, group) in enumerate(zip(merged, groups, strict=True)):
        limit, size = s["max_size_triangular"], s["block_size"]
        diagonal = few or n == 1 or min(group) > limit or n > limit < size
        diagonal |= s["memory_save_mode"] == "one_diag" and i == longest
        chunks = [(0, 1, n)]
        if not diagonal and n > size:
            whole, rest = divmod(n, size)
            equal = next((b for b in range(size, size // 2, -1) if n % b == 0), None)
            chunks = [(0, whole, size), (whole * size, 1, rest)]
            chunks = [(0, n // equal, equal)] if equal else chunks
        found.append((n, diagonal, chunks))
    return found


def times(factors: list[Any], x: Any) -> Any:
    for axis, f in enumerate(factors):
        dense = np.diag(f) if f.ndim == 1 else f
        x = np.moveaxis(np.tensordot(dense, x, (1, axis)), 0, axis)
    return x


def gram(x: Any, axis: int) -> Any:
    rows = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    return rows @ rows.T


def norm_bound(x: Any) -> float:
    """Two power iterations, from the longest row."""
    once = x[np.argmax((x * x).sum(1))] @ x
    return float(np.linalg.norm(once @ x) / np.linalg.norm(once)) if once.any() else 0.0


def rotated(q: Any) -> Any:
    R = q.T - q
    bound = norm_bound(R)
    if bound <= 16 * EPS * abs(np.trace(q)):
        return q
    R = R / bound
    slope, curvature = np.trace(R @ q), np.trace(R @ R @ q)
    a = min(-slope / curvature, 0.125) if curvature < 0 else 0.125
    return q + a * R @ q + a * a / 2 * R @ R @ q


class Block:
    """A part of a parameter, with a factor for each axis: a diagonal, or so many blocks on one."""

    def __init__(self, where: Any, counts: list[int], diagonal: list[bool], s: dict[str, Any]) -> None:
        self.where, self.counts, self.L = where, counts, [0.0] * len(where)
        self.fits_P = s["geometry"] in ("PRO4P", "QUAD4P")
        scale = (s["preconditioner_init_scale"] or 1.0) ** ((2 if self.fits_P else 1) / len(where))
        self.shape = tuple(w.stop - w.start for w in where)
        sides = zip(self.shape, diagonal, strict=True)
        self.Q = [scale * (np.ones(n) if d else np.eye(n)) for n, d in sides]

    def P(self) -> list[Any]:
        if self.fits_P:
            return [q if q.ndim == 1 else (q + q.T) / 2 for q in self.Q]
        return [q * q if q.ndim == 1 else q.T @ q for q in self.Q]

    def fit(self, s: dict[str, Any], g: Any, v: Any, rate: float) -> None:
        if not g.any():
            return
        if s["preconditioner_init_scale"] is None and not any(self.L):
            gain = (float(np.mean(g**4)) ** 0.25 + s["damping"]) ** -0.5
            self.Q = [q * gain ** ((2 if self.fits_P else 1) / len(self.Q)) for q in self.Q]
        told = [
            (np.moveaxis(g, i, 0).reshape(c, -1) != 0).any(1) for i, c in enumerate(self.counts)
        ]  # which blocks on a diagonal, of one each axis all if any
        g = g + (s["damping"] + EPS * abs(g)) * v
        h = times(self.Q if s["geometry"] == "EQ" else self.P(), g)
        if s["geometry"] == "EQ":
            v = times([1 / q if q.ndim == 1 else np.linalg.inv(q).T for q in self.Q], v)
            each = zip(told, self.shape, strict=True)
            v = times([1.0 * np.repeat(flags, n // len(flags)) for flags, n in each], v)
        for i, flags in enumerate(told):
            others = [t.mean() for j, t in enumerate(told) if j != i]
            c = math.prod(self.shape) / self.shape[i] * math.prod(others)
            self._step(s, i, (h, v), c, flags, rate)
        sizes = [abs(q).max() for q in self.Q]
        mean = math.exp(np.mean(np.log(sizes)))
        self.Q = [q * (mean / size) for q, size in zip(self.Q, sizes, strict=True)]

    def _step(
        self, s: dict[str, Any], i: int, seen: tuple[Any, Any], c: float, flags: Any, rate: float
    ) -> None:
        geometry, Q = s["geometry"], np.diag(self.Q[i]) if self.Q[i].ndim == 1 else self.Q[i]
        T, white = gram(seen[0], i), c * np.eye(len(Q))
        if geometry == "EQ":
            white = gram(seen[1], i)
        if geometry == "QEP":
            T, white = Q @ T @ Q.T, c * Q @ Q.T
        new, largest, n = Q.copy(), 0.0, len(Q) // len(flags)
        for j, usable in enumerate(flags):
            w = slice(j * n, (j + 1) * n)
            t, u, q = T[w, w], white[w, w], Q[w, w]
            if self.Q[i].ndim == 1:
                t, u = np.diag(np.diag(t)), np.diag(np.diag(u))
                bound = (t + u).max()
            else:
                bound = norm_bound(t + u) if geometry in ("EQ", "QEP") else norm_bound(t) + u[0, 0]
            L = max(s["betaL"] * self.L[i] + (1 - s["betaL"]) * bound, bound)
            largest = max(largest, min(L, 1e30) if usable else self.L[i])
            if usable:
                new[w, w] = self._moved(geometry, q, rate / L * (t - u), self.Q[i].ndim == 1)
        self.Q[i], self.L[i] = np.diag(new).copy() if self.Q[i].ndim == 1 else new, largest

    def _moved(self, geometry: str, q: Any, E: Any, is_diagonal: bool) -> Any:
        if geometry in ("QUAD", "QUAD4P"):
            K = np.eye(len(q)) - (1.0 if self.fits_P else 0.5) * E
            return (K @ q @ K + (K @ q @ K).T) / 2
        if geometry == "QEQ":
            return q - q @ E
        q = q - (np.triu(E) if geometry == "EQ" else E) @ q
        return rotated(q) if geometry in ("Q0.5EQ1.5", "PRO4P") and not is_diagonal else q


class Parameter:
    """What becomes of a parameter, whose settings `s` are those of its group at the time."""

    def __init__(self, value: Any, number: int, s: dict[str, Any]) -> None:
        self.value, self.number = value, number
        self.begin(s)

    def begin(self, s: dict[str, Any]) -> None:
        self.steps, self.updates, self.clock = 0, 0, 1.0
        axes = axes_of(self.value.shape, s)
        self.momentum, self.weight, self.blocks = np.zeros([n for n, _, _ in axes]), 0.0, []
        for tile in itertools.product(*[chunks for _, _, chunks in axes]):
            parts = [[(a, c * n, c)] for a, c, n in tile]
            if not s["shared_factors"]:
                parts = [[(a + j * n, n, 1) for j in range(c)] for a, c, n in tile]
            for one in itertools.product(*parts):
                where = tuple(slice(a, a + n) for a, n, _ in one)
                self.blocks.append(Block(where, [c for _, _, c in one], [d for _, d, _ in axes], s))

    def step(self, g: Any, s: dict[str, Any], of_group: int) -> None:
        """One in which it has a gradient; the noise is that of the group's step."""
        due = self.clock >= 1 - 1e-4
        self.clock += s["preconditioner_update_probability"] - due
        rate, g = s["preconditioner_lr"](self.updates), -g if s["maximize"] else g
        self.updates += due
        if s["normalize_grads"] and g.any():
            g = g / np.linalg.norm(g)
        g = g.reshape(self.momentum.shape)
        self.momentum = s["b1"] * self.momentum + (1 - s["b1"]) * g
        self.weight = s["b1"] * self.weight + 1 - s["b1"]
        signal, direction = self.momentum / self.weight, np.zeros_like(g)
        for number, block in enumerate(self.blocks):
            old, w = block.P() if any(block.L) or s["preconditioner_init_scale"] else None, block.where
            if due:
                v = noise(s["seed"], self.number, number, of_group, block.shape)
                block.fit(s, (g if s["whiten"] == "gradient" else signal)[w], v, rate)
            h = times(block.P() if s["update_first"] or old is None else old, signal[w])
            mean, entry = s["clip"]
            h = h * min(1.0, mean / max(math.sqrt(np.mean(h * h)), 1e-30))
            direction[w] = np.clip(h, -entry, entry)
        move = direction.reshape(self.value.shape) + s["weight_decay"] * self.value
        self.value = self.value - s["lr"] * move
