"""A plan as a picture: speed-up against draft length, draft cost and batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.core.io.files import replacing
from foretoken.lab.plan.assumptions import Assumptions
from foretoken.lab.plan.planner import Plan

HERE, OTHER, PALE = "#b3442f", "#5b84b1", "#9bb7d4"
SHIFTS = (-0.2, -0.1, 0.0, 0.1, 0.2)
"""Acceptances drawn: the plan's and these differences from it."""
BATCHES = tuple(2**i for i in range(9))


def plot(plan: Plan, file: Path) -> None:
    """Draw three panels into a PNG file, whole or not at all.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'foretoken[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    _against_k(left, plan)
    _against_c(middle, plan)
    _against_batch(right, plan)
    middle.annotate("plain decoding", (0.02, 1.0), (0, 3), ("axes fraction", "data"), "offset points", fontsize=8)
    for axes in (left, middle, right):
        axes.axhline(1.0, color="#555555", linewidth=1.0, linestyle=":")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0.0)
        axes.set_ylabel("speed-up over plain decoding")
    with replacing(file) as draft:
        figure.savefig(draft, dpi=130, format="png")
    plt.close(figure)


def _against_k(axes: Any, plan: Plan) -> None:
    """One line per acceptance, its best k marked; trees as diamonds at their depth."""
    batch, ks = plan.batches[0], range(max(8, plan.rows[-1].k) + 1)
    ends: list[tuple[float, str, str]] = []
    for shift in SHIFTS:
        case = plan.assumptions.shifted(shift)
        if shift and case.acceptance in [plan.assumptions.shifted(s).acceptance for s in SHIFTS if abs(s) < abs(shift)]:
            continue
        values = [case.speedup(k, batch) for k in ks]
        best = max(ks, key=lambda k: values[k])
        colour, width = (HERE, 2.2) if shift == 0 else (PALE if shift < 0 else OTHER, 1.3)
        axes.plot(ks, values, color=colour, linewidth=width, zorder=3 if shift == 0 else 2)
        axes.plot(best, values[best], "o", color=colour, markersize=6 if shift == 0 else 4, zorder=4)
        ends.append((values[-1], _acceptance(case, shift), colour))
    _name_ends(axes, ks[-1], ends)
    for tree in plan.trees:
        axes.plot(tree.depth, tree.speedups[batch], "D", color="#444444", markersize=5, zorder=5)
        axes.annotate(
            tree.shape,
            (tree.depth, tree.speedups[batch]),
            (5, 5),
            textcoords="offset points",
            fontsize=8,
            color="#444444",
        )
    axes.set_xlabel("k, draft tokens per round (dot: the best)")
    axes.set_title("How long to draft, by acceptance" + _at(batch), fontsize=10)


def _against_c(axes: Any, plan: Plan) -> None:
    """The best k at every draft cost, and the plan's k kept."""
    given, batch, kept = plan.assumptions, plan.batches[0], _kept(plan)
    ks = [row.k for row in plan.rows]
    edge = plan.limits.c if plan.limits and plan.limits.c is not None else 0.0
    cs = np.linspace(0.0, max(0.2, 1.3 * edge, 1.5 * given.c), 120)
    cases = [replace(given, c=float(c)) for c in cs]
    axes.plot(
        cs, [case.speedup(case.best_k(ks, batch), batch) for case in cases], color=OTHER, label="best k at each c"
    )
    axes.plot(cs, [case.speedup(kept, batch) for case in cases], color=HERE, linestyle="--", label=f"k = {kept} kept")
    axes.plot(given.c, given.speedup(kept, batch), "o", color=HERE, zorder=4)
    axes.set_ylim(top=1.1 * max(axes.get_ylim()[1], 1.0))
    axes.annotate(
        f"c = {given.c:.2g}", (given.c, given.speedup(kept, batch)), (7, 7), textcoords="offset points", fontsize=9
    )
    axes.set_xlabel("c, cost of a draft step / cost of a target step")
    axes.set_title("What a slower drafter costs" + _at(batch), fontsize=10)
    axes.legend(fontsize=8, loc="lower left")


def _against_batch(axes: Any, plan: Plan) -> None:
    """The best k in every batch (its k written above), and the plan's k kept."""
    given, kept = plan.assumptions, _kept(plan)
    ks = [row.k for row in plan.rows]
    sizes = sorted({*BATCHES, *plan.batches})
    best = [given.best_k(ks, size) for size in sizes]
    tops = [given.speedup(k, size) for k, size in zip(best, sizes, strict=True)]
    axes.plot(sizes, tops, color=OTHER, marker="o", markersize=4, label="best k in each batch (its k above)")
    axes.plot(sizes, [given.speedup(kept, s) for s in sizes], color=HERE, linestyle="--", label=f"k = {kept} kept")
    for size, top, k in zip(sizes, tops, best, strict=True):
        axes.annotate(str(k), (size, top), (0, 6), textcoords="offset points", ha="center", fontsize=8, color=OTHER)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [str(size) for size in BATCHES])
    axes.set_ylim(top=1.2 * max(tops))
    axes.set_xlabel("requests per batch")
    axes.set_title("What larger batches leave of it", fontsize=10)
    axes.legend(fontsize=8, loc="best")


def _kept(plan: Plan) -> int:
    """The plan's k, or the nearest one that drafts."""
    return plan.best.k or (plan.nearest.k if plan.nearest else 0)


def _acceptance(case: Assumptions, shift: float) -> str:
    if isinstance(case.acceptance, float | int):
        return f"α = {case.acceptance:.2g}"
    return f"α {shift:+.1f}" if shift else "as measured"


def _at(batch: int) -> str:
    return "" if batch == 1 else f" (batch {batch})"


def _name_ends(axes: Any, x: int, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write names behind the lines' right ends, moved apart where lines end close to each other."""
    low, high = axes.get_ylim()
    gap, above = 0.05 * (high - min(low, 0.0)), -np.inf
    for y, name, colour in sorted(ends):
        above = max(y, above + gap)
        axes.annotate(name, (x, y), (x + 0.02 * x, above), color=colour, fontsize=8, va="center", annotation_clip=False)
    axes.set_xlim(0, x * 1.2)
    axes.set_xticks(range(0, x + 1, max(1, round(x / 8))))
