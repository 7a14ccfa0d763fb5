"""What the how-to pages, the tutorials and the walk through the articles tell people to run, runs.

Blocks marked ``console`` are run, a page's in order in one empty folder; ``python`` blocks run in one namespace; a
block with a title is a file that the commands read.  ``bash`` blocks name the reader's own models: only parsed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
from pages import DOCS, blocks, commands

from foretoken.cli.main import main

RUN = [
    *sorted((DOCS / "howto").glob("*.md")),
    DOCS / "engine.md",
    DOCS / "index.md",
    DOCS / "structured_output.md",
    *sorted((DOCS / "zh" / "howto").glob("*.md")),
    DOCS / "zh" / "README.md",
    DOCS / "zh" / "articles.md",
]
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.M | re.S)

each_page = pytest.mark.parametrize(
    "page", RUN, ids=lambda page: "-".join(page.relative_to(DOCS).with_suffix("").parts)
)


@each_page
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILE.findall(page.read_text(encoding="utf-8")):
        Path(name).write_text(text, encoding="utf-8")
    for block in blocks(page, "console"):
        for arguments in commands(block):
            errors = io.StringIO()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
                code = main(arguments)
            assert code == 0, f"foretoken {' '.join(arguments)}: {errors.getvalue()[-500:]}"


@each_page
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks(page, "python"):
            exec(compile(block, page.name, "exec"), names)  # blocks build on each other


def test_pages_do_tell_people_to_run_something() -> None:
    assert sum(len(blocks(page, "console")) for page in RUN) >= 6
    assert sum(len(blocks(page, "python")) for page in RUN) >= 5
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
