"""The tutorials run, and print what they say they print."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_page
from pages import DOCS

TUTORIALS = [DOCS / "tutorial.md", DOCS / "zh" / "tutorial.md"]


@pytest.mark.parametrize("page", TUTORIALS, ids=["english", "chinese"])
def test_every_block_prints_what_the_page_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = run_page.run(text, page.name)
    assert len(blocks) >= 10
    for block in blocks:
        assert (block.promised is None) == (block.printed == ""), block.code
        if not block.varies and block.promised is not None:
            assert block.printed == block.promised, f"make reference writes {page.name} anew"
        if block.varies and block.promised is not None:
            assert len(block.printed.splitlines()) == len(block.promised.splitlines()), block.code
    assert sum(not block.varies and bool(block.printed) for block in blocks) >= 7


def test_pages_are_written_as_they_are_run() -> None:
    page = (
        "a\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n\nb\n```python\nx = 3\n```\n\n```python\nprint(x)\n```\nc\n"
    )
    blocks = run_page.run(page)
    assert [(block.promised, block.printed) for block in blocks] == [("2\n", "1\n"), (None, ""), (None, "3\n")]
    want = page.replace("2\n", "1\n").replace("print(x)\n```\n", "print(x)\n```\n\n```text\n3\n```\n")
    assert run_page.written(page, blocks) == want
