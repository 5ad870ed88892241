"""A model that adds positions to tokens, and its gradients there, for the tests of their statistics."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import KFAC

VOCABULARY, LENGTH, WIDTH, EXAMPLES = 11, 6, 4, 10


class AddsPositions(nn.Module):
    def __init__(self, positions: nn.Module) -> None:
        """`positions`: of tokens, (examples, LENGTH, WIDTH), the sum with positions."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), positions
        self.mixed, self.hidden = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x):
        h = self.at_sum(self.positions(self.tokens(x)))
        return self.head(torch.tanh(self.hidden(h + torch.tanh(self.mixed(h)))))

    def at_sum(self, h):
        return h


def loss_of(model, x):
    return F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())


def gradient_at_sum(model, x):
    """(examples, LENGTH, WIDTH), of a mean loss."""
    found = []
    model.at_sum = lambda h: found.append(h) or h
    loss = loss_of(model, x)
    del model.at_sum
    return torch.autograd.grad(loss, found)[0]


def stepped(model, x, compiled=False):
    """K-FAC after one step."""
    torch._dynamo.reset()
    kfac = KFAC(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    loss_of(run, x).backward()
    kfac.step()
    return kfac
