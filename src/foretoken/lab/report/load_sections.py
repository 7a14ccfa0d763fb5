"""The page of a load test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.lab.report import load_figures as figures
from foretoken.lab.report.markup import Markup, tag
from foretoken.lab.report.read import Run, number
from foretoken.lab.report.sections import download, head, header_of, number_cell, panels, section, sortable
from foretoken.lab.report.verdict import Remark

COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("level", "level", 2),
    ("burst", "together", 0),
    ("requests", "requests", 0),
    ("completed", "completed", 0),
    ("seconds", "seconds", 1),
    ("requests_per_s", "requests/s", 2),
    ("tokens_per_s", "tokens/s", 1),
    ("new_tokens", "new tokens", 0),
    ("mean_acceptance_length", "tokens/round", 2),
    ("acceptance_rate", "acceptance", 3),
)
"""Field, heading and digits of the table's numbers."""
SPREADS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "latency"}
SHARES = ("p50", "p90", "p99")


def header(run: Run) -> Markup:
    """Settings, servers and outcome of a load test."""
    notes = [*run.notes, *map(str, run.listed("notes"))]
    return header_of("Load test of a server", _facts(run), notes, verdict(run))


def _facts(run: Run) -> list[tuple[str, str]]:
    client, settings = run.part("client"), run.part("settings")
    load = number(client.get("load"))
    words = [client.get("cpu"), f"{client['cores']} cores" if client.get("cores") else ""]
    words.append("" if load is None else f"load after the run {load:.2f}")
    seed = settings.get("seed")
    request = [
        "chat" if settings.get("chat") else "completions",
        f"at most {settings.get('max_tokens')} tokens",
        f"temperature {settings.get('temperature')}",
        "no seed" if seed is None else f"seeds from {seed}",
    ]
    return [
        ("model", str(run.summary.get("target") or "")),
        *[(arm, _server(server)) for arm, server in run.part("servers").items() if isinstance(server, Mapping)],
        ("requests", ", ".join(request) if settings else ""),
        ("per level", f"{settings.get('requests')} requests, {settings.get('passes')} passes" if settings else ""),
        ("client", ", ".join(str(word) for word in words if word)),
        ("run", f"{len(run.cells)} cells, {run.name}"),
    ]


def _server(server: Mapping[str, Any]) -> str:
    words = [str(server.get("url", ""))]
    words += [f"{name} {server[name]}" for name in ("drafter", "controller", "verifier") if server.get(name)]
    return ", ".join(words)


def level_name(cell: Mapping[str, Any]) -> str:
    """A level in words."""
    if cell.get("load") == "concurrency":
        return f"{cell['level']:g} at a time"
    burst = number(cell.get("burst")) or 1
    return f"{cell['level']:g} per second" + (f", {burst:g} together" if burst > 1 else "")


def verdict(run: Run) -> list[Remark]:
    """Remarks: every arm against the first by level, errors, and equality of texts."""
    remarks = []
    for cell in run.cells:
        stored = cell.get("ratios")
        ratios = stored if isinstance(stored, Mapping) else {}
        speed, per_token = number(ratios.get("tokens_per_s")), number(ratios.get("tpot"))
        if speed is not None:
            more = "" if per_token is None else f", a token comes {per_token:.2f} times as fast"
            text = f"{cell['arm']}, {level_name(cell)}: {speed:.2f} times the tokens per second of {run.arms[0]}{more}."
            # At a given rate only the time per token tells arms apart; where the two disagree, neither decides
            both = [speed, speed if per_token is None else per_token]
            better, worse = max(both) > 1.03, min(both) < 0.97
            remarks.append(Remark(text, "even" if better == worse else "good" if better else "bad"))
    for cell in run.cells:
        errors = cell.get("errors")
        if isinstance(errors, Mapping) and errors:
            kinds = ", ".join(f"{count} {kind}" for kind, count in errors.items())
            remarks.append(Remark(f"{cell['arm']}, {level_name(cell)}: {kinds}.", "bad"))
    return [*remarks, *_equality(run)]


def _equality(run: Run) -> list[Remark]:
    rows = [row for row in run.listed("equality") if isinstance(row, Mapping)]
    compared = sum(int(number(row.get("compared")) or 0) for row in rows)
    different = sum(int(number(row.get("different")) or 0) for row in rows)
    if not compared:
        return []
    ties = sum(int(number(row.get("ties")) or 0) for row in rows)
    far = " so far" if run.unfinished else ""
    texts = "texts compared so far" if run.unfinished else "compared texts"
    if different and different == ties:
        return [Remark(f"{ties} of {compared} texts differ from those of {run.arms[0]}{far}, all by numerical ties.")]
    if different:
        unknown = sum(int(number(row.get("ties_unknown")) or 0) for row in rows)  # missing in older files
        end = f"; whether by numerical ties is unknown for {unknown}" if unknown else ""
        text = f"{different} of {compared} texts differ from those of {run.arms[0]}{far}{end}."
        return [Remark(text, "bad" if different > ties + unknown else "even")]
    return [Remark(f"All {compared} {texts} equal those of {run.arms[0]}.", "good")]


def throughput(run: Run) -> Markup | None:
    """Tokens and requests per second."""
    charts = [chart for shape in figures.AXES for chart in figures.throughputs(run, shape)]
    explanation = (
        "What the server finishes per second, the median over passes. Where a curve is flat, the server is full. "
        "Where requests arrive by a rate, it cannot finish more than arrive."
    )
    return section("throughput", "Throughput", explanation, panels(charts)) if charts else None


def latency(run: Run) -> Markup | None:
    """Latencies over rate and concurrency."""
    charts_by_shape = [(shape, figures.latencies(run, shape)) for shape in figures.AXES]
    titles = {"rate": "Requests that arrive by chance", "concurrency": "Clients that wait for each answer"}
    parts = [tag("div", tag("h3", titles[shape]), panels(charts)) for shape, charts in charts_by_shape if charts]
    explanation = (
        "Time per output token is the time from the first text to the end, divided by the tokens behind the first: a "
        "chunk of a stream carries a whole verified block, so that times between chunks say nothing of tokens. "
        "A latency that climbs with the rate means that requests queue."
    )
    return section("latency", "Latency", explanation, *parts) if parts else None


def distributions(run: Run) -> Markup | None:
    """Cumulative shares, with the first level expanded."""
    levels = [
        (f"{level:g} {figures.AXES[shape]}", charts)
        for shape in figures.AXES
        for level in figures.levels(run, shape)
        if (charts := figures.distributions(run, shape, level))
    ]
    if not levels:
        return None
    parts = [
        tag("details", tag("summary", name), panels(charts), open="" if i == 0 else None)
        for i, (name, charts) in enumerate(levels)
    ]
    explanation = (
        "Share of requests that took at most so long. A steep curve is a steady server; a long tail is what users feel."
    )
    return section("distribution", "Distribution of latencies", explanation, *parts)


def categories(run: Run) -> Markup | None:
    """Time per token and acceptance of every category."""
    rows = []
    for arm, groups in run.part("categories").items():
        for category, measured in groups.items() if isinstance(groups, Mapping) else ():
            spread = measured.get("tpot_ms") if isinstance(measured, Mapping) else None
            values = [measured.get("completed"), (spread or {}).get("p50"), (spread or {}).get("p99")]
            values += [measured.get("mean_acceptance_length"), measured.get("acceptance_rate")]
            cells = [number_cell(value, digits) for value, digits in zip(values, (0, 1, 1, 2, 3), strict=True)]
            rows.append(tag("tr", tag("td", arm, class_="words"), tag("td", category, class_="words"), *cells))
    if not rows:
        return None
    names = ("requests", "TPOT p50 ms", "TPOT p99 ms", "tokens/round", "acceptance")
    heads = [head("arm", "words"), head("category", "words"), *(head(name, None) for name in names)]
    explanation = "All levels together. Drafts are accepted more often in some sorts of text than in others."
    return section("categories", "By category", explanation, sortable(heads, rows))


def table(run: Run) -> Markup:
    """Every cell, and a download of the file."""
    used = [column for column in COLUMNS if any(cell.get(column[0]) is not None for cell in run.cells)]
    heads = [head("load", "words"), head("arm", "words"), *(head(name, None) for _, name, _ in used)]
    heads += [head(f"{name} {share}", None) for name in SPREADS.values() for share in SHARES]
    heads += [head("errors", "words"), head("output", "words")]
    body = [_row(cell, used) for cell in run.cells]
    explanation = (
        "Every cell of the run, times in milliseconds; a click on a heading sorts, a second one turns the order round."
    )
    return section("table", "All numbers", explanation, sortable(heads, body), download(run))


def _row(cell: Mapping[str, Any], used: list[tuple[str, str, int]]) -> Markup:
    spreads = [spread if isinstance(spread := cell.get(name), Mapping) else {} for name in SPREADS]
    errors = cell.get("errors")
    kinds = ", ".join(f"{count} {kind}" for kind, count in errors.items()) if isinstance(errors, Mapping) else ""
    same = cell.get("identical")
    return tag(
        "tr",
        tag("td", cell.get("load", ""), class_="words"),
        tag("td", cell["arm"], class_="words"),
        *(number_cell(cell.get(name), digits) for name, _, digits in used),
        *(number_cell(spread.get(share), 1) for spread in spreads for share in SHARES),
        tag("td", kinds, class_="words bad" if kinds else "words"),
        tag("td", "" if same is None else "identical" if same else "differs", class_="words"),
    )
