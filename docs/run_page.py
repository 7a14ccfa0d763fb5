"""Runs the Python blocks of pages and writes what they print into the ``text`` blocks behind them.

    python docs/run_page.py docs/tutorial.md docs/zh/tutorial.md

Blocks of a page share one namespace.  ``<!-- varies -->`` before a ``text`` block says that its figures depend on the
machine: tests run the block and do not compare.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n(?P<varies><!-- varies -->\n\n)?```text\n(?P<out>.*?)^```\n)?", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One block: its code, what the page says it prints, and what it prints."""

    code: str
    promised: str | None
    varies: bool
    printed: str


def run(page: str, name: str = "page") -> list[Block]:
    """Run all blocks of a page's text."""
    names: dict[str, Any] = {"__name__": name}
    found = []
    for match in BLOCK.finditer(page):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(match["code"], name, "exec"), names)
        found.append(Block(match["code"], match["out"], match["varies"] is not None, out.getvalue()))
    return found


def written(page: str, blocks: list[Block]) -> str:
    """The page with what its blocks print."""
    left = iter(blocks)

    def replace(match: re.Match[str]) -> str:
        block = next(left)
        text = f"```python\n{block.code}```\n"
        if block.printed:
            end = "" if block.printed.endswith("\n") else "\n"
            mark = "<!-- varies -->\n\n" if block.varies else ""
            text += f"\n{mark}```text\n{block.printed}{end}```\n"
        return text

    return BLOCK.sub(replace, page)


def main() -> None:
    """Run the pages that are named and write them anew."""
    for name in sys.argv[1:]:
        file = Path(name)
        page = file.read_text(encoding="utf-8")
        file.write_text(written(page, run(page, file.name)), encoding="utf-8")


if __name__ == "__main__":
    main()
