"""The report as one self-contained HTML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from foretoken.core.io.files import write_text
from foretoken.core.io.finite import finite
from foretoken.lab.report import load_sections, sections
from foretoken.lab.report.charts import DARK, LIGHT
from foretoken.lab.report.markup import Markup, join, safe, tag
from foretoken.lab.report.read import Run, read_run

SECTIONS = (
    ("speed-up", sections.speedups),
    ("acceptance", sections.positions),
    ("round cost", sections.rounds),
    ("sweeps", sections.sweeps),
    ("cost model", sections.costs),
    ("trace", sections.trace),
    ("all numbers", sections.table),
)

LOAD_SECTIONS = (
    ("throughput", load_sections.throughput),
    ("latency", load_sections.latency),
    ("distribution", load_sections.distributions),
    ("categories", load_sections.categories),
    ("all numbers", load_sections.table),
)


def write_report(run_file: Path, out_file: Path) -> None:
    """Write the report of a benchmark as an HTML file, atomically.

    The run is a ``run.jsonl`` of ``foretoken bench`` or ``foretoken bench serve``, complete or interrupted.  Raises
    ``ValueError`` if it cannot be read (:func:`~foretoken.lab.report.read.read_run`).
    """
    text = render(read_run(Path(run_file)))
    out_file = Path(out_file)
    try:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(out_file, text)
    except OSError as error:
        raise ValueError(f"the report cannot be written to {out_file}: {error.strerror}") from None


def render(run: Run) -> str:
    header, parts = (load_sections.header, LOAD_SECTIONS) if run.is_load else (sections.header, SECTIONS)
    contents = [(name, content) for name, make in parts if (content := make(run)) is not None]
    links = [tag("a", name, href=f"#{_id(content)}") for name, content in contents]
    body = join(header(run), tag("nav", *links, aria_label="sections"), *(content for _, content in contents))
    return whole_page(f"foretoken bench: {run.name}", body, run.traces)


def whole_page(title: str, body: Markup, traces: Sequence[Any] = (), css: str = "", js: str = "") -> str:
    """The file around a page's body; its own style and script follow the common ones."""
    return Template(resource("template.html")).substitute(
        title=safe(title),
        css=palette() + resource("tree.css") + resource("report.css") + css,
        js=resource("report.js") + js,
        body=body,
        data=embedded({"traces": traces}),
    )


def _id(content: Markup) -> str:
    return content.split('id="', 1)[1].split('"', 1)[0]


def resource(name: str) -> str:
    return files("foretoken.lab.report").joinpath(name).read_text(encoding="utf-8")


def palette() -> str:
    """CSS colours of arms in light and dark mode."""
    light = f":root {{ {_variables(LIGHT)} }}"
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}"
    return f"{light}\n{dark}\n"


def _variables(colours: tuple[str, ...]) -> str:
    return " ".join(f"--arm{i}: {colour};" for i, colour in enumerate(colours))


def embedded(value: Any) -> str:
    """JSON for a script element: without ``<``, NaN or infinity."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    for sign in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
