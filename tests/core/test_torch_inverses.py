"""Each way of inverting in torch, here on a CPU, beside NumPy's in float64."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import assert_close, normal, positive_definite

torch = pytest.importorskip("torch")
inverses = pytest.importorskip("suite.core._torch_inverses")

WAYS = ["by_library", "by_strips", "on_device"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [1, 2, 3, 31, 256, 257, 300, 513, 769, 1100])
def test_inverses(way, n):
    x = positive_definite(2, n)
    got, factored = getattr(inverses, way)(torch.tensor(x))
    expected = np.linalg.inv(x)
    assert bool(factored.all())
    assert torch.equal(got, got.mT)
    assert got.is_contiguous()
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [(), (0,), (2, 0), (2, 3)])
def test_stacks_of_any_shape(way, batch):
    x = np.broadcast_to(positive_definite(1, 300)[0], (*batch, 300, 300))
    got, factored = getattr(inverses, way)(torch.tensor(x))
    assert got.shape == x.shape
    assert factored.shape == batch
    assert bool(factored.all())
    assert_close(got, np.linalg.inv(x), rtol=1e-8)


@pytest.mark.parametrize("way", ["by_strips", "on_device"])
@pytest.mark.parametrize(("n", "rows"), [(300, 50), (600, 100), (1100, 100)])
def test_products_are_as_robust_as_solves(way, n, rows):
    """Of factors with few rows and little damping, in single precision, as LAPACK's inverse."""
    a = normal(rows, n)
    average = a.T @ a / rows
    for damping in (1e-4, 5e-6):
        x = torch.tensor(average + damping * np.eye(n), dtype=torch.float32)
        exact = np.linalg.inv(x.double().numpy())
        errors = []
        for compute in (getattr(inverses, way), inverses.by_library):
            found, factored = compute(x[None])
            assert bool(factored.all())
            errors.append(np.linalg.norm(found[0].double().numpy() - exact) / np.linalg.norm(exact))
        assert errors[0] < 2 * errors[1] < 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [40, 300, 600])
@pytest.mark.parametrize("at", [0.1, 0.9])
def test_a_bad_matrix_of_a_stack_is_found(way, n, at, monkeypatch):
    monkeypatch.setattr(inverses, "_ON_DEVICE", 2 * n * n)  # in two parts
    x = torch.tensor(positive_definite(3, n))
    x[1, int(at * n), int(at * n)] = -1.0
    _, factored = getattr(inverses, way)(x)
    assert factored.tolist() == [True, False, True]


@pytest.mark.parametrize(("device", "n", "way"), [("cpu", 8, "by_library"), ("cpu", 80, "by_strips")])
def test_the_way_is_chosen_by_size(device, n, way, monkeypatch):
    monkeypatch.setattr(inverses, "_LARGEST_WHOLE", 40)
    asked = []
    for name in WAYS:
        compute = getattr(inverses, name)
        monkeypatch.setattr(inverses, name, lambda x, f=compute, n=name: (asked.append(n), f(x))[1])
    inverses.inverses(torch.eye(n, device=device).expand(2, n, n))
    assert asked == [way]


@pytest.mark.parametrize("n", [80, 300])
def test_strips_read_only_one_triangle(n):
    x = torch.tensor(positive_definite(2, n))
    assert_close(inverses.by_strips(x.tril())[0], np.linalg.inv(x.numpy()), rtol=1e-8)


def test_the_product_of_a_triangle_leaves_out_zeros():
    root = torch.tensor(np.tril(normal(2, 1200, 1200)))
    assert_close(inverses.gram_of_lower(root), root.mT @ root, rtol=1e-10)
