"""The GPU benchmark: a dry run on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_a_dry_run_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    done = run("--device", "cpu", "--inflate", "20m", "--dtype", "float32", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == out.read_text()
    first, *cells = map(json.loads, done.stdout.splitlines())
    assert first["kind"] == "machine" and first["dry_run"] and "CPU" in first["device"]
    assert [cell["arm"] for cell in cells] == [
        "plain, eager",
        "plain, graphed",
        "Transformers, eager",
        "Transformers, static cache and compile",
        "model,k=6, eager",
        "model,k=6, graphed",
    ]
    for cell in cells:
        assert cell["identical"] == "1 of 1" and cell["dry_run"] and cell["tokens_per_s"] > 0
        assert cell["captured_shapes"] == 0 and not cell["compiled"]  # nothing may look as if it ran on a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: device 'cuda' is not on this machine: choose one of auto, cpu; "
        "to try the script without a GPU: --device cpu --inflate 20m\n"
    )
