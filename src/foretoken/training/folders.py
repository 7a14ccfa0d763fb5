"""The folder that a finished run leaves; every file in it appears whole or not at all."""

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
