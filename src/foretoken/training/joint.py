"""Training of a target together with its drafter, or for it.  The target changes, so the result includes a target."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretoken.core.io.checkpoints import is_adapter
from foretoken.core.io.files import replacing, save_model
from foretoken.loading import BUILTIN, load_model, resolve
from foretoken.loading.adapters import save_adapter
from foretoken.models import wrap
from foretoken.models.base import LanguageModel
from foretoken.models.forward.parts import TargetParts, storage_of
from foretoken.models.network.low_rank import add_low_rank, low_rank_factors, merge_low_rank

CHUNK = 1024
"""Positions whose logits are computed at once."""
FOLDER = "target"
"""Subfolder of a run's ``out``."""


def load_trainable(source: Any, device: Any) -> LanguageModel:
    """A target with trainable weights: float32, on its public modules.  Raises ``ValueError`` as
    :func:`check_trainable` does."""
    loaded: Any = load_model(source, dtype="float32", device=device, exact="approximate", lean=False)
    check_trainable(loaded.model, source)
    return loaded


def check_trainable(network: Any, source: Any) -> None:
    """Raise ``ValueError`` for quantised weights, of a GGUF file too: they are no parameters."""
    storage = storage_of(network)
    if storage:
        raise ValueError(f"{source} is stored as {storage} and cannot be trained: give the model it was made from")


def as_served(network: nn.Module, dtype: torch.dtype) -> LanguageModel:
    """A copy of a network in training, in the dtype it will be stored in."""
    served: Any = _stored(network, dtype)
    return wrap(served.requires_grad_(False).eval())


def _stored(network: nn.Module, dtype: torch.dtype) -> Any:
    """A copy with ordinary layers, into which a low-rank update is merged.

    Only stored tensors are cast: a loaded model keeps its rotary frequencies in float32.
    """
    copied = copy.deepcopy(network)
    merge_low_rank(copied, dtype)
    for tensor in copied.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return copied


def start_update(network: Any, rank: int, seed: int) -> None:
    """Freeze a target except for a new low-rank update of its decoder.  Raises ``ValueError`` if the target is an
    adapter itself, or has no layers that can be updated."""
    source = network.config._name_or_path
    if is_adapter(Path(source)):
        raise ValueError(f"{source} is a low-rank update, which cannot be updated again: use rank=0")
    add_low_rank(network, rank, seed)


def save_target(network: Any, dtype: torch.dtype, tokenizer: Any, out: Path, rank: int) -> None:
    """Write ``out/target`` in Hugging Face's layout, whole or not at all.  A low-rank update (``rank`` above 0) is also
    written to ``out``, which then loads as the updated target."""
    with replacing(out / FOLDER) as draft:
        save_model(_stored(network, dtype), tokenizer, draft)
    if rank:
        path = network.config._name_or_path
        base = str(Path(path).resolve()) if Path(path).is_dir() else path
        save_adapter(out, low_rank_factors(network), BUILTIN if path == resolve(BUILTIN) else base, dtype)


@torch.no_grad()
def held_loss(parts: TargetParts, blocks: Sequence[Tensor], masks: Sequence[Tensor | None]) -> float | None:
    """The target's own loss on the (learned) tokens of held-out blocks [1, n + 1], in nats per token; ``None`` without
    tokens."""
    total, count = 0.0, 0
    for tokens, learned in zip(blocks, masks, strict=True):
        hidden = parts.features(tokens[:, :-1], ("last",))["last"].flatten(0, 1)
        labels = tokens[:, 1:].flatten()
        if learned is not None:
            hidden, labels = hidden[learned[0, 1:]], labels[learned[0, 1:]]
        for rows, targets in zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True):
            total += float(F.cross_entropy(parts.logits(rows).float(), targets, reduction="sum"))
        count += len(labels)
    return total / count if count else None
