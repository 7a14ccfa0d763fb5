"""The simulator's formulas are those of ``foretoken.lab.plan``, and its page shows them, offline and at any width."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_parts
import pytest
from page_browser import Tab, browser, executable

from foretoken.core.costs import TargetCost
from foretoken.lab.plan.assumptions import Assumptions, Measured
from foretoken.lab.plan.planner import Plan, plan

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "assets" / "simulator.js"

needs_engine = pytest.mark.skipif(
    shutil.which("node") is None and executable() is None, reason="neither node nor chromium here"
)
needs_browser = pytest.mark.skipif(executable() is None, reason="no chromium here: apt install chromium")

CURVES: list[dict[str, float]] = [*(curve["ms"] for curve in made_parts.curves()), {"1": 1, "2": 1}, {"1": 3, "8": 2}]
LONGEST = 16
SHARES = (0.8, 0.5, 0.2)
"""Measured acceptance by position, where a point of the grid has no alpha."""
GRID = list(
    itertools.product(range(len(CURVES)), (0.0, 0.35, 0.7, 0.99, 1.0, None), (0.0, 0.1, 0.6), (0.0, 0.15), (1, 3, 16))
)
TREES: list[tuple[list[int], list[float] | None]] = [
    ([3, 2, 1], None), ([4, 4], [0.6, 0.15, 0.05, 0.02]), ([1, 1, 1], None), ([2], [0.5, 0.2, 0.1])
]  # fmt: skip
PROGRAM = """(formulas, {curves, grid, trees, longest, shares}) => grid.map(([curve, alpha, c, overhead, batch]) => {
  const given = {acceptance: alpha ?? shares, c, overhead, v: formulas.relative(curves[curve])};
  const ks = Array.from({length: longest + 1}, (_, k) => k);
  return {
    tokens: ks.map((k) => formulas.chainTokens(given.acceptance, k)),
    speedups: ks.map((k) => formulas.chainSpeedup(given, k, batch)),
    best: formulas.bestLength(given, longest, batch),
    even: ks.slice(1).map((k) => formulas.breakEven(given, k, batch)),
    trees: trees.map(([widths, siblings]) => formulas.tree(given, widths, siblings, batch)),
  };
})"""


@pytest.fixture(scope="module")
def worked_out() -> list[dict[str, Any]]:
    """What the page's formulas make of the grid: under Node, else in a browser."""
    values = {"curves": CURVES, "grid": GRID, "trees": TREES, "longest": LONGEST, "shares": SHARES}
    text = json.dumps(values)
    if shutil.which("node"):
        load = f"require({json.dumps(str(SCRIPT))}), JSON.parse(require('fs').readFileSync(0, 'utf8'))"
        code = f"console.log(JSON.stringify(({PROGRAM})({load})))"
        done = subprocess.run(["node", "-e", code], input=text, capture_output=True, text=True, check=True)
        output = done.stdout
    else:
        with browser() as tab:
            source = SCRIPT.read_text(encoding="utf-8")
            output = tab.run(f"(() => {{ {source}\nreturn JSON.stringify(({PROGRAM})(formulas, {text})); }})()")
    result: list[dict[str, Any]] = json.loads(output)
    return result


def planned(point: tuple[Any, ...], positions: list[float] | None, trees: list[list[int]], ks: range) -> Plan:
    curve, alpha, c, overhead, batch = point
    v = Measured(TargetCost({int(n): ms for n, ms in CURVES[curve].items()}))
    assumptions = Assumptions(SHARES if alpha is None else alpha, c, overhead, v)
    return plan(assumptions, ks, (batch,), trees, positions)


@needs_engine
def test_tokens_and_speed_ups_are_those_of_plan(worked_out: list[dict[str, Any]]) -> None:
    assert len(worked_out) == len(GRID) > 600
    for point, computed in zip(GRID, worked_out, strict=True):
        expected, batch = planned(point, None, [], range(1, LONGEST + 1)), point[-1]
        assert computed["tokens"] == pytest.approx([row.tokens for row in expected.rows], rel=1e-12), point
        speeds = [row.speedups[batch] for row in expected.rows]
        assert computed["speedups"] == pytest.approx(speeds, rel=1e-12), point
        assert speeds[computed["best"]] == pytest.approx(expected.best.speedups[batch], rel=1e-12), point


@needs_engine
def test_break_even_is_that_of_plan(worked_out: list[dict[str, Any]]) -> None:
    seen = dict.fromkeys(("alpha", "c", "overhead", "batch"), 0)
    for point, computed in zip(GRID, worked_out, strict=True):
        for k in (1, 4, LONGEST):
            limits = planned(point, None, [], range(k, k + 1)).limits
            assert limits is not None
            shown = computed["even"][k - 1]
            for name in seen:
                limit = getattr(limits, name)
                seen[name] += limit is not None
                assert shown[name] == (limit if limit is None else pytest.approx(limit, abs=1e-9)), (point, k, name)
    assert min(seen.values()) > 30, "each kind of limit must occur"


@needs_engine
def test_trees_are_those_of_plan(worked_out: list[dict[str, Any]]) -> None:
    for point, computed in zip(GRID, worked_out, strict=True):
        for (widths, positions), tree in zip(TREES, computed["trees"], strict=True):
            (expected,) = planned(point, positions, [widths], range(1, 2)).trees
            assert tree["nodes"] == expected.nodes
            assert tree["tokens"] == pytest.approx(expected.tokens, rel=1e-12), (point, widths)
            assert tree["speedup"] == pytest.approx(expected.speedups[point[-1]], rel=1e-12), (point, widths)


def test_the_curves_are_whole() -> None:
    for curve in made_parts.curves():
        counts = [int(n) for n in curve["ms"]]
        assert counts[0] == 1 and counts == sorted(counts)
        assert list(curve["ms"].values()) == sorted(curve["ms"].values())
        assert all(curve[name] for name in ("model", "how", "machine"))
    assert "| SmolLM2-135M | foretoken, bfloat16 |" in made_parts.curves_table()


# -- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The simulator alone, from a disk: its HTML with our styles and script, without the site's theme."""
    folder = tmp_path_factory.mktemp("simulator")
    markdown = made_parts.simulator((ROOT / "docs" / "simulator.md").read_text(encoding="utf-8"))
    start, end = markdown.index('<div class="simulator">'), markdown.index("## The formulas")
    shutil.copytree(ROOT / "docs" / "assets", folder / "assets")
    head = '<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    style = '<link rel="stylesheet" href="assets/site.css">'
    file = folder / "simulator.html"
    file.write_text(head + style + markdown[start:end], encoding="utf-8")
    return file.as_uri()


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as page:
        yield page


def put(tab: Tab, name: str, value: str) -> None:
    field = f"document.getElementById('sim-form').elements[{json.dumps(name)}]"
    tab.run(f"{field}.value = {json.dumps(value)}, {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def text(tab: Tab, name: str) -> str:
    return str(tab.run(f"document.getElementById('sim-{name}').textContent"))


@needs_browser
@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_answers_without_a_server(tab: Tab, page: str, width: int) -> None:
    tab.size(width)
    tab.complaints.clear()
    tab.open(page)
    put(tab, "curve", "flat")
    assert text(tab, "tokens") == "2.77" and text(tab, "speedup") == "1.98×"
    assert text(tab, "s") == "S = E / (v + c·k + o) = 2.77 / (1.00 + 0.40 + 0.00) = 1.98"
    assert text(tab, "even") == "α above 29 %, c below 0.44"
    put(tab, "c", "0.8")
    assert text(tab, "best").startswith("plain decoding") and tab.run("document.querySelector('.sim-loss') !== null")
    put(tab, "curve", "2")
    put(tab, "c", "0")
    assert "plain 99 tokens/s" in text(tab, "speed")
    put(tab, "tree", "3x")
    assert text(tab, "wrong") == ""
    put(tab, "tree", "3x0")
    assert "child counts per level" in text(tab, "wrong")
    put(tab, "tree", "4x4")
    assert "siblings need 4 chances" in text(tab, "wrong")
    put(tab, "siblings", "")
    put(tab, "curve", "own")
    put(tab, "own", "2:3")
    assert "begin at 1" in text(tab, "wrong")
    put(tab, "own", "1:1,8:1.1")
    assert text(tab, "wrong") == "" and "continued along its last slope up to 21" in text(tab, "note")
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert tab.run("document.querySelectorAll('#sim-chart polyline').length") == 1
    assert tab.complaints == []


def test_the_page_loads_nothing_from_elsewhere() -> None:
    source = SCRIPT.read_text(encoding="utf-8") + (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    assert not re.search(r"fetch\(|import\(|XMLHttpRequest|src=\"http|@import", source)
