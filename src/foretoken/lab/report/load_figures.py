"""Charts of a load test report, from a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.lab.report.charts import LIGHT, Bar, BarChart, LineChart, Series
from foretoken.lab.report.read import Run, number

Cell = Mapping[str, Any]
MEASURES = {"ttft_ms": "Time to first token", "tpot_ms": "Time per output token", "e2e_ms": "Latency to the end"}
AXES = {"rate": "requests per second that arrive", "concurrency": "requests at a time"}


def colour_of(run: Run, arm: str) -> int:
    """An arm's colour number: the same in every chart."""
    return run.arms.index(arm)


def levels(run: Run, shape: str) -> list[float]:
    """Rates or numbers of clients, in ascending order."""
    return sorted({float(cell["level"]) for cell in run.cells if cell.get("load") == shape})


def cells_of(run: Run, shape: str, arm: str) -> list[Cell]:
    """An arm's cells by level."""
    cells = [cell for cell in run.cells if cell.get("load") == shape and cell["arm"] == arm]
    return sorted(cells, key=lambda cell: float(cell["level"]))


def latencies(run: Run, shape: str) -> list[LineChart]:
    """Charts of median and 99th percentile of each latency over rate or concurrency."""
    charts = []
    for name, title in MEASURES.items():
        series = [
            Series(f"{arm}, {words}", points, colour_of(run, arm) + index * len(LIGHT))
            for arm in run.arms
            for index, (share, words) in enumerate({"p50": "median", "p99": "99th percentile"}.items())
            if (points := _points(run, shape, arm, name, share))
        ]
        if series:
            charts.append(LineChart(title, AXES[shape], "milliseconds", series, x_ticks=levels(run, shape)))
    return charts


def _points(run: Run, shape: str, arm: str, name: str, share: str) -> list[tuple[float, float]]:
    points = []
    for cell in cells_of(run, shape, arm):
        spread = cell.get(name)
        value = number(spread.get(share)) if isinstance(spread, Mapping) else None
        if value is not None:
            points.append((float(cell["level"]), value))
    return points


def throughputs(run: Run, shape: str) -> list[LineChart | BarChart]:
    """Charts of tokens and requests per second: curves over levels, or bars for a single level."""
    charts: list[LineChart | BarChart] = []
    ticks = levels(run, shape)
    for name, words in {"tokens_per_s": "tokens per second", "requests_per_s": "requests per second"}.items():
        title = words[0].upper() + words[1:]
        curves = {
            arm: [(float(c["level"]), v) for c in cells_of(run, shape, arm) if (v := number(c.get(name))) is not None]
            for arm in run.arms
        }
        curves = {arm: points for arm, points in curves.items() if points}
        if len(ticks) > 1 and curves:
            series = [Series(arm, points, colour_of(run, arm)) for arm, points in curves.items()]
            charts.append(LineChart(title, AXES[shape], words, series, x_ticks=ticks))
        elif curves:
            bars = [Bar(arm, points[0][1], colour=colour_of(run, arm)) for arm, points in curves.items()]
            charts.append(BarChart(title, f"{words}, {ticks[0]:g} {AXES[shape]}", bars))
    return charts


def distributions(run: Run, shape: str, level: float) -> list[LineChart]:
    """Charts of the share of requests (y) within a time (x), at one level."""
    curves = [c for c in run.listed("curves") if isinstance(c, Mapping) and c.get("load") == shape]
    at_level = [c for c in curves if number(c.get("level")) == level and c.get("arm") in run.arms]
    charts = []
    for name, title in MEASURES.items():
        series = [
            Series(str(curve["arm"]), points, colour_of(run, str(curve["arm"])))
            for curve in at_level
            if (points := _cumulated(curve, name))
        ]
        if series:
            charts.append(LineChart(title, "milliseconds", "share of requests", series, percent=True))
    return charts


def _cumulated(curve: Cell, name: str) -> list[tuple[float, float]]:
    values, shares = curve.get(name), curve.get("percentiles")
    if not isinstance(values, list) or not isinstance(shares, list) or len(values) != len(shares):
        return []
    pairs = [(number(value), number(share)) for value, share in zip(values, shares, strict=True)]
    return [(value, share / 100) for value, share in pairs if value is not None and share is not None]


def plots(run: Run) -> dict[str, list[LineChart | BarChart]]:
    """Charts for papers by file name."""
    charts: dict[str, list[LineChart | BarChart]] = {}
    for shape in AXES:
        if levels(run, shape):
            charts[f"throughput_{shape}"] = throughputs(run, shape)
            charts[f"latency_{shape}"] = [*latencies(run, shape)]
        for level in levels(run, shape):
            charts[f"distribution_{shape}_{level:g}"] = [*distributions(run, shape, level)]
    return charts
