"""Defaults in the tables of the methods' pages are those of the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from foretoken.registry import Row, options_of, rows

PAGES = Path(__file__).parents[2] / "docs" / "methods"


def page_defaults(row: Row) -> dict[str, float]:
    """Numbers that a page's table names as defaults, by option."""
    page, defaults = PAGES / f"{row.name}.md", {}
    for line in page.read_text().splitlines() if page.exists() else ():
        cells = re.match(r"\| *(`\w+`(?:, `\w+`)*) *\| *([^|]*?) *\|", line)
        names = re.findall(r"`(\w+)`", cells[1]) if cells else []
        values = cells[2].split(", ") if cells else []
        if len(names) == len(values):
            defaults |= {n: float(v) for n, v in zip(names, values, strict=True) if re.fullmatch(r"[\d.]+(e-?\d+)?", v)}
    return defaults


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.role}-{row.name}")
def test_numbers_are_those_of_the_code(row: Row) -> None:
    module, name = row.target.split(":")
    options = options_of(getattr(importlib.import_module(f"foretoken.{module}"), name))
    code = {n: options[n].default for n in page_defaults(row) if n in options}
    # None and 0 stand for what the page's number is made of: places that a network was trained for, say.
    wrong = {
        n: (page_defaults(row)[n], default)
        for n, default in code.items()
        if default and page_defaults(row)[n] != default
    }
    assert not wrong


def test_tables_are_read() -> None:
    assert sum(len(page_defaults(row)) for row in rows()) > 40
