"""Charts as SVG.  Colours come from the page (``c0`` to ``c7`` and ``cn``), so they follow light and dark mode.

Every mark has its numbers as ``data-x`` and ``data-y`` and in a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from foretoken.lab.report.charts import (
    LIGHT,
    NEUTRAL,
    Bar,
    BarChart,
    Chart,
    LineChart,
    Point,
    Series,
    StackChart,
    short,
    ticks,
)
from foretoken.lab.report.markup import Markup, join, tag

WIDTH = 620
ROW, TOP = 26, 8.0
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
    "M-3.7,-3.7h7.4v7.4h-7.4Z",
    "M0,-5L4.8,3.6H-4.8Z",
    "M0,-5.2L5.2,0L0,5.2L-5.2,0Z",
    "M0,5L4.8,-3.6H-4.8Z",
    "M-5,-1.6h3.4v-3.4h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4Z",
    "M-5,-5L0,-2L5,-5L2,0L5,5L0,2L-5,5L-2,0Z",
    "M-2.5,-5h5v10h-5Z",
)
"""Marker shapes, which distinguish series without colour."""


def draw(chart: Chart) -> Markup:
    """The chart with its legend."""
    picture, entries = parts_of(chart)
    return join(_legend(entries), picture) if entries else picture


def parts_of(chart: Chart) -> tuple[Markup, list[tuple[str, Markup]]]:
    """The chart alone, and its legend as pairs of name and symbol."""
    if isinstance(chart, BarChart):
        return _bars(chart), []
    return _stack(chart) if isinstance(chart, StackChart) else _lines(chart)


def colour_class(colour: int) -> str:
    return "cn" if colour == NEUTRAL else f"c{colour % len(LIGHT)}"


def cut(label: str, longest: int = 32) -> str:
    """A label, truncated to fit; the tooltip shows all of it."""
    return label if len(label) <= longest else label[: longest - 1] + "…"


def _at(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _svg(title: str, width: float, height: float, *parts: object) -> Markup:
    return tag(
        "svg", *parts, role="img", aria_label=title, viewBox=f"0 0 {_at(width)} {_at(height)}",
        width=_at(width), height=_at(height), class_="chart",
    )  # fmt: skip


def _text(x: float, y: float, words: object, class_: str = "", anchor: str = "start", hint: str = "") -> Markup:
    inside = join(words, tag("title", hint)) if hint else words
    return tag("text", inside, x=_at(x), y=_at(y), class_=class_ or None, text_anchor=anchor)


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=_at(x1), y1=_at(y1), x2=_at(x2), y2=_at(y2), class_=class_)


def _x_axis(places: Sequence[float], to_x: Callable[[float], float], y: float, label: str, middle: float) -> Markup:
    marks = [
        join(_text(to_x(p), y + 16, short(p), "tick", "middle"), _line(to_x(p), y, to_x(p), y + 4, "axis"))
        for p in places
    ]
    return join(*marks, _text(middle, y + 34, label, "label", "middle"))


# -- bars ------------------------------------------------------------------------------------------------------------


def _in_rows(
    chart: BarChart | StackChart,
    labels: Sequence[str],
    end: float,
    right: float,
    content: Callable[[float, float], list[Markup]],
) -> Markup:
    """A chart of rows with free space to the ``right``; ``content`` draws onto its grid, from left edge and scale."""
    left = 12 + 7.3 * max((len(cut(label)) for label in labels), default=0)
    bottom, end = TOP + ROW * len(labels), max(end, 1e-9) * 1.02
    scale = (WIDTH - left - right) / end
    to_x = lambda value: left + scale * value  # noqa: E731
    places = ticks(0, end)
    axis = _x_axis(places, to_x, bottom, chart.x_label, left + scale * end / 2)
    grid = [_line(to_x(place), TOP, to_x(place), bottom, "grid") for place in places]
    parts = (*grid, *content(left, scale), axis)
    return _svg(f"{chart.title}: {chart.x_label}", WIDTH, bottom + 42, *parts)


def _bars(chart: BarChart) -> Markup:
    def content(left: float, scale: float) -> list[Markup]:
        rows = [_bar(chart, bar, TOP + ROW * i, left, scale) for i, bar in enumerate(chart.bars)]
        words = [_bar_words(chart, bar, TOP + ROW * i, left, scale) for i, bar in enumerate(chart.bars)]
        if chart.line is not None:
            x = left + scale * chart.line
            rows.append(_line(x, TOP - 4, x, TOP + ROW * len(chart.bars), "baseline"))
        return [*rows, *words]

    return _in_rows(chart, [bar.label for bar in chart.bars], chart.x_end, 108.0, content)


def _bar(chart: BarChart, bar: Bar, y: float, left: float, scale: float) -> Markup:
    middle = y + ROW / 2
    interval = "" if bar.low is None or bar.high is None else f" (95 % CI {bar.low:.2f} to {bar.high:.2f})"
    hint = tag("title", f"{bar.label}: {bar.value:.3f}{interval}{', output ' + bar.badge if bar.badge else ''}")
    shape = tag(
        "rect", hint, x=_at(left), y=_at(y + 5), width=_at(max(scale * bar.value, 0)), height=ROW - 10, rx=2,
        class_=f"fill {colour_class(bar.colour)}", data_x=f"{bar.value:.6g}",
    )  # fmt: skip
    parts = [shape]
    if whisker := chart.whisker(bar):
        low, high, whisker_ends = whisker
        ends = [(left + scale * low, middle, left + scale * high, middle)]
        ends += [(x, middle - 4, x, middle + 4) for x in (left + scale * end for end in whisker_ends)]
        parts += [_line(*place, class_) for class_ in ("halo", "whisker") for place in ends]
    return tag("g", *parts)


def _bar_words(chart: BarChart, bar: Bar, y: float, left: float, scale: float) -> Markup:
    _, stop, _ = chart.whisker(bar) or (0.0, 0.0, [])
    middle, end = y + ROW / 2 + 4, left + scale * max(bar.value, stop)
    parts = [_text(left - 8, middle, cut(bar.label), "name", "end", hint=bar.label)]
    parts.append(_text(end + 7, middle, f"{bar.value:.2f}", "value"))
    if bar.badge:
        badges = {"identical": "= same", "ties": "≈ ties", "differs": "≠ differs"}
        parts.append(_text(end + 38, middle, badges[bar.badge], f"badge {bar.badge}"))
    return join(*parts)


# -- stacked bars ----------------------------------------------------------------------------------------------------


def _stack(chart: StackChart) -> tuple[Markup, list[tuple[str, Markup]]]:
    def content(left: float, scale: float) -> list[Markup]:
        return [_stacked(chart, *row, TOP + ROW * i, left, scale) for i, row in enumerate(chart.rows)]

    end = max(sum(values) for _, values in chart.rows)
    picture = _in_rows(chart, [label for label, _ in chart.rows], end, 70.0, content)
    return picture, [(part, _swatch(f"p{i}")) for i, part in enumerate(chart.parts)]


def _stacked(chart: StackChart, label: str, values: Sequence[float], y: float, left: float, scale: float) -> Markup:
    parts = [_text(left - 8, y + ROW / 2 + 4, cut(label), "name", "end", hint=label)]
    whole, x = sum(values), left
    for i, (part, value) in enumerate(zip(chart.parts, values, strict=True)):
        width = scale * max(value, 0)
        share = f" ({value / whole:.0%})" if whole > 0 else ""
        hint = tag("title", f"{label}, {part}: {value:.3f}{f' {chart.unit}' if chart.unit else ''}{share}")
        parts.append(
            tag(
                "rect", hint, x=_at(x), y=_at(y + 5), width=_at(width), height=ROW - 10, class_=f"part p{i}",
                data_x=f"{value:.6g}",
            )
        )  # fmt: skip
        x += width
    if chart.unit:
        parts.append(_text(x + 7, y + ROW / 2 + 4, f"{whole:.3g} {chart.unit}", "value"))
    return tag("g", *parts)


# -- lines and points ------------------------------------------------------------------------------------------------


class _Frame:
    """The drawing area of two axes, and the mapping of numbers to positions."""

    left, top, right, bottom = 62.0, 14.0, WIDTH - 16.0, 300.0

    def __init__(self, chart: LineChart) -> None:
        self.log = chart.log_x
        low, high = chart.x_range()
        margin = 0.0 if chart.band else 0.03 * (self._scaled(high) - self._scaled(low))
        self.x_low, self.x_high = self._scaled(low) - margin, self._scaled(high) + margin
        self.y_low, self.y_high = chart.y_range()

    def _scaled(self, x: float) -> float:
        return math.log2(x) if self.log else x

    def x(self, value: float) -> float:
        return self.left + (self._scaled(value) - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - self.top)

    def path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{_at(self.x(x))},{_at(self.y(y))}" for x, y in points)


def _lines(chart: LineChart) -> tuple[Markup, list[tuple[str, Markup]]]:
    frame = _Frame(chart)
    low, high = chart.x_range()
    x_places = list(chart.x_ticks) or ticks(low, high)
    band = [tag("path", d=frame.path(chart.band) + "Z", class_="band")] if chart.band else []
    guides = [
        tag("path", tag("title", g.name), d=frame.path(g.points), class_=f"guide g{i}")
        for i, g in enumerate(chart.guides)
    ]
    marks = [_mark(frame, x, name) for x, name, _ in chart.marks]
    axis = _x_axis(x_places, frame.x, frame.bottom, chart.x_label, (frame.left + frame.right) / 2)
    # The nested svg clips bands and guides that extend past the frame; the axes stay outside of it.
    drawn = tag("g", *band, *guides, *marks, *(_series(chart, frame, s) for s in chart.series))
    title = f"{chart.title}: {chart.y_label} against {chart.x_label}"
    picture = _svg(title, WIDTH, frame.bottom + 42, _y_axis(chart, frame), drawn, axis)
    entries = [(s.name, _symbol(s)) for s in chart.series]
    entries += [(g.name, _sample(f"guide g{i}")) for i, g in enumerate(chart.guides)]
    entries += [(name, _sample("mark")) for _, name, _ in chart.marks]
    if chart.band:
        entries.append(("within 10 % of it", _swatch("band")))
    return picture, entries


def _y_axis(chart: LineChart, frame: _Frame) -> Markup:
    parts = []
    for place in ticks(frame.y_low, frame.y_high):
        y = frame.y(place)
        words = f"{place:.0%}" if chart.percent else short(place)
        parts += [_line(frame.left, y, frame.right, y, "grid"), _text(frame.left - 8, y + 4, words, "tick", "end")]
    middle = (frame.top + frame.bottom) / 2
    turned = tag(
        "g", _text(0, 0, chart.y_label, "label", "middle"), transform=f"translate(14,{_at(middle)}) rotate(-90)"
    )
    return join(*parts, turned, _line(frame.left, frame.bottom, frame.right, frame.bottom, "axis"))


def _mark(frame: _Frame, x: float, name: str) -> Markup:
    return tag("g", tag("title", name), _line(frame.x(x), frame.top, frame.x(x), frame.bottom, "mark"))


def _series(chart: LineChart, frame: _Frame, series: Series) -> Markup:
    parts = []
    if series.joined and len(series.points) > 1:
        parts.append(tag("path", d=frame.path(series.points), class_=_dashes(series)))
    for i, (x, y) in enumerate(series.points):
        where = f" ({series.labels[i]})" if i < len(series.labels) else ""
        value = f"{y:.1%}" if chart.percent else f"{y:.3g}"
        hint = tag("title", f"{series.name}{where}: {chart.x_label} {x:.3g}, {chart.y_label} {value}")
        place = f"translate({_at(frame.x(x))},{_at(frame.y(y))})"
        numbers = {"data_x": f"{x:.6g}", "data_y": f"{y:.6g}"}
        parts.append(tag("path", hint, d=_shape(series), class_="dot", transform=place, **numbers))
    return tag("g", *parts, class_=colour_class(series.colour))


def _dashes(series: Series) -> str:
    """Line class of a series: repeated colours differ by dash pattern."""
    return f"line d{max(series.colour, 0) // len(LIGHT) % 3}"


def _shape(series: Series) -> str:
    small_circle = "M-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0Z"
    return small_circle if series.colour == NEUTRAL else SHAPES[series.colour % len(SHAPES)]


def _symbol(series: Series) -> Markup:
    line = [tag("path", d="M0,8H24", class_=_dashes(series))] if series.joined else []
    dot = tag("path", d=_shape(series), class_="dot", transform="translate(12,8)")
    return _key(*line, dot, class_=f"key {colour_class(series.colour)}")


def _sample(class_: str) -> Markup:
    return _key(tag("path", d="M0,8H24", class_=class_))


def _swatch(class_: str) -> Markup:
    return _key(tag("rect", x=0.5, y=0.5, width=14, height=14, rx=2, class_=f"swatch {class_}"))


def _key(*parts: Markup, class_: str = "key") -> Markup:
    return tag("svg", *parts, class_=class_, width=24, height=16, aria_hidden="true")


def _legend(entries: Sequence[tuple[str, Markup]]) -> Markup:
    return tag("ul", *(tag("li", symbol, " ", name) for name, symbol in entries), class_="legend")
