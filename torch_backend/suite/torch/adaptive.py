"""K-FAC that finds its learning rate, momentum and damping from a quadratic model of the loss."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from suite.core.damping import levenberg_marquardt
from suite.core.linalg import inner_product
from suite.core.routing import Routing
from suite.core.step_size import quadratic_step
from suite.torch.checks import check_number, check_state_dict, warn_user
from suite.torch.dtensors import is_sharded
from suite.torch.kfac import KFAC
from suite.torch.replay import Buffers, Draws, derivatives_along, value_with, without_reducers
from suite.torch.state_hooks import after_hooks

Tensors = Sequence[torch.Tensor]
_HIGHEST = 1e4  # of damping


class _LastStep(NamedTuple):
    moves: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # parameter, value before, change
    predicted: float  # change of the loss

    def before(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters, those frozen since left out, and their values before the step."""
        return [(p, value) for p, value, _ in self.moves if p.requires_grad]


class AdaptiveKFAC(torch.optim.Optimizer):
    """K-FAC without a learning rate, momentum or damping to tune, for full or large batches.

    The step is c₁ d + c₂ δ, d the direction of K-FAC and δ the step before. c is where a quadratic model
    of the loss is lowest, whose curvature is the exact Gauss-Newton matrix of the batch plus damping.
    Damping falls while the loss of the next batch goes down as the model said, and rises when it goes
    up; a step that raises it by more than it was to fall, or makes it infinite, is taken back.

        >>> kfac = KFAC(model, damping=0.1, compute_method="inverse", inv_update_steps=5)
        >>> optimizer = AdaptiveKFAC(kfac)
        >>> def closure():
        ...     outputs = model(x)
        ...     return criterion(outputs, y), outputs
        >>> loss = optimizer.step(closure)

    The closure returns the loss, without calling backward(), and the tensor, or tensors, that the loss
    is a convex function of: logits, or the residuals of a PINN. It is called four times a step, on the
    same data: with gradients, at the parameters before the last step, and for the derivatives of its
    outputs along d and δ, by forward-mode differentiation. Random numbers (dropout) are the same each
    time; what it does to the model's buffers counts once. It may take derivatives by its inputs with
    torch.autograd.grad, as PINNs do. A step takes 1.6 to 2.5 times as long as KFAC's.

    Batches have to be large enough that their curvature is that of the problem: from some 50 or 100
    examples for small networks, the more the better: a PINN of 2,300 parameters with new points in every
    step stands still with 256 of them, and does well with 1,000, or with the same 256 always.
    On smaller ones damping rises until nothing moves, with a warning; there a `KFAC` with a base
    optimizer does better.

    Args:
        kfac: a `KFAC` without an optimizer. Its `damping` is where damping starts; 0.1 suits losses
            that are means of terms near 1. `kl_clip` and `lr` have no effect.
        fallback: an optimizer for all parameters that K-FAC does not cover, and no others.

    Several processes:
        As `KFAC`, with DistributedDataParallel, the same on every rank; losses of ranks are averaged.

    Limits:
        Outputs that the loss is not convex in end in skipped steps. What torch has no forward-mode
        derivative for (LSTM's and EmbeddingBag's kernels, parametrizations.weight_norm, the reentrant
        checkpoint) is an error. A step that is taken back leaves the fallback's.

    Notes:
        The host waits for the device four times a step.
        K-FAC's direction sees a new damping when inverses are computed, with 'eigen' at once.

    Raises:
        ValueError, TypeError: a bad value, trainable parameters that neither K-FAC nor `fallback` has,
            sharded parameters.

    References:
        Martens & Grosse 2015 (arXiv:1503.05671), sections 6.4, 6.5 and 7. There damping is adapted by
        the loss of the minibatch that made the step, which every step lowers, however noisy.
    """

    def __init__(self, kfac: KFAC, fallback: torch.optim.Optimizer | None = None) -> None:
        if not isinstance(kfac, KFAC):
            raise TypeError(f"kfac must be a KFAC, got {type(kfac).__name__}")
        if kfac.optimizer is not None:
            raise ValueError(f"kfac must be without an optimizer, got one around {kfac.optimizer!r}")
        if fallback is not None and not isinstance(fallback, torch.optim.Optimizer):
            kind = type(fallback).__name__
            raise TypeError(f"fallback must be a torch.optim.Optimizer or None, got {kind}")
        check_number("damping", kfac.damping, above=0)
        kfac.set_hyperparameter("damping", kfac.damping)  # an error if it is a function
        covered = [p for group in kfac.param_groups for p in group["params"]]
        _check_parameters(kfac.model, covered, fallback)
        self.kfac, self.fallback = kfac, fallback
        super().__init__(covered, {})
        self._last: _LastStep | None = None
        self._skipped_steps = self._rejected_steps = 0
        self._differentiates = False  # whether the closure takes derivatives itself
        self._looks_at_outputs = 3  # more times
        self._found = {"learning_rate": 0.0, "momentum": 0.0, "reduction_ratio": math.nan}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only at construction: what K-FAC covers is fixed."""
        if self.param_groups:
            raise ValueError("AdaptiveKFAC covers what its KFAC does, fixed at construction")
        super().add_param_group(param_group)

    @property
    def damping(self) -> float:
        """λ as it is now."""
        return float(self.kfac.damping)

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing because something was not finite."""
        return self.kfac.skipped_steps + self._skipped_steps

    @property
    def rejected_steps(self) -> int:
        """Steps that were taken back, because the loss rose by more than it was to fall."""
        return self._rejected_steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> torch.Tensor:  # type: ignore[override]
        """One step, or one taken back.

        Args:
            closure: returns (loss, outputs), the same each time it is called here.

        Returns:
            The loss at the parameters that it started from.

        Raises:
            RuntimeError: a closure that calls backward(), does not return the same each time, or whose
                outputs do not lead to the loss; parameters have not changed then. Of an error in a later
                call factors have the batch's statistics.
            TypeError: a closure that returns no (loss, outputs).
        """
        model, devices = self.kfac.model, list({p.device for p in self._covered})
        draws, buffers, damping = Draws(devices), Buffers(model), self.damping
        found, skipped = dict(self._found), self.kfac.skipped_steps
        self.zero_grad()

        def evaluate() -> list[torch.Tensor]:
            draws.rewind()
            torch.clear_autocast_cache()  # of parameters that have been moved since
            return _loss_and_outputs(closure())

        @contextlib.contextmanager
        def replayed() -> Iterator[None]:
            with buffers.stood_in(), without_reducers(model):
                yield

        def again() -> list[torch.Tensor]:
            if not self._differentiates:
                try:
                    with torch.no_grad(), replayed():
                        return evaluate()
                except RuntimeError as error:
                    if "not require grad" not in str(error):  # else it asks for derivatives itself
                        raise
                self._differentiates = True
            with torch.enable_grad(), self.kfac._engine.capture.clock.paused(), replayed():
                return evaluate()

        try:
            before = None if self._last is None else value_with(again, self._last.before())[0].detach()
            with torch.enable_grad():
                loss, *outputs = evaluate()
            drawn = Draws(devices)
            _check_graphs(model, loss, outputs)
            moved = self._stands(before, loss.detach()) and self._take_step(again, loss, outputs)
        except BaseException:
            self.kfac.set_hyperparameter("damping", damping)
            buffers.put_back()
            self.zero_grad()
            raise
        if self.kfac.skipped_steps > skipped:  # as if the step had not been
            self.kfac.set_hyperparameter("damping", damping)
            self._found = found
        if not moved:
            buffers.put_back()
            self.zero_grad()
        drawn.rewind()
        return loss.detach()

    def _stands(self, before: torch.Tensor | None, now: torch.Tensor) -> bool:
        """Adapt damping to what the last step did to the loss of this batch; take it back if need be."""
        if before is None or self._last is None:
            return True
        old, new = self._mean_over_ranks([before, now])
        if not math.isfinite(old):  # not the step's fault; the next batch tells of it
            if not math.isfinite(new):
                self._skip("the loss of its batch was not finite")
            return math.isfinite(new)
        change = new - old
        if abs(change) < 8 * torch.finfo(now.dtype).eps * abs(old):
            change = 0.0  # to rounding
        numbers = [self.damping, change, self._last.predicted]
        given = torch.tensor(numbers, dtype=torch.float64, device="cpu").unbind()
        damping, stands = levenberg_marquardt(*given, highest=_HIGHEST)
        if self.damping < _HIGHEST <= float(damping):
            warn_user(
                f"damping has reached {_HIGHEST:g} and parameters hardly move: losses of batches say "
                "more of the batch than of the step. Take larger ones, or a KFAC around an optimizer"
            )
        self.kfac.set_hyperparameter("damping", float(damping))
        self._found["reduction_ratio"] = change / min(self._last.predicted, -1e-300)
        if not stands:
            for parameter, value in self._last.before():
                parameter.copy_(value)
            self._last = None
            self._rejected_steps += 1
        return bool(stands)

    def _take_step(
        self, again: Callable[[], list[torch.Tensor]], loss: torch.Tensor, outputs: Tensors
    ) -> bool:
        """Move parameters to the minimum of the quadratic model; False: they have not moved."""
        with torch.enable_grad():
            loss.backward(retain_graph=True)
            slopes = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
        if all(slope is None for slope in slopes):
            raise RuntimeError("outputs must be the tensors that the loss is computed from, got others")
        covered = self._covered
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in covered]
        skipped = self.kfac.skipped_steps
        self.kfac.step()
        if self.kfac.skipped_steps > skipped:
            return False
        direction = [torch.zeros_like(p) if p.grad is None else p.grad for p in covered]
        steps = {} if self._last is None else {id(p): step for p, _, step in self._last.moves}
        vectors = [direction, [steps.get(id(p), torch.zeros_like(p)) for p in covered]]
        count = 2 if steps else 1
        found = [
            derivatives_along(again, self.kfac.model, dict(zip(map(id, covered), vector, strict=True)))
            for vector in vectors[:count]
        ]
        tangents = [[t for _, t in pairs[1:]] for pairs in found]
        curvature = _gauss_newton(slopes, outputs, tangents)
        repeated, derivative = found[0][0]
        through, terms = _through(slopes, tangents[0])
        mean = self._mean_over_ranks([loss, repeated, derivative, *curvature, through, terms])
        ours = _numbers(
            [_inner(u, v) for i, u in enumerate(vectors[:count]) for v in (gradients, *vectors[i:count])]
        )
        eps = max(torch.finfo(x.dtype).eps for x in (*covered, *outputs))
        self._check_closure(mean[0], mean[1], mean[2], ours[0], max(0.01, 8 * eps) * mean[-1])
        self._check_outputs(mean[2], mean[-2], mean[-1])
        dtype = torch.promote_types(loss.dtype, torch.float32)  # how well M and b are known
        M, b = (torch.zeros(shape, dtype=dtype, device="cpu") for shape in ((2, 2), (2,)))
        M[0, 0], b[0] = mean[3] + self.damping * ours[1], ours[0]
        if count == 2:
            M[0, 1] = M[1, 0] = mean[4] + self.damping * ours[2]
            M[1, 1], b[1] = mean[5] + self.damping * ours[4], ours[3]
        weights, predicted = quadratic_step(M, b)
        rate, momentum = weights.tolist()
        if not (math.isfinite(rate + momentum + float(predicted)) and (rate != 0 or ours[0] == 0)):
            self._last = None
            self.kfac.set_hyperparameter("damping", min(4 * self.damping, _HIGHEST))
            self._skip(
                "its curvature was not finite, or negative: the loss is not convex in the outputs"
            )
            return False
        moves = []
        for p, d, last, g in zip(covered, *vectors, gradients, strict=True):
            value = p.clone()
            p.add_(d * rate + last * momentum)
            p.grad = g
            moves.append((p, value, p - value))
        # Losses are seldom below zero: a model that promises more than the loss itself is off.
        self._last = _LastStep(moves, max(float(predicted), -abs(mean[0])))
        rate *= self.kfac._engine.clipped_by()  # of the direction as it was before
        self._found |= {"learning_rate": -rate, "momentum": momentum}
        if self.fallback is not None:
            self.fallback.step()
        return True

    def _check_closure(
        self, loss: float, again: float, derivative: float, slope: float, rounding: float
    ) -> None:
        """Raise unless the closure is one function of the parameters, differentiated correctly."""
        if abs(again - loss) > 0.01 * abs(loss) + 1e-30:
            raise RuntimeError(
                "closure must return the same loss each time it is called in a step, got "
                f"{loss:.6g} and {again:.6g}: draw the batch before step(), not in the closure"
            )
        if abs(derivative - slope) > 0.1 * abs(slope) + rounding:
            raise RuntimeError(
                f"the loss's derivative along the direction must be the gradient's, {slope:.6g}, got "
                f"{derivative:.6g}: a module holds parameters elsewhere than among its own, the closure "
                "is about another model or has derivatives taken without create_graph (detach() them), "
                "or an operation in it has a wrong forward-mode derivative"
            )

    def _check_outputs(self, derivative: float, through: float, size: float) -> None:
        """Warn, once, if the outputs do not have all that the loss is a function of, or some twice.

        In the first steps: later penalties on weights, which may stay out, balance the rest.

        Args:
            size: of the terms that `through` is a sum of.
        """
        if not self._looks_at_outputs:
            return
        self._looks_at_outputs -= 1
        if abs(through - derivative) > 0.1 * size:
            self._looks_at_outputs = 0
            warn_user(
                "the outputs do not make up the loss: its derivative along the direction is "
                f"{derivative:.6g}, through them {through:.6g}. Of what they leave out the curvature is "
                "unknown, and steps may be far too long: return all tensors that the loss is computed "
                "from, none of them computed from another"
            )

    def _skip(self, why: str) -> None:
        self._skipped_steps += 1
        warn_user(f"a step was skipped: {why} ({self.skipped_steps} skipped so far)")

    def _mean_over_ranks(self, values: Tensors) -> list[float]:
        ranks = self.kfac._engine.ranks
        like = functools.reduce(torch.promote_types, (x.dtype for x in values), torch.float32)
        numbers = torch.stack([x.detach().to(values[0].device, like) for x in values])
        mean: list[float] = (ranks.total(numbers, "the quadratic model") / ranks.world).tolist()
        return mean

    @property
    def _covered(self) -> list[torch.Tensor]:
        return [p for p in self.param_groups[0]["params"] if p.requires_grad]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients of the model, and what K-FAC has seen since its last step."""
        self.kfac.model.zero_grad(set_to_none)
        self.kfac.reset_batch()

    def routing(self) -> Routing:
        """What happens to every parameter of the model and why; prints as a table."""
        return self.kfac.routing()

    def metrics(self) -> dict[str, Any]:
        """Those of `KFAC.metrics`, and plain numbers about the last step.

        'learning_rate' and 'momentum', the coefficients of the direction and of the step before;
        'reduction_ratio', how the loss changed over how it was to change; 'rejected_steps'.
        """
        own = {"rejected_steps": self._rejected_steps, "skipped_steps": self.skipped_steps}
        return {**self.kfac.metrics(), **self._found, **own}

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs: plain numbers, and tensors by parameter name."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        fallback = {} if self.fallback is None else {"fallback": self.fallback.state_dict()}
        saved = {"kfac": self.kfac.state_dict(), "adaptive": self._own_state(), **fallback}
        return after_hooks(self, saved)

    def _own_state(self) -> dict[str, Any]:
        names = {id(p): name for name, p in _named(self.kfac).items()}
        last: dict[str, Any] = {}
        if self._last is not None:
            kept = {names[id(p)]: {"before": x, "change": step} for p, x, step in self._last.moves}
            last = {"last_step": kept, "predicted": self._last.predicted}
        counts = {"skipped_steps": self._skipped_steps, "rejected_steps": self._rejected_steps}
        return {**counts, "found": dict(self._found), **last}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict()`.

        Raises:
            ValueError: entries or layers that do not fit, by name; nothing has changed then.
        """
        check_state_dict(state_dict)
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        wanted = {"kfac", "adaptive"} | (set() if self.fallback is None else {"fallback"})
        if set(state_dict) != wanted:
            raise ValueError(f"state_dict must have keys {sorted(wanted)}, got {sorted(state_dict)}")
        own, parameters = state_dict["adaptive"], _named(self.kfac)
        missing = {"skipped_steps", "rejected_steps", "found"} - set(own)
        if missing:
            raise ValueError(f"state_dict['adaptive'] must have {sorted(missing)}, got {sorted(own)}")
        if "last_step" in own and "predicted" not in own:
            raise ValueError(f"state_dict['adaptive'] must have 'predicted', got {sorted(own)}")
        unlike = [
            name
            for name, kept in own.get("last_step", {}).items()
            if name not in parameters
            or kept.keys() != {"before", "change"}
            or any(getattr(x, "shape", None) != parameters[name].shape for x in kept.values())
        ]
        if unlike:
            raise ValueError(f"last_step must be of this model's parameters, got others: {unlike}")
        if self.fallback is not None:
            old = copy.deepcopy(self.fallback.state_dict())
            self.fallback.load_state_dict(state_dict["fallback"])
        try:
            self.kfac.load_state_dict(state_dict["kfac"])
        except Exception:
            if self.fallback is not None:
                self.fallback.load_state_dict(old)
            raise
        self._load(own, parameters)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, own: dict[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
        self._skipped_steps, self._rejected_steps = own["skipped_steps"], own["rejected_steps"]
        self._found, self._last = dict(own["found"]), None
        if "last_step" in own:
            named = [(parameters[name], kept) for name, kept in own["last_step"].items()]
            both = [
                (p, *(kept[key].to(p, copy=True) for key in ("before", "change"))) for p, kept in named
            ]
            self._last = _LastStep([(p, x.detach(), y.detach()) for p, x, y in both], own["predicted"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (type(self), self.kfac, self.fallback, self._own_state())

    def __repr__(self) -> str:
        return f"AdaptiveKFAC({self.kfac!r}, fallback={self.fallback!r})"


def _rebuilt(
    kind: type[AdaptiveKFAC], kfac: KFAC, fallback: torch.optim.Optimizer | None, own: dict[str, Any]
) -> AdaptiveKFAC:
    made = kind(kfac, fallback)
    made._load(own, _named(kfac))
    return made


def _named(kfac: KFAC) -> dict[str, torch.nn.Parameter]:
    """The model's parameters by their names in checkpoints."""
    return kfac._engine.reports.named_parameters()


def _check_parameters(
    model: torch.nn.Module, covered: Tensors, fallback: torch.optim.Optimizer | None
) -> None:
    """ValueError unless every trainable parameter is K-FAC's or the fallback's, and none is both's."""
    others = () if fallback is None else [p for g in fallback.param_groups for p in g["params"]]
    ours, theirs = {id(p) for p in covered}, {id(p) for p in others}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    both = [name for name, p in named if id(p) in ours & theirs]
    neither = [name for name, p in named if id(p) not in ours | theirs]
    sharded = [name for name, p in named if is_sharded(p)]
    known = {id(p) for p in model.parameters()}
    foreign = [tuple(p.shape) for p in others if id(p) not in known]
    if foreign:
        raise ValueError(
            f"fallback must have parameters of the model only, got some of shapes {foreign}"
        )
    if both:
        raise ValueError(f"fallback must not have parameters that K-FAC covers, got {both}")
    if neither:
        raise ValueError(
            "fallback must be an optimizer for all trainable parameters that K-FAC does not cover, got "
            f"none for {neither}"
        )
    if sharded:
        raise ValueError(f"parameters must be whole, got DTensors: {sharded}")


def _check_graphs(model: torch.nn.Module, loss: torch.Tensor, outputs: Tensors) -> None:
    if any(p.grad is not None for p in model.parameters()):
        raise RuntimeError("closure must return the loss, not yet backward(): that is called here")
    if not (loss.requires_grad and all(x.requires_grad for x in outputs)):
        raise RuntimeError("closure must return loss and outputs with graphs, got detached ones")


def _loss_and_outputs(returned: Any) -> list[torch.Tensor]:
    """[loss, *outputs] of what a closure returned.

    Raises:
        TypeError: not a scalar loss and a tensor, or a sequence of tensors.
    """
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        kind = type(returned).__name__
        raise TypeError(f"closure must return (loss, outputs), got {kind}")
    loss, outputs = returned
    several = isinstance(outputs, Iterable) and not isinstance(outputs, torch.Tensor)
    listed = list(outputs) if several else [outputs]
    if not (isinstance(loss, torch.Tensor) and loss.ndim == 0):
        raise TypeError(f"closure must return a loss that is a 0-d tensor first, got {loss!r}")
    if not listed or not all(isinstance(x, torch.Tensor) for x in listed):
        raise TypeError(
            "closure must return the tensor, or a sequence of the tensors, that the loss is a function "
            f"of second, got {type(outputs).__name__}"
        )
    if any(x.is_complex() for x in [loss, *listed]):
        raise TypeError("closure must return real tensors, got complex ones: take torch.view_as_real")
    return [loss, *listed]


def _gauss_newton(
    slopes: Sequence[torch.Tensor | None], outputs: Tensors, tangents: Sequence[Tensors]
) -> list[torch.Tensor]:
    """Σ (J v)ᵀ H (J w) over pairs of directions v <= w, H the loss's Hessian by the outputs.

    Args:
        slopes: the loss's gradients by the outputs, with their graph.
        tangents: of each direction, the derivatives of the outputs along it.
    """
    curved = [(s, i) for i, s in enumerate(slopes) if s is not None and s.requires_grad]
    found: list[torch.Tensor] = []
    for first, v in enumerate(tangents):
        products: Sequence[torch.Tensor | None] = [None] * len(outputs)
        if curved:
            products = torch.autograd.grad(
                [s for s, _ in curved],
                outputs,
                [v[i].to(s.dtype) for s, i in curved],
                retain_graph=True,
                allow_unused=True,
            )
        for w in tangents[first:]:
            parts = [
                _zero(x) if h is None else inner_product(h, x) for h, x in zip(products, w, strict=True)
            ]
            found.append(torch.stack([part.to(parts[0].device) for part in parts]).sum())
    return found


def _through(
    slopes: Sequence[torch.Tensor | None], tangents: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss's derivative along a direction from the outputs', and ‖slopes‖ ‖tangents‖.

    The first is what does not cancel of the second.
    """
    pairs = [(s.detach(), t) for s, t in zip(slopes, tangents, strict=True) if s is not None]
    s, t = zip(*pairs, strict=True)
    return _inner(s, t), (_inner(s, s).sqrt() * _inner(t, t).sqrt()).detach()


def _zero(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _inner(u: Tensors, v: Tensors) -> torch.Tensor:
    """Of complex ones that of real and imaginary parts."""
    parts = [inner_product(_real(x), _real(y)) for x, y in zip(u, v, strict=True)]
    return torch.stack([part.to(parts[0].device, parts[0].dtype) for part in parts]).sum()


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _numbers(values: Tensors) -> list[float]:
    """Read in one wait for the device."""
    numbers: list[float] = torch.stack([x.to(values[0].device) for x in values]).tolist()
    return numbers
