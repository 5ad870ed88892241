"""A layer's rows (a, g) written out as loops, and what K-FAC holds, for the tests of its statistics."""

from __future__ import annotations

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

from conftest import assert_close
from oracles import convolution_rows
from suite.torch import KFAC

Tensor = torch.Tensor
REDUCTIONS = ("mean", "sum")
both_reductions = pytest.mark.parametrize("reduction", REDUCTIONS)


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tokens(*shape, below):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(0))


def double(make):
    torch.manual_seed(0)
    return make().double()


class Net(nn.Module):
    """A layer, tanh, the mean over positions and a linear head: the loss has a term an example."""

    def __init__(self, layer, channels, channels_last=True):
        super().__init__()
        self.layer, self.head, self.channels_last = layer, nn.Linear(channels, 3), channels_last

    def forward(self, *inputs):
        return self.after(self.layer(*inputs))

    def after(self, y):
        y = torch.tanh(y if self.channels_last else y.movedim(1, -1))
        return self.head(y.flatten(1, -2).mean(1) if y.ndim > 2 else y)


def loss_of(f, reduction="mean"):
    """One term for each row of f, none like another."""
    terms = (f.sin() * torch.linspace(1, 2, f.shape[-1], dtype=f.dtype)).sum(-1)
    return terms.mean() if reduction == "mean" else terms.sum()


def watched(model, *inputs, reduction="mean"):
    """The model without K-FAC after a backward pass, and its modules' calls: {name: [(args, y)]}."""
    model, calls = copy.deepcopy(model), {}

    def watch(name):
        def hook(module, args, y):
            if isinstance(y, Tensor) and y.requires_grad:
                y.retain_grad()
                calls.setdefault(name, []).append((args, y))

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(watch(name))
    loss_of(model(*inputs), reduction).backward()
    return model, calls


def stepped(model, *inputs, reduction="mean", steps=1, **options):
    """K-FAC on the model after `steps` equal steps."""
    kfac = KFAC(model, kl_clip=None, loss_reduction=reduction, **options)
    for _ in range(steps):
        model.zero_grad()
        loss_of(model(*inputs), reduction).backward()
        kfac.step()
    return kfac


def held(kfac):
    """{layer: (A, G)}, the running averages; (blocks, n, n), or (blocks, n) of diagonal ones."""
    state = kfac.state_dict()["kfac"]
    found = {}
    for name, record in state["layers"].items():
        source = state["layers"][dict(json.loads(state["inputs"])["inputs"]).get(name, name)]
        pairs = (source["A"], source["A_weight"]), (record["G"], record["G_weight"])
        found[name] = [x / w.reshape(-1, *(1,) * (x.ndim - 1)) for x, w in pairs]
    return found


def assert_sums(factors, a, g, terms):
    """A = Σ a aᵀ / R and G = terms Σ g gᵀ, for rows (blocks, R, d)."""
    for factor, rows, scale in ((factors[0], a, 1 / a.shape[1]), (factors[1], g, terms)):
        expected = scale * sum(torch.einsum("bi,bj->bij", row, row) for row in rows.unbind(1))
        if factor.ndim == 2:
            expected = expected.diagonal(dim1=-2, dim2=-1)
        assert_close(factor, expected)


def dense(factor):
    return torch.diag(factor) if factor.ndim == 1 else factor


def blocks_of(factors):
    """The dense Fisher blocks A ⊗ G over matrices (d_out, d_in) that are vectorised row by row."""
    return [torch.kron(dense(g), dense(a)) for a, g in zip(*factors, strict=True)]


def with_one(rows):
    return torch.cat([rows, torch.ones_like(rows[..., :1])], -1)


def matrices(name, module):
    """Gradients by block: {layer: (blocks, d_out, d_in)}, as their products are written."""
    w = module.weight.grad
    b = module.bias.grad if getattr(module, "bias", None) is not None else None
    inner = f"{name}." if name else ""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        groups = module.groups
        return {name: w.reshape(groups, w.shape[0] // groups, -1).mT, f"{inner}bias": b[None, :, None]}
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        groups = getattr(module, "groups", 1)
        matrix = w.reshape(groups, w.shape[0] // groups, -1)
        column = [] if b is None else [b.reshape(groups, -1, 1)]
        return {name: torch.cat([matrix, *column], -1)}
    if isinstance(module, nn.Embedding):
        return {name: w.T[None]}
    if b is None:
        return {name: w.reshape(1, 1, -1)}
    return {name: torch.stack([w.flatten(), b.flatten()], -1)[:, None]}


# Rows


def linear_rows(layer, args, y):
    a = args[0].reshape(1, -1, args[0].shape[-1])
    return with_one(a) if layer.bias is not None else a, y.grad.reshape(1, -1, y.shape[-1])


def padded(layer, x):
    """What the kernel runs over, as numpy array."""
    pads = [(p, p) for p in layer.padding] if layer.padding != "same" else None
    if pads is None:
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    mode = {"zeros": "constant", "replicate": "edge", "circular": "wrap"}
    return np.pad(x.numpy(), [(0, 0), (0, 0), *pads], mode=mode.get(layer.padding_mode, "reflect"))


def conv_rows(layer, args, y):
    none = [(0, 0)] * len(layer.kernel_size)
    x = padded(layer, args[0])
    rows = convolution_rows(x, layer.kernel_size, layer.stride, none, layer.dilation, layer.groups)
    a = torch.tensor(np.stack(rows))
    width = y.shape[1] // layer.groups
    g = [
        [y.grad[(n, slice(i * width, (i + 1) * width), *place)] for n, place in every_place(y)]
        for i in range(layer.groups)
    ]
    return with_one(a) if layer.bias is not None else a, torch.stack([torch.stack(r) for r in g])


def transposed_rows(layer, args, y):
    """The input's positions are the rows; g is what the kernel at that position can reach."""
    (x,), groups = args, layer.groups
    a, g = [], []
    wide, width = x.shape[1] // groups, y.shape[1] // groups
    for group in range(groups):
        for n, place in every_place(x):
            a.append(x[(n, slice(group * wide, (group + 1) * wide), *place)])
            row = []
            for channel in range(group * width, (group + 1) * width):
                for offset in itertools.product(*map(range, layer.kernel_size)):
                    geometry = zip(
                        place, offset, layer.stride, layer.padding, layer.dilation, strict=True
                    )
                    at = [p * s - pad + o * d for p, o, s, pad, d in geometry]
                    inside = all(0 <= i < size for i, size in zip(at, y.shape[2:], strict=True))
                    row.append(y.grad[(n, channel, *at)] if inside else y.new_zeros(()))
            g.append(torch.stack(row))
    return torch.stack(a).unflatten(0, (groups, -1)), torch.stack(g).unflatten(0, (groups, -1))


def every_place(y):
    return itertools.product(range(len(y)), itertools.product(*map(range, y.shape[2:])))


ROWS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4), linear_rows),
    "linear on sequences": (lambda: nn.Linear(4, 3, bias=False), (3, 2, 4), linear_rows),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), (3, 2, 8), conv_rows),
    "conv1d groups": (lambda: nn.Conv1d(4, 6, 2, groups=2, bias=False), (3, 4, 5), conv_rows),
    "conv2d": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1)),
        (2, 2, 4, 5),
        conv_rows,
    ),
    "conv2d same": (lambda: nn.Conv2d(2, 3, 3, padding="same", dilation=2), (2, 2, 4, 5), conv_rows),
    "conv2d reflect": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"),
        (2, 2, 4, 5),
        conv_rows,
    ),
    "conv2d replicate": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="replicate"),
        (2, 2, 4, 5),
        conv_rows,
    ),
    "conv2d circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"),
        (2, 2, 4, 5),
        conv_rows,
    ),
    "conv2d depthwise": (lambda: nn.Conv2d(3, 3, 2, groups=3), (2, 3, 4, 3), conv_rows),
    "conv3d": (
        lambda: nn.Conv3d(2, 2, 2, stride=(1, 2, 1), padding=(0, 1, 0), groups=2),
        (2, 2, 3, 3, 2),
        conv_rows,
    ),
    "transposed1d": (
        lambda: nn.ConvTranspose1d(3, 2, 3, stride=2, padding=1, output_padding=1, dilation=2),
        (2, 3, 4),
        transposed_rows,
    ),
    "transposed1d short": (lambda: nn.ConvTranspose1d(3, 2, 3, padding=3), (2, 3, 6), transposed_rows),
    "transposed2d": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(3, 2), output_padding=(2, 1), groups=2),
        (2, 4, 2, 3),
        transposed_rows,
    ),
    "transposed3d": (
        lambda: nn.ConvTranspose3d(2, 2, (2, 1, 2), stride=(1, 2, 1), padding=(1, 0, 0)),
        (2, 2, 2, 2, 2),
        transposed_rows,
    ),
}
