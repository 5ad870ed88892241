"""What torch does on a GPU, here on a CPU, where something stands in for its products of halves."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from conftest import assert_close, normal
from oracles import convolution_rows
from suite.core import correlations, linalg, statistics

torch = pytest.importorskip("torch")
_torch = pytest.importorskip("suite.core._torch")

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def halves(monkeypatch):
    """As if the device summed them in single; how many products it was asked for."""
    asked = []

    def products(x, y):
        assert x.ndim == y.ndim == 3
        assert x.dtype == y.dtype in HALVES
        asked.append(x.shape)
        return torch.bmm(x.float(), y.float())

    monkeypatch.setattr(_torch, "sums_in_single", lambda x: x.dtype in HALVES)
    monkeypatch.setattr(_torch, "_half_products", products)
    # The paths that a CPU has for itself.
    monkeypatch.setattr("suite.core._torch_known.is_at_hand", lambda x: False)
    return asked


def rounded(dtype, *shape):
    """Numbers of half precision, and the same in float64."""
    x = torch.tensor(normal(*shape)).to(dtype)
    return x, x.double().numpy()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 30, 4), (2, 5, 4), (1, 100, 3)], ids=str)
def test_second_moments_of_rows_as_they_are(halves, dtype, bias, shape):
    rows, exact = rounded(dtype, *shape)
    got = statistics.second_moment_sum(rows, bias=bias)
    if bias:
        exact = np.concatenate([exact, np.ones((*shape[:2], 1))], axis=-1)
    assert got.dtype == torch.float32
    assert len(halves) == 1
    assert_close(got.double(), np.swapaxes(exact, 1, 2) @ exact, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_diagonals_are_summed_in_single_precision(halves, bias):
    rows, exact = rounded(torch.bfloat16, 1, 300, 4)
    got = statistics.second_moment_sum(rows, diagonal=True, bias=bias)
    expected = (exact**2).sum(1)
    expected = np.concatenate([expected, np.full((1, 1), 300.0)], axis=-1) if bias else expected
    assert got.dtype == torch.float32
    assert not halves
    assert_close(got.double(), expected, rtol=1e-5)


@pytest.mark.parametrize("plane", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "groups"),
    [
        ((3, 3), (1, 1), (1, 1), 1),
        ((3, 3), (2, 2), (1, 1), 1),
        ((1, 1), (2, 2), (0, 0), 1),
        ((1, 1), (1, 1), (0, 0), 2),
        ((3, 2), (1, 1), (1, 0), 2),
        ((3,), (1,), (1,), 1),
    ],
)
def test_second_moments_of_patches_as_they_are(
    halves, monkeypatch, kernel, stride, padding, groups, bias, plane
):
    """Both with patches and, where products are dear, without."""
    monkeypatch.setattr(_torch, "work_of_a_launch", lambda x: 0 if plane else 2**40)
    axes = len(kernel)
    x, exact = rounded(torch.bfloat16, 3, 4, *(7, 6)[:axes])
    sides = [(p, p) for p in padding]
    given = (kernel, stride, sides, (1,) * axes, groups)
    got = correlations.second_moment_sum(x, *given, bias=bias)
    rows = np.stack(convolution_rows(exact, *given))
    if bias:
        rows = np.concatenate([rows, np.ones((*rows.shape[:2], 1))], axis=-1)
    assert got.dtype == torch.float32
    assert halves
    assert_close(got.double(), np.swapaxes(rows, 1, 2) @ rows, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("size", [1, 5])
def test_second_moments_of_outputs_as_they_are(halves, groups, size):
    y, exact = rounded(torch.float16, 6, 4, size, size)
    got = correlations.output_second_moment_sum(y, groups)
    channels = 4 // groups
    rows = exact.reshape(6, groups, channels, -1).transpose(1, 0, 3, 2).reshape(groups, -1, channels)
    assert got.dtype == torch.float32
    assert len(halves) == 1
    assert_close(got.double(), np.swapaxes(rows, 1, 2) @ rows, rtol=1e-5)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_second_moments_of_a_batch_norm_from_halves(halves, dtype, both):
    """Means far from zero, gradients as small as a loss scale leaves them and larger than its square."""
    x, exact = rounded(dtype, 40, 4, 5, 30)
    x, exact = x + 4, (x + 4).double().numpy()
    g, gradient = rounded(dtype, 40, 4, 30, 5)
    for scale in (1e-3, 1e3):
        shifts = (g * scale).reshape(x.shape)
        gradient = shifts.double().numpy()
        got = statistics.batch_norm_second_moment_sum(x, shifts, 1e-5, both)
        mean, variance = exact.mean((0, 2, 3), keepdims=True), exact.var((0, 2, 3), keepdims=True)
        scales = gradient * (exact - mean) / np.sqrt(variance + 1e-5)
        units = np.stack([scales, gradient], axis=-1) if both else scales[..., None]
        expected = np.einsum("nchwi,nchwj->cij", units, units)
        assert got.dtype == torch.float32
        assert_close(got.double(), expected if both else expected[None, :, 0, 0], rtol=1e-5)


def test_blocks_of_a_batch_norm_of_which_one_example_is_all_are_of_rank_one(halves):
    x, _ = rounded(torch.bfloat16, 16, 8, 1, 1)
    g, _ = rounded(torch.bfloat16, 16, 8)
    g[1:] = 0  # of ignored labels
    got = statistics.batch_norm_second_moment_sum(x, g.reshape(16, 8, 1, 1), 1e-5, True).double()
    least, most = np.linalg.eigvalsh(got.numpy()).T
    assert (np.abs(least) < 1e-6 * most).all()


@pytest.mark.parametrize("shape", [(1, 0, 4), (0, 4), (3, 4), (2, 3, 5, 4)], ids=str)
def test_products_of_any_rows_as_they_are(halves, shape):
    rows, exact = rounded(torch.bfloat16, *shape)
    got = linalg.gram_in_single(rows)
    assert got.dtype == torch.float32
    assert_close(got.double(), np.swapaxes(exact, -1, -2) @ exact, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_squares_are_summed(device):
    x = torch.tensor(normal(3, 4, 5), device=device)
    found = _torch.sum_of_squares(x)
    assert found.shape == (3, 4)
    if device == "cpu":
        assert_close(found, (normal(3, 4, 5) ** 2).sum(-1))


def test_no_cpu_is_asked_to_sum_halves():
    x = torch.ones((1, 2, 2), dtype=torch.bfloat16)
    assert linalg.for_sums(x).dtype == linalg.gram_in_single(x).dtype == torch.float32
    assert not linalg.sums_in_single(x)


SETTINGS = {
    "as it comes": lambda: None,
    "TF32, the old way": lambda: torch.set_float32_matmul_precision("high"),
    "bfloat16, the old way": lambda: torch.set_float32_matmul_precision("medium"),
    "allowed": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
}
if hasattr(torch.backends, "fp32_precision"):
    SETTINGS |= {
        "TF32": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        "everywhere": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    }


def precision():
    """What is set for products of float32 now, in every way of asking that answers."""
    asked = [
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda: torch.backends.fp32_precision,
    ]
    found = []
    for question in asked:
        try:
            found.append(question())
        except (RuntimeError, AttributeError) as error:  # torch refuses where ways were mixed
            found.append(type(error))
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_full_precision_is_for_a_while(name):
    code = f"""
import sys, torch
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from test_on_a_gpu import SETTINGS, precision
from suite.core import _torch
SETTINGS[{name!r}]()
before, x = precision(), torch.empty(2, device="meta")
for error in (None, ValueError):
    try:
        with _torch.full_precision(x):
            inside = precision()
            if error:
                raise error
    except ValueError:
        pass
    assert precision() == before, (before, precision())
settings = torch.backends.cuda.matmul
assert inside[2] in ("ieee", "none", AttributeError), inside
assert inside[2] != AttributeError or inside[0] == "highest", inside
with _torch.full_precision(x.new_empty(2, device="cpu")):
    assert precision() == before
if hasattr(torch.backends, "fp32_precision"):  # who had what is set for all still has that
    torch.backends.fp32_precision = "ieee"
    now, shared = settings.fp32_precision, {name in ("everywhere", "as it comes")}
    assert now == ("ieee" if shared else "tf32"), now
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_share_full_precision():
    """The first to leave puts nothing back that another needs; the last one does."""
    before, x = precision(), torch.empty(2, device="meta")
    torch.set_float32_matmul_precision("high")
    allowed = precision()
    try:
        entered, left = threading.Event(), threading.Event()

        def other() -> None:
            with _torch.full_precision(x):
                entered.set()
                left.wait(60)

        thread = threading.Thread(target=other)
        with _torch.full_precision(x):
            inside = precision()
            thread.start()
            entered.wait(60)
        assert precision() == inside != allowed
        left.set()
        thread.join()
        assert precision() == allowed
    finally:
        torch.set_float32_matmul_precision("highest")
    assert precision()[0] == before[0]
