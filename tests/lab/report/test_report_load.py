"""The report of a load test: its charts say what the run says, and nothing in it can break the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from foretoken.lab.report import load_figures, load_sections
from foretoken.lab.report.charts import BarChart, LineChart
from foretoken.lab.report.page import render, write_report
from foretoken.lab.report.plots import write_plots
from foretoken.lab.report.read import Run, read_run

EVIL = "</script><script>alert(1)</script>"


def cell(arm: str, level: float, load: str = "rate", **more: Any) -> dict[str, Any]:
    slow = 2.0 if arm == "plain" else 1.0
    spread = {"mean": 5 * slow, "p50": 4 * slow, "p90": 8 * slow, "p99": level + 10 * slow}
    row = {
        "load": load, "level": level, "burst": 1, "arm": arm, "category": "all", "temperature": 0.0, "batch": 1,
        "requests": 8, "completed": 8, "errors": {}, "seconds": 2.0, "requests_per_s": level,
        "tokens_per_s": 30 * level,
        "ttft_ms": spread, "tpot_ms": spread, "e2e_ms": spread, "acceptance_rate": 0.5, "mean_acceptance_length": 2.0,
        "ratios": None if arm == "plain" else {"tokens_per_s": 1.5, "tpot": 2.0}, "identical": None,
    }  # fmt: skip
    return {**row, **more}


def summary(**more: Any) -> dict[str, Any]:
    curve = {"load": "rate", "level": 2.0, "percentiles": [0, 50, 100]}
    curves = [{**curve, "arm": arm, "e2e_ms": [1.0, 4.0, 9.0]} for arm in ("plain", "fast")]
    fields = {
        "summary": True, "kind": "load", "target": "toy", "arms": ["plain", "fast"], "cells": 4, "interrupted": False,
        "servers": {"plain": {"url": "http://h"}, "fast": {"url": "http://h", "drafter": "ngram"}},
        "settings": {"requests": 8, "max_tokens": 16, "temperature": 0.0, "seed": 3},
        "client": {"cpu": "c", "cores": 2},
        "equality": [{"arm": "fast", "load": "rate", "level": 2.0, "compared": 8, "different": 0}], "curves": curves,
        "categories": {"fast": {"code": {"completed": 4, "tpot_ms": {"p50": 1.25, "p99": 2.0}}}},
        "notes": ["a note"],
    }  # fmt: skip
    return {**fields, **more}


def write(folder: Path, cells: list[dict[str, Any]], last: dict[str, Any] | None) -> Path:
    file = folder / "run.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*cells, *([last] if last else [])]))
    return file


@pytest.fixture
def run(tmp_path: Path) -> Run:
    cells = [cell(arm, level) for level in (2.0, 8.0) for arm in ("plain", "fast")]
    return read_run(write(tmp_path, cells, summary()))


def test_latency_over_rate_has_the_runs_numbers(run: Run) -> None:
    charts = load_figures.latencies(run, "rate")
    assert [chart.title for chart in charts] == ["Time to first token", "Time per output token", "Latency to the end"]
    points = {series.name: list(series.points) for series in charts[0].series}
    assert points["plain, median"] == [(2.0, 8.0), (8.0, 8.0)]
    assert points["fast, 99th percentile"] == [(2.0, 12.0), (8.0, 18.0)]
    assert load_figures.latencies(run, "concurrency") == []


def test_throughput_is_a_curve_or_bars(run: Run, tmp_path: Path) -> None:
    curves = load_figures.throughputs(run, "rate")
    assert all(isinstance(chart, LineChart) for chart in curves)
    single = read_run(write(tmp_path, [cell("plain", 4, "concurrency"), cell("fast", 4, "concurrency")], summary()))
    tokens, requests = load_figures.throughputs(single, "concurrency")
    assert isinstance(tokens, BarChart) and [bar.value for bar in tokens.bars] == [120, 120]
    assert isinstance(requests, BarChart) and requests.x_end == 4


def test_distributions_are_cumulative(run: Run) -> None:
    (chart,) = load_figures.distributions(run, "rate", 2.0)
    assert [series.name for series in chart.series] == ["plain", "fast"]
    assert list(chart.series[0].points) == [(1.0, 0.0), (4.0, 0.5), (9.0, 1.0)]
    assert load_figures.distributions(run, "rate", 8.0) == []


def test_the_verdict(run: Run, tmp_path: Path) -> None:
    texts = {remark.text: remark.tone for remark in load_sections.verdict(run)}
    assert texts["All 8 compared texts equal those of plain."] == "good"
    ratio = "fast, 2 per second: 1.50 times the tokens per second of plain, a token comes 2.00 times as fast."
    assert texts[ratio] == "good"
    cells = [cell("plain", 2.0), cell("fast", 2.0, errors={"truncated": 2}, ratios={"tokens_per_s": 0.9})]
    different = [{"compared": 8, "different": 3}]
    bad = load_sections.verdict(read_run(write(tmp_path, cells, summary(equality=different))))
    assert [remark.tone for remark in bad] == ["bad"] * 3
    assert "2 truncated" in bad[1].text and "3 of 8 texts differ" in bad[2].text


@pytest.mark.parametrize(
    ("speed", "per_token", "tone"),
    [
        (0.6, 1.05, "even"),
        (1.5, 0.6, "even"),
        (1.0, 1.5, "good"),
        (1.5, None, "good"),
        (1.0, 0.9, "bad"),
        (0.9, None, "bad"),
        (1.0, 1.0, "even"),
    ],
)
def test_a_remark_is_good_only_where_nothing_is_slower(
    tmp_path: Path, speed: float, per_token: float | None, tone: str
) -> None:
    cells = [cell("plain", 2.0), cell("fast", 2.0, ratios={"tokens_per_s": speed, "tpot": per_token})]
    assert load_sections.verdict(read_run(write(tmp_path, cells, summary(equality=[]))))[0].tone == tone


def test_differences_whose_ties_are_unknown_are_not_called_faults(tmp_path: Path) -> None:
    def remark(**row: int) -> Any:
        run = read_run(
            write(tmp_path, [cell("plain", 2.0)], summary(equality=[{"compared": 8, "different": 3, **row}]))
        )
        return load_sections.verdict(run)[-1]

    unknown = remark(ties=1, ties_unknown=2)
    assert unknown.tone == "even" and "whether by numerical ties is unknown for 2." in unknown.text
    assert remark(ties=0, ties_unknown=2).tone == "bad"
    assert remark(ties=1, ties_unknown=0).tone == "bad"
    assert remark(ties=3, ties_unknown=0).text.endswith("all by numerical ties.")


def test_the_page_is_whole_and_safe(tmp_path: Path) -> None:
    last = summary(arms=[EVIL, "fast"], notes=[EVIL], target=EVIL, categories={EVIL: {EVIL: {}}})
    last["servers"] = {EVIL: {"url": EVIL}}
    file = write(tmp_path, [cell(EVIL, 2.0, errors={EVIL: 1}), cell("fast", 2.0)], last)
    write_report(file, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert not re.search(r"\$\w|http[s]?://(?!www\.w3\.org)[^\"<]*\.(js|css)", page)
    for key in ("throughput", "latency", "distribution", "categories", "table"):
        assert f'id="{key}"' in page and f'href="#{key}"' in page
    assert len(write_plots(file, tmp_path / "plots")) == 3


def test_a_test_without_a_summary_or_with_gaps_is_reported(tmp_path: Path) -> None:
    bare = {"load": "rate", "level": 3, "arm": "server"}
    page = render(read_run(write(tmp_path, [bare], None)))
    assert "This run was interrupted" in page and "Load test of a server" in page
    odd = summary(curves=[{"arm": "x"}, 3], equality=[None], categories={"plain": 4}, servers=3, settings=None)
    assert "Load test" in render(read_run(write(tmp_path, [{**bare, "ttft_ms": 3, "errors": 4}], odd)))
    assert "This test was interrupted" in render(read_run(write(tmp_path, [bare], summary(interrupted=True))))


@pytest.mark.parametrize("more", [{"load": "storm"}, {"level": "high"}, {"level": None}])
def test_cells_of_no_load_test_are_named(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"line 2 of .* is not a cell of a load test"):
        read_run(write(tmp_path, [cell("plain", 2.0), {**cell("fast", 2.0), **more}], summary()))
