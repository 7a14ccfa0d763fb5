"""Contents of charts, independent of drawing (``draw.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]
Hint = tuple[str, dict[str, float]]
"""A tooltip, and numbers by name."""

LIGHT = ("#2e93fd", "#762200", "#006659", "#720d82", "#875100", "#7d65a9", "#d76d75", "#29a2ab")
DARK = ("#76ccff", "#f5bd95", "#009f6c", "#f270bc", "#b49c00", "#83a2fa", "#da452b", "#8befff")
"""Colours of arms on white and near-black: contrast at least 3, distinguishable with red-green colour blindness."""
NEUTRAL = -1
"""Colour number of everything except arms (plain decoding, guides)."""


@dataclass(frozen=True)
class Bar:
    """One bar: a value with its interval and a short remark."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: int = NEUTRAL
    badge: str = ""


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars; ``line`` is a reference value, ``end`` the minimum end of the axis."""

    title: str
    x_label: str
    bars: Sequence[Bar]
    line: float | None = None
    end: float = 0.0

    @property
    def x_end(self) -> float:
        """End of the axis: past ``end``, every bar and the line, and whiskers of up to twice the bars.

        Intervals from two prompts are so wide that bars would have no room.
        """
        reach = max([self.line or 0.0, *(bar.value for bar in self.bars)])
        return max(self.end, reach, min(2 * reach, max((bar.high or 0.0 for bar in self.bars), default=0.0)))

    def whisker(self, bar: Bar) -> tuple[float, float, list[float]] | None:
        """Start and stop of a bar's drawn interval, and its visible ends; an end beyond the axis is left open."""
        if bar.low is None or bar.high is None:
            return None
        start, stop = max(bar.low, 0.0), min(bar.high, self.x_end)
        return start, stop, [x for x in (bar.low, bar.high) if start <= x <= stop]


@dataclass(frozen=True)
class StackChart:
    """Horizontal stacked bars: one value per part and row; an empty ``unit`` hides the sums."""

    title: str
    x_label: str
    parts: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]
    unit: str = "ms"


@dataclass(frozen=True)
class Series:
    """Named points, optionally joined by a line; ``labels`` describes the points."""

    name: str
    points: Sequence[Point]
    colour: int = NEUTRAL
    joined: bool = True
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Guide:
    """A thin reference line."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class LineChart:
    """Points and lines over two numeric axes.

    Attributes:
        guides: thin reference lines.
        marks: named x values, drawn as vertical lines.
        band: corner points of a shaded area.
        log_x: whether x has a log2 scale.
        percent: whether y is a share.
        x_ticks: tick positions; chosen automatically if empty.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    guides: Sequence[Guide] = ()
    marks: Sequence[tuple[float, str, int]] = ()
    band: Sequence[Point] = ()
    log_x: bool = False
    percent: bool = False
    x_ticks: Sequence[float] = field(default=())

    def y_range(self) -> Point:
        """From 0 (or the least y, if negative) to the greatest y, or to 1 for shares."""
        lines = [self.band, *(series.points for series in self.series), *(guide.points for guide in self.guides)]
        ys = [y for points in lines for _, y in points]
        low, high = min(0.0, *ys), max(1.0, *ys) if self.percent else max(ys) * 1.05
        return (low, high) if high > low else (low - 0.5, high + 0.5)


Chart = BarChart | StackChart | LineChart


def short(value: float) -> str:
    """A number as an axis label."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"
