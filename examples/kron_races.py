"""PSGD Kron against AdamW on five problems, equal tuning grids, with a plot.

    python examples/kron_races.py --problems rosenbrock,logistic,xor,lenet,gpt --output races

rosenbrock  the valley in 2 dimensions, from (-1, 1); Kron Newton (`hvp='exact'`) takes part
logistic    logistic regression on 8x8 digits, full batch
xor         delayed XOR: an RNN remembers two marked bits over a sequence (Hochreiter & Schmidhuber 1997)
lenet       two convolutions and two linear layers on 8x8 digits
gpt         a two-layer transformer that predicts the next character of the source text of this library

Every contender gets the same number of learning rates, a cosine schedule and the same batches; the best
mean of the last tenth of its losses counts. Losses are of minibatches, before the step.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
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
    xy = nn.Parameter(torch.tensor([-1.0, 1.0]))
    return [xy], lambda: 100 * (xy[1] - xy[0] ** 2) ** 2 + (1 - xy[0]) ** 2


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)


def logistic(seed: int) -> Problem:
    x, y = digits()
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    return list(model.parameters()), lambda: F.cross_entropy(model(x), y)


class XorRNN(nn.Module):
    def __init__(self, width: int = 30) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(2 + width, width), nn.Linear(width, 1)
        nn.init.orthogonal_(self.read.weight[:, 2:])
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[1], self.width)
        for step in x:
            h = torch.tanh(self.read(torch.cat([step, h], 1)))
        return self.write(h)[:, 0]


def xor(seed: int, length: int = 8, batch: int = 128) -> Problem:
    model, draws = XorRNN(), torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        bits = torch.randint(0, 2, (length, batch), generator=draws).float()
        marks = torch.zeros(length, batch)
        first = torch.randint(0, length // 4, (batch,), generator=draws)
        second = torch.randint(length // 4, length // 2, (batch,), generator=draws)
        columns = torch.arange(batch)
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
    sources = sorted((Path(__file__).parent.parent / "core").rglob("*.py"))
    text = "".join(path.read_text() for path in sources)
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
    "lenet": (lenet, 400),
    "gpt": (gpt, 400),
}
# Five learning rates each, a factor of three apart; nothing else is tuned.
CONTENDERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[float, ...]]] = {
    "AdamW": (
        lambda params, lr: torch.optim.AdamW(params, lr, weight_decay=0.0),
        (0.001, 0.003, 0.01, 0.03, 0.1),
    ),
    "Kron": (lambda params, lr: Kron(params, lr), (0.001, 0.003, 0.01, 0.03, 0.1)),
    "Kron Newton": (
        lambda params, lr: Kron(params, lr, hvp="exact", clip=1.0, b1=0.0, min_ndim_triangular=1),
        (0.03, 0.1, 0.3, 0.6, 1.0),
    ),
}


def train(problem: str, contender: str, lr: float, steps: int, seed: int) -> list[float]:
    """Losses of one run; it ends where one is not finite."""
    torch.manual_seed(seed)
    parameters, loss_fn = PROBLEMS[problem][0](seed)
    optimizer = CONTENDERS[contender][0](parameters, lr)
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


def plot(results: dict[str, Any], path: Path) -> None:
    """The best run of each contender, smoothed over a fiftieth of the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(results), figsize=(4 * len(results), 3.5), layout="constrained", squeeze=False
    )
    for axis, (problem, contenders) in zip(axes[0], results.items(), strict=True):
        for name, found in contenders.items():
            losses, width = found["losses"], max(1, len(found["losses"]) // 50)
            smooth = [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]
            axis.semilogy(smooth, label=f"{name}, lr {found['lr']:g}")
        axis.set(title=problem, xlabel="step")
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("loss")
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--steps", type=int, help="instead of each problem's own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("races"))
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for problem in arguments.problems.split(","):
        if problem not in PROBLEMS:
            parser.error(f"--problems: {problem!r} is not one of {', '.join(PROBLEMS)}")
        steps = arguments.steps or PROBLEMS[problem][1]
        results[problem] = {}
        for contender, (_, rates) in CONTENDERS.items():
            if contender == "Kron Newton" and problem not in ("rosenbrock", "logistic"):
                continue  # noise in H v of minibatches, and twice the price
            runs = {lr: train(problem, contender, lr, steps, arguments.seed) for lr in rates}
            scores = {lr: score(losses, steps) for lr, losses in runs.items()}
            best = min(scores, key=lambda lr: scores[lr])
            results[problem][contender] = {"lr": best, "losses": runs[best], "scores": scores}
            print(f"{problem:12}{contender:12} lr {best:<6g} loss {scores[best]:.3g}", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    record = {"seed": arguments.seed, "versions": versions, "results": results}
    (arguments.output / "races.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(results, arguments.output / "races.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
