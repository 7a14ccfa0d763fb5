"""The model card of a trained language model: what it was made from, how, and what it cannot do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.io.files import write_text
from foretoken.training.cards.parts import LIMITS, front_matter, names_of, table


@dataclass(frozen=True)
class CardInfo:
    """What a training run cannot know by itself.

    Attributes:
        title: first heading; the folder's name by default.
        data_note: where the text comes from and under which terms, in a sentence or two.
        licence: SPDX name of the licence of the weights, for example ``apache-2.0``.
        purpose: what the model is for.
    """

    title: str = ""
    data_note: str = ""
    licence: str = ""
    purpose: str = ""


def write_card(
    out: Path, report: Mapping[str, Any], data: Sequence[str | Path], command: str, info: CardInfo | None = None
) -> Path:
    """Write ``out/README.md`` from a training report (see :func:`foretoken.training.lm.train_lm`).

    Args:
        out: the model's folder.
        report: parameters, steps, tokens, corpus, losses, hours, config.
        data: training paths; only their last parts are named.
        command: the command line that trains this model.
        info: what the run cannot know.
    """
    info = info or CardInfo()
    sections = [
        front_matter(info.licence),
        f"# {info.title or out.resolve().name}\n\n{info.purpose or LIMITS[0]}\n",
        _architecture(report),
        _data(report, data, info),
        _training(report, command),
        _quality(report),
        _limits(info),
    ]
    return write_text(out / "README.md", "\n".join(sections))


def _architecture(report: Mapping[str, Any]) -> str:
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


def _data(report: Mapping[str, Any], data: Sequence[str | Path], info: CardInfo) -> str:
    corpus = report["corpus"]
    rows = {
        split: ", ".join(f"{corpus[key][unit]:,} {unit}" for unit in ("documents", "bytes", "tokens"))
        for split, key in (("training", "train"), ("held out", "held"))
    }
    note = info.data_note or "The run did not say where the text comes from."
    return f"## Data\n\n{note}\n\nTrained on {names_of(data)}.\n\n{table(rows)}"


def _training(report: Mapping[str, Any], command: str) -> str:
    tokens, available = report["tokens"], report["corpus"]["train"]["tokens"]
    passes = f" ({tokens / available:.2f} passes over the training text)" if available else ""
    rows = {
        "steps": f"{report['steps']:,}",
        "tokens seen": f"{tokens:,}{passes}",
        "optimizers": f"{_optimizers(report['config'])}, learning rate {report['config']['lr']:g}",
        "time": f"{report['hours']:.2f} hours",
    }
    return f"## Training\n\n```\n{command}\n```\n\n{table(rows)}"


def _optimizers(config: Mapping[str, Any]) -> str:
    return "AdamW" if config.get("optimizer") == "adamw" else "Muon for the blocks' matrices, AdamW for the rest"


def _quality(report: Mapping[str, Any]) -> str:
    held = report["held_loss_nats_per_token"]
    if held is None:
        return "## Quality\n\nNo document was held out, so nothing was measured.\n"
    rows = {
        "held-out loss per token": f"{held:.4f} nats ({held / math.log(2):.4f} bits), perplexity {math.exp(held):.2f}",
        "held-out loss per byte": f"{report['held_bits_per_byte']:.4f} bits",
    }
    return f"## Quality\n\n{table(rows)}"


def _limits(info: CardInfo) -> str:
    licence = f"The weights are under {info.licence}." if info.licence else "The run did not state a licence."
    return "\n".join(["## Licence and limits", "", licence, "", *(f"- {line}" for line in LIMITS), ""])
