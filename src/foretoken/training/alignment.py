"""What an alignment run tells of itself: curves and the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.training.card import LIMITS, _table
from foretoken.training.curves import save_plot

MEASURES = {
    "greedy": "mean acceptance length, greedy",
    "sampled": "mean acceptance length, T=1",
    "expected_acceptance": "expected acceptance at T=1 (1 - TVD)",
    "argmax_agreement": "most likely tokens that agree",
}
HEADER = "step,loss,greedy_length,sampled_length,expected_acceptance,argmax_agreement"


def values_of(measured: Mapping[str, Any]) -> list[float]:
    """The numbers of a measurement in the order of :data:`MEASURES`."""
    found = [measured[name] for name in MEASURES]
    return [float(v["mean_acceptance_length"]) if isinstance(v, Mapping) else float(v) for v in found]


class AlignmentCurve:
    """Loss and acceptance by step; what a stored file has up to ``start`` is kept."""

    def __init__(self, file: Path, start: int) -> None:
        self.file = file
        self.losses: dict[int, float] = {}
        self.measured: dict[int, list[float]] = {}
        if start and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines()[1:]:
                step, loss, *values = line.split(",")
                if int(step) <= start and loss:
                    self.losses[int(step)] = float(loss)
                if int(step) <= start and values[0]:
                    self.measured[int(step)] = [float(v) for v in values]

    def add(self, step: int, loss: float | None, measured: Mapping[str, Any] | None) -> None:
        """What is known of one step (step 0 is before training)."""
        if loss is not None:
            self.losses[step] = loss
        if measured:
            self.measured[step] = values_of(measured)

    def write(self) -> None:
        """The CSV file, whole or not at all."""
        lines = [HEADER]
        for step in sorted({*self.losses, *self.measured}):
            loss = f"{self.losses[step]:.5f}" if step in self.losses else ""
            values = [f"{v:.4f}" for v in self.measured[step]] if step in self.measured else [""] * len(MEASURES)
            lines.append(",".join([str(step), loss, *values]))
        tmp = self.file.with_suffix(".tmp")
        tmp.write_text("\n".join([*lines, ""]), encoding="utf-8")
        tmp.replace(self.file)

    def plot(self, file: Path) -> bool:
        """The picture; false when matplotlib is not installed."""
        return save_plot(file, self._draw)

    def _draw(self, plt: Any) -> Any:
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
        left.plot(list(self.losses), list(self.losses.values()), color="#9bb7d4", linewidth=0.8)
        left.set_ylabel("training loss")
        steps = sorted(self.measured)
        for i, (axes, name) in enumerate(zip((middle, middle, right, right), MEASURES.values(), strict=True)):
            colour = ("#b3442f", "#5b84b1")[i % 2]
            axes.plot(steps, [self.measured[s][i] for s in steps], marker="o", markersize=3, color=colour, label=name)
        for axes in (left, middle, right):
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
        if steps:
            middle.legend(fontsize=8)
            right.legend(fontsize=8)
        return figure


def write_alignment_card(
    out: Path, report: Mapping[str, Any], data: Sequence[str | Path], target: str, command: str, note: str = ""
) -> Path:
    """Write ``out/README.md`` from the report of :class:`foretoken.training.distill.Distiller`."""
    run, name = report["run"], Path(target).name
    seen = {
        "draft model that it started from": f"`{Path(report['draft']).name}`, {report['parameters']:,} parameters",
        "loss": run["loss"] + (f" (beta {run['beta']:g})" if run["loss"] == "jsd" else ""),
        "text": run["text"] + (f" (mix {run['mix']:g})" if run["text"] == "mixed" else ""),
        "steps": f"{run['steps']:,} of {run['batch_size']} rows of {run['context']} tokens",
        "optimizers": f"Muon for the blocks' matrices, AdamW for the rest, learning rate {run['lr']:g}",
        "time": f"{report['hours']:.2f} hours",
    }
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- foretoken\n---\n",
        f"# {out.resolve().name}: a draft model aligned to `{name}`\n",
        f'Loads as `drafter="model:FOLDER"` beside `{name}`. {note}\n',
        f"## Training\n\n```\n{command}\n```\n\n{_table(seen)}",
        f"## Data\n\nText of {', '.join(f'`{Path(p).name}`' for p in data)}: "
        f"{report['corpus']['train']['documents']:,} documents, {report['corpus']['train']['tokens']:,} tokens.\n",
        _acceptance(report),
        "\n".join(["## Limits", "", *(f"- {line}" for line in LIMITS[:2]), ""]),
    ]
    tmp = out / ".README.md.tmp"
    tmp.write_text("\n".join(parts), encoding="utf-8")
    return tmp.replace(out / "README.md")


def _acceptance(report: Mapping[str, Any]) -> str:
    before, after = report["before"], report["after"]
    if not before or not after:
        return "## Held-out acceptance\n\nNo document was held out, so nothing was measured.\n"
    lines = ["| held-out text | before | after |", "|---|---|---|"]
    for name, old, new in zip(MEASURES.values(), values_of(before), values_of(after), strict=True):
        lines.append(f"| {name} | {old:.3f} | {new:.3f} |")
    for mode in ("greedy", "sampled"):
        pairs = zip(before[mode]["per_position"], after[mode]["per_position"], strict=True)
        for i, (old, new) in enumerate(pairs, 1):
            lines.append(f"| {mode}, rounds that reach position {i} | {old:.1%} | {new:.1%} |")
    return (
        "## Held-out acceptance\n\nLengths through the engine; the other two on text that the target wrote.\n\n"
        + "\n".join(lines)
        + "\n"
    )
