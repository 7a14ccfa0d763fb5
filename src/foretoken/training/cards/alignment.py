"""The card of a draft model that was aligned to a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.core.io.files import write_text
from foretoken.training.cards.parts import LIMITS, front_matter, names_of, seen_text, table
from foretoken.training.curves import MEASURES, values_of


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
        front_matter(),
        f"# {out.resolve().name}: a draft model aligned to `{name}`\n",
        f'Loads as `drafter="model:FOLDER"` beside `{name}`. {note}\n',
        f"## Training\n\n```\n{command}\n```\n\n{table(seen)}",
        f"## Data\n\nText of {names_of(data)}: {seen_text(report)}.\n",
        _acceptance(report),
        "\n".join(["## Limits", "", *(f"- {line}" for line in LIMITS[:2]), ""]),
    ]
    return write_text(out / "README.md", "\n".join(parts))


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
