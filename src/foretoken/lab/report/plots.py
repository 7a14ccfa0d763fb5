"""Charts as PNG files for papers, drawn with matplotlib from the page's data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.io.files import replacing
from foretoken.lab.report import figures, load_figures
from foretoken.lab.report.charts import LIGHT, NEUTRAL, BarChart, Chart, LineChart, StackChart, short
from foretoken.lab.report.read import Run, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY = "#565d66"
SOLID = ("-", "--", ":")
DPI = 300


def write_plots(run_file: Path, folder: Path) -> list[Path]:
    """Write every chart with data in a run of ``foretoken bench`` (``speedup.png``, ``positions.png``, ``rounds.png``
    and so on) into the folder; returns the files.  Raises ``ValueError`` for an unreadable run."""
    run = read_run(Path(run_file))
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [write_charts(charts, folder / f"{name}.png") for name, charts in plots_of(run).items()]
    except OSError as error:
        raise ValueError(f"plots cannot be written to {folder}: {error.strerror}") from None


def plots_of(run: Run) -> dict[str, Sequence[Chart]]:
    """Charts by file name, for all data in the run."""
    plots: dict[str, Sequence[Chart]] = {}
    if run.is_load:
        return {name: charts for name, charts in load_figures.plots(run).items() if charts}
    for i, (temperature, batch) in enumerate(run.settings):
        plots["speedup" if i == 0 else f"speedup_t{temperature:g}_b{batch}"] = figures.speedups(
            run, (temperature, batch)
        )
    single = {
        "positions": figures.positions(run),
        "rounds": figures.round_costs(run),
        "predicted": figures.predictions(run),
        "node_cost": figures.node_costs(run),
    }
    plots |= {name: [chart] for name, chart in single.items() if chart is not None}
    plots |= {"".join(c if c.isalnum() else "_" for c in chart.title.lower()): [chart] for chart in figures.sweeps(run)}
    return {name: charts for name, charts in plots.items() if charts}


def write_charts(charts: Sequence[Chart], file: Path, most_columns: int = 2) -> Path:
    """Draw charts in a grid into a PNG or PDF file, written atomically.  Raises ``ValueError`` without matplotlib."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'foretoken[bench]'") from None
    style: Any = {
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.parse_math": False,
    }
    with rc_context(style):
        return _write(charts, file, min(most_columns, len(charts)))


def _write(charts: Sequence[Chart], file: Path, columns: int) -> Path:
    from matplotlib.figure import Figure

    rows = -(-len(charts) // columns)
    height = max(map(_height, charts))
    # A chart is 3.4 inches wide: a column of a paper.
    picture = Figure((columns * 3.4 * (1.0 if columns > 1 else 1.35), rows * height), layout="constrained")
    axes = list(picture.subplots(rows, columns, squeeze=False).flat)
    for chart, ax in zip(charts, axes, strict=False):
        _draw(chart, ax)
    for ax in axes[len(charts) :]:
        ax.set_axis_off()
    with replacing(file) as draft:
        picture.savefig(draft, dpi=DPI, format=file.suffix[1:])
    return file


def _height(chart: Chart) -> float:
    if isinstance(chart, LineChart):
        return 3.2 + 0.14 * (len(chart.series) + len(chart.guides) + len(chart.marks))
    return 0.95 + 0.24 * len(chart.bars if isinstance(chart, BarChart) else chart.rows)


def _draw(chart: Chart, ax: Axes) -> None:
    draw: Callable[[Any, Axes], None] = (
        _bars if isinstance(chart, BarChart) else _stack if isinstance(chart, StackChart) else _lines
    )
    ax.set_title(chart.title, loc="left", fontsize=9)
    ax.set_xlabel(chart.x_label)
    draw(chart, ax)


def colour(number: int) -> str:
    """An arm's colour, as in the page."""
    return GREY if number == NEUTRAL else LIGHT[number % len(LIGHT)]


def _name_rows(ax: Axes, labels: Sequence[str]) -> None:
    ax.set_yticks(range(len(labels)), [label if len(label) < 35 else f"{label[:33]}…" for label in labels])
    ax.invert_yaxis()


def _bars(chart: BarChart, ax: Axes) -> None:
    values = [bar.value for bar in chart.bars]
    ax.barh(range(len(values)), values, 0.62, color=[colour(bar.colour) for bar in chart.bars])
    for i, bar in enumerate(chart.bars):
        end = bar.value
        if whisker := chart.whisker(bar):
            low, high, ends = whisker
            for colour_, width in (("white", 2.6), ("black", 0.8)):  # the white edge is visible on dark bars
                ax.hlines(i, low, high, colour_, linewidth=width)
                ax.vlines(ends, i - 0.12, i + 0.12, colour_, linewidth=width)
            end = max(end, high)
        ax.annotate(f"{bar.value:.2f}", (end, i), (3, 0), textcoords="offset points", va="center", fontsize=7)
    _name_rows(ax, [bar.label for bar in chart.bars])
    ax.set_xlim(0, 1.14 * chart.x_end)
    if chart.line is not None:
        ax.axvline(chart.line, color="black", linestyle="--", linewidth=0.8)


def _stack(chart: StackChart, ax: Axes) -> None:
    colours = ("#2e93fd", "#aeb6c0", "#720d82", "#d76d75")
    starts = [0.0] * len(chart.rows)
    for i, part in enumerate(chart.parts):
        values = [max(row[i], 0.0) for _, row in chart.rows]
        ax.barh(range(len(values)), values, 0.62, starts, color=colours[i], label=part)
        starts = [a + b for a, b in zip(starts, values, strict=True)]
    _name_rows(ax, [label for label, _ in chart.rows])
    ax.legend(ncols=len(chart.parts), fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 0.98))
    ax.set_title(chart.title, loc="left", fontsize=9, pad=20)


def _lines(chart: LineChart, ax: Axes) -> None:
    if chart.band:
        ax.fill(*zip(*chart.band, strict=True), color="#eceff3", zorder=0, label="within 10 % of it")
    for i, guide in enumerate(chart.guides):
        ax.plot(
            *zip(*guide.points, strict=True), color=GREY, linewidth=0.9, linestyle=SOLID[1 + i % 2], label=guide.name
        )
    for x, name, _ in chart.marks:
        ax.axvline(x, color="black", linewidth=0.9, linestyle="-.", label=name)
    markers = "os^DvPX|"
    for series in chart.series:
        marker = "." if series.colour == NEUTRAL else markers[series.colour % len(markers)]
        line = SOLID[max(series.colour, 0) // len(LIGHT) % len(SOLID)] if series.joined else ""
        ax.plot(
            *zip(*series.points, strict=True), color=colour(series.colour), marker=marker, markersize=4, linewidth=1.3,
            linestyle=line, label=series.name,
        )  # fmt: skip
    if chart.log_x:
        ax.set_xscale("log", base=2)
    if chart.x_ticks:
        ax.set_xticks(list(chart.x_ticks), [short(x) for x in chart.x_ticks])
        ax.minorticks_off()
    if chart.band:
        ax.set_xlim(*chart.x_range())
    ax.set_ylim(*chart.y_range())
    if chart.percent:
        from matplotlib.ticker import PercentFormatter

        ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylabel(chart.y_label)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(-0.12, -0.16))
