"""K-FAC as a guest: in models, loops and optimizers that do as they like."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.overrides import _get_current_function_mode_stack as mode_stack
from torch.utils.checkpoint import checkpoint

from conftest import same
from suite.torch import KFAC, LRA, KFACParamScheduler, Kron, collectives, detach
from suite.torch.factors import LayerFactors

T64 = torch.float64


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = T64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().to(T64)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(kfac: KFAC, loss: torch.Tensor) -> None:
    loss.backward()
    kfac.step()
    kfac.zero_grad()


def records(kfac: KFAC) -> dict[str, dict[str, torch.Tensor]]:
    return kfac.state_dict()["kfac"]["layers"]


def average(kfac: KFAC, name: str, side: str) -> torch.Tensor:
    """A factor of a layer: its running average, free of the bias towards its start."""
    record = records(kfac)[name]
    weight = record[f"{side}_weight"]
    return record[side] / weight.reshape(-1, *(1,) * (record[side].ndim - 1))


def sharing(kfac: KFAC) -> dict[str, str]:
    """Layer -> the one whose A it shares."""
    return dict(json.loads(kfac.state_dict()["kfac"]["inputs"])["inputs"])


def gram(rows: torch.Tensor) -> torch.Tensor:
    """The mean of a aᵀ over rows a = [x, 1]."""
    rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
    return rows.T @ rows / len(rows)


def close(a: object, b: object, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in vars(m))
        for m in model.modules()
    )


class Gated(nn.Module):
    """Two layers that read one input, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(3, 2)
        self.gate, self.up = nn.Linear(4, 3), nn.Linear(4, 3)
        self.checkpointing: bool | None = None  # with reentrance or without; None: none

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return torch.tanh(self.gate(x)) * self.up(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing is None:
            return self.head(self.block(x))
        return self.head(checkpoint(self.block, x, use_reentrant=self.checkpointing))


# Inputs that layers share


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_share_an_input_lose_nothing_under_checkpointing(reentrant):
    ends = []
    for checkpointing in (None, reentrant):
        model = seeded(Gated)
        model.checkpointing = checkpointing
        kfac = KFAC(model, sgd(model))
        for seed in range(3):
            step(kfac, model(randn(8, 4, seed=seed).requires_grad_()).square().mean())
            assert sharing(kfac) == {"up": "gate"}
        ends.append(list(model.parameters()))
    close(ends[0], ends[1])


def test_layers_called_once_for_each_of_two_inputs_sum_both():
    class TwoViews(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            a, b = self.q(x), self.q(y)
            return self.head(a * self.k(x) + b * self.k(y))

    model = seeded(TwoViews)
    kfac = KFAC(model, factor_decay=0.0)
    for seed in range(3):
        x, y = randn(8, 4, seed=seed), randn(8, 4, seed=seed + 10)
        step(kfac, model(x, y).square().mean())
        assert sharing(kfac) == {"k": "q"}
        close(average(kfac, "q", "A")[0], gram(torch.cat([x, y])))


@pytest.mark.parametrize("before", ["state_dict", "load_state_dict", "deepcopy"])
def test_saving_loading_or_copying_before_the_first_step_changes_nothing(before):
    ends = []
    for treated in (False, True):
        model = seeded(Gated)
        kfac = KFAC(model, sgd(model), compute_method="inverse")
        if treated and before == "deepcopy":
            model, kfac = copy.deepcopy((model, kfac))
        elif treated:
            state = kfac.state_dict()
            if before == "load_state_dict":
                kfac.load_state_dict(state)
        for seed in range(3):
            step(kfac, model(randn(8, 4, seed=seed)).square().mean())
        assert sharing(kfac) == {"up": "gate"}
        ends.append(list(model.parameters()))
    close(ends[0], ends[1], rtol=0)


# Free parameters


@pytest.mark.parametrize(
    "view",
    [
        lambda p, x: p.to(x.dtype),
        lambda p, x: p.to(x.dtype).to(x.dtype).to(x.dtype),
        lambda p, x: p.type_as(x),
        lambda p, x: p.double(),
        lambda p, x: p.contiguous(),
        lambda p, x: p.flatten(),
    ],
    ids=["to", "to thrice", "type_as", "double", "contiguous", "flatten"],
)
def test_casts_and_views_that_return_the_parameter_itself_count_once(view):
    class Scaled(nn.Module):
        def __init__(self, view: Callable[..., torch.Tensor]) -> None:
            super().__init__()
            self.layer, self.p, self.view = nn.Linear(3, 3), nn.Parameter(torch.randn(3)), view

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x * self.view(self.p, x))

    found = []
    for one in (lambda p, x: p, view):
        model = seeded(lambda one=one: Scaled(one))
        kfac = KFAC(model)
        step(kfac, model(randn(5, 3)).square().sum())
        found.append((average(kfac, "p", "A"), average(kfac, "p", "G")))
    close(found[0], found[1])


# Optimizers


def test_what_the_optimizer_does_not_move_is_left_alone_and_clips_nothing():
    ends = []
    for skip in ([], ["^0$"]):
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
        kfac = KFAC(model, sgd(model[2]), skip_layers=skip, kl_clip=1e-6)
        plain = copy.deepcopy(model)
        for m in (plain, model):
            (m(randn(16, 3)) - 1).square().mean().backward()
        kfac.step()
        for p, q in zip(model[0].parameters(), plain[0].parameters(), strict=True):
            close(p.grad, q.grad, rtol=0)
        assert kfac.metrics()["kl_clip_coefficient"] < 1
        ends.append([p.grad for p in model[2].parameters()])
        if not skip:
            routing = kfac.routing()
            assert "not in the optimizer" in routing["0.weight"].reason
            assert "not in the optimizer" not in routing["2.weight"].reason
    close(ends[0], ends[1])


def test_an_optimizer_that_needs_a_closure_is_an_error():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="got LBFGS"):
        KFAC(model, torch.optim.LBFGS(model.parameters()))
    assert hooks(model) == 0


# How many terms the loss has


def G_of_first(model: nn.Module, x: torch.Tensor, **settings) -> torch.Tensor:
    kfac = KFAC(model, **settings)
    step(kfac, model(x).square().mean())
    return average(kfac, "0", "G")


def test_a_last_layer_with_a_frozen_weight_tells_the_number_of_terms():
    found = []
    for frozen in (False, True):
        model = seeded(
            lambda: nn.Sequential(
                nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)
            )
        )
        model[4].weight.requires_grad_(not frozen)
        found.append(G_of_first(model, randn(4, 1, 8, 8)))
    close(found[0], found[1])


@pytest.mark.parametrize("skip", ["^2$", "ConvTranspose"])
def test_a_last_transposed_convolution_that_is_skipped_tells_the_number_of_terms(skip):
    found = []
    for skip_layers in ([], [skip]):
        model = seeded(
            lambda: nn.Sequential(
                nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.ConvTranspose2d(2, 1, 2, stride=2)
            )
        )
        found.append(G_of_first(model, randn(4, 1, 8, 8), skip_layers=skip_layers))
    close(found[0], found[1])


def test_an_earlier_hook_that_changes_the_output_is_not_part_of_the_layer():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    model[2].register_forward_hook(lambda module, args, output: 3 * output)
    x = randn(5, 3)
    kfac = KFAC(model)
    y = model[2].forward(torch.tanh(model[0].forward(x))).detach().requires_grad_()
    (3 * y).square().mean().backward()
    step(kfac, model(x).square().mean())
    close(average(kfac, "2", "G")[0], 5 * y.grad.T @ y.grad)


# Models with a will of their own


def test_a_forward_of_ones_own_that_calls_no_known_function_waits_with_a_reason():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    layer = model[0]
    layer.forward = lambda x: 5 * (torch.linalg.multi_dot([x, layer.weight.T]) + layer.bias)
    kfac = KFAC(model.double())
    with pytest.warns(RuntimeWarning, match="'0'"):
        step(kfac, model(randn(4, 3)).square().mean())
    routing = kfac.routing()
    assert routing["0.weight"].treatment == routing["0.bias"].treatment == "waiting"
    assert "calls no function that K-FAC knows" in routing["0.weight"].reason
    assert routing["1.weight"].treatment == "kfac"
    assert "8 of 20 parameters preconditioned" in str(routing)


def test_a_forward_of_ones_own_by_tensordot_is_the_layer():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    other = copy.deepcopy(model)
    layer = other[0]
    layer.forward = lambda x: torch.tensordot(x, layer.weight, ([1], [1])) + layer.bias
    kfacs = [KFAC(one) for one in (model, other)]
    x = randn(5, 3)
    for one, kfac in zip((model, other), kfacs, strict=True):
        step(kfac, one(x).square().mean())
    for kind in "AG":
        close(*(average(kfac, "0", kind) for kfac in kfacs))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        close(p.grad, q.grad)


def test_the_output_projection_of_an_attention_with_its_own_forward_is_a_linear_layer():
    class Own(nn.MultiheadAttention):
        def forward(self, x):
            q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            return self.out_proj(F.scaled_dot_product_attention(q, k, v))

    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Own(4, 2)))
    kfac = KFAC(model)
    routing = kfac.routing()
    assert "forward of its own" in routing["1.in_proj_weight"].reason
    assert routing["1.out_proj.weight"].treatment == "kfac"
    step(kfac, model(randn(3, 5, 4)).square().mean())
    assert kfac.metrics()["layers"]["1.out_proj"]["ready"]


def test_two_attentions_with_one_input_projection_are_one_block_and_sum_both():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.MultiheadAttention(4, 2, batch_first=True) for _ in range(2))
            self.b.in_proj_weight = self.a.in_proj_weight
            self.b.in_proj_bias = self.a.in_proj_bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x, x, x)[0]
            self.between = x.detach()
            return self.b(x, x, x)[0]

    model = seeded(Tied)
    kfac = KFAC(model)
    routing = kfac.routing()
    assert "one block for 2 uses" in routing["a.in_proj_weight"].reason
    (layer,) = [layer for layer in kfac._engine.layers if "in_proj.q" in layer.name]
    gradients: list[torch.Tensor] = []
    for site in layer.sites:
        site.module.register_forward_hook(
            lambda module, args, output: output.register_hook(gradients.append) and None
        )
    x = randn(3, 5, 4)
    step(kfac, model(x).square().mean())
    rows = torch.cat([x.flatten(0, 1), model.between.flatten(0, 1)])
    close(average(kfac, layer.name, "A")[0], gram(rows))
    g = torch.cat([gradient.flatten(0, 1) for gradient in gradients])
    close(average(kfac, layer.name, "G")[0], 15 * g.T @ g)


def test_a_part_named_module_keeps_its_name():
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.ConvTranspose1d(2, 2, 1)
            self.bias = nn.Parameter(torch.zeros(2, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x) + self.bias

    model = seeded(Wrapped)
    kfac = KFAC(model)
    names = [layer.name for layer in kfac._engine.layers]
    assert sorted(names) == ["bias", "module", "module.bias"]
    step(kfac, model(randn(2, 2, 5)).square().sum())
    state = copy.deepcopy(kfac.state_dict())
    kfac.load_state_dict(state)
    assert same(state, kfac.state_dict())


def test_what_is_frozen_later_says_what_became_of_it():
    """The bias of a weight that is frozen keeps its gradient, and is not said to be preconditioned."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    kfac = KFAC(model)
    step(kfac, model(randn(5, 3)).square().mean())
    assert {route.treatment for route in kfac.routing()} == {"kfac"}
    for parameter in (model[0].weight, model[1].weight, model[2].bias):
        parameter.requires_grad_(False)
    kfac.zero_grad()
    model(randn(5, 3)).square().mean().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    kfac.step()
    routing = kfac.routing()
    for name in ("0.weight", "1.weight", "2.bias"):
        assert routing[name].treatment == "frozen"
    for name in ("0.bias", "1.bias"):
        assert routing[name].treatment == "plain"
        assert "frozen after K-FAC was attached" in routing[name].reason
        close(dict(model.named_parameters())[name].grad, before[name], rtol=0)
    assert routing["2.weight"].treatment == "kfac"
    assert not torch.allclose(model[2].weight.grad, before["2.weight"])


@pytest.mark.parametrize("how", ["frozen", "removed"])
def test_a_model_of_which_nothing_is_preconditioned_any_more_says_so_once(how):
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    weights, biases = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    base = torch.optim.SGD([{"params": biases}, {"params": weights}], lr=0.1)
    kfac = KFAC(model, base)
    step(kfac, model(randn(4, 3)).square().mean())
    if how == "frozen":
        for weight in weights:
            weight.requires_grad_(False)
    else:
        del base.param_groups[1]
    kfac.zero_grad()
    model(randn(4, 3)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="what does keeps its plain gradient") as caught:
        kfac.step()
    assert [w.filename for w in caught] == [__file__]
    kfac.zero_grad()
    step(kfac, model(randn(4, 3)).square().mean())  # warnings are errors


def test_a_parameter_that_is_unfrozen_later_is_plain_and_says_so_once():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    model[0].requires_grad_(False)
    kfac = KFAC(model)
    assert kfac.routing()["0.weight"].treatment == "frozen"
    model[0].requires_grad_(True)
    route = kfac.routing()["0.weight"]
    assert route.treatment == "plain"
    assert "was frozen" in route.reason
    model(randn(4, 3)).square().mean().backward()
    plain = model[0].weight.grad.clone()
    with pytest.warns(RuntimeWarning, match="were frozen when K-FAC was attached") as caught:
        kfac.step()
    assert [w.filename for w in caught] == [__file__]
    close(model[0].weight.grad, plain, rtol=0)
    step(kfac, model(randn(4, 3)).square().mean())  # warnings are errors


def test_nothing_is_a_fine_amount_of_parameters_and_of_examples():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.none = nn.Linear(3, 2), nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.none.sum()

    model = seeded(Odd)
    step(KFAC(model), model(randn(4, 3)).square().mean())
    convolution = seeded(lambda: nn.Conv2d(1, 2, 3))
    kfac = KFAC(convolution)
    step(kfac, convolution(randn(0, 1, 5, 5)).sum())
    step(kfac, convolution(randn(4, 1, 5, 5)).square().sum())
    assert kfac.skipped_steps == 0


def test_the_input_of_a_layer_whose_weight_is_frozen_may_change_in_place():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
            self.last.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x += self.last(x)
            return x

    model = seeded(InPlace)
    plain = copy.deepcopy(model)
    kfac = KFAC(model)
    for m in (plain, model):
        m(randn(4, 3)).square().sum().backward()
    close(model.first.weight.grad, plain.first.weight.grad, rtol=0)
    kfac.step()


def test_functional_gradients_of_a_model_with_hooks_are_those_without():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x = randn(5, 3)

    def loss(p, x):
        return functional_call(model, p, (x,)).square().sum()

    def gradients():
        return grad(loss)(p, x), vmap(grad(loss), (None, 0))(p, x)

    expected = gradients()
    kfac = KFAC(model)
    close(gradients(), expected, rtol=0)
    step(kfac, model(x).square().mean())
    close(gradients(), expected, rtol=0)


# Mistakes and interruptions


@pytest.mark.parametrize(("factors", "inverses"), [(1, 1), (10, 10), (20, 10)])
def test_ekfac_whose_moments_every_refresh_replaces_is_an_error(factors, inverses):
    model = nn.Linear(3, 2)
    periods = {"factor_update_steps": factors, "inv_update_steps": inverses}
    with pytest.raises(ValueError, match="factor_update_steps must not be a multiple of inv_update_s"):
        KFAC(model, compute_method="ekfac", **periods)
    assert hooks(model) == 0


@pytest.mark.parametrize("wrong", [{"loglevel": "INFO"}, {"output_of": 3}], ids=str)
def test_a_wrong_argument_leaves_the_model_as_it_was(wrong):
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8))
    with pytest.raises(TypeError, match=next(iter(wrong))):
        KFAC(model, fisher="mc", likelihood="gaussian", **wrong)
    assert hooks(model) == 0
    KFAC(model)


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift, self.stop = nn.Linear(3, 3), nn.Parameter(torch.randn(3)), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x + self.shift)
        if self.stop:
            raise KeyboardInterrupt
        return y


@pytest.mark.parametrize("after", ["step", "detach"])
def test_an_interrupted_forward_leaves_no_mode_behind(after):
    model = seeded(Interrupted)
    model.stop = False
    kfac = KFAC(model)
    step(kfac, model(randn(4, 3)).square().mean())
    model.stop, before = True, mode_stack()
    with pytest.raises(KeyboardInterrupt):
        model(randn(4, 3))
    if after == "detach":
        kfac.detach()
    else:
        model.stop = False
        step(kfac, model(randn(4, 3)).square().mean())
    assert mode_stack() == before == []


@pytest.mark.parametrize("steps", [0, 2])
def test_another_kfac_takes_off_what_an_interrupted_forward_left(steps):
    left = []
    for _ in range(3):
        model = seeded(Interrupted)
        kfac = KFAC(model)
        left.append(weakref.ref(model))
        model.stop = False
        for _ in range(steps):
            step(kfac, model(randn(4, 3)).square().mean())
        model.stop = True
        with pytest.raises(KeyboardInterrupt):
            model(randn(4, 3))
    assert mode_stack()
    model = seeded(Interrupted)
    kfac = KFAC(model)
    gc.collect()
    assert not mode_stack()
    assert [one() for one in left] == [None] * 3


class Interruption:
    """Ctrl-C at the nth line that runs of some functions."""

    def __init__(self, functions: Sequence[Any], nth: int) -> None:
        self.codes, self.nth, self.lines = [f.__code__ for f in functions], nth, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code not in self.codes:
            return None
        self.lines += event == "line"
        if self.lines == self.nth:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self

    def is_met_by(self, call: Callable[[], Any]) -> bool:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def test_a_step_follows_a_first_one_that_was_interrupted_anywhere_in_its_update():
    functions = LayerFactors.allocate, LayerFactors.update
    for nth in itertools.count(1):
        model, x = seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))), randn(4, 2)
        kfac = KFAC(model)
        model(x).square().mean().backward()
        if not Interruption(functions, nth).is_met_by(kfac.step):
            break
        kfac.zero_grad()
        step(kfac, model(x).square().mean())
        assert kfac.memory_usage() == kfac.memory_plan()
    assert nth > 50


class TrainsAnother(nn.Module):
    """Takes a step of another model in its own forward, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head, self.told = nn.Parameter(torch.ones(3)), nn.Linear(3, 2), False

    def forward(self, x):
        x = x * self.scale
        if self.told:
            with torch.random.fork_rng():
                other = Interrupted().to(x.dtype)
            other.stop = False
            step(KFAC(other), other(x.detach()).square().mean())
        return self.head(torch.tanh(x) * self.scale)


def test_a_step_of_another_model_in_a_forward_leaves_that_ones_mode():
    found = []
    for told in (False, True):
        model, x = seeded(TrainsAnother), randn(4, 3)
        model.told, kfac = told, KFAC(model)
        for _ in range(2):
            step(kfac, model(x).square().mean())
        found.append(records(kfac))
    assert same(*found)


def test_an_interrupted_forward_leaves_no_statistics():
    found = []
    for stop in (False, True):
        model = seeded(Interrupted)
        kfac = KFAC(model)
        model.stop = stop
        if stop:
            with pytest.raises(KeyboardInterrupt):
                model(randn(4, 3))
        model.stop = False
        step(kfac, model(randn(4, 3)).square().mean())
        found.append(records(kfac))
    assert same(*found)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_dropped_kfac_is_freed_and_gives_the_model_back(fisher, steps):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 2)
            self.shift = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.attention(x, x, x)[0] + self.shift)

    model = seeded(Model)
    kfac = KFAC(model, sgd(model), fisher=fisher, likelihood="gaussian")
    for _ in range(steps):
        step(kfac, model(randn(3, 5, 4)).square().mean())
    engine, kfac = weakref.ref(kfac._engine), weakref.ref(kfac)
    assert kfac() is engine() is None  # at once: without the help of a garbage collector
    assert hooks(model) == 0
    step(KFAC(model), model(randn(3, 5, 4)).square().mean())


def test_forward_passes_without_backward_are_freed_with_the_batch():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 200), nn.Linear(200, 2)))
    kfac = KFAC(model, fisher="mc", likelihood="gaussian")
    outputs = []
    for _ in range(3):
        outputs.append(weakref.ref(model(randn(4, 3))))
        kfac.reset_batch()
    gc.collect()
    assert [output() for output in outputs] == [None] * 3


def test_a_schedule_that_will_be_invalid_is_an_error_before_anything_moves():
    model = seeded(lambda: nn.Linear(3, 2))
    kfac = KFAC(model, sgd(model), factor_update_steps=lambda t: 1 if t < 1 else 0.5)
    model(randn(4, 3)).square().mean().backward()
    before = copy.deepcopy((model.state_dict(), model.weight.grad, kfac.state_dict()))
    with pytest.raises((TypeError, ValueError), match="factor_update_steps"):
        kfac.step()
    assert same(before, (model.state_dict(), model.weight.grad, kfac.state_dict()))


def test_a_step_after_detaching_says_that_it_was_detached():
    model = seeded(lambda: nn.Linear(3, 2))
    kfac = KFAC(model)
    kfac.detach()
    model(randn(4, 3)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="K-FAC was detached") as caught:
        kfac.step()
    assert [w.filename for w in caught] == [__file__]


def test_warnings_point_at_the_line_that_stepped():
    model = seeded(lambda: nn.Linear(3, 2))
    kfac = KFAC(model, sgd(model))
    (model(randn(4, 3)).sum() * float("nan")).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kfac.step()
    assert [w.filename for w in caught] == [__file__]


# Checkpoints that do not fit


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_a_field_of_the_wrong_shape_is_an_error_that_names_it_and_changes_nothing(method):
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    kfac = KFAC(model, sgd(model), compute_method=method, inv_update_steps=2)
    for seed in range(2):
        step(kfac, model(randn(4, 3, seed=seed)).square().mean())
    before = copy.deepcopy(kfac.state_dict())
    for key, tensor in before["kfac"]["layers"]["1"].items():
        bad = copy.deepcopy(before)
        bad["kfac"]["steps"] = 77
        bad["kfac"]["layers"]["0"]["G"] += 1
        bad["kfac"]["layers"]["1"][key] = torch.zeros(*tensor.shape, 9, dtype=tensor.dtype)
        with pytest.raises(ValueError, match=rf"layer '1' must have shape .* for {key}, got"):
            kfac.load_state_dict(bad)
        assert same(before, kfac.state_dict())


def test_what_the_optimizer_refuses_leaves_the_captures_as_they_were():
    def trained(size):
        model = seeded(lambda: nn.Linear(3, 2))
        kfac = KFAC(model, sgd(model), compute_method="ekfac", inv_update_steps=10)
        step(kfac, model(size * randn(4, 3, seed=int(size))).square().mean())
        return kfac

    kfac, other = trained(1.0), trained(10.0).state_dict()
    other["param_groups"] = []
    before = copy.deepcopy((kfac.state_dict(), kfac._engine.capture.by_layer[0].bases))
    with pytest.raises(ValueError, match="parameter group"):
        kfac.load_state_dict(other)
    assert same(before, (kfac.state_dict(), kfac._engine.capture.by_layer[0].bases))


# ---- mistakes that would train nothing, or something else ------------------------------------------


def scaled_step(kfac, model, scaler):
    scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
    scaler.step(kfac)


def test_a_grad_scaler_that_kfac_does_not_know_is_an_error():
    model = nn.Linear(4, 2)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="grad_scaler must be given to KFAC"):
        scaled_step(kfac, model, torch.amp.GradScaler("cpu"))
    scaled_step(kfac, model, torch.amp.GradScaler("cpu", enabled=False))
    assert kfac.steps == 1
    # Lightning asks this before it clips, with or without a scaler.
    assert getattr(kfac, "_step_supports_amp_scaling", False) is False


def test_gradients_that_are_still_scaled_are_an_error():
    model = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, grad_scaler=scaler)
    scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
    before = copy.deepcopy(model.weight.grad)
    with pytest.raises(RuntimeError, match="must be unscaled before step"):
        kfac.step()
    assert torch.equal(before, model.weight.grad)
    scaler.unscale_(sgd)
    kfac.step()
    scaler.step(sgd)
    scaler.update()
    assert kfac.steps == 1


def test_an_optimizer_of_other_parameters_is_an_error():
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="would precondition nothing") as caught:
        KFAC(nn.Linear(2, 2), torch.optim.SGD(other.parameters(), lr=0.1))
    assert "not in the optimizer" in str(caught.value)


def test_states_with_and_without_an_optimizer_are_not_exchanged():
    def make(with_optimizer):
        model = nn.Linear(2, 2)
        return KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1) if with_optimizer else None)

    for one in (True, False):
        with pytest.raises(ValueError, match="state_dict must be of a KFAC with"):
            make(one).load_state_dict(make(not one).state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_layers": ["("]}, r"skip_layers must be regular expressions, got '\('"),
        ({"weight_sharing": {"Conv2D": "reduce"}}, "weight_sharing must name classes"),
        ({"compute_method": "eig"}, "compute_method must be one of 'eigen', 'inverse', "),
    ],
)
def test_settings_that_mean_nothing_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        KFAC(nn.Linear(2, 2), **settings)


@pytest.mark.parametrize(("name", "value"), [("inv_update_steps", 1), ("factor_update_steps", 4)])
def test_ekfac_says_once_that_periods_measure_no_moments_any_more(name, value):
    model = nn.Linear(2, 2)
    kfac = KFAC(model, compute_method="ekfac", inv_update_steps=2)
    kfac.set_hyperparameter(name, value)  # one after the other, on the way to others perhaps
    model(torch.randn(4, 2)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="until they change: factor_update_steps must not be a mul"):
        kfac.step()
    step(kfac, model(torch.randn(4, 2)).square().mean())


def test_ekfac_may_refresh_in_every_step_at_first():
    model = nn.Linear(2, 2)
    kfac = KFAC(model, compute_method="ekfac", inv_update_steps=lambda t: 1 if t < 2 else 10)
    for number in range(4):
        model(torch.randn(4, 2)).square().mean().backward()
        if number:
            kfac.step()
            continue
        with pytest.warns(RuntimeWarning, match="until they change.*got 1 and 1"):
            kfac.step()
    assert kfac.steps == 4


def test_schedulers_change_both_periods_of_ekfac():
    kfac = KFAC(nn.Linear(2, 2), compute_method="ekfac", inv_update_steps=10)
    scheduler = KFACParamScheduler(kfac, update_freq_alpha=10, update_freq_schedule=[1])
    scheduler.step()
    assert kfac.hyperparameter("factor_update_steps") == 10
    assert kfac.hyperparameter("inv_update_steps") == 100


def test_gradients_that_were_unscaled_already_are_not_unscaled_again():
    model = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, sgd, grad_scaler=scaler)
    for unscaled in (kfac, sgd):
        kfac.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
        scaler.unscale_(unscaled)
        before = copy.deepcopy(model.state_dict())
        if unscaled is sgd:
            with pytest.raises(RuntimeError, match="must be unscaled once"):
                scaler.step(kfac)
            assert same(before, model.state_dict())
        else:
            scaler.step(kfac)
        scaler.update()
    assert kfac.steps == 1


@pytest.mark.parametrize("how", ["assigned", "one", "without storage"])
def test_parameters_that_replace_those_k_fac_knows_are_an_error(how):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    state = model.state_dict()
    kfac = KFAC(model.to("meta") if how == "without storage" else model)
    if how == "without storage":
        model.to_empty(device="cpu").load_state_dict(state)
    elif how == "assigned":
        model.load_state_dict(copy.deepcopy(state), assign=True)
    else:
        model[1].weight = nn.Parameter(torch.ones(2, 3))
    model(torch.ones(5, 4)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"must be those that K-FAC was attached to.*'1'"):
        kfac.step()
    kfac.detach()
    kfac = KFAC(model)
    model.zero_grad()
    model(torch.ones(5, 4)).square().sum().backward()
    kfac.step()


def test_a_part_of_the_model_without_numbers_is_an_error_that_names_it():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "never_loaded": nn.Linear(4, 3, device="meta")})
    kfac = KFAC(model)
    model["used"](torch.ones(5, 4)).square().sum().backward()
    gradient = model["used"].weight.grad.clone()
    with pytest.raises(RuntimeError, match=r"got on meta: 'never_loaded'\. .* skip_layers"):
        kfac.step()
    assert torch.equal(model["used"].weight.grad, gradient)
    kfac.detach()
    kfac = KFAC(model, skip_layers=["never_loaded"])
    model.zero_grad()
    model["used"](torch.ones(5, 4)).square().sum().backward()
    kfac.step()
    assert not torch.equal(model["used"].weight.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["inverse", "eigen", "newton_schulz", "Kron", "LRA"])
def test_a_step_inside_of_autocast_is_the_step_outside(method, dtype):
    ends = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        kinds = {"Kron": Kron, "LRA": LRA}
        if method in kinds:
            optimizer = kinds[method](model.parameters(), lr=0.01)
        else:
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = KFAC(model, sgd, compute_method=method)
        for _ in range(4):
            optimizer.zero_grad()
            (1e-3 * model(torch.randn(8, 6)).square().mean()).backward()
            with torch.autocast("cpu", dtype, enabled=inside):
                optimizer.step()
        ends.append(model.state_dict())
    assert same(*ends)


@pytest.mark.parametrize("before", [True, False])
def test_a_copy_after_layers_were_frozen_or_thawed_covers_what_the_first_covered(before):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model[0].requires_grad_(before)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(5, 4, dtype=torch.float64)
    model(x).square().mean().backward()
    kfac.step()
    model[0].requires_grad_(not before)
    other, copied = copy.deepcopy((model, kfac))
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]
    assert same(kfac.state_dict()["kfac"]["layers"], copied.state_dict()["kfac"]["layers"])


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_of_a_layer_split_between_optimizers_the_others_part_is_left_alone(what):
    layers = nn.Linear(4, 3), nn.LayerNorm(3), nn.ConvTranspose1d(3, 3, 1), nn.MultiheadAttention(3, 1)
    model = nn.ModuleList(layers).double()
    mine = [p for name, p in model.named_parameters() if what in name]
    kfac = KFAC(model, torch.optim.SGD(mine, lr=0.0), damping=0.1)
    x = model[1](model[0](torch.randn(6, 4, dtype=torch.float64)))
    x = model[2](x[:, :, None])[:, :, 0]
    model[3](x, x, x)[0].square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    kfac.step()
    routing = kfac.routing()
    for name, p in model.named_parameters():
        changed = not torch.equal(p.grad, gradients[name])
        assert changed == (routing[name].treatment == "kfac"), name
        if what not in name:
            assert not changed
            assert "not in the optimizer" in routing[name].reason


def test_a_copy_after_the_optimizer_got_more_parameters_covers_what_the_first_covered():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    sgd = torch.optim.SGD([model[0].weight, *model[1].parameters()], lr=0.1)
    kfac = KFAC(model, sgd)
    kfac.add_param_group({"params": [model[0].bias], "lr": 0.05})
    model(torch.randn(5, 4, dtype=torch.float64)).square().mean().backward()
    kfac.step()
    other, copied = copy.deepcopy((model, kfac))
    assert same(kfac.state_dict(), copied.state_dict())
    assert [len(group["params"]) for group in copied.param_groups] == [3, 1]
    assert copied.param_groups[1]["params"][0] is other[0].bias


@pytest.mark.parametrize("to_base", [False, True])
def test_a_head_exchanged_for_another_is_reported_and_stays_plain(to_base):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[2] = nn.Linear(3, 5)

    def go_on() -> None:
        (kfac.optimizer if to_base else kfac).add_param_group({"params": model[2].parameters()})
        model(torch.randn(5, 4)).square().mean().backward()
        kfac.step()

    with pytest.warns(RuntimeWarning, match="not covered when.*'2.weight', '2.bias'"):
        go_on()
    model(torch.randn(5, 4)).square().mean().backward()
    kfac.step()  # that has been said
    routes = {route.parameter: route for route in kfac.routing()}
    assert {name: route.treatment for name, route in routes.items()} == {
        **dict.fromkeys(("0.weight", "0.bias"), "kfac"),
        **dict.fromkeys(("2.weight", "2.bias"), "plain"),
        **dict.fromkeys(("optimizer.0.2", "optimizer.0.3"), "plain"),  # the head before
    }
    assert routes["2.weight"].shape == (5, 3)


@pytest.mark.parametrize("around", [True, False])
def test_a_head_that_was_exchanged_takes_no_part_in_steps(around):
    """Its last gradient may be there for ever: whoever clears gradients knows those of the new one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, base if around else None, damping=0.01, lr=0.1)

    def step() -> list[torch.Tensor]:
        """Gradients of the first layer, before the step."""
        base.zero_grad()
        (10 * model(torch.randn(5, 4, dtype=torch.float64))).square().mean().backward()
        found = [p.grad.clone() for p in model[0].parameters()]
        kfac.step()
        return found

    step()
    old, model[2] = model[2], nn.Linear(3, 5).double()
    if around:
        base.param_groups[0]["params"] = list(model.parameters())
    else:
        base = torch.optim.SGD(model.parameters(), lr=0.1)
    left = old.weight.grad.clone()
    with pytest.warns(RuntimeWarning, match="not covered when.*'2.weight', '2.bias'"):
        step()
    gradients = step()  # without a warning: that has been said
    assert torch.equal(old.weight.grad, left)
    # ν = √(0.001 / (lr² Σ⟨direction, gradient⟩)), of what is still a layer.
    clip = kfac.metrics()["kl_clip_coefficient"]
    clipped = [p.grad for p in model[0].parameters()]
    product = sum(float((d * g).sum()) for d, g in zip(clipped, gradients, strict=True)) / clip
    assert clip == pytest.approx((0.001 / (0.1**2 * product)) ** 0.5, rel=1e-9)


def test_what_was_named_by_skip_layers_may_be_moved_later_without_a_word():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    kfac = KFAC(model, torch.optim.SGD(model[0].parameters(), lr=0.1), skip_layers=["^2$"])
    kfac.add_param_group({"params": model[2].parameters()})
    model[3].requires_grad_(True)
    with pytest.warns(RuntimeWarning, match="not covered when.*'3.weight', '3.bias'"):
        kfac.add_param_group({"params": model[3].parameters()})
    model(torch.randn(5, 4)).square().mean().backward()
    kfac.step()  # that they were frozen has been said
    with pytest.raises(TypeError, match="ordered"):
        kfac.add_param_group({"params": {nn.Parameter(torch.ones(2))}})


def test_a_layer_that_the_optimizer_moves_later_is_covered_from_then_on():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    kfac = KFAC(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert [route.treatment for route in kfac.routing()] == ["plain", "plain", "kfac", "kfac"]
    kfac.add_param_group({"params": model[0].parameters()})
    assert [route.treatment for route in kfac.routing()] == ["kfac"] * 4
    model(torch.randn(5, 4)).square().mean().backward()
    plain = model[0].weight.grad.clone()
    kfac.step()
    assert not torch.allclose(model[0].weight.grad, plain)


@pytest.mark.parametrize("with_base", [False, True])
def test_gradients_that_are_one_number_for_many_can_be_written_to(with_base):
    found = []
    for dense in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1) if with_base else None)
        model(torch.randn(5, 4)).sum().backward()
        for p in model.parameters():
            p.grad = torch.ones(()).expand(p.shape)
            p.grad = p.grad.clone(memory_format=torch.contiguous_format) if dense else p.grad
        kfac.step()
        found += [x for p in model.parameters() for x in (p, p.grad)]
    for own, other in zip(found[:4], found[4:], strict=True):
        assert same(own, other)


def test_gradients_without_a_backward_pass_are_an_error_that_says_what_made_them():
    def attached():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        return model, KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))

    x = torch.randn(5, 3)
    model, kfac = attached()
    values = {name: p.detach() for name, p in model.named_parameters()}
    found = grad(lambda p: functional_call(model, p, x).square().mean())(values)
    for name, p in model.named_parameters():
        p.grad = found[name]
    with pytest.raises(RuntimeError, match=r"gradients from torch\.func have none"):
        kfac.step()

    model, kfac = attached()
    model(x).square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    kfac.zero_grad()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) forgets the pass before it"):
        kfac.step()


@pytest.mark.parametrize("named", [False, True])
def test_the_optimizers_own_parameters_are_in_the_report(named):
    """Such as a temperature of the loss: the model does not have it, and the optimizer moves it."""
    model, temperature = nn.Sequential(nn.Linear(3, 2)), nn.Parameter(torch.ones(()))
    beside = [("temperature", temperature)] if named else [temperature]
    parameters = [*(model.named_parameters() if named else model.parameters()), *beside]
    kfac = KFAC(model, torch.optim.SGD(parameters, lr=0.1))
    name = f"optimizer.0.{'temperature' if named else 2}"
    route = kfac.routing()[name]
    assert (route.treatment, route.shape) == ("plain", ())
    assert "not the model's" in route.reason
    assert "8 of 9 parameters" in str(kfac.routing())
    shift = nn.Parameter(torch.ones(2))
    kfac.optimizer.add_param_group({"params": [("shift", shift)] if named else [shift]})
    assert f"optimizer.1.{'shift' if named else 0}" in str(kfac.routing())
    assert len(KFAC(nn.Sequential(nn.Linear(3, 2))).routing()) == 2


@pytest.mark.parametrize("steps", [3, 4])
def test_looking_at_the_state_is_no_step(steps):
    """PyTorch takes one with gradients of zeros to see it, where the base optimizer keeps none."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, base, factor_update_steps=2, inv_update_steps=2)
    for _ in range(steps):
        model(torch.randn(5, 4, dtype=torch.float64)).square().mean().backward()
        kfac.step()
        kfac.zero_grad()
    before = copy.deepcopy(kfac.state_dict())
    found = get_optimizer_state_dict(model, kfac)
    assert found["param_groups"][0]["kfac"]["steps"] == kfac.steps == steps
    assert same(kfac.state_dict()["kfac"]["layers"], before["kfac"]["layers"])
    base.param_groups[0]["lr"] = 0.0  # a step of a warmup is one
    model(torch.randn(5, 4, dtype=torch.float64)).square().mean().backward()
    kfac.step()
    assert kfac.steps == steps + 1


class Recomputing(nn.Module):
    """Three layers, the second in a checkpoint; which of them, if any, and the model may be compiled."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if "reentrant" in self.how:
            x = checkpoint(self.body, x, use_reentrant=self.how == "reentrant")
        else:
            x = self.body(x)
        return self.head(torch.tanh(x))


def run_of(model: nn.Module, how: str) -> Any:
    if how == "compiled":
        return torch.compile(model, backend="aot_eager")
    if how == "a compiled layer":
        model.body.compile(backend="aot_eager")
    return model


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize(
    ("freeze", "parts", "skip"),
    [(False, 1, []), (True, 2, []), (False, 2, ["head"]), (True, 1, ["head"])],
)
@pytest.mark.parametrize("how", ["", "not reentrant", "reentrant", "compiled", "a compiled layer"])
def test_passes_that_are_thrown_away_leave_nothing(how, freeze, parts, skip):
    """By whoever sets gradients to None, from the first step on; a bias may train without its weight."""
    torch._dynamo.reset()
    found = []
    for thrown in (False, True):
        torch.manual_seed(0)
        model = Recomputing(how).double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), skip_layers=skip)
        model.first.weight.requires_grad_(not freeze)
        run = run_of(model, how)
        for seed in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).double()
            if thrown:
                for part in (2 * x).chunk(parts):
                    (9 * run(part).logsumexp(-1).mean()).backward()
            model.zero_grad()
            for part in x.chunk(parts):
                (run(part).logsumexp(-1).mean() / parts).backward()
            kfac.step()
            assert kfac.counted_terms == 8
        found.append(kfac.state_dict()["kfac"]["layers"])
    assert found[0].keys() == found[1].keys()
    for name, record in found[0].items():
        for key, tensor in record.items():
            torch.testing.assert_close(found[1][name][key], tensor, rtol=1e-9, atol=1e-12)


class Own(nn.Module):
    """A stack of matrices, or a parameter by itself."""

    def __init__(self, stack: bool) -> None:
        super().__init__()
        self.own, self.stack = nn.Parameter(torch.randn(2, 4, 3) if stack else torch.randn(4)), stack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.unflatten(0, (2, -1)), self.own) if self.stack else x * self.own


class OwnInCheckpoint(nn.Module):
    def __init__(self, stack: bool) -> None:
        super().__init__()
        self.inner = Own(stack)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.parametrize("stack", [True, False])
def test_passes_through_nothing_but_a_reentrant_checkpoint_are_thrown_away(stack):
    found = []
    for thrown in (False, True):
        torch.manual_seed(0)
        model = OwnInCheckpoint(stack).double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), terms=6)
        for seed in range(3):
            x = (
                torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
                .double()
                .requires_grad_()
            )
            if thrown:
                (9 * model(2 * x)).square().mean().backward()
            model.zero_grad()
            model(x).square().mean().backward()
            kfac.step()
        found.append(kfac.state_dict()["kfac"]["layers"]["inner.own"])
    for key, tensor in found[0].items():
        torch.testing.assert_close(found[1][key], tensor, rtol=1e-9, atol=1e-12)


class TiedAroundCheckpoint(nn.Module):
    """The table's gradient comes last, and a checkpoint's pass of its own is over before."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.table, self.body, self.head = (
            nn.Embedding(7, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 7, bias=False),
        )
        self.head.weight, self.reentrant = self.table.weight, reentrant

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        h = self.table(x)
        if fails:
            h.register_hook(lambda gradient: 1 / 0)
        return self.head(torch.tanh(checkpoint(self.body, h, use_reentrant=self.reentrant)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pass_that_raised_leaves_nothing(reentrant):
    """As one that ran out of memory."""
    found = []
    for raised in (False, True):
        torch.manual_seed(0)
        model = TiedAroundCheckpoint(reentrant).double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for seed in range(2):
            x = torch.randint(7, (6,), generator=torch.Generator().manual_seed(seed))
            if raised:
                with pytest.raises(ZeroDivisionError):
                    F.cross_entropy(model(6 - x, True), x).backward()
                model.zero_grad()
            F.cross_entropy(model(x), x).backward()
            kfac.step()
            kfac.zero_grad()
        found.append(kfac.state_dict()["kfac"]["layers"])
    for name, record in found[0].items():
        for key, tensor in record.items():
            torch.testing.assert_close(found[1][name][key], tensor, rtol=1e-9, atol=1e-12)


def test_a_pass_is_thrown_away_before_its_layer_is_frozen():
    """An actor's loss goes through its critic, which is frozen meanwhile, after a batch that failed."""
    found = []
    for thrown in (False, True):
        torch.manual_seed(0)
        model = Recomputing("").double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for seed, frozen in enumerate([True, False, True]):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).double()
            if thrown:
                (9 * model(2 * x).logsumexp(-1).mean()).backward()
            model.zero_grad()
            model.body.requires_grad_(not frozen)
            model(x).logsumexp(-1).mean().backward()
            model.body.requires_grad_(True)
            kfac.step()
        found.append(kfac.state_dict()["kfac"]["layers"])
    for name, record in found[0].items():
        for key, tensor in record.items():
            torch.testing.assert_close(found[1][name][key], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("how", ["", "compiled", "a compiled layer"])
def test_a_first_pass_is_thrown_away_after_gradients_were_cleared(how):
    torch._dynamo.reset()
    found = []
    for thrown in (False, True):
        torch.manual_seed(0)
        model = Recomputing(how).double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run, x = run_of(model, how), torch.randn(8, 4).double()
        kfac.zero_grad()  # before anything has run, compiled or not
        if thrown:
            (9 * run(2 * x).logsumexp(-1).mean()).backward()
            model.zero_grad()
        run(x).logsumexp(-1).mean().backward()
        kfac.step()
        found.append(kfac.state_dict()["kfac"]["layers"])
    assert same(*found)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize(
    ("how", "fisher"),
    [(how, "empirical") for how in ("", "not reentrant", "reentrant", "compiled", "a compiled layer")]
    + [(how, "type-2") for how in ("", "not reentrant")],
)
def test_gradients_may_be_summed_elsewhere_as_they_come(how, fisher):
    """In another dtype, or a bucket: micro-batches add up all the same; what is thrown away still is."""
    torch._dynamo.reset()
    found = []
    for elsewhere in (False, True):
        torch.manual_seed(0)
        model = Recomputing(how).double()
        settings = {"fisher": fisher, "likelihood": None if fisher == "empirical" else "categorical"}
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
        run, totals, hooks = run_of(model, how), {}, []

        def take(p, totals=totals):
            totals[p] = totals.get(p, 0) + p.grad
            p.grad = None

        for seed in range(3):
            x = torch.randn(9, 4, generator=torch.Generator().manual_seed(seed)).double()
            kfac.zero_grad()
            run(x).logsumexp(-1).mean().backward()
            model.zero_grad()  # a pass thrown away
            if elsewhere:
                hooks = [p.register_post_accumulate_grad_hook(take) for p in model.parameters()]
            for part in x.chunk(3):
                (run(part).logsumexp(-1).mean() / 3).backward()
            for hook in hooks:
                hook.remove()
            for p in model.parameters() if elsewhere else ():
                assert p.grad is None
                p.grad = totals.pop(p)
            kfac.step()
            assert kfac.counted_terms == 9
        found.append((list(model.parameters()), kfac.state_dict()["kfac"]["layers"]))
    for got, expected in zip(*map(torch.utils._pytree.tree_leaves, found), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("thrown", ["one head", "both"])
def test_a_pass_is_thrown_away_before_losses_go_backward_one_by_one(thrown, reentrant):
    """Of heads that the first of them does not reach; of parts that are checkpointed by themselves."""

    def run(part, x):
        return part(x) if reentrant is None else checkpoint(part, x, use_reentrant=reentrant)

    found = []
    for is_thrown in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("first", "second", "one", "other")})
        model = model.double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def loss(x, *heads, model=model):
            h = torch.tanh(run(model["second"], torch.tanh(run(model["first"], x))))
            return sum(model[head](h).logsumexp(-1).mean() for head in heads)

        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(6, 4, generator=generator).double().requires_grad_()
            if is_thrown:
                (9 * loss(3 * x, *(["other"] if thrown == "one head" else ["one", "other"]))).backward()
            model.zero_grad()
            loss(x, "one").backward()
            loss(x, "other").backward()
            kfac.step()
        found.append((kfac.counted_terms, kfac.state_dict()["kfac"]["layers"]))
    assert found[0][0] == found[1][0]
    for got, expected in zip(*(torch.utils._pytree.tree_leaves(one[1]) for one in found), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # torch 2.14's
def test_a_model_can_be_traced_while_it_trains():
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), randn(6, 4)
    kfac = KFAC(model)
    traced = torch.jit.trace(model, x)
    close(traced(x), model(x))
    step(kfac, model(x).square().mean())
    assert kfac.counted_terms == 6


@pytest.mark.parametrize("when", ["before", "between", "after", "raised"])
def test_forward_passes_that_no_loss_is_made_of_are_no_terms(when):
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3))
    model = nn.ModuleDict({"body": body, "head": nn.Linear(4, 3)})
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        x = torch.randn(8, 1, 9, 9, generator=torch.Generator().manual_seed(seed))
        kfac.zero_grad()
        if when == "before":
            body(x)
        loss = model["head"](body(x).mean((2, 3))).logsumexp(-1).mean()
        if when == "between":
            body(x)
        elif when == "raised":
            with pytest.raises(RuntimeError):
                body(x[:, :, :4, :4])  # too small for the second
        loss.backward()
        if when == "after":
            body(x)
        kfac.step()
        assert kfac.counted_terms == 8


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("fisher", ["mc", "type-2"])
def test_a_sampled_fisher_of_a_compiled_model_is_an_error(fisher):
    torch._dynamo.reset()
    model = Recomputing("").double()
    settings = {"fisher": fisher, "likelihood": "categorical"}
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    run = torch.compile(model, backend="aot_eager")
    run(torch.randn(8, 4).double()).logsumexp(-1).mean().backward()
    with pytest.raises(RuntimeError, match="do not compile it"):
        kfac.step()


@pytest.mark.parametrize("how", ["moved", "pruned"])
def test_a_parameter_with_another_name_is_reported_as_what_it_is(how):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    kfac = KFAC(model, kl_clip=None)
    if how == "moved":
        model.first = model[0]
        model[0] = nn.Identity()
        step = nn.Sequential(model.first, *model[1:3])
        name = "first.weight"
    else:
        prune.l1_unstructured(model[0], "weight", 0.5)
        step, name = model, "0.weight_orig"
    step(torch.randn(5, 4, dtype=torch.float64)).square().mean().backward()
    before = dict(model.named_parameters())[name].grad.clone()
    kfac.step()
    routing = kfac.routing()
    assert routing[name].treatment == "kfac"
    assert {route.parameter for route in routing} == dict(model.named_parameters()).keys()
    assert not torch.equal(dict(model.named_parameters())[name].grad, before)


def test_terms_of_micro_batches_add_up_where_the_last_layer_was_frozen_meanwhile():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[2].requires_grad_(False)
    for x in torch.randn(12, 4, dtype=torch.float64).chunk(3):
        (model(x).square().mean() / 3).backward()
    kfac.step()
    assert kfac.counted_terms == 12


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_takes_a_batch_without_examples(need_weights):
    model = nn.MultiheadAttention(6, 2, batch_first=True)
    KFAC(model)
    x = torch.zeros(0, 3, 6)
    out, _ = model(x, x, x, need_weights=need_weights)
    assert out.shape == (0, 3, 6)
    out.sum().backward()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_covers_what_the_original_does_after_a_head_was_exchanged(how):
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
    base = sgd(model)
    kfac, x = KFAC(model, base, damping=0.03), randn(12, 5)
    step(kfac, model(x).square().mean())
    model[2] = nn.Linear(7, 3).double()
    base.param_groups[0]["params"] = list(model.parameters())
    copied = (
        copy.deepcopy((model, kfac)) if how == "deepcopy" else pickle.loads(pickle.dumps((model, kfac)))
    )
    for own_model, own in ((model, kfac), copied):
        own.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that the head is plain
            step(own, own_model(x).square().mean())
        assert [r.treatment for r in own.routing().routes] == ["kfac", "kfac", "plain", "plain"]
    assert all(map(torch.equal, model.parameters(), copied[0].parameters()))


def test_a_copy_does_without_a_layer_that_was_taken_away():
    model = seeded(lambda: nn.ModuleDict({"a": nn.Linear(5, 3), "aux": nn.Linear(5, 3)}))
    kfac, x = KFAC(model, sgd(model), damping=0.03), randn(12, 5)
    step(kfac, (model["a"](x) + model["aux"](x)).square().mean())  # the two share an A
    del model["aux"]
    copied = copy.deepcopy((model, kfac))
    for own_model, own in ((model, kfac), copied):
        own.zero_grad()
        step(own, own_model["a"](x).square().mean())
    assert all(map(torch.equal, model.parameters(), copied[0].parameters()))


def test_a_bias_that_is_frozen_later_is_named_with_its_weight():
    model = seeded(lambda: nn.Linear(5, 3))
    kfac = KFAC(model)
    model.bias.requires_grad_(False)
    weight, bias = kfac.routing().routes
    assert weight.treatment == "kfac"
    assert "its bias, a coordinate of A, is frozen now" in weight.reason
    assert bias.treatment == "frozen"


def test_after_a_step_that_saw_nothing_layers_are_waiting():
    model = seeded(lambda: nn.Linear(5, 3)).eval()
    kfac = KFAC(model)
    model(randn(4, 5)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="saw no layer run in training mode"):
        kfac.step()
    assert {route.treatment for route in kfac.routing().routes} == {"waiting"}
    model.train()
    step(kfac, model(randn(4, 5)).square().mean())
    assert {route.treatment for route in kfac.routing().routes} == {"kfac"}


def test_examples_behind_positions_are_a_warning_with_reduce():
    make = nn.TransformerEncoderLayer
    with pytest.warns(RuntimeWarning, match=r"takes the first axis.*\(batch_first=False\): self_attn"):
        KFAC(make(8, 2, 16), weight_sharing="reduce")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(make(8, 2, 16, batch_first=True), weight_sharing="reduce")
        KFAC(make(8, 2, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["kfac"].pop("steps"), "got none of .'steps'"),
        (lambda saved: saved["kfac"]["hyperparameters"].update(dampink=1.0), "got .'dampink'"),
        (lambda saved: saved.pop("kfac"), r"a 'kfac' entry, got keys \['param_groups', 'state'\]"),
    ],
)
def test_a_checkpoint_that_lacks_something_is_an_error_before_anything_changes(change, message):
    model = seeded(lambda: nn.Linear(5, 3))
    kfac = KFAC(model, sgd(model))
    step(kfac, model(randn(4, 5)).square().mean())
    saved = copy.deepcopy(kfac.state_dict())
    change(saved)
    for group in saved["param_groups"]:
        group.pop("kfac", None)
    step(kfac, model(randn(4, 5, seed=1)).square().mean())
    before = copy.deepcopy(kfac.state_dict())
    with pytest.raises(ValueError, match=message):
        kfac.load_state_dict(saved)
    assert same(before, kfac.state_dict())


def test_a_state_that_torch_flattened_is_an_error_that_names_the_option():
    model = seeded(lambda: nn.Linear(5, 3))
    kfac, options = KFAC(model, sgd(model)), StateDictOptions(flatten_optimizer_state_dict=True)
    step(kfac, model(randn(4, 5)).square().mean())
    saved = get_optimizer_state_dict(model, kfac, options=options)
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict=True, which loses it: load, and"):
        set_optimizer_state_dict(model, kfac, saved, options=options)


def two_layers() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


@pytest.mark.parametrize("kl_clip", [None, 1e-3])
@pytest.mark.parametrize("gone", ["bias", "weight"])
def test_a_parameter_that_left_the_optimizer_keeps_its_gradient(gone, kl_clip):
    """And the direction of what stays is that of a step in which it is zero, however long it grows."""
    x, model = randn(16, 4), two_layers()
    base = sgd(model)
    kfac = KFAC(model, base, damping=0.01, kl_clip=kl_clip)
    model(x).square().mean().backward()
    kfac.step()
    model.zero_grad()
    left = getattr(model[0], gone)
    for step in range(3):
        other = copy.deepcopy((model, kfac))
        if step == 0:
            (group,) = base.param_groups
            group["params"] = [p for p in group["params"] if p is not left]
        for m in (model, other[0]):
            m(x).square().mean().backward()
        plain = [p.grad.clone() for p in model[0].parameters()]
        getattr(other[0][0], gone).grad.zero_()
        kfac.step()
        other[1].step()
        unchanged = [torch.equal(p.grad, g) for p, g in zip(model[0].parameters(), plain, strict=True)]
        assert unchanged == [gone == "weight", True]
        if gone == "bias":
            pairs = zip(model.parameters(), other[0].parameters(), strict=True)
            for p, q in [pair for pair in pairs if pair[0] is not left] if kl_clip is None else ():
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
        kfac.zero_grad()  # not of what left, which adds up
    assert left.grad is not None
    routes = {name: kfac.routing()[name] for name in ("0.weight", "0.bias")}
    assert [r.treatment == "kfac" for r in routes.values()] == [gone == "bias", False]
    assert "not in the optimizer" in routes[f"0.{gone}"].reason
    assert gone == "bias" or "in the optimizer no more" in routes["0.bias"].reason
    left.grad.fill_(torch.inf)
    model(x).square().mean().backward()
    kfac.step()
    assert kfac.skipped_steps == 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["function", "tensor"])
def test_a_batch_all_of_whose_labels_are_ignored_is_no_evidence(kind):
    x, labels = randn(8, 4), torch.arange(8) % 3
    model, counted = two_layers(), torch.tensor(8)
    terms = counted if kind == "tensor" else lambda: int(counted)
    kfac = KFAC(model, sgd(model), damping=0.01, terms=terms, factor_decay=0.5)
    before = None
    for number in (8, 0, 0):
        counted.fill_(number)
        y = labels if number else torch.full_like(labels, -100)
        F.cross_entropy(model(x), y, reduction="sum").backward()
        kfac.step()
        kfac.zero_grad()
        assert kfac.counted_terms == number
        layers = copy.deepcopy(kfac.state_dict()["kfac"]["layers"])
        for name, record in layers.items() if before else ():
            for key in ("A", "G", "A_weight", "G_weight"):
                assert torch.equal(record[key], before[name][key])
        before = layers
    assert kfac.steps == 3


def test_a_step_without_examples_that_moves_parameters_counts():
    x, model = randn(8, 4), two_layers()
    base = sgd(model)
    kfac = KFAC(model, base, damping=0.01)
    for step, n in enumerate([8, 0, 0]):
        model(x[:n]).square().sum().backward()
        kfac.step()
        kfac.zero_grad()
        assert kfac.steps == step + 1
    base.param_groups[0]["lr"] = 0.0
    model(x[:0]).square().sum().backward()
    kfac.step()  # moves nothing, as what torch.distributed.checkpoint does
    assert kfac.steps == 3


def test_numpy_numbers_are_saved_as_pythons(tmp_path):
    model = two_layers()
    kfac = KFAC(model, damping=np.float64(0.01), kl_clip=np.float32(0.5), lr=np.float64(0.1))
    kfac.set_hyperparameter("factor_decay", np.float64(0.5))
    torch.save(kfac.state_dict(), tmp_path / "state")
    numbers = torch.load(tmp_path / "state", weights_only=True)["kfac"]["hyperparameters"]
    chosen = ("damping", "kl_clip", "lr", "factor_decay")
    assert [numbers[name] for name in chosen] == [0.01, 0.5, 0.1, 0.5]
    assert all(type(numbers[name]) is float for name in chosen)


def test_a_scheduler_may_have_the_learning_rate_of_a_preconditioner():
    """As kfac-pytorch 0.3's examples: `kl_clip` follows it."""
    model = two_layers()
    kfac = KFAC(model, lr=0.2, kl_clip=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(kfac, lambda epoch: 0.5**epoch)
    seen = []
    for _ in range(3):
        seen.append(kfac.lr)
        model(randn(8, 4)).square().mean().backward()
        kfac.step()
        kfac.zero_grad()
        scheduler.step()
    assert seen == [0.2, 0.1, 0.05]
    copied = copy.deepcopy((model, kfac))[1]
    assert (kfac.lr, copied.lr) == (0.025, 0.025)
    kfac.set_hyperparameter("lr", 0.3)
    assert kfac.lr == kfac.param_groups[0]["lr"] == 0.3
    copied.load_state_dict(kfac.state_dict())
    assert copied.lr == copied.param_groups[0]["lr"] == 0.3
    torch.optim.lr_scheduler.LambdaLR(copied, lambda epoch: 0.5**epoch, last_epoch=2)
    assert copied.lr == 0.025
    kfac.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"lr must be >= 0, got -1\.0"):
        kfac.step()


def test_a_rate_that_is_a_tensor_is_loaded_as_a_copy():
    rates = torch.tensor(0.1), torch.tensor(0.2)
    first, second = (KFAC(two_layers(), lr=rate) for rate in rates)
    second.load_state_dict(first.state_dict())
    rates[0].fill_(0.3)
    assert (float(first.lr), float(second.lr)) == pytest.approx((0.3, 0.1))


def test_without_an_optimizer_a_step_that_sees_nothing_is_none():
    model = two_layers()
    kfac = KFAC(model)
    model(randn(0, 4)).square().sum().backward()
    kfac.step()
    assert kfac.steps == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_a_copy_of_an_attached_model_can_be_rid_of_its_hooks():
    model = two_layers()
    before = [[*vars(m)] for m in model.modules()]
    kfac = KFAC(model)
    copied = copy.deepcopy(model)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
    hooks += ("_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
    detach(copied)
    assert [[*vars(m)] for m in copied.modules()] == before
    assert not any(getattr(m, name) for m in copied.modules() for name in hooks)
    x = randn(3, 4)
    torch.testing.assert_close(torch.jit.script(copied)(x), model(x))
    model(x).square().mean().backward()
    kfac.step()  # the original's are still there
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        detach(3)


class Quantized(nn.Linear):
    def forward(self, x):
        weight = torch.fake_quantize_per_tensor_affine(self.weight, 0.01, 0, -128, 127)
        return F.linear(x, weight, self.bias)


class QuantizedByRow(nn.Linear):
    def forward(self, x):
        scale, zero = (
            torch.full((len(self.weight),), 0.01),
            torch.zeros(len(self.weight), dtype=torch.int32),
        )
        weight = torch.fake_quantize_per_channel_affine(self.weight, scale, zero, 0, -128, 127)
        return F.linear(x, weight, self.bias)


@pytest.mark.parametrize("kind", [Quantized, QuantizedByRow])
def test_weights_that_are_rounded_as_if_quantized_are_layers(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(kind(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(8, 4)
    kfac = KFAC(model, damping=0.01, kl_clip=None)
    y = model(x)
    h = model[0](x).detach()
    assert not torch.allclose(h, F.linear(x, model[0].weight, model[0].bias), atol=1e-6)
    (g,) = torch.autograd.grad(y.square().mean(0).sum(), y, retain_graph=True)
    g = (g @ model[2].weight) * (1 - torch.tanh(h) ** 2)
    y.square().mean(0).sum().backward()
    kfac.step()
    record = kfac.state_dict()["kfac"]["layers"]["0"]
    ones = torch.cat([x, torch.ones(8, 1)], 1)
    torch.testing.assert_close(record["A"][0] / record["A_weight"], ones.T @ ones / 8)
    torch.testing.assert_close(record["G"][0] / record["G_weight"], g.T @ g * 8)
    assert kfac.routing()["0.weight"].treatment == "kfac"


def test_copies_of_copies_have_no_more_hooks():
    def hooks(model):
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for _ in range(4):
        model(torch.randn(8, 4)).square().mean().backward()
        kfac.step()
        found.append(hooks(model))
        model, kfac = copy.deepcopy((model, kfac))
    assert found[1:] == found[1:2] * 3


class Averaging(torch.optim.SGD):
    """Keeps a state of its own around another's, as wrappers of optimizers do."""

    def state_dict(self):
        return {"inner": super().state_dict(), "slow": [p.detach().clone() for p in self.slow]}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["inner"])
        self.slow = [x.clone() for x in state_dict["slow"]]


def test_the_state_of_a_base_optimizer_may_look_like_anything(tmp_path):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        base = Averaging(model.parameters(), lr=0.1, momentum=0.9)
        base.slow = [torch.zeros(3)]
        return model, base, KFAC(model, base, damping=0.1)

    def train(model, kfac, steps):
        for step in steps:
            kfac.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            kfac.step()

    model, base, kfac = made()
    train(model, kfac, range(3))
    base.slow = [torch.ones(3)]
    torch.save((model.state_dict(), kfac.state_dict()), tmp_path / "state")
    train(model, kfac, range(3, 6))
    again, base, resumed = made()
    states = torch.load(tmp_path / "state", weights_only=True)
    again.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    train(again, resumed, range(3, 6))
    assert torch.equal(base.slow[0], torch.ones(3))
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("base", [True, False])
def test_hooks_may_add_to_a_state(base):
    model = nn.Linear(4, 2)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1) if base else None)
    kfac.register_state_dict_post_hook(lambda _, state: {**state, "epoch": 3})
    kfac.register_load_state_dict_pre_hook(
        lambda _, state: {key: value for key, value in state.items() if not base or key != "epoch"}
    )
    model(torch.randn(8, 4)).square().mean().backward()
    kfac.step()
    state = kfac.state_dict()
    assert state["epoch"] == 3
    kfac.load_state_dict(state)


@pytest.mark.parametrize("kind", ["KFAC", "Kron"])
def test_a_group_that_is_made_later_is_warned_of(kind, monkeypatch):
    """Each process would go its own way, from gradients that they average."""
    model = nn.Linear(3, 2)
    optimizer = KFAC(model) if kind == "KFAC" else Kron(model.parameters())
    later = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2
    )
    monkeypatch.setattr(collectives, "dist", later)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    assert len([w for w in said if f"initialized after the {kind} was made" in str(w.message)]) == 1


def steps_of(model: nn.Module, kfac: KFAC, answers: Any) -> None:
    step(kfac, model(torch.ones(4, 3)).square().mean())
    answers.put([p.detach().tolist() for p in model.parameters()])


def test_a_process_that_is_started_gets_a_copy():
    """What is made for it alone has to last until it has it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(kfac, model(torch.ones(4, 3)).square().mean())
    kfac.zero_grad()
    twin, its_kfac = copy.deepcopy((model, kfac))
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=steps_of, args=(twin, its_kfac, answers))
    process.start()
    found = answers.get()
    process.join()
    step(kfac, model(torch.ones(4, 3)).square().mean())
    assert found == [p.detach().tolist() for p in model.parameters()]
