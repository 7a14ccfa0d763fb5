"""The README of a trained model or drafter: its data, its training and its limits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.io.files import write_text
from foretoken.training.curves import MEASURES, values_of

LIMITS = (
    "It is a small base model for testing and measuring speculative decoding. It continues text; it follows no "
    "instructions, knows few facts, and may repeat itself.",
    "What it says reflects its training text, mistakes and biases included.",
    "Its losses above were measured on documents that were held out by a hash of their content. "
    "Near-duplicates of training documents may be among them.",
)
"""Of a model that ``train lm`` made."""


def front_matter(licence: str = "") -> str:
    """The metadata block that the Hugging Face hub reads."""
    lines = [f"license: {licence}"] if licence else []
    lines += ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- foretoken"]
    return "\n".join(["---", *lines, "---", ""])


def table(rows: Mapping[str, str]) -> str:
    return grid(("", ""), rows.items())


def grid(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table with a trailing newline."""
    lines = ["".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:], ""])


def names_of(data: Sequence[str | Path]) -> str:
    """The last parts of the training paths."""
    return ", ".join(f"`{Path(path).name}`" for path in data)


def seen_text(report: Mapping[str, Any]) -> str:
    """The amount of training text."""
    train = report["corpus"]["train"]
    return f"{train['documents']:,} documents, {train['tokens']:,} tokens"


def command(
    name: str,
    data: Sequence[str | Path],
    out: Path,
    options: Mapping[str, Any],
    folders: Mapping[str, str | Path | None],
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The ``foretoken train`` command of a run: last parts of paths, options, and ``--set`` settings."""
    words = [f"foretoken train {name}"]
    words += [f"{_flag(key)} {Path(path).name}" for key, path in folders.items() if path is not None]
    words += [f"--data {Path(path).name}" for path in data]
    words.append(f"--out {out.resolve().name}")
    words += [_flag(key) if value is True else f"{_flag(key)} {value}" for key, value in options.items()]
    words += [f"--set {key}={value}" for key, value in (settings or {}).items()]
    return " ".join(words)


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


# -- a language model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CardInfo:
    """Facts that a training run cannot know.

    Attributes:
        data_note: origin and terms of the text, in a sentence or two.
        licence: SPDX name of the licence of the weights, for example ``apache-2.0``.
    """

    data_note: str = ""
    licence: str = ""


def write_card(
    out: Path, report: Mapping[str, Any], data: Sequence[str | Path], command_line: str, info: CardInfo | None = None
) -> Path:
    """Write ``out/README.md`` from a training report (see :func:`foretoken.training.lm.train_lm`).

    Only the last parts of the training paths ``data`` are named; ``command_line`` is the command that trains this
    model.
    """
    info = info or CardInfo()
    licence = f"The weights are under {info.licence}." if info.licence else "The run did not state a licence."
    sections = [
        front_matter(info.licence),
        f"# {out.resolve().name}\n\n{LIMITS[0]}\n",
        _lm_architecture(report),
        _lm_data(report, data, info),
        _lm_training(report, command_line),
        _lm_quality(report),
        "\n".join(["## Licence and limits", "", licence, "", *(f"- {line}" for line in LIMITS), ""]),
    ]
    return write_text(out / "README.md", "\n".join(sections))


def _lm_architecture(report: Mapping[str, Any]) -> str:
    config = report["config"]
    family = "Qwen3.5, every second layer recurrent" if config.get("hybrid") else "Llama"
    rows = {
        "architecture": f"{family}, tied embeddings, bfloat16 weights",
        "parameters": f"{report['parameters']:,}",
        "layers": str(config["layers"]),
        "hidden size": str(config["hidden"]),
        "feed-forward size": str(config["ffn"]),
        "attention heads": f"{config['heads']} ({config['kv_heads']} key-value heads)",
        "vocabulary": f"{config['vocab']:,} (byte-level BPE)",
        "context": f"{config['context']:,} tokens",
    }
    return f"## Architecture\n\n{table(rows)}"


def _lm_data(report: Mapping[str, Any], data: Sequence[str | Path], info: CardInfo) -> str:
    corpus = report["corpus"]
    rows = {
        split: ", ".join(f"{corpus[key][unit]:,} {unit}" for unit in ("documents", "bytes", "tokens"))
        for split, key in (("training", "train"), ("held out", "held"))
    }
    note = info.data_note or "The run did not say where the text comes from."
    return f"## Data\n\n{note}\n\nTrained on {names_of(data)}.\n\n{table(rows)}"


def _lm_training(report: Mapping[str, Any], command_line: str) -> str:
    tokens, available = report["tokens"], report["corpus"]["train"]["tokens"]
    adamw = report["config"].get("optimizer") == "adamw"
    optimizers = "AdamW" if adamw else "Muon for the blocks' matrices, AdamW for the rest"
    passes = f" ({tokens / available:.2f} passes over the training text)" if available else ""
    rows = {
        "steps": f"{report['steps']:,}",
        "tokens seen": f"{tokens:,}{passes}",
        "optimizers": f"{optimizers}, learning rate {report['config']['lr']:g}",
        "time": f"{report['hours']:.2f} hours",
    }
    return f"## Training\n\n```\n{command_line}\n```\n\n{table(rows)}"


def _lm_quality(report: Mapping[str, Any]) -> str:
    loss = report["held_loss_nats_per_token"]
    if loss is None:
        return "## Quality\n\nNo document was held out, so nothing was measured.\n"
    rows = {
        "held-out loss per token": f"{loss:.4f} nats ({loss / math.log(2):.4f} bits), perplexity {math.exp(loss):.2f}",
        "held-out loss per byte": f"{report['held_bits_per_byte']:.4f} bits",
    }
    return f"## Quality\n\n{table(rows)}"


# -- a drafter ---------------------------------------------------------------------------------------------------------


def write_drafter_card(
    out: Path,
    report: Mapping[str, Any],
    data: Sequence[str | Path],
    target: str,
    answers: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``out/README.md`` from a training report (see :class:`foretoken.training.trainer.Trainer`).

    ``answers`` are the options of the target's answers to the questions in ``data``.
    """
    run, net, acceptance = report["run"], report["net"], report["acceptance"]
    method = report["method"]
    name = Path(target).name
    options = {**_run_options(run), **(answers or {})}
    if report.get("weight_bits", 16) != 16:
        options["weight_bits"] = report["weight_bits"]
    command_line = command(method, data, out, options, {"target": target}, report["settings"])
    shape = {key.replace("_", " "): str(value) for key, value in net.items()}
    shape["parameters"] = f"{report['parameters']:,}"
    facts = {"steps": f"{run['steps']:,}", **_amounts(report)}
    parts = [
        f"# A drafter of the method `{method}` for `{name}`\n",
        _use(report),
        f"## Shape\n\n{table(shape)}",
        f"## Data\n\nTrained on {names_of(data)}.\n",
        f"## Training\n\n```\n{command_line}\n```\n\n{table(facts)}",
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


def _run_options(run: Mapping[str, Any]) -> dict[str, Any]:
    """Command options of a drafter's or a stop head's run, without usual values."""
    usual = {"text": "fixed", "optimizer": "muon", "precision": "bfloat16"}  # older reports leave them out
    run = {**usual, **run}
    names = ["steps", "batch_size", "context", "lr", "seed"]
    names += [] if run["text"] == "fixed" else ["text", "written_blocks", "written_temperature"]
    names += [name for name in ("optimizer", "precision") if run[name] != usual[name]]
    return {name: run[name] for name in names}


def _amounts(report: Mapping[str, Any]) -> dict[str, str]:
    return {"tokens seen": f"{report['tokens']:,}", "time": f"{report['hours']:.2f} hours", "text": seen_text(report)}


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


def _acceptance(measured: Mapping[str, Any]) -> str:
    columns = {"greedy": measured, **({"T=1": measured["sampled"]} if "sampled" in measured else {})}
    rows = [["mean acceptance length", *(f"{column['mean_acceptance_length']:.2f}" for column in columns.values())]]
    for position in range(len(measured["per_position"])):
        rows.append(
            [f"position {position + 1}", *(f"{side['per_position'][position]:.1%}" for side in columns.values())]
        )
    return grid(("", *columns), rows)


# -- a draft model that was aligned ------------------------------------------------------------------------------------


def write_alignment_card(
    out: Path, report: Mapping[str, Any], data: Sequence[str | Path], target: str, command_line: str, note: str = ""
) -> Path:
    """Write ``out/README.md`` from the report of :class:`foretoken.training.distill.Distiller`."""
    run, name = report["run"], Path(target).name
    facts = {
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
        f"## Training\n\n```\n{command_line}\n```\n\n{table(facts)}",
        f"## Data\n\nText of {names_of(data)}: {seen_text(report)}.\n",
        _acceptance_gained(report),
        f"## Limits\n\n- The limits of the model that it started from apply.\n- {LIMITS[1]}\n",
    ]
    return write_text(out / "README.md", "\n".join(parts))


def _acceptance_gained(report: Mapping[str, Any]) -> str:
    before, after = report["before"], report["after"]
    if not before or not after:
        return "## Held-out acceptance\n\nNo document was held out, so nothing was measured.\n"
    measures = zip(MEASURES.values(), values_of(before), values_of(after), strict=True)
    rows = [[name, f"{old:.3f}", f"{new:.3f}"] for name, old, new in measures]
    for mode in ("greedy", "sampled"):
        pairs = zip(before[mode]["per_position"], after[mode]["per_position"], strict=True)
        for i, (old, new) in enumerate(pairs, 1):
            rows.append([f"{mode}, rounds that reach position {i}", f"{old:.1%}", f"{new:.1%}"])
    head = "## Held-out acceptance\n\nLengths through the engine; the other two on text that the target wrote.\n\n"
    return head + grid(("held-out text", "before", "after"), rows)


# -- a stop head -------------------------------------------------------------------------------------------------------


def write_stop_card(out: Path, report: Mapping[str, Any], data: Sequence[str | Path], target: str, draft: str) -> Path:
    """Write ``out/README.md`` from the report of a ``specdec_pp`` run."""
    net, folders = report["net"], {"target": target, "draft": draft}
    settings = {key: net[key] for key in ("blocks", "mix", "mismatch")}
    command_line = command("specdec_pp", data, out, _run_options(report["run"]), folders, settings)
    facts = {"parameters": f"{report['parameters']:,}", "hidden size": str(net["hidden_size"]), **_amounts(report)}
    parts = [
        f"# A stop head (SpecDec++) for the draft model `{Path(draft).name}` of `{Path(target).name}`\n",
        'Loads as `controller="specdec_pp:FOLDER"` beside that draft model, and beside no other.\n',
        f"## Training\n\n```\n{command_line}\n```\n\nData: {names_of(data)}.\n\n{table(facts)}",
        _belief(json.loads((out / "drafter.json").read_text(encoding="utf-8"))["measured"]),
        _acceptance_with(report["acceptance"]),
    ]
    return write_text(out / "README.md", "\n".join(parts))


def _belief(measured: Mapping[str, Any]) -> str:
    if not measured:
        return "## Held-out loss\n\nNo document was held out, so nothing was measured.\n"
    columns = ("guesses, from the least likely fifth on", "the head says (mismatch weight taken out)", "accepted")
    rows = [
        (str(i), f"{predicted:.1%}", f"{true:.1%}") for i, (predicted, true) in enumerate(measured["calibration"], 1)
    ]
    return (
        f"## Held-out loss\n\n{measured['guesses']:,} guesses of the draft model: "
        f"{measured['loss']:.4f} nats; the best constant has {measured['constant_loss']:.4f}.\n\n{grid(columns, rows)}"
    )


def _acceptance_with(measured: Mapping[str, Any]) -> str:
    if not measured:
        return ""
    sides = {
        "greedy, with the head": measured, "greedy, without": measured["without"],
        "T=1, with the head": measured["sampled"], "T=1, without": measured["without"]["sampled"],
    }  # fmt: skip
    rows = [
        (name, f"{side['mean_acceptance_length']:.2f}", f"{side['acceptance_rate']:.1%}")
        for name, side in sides.items()
    ]
    return f"## Held-out acceptance\n\n{grid(('', 'tokens a round', 'draft tokens accepted'), rows)}"
