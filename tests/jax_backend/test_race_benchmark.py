"""The benchmark race in JAX: every contender takes steps, peers may be absent, the command runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import race
import race_jax
import race_problems
import table
from race_problems import PROBLEMS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A smaller autoencoder, and precision as it was."""
    images = np.random.default_rng(0).random((40, 6)).astype(np.float32)
    given = race_problems.Autoencoder((6, 4, 2), 8, images)
    monkeypatch.setattr(race_problems, "digits", lambda: given)
    monkeypatch.setitem(
        race_jax.STARTS, "digits", lambda seed: race_jax.autoencoder(seed, race_problems.digits)
    )
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


def test_every_grid_has_the_same_size_and_starts_at_its_centre():
    for name in race_jax.STARTS:
        problem = PROBLEMS[name]
        field = race_jax.contenders(name, problem, variants=True) | race_jax.peers(name, problem)
        assert field.pop("K-FAC, adaptive").points() == [{"damping": 0.1}]
        for contender in field.values():
            assert [len(values) for values in contender.grid.values()] == [5, 3]
            assert contender.points()[0] == {k: v[len(v) // 2] for k, v in contender.grid.items()}


@pytest.mark.parametrize(
    "name",
    [
        "AdamW",
        "optax.contrib.muon",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("Kron", "K-FAC, every 5")),
    ],
)
def test_hyperparameters_are_arguments_and_the_loss_falls(name):
    digits = ("digits", PROBLEMS["digits"])
    contender = (race_jax.contenders(*digits) | race_jax.peers(*digits))[name]
    lost = []
    for number, point in enumerate((contender.points()[0], contender.points()[-1])):
        training = contender.begin(0, **point)
        assert (training.compile_seconds > 0) == (number == 0)  # nothing compiles for another point
        losses = [training.evaluate()]
        for _ in range(4):
            training.take(training.draw(3))
            losses.append(training.evaluate())
        assert np.isfinite(losses).all()
        lost.append(losses)
    assert lost[0][0] == lost[1][0]
    assert lost[0][-1] < lost[0][0]
    assert lost[0][-1] != lost[1][-1]


@pytest.mark.slow
def test_statistics_in_every_fifth_step_are_taken_when_they_are_due(monkeypatch):
    captures = []
    call = race_jax.value_and_grad.__call__

    def spied(self, *args, capture=True, **kwargs):
        captures.append(capture)
        return call(self, *args, capture=capture, **kwargs)

    monkeypatch.setattr(race_jax.value_and_grad, "__call__", spied)
    start = race_jax.STARTS["digits"](0)
    settings = {"compute_method": "inverse", "inv_update_steps": 5, "factor_update_steps": 5}
    init, step = race_jax.captured(settings, start)
    params, state = start.params, init(start.params, damping=0.01)
    for _ in range(7):
        params, state = step(params, state, start.draw(), {"damping": 0.01})
    assert isinstance(captures[0], jax.core.Tracer)  # decided in the step, not once for all
    assert int(state.preconditioner.missed_updates) == 0
    assert int(state.preconditioner.steps) == 7


def test_the_poisson_networks_derivatives_are_those_of_its_values():
    jax.config.update("jax_enable_x64", True)
    start = race_jax.poisson(3)
    points = start.draw()[0][:5]
    network = jax.jit(race_jax._with_derivatives)
    found, h = network(start.params, points), 1e-4
    steps = h * np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
    for x, row in zip(points, found, strict=True):
        u, right, left, up, down = network(start.params, x + steps)[:, 0]
        gradient = [(right - left) / (2 * h), (up - down) / (2 * h)]
        laplacian = (right + left + up + down - 4 * u) / h**2
        assert row == pytest.approx(np.array([u, *gradient, laplacian]), rel=1e-5, abs=1e-6)


def test_the_command_writes_what_tables_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed_kron", SimpleNamespace(kron=optax.sgd))
    for absent in ("kfac_jax", "optax.contrib"):
        monkeypatch.setitem(sys.modules, absent, None)  # importing it fails
    monkeypatch.setitem(race.PROBLEMS, "digits", PROBLEMS["digits"]._replace(target=0.1))
    file, picture = tmp_path / "race.json", tmp_path / "race.png"
    arguments = ["--framework", "jax", "--problems", "digits", "--contenders", "SGD"]
    arguments += ["distributed_kron", "kfac-jax", "optax.contrib.muon", "--peers"]
    arguments += ["--seeds", "2", "--tuning-seeds", "1"]
    arguments += ["--budget", "20", "--json", str(file), "--plot", str(picture)]
    race.main(arguments)
    report = json.loads(file.read_text())["workloads"]["digits"]
    assert list(report["contenders"]) == ["SGD", "AdamW"]
    assert report["failed"].keys() == {"optax.contrib.muon", "distributed_kron", "kfac-jax"}
    assert "unexpected keyword argument 'b1'" in report["failed"]["distributed_kron"]  # sgd has none
    assert report["failed"]["kfac-jax"].startswith("ModuleNotFoundError('import of kfac_jax")
    assert "import of optax.contrib" in report["failed"]["optax.contrib.muon"]
    assert report["versions"]["jax"] == jax.__version__
    for one in report["contenders"].values():
        assert one["compile_seconds"] > 0
    printed = capsys.readouterr().out
    assert printed == table.race_table("digits", report) + "\n"
    assert "| compilation, wall-clock seconds | tuned |" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_problem_that_jax_does_not_have_is_refused(capsys):
    with pytest.raises(SystemExit):
        race.main(["--framework", "jax", "--problems", "characters"])
    assert "jax has no problem characters" in capsys.readouterr().err


def test_the_race_in_jax_loads_no_torch():
    program = "import sys, race, race_jax; assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(race.__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
