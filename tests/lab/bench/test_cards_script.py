"""The script that makes a machine's cards measures the models that are there, names the others, and keeps old cards."""

from __future__ import annotations

import os
import subprocess
from itertools import pairwise
from pathlib import Path

from foretoken.lab.bench.specs import check_arm

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "cards.sh"


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with a ``foretoken`` that writes down how it was called."""
    fake = tmp_path / "fake"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    fake.chmod(0o755)
    env = {**os.environ, "FORETOKEN": str(fake), "OUT": str(tmp_path / "cards")}
    return subprocess.run([str(SCRIPT), *arguments], env=env, capture_output=True, text=True)


def test_what_is_there_is_measured(tmp_path: Path) -> None:
    (tmp_path / "smollm2.gguf").touch()
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "builtin-here.json").touch()
    result = run(tmp_path, "here", str(tmp_path))
    assert result.returncode == 0, result.stderr
    (call,) = (tmp_path / "calls").read_text().splitlines()
    words = call.split()
    assert words[:3] == ["bench", "--target", f"{tmp_path}/smollm2.gguf"]
    assert words[-2:] == ["--card", f"{tmp_path}/cards/smollm2-gguf-here.json"]
    for name, arm in pairwise(words):
        if name == "--drafter":
            check_arm(arm)
    assert "builtin-here.json is there: kept" in result.stdout
    assert result.stdout.count("not measured") == 5


def test_it_says_how_it_is_called(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 2 and "benchmarks/cards.sh MACHINE FOLDER" in result.stderr
