"""The benchmark race: tuning finds the best of a grid, results are honest, the command runs."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import annealed
import compare
import race
import race_problems
import race_torch
import table
from race_grids import Contender, Training
from race_problems import PROBLEMS, Problem

pytestmark = pytest.mark.usefixtures("settings_of_torch")
SQUARE = Problem("x² / 2", target=1e-6, budget=40, every=1)


def descent(*rates: float) -> Contender:
    """x² / 2 from x = 1: gradient descent with rate r multiplies x by 1 - r."""

    def begin(seed: int, lr: float, times: float) -> Training:
        x = [1.0]

        def take(minibatches: range) -> None:
            x[0] *= (1 - lr * times) ** len(minibatches)

        return Training(range, take, lambda: x[0] * x[0] / 2)

    return Contender(begin, {"lr": rates, "times": (0.5, 1.0, 2.0)})


def half_square(seed: int) -> race_torch.Start:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        return model.weight.square().sum() / 2, model.weight

    return race_torch.Start(model, lambda: loss, lambda: loss()[0])


@pytest.mark.parametrize(
    ("rates", "best", "edges"),
    [
        ((0.1, 0.2, 0.5, 0.7, 0.9), {"lr": 0.5, "times": 2.0}, ["times"]),
        ((0.1, 0.2, 0.99), {"lr": 0.99, "times": 1.0}, ["lr"]),
    ],
)
def test_tuning_finds_the_point_with_the_fewest_steps(rates, best, edges):
    point, record, _ = race.tune(SQUARE, descent(*rates), seeds=2)
    assert point == best
    assert descent(*rates).edges(point) == edges
    rate = best["lr"] * best["times"]
    needed = 1 if rate == 1 else math.ceil(math.log(math.sqrt(2e-6)) / math.log(1 - rate))
    assert {**best, "steps": [needed, needed]} in record
    assert len(record) == 3 * len(rates)


def test_a_point_that_is_behind_at_first_may_be_the_best():
    """One halves its loss in every step, one waits for a while and is there."""

    def begin(seed: int, waits: float) -> Training:
        steps = [0]

        def take(minibatches: range) -> None:
            steps[0] += len(minibatches)

        def loss() -> float:
            return 2.0 ** -steps[0] if not waits else float(steps[0] < waits)

        return Training(range, take, loss)

    point, record, _ = race.tune(SQUARE, Contender(begin, {"waits": (15.0, 0.0, 30.0)}), seeds=1)
    assert point == {"waits": 15.0}
    assert {one["waits"]: one["steps"] for one in record} == {0.0: [20], 15.0: [15], 30.0: [None]}


def test_what_does_not_arrive_is_said_to_be_so():
    late = descent(1e-4, 1e-3, 5.0)
    report = race.race(SQUARE, {"AdamW": descent(0.5, 1.0, 1.5), "late": late}, 1, 3)
    found = report["contenders"]["late"]
    assert (found["lr"], found["times"]) == (1e-3, 2.0)  # the lowest loss of those that do not arrive
    assert (found["steps"], found["seconds"], found["reached"]) == (None, None, 0)
    assert found["steps_of_seeds"] == [None] * 3
    assert report["contenders"]["AdamW"]["steps_of_seeds"] == [1] * 3
    assert "| late | not reached (0 of 3) |" in table.race_table("square", report)
    two = {"square": report, "other": {"contenders": {"AdamW": report["contenders"]["AdamW"]}}}
    assert table.race_summary(two).splitlines() == [
        "| | square | other |",
        "|---|---|---|",
        "| AdamW | 1.00 / 1.00 | 1.00 / 1.00 |",
        "| late | not reached |  |",
    ]


def test_what_diverges_leaves_no_number_that_json_does_not_have():
    report = race.race(SQUARE, {"AdamW": descent(2e200, 2e200, 2e200)}, 1, 2)
    json.dumps(report, allow_nan=False)
    assert report["losses"]["AdamW"] == [0.5, None]
    assert report["contenders"]["AdamW"]["last_losses"] == [None, None]


def test_a_peer_that_fails_is_reported_with_its_exception_and_the_others_go_on():
    def fails_after(steps: int) -> Contender:
        taken = [0]

        def begin(seed: int, **point: float) -> Training:
            def take(minibatches: range) -> None:
                taken[0] += len(minibatches)
                if taken[0] > steps:
                    raise FloatingPointError(f"step {taken[0]}")

            return Training(range, take, lambda: 1.0, compile_seconds=3.0)

        return Contender(begin, {"lr": (1.0,)})

    field = {"AdamW": descent(0.5, 1.0, 1.5), "at once": fails_after(0), "late": fails_after(45)}
    report = race.race(SQUARE, field, 1, 2, may_fail=frozenset(field) - {"AdamW"})
    assert list(report["contenders"]) == list(report["losses"]) == list(report["grids"]) == ["AdamW"]
    assert report["contenders"]["AdamW"]["steps_of_seeds"] == [1, 1]
    assert report["failed"] == {
        "at once": "FloatingPointError('step 1')",
        "late": "FloatingPointError('step 46')",
    }
    with pytest.raises(FloatingPointError, match="step 1"):  # not of a peer
        race.race(SQUARE, {"ours": fails_after(0)}, 1, 1)


def test_what_compiles_does_so_in_a_throwaway_before_the_clock():
    seen = []

    def make(model: torch.nn.Module, **tuned: float) -> torch.optim.Optimizer:
        seen.append(model)
        return torch.optim.SGD(model.parameters(), **tuned)

    begun = race_torch.begin(half_square, make, 3, seed=0, lr=0.5)
    assert [model.weight.item() for model in seen] == [0.125, 1.0]
    assert begun.compile_seconds > 0
    assert begun.evaluate() == 0.5
    begun.take(begun.draw(2))
    assert begun.evaluate() == 0.5 * 0.25**2
    assert race_torch.begin(half_square, make, 0, seed=0, lr=0.5).compile_seconds == 0


def test_heavyball_gets_what_is_tuned(monkeypatch):
    made = []

    def optimizer(parameters, lr, **settings):
        made.append(settings)
        return torch.optim.SGD(parameters, lr)

    names = ("PSGDKron", "SOAP", "Muon")
    monkeypatch.setitem(sys.modules, "heavyball", SimpleNamespace(**dict.fromkeys(names, optimizer)))
    monkeypatch.setitem(race_torch.STARTS, "digits", half_square)
    peers = race_torch.peers("digits", PROBLEMS["digits"])
    for name in names:
        contender = peers[f"heavyball {name}"]
        begun = contender.begin(0, **contender.points()[0])
        begun.take(begun.draw(1))
    assert made[::2] == made[1::2]  # a throwaway, and the run
    assert made[::2] == [
        {"beta": 0.9},
        {"betas": (0.9, 0.99), "weight_decay": 0.0},
        {"betas": (0.9, 0.99)},
    ]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_torchs_muon_moves_matrices_and_adamw_the_rest():
    """A first step: AdamW's is lr in every entry, Muon's has singular values near 0.2 lr √max(sides)."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 8),
        torch.nn.Linear(8, 4),
        torch.nn.Unflatten(1, (1, 4)),
        torch.nn.Conv1d(1, 2, 3),
    )
    before = [p.detach().clone() for p in model.parameters()]
    muon = race_torch.torch_muon(model, lr=0.1, momentum=0.9)
    model(torch.arange(5)).square().sum().backward()
    muon.step()
    table, matrix, *rest = (p.detach() - b for p, b in zip(model.parameters(), before, strict=True))
    for moved in (table, *rest):
        assert moved.abs() == pytest.approx(torch.full_like(moved, 0.1).numpy(), rel=1e-3)
    singular = torch.linalg.svdvals(matrix) / (0.2 * 0.1 * math.sqrt(8))
    assert singular.numpy() == pytest.approx(np.ones(4), abs=0.5)
    muon.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    race_torch.torch_muon(torch.nn.Linear(3, 2, bias=False), lr=0.1, momentum=0.9)  # no rest


def test_every_grid_has_the_same_size_and_starts_at_its_centre():
    assert race_torch.STARTS.keys() == PROBLEMS.keys()
    for name, problem in PROBLEMS.items():
        field = race_torch.contenders(name, problem, variants=True) | race_torch.peers(name, problem)
        assert field.pop("K-FAC, adaptive").points() == [{"damping": 0.1}]
        for contender in field.values():
            assert [len(values) for values in contender.grid.values()] == [5, 3]
            assert all(list(values) == sorted(set(values)) for values in contender.grid.values())
            points = contender.points()
            assert len({tuple(point.values()) for point in points}) == 15
            assert points[0] == {k: v[len(v) // 2] for k, v in contender.grid.items()}


def test_curves_are_continuous_and_xor_is_that_of_the_marked_bits():
    images = race_problems.drawn_curves(count=20).reshape(20, 28, 28)
    assert images.min() >= 0
    assert images.max() <= 1
    assert (images.max((1, 2)) > 0.7).all()
    x, odd = race_problems.xor_sequences(np.random.default_rng(0), 50)
    bits, marks = x[..., 0], x[..., 1]
    assert (marks.sum(0) == 2).all()
    assert (marks[:2].sum(0) >= 1).all()
    assert (odd == ((bits * marks).sum(0) == 0)).all()  # ±1 and ∓1
    start = race_torch.delayed_xor(0)
    losses = []
    for logit in (50.0, -50.0):  # the answer of a model that is always sure of the same
        torch.nn.init.constant_(start.model.write.bias, logit)
        torch.nn.init.zeros_(start.model.write.weight)
        losses.append(start.evaluate().item())
    fraction = race_problems.xor_fixed()[1].mean()
    assert losses == pytest.approx([50 * (1 - fraction), 50 * fraction], rel=1e-5)


def test_the_autoencoders_entropy_is_the_loss_of_the_images_themselves():
    images = np.array([[0.0, 1.0, 0.25], [0.5, 0.5, 0.9]], np.float32)
    given = race_problems.Autoencoder((3, 2, 1), 2, images)
    p = torch.tensor(images, dtype=torch.float64)
    exact = torch.nn.functional.binary_cross_entropy(p, p, reduction="sum").item() / 2
    assert given.entropy == pytest.approx(exact, rel=1e-9)
    first = given.first(np.random.default_rng(0))
    assert [w.shape for w, _ in first] == [(2, 3), (1, 2), (2, 1), (3, 2)]
    assert given.code == 1
    mean = images.astype(np.float64).mean(0)
    assert first[-1][1] == pytest.approx(np.log(mean / (1 - mean)), rel=1e-5)


def test_the_command_writes_what_tables_and_comparisons_read(tmp_path, monkeypatch, capsys):
    def absent():
        raise ImportError("no such package")

    monkeypatch.setattr(race_torch, "kron_torch_class", absent)
    monkeypatch.setitem(sys.modules, "heavyball", None)  # importing it fails
    monkeypatch.delattr(torch.optim, "Muon", raising=False)  # before torch 2.9
    monkeypatch.setitem(race.PROBLEMS, "square", SQUARE._replace(target=0.1))
    monkeypatch.setitem(race_torch.STARTS, "square", half_square)
    file, picture = tmp_path / "race.json", tmp_path / "race.png"
    file.write_text(json.dumps({"workloads": {"kept": {}}}))
    arguments = ["--problems", "square", "--contenders", "SGD", "Kron", "kron_torch"]
    arguments += ["heavyball SOAP", "torch.optim.Muon", "--peers"]
    arguments += ["--seeds", "2", "--tuning-seeds", "1", "--budget", "20", "--json", str(file)]
    race.main(arguments)
    record = json.loads(file.read_text())
    assert record["workloads"].pop("kept") == {}
    report = record["workloads"]["square"]
    assert list(report["contenders"]) == ["SGD", "AdamW", "Kron"]
    assert report["failed"]["kron_torch"] == "ImportError('no such package')"
    assert report["failed"].keys() == {"torch.optim.Muon", "kron_torch", "heavyball SOAP"}
    assert "has no attribute 'Muon'" in report["failed"]["torch.optim.Muon"]
    assert report["failed"]["heavyball SOAP"].startswith("ModuleNotFoundError('import of heavyball")
    assert report["budget"] == 20
    assert report["seeds"] == {"tuning": [0], "reported": [100, 101]}
    assert shlex.split(report["command"]) == ["race.py", *arguments]
    assert report["versions"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    for one in report["contenders"].values():
        assert one["reached"] in (0, 1, 2)
        assert one["milliseconds_per_step"] > 0
    printed = capsys.readouterr().out
    assert printed == table.race_table("square", report) + "\n"
    assert "| kron_torch | failed: ImportError('no such package') |" in printed
    compared = {path[1:] for path in compare.comparable(record["workloads"])}
    assert ("contenders", "SGD", "steps") in compared
    assert not any("tuning" in path or "losses" in path for path in compared)
    race.plot(record["workloads"], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--framework", "torch", "--contenders", "Krn"], "no contender Krn; there are SGD"),
        (["--problems", "digit"], "invalid choice: 'digit'"),
    ],
)
def test_unknown_names_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        race.main(arguments)
    assert message in capsys.readouterr().err


def test_annealed_runs_end_at_rate_zero_and_the_best_rate_counts(tmp_path):
    rates = []

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    problem = PROBLEMS["xor"]._replace(budget=8)
    annealed.final_loss("xor", problem, Recording, 0.5, seed=0)
    np.testing.assert_allclose(rates, 0.25 * (1 + np.cos(np.pi * np.arange(8) / 8)))

    path = tmp_path / "annealed.json"
    chosen = ["--problems", "xor", "--contenders", "AdamW", "Kron"]
    annealed.main([*chosen, "--seeds", "2", "--budget", "2", "--json", str(path)])
    report = json.loads(path.read_text())["problems"]["xor"]
    assert report["contenders"].keys() == {"AdamW", "Kron"}
    for name, one in report["contenders"].items():
        means = {lr: sum(losses) / 2 for lr, losses in report["losses"][name].items()}
        assert len(means) == 5
        assert one["loss"] == pytest.approx(min(means.values()))
        assert means[f"{one['lr']:g}"] == min(means.values())
