"""What share of other packages' models K-FAC covers in PyTorch, and what it leaves.

    python benchmarks/torch_coverage.py [--library timm transformers ...] [--model NAME ...]
        [--output docs/torch_coverage.md]

A library that is not installed is left out, and said so. See `ABOUT` for what is done and counted.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from options import writable
from suite.torch import KFAC
from torch_models import LIBRARIES, Case
from versions import versions

ABOUT = """\
Every model takes one step of K-FAC (`compute_method="inverse"`), after a forward and a backward pass on
random inputs, with noise in the place of parameters that start as zeros, of its own loss or of a random
combination of its outputs. *covered* is the share of the parameters with a gradient that K-FAC
preconditions, *factored* that of those in blocks that are more than a diagonal. Models are as their
packages build them, with small sizes where those are arguments; of timm the first of each of its
modules with less than 4 million parameters, or its smallest with less than 100 million.
"""


class Row(NamedTuple):
    library: str
    model: str
    parameters: int
    covered: float  # of those with a gradient
    factored: float
    left: tuple[str, ...]  # what is not covered, and why


def measure(library: str, case: Case) -> Row:
    """Of one model: RuntimeError if a step is skipped."""
    torch.manual_seed(0)
    model = case.make().train()
    for parameter in model.parameters():
        if not parameter.any():  # through a head of zeros no gradient would come
            nn.init.normal_(parameter, std=0.02)
    torch.manual_seed(1)
    given = case.inputs()
    kfac = KFAC(model, compute_method="inverse", damping=0.01)
    loss = _loss_of(model(**given) if isinstance(given, dict) else model(*given))
    loss.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # they say what `left` says
        kfac.step()
    if kfac.skipped_steps:
        raise RuntimeError(f"{library}'s {case.name}: its step was skipped")
    sizes: Counter[str] = Counter()
    left: Counter[tuple[str, str]] = Counter()
    for route in kfac.routing():
        if route.parameter not in moved:
            continue
        size = torch.Size(route.shape).numel()
        sizes["all"] += size
        if not route.preconditioned:
            left[_kind(route.parameter), route.reason] += size
            continue
        sizes["covered"] += size
        sizes["factored"] += size * (not route.diagonal)
    return Row(
        library,
        case.name,
        sum(p.numel() for p in model.parameters()),
        sizes["covered"] / sizes["all"],
        sizes["factored"] / sizes["all"],
        tuple(f"`{name}` ({size:,}): {why}" for (name, why), size in left.items()),
    )


def _loss_of(outputs: Any) -> torch.Tensor:
    """A model's own loss, or a random combination of what it returns, less wherever it is longer."""
    own = getattr(outputs, "loss", None)
    if own is not None:
        return own
    generator = torch.Generator().manual_seed(2)
    parts = [
        (x.double() * torch.randn(x.shape, generator=generator)).mean()
        for x in _tensors(outputs)
        if x.requires_grad
    ]
    return torch.stack(parts).sum()


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(given):
        yield given
    elif isinstance(given, dict):
        yield from _tensors(list(given.values()))
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _tensors(one)
    elif hasattr(given, "__dict__"):
        yield from _tensors(vars(given))


def _kind(parameter: str) -> str:
    """Its name without the numbers of blocks."""
    return ".".join("*" if part.isdigit() else part for part in parameter.split("."))


def report(rows: list[Row], left_out: list[str], command: str) -> str:
    found = versions("torch", *LIBRARIES)
    said = ", ".join(f"{name} {version}" for name, version in found.items())
    parts = [f"# What K-FAC covers of other packages' models in PyTorch\n\n```\n{command}\n```\n"]
    parts += [f"{said}; cpu; seeds 0 (models), 1 (inputs), 2 (outputs).\n\n{ABOUT}"]
    parts += [
        "| library | models | covered to the last parameter | 99 % and more | less |",
        "|" + "---|" * 5,
    ]
    for library in dict.fromkeys(row.library for row in rows):
        own = [row.covered for row in rows if row.library == library]
        counts = len(own), sum(x == 1 for x in own), sum(0.99 <= x < 1 for x in own)
        parts.append(
            f"| {library} | {' | '.join(map(str, counts))} | {len(own) - counts[1] - counts[2]} |"
        )
    parts.append("\n## What is left\n")
    for row in rows:
        parts += [f"- {row.library} {row.model}, {row.covered:.2%} covered: {one}" for one in row.left]
    parts += [
        "\n## All models\n",
        "| library | model | parameters | covered | factored |",
        "|" + "---|" * 5,
    ]
    parts += [_cells(row) for row in rows]
    if left_out:
        parts += ["\nNot installed: " + ", ".join(left_out) + "."]
    return "\n".join(parts) + "\n"


def _cells(row: Row) -> str:
    shares = f"{row.covered:.2%} | {row.factored:.2%}"
    return f"| {row.library} | {row.model} | {row.parameters:,} | {shares} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", nargs="*", default=list(LIBRARIES), choices=list(LIBRARIES))
    parser.add_argument("--model", nargs="*")
    parser.add_argument("--output", type=writable, help="write the table to this file")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    rows, left_out = [], []
    for library in options.library:
        cases = LIBRARIES[library]()
        try:
            first = next(cases)
        except ImportError as error:
            print(f"{library}: {error}")
            left_out.append(library)
            continue
        for case in (first, *cases):
            if not options.model or case.name in options.model:
                rows.append(measure(library, case))
                print("  ".join([_cells(rows[-1]), *rows[-1].left]), flush=True)
    command = " ".join(["python", "benchmarks/torch_coverage.py", *sys.argv[1:]])
    text = report(rows, left_out, command)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
