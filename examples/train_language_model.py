"""Train a small GPT on the bytes of a text, with K-FAC, Kron, AdamW or SGD, and let it write.

    python train_language_model.py --text book.txt --amp bf16 --checkpoint run.pt --output run.json
    python train_language_model.py --fake-data --epochs 3

The last tenth of the text is kept for the test.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import training

# K-FAC without warmup: momentum keeps directions that `kl_clip` fitted to a smaller learning rate.
SETTINGS: training.Settings = {
    "kfac": {
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 1e-3,
        "damping": 0.003,
        "kl_clip": 0.001,
        "factor_decay": 0.95,
        "factor_update_steps": 5,
        "inv_update_steps": 20,
        "compute_method": "inverse",
        "fisher": "empirical",
        "warmup": 0.0,
    },
    "kron": {"lr": 3e-3, "b1": 0.9, "weight_decay": 0.1, "warmup": 0.05},
    "adamw": {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "warmup": 0.05},
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "warmup": 0.05},
}


# ---- the model -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values are three layers that read one input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two layers with GELU between them, each on normalized input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A causal transformer whose head is its token embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=width**-0.5)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n, t, vocabulary) logits of (n, t) tokens, each of the token that follows."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, tokens: torch.Tensor, count: int, random: torch.Generator) -> torch.Tensor:
        """`tokens`, (t,), and `count` more, drawn one after the other."""
        for _ in range(count):
            logits = self(tokens[None, -self.context :])[0, -1].float().cpu()
            drawn = torch.multinomial(logits.softmax(0), 1, generator=random)
            tokens = torch.cat([tokens, drawn.to(tokens.device)])
        return tokens


# ---- the text ------------------------------------------------------------------------------------


def fake_text(length: int, seed: int) -> bytes:
    """Letters of which each depends on the two before it; four can follow any two."""
    random = training.generator(seed)
    letters = b"abcdefghijklmno "
    n = len(letters)
    followers = torch.randint(n, (n, n, 4), generator=random).tolist()
    draws = torch.multinomial(
        torch.tensor([0.7, 0.15, 0.1, 0.05]), length, replacement=True, generator=random
    )
    text, before, last = bytearray(), 0, 0
    for draw in draws.tolist():
        before, last = last, followers[before][last][draw]
        text.append(letters[last])
    return bytes(text)


class Text:
    """A text's bytes as numbers of the distinct ones in it."""

    def __init__(self, text: bytes) -> None:
        self.alphabet = bytes(sorted(set(text)))
        number = torch.zeros(256, dtype=torch.long)
        number[list(self.alphabet)] = torch.arange(len(self.alphabet))
        tokens = number[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]
        self.train, self.test = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]

    def decode(self, tokens: torch.Tensor) -> str:
        return bytes(self.alphabet[token] for token in tokens.tolist()).decode(errors="replace")


def windows(tokens: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    """(n, context + 1) tokens: inputs, and one place further on, targets."""
    return tokens[starts[:, None] + torch.arange(context + 1)]


# ---- training ------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = training.parser(__doc__, SETTINGS, epochs=10, batch_size=32, likelihood="categorical")
    data = parser.add_argument_group("data")
    source = data.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, metavar="FILE", help="any file")
    source.add_argument("--fake-data", action="store_true", help="a made-up text")
    data.add_argument("--fake-length", type=training.whole, default=100_000, metavar="BYTES")
    data.add_argument(
        "--sample", type=training.whole_or_zero, default=200, metavar="BYTES", help="to write at the end"
    )
    model = parser.add_argument_group("model")
    for name, default in (("context", 64), ("width", 64), ("heads", 4), ("depth", 4)):
        model.add_argument(f"--{name}", type=training.whole, default=default, help=f"default: {default}")
    options = training.parse(parser)
    if options.width % options.heads:
        parser.error(f"--width must be a multiple of --heads, got {options.width} and {options.heads}")
    if options.text is not None and not (options.text.is_file() and options.text.stat().st_size):
        parser.error(f"--text must be a file that is not empty, got {options.text}")
    return options


def main() -> None:
    options = parse()
    context, batch_size = options.context, options.batch_size
    raw = (
        fake_text(options.fake_length, options.seed) if options.fake_data else options.text.read_bytes()
    )
    text = Text(raw)
    test_starts = torch.arange(0, max(len(text.test) - context, 0), context)
    if not len(test_starts):
        raise SystemExit(f"the text is too short for --context {context}")
    torch.manual_seed(options.seed)
    model = GPT(len(text.alphabet), context, options.width, options.heads, options.depth)
    run = training.Run(options, model, len(text.train) // (context * batch_size))

    def batches(epoch: int, start: int) -> Iterator[torch.Tensor]:
        for batch in range(start, run.batches):
            random = training.generator(options.seed, epoch, batch)
            starts = torch.randint(len(text.train) - context, (batch_size,), generator=random)
            yield windows(text.train, starts, context)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def evaluate() -> dict[str, float]:
        losses = [
            float(loss_of(windows(text.test, starts, context).to(run.device))) * len(starts)
            for starts in test_starts.split(batch_size)
        ]
        loss = sum(losses) / len(test_starts)
        return {"test_loss": loss, "test_bits_per_byte": loss / math.log(2)}

    run.train(batches, loss_of, evaluate)
    model.eval()
    with run.autocast():
        beginning = text.test[:context].to(run.device)
        written = model.write(beginning, options.sample, training.generator(options.seed))
    print(f"\n{text.decode(written[context:])}")


if __name__ == "__main__":
    main()
