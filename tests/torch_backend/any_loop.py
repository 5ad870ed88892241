"""A network for loops that do anything in any order, and K-FAC's equations in NumPy beside it.

The reference runs a forward pass of its own, takes gradients by what its layers return, and keeps sums,
averages and inverses as Martens & Grosse 2015 (arXiv:1503.05671) have them, sections 3, 5 and 6.3.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from suite.torch import KFAC

DECAY = 0.7
HEADS = [("first",), ("second",), ("first", "second"), ("second", "first")]


@dataclass(frozen=True)
class Path:
    """Which layers run, in which order, and in a checkpoint of which kind."""

    heads: tuple[str, ...]
    expert: bool
    reentrant: bool | None = None

    def through_all(self) -> Path:
        """The same with both heads and the experts."""
        others = tuple({"first", "second"} - {*self.heads})
        return Path((*self.heads, *others), True, self.reentrant)


class Net(nn.Module):
    """A layer that runs twice, two experts that run in some passes, and two heads."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.shares = shares
        self.body, self.twice = nn.Linear(3, 4), nn.Linear(4, 4)
        self.gate, self.expert = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, path: Path) -> torch.Tensor:
        h = torch.tanh(self.body(x))
        if path.reentrant is None:
            h = self.inner(h)
        else:
            h = checkpoint(self.inner, h, use_reentrant=path.reentrant)
        if path.expert:
            h = h + torch.sigmoid(self.gate(h)) * self.expert(self.read(h)).tanh_()
        outputs = [getattr(self, head)(self.read(h)) for head in path.heads]
        return sum(y.square().sum() for y in outputs) / len(x)

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.twice(torch.tanh(self.twice(h))))

    def read(self, h: torch.Tensor) -> torch.Tensor:
        """What a layer reads: the same tensor as another, or a copy."""
        return h if self.shares else h.clone()


class Reference:
    """What K-FAC should do, layer by layer; of layers with a bias matrices have a column more."""

    def __init__(self, method: str, of_statistics: int, of_inverses: int, ranks: int = 1) -> None:
        self.method, self.periods, self.ranks = method, (of_statistics, of_inverses), ranks
        self.steps = 0
        self.average: dict[str, tuple[Any, Any, float]] = {}
        self.refreshed: dict[str, tuple[Any, Any, float]] = {}
        self.forget()

    def forget(self) -> None:
        """Of the passes since the last step."""
        self.gradients: dict[str, Any] = {}
        self.sums: dict[str, list[tuple[int, Any, Any]]] = defaultdict(list)  # (rank, inputs, gradients)
        self.terms = [0] * self.ranks

    def backward(self, model: Net, x: torch.Tensor, path: Path, scale: float, rank: int = 0) -> None:
        """One pass of a rank, whose gradients are averaged over ranks."""
        calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []

        def run(name: str, x: torch.Tensor) -> torch.Tensor:
            layer = getattr(model, name)
            y = x @ layer.weight.detach().T
            if layer.bias is not None:
                y = y + layer.bias.detach()
            y.requires_grad_()
            calls.append((name, x, y))
            return y

        h = torch.tanh(run("twice", torch.tanh(run("twice", torch.tanh(run("body", x))))))
        if path.expert:
            h = h + torch.sigmoid(run("gate", h)) * torch.tanh(run("expert", h))
        loss = sum(run(head, h).square().sum() for head in path.heads) / len(x)
        gradients = torch.autograd.grad(scale * loss, [y for _, _, y in calls])
        self.terms[rank] += len(x)
        for (name, inputs, _), gradient in zip(calls, gradients, strict=True):
            if not getattr(model, name).weight.requires_grad:
                continue
            a, g = inputs.detach().numpy(), gradient.numpy()
            if getattr(model, name).bias is not None:
                a = np.concatenate([a, np.ones((len(a), 1))], 1)
            self.gradients[name] = self.gradients.get(name, 0) + g.T @ a / self.ranks
            if self.steps % self.periods[0] == 0:
                self.sums[name].append((rank, a, g))

    def is_finite(self) -> bool:
        arrays = [x for passes in self.sums.values() for _, a, g in passes for x in (a, g)]
        return all(np.isfinite(x).all() for x in (*arrays, *self.gradients.values()))

    def step(self, damping: float, kl_clip: float | None, lr: float) -> dict[str, Any]:
        """Directions of all layers that have a gradient."""
        total = sum(self.terms)
        for name, passes in self.sums.items():
            A = sum(a.T @ a for _, a, _ in passes) / sum(len(a) for _, a, _ in passes)
            # The loss of all ranks is the mean over all terms, of which each has some.
            G = total * sum((self.terms[rank] / total) ** 2 * g.T @ g for rank, _, g in passes)
            old_A, old_G, weight = self.average.get(name, (0, 0, 0))
            self.average[name] = (
                DECAY * old_A + (1 - DECAY) * A,
                DECAY * old_G + (1 - DECAY) * G,
                DECAY * weight + (1 - DECAY),
            )
        if self.steps % self.periods[1] == 0:
            self.refreshed = {
                name: (A / weight, G / weight, damping) for name, (A, G, weight) in self.average.items()
            }
        self.steps += 1
        found = {name: self._direction(name, g, damping) for name, g in self.gradients.items()}
        change = lr**2 * sum((found[name] * g).sum() for name, g in self.gradients.items())
        if kl_clip is not None and change > 0:
            factor = min(1, (kl_clip / change) ** 0.5)
            found = {name: factor * direction for name, direction in found.items()}
        return found

    def _direction(self, name: str, gradient: Any, damping: float) -> Any:
        if name not in self.refreshed:
            return gradient
        A, G, damping_then = self.refreshed[name]
        if self.method == "eigen":
            dense = np.kron(G, A) + damping * np.eye(len(A) * len(G))
            return np.linalg.solve(dense, gradient.ravel()).reshape(gradient.shape)
        ratio = ((np.trace(A) / len(A)) / (np.trace(G) / len(G))) ** 0.5
        root = damping_then**0.5
        damped_A, damped_G = A + ratio * root * np.eye(len(A)), G + root / ratio * np.eye(len(G))
        return np.linalg.solve(damped_G, gradient) @ np.linalg.inv(damped_A)


def compare(model: Net, expected: dict[str, Any]) -> None:
    """Gradients of layers with directions; those of others there must not be."""
    for name, layer in model.named_children():
        assert (layer.weight.grad is None) == (name not in expected)
        if name in expected:
            found = layer.weight.grad
            if layer.bias is not None:
                found = torch.cat([found, layer.bias.grad[:, None]], 1)
            np.testing.assert_allclose(found.numpy(), expected[name], rtol=1e-7, atol=1e-12)


# ---- ranks ---------------------------------------------------------------------------------------


def follow_with_ranks(seeds: list[int]) -> None:
    """A job of several ranks, which run different passes: each compares with the reference of all."""
    for seed in seeds:
        try:
            _follow(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"loop {seed}: {error!r}") from error


def _follow(dice: random.Random) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    method, shares = dice.choice(["eigen", "inverse"]), dice.random() < 0.5
    periods = dice.choice([1, 1, 2, 3]), dice.choice([1, 2, 3])
    fraction = dice.choice(["COMM_OPT", "MEM_OPT", *(["HYBRID_OPT"] if world > 3 else [])])
    settings = {"damping": 0.01, "kl_clip": 0.001, "lr": 0.1}
    options = {
        "compute_method": method,
        "factor_update_steps": periods[0],
        "inv_update_steps": periods[1],
        "packed_factors": dice.random() < 0.3,
        "symmetry_aware": dice.random() < 0.5,
        "gradient_worker_fraction": fraction,
        "colocate_factors": fraction == "MEM_OPT" or dice.random() < 0.5,
        "allreduce_bucket_cap_mb": dice.choice([0, 25]),
        "factor_decay": DECAY,
    }
    torch.manual_seed(dice.randrange(100))
    generator = torch.Generator().manual_seed(dice.randrange(100))
    # With 'inverse' layers that share an A share the split of the damping, which is not the paper's.
    shares &= method == "eigen"
    model, reference = Net(shares).double(), Reference(method, *periods, ranks=world)

    def attached(model: Net) -> KFAC:
        return KFAC(model, terms=lambda: reference.terms[rank], **settings, **options)

    kfac = attached(model)
    for _ in range(7):
        if dice.random() < 0.2:
            state, model = copy.deepcopy(kfac.state_dict()), copy.deepcopy(model)
            kfac = attached(model)
            kfac.load_state_dict(state)
        counts = [dice.choice([0, 1, 1, 2]) for _ in range(world)]
        counts[dice.randrange(world)] = 1
        for place, count in enumerate(counts):
            for _ in range(count):
                path = Path(dice.choice(HEADS), dice.random() < 0.5, dice.choice([None, True, False]))
                if shares or periods[0] > 1:
                    path = path.through_all()
                x = torch.randn(dice.randint(1, 5), 3, generator=generator, dtype=torch.float64)
                reference.backward(model, x, path, 1.0, place)
                if place == rank:
                    model(x, path).backward()
        _average_gradients(model)
        spoiled, skipped = dice.random() < 0.1, kfac.skipped_steps
        if spoiled and dice.randrange(world) == rank:
            model.body.weight.grad[0, 0] = torch.nan
        with warnings.catch_warnings():
            if spoiled:
                warnings.filterwarnings("ignore", ".*was skipped")
            kfac.step()
        assert kfac.skipped_steps == skipped + spoiled
        if not spoiled:
            compare(model, reference.step(**settings))
            torch.optim.SGD(model.parameters(), lr=0.05).step()
        kfac.zero_grad()
        reference.forget()


def _average_gradients(model: Net) -> None:
    for p in model.parameters():
        given = torch.tensor(float(p.grad is not None))
        dist.all_reduce(given)
        if given:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
