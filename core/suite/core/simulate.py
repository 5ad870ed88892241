"""Prints what each strategy would cost on a model, so that one can be chosen before renting machines.

    python -m suite.core.simulate resnet50 --worlds 4 16 64 256 1024
    python -m suite.core.simulate gpt --layers 12 --width 768
    python -m suite.core.simulate layers.json

A JSON file is a list of [d_in, d_out] or of {"sizes": [d_in, d_out], "diagonal": [false, false],
"blocks": 1}, one for each layer; d_in counts the bias.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from suite.core.layer_lists import gpt, resnet50
from suite.core.placement import LayerShape, plan_placement
from suite.core.traffic import footprint

HEADER = (
    "world",
    "workers",
    "memory/rank",
    "of it inverses",
    "update sends",
    "refresh receives",
    "step receives",
    "collectives",
    "makespan",
    "speed-up",
)


def read_layers(path: str) -> list[LayerShape]:
    """The layers of a JSON file, see the module."""
    found = []
    for entry in json.loads(Path(path).read_text()):
        if isinstance(entry, list):
            entry = {"sizes": entry}
        diagonal = tuple(entry.get("diagonal", (False, False)))
        found.append(LayerShape(tuple(entry["sizes"]), diagonal, entry.get("blocks", 1)))
    return found


def report(
    layers: Sequence[LayerShape],
    worlds: Sequence[int],
    *,
    strategy: str = "compute",
    colocate_factors: bool = True,
    eigen: bool = True,
    symmetric: bool = False,
) -> list[tuple[str, ...]]:
    """Rows under HEADER: MEM_OPT, a quarter and a half of the ranks, and COMM_OPT for each world."""
    alone = sum(layer.cost(side, "compute") for layer in layers for side in ("A", "G"))
    rows: list[tuple[str, ...]] = []
    for world in worlds:
        for workers in sorted({1, world // 4, world // 2, world} - {0}):
            if world % workers:
                continue
            plan = plan_placement(
                layers,
                world,
                workers,
                strategy=strategy,  # type: ignore[arg-type]
                colocate_factors=colocate_factors or workers == 1,
            )
            cost = footprint(layers, plan, eigen=eigen, symmetric=symmetric)
            loads = [0] * world
            for (i, side), owner in plan.owner_of.items():
                loads[owner] += layers[i].cost(side, "compute")
            calls = (cost.update.collectives, cost.refresh.collectives, cost.step.collectives)
            rows.append(
                (
                    str(world),
                    str(workers),
                    _bytes(cost.memory),
                    _bytes(cost.inverses),
                    _bytes(cost.update.sent),
                    _bytes(cost.refresh.received),
                    _bytes(cost.step.received),
                    "/".join(map(str, calls)),
                    f"{max(loads) / 1e9:.1f}e9",
                    f"{alone / max(loads):.1f}",
                )
            )
    return rows


def _bytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MB"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m suite.core.simulate",
        description="What K-FAC's distributed strategies cost, from the plan alone.",
    )
    parser.add_argument("model", help="resnet50, gpt, or a JSON file of layers")
    parser.add_argument("--worlds", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--layers", type=int, default=12, help="of gpt")
    parser.add_argument("--width", type=int, default=768, help="of gpt")
    parser.add_argument("--assignment-strategy", choices=("compute", "memory"), default="compute")
    parser.add_argument("--apart", action="store_true", help="colocate_factors=False")
    parser.add_argument("--inverse", action="store_true", help="inverses instead of eigenbases")
    parser.add_argument("--symmetry-aware", action="store_true")
    given = parser.parse_args(arguments)
    if given.model == "resnet50":
        layers = resnet50()
    elif given.model == "gpt":
        layers = gpt(given.layers, given.width)
    else:
        layers = read_layers(given.model)
    rows = report(
        layers,
        given.worlds,
        strategy=given.assignment_strategy,
        colocate_factors=not given.apart,
        eigen=not given.inverse,
        symmetric=given.symmetry_aware,
    )
    lines = [HEADER, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(
        "\nfloat32, of the busiest rank: what it sends at a factor update, and receives at a refresh\n"
        "and at each step; collectives for the same three. makespan: sum of n^3 of its factorizations;\n"
        "speed-up: over one rank."
    )


if __name__ == "__main__":
    main()
