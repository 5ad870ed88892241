"""The training scripts run, learn, survive being killed, and say what is wrong with their options."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kron_races
import resnets
import train_distributed
import train_language_model
import train_pinn
import training
import vision

EXAMPLES = Path(training.__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
ENVIRONMENT.pop("XLA_FLAGS", None)  # programs as users compile them
SMALL = {
    "train_cifar10": "--fake-data --fake-images 512 128 --size 16 --batch-size 32 --width 4",
    "train_imagenet": (
        "--fake-data --fake-images 512 64 --fake-classes 4 --size 32 --batch-size 32 --width 4"
    ),
    "train_language_model": (
        "--fake-data --fake-length 20000 --context 32 --width 32 --depth 2 --sample 50"
    ),
    "train_pinn": "--steps-per-epoch 40 --batch-size 64 --width 16",
}
KFAC = "--optimizer kfac --inv-update-steps 5"
# Something else in each: every optimizer, gradient accumulation, mixed precision, frequent checkpoints.
RESUMED = {
    "train_cifar10": f"{KFAC} --accumulate 3 --checkpoint-every 2 --fisher mc",
    "train_imagenet": "--optimizer kron --workers 1",
    "train_language_model": f"{KFAC} --amp bf16 --checkpoint-every 5",
    "train_pinn": "--optimizer adamw",
}


# Far longer than any of them takes. What hangs must not hang the tests.
HUNG = 600.0


def command(script: str, options: str, *paths: Any) -> list[str]:
    script_and_options = f"{EXAMPLES / script}.py {SMALL[script]} {options}"
    return [sys.executable, *script_and_options.split(), *map(str, paths)]


def run(script: str, options: str, output: Path, *paths: Any) -> list[dict[str, float]]:
    """The log of a run that ends well."""
    ran = subprocess.run(
        command(script, options, "--output", output, *paths),
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=HUNG,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    epochs: list[dict[str, float]] = json.loads(output.read_text())["epochs"]
    return epochs


def without_times(log: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in epoch.items() if key != "seconds"} for epoch in log]


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALL)
def test_a_script_learns_with_kfac(script, tmp_path):
    log = run(script, f"{KFAC} --epochs 4", tmp_path / "new" / "log.json")
    assert [epoch["epoch"] for epoch in log] == [1, 2, 3, 4]
    assert log[-1]["train_loss"] < 0.9 * log[0]["train_loss"]
    assert all(epoch["skipped_steps"] == 0 for epoch in log)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "kron"])
def test_a_script_learns_with_other_optimizers_in_half_precision(optimizer, tmp_path):
    options = f"--optimizer {optimizer} --amp fp16 --epochs 4"
    log = run("train_cifar10", options, tmp_path / "log.json")
    assert log[-1]["train_loss"] < 0.9 * log[0]["train_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"), [*RESUMED.items(), ("train_pinn", "--optimizer adaptive --same-points")]
)
def test_a_killed_and_resumed_run_is_the_uninterrupted_run(script, options, tmp_path):
    options += " --epochs 3"
    uninterrupted = run(script, options, tmp_path / "uninterrupted.json")

    output, checkpoint = tmp_path / "log.json", tmp_path / "run.pt"
    paths = "--output", output, "--checkpoint", checkpoint
    process = subprocess.Popen(
        command(script, options, *paths), env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() != 0  # killed before it was done
    assert not output.exists() or len(json.loads(output.read_text())["epochs"]) < 3
    resumed = run(script, options, output, *paths[2:], "--resume")

    assert len(resumed) == 3
    for a, b in zip(without_times(uninterrupted), without_times(resumed), strict=True):
        assert b == pytest.approx(a, rel=1e-6)


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_resume_and_another_run_cannot(tmp_path, capsys, monkeypatch):
    checkpoint = tmp_path / "run.pt"

    def pinn(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [*command("train_pinn", "--epochs 1")[1:], *arguments])
        train_pinn.main()

    pinn("--checkpoint", str(checkpoint))
    first = checkpoint.read_bytes()
    pinn("--checkpoint", str(checkpoint), "--resume")
    assert "resuming in epoch 2" in capsys.readouterr().out
    assert checkpoint.read_bytes() == first
    with pytest.raises(SystemExit, match="seed must be 0, as in the checkpoint, got 1"):
        pinn("--checkpoint", str(checkpoint), "--resume", "--seed", "1")


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optimizer adamw --damping 0.1", "--damping is not a setting of adamw"),
        ("--warmup 1", "--warmup must be >= 0 and < 1, got 1.0"),
        ("--epochs 0", "must be >= 1, got 0"),
        ("--seed -1", "must be >= 0, got -1"),
        ("--resume", "--resume needs --checkpoint"),
        ("--checkpoint .", "--checkpoint must be a file, got the folder ."),
        ("--output .", "--output must be a file, got the folder ."),
    ],
)
def test_wrong_options_say_what_is_right(arguments, message, capsys):
    with pytest.raises(SystemExit):
        training.parse(
            vision.parser("", epochs=1, batch_size=1, size=8), ["--fake-data", *arguments.split()]
        )
    assert message in capsys.readouterr().err


def test_settings_are_the_optimizers_own_and_options_change_them():
    parser = vision.parser("", epochs=1, batch_size=1, size=8)
    options = training.parse(parser, ["--fake-data", "--optimizer", "sgd", "--lr", "0.5"])
    assert options.settings == {**vision.SETTINGS["sgd"], "lr": 0.5}


def test_data_that_are_not_there_are_named(tmp_path):
    with pytest.raises(SystemExit, match="--data must be the folder cifar-10-batches-py"):
        vision.cifar10(tmp_path)
    with pytest.raises(SystemExit, match="one folder per class"):
        vision.image_folders(tmp_path, 8)


@pytest.mark.parametrize("empty", ["train", "val"])
def test_folders_without_images_are_named(empty, tmp_path):
    pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        (tmp_path / part / "red").mkdir(parents=True)
        if part != empty:
            (tmp_path / part / "red" / "image.png").touch()
    with pytest.raises(SystemExit, match=f"--data must have images in the classes of .*{empty}"):
        vision.image_folders(tmp_path, 8)


def test_a_text_that_is_empty_is_named(tmp_path, capsys, monkeypatch):
    text = tmp_path / "text"
    text.touch()
    monkeypatch.setattr(sys, "argv", ["train_language_model.py", "--text", str(text)])
    with pytest.raises(SystemExit):
        train_language_model.main()
    assert f"--text must be a file that is not empty, got {text}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-size 3", "--batch-size must be a multiple of the number of processes, 2, got 3"),
        ("--batch-size 0", "argument --batch-size: must be >= 1, got 0"),
        ("--checkpoint-every 0", "argument --checkpoint-every: must be >= 1, got 0"),
        ("--width 6", "--width must be a multiple of 4, got 6"),
    ],
)
def test_wrong_options_of_the_distributed_example_say_what_is_right(
    arguments, message, capsys, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train_distributed.py", *arguments.split()])
    with pytest.raises(SystemExit):
        train_distributed.main()
    assert message in capsys.readouterr().err


def test_a_strategy_is_a_name_or_any_fraction():
    assert [train_distributed.strategy(text) for text in ("MEM_OPT", ".5", "1")] == ["MEM_OPT", 0.5, 1.0]


# ---- data ----------------------------------------------------------------------------------------


def test_cifar_files_are_read_as_they_are_laid_out(tmp_path):
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        pixels = random.integers(0, 256, (4, 3072), dtype=np.uint8)
        with open(tmp_path / name, "wb") as file:
            pickle.dump({b"data": pixels, b"labels": [0, 1, 2, 3]}, file)
    train, test = vision.cifar10(tmp_path)
    assert len(train.labels) == 20
    # channel after channel, row after row
    expected = pixels[2, 1024 + 5 * 32 + 7] / 255
    assert float(test.fetch(torch.tensor([2]), None)[0, 1, 5, 7]) == pytest.approx(expected)


def test_images_in_folders_have_their_folders_class(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part, name, color in (
        ("train", "blue", (0, 0, 255)),
        ("train", "red", (255, 0, 0)),
        ("val", "red", (255, 0, 0)),
    ):
        (tmp_path / part / name).mkdir(parents=True)
        image.new("RGB", (40, 30), color).save(tmp_path / part / name / "image.png")
    train, test = vision.image_folders(tmp_path, 16)
    assert train.labels.tolist() == [0, 1]
    assert test.labels.tolist() == [1]
    for images, index in ((train, 1), (test, 0)):
        for random in (None, training.generator(0)):
            pixels = images.fetch(torch.tensor([index]), random)
            assert pixels.shape == (1, 3, 16, 16)
            torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor([1.0, 0.0, 0.0]))


def test_augmented_images_are_shifted_and_perhaps_mirrored():
    pixels = torch.arange(1, 65, dtype=torch.uint8).reshape(1, 1, 8, 8).expand(1, 3, 8, 8)
    images = vision.ImagesInMemory(pixels, torch.zeros(1))
    (original,) = images.fetch(torch.tensor([0]), None)
    padded = torch.nn.functional.pad(original, (1, 1, 1, 1))
    possible = [
        padded[:, top : top + 8, left : left + 8].flip(flipped)
        for top in range(3)
        for left in range(3)
        for flipped in ((), (2,))
    ]
    random, seen = training.generator(0), set()
    for _ in range(200):
        (augmented,) = images.fetch(torch.tensor([0]), random)
        seen |= {i for i, image in enumerate(possible) if torch.equal(image, augmented)}
    assert seen == set(range(18))


@pytest.mark.parametrize("shape", [(30, 40), (400, 3), (1, 1)])
def test_random_crops_lie_within_the_image(shape):
    random = training.generator(0)
    for _ in range(200):
        top, left, height, width = vision.random_crop(*shape, random)
        assert height > 0 <= top <= shape[0] - height
        assert width > 0 <= left <= shape[1] - width


def test_an_epochs_batches_depend_on_seed_epoch_and_number_only():
    images, _ = vision.fake_images((20, 1), 8, 2, seed=0)
    epochs = [vision.Batches(images, 4, key) for key in ((0, 0), (0, 0), (0, 1), (1, 0))]
    firsts = [[epoch[number][0] for number in numbers] for epoch, numbers in zip(
        epochs, ((0, 3), (3, 3), (0, 3), (0, 3)), strict=True
    )]  # fmt: skip
    assert torch.equal(firsts[0][1], firsts[1][0])
    assert not torch.equal(firsts[0][1], firsts[2][1])
    assert not torch.equal(firsts[0][1], firsts[3][1])
    assert len(vision.Batches(images, 8, (0, 0))) == 2
    assert len(vision.Batches(images, 8)) == 3


def test_the_residual_networks_are_the_papers():
    def count(model: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    with torch.device("meta"):
        assert count(resnets.resnet50()) == 25_557_032
        assert round(count(resnets.cifar_resnet(20)), -4) == 270_000
        assert round(count(resnets.cifar_resnet(32)), -4) == 470_000


def test_derivatives_carried_forward_are_autograds():
    torch.manual_seed(0)
    network = train_pinn.Network(width=8, depth=3)
    points = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    rows = network(points)
    (gradient,) = torch.autograd.grad(rows[:, 0].sum(), points, create_graph=True)
    laplacian = sum(
        torch.autograd.grad(gradient[:, i].sum(), points, retain_graph=True)[0][:, i] for i in (0, 1)
    )
    torch.testing.assert_close(rows[:, 1:3], gradient)
    torch.testing.assert_close(rows[:, 3], laplacian)


@pytest.mark.slow
def test_races_of_kron_in_a_few_steps(tmp_path, capsys):
    few = ["--steps", "2", "--seeds", "1"]
    assert kron_races.main([*few, "--output", str(tmp_path / "races")]) == 0
    results = json.loads((tmp_path / "races" / "races.json").read_text())["results"]
    assert results.keys() == kron_races.PROBLEMS.keys()
    for problem, contenders in results.items():
        newton = {"Kron Newton"} if problem in ("rosenbrock", "logistic") else set()
        assert contenders.keys() == {"AdamW", "Kron"} | newton
        assert all(np.isfinite(found["losses"]).all() for found in contenders.values())
    assert (tmp_path / "races" / "races.png").read_bytes().startswith(b"\x89PNG")
    for problem, contenders in results.items():  # equal grids
        rates = [f"{rate}" for rate in kron_races.grid(problem)]
        assert len(rates) == 7
        assert all(list(found["tuning"]) == rates for found in contenders.values())
    with pytest.raises(SystemExit):
        kron_races.main(["--problems", "xorr"])
    assert "'xorr' is not one of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["autoencoder", "cnn", "gpt", "pinn", "vmc"])
def test_the_jax_examples_run_and_draw(name, tmp_path):
    plot = tmp_path / "plot.png"
    script = [sys.executable, str(EXAMPLES / f"jax_{name}.py"), "--tiny", "--plot", str(plot)]
    ran = subprocess.run(
        script, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=HUNG
    )
    assert ran.returncode == 0, ran.stderr
    assert plot.stat().st_size > 1000
    assert "missed" not in ran.stderr + ran.stdout
    assert "skipped" not in ran.stderr + ran.stdout
    first, last = (
        float(n) for n in ran.stdout.splitlines()[-1].split("(")[0].split(",")[0].split()[1::2][:2]
    )
    assert last < first


@pytest.mark.slow
def test_the_distributed_example_trains_and_resumes_on_another_number_of_processes(tmp_path):
    def run(processes: int, *options: str) -> float:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [str(EXAMPLES / "train_distributed.py"), "--batch-size", "24", "--width", "4"]
        command = [*torchrun, "--nproc-per-node", str(processes), *script, *options]
        ran = subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=HUNG
        )
        assert ran.returncode == 0, ran.stderr
        return float(ran.stdout.split("loss ")[-1].split()[0])

    folder = str(tmp_path / "run")
    whole = run(1, "--steps", "12")
    saving = ("--checkpoint", folder, "--checkpoint-every", "6")
    run(2, "--steps", "6", "--strategy", "MEM_OPT", "--wrap", "fsdp", *saving)
    resumed = run(3, "--steps", "12", "--strategy", "MEM_OPT", *saving)
    assert resumed == pytest.approx(whole, rel=1e-3)


def test_the_distributed_example_lets_go_of_its_model_before_its_process_group():
    """The other way round gloo can deadlock, once in some hundred runs."""
    program = """
import gc, sys
import torch.distributed as dist
import train_distributed

gc.disable()  # only what needs no collector is sure to be gone
destroy, alive = dist.destroy_process_group, []

def destroy_process_group():
    alive.extend(type(x).__name__ for x in gc.get_objects())
    destroy()

dist.destroy_process_group = destroy_process_group
sys.argv[1:] = ["--batch-size", "8", "--width", "4", "--steps", "2"]
train_distributed.main()
assert alive and not {"DistributedDataParallel", "Reducer", "KFAC"} & set(alive)
"""
    environment = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=EXAMPLES,
        env=environment, capture_output=True, text=True, check=False, timeout=HUNG,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
