"""Training curves by step, as CSV and PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.core.io.files import replacing, write_text

DRAFTER = ("loss", "mean_acceptance_length")
"""Columns of a drafter's curve: its loss, and measurements by their names."""
LM = ("train_loss", "held_loss")
"""Both in nats per token."""
ALIGNMENT = ("loss", "greedy_length", "sampled_length", "expected_acceptance", "argmax_agreement")
"""Measured by :class:`foretoken.lab.bench.alignment.Alignment`."""


class Curve:
    """Loss and measurements by step.  Rows of a stored file up to step ``start`` are kept.

    Attributes:
        rows: texts of the columns by step, empty where nothing was measured.
    """

    def __init__(self, file: Path, start: int, columns: Sequence[str]) -> None:
        self.file, self.columns = file, columns
        lines = file.read_text(encoding="utf-8").splitlines()[1:] if start and file.exists() else []
        stored = {int(step): values for step, *values in (line.split(",") for line in lines)}
        self.rows = {step: values for step, values in stored.items() if step <= start}

    def add(self, step: int, loss: float | None, measured: Mapping[str, Any] | None) -> None:
        """Record one step (step 0 is before training)."""
        row = self.rows.setdefault(step, [""] * len(self.columns))
        if loss is not None:
            row[0] = f"{loss:.5f}"
        if measured:
            row[1:] = [f"{value_of(measured, name):.5f}" for name in self.columns[1:]]

    def write(self) -> None:
        """Write the CSV file, whole or not at all."""
        rows = [("step", *self.columns), *((str(step), *row) for step, row in sorted(self.rows.items()))]
        write_text(self.file, "".join(f"{','.join(row)}\n" for row in rows))

    def plot(self, file: Path) -> bool:
        """Write a picture with axes for every column.  Returns false if matplotlib is not installed."""
        try:
            import matplotlib.figure  # not pyplot: its backend and figures belong to the caller
        except ImportError:
            return False
        figure = matplotlib.figure.Figure((4.0 * len(self.columns), 3.6), layout="constrained")
        for i, axes in enumerate(figure.subplots(1, len(self.columns))):
            points = [(step, float(row[i])) for step, row in sorted(self.rows.items()) if row[i]]
            axes.plot(*zip(*points, strict=True), marker="o" if i else None, markersize=3) if points else None
            axes.set_xlabel("step")
            axes.set_ylabel(self.columns[i].replace("_", " "))
            axes.grid(alpha=0.3)
        with replacing(file) as draft:
            figure.savefig(draft, dpi=130, format="png")
        return True


def value_of(measured: Mapping[str, Any], name: str) -> float:
    """A number of a measurement; ``X_length`` is the mean acceptance length of its part ``X``."""
    part = measured.get(name.removesuffix("_length"))
    return float(part["mean_acceptance_length"] if isinstance(part, Mapping) else measured[name])
