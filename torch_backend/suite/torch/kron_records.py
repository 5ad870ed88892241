"""A parameter's record in `Kron.state`: views of an engine's tensors, which others may change."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from suite.core import kron as core_kron
from suite.torch.kron_engine import KronEngine

State = MutableMapping[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class _Changed:
    engine: KronEngine
    index: int  # of a parameter there
    found: dict[str, Any]  # its record as it is
    views: dict[str, torch.Tensor]  # as it was made

    @property
    def is_gone(self) -> bool:
        return not any(map(is_ours, self.found))

    def misfits(self) -> list[str]:
        shapes = {name: tuple(getattr(x, "shape", ())) for name, x in self.found.items()}
        return [name for name, x in self.views.items() if shapes.get(name) != tuple(x.shape)]

    def take_over(self) -> None:
        for name, view in self.views.items():
            if self.found[name] is not view and name != "skipped_steps":  # which is one for all
                view.copy_(self.found[name])


class Records:
    """What `state` was given, by which it is known what others did to it."""

    def __init__(self) -> None:
        self._views: list[list[dict[str, torch.Tensor]]] = []  # by engine and parameter

    def attach(self, state: State, engine: KronEngine, skipped: torch.Tensor | None) -> None:
        """Put an engine's tensors there, and the number of skipped steps of them all."""
        self._views.append([])
        for index, parameter in enumerate(engine.parameters):
            assert skipped is not None
            views = {**engine.views(index), "skipped_steps": skipped}
            self._views[-1].append(views)
            state[parameter] |= views

    def follow(
        self,
        state: State,
        engines: Sequence[KronEngine],
        rule_of_group: Callable[[int, bool], core_kron.Kron],
    ) -> dict[int, list[int]]:
        """Do as was done to `state`: any optimizer's has tensors replaced, and records deleted.

        What is in place of a tensor (state that was moved away and back) is taken over. A parameter
        whose record is gone begins anew, by the rule that its group has now.

        Returns:
            By number of their engine, the numbers of the parameters that begin anew.

        Raises:
            RuntimeError: a part of a record is gone, or has another shape.
            ValueError: the rule of a group that begins anew is not valid, or does not fit its state.
        """
        changed, anew = [], dict[int, list[int]]()
        for number, (engine, each) in enumerate(zip(engines, self._views, strict=True)):
            here = []
            for i, (parameter, views) in enumerate(zip(engine.parameters, each, strict=True)):
                found = state.get(parameter, {})
                if any([found.get(name) is not x for name, x in views.items()]):  # noqa: C419 (faster)
                    here.append(_Changed(engine, i, found, views))
            changed += here
            gone = [one.index for one in here if one.is_gone]
            if gone:
                anew[number] = gone
        for one in changed:
            if not one.is_gone and one.misfits():
                raise RuntimeError(
                    "state of a parameter must have what Kron put there, or what has its shape, or "
                    f"nothing (then it begins anew), got others or none for {one.misfits()}"
                )
        rules = {n: rule_of_group(n, len(gone) == len(self._views[n])) for n, gone in anew.items()}
        for number, rule in rules.items():
            engines[number].rule = rule
        for one in changed:
            if one.is_gone:
                one.engine.reset(one.index)
            else:
                one.take_over()
            state[one.engine.parameters[one.index]] |= one.views
        for engine in {id(one.engine): one.engine for one in changed}.values():
            engine.after_load()
        return anew


def is_ours(name: str) -> bool:
    """Whether an entry of a parameter's state is Kron's: wrappers (Lookahead) may keep theirs there."""
    return name == "skipped_steps" or name.startswith("tile")


def of_others(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not is_ours(name)}


def require_fit(index: int, engine: KronEngine, number: int, record: dict[str, Any]) -> None:
    """ValueError unless a record is one parameter's, whole or block by block."""
    expected = {name: shape for name, (shape, _) in engine.expected(number).items()}
    expected["skipped_steps"] = ()
    found = {name: tuple(getattr(x, "shape", ())) for name, x in record.items() if is_ours(name)}
    if record and not found:
        raise ValueError(
            f"state of parameter {index} must be Kron's, got another optimizer's: {sorted(record)}"
        )
    rows = {name: shape[1:] for name, shape in expected.items() if name != "skipped_steps"}
    by_block = [name for name in found if name.rpartition(".")[0] in rows]
    if by_block:
        missing = sorted(engine.rows(number).keys() - found.keys())
        wrong = [name for name in by_block if found[name] != rows[name.rpartition(".")[0]]]
        if missing or wrong:
            raise ValueError(f"state of parameter {index} lacks {missing}, has a wrong shape in {wrong}")
    elif expected != found and (engine.rows(number) or found != {"skipped_steps": ()}):
        said = f"state of parameter {index} must have {expected}, got {found}"
        if engine.exchange.shard and expected.keys() - found.keys():
            said += (
                ". flatten_optimizer_state_dict=True does not find blocks that ranks share out: load, "
                "and save, without that option"
            )
        raise ValueError(said)
