"""The benchmarks' options, and what their files say of where they are from."""

import argparse
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import options
import versions


def test_numbers_of_things_are_whole_and_at_least_one():
    assert options.whole("3") == 3
    for text in ("0", "-2"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"must be >= 1, got {text}"):
            options.whole(text)
    with pytest.raises(ValueError, match="invalid literal"):
        options.whole("2.5")


def test_files_must_be_possible(tmp_path):
    assert options.writable(str(tmp_path / "x.json")) == tmp_path / "x.json"
    assert options.writable("x.json") == Path("x.json")
    for impossible in (tmp_path, tmp_path / "nowhere" / "x.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a file in a folder that exists"):
            options.writable(str(impossible))


def test_files_name_versions_and_the_commit(tmp_path, monkeypatch):
    found = versions.versions("numpy", "no-such-package")
    assert found["python"] == platform.python_version()
    assert found["numpy"] == importlib.metadata.version("numpy")
    assert "no-such-package" not in found
    asked = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(
        asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if commit.returncode:  # not from a repository
        assert "suite" not in found
    else:
        assert commit.stdout.startswith(found["suite"].removesuffix("-dirty"))
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert versions._commit() == {}
