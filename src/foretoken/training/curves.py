"""Curves of a drafter's training: loss and mean acceptance length, as CSV and PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEADER = "step,loss,mean_acceptance_length"


class Curve:
    """Rows of (step, loss, mean acceptance length or nothing); what a stored file has before ``start`` is kept."""

    def __init__(self, file: Path, start: int) -> None:
        self.file = file
        self.rows: list[tuple[int, float, float | None]] = []
        if start and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines()[1:]:
                step, loss, length = line.split(",")
                if int(step) <= start:
                    self.rows.append((int(step), float(loss), float(length) if length else None))

    def add(self, step: int, loss: float, measured: Mapping[str, Any] | None) -> None:
        """One step."""
        self.rows.append((step, loss, None if measured is None else float(measured["mean_acceptance_length"])))

    def write(self) -> None:
        """The CSV file, whole or not at all."""
        lines = [f"{s},{loss:.5f},{'' if a is None else f'{a:.4f}'}" for s, loss, a in self.rows]
        tmp = self.file.with_suffix(".tmp")
        tmp.write_text("\n".join([HEADER, *lines, ""]), encoding="utf-8")
        tmp.replace(self.file)

    def plot(self, file: Path) -> bool:
        """The picture; false when matplotlib is not installed."""
        try:
            import matplotlib
        except ImportError:
            return False
        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, left = plt.subplots(figsize=(7, 4), constrained_layout=True)
        left.plot([r[0] for r in self.rows], [r[1] for r in self.rows], color="#9bb7d4", linewidth=0.8)
        left.set_xlabel("step")
        left.set_ylabel("training loss (nats)", color="#5b84b1")
        left.grid(alpha=0.3)
        points = [(s, a) for s, _, a in self.rows if a is not None]
        if points:
            right = left.twinx()
            right.plot([s for s, _ in points], [a for _, a in points], color="#b3442f", marker="o", markersize=3)
            right.set_ylabel("mean acceptance length, held-out text", color="#b3442f")
        tmp = file.with_name(f".tmp-{file.name}")
        figure.savefig(tmp, dpi=130, format="png")
        plt.close(figure)
        tmp.replace(file)
        return True
