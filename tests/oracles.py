"""Slow, obvious numpy versions of what the core computes, written from the published equations.

Nothing here imports the code under test. Every Kronecker product is formed in full and every loop is
spelled out; float64 throughout. A tensor is vectorised row by row (C order), so a matrix X with factors
(F1, F2) becomes (F1 ⊗ F2) vec X = vec(F1 X F2ᵀ).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

Matrix = np.ndarray


def dense(factor: np.ndarray) -> Matrix:
    """A factor as a matrix: a vector stands for the diagonal, a stack for the blocks on it."""
    if factor.ndim == 3:
        return block_diagonal(factor)
    return np.diag(factor) if factor.ndim == 1 else factor


def block_diagonal(blocks: Sequence[Matrix]) -> Matrix:
    """Square blocks along the diagonal, zeros elsewhere."""
    full = np.zeros([sum(len(b) for b in blocks)] * 2)
    start = 0
    for b in blocks:
        full[start : start + len(b), start : start + len(b)] = b
        start += len(b)
    return full


def kronecker_product(factors: Sequence[np.ndarray]) -> Matrix:
    """F_1 ⊗ F_2 ⊗ ... in full."""
    product = np.ones((1, 1))
    for factor in factors:
        product = np.kron(product, dense(factor))
    return product


def contraction(x: np.ndarray, y: np.ndarray, axis: int) -> Matrix:
    """T[a, b] = Σ x[.., a, ..] y[.., b, ..] over all axes but one."""
    n = x.shape[axis]
    of_x, of_y = ([np.take(z, a, axis) for a in range(n)] for z in (x, y))
    T = np.zeros((n, n))
    for a in range(n):
        for b in range(n):
            T[a, b] = np.sum(of_x[a] * of_y[b])
    return T


# K-FAC


def kfac_direction(A: np.ndarray, G: np.ndarray, damping: float, gradient: Matrix) -> Matrix:
    """(A ⊗ G + λ I)⁻¹ on the vectorised gradient (d_out, d_in), by a dense solve."""
    curvature = kronecker_product([G, A])  # row by row, the output index is the slow one
    damped = curvature + damping * np.eye(len(curvature))
    return np.linalg.solve(damped, gradient.reshape(-1)).reshape(gradient.shape)


def kfac_direction_factored(A: np.ndarray, G: np.ndarray, damping: float, gradient: Matrix) -> Matrix:
    """((A + π √λ I) ⊗ (G + √λ/π I))⁻¹ on the vectorised gradient, π² = (tr A / d_in) / (tr G / d_out).

    Martens & Grosse 2015 (arXiv:1503.05671), section 6.3.
    """
    A, G = dense(A), dense(G)
    pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
    A = A + pi * np.sqrt(damping) * np.eye(len(A))
    G = G + np.sqrt(damping) / pi * np.eye(len(G))
    return kfac_direction(A, G, 0.0, gradient)


def weighted_mean(history: Sequence[np.ndarray], decay: float) -> np.ndarray:
    """The mean of everything seen, the item k steps back weighing decay**k."""
    weights = [decay**age for age in reversed(range(len(history)))]
    return sum(w * x for w, x in zip(weights, history, strict=True)) / sum(weights)


# PSGD


def norm_bound(M: Matrix) -> float:
    """The spectral norm's lower bound of Li 2024: two power iterations from the largest row."""
    scale = np.abs(M).max()
    if scale == 0:
        return 0.0
    M = M / scale
    x = M[np.argmax([np.sum(row**2) for row in M])]
    x = x @ M
    x = x / np.linalg.norm(x)
    return float(np.linalg.norm(x @ M) * scale)


class PSGD:
    """PSGD's whitening preconditioner P = QᵀQ for one tensor, Q = Q_1 ⊗ Q_2 ⊗ ...

    Sources: Li 2015 (arXiv:1512.04202), Li 2022 (arXiv:2211.04422), Li 2024 (arXiv:2402.11858). Factors
    are balanced in QEP only, as published: elsewhere that is a choice of gauge. PRO4P and QUAD4P fit P
    itself, in place of Q. With `pair`, Newton: g is H v, and v takes the place of white noise.

    With `blocks` factors have so many equal blocks on their diagonals and zeros elsewhere, as has every
    matrix of their steps. Each block has the step of its own norm; the factor remembers the largest.
    """

    def __init__(
        self,
        geometry: str,
        factors: Sequence[np.ndarray],
        betaL: float,
        damping: float,
        blocks: Sequence[int] | None = None,
    ) -> None:
        self.geometry = geometry
        self.blocks = blocks or [1] * len(factors)
        self.Q = [factor.copy() for factor in factors]
        self.L = [0.0] * len(factors)
        self.betaL, self.damping = betaL, damping

    def P(self) -> Matrix:
        if self.geometry.endswith("4P"):
            return kronecker_product([q if q.ndim == 1 else (q + q.T) / 2 for q in self.Q])
        Q = kronecker_product(self.Q)
        return Q.T @ Q

    def direction(self, g: np.ndarray) -> np.ndarray:
        return (self.P() @ g.reshape(-1)).reshape(g.shape)

    def update(self, g: np.ndarray, v: np.ndarray, lr: float, pair: np.ndarray | None = None) -> None:
        """One step with gradient g and standard noise v; every factor sees the old Q."""
        g = g + (self.damping + np.finfo(np.float64).eps * np.abs(g)) * v
        self.pair = pair
        if self.geometry == "EQ":
            Q = kronecker_product(self.Q)
            a = (Q @ g.reshape(-1)).reshape(g.shape)
            b = np.linalg.solve(Q.T, (v if pair is None else pair).reshape(-1)).reshape(g.shape)
            for i in range(g.ndim):
                self._step_eq(i, self._contraction(i, a), self._contraction(i, b), lr)
        elif self.geometry == "QEP":
            sizes = [np.max(np.abs(q)) for q in self.Q]
            mean = np.prod(sizes) ** (1 / len(sizes))
            self.Q = [q * mean / size for q, size in zip(self.Q, sizes, strict=True)]
            h = self.direction(g)
            for i in range(g.ndim):
                self._step_qep(i, self._contraction(i, h), g.size / g.shape[i], lr)
        else:
            h = self.direction(g)
            for i in range(g.ndim):
                self._step(i, self._contraction(i, h), g.size / g.shape[i], lr)

    def _smoothness(self, i: int, ell: float) -> float:
        self.L[i] = max(self.betaL * self.L[i] + (1 - self.betaL) * ell, ell)
        return self.L[i]

    def _contraction(self, i: int, x: np.ndarray) -> Matrix:
        """Σ x xᵀ over all axes but i, without what is outside of the factor's blocks."""
        full = contraction(x, x, i)
        inside = np.kron(np.eye(self.blocks[i]), np.ones([len(full) // self.blocks[i]] * 2))
        return full * inside

    def _on_blocks(self, i: int, M: Matrix) -> list[Matrix]:
        n = len(M) // self.blocks[i]
        return [M[k * n : (k + 1) * n, k * n : (k + 1) * n] for k in range(self.blocks[i])]

    def _rows(self, i: int, M: Matrix, more: float = 0.0) -> np.ndarray:
        """The smoothness of the block that each row is in, as a column."""
        before, found = self.L[i], []
        for block in self._on_blocks(i, M):
            ell = norm_bound(block) + more
            found.append(max(self.betaL * before + (1 - self.betaL) * ell, ell))
        self.L[i] = max(found)
        return np.repeat(found, len(M) // self.blocks[i])[:, None]

    def _rotated(self, i: int, Q: Matrix) -> Matrix:
        return block_diagonal([procrustes_step(q) for q in self._on_blocks(i, Q)])

    def _step_eq(self, i: int, T1: Matrix, T2: Matrix, lr: float) -> None:
        q = self.Q[i]
        if q.ndim == 1:
            t1, t2 = np.diag(T1), np.diag(T2)
            L = self._smoothness(i, np.max(t1 + t2))
            self.Q[i] = q - lr / L * (t1 - t2) * q
        else:
            rows = self._rows(i, T1 + T2)
            self.Q[i] = q - lr / rows * np.triu(T1 - T2) @ q

    def _white(self, i: int, c: float) -> Matrix:
        """What T is to become: c I for white noise, or the pair's own second moment."""
        if self.pair is None:
            return c * np.eye(len(self.Q[i]))
        return self._contraction(i, self.pair)

    def _step_qep(self, i: int, T: Matrix, c: float, lr: float) -> None:
        q, W = self.Q[i], self._white(i, c)
        if q.ndim == 1:
            t1, t2 = q * np.diag(T) * q, q * np.diag(W) * q
            L = self._smoothness(i, np.max(t1 + t2))
            self.Q[i] = q - lr / L * (t1 - t2) * q
        else:
            t1, t2 = q @ T @ q.T, q @ W @ q.T
            rows = self._rows(i, t1 + t2)
            self.Q[i] = q - lr / rows * (t1 - t2) @ q

    def _step(self, i: int, T: Matrix, c: float, lr: float) -> None:
        q, W = self.Q[i], self._white(i, c)
        side = lr if self.geometry == "QUAD4P" else lr / 2
        if q.ndim == 1:
            t, w = np.diag(T), np.diag(W)
            L = self._smoothness(i, np.max(t) + c if self.pair is None else np.max(t + w))
            if self.geometry in ("QUAD", "QUAD4P"):
                self.Q[i] = q * (1 - side / L * (t - w)) ** 2
            else:
                self.Q[i] = q * (1 - lr / L * (t - w))
            return
        rows = self._rows(i, T, c) if self.pair is None else self._rows(i, T + W)
        if self.geometry == "QEQ":
            self.Q[i] = q - lr / rows * q @ (T - W)
        elif self.geometry in ("Q0.5EQ1.5", "PRO4P"):
            self.Q[i] = self._rotated(i, q - lr / rows * (T - W) @ q)
        elif self.geometry in ("QUAD", "QUAD4P"):
            p = q - side / rows * (T - W) @ q
            p = p - side / rows * p @ (T - W)
            self.Q[i] = (p + p.T) / 2
        else:
            raise ValueError(self.geometry)


def procrustes_step(Q: Matrix) -> Matrix:
    """One rotation of Q towards the symmetric square root of QᵀQ: exp(a R) to second order."""
    R = Q.T - Q
    size = norm_bound(R)
    if size == 0:
        return Q
    R = R / size
    slope, curvature = np.trace(R @ Q), np.trace(R @ R @ Q)
    a = min(-slope / curvature, 1 / 8) if curvature < 0 else 1 / 8
    return Q + a * R @ Q + a**2 / 2 * R @ R @ Q


# Convolutions


def convolution_rows(
    x: np.ndarray,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> list[np.ndarray]:
    """For each group, the patch under the kernel at every place of every example, entry by entry."""
    n, channels, *sizes = x.shape
    width = channels // groups
    # A place is visited when the dilated kernel fits into the padded input there.
    starts = []
    for size, k, s, (before, after), d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        first, last = -before, size + after - 1 - d * (k - 1)
        starts.append(list(range(first, last + 1, s)))

    def entry(example: int, channel: int, position: tuple[int, ...]) -> float:
        inside = all(0 <= p < size for p, size in zip(position, sizes, strict=True))
        return float(x[(example, channel, *position)]) if inside else 0.0

    rows = []
    for group in range(groups):
        of_group = []
        for example in range(n):
            for place in itertools.product(*starts):
                row = []
                for channel in range(group * width, (group + 1) * width):
                    for offset in itertools.product(*map(range, kernel)):
                        position = tuple(
                            p + o * d for p, o, d in zip(place, offset, dilation, strict=True)
                        )
                        row.append(entry(example, channel, position))
                of_group.append(row)
        rows.append(np.array(of_group))
    return rows


# Noise


def murmur_finalizer(h: int) -> int:
    """MurmurHash3's 32-bit finalizer (Appleby) on unsigned integers."""
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)


class LowRankPSGD:
    """PSGD with Q = (I + U Vᵀ) diag(d), every Q formed in full.

    Sources: Li 2022 (arXiv:2211.04422), section 4; Li 2024 (arXiv:2402.11858) for the steps' lengths.
    """

    def __init__(
        self, U: Matrix, V: Matrix, d: np.ndarray, betaL: float = 0.9, damping: float = 0.0
    ) -> None:
        self.U, self.V, self.d = U.copy(), V.copy(), d.copy()
        self.L = [0.0, 0.0, 0.0]
        self.betaL, self.damping = betaL, damping

    def Q(self) -> Matrix:
        return (np.eye(len(self.d)) + self.U @ self.V.T) @ np.diag(self.d)

    def P(self) -> Matrix:
        return self.Q().T @ self.Q()

    def _smoothness(self, i: int, ell: float) -> float:
        self.L[i] = max(self.betaL * self.L[i] + (1 - self.betaL) * ell, ell)
        return self.L[i]

    def update(
        self, h: np.ndarray, noise: np.ndarray, lr: float, on_U: bool, v: np.ndarray | None = None
    ) -> None:
        h = h + self.damping * noise
        v = noise if v is None else v
        if self.U.shape[1]:
            rho = np.sqrt(np.linalg.norm(self.U) / np.linalg.norm(self.V))
            self.U, self.V = self.U / rho, self.V * rho
            A, B = self.U.T @ self.U, self.V.T @ self.V
            E = 0.1 * (A - B) / (np.trace(A) + np.trace(B))
            self.U = self.U @ (np.eye(len(E)) - E + E @ E / 2)
            self.V = self.V @ (np.eye(len(E)) + E + E @ E / 2)
        Q, P = self.Q(), self.P()
        a, b = Q @ h, np.linalg.solve(Q.T, v)
        Ph, Pv = P @ h, np.linalg.solve(P, v)
        U, V, n = self.U, self.V, len(self.d)
        gap = np.outer(a, a) - np.outer(b, b)
        L = self._smoothness(2, np.max(np.abs(Ph * h)) + np.max(np.abs(v * Pv)))
        self.d = self.d - lr / L * (Ph * h - v * Pv) * self.d
        if not U.shape[1]:
            return
        norm = np.linalg.norm
        if on_U:
            L = self._smoothness(0, norm(a) * norm(V @ V.T @ a) + norm(b) * norm(V @ V.T @ b))
            self.U = U - lr / L * gap @ V @ (np.eye(U.shape[1]) + V.T @ U)
        else:
            L = self._smoothness(1, norm(a) * norm(U @ U.T @ a) + norm(b) * norm(U @ U.T @ b))
            self.V = V - lr / L * (np.eye(n) + V @ U.T) @ gap @ U


class DensePSGD:
    """PSGD with one dense Q for a vector; sources as for `PSGD`."""

    def __init__(self, geometry: str, Q: Matrix, betaL: float = 0.9, damping: float = 0.0) -> None:
        self.geometry, self.Q, self.L = geometry, Q.copy(), 0.0
        self.betaL, self.damping = betaL, damping

    def P(self) -> Matrix:
        return self.Q if self.geometry == "QUAD4P" else self.Q.T @ self.Q

    def update(self, h: np.ndarray, noise: np.ndarray, lr: float, v: np.ndarray | None = None) -> None:
        h = h + self.damping * noise
        v = noise if v is None else v
        Q, P, g = self.Q, self.P(), self.geometry
        a, b = P @ h, v
        if g == "EQ":
            a, b = Q @ h, np.linalg.solve(Q.T, v)
        elif g == "QEP":
            a, b = Q @ P @ h, Q @ v
        ell = a @ a + b @ b
        self.L = max(self.betaL * self.L + (1 - self.betaL) * ell, ell)
        step, gap = lr / self.L, np.outer(a, a) - np.outer(b, b)
        if g == "EQ":
            self.Q = Q - step * np.triu(gap) @ Q
        elif g == "QEP":
            self.Q = Q - step * gap @ Q
        elif g == "QEQ":
            self.Q = Q - step * Q @ gap
        elif g == "Q0.5EQ1.5":
            self.Q = procrustes_step(Q - step * gap @ Q)
        elif g in ("QUAD", "QUAD4P"):
            K = np.eye(len(Q)) - (step if g == "QUAD4P" else step / 2) * gap
            self.Q = (K @ Q @ K + (K @ Q @ K).T) / 2
        else:
            raise ValueError(g)
