"""Eleven small models with the structure of real ones, each with data it can learn and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from resnets import cifar_resnet
from train_language_model import GPT

LossFunction = Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]
Case = tuple[nn.Module, tuple[torch.Tensor, ...], LossFunction]

CLASSES, TOKENS = 4, 11


# ---- images --------------------------------------------------------------------------------------


def resnet20(seed: int) -> Case:
    """Residual blocks of convolutions without bias and BatchNorm."""
    torch.manual_seed(seed)
    return cifar_resnet(depth=20, width=4, classes=CLASSES), noisy_pictures(), classification


class ViT(nn.Module):
    """Patches and a class token; fused queries, keys and values; residual branches with a scale each."""

    def __init__(self, size: int, patch: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) / 10)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (size // patch) ** 2, width) / 10)
        self.blocks = nn.Sequential(*(ViTBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((width,), 0.1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.gamma1 * self.proj(attended)
        return x + self.gamma2 * self.mlp(self.norm2(x))


def vit(seed: int) -> Case:
    torch.manual_seed(seed)
    return ViT(size=16, patch=4, width=16, heads=2, depth=2), noisy_pictures(), classification


class UNet(nn.Module):
    """Down and, by transposed convolutions, up again, where what was seen on the way down joins in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = self.level(1, width), self.level(width, 2 * width)
        self.bottom = self.level(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.right2 = self.level(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.right1 = self.level(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    @staticmethod
    def level(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.SiLU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        level1 = self.down1(images)
        level2 = self.down2(F.max_pool2d(level1, 2))
        x = self.bottom(F.max_pool2d(level2, 2))
        x = self.right2(torch.cat([self.up2(x), level2], dim=1))
        return self.out(self.right1(torch.cat([self.up1(x), level1], dim=1)))


def unet(seed: int) -> Case:
    """Which pixels of a noisy image belong to its disc."""
    torch.manual_seed(seed)
    model, axis = UNet(width=4), torch.linspace(-1, 1, 16)
    center, radius = torch.rand(8, 2) - 0.5, 0.3 + 0.4 * torch.rand(8)
    x, y = axis[None, None, :] - center[:, :1, None], axis[None, :, None] - center[:, 1:, None]
    disc = ((x * x + y * y).sqrt() < radius[:, None, None]).float()[:, None]
    batch = disc + 0.5 * torch.randn_like(disc), disc
    return model, batch, lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1])


class Mixer(nn.Module):
    """Layers across patches, on the transposed, alternate with layers across channels."""

    def __init__(self, size: int, patch: int, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(MixerBlock((size // patch) ** 2, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across_patches, self.across_channels = (
            nn.Sequential(nn.Linear(side, 2 * side), nn.GELU(), nn.Linear(2 * side, side))
            for side in (patches, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.across_channels(self.norm2(x))


def mlp_mixer(seed: int) -> Case:
    torch.manual_seed(seed)
    return Mixer(size=16, patch=4, width=16, depth=2), noisy_pictures(), classification


class InvertedResidual(nn.Module):
    """Wider by a 1x1 convolution, one 3x3 filter per channel, narrower again; ReLU6 works in place."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = 3 * before
        self.is_residual = stride == 1 and before == after
        self.layers = nn.Sequential(
            *(nn.Conv2d(before, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True)),
            nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False),
            *(nn.BatchNorm2d(wide), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(wide, after, 1, bias=False), nn.BatchNorm2d(after)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.is_residual else self.layers(x)


def mobilenet(seed: int) -> Case:
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(inplace=True)),
        *(InvertedResidual(6, 6, 1), InvertedResidual(6, 8, 2), InvertedResidual(8, 8, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)),
    )
    return model, noisy_pictures(), classification


def noisy_pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 16x16 pixels, each its class's picture with noise, and their classes."""
    pictures = F.interpolate(torch.randn(CLASSES, 3, 4, 4), scale_factor=4)
    labels = torch.arange(16) % CLASSES
    return pictures[labels] + torch.randn(16, 3, 16, 16), labels


def classification(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Cross-entropy with one label per example."""
    return F.cross_entropy(model(batch[0]), batch[1])


# ---- sequences -----------------------------------------------------------------------------------


def gpt_tied(seed: int) -> Case:
    """Separate queries, keys and values; the head is the token embedding."""
    torch.manual_seed(seed)
    model = GPT(vocabulary=TOKENS, context=12, width=16, heads=2, depth=2)
    return model, (sentences(16, 13),), next_token


class EncoderDecoder(nn.Module):
    """`nn.Transformer` with embeddings for tokens and positions, a causal mask and padding."""

    padding = 0

    def __init__(self, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(TOKENS, width, self.padding), nn.Embedding(TOKENS, width)
        self.positions = nn.Embedding(length, width)
        self.transformer = nn.Transformer(
            width, heads, depth, depth, 2 * width, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, TOKENS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        n, padded = target.shape[1], source == self.padding
        decoded = self.transformer(
            self.source(source) + self.positions(torch.arange(source.shape[1])),
            self.target(target) + self.positions(torch.arange(n)),
            tgt_mask=torch.ones(n, n, dtype=torch.bool).triu(1),
            src_key_padding_mask=padded,
            memory_key_padding_mask=padded,
        )
        return self.head(decoded)


def encoder_decoder(seed: int) -> Case:
    """Sequences of different lengths, backwards."""
    torch.manual_seed(seed)
    model = EncoderDecoder(width=16, heads=2, depth=1, length=9)
    source = torch.randint(1, TOKENS, (16, 8))
    source[torch.arange(8) >= torch.randint(4, 9, (16, 1))] = EncoderDecoder.padding
    target = F.pad(source.flip(1), (1, 0))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        source, target = batch
        logits = model(source, target[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

    return model, (source, target), loss


class LSTMLanguageModel(nn.Module):
    """An embedding, two recurrent layers and a head."""

    def __init__(self, width: int, rnn: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.rnn = rnn(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.tokens(tokens))[0])


def lstm_lm(seed: int, rnn: Callable[..., nn.Module] = nn.LSTM) -> Case:
    torch.manual_seed(seed)
    return LSTMLanguageModel(width=16, rnn=rnn), (sentences(16, 13),), next_token


def sentences(count: int, length: int) -> torch.Tensor:
    """(count, length) tokens, each a fixed function of the one before it, but for one in ten."""
    follows = torch.randperm(TOKENS)
    tokens = [torch.randint(TOKENS, (count,))]
    for _ in range(length - 1):
        anything = torch.randint(TOKENS, (count,))
        tokens.append(torch.where(torch.rand(count) < 0.1, anything, follows[tokens[-1]]))
    return torch.stack(tokens, dim=1)


def next_token(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Cross-entropy with the token that follows, for every token."""
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Conformer(nn.Module):
    """One block (Gulati et al. 2020, arXiv:2005.08100) between a layer that reads frames and a head."""

    def __init__(self, features: int, width: int, heads: int) -> None:
        super().__init__()
        self.read = nn.Linear(features, width)
        self.ffn1, self.ffn2 = (
            nn.Sequential(
                *(nn.LayerNorm(width), nn.Linear(width, 2 * width)),
                *(nn.SiLU(), nn.Linear(2 * width, width)),
            )
            for _ in range(2)
        )
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.convolution_norm = nn.LayerNorm(width)
        self.convolution = nn.Sequential(
            *(nn.Conv1d(width, 2 * width, 1), nn.GLU(dim=1)),
            *(nn.Conv1d(width, width, 5, padding=2, groups=width), nn.BatchNorm1d(width), nn.SiLU()),
            nn.Conv1d(width, width, 1),
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = self.read(frames)
        x = x + self.ffn1(x) / 2
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.convolution(self.convolution_norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.ffn2(x) / 2
        return self.head(self.norm(x))


def conformer(seed: int) -> Case:
    """For each frame, whether one of its features is positive on average over it and its neighbours."""
    torch.manual_seed(seed)
    frames = torch.randn(8, 20, 6)
    labels = (F.avg_pool1d(frames[:, :, 0], 5, 1, 2) > 0).long()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Conformer(features=6, width=16, heads=2), (frames, labels), loss


# ---- tables and functions ------------------------------------------------------------------------


class DLRM(nn.Module):
    """Bags of categories become sums of table rows, whose inner products join the dense features."""

    def __init__(self, tables: list[int], features: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum") for size in tables)
        self.bottom = nn.Sequential(
            *(nn.Linear(features, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
        )
        vectors = 1 + len(tables)
        self.pairs = torch.combinations(torch.arange(vectors)).T
        self.top = nn.Sequential(
            *(nn.Linear(width + self.pairs.shape[1], 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))
        )

    def forward(self, dense: torch.Tensor, bags: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        x = self.bottom(dense)
        rows = [table(*bag) for table, bag in zip(self.tables, bags, strict=True)]
        vectors = torch.stack([x, *rows], dim=1)
        i, j = self.pairs
        products = (vectors @ vectors.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


def dlrm(seed: int) -> Case:
    """Clicks, by two dense features and a score of each category; bags of one, three, and 0 to 3."""
    torch.manual_seed(seed)
    n, sizes = 64, [12, 9, 7]
    model = DLRM(sizes, features=5, width=8)
    dense = torch.randn(n, 5)
    one, three = torch.randint(sizes[0], (n, 1)), torch.randint(sizes[1], (n, 3))
    counts = torch.arange(n) % 4
    ragged, offsets = torch.randint(sizes[2], (int(counts.sum()),)), counts.cumsum(0) - counts
    score = torch.randn(sizes[0])[one].sum(1) + torch.randn(sizes[1])[three].sum(1)
    clicked = (dense[:, 0] * dense[:, 1] + score > 0).float()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        dense, one, three, ragged, offsets, clicked = batch
        logits = model(dense, [(one,), (three,), (ragged, offsets)])
        return F.binary_cross_entropy_with_logits(logits, clicked)

    return model, (dense, one, three, ragged, offsets, clicked), loss


def pinn(seed: int) -> Case:
    """Poisson's equation -Δu = 2 π² sin(π x) sin(π y), zero on the unit square's boundary."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    ).double()
    interior, boundary = torch.rand(2, 64, 2, dtype=torch.float64)
    boundary[torch.arange(64), torch.arange(64) % 2] = (torch.arange(64) // 2 % 2).double()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        points = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        laplacian = sum(
            torch.autograd.grad(gradient[:, i].sum(), points, create_graph=True)[0][:, i] for i in (0, 1)
        )
        residual = laplacian / (2 * math.pi**2) + (math.pi * points.detach()).sin().prod(1)
        return residual.square().mean() + model(batch[1]).square().mean()

    return model, (interior, boundary), loss


MODELS: dict[str, Callable[[int], Any]] = {
    "resnet20": resnet20,
    "vit": vit,
    "gpt_tied": gpt_tied,
    "encoder_decoder": encoder_decoder,
    "unet": unet,
    "lstm_lm": lstm_lm,
    "mlp_mixer": mlp_mixer,
    "mobilenet": mobilenet,
    "dlrm": dlrm,
    "conformer": conformer,
    "pinn": pinn,
}
