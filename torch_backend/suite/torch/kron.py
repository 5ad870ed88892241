"""The front door of PSGD Kron for PyTorch."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch

from suite.core import blocks
from suite.core import kron as core_kron
from suite.core.checks import check_choice
from suite.core.kron import FINITE_POWER
from suite.core.renamed import OF_KRON, says_new_names
from suite.core.routing import Route, Routing
from suite.core.schedules import precond_lr_schedule, precond_update_prob_schedule
from suite.core.step_size import Clip
from suite.torch.autocast import without_autocast
from suite.torch.checks import (
    check_number,
    check_state_dict,
    plain,
    warn_of_a_skipped_step,
    warn_user,
)
from suite.torch.collectives import Ranks
from suite.torch.dtensors import (
    group_of_all,
    is_sharded,
    local,
    require_all_shards,
    require_not_flattened,
    require_not_hidden,
    settle,
    shard_axes,
)
from suite.torch.hessian import exact, finite_difference
from suite.torch.inplace import HOST_DEVICES, all_finite
from suite.torch.kron_engine import KronEngine, as_real
from suite.torch.kron_records import Records, is_ours, of_others, require_fit
from suite.torch.kron_settings import (
    BEGINNING,
    COUNTS,
    FIXED,
    SCHEDULES,
    STRUCTURE,
    Schedule,
    Whiten,
    as_given,
    check_counts,
    check_group,
    is_misplaced,
    planned,
    require_same,
    rule_of,
    turns,
)
from suite.torch.kron_steps import GroupStep, Pairs, StepSettings, take_steps
from suite.torch.recorders import is_recording
from suite.torch.same_parameters import require_same_parameters
from suite.torch.state_hooks import after_hooks, state_before_hooks


class Kron(torch.optim.Optimizer):
    """PSGD Kron: momentum, whitened by a Kronecker-factored preconditioner fitted on the fly.

        >>> optimizer = Kron(model.parameters(), lr=3e-4)
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()

    A step with a gradient not finite, or above about 4e25 in single precision, changes nothing and is
    counted in `skipped_steps`. On an accelerator the host does not wait for that decision; elsewhere,
    and over several ranks, there is a warning. (The update schedule's clock is the host's: where it
    knows, a skipped step leaves that alone, too, elsewhere it ticks.) Every argument but `params`, `hvp`
    and those about ranks can differ between parameter groups.

    Args:
        params: parameters, named parameters, or groups of them. Of complex ones real and imaginary parts
            are an axis more.
        lr: learning rate >= 0, a number or a 0-d tensor.
        b1: decay of the momentum, in [0, 1).
        weight_decay: decoupled, multiplied by lr.
        preconditioner_update_probability: how often factors are updated, a number in (0, 1] or a
            function of the step; spread evenly, not drawn. Default: `precond_update_prob_schedule()`.
        max_size_triangular, min_ndim_triangular, memory_save_mode, merge_small_dims,
        target_merged_dim_size, partition_grads_into_blocks, block_size: which factors a parameter gets,
            see `suite.core.blocks.Structure`.
        preconditioner_lr: step size of the factors' updates, in (0, 1), a number or a function of how
            many there have been. Default: `precond_lr_schedule()`.
        preconditioner_init_scale: factors start as the identity times (their share of) this; None
            sets it from each block's first gradient.
        mu_dtype: dtype of the momentum; default: the parameter's, float32 for float16.
        precond_dtype: dtype of the factors; default: the parameter's, at least float32.
        geometry, betaL, damping: how factors are fitted, see `suite.core.kron.Kron`.
        packed_factors: keep P as triangles, in half the memory; Q, too, with geometries that leave it
            triangular or symmetric: 'EQ', 'QUAD', 'QUAD4P'. A bucket at a time is unpacked. Checkpoints
            are the same, with and without.
        cache_preconditioner: keep P between updates, or compute P = QᵀQ in every step; with 'PRO4P' and
            'QUAD4P' it is at hand, as their factors are those of P. Default: keep that of an axis if
            computing it takes more than a quarter of the multiplications of its product.
        max_skew, shared_factors: see `suite.core.blocks.Structure`.
        whiten: what factors are fitted to, 'momentum' or 'gradient'; what they precondition is always
            the momentum, in pure noise smaller than the gradient by √((1 - b1) / (1 + b1)).
        update_first: whether the factors' update comes before the step that is due, or after it.
        clip: the largest root mean square of a preconditioned block, or (that, the largest entry); None:
            unbounded. A whitened block's is 1.
        normalize_grads: divide each parameter's gradient by its norm first.
        stochastic_rounding: of a momentum or factors in half precision, whose small updates rounding to
            nearest would lose.
        maximize: ascend instead of descend.
        seed: of the noise that the fit uses; the same seed gives the same run, also in JAX.
        hvp: fit P to |H|⁻¹, not to whiten (Kron Newton); for all groups. 'exact': `step` needs a closure
            that returns the loss and leaves the backward pass to `step`, which differentiates twice when
            an update is due, by its own parameters (another optimizer's get no gradient).
            'finite_difference': `step` needs a closure as torch.optim.LBFGS does, and calls it again at
            a nearby point; it must be a function of the parameters alone.

        distributed: with several ranks, 'replicate': each fits and preconditions everything; 'shard':
            each has a share of the blocks, balanced by cost, and they exchange directions. One
            trajectory either way, that of one process. Gradients must be averaged over ranks before
            `step` (by DistributedDataParallel or `fully_shard`, whose DTensors are preconditioned whole,
            not shard by shard); all ranks call `step`, and with 'shard' `state_dict`, together. 'shard'
            is not for `hvp`, which over several ranks is 'finite_difference'.
        process_group: those ranks; default: that of the mesh over which parameters are sharded, if one
            has all others' ranks, else all, if torch.distributed is initialized by now. A given one
            must have all ranks over which a parameter is split.
        allreduce_bucket_cap_mb: what is sent travels in buckets of at most so many megabytes.

    Raises:
        ValueError, TypeError: bad values; complex parameters that are sharded, or with `hvp`; sparse
            gradients (at `step`).

    References: see `suite.core.kron`. Argument names are distributed_kron's.
    """

    _recording: Any = None  # where GraphedStep has a step read numbers that change
    _agreed_on = 0  # how many parameters ranks know that they all have
    _compared = False  # whether they have the same ones, where they work for each other

    @says_new_names(OF_KRON)
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 0.0003,
        b1: float = 0.9,
        weight_decay: float = 0.0,
        preconditioner_update_probability: Schedule | None = None,
        max_size_triangular: int = 8192,
        min_ndim_triangular: int = 2,
        memory_save_mode: blocks.MemorySaveMode | None = None,
        preconditioner_lr: Schedule | None = None,
        preconditioner_init_scale: float | None = 1.0,
        mu_dtype: torch.dtype | None = None,
        precond_dtype: torch.dtype | None = None,
        merge_small_dims: bool = True,
        target_merged_dim_size: int = 4096,
        partition_grads_into_blocks: bool = True,
        block_size: int = 128,
        *,
        geometry: core_kron.Geometry = "Q0.5EQ1.5",
        betaL: float = 0.9,
        damping: float = 1e-9,
        packed_factors: bool = False,
        cache_preconditioner: bool | None = None,
        max_skew: float | None = None,
        shared_factors: bool = True,
        whiten: Whiten = "momentum",
        update_first: bool = True,
        clip: Clip = 1.1,
        normalize_grads: bool = False,
        stochastic_rounding: bool = False,
        maximize: bool = False,
        seed: int = 0,
        hvp: Literal["exact", "finite_difference"] | None = None,
        distributed: Literal["replicate", "shard"] = "replicate",
        process_group: Any = None,
        allreduce_bucket_cap_mb: float = 25.0,
    ) -> None:
        check_choice("hvp", hvp, (None, "exact", "finite_difference"))
        check_choice("distributed", distributed, ("replicate", "shard"))
        check_number("allreduce_bucket_cap_mb", allreduce_bucket_cap_mb, at_least=0)
        if hvp is not None and distributed == "shard":
            raise ValueError(f"distributed must be 'replicate' with hvp={hvp!r}, got 'shard'")
        self.hvp, self.distributed = hvp, distributed
        self._torn_reported = False
        if not isinstance(params, torch.Tensor):  # which is an error, said below
            params = [_listed(entry) for entry in params]
            require_not_flattened(_tensors(params))
            process_group = group_of_all(_tensors(params)) if process_group is None else process_group
        self._ranks = Ranks(process_group, allreduce_bucket_cap_mb)
        if hvp == "exact" and not self._ranks.alone:
            raise ValueError(
                "hvp must not be 'exact' with several ranks: it takes derivatives that nothing averages "
                "over ranks; 'finite_difference' calls your backward pass instead"
            )
        defaults = {
            "lr": lr,
            "b1": b1,
            "weight_decay": weight_decay,
            "preconditioner_update_probability": (
                precond_update_prob_schedule()
                if preconditioner_update_probability is None
                else preconditioner_update_probability
            ),
            "max_size_triangular": max_size_triangular,
            "min_ndim_triangular": min_ndim_triangular,
            "memory_save_mode": memory_save_mode,
            "preconditioner_lr": (
                precond_lr_schedule() if preconditioner_lr is None else preconditioner_lr
            ),
            "preconditioner_init_scale": preconditioner_init_scale,
            "mu_dtype": mu_dtype,
            "precond_dtype": precond_dtype,
            "merge_small_dims": merge_small_dims,
            "target_merged_dim_size": target_merged_dim_size,
            "partition_grads_into_blocks": partition_grads_into_blocks,
            "block_size": block_size,
            "geometry": geometry,
            "betaL": betaL,
            "damping": damping,
            "packed_factors": packed_factors,
            "cache_preconditioner": cache_preconditioner,
            "max_skew": max_skew,
            "shared_factors": shared_factors,
            "whiten": whiten,
            "update_first": update_first,
            "clip": clip,
            "normalize_grads": normalize_grads,
            "stochastic_rounding": stochastic_rounding,
            "maximize": maximize,
            "seed": seed,
            **dict(zip(COUNTS, BEGINNING, strict=True)),
            "behind": [],  # counts of parameters without a gradient in some steps
        }
        self._engines: list[KronEngine] = []
        self._made_for: list[dict[str, Any]] = []  # by engine
        self._records = Records()
        self._skipped: torch.Tensor | None = None
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, before or during training; it begins anew, also with the settings of another."""
        settings = {**self.defaults, **param_group}
        check_group(settings)
        ours = list(inspect.signature(Kron.__init__).parameters)
        others = settings.keys() - self.defaults.keys()
        unknown = sorted(key for key in others if is_misplaced(key, ours))
        if unknown:
            here = [f"{key} is {OF_KRON[key]} here" for key in unknown if OF_KRON.get(key) in ours]
            raise TypeError("; ".join([f"unknown settings in a parameter group: {unknown}", *here]))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not all(p.is_floating_point() or p.is_complex() for p in group["params"]):
            self.param_groups.pop()
            raise ValueError("parameters must be of a floating or complex dtype")
        if any(p.is_conj() for p in group["params"]):
            self.param_groups.pop()
            raise ValueError("parameters must not be conjugates of others: take resolve_conj() of them")
        if any(p.is_complex() and (self.hvp is not None or is_sharded(p)) for p in group["params"]):
            self.param_groups.pop()
            rule = "real where they are sharded" if self.hvp is None else f"real with hvp={self.hvp!r}"
            raise ValueError(
                f"parameters must be {rule}, got complex ones: make the parameter of real and imaginary "
                "parts, and take torch.view_as_complex of it where it is used"
            )
        if self.hvp is not None and any(is_sharded(p) for p in group["params"]):
            self.param_groups.pop()
            raise ValueError(f"parameters must not be sharded with hvp={self.hvp!r}, got DTensors")
        try:
            require_not_hidden(group["params"])
            self._require_all_shards(group["params"])
        except ValueError:
            self.param_groups.pop()
            raise
        group.update(zip(COUNTS, BEGINNING, strict=True), behind=[])
        self._add_engine(group)

    def _require_all_shards(self, parameters: Iterable[torch.Tensor]) -> None:
        """ValueError unless our ranks have all parts of each. Replicas have the same gradient."""
        if self._ranks.group is not None:
            sharded = [(p, shard_axes(p)) for p in parameters if is_sharded(p)]
            require_all_shards(sharded, self._ranks.group)

    def _add_engine(self, group: dict[str, Any]) -> None:
        before = sum(len(g["params"]) for g in self.param_groups[: len(self._engines)])
        chosen = [(before + i, p) for i, p in enumerate(group["params"]) if p.numel()]
        engine = KronEngine(
            [p for _, p in chosen],
            [number for number, _ in chosen],
            rule_of(group),
            blocks.Structure(**{name: group[name] for name in STRUCTURE}),
            seed=group["seed"],
            mu_dtype=group["mu_dtype"],
            precond_dtype=group["precond_dtype"],
            packed_factors=group["packed_factors"],
            cache_preconditioner=group["cache_preconditioner"],
            ranks=self._ranks,
            shard=self.distributed == "shard",
            loads=sum((engine.loads() for engine in self._engines), Counter()),
        )
        self._engines.append(engine)
        self._made_for.append({name: group[name] for name in ("seed", *FIXED)})
        self._attach(engine)

    def _attach(self, engine: KronEngine) -> None:
        if self._skipped is None and engine.parameters:
            self._skipped = torch.zeros((), dtype=torch.int32, device=engine.parameters[0].device)
        self._records.attach(self.state, engine, self._skipped)

    def _require_parameters(self) -> None:
        """Follow groups whose parameters were exchanged before the first step, and changes of `state`.

        Who shards a model puts the shards into the optimizer's groups.

        Raises:
            RuntimeError: parameters were exchanged after it; a part of a parameter's state is gone.
            ValueError: they are sharded over ranks that are not in the process group.
        """
        held = [[p for p in group["params"] if p.numel()] for group in self.param_groups]
        known = [engine.parameters for engine in self._engines]
        if [[id(p) for p in own] for own in held] == [[id(p) for p in own] for own in known]:
            self._follow()
            return
        if any(group["steps"] for group in self.param_groups):
            raise RuntimeError(
                "after the first step param_groups must hold the parameters that Kron has state of, got "
                "others: use add_param_group for more, and a new Kron where some are exchanged or gone"
            )
        self._require_all_shards(p for own in held for p in own)
        self.state.clear()
        self._begin()

    def _follow(self) -> None:
        """Do as was done to `state`, and have it where the parameters are."""
        anew = self._records.follow(self.state, self._engines, self._rule_of)
        whole = []
        for number, gone in anew.items():
            group = self.param_groups[number]
            if len(gone) == len(self._engines[number].parameters):
                group.update(zip(COUNTS, BEGINNING, strict=True), behind=[])
                whole.append(number)
            else:
                others = [entry for entry in group["behind"] if entry[0] not in gone]
                group["behind"] = others + [(i, *BEGINNING) for i in gone]
        if self._skipped is not None and len(whole) == sum(bool(e.parameters) for e in self._engines):
            self._skipped.zero_()
        if any(engine.is_left_behind() for engine in self._engines):
            for group, fixed in zip(self.param_groups, self._made_for, strict=True):
                require_same(group, fixed)
            self._move()

    def _rule_of(self, number: int, whole: bool) -> core_kron.Kron:
        """A group's rule as it is set now, checked: all of its parameters begin anew, or some."""
        group, engine = self.param_groups[number], self._engines[number]
        rule = rule_of(group)
        engine.storage.require(rule, group["stochastic_rounding"])
        if not whole:
            engine.require(rule)
        return rule

    def _begin(self) -> None:
        """Without any state."""
        self._engines, self._made_for, self._records = [], [], Records()
        first = next((p for group in self.param_groups for p in group["params"] if p.numel()), None)
        if self._skipped is not None and first is not None:
            self._skipped = self._skipped.to(first.device)
        for group in self.param_groups:
            self._add_engine(group)

    def _move(self) -> None:
        before = self._engines
        if not any(group["steps"] for group in self.param_groups):
            if self._skipped is not None and self._skipped.is_meta:
                self._skipped = torch.zeros_like(self._skipped, device="cpu")
            self._begin()
            return
        rows = [[engine.rows(i) for i in range(len(engine.parameters))] for engine in before]
        self._begin()
        for engine, old, each in zip(self._engines, before, rows, strict=True):
            engine.rule = old.rule
            for i, record in enumerate(each):
                engine.restore(i, record)
            engine.after_load()

    def __getstate__(self) -> dict[str, Any]:
        self._follow()
        names = ("_engines", "_made_for", "_skipped", "hvp", "distributed", "_ranks", "_torn_reported")
        own = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._records = Records()
        for group in self.param_groups:
            group.setdefault("behind", [])  # pickles of before
        for engine in self._engines:  # a pickle forgets that the state's tensors are views
            self._attach(engine)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure`, called first and under grad, returned.

        Raises:
            RuntimeError: no closure where `hvp` needs one; groups hold other parameters than the state,
                or `state` a part of it.
            ValueError: a setting of a group is not valid, or cannot be changed any more.
        """
        if is_recording() and self._recording is None:
            raise RuntimeError(
                "a step in a CUDA graph would repeat one step's noise and not update factors when due: "
                "GraphedStep(kron, loss_of, model) records each kind of step"
            )
        self._require_parameters()
        for group, fixed in zip(self.param_groups, self._made_for, strict=True):
            require_same(group, fixed)
        plans = [planned(group) for group in self.param_groups]
        for group, engine, (rule, settings, _) in zip(
            self.param_groups, self._engines, plans, strict=True
        ):
            engine.storage.require(rule, settings.stochastic_rounding)
            if group["steps"]:
                engine.require(rule)
        loss, pairs = self._evaluate(closure, [settings for _, settings, _ in plans])
        parameters = [p for engine in self._engines for p in engine.parameters]
        settle(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(g.is_sparse for g in gradients):
            raise ValueError("Kron needs dense gradients: build the embedding with sparse=False")
        self._ranks.require_current("Kron")
        if self._skipped is None or (not gradients and self._ranks.alone):
            return loss
        with without_autocast(parameters):
            self._take_step(parameters, plans, pairs)
        return loss

    def _take_step(
        self,
        parameters: list[torch.Tensor],
        plans: list[tuple[core_kron.Kron, StepSettings, dict[str, Any]]],
        pairs: list[Pairs | None],
    ) -> None:
        assert self._skipped is not None
        numbers = [
            engine.within_reach(i, local(x))
            for engine, pair in zip(self._engines, pairs, strict=True)
            for i, p in enumerate(engine.parameters)
            for x in (p.grad, None if pair is None else pair.products[i])
            if x is not None
        ]
        finite, absent = self._agree(parameters, numbers)
        self._skipped.add_((~finite).to(self._skipped.device))
        # Alone on an accelerator reading `finite` would make the host wait; there a skipped step ticks.
        known = not self._ranks.alone or finite.device.type in HOST_DEVICES
        if known and not finite:
            warn_of_a_skipped_step(self)
            return
        stop = None if known else finite
        together, taken = [], []
        groups = enumerate(zip(self.param_groups, self._engines, plans, pairs, strict=True))
        for number, (group, engine, (rule, settings, counts), pair) in groups:
            if not group["steps"] and not engine.begins_by(rule):
                engine.begin(rule)
            engine.rule = rule
            found = [None if id(p) in absent else p.grad for p in engine.parameters]
            present = [g is not None for g in found]
            if not any(present):
                continue
            # Pairs were made before anybody knew of gradients, for the group's own turn.
            if self.hvp is None:
                parts = turns(group, settings, counts, present)
            else:
                parts = [(settings, None)]
            if self._recording is not None:
                parts = self._recording.lifted(number, present, parts)
            own = [
                (group, engine, settings, _of_members(found, members), pair)
                for settings, members in parts
            ]
            if len(own) == 1 and engine.complete is not None:
                together += own
            else:
                for part in own:
                    self._step_groups([part], stop)
            taken.append((group, counts))
        if together:
            self._step_groups(together, stop)
        for group, counts in taken:
            group.update(counts)

    def _agree(
        self, parameters: list[torch.Tensor], tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, set[int]]:
        """Whether all numbers are finite, (), and which parameters (by id) some rank has no gradient of.

        Alone the host does not wait for the first; several ranks must know before they exchange more.
        """
        tensors = [x for x in tensors if x.numel()]
        finite = all_finite(tensors, power=FINITE_POWER)
        if self._ranks.alone:
            return finite, set()
        if self._agreed_on != len(parameters):
            self._require_same_number(len(parameters))
        header = torch.tensor(
            [0.0, *(float(p.grad is not None) for p in parameters)], dtype=torch.float64, device="cpu"
        )
        header[0] = ~finite
        bad, *counts = self._ranks.total(header, "Kron's agreement on the step").tolist()
        torn = [i for i, n in enumerate(counts) if 0 < n < self._ranks.world]
        if torn and not self._torn_reported:
            self._torn_reported = True
            warn_user(
                f"parameters {torn} have a gradient on some ranks and none on others, and do not move: "
                "average gradients over ranks before step(), zeros where there is none"
            )
        absent = {id(p) for p, n in zip(parameters, counts, strict=True) if n < self._ranks.world}
        moving = {f"parameter {i}": p for i, p in enumerate(parameters) if id(p) not in absent}
        if self.distributed == "shard" and moving and not self._compared:
            advice = "give process_group= the ranks that share them, or distributed='replicate'"
            require_same_parameters(moving, self._ranks, "Kron", advice)
            self._compared = True
        return torch.tensor(bad == 0, device=finite.device), absent

    def _require_same_number(self, own: int) -> None:
        """ValueError unless all ranks have as many parameters: what they exchange has their length."""
        numbers = torch.tensor([float(own), float(own) ** 2], dtype=torch.float64, device="cpu")
        total, squares = self._ranks.total(numbers, "Kron's number of parameters").tolist()
        if squares * self._ranks.world != total**2:
            raise ValueError(
                f"parameters must be the same on all ranks, got {own} here and {total:g} on "
                f"{self._ranks.world} ranks: give process_group= the ranks that share them, or, in "
                "place of a ZeroRedundancyOptimizer, distributed='shard'"
            )
        self._agreed_on = own

    def _evaluate(
        self, closure: Callable[[], Any] | None, plans: list[StepSettings]
    ) -> tuple[Any, list[Pairs | None]]:
        """The closure's loss, and for each group the pairs that are due."""
        nothing: list[Pairs | None] = [None] * len(self._engines)
        if self.hvp is None:
            if closure is None:
                return None, nothing
            with torch.enable_grad():
                return closure(), nothing
        if closure is None:
            raise RuntimeError(f"step needs a closure with hvp={self.hvp!r}: step(closure)")
        due = [settings.update for settings in plans]
        vectors = [
            engine.vectors(settings.step) if settings.update else []
            for engine, settings in zip(self._engines, plans, strict=True)
        ]
        parameters = [p for engine in self._engines for p in engine.parameters]
        chosen = [
            p for engine, now in zip(self._engines, due, strict=True) if now for p in engine.parameters
        ]
        flat = [v for own in vectors for v in own]
        products = exact if self.hvp == "exact" else finite_difference
        loss, found = products(closure, parameters, chosen, flat)
        rest = iter(found)
        pairs = [
            Pairs(own, [next(rest) for _ in own]) if now else None
            for own, now in zip(vectors, due, strict=True)
        ]
        return loss, pairs

    def _step_groups(self, works: list[tuple[Any, ...]], finite: torch.Tensor | None) -> None:
        take_steps([self._group_step(finite, *work) for work in works])

    def _group_step(
        self,
        finite: torch.Tensor | None,
        group: dict[str, Any],
        engine: KronEngine,
        settings: StepSettings,
        found: list[torch.Tensor | None],
        pairs: Pairs | None,
    ) -> GroupStep:
        gradients = [None if g is None else as_real(g) for g in found]
        lr, decay = plain(group["lr"]), plain(group["weight_decay"])
        # A number that changes would be compiled anew each time.
        as_number = (
            finite is None and not isinstance(lr, torch.Tensor) and not torch.compiler.is_compiling()
        )
        rates = None if as_number else _rates(engine, lr, finite)

        def move(directions: list[tuple[int, torch.Tensor]]) -> None:
            parameters = [as_real(local(engine.parameters[i])) for i, _ in directions]
            updates = [d.to(p.dtype) for p, (_, d) in zip(parameters, directions, strict=True)]
            if not updates:
                return
            if decay != 0:
                torch._foreach_add_(updates, parameters, alpha=decay)
            if rates is None:
                torch._foreach_add_(parameters, updates, alpha=-lr)
                return
            for device, rate in rates.items():
                own = [u for u in updates if u.device == device]
                if own:
                    torch._foreach_mul_(own, rate)
            torch._foreach_add_(parameters, updates)

        return GroupStep(engine, gradients, finite, settings, move, pairs, group["maximize"])

    @property
    def skipped_steps(self) -> int:
        """Steps skipped: a gradient was not finite, or above about 4e25 in single precision.

        Reading it waits for the device.
        """
        return 0 if self._skipped is None else int(self._skipped)

    def routing(self) -> Routing:
        """What every parameter gets and why; prints as a table."""
        self._require_parameters()
        routes = []
        for number, (group, engine) in enumerate(zip(self.param_groups, self._engines, strict=True)):
            plans = {id(p): plan for p, plan in zip(engine.parameters, engine.plans, strict=True)}
            names = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                shape = tuple(parameter.shape)
                if id(parameter) not in plans:
                    routes.append(Route(name, shape, "plain", "", "empty"))
                    continue
                plan = plans[id(parameter)]
                routes.append(Route(name, shape, "kron", plan.describe_factors(), plan.describe()))
        return Routing(tuple(routes))

    def memory_usage(self) -> dict[str, int]:
        """Bytes of the state: {'momentum': ..., 'factors': ..., 'preconditioners': ...}."""
        self._require_parameters()
        usage = {"momentum": 0, "factors": 0, "preconditioners": 0}
        for engine in self._engines:
            for pack in engine.packs:
                usage["momentum"] += pack.momentum.nbytes
                usage["factors"] += sum(q.nbytes for q in pack.kron.factors)
                usage["preconditioners"] += sum(p.nbytes for p in pack.kron.preconditioners)
        return usage

    def state_dict(self, *, gather: bool = True) -> dict[str, Any]:
        """As any torch optimizer's, of plain values: schedules that are functions are None.

        As with torch's own, its tensors are the live ones, which later steps change: save or copy it.
        With `packed_factors` the factors are unpacked for it; those in `state` are not.

        Args:
            gather: with distributed='shard', collect all state on every rank; all must call it then.
                With False it is what this rank has, block by block, for torch.distributed.checkpoint:
                every rank's, on however many, fit together.

        Raises:
            RuntimeError: groups hold other parameters than the state, or `state` a part of it.
        """
        self._require_parameters()
        saved = state_before_hooks(self)
        saved["param_groups"] = [
            {
                key: _as_saved(value)
                for key, value in group.items()
                # All of ours: torch looks for each when it puts together what it has flattened.
                if key in SCHEDULES or not callable(value)
            }
            for group in saved["param_groups"]
        ]
        for group in saved["param_groups"]:
            group["behind"] = json.dumps(group["behind"])
        scattered = self.distributed == "shard" and not self._ranks.alone
        index_of = {
            id(p): index
            for group, packed in zip(self.param_groups, saved["param_groups"], strict=True)
            for p, index in zip(group["params"], packed["params"], strict=True)
        }
        for engine in self._engines:
            if gather and not scattered and not engine.storage.packed:
                continue  # it is as saved
            every = engine.gathered() if gather and scattered else []
            for i, parameter in enumerate(engine.parameters):
                whole = engine.whole if gather else engine.rows
                own = every[i] if every else whole(i)
                skipped, index = {"skipped_steps": self._skipped}, index_of[id(parameter)]
                saved["state"][index] = {**own, **skipped, **of_others(saved["state"][index])}
        return after_hooks(self, saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict()`; state and settings keep their own dtypes and block structure.

        Raises:
            ValueError, TypeError: no such state_dict, state that does not fit a parameter, a bad
                setting or count; nothing has changed then.
            RuntimeError: groups hold other parameters than the state, or `state` a part of it.
        """
        self._require_parameters()
        check_state_dict(state_dict, "state", "param_groups")
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        if len(saved) != len(own) or len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(f"state_dict must have {len(own)} parameters, got {len(saved)}")
        places = {id(p): (e, i) for e in self._engines for i, p in enumerate(e.parameters)}
        for index, parameter in zip(saved, own, strict=True):
            record = state_dict["state"].get(index, {})
            if id(parameter) in places:
                require_fit(index, *places[id(parameter)], record)
            elif any(map(is_ours, record)):
                raise ValueError(f"state of parameter {index} must be empty, got {sorted(record)}")
        taken = []
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if saved_group.get("seed") != group["seed"]:
                seeds = saved_group.get("seed"), group["seed"]
                raise ValueError(f"seed must be {seeds[0]}, as saved, got {seeds[1]}")
            values = {**saved_group, "behind": _counts(saved_group.get("behind", []))}
            check_counts(values)
            for _, *counts in values["behind"]:
                check_counts(dict(zip(COUNTS, counts, strict=True)))
            functions = [k for k in SCHEDULES if values.get(k) is None]  # which are not saved
            kept = {"params", "param_names", *FIXED, *functions}
            taken.append({k: as_given(k, v) for k, v in values.items() if k not in kept})
            check_group({**group, **taken[-1]})
        for engine, group, loaded in zip(self._engines, self.param_groups, taken, strict=True):
            settings = {**group, **loaded}
            engine.storage.require(rule_of(settings), settings["stochastic_rounding"])
        for index, parameter in zip(saved, own, strict=True):
            if id(parameter) in places:
                engine, i = places[id(parameter)]
                engine.restore(i, state_dict["state"][index])
                if self._skipped is not None:
                    self._skipped.copy_(state_dict["state"][index]["skipped_steps"])
            for name in of_others(self.state.get(parameter, {})):
                del self.state[parameter][name]
            others = of_others(state_dict["state"].get(index, {}))
            if others:
                self.state[parameter] |= copy.deepcopy(others)
        for group, loaded in zip(self.param_groups, taken, strict=True):
            group.update(loaded)
        for engine, group in zip(self._engines, self.param_groups, strict=True):
            engine.rule = rule_of(group)  # the geometry may be another now
            engine.after_load()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _as_saved(setting: Any) -> Any:
    """A group's setting in a state, of types that torch.distributed.checkpoint knows.

    Dtypes are text: they are those of the optimizer that loads.
    """
    if callable(setting):
        return None
    return str(setting) if isinstance(setting, torch.dtype) else plain(setting)


def _counts(saved: str | list[Any]) -> list[tuple[Any, ...]]:
    """A group's 'behind': text, for torch.distributed.checkpoint, which expects no list to be longer.

    Older states have a list, or none.
    """
    return [tuple(entry) for entry in (json.loads(saved) if isinstance(saved, str) else saved)]


def _of_members(
    found: list[torch.Tensor | None], members: list[bool] | None
) -> list[torch.Tensor | None]:
    """What some have, or with None all."""
    if members is None:
        return found
    return [g if here else None for g, here in zip(found, members, strict=True)]


def _listed(entry: Any) -> Any:
    """An entry of `params` that can be read more than once."""
    if isinstance(entry, dict) and isinstance(entry.get("params"), Iterator):
        return {**entry, "params": list(entry["params"])}
    return entry


def _tensors(params: list[Any]) -> list[torch.Tensor]:
    """All parameters in what an optimizer is given."""
    found: list[Any] = []
    for entry in params:
        entries = entry["params"] if isinstance(entry, dict) else [entry]
        found += [entries] if isinstance(entries, torch.Tensor) else entries
    found = [x[1] if isinstance(x, tuple) else x for x in found]
    return [x for x in found if isinstance(x, torch.Tensor)]


def _rates(
    engine: KronEngine, lr: float | torch.Tensor, finite: torch.Tensor | None
) -> dict[torch.device, torch.Tensor]:
    """What directions are multiplied with, (), on each device: -lr, or 0 unless `finite`.

    A product, not a branch on `finite`: the host does not wait. Directions are finite by then.
    """
    dtype = functools.reduce(torch.promote_types, {p.dtype for p in engine.like})
    found = {}
    for device in {p.device for p in engine.parameters}:
        one = torch.ones((), dtype=dtype, device=device)
        found[device] = -lr * (one if finite is None else finite.to(one))
    return found
