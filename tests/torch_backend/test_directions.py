"""Directions of layers that are alike, computed together, are those of each of them alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from suite.torch import KFAC


class Branches(nn.Module):
    """Layers side by side, each with an input, and so with statistics, of its own."""

    def __init__(self, make: Callable[[], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.branches = nn.ModuleList([make() for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = [layer((i + 1) * x) for i, layer in enumerate(self.branches)]
        return sum(torch.tanh(y).flatten(1).sum(1) for y in scaled)


MAKES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (8, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (8, 4)),
    "convolution": (lambda: nn.Conv2d(2, 3, 2), (8, 2, 3, 3)),
    "convolution without bias": (lambda: nn.Conv1d(2, 3, 3, bias=False), (8, 2, 5)),
    "grouped convolution": (lambda: nn.Conv1d(4, 6, 2, groups=2), (8, 4, 5)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(3, 2, 2), (8, 3, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (8, 4)),
}


def directions(
    make: Callable[[], nn.Module], shape: tuple[int, ...], skip: list[str], without: tuple[str, ...]
) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(0)
    model = Branches(make).double()
    for p in model.parameters():
        nn.init.normal_(p)
    kfac = KFAC(model, damping=0.1, kl_clip=None, compute_method="inverse", skip_layers=skip)
    model(torch.randn(shape, dtype=torch.float64)).mean().backward()
    for name in without:
        model.get_parameter(name).grad = None
    plain = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    kfac.step()
    for name, p in model.named_parameters():
        if p.grad is not None and not any(f"{own}." in name for own in skip):
            assert not torch.allclose(p.grad, plain[name])
    return {name: p.grad for name, p in model.named_parameters()}


BIASES = tuple(f"branches.{i}.bias" for i in range(4))


@pytest.mark.parametrize(
    "without", [(), ("branches.1.weight", "branches.1.bias"), ("branches.2.bias",), BIASES]
)
@pytest.mark.parametrize("kind", MAKES)
def test_layers_alike_have_the_directions_of_each_alone(kind, without):
    make, shape = MAKES[kind]
    present = {name for name, _ in Branches(make).named_parameters()}
    without = tuple(name for name in without if name in present)
    together = directions(make, shape, [], without)
    names = [f"branches.{i}" for i in range(4)]
    for own in names:
        alone = directions(make, shape, [name for name in names if name != own], without)
        for name, found in together.items():
            if name.startswith(f"{own}."):
                if found is None:
                    assert name in without
                    continue
                torch.testing.assert_close(found, alone[name], rtol=1e-12, atol=1e-14)
