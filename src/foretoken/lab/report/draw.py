"""Draws charts with matplotlib, alike for the page (``embed.py``) and for papers (``plots.py``).

Lengths are multiples of the font size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import FigureBase
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from foretoken.lab.report.charts import LIGHT, NEUTRAL, BarChart, Chart, Hint, LineChart, Series, StackChart, short

COLOURS = {
    "page": "#ffffff", "ink": "#1a1d21", "soft": "#565d66", "edge": "#d3d8de", "good": "#0b6b3a", "bad": "#a8201a",
    "probe": "#eceff3", "part0": "#2e93fd", "part1": "#aeb6c0", "part2": "#720d82", "part3": "#d76d75",
    **{f"arm{i}": colour for i, colour in enumerate(LIGHT)},
}  # fmt: skip
"""Colours on white by role, as in the page's style sheets."""
MARKERS = (("o", 0.6), ("s", 0.55), ("^", 0.7), ("D", 0.55), ("v", 0.7), ("P", 0.7), ("X", 0.7), ("*", 0.8))
"""Shapes, which tell series apart without colour, and sizes that look alike."""
DASHES = ("-", "--", ":")
BADGES = {"identical": ("= same", "good"), "ties": ("≈ ties", "soft"), "differs": ("≠ differs", "bad")}
ROW, BAR, NAMES, KEYS, BOTTOM = 2.15, 0.62, 20.0, 1.45, 3.5
"""A row of bars, the part of it that a bar fills, the longest name beside it, a legend's row, room for an x axis."""


@dataclass(frozen=True)
class ChartStyle:
    """Font size in points, width of a chart and colours by role.  Charts in papers have a title and no badges."""

    points: float
    width: float
    colours: Mapping[str, str]
    is_paper: bool

    def settings(self) -> Any:
        """Settings of matplotlib."""
        soft, sides = self.colours["soft"], ("left", "top", "right")
        return {
            "font.size": self.points, "text.color": self.colours["ink"], "text.parse_math": False,
            "text.usetex": False, "figure.facecolor": self.colours["page"], "axes.axisbelow": True,
            "axes.edgecolor": soft, "axes.labelcolor": soft, "xtick.color": soft, "ytick.color": soft,
            "ytick.major.size": 0, "grid.color": self.colours["edge"], "grid.alpha": 0.6, "legend.frameon": False,
            "legend.borderpad": 0, "legend.borderaxespad": 0, "legend.handletextpad": 0.6, "legend.columnspacing": 1.4,
            "lines.linewidth": self.points / 6, "lines.markeredgewidth": self.points / 12,
            **{f"axes.spines.{side}": False for side in sides},
        }  # fmt: skip

    def arm(self, number: int) -> str:
        return self.colours["ink" if number == NEUTRAL else f"arm{number % len(LIGHT)}"]

    def series(self, series: Series) -> dict[str, Any]:
        """A line of a series; repeated colours differ by dashes."""
        place = max(series.colour, 0)
        marker, size = ("o", 0.4) if series.colour == NEUTRAL else MARKERS[place % len(MARKERS)]
        dashes = DASHES[place // len(LIGHT) % len(DASHES)] if series.joined else ""
        return {
            "color": self.arm(series.colour), "linestyle": dashes, "marker": marker,
            "markersize": size * self.points, "markeredgecolor": self.colours["page"],
        }  # fmt: skip


class Painter:
    """One chart in a figure, which :meth:`place` arranges.

    Attributes:
        height: height that the chart needs.
        hints: of the marks of an artist, by its id.
    """

    def __init__(self, chart: Chart, figure: FigureBase, style: ChartStyle) -> None:
        self.chart, self.figure, self.style = chart, figure, style
        self.hints: dict[str, Sequence[Hint]] = {}
        self.legend: list[list[tuple[Artist, str]]] = []
        self.free = 0.0  # width that is left in the last row of the legend
        self.ax = figure.add_axes((0, 0, 1, 1))
        self.ax.patch.set_visible(False)
        self.left, self.right, self.body = (
            self._bars(chart) if isinstance(chart, BarChart) else self._stack(chart) if isinstance(chart, StackChart)
            else self._lines(chart)
        )  # fmt: skip
        self.head = 1.9 if style.is_paper else 0.3
        self.top = self.head + KEYS * len(self.legend) + 0.8
        self.height = self.top + self.body + BOTTOM

    def place(self, height: float) -> None:
        """Arrange the chart in the upper part of its figure, which is this high."""
        width, bottom = self.style.width, self.top + self.body
        inside = max(width - self.left - self.right, 1.0)
        self.ax.set_position((self.left / width, 1 - bottom / height, inside / width, self.body / height))
        label = _cut(self.chart.x_label, width)
        half = _breadth(label) / 2
        middle = min(max(self.left + inside / 2, half), width - half)  # under the axes, but inside the figure
        self.ax.set_xlabel(label, x=(middle - self.left) / inside)
        self._label_x()
        side = 0.01 if self.style.is_paper else 0
        if self.style.is_paper:
            self.figure.text(side, 1 - 0.3 / height, _cut(self.chart.title, width / 1.2 - 1), va="top", size="large")
        for i, row in enumerate(self.legend):
            keys = self.figure.legend(
                [artist for artist, _ in row], ["-"] * len(row), ncols=len(row), loc="upper left",
                bbox_to_anchor=(side, 1 - (self.head + KEYS * i) / height),
            )  # fmt: skip
            for words, (_, name) in zip(keys.get_texts(), row, strict=True):
                words.set_text(_cut(name, width - 4))  # given above, names with a leading underscore would be left out
                self._hint(words, (name, {}))

    def _label_x(self) -> None:
        """Ticks, with a label where there is room."""
        given = self.chart.x_ticks if isinstance(self.chart, LineChart) else ()
        places, labels, free = list(given) or ticks(*self.ax.get_xlim()), [], float("-inf")
        self.ax.set_xticks(places)
        for place in places:
            middle, half = self.ax.transData.transform((place, 0))[0] / self.style.points, _breadth(short(place)) / 2
            labels.append(short(place) if middle - half >= free else "")
            free = middle + half + 0.5 if labels[-1] else free
        self.ax.set_xticks(places, labels)

    def _key(self, artist: Artist, name: str) -> None:
        """Add to the legend, in a new row where the last one is full."""
        need = 4.0 + _breadth(_cut(name, self.style.width - 4))
        if need > self.free:
            self.legend.append([])
            self.free = self.style.width
        self.legend[-1].append((artist, name))
        self.free -= need

    def _hint(self, artist: Artist, *hints: Hint) -> None:
        artist.set_gid(f"hint{len(self.hints)}")
        self.hints[f"hint{len(self.hints)}"] = hints

    def _write(self, words: str, x: float, row: float, away: float, **how: Any) -> Artist:
        offset = (away * self.style.points, 0)
        return self.ax.annotate(words, (x, row), offset, textcoords="offset points", va="center_baseline", **how)

    def _rows(self, labels: Sequence[str], end: float) -> tuple[float, float]:
        """Name the rows of bars; returns the room for the names, and the height."""
        names = [_cut(label, NAMES) for label in labels]
        self.ax.spines.bottom.set_visible(False)
        self.ax.set_xlim(0, 1.02 * max(end, 1e-9))
        self.ax.set_ylim(len(names) - 0.5, -0.5)
        self.ax.set_yticks([])
        self.ax.grid(axis="x")
        for row, (name, label) in enumerate(zip(names, labels, strict=True)):
            self._hint(self._write(name, 0, row, -0.6, ha="right"), (label, {}))
        return 1.0 + max(map(_breadth, names), default=0), ROW * len(names)

    def _bars(self, chart: BarChart) -> tuple[float, float, float]:
        ax, colours, points = self.ax, self.style.colours, self.style.points
        with_badges = not self.style.is_paper and any(bar.badge for bar in chart.bars)
        left, height = self._rows([bar.label for bar in chart.bars], chart.x_end)
        right = 1.0
        for row, bar in enumerate(chart.bars):
            end = max(bar.value, 0)
            (shape,) = ax.barh(row, end, BAR, color=self.style.arm(bar.colour))
            interval = "" if bar.low is None or bar.high is None else f" (95 % CI {bar.low:.2f} to {bar.high:.2f})"
            same = f", output {bar.badge}" if bar.badge else ""
            self._hint(shape, (f"{bar.label}: {bar.value:.3f}{interval}{same}", {"x": bar.value}))
            if whisker := chart.whisker(bar):
                low, high, ends = whisker
                for role, width in (("page", points / 3), ("ink", points / 9)):  # the edge is visible on dark bars
                    ax.hlines(row, low, high, colours[role], linewidth=width)
                    ax.vlines(ends, row - 0.15, row + 0.15, colours[role], linewidth=width)
                end = max(end, high)
            words = f"{bar.value:.2f}"
            self._write(words, end, row, 0.6)
            right = max(right, _breadth(words) + (6.4 if with_badges else 0.9))
            if bar.badge and with_badges:
                badge, role = BADGES[bar.badge]
                self._write(badge, end, row, _breadth(words) + 1.0, color=colours[role], size=0.92 * points)
        if chart.line is not None:
            ax.axvline(chart.line, color=colours["ink"], linestyle="--", linewidth=points / 8)
        return left, right, height

    def _stack(self, chart: StackChart) -> tuple[float, float, float]:
        sums = [sum(values) for _, values in chart.rows]
        left, height = self._rows([label for label, _ in chart.rows], max(sums))
        starts, unit = [0.0] * len(sums), f" {chart.unit}" if chart.unit else ""
        for i, part in enumerate(chart.parts):
            widths, colours = [max(values[i], 0) for _, values in chart.rows], self.style.colours
            fill, edge = colours[f"part{i}"], colours["page"]
            bars = self.ax.barh(range(len(sums)), widths, BAR, starts, color=fill, edgecolor=edge)
            self._key(bars[0], part)
            for shape, (label, values), whole in zip(bars, chart.rows, sums, strict=True):
                share = f" ({values[i] / whole:.0%})" if whole > 0 else ""
                self._hint(shape, (f"{label}, {part}: {values[i]:.3f}{unit}{share}", {"x": values[i]}))
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        totals = [f"{whole:.3g}{unit}" for whole in sums] if unit else []
        for row, total in enumerate(totals):
            self._write(total, starts[row], row, 0.6)
        return left, 1.0 + max(map(_breadth, totals), default=0), height

    def _lines(self, chart: LineChart) -> tuple[float, float, float]:
        ax, colours, (low, high) = self.ax, self.style.colours, chart.y_range()
        thin: dict[str, Any] = {"linewidth": self.style.points / 9, "zorder": 1.9}
        if chart.log_x:
            ax.set_xscale("log", base=2)
            ax.minorticks_off()
        ax.margins(x=0 if chart.band else 0.03)
        for series in chart.series:
            (line,) = ax.plot(*zip(*series.points, strict=True), **self.style.series(series))
            self._hint(line, *_points(chart, series))
            self._key(line, series.name)
        for i, guide in enumerate(chart.guides):
            xs, ys = zip(*guide.points, strict=True)
            (line,) = ax.plot(xs, ys, color=colours["soft"], linestyle=DASHES[1 + i % 2], **thin)
            self._hint(line, (guide.name, {}))
            self._key(line, guide.name)
        for x, name, _ in chart.marks:
            line = ax.axvline(x, color=colours["ink"], linestyle="-.", **thin)
            self._hint(line, (name, {}))
            self._key(line, name)
        if chart.band:
            (area,) = ax.fill(*zip(*chart.band, strict=True), color=colours["probe"], linewidth=0)
            self._key(area, "within 10 % of it")
        places = ticks(low, high)
        labels = [f"{y:.0%}" if chart.percent else short(y) for y in places]
        ax.set_ylim(low, high)
        ax.set_yticks(places, labels)
        ax.set_ylabel(chart.y_label)
        ax.grid(axis="y")
        return 3.0 + max(map(_breadth, labels)), 1.5, min(24.0, 0.65 * self.style.width)


def _points(chart: LineChart, series: Series) -> list[Hint]:
    hints: list[Hint] = []
    for i, (x, y) in enumerate(series.points):
        where = f" ({series.labels[i]})" if i < len(series.labels) else ""
        value = f"{y:.1%}" if chart.percent else f"{y:.3g}"
        hints.append((f"{series.name}{where}: {chart.x_label} {x:.3g}, {chart.y_label} {value}", {"x": x, "y": y}))
    return hints


def _breadth(text: str) -> float:
    """Width of a text in matplotlib's font, which is wider than what browsers choose."""
    return text_to_path.get_text_width_height_descent(text, FontProperties(size=1), ismath=False)[0]


def _cut(text: str, room: float) -> str:
    """Text in one line, truncated to this width."""
    shown = "".join(sign if sign.isprintable() else "\ufffd" for sign in text)
    while (breadth := _breadth(shown)) > room:
        shown = shown[: min(len(shown) - 2, int(len(shown) * room / breadth))] + "…"
    return shown


def ticks(low: float, high: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) from ``low`` to ``high``."""
    places = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [round(float(place), 12) for place in places if low <= place <= high]
