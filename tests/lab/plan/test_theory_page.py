"""``docs/theory.md`` runs, and prints what it says it prints."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from foretoken.cli.main import main

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "theory.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
COMMANDS = re.findall(r"^foretoken (plan .*)$", PAGE, re.M)


def test_every_print_gives_its_comment() -> None:
    names: dict[str, Any] = {}
    promised, printed = [], io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in BLOCKS:
            exec(compile(block, "theory.md", "exec"), names)  # blocks build on each other
            promised += [line.rpartition("  # ")[2] for line in block.splitlines() if line.startswith("print(")]
    assert len(promised) > 12
    assert printed.getvalue().splitlines() == promised


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(command.replace("plan.png", str(tmp_path / "plan.png")))
    assert main(arguments) == 0
    assert "Draft k=" in capsys.readouterr().out
    assert ("--plot" in command) == (tmp_path / "plan.png").exists()


def test_there_are_commands_and_pictures() -> None:
    assert len(COMMANDS) == 3
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", PAGE)
    for picture in pictures:
        if picture.endswith(".png"):
            assert (DOCS / picture).read_bytes().startswith(b"\x89PNG")
    assert sum(picture.endswith(".svg") for picture in pictures) >= 6
