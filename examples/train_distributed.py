"""Train a small convolutional network with K-FAC on several processes, resumable on any number of them.

One node, four processes (gloo on a CPU, NCCL on GPUs):

    torchrun --nproc-per-node 4 examples/train_distributed.py --strategy MEM_OPT

Two nodes of eight GPUs, the same command on both:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 \\
        examples/train_distributed.py --wrap fsdp --strategy HYBRID_OPT --checkpoint run

Under Slurm see examples/train_distributed.slurm. Without torchrun it trains in this process alone. The
global batch does not depend on the number of processes, so neither does the trajectory.
"""

from __future__ import annotations

import argparse
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import training
from distributed import latest, save_atomically
from suite.torch import KFAC

CLASSES, SIZE = 10, 16


def network(width: int) -> nn.Sequential:
    """Three convolutions and a classifier."""
    layers: list[nn.Module] = []
    channels = 3
    for out in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.GroupNorm(4, out), nn.ReLU()]
        channels = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (SIZE // 8) ** 2, CLASSES))


def batch_of(step: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy pictures of ten patterns: the whole batch of a step, the same on every rank."""
    patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(1000 * seed + step + 1)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return patterns[labels] + 2 * torch.randn(size, 3, SIZE, SIZE, generator=generator), labels


def strategy(text: str) -> float | str:
    """A fraction, or the name of one."""
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wrap", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument(
        "--strategy",
        type=strategy,
        default="COMM_OPT",
        help="COMM_OPT, HYBRID_OPT, MEM_OPT or a fraction",
    )
    parser.add_argument("--steps", type=training.whole, default=100)
    parser.add_argument(
        "--batch-size", type=training.whole, default=96, help="of all processes together"
    )
    parser.add_argument(
        "--width", type=training.whole, default=16, help="channels at first, a multiple of 4"
    )
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--damping", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a collective may take")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="saved here, and resumed from here")
    parser.add_argument("--checkpoint-every", type=training.whole, default=50)
    given = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if given.batch_size % world:  # ranks average their means
        parser.error(
            f"--batch-size must be a multiple of the number of processes, {world}, got "
            f"{given.batch_size}"
        )
    if given.width % 4:
        parser.error(f"--width must be a multiple of 4, got {given.width}")

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        rank=int(os.environ.get("RANK", 0)),
        world_size=world,
        timeout=timedelta(seconds=given.timeout),
    )
    train(given, device)
    # Where DistributedDataParallel is the last to let go of a group of gloo, it does so with Python's
    # lock, for which a thread of the group may be waiting: a deadlock.
    gc.collect()
    dist.barrier()  # no rank leaves while another may still hear from it
    dist.destroy_process_group()


def train(given: argparse.Namespace, device: torch.device) -> None:
    """Everything that holds the process group, which nothing refers to when this returns."""
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(given.seed)
    model = network(given.width).to(device)
    run: nn.Module = model
    if given.wrap == "ddp":
        run = DistributedDataParallel(model)
    else:
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    sgd = torch.optim.SGD(run.parameters(), lr=given.lr, momentum=0.9)
    optimizer = KFAC(
        run, sgd, damping=given.damping, inv_update_steps=10, gradient_worker_fraction=given.strategy
    )

    def state() -> dict[str, object]:
        return {
            "model": get_model_state_dict(run),
            "sgd": get_optimizer_state_dict(run, sgd),
            **optimizer.state_dict(gather=False),
        }

    found = latest(given.checkpoint) if given.checkpoint else None
    if found is not None:
        saved: dict = state()
        dcp.load(saved, checkpoint_id=found)
        set_model_state_dict(run, saved["model"])
        set_optimizer_state_dict(run, sgd, saved["sgd"])
        optimizer.load_state_dict({"kfac": saved["kfac"]})

    progress = tqdm(range(optimizer.steps, given.steps), disable=rank != 0)
    for step in progress:
        pictures, labels = (
            x[rank::world].to(device) for x in batch_of(step, given.batch_size, given.seed)
        )
        loss = F.cross_entropy(run(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 or step == given.steps - 1:
            total = loss.detach().clone()
            dist.all_reduce(total)
            progress.set_postfix(loss=f"{total.item() / world:.4f}")
        if given.checkpoint and (step + 1) % given.checkpoint_every == 0:
            save_atomically(state(), given.checkpoint, optimizer.steps)
    if rank == 0 and len(progress):
        usage = optimizer.memory_usage()
        print(
            f"loss {total.item() / world:.6f} after {optimizer.steps} steps; K-FAC's state on rank 0: "
            f"{usage['factors'] / 1e6:.2f} MB factors, {usage['inverses'] / 1e6:.2f} MB inverses"
        )


if __name__ == "__main__":
    main()
