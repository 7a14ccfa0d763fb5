"""The page of a folder of cards: a table with filters and a chart, in one self-contained file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.io.files import write_text
from foretoken.lab.report.cards.card import Card, read_cards
from foretoken.lab.report.markup import Markup, join, tag
from foretoken.lab.report.page import resource, whole_page
from foretoken.lab.report.sections import sortable

FILTERS = ("cpu", "model", "method")
COLUMNS = {
    "model": "model", "method": "method", "speedup": "speed-up", "interval": "95 %", "speed": "tokens/s",
    "plain": "plain, tokens/s", "equal": "same text", "length": "tokens a round", "first": "prefill or first token, ms",
    "setting": "setting", "cpu": "CPU", "threads": "threads", "drafter": "drafter",
    "versions": "foretoken / torch", "written": "date", "card": "card",
}  # fmt: skip


@dataclass(frozen=True)
class CardRow:
    """One figure of one card: its table cells and its speed-up."""

    cells: dict[str, str]
    speedup: float
    is_equal: bool


def write_page(folder: Path, out: Path) -> tuple[int, int, list[str]]:
    """Write the page of a folder of cards; returns the numbers of cards and rows, and a line for each skipped file.
    Raises ``ValueError`` if no card is valid."""
    cards, faults = read_cards(folder)
    if not cards:
        raise ValueError("; ".join(faults))
    try:
        write_text(out, render(cards, [line.removeprefix(f"{folder}{os.sep}") for line in faults]))
    except OSError as error:
        raise ValueError(f"the page cannot be written to {out}: {error.strerror}") from None
    return len(cards), sum(len(card.figures) for _, card in cards), faults


def render(cards: Sequence[tuple[str, Card]], faults: Sequence[str] = ()) -> str:
    """The page of cards by name; ``faults`` are the lines about skipped files."""
    rows = sorted((row for name, card in cards for row in rows_of(name, card)), key=lambda row: -row.speedup)
    notes = [tag("p", f"left out: {line}", class_="note") for line in faults]
    body = join(
        tag("h1", "Speculative decoding, measured"),
        tag("p", f"{len(cards)} cards, {len(rows)} measurements. Each compares a method with plain decoding of the "
            "same model in one interleaved run; “same text” counts the outputs that equal plain decoding’s. Compare "
            "rows of one card; machines differ in load and threads.", class_="how"),
        *notes,
        _filters(rows),
        tag("h2", "Speed-up over plain decoding"),
        _chart(rows),
        tag("h2", "All figures"),
        tag("p", "A click on a heading sorts.", class_="how"),
        _table(rows),
    )  # fmt: skip
    return whole_page(
        "foretoken: benchmark cards", body, css=resource("cards/cards.css"), js=resource("cards/cards.js")
    )


def matrix_name(matrix: Sequence[str]) -> str:
    """The most important matrix or vector instruction set of a CPU, in usual spelling."""
    by_importance = ("amx_fp16", "amx_bf16", "avx512_fp16", "avx512_bf16", "avx512f", "avx2")
    best = next((name for name in by_importance if name in matrix), None)
    return "no AVX2" if best is None else best.upper().replace("_", "-").removesuffix("F")


def rows_of(name: str, card: Card) -> list[CardRow]:
    model, machine = card.model, card.machine
    cpu = ", ".join([f"{machine['cpu']} ({matrix_name(machine['matrix'])})", *machine["gpus"]])
    weights = f"{model['kind']}, {model['quantize'] or model['weights']}, {model['forward']} forward"
    if model["inflate"] is not None:
        weights += f", inflated to {model['inflate']}"
    if model["backend"] == "llama.cpp":
        weights += ", run by llama.cpp"
    rows = []
    for figure in card.figures:
        low, high = figure["speedup_ci95"]
        first_s = figure["ttft_s"] if figure["ttft_s"] is not None else figure["prefill_s"]
        cells = {
            "model": f"{model['name']} ({weights})",
            "method": figure["method"],
            "drafter": figure["drafter"],
            "cpu": cpu,
            "threads": str(machine["threads"]),
            "setting": f"T={figure['temperature']:g}, batch {figure['batch']}",
            "plain": f"{figure['plain_tokens_per_s']:.1f}",
            "speed": f"{figure['tokens_per_s']:.1f}",
            "speedup": f"{figure['speedup']:.2f}",
            "interval": "-" if low == high else f"{low:.2f} to {high:.2f}",
            "length": "" if figure["tokens_per_round"] is None else f"{figure['tokens_per_round']:.2f}",
            "first": "" if first_s is None else f"{1000 * first_s:.0f}",
            "equal": equality(figure["equality"]),
            "versions": f"{card.versions['foretoken']} / {card.versions['torch']}",
            "written": card.written,
            "card": name,
        }
        rows.append(CardRow(cells, figure["speedup"], not (figure["equality"] or {}).get("differences", 0)))
    return rows


def equality(counts: Mapping[str, int] | None) -> str:
    """Number of texts that equal plain decoding's, in words."""
    if counts is None:
        return "need not be"
    total = counts["identical"] + counts["ties"] + counts["differences"]
    words = [f"{counts['identical']} of {total}"]
    if counts["ties"]:
        words.append(f"{counts['ties']} numerical tie{'s' * (counts['ties'] != 1)}")
    if counts["differences"]:
        words.append(f"{counts['differences']} DIFFER")
    return ", ".join(words)


def _data(row: CardRow) -> dict[str, Any]:
    return {f"data_{name}": row.cells[name] for name in FILTERS}


def _filters(rows: Sequence[CardRow]) -> Markup:
    selects = []
    for name in FILTERS:
        values = sorted({row.cells[name] for row in rows})
        options = [tag("option", "all", value=""), *(tag("option", value, value=value) for value in values)]
        selects.append(tag("label", COLUMNS[name], " ", tag("select", *options, data_filter=name)))
    return tag("div", *selects, tag("span", id="shown", role="status"), class_="controls")


def _chart(rows: Sequence[CardRow]) -> Markup:
    end = max(1.0, *(row.speedup for row in rows))
    bars = []
    for row in rows:
        label = f"{row.cells['method']} · {row.cells['model']} · {row.cells['setting']} · {row.cells['cpu']}"
        style = f"--x: {row.speedup / end:.4f}; --one: {1 / end:.4f}"
        kind = "gain" if row.speedup >= 1 else "loss"
        bar = tag("span", tag("span", class_=f"fill {kind}"), tag("b", row.cells["speedup"]), class_="bar", style=style)
        bars.append(tag("li", tag("span", label, class_="what"), bar, class_="shown", **_data(row)))
    return tag("ul", *bars, class_="bars", aria_label="speed-up by method, model and machine; the line is 1")


def _table(rows: Sequence[CardRow]) -> Markup:
    heads = [tag("th", tag("button", title, type="button"), class_=_class(name)) for name, title in COLUMNS.items()]
    lines = []
    for row in rows:
        cells = [
            tag("td", row.cells[name], class_=_class(name) if name != "equal" or row.is_equal else "words bad")
            for name in COLUMNS
        ]
        lines.append(tag("tr", *cells, class_="shown", **_data(row)))
    return sortable(heads, lines)


def _class(name: str) -> str | None:
    return None if name in ("threads", "plain", "speed", "speedup", "length", "first") else "words"
