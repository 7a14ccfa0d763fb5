"""Charts as SVG inside the page.  Colours are the page's variables, so they follow light and dark mode."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from io import StringIO
from xml.etree.ElementTree import Element, fromstring

from foretoken.lab.report.charts import Chart, Hint, LineChart
from foretoken.lab.report.markup import Markup, join, tag

WIDTH, FONT = 620.0, 12.0
MISSING = "charts need matplotlib: pip install 'foretoken[bench]'"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def inline(chart: Chart) -> Markup:
    """The chart with its legend; without matplotlib, a line that says so.

    Every mark has its numbers as ``data-x`` and ``data-y`` and in a tooltip.
    """
    if not can_draw():
        return tag("p", MISSING, class_="note")
    from matplotlib import rc_context, style
    from matplotlib.figure import Figure

    from foretoken.lab.report.draw import COLOURS, ChartStyle, Painter

    places = {role: f"#{i:06x}" for i, role in enumerate(COLOURS, 1)}
    chart_style = ChartStyle(FONT, WIDTH / FONT, places, is_paper=False)
    settings = {**chart_style.settings(), "svg.fonttype": "none"}
    with style.context("default"), rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser chooses the font
        text, figure = StringIO(), Figure(dpi=72, frameon=False)
        painter = Painter(chart, figure, chart_style)
        height = FONT * painter.height
        figure.set_size_inches(WIDTH / 72, height / 72)
        painter.place(painter.height)
        figure.savefig(text, format="svg")
    axes = f"{chart.y_label} against {chart.x_label}" if isinstance(chart, LineChart) else chart.x_label
    svg = _Svg(text.getvalue(), {colour: f"var(--{role})" for role, colour in places.items()}, painter.hints)
    return tag(
        "svg", svg.markup, class_="chart",
        role="img", aria_label=f"{chart.title}: {axes}",
        viewBox=f"0 0 {WIDTH:g} {height:.0f}", width=f"{WIDTH:g}", height=f"{height:.0f}",
    )  # fmt: skip


class _Svg:
    """What matplotlib drew, without ids and references, so that any number of charts can be in a page."""

    def __init__(self, text: str, colours: Mapping[str, str], hints: Mapping[str, Sequence[Hint]]) -> None:
        root = fromstring(text)
        self.colours = colours
        self.shapes = {f"#{shape.get('id')}": shape for shape in root.iterfind(".//{*}defs/{*}path")}
        self.hints: dict[Element, Hint] = {}
        for element in root.iter():
            if element_hints := hints.get(element.get("id", "")):
                self.hints |= zip([*element.iterfind(".//{*}use")] or element, element_hints, strict=True)
        self.markup = join(*map(self._element, root))

    def _element(self, element: Element) -> Markup:
        name, children = element.tag.rpartition("}")[2], [*map(self._element, element)]
        attributes = {key: self._value(element.get(key)) for key in ("d", "x", "y", "transform", "style")}
        if name in ("metadata", "defs"):
            return Markup("")
        if name == "use":
            name, shape = "path", self.shapes[element.get("{http://www.w3.org/1999/xlink}href", "")]
            place = f"translate({attributes.pop('x')},{attributes.pop('y')})"
            attributes |= {"d": self._value(shape.get("d")), "transform": place}
        if hint := self.hints.get(element):
            children.append(tag("title", hint[0]))
            attributes |= {f"data_{key}": f"{number:.6g}" for key, number in hint[1].items()}
        elif name == "g":
            return join(*children)
        return tag(name, (element.text or "").strip(), *children, **attributes)

    def _value(self, value: str | None) -> str | None:
        """An attribute with short numbers, the page's colours and its font."""
        if value is None or value.startswith("rotate(-0 "):
            return None
        value = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), value)
        value = re.sub("#[0-9a-f]{6}", lambda colour: self.colours.get(colour[0], colour[0]), value)
        return " ".join(re.sub("'[^;]*sans-serif", "system-ui, sans-serif", value).split())
