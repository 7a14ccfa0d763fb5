"""Parts of pages that are made while the site is built: the simulator's curves, and the page of benchmark cards."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from foretoken.lab.report.cards.card import read_cards
from foretoken.lab.report.cards.page import render
from foretoken.lab.report.page import embedded

DOCS = Path(__file__).parent
CURVES = DOCS / "figures" / "curves.json"
CARDS = DOCS / "cards"
CARDS_PAGE = "cards/index.html"


def curves() -> list[dict[str, Any]]:
    """The measured curves: ``model``, ``how`` it was run, ``machine``, and ``ms`` by tokens in a call."""
    found: list[dict[str, Any]] = json.loads(CURVES.read_text(encoding="utf-8"))
    return found


def curves_script() -> str:
    """The curves inside the page, so that it works from a disk too, and the simulator behind them."""
    data = f'<script type="application/json" id="sim-curves">{embedded(curves())}</script>'
    return f'{data}\n<script src="assets/simulator.js"></script>'


def curves_table() -> str:
    """The curves in Markdown, a table per machine."""
    parts = []
    for machine, group in groupby(curves(), key=lambda curve: curve["machine"]):
        rows = list(group)
        counts = list(rows[0]["ms"])
        parts += [f"{machine}; by tokens in the call:\n", f"| model | run by | {' | '.join(counts)} |"]
        parts.append("|---" * (len(counts) + 2) + "|")
        for curve in rows:
            cells = [curve["model"], curve["how"], *(f"{curve['ms'][n]:g}" for n in counts)]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def simulator(markdown: str) -> str:
    """The simulator's page with what its comments stand for."""
    for mark, made in (("<!-- curves -->", curves_script()), ("<!-- curve table -->", curves_table())):
        markdown = markdown.replace(mark, made)
    return markdown


def cards_page() -> str:
    """The page of the cards in ``docs/cards``.

    Raises:
        ValueError: one of them is not as it was written.
    """
    cards, faults = read_cards(CARDS)
    if faults:
        raise ValueError("; ".join(faults))
    return render(cards)
