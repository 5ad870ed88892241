"""The benchmark of single pieces: contenders do the same, figures are those of the clock."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import pieces

pytestmark = pytest.mark.usefixtures("settings_of_torch")


@pytest.mark.parametrize(
    ("make", "piece", "tolerance"),
    [
        (pieces.inverses, "inverse of side 512", 1e-3),
        (pieces.grams, "Gram matrix of 256 rows of 512", 1e-4),
    ],
)
def test_contenders_compute_the_same(make, piece, tolerance):
    torch.manual_seed(0)
    ours, theirs = (act() for act in make()[piece].values())
    assert torch.linalg.norm(ours - theirs) < tolerance * torch.linalg.norm(theirs)


def test_the_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(pieces.time, "process_time", lambda: float(next(ticks)))
    monkeypatch.setitem(pieces.PARTS, "geometries", lambda: pieces_of_side_4)
    pieces_of_side_4 = pieces.geometries(4)
    file = tmp_path / "x.json"
    pieces.main(["--only", "geometries", "--rounds", "3", "--json", str(file)])
    record = json.loads(file.read_text())
    assert record["command"] == f"pieces.py --only geometries --rounds 3 --json {file}"
    assert list(record["pieces"]) == ["Kron's update of a 4 x 4 matrix"]
    (found,) = record["pieces"].values()
    assert set(found) >= {"QEQ", "EQ", "QUAD4P"}
    assert all(one == {"median": 1000.0, "least": 1000.0} for one in found.values())
    assert capsys.readouterr().out.count("| 1e+03 | 1e+03 |") == len(found)
