"""Charts of a plan: speed-up against draft length, draft cost and batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foretoken.lab.plan.assumptions import Assumptions
from foretoken.lab.plan.planner import Plan
from foretoken.lab.report.charts import Guide, LineChart, Series
from foretoken.lab.report.plots import write_charts

SPEEDUP = "speed-up over plain decoding"


def plot(plan: Plan, file: Path) -> None:
    """Draw three charts into a PNG file, written atomically."""
    write_charts([_against_k(plan), _against_c(plan), _against_batch(plan)], file, most_columns=3)


def _against_k(plan: Plan) -> LineChart:
    """Chart with one line per acceptance; trees at their depth."""
    batch, ks = plan.batches[0], range(max(8, plan.rows[-1].k) + 1)
    lines: dict[object, Series] = {}
    for shift in (0.0, 0.1, 0.2, -0.1, -0.2):
        case = plan.assumptions.shifted(shift)
        if case.acceptance not in lines:  # several offsets may be clipped to the same value
            points = [(k, case.speedup(k, batch)) for k in ks]
            best = max(points, key=lambda point: point[1])[0]
            name = f"{_acceptance(case, shift)}, best k = {best}"
            lines[case.acceptance] = Series(name, points, len(lines))
    trees = [
        Series(f"tree {tree.shape}", [(tree.depth, tree.speedups[batch])], len(lines) + i, joined=False)
        for i, tree in enumerate(plan.trees)
    ]
    title = "How long to draft, by acceptance" + _at(batch)
    return LineChart(title, "k, draft tokens per round", SPEEDUP, [*lines.values(), *trees], [_plain(0, ks[-1])])


def _against_c(plan: Plan, points: int = 33) -> LineChart:
    """Chart of the best k at every draft cost, and of the plan's k."""
    assumptions, batch, k = plan.assumptions, plan.batches[0], _drafting_k(plan)
    ks = [row.k for row in plan.rows]
    edge = plan.limits.c if plan.limits and plan.limits.c is not None else 0.0
    last = max(0.2, 1.3 * edge, 1.5 * assumptions.c)
    cases = [replace(assumptions, c=last * i / (points - 1)) for i in range(points)]
    best = [(case.c, case.speedup(case.best_k(ks, batch), batch)) for case in cases]
    same = [(case.c, case.speedup(k, batch)) for case in cases]
    return LineChart(
        "What a slower drafter costs" + _at(batch), "c, cost of a draft step / cost of a target step", SPEEDUP,
        [Series("best k at each c", best, 1), Series(f"k = {k} kept", same, 0)],
        [_plain(0.0, last)], [(assumptions.c, f"c = {assumptions.c:.2g}", 0)],
    )  # fmt: skip


def _against_batch(plan: Plan) -> LineChart:
    """Chart of the best k at every batch size, and of the plan's k."""
    assumptions, plan_k = plan.assumptions, _drafting_k(plan)
    ks = [row.k for row in plan.rows]
    powers = tuple(2**i for i in range(9))
    sizes = sorted({*powers, *plan.batches})
    best = [assumptions.best_k(ks, size) for size in sizes]
    series = [
        Series(
            f"best k in each batch ({', '.join(map(str, best))})",
            [(size, assumptions.speedup(k, size)) for k, size in zip(best, sizes, strict=True)], 1,
        ),
        Series(f"k = {plan_k} kept", [(size, assumptions.speedup(plan_k, size)) for size in sizes], 0),
    ]  # fmt: skip
    title = "What larger batches leave of it"
    return LineChart(title, "requests per batch", SPEEDUP, series, [_plain(1, sizes[-1])], log_x=True, x_ticks=powers)


def _plain(first: float, last: float) -> Guide:
    return Guide("plain decoding", [(first, 1.0), (last, 1.0)])


def _drafting_k(plan: Plan) -> int:
    """The plan's k, or the nearest k > 0."""
    return plan.best.k or (plan.nearest.k if plan.nearest else 0)


def _acceptance(case: Assumptions, shift: float) -> str:
    if isinstance(case.acceptance, Sequence):
        return f"α {shift:+.1f}" if shift else "as measured"
    return f"α = {case.acceptance:.2g}"


def _at(batch: int) -> str:
    return "" if batch == 1 else f" (batch {batch})"
