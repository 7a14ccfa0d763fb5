"""The GPU benchmark: a dry run on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from runpy import run_path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], int]:
    monkeypatch.syspath_prepend(str(FOLDER))
    gpu_main: Callable[[Sequence[str]], int] = run_path(str(FOLDER / "gpu.py"))["main"]
    return gpu_main


def test_a_dry_run_on_a_cpu(
    main: Callable[[Sequence[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.jsonl"
    assert main(["--device", "cpu", "--inflate", "20m", "--dtype", "float32", "--out", str(out)]) == 0
    written = capsys.readouterr().out
    assert written == out.read_text()
    first, *cells = map(json.loads, written.splitlines())
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
def test_without_a_gpu(main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr() == (
        "",
        "error: device 'cuda' is not on this machine: choose one of auto, cpu; "
        "to try the script without a GPU: --device cpu --inflate 20m\n",
    )
