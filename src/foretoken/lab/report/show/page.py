"""The HTML page of a run: one self-contained file without scripts."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.lab.report.markup import Markup, join, tag
from foretoken.lab.report.page import resource
from foretoken.lab.report.show.run import HEADS, Round, Shown, Total
from foretoken.lab.report.show.texts import visible
from foretoken.lab.report.show.tree import draw_tree

MOST_ROUNDS = 200
"""Maximum number of drawn rounds; the text covers all of them."""


def render(run: Shown, totals: Sequence[Total] = ()) -> str:
    """The page of a run.  ``totals`` are table rows for a trace with several requests or without rounds."""
    drawn = run.rounds[:MOST_ROUNDS]
    not_drawn = len(run.rounds) - len(drawn)
    body = join(
        tag("h1", "What speculation did"),
        _facts(run),
        _totals(totals) if totals else "",
        join(legend(), _ribbon(run)) if run.rounds else "",
        *(_section(i, round_) for i, round_ in enumerate(drawn)),
        tag("p", f"{not_drawn} more rounds are not drawn.", class_="caption") if not_drawn else "",
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = join(
        tag("meta", charset="utf-8"),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("title", "foretoken show"),
        tag("style", Markup(resource("tree.css") + resource("show/show.css"))),
    )
    page = tag("html", tag("head", head), tag("body", tag("main", body)), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def legend() -> Markup:
    """The meanings of the colours."""
    meanings = {
        "accepted": "an accepted draft token",
        "recovered": "the target's token in place of a rejected one",
        "bonus": "the target's token after a whole accepted path",
        "plain": "the target's token where nothing was drafted",
    }
    keys = [tag("li", tag("span", name, class_=f"key {name}"), f" {meaning}") for name, meaning in meanings.items()]
    return tag("ul", *keys, class_="legend")


def _facts(run: Shown) -> Markup:
    rows = [join(tag("dt", name), tag("dd", value)) for name, value in run.facts]
    return tag("dl", *rows, class_="facts")


def _totals(totals: Sequence[Total]) -> Markup:
    head = tag("tr", *(tag("th", name) for name in HEADS))
    rows = [tag("tr", *(tag("td", cell) for cell in total.cells)) for total in totals[:500]]
    not_shown = len(totals) - len(rows)
    table = tag("table", tag("thead", head), tag("tbody", *rows))
    more = tag("p", f"{not_shown} more rows are not shown.", class_="caption") if not_shown else ""
    return join(tag("div", table, class_="scroll", tabindex=0), more)


def _ribbon(run: Shown) -> Markup:
    parts = [tag("span", run.prompt, class_="prompt")]
    for i, round_ in enumerate(run.rounds):
        words = [tag("span", word.text, class_=word.origin) for word in round_.words]
        href = f"#round-{i + 1}" if i < MOST_ROUNDS else None
        parts.append(tag("a", *words, href=href, title=f"round {i + 1}: {round_.caption}"))
    return tag("div", *parts, class_="ribbon")


def _section(i: int, round_: Round, most_reasons: int = 16) -> Markup:
    tree = draw_tree(round_.nodes, round_.next_token, round_.origin)
    label = f"token tree of round {i + 1}: {round_.caption}"
    picture = tag("svg", tree.markup, width=f"{tree.width:.0f}", height=f"{tree.height:.0f}", role="img",
                  aria_label=label)  # fmt: skip
    reasons = round_.reasons
    items = [
        tag("li", tag("code", visible(node.text)), " ", tag("span", node.why, class_=node.status))
        for node in reasons[:most_reasons]
    ]
    if len(reasons) > most_reasons:
        items.append(tag("li", f"and {len(reasons) - most_reasons} more"))
    return tag(
        "section",
        tag("h2", f"Round {i + 1}"),
        tag("p", round_.caption, class_="caption"),
        tag("div", picture, class_="scroll", tabindex=0),
        tag("ul", *items, class_="why") if items else "",
        id=f"round-{i + 1}",
    )
