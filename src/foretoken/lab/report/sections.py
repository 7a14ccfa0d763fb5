"""Sections of the page; each is ``None`` if the run has no data for it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foretoken.lab.report import figures
from foretoken.lab.report.charts import Chart
from foretoken.lab.report.embed import inline
from foretoken.lab.report.markup import Markup, join, tag
from foretoken.lab.report.read import PLAIN, Run, number, setting_name
from foretoken.lab.report.verdict import Remark, verdict

LEGEND = {
    "root": "root: the last committed token",
    "accepted": "accepted draft token",
    "rejected": "rejected draft token",
    "recovered": "recovered: the target's own, where drafts failed",
    "bonus": "bonus: the target's own, after drafts that were all accepted",
    "plain": "plain: nothing was drafted",
    "probe": "probe: scored for the drafter only",
}
SHORTEST = -1
"""Digits as in the number itself."""
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("temperature", "T", SHORTEST),
    ("batch", "batch", 0),
    ("prompts", "prompts", 0),
    ("new_tokens", "new tokens", 0),
    ("tokens_per_s", "tokens/s", 1),
    ("speedup", "speed-up", 2),
    ("speedup_ci95", "95 % CI", 2),
    ("predicted_speedup", "predicted", 2),
    ("mean_acceptance_length", "tokens/round", 2),
    ("acceptance_rate", "acceptance", 3),
    ("draft_s", "draft s", 2),
    ("target_s", "target s", 2),
    ("overhead_s", "overhead s", 3),
    ("prefill_s", "prefill s", 3),
)
"""Field, heading and digits of the table's numbers."""


def section(key: str, title: str, explanation: str, *content: object) -> Markup:
    """A section with an explanation of how to read it."""
    return tag("section", tag("h2", title), tag("p", explanation, class_="how"), *content, id=key)


def figure(chart: Chart) -> Markup:
    return tag("figure", tag("figcaption", chart.title), inline(chart))


def alone(chart: Chart) -> Markup:
    """The only chart of a section, titled by the section's heading."""
    return tag("figure", inline(chart))


def panels(charts: Sequence[Chart]) -> Markup:
    """Charts side by side as space allows."""
    return tag("div", *map(figure, charts), class_="panels")


# -- header ----------------------------------------------------------------------------------------------------------


def header(run: Run) -> Markup:
    """Target, machine, settings and outcome of a benchmark."""
    return header_of("Speculative decoding benchmark", facts(run), [*run.notes, *_inflated(run)], verdict(run))


def header_of(title: str, facts: Iterable[tuple[str, str]], notes: Iterable[str], remarks: Iterable[Remark]) -> Markup:
    """A header with non-empty facts, notes and a verdict."""
    sentences = [tag("p", remark.text, class_=remark.tone) for remark in remarks]
    return tag(
        "header",
        tag("h1", title),
        tag("dl", *(join(tag("dt", name), tag("dd", value)) for name, value in facts if value), class_="facts"),
        *(tag("p", note, class_="note") for note in notes),
        tag("div", *sentences, class_="verdict", role="note", aria_label="verdict"),
    )


def facts(run: Run) -> list[tuple[str, str]]:
    """Names and values of the header."""
    machine, settings = run.part("machine"), run.part("settings")
    hardware, versions = _object(machine, "hardware"), _object(machine, "versions")
    gpus = ", ".join(map(str, hardware.get("gpus") or ()))
    cores = hardware.get("cores")
    return [
        ("target", str(run.summary.get("target") or "")),
        ("dtype", str(settings.get("dtype") or "")),
        ("weights", str(settings.get("weights") or "")),
        ("machine", ", ".join(filter(None, [str(hardware.get("cpu") or ""), f"{cores} cores" if cores else "", gpus]))),
        ("threads", _threads(_object(machine, "threads"))),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items())),
        ("tokens per prompt", str(settings.get("max_new_tokens") or "")),
        ("run", f"{len(run.cells)} cells, {len(run.rivals)} arms beside plain decoding, {run.name}"),
    ]


def _object(holder: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = holder.get(name)
    return dict(value) if isinstance(value, Mapping) else {}


def _threads(threads: Mapping[str, Any]) -> str:
    words = [f"{threads['torch_threads']} (torch)"] if threads.get("torch_threads") else []
    words += [f"{name}={value}" for name, value in _object(threads, "variables").items() if value is not None]
    load = number(threads.get("load"))
    return ", ".join([*words, *([] if load is None else [f"load before the run {load:.2f}"])])


def _inflated(run: Run) -> list[str]:
    size = run.part("settings").get("inflate")
    if not size:
        return []
    return [
        f"The target was inflated ({size}): widened and deepened without changing what it says. "
        "Its outputs are the small model's, its cost is that of the big one."
    ]


# -- charts ----------------------------------------------------------------------------------------------------------


def speedups(run: Run) -> Markup | None:
    """Bars per category: the first setting shown, others collapsed."""
    charted = [(setting_name(setting), figures.speedups(run, setting)) for setting in run.settings]
    with_charts = [(name, charts) for name, charts in charted if charts]
    if not with_charts:
        return None
    name, charts = with_charts[0]
    more = [tag("details", tag("summary", setting), panels(bars)) for setting, bars in with_charts[1:]]
    explanation = (
        "How many times as fast as plain decoding (the dashed line). Whiskers: 95 % confidence interval. "
        "= same: the output equals plain decoding's token by token (with the same seeds, where tokens are sampled); "
        "≈ ties: but for numerical ties."
    )
    return section("speedup", f"Speed-up ({name})", explanation, panels(charts), *more)


def positions(run: Run) -> Markup | None:
    """Acceptance by position."""
    chart = figures.positions(run)
    explanation = (
        "Share of rounds with at least so many accepted tokens. Where a line nears 0, drafting further is waste."
    )
    return None if chart is None else section("positions", chart.title, explanation, alone(chart))


def rounds(run: Run) -> Markup | None:
    """Cost of a round by stage."""
    chart = figures.round_costs(run)
    explanation = (
        "Where the time of one round goes, all settings together. A round pays when it writes more tokens than it "
        "costs plain rounds. Overhead is what is neither drafting, nor the target call, nor the acceptance rule."
    )
    return None if chart is None else section("rounds", chart.title, explanation, alone(chart))


def sweeps(run: Run) -> Markup | None:
    """Speed-up against temperature, batch and options."""
    charts = figures.sweeps(run)
    explanation = "All categories together, everything else as in the first setting. The dashed line is plain decoding."
    return section("sweeps", "What changes the speed-up", explanation, panels(charts)) if charts else None


def costs(run: Run) -> Markup | None:
    """Predicted against measured, and v(n)."""
    both = (figures.predictions(run), figures.node_costs(run))
    charts: list[Chart] = [chart for chart in both if chart is not None]
    explanation = (
        "Above the diagonal a run was faster than its measured costs promise, below it slower. "
        "v(n) near the flat line: trees are nearly free; near the linear one: every guess costs a token."
    )
    return section("costs", "Cost model", explanation, panels(charts)) if charts else None


# -- trace -----------------------------------------------------------------------------------------------------------


def trace(run: Run) -> Markup | None:
    """The trace viewer, filled by ``report.js``."""
    if not run.traces:
        return None
    keys = [_key(name, words) for name, words in LEGEND.items()]
    stepper = tag(
        "span",
        tag("button", "← back", type="button", id="back"),
        tag("input", type="range", id="round", min=1, max=1, value=1, aria_label="round"),
        tag("button", "next →", type="button", id="on"),
        class_="stepper",
    )
    choices = (tag("label", "arm ", tag("select", id="arm")), tag("label", "prompt ", tag("select", id="prompt")))
    controls = tag("div", *choices, stepper, class_="controls")
    tree = tag("div", tag("svg"), id="tree", class_="scroll", tabindex=0, aria_label="token tree")
    parts = [
        controls,
        tag("p", id="caption", aria_live="polite"),
        tag("ul", *keys, class_="legend"),
        tree,
        tag("pre", id="text", class_="scroll", tabindex=0),
    ]
    explanation = (
        "Step through the rounds with the buttons, the slider or the arrow keys. · is a space, ⏎ a line break, "
        "⇥ a tab. Thick lines are what was kept; outlined text is what this round wrote."
    )
    quiet = tag("noscript", tag("p", "The trace needs JavaScript.", class_="note"))
    return section("trace", "Trace", explanation, quiet, tag("div", *parts, id="viewer"))


def _key(name: str, words: str) -> Markup:
    box = tag("rect", x=1, y=1, width=22, height=14, rx=3, class_=f"node {name}")
    return tag("li", tag("svg", box, width=24, height=16, aria_hidden="true"), " ", words)


# -- table -----------------------------------------------------------------------------------------------------------


def table(run: Run) -> Markup:
    """Every cell of the run, and a download of the file."""
    used = [column for column in COLUMNS if any(cell.get(column[0]) is not None for cell in run.cells)]
    heads = [head(name, "words") for name in ("arm", "category")]
    heads += [head(name, None) for _, name, _ in used]
    heads.append(head("output", "words"))
    body = [_row(cell, used) for cell in run.cells]
    explanation = "Every cell of the run; a click on a heading sorts, a second one turns the order round."
    return section("table", "All numbers", explanation, sortable(heads, body), download(run))


def sortable(heads: Iterable[Markup], rows: Iterable[Markup]) -> Markup:
    """A table sorted by clicks on its headings."""
    whole = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="sortable")
    return tag("div", whole, class_="scroll", tabindex=0)


def download(run: Run) -> Markup:
    """A link that downloads the file."""
    coded = base64.b64encode(run.text.encode("utf-8")).decode("ascii")
    link = tag("a", f"Download {run.name}", href=f"data:application/x-ndjson;base64,{coded}", download=run.name)
    return tag("p", link)


def head(name: str, class_: str | None) -> Markup:
    """A heading that sorts its table."""
    return tag("th", tag("button", name, type="button"), scope="col", class_=class_)


def _row(cell: Mapping[str, Any], used: Sequence[tuple[str, str, int]]) -> Markup:
    badge = figures.equality(cell)
    tone = {"identical": "words good", "differs": "words bad"}.get(badge, "words")
    arm = f"{cell['arm']} (plain)" if cell["arm"] == PLAIN[0] else cell["arm"]
    return tag(
        "tr",
        tag("td", arm, class_="words"),
        tag("td", cell["category"], class_="words"),
        *(number_cell(cell.get(name), digits) for name, _, digits in used),
        tag("td", badge, class_=tone),
    )


def number_cell(value: Any, digits: int) -> Markup:
    """A table cell.  An interval sorts by its lower end; one of zero width is left empty."""
    if isinstance(value, list):
        ends = [number(end) for end in value]
        if len(ends) != 2 or ends[0] is None or ends[1] is None or ends[0] == ends[1]:
            return tag("td", "", data_sort="")
        return tag("td", f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}", data_sort=ends[0])
    single = number(value)
    if single is None:
        return tag("td", "", data_sort="")
    return tag("td", f"{single:g}" if digits == SHORTEST else f"{single:.{digits}f}", data_sort=single)
