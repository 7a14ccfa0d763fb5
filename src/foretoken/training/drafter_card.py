"""The card of a trained drafter: what it guesses for, what it saw, how often it is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.training.card import _table


def write_drafter_card(
    out: Path,
    report: Mapping[str, Any],
    data: Sequence[str | Path],
    target: str,
    data_note: str = "",
    licence: str = "",
) -> Path:
    """Write ``out/README.md`` from a training report (see :class:`foretoken.training.trainer.Trainer`)."""
    run, net, acceptance = report["run"], report["net"], report["acceptance"]
    method = report["method"]
    name = Path(target).name
    settings = " ".join(f"--set {k}={v}" for k, v in report["settings"].items())
    options = " ".join(f"--{k.replace('_', '-')} {run[k]}" for k in ("steps", "batch_size", "context", "lr", "seed"))
    command = " ".join(
        [f"foretoken train {method} --target {name}", *(f"--data {Path(p).name}" for p in data), f"--out {out.name}"]
    )
    shape = {key.replace("_", " "): str(value) for key, value in net.items()}
    shape["parameters"] = f"{report['parameters']:,}"
    seen = {
        "steps": f"{run['steps']:,}",
        "tokens seen": f"{report['tokens']:,}",
        "time": f"{report['hours']:.2f} hours",
        "text": f"{report['corpus']['train']['documents']:,} documents, {report['corpus']['train']['tokens']:,} tokens",
    }
    parts = [
        *([f"---\nlicense: {licence}\n---\n"] if licence else []),
        f"# A drafter of the method `{method}` for `{name}`\n",
        f'Loads as `drafter="{method}:FOLDER"` beside the target that it was trained for, and beside no other.\n',
        f"## Shape\n\n{_table(shape)}",
        f"## Data\n\n{data_note or 'Trained on ' + ', '.join(f'`{Path(p).name}`' for p in data) + '.'}\n",
        f"## Training\n\n```\n{command} {options} {settings}\n```\n\n{_table(seen)}",
    ]
    if acceptance:
        by_place = {f"position {i}": f"{share:.1%}" for i, share in enumerate(acceptance["per_position"], 1)}
        measured = {"mean acceptance length": f"{acceptance['mean_acceptance_length']:.2f} tokens a round", **by_place}
        parts.append(
            "## Held-out acceptance\n\nGreedy, through the engine, on documents held out by a hash of their content: "
            f"the share of rounds whose draft stands up to each position.\n\n{_table(measured)}"
        )
    tmp = out / ".README.md.tmp"
    tmp.write_text("\n".join(parts), encoding="utf-8")
    return tmp.replace(out / "README.md")
