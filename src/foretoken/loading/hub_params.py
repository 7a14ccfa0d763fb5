"""Transformers' logits processors as our sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as hf

from foretoken.core.sampling import FILTERS, LogitsProcessor, SamplingParams

STATEFUL = (
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    hf.SynthIDTextWatermarkLogitsProcessor,
)
"""Processors that remember earlier calls: a distribution must be a pure function of the prefix."""

_OWN_ORDER = (hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper)
"""What our own sampler applies itself, in its order: the temperature and the filters."""


def params_of(processors: Sequence[Any], row: int, padding: int, config: GenerationConfig) -> SamplingParams:
    """The row's sampling pipeline.

    Transformers puts temperature and filters into the processor list.  Those at its end, in the order in which our own
    sampler applies them, become plain parameters (so that distributions need no prefix); all others stay processors.
    """
    rest = list(processors)
    own: dict[str, Any] = {}
    if config.do_sample:
        own["temperature"] = 1.0
        rest, warpers = _split_warpers(rest)
        for warper in warpers:
            name = ("temperature", *FILTERS)[_OWN_ORDER.index(type(warper))]
            own[name] = getattr(warper, name)
    if rest and type(rest[0]) is hf.RepetitionPenaltyLogitsProcessor and _skips_padding_only(rest[0], padding):
        own["repetition_penalty"] = rest.pop(0).penalty
    return SamplingParams(**own, processors=tuple(_for_row(p, row, padding) for p in rest))


def _split_warpers(processors: list[Any]) -> tuple[list[Any], list[Any]]:
    """The list without, and with only, the trailing warpers that our sampler applies itself in the same order."""
    start, place = len(processors), len(_OWN_ORDER)
    while start > 0 and type(processors[start - 1]) in _OWN_ORDER[:place]:
        if getattr(processors[start - 1], "min_tokens_to_keep", 1) != 1:
            break
        start -= 1
        place = _OWN_ORDER.index(type(processors[start]))
    return processors[:start], processors[start:]


def _skips_padding_only(processor: Any, padding: int) -> bool:
    """Whether a repetition penalty counts every real token of the row."""
    ignored = processor.prompt_ignore_length
    return (ignored is None and padding == 0) or isinstance(ignored, Tensor)


def _for_row(processor: Any, row: int, padding: int) -> LogitsProcessor:
    """A processor of the whole padded batch as one of this row alone.

    It is called with the row's padding put back in front, so that lengths mean what they meant.
    """
    if isinstance(processor, hf.RepetitionPenaltyLogitsProcessor) and isinstance(
        processor.prompt_ignore_length, Tensor
    ):
        processor = hf.RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=padding)
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        processor = hf.PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(row, sent), 1)
    if not padding:
        return processor

    def padded(ids: Tensor, scores: Tensor) -> Tensor:
        return processor(torch.nn.functional.pad(ids, (padding, 0)), scores)

    return padded
