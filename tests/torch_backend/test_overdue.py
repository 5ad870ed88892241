"""Layers that never run in a step that is due for statistics have them all the same."""

from __future__ import annotations

import copy
import itertools
import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

from suite.torch import KFAC
from suite.torch.overdue import Overdue


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.double()

    def forward(self, x, head):
        return getattr(self, head)(torch.tanh(self.trunk(x)))


def state_of(overdue):
    return overdue.waits, overdue._asked, overdue._tries, overdue._idles, overdue._left


def waits_in(kfac):
    """What its state says of layers that wait for statistics."""
    return json.loads(kfac.state_dict()["kfac"]["inputs"]).get("waits")


def batch(step):
    random = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=random, dtype=torch.float64)
    return x, torch.randint(0, 3, (16,), generator=random)


def made(model, period, **settings):
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"damping": 0.01, "compute_method": "inverse", "kl_clip": None, **settings}
    return KFAC(model, sgd, factor_update_steps=period, inv_update_steps=period, **settings)


def steps_in_turn(kfac, steps):
    """Whether head b had another direction than its gradient, in each step that it ran in."""
    model, found = kfac.model, []
    for step in steps:
        kfac.zero_grad()
        x, y = batch(step)
        F.cross_entropy(model(x, "ab"[step % 2]), y).backward()
        gradient = None if model.b.weight.grad is None else model.b.weight.grad.clone()
        kfac.step()
        if gradient is not None:
            found.append(not torch.equal(gradient, model.b.weight.grad))
    return found


def told_by_a_step(kfac, step):
    """The warnings of a step with head a."""
    kfac.zero_grad()
    x, y = batch(step)
    F.cross_entropy(kfac.model(x, "a"), y).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kfac.step()
    return [(step, str(w.message)) for w in caught]


@pytest.mark.parametrize("period", [2, 4, 10])
def test_heads_that_are_trained_in_turn_are_preconditioned_both(period):
    kfac = made(TwoHeads(), period)
    found = steps_in_turn(kfac, range(60))
    first = found.index(True)
    assert all(found[first:])
    assert 2 * first <= 2 * period
    factors = []
    for start in range(60, 60 + 12 * period, 3 * period):
        steps_in_turn(kfac, range(start, start + 3 * period))
        layers = kfac.state_dict()["kfac"]["layers"]
        factors.append([layers[name]["G"] for name in ("a", "b")])
    for before, after in itertools.pairwise(factors):
        assert not any(map(torch.equal, before, after))  # those of both go on


def test_networks_that_are_trained_in_turn_are_preconditioned_both():
    torch.manual_seed(0)
    model = nn.ModuleDict({"make": nn.Linear(3, 4), "judge": nn.Linear(4, 1)}).double()
    kfac = made(model, 10)
    z = torch.randn(16, 3).double()
    for step in range(30):
        makes = step % 2 == 1
        model["make"].requires_grad_(makes)
        model["judge"].requires_grad_(not makes)
        kfac.zero_grad()
        F.softplus(-model["judge"](model["make"](z))).mean().backward()
        kfac.step()
    model.requires_grad_(True)
    assert {route.treatment for route in kfac.routing()} == {"kfac"}


@pytest.mark.parametrize("model", ["all", "eval"])
def test_other_models_take_statistics_when_these_are_due(model):
    kfac = made(TwoHeads(), 5)
    wanted = []
    for step in range(20):
        kfac.model.train()
        kfac.model.trunk.train(model == "all")  # statistics of a layer in eval mode are not taken
        wanted.append(kfac._engine.capture.clock.wanted)
        kfac.zero_grad()
        x, y = batch(step)
        F.cross_entropy(kfac.model(x, "a"), y).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kfac.step()
    assert wanted == [step % 5 == 0 for step in range(20)]


def test_a_layer_that_is_trained_later_where_no_hook_sees_it_is_told_of_once():
    kfac = made(TwoHeads(), 2)
    said = []
    for step in range(20):
        kfac.model.trunk.eval()
        kfac.model.trunk.requires_grad_(step >= 5)
        said += told_by_a_step(kfac, step)
    assert [step for step, _ in said] == [6]
    assert "but were not seen running, and keep it plain" in said[0][1]
    assert "'trunk'" in said[0][1]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("stop", [3, 8, 11])
def test_a_run_with_heads_in_turn_is_resumed_as_it_was(stop, older, tmp_path):
    ends = []
    for stops in (False, True):
        kfac = made(TwoHeads(), 4)
        if stops:
            steps_in_turn(kfac, range(stop))
            torch.save({"kfac": kfac.state_dict(), "model": kfac.model.state_dict()}, tmp_path / "state")
            saved = torch.load(tmp_path / "state", weights_only=True)
            kfac = made(TwoHeads(), 4)
            kfac.model.load_state_dict(saved["model"])
            record = saved["kfac"]["kfac"]
            if older:  # which have it in an entry of its own
                inputs = json.loads(record["inputs"])
                record["waits"] = torch.tensor(inputs.pop("waits"))
                record["inputs"] = json.dumps(inputs)
            kfac.load_state_dict(saved["kfac"])
        steps_in_turn(kfac, range(stop if stops else 0, 24))
        ends.append(list(kfac.model.parameters()))
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("how", [{}, {"full_state_dict": True}])
def test_a_run_with_heads_in_turn_is_resumed_by_torch(how):
    options, (model, other) = StateDictOptions(**how), (TwoHeads(), TwoHeads())
    kfac, resumed = made(model, 2), made(other, 2)
    steps_in_turn(kfac, range(7))
    assert waits_in(kfac)
    state = copy.deepcopy(get_optimizer_state_dict(model, kfac, options=options))
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, state, options=options)
    steps_in_turn(kfac, range(7, 15))
    steps_in_turn(resumed, range(7, 15))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def checkpoint_of(kfac):
    model = kfac.model
    of_base = get_optimizer_state_dict(model, kfac.optimizer)
    return {"model": model.state_dict(), "sgd": of_base, **kfac.state_dict(gather=False)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("saved", ["in turn", "both", "nothing"])
@pytest.mark.parametrize("into", ["another", "itself"])
def test_checkpoints_of_torch_have_what_heads_in_turn_wait_for(saved, into, tmp_path):
    """Whether there was anything to wait for when it was saved, or is where it is loaded."""

    def step(kfac, number, heads):
        kfac.zero_grad()
        x, y = batch(number)
        sum(F.cross_entropy(kfac.model(x, head), y) for head in heads).backward()
        kfac.step()

    ends = []
    for stops in (False, True):
        kfac = made(TwoHeads(), 4)
        for number in range(0 if saved == "nothing" else 7):
            step(kfac, number, "ab" if saved == "both" else "ab"[number % 2])
        if stops:
            dcp.save(checkpoint_of(kfac), checkpoint_id=tmp_path)
            if into == "another":
                kfac = made(TwoHeads(), 4)
            else:
                steps_in_turn(kfac, range(7, 14))
                assert waits_in(kfac)
            state = checkpoint_of(kfac)
            dcp.load(state, checkpoint_id=tmp_path)
            kfac.model.load_state_dict(state["model"])
            set_optimizer_state_dict(kfac.model, kfac.optimizer, state["sgd"])
            kfac.load_state_dict({"kfac": state["kfac"]})
        steps_in_turn(kfac, range(7, 24))
        ends.append(list(kfac.model.parameters()))
    assert all(map(torch.equal, *ends))


def test_a_copy_without_a_layer_that_was_taken_away_has_what_the_others_wait_for():
    kfac = made(TwoHeads(), 4)
    steps_in_turn(kfac, range(11))
    waits, asked, tries, idles, left = state_of(kfac._overdue)
    assert waits[1] != waits[2]
    kfac.model.a = nn.Identity()
    _, copied = copy.deepcopy((kfac.model, kfac))
    trunk_and_b = ([numbers[i] for i in (0, 2)] for numbers in (waits, tries, idles))
    kept = {{0: 0, 2: 1}[i]: number for i, number in asked.items() if i != 1}
    assert state_of(copied._overdue) == (next(trunk_and_b), kept, *trunk_and_b, left)


def test_a_state_has_the_same_entries_whatever_layers_wait_for():
    """So that any loads as strictly as torch.distributed.checkpoint's, into any, and older ones do."""
    kfac = made(TwoHeads(), 4)
    keys = kfac.state_dict()["kfac"].keys()
    steps_in_turn(kfac, range(7))
    assert waits_in(kfac)
    assert kfac.state_dict()["kfac"].keys() == keys


def test_a_state_says_nothing_of_it_where_all_layers_are_alike():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    kfac = made(model, 4)
    for step in range(7):
        assert not waits_in(kfac)
        kfac.zero_grad()
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        kfac.step()


def test_a_layer_that_does_not_run_again_is_waited_for_no_longer_than_a_period():
    kfac, wanted = made(TwoHeads(), 10), []
    others = []
    for step in range(60):
        wanted.append(kfac._engine.capture.clock.wanted)
        before = kfac.state_dict()["kfac"]["layers"]["a"].get("G")
        kfac.zero_grad()
        x, y = batch(step)
        F.cross_entropy(kfac.model(x, "b" if step == 3 else "a"), y).backward()
        kfac.step()
        after = kfac.state_dict()["kfac"]["layers"]["a"]["G"]
        others.append(before is None or not torch.equal(before, after))
    assert [step for step in range(60) if wanted[step]] == [0, *range(4, 14), 20, 30, 40, 50]
    # What is wanted for one layer alone is not averaged into the others' factors.
    assert [step for step in range(60) if others[step]] == [0, 10, 20, 30, 40, 50]


def test_a_layer_that_no_hook_sees_is_not_waited_for():
    kfac, wanted = made(TwoHeads(), 10), []
    for step in range(60):
        wanted.append(kfac._engine.capture.clock.wanted)
        head = "b" if step % 10 == 3 else "a"
        kfac.model.train(head == "a")
        kfac.zero_grad()
        x, y = batch(step)
        F.cross_entropy(kfac.model(x, head), y).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kfac.step()
    extra = [step for step in range(60) if wanted[step] and step % 10]
    assert extra[0] == 4
    assert len(extra) <= 21


class Experts(nn.Module):
    """All rows of a batch go to one of them; the others run without rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.experts = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
        self.double()

    def forward(self, x, chosen):
        h, y = torch.tanh(self.trunk(x)), torch.zeros(len(x), 3).double()
        for i, expert in enumerate(self.experts):
            rows = torch.arange(len(x) if i == chosen else 0)
            y = y.index_add(0, rows, expert(h[rows]))
        return y


@pytest.mark.parametrize("period", [3, 6, 10])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_layers_that_have_zeros_for_gradients_while_others_train_are_preconditioned(period, set_to_none):
    kfac = made(Experts(), period)
    factors = []
    for step in range(24 * period):
        kfac.zero_grad(set_to_none=set_to_none)
        x, y = batch(step)
        F.cross_entropy(kfac.model(x, step % 3), y).backward()
        gradients = [expert.weight.grad.clone() for expert in kfac.model.experts]
        assert [bool(g.any()) for g in gradients] == [i == step % 3 for i in range(3)]
        kfac.step()
        if step >= 4 * period:
            chosen = kfac.model.experts[step % 3].weight.grad
            assert not torch.equal(chosen, gradients[step % 3])
        if step % (5 * period) == 4 * period:
            layers = kfac.state_dict()["kfac"]["layers"]
            factors.append([layers[f"experts.{i}"]["G"] for i in range(3)])
    assert len(factors) == 4
    for before, after in itertools.pairwise(factors):
        assert not any(map(torch.equal, before, after))  # those of all go on


def test_a_head_that_is_trained_no_more_is_not_waited_for_again_and_again():
    kfac, wanted = made(TwoHeads(), 10), []
    for step in range(400):
        wanted.append(kfac._engine.capture.clock.wanted)
        kfac.zero_grad(set_to_none=False)
        x, y = batch(step)
        F.cross_entropy(kfac.model(x, "b" if step == 3 else "a"), y).backward()
        kfac.step()
    assert not kfac.model.b.weight.grad.any()
    extra = [step for step in range(400) if wanted[step] and step % 10]
    assert extra[:7] == [4, 5, 6, 11, 12, 21, 22]  # until it is let be
    assert len(extra) < 25


def test_a_layer_that_trains_in_eval_mode_from_some_step_on_is_told_of_once():
    kfac, said = made(TwoHeads(), 4), []
    for step in range(60):
        kfac.model.train()
        kfac.model.trunk.train(step < 10)
        said += told_by_a_step(kfac, step)
    assert [step for step, _ in said] == [16]
    assert "were not seen in two steps that take statistics" in said[0][1]
    assert said[0][1].endswith("'trunk'")


def test_for_experts_that_are_mostly_idle_few_steps_more_take_statistics():
    """One of eight at a time, by chance."""
    torch.manual_seed(0)
    model = Experts()
    model.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(8)).double()
    kfac, wanted = made(model, 10), []
    random = torch.Generator().manual_seed(1)
    for step in range(600):
        wanted.append(kfac._engine.capture.clock.wanted)
        kfac.zero_grad()
        x, y = batch(step)
        F.cross_entropy(model(x, int(torch.randint(8, (), generator=random))), y).backward()
        kfac.step()
    assert sum(wanted[20:]) <= 3 * 58
    assert {route.treatment for route in kfac.routing()} == {"kfac"}


@pytest.mark.parametrize("period", [1, 3, 10])
@pytest.mark.parametrize("kind", ["seen", "unseen", "idle", "mixed"])
def test_what_is_known_of_layers_comes_back_with_a_state(period, kind):
    """At every step; whether layers are seen, idle, or not there, by chance."""
    random = torch.Generator().manual_seed(3)
    draws = torch.rand(150, 2, 3, generator=random)
    chances = {"seen": (1, 1), "unseen": (1, 0), "idle": (1, 0), "mixed": (0.7, 0.4)}[kind]

    def steps(overdue, numbers):
        asked = []
        for step in numbers:
            regular = step % period == 0
            wanted = regular or bool(overdue.layers)
            present = [i for i in range(3) if draws[step, 0, i] < chances[0]]
            seen = [i in present and bool(draws[step, 1, i] < chances[1]) for i in range(3)]
            zeros = [i for i in present if not seen[i] and (kind == "idle" or step % 2)]
            idle = {i for i in zeros if kind != "unseen" and wanted and i in overdue.doubted}
            overdue.note(present, seen, idle, wanted, regular, period)
            asked.append(sorted(overdue.layers))
        return asked

    for stop in range(1, 60):
        whole, first, second = Overdue(3), Overdue(3), Overdue(3)
        expected = steps(whole, range(150))
        steps(first, range(stop))
        second.load(first.state(stop, period), stop, period)
        assert steps(second, range(stop, 150)) == expected[stop:]
    if kind == "seen":
        assert not first.state(stop, period)
    else:
        assert state_of(second) == state_of(whole)


def test_a_state_that_knows_less_can_be_loaded():
    overdue = Overdue(2)
    overdue.load([-2, 3, 0, 1, 0, 2], 7, 10)
    assert state_of(overdue) == ([-2, 3], {1: 1}, [0, 2], [0, 0], 2)
    again = Overdue(2)
    again.load(overdue.state(7, 10), 7, 10)
    assert state_of(again) == state_of(overdue)
