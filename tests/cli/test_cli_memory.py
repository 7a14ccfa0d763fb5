"""Keeping freed memory asks the system for fewer pages and changes nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foretoken.cli.train_options import keep_freed_memory

# glibc adapts by itself up to 32 MB, so the blocks are larger.
PROGRAM = """
import resource, sys
import torch
from foretoken.cli.train_options import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "on" else None
torch.set_num_threads(1)
def work():
    return float((torch.ones(10_000_000) + 1).sum())
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(sum(work() for _ in range(10)), kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(mode: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have other allocators")
def test_freed_memory_is_used_again() -> None:
    total, kept, faults = run("on")
    usual, _, more = run("off")
    assert total == usual
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    assert int(faults) < int(more) / 4


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
