"""The documentation's pages: links, anchors, commands and code blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

PAGES = sorted([ROOT / "README.md", *(p for p in ROOT.glob("*.md") if p.name != "README.md"), *DOCS.rglob("*.md")])
BLOCK = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def prose(page: Path) -> str:
    """A page without its fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    """Targets of the links and pictures of a page."""
    return LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and the site make them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    names = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        words = re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        names.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words)))
    return names


def commands(text: str) -> Iterator[list[str]]:
    """The ``foretoken`` commands of a block, without the name, with or without a prompt; a backslash joins lines."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        words = line.removeprefix("$ ")
        if not words.startswith("foretoken "):
            continue
        command = re.split(r"\s[|&>]\s?|\s#\s", words)[0]
        yield shlex.split(command)[1:]
