"""Sampling parameters from Transformers' logits processors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from functools import cache
from math import inf
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as hf

from foretoken.core.processed import LogitsProcessor, name_of
from foretoken.core.sampling import FILTERS, SamplingParams

STATEFUL = (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, hf.SynthIDTextWatermarkLogitsProcessor)
"""Processors with state across calls; a distribution must be a pure function of the prefix."""

_OWN_ORDER = (hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper)
"""Processors that our sampler applies itself, in its order: temperature and filters."""


def params_of(
    processors: Sequence[Any], row: int, padding: int, config: GenerationConfig, rows: int = 1
) -> SamplingParams:
    """The sampling parameters of one row of a batch.

    Transformers puts temperature and filters into the processor list.  Those at its end, in our sampler's order, become
    plain parameters, so that distributions need no prefix.  All others stay processors.
    """
    rest = list(processors)
    fields: dict[str, Any] = {}
    if config.do_sample:
        fields["temperature"] = 1.0
        rest, warpers = _split_warpers(rest)
        for warper in warpers:
            name = ("temperature", *FILTERS)[_OWN_ORDER.index(type(warper))]
            fields[name] = getattr(warper, name)
    if rest and type(rest[0]) is hf.RepetitionPenaltyLogitsProcessor and _skips_padding_only(rest[0], padding):
        fields["repetition_penalty"] = rest.pop(0).penalty
    return SamplingParams(**fields, processors=tuple(_for_row(p, row, padding, rows) for p in rest))


def _split_warpers(processors: list[Any]) -> tuple[list[Any], list[Any]]:
    """The list without the trailing warpers that our sampler applies itself in the same order, and those warpers."""
    start, rank = len(processors), len(_OWN_ORDER)
    while start > 0 and type(processors[start - 1]) in _OWN_ORDER[:rank]:
        if not _is_plain(processors[start - 1]):
            break
        start -= 1
        rank = _OWN_ORDER.index(type(processors[start]))
    return processors[:start], processors[start:]


def _is_plain(warper: Any) -> bool:
    """Whether a warper keeps as few tokens as it can, makes the others impossible, and has a value that our sampler
    has: ``top_p=0``, the likeliest token alone, stays Transformers' own."""
    keeps_one = getattr(warper, "min_tokens_to_keep", 1) == 1
    return keeps_one and getattr(warper, "filter_value", -inf) == -inf and getattr(warper, "top_p", 1.0) > 0


def _skips_padding_only(processor: Any, padding: int) -> bool:
    """Whether a repetition penalty counts every real token of the row."""
    ignored = processor.prompt_ignore_length
    return (ignored is None and padding == 0) or isinstance(ignored, Tensor)


def _for_row(processor: Any, row: int, padding: int, rows: int) -> LogitsProcessor:
    """A processor of the whole padded batch, restricted to one row.

    It is called with the row's padding put back in front, so that lengths keep their meaning.
    """
    if isinstance(processor, hf.RepetitionPenaltyLogitsProcessor) and isinstance(
        processor.prompt_ignore_length, Tensor
    ):
        processor = hf.RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=padding)
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed, prompt = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        processor = hf.PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(prompt, sent), 1)
    processor = _of_prompt(processor, row, rows)
    if not padding:
        return processor

    def padded(ids: Tensor, scores: Tensor) -> Tensor:
        return processor(torch.nn.functional.pad(ids, (padding, 0)), scores)

    padded.__name__ = name_of(processor)
    return padded


def _of_prompt(processor: Any, row: int, rows: int) -> Any:
    """A processor of all prompts, restricted to the row's prompt.  A prompt may have several rows, its samples."""
    if isinstance(processor, hf.EncoderRepetitionPenaltyLogitsProcessor):
        prompt = row * len(processor.encoder_input_ids) // rows
        processor = copy.copy(processor)
        processor.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
    elif isinstance(processor, hf.EncoderNoRepeatNGramLogitsProcessor):
        prompt = row * processor.batch_size // rows
        processor = copy.copy(processor)
        processor.generated_ngrams, processor.batch_size = [processor.generated_ngrams[prompt]], 1
    return processor


def tell_row_by_row(hooks: Iterable[Any], rows: int) -> None:
    """Warn once per class of a caller's processors and criteria that they see a batch row by row: their arguments do
    not include the row index."""
    for hook in hooks:
        kind = hook if isinstance(hook, FunctionType) else type(hook)
        if rows > 1 and not kind.__module__.startswith("transformers."):
            _tell_row_by_row(f"{kind.__module__}.{kind.__qualname__}")


@cache
def _tell_row_by_row(name: str) -> None:
    logging.getLogger("foretoken").warning(
        "%s is called one row at a time, with ids [1, n]: use a batch of one if it treats rows differently", name
    )


def holds(criterion: Any, ids: Tensor) -> bool:
    """Whether a stopping criterion ends a sequence with ids [1, n].  Raises ``ValueError`` if it returns several
    values."""
    answer = torch.as_tensor(criterion(ids, None))
    if answer.numel() != 1:
        raise ValueError(
            f"{name_of(criterion)} returned {answer.numel()} rows for one: it is called one row at a time; use a batch "
            "of one"
        )
    return bool(answer)
