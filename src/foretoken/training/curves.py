"""Training curves by step, as CSV and PNG."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from foretoken.core.io.files import replacing, write_text

LOSS, MEASURED, OTHER = "#9bb7d4", "#b3442f", "#5b84b1"


class Curve(ABC):
    """Loss and measurements by step.  Rows of a stored file up to step ``start`` are kept.

    Attributes:
        header: first line of the file: step, loss, measurements.
        decimals: decimals of measurements.
        size: width and height of the picture in inches.
    """

    header: ClassVar[str]
    decimals: ClassVar[int] = 4
    size: ClassVar[tuple[float, float]]

    def __init__(self, file: Path, start: int) -> None:
        self.file = file
        self.losses: dict[int, float] = {}
        self.measured: dict[int, list[float]] = {}
        lines = file.read_text(encoding="utf-8").splitlines()[1:] if start and file.exists() else []
        for step, loss, *values in (line.split(",") for line in lines):
            if int(step) <= start and loss:
                self.losses[int(step)] = float(loss)
            if int(step) <= start and values[0]:
                self.measured[int(step)] = [float(value) for value in values]

    def add(self, step: int, loss: float | None, measured: Mapping[str, Any] | None) -> None:
        """Record one step (step 0 is before training)."""
        if loss is not None:
            self.losses[step] = loss
        if measured:
            self.measured[step] = self.values(measured)

    def write(self) -> None:
        """Write the CSV file, whole or not at all."""
        lines = [self.header]
        for step in sorted({*self.losses, *self.measured}):
            loss = f"{self.losses[step]:.5f}" if step in self.losses else ""
            values = [f"{value:.{self.decimals}f}" for value in self.measured.get(step, ())]
            lines.append(",".join([str(step), loss, *(values or [""] * (self.header.count(",") - 1))]))
        write_text(self.file, "\n".join([*lines, ""]))

    def plot(self, file: Path) -> bool:
        """Write the picture.  Returns false if matplotlib is not installed."""
        try:
            import matplotlib.figure  # not pyplot: its backend and figures belong to the caller
        except ImportError:
            return False
        figure = matplotlib.figure.Figure(self.size, layout="constrained")
        self.draw(figure)
        for axes in figure.axes:
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
        with replacing(file) as draft:
            figure.savefig(draft, dpi=130, format="png")
        return True

    def _draw_loss(self, axes: Any, label: str) -> None:
        axes.plot(list(self.losses), list(self.losses.values()), color=LOSS, linewidth=0.8, label="training")
        axes.set_ylabel(label)

    def _draw_measured(self, axes: Any, index: int, label: str, colour: str = MEASURED) -> None:
        steps = sorted(self.measured)
        values = [self.measured[step][index] for step in steps]
        axes.plot(steps, values, color=colour, marker="o", markersize=3, label=label)

    def values(self, measured: Mapping[str, Any]) -> list[float]:
        """The numbers of a measurement, in the header's order and by its names."""
        return [float(measured[name]) for name in self.header.split(",")[2:]]

    @abstractmethod
    def draw(self, figure: Any) -> None:
        """Fill a ``matplotlib`` figure."""


class DrafterCurve(Curve):
    """A drafter's training: loss and mean acceptance length."""

    header, size = "step,loss,mean_acceptance_length", (9.0, 4.0)

    def draw(self, figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        self._draw_loss(left, "training loss (nats)")
        self._draw_measured(right, 0, "held-out text")
        right.set_ylabel("mean acceptance length, held-out text")


class LossCurve(Curve):
    """A language model's training: training loss and held-out loss, both in nats per token."""

    header, decimals, size = "step,train_loss,held_loss", 5, (7.0, 4.0)

    def draw(self, figure: Any) -> None:
        axes = figure.subplots()
        self._draw_loss(axes, "loss (nats per token)")
        self._draw_measured(axes, 0, "held out")
        axes.legend()


MEASURES = {
    "greedy": "mean acceptance length, greedy",
    "sampled": "mean acceptance length, T=1",
    "expected_acceptance": "expected acceptance at T=1 (1 - TVD)",
    "argmax_agreement": "most likely tokens that agree",
}
"""Measurements of a draft model (:class:`foretoken.lab.bench.alignment.Alignment`)."""


def values_of(measured: Mapping[str, Any]) -> list[float]:
    """The numbers of a measurement in the order of :data:`MEASURES`."""
    values = [measured[name] for name in MEASURES]
    return [float(v["mean_acceptance_length"]) if isinstance(v, Mapping) else float(v) for v in values]


class AlignmentCurve(Curve):
    """A draft model's alignment: loss, and agreement with its target."""

    header = "step,loss,greedy_length,sampled_length,expected_acceptance,argmax_agreement"
    size = (12.0, 3.6)

    def values(self, measured: Mapping[str, Any]) -> list[float]:
        return values_of(measured)

    def draw(self, figure: Any) -> None:
        left, middle, right = figure.subplots(1, 3)
        self._draw_loss(left, "training loss")
        for index, label in enumerate(MEASURES.values()):
            self._draw_measured((middle, right)[index // 2], index, label, (MEASURED, OTHER)[index % 2])
        middle.legend(fontsize=8)
        right.legend(fontsize=8)
