"""Curves of a training by step, as CSV and PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar


def save_plot(file: Path, draw: Callable[[Any], Any]) -> bool:
    """Write the figure that ``draw`` makes with matplotlib's ``pyplot``; false when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = draw(plt)
    tmp = file.with_name(f".tmp-{file.name}")
    figure.savefig(tmp, dpi=130, format="png")
    plt.close(figure)
    tmp.replace(file)
    return True


class _Rows:
    """Rows of (step, loss, a measured number or nothing); what a stored file has up to ``start`` is kept."""

    header: ClassVar[str]
    decimals: ClassVar[int]

    def __init__(self, file: Path, start: int) -> None:
        self.file = file
        self.rows: list[tuple[int, float, float | None]] = []
        if start and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines()[1:]:
                step, loss, value = line.split(",")
                if int(step) <= start:
                    self.rows.append((int(step), float(loss), float(value) if value else None))

    def write(self) -> None:
        """The CSV file, whole or not at all."""
        lines = [f"{s},{loss:.5f},{'' if v is None else f'{v:.{self.decimals}f}'}" for s, loss, v in self.rows]
        tmp = self.file.with_suffix(".tmp")
        tmp.write_text("\n".join([self.header, *lines, ""]), encoding="utf-8")
        tmp.replace(self.file)


class Curve(_Rows):
    """A drafter's training: loss, and mean acceptance length where it was measured."""

    header, decimals = "step,loss,mean_acceptance_length", 4

    def add(self, step: int, loss: float, measured: Mapping[str, Any] | None) -> None:
        """One step."""
        self.rows.append((step, loss, None if measured is None else float(measured["mean_acceptance_length"])))

    def plot(self, file: Path) -> bool:
        """The picture; false when matplotlib is not installed."""
        return save_plot(file, self._draw)

    def _draw(self, plt: Any) -> Any:
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
        return figure


class LossCurve(_Rows):
    """A language model's training: loss, and held-out loss where it was measured, both in nats per token."""

    header, decimals = "step,train_loss,held_loss", 5

    def add(self, step: int, loss: float, held: float | None) -> None:
        """One step."""
        self.rows.append((step, loss, held))

    def plot(self, file: Path) -> bool:
        """The picture; false when matplotlib is not installed."""
        return save_plot(file, self._draw)

    def _draw(self, plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
        axes.plot(
            [r[0] for r in self.rows], [r[1] for r in self.rows], color="#9bb7d4", linewidth=0.8, label="training"
        )
        held = [(r[0], r[2]) for r in self.rows if r[2] is not None]
        axes.plot([s for s, _ in held], [h for _, h in held], color="#b3442f", linewidth=1.8, label="held out")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        return figure
