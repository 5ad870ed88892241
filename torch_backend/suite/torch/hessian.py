"""Gradients and Hessian-vector products of a closure's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from suite.torch.checks import warn_user


def exact(
    closure: Callable[[], Any],
    parameters: Sequence[torch.Tensor],
    chosen: Sequence[torch.Tensor],
    vectors: Sequence[torch.Tensor],
) -> tuple[Any, list[torch.Tensor]]:
    """The closure's loss and H v for v of the `chosen` parameters, by differentiating twice.

    Every parameter's `grad` is set, of a frozen one to None. H is the block of the chosen parameters.

    Args:
        closure: returns the loss, with its graph.

    Raises:
        RuntimeError: a loss without a graph.
    """
    with torch.enable_grad():
        loss = closure()
        if not (isinstance(loss, torch.Tensor) and loss.requires_grad):
            kind = "a detached tensor" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise RuntimeError(
                "with hvp='exact' the closure must return the loss, a tensor of which backward() has "
                f"not been called, got {kind}"
            )
        inputs = [p for p in parameters if p.requires_grad]
        found = torch.autograd.grad(loss, inputs, create_graph=bool(chosen), allow_unused=True)
        gradient = dict(zip(map(id, inputs), found, strict=True))
        sources = [(gradient.get(id(p)), v) for p, v in zip(chosen, vectors, strict=True)]
        used = [(g, v) for g, v in sources if g is not None and g.requires_grad]
        active = [p for p in chosen if p.requires_grad]
        products: dict[int, torch.Tensor | None] = {}
        if used:
            outputs, directions = [g for g, _ in used], [v for _, v in used]
            second = torch.autograd.grad(outputs, active, directions, allow_unused=True)
            products = dict(zip(map(id, active), second, strict=True))
    for p in parameters:
        g = gradient.get(id(p))
        p.grad = None if g is None else g.detach()
    return loss.detach(), _filled(chosen, [products.get(id(p)) for p in chosen])


def finite_difference(
    closure: Callable[[], Any],
    parameters: Sequence[torch.Tensor],
    chosen: Sequence[torch.Tensor],
    vectors: Sequence[torch.Tensor],
) -> tuple[Any, list[torch.Tensor]]:
    """The same from two gradients, at the parameters and √eps v away; parameters are put back exactly.

    Args:
        closure: clears gradients, calls backward() and returns the loss; a function of the parameters.
    """
    with torch.enable_grad():
        loss = closure()
    if all(p.grad is None for p in parameters):
        warn_user(
            "with hvp='finite_difference' the closure must call backward(): no parameter has a gradient"
        )
    if not chosen:
        return loss, []
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    places = [p.clone() for p in chosen]
    step = max(torch.finfo(p.dtype).eps for p in chosen) ** 0.5
    before = dict(zip(map(id, parameters), gradients, strict=True))
    try:
        for p, v in zip(chosen, vectors, strict=True):
            if p.requires_grad:
                p.add_(v, alpha=step)
        with torch.enable_grad():
            closure()
        products = []
        for p in chosen:
            old = before[id(p)]
            products.append(None if p.grad is None or old is None else (p.grad - old) / step)
    finally:
        for p, place in zip(chosen, places, strict=True):
            p.copy_(place)
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g
    return loss, _filled(chosen, products)


def _filled(
    parameters: Sequence[torch.Tensor], products: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    return [
        torch.zeros_like(p) if h is None else h.detach()
        for p, h in zip(parameters, products, strict=True)
    ]
