"""The cards of the repository are whole, and their page filters and sorts in a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import made_parts
import pytest
from page_browser import browser, executable

from foretoken.lab.report.cards.card import read_cards
from foretoken.lab.report.cards.page import render

needs_browser = pytest.mark.skipif(executable() is None, reason="no chromium here: apt install chromium")


def test_our_cards_are_whole_and_name_no_folder() -> None:
    cards, faults = read_cards(made_parts.CARDS)
    assert cards and faults == []
    for file in made_parts.CARDS.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r'"[^"]*(/home|/work|/root|/tmp|\\\\)', text), file.name
    assert made_parts.cards_page().count("<tr") == 1 + sum(len(card.figures) for _, card in cards)


@needs_browser
def test_the_page_filters_and_sorts(tmp_path: Path) -> None:
    file = tmp_path / "cards.html"
    name, card = read_cards(made_parts.CARDS)[0][0]
    figure = card.figures[0]
    others = [{**figure, "method": method, "speedup": speed} for method, speed in (("eagle3", 2.0), ("suffix", 0.5))]
    file.write_text(render([(name, card), ("others", replace(card, figures=others))]), encoding="utf-8")
    with browser() as tab:
        for width in (1200, 400):
            tab.size(width)
            tab.open(file.as_uri())
            assert tab.run("document.documentElement.scrollWidth <= window.innerWidth"), width
        rows = "[...document.querySelectorAll('tbody tr')]"
        everything = tab.run(f"{rows}.length")
        method = tab.run("document.querySelector('tbody tr').dataset.method")
        tab.run(
            "(() => { const chosen = document.querySelector('select[data-filter=method]');"
            f"chosen.value = '{method}'; chosen.dispatchEvent(new Event('change')); }})()"
        )
        shown = tab.run(f"{rows}.filter((row) => !row.hidden).map((row) => row.dataset.method)")
        assert 0 < len(shown) < everything and set(shown) == {method}
        assert tab.run("[...document.querySelectorAll('.bars li')].filter((bar) => !bar.hidden).length") == len(shown)
        assert tab.run("document.getElementById('shown').textContent") == f"{len(shown)} of {everything} shown"
        tab.run("document.querySelectorAll('th button')[2].click()")
        speeds = tab.run(f"{rows}.map((row) => Number(row.cells[2].textContent))")
        assert speeds == sorted(speeds)
        assert tab.complaints == []
