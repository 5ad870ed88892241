"""Kron with `packed_factors` and without `cache_preconditioner`: the same steps from less memory."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from typing import get_args

import pytest
import torch
from torch import nn

from conftest import same
from suite.core import kron as core_kron
from suite.torch import Kron
from suite.torch import kron as front_door

GEOMETRIES = get_args(core_kron.Geometry)
PACKED_Q = ("EQ", "QUAD", "QUAD4P")
CACHED = {"cache_preconditioner": True}
STORAGES = (
    {},
    {"packed_factors": True},
    {"packed_factors": True, "cache_preconditioner": True},
    {"packed_factors": True, "cache_preconditioner": False},
    {"cache_preconditioner": False},
)


def network(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).to(dtype)


def made(dtype=torch.float64, **settings):
    model = network(dtype)
    kron = {"lr": 0.01, "block_size": 16, "preconditioner_update_probability": 0.4, **settings}
    return model, Kron(model.parameters(), **kron)


def train(model, kron, steps, poison=()):
    dtype = model[0].weight.dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 1, 5, 5, generator=generator).to(dtype)
        y = torch.randint(3, (16,), generator=generator)
        kron.zero_grad()
        nn.functional.cross_entropy(model(x).double(), y).backward()
        if step in poison:
            model[3].weight.grad[0, 0] = torch.nan
        kron.step()


def assert_same_parameters(model, other, rtol=1e-9):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_trajectory_is_the_one_from_whole_matrices(geometry, storage):
    model, kron = made(geometry=geometry, **storage)
    expected, whole = made(geometry=geometry, **CACHED)
    train(model, kron, range(40))
    train(expected, whole, range(40))
    assert_same_parameters(model, expected)
    usage, most = (sum(k.memory_usage().values()) for k in (kron, whole))
    assert usage < most  # a convolution of one channel has an axis whose P is cheap
    if not kron.param_groups[0]["packed_factors"]:  # P is computed from the same Q in the same way
        # To rounding: on some processors a product's last bit depends on where its factors lie.
        assert_same_parameters(model, expected, rtol=1e-13)
    start = network()
    assert not torch.allclose(start[3].weight, model[3].weight, rtol=0.1)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "settings",
    [
        {"update_first": False, "whiten": "gradient"},
        {"memory_save_mode": "one_diag"},
        {"partition_grads_into_blocks": False, "preconditioner_init_scale": None},
        {"min_ndim_triangular": 1, "clip": (1.1, 3.0)},
    ],
)
def test_so_it_is_with_other_settings(settings, storage):
    model, kron = made(geometry="EQ", **settings, **storage)
    expected, whole = made(geometry="EQ", **CACHED, **settings)
    train(model, kron, range(20))
    train(expected, whole, range(20))
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("geometry", ["QUAD", "QUAD4P"])
def test_newton_takes_the_same_steps(geometry):
    found = []
    for storage in (*STORAGES, CACHED):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
        H = torch.diag(torch.linspace(1, 9, 6, dtype=torch.float64))
        kron = Kron([p], lr=0.01, hvp="exact", geometry=geometry, **storage)
        for _ in range(20):
            kron.step(lambda p=p, H=H: (p * (H @ p)).sum() / 2)
        found.append(p.detach())
    for p in found[:-1]:
        torch.testing.assert_close(p, found[-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("geometry", ["EQ", "QUAD4P", "Q0.5EQ1.5"])
@pytest.mark.parametrize("looks", [True, False])
def test_a_step_that_is_not_finite_changes_nothing(monkeypatch, geometry, looks):
    if not looks:
        monkeypatch.setattr(front_door, "HOST_DEVICES", ())
    model, kron = made(geometry=geometry, packed_factors=True, cache_preconditioner=False)
    train(model, kron, range(4))
    before = copy.deepcopy((model.state_dict(), kron.state_dict()["state"]))
    with pytest.warns(RuntimeWarning, match="a step was skipped") if looks else nullcontext():
        train(model, kron, range(4, 6), poison=(4, 5))
    assert kron.skipped_steps == 2
    after = kron.state_dict()["state"]
    for record in (*before[1].values(), *after.values()):
        record.pop("skipped_steps")
    assert same(before, (model.state_dict(), after))


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_triangles_are_all_that_is_kept(geometry, dtype):
    p = nn.Parameter(torch.zeros(12, 7))
    squares, triangles, item = 12 * 12 + 7 * 7, (12 * 13 + 7 * 8) // 2, 4 if dtype is None else 2

    def usage(**storage):
        kron = Kron([p], geometry=geometry, precond_dtype=dtype, mu_dtype=dtype, **storage)
        for _ in range(3):
            p.grad = torch.ones(12, 7)
            kron.step()
        return kron.memory_usage()

    momentum = 12 * 7 * item
    Q = triangles if geometry in PACKED_Q else squares
    for storage, expected in (
        (CACHED, (squares, squares)),
        ({"packed_factors": True, **CACHED}, (Q, triangles)),
        ({"packed_factors": True, "cache_preconditioner": False}, (Q, 0)),
        ({"cache_preconditioner": False}, (squares, 0)),
    ):
        factors, preconditioners = (n * item for n in expected)
        assert usage(**storage) == {
            "momentum": momentum,
            "factors": factors,
            "preconditioners": preconditioners,
        }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("geometry", ["EQ", "QEQ"])
@pytest.mark.parametrize(
    ("shape", "settings", "kept"),
    [
        ((16, 64), {}, [64]),  # 16³ <= 16 * 16 * 64 / 4
        ((17, 64), {}, [17, 64]),
        ((64, 16), {}, [64]),
        ((32, 64), {"block_size": 16}, [16] * 4),  # along the axis of 64; of 32 the two are cheap
        ((4, 8), {"memory_save_mode": "all_diag"}, []),
        ((8,), {"min_ndim_triangular": 1}, [8]),
    ],
)
def test_by_default_p_is_kept_where_it_takes_long_to_compute(shape, settings, kept, geometry, packed):
    p = nn.Parameter(torch.zeros(shape))
    kron = Kron([p], geometry=geometry, packed_factors=packed, **settings)
    for _ in range(2):
        p.grad = torch.ones(shape)
        kron.step()
    numbers = sum(n * (n + 1) // 2 if packed else n * n for n in kept)
    assert kron.memory_usage()["preconditioners"] == 4 * numbers


@pytest.mark.parametrize("geometry", [*PACKED_Q, "Q0.5EQ1.5"])
def test_half_precision_trains_alike(geometry):
    settings = {"geometry": geometry, "precond_dtype": torch.bfloat16, "mu_dtype": torch.bfloat16}
    model, kron = made(torch.float32, packed_factors=True, **settings)
    expected, whole = made(torch.float32, **settings)
    train(model, kron, range(10))
    train(expected, whole, range(10))
    assert_same_parameters(model, expected, rtol=2e-3)


def test_stochastic_rounding_leaves_triangles_triangular():
    settings = {"geometry": "EQ", "precond_dtype": torch.bfloat16, "stochastic_rounding": True}
    model, kron = made(torch.float32, packed_factors=True, **settings)
    expected, whole = made(torch.float32, **settings)
    train(model, kron, range(10))
    train(expected, whole, range(10))
    assert_same_parameters(model, expected, rtol=2e-3)
    for own in whole.state_dict()["state"].values():
        for name, q in own.items():
            if "factor" in name and q.ndim == 3:
                assert torch.equal(q, q.triu())


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", ["EQ", "QUAD", "Q0.5EQ1.5"])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("back", [True, False])
def test_checkpoints_are_the_same_and_go_on_with_and_without_packing(geometry, gather, storage, back):
    first, second = ({}, storage) if back else (storage, {})
    model, kron = made(geometry=geometry, **first)
    train(model, kron, range(7))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "kron": kron.state_dict(gather=gather)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    others, other = made(geometry=geometry, **second)
    others.load_state_dict(saved["model"])
    other.load_state_dict(saved["kron"])
    taken = other.state_dict(gather=gather)["state"]
    assert same(taken, saved["kron"]["state"])
    assert other.param_groups[0]["packed_factors"] is second.get("packed_factors", False)
    train(model, kron, range(7, 15))
    train(others, other, range(7, 15))
    assert_same_parameters(model, others)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_resumed_run_and_a_copy_are_the_uninterrupted_run(storage):
    model, kron = made(geometry="EQ", **storage)
    train(model, kron, range(5))
    saved = copy.deepcopy((model.state_dict(), kron.state_dict()))
    twin = copy.deepcopy({"model": model, "kron": kron})
    train(model, kron, range(5, 10))
    train(twin["model"], twin["kron"], range(5, 10))
    resumed, again = made(geometry="EQ", **storage)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(resumed, again, range(5, 10))
    assert same(model.state_dict(), resumed.state_dict())
    assert same(model.state_dict(), twin["model"].state_dict())


# ---- refusals -----------------------------------------------------------------------------------


def test_a_geometry_that_would_not_stay_packed_is_an_error_before_anything_changes():
    model, kron = made(geometry="EQ", packed_factors=True)
    train(model, kron, range(2))
    before = copy.deepcopy((model.state_dict(), kron.state_dict()["state"]))
    general = made(geometry="QEQ")[1].state_dict()
    message = "geometry must leave factors 'upper', as packed_factors=True has them, got 'QEQ'"
    with pytest.raises(ValueError, match=message):
        kron.load_state_dict(general)
    kron.param_groups[0]["geometry"] = "QEQ"
    with pytest.raises(ValueError, match=message):
        train(model, kron, range(2, 3))
    assert same(before, (model.state_dict(), kron.state_dict()["state"]))


@pytest.mark.parametrize("geometry", ["QUAD", "QUAD4P"])
def test_symmetric_factors_that_are_rounded_by_chance_are_an_error(geometry):
    message = "stochastic_rounding must be False with packed_factors=True"
    with pytest.raises(ValueError, match=message):
        made(geometry=geometry, packed_factors=True, stochastic_rounding=True)
    model, kron = made(geometry=geometry, packed_factors=True)
    kron.param_groups[0]["stochastic_rounding"] = True
    with pytest.raises(ValueError, match=message):
        train(model, kron, range(1))
    assert same(model.state_dict(), network().state_dict())


@pytest.mark.parametrize("name", ["packed_factors", "cache_preconditioner"])
def test_they_are_flags(name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 1"):
        made(**{name: 1})
