"""Several ranks against one process: the largest relative difference of parameters after ten steps.

    OMP_NUM_THREADS=1 python benchmarks/distributed_parity.py [--output docs/distributed_parity.md]

Each cell is the worst over: bucketed or one tensor at a time, whole matrices or upper triangles,
factors together or apart, inverses of every or of every third step, one or three batches a step.
gloo, on the CPU of this machine, seed 0.
"""

from __future__ import annotations

import argparse
import platform
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from options import writable
from torch_backend.crew import Crew
from torch_backend.distributed_jobs import Settings, distance, train

OPTIONS = {
    "": {},
    "one by one": {"allreduce_bucket_cap_mb": 0},
    "triangles": {"symmetry_aware": True},
    "apart": {"colocate_factors": False},
    "stale": {"inv_update_steps": 3, "factor_update_steps": 2},
    "accumulation": {},
}
METHODS = {"eigen": {}, "inverse": {}, "ekfac": {"inv_update_steps": 3}}
STRATEGIES = ("COMM_OPT", "HYBRID_OPT", "MEM_OPT")
WORLDS = (1, 2, 3, 4)
_HALF_OF_TWO = ("HYBRID_OPT", 2)


def cell(crew: Crew, wrap: str, strategy: str, method: str, world: int, dtype: torch.dtype) -> str:
    """The worst difference, or a dash for a strategy that the world does not have."""
    if strategy == "HYBRID_OPT" and world == 3:
        return "-"
    worst = 0.0
    for option, changes in OPTIONS.items():
        if (
            option == "apart"
            and world > 1
            and (strategy == "MEM_OPT" or (strategy, world) == _HALF_OF_TWO)
        ):
            continue  # one gradient worker for each layer needs its factors together
        settings = Settings(
            wrap,
            dtype=dtype,
            micro=3 if option == "accumulation" else 1,
            # Of a rank-deficient A the eigenbasis is not unique, and EKFAC depends on it.
            batch=252 if method == "ekfac" else 36,
            kfac={**METHODS[method], **changes, "compute_method": method},
        )
        expected = _alone(settings)
        settings.kfac["gradient_worker_fraction"] = strategy
        worst = max(
            [worst, *(distance(r["parameters"], expected) for r in crew.run(train, world, settings))]
        )
    return f"{worst:.0e}"


_KNOWN: dict[str, list[torch.Tensor]] = {}


def _alone(settings: Settings) -> list[torch.Tensor]:
    settings = replace(settings, wrap="none", kfac=dict(settings.kfac))
    key = repr(settings)
    if key not in _KNOWN:
        _KNOWN[key] = train(settings)["parameters"]
    return _KNOWN[key]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=writable)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    warnings.simplefilter("ignore")
    crew = Crew(4)
    lines = [
        "# Several ranks against one process",
        "",
        "Written by `OMP_NUM_THREADS=1 python benchmarks/distributed_parity.py --output "
        "docs/distributed_parity.md`",
        f"(torch {torch.__version__}, Python {platform.python_version()}, gloo on a CPU, seed 0).",
        "",
        "Largest relative difference of any parameter of a small convolutional network after ten steps,",
        "worst over: " + ", ".join(option for option in OPTIONS if option) + ", and none of these.",
        "A dash: the strategy does not exist for this number of ranks.",
    ]
    kinds = [(w, s, m) for w in ("ddp", "fsdp") for m in METHODS for s in STRATEGIES]
    with tqdm(total=2 * len(kinds) * len(WORLDS)) as progress:
        for dtype in (torch.float64, torch.float32):
            lines += ["", f"## {str(dtype).removeprefix('torch.')}", ""]
            lines += ["| | | | " + " | ".join(f"{w} rank{'s' * (w > 1)}" for w in WORLDS) + " |"]
            lines += ["|" + "---|" * (3 + len(WORLDS))]
            for wrap, strategy, method in kinds:
                cells = []
                for world in WORLDS:
                    cells.append(cell(crew, wrap, strategy, method, world, dtype))
                    progress.update()
                name = {"ddp": "DDP", "fsdp": "FSDP2"}[wrap]
                lines.append(f"| {name} | {method} | {strategy} | " + " | ".join(cells) + " |")
    crew.close()
    text = "\n".join(lines) + "\n"
    if given.output:
        given.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
