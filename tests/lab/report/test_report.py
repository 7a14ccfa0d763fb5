"""The report: one safe file whose charts say what the run says."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from foretoken.cli.main import main
from foretoken.lab.bench.partial import Partial
from foretoken.lab.bench.results import UnitResult, rate, speedup_ci95
from foretoken.lab.bench.results import drafted as draft_tokens
from foretoken.lab.report import figures, verdict
from foretoken.lab.report.charts import Bar, BarChart, Chart, Guide, LineChart, Series
from foretoken.lab.report.embed import FONT, MISSING, WIDTH, inline
from foretoken.lab.report.page import embedded, render, write_report
from foretoken.lab.report.plots import write_plots
from foretoken.lab.report.read import Run, read_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
FAST, SLOW, COSTLY = "ngram,k=2", "ngram,k=8", "model"
ARMS = ["plain", FAST, SLOW, COSTLY]
SPEEDUPS = {"plain": 1.0, FAST: 2.1, SLOW: 0.8, COSTLY: 1.25}
ROUNDS = {  # milliseconds of a round: draft, target, verify, overhead
    "plain": (0.0, 10.0, 0.1, 0.3),
    FAST: (0.5, 11.0, 0.2, 0.4),
    SLOW: (0.4, 17.8, 0.3, 0.5),
    COSTLY: (6.0, 11.0, 0.2, 0.4),
}
VOID = {"meta", "input", "br"}


def cell(arm: str, category: str = "code", temperature: float = 0.0, batch: int = 1, **more: Any) -> dict[str, Any]:
    speedup = SPEEDUPS[arm] * (1.0 if category == "code" else 0.9)
    length = {"plain": 1.0, FAST: 2.6, SLOW: 1.2, COSTLY: 2.2}[arm]
    draft, target, verify, overhead = (ms / 1000 * 256 / length for ms in ROUNDS[arm])
    row = {
        "arm": arm, "category": category, "temperature": temperature, "batch": batch, "prompts": 4, "new_tokens": 256,
        "tokens_per_s": 40 * speedup, "speedup": speedup, "speedup_ci95": [speedup - 0.05, speedup + 0.05],
        "mean_acceptance_length": length, "acceptance_rate": 0.25,
        "identical": True, "draft_s": draft, "target_s": target, "overhead_s": verify + overhead,
        "predicted_speedup": speedup * 1.04,
    }  # fmt: skip
    return {**row, **more}


def tree_round(origin: str = "recovered", text: str = " b") -> dict[str, Any]:
    return {
        "tokens": [1, 2, 3, 4, 5], "texts": ["a", text, "\n", " c", "d"], "parents": [-1, 0, 1, 0, 0],
        "status": ["root", "accepted", "rejected", "rejected", "probe"],
        "next": {"token": 9, "text": "!", "origin": origin}, "draft_ms": 1.5, "target_ms": 9.25,
    }  # fmt: skip


def summary(**more: Any) -> dict[str, Any]:
    parts = ("draft_s", "target_s", "verify_s", "overhead_s")
    rounds = {
        arm: {**{p: v / 1000 * 50 for p, v in zip(parts, ms, strict=True)}, "total_s": sum(ms) / 20, "rounds": 50}
        for arm, ms in ROUNDS.items()
    }
    survival = {FAST: [0.8, 0.5], SLOW: [0.15, 0.05], COSTLY: [0.7, 0.5]}
    fields = {
        "summary": True, "target": "builtin", "arms": ARMS, "settings": {"dtype": "float32", "max_new_tokens": 64},
        "machine": {
            "hardware": {"cpu": "Test CPU", "cores": 2, "gpus": []}, "versions": {"foretoken": "0.1", "torch": "2.9"},
            "threads": {"torch_threads": 2, "variables": {"OMP_NUM_THREADS": "2"}, "load": 0.5},
        },
        "positions": survival, "rounds": rounds,
        "costs": {
            "target_s": {"1": 0.01, "4": 0.011, "16": 0.02, "64": 0.05}, "rest_s": 0.0004,
            "drafters": {
                arm: {"call_s": 0.0005, "step_s": 0.0, "survival": s, "proposes": 1.0, "nodes_per_depth": 1.0}
                for arm, s in survival.items()
            },
        },
        "traces": [
            {
                "arm": FAST, "category": "code", "prompt": "def f():", "temperature": 0.0,
                "rounds": [tree_round(), tree_round("bonus")],
            },
        ],
    }  # fmt: skip
    return {**fields, **more}


def written(folder: Path, *lines: Mapping[str, Any] | str) -> Path:
    file = folder / "run.jsonl"
    file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return file


CELLS = [cell(arm, category) for category in ("code", "prose") for arm in ARMS]
MORE = [cell(arm, temperature=1.0, identical=None) for arm in ARMS] + [cell(arm, batch=4) for arm in ARMS]


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A run with every kind of data."""
    cells = [*CELLS, *MORE]
    overall = [
        cell(arm, "overall", temperature, batch)
        for temperature, batch in ((0.0, 1), (1.0, 1), (0.0, 4))
        for arm in ARMS
    ]
    return written(tmp_path, *cells, summary(cells=len(cells), overall=overall))


class Page(HTMLParser):
    """Checks that tags close in order, and keeps elements and their text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def ids(self) -> set[str | None]:
        return {attrs.get("id") for _, attrs in self.elements}


def page(file: Path) -> Page:
    return Page(render(read_run(file)))


def marks(parsed: Page) -> list[dict[str, str]]:
    """Bars and points, which carry their numbers."""
    return [{key: str(value) for key, value in attrs.items()} for _, attrs in parsed.elements if "data-x" in attrs]


def strokes(parsed: Page, role: str, dashed: bool = False) -> Iterator[list[tuple[float, float]]]:
    """Corners of the lines in a colour."""
    for name, attrs in parsed.elements:
        style = attrs.get("style") or ""
        if name == "path" and f"stroke: var(--{role})" in style and ("dasharray" in style) == dashed:
            yield corners(str(attrs["d"]))


def corners(d: str) -> list[tuple[float, float]]:
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", d)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_has_every_section(full: Path) -> None:
    parsed = page(full)
    assert {"speedup", "positions", "rounds", "sweeps", "costs", "trace", "table"} <= parsed.ids
    words = "".join(parsed.words)
    for fact in (
        "builtin",
        "Test CPU, 2 cores",
        "OMP_NUM_THREADS=2",
        "float32",
        "torch 2.9",
        "load before the run 0.50",
    ):
        assert fact in words
    linked = {attrs["href"] for tag, attrs in parsed.elements if tag == "a" and (attrs["href"] or "").startswith("#")}
    assert {link and link[1:] for link in linked} <= parsed.ids and len(linked) == 7


def test_ids_are_unique(full: Path) -> None:
    ids = [attrs["id"] for _, attrs in page(full).elements if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_nothing_is_loaded_from_anywhere(full: Path) -> None:
    text = render(read_run(full))
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttpRequest|import\s", text)
    for tag, attrs in Page(text).elements:
        assert "src" not in attrs and tag not in {"link", "iframe", "img", "object"}
        assert not [name for name in attrs if name.startswith("on")]
        assert (attrs.get("href") or "#").startswith(("#", "data:"))
    assert "default-src 'none'" in text


def test_text_from_a_model_is_escaped(tmp_path: Path) -> None:
    trace = {"arm": EVIL, "category": EVIL, "prompt": EVIL, "temperature": 0.0, "rounds": [tree_round(text=EVIL)]}
    evil = cell(FAST, EVIL) | {"arm": EVIL}
    machine = {"hardware": {"cpu": EVIL}, "versions": {EVIL: EVIL}}
    file = written(
        tmp_path,
        evil,
        summary(
            target=EVIL,
            machine=machine,
            traces=[trace],
            rounds={EVIL: summary()["rounds"][FAST]},
            positions={EVIL: [0.5]},
        ),
    )
    text = render(read_run(file))
    assert "alert(1)</script>" not in text and "<img" not in text
    assert [tag for tag, _ in Page(text).elements].count("script") == 2
    assert EVIL in "".join(Page(text).words)  # shown as it is
    assert shown_data(text)["traces"][0]["rounds"][0]["texts"][1] == EVIL


def test_the_trace_opens_on_an_arm_that_drafts(tmp_path: Path) -> None:
    traces = [{"arm": arm, "prompt": "x", "temperature": 0.0, "rounds": [tree_round()]} for arm in ("plain", FAST)]
    data = shown_data(render(read_run(written(tmp_path, cell(FAST), summary(traces=traces)))))
    assert [trace["arm"] for trace in data["traces"]] == [FAST, "plain"]


def shown_data(text: str) -> dict[str, Any]:
    return json.loads(text.split('id="data">', 1)[1].split("</script>", 1)[0])


def test_the_script_never_makes_markup_of_text() -> None:
    script = (Path(figures.__file__).parent / "report.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", script)


def test_embedded_data_is_json_and_stays_inside_its_element() -> None:
    value = {"a": ["</script>", "\u2028", "&amp;"], "b": float("nan"), "c": [float("inf"), 1.5]}
    text = embedded(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": value["a"], "b": None, "c": [None, 1.5]}


def test_the_whole_run_can_be_downloaded(full: Path) -> None:
    (link,) = [attrs for _, attrs in page(full).elements if "download" in attrs]
    kind, _, coded = (link["href"] or "").partition(",")
    assert link["download"] == "run.jsonl" and kind.endswith("base64")
    assert base64.b64decode(coded) == full.read_bytes()


def test_the_table_has_every_cell(full: Path) -> None:
    parsed = page(full)
    rows = [tag for tag, _ in parsed.elements].count("tr")
    assert rows == 1 + len(CELLS) + len(MORE)
    heads = [attrs for tag, attrs in parsed.elements if tag == "th"]
    assert len([tag for tag, _ in parsed.elements if tag == "td"]) == (rows - 1) * len(heads)


def test_the_table_has_the_prefill_of_the_summary(tmp_path: Path) -> None:
    """Of an arm at a setting, over all categories."""
    prefill = [{"arm": FAST, "temperature": 0.0, "batch": 1, "prefill_s": 0.1254}, 3]
    parsed = page(written(tmp_path, *CELLS, summary(cells=len(CELLS), prefill=prefill)))
    assert "prefill s" in parsed.words and parsed.words.count("0.125") == 2


def stepped(data: dict[str, Any], folder: Path) -> Any:
    """The trace's tree, text and caption on three steps, in a browser of a few lines (needs node)."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    (folder / "data.json").write_text(json.dumps(data))
    script = Path(figures.__file__).parent / "report.js"
    (folder / "run.js").write_text(BROWSER.replace("SCRIPT", json.dumps(script.read_text())))
    done = subprocess.run([node, "run.js"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_trace_of_the_first_rounds_says_so(full: Path, tmp_path: Path) -> None:
    data = shown_data(render(read_run(full)))
    data["traces"][0]["rounds"][-1]["more_rounds"] = 16
    first, second, _ = stepped(data, tmp_path)
    assert first["caption"].startswith("round 1 of the first 2 of 18: ")
    assert second["caption"].startswith("round 2 of the first 2 of 18: ")


def test_the_script_runs(full: Path, tmp_path: Path) -> None:
    first, second, clamped = stepped(shown_data(render(read_run(full))), tmp_path)
    assert first["caption"].startswith("round 1 of 2: 3 drafted, 1 accepted, then one recovered token, 1 probes.")
    assert "Draft 1.50 ms, target 9.25 ms" in first["caption"]
    assert first["nodes"] == ["root", "accepted", "rejected", "rejected", "probe", "recovered"]
    assert first["labels"] == ["a", "·b", "⏎", "·c", "d", "!"]
    assert first["text"] == [["prompt", "def f():"], ["accepted new", " b"], ["recovered new", "!"]]
    assert second["text"][1:3] == [["accepted", " b"], ["recovered", "!"]]
    assert second["text"][3:] == [["accepted new", " b"], ["bonus new", "!"]]
    assert clamped == second


BROWSER = """
const made = (tag) => {
  const e = { tag, tagName: tag.toUpperCase(), children: [], attributes: {}, listeners: {} };
  e.setAttribute = (k, v) => { e.attributes[k] = String(v); };
  e.append = (...more) => e.children.push(...more);
  e.replaceChildren = (...more) => { e.children = more; };
  e.addEventListener = (name, run) => { e.listeners[name] = run; };
  e.querySelector = () => ({ namespaceURI: "svg" });
  return e;
};
const held = {};
globalThis.Option = function (text, value) { return Object.assign(made("option"), { textContent: text, value }); };
globalThis.document = {
  getElementById: (id) => (held[id] ??= made(id)),
  querySelectorAll: () => [],
  createElementNS: (_, tag) => made(tag),
  createElement: (tag) => made(tag),
};
document.getElementById("data").textContent = require("fs").readFileSync("data.json", "utf8");
held.arm = made("select");
held.arm.value = JSON.parse(held.data.textContent).traces[0].arm;
eval(SCRIPT);
const state = () => {
  const groups = held.tree.children[0].children.filter((e) => e.tag === "g");
  const find = (g, tag) => g.children.find((e) => e.tag === tag);
  return {
    caption: held.caption.textContent,
    nodes: groups.map((g) => find(g, "rect").attributes.class.split(" ")[1]),
    labels: groups.map((g) => find(g, "text").textContent),
    text: held.text.children.map((s) => [s.className, s.textContent]),
  };
};
const seen = [state()];
held.on.listeners.click();
seen.push(state());
held.viewer.listeners.keydown({ key: "ArrowRight", target: made("div"), preventDefault() {} });
seen.push(state());
console.log(JSON.stringify(seen));
"""


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_their_numbers(full: Path) -> None:
    run = read_run(full)
    code = next(chart for chart in figures.speedups(run, (0.0, 1)) if chart.title == "code")
    assert [(bar.label, bar.value, bar.low, bar.high) for bar in code.bars] == [
        (arm, pytest.approx(SPEEDUPS[arm]), pytest.approx(SPEEDUPS[arm] - 0.05), pytest.approx(SPEEDUPS[arm] + 0.05))
        for arm in ARMS[1:]
    ]
    drawn = Page(inline(code))
    bars = marks(drawn)
    ends = [sorted({x for x, _ in corners(bar["d"])}) for bar in bars]
    pixels = [right - left for left, right in ends]
    assert [float(bar["data-x"]) for bar in bars] == pytest.approx([SPEEDUPS[arm] for arm in ARMS[1:]])
    assert ["var(--arm0)" in bars[0]["style"], "var(--arm2)" in bars[2]["style"]] == [True, True]
    assert [p / pixels[0] for p in pixels] == pytest.approx(
        [SPEEDUPS[arm] / SPEEDUPS[FAST] for arm in ARMS[1:]], rel=1e-3
    )
    (line,) = strokes(drawn, "ink", dashed=True)
    at_one = ends[0][0] + pixels[0] / SPEEDUPS[FAST]
    assert [x for x, _ in line] == pytest.approx([at_one] * 2, abs=0.1)


def test_the_run_s_own_overall_and_ties_are_used(tmp_path: Path) -> None:
    overall = cell(FAST, "overall", speedup=1.77, speedup_ci95=[1.7, 1.8])
    counts = {
        "arm": FAST,
        "category": "code",
        "temperature": 0.0,
        "batch": 1,
        "identical": 3,
        "ties": 1,
        "differences": 0,
    }
    cells = [cell(FAST, identical=False), cell(FAST, "prose")]
    run = read_run(written(tmp_path, *cells, summary(overall=[overall], equality=[counts])))
    everything, code, prose = (panel.bars[0] for panel in figures.speedups(run, (0.0, 1)))
    assert (everything.value, everything.low, everything.high) == (1.77, 1.7, 1.8)
    assert (everything.badge, code.badge, prose.badge) == ("ties", "ties", "identical")
    assert next(iter(remarks(run))).startswith(f"Fastest (greedy, batch 1): {FAST}, 1.77x")


def test_line_charts_put_points_where_their_numbers_are() -> None:
    chart = LineChart(
        "t", "x", "y", [Series("s", [(1.0, 0.5), (2.0, 1.0), (4.0, 2.0)], 0)], log_x=True, x_ticks=[1, 2, 4]
    )
    dots = marks(Page(inline(chart)))
    places = [tuple(map(float, re.findall(r"[\d.]+", dot["transform"]))) for dot in dots]
    assert [(dot["data-x"], dot["data-y"]) for dot in dots] == [("1", "0.5"), ("2", "1"), ("4", "2")]
    (x1, y1), (x2, y2), (x4, y4) = places
    assert x2 - x1 == pytest.approx(x4 - x2, abs=0.05)  # powers of two lie equally far apart
    assert y1 - y4 == pytest.approx(3 * (y1 - y2), abs=0.05)


def test_acceptance_by_position_says_which_setting_it_is_of(tmp_path: Path) -> None:
    for more, title in (
        ({"positions_at": {"temperature": 0.0, "batch": 4}}, "Acceptance by position (greedy, batch 4)"),
        ({}, "Acceptance by position (all settings together)"),
    ):
        chart = figures.positions(read_run(written(tmp_path, cell(FAST), summary(**more))))
        assert chart is not None and chart.title == title


def test_positions_and_round_costs_are_the_summary_s(full: Path) -> None:
    run = read_run(full)
    lines, stack = figures.positions(run), figures.round_costs(run)
    assert lines is not None and stack is not None
    assert {s.name: list(s.points) for s in lines.series}[FAST] == [(1.0, 0.8), (2.0, 0.5)]
    assert {label: list(values) for label, values in stack.rows} == {
        arm: pytest.approx(list(ms)) for arm, ms in ROUNDS.items()
    }
    parts = marks(Page(inline(stack)))
    assert [float(part["data-x"]) for part in parts] == pytest.approx(
        [ROUNDS[arm][i] for i in range(4) for arm in ARMS]
    )
    assert [part["style"].split(";")[0] for part in parts[::4]] == [f"fill: var(--part{i})" for i in range(4)]


def test_predictions_lie_against_measurements(full: Path) -> None:
    chart = figures.predictions(read_run(full))
    assert chart is not None and chart.band
    points = {s.name: list(s.points) for s in chart.series}
    assert points[FAST][0] == pytest.approx((2.1 * 1.04, 2.1)) and len(points[FAST]) == 4
    assert "plain" not in points
    end = chart.guides[0].points[1][0]
    assert {round(y / x, 6) for x, y in chart.band if x} == {0.9, 1.1} and end > 2.1


def test_v_of_n_is_relative_to_one_and_marks_the_size_in_use(full: Path) -> None:
    chart = figures.node_costs(read_run(full))
    assert chart is not None
    curve, used = chart.series
    assert [v for _, v in curve.points] == pytest.approx([1.0, 1.1, 2.0, 5.0])
    assert [n for n, _ in curve.points] == [1, 4, 16, 64]
    assert used.name.startswith(FAST) and used.points[0][0] == 5.0
    assert 1.1 < used.points[0][1] < 2.0  # on the curve
    assert chart.marks[0][0] == 3.0 and FAST in chart.marks[0][1]  # 1 root + 2 drafts


def test_v_of_n_of_a_batch_counts_the_nodes_of_each_request(tmp_path: Path) -> None:
    """The trees in use and the best size are a request's; the costs are by the nodes of all requests."""
    costs = summary()["costs"]
    costs["target_s"] = {str(4 * int(n)): seconds for n, seconds in costs["target_s"].items()}
    cells = [cell(arm, batch=4) for arm in ARMS]
    of_batch = summary(costs=costs, positions_at={"temperature": 0.0, "batch": 4})
    chart = figures.node_costs(read_run(written(tmp_path, *cells, of_batch)))
    single = figures.node_costs(read_run(written(tmp_path, *(cell(arm) for arm in ARMS), summary())))
    assert chart is not None and single is not None
    points, same = ([x for series in c.series for point in series.points for x in point] for c in (chart, single))
    assert points == pytest.approx(same)
    assert (chart.marks, chart.guides, chart.x_ticks) == (single.marks, single.guides, single.x_ticks)
    assert chart.x_label == "tokens of each request scored in one call, batch 4"
    assert single.x_label == "tokens scored in one call"


def test_sweeps_show_only_what_varies(full: Path, tmp_path: Path) -> None:
    charts = {chart.title: chart for chart in figures.sweeps(read_run(full))}
    assert set(charts) == {"Speed-up against temperature", "Speed-up against batch size", "Speed-up against k"}
    (family,) = charts["Speed-up against k"].series
    assert family.name == "ngram" and [x for x, _ in family.points] == [2.0, 8.0]
    assert family.points[0][1] == pytest.approx(2.1 * 0.9)
    temperature = charts["Speed-up against temperature"]
    assert [x for x, _ in temperature.series[0].points] == [0.0, 1.0] and temperature.guides[0].points[0][1] == 1.0
    single = written(tmp_path, cell(FAST), cell(COSTLY), summary())
    assert figures.sweeps(read_run(single)) == [] and "sweeps" not in page(single).ids


def test_an_arm_keeps_its_colour() -> None:
    run = Run("x", "", [cell(arm) for arm in (COSTLY, "plain", FAST)], {"arms": ARMS})
    assert [figures.colour_of(run, arm) for arm in ARMS] == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    ("more", "badge"),
    [
        ({"identical": True}, "identical"),
        ({"identical": False}, "differs"),
        ({"identical": False, "ties": 2}, "ties"),
        ({"identical": False, "ties": 2, "differences": 1}, "differs"),
        ({"identical": None}, ""),
    ],
)
def test_equality_badges(more: dict[str, Any], badge: str) -> None:
    assert figures.equality(cell(FAST, **more)) == badge


def test_ticks_are_round() -> None:
    from foretoken.lab.report.draw import ticks

    assert ticks(0, 2.2) == [0, 0.5, 1, 1.5, 2]
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(-30, 70) == [-20, 0, 20, 40, 60]


# -- words -----------------------------------------------------------------------------------------------------------


def remarks(run: Run) -> dict[str, str]:
    return {remark.text: remark.tone for remark in verdict.verdict(run)}


def test_the_verdict_says_what_is_fastest_and_why_another_is_slow(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, *(cell(arm) for arm in ARMS), summary()))
    lines = list(remarks(run))
    assert lines[0] == f"Fastest (greedy, batch 1): {FAST}, 2.10x (95 % CI 2.05 to 2.15), with 2.60 tokens per round."
    assert lines[1].startswith(f"Faster than plain: {COSTLY}, 1.25x")
    assert lines[2] == (
        f"Slower than plain: {SLOW}, 0.80x (95 % CI 0.75 to 0.85), because few drafts are accepted (0.20 tokens per "
        "round, 25% of them) while the target call grows with its nodes by 0.75 of a plain round."
    )
    assert lines[3] == "Output equals plain decoding's in all 3 compared cells."


def test_a_expensive_draft_is_named(tmp_path: Path) -> None:
    """Costs follow from times, tokens and L alone: 1 + extra costs = L / speed-up."""
    run = read_run(written(tmp_path, cell("plain"), cell(COSTLY), cell(COSTLY, "prose"), summary()))
    assert verdict.why(run, (0.0, 1), COSTLY) == (
        "drafting costs 0.58 and the target call grows with its nodes by 0.10 of a plain round, more than the 1.20 "
        "further tokens per round bring"
    )
    extra = verdict.extra_costs(run, (0.0, 1), COSTLY)
    assert 1 + sum(extra.values()) == pytest.approx(sum(ROUNDS[COSTLY]) / sum(ROUNDS["plain"]))


def test_nothing_faster_is_said_first(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, cell("plain"), cell(SLOW), summary()))
    assert next(iter(remarks(run).items())) == ("Nothing is faster than plain decoding (greedy, batch 1).", "bad")


def test_the_plain_arm_may_be_called_none() -> None:
    run = Run("x", "", [cell(SLOW), cell("plain") | {"arm": "none"}], summary(arms=["none", SLOW]))
    assert run.rivals == [SLOW] and "grows with its nodes by 0.75" in verdict.why(run, (0.0, 1), SLOW)
    assert verdict.why(Run("x", "", [cell(SLOW)], {}), (0.0, 1), SLOW).endswith("(0.20 tokens per round, 25% of them)")


def test_noise_is_no_verdict(tmp_path: Path) -> None:
    near = cell(SLOW, speedup=0.99, speedup_ci95=[0.95, 1.03])
    run = read_run(written(tmp_path, cell(FAST), near, summary()))
    assert [tone for text, tone in remarks(run).items() if SLOW in text] == ["even"]
    unsure = read_run(written(tmp_path, cell(FAST, speedup_ci95=[0.9, 3.3]), summary()))
    text, tone = next(iter(remarks(unsure).items()))
    assert text.endswith("; but this run cannot tell it from plain decoding.") and tone == "even"


@pytest.mark.parametrize("interval", [[2.3, 2.3], None])
def test_one_prompt_tells_no_arm_from_plain(tmp_path: Path, interval: list[float] | None) -> None:
    """The interval has no width, whatever the speed."""
    cells = [cell(arm, speedup_ci95=interval) for arm in (FAST, SLOW)]
    fast, slow, _ = remarks(read_run(written(tmp_path, cell("plain"), *cells, summary()))).items()
    assert fast[0].endswith("; but this run cannot tell it from plain decoding.") and "2.10x (no interval)" in fast[0]
    assert slow[0] == f"Not told from plain by this run: {SLOW}, 0.80x (no interval)."
    assert [fast[1], slow[1]] == ["even", "even"]


def test_differing_output_and_inflated_targets_are_said(tmp_path: Path) -> None:
    file = written(tmp_path, cell(FAST, identical=False), summary(settings={"inflate": "1b"}))
    words = "".join(page(file).words)
    assert "differs from plain decoding's in 1 of 1" in words and "inflated (1b)" in words


def drafted(*cells: Mapping[str, Any], counts: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """The summary's counts of draft tokens."""
    keys = ("arm", "category", "temperature", "batch")
    return [{**{key: cell[key] for key in keys}, "drafted": counts.get(cell["arm"], 9)} for cell in cells]


def test_an_arm_that_drafted_nothing_is_not_compared(tmp_path: Path) -> None:
    """It decoded plainly: it is not the fastest, and its texts are plain decoding's by themselves."""
    cells = [cell("plain"), cell(FAST), cell(SLOW)]
    run = read_run(written(tmp_path, *cells, summary(drafted=drafted(*cells, counts={FAST: 0}))))
    lines = list(remarks(run))
    assert lines == [
        "Nothing is faster than plain decoding (greedy, batch 1).",
        lines[1],
        f"{FAST} drafted nothing (greedy, batch 1): it decoded plainly, so nothing of it is compared.",
        "Output equals plain decoding's in all 1 compared cells.",
    ]
    assert lines[1].startswith(f"Slower than plain: {SLOW}")
    alone = read_run(written(tmp_path, *cells[:2], summary(drafted=drafted(*cells[:2], counts={FAST: 0}))))
    assert list(remarks(alone)) == [lines[2]]


def test_another_engine_that_does_not_tell_its_drafts_is_compared(tmp_path: Path) -> None:
    cells = [cell("plain"), cell(FAST)]
    run = read_run(written(tmp_path, *cells, summary(drafted=drafted(*cells, counts={FAST: None}))))
    assert list(remarks(run))[-1] == "Output equals plain decoding's in all 1 compared cells."


def test_a_real_run_tells_its_drafts(tmp_path: Path) -> None:
    results = [UnitResult(FAST, 0.0, 1, "code", unit, [unit], [[1]], 1.0, 1, 0.1, drafts=2) for unit in (0, 1)]
    assert draft_tokens(results)["drafted"] == 0
    results[1].drafted = 3
    assert draft_tokens(results)["drafted"] == 3
    results[0].drafts = None
    assert draft_tokens(results)["drafted"] is None


def begun(out: Path) -> Partial:
    """An unfinished run of one arm without results."""
    partial = Partial(out, {"target": "builtin", "arms": ["plain", FAST], "max_new_tokens": 4}, resume=False)
    partial.note("target_s:1", {"1": 0.01, "4": 0.012})
    return partial


def test_an_unfinished_run_says_nothing_of_what_it_did_not_reach(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, cell("plain"), cell(FAST)))
    first, last = remarks(run).items()
    assert first[0].startswith(f"Fastest so far (greedy, batch 1): {FAST}")
    assert last == (
        "Output equals plain decoding's in all 1 compared cells; this run was interrupted, and its remaining "
        "prompts are unknown.",
        "even",
    )
    short = read_run(written(tmp_path, cell("plain"), cell(FAST), summary(cells=4)))
    assert "was interrupted" in list(remarks(short))[-1]


def test_an_unfinished_run_may_have_measured_no_arm_yet(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    partial = begun(out)
    partial.add(UnitResult("plain", 0.0, 1, "code", 0, [0], [[1, 2, 3, 4]], 2.0, 4, 0.1, drafts=4))
    partial.close()
    assert list(remarks(read_run(out))) == [
        "This run has measured no arm beside plain decoding yet: it was interrupted, so there is nothing to compare."
    ]
    plain = read_run(written(tmp_path, cell("plain"), summary(arms=["plain"])))
    assert list(remarks(plain)) == ["This run has no arm beside plain decoding, so there is nothing to compare."]


# -- runs that are not whole -----------------------------------------------------------------------------------------


def test_an_interrupted_run_is_reported_as_far_as_it_goes(tmp_path: Path) -> None:
    file = written(tmp_path, *CELLS, '{"arm": "ngr')
    out = tmp_path / "report.html"
    write_report(file, out)
    parsed = Page(out.read_text(encoding="utf-8"))
    assert {"speedup", "table"} <= parsed.ids and not {"positions", "rounds", "trace"} & parsed.ids
    words = "".join(parsed.words)
    assert "interrupted: it has 8 cells and no summary" in words and "Line 9 is incomplete" in words
    assert "Without a summary, arms are compared by category only." in words


def test_a_partial_file_is_reported_too(tmp_path: Path) -> None:
    """Two units of plain decoding and one of the arm: only the unit that both have done is compared."""
    out = tmp_path / "run.jsonl"
    partial = begun(out)
    for arm, unit, seconds in (("plain", 0, 2.0), ("plain", 1, 2.0), (FAST, 0, 0.5)):
        result = UnitResult(arm, 0.0, 1, "code", unit, [unit], [[1, 2, 3, 4]], seconds, 4, 0.1)
        result.drafts, result.accepted, result.drafted, result.per_pos = 2, 2, 4, [2]
        result.draft_s, result.target_s, result.verify_s, result.rounds = 0.1, 0.3, 0.05, [[3, 2, 0.05]] * 2
        partial.add(result)
    partial.close()
    run = read_run(out)  # the file beside it
    assert run.name == "run.jsonl.partial" and "interrupted" in run.notes[0]
    assert [(c["arm"], c["speedup"]) for c in run.cells] == [("plain", 1.0), (FAST, 4.0)]
    assert run.part("positions") == {"plain": [1.0], FAST: [1.0]}
    assert run.part("positions_at") == {"temperature": 0.0, "batch": 1}
    ids = page(out).ids
    assert {"speedup", "positions", "rounds"} <= ids and "trace" not in ids


def test_the_interval_of_an_unfinished_run_is_that_of_a_finished_one(tmp_path: Path) -> None:
    """Student's t over the units of all categories, not the cells' intervals added in squares."""
    out = tmp_path / "run.jsonl"
    partial = begun(out)
    units = [(category, unit) for category in ("code", "prose") for unit in range(3)]
    results = {
        arm: [
            UnitResult(arm, 0.0, 1, category, unit, [unit], [[1, 2, 3, 4]], seconds + 0.1 * unit, 4, 0.1)
            for category, unit in units
        ]
        for arm, seconds in (("plain", 2.0), (FAST, 0.5))
    }
    for result in (*results["plain"], *results[FAST]):
        partial.add(result)
    partial.close()
    speedup = figures.overall(read_run(out), (0.0, 1), FAST)
    low, high = speedup_ci95(results[FAST], results["plain"])
    assert speedup == figures.Speedup(rate(results[FAST]) / rate(results["plain"]), low, high)
    stored = read_run(out).overall((0.0, 1), FAST)
    assert stored is not None and stored["prompts"] == 6


def test_cells_of_another_engine_may_lack_numbers(tmp_path: Path) -> None:
    bare = {
        "arm": "llama.cpp",
        "category": "code",
        "temperature": 0.0,
        "batch": 1,
        "speedup": 1.4,
        "speedup_ci95": None,
    }
    file = written(
        tmp_path,
        bare,
        {**bare, "arm": "failed", "speedup": None},
        summary(positions={}, rounds={}, costs={}, traces=[]),
    )
    parsed = page(file)
    assert "speedup" in parsed.ids and not {"positions", "rounds", "costs", "trace"} & parsed.ids
    assert [bar["data-x"] for bar in marks(parsed)] == ["1.4"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["not json\n"], "line 1 of .* is not a JSON object"),
        ([cell(FAST), "{broken\n", cell(SLOW)], "line 2 of .* is not a JSON object"),
        ([cell(FAST), "[1, 2]\n"], "line 2 of .* is not a JSON object"),
        ([cell(FAST), {"name": "x"}], "line 2 of .* is not a bench cell, it lacks an arm"),
        ([cell(FAST, temperature="hot")], "line 1 of .* temperature or batch is not a number"),
        ([summary()], "contains no cells"),
        ([""], "contains no cells"),
    ],
)
def test_what_is_no_run_is_named(tmp_path: Path, lines: list[Any], words: str) -> None:
    out = tmp_path / "report.html"
    with pytest.raises(ValueError, match=words) as caught:
        write_report(written(tmp_path, *lines), out)
    assert "\n" not in str(caught.value) and not out.exists()


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the run .*none\.jsonl does not exist"):
        write_report(tmp_path / "none.jsonl", tmp_path / "x.html")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not text"):
        write_report(tmp_path / "binary", tmp_path / "x.html")


def test_places_that_cannot_be_written(full: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="the report cannot be written to"):
        write_report(full, tmp_path / "file" / "report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="the report cannot be written to"):
        write_report(full, tmp_path / "folder")
    with pytest.raises(ValueError, match="plots cannot be written to"):
        write_plots(full, tmp_path / "file")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_command(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folder = tmp_path / "report.html", tmp_path / "plots"
    assert main(["bench", "report", str(full), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"run": str(full), "out": str(out), "plots": []}
    assert {"speedup", "trace"} <= Page(out.read_text(encoding="utf-8")).ids
    folder.write_text("in the way")
    assert main(["bench", "report", str(full), "--out", str(out), "--plots", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("error: plots cannot be written to")
    assert main(["bench", "report", str(out), "--out", str(tmp_path / "x.html")]) == 2
    assert capsys.readouterr().err.startswith(f"error: line 1 of {out} is not a JSON object")


# -- plots -----------------------------------------------------------------------------------------------------------


def test_plots_show_the_same_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("foretoken.lab.report.plots.DPI", 30)
    small = written(tmp_path, *(cell(arm) for arm in ARMS), summary())
    files = write_plots(small, tmp_path / "plots")
    names = {file.stem for file in files}
    assert names == {"speedup", "positions", "rounds", "predicted", "node_cost", "speed_up_against_k"}
    for file in files:
        assert file.suffix == ".png" and file.read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(file.name for file in files)


def test_plotted_bars_have_the_values(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, *(cell(arm) for arm in ARMS), summary()))
    (chart,) = figures.speedups(run, (0.0, 1))
    assert chart.x_end == pytest.approx(2.15)
    (ax,) = painted(chart, is_paper=True).axes
    assert [patch.get_width() for patch in ax.patches] == pytest.approx([SPEEDUPS[arm] for arm in ARMS[1:]])


def test_panels_share_a_scale(tmp_path: Path) -> None:
    """A panel with wide intervals went on to twice the common end."""
    wide, far = [1.0, 99.0], [2.0, 5.0]
    cells = [cell(FAST, "code", speedup=1.5, speedup_ci95=wide), cell(FAST, "prose", speedup=3.0, speedup_ci95=far)]
    overall = [cell(FAST, "overall", speedup=2.0, speedup_ci95=[1.0, 3.0])]
    panels = figures.speedups(read_run(written(tmp_path, *cells, summary(overall=overall))), (0.0, 1))
    assert [panel.x_end for panel in panels] == [5.0, 5.0, 5.0]


def test_wide_intervals_leave_the_bars_their_room() -> None:
    """Two prompts give such intervals: their bars are cut off open, and the tooltip has the true ends."""
    wide, narrow = Bar("a", 1.4, -2.0, 9.0), Bar("b", 1.2, 1.1, 1.3)
    chart = BarChart("Speed-up", "times plain", [wide, narrow], line=1.0)
    assert chart.x_end == pytest.approx(2.8)
    assert chart.whisker(wide) == (0.0, chart.x_end, []) and chart.whisker(narrow) == (1.1, 1.3, [1.1, 1.3])
    assert chart.whisker(Bar("c", 1.0)) is None and BarChart("Speed-up", "times plain", [], line=1.0).x_end == 1.0
    picture = inline(chart)
    whiskers = list(strokes(Page(picture), "ink"))
    assert "95 % CI -2.00 to 9.00" in picture and len(whiskers) == 1 + 3
    xs = [x for line in whiskers for x, _ in line]
    assert min(xs) >= 0 and max(xs) <= WIDTH


# -- drawing ---------------------------------------------------------------------------------------------------------

LONG = f"model:/some/{'very/' * 9}long/folder/of/models/draft-model-135m-instruct,k=8,tree=4x2x2x1"
LINES = [Series(f"model:./draft,k={k}", [(float(x), x * k / 9) for x in range(1, 9)], k) for k in range(20)]
CROWDED: dict[str, Chart] = {
    "bars": BarChart("t" * 90, "x" * 90, [Bar(LONG, 1234.5, -1, 3, 0, "differs"), Bar("b", 1.0, badge="ties")], 1.0),
    "lines": LineChart("Title", "x", "speed-up", [*LINES, Series(LONG, [(1.0, 1e5)])], x_ticks=list(range(1, 90))),
    "guides": LineChart("t", "x", "y", LINES[:1], [Guide(LONG, [(0, 1), (2, 1)])], [(1.0, LONG, 0)], percent=True),
}


def painted(chart: Chart, is_paper: bool) -> Any:
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from foretoken.lab.report.draw import COLOURS, ChartStyle, Painter

    style = ChartStyle(8.0, 30.6, COLOURS, True) if is_paper else ChartStyle(FONT, WIDTH / FONT, COLOURS, False)
    with rc_context({**style.settings(), "text.hinting": "none"}):  # widths as in SVG, not rounded to pixels
        figure = Figure(dpi=72)
        painter = Painter(chart, figure, style)
        figure.set_size_inches(style.width * style.points / 72, painter.height * style.points / 72)
        painter.place(painter.height)
        figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("is_paper", [False, True])
@pytest.mark.parametrize("name", CROWDED)
def test_texts_neither_overlap_nor_leave_the_picture(name: str, is_paper: bool) -> None:
    figure = painted(CROWDED[name], is_paper)
    from matplotlib.text import Text

    shown = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = {text: text.get_window_extent().padded(-1) for text in shown}
    for text, box in boxes.items():
        assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1, text
        assert not [other for other, more in boxes.items() if other is not text and box.overlaps(more)], text


def test_a_cut_name_is_whole_in_its_tooltip() -> None:
    for chart in CROWDED.values():
        words = Page(inline(chart)).words
        assert LONG in words and any(word.startswith(LONG[:20]) and word.endswith("…") for word in words)


@pytest.mark.parametrize("name", ["$x$ ^2", "_hidden", "<script>", "a\nb\x00c", 'x" id="y', "#000001 1.2345", "日本語"])
def test_names_are_shown_as_they_are(name: str, recwarn: pytest.WarningsRecorder) -> None:
    shown = name.replace("\n", "\ufffd").replace("\x00", "\ufffd")
    series = Series(name, [(1.0, 1.0), (2.0, 3.0)], 0)
    for chart in (BarChart("t", "x", [Bar(name, 1.0)]), LineChart("t", name, "y", [series], [Guide(name, [(1, 1)])])):
        drawn = inline(chart)
        texts = [unescape(text) for text in re.findall("<text[^>]*>([^<]*)", drawn)]
        assert texts.count(shown) == (1 if isinstance(chart, BarChart) else 3)
        assert not Page(drawn).ids - {None} and "<script" not in drawn
    assert not [str(one.message) for one in recwarn]


def test_charts_follow_the_page_s_colours(full: Path) -> None:
    text = render(read_run(full))
    charts = "".join(re.findall(r'<svg class="chart".*?</svg>', text, re.S))
    used = set(re.findall(r"var\(--([\w-]+)\)", charts))
    assert {"ink", "soft", "edge", "page", "probe", "good", "arm0", "part3"} <= used
    assert used <= set(re.findall(r"--([\w-]+):", text)) and not re.search("#[0-9a-f]{3}", charts)
    assert charts.count('role="img"') == charts.count("<svg") == charts.count("viewBox") >= 9


def test_papers_have_the_page_s_light_colours() -> None:
    pytest.importorskip("matplotlib")
    from foretoken.lab.report.draw import COLOURS
    from foretoken.lab.report.page import palette, resource

    light = dict(reversed(re.findall(r"--([\w-]+): (#\w+);", palette() + resource("tree.css"))))
    assert {role: light[role] for role in COLOURS} == COLOURS


def test_a_page_is_the_same_whatever_the_user_s_settings(full: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context, rcParams

    text = render(read_run(full))
    with rc_context({"font.size": 30, "text.usetex": True, "axes.grid": True, "figure.facecolor": "red"}):
        mine = dict(rcParams)
        assert render(read_run(full)) == text
        assert dict(rcParams) == mine


def test_a_page_without_matplotlib_says_so(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "report", str(full), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().err == f"warning: the page has no charts: {MISSING}\n"
    parsed = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert {"speedup", "trace", "table"} <= parsed.ids and MISSING in parsed.words


def test_the_page_s_code_imports_no_matplotlib() -> None:
    code = "import sys, foretoken.lab.report.page, foretoken.lab.report.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
