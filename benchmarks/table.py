"""Markdown tables of the JSON files that `step_time.py` and `race.py` write.

python benchmarks/table.py benchmarks/results/race.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from compare import workloads_of

PERIOD = 10  # of step_time
_COMPILE = " compilation, wall-clock seconds |"


def race_table(name: str, report: dict[str, Any]) -> str:
    """Steps and seconds to the target, and both over AdamW's."""
    adamw = report["contenders"]["AdamW"]
    compiled = any(one.get("compile_seconds") for one in report["contenders"].values())
    lines = [
        f"**{name}**: {report['about']}; loss {report['target']:g}, at most {report['budget']} steps",
        "",
        f"| | steps | / AdamW's | CPU seconds | / AdamW's | ms a step |{_COMPILE if compiled else ''}"
        " tuned |",
        f"|---|---|---|---|---|---|{'---|' if compiled else ''}---|",
    ]
    for contender, one in report["contenders"].items():
        settings = ", ".join(
            f"{key} {one[key]:g}{' (edge)' if key in one['edges'] else ''}"
            for key in report["grids"][contender]
        )
        count = len(one["steps_of_seeds"])
        if one["steps"] is None:
            cells = [f"not reached ({one['reached']} of {count})", "", "", ""]
        else:
            missed = "" if one["reached"] == count else f" ({one['reached']} of {count} arrive)"
            cells = [f"{one['steps']:.0f}{missed}", _over(one["steps"], adamw["steps"])]
            cells += [f"{one['seconds']:.2f}", _over(one["seconds"], adamw["seconds"])]
        cells += [f"{one['milliseconds_per_step']:{'.2f' if compiled else '.1f'}}"]
        if compiled:
            cells += [f"{one['compile_seconds']:.1f}" if one["compile_seconds"] else ""]
        cells += [settings]
        lines.append(f"| {contender} | {' | '.join(cells)} |")
    lines += [f"| {contender} | failed: {error} |" for contender, error in report["failed"].items()]
    return "\n".join(lines) + "\n"


def race_summary(workloads: dict[str, Any]) -> str:
    """Steps / seconds to the target over AdamW's, all problems beside each other."""
    names = dict.fromkeys(name for report in workloads.values() for name in report["contenders"])
    lines = [f"| | {' | '.join(workloads)} |", f"|{'---|' * (len(workloads) + 1)}"]
    for name in names:
        cells = []
        for report in workloads.values():
            one, adamw = report["contenders"].get(name), report["contenders"]["AdamW"]
            if one is None:
                cells.append("")
            elif one["steps"] is None or adamw["steps"] is None:
                cells.append("not reached")
            else:
                ratios = (_over(one[key], adamw[key]) for key in ("steps", "seconds"))
                cells.append(" / ".join(ratios))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _over(value: float, unit: float | None) -> str:
    return "" if unit is None else f"{value / unit:.2f}"


def floors_of_steps(report: dict[str, Any]) -> str:
    """What a step takes at least, amortised and over AdamW's: bare products and factorizations."""
    floors = report["floors"]
    adamw, fb = report["contenders"]["AdamW"]["amortised"], report["forward_backward"]
    found = {"Kron with dense sides, QEQ": floors["two products"] + floors["Kron's update"] / PERIOD}
    if "rows" in floors:
        update = floors["Kron's update, blocks"] / PERIOD
        found["Kron in blocks, QEQ"] = floors["two products, blocks"] + update
    if "Kron's rotation" in floors:
        for sides, where in (("with dense sides", ""), ("in blocks", ", blocks")):
            rotation = floors[f"Kron's rotation{where}"] / PERIOD
            found[f"Kron {sides}, rotated"] = found[f"Kron {sides}, QEQ"] + rotation
    inverses = floors["inverses"] / PERIOD
    found["K-FAC"] = floors["two products"] + inverses + floors["statistics"]
    found["K-FAC, statistics every 10"] = (
        floors["two products"] + inverses + floors["statistics"] / PERIOD
    )
    if "rows" in floors:
        thin = min(floors["rows"], floors["two products"])
        found["the same, directions from rows"] = thin + inverses + floors["statistics"] / PERIOD
    return "; ".join(f"{name} {(fb + floor) / adamw:.2f}" for name, floor in found.items())


def step_time_table(name: str, report: dict[str, Any]) -> str:
    """Amortised step and each kind of step, over AdamW's."""
    adamw = report["contenders"]["AdamW"]["amortised"]
    floors = report["floors"]
    lines = [
        f"**{name}**: floors, with new factors in every tenth step: {floors_of_steps(report)}",
        "",
        "| | amortised | plain step | with statistics | with new inverses or factors | worst step | "
        "plain step's optimizer / two products | bytes of state a parameter | first step, seconds | "
        "host reads a step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for contender, one in report["contenders"].items():
        steps = one["steps"]
        costly = steps.get("refresh") or steps.get("update")
        cheap = steps.get("plain") or steps.get("statistics") or steps["mixed"]
        cells = [f"{one['amortised'] / adamw:.2f}"]
        cells += [
            f"{kind['total'] / adamw:.2f}" if kind else ""
            for kind in (steps.get("plain"), steps.get("statistics"), costly)
        ]
        cells += [f"{max(kind['worst'] for kind in steps.values()) / adamw:.2f}"]
        cells += [f"{cheap['optimizer'] / floors['two products']:.2f}"]
        cells += [f"{one['bytes_per_parameter']:.1f}", f"{one['first_step']:.2f}"]
        cells += [" / ".join(str(kind.get("host_syncs", "")) for kind in steps.values())]
        lines.append(f"| {contender} | {' | '.join(cells)} |")
    lines += [f"| {contender} | failed: {error} |" for contender, error in report["failed"].items()]
    lines += [
        f"\nStatistics of {contender} over forward and backward: {ratio:.2f}"
        for contender, ratio in report.get("statistics", {}).items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    workloads = workloads_of(parser.parse_args().file)
    if all("target" in report for report in workloads.values()):
        print(race_summary(workloads))
    for name, report in workloads.items():
        print((race_table if "target" in report else step_time_table)(name, report))


if __name__ == "__main__":
    main()
