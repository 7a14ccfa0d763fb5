"""The examples and the documentation's Python blocks run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(code: list[str]) -> str:
    """Run a script in a fresh interpreter; its output, or a failure with its errors."""
    done = subprocess.run(
        [sys.executable, *code], capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path: Path) -> None:
    out = run([str(path)])
    assert out.strip()
    assert "identical: False" not in out
    assert ", 0% of drafts" not in out, "nothing was drafted, or nothing of it is right"


def test_examples_are_short() -> None:
    assert EXAMPLES
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 60, path.name


def test_the_first_drafter_of_the_page_runs_alone(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "write_a_drafter.md").read_text(), re.S)
    script = tmp_path / "page.py"
    script.write_text(blocks[0])
    assert float(run([str(script)])) >= 1.0


def test_readme_python_runs_on_the_built_in_model(tmp_path: Path) -> None:
    first = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    script = tmp_path / "readme.py"
    script.write_text(first.replace("path/or/hub-id", "builtin"))
    assert run([str(script)]).strip()


def test_readme_names_real_make_targets_and_commands() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"^make (\w+)", text, re.M))
    assert {"demo", "test"} <= named <= targets
    shell = re.search(r"^\$ foretoken (generate .*)$", text, re.M)
    assert shell is not None
    command = shlex.split(shell.group(1).replace("path/or/hub-id", "builtin"))
    out = run(["-m", "foretoken", *command, "--max-new-tokens", "8", "--repeat", "1"])
    assert "output identical: yes" in out
