"""The draft models of drafters that have one, checked against the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from foretoken.loading.checkpoints import BUILTIN, is_builtin, resolve
from foretoken.loading.models import load_model
from foretoken.loading.tokenizers import check_same_tokenizer, check_vocabularies, load_tokenizer
from foretoken.models.base import Feed, LanguageModel
from foretoken.models.graphs import follow
from foretoken.models.packing import pays_packed

COMPILED_ROWS = 32
"""Rows up to which a packed draft model's products are compiled when it is loaded: eight requests with a new token and
three of the last draft each."""


def build_draft_model(
    path: str | None,
    target: LanguageModel,
    target_source: Any,
    tokenizer: Any | None,
    device: Any,
    drafter: str = "model",
    packed: bool = True,
    quantize: str | None = None,
) -> LanguageModel:
    """The draft model of a ``model:PATH`` spec (or of another ``drafter`` with one), checked against the target.

    It is loaded on ``device``, or on the target's where that is ``None``.  Unless it is ``packed``, its weights stay
    where they can be trained.  ``quantize`` as in :func:`~foretoken.loading.models.load_model`.

    Raises:
        ValueError: no path and no built-in draft for this target, or another tokenizer.
    """
    if path is None and not is_builtin(target_source):
        raise ValueError(
            f"drafter {drafter!r} needs a path for this target: {drafter}:PATH (a draft LM of the same tokenizer)"
        )
    path = BUILTIN if path is None else path
    draft = _load_draft_model(path, target, device, packed, quantize)
    check_vocabularies(target, draft, path)
    if tokenizer is not None and path != BUILTIN:
        check_same_tokenizer(tokenizer, load_tokenizer(path), path)
    return draft


def build_foreign_draft_model(
    name: str, path: str | None, target: LanguageModel, target_source: Any, tokenizer: Any | None, device: Any
) -> tuple[LanguageModel, Any]:
    """The draft model of a ``name:PATH`` spec and its own tokenizer, which may be another than the target's.

    It is loaded on ``device``, or on the target's where that is ``None``.

    Raises:
        ValueError: no path and no built-in draft for this target, or a model without a tokenizer.
    """
    if path is None and not is_builtin(target_source):
        raise ValueError(f"drafter {name!r} needs a path for this target: {name}:PATH (a draft LM and its tokenizer)")
    if tokenizer is None:
        raise ValueError(f"drafter {name!r} needs the target's tokenizer: pass tokenizer=... to load")
    path = BUILTIN if path is None else path
    draft = _load_draft_model(path, target, device)
    own = load_tokenizer(resolve(path, "draft"))
    if own is None:
        raise ValueError(
            f"drafter {name!r} needs the draft model's tokenizer, and {path} has none: copy tokenizer.json into it"
        )
    return draft, own


def _load_draft_model(
    path: str, target: LanguageModel, device: Any, packed: bool = True, quantize: str | None = None
) -> LanguageModel:
    # A draft model's law may be anything: on a CPU small ones are fastest in bfloat16 where it has products of that and
    # they can be packed, and in float32 elsewhere (docs/log.md).  A few bits of packed ones depend on the batch, so
    # that only a target that is like that itself gets one.
    device = getattr(target, "device", None) if device is None else device
    on_cpu = device is None or str(device) == "cpu"
    small = on_cpu and _is_small(path)
    alike = getattr(target, "dtype", None) == torch.bfloat16 and getattr(target, "exact", "") == "distribution"
    half = packed and alike and pays_packed(torch.empty(2, 2, dtype=torch.bfloat16))
    draft = load_model(
        path,
        role="draft",
        dtype=("bfloat16" if half else "float32") if small else None,
        device=device,
        exact="approximate" if small or not packed else "distribution",
        quantize=quantize,
    )
    if small and half:
        _compile(draft)
    return follow(draft, target) if packed else draft


def _compile(draft: LanguageModel) -> None:
    """Run calls with one row, two rows, and so on: oneDNN makes a kernel for every number of rows, which takes two to
    three times as long as a small model's call, and who prices drafts by the first ones would think them dear."""
    sequence = draft.open()
    draft.prefill(sequence, [0])
    for rows in range(1, min(COMPILED_ROWS, draft.context_length - 1) + 1):
        draft.forward([Feed(sequence, [0] * rows)])
        draft.commit(sequence, ())
    draft.release(sequence)


def _is_small(path: str) -> bool:
    folder = Path(resolve(path, "draft"))
    return folder.is_dir() and sum(p.stat().st_size for p in folder.glob("*.safetensors")) < 20_000_000
