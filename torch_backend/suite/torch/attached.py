"""Which K-FACs are on which layers: one at most on each."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import nn

from suite.torch.hooks import drop_inert_hooks
from suite.torch.layers import Layer
from suite.torch.model_capture import ModelCapture


class _Detachable(Protocol):
    def detach(self) -> None: ...


_CAPTURES: weakref.WeakKeyDictionary[_Detachable, ModelCapture] = weakref.WeakKeyDictionary()


def register(kfac: _Detachable, capture: ModelCapture) -> None:
    """`kfac` is on the layers of `capture` until that is detached."""
    _CAPTURES[kfac] = capture


def require_free(layers: Sequence[Layer]) -> None:
    """ValueError if one of them has a K-FAC."""
    on = [capture for capture in _CAPTURES.values() if capture.attached]
    taken = {use for capture in on for layer in capture.layers for use in _uses(layer)}
    for layer in layers:
        if taken & _uses(layer):
            raise ValueError(
                f"layer {layer.name!r} already has a K-FAC attached: detach() that one first, with "
                "suite.torch.detach(model) if a trainer keeps it; or give each a part of the model, by "
                "KFAC(model.part) or skip_layers"
            )


def _uses(layer: Layer) -> set[tuple[int, int]]:
    """Of which parameter by which module: a weight that two models share is two uses."""
    return {(id(site.module), id(p)) for site in layer.sites for p in layer.parameters()}


def detach(model: nn.Module) -> None:
    """`KFAC.detach` of every K-FAC on layers of `model`, for those that something else keeps.

    Trainers that set up optimizers anew (Lightning's `fit`, again or after its learning rate finder)
    still have the ones before then. A copy of a model that has a K-FAC is rid of what is left there of
    its hooks, which do nothing, but which torch.jit.script does not take.

        >>> def configure_optimizers(self):
        ...     suite.torch.detach(self)
        ...     return KFAC(self, torch.optim.SGD(self.parameters(), lr=0.1))

    Raises:
        TypeError: not a torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    modules = set(model.modules())
    for kfac, capture in list(_CAPTURES.items()):
        if any(site.module in modules for layer in capture.layers for site in layer.sites):
            kfac.detach()
    rid_of_copies(model)


def rid_of_copies(model: nn.Module) -> None:
    """Take off what copying a model that had a K-FAC has left there."""
    for module in model.modules():
        drop_inert_hooks(module)
