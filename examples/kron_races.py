"""PSGD Kron against AdamW on six problems, equal tuning grids, with a plot.

    python examples/kron_races.py --output races

rosenbrock  the valley in 2 dimensions, from near (-1, 1); Kron Newton (`hvp='exact'`) takes part
logistic    logistic regression on a random half of 8x8 digits, full batch, with a ridge: loss above the
            minimum; Kron Newton takes part
xor, xor32  delayed XOR over 16 and 32 steps: a tanh RNN keeps two marked bits of the first half in mind
            (Hochreiter & Schmidhuber 1997), started as PSGD's author starts his
lenet       two convolutions and two linear layers on 8x8 digits
gpt         a two-layer transformer that predicts the next character of Python's argparse module

Every contender has seven learning rates, a factor of about three apart, a cosine schedule and the same
batches; nothing else is tuned (Kron Newton fits with a constant step of 0.1). The rate with the best
mean over `--seeds` seeds of the last tenth of the losses is run again with as many other seeds: mean,
least and greatest are the result. '(edge)' marks a best rate at the edge of its grid. Losses are of
minibatches, before the step.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import Kron

Loss = Callable[[], torch.Tensor]  # of the next minibatch
Problem = tuple[list[torch.nn.Parameter], Loss]


def rosenbrock(seed: int) -> Problem:
    xy = nn.Parameter(torch.tensor([-1.0, 1.0]) + 0.1 * torch.randn(2))
    return [xy], lambda: 100 * (xy[1] - xy[0] ** 2) ** 2 + (1 - xy[0]) ** 2


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)


def logistic(seed: int) -> Problem:
    x, y = digits()
    half = torch.randperm(len(x))[: len(x) // 2]
    x, y, model = x[half].double(), y[half], nn.Linear(64, 10).double()

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(x), y) + 5e-4 * model.weight.square().sum()

    start = copy.deepcopy(model.state_dict())
    newton = torch.optim.LBFGS(model.parameters(), max_iter=1000, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        newton.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(3):
        newton.step(closure)
    least = loss().item()
    model.load_state_dict(start)
    return list(model.parameters()), lambda: loss() - least


class XorRNN(nn.Module):
    def __init__(self, width: int = 30) -> None:
        super().__init__()
        self.read = nn.Parameter(0.1 * torch.randn(2, width))
        self.keep = nn.Parameter(nn.init.orthogonal_(torch.empty(width, width)))
        self.bias = nn.Parameter(torch.zeros(width))
        self.write = nn.Parameter(0.1 * torch.randn(width, 1))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[1], len(self.bias))
        for seen in x @ self.read + self.bias:
            h = torch.tanh(torch.addmm(seen, h, self.keep))
        return (h @ self.write)[:, 0] + self.shift


def xor(seed: int, length: int = 16, batch: int = 128) -> Problem:
    model, draws = XorRNN(), torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        bits = torch.randint(0, 2, (length, batch), generator=draws).float()
        marks = torch.zeros(length, batch)
        tenth, columns = length / 10, torch.arange(batch)
        first = (tenth * torch.rand(batch, generator=draws)).long()
        second = (tenth + 4 * tenth * torch.rand(batch, generator=draws)).long()
        marks[first, columns] = marks[second, columns] = 1.0
        target = (bits[first, columns] != bits[second, columns]).float()
        logits = model(torch.stack([2 * bits - 1, marks], 2))
        return F.binary_cross_entropy_with_logits(logits, target)

    return list(model.parameters()), loss


def lenet(seed: int, batch: int = 64) -> Problem:
    x, y = digits()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)),
    )
    draws = torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        rows = torch.randint(0, len(x), (batch,), generator=draws)
        return F.cross_entropy(model(x[rows]), y[rows])

    return list(model.parameters()), loss


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        h = self.tokens(x) + self.places(torch.arange(n))
        return self.head(self.norm(self.layers(h, mask=mask, is_causal=True)))


def gpt(seed: int, context: int = 32, batch: int = 16) -> Problem:
    text = Path(argparse.__file__).read_text()
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([letters[letter] for letter in text])
    model, draws = GPT(len(letters), context), torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        starts = torch.randint(0, len(data) - context - 1, (batch,), generator=draws)
        rows = data[starts[:, None] + torch.arange(context + 1)]
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return list(model.parameters()), loss


PROBLEMS: dict[str, tuple[Callable[[int], Problem], int]] = {
    "rosenbrock": (rosenbrock, 500),
    "logistic": (logistic, 200),
    "xor": (xor, 1500),
    "xor32": (functools.partial(xor, length=32), 3000),
    "lenet": (lenet, 400),
    "gpt": (gpt, 400),
}
CONTENDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr, weight_decay=0.0),
    "Kron": lambda params, lr: Kron(params, lr),
    "Kron Newton": lambda params, lr: Kron(  # curvature moves with the parameters: a constant step
        params, lr, hvp="exact", clip=1.0, b1=0.0, min_ndim_triangular=1, preconditioner_lr=0.1
    ),
}
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def grid(problem: str) -> tuple[float, ...]:
    """Seven learning rates; higher ones where there is no noise to average."""
    return RATES[4:] if problem in ("rosenbrock", "logistic") else RATES[:7]


def train(problem: str, contender: str, lr: float, steps: int, seed: int) -> list[float]:
    """Losses of one run; it ends where one is not finite."""
    torch.manual_seed(seed)
    parameters, loss_fn = PROBLEMS[problem][0](seed)
    optimizer = CONTENDERS[contender](parameters, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    losses: list[float] = []
    for _ in range(steps):
        if contender == "Kron Newton":
            loss = optimizer.step(loss_fn)
        else:
            optimizer.zero_grad()
            loss = loss_fn()
            loss.backward()
            optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    return losses


def score(losses: list[float], steps: int) -> float:
    """Mean of the last tenth; inf for a run that ended early."""
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last) if len(losses) == steps and math.isfinite(sum(last)) else math.inf


def race(problem: str, contender: str, steps: int, seeds: int) -> dict[str, Any]:
    """The scores of every rate, and the runs at the best with seeds of their own."""

    def runs(lr: float, first: int) -> list[list[float]]:
        return [train(problem, contender, lr, steps, seed) for seed in range(first, first + seeds)]

    rates = grid(problem)
    scores = {lr: [score(losses, steps) for losses in runs(lr, 0)] for lr in rates}
    best = min(rates, key=lambda lr: statistics.mean(scores[lr]))
    again = runs(best, seeds)
    return {
        "lr": best,
        "edge": best in (rates[0], rates[-1]),
        "scores": [score(losses, steps) for losses in again],
        "losses": again,
        "tuning": scores,
    }


def plot(results: dict[str, Any], path: Path) -> None:
    """The runs of each contender at its best rate, smoothed over a fiftieth of the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(results))
    rows = math.ceil(len(results) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4 * columns, 3 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, (problem, contenders) in zip(axes.flat, results.items(), strict=False):
        for number, (name, found) in enumerate(contenders.items()):
            for i, losses in enumerate(found["losses"]):
                width = max(1, len(losses) // 50)
                smooth = [sum(losses[j : j + width]) / width for j in range(len(losses) - width + 1)]
                label = f"{name}, lr {found['lr']:g}" if i == 0 else None
                axis.semilogy(smooth, color=f"C{number}", alpha=0.7, linewidth=1, label=label)
        axis.set(title=problem, xlabel="step")
        axis.legend(fontsize=8)
    for row in axes:
        row[0].set_ylabel("loss")
    figure.savefig(path, dpi=80)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--steps", type=int, help="instead of each problem's own number")
    parser.add_argument("--seeds", type=int, default=3, help="to tune with, and as many to report")
    parser.add_argument("--output", type=Path, default=Path("races"))
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for problem in arguments.problems.split(","):
        if problem not in PROBLEMS:
            parser.error(f"--problems: {problem!r} is not one of {', '.join(PROBLEMS)}")
        steps = arguments.steps or PROBLEMS[problem][1]
        results[problem] = {}
        for contender in CONTENDERS:
            if contender == "Kron Newton" and problem not in ("rosenbrock", "logistic"):
                continue  # noise in H v of minibatches, and twice the price
            found = results[problem][contender] = race(problem, contender, steps, arguments.seeds)
            mean, least, most = (f(found["scores"]) for f in (statistics.mean, min, max))
            edge = " (edge)" if found["edge"] else ""
            print(
                f"{problem:12}{contender:12} lr {found['lr']:<6g} "
                f"loss {mean:.3g} ({least:.3g} to {most:.3g}){edge}",
                flush=True,
            )
    arguments.output.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    record = {"seeds": arguments.seeds, "versions": versions, "results": results}
    (arguments.output / "races.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(results, arguments.output / "races.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
