"""Speculative decoding inside Hugging Face code: ``model.generate(**inputs, custom_generate=ft.custom_generate)``.

Transformers prepares inputs, logits processors and stopping criteria, then calls :func:`custom_generate` in place of
its own decoding loop.  Keyword arguments of ``generate`` with the names of our options are handed through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretoken.controllers.base import Controller
from foretoken.drafters.base import Drafter
from foretoken.drafters.model import ModelDrafter
from foretoken.engine.request import Request
from foretoken.engine.stats import SpecStats
from foretoken.llm import Llm, assemble
from foretoken.loading import build_drafter, check_vocabularies, default_drafter, load_tokenizer
from foretoken.models import wrap
from foretoken.noise import samples_of, seeds_of
from foretoken.sampling import LogitsProcessor, SamplingParams
from foretoken.verifiers.base import Verifier

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

STATEFUL = (
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    hf.SynthIDTextWatermarkLogitsProcessor,
)
"""Processors that remember earlier calls: a law must be a pure function of the prefix."""


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What ``return_dict_in_generate=True`` gives: ``sequences`` [B, n], and one :class:`SpecStats` per row."""

    stats: list[SpecStats] | None = None  # Transformers allows one required field only


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    drafter: Any = "auto",
    verifier: str | Verifier = "auto",
    controller: str | Controller = "auto",
    allow_lossy: bool = False,
    seed: int | Sequence[int] | None = None,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Decode speculatively for ``model.generate(**inputs, custom_generate=custom_generate)``.

    Greedy output equals that of ``model.generate`` without it (up to ties that rounding turns over); sampled output
    has the same law.  The model is wrapped anew in every call and left as it was found.

    Args:
        model: the target.
        input_ids: [B, n] prompts, left-padded.
        logits_processor: Transformers' processors, temperature and filters included.
        stopping_criteria: end-of-text ids and lengths are handled here, others are asked after every token with the
            row's ids [1, n].
        generation_config: pad token and output form.
        synced_gpus: not supported.
        streamer: Transformers (5.24) does not hand it to a custom loop: use ``token_streamer``.
        drafter: spec string, drafter, a draft model (``PreTrainedModel``), or ``None`` for plain decoding.
        verifier: as in :func:`foretoken.load`.
        controller: as in :func:`foretoken.load`.
        allow_lossy: permit verifiers that change the law.
        seed: fixes sampled output, whatever drafts; one per row, or one from which the rows count up.  Without one,
            randomness comes from torch's own generator, so that ``torch.manual_seed`` works.
        token_streamer: a Transformers streamer that gets the prompt and then every round's tokens (one row only).
        model_kwargs: what the model's own forward would get; only ``attention_mask`` is used.

    Returns:
        [B, n + new] token ids, shorter rows padded on the right.

    Raises:
        ValueError: beams, encoder-decoder models, scores or attentions as output, stateful processors, padding that is
            not on the left, or what :func:`foretoken.load` refuses.
    """
    _check_supported(model, input_ids, generation_config, logits_processor, synced_gpus)
    prompts, paddings = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    rows = [
        _Row(list(full), padding, streamer or token_streamer)
        for full, padding in zip(input_ids.tolist(), paddings, strict=True)
    ]
    if rows[0].streamer is not None and len(rows) > 1:
        raise ValueError("a streamer shows one row: pass a batch of one, or no token_streamer")
    lengths = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
    room = min(lengths, default=input_ids.shape[1] + 20) - input_ids.shape[1]
    seeds = _seeds(seed, len(rows))
    with _evaluating(model):
        llm = _llm(model, drafter, verifier, controller, allow_lossy)
        requests = [
            Request(
                prompt, _params(logits_processor, i, row.padding, generation_config), room, (), seeds[i], None, True
            )
            for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
        ]
        _run(llm, requests, rows, stopping_criteria, input_ids.device)
    return _result(rows, input_ids, generation_config)


# -- what comes in ---------------------------------------------------------------------------------------------------


@dataclass
class _Row:
    """One row of the batch: ``full`` holds padding, prompt and output."""

    full: list[int]
    padding: int
    streamer: Any = None
    stats: SpecStats = field(default_factory=SpecStats)
    done: bool = False


def _check_supported(
    model: Any, input_ids: Tensor, config: GenerationConfig, processors: Sequence[Any], synced_gpus: bool
) -> None:
    problems = {
        "encoder-decoder models": bool(getattr(model.config, "is_encoder_decoder", False)),
        "beam search (num_beams > 1)": (config.num_beams or 1) > 1,
        "inputs_embeds without input_ids": input_ids.shape[1] == 0,
        "synced_gpus": synced_gpus,
    }
    if config.return_dict_in_generate:
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            problems[name] = bool(getattr(config, name, False))
    problems.update({type(p).__name__: isinstance(p, STATEFUL) for p in processors})
    found = [name for name, wrong in problems.items() if wrong]
    if found:
        raise ValueError(f"foretoken.custom_generate does not support {', '.join(found)}: leave it out of this call")


def _unpadded(input_ids: Tensor, mask: Tensor | None) -> tuple[list[list[int]], list[int]]:
    """Prompts without their left padding, and how much of it each row had."""
    rows: list[list[int]] = input_ids.tolist()
    if mask is None:
        return rows, [0] * len(rows)
    kept = mask.bool()
    lengths = kept.sum(-1).tolist()
    paddings = [kept.shape[1] - length for length in lengths]
    for i, padding in enumerate(paddings):
        if not bool(kept[i, padding:].all()):
            raise ValueError("the attention mask has holes or right padding: use a tokenizer with padding_side='left'")
        if padding == kept.shape[1]:
            raise ValueError(f"row {i} is empty: its attention mask is all zero")
    return [row[padding:] for row, padding in zip(rows, paddings, strict=True)], paddings


def _seeds(seed: int | Sequence[int] | None, count: int) -> Sequence[int | None]:
    if seed is None or isinstance(seed, int):
        return samples_of(seeds_of(seed, 1)[0], count)
    if len(seed) != count:
        raise ValueError(f"{len(seed)} seeds for {count} rows: give one per row, or one number")
    return seeds_of(list(seed), count)


def _llm(model: Any, drafter: Any, verifier: Any, controller: Any, allow_lossy: bool) -> Llm:
    target = wrap(model)
    if drafter is not None and not isinstance(drafter, str | Drafter | list | tuple):
        draft = wrap(drafter)
        check_vocabularies(target, draft, type(drafter).__name__)
        drafter = ModelDrafter(draft)
    if isinstance(drafter, str | list | tuple) and drafter != "auto":
        # Only a draft model from disk needs the tokenizer, to be compared with its own.
        tokenizer = load_tokenizer(model) if ":" in str(drafter) else None
        drafter = build_drafter(drafter, target, target_source=model, tokenizer=tokenizer, device=model.device)
    elif drafter == "auto":
        drafter = build_drafter(default_drafter(target, model), target, target_source=model)
    return assemble(target, drafter, verifier, controller, None, allow_lossy=allow_lossy)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off; put a model in training back into training."""
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        for module in training:
            module.training = True


# -- sampling --------------------------------------------------------------------------------------------------------

_OWN_ORDER = (hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper)


def _params(processors: Sequence[Any], row: int, padding: int, config: GenerationConfig) -> SamplingParams:
    """The row's sampling pipeline.

    Transformers puts temperature and filters into the processor list.  Those at its end, in the order in which our own
    sampler applies them, become plain parameters (so that laws need no prefix); all others stay processors.
    """
    rest = list(processors)
    own: dict[str, Any] = {}
    if config.do_sample:
        own["temperature"] = 1.0
        rest, warpers = _split_warpers(rest)
        for warper in warpers:
            name = ("temperature", "top_k", "top_p", "min_p")[_OWN_ORDER.index(type(warper))]
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


# -- decoding --------------------------------------------------------------------------------------------------------


def _run(
    llm: Llm, requests: Sequence[Request], rows: Sequence[_Row], criteria: StoppingCriteriaList, device: torch.device
) -> None:
    """Serve all rows as one batch; every token is checked against the criteria, a row ends at the first that holds."""
    eos = {int(t) for c in criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id.flatten().tolist()}
    others = [c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
    by_id: dict[int, _Row] = {}
    try:
        for request, row in zip(requests, rows, strict=True):
            by_id[llm.engine.add(request)] = row
            if row.streamer is not None:
                row.streamer.put(torch.tensor([row.full]))
        while llm.engine.busy:
            for run, emission in llm.engine.step():
                if emission.error is not None:
                    raise emission.error
                row = by_id[run.id]
                row.stats = run.stats
                new = _kept(row, emission.token_ids, eos, others, device)
                if row.streamer is not None and new:
                    row.streamer.put(torch.tensor(new))
                if row.done:
                    llm.engine.cancel(run.id)
    finally:
        llm.engine.close()
    for row in rows:
        if row.streamer is not None:
            row.streamer.end()


def _kept(row: _Row, tokens: Sequence[int], eos: set[int], others: Sequence[Any], device: torch.device) -> list[int]:
    """Append tokens to a row until a criterion ends it; return those that were kept."""
    new: list[int] = []
    for token in tokens:
        row.full.append(token)
        new.append(token)
        row.done = token in eos or _holds(row, others, device)
        if row.done:
            break
    return new


def _holds(row: _Row, criteria: Sequence[Any], device: torch.device) -> bool:
    if not criteria:
        return False
    ids = torch.tensor([row.full], device=device)
    return any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in criteria)


def _result(rows: Sequence[_Row], input_ids: Tensor, config: GenerationConfig) -> Tensor | SpeculativeOutput:
    longest = max(len(row.full) for row in rows)
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is None and any(len(row.full) < longest for row in rows):
        raise ValueError("rows ended at different lengths and there is no pad token: set pad_token_id")
    filler = 0 if pad is None else int(pad)
    sequences = torch.tensor(
        [row.full + [filler] * (longest - len(row.full)) for row in rows],
        dtype=input_ids.dtype,
        device=input_ids.device,
    )
    if config.return_dict_in_generate:
        return SpeculativeOutput(sequences=cast(torch.LongTensor, sequences), stats=[row.stats for row in rows])
    return sequences
