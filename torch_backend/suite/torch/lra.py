"""Front doors of PSGD with one preconditioner for all parameters: low rank, and dense."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from suite.core import dense as core_dense
from suite.core import lra as core_lra
from suite.core import moments, noise
from suite.core.checks import check_choice, check_flag, check_integer
from suite.core.kron import FINITE_POWER
from suite.core.renamed import OF_KRON, says_new_names
from suite.core.schedules import advance_clock, precond_lr_schedule, precond_update_prob_schedule
from suite.core.step_size import Clip, clipped
from suite.torch.autocast import without_autocast
from suite.torch.checks import (
    check_clip,
    check_number,
    check_state_dict,
    is_at_hand,
    plain,
    require_known,
    warn_of_a_skipped_step,
    warn_user,
)
from suite.torch.collectives import Ranks
from suite.torch.dtensors import is_sharded
from suite.torch.hessian import exact, finite_difference
from suite.torch.inplace import HOST_DEVICES, all_finite
from suite.torch.kron_settings import (
    SCHEDULES,
    as_given,
    check_counts,
    is_misplaced,
    require_same,
    value_at,
)
from suite.torch.state_hooks import after_hooks, state_before_hooks

Schedule = float | Callable[[int], float]
Hvp = Literal["exact", "finite_difference"] | None
_COUNTS = ("steps", "updates", "update_clock")
_FIXED = ("rank", "geometry", "seed")  # what state is made for


class _WholeVector(torch.optim.Optimizer):
    """What both have in common: all parameters as one vector, in the order of the groups.

    The preconditioner's state belongs to no parameter; it lies with the first one's.
    """

    _kind: Any  # the core's rule, whose fields are settings of the group

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        _check(defaults)
        super().__init__(params, defaults)
        if len(self.param_groups) != 1:
            raise ValueError(f"params must be one group, got {len(self.param_groups)}")
        (group,) = self.param_groups
        _check(group)
        self._rule_of(group)
        unknown = sorted(k for k in group.keys() - defaults.keys() if is_misplaced(k, tuple(defaults)))
        if unknown:
            raise TypeError(f"unknown settings in a parameter group: {unknown}")
        own = self._parameters
        if not own:
            raise ValueError("params must have at least one number, got none")
        if any(p.is_complex() for p in own):
            raise ValueError(
                "complex parameters are not covered: make the parameter of real and imaginary parts, "
                "and take torch.view_as_complex of it where it is used"
            )
        if not all(p.is_floating_point() for p in own):
            raise ValueError("parameters must be of a floating dtype")
        if any(is_sharded(p) for p in own):
            raise ValueError("parameters must not be sharded, got DTensors: give suite.torch.Kron those")
        if len({(p.dtype, p.device) for p in own}) != 1:
            raise ValueError("parameters must share one dtype and one device")
        if self.param_groups[0]["hvp"] == "exact" and not Ranks().alone:
            warn_user(
                f"{type(self).__name__} with hvp='exact' takes derivatives that nothing averages "
                "over ranks: those that share parameters drift apart; 'finite_difference' calls your "
                "backward pass instead"
            )
        self._start()

    def _start(self) -> None:
        self.param_groups[0].update({"steps": 0, "updates": 0, "update_clock": 1.0})
        self._held = self._parameters  # that the state is of
        self._made_for = {name: self.param_groups[0][name] for name in _FIXED if name in self.defaults}
        own = self._init_state()
        self._shapes = {name: tuple(x.shape) for name, x in own.items()}
        self.state[self._held[0]] |= own

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [p for p in self.param_groups[0]["params"] if p.numel()]

    def __getstate__(self) -> dict[str, Any]:
        names = ("_held", "_shapes", "_made_for")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    @property
    def _rule(self) -> Any:
        return self._rule_of(self.param_groups[0])

    def _rule_of(self, group: dict[str, Any]) -> Any:
        """The core's, with a group's settings; raises where these are bad."""
        return self._kind(**{field.name: group[field.name] for field in dataclasses.fields(self._kind)})

    @property
    def skipped_steps(self) -> int:
        """Steps skipped: a gradient was not finite, or above about 4e25 in single precision.

        Reading it waits for the device.
        """
        return int(self.state[self._parameters[0]]["skipped_steps"])

    def _init_state(self) -> dict[str, torch.Tensor]:
        group, like = self.param_groups[0], self._parameters[0]
        numbers = sum(p.numel() for p in self._parameters)
        wide = torch.promote_types(like.dtype, torch.float32)
        zero = torch.zeros((), dtype=wide, device=like.device)
        return {
            "momentum": torch.zeros(numbers, dtype=wide, device=like.device),
            "weight": zero,
            "skipped_steps": torch.zeros((), dtype=torch.int32, device=like.device),
            **self._init_preconditioner(numbers, torch.empty(0, dtype=wide, device=like.device), group),
        }

    def _require_parameters(self) -> None:
        """Follow a group with other parameters before the first step; RuntimeError after it.

        Where the state was deleted, begin anew.
        """
        own = self._parameters
        if [id(p) for p in own] == [id(p) for p in self._held]:
            self._follow(own[0])
            return
        if self.param_groups[0]["steps"]:
            raise RuntimeError(
                "after the first step param_groups must hold the parameters that the state is of, got "
                f"others: build a new {type(self).__name__}"
            )
        self.state.clear()
        self._start()

    def _follow(self, first: torch.Tensor) -> None:
        """Do as was done to the state, as to any optimizer's, and have it where the parameters are.

        Before the first step the group's settings are those that count.
        """
        state, group = self.state.get(first, {}), self.param_groups[0]
        found = {
            name: tuple(getattr(state[name], "shape", ())) for name in self._shapes if name in state
        }
        left_behind = any(state[name].device != first.device for name in found)
        others = any(group[name] != value for name, value in self._made_for.items())
        if not found or ((left_behind or others) and not group["steps"]):
            self._start()
        elif found != self._shapes:
            wrong = [name for name, shape in self._shapes.items() if found.get(name) != shape]
            raise RuntimeError(
                f"state must have what {type(self).__name__} put there, or what has its shape, or "
                f"nothing (then it begins anew), got others or none for {wrong}"
            )
        elif left_behind:
            self.state[first] |= {name: state[name].to(first.device) for name in self._shapes}

    def _streams(self, like: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        numbers = noise.stream_numbers(0, 1, group["seed"])
        return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(like.device, non_blocking=True)

    def _init_preconditioner(
        self, numbers: int, like: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def _fit(
        self,
        state: dict[str, torch.Tensor],
        evidence: torch.Tensor,
        unit: torch.Tensor,
        lr: float,
        vector: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def _precondition(self, state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only at construction: the vector's length is fixed."""
        if self.param_groups:
            raise ValueError(f"{type(self).__name__} covers one group, fixed at construction")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure`, called first and under grad, returned.

        Raises:
            RuntimeError: no closure where `hvp` needs one; the group holds other parameters.
            ValueError, TypeError: a setting in the group is bad; sparse gradients.
        """
        self._require_parameters()
        group, parameters = self.param_groups[0], self._parameters
        require_same(group, self._made_for)
        _check({name: value for name, value in group.items() if is_at_hand(value)})
        step = group["steps"] + 1
        probability = value_at("preconditioner_update_probability", group, step)
        due, clock = advance_clock(group["update_clock"], probability)
        rate = value_at("preconditioner_lr", group, group["updates"])
        loss, vector, product = self._evaluate(closure, bool(due), step)
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            raise ValueError("gradients must be dense: build the embedding with sparse=False")
        if any(p.grad is not None for p in parameters):
            with without_autocast(parameters):
                self._take_step(step, clock, due, rate, vector, product)
        return loss

    def _take_step(
        self,
        step: int,
        clock: float,
        due: Any,
        rate: Any,
        vector: torch.Tensor | None,
        product: torch.Tensor | None,
    ) -> None:
        group, parameters = self.param_groups[0], self._parameters
        state, counts = self.state[parameters[0]], {name: group[name] for name in _COUNTS}
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gradient = torch.cat([g.reshape(-1) for g in found]).to(state["momentum"].dtype)
        gradient = -gradient if group["maximize"] else gradient
        evidence = [gradient] if product is None else [gradient, product]
        finite = all_finite(evidence, power=FINITE_POWER)
        lr, b1, decay = (plain(group[name]) for name in ("lr", "b1", "weight_decay"))
        momentum = moments.update_average(state["momentum"], gradient, b1)
        weight = moments.update_average(state["weight"], torch.ones_like(state["weight"]), b1)
        signal = moments.unbiased(momentum[None], weight[None])[0]
        new = {"momentum": momentum, "weight": weight}
        if due:
            streams = self._streams(gradient, group)
            unit = noise.draw(streams, step, noise.FIT, tuple(gradient.shape), gradient.dtype)[0]
            whitened = gradient if group["whiten"] == "gradient" else signal
            new |= self._fit(state, whitened if product is None else product, unit, rate, vector)
        chosen = [torch.where(finite, tensor, state[name]) for name, tensor in new.items()]
        # Compiled by torch 2.13 `copy_` leaves a 0-d tensor of double precision as it was.
        torch._foreach_copy_([state[name] for name in new], chosen)
        direction = clipped(self._precondition(state, signal), group["clip"], 1)
        direction = torch.where(finite, direction, 0.0)
        state["skipped_steps"] += (~finite).to(torch.int32)
        group["steps"], group["update_clock"] = step, clock
        group["updates"] += int(due)
        if finite.device.type in HOST_DEVICES and not finite:  # elsewhere the host would wait
            group.update(counts)
            warn_of_a_skipped_step(self)
        parts = direction.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            if p.grad is None:
                continue
            decayed = part.view_as(p) + decay * p * finite
            p.sub_((lr * decayed).to(p.dtype))

    def _evaluate(
        self, closure: Callable[[], Any] | None, due: bool, step: int
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
        """The closure's loss and, if due, the pair (v, H v)."""
        group, parameters = self.param_groups[0], self._parameters
        if group["hvp"] is None:
            if closure is None:
                return None, None, None
            with torch.enable_grad():
                return closure(), None, None
        if closure is None:
            raise RuntimeError(f"step needs a closure with hvp={group['hvp']!r}: step(closure)")
        products = exact if group["hvp"] == "exact" else finite_difference
        if not due:
            return products(closure, parameters, [], [])[0], None, None
        momentum = self.state[parameters[0]]["momentum"]
        streams = self._streams(momentum, group)
        drawn = noise.draw(streams, step, noise.PAIR, tuple(momentum.shape), momentum.dtype)[0]
        parts = drawn.split([p.numel() for p in parameters])
        vectors = [v.view_as(p).to(p.dtype) for v, p in zip(parts, parameters, strict=True)]
        loss, found = products(closure, parameters, parameters, vectors)
        vector = torch.cat([v.reshape(-1) for v in vectors]).to(momentum.dtype)
        return loss, vector, torch.cat([h.reshape(-1) for h in found]).to(momentum.dtype)

    def state_dict(self) -> dict[str, Any]:
        """As any torch optimizer's, of plain values: schedules that are functions are None."""
        self._require_parameters()
        saved = state_before_hooks(self)
        saved["param_groups"] = [
            {
                key: None if callable(value) else plain(value)
                for key, value in group.items()
                if key in SCHEDULES or not callable(value)  # as in Kron
            }
            for group in saved["param_groups"]
        ]
        return after_hooks(self, saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict()`; the state keeps its own dtypes, whatever the parameters'.

        Raises:
            ValueError, TypeError: no such state_dict, state of other shapes, another `seed`, a bad
                setting or count; nothing has changed then.
            RuntimeError: the group holds other parameters than the state.
        """
        self._require_parameters()
        check_state_dict(state_dict, "state", "param_groups")
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        own = self.state[self._parameters[0]]
        saved: dict[str, torch.Tensor] = next(iter(state_dict["state"].values()), {})
        expected = {name: tuple(x.shape) for name, x in own.items()}
        found = {name: tuple(getattr(x, "shape", [None])) for name, x in saved.items()}
        if expected != found:
            raise ValueError(f"state must have {expected}, got {found}")
        (group,) = state_dict["param_groups"]
        own_seed = self.param_groups[0]["seed"]
        seeds = group.get("seed", own_seed), own_seed
        if seeds[0] != seeds[1]:
            raise ValueError(f"seed must be {seeds[0]}, as saved, got {seeds[1]}")
        check_counts(group)
        # How products with the Hessian are made is the training loop's, as in Kron.
        functions = [name for name in SCHEDULES if group.get(name) is None]  # which are not saved
        others = ("params", "param_names", "hvp", *functions)
        kept = {k: as_given(k, v) for k, v in group.items() if k not in others}
        _check(kept)
        self._rule_of({**self.param_groups[0], **kept})
        for name, tensor in own.items():
            tensor.copy_(saved[name])
        self.param_groups[0].update(kept)
        self._made_for |= {name: kept[name] for name in self._made_for if name in kept}
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


class LRA(_WholeVector):
    """PSGD with a diagonal plus low-rank preconditioner for all parameters as one vector.

        >>> optimizer = LRA(model.parameters(), lr=1e-3, rank=10)

    Costs 2 n `rank` numbers for n parameters, and knows of no layers. `rank=0` is the diagonal case.

    Args:
        params: parameters of one dtype on one device, in one group. One without a gradient stays, and is
            fitted as if it were zero.
        lr: learning rate >= 0, a number or a 0-d tensor.
        rank: of the correction of the diagonal, >= 0.
        preconditioner_init_scale, betaL, damping: see `suite.core.lra.LRA`.
        b1, weight_decay, preconditioner_update_probability, preconditioner_lr, whiten, maximize, seed,
        hvp: as in `suite.torch.Kron`; `hvp` makes it LRA Newton.
        clip: the largest root mean square of the direction, or (that, the largest entry), or None.

    Raises:
        ValueError, TypeError: bad values; more than one group; complex parameters; mixed dtypes.

    References: see `suite.core.lra`.
    """

    _kind = core_lra.LRA

    @says_new_names(OF_KRON)
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 0.001,
        rank: int = 10,
        b1: float = 0.9,
        weight_decay: float = 0.0,
        preconditioner_update_probability: Schedule | None = None,
        preconditioner_lr: Schedule | None = None,
        preconditioner_init_scale: float | None = None,
        *,
        betaL: float = 0.9,
        damping: float = 1e-9,
        whiten: Literal["momentum", "gradient"] = "momentum",
        clip: Clip = 1.1,
        maximize: bool = False,
        seed: int = 0,
        hvp: Hvp = None,
    ) -> None:
        shared = _shared(lr, b1, weight_decay, preconditioner_update_probability, preconditioner_lr)
        own = {"whiten": whiten, "clip": clip, "maximize": maximize, "seed": seed, "hvp": hvp}
        scale = {"preconditioner_init_scale": preconditioner_init_scale}
        rule = {"rank": rank, "betaL": betaL, "damping": damping, **scale}
        super().__init__(params, {**shared, **own, **rule})

    def _init_preconditioner(
        self, numbers: int, like: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        streams, shape = self._streams(like, group), (numbers, self._rule.rank)
        start = [noise.draw(streams, 0, use, shape, like.dtype)[0] for use in (noise.FIT, noise.PAIR)]
        state = self._rule.init(*start)
        names = zip(("lipschitz_U", "lipschitz_V", "lipschitz_d"), state.lipschitz, strict=True)
        return {"U": state.U, "V": state.V, "d": state.d, **dict(names)}

    @staticmethod
    def _as_core(state: dict[str, torch.Tensor]) -> core_lra.LRAState:
        lipschitz = (state["lipschitz_U"], state["lipschitz_V"], state["lipschitz_d"])
        return core_lra.LRAState(state["U"], state["V"], state["d"], lipschitz)

    def _fit(
        self,
        state: dict[str, torch.Tensor],
        evidence: torch.Tensor,
        unit: torch.Tensor,
        lr: float,
        vector: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        on_U = torch.full((), self.param_groups[0]["updates"] % 2 == 0, device=evidence.device)
        new = self._rule.update(self._as_core(state), evidence, unit, lr, on_U, vector)
        names = zip(("lipschitz_U", "lipschitz_V", "lipschitz_d"), new.lipschitz, strict=True)
        return {"U": new.U, "V": new.V, "d": new.d, **dict(names)}

    def _precondition(self, state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return self._rule.precondition(self._as_core(state), x)


class DenseNewton(_WholeVector):
    """PSGD with one dense preconditioner for all parameters as one vector: for small problems.

        >>> optimizer = DenseNewton(model.parameters(), lr=0.5)
        >>> optimizer.step(lambda: loss_fn(model(x), y))

    It has n² numbers for n parameters and needs no line search. `hvp=None` makes it whiten gradients.

    Args:
        params: parameters of one dtype on one device, in one group. One without a gradient stays, and is
            fitted as if it were zero.
        lr: learning rate >= 0, a number or a 0-d tensor.
        geometry: see `suite.core.dense.Dense`.
        preconditioner_init_scale, betaL, damping: see `suite.core.dense.Dense`.
        b1, weight_decay, preconditioner_update_probability, preconditioner_lr, whiten, maximize, seed,
        hvp: as in `suite.torch.Kron`, with other defaults: no momentum, an update in every step, its
            rate constant; None: schedules as there.
        clip: the largest root mean square of the direction, or (that, the largest entry), or None.

    Raises:
        ValueError, TypeError: bad values; more than one group; complex parameters; mixed dtypes.

    References: see `suite.core.dense`.
    """

    _kind = core_dense.Dense

    @says_new_names(OF_KRON)
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 0.01,
        geometry: core_dense.DenseGeometry = "Q0.5EQ1.5",
        b1: float = 0.0,
        weight_decay: float = 0.0,
        preconditioner_update_probability: Schedule | None = 1.0,
        preconditioner_lr: Schedule | None = 0.1,
        preconditioner_init_scale: float | None = None,
        *,
        betaL: float = 0.9,
        damping: float = 1e-9,
        whiten: Literal["momentum", "gradient"] = "momentum",
        clip: Clip = None,
        maximize: bool = False,
        seed: int = 0,
        hvp: Hvp = "exact",
    ) -> None:
        shared = _shared(lr, b1, weight_decay, preconditioner_update_probability, preconditioner_lr)
        own = {"whiten": whiten, "clip": clip, "maximize": maximize, "seed": seed, "hvp": hvp}
        scale = {"preconditioner_init_scale": preconditioner_init_scale}
        rule = {"geometry": geometry, "betaL": betaL, "damping": damping, **scale}
        super().__init__(params, {**shared, **own, **rule})

    def _init_preconditioner(
        self, numbers: int, like: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        state = self._rule.init(like, (numbers,))
        return {"Q": state.Q, "lipschitz": state.lipschitz}

    def _fit(
        self,
        state: dict[str, torch.Tensor],
        evidence: torch.Tensor,
        unit: torch.Tensor,
        lr: float,
        vector: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        old = core_dense.DenseState(state["Q"], state["lipschitz"])
        new = self._rule.update(old, evidence, unit, lr, vector)
        return {"Q": new.Q, "lipschitz": new.lipschitz}

    def _precondition(self, state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return self._rule.precondition(core_dense.DenseState(state["Q"], state["lipschitz"]), x)


def _shared(
    lr: Any, b1: float, weight_decay: float, probability: Schedule | None, rate: Schedule | None
) -> dict[str, Any]:
    return {
        "lr": lr,
        "b1": b1,
        "weight_decay": weight_decay,
        "preconditioner_update_probability": (
            precond_update_prob_schedule() if probability is None else probability
        ),
        "preconditioner_lr": precond_lr_schedule() if rate is None else rate,
    }


def _check(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if name in ("lr", "weight_decay"):
            check_number(name, value, at_least=0)
        elif name == "b1":
            check_number(name, value, at_least=0, below=1)
        elif name == "preconditioner_update_probability" and not callable(value):
            check_number(name, value, above=0, at_most=1)
        elif name == "preconditioner_lr" and not callable(value):
            check_number(name, value, above=0, below=1)
        elif name == "whiten":
            check_choice(name, value, ("momentum", "gradient"))
        elif name == "hvp":
            check_choice(name, value, (None, "exact", "finite_difference"))
        elif name in ("betaL", "damping", "preconditioner_init_scale"):
            require_known(name, value)  # the rule has the bounds
        elif name == "clip":
            check_clip(value)
        elif name == "maximize":
            check_flag(name, value)
        elif name == "seed":
            check_integer(name, value, at_least=0)
