"""The card of a trained drafter: what it guesses for, what it saw, how often it is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.core.io.files import write_text
from foretoken.training.cards.parts import command, front_matter, names_of, seen_text, table

WRITTEN_OPTIONS = ("text", "written_blocks", "written_temperature")


def write_drafter_card(
    out: Path,
    report: Mapping[str, Any],
    data: Sequence[str | Path],
    target: str,
    data_note: str = "",
    licence: str = "",
    answers: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``out/README.md`` from a training report (see :class:`foretoken.training.trainer.Trainer`).

    ``answers`` are the options with which the target answered the questions in ``data``.
    """
    run, net, acceptance = report["run"], report["net"], report["acceptance"]
    method = report["method"]
    name = Path(target).name
    names = ["steps", "batch_size", "context", "lr", "seed"]
    if run.get("text", "fixed") != "fixed":
        names += WRITTEN_OPTIONS
    names += [k for k, usual in (("optimizer", "muon"), ("precision", "bfloat16")) if run.get(k, usual) != usual]
    options = {**{name: run[name] for name in names}, **(answers or {})}
    told = command(method, data, out, options, {"target": target}, report["settings"])
    shape = {key.replace("_", " "): str(value) for key, value in net.items()}
    shape["parameters"] = f"{report['parameters']:,}"
    seen = {
        "steps": f"{run['steps']:,}",
        "tokens seen": f"{report['tokens']:,}",
        "time": f"{report['hours']:.2f} hours",
        "text": seen_text(report),
    }
    parts = [
        *([front_matter(licence, model=False)] if licence else []),
        f"# A drafter of the method `{method}` for `{name}`\n",
        _use(report),
        f"## Shape\n\n{table(shape)}",
        f"## Data\n\n{data_note or f'Trained on {names_of(data)}.'}\n",
        f"## Training\n\n```\n{told}\n```\n\n{table(seen)}",
    ]
    losses = report.get("target_loss_nats")
    if losses and losses["before"] is not None:
        rows = {when: f"{losses[when]:.4f} nats per token" for when in ("before", "after")}
        parts.append(f"## The target on held-out text\n\n{table(rows)}")
    if acceptance:
        parts.append(
            "## Held-out acceptance\n\nThrough the engine, on documents held out by a hash of their content: the mean "
            "acceptance length (tokens a round, the target's own included) and the share of rounds whose draft is "
            f"accepted up to each position.\n\n{_acceptance(acceptance)}"
        )
    return write_text(out / "README.md", "\n".join(parts))


def _use(report: Mapping[str, Any]) -> str:
    spec = report["drafter"]
    if report.get("target_loss_nats") is None:
        return f'Loads as `drafter="{spec}"` beside the target that it was trained for, and beside no other.\n'
    rank = report["net"].get("rank", 0)
    if rank:
        return (
            f"The target was trained too, by an update of rank {rank} of its decoder's linear layers: load "
            f'`target="FOLDER"` with `drafter="{spec}"`. Output is that of the updated target. The update '
            "(`adapter_config.json`, `adapter_model.safetensors`) is in the layout of the PEFT library.\n"
        )
    return (
        f'The target was trained too and has changed: load `target="FOLDER/target"` with `drafter="{spec}"`. '
        "Output is that of the new target.\n"
    )


def _acceptance(found: Mapping[str, Any]) -> str:
    columns = {"greedy": found, **({"T=1": found["sampled"]} if "sampled" in found else {})}
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lengths = " | ".join(f"{column['mean_acceptance_length']:.2f}" for column in columns.values())
    lines.append(f"| mean acceptance length | {lengths} |")
    for place in range(len(found["per_position"])):
        shares = " | ".join(f"{column['per_position'][place]:.1%}" for column in columns.values())
        lines.append(f"| position {place + 1} | {shares} |")
    return "\n".join(lines) + "\n"
