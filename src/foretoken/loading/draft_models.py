"""Draft models for drafters, checked against the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from foretoken.core.io.checkpoints import BUILTIN, LoadError, is_builtin, is_gguf, resolve
from foretoken.loading.handed import check_handed_in, unwrapped
from foretoken.loading.models import load_model
from foretoken.loading.tokenizers import check_same_tokenizer, check_vocabularies, load_tokenizer
from foretoken.models import wrap
from foretoken.models.base import CapabilityError, Feed, LanguageModel, opened
from foretoken.models.cache.window import Window
from foretoken.models.forward.graphed import follow
from foretoken.models.huggingface import HuggingFaceModel
from foretoken.models.linear.packing import pays_packed
from foretoken.models.linear.product_costs import step_s
from foretoken.models.linear.quantised_linear import KINDS

NONE = "none"
QUANTIZE = ("auto", NONE, *KINDS)
"""Choices for the weights of a draft model: the fastest on this CPU, no quantisation, or one kind.  ``auto`` leaves
small models, whose step is mostly call overhead, and models to be trained as they are."""


def build_draft_model(
    path: str | None,
    target: LanguageModel,
    target_source: Any,
    tokenizer: Any | None,
    device: Any,
    drafter: str = "model",
    packed: bool = True,
    quantize: str = NONE,
) -> LanguageModel:
    """The draft model of a ``model:PATH`` spec (or another ``drafter`` with one), checked against the target.

    It is loaded on ``device``, or the target's device if that is ``None``.  Without ``packed`` its weights stay
    trainable.  ``quantize`` is one of :data:`QUANTIZE`.
    """
    path = _required_path(drafter, path, target_source, "of the same tokenizer")
    draft = _load_draft_model(path, target, device, packed, quantize)
    check_vocabularies(target, draft, path)
    if tokenizer is not None and path != BUILTIN:
        check_same_tokenizer(tokenizer, load_tokenizer(path), path)
    return draft


def given_draft_model(draft_source: Any, target: LanguageModel, tokenizer: Any | None) -> LanguageModel:
    """A draft model passed as an object, checked against the target like one from a folder.

    Args:
        draft_source: a ``PreTrainedModel``, which may be the target's own network, or a :class:`LanguageModel`.
    """
    draft_source = unwrapped(draft_source)
    check_handed_in(draft_source)
    name = type(draft_source).__name__
    if draft_source is target:
        raise ValueError(f"this {name} is the target itself: give its .model to draft with it")
    draft = draft_source if isinstance(draft_source, LanguageModel) else wrap(draft_source)
    check_vocabularies(target, draft, name)
    if tokenizer is not None and not isinstance(draft_source, LanguageModel):
        check_same_tokenizer(tokenizer, load_tokenizer(draft_source), name)
    return draft


def build_foreign_draft_model(
    name: str,
    path: str | None,
    target: LanguageModel,
    target_source: Any,
    tokenizer: Any | None,
    device: Any,
    quantize: str = NONE,
) -> tuple[LanguageModel, Any]:
    """The draft model of a ``name:PATH`` spec and its tokenizer, which may differ from the target's.

    It is loaded on ``device``, or the target's device if that is ``None``.
    """
    path = _required_path(name, path, target_source, "and its tokenizer")
    if tokenizer is None:
        raise ValueError(f"drafter {name!r} needs the target's tokenizer: pass tokenizer=... to load")
    draft = _load_draft_model(path, target, device, quantize=quantize)
    draft_tokenizer = load_tokenizer(resolve(path, "draft"))
    if draft_tokenizer is None:
        raise ValueError(
            f"drafter {name!r} needs the draft model's tokenizer, and {path} has none: copy tokenizer.json into it"
        )
    return draft, draft_tokenizer


def _required_path(drafter: str, path: str | None, target_source: Any, hint: str) -> str:
    if path is None and not is_builtin(target_source):
        raise ValueError(f"drafter {drafter!r} needs a path for this target: {drafter}:PATH (a draft LM {hint})")
    return BUILTIN if path is None else path


def windowed(draft: LanguageModel, window: Window) -> LanguageModel:
    """A draft model that reads a window of the sequence; the model itself if the window is the whole sequence.  Raises
    ``CapabilityError`` for a model that can only read the whole sequence."""
    if not window.size:
        return draft
    if not isinstance(draft, HuggingFaceModel):
        raise CapabilityError(f"{type(draft).__name__} reads the whole text: leave window out")
    return draft.windowed(window)


def _load_draft_model(
    path: str, target: LanguageModel, device: Any, packed: bool = True, quantize: str = NONE
) -> LanguageModel:
    if quantize not in QUANTIZE:
        raise ValueError(f"quantize must be one of {', '.join(QUANTIZE)} for a draft model, not {quantize!r}")
    # A draft model may have any distribution, so small ones run in bfloat16 if a step is faster than in float32 on this
    # CPU (docs/log.md).  A few bits of packed products depend on the batch, so only a target with the same property
    # gets a packed draft model.
    device = target.device if device is None else device
    on_cpu = device is None or str(device) == "cpu"
    if is_gguf(path) and not on_cpu:
        raise LoadError(
            f"the draft model {path} is a GGUF file, which runs on the cpu, and the target is on {target.device}: give "
            "the draft model as a folder"
        )
    small = on_cpu and _is_small(path)
    alike = target.dtype == torch.bfloat16 and getattr(target, "exact", "") == "distribution"
    half = small and packed and alike and _steps_faster_in_bfloat16(path)
    draft = load_model(
        path,
        role="draft",
        dtype=("bfloat16" if half else "float32") if small else None,
        device=device,
        exact="approximate" if small or not packed else "distribution",
        quantize=None if quantize == NONE or (quantize == "auto" and (small or not (on_cpu and packed))) else quantize,
    )
    if small and half:
        _compile(draft)
    return follow(draft, target) if packed else draft


def _compile(draft: LanguageModel, max_rows: int = 32) -> None:
    """Run calls of one row to ``max_rows``: by default eight requests with a new token and three of the last draft
    each.  For every number of rows oneDNN compiles a kernel, which takes two to three times as long as a small model's
    call.  Timing the first drafts would make them look too expensive."""
    with opened(draft, [0]) as (sequence,):
        for rows in range(1, min(max_rows, draft.context_length - 1) + 1):
            draft.forward([Feed(sequence, [0] * rows)])
            draft.commit(sequence, ())


def _files(path: str) -> list[Path]:
    return sorted(Path(resolve(path, "draft")).glob("*.safetensors"))


def _is_small(path: str) -> bool:
    return 0 < sum(file.stat().st_size for file in _files(path)) < 20_000_000


def _steps_faster_in_bfloat16(path: str) -> bool:
    """Judged by the time of one-row products here.  An embedding stands for the vocabulary projection tied to it."""
    if not pays_packed(torch.empty(2, 2, dtype=torch.bfloat16)):
        return False
    shapes: list[tuple[int, ...]] = []
    for file in _files(path):
        try:
            with safe_open(file, "pt") as tensors:
                shapes += [tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
        except SafetensorError:  # loading reports the error
            return False
    matrices = [shape for shape in shapes if len(shape) == 2]
    return step_s(torch.bfloat16, matrices) < step_s(torch.float32, matrices)
