"""The card of a stop head: whose drafts it ends, what it learnt, how far it can be believed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.core.io.files import write_text
from foretoken.training.cards.drafter import WRITTEN_OPTIONS
from foretoken.training.cards.parts import command, names_of, seen_text, table

RUN_OPTIONS = ("steps", "batch_size", "context", "lr", "seed")


def write_stop_card(out: Path, report: Mapping[str, Any], data: Sequence[str | Path], target: str, draft: str) -> Path:
    """Write ``out/README.md`` from the report of a ``specdec_pp`` run."""
    run, net = report["run"], report["net"]
    names = RUN_OPTIONS if run["text"] == "fixed" else (*RUN_OPTIONS, *WRITTEN_OPTIONS)
    settings = {key: net[key] for key in ("blocks", "mix", "mismatch")}
    told = command(
        "specdec_pp", data, out, {name: run[name] for name in names}, {"target": target, "draft": draft}, settings
    )
    seen = {
        "parameters": f"{report['parameters']:,}",
        "hidden size": str(net["hidden_size"]),
        "tokens seen": f"{report['tokens']:,}",
        "time": f"{report['hours']:.2f} hours",
        "text": seen_text(report),
    }
    parts = [
        f"# A stop head (SpecDec++) for the draft model `{Path(draft).name}` of `{Path(target).name}`\n",
        'Loads as `controller="specdec_pp:FOLDER"` beside that draft model, and beside no other.\n',
        f"## Training\n\n```\n{told}\n```\n\nData: {names_of(data)}.\n\n{table(seen)}",
        _belief(json.loads((out / "drafter.json").read_text(encoding="utf-8"))["measured"]),
        _acceptance(report["acceptance"]),
    ]
    return write_text(out / "README.md", "\n".join(parts))


def _belief(measured: Mapping[str, Any]) -> str:
    if not measured:
        return "## Held-out loss\n\nNo document was held out, so nothing was measured.\n"
    lines = [
        f"## Held-out loss\n\n{measured['guesses']:,} guesses of the draft model: "
        f"{measured['loss']:.4f} nats; the best constant has {measured['constant_loss']:.4f}.\n",
        "| guesses, from the least likely fifth on | the head says (mismatch weight taken out) | accepted |",
        "|---|---|---|",
    ]
    for i, (said, true) in enumerate(measured["calibration"], 1):
        lines.append(f"| {i} | {said:.1%} | {true:.1%} |")
    return "\n".join([*lines, ""])


def _acceptance(found: Mapping[str, Any]) -> str:
    if not found:
        return ""
    sides = {
        "greedy, with the head": found, "greedy, without": found["without"],
        "T=1, with the head": found["sampled"], "T=1, without": found["without"]["sampled"],
    }  # fmt: skip
    lines = ["## Held-out acceptance\n", "| | tokens a round | draft tokens accepted |", "|---|---|---|"]
    for name, side in sides.items():
        lines.append(f"| {name} | {side['mean_acceptance_length']:.2f} | {side['acceptance_rate']:.1%} |")
    return "\n".join([*lines, ""])
