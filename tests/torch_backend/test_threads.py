"""A forward pass in another thread, an actor's or an evaluation's, is none of the learner's."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import KFAC


class Net(nn.Module):
    """Its forward calls `gate` where all of its modes are on torch's stack."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.weight = nn.Parameter(torch.ones(6)), nn.Parameter(torch.randn(6, 6))
        self.experts = nn.Parameter(torch.randn(2, 6, 6))
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x, gate=lambda: None):
        h = F.linear(x, self.weight).tanh()
        gate()
        h = F.linear(h, self.inner.weight, self.inner.bias).tanh() * self.scale
        return self.head(sum(F.linear(h, w) for w in self.experts))


def train(x, concurrent: bool, began_first: bool, step_of_thread: int, with_gradients: bool = False):
    """Parameters after three steps.

    A pass in a thread begins before one here and ends in it, or begins in it and ends after it.
    """
    model = Net()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=0.1)
    inside, inside_other, over, over_other = (threading.Event() for _ in range(4))
    raised = []

    def wait(event: threading.Event) -> None:
        assert event.wait(60)

    def evaluate() -> None:
        def gate() -> None:
            inside_other.set()
            wait(inside if began_first else over)

        try:
            if not began_first:
                wait(inside)
            with torch.set_grad_enabled(with_gradients):
                model(x, gate)
        except Exception as error:
            raised.append(error)
        over_other.set()

    def gate() -> None:
        inside.set()
        wait(over_other if began_first else inside_other)

    for step in range(3):
        if concurrent and step == step_of_thread:
            other = threading.Thread(target=evaluate)
            other.start()
            if began_first:
                wait(inside_other)
            loss = model(x, gate).square().mean()
            over.set()
            other.join()
        else:
            loss = model(x).square().mean()
        loss.backward()
        kfac.step()
        kfac.zero_grad()
    assert not raised
    assert not torch.overrides._get_current_function_mode_stack()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("began_first", [False, True])
def test_a_pass_in_another_thread_changes_nothing(step, began_first, with_gradients):
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, expected = (
        train(x, concurrent, began_first, step, with_gradients) for concurrent in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("when", ["0.bias", "2.bias", "4.bias", "output"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_pass_with_gradients_in_another_thread_during_a_backward_pass_changes_nothing(when, step):
    """Sums of layers are there then whose gradients are not yet: they are not discarded ones."""
    generator = torch.Generator().manual_seed(0)
    x, ends = torch.randn(8, 6, dtype=torch.float64, generator=generator), []
    for concurrent in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)]
        model = nn.Sequential(*layers).double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=0.1)

        def evaluate(gradient: torch.Tensor, model: nn.Module = model) -> None:
            other = threading.Thread(target=model, args=(x[:3],))
            other.start()
            other.join()

        for i in range(3):
            kfac.zero_grad()
            y = model(x)
            handle = None
            if concurrent and i == step:
                here = y if when == "output" else model.get_parameter(when)
                handle = here.register_hook(evaluate)
            y.square().mean().backward()
            kfac.step()
            if handle is not None:
                handle.remove()
        ends.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("raises_here", [False, True])
def test_a_backward_pass_that_raised_in_or_after_another_thread_is_no_part(raises_here, ends):
    generator = torch.Generator().manual_seed(0)
    x, found = torch.randn(8, 6, dtype=torch.float64, generator=generator), []
    for fails in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=0.1)
        outputs, made, over = [], threading.Event(), threading.Event()

        def fail(y: torch.Tensor, model: nn.Module = model) -> None:
            handle = model[2].weight.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                y.square().mean().backward()
            handle.remove()

        def work(model: nn.Module = model, outputs: Any = outputs, made: Any = made, over: Any = over):
            y = model(5 * x)
            _ = outputs.append(y) if raises_here else fail(y)
            made.set()
            assert over.wait(60)

        for i in range(3):
            kfac.zero_grad()
            if fails and i == 1:
                other = threading.Thread(target=work)
                other.start()
                assert made.wait(60)
                for y in outputs:
                    fail(y)
                if ends:
                    over.set()
                    other.join()
                for p in model.parameters():
                    p.grad = None
                model(3 * x).square().mean().backward()
                for p in model.parameters():
                    p.grad = None
            model(x).square().mean().backward()
            kfac.step()
        over.set()
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@contextlib.contextmanager
def pass_elsewhere(model, x):
    """Another thread is within a forward pass meanwhile, and has to leave all modes in the end."""
    inside, over, left = threading.Event(), threading.Event(), []

    def gate() -> None:
        inside.set()
        assert over.wait(60)

    def evaluate() -> None:
        model(x, gate)
        left.append(len(torch.overrides._get_current_function_mode_stack()))

    other = threading.Thread(target=evaluate)
    other.start()
    assert inside.wait(60)
    yield
    over.set()
    other.join()
    assert left == [0]


def test_a_pass_in_another_thread_that_outlasts_the_first_step_leaves_its_modes():
    model, alone = Net(), Net()
    kfac, other_kfac = (
        KFAC(one, torch.optim.SGD(one.parameters(), lr=0.1), damping=0.1) for one in (model, alone)
    )
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pass_elsewhere(model, x):
        model(x).square().mean().backward()
        kfac.step()
    alone(x).square().mean().backward()
    other_kfac.step()
    assert len(model._forward_hooks) == len(alone._forward_hooks)


@pytest.mark.parametrize("during", [2, 3])  # a step with statistics before one without, or the reverse
def test_a_pass_that_outlasts_a_step_in_which_hooks_fall_asleep_or_wake_leaves_its_modes(during):
    model, alone = Net(), Net()
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def step(kfac: KFAC) -> None:
        kfac.zero_grad()
        kfac._engine.model(x).square().mean().backward()
        kfac.step()

    kfac, other_kfac = (
        KFAC(one, torch.optim.SGD(one.parameters(), lr=0.1), damping=0.1, factor_update_steps=2)
        for one in (model, alone)
    )
    for number in range(6):
        with pass_elsewhere(model, x) if number == during else contextlib.nullcontext():
            step(kfac)
            step(other_kfac)
    for own, others in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(own, others)
    assert not any(around.under_way.total() for around in kfac._engine.capture._functions.values())
