"""The README of a trained model or drafter: its data, its training, what was measured, and its limits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.io.files import write_text
from foretoken.training.config import TrainConfig

SMALL = (
    "It is a small base model for testing and measuring speculative decoding. It continues text; it follows no "
    "instructions, knows few facts, and may repeat itself. Its architecture is Llama (a hybrid's: Qwen3.5, every "
    "second layer recurrent), with tied embeddings and bfloat16 weights."
)
"""What a model that ``train lm`` made is."""
BIAS = "What it says reflects its training text, mistakes and biases included."
HELD_OUT = (
    "It was measured on held-out documents, chosen by a hash of their content. Near-duplicates of training documents "
    "may be among them."
)
ACCEPTANCE = (
    "Acceptance is that of the engine: the mean length in tokens a round, the target's own included, and the share of "
    "rounds whose draft is accepted up to each position; greedy, and at T=1 where it says sampled."
)
STATED = ("steps", "batch_size", "context", "lr", "seed")
"""Options of a drafter's run that its command has, usual or not."""
UNMEASURED = "No document was held out, so nothing was measured."


@dataclass(frozen=True)
class CardInfo:
    """Facts that a training run cannot know.

    Attributes:
        data_note: origin and terms of the text, in a sentence or two.
        licence: SPDX name of the licence of the weights, for example ``apache-2.0``.
    """

    data_note: str = ""
    licence: str = ""

    @property
    def front_matter(self) -> str:
        """The metadata block that the Hugging Face hub reads."""
        lines = [f"license: {self.licence}"] if self.licence else []
        lines += ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- foretoken"]
        return "\n".join(["---", *lines, "---", ""])


def write_card(
    out: Path,
    title: str,
    use: str,
    report: Mapping[str, Any],
    data: Sequence[str | Path],
    command_line: str,
    info: CardInfo | None = None,
    limits: Sequence[str] = (),
) -> Path:
    """Write ``out/README.md`` with all figures of a training report.

    Args:
        use: how it is loaded, or what it is.
        data: paths of the training text, of which the last parts are named.
        command_line: the command that trains this again.
        info: of a model that a user publishes.
    """
    parts = {name: table(part) for name, part in report.items() if isinstance(part, Mapping) and name != "settings"}
    rest = {name: value for name, value in report.items() if not isinstance(value, Mapping)}
    names = ", ".join(f"`{Path(path).name}`" for path in data)
    limits = [*limits, HELD_OUT if report["corpus"]["held"]["documents"] else UNMEASURED]
    limits += [ACCEPTANCE] if parts.get("acceptance") else []
    sections = [
        f"# {title}\n\n{use}\n",
        f"## Data\n\nTrained on {names}.\n",
        f"## Training\n\n```\n{command_line}\n```\n\n{table(rest)}",
        *(f"## {name.replace('_', ' ').capitalize()}\n\n{part}" for name, part in parts.items() if part),
        "## Limits\n\n" + "".join(f"- {line}\n" for line in limits),
    ]
    if info is not None:
        licence = f"The weights are under {info.licence}." if info.licence else "The run did not state a licence."
        sections.insert(0, info.front_matter)
        sections[2] += f"\n{info.data_note or 'The run did not say where the text comes from.'}\n"
        sections.append(f"## Licence\n\n{licence}\n")
    return write_text(out / "README.md", "\n".join(sections))


def table(part: Mapping[str, Any]) -> str:
    """A Markdown table with a row per figure, and a column per mapping in ``part``; empty without figures."""
    columns = {name: dict(_figures(value)) for name, value in part.items() if isinstance(value, Mapping)}
    if own := dict(_figures({name: value for name, value in part.items() if name not in columns})):
        columns = {"": own, **columns}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [[name, *(column.get(name, "") for column in columns.values())] for name in names]
    head = [["", *columns], ["---"] * (len(columns) + 1)] if rows else []
    return "".join(f"| {' | '.join(row)} |\n" for row in (*head, *rows))


def _figures(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value, 1):
            yield from _figures(inner, f"{name} {key}".strip().replace("_", " "))
    elif value is not None:
        yield name, f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def command(
    name: str,
    data: Sequence[str | Path],
    out: Path,
    options: Mapping[str, Any],
    folders: Mapping[str, str | Path | None],
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The ``foretoken train`` command of a run: last parts of paths, options, and ``--set`` settings."""
    pairs: list[tuple[str, Any]] = [(key, Path(path).name) for key, path in folders.items() if path is not None]
    pairs += [("data", Path(path).name) for path in data]
    pairs += [("out", out.resolve().name), *options.items()]
    pairs += [("set", f"{key}={value}") for key, value in (settings or {}).items()]
    words = (f"--{key.replace('_', '-')}{'' if value is True else f' {value}'}" for key, value in pairs)
    return f"foretoken train {name} {' '.join(words)}"


def write_drafter_card(
    out: Path,
    report: Mapping[str, Any],
    data: Sequence[str | Path],
    folders: Mapping[str, str],
    answers: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``out/README.md`` from a training report (see :class:`foretoken.training.trainer.Trainer`).

    Args:
        folders: the target, and the draft model of a stop head.
        answers: options of the target's answers to the questions in ``data``.
    """
    method, run = report["method"], report["run"]
    options = {name: run[name] for name in run if name in STATED or run[name] != getattr(TrainConfig, name)}
    options |= {**(answers or {}), **({} if report["weight_bits"] == 16 else {"weight_bits": report["weight_bits"]})}
    if "draft" in folders:
        measured = json.loads((out / "drafter.json").read_text(encoding="utf-8"))["measured"]
        pairs = [dict(zip(("predicted", "accepted"), pair, strict=True)) for pair in measured.get("calibration", ())]
        report = {**report, "belief": {**measured, "calibration": pairs}}
    command_line = command(method, data, out, options, folders, report["settings"])
    kind = "stop head" if "draft" in folders else "drafter"
    title = f"A {kind} of the method `{method}` for `{Path(folders['target']).name}`"
    return write_card(out, title, _use(report, folders), report, data, command_line)


def _use(report: Mapping[str, Any], folders: Mapping[str, str]) -> str:
    spec = report["drafter"]
    if "draft" in folders:
        draft = Path(folders["draft"]).name
        return f'Loads as `controller="{spec}"` beside the draft model `{draft}`, and beside no other.'
    if report["target_loss_nats"] is None:
        return f'Loads as `drafter="{spec}"` beside the target that it was trained for, and beside no other.'
    if rank := report["net"].get("rank", 0):
        return (
            f"The target was trained too, by an update of rank {rank} of its decoder's linear layers: load "
            f'`target="FOLDER"` with `drafter="{spec}"`. Output is that of the updated target. The update '
            "(`adapter_config.json`, `adapter_model.safetensors`) is in the layout of the PEFT library."
        )
    return (
        f'The target was trained too and has changed: load `target="FOLDER/target"` with `drafter="{spec}"`. '
        "Output is that of the new target."
    )
