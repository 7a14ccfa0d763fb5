"""An SVG picture of a run: the text as a ribbon, and one round with its tree and reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from foretoken.lab.report.markup import Markup, tag
from foretoken.lab.report.page import resource
from foretoken.lab.report.show.run import Round, Shown, Word
from foretoken.lab.report.show.texts import visible, width
from foretoken.lab.report.show.tree import LETTER, draw_tree

MARGIN = 16.0
LINE = 22.0
LEAST = 660.0
"""Minimum width of the picture, in pixels."""

STYLE = """
svg { font: 13px system-ui, sans-serif; } .panel { fill: var(--panel); stroke: var(--edge); }
.soft { fill: var(--soft); } .title { font-weight: 600; }
.ribbon { font: 13px ui-monospace, monospace; white-space: pre; }
.back.accepted { fill: var(--accepted); } .back.recovered { fill: var(--recovered); }
.back.bonus { fill: var(--bonus); }
.back.plain, .back.prompt { fill: none; } svg .prompt { fill: var(--soft); }
"""


def render(run: Shown, round_index: int) -> str:
    """The picture of a round.  Raises ``ValueError`` if there is no such round."""
    if not 0 <= round_index < len(run.rounds):
        raise ValueError(f"round {round_index + 1} does not exist: the run has {len(run.rounds)}")
    round_ = run.rounds[round_index]
    tree = draw_tree(round_.nodes, round_.next_token, round_.origin)
    wide = max(LEAST, tree.width + 2 * MARGIN + 16)
    y = MARGIN + 12
    parts = [text(MARGIN, y, " · ".join(value for _, value in run.facts), "soft")]
    ribbon, y = _ribbon(run, y + 12, wide)
    parts += ribbon
    parts.append(text(MARGIN, y + 20, f"Round {round_index + 1}", "title"))
    lines = wrapped(round_.caption, int((wide - 2 * MARGIN) / 6.6))
    for i, line in enumerate(lines):
        parts.append(text(MARGIN, y + 40 + 18 * i, line, "soft"))
    y += 40 + 18 * len(lines)
    parts.append(tag("g", tree.markup, transform=f"translate({MARGIN:.0f},{y:.0f})"))
    y += tree.height + 14
    explained, y = reasons(round_, y)
    legend, y = _legend(y + 4)
    return framed([*parts, *explained, *legend], wide, y, f"round {round_index + 1}: {round_.caption}")


def reasons(round_: Round, y: float, most: int = 8) -> tuple[list[Markup], float]:
    """The first ``most`` reasons of a round, listed from ``y`` down, and the y below them."""
    parts = []
    for node in round_.reasons[:most]:
        parts.append(text(MARGIN, y, visible(node.text), "token"))
        parts.append(text(MARGIN + 140, y, node.why, "soft"))
        y += 19
    return parts, y


def framed(parts: Sequence[Markup], wide: float, high: float, label: str) -> str:
    """An SVG of parts on a panel; ``label`` is its accessible text."""
    background = tag("rect", width="100%", height="100%", rx=10, class_="panel")
    return tag(
        "svg", tag("style", Markup(resource("tree.css") + STYLE)), background, *parts,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {wide:.0f} {high:.0f}", width=f"{wide:.0f}",
        height=f"{high:.0f}", role="img", aria_label=label,
    ) + "\n"  # fmt: skip


def text(x: float, y: float, words: str, class_: str) -> Markup:
    """Text at a position."""
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", class_=class_)


def _ribbon(run: Shown, y: float, wide: float, most_lines: int = 7) -> tuple[list[Markup], float]:
    """The prompt and the output, wrapped; text beyond the last line becomes an ellipsis."""
    words = [Word(run.prompt, "prompt"), *(word for round_ in run.rounds for word in round_.words)]
    room = int((wide - 2 * MARGIN) / LETTER)
    parts: list[Markup] = []
    x, line = 0.0, 0
    for word in words:
        for i, piece in enumerate(word.text.split("\n")):
            if i:
                x, line = 0.0, line + 1
            for part, starts_line in _fitting(piece, room, x):
                if starts_line:
                    x, line = 0.0, line + 1
                if line >= most_lines:
                    parts.append(text(MARGIN + x * LETTER, y + LINE * most_lines + 2, "…", "soft"))
                    return parts, y + LINE * most_lines + 8
                if part:
                    parts += _word(part, word.origin, MARGIN + x * LETTER, y + LINE * line)
                    x += width(part)
    return parts, y + LINE * (line + 1) + 4


def _fitting(text: str, room: int, x: float) -> list[tuple[str, bool]]:
    """Parts of a text that fit on one line, each with a flag for a new line; only overlong words are split."""
    parts, rest, starts = [], text, False
    space = room - x
    while width(rest) > space:
        count = max(int(space / max(width(rest) / len(rest), 1.0)), 0)
        cut = rest.rfind(" ", 0, count) + 1
        count = cut or (count if space == room else 0)
        parts.append((rest[:count], starts))
        rest, space, starts = rest[count:], float(room), True
    return [*parts, (rest, starts)]


def _word(text: str, origin: str, x: float, y: float) -> list[Markup]:
    broad = width(text) * LETTER
    back = tag("rect", x=f"{x:.1f}", y=f"{y:.1f}", width=f"{max(broad - 1, 1):.1f}", height=18, rx=3,
               class_=f"back {origin}")  # fmt: skip
    front = tag("text", text, x=f"{x:.1f}", y=f"{y + 13.5:.1f}", class_=f"ribbon {origin}", xml_space="preserve",
                textLength=f"{broad:.1f}", lengthAdjust="spacingAndGlyphs")  # fmt: skip
    return [back, Markup(front.replace("xml-space", "xml:space"))]


def _legend(y: float) -> tuple[list[Markup], float]:
    parts, x = [], MARGIN
    for name in ("accepted", "rejected", "recovered", "bonus", "untried"):
        parts.append(tag("rect", x=f"{x:.1f}", y=f"{y:.1f}", width=16, height=14, rx=3, class_=f"node {name}"))
        label = "not tried" if name == "untried" else name
        parts.append(text(x + 22, y + 11.5, label, "soft"))
        x += 40 + 7.2 * len(label)
    return parts, y + 14 + MARGIN


def wrapped(words: str, letters: int) -> Sequence[str]:
    """The text wrapped to lines of ``letters`` characters; at least one line."""
    return textwrap.wrap(words, letters) or [""]
