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
from typing import Any

from suite.core.checks import check_integer
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
    """The layers of a JSON file, see the module.

    Raises:
        ValueError, TypeError: not a file, not JSON, or not such a list.
    """
    try:
        entries = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model must be resnet50, gpt, or a JSON file of layers: {error}") from error
    if not (isinstance(entries, list) and entries):
        raise ValueError(f"layers of {path} must be a list that is not empty, got {entries!r}")
    return [_layer(entry) for entry in entries]


def _layer(entry: Any) -> LayerShape:
    given = {"sizes": entry} if isinstance(entry, list) else entry
    known = {"sizes", "diagonal", "blocks"}
    if not (isinstance(given, dict) and "sizes" in given and given.keys() <= known):
        raise ValueError(
            "a layer must be [d_in, d_out] or have 'sizes', and perhaps 'diagonal' and 'blocks', "
            f"got {entry!r}"
        )
    sizes, diagonal = given["sizes"], given.get("diagonal", [False, False])
    for name, pair, kind in (("sizes", sizes, int), ("diagonal", diagonal, bool)):
        if not (isinstance(pair, list) and [type(x) for x in pair] == [kind, kind]):
            raise ValueError(f"{name} of a layer must be a pair of {kind.__name__}, got {pair!r}")
    blocks = given.get("blocks", 1)
    for count in (*sizes, blocks):
        check_integer("sizes and blocks of a layer", count, at_least=1)
    return LayerShape(tuple(sizes), tuple(diagonal), blocks)


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


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {number}")
    return number


def _bytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MB"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m suite.core.simulate",
        description="What K-FAC's distributed strategies cost, from the plan alone.",
    )
    parser.add_argument("model", help="resnet50, gpt, or a JSON file of layers")
    parser.add_argument("--worlds", type=_count, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--layers", type=_count, default=12, help="of gpt")
    parser.add_argument("--width", type=_count, default=768, help="of gpt")
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
        try:
            layers = read_layers(given.model)
        except (TypeError, ValueError) as error:
            parser.error(str(error))
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
