"""What changed between two JSON files of `step_time.py` or `race.py`, number by number.

    python benchmarks/compare.py before.json after.json [--least 0.05]

Prints after / before of every number that both have and that moved by more than `--least`, largest
change first, and what only one of them has. Times of different runs are compared as multiples of
AdamW's in the same run, which is what a loaded machine leaves comparable.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def numbers(record: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], float]:
    """All numbers of nested dicts and lists, by their path."""
    if isinstance(record, bool) or record is None or isinstance(record, str):
        return {}
    if isinstance(record, int | float):
        return {path: float(record)}
    items = record.items() if isinstance(record, dict) else enumerate(record)
    return {k: v for key, value in items for k, v in numbers(value, (*path, str(key))).items()}


_TIMES = (
    *("total", "optimizer", "worst", "amortised", "first_step", "forward_backward"),
    *("seconds", "milliseconds_per_step"),
)
_DETAILS = {
    "cpu_seconds",
    "grids",
    "tuning",
    "losses",
    "last_losses",
    "steps_of_seeds",
    "seconds_of_seeds",
}


def comparable(reports: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """The workloads' numbers; seconds as multiples of AdamW's amortised step, or of its whole race."""
    found: dict[tuple[str, ...], float] = {}
    for name, report in reports.items():
        adamw = report["contenders"]["AdamW"]
        unit = adamw.get("amortised") or adamw.get("seconds") or 1.0
        for path, value in numbers(report, (name,)).items():
            if not _DETAILS.isdisjoint(path):
                continue
            time = path[-1] in _TIMES or "floors" in path
            found[path] = value / unit if time else value
    return found


def workloads_of(path: Path) -> dict[str, Any]:
    """What a file of `step_time.py` or `race.py` has, by workload; SystemExit if it is none."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} must be a JSON file: {error}") from error
    reports = record.get("workloads") if isinstance(record, dict) else None
    if not isinstance(reports, dict):
        raise SystemExit(f"{path} must be a file of step_time.py or race.py, which have 'workloads'")
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--least", type=float, default=0.05, help="smallest relative change shown")
    arguments = parser.parse_args()
    reports = [workloads_of(path) for path in (arguments.before, arguments.after)]
    if reports[0].keys().isdisjoint(reports[1]):
        raise SystemExit(f"no workload is in both: {sorted(reports[0])} and {sorted(reports[1])}")
    before, after = map(comparable, reports)
    rows = []
    for path in before.keys() & after.keys():
        old, new = before[path], after[path]
        ratio = new / old if old else (1.0 if new == old else float("inf"))
        change = max(ratio, 1 / ratio) - 1 if ratio > 0 else float("inf")
        if change > arguments.least:
            rows.append((change, path, old, new, ratio))
    for _, path, old, new, ratio in sorted(rows, reverse=True):
        print(f"{ratio:8.3f}  {old:11.4g} -> {new:11.4g}  {' / '.join(path)}")
    for title, only in (("gone", before.keys() - after.keys()), ("new", after.keys() - before.keys())):
        for path in sorted(only):
            print(f"{title:>8}  {' / '.join(path)}")
    if not rows:
        print(f"nothing moved by more than {arguments.least:.0%}")


if __name__ == "__main__":
    main()
