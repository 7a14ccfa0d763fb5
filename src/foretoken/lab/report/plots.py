"""Charts as PNG or PDF files for papers, drawn from the page's data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foretoken.core.io.files import replacing
from foretoken.lab.report import figures, load_figures
from foretoken.lab.report.charts import Chart
from foretoken.lab.report.embed import can_draw
from foretoken.lab.report.read import Run, read_run

DPI, FONT, COLUMN = 300, 8.0, 3.4
"""Of a picture: dots per inch, font size in points, and width of a paper's column in inches."""


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
    if not can_draw():
        raise ValueError("plots need matplotlib: pip install 'foretoken[bench]'")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from foretoken.lab.report.draw import COLOURS, ChartStyle, Painter

    columns = min(most_columns, len(charts))
    rows, wide = -(-len(charts) // columns), COLUMN * (1.0 if columns > 1 else 1.35)
    style = ChartStyle(FONT, wide * 72 / FONT, COLOURS, is_paper=True)
    with rc_context(style.settings()), replacing(file) as draft:
        picture = Figure(dpi=72)
        cells = picture.subfigures(rows, columns, squeeze=False, wspace=0, hspace=0).flat
        painters = [Painter(chart, cell, style) for chart, cell in zip(charts, cells, strict=False)]
        height = max(painter.height for painter in painters)
        picture.set_size_inches(columns * wide, rows * height * FONT / 72)
        for painter in painters:
            painter.place(height)
        picture.savefig(draft, dpi=DPI, format=file.suffix[1:])
    return file
