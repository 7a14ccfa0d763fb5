"""Draws the plots of the pages on theory into ``docs/figures/theory``, from the formulas in ``foretoken.lab.plan``.

python docs/make_plots.py            # all of them; nothing is measured
python docs/make_plots.py batches    # these only
"""

from __future__ import annotations

import argparse
import heapq
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from foretoken.lab.plan.assumptions import Assumptions
from foretoken.lab.plan.planner import plan
from foretoken.lab.plan.roofline import Roofline
from foretoken.lab.plan.speedup import alpha_for_tokens, expected_tokens, round_cost
from foretoken.lab.report.charts import Chart, Guide, LineChart, Series, StackChart
from foretoken.lab.report.embed import WIDTH, inline
from foretoken.lab.report.markup import Markup, tag
from foretoken.lab.report.page import palette, resource

FOLDER = Path(__file__).parent / "figures" / "theory"
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
H100 = {"bandwidth": 3.35e12, "flops": 989e12}
POSITIONS = (0.6, 0.15, 0.05)
PLAIN = "plain decoding"
MARGIN = 14.0
STYLE = """
.back { fill: var(--page); stroke: var(--edge); } .head { fill: var(--ink); font: 600 15px system-ui, sans-serif; }
.chart { stroke-linejoin: round; } .chart text { paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
"""


def expected() -> Chart:
    """E against k."""
    ks = range(17)
    lines = [Series(f"α = {a}", [(k, expected_tokens(a, k)) for k in ks], i) for i, a in enumerate(ALPHAS)]
    limit = Guide("the limit for α = 0.8", [(0, 5.0), (16, 5.0)])
    return LineChart("Tokens per round", "k, draft tokens per round", "E, tokens per round", lines, [limit])


def best_length() -> Chart:
    """S against k."""
    ks = range(17)
    lines = []
    for i, c in enumerate((0.0, 0.02, 0.05, 0.1, 0.2, 0.4)):
        best = f"best k = {Assumptions(0.7, c).best_k(range(65))}" if c else "the longer the better"
        lines.append(Series(f"c = {c:g} ({best})", [(k, Assumptions(0.7, c).speedup(k)) for k in ks], i))
    plain = Guide(PLAIN, [(0, 1.0), (16, 1.0)])
    return LineChart("Speed-up by draft length, α = 0.7", "k, draft tokens per round", "speed-up", lines, [plain])


def arithmetic() -> Chart:
    """What a token costs in arithmetic and in reads."""
    less, more = (plan(Assumptions(alpha), range(17)).rows for alpha in (0.7, 0.9))
    lines = [
        Series("operations per token, α = 0.7", [(row.k, row.operations) for row in less], 1),
        Series("operations per token, α = 0.9", [(row.k, row.operations) for row in more], 4),
        Series("reads of the target's weights, α = 0.7", [(row.k, row.target_reads) for row in less], 0),
        Series("reads of the target's weights, α = 0.9", [(row.k, row.target_reads) for row in more], 2),
    ]
    plain = Guide(PLAIN, [(0, 1.0), (16, 1.0)])
    return LineChart("Arithmetic for memory", "k, draft tokens per round", "times plain decoding", lines, [plain])


def roofline() -> Chart:
    """v(n) of a dense model and of a mixture of experts."""
    sizes = [2**i for i in range(11)]
    dense = Roofline(parameters=8e9, **H100)
    experts = Roofline(parameters=57e9, experts=64, active=8, expert_parameters=0.85, **H100)
    lines = [
        Series("dense, 8 billion parameters", [(n, dense(n)) for n in sizes], 0),
        Series("64 experts, 8 active, 57 billion", [(n, experts(n)) for n in sizes], 1),
    ]
    ridge = H100["flops"] * 2 / (2 * H100["bandwidth"])  # 2 bytes a weight, 2 operations
    return LineChart(
        "Cost of scoring n tokens, H100 in bfloat16 (peak figures)", "n, tokens in one call", "v(n), cost of one token",
        lines, marks=[(ridge, f"n* = {ridge:.0f}: reads take as long as arithmetic", 0)], log_x=True,
        x_ticks=[float(n) for n in sizes],
    )  # fmt: skip


def trees() -> Chart:
    """E of chains and of the best tree, by their number of nodes."""
    sizes = range(1, 33)
    lines = [
        Series("best tree", [(n, best_tree(n)) for n in sizes], 0),
        Series("chain", [(n, expected_tokens(POSITIONS[0], n)) for n in sizes], 1),
    ]
    words = ", ".join(f"{a:g}" for a in POSITIONS)
    return LineChart(f"Trees and chains, positional acceptance {words}", "draft nodes", "E, tokens per round", lines)


def best_tree(nodes: int) -> float:
    """E of the best tree of so many nodes: those that are reached most often (children count by position)."""
    waiting = [-POSITIONS[0]]
    total, begun = 1.0, {-POSITIONS[0]: [(1.0, 0)]}
    for _ in range(nodes):
        reached = heapq.heappop(waiting)
        parent, place = begun[reached].pop()
        total -= reached
        following = [(-reached, 0)] + ([(parent, place + 1)] if place + 1 < len(POSITIONS) else [])
        for above, position in following:
            value = -above * POSITIONS[position]
            heapq.heappush(waiting, value)
            begun.setdefault(value, []).append((above, position))
    return total


def batches() -> Chart:
    """S against the batch size, with the best k and with fixed ones."""
    sizes = [2**i for i in range(10)]
    given = Assumptions(0.75, c=0.05, v=Roofline(parameters=8e9, **H100))
    made = plan(given, range(1, 17), batches=sizes)
    best = [made.best_by_batch[size] for size in sizes]
    tops = [(b, given.speedup(k, b)) for b, k in zip(sizes, best, strict=True)]
    lines = [Series("best k of each batch", tops, 0, labels=[f"k = {k}" for k in best])]
    lines += [
        Series(f"k = {k} kept", [(b, given.speedup(k, b)) for b in sizes], i + 1) for i, k in enumerate((2, 4, 7))
    ]
    plain = Guide(PLAIN, [(1, 1.0), (sizes[-1], 1.0)])
    return LineChart("Speed-up by batch, α = 0.75, c = 0.05, dense model on an H100", "requests per batch", "speed-up",
                 lines, [plain], log_x=True, x_ticks=[float(b) for b in sizes])  # fmt: skip


def residual() -> Chart:
    """What is accepted, recovered and rejected, token by token."""
    p = {"the": 0.40, "a": 0.30, "one": 0.15, "this": 0.10, "sea": 0.05}
    q = {"the": 0.60, "a": 0.10, "one": 0.20, "this": 0.05, "sea": 0.05}
    rows = [
        (f"{word}: p {p[word]:.2f}, q {q[word]:.2f}",
         [min(p[word], q[word]), max(p[word] - q[word], 0.0), max(q[word] - p[word], 0.0)])
        for word in p
    ]  # fmt: skip
    parts = ("accepted: min(p, q)", "recovered: p above q", "rejected: q above p")
    return StackChart(
        "Accepted and recovered make p; as much is recovered as was rejected", "probability", parts, rows, ""
    )


def break_even() -> Chart:
    """The least alpha with which a draft of k tokens pays."""
    ks = range(1, 17)
    lines = []
    for i, cost in enumerate((0.02, 0.05, 0.1, 0.2, 0.3)):
        found = [(k, alpha_for_tokens(round_cost(k, cost), k)) for k in ks]
        lines.append(Series(f"{cost:g}", [(k, alpha) for k, alpha in found if alpha is not None], i))
    title = "Acceptance that pays, by what a guess costs (drafting and checking)"
    return LineChart(title, "k, draft tokens per round", "least α", lines, percent=True)


PLOTS: dict[str, tuple[Callable[[], Chart], str]] = {
    "expected_tokens": (expected, "Tokens per round against draft length: each line bends towards 1 / (1 - alpha)."),
    "best_length": (best_length, "Speed-up against draft length: lines rise to a best length and fall; the more a "
                    "draft step costs, the earlier."),
    "arithmetic": (arithmetic, "Operations per token rise with draft length while reads of the weights fall."),
    "roofline": (roofline, "The cost of a call is flat up to about 295 tokens for a dense model; with experts it rises "
                 "at once and then stays."),
    "trees": (trees, "The best tree gives more tokens per round than a chain of as many nodes, and the gap grows."),
    "batches": (batches, "Speed-up against batch size: flat, then falling below plain decoding where k is kept; the "
                "best k falls to 0."),
    "residual": (residual, "Per token a bar: what both distributions share is accepted, the rest of p is recovered."),
    "break_even": (break_even, "The least acceptance that pays, against draft length: longer drafts and more expensive "
                   "guesses need more."),
}  # fmt: skip
"""By file name: how it is drawn, and what it shows in words."""


def picture(chart: Chart, words: str) -> str:
    """The SVG of a chart.

    Args:
        chart: what is drawn; its title stands above.
        words: what somebody who cannot see it is told.
    """
    drawn = inline(chart)
    (height,) = re.findall(r'viewBox="0 0 [\d.]+ ([\d.]+)"', drawn)
    top = MARGIN + 26
    wide, high = WIDTH + 2 * MARGIN, top + float(height) + 6
    plot = tag("g", drawn, transform=f"translate({MARGIN:g},{top:g})")
    back = tag("rect", x=0.5, y=0.5, width=wide - 1, height=high - 1, rx=10, class_="back")
    head = tag("text", chart.title, x=MARGIN, y=MARGIN + 12, class_="head")
    return tag(
        "svg", tag("style", Markup(palette() + _variables() + STYLE)), back, head, plot,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {wide:g} {high:g}", width=f"{wide:g}", height=f"{high:g}",
        role="img", aria_label=words,
    ) + "\n"  # fmt: skip


def _variables() -> str:
    """The colours of the pages' style sheet, which come first in it."""
    return resource("tree.css").split("*/\n", 1)[1].split(".edge", 1)[0]


def write(names: Sequence[str] = ()) -> None:
    """Draw these plots, or all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (make, words) in PLOTS.items():
        if not names or name in names:
            (FOLDER / f"{name}.svg").write_text(picture(make(), words), encoding="utf-8")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PLOTS, []], help="only these")
    write(parser.parse_args().names)


if __name__ == "__main__":
    main()
