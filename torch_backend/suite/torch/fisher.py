"""Statistics of the model's own predictive distribution: Monte Carlo and exact Fisher.

When the loss's backward pass reaches the model's output, a pass of our own goes first: gradients of
sampled (or of all) log-likelihoods by the output, back to the slots of `capture` alone. Weight gradients
are not computed in it, and the loss's own gradients leave no statistics.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from suite.core.likelihoods import Bernoulli, Categorical, Gaussian, check_outputs, with_signs
from suite.core.noise import unit_noise
from suite.torch.dtensors import is_sharded, kept_whole, sharded_modules
from suite.torch.hooks import Hook, in_backward
from suite.torch.model_capture import ModelCapture

_LARGEST = 1024.0  # of a sampled gradient by an output: layers before it add up to 64 of float16's range
FisherType = Literal["empirical", "mc", "type-2"]
Likelihood = Categorical | Bernoulli | Gaussian


class FisherSampler:
    """Runs statistics-only backward passes from the model's output."""

    def __init__(
        self,
        model: nn.Module,
        capture: ModelCapture,
        *,
        fisher: FisherType,
        likelihood: Likelihood,
        output_of: Callable[[Any], torch.Tensor],
        samples: int,
        seed: int,
        loss_scale: Callable[[], float],
    ) -> None:
        self.model = weakref.ref(model)
        self.captures, self.clock = capture.by_layer, capture.clock
        self.fisher, self.likelihood, self.output_of = fisher, likelihood, output_of
        self.samples, self.seed, self._loss_scale = samples, seed, loss_scale
        narrow = likelihood.variance**0.5 if isinstance(likelihood, Gaussian) else 1.0
        self._largest_scale = _LARGEST * min(narrow, 1.0)
        # Held here and not by their hooks: an output whose hook holds it is never freed.
        self._waiting: dict[int, tuple[torch.Tensor, int]] = {}  # and their versions
        self._forwards = 0
        self.draws = 0  # so far: the noise's step count, part of a checkpoint
        self.clock.sampled = True
        hook = Hook(self, model)
        self.handles = [model.register_forward_hook(hook, with_kwargs=True)]
        weakref.finalize(self, _take_off, self.handles)

    def observe(self, site: int, args: Any, kwargs: Any, output: Any) -> None:
        """Wait for the gradient of this forward pass's output."""
        model = self.model()
        if torch.compiler.is_compiling():
            return  # such a graph has one backward pass, traced once
        wanted = self.clock.wanted and torch.is_grad_enabled()
        if model is None or not model.training or not wanted or in_backward():
            return
        f = self.output_of(output)
        if not isinstance(f, torch.Tensor):
            kind = type(f).__name__
            raise TypeError(
                f"the model's output must be a tensor for fisher={self.fisher!r}, got {kind}: "
                "give output_of=, a function that picks the tensor the likelihood is about"
            )
        if is_sharded(f):
            raise TypeError(
                f"the model's output must be whole on each rank for fisher={self.fisher!r}, got a "
                f"DTensor of shape {tuple(f.shape)}: give output_of=lambda output: output.full_tensor()"
            )
        if f.ndim == 1:
            kinds = (torch.Tensor, dict, tuple, list)  # other objects may have tensors of any kind
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, kinds)]
            check_outputs(self.likelihood, tuple(f.shape), [tuple(x.shape) for x in _tensors(given)])
        if f.requires_grad and any(capture.is_trained(0) for capture in self.captures):
            number = self._forwards
            self._forwards += 1
            self._waiting[number] = f, f._version
            # `output_of` may return what no loss is made of, such as a view: then the outputs tell.
            outputs = [x for x in _tensors(output) if x.requires_grad]
            for x in [f] if any(x is f for x in outputs) else outputs:
                x.register_hook(lambda gradient: self._sample(number))

    def scale(self) -> float:
        """What sampled gradients are multiplied with: as the loss is, as far as half precision allows.

        They are of single terms and need less than a loss that is the mean of many.
        """
        return min(self._loss_scale(), self._largest_scale)

    def forget(self) -> None:
        """Give up on forward passes whose loss was never differentiated."""
        self._waiting.clear()

    def detach(self) -> None:
        """Take the hook off the model."""
        _take_off(self.handles)

    def _sample(self, number: int) -> None:
        if self.clock.sampling:
            return
        trains = any(capture.is_trained_by_pass() for capture in self.captures)
        if not trains and _keeps_graph():  # the pass that trains is still to come
            return
        f, version = self._waiting.pop(number, (None, 0))
        if f is None or not self.clock.wanted or not trains:
            return
        if f._version != version:
            raise RuntimeError(
                f"the model's output must be as the model returned it for fisher={self.fisher!r}, got "
                "one that was changed in place, or shares its memory with what was: change a copy "
                "(masked_fill for masked_fill_)"
            )
        slots = [slot for capture in self.captures for slot in capture.slots()]
        columns = self.likelihood.columns(tuple(f.shape))
        count = self.samples if self.fisher == "mc" else columns
        outputs = f.detach()
        scale = self.scale()
        self.clock.passes()
        self.clock.sampling = True
        model = self.model()
        sharded = [] if model is None else sharded_modules(model)
        try:
            with kept_whole(sharded):  # the loss's own pass comes after ours and wants parameters, too
                for i in range(count):
                    gradient = self._gradient(outputs, i) * scale
                    found = torch.autograd.grad(
                        [f], slots, [gradient.to(f.dtype)], retain_graph=True, allow_unused=True
                    )
                    self._add(found, count, outputs.numel() / columns if i == 0 else 0.0)
        finally:
            self.clock.sampling = False

    def _gradient(self, outputs: torch.Tensor, index: int) -> torch.Tensor:
        if self.fisher == "type-2":
            column = self.likelihood.square_root(outputs, index)
            return with_signs(column, self._noise(outputs, tuple(outputs.shape[:-1])))
        noise = self._noise(outputs, self.likelihood.noise_shape(tuple(outputs.shape)))
        uniform = (noise / (2 * 3**0.5) + 0.5).clamp(0, 1 - 2**-24)
        sampled: torch.Tensor = self.likelihood.sample_gradient(outputs, uniform)
        return sampled

    def _noise(self, outputs: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """New noise of this shape, symmetric about 0."""
        stream = torch.full((1,), self.seed, dtype=torch.int32, device=outputs.device)
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        noise: torch.Tensor = unit_noise(stream, self.draws, shape, dtype)[0]
        self.draws += 1
        return noise

    def _add(self, found: tuple[torch.Tensor | None, ...], count: int, terms: float) -> None:
        """Sums of one pass of `count`: means over samples, sums over columns.

        Args:
            terms: for the layers that it came to.
        """
        at = 0
        for capture in self.captures:
            slots = capture.slots()
            outer = 1.0 / count if self.fisher == "mc" else 1.0
            reached = any(gradient is not None for gradient in found[at : at + len(slots)])
            capture.terms += terms if reached else 0.0
            for slot, gradient in zip(slots, found[at : at + len(slots)], strict=True):
                if gradient is None:
                    continue
                counted = any(slot is s for s in capture.counted_slots())
                gradient = gradient * (1.0 / count if counted else outer)
                known = capture.sampled.get(id(slot))
                capture.sampled[id(slot)] = gradient if known is None else known.add_(gradient)
            at += len(slots)


def _keeps_graph() -> bool:
    """Whether the backward pass that runs leaves the graph for another one."""
    # Versions of torch without it wait for the step to let go.
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


def _take_off(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _tensors(output: Any) -> list[torch.Tensor]:
    """All tensors in what a model returned."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return [x for part in output for x in _tensors(part)]
    return _tensors(vars(output)) if hasattr(output, "__dict__") else []
