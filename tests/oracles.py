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
    """A factor as a matrix: a vector stands for the diagonal matrix with these entries."""
    return np.diag(factor) if factor.ndim == 1 else factor


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
    itself, in place of Q.
    """

    def __init__(
        self, geometry: str, factors: Sequence[np.ndarray], betaL: float, damping: float
    ) -> None:
        self.geometry = geometry
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

    def update(self, g: np.ndarray, v: np.ndarray, lr: float) -> None:
        """One step with gradient g and standard noise v; every factor sees the old Q."""
        g = g + (self.damping + np.finfo(np.float64).eps * np.abs(g)) * v
        if self.geometry == "EQ":
            Q = kronecker_product(self.Q)
            a = (Q @ g.reshape(-1)).reshape(g.shape)
            b = np.linalg.solve(Q.T, v.reshape(-1)).reshape(g.shape)
            for i in range(g.ndim):
                self._step_eq(i, contraction(a, a, i), contraction(b, b, i), lr)
        elif self.geometry == "QEP":
            sizes = [np.max(np.abs(q)) for q in self.Q]
            mean = np.prod(sizes) ** (1 / len(sizes))
            self.Q = [q * mean / size for q, size in zip(self.Q, sizes, strict=True)]
            h = self.direction(g)
            for i in range(g.ndim):
                self._step_qep(i, contraction(h, h, i), g.size / g.shape[i], lr)
        else:
            h = self.direction(g)
            for i in range(g.ndim):
                self._step(i, contraction(h, h, i), g.size / g.shape[i], lr)

    def _smoothness(self, i: int, ell: float) -> float:
        self.L[i] = max(self.betaL * self.L[i] + (1 - self.betaL) * ell, ell)
        return self.L[i]

    def _step_eq(self, i: int, T1: Matrix, T2: Matrix, lr: float) -> None:
        q = self.Q[i]
        if q.ndim == 1:
            t1, t2 = np.diag(T1), np.diag(T2)
            L = self._smoothness(i, np.max(t1 + t2))
            self.Q[i] = q - lr / L * (t1 - t2) * q
        else:
            L = self._smoothness(i, norm_bound(T1 + T2))
            self.Q[i] = q - lr / L * np.triu(T1 - T2) @ q

    def _step_qep(self, i: int, T: Matrix, c: float, lr: float) -> None:
        q = self.Q[i]
        if q.ndim == 1:
            t1, t2 = q * np.diag(T) * q, c * q * q
            L = self._smoothness(i, np.max(t1 + t2))
            self.Q[i] = q - lr / L * (t1 - t2) * q
        else:
            t1, t2 = q @ T @ q.T, c * q @ q.T
            L = self._smoothness(i, norm_bound(t1 + t2))
            self.Q[i] = q - lr / L * (t1 - t2) @ q

    def _step(self, i: int, T: Matrix, c: float, lr: float) -> None:
        q = self.Q[i]
        if q.ndim == 1:
            t = np.diag(T)
            L = self._smoothness(i, np.max(t) + c)
            if self.geometry in ("QUAD", "QUAD4P"):
                self.Q[i] = q * (1 - lr / (2 * L) * (t - c)) ** 2
            else:
                self.Q[i] = q * (1 - lr / L * (t - c))
            return
        L = self._smoothness(i, norm_bound(T) + c)
        if self.geometry == "QEQ":
            self.Q[i] = q - lr / L * (q @ T - c * q)
        elif self.geometry in ("Q0.5EQ1.5", "PRO4P"):
            self.Q[i] = procrustes_step(q - lr / L * (T @ q - c * q))
        elif self.geometry in ("QUAD", "QUAD4P"):
            p = q - lr / (2 * L) * (T @ q - c * q)
            p = p - lr / (2 * L) * (p @ T - c * p)
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
