"""The routing report of a model's layers: what happens to every parameter, and why."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from torch import nn

from suite.core.routing import Route, Routing, describe_factors
from suite.torch.layers import Layer

NOT_GIVEN = "not in the optimizer: its gradient is left alone"


def routes(
    model: nn.Module,
    layers: Sequence[Layer],
    reasons: Mapping[int, str],
    name_of: Callable[[str], str],
    moved: Container[int] | None,
    max_factor_size: int,
) -> Routing:
    """The report.

    Args:
        layers: all that are covered.
        reasons: by the id of a parameter, why it is in no layer.
        name_of: the name in reports of a parameter with this name in the model.
        moved: the parameters that the optimizer has; None: all.
        max_factor_size: above which sides are diagonal.
    """
    used: dict[int, list[Layer]] = {}
    for layer in layers:
        for parameter in layer.parameters():
            used.setdefault(id(parameter), []).append(layer)
    found = []
    for full, parameter in model.named_parameters():
        name, shape = name_of(full), tuple(parameter.shape)
        own = used.get(id(parameter))
        outside = moved is not None and id(parameter) not in moved
        if outside and parameter.requires_grad:
            found.append(Route(name, shape, "plain", "", NOT_GIVEN))
        elif own:
            found.append(Route(name, shape, "kfac", _factors(own), _why(own[0], max_factor_size)))
        elif not parameter.requires_grad:
            found.append(Route(name, shape, "frozen", "", "requires_grad is False"))
        else:
            alone = "its layer's weight is preconditioned without it"
            if not parameter.is_floating_point():
                alone = f"{str(parameter.dtype).removeprefix('torch.')} parameters are not covered"
            found.append(Route(name, shape, "plain", "", reasons.get(id(parameter), alone)))
    return Routing(tuple(found))


def _why(layer: Layer, max_factor_size: int) -> str:
    site = layer.sites[0]
    kind = "free parameter" if site.spec.kind == "free" else type(site.owner).__name__
    words = [kind]
    if layer.layout == "unit":
        words.append("a 2x2 block for each unit")
    elif layer.layout == "vector":
        words.append("diagonal")
    if len(layer.sites) > 1:
        words.append(f"one block for {len(layer.sites)} uses")
    if layer.tensor_split:
        words.append(layer.tensor_split)
    if site.spec.reduce:
        words.append("one row an example (reduce)")
    if site.spec.kind == "stack":
        words.append("a block for each matrix of the stack" if layer.blocks > 1 else "one block")
    elif site.functional:
        words.append("by the function that its own forward calls")
    if site.scaling:
        words.append(site.scaling.replace("_", " "))
    large = max(layer.sizes) > max_factor_size and layer.layout in ("matrix", "transposed")
    if large:
        words.append(f"a side above max_factor_size={max_factor_size} is diagonal")
    return "; ".join(words)


def _factors(layers: list[Layer]) -> str:
    described = []
    for layer in layers:
        text = describe_factors(layer.sizes, layer.diagonal)
        if layer.layout in ("vector", "bias"):
            text = describe_factors((max(layer.sizes),), (any(layer.diagonal),))
        elif layer.layout == "unit":
            text = "2x2"
        described.append(f"{layer.blocks} x ({text})" if layer.blocks > 1 else text)
    if len(described) > 1 and len(set(described)) == 1:
        return f"{len(described)} x ({described[0]})"
    return "; ".join(described)
