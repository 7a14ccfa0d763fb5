"""The folder that a finished run leaves, and a start from one; every file in it appears whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def save_model(network: Any, tokenizer: Any, out: Path) -> None:
    """A network and its tokenizer in Hugging Face's layout."""
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()  # of one file, in the middle of ours
    tmp = out / ".tmp-model"
    shutil.rmtree(tmp, ignore_errors=True)
    network.save_pretrained(tmp)
    tokenizer.save_pretrained(tmp)
    for file in sorted(tmp.iterdir()):
        file.replace(out / file.name)
    tmp.rmdir()


def write_report(report: Mapping[str, Any], out: Path) -> None:
    """``training.json``."""
    tmp = out / ".tmp-training.json"
    tmp.write_text(json.dumps(report, indent=1), encoding="utf-8")
    tmp.replace(out / "training.json")


def load_weights(model: Any, source: Path) -> None:
    """Copy the weights of the model folder ``source`` into ``model``.

    Raises:
        ValueError: no safetensors file there, or tensors of another architecture.
    """
    from safetensors.torch import load_file

    file = source / "model.safetensors"
    if not file.exists():
        raise ValueError(f"{source} holds no model.safetensors to start from")
    stored, mine = load_file(file), model.state_dict()
    if model.config.tie_word_embeddings:
        mine.pop("lm_head.weight", None)
        stored.pop("lm_head.weight", None)
    other = [
        n for n in mine.keys() | stored.keys() if n not in mine or n not in stored or mine[n].shape != stored[n].shape
    ]
    if other:
        raise ValueError(
            f"{source} is another architecture ({len(other)} tensors differ, {min(other)} among them): "
            "give its --hidden, --layers, --heads, --kv-heads and --ffn"
        )
    for name, tensor in mine.items():
        tensor.copy_(stored[name])
