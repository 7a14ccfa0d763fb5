"""Every method's page on the site ends with its options and its training settings, with the defaults of the code."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
from pages import DOCS

from foretoken.registry import Row, options_of, rows
from foretoken.training.recipes import RECIPES, find_recipe

METHODS = DOCS / "methods"


def page_on_the_site(row: Row) -> str:
    """A method's page as mkdocs gets it from the hook."""
    import hooks

    page = SimpleNamespace(file=SimpleNamespace(src_uri=f"methods/{row.name}.md"))
    return hooks.on_page_markdown((METHODS / f"{row.name}.md").read_text(encoding="utf-8"), page, None, [])


def tables(markdown: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Default and meaning by name, for each generated section of a page."""
    section = r"^## (Options|Training settings)\n\n`[^`]+`:\n\n((?:\|.*\n)+)"
    found: dict[str, dict[str, tuple[str, str]]] = {"Options": {}, "Training settings": {}}
    for title, table in re.findall(section, markdown, re.M):
        _, _, *lines = table.splitlines()
        cells = [re.fullmatch(r"\| `(\w+)` \| (?:`(.*?)`)? ?\| (.+) \|", line) for line in lines]
        assert all(cells), lines
        found[title] = {cell[1]: (cell[2] or "", cell[3]) for cell in cells if cell}
    return found


def as_in_a_spec(default: Any) -> str:
    """A default as a spec string or ``--set`` has it; empty for none."""
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.role}-{row.name}")
def test_options_and_their_defaults_are_those_of_the_code(row: Row) -> None:
    listed = tables(page_on_the_site(row))["Options"]
    code = {name: as_in_a_spec(option.default) for name, option in options_of(row.load()).items()}
    assert {name: default for name, (default, _) in listed.items()} == code
    assert all(len(meaning.split()) >= 3 for _, meaning in listed.values())


@pytest.mark.parametrize("method", RECIPES)
def test_settings_and_their_defaults_are_those_of_the_code(method: str) -> None:
    (row,) = (row for row in rows("drafter") if row.name == method)
    listed, recipe = tables(page_on_the_site(row))["Training settings"], find_recipe(method)
    fields = [field for field in dataclasses.fields(recipe.config_class) if field.name not in recipe.fixed]
    code = {f.name: "" if f.name in recipe.target_defaults else as_in_a_spec(f.default) for f in fields}
    assert {name: default for name, (default, _) in listed.items()} == code
    assert all(len(meaning.split()) >= 3 for _, meaning in listed.values())


def test_tables_are_read() -> None:
    found = [tables(page_on_the_site(row)) for row in rows()]
    assert sum(len(page["Options"]) for page in found) > 300
    assert sum(len(page["Training settings"]) for page in found) > 130
    assert (
        sum(any(char.isdigit() for char in default) for page in found for default, _ in page["Options"].values()) > 150
    )


def test_other_pages_get_no_table() -> None:
    import reference_pages

    assert reference_pages.option_tables("README") == ""
    assert reference_pages.option_tables("greedy") == ""


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.role}-{row.name}")
def test_a_page_does_not_repeat_the_table(row: Row) -> None:
    """A default that a page names in a table of its own goes stale: it belongs into the docstring."""
    text = (METHODS / f"{row.name}.md").read_text(encoding="utf-8")
    assert not re.search(r"^\| *(option|setting|`--set`) *\||^\|[^|\n]*\| *default *\|", text, re.M)


def test_pages_with_options_say_where_they_are_listed() -> None:
    """On the site a page ends with the table; in the repository it names the command."""
    silent = [
        row.name
        for row in rows()
        if len(row.options()) >= 3
        and "foretoken methods" not in (METHODS / f"{row.name}.md").read_text(encoding="utf-8")
    ]
    assert silent == []
