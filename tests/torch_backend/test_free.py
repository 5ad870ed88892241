"""Parameters that modules use by themselves: the diagonal of their rows' gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import assert_close
from suite.torch import KFAC
from torch_backend.rows_by_loops import (
    Net,
    blocks_of,
    both_reductions,
    double,
    held,
    loss_of,
    numbers,
    stepped,
)


class Free(nn.Module):
    """An operation between x and parameters of the module's own."""

    def __init__(self, operation, shapes, x):
        super().__init__()
        self.own = nn.ParameterList(
            nn.Parameter(0.5 * numbers(*shape, seed=10 + i)) for i, shape in enumerate(shapes)
        )
        self.operation, self.channels_last = operation, x.ndim < 4
        y = operation(x, *self.own)
        self.head = nn.Linear(y.shape[-1 if self.channels_last else 1], 3)

    def forward(self, x):
        return self.after(self.operation(x, *self.own))

    after = Net.after


# operation(x, *parameters), the same with parameters (*rows, *shape), shapes, and the axes of the rows
SEQUENCE, IMAGE = (3, 2, 4), (3, 4, 2, 2)
PLACES = torch.tensor([[2, 2], [0, 2], [1, 4]])
FREE = {
    "x + p": (lambda x, p: x + p, lambda x, p: x + p, [(4,)], SEQUENCE, (3, 2)),
    "p + x": (lambda x, p: torch.add(p, x), lambda x, p: x + p, [(4,)], SEQUENCE, (3, 2)),
    "x - p": (lambda x, p: x - p, lambda x, p: x - p, [(2, 4)], SEQUENCE, (3,)),
    "x * (1 + p)": (
        lambda x, p: x * (1 + p),
        lambda x, p: x * (1 + p),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x * (1 - 2 p)": (
        lambda x, p: x * (1 - 2 * p),
        lambda x, p: x * (1 - 2 * p),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x + (p + q)": (
        lambda x, p, q: x + (p + q),
        lambda x, p, q: x + torch.stack([p[:, t, 0, t] for t in (0, 1)], 1) + q[:, :, 0, 0],
        [(1, 2, 4), (1, 1, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "x * (p * q)": (
        lambda x, p, q: x * (p * q),
        lambda x, p, q: x * p * q,
        [(4,), (4,)],
        SEQUENCE,
        (3, 2),
    ),
    "p - x": (
        lambda x, p: p - x,
        lambda x, p: p[:, :, 0, :, 0].mT - x,
        [(1, 2, 1)],
        SEQUENCE,
        (3, 4),
    ),
    "x exp(p)": (lambda x, p: x * p.exp(), lambda x, p: x * p.exp(), [(4,)], SEQUENCE, (3, 2)),
    "x - exp(-p)": (
        lambda x, p: x + -torch.exp(-p),
        lambda x, p: x - (-p).exp(),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x sigmoid(p / 3)": (
        lambda x, p: x * torch.sigmoid(p / 3),
        lambda x, p: x / (1 + (-p / 3).exp()),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "tanh(p) x": (lambda x, p: p.tanh() * x, lambda x, p: p.tanh() * x, [(4,)], SEQUENCE, (3, 2)),
    "linear by name": (
        lambda x, W, b: F.linear(x, weight=W, bias=b),
        lambda x, W, b: torch.einsum("nti,ntoi->nto", x, W) + b,
        [(5, 4), (5,)],
        SEQUENCE,
        (3, 2),
    ),
    "x * p": (lambda x, p: x * p, lambda x, p: x * p, [(4,)], SEQUENCE, (3, 2)),
    "x *= p": (lambda x, p: x.clone().mul_(p), lambda x, p: x * p, [(4,)], SEQUENCE, (3, 2)),
    "x += p": (lambda x, p: x.clone().add_(p), lambda x, p: x + p, [(4,)], SEQUENCE, (3, 2)),
    "scalar": (lambda x, p: p * x, lambda x, p: p * x, [()], SEQUENCE, (3, 2, 4)),
    "token": (
        lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1),
        lambda x, p: torch.cat([p[:, 0], x], 1),
        [(1, 1, 4)],
        SEQUENCE,
        (3,),
    ),
    "token, repeated": (
        lambda x, p: torch.cat([p.repeat(len(x), 1, 1), x], 1),
        lambda x, p: torch.cat([p[:, 0], x], 1),
        [(1, 1, 4)],
        SEQUENCE,
        (3,),
    ),
    "positions": (
        lambda x, p: x + p[:, : x.shape[1]],
        lambda x, p: x + p[:, 0, : x.shape[1]],
        [(1, 5, 4)],
        SEQUENCE,
        (3,),
    ),
    "looked-up positions": (
        lambda x, p: x + p[PLACES],
        lambda x, p: (
            x + torch.stack([torch.stack([p[n, t, PLACES[n, t]] for t in (0, 1)]) for n in range(3)])
        ),
        [(5, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "gamma": (
        lambda x, p: x * p[:, None, None],
        lambda x, p: x * p.movedim(-1, 1),
        [(4,)],
        IMAGE,
        (3, 2, 2),
    ),
    "gamma, viewed": (
        lambda x, p: x * p.view(1, -1, 1, 1),
        lambda x, p: x * p.movedim(-1, 1),
        [(4,)],
        IMAGE,
        (3, 2, 2),
    ),
    "x @ W": (
        lambda x, W: x @ W,
        lambda x, W: torch.einsum("nti,ntio->nto", x, W),
        [(4, 5)],
        SEQUENCE,
        (3, 2),
    ),
    "x @ W.T": (
        lambda x, W: torch.matmul(x, W.T),
        lambda x, W: torch.einsum("nti,ntoi->nto", x, W),
        [(5, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "x @ W by batch": (
        lambda x, W: torch.bmm(x, W),
        lambda x, W: torch.einsum("nti,tnio->nto", x, W),
        [(3, 4, 5)],
        SEQUENCE,
        (2,),
    ),
    "W @ x": (
        lambda x, W: W @ x,
        lambda x, W: torch.einsum("nqoi,niq->noq", W, x),
        [(3, 2)],
        SEQUENCE,
        (3, 4),
    ),
    "linear": (
        lambda x, W, b: F.linear(x, W, b),
        lambda x, W, b: torch.einsum("ntoi,nti->nto", W, x) + b,
        [(5, 4), (5,)],
        SEQUENCE,
        (3, 2),
    ),
    "x * (temperature p)": (
        lambda x, p: x * (torch.tensor(1.5, dtype=torch.float64) * p),
        lambda x, p: x * (1.5 * p),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "two in one": (
        lambda x, p, q: x * p + q,
        lambda x, p, q: x * p + q,
        [(4,), (4,)],
        SEQUENCE,
        (3, 2),
    ),
}


@both_reductions
@pytest.mark.parametrize("name", FREE)
def test_a_free_parameter_has_the_diagonal_of_its_rows_gradients(name, reduction):
    """A parameter of its own for every row: autograd gives each row's gradient."""
    operation, by_row, shapes, shape, rows = FREE[name]
    x = numbers(*shape)
    model = double(lambda: Free(operation, shapes, x))
    per_row = [p.detach().expand(*rows, *p.shape).clone().requires_grad_() for p in model.own]
    y = by_row(x, *per_row)
    torch.testing.assert_close(y, operation(x, *model.own))
    loss_of(model.after(y), reduction).backward()
    factors = held(stepped(model, x, reduction=reduction))
    terms = len(x) if reduction == "mean" else 1
    for i, p in enumerate(per_row):
        A, G = factors[f"own.{i}"]
        expected = p.grad.square().sum(tuple(range(len(rows)))).reshape(1, -1)
        assert_close(A * G[:, 0], terms * expected)


class Masked(nn.Module):
    """Matrices that are put together of parameters and buffers before they meet x."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.w = nn.Parameter(0.5 * numbers(4, 3, seed=1))
        self.register_buffer("mask", (numbers(4, 3, seed=2) > 0).double() + 0.5)
        self.u, self.v = (nn.Parameter(numbers(*s, seed=5)) for s in ((4, 2), (2, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "mask":
            return x @ (self.w * (2 * self.mask))
        if self.kind == "shift":
            return x @ (self.w - self.mask.exp())
        return x @ (self.w + self.u @ self.v)


@pytest.mark.parametrize("kind", ["mask", "shift", "adapter"])
@pytest.mark.filterwarnings("ignore:statistics miss some uses:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
def test_what_has_no_rows_is_not_taken_for_rows(kind):
    """The square of a sum over rows is not the sum of their squares."""
    x = numbers(6, 4)
    model = double(lambda: Masked(kind))
    y = model(x).detach().requires_grad_()
    loss_of(y, "sum").backward()
    factor = 2 * model.mask if kind == "mask" else 1.0
    per_row = x[:, :, None] * y.grad[:, None, :] * factor
    A, G = held(stepped(model, x, reduction="sum"))["w"]
    assert_close(A * G[:, 0], per_row.square().sum(0).reshape(1, -1))


class Features(nn.Module):
    """Data that a module holds itself, by itself and in what is written into."""

    def __init__(self, kind: str, x: torch.Tensor) -> None:
        super().__init__()
        self.kind, self.w = kind, nn.Parameter(0.5 * numbers(4, 3, seed=1))
        self.register_buffer("x", x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "data":
            return self.x @ self.w
        out = torch.zeros_like(self.x)
        if self.kind == "in place":
            out += x
        else:
            out[:, :] = x
        return out @ self.w


@pytest.mark.parametrize("kind", ["data", "in place", "set"])
def test_data_in_a_buffer_has_rows(kind):
    x = numbers(6, 4)
    model = double(lambda: Features(kind, x))
    y = (x @ model.w).detach().requires_grad_()
    loss_of(y, "sum").backward()
    per_row = x[:, :, None] * y.grad[:, None, :]
    A, G = held(stepped(model, x.clone().requires_grad_(), reduction="sum"))["w"]
    assert_close(A * G[:, 0], per_row.square().sum(0).reshape(1, -1))


def test_free_parameters_are_followed_in_the_module_that_owns_them_and_under_gradient_accumulation():
    x = numbers(*SEQUENCE)
    whole = double(lambda: Free(FREE["x * p"][0], [(4,)], x))
    parts = copy.deepcopy(whole)
    expected = held(stepped(whole, x, reduction="sum"))
    kfac = KFAC(parts, kl_clip=None, loss_reduction="sum")
    for n in range(3):
        loss_of(parts(x[n : n + 1]), "sum").backward()
    kfac.step()
    for name, (A, G) in held(kfac).items():
        assert_close(blocks_of((A, G))[0], blocks_of(expected[name])[0])
