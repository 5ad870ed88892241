"""The benchmark of steps: reads by the host are counted, and there are as few as the docs say."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from suite.torch import KFAC, Kron

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import capture_floor
import step_time
import workloads

pytestmark = pytest.mark.usefixtures("settings_of_torch")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("reads", "count"),
    [
        (lambda x: x + 1, 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: float(x.sum()) + bool(x.any()), 2),
        (lambda x: x.nonzero(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: [x.tolist(), x[0].item()], 2),
    ],
)
def test_reads_are_counted(reads, count):
    x = torch.ones(3)
    assert step_time.host_syncs(lambda: reads(x), CPU) == count


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(12, 12, bias=i % 2 == 0) for i in range(6)))


def reads_of_steps(model, x, optimizer, count, after):
    """What the host reads in each of `count` steps after so many."""

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(after):
        step()
    return [step_time.host_syncs(step, CPU) for _ in range(count)]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("method", ["inverse", "eigen"])
def test_a_steady_step_of_kfac_reads_what_it_must(monkeypatch, method, every, thin):
    monkeypatch.setattr("suite.torch.thin.SMALLEST", 0)
    model, x = network(), torch.randn(2 if thin else 64, 12)
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    kfac = KFAC(
        model, base, compute_method=method, factor_update_steps=every, inv_update_steps=20, damping=0.1
    )

    # Whether all is finite; and, on a CPU alone, whether directions that came from rows fit.
    assert reads_of_steps(model, x, kfac, 4, after=6) == [1 + thin] * 4


@pytest.mark.parametrize(
    ("method", "every"),
    [*itertools.product(["inverse", "eigen", "newton_schulz"], [1, 4]), ("ekfac", 1), ("ekfac", 3)],
)
def test_kfac_before_a_fused_optimizer_reads_only_where_inverses_are_new(monkeypatch, method, every):
    for module in ("skipped", "thin"):
        monkeypatch.setattr(f"suite.torch.{module}.HOST_DEVICES", ())
    monkeypatch.setattr("suite.core._torch_known.is_at_hand", lambda x: False)
    model, x = nn.Sequential(network(), nn.LayerNorm(12), nn.Linear(12, 5)), torch.randn(8, 12)
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    kfac = KFAC(model, base, compute_method=method, factor_update_steps=every, inv_update_steps=4)

    reads = reads_of_steps(model, x, kfac, 8, after=5)
    assert [n for step, n in enumerate(reads) if step not in (3, 7)] == [0] * 6
    if method == "newton_schulz":  # on a CPU the others look at each factorization as it is done
        # Whether all is finite, and which factorizations failed, of all the stacks at once.
        assert (reads[3], reads[7]) == (2, 2)


@pytest.mark.parametrize("looks", [True, False])
def test_a_step_of_kron_reads_a_few_numbers_or_on_an_accelerator_none(monkeypatch, looks):
    if not looks:
        monkeypatch.setattr("suite.torch.kron.HOST_DEVICES", ())
        monkeypatch.setattr("suite.core._torch_known.is_at_hand", lambda x: False)
    model, x = network(), torch.randn(8, 12)
    kron = Kron(model.parameters(), lr=0.01, preconditioner_update_probability=0.5)

    # Whether all is finite; and of the weights, and of the biases, whether their squares stay in range.
    assert reads_of_steps(model, x, kron, 4, after=3) == [3 * looks] * 4


def test_blocks_to_compile_are_those_of_one_class():
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(3, 2), nn.Sequential(*blocks), nn.Sequential(nn.Linear(2, 2)))
    assert step_time.blocks_of(model) == blocks


def test_a_model_of_torch_s_own_classes_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model, x = network(), torch.randn(8, 12)
    workload = workloads.Workload(model, lambda: model(x).square().mean(), [], [], 8)
    expected = workload.loss()
    torch._dynamo.utils.counters.clear()
    assert step_time.compiled(workload, None).loss() == expected
    assert not torch._dynamo.utils.counters["frames"]
    torch.testing.assert_close(step_time.compiled(workload, "model").loss(), expected)
    assert torch._dynamo.utils.counters["frames"]["ok"] == 1


def test_the_least_capture_sums_what_a_layer_sees():
    layer, x = nn.Linear(3, 2, bias=False), torch.randn(8, 3)
    A, G = capture_floor.running_sums(layer)
    for _ in range(2):
        y = layer(x)
        y.square().sum().backward()
    torch.testing.assert_close(A, 1.95 * x.T @ x)
    torch.testing.assert_close(G, 1.95 * 4 * y.detach().T @ y.detach())


def test_the_floor_of_capture_is_reported(capsys):
    capture_floor.main(["--workloads", "W4", "--rounds", "1"])
    found = json.loads(capsys.readouterr().out)
    assert found["W4"].keys() == {"plain", "K-FAC", "least"}
