"""The demo runs, writes what it says, and tells users what is wrong with their options."""

from __future__ import annotations

import json
import sys

import pytest

import contenders
import demo


@pytest.mark.slow
def test_a_short_demo_of_everything(tmp_path, capsys):
    assert demo.main(["--steps", "3", "--seed", "4", "--output", str(tmp_path / "new" / "folder")]) == 0
    output = tmp_path / "new" / "folder"
    record = json.loads((output / "demo.json").read_text())
    runs = record["runs"]
    assert {(r["problem"], r["optimizer"], r["framework"]) for r in runs} == {
        (p, o, f)
        for p in ("autoencoder", "convnet")
        for o in ("adamw", "kfac", "kron")
        for f in ("torch", "jax")
    }
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for column in ("final loss", "accuracy", "steps to AdamW", "s to AdamW", "ms/step", "memory KiB"):
        assert column in printed
    for run in runs:
        assert run["steps"][-1] == 3
        assert run["optimizer_bytes"] > 0
        assert run["skipped_steps"] == 0
    # both frameworks start from the same weights and see the same minibatches
    for a, b in zip(runs[::2], runs[1::2], strict=True):
        assert (a["framework"], b["framework"]) == ("torch", "jax")
        assert a["losses"] == pytest.approx(b["losses"], rel=2e-3)


def test_a_subset_without_adamw_has_nothing_to_compare_with(tmp_path):
    arguments = [
        "--steps",
        "2",
        "--optimizers",
        "kron",
        "--frameworks",
        "torch",
        "--problems",
        "convnet",
    ]
    demo.main([*arguments, "--output", str(tmp_path)])
    (run,) = json.loads((tmp_path / "demo.json").read_text())["runs"]
    assert run["steps_to_adamw"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizers", "adam"], "unknown: adam; choose from adamw, kfac, kron"),
        (["--optimizers", ","], "nothing given"),
        (["--steps", "0"], "must be a whole number >= 1"),
        (["--seed", "x"], "must be a whole number >= 0"),
    ],
)
def test_wrong_options_say_what_is_right(arguments, message, capsys):
    with pytest.raises(SystemExit):
        demo.main(arguments)
    assert message in capsys.readouterr().err


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--help"])
    text = capsys.readouterr().out
    assert all(o in text for o in ("--optimizers", "--steps", "--seed", "--output", "--problems"))


def test_contenders_are_tuned_on_equal_grids_with_their_optimum_inside():
    with open(f"{sys.modules['contenders'].__file__.removesuffix('contenders.py')}tuning.json") as file:
        tuning = json.load(file)
    assert len({len(contenders.grid(optimizer)) for optimizer in contenders.GRIDS}) == 1
    assert tuple(tuning["seeds"]) == contenders.TUNING_SEEDS
    assert tuning["fixed"] == contenders.FIXED
    for problem, of_problem in tuning["results"].items():
        for optimizer, rows in of_problem.items():
            assert len(rows) == len(contenders.grid(optimizer))
            best = min((r for r in rows if r["mean"] is not None), key=lambda row: row["mean"])
            for name, values in contenders.GRIDS[optimizer].items():
                assert contenders.CHOSEN[problem][optimizer][name] == best[name]
                assert best[name] not in (values[0], values[-1])
