"""Reader of ``run.jsonl``: cells, then a summary.  An interrupted run has no summary and may end in a partial line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLAIN = ("none", "plain")
"""Names of the baseline arm."""
NOT_A_RUN = "write one with 'foretoken bench --out run.jsonl'"


Condition = tuple[float, int]
"""Temperature and batch size."""


@dataclass(frozen=True)
class Run:
    """A benchmark read from its file.

    Attributes:
        cells: one object per arm, category, temperature and batch.
        summary: the last line; empty for an interrupted run.
        notes: warnings for the reader of this file.
    """

    name: str
    text: str
    cells: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def arms(self) -> list[str]:
        """All arms in the order of the run, which determines colours; plain decoding first, except in a load test."""
        arms = dict.fromkeys([*map(str, self.listed("arms")), *(cell["arm"] for cell in self.cells)])
        return list(arms) if self.is_load else sorted(arms, key=lambda arm: arm not in PLAIN)

    @property
    def is_load(self) -> bool:
        return all("load" in cell for cell in self.cells)

    @property
    def unfinished(self) -> bool:
        """Whether it was interrupted: the summary is missing or marked as interrupted, or cells are missing."""
        planned = number(self.summary.get("cells"))
        missing = planned is not None and planned > len(self.cells)
        return not self.summary.get("summary") or bool(self.summary.get("interrupted")) or missing

    def drafted_nothing(self, setting: Condition, arm: str) -> bool:
        """Whether an arm is known to have drafted nothing at a setting, so that it decoded plainly."""
        counts = [number(cell.get("drafted")) for cell in self.at(setting, arm)]
        return bool(counts) and all(count == 0 for count in counts)

    @property
    def rivals(self) -> list[str]:
        return [arm for arm in self.arms if arm not in PLAIN]

    @property
    def settings(self) -> list[Condition]:
        """Temperatures and batch sizes of the cells, in ascending order."""
        return sorted({setting_of(cell) for cell in self.cells})

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(cell["category"] for cell in self.cells))

    def at(self, setting: Condition, arm: str | None = None) -> list[Mapping[str, Any]]:
        """Cells of a setting, optionally of one arm."""
        return [c for c in self.cells if setting_of(c) == setting and arm in (None, c["arm"])]

    def part(self, name: str) -> dict[str, Any]:
        """An object of the summary; empty if missing."""
        value = self.summary.get(name)
        return dict(value) if isinstance(value, Mapping) else {}

    def overall(self, setting: Condition, arm: str) -> Mapping[str, Any] | None:
        """The summary's cell of an arm over all categories, if any."""
        cells = [c for c in self.listed("overall") if isinstance(c, Mapping) and c.get("arm") == arm]
        return next((c for c in cells if (c.get("temperature"), c.get("batch")) == setting), None)

    @property
    def traces(self) -> list[dict[str, Any]]:
        """Recorded generations, round by round; plain decoding, which has no drafts, comes last."""
        traces = [dict(t) for t in self.listed("traces") if isinstance(t, Mapping) and t.get("rounds")]
        return sorted(traces, key=lambda trace: trace.get("arm") in PLAIN)

    def listed(self, name: str) -> Sequence[Any]:
        """A list of the summary; empty if missing."""
        value = self.summary.get(name)
        return value if isinstance(value, list) else []


def setting_of(cell: Mapping[str, Any]) -> Condition:
    return float(cell["temperature"]), int(cell["batch"])


def setting_name(setting: Condition) -> str:
    """A setting in words."""
    temperature, batch = setting
    return f"{'greedy' if temperature == 0 else f'temperature {temperature:g}'}, batch {batch}"


def number(value: Any) -> float | None:
    """``value`` if it is a finite number, else ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def read_run(file: Path) -> Run:
    """Read a run, or the unfinished one in ``FILE.partial``.  Raises ``ValueError`` if there is none, and for a line
    that is not a JSON object or cell, with its number."""
    beside = file.with_name(file.name + ".partial")
    if not file.exists() and beside.is_file():
        file = beside
    if not file.is_file():
        raise ValueError(f"the run {file} does not exist: {NOT_A_RUN}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text, so not a bench run: {NOT_A_RUN}") from None
    objects, notes = _objects(file, text)
    cells: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    if objects and "config" in objects[0][1]:
        cells, summary = _partial(file)
    else:
        cells = [_cell(row, number, file) for number, row in objects if not row.get("summary")]
        summary = next((row for _, row in objects if row.get("summary")), {})
    if not cells:
        raise ValueError(f"{file} contains no cells of a bench run: {NOT_A_RUN}")
    return Run(file.name, text, _with_counts(cells, summary), summary, [*notes, *_remarks(cells, summary)])


def _objects(file: Path, text: str) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """Line numbers and objects, and a note if the last line was truncated."""
    objects: list[tuple[int, dict[str, Any]]] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        row = _parsed(line) if line.strip() else {}
        if row:
            objects.append((number, row))
        elif row is None and number == len(lines) and objects:  # without a line break after it
            return objects, [f"Line {number} is incomplete and is left out."]
        elif row is None:
            raise ValueError(f"line {number} of {file} is not a JSON object: {NOT_A_RUN}")
    return objects, []


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _cell(row: Mapping[str, Any], line_number: int, file: Path) -> Mapping[str, Any]:
    """A cell with valid key fields; charts omit missing numbers."""
    cell = {"category": "all", "temperature": 0.0, "batch": 1, **row}
    if not isinstance(cell.get("arm"), str) or not isinstance(cell["category"], str):
        raise ValueError(f"line {line_number} of {file} is not a bench cell, it lacks an arm: {NOT_A_RUN}")
    if number(cell["temperature"]) is None or number(cell["batch"]) is None:
        raise ValueError(
            f"line {line_number} of {file} is not a bench cell, its temperature or batch is not a number: {NOT_A_RUN}"
        )
    # A load test's cells need an arrival pattern and a level
    if "load" in cell and (cell["load"] not in ("rate", "concurrency") or number(cell.get("level")) is None):
        raise ValueError(f"line {line_number} of {file} is not a cell of a load test, it lacks its level: {NOT_A_RUN}")
    return cell


def _with_counts(cells: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Cells with the summary's counts of ties, differences and draft tokens, and its mean prefill of their setting."""
    setting = ("arm", "temperature", "batch")
    parts = (("equality", ("ties", "differences")), ("drafted", ("drafted",)), ("prefill", ("prefill_s",)))
    added: list[dict[str, Any]] = [{} for _ in cells]
    for part, keys in parts:
        names = setting if part == "prefill" else (*setting, "category")
        rows = [row for row in summary.get(part) or () if isinstance(row, Mapping)]
        fields = {tuple(row.get(name) for name in names): row for row in rows}
        for cell, more in zip(cells, added, strict=True):
            row = fields.get(tuple(cell[name] for name in names), {})
            more |= {key: row[key] for key in keys if key in row}
    return [{**more, **cell} for more, cell in zip(added, cells, strict=True)]


def _remarks(cells: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[str]:
    """Warnings for the reader of a run."""
    if not summary.get("summary"):
        return [
            f"This run was interrupted: it has {len(cells)} cells and no summary, so some charts may be missing and "
            "numbers may rest on few prompts."
        ]
    if summary.get("interrupted"):
        return ["This test was interrupted: it has the requests that had ended by then."]
    planned = number(summary.get("cells"))
    notes = [f"Left out: {reason}." for reason in summary.get("skipped") or ()]
    if planned is not None and planned != len(cells):
        notes.append(f"The summary lists {planned:.0f} cells, the file has {len(cells)}.")
    return notes


def _partial(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Cells of an unfinished benchmark, of the units that plain decoding has finished, and the summary fields that do
    not need the target."""
    from foretoken.core.costs import TargetCost
    from foretoken.lab.bench.partial import kept_in
    from foretoken.lab.bench.summary import tally, traces

    kept, notes = kept_in(file)
    results = [r for r in kept.values() if ("plain", *r.key[1:]) in kept]
    if not results:
        return [], {}
    config = notes["config"]
    targets = {
        batch: TargetCost({int(n): seconds for n, seconds in notes[f"target_s:{batch}"].items()})
        for batch in {r.batch for r in results}
    }
    cells, counted = tally(results, config["arms"], targets)
    return cells, {"target": config["target"], "settings": config, **counted, "traces": traces(results, {})}
