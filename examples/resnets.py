"""Residual networks for CIFAR and ImageNet: He et al. 2015 (arXiv:1512.03385), section 4.2, table 1."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def convolution(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image's size at stride 1, and its BatchNorm."""
    conv = nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out))


class Residual(nn.Module):
    """relu(x + branch(x)), with a projection of x where its shape changes."""

    def __init__(self, branch: nn.Module, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        changes = stride != 1 or channels_in != channels_out
        self.shortcut = convolution(channels_in, channels_out, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.shortcut(x) + self.branch(x))


def basic_block(channels_in: int, channels: int, stride: int) -> Residual:
    """Two 3x3 convolutions."""
    branch = nn.Sequential(
        convolution(channels_in, channels, 3, stride), nn.ReLU(), convolution(channels, channels, 3)
    )
    return Residual(branch, channels_in, channels, stride)


def bottleneck(channels_in: int, channels: int, stride: int) -> Residual:
    """1x1, 3x3 and 1x1 convolutions, the last four times as wide; the 3x3 one has the stride.

    The branch starts at zero: Goyal et al. 2017 (arXiv:1706.02677), section 5.1.
    """
    last = convolution(channels, 4 * channels, 1)
    nn.init.zeros_(last[1].weight)
    branch = nn.Sequential(
        convolution(channels_in, channels, 1),
        nn.ReLU(),
        convolution(channels, channels, 3, stride),
        nn.ReLU(),
        last,
    )
    return Residual(branch, channels_in, 4 * channels, stride)


def cifar_resnet(depth: int = 20, width: int = 16, classes: int = 10) -> nn.Sequential:
    """Three stages of (depth - 2) / 6 basic blocks; `width` channels in the first.

    Shortcuts that change the shape are projections, where the paper pads with zeros.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth must be 6 n + 2 with n >= 1, got {depth}")
    blocks = []
    before = width
    for stage in range(3):
        for block in range((depth - 2) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append(basic_block(before, width * 2**stage, stride))
            before = width * 2**stage
    stem = [convolution(3, width, 3), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*stem, *blocks, *head)


def resnet50(width: int = 64, classes: int = 1000) -> nn.Sequential:
    """Stages of 3, 4, 6 and 3 bottlenecks; `width` is 64 in the paper."""
    blocks = []
    before = width
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append(bottleneck(before, width * 2**stage, stride))
            before = 4 * width * 2**stage
    stem = [convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*stem, *blocks, *head)
