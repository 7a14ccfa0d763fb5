"""What a chart shows, apart from how it is drawn: ``svg.py`` draws it into the page, ``plots.py`` for papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]

LIGHT = ("#2e93fd", "#762200", "#006659", "#720d82", "#875100", "#7d65a9", "#d76d75", "#29a2ab")
DARK = ("#76ccff", "#f5bd95", "#009f6c", "#f270bc", "#b49c00", "#83a2fa", "#da452b", "#8befff")
"""Colours of arms on white and on near-black: contrast at least 3, and told apart with red- or green-blindness."""
NEUTRAL = -1
"""The colour number of what is no arm (plain decoding, guides)."""


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
    """Horizontal bars; ``line`` is a value to compare with, ``end`` where the axis ends at least."""

    title: str
    x_label: str
    bars: Sequence[Bar]
    line: float | None = None
    end: float = 0.0

    @property
    def x_end(self) -> float:
        """Where the axis ends: behind every bar, the line, and whiskers of up to as much again.

        Intervals of two prompts are so wide that bars would have no room.
        """
        reach = max(self.end, self.line or 0.0, *(bar.value for bar in self.bars))
        return max(reach, min(2 * reach, max((bar.high or 0.0 for bar in self.bars), default=0.0)))

    def whisker(self, bar: Bar) -> tuple[float, float, list[float]] | None:
        """From where to where a bar's interval is drawn, and its ends; it is open where it goes on beyond the axis."""
        if bar.low is None or bar.high is None:
            return None
        start, stop = max(bar.low, 0.0), min(bar.high, self.x_end)
        return start, stop, [x for x in (bar.low, bar.high) if start <= x <= stop]


@dataclass(frozen=True)
class StackChart:
    """Horizontal bars made of parts: per row one value per part; ``unit`` follows the sums, which stay away without."""

    title: str
    x_label: str
    parts: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]
    unit: str = "ms"


@dataclass(frozen=True)
class Series:
    """Points of one name, joined by a line or not; ``labels`` says what each point is."""

    name: str
    points: Sequence[Point]
    colour: int = NEUTRAL
    joined: bool = True
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Guide:
    """A thin line to compare with."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class LineChart:
    """Points and lines over two numeric axes.

    Attributes:
        guides: thin lines to compare with.
        marks: x values with a name, drawn as vertical lines.
        band: corner points of a shaded area.
        log_x: whether x is drawn on a scale of powers of two.
        percent: whether y is a share.
        x_ticks: places of the ticks; chosen when empty.
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

    @property
    def _points(self) -> list[Sequence[Point]]:
        return [*(series.points for series in self.series), *(guide.points for guide in self.guides)]

    def x_range(self) -> Point:
        """Least and greatest x of what is shown."""
        xs = [x for points in self._points for x, _ in points] + [x for x, _, _ in self.marks]
        return _widened(min(xs), max(xs))

    def y_range(self) -> Point:
        """From 0 to the greatest y, or to 1 for shares; below 0 where values are."""
        ys = [y for points in self._points for _, y in points]
        return _widened(min(0.0, *ys), max(1.0, *ys) if self.percent else max(ys) * 1.05)


Chart = BarChart | StackChart | LineChart


def _widened(low: float, high: float) -> Point:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) from ``low`` to ``high``."""
    raw = (high - low) / 6  # about so many
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number as an axis prints it."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
