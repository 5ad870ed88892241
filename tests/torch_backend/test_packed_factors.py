"""K-FAC with `packed_factors`: the same numbers in half the memory."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from conftest import same
from suite.torch import KFAC, factor_storage

METHODS = ("inverse", "newton_schulz", "eigen", "ekfac")


class Mixed(nn.Module):
    """A grouped convolution, a table, norms, and linear layers of which three share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, groups=2)
        self.table = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.heads = nn.ModuleList(nn.Linear(6, n) for n in (5, 5, 4))
        self.last = nn.Linear(14, 3)

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(images).mean((-2, -1)) + self.table(words))
        return self.last(torch.tanh(torch.cat([head(x) for head in self.heads], dim=-1)))


def made(dtype=torch.float64, **settings):
    torch.manual_seed(0)
    model = Mixed().to(dtype)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    periods = {"factor_update_steps": 2, "inv_update_steps": 3, "damping": 0.01}
    return model, KFAC(model, base, **{**periods, **settings})


def train(model, kfac, steps):
    dtype = model.last.weight.dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(16, 4, 5, 5, generator=generator, dtype=dtype)
        words = torch.randint(9, (16,), generator=generator)
        targets = torch.randint(3, (16,), generator=generator)
        kfac.zero_grad()
        nn.functional.cross_entropy(model(images, words), targets).backward()
        kfac.step()


def assert_same_parameters(model, other, rtol=1e-9):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("at_once", [1, 2**19])
@pytest.mark.parametrize("method", METHODS)
def test_the_trajectory_is_the_one_without_packing(monkeypatch, method, at_once):
    monkeypatch.setattr(factor_storage, "_AT_ONCE", at_once)
    runs = [made(compute_method=method, packed_factors=packed) for packed in (True, False)]
    for run in runs:
        train(*run, range(20))
    assert runs[0][1].skipped_steps == 0
    assert_same_parameters(runs[0][0], runs[1][0])
    start = made()[0]
    assert not torch.allclose(start.conv.weight, runs[0][0].conv.weight, rtol=0.1)


@pytest.mark.parametrize("steps", [7, 8, 9])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_are_the_same_and_go_on_with_and_without_packing(method, packed, steps):
    model, kfac = made(compute_method=method, packed_factors=packed)
    train(model, kfac, range(steps))
    saved = copy.deepcopy(kfac.state_dict())
    others, other = made(compute_method=method, packed_factors=not packed)
    shapes = [
        {name: {k: x.shape for k, x in layer.items()} for name, layer in one["kfac"]["layers"].items()}
        for one in (saved, _trained_state(others, other))
    ]
    assert shapes[0] == shapes[1]
    others.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    taken = other.state_dict()["kfac"]["layers"]
    if packed:
        assert same(taken, saved["kfac"]["layers"])
    for name, record in saved["kfac"]["layers"].items():  # else symmetric up to rounding only
        for key, x in record.items():
            torch.testing.assert_close(taken[name][key], x, rtol=1e-12, atol=1e-12)
    train(model, kfac, range(steps, steps + 8))
    train(others, other, range(steps, steps + 8))
    assert_same_parameters(model, others)


def _trained_state(model, kfac):
    train(model, kfac, range(1))
    return kfac.state_dict()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_triangles_of_averages_and_inverses_are_all_that_is_kept(method, dtype):
    settings = {"factor_dtype": dtype, "inv_dtype": dtype, "compute_method": method}
    model, kfac = made(torch.float32, packed_factors=True, **settings)
    plain, whole = made(torch.float32, **settings)
    assert kfac.memory_usage() == {"factors": 0, "inverses": 0}
    planned = kfac.memory_plan()
    train(model, kfac, range(2))
    train(plain, whole, range(2))
    item = 4 if dtype is None else 2
    sides = {
        (layer.name, s): n
        for layer in kfac._engine.layers
        for s, n in zip("AG", layer.sizes, strict=True)
    }
    triangles = squares = 0
    for name, record in kfac.state_dict()["kfac"]["layers"].items():
        for side in "AG":
            if side == "A" and name in ("heads.1", "heads.2"):  # theirs is that of heads.0
                continue
            n, x = sides[name, side], record[side]
            triangles += x.shape[0] * (n * (n + 1) // 2 if x.ndim == 3 else n)
            squares += x.numel()
    assert kfac.memory_usage()["factors"] == triangles * item
    assert whole.memory_usage()["factors"] == squares * item
    shared = 2 * (7 * 8 // 2) * item  # planned before anyone knew
    assert planned["factors"] == triangles * item + shared
    if method in ("inverse", "newton_schulz"):
        assert kfac.memory_usage()["inverses"] == triangles * item
        assert planned["inverses"] == triangles * item + shared
    elif method == "eigen":
        assert kfac.memory_usage()["inverses"] == whole.memory_usage()["inverses"]


def test_no_full_matrix_outlives_a_step():
    """Layers of one size whose factors are not neighbours are put together for each step."""
    model, kfac = made(compute_method="inverse", packed_factors=True)
    train(model, kfac, range(5))
    store = kfac._engine.factors
    arrays = [x for factor in store.factors for x in (factor.average, factor.inverse)]
    kept = {x.untyped_storage().data_ptr() for x in arrays}
    cached = [x for found in store._cache.values() for x in _tensors(found) if x.ndim == 3]
    assert cached
    assert all(x.untyped_storage().data_ptr() in kept for x in cached)


def _tensors(found):
    if isinstance(found, torch.Tensor):
        return [found]
    return [x for part in found for x in _tensors(part)] if isinstance(found, (list, tuple)) else []


@pytest.mark.parametrize("at_once", [1, 2**19])
def test_a_factor_that_cannot_be_inverted_keeps_the_inverse_before_it(monkeypatch, at_once):
    monkeypatch.setattr(factor_storage, "_AT_ONCE", at_once)
    records = []
    for packed in (True, False):
        model, kfac = made(compute_method="inverse", packed_factors=packed, inv_update_steps=1)
        train(model, kfac, range(2))
        store = kfac._engine.factors
        place = store.places[4, "G"]  # the second of its stack
        store.factors[place.bucket].average[place.start : place.stop] = -1e3
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            train(model, kfac, range(2, 3))
        (warning,) = [str(x.message) for x in said if "factorizations failed" in str(x.message)]
        assert warning.endswith("stay in use: 'heads.1' (G)")
        records.append(kfac.state_dict()["kfac"]["layers"]["heads.1"])
    assert int(records[0]["G_failures"].sum()) == int(records[1]["G_failures"].sum()) > 0
    torch.testing.assert_close(records[0]["G_inverse"], records[1]["G_inverse"], rtol=1e-9, atol=1e-12)


def test_metrics_copies_and_directions_from_rows_agree(monkeypatch):
    from suite.torch import thin

    monkeypatch.setattr(thin, "SMALLEST", 0)
    found = []
    for packed in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 30)).double()
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, base, compute_method="inverse", packed_factors=packed, damping=0.1)
        for step in range(6):
            if step == 3:
                kfac = copy.deepcopy(kfac)
                model = kfac._engine.model
                assert kfac._engine.factors.storage.packed is packed
            kfac.zero_grad()
            x = torch.randn(6, 40, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            model(x).square().mean().backward()
            kfac.step()
        assert all(kept.refusals == 0 for kept in kfac._engine.capture.kept.values())
        found.append((model, kfac.metrics()["layers"]))
    assert_same_parameters(found[0][0], found[1][0])
    for name, record in found[0][1].items():
        assert record["condition_A"] == pytest.approx(found[1][1][name]["condition_A"], rel=1e-6)


def test_it_is_a_flag():
    with pytest.raises(TypeError, match="packed_factors must be True or False, got 1"):
        made(packed_factors=1)
