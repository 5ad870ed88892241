"""Image classification: data from CIFAR's files, from folders of images or made up, and the training."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import training

# K-FAC without warmup: momentum keeps directions that `kl_clip` fitted to a smaller learning rate.
SETTINGS: training.Settings = {
    "kfac": {
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "damping": 0.003,
        "kl_clip": 0.001,
        "factor_decay": 0.95,
        "factor_update_steps": 5,
        "inv_update_steps": 50,
        "compute_method": "inverse",
        "fisher": "empirical",
        "warmup": 0.0,
    },
    "kron": {"lr": 3e-3, "b1": 0.9, "weight_decay": 0.05, "warmup": 0.05},
    "adamw": {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.05, "warmup": 0.05},
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "warmup": 0.05},
}
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


class Images(Protocol):
    """Labelled images, fetched in batches."""

    labels: torch.Tensor

    def fetch(self, indices: torch.Tensor, random: torch.Generator | None) -> torch.Tensor:
        """(n, 3, size, size) pixels from 0 to 1; augmented if there are random numbers for it."""


@dataclass
class ImagesInMemory:
    """Images that are there already. Augmentation shifts by up to an eighth, and mirrors."""

    pixels: torch.Tensor  # (n, 3, size, size), uint8
    labels: torch.Tensor  # (n,)

    def fetch(self, indices: torch.Tensor, random: torch.Generator | None) -> torch.Tensor:
        images = self.pixels[indices].float() / 255
        if random is None:
            return images
        n, _, size, _ = images.shape
        margin = size // 8
        images = F.pad(images, (margin,) * 4)
        top, left = torch.randint(0, 2 * margin + 1, (2, n, 1), generator=random)
        rows, columns = top + torch.arange(size), left + torch.arange(size)
        mirrored = torch.rand(n, 1, generator=random) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
        image = torch.arange(n)[:, None, None]
        # Indices on both sides of the channel axis put that axis last.
        return images[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@dataclass
class ImagesInFolders:
    """Image files, decoded as they are needed. Augmentation crops at random, and mirrors."""

    files: list[Path]
    labels: torch.Tensor  # (n,)
    size: int

    def fetch(self, indices: torch.Tensor, random: torch.Generator | None) -> torch.Tensor:
        return torch.stack([self._one(self.files[i], random) for i in indices.tolist()])

    def _one(self, file: Path, random: torch.Generator | None) -> torch.Tensor:
        from PIL import Image

        with Image.open(file) as opened:
            image = torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1)
        top, left, height, width = (
            self._central(image) if random is None else random_crop(*image.shape[1:], random)
        )
        crop = image[None, :, top : top + height, left : left + width].float() / 255
        crop = F.interpolate(
            crop, (self.size, self.size), mode="bilinear", antialias=True, align_corners=False
        )[0]
        return crop.flip(2) if random is not None and torch.rand((), generator=random) < 0.5 else crop

    def _central(self, image: torch.Tensor) -> tuple[int, int, int, int]:
        """The central square, of 7/8 of the shorter side."""
        height, width = image.shape[1:]
        side = max(1, min(height, width) * 7 // 8)
        return (height - side) // 2, (width - side) // 2, side, side


def random_crop(height: int, width: int, random: torch.Generator) -> tuple[int, int, int, int]:
    """(top, left, height, width) of 8 to 100 % of the area, sides in ratios from 3:4 to 4:3.

    Source: Szegedy et al. 2014 (arXiv:1409.4842), section 6.
    """
    for _ in range(10):  # a long image may not hold the first rectangle drawn
        area, ratio, y, x = torch.rand(4, generator=random).tolist()
        area = height * width * (0.08 + 0.92 * area)
        ratio = (3 / 4) ** (1 - 2 * ratio)
        h, w = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
        if 0 < h <= height and 0 < w <= width:
            return int(y * (height - h + 1)), int(x * (width - w + 1)), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


# ---- where images come from ----------------------------------------------------------------------


def cifar10(folder: Path) -> tuple[ImagesInMemory, ImagesInMemory]:
    """Training and test images from the files of CIFAR-10's Python version."""

    def read(names: Iterable[str]) -> ImagesInMemory:
        pixels, labels = [], []
        for name in names:
            with open(folder / name, "rb") as file:
                batch = pickle.load(file, encoding="bytes")
            pixels.append(torch.from_numpy(batch[b"data"]).reshape(-1, 3, 32, 32))
            labels.append(torch.tensor(batch[b"labels"]))
        return ImagesInMemory(torch.cat(pixels), torch.cat(labels))

    try:
        return read(f"data_batch_{i}" for i in range(1, 6)), read(["test_batch"])
    except FileNotFoundError as error:
        raise SystemExit(
            f"--data must be the folder cifar-10-batches-py of CIFAR-10's Python version: {error}"
        ) from error


def image_folders(folder: Path, size: int) -> tuple[ImagesInFolders, ImagesInFolders]:
    """Training and test images from folder/train and folder/val, one folder per class in each."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise SystemExit("reading image files needs Pillow: pip install pillow") from error

    def classes(part: str) -> list[Path]:
        where = folder / part
        found = sorted(path for path in where.iterdir() if path.is_dir()) if where.is_dir() else []
        if not found:
            raise SystemExit(f"--data must have one folder per class in {where}, found none")
        return found

    names = [path.name for path in classes("train")]

    def read(part: str) -> ImagesInFolders:
        files, labels = [], []
        for path in classes(part):
            if path.name not in names:
                raise SystemExit(f"class {path.name!r} of {path.parent} has no training images")
            of_class = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
            files += of_class
            labels += [names.index(path.name)] * len(of_class)
        if not files:
            raise SystemExit(f"--data must have images in the classes of {folder / part}, found none")
        return ImagesInFolders(files, torch.tensor(labels, dtype=torch.long), size)

    return read("train"), read("val")


def fake_images(
    counts: tuple[int, int], size: int, classes: int, seed: int
) -> tuple[ImagesInMemory, ImagesInMemory]:
    """Learnable images: each class has a smooth picture, seen at varying contrast through noise."""
    random = training.generator(seed)
    pictures = torch.randn(classes, 3, 4, 4, generator=random)
    pictures = F.interpolate(pictures, (size, size), mode="bicubic", align_corners=False)

    def make(count: int) -> ImagesInMemory:
        labels = torch.arange(count) % classes
        contrast = 0.3 + 0.7 * torch.rand(count, 1, 1, 1, generator=random)
        noise = torch.randn(count, 3, size, size, generator=random)
        pixels = 128 + 40 * (contrast * pictures[labels] + noise)
        return ImagesInMemory(pixels.clamp(0, 255).byte(), labels)

    return make(counts[0]), make(counts[1])


# ---- training ------------------------------------------------------------------------------------


def parser(description: str, *, epochs: int, batch_size: int, size: int) -> argparse.ArgumentParser:
    """The options of both scripts."""
    result = training.parser(
        description, SETTINGS, epochs=epochs, batch_size=batch_size, likelihood="categorical"
    )
    group = result.add_argument_group("data")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="FOLDER", help="where the images are")
    source.add_argument("--fake-data", action="store_true", help="made-up images, offline")
    group.add_argument(
        "--fake-images", type=training.whole, nargs=2, default=(2048, 512), metavar=("TRAIN", "TEST")
    )
    group.add_argument("--fake-classes", type=training.whole, default=10, metavar="N")
    group.add_argument(
        "--size", type=training.whole, default=size, help="of images (default: %(default)s)"
    )
    group.add_argument(
        "--workers", type=training.whole_or_zero, default=0, help="processes that load (default: 0)"
    )
    return result


@dataclass
class Batches(Dataset):  # type: ignore[type-arg]
    """The batches of one pass over the images; in random order, and augmented, if there is a key."""

    images: Images
    batch_size: int
    key: tuple[int, ...] | None = None  # such as (seed, epoch)

    def __post_init__(self) -> None:
        n = len(self.images.labels)
        self.order = torch.arange(n)
        if self.key is not None:
            # The last images of the order, too few for a batch, stay out of this epoch.
            self.order = torch.randperm(n, generator=training.generator(*self.key))
            self.order = self.order[: n // self.batch_size * self.batch_size]

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __getitem__(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        indices = self.order[batch * self.batch_size : (batch + 1) * self.batch_size]
        random = None if self.key is None else training.generator(*self.key, batch)
        return self.images.fetch(indices, random), self.images.labels[indices]


def train(options: argparse.Namespace, model: nn.Module, data: tuple[Images, Images]) -> training.Run:
    """Train a classifier and measure it on the test images after each epoch."""
    train_images, test_images = data
    sample = train_images.fetch(torch.arange(min(256, len(train_images.labels))), None)
    mean, deviation = (x.to(options.device) for x in (sample.mean((0, 2, 3)), sample.std((0, 2, 3))))

    def logits(x: torch.Tensor) -> torch.Tensor:
        return model((x - mean[:, None, None]) / deviation[:, None, None])

    def load(batches: Batches, start: int = 0) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        cuda = options.device.startswith("cuda")
        rest = range(start, len(batches))
        workers = options.workers
        return DataLoader(batches, None, sampler=rest, num_workers=workers, pin_memory=cuda)

    def of_epoch(epoch: int, start: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return load(Batches(train_images, options.batch_size, (options.seed, epoch)), start)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(logits(batch[0]), batch[1])

    def evaluate() -> dict[str, float]:
        losses, right = 0.0, 0
        for x, y in load(Batches(test_images, options.batch_size)):
            outputs, y = logits(x.to(options.device)).float(), y.to(options.device)
            losses += float(F.cross_entropy(outputs, y, reduction="sum"))
            right += int((outputs.argmax(1) == y).sum())
        n = len(test_images.labels)
        return {"test_loss": losses / n, "test_accuracy": right / n}

    run = training.Run(options, model, len(train_images.labels) // options.batch_size)
    run.train(of_epoch, loss_of, evaluate)
    return run
