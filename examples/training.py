"""A training run that can be interrupted: its options, optimizer, loop, checkpoints and log.

A run is a function of its options. The random numbers behind a batch come from (seed, epoch, number of
the batch), so a run resumed from a checkpoint takes the steps the uninterrupted one would have taken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from suite.torch import KFAC, AdaptiveKFAC, Kron

Settings: TypeAlias = dict[str, dict[str, float | str]]  # hyperparameters by optimizer
AMP = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CHOICES = {
    "compute_method": ("eigen", "inverse", "newton_schulz", "ekfac"),
    "fisher": ("empirical", "mc", "type-2"),
}
# What must be the same in the run that wrote a checkpoint and the one that resumes it.
IDENTITY = ("optimizer", "settings", "seed", "epochs", "batch_size", "accumulate", "amp")


# ---- the command line ----------------------------------------------------------------------------


def parser(
    description: str,
    settings: Settings,
    *,
    epochs: int,
    batch_size: int,
    likelihood: str | None = None,
) -> argparse.ArgumentParser:
    """The options that every script has.

    Args:
        description: of the script.
        settings: each optimizer's hyperparameters; every name becomes an option.
        epochs, batch_size: defaults.
        likelihood: what the model's outputs mean, for K-FAC with fisher=mc or type-2.
    """
    lines = ["hyperparameters, unless given as options:"]
    for name, values in settings.items():
        lines.append(f"  {name:6} " + ", ".join(f"{key}={value}" for key, value in values.items()))
    lines.append(
        "Learning rates rise for this share (warmup) of the steps, then fall along half a cosine."
    )
    result = argparse.ArgumentParser(
        description=description,
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = result.add_argument_group("run")
    run.add_argument("--epochs", type=whole, default=epochs, help="default: %(default)s")
    run.add_argument("--batch-size", type=whole, default=batch_size, help="default: %(default)s")
    run.add_argument(
        "--accumulate", type=whole, default=1, metavar="N", help="a step sums up N batches (default: 1)"
    )
    run.add_argument("--amp", choices=AMP, default="none", help="mixed precision (default: none)")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--seed", type=whole_or_zero, default=0, help="default: %(default)s")
    run.add_argument("--checkpoint", type=Path, metavar="PATH", help="written after every epoch")
    run.add_argument(
        "--checkpoint-every", type=whole, metavar="STEPS", help="and this often within epochs"
    )
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on from --checkpoint, if it exists, to the epoch it was started for",
    )
    run.add_argument("--output", type=Path, metavar="PATH", help="a log of all epochs, in JSON")
    group = result.add_argument_group("optimizer")
    group.add_argument("--optimizer", choices=settings, default="kfac", help="default: %(default)s")
    for name in dict.fromkeys(key for values in settings.values() for key in values):
        kind = type(next(values[name] for values in settings.values() if name in values))
        if name in CHOICES:
            used = ", ".join(optimizer for optimizer, values in settings.items() if name in values)
            group.add_argument(f"--{name.replace('_', '-')}", choices=CHOICES[name], help=f"of {used}")
            continue
        used = ", ".join(optimizer for optimizer, values in settings.items() if name in values)
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=f"of {used}")
    result.set_defaults(all_settings=settings, likelihood=likelihood)
    return result


def parse(source: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parsed options, with the chosen optimizer's hyperparameters as `settings`."""
    options = source.parse_args(arguments)
    everything = options.all_settings
    del options.all_settings
    options.settings = dict(everything[options.optimizer])
    for name in {key for values in everything.values() for key in values}:
        value = options.__dict__.pop(name)
        if value is not None and name not in options.settings:
            source.error(f"--{name.replace('_', '-')} is not a setting of {options.optimizer}")
        if value is not None:
            options.settings[name] = value
    if options.optimizer == "adaptive" and (options.accumulate > 1 or options.amp != "none"):
        source.error("adaptive takes whole batches as they are: --accumulate 1 and --amp none")
    if not 0 <= options.settings.get("warmup", 0) < 1:
        source.error(f"--warmup must be >= 0 and < 1, got {options.settings['warmup']}")
    if options.resume and options.checkpoint is None:
        source.error("--resume needs --checkpoint")
    for name in ("checkpoint", "output"):
        path = getattr(options, name)
        if path is not None and path.is_dir():  # else it would be found out after an epoch
            source.error(f"--{name} must be a file, got the folder {path}")
    return options


def whole(text: str, at_least: int = 1) -> int:
    """A number of things."""
    number = int(text)
    if number < at_least:
        raise argparse.ArgumentTypeError(f"must be >= {at_least}, got {number}")
    return number


def whole_or_zero(text: str) -> int:
    """A number of things, perhaps none."""
    return whole(text, at_least=0)


# ---- the optimizer -------------------------------------------------------------------------------


def make_optimizer(
    options: argparse.Namespace, model: nn.Module, scaler: torch.amp.GradScaler
) -> torch.optim.Optimizer:
    """The optimizer that `options` name. Weight decay is decoupled in all but sgd."""
    settings = {name: value for name, value in options.settings.items() if name != "warmup"}
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), **settings)
    if options.optimizer == "adamw":
        betas = settings.pop("beta1"), settings.pop("beta2")
        return torch.optim.AdamW(model.parameters(), betas=betas, **settings)
    if options.optimizer == "kron":
        return Kron(model.parameters(), seed=options.seed, **settings)
    if options.optimizer == "adaptive":
        return AdaptiveKFAC(KFAC(model, seed=options.seed, **settings))
    # Weight decay joins the direction after K-FAC has made it, hence it is decoupled here, too.
    descent = {name: settings.pop(name) for name in ("lr", "momentum", "weight_decay")}
    return KFAC(
        model,
        torch.optim.SGD(model.parameters(), **descent),
        likelihood=None if settings.get("fisher", "empirical") == "empirical" else options.likelihood,
        seed=options.seed,
        grad_scaler=scaler,
        **settings,
    )


def generator(*numbers: int) -> torch.Generator:
    """Random numbers that depend on all of `numbers`, such as a seed, an epoch and a batch."""
    (state,) = np.random.SeedSequence(numbers).generate_state(1)
    return torch.Generator().manual_seed(int(state))


# ---- the run -------------------------------------------------------------------------------------


class Run:
    """A model, its optimizer, and how far they have come.

    Args:
        options: of `parse`.
        model: moved to the device.
        batches: how many an epoch has.
    """

    def __init__(self, options: argparse.Namespace, model: nn.Module, batches: int) -> None:
        if batches < 1:
            raise SystemExit("there is less data than one batch: use a smaller --batch-size")
        self.options, self.batches = options, batches
        self.device = torch.device(options.device)
        self.model = model.to(self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=options.amp == "fp16")
        self.optimizer = make_optimizer(options, self.model, self.scaler)
        steps = options.epochs * math.ceil(batches / options.accumulate)

        def rate(step: int) -> float:
            warmup = options.settings["warmup"] * steps
            if step < warmup:
                return (step + 1) / (warmup + 1)
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

        self.schedule = None  # 'adaptive' finds its own rate
        if options.optimizer != "adaptive":
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.epoch, self.batch = 0, 0  # the next batch
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)  # of this epoch's losses
        self.seconds = 0.0  # of this epoch
        self.log: list[dict[str, float]] = []
        if options.resume and options.checkpoint.exists():
            self._load()

    def train(
        self,
        batches: Callable[[int, int], Iterable[Any]],
        loss_of: Callable[[Any], Any],
        evaluate: Callable[[], dict[str, float]],
    ) -> None:
        """All epochs that are left.

        Args:
            batches: the batches of an epoch, from a given one on; tensors, or tuples of them.
            loss_of: a batch's mean loss; for 'adaptive' and that, what it is computed from.
            evaluate: measurements after an epoch, by name.
        """
        for epoch in range(self.epoch, self.options.epochs):
            start = time.perf_counter() - self.seconds
            self.model.train()
            with tqdm(
                total=self.batches,
                initial=self.batch,
                desc=f"epoch {epoch + 1}",
                unit="batch",
                leave=False,
            ) as bar:
                for batch in batches(epoch, self.batch):
                    number = self.batch + 1
                    last = number % self.options.accumulate == 0 or number == self.batches
                    self._take(self._to_device(batch), loss_of, last)
                    self.batch = number
                    bar.update()
                    if last:
                        self._checkpoint_within_epoch(start)
                    if self.batch % 20 == 0:  # reading a loss waits for the device
                        bar.set_postfix_str(f"loss {float(self.total) / self.batch:.4f}", refresh=False)
            self._finish_epoch(epoch, evaluate, start)

    def autocast(self) -> torch.autocast:
        """The context that forward passes run in."""
        kind = AMP[self.options.amp]
        return torch.autocast(self.device.type, kind, enabled=kind is not None)

    def _take(self, batch: Any, loss_of: Callable[[Any], Any], last: bool) -> None:
        """A batch, and a step if it is the last one of it."""
        if isinstance(self.optimizer, AdaptiveKFAC):
            self.total += self.optimizer.step(lambda: loss_of(batch))
            self.optimizer.zero_grad()
            return
        self._backward(batch, loss_of)
        if last:
            self._step()

    def _backward(self, batch: Any, loss_of: Callable[[Any], Any]) -> None:
        accumulate = self.options.accumulate
        first = self.batch - self.batch % accumulate
        together = min(accumulate, self.batches - first)  # the epoch's last step may have fewer
        with self.autocast():
            loss = loss_of(batch)
            loss = loss[0] if isinstance(loss, tuple) else loss
        self.scaler.scale(loss / together).backward()
        self.total += loss.detach()

    def _step(self) -> None:
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        # The scale falls where a step was skipped.
        if self.schedule is not None and self.scaler.get_scale() >= scale:
            self.schedule.step()

    def _finish_epoch(self, epoch: int, evaluate: Callable[[], dict[str, float]], start: float) -> None:
        record = {"epoch": epoch + 1, "train_loss": float(self.total) / self.batches}
        self.model.eval()
        with torch.no_grad(), self.autocast():
            record |= evaluate()
        record["skipped_steps"] = getattr(self.optimizer, "skipped_steps", 0)
        record["seconds"] = time.perf_counter() - start
        self.log.append(record)
        print(", ".join(f"{name} {value:.6g}" for name, value in record.items()), flush=True)
        self.epoch, self.batch, self.seconds = epoch + 1, 0, 0.0
        self.total.zero_()
        if self.options.output is not None:
            options = {
                key: str(v) if isinstance(v, Path) else v for key, v in vars(self.options).items()
            }
            text = json.dumps({"options": options, "epochs": self.log}, indent=1)
            _replace(self.options.output, lambda path: path.write_text(text + "\n"))
        if self.options.checkpoint is not None:  # last: what is resumed has been logged
            self._save()

    def _to_device(self, batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            return batch.to(self.device, non_blocking=True)
        return tuple(self._to_device(part) for part in batch)

    # ---- checkpoints -----------------------------------------------------------------------------

    def _checkpoint_within_epoch(self, start: float) -> None:
        if self.options.checkpoint is None or self.options.checkpoint_every is None:
            return
        if self.batch % (self.options.checkpoint_every * self.options.accumulate) == 0:
            self.seconds = time.perf_counter() - start
            self._save()

    def _save(self) -> None:
        state = {
            "identity": {name: getattr(self.options, name) for name in IDENTITY},
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "position": (self.epoch, self.batch, self.total, self.seconds),
            "log": self.log,
            "random": (torch.get_rng_state(), torch.cuda.get_rng_state_all()),
        }
        _replace(self.options.checkpoint, lambda path: torch.save(state, path))

    def _load(self) -> None:
        saved = torch.load(self.options.checkpoint, map_location="cpu", weights_only=True)
        for name, value in saved["identity"].items():
            if getattr(self.options, name) != value:
                now = getattr(self.options, name)
                raise SystemExit(f"{name} must be {value!r}, as in the checkpoint, got {now!r}")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(saved["schedule"])
        self.scaler.load_state_dict(saved["scaler"])
        self.epoch, self.batch, total, self.seconds = saved["position"]
        self.total.copy_(total)
        self.log = saved["log"]
        cpu, cuda = saved["random"]
        torch.set_rng_state(cpu)
        if len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
        print(f"resuming in epoch {self.epoch + 1}, after {self.batch} batches", flush=True)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file next to `path`, then put it in its place: what is there is always whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp")
    write(beside)
    os.replace(beside, path)
