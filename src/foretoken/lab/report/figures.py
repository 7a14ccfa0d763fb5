"""Charts of a benchmark report, from a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from foretoken.core.costs import RoundCosts
from foretoken.lab.bench.specs import split_arm
from foretoken.lab.report.charts import NEUTRAL, Bar, BarChart, Guide, LineChart, Point, Series, StackChart
from foretoken.lab.report.read import PLAIN, Condition, Run, number, setting_name, setting_of
from foretoken.registry import parse_spec

COST_PARTS = ("draft", "target", "verify", "overhead")

Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Speedup:
    """A speed-up with its 95 % interval, if any."""

    value: float
    low: float | None = None
    high: float | None = None


def colour_of(run: Run, arm: str) -> int:
    """An arm's colour number: the same in every chart."""
    return NEUTRAL if arm in PLAIN else run.rivals.index(arm)


def speedup_of(cell: Cell) -> Speedup | None:
    """The speed-up of a cell; an interval of zero width (a single prompt) is dropped."""
    value = number(cell.get("speedup"))
    if value is None:
        return None
    ends = cell.get("speedup_ci95")
    bounds = [number(end) for end in ends] if isinstance(ends, list) and len(ends) == 2 else [None, None]
    return Speedup(value) if None in bounds or bounds[0] == bounds[1] else Speedup(value, *bounds)


def equality(cell: Cell) -> str:
    """Equality with plain decoding: "identical", "ties", "differs", or empty if not compared."""
    same = cell.get("identical")
    if same is None or cell.get("arm") in PLAIN:
        return ""
    if same:
        return "identical"
    return "ties" if number(cell.get("ties")) and not number(cell.get("differences")) else "differs"


def _worst(cells: Sequence[Cell]) -> str:
    badges = {equality(cell) for cell in cells}
    return next((badge for badge in ("differs", "ties", "identical") if badge in badges), "")


def speedups(run: Run, setting: Condition) -> list[BarChart]:
    """Charts of the speed-up per arm: all categories together, then each."""
    groups: list[tuple[str, Sequence[Cell]]] = [
        (category, [c for c in run.at(setting) if c["category"] == category]) for category in run.categories
    ]
    together_title = "all categories"
    if len(groups) > 1:
        groups.insert(0, (together_title, run.at(setting)))
    panels = []
    for title, cells in groups:
        bars = [bar for arm in run.rivals if (bar := _bar(run, arm, cells, title == together_title)) is not None]
        if bars:
            panels.append(BarChart(title, "speed-up over plain decoding", bars, line=1.0))
    end = max((panel.x_end for panel in panels), default=0.0)
    return [replace(panel, end=end) for panel in panels]  # a common scale makes panels comparable


def _bar(run: Run, arm: str, cells: Sequence[Cell], whole: bool) -> Bar | None:
    arm_cells = [cell for cell in cells if cell["arm"] == arm]
    speedup = overall(run, setting_of(cells[0]), arm) if whole else next(filter(None, map(speedup_of, arm_cells)), None)
    if speedup is None:
        return None
    return Bar(arm, speedup.value, speedup.low, speedup.high, colour_of(run, arm), _worst(arm_cells))


def overall(run: Run, setting: Condition, arm: str) -> Speedup | None:
    """An arm's speed-up in a setting over all categories, if the run has a summary or a single category."""
    cells = run.at(setting, arm)
    stored = run.overall(setting, arm) or (cells[0] if len(cells) == 1 else {})
    return speedup_of(stored)


def positions(run: Run) -> LineChart | None:
    """Chart of the share of rounds with at least that many accepted draft tokens."""
    series = []
    for arm, shares in run.part("positions").items():
        values = [number(share) for share in shares] if isinstance(shares, list) else []
        points = [(float(i), share) for i, share in enumerate(values, 1) if share is not None]
        if points and arm in run.rivals:
            series.append(Series(arm, points, colour_of(run, arm)))
    if not series:
        return None
    deepest = int(max(x for s in series for x, _ in s.points))
    every = 1 if deepest <= 16 else 4
    ticks = [float(x) for x in range(1, deepest + 1) if x == 1 or x % every == 0]
    title = f"Acceptance by position ({_positions_of(run)})"
    return LineChart(title, "position in the draft", "accepted that far", series, percent=True, x_ticks=ticks)


def _positions_of(run: Run) -> str:
    """Name of the setting of the acceptance; runs of earlier versions combine all settings."""
    where = _measured_at(run)
    return "all settings together" if where is None else setting_name(where)


def _measured_at(run: Run) -> Condition | None:
    """The setting of the run's acceptance and costs, if it is recorded."""
    where = run.part("positions_at")
    temperature, batch = number(where.get("temperature")), number(where.get("batch"))
    return None if temperature is None or batch is None else (temperature, int(batch))


def round_ms(run: Run, arm: str) -> dict[str, float] | None:
    """Milliseconds of an arm's round by stage."""
    split = run.part("rounds").get(arm)
    count = number(split.get("rounds")) if isinstance(split, Mapping) else None
    if not count or not isinstance(split, Mapping):
        return None
    return {part: 1000 * (number(split.get(f"{part}_s")) or 0.0) / count for part in COST_PARTS}


def round_costs(run: Run) -> StackChart | None:
    """Chart of the time of a round by stage."""
    rows = [(arm, [*parts.values()]) for arm in run.arms if (parts := round_ms(run, arm)) is not None]
    return StackChart("Cost of a round", "milliseconds per round", COST_PARTS, rows) if rows else None


def sweeps(run: Run) -> list[LineChart]:
    """Charts of speed-up against temperature, batch size and every option in which arms differ, if there are two
    values."""
    temperature, batch = run.settings[0]
    by_temperature = [(t, (t, b)) for t, b in run.settings if b == batch]
    by_batch = [(float(b), (t, b)) for t, b in run.settings if t == temperature]
    charts = [
        _sweep(run, "Speed-up against temperature", "temperature", by_temperature),
        _sweep(run, "Speed-up against batch size", "requests in a batch", by_batch),
        *_option_sweeps(run),
    ]
    return [chart for chart in charts if chart is not None]


def _sweep(run: Run, title: str, x_label: str, settings: Sequence[tuple[float, Condition]]) -> LineChart | None:
    series = []
    for arm in run.rivals:
        measured = [(x, overall(run, setting, arm)) for x, setting in settings]
        points = [(x, s.value) for x, s in measured if s is not None]
        if points:
            series.append(Series(arm, points, colour_of(run, arm)))
    return _against(title, x_label, series)


def _against(title: str, x_label: str, series: Sequence[Series]) -> LineChart | None:
    ticks = sorted({x for s in series for x, _ in s.points})
    if len(ticks) < 2:
        return None
    plain = Guide("plain decoding", [(ticks[0], 1.0), (ticks[-1], 1.0)])
    return LineChart(title, x_label, "speed-up", series, [plain], x_ticks=ticks)


def _option_sweeps(run: Run) -> list[LineChart]:
    """One chart per numeric option (k, nodes, depth ...) in which otherwise equal arms differ."""
    groups: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for arm in run.rivals:
        for option, value, rest in _numeric_options(arm):
            groups.setdefault(option, {}).setdefault(rest, []).append((value, arm))
    charts = []
    for option, families in groups.items():
        series = []
        for rest, members in families.items():
            measured = [(x, overall(run, run.settings[0], arm)) for x, arm in sorted(members)]
            points = [(x, s.value) for x, s in measured if s is not None]
            if len(points) > 1:
                series.append(Series(rest, points, colour_of(run, members[0][1])))
        if (chart := _against(f"Speed-up against {option}", option, series)) is not None:
            charts.append(chart)
    return charts


def _numeric_options(arm: str) -> list[tuple[str, float, str]]:
    """(option, value, the spec without it) for every numeric option of an arm."""
    try:
        drafter, controller = split_arm(arm)
        spec = parse_spec(drafter)
    except ValueError:
        return []
    options = []
    for option, value in spec.options.items():
        try:
            number = float(value)
        except ValueError:
            continue
        rest = [f"{key}={other}" for key, other in spec.options.items() if key != option]
        name = spec.name if spec.path is None else f"{spec.name}:{spec.path}"
        family = ",".join([name, *rest]) + (f"@{controller}" if controller else "")
        options.append((option, number, family))
    return options


def predictions(run: Run) -> LineChart | None:
    """Chart of measured against predicted speed-up."""
    series = []
    for arm in run.rivals:
        points = [
            (x, y, cell)
            for cell in run.cells
            if cell["arm"] == arm
            and (x := number(cell.get("predicted_speedup"))) is not None
            and (y := number(cell.get("speedup"))) is not None
        ]
        if points:
            labels = [f"{c['category']}, T={c['temperature']:g}, batch {c['batch']}" for _, _, c in points]
            series.append(Series(arm, [(x, y) for x, y, _ in points], colour_of(run, arm), False, labels))
    if not series:
        return None
    end = 1.1 * max(max(point) for s in series for point in s.points)
    equal = Guide("measured = predicted", [(0.0, 0.0), (end, end)])
    # Within 10 % of the prediction
    band = [(0.0, 0.0), (end, 1.1 * end), (end, 0.9 * end)]
    title = "Predicted and measured speed-up"
    return LineChart(title, "predicted speed-up", "measured speed-up", series, [equal], band=band)


def node_costs(run: Run) -> LineChart | None:
    """Chart of v(n), the relative cost of scoring n tokens of every request, with the tree sizes in use marked."""
    try:
        costs = RoundCosts.from_dict(run.part("costs"))
    except ValueError:  # no costs in this run
        return None
    if len(costs.target.seconds) < 2:
        return None
    where = _measured_at(run)
    batch = 1 if where is None else max(1, where[1])
    counts = sorted(costs.target.seconds)
    curve = [(n / batch, costs.target.relative(n)) for n in counts]
    most = counts[-1] / batch
    used = [
        Series(f"{arm}: {nodes:.3g} nodes", [(nodes, _relative(costs, nodes * batch))], colour_of(run, arm), False)
        for arm, nodes in nodes_used(run).items()
        if 1 <= nodes <= most
    ]
    top = min(most, max(2.0, 1.25 * max(v for _, v in curve)))
    steps: list[Point] = [(1 + (top - 1) * i / 20, 1 + (top - 1) * i / 20) for i in range(21)]
    guides = [Guide("free: every call costs the same", [(1.0, 1.0), (most, 1.0)]), Guide("linear", steps)]
    best = best_size(costs, batch)
    marks = [] if best is None else [(float(best[1]), f"best by the cost model: {best[1]} nodes, {best[0]}", NEUTRAL)]
    each = "" if batch == 1 else " of each request"
    return LineChart(
        "Cost of a target call",
        f"tokens{each} scored in one call" + (f", batch {batch}" if each else ""),
        f"v(n), in calls with one token{each}",
        [Series("measured v(n)", curve), *used],
        guides,
        marks,
        log_x=True,
        x_ticks=[x for x, _ in curve if x.is_integer() and int(x) & (int(x) - 1) == 0],
    )


def _relative(costs: RoundCosts, nodes: float) -> float:
    """v(n) of a mean number of nodes of the batch."""
    below = int(nodes)
    low, high = costs.target.relative(below), costs.target.relative(below + 1)
    return low + (nodes - below) * (high - low)


def nodes_used(run: Run) -> dict[str, float]:
    """Mean nodes per round (including the root) of a request of every traced arm."""
    sizes: dict[str, list[int]] = {}
    for trace in run.traces:
        sizes.setdefault(str(trace.get("arm")), []).extend(len(r["tokens"]) for r in trace["rounds"] if r.get("tokens"))
    return {arm: fmean(counts) for arm, counts in sizes.items() if counts and arm in run.rivals}


def best_size(costs: RoundCosts, batch: int = 1) -> tuple[str, int] | None:
    """Drafter and nodes per request and round with the greatest predicted speed-up, if above plain decoding."""
    choices = [
        (costs.speedup(spec, depth, batch), spec, 1 + round(cost.nodes_per_depth * depth * cost.proposes))
        for spec, cost in costs.drafters.items()
        for depth in range(1, len(cost.survival) + 1)
    ]
    speedup, spec, nodes = max(choices, default=(0.0, "", 0))
    return (spec, nodes) if speedup > 1 else None
