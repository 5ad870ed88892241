"""The benchmark race: tuning finds the best of a grid, results are honest, the command runs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import compare
import race
import table
from race_problems import PROBLEMS, Problem, Start, curves, delayed_xor


@pytest.fixture(autouse=True)
def denormals():
    yield
    torch.set_flush_denormal(False)


def half_square(seed: int) -> Start:
    """x² / 2 from x = 1: gradient descent with rate r multiplies x by 1 - r."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return Start(model, *[lambda: model.weight.square().sum() / 2] * 2)


SQUARE = Problem("x² / 2", half_square, target=1e-6, budget=40, every=1)


def descent(*rates: float) -> race.Contender:
    def make(model: torch.nn.Module, lr: float, times: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr * times)

    return race.Contender(make, {"lr": rates, "times": (0.5, 1.0, 2.0)})


@pytest.mark.parametrize(
    ("rates", "best", "edges"),
    [
        ((0.1, 0.2, 0.5, 0.7, 0.9), {"lr": 0.5, "times": 2.0}, ["times"]),
        ((0.1, 0.2, 0.99), {"lr": 0.99, "times": 1.0}, ["lr"]),
    ],
)
def test_tuning_finds_the_point_with_the_fewest_steps(rates, best, edges):
    point, record = race.tune(SQUARE, descent(*rates), seeds=2)
    assert point == best
    assert descent(*rates).edges(point) == edges
    rate = best["lr"] * best["times"]
    needed = 1 if rate == 1 else math.ceil(math.log(math.sqrt(2e-6)) / math.log(1 - rate))
    assert {**best, "steps": [needed, needed]} in record
    assert len(record) == 3 * len(rates)


def test_a_run_is_behind_when_it_is_more_than_twice_as_slow():
    lead, same, late = (
        race.Run(SQUARE, descent(), {"lr": rate, "times": 1.0}, seed=0) for rate in (0.5, 0.3, 0.1)
    )
    for _ in range(4):
        lead.turn()
    for turns in range(1, 5):
        same.turn()
        late.turn()
        assert not same.behind(lead)  # 0.7 > 0.5, 0.7² < 0.5
        assert late.behind(lead) == (turns > 1)  # 0.9² > 0.5


def test_what_does_not_arrive_is_said_to_be_so():
    late = descent(1e-4, 1e-3, 5.0)
    report = race.race(SQUARE, {"AdamW": descent(0.5, 1.0, 1.5), "late": late}, 1, 3)
    found = report["contenders"]["late"]
    assert (found["lr"], found["times"]) == (1e-3, 2.0)  # the lowest loss of those that do not arrive
    assert (found["steps"], found["seconds"], found["reached"]) == (None, None, 0)
    assert found["steps_of_seeds"] == [None] * 3
    assert report["contenders"]["AdamW"]["steps_of_seeds"] == [1] * 3
    assert "| late | not reached (0 of 3) |" in table.race_table("square", report)


def test_every_grid_has_the_same_size_and_starts_at_its_centre():
    for problem in PROBLEMS.values():
        for contender in [*race.contenders(problem).values(), *race.peers(problem).values()]:
            assert [len(values) for values in contender.grid.values()] == [5, 3]
            points = contender.points()
            assert len({tuple(point.values()) for point in points}) == 15
            assert points[0] == {k: v[len(v) // 2] for k, v in contender.grid.items()}


def test_curves_are_continuous_and_xor_is_that_of_the_marked_bits():
    images = curves(count=20).reshape(20, 28, 28)
    assert images.min() >= 0
    assert images.max() <= 1
    assert (images.amax((1, 2)) > 0.7).all()
    batches = []
    start = delayed_xor(0)
    start.model.register_forward_hook(lambda module, inputs, outputs: batches.append(inputs[0]))
    losses = []
    for logit in (50.0, -50.0):  # the answer of a model that is always sure of the same
        torch.nn.init.constant_(start.model.write.bias, logit)
        torch.nn.init.zeros_(start.model.write.weight)
        losses.append(start.evaluate().item())
    bits, marks = batches[0][..., 0], batches[0][..., 1]
    assert (marks.sum(0) == 2).all()
    odd = ((bits * marks).sum(0) == 0).float()  # ±1 and ∓1
    assert losses == pytest.approx([50 * (1 - odd.mean().item()), 50 * odd.mean().item()], rel=1e-5)


def test_the_command_writes_what_tables_and_comparisons_read(tmp_path, monkeypatch, capsys):
    def absent():
        raise ImportError("no such package")

    monkeypatch.setattr(race, "kron_torch_class", absent)
    monkeypatch.setitem(race.PROBLEMS, "square", SQUARE._replace(target=0.1))
    file, picture = tmp_path / "race.json", tmp_path / "race.png"
    file.write_text(json.dumps({"workloads": {"kept": {}}}))
    arguments = ["--problems", "square", "--contenders", "SGD", "Kron", "kron_torch", "--peers"]
    arguments += ["--seeds", "2", "--tuning-seeds", "1", "--budget", "20", "--json", str(file)]
    race.main(arguments)
    record = json.loads(file.read_text())
    assert record["workloads"].pop("kept") == {}
    report = record["workloads"]["square"]
    assert list(report["contenders"]) == ["SGD", "AdamW", "Kron"]
    assert report["failed"] == {"kron_torch": "ImportError('no such package')"}
    assert report["budget"] == 20
    assert report["seeds"] == {"tuning": [0], "reported": [100, 101]}
    assert report["command"] == " ".join(["race.py", *arguments])
    assert report["versions"]["torch"] == torch.__version__
    for one in report["contenders"].values():
        assert one["reached"] in (0, 1, 2)
        assert one["milliseconds_per_step"] > 0
    printed = capsys.readouterr().out
    assert printed == table.race_table("square", report) + "\n"
    assert "| kron_torch | failed: ImportError('no such package') |" in printed
    compared = {path[1:] for path in compare.comparable(record)}
    assert ("contenders", "SGD", "steps") in compared
    assert not any("tuning" in path or "losses" in path for path in compared)
    race.plot(record["workloads"], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
