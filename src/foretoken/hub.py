"""Speculative decoding inside Hugging Face code: ``model.generate(**inputs, custom_generate=ft.custom_generate)``.

Transformers prepares inputs, logits processors and stopping criteria, then calls :func:`custom_generate` in place of
its own decoding loop.  Keyword arguments of ``generate`` with the names of our options are handed through.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretoken.controllers.base import Controller
from foretoken.core.noise import samples_of, seeds_of
from foretoken.drafters.base import Drafter
from foretoken.drafters.model import ModelDrafter
from foretoken.engine.request import Request
from foretoken.engine.stats import SpecStats
from foretoken.hub_params import STATEFUL, params_of
from foretoken.llm import Llm, load
from foretoken.loading import check_vocabularies, load_tokenizer
from foretoken.models import wrap
from foretoken.verifiers.base import Verifier

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


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
    prediction: str | Sequence[int] | Sequence[Sequence[int]] | None = None,
    exact: str = "distribution",
    profile: str | Path | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Decode speculatively for ``model.generate(**inputs, custom_generate=custom_generate)``.

    Greedy output equals that of ``model.generate`` without it (up to ties that rounding turns over); sampled output
    has the same distribution.  The model is left as it was found.  What drafters and controllers learn is forgotten
    after the
    call: :class:`CustomGenerate` keeps it.

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
        allow_lossy: permit verifiers that change the distribution.
        seed: fixes sampled output, whatever drafts; one per row, or one from which the rows count up.  Without one,
            randomness comes from torch's own generator, so that ``torch.manual_seed`` works.
        token_streamer: a Transformers streamer that gets the prompt and then every round's tokens (one row only).
        prediction: what the caller expects in the answer, as in :meth:`foretoken.llm.Llm.generate`: text or token ids
            for all rows, or ids for each.
        exact: as in :func:`foretoken.load`.
        profile: as in :func:`foretoken.load`.
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
    predictions = _predictions(model, prediction, len(rows))
    with _evaluating(model):
        kept = isinstance(drafter, CustomGenerate)
        own = drafter if kept else CustomGenerate(drafter, verifier, controller, allow_lossy, exact, profile)
        llm = own.llm(model, prediction is not None)
        requests = [
            Request(
                prompt,
                params_of(logits_processor, i, row.padding, generation_config),
                room,
                (),
                seeds[i],
                predictions[i],
                True,
            )
            for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
        ]
        _run(llm, requests, rows, stopping_criteria, input_ids.device)
    return _result(rows, input_ids, generation_config)


class CustomGenerate:
    """:func:`custom_generate` with settings of its own, which keeps what drafters and controllers learn between calls::

        generate = ft.CustomGenerate(drafter="suffix")
        model.generate(**inputs, custom_generate=generate)

    It holds the model that it was called with last, and begins anew when it is called with another one or when the
    model's weights have changed.  Its arguments are those of the same names of :func:`custom_generate`.
    """

    def __init__(
        self,
        drafter: Any = "auto",
        verifier: str | Verifier = "auto",
        controller: str | Controller = "auto",
        allow_lossy: bool = False,
        exact: str = "distribution",
        profile: str | Path | None = None,
    ) -> None:
        self.drafter, self.verifier, self.controller = drafter, verifier, controller
        self.allow_lossy, self.exact, self.profile = allow_lossy, exact, profile
        self._llm: Llm | None = None
        self._made_for: Hashable = None

    def __call__(self, model: Any, input_ids: Tensor, *args: Any, **options: Any) -> Tensor | SpeculativeOutput:
        """What :meth:`generate` of a Transformers model calls."""
        return custom_generate(model, input_ids, *args, drafter=self, **options)  # type: ignore[misc]

    def llm(self, model: Any, predicted: bool = False) -> Llm:
        """The engine for a model.

        Args:
            model: a ``PreTrainedModel``.
            predicted: whether the caller says what is expected in the answer, which is then drafted first.
        """
        made_for = (id(model), _state_of(model), predicted)
        if self._llm is None or self._made_for != made_for:
            self._llm, self._made_for = self._make(model, predicted), made_for
        return self._llm

    def _make(self, model: Any, predicted: bool) -> Llm:
        drafter = self.drafter
        if drafter is not None and not isinstance(drafter, str | Drafter | list | tuple):
            target, draft = wrap(model), wrap(drafter)
            check_vocabularies(target, draft, type(drafter).__name__)
            drafter = ModelDrafter(draft)
        return load(
            model,
            drafter,
            self.verifier,
            self.controller,
            exact=self.exact,
            profile=self.profile,
            allow_lossy=self.allow_lossy,
            graphs=False,
            prefix_cache=False,
            known=predicted,
        )


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
    if seed is None:  # drawn, so that the text is the same however much is drafted: the controller looks at the clock
        seed = int(torch.randint(2**62, ()))
    if isinstance(seed, int):
        return samples_of(seeds_of(seed, 1)[0], count)
    if len(seed) != count:
        raise ValueError(f"{len(seed)} seeds for {count} rows: give one per row, or one number")
    return seeds_of(list(seed), count)


def _predictions(model: Any, prediction: Any, count: int) -> Sequence[Sequence[int] | None]:
    """Token ids for each row."""
    if prediction is None:
        return [None] * count
    if isinstance(prediction, str):
        tokenizer = load_tokenizer(model)
        if tokenizer is None:
            raise ValueError("a prediction in words needs the model's tokenizer, and there is none: give token ids")
        prediction = tokenizer.encode(prediction, add_special_tokens=False)
    if not prediction or isinstance(prediction[0], int):
        return [list(prediction)] * count
    if len(prediction) != count:
        raise ValueError(f"{len(prediction)} predictions for {count} rows: give one per row, or one for all")
    return [list(row) for row in prediction]


def _state_of(model: Any) -> Hashable:
    """Changes when a weight is replaced, moved, or written to in place."""
    return tuple(
        (id(weight), weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        for weight in model.parameters()
    )


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off; put a model in training back into training."""
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        for module in training:
            module.training = True


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
