"""A chart as an SVG file of its own: title and legend inside, colours of light and dark mode, nothing loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence

from foretoken.lab.report.charts import Chart
from foretoken.lab.report.markup import Markup, tag
from foretoken.lab.report.page import palette, resource
from foretoken.lab.report.svg import WIDTH, parts_of

MARGIN, ROW, LETTER, KEY = 14.0, 22.0, 7.6, 30.0
STYLE = """
svg { font: 14px system-ui, sans-serif; } .back { fill: var(--page); stroke: var(--edge); }
.head { font-weight: 600; font-size: 15px; }
"""


def picture(chart: Chart, words: str) -> str:
    """The SVG of a chart.

    Args:
        chart: what is drawn; its title stands above.
        words: what somebody who cannot see it is told.
    """
    drawn, entries = parts_of(chart)
    (height,) = re.findall(r'viewBox="0 0 [\d.]+ ([\d.]+)"', drawn)[:1]
    legend, top = _legend(entries, MARGIN + 26)
    wide, high = WIDTH + 2 * MARGIN, top + float(height) + 6
    plot = tag("g", drawn, transform=f"translate({MARGIN:g},{top:g})")
    back = tag("rect", x=0.5, y=0.5, width=wide - 1, height=high - 1, rx=10, class_="back")
    head = tag("text", chart.title, x=MARGIN, y=MARGIN + 12, class_="head")
    return tag(
        "svg", tag("style", Markup(palette() + _rules("tree.css", 1) + _rules("report.css") + STYLE)), back, head,
        *legend, plot, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {wide:g} {high:g}", width=f"{wide:g}",
        height=f"{high:g}", role="img", aria_label=words,
    ) + "\n"  # fmt: skip


def _legend(entries: Sequence[tuple[str, Markup]], y: float) -> tuple[list[Markup], float]:
    """The legend's parts, in as many rows as they need, and where it ends."""
    parts, x = [], MARGIN
    for name, symbol in entries:
        broad = KEY + LETTER * len(name) + 14
        if x + broad > WIDTH + MARGIN and x > MARGIN:
            x, y = MARGIN, y + ROW
        parts.append(tag("g", symbol, transform=f"translate({x:g},{y:g})"))
        parts.append(tag("text", name, x=f"{x + KEY:g}", y=f"{y + 13:g}"))
        x += broad
    return parts, y + ROW + 4 if entries else y


def _rules(name: str, colours: int = 0) -> str:
    """The lines of a style sheet that charts need."""
    lines = resource(name).splitlines()
    if colours:  # variables only, which come first
        end = next(i for i, line in enumerate(lines) if line.startswith(".edge"))
        return "\n".join(lines[1:end]) + "\n"
    return "\n".join(line for line in lines if line.startswith(("svg text", "svg .", ".p0", ".p2"))) + "\n"
