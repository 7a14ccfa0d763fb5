"""Training a target together with its drafter, or for it: the target changes, so that its result is a target too."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.models import wrap
from foretoken.models.base import LanguageModel
from foretoken.models.parts import TargetParts

FOLDER = "target"
"""Below a run's ``out``."""


def load_trainable(source: Any, device: Any) -> LanguageModel:
    """A target whose weights can be trained: float32, on its public modules."""
    from foretoken.loading import load_model

    return load_model(source, dtype="float32", device=device, exact="approximate", lean=False)


def as_served(network: nn.Module, dtype: torch.dtype) -> LanguageModel:
    """A copy of a network in training, in the dtype that it will be stored in."""
    served: Any = copy.deepcopy(network)
    return wrap(served.requires_grad_(False).to(dtype).eval())


def save_target(network: nn.Module, dtype: torch.dtype, tokenizer: Any, out: Path) -> Path:
    """Write ``out/target`` in Hugging Face's layout, whole or not at all.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    final, tmp = out / FOLDER, out / f".tmp-{FOLDER}"
    shutil.rmtree(tmp, ignore_errors=True)
    from transformers.utils import logging as hf_logging

    stored: Any = copy.deepcopy(network).to(dtype)
    hf_logging.disable_progress_bar()  # a bar of its own for one file
    try:
        stored.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        shutil.rmtree(final, ignore_errors=True)
        tmp.replace(final)
    finally:
        hf_logging.enable_progress_bar()
        shutil.rmtree(tmp, ignore_errors=True)
    return final


@torch.no_grad()
def held_loss(parts: TargetParts, blocks: Sequence[Tensor], chunk: int = 1024) -> float | None:
    """The target's own loss on held-out blocks [1, n + 1], in nats per token; ``None`` without any."""
    total, count = 0.0, 0
    for tokens in blocks:
        hidden = parts.features(tokens[:, :-1], ("last",))["last"].flatten(0, 1)
        labels = tokens[:, 1:].flatten()
        for rows, wanted in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            total += float(F.cross_entropy(parts.logits(rows).float(), wanted, reduction="sum"))
        count += len(labels)
    return total / count if count else None
