"""The front door of K-FAC for PyTorch."""

from __future__ import annotations

import copy
import functools
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from suite.core import kfac as core_kfac
from suite.core.checks import check_choice
from suite.core.renamed import OF_KFAC, says_new_names
from suite.core.routing import Route, Routing
from suite.torch import attached, kfac_records
from suite.torch.agreement import Terms
from suite.torch.autocast import without_autocast
from suite.torch.checks import check_state_dict, is_at_hand, plain, warn_user
from suite.torch.collectives import SameGroup
from suite.torch.dtensors import settle
from suite.torch.find_layers import FoundLayers
from suite.torch.fisher import FisherSampler, Likelihood
from suite.torch.grad_scaling import (
    GradScaling,
    refuse_unknown_scaler,
    require_unscaled,
    scale_of,
    warn_of_unknown_scaler,
)
from suite.torch.kfac_engine import RANK_STRIDE, KFACEngine
from suite.torch.overdue import Overdue
from suite.torch.recorders import is_recording
from suite.torch.settings import (
    AssignmentStrategy,
    ComputeMethod,
    DistributedStrategy,
    check_hyperparameter,
    check_model_and_optimizer,
    check_settings,
    choice_of,
    likelihood_of,
    ranks_of,
    workers_of,
)
from suite.torch.skipped import SkippedSteps
from suite.torch.state_hooks import after_hooks

Schedule: TypeAlias = float | Callable[[int], float]


class KFAC(torch.optim.Optimizer):
    """Kronecker-factored approximate curvature, before or around any torch optimizer.

    Without `optimizer` it is a preconditioner in the manner of kfac-pytorch: `step()` replaces the
    gradients of the layers it covers by natural-gradient directions, and the optimizer's own `step()`
    follows. With `optimizer` it is one optimizer, whose `step(closure=None)` does both.

        >>> kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        >>> loss = criterion(model(x), y)
        >>> loss.backward()
        >>> kfac.step()
        >>> kfac.zero_grad()

    Linear, convolution (transposed too), embedding and normalization layers, nn.MultiheadAttention,
    `suite.torch`'s recurrent layers and parameters that modules use by themselves are preconditioned;
    `print(kfac.routing())` says how, and which keep their gradient and why. Statistics are taken from
    forward passes in training mode with gradients, on steps t with t % factor_update_steps == 0, and,
    where that leaves a layer without any for so many of its own steps (networks that are trained in
    turn), in the coming ones until it has run. A step whose gradients, their squares or statistics are
    not all finite changes nothing: gradients are set to None, `skipped_steps` goes up, and a
    RuntimeWarning says so.

    Args:
        model: the model; its layers get forward hooks until `detach()`.
        optimizer: a torch optimizer over the model's parameters, or None.
        factor_update_steps: steps between updates of the factors' running averages.
        inv_update_steps: steps between computations of inverses or eigenbases.
        spread_inverses: compute those of some layers in every step instead of all in one, each layer's
            once in `inv_update_steps` steps: no step takes much longer than the others.
        damping: Tikhonov damping λ, in units of curvature. A new value is in the next direction with
            'eigen' and 'ekfac', in the next inverses with the others.
        factor_decay: decay of the running averages, in [0, 1).
        kl_clip: bound of lr² Σ⟨direction, gradient⟩; None switches clipping off.
        lr: the learning rate in that bound. Default: the optimizer's for each parameter, or 0.1
            without one.
        compute_method: 'eigen', 'inverse', 'newton_schulz' or 'ekfac', see `suite.core.kfac.KFAC`;
            with 'ekfac' statistics are due between refreshes, too: factor_update_steps is no multiple
            of inv_update_steps.
        compute_eigenvalue_outer_product: of 'eigen': keep d_G d_Aᵀ between refreshes, of the size of the
            gradient, and save an outer product a step. Damping is added at every step all the same.
        warm_start: of eigenbases: start from the last one, a QR instead of a full eigendecomposition.
        fisher: 'empirical': of the gradients of the loss; 'mc': of targets drawn from the model's
            predictive distribution; 'type-2': that distribution's, by one backward pass for each
            output coordinate, exactly where each term has rows of its own (else with random signs, as
            noise). The last two run backward passes of their own, for statistics only;
            call the model itself then, compile nothing of it, and use the activation checkpointing
            without reentrance. What a forward pass in training mode saved is kept until `step()`, unless
            it ran without gradients.
        likelihood: what the outputs mean, for 'mc' and 'type-2': a `Categorical`, `Bernoulli` or
            `Gaussian`, or such a name in lower case. 'empirical' has no use for it.
        output_of: picks the tensor that `likelihood` is about from what the model returns. Its last axis
            is of classes or coordinates, the others count the loss's terms: of n scalars it has to be
            (n, 1), as (n,) is one term of n coordinates.
        fisher_samples: how many targets 'mc' draws.
        seed: of the noise behind 'mc', the signs of 'type-2', `max_rows` and `max_examples`.
        weight_sharing: 'expand' takes every position (token, pixel) as a row, 'reduce' every example,
            with averaged inputs and summed gradients (Eschenhagen et al. 2023, arXiv:2311.00636); or a
            dict from class names, such as {'Conv2d': 'reduce'}.
        max_rows: statistics of linear and convolution layers from a random subset of at most so many
            rows of each call, scaled to be unbiased; None: all rows. Not of layers of 'reduce'.
        max_examples: statistics of convolutions, and of batch, group and instance norms, from a random
            subset of at most so many examples of each call, scaled to be unbiased; None: all. Costs
            less than as many rows from all examples; of convolutions it is taken instead of `max_rows`.
        factor_scaling: 'fisher', or 'kfac_pytorch' for that package's numbers: its layers (Linear and
            Conv2d), its scaling, its running averages started at the identity, its undivided damping.
        skip_layers: regular expressions; modules whose name one of them matches (by `re.search`), and
            all inside them, are left alone, and so are layers whose class name one matches, and all
            inside modules whose whole class name one matches. A warning names those that match nothing.
        factor_dtype: dtype of the running averages; default: the parameter's, at least float32.
        inv_dtype: dtype of inverses and eigenbases; default: likewise. Directions that come from rows
            (docs/speed.md) are computed in bfloat16 where inverses are and the hardware does it faster.
        packed_factors: keep triangles of what is symmetric, running averages and inverses, in half the
            memory; of 'eigen' and 'ekfac' the averages only. A bucket of layers at a time is unpacked.
            Checkpoints are the same, with and without.
        max_factor_size: a side above this gets a diagonal factor.
        loss_reduction: 'mean' or 'sum': what the loss does over its terms. The steps of a mean are those
            of a sum with `damping` and `kl_clip` times the number of terms. Over ranks, whose gradients
            are averaged, a sum of all terms is each rank's sum times the number of ranks. Where ranks
            have different numbers of terms: with 'mean' each rank's loss is the mean of its own terms,
            and ranks weigh by their counts; with 'global_mean' each rank's loss is scaled so that the
            average over ranks is the mean of all terms.
        terms: how many terms the loss of a step has, on this rank and in all its micro-batches: a
            number, or a function that is asked in every step that updates factors. None reads it off
            the layer that runs last, whose output positions are counted: too many where some do not
            count (labels that are ignored) or are averaged before the loss. Factors G grow with it;
            `counted_terms` is what was found. Not with 'mc' and 'type-2', which count the outputs'.
        grad_scaler: the GradScaler of mixed-precision training, or a function that returns the scale of
            the loss: statistics are taken of scaled gradients and have to be unscaled. Gradients must be
            unscaled before `step()`: `scaler.unscale_(optimizer)`, or `scaler.step(kfac)`; else `step`
            raises. With a GradScaler that is not given here statistics are too large by its square:
            `scaler.step(kfac)` raises, and where another optimizer's is called, which K-FAC does not
            see, the first step of a model on an accelerator warns.
        gradient_worker_fraction: the share of ranks that hold a layer's inverses and compute its
            direction, which the others receive: a number in [1/world, 1], or 'COMM_OPT' (1),
            'HYBRID_OPT' (1/2) or 'MEM_OPT' (1/world). See `suite.core.placement`.
        assignment_strategy: 'COMPUTE' or 'MEMORY', what is balanced over ranks.
        colocate_factors: keep A and G of a layer on one rank; needed for one gradient worker per layer.
        allreduce_bucket_cap_mb: what is sent travels in buckets of at most so many megabytes; 0: each
            tensor by itself.
        symmetry_aware: send triangles of symmetric factors and inverses only.
        process_group: of the ranks that train together on different data; default: that of the
            DistributedDataParallel that has all covered layers, or of the mesh that they are sharded
            over, else all, if torch.distributed is initialized when the KFAC is made. One that is given
            must have all ranks of that mesh.
        grad_worker_fraction: kfac-pytorch's name for `gradient_worker_fraction`.
        update_factors_in_hook, compute_factor_in_hook, accumulation_steps: of kfac-pytorch, without
            effect: factors are always averaged in `step()` from everything since the last one, however
            many backward passes that was.
        loglevel: of the routing report, which goes to the logger 'suite.torch'.

    factor_update_steps, inv_update_steps, damping, factor_decay, kl_clip and lr take a number or a
    function of the step count.

    Several processes:
        Wrap the model in DistributedDataParallel, or shard it by `fully_shard`, or average gradients
        otherwise, then construct KFAC with the same arguments on every rank. Ranks take steps together:
        `step`, `state_dict` and `load_state_dict` are called by all of them. Statistics of all ranks'
        data are summed, every factor is averaged and inverted on one rank, and the trajectory is that of
        one process with all the data. A gradient that is not finite on one rank skips the step on all.

    Notes:
        When `kl_clip` binds, the direction is scaled by 1/lr. A base optimizer with momentum keeps those
        directions and multiplies them with later rates: with a rising rate (warm-up) they overshoot.
        Weight decay of the base optimizer is added after preconditioning: it is decoupled.
        Steps that a GradScaler skips never arrive here and are not in `skipped_steps`.
        A step waits for the device once, to see whether all is finite. It does not, in one process on an
        accelerator, if it computes no inverses and the base optimizer is fused
        (`torch.optim.SGD(..., fused=True)`): then the device keeps that one from moving, and statistics
        from the averages. Such a skipped step counts in `steps`, also for what was due in it, leaves its
        gradients, and is warned of by the next step that waits.

    Raises:
        ValueError, TypeError: a bad value, a model on which nothing would be preconditioned, or one
            that has a K-FAC attached already.

    References: see `suite.core.kfac`. Argument names are kfac-pytorch's (Pauloski et al. 2021,
    arXiv:2107.01739).
    """

    @says_new_names(OF_KFAC)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        factor_update_steps: int | Callable[[int], int] = 1,
        inv_update_steps: int | Callable[[int], int] = 1,
        spread_inverses: bool = False,
        damping: Schedule = 0.001,
        factor_decay: Schedule = 0.95,
        kl_clip: Schedule | None = 0.001,
        lr: Schedule | None = None,
        compute_method: ComputeMethod | str = ComputeMethod.EIGEN,
        compute_eigenvalue_outer_product: bool = False,
        warm_start: bool = False,
        fisher: str = "empirical",
        likelihood: Likelihood | str | None = None,
        output_of: Callable[[Any], torch.Tensor] | None = None,
        fisher_samples: int = 1,
        seed: int = 0,
        weight_sharing: str | Mapping[str, str] = "expand",
        max_rows: int | None = None,
        max_examples: int | None = None,
        factor_scaling: str = "fisher",
        skip_layers: Sequence[str] | None = None,
        factor_dtype: torch.dtype | None = None,
        inv_dtype: torch.dtype | None = None,
        packed_factors: bool = False,
        max_factor_size: int = 8192,
        loss_reduction: str = "mean",
        terms: Terms = None,
        grad_scaler: GradScaling = None,
        gradient_worker_fraction: DistributedStrategy | str | float | None = None,
        assignment_strategy: AssignmentStrategy | str = AssignmentStrategy.COMPUTE,
        colocate_factors: bool = True,
        allreduce_bucket_cap_mb: float = 25.0,
        symmetry_aware: bool = False,
        process_group: Any = None,
        grad_worker_fraction: DistributedStrategy | str | float | None = None,
        update_factors_in_hook: bool = True,
        compute_factor_in_hook: bool = True,
        accumulation_steps: int = 1,
        loglevel: int = logging.DEBUG,
    ) -> None:
        if isinstance(process_group, SameGroup):
            process_group = process_group.group
        lr = 0.1 if lr is None and optimizer is None else lr
        self._hyperparameters: dict[str, Any] = {
            "factor_update_steps": factor_update_steps,
            "inv_update_steps": inv_update_steps,
            "damping": damping,
            "factor_decay": factor_decay,
            "kl_clip": kl_clip,
            "lr": lr,
        }
        settings: dict[str, Any] = {
            "compute_method": choice_of("compute_method", compute_method, ComputeMethod),
            "compute_eigenvalue_outer_product": compute_eigenvalue_outer_product,
            "spread_inverses": spread_inverses,
            "warm_start": warm_start,
            "fisher": fisher,
            "likelihood": likelihood,
            "output_of": output_of,
            "fisher_samples": fisher_samples,
            "seed": seed,
            "weight_sharing": weight_sharing,
            "max_rows": max_rows,
            "max_examples": max_examples,
            "factor_scaling": factor_scaling,
            "skip_layers": skip_layers,
            "factor_dtype": factor_dtype,
            "inv_dtype": inv_dtype,
            "packed_factors": packed_factors,
            "max_factor_size": max_factor_size,
            "loss_reduction": loss_reduction,
            "terms": terms,
            "grad_scaler": grad_scaler,
            "assignment_strategy": choice_of(
                "assignment_strategy", assignment_strategy, AssignmentStrategy
            ),
            "colocate_factors": colocate_factors,
            "allreduce_bucket_cap_mb": allreduce_bucket_cap_mb,
            "symmetry_aware": symmetry_aware,
            "process_group": SameGroup(process_group),
            **self._hyperparameters,
        }
        check_model_and_optimizer(model, optimizer)
        check_settings(
            {
                **settings,
                "update_factors_in_hook": update_factors_in_hook,
                "compute_factor_in_hook": compute_factor_in_hook,
                "accumulation_steps": accumulation_steps,
                "loglevel": loglevel,
            }
        )
        rule = core_kfac.KFAC(settings["compute_method"])
        rule.check_warm_start(warm_start)
        if not callable(factor_update_steps) and not callable(inv_update_steps):
            rule.check_periods(factor_update_steps, inv_update_steps)
        likelihood = settings["likelihood"] = likelihood_of(likelihood, fisher)
        self._grad_scaler = grad_scaler
        self._spread_inverses = spread_inverses
        self._base: torch.optim.Optimizer | None = None
        found = FoundLayers(
            model,
            skip_layers=list(skip_layers or ()),
            max_factor_size=max_factor_size,
            weight_sharing=weight_sharing,
            max_rows=max_rows or 0,
            max_examples=max_examples or 0,
            only=(nn.Linear, nn.Conv2d) if factor_scaling == "kfac_pytorch" else None,
            moved=None if optimizer is None else _moved_by(optimizer),
        )
        attached.require_free(found.layers)
        attached.rid_of_copies(model)
        ranks, tensor_ranks = ranks_of(model, found, process_group, allreduce_bucket_cap_mb)
        workers = workers_of(gradient_worker_fraction, grad_worker_fraction, ranks.world)
        if workers == 1 and not colocate_factors and not ranks.alone:
            raise ValueError(
                "colocate_factors must be True with one gradient worker per layer (MEM_OPT), got False"
            )
        if found.unmatched:
            warn_user(f"these patterns of skip_layers match no module: {sorted(found.unmatched)}")
        logging.getLogger("suite.torch").log(int(loglevel), "K-FAC:\n%s", found.routing)
        self._engine = KFACEngine(
            model,
            rule=rule,
            found=found,
            factor_dtype=factor_dtype,
            inv_dtype=inv_dtype,
            loss_reduction=loss_reduction,
            terms=terms,
            factor_scaling=factor_scaling,  # type: ignore[arg-type]
            outer_product=compute_eigenvalue_outer_product,
            warm_start=warm_start,
            seed=seed,
            ranks=ranks,
            tensor_ranks=tensor_ranks,
            workers=workers,
            strategy=settings["assignment_strategy"],
            colocate_factors=colocate_factors,
            symmetry_aware=symmetry_aware,
            packed_factors=packed_factors,
        )
        self._overdue = Overdue(len(found.layers))
        self._sampler: FisherSampler | None = None
        if likelihood is not None:
            self._sampler = FisherSampler(
                model.module if isinstance(model, DistributedDataParallel) else model,
                self._engine.capture,
                fisher=fisher,  # type: ignore[arg-type]
                likelihood=likelihood,
                output_of=output_of or _itself,
                samples=fisher_samples,
                seed=(seed + RANK_STRIDE * ranks.rank) % 2**31,
                loss_scale=functools.partial(scale_of, grad_scaler),
            )
        named = list(model.named_parameters())
        moved = {id(p) for _, p in named} if optimizer is None else _moved_by(optimizer)
        # By name, of the parameters that it was made for: what had a gradient, what the optimizer had.
        self._trained = {name: p for name, p in named if p.requires_grad}
        self._given = {name: p for name, p in named if id(p) in moved}
        self._settings = {**settings, "gradient_worker_fraction": workers / ranks.world}
        covered = {id(p): p for layer in self._engine.layers for p in layer.parameters()}
        super().__init__(list(covered.values()), {"lr": lr} if optimizer is None else {})
        self._base = optimizer
        self._steps = 0
        self._handed_over: Any = None  # state to a process that was started with this, which shares it
        self._is_graphed = False  # whether GraphedStep records this step
        self._compared = False  # whether ranks have the same parameters
        self._skipped = SkippedSteps()
        self._counted_terms: torch.Tensor | None = None
        attached.register(self, self._engine.capture)

    def _current(name: str) -> property:  # type: ignore[misc]
        def get(self: KFAC) -> Any:
            return self.hyperparameter(name)

        def put(self: KFAC, value: Any) -> None:
            self.set_hyperparameter(name, value)

        return property(get, put, doc=f"The value of `{name}` at this step, as given or set.")

    factor_update_steps = _current("factor_update_steps")
    inv_update_steps = _current("inv_update_steps")
    damping = _current("damping")
    factor_decay = _current("factor_decay")
    kl_clip = _current("kl_clip")
    lr = _current("lr")
    del _current

    def _setting(name: str) -> property:  # type: ignore[misc]
        def get(self: KFAC) -> Any:
            return self._settings[name]

        return property(get, doc=f"`{name}` as K-FAC was made with.")

    allreduce_bucket_cap_mb = _setting("allreduce_bucket_cap_mb")
    colocate_factors = _setting("colocate_factors")
    compute_eigenvalue_outer_product = _setting("compute_eigenvalue_outer_product")
    factor_dtype = _setting("factor_dtype")
    grad_scaler = _setting("grad_scaler")
    gradient_worker_fraction = grad_worker_fraction = _setting("gradient_worker_fraction")
    inv_dtype = _setting("inv_dtype")
    skip_layers = _setting("skip_layers")
    symmetry_aware = _setting("symmetry_aware")
    del _setting

    @property
    def compute_method(self) -> ComputeMethod:
        """How the preconditioner is applied."""
        return ComputeMethod(self._settings["compute_method"])

    @property
    def assignment_strategy(self) -> AssignmentStrategy:
        """What is balanced over ranks."""
        return AssignmentStrategy(self._settings["assignment_strategy"])

    @property
    def distributed_strategy(self) -> DistributedStrategy:
        """The name of `gradient_worker_fraction`: what is neither 1 nor one rank is HYBRID_OPT."""
        fraction, world = self.gradient_worker_fraction, self._engine.ranks.world
        if fraction == 1:
            return DistributedStrategy.COMM_OPT
        return DistributedStrategy.MEM_OPT if fraction * world == 1 else DistributedStrategy.HYBRID_OPT

    # With a base optimizer its groups, state and defaults are ours: schedulers, GradScaler and
    # checkpoints of one see those of the other, also after the base has replaced them.

    def _shared(name: str) -> property:  # type: ignore[misc]
        def get(self: KFAC) -> Any:
            return getattr(self._base, name) if self._base is not None else self.__dict__[f"_own_{name}"]

        def put(self: KFAC, value: Any) -> None:
            if self._base is not None:
                setattr(self._base, name, value)
            else:
                self.__dict__[f"_own_{name}"] = value

        return property(get, put, doc=f"`{name}` of the base optimizer; without one, its own.")

    param_groups = _shared("param_groups")
    state = _shared("state")
    defaults = _shared("defaults")
    del _shared

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; it keeps its plain gradient unless a layer has it."""
        if self._base is None:
            super().add_param_group(param_group)
            return
        self._base.add_param_group(param_group)
        self._engine.reports.added(self._base.param_groups[-1]["params"])

    @property
    def model(self) -> nn.Module:
        """The model whose layers are preconditioned."""
        return self._engine.model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The base optimizer; None for a preconditioner before one."""
        return self._base

    @property
    def steps(self) -> int:
        """Steps taken, without skipped ones: what was due in one of those is due in the next."""
        return self._steps

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing because a gradient or a statistic was not finite.

        Reading it waits for the device, if that was left to stop the optimizer.
        """
        return self._skipped.count()

    @property
    def counted_terms(self) -> float | None:
        """How many terms the loss was taken to have when factors were last updated, of all ranks.

        None: they were not. Reading it waits for the device. See `terms`.
        """
        return None if self._counted_terms is None else float(self._counted_terms)

    def hyperparameter(self, name: str) -> Any:
        """The value of a hyperparameter at this step, e.g. `kfac.hyperparameter('damping')`."""
        return self._at(name, self._steps)

    def _at(self, name: str, step: int) -> Any:
        value = self._given_as(name)
        if callable(value):
            value = value(step)
            check_hyperparameter(name, value)
        elif name == "lr" and self._base is None and is_at_hand(value):  # which others may have set
            check_hyperparameter(name, value)
        return value

    def _given_as(self, name: str) -> Any:
        """A number or a function. Without a base optimizer `lr` is in our own group, as any other's."""
        if name == "lr" and self._base is None:
            return self.param_groups[0].get("lr", self._hyperparameters["lr"])
        return self._hyperparameters[name]

    def _put(self, name: str, value: Any) -> None:
        self._hyperparameters[name] = value
        if name == "lr" and self._base is None:
            self.param_groups[0]["lr"] = value

    def set_hyperparameter(self, name: str, value: Any) -> None:
        """Give a hyperparameter a new value, from the next step on.

        Raises:
            ValueError: an unknown name, a value out of range, or a hyperparameter that was given as a
                function of the step count, which would overrule the value.
        """
        check_choice("name", name, tuple(self._hyperparameters))
        if callable(self._given_as(name)):
            raise ValueError(f"{name} was given as a function of the step count and cannot be set")
        check_hyperparameter(name, value)
        self._put(name, value)
        self._set_clock()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Precondition the gradients in place; with a base optimizer, then step it.

        Inside a function that torch.compile compiles it runs as it is, uncompiled.

        Args:
            closure: re-evaluates the model and returns the loss; called once, first.

        Returns:
            What `closure` returned.

        Raises:
            RuntimeError: layers have gradients but none was ever seen running (hooks lost to a graph
                that was compiled before), or gradients are still scaled, or ranks are inside of
                DistributedDataParallel.join(); nothing has changed then.
        """
        # Dynamo loses the gradients of slots. Asking for it when it is not loaded would load it.
        # Kept from one step to the next, what is asked for would be a warning where it traces.
        step = torch.compiler.disable(KFAC._step) if "torch._dynamo" in sys.modules else KFAC._step
        return step(self, closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_autocast(layer.weight.parameter for layer in self._engine.layers):
            self._take_step()
        return loss

    def _take_step(self) -> None:
        if is_recording() and not self._is_graphed:
            raise RuntimeError(
                "a step in a CUDA graph would never take statistics or new inverses when they are due: "
                "GraphedStep(kfac, loss_of) records each kind of step"
            )
        factor_update_steps = self.hyperparameter("factor_update_steps")
        inv_update_steps = self.hyperparameter("inv_update_steps")
        damping = self.hyperparameter("damping")
        factor_decay = self.hyperparameter("factor_decay")
        kl_clip = self.hyperparameter("kl_clip")
        self._engine.reports.periods(self._engine.rule, factor_update_steps, inv_update_steps)
        self._at("factor_update_steps", self._steps + 1)  # what is wrong with it is said now
        require_unscaled(self._grad_scaler, self, self._base)
        self._engine.capture.unwind()
        self._engine.ranks.require_current("KFAC")
        self._refuse_join()
        scale: Callable[[], float] = functools.partial(scale_of, self._grad_scaler)
        if self._sampler is not None:
            self._sampler.forget()
            scale = self._sampler.scale
        taken = self._engine.capture.take_statistics(scale)
        parameters = self._parameters()
        lr_of, moves = self._lr_of(), _among(parameters)
        settle(parameters)
        due = self._spread_inverses or self._steps % inv_update_steps == 0
        doubted, reads = self._overdue.doubted, not self._is_graphed
        agreed = self._engine.agree(parameters, taken, moves, doubted, reads=reads)
        self._engine.reports.joined(parameters)
        if not self._compared and agreed.present:
            self._engine.reports.require_storage()
            self._engine.require_the_same_parameters(agreed)
            if self._grad_scaler is None and self._sampler is None:
                warn_of_unknown_scaler(parameters)
            self._compared = True
        by_device = (not due or self._is_graphed) and self._engine.is_alone
        by_device = by_device and self._skipped.can_be_left_to_device(self._base, parameters)
        if agreed.finite is not None and not by_device:
            agreed = self._skipped.look(agreed, agreed.finite, self._steps)
        if not agreed.unusable:
            counts = True
            still = self._base is not None and all(map(_stands_still, self.param_groups))
            overdue, regular = self._overdue.layers, self._steps % factor_update_steps == 0
            if regular:
                counts = self._engine.update(taken, agreed, factor_decay)
                counts |= self._base is not None and not still  # which moves by its momentum
                self._counted_terms = agreed.counted_terms() if any(agreed.seen) else self._counted_terms
            else:
                if any(agreed.seen[i] for i in overdue):
                    self._engine.update(taken, agreed, factor_decay, overdue)
                if still:
                    counts = not self._engine.reports.gradients_are_zero()  # as in `KFACEngine.update`
            wanted = regular or bool(overdue)
            told = agreed.present, agreed.seen, agreed.idle, wanted, regular
            self._overdue.note(*told, factor_update_steps)
            self._engine.reports.stale(self._overdue.stale)
            del taken  # before inverses need room
            if self._spread_inverses:
                turn = self._steps % inv_update_steps, inv_update_steps
                self._engine.refresh(damping, self._steps, turn)
            elif due:
                self._engine.refresh(damping, self._steps, in_place=self._is_graphed)
            self._engine.precondition(damping, kl_clip, lr_of, moves, agreed)
            if self._base is not None:
                self._skipped.step(self._base, parameters, agreed.finite)
            self._steps += int(counts)
        else:
            self._engine.capture.forget_rows()
            where = "" if self._engine.ranks.alone else f" on ranks {list(agreed.unusable)}"
            self._skipped.skip(parameters, self._steps, where)
        self._set_clock()

    def _set_clock(self) -> None:
        """Whether the coming step wants statistics, and its number for the noise."""
        due = self._steps % self.hyperparameter("factor_update_steps") == 0
        self._engine.capture.clock.want(due or bool(self._overdue.layers))
        self._engine.capture.clock.count.fill_(self._steps)

    def _parameters(self) -> list[torch.Tensor]:
        """What the base optimizer moves; without one, the model's parameters as they are now."""
        if self._base is None:
            return list({id(p): p for p in self._named_parameters().values()}.values())
        moved = [p for group in self._base.param_groups for p in group["params"]]
        return list({id(p): p for p in moved}.values())

    def _named_parameters(self) -> dict[str, Any]:
        return self._engine.reports.parameters()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler.step asks an optimizer first; the one sign of it that an optimizer gets."""
        if self._grad_scaler is None and self._sampler is None:
            refuse_unknown_scaler()
        return False

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is a new KFAC on the copied model, whose hooks do not come along.
        # What this rank has: others need not copy theirs.
        state = self.state_dict(gather=not self._engine.factors.allocated)["kfac"]
        # Layers whose parameters were exchanged since, or taken away, stay behind.
        now = self._named_parameters()
        present = {id(p) for p in now.values()}
        layers = [x for x in self._engine.layers if any(id(p) not in present for p in x.parameters())]
        gone, without = {x.name for x in layers}, {id(p) for x in layers for p in x.parameters()}
        saved = {other for name in gone for other in self._engine.saved_names(name)}
        state["layers"] = {name: x for name, x in state["layers"].items() if name not in saved}
        shared = kfac_records.sharing_of(state)
        kept = {name: leader for name, leader in shared.items() if gone.isdisjoint((name, leader))}
        here = [i for i, layer in enumerate(self._engine.layers) if layer.name not in gone]
        waits = self._overdue.state(self._steps, self.factor_update_steps, here)
        state["inputs"] = kfac_records.inputs_of(kept, self._settings, waits)
        known = [
            frozenset(n for n, p in names.items() if now.get(n) is p and id(p) not in without)
            for names in (self._trained, self._given)
        ]
        made_with = type(self), self._engine.model, self._base, self._settings
        if multiprocessing.context.get_spawning_popen() is not None:
            self._handed_over = state  # whose memory the process opens when it has started
        return kfac_records.made_again, (*made_with, *known), state

    def __setstate__(self, kfac: dict[str, Any]) -> None:
        self._take_over(kfac, has_inverses=True)
        self._load_counts(kfac)

    def _refuse_join(self) -> None:
        """RuntimeError inside of DistributedDataParallel.join(); no public question exists."""
        model = self._engine.model
        if not isinstance(model, DistributedDataParallel) or self._engine.is_alone:
            return
        if getattr(getattr(model, "_join_config", None), "enable", False):
            raise RuntimeError(
                "K-FAC does not step inside of DistributedDataParallel.join(), where a rank without "
                "data answers DDP's messages only: give all ranks as many batches"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and statistics of backward passes that no step has used.

        Gradients of the optimizer's parameters; without an optimizer, of those that are preconditioned.
        """
        super().zero_grad(set_to_none)
        self._engine.capture.take_statistics()
        self._engine.capture.forget_rows()

    def reset_batch(self) -> None:
        """Forget statistics, and forward passes, that no step has used."""
        self._engine.capture.take_statistics()
        self._engine.capture.forget_rows()
        if self._sampler is not None:
            self._sampler.forget()

    def _lr_of(self) -> Callable[[nn.Parameter], Any]:
        lr = self.hyperparameter("lr")
        if self._base is None:
            return lambda parameter: lr
        groups = [(group["lr"] if lr is None else lr, group["params"]) for group in self.param_groups]
        rates = {id(p): rate for rate, parameters in groups for p in parameters}
        return lambda parameter: rates.get(id(parameter), 0.0)

    def routing(self) -> Routing:
        """What happens to every parameter of the model and the optimizer, and why; prints as a table."""
        of_model = self._engine.routing(_among(self._parameters()))
        return Routing((*of_model.routes, *self._beside_the_model()))

    def _beside_the_model(self) -> Iterator[Route]:
        """Of the optimizer's parameters that are none of the model's."""
        own = {id(parameter) for parameter in self._named_parameters().values()}
        for number, group in enumerate([] if self._base is None else self._base.param_groups):
            names = group.get("param_names") or range(len(group["params"]))
            for name, parameter in zip(names, group["params"], strict=True):
                if id(parameter) not in own:
                    name = f"optimizer.{number}.{name}"
                    reason = "not the model's: the optimizer's own step, which kl_clip does not scale"
                    yield Route(name, tuple(parameter.shape), "plain", "", reason)

    def memory_plan(self) -> dict[str, int]:
        """Bytes that K-FAC's own state will take: {'factors': ..., 'inverses': ...}.

        Nothing is allocated before the first step. Layers that turn out to read the same input then
        share a factor, and take less than planned.
        """
        return self._engine.factors.memory_plan()

    def memory_usage(self) -> dict[str, int]:
        """Bytes of K-FAC's own state: {'factors': ..., 'inverses': ...}."""
        return self._engine.factors.memory_usage()

    @torch.no_grad()
    def metrics(self) -> dict[str, Any]:
        """Plain numbers about the last step for any logger. Asking costs about what new inverses do.

        Keys: 'steps', 'skipped_steps', 'damping', 'kl_clip_coefficient', 'steps_since_refresh' (how
        stale the inverses are; with `spread_inverses` how far the current round of them is), 'retries'
        (factorizations saved by another try), and 'layers', by name: 'condition_A', 'condition_G'
        (about the largest over the smallest eigenvalue; 1e38 if singular), 'failures_A', 'failures_G',
        'ready', and 'update_to_weight', the norm of what is in the gradient now (after `step`: the
        direction) over the weight's.

        Nothing travels: one rank may ask alone. Of several ranks each has 'condition_' and 'failures_'
        of the factors that it keeps averages of (each factor is on one rank), and no
        'update_to_weight' of weights that `fully_shard` has spread over ranks; of a tensor-parallel
        layer it is that of the rank's block.
        """
        engine = self._engine.metrics(self.hyperparameter("damping"), self._steps)
        return {"steps": self._steps, "skipped_steps": self.skipped_steps, **engine}

    def detach(self) -> None:
        """Take all hooks off the model. The factors stay; no further statistics arrive."""
        self._engine.capture.detach()
        if self._sampler is not None:
            self._sampler.detach()

    def state_dict(
        self, include_factors: bool = True, *, include_inverses: bool = True, gather: bool = True
    ) -> dict[str, Any]:
        """Everything a resumed run needs: plain numbers and tensors, by layer name under 'kfac'.

        With a base optimizer its 'state' and 'param_groups' are there as well; the first group's 'kfac'
        is the same record once more, for torch.distributed.checkpoint's `get_optimizer_state_dict`,
        which keeps nothing else.

        Args:
            gather: with several ranks: collect their tensors on every rank; all must call it then, and
                one may save. With False it is what this rank has, without the base optimizer's state,
                for torch.distributed.checkpoint (`get_optimizer_state_dict` of the base saves that).
            include_factors: the layers' tensors at all; without them a resumed run starts from nothing.
            include_inverses: what was computed from them. Without it a resumed run computes inverses
                from the averages as saved, which is the same run only where they were due.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        given = {name: self._given_as(name) for name in self._hyperparameters}
        numbers = {name: plain(value) for name, value in given.items() if not callable(value)}
        sharing = self._engine.factors.sharing()
        waits = self._overdue.state(self._steps, self.factor_update_steps)
        kfac = {
            "version": kfac_records.VERSION,
            "compute_method": self._engine.rule.compute_method,
            "steps": self._steps,
            "skipped_steps": self.skipped_steps,
            "refreshed_at": self._engine.refreshed_at,
            "draws": 0 if self._sampler is None else self._sampler.draws,
            "hyperparameters": numbers,
            "layers": self._engine.state_dict(
                gather=gather, include_factors=include_factors, include_inverses=include_inverses
            ),
            "inputs": kfac_records.inputs_of(sharing, self._settings, waits),
            "discovered": not self._engine.capture.clock.discovering,
            "gathered": gather,
            "factors": include_factors and self._engine.factors.allocated,
            "inverses": include_inverses,
        }
        if self._base is None and "initial_lr" in self.param_groups[0]:  # of a scheduler
            kfac["initial_lr"] = plain(self.param_groups[0]["initial_lr"])
        base = self._base.state_dict() if self._base is not None and gather else {}
        if base.get("param_groups"):  # wrappers of optimizers may have it elsewhere
            base["param_groups"][0]["kfac"] = kfac
        return after_hooks(self, {**base, "kfac": kfac})

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], compute_inverses: bool = True) -> None:
        """Take over a `state_dict()`.

        Args:
            state_dict: from `state_dict()`.
            compute_inverses: where it has factors without inverses, compute them now.

        Raises:
            ValueError: layers that do not fit, by name; nothing has changed then, on any rank. A
                checkpoint of kfac-pytorch fits with `factor_scaling='kfac_pytorch'`.
        """
        check_state_dict(state_dict)
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups = [dict(group) for group in state_dict.get("param_groups") or []]
        if groups:
            of_group = [group.pop("kfac", None) for group in groups]
            record = {} if of_group[0] is None else {"kfac": of_group[0]}
            state_dict = {**record, **state_dict, "param_groups": groups}
        if self._engine.factor_scaling == "kfac_pytorch" and kfac_records.is_kfac_pytorchs(state_dict):
            names = [layer.name for layer in self._engine.layers]
            state_dict = kfac_records.from_kfac_pytorch(state_dict, names, self._settings)
        problem, ranks = self._misfit(state_dict), self._engine.ranks
        if any(ranks.gather(problem is not None, "K-FAC's agreement on a checkpoint")):
            raise ValueError(problem or "the state_dict of another rank does not fit, as its error says")
        kfac = state_dict["kfac"]
        before = self._engine.snapshot()
        self._take_over(kfac, has_inverses=kfac["inverses"])
        of_base = {key: value for key, value in state_dict.items() if key != "kfac"}
        if self._base is not None and of_base:
            try:
                self._base.load_state_dict(of_base)
            except Exception:
                self._engine.rewind(before)
                raise
        self._load_counts(kfac)
        if not kfac["factors"] and kfac["steps"]:
            warn_user(
                f"the state_dict, of step {kfac['steps']}, has no factors: their averages begin anew"
            )
        if compute_inverses and kfac["factors"] and not kfac["inverses"]:
            self._engine.refresh(self.hyperparameter("damping"), self._steps)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _misfit(self, state_dict: Mapping[str, Any]) -> str | None:
        """Why it is no state of this object; None: it is one."""
        known, has_base = self._hyperparameters, self._base is not None
        problem = kfac_records.misfit(state_dict, self._settings, known, has_base)
        if problem is not None:
            return problem
        return self._engine.factors.misfit(self._engine.own_blocks(state_dict["kfac"]["layers"]))

    def _take_over(self, kfac: Mapping[str, Any], *, has_inverses: bool) -> None:
        refreshed = has_inverses and kfac["refreshed_at"] is not None
        shared, discovered = kfac_records.sharing_of(kfac), kfac["discovered"]
        self._engine.load_state_dict(
            kfac["layers"], shared, discovered, held=kfac["factors"], refreshed=refreshed
        )

    def _load_counts(self, kfac: dict[str, Any]) -> None:
        for name, value in kfac["hyperparameters"].items():
            if not callable(self._given_as(name)):
                self._put(name, copy.deepcopy(value))
        if self._base is None and "initial_lr" in kfac:
            self.param_groups[0]["initial_lr"] = kfac["initial_lr"]
        self._steps = kfac["steps"]
        self._skipped.load(kfac["skipped_steps"])
        self._engine.refreshed_at = kfac["refreshed_at"]
        self._overdue.load(kfac_records.waits_of(kfac), kfac["steps"], self.factor_update_steps)
        if self._sampler is not None:
            self._sampler.draws = kfac["draws"]
        self._set_clock()

    def __repr__(self) -> str:
        settings = {
            **{name: value for name, value in self._settings.items() if _is_short(value)},
            **{name: self._given_as(name) for name in self._hyperparameters},
            "layers": len(self._engine.layers),
            "steps": self._steps,
        }
        inner = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        base = "" if self._base is None else f"optimizer={self._base!r}, "
        return f"KFAC({base}{inner})"


KFACPreconditioner = KFAC


def _moved_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _among(parameters: Sequence[torch.Tensor]) -> Callable[[nn.Parameter], bool]:
    """Whether a parameter is one of these, whose gradients the optimizer uses, and clears."""
    own = {id(p) for p in parameters}
    return lambda parameter: id(parameter) in own


def _is_short(setting: Any) -> bool:
    return setting is not None and isinstance(setting, str | float | int | list | tuple | torch.dtype)


def _itself(output: Any) -> Any:
    return output


def _stands_still(group: Mapping[str, Any]) -> bool:
    """Whether a group's learning rate is 0, where the host knows it."""
    lr = group.get("lr")
    if isinstance(lr, torch.Tensor):
        return is_at_hand(lr) and not lr.item()
    return isinstance(lr, int | float) and lr == 0
