"""The field's words: those that the glossary has replaced do not come back in names, docs, messages or tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".md", ".js", ".html", ".yaml", ".yml", ".toml")
OLD = {
    r"(?<![a-z])laws?(?![a-z])": "distribution, probabilities",
    r"(?<![a-z])dear(er|est)?(?![a-z])": "expensive",
    r"(?<![a-z])hazards?(?![a-z])": "acceptance statistics",
    r"(?<![a-z])price[sd]?(?![a-z])": "cost",
    r"(?<![a-z])pairing(?![a-z])": "compatibility",
    r"[Hh]ow far drafts (stand|stood)\b": "how many draft tokens are accepted",
}
FILES = sorted(
    path
    for folder in ("src", "tests", "docs", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in SUFFIXES and "zoo" not in path.parts and "egg-info" not in str(path) and path != Path(__file__)
)


@pytest.mark.parametrize("old", OLD)
def test_replaced_words_do_not_come_back(old: str) -> None:
    pattern = re.compile(old, re.IGNORECASE)
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in [*FILES, ROOT / "README.md"]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not hits, f"say {OLD[old]}"


def test_the_patterns_find_what_they_are_for() -> None:
    samples = ["the law of", "a dearer step", "hazards", "its price", "pairing.py", "how far drafts stand"]
    assert all(any(re.search(old, sample, re.IGNORECASE) for old in OLD) for sample in samples)
    assert not any(re.search(old, sample, re.IGNORECASE) for old in OLD for sample in ("flaw", "a token stands for"))


def test_only_documents_that_exist_are_cited() -> None:
    """A page is one of this repository; a section is one of a paper that is named."""
    pages = {path.name for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))}
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in FILES
        if path.suffix == ".py" and path.is_relative_to(ROOT / "src")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"of the specification|\bspec [0-9]", line)
        or any(name not in pages for name in re.findall(r"([\w-]+\.md)\b", line.split("https://")[0]))
    ]
    assert not hits
