"""Parameters that modules use by themselves: the diagonal of their rows' gradients."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from conftest import assert_close
from oracles import weighted_mean
from suite.torch import KFAC
from suite.torch.gates import Member
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


def members(x, ends):
    """(rows, groups): 1 where a row of x is in a group."""
    rows, starts = torch.arange(len(x))[:, None], torch.cat([ends.new_zeros(1), ends[:-1]])
    return ((rows >= starts) & (rows < ends)).to(x.dtype)


def grouped(x, W, ends):
    return torch.einsum("rk,ri,kio->ro", members(x, ends), x, W).clone()


def grouped_backward(context, g):
    x, W, ends = context.saved_tensors
    by_x = torch.einsum("rk,ro,kio->ri", members(x, ends), g, W)
    return by_x, torch.einsum("rk,ri,ro->kio", members(x, ends), x, g), None


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


# transformers' own takes every dtype, too: torch's does not take float64.
if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
    OWN, SCHEMA = (
        "transformers::grouped_mm_fallback",
        "(Tensor input, Tensor weight, Tensor offs) -> Tensor",
    )
    torch.library.custom_op(OWN, grouped, mutates_args=(), schema=SCHEMA)
    torch.library.register_fake(OWN, grouped)
    torch.library.register_autograd(OWN, grouped_backward, setup_context=save)
OPERATOR = torch.ops.transformers.grouped_mm_fallback


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
ENDS = torch.tensor([1, 1, 5], dtype=torch.int32)


def looked_up(p):
    """A row of a table for every row of x, by tables of their own."""
    return torch.stack([torch.stack([p[n, t, PLACES[n, t]] for t in (0, 1)]) for n in range(3)])


def product_by_group(x, W):
    """A matrix of a stack for every row of x but the last, by stacks of their own."""
    groups = [0, 2, 2, 2, 2]
    y = torch.stack([x[i // 2, i % 2] @ W[i // 2, i % 2, k] for i, k in enumerate(groups)])
    return torch.cat([y, torch.zeros_like(y[:1])]).unflatten(0, (3, 2))


def change(y, p, q):
    y.add_(p)
    y.mul_(q)
    return y


def change_parameters(x, p, q):
    p.mul_(q)
    p.add_(x)
    return p * x


OFFSETS = torch.tensor([[1, 2], [0, 1]])


def of_each_score(p):
    """(3, heads, 2, 2) of a table (heads, offsets) for each, (3, 2, 2)."""
    return p[:, torch.tensor([[0, 0], [1, 1]]), torch.tensor([[0, 1]]), :, OFFSETS].permute(2, 3, 0, 1)


def by_head(attend, x):
    """An attention of two heads."""
    heads = [y.unflatten(-1, (2, 2)).transpose(1, 2) for y in (x, x.cos(), x.sin())]
    return attend(*heads).transpose(1, 2).flatten(2)


def at_each(made):
    """(3, 2, channels): of what is made for each position, (6, channels, 2), its own."""
    return torch.einsum("npcp->npc", made.view(3, 2, -1, 2))


LARGER = {"size": (2, 5), "mode": "bicubic", "antialias": True}
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
    "x * (p * ones)": (
        lambda x, p: x * (p * torch.ones(4)),
        lambda x, p: x * p,
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x + (p + zeros of a sequence)": (
        lambda x, p: x + (p + torch.zeros(1, 2, 4)),
        lambda x, p: x + p[:, :, 0, 0],
        [(1, 1, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "x (W mask)": (
        lambda x, W: F.linear(x, W * torch.tril(torch.ones(5, 4))),
        lambda x, W: torch.einsum("nti,ntoi->nto", x, W * torch.ones(5, 4).tril()),
        [(5, 4)],
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
    "x exp(-t p), of times t": (
        lambda x, p: x * torch.exp(-torch.linspace(1, 2, 2)[:, None] * p),
        lambda x, p: x * torch.exp(-torch.linspace(1, 2, 2)[:, None] * p),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x + sin(t p + q), of times t": (
        lambda x, p, q: x + torch.sin(torch.arange(1, 3)[:, None] * p + q),
        lambda x, p, q: x + torch.sin(torch.arange(1, 3)[:, None] * p + q),
        [(4,), (4,)],
        SEQUENCE,
        (3, 2),
    ),
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
    "x / p": (
        lambda x, p: x / p,
        lambda x, p: x / p,
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "p / x": (
        lambda x, p: p / (1 + x * x),
        lambda x, p: p / (1 + x * x),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x over a number": (
        lambda x, p: x / p,
        lambda x, p: x / p,
        [()],
        SEQUENCE,
        (3, 2, 4),
    ),
    "x / exp(p) by torch.div": (
        lambda x, p: torch.div(x, p.exp()),
        lambda x, p: x * (-p).exp(),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x softplus(p)": (
        lambda x, p: x * F.softplus(p),
        lambda x, p: x * (1 + p.exp()).log(),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x times p between bounds": (
        lambda x, p: x * p.clamp(-0.5, max=0.4),
        lambda x, p: x * torch.where(p < -0.5, -0.5, torch.where(p > 0.4, 0.4, p)),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x (2 / p)": (
        lambda x, p: x * (2 / p),
        lambda x, p: x * 2 / p,
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x / root of p² + 1": (
        lambda x, p: x / (p.square() + 1).sqrt(),
        lambda x, p: x / (p * p + 1) ** 0.5,
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x |p|^-1/2": (
        lambda x, p: x * p.abs().rsqrt(),
        lambda x, p: x / (p * p) ** 0.25,
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x log(p² + 1)": (
        lambda x, p: x * torch.log(p.square() + 1),
        lambda x, p: x * (p * p + 1).log(),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x / reciprocal of exp": (
        lambda x, p: x * torch.reciprocal(p.exp()),
        lambda x, p: x * (-p).exp(),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x relu(p)": (
        lambda x, p: x * F.relu(p),
        lambda x, p: x * p * (p > 0),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x * (p / q)": (
        lambda x, p, q: x * (p / q),
        lambda x, p, q: x * p / q,
        [(4,), (4,)],
        SEQUENCE,
        (3, 2),
    ),
    "x * (p / constants)": (
        lambda x, p: x * (p / torch.arange(1, 5)),
        lambda x, p: x * p / torch.arange(1, 5),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "linear by name": (
        lambda x, W, b: F.linear(x, weight=W, bias=b),
        lambda x, W, b: torch.einsum("nti,ntoi->nto", x, W) + b,
        [(5, 4), (5,)],
        SEQUENCE,
        (3, 2),
    ),
    "einsum": (
        lambda x, W: torch.einsum("...i,io->...o", x, W),
        lambda x, W: torch.einsum("nti,ntio->nto", x, W),
        [(4, 5)],
        SEQUENCE,
        (3, 2),
    ),
    "einsum with any number of axes of both": (
        lambda x, W: torch.einsum("...ai,...io->...ao", x[:, :, None], W).squeeze(2),
        lambda x, W: torch.einsum("nti,ntio->nto", x, W),
        [(2, 4, 5)],
        SEQUENCE,
        (3,),
    ),
    "tensordot along two axes": (
        lambda x, W: torch.tensordot(x, W),
        lambda x, W: torch.einsum("nti,ntio->no", x, W),
        [(2, 4, 5)],
        SEQUENCE,
        (3,),
    ),
    "tensordot, by name": (
        lambda x, W: torch.tensordot(a=W, b=x, dims=([-1], [2])).permute(2, 3, 0, 1).flatten(2),
        lambda x, W: torch.einsum("nthoi,nti->ntho", W, x).flatten(2),
        [(2, 3, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "tensordot of a scaled slice": (
        lambda x, W: torch.tensordot(x, 0.5 * W.reshape(-1, 24).narrow(1, 4, 20).reshape(4, 5), dims=1),
        lambda x, W: torch.einsum("nti,ntio->nto", x, 0.5 * W[:, :, 4:].unflatten(2, (4, 5))),
        [(24,)],
        SEQUENCE,
        (3, 2),
    ),
    "einsum with two axes of outputs": (
        lambda x, W: torch.einsum("hoi,nti->htno", [W, x]).permute(2, 1, 0, 3).flatten(2),
        lambda x, W: torch.einsum("nthoi,nti->ntho", W, x).flatten(2),
        [(2, 3, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "einsum with two axes of inputs": (
        lambda x, W: torch.einsum("nti,tio->no", x, W),
        lambda x, W: torch.einsum("nti,ntio->no", x, W),
        [(2, 4, 5)],
        SEQUENCE,
        (3,),
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
        lambda x, p: x + looked_up(p),
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
    "prelu": (
        lambda x, p: F.prelu(x, p),
        lambda x, p: torch.where(x > 0, x, p.movedim(-1, 1) * x),
        [(4,)],
        IMAGE,
        (3, 2, 2),
    ),
    "prelu, one for all": (
        lambda x, p: torch.prelu(x, p),
        lambda x, p: torch.where(x > 0, x, p[..., 0] * x),
        [(1,)],
        SEQUENCE,
        (3, 2, 4),
    ),
    "gain of a spectrum": (
        lambda x, p: torch.fft.ifft(p * torch.fft.fft(x)).real,
        lambda x, p: torch.fft.ifft(p * torch.fft.fft(x)).real,
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "added to a spectrum": (
        lambda x, p: torch.fft.ifft(torch.fft.fft(x) + p.to(torch.complex128)).real,
        lambda x, p: torch.fft.ifft(torch.fft.fft(x) + p).real,
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "real part of a gain": (
        lambda x, p: torch.view_as_real((1 - p + 2j) * x).sum(-1) ** 2,
        lambda x, p: (x * (1 - p) + 2 * x) ** 2,
        [(4,)],
        SEQUENCE,
        (3, 2),
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
    "grouped": (
        lambda x, W: OPERATOR(x.flatten(0, 1), W, ENDS).unflatten(0, (3, 2)),
        product_by_group,
        [(3, 4, 5)],
        SEQUENCE,
        (3, 2),
    ),
    "grouped, transposed": (
        lambda x, W: OPERATOR(x.flatten(0, 1), W.transpose(1, 2), offs=ENDS).unflatten(0, (3, 2)),
        lambda x, W: product_by_group(x, W.mT),
        [(3, 5, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "x changes": (
        lambda x, p, q: change(x.clone(), p[PLACES], q),
        lambda x, p, q: (x + looked_up(p)) * q,
        [(5, 4), (4,)],
        SEQUENCE,
        (3, 2),
    ),
    "p changes": (
        lambda x, p, q: change_parameters(x, p.clone(), q),
        lambda x, p, q: (p[0] * q[0] + x) * x,
        [SEQUENCE, SEQUENCE],
        SEQUENCE,
        (1,),
    ),
    "gate": (
        lambda x, p: p * x + (1 - p) * x.cos(),
        lambda x, p: x.cos() + p * (x - x.cos()),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "gate of views": (
        lambda x, p: x.sin() * p[1:].view(1, 1, 4) - (x * -(p[1:].view(1, 1, 4) - 1)),
        lambda x, p: p[..., 1:] * x.sin() - x * (1 - p[..., 1:]),
        [(5,)],
        SEQUENCE,
        (3, 2),
    ),
    "gate of a sigmoid and more": (
        lambda x, p: (1 - p.sigmoid()) * x + (x.sin() * p.sigmoid() - p.clone() * x.cos()),
        lambda x, p: x / (1 + p.exp()) + x.sin() / (1 + (-p).exp()) - p * x.cos(),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "two gates, of halves": (
        lambda x, p: x * p[:4] - x.sin() * p[:4] + (x.cos() * p[4:] + x * (2 / p)[4:]),
        lambda x, p: (x - x.sin()) * p[..., :4] + x.cos() * p[..., 4:] + x * 2 / p[..., 4:],
        [(8,)],
        SEQUENCE,
        (3, 2),
    ),
    "scale and shift in one": (
        lambda x, p: x * p.chunk(2)[0] + torch.split((1 - p), 4)[1],
        lambda x, p: x * p[..., :4] + 1 - p[..., 4:],
        [(8,)],
        SEQUENCE,
        (3, 2),
    ),
    "gate of parts": (
        lambda x, p: x * p.unbind()[1] + (1 - p).unbind(0)[1] * x.sin() - p.exp().tensor_split(2)[0],
        lambda x, p: x.sin() + (x - x.sin()) * p[..., 1, :] - p[..., 0, :].exp(),
        [(2, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "lerp": (
        lambda x, p: torch.lerp(x.sin(), x, p) + x.cos().lerp(x.exp(), 1 - p),
        lambda x, p: x.sin() + p[0] * (x - x.sin()) + x.exp() + p[1] * (x.cos() - x.exp()),
        [(4,)],
        SEQUENCE,
        (2, 3, 2),
    ),
    "addcmul": (
        lambda x, p, q: torch.addcmul(q, x, p).addcmul(q.exp(), x.cos()),
        lambda x, p, q: q[0] + x * p[0] + q[1].exp() * x.cos(),
        [(4,), (4,)],
        SEQUENCE,
        (2, 3, 2),
    ),
    "a bias that is joined": (
        lambda x, p, q: F.linear(x, torch.ones(5, 4).to(x), torch.cat([p, torch.ones(1), q])),
        lambda x, p, q: (
            F.linear(x, torch.ones(5, 4).to(x)) + torch.cat([p, torch.ones(*p.shape[:-1], 1), q], -1)
        ),
        [(1,), (3,)],
        SEQUENCE,
        (3, 2),
    ),
    "x * (joined p)": (
        lambda x, p: x * torch.cat([p, torch.ones(2)]).exp(),
        lambda x, p: x * torch.cat([p, torch.ones(*p.shape[:-1], 2)], -1).exp(),
        [(2,)],
        SEQUENCE,
        (3, 2),
    ),
    "x (stacked p and q)": (
        lambda x, p, q: F.linear(x, torch.stack([p.exp(), q], 0)),
        lambda x, p, q: torch.stack([(x * p.exp()).sum(-1), (x * q).sum(-1)], -1),
        [(4,), (4,)],
        SEQUENCE,
        (3, 2),
    ),
    "positions of more places": (
        lambda x, p: x + F.interpolate(p, 2, mode="linear", align_corners=False).mT,
        lambda x, p: x + at_each(F.interpolate(p.flatten(0, 2), size=(2,), mode="linear")),
        [(1, 4, 5)],
        SEQUENCE,
        (3, 2),
    ),
    "positions of another image": (
        lambda x, p: x + torch.cat([F.interpolate(p, **LARGER)[0, :, :, 1].mT]) * 2,
        lambda x, p: x + at_each(F.interpolate(p.flatten(0, 2), **LARGER)[..., 1]) * 2,
        [(1, 4, 3, 2)],
        SEQUENCE,
        (3, 2),
    ),
    "positions of as many places": (
        lambda x, p: x - F.interpolate(input=p, size=2).mT.exp(),
        lambda x, p: x - at_each(p.flatten(0, 2)).exp(),
        [(1, 4, 2)],
        SEQUENCE,
        (3, 2),
    ),
    "a mask of an attention": (
        lambda x, p: F.scaled_dot_product_attention(x, x.cos(), x.sin(), p.exp()),
        lambda x, p: ((x @ x.cos().mT) / 2 + p.exp()).softmax(-1) @ x.sin(),
        [(2, 2)],
        SEQUENCE,
        (3,),
    ),
    "a mask of an attention with one query for all": (
        lambda x, p: x + F.scaled_dot_product_attention(x[:1].tanh() * 0 + 1, x.cos(), x, p.exp()),
        lambda x, p: x + ((torch.ones_like(x) @ x.cos().mT) / 2 + p.exp()).softmax(-1) @ x,
        [(2, 2)],
        SEQUENCE,
        (3,),
    ),
    "x + (p and q joined by name)": (
        lambda x, p, q: x + torch.cat([p, q], dim=-1).exp(),
        lambda x, p, q: x + torch.cat([p, q], -1).exp(),
        [(2,), (2,)],
        SEQUENCE,
        (3, 2),
    ),
    "a mask by name, of a table for each head": (
        lambda x, p: by_head(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=p[:, OFFSETS]), x
        ),
        lambda x, p: by_head(
            lambda q, k, v: ((q @ k.mT) / 2**0.5 + of_each_score(p)).softmax(-1) @ v, x
        ),
        [(2, 3)],
        SEQUENCE,
        (3, 2, 2),
    ),
    "a vector's products": (
        lambda x, p: torch.tanh(x @ p)[..., None],
        lambda x, p: torch.tanh((x * p).sum(-1, keepdim=True)),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "a vector in front": (
        lambda x, p: torch.matmul(p.exp(), x.mT)[..., None] + 1,
        lambda x, p: (x * p.exp()).sum(-1, keepdim=True) + 1,
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "torch.mv": (
        lambda x, p: torch.mv(x.flatten(0, 1), p).reshape(3, 2, 1) ** 2,
        lambda x, p: (x * p).sum(-1, keepdim=True) ** 2,
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "torch.inner": (
        lambda x, W: torch.inner(x, W),
        lambda x, W: torch.einsum("ntoi,nti->nto", W, x),
        [(5, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "torch.outer": (
        lambda x, p: torch.outer(x.flatten(), p).reshape(3, 8, 5),
        lambda x, p: x.reshape(3, 8, 1) * p,
        [(5,)],
        SEQUENCE,
        (3, 8),
    ),
    "torch.baddbmm": (
        lambda x, W, b: torch.baddbmm(b, x.transpose(0, 1), W).transpose(0, 1),
        lambda x, W, b: torch.einsum("nti,ntio->nto", x, W) + b[:, :, 0],
        [(2, 4, 5), (2, 1, 5)],
        SEQUENCE,
        (3,),
    ),
    "einsum of each entry": (
        lambda x, p: torch.einsum("nti,i->nti", x, p).tanh(),
        lambda x, p: (x * p).tanh(),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "einsum of each entry of an example": (
        lambda x, p: torch.einsum("it,...ti->...ti", p, x).tanh(),
        lambda x, p: (x * p.mT).tanh(),
        [(4, 2)],
        SEQUENCE,
        (3,),
    ),
    "einsum of each entry, other places": (
        lambda x, p: torch.einsum("nti,i->tin", x, p).permute(2, 0, 1).tanh(),
        lambda x, p: (x * p).tanh(),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "einsum with a vector for each head": (
        lambda x, p: torch.einsum("nthi,hi->nth", x.unflatten(-1, (2, 2)), p),
        lambda x, p: (x.unflatten(-1, (2, 2)) * p).sum(-1),
        [(2, 2)],
        SEQUENCE,
        (3, 2),
    ),
    "einsum with a matrix for each head": (
        lambda x, p: torch.einsum("ihd,nthi->dnth", p, x.unflatten(-1, (2, 2))).permute(1, 2, 3, 0)[
            ..., 0
        ],
        lambda x, p: torch.einsum("nthi,ntihd->nthd", x.unflatten(-1, (2, 2)), p)[..., 0],
        [(2, 2, 3)],
        SEQUENCE,
        (3, 2),
    ),
    "einsum with experts' matrices": (
        lambda x, p: torch.einsum("nti,eio->nteo", x, p).sum(2),
        lambda x, p: torch.einsum("nti,nteio->nteo", x, p).sum(2),
        [(2, 4, 3)],
        SEQUENCE,
        (3, 2),
    ),
    "positions by index_select": (
        lambda x, p: x + torch.index_select(p, dim=0, index=PLACES.flatten()).reshape(3, 2, 4).exp(),
        lambda x, p: x + looked_up(p).exp(),
        [(5, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "positions by gather": (
        lambda x, p: x + p.gather(0, PLACES.reshape(6, 1).expand(6, 4)).reshape(3, 2, 4),
        lambda x, p: x + looked_up(p),
        [(6, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "positions by F.embedding": (
        lambda x, p: x + F.embedding(PLACES, p, padding_idx=4),
        lambda x, p: x + looked_up(p.where(torch.arange(5)[:, None] != 4, p.detach())),
        [(5, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "places turned": (
        lambda x, p: x * p.roll(1, 0).flip(-1),
        lambda x, p: x * p.roll(1, -2).flip(-1),
        [(2, 4)],
        SEQUENCE,
        (3,),
    ),
    "a distribution's scale": (
        lambda x, p: torch.distributions.Normal(x, p.exp()).log_prob(x.sin()),
        lambda x, p: torch.distributions.Normal(x, p.exp()).log_prob(x.sin()),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "an axis by its number": (
        lambda x, p: x * p.permute(0),
        lambda x, p: x * p,
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "complex for a while": (
        lambda x, p: x * torch.view_as_real(p.to(torch.complex128) + 1j).sum(-1),
        lambda x, p: x * (p + 1),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "two, one of them turned": (
        lambda x, p, q: x * (p + q.mT),
        lambda x, p, q: x * (p + q.mT),
        [(2, 4), (4, 2)],
        SEQUENCE,
        (3,),
    ),
    "slopes": (
        lambda x, p: x * (p[:, None] * torch.arange(1, 5)),
        lambda x, p: x * (p.mT * torch.arange(1, 5)),
        [(2,)],
        SEQUENCE,
        (3, 4),
    ),
    "entries repeated": (
        lambda x, p: x * p.repeat_interleave(2),
        lambda x, p: x * p.mT.flatten(-2),
        [(2,)],
        SEQUENCE,
        (3, 2, 2),
    ),
    "a diagonal matrix": (
        lambda x, p: x @ torch.diag(p.exp()),
        lambda x, p: x * p.exp(),
        [(4,)],
        SEQUENCE,
        (3, 2),
    ),
    "a triangle": (
        lambda x, p: x @ p.exp().tril(),
        lambda x, p: (x[..., None, :] @ p.exp().tril())[..., 0, :],
        [(4, 4)],
        SEQUENCE,
        (3, 2),
    ),
    "bounds": (
        lambda x, p, q: torch.min(torch.maximum(x, p), q),
        lambda x, p, q: torch.min(torch.maximum(x, p), q),
        [(4,), (4,)],
        SEQUENCE,
        (3, 2),
    ),
    "a sum of entries": (
        lambda x, p: x * p.exp().sum(0),
        lambda x, p: x * p.exp().sum(-2),
        [(3, 4)],
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


@pytest.mark.parametrize("function", [torch.maximum, torch.min])
def test_bounds_that_rows_are_equal_to_have_half_of_the_gradient(function):
    class Bounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.bound = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.layer(function(x, self.bound))

    torch.manual_seed(0)
    model, x = Bounded().double(), torch.tensor([[0.0, 0.0], [-1.0, 1.0], [1.0, 0.0]]).double()
    kfac = KFAC(model)
    model(x).sum().backward()
    (slot,) = [c.A for c in kfac._engine.capture.by_layer if c.layer.name == "bound"]
    weight = model.layer.weight.detach()[0]
    halves = 0.5 * (x == 0) + (function(x, torch.zeros(1).double()) != x)
    torch.testing.assert_close(slot.grad, (halves * weight).square().sum()[None])


@pytest.mark.parametrize(
    "name", ["x exp(p)", "gate", "gate of a sigmoid and more", "two gates, of halves"]
)
def test_what_is_noted_of_products_goes_with_the_step(name):
    operation, _, shapes, shape, _ = FREE[name]
    x = numbers(*shape)
    model = double(lambda: Free(operation, shapes, x))
    kfac = KFAC(model, kl_clip=None)
    gc.collect()
    gc.disable()
    try:
        loss_of(model(x)).backward()
        kfac.step()
        assert not [one for one in gc.get_objects() if type(one) is Member]
    finally:
        gc.enable()


class Slopes(nn.Module):
    """ALiBi's, learned: a number for each head times distances, kept or made in the forward."""

    def __init__(self, distances):
        super().__init__()
        self.slopes, self.qk, self.head = nn.Parameter(numbers(2)), nn.Linear(4, 8), nn.Linear(4, 3)
        self.register_buffer("kept", (torch.arange(5)[:, None] - torch.arange(5)).abs().double())
        self.distances = distances

    def forward(self, x):
        q, k = (z.unflatten(-1, (2, 2)).transpose(1, 2) for z in self.qk(x).chunk(2, -1))
        scores = q @ k.mT - self.slopes[:, None, None] * self.distances(self)
        return self.head(torch.tanh((scores.softmax(-1) @ k).transpose(1, 2).flatten(-2))).mean(1)


@pytest.mark.parametrize(
    "distances",
    [
        lambda module: (torch.arange(5)[:, None] - torch.arange(5)).abs(),
        lambda module: module.kept + torch.zeros(5),
        lambda module: torch.cat([module.kept[:2], module.kept[2:]]),
        lambda module: torch.stack([module.kept, module.kept]).mean(0),
    ],
    ids=["made", "changed", "joined", "stacked"],
)
def test_numbers_that_a_forward_makes_are_no_rows_either(distances):
    found = []
    for how in (lambda module: module.kept, distances):
        model = double(lambda how=how: Slopes(how))
        A, G = held(stepped(model, numbers(6, 5, 4)))["slopes"]
        found.append(A * G[:, 0])
    assert_close(*found)


OF_ENTRIES = {
    "p ** 3": lambda p: p**3,
    "p ** -1": lambda p: torch.pow(p, -1),
    "p.pow(1.5)": lambda p: p.abs().pow(1.5),
    "2 ** p": lambda p: 2**p,
    "log1p": lambda p: p.square().log1p(),
    "expm1": torch.expm1,
    "sin": torch.sin,
    "cos": lambda p: p.cos(),
    "erf": torch.erf,
    "silu": F.silu,
    "elu": lambda p: F.elu(p, alpha=0.5),
    "leaky_relu": nn.LeakyReLU(0.3),
    "logsigmoid": F.logsigmoid,
    "softplus": nn.Softplus(beta=2.0),
    "softplus, linear": lambda p: F.softplus(p, 3.0, 1.0),
    "maximum": lambda p: torch.maximum(p, torch.zeros_like(p)),
    "exponent by name": lambda p: torch.pow(p, exponent=2),
    "maximum of equals": lambda p: torch.maximum(p, p.detach()),
    "masked_fill with what it was": lambda p: (
        1 + (p - p.detach()).masked_fill(torch.arange(4) == 2, 0.0)
    ),
    "masked_fill": lambda p: p.exp().masked_fill(torch.arange(4) == 2, 0.3),
}


@pytest.mark.parametrize("name", OF_ENTRIES)
def test_functions_of_each_entry_are_followed(name):
    function, x = OF_ENTRIES[name], numbers(*SEQUENCE)
    model = double(lambda: Free(lambda x, p: x * function(p), [(4,)], x))
    p = model.own[0].detach().expand(3, 2, 4).clone().requires_grad_()
    loss_of(model.after(x * function(p))).backward()
    A, G = held(stepped(model, x))["own.0"]
    assert_close(A * G[:, 0], 3 * p.grad.square().sum((0, 1)).reshape(1, -1))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("name", ["p ** 3", "p ** -1", "p.pow(1.5)", "2 ** p"])
def test_powers_are_followed_in_graphs_too(name):
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0]))

        def forward(self, x):
            return x * OF_ENTRIES[name](self.own)

    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = double(lambda: nn.Sequential(nn.Linear(4, 4), Alone()))
        kfac = KFAC(model)
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        loss_of(model(numbers(5, 4))).backward()
        kfac.step()
        A, G = held(kfac)["1.own"]
        found.append(A * G[:, 0])
    assert_close(*found)


@pytest.mark.parametrize(
    "how",
    [lambda x, p: torch.clamp(p, min=x) + p, lambda x, p: x * F.silu(2 * p, inplace=True) + p],
    ids=["of rows, too", "in place"],
)
def test_a_function_of_entries_that_is_not_understood_is_named(how):
    model = double(lambda: Free(how, [(4,)], numbers(*SEQUENCE)))
    kfac = KFAC(model)
    model(numbers(*SEQUENCE)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'own.0'"):
        kfac.step()


@pytest.mark.parametrize(
    "name", ["x + p", "x * p", "p - x", "scalar", "token", "positions", "gamma", "gate"]
)
def test_reduce_sums_a_parameters_gradient_over_each_example(name):
    operation, by_row, shapes, shape, rows = FREE[name]
    x = numbers(*shape)
    model = double(lambda: Free(operation, shapes, x))
    per_row = [p.detach().expand(*rows, *p.shape).clone().requires_grad_() for p in model.own]
    loss_of(model.after(by_row(x, *per_row)), "sum").backward()
    factors = held(stepped(model, x, reduction="sum", weight_sharing="reduce"))
    for i, p in enumerate(per_row):
        A, G = factors[f"own.{i}"]
        inner = tuple(range(1, len(rows)))
        of_examples = p.grad.sum(inner) if inner else p.grad
        assert_close(A * G[:, 0], of_examples.square().sum(0).reshape(1, -1))


class Masked(nn.Module):
    """Matrices that are put together of parameters and buffers before they meet x."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.w = nn.Parameter(0.5 * numbers(4, 3, seed=1))
        self.register_buffer("mask", (numbers(4, 3, seed=2) > 0).double() + 0.5)
        self.u, self.v = (nn.Parameter(numbers(*s, seed=5)) for s in ((4, 2), (2, 3)))
        self.root = nn.Parameter(numbers(4, 4, seed=6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "mask":
            return x @ (self.w * (2 * self.mask))
        if self.kind == "shift":
            return x @ (self.w - self.mask.exp())
        if self.kind == "square":
            return x @ (self.w + self.root @ self.root @ self.mask)
        return x @ (self.w + self.u @ self.v)


@pytest.mark.parametrize("kind", ["mask", "shift", "adapter", "square"])
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
    kfac = stepped(model, x, reduction="sum")
    A, G = held(kfac)["w"]
    assert_close(A * G[:, 0], per_row.square().sum(0).reshape(1, -1))
    assert all(kfac.routing()[name].treatment == "waiting" for name in ("u", "v", "root"))


class Features(nn.Module):
    """Data that a module holds itself, by itself and in what is written into."""

    def __init__(self, kind: str, x: torch.Tensor) -> None:
        super().__init__()
        self.kind, self.w = kind, nn.Parameter(0.5 * numbers(4, 3, seed=1))
        self.register_buffer("x", x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "data":
            return self.x @ (1 + self.w)  # more than a product: else it were a layer's weight
        out = torch.zeros_like(self.x)
        if self.kind == "in place":
            out += x
        else:
            out[:, :] = x
        return out @ (1 + self.w)


@pytest.mark.parametrize("kind", ["data", "in place", "set"])
def test_data_in_a_buffer_has_rows(kind):
    x = numbers(6, 4)
    model = double(lambda: Features(kind, x))
    y = (x @ (1 + model.w)).detach().requires_grad_()
    loss_of(y, "sum").backward()
    per_row = x[:, :, None] * y.grad[:, None, :]
    A, G = held(stepped(model, x.clone().requires_grad_(), reduction="sum"))["w"]
    assert_close(A * G[:, 0], per_row.square().sum(0).reshape(1, -1))


class Noisy(nn.Module):
    """Noise that is a module's own, and no buffer."""

    def __init__(self):
        super().__init__()
        self.mean, self.deviation = (
            nn.Parameter(numbers(3, 4, seed=1)),
            nn.Parameter(numbers(3, 4, seed=2)),
        )
        self.noise = numbers(3, 4, seed=3)

    def forward(self, x):
        return F.linear(x, self.mean + self.deviation * self.noise)


def test_what_a_module_keeps_in_the_shape_of_its_parameters_has_no_rows():
    model, x = double(Noisy), numbers(6, 4)
    y = model(x).detach().requires_grad_()
    loss_of(y, "sum").backward()
    per_row = y.grad[:, :, None] * x[:, None, :]
    factors = held(stepped(model, x.clone().requires_grad_(), reduction="sum"))
    for name, factor in (("mean", 1.0), ("deviation", model.noise)):
        A, G = factors[name]
        assert_close(A * G[:, 0], (per_row * factor).square().sum(0).reshape(1, -1))


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


class Scaled(nn.Module):
    """A layer norm, and a scale of the module's own."""

    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(numbers(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(x) * self.scale))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batches_of_other_sizes_and_in_other_parts_average_like_any(reduction):
    """An epoch's last batch is smaller; the number of micro-batches may change on the way."""
    model = double(Scaled)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_reduction=reduction)
    expected = {"norm": [], "scale": []}
    for seed, (size, parts) in enumerate([(12, 1), (3, 1), (12, 4), (24, 2)]):
        kfac.zero_grad()
        batch = numbers(size, 4, seed=seed)
        for x in batch.chunk(parts):
            (loss_of(model(x), reduction) / (parts if reduction == "mean" else 1)).backward()
        kfac.step()
        weights = model.norm.weight, model.norm.bias, model.scale
        gradients = [torch.autograd.grad(loss_of(model(x), "sum"), weights) for x in batch.split(1)]
        of_weight, of_bias, of_scale = (torch.stack(g) for g in zip(*gradients, strict=True))
        of_unit = torch.stack([of_weight, of_bias], -1)
        of_all = torch.sum if reduction == "sum" else torch.mean
        expected["norm"].append(of_all(of_unit[..., None] * of_unit[..., None, :], 0).numpy())
        expected["scale"].append(of_all(of_scale.square(), 0).numpy())
    for name, (A, G) in held(kfac).items():
        if name in expected:
            product = (A * G.reshape(-1, *(1,) * (A.ndim - 1))).reshape(expected[name][0].shape)
            assert_close(product, weighted_mean(expected[name], 0.95))


class Last(nn.Module):
    """A linear layer with a mask, or with noise in its weights (NoisyNet), behind all others."""

    def __init__(self, noisy):
        super().__init__()
        self.body, self.noisy = nn.Linear(4, 5), noisy
        self.weight, self.bias = nn.Parameter(numbers(3, 5, seed=1)), nn.Parameter(numbers(3, seed=2))
        self.register_buffer("by_weight", numbers(3, 5, seed=3))
        self.register_buffer("by_bias", numbers(3, seed=4))
        if noisy:
            self.of_weight, self.of_bias = nn.Parameter(numbers(3, 5)), nn.Parameter(numbers(3))

    def forward(self, x):
        weight, bias = self.weight * (self.by_weight > 0), self.bias
        if self.noisy:
            weight, bias = (
                self.weight + self.of_weight * self.by_weight,
                bias + self.of_bias * self.by_bias,
            )
        return F.linear(torch.tanh(self.body(x)), weight, bias)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("discard", [True, False])
def test_what_a_backward_pass_comes_to_first_is_kept_in_every_step(noisy, parts, discard):
    """Probes of a weight and a bias are behind one output, before the bias itself has a gradient."""
    model = double(lambda: Last(noisy))
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0))
    names = [name for name, _ in model.named_parameters() if "body" not in name]
    own, expected = [model.get_parameter(name) for name in names], {name: [] for name in names}
    for seed in range(4):
        kfac.zero_grad()
        batch = numbers(6, 4, seed=seed)
        if discard:
            loss_of(model(3 * batch)).backward()
            model.zero_grad()
        for x in batch.chunk(parts):
            (loss_of(model(x)) / parts).backward()
        kfac.step()
        gradients = [torch.autograd.grad(loss_of(model(x), "sum"), own) for x in batch.split(1)]
        for name, found in zip(names, zip(*gradients, strict=True), strict=True):
            expected[name].append(torch.stack(found).square().mean(0).flatten().numpy())
    for name, (A, G) in held(kfac).items():
        if name in expected:
            assert_close((A * G.reshape(1, 1))[0], weighted_mean(expected[name], 0.95))


class Experts(nn.Module):
    """One of three for each example, with all their weights in stacks."""

    def __init__(self, function):
        super().__init__()
        self.up, self.down = (nn.Parameter(numbers(3, 8, 4, seed=i)) for i in (1, 2))
        self.shift, self.function = nn.Parameter(numbers(3, 8, seed=3)), function

    def forward(self, x):
        chosen, order = x[:, :3].argmax(1).sort()
        ends = (chosen[:, None] == torch.arange(3)).sum(0).cumsum(0, dtype=torch.int32)
        y = self.function(x[order], self.up.transpose(1, 2), offs=ends)
        y.add_(self.shift[chosen])
        return self.function(torch.tanh(y), self.down, offs=ends)[order.argsort()]


def assert_squares_of_each_examples_gradient(model, kfac, x, tolerance):
    factors = held(kfac)
    for name in ("up", "down", "shift"):
        weight = model[0].get_parameter(name)
        gradients = [torch.autograd.grad(loss_of(model(one), "sum"), weight)[0] for one in x.split(1)]
        expected = torch.stack(gradients).square().sum(0).reshape(1, -1)
        A, G = factors[f"0.{name}"]
        torch.testing.assert_close(A * G[:, 0], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("how", ["whole", "in parts", "checkpointed", "compiled"])
def test_experts_have_the_squares_of_each_examples_gradient(how):
    model = double(lambda: nn.Sequential(Experts(OPERATOR), nn.Tanh(), nn.Linear(4, 3)))
    kfac, x = KFAC(model, kl_clip=None, loss_reduction="sum"), numbers(13, 4)
    run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    for part in x.split([2, 10, 1]) if how == "in parts" else [x]:
        if how == "checkpointed":
            y = model[1:](checkpoint(model[0], part, use_reentrant=False))
        else:
            y = run(part)
        loss_of(y, "sum").backward()
    kfac.step()
    assert all(route.treatment == "kfac" for route in kfac.routing())
    kfac.detach()
    assert_squares_of_each_examples_gradient(model, kfac, x, 1e-12)


class Blocks(nn.Module):
    """A token, positions and scales, with layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Linear(4, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(1, 6, 6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.positions
        for _ in range(2):
            x = x + self.scale * torch.tanh(self.linear(self.norm(x)))
        return self.head(x[:, 0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile breaks off at each parameter")
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_compiled_model_stays_whole(backend):
    torch._dynamo.reset()
    model, x = double(Blocks), numbers(5, 5, 4)
    models = model, copy.deepcopy(model)
    for one in models:
        kfac = KFAC(one, torch.optim.SGD(one.parameters(), lr=0.1), damping=0.01)
        run = torch.compile(one, backend=backend, fullgraph=True) if one is model else one
        for _ in range(4):
            kfac.zero_grad()
            run(x).square().mean().backward()
            kfac.step()
        assert all(route.treatment == "kfac" for route in kfac.routing())
    for got, expected in zip(*(one.parameters() for one in models), strict=True):
        assert_close(got.detach(), expected.detach(), 1e-9)


@pytest.mark.parametrize("place", [torch, F], ids=["_grouped_mm", "grouped_mm"])
def test_torchs_own_grouped_product_is_one(place):
    function = getattr(place, "grouped_mm" if place is F else "_grouped_mm", None)
    model, x = (
        nn.Sequential(Experts(function), nn.Tanh(), nn.Linear(4, 3)).float(),
        numbers(13, 4).float(),
    )
    try:
        model(x)
    except (TypeError, RuntimeError):
        pytest.skip("torch has none for this device")
    kfac = stepped(model, x, reduction="sum")
    kfac.detach()
    assert_squares_of_each_examples_gradient(model, kfac, x, 1e-4)


def test_a_grouped_product_that_is_not_understood_is_reported():
    """Rows that are a parameter."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(numbers(6, 4))
            self.register_buffer("experts", numbers(3, 4, 2))

        def forward(self, x):
            return x + OPERATOR(self.rows, self.experts, ENDS)

    model = nn.Sequential(nn.Linear(2, 2), Rows()).double()
    kfac = KFAC(model)
    loss_of(model(numbers(6, 2))).backward()
    with (
        pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'1.rows'"),
        pytest.warns(RuntimeWarning, match="not seen running.*'1.rows'"),
    ):
        kfac.step()
    assert kfac.routing()["1.rows"].treatment == "waiting"


@pytest.mark.parametrize("kind", [nn.Module, nn.Linear])
def test_a_gain_of_a_matrix_is_reported(kind):
    """Its gradient is a sum over the matrix's row, of which squares tell nothing."""

    class Gained(kind):
        def __init__(self):
            super().__init__(*((4, 3, False) if kind is nn.Linear else ()))
            self.weight = nn.Parameter(numbers(3, 4))
            self.gain = nn.Parameter(numbers(3))

        def forward(self, x):
            return F.linear(x, self.weight * self.gain[:, None])

    model = nn.Sequential(nn.Linear(2, 4), Gained(), nn.Linear(3, 2)).double()
    kfac = KFAC(model)
    model(numbers(6, 2)).square().sum().backward()
    with (
        pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'1.gain'"),
        pytest.warns(RuntimeWarning, match="not seen running.*'1.gain'"),
    ):
        kfac.step()
    assert kfac.routing()["1.gain"].treatment == "waiting"


def test_torchs_prelu_has_the_diagonal_of_its_rows_gradients():
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)).double()
    x, own = numbers(6, 3), nn.PReLU(4).double()
    kfac = KFAC(model)
    model(x).square().mean().backward()
    kfac.step()
    h, expected = model[0](x).detach(), torch.zeros(4, dtype=torch.float64)
    for row in h:
        own.zero_grad()
        (model[2](own(row[None])).square().mean() / 6).backward()
        expected += 6 * own.weight.grad.square()
    assert_close(held(kfac)["1.weight"][0].flatten(), expected)


COMPLEX = {  # of x and a parameter (4,)
    "quotient": lambda x, p: x * (p / torch.full((4,), 1j)),
    "function": lambda x, p: x * torch.exp(p + 1j),
    "number": lambda x, p: x * (p * (1 + 1j)),
    "factor": lambda x, p: x * (p * torch.full((4,), 1j)),
    "matrix": lambda x, p: torch.einsum("bi,ij->bj", x + 0j, torch.diag(p).to(torch.complex128).conj()),
    "product": lambda x, p: torch.fft.fft(x) @ p.view(2, 2).to(torch.complex128).repeat(2, 2),
}


@pytest.mark.parametrize("how", COMPLEX)
def test_complex_uses_that_are_not_understood_are_reported_and_leave_the_gradient_alone(how):
    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(numbers(4))

        def forward(self, x):
            return torch.view_as_real(COMPLEX[how](x, self.phase)).flatten(1)

    model = nn.Sequential(nn.Linear(2, 4), Rotated(), nn.Linear(8, 2)).double()
    x, expected = numbers(6, 2), copy.deepcopy(model)
    kfac = KFAC(model, kl_clip=None)
    for m in (model, expected):
        m(x).square().sum().backward()
    with (
        pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'1.phase'"),
        pytest.warns(RuntimeWarning, match="not seen running.*'1.phase'"),
    ):
        kfac.step()
    assert kfac.routing()["1.phase"].treatment == "waiting"
    assert_close(model[1].phase.grad, expected[1].phase.grad)


class Magnitudes(nn.Module):
    """A low-rank change of a frozen layer, whose rows have magnitudes of their own (Liu et al. 2024)."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.magnitude = nn.Parameter(1 + numbers(3).abs())

    def forward(self, x):
        weight = self.base.weight + self.up.weight.detach() @ self.down.weight.detach()
        scale = (self.magnitude / weight.norm(dim=1)).view(1, -1)
        return (scale - 1) * F.linear(x, weight) + self.base(x)


def test_magnitudes_over_the_norms_of_other_modules_weights_have_the_diagonal_of_rows_gradients():
    model = nn.Sequential(nn.Linear(2, 4), Magnitudes(), nn.Linear(3, 2)).double()
    x, expected = numbers(6, 2), 0.0
    for row in x:
        model.zero_grad()
        (model(row[None]).square().sum() / 6).backward()
        expected = expected + 6 * model[1].magnitude.grad.square()
    model.zero_grad()
    kfac = KFAC(model)
    (model(x).square().sum() / 6).backward()
    kfac.step()
    assert_close(held(kfac)["1.magnitude"][0].flatten(), expected)


def test_parameters_that_are_data_have_rows():
    """Latents of each example are none of a layer's weights."""
    found = []
    for are_parameters in (True, False):

        class Around(nn.Module):
            def __init__(self, kind=are_parameters):
                super().__init__()
                self.latents = nn.Parameter(numbers(6, 4)) if kind else numbers(6, 4)
                self.scaled = OwnScale()
                self.head = nn.Linear(4, 2)

            def forward(self, x):
                return self.head(self.scaled(x) + self.scaled(torch.tanh(self.latents)))

        torch.manual_seed(0)
        model = Around().double()
        kfac = KFAC(model, kl_clip=None)
        model(numbers(6, 4)).square().mean().backward()
        kfac.step()
        found.append(held(kfac)["scaled.scale"])
    assert all(map(torch.equal, *found))


def test_squares_of_derivatives_in_half_precision_do_not_overflow():
    model = nn.Sequential(nn.Linear(2, 4), Inverse(), nn.Linear(4, 1)).half()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [p.clone() for p in model.parameters()]
    model(numbers(6, 2).half()).square().mean().backward()
    kfac.step()
    assert kfac.skipped_steps == 0
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    "split", [lambda x: x.chunk(2)[1], lambda x: x.view(2, 4).unbind()[1]], ids=["chunk", "unbind"]
)
def test_parts_of_a_buffer_have_no_rows(split):
    class Scaled(nn.Module):
        def __init__(self, split):
            super().__init__()
            self.scale, self.split = nn.Parameter(1 + numbers(4).abs()), split
            self.register_buffer("table", numbers(8))

        def forward(self, x):
            return x * (self.scale * self.split(self.table))

    found = []
    for one in (split, lambda x: x[4:]):
        model = nn.Sequential(nn.Linear(2, 4), double(lambda one=one: Scaled(one)), nn.Linear(4, 2))
        torch.manual_seed(0)
        for p in (*model[0].parameters(), *model[2].parameters()):
            nn.init.normal_(p)
        found.append(held(stepped(model.double(), numbers(6, 2)))["1.scale"])
    assert all(map(torch.equal, *found))


class OwnScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(1 + numbers(4).abs())

    def forward(self, x):
        return x * self.scale


class Inverse(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.05))

    def forward(self, x):
        return x * (1 / self.scale)


COMPILES = pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile does not trace modes")
WRITTEN_OTHERWISE = ["a vector's products", "a vector in front", "torch.mv", "torch.inner",
                     "torch.outer", "torch.baddbmm", "einsum of each entry",
                     "einsum of each entry of an example", "einsum with a vector for each head",
                     "einsum with experts' matrices", "positions by index_select",
                     "positions by gather", "positions by F.embedding", "places turned",
                     "entries repeated", "a diagonal matrix", "a sum of entries",
                     "slopes", "two, one of them turned", "x @ W.T", "W @ x",
                     "a distribution's scale", "tensordot along two axes"]  # fmt: skip


def assert_compiles(operation, shapes, x):
    """A compiled model has the trajectory of the same uncompiled."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = double(lambda: Free(operation, shapes, x))
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), kl_clip=None)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for _ in range(2):
            kfac.zero_grad()
            run(x).square().mean().backward()
            kfac.step()
        found.append(list(model.parameters()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@COMPILES
@pytest.mark.parametrize("name", WRITTEN_OTHERWISE)
def test_products_and_views_that_are_written_otherwise_compile(name):
    operation, _, shapes, shape, _ = FREE[name]
    assert_compiles(operation, shapes, numbers(*shape))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@COMPILES
def test_functions_of_each_entry_compile():
    def operation(x, *own):
        for function, p in zip(OF_ENTRIES.values(), own, strict=True):
            x = torch.tanh(x * function(p) + 1)
        return x

    assert_compiles(operation, [(4,)] * len(OF_ENTRIES), numbers(*SEQUENCE))


@pytest.mark.parametrize(
    "how",
    [
        lambda x, p: x + F.embedding(PLACES, p, max_norm=1.0),
        lambda x, p: x @ torch.einsum("ii->i", p[:4])[:, None],
        lambda x, p: p.T @ torch.ones(5, dtype=torch.float64) + x,
    ],
    ids=["renewed rows", "a diagonal", "no rows"],
)
def test_what_is_written_otherwise_and_not_understood_is_named(how):
    x = numbers(*SEQUENCE)
    model = double(lambda: Free(lambda x, p: how(x, p) + p[0], [(5, 4)], x))
    kfac = KFAC(model)
    model(x).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'own.0'"):
        kfac.step()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("how", ["1 - p", "1 / p", "2 / (1 + exp(-p))"])
def test_numbers_less_and_over_parameters_compile(how):
    torch._dynamo.reset()

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(1 + numbers(4).abs())

        def forward(self, x):
            p = self.gate
            return (
                x
                * {"1 - p": lambda: 1 - p, "1 / p": lambda: 1 / p}.get(
                    how, lambda: 2 / (1 + torch.exp(-p))
                )()
            )

    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), Gated(), nn.Linear(4, 1)).double()
        kfac = KFAC(model, kl_clip=None)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(numbers(6, 2)).square().mean().backward()
        kfac.step()
        found.append(held(kfac)["1.gate"][0])
    assert_close(found[1], found[0])


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_quotients_in_derivatives_are_reported(place):
    class Divided(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(1 + numbers(4).abs())

        def forward(self, x):
            return torch.tanh(x / self.scale if place else self.scale / (1 + x * x))

    model = nn.Sequential(nn.Linear(2, 4), Divided(), nn.Linear(4, 1)).double()
    x = numbers(6, 2).requires_grad_()
    kfac = KFAC(model)
    (slopes,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slopes.square().mean().backward()
    with pytest.warns(RuntimeWarning, match="what a loss of them owes.*'1.scale'"):
        kfac.step()


class OfComplexRows(nn.Linear):
    def forward(self, x):
        return F.linear(torch.fft.fft(x), self.weight.to(torch.complex128)).real


def test_a_layer_of_complex_rows_is_reported():
    model = nn.Sequential(nn.Linear(2, 4), OfComplexRows(4, 3, bias=False), nn.Linear(3, 2)).double()
    kfac = KFAC(model)
    model(numbers(6, 2)).square().sum().backward()
    with (
        pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'1'"),
        pytest.warns(RuntimeWarning, match="not seen running.*'1'"),
    ):
        kfac.step()
    assert kfac.routing()["1.weight"].treatment == "waiting"


@pytest.mark.parametrize("transform", [lambda f: torch.vmap(torch.func.grad(f)), torch.vmap])
@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:statistics miss some uses:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:these layers ran where:RuntimeWarning")
def test_what_transforms_within_a_forward_make_of_a_parameter_is_not_followed(transform):
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.scale = nn.Parameter(numbers(4, 4)), nn.Parameter(numbers(4, seed=1))
            self.after = nn.Linear(4, 3)

        def energy(self, x):
            return torch.tanh(self.scale * (x @ self.w)).sum(-1)

        def forward(self, x):
            return self.after(x * transform(self.energy)(x).reshape(len(x), -1))

    x, model, plain = numbers(6, 4), double(Energy), double(Energy)
    plain.load_state_dict(model.state_dict())
    kfac = KFAC(model, kl_clip=None)
    for one in (model, plain):
        loss_of(one(x), "mean").backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    kfac.step()
    assert kfac.routing()["after.weight"].treatment == "kfac"


@pytest.mark.parametrize("how", [torch.slogdet, torch.linalg.eigh, torch.linalg.qr])
def test_functions_with_several_results_are_named(how):
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.after = nn.Parameter(torch.eye(4) + 0.1 * numbers(4, 4)), nn.Linear(4, 3)

        def forward(self, x):
            return self.after(x @ self.w) + how(self.w)[1].sum()

    x, model = numbers(6, 4), double(Flow)
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'w'"):
        kfac = stepped(model, x)
    assert kfac.routing()["w"].treatment == "kfac"


@pytest.mark.parametrize(
    "how", [lambda x, p: torch.cat([x, p[None]]), lambda x, p: torch.lerp(x, end=p, weight=0.5)]
)
def test_uses_in_a_list_with_rows_and_by_name_are_named(how):
    class Used(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.after = nn.Parameter(numbers(4)), nn.Linear(4, 3)

        def forward(self, x):
            return self.after(how(x + self.own, self.own))

    x, model = numbers(6, 4), double(Used)
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'own'"):
        stepped(model, x)


def test_the_third_operand_of_an_einsum_is_a_use_that_is_missed():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(numbers(4))

        def forward(self, x):
            return torch.einsum("bi,bi,i->bi", x, x, self.gain) + self.gain

    model = nn.Sequential(nn.Linear(2, 4), Weighted(), nn.Linear(4, 2)).double()
    kfac = KFAC(model)
    model(numbers(6, 2)).square().sum().backward()
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'1.gain'"):
        kfac.step()


class ThroughAView(nn.Module):
    """A copy of a parameter is changed through a view of it, or in some places."""

    def __init__(self, how):
        super().__init__()
        self.how, self.scale, self.head = how, nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, x):
        scale = self.scale.clone()
        if self.how == "view":
            scale[:3].mul_(0.1)
        elif self.how == "reshaped":
            scale.view(2, 3).mul_(0.1)
        else:
            scale[3:] = 0
        return self.head(torch.tanh(x * scale))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=COMPILES)], ids=["", "compiled"])
@pytest.mark.parametrize("how", ["view", "reshaped", "set"])
def test_a_copy_that_is_changed_through_a_view_is_not_followed_and_named(how, compiled):
    torch._dynamo.reset()
    model = double(lambda: ThroughAView(how))
    kfac = KFAC(model, kl_clip=None)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    loss_of(run(numbers(5, 6))).backward()
    expected = model.scale.grad.clone()
    with pytest.warns(RuntimeWarning) as given:
        kfac.step()
    assert any("miss some uses" in str(w.message) and "'scale'" in str(w.message) for w in given)
    torch.testing.assert_close(model.scale.grad, expected, rtol=0, atol=0)


class TwiceInside(nn.Module):
    """A cast of positions, cut to a length, while modules around watch for lookups."""

    def __init__(self):
        super().__init__()
        self.table, self.positions = nn.Embedding(7, 4), nn.Parameter(torch.randn(1, 9, 4))
        self.head = nn.Linear(4, 7)

    def forward(self, x):
        h = self.table(x) + self.table(torch.arange(x.shape[1]))
        h = (
            h
            + self.positions.double()[:, : x.shape[1]]
            + self.positions.clone().view(9, 4)[: x.shape[1]]
        )
        return self.head(torch.tanh(h).float())


def test_modes_that_look_at_one_another_give_no_warning():
    model = TwiceInside()
    kfac = KFAC(model)
    loss_of(model(torch.randint(7, (6, 5))).flatten(0, 1)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac.step()


class MaskedHead(nn.Module):
    """Tokens, their mean, and a head that is no layer: a parameter times a mask."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how, self.tokens = how, nn.Linear(4, 5)
        self.weight, self.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))
        self.register_buffer("mask", torch.ones(5, 3))

    def forward(self, x):
        return HEADS[self.how](torch.tanh(self.tokens(x)).mean(1), self.weight * self.mask, self.bias)


HEADS = {
    "product": lambda z, w, b: z @ w,
    "left product": lambda z, w, b: (w.transpose(0, 1) @ z.mT).mT,
    "function": lambda z, w, b: F.linear(z, w.transpose(0, 1), b),
    "sum of both": lambda z, w, b: torch.addmm(b, z, w),
    "einsum": lambda z, w, b: torch.einsum("bi,io->bo", z, w),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("how", ["whole", "in parts", "slopes", "halves", "compiled"])
@pytest.mark.parametrize("head", HEADS)
def test_a_product_with_a_free_parameter_may_be_what_the_loss_has_its_terms_of(head, how):
    torch.manual_seed(0)
    model = MaskedHead(head).double()
    kfac = KFAC(model)
    x = torch.randn(6, 7, 4, dtype=torch.float64, requires_grad=how == "slopes")
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    for part in x.split([2, 4] if how == "in parts" else [6]):
        losses = run(part).square().sum(1)
        if how == "slopes":
            (slopes,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
            losses = losses + slopes.square().sum((1, 2))
        if how == "halves":
            losses[:3].mean().backward(retain_graph=True)
            losses[3:].mean().backward()
        else:
            losses.mean().backward()
    kfac.step()
    assert kfac.counted_terms == 6


class FreeLast(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.how, self.tokens, self.head = how, nn.Linear(4, 5), nn.Linear(5, 3)
        self.weight, self.noise = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.zeros(5, 3))
        self.square = nn.Parameter(torch.randn(5, 5))
        self.register_buffer("sides", torch.randn(3, 5))

    def forward(self, x):
        z, weight = torch.tanh(self.tokens(x)), self.weight + self.noise
        if self.how == "tied":
            return torch.tanh(z @ weight) @ weight.t()
        if self.how == "symmetric":
            return z @ (self.square + self.square.T)
        if self.how == "once for all":
            return self.head(z) + (self.sides @ weight).sum(1)
        return torch.tanh(self.head(z))[:, None] * (weight.t() @ z[:, :, None]).mT


@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.filterwarnings("ignore:these layers ran once for all examples:RuntimeWarning")  # it did
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["tied", "symmetric", "once for all", "mixed"])
def test_terms_are_of_one_use_of_a_free_parameter_and_of_rows(how, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = FreeLast(how).double()
    kfac = KFAC(model)
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    model(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()
    kfac.step()
    assert kfac.counted_terms == 6


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4).double()), nn.Parameter(torch.zeros(4).double())

    def forward(self, x):
        return x * self.a + self.b


def test_a_model_without_a_layer_warns_that_nothing_tells_of_terms():
    x, factors = torch.randn(16, 4, dtype=torch.float64), []
    for terms in (None, 16):
        torch.manual_seed(0)
        model = Alone()
        kfac = KFAC(model, kl_clip=None, terms=terms)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                kfac.zero_grad()
                model(x).square().sum(-1).mean().backward()
                kfac.step()
        found = [str(w.message) for w in said if "how many terms the loss is" in str(w.message)]
        assert len(found) == (terms is None)
        assert float(kfac.counted_terms) == (terms or 1)
        factors.append(model.a.grad)
    assert not torch.allclose(*factors)
