"""Factorizations that fail, statistics that are extreme, and what is reported about them."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.core import linalg
from suite.torch import KFAC

FACTORIZATION = {"eigen": "eigh", "inverse": "damped_inverse", "newton_schulz": "newton_schulz_inverse"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def step(model: nn.Module, kfac: KFAC, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad()
    F.cross_entropy(model(torch.randn(9, 4, generator=generator)), torch.arange(9) % 3).backward()
    kfac.step()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def failing(monkeypatch, name: str, fails) -> list[torch.dtype]:
    """Let a factorization give NaN where `fails(call number, input)`; returns the dtypes it saw."""
    original, calls = getattr(linalg, name), []

    def faulty(x, *args):
        calls.append(x.dtype)
        result = original(x, *args)
        if not fails(len(calls), x):
            return result
        if isinstance(result, tuple):
            return tuple(r * float("nan") for r in result)
        return result * float("nan")

    monkeypatch.setattr(linalg, name, faulty)
    return calls


@pytest.mark.parametrize("method", FACTORIZATION)
def test_a_failure_is_tried_again_with_more_damping_then_in_double_precision(monkeypatch, method):
    model = network()
    with monkeypatch.context() as patch:
        sizes = failing(patch, FACTORIZATION[method], lambda n, x: False)
        exact = step(model, KFAC(model, compute_method=method))
    for failures, last in ((1, torch.float32), (2, torch.float64)):
        with monkeypatch.context() as patch:
            model = network()
            kfac = KFAC(model, compute_method=method)
            # The first of all stacks fails, and is tried again after the others, where it may fail, too.
            fails = [1, *range(len(sizes) + 1, len(sizes) + failures)]
            calls = failing(patch, FACTORIZATION[method], lambda n, x, fails=fails: n in fails)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                direction = step(model, kfac)
        assert len(calls) == len(sizes) + failures
        assert calls[-1] == last
        assert kfac.metrics()["retries"] >= 1
        assert all(layer["ready"] for layer in kfac.metrics()["layers"].values())
        torch.testing.assert_close(direction, exact, rtol=0.1, atol=1e-3)


@pytest.mark.parametrize("method", FACTORIZATION)
def test_what_cannot_be_factorized_keeps_the_inverse_before_it_and_is_named(monkeypatch, method):
    model = network()
    kfac = KFAC(model, compute_method=method, kl_clip=None, factor_decay=0.5)
    step(model, kfac)
    kept = {k: v.clone() for k, v in kfac.state_dict()["kfac"]["layers"]["0"].items()}
    failing(monkeypatch, FACTORIZATION[method], lambda n, x: x.shape[-1] == 5)
    with pytest.warns(RuntimeWarning, match=r"factorizations failed.*'0' \(A\), '2' \(A\)"):
        step(model, kfac, seed=1)
    now = kfac.state_dict()["kfac"]["layers"]["0"]
    for name in kept:
        if name.startswith("A_") and name not in ("A_weight", "A_failures"):
            assert torch.equal(kept[name], now[name]), name
    assert not torch.equal(kept["A"], now["A"])
    report = kfac.metrics()["layers"]["0"]
    assert (report["failures_A"], report["failures_G"], report["ready"]) == (1, 0, True)


@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("spike", [1e10, 1e15, 1e19, 1e20, 1e30, 1e37])
def test_a_spike_between_statistics_is_clipped_or_skipped(spike, method):
    """A clipped step does not depend on the gradient's scale; single precision ends at 1.8e19.

    Before that the sum of ⟨direction, gradient⟩ overflows, and no step is taken.
    """
    moved = []
    for scale in (1.0, spike):
        model = network()
        periods = {"factor_update_steps": 2, "inv_update_steps": 2}
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        kfac = KFAC(model, sgd, compute_method=method, kl_clip=1e-6, **periods)
        step(model, kfac)
        before = [p.detach().clone() for p in model.parameters()]
        model.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        largest = max(float(p.grad.abs().max()) for p in model.parameters())
        for p in model.parameters():
            p.grad *= scale / largest
        skips = scale > 1.8e19
        warns = pytest.warns(RuntimeWarning, match="skipped") if skips else contextlib.nullcontext()
        with warns:
            kfac.step()
        assert kfac.skipped_steps == skips
        moved.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
    longest = max(d.abs().max() for d in moved[0])
    assert longest > 0
    for expected, found in zip(*moved, strict=True):
        wanted = expected if spike < 1e18 else torch.zeros_like(expected)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(longest))


def test_the_condition_of_a_diagonal_factor_is_that_of_its_entries():
    """Without a matrix: of a table of 50000 rows one would take 20 GB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50000, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    kfac = KFAC(model)
    tokens = torch.cat([torch.arange(50000), torch.randint(50000, (70000,))])
    model(tokens.reshape(-1, 2)).square().mean().backward()
    kfac.step()
    counts = kfac.state_dict()["kfac"]["layers"]["0"]["A"][0]
    expected = float(counts.max() / counts.min())
    assert kfac.metrics()["layers"]["0"]["condition_A"] == pytest.approx(expected, rel=1e-6)


def test_metrics_are_plain_numbers():
    model = network()
    kfac = KFAC(model, inv_update_steps=3, kl_clip=1e-6)
    json.dumps(kfac.metrics())  # before the first step, too
    for seed in range(3):
        step(model, kfac, seed)
    metrics = kfac.metrics()
    json.dumps(metrics)
    assert metrics["steps"] == 3
    assert metrics["steps_since_refresh"] == 3
    assert metrics["damping"] == 0.001
    assert 0 < metrics["kl_clip_coefficient"] < 1
    layer = kfac.state_dict()["kfac"]["layers"]["2"]
    values = torch.linalg.eigvalsh(layer["A"][0].double() / layer["A_weight"][0].double())
    assert metrics["layers"]["2"]["condition_A"] == pytest.approx(float(values[-1] / values[0]), rel=0.1)
    assert metrics["layers"]["2"]["condition_G"] > 1e6  # gradients by logits sum to zero: singular
    ratio = model[2].weight.grad.norm() / model[2].weight.detach().norm()
    assert metrics["layers"]["2"]["update_to_weight"] == pytest.approx(float(ratio), rel=1e-5)


def test_a_layer_of_some_rows_of_a_weight_is_measured_by_those():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    kfac = KFAC(model)
    x = torch.randn(3, 5, 4)
    model(x, x, x)[0].square().mean().backward()
    kfac.step()
    rows = zip(model.in_proj_weight.grad.chunk(3), model.in_proj_weight.detach().chunk(3), strict=True)
    for name, (update, weight) in zip("qkv", rows, strict=True):
        found = kfac.metrics()["layers"][f"in_proj.{name}"]["update_to_weight"]
        assert found == pytest.approx(float(update.norm() / weight.norm()), rel=1e-5)


@pytest.mark.parametrize("method", ["eigen", "inverse", "newton_schulz", "ekfac"])
def test_a_thousand_steps_without_gradients_change_nothing(method):
    model = network()
    kfac = KFAC(model, compute_method=method, inv_update_steps=50, factor_update_steps=5)
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 4)
    for _ in range(1000):
        optimizer.zero_grad()
        (model(x) * 0).sum().backward()
        kfac.step()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.isfinite(step(model, kfac)).all()


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_a_spike_of_a_million_passes(method):
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, sgd, compute_method=method, inv_update_steps=2)
    losses = []
    for i in range(60):
        kfac.zero_grad()
        x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
        loss = F.cross_entropy(model(x), torch.arange(9) % 3)
        (loss * (1e6 if i == 20 else 1.0)).backward()
        kfac.step()
        losses.append(loss.item())
    assert losses[-1] < losses[19]


@pytest.mark.parametrize(
    "settings",
    [{"compute_method": "newton_schulz"}, {"warm_start": True}, {"compute_method": "ekfac"}],
    ids=["newton_schulz", "warm start", "ekfac"],
)
def test_other_ways_to_the_inverse_train_like_the_plain_one(settings):
    ends = []
    for chosen in ({}, settings):
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        kfac = KFAC(model, sgd, inv_update_steps=2, **chosen)
        for _ in range(40):
            kfac.zero_grad()
            x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
            loss = F.cross_entropy(model(x), torch.arange(9) % 3)
            loss.backward()
            kfac.step()
        ends.append(loss.item())
    assert ends[1] < 1.5 * ends[0] + 0.05


def test_statistics_whose_factors_would_overflow_are_not_finite():
    """Σ g gᵀ is below the largest float32, and N Σ g gᵀ above it."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(64, 3)
    kfac = KFAC(model, kl_clip=None, damping=0.1)
    model(x).square().sum(-1).mean().backward()
    kfac.step()
    before = kfac.state_dict()["kfac"]["layers"]
    model.zero_grad()
    (model(x).square().sum(-1).mean() * 1e19).backward()
    assert model.weight.grad.isfinite().all()
    with pytest.warns(RuntimeWarning, match="was skipped"):
        kfac.step()
    after = kfac.state_dict()["kfac"]["layers"]
    assert kfac.skipped_steps == 1
    assert all(torch.equal(before[""][name], after[""][name]) for name in before[""])


@pytest.mark.parametrize("method", ["eigen", "ekfac"])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"inv_dtype": torch.float64}),
        (torch.float32, {"factor_dtype": torch.float64}),
        (torch.float64, {"inv_dtype": torch.float32}),
    ],
)
def test_warm_starts_of_factors_and_bases_in_other_dtypes(dtype, settings, method):
    model = network().to(dtype)
    kfac = KFAC(model, compute_method=method, warm_start=True, inv_update_steps=2, **settings)
    for number in range(6):
        model.zero_grad()
        model(torch.ones(9, 4, dtype=dtype) * (number + 1)).square().mean().backward()
        kfac.step()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert not kfac.skipped_steps


def test_a_weight_that_was_resized_in_place_is_an_error_that_names_it():
    model = network()
    kfac = KFAC(model)
    step(model, kfac)
    weight, model[2] = model[2].weight, nn.Linear(4, 5)  # as transformers resizes a table
    weight.data = torch.randn(5, 4)
    model[2].weight = weight
    model.zero_grad()
    F.cross_entropy(model(torch.randn(9, 4)), torch.arange(9) % 3).backward()
    with pytest.raises(
        RuntimeError, match="shapes that they had when K-FAC was attached, got others: '2'"
    ):
        kfac.step()


GROWN = {
    "a layer": (nn.Linear(4, 3), torch.randn(9, 4), (5, 4)),
    "its inputs": (nn.Linear(4, 3, bias=False), torch.randn(9, 6), (3, 6)),
    "a table": (nn.Embedding(5, 3), torch.arange(9) % 7, (7, 3)),
    "a table of bags": (nn.EmbeddingBag(5, 3, mode="sum"), torch.arange(18).view(9, 2) % 7, (7, 3)),
    "a convolution": (nn.Conv1d(2, 3, 2), torch.randn(9, 2, 5), (4, 2, 2)),
}


@pytest.mark.parametrize("how", GROWN)
def test_a_weight_that_grew_where_it_is_is_an_error_of_the_forward_that_names_it(how):
    layer, x, shape = copy.deepcopy(GROWN[how])
    model = nn.Sequential(layer, nn.Tanh())
    kfac = KFAC(model)
    before = tuple(layer.weight.shape)
    layer.weight.data = torch.randn(shape)
    if getattr(layer, "bias", None) is not None:
        layer.bias.data = torch.randn(shape[0])
    with torch.no_grad():
        assert model(x).isfinite().all()  # it may be looked at
    message = f"{re.escape(str(before))}, got {re.escape(str(shape))}: detach"
    with pytest.raises(RuntimeError, match="layer '0' must have a weight of the shape .*" + message):
        model(x)
    kfac.detach()
    kfac = KFAC(model)
    model(x).square().mean().backward()
    kfac.step()


def test_gradients_that_were_asked_for_alone_are_an_error_that_says_so():
    model = network()
    kfac = KFAC(model)
    loss = F.cross_entropy(model(torch.randn(9, 4)), torch.arange(9) % 3)
    loss.backward(inputs=list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"call loss.backward\(\)"):
        kfac.step()


def test_operations_that_are_not_known_are_an_error_that_names_their_parameters():
    class Ramp(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return torch.cumsum(self.phase, 0) * x

    model = Ramp()
    kfac = KFAC(model)
    model(torch.randn(5, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="does not know the operations in which 'phase'"):
        kfac.step()
